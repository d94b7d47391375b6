"""Parameters of a checkpoint as safetensors files, and those of such files in a state."""

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
from zerojax.checkpoints.manifest import Leaf, misfit
from zerojax.checkpoints.pieces import pieces
from zerojax.exchange.headers import refuse, shown
from zerojax.exchange.names import map_name
from zerojax.exchange.tensors import MAX_FILE_BYTES, Entry, Reader, write
from zerojax.step.state import TrainState


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
    """Writes the parameters of a step as safetensors files. No device is needed.

    Args:
        directory: of checkpoints.
        step: one of them.
        folder: for the files.
        dtype: that floating parameters are cast to, such as 'bfloat16'. By default as they were saved.
        mapping: our names ('layers/0/kernel') -> others' names, see `names.mapping`. By default '/' becomes '.'.
        max_file_bytes: of one file.
        overwrite: whether to replace a model that is in the folder.

    Returns:
        The files, as `tensors.write` does.

    Raises:
        CheckpointCorrupted: what is on disk cannot be read.
        ValueError: a parameter that the mapping has no name for, or what `tensors.write` refuses.

    Cost: holds one piece of 64 MiB of one parameter.
    """
    directory = Path(directory).absolute()
    saved = store.read_manifest(directory, step)
    named = {path: leaf for path, leaf in saved.leaves.items() if path.startswith(PARAMS)}
    entries = []
    for path, leaf in named.items():
        to = _dtype(leaf, dtype)
        parts = functools.partial(_cast, directory, step, path, leaf, to)
        entries.append(Entry(_name(path, mapping), leaf.shape, to, parts))
    told = {"format": "pt", "step": str(step)}
    return write(folder, entries, max_file_bytes=max_file_bytes, metadata=told, overwrite=overwrite)


def _name(path: str, mapping: Mapping[str, str] | None) -> str:
    ours = path.removeprefix(PARAMS)
    theirs = ours.replace("/", ".") if mapping is None else map_name(mapping, ours)
    if theirs is None:
        raise refuse("the mapping has no name for a parameter", shown(ours), "a line or a pattern for it")
    return theirs


def _dtype(leaf: Leaf, wanted: Any) -> np.dtype:
    floating = jnp.issubdtype(jnp.dtype(leaf.dtype), jnp.floating)
    return np.dtype(jnp.dtype(wanted if wanted is not None and floating else leaf.dtype))


def _cast(directory: Path, step: int, path: str, leaf: Leaf, dtype: np.dtype) -> Iterator[np.ndarray]:
    return (piece.astype(dtype, copy=False) for piece in pieces(directory, step, path, leaf))


def load(
    state: TrainState, path: str | Path, *, mapping: Mapping[str, str] | None = None, cast: bool = False
) -> TrainState:
    """A state with the parameters of safetensors files; all else stays as it is.

    Args:
        state: of `init`, which is donated.
        path: a file or a folder, see `tensors.Reader`.
        mapping: our names -> the names in the files. By default '/' is '.'.
        cast: dtypes may differ.

    Raises:
        ValueError: files that `tensors.Reader` refuses, or a parameter that the mapping has no name for.
        CheckpointMismatch: a parameter that is not in the files, or has another shape or dtype there; with a line each.

    Cost: each process reads the shards of its own devices, and holds one of them beside.
    """
    reader = Reader(path)
    avals = {p: a for p, a in contents.arrays(contents.avals(state)).items() if p.startswith(PARAMS)}
    theirs = {p: _name(p, mapping) for p in avals}
    lines = [line for p, a in avals.items() if (line := _difference(reader, theirs[p], p, a, cast))]
    if lines:
        raise misfit(str(path), lines)
    contents.free(state, avals)
    read = {p: _placed(reader, theirs[p], a) for p, a in avals.items()}
    return contents.with_arrays(state, read)


def _difference(reader: Reader, name: str, path: str, a: Any, cast: bool) -> str | None:
    if name not in reader.names:
        return f"missing:  {path}: there is no {name}"
    if reader.shape(name) != tuple(a.shape):
        return f"shape:    {path}: {name} has {reader.shape(name)}, the state has {tuple(a.shape)}"
    if jnp.dtype(reader.dtype(name)) != a.dtype and not cast:
        return f"dtype:    {path}: {name} is {reader.dtype(name)}, the state has {a.dtype} (cast=True allows it)"
    return None


def _placed(reader: Reader, name: str, a: Any) -> jax.Array:
    def shard(index: Any) -> np.ndarray:
        return reader.read(name, index).astype(a.dtype, copy=False)

    return jax.make_array_from_callback(a.shape, a.sharding, shard)
