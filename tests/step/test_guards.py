"""What a step refuses in words, and odd losses that it takes."""

import contextlib
import copy
import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from jax.sharding import NamedSharding, PartitionSpec as P

import zerojax
from zerojax import Weighted, Zero

X = np.ones((16, 16), np.float32)


def create(key):
    return {"w": jax.random.normal(key, (16, 16)), "b": jnp.zeros(16)}


def loss(params, x):
    return jnp.mean((x @ params["w"] + params["b"]) ** 2)


def started(stage=3, tx=None, **options):
    zero = Zero(zerojax.make_mesh(), stage, **options)
    return zero, zero.init(create, tx or optax.adam(1e-3))


def test_a_donated_state_is_refused_and_the_process_lives(tmp_path):
    """The runtime would abort the process."""
    zero, state = started()
    step = zero.train_step(loss)
    after, _ = step(state, X)
    with zero.checkpoints(tmp_path) as checkpoints:
        for use in (
            lambda: step(state, X),
            lambda: zero.eval_step(loss)(state, X),
            lambda: checkpoints.save(state),
            lambda: checkpoints.update(state),
            lambda: zero.explain(state),
            lambda: zero.with_params(state, state.params),
            lambda: step.audit(state, X),
            state.model,
            state.logical,
        ):
            with pytest.raises(
                ValueError, match=r"state: it was donated to a step.*\n.*is deleted\n.*state, metrics = s"
            ):
                use()
    step(after, X)


def test_what_is_no_state_is_refused_with_the_order_of_the_arguments():
    zero = Zero(zerojax.make_mesh())
    state, step, evaluation = zero.eval_init(create, optax.sgd(0.1)), zero.train_step(loss), zero.eval_step(loss)
    swapped, pair = (
        r"ndarray, and the state in another place\n  fix:  .* order: {}",
        r"a tuple of TrainState, dict\n  fix:  .*: s",
    )
    for call, text in [
        (lambda: step(X, state), swapped.format(r"step\(state, batch\)")),
        (lambda: step.trace(X, state), swapped.format(r"step\(state, batch\)")),
        (lambda: evaluation(X, state), swapped.format(r"step\(state, batch\)")),
        (lambda: zerojax.evaluate(evaluation, X, state), swapped.format(r"zerojax.evaluate\(step, state, data\)")),
        (
            lambda: zerojax.fit(zero, step, state, [X], 1),
            "TrainStep, and the state .* order: zerojax.fit.zero, state, ",
        ),
        (lambda: step((state, {"loss": 0}), X), pair + r"tate, metrics = step\(state, batch\)"),
        (lambda: step(state.params, X), r"dict\n  fix:  .* state = zero.init\(model, tx\)"),
        (lambda: zero.with_params(state.params, state.params), r"dict\n  fix:  .* state = zero.init\(model, tx\)"),
    ]:
        with pytest.raises(ValueError, match=f"(?s)state: this is not a TrainState\n  got:      {text}"):
            call()


def test_a_jit_that_compiles_nothing_is_warned_about():
    zero = Zero(zerojax.make_mesh())
    state, step = zero.eval_init(create, optax.sgd(0.1)), zero.train_step(loss)
    with jax.disable_jit():
        for call in (lambda: zero.eval_init(create, optax.sgd(0.1)), lambda: step.trace(state, X)):
            with pytest.warns(
                UserWarning, match="compilation is disabled.*\n  got: .*JAX_DISABLE_JIT.*\n  fix: .*jax.debug"
            ):
                call()


class WithDropout(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.dropout = nnx.Linear(16, 16, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.linear(x))


def test_a_deep_copy_of_a_state_is_one_of_the_same_steps():
    """A deep copy of an nnx.State has arrays in place of its variables, which the error says."""
    zero, traces = Zero(zerojax.make_mesh()), []
    step = zero.train_step(lambda model, x: traces.append(0) or jnp.mean(model(x) ** 2))
    state = zero.init(WithDropout, optax.adam(1e-3))
    copied = copy.deepcopy(state)
    state, want = step(state, X)
    traces.clear()
    copied, got = step(copied, X)
    assert not traces and got["loss"] == want["loss"]
    jax.tree.map(np.testing.assert_array_equal, copied.params, state.params)
    changed = dataclasses.replace(state, model_state=copy.deepcopy(state.model_state))
    with pytest.raises(ValueError, match=r"model_state has other variables .*\n.*dropout/rngs.*\n.*deepcopy\(state\)"):
        step(changed, X)


def test_a_norm_to_clip_to_is_a_positive_number():
    for norm in [-1, 0, float("nan"), "1", True]:
        with pytest.raises(ValueError, match=r"settings: clip_norm .* is not a norm\n  fix:      pass a number"):
            Zero(zerojax.make_mesh()).train_step(loss, clip_norm=norm)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_loss_that_uses_no_parameter_changes_nothing(stage):
    zero, state = started(stage)
    before = jax.device_get(state.params)
    assert zero.eval_step(lambda params, x: jnp.mean(x))(state, X)["loss"] == 1
    after, metrics = zero.train_step(lambda params, x: jnp.mean(x), num_microbatches=2)(state, X)
    assert metrics["loss"] == 1 and metrics["grad_norm"] == 0
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(after.params), before)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("value", [1.0, Weighted(2.0, 2)], ids=["number", "weighted"])
def test_a_loss_that_is_a_constant_changes_nothing(value, stage):
    zero, state = started(stage, optax.sgd(0.1))
    before = jax.device_get(state.params)
    assert zero.eval_step(lambda params, x: value)(state, X)["loss"] == 1
    after, metrics = zero.train_step(lambda params, x: value)(state, X)
    assert metrics["loss"] == 1 and metrics["grad_norm"] == 0
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(after.params), before)


