"""Tables in which a loss looks up rows are not gathered: the rows travel, with the same values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import PartitionSpec as P
from support import plain, traffic, zoo
from support.parity import TOLERANCES, assert_close, batches, train, with_constant_init

import zerojax
from zerojax import Zero

N, ROWS, WIDTH, TOKENS = 8, 512, 16, 4  # tokens of a device

embed_graph = nnx.split(nnx.eval_shape(lambda: nnx.Embed(ROWS, WIDTH, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))))[0]


def nnx_embed(table, ids):
    return nnx.merge(embed_graph, nnx.State({"embedding": nnx.Param(table)}))(ids)


# Each takes a table [rows, width] and the ids of tokens [batch], some of them repeated, negative or out of bounds.
WAYS = {
    "index": lambda table, ids: table[jnp.clip(ids, -3, ROWS - 1)],
    "get_clip": lambda table, ids: table.at[ids].get(mode="clip"),
    "get_fill": lambda table, ids: table.at[ids].get(mode="fill", fill_value=2.0),
    "take": lambda table, ids: jnp.nan_to_num(jnp.take(table, ids, axis=0)),
    "two_dims": lambda table, ids: table[jnp.clip(ids.reshape(-1, 2), 0, ROWS - 1)].reshape(-1, WIDTH),
    "transposed": lambda table, ids: jnp.take(table.T, ids, axis=1, mode="clip").T,
    "nnx": lambda table, ids: nnx_embed(table, jnp.clip(ids, 0, ROWS - 1)).astype(jnp.float32),
    "linen": lambda table, ids: linen.Embed(ROWS, WIDTH).apply({"params": {"embedding": table}}, ids % ROWS),
}


def loss_in_all_ways(tables, batch):
    total = 0.0
    for k, way in enumerate(WAYS):
        rows = WAYS[way](tables[way], batch["ids"])
        total += jnp.mean(jnp.sum(rows * batch["targets"], axis=1) ** 2) * (1 + k)
    return total


def tables_and_batch():
    rng = np.random.default_rng(0)
    tables = {way: rng.standard_normal((ROWS, WIDTH), np.float32) for way in WAYS}
    ids = rng.integers(-3, ROWS + 3, N * TOKENS, dtype=np.int32)
    ids[::3] = 7
    return tables, {"ids": ids, "targets": rng.standard_normal((N * TOKENS, WIDTH), np.float32)}


@pytest.mark.parametrize("stage", [2, 3])
def test_every_way_to_look_up_rows_has_the_values_and_gradients_of_one_device(stage):
    """On one device, the gradients of bf16 rows are summed in bf16: of a row that occurs 11 times, to 11 x 2^-9."""
    tables, batch = tables_and_batch()
    loss, grads = jax.value_and_grad(loss_in_all_ways)(tables, batch)
    zero = Zero(zerojax.make_mesh(), stage)
    value_and_grad = jax.jit(zero.value_and_grad(loss_in_all_ways))
    got_loss, got = value_and_grad(zero.shard(tables), zero.shard_batch(batch))
    np.testing.assert_allclose(got_loss, loss, rtol=1e-5)
    for way in WAYS:
        assert np.abs(grads[way]).max() > 0
        tolerance = 2e-2 if way == "nnx" else 1e-5
        np.testing.assert_allclose(got[way], grads[way], rtol=tolerance, atol=tolerance * 1e-1, err_msg=way)


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_of_tokens_that_share_a_row_are_added_in_fp32(stage):
    """One token has a gradient of 1 and the others of a device one of 2^-9, which would be lost next to it in bf16."""
    zero = Zero(zerojax.make_mesh(), stage, "bf16_reduce_fp32")
    state = zero.init(lambda: {"table": jnp.zeros((ROWS, N))}, optax.sgd(1.0))
    loss = lambda params, batch: N * jnp.mean(jnp.sum(params["table"][batch["ids"]] * batch["x"], axis=(1, 2)))
    x = np.zeros((N, TOKENS, N), np.float32)
    x[0, 0], x[0, 1:] = 1, 2.0**-9
    state, _ = zero.train_step(loss)(state, {"ids": np.full((N, TOKENS), 7, np.int32), "x": x})
    np.testing.assert_array_equal(state.master["table"][7], np.full(N, -(1 + 3 * 2.0**-9), np.float32))


def collectives(zero, loss, params, batch):
    traced = jax.jit(zero.value_and_grad(loss)).trace(zero.shard(params), zero.shard_batch(batch))
    return traffic.collectives_of(traced.jaxpr.jaxpr, dict(zero.config.mesh.shape))


@pytest.mark.parametrize(("stage", "times"), [(2, 1), (3, 2)])
def test_only_rows_and_indices_are_sent(stage, times):
    """At stage 3 rows and their gradients, at stage 2 the gradients; and nothing of any table."""
    tables, batch = tables_and_batch()
    found = [c for c in collectives(Zero(zerojax.make_mesh(), stage), loss_in_all_ways, tables, batch) if c.size > 8]
    assert {c.kind for c in found} == {"all_to_all", "all_gather"}
    sent = lambda kind: sum(c.sent_elements for c in found if c.kind == kind)
    assert sent("all_to_all") == times * len(WAYS) * TOKENS * WIDTH * (N - 1) / N
    assert sent("all_gather") == times * len(WAYS) * TOKENS * N * (N - 1) / N
    assert {c.dtype for c in found if c.kind == "all_gather"} == {"int32"}


def kinds(params, loss, rows=N * TOKENS, **options):
    """The kinds of collectives that move more than scalars."""
    batch = {"ids": np.arange(rows, dtype=np.int32) % 8}
    return {c.kind for c in collectives(Zero(zerojax.make_mesh(), 3, **options), loss, params, batch) if c.size > 8}


def test_a_table_is_gathered_if_that_sends_less_or_its_width_is_not_sharded():
    table = {"table": np.ones((ROWS, WIDTH), np.float32)}
    loss = lambda params, batch: jnp.mean(params["table"][batch["ids"]] ** 2)
    lookup, gather = {"all_to_all", "all_gather"}, {"all_gather", "reduce_scatter"}
    assert kinds(table, loss) == lookup
    assert kinds(table, loss, rows=N * ROWS) == gather
    assert kinds(table, loss, shard_dims={"table": 0}) == gather
    twice = lambda params, batch: jnp.mean((2 * params["table"] + 1)[batch["ids"]] ** 2)
    assert kinds(table, twice) == gather  # not the leaf itself


def test_a_frozen_table_has_no_gradient_and_one_of_integers_is_gathered():
    params = {"table": np.ones((ROWS, WIDTH), np.float32), "scale": np.ones(N, np.float32)}
    loss = lambda params, batch: jnp.mean(params["table"][batch["ids"]] * params["scale"][0])
    lookups = lambda params: [
        c
        for c in collectives(
            Zero(zerojax.make_mesh(), 3, frozen=["table"]), loss, params, {"ids": np.arange(N, dtype=np.int32)}
        )
        if c.kind == "all_to_all"
    ]
    assert len(lookups(params)) == 1
    assert lookups(params | {"table": np.ones((ROWS, WIDTH), np.int8)}) == []


def test_matrices_outside_of_layers_are_sharded_over_their_width():
    def create(rngs):
        layers = [nnx.Dict(up=nnx.Linear(16, 64, rngs=rngs), down=nnx.Linear(64, 16, rngs=rngs)) for _ in range(2)]
        return nnx.Dict(embed=nnx.Embed(64, 16, rngs=rngs), layers=nnx.List(layers), head=nnx.Linear(16, 64, rngs=rngs))

    leaves = Zero(zerojax.make_mesh()).eval_init(create, optax.sgd(1)).layout.leaves
    dims = {leaf.path: (leaf.dim, leaf.reason) for leaf in leaves}
    assert dims["embed/embedding"] == (1, "width of a table")
    first = (0, "first divisible dim")
    assert dims["layers/0/down/kernel"] == dims["head/kernel"] == first


OPTIONS = {
    "buckets": ({"bucket_bytes": 4 * 32 * 8}, {}, {}),  # 8 of 32 rows at a time
    "replicas": ({"num_microbatches": 2}, {"replica": 2}, {}),
    "model": ({"num_microbatches": 2}, {"model": 2}, {"partition_specs": {"embed/embedding": P("model")}}),
    "recomputed": ({"remat": "full", "prefetch": 2}, {}, {}),
}


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", OPTIONS)
def test_training_with_a_tied_table_follows_one_device(name, stage):
    """The table is gathered for the head, and its two gradients are added."""
    step_options, mesh_options, zero_options = OPTIONS[name]
    model, tx = zoo.ZOO["tied"], optax.sgd(0.1)
    zero = Zero(zerojax.make_mesh(**mesh_options), stage, **zero_options)
    step = zero.train_step(model.loss, **step_options)
    found = traffic.collectives_of_step(step, zero.eval_init(model.create, tx), model.batch(0))
    assert sum(c.count for c in found if c.kind == "all_to_all") >= stage - 1
    num_microbatches = step_options.get("num_microbatches", 1)
    want = plain.run(model, tx, batches(model, 3), num_microbatches=num_microbatches)
    got, _ = train(zero, with_constant_init(model), batches(model, 3), tx, **step_options)
    assert_close(got, want, **TOLERANCES["fp32"])
