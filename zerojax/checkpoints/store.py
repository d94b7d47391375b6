"""Writes steps into a directory with Orbax, each completely or not at all, and reads them shard by shard.

    DIRECTORY/step_100/arrays/      written by Orbax: every process writes the shards of its own devices
    DIRECTORY/step_100/manifest/    describes the arrays, see `manifest`
    DIRECTORY/.unfinished-*/        old steps, which are moved there before any of their files is deleted

A step is written under a temporary name and renamed when it is complete. A commit file is written last; a step without
it is ignored. A step that is called complete survives a loss of power: all its files and names are on the disk before
that, and old steps are deleted after.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import shutil
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from jax.experimental import multihost_utils
from orbax.checkpoint import future
from orbax.checkpoint._src.metadata import array_metadata_store

from zerojax.checkpoints.manifest import (
    FALLBACK_FIX,
    CheckpointCorrupted,
    LeafRecord,
    Manifest,
    from_json,
    read_json,
    to_json,
)
from zerojax.offload.disk import DiskArray
from zerojax.processes.agreement import broadcast_from_process_0
from zerojax.utils import files
from zerojax.utils.text import bytes_text
from zerojax.utils.typing import Array, Aval, Shape

log = logging.getLogger("zerojax")
_PREFIX, ARRAYS, _MANIFEST = "step", "arrays", "manifest"
_TEMPORARY = ".orbax-checkpoint-tmp"  # the end of the name of a folder to which Orbax still writes
COMMIT_FILE = "commit_success.txt"  # Orbax writes it last
# Heuristics: a few MiB are enough to read at the bandwidth of the disk.
_CHUNK_BYTES, _MIN_CHUNK_BYTES = 2**24, 2**16
_CONCURRENT_GB = 1  # of arrays that a restore holds in host memory at a time


class _LogicalArrays(ocp.PyTreeCheckpointHandler):
    """Orbax's handler of trees, which writes arrays as they are stored, and then cuts off their zeros.

    Attributes:
        cropped: the logical shapes of the arrays that are stored with zeros, by path.
    """

    cropped: Mapping[str, Shape] = {}

    def finalize(self, directory: Any) -> None:
        """Called by process 0 when all processes have written, before the step is complete."""
        super().finalize(directory)
        for path, shape in self.cropped.items():
            array = tensorstore.open(array_spec(Path(directory), path), open=True, read=True, write=True).result()
            array.resize(exclusive_max=shape).result()


class _Arrays(ocp.type_handlers.ArrayHandler):
    """Orbax's handler of arrays. Of those on a local disk, the next one is read when one has been written."""

    def __init__(self) -> None:
        super().__init__(array_metadata_store=array_metadata_store.Store())

    async def serialize(self, values: Any, infos: Any, args: Any = None) -> Any:
        write, given = super().serialize, list(zip(values, infos, args or [ocp.SaveArgs()] * len(values), strict=True))
        on_disk = [each for each in given if isinstance(each[0], DiskArray)]
        in_memory = [each for each in given if not isinstance(each[0], DiskArray)]
        written = list(await write(*map(list, zip(*in_memory, strict=True)))) if in_memory else []
        if not on_disk:
            return written

        async def one_by_one() -> None:
            for each in written:  # each call adds to a file about all arrays
                each.result()
            for value, info, arg in on_disk:
                for each in await write([value.load()], [info], [arg]):
                    each.result()

        return [*written, future.CommitFutureAwaitingContractedSignals(one_by_one(), name="arrays on a disk")]


class _StepFolder(ocp.path.atomicity.AtomicRenameTemporaryPath):
    """The folder of a step while it is written.

    Attributes:
        delete_old: called when the step is complete, and has survived a loss of power from then on.
    """

    delete_old: Callable[[], None]

    async def finalize(self) -> None:
        """Called by process 0 when all processes have written: marks the folder as complete and renames it."""
        await asyncio.to_thread(files.sync_tree, Path(self.get()))
        await super().finalize()
        final = Path(self.get_final())
        for path in (final / COMMIT_FILE, final, final.parent):
            await asyncio.to_thread(files.sync, path)
        await asyncio.to_thread(self.delete_old)


