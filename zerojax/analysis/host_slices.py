"""Finds the slices of host buffers that a compiled program reads and writes, and where each of them starts.

A slice has indices, which the program computes from constants and counters. XLA for GPUs also annotates slices with
byte offsets that it derives from the loop around them (`dynamic_slice_config`): it copies an annotated slice from or to
these offsets, and never looks at the indices. Here the program is run on its integers, in every iteration of its loops.
What is not made of constants and counters is not known.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from zerojax.analysis import hlo
from zerojax.analysis.hlo import Buffer, Computation, Instruction, Program

Value: TypeAlias = "np.ndarray | tuple[Value, ...] | ValueError"  # an error says why a value is not known

_ALLOCATION = "AllocateBuffer"
_MOST_ELEMENTS = 2**20  # of an array that is computed here


@dataclasses.dataclass(frozen=True)
class HostSlice:
    """A dynamic-slice or a dynamic-update-slice of a buffer in host memory.

    Attributes:
        buffer: the whole buffer.
        indexed: the offset in bytes at each run, in the order in which it runs in a step, by its indices; None if they
            are not known, see `unread`.
        annotated: the same by its annotation; None if it has none.
    """

    name: str
    writes: bool
    buffer: Buffer
    slice_bytes: int
    indexed: tuple[int, ...] | None
    annotated: tuple[int, ...] | None
    unread: str = ""


class _SliceRun(NamedTuple):
    """The indices of a slice in one of its runs, in the iterations of the loops around it, the outermost first."""

    indices: list[Value]
    iterations: tuple[int, ...]


def host_slices(program: Program) -> list[HostSlice]:
    """The slices of host buffers of a program for GPUs, in the order of their first runs.

    Raises:
        ValueError: if a slice is in a branch or in a loop whose trip count is unknown, if an annotation is not
            understood, or if something else than a slice may read a part of a host buffer.
    """
    _, runs = run(program)
    return [_host_slice(i, each) for i, each in runs.items()]


def run(program: Program) -> tuple[Value, dict[Instruction, list[_SliceRun]]]:
    """Runs a program on its integers, and returns its result and the runs of the slices of host buffers."""
    runs: dict[Instruction, list[_SliceRun]] = {}

    @functools.cache
    def is_relevant(computation: Computation) -> bool:
        """Whether there is a slice of a host buffer, or what may be one, at any depth."""
        of_host = (i for i in computation.instructions if _touches_host(i))
        if any(_slices_host(i) or hlo.SLICE_ANNOTATION in i.attributes or i.op == "custom-call" for i in of_host):
            return True
        return any(is_relevant(c) for i in computation.instructions for c in i.computations)

    def call(computation: Computation, arguments: Sequence[Value] | None, iterations: tuple[int, ...]) -> Value:
        values: dict[Instruction, Value] = {}
        for i in computation.instructions:
            operands = [values[operand] for operand in i.operands]
            relevant = any(map(is_relevant, i.computations))
            if _slices_host(i):
                runs.setdefault(i, []).append(_SliceRun(operands[len(operands) - len(slice_dims(i)) :], iterations))
            elif hlo.SLICE_ANNOTATION in i.attributes and _touches_host(i):
                raise hlo.unsupported(i, "an annotation of something else than a slice")
            elif i.op == "custom-call" and _touches_host(i) and i.target != _ALLOCATION:
                raise hlo.unsupported(i, "this custom call may read or write a part of a host buffer")
            elif i.op == "conditional" and relevant:
                raise hlo.unsupported(i, "a slice of a host buffer in a branch")
            # The value.
            if i.op == "parameter":
                missing = ValueError(f"hlo: the value of argument {i.number} of the program is not in the text")
                values[i] = missing if arguments is None else arguments[i.number]
            elif i.op == "while":
                values[i] = loop(i, operands[0], iterations, relevant)
            elif relevant or (i.op in ("call", "fusion") and _has_integers(i)):
                values[i], *_ = [call(called, operands, iterations) for called in i.computations]
            else:
                values[i] = _computed(i, operands)
        return values[computation.root]

    def loop(i: Instruction, carried: Value, iterations: tuple[int, ...], relevant: bool) -> Value:
        (body,), trips = i.called["body"], hlo.trip_count(i)
        if trips is None:
            unknown = hlo.unsupported(i, "the trip count of this loop is not in the text")
            if relevant:
                raise unknown
            return unknown
        for n in range(trips):
            carried = call(body, [carried], (*iterations, n))
        return carried

    return call(program.entry, None, ()), runs


def _slices_host(i: Instruction) -> bool:
    return i.op in ("dynamic-slice", "dynamic-update-slice") and i.operands[0].buffers[0].space == hlo.HOST


def _touches_host(i: Instruction) -> bool:
    return any(buffer.space == hlo.HOST for each in (i, *i.operands) for buffer in each.buffers)


def _has_integers(i: Instruction) -> bool:
    return any(buffer.dtype in _DTYPES for buffer in i.buffers)


def slice_dims(i: Instruction) -> tuple[int, ...]:
    """The dims of what a dynamic-slice reads or a dynamic-update-slice writes."""
    return (i if i.op == "dynamic-slice" else i.operands[1]).buffers[0].dims


def slice_starts(i: Instruction, indices: Sequence[np.ndarray]) -> list[int]:
    """The indices of a dynamic-slice or a dynamic-update-slice, moved so that the slice is inside the array."""
    limits = [dim - size for dim, size in zip(i.operands[0].buffers[0].dims, slice_dims(i), strict=True)]
    return [min(max(int(index), 0), limit) for index, limit in zip(indices, limits, strict=True)]


# Offsets of slices.


def _host_slice(i: Instruction, runs: list[_SliceRun]) -> HostSlice:
    buffer = i.operands[0].buffers[0]
    slice_bytes = Buffer(buffer.dtype, slice_dims(i), hlo.HOST).num_bytes
    config = _annotation(i)
    limit = buffer.num_bytes - slice_bytes
    annotated = None if config is None else tuple(_annotated_offset(i, config, limit, each.iterations) for each in runs)
    try:
        indexed, unread = tuple(_indexed_offset(i, each.indices) for each in runs), ""
    except ValueError as error:
        indexed, unread = None, str(error)
    return HostSlice(i.name, i.op == "dynamic-update-slice", buffer, slice_bytes, indexed, annotated, unread)


def _indexed_offset(i: Instruction, indices: list[Value]) -> int:
    """The offset of a slice in bytes, by its indices."""
    buffer = i.operands[0].buffers[0]
    starts = slice_starts(i, [array(index) for index in indices])
    order = buffer.order or tuple(range(len(buffer.dims)))[::-1]
    strides = {dim: math.prod(buffer.dims[k] for k in order[:place]) for place, dim in enumerate(order)}
    return sum(start * strides[dim] for dim, start in enumerate(starts)) * hlo.element_bits(buffer.dtype) // 8


def array(value: Value) -> np.ndarray:
    """A value that is known. Raises the error of one that is not."""
    if isinstance(value, ValueError):
        raise value
    assert isinstance(value, np.ndarray)
    return value


def _annotation(i: Instruction) -> dict[str, Any] | None:
    """The annotation of a slice, or None if it has none."""
    _, found, text = i.attributes.partition(hlo.SLICE_ANNOTATION)
    if not found:
        return None
    try:
        return json.JSONDecoder().raw_decode(text)[0]
    except ValueError as error:
        raise hlo.unsupported(i, "cannot read the annotation of this slice") from error


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
        raise hlo.unsupported(i, "cannot read the annotation of this slice") from error
    return min(max(offset, 0), limit)


# Values of single instructions.


def _computed(i: Instruction, operands: list[Value]) -> Value:
    """The value of an instruction that calls nothing."""
    if i.op == "tuple":
        return tuple(operands)
    if i.op in ("get-tuple-element", "opt-barrier"):
        value = operands[0]
        return value[i.index] if isinstance(value, tuple) and i.op == "get-tuple-element" else value
    if len(i.buffers) != 1 or math.prod(i.buffers[0].dims) > _MOST_ELEMENTS:
        return hlo.unsupported(i, "cannot evaluate this instruction")
    if _is_never(i):
        return np.zeros(i.buffers[0].dims, bool)
    if not _has_integers(i):
        return hlo.unsupported(i, f"not an integer, but {i.buffers[0].dtype}")
    for operand in operands:
        if isinstance(operand, ValueError):
            return operand
    try:
        return _apply(i, [array(operand) for operand in operands])
    except ValueError as error:
        return error


def _is_never(i: Instruction) -> bool:
    """Whether a comparison is sign(...) > 1, by which a value waits for an event, see `dependencies.after`."""
    if i.op != "compare" or hlo.attribute(r"direction=(\w+)", i) != "GT":
        return False
    sign, one = (hlo.source(operand, ("broadcast", "convert")) for operand in i.operands)
    literal = re.sub(r"/\*.*?\*/", "", one.attributes)  # positions in arrays of four dims and more
    return sign.op == "sign" and one.op == "constant" and bool(re.match(r"[{\s]*1[}\s]*\)", literal))


def _apply(i: Instruction, operands: Sequence[np.ndarray]) -> np.ndarray:
    with np.errstate(all="ignore"):  # integers wrap around, as in the program
        if i.op in _ELEMENTWISE:
            result = _ELEMENTWISE[i.op](*operands)
        elif i.op in _OTHERS:
            result = _OTHERS[i.op](i, *operands)
        else:
            raise hlo.unsupported(i, "cannot evaluate this instruction")
        return np.asarray(result).astype(_DTYPES[i.buffers[0].dtype]).reshape(i.buffers[0].dims)


def _constant(i: Instruction) -> ArrayLike:
    text = hlo.attribute(r"^([-\w{}, ]*)\)", i)
    return [text == "true"] if text in ("true", "false") else [int(n) for n in re.findall(r"-?\d+", text)]


def _iota(i: Instruction) -> ArrayLike:
    dims, along = i.buffers[0].dims, int(hlo.attribute(r"iota_dimension=(\d+)", i))
    return np.broadcast_to(np.arange(dims[along]).reshape([-1 if k == along else 1 for k in range(len(dims))]), dims)


def _reshaped(i: Instruction, a: np.ndarray) -> ArrayLike:
    if i.op == "bitcast" and sum(size > 1 for size in (*a.shape, *i.buffers[0].dims)) > 2:
        raise hlo.unsupported(i, "the result of this bitcast depends on layouts")
    return a


def _broadcast(i: Instruction, a: np.ndarray) -> ArrayLike:
    dims, kept = i.buffers[0].dims, i.integers("dimensions")
    return np.broadcast_to(a.reshape([size if k in kept else 1 for k, size in enumerate(dims)]), dims)


def _slice(i: Instruction, a: np.ndarray) -> ArrayLike:
    bounds = re.findall(r"\[(\d+):(\d+)(?::(\d+))?\]", hlo.attribute(r"slice=\{(.*?)\}", i))
    return a[tuple(slice(int(first), int(end), int(step or 1)) for first, end, step in bounds)]


def _dynamic_slice(i: Instruction, a: np.ndarray, *indices: np.ndarray) -> ArrayLike:
    starts = zip(slice_starts(i, indices), slice_dims(i), strict=True)
    return a[tuple(slice(start, start + size) for start, size in starts)]


_DTYPES = {"pred": "bool"} | {f"s{bits}": f"int{bits}" for bits in (8, 16, 32, 64)}
_DTYPES |= {f"u{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)}
_DIRECTIONS = {
    "EQ": np.equal, "NE": np.not_equal, "LT": np.less, "LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal
}  # fmt: skip
_ELEMENTWISE: dict[str, Callable[..., ArrayLike]] = {
    "add": np.add,
    "and": np.bitwise_and,
    "clamp": lambda low, a, high: np.minimum(np.maximum(a, low), high),
    "convert": lambda a: a,
    "copy": lambda a: a,
    "divide": lambda a, b: np.trunc(np.divide(a, b)),  # of integers, toward zero
    "maximum": np.maximum,
    "minimum": np.minimum,
    "multiply": np.multiply,
    "negate": np.negative,
    "not": np.invert,
    "or": np.bitwise_or,
    "remainder": np.fmod,
    "select": np.where,
    "shift-left": np.left_shift,
    "shift-right-logical": lambda a, b: np.right_shift(a.view(f"u{a.itemsize}"), b),
    "sign": np.sign,
    "subtract": np.subtract,
}
_OTHERS: dict[str, Callable[..., ArrayLike]] = {
    "bitcast": _reshaped,
    "broadcast": _broadcast,
    "compare": lambda i, a, b: _DIRECTIONS[hlo.attribute(r"direction=(\w+)", i)](a, b),
    "constant": _constant,
    "dynamic-slice": _dynamic_slice,
    "iota": _iota,
    "reshape": _reshaped,
    "reverse": lambda i, a: np.flip(a, i.integers("dimensions")),
    "slice": _slice,
}
