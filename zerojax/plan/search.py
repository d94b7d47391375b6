"""Plans a step and looks for better settings: changes that help it, and the fastest settings of all.

The search estimates all settings by formula, and compiles the best few.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from zerojax.analysis import targets
from zerojax.analysis.hardware import Cluster
from zerojax.plan.job import DEFAULT_SETTINGS, REMATS, Settings
from zerojax.plan.planner import Plan, Planner, Suggestion, used_share
from zerojax.plan.transformer import Transformer
from zerojax.step.config import OFFLOADS
from zerojax.utils import versions

NAIVE = Settings(stage=3, remat="full", prefetch=0)


_MAX_GPU_SHARE = 0.95  # a guess: the driver and NCCL need some of the rest


def plan(
    what: str | Transformer,
    target: str | Cluster,
    settings: Settings = DEFAULT_SETTINGS,
    *,
    compile: bool = False,
    memory_share: float | None = None,
    host_memory_bytes: int | None = None,
    dump: Path | None = None,
    suggest: bool = True,
) -> Plan:
    """Predicts whether a step fits on a cluster, and its time.

    Args:
        what: a preset (`PRESETS`), 'module:function' with a function that returns a `Job`, or the shapes of a
            model, such as those of `from_hugging_face`.
        target: the name of a cluster, as in `targets.devices`, or a cluster, which may have the rates that `calibrate`
            measured: `cluster(name, calibration)`.
        settings: the options of the step.
        compile: whether to compile the step for the target. If not, neither a compiler nor an accelerator package is
            needed.
        memory_share: the share of a device's memory that a program may use, for which XLA schedules it too. The default
            is `MEMORY_SHARE`.
        host_memory_bytes: the host memory that a program may pin for each device. The default is 0.8 of the memory of a
            host, divided by its devices.
        dump: a folder to which the text of the compiled program is written.
        suggest: whether to look for changes that save memory, or that use the free memory.

    Returns:
        A `Plan`. Its bytes are per device.

    Raises:
        ValueError: if a preset, function, target or setting is unknown, or if the rows cannot be divided.
        RuntimeError: if the compiler of the target is not installed. The message says how to install it.

    Cost: creates the model and traces its loss once, and traces the step without layers that equal others, once more
        for each suggestion: some seconds in all. Compiling takes 10 to 60 s, and more for layers that are not scanned.
    """
    name = target.target if isinstance(target, Cluster) else target
    devices = targets.devices(name) if compile else None  # before JAX looks for devices
    planner = Planner(what, target, memory_share=memory_share, host_memory_bytes=host_memory_bytes)
    found = planner.plan(settings, devices, dump)
    return with_suggestions(planner, found) if suggest else found


def with_suggestions(planner: Planner, found: Plan) -> Plan:
    """The plan with what would save memory if the step does not fit, or would use the free memory if it does."""
    return dataclasses.replace(found, suggestions=tuple(_suggestions(planner, found)))


def _suggestions(planner: Planner, found: Plan) -> Iterator[Suggestion]:
    chip, num_devices = found.cluster.chip, found.cluster.num_devices
    if chip.platform == "cuda" and found.limit_bytes < found.peak_bytes <= _MAX_GPU_SHARE * chip.memory_bytes:
        change = f"XLA_CLIENT_MEM_FRACTION={_MAX_GPU_SHARE} in the environment"
        yield Suggestion(change, found.peak_bytes, found.fits_host, 1.0, found.host_bytes)
    changes = memory_reductions if not found.fits else uses_of_free_memory
    correction = max(0, found.peak_bytes - found.memory.peak_bytes)  # of the formula, if compiled
    for text, settings, count in changes(found.settings, num_devices):
        if not planner.tracer.can_store(settings, count):
            continue
        memory = planner.tracer.memory(settings, count)
        peak_bytes, host_bytes = memory.peak_bytes + correction, memory.host_bytes
        helps = peak_bytes < found.peak_bytes or (not found.fits_host and host_bytes < found.host_bytes)
        if not found.fits and not helps:
            continue
        fits, speed = peak_bytes <= found.limit_bytes and host_bytes <= found.host_limit_bytes, None
        if count == num_devices:  # of other TPUs, the shape of the slice would have to be known
            rate = planner.num_tokens(settings) / planner.formula_time(settings).step_s
            speed = rate * found.time.step_s / found.tokens
        yield Suggestion(text, peak_bytes, fits, speed, host_bytes, settings if count == num_devices else None)


Change = tuple[str, Settings, int]


def memory_reductions(settings: Settings, num_devices: int) -> Iterator[Change]:
    """Yields what may save memory: (its text, the settings, the number of devices)."""
    change = functools.partial(dataclasses.replace, settings)
    if settings.stage < 3 and num_devices > 1:
        yield "stage 3", change(stage=3), num_devices
    for remat in REMATS[REMATS.index(settings.remat) + 1 :] if settings.remat in REMATS else ():
        yield f"remat={remat!r}", change(remat=remat), num_devices
    if settings.replica > 1 and settings.stage and not settings.shards_outer:
        yield "outer_sharding='optimizer' (over replicas too)", change(outer_sharding="optimizer"), num_devices
    if settings.offload == "none":
        yield "offload='optimizer' (its state in host memory)", change(offload="optimizer"), num_devices
    if settings.offload != "params" and settings.replica == 1 and (settings.stage == 3 or num_devices == 1):
        yield "offload='params' (all of the state in host memory)", change(offload="params"), num_devices
    bits = settings.moment_bits or 8
    if settings.moment_bits is None:
        yield "zerojax.low_bit_moments(tx) (rounded to 8 bits)", change(moment_bits=bits), num_devices
    if settings.precision == "bf16":
        both = change(moment_bits=bits, precision="bf16_params")
        yield f"precision='bf16_params' and {bits}-bit moments (no master copy)", both, num_devices
    if settings.rows and settings.rows % 2 == 0:
        twice = 2 * settings.num_microbatches
        halved = change(rows=settings.rows // 2, num_microbatches=twice)
        yield f"{twice} microbatches of {settings.rows // 2} rows", halved, num_devices
    if settings.stage in (1, 2) and settings.bucket_bytes is None:
        yield "bucket_bytes=2**28 (moves stacks in pieces)", change(bucket_bytes=2**28), num_devices
    if settings.prefetch:
        yield "prefetch=0 (each unit waits for its weights)", change(prefetch=0), num_devices
    if settings.stage:
        yield f"{4 * num_devices} devices", settings, 4 * num_devices


def uses_of_free_memory(settings: Settings, num_devices: int) -> Iterator[Change]:
    """Yields what may make a step faster that has free memory; see `memory_reductions`."""
    change = functools.partial(dataclasses.replace, settings)
    if settings.offload == "params":
        yield "offload='optimizer' (no copies of weights)", change(offload="optimizer"), num_devices
    if settings.offload != "none":
        yield "offload='none' (no copies of the optimizer's state)", change(offload="none"), num_devices
    for remat in REMATS[: REMATS.index(settings.remat)] if settings.remat in REMATS else ():
        yield f"remat={remat!r} (less recomputation)", change(remat=remat), num_devices
    if settings.rows:
        twice = 2 * settings.rows
        yield f"{twice} rows (twice the work for the same communication)", change(rows=twice), num_devices
    if settings.stage and num_devices > 1:  # one device has all and sends nothing, at every stage
        lower = settings.stage - 1
        yield f"stage {lower}{' (less communication)' * (settings.stage == 3)}", change(stage=lower), num_devices


# The fastest settings.


def bound(candidate: Plan) -> str:
    """What limits a step by formula, see `FormulaTime.bound`, or 'does not fit'."""
    return candidate.time.bound if candidate.fits else "does not fit"


class Ranking(NamedTuple):
    """The result of a search.

    Attributes:
        what: the preset or function.
        candidates: plans without notes: first those that were compiled, then all others, each from the fastest to the
            slowest.
        naive: the naive choice, `NAIVE`, compiled if candidates are.
        best: the plan of the winner, by formula if nothing was compiled; if nothing fits, of what comes closest.
        missing: which compiler is missing, if candidates were to be compiled; None if none is.
    """

    what: str
    cluster: Cluster
    candidates: tuple[Plan, ...]
    naive: Plan
    best: Plan
    missing: str | None = None

    def data(self) -> dict[str, object]:
        """The ranking as JSON data, with the naive choice, the winner and the best plan."""
        return {
            "what": self.what,
            "target": self.cluster.target,
            "level": "compiled" if self.is_compiled else "formula",
            "best": self.best.data(),
            "candidates": [_data(each) for each in self.candidates],
            "naive": _data(self.naive),
            "winner": self.winner and _data(self.winner),
        }

    @property
    def is_compiled(self) -> bool:
        return self.naive.program is not None

    @property
    def winner(self) -> Plan | None:
        """The fastest candidate that fits, of those that were compiled if any were; None if there is none."""
        return _winner(self.candidates, self.is_compiled)


def _data(candidate: Plan) -> dict[str, object]:
    same = {name: getattr(candidate, name) for name in ("peak_bytes", "host_bytes", "fits", "step_s")}
    return same | {
        "settings": dataclasses.asdict(candidate.settings),
        "time": candidate.time.data(),
        "plan": candidate.data() if candidate.program else None,
        "bound": bound(candidate),
        "python": candidate.settings.python(),
    }


def _winner(candidates: tuple[Plan, ...], is_compiled: bool) -> Plan | None:
    return next((each for each in candidates if each.fits and (each.program or not is_compiled)), None)


def search(
    what: str | Transformer,
    target: str | Cluster,
    settings: Settings = DEFAULT_SETTINGS,
    *,
    memory_share: float | None = None,
    host_memory_bytes: int | None = None,
    num_compiled: int = 3,
    on_step: Callable[[str], None] = lambda message: None,
) -> Ranking:
    """Searches over stages, rematerialization, microbatches, offloading, and sharding within a host or all devices.

    Args:
        what, target, memory_share, host_memory_bytes: as in `plan`.
        settings: of these, `precision`, `wire` and `moment_bits` stay as they are; `rows` are those of a device in a
            step, in one or more microbatches.
        num_compiled: how many of the fastest candidates that fit by formula are compiled. If 0, or if the compiler of
            the target is not installed, nothing is compiled, not even the naive choice.
        on_step: called with a message before each step of the search.

    Raises:
        ValueError: as `plan`.
        RuntimeError: if the compiler rejects the topology, or if this process has too few simulated devices.

    Cost: one or two seconds for each of some dozens of settings (hundreds, if several hosts and numbers of microbatches
        are possible), and `num_compiled` + 1 compilations.
    """
    name = target.target if isinstance(target, Cluster) else target
    missing = versions.missing_compiler(targets.platform(name)) if num_compiled else None
    num_compiled = 0 if missing else num_compiled
    devices = targets.devices(name) if num_compiled else None  # before JAX looks for devices
    planner = Planner(what, target, memory_share=memory_share, host_memory_bytes=host_memory_bytes)
    rows = settings.rows or planner.tracer.job.rows
    kept = {"precision": settings.precision, "wire": settings.wire, "moment_bits": settings.moment_bits}

    def estimate(settings: Settings) -> Plan:
        on_step(f"stage {settings.stage}, remat {settings.remat!r}")
        return planner.estimate(settings)

    def compiled(candidate: Plan) -> Plan:
        on_step(f"compiling stage {candidate.settings.stage}, remat {candidate.settings.remat!r}")
        return planner.plan(candidate.settings, devices)

    # Estimate all candidates by formula. Of two equally fast ones, that with fewer microbatches has larger kernels.
    num_devices = planner.cluster.num_devices
    storable = {o: planner.tracer.can_store(Settings(rows=rows, offload=o, **kept), num_devices) for o in OFFLOADS}
    considered = [dataclasses.replace(s, **kept) for s in _settings(planner.cluster, rows) if storable[s.offload]]
    found = sorted(
        map(estimate, considered), key=lambda p: (not p.fits, p.step_s, p.settings.num_microbatches, p.peak_bytes)
    )
    # Compile the best, and the naive choice to compare with.
    best = [compiled(candidate) for candidate in found[:num_compiled] if candidate.fits]
    best.sort(key=lambda p: (not p.fits, p.step_s))
    naive = estimate(dataclasses.replace(NAIVE, rows=rows, **kept))
    naive = compiled(naive) if num_compiled else naive
    candidates = (*best, *found[len(best) :])
    chosen = _winner(candidates, bool(num_compiled)) or min(candidates, key=lambda p: used_share(p, p))
    chosen = chosen if chosen.program else planner.plan(chosen.settings)
    return Ranking(planner.name, planner.cluster, candidates, naive, chosen, missing)


def _settings(cluster: Cluster, rows: int) -> Iterator[Settings]:
    stages = (0, 1, 2, 3) if cluster.num_devices > 1 else (NAIVE.stage,)  # on one device, all stages are the same
    replicas = [1, *_replicas(cluster)]
    microbatches = [k for k in range(1, rows + 1) if rows % k == 0]
    for stage, remat, k, replica, offload in itertools.product(stages, REMATS, microbatches, replicas, OFFLOADS):
        holds_shards = replica == 1 and (stage == 3 or cluster.num_devices == 1)
        if (stage or replica == 1) and (offload != "params" or holds_shards):
            outer = "optimizer" if replica > 1 and stage < 3 else None  # sends no more bytes, and takes less memory
            places = {"replica": replica, "outer_sharding": outer, "offload": offload}
            yield Settings(stage, rows=rows // k, num_microbatches=k, remat=remat, **places)


def _replicas(cluster: Cluster) -> Iterator[int]:
    """Yields the sizes of the replica axis for sharding within one host, within 8 hosts, within 64, ..."""
    shards = cluster.devices_per_host
    while cluster.torus is None and shards < cluster.num_devices:
        if cluster.num_devices % shards == 0:
            yield cluster.num_devices // shards
        shards *= 8
