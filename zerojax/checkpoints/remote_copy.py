"""Copies the steps of a run to remote storage in the background, and brings the newest back on another machine.

    URL/checkpoints/step_100/...    the files of a complete step, as they are on disk; the mark is written last
    URL/metrics.jsonl, ...          further files of the run, as of the newest step
    URL/lease.json                  the run that may write here, and until when

Object storage has neither renames nor appends nor locks. Every object is therefore written whole, a step without its
mark is none, a step loses its mark before it is deleted, and the lease is an object that is created only if there is
none. fsspec reaches the storage.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from zerojax.checkpoints import store

log = logging.getLogger("zerojax")
_STEPS, _LEASE = "checkpoints", "lease.json"
EXPIRY_S = 60.0  # of a lease that is not renewed; a restart after a kill waits for so long
_RENEWALS = 4  # before it would expire


class RemoteCopy:
    """A copy of a run in remote storage, which process 0 writes.

    Args:
        url: of a folder: 's3://bucket/run', 'gs://bucket/run', or any other that fsspec knows.
        files: further files of the run, by their names in the folder. They are copied with each step.

    Raises:
        ValueError: if the URL is invalid, or the package for its storage is not installed.
    """

    def __init__(self, url: str, files: Mapping[str, Path] | None = None):
        self.url, self._files = url.rstrip("/"), dict(files or {})
        self._fs, self._root = _open(self.url)
        self._owner = f"process {os.getpid()} on {socket.gethostname()}, {uuid.uuid4().hex[:8]}"
        self._thread: threading.Thread | None = None
        self._tried: int | None = None  # the last step whose copy was started
        self._error: Exception | None = None  # of the last copy
        self._lost: str | None = None  # who took the lease
        self._renewal: threading.Thread | None = None
        self._released = threading.Event()

    def start(self) -> None:
        """Takes the lease, and keeps it until `close`. Waits for the end of one whose run was killed.

        Raises:
            ValueError: if another run holds the lease, and goes on to renew it; or if the storage cannot be reached.
        """
        deadline = time.time() + 2 * EXPIRY_S
        while not self._take_lease():
            owner = self._lease().get("owner", "a lease that cannot be read")
            if time.time() > deadline:
                raise ValueError(
                    f"checkpoints: another run is copying to {self.url}\n  got:      {owner}\n"
                    f"  fix:      use another URL, or stop that run; if there is none, delete {self.url}/{_LEASE}"
                )
            log.warning("checkpoints: waiting for the lease of %s: %s", self.url, owner)
            time.sleep(EXPIRY_S / _RENEWALS)
        self._renewal = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._renewal.start()

    def _take_lease(self) -> bool:
        with self._reaching():
            if self._lease().get("expires", float("inf")) < time.time():
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm_file(self._path(_LEASE))
            try:
                self._fs.pipe_file(self._path(_LEASE), self._lease_content(), mode="create")
            except FileExistsError:
                return False
        time.sleep(min(1.0, EXPIRY_S / _RENEWALS))  # for another run that saw the same expired lease, and deletes ours
        return self._lease().get("owner") == self._owner

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        """Raises the errors of the storage in words that name the URL."""
        try:
            yield
        except Exception as error:  # of many packages
            message = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(
                f"checkpoints: {self.url} cannot be reached\n  got:      {message}\n"
                f"  fix:      check the URL, whether its bucket exists, the credentials and the network"
            ) from error

    def _lease(self) -> dict[str, Any]:
        try:
            return json.loads(self._fs.cat_file(self._path(_LEASE)))
        except (FileNotFoundError, ValueError):
            return {}

    def _lease_content(self) -> bytes:
        return json.dumps({"owner": self._owner, "expires": time.time() + EXPIRY_S}).encode()

    def _renew(self) -> None:
        while not self._released.wait(EXPIRY_S / _RENEWALS):
            try:
                if (owner := self._lease().get("owner")) != self._owner:
                    self._lost = owner or "nobody"
                    return
                self._fs.pipe_file(self._path(_LEASE), self._lease_content())
            except Exception as error:  # the storage may answer again before the lease expires
                log.warning("checkpoints: the lease of %s cannot be renewed: %s", self.url, error)

    @property
    def lost_to(self) -> str | None:
        """The run that has taken the lease, because this one did not renew it in time; None if none has."""
        return self._lost

    def steps(self) -> list[int]:
        """The steps whose copies are complete, oldest first. Raises ValueError if the storage cannot be reached."""
        with self._reaching():
            return [step for step, is_complete in self._folders().items() if is_complete]

    def _folders(self) -> dict[int, bool]:
        """Whether each step that has a folder is complete."""
        try:
            paths = self._fs.ls(self._path(_STEPS), detail=False, refresh=True)
        except FileNotFoundError:
            return {}
        steps = [store.step_of(path.rstrip("/").rpartition("/")[2]) for path in paths]
        return {step: self._fs.exists(self._mark(step)) for step in sorted(step for step in steps if step is not None)}

    def copy(self, step: int, folder: Path, kept: Callable[[list[int]], list[int]]) -> None:
        """Starts to copy a step, unless another copy is in progress, or this step was copied or could not be.

        Args:
            step: complete on disk.
            folder: its folder. It may be deleted before the copy is complete.
            kept: returns those of the steps that are kept. The others are deleted.
        """
        if self.is_copying() or step == self._tried or self._lost:
            return
        if self._tried is None and self._has(step, folder):
            self._tried = step
            return
        self._tried = step
        linked = folder.with_name(f"copied_{folder.name}")
        shutil.rmtree(linked, ignore_errors=True)
        shutil.copytree(folder, linked, copy_function=_link)
        self._thread = threading.Thread(target=self._copy, args=(step, linked, kept), name="copy")
        self._thread.start()

    def _has(self, step: int, folder: Path) -> bool:
        """Whether the same step is there already, from before a restart. Its manifest has the digests of all arrays."""
        manifest = store.manifest_file(folder)
        try:
            there = self._fs.cat_file(f"{self._step(step)}/{manifest.relative_to(folder).as_posix()}")
            return self._fs.exists(self._mark(step)) and there == manifest.read_bytes()
        except OSError:
            return False

    def is_copying(self) -> bool:
        """Whether a copy is in progress."""
        return self._thread is not None and self._thread.is_alive()

    def _copy(self, step: int, folder: Path, kept: Callable[[list[int]], list[int]]) -> None:
        try:
            self._put(step, folder)
            complete = self.steps()
            keep = kept([other for other in complete if other <= step])  # later ones are of a run that went back
            for other in [other for other in self._folders() if other not in keep]:
                self._delete(other)
            self._error = None
        except Exception as error:
            self._error = error
            log.error("checkpoint: step %d cannot be copied to %s: %s", step, self.url, error)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _put(self, step: int, folder: Path) -> None:
        """Writes the objects of a step, those of the run, and then the mark."""
        self._delete(step)
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.name != store.COMMIT_FILE:
                self._fs.put_file(str(path), f"{self._step(step)}/{path.relative_to(folder).as_posix()}")
        self._put_files()
        self._fs.put_file(str(folder / store.COMMIT_FILE), self._mark(step))

    def _put_files(self) -> None:
        for name, path in self._files.items():
            if path.exists():
                self._fs.pipe_file(self._path(name), path.read_bytes())

    def _delete(self, step: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._mark(step))
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._step(step), recursive=True)

    def fetch(self, step: int, directory: Path, *, arrays: bool = True, with_files: bool = False) -> None:
        """Copies a step into a directory, where it appears when it is complete.

        Args:
            step: one of `steps()`.
            directory: of steps.
            arrays: whether the arrays are copied, and not only what describes them.
            with_files: whether the further files of the run are brought back too.
        """
        partial = directory / f"fetched_{uuid.uuid4().hex[:8]}"
        names = [path[len(self._step(step)) + 1 :] for path in self._fs.find(self._step(step))]
        if bad := [name for name in names if not Path(partial, name).resolve().is_relative_to(partial.resolve())]:
            raise ValueError(
                f"checkpoints: step {step} of {self.url} is no step\n  got:      an object with the name {bad[0]!r}\n"
                f"  fix:      another step; who wrote this one?"
            )
        try:
            for name in names:
                if arrays or not name.startswith(store.ARRAYS):
                    (partial / name).parent.mkdir(parents=True, exist_ok=True)
                    self._fs.get_file(f"{self._step(step)}/{name}", str(partial / name))
            if with_files:
                self._get_files()
            folder = store.folder(directory, step)
            if folder.exists():
                folder.rename(folder.with_name(f"aside_{folder.name}_{time.time_ns()}"))
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        log.warning("checkpoint: step %d is fetched from %s", step, self.url)

    def _get_files(self) -> None:
        for name, path in self._files.items():
            with contextlib.suppress(FileNotFoundError):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(self._fs.cat_file(self._path(name)))

    def finish(self) -> bool:
        """Waits for the copy in progress. Returns whether it succeeded; if not, the same step may be copied again."""
        if self._thread:
            self._thread.join()
        if self._error:
            self._tried = None
        return self._error is None

    def close(self) -> None:
        """Waits for the copy in progress, and gives the lease back.

        Raises:
            RuntimeError: if the last copy failed.
        """
        self.finish()
        self._released.set()
        if self._renewal:
            self._renewal.join()
            if self._lost is None:
                with contextlib.suppress(Exception):  # it expires
                    self._fs.rm_file(self._path(_LEASE))
        if self._error:
            raise RuntimeError(
                f"checkpoint: the last copy to {self.url} failed\n  got:      {self._error}\n"
                f"  fix:      check the storage; the steps on disk are complete, and the next start copies the newest"
            ) from self._error

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _step(self, step: int) -> str:
        return self._path(f"{_STEPS}/{store.folder(Path(), step).name}")

    def _mark(self, step: int) -> str:
        return f"{self._step(step)}/{store.COMMIT_FILE}"


def _link(source: str, target: str) -> None:
    """Makes a link to a file, so that deleting the file does not disturb its copy; or a copy where links cannot be."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy(source, target)


def _open(url: str) -> tuple[Any, str]:
    """The file system of a URL, without caches of what it contains, and the path in it."""
    if "://" not in url:
        raise ValueError(
            f"checkpoints: copy_to is not a URL\n  got:      {url!r}\n"
            f"  fix:      one such as s3://bucket/run; file:///folder for a directory"
        )
    try:
        fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
    except (ImportError, ValueError) as error:
        extras = {"s3": "pip install 'zerojax[s3]'", "gs": "pip install 'zerojax[gcs]'"}
        fix = extras.get(url.partition("://")[0], "a scheme that fsspec knows, with the package that it needs")
        raise ValueError(f"checkpoints: {url} cannot be opened\n  got:      {error}\n  fix:      {fix}") from error
    if isinstance(fs, LocalFileSystem):
        fs.auto_mkdir = True  # object storage has no folders to make
    return fs, root.rstrip("/")
