"""Hand-written stage 3 steps with `shard_map`, correct or with a planted fault, for tests of the audit.

The correct step gathers each layer in bf16 after the previous layer has computed, and again in the backward pass.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax.comm.schedule import after, event

WIDTH, LAYERS, ROWS = 32, 4, 32


def create(key, width=WIDTH):
    keys = jax.random.split(key, 2 * LAYERS)
    layer = lambda i: {
        "up": jax.random.normal(keys[2 * i], (width, 2 * width)) / 8,
        "down": jax.random.normal(keys[2 * i + 1], (2 * width, width)) / 8,
    }
    return {"layers": {str(i): layer(i) for i in range(LAYERS)}}


def block(x, layer):
    return x + jnp.tanh(x @ layer["up"]) @ layer["down"]


def loss(params, batch):
    x = batch["x"]
    for layer in params["layers"].values():
        x = block(x, layer)
    return jnp.mean((x - batch["y"]) ** 2)


def batch_aval(width=WIDTH, rows=ROWS):
    return {name: jax.ShapeDtypeStruct((rows, width), jnp.float32) for name in "xy"}


def zero_and_state(devices=None, stage=3, width=WIDTH):
    zero = zerojax.Zero(zerojax.make_mesh(devices=devices), stage=stage, precision="bf16")
    return zero, zero.eval_init(functools.partial(create, width=width), optax.sgd(0.1, momentum=0.9))


def gather(shard):
    """The full form of a shard. The transpose is a reduce_scatter."""
    return lax.all_gather(shard, "data", axis=0, tiled=True)


def gather_in_fp32(shard):
    return gather(shard.astype(jnp.float32)).astype(shard.dtype)


def own_part(total, dim=0):
    """This device's shard of a sum."""
    size = total.shape[dim] // lax.axis_size("data")
    return lax.dynamic_slice_in_dim(total, lax.axis_index("data") * size, size, dim)


@jax.custom_vjp
def gather_then_all_reduce(shard):
    return gather(shard)


gather_then_all_reduce.defvjp(
    lambda shard: (gather(shard), None), lambda _, gradient: (own_part(lax.psum(gradient, "data")),)
)

RECOMPUTE_ALL = jax.checkpoint_policies.nothing_saveable
DENY_LIST = jax.checkpoint_policies.save_anything_except_these_names("gathered")


def step(
    zero,
    state,
    batch,
    *,
    gather=gather,
    policy=RECOMPUTE_ALL,
    ordered=True,
    k=1,
    hoisted=False,
    donated=True,
    reduces=True,
):
    """A traced step over (state, batch).

    Args:
        zero: the mesh and the specs.
        state, batch: avals.
        gather: gathers a shard.
        policy: the policy of each layer's `jax.checkpoint`.
        ordered: whether each gather waits for the previous layer.
        k: number of microbatches, in a loop.
        hoisted: whether all weights are gathered before that loop.
        donated: whether the state is donated.
        reduces: whether gradients are summed over the devices.
    """
    data = P("data")
    if not reduces:
        gather = jax.custom_vjp(gather)
        gather.defvjp(lambda s: (lax.all_gather(s, "data", tiled=True), None), lambda _, g: (g[: len(g) // 8],))

    def gathered(layer, x):
        shards = after(list(layer.values()), event([x]) if ordered else [])
        full = [checkpoint_name(gather(shard), "gathered").astype(x.dtype) for shard in shards]
        return dict(zip(layer, full, strict=True))

    @functools.partial(jax.checkpoint, policy=policy)
    def layer_on_shards(x, layer):
        return block(x, layer if hoisted else gathered(layer, x))

    def device_loss(params, batch):
        x = batch["x"]
        for layer in params["layers"].values():
            x = layer_on_shards(x, layer)
        return jnp.mean((x - batch["y"]).astype(jnp.float32) ** 2)

    def gradients(params, batch):
        params, batch = (jax.tree.map(lambda a: a.astype(jnp.bfloat16), tree) for tree in (params, batch))
        if hoisted:
            params, reduced = jax.vjp(lambda params: jax.tree.map(gather, params), params)
        if k == 1:
            return jax.grad(device_loss)(params, batch)
        parts = jax.tree.map(lambda a: a.reshape(k, -1, *a.shape[1:]), batch)
        body = lambda total, part: (jax.tree.map(jnp.add, total, jax.grad(device_loss)(params, part)), None)
        total, _ = lax.scan(body, jax.tree.map(jnp.zeros_like, params), parts)
        return reduced(total)[0] if hoisted else total

    specs = jax.tree.map(lambda _: data, state.params)
    manual = jax.shard_map(gradients, mesh=zero.config.mesh, in_specs=(specs, data), out_specs=specs, check_vma=False)

    def step(state, batch):
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), manual(state.params, batch))
        updates, opt_state = state.layout.tx.update(grads, state.opt_state, state.master)
        master = optax.apply_updates(state.master, updates)
        params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), master)
        return dataclasses.replace(state, step=state.step + 1, params=params, master=master, opt_state=opt_state)

    place = jax.sharding.NamedSharding(zero.config.mesh, data)
    batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), batch)
    shardings = jax.tree.map(lambda a: a.sharding, state)
    jitted = jax.jit(step, donate_argnums=(0,) if donated else (), out_shardings=shardings)
    return jitted.trace(state, batch)
