"""A disk that loses power: what was not synced is gone. It needs the rights of root, to mount an image."""

import fcntl
import os
import struct
import subprocess

_SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN
_WITHOUT_LOG = 2  # EXT4_GOING_FLAGS_NOLOGFLUSH: neither data nor the journal are written


class Disk:
    """An ext4 file system in a file, at `path`."""

    def __init__(self, folder):
        self.image, self.path = folder / "disk", folder / "mounted"
        with open(self.image, "wb") as file:
            file.truncate(2**28)
        self.path.mkdir()
        subprocess.run(["mkfs.ext4", "-q", self.image], check=True, capture_output=True)

    def mount(self):
        subprocess.run(["mount", "-o", "loop", self.image, self.path], check=True, capture_output=True)

    def unmount(self):
        subprocess.run(["umount", self.path], check=True, capture_output=True)

    def cut_power(self):
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, _SHUTDOWN, struct.pack("I", _WITHOUT_LOG))
        finally:
            os.close(descriptor)
