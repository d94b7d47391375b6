"""Variables of a model that a loss computes from rows: those of one device that has all rows, or an error."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx

import zerojax

ROWS = 64
BATCH = {
    "x": np.random.default_rng(0).standard_normal((ROWS, 4)).astype(np.float32),
    "mask": np.random.default_rng(1).random((ROWS, 10)) < 0.4,
    "label": np.arange(ROWS) % 7,
}
START = {
    "seen": jnp.int32(0),
    "steps": jnp.int32(0),
    "last": jnp.uint32(0),
    "of_label": jnp.zeros(7, jnp.int32),
    "any": jnp.zeros(10, bool),
    "all": jnp.ones(10, bool),
    "most": jnp.int32(-5),
    "percent": jnp.int32(0),
    "total": jnp.float32(0),
    "usage": jnp.zeros(7),
    "mean": jnp.float32(0),
    "rows": jnp.int32(0),
    "elements": jnp.float32(0),
    "rare": jnp.float32(1),
    "peak": jnp.float32(0),
    "ratio": jnp.float32(0),
}


def updated(before, batch):
    """The variables after a batch: sums, extremes and means over its rows, in several dtypes."""
    mask, label = batch["mask"], batch["label"]
    return {
        "seen": before["seen"] + mask.sum(),
        "steps": before["steps"] + 1,
        "last": label.sum().astype(jnp.uint32),
        "of_label": before["of_label"].at[label].add(1),
        "any": before["any"] | mask.any(0),
        "all": before["all"] & mask.all(0),
        "most": jnp.maximum(before["most"], mask.sum(1).max()),
        "percent": (100 * mask.mean()).astype(jnp.int32),
        "total": before["total"] + mask.sum(),
        "usage": 0.9 * before["usage"] + 0.1 * jax.nn.one_hot(label, 7).sum(0),
        "mean": 0.9 * before["mean"] + 0.1 * mask.mean(),
        "rows": before["rows"] + len(label),
        "elements": before["elements"] + mask.size,
        "rare": 0.99 * before["rare"] + 0.01 * (label == 1).sum(),
        "peak": jnp.maximum(before["peak"], batch["x"].max()),
        "ratio": (batch["x"][:, :1] * mask).sum() / mask.sum(),
    }


class Counting(nnx.Module):
    def __init__(self, *, rngs):
        self.layer = nnx.Linear(4, 4, rngs=rngs)
        self.counts = nnx.Dict({name: nnx.Variable(a) for name, a in START.items()})

    def __call__(self, batch):
        for name, a in updated({name: v[...] for name, v in self.counts.items()}, batch).items():
            self.counts[name][...] = a
        return self.layer(batch["x"])


def loss(model, batch):
    return jnp.mean(model(batch) ** 2)


def in_microbatches(batch, num_devices, num):
    """The microbatches of a step, each of which has rows of all devices."""
    parts = {name: a.reshape(num_devices, num, -1, *a.shape[1:]) for name, a in batch.items()}
    return [{name: a[:, i].reshape(-1, *a.shape[3:]) for name, a in parts.items()} for i in range(num)]


@pytest.mark.parametrize(("num_devices", "stage", "num_microbatches"), [(8, 0, 1), (8, 0, 2), (8, 3, 1), (4, 3, 4)])
def test_variables_are_those_of_one_device(num_devices, stage, num_microbatches):
    zero = zerojax.Zero(zerojax.make_mesh(devices=jax.devices()[:num_devices]), stage)
    state, step = zero.init(Counting, optax.sgd(0.1)), zero.train_step(loss, num_microbatches=num_microbatches)
    want = START
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            state, _ = step(state, BATCH)
            for microbatch in in_microbatches(BATCH, num_devices, num_microbatches):
                want = updated(want, microbatch)
    for name, a in state.model_state["counts"].items():
        shards = {np.asarray(shard.data).tobytes() for shard in a.get_value().addressable_shards}
        assert len(shards) == 1, name
        np.testing.assert_allclose(a.get_value(), want[name], rtol=1e-5, err_msg=name)


def test_metrics_of_flax_count_the_rows_of_all_devices():
    class Model(nnx.Module):
        def __init__(self, *, rngs):
            self.layer, self.average = nnx.Linear(4, 4, rngs=rngs), nnx.metrics.Average()

    def loss(model, batch):
        model.average.update(values=batch["x"][:, 0])
        return jnp.mean(model.layer(batch["x"]) ** 2)

    zero = zerojax.Zero(zerojax.make_mesh(), 3)
    state, _ = zero.train_step(loss)(zero.init(Model, optax.sgd(0.1)), BATCH)
    np.testing.assert_allclose(state.model().average.compute(), BATCH["x"][:, 0].mean(), rtol=1e-5)


def test_a_variable_that_is_averaged_over_devices_is_named_with_its_line():
    class Model(nnx.Module):
        def __init__(self, *, rngs):
            self.layer, self.spread = nnx.Linear(4, 4, rngs=rngs), nnx.Variable(jnp.float32(0))

    def loss(model, batch):
        model.spread[...] = jnp.std(batch["x"])
        return jnp.mean(model.layer(batch["x"]) ** 2)

    zero = zerojax.Zero(zerojax.make_mesh())
    line = loss.__code__.co_firstlineno + 1
    with pytest.warns(UserWarning, match=rf"averaged\n  got:      spread.*test_variables.py:{line}\n.*\n.* by sums"):
        zero.train_step(loss).trace(zero.init(Model, optax.sgd(0.1)), BATCH)


UNKNOWN = {
    "set": (lambda v, batch, key: v.at[batch["label"]].set(1), jnp.int32),
    "random": (lambda v, batch, key: jax.random.randint(key, (7,), 0, 9), jnp.int32),
    "one row": (lambda v, batch, key: v | (batch["label"][0] > 3), jnp.bool_),
    "std": (lambda v, batch, key: v + jnp.std(batch["label"]).astype(jnp.uint8), jnp.uint8),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_variable_that_each_device_would_have_another_of_is_refused(name):
    update, dtype = UNKNOWN[name]

    class Model(nnx.Module):
        def __init__(self, *, rngs):
            self.layer, self.found = nnx.Linear(4, 4, rngs=rngs), nnx.Variable(jnp.zeros(7, dtype))

    def loss(model, batch, key):
        model.found[...] = update(model.found[...], batch, key)
        return jnp.mean(model.layer(batch["x"]) ** 2)

    zero = zerojax.Zero(zerojax.make_mesh())
    state, line = zero.init(Model, optax.sgd(0.1)), update.__code__.co_firstlineno
    got = rf"found.*7\], at .*test_variables.py:{line}"
    with pytest.raises(ValueError, match=rf"loss: a variable depends on which rows.*\n  got: .*{got}\n  fix: .*sum"):
        zero.train_step(loss).trace(state, BATCH)


class Counted(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        seen = self.variable("counts", "seen", lambda: jnp.int32(0))
        seen.value += mask.sum() * (not self.is_initializing())
        return nn.Dense(4)(x)


def test_a_linen_collection_is_summed_and_the_audit_expects_it():
    zero, arrays = zerojax.Zero(zerojax.make_mesh(), 2), (BATCH["x"], BATCH["mask"])

    def loss(variables, batch):
        y, updates = Counted().apply(variables, batch["x"], batch["mask"], mutable=["counts"])
        return jnp.mean(y**2), updates

    state = zero.init(lambda key: Counted().init(key, *arrays), optax.sgd(0.1))
    state, _ = zero.train_step(loss, audit="error")(state, BATCH)
    assert state.model_state["counts"]["seen"] == BATCH["mask"].sum()
