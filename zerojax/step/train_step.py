"""The jitted training step: gradients inside `shard_map`, then the update on global arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from zerojax.analysis import jaxpr_counts
from zerojax.analysis.audit import audit_step
from zerojax.analysis.expectation import Expectation, expect
from zerojax.analysis.findings import Audit
from zerojax.analysis.memory import Memory, out_of_memory_error, step_memory
from zerojax.step import models, state as states
from zerojax.step.batch import batch_avals, shard_batch, warn_of_keys
from zerojax.step.config import ZeroConfig
from zerojax.step.gradient import DeviceGradient, compute_gradients, device_gradient
from zerojax.step.jitted_step import Step, check_arguments, name_of_loss
from zerojax.step.loss_errors import in_words_of_the_user
from zerojax.step.loss_traces import (
    Use,
    check_loss,
    explained_by_rows,
    traced_loss,
    uses,
    with_state_keys,
)
from zerojax.step.optimizers import scheduled_learning_rate
from zerojax.step.settings import StepSettings
from zerojax.step.state import Definition, TrainState
from zerojax.step.update import apply_gradients
from zerojax.step.whole_batch import Purpose, over_whole_batch
from zerojax.utils.typing import Array, Aval, PyTree


def _aval(a: Array) -> Aval:
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding)


class TrainStep(Step):
    """A `Step` that returns (state, metrics), and can report its memory and audit its compiled program.

    Args:
        config: mesh, axes, stage and precision.
        settings: the settings of the step.
        build: `build(state)` returns the function to jit.
        gradient_of: `gradient_of(definition)` returns the `DeviceGradient` of the step.
        audit_setting: 'error' or 'warn' audits each newly compiled program, and raises or warns if an expectation is
            broken; 'off' does not audit.
        loss_name: name of the loss function.
    """

    donates = True

    def __init__(
        self,
        config: ZeroConfig,
        settings: StepSettings,
        build: Callable[[TrainState], Callable[..., Any]],
        gradient_of: Callable[[Definition], DeviceGradient],
        audit_setting: str,
        loss_name: str,
    ):
        self._gradient_of, self._audit_setting = gradient_of, audit_setting
        self._audited: set[Any] = set()
        super().__init__(config, settings, build, loss_name)

    def _changed_texts(self) -> dict[str, str]:
        audit = {} if self._audit_setting == "off" else {"audit": repr(self._audit_setting)}
        return super()._changed_texts() | audit

    def __call__(self, state: TrainState, batch: PyTree, *others: Any) -> Any:
        check_arguments(state, batch, others)
        if self.config.spans_processes:
            self._agree(state, batch)
        jitted = self._checked(state, batch)
        batch = shard_batch(self.config, batch)
        if self._audit_setting != "off":
            self._audit_once(state, batch)
        try:
            with in_words_of_the_user(self.config.precision):
                return jitted(state, batch)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            memory = self.memory(state, batch)
            raise out_of_memory_error(self.config, self.settings, memory, error) from error

    def memory(self, state: TrainState, batch: PyTree) -> Memory:
        """Estimates the peak memory of this step on one device, without compiling it.

        Args:
            state: arrays, which may have been donated, or avals.
            batch: arrays or avals.

        Returns:
            A `Memory`: the terms of the peak in bytes, and a table when printed.

        Cost: traces the step and reads the trace, which takes seconds.
        """
        avals = jax.tree.map(_aval, state)
        return step_memory(self.config, self.settings, avals, self.trace(avals, batch), batch_avals(self.config, batch))

    def _audit_once(self, state: TrainState, batch: PyTree) -> None:
        """Audits a program before it runs for the first time. It compiles once: the step finds it in JAX's cache."""
        key = (
            state.definition,
            *((a.shape, a.dtype) for a in jax.tree.leaves(batch)),
            *(a.sharding for a in jax.tree.leaves(state)),
        )
        if key not in self._audited:
            self.audit(state, batch).enforce(self._audit_setting)
            self._audited.add(key)

    def expectation(self, state: TrainState, batch: PyTree) -> Expectation:
        """What the compiled step is expected to do, by the formulas of its stage.

        Args:
            state: arrays or avals (`zero.eval_init`).
            batch: arrays or avals.
        """
        return self._expectation(state, batch, self.trace(state, batch))

    def audit(self, state: TrainState, batch: PyTree) -> Audit:
        """Compares what the step is expected to do with its compiled program. Nothing runs. See `audit_step`.

        Args:
            state: arrays or avals, also for described devices (`targets.devices`).
            batch: arrays or avals.

        Returns:
            An `Audit`: one finding for each expectation, and a table when printed.

        Cost: compiles the step, if it is not in JAX's cache, and reads the text of the program.
        """
        traced = self.trace(state, batch)
        return audit_step(traced, self._expectation(state, batch, traced))

    def _expectation(self, state: TrainState, batch: PyTree, traced: Any) -> Expectation:
        return expect(self.config, self.settings, state, traced.jaxpr, self.uses(state, batch))

    def uses(self, state: TrainState, batch: PyTree) -> list[tuple[Use, ...]]:
        """Where each leaf of the parameters is used in the forward pass. Nothing is compiled.

        Args:
            state: arrays or avals.
            batch: arrays or avals.

        Returns:
            For each leaf, in flattening order, the segments of the loss that read it. A segment is a part of the loss
            that reads the weights of one unit. A loop over stacked layers is one segment, and so is a lookup of rows in
            a table that is not gathered.
        """
        return uses(self._gradient_of(state.definition), self._loss_args(state, batch))

    def model_flops(self, state: TrainState, batch: PyTree) -> int:
        """The flops of the model in a step on all devices: three times those of the loss, without recomputation.

        Args:
            state: arrays or avals.
            batch: arrays or avals.

        Raises:
            ValueError: if the flops of a kernel are unknown, or if a product runs an unknown number of times.

        Source: Chowdhery et al., "PaLM", appendix B, arXiv 2204.02311.
        """
        jaxpr, _ = traced_loss(self._gradient_of(state.definition), self._loss_args(state, batch))
        return jaxpr_counts.model_flops(jaxpr) * self.config.axes.num_devices

    def _loss_args(self, state: TrainState, batch: PyTree) -> Any:
        return jax.tree.leaves(state.params), state.model_state, batch_avals(self.config, batch), state.key


