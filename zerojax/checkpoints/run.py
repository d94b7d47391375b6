"""Saves the state of a training run periodically, restores it after a restart, and monitors the run."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.checkpoints import contents, iterators, restore as restoring, store
from zerojax.checkpoints.lock import DirectoryLock
from zerojax.checkpoints.loss_monitor import LossMonitor
from zerojax.checkpoints.manifest import Allowed, CheckpointCorrupted, LeafRecord, Manifest
from zerojax.checkpoints.origin import origin_text
from zerojax.checkpoints.preemption import Preemption
from zerojax.checkpoints.raise_on_all_processes import broadcast_from_process_0
from zerojax.checkpoints.remote_copy import RemoteCopy
from zerojax.checkpoints.watchdog import Watchdog
from zerojax.directories import local_directory
from zerojax.processes.agreement import agree, agree_on_directory, run_in_process_0
from zerojax.step.config import ZeroConfig
from zerojax.step.digest import digests
from zerojax.step.replicas import check_replicas, has_copies, verify_replicas
from zerojax.step.state import TrainState, check_not_donated

log = logging.getLogger("zerojax")
_PACKAGES = ("zerojax", "jax", "flax", "optax", "orbax-checkpoint")
_FETCH_TIMEOUT_S = 6 * 3600  # for a step to be fetched from remote storage
_MAX_FAILURES = 2  # consecutive saves
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
        every: the number of steps between two saves.
        keep: the number of newest steps to keep on disk. None: all of them.
        keep_every: steps that are a multiple of this are kept too.
        most_skipped: the number of consecutive updates skipped because a gradient was not finite that ends the run.
        spike: a loss of more than this many times the median of the last 50 is logged. None: none is logged.
        watchdog_s: if `update` is not called for this many seconds of running time, the stacks of all threads are
            written to stderr, and those of all processes to a file in the directory; the exit code is 1. The first
            `update` starts the clock. The time must be longer than a save, an evaluation or a compilation between two
            calls. None: no watchdog.
        verify_replicas_every: the number of steps between two comparisons of what several devices hold, in addition to
            those in `resume` and in each save. None: no others.
        copy_to: a URL of remote storage, such as 's3://bucket/run', to which process 0 copies complete steps in the
            background. While one is copied, others may complete that are not. Old ones are deleted as on disk. A run
            begins with the newest step of either: if it is there, it is copied into the directory first.

    Raises:
        ValueError: if `every`, `keep`, `keep_every` or `most_skipped` is invalid, or another run uses the directory.
    """

    def __init__(
        self,
        config: ZeroConfig,
        directory: str | Path,
        every: int = 1000,
        keep: int | None = 3,
        keep_every: int | None = None,
        most_skipped: int = 10,
        spike: float | None = None,
        watchdog_s: float | None = None,
        verify_replicas_every: int | None = None,
        copy_to: str | RemoteCopy | None = None,
    ):
        counts = {"every": every, "keep": keep, "keep_every": keep_every, "most_skipped": most_skipped}
        counts["verify_replicas_every"] = verify_replicas_every
        for name, count in counts.items():
            if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
                raise ValueError(
                    f"checkpoints: {name} is invalid\n  got:      {count!r}\n  fix:      use an integer, at least 1"
                )
        self.config, self.directory, self.every = config, local_directory(directory, "checkpoints"), every
        self._lock: DirectoryLock | None = None  # in process 0
        self._remote = RemoteCopy(copy_to) if isinstance(copy_to, str) else copy_to
        url = None if self._remote is None else self._remote.url
        agree({**counts, "spike": spike, "watchdog_s": watchdog_s, "copy_to": url})
        with contextlib.ExitStack() as stack:
            run_in_process_0(lambda: self._lock_directory(stack), "checkpoints")
            agree_on_directory(self.directory)
            run_in_process_0(self._fetch_newer, "checkpoints", _FETCH_TIMEOUT_S)
            self._store = store.Store(self.directory, keep, keep_every)
            stack.callback(self._store.close)
            self._exit = stack.pop_all()
        self.origin: Manifest | None = None  # of the step that `resume` restored
        self.origin_text = ""  # a line about the start of the run, after `resume`
        self._num_updates = 0  # including those before the step that the run resumed from
        self._num_failures = 0  # of consecutive saves
        self._saving_step: int | None = None  # of the save in progress
        self._saved_step: int | None = None  # the last step that was saved or restored
        self._save_error: Exception | None = None  # of the last save, if it failed; logged, but not raised yet
        self._loss_monitor = LossMonitor(most_skipped, spike)
        self._watchdog = None if watchdog_s is None else Watchdog(watchdog_s, self.directory)
        self._verify_replicas_every = verify_replicas_every
        self._preemption = Preemption()
        self._exit.callback(self._preemption.close)
        if self._watchdog:
            self._exit.callback(self._watchdog.close)
        _unclosed.add(self)

    def _lock_directory(self, stack: contextlib.ExitStack) -> None:
        self._lock = DirectoryLock(self.directory)
        stack.callback(self._lock.release)
        if self._remote:
            self._remote.start()
            stack.callback(self._remote.close)

    def _fetch_newer(self) -> None:
        """Brings the newest step back from remote storage if this machine has only older ones."""
        if self._remote and (there := self._remote.steps()) and there[-1] > max(self.steps(), default=-1):
            self._remote.fetch(there[-1], self.directory, with_files=True)

    def _copy(self, step: int | None) -> None:
        """Starts to copy a step to remote storage if it is complete."""
        if self._remote and jax.process_index() == 0 and step is not None:
            folder = store.folder(self.directory, step)
            if store.is_complete(folder):
                self._remote.copy(step, folder, self._store.kept)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            self.close()
        except Exception:
            if error is None:
                raise
            log.exception("checkpoint: the last save failed too")  # the exception of the block is the one to raise

    def close(self) -> None:
        """Waits for the save in progress, and releases the directory for other runs.

        Raises:
            Exception: if that save failed.
        """
        _unclosed.discard(self)
        with self._exit:
            self.wait()
            if self._remote and jax.process_index() == 0:
                self._remote.finish()
                self._copy(self._saved_step)  # if another was being copied when it was saved, or its copy failed
            if self._save_error:
                raise RuntimeError(f"checkpoint: the last save failed: {self._save_error}") from self._save_error
            self._loss_monitor.finish()

    def steps(self) -> list[int]:
        """Returns the steps that are complete on disk, oldest first."""
        return store.steps(self.directory)

    def resume(
        self, state: TrainState, data: Any = None, *, fallback: bool = False, optimizer: str = "same"
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
            ValueError: if `state` contains avals and there is no checkpoint.
        """
        steps = broadcast_from_process_0(self.steps())
        if not steps:
            return self._start(state)
        errors: list[str] = []
        avals = contents.avals(state)
        for step in reversed(steps):
            try:
                restored, saved = restoring.restore(self.directory, state, step, data, Allowed(optimizer=optimizer))
            except CheckpointCorrupted as error:
                if not fallback:
                    raise
                log.error("checkpoint: step %d is skipped, an older one is tried: %s", step, error)
                errors.append(str(error))
                state = avals
            else:
                self._saved_step, self.origin = step, saved
                if errors:
                    self._store.set_aside(newer for newer in steps if newer > step)
                return self._begin(restored, step)
        reasons = "\n            ".join(error.splitlines()[0].removeprefix("checkpoint: ") for error in errors)
        raise CheckpointCorrupted(
            f"checkpoint: there is no intact step in {self.directory}\n  got:      {reasons}\n"
            f"  fix:      use another directory to start at step 0"
        )

    def _start(self, state: TrainState) -> tuple[TrainState, int]:
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
        verify_replicas(state, "pass the same values in all processes, or test the memory of these devices")
        self.origin = None
        return self._begin(state, int(state.step))

    def _begin(self, state: TrainState, step: int) -> tuple[TrainState, int]:
        self._num_updates, self._loss_monitor.num_skipped = step, int(state.skipped)
        self.origin_text = origin_text(self.config, self.directory, step, self.origin)
        log.info("checkpoint: %s", self.origin_text)
        return state, step

    def restore(
        self,
        state: TrainState,
        step: int,
        *,
        only: Sequence[str] = (),
        data: Any = None,
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
        return restoring.restore(self.directory, state, step, data, allowed, only)[0]

    def update(self, state: TrainState, metrics: Mapping[str, Any] | None = None, data: Any = None) -> None:
        """Saves the state if it is due or the run is being preempted. To be called after each step.

        Args:
            state: of the step. It may be donated to the next step at once.
            metrics: of the step. Skipped updates and spikes of the loss are reported two steps later.
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
            self._loss_monitor.update(self._num_updates, metrics)
        with self._handling_failures():
            self._store.poll()
            if not self._store.is_saving():
                self._copy(self._saving_step if self._saving_step is not None else self._saved_step)
        if number := self._preemption.requested():
            self._save_and_exit(number, state, data)
        if self._num_updates % self.every == 0:
            self.save(state, data)
        elif self._verify_replicas_every and self._num_updates % self._verify_replicas_every == 0:
            verify_replicas(state, self._advice())

    def exit_if_preempted(self, state: TrainState, data: Any = None) -> None:
        """Saves the state and exits if any process has received SIGTERM or Ctrl-C since the last `update`.

        To be called by all processes where the run has ended but for work without steps, such as a long evaluation.

        Args:
            state, data: as in `update`.

        Raises:
            SystemExit: with `EXIT_CODE` or `INTERRUPT_EXIT_CODE`, see `update`.
        """
        if number := self._preemption.requested(wait=True):
            self._save_and_exit(number, state, data)

    def _save_and_exit(self, number: signal.Signals, state: TrainState, data: Any) -> None:
        self.save(state, data)
        self.wait()
        if self._save_error:
            error = self._save_error
            raise RuntimeError(f"checkpoint: the save after {number.name} failed: {error}") from error
        self._preemption.end(number, self._saved_step)

    def save(self, state: TrainState, data: Any = None) -> None:
        """Starts to save a state in the background. A step that this run has saved is not saved again.

        Args:
            state: to be saved.
            data: see `update`.

        Cost: copies each device's shards to host memory, and reads them once on the devices for the digests.

        Raises:
            ValueError: if a leaf is not an array, or the state of the data iterator is not JSON data.
            ReplicasDiffer: if devices hold different copies of the same values. Nothing is written.
            FloatingPointError: if the state contains a NaN, or a parameter an infinity. Nothing is written.
            RuntimeError: if two consecutive saves failed, or the directory was deleted or replaced.
        """
        check_not_donated(state)
        step = int(state.step)
        self.wait()
        if step == self._saved_step:
            return
        arrays, shapes = contents.arrays(state), contents.logical_shapes(state)
        computed = {} if state.master is None else contents.compute_params(state)
        copies = {path: a for path, a in computed.items() if has_copies(a)}  # not saved, but trained with
        digest_of = digests(arrays | copies, shapes | {path: a.shape for path, a in copies.items()})
        check_replicas(digest_of, f"the state of step {step}, which is not saved,", self._advice())
        if nonfinite := contents.nonfinite_paths({path: digest_of[path] for path in arrays}):
            raise FloatingPointError(
                f"checkpoint: the state of step {step} is not finite, and is not saved\n"
                f"  got:      {contents.shortened(nonfinite)}\n"
                f"  fix:      {self._restart()} with a lower learning rate"
            )
        leaves = {p: LeafRecord(shapes[p], str(a.dtype), digest_of[p].text) for p, a in arrays.items()}
        manifest = Manifest(
            step,
            leaves,
            dict(self.config.mesh.shape),
            self.config.stage,
            self._dtypes(),
            {name: metadata.version(name) for name in _PACKAGES},
            iterators.get_states(data),
        )
        self._saving_step = step
        self._check_lock()
        with self._handling_failures():
            self._store.save(arrays, manifest)

    def _check_lock(self) -> None:
        """Raises an error in all processes if the directory was deleted or replaced since it was locked."""
        is_lost = self._lock is not None and not self._lock.is_held()
        is_taken = self._remote is not None and self._remote.lost_to is not None
        is_lost, is_taken = broadcast_from_process_0([is_lost, is_taken])
        if not is_lost and not is_taken:
            return
        self._saving_step = None
        if is_lost:
            raise RuntimeError(
                f"checkpoint: {self.directory} was deleted or replaced while the run was using it\n"
                f"  got:      another directory with this name, or none; step {self._saved_step} was saved last\n"
                f"  fix:      restart the run; it continues from the newest step that is there"
            )
        assert self._remote is not None
        raise RuntimeError(
            f"checkpoint: another run copies to {self._remote.url}\n"
            f"  got:      the lease expired, and {self._remote.lost_to or 'another run'} took it\n"
            f"  fix:      stop one of the two runs"
        )

    def _restart(self) -> str:
        return "restart" if self._saved_step is None else f"resume from step {self._saved_step}"

    def _advice(self) -> str:
        """What to do if replicas differ."""
        return f"{self._restart()}, without these devices if it happens again"

    def _dtypes(self) -> dict[str, str]:
        names = ("param_dtype", "compute_dtype", "reduce_dtype")
        return {name: jnp.dtype(getattr(self.config.precision, name)).name for name in names}

    def wait(self) -> None:
        """Waits for the save in progress. A failure is reported as in `update`."""
        with self._handling_failures():
            self._store.finish()
            if self._saving_step is not None:
                self._num_failures, self._saved_step = 0, self._saving_step
                self._saving_step, self._save_error = None, None

    @contextlib.contextmanager
    def _handling_failures(self) -> Iterator[None]:
        """Logs the failure of a save. The second consecutive one is raised."""
        try:
            yield
        except Exception as error:
            step, self._saving_step = self._saving_step, None
            self._num_failures += 1
            self._store.abandon_save()
            message = f"checkpoint: the save of step {step} in {self.directory} failed"
            if self._num_failures >= _MAX_FAILURES:
                self._save_error = None
                raise RuntimeError(
                    f"{message}, and so did the previous save\n  got:      {error}\n  fix:      check the disk space"
                    f" and permissions of {self.directory}; the newest step in it is {self._newest()}"
                ) from error
            self._save_error = error
            log.error("%s: %s", message, error)

    def _newest(self) -> int | None:
        return max(self.steps(), default=None)
