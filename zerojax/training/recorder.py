"""Passes the metrics of steps on to writers, some steps late, and measures the rates of the steps between them."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, SupportsFloat

import numpy as np

from zerojax.analysis.hardware import chip_of_kind
from zerojax.step.batch import num_global_rows
from zerojax.step.config import ZeroConfig
from zerojax.step.state import TrainState
from zerojax.training.writers import EVALUATION, MetricsRow, Writer
from zerojax.utils.typing import PyTree

log = logging.getLogger("zerojax")
_RATE_STEPS = 11  # the rate is measured between the first and the last of this number of steps
_READ_DELAY = 2  # steps after which metrics are read, so that the devices always have a next step to run


class Pending(NamedTuple):
    """The metrics of a step, whose arrays may still be being computed, and the rows of its batch."""

    step: int
    metrics: Mapping[str, SupportsFloat]
    num_rows: int


@dataclasses.dataclass(frozen=True)
class RowCosts:
    """What the rates of a run are computed from, in addition to its rows and its time.

    Attributes:
        tokens: the tokens in a row; None if it is not known.
        peak_share: the share of the peak of all devices that the model's flops of one row take for a second; None if
            the chip or the flops are not known.
    """

    tokens: int | None = None
    peak_share: float | None = None

    def rates(self, num_rows: int, seconds: float) -> dict[str, float]:
        """The rates of a step of `num_rows` rows, by the name of the metric."""
        rates = {"seconds_per_step": seconds, "rows_per_s": num_rows / seconds}
        if self.tokens is not None:
            rates["tokens_per_s"] = num_rows * self.tokens / seconds
        if self.peak_share is not None:
            rates["mfu"] = num_rows * self.peak_share / seconds
        return rates


class MetricsRecorder:
    """Passes the metrics of steps on to writers. They are read some steps later, so that no step waits for the host.

    Args:
        writers: receive the rows of the first step, of every `log_every`-th step, and of the last step.
        display: receives the metrics of every step; None for no display.
        log_every: number of steps between two rows.
        costs: what the rates are computed from.
    """

    def __init__(
        self, writers: Sequence[Writer], display: Writer | None, log_every: int, costs: RowCosts | None = None
    ):
        self._writers, self._displays, self._log_every = writers, [] if display is None else [display], log_every
        self._costs, self._has_written = costs or RowCosts(), False
        self._unwritten: tuple[int, MetricsRow] | None = None  # the newest row, if it was read and not written
        self._pending: collections.deque[Pending] = collections.deque()
        self._times: collections.deque[tuple[int, float]] = collections.deque(maxlen=_RATE_STEPS)
        self._paused_s = 0.0  # since the start

    def __enter__(self) -> MetricsRecorder:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        with contextlib.ExitStack() as stack:
            for writer in (*self._writers, *self._displays):
                stack.callback(writer.close)
            with contextlib.suppress(Exception) if error else contextlib.nullcontext():
                self.flush(is_last=True)

    def add(self, step: int, metrics: Mapping[str, SupportsFloat], batch: PyTree) -> None:
        """Adds the metrics of a step. Their arrays may still be being computed."""
        if self._writers or self._displays:
            self._pending.append(Pending(step, metrics, num_global_rows(batch)))
        if len(self._pending) > _READ_DELAY:
            self._read()
            self._times.append((step, time.perf_counter() - self._paused_s))  # one more step has ended

    def flush(self, is_last: bool = False) -> None:
        """Waits for all steps so far, and writes their rows. The last step of a run always has a row."""
        while self._pending:
            self._read()
        if is_last and self._unwritten:
            self._write(*self._unwritten)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Writes the rows of all steps so far. The time in the block, such as that of a save, is not that of a step."""
        self.flush()
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._paused_s += time.perf_counter() - begin

    def add_evaluation(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Writes a row with the metrics of an evaluation after a step."""
        if not isinstance(metrics, Mapping):
            got = type(metrics).__name__
            raise ValueError(f"fit: evaluate returned a value of type {got}\n  fix:      return a dict of metrics")
        row = {f"{EVALUATION}{name}": _as_float(name, value) for name, value in metrics.items()}
        for writer in (*self._writers, *self._displays):
            writer.write(step, row)

    def _read(self) -> None:
        step, metrics, num_rows = self._pending.popleft()
        row = {name: _as_float(name, metrics[name]) for name in sorted(metrics, key=lambda name: name != "loss")}
        if len(self._times) > 1:
            (first_step, first_time), (last_step, last_time) = self._times[0], self._times[-1]
            row |= self._costs.rates(num_rows, (last_time - first_time) / (last_step - first_step))
        for display in self._displays:
            display.write(step, row)
        self._unwritten = step, row
        if not self._has_written or step % self._log_every == 0:
            self._write(step, row)

    def _write(self, step: int, row: MetricsRow) -> None:
        for writer in self._writers:
            writer.write(step, row)
        self._has_written, self._unwritten = True, None


def _as_float(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        got = f"shape {np.shape(value)}" if np.ndim(value) else repr(value)
        raise ValueError(f"fit: metric {name!r} is not a number\n  got:      {got}\n  fix:      a scalar") from error


def row_costs(config: ZeroConfig, step: Any, state: TrainState, batch: PyTree, tokens_per_row: int | None) -> RowCosts:
    """Returns the costs of a row of a run.

    The model FLOPs utilization is known if the data sheet of the chip is, if the step is one of `zero.train_step`, and
    if every parameter is trained: frozen ones have fewer products in the backward pass.

    Args:
        config: the mesh.
        step: of the run.
        state, batch: of the first step.
        tokens_per_row: see `fit`.

    Cost: traces the loss if the chip is known, which takes seconds.
    """
    chip = chip_of_kind(config.mesh.devices.flat[0].device_kind)
    is_known = chip is not None and chip.platform != "cpu" and hasattr(step, "model_flops")
    if chip is None or not is_known or not all(leaf.trainable for leaf in state.layout.leaves):
        return RowCosts(tokens_per_row)
    try:
        flops = step.model_flops(state, batch)
    except ValueError as error:  # of a kernel
        log.info("fit: the model FLOPs utilization is not shown: %s", error)
        return RowCosts(tokens_per_row)
    return RowCosts(tokens_per_row, flops / num_global_rows(batch) / (chip.flops.peak * config.mesh.size))
