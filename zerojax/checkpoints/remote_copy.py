"""Copies the steps of a run to remote storage in the background, and brings the newest back on another machine.

    URL/checkpoints/step_100-3/...        the files of a step that the run with lease 3 copied; the mark is written last
    URL/checkpoints/step_100-3/run/...    further files of the run, as of this step

Object storage has neither renames nor appends nor locks. Every object is therefore written whole, a step without its
mark is none, a step loses its mark before it is deleted, and names have the number of the `Lease` in them: a run that
has lost its lease without noticing changes nothing that a later run reads. fsspec reaches the storage, by literal names
only: where it takes patterns, the name of a run such as `lr[0.1]` would be one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from zerojax.checkpoints import store
from zerojax.checkpoints.lease import Lease
from zerojax.checkpoints.manifest import CheckpointCorrupted
from zerojax.checkpoints.pieces import check_intact
from zerojax.utils import files

log = logging.getLogger("zerojax")
_STEPS, _RUN = "checkpoints", "run"
_NAME = re.compile(r"step_(\d+)-(\d+)")
STILL_S = 60.0  # at the end of a run, storage that takes no byte for so long is given up


class RemoteStep(NamedTuple):
    """A folder of a step: the number of the lease under which it was written, and the step."""

    lease: int
    step: int

    @property
    def name(self) -> str:
        return f"step_{self.step}-{self.lease}"


def lineage(found: Iterable[RemoteStep]) -> list[RemoteStep]:
    """The steps of the newest run and of those that it continued, newest first.

    What an earlier run did after the step from which the next one began is none of them.
    """
    chosen: list[RemoteStep] = []
    for each in sorted(found, reverse=True):
        if not chosen or each.step < chosen[-1].step:
            chosen.append(each)
    return chosen


class RemoteCopy:
    """A copy of a run in remote storage, which process 0 writes.

    Args:
        url: of a folder: 's3://bucket/run', 'gs://bucket/run', or any other that fsspec knows.
        files: further files of the run, by their names. They are copied with each step.

    Raises:
        ValueError: if the URL is invalid, or the package for its storage is not installed.
    """

    def __init__(self, url: str, files: Mapping[str, Path] | None = None):
        self.url, self._files = url.rstrip("/"), dict(files or {})
        self._fs, self._root = _open(self.url)
        self.lease = Lease(self._fs, self._root, self.url)
        self._damaged: set[RemoteStep] = set()
        self._thread: threading.Thread | None = None
        self._tried: int | None = None  # the last step whose copy was started
        self._error: Exception | None = None  # of the last copy
        self._moved = time.monotonic()  # when the storage last took bytes

    def start(self) -> None:
        """Takes the lease, and keeps it until `close`.

        Raises:
            ValueError: if another run holds the lease, or the storage cannot be reached.
        """
        with self._reaching():
            self.lease.take(after=max((each.lease for each in self._folders()), default=0))

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        """Raises the errors of the storage in words that name the URL."""
        try:
            yield
        except Exception as error:  # of many packages
            message = " ".join(str(error).split()) or type(error).__name__
            if message.startswith("checkpoints: "):
                raise
            raise ValueError(
                f"checkpoints: {self.url} cannot be reached\n  got:      {message}\n"
                f"  fix:      check the URL, whether its bucket exists, the credentials and the network"
            ) from error

    # What is there ----------------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The steps whose copies are complete, oldest first. Raises ValueError if the storage cannot be reached."""
        with self._reaching():
            return [each.step for each in reversed(self._complete())]

    def _complete(self) -> list[RemoteStep]:
        return lineage(each for each in self._folders() if self._fs.exists(self._mark(each)))

    def _folders(self) -> list[RemoteStep]:
        try:
            paths = self._fs.ls(f"{self._root}/{_STEPS}", detail=False, refresh=True)
        except FileNotFoundError:
            return []
        matches = (_NAME.fullmatch(path.rstrip("/").rpartition("/")[2]) for path in paths)
        return [RemoteStep(int(match[2]), int(match[1])) for match in matches if match]

    def _objects(self, each: RemoteStep) -> list[str]:
        """The names of the objects of a step, relative to its folder."""
        start = f"{self._path(each)}/"
        try:
            found = self._fs.find(self._path(each))
        except FileNotFoundError:
            return []
        return [path.removeprefix(start) for path in found if path.startswith(start)]

    # Copies -----------------------------------------------------------------------------------------------------------

    def copy(self, step: int, folder: Path, kept: Callable[[list[int]], list[int]]) -> None:
        """Starts to copy a step, unless another copy is in progress, or this step was copied or could not be.

        Args:
            step: complete on disk.
            folder: its folder. It may be deleted before the copy is complete.
            kept: returns those of the steps that are kept. The others are deleted.
        """
        if self.is_copying() or step == self._tried or self.lease.lost_to:
            return
        is_first, self._tried = self._tried is None, step
        until_copied = contextlib.ExitStack()
        linked = until_copied.enter_context(files.unfinished(folder.parent)) / folder.name
        shutil.copytree(folder, linked, copy_function=_link)

        def copy() -> None:
            with until_copied:
                self._copy(step, linked, kept, is_first)

        self._thread = threading.Thread(target=copy, name="copy", daemon=True)
        self._moved = time.monotonic()
        self._thread.start()

    def is_copying(self) -> bool:
        """Whether a copy is in progress."""
        return self._thread is not None and self._thread.is_alive()

    def _copy(self, step: int, folder: Path, kept: Callable[[list[int]], list[int]], may_be_there: bool) -> None:
        try:
            if not (may_be_there and self._has(step, folder)):
                check_intact(folder.parent, step, store.read_manifest(folder.parent, step))
                self._put(RemoteStep(self.lease.number, step), folder)
                if self.lease.is_lost():  # after the mark: who takes the lease later sees this step
                    raise RuntimeError(f"the lease expired, and {self.lease.lost_to} took it")
                log.info("checkpoint: step %d is copied to %s", step, self.url)
                self._delete_old(kept)
            self._error = None
        except Exception as error:
            self._error = error
            log.error("checkpoint: step %d cannot be copied to %s: %s", step, self.url, error)

    def _has(self, step: int, folder: Path) -> bool:
        """Whether the same step is there already, from before a restart. Its manifest has the digests of all arrays."""
        manifest = store.manifest_file(folder)
        for each in self._complete():
            if each.step == step and each not in self._damaged:
                with contextlib.suppress(FileNotFoundError):
                    there = self._fs.cat_file(f"{self._path(each)}/{manifest.relative_to(folder).as_posix()}")
                    return there == manifest.read_bytes()
        return False

    def _put(self, each: RemoteStep, folder: Path) -> None:
        """Writes the objects of a step, those of the run, and then the mark."""
        self._delete(each)
        sources = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
        mark = sources.pop(store.COMMIT_FILE)
        sources |= {f"{_RUN}/{name}": path for name, path in self._files.items() if path.exists()}
        callback: Any = _Moves(self)
        for name, path in [*sources.items(), (store.COMMIT_FILE, mark)]:
            self._fs.put_file(str(path), f"{self._path(each)}/{name}", callback=callback)
            self._moved = time.monotonic()
        self._damaged.discard(each)

    def _delete_old(self, kept: Callable[[list[int]], list[int]]) -> None:
        """Deletes what is not kept of this run, and of those before it."""
        steps = self._complete()
        keep = set(kept([each.step for each in reversed(steps)]))
        for each in self._folders():
            if not (each in steps and each.step in keep) and not self.lease.is_lost():
                self._delete(each)

    def _delete(self, each: RemoteStep) -> None:
        """Deletes the objects of a step, its mark first."""
        names = self._objects(each)
        for name in sorted(names, key=lambda name: name != store.COMMIT_FILE):
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(f"{self._path(each)}/{name}")
            self._moved = time.monotonic()
        if isinstance(self._fs, LocalFileSystem):  # object storage has no folders
            shutil.rmtree(self._path(each), ignore_errors=True)

    # Restores ---------------------------------------------------------------------------------------------------------

    def fetch_newer(self, than: int, directory: Path) -> None:
        """Brings back the newest intact step after the step `than`, if there is one, with the files of the run."""
        for step in reversed(self.steps()):
            if step <= than:
                return
            try:
                self.fetch(step, directory, with_files=True)
            except CheckpointCorrupted as error:
                log.error("checkpoint: the copy of step %d in %s is not used: %s", step, self.url, error)
            else:
                return

    def fetch(self, step: int, directory: Path, *, arrays: bool = True, with_files: bool = False) -> None:
        """Copies a step into a directory, where it appears when it is complete. A folder of this step is set aside.

        Args:
            step: one of `steps()`.
            directory: of steps.
            arrays: whether the arrays are copied, and not only what describes them. If so, they are verified.
            with_files: whether the further files of the run are brought back too.

        Raises:
            CheckpointCorrupted: if the copy is damaged. Nothing is changed then.
            ValueError: if it contains an object with a name outside of its folder.
        """
        each = next(found for found in self._complete() if found.step == step)
        final = store.folder(directory, step)
        names = self._objects(each)
        if bad := [name for name in names if not Path(final, name).resolve().is_relative_to(final.resolve())]:
            raise ValueError(
                f"checkpoints: step {step} of {self.url} is no step\n  got:      an object with the name {bad[0]!r}\n"
                f"  fix:      another step; who wrote this one?"
            )
        with files.unfinished(directory) as partial:
            folder = partial / final.name
            for name in names:
                if not name.startswith(f"{_RUN}/") and (arrays or not name.startswith(store.ARRAYS)):
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    self._fs.get_file(f"{self._path(each)}/{name}", str(folder / name))
            if arrays:
                self._damaged.add(each)
                check_intact(partial, step, store.read_manifest(partial, step))
                self._damaged.discard(each)
            if with_files:
                self._get_files(each)
            if final.exists():
                files.rename(final, final.with_name(f"aside_{final.name}_{time.time_ns()}"))
            files.sync_tree(folder)
            files.rename(folder, final)
        log.warning("checkpoint: step %d is fetched from %s", step, self.url)

    def _get_files(self, each: RemoteStep) -> None:
        for name, path in self._files.items():
            with contextlib.suppress(FileNotFoundError):
                content = self._fs.cat_file(f"{self._path(each)}/{_RUN}/{name}")
                path.parent.mkdir(parents=True, exist_ok=True)
                files.write_atomically(path, content)

    # The end ----------------------------------------------------------------------------------------------------------

    def finish(self) -> bool:
        """Waits for the copy in progress, as long as it moves. Returns whether it succeeded; if not, the same step may
        be copied again."""
        while self.is_copying() and time.monotonic() < self._moved + STILL_S:
            assert self._thread is not None
            self._thread.join(min(1.0, STILL_S))
        if self.is_copying():
            self._error = TimeoutError(f"the storage has not answered for {STILL_S:.0f} s")
        if self._error:
            self._tried = None
        return self._error is None

    def close(self) -> None:
        """Waits for the copy in progress, and gives the lease back.

        Raises:
            RuntimeError: if the last copy failed.
        """
        self.finish()
        self.lease.release(STILL_S if self._error is None else 1.0)
        if self._error:
            raise RuntimeError(
                f"checkpoint: the last copy to {self.url} failed\n  got:      {self._error}\n"
                f"  fix:      check the storage; the steps on disk are complete, and the next start copies the newest"
            ) from self._error

    def _path(self, each: RemoteStep) -> str:
        return f"{self._root}/{_STEPS}/{each.name}"

    def _mark(self, each: RemoteStep) -> str:
        return f"{self._path(each)}/{store.COMMIT_FILE}"


class _Moves(fsspec.Callback):
    """Notes that bytes of a file were taken."""

    def __init__(self, remote: RemoteCopy):
        super().__init__()
        self._remote = remote

    def call(self, hook_name: str | None = None, **kwargs: object) -> None:
        self._remote._moved = time.monotonic()


def _link(source: str, target: str) -> None:
    """Makes a link to a file, so that deleting the file does not disturb its copy; or a copy where links cannot be."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy(source, target)


def _open(url: str) -> tuple[AbstractFileSystem, str]:
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
