"""Arrays of a step in pieces of a bounded size, read without devices; and what can be told from them alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore

from zerojax.checkpoints import store
from zerojax.checkpoints.digest import HostDigest
from zerojax.checkpoints.manifest import CheckpointCorrupted, Leaf, Manifest

PIECE_BYTES = 2**26


def pieces(directory: Path, step: int, path: str, leaf: Leaf, max_bytes: int = PIECE_BYTES) -> Iterator[np.ndarray]:
    """The parts of an array, one after the other in C order.

    Args:
        directory, step: where.
        path, leaf: which array, as the manifest has it.
        max_bytes: of a piece, but for one element.

    Raises:
        CheckpointCorrupted: what is on disk cannot be read, or is another array.
    """
    where = store.folder(directory, step)
    try:
        array = tensorstore.open(_spec(store.arrays_folder(directory, step), path), open=True, read=True).result()
        found = tuple(array.shape), array.dtype.name
        if found != (leaf.shape, leaf.dtype):
            raise ValueError(f"{found} is on disk")
        for index in _blocks(leaf.shape, max(1, max_bytes // array.dtype.numpy_dtype.itemsize)):
            yield array[index].read().result()
    except ValueError as error:
        told = " ".join(str(error).split())[:300]
        raise CheckpointCorrupted(f"checkpoint: {path} of {where} cannot be read\n  got:      {told}") from error


def _spec(folder: Path, path: str) -> dict[str, Any]:
    """As Orbax writes them: every array is a zarr array, all of them in one key-value store."""
    return {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": folder.as_uri() + "/", "path": f"{path}/"}}


def _blocks(shape: tuple[int, ...], most: int) -> Iterator[tuple[slice | int, ...]]:
    """Indices of consecutive blocks of at most so many elements."""
    if not shape or 0 in shape:
        yield ()
        return
    inner = math.prod(shape[1:])
    if inner <= most:
        rows = most // inner
        yield from ((slice(i, min(i + rows, shape[0])),) for i in range(0, shape[0], rows))
        return
    for i in range(shape[0]):
        yield from ((i, *block) for block in _blocks(shape[1:], most))


def damaged(directory: Path, step: int, manifest: Manifest) -> Iterator[tuple[str, str | None]]:
    """Each array of a step, and what is wrong with it; None if it is what was saved.

    Cost: reads all of the step once; holds one piece.
    """
    for path, leaf in manifest.leaves.items():
        found = HostDigest()
        try:
            for piece in pieces(directory, step, path, leaf):
                found.add(piece)
        except CheckpointCorrupted as error:
            yield path, str(error).splitlines()[-1].removeprefix("  got:").strip()
        else:
            yield path, None if found.text == leaf.digest else f"digest {found.text}, {leaf.digest} was saved"
