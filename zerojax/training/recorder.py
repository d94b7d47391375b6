"""Measures a run: passes metrics on to writers some steps late, with the rates of the steps; names slow processes,
and those that pass the same rows."""

from __future__ import annotations

import collections
import contextlib
import hashlib
import logging
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import SupportsFloat

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.analysis.hardware import chip_of_kind
from zerojax.processes.agreement import names, with_equal_texts
from zerojax.step.batch import map_rows, num_global_rows
from zerojax.step.config import ZeroConfig
from zerojax.step.models import is_key
from zerojax.step.state import TrainState
from zerojax.training.writers import EVALUATION, MetricsRow, Writer
from zerojax.utils.text import error_text
from zerojax.utils.typing import Array, ArrayLike, PyTree

log = logging.getLogger("zerojax")
_RATE_STEPS = 11  # the rate is measured between the first and the last of this number of steps
_READ_DELAY = 2  # steps after which metrics are read, so that the devices always have a next step to run
_INTERVAL = 10  # steps between two comparisons of processes: a heuristic
_SHARE = 0.1  # of the time of a step: a process that needs so much more than the median is named

# Metrics and rates


def costs_per_row(
    config: ZeroConfig, step: object, state: TrainState, batch: PyTree, tokens_per_row: int | None
) -> dict[str, float]:
    """What a row adds to each rate of a second. If the chip is known, this traces the loss, which takes seconds.

    The model FLOPs utilization is known if the data sheet of the chip is, if the step is one of `zero.train_step`, and
    if every parameter is trained: frozen ones have fewer products in the backward pass.
    """
    costs: dict[str, float] = {} if tokens_per_row is None else {"tokens_per_s": tokens_per_row}
    chip = chip_of_kind(config.mesh.devices.flat[0].device_kind)
    model_flops = getattr(step, "model_flops", None)
    is_frozen = not all(leaf.trainable for leaf in state.layout.leaves)
    if chip is None or chip.platform == "cpu" or model_flops is None or is_frozen:
        return costs
    try:
        flops = model_flops(state, batch)
    except ValueError as error:  # of a kernel
        log.info("fit: the model FLOPs utilization is not shown: %s", error)
        return costs
    return costs | {"mfu": flops / num_global_rows(config, batch) / (chip.flops.peak * config.mesh.size)}


class MetricsRecorder:
    """Passes the metrics of steps on to writers. They are read some steps later, so that no step waits for the host.

    Writers receive the rows of the first step, of every `log_every`-th step, and of the last step; a display receives
    those of every step. Rates are computed from the costs of a row, as of `costs_per_row`.
    """

    def __init__(
        self, writers: Sequence[Writer], display: Writer | None, log_every: int, costs: MetricsRow | None = None
    ):
        self._writers, self._displays, self._log_every = writers, [] if display is None else [display], log_every
        self._costs, self._has_written = costs or {}, False
        self._unwritten: tuple[int, MetricsRow] | None = None  # the newest row, if it was read and not written
        # (step, metrics, rows of the batch); the devices may still be computing the metrics.
        self._pending: collections.deque[tuple[int, Mapping[str, SupportsFloat], int]] = collections.deque()
        self._times: collections.deque[tuple[int, float]] = collections.deque(maxlen=_RATE_STEPS)
        self._paused_s = 0.0  # since the start

    def __enter__(self) -> MetricsRecorder:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        with contextlib.ExitStack() as stack:
            for writer in (*self._writers, *self._displays):
                stack.callback(_close, writer, error)
            with contextlib.suppress(Exception) if error else contextlib.nullcontext():
                self.flush(is_last=True)

    def add(self, step: int, metrics: Mapping[str, SupportsFloat], num_rows: int) -> None:
        """Adds the metrics of a step and the rows of its batch. Their arrays may still be being computed."""
        if self._writers or self._displays:
            self._pending.append((step, metrics, num_rows))
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
            what = f"fit: evaluate returned a value of type {type(metrics).__name__}"
            raise ValueError(error_text(what, None, "return a dict of metrics"))
        row = {f"{EVALUATION}{name}": _as_float(name, value) for name, value in metrics.items()}
        for writer in (*self._writers, *self._displays):
            writer.write(step, row)

    def _read(self) -> None:
        step, metrics, num_rows = self._pending.popleft()
        row = {name: _as_float(name, metrics[name]) for name in sorted(metrics, key=lambda name: name != "loss")}
        if len(self._times) > 1:
            (first_step, first_time), (last_step, last_time) = self._times[0], self._times[-1]
            seconds = (last_time - first_time) / (last_step - first_step)
            row |= {"seconds_per_step": seconds, "rows_per_s": num_rows / seconds}
            row |= {name: num_rows * cost / seconds for name, cost in self._costs.items()}
        for display in self._displays:
            display.write(step, row)
        self._unwritten = step, row
        if not self._has_written or step % self._log_every == 0:
            self._write(step, row)

    def _write(self, step: int, row: MetricsRow) -> None:
        for writer in self._writers:
            writer.write(step, row)
        self._has_written, self._unwritten = True, None


