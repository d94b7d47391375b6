"""The training step as the facade returns it: it reports its memory, and audits its compiled program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from zerojax.analysis.audit import audit_step
from zerojax.analysis.expectation import Expectation, expect
from zerojax.analysis.findings import Audit
from zerojax.analysis.jaxpr_counts import model_flops
from zerojax.analysis.memory import Memory, out_of_memory_error, step_memory
from zerojax.step import steps
from zerojax.step.batch import batch_avals
from zerojax.step.config import StepSettings, ZeroConfig
from zerojax.step.gradient import LossArgs
from zerojax.step.loss_traces import Use, traced_loss, uses
from zerojax.step.state import TrainState
from zerojax.utils.typing import Array, Aval, PyTree


def _aval(a: Array) -> Aval:
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding)


class TrainStep(steps.TrainStep):
    """A training step that can report its memory, and audit its compiled program.

    Args:
        config: mesh, axes, stage and precision.
        settings: the settings of the step.
        loss_fn: the loss function of the user.
        audit_setting: 'error' or 'warn' audits each newly compiled program, and raises or warns if an expectation is
            broken; 'off' does not audit.
    """

    def __init__(self, config: ZeroConfig, settings: StepSettings, loss_fn: Callable[..., Any], audit_setting: str):
        self._audit_setting = audit_setting
        self._audited: set[Any] = set()
        super().__init__(config, settings, loss_fn)

    def _changed_texts(self) -> dict[str, str]:
        audit = {} if self._audit_setting == "off" else {"audit": repr(self._audit_setting)}
        return super()._changed_texts() | audit

    def _run(self, jitted: Callable[..., Any], state: TrainState, batch: PyTree) -> Any:
        if self._audit_setting != "off":
            self._audit_once(state, batch)
        try:
            return super()._run(jitted, state, batch)
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
            state.layout,
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
        return uses(self.gradient(state.layout), self._loss_args(state, batch))

    def model_flops(self, state: TrainState, batch: PyTree) -> int:
        """The flops of the model in a step on all devices: three times those of the loss, without recomputation.

        Args:
            state: arrays or avals.
            batch: arrays or avals.

        Raises:
            ValueError: if the flops of a kernel are unknown, or if a product runs an unknown number of times.

        Source: Chowdhery et al., "PaLM", appendix B, arXiv 2204.02311.
        """
        trace = traced_loss(self.gradient(state.layout), self._loss_args(state, batch))
        return model_flops(trace.closed.jaxpr) * self.config.axes.num_devices

    def _loss_args(self, state: TrainState, batch: PyTree) -> LossArgs:
        return LossArgs(jax.tree.leaves(state.params), state.model_state, batch_avals(self.config, batch), state.key)
