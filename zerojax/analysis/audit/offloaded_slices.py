"""Checks that a compiled program copies slices of host buffers from and to the places that their indices say.

A scan that offloads activations writes them into slices of a buffer in host memory, layer by layer, and the scan of the
backward pass reads these in reverse. A compiler that walks the other way gives each layer the activations of another:
bytes and memory are as expected, and the gradients are wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from zerojax.analysis import hlo_slices
from zerojax.analysis.audit.findings import Outcome, Unreadable, Verdict, reader_errors
from zerojax.analysis.hlo import Program
from zerojax.analysis.hlo_slices import HostSlice
from zerojax.step.compiler_options import ANNOTATOR, DISABLED_PASSES, FIRST_CORRECT
from zerojax.utils.text import abbreviate

_FIX = (
    f"pip install 'jax>={'.'.join(map(str, FIRST_CORRECT))}', or "
    f"jax.jit(compiler_options={{'{DISABLED_PASSES}': '{ANNOTATOR}'}})"
)


def check_offloaded_slices(program: Program) -> Outcome:
    """Compares the offsets that the compiler has annotated slices of host buffers with to those of their indices.

    Slices without annotations are copied by their indices.

    Raises:
        Unreadable: if there are annotations that cannot be compared, and none that is wrong.
    """
    with reader_errors():
        found = hlo_slices.host_slices(program)
    annotated = [each for each in found if each.annotated is not None]
    wrong = [each for each in annotated if each.indexed is not None and each.indexed != each.annotated]
    numbers = {"slices": len(found), "annotated": len(annotated), "wrong": len(wrong)}
    if wrong:
        return Outcome(abbreviate([_difference(each) for each in wrong]), Verdict.BROKEN, numbers, _FIX)
    for each in annotated:
        if each.indexed is None:
            raise Unreadable(f"the index of {each.name} cannot be compared with its annotation: {each.unread}")
    text = f"{len(found)} slices; {len(annotated)} of them by annotated offsets, which are those of their indices"
    return Outcome(text, Verdict.OK, numbers)


def _difference(each: HostSlice) -> str:
    action = "writes" if each.writes else "reads"
    buffer = f"{each.buffer.dtype}[{','.join(map(str, each.buffer.dims))}]"
    found, expected = (_walk(offsets, each.slice_bytes) for offsets in (each.annotated or (), each.indexed or ()))
    return f"{each.name} {action} {buffer} {found}, and its index {expected}"


def _walk(offsets: Sequence[int], slice_bytes: int) -> str:
    """Describes a sequence of offsets: where it starts and in which steps it continues.

    In a loop over microbatches, the sequence repeats itself. It is described once.
    """
    unit, size = ("slice", slice_bytes) if not any(each % slice_bytes for each in offsets) else ("byte", 1)
    places = [each // size for each in offsets]
    repeats = lambda n: len(places) % n == 0 and places[:n] * (len(places) // n) == places
    places = places[: next(n for n in range(1, len(places) + 1) if repeats(n))]
    steps = {later - earlier for earlier, later in itertools.pairwise(places)}
    if len(steps) > 1:
        return f"is at {unit}s {', '.join(map(str, places[:6]))}{', ...' if len(places) > 6 else ''}"
    return f"starts at {unit} {places[0]}" + "".join(f" with step {step:+d}" for step in steps)
