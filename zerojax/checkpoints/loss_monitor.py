"""Monitors the metrics of a run for skipped updates and spikes of the loss."""

from __future__ import annotations

import collections
import logging
import statistics
from collections.abc import Mapping

from zerojax.sharding.precision import MIN_LOSS_SCALE
from zerojax.utils.typing import Array

log = logging.getLogger("zerojax")
_DELAY = 2  # steps: by then metrics are available, while the newest ones are still being computed
_WINDOW = 50  # losses whose median a new loss is compared with: a heuristic
_MIN_LOSSES = 10  # losses before the first comparison: a heuristic


class LossMonitor:
    """Checks metrics two steps late, so that no step waits for the devices.

    Args:
        most_skipped: the number of consecutive skipped updates, with a gradient that was not finite, that ends the run.
            Updates that are skipped while a loss scale can still fall do not count: a scale that is too large at the
            start may need many of them.
        spike: a loss of more than this many times the median of the last 50 is logged. None: none is logged.
    """

    def __init__(self, most_skipped: int, spike: float | None):
        self.most_skipped, self.spike = most_skipped, spike
        # All skipped updates of the run, as counted by the state: set on resume, or else by the first step.
        self.num_skipped: int | None = None
        self._consecutive_skips = self._counted_skips = 0  # of which those count that no loss scale explains
        self._pending: collections.deque[tuple[int, Mapping[str, Array]]] = collections.deque()
        self._losses: collections.deque[float] = collections.deque(maxlen=_WINDOW)

    def update(self, step: int, metrics: Mapping[str, Array]) -> None:
        """Adds the metrics of a step, and checks those of two steps before.

        Raises:
            FloatingPointError: if too many consecutive updates were skipped.
        """
        self._pending.append(
            (step, {name: metrics[name] for name in ("loss", "skipped", "loss_scale") if name in metrics})
        )
        while len(self._pending) > _DELAY:
            self._check(*self._pending.popleft())

    def finish(self) -> None:
        """Checks the metrics that are still pending."""
        while self._pending:
            self._check(*self._pending.popleft())

    def _check(self, step: int, metrics: Mapping[str, Array]) -> None:
        before, self.num_skipped = self.num_skipped, int(metrics.get("skipped", 0))
        if before is not None and self.num_skipped > before:
            self._report_skip(step, can_scale_fall=float(metrics.get("loss_scale", 0)) > MIN_LOSS_SCALE)
            return
        self._consecutive_skips = self._counted_skips = 0
        if self.spike is not None and "loss" in metrics:
            self._check_loss(step, float(metrics["loss"]), self.spike)

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

    def _check_loss(self, step: int, loss: float, spike: float) -> None:
        if len(self._losses) >= _MIN_LOSSES:
            median = statistics.median(self._losses)
            if loss > spike * median:
                log.warning("step %d: the loss is %.4g, %.1f times the median", step, loss, loss / median)
        self._losses.append(loss)
