"""Whether a step fits on a cluster, by formula or by its compiler, and what would change that."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from zerojax.analysis import jaxpr_stats, targets
from zerojax.analysis.hardware import Cluster, cluster
from zerojax.plan import presets
from zerojax.plan.presets import Job
from zerojax.plan.program import CompiledStep, compile_step
from zerojax.plan.utilisation import Throughput, model_flops, throughput
from zerojax.report.memory import Memory, step_memory
from zerojax.sharding.mesh import make_mesh
from zerojax.transform.remat import Remat
from zerojax.zero import Zero

# The share of a device's memory that a program may use. GPUs: what JAX takes without XLA_CLIENT_MEM_FRACTION (JAX's
# documentation, "GPU memory allocation", 2026-11). TPUs: 15.75 GiB of a v5e's 16 are left by what is reserved (the
# compiler's own message, libtpu 0.0.41, 2026-11); that it is as much elsewhere is a guess.
MEMORY_SHARE = {"cuda": 0.75, "tpu": 0.984, "cpu": 1.0}
_MOST_OF_A_GPU = 0.95  # a guess: the driver and NCCL take some of the rest
REMATS = ("none", "dots", "full", "offload")  # from what holds most to what holds least


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a step is built; the defaults of `rows` are those of the model.

    Attributes:
        stage, precision: of `Zero`.
        rows: on a device in a microbatch.
        num_microbatches, prefetch, bucket_bytes: of `Zero.train_step`.
        remat: 'none', 'dots', 'full', or 'offload': as 'full', with the inputs of layers in host memory.
        replica, model: of `make_mesh`.
    """

    stage: int = 3
    precision: str = "bf16"
    rows: int | None = None
    num_microbatches: int = 1
    remat: str = "full"
    prefetch: int = 1
    bucket_bytes: int | None = None
    replica: int = 1
    model: int | None = None

    def python(self) -> str:
        """The calls that build the step."""
        given = (("replica", self.replica), ("model", self.model))
        mesh = ", ".join(f"{name}={size}" for name, size in given if size not in (None, 1))
        remat = "zerojax.Remat(offload_inputs=True)" if self.remat == "offload" else repr(self.remat)
        step = [f"remat={remat}", f"prefetch={self.prefetch}"]
        step += [f"num_microbatches={self.num_microbatches}"] if self.num_microbatches > 1 else []
        step += [f"bucket_bytes={self.bucket_bytes}"] if self.bucket_bytes else []
        return (
            f"zero = zerojax.Zero(zerojax.make_mesh({mesh}), stage={self.stage}, precision={self.precision!r})\n"
            f"step = zero.train_step(loss_fn, {', '.join(step)})"
        )


class Suggestion(NamedTuple):
    """A change, what a device would hold with it by formula, and whether that fits."""

    change: str
    peak_bytes: int
    fits: bool


