"""A lease on a folder of remote storage: which run may change it, and until when.

    URL/lease-3.json    {"owner": "process 7 on host-2", "expires": 1764288000.0}

Object storage has no locks, and a run may be suspended at any line and go on much later. So a lease is never deleted to
take it over: the next run creates the object with the next number, which only one run can. Who has an older number has
lost the lease, and everything a run writes has the number of its lease in the name, where no later run writes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import threading
import time
import uuid
from typing import Any

from fsspec import AbstractFileSystem

from zerojax.checkpoints.manifest import plain_text

log = logging.getLogger("zerojax")
EXPIRY_S = 60.0  # of a lease that is not renewed; a restart after a kill waits for so long
_RENEWALS = 4  # before it would expire
_NAME = re.compile(r"lease-(\d+)\.json")


class Lease:
    """The right to change a folder. It is renewed in the background until `release`.

    Args:
        fs: the storage.
        root: path of the folder in it.
        url: of the folder, for messages.

    Attributes:
        number: of the lease, counted from 1; 0 before it is taken.
        lost_to: the run that has taken over, because this one did not renew its lease in time; None if none has.
    """

    def __init__(self, fs: AbstractFileSystem, root: str, url: str):
        self._fs, self._root, self._url = fs, root, url
        self._owner = f"process {os.getpid()} on {socket.gethostname()}, {uuid.uuid4().hex[:8]}"
        self.number, self.lost_to = 0, None
        self._renewal: threading.Thread | None = None
        self._released = threading.Event()

    def take(self, after: int = 0) -> None:
        """Takes the lease. Waits for the end of one whose run was killed.

        Args:
            after: the number is larger than this, also if objects of older leases are gone.

        Raises:
            ValueError: if another run holds the lease, and goes on to renew it.
        """
        deadline = time.time() + 2 * EXPIRY_S
        while not self._try(after):
            owner = self._owner_of(self._newest(), "a lease that cannot be read")
            if time.time() > deadline:
                raise ValueError(
                    f"checkpoints: another run is copying to {self._url}\n  got:      {owner}\n"
                    f"  fix:      use another URL, or stop that run"
                )
            log.warning("checkpoints: waiting for the lease of %s: %s", self._url, owner)
            time.sleep(EXPIRY_S / _RENEWALS)
        self._renewal = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._renewal.start()

    def _try(self, after: int = 0) -> bool:
        newest = self._newest()
        if newest and self._read(newest).get("expires", float("inf")) > time.time():
            return False
        try:
            number = max(newest, after) + 1
            self._fs.pipe_file(self._path(number), self._content(), mode="create")
        except FileExistsError:
            return False
        self.number = number
        for old in self._numbers():
            if old < newest:  # the newest one may still be looked for by the run that has lost it
                self._fs.rm_file(self._path(old))
        return True

    def _numbers(self) -> list[int]:
        try:
            paths = self._fs.ls(self._root, detail=False, refresh=True)
        except FileNotFoundError:
            return []
        matches = (_NAME.fullmatch(path.rpartition("/")[2]) for path in paths)
        return [int(match[1]) for match in matches if match]

    def _newest(self) -> int:
        return max(self._numbers(), default=0)

    def _read(self, number: int) -> dict[str, Any]:
        try:
            content = json.loads(self._fs.cat_file(self._path(number)))
        except (FileNotFoundError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    def _owner_of(self, number: int, default: str) -> str:
        return plain_text(str(self._read(number).get("owner", default)))

    def _content(self, lasts_s: float | None = None) -> bytes:
        lasts_s = EXPIRY_S if lasts_s is None else lasts_s
        return json.dumps({"owner": self._owner, "expires": time.time() + lasts_s}).encode()

    def _renew(self) -> None:
        while not self._released.wait(EXPIRY_S / _RENEWALS):
            try:
                if self.is_lost():
                    return
                self._fs.pipe_file(self._path(self.number), self._content())
            except Exception as error:  # the storage may answer again before the lease expires
                log.warning("checkpoints: the lease of %s cannot be renewed: %s", self._url, error)
        with contextlib.suppress(Exception):  # it expires
            self._fs.pipe_file(self._path(self.number), self._content(lasts_s=0))

    def is_lost(self) -> bool:
        """Whether another run has taken over. Reads the storage."""
        newest = self._newest()
        if newest != self.number:
            self.lost_to = self._owner_of(newest, "another run")
        return newest != self.number

    def release(self, timeout_s: float) -> None:
        """Lets the next run begin at once. If the storage does not answer in time, the lease expires."""
        self._released.set()
        if self._renewal:
            self._renewal.join(timeout_s)

    def _path(self, number: int) -> str:
        return f"{self._root}/lease-{number}.json"