@pytest.mark.parametrize(
    ("metric", "got"),
    [({"b": 1.0}, "'dict'"), ([1.0, 2.0], "'list'"), ("text", "'text'"), (None, "'NoneType'")],
    ids=["dict", "list", "string", "none"],
)
def test_a_metric_that_is_no_number_is_refused_by_name(metric, got):
    zero, state = started()
    with pytest.raises(
        ValueError, match=f"loss: metric 'a' is not a number\n  got:      {got}\n  fix:      return scal"
    ):
        zero.train_step(lambda params, x: (loss(params, x), {"a": metric})).trace(state, X)


@pytest.mark.parametrize("name", ["loss", "grad_norm", "learning_rate"])
def test_a_metric_does_not_replace_one_of_the_step(name):
    zero, state = started()
    with_metric = lambda params, x: (loss(params, x), {name: jnp.float32(7)})
    for make in zero.train_step, zero.eval_step:
        with pytest.raises(ValueError, match=f"a metric has the name of one of the step's own\n  got:      '{name}'"):
            make(with_metric).trace(state, X)


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_metric_of_weight_0_is_a_sum(num_microbatches):
    zero, state = started()
    counted = lambda params, x: (loss(params, x), {"rows": Weighted(jnp.float32(len(x)), 0), "mean": jnp.mean(x)})
    _, metrics = zero.train_step(counted, num_microbatches=num_microbatches)(state, X)
    assert metrics["rows"] == len(X) and metrics["mean"] == 1


# Resuming with another optimizer


def saved(directory, tx, num=3):
    zero, state = started(tx=tx)
    step = zero.train_step(loss)
    for _ in range(num):
        state, _ = step(state, X)
    with zero.checkpoints(directory) as checkpoints:
        checkpoints.save(state)
    return state


def test_a_run_continues_with_another_schedule_and_its_moments(tmp_path, caplog):
    """The schedule continues at the number of updates so far."""
    before = saved(tmp_path, optax.adam(1e-3))
    zero, fresh = started(tx=optax.adam(optax.linear_schedule(1e-3, 0, 10)))
    with zero.checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ValueError, match="optimizer='changed' restores what both have"):
            checkpoints.resume(fresh)
        state, step = checkpoints.resume(zero.init(create, fresh.layout.tx), optimizer="changed")
    assert "5 leaves continue; 1 are new, and 0 that were saved are not used" in caplog.text
    assert step == 3 and int(state.opt_state[0].count) == int(state.opt_state[1].count) == 3
    np.testing.assert_array_equal(state.opt_state[0].mu["w"], before.opt_state[0].mu["w"])
    zero.train_step(loss)(state, X)


def test_a_schedule_that_is_new_starts_at_the_number_of_updates(tmp_path):
    """Plain SGD counts nothing. Of three steps, one was skipped."""
    zero, state = started(tx=optax.sgd(1e-3))
    step = zero.train_step(loss)
    for x in (X, X * np.nan, X):
        state, _ = step(state, x)
    with zero.checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state)
    zero, fresh = started(tx=optax.sgd(optax.linear_schedule(1e-3, 0, 10)))
    with zero.checkpoints(tmp_path) as checkpoints:
        state, start = checkpoints.resume(fresh, optimizer="changed")
    assert start == 3 and [int(count) for count in jax.tree.leaves(state.opt_state)] == [2]