class Store:
    """Writes steps into a directory in the background, and deletes old ones.

    Args:
        directory: created if it does not exist.
        keep: the number of newest steps to keep. None: all of them.
        keep_every: steps that are a multiple of this are kept too.
    """

    def __init__(self, directory: Path, keep: int | None = None, keep_every: int | None = None):
        self.directory, self.keep, self.keep_every = directory, keep, keep_every
        files.make_folder(directory)
        self._open()

    def _open(self) -> None:
        self._delete_incomplete()
        arrays = _Arrays()
        registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays), (DiskArray, arrays))
        self._handler = _LogicalArrays(type_handler_registry=registry)
        handlers = ocp.handlers.DefaultCheckpointHandlerRegistry()
        handlers.add(ARRAYS, ocp.args.PyTreeSave, self._handler)
        handlers.add(_MANIFEST, ocp.args.JsonSave, ocp.JsonCheckpointHandler())
        self._checkpointer = ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(handler_registry=handlers),
            temporary_path_class=type("StepFolder", (_StepFolder,), {"delete_old": staticmethod(self._delete_old)}),
        )

    def check(self, arrays: Mapping[str, Array], manifest: Manifest) -> None:
        """Raises ValueError if a step with these arrays cannot be written."""
        for path, a in arrays.items():
            try:
                tensorstore.dtype(a.dtype.name)
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"checkpoint: {path!r} cannot be saved\n  got:      {a.dtype}, which tensorstore does not write\n"
                    f"  fix:      keep it in another dtype, such as int4 or uint8"
                ) from error
        to_json(manifest)

    def check_room(self, num_bytes: int) -> None:
        """Logs a warning if the disk has no room for a step of this size."""
        free = shutil.disk_usage(self.directory).free
        if jax.process_index() == 0 and free < num_bytes:
            needed, there = bytes_text(num_bytes), bytes_text(free)
            log.warning("checkpoint: a step takes %s, and %s has %s free", needed, self.directory, there)

    def save(self, arrays: Mapping[str, Array], manifest: Manifest) -> None:
        """Starts to write a step. On return the arrays have been copied to the host, and may be donated. If some are on
        a local disk, the step is complete.

        Raises:
            Exception: the error of this save, or of the previous one if it was still in progress.
        """
        if any(broadcast_from_process_0([folder(self.directory, manifest.step).exists()])):
            self.set_aside([manifest.step])
        arrays = {path: a for path, a in arrays.items() if a.size}  # of the others, the manifest says all
        save_args = {path: _save_args(a) for path, a in arrays.items()}
        shapes = {path: manifest.leaves[path].shape for path in arrays}
        self._handler.cropped = {path: shapes[path] for path, a in arrays.items() if shapes[path] != tuple(a.shape)}
        items = {
            ARRAYS: ocp.args.PyTreeSave(dict(arrays), save_args=save_args),
            _MANIFEST: ocp.args.JsonSave(to_json(manifest)),
        }
        self._checkpointer.save(folder(self.directory, manifest.step), args=ocp.args.Composite(**items))
        if any(isinstance(a, DiskArray) for a in arrays.values()):
            self.finish()

    def set_aside(self, steps: Iterable[int]) -> None:
        """Renames steps that the run does not continue from, so that they can be saved again. Deletes nothing."""
        if jax.process_index() == 0:
            for step in steps:
                path = folder(self.directory, step)
                renamed = path.with_name(f"aside_{path.name}_{time.time_ns()}")
                log.warning("checkpoint: %s is set aside as %s", path, renamed.name)
                files.rename(path, renamed)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("zerojax: steps are set aside")

    def kept(self, steps: Sequence[int]) -> list[int]:
        """Those of the steps that are not deleted."""
        newest = list(steps) if self.keep is None else sorted(steps)[-self.keep :]
        return [step for step in steps if step in newest or (self.keep_every and step % self.keep_every == 0)]

    def poll(self) -> None:
        """Raises the error of a save that failed in the background."""
        self._checkpointer.check_for_errors()

    def finish(self) -> None:
        """Waits for the save in progress. Raises its error if it failed."""
        self._checkpointer.wait_until_finished()

    def abandon_save(self) -> None:
        """Forgets a save that failed, and deletes its files. Orbax might raise another error of it at the next one."""
        self._open()

    def close(self) -> None:
        """Waits for the save in progress, and ends the threads that write."""
        self._checkpointer.close()

    def _delete_old(self) -> None:
        """Deletes the steps that are not kept. Each is renamed before any of its files is deleted."""
        complete = [step for step, path in folders(self.directory).items() if is_complete(path)]
        try:
            with files.unfinished(self.directory) as deleted:
                for step in set(complete) - set(self.kept(complete)):
                    path = folder(self.directory, step)
                    files.rename(path, deleted / path.name)
                files.sync(self.directory)
        except OSError as error:
            log.warning("checkpoint: old steps in %s cannot be deleted: %s", self.directory, error)

    def _delete_incomplete(self) -> None:
        """Deletes what a run that was killed has left of a save."""
        if jax.process_index() == 0:
            files.delete_unfinished(self.directory)
            for path in self.directory.glob(f"{_PREFIX}_*{_TEMPORARY}"):
                shutil.rmtree(path, ignore_errors=True)


def _save_args(a: Array) -> ocp.SaveArgs:
    """How Orbax divides a shard into chunks, the smallest units that can be read.

    A stack of layers has at least one chunk per layer. With chunks that span all layers, a reader that goes through the
    array in C order (`pieces`) would hold all of it.
    """
    shard = a.sharding.shard_shape(a.shape)
    is_stack = len(shard) > 2 and math.prod(shard[1:]) * a.dtype.itemsize >= _MIN_CHUNK_BYTES
    return ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES, shard_axes=(0,) if is_stack else ())


