"""The training loop: steps with checkpoints, metrics, evaluation, a progress display and profiles.

It is part of the package, and not an example to copy, so that its difficult parts are tested once: continuing the data
after a restart, metrics of steps that run again, and reading metrics without waiting for them. It is made of public
parts, from which a different loop can be written too.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, SupportsFloat

import jax

from zerojax.processes.agreement import agree, broadcast_from_process_0
from zerojax.step.batch import num_global_rows
from zerojax.step.config import ZeroConfig
from zerojax.step.state import TrainState, check_is_state
from zerojax.step.steps import Step
from zerojax.training import writers as files
from zerojax.training.display import ProgressBar, ProgressLines, on_terminal, show_line
from zerojax.training.recorder import MetricsRecorder, StragglerMonitor, costs_per_row, warn_of_equal_rows
from zerojax.training.writers import Writer
from zerojax.utils.tables import TO_FILE
from zerojax.utils.text import error_text
from zerojax.utils.typing import Array, PyTree
from zerojax.zero import Zero

if TYPE_CHECKING:
    from zerojax.checkpoints import CheckpointOptions, Checkpoints

log = logging.getLogger("zerojax")
_DATA_TIMEOUT_S = 60  # for the data of the other processes to end, after that of this process has ended
_NO_BATCH = object()  # in place of a batch, after the last one
_FROM_STEP_0 = "zero.with_optimizer(state, tx) starts at step 0"


def fit(
    zero: Zero,
    state: TrainState,
    step: Callable[..., tuple[TrainState, Mapping[str, Array]]],
    data: Callable[[int], PyTree] | Iterable[PyTree],
    num_steps: int,
    directory: str | Path | None = None,
    *,
    evaluate: Callable[[TrainState], Mapping[str, SupportsFloat]] | None = None,
    evaluate_every: int | None = None,
    log_every: int = 10,
    config: object = None,
    checkpoints: CheckpointOptions | None = None,
    fallback: bool = False,
    optimizer: str = "same",
    tokens_per_row: int | None = None,
    profile: tuple[int, int] | None = None,
    writers: Sequence[Writer] | None = None,
    display: Writer | None = None,
) -> TrainState:
    """Trains up to a step, starting from the newest checkpoint in the directory if there is one.

    Steps are counted by the state: a state of `zero.init` is at step 0, and a restored one is at the step at which it
    was saved. To train a restored state from step 0, with a new optimizer, pass `zero.with_optimizer(state, tx)`.

    The directory describes the run: config.json; starts.jsonl with the versions and the mesh of each start;
    metrics.jsonl; plan.txt with the memory of a device; checkpoints/; and, if enabled, profile/ and tensorboard/. With
    several processes, all of them call this function, and all write checkpoints and profiles, process 0 the rest.

    Args:
        zero: the Zero that made `step`.
        state: the state to start from if there is no checkpoint yet, from `zero.init`. It is donated.
        step: `step(state, batch) -> (state, metrics)`, from `zero.train_step` or your own.
        data: `data(i)` returns the batch of step i + 1. Or an iterable of batches: the position of an iterator with
            `get_state` and `set_state` is saved and restored with the state; with any other, the batches of the steps
            that the state has behind it are skipped. The run ends when the data ends, which must be after the same step
            in all processes.
        num_steps: the step at which the run ends, over all its starts.
        directory: directory of the run, which one run at a time may use. If it is new, nobody but its owner may enter
            it. A run that is complete is neither trained nor evaluated again, unless its last evaluation is missing in
            metrics.jsonl. Without a directory, nothing is saved or written.
        evaluate: `evaluate(state)` returns a dict of metrics, which are logged with the prefix 'eval/'.
        evaluate_every: number of steps between two evaluations. By default there is only the one after the last step.
        log_every: number of steps between two rows of metrics. The first and the last step are always logged.
        config: a mapping or a dataclass, which is written to the directory and must be the same in all processes. In
            the directory and in wandb, text whose name contains key, token, secret or password is masked.
        checkpoints: options of `zero.checkpoints`, such as {'every': 100}; see `CheckpointOptions`.
        fallback: if the newest checkpoint is damaged, continues from the newest one that is intact.
        optimizer: 'changed' continues with another learning rate schedule or other frozen leaves: what both optimizers
            have, such as moments, is restored. 'new' restores nothing of it.
        tokens_per_row: the number of tokens in a row of a batch; the metrics then have tokens_per_s.
        profile: first and last step of a profiler trace, counted from 1.
        writers: receive the rows of metrics; `writers.default_writers` by default.
        display: receives the metrics of every step. By default a progress bar on a terminal, and lines elsewhere.

    Returns:
        The last state, which is also saved.

    Raises:
        ValueError: if an argument is invalid, if the processes differ, or if there is no step or no batch left.
        RuntimeError: if the data ended in some processes only.
        SystemExit: after SIGTERM and after Ctrl-C, when the state is saved; see `Checkpoints`. Errors of
            `Checkpoints.update` and `resume` are raised as well.
    """
    from zerojax.checkpoints.run_directory import local_directory  # Orbax takes a second to import

    # Check the arguments, and that all processes have the same.
    counts = {"num_steps": num_steps, "log_every": log_every}
    counts |= {"evaluate_every": evaluate_every, "tokens_per_row": tokens_per_row}
    _check_arguments(counts, profile, data, evaluate)
    config = files.as_config({} if config is None else config)
    folder = None if directory is None else local_directory(directory, "fit")
    _check_folder(folder, profile, checkpoints)
    check_is_state(state, step, "zerojax.fit(zero, state, step, data, num_steps)")
    agree(config)
    kind = "function" if callable(data) else "iterable"
    agree({**counts, "profile": profile, "evaluate": evaluate is not None, "fallback": fallback, "data": kind})

    with contextlib.ExitStack() as stack:
        # Restore the newest checkpoint.
        manager = stack.enter_context(_checkpoints(zero, folder, checkpoints or {}))
        source = data if callable(data) else iter(data)
        stateful_iterator = source if hasattr(source, "get_state") and not callable(data) else None
        state, start = manager.resume(state, stateful_iterator, fallback=fallback, optimizer=optimizer)
        is_complete = start >= num_steps
        if is_complete:
            if manager.origin is None:
                what = f"fit: the state that was passed is already at step {start}, and num_steps={num_steps}"
                fix = f"num_steps={start + num_steps} trains for {num_steps} more steps; {_FROM_STEP_0}"
                raise ValueError(error_text(what, "no checkpoint was found", fix))
            log.warning("fit: %s is already at step %d of %d", folder, start, num_steps)
            if evaluate is None or folder is None or not _misses_evaluation(folder, start):
                return state
            log.warning("fit: its last evaluation is missing, and is made now")

        # Take the first batch, and describe the run.
        batches = _batches(source, start, is_positioned=stateful_iterator is not None)
        batch = _NO_BATCH if is_complete else next(batches, _NO_BATCH)
        if batch is _NO_BATCH and manager.origin is None:
            what = f"fit: the data has no batch for step {start + 1}, the first of this run"
            raise ValueError(error_text(what, None, f"pass data that is not used up; {_FROM_STEP_0}"))
        if batch is not _NO_BATCH:
            warn_of_equal_rows(zero.config, batch, start + 1)
        costs = {}
        if jax.process_index() == 0:
            if writers is None:
                writers = [] if folder is None else files.default_writers(folder, start, config)
            if display is None:
                writers, display = _with_display(writers, manager.origin_text, start, num_steps)
            if folder is not None:
                plan = None if batch is _NO_BATCH else _memory_and_placement(zero, step, state, batch)
                sizes = {} if batch is _NO_BATCH else _sizes(zero.config, step, batch)
                files.write_description(folder, zero.config, config, start, num_steps, sizes, plan)
            if batch is not _NO_BATCH:
                costs = costs_per_row(zero.config, step, state, batch, tokens_per_row)
        else:
            writers, display = (), None
        recorder = stack.enter_context(MetricsRecorder(writers, display, log_every, costs))
        if profile and profile[0] <= start:
            log.warning("fit: steps %d to %d are not profiled, since the run continues from step %d", *profile, start)
            profile = None

        # Train.
        i, stragglers, trace = start, StragglerMonitor(), stack.enter_context(contextlib.ExitStack())
        while batch is not _NO_BATCH:
            if profile and i + 1 == profile[0]:
                trace.enter_context(_profiler(folder))
            state, metrics = step(state, batch)
            i += 1
            if profile and i == profile[1]:
                jax.block_until_ready(state)
                trace.close()
                log.info("fit: wrote a profile of steps %d to %d to %s", *profile, folder)
            recorder.add(i, metrics, num_global_rows(zero.config, batch))
            if evaluate and evaluate_every and i % evaluate_every == 0 and i < num_steps:
                with recorder.paused():
                    recorder.add_evaluation(i, evaluate(state))
            # Steps before a checkpoint do not run again, so their rows must be written before it.
            with recorder.paused() if i % manager.every == 0 else contextlib.nullcontext():
                manager.update(state, metrics, stateful_iterator)
            begin = time.perf_counter()
            batch = next(batches, _NO_BATCH) if i < num_steps else _NO_BATCH
            if batch is not _NO_BATCH:
                stragglers.add(i + 1, time.perf_counter() - begin)

        # Save and evaluate the last state.
        if i < num_steps:
            _check_data_ended_everywhere(i, num_steps)
        trace.close()
        recorder.flush(is_last=True)
        manager.save(state, stateful_iterator)
        if evaluate:
            recorder.add_evaluation(i, evaluate(state))
        manager.exit_if_preempted(state, stateful_iterator)
    return state


def _sizes(config: ZeroConfig, step: object, batch: PyTree) -> dict[str, int]:
    """The rows of a step, and the microbatches that they are divided into, if the step is one of `Zero`."""
    settings = getattr(step, "settings", None)
    microbatches = {} if settings is None else {"microbatches": settings.num_microbatches}
    return {"rows": num_global_rows(config, batch), **microbatches}


def _check_arguments(counts: Mapping[str, int | None], profile: object, data: object, evaluate: object) -> None:
    """Raises ValueError if an argument of `fit` is invalid."""
    for name, number in counts.items():
        may_be_none = name in ("evaluate_every", "tokens_per_row")
        if not (_is_count(number) or (number is None and may_be_none)):
            raise ValueError(error_text(f"fit: {name} is {number!r}", None, "a whole number, at least 1"))
    steps = profile if isinstance(profile, tuple | list) else ()
    if profile is not None and not (len(steps) == 2 and all(map(_is_count, steps)) and steps[0] <= steps[1]):
        raise ValueError(error_text(f"fit: profile is {profile!r}", None, "(first step, last step), counted from 1"))
    if isinstance(data, Mapping) or not (callable(data) or isinstance(data, Iterable)):
        fix = "a function of the step, or an iterable of batches"
        raise ValueError(error_text(f"fit: data is of type {type(data).__name__}", None, fix))
    if evaluate is not None and (isinstance(evaluate, Step) or not callable(evaluate)):  # a step also takes a batch
        fix = "evaluate=lambda state: zerojax.evaluate(eval_step, state, data, batch_size=...)"
        raise ValueError(error_text(f"fit: evaluate is of type {type(evaluate).__name__}", None, fix))


def _is_count(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 1


def _check_folder(folder: Path | None, profile: object, checkpoints: CheckpointOptions | None) -> None:
    """Raises ValueError if the directory is one of checkpoints, or an option is invalid or needs a directory."""
    from zerojax.checkpoints import store
    from zerojax.checkpoints.run import complete_options

    if checkpoints:
        complete_options(checkpoints)
    if folder is not None and store.folders(folder):
        fix = f"the directory of a run; or move the checkpoints to {folder / 'checkpoints'}"
        what = f"fit: {folder} is a directory of checkpoints"
        raise ValueError(error_text(what, "a run has its checkpoints in checkpoints/", fix))
    for name, given in {"profile": profile, "checkpoints": checkpoints}.items():
        if folder is None and given:
            raise ValueError(error_text(f"fit: {name} needs a directory", "no directory", "pass directory="))


def _with_display(
    writers: Sequence[Writer], origin: str, start: int, num_steps: int
) -> tuple[Sequence[Writer], Writer | None]:
    """Adds lines to the writers, or a progress bar, after saying where the run starts."""
    if not log.isEnabledFor(logging.INFO):  # otherwise `resume` has logged it
        show_line(f"fit: {origin}")
    if on_terminal():
        return writers, ProgressBar(num_steps, start)
    return [*writers, ProgressLines(num_steps)], None


def _checkpoints(zero: Zero, folder: Path | None, options: CheckpointOptions) -> Checkpoints | NoCheckpoints:
    """The checkpoints in the directory of a run, which is made private to its owner if it is new."""
    from zerojax.checkpoints import Checkpoints, remote_copy

    if folder is None:
        return NoCheckpoints()
    given: dict = dict(options)
    if copy_to := options.get("copy_to"):
        given["copy_to"] = remote_copy.RemoteCopy(copy_to, {name: folder / name for name in files.FILES})
    is_new = not folder.exists()
    manager = Checkpoints(zero.config, folder / "checkpoints", **given)
    if is_new:
        try:
            folder.chmod(0o700)
        except OSError as error:  # a file system without permissions
            log.warning("fit: others may be able to read %s: %s", folder, error)
    return manager


def _profiler(folder: Path | None) -> contextlib.AbstractContextManager[None]:
    """A trace in the directory of the run. Several processes have subfolders."""
    assert folder is not None
    own = f"process_{jax.process_index()}" if jax.process_count() > 1 else ""
    return jax.profiler.trace(str(folder / "profile" / own))


def _misses_evaluation(folder: Path, step: int) -> bool:
    """Whether the run was ended during its last evaluation; the same in all processes."""
    return any(broadcast_from_process_0([not files.is_evaluated(folder / "metrics.jsonl", step)]))


def _batches(data: Callable[[int], PyTree] | Iterator[PyTree], start: int, *, is_positioned: bool) -> Iterator[PyTree]:
    """The batches of the steps after `start`."""
    if callable(data):
        for i in itertools.count(start):
            if (batch := data(i)) is None:
                raise ValueError(error_text(f"fit: data({i}) returned None", None, "return a batch for every step"))
            yield batch
        return
    if start and not is_positioned:
        log.warning("fit: skipping %d batches; an iterator with get_state and set_state is positioned directly", start)
        data = itertools.islice(data, start, None)
    yield from data


def _check_data_ended_everywhere(step: int, num_steps: int) -> None:
    """Checks that the data ended after the same step in all processes. Otherwise some would wait for others forever."""
    log.warning("fit: the data ended after step %d of %d", step, num_steps)
    try:
        agree({"last step with data": step}, timeout_s=_DATA_TIMEOUT_S)
    except (ValueError, TimeoutError) as error:
        what = f"fit: the data of this process ended after step {step}, but not in all processes"
        raise RuntimeError(error_text(what, error, "the same number of batches in every process")) from error


def _memory_and_placement(zero: Zero, step: object, state: TrainState, batch: PyTree) -> str | None:
    """The text of plan.txt, which is known before a step runs; None if the step is not one of zerojax."""
    memory = getattr(step, "memory", None)
    if memory is None:
        return None
    peak = f"The memory of a device at the peak of a step, by formula:\n\n{memory(state, batch)}\n"
    return f"{peak}\nBetween steps, leaf by leaf:\n\n{zero.explain(state).text(TO_FILE)}"


class NoCheckpoints:
    """Stands in for `Checkpoints` without a directory: nothing is saved, but skipped updates still end the run."""

    every, origin, origin_text = sys.maxsize, None, ""

    def __init__(self) -> None:
        from zerojax.checkpoints.run import DEFAULTS
        from zerojax.checkpoints.skip_monitor import SkipMonitor

        self._skip_monitor = SkipMonitor(DEFAULTS["most_skipped"])

    def __enter__(self) -> NoCheckpoints:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self._skip_monitor.finish()

    def resume(self, state: TrainState, data: object, **options: object) -> tuple[TrainState, int]:
        """Starts at the step of the state."""
        self._skip_monitor.num_skipped, self._step = int(state.skipped), int(state.step)
        self.origin_text = f"the run starts at step {self._step}, and is not saved, since it has no directory"
        return state, self._step

    def update(self, state: TrainState, metrics: Mapping[str, Array], data: object) -> None:
        """Checks the metrics of a step, two steps late."""
        self._step += 1
        self._skip_monitor.update(self._step, metrics)

    def save(self, state: TrainState, data: object) -> None: ...

    def exit_if_preempted(self, state: TrainState, data: object) -> None: ...
