"""Saves the state of a training run periodically, restores it after a restart, and monitors the run."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

import jax

from zerojax.checkpoints import contents, restorer, store
from zerojax.checkpoints.manifest import Allowed, CheckpointCorrupted, Manifest
from zerojax.checkpoints.remote_copy import RemoteCopy
from zerojax.checkpoints.replicas import verify_replicas
from zerojax.checkpoints.run_directory import RunDirectory, local_directory
from zerojax.checkpoints.saver import Saver
from zerojax.checkpoints.skip_monitor import SkipMonitor
from zerojax.processes.agreement import agree, broadcast_from_process_0
from zerojax.processes.preemption import Preemption
from zerojax.processes.watchdog import Watchdog
from zerojax.step.config import ZeroConfig
from zerojax.step.state import TrainState, check_not_donated
from zerojax.utils.typing import Array

log = logging.getLogger("zerojax")
_unclosed: set[Checkpoints] = set()  # keeps them alive when the script has no reference to them any more


def _close_all() -> None:
    """At the end of the script: waits for saves that are still in progress."""
    for checkpoints in list(_unclosed):
        try:
            checkpoints.close()
        except BaseException:
            log.exception("checkpoint: a save failed after the end of the script")
            logging.shutdown()
            sys.stdout.flush()
            os._exit(1)  # an exception would not change the exit code here


# Functions registered with `atexit` run too late: by then the executors that run saves accept no more work.
threading._register_atexit(_close_all)  # pyright: ignore[reportAttributeAccessIssue]


class CheckpointOptions(TypedDict, total=False):
    """The options of `zero.checkpoints`, and of `fit` as a dict.

    Attributes:
        every: the number of steps between two saves, 1000 by default. `fit` saves the state after the last step too.
        keep: the number of newest steps to keep on disk, 3 by default. None: all of them.
        keep_every: steps that are a multiple of this are kept too. None, the default: no others.
        most_skipped: the number of consecutive updates skipped because a gradient was not finite that ends the run, 10
            by default.
        watchdog_s: if `update` is not called for this many seconds of running time, the stacks of all threads are
            written to stderr, and those of all processes to a file in the directory; the exit code is 1. The first
            `update` starts the clock. The time must be longer than a save, an evaluation or a compilation between two
            calls. None, the default: no watchdog.
        verify_replicas_every: the number of steps between two comparisons of what several devices hold, in addition to
            those in `resume` and in each save. None, the default: no others.
        copy_to: a URL of remote storage, such as 's3://bucket/run', to which process 0 copies complete steps in the
            background, with `fit` together with the files of the run. While one is copied, others may complete that are
            not. Old ones are deleted as on disk. A run begins with the newest step of either: if it is there, it is
            copied into the directory first. None, the default: nothing is copied.
    """

    every: int
    keep: int | None
    keep_every: int | None
    most_skipped: int
    watchdog_s: float | None
    verify_replicas_every: int | None
    copy_to: str | None


DEFAULTS: dict[str, Any] = {
    "every": 1000,
    "keep": 3,
    "keep_every": None,
    "most_skipped": 10,
    "watchdog_s": None,
    "verify_replicas_every": None,
    "copy_to": None,
}


def complete_options(options: Any) -> dict[str, Any]:
    """All options, with their defaults.

    Raises:
        ValueError: if there is no such option, or a number of steps is not one.
    """
    if not isinstance(options, Mapping) or not options.keys() <= DEFAULTS.keys():
        raise ValueError(
            f"checkpoints: there are no such options\n  got:      {options!r}\n"
            f"  fix:      a dict of {', '.join(DEFAULTS)}"
        )
    complete = {**DEFAULTS, **options}
    for name in ("every", "keep", "keep_every", "most_skipped", "verify_replicas_every"):
        count = complete[name]
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise ValueError(
                f"checkpoints: {name} is invalid\n  got:      {count!r}\n  fix:      use an integer, at least 1"
            )
    return complete


class Checkpoints:
    """Saves the state of a run in the background every `every` steps, and restores it after a restart.

        with zero.checkpoints(directory, every=1000) as checkpoints:
            state, start = checkpoints.resume(state)
            for i in range(start, num_steps):
                state, metrics = step(state, batch(i))
                checkpoints.update(state, metrics)

    At the end of the block, the save in progress is completed, also after an exception, which is then raised. Without a
    `with` block, the save is completed at the end of the process. From Python 3.12 on that is not possible, and the
    exit code is 1 instead.

    After SIGTERM in any process, all processes save the state and end with exit code `EXIT_CODE`, 75, which asks for a
    restart. After Ctrl-C they do the same, but end with `INTERRUPT_EXIT_CODE`, 130; a second Ctrl-C ends a process at
    once. In an interactive session KeyboardInterrupt is raised instead, after the save and at the second Ctrl-C. Signal
    handlers of the user are called as well, whether they were installed before or after.

    Args:
        config: of the Zero.
        directory: on a file system that all processes share. Only one run at a time may use it.
        options: see `CheckpointOptions`.

    Raises:
        ValueError: if an option is unknown or invalid, or another run uses the directory.
    """

    def __init__(self, config: ZeroConfig, directory: str | Path, **options: Unpack[CheckpointOptions]):
        given = complete_options(options)
        self.config, self.directory, self.every = config, local_directory(directory, "checkpoints"), given["every"]
        copy_to, watchdog_s = given["copy_to"], given["watchdog_s"]
        remote = RemoteCopy(copy_to) if isinstance(copy_to, str) else copy_to  # one that also copies files of `fit`
        agree(given | {"copy_to": None if remote is None else remote.url})
        with contextlib.ExitStack() as stack:
            self._run_directory = RunDirectory(self.directory, remote, stack)
            self._store = store.Store(self.directory, given["keep"], given["keep_every"])
            stack.callback(self._store.close)
            self._exit = stack.pop_all()
        self.origin: Manifest | None = None  # of the step that `resume` restored
        self.origin_text = ""  # a line about the start of the run, after `resume`
        self._num_updates = 0  # including those before the step that the run resumed from
        self._saver = Saver(config, self._run_directory, self._store)
        self._skip_monitor = SkipMonitor(given["most_skipped"])
        self._watchdog = None if watchdog_s is None else Watchdog(watchdog_s, self.directory)
        self._verify_replicas_every = given["verify_replicas_every"]
        self._preemption = Preemption()
        self._exit.callback(self._preemption.close)
        if self._watchdog:
            self._exit.callback(self._watchdog.close)
        _unclosed.add(self)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            self.close()
        except Exception:
            if error is None:
                raise
            log.exception("checkpoint: the end of the run failed too")  # the exception of the block is the one to raise

    def close(self) -> None:
        """Waits for the save in progress, and releases the directory for other runs.

        Raises:
            Exception: if that save failed.
        """
        _unclosed.discard(self)
        with self._exit:
            self._saver.finish()
            self._skip_monitor.finish()

    def steps(self) -> list[int]:
        """Returns the steps that are complete on disk, oldest first."""
        return store.steps(self.directory)

    def resume(
        self, state: TrainState, data: object = None, *, fallback: bool = False, optimizer: str = "same"
    ) -> tuple[TrainState, int]:
        """Restores the newest state.

        Args:
            state: of `init`, which is donated; or of `eval_init` if there is a checkpoint. The checkpoint may be from
                another stage, mesh, number of processes and precision of the computation.
            data: an iterator with `get_state` and `set_state`. Its saved state is restored.
            fallback: whether to go back to the newest intact step if newer ones are damaged. Those are renamed.
            optimizer: 'changed' if it differs, by another learning rate schedule or other frozen leaves; see `Allowed`.

        Returns:
            (the restored state, its step). If no step was saved yet, that is the state that was passed, whose step is
            0 if it comes from `zero.init`. `origin_text` says in one line where the run starts.

        Raises:
            CheckpointCorrupted: if the newest step is damaged; with `fallback`, if all steps are.
            CheckpointMismatch: if the checkpoint does not fit the state.
            ValueError: if `state` contains avals and there is no checkpoint; or as in `save`: without a checkpoint, all
                that a save checks is checked before the first step.
        """
        steps = broadcast_from_process_0(self.steps())
        if not steps:
            return self._start(state, data)
        errors: list[str] = []
        avals = contents.avals(state)
        for step in reversed(steps):
            try:
                restored, saved = self._restore(state, step, data, Allowed(optimizer=optimizer))
            except CheckpointCorrupted as error:
                if not fallback:
                    raise
                log.error("checkpoint: step %d is skipped, an older one is tried: %s", step, error)
                errors.append(str(error))
                state = avals
            else:
                self._saver.saved_step, self.origin = step, saved
                if errors:
                    self._store.set_aside(newer for newer in steps if newer > step)
                return self._begin(restored, step)
        reasons = "\n            ".join(error.splitlines()[0].removeprefix("checkpoint: ") for error in errors)
        raise CheckpointCorrupted(
            f"checkpoint: there is no intact step in {self.directory}\n  got:      {reasons}\n"
            f"  fix:      use another directory to start at step 0"
        )

    def _restore(self, state: TrainState, step: int, data: object, allowed: Allowed) -> tuple[TrainState, Manifest]:
        """Restores a step; if it is damaged on disk, from its copy in remote storage."""
        avals = contents.avals(state)
        try:
            return restorer.restore(self.directory, state, step, data, allowed)
        except CheckpointCorrupted as error:
            if not self._run_directory.fetch_again(step):
                raise
            log.error("checkpoint: step %d is restored from its copy: %s", step, error)
            return restorer.restore(self.directory, avals, step, data, allowed)

    def _start(self, state: TrainState, data: object) -> tuple[TrainState, int]:
        """Starts a run without a checkpoint."""
        if found := broadcast_from_process_0(list(store.folders(self.directory))):
            raise CheckpointCorrupted(
                f"checkpoint: there is no intact step in {self.directory}\n"
                f"  got:      {len(found)} folders of steps, none with a completed save\n"
                f"  fix:      use another directory to start at step 0"
            )
        if any(isinstance(a, jax.ShapeDtypeStruct) for a in jax.tree.leaves(state)):
            raise ValueError(
                f"checkpoints: there is no state to start from\n"
                f"  got:      avals, and no checkpoint in {self.directory}\n  fix:      pass the state of zero.init"
            )
        _, manifest = self._saver.checked(state, data)
        self._store.check_room(manifest.num_bytes)
        self.origin = None
        return self._begin(state, int(state.step))

    def _begin(self, state: TrainState, step: int) -> tuple[TrainState, int]:
        self._num_updates, self._skip_monitor.num_skipped = step, int(state.skipped)
        self.origin_text = _origin_text(self.config, self.directory, step, self.origin)
        log.info("checkpoint: %s", self.origin_text)
        return state, step

    def restore(
        self,
        state: TrainState,
        step: int,
        *,
        only: Sequence[str] = (),
        data: object = None,
        missing: Sequence[str] = (),
        extra: Sequence[str] = (),
        cast: bool = False,
        optimizer: str = "same",
    ) -> TrainState:
        """Restores a step, or a part of it.

        Args:
            state: provides shapes, dtypes and shardings, and every leaf that is not restored. It is donated.
            step: one of `steps()`.
            only: globs of the leaves to restore ('params/*', 'params/layers/*'). By default all.
            data: see `resume`.
            missing, extra, cast, optimizer: the differences that are allowed, see `Allowed`.

        Cost: each device reads its own shards from disk, and reads them once more to check the digests. The state that
            was passed is freed first, so that the devices never hold two states.

        Raises:
            CheckpointCorrupted: if the data on disk differ from those that were saved.
            CheckpointMismatch: if the checkpoint does not fit the state.
            ValueError: if there is no such step, or a glob matches nothing.
        """
        store.check_step(self.directory, step, self.steps())
        allowed = Allowed(missing, ("*",) if only else extra, cast, optimizer)
        return restorer.restore(self.directory, state, step, data, allowed, only)[0]

    def update(self, state: TrainState, metrics: Mapping[str, Array] | None = None, data: object = None) -> None:
        """Saves the state if it is due or the run is being preempted. To be called after each step.

        Args:
            state: of the step. It may be donated to the next step at once.
            metrics: of the step. Skipped updates are reported two steps later.
            data: an iterator with `get_state` and `set_state`, such as Grain's, whose state is saved too.

        Raises:
            SystemExit: once the state is saved, with `EXIT_CODE` after SIGTERM, and `INTERRUPT_EXIT_CODE` after Ctrl-C.
            KeyboardInterrupt: after Ctrl-C in an interactive session, once the state is saved.
            ReplicasDiffer: as in `save`, and every `verify_replicas_every` steps.
            FloatingPointError: if too many consecutive updates were skipped, or as in `save`.
            RuntimeError: if two consecutive saves failed.
            ValueError: as in `save`.
        """
        check_not_donated(state)
        self._num_updates += 1
        if self._watchdog:
            self._watchdog.reset()
        if metrics is not None:
            self._skip_monitor.update(self._num_updates, metrics)
        self._saver.poll()
        if number := self._preemption.requested():
            self._save_and_exit(number, state, data)
        if self._num_updates % self.every == 0:
            self.save(state, data)
        elif self._verify_replicas_every and self._num_updates % self._verify_replicas_every == 0:
            verify_replicas(state, self._saver.advice())

    def exit_if_preempted(self, state: TrainState, data: object = None) -> None:
        """Saves the state and exits if any process has received SIGTERM or Ctrl-C since the last `update`.

        To be called by all processes where the run has ended but for work without steps, such as a long evaluation.

        Args:
            state, data: as in `update`.

        Raises:
            SystemExit: with `EXIT_CODE` or `INTERRUPT_EXIT_CODE`, see `update`.
        """
        if number := self._preemption.requested(wait=True):
            self._save_and_exit(number, state, data)

    def _save_and_exit(self, number: signal.Signals, state: TrainState, data: object) -> None:
        self.save(state, data)
        self.wait()
        self._saver.raise_error(f"the save after {number.name} failed")
        self._preemption.end(number, self._saver.saved_step)

    def save(self, state: TrainState, data: object = None) -> None:
        """Starts to save a state in the background. A step that this run has saved is not saved again.

        Args:
            state: to be saved.
            data: see `update`.

        Cost: copies each device's shards to host memory, and reads them once on the devices for the digests.

        Raises:
            ValueError: if a leaf is not an array or has a dtype that cannot be written, or the state of the data
                iterator is not JSON data.
            ReplicasDiffer: if devices hold different copies of the same values. Nothing is written.
            FloatingPointError: if what is trained contains a NaN, or a parameter an infinity. Nothing is written.
            RuntimeError: if two consecutive saves failed, or the directory was deleted or replaced.
        """
        self._saver.save(state, data)

    def wait(self) -> None:
        """Waits for the save in progress. A failure is reported as in `update`."""
        self._saver.wait()


def _origin_text(config: ZeroConfig, directory: Path, step: int, saved: Manifest | None) -> str:
    """One line about the start of a run.

    Args:
        config: mesh and stage on which the run continues.
        directory: of the checkpoints.
        step: the step from which the run continues.
        saved: the manifest of the step that was restored; None if there was none.
    """
    now = _setting(dict(config.mesh.shape), config.stage)
    if saved is None:
        return f"no checkpoint in {directory}; the run starts at step {step} on {now}"
    before = _setting(saved.mesh, saved.stage)
    rest = "the run continues on the same" if before == now else f"the run continues on {now}"
    return f"step {step} of {directory} is restored, which was saved on {before}; {rest}"


def _setting(mesh: Mapping[str, int], stage: int) -> str:
    sizes = ", ".join(f"{name}={size}" for name, size in mesh.items())
    return f"mesh ({sizes}) at stage {int(stage)}"
