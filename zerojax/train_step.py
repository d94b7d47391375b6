"""The training step: gradient program inside `shard_map`, update outside it on global arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from zerojax.audit.audit import audit_step
from zerojax.audit.expectation import Expectation, expectation
from zerojax.audit.findings import Audit
from zerojax.report import out_of_memory
from zerojax.report.memory import Memory, step_memory
from zerojax.step import models, state as states
from zerojax.step.config import (
    ZeroConfig,
    batch_specs,
    check_batch,
    compiler_options,
    global_shape,
    leaf_specs,
    manual,
    shard_batch,
)
from zerojax.step.gradient import GradientProgram, gradient_program, gradients, uses
from zerojax.step.settings import StepSettings
from zerojax.step.state import Definition, TrainState
from zerojax.step.update import apply_gradients, optimizer_shardings, squared_norm
from zerojax.typing import Array, PyTree


class Step:
    """A jitted step over (state, batch), checked before it compiles and compiled once per shape.

    `lower(state, batch)` and `trace(state, batch)` are those of the jitted function; they take avals with shardings
    (`zero.eval_init`) as well as arrays. `config` is that of the Zero, `settings` are those of the step.
    """

    def __init__(
        self,
        config: ZeroConfig,
        settings: StepSettings,
        build: Callable[[TrainState], Callable[..., Any]],
        donate: bool,
    ):
        self.config, self.settings, self._build, self._donate = config, settings, build, donate
        self._jitted: dict[Any, Any] = {}

    def _prepare(self, state: TrainState, batch: PyTree) -> tuple[Any, PyTree]:
        check_batch(self.config, batch, self.settings.num_microbatches)
        key = state.definition
        if key not in self._jitted:
            states.check_optimizer(state, self.config.precision)
            donated = (0,) if self._donate else ()
            self._jitted[key] = jax.jit(
                self._build(state),
                donate_argnums=donated,
                keep_unused=True,
                compiler_options=compiler_options(self.config, key.leaves),
            )
        return self._jitted[key], batch

    def __call__(self, state: TrainState, batch: PyTree) -> Any:
        jitted, batch = self._prepare(state, batch)
        return jitted(state, shard_batch(self.config, batch))

    def _abstract(self, batch: PyTree) -> PyTree:
        aval = lambda a, s: jax.ShapeDtypeStruct(
            global_shape(a), _dtype(a), sharding=NamedSharding(self.config.mesh, s)
        )
        return jax.tree.map(aval, batch, batch_specs(self.config, batch))

    def trace(self, state: TrainState, batch: PyTree) -> Any:
        jitted, batch = self._prepare(state, batch)
        return jitted.trace(state, self._abstract(batch))

    def lower(self, state: TrainState, batch: PyTree, **kwargs: Any) -> Any:
        return self.trace(state, batch).lower(**kwargs)


def _dtype(a: Any) -> Any:
    """That JAX makes of an array of numpy or of a number."""
    dtype = a.dtype if hasattr(a, "dtype") else np.result_type(a)
    return jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)


def _aval(a: Array) -> Any:
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding)


class TrainStep(Step):
    """A `Step` that returns (state, metrics), and can be held against what it promises.

    Args:
        config: of the Zero.
        settings: of the step.
        build: state -> the function to jit.
        program: definition -> the gradient program.
        audit_setting: 'error', 'warn' or 'off': what an audit of each newly compiled program leads to.
    """

    def __init__(
        self,
        config: ZeroConfig,
        settings: StepSettings,
        build: Callable[[TrainState], Callable[..., Any]],
        program: Callable[[Definition], GradientProgram],
        audit_setting: str,
    ):
        self._program, self._audit_setting = program, audit_setting
        self._audited: set[Any] = set()
        super().__init__(config, settings, build, donate=True)

    def __call__(self, state: TrainState, batch: PyTree) -> Any:
        jitted, batch = self._prepare(state, batch)
        batch = shard_batch(self.config, batch)
        if self._audit_setting != "off":
            self._audit_once(state, batch)
        try:
            return jitted(state, batch)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise self._exhausted(state, batch, error) from error

    def _exhausted(self, state: TrainState, batch: PyTree, error: Exception) -> MemoryError:
        """With a table of what the step holds."""
        return out_of_memory.explained(self.config, self.settings, self.memory(state, batch), error)

    def memory(self, state: TrainState, batch: PyTree) -> Memory:
        """What a device holds when memory is fullest in this step, by formula: terms, and a table when printed.

        Args:
            state: arrays, also donated ones, or avals.
            batch: arrays or avals.

        Cost: the step is traced, and its trace is read: seconds. Nothing is compiled.
        """
        avals = jax.tree.map(_aval, state)
        return step_memory(self.config, self.settings, avals, self.trace(avals, batch), self._abstract(batch))

    def _audit_once(self, state: TrainState, batch: PyTree) -> None:
        """Before a program runs for the first time. It is compiled once: `jitted` finds it in JAX's cache."""
        key = (
            state.definition,
            *((a.shape, a.dtype) for a in jax.tree.leaves(batch)),
            *(a.sharding for a in jax.tree.leaves(state)),
        )
        if key not in self._audited:
            self.audit(state, batch).enforce(self._audit_setting)
            self._audited.add(key)

    def expectation(self, state: TrainState, batch: PyTree) -> Expectation:
        """What the step promises of itself for this state and batch: arrays, or avals (`zero.eval_init`)."""
        return self._expectation(state, batch, self.trace(state, batch))

    def audit(self, state: TrainState, batch: PyTree) -> Audit:
        """What the step promises beside what its compiled program does. Nothing is run. See `zerojax.audit`.

        Args:
            state: arrays or avals; also on described devices (`targets.devices`).
            batch: arrays or avals.
        """
        traced = self.trace(state, batch)
        return audit_step(traced, self._expectation(state, batch, traced))

    def _expectation(self, state: TrainState, batch: PyTree, traced: Any) -> Expectation:
        program = self._program(state.definition)
        args = jax.tree.leaves(state.params), state.model_state, self._abstract(batch), state.key
        return expectation(self.config, self.settings, state, traced.jaxpr, uses(program, args))


