"""The training step: gradient program inside `shard_map`, update outside it on global arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from zerojax.audit.audit import audit
from zerojax.audit.expectation import Promise, promise
from zerojax.audit.findings import Audit
from zerojax.sharding import placement
from zerojax.step import models, state as states
from zerojax.step.config import (
    Setup,
    batch_specs,
    check_batch,
    compiler_options,
    global_shape,
    leaf_specs,
    manual,
    shard_batch,
)
from zerojax.step.gradient import GradientProgram, gradient_program, gradients, uses
from zerojax.step.state import Definition, TrainState
from zerojax.step.update import apply_gradients, optimizer_shardings, squared_norm
from zerojax.transform.remat import Rules

if TYPE_CHECKING:
    from zerojax.report.memory import Memory

Array = Any
Tree = Any


class Step:
    """A jitted step over (state, batch), checked before it compiles and compiled once per shape.

    `lower(state, batch)` and `trace(state, batch)` are those of the jitted function; they take avals with shardings
    (`zero.eval_init`) as well as arrays.
    """

    def __init__(
        self, setup: Setup, build: Callable[[TrainState], Callable[..., Any]], num_microbatches: int, donate: bool
    ):
        self._setup, self._build, self._num_microbatches, self._donate = setup, build, num_microbatches, donate
        self._jitted: dict[Any, Any] = {}

    def _prepare(self, state: TrainState, batch: Tree) -> tuple[Any, Tree]:
        check_batch(self._setup, batch, self._num_microbatches)
        key = state.definition
        if key not in self._jitted:
            states.check_optimizer(state, self._setup.precision)
            donated = (0,) if self._donate else ()
            self._jitted[key] = jax.jit(
                self._build(state),
                donate_argnums=donated,
                keep_unused=True,
                compiler_options=compiler_options(self._setup, key),
            )
        return self._jitted[key], batch

    def __call__(self, state: TrainState, batch: Tree) -> Any:
        jitted, batch = self._prepare(state, batch)
        return jitted(state, shard_batch(self._setup, batch))

    def _abstract(self, batch: Tree) -> Tree:
        aval = lambda a, s: jax.ShapeDtypeStruct(
            global_shape(a), _dtype(a), sharding=NamedSharding(self._setup.mesh, s)
        )
        return jax.tree.map(aval, batch, batch_specs(self._setup, batch))

    def trace(self, state: TrainState, batch: Tree) -> Any:
        jitted, batch = self._prepare(state, batch)
        return jitted.trace(state, self._abstract(batch))

    def lower(self, state: TrainState, batch: Tree, **kwargs: Any) -> Any:
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
        setup: of the Zero.
        build: state -> the function to jit.
        program: definition -> the gradient program.
        num_microbatches: of the step.
        setting: 'error', 'warn' or 'off': what an audit of each newly compiled program leads to.
    """

    def __init__(
        self,
        setup: Setup,
        build: Callable[[TrainState], Callable[..., Any]],
        program: Callable[[Definition], GradientProgram],
        num_microbatches: int,
        setting: str,
    ):
        self._program, self._setting = program, setting
        self._audited: set[Any] = set()
        super().__init__(setup, build, num_microbatches, donate=True)

    def __call__(self, state: TrainState, batch: Tree) -> Any:
        jitted, batch = self._prepare(state, batch)
        batch = shard_batch(self._setup, batch)
        if self._setting != "off":
            self._audit_once(state, batch)
        try:
            return jitted(state, batch)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise self._exhausted(state, batch, error) from error

    def _exhausted(self, state: TrainState, batch: Tree, error: Exception) -> MemoryError:
        """With a table of what the step holds."""
        from zerojax.report import (
            out_of_memory,  # which stands on the modules of the plan: only where it is needed
        )

        program = self._program(state.definition)
        memory = self.memory(state, batch)
        return out_of_memory.explained(self._setup, memory, program.num_microbatches, program.prefetch, error)

    def memory(self, state: TrainState, batch: Tree) -> Memory:
        """What a device holds when memory is fullest in this step, by formula: terms, and a table when printed.

        Args:
            state: arrays, also donated ones, or avals.
            batch: arrays or avals.

        Cost: the step is traced, and its trace is read: seconds. Nothing is compiled.
        """
        from zerojax.report.memory import step_memory

        avals, prefetch = jax.tree.map(_aval, state), self._program(state.definition).prefetch
        return step_memory(self._setup, avals, self.trace(avals, batch), self._abstract(batch), prefetch)

    def _audit_once(self, state: TrainState, batch: Tree) -> None:
        """Before a program runs for the first time. It is compiled once: `jitted` finds it in JAX's cache."""
        key = (
            state.definition,
            *((a.shape, a.dtype) for a in jax.tree.leaves(batch)),
            *(a.sharding for a in jax.tree.leaves(state)),
        )
        if key not in self._audited:
            self.audit(state, batch).enforce(self._setting)
            self._audited.add(key)

    def promise(self, state: TrainState, batch: Tree) -> Promise:
        """What the step promises of itself for this state and batch: arrays, or avals (`zero.eval_init`)."""
        return self._promise(state, batch, self.trace(state, batch))

    def audit(self, state: TrainState, batch: Tree) -> Audit:
        """What the step promises beside what its compiled program does. Nothing is run. See `zerojax.audit`.

        Args:
            state: arrays or avals; also on described devices (`targets.devices`).
            batch: arrays or avals.
        """
        traced = self.trace(state, batch)
        return audit(traced, self._promise(state, batch, traced))

    def _promise(self, state: TrainState, batch: Tree, traced: Any) -> Promise:
        program = self._program(state.definition)
        args = jax.tree.leaves(state.params), state.model_state, self._abstract(batch), state.key
        counted = uses(self._setup, program, state.definition, args)
        return promise(self._setup, state, traced.jaxpr, counted, program.num_microbatches, program.prefetch)


