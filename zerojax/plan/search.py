"""The fastest settings that fit: by formula all of them, and the best few as the compiler makes them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from zerojax.analysis import targets
from zerojax.analysis.hardware import Cluster
from zerojax.plan import planner
from zerojax.plan.planner import REMATS, Plan, Settings

_COMPUTED_AGAIN = {"none": 0.0, "dots": 0.0, "full": 1 / 3, "offload": 1 / 3}  # of the model's flops
NAIVE = Settings(stage=3, remat="full", prefetch=0)


class Candidate(NamedTuple):
    """Settings that were looked at.

    Attributes:
        settings: with rows and microbatches.
        peak_bytes: of a device, by formula.
        fits: into the limit.
        compute_s, link_s: of a step, by formula: products at the rate that large ones reach; ZeRO's bytes over links.
        plan: as compiled; None if it was not.
    """

    settings: Settings
    peak_bytes: int
    fits: bool
    compute_s: float
    link_s: float
    plan: Plan | None = None

    @property
    def step_s(self) -> float:
        """As predicted from the compiled program, else the longer of the two by formula."""
        predicted = self.plan.program.reading.prediction if self.plan and self.plan.program else None
        return predicted.step_s if predicted else max(self.compute_s, self.link_s)

    def data(self) -> dict[str, Any]:
        """By formula, and under 'plan' what the compiler makes of it."""
        told = self._replace(settings=dataclasses.asdict(self.settings), plan=self.plan and self.plan.data())
        return told._asdict() | {"step_s": self.step_s, "bound": self.bound, "python": self.settings.python()}

    @property
    def bound(self) -> str:
        """What takes longest, by formula."""
        if not self.fits or (self.plan is not None and not self.plan.fits):
            return "does not fit"
        return "products" if self.compute_s >= self.link_s else "links"


class Ranking(NamedTuple):
    """Candidates, those that were compiled first, each part from the fastest on; and the naive choice, compiled."""

    what: str
    cluster: Cluster
    candidates: tuple[Candidate, ...]
    naive: Candidate

    def data(self) -> dict[str, Any]:
        """All of it for a program, the naive choice and the winner among it."""
        winner = self.winner
        return {
            "what": self.what,
            "target": self.cluster.target,
            "candidates": [each.data() for each in self.candidates],
            "naive": self.naive.data(),
            "winner": winner and winner.data(),
        }

    @property
    def winner(self) -> Candidate | None:
        """The fastest that was compiled and fits."""
        return next((c for c in self.candidates if c.plan is not None and c.plan.fits), None)


def search(
    what: str,
    target: str,
    rows: int | None = None,
    *,
    memory_share: float | None = None,
    calibration: Path | None = None,
    num_compiled: int = 3,
    on_step: Callable[[str], None] = lambda told: None,
) -> Ranking:
    """Stages, what is kept, microbatches, and sharding inside a host against sharding over all devices.

    Args:
        what, target, memory_share, calibration: as for `planner.plan`.
        rows: of a device in a step, in one or more microbatches. Default: those of the model.
        num_compiled: of the fastest that fit by formula; 0: nothing is, the naive choice neither.
        on_step: told what is being done.

    Cost: half a second for each of some dozens of settings, and the compilation of `num_compiled` and the naive choice.
    """
    if num_compiled:
        targets.devices(target)  # before JAX looks for devices
    make = functools.partial(
        planner.plan, what, target, memory_share=memory_share, calibration=calibration, suggest=False
    )
    base = make(Settings(rows=rows))
    where, rows = base.cluster, base.settings.rows or 1
    job = planner.find_job(what, where.chip.platform, compiled=False)
    flops = planner.model_flops_of(what, where, base.settings)

    def candidate(settings: Settings) -> Candidate:
        on_step(f"stage {settings.stage}, remat {settings.remat!r}")
        peak_bytes = planner.trace(job, where.num_devices, settings).memory.peak_bytes
        times = _compute_s(where, settings, flops), _link_s(where, settings, base.parameters)
        return Candidate(settings, peak_bytes, peak_bytes <= base.limit_bytes, *times)

    found = [candidate(settings) for settings in _settings(where, rows)]
    found.sort(key=lambda c: (not c.fits, c.step_s, c.settings.num_microbatches, c.peak_bytes))  # few large kernels

    def compiled(candidate: Candidate) -> Candidate:
        on_step(f"compiling stage {candidate.settings.stage}, remat {candidate.settings.remat!r}")
        return candidate._replace(plan=make(candidate.settings, compile=True))

    best = [compiled(c) for c in found[:num_compiled] if c.fits]
    best.sort(key=lambda c: (c.plan is None or not c.plan.fits, c.step_s))
    naive = candidate(dataclasses.replace(NAIVE, rows=rows))
    naive = compiled(naive) if num_compiled else naive
    return Ranking(what, where, (*best, *found[len(best) :]), naive)


def _settings(where: Cluster, rows: int) -> Iterator[Settings]:
    replicas = [1, *_replicas(where)]
    microbatches = [k for k in range(1, rows + 1) if rows % k == 0]
    for stage, remat, k, replica in itertools.product((0, 1, 2, 3), REMATS, microbatches, replicas):
        if stage or replica == 1:
            yield Settings(stage=stage, remat=remat, rows=rows // k, num_microbatches=k, replica=replica)


def _replicas(where: Cluster) -> Iterator[int]:
    """Sharding inside a host, inside eight, inside 64, ..."""
    shards = where.devices_per_host
    while where.torus is None and shards < where.num_devices:
        if where.num_devices % shards == 0:
            yield where.num_devices // shards
        shards *= 8


def _compute_s(where: Cluster, settings: Settings, flops: float) -> float:
    again = 1 + _COMPUTED_AGAIN[settings.remat]
    return again * flops / where.num_devices / where.chip.flops.effective


def _link_s(where: Cluster, settings: Settings, parameters: int) -> float:
    """What a device sends, by the formula of the stage: over the shards of one replica, and between replicas."""
    num_shards, k = where.num_devices // settings.replica, settings.num_microbatches
    elements = {0: 2, 1: 2, 2: 1 + k, 3: 3 * k}[settings.stage] * parameters * (num_shards - 1) / num_shards
    inside = where.route(range(num_shards)) if num_shards > 1 else None
    seconds = 2 * elements / inside.rate if inside else 0.0
    if settings.replica > 1:
        across = where.route(range(0, where.num_devices, num_shards))
        seconds += 2 * 2 * parameters / num_shards * (settings.replica - 1) / settings.replica / across.rate
    return seconds
