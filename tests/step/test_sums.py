"""The loss and the metrics of a step and of an evaluation are those of one device that has all rows, or it is said."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax

X = (np.random.default_rng(0).standard_normal((32, 6)) * np.linspace(1, 3, 32)[:, None]).astype(np.float32)
MASK = np.random.default_rng(1).random(32) < 0.4
BATCH = {"x": X, "mask": MASK}


def create(key):
    return {"w": jax.random.normal(key, (6, 8))}


def errors(params, batch):
    return jnp.square(batch["x"] @ params["w"]).sum(-1)


def ratio(params, batch):
    return jnp.sum(batch["mask"] * errors(params, batch)) / jnp.maximum(jnp.sum(batch["mask"]), 1)


SUMS = {
    "a sum": lambda p, b: errors(p, b).sum(),
    "a sum, in a jit": lambda p, b: jax.jit(jnp.sum)(errors(p, b)) + 0.1 * jnp.sum(p["w"] ** 2),
    "a sum, over the rows of all devices": lambda p, b: errors(p, b).sum() / len(X),
    "a sum, multiplied": lambda p, b: errors(p, b).mean() * b["x"].shape[0],
    "a sum, all at once": lambda p, b: -jnp.sum(b["x"] @ p["w"]),
    "a ratio of sums": lambda p, b: ratio(p, b) + 0.1 * jnp.sum(p["w"] ** 2),
}
MEANS = {
    "a mean": lambda p, b: errors(p, b).mean(),
    "a mean with weights of one": lambda p, b: jnp.average(errors(p, b), weights=jnp.ones(b["x"].shape[0])),
    "a mean where all count": lambda p, b: jnp.mean(errors(p, b), where=np.ones(b["x"].shape[0], bool)),
    "a mean of sums over features": lambda p, b: jnp.mean(jnp.sum(b["x"] @ p["w"], axis=-1)),
    "a sum of means over rows": lambda p, b: jnp.sum(jnp.mean((b["x"] @ p["w"]) ** 2, axis=0)),
    "a penalty of weights": lambda p, b: errors(p, b).mean() + jnp.sum(p["w"] ** 2),
    "a sum with a weight": lambda p, b: zerojax.Weighted(errors(p, b).sum(), jnp.float32(b["x"].shape[0])),
    "a ratio to what is learned": lambda p, b: errors(p, b).mean() / jnp.mean(jnp.exp(b["x"] @ p["w"])),
}


def metrics(params, batch):
    """Metrics by name: those that are means, and those that need more than a mean of the values of devices."""
    e, mask = errors(params, batch), batch["mask"]
    bins = (e // 30).astype(jnp.int32).clip(0, 3)
    found = e > 20
    return {
        "mean": e.mean(),
        "weights": jnp.linalg.norm(params["w"]),
        "weighted": zerojax.Weighted(jnp.sum(mask * e), jnp.sum(mask)),
        "max": e.max(),
        "min": jnp.min(batch["x"]),
        "any": jnp.any(e > 300),
        "all": jnp.all(e > 0),
        "sum": e.sum(),
        "shifted": e.sum() + 1,
        "in thousands": e.sum() / 1000,
        "a hundredth": 0.01 * e.sum(),
        "wrong": e.size - jnp.sum(found),
        "rows": batch["x"].shape[0],
        "elements": jnp.ones(batch["x"].shape).sum(),
        "ones": jnp.average(e, weights=jnp.ones(e.shape)),
        "standard error": jnp.sqrt(jnp.mean(e**2) / e.size),
        "count": jnp.sum(found),
        "masked": ratio(params, batch),
        "where": jnp.mean(e, where=mask),
        "f1": 2 * jnp.sum(found * mask) / (jnp.sum(found) + jnp.sum(mask)),
        "root": jnp.sqrt(e.mean()),
        "variance": jnp.mean(e**2) - e.mean() ** 2,
        "range": e.max() - e.min(),
        "norm": jnp.linalg.norm(jnp.mean(batch["x"], axis=0)) * jnp.sum(params["w"] ** 2),
        "mode": jnp.bincount(bins, length=4).max(),
        "entropy": jax.scipy.special.entr(jax.nn.one_hot(bins, 4).mean(0)).sum(),
        "in a loop": jax.lax.scan(lambda c, row: (jnp.maximum(c, row), None), -jnp.inf, e)[0],
        "invalid": jnp.max(jnp.where(e > 300, jnp.nan, e)),
    }


def with_metrics(params, batch):
    return errors(params, batch).mean(), metrics(params, batch)


def assert_as_on_one_device(found, params, batch):
    want = {"loss": errors(params, batch).mean(), **metrics(params, batch)}
    for name, value in want.items():
        value = value[0] / value[1] if isinstance(value, zerojax.Weighted) else value
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)


def started(loss_fn, num_devices, stage=3, **settings):
    zero = zerojax.Zero(zerojax.make_mesh(devices=jax.devices()[:num_devices]), stage)
    return zero, zero.init(create, optax.sgd(0.1)), zero.train_step(loss_fn, **settings)


@pytest.mark.parametrize(("stage", "num_microbatches"), [(0, 1), (3, 2)])
def test_metrics_of_a_step_are_those_of_one_device(stage, num_microbatches):
    _, state, step = started(with_metrics, 8, stage, num_microbatches=num_microbatches)
    params = jax.device_get(state.params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, found = step(state, BATCH)
    assert_as_on_one_device(found, params, BATCH)


@pytest.mark.parametrize("stage", [0, 3])
def test_metrics_of_an_evaluation_are_those_of_one_device(stage):
    """Of one batch, and of a set in parts of 24, 7 and 1 rows for a device."""
    zero, state, _ = started(with_metrics, 8, stage)
    step, rows = zero.eval_step(with_metrics), {name: a[:29] for name, a in BATCH.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_as_on_one_device(step(state, BATCH), state.model(), BATCH)
        assert_as_on_one_device(zerojax.evaluate(step, state, rows, batch_size=24), state.model(), rows)


def test_metrics_of_a_gradient_are_those_of_one_device():
    zero = zerojax.Zero(zerojax.make_mesh(), 3)
    params = create(jax.random.key(0))
    (loss, found), _ = jax.jit(zero.value_and_grad(with_metrics, has_aux=True))(zero.shard(params), BATCH)
    assert_as_on_one_device({"loss": loss, **found}, params, BATCH)


def collectives(loss_fn, **settings):
    _, state, step = started(loss_fn, 8, 0, **settings)
    return re.findall(r"\b(psum|pmax|pmin)\w*\[", str(step.trace(state, BATCH).jaxpr))


def test_only_extremes_need_one_more_collective():
    names = ["mean", "sum", "masked", "norm"]
    some = lambda p, b: (errors(p, b).mean(), {name: metrics(p, b)[name] for name in names})
    extremes = lambda p, b: (errors(p, b).mean(), {name: metrics(p, b)[name] for name in ("max", "min", "any")})
    plain = collectives(MEANS["a mean"])
    assert collectives(some) == plain
    assert sorted(collectives(extremes)) == sorted([*plain, "pmax"])


UNKNOWN = {
    "std": lambda e: jnp.std(e),
    "median": lambda e: jnp.median(e),
    "first": lambda e: e[0],
}


def test_metrics_that_depend_on_the_division_of_rows_are_warned_about():
    lines = {name: fn.__code__.co_firstlineno for name, fn in UNKNOWN.items()}
    loss = lambda p, b: (errors(p, b).mean(), {name: fn(errors(p, b)) for name, fn in UNKNOWN.items()})
    zero, state, step = started(loss, 8)
    listed = ", ".join(rf"metric '{name}' \(.*test_sums.py:{lines[name]}\)" for name in sorted(UNKNOWN))
    text = rf"{listed} depend on how the rows are divided\n"
    with pytest.warns(UserWarning, match=rf"loss: {text}.*of 8 parts.*\n  fix: .*means, sums") as caught:
        state, _ = step(state, BATCH)
    assert len(caught) == 1
    with pytest.warns(UserWarning, match=rf"evaluate: {text}.*the set is evaluated"):
        zerojax.evaluate(zero.eval_step(loss), state, BATCH, batch_size=16)


@pytest.mark.parametrize("name", SUMS)
def test_a_loss_that_is_no_mean_is_found(name, stage=3):
    """It is trained as it is, and evaluated exactly."""
    zero, state, step = started(SUMS[name], 8, stage)
    got = "1/8 of that" if "ratio" not in name else "of the ratios of 8 parts of the batch.*\n.*test_sums.py:"
    with pytest.warns(UserWarning, match=rf"the loss is {name.split(',')[0]} over rows\n.*{got}"):
        state, _ = step(state, BATCH)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = zerojax.evaluate(zero.eval_step(SUMS[name]), state, BATCH, batch_size=16)
    assert found["loss"] == pytest.approx(float(SUMS[name](state.model(), BATCH)), rel=1e-5)


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_is_not_taken_for_a_sum(name):
    zero, state, step = started(MEANS[name], 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step.trace(state, BATCH)
        zero.eval_step(MEANS[name]).rows.trace(state, zerojax.step.batch.RowsOfSet(BATCH, np.ones(32, bool)))


def test_on_one_device_a_sum_is_the_sum():
    _, state, step = started(SUMS["a sum"], 1)
    expected = float(errors(state.model(), BATCH).sum())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, metrics = step(state, BATCH)
    assert float(metrics["loss"]) == pytest.approx(expected, rel=1e-6)