def train_step(
    config: ZeroConfig,
    loss_fn: Callable[..., Any],
    settings: StepSettings,
    audit_setting: str,
) -> TrainStep:
    """See `Zero.train_step`."""
    clip_norm, checked = settings.clip_norm, set[Definition]()

    def gradient_of(definition: Definition) -> DeviceGradient:
        return device_gradient(config, definition, loss_fn, settings)

    def build(like: TrainState) -> Callable[..., Any]:
        definition, shardings = like.definition, states.shardings(config, like)
        gradient = gradient_of(definition)

        def step(state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Array]]:
            scale = state.loss_scale.value if state.loss_scale else jnp.float32(1)
            key = jax.random.fold_in(state.key, state.step)
            args = (jax.tree.leaves(state.params), state.model_state, batch, key, scale)
            is_checked = definition in checked  # a step may be traced more than once
            with explained_by_rows(gradient, args[:-1]):
                if not is_checked:
                    if config.other_axes:
                        check_loss(gradient, args[:-1])
                    warn_of_keys(batch)
                with_keys = with_state_keys(gradient, args[:-1])
                of_batch = over_whole_batch(with_keys, args[:-1], Purpose.TRAINING, quiet=is_checked)
                checked.add(definition)
                result = compute_gradients(of_batch, args)
            norm = jnp.sqrt(result.squared_norm) / scale
            finite = jnp.isfinite(norm)
            factor = 1 / scale
            if clip_norm is not None:
                factor = factor * jnp.minimum(1, clip_norm / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))
            grads = [g for g in result.grads if g is not None]
            is_one = clip_norm is None and state.loss_scale is None
            after, params_norm = apply_gradients(
                gradient, state, shardings, grads, None if is_one else factor, finite, result.loss, result.divisor
            )
            keep = lambda new, old: new if models.is_key(new) else lax.select(finite, new, old)
            model_state = jax.tree.map(keep, result.model_state, state.model_state)
            after = dataclasses.replace(after, model_state=model_state)
            metrics = {
                "loss": result.loss,
                **result.metrics,
                "grad_norm": norm,
                "param_norm": jnp.sqrt(params_norm),
                "skipped": after.skipped,
                **_learning_rate(definition, state.opt_state, after.opt_state),
                **({"loss_scale": after.loss_scale.value} if after.loss_scale else {}),
            }
            return after, metrics

        return step

    return TrainStep(config, settings, build, gradient_of, audit_setting, name_of_loss(loss_fn))


def _learning_rate(definition: Definition, before: PyTree, after: PyTree) -> dict[str, Array]:
    """The learning rate, if the optimizer has it in its state (optax.inject_hyperparams) or in a schedule."""
    found = [value for _, value in optax.tree.get_all_with_path(after, "learning_rate")]
    scalars = [value for value in found if isinstance(value, jax.Array) and value.ndim == 0]
    rate = scalars[0] if scalars else scheduled_learning_rate(definition.tx, before)
    return {} if rate is None else {"learning_rate": rate.astype(jnp.float32)}
