"""Finds the slices of buffers in host memory that a compiled program reads and writes, and where each of them starts.

A slice has indices, which the program computes. XLA for GPUs also annotates slices with byte offsets that it derives
from the loop around them (`dynamic_slice_config`). It copies an annotated slice from or to these offsets, and never
looks at the indices.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from zerojax.analysis.hlo import HOST, Buffer, Computation, Instruction, Program, element_bits, unsupported
from zerojax.analysis.hlo_values import Iterations, Scope, slice_dims, slice_starts

_ANNOTATION = '"dynamic_slice_config":'
_ALLOCATION = "AllocateBuffer"


@dataclasses.dataclass(frozen=True)
class HostSlice:
    """A dynamic-slice or a dynamic-update-slice of a buffer in host memory.

    Attributes:
        name: the name of the instruction.
        writes: whether it writes to the buffer, instead of reading from it.
        buffer: the whole buffer.
        slice_bytes: size of the slice.
        indexed: the offset in bytes at each run, in the order in which it runs in a step, by its indices; None if they
            cannot be evaluated.
        annotated: the same by its annotation; None if it has none.
        unread: why the indices cannot be evaluated.
    """

    name: str
    writes: bool
    buffer: Buffer
    slice_bytes: int
    indexed: tuple[int, ...] | None
    annotated: tuple[int, ...] | None
    unread: str = ""


class _SliceRun(NamedTuple):
    """One run of a slice, in the iterations of the loops around it, the outermost first."""

    instruction: Instruction
    scope: Scope
    iterations: tuple[int, ...]


def host_slices(program: Program) -> list[HostSlice]:
    """Returns the slices of host buffers of a program for GPUs, in the order of their first runs.

    Raises:
        ValueError: if a slice is in a branch or in a loop whose trip count is unknown, if an annotation is not
            understood, or if something else than a slice may read a part of a host buffer.
    """
    runs: dict[Instruction, list[_SliceRun]] = {}
    for run in _runs(program.entry, Scope.of_entry(), (), {}):
        runs.setdefault(run.instruction, []).append(run)
    return [_host_slice(i, each) for i, each in runs.items()]


def _runs(
    computation: Computation, scope: Scope, iterations: tuple[int, ...], known: dict[Computation, bool]
) -> Iterator[_SliceRun]:
    """The runs of all slices of host buffers in a computation and in those that it calls. See `_is_relevant`."""
    for i in computation.instructions:
        if _slices_host(i):
            yield _SliceRun(i, scope, iterations)
        elif _ANNOTATION in i.attributes and _touches_host(i):
            raise unsupported(i, "an annotation of something else than a slice")
        elif i.op == "custom-call" and _touches_host(i) and i.target != _ALLOCATION:
            raise unsupported(i, "this custom call may read or write a part of a host buffer")
        elif not any(_is_relevant(c, known) for called in i.called.values() for c in called):
            continue
        elif i.op == "while":
            loop = Iterations(i, scope)
            for n in range(loop.trips):
                yield from _runs(loop.body, loop.scope(n), (*iterations, n), known)
        elif i.op == "conditional":
            raise unsupported(i, "a slice of a host buffer in a branch")
        else:
            inner = scope.call(i)
            for c in (c for called in i.called.values() for c in called):
                yield from _runs(c, inner, iterations, known)


def _slices_host(i: Instruction) -> bool:
    return i.op in ("dynamic-slice", "dynamic-update-slice") and i.operands[0].buffers[0].space == HOST


def _touches_host(i: Instruction) -> bool:
    return any(buffer.space == HOST for each in (i, *i.operands) for buffer in each.buffers)


def _is_relevant(computation: Computation, known: dict[Computation, bool]) -> bool:
    """Whether a computation has something that `_runs` returns or refuses, at any depth. `known` keeps the answers."""
    if computation not in known:
        known[computation] = any(
            _slices_host(i)
            or (_touches_host(i) and (_ANNOTATION in i.attributes or i.op == "custom-call"))
            or any(_is_relevant(c, known) for called in i.called.values() for c in called)
            for i in computation.instructions
        )
    return known[computation]


def _host_slice(i: Instruction, runs: list[_SliceRun]) -> HostSlice:
    buffer = i.operands[0].buffers[0]
    slice_bytes = Buffer(buffer.dtype, slice_dims(i), HOST).num_bytes
    config = _annotation(i)
    limit = buffer.num_bytes - slice_bytes
    annotated = None if config is None else tuple(_annotated_offset(i, config, limit, run.iterations) for run in runs)
    try:
        indexed, unread = tuple(_indexed_offset(run) for run in runs), ""
    except ValueError as error:
        indexed, unread = None, str(error)
    return HostSlice(i.name, i.op == "dynamic-update-slice", buffer, slice_bytes, indexed, annotated, unread)


def _indexed_offset(run: _SliceRun) -> int:
    """The offset of a slice in bytes, by its indices."""
    i, scope, _ = run
    buffer = i.operands[0].buffers[0]
    first = 2 if i.op == "dynamic-update-slice" else 1
    starts = slice_starts(i, [scope.array(operand) for operand in i.operands[first:]])
    order = buffer.order or tuple(range(len(buffer.dims)))[::-1]
    strides = {dim: math.prod(buffer.dims[k] for k in order[:place]) for place, dim in enumerate(order)}
    return sum(start * strides[dim] for dim, start in enumerate(starts)) * element_bits(buffer.dtype) // 8


def _annotation(i: Instruction) -> dict[str, Any] | None:
    """The annotation of a slice, or None if it has none."""
    _, found, text = i.attributes.partition(_ANNOTATION)
    if not found:
        return None
    try:
        return json.JSONDecoder().raw_decode(text)[0]
    except ValueError as error:
        raise unsupported(i, "cannot read the annotation of this slice") from error


def _annotated_offset(i: Instruction, config: dict[str, Any], limit: int, iterations: tuple[int, ...]) -> int:
    """The offset of a slice in bytes, by its annotation: linear in the iteration of a loop, or one for each iteration.

    `loop_index` counts the loops around the slice from the innermost, and is missing if the offset is the same at all
    times. Before jaxlib 0.12 there was no table, and offset and stride were not in a field of their own.
    """
    depth = int(config.get("loop_index", -1))
    try:
        n = iterations[-1 - depth] if depth >= 0 else 0
        if "table" in config:
            offset = int(config["table"]["offsets"][n])
        else:
            linear = config.get("linear", config)
            offset = int(linear["byte_offset"]) + n * int(linear["byte_stride"])
    except (IndexError, KeyError) as error:
        raise unsupported(i, "cannot read the annotation of this slice") from error
    return min(max(offset, 0), limit)
