"""A small model with its data, short runs with checkpoints, and functions that damage their files."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zerojax
from zerojax.checkpoints import contents
from zerojax.checkpoints.digest import digests
from zerojax.sharding import placement

WIDTH, ROWS, EVERY = 32, 16, 2


def create(key, width=WIDTH):
    keys = jax.random.split(key, 5)
    layer = lambda key: {"w": jax.random.normal(key, (width, WIDTH)) / 8, "b": jnp.zeros((WIDTH,))}
    return {"layers": {str(i): layer(keys[i]) for i in range(3)}, "odd": jax.random.normal(keys[4], (7,))}


def loss(params, batch, key):
    x = batch["x"] * jax.random.bernoulli(key, 0.9, batch["x"].shape)
    for layer in params["layers"].values():
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return jnp.mean((x - batch["y"]) ** 2) + jnp.sum(params["odd"] ** 2)


def batch(i):
    rng = np.random.default_rng(i)
    return {name: rng.normal(size=(ROWS, WIDTH)).astype(np.float32) for name in "xy"}


def adam():
    return optax.adamw(optax.linear_schedule(1e-2, 1e-3, 10))


def setting(stage=3, precision="bf16", num_devices=8, **mesh):
    return zerojax.Zero(zerojax.make_mesh(devices=jax.devices()[:num_devices], **mesh), stage, precision)


def train(zero, directory, until, tx=None, begin=None, **options):
    """Trains with checkpoints, from the newest one. Returns (the losses of this run, the last state)."""
    state = zero.init(create, tx or adam()) if begin is None else begin
    step, losses = zero.train_step(loss), []
    with zero.checkpoints(directory, every=EVERY, **options) as checkpoints:
        state, start = checkpoints.resume(state)
        for i in range(start, until):
            state, metrics = step(state, batch(i))
            losses.append(float(metrics["loss"]))
            checkpoints.update(state, metrics)
    return losses, state


def digest_of(state):
    return {path: d.text for path, d in digests(contents.arrays(state), contents.logical_shapes(state)).items()}


def renamed(key):
    """Like `create`, with one leaf renamed."""
    params = create(key)
    params["layers"]["2"]["bias"] = params["layers"]["2"].pop("b")
    return params


def largest_file(directory, step=4):
    """The largest file of a step that is read. (Small arrays are also written a second time, for all processes.)"""
    return max((directory / f"step_{step}" / "arrays" / "d").iterdir(), key=lambda file: file.stat().st_size)


def flip(file):
    """Flips one bit."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(bytes(content))


def zero_a_page(file):
    content = bytearray(file.read_bytes())
    start = min(4096, len(content) // 2)
    content[start : start + 4096] = bytes(len(content[start : start + 4096]))
    file.write_bytes(bytes(content))


def cut(file):
    """Truncates the file to half its size."""
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def change_manifest(directory, change, step=4):
    file = directory / f"step_{step}" / "manifest" / "metadata"
    file.write_text(change(file.read_text()))


class Iterator:
    """A data iterator with a state."""

    def __init__(self, state):
        self.state = state

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


STEPS = 7


def run(step, directory, num_steps=STEPS, data=batch, **options):
    zero = setting()
    options = {"log_every": 1, "checkpoints": {"every": 3}, **options}
    return zerojax.fit(zero, zero.init(create, adam()), step, data, num_steps, directory, **options)


def with_flipped_bit(state, path, device_id):
    """The state with one bit of a parameter changed in the memory of one device."""
    *outer, name = path.split("/")
    array = functools.reduce(lambda tree, key: tree[key], outer, state.params)[name]
    shards = []
    for shard in array.addressable_shards:
        data = np.array(shard.data)
        if shard.device.id == device_id:
            data.reshape(-1).view(np.uint8)[0] ^= 1
        shards.append(jax.device_put(data, shard.device))
    flipped = jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)
    put = lambda where, leaf: flipped if placement.path_text(where) == path else leaf
    return dataclasses.replace(state, params=jax.tree_util.tree_map_with_path(put, state.params))
