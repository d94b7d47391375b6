"""Searches for the fastest settings that fit: estimates all of them by formula, and compiles the best few."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from zerojax.analysis import targets
from zerojax.analysis.hardware import Cluster
from zerojax.plan.job import DEFAULT_SETTINGS, REMATS, Settings
from zerojax.plan.planner import Plan, Planner, used_share
from zerojax.plan.transformer import Transformer
from zerojax.step.config import OFFLOADS
from zerojax.utils import versions

NAIVE = Settings(stage=3, remat="full", prefetch=0)


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
        what, target, memory_share, host_memory_bytes: as in `planner.plan`.
        settings: of these, `precision` and `moment_bits` stay as they are, and `rows` are those of a device in a step,
            in one or more microbatches.
        num_compiled: how many of the fastest candidates that fit by formula are compiled. If 0, or if the compiler of
            the target is not installed, nothing is compiled, not even the naive choice.
        on_step: called with a message before each step of the search.

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
    rows = settings.rows or planner.tracer.job.rows
    kept = {"precision": settings.precision, "moment_bits": settings.moment_bits}

    def estimate(settings: Settings) -> Plan:
        on_step(f"stage {settings.stage}, remat {settings.remat!r}")
        return planner.estimate(settings)

    def compiled(candidate: Plan) -> Plan:
        on_step(f"compiling stage {candidate.settings.stage}, remat {candidate.settings.remat!r}")
        return planner.plan(candidate.settings, devices, suggest=False)

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
    chosen = chosen if chosen.program else planner.plan(chosen.settings, suggest=False)
    return Ranking(planner.name, planner.cluster, candidates, naive, chosen, missing)


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
