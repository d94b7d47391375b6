"""Checkpoints of states that are stored with zeros: they have logical shapes, and fit any number of devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.small_run import digest_of

import zerojax
from zerojax import Zero
from zerojax.checkpoints import contents, store
from zerojax.checkpoints.pieces import LimitedReader
from zerojax.exchange import parameters

ROWS = 840  # of which 3, 5, 7 and 8 devices get the same number each


def create(key):
    keys = jax.random.split(key, 3)
    return {
        "stack": jax.random.normal(keys[0], (3, 10, 11)) / 4,
        "w": jax.random.normal(keys[1], (11, 10)),
        "b": jnp.zeros((11,)),
    }


def loss(params, x):
    for layer in params["stack"]:
        x = jnp.tanh((x @ layer + params["b"]) @ params["w"])
    return jnp.mean((x - 1) ** 2)


def setting(n, stage, precision="bf16"):
    return Zero(zerojax.make_mesh(devices=jax.devices()[:n]), stage, precision, stacked=("stack",))


def fresh(zero):
    return zero.init(create, optax.chain(optax.adamw(1e-2), optax.ema(0.9)))


def batch():
    return np.random.default_rng(0).normal(size=(ROWS, 10)).astype(np.float32)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A step saved on 7 devices: (its directory, the digests of its state)."""
    directory, zero = tmp_path_factory.mktemp("run"), setting(7, 3)
    state = fresh(zero)
    assert all(leaf.num_zeros for leaf in state.layout.leaves)
    step = zero.train_step(loss)
    with zero.checkpoints(directory, every=2) as checkpoints:
        for _ in range(2):
            state, metrics = step(state, batch())
            checkpoints.update(state, metrics)
    return directory, digest_of(state)


def test_there_are_no_zeros_on_disk(saved):
    directory, _ = saved
    manifest = store.read_manifest(directory, 2)
    assert manifest.leaves["params/stack"].shape == (3, 10, 11)
    assert manifest.leaves["opt_state/1/ema/w"].shape == (11, 10)
    with LimitedReader(directory, 2) as reader:
        for path, leaf in manifest.leaves.items():
            read = np.concatenate([piece.reshape(-1) for piece in reader.pieces(path, leaf)])  # checks the shape
            assert read.size == np.prod(leaf.shape, dtype=int)


@pytest.mark.parametrize(("n", "stage"), [(1, 0), (8, 3), (5, 2), (3, 1), (7, 0)])
def test_a_state_is_restored_onto_any_number_of_devices(saved, n, stage):
    directory, want = saved
    zero = setting(n, stage, "fp32" if n == 5 else "bf16")
    with zero.checkpoints(directory) as checkpoints:
        state, step = checkpoints.resume(fresh(zero))
    assert step == 2 and digest_of(state) == want
    losses = []
    train = zero.train_step(loss)
    for _ in range(2):
        state, metrics = train(state, batch())
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, continued(directory), rtol=1e-2)  # one rounding in bf16 is 4e-3


def continued(directory):
    """The losses of two more steps on the devices that saved."""
    zero = setting(7, 3)
    with zero.checkpoints(directory) as checkpoints:
        state, _ = checkpoints.resume(fresh(zero))
    train, losses = zero.train_step(loss), []
    for _ in range(2):
        state, metrics = train(state, batch())
        losses.append(float(metrics["loss"]))
    return losses


def test_zeros_that_are_damaged_on_a_device_change_no_digest():
    """Nothing reads them: the digest is that of the logical array, with the same index for each element."""
    state = fresh(setting(7, 3))
    want = digest_of(state)
    path = "opt_state/1/ema/w"
    zeros = next(a for p, a in contents.arrays(state).items() if p == path)
    assert contents.logical_shapes(state)[path] == (11, 10) != zeros.shape
    damaged = jax.tree.map(lambda a: a.at[11:].set(7.0) if a is zeros else a, state)
    assert np.any(contents.arrays(damaged)[path] != zeros) and digest_of(damaged) == want


def test_weights_are_exported_and_loaded(saved, tmp_path):
    directory, _ = saved
    parameters.export(directory, 2, tmp_path / "model.safetensors")
    zero = setting(5, 3)
    loaded = parameters.load(fresh(zero), tmp_path / "model.safetensors")
    with zero.checkpoints(directory) as checkpoints:
        restored, _ = checkpoints.resume(fresh(zero))
    for a, b in zip(jax.tree.leaves(loaded.master), jax.tree.leaves(restored.master), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    for a, b in zip(jax.tree.leaves(loaded.params), jax.tree.leaves(restored.params), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
