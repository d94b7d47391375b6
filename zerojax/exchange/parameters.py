"""Exports the weights of a checkpoint or of a state as safetensors files, and loads such files into a state.

Weights are the parameters, and the floating arrays of the model state, such as the running statistics of BatchNorm,
which inference needs as well.
"""

from __future__ import annotations

import collections
import functools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from zerojax.checkpoints import contents, store
from zerojax.checkpoints.contents import MODEL_STATE, PARAMS
from zerojax.checkpoints.manifest import matches, plain_text
from zerojax.checkpoints.pieces import LimitedReader
from zerojax.exchange.checks import FLAX, LAYOUT_KEY, PYTORCH, absent, check_fit, check_layout
from zerojax.exchange.families import find_family
from zerojax.exchange.headers import bounded_repr, exchange_error
from zerojax.exchange.names import Source
from zerojax.exchange.shards import read_sharded
from zerojax.exchange.tensors import MAX_FILE_BYTES, Entry, Reader, layout as file_layout, write
from zerojax.exchange.weights import is_weight, known_source, weight_sources
from zerojax.sharding.placement import path_text
from zerojax.step.state import TrainState
from zerojax.utils.typing import PyTree

log = logging.getLogger("zerojax")


def export(
    directory: str | Path,
    step: int,
    folder: str | Path,
    *,
    ema: bool = False,
    dtype: Any = None,
    mapping: Mapping[str, Any] | None = None,
    family: str | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    overwrite: bool = False,
) -> tuple[Path, ...]:
    """Writes the weights of a checkpoint as safetensors files. Needs no device.

    The floating arrays of the model state are written too; by default, under their names in the module (NNX) or with
    the collection in front (Linen: 'batch_stats.norm.mean'). Other model state, such as the keys and counters of
    dropout, is left out, and named in a warning. The metadata of the files state their layout: {"format": "flax"}, or
    "pt" if a mapping or a family turns arrays into another.

    Args:
        directory: of the checkpoints.
        step: one of them.
        folder: for the files.
        ema: writes the average of the parameters that `zerojax.ema` keeps in place of those that are trained.
        dtype: floating parameters are cast to it, for example 'bfloat16'. By default they keep the saved dtype, as
            model state always does.
        mapping: our names ('layers/0/kernel') -> their names, or names and dims, see `names.mapping`. By default '/'
            becomes '.'.
        family: a key of `families.FAMILIES`: the files get the names and the layout of Hugging Face, except for what
            is in the mapping.
        max_file_bytes: the largest size of the arrays in one file.
        overwrite: whether a model that is already in the folder is replaced.

    Returns:
        The files, see `tensors.write`.

    Raises:
        CheckpointCorrupted: if the checkpoint cannot be read.
        ValueError: if there is no such step or no average, if the mapping or the family is invalid or has no name for
            an array, if dims do not fit an array, or as in `tensors.write`.

    Cost: holds one piece of 64 MiB of one array in host memory; of an array that is transposed or reshaped, two copies
    of the whole array, or of one element of a stack. The process that reads holds a piece and its chunks, see
    `pieces.LimitedReader`.
    """
    directory = Path(directory).absolute()
    if step not in store.folders(directory):  # an incomplete step says what it lacks
        store.check_step(directory, step, store.steps(directory))
    saved = store.read_manifest(directory, step)
    leaves = {path: leaf for path, leaf in saved.leaves.items() if is_weight(path, jnp.dtype(leaf.dtype))}
    if left_out := [path for path in saved.leaves if path.startswith(MODEL_STATE) and path not in leaves]:
        log.warning("export: left out, since they are not floating: %s", plain_text(", ".join(left_out)))
    stored_at = contents.ema_paths(saved.leaves) if ema else {}
    found = weight_sources(leaves, mapping, family)
    metadata = _metadata(found, family) | {"step": str(step)}
    entries: list[Entry] = []
    with LimitedReader(directory, step) as reader:
        for path in leaves:
            leaf = saved.leaves[stored_at.get(path, path)]
            read = functools.partial(reader.pieces, stored_at.get(path, path), leaf)
            entries += _entries(known_source(found, path), leaf, _export_dtype(path, leaf, dtype), read)
        return write(folder, entries, max_file_bytes=max_file_bytes, metadata=metadata, overwrite=overwrite)


def export_params(
    params: PyTree,
    folder: str | Path,
    *,
    dtype: Any = None,
    mapping: Mapping[str, Any] | None = None,
    family: str | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    overwrite: bool = False,
) -> tuple[Path, ...]:
    """Writes parameters that are on the devices as safetensors files, without a checkpoint. All processes call it.

    Args:
        params: a `TrainState`, whose parameters are written as a checkpoint has them, in param_dtype (to write an
            average, `zero.with_params(state, state.ema_params)`); or a tree of arrays, sharded in any way, such as
            `adapters.merged` returns.
        folder, dtype, mapping, family, max_file_bytes, overwrite: as in `export`.

    Returns:
        The files, see `tensors.write`; in processes other than 0, which write none, an empty tuple.

    Raises:
        ValueError: as in `export`.

    Cost: holds one array, or one element of a stack, in host memory, and a second copy if it is transposed or reshaped.
        With several processes, each device holds one full array.
    """
    tree = contents.saved_params(params) if isinstance(params, TrainState) else params
    leaves = {PARAMS + path_text(path): a for path, a in jax.tree_util.tree_leaves_with_path(tree)}
    found = weight_sources(leaves, mapping, family)
    entries: list[Entry] = []
    for path, a in leaves.items():
        read = functools.partial(_on_host, a)
        entries += _entries(known_source(found, path), a, _export_dtype(path, a, dtype), read)
    if jax.process_index() == 0:
        options = {"max_file_bytes": max_file_bytes, "metadata": _metadata(found, family)}
        return write(folder, entries, overwrite=overwrite, **options)
    for entry in [entry for part in file_layout(entries, max_file_bytes).values() for entry in part]:
        collections.deque(entry.pieces(), maxlen=0)  # takes part in the gather of the array
    return ()


