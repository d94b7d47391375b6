"""Exports the parameters of a checkpoint as safetensors files, and loads the parameters of such files into a state."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.checkpoints import contents, store
from zerojax.checkpoints.contents import PARAMS
from zerojax.checkpoints.manifest import LeafRecord, mismatch_error
from zerojax.checkpoints.pieces import pieces
from zerojax.exchange.headers import bounded_repr, exchange_error
from zerojax.exchange.names import map_name
from zerojax.exchange.tensors import MAX_FILE_BYTES, Entry, Reader, write
from zerojax.step.state import TrainState
from zerojax.typing import Aval


def export(
    directory: str | Path,
    step: int,
    folder: str | Path,
    *,
    dtype: Any = None,
    mapping: Mapping[str, str] | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    overwrite: bool = False,
) -> tuple[Path, ...]:
    """Writes the parameters of a checkpoint as safetensors files. Needs no device.

    Args:
        directory: of the checkpoints.
        step: one of them.
        folder: for the files.
        dtype: floating parameters are cast to it, for example 'bfloat16'. By default they keep the saved dtype.
        mapping: our names ('layers/0/kernel') -> their names, see `names.mapping`. By default '/' becomes '.'.
        max_file_bytes: the largest size of the arrays in one file.
        overwrite: whether a model that is already in the folder is replaced.

    Returns:
        The files, see `tensors.write`.

    Raises:
        CheckpointCorrupted: if the checkpoint cannot be read.
        ValueError: if the mapping has no name for a parameter, or as in `tensors.write`.

    Cost: holds one piece of 64 MiB of one parameter in host memory.
    """
    directory = Path(directory).absolute()
    saved = store.read_manifest(directory, step)
    params = {path: leaf for path, leaf in saved.leaves.items() if path.startswith(PARAMS)}
    entries = []
    for path, leaf in params.items():
        export_dtype = _export_dtype(leaf, dtype)
        read_pieces = functools.partial(_cast_pieces, directory, step, path, leaf, export_dtype)
        entries.append(Entry(_their_name(path, mapping), leaf.shape, export_dtype, read_pieces))
    metadata = {"format": "pt", "step": str(step)}
    return write(folder, entries, max_file_bytes=max_file_bytes, metadata=metadata, overwrite=overwrite)


def _their_name(path: str, mapping: Mapping[str, str] | None) -> str:
    ours = path.removeprefix(PARAMS)
    theirs = ours.replace("/", ".") if mapping is None else map_name(mapping, ours)
    if theirs is None:
        what = "the mapping has no name for a parameter"
        raise exchange_error(what, bounded_repr(ours), "add the name or a pattern that matches it")
    return theirs


def _export_dtype(leaf: LeafRecord, wanted: Any) -> np.dtype:
    floating = jnp.issubdtype(jnp.dtype(leaf.dtype), jnp.floating)
    return np.dtype(jnp.dtype(wanted if wanted is not None and floating else leaf.dtype))


def _cast_pieces(directory: Path, step: int, path: str, leaf: LeafRecord, dtype: np.dtype) -> Iterator[np.ndarray]:
    return (piece.astype(dtype, copy=False) for piece in pieces(directory, step, path, leaf))


def load(
    state: TrainState, path: str | Path, *, mapping: Mapping[str, str] | None = None, cast: bool = False
) -> TrainState:
    """Returns the state with its parameters replaced by those of safetensors files. All other leaves stay.

    Args:
        state: of `init`. It is donated.
        path: a file or a folder, see `tensors.Reader`.
        mapping: our names -> the names in the files. By default '/' becomes '.'.
        cast: whether dtypes may differ.

    Raises:
        ValueError: if the mapping has no name for a parameter, or as in `tensors.Reader`.
        CheckpointMismatch: if a parameter is missing, or has another shape or dtype in the files; with a line for each.

    Cost: each process reads the shards of its own devices, and holds one of them at a time in host memory.
    """
    reader = Reader(path)
    avals = {p: a for p, a in contents.arrays(contents.avals(state)).items() if p.startswith(PARAMS)}
    theirs = {p: _their_name(p, mapping) for p in avals}
    lines = [line for p, a in avals.items() if (line := _difference(reader, theirs[p], p, a, cast))]
    if lines:
        raise mismatch_error(str(path), lines)
    contents.free(state, avals)
    loaded = {p: _sharded(reader, theirs[p], a) for p, a in avals.items()}
    return contents.with_arrays(state, loaded)


def _difference(reader: Reader, name: str, path: str, a: Aval, cast: bool) -> str | None:
    """The line of the error for a parameter that does not fit the files."""
    if name not in reader.names:
        return f"missing:  {path}: the files have no {name}"
    if reader.shape(name) != tuple(a.shape):
        return f"shape:    {path}: {name} has {reader.shape(name)}, the state has {tuple(a.shape)}"
    if jnp.dtype(reader.dtype(name)) != a.dtype and not cast:
        return f"dtype:    {path}: {name} is {reader.dtype(name)}, the state has {a.dtype} (cast=True allows it)"
    return None


def _sharded(reader: Reader, name: str, a: Aval) -> jax.Array:
    """Reads an array of the files onto the devices, with the dtype and sharding of the aval."""

    def read_shard(index: Any) -> np.ndarray:
        return reader.read(name, index).astype(a.dtype, copy=False)

    return jax.make_array_from_callback(a.shape, a.sharding, read_shard)
