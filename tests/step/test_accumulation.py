"""Weighted losses and microbatches: means over all rows are exact, however the rows are divided."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import zoo
from support.parity import loss_of

import zerojax
from zerojax import Weighted, Zero

ROWS = 32
PRODUCT = pytest.mark.parametrize(
    ("stage", "k"),
    [  # tests that share a compiled step run in one process
        pytest.param(stage, k, marks=pytest.mark.xdist_group(f"accumulation-{stage}-{k}"))
        for stage in range(4)
        for k in (1, 2, 4)
    ],
)


def create(key):
    """`scale` is not sharded."""
    return {"w": jax.random.normal(key, (16, 8)), "b": jnp.zeros(8), "scale": jnp.ones(())}


def losses(params, batch):
    return jnp.sum(((batch["x"] @ params["w"] + params["b"]) * params["scale"] - 1) ** 2, axis=-1)


def loss(params, batch):
    """A weighted loss, with plain and weighted metrics. Every row has its own weight."""
    each = losses(params, batch)
    metrics = {
        "plain": jnp.mean(batch["x"]),
        "count": Weighted(jnp.sum(batch["weight"]), 1.0),
        "weighted": Weighted(jnp.sum(batch["weight"] * batch["x"][:, 0]), jnp.sum(batch["weight"])),
    }
    return Weighted(jnp.sum(each * batch["weight"]), jnp.sum(batch["weight"])), metrics


def make_batch(weights="uneven"):
    """A batch whose weights differ by a factor of up to a thousand, and are zero in all rows of some devices."""
    rng = np.random.default_rng(0)
    weight = (10.0 ** rng.uniform(-2, 1, ROWS)).astype(np.float32)
    weight[4:9] = 0
    if weights == "zero":
        weight[:] = 0
    return {"x": rng.standard_normal((ROWS, 16), dtype=np.float32), "weight": weight}


@functools.cache
def expected():
    """(initial parameters, loss, gradient) of the global weighted mean, computed by plain JAX."""
    params = jax.jit(create)(jax.random.key(0))
    batch = make_batch()
    mean = lambda params: jnp.sum(losses(params, batch) * batch["weight"]) / jnp.sum(batch["weight"])
    return (jax.device_get(params), *jax.device_get(jax.value_and_grad(mean)(params)))


@functools.cache
def prepared(stage, k):
    zero = Zero(zerojax.make_mesh(), stage)
    return zero.init(create, optax.sgd(1.0)), zero.train_step(loss, num_microbatches=k)


def run(stage, k, batch):
    state, step = prepared(stage, k)
    return step(jax.tree.map(jnp.copy, state), batch)  # the step donates its argument


@PRODUCT
def test_weighted_losses_and_metrics_are_global_means(stage, k):
    start, mean, grads = expected()
    batch = make_batch()
    state, metrics = run(stage, k, batch)
    np.testing.assert_allclose(metrics["loss"], mean, rtol=1e-5)
    for name, grad in grads.items():
        np.testing.assert_allclose(start[name] - state.params[name], grad, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(metrics["plain"], batch["x"].mean(), rtol=1e-4)
    np.testing.assert_allclose(metrics["count"], batch["weight"].sum() / (8 * k), rtol=1e-5)
    weighted = (batch["weight"] * batch["x"][:, 0]).sum() / batch["weight"].sum()
    np.testing.assert_allclose(metrics["weighted"], weighted, rtol=1e-5)


@PRODUCT
def test_a_batch_without_weight_changes_nothing(stage, k):
    start, *_ = expected()
    state, metrics = run(stage, k, make_batch("zero"))
    assert metrics["loss"] == metrics["weighted"] == metrics["grad_norm"] == 0 and metrics["skipped"] == 0
    for name, value in start.items():
        np.testing.assert_array_equal(state.params[name], value)


def test_no_gradient_flows_through_a_weight():
    """A weight that is computed from the parameters is treated as a constant."""
    zero = Zero(zerojax.make_mesh(), 3)
    state = zero.init(lambda: {"w": jnp.full((8,), 2.0)}, optax.sgd(1.0))
    loss = lambda params, batch: Weighted(jnp.sum(params["w"] * batch["x"]), jnp.sum(params["w"] ** 2))
    state, _ = zero.train_step(loss)(state, {"x": np.ones((8, 8), np.float32)})
    np.testing.assert_allclose(state.params["w"], 2 - 8 / (8 * 32), rtol=1e-6)


@pytest.mark.parametrize(("name", "stage"), [("weighted", 3), ("unused", 0)])
def test_eval_step_reports_the_loss_of_the_first_training_step(name, stage):
    model, zero = zoo.ZOO[name], Zero(zerojax.make_mesh(), stage)
    state = zero.init(model.create, optax.sgd(0.1))
    evaluated = zero.eval_step(loss_of(model))(state, model.batch(0))
    _, trained = zero.train_step(loss_of(model))(state, model.batch(0))
    np.testing.assert_allclose(evaluated["loss"], trained["loss"], rtol=1e-6)


@pytest.mark.parametrize("stage", [3])
def test_eval_step_reports_every_metric(stage):
    zero, batch = Zero(zerojax.make_mesh(), stage), make_batch()
    state = zero.init(create, optax.sgd(1.0))
    evaluated = zero.eval_step(loss)(state, batch)
    _, trained = zero.train_step(loss)(state, batch)
    assert set(evaluated) == {"loss", "plain", "count", "weighted"}
    for name, value in evaluated.items():
        np.testing.assert_allclose(value, trained[name], rtol=1e-6)


@pytest.mark.parametrize("k", [4])
def test_a_scalar_in_the_batch_reaches_every_microbatch(k):
    zero = Zero(zerojax.make_mesh(), 3)
    state = zero.init(create, optax.sgd(1.0))
    scaled = lambda params, batch: jnp.mean(losses(params, batch)) * batch["factor"]
    _, one = zero.train_step(scaled, num_microbatches=k)(state, make_batch() | {"factor": np.float32(1)})
    state = zero.init(create, optax.sgd(1.0))
    _, three = zero.train_step(scaled, num_microbatches=k)(state, make_batch() | {"factor": np.float32(3)})
    np.testing.assert_allclose(three["loss"], 3 * one["loss"], rtol=1e-6)


@pytest.mark.parametrize(("stage", "k", "replica"), [(0, 1, 1), (3, 2, 1), (3, 1, 2)])
def test_model_state_is_averaged_over_devices_and_carried_through_microbatches(stage, k, replica):
    """Each device sees different rows. After the step, all have the mean of their running means, and the same count."""

    def stateful(variables, batch):
        stats = variables["stats"]
        mean = 0.5 * stats["mean"] + 0.5 * jnp.mean(batch["x"])
        return jnp.mean(losses(variables["params"], batch)), {"stats": {"mean": mean, "count": stats["count"] + 1}}

    zero, batch = Zero(zerojax.make_mesh(replica=replica), stage), make_batch()
    stats = lambda: {"mean": jnp.zeros(()), "count": jnp.int32(0)}
    state = zero.init(lambda key: {"params": create(key), "stats": stats()}, optax.sgd(0.1))
    state, metrics = zero.train_step(stateful, num_microbatches=k)(state, batch)
    want = np.zeros(8)
    for part in range(k):
        want = 0.5 * want + 0.5 * batch["x"].reshape(8, k, -1)[:, part].mean(-1)
    np.testing.assert_allclose(state.model_state["stats"]["mean"], want.mean(), rtol=1e-5)
    assert int(state.model_state["stats"]["count"]) == k
    assert "stats" not in metrics


@pytest.mark.parametrize(
    ("stage", "precision", "offload"),
    [
        (0, "bf16", "none"),
        (2, "bf16", "none"),
        (2, "bf16_params", "none"),
        (1, "bf16_params", "optimizer"),
        (3, "bf16_params", "params"),
    ],
)
def test_microbatches_are_summed_in_fp32(stage, precision, offload):
    """64 gradients of 1 + 2^-7, whose partial sums have more digits than bf16. All rows but those of a device are 0."""
    zero = Zero(zerojax.make_mesh(), stage, precision, offload=offload)
    state = zero.init(lambda: {"w": jnp.zeros(16)}, optax.sgd(1.0))
    x = np.zeros((8 * 64, 16), np.float32)
    x[:64] = 1 + 2.0**-7
    step = zero.train_step(lambda params, batch: 8 * jnp.mean(batch["x"] @ params["w"]), num_microbatches=64)
    state, _ = step(state, {"x": x})
    trained = state.params if state.master is None else state.master
    np.testing.assert_array_equal(trained["w"].astype(np.float32), np.full(16, -(1 + 2.0**-7), np.float32))