def array_spec(folder: Path, path: str) -> dict[str, object]:
    """The tensorstore spec of an array. Orbax writes zarr arrays into one OCDBT key-value store."""
    return {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": folder.as_uri() + "/", "path": f"{path}/"}}


def folder(directory: Path, step: int) -> Path:
    """The folder of a step."""
    return directory / f"{_PREFIX}_{step}"


def arrays_folder(directory: Path, step: int) -> Path:
    """The folder in which Orbax stores the arrays of a step."""
    return folder(directory, step) / ARRAYS


def folders(directory: Path) -> dict[int, Path]:
    """Returns the folders with the name of a step, oldest first, complete or not."""
    found = {path: step_of(path.name) for path in directory.glob(f"{_PREFIX}_*") if path.is_dir()}
    return dict(sorted((step, path) for path, step in found.items() if step is not None))


def step_of(name: str) -> int | None:
    """The step whose folder has this name; None if it is not such a name."""
    match = re.fullmatch(rf"{_PREFIX}_(\d+)", name)
    return int(match.group(1)) if match else None


def steps(directory: Path) -> list[int]:
    """Returns the steps that are complete, oldest first. Incomplete ones are logged."""
    found = []
    for step, path in folders(directory).items():
        if is_complete(path):
            found.append(step)
        else:
            log.warning("checkpoint: %s is ignored: its save did not complete (no %s)", path, COMMIT_FILE)
    return found


def check_step(directory: Path, step: int, found: Sequence[int]) -> None:
    """Raises ValueError if a step is not among those of a directory that were found."""
    if step not in found:
        raise ValueError(
            f"checkpoint: there is no step {step} in {directory}\n"
            f"  got:      steps {', '.join(map(str, found)) or 'none'}\n  fix:      choose one of these"
        )


def is_complete(step_folder: Path) -> bool:
    """Whether the save of the step completed."""
    return (step_folder / COMMIT_FILE).is_file()


def manifest_file(step_folder: Path) -> Path:
    """The file of a step that describes its arrays."""
    return step_folder / _MANIFEST / "metadata"


def read_manifest(directory: Path, step: int) -> Manifest:
    """Reads the manifest of a step.

    Raises:
        CheckpointCorrupted: if it is damaged, or belongs to another step.
        CheckpointMismatch: if a newer version of zerojax wrote it.
    """
    path = folder(directory, step)
    try:
        content = read_json(manifest_file(path))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointCorrupted(
            f"checkpoint: the manifest of {path} cannot be read\n  got:      {error}\n  {FALLBACK_FIX}"
        ) from error
    manifest = from_json(content, str(path))
    if manifest.step != step:
        raise CheckpointCorrupted(
            f"checkpoint: {path} contains step {manifest.step}\n"
            f"  fix:      rename it to {folder(directory, manifest.step).name}"
        )
    return manifest


def read_arrays(
    directory: Path, step: int, leaves: Mapping[str, LeafRecord], stored: Mapping[str, Aval]
) -> dict[str, Array]:
    """Reads arrays of a step in their saved dtypes. Each device reads its own shard.

    Args:
        directory, step: the checkpoint.
        leaves: the arrays to read, by path.
        stored: the sharding of each of them, and its shape with the zeros that are appended, by path.

    Raises:
        CheckpointCorrupted: if a file is missing, truncated, or cannot be decoded.
    """
    dtypes = {path: jnp.dtype(leaf.dtype) for path, leaf in leaves.items()}
    empty = {p: jax.device_put(np.zeros(a.shape, dtypes[p]), a.sharding) for p, a in stored.items() if 0 in a.shape}
    stored = {path: a for path, a in stored.items() if path not in empty}
    avals = {p: jax.ShapeDtypeStruct(a.shape, dtypes[p], sharding=a.sharding) for p, a in stored.items()}
    restore_args = {
        path: ocp.ArrayRestoreArgs(
            sharding=a.sharding, global_shape=a.shape, dtype=dtypes[path], strict=leaves[path].shape == tuple(a.shape)
        )
        for path, a in stored.items()
    }
    handler = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=_CONCURRENT_GB)
    path: Any = arrays_folder(directory, step)  # Orbax's handlers are typed for etils' paths
    try:  # not with ocp.Checkpointer, in which a process that can read would wait for one that cannot
        args = ocp.args.PyTreeRestore(avals, restore_args=restore_args, partial_restore=True)
        return handler.restore(path, args=args) | empty
    except Exception as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            raise
        message = textwrap.shorten(str(error), 300, placeholder=" ...")
        raise CheckpointCorrupted(
            f"checkpoint: the arrays of {path.parent} cannot be read\n  got:      {message}\n  {FALLBACK_FIX}"
        ) from error
    finally:
        handler.close()