def train_step(
    setup: Setup,
    loss_fn: Callable[..., Any],
    num_microbatches: int,
    clip_norm: float | None,
    rules: Rules,
    prefetch: int,
    setting: str,
) -> TrainStep:
    """See `Zero.train_step`."""

    def gradient(definition: Definition) -> GradientProgram:
        return gradient_program(setup, definition, loss_fn, num_microbatches, rules, prefetch)

    def build(like: TrainState) -> Callable[..., Any]:
        definition, shardings = like.definition, states.shardings(like, setup.mesh, setup.stage, setup.axes)
        program = gradient(definition)

        def step(state: TrainState, batch: Tree) -> tuple[TrainState, dict[str, Array]]:
            scale = state.loss_scale.value if state.loss_scale else jnp.float32(1)
            key = jax.random.fold_in(state.key, state.step)
            args = (jax.tree.leaves(state.params), state.model_state, batch, key, scale)
            result = gradients(setup, program, definition, args)
            norm = jnp.sqrt(result.squared_norm) / scale
            finite = jnp.isfinite(norm)
            factor = 1 / scale
            if clip_norm is not None:
                factor = factor * jnp.minimum(1, clip_norm / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))
            dtype = setup.precision.param_dtype
            scaled = [None if g is None else g.astype(dtype) * factor.astype(dtype) for g in result.grads]
            if clip_norm is None and state.loss_scale is None:
                scaled = result.grads
            grads = jax.tree.unflatten(definition.tree, scaled)
            after = apply_gradients(setup, state, shardings, grads, finite)
            kept = jax.tree.map(
                lambda n, o: n if models.is_key(n) else lax.select(finite, n, o), result.state, state.model_state
            )
            after = dataclasses.replace(after, model_state=kept)
            trained = after.master if after.master is not None else definition.trained(after.params)
            if after.master is None:
                trained = lax.with_sharding_constraint(trained, optimizer_shardings(setup, definition))
            metrics = {
                "loss": result.loss,
                **result.metrics,
                "grad_norm": norm,
                "param_norm": jnp.sqrt(squared_norm(setup, definition, program, trained)),
                "skipped": after.skipped,
                **_learning_rate(after.opt_state),
                **({"loss_scale": after.loss_scale.value} if after.loss_scale else {}),
            }
            return after, metrics

        return step

    return TrainStep(setup, build, gradient, num_microbatches, setting)


def eval_step(setup: Setup, loss_fn: Callable[..., Any]) -> Step:
    """See `Zero.eval_step`."""

    def build(like: TrainState) -> Callable[..., Any]:
        definition = like.definition
        program = gradient_program(setup, definition, loss_fn, 1)

        def step(state: TrainState, batch: Tree) -> dict[str, Array]:
            whole = PartitionSpec()
            in_specs = (
                leaf_specs(setup, definition, placement.shards_params(setup.stage)),
                whole,
                batch_specs(setup, batch),
                whole,
            )
            run = manual(setup, program.evaluate, in_specs, whole)
            loss, metrics = run(jax.tree.leaves(state.params), state.model_state, batch, state.key)
            return {"loss": loss, **metrics}

        return step

    return Step(setup, build, 1, donate=False)


def _learning_rate(opt_state: Tree) -> dict[str, Array]:
    """The learning rate, where the optimizer keeps it in its state (optax.inject_hyperparams)."""
    found = [value for _, value in optax.tree.get_all_with_path(opt_state, "learning_rate")]
    scalars = [value for value in found if isinstance(value, jax.Array) and value.ndim == 0]
    return {"learning_rate": scalars[0].astype(jnp.float32)} if scalars else {}
