"""Disks that lose power: what was not synced is gone."""

import fcntl
import json
import os
import shutil
import stat
import struct
import subprocess
import threading
from pathlib import Path

_SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN
_WITHOUT_LOG = 2  # EXT4_GOING_FLAGS_NOLOGFLUSH: neither data nor the journal are written


class MountedDisk:
    """An ext4 file system in a file, at `path`. It needs the rights of root.

    Attributes:
        options: of `trainee.py`.
    """

    options = ()

    def __init__(self, folder):
        self.image, self.path = folder / "disk", folder / "mounted"
        with open(self.image, "wb") as file:
            file.truncate(2**28)
        self.path.mkdir()
        subprocess.run(["mkfs.ext4", "-q", self.image], check=True, capture_output=True)
        self._mount()

    def _mount(self):
        subprocess.run(["mount", "-o", "loop", self.image, self.path], check=True, capture_output=True)

    def cut_power(self, process):
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, _SHUTDOWN, struct.pack("I", _WITHOUT_LOG))
        finally:
            os.close(descriptor)
        process.kill()

    def restart(self):
        subprocess.run(["umount", self.path], check=True, capture_output=True)
        self._mount()

    def close(self):
        subprocess.run(["umount", "--lazy", self.path], capture_output=True)  # a process that has not ended may use it


class RecordedDisk:
    """A folder at `path` that keeps what its program passed to `os.fsync`. Stricter than any file system: nothing else
    survives, not even what libraries in C++ have synced, while a name is gone as soon as it is deleted or changed."""

    def __init__(self, folder):
        self.path, self._synced = folder / "written", folder / "synced"
        self.path.mkdir()
        self.options = ("--record-syncs", self._synced)

    def cut_power(self, process):
        process.kill()

    def restart(self):
        for path in list(self.path.iterdir()):
            rebuilt = path.with_name("rebuilt")
            self._rebuild(path, path.stat().st_ino, rebuilt)
            shutil.rmtree(path)
            rebuilt.rename(path)

    def _rebuild(self, path, inode, target):
        """Copies what was synced of a folder to `target`."""
        target.mkdir()
        for name, child in json.loads(_read(self._synced / str(inode)) or b"{}").items():
            if (path / name).is_dir():
                self._rebuild(path / name, child, target / name)
            elif (path / name).exists():
                (target / name).write_bytes(_read(self._synced / str(child)))

    def close(self):
        pass


def _read(path):
    return path.read_bytes() if path.exists() else b""


def record_syncs(directory, folder):
    """Keeps in `folder` what a `RecordedDisk` restores: all that is in a directory now, and what is synced from now on.

    There is one file for each inode: the contents of a file, or the names in a folder with their inodes, as JSON.
    """
    fsync = os.fsync

    def record(descriptor):
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            with os.scandir(descriptor) as entries:
                content = json.dumps({entry.name: entry.inode() for entry in entries}).encode()
        else:
            content = Path(f"/proc/self/fd/{descriptor}").read_bytes()  # it may be open for writing only
        new = folder / f"{status.st_ino}.{threading.get_ident()}"
        new.write_bytes(content)
        fsync(descriptor)  # what is written meanwhile may be lost
        new.replace(folder / str(status.st_ino))

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    directory.mkdir(exist_ok=True)
    for root, _, names in os.walk(directory):
        for path in (root, *(Path(root, name) for name in names)):
            descriptor = os.open(path, os.O_RDONLY)
            record(descriptor)
            os.close(descriptor)
    os.fsync = record
