"""Where the time of a run goes: a trace of some steps, and the process that the others wait for.

All processes end a step at the same time, since they wait for each other in its collectives. What a process does before
its part of the step is its own: that time is compared. A slow device is not seen this way.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.step.state import TrainState
from zerojax.utils.typing import Array

log = logging.getLogger("zerojax")
_INTERVAL = 10  # steps between two comparisons: a heuristic
_SHARE = 0.1  # of the time of a step: a process that needs so much more than the median is named


class StepTracer:
    """Traces some steps with JAX's profiler.

    Args:
        folder: folder for the trace, which may be None if there is none. With several processes, each has a subfolder.
        steps: the first and the last step of the trace, counted from 1; None for no trace.
    """

    def __init__(self, folder: Path | None, steps: tuple[int, int] | None):
        has_several = jax.process_count() > 1
        self._folder = folder / f"process_{jax.process_index()}" if folder and has_several else folder
        self._steps, self._is_tracing = steps, False

    def __enter__(self) -> StepTracer:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def close(self) -> None:
        """Ends the trace, if the run ended before the last step of the trace."""
        if self._is_tracing:
            self._is_tracing = False
            jax.profiler.stop_trace()

    def before_step(self, step: int) -> None:
        if self._steps and step == self._steps[0]:
            jax.profiler.start_trace(str(self._folder))
            self._is_tracing = True

    def after_step(self, step: int, state: TrainState) -> None:
        if self._is_tracing and self._steps and step == self._steps[1]:
            jax.block_until_ready(state)
            self.close()
            log.info("fit: wrote a profile of steps %d to %d to %s", *self._steps, self._folder)


class StragglerMonitor:
    """Compares the time that processes take to load their batches, and logs which one is slow.

    Cost: every ten steps, an all-gather of 4 bytes from each device. Its result is read ten steps later.
    """

    def __init__(self) -> None:
        self._loading_s: list[float] = []
        self._since = time.perf_counter()
        self._pending: tuple[Array, float] | None = None
        self._named: int | None = None  # the process that was logged last

    def add(self, step: int, loading_s: float) -> None:
        """Adds the time that this process took to load the batch of a step. All processes call it for every step."""
        if jax.process_count() == 1:
            return
        self._loading_s.append(loading_s)
        if len(self._loading_s) < _INTERVAL:
            return
        if self._pending:
            times, step_s = self._pending
            self._report(step, slowest(np.asarray(times), step_s), step_s)
        step_s = (time.perf_counter() - self._since) / _INTERVAL
        self._pending = _of_all_processes(statistics.fmean(self._loading_s)), step_s
        self._loading_s, self._since = [], time.perf_counter()

    def _report(self, step: int, found: tuple[int, float, float] | None, step_s: float) -> None:
        if found and found[0] != self._named and jax.process_index() == 0:
            log.warning(
                "step %d: process %d takes %.3g s to load a batch, the median is %.3g s; a step takes %.3g s",
                *(step, *found, step_s),
            )
        self._named = found[0] if found else None


def slowest(times: Sequence[float] | np.ndarray, step_s: float) -> tuple[int, float, float] | None:
    """The process that the others wait for: its index, its time and the median of all.

    Args:
        times: seconds that each process takes before a step.
        step_s: seconds of a whole step.

    Returns:
        None if no process takes so much longer than the median that it is a tenth of the step.
    """
    worst, median = int(np.argmax(times)), float(np.median(times))
    return (worst, float(times[worst]), median) if times[worst] - median > _SHARE * step_s else None


def _of_all_processes(seconds: float) -> Array:
    """The number of each process, by process index, as an array that the devices may still be computing."""
    firsts = [min(d.id for d in jax.devices() if d.process_index == p) for p in range(jax.process_count())]
    devices = [device for device in jax.devices() if device.id in firsts]
    devices.sort(key=lambda device: device.process_index)
    mesh = Mesh(np.array(devices), ("processes",))
    own = np.array([seconds], np.float32)
    gathered = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("processes")), own)
    return jax.jit(lambda a: a, out_shardings=NamedSharding(mesh, PartitionSpec()))(gathered)
