"""Exports the weights of a checkpoint or of a state as safetensors files, and loads such files into a state.

Weights are the parameters, and the floating arrays of the model state, such as the running statistics of BatchNorm,
which inference needs as well.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.typing import DTypeLike

from zerojax.checkpoints import contents, store
from zerojax.checkpoints.contents import MODEL_STATE, PARAMS
from zerojax.checkpoints.manifest import CheckpointMismatch, LeafRecord, Mismatch, matches, mismatch_error, plain_text
from zerojax.checkpoints.pieces import LimitedReader, check_intact
from zerojax.exchange.names import NameMapping, Source, find_family, is_weight, known_source, weight_sources
from zerojax.exchange.tensors import MAX_FILE_BYTES, Entry, Reader, bounded_repr, exchange_error, write
from zerojax.sharding import padding
from zerojax.sharding.placement import path_text
from zerojax.step.state import TrainState
from zerojax.utils.typing import ArrayLike, Aval, PyTree, Shape

# The key and the values by which transformers states the layout of files too.
LAYOUT_KEY, FLAX, PYTORCH = "format", "flax", "pt"
log = logging.getLogger("zerojax")


# Export


def export(
    directory: str | Path,
    step: int,
    folder: str | Path,
    *,
    ema: bool = False,
    dtype: DTypeLike | None = None,
    mapping: NameMapping | None = None,
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
        directory, step: of the checkpoint.
        folder: for the files.
        ema: writes the average that `zerojax.ema` keeps in place of the parameters that are trained.
        dtype: floating parameters are cast to it, for example 'bfloat16'; by default they keep theirs.
        mapping: our names ('layers/0/kernel') -> their names, or names and dims, see `names.mapping`. By default '/'
            becomes '.'.
        family: a key of `names.FAMILIES`: what is not in the mapping gets the names and the layout of Hugging Face.
        max_file_bytes: the largest size of the arrays in one file.
        overwrite: whether a model that is already in the folder is replaced.

    Returns:
        The files. If there are several, the index is the last.

    Raises:
        CheckpointCorrupted: if the checkpoint cannot be read, or an array differs from what was saved.
        ValueError: if there is no such step or no average, an option is invalid, an array has no name or no dims that
            fit, or the format does not support a name or a dtype.

    Cost: reads what is exported twice, first to verify it. Holds the arrays of one file in host memory, and a second
        copy of one of them, or of all of them up to safetensors 0.7. The process that reads holds a piece of 64 MiB and
        its chunks, see `pieces.LimitedReader`.
    """
    # Read what was saved, and how it is written.
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
    # Verify it, and write it, array by array.
    check_intact(directory, step, saved, [stored_at.get(path, path) for path in leaves])
    entries: list[Entry] = []
    with LimitedReader(directory, step) as reader:
        for path in leaves:
            leaf = saved.leaves[stored_at.get(path, path)]
            written = _export_dtype(path, leaf.dtype, dtype)
            read = functools.partial(_read_saved, reader, stored_at.get(path, path), leaf, written)
            entries += _entries(known_source(found, path), leaf.shape, written, read)
        return write(folder, entries, max_file_bytes=max_file_bytes, metadata=metadata, overwrite=overwrite)


