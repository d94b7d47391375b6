"""Steps in a directory: each written as a whole or not at all, by Orbax, and read shard by shard.

    DIRECTORY/step_100/arrays/      Orbax: every process writes the shards of its own devices
    DIRECTORY/step_100/manifest/    what the arrays are (`manifest`)
    DIRECTORY/deleted/              old steps, which are renamed before any of their files is deleted

A step is written under another name, renamed when all of it is there, and marked last; one without the mark is not
counted.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import re
import shutil
import socket
import textwrap
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from zerojax.checkpoints.manifest import FALLBACK, CheckpointCorrupted, Leaf, Manifest, from_json, to_json
from zerojax.checkpoints.raise_on_all_processes import of_process_0

Array = Any
log = logging.getLogger("zerojax")
_PREFIX, _ARRAYS, _MANIFEST = "step", "arrays", "manifest"
_MARK = "commit_success.txt"  # Orbax writes it last
_DELETED = "deleted"
_CHUNK_BYTES, _LEAST_CHUNK_BYTES = 2**24, 2**16  # guesses: some MiB are read at the rate of the disk
_CONCURRENT_GB = 1  # of the arrays that are on their way through host memory when a state is read


class Store:
    """Writes steps into a directory, in the background, and deletes old ones.

    Args:
        directory: is made if it is not there.
        keep: the newest steps that stay; None: all of them.
        keep_every: steps that this divides stay too.
    """

    def __init__(self, directory: Path, keep: int | None = None, keep_every: int | None = None):
        self.directory, self.keep, self.keep_every = directory, keep, keep_every
        directory.mkdir(parents=True, exist_ok=True)
        self._deletion: threading.Thread | None = None  # that began since the last `finish`
        self._delete_renamed()
        self._manager: ocp.CheckpointManager | None = self._open()

    def _open(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self.keep,
            keep_period=self.keep_every,
            step_prefix=_PREFIX,
            todelete_subdir=_DELETED,
            cleanup_tmp_directories=True,
            save_root_metadata=False,
        )
        return ocp.CheckpointManager(self.directory, options=options, item_names=(_ARRAYS, _MANIFEST))

    def save(self, arrays: Mapping[str, Array], manifest: Manifest) -> None:
        """Begins to write a step. When it returns, the arrays were copied to the host, and may be donated.

        Raises:
            Exception: what went wrong with this save, or with the one before that was still under way.
        """
        if any(of_process_0([folder(self.directory, manifest.step).exists()])):
            self.set_aside([manifest.step])
        self._manager = self._manager or self._open()
        how = {path: _chunks(a) for path, a in arrays.items()}
        items = {
            _ARRAYS: ocp.args.PyTreeSave(dict(arrays), save_args=how),
            _MANIFEST: ocp.args.JsonSave(to_json(manifest)),
        }
        self._manager.save(manifest.step, args=ocp.args.Composite(**items), force=True)

    def set_aside(self, steps: Iterable[int]) -> None:
        """Renames steps that the run does not go on from, so that they can be saved again. Nothing is deleted."""
        if jax.process_index() == 0:
            for step in steps:
                path = folder(self.directory, step)
                aside = path.with_name(f"aside_{path.name}_{time.time_ns()}")
                log.warning("checkpoint: %s is set aside as %s", path, aside.name)
                path.rename(aside)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("zerojax: steps are set aside")
        self.close()
        self._manager = None  # it has a list of the steps

    def check(self) -> None:
        """Raises what went wrong with a save in the background. When one has ended, old steps begin to be deleted."""
        if self._manager:
            self._manager.check_for_errors()
            if self._deletion is None and not self._manager.is_saving_in_progress():
                self._deletion = threading.Thread(target=self._delete_renamed)
                self._deletion.start()

    def finish(self) -> None:
        """Waits for the save and the deletion that are under way. Raises what went wrong with the save."""
        if self._manager:
            self._manager.wait_until_finished()
        self._finish_deletion()

    def _finish_deletion(self) -> None:
        if self._deletion:
            self._deletion.join()
            self._deletion = None
        self._delete_renamed()

    def _delete_renamed(self) -> None:
        """The old steps. Orbax renames them in process 0, when the save of a new one has ended."""
        if jax.process_index() == 0:
            for path in folders(self.directory / _DELETED).values():
                try:
                    shutil.rmtree(path)
                except OSError as error:
                    log.warning("checkpoint: %s cannot be deleted: %s", path, error)

    def give_up(self) -> None:
        """After a save that failed. The next one begins anew, and deletes what is left of it."""
        self._manager = None

    def close(self) -> None:
        """Waits for everything that is under way."""
        if self._manager:
            self._manager.close()
        self._finish_deletion()


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """One run at a time. The lock goes with the process, however that ends.

    Raises:
        ValueError: another run has it.
    """
    if jax.process_index() != 0:
        yield
        return
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise ValueError(
                f"checkpoints: another run uses {directory}\n  got:      {file.read().strip() or 'a lock'}\n"
                f"  fix:      another directory, or end that run"
            ) from error
        except OSError as error:  # a file system without locks
            log.warning("checkpoints: %s cannot be locked (%s): nothing keeps a second run away", directory, error)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def _chunks(a: Array) -> ocp.SaveArgs:
    """How a shard is divided on disk, where a chunk is the least that can be read.

    A stack has a chunk for each layer: who reads it from the first element to the last (`pieces`) would hold all of it,
    if its chunks went through all layers.
    """
    shard = a.sharding.shard_shape(a.shape)
    is_stack = len(shard) > 2 and math.prod(shard[1:]) * a.dtype.itemsize >= _LEAST_CHUNK_BYTES
    return ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES, shard_axes=(0,) if is_stack else ())


def folder(directory: Path, step: int) -> Path:
    """Of a step."""
    return directory / f"{_PREFIX}_{step}"


def arrays_folder(directory: Path, step: int) -> Path:
    """Where Orbax has the arrays of a step."""
    return folder(directory, step) / _ARRAYS


def folders(directory: Path) -> dict[int, Path]:
    """Those that are called like steps, oldest first."""
    named = {re.fullmatch(rf"{_PREFIX}_(\d+)", path.name): path for path in directory.glob(f"{_PREFIX}_*")}
    return dict(sorted((int(match.group(1)), path) for match, path in named.items() if match and path.is_dir()))


def steps(directory: Path) -> list[int]:
    """Those that were written as a whole, oldest first. What is called like one and is not marked so is logged."""
    found = []
    for step, path in folders(directory).items():
        if is_whole(path):
            found.append(step)
        else:
            log.warning("checkpoint: %s is ignored: without %s its save did not end", path, _MARK)
    return found


def is_whole(step_folder: Path) -> bool:
    """Whether the save of that step ended."""
    return (step_folder / _MARK).is_file()


def _manifest_file(step_folder: Path) -> Path:
    return step_folder / _MANIFEST / "metadata"


def read_manifest(directory: Path, step: int) -> Manifest:
    """Of a step.

    Raises:
        CheckpointCorrupted: it is damaged, or of another step.
        CheckpointMismatch: it is of a newer version.
    """
    path = folder(directory, step)
    try:
        told = json.loads(_manifest_file(path).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointCorrupted(
            f"checkpoint: the manifest of {path} cannot be read\n  got:      {error}\n  {FALLBACK}"
        ) from error
    manifest = from_json(told, str(path))
    if manifest.step != step:
        raise CheckpointCorrupted(f"checkpoint: {path} holds step {manifest.step}\n  fix:      its old name")
    return manifest


def read_arrays(directory: Path, step: int, leaves: Mapping[str, Leaf], shardings: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays of a step, in their saved dtypes. Each device reads its own shard.

    Args:
        directory, step: where.
        leaves: what to read, by path.
        shardings: for each of them.

    Raises:
        CheckpointCorrupted: a file is missing, cut off, or cannot be decoded.
    """
    dtypes = {path: jnp.dtype(leaf.dtype) for path, leaf in leaves.items()}
    avals = {p: jax.ShapeDtypeStruct(leaf.shape, dtypes[p], sharding=shardings[p]) for p, leaf in leaves.items()}
    how = {
        path: ocp.ArrayRestoreArgs(sharding=shardings[path], global_shape=leaf.shape, dtype=dtypes[path])
        for path, leaf in leaves.items()
    }
    handler = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=_CONCURRENT_GB)
    where: Any = arrays_folder(directory, step)  # Orbax's handlers are typed for etils' paths
    try:  # not by ocp.Checkpointer, in which a process that can read would wait for one that cannot
        return handler.restore(where, args=ocp.args.PyTreeRestore(avals, restore_args=how, partial_restore=True))
    except Exception as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            raise
        told = textwrap.shorten(str(error), 300, placeholder=" ...")
        raise CheckpointCorrupted(
            f"checkpoint: arrays of {where.parent} cannot be read\n  got:      {told}\n  {FALLBACK}"
        ) from error
    finally:
        handler.close()
