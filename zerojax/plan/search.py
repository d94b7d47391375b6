"""Searches for the fastest settings that fit: estimates all of them by formula, and compiles the best few."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from zerojax.analysis import targets
from zerojax.analysis.hardware import Cluster
from zerojax.plan.formula import FormulaTime
from zerojax.plan.job import DEFAULT_SETTINGS, REMATS, Settings
from zerojax.plan.planner import Plan, Planner, Suggestion
from zerojax.plan.transformer import Transformer
from zerojax.step.config import OFFLOADS
from zerojax.utils import versions

DOES_NOT_FIT = "does not fit"
NAIVE = Settings(stage=3, remat="full", prefetch=0)


class Candidate(NamedTuple):
    """Settings that the search considers.

    Attributes:
        settings: the settings, with rows and microbatches.
        peak_bytes: the peak memory of a device, by formula.
        host_bytes: the bytes in pinned host memory for each device, by formula.
        fits: whether the peaks of the device and of its host, by formula, are within their limits.
        time: the time of a step, by formula.
        plan: the compiled plan, or None if the settings were not compiled.
    """

    settings: Settings
    peak_bytes: int
    host_bytes: int
    fits: bool
    time: FormulaTime
    plan: Plan | None = None

    @property
    def step_s(self) -> float:
        """Seconds of a step as predicted from the compiled program, or else by formula."""
        predicted = self.plan.program.analysis.prediction if self.plan and self.plan.program else None
        return predicted.step_s if predicted else self.time.step_s

    def data(self) -> dict[str, Any]:
        """Returns the candidate as JSON data, with the compiled plan as 'plan'."""
        fields = self._asdict() | {"settings": dataclasses.asdict(self.settings), "time": self.time.data()}
        return fields | {
            "plan": self.plan and self.plan.data(),
            "step_s": self.step_s,
            "bound": self.bound,
            "python": self.settings.python(),
        }

    @property
    def bound(self) -> str:
        """What limits the step by formula, see `FormulaTime.bound`, or 'does not fit'."""
        if not self.fits or (self.plan is not None and not self.plan.fits):
            return DOES_NOT_FIT
        return self.time.bound


class Ranking(NamedTuple):
    """The result of a search.

    Attributes:
        what: the preset or function.
        cluster: the cluster.
        candidates: first those that were compiled, then all others, each from the fastest to the slowest.
        naive: the naive choice, `NAIVE`, compiled if candidates are.
        best: the plan of the winner, by formula if nothing was compiled; if nothing fits, of what comes closest.
        missing: which compiler is missing, if candidates were to be compiled; None if none is.
    """

    what: str
    cluster: Cluster
    candidates: tuple[Candidate, ...]
    naive: Candidate
    best: Plan
    missing: str | None = None

    def data(self) -> dict[str, Any]:
        """Returns the ranking as JSON data, with the naive choice, the winner and the best plan."""
        winner = self.winner
        return {
            "what": self.what,
            "target": self.cluster.target,
            "level": "compiled" if self.is_compiled else "formula",
            "best": self.best.data(),
            "candidates": [each.data() for each in self.candidates],
            "naive": self.naive.data(),
            "winner": winner and winner.data(),
        }

    @property
    def is_compiled(self) -> bool:
        return self.naive.plan is not None

    @property
    def winner(self) -> Candidate | None:
        """The fastest candidate that fits, of those that were compiled if any were; None if there is none."""
        return _winner(self.candidates, self.is_compiled)


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
        what, target, memory_share, host_memory_bytes: as in `planner.plan`.
        settings: of these, `precision` and `moment_bits` stay as they are, and `rows` are those of a device in a step,
            in one or more microbatches.
        num_compiled: how many of the fastest candidates that fit by formula are compiled. If 0, or if the compiler of
            the target is not installed, nothing is compiled, not even the naive choice.
        on_step: called with a message before each step of the search.

    Returns:
        A `Ranking` of all candidates.

    Raises:
        ValueError: as `planner.plan`.
        RuntimeError: if the compiler rejects the topology, or if this process has too few simulated devices.

    Cost: one or two seconds for each of some dozens of settings (hundreds, if several hosts and numbers of microbatches
        are possible), and `num_compiled` + 1 compilations.
    """
    name = target.target if isinstance(target, Cluster) else target
    missing = versions.missing_compiler(targets.platform(name)) if num_compiled else None
    num_compiled = 0 if missing else num_compiled
    devices = targets.devices(name) if num_compiled else None  # before JAX looks for devices
    planner = Planner(what, target, memory_share=memory_share, host_memory_bytes=host_memory_bytes)
    kept = {"precision": settings.precision, "moment_bits": settings.moment_bits}
    base = planner.with_rows(Settings(rows=settings.rows, **kept))
    cluster, rows = planner.cluster, base.rows or 1

    def candidate(settings: Settings) -> Candidate:
        on_step(f"stage {settings.stage}, remat {settings.remat!r}")
        memory = planner.memory(settings)
        fits = planner.fits(memory.peak_bytes, memory.host_bytes)
        return Candidate(settings, memory.peak_bytes, memory.host_bytes, fits, planner.formula_time(settings))

    # Estimate all candidates by formula.
    considered = [dataclasses.replace(s, **kept) for s in _settings(cluster, rows)]
    can_offload = {
        offload: planner.tracer.can_store(dataclasses.replace(base, offload=offload), cluster.num_devices)
        for offload in OFFLOADS
    }
    considered = [s for s in considered if can_offload[s.offload]]
    found = [candidate(s) for s in considered]
    # Of two equally fast ones, the one with fewer microbatches comes first: its kernels are larger.
    found.sort(key=lambda c: (not c.fits, c.step_s, c.settings.num_microbatches, c.peak_bytes))

    # Compile the best.
    def compiled(candidate: Candidate) -> Candidate:
        on_step(f"compiling stage {candidate.settings.stage}, remat {candidate.settings.remat!r}")
        return candidate._replace(plan=planner.plan(candidate.settings, devices, suggest=False))

    best = [compiled(c) for c in found[:num_compiled] if c.fits]
    best.sort(key=lambda c: (c.plan is None or not c.plan.fits, c.step_s))
    # Compare with the naive choice.
    naive = candidate(dataclasses.replace(NAIVE, rows=rows, **kept))
    naive = compiled(naive) if num_compiled else naive
    candidates = (*best, *found[len(best) :])
    chosen = _winner(candidates, bool(num_compiled)) or min(candidates, key=lambda c: used_share(c.plan or c, planner))
    plan = chosen.plan or planner.plan(chosen.settings, suggest=False)
    return Ranking(planner.name, cluster, candidates, naive, plan, missing)


