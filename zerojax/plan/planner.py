"""Predicts whether a step fits on a cluster, and its time, by formula or by compiling it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from zerojax.analysis import hardware
from zerojax.analysis.hardware import Cluster
from zerojax.analysis.jaxpr_counts import model_flops
from zerojax.analysis.memory import Memory
from zerojax.plan import formula
from zerojax.plan.formula import ComputeTime, FormulaTime, Throughput
from zerojax.plan.job import Settings, find_job, shapes_of
from zerojax.plan.program import CompiledStep, compile_step
from zerojax.plan.timeline import Prediction
from zerojax.plan.tracing import Tracer, num_rows
from zerojax.plan.transformer import Transformer
from zerojax.sharding.placement import shard_bytes
from zerojax.step.state import TrainState, in_host

# The share of a device's memory that a program may use, by platform or chip. GPUs: the share that JAX takes without
# XLA_CLIENT_MEM_FRACTION (JAX's documentation, "GPU memory allocation", 2026-11). TPUs: what the compiler says that it
# has, in its errors about too little memory (v5e: libtpu 0.0.41, 2026-11; others: public reports, 2024 to 2026).
MEMORY_SHARE = {
    "cuda": 0.75, "v4": 30.75 / 32, "v5e": 15.75 / 16, "v5p": 95.74 / 96, "v6e": 31.25 / 32, "cpu": 1.0
}  # fmt: skip
_HOST_SHARE = 0.8  # of a host's memory, which a program may pin; a guess: the rest is for the data and the system


class Suggestion(NamedTuple):
    """A change of the settings or the cluster.

    Attributes:
        change: what is changed.
        peak_bytes: the peak memory of a device with it.
        fits: whether that is within the limit, and so is the memory of the host.
        speed: the rows per second of a device, relative to those without the change, by formula; None if not known.
        host_bytes: the bytes in pinned host memory for each device with it.
        settings: the settings with it; None if it changes something else.
    """

    change: str
    peak_bytes: int
    fits: bool
    speed: float | None = None
    host_bytes: int = 0
    settings: Settings | None = None

    def data(self) -> dict[str, Any]:
        """Returns the suggestion as JSON data."""
        return self._asdict() | {"settings": self.settings and dataclasses.asdict(self.settings)}


@dataclasses.dataclass(frozen=True)
class Plan:
    """The predicted memory and time of a step on a cluster.

    Attributes:
        what: the name of the preset, the model or the function.
        cluster: the cluster that the step is planned for.
        settings: the options of the step, with `rows` filled in.
        parameters: the number of parameters of the model.
        memory: the memory of a device, by formula.
        limit_bytes: the device memory that a program may use.
        host_limit_bytes: the host memory that it may pin for each device.
        time: the time of a step, by formula.
        tokens: of all devices in a step; the number of rows, if rows have no tokens.
        flops: of all devices in a step, without recomputation; None if they are not known.
        program: the compiled step; None if it was not compiled.
        suggestions: changes that save memory, or that use the free memory.
        notes: matrix products in fp32 that cost most of the time, and reasons why the formula is not sure.
        row_tokens: tokens in a row; 1 if rows have no tokens.
    """

    what: str
    cluster: Cluster
    settings: Settings
    parameters: int
    memory: Memory
    limit_bytes: int
    host_limit_bytes: int
    time: FormulaTime
    tokens: int = 0
    flops: int | None = None
    program: CompiledStep | None = None
    suggestions: tuple[Suggestion, ...] = ()
    notes: tuple[str, ...] = ()
    row_tokens: int = 1

    @property
    def peak_bytes(self) -> int:
        """The peak memory of a device, of the compiled step if there is one, else by formula."""
        return self.program.peak_bytes if self.program else self.memory.peak_bytes

    @property
    def host_bytes(self) -> int:
        """The bytes in pinned host memory for each device."""
        return self.program.host_bytes if self.program else self.memory.host_bytes

    @property
    def held(self) -> dict[str, int]:
        """The bytes of a device at the moment of peak memory, by category."""
        compiled = self.program.held if self.program else None
        return compiled or {term.name: term.num_bytes for term in self.memory.terms}

    @property
    def fits(self) -> bool:
        """Whether the peak memory of the device and that of its host are within their limits."""
        return self.peak_bytes <= self.limit_bytes and self.fits_host

    @property
    def fits_host(self) -> bool:
        """Whether what is in pinned host memory is within the limit."""
        return self.host_bytes <= self.host_limit_bytes

    @property
    def room_bytes(self) -> int:
        """The free memory below the limit; negative if the step does not fit."""
        return self.limit_bytes - self.peak_bytes

    @property
    def prediction(self) -> Prediction | None:
        """The time that the schedule of the compiled step takes; None without a program that could be analyzed."""
        return self.program.prediction if self.program else None

    @property
    def step_s(self) -> float:
        """Seconds of a step, from the compiled schedule if there is one, else by formula."""
        return self.prediction.step_s if self.prediction else self.time.step_s

    @property
    def bound_by(self) -> str:
        """What limits the time of a step: a lane of the compiled schedule, or as in `FormulaTime.bound`."""
        return self.prediction.bound_by if self.prediction else self.time.bound

    @property
    def throughput(self) -> Throughput:
        """Tokens per second and the utilization of the devices, from `step_s`."""
        return formula.throughput(self.step_s, self.cluster, self.tokens, self.flops)

    @property
    def sent_bytes(self) -> float:
        """The bytes that a device sends in a step, of the compiled step if there is one, else by formula."""
        if self.program and self.program.collectives is not None:
            return sum(row.sent_bytes for row in self.program.collectives)
        return self.formula_bytes

    @property
    def formula_bytes(self) -> float:
        """The bytes that a device sends in a step, by formula."""
        of_stage = formula.sent_bytes(self.settings, self.parameters, self.cluster.num_devices)
        return sum(of_stage) + self.time.update_bytes

    def data(self) -> dict[str, object]:
        """Returns the plan as JSON data. Bytes are per device."""
        compiled = self.program._asdict() if self.program else {}
        collectives = self.program and self.program.collectives
        same = "what", "parameters", "fits", "peak_bytes", "limit_bytes", "host_bytes", "host_limit_bytes", "tokens"
        same += "step_s", "bound_by", "sent_bytes"
        return {name: getattr(self, name) for name in same} | {
            "target": self.cluster.target,
            "num_devices": self.cluster.num_devices,
            "settings": dataclasses.asdict(self.settings),
            "level": "compiled" if self.program else "formula",
            "capacity_bytes": self.cluster.chip.memory_bytes,
            "held_bytes": self.held,
            "collectives": collectives and [row._asdict() for row in collectives],
            "terms": [term._asdict() for term in self.memory.terms],
            "formula_peak_bytes": self.memory.peak_bytes,
            "program": {name: compiled[name] for name in compiled if name not in _NOT_OF_PROGRAM} or None,
            "formula_s": self.time.data(),
            "time_level": "compiled" if self.prediction else "formula",
            "busy_s": self.prediction and dict(self.prediction.busy_s),
            "tokens_per_s": self.throughput.tokens_per_s,
            "tokens_per_device_s": self.throughput.tokens_per_device_s,
            "mfu": self.throughput.model_flop_utilization,
            "notes": list(self.notes),
            "suggestions": [suggestion.data() for suggestion in self.suggestions],
        }


_NOT_OF_PROGRAM = frozenset(["prediction", "collectives"])  # in a plan's data


def used_share(memory: Plan | Suggestion, limits: Plan) -> float:
    """The share of its limit that a step takes of the device's memory or of its host's, whichever is larger."""
    return max(memory.peak_bytes / limits.limit_bytes, memory.host_bytes / limits.host_limit_bytes)


class Planner:
    """Plans the steps of one job on one cluster. All plans share their traces. The arguments are those of
    `search.plan`.
    """

    def __init__(
        self,
        what: str | Transformer,
        target: str | Cluster,
        *,
        memory_share: float | None = None,
        host_memory_bytes: int | None = None,
    ):
        self.what, self.cluster = what, target if isinstance(target, Cluster) else hardware.cluster(target)
        self.shapes = shapes_of(what)
        self.name = self.shapes.name if self.shapes else str(what)
        chip = self.cluster.chip
        share = MEMORY_SHARE.get(chip.name) or MEMORY_SHARE[chip.platform] if memory_share is None else memory_share
        if not 0 < share <= 1:
            raise ValueError(f"plan: memory_share is {share}\n  fix:      pass a share of the memory: 0 < share <= 1")
        self.limit_bytes = int(share * chip.memory_bytes)
        self.host_limit_bytes = int(host_memory_bytes or _HOST_SHARE * chip.host_memory_bytes)
        self.tracer = Tracer(find_job(what, chip), chip.platform)

    def estimate(self, settings: Settings) -> Plan:
        """The plan of one step by formula, without notes and suggestions."""
        if self.shapes and (settings.model or 1) > 1:
            raise ValueError(
                f"plan: {self.name!r} cannot be divided over a model axis of {settings.model}\n"
                f"  fix:      use --replica, or --job with a model that is annotated"
            )
        job = self.tracer.job
        settings = dataclasses.replace(settings, rows=settings.rows or job.rows)
        leaves = self._state(settings).layout.leaves
        return Plan(
            self.name,
            self.cluster,
            settings,
            sum(leaf.size for leaf in leaves),
            self.tracer.memory(settings, self.cluster.num_devices),
            self.limit_bytes,
            self.host_limit_bytes,
            self.formula_time(settings),
            self.num_tokens(settings),
            self.model_flops(settings),
            row_tokens=job.tokens,
        )

    def plan(
        self,
        settings: Settings,
        devices: Sequence[object] | None = None,
        dump: Path | None = None,
    ) -> Plan:
        """The plan of one step without suggestions, which is compiled for `devices` if they are given."""
        found = self.estimate(settings)
        settings, config = found.settings, self.tracer.zero(found.settings, self.cluster.num_devices).config
        program = None if devices is None else self._compiled(found, devices, dump)
        loss = self.tracer.loss(settings, self.cluster.num_devices).traced
        about_model = formula.notes_of_shapes(self.shapes, self.cluster.chip) if self.shapes else ()
        about_shards = formula.notes_of_shards(self._state(settings).layout.leaves, config)
        about_loss = formula.notes(loss, found.memory, self.cluster, settings)
        return dataclasses.replace(found, program=program, notes=(*about_model, *about_shards, *about_loss))

    def _state(self, settings: Settings) -> TrainState:
        return self.tracer.state(self.tracer.zero(settings, self.cluster.num_devices), settings)

    def formula_time(self, settings: Settings) -> FormulaTime:
        """The time of a step by formula."""
        num_devices, chip = self.cluster.num_devices, self.cluster.chip
        state = self._state(settings)
        # The forward and the backward pass, which a `model` axis divides.
        compute = self.tracer.device_trace(settings, num_devices).compute_time(chip)
        compute = ComputeTime().plus(compute, 1 / (settings.model or 1))
        # Copies from the host and back.
        flags = in_host(self.tracer.zero(settings, num_devices).config, state).params
        params = itertools.compress(jax.tree.leaves(state.params), jax.tree.leaves(flags))
        host_params = sum(shard_bytes(a, a.sharding) // a.dtype.itemsize for a in params)
        host_state = self.tracer.memory(settings, num_devices).host_state_bytes
        copies = formula.host_copies(settings, host_state, host_params)
        beside, update = (num_bytes / chip.host_rate.effective for num_bytes in copies)
        links = self.cluster, settings, sum(leaf.size for leaf in state.layout.leaves)
        by_owners = formula.update_cost(self.cluster, self.tracer.owners(settings, num_devices))
        times = formula.link_seconds(*links), update, beside, formula.exposed_seconds(*links), *by_owners
        return FormulaTime(compute, *times)

    def model_flops(self, settings: Settings) -> int | None:
        """The flops of a step on all devices without recomputation, see `jaxpr_counts.model_flops`; None if unknown."""
        loss = self.tracer.loss(settings, self.cluster.num_devices).traced.closed.jaxpr
        num_parts = self.cluster.num_devices // (settings.model or 1) * settings.num_microbatches
        try:
            return model_flops(loss) * num_parts
        except ValueError:  # of a kernel
            return None

    def _compiled(self, found: Plan, devices: Sequence[object], dump: Path | None) -> CompiledStep:
        tracer = self.tracer
        if self.shapes:
            tracer = Tracer(find_job(self.what, self.cluster.chip, compiled=True), self.cluster.chip.platform)
        axes = dict(tracer.zero(found.settings, devices).config.mesh.shape)
        step = tracer.step(found.settings, devices)
        return compile_step(step, self.cluster, axes, found.memory, self.limit_bytes, dump)

    def num_tokens(self, settings: Settings) -> int:
        """The tokens of all devices in a step."""
        job, num_devices = self.tracer.job, self.cluster.num_devices // (settings.model or 1)
        return num_rows(job, settings, num_devices) * job.tokens
