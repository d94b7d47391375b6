"""Reads and verifies saved arrays on the host in pieces of bounded size, without devices."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tensorstore

from zerojax.checkpoints import store
from zerojax.checkpoints.manifest import CheckpointCorrupted, LeafRecord, Manifest
from zerojax.step.digest import HostDigest
from zerojax.typing import Shape

PIECE_BYTES = 2**26


def pieces(
    directory: Path,
    step: int,
    path: str,
    leaf: LeafRecord,
    max_bytes: int = PIECE_BYTES,
    *,
    element: int | None = None,
) -> Iterator[np.ndarray]:
    """Yields the consecutive parts of an array, or of one element along its dim 0, in C order.

    Args:
        directory, step: the checkpoint.
        path, leaf: the array, as recorded in the manifest.
        max_bytes: the largest size of a piece, unless one element is larger.
        element: the index in dim 0 of what is read; by default, everything.

    Raises:
        CheckpointCorrupted: if the array cannot be read, or has another shape or dtype on disk.
    """
    where = store.folder(directory, step)
    try:
        array = tensorstore.open(
            store.array_spec(store.arrays_folder(directory, step), path), open=True, read=True
        ).result()
        found = tuple(array.shape), array.dtype.name
        if found != (leaf.shape, leaf.dtype):
            raise ValueError(f"shape {found[0]} and dtype {found[1]} on disk, {leaf.shape} and {leaf.dtype} were saved")
        shape = leaf.shape
        if element is not None:
            array, shape = array[element], shape[1:]
        for index in _blocks(shape, max(1, max_bytes // array.dtype.numpy_dtype.itemsize)):
            yield array[index].read().result()
    except ValueError as error:
        message = " ".join(str(error).split())[:300]
        raise CheckpointCorrupted(f"checkpoint: {path} of {where} cannot be read\n  got:      {message}") from error


def _blocks(shape: Shape, max_elements: int) -> Iterator[tuple[slice | int, ...]]:
    """Yields the indices of consecutive blocks of at most `max_elements` elements."""
    if not shape or 0 in shape:
        yield ()
        return
    inner = math.prod(shape[1:])
    if inner <= max_elements:
        rows = max_elements // inner
        yield from ((slice(i, min(i + rows, shape[0])),) for i in range(0, shape[0], rows))
        return
    for i in range(shape[0]):
        yield from ((i, *block) for block in _blocks(shape[1:], max_elements))


def verify_arrays(directory: Path, step: int, manifest: Manifest) -> Iterator[tuple[str, str | None]]:
    """Reads every array of a step, and compares its digest with the manifest.

    Yields:
        (path, what is wrong with the array, or None if it is intact).

    Cost: reads the whole step once, and holds one piece in host memory.
    """
    for path, leaf in manifest.leaves.items():
        digest = HostDigest()
        try:
            for piece in pieces(directory, step, path, leaf):
                digest.add(piece)
        except CheckpointCorrupted as error:
            yield path, str(error).splitlines()[-1].removeprefix("  got:").strip()
        else:
            intact = digest.text == leaf.digest
            yield path, None if intact else f"digest {digest.text} on disk, {leaf.digest} was saved"
