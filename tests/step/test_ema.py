"""The average of the parameters that the optimizer keeps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file

import zerojax
from zerojax import Zero
from zerojax.cli import main

pytestmark = pytest.mark.xdist_group("ema")
DECAY, RATE, STEPS, SKIPPED = 0.999, 2.0**-10, 40, 20


def create(key):
    return {"w": jnp.ones((12, 4)), "frozen": jnp.ones(8)}


def loss(params, x):
    """Its gradient is 1/4 everywhere."""
    return jnp.mean(x @ params["w"] + params["frozen"][:4])


@functools.cache
def trained(stage, precision, offload):
    """(the Zero, the state after some steps, the average of ones that moved as its parameters did)."""
    zero = Zero(zerojax.make_mesh(), stage, precision, frozen="frozen", offload=offload)
    tx = zerojax.stochastic_rounding(optax.sgd(RATE)) if precision == "bf16_params" else optax.sgd(RATE)
    state = zero.init(create, zerojax.ema(tx, DECAY))
    step, x, moved, want = zero.train_step(loss), np.ones((8, 12), np.float32), np.ones((12, 4)), np.ones((12, 4))
    for i in range(STEPS):
        state, metrics = step(state, x if i != SKIPPED else x * np.inf)
        if i != SKIPPED:
            moved = moved - RATE / 4 if state.master else np.asarray(state.logical().params["w"], np.float64)
            want = DECAY * want + (1 - DECAY) * moved
    assert metrics["skipped"] == 1
    return zero, state, want


@pytest.mark.parametrize(
    ("stage", "precision", "offload"),
    [
        (0, "bf16", "none"),
        (3, "bf16", "none"),  # 16 rows in shards, of which four are zeros
        (3, "bf16", "optimizer"),
        (3, "bf16_params", "none"),
    ],
)
def test_an_average_of_parameters_in_bf16_follows_them_in_fp32(stage, precision, offload):
    zero, state, want = trained(stage, precision, offload)
    average = state.logical().ema_params
    assert average["w"].dtype == jnp.float32 and average["frozen"] is None
    np.testing.assert_allclose(average["w"], want, rtol=1e-6)
    averaged = zero.with_params(state, state.ema_params).logical()
    np.testing.assert_array_equal(averaged.params["w"], average["w"].astype(jnp.bfloat16))
    if averaged.master:
        np.testing.assert_array_equal(averaged.master["w"], average["w"])


def test_an_average_is_saved_and_exported_by_name(tmp_path):
    zero, state, _ = trained(3, "bf16", "none")
    with zero.checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(state)
    with zero.checkpoints(tmp_path / "run") as checkpoints:
        resumed, _ = checkpoints.resume(zero.eval_init(create, state.layout.tx))
    np.testing.assert_array_equal(resumed.ema_params["w"], state.ema_params["w"])
    shown = CliRunner().invoke(main, ["checkpoint", "export", str(tmp_path / "run"), str(tmp_path), "--ema"])
    assert shown.exit_code == 0, shown.output
    exported = load_file(tmp_path / "model.safetensors")
    assert set(exported) == {"w", "frozen"}
    np.testing.assert_array_equal(exported["w"], state.logical().ema_params["w"])


def test_a_decay_may_depend_on_the_number_of_updates():
    tx = zerojax.ema(optax.sgd(1.0), lambda count: count / (count + 1))  # the mean of all values
    params, state = {"w": jnp.zeros(2)}, tx.init({"w": jnp.zeros(2)})
    for _ in range(3):
        updates, state = tx.update({"w": jnp.full(2, -1.0)}, state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(state.ema_params["w"], (1 + 2 + 3) / 3, rtol=1e-6)


def test_a_missing_average_and_a_decay_out_of_range_are_errors():
    state = Zero(zerojax.make_mesh()).eval_init(lambda key: {"w": jax.random.normal(key, (8,))}, optax.sgd(1.0))
    with pytest.raises(ValueError, match=r"state: there is no single average.*\n.*keeps none\n  fix: .*zerojax.ema"):
        _ = state.ema_params
    with pytest.raises(ValueError, match=r"ema: the decay is 1.0\n  fix: "):
        zerojax.ema(optax.sgd(1.0), 1.0)
