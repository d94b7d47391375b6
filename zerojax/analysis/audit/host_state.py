"""Checks that a compiled program keeps the offloaded state in host memory, and moves all of it piece by piece."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
from typing import Any

from zerojax.analysis import hlo_slices, host_copies
from zerojax.analysis.audit.communication import SLACK
from zerojax.analysis.audit.findings import Outcome, Unreadable, Verdict, reader_errors
from zerojax.analysis.hlo import Program
from zerojax.analysis.hlo_slices import HostSlice
from zerojax.offload.host_pieces import PIECES_BYTES
from zerojax.utils.text import abbreviate, bytes_text
from zerojax.utils.typing import Shape


def check_host_memory(state_bytes: int, found: int, copies: int) -> Outcome:
    """Whether the state is in host memory, and no copy of it or of its gradients.

    Args:
        state_bytes: of the state that is offloaded.
        found: the bytes of the program's arguments in host memory.
        copies: the bytes of what is copied there.
    """
    numbers = {"expected_bytes": state_bytes, "found_bytes": found, "copied_bytes": max(0, copies)}
    if found < (1 - SLACK) * state_bytes:
        fix = "create the state with zero.init, and jit a step of your own with in_shardings and out_shardings of it"
        return Outcome(f"{bytes_text(found)} in host memory", Verdict.BROKEN, numbers, fix)
    if copies > SLACK * state_bytes:
        fix = (
            "use jax.jit(step, donate_argnums=0): the compiler copies arrays that it may not update in place; "
            "with two or three layers it may copy sums of their gradients too"
        )
        return Outcome(f"copies of {bytes_text(copies)} in host memory", Verdict.BROKEN, numbers, fix)
    return Outcome(f"{bytes_text(found)} in host memory, and no copies", Verdict.OK, numbers)


def check_pieces(
    program: Program, arrays: Iterable[tuple[str, Shape]], state_bytes: int, params: Iterable[Shape] = ()
) -> Outcome:
    """Whether the pieces that are written to arrays in host memory make up the whole of each, and how large they are.

    Args:
        program: compiled for GPUs.
        arrays: dtypes, as in programs, and shapes of the arrays of the state in host memory, on one device.
        state_bytes: of all of them.
        params: the shapes of those that are parameters. Layers of them, and of sums of their gradients, come in the
            forward and the backward pass too.

    Raises:
        Unreadable: if the index of a piece cannot be evaluated.
    """
    wanted, streamed = set(arrays), set(params)
    with reader_errors():
        pieces = [each for each in hlo_slices.host_slices(program) if (each.buffer.dtype, each.buffer.dims) in wanted]
    for each in pieces:
        if each.indexed is None:
            raise Unreadable(f"the index of {each.name} cannot be evaluated: {each.unread}")
    written = [each for each in pieces if each.writes]
    visits = collections.defaultdict[tuple[Any, int], collections.Counter[int]](collections.Counter)
    for each in written:  # gradients of the first and the last layer are written outside of the loop over the others
        visits[each.buffer, each.slice_bytes].update(each.indexed or ())
    missed = [each for each in written if not _covers(each, visits[each.buffer, each.slice_bytes])]
    at_a_time = collections.Counter[int]()  # by the number of runs: loops of the same length are one loop
    for each in pieces:
        if not each.writes and (each.buffer.dims not in streamed or _walks(each)):
            at_a_time[len(each.indexed or ())] += each.slice_bytes
    largest = max(at_a_time.values(), default=0)
    numbers = {"pieces": len(pieces), "at_a_time_bytes": largest, "missed": len(missed)}
    if not pieces and state_bytes > 2 * PIECES_BYTES:
        fix = "jit the step of zero.train_step: a step of your own has to move the state piece by piece"
        return Outcome("no pieces: the state comes to the device as a whole", Verdict.BROKEN, numbers, fix)
    if missed:
        texts = [f"{each.name} writes {len(set(each.indexed or ()))} pieces of {_text(each)}" for each in missed]
        fix = "report it with the program: compiled.as_text() of step.lower(state, batch).compile()"
        return Outcome(abbreviate(texts), Verdict.BROKEN, numbers, fix)
    text = f"all pieces come and go; {bytes_text(largest)} at a time"
    if largest > 2 * PIECES_BYTES:
        fix = "dims with more divisors, from which smaller pieces can be cut"
        return Outcome(text, Verdict.KNOWN, numbers, fix)
    return Outcome(text, Verdict.OK, numbers)


def check_copies(program: Program) -> Outcome:
    """How much is copied between device and host in a step, and how much of it while nothing is computed."""
    with reader_errors():
        copies = host_copies.read_host_copies(program)
    size = lambda chosen: sum(each.num_bytes for each in chosen)
    in_layers = [each for each in copies if each.in_layers]
    total, alone = size(copies), size(each for each in copies if each.alone)
    of_layers, alone_of_layers = size(in_layers), size(each for each in in_layers if each.alone)
    numbers = {"bytes": total, "alone_bytes": alone, "layers_bytes": of_layers, "alone_layers_bytes": alone_of_layers}
    text = f"{bytes_text(total)}, of them {bytes_text(alone)} ({alone / max(total, 1):.0%}) while nothing is computed"
    if in_layers:
        text += f"; in loops over layers {bytes_text(alone_of_layers)} ({alone_of_layers / of_layers:.0%})"
    return Outcome(text, Verdict.INFO, numbers)


def _walks(each: HostSlice) -> bool:
    """Whether the runs of a slice visit all pieces of its buffer but one, which may come before the loop."""
    count = each.buffer.num_bytes // each.slice_bytes
    return count > 2 and len(set(each.indexed or ())) >= count - 1


def _covers(each: HostSlice, visits: Mapping[int, int]) -> bool:
    """Whether slices like this one visit every piece of their buffers, and all pieces equally often."""
    pieces = range(0, each.buffer.num_bytes, each.slice_bytes)
    return set(visits) == set(pieces) and len(set(visits.values())) == 1


def _text(each: HostSlice) -> str:
    dims = ",".join(map(str, each.buffer.dims))
    return f"{each.buffer.num_bytes // each.slice_bytes} of {each.buffer.dtype}[{dims}]"
