"""Checks that files have the arrays that a state needs, with their shapes and dtypes, and state their layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax.numpy as jnp

from zerojax.checkpoints.manifest import CheckpointMismatch, Mismatch, matches, mismatch_error
from zerojax.exchange.headers import bounded_repr, exchange_error
from zerojax.exchange.names import Source
from zerojax.exchange.shards import shape_problem, transposes
from zerojax.exchange.tensors import Reader
from zerojax.utils.typing import Aval

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
    found: list[Mismatch | str] = []
    turned = False
    for p, source in wanted.items():
        a = avals[p]
        name = absent(reader, source, a)
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
        is_absent = any(isinstance(each, Mismatch) and each.kind == "missing" for each in found)
        fixes = [_TRANSPOSE_FIX] if turned else [_NAMES_FIX] if is_absent else []
        raise CheckpointMismatch("\n  ".join([str(mismatch_error(str(reader.path), found)), *fixes]))


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