@pytest.mark.parametrize("first", [True, False], ids=["freezes", "thaws"])
def test_a_run_continues_with_other_frozen_leaves_and_its_moments(tmp_path, first):
    tx = optax.adam(1e-3)
    options = {"frozen": ["b"]}
    zero, state = started(tx=tx, **({} if first else options))
    before, _ = zero.train_step(loss)(state, X)
    with zero.checkpoints(tmp_path) as checkpoints:
        checkpoints.save(before)
    zero, fresh = started(tx=tx, **(options if first else {}))
    with zero.checkpoints(tmp_path) as checkpoints:
        state, _ = checkpoints.resume(fresh, optimizer="changed")
    np.testing.assert_array_equal(state.opt_state[0].nu["w"], before.opt_state[0].nu["w"])
    assert (state.opt_state[0].nu["b"] is None) == first
    zero.train_step(loss)(state, X)


# Errors from inside a model


def line_of(fn):
    """The number of the line of a function that is marked as `this line`."""
    lines, first = inspect.getsourcelines(fn)
    return first + next(k for k, text in enumerate(lines) if text.endswith("# this line\n"))


class Cached(nnx.Module):
    """Writes into an array whose dtype is fixed."""

    def __init__(self, *, rngs):
        self.layer = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x):
        cache = jnp.zeros((2, 16), jnp.float32)
        return jax.lax.dynamic_update_slice(cache, self.layer(x), (0, 0))  # this line


class Carried(Cached):
    def __call__(self, x):
        return jax.lax.scan(lambda carry, _: (self.layer(x), None), jnp.zeros((2, 16)), None, 2)[0]  # this line


class Placed(nnx.Module):
    def __init__(self, *, rngs):
        self.embed = nnx.Embed(16, 16, rngs=rngs)

    def __call__(self, x):
        return self.embed(x.astype(int), out_sharding=P("data"))  # this line


@pytest.mark.parametrize(
    ("model", "text", "stage"),
    [
        (Cached, "precision: the model mixes float32", 0),
        (Carried, "precision: the model", 3),
        (Placed, "sharding: the model", 3),
    ],
)
def test_an_error_of_the_model_names_its_line_and_the_setting(model, text, stage):
    zero = Zero(zerojax.make_mesh(), stage, "bf16")
    state = zero.eval_init(model, optax.sgd(0.1))
    step = zero.train_step(lambda model, x: jnp.mean(model(x).astype(jnp.float32)))
    with pytest.raises(ValueError, match=text) as raised:
        step.trace(state, X)
    line = line_of(model.__call__)
    assert f"{__file__}:{line}\n  fix:" in str(raised.value)


class Ruled(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(16)(nn.with_logical_constraint(x, ("batch", "embed")))


def test_a_logical_rule_that_divides_the_batch_is_refused_with_what_to_map_it_to():
    zero = Zero(zerojax.make_mesh())
    step = zero.train_step(lambda variables, x: jnp.mean(Ruled().apply(variables, x) ** 2))
    with nn.logical_axis_rules([("batch", "data"), ("embed", None)]):
        state = zero.init(Ruled(), optax.sgd(0.1), inputs=(X,))
        with pytest.raises(
            ValueError, match=r"names axes that split the batch.*\n  got:      The spec.*\n.*logical name"
        ):
            step(state, X)
    with nn.logical_axis_rules([("batch", None), ("embed", None)]):
        step(state, X)


def constrained(sharding):
    def loss_fn(params, x):
        h = x @ params["w"]
        h = jax.lax.with_sharding_constraint(h, sharding)  # this line
        return jnp.mean(h**2)

    return loss_fn


@pytest.mark.parametrize(
    ("by_name", "enclosed", "stage"), [(False, False, 0), (False, True, 3), (True, False, 3), (True, True, 0)]
)
def test_a_constraint_that_divides_the_batch_is_refused_with_its_line(by_name, enclosed, stage):
    """Also inside of `with mesh:`, and by a user's own jit, which finds a NamedSharding when it compiles."""
    zero, state = started(stage)
    mesh = zero.config.mesh
    loss_fn = constrained(P("data") if by_name else NamedSharding(mesh, P("data")))
    own_step = jax.jit(zero.value_and_grad(loss_fn))
    with mesh if enclosed else contextlib.nullcontext():
        for call in (
            lambda: zero.train_step(loss_fn)(state, X),
            lambda: zero.eval_step(loss_fn)(state, X),
            lambda: own_step(zero.shard(create(jax.random.key(0))), X),
        ):
            with pytest.raises(
                ValueError, match=r"names axes that split the batch.*\n  got:      .*\n  fix: "
            ) as raised:
                call()
            assert f"at {__file__}:{line_of(loss_fn)}\n  fix:" in str(raised.value)


def test_a_constraint_that_divides_nothing_is_allowed():
    zero, state = started()
    loss_fn = constrained(NamedSharding(zero.config.mesh, P()))
    zero.train_step(loss_fn).trace(state, X)
    jax.jit(zero.value_and_grad(loss_fn)).trace(zero.shard(create(jax.random.key(0))), X)
