"""The directory of a run: locked in process 0, and copied to remote storage and back."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import jax

from zerojax.checkpoints import store
from zerojax.checkpoints.lock import DirectoryLock
from zerojax.checkpoints.raise_on_all_processes import broadcast_from_process_0
from zerojax.checkpoints.remote_copy import RemoteCopy
from zerojax.processes.agreement import agree_on_directory, run_in_process_0

_FETCH_TIMEOUT_S = 6 * 3600  # for a step to be fetched from remote storage


class RunDirectory:
    """Locks a directory, and fetches the newest step if remote storage has a newer one.

    Args:
        path: of the directory.
        remote: the remote storage to copy to, or None.
        stack: what it enters there is left when the run ends.

    Raises:
        ValueError: if another run uses the directory, or processes name different ones.
    """

    def __init__(self, path: Path, remote: RemoteCopy | None, stack: ExitStack):
        self.path, self._remote = path, remote
        self._lock: DirectoryLock | None = None  # in process 0
        run_in_process_0(lambda: self._lock_directory(stack), "checkpoints")
        agree_on_directory(path)
        run_in_process_0(self._fetch_newer, "checkpoints", _FETCH_TIMEOUT_S)

    def _lock_directory(self, stack: ExitStack) -> None:
        self._lock = DirectoryLock(self.path)
        stack.callback(self._lock.release)
        if self._remote:
            self._remote.start()
            stack.callback(self._remote.close)

    def _fetch_newer(self) -> None:
        """Brings the newest step back from remote storage if this machine has only older ones."""
        if self._remote and (there := self._remote.steps()) and there[-1] > max(self.steps(), default=-1):
            self._remote.fetch(there[-1], self.path, with_files=True)

    def steps(self) -> list[int]:
        """Returns the steps that are complete on disk, oldest first."""
        return store.steps(self.path)

    def copy(self, step: int | None, steps: store.Store) -> None:
        """Starts to copy a step to remote storage if it is complete."""
        if self._remote and jax.process_index() == 0 and step is not None:
            folder = store.folder(self.path, step)
            if store.is_complete(folder):
                self._remote.copy(step, folder, steps.kept)

    def finish_copy(self) -> None:
        """Waits for the copy in progress."""
        if self._remote and jax.process_index() == 0:
            self._remote.finish()

    def check_held(self, saved_step: int | None) -> None:
        """Raises an error in all processes if the run has lost the directory or the remote storage to another one.

        Args:
            saved_step: the last step that was saved, for the error's text.
        """
        is_lost = self._lock is not None and not self._lock.is_held()
        is_taken = self._remote is not None and self._remote.lost_to is not None
        is_lost, is_taken = broadcast_from_process_0([is_lost, is_taken])
        if is_lost:
            raise RuntimeError(
                f"checkpoint: {self.path} was deleted or replaced while the run was using it\n"
                f"  got:      another directory with this name, or none; step {saved_step} was saved last\n"
                f"  fix:      restart the run; it continues from the newest step that is there"
            )
        if is_taken:
            assert self._remote is not None
            raise RuntimeError(
                f"checkpoint: another run copies to {self._remote.url}\n"
                f"  got:      the lease expired, and {self._remote.lost_to or 'another run'} took it\n"
                f"  fix:      stop one of the two runs"
            )