def export_params(
    params: PyTree,
    folder: str | Path,
    *,
    dtype: DTypeLike | None = None,
    mapping: NameMapping | None = None,
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
        The files; in processes other than 0, which write none, an empty tuple.

    Cost: process 0 holds the arrays of one file in host memory, as in `export`. With several processes, each device
        holds one full array, or one element of a stack.
    """
    tree = contents.saved_params(params) if isinstance(params, TrainState) else params
    leaves = {PARAMS + path_text(path): a for path, a in jax.tree_util.tree_leaves_with_path(tree)}
    found = weight_sources(leaves, mapping, family)
    entries: list[Entry] = []
    for path, a in leaves.items():
        read = functools.partial(_on_host, a)
        entries += _entries(known_source(found, path), a.shape, _export_dtype(path, a.dtype, dtype), read)
    if jax.process_index() == 0:
        metadata = _metadata(found, family)
        return write(folder, entries, max_file_bytes=max_file_bytes, metadata=metadata, overwrite=overwrite)
    for entry in entries:
        entry.read()  # takes part in the gather of the array
    return ()


def _on_host(a: ArrayLike, element: int | None) -> np.ndarray:
    part = a if element is None else a[element]  # pyright: ignore[reportIndexIssue]  # an array, if it is a stack
    if isinstance(part, jax.Array) and not part.is_fully_addressable:
        return multihost_utils.process_allgather(part, tiled=True)
    return np.asarray(part)


def _read_saved(reader: LimitedReader, path: str, leaf: LeafRecord, dtype: np.dtype, element: int | None) -> np.ndarray:
    """Reads and casts a saved array, or an element of a stack, piece by piece."""
    shape = leaf.shape if element is None else leaf.shape[1:]
    whole, done = np.empty(0, dtype), 0
    for piece in reader.pieces(path, leaf, element=element):
        if not done:  # the first piece was read, so the array is as large as its record says
            whole = np.empty(math.prod(shape), dtype)
        whole[done : done + piece.size] = piece.reshape(-1)
        done += piece.size
    return whole.reshape(shape)


def _metadata(found: Mapping[str, Source], family: str | None) -> dict[str, str]:
    turned = any(source.dims for source in found.values())
    return {LAYOUT_KEY: PYTORCH if turned or family else FLAX}


def _export_dtype(path: str, own: DTypeLike, wanted: DTypeLike | None) -> np.dtype:
    is_cast = wanted is not None and path.startswith(PARAMS) and jnp.issubdtype(jnp.dtype(own), jnp.floating)
    return jnp.dtype(wanted if is_cast else own)


def _entries(
    source: Source, shape: Shape, dtype: np.dtype, read: Callable[[int | None], np.ndarray]
) -> Iterator[Entry]:
    """The arrays that one of ours becomes in the files. `read` returns it, or an element of a stack."""
    element = shape[1:] if source.is_stack else shape
    theirs = element if source.dims is None else source.dims.their_shape(element)
    names = source.parts(shape)
    if theirs is None or (source.is_stack and (not shape or len(names) != shape[0])):
        what = f"the mapping does not fit the array that becomes {bounded_repr(source.names[0])}"
        raise exchange_error(what, f"shape {shape}, {len(names)} names", "change the dims or the names")

    def converted(i: int | None) -> np.ndarray:
        array = read(i).astype(dtype, copy=False)
        return array if source.dims is None else source.dims.to_theirs(array)

    for i, name in enumerate(names):
        yield Entry(name, theirs, dtype, functools.partial(converted, i if source.is_stack else None))


# Load


def load(
    state: TrainState,
    path: str | Path | Reader,
    *,
    mapping: NameMapping | None = None,
    family: str | None = None,
    layout: str | None = None,
    missing: Sequence[str] = (),
    extra: Sequence[str] = (),
    cast: bool = False,
) -> TrainState:
    """Returns the state with its weights replaced by those of safetensors files. All other leaves stay.

    Files of `export`, and those that Flax models of transformers write, state that they are stored as Flax stores them.
    Of other files, the layout has to be given: nothing in a file says whether a square matrix is the transpose of ours.

    Args:
        state: of `init`. It is donated.
        path: a file or a folder; or a `tensors.Reader` of one, such as `Reader(folder, follow_links=True)` for a folder
            in the cache of Hugging Face.
        mapping: as in `export`. Entries without dims say nothing about the layout.
        family: as in `export`, for files in the PyTorch layout of Hugging Face.
        layout: 'flax' if arrays without dims are stored as Flax stores them, whatever the files state.
        missing: globs of leaves ('params/head/*', 'model_state/*') that the files may lack. The state keeps its own.
        extra: globs of arrays in the files that nothing takes. They are not read.
        cast: whether dtypes may differ.

    Raises:
        ValueError: if an option is invalid, the mapping has no name for an array, the layout is not known, the files
            state that of Flax and a family is given, or as in `tensors.Reader`.
        CheckpointMismatch: if a weight is missing or has another shape or dtype in the files, or the files have an
            array that nothing takes; with a line for each.

    Cost: each process reads the shards of its own devices, one at a time.
    """
    # Find what each weight is in the files.
    if layout not in (None, FLAX):
        raise exchange_error("there is no such layout", bounded_repr(layout), "layout='flax', or a family or a mapping")
    reader, extra = opened(path, family, extra)
    stored, shapes = contents.arrays(contents.avals(state)), contents.logical_shapes(state)
    avals = {p: jax.ShapeDtypeStruct(shapes[p], a.dtype) for p, a in stored.items() if is_weight(p, a.dtype)}
    found = weight_sources(avals, mapping, family, reader.names)
    wanted = {p: known_source(found, p) for p in avals if p in found or not matches(p, missing)}
    # Check that it fits.
    check_fit(reader, avals, wanted, missing=missing, extra=extra, cast=cast)
    present = {p: source for p, source in wanted.items() if _absent(reader, source, avals[p]) is None}
    check_layout(reader, avals, present, layout, family)
    # Read it.
    contents.free(state, present)
    read = {p: read_sharded(reader, source, shapes[p], stored[p]) for p, source in present.items()}
    return contents.with_arrays(state, read)


def opened(path: str | Path | Reader, family: str | None, extra: Sequence[str]) -> tuple[Reader, Sequence[str]]:
    """The files, and globs of their arrays that nothing takes: with those that models of the family compute."""
    unused = () if family is None else find_family(family).unused
    return path if isinstance(path, Reader) else Reader(path), (*extra, *unused)


def read_sharded(reader: Reader, source: Source, shape: Shape, stored: Aval) -> jax.Array:
    """Reads an array of a logical shape onto the devices, as it is stored there.

    Cost: one or two copies of a shard. Where one of our dims is a product of dims in the file, the whole array is read
    for each shard.
    """
    names = source.parts(shape)

    def read_element(name: str, shape: Shape, index: tuple[slice, ...]) -> np.ndarray:
        array = reader.read(name)
        ours = array if source.dims is None else source.dims.to_ours(array, shape)
        return ours[index].astype(stored.dtype, order="C", subok=False)

    def read_slice(index: tuple[slice, ...]) -> np.ndarray:
        if not source.is_stack:
            return read_element(names[0], shape, index)
        elements = [read_element(name, shape[1:], index[1:]) for name in names[index[0]]]
        empty = [0, *(len(range(n)[s]) for n, s in zip(shape[1:], index[1:], strict=True))]
        return np.stack(elements) if elements else np.empty(empty, stored.dtype)

    read_shard = lambda index: padding.read_shard(read_slice, index, shape, stored.shape)
    return jax.make_array_from_callback(stored.shape, stored.sharding, read_shard)


# Checks of what is loaded


def check_fit(
    reader: Reader,
    avals: Mapping[str, Aval],
    wanted: Mapping[str, Source],
    *,
    missing: Sequence[str],
    extra: Sequence[str],
    cast: bool,
) -> None:
    """Raises CheckpointMismatch unless the files have the arrays that are wanted, with their shapes and dtypes."""
    found: list[Mismatch | str] = []
    # What is wanted and is missing or differs.
    for p, source in wanted.items():
        a = avals[p]
        name = _absent(reader, source, a)
        if name is not None:
            if not matches(p, missing):
                text = f"the files have no {name} (missing=({p!r},) allows it)"
                found.append(Mismatch("missing", p, text, "not in the files (missing= allows them, by globs)"))
        elif problem := _shape_problem(reader, source, a.shape):
            common = problem if source.is_stack else f"the file {problem.partition(' ')[2]}"
            found.append(Mismatch("shape", p, problem, common))
        elif not cast:
            differs = [part for part in source.parts(a.shape) if reader.dtype(part) != a.dtype]
            for part in differs[:1]:
                got = f"is {reader.dtype(part)}, the state has {a.dtype} (cast=True allows it)"
                found.append(Mismatch("dtype", p, f"{part} {got}", f"the file {got}"))
    # What nothing takes.
    taken = {name for p, source in wanted.items() for name in source.parts(avals[p].shape)}
    nothing = "nothing in the state takes"
    found += [
        Mismatch("extra", name, f"{nothing} it (extra=({name!r},) allows it)", f"{nothing} them (extra= allows them)")
        for name in reader.names
        if name not in taken and not matches(name, extra)
    ]
    if found:
        kinds = {each.kind for each in found if isinstance(each, Mismatch)}
        fixes = [_SHAPES_FIX] if "shape" in kinds else [_NAMES_FIX] if "missing" in kinds else []
        raise CheckpointMismatch("\n  ".join([str(mismatch_error(str(reader.path), found)), *fixes]))


_SHAPES_FIX = (
    "fix:      if shapes are transposed: for files of Hugging Face pass a family, or a mapping with "
    '"dims": "out in -> in out"; for files in the layout of Flax leave them out'
)
_NAMES_FIX = "fix:      if the files have other names, pass a mapping, or a family for those of Hugging Face"


def check_layout(
    reader: Reader, avals: Mapping[str, Aval], present: Mapping[str, Source], layout: str | None, family: str | None
) -> None:
    """Raises ValueError if it is not known how an array with several dims is stored."""
    stated = reader.metadata.get(LAYOUT_KEY)
    if family is not None and FLAX in (stated, layout):
        got = f"family={family!r} and {'layout' if layout else 'the metadata of the files'} {FLAX!r}"
        fix = "leave out the family, or the layout if the files are in the PyTorch layout of Hugging Face"
        raise exchange_error(f"{reader.path} is in the layout of Flax, and a family turns it around", got, fix)
    if FLAX in (stated, layout):
        return
    unknown = [p for p, source in present.items() if not source.has_layout and avals[p].ndim > 1]
    if unknown:
        first = f"{bounded_repr(present[unknown[0]].names[0])} of shape {avals[unknown[0]].shape}"
        got = f"{first} and {len(unknown) - 1} others; the metadata state {LAYOUT_KEY!r} {stated!r}"
        fix = "layout='flax' if they are stored as Flax stores them; or a family, or a mapping with dims"
        raise exchange_error(f"{reader.path} does not state its layout: matrices may be transposed", got, fix)


def _absent(reader: Reader, source: Source, a: Aval) -> str | None:
    """The first name of the source that the files do not have."""
    return next((name for name in source.parts(a.shape) if name not in reader), None)


def _shape_problem(reader: Reader, source: Source, shape: Shape) -> str | None:
    """Says which array of the files does not have the shape that ours needs; None if all have it."""
    names = source.parts(shape)
    if source.is_stack and (not shape or len(names) != shape[0]):
        return f"{len(names)} arrays are stacked, the state has {shape}"
    element = shape[1:] if source.is_stack else shape
    for name in names:
        theirs = reader.shape(name)
        if source.dims is None and theirs != shape:
            return f"{name} has {theirs}, the state has {shape}"
        if source.dims is not None and not source.dims.fits(theirs, element):
            return f"{name} has {theirs}, which the dims do not turn into {shape}"
    return None
