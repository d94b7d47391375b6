"""Writes files that are still there, and whole, after a loss of power.

A file system may keep what it is told for half a minute, and in another order. So contents come first, then the names
that make them visible, and what they replace is deleted last: each is on the disk (`fsync`) before the next begins.
"""

from __future__ import annotations

import errno
import os
import stat
import uuid
from pathlib import Path
from typing import IO, Any

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
    for path, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(Path(path, name))
        sync(Path(path))


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
    new = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    sync(path.parent)
