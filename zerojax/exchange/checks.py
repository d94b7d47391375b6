"""Checks that files have the arrays that a state needs, with their shapes and dtypes, and state their layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax.numpy as jnp

from zerojax.checkpoints.manifest import CheckpointMismatch, matches, mismatch_error
from zerojax.exchange.headers import bounded_repr, exchange_error
from zerojax.exchange.names import Source
from zerojax.exchange.shards import shape_problem, transposes
from zerojax.exchange.tensors import Reader
from zerojax.typing import Aval

# The key and the values by which transformers states the layout too.
LAYOUT_KEY, FLAX, PYTORCH = "format", "flax", "pt"


def absent(reader: Reader, source: Source, a: Aval) -> str | None:
    """The first name of the source that the files do not have."""
    return next((name for name in source.parts(tuple(a.shape)) if name not in reader), None)


def check_fit(
    reader: Reader,
    avals: Mapping[str, Aval],
    wanted: Mapping[str, Source],
    missing: Sequence[str],
    extra: Sequence[str],
    cast: bool,
) -> None:
    """Raises CheckpointMismatch unless the files have the arrays that are wanted, with their shapes and dtypes."""
    lines: list[str] = []
    turned = False
    for p, source in wanted.items():
        a = avals[p]
        name = absent(reader, source, a)
        if name is not None:
            if not matches(p, missing):
                lines.append(f"missing:  {p}: the files have no {name} (missing=({p!r},) allows it)")
        elif problem := shape_problem(reader, source, tuple(a.shape)):
            lines.append(f"shape:    {p}: {problem}")
            turned = turned or transposes(reader, source, tuple(a.shape))
        elif not cast:
            differs = [part for part in source.parts(tuple(a.shape)) if jnp.dtype(reader.dtype(part)) != a.dtype]
            for part in differs[:1]:
                got = f"{part} is {reader.dtype(part)}, the state has {a.dtype}"
                lines.append(f"dtype:    {p}: {got} (cast=True allows it)")
    taken = {name for p, source in wanted.items() for name in source.parts(tuple(avals[p].shape))}
    unused = [name for name in reader.names if name not in taken and not matches(name, extra)]
    lines += [f"extra:    {name}: nothing in the state takes it (extra=({name!r},) allows it)" for name in unused]
    if lines:
        is_absent = any(line.startswith("missing:") for line in lines)
        fixes = [_TRANSPOSE_FIX] if turned else [_NAMES_FIX] if is_absent else []
        raise CheckpointMismatch("\n  ".join([str(mismatch_error(str(reader.path), lines)), *fixes]))


_TRANSPOSE_FIX = (
    "fix:      shapes are the transpose of what they should be: for files of Hugging Face pass a family, or a mapping "
    'with "dims": "out in -> in out"; for files in the layout of Flax leave them out'
)
_NAMES_FIX = "fix:      if the files have other names, pass a mapping, or a family for those of Hugging Face"


def check_layout(
    reader: Reader,
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
        raise exchange_error(f"{reader.path} is in the layout of Flax, and a family turns it around", got, fix)
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
        raise exchange_error(f"{reader.path} does not state its layout: matrices may be transposed", got, fix)
