"""Writes files that are still there, and whole, after a loss of power.

A file system may keep what it is told for half a minute, and in another order. So contents come first, then the names
that make them visible, and what they replace is deleted last: each is on the disk (`fsync`) before the next begins.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

_SYNC_THREADS = 16
_UNFINISHED = ".unfinished-"
_CANNOT_SYNC = errno.EINVAL, errno.ENOTSUP, errno.ENOSYS  # of folders on some network file systems


def sync(path: Path) -> None:
    """Waits until a file, or the list of names in a folder, is on the disk; where a file system can do that."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Waits until all files and folders in a folder are on the disk."""
    found = list(os.walk(folder, topdown=False))
    with ThreadPoolExecutor(_SYNC_THREADS) as pool:  # a disk takes many requests at a time
        list(pool.map(sync, (Path(path, name) for path, _, names in found for name in names)))
    for path, _, _ in found:
        sync(Path(path))


def make_folder(path: Path) -> None:
    """Makes a folder and those that contain it, if they do not exist; their names are on the disk then."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def open_regular(path: Path, mode: str = "rb") -> IO[Any]:
    """Opens a file that others may have made. Unlike `open`, it follows no link, and does not wait for a pipe.

    Raises:
        OSError: if the path is no regular file.
    """

    def opener(name: str, flags: int) -> int:
        descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "it is no regular file", name)
        return descriptor

    return open(path, mode, opener=opener)


def irregular(folder: Path) -> list[Path]:
    """What is in a folder, at any depth, and is neither a regular file nor a folder: links, pipes, devices."""
    paths = (Path(root, name) for root, folders, names in os.walk(folder) for name in (*folders, *names))
    return [path for path in paths if not stat.S_ISREG(mode := path.lstat().st_mode) and not stat.S_ISDIR(mode)]


def rename(source: Path, target: Path) -> None:
    """Renames a file or folder on the same file system, and waits until its new name is on the disk."""
    source.rename(target)
    sync(target.parent)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes a file completely or not at all. A link in its place is replaced; what it leads to is not touched."""
    with unfinished(path.parent) as folder:
        new = folder / path.name
        new.write_bytes(content.encode() if isinstance(content, str) else content)
        sync(new)
        new.replace(path)
    sync(path.parent)


@contextlib.contextmanager
def unfinished(folder: Path) -> Iterator[Path]:
    """Makes a folder in a folder, for what is moved out of it when it is whole. At the end it is deleted."""
    make_folder(folder)
    delete_unfinished(folder)
    with tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=folder) as made, contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a file system without locks
            stack.enter_context(_locked(Path(made)))
        yield Path(made)


def delete_unfinished(folder: Path) -> None:
    """Deletes the `unfinished` folders of processes that were killed: a living one holds a lock on its own."""
    for left in folder.glob(f"{_UNFINISHED}*"):
        with contextlib.suppress(OSError), _locked(left):
            shutil.rmtree(left)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Locks a folder. Raises OSError if another process holds the lock, or the file system has none."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
