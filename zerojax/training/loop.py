"""The training loop: steps with checkpoints, metrics, evaluation, a progress display and profiles.

It is part of the package, and not an example to copy, so that its difficult parts are tested once: continuing the data
after a restart, metrics of steps that run again, and reading metrics without waiting for them. It is made of public
parts, from which a different loop can be written too.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from zerojax.directories import local_directory
from zerojax.processes.agreement import agree
from zerojax.step.batch import num_global_rows
from zerojax.step.state import TrainState
from zerojax.tables import TO_FILE
from zerojax.training import folder as folders
from zerojax.training.display import ProgressBar, ProgressLines, on_terminal
from zerojax.training.stragglers import StragglerMonitor
from zerojax.training.writers import EVALUATION, Writer, default_writers, is_evaluated
from zerojax.typing import PyTree
from zerojax.zero import CheckpointOptions, Zero

if TYPE_CHECKING:
    from zerojax.checkpoints import Checkpoints

log = logging.getLogger("zerojax")
_RATE_STEPS = 11  # the rate is measured between the first and the last of this number of steps
_DATA_TIMEOUT_S = 60  # for the data of the other processes to end, after that of this process has ended
_NO_BATCH = object()  # in place of a batch, after the last one
_READ_DELAY = 2  # steps after which metrics are read, so that the devices always have a next step to run


def fit(
    zero: Zero,
    state: TrainState,
    step: Callable[..., Any],
    data: Callable[[int], PyTree] | Iterable[PyTree],
    num_steps: int,
    directory: str | Path,
    *,
    evaluate: Callable[[TrainState], Mapping[str, Any]] | None = None,
    evaluate_every: int | None = None,
    log_every: int = 10,
    config: Any = None,
    checkpoints: CheckpointOptions | None = None,
    fallback: bool = False,
    optimizer: str = "same",
    profile: tuple[int, int] | None = None,
    writers: Sequence[Writer] | None = None,
    display: Writer | None = None,
) -> TrainState:
    """Trains for a number of steps, starting from the newest checkpoint in the directory if there is one.

    The directory describes the run. Its README.md lists the files: config.json; starts.jsonl with the versions, mesh
    and command of each start; metrics.jsonl; plan.txt with the memory of a device; checkpoints/; and, if enabled,
    profile/ and tensorboard/. With several processes, all of them call this function. Process 0 alone writes these
    files and shows the progress; checkpoints and profiles are written by all.

    Args:
        zero: the Zero that made `step`.
        state: the initial state, from `zero.init`. It is donated.
        step: `step(state, batch) -> (state, metrics)`, from `zero.train_step` or your own.
        data: `data(i)` returns the batch of step i + 1. Or an iterable of batches: the position of an iterator with
            `get_state` and `set_state` is saved and restored with the state; with any other, the batches of earlier
            steps are skipped when a run continues. The run ends when the data ends, which must be after the same step
            in all processes.
        num_steps: number of steps of the whole run, over all its starts.
        directory: directory of the run. Only one run at a time may use it. If it is new, nobody but its owner may
            enter it; one that exists keeps its permissions. A run that is complete is neither trained nor evaluated
            again, unless its last evaluation is missing in metrics.jsonl.
        evaluate: `evaluate(state)` returns a dict of metrics, which are logged with the prefix 'eval/'.
        evaluate_every: number of steps between two evaluations. By default there is only the one after the last step.
        log_every: number of steps between two rows of metrics. The first and the last step are always logged.
        config: a mapping or a dataclass, which is written to the directory and must be the same in all processes. In
            the directory and in wandb, passwords, keys and tokens are masked, see `zerojax.masking`.
        checkpoints: options of `zero.checkpoints`: `every`, `keep`, `keep_every`, `most_skipped`, `spike`,
            `watchdog_s`, `verify_replicas_every` and `copy_to`. `CheckpointOptions` describes them.
        fallback: if the newest checkpoint is damaged, continues from the newest one that is intact.
        optimizer: 'changed' continues with another learning rate schedule or other frozen leaves: what both optimizers
            have, such as moments, is restored. 'new' restores nothing of it.
        profile: first and last step of a profiler trace, counted from 1.
        writers: receive the rows of metrics; `writers.default_writers` by default.
        display: receives the metrics of every step. By default a progress bar on a terminal, and lines elsewhere.

    Returns:
        The last state, which is also saved.

    Raises:
        ValueError: if an argument is invalid, or if the processes differ.
        RuntimeError: if the data ended in some processes only.
        SystemExit: after SIGTERM; see `Checkpoints`. Errors of `Checkpoints.update` and `resume` are raised as well.
    """
    counts = {"num_steps": num_steps, "log_every": log_every}
    counts |= {} if evaluate_every is None else {"evaluate_every": evaluate_every}
    for name, number in counts.items():
        if not _is_count(number):
            raise ValueError(f"fit: {name} is {number!r}\n  fix:      a whole number of steps, at least 1")
    if profile is not None and not (len(profile) == 2 and all(map(_is_count, profile)) and profile[0] <= profile[1]):
        raise ValueError(f"fit: profile is {profile!r}\n  fix:      (first step, last step), counted from 1")
    if not callable(data) and not isinstance(data, Iterable):
        got = type(data).__name__
        raise ValueError(f"fit: data is of type {got}\n  fix:      a function of the step, or an iterable of batches")
    config, folder = folders.as_config({} if config is None else config), local_directory(directory, "fit")
    folders.check_not_checkpoints(folder)
    agree(config)
    kind = "function" if callable(data) else "iterable"
    agree({**counts, "profile": profile, "evaluate": evaluate is not None, "fallback": fallback, "data": kind})
    is_new = not folder.exists()
    with contextlib.ExitStack() as stack:
        manager = stack.enter_context(_checkpoints(zero, folder, **(checkpoints or {})))
        if is_new:
            folders.make_private(folder)
        iterator = None if callable(data) else iter(data)
        stateful_iterator = iterator if hasattr(iterator, "get_state") else None
        state, start = manager.resume(state, stateful_iterator, fallback=fallback, optimizer=optimizer)
        is_complete = start >= num_steps
        if is_complete:
            log.warning("fit: %s is already at step %d of %d", folder, start, num_steps)
            if evaluate is None or not _misses_evaluation(folder, start):
                return state
            log.warning("fit: its last evaluation is missing, and is made now")
        batches = _batches(data, iterator, start, is_positioned=stateful_iterator is not None)
        batch = _NO_BATCH if is_complete else next(batches, _NO_BATCH)
        if jax.process_index() == 0:
            plan = None if batch is _NO_BATCH else _memory_and_placement(zero, step, state, batch)
            folders.write_description(folder, zero.config, config, start, num_steps, plan)
            writers = default_writers(folder, start, config) if writers is None else writers
            if display is None and not on_terminal():
                writers = [*writers, ProgressLines(num_steps)]
            elif display is None:
                display = ProgressBar(num_steps, start)
        else:
            writers, display = (), None
        recorder = stack.enter_context(MetricsRecorder(writers, display, log_every))
        tracer = stack.enter_context(StepTracer(folder / "profile", profile))
        if profile and profile[0] <= start:
            log.warning("fit: steps %d to %d are not profiled, since the run continues from step %d", *profile, start)
        i, stragglers = start, StragglerMonitor()
        while batch is not _NO_BATCH:
            tracer.before_step(i + 1)
            state, metrics = step(state, batch)
            i += 1
            tracer.after_step(i, state)
            recorder.add(i, metrics, batch)
            if evaluate and evaluate_every and i % evaluate_every == 0 and i < num_steps:
                recorder.add_evaluation(i, evaluate(state))
            if i % manager.every == 0:
                recorder.flush()  # steps before a checkpoint do not run again, so their rows must be written before it
            manager.update(state, metrics, stateful_iterator)
            begin = time.perf_counter()
            batch = next(batches, _NO_BATCH) if i < num_steps else _NO_BATCH
            if batch is not _NO_BATCH:
                stragglers.add(i + 1, time.perf_counter() - begin)
        if i < num_steps:
            _check_data_ended_everywhere(i, num_steps)
        tracer.close()
        recorder.flush(is_last=True)
        manager.save(state, stateful_iterator)
        if evaluate:
            recorder.add_evaluation(i, evaluate(state))
        manager.exit_if_preempted(state, stateful_iterator)
    return state


def _checkpoints(zero: Zero, folder: Path, copy_to: str | None = None, **options: Any) -> Checkpoints:
    from zerojax.checkpoints import Checkpoints, remote_copy  # Orbax takes a second to import

    copied = copy_to and remote_copy.RemoteCopy(copy_to, {name: folder / name for name in folders.FILES})
    return Checkpoints(zero.config, folder / "checkpoints", copy_to=copied, **options)


def _misses_evaluation(folder: Path, step: int) -> bool:
    """Whether the run was ended during its last evaluation; the same in all processes."""
    from zerojax.checkpoints.raise_on_all_processes import broadcast_from_process_0  # Orbax takes a second to import

    return any(broadcast_from_process_0([not is_evaluated(folder / "metrics.jsonl", step)]))


def _is_count(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 1


def _batches(data: Any, iterator: Iterator[PyTree] | None, start: int, *, is_positioned: bool) -> Iterator[PyTree]:
    """The batches of the steps after `start`."""
    if iterator is None:
        for i in itertools.count(start):
            if (batch := data(i)) is None:
                raise ValueError(f"fit: data({i}) returned None\n  fix:      return a batch for every step")
            yield batch
        return
    if start and not is_positioned:
        log.warning("fit: skipping %d batches; an iterator with get_state and set_state is positioned directly", start)
        iterator = itertools.islice(iterator, start, None)
    yield from iterator


def _check_data_ended_everywhere(step: int, num_steps: int) -> None:
    """Checks that the data ended after the same step in all processes. Otherwise some would wait for others forever."""
    log.warning("fit: the data ended after step %d of %d", step, num_steps)
    try:
        agree({"last step with data": step}, timeout_s=_DATA_TIMEOUT_S)
    except (ValueError, TimeoutError) as error:
        raise RuntimeError(
            f"fit: the data of this process ended after step {step}, but not in all processes\n  got:      {error}\n"
            f"  fix:      the same number of batches in every process"
        ) from error


def _memory_and_placement(zero: Zero, step: Any, state: TrainState, batch: PyTree) -> str | None:
    """The text of plan.txt, which is known before a step runs; None if the step is not one of zerojax."""
    if not hasattr(step, "memory"):
        return None
    peak = f"The memory of a device at the peak of a step, by formula:\n\n{step.memory(state, batch)}\n"
    return f"{peak}\nBetween steps, leaf by leaf:\n\n{zero.explain(state).text(TO_FILE)}"


class MetricsRecorder:
    """Passes the metrics of steps on to writers. They are read some steps later, so that no step waits for the host.

    Args:
        writers: receive the rows of the first step, of every `log_every`-th step, and of the last step.
        display: receives the metrics of every step; None for no display.
        log_every: number of steps between two rows.
    """

    def __init__(self, writers: Sequence[Writer], display: Writer | None, log_every: int):
        self._writers, self._displays, self._log_every = writers, [] if display is None else [display], log_every
        self._has_written = False
        self._pending: collections.deque[tuple[int, Mapping[str, Any], int]] = collections.deque()
        self._times: collections.deque[tuple[int, float]] = collections.deque(maxlen=_RATE_STEPS)

    def __enter__(self) -> MetricsRecorder:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        with contextlib.ExitStack() as stack:
            for writer in (*self._writers, *self._displays):
                stack.callback(writer.close)
            with contextlib.suppress(Exception) if error else contextlib.nullcontext():
                self.flush(is_last=True)

    def add(self, step: int, metrics: Mapping[str, Any], batch: PyTree) -> None:
        """Adds the metrics of a step. Their arrays may still be being computed."""
        if self._writers or self._displays:
            self._pending.append((step, metrics, num_global_rows(batch)))
        if len(self._pending) > _READ_DELAY:
            self._read()
            self._times.append((step, time.perf_counter()))  # one more step has ended

    def flush(self, is_last: bool = False) -> None:
        """Waits for all steps so far, and writes their rows. The last step of a run always has a row."""
        while self._pending:
            self._read(is_last=is_last and len(self._pending) == 1)

    def add_evaluation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes a row with the metrics of an evaluation after a step. Its time does not count as that of a step."""
        self.flush()
        if not isinstance(metrics, Mapping):
            got = type(metrics).__name__
            raise ValueError(f"fit: evaluate returned a value of type {got}\n  fix:      return a dict of metrics")
        row = {f"{EVALUATION}{name}": _as_float(name, value) for name, value in metrics.items()}
        for writer in (*self._writers, *self._displays):
            writer.write(step, row)
        self._times.clear()

    def _read(self, is_last: bool = False) -> None:
        step, metrics, num_rows = self._pending.popleft()
        row = {name: _as_float(name, metrics[name]) for name in sorted(metrics, key=lambda name: name != "loss")}
        if len(self._times) > 1:
            (first_step, first_time), (last_step, last_time) = self._times[0], self._times[-1]
            seconds = (last_time - first_time) / (last_step - first_step)
            row |= {"seconds_per_step": seconds, "rows_per_s": num_rows / seconds}
        for display in self._displays:
            display.write(step, row)
        if is_last or not self._has_written or step % self._log_every == 0:
            for writer in self._writers:
                writer.write(step, row)
        self._has_written = True


def _as_float(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        got = f"shape {np.shape(value)}" if np.ndim(value) else repr(value)
        raise ValueError(f"fit: metric {name!r} is not a number\n  got:      {got}\n  fix:      a scalar") from error


class StepTracer:
    """Traces some steps with JAX's profiler.

    Args:
        folder: folder for the trace. With several processes, each one has a subfolder.
        steps: the first and the last step of the trace, counted from 1; None for no trace.
    """

    def __init__(self, folder: Path, steps: tuple[int, int] | None):
        has_several = jax.process_count() > 1
        self._folder = folder / f"process_{jax.process_index()}" if has_several else folder
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
