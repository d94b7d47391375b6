"""Exports the weights of a checkpoint as safetensors files, and loads the weights of such files into a state.

Weights are the parameters, and the floating arrays of the model state, such as the running statistics of BatchNorm,
which inference needs as well.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.checkpoints import contents, store
from zerojax.checkpoints.contents import MODEL_STATE, PARAMS
from zerojax.checkpoints.manifest import CheckpointMismatch, LeafRecord, Mismatch, matches, mismatch_error, plain_text
from zerojax.checkpoints.pieces import LimitedReader
from zerojax.exchange.families import family_sources, find_family
from zerojax.exchange.headers import bounded_repr, exchange_error
from zerojax.exchange.names import Source, map_name, sources
from zerojax.exchange.shards import read_sharded, shape_problem, transposes
from zerojax.exchange.tensors import MAX_FILE_BYTES, Entry, Reader, write
from zerojax.step.state import TrainState
from zerojax.typing import Aval

log = logging.getLogger("zerojax")

LAYOUT_KEY, FLAX, PYTORCH = "format", "flax", "pt"  # the key and the values by which transformers states the layout too


def export(
    directory: str | Path,
    step: int,
    folder: str | Path,
    *,
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
        ValueError: if the mapping or the family is invalid or has no name for an array, dims do not fit an array, or as
            in `tensors.write`.

    Cost: holds one piece of 64 MiB of one array in host memory; of an array that is transposed or reshaped, two copies
    of the whole array, or of one element of a stack. The process that reads holds a piece and its chunks, see
    `pieces.LimitedReader`.
    """
    directory = Path(directory).absolute()
    saved = store.read_manifest(directory, step)
    leaves = {path: leaf for path, leaf in saved.leaves.items() if _is_weight(path, jnp.dtype(leaf.dtype))}
    if left_out := [path for path in saved.leaves if path.startswith(MODEL_STATE) and path not in leaves]:
        log.warning("export: left out, since they are not floating: %s", plain_text(", ".join(left_out)))
    found = _sources(leaves, mapping, family)
    turned = any(source.dims for source in found.values())
    metadata = {LAYOUT_KEY: PYTORCH if turned or family else FLAX, "step": str(step)}
    entries: list[Entry] = []
    with LimitedReader(directory, step) as reader:
        for path, leaf in leaves.items():
            read = functools.partial(reader.pieces, path, leaf)
            entries += _entries(_known(found, path), leaf, _export_dtype(path, leaf, dtype), read)
        return write(folder, entries, max_file_bytes=max_file_bytes, metadata=metadata, overwrite=overwrite)


def _is_weight(path: str, dtype: Any) -> bool:
    return path.startswith(PARAMS) or (path.startswith(MODEL_STATE) and jnp.issubdtype(dtype, jnp.floating))


def _our_name(path: str) -> str:
    """The name of an array in a mapping: its path in the model. That of an NNX variable ends with the variable."""
    if path.startswith(PARAMS):
        return path.removeprefix(PARAMS)
    return path.removeprefix(MODEL_STATE).removesuffix("/value")


def _sources(
    paths: Collection[str], mapping: Mapping[str, Any] | None, family: str | None, theirs: Collection[str] = ()
) -> dict[str, Source]:
    """Path -> source, for the paths that have one: of the mapping, or else of the family; without both, of its name."""
    found: dict[str, Source] = {}
    if mapping is None and family is None:
        return {path: Source((_our_name(path).replace("/", "."),)) for path in paths}
    if family is not None:
        by_name = family_sources(find_family(family), [_our_name(path) for path in paths], theirs)
        found = {path: by_name[_our_name(path)] for path in paths if _our_name(path) in by_name}
    if mapping is not None:
        entries = sources(mapping)
        given = {path: map_name(entries, _our_name(path)) for path in paths}
        found |= {path: source for path, source in given.items() if source is not None}
    return found


def _known(found: Mapping[str, Source], path: str) -> Source:
    if path not in found:
        what = "the mapping has no name for a parameter or an array of the model state"
        raise exchange_error(what, bounded_repr(_our_name(path)), "add the name or a pattern that matches it")
    return found[path]


def _export_dtype(path: str, leaf: LeafRecord, wanted: Any) -> np.dtype:
    cast = wanted is not None and path.startswith(PARAMS) and jnp.issubdtype(jnp.dtype(leaf.dtype), jnp.floating)
    return np.dtype(jnp.dtype(wanted if cast else leaf.dtype))