def train_step(
    config: ZeroConfig,
    loss_fn: Callable[..., Any],
    settings: StepSettings,
    audit_setting: str,
) -> TrainStep:
    """See `Zero.train_step`."""
    clip_norm = settings.clip_norm

    def gradient(definition: Definition) -> GradientProgram:
        return gradient_program(config, definition, loss_fn, settings)

    def build(like: TrainState) -> Callable[..., Any]:
        definition, shardings = like.definition, states.shardings(config, like)
        program = gradient(definition)

        def step(state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Array]]:
            scale = state.loss_scale.value if state.loss_scale else jnp.float32(1)
            key = jax.random.fold_in(state.key, state.step)
            args = (jax.tree.leaves(state.params), state.model_state, batch, key, scale)
            result = gradients(program, args)
            norm = jnp.sqrt(result.squared_norm) / scale
            finite = jnp.isfinite(norm)
            factor = 1 / scale
            if clip_norm is not None:
                factor = factor * jnp.minimum(1, clip_norm / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))
            dtype = config.precision.param_dtype
            scaled = [None if g is None else g.astype(dtype) * factor.astype(dtype) for g in result.grads]
            if clip_norm is None and state.loss_scale is None:
                scaled = result.grads
            grads = jax.tree.unflatten(definition.tree, scaled)
            after = apply_gradients(program, state, shardings, grads, finite)
            kept = jax.tree.map(
                lambda n, o: n if models.is_key(n) else lax.select(finite, n, o), result.state, state.model_state
            )
            after = dataclasses.replace(after, model_state=kept)
            trained = after.master if after.master is not None else definition.trained(after.params)
            if after.master is None:
                trained = lax.with_sharding_constraint(trained, optimizer_shardings(config, definition))
            metrics = {
                "loss": result.loss,
                **result.metrics,
                "grad_norm": norm,
                "param_norm": jnp.sqrt(squared_norm(program, trained)),
                "skipped": after.skipped,
                **_learning_rate(after.opt_state),
                **({"loss_scale": after.loss_scale.value} if after.loss_scale else {}),
            }
            return after, metrics

        return step

    return TrainStep(config, settings, build, gradient, audit_setting)


def eval_step(config: ZeroConfig, loss_fn: Callable[..., Any], settings: StepSettings) -> Step:
    """See `Zero.eval_step`."""

    def build(like: TrainState) -> Callable[..., Any]:
        definition = like.definition
        program = gradient_program(config, definition, loss_fn, settings)

        def step(state: TrainState, batch: PyTree) -> dict[str, Array]:
            whole = PartitionSpec()
            in_specs = (
                leaf_specs(config, definition.leaves, config.stage.shards_params),
                whole,
                batch_specs(config, batch),
                whole,
            )
            run = manual(config, program.evaluate, in_specs, whole)
            loss, metrics = run(jax.tree.leaves(state.params), state.model_state, batch, state.key)
            return {"loss": loss, **metrics}

        return step

    return Step(config, settings, build, donate=False)


def _learning_rate(opt_state: PyTree) -> dict[str, Array]:
    """The learning rate, where the optimizer keeps it in its state (optax.inject_hyperparams)."""
    found = [value for _, value in optax.tree.get_all_with_path(opt_state, "learning_rate")]
    scalars = [value for value in found if isinstance(value, jax.Array) and value.ndim == 0]
    return {"learning_rate": scalars[0].astype(jnp.float32)} if scalars else {}
