"""Runs whose state is in host memory: interrupted, resumed, evaluated, exported and loaded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.small_run import STEPS, adam, batch, create, loss

import zerojax
from zerojax.exchange import parameters


def zero_of(offload, stage=3, num_devices=8):
    mesh = zerojax.make_mesh(devices=jax.devices()[:num_devices])
    return zerojax.Zero(mesh, stage, "bf16", offload=offload)


def run(offload, directory, num_steps, stage=3):
    zero = zero_of(offload, stage)
    return zerojax.fit(zero, zero.init(create, adam()), zero.train_step(loss), batch, num_steps, directory)


def assert_in_host_memory(state):
    arrays = jax.tree.leaves((state.master, state.opt_state))
    assert {a.sharding.memory_kind for a in arrays if a.ndim} == {"pinned_host"}


def assert_equal(got, want):
    """As compared by `tests/offload/test_offloaded_optimizer.py`, which says why bits may differ."""
    weights = [jax.tree.leaves((state.params, state.master)) for state in (got, want)]
    for a, b in zip(*weights, strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=1e-2, atol=1e-5)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run("none", tmp_path_factory.mktemp("whole"), STEPS)


@pytest.mark.full
@pytest.mark.parametrize("offload", ["optimizer", "params"])
def test_an_interrupted_run_ends_like_one_on_the_devices(tmp_path, whole, offload):
    run(offload, tmp_path, STEPS // 2)
    state = run(offload, tmp_path, STEPS)
    assert int(state.step) == STEPS
    assert_in_host_memory(state)
    matrices = [a for a in jax.tree.leaves(state.params) if a.ndim == 2]
    assert {a.sharding.memory_kind for a in matrices} == {"pinned_host" if offload == "params" else "device"}
    assert_equal(state, whole)


@pytest.mark.parametrize(
    ("before", "after"),
    [("none", "params"), *(pytest.param("params", to, marks=pytest.mark.full) for to in ("optimizer", "none"))],
)
def test_a_run_goes_on_with_another_offload(tmp_path, whole, before, after):
    run(before, tmp_path, STEPS // 2)
    assert_equal(run(after, tmp_path, STEPS), whole)


@pytest.mark.parametrize("offload", ["params"])
def test_exported_weights_are_loaded_into_host_memory(tmp_path, whole, offload):
    parameters.export_params(whole.master, tmp_path / "weights")
    state = parameters.load(zero_of(offload).init(create, adam()), tmp_path / "weights")
    assert_in_host_memory(state)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), state.master, whole.master)
    zero = zero_of(offload)
    _, metrics = zero.train_step(loss)(state, batch(0))
    assert np.isfinite(metrics["loss"])


@pytest.mark.parametrize("offload", ["optimizer", "params"])
def test_an_offloaded_state_is_exported_and_evaluated(tmp_path, whole, offload):
    zero = zero_of(offload)
    state = run(offload, tmp_path / "run", STEPS)
    parameters.export(tmp_path / "run" / "checkpoints", STEPS, tmp_path / "weights")
    loaded = parameters.load(zero.init(create, adam()), tmp_path / "weights")
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), loaded.master, state.master)
    found = zero.eval_step(loss)(state, batch(0))["loss"]
    expected = zero_of("none").eval_step(loss)(whole, batch(0))["loss"]
    assert float(found) == pytest.approx(float(expected), rel=1e-2)
    model = state.model()
    assert jax.tree.leaves(nnx.state(model) if isinstance(model, nnx.Module) else model)


class Normed(nnx.Module):
    def __init__(self, *, rngs):
        self.layer, self.norm = nnx.Linear(32, 32, rngs=rngs), nnx.BatchNorm(32, axis_name="data", rngs=rngs)


@pytest.mark.parametrize(("num_devices", "offload"), [(1, "params"), (8, "optimizer")])
def test_a_model_with_values_remains_beside_its_state(num_devices, offload):
    model = Normed(rngs=nnx.Rngs(0))
    before = [np.array(a) for a in jax.tree.leaves(nnx.state(model, nnx.Param, nnx.BatchStat))]
    zero = zero_of(offload, num_devices=num_devices)
    step = zero.train_step(lambda model, batch: jnp.mean((model.norm(model.layer(batch["x"])) - batch["y"]) ** 2))
    state, _ = step(zero.init(model, adam()), batch(0))
    assert int(state.step) == 1
    after = jax.tree.leaves(nnx.state(model, nnx.Param, nnx.BatchStat))
    for a, b in zip(after, before, strict=True):
        np.testing.assert_array_equal(a, b)  # neither deleted nor updated
