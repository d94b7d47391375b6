"""Reports skipped updates, and ends a run that makes no progress because of them."""

from __future__ import annotations

import collections
import logging
from collections.abc import Mapping
from typing import Any

from zerojax.sharding.precision import MIN_LOSS_SCALE

log = logging.getLogger("zerojax")
_DELAY = 2  # steps: by then metrics are available, while the newest ones are still being computed


class SkipMonitor:
    """Checks metrics two steps late, so that no step waits for the devices.

    Args:
        most_skipped: the number of consecutive skipped updates, with a gradient that was not finite, that ends the run.
            Updates that are skipped while a loss scale can still fall do not count: a scale that is too large at the
            start may need many of them.
    """

    def __init__(self, most_skipped: int):
        self.most_skipped = most_skipped
        # All skipped updates of the run, as counted by the state: set on resume, or else by the first step.
        self.num_skipped: int | None = None
        self._consecutive_skips = self._counted_skips = 0  # of which those count that no loss scale explains
        self._pending: collections.deque[tuple[int, Mapping[str, Any]]] = collections.deque()

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Adds the metrics of a step, and checks those of two steps before.

        Raises:
            FloatingPointError: if too many consecutive updates were skipped.
        """
        self._pending.append((step, {name: metrics[name] for name in ("skipped", "loss_scale") if name in metrics}))
        while len(self._pending) > _DELAY:
            self._check(*self._pending.popleft())

    def finish(self) -> None:
        """Checks the metrics that are still pending."""
        while self._pending:
            self._check(*self._pending.popleft())

    def _check(self, step: int, metrics: Mapping[str, Any]) -> None:
        before, self.num_skipped = self.num_skipped, int(metrics.get("skipped", 0))
        if before is not None and self.num_skipped > before:
            self._report_skip(step, can_scale_fall=float(metrics.get("loss_scale", 0)) > MIN_LOSS_SCALE)
            return
        self._consecutive_skips = self._counted_skips = 0

    def _report_skip(self, step: int, can_scale_fall: bool) -> None:
        log.warning("step %d: the update was skipped: a gradient is not finite (%d so far)", step, self.num_skipped)
        self._consecutive_skips += 1
        self._counted_skips += not can_scale_fall
        if self._counted_skips >= self.most_skipped:
            last_good = step - self._consecutive_skips
            raise FloatingPointError(
                f"training: {self._consecutive_skips} consecutive updates were skipped: gradients are not finite\n"
                f"  got:      steps {last_good + 1} to {step}; the last good step is {last_good}\n"
                f"  fix:      check the data or lower the learning rate, and resume from the newest checkpoint"
            )
