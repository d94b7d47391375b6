"""The training step as the facade returns it: it reports its memory, and audits its compiled program."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator
from typing import Any, cast

import jax
from jax.sharding import AbstractMesh
from jax.stages import Compiled, Traced

from zerojax.analysis import hlo
from zerojax.analysis.audit import MemoryChecks
from zerojax.analysis.communication import CommunicationChecks
from zerojax.analysis.expectation import Expectation, expect
from zerojax.analysis.findings import Audit, run_checks
from zerojax.analysis.hardware import chip_of_kind
from zerojax.analysis.hlo import Program
from zerojax.analysis.jaxpr_counts import model_flops
from zerojax.analysis.memory import Memory, step_memory
from zerojax.offload.host_memory import DEFAULT_PINNED_GIB, PINNED_LIMIT
from zerojax.program.tiles import Tiled, Tiling
from zerojax.step import steps
from zerojax.step.batch import batch_avals
from zerojax.step.compiler_options import TracedWithHostArguments
from zerojax.step.config import StepSettings, Tiles, ZeroConfig, can_offload_params
from zerojax.step.gradient import LossArgs
from zerojax.step.loss_traces import Use, tiled, traced_loss, uses
from zerojax.step.state import TrainState
from zerojax.utils.text import bytes_text
from zerojax.utils.typing import PyTree

_FITS = 0.6  # the most of a device's memory that a step is estimated to take, for 'auto' to leave it without tiles
_TILE = 1 / 128  # the widest value of a tile, of a device's memory


class TrainStep(steps.TrainStep):
    """A training step that can report its memory, and audit its compiled program.

    Args:
        config: mesh, axes, stage and precision.
        settings: the settings of the step.
        loss_fn: the loss function of the user.
        audit_setting: 'error' or 'warn' audits each newly compiled program, and raises or warns if an expectation is
            broken; 'off' does not audit.
    """

    def __init__(self, config: ZeroConfig, settings: StepSettings, loss_fn: Callable[..., PyTree], audit_setting: str):
        self._audit_setting = audit_setting
        self._audited: set[Hashable] = set()
        self.loss_fn = loss_fn
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

    def _checked(self, state: TrainState, batch: PyTree) -> jax.stages.Wrapped:
        self._choose_tiles(state, batch)
        return super()._checked(state, batch)

    def _choose_tiles(self, state: TrainState, batch: PyTree) -> None:
        """Chooses the tiles that are 'auto', for the first batch: none, if the step is estimated to fit without."""
        if self.settings.tiles != "auto":
            return
        limit, chosen = device_memory(self.config), cast("Tiles | Tiling", "none")
        if limit:
            without = TrainStep(self.config, dataclasses.replace(self.settings, tiles="none"), self.loss_fn, "off")
            if without.memory(state, batch).peak_bytes > _FITS * limit:
                chosen = auto_tiling(limit)
        self.settings = dataclasses.replace(self.settings, tiles=chosen)
        super().__init__(self.config, self.settings, self.loss_fn)

    def memory(self, state: TrainState, batch: PyTree) -> Memory:
        """Estimates the peak memory of this step on one device, without compiling it.

        Args:
            state: arrays, which may have been donated, or avals.
            batch: arrays or avals.

        Returns:
            A `Memory`: the terms of the peak in bytes, and a table when printed.

        Cost: traces the step and reads the trace, which takes seconds.
        """
        avals = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state)
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

    def _expectation(self, state: TrainState, batch: PyTree, traced: Traced | TracedWithHostArguments) -> Expectation:
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

    def tiled(self, state: TrainState, batch: PyTree) -> list[Tiled]:
        """What the loss computes in tiles of tokens. Nothing is compiled.

        Args:
            state: arrays or avals.
            batch: arrays or avals.

        Returns:
            A `Tiled` for each part of the loss, of a scan over layers one for all layers.
        """
        self._choose_tiles(state, batch)
        return tiled(self.gradient(state.layout), self._loss_args(state, batch))

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


def audit_step(step: Traced | TracedWithHostArguments | Compiled, expectation: Expectation) -> Audit:
    """Compares what a step is expected to do with its compiled program. Nothing is run.

    Most is read from programs for GPUs. XLA for CPUs merges gathers, sends wider dtypes and runs one collective after
    the other, so for CPUs the communication is read from the traced step. If something cannot be read, the finding says
    why.

    Collectives of the model itself over the data axes count as those of the step. Collectives of at most 256 bytes are
    not counted.

    Args:
        step: `jax.jit(fn, ...).trace(state, ...)` of any function, which is compiled here, or a compiled function. Of
            the latter, the order of gathers is not read, and on CPU no communication is.
        expectation: the result of `step.expectation(state, batch)` for a zerojax step with the same loss. Its state is
            the first argument of `step`.

    Returns:
        An `Audit`: one finding for each expectation, and a table when printed.

    Raises:
        ValueError: if the first argument of `step` is another state.

    Cost: compiles a traced step, and reads the text of the program, in about 5% of the time of the compilation.
    """
    is_traced = isinstance(step, Traced | TracedWithHostArguments)
    jaxpr = step.jaxpr if is_traced else None
    compiled = step.lower().compile() if is_traced else step

    @functools.cache
    def program() -> Program:
        return hlo.parse_program(compiled.as_text() or "")

    platform = expectation.config.mesh.devices.flat[0].platform
    memory = MemoryChecks(compiled, program, expectation, platform)
    communication = CommunicationChecks(program, jaxpr, expectation, platform)
    return run_checks(memory.checks() | communication.checks())


def out_of_memory_error(config: ZeroConfig, settings: StepSettings, memory: Memory, error: Exception) -> MemoryError:
    """The error to raise when a step has run out of device memory, or of host memory that XLA may pin."""
    if "host memory" in str(error):
        return _out_of_host_memory(memory, error)
    *rows, total = str(memory._replace(host_bytes=0)).splitlines()
    return MemoryError(
        "\n  ".join(
            [
                "step: out of device memory",
                f"got:      {str(error).splitlines()[0][:200]}",
                f"estimate: at stage {config.stage} on {config.axes.num_shards} shards:",
                *(f"  {row}" for row in [*rows, total + _limit(config)]),
                f"fix:      try {'; '.join(_fixes(config, settings))}",
                "          (zerojax plan predicts the memory with each of these)",
            ]
        )
    )


def _out_of_host_memory(memory: Memory, error: Exception) -> MemoryError:
    total, state = bytes_text(memory.host_bytes), bytes_text(memory.host_state_bytes)
    return MemoryError(
        f"step: out of pinned host memory\n"
        f"  got:      {str(error).splitlines()[0][:200]}\n"
        f"  estimate: {total} for each device, of which {state} are the state\n"
        f"  fix:      raise {PINNED_LIMIT} in the environment; it is {DEFAULT_PINNED_GIB} GiB\n"
        f"            by default, for all GPUs of a process together. Or offload less"
    )


def _limit(config: ZeroConfig) -> str:
    limit = _bytes_limit(config)
    return f"  of {bytes_text(limit)} that JAX may use" if limit else ""


def _bytes_limit(config: ZeroConfig) -> int | None:
    """The device memory that JAX may use, if the device reports it."""
    stats = getattr(config.mesh.devices.flat[0], "memory_stats", lambda: None)()
    return (stats or {}).get("bytes_limit")


def device_memory(config: ZeroConfig) -> int | None:
    """The bytes of a device's memory, which are the same in all processes; None for unknown chips and CPUs."""
    if isinstance(config.mesh, AbstractMesh):
        return None
    chip = chip_of_kind(config.mesh.devices.flat[0].device_kind)
    return chip.memory_bytes if chip else _bytes_limit(config)


def auto_tiling(memory_bytes: int) -> Tiling:
    """The tiles of 'auto' on devices with so much memory."""
    return Tiling(num_bytes=int(_TILE * memory_bytes))


def _fixes(config: ZeroConfig, settings: StepSettings) -> Iterator[str]:
    """Changes that reduce the memory of a step, the cheapest first."""
    if config.stage < 3:
        yield "stage=3"
    dots = "remat='dots', then " if settings.remat.saves_everything else ""
    yield f"{dots}remat='full', or Remat(offload_inputs=True)"
    if settings.tiling is None:
        yield "tiles='auto', or a number of tokens"
    yield f"num_microbatches={2 * settings.num_microbatches}"
    if settings.prefetch:
        yield "prefetch=0"
    if config.offload == "none" and not config.other_axes:
        yield "Zero(..., offload='optimizer')"
    elif config.offload == "optimizer" and can_offload_params(config.axes, config.stage):
        yield "Zero(..., offload='params')"
    if jax.default_backend() == "gpu":
        yield "XLA_CLIENT_MEM_FRACTION=0.95 in the environment"
    yield "more devices"
