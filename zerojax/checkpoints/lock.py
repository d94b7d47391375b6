"""Locks a directory, so that only one run at a time writes into it, and notices when the directory is replaced."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
from pathlib import Path

log = logging.getLogger("zerojax")
_FILE = ".lock"
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
        directory.mkdir(parents=True, exist_ok=True)
        self._descriptors: list[int] = []
        try:
            self._is_directory_locked = self._lock(os.open(directory, os.O_RDONLY | os.O_DIRECTORY))
            if not self._lock(os.open(directory / _FILE, os.O_RDWR | os.O_CREAT, 0o666)):
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
