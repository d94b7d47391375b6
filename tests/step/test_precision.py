"""Mixed precision: the dtypes of a step, the loss scale, and skipped steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.plain import numbers

import zerojax
from zerojax import Precision, Zero

FP16 = Precision(
    compute_dtype=jnp.float16, reduce_dtype=jnp.float16, initial_scale=1024.0, growth_interval=2
)  # grows after two finite steps


def create(key):
    return {"params": {"w": jax.random.normal(key, (16, 8)), "b": jnp.zeros(3)}, "stats": {"mean": jnp.zeros(())}}


def loss(variables, batch):
    y = batch["x"] @ variables["params"]["w"]
    mean = 0.5 * variables["stats"]["mean"] + 0.5 * jnp.mean(y).astype(jnp.float32)
    return jnp.mean(y**2) + jnp.sum(variables["params"]["b"]), {"stats": {"mean": mean}}


def batch(bad=None, row=0):
    x = np.random.default_rng(0).standard_normal((16, 16), dtype=np.float32)
    if bad is not None:
        x[row] = bad
    return {"x": x}


def start(stage, precision, tx=None):
    zero = Zero(zerojax.make_mesh(), stage, precision)
    return zero.init(create, tx or optax.adam(1e-2)), zero.train_step(loss)


def test_precision_text():
    policy = Precision(jnp.float32, jnp.float16, jnp.bfloat16, cast_inputs=False, initial_scale=2.0**15)
    rows = dict(row.split("  ", 1) for row in str(policy).splitlines())
    assert {name.strip(): value.strip() for name, value in rows.items()} == {
        "master parameters": "float32",
        "sums over microbatches": "float32",
        "computation, all-gather": "float16",
        "reduce-scatter, all-reduce": "bfloat16",
        "floating batch leaves": "as given",
        "loss scaling": "dynamic, from 32768, doubles after 2000 finite steps",
    }
    assert "loss scaling" in str(Precision()) and str(Precision()).endswith("none")


def test_unknown_preset():
    with pytest.raises(ValueError, match="precision: unknown preset 'fp8'") as error:
        Zero(zerojax.make_mesh(), precision="fp8")
    assert "fp32, bf16, bf16_reduce_fp32, bf16_params, fp16" in str(error.value)


@pytest.mark.parametrize(("stage", "cast_inputs"), [(0, False), (3, True)])
def test_the_loss_sees_the_compute_dtype(stage, cast_inputs):
    """For parameters, and for floating batch leaves with `cast_inputs`; integers and model state are never cast."""
    seen = {}

    def observing(variables, batch):
        leaves = (variables["params"]["w"], variables["stats"]["mean"], batch["x"], batch["n"])
        seen["dtypes"] = [str(leaf.dtype) for leaf in leaves]
        return loss(variables, batch)

    zero = Zero(zerojax.make_mesh(), stage, Precision(compute_dtype=jnp.bfloat16, cast_inputs=cast_inputs))
    state = zero.eval_init(create, optax.adam(1e-2))
    for step in zero.train_step(observing), zero.eval_step(observing):
        seen.clear()
        step.trace(state, batch() | {"n": np.arange(16, dtype=np.int32)})
        assert seen["dtypes"] == ["bfloat16", "float32", "bfloat16" if cast_inputs else "float32", "int32"]


@pytest.mark.parametrize("stage", [0, 3])
def test_wide_frozen_leaves_are_computed_in_the_compute_dtype(stage):
    """Also in an evaluation. The state stores them in fp32."""
    seen = []

    def observing(params, batch):
        seen.append({name: str(leaf.dtype) for name, leaf in params.items()})
        return jnp.mean(batch["x"] @ params["base"] @ params["w"])

    zero = Zero(zerojax.make_mesh(), stage, "bf16", frozen=["base"])
    state = zero.eval_init(lambda: {"base": jnp.ones((16, 8)), "w": jnp.ones((8, 8))}, optax.sgd(0.1))
    assert state.params["base"].dtype == jnp.float32
    for step in zero.train_step(observing), zero.eval_step(observing):
        seen.clear()
        step.trace(state, batch())
        assert seen and all(dtypes == {"base": "bfloat16", "w": "bfloat16"} for dtypes in seen)


@pytest.mark.parametrize("precision", ["fp32", "bf16", FP16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_with_a_bad_gradient_is_skipped(stage, precision):
    """One bad row on one device is enough. Parameters, optimizer state and model state do not change in any bit."""
    state, step = start(stage, precision)
    state, _ = step(state, batch())
    values = lambda state: numbers((state.params, state.master, state.opt_state, state.model_state))
    before = values(state)
    for count, bad in enumerate([np.nan, np.inf], start=1):
        state, metrics = step(state, batch(bad, row=11))
        for a, b in zip(values(state), before, strict=True):
            np.testing.assert_array_equal(a, b)
        assert not np.isfinite(metrics["grad_norm"])
        assert int(metrics["skipped"]) == int(state.skipped) == count and int(state.step) == 1 + count
    for leaf in jax.tree.leaves((state.params, state.opt_state, state.model_state)):
        copies = {}
        for shard in leaf.addressable_shards:
            copies.setdefault(str(shard.index), []).append(np.asarray(shard.data))
        assert all(np.array_equal(part, parts[0]) for parts in copies.values() for part in parts)
    state, metrics = step(state, batch())
    assert int(metrics["skipped"]) == 2 and np.isfinite(metrics["loss"])
    assert not all(np.array_equal(a, b) for a, b in zip(values(state), before, strict=True))


@pytest.mark.parametrize("stage", [0, 3])
def test_the_loss_scale_halves_on_overflow_and_doubles_later(stage):
    state, step = start(stage, FP16)
    scales = [float(state.loss_scale.value)]
    for bad in [None, np.inf, None, None, None, np.nan, None, None]:
        state, metrics = step(state, batch(bad))
        assert float(metrics["loss_scale"]) == float(state.loss_scale.value)
        scales.append(float(state.loss_scale.value))
    assert scales == [1024, 1024, 512, 512, 1024, 1024, 512, 512, 1024]


def test_a_scale_too_large_for_fp16_decreases():
    """Only the scale is too large: steps are skipped until the gradients are finite, then training continues."""
    zero = Zero(zerojax.make_mesh(), 3, Precision(FP16.param_dtype, jnp.float16, jnp.float16, initial_scale=2.0**20))
    state = zero.init(create, optax.sgd(1e-2))
    step, skipped = zero.train_step(loss), []
    for _ in range(12):
        state, metrics = step(state, batch())
        skipped.append(int(metrics["skipped"]))
    assert skipped[0] == 1 and 1 < skipped[-1] < 12 and skipped[-1] == skipped[-2]
    assert float(state.loss_scale.value) == 2.0 ** (20 - skipped[-1])


def test_the_loss_scale_stays_at_least_one():
    state, step = start(3, Precision(compute_dtype=jnp.float16, reduce_dtype=jnp.float16, initial_scale=2.0))
    for _ in range(3):
        state, _ = step(state, batch(np.nan))
    assert float(state.loss_scale.value) == 1


@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_are_unscaled(stage):
    """The reported norm and the update do not depend on the loss scale."""
    seen = []
    for scale in 1.0, 1024.0:
        precision = Precision(jnp.float32, jnp.float16, jnp.float32, initial_scale=scale)
        state, step = start(stage, precision, optax.sgd(0.1))
        state, metrics = step(state, batch())
        seen.append((float(metrics["grad_norm"]), np.asarray(state.master["w"])))
    np.testing.assert_allclose(seen[0][0], seen[1][0], rtol=1e-3)
    np.testing.assert_allclose(seen[0][1], seen[1][1], rtol=1e-3, atol=1e-4)


def linear(params, batch):
    """A loss whose gradient is the mean of the rows."""
    return jnp.mean(batch["x"] @ params["w"])


@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_are_widened_before_they_are_unscaled(stage):
    """A gradient of 2^-25 is too small for fp16, in which it is computed and reduced 2^15 times as large."""
    zero = Zero(zerojax.make_mesh(), stage, "fp16")
    state = zero.init(lambda: {"w": jnp.zeros(16)}, optax.sgd(1.0))
    small = lambda params, batch: 2.0**-15 * linear(params, batch)
    state, metrics = zero.train_step(small)(state, {"x": np.full((8, 16), 2.0**-10, np.float32)})
    np.testing.assert_array_equal(state.master["w"], np.full(16, -(2.0**-25), np.float32))
    assert metrics["grad_norm"] == 4 * 2.0**-25


@pytest.mark.parametrize("clip_norm", [1.0, 4.0])
def test_clip_norm_clips_the_gradient_without_the_loss_scale(clip_norm):
    """The gradient has 16 elements of 0.5, and a norm of 2: a norm of 1 halves it, and one of 4 leaves it as it is."""
    zero = Zero(zerojax.make_mesh(), 3, FP16)
    state = zero.init(lambda: {"w": jnp.zeros(16)}, optax.sgd(1.0))
    step = zero.train_step(linear, clip_norm=clip_norm)
    state, metrics = step(state, {"x": np.full((8, 16), 0.5, np.float32)})
    np.testing.assert_array_equal(state.master["w"], np.full(16, -0.5 * min(1, clip_norm / 2), np.float32))
    assert metrics["grad_norm"] == 2


@pytest.mark.parametrize("stage", [0, 3])
def test_param_norm_is_that_of_the_master_parameters_over_all_replicas(stage):
    """In bf16, every element would be rounded to 1. `b` is too small to be sharded."""
    zero = Zero(zerojax.make_mesh(replica=2), stage, "bf16")
    value = np.float32(1 + 2.0**-9)
    state = zero.init(lambda: {"w": jnp.full(16, value), "b": jnp.full(3, value)}, optax.sgd(0.0))
    _, metrics = zero.train_step(linear)(state, {"x": np.ones((8, 16), np.float32)})
    np.testing.assert_allclose(metrics["param_norm"], np.sqrt(19) * value, rtol=1e-6)


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_of_a_leaf_that_two_units_share_are_added_in_fp32(stage):
    """The gradients are 1 and 2^-9 in bf16, of which 1 would be left."""

    def loss(params, batch):
        first = jnp.mean(batch["x"] @ params["shared"])
        second = first * params["between"][0]
        return second + jnp.mean(batch["y"] @ params["shared"])

    zero = Zero(zerojax.make_mesh(), stage, "bf16")
    state = zero.init(lambda: {"shared": jnp.zeros(16), "between": jnp.ones(16)}, optax.sgd(1.0))
    x = np.ones((8, 16), np.float32)
    state, _ = zero.train_step(loss)(state, {"x": x, "y": x * 2.0**-9})
    np.testing.assert_array_equal(state.master["shared"], np.full(16, -(1 + 2.0**-9), np.float32))


def test_dtypes_of_leaves_are_floating():
    for dtype in ["float99", "int8", None, bool]:
        zero = Zero(zerojax.make_mesh(), 3, "bf16", dtypes={"w": dtype})
        with pytest.raises(
            ValueError, match=r"dtypes: 'w' has no floating dtype\n  got:      .*\n  fix:      name one"
        ):
            zero.eval_init(create, optax.adam(1e-2))


@pytest.mark.parametrize(
    ("precision", "dtype", "stage"), [("fp32", "float32", 3), ("bf16", "bfloat16", 0), ("fp16", "float16", 3)]
)
def test_the_model_of_a_state_has_the_dtype_of_the_computation(precision, dtype, stage):
    """With `dtypes=` for a leaf, its own. The parameters that are updated keep theirs."""
    zero = Zero(zerojax.make_mesh(), stage, precision, dtypes={"b": "float32"})
    state = zero.init(create, optax.adam(1e-2))
    params = state.model()["params"]
    assert (params["w"].dtype, params["b"].dtype) == (dtype, "float32")
    updated = state.params if precision == "fp32" else state.master
    assert {a.dtype for a in jax.tree.leaves(updated)} == {jnp.dtype("float32")}