def _entries(source: Source, leaf: LeafRecord, dtype: np.dtype, read: Any) -> Iterator[Entry]:
    """The arrays that an array of the checkpoint becomes in the files."""
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
    path: str | Path,
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
        path: a file or a folder, see `tensors.Reader`.
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
    reader = Reader(path)
    stored, shapes = contents.arrays(contents.avals(state)), contents.logical_shapes(state)
    avals = {p: jax.ShapeDtypeStruct(shapes[p], a.dtype) for p, a in stored.items() if _is_weight(p, a.dtype)}
    found = _sources(avals, mapping, family, reader.names)
    wanted = {p: _known(found, p) for p in avals if p in found or not matches(p, missing)}
    _check_fit(reader, path, avals, wanted, missing, extra, cast)
    present = {p: source for p, source in wanted.items() if _absent(reader, source, avals[p]) is None}
    _check_layout(reader, path, avals, present, layout, family)
    contents.free(state, present)
    read = {p: read_sharded(reader, source, shapes[p], stored[p]) for p, source in present.items()}
    return contents.with_arrays(state, read)


def _absent(reader: Reader, source: Source, a: Aval) -> str | None:
    """The first name of the source that the files do not have."""
    return next((name for name in source.parts(tuple(a.shape)) if name not in reader), None)


def _check_fit(
    reader: Reader,
    path: str | Path,
    avals: Mapping[str, Aval],
    wanted: Mapping[str, Source],
    missing: Sequence[str],
    extra: Sequence[str],
    cast: bool,
) -> None:
    """Raises CheckpointMismatch unless the files have the arrays that are wanted, with their shapes and dtypes."""
    found: list[Mismatch | str] = []
    turned = False
    for p, source in wanted.items():
        a = avals[p]
        name = _absent(reader, source, a)
        if name is not None:
            if not matches(p, missing):
                text = f"the files have no {name} (missing=({p!r},) allows it)"
                found.append(Mismatch("missing", p, text, "not in the files (missing= allows them, by globs)"))
        elif problem := shape_problem(reader, source, tuple(a.shape)):
            common = problem if source.is_stack else f"the file {problem.partition(' ')[2]}"
            found.append(Mismatch("shape", p, problem, common))
            turned = turned or transposes(reader, source, tuple(a.shape))
        elif not cast:
            differs = [part for part in source.parts(tuple(a.shape)) if jnp.dtype(reader.dtype(part)) != a.dtype]
            for part in differs[:1]:
                got = f"is {reader.dtype(part)}, the state has {a.dtype} (cast=True allows it)"
                found.append(Mismatch("dtype", p, f"{part} {got}", f"the file {got}"))
    taken = {name for p, source in wanted.items() for name in source.parts(tuple(avals[p].shape))}
    unused = [name for name in reader.names if name not in taken and not matches(name, extra)]
    nothing = "nothing in the state takes"
    found += [
        Mismatch("extra", name, f"{nothing} it (extra=({name!r},) allows it)", f"{nothing} them (extra= allows them)")
        for name in unused
    ]
    if found:
        absent = any(isinstance(each, Mismatch) and each.kind == "missing" for each in found)
        fixes = [_TRANSPOSE_FIX] if turned else [_NAMES_FIX] if absent else []
        raise CheckpointMismatch("\n  ".join([str(mismatch_error(str(path), found)), *fixes]))


_TRANSPOSE_FIX = (
    "fix:      shapes are the transpose of what they should be: for files of Hugging Face pass a family, or a mapping "
    'with "dims": "out in -> in out"; for files in the layout of Flax leave them out'
)
_NAMES_FIX = "fix:      if the files have other names, pass a mapping, or a family for those of Hugging Face"


def _check_layout(
    reader: Reader,
    path: str | Path,
    avals: Mapping[str, Aval],
    present: Mapping[str, Source],
    layout: str | None,
    family: str | None,
) -> None:
    """Raises ValueError if it is not known how an array with several dims is stored."""
    stated = reader.metadata.get(LAYOUT_KEY)
    if family is not None and FLAX in (stated, layout):
        got = f"family={family!r} and {'layout' if layout else 'the metadata of the files'} {FLAX!r}"
        fix = "leave out the family, or the layout if the files are in the PyTorch layout of Hugging Face"
        raise exchange_error(f"{path} is in the layout of Flax, and a family turns it around", got, fix)
    if FLAX in (stated, layout):
        return
    unknown = [p for p, source in present.items() if not source.has_layout and avals[p].ndim > 1]
    if unknown:
        first = f"{bounded_repr(present[unknown[0]].names[0])} of shape {tuple(avals[unknown[0]].shape)}"
        got = f"{first} and {len(unknown) - 1} others; the metadata state {LAYOUT_KEY!r} {stated!r}"
        fix = (
            "layout='flax' if the arrays are stored as Flax stores them; for files of Hugging Face a family, or a "
            'mapping with "dims"'
        )
        raise exchange_error(f"{path} does not state its layout: matrices may be transposed", got, fix)
