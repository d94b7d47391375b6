"""Stands in for the checkpoints of a run that has no directory: nothing is saved, skipped updates still end the run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from zerojax.checkpoints.loss_monitor import LossMonitor
from zerojax.step.state import TrainState
from zerojax.utils.typing import Array

_MOST_SKIPPED = 10  # as of `Checkpoints`


class NoCheckpoints:
    """Has the methods of `Checkpoints` that `fit` calls."""

    every, origin = sys.maxsize, None

    def __init__(self) -> None:
        self._loss_monitor = LossMonitor(_MOST_SKIPPED, None)
        self.origin_text = ""

    def __enter__(self) -> NoCheckpoints:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self._loss_monitor.finish()

    def resume(self, state: TrainState, data: object, **options: Any) -> tuple[TrainState, int]:
        """Starts at the step of the state."""
        self._loss_monitor.num_skipped, step = int(state.skipped), int(state.step)
        self.origin_text = f"the run starts at step {step}, and is not saved, since it has no directory"
        self._step = step
        return state, step

    def update(self, state: TrainState, metrics: Mapping[str, Array], data: object) -> None:
        """Checks the metrics of a step, two steps late."""
        self._step += 1
        self._loss_monitor.update(self._step, metrics)

    def save(self, state: TrainState, data: object) -> None:
        """Saves nothing."""

    def exit_if_preempted(self, state: TrainState, data: object) -> None:
        """Signals end a run without a directory at once, as they end any program."""