def _on_host(a: Any, element: int | None) -> Iterator[np.ndarray]:
    part = a if element is None else a[element]
    is_here = not isinstance(part, jax.Array) or part.is_fully_addressable
    yield np.asarray(part if is_here else multihost_utils.process_allgather(part, tiled=True))


def _metadata(found: Mapping[str, Source], family: str | None) -> dict[str, str]:
    turned = any(source.dims for source in found.values())
    return {LAYOUT_KEY: PYTORCH if turned or family else FLAX}


def _export_dtype(path: str, leaf: Any, wanted: Any) -> np.dtype:
    cast = wanted is not None and path.startswith(PARAMS) and jnp.issubdtype(jnp.dtype(leaf.dtype), jnp.floating)
    return np.dtype(jnp.dtype(wanted if cast else leaf.dtype))


def _entries(source: Source, leaf: Any, dtype: np.dtype, read: Any) -> Iterator[Entry]:
    """The arrays that one of ours becomes in the files. `read` yields its pieces, or those of an element of a stack."""
    shape = leaf.shape[1:] if source.is_stack else leaf.shape
    theirs = shape if source.dims is None else source.dims.their_shape(shape)
    parts = source.parts(leaf.shape)
    if theirs is None or (source.is_stack and (not leaf.shape or len(parts) != leaf.shape[0])):
        what = f"the mapping does not fit the array that becomes {bounded_repr(source.names[0])}"
        raise exchange_error(what, f"shape {leaf.shape}, {len(parts)} names", "change the dims or the names")

    def converted(element: int | None) -> Iterator[np.ndarray]:
        parts = (piece.astype(dtype, copy=False) for piece in read(element=element))
        if source.dims is None:
            yield from parts
        else:
            whole, done = np.empty(0, dtype), 0
            for part in parts:
                if not done:  # the first piece was read, so the array is on disk
                    whole = np.empty(math.prod(shape), dtype)
                whole[done : done + part.size] = part.reshape(-1)
                done += part.size
            yield source.dims.to_theirs(whole.reshape(shape))

    for i, name in enumerate(parts):
        yield Entry(name, theirs, dtype, functools.partial(converted, i if source.is_stack else None))


def load(
    state: TrainState,
    path: str | Path | Reader,
    *,
    mapping: Mapping[str, Any] | None = None,
    family: str | None = None,
    layout: str | None = None,
    missing: Sequence[str] = (),
    extra: Sequence[str] = (),
    cast: bool = False,
) -> TrainState:
    """Returns the state with its weights replaced by those of safetensors files. All other leaves stay.

    Weights are the parameters and the floating arrays of the model state. Files of `export`, and those that Flax models
    of transformers write, state that they are stored as Flax stores them. Of other files, the layout has to be given:
    nothing in a file says whether a square matrix is the transpose of ours.

    Args:
        state: of `init`. It is donated.
        path: a file or a folder; or a `tensors.Reader` of one, such as `Reader(folder, follow_links=True)` for a folder
            in the cache of Hugging Face.
        mapping: our names -> the names in the files, or names and dims, see `names.mapping`. By default '/' becomes
            '.'. Entries without dims say nothing about the layout.
        family: a key of `families.FAMILIES`, for files in the PyTorch layout of Hugging Face: names and dims of all
            arrays that are not in the mapping.
        layout: 'flax' if arrays without dims are stored as Flax stores them, whatever the files state.
        missing: globs of leaves ('params/head/*', 'model_state/*') that the files may lack. The state keeps its own.
        extra: globs of arrays in the files that nothing takes. They are not read.
        cast: whether dtypes may differ.

    Raises:
        ValueError: if an option is invalid, the mapping has no name for an array, the layout of an array with several
            dims is not known, the files state that they have the layout of Flax and a family is given, or as in
            `tensors.Reader`.
        CheckpointMismatch: if a weight is missing or has another shape or dtype in the files, or the files have an
            array that nothing takes; with a line for each.

    Cost: each process reads the shards of its own devices, and holds one of them at a time in host memory, see
    `shards.read_sharded`.
    """
    if layout not in (None, FLAX):
        raise exchange_error("there is no such layout", bounded_repr(layout), "layout='flax', or a family or a mapping")
    if family is not None:
        extra = (*extra, *find_family(family).unused)
    reader = path if isinstance(path, Reader) else Reader(path)
    stored, shapes = contents.arrays(contents.avals(state)), contents.logical_shapes(state)
    avals = {p: jax.ShapeDtypeStruct(shapes[p], a.dtype) for p, a in stored.items() if is_weight(p, a.dtype)}
    found = weight_sources(avals, mapping, family, reader.names)
    wanted = {p: known_source(found, p) for p in avals if p in found or not matches(p, missing)}
    check_fit(reader, avals, wanted, missing, extra, cast)
    present = {p: source for p, source in wanted.items() if absent(reader, source, avals[p]) is None}
    check_layout(reader, avals, present, layout, family)
    contents.free(state, present)
    read = {p: read_sharded(reader, source, shapes[p], stored[p]) for p, source in present.items()}
    return contents.with_arrays(state, read)