@dataclasses.dataclass(frozen=True)
class Plan:
    """A step on a cluster.

    Attributes:
        what: the preset or the function.
        cluster: where.
        settings: how, with `rows` filled in.
        parameters: of the model.
        memory: by formula.
        limit_bytes: what a program may use on a device.
        program: by the compiler; None if it was not asked.
        throughput: by the schedule of the compiled program; None if that could not be read.
        suggestions: what else could be done.
    """

    what: str
    cluster: Cluster
    settings: Settings
    parameters: int
    memory: Memory
    limit_bytes: int
    program: CompiledStep | None = None
    throughput: Throughput | None = None
    suggestions: tuple[Suggestion, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """By the compiler where it was asked, else by formula."""
        return self.program.peak_bytes if self.program else self.memory.peak_bytes

    @property
    def host_bytes(self) -> int:
        return self.program.host_bytes if self.program else self.memory.host_bytes

    @property
    def held(self) -> dict[str, int]:
        """Bytes of a device when memory is fullest, by category: of the compiled program if it was read."""
        planned = self.program.reading.held if self.program else None
        return planned or {term.name: term.num_bytes for term in self.memory.terms}

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.limit_bytes

    @property
    def room_bytes(self) -> int:
        """What is left; negative if it does not fit."""
        return self.limit_bytes - self.peak_bytes

    def data(self) -> dict[str, Any]:
        """All of it for a program, bytes on one device."""
        program, timed, traffic = None, None, None
        if self.program:
            reading, timed = self.program.reading, self.program.reading.prediction
            traffic = reading.traffic and [row._asdict() for row in reading.traffic]
            program = self.program._asdict() | reading._asdict()
            for told_elsewhere in "reading", "text", "prediction", "traffic":
                del program[told_elsewhere]
        return {
            "what": self.what,
            "target": self.cluster.target,
            "num_devices": self.cluster.num_devices,
            "settings": dataclasses.asdict(self.settings),
            "parameters": self.parameters,
            "fits": self.fits,
            "level": "compiled" if self.program else "formula",
            "peak_bytes": self.peak_bytes,
            "limit_bytes": self.limit_bytes,
            "capacity_bytes": self.cluster.chip.memory_bytes,
            "host_bytes": self.host_bytes,
            "held_bytes": self.held,
            "collectives": traffic,
            "terms": [term._asdict() for term in self.memory.terms],
            "formula_peak_bytes": self.memory.peak_bytes,
            "program": program,
            "step_s": timed and timed.step_s,
            "bound_by": timed and timed.bound_by,
            "busy_s": timed and dict(timed.busy_s),
            "tokens_per_device_s": self.throughput and self.throughput.tokens_per_device_s,
            "mfu": self.throughput and self.throughput.model_flop_utilisation,
            "suggestions": [suggestion._asdict() for suggestion in self.suggestions],
        }


def plan(
    what: str,
    target: str,
    settings: Settings = Settings(),
    *,
    compile: bool = False,
    memory_share: float | None = None,
    calibration: Path | None = None,
    dump: Path | None = None,
    suggest: bool = True,
) -> Plan:
    """Whether a step fits.

    Args:
        what: a preset (`presets.PRESETS`), or 'module:function', which returns a `Job`.
        target: as `targets.devices` names it.
        settings: of the step.
        compile: also compile the step for the target. Without, no compiler and no accelerator package is needed.
        memory_share: of a device's memory that a program may use. Default: `MEMORY_SHARE`.
        calibration: a file that `calibrate` wrote on such a chip; its rates are used.
        dump: a folder for the compiled program's text.
        suggest: also say what would change the verdict.

    Raises:
        ValueError: an unknown preset, function, target or setting, or rows that do not divide.
        RuntimeError: the target's compiler is not installed; the text says how.

    Cost: a trace of the step, about a second, and one for each suggestion; compiling takes 10 to 60 s.
    """
    where = cluster(target, calibration)
    share = MEMORY_SHARE[where.chip.platform] if memory_share is None else memory_share
    if not 0 < share <= 1:
        raise ValueError(f"plan: memory_share is {share}\n  fix:      a share of the device's memory: 0 < share <= 1")
    if what in presets.PRESETS and (settings.model or 1) > 1:
        raise ValueError(
            f"plan: {what!r} is not divided over a model axis of {settings.model}\n"
            f"  fix:      --replica, or a job of your own whose model is annotated"
        )
    limit = int(share * where.chip.memory_bytes)
    devices = targets.devices(target) if compile else None  # before JAX looks for devices
    job = find_job(what, where.chip.platform, compiled=False)
    settings = dataclasses.replace(settings, rows=settings.rows or job.rows)
    traced = trace(job, where.num_devices, settings)
    program = speed = None
    if devices is not None:
        exact = trace(find_job(what, where.chip.platform, compiled=True), devices, settings)
        axes = dict(exact.zero.config.mesh.shape)
        program = compile_step(exact.step, where, axes, traced.memory.arguments_bytes, dump)
        if program.reading.prediction:
            speed = _throughput(what, where, settings, program.reading.prediction.step_s)
    found = Plan(what, where, settings, traced.parameters, traced.memory, limit, program, speed)
    suggestions = tuple(_suggestions(found, job)) if suggest else ()
    return dataclasses.replace(found, suggestions=suggestions)


def find_job(what: str, platform: str, compiled: bool) -> Job:
    """The job of a preset, or of the user's function.

    Args:
        what: see `plan`.
        platform: that it is for; programs for GPUs have fused attention.
        compiled: it is to be compiled; else it is only traced, and needs no package of the platform.
    """
    if what in presets.PRESETS:
        fused = presets.cudnn_attention if compiled else presets.described_attention
        return presets.job(presets.PRESETS[what], fused if platform == "cuda" else None)
    module, colon, name = what.partition(":")
    if not colon:
        raise ValueError(
            f"plan: no preset {what!r}\n  fix:      one of {', '.join(presets.PRESETS)}, or 'module:function'"
        )
    try:
        made = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"plan: {what!r} cannot be called\n  got:      {error}\n"
            f"  fix:      'module:function' with a module that Python finds (PYTHONPATH=.)"
        ) from error
    if not isinstance(made, Job):
        raise ValueError(
            f"plan: {what!r} returns no job\n  got:      {type(made).__name__}\n"
            f"  fix:      return zerojax.plan.Job(create_model, tx, loss_fn, batch, rows=..., tokens=...)"
        )
    return made


class Traced(NamedTuple):
    """A step that was traced for a cluster, and what it holds by formula."""

    zero: Zero
    step: Any
    parameters: int
    memory: Memory


