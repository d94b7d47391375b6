"""Evaluates a data set of any size: the exact means over its rows, on any number of devices and processes."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from zerojax.step.batch import RowsOfSet, map_rows
from zerojax.step.losses import Sums
from zerojax.step.models import is_key
from zerojax.step.state import TrainState, check_is_state
from zerojax.step.steps import EvalStep
from zerojax.utils.text import error_text
from zerojax.utils.typing import ArrayLike, PyTree

_MOST_PENDING = 2  # results that the devices may still be computing


def evaluate(
    step: EvalStep, state: TrainState, data: Iterable[PyTree] | PyTree, *, batch_size: int | None = None
) -> dict[str, float]:
    """Computes the loss and the metrics over all rows of a data set, of which there may be any number.

    The values are those of one pass of a single device over the whole set, up to the order of sums, if the loss and the
    metrics are means, sums, maxima or minima over rows, or computed from these, as far as the trace of the loss shows
    it; a warning names others. A `Weighted` is the sum of its sums divided by that of its weights.

    For `fit`: `evaluate=lambda state: zerojax.evaluate(step, state, data, batch_size=256)`.

    Args:
        step: from `zero.eval_step`. An nnx.Module is in evaluation mode; other losses have to turn off dropout, and use
            running averages, themselves.
        state: the state to evaluate, which is not donated.
        data: a tree of arrays, with `batch_size`; or an iterable of batches, each with any number of rows. An iterator
            is used up after one evaluation. Each process passes its own rows, as many as it has, none included.
        batch_size: the rows of a tree of arrays that this process evaluates at once, rounded down to a multiple of its
            devices, and at least one for each.

    Returns:
        The loss and the metrics by name, the same in all processes.

    Raises:
        ValueError: if there are no rows, or if an argument is invalid; also if the loss communicates over the data axes
            or changes running statistics, since it is then no mean over rows.
        RuntimeError: if the data of another process raised an error.

    Cost: one call of a compiled program for a batch whose rows divide over the devices, and at most three with two
        further programs for another one. With several processes, in addition an exchange of four integers per batch.
    """
    if not isinstance(step, EvalStep):
        fix = "pass the step of zero.eval_step(loss_fn)"
        raise ValueError(error_text(f"evaluate: the step is of type {type(step).__name__}", None, fix))
    check_is_state(state, data, "zerojax.evaluate(step, state, data)")
    own = max(step.config.axes.num_devices // step.config.num_row_groups, 1)
    pending: collections.deque[Sums] = collections.deque()  # read late, so that the devices always have a next batch
    total: Sums | None = None
    for rows in _divided(_batches_of(data, batch_size, own), own):
        pending.append(step.rows(state, rows))
        if len(pending) > _MOST_PENDING:
            total = _plus(total, pending.popleft())
    for sums in pending:
        total = _plus(total, sums)
    assert total is not None
    loss, metrics = total.means()
    return {"loss": float(loss), **{name: float(value) for name, value in metrics.items()}}


def _plus(total: Sums | None, sums: Sums) -> Sums:
    """Adds the outputs of a batch in float64."""
    sums = jax.tree.map(lambda a: np.asarray(a, np.float64), sums)
    if total is not None and total.cut != sums.cut:
        what = "evaluate: a metric is a mean over rows for one number of rows, and a sum for another"
        fix = "divide by the size of an array, not by a number; or return zerojax.Weighted(sum, weight)"
        raise ValueError(error_text(what, None, fix))
    return sums if total is None else total.plus(sums, np.maximum)


class Part(NamedTuple):
    """Rows of a batch that are evaluated in one call: `chunks` devices of a process get `size` rows each."""

    start: int
    size: int
    chunks: int


def divide(counts: list[int], own: int, index: int) -> Iterator[Part]:
    """Divides batches of `counts` rows, one of each process, such that a device has rows of the set only, or none.

    The rows that are left after a part are fewer than the `own` devices of a process, if it is the only one or if all
    have as many rows. They are then evaluated in one more part, one on each device. If a device computed the mean over
    some of these rows and some others, that mean could not be divided any more. Yields the parts of process `index`.
    """
    starts = [0] * len(counts)
    while any(left := [count - start for count, start in zip(counts, starts, strict=True)]):
        size = max(1, max(left) // own)
        chunks = [min(own, rows // size) for rows in left]
        yield Part(starts[index], size, chunks[index])
        starts = [start + size * num for start, num in zip(starts, chunks, strict=True)]


def _divided(batches: Iterator[PyTree], own: int) -> Iterator[RowsOfSet]:
    """The parts of all batches. Processes whose batches have ended go on with parts that do not count."""
    last: PyTree = None  # has the shapes of a part of a process that has no rows any more
    num_rows = 0
    while True:
        # Read a batch in each process, and learn of errors and ends in others.
        batch, count, error = _next(batches)
        last = last if batch is None else batch
        counts, has_ended, has_none, has_failed = _of_all_processes(count, batch is None, last is None, bool(error))
        if error:
            raise error
        if any(has_failed):
            got = f"an error in process {', '.join(str(i) for i in np.flatnonzero(has_failed))}"
            fix = "see the error of that process"
            raise RuntimeError(error_text("evaluate: the data of another process cannot be read", got, fix))
        if all(has_ended):
            break
        if any(has_none):
            fix = "pass at least one batch in each process; its arrays may have 0 rows"
            raise ValueError(error_text("evaluate: a process has no batch", f"process {has_none.index(1)}", fix))
        # Divide it.
        num_rows += sum(counts)
        for part in divide(counts, own, jax.process_index()):
            yield _rows_of(last, part, count, own)
    if not num_rows:
        fix = "pass a list or arrays: an iterator is used up after one evaluation"
        raise ValueError(error_text("evaluate: the data has no rows", None, fix))


def _next(batches: Iterator[PyTree]) -> tuple[PyTree, int, Exception | None]:
    """The next batch and its number of rows, None and 0 at the end; or the error, which all processes must learn of."""
    try:
        batch = next(batches, None)
        return batch, 0 if batch is None else _num_rows(batch), None
    except Exception as error:
        return None, 0, error


def _rows_of(batch: PyTree, part: Part, count: int, own: int) -> RowsOfSet:
    """A part of a batch. Devices without rows get the last row, or zeros if there is none, and do not count."""
    included = np.repeat(np.arange(own) < part.chunks, part.size)
    if part == Part(0, count // own, own) and count % own == 0:
        return RowsOfSet(batch, included)
    rows = part.start + np.minimum(np.arange(own * part.size), max(part.chunks * part.size - 1, 0))

    def take(a: np.ndarray) -> np.ndarray:
        if not a.shape[0]:
            return np.zeros((len(rows), *a.shape[1:]), a.dtype)
        return a[np.minimum(rows, a.shape[0] - 1)]

    return RowsOfSet(map_rows(take, batch), included)


def _of_all_processes(count: int, *flags: bool) -> tuple[list[int], ...]:
    """The count and the flags of each process."""
    own = np.array([count, *flags], np.int32)
    gathered = own if jax.process_count() == 1 else multihost_utils.process_allgather(own)
    return tuple(np.asarray(gathered).reshape(-1, own.size).T.tolist())


def _batches_of(data: object, batch_size: int | None, own: int) -> Iterator[PyTree]:
    """The batches of a data set as arrays on the host."""
    if batch_size is not None:
        if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
            raise ValueError(error_text(f"evaluate: batch_size is {batch_size!r}", None, "a number, at least 1"))
        return _slices(_on_host(data), max(batch_size // own, 1) * own)
    if isinstance(data, Mapping | np.ndarray | jax.Array) or not isinstance(data, Iterable):
        what = f"evaluate: data is of type {type(data).__name__}, and there is no batch_size"
        raise ValueError(error_text(what, None, "pass batch_size= for a tree of arrays, or an iterable of batches"))
    return map(_on_host, data)


def _slices(arrays: PyTree, size: int) -> Iterator[PyTree]:
    for start in range(0, max(_num_rows(arrays), 1), size):  # raises in `_next`
        yield map_rows(lambda a, start=start: a[start : start + size], arrays)


def _on_host(batch: PyTree) -> PyTree:
    """The arrays with rows as NumPy arrays, from which rows are taken without a program for each number of them."""

    def convert(a: ArrayLike) -> ArrayLike:
        if not isinstance(a, jax.Array):
            return np.asarray(a)
        if not a.is_fully_addressable:
            what = "evaluate: an array of the batch is spread over several processes"
            raise ValueError(error_text(what, f"shape {a.shape}", "pass the rows of this process, as NumPy arrays"))
        return a if is_key(a) else np.asarray(a)

    return map_rows(convert, batch)


def _num_rows(batch: PyTree) -> int:
    counts: set[int] = set()
    map_rows(lambda a: counts.add(a.shape[0]), batch)
    if len(counts) != 1:
        what = "the arrays have different numbers of rows" if counts else "a batch has no array with rows"
        fix = "pass the same rows in all arrays, and zerojax.Whole(array) for what every device gets whole"
        raise ValueError(error_text(f"evaluate: {what}", sorted(counts) or "none", fix))
    return counts.pop()