def _close(writer: Writer, error: object) -> None:
    """Closes a writer. If the run has ended by an error or a signal, that is what is raised, and not that of this."""
    try:
        writer.close()
    except Exception:
        if error is None:
            raise
        log.exception("fit: the end of a writer failed too")


def _as_float(name: str, value: SupportsFloat) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        shape = getattr(value, "shape", ())
        got = f"shape {shape}" if shape else repr(value)
        raise ValueError(error_text(f"fit: metric {name!r} is not a number", got, "a scalar")) from error


# Processes


def warn_of_equal_rows(config: ZeroConfig, batch: PyTree, step: int) -> None:
    """Logs which processes pass the same rows of a batch, as all do if they do not use `own_rows`.

    It is no error, since rows may be constant, as in benchmarks. All processes call it, for one step of a run.

    Cost: reads the rows of this process, and sends one message of 100 bytes to process 0 and those of all back.
    """
    if jax.process_count() == 1:
        return
    # Compare the rows.
    digest = hashlib.blake2b(digest_size=16)

    def add(a: ArrayLike) -> None:
        if isinstance(a, jax.Array) and not a.is_fully_addressable:
            rows = [shard.data for shard in (jax.random.key_data(a) if is_key(a) else a).addressable_shards]
        else:
            rows = [a]
        for part in rows:
            digest.update(np.asarray(part).tobytes())

    map_rows(add, batch, lambda a: None)
    groups = with_equal_texts(digest.hexdigest(), "fit")

    # The devices of one process may need the rows of another one, for example those of one row of a model axis.
    places = NamedSharding(config.mesh, PartitionSpec(config.axes.data)).devices_indices_map((config.axes.num_devices,))
    of = lambda process: {str(place) for device, place in places.items() if device.process_index == process}
    groups = [group for group in groups if any(of(process) != of(group[0]) for process in group)]
    if groups and jax.process_index() == 0:
        log.warning(
            "step %d: %s pass the same rows, so that the batch has them more than once; "
            "unless they are constant, pass those of processes.own_rows in each",
            *(step, "; ".join(map(names, groups))),
        )


class StragglerMonitor:
    """Compares the time that processes take to load their batches, and logs which one is slow.

    All processes end a step at the same time, since they wait for each other in its collectives. What a process does
    before its part of the step is its own: that time is compared. A slow device is not seen this way.

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


def slowest(times: np.ndarray, step_s: float) -> tuple[int, float, float] | None:
    """The process that the others wait for, as (index, its seconds, the median of all processes).

    None if no process takes so much longer than the median that it is a tenth of a step of `step_s` seconds.
    """
    worst, median = int(np.argmax(times)), float(np.median(times))
    return (worst, float(times[worst]), median) if times[worst] - median > _SHARE * step_s else None


def _of_all_processes(seconds: float) -> Array:
    """The number of each process, by process index, as an array that the devices may still be computing."""
    of = lambda process: min((d for d in jax.devices() if d.process_index == process), key=lambda d: d.id)
    devices = [of(process) for process in range(jax.process_count())]
    mesh = Mesh(np.array(devices), ("processes",))
    own = np.array([seconds], np.float32)
    gathered = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("processes")), own)
    return jax.jit(lambda a: a, out_shardings=NamedSharding(mesh, PartitionSpec()))(gathered)