def trace(job: Job, devices: Any, settings: Settings) -> Traced:
    """A step on devices, or on as many as a number says."""
    mesh = make_mesh(devices=devices, replica=settings.replica, model=settings.model)
    zero = Zero(mesh, settings.stage, settings.precision)
    state = zero.eval_init(job.create_model, job.tx)
    remat = Remat(offload_inputs=True) if settings.remat == "offload" else settings.remat
    step = zero.train_step(
        job.loss_fn,
        num_microbatches=settings.num_microbatches,
        remat=remat,
        prefetch=settings.prefetch,
        bucket_bytes=settings.bucket_bytes,
    )
    batch = job.batch(num_rows(job, settings, zero.config.axes.num_devices))
    traced = step.trace(state, batch)
    memory = step_memory(zero.config, step.settings, state, traced, batch)
    return Traced(zero, traced, sum(leaf.size for leaf in state.definition.leaves), memory)


def num_rows(job: Job, settings: Settings, num_devices: int) -> int:
    """Of a step over that many devices, those that divide one row among them counting once."""
    return (settings.rows or job.rows) * settings.num_microbatches * num_devices


def model_flops_of(what: str, where: Cluster, settings: Settings) -> int:
    """Of a step of all devices, without what is computed again: three times the products of the loss.

    They are counted where attention is written out. See `utilisation`.
    """
    job = find_job(what, "", compiled=False)
    num_devices = where.num_devices // (settings.model or 1)
    zero = Zero(make_mesh(devices=num_devices), stage=0)
    rows = num_rows(job, settings, num_devices)
    evaluated = zero.eval_step(job.loss_fn).trace(zero.eval_init(job.create_model, job.tx), job.batch(rows))
    (program,) = jaxpr_stats.manual_parts(evaluated.jaxpr)
    return model_flops(program) * num_devices


def _throughput(what: str, where: Cluster, settings: Settings, step_s: float) -> Throughput:
    job = find_job(what, "", compiled=False)
    num_tokens = num_rows(job, settings, where.num_devices // (settings.model or 1)) * job.tokens
    return throughput(step_s, where, num_tokens, model_flops_of(what, where, settings))


def _suggestions(found: Plan, job: Job) -> Iterator[Suggestion]:
    """If the step does not fit: what makes it smaller. If it does: what the room could be used for."""
    chip = found.cluster.chip
    if chip.platform == "cuda" and found.limit_bytes < found.peak_bytes <= _MOST_OF_A_GPU * chip.memory_bytes:
        yield Suggestion(f"XLA_CLIENT_MEM_FRACTION={_MOST_OF_A_GPU} in the environment", found.peak_bytes, True)
    changes = _smaller if not found.fits else _faster
    correction = max(0, found.peak_bytes - found.memory.peak_bytes)  # of the formula, where the compiler was asked
    for text, settings, num_devices in changes(found):
        memory = trace(job, num_devices, settings).memory
        peak_bytes = memory.peak_bytes + correction
        if found.fits or peak_bytes < found.peak_bytes:
            yield Suggestion(text, peak_bytes, peak_bytes <= found.limit_bytes)


Change = tuple[str, Settings, int]


def _smaller(found: Plan) -> Iterator[Change]:
    settings, num_devices = found.settings, found.cluster.num_devices
    change = functools.partial(dataclasses.replace, settings)
    if settings.stage < 3:
        yield "stage 3", change(stage=3), num_devices
    for remat in REMATS[REMATS.index(settings.remat) + 1 :] if settings.remat in REMATS else ():
        yield f"remat={remat!r}", change(remat=remat), num_devices
    if settings.rows and settings.rows % 2 == 0:
        twice = 2 * settings.num_microbatches
        halved = change(rows=settings.rows // 2, num_microbatches=twice)
        yield f"the same rows in {twice} microbatches of {settings.rows // 2}", halved, num_devices
    if settings.stage in (1, 2) and settings.bucket_bytes is None:
        yield "bucket_bytes=2**28 (stacks move in pieces)", change(bucket_bytes=2**28), num_devices
    if settings.prefetch:
        yield "prefetch=0 (each unit waits for its weights)", change(prefetch=0), num_devices
    if settings.stage:
        yield f"{4 * num_devices} devices", settings, 4 * num_devices


def _faster(found: Plan) -> Iterator[Change]:
    settings, num_devices = found.settings, found.cluster.num_devices
    change = functools.partial(dataclasses.replace, settings)
    for remat in REMATS[: REMATS.index(settings.remat)] if settings.remat in REMATS else ():
        yield f"remat={remat!r}: less is computed again", change(remat=remat), num_devices
    if settings.rows:
        yield (
            f"{2 * settings.rows} rows: twice the work for the same bytes",
            change(rows=2 * settings.rows),
            num_devices,
        )
    if settings.stage:
        lower = settings.stage - 1
        yield f"stage {lower}{': fewer bytes sent' if settings.stage == 3 else ''}", change(stage=lower), num_devices
