"""What the metrics of a run say of its health: updates that were skipped, and losses that jump."""

from __future__ import annotations

import collections
import logging
import statistics
from collections.abc import Mapping
from typing import Any

log = logging.getLogger("zerojax")
_BEHIND = 2  # steps: their metrics are there when the newest are still being computed
_WINDOW = 50  # losses whose median a jump is held against: a guess
_LEAST = 10


class Health:
    """Looks at metrics a little later, so that nobody waits for the devices.

    Args:
        most_skipped: updates in a row that may be skipped because a gradient was not finite.
        spike: a loss more than this many times the median of the last 50 is logged; None: none is.
    """

    def __init__(self, most_skipped: int, spike: float | None):
        self.most_skipped, self.spike = most_skipped, spike
        self.skipped: int | None = None  # in the whole run, as the state counts; `resume` knows it, else the first step
        self._in_a_row = 0
        self._waiting: collections.deque[tuple[int, Mapping[str, Any]]] = collections.deque()
        self._losses: collections.deque[float] = collections.deque(maxlen=_WINDOW)

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """With the metrics of a step. Looks at those of the step before the last.

        Raises:
            FloatingPointError: too many updates in a row were skipped.
        """
        self._waiting.append((step, {name: metrics[name] for name in ("loss", "skipped") if name in metrics}))
        while len(self._waiting) > _BEHIND:
            self._look(*self._waiting.popleft())

    def finish(self) -> None:
        """Looks at the last ones too."""
        while self._waiting:
            self._look(*self._waiting.popleft())

    def _look(self, step: int, metrics: Mapping[str, Any]) -> None:
        before, self.skipped = self.skipped, int(metrics.get("skipped", 0))
        if before is not None and self.skipped > before:
            self._skip(step)
            return
        self._in_a_row = 0
        if self.spike is not None and "loss" in metrics:
            self._compare(step, float(metrics["loss"]), self.spike)

    def _skip(self, step: int) -> None:
        self._in_a_row += 1
        log.warning("step %d: a gradient was not finite; the update was skipped, %d so far", step, self.skipped)
        if self._in_a_row >= self.most_skipped:
            raise FloatingPointError(
                f"training: {self._in_a_row} updates in a row were skipped, since no gradient was finite\n"
                f"  got:      steps {step - self._in_a_row + 1} to {step}; the last good step is"
                f" {step - self._in_a_row}\n"
                f"  fix:      a lower learning rate or a look at the data, from the newest checkpoint"
            )

    def _compare(self, step: int, loss: float, spike: float) -> None:
        if len(self._losses) >= _LEAST:
            usual = statistics.median(self._losses)
            if loss > spike * usual:
                log.warning("step %d: the loss is %.4g, %.1f times the median", step, loss, loss / usual)
        self._losses.append(loss)
