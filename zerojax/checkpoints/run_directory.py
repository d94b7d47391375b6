"""The directory of a run: its path, its lock in process 0, and its copy in remote storage."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import socket
from contextlib import ExitStack
from pathlib import Path

import jax

from zerojax.checkpoints import store
from zerojax.checkpoints.manifest import CheckpointCorrupted
from zerojax.checkpoints.remote_copy import RemoteCopy
from zerojax.processes.agreement import agree_on_directory, broadcast_from_process_0, run_in_process_0
from zerojax.utils.files import make_folder

log = logging.getLogger("zerojax")
_FILE = ".lock"
_FETCH_TIMEOUT_S = 6 * 3600  # for a step to be fetched from remote storage
_PATTERN = re.compile(r"[\[\]*?\\]")  # Orbax looks for files with glob patterns that contain the directory
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")  # `Path` makes gs:/bucket of gs://bucket


def local_directory(directory: str | Path, who: str) -> Path:
    """Returns the absolute path of a directory, which need not exist.

    Args:
        directory: on a file system.
        who: what needs it, for errors.

    Raises:
        ValueError: if it is a URL, which as a path would be a local folder with the name of the scheme; if it is
            relative, and the working directory was deleted; or if its absolute path contains a character that has a
            meaning in patterns, since what is saved there could not be read, or would be read from another directory
            that matches.
    """
    if match := _URL.match(str(directory)):
        raise ValueError(
            f"{who}: {match[1]}:// is not supported as a directory\n"
            f"  got:      {str(directory)!r}\n"
            f"  fix:      a directory on a file system; checkpoints(copy_to={str(directory)!r}) copies its steps there"
        )
    try:
        path = Path(directory).absolute()
    except FileNotFoundError as error:
        raise ValueError(
            f"{who}: the working directory was deleted\n  got:      the relative path {str(directory)!r}\n"
            f"  fix:      an absolute path, or another working directory"
        ) from error
    if match := _PATTERN.search(str(path)):
        raise ValueError(
            f"{who}: a directory must not have {match[0]!r} in its path\n"
            f"  got:      {str(path)!r}\n"
            f"  fix:      another name, without any of [ ] * ? \\"
        )
    return path


_held: set[int] = set()  # file descriptors


def _close_in_child() -> None:
    """A forked worker would keep the lock of a run that was killed, since it has the same open files."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


class DirectoryLock:
    """A lock on a directory. It ends with the process, however the process ends.

    Both the directory itself and a file in it are locked: the file also where directories cannot be locked, such as on
    NFS, and the directory in case that somebody deletes the file.

    Args:
        directory: created if it does not exist.

    Raises:
        ValueError: if another run holds the lock.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        make_folder(directory)
        self._descriptors: list[int] = []
        try:
            self._is_directory_locked = self._lock(os.open(directory, os.O_RDONLY | os.O_DIRECTORY))
            if not self._lock(os.open(directory / _FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)):
                log.warning("checkpoints: %s cannot be locked; make sure that only one run uses it", directory)
        except BaseException:
            self.release()
            raise
        file = self._descriptors[-1]
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)

    def _lock(self, descriptor: int) -> bool:
        """Returns whether the file system has locks."""
        self._descriptors.append(descriptor)
        _held.add(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"checkpoints: another run is using {self.directory}\n  got:      {self._owner()}\n"
                f"  fix:      use another directory, or stop that run"
            ) from error
        except OSError:
            return False
        return True

    def _owner(self) -> str:
        try:
            return (self.directory / _FILE).read_text().strip() or "a lock"
        except OSError:
            return "a lock"

    def is_held(self) -> bool:
        """Whether the directory is still the one that was locked, and not another one with the same name."""
        directory, file = self._descriptors
        try:
            return os.path.samestat(os.fstat(directory), os.stat(self.directory)) and (
                self._is_directory_locked or os.path.samestat(os.fstat(file), os.stat(self.directory / _FILE))
            )
        except OSError:
            return False

    def release(self) -> None:
        """Releases the lock. The file remains."""
        for descriptor in self._descriptors:
            if descriptor in _held:  # not in a forked process, which has closed it
                _held.remove(descriptor)
                os.close(descriptor)
        self._descriptors = []


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
        if self._remote:
            self._remote.fetch_newer(max(self.steps(), default=-1), self.path)

    def fetch_again(self, step: int) -> bool:
        """Replaces a damaged step by its copy in remote storage. Returns whether there was an intact one."""
        fetched: list[int] = []

        def fetch() -> None:
            try:
                if self._remote is not None and step in self._remote.steps():
                    self._remote.fetch(step, self.path)
                    fetched.append(step)
            except (ValueError, CheckpointCorrupted) as error:
                log.error("checkpoint: the copy of step %d is not used either: %s", step, error)

        run_in_process_0(fetch, "checkpoints", _FETCH_TIMEOUT_S)
        return step in broadcast_from_process_0(fetched)

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
        is_taken = self._remote is not None and self._remote.lease.lost_to is not None
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
                f"  got:      the lease expired, and {self._remote.lease.lost_to or 'another run'} took it\n"
                f"  fix:      stop one of the two runs"
            )
