"""`zero.value_and_grad` inside a step that the user writes and jits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax import Weighted, Zero

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def create(key):
    one, two = jax.random.split(key)
    return {
        "in": {"w": jax.random.normal(one, (16, 32)), "b": jnp.ones(32)},
        "out": {"w": jax.random.normal(two, (32, 3))},
    }


def losses(params, x, y):
    h = jnp.tanh(x @ params["in"]["w"] + params["in"]["b"])
    return jnp.sum((h @ params["out"]["w"] - y) ** 2, axis=-1)


def loss(params, x, y):
    return jnp.mean(losses(params, x, y))


def data(rows=32):
    rng = np.random.default_rng(0)
    return rng.standard_normal((rows, 16), dtype=np.float32), rng.standard_normal((rows, 3), dtype=np.float32)


@functools.cache
def expected():
    params = jax.jit(create)(jax.random.key(0))
    return params, jax.value_and_grad(loss)(params, *data())


def specs(tree):
    return [leaf.sharding.spec for leaf in jax.tree.leaves(tree)]


def assert_same(got, want):
    """Compares each leaf relative to its norm."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.linalg.norm(np.asarray(a) - np.asarray(b)) <= 1e-5 * np.linalg.norm(b)


@STAGES
def test_value_and_gradients_are_those_of_jax(stage):
    params, (value, grads) = expected()
    zero = Zero(zerojax.make_mesh(), stage)
    got, got_grads = jax.jit(zero.value_and_grad(loss))(zero.shard(params), *zero.shard_batch(data()))
    np.testing.assert_allclose(got, value, rtol=1e-6)
    assert_same(got_grads, grads)
    sharded = [P("data")] * 3
    assert specs(got_grads) == (sharded if stage >= 1 else [P()] * 3)
    assert specs(zero.shard(params)) == (sharded if stage == 3 else [P()] * 3)


@STAGES
def test_has_aux(stage):
    """Metrics are weighted means over all rows."""
    params, (value, grads) = expected()
    x, y = data()

    def with_metrics(params, x, y):
        return loss(params, x, y), {"x": jnp.mean(x), "positive": Weighted(jnp.sum(y * (y > 0)), jnp.sum(y > 0))}

    zero = Zero(zerojax.make_mesh(), stage)
    fn = jax.jit(zero.value_and_grad(with_metrics, has_aux=True))
    (got, metrics), got_grads = fn(zero.shard(params), *zero.shard_batch((x, y)))
    np.testing.assert_allclose(got, value, rtol=1e-6)
    assert_same(got_grads, grads)
    np.testing.assert_allclose(metrics["x"], x.mean(), rtol=1e-4)
    np.testing.assert_allclose(metrics["positive"], y[y > 0].mean(), rtol=1e-5)


@STAGES
def test_a_weighted_loss(stage):
    params, _ = expected()
    x, y = data()
    weight = np.arange(32, dtype=np.float32)
    zero = Zero(zerojax.make_mesh(), stage)
    weighted = lambda params, x, y, w: Weighted(jnp.sum(losses(params, x, y) * w), jnp.sum(w))
    mean = lambda params: jnp.sum(losses(params, x, y) * weight) / jnp.sum(weight)
    got = jax.jit(zero.value_and_grad(weighted))(zero.shard(params), *zero.shard_batch((x, y, weight)))
    assert_same(got, jax.value_and_grad(mean)(params))


@pytest.mark.parametrize("stage", [0, 3])
def test_frozen_leaves_have_no_gradient(stage):
    params, (_, grads) = expected()
    zero = Zero(zerojax.make_mesh(), stage, frozen=("in/*",))
    _, got = jax.jit(zero.value_and_grad(loss))(zero.shard(params), *zero.shard_batch(data()))
    assert got["in"] == {"w": None, "b": None}
    assert_same(got["out"], grads["out"])


@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_have_the_reduce_dtype(stage):
    params, _ = expected()
    for precision, dtype in ("bf16", jnp.bfloat16), ("bf16_reduce_fp32", jnp.float32):
        zero = Zero(zerojax.make_mesh(), stage, precision)
        _, grads = jax.eval_shape(zero.value_and_grad(loss), params, *data())
        assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype(dtype)}


def test_on_a_hybrid_mesh():
    params, (value, grads) = expected()
    zero = Zero(zerojax.make_mesh(replica=2))
    got, got_grads = jax.jit(zero.value_and_grad(loss))(zero.shard(params), *zero.shard_batch(data()))
    np.testing.assert_allclose(got, value, rtol=1e-6)
    assert_same(got_grads, grads)


def test_rows_that_do_not_divide():
    params, _ = expected()
    with pytest.raises(ValueError, match="does not divide into devices x microbatches"):
        jax.eval_shape(Zero(zerojax.make_mesh()).value_and_grad(loss), params, *data(rows=12))


def test_a_sharded_batch_is_not_moved():
    zero = Zero(zerojax.make_mesh(), 3)
    placed = zero.shard_batch(data())
    again = zero.shard_batch(placed)
    assert all(a is b for a, b in zip(again, placed, strict=True))
    moved = zero.shard_batch(jax.device_put(data(), jax.devices()[0]))
    assert specs(moved) == [P(("data",)), P(("data",))]


def pointers(tree):
    """The addresses of all shards. The CPU client shares the memory of host arrays."""
    return {shard.data.unsafe_buffer_pointer() for a in jax.tree.leaves(tree) for shard in a.addressable_shards}


def given(kind, zero):
    if kind == "on the mesh":  # with the sharding that `shard` gives
        return zero.shard(given("on one device", zero))
    return {"w": jnp.ones((1024, 64)), "b": jnp.ones(3)}


@pytest.mark.parametrize(
    ("kind", "stage", "num_devices"),
    [("on one device", 0, 1), ("on one device", 3, 8), ("on the mesh", 0, 8), ("on the mesh", 3, 8)],
)
def test_arrays_that_are_sharded_live_on_after_the_result_is_donated(kind, stage, num_devices):
    zero = Zero(zerojax.make_mesh(devices=jax.devices()[:num_devices]), stage)
    params = given(kind, zero)
    sharded = zero.shard(params)
    assert not pointers(params) & pointers(sharded)
    state = zero.init(params, optax.adam(1e-3))
    assert not pointers(params) & pointers((state.params, state.opt_state, state.model_state))
    jax.jit(lambda tree: jax.tree.map(lambda a: a + 1, tree), donate_argnums=0)(sharded)
    assert all(np.all(np.asarray(a) == 1) for a in jax.tree.leaves(params))


@pytest.mark.parametrize(("stage", "num_devices"), [(0, 1), (3, 8)])
def test_a_numpy_array_can_be_changed_after_it_is_sharded(stage, num_devices):
    """Large arrays are aligned, so that the CPU client can share their memory."""
    zero = Zero(zerojax.make_mesh(devices=jax.devices()[:num_devices]), stage)
    params = {"w": np.ones((1024, 64), np.float32), "b": np.ones(3, np.float32)}
    sharded, state = zero.shard(params), zero.init(params, optax.adam(1e-3))
    for a in params.values():
        a[:] = 7
    for a in jax.tree.leaves((sharded, state.params)):
        assert np.all(np.asarray(a) == 1)
