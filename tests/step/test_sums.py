"""A loss or metric that is a sum over rows, not a mean: a warning in training, and an error in an evaluation."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax

X = np.random.default_rng(0).standard_normal((32, 6)).astype(np.float32)


def create(key):
    return {"w": jax.random.normal(key, (6, 8))}


def errors(params, batch):
    return jnp.square(batch["x"] @ params["w"]).sum(-1)


def count(params, batch):
    return jnp.sum(errors(params, batch) > 1)


SUMS = {
    "the loss": lambda p, b: errors(p, b).sum(),
    "the loss, in a jit": lambda p, b: jax.jit(jnp.sum)(errors(p, b)) + 0.1 * jnp.sum(p["w"] ** 2),
    "the loss, all at once": lambda p, b: -jnp.sum(b["x"] @ p["w"]),
    "metric 'correct'": lambda p, b: (errors(p, b).mean(), {"correct": count(p, b).astype(jnp.float32)}),
}
MEANS = {
    "a mean": lambda p, b: errors(p, b).mean(),
    "a mean of sums over features": lambda p, b: jnp.mean(jnp.sum(b["x"] @ p["w"], axis=-1)),
    "a penalty of weights": lambda p, b: errors(p, b).mean() + jnp.sum(p["w"] ** 2),
    "a sum with a weight": lambda p, b: zerojax.Weighted(errors(p, b).sum(), jnp.float32(b["x"].shape[0])),
    "a count": lambda p, b: (errors(p, b).mean(), {"correct": zerojax.Weighted(count(p, b), 0)}),
}


def started(loss_fn, num_devices, stage=3):
    zero = zerojax.Zero(zerojax.make_mesh(devices=jax.devices()[:num_devices]), stage)
    return zero, zero.init(create, optax.sgd(0.1)), zero.train_step(loss_fn)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", SUMS)
def test_a_sum_is_found(name, stage):
    zero, state, step = started(SUMS[name], 8, stage)
    with pytest.warns(UserWarning, match=rf"{name.split(',')[0]} is a sum over rows\n.*1/8 of the sum"):
        state, _ = step(state, {"x": X})
    with pytest.raises(ValueError, match=f"evaluate: {name.split(',')[0]} is a sum over rows"):
        zerojax.evaluate(zero.eval_step(SUMS[name]), state, {"x": X}, batch_size=16)


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_is_not_taken_for_a_sum(name):
    zero, state, step = started(MEANS[name], 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state, _ = step(state, {"x": X})
    found = zerojax.evaluate(zero.eval_step(MEANS[name]), state, {"x": X[:29]}, batch_size=16)
    if "correct" in found:
        assert found["correct"] == int(count(state.model(), {"x": X[:29]}))


def test_on_one_device_a_sum_is_the_sum():
    _, state, step = started(SUMS["the loss"], 1)
    expected = float(errors(state.model(), {"x": X}).sum())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, metrics = step(state, {"x": X})
    assert float(metrics["loss"]) == pytest.approx(expected, rel=1e-6)
