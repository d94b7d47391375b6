"""Traces some steps of a run with JAX's profiler."""

from __future__ import annotations

import logging
from pathlib import Path

import jax

from zerojax.step.state import TrainState

log = logging.getLogger("zerojax")


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

    def __exit__(self, *error: object) -> None:
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
