"""The loop: steps, and what a run does beside them.

It is in the package, not in an example that is copied, so that what is easily got wrong is tested once: where the data
goes on, rows of steps that run again, metrics that nobody waits for. It is made of public pieces, of which another loop
can be made too.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zerojax.processes.join import agree
from zerojax.step.config import global_shape
from zerojax.step.state import TrainState
from zerojax.training import folder as folders
from zerojax.training.display import Bar, Lines, on_terminal
from zerojax.training.writers import Writer, default_writers
from zerojax.zero import Zero

log = logging.getLogger("zerojax")
_RATE_STEPS = 11  # the rate is that between the first and the last of so many steps
_DATA_TIMEOUT_S = 60  # for the others to end where the data of this process ended
_END = object()  # of the data
_LATE = 2  # steps after which metrics are read, so that the devices always have a step to go on with


def fit(
    zero: Zero,
    state: TrainState,
    step: Callable[..., Any],
    data: Callable[[int], Any] | Iterable[Any],
    num_steps: int,
    directory: str | Path,
    *,
    evaluate: Callable[[TrainState], Mapping[str, Any]] | None = None,
    evaluate_every: int | None = None,
    log_every: int = 10,
    config: Any = None,
    checkpoints: Mapping[str, Any] | None = None,
    fallback: bool = False,
    profile: tuple[int, int] | None = None,
    writers: Sequence[Writer] | None = None,
    display: Writer | None = None,
) -> TrainState:
    """Trains to a step, from the newest checkpoint if there is one. The directory tells about the run.

    It holds, beside its own README.md: config.json; starts.jsonl with versions, mesh and command of each start;
    metrics.jsonl; plan.txt, what a device holds; checkpoints/; and profile/ and tensorboard/ where they are wanted.
    With several processes all call it; process 0 alone writes and shows, but for checkpoints and profiles.

    Args:
        zero: that the step is of.
        state: of `zero.init`; it is donated.
        step: `step(state, batch) -> (state, metrics)`, of `zero.train_step` or one's own.
        data: `data(i)` returns the batch of step i + 1; or batches one after the other. An iterator with `get_state`
            and `set_state` is saved and set with the state; of another so many batches as there were steps are passed
            over when a run goes on. Where it ends, the run ends; it has to be after the same step in all processes.
        num_steps: of the whole run, over all its starts.
        directory: of the run. One run at a time may use it. A run that is through is not evaluated again.
        evaluate: `evaluate(state)` returns metrics by name, which are logged as 'eval/' and the name.
        evaluate_every: steps between two evaluations. There is one after the last step in any case.
        log_every: steps between two rows of metrics; the first and the last step have one too.
        config: a mapping or a dataclass, to be written into the directory, and compared between processes.
        checkpoints: options of `zero.checkpoints`.
        fallback: see `Checkpoints.resume`.
        profile: the first and the last step of a trace that the profiler takes, counted from 1.
        writers: of rows of metrics. By default those of `writers.default_writers`.
        display: takes the metrics of every step. By default a bar on a terminal; elsewhere each row is a line.

    Returns:
        the last state, which is saved too.

    Raises:
        ValueError: an argument that cannot be, or processes that differ.
        RuntimeError: the data ended in some processes alone.
        SystemExit: after SIGTERM, see `Checkpoints`; and what `Checkpoints.update` and `resume` raise.
    """
    counts = {"num_steps": num_steps, "log_every": log_every}
    counts |= {} if evaluate_every is None else {"evaluate_every": evaluate_every}
    for name, number in counts.items():
        if not _is_count(number):
            raise ValueError(f"fit: {name} is {number!r}\n  fix:      a number of steps, at least 1")
    if profile is not None and not (len(profile) == 2 and all(map(_is_count, profile)) and profile[0] <= profile[1]):
        raise ValueError(f"fit: profile is {profile!r}\n  fix:      (first, last), steps counted from 1")
    if not callable(data) and not isinstance(data, Iterable):
        raise ValueError(f"fit: data is a {type(data).__name__}\n  fix:      a function of the step, or batches")
    config, folder = folders.as_config({} if config is None else config), Path(directory).absolute()
    folders.check(folder)
    agree(config)
    agree({**counts, "profile": profile})
    with contextlib.ExitStack() as stack:
        saved = stack.enter_context(zero.checkpoints(folder / "checkpoints", **(checkpoints or {})))
        batches = None if callable(data) else iter(data)
        keeps_place = batches if hasattr(batches, "get_state") else None
        state, start = saved.resume(state, keeps_place, fallback=fallback)
        if start >= num_steps:
            log.warning("fit: %s is at step %d already, the end is %d", folder, start, num_steps)
            return state
        next_batch = _batches(data, batches, start, placed=keeps_place is not None)
        batch = next(next_batch, _END)
        if jax.process_index() == 0:
            plan = None if batch is _END else _plan(zero, step, state, batch)
            folders.describe(folder, zero.config, config, start, num_steps, plan)
            writers = default_writers(folder, start, config) if writers is None else writers
            if display is None and not on_terminal():
                writers = [*writers, Lines(num_steps)]
            elif display is None:
                display = Bar(num_steps, start)
        else:
            writers, display = (), None
        record = stack.enter_context(Record(writers, display, log_every))
        traces = stack.enter_context(Profile(folder / "profile", profile))
        if profile and profile[0] <= start:
            log.warning("fit: no profile of steps %d to %d, the run goes on from %d", *profile, start)
        i = start
        while batch is not _END:
            traces.before(i + 1)
            state, metrics = step(state, batch)
            i += 1
            traces.after(i, state)
            record.add(i, metrics, batch)
            if evaluate and evaluate_every and i % evaluate_every == 0 and i < num_steps:
                record.evaluated(i, evaluate(state))
            if i % saved.every == 0:
                record.flush()  # what is saved is not run again: its rows come now or never
            saved.update(state, metrics, keeps_place)
            batch = next(next_batch, _END) if i < num_steps else _END
        if i < num_steps:
            _end_alike(i, num_steps)
        traces.close()
        record.flush(ended=True)
        saved.save(state, keeps_place)
        if evaluate:
            record.evaluated(i, evaluate(state))
    return state


def _is_count(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 1


def _batches(data: Any, batches: Iterator[Any] | None, start: int, *, placed: bool) -> Iterator[Any]:
    """From the step that a run goes on from."""
    if batches is None:
        for i in itertools.count(start):
            if (batch := data(i)) is None:
                raise ValueError(f"fit: data({i}) returned nothing\n  fix:      a batch for every step")
            yield batch
        return
    if start and not placed:
        log.warning("fit: %d batches are passed over; an iterator with get_state and set_state would go there", start)
        batches = itertools.islice(batches, start, None)
    yield from batches


def _end_alike(step: int, num_steps: int) -> None:
    """Where the data ended: in all processes after the same step, or some would wait for the others for ever."""
    log.warning("fit: the data ended after step %d of %d", step, num_steps)
    try:
        agree({"steps that there was data for": step}, timeout_s=_DATA_TIMEOUT_S)
    except (ValueError, TimeoutError) as error:
        raise RuntimeError(
            f"fit: the data of this process ended after step {step}, that of others did not\n  got:      {error}\n"
            f"  fix:      as many batches in every process"
        ) from error


def _plan(zero: Zero, step: Any, state: TrainState, batch: Any) -> str | None:
    """What is known before a step runs; None if it is not a step of zerojax."""
    if not hasattr(step, "memory"):
        return None
    held = f"A device holds, when memory is fullest in a step, by formula:\n\n{step.memory(state, batch)}\n"
    return f"{held}\nBetween steps, leaf by leaf:\n\n{zero.explain(state)}"


class Record:
    """The metrics of a run on their way to writers: read late, so that no step waits for the host.

    Args:
        writers: of the rows of the first step, of those that `log_every` divides, and of the last.
        display: of every step; None: nothing is shown.
        log_every: steps between two rows.
    """

    def __init__(self, writers: Sequence[Writer], display: Writer | None, log_every: int):
        self._writers, self._shown, self._log_every = writers, [] if display is None else [display], log_every
        self._begun = False
        self._waiting: collections.deque[tuple[int, Mapping[str, Any], int]] = collections.deque()
        self._times: collections.deque[tuple[int, float]] = collections.deque(maxlen=_RATE_STEPS)

    def __enter__(self) -> Record:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        with contextlib.ExitStack() as stack:
            for each in (*self._writers, *self._shown):
                stack.callback(each.close)
            with contextlib.suppress(Exception) if error else contextlib.nullcontext():
                self.flush(ended=True)

    def add(self, step: int, metrics: Mapping[str, Any], batch: Any) -> None:
        """The metrics of a step, as arrays that may not be there yet."""
        if self._writers or self._shown:
            self._waiting.append((step, metrics, num_rows(batch)))
        if len(self._waiting) > _LATE:
            self._read()
            self._times.append((step, time.perf_counter()))  # one more step has ended

    def flush(self, ended: bool = False) -> None:
        """Waits for all steps so far; if it was the last, that has a row."""
        while self._waiting:
            self._read(last=ended and len(self._waiting) == 1)

    def evaluated(self, step: int, metrics: Mapping[str, Any]) -> None:
        """A row of an evaluation after this step. Its time is not that of a step."""
        self.flush()
        if not isinstance(metrics, Mapping):
            raise ValueError(f"fit: evaluate returned a {type(metrics).__name__}\n  fix:      a dict of metrics")
        row = {f"eval/{name}": _number(name, value) for name, value in metrics.items()}
        for each in (*self._writers, *self._shown):
            each.write(step, row)
        self._times.clear()

    def _read(self, last: bool = False) -> None:
        step, metrics, rows = self._waiting.popleft()
        row = {name: _number(name, metrics[name]) for name in sorted(metrics, key=lambda name: name != "loss")}
        if len(self._times) > 1:
            (before, began), (after, now) = self._times[0], self._times[-1]
            seconds = (now - began) / (after - before)
            row |= {"seconds_per_step": seconds, "rows_per_s": rows / seconds}
        for each in self._shown:
            each.write(step, row)
        if last or not self._begun or step % self._log_every == 0:
            for each in self._writers:
                each.write(step, row)
        self._begun = True


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        got = f"shape {np.shape(value)}" if np.ndim(value) else repr(value)
        raise ValueError(f"fit: metric {name!r} is no number\n  got:      {got}\n  fix:      a scalar") from error


class Profile:
    """A trace of some steps, by JAX's profiler.

    Args:
        folder: for the trace; with several processes each has its own in it.
        steps: the first and the last, counted from 1; None: none is taken.
    """

    def __init__(self, folder: Path, steps: tuple[int, int] | None):
        several = jax.process_count() > 1
        self._folder = folder / f"process_{jax.process_index()}" if several else folder
        self._steps, self._runs = steps, False

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def close(self) -> None:
        """Ends the trace, if the run ended before its last step."""
        if self._runs:
            self._runs = False
            jax.profiler.stop_trace()

    def before(self, step: int) -> None:
        if self._steps and step == self._steps[0]:
            jax.profiler.start_trace(str(self._folder))
            self._runs = True

    def after(self, step: int, state: TrainState) -> None:
        if self._runs and self._steps and step == self._steps[1]:
            jax.block_until_ready(state)
            self.close()
            log.info("fit: steps %d to %d are profiled in %s", *self._steps, self._folder)


def num_rows(batch: Any) -> int:
    """Of a batch over all processes."""
    return max((global_shape(a)[0] for a in jax.tree.leaves(batch) if np.ndim(a)), default=0)