def _winner(candidates: tuple[Candidate, ...], is_compiled: bool) -> Candidate | None:
    fits = lambda c: c.plan is not None and c.plan.fits if is_compiled else c.fits
    return next(filter(fits, candidates), None)


def used_share(memory: Candidate | Plan | Suggestion, limits: Plan | Planner) -> float:
    """The share of its limit that a step takes of the device's memory or of its host's, whichever is larger."""
    return max(memory.peak_bytes / limits.limit_bytes, memory.host_bytes / limits.host_limit_bytes)


def _settings(cluster: Cluster, rows: int) -> Iterator[Settings]:
    stages = (0, 1, 2, 3) if cluster.num_devices > 1 else (NAIVE.stage,)  # on one device, all stages are the same
    replicas = [1, *_replicas(cluster)]
    microbatches = [k for k in range(1, rows + 1) if rows % k == 0]
    for stage, remat, k, replica, offload in itertools.product(stages, REMATS, microbatches, replicas, OFFLOADS):
        holds_shards = replica == 1 and (stage == 3 or cluster.num_devices == 1)
        if (stage or replica == 1) and (offload != "params" or holds_shards):
            yield Settings(stage, rows=rows // k, num_microbatches=k, remat=remat, replica=replica, offload=offload)


def _replicas(cluster: Cluster) -> Iterator[int]:
    """Yields the sizes of the replica axis for sharding within one host, within 8 hosts, within 64, ..."""
    shards = cluster.devices_per_host
    while cluster.torus is None and shards < cluster.num_devices:
        if cluster.num_devices % shards == 0:
            yield cluster.num_devices // shards
        shards *= 8
