"""Finds the slices of host buffers that a compiled program reads and writes, and where each of them starts.

A slice has indices, which the program computes from constants and counters. XLA for GPUs also annotates slices with
byte offsets that it derives from the loop around them (`dynamic_slice_config`): it copies an annotated slice from or to
these offsets, and never looks at the indices. Indices are evaluated here as integers, in each iteration of the loops;
what is not made of constants and counters raises ValueError.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from zerojax.analysis.hlo import (
    HOST,
    Buffer,
    Computation,
    Instruction,
    Program,
    attribute,
    element_bits,
    source,
    trip_count,
    unsupported,
)

# A tuple is a function from the index of an element to its value: most of what a loop carries is never asked for.
Evaluated: TypeAlias = "np.ndarray | Callable[[int], Evaluated]"


class Scope:
    """The values of the instructions of a computation in one of its runs, with arguments by number."""

    def __init__(self, argument: Callable[[int], Evaluated]):
        self._argument = argument
        self._known: dict[Instruction, Evaluated] = {}

    @classmethod
    def of_entry(cls) -> Scope:
        """The scope of the entry computation, whose arguments are not known."""

        def argument(number: int) -> Evaluated:
            raise ValueError(f"hlo: the value of argument {number} of the program is not in the text")

        return cls(argument)

    def call(self, caller: Instruction) -> Scope:
        """The scope of the computation that an instruction calls with its operands."""
        return Scope(lambda number: self.value(caller.operands[number]))

    def value(self, i: Instruction) -> Evaluated:
        """The value of an instruction of the computation.

        Raises ValueError if it does not follow from the constants of the program, or is not an integer.
        """
        if i not in self._known:
            self._known[i] = self._compute(i)
        return self._known[i]

    def array(self, i: Instruction) -> np.ndarray:
        """The value of an instruction whose result is an array."""
        value = self.value(i)
        if not isinstance(value, np.ndarray):
            raise unsupported(i, "a tuple where an array is expected")
        return value

    def _compute(self, i: Instruction) -> Evaluated:
        if i.op == "parameter":
            return self._argument(i.number)
        if i.op == "tuple":
            return lambda index: self.value(i.operands[index])
        if i.op == "get-tuple-element":
            elements = self.value(i.operands[0])
            if isinstance(elements, np.ndarray):
                raise unsupported(i, "an element of an array")
            return elements(i.index)
        if i.op == "opt-barrier":
            return self.value(i.operands[0])
        if i.op in ("call", "fusion"):
            (called,) = i.computations
            return self.call(i).value(called.root)
        if i.op == "while":
            return Iterations(i, self).result
        if _is_never(i):
            return np.zeros(i.buffers[0].dims, bool)
        _dtype(i)  # before operands that are not integers either
        return _apply(i, [self.array(operand) for operand in i.operands])


class Iterations:
    """The iterations of a `while` that runs in an outer scope."""

    def __init__(self, loop: Instruction, outer: Scope):
        self._loop, self._outer = loop, outer
        (self.body,) = loop.called["body"]
        if self.body.root.op != "tuple":
            raise unsupported(loop, "the result of the body of this loop is not a tuple")
        self._scopes: list[Scope] = []
        self._carried: dict[int, list[Evaluated]] = {}

    @property
    def trips(self) -> int:
        """The number of iterations. Raises ValueError if the text does not say."""
        trips = trip_count(self._loop)
        if trips is None:
            raise unsupported(self._loop, "the trip count of this loop is not in the text")
        return trips

    def scope(self, iteration: int) -> Scope:
        """The scope of the body in an iteration, counted from 0."""
        for n in range(len(self._scopes), iteration + 1):
            self._scopes.append(Scope(lambda _, n=n: lambda index: self._element(index, n)))
        return self._scopes[iteration]

    def result(self, index: int) -> Evaluated:
        """An element of the result of the loop."""
        return self._element(index, self.trips)

    def _element(self, index: int, iteration: int) -> Evaluated:
        """An element of what the loop carries, at the start of an iteration."""
        values = self._carried.setdefault(index, [])
        while len(values) <= iteration:  # one after the other: as recursion it would be as deep as the loop is long
            if values:
                values.append(self.scope(len(values) - 1).value(self.body.root.operands[index]))
            else:
                initial = self._outer.value(self._loop.operands[0])
                assert not isinstance(initial, np.ndarray)
                values.append(initial(index))
        return values[iteration]


def _is_never(i: Instruction) -> bool:
    """Whether a comparison is sign(...) > 1, by which a value waits for an event, see `dependencies.after`."""
    if i.op != "compare" or attribute(r"direction=(\w+)", i) != "GT":
        return False
    sign, one = (source(operand, ("broadcast", "convert")) for operand in i.operands)
    literal = re.sub(r"/\*.*?\*/", "", one.attributes)  # positions in arrays of four dims and more
    return sign.op == "sign" and one.op == "constant" and bool(re.match(r"[{\s]*1[}\s]*\)", literal))


def slice_dims(i: Instruction) -> tuple[int, ...]:
    """The dims of what a dynamic-slice reads or a dynamic-update-slice writes."""
    return (i if i.op == "dynamic-slice" else i.operands[1]).buffers[0].dims


def slice_starts(i: Instruction, indices: Iterable[np.ndarray]) -> list[int]:
    """The indices of a dynamic-slice or a dynamic-update-slice, moved so that the slice is inside the array."""
    limits = [dim - size for dim, size in zip(i.operands[0].buffers[0].dims, slice_dims(i), strict=True)]
    return [min(max(int(index), 0), limit) for index, limit in zip(indices, limits, strict=True)]


def _dtype(i: Instruction) -> np.dtype:
    name = i.buffers[0].dtype
    known = re.fullmatch(r"([su])(8|16|32|64)", name)
    if name != "pred" and not known:
        raise unsupported(i, f"not an integer, but {name}")
    return np.dtype(f"{'int' if known.group(1) == 's' else 'uint'}{known.group(2)}" if known else "bool")


def _constant(i: Instruction) -> ArrayLike:
    text = attribute(r"^([-\w{}, ]*)\)", i)
    return [text == "true"] if text in ("true", "false") else [int(n) for n in re.findall(r"-?\d+", text)]


def _iota(i: Instruction) -> ArrayLike:
    dims, along = i.buffers[0].dims, int(attribute(r"iota_dimension=(\d+)", i))
    return np.broadcast_to(np.arange(dims[along]).reshape([-1 if k == along else 1 for k in range(len(dims))]), dims)


def _reshaped(i: Instruction, a: np.ndarray) -> ArrayLike:
    if i.op == "bitcast" and sum(size > 1 for size in (*a.shape, *i.buffers[0].dims)) > 2:
        raise unsupported(i, "the result of this bitcast depends on layouts")
    return a


def _broadcast(i: Instruction, a: np.ndarray) -> ArrayLike:
    dims, kept = i.buffers[0].dims, i.integers("dimensions")
    return np.broadcast_to(a.reshape([size if k in kept else 1 for k, size in enumerate(dims)]), dims)


def _slice(i: Instruction, a: np.ndarray) -> ArrayLike:
    bounds = re.findall(r"\[(\d+):(\d+)(?::(\d+))?\]", attribute(r"slice=\{(.*?)\}", i))
    return a[tuple(slice(int(first), int(end), int(step or 1)) for first, end, step in bounds)]


def _dynamic_slice(i: Instruction, a: np.ndarray, *indices: np.ndarray) -> ArrayLike:
    starts = zip(slice_starts(i, indices), slice_dims(i), strict=True)
    return a[tuple(slice(start, start + size) for start, size in starts)]


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
    "compare": lambda i, a, b: _DIRECTIONS[attribute(r"direction=(\w+)", i)](a, b),
    "constant": _constant,
    "dynamic-slice": _dynamic_slice,
    "iota": _iota,
    "reshape": _reshaped,
    "reverse": lambda i, a: np.flip(a, i.integers("dimensions")),
    "slice": _slice,
}


def _apply(i: Instruction, operands: Sequence[np.ndarray]) -> np.ndarray:
    dtype = _dtype(i)
    if i.op in _ELEMENTWISE:
        with np.errstate(over="ignore"):  # integers wrap around, as in the program
            result = _ELEMENTWISE[i.op](*operands)
    elif i.op in _OTHERS:
        result = _OTHERS[i.op](i, *operands)
    else:
        raise unsupported(i, "cannot evaluate this instruction")
    return np.asarray(result).astype(dtype).reshape(i.buffers[0].dims)


_ANNOTATION = '"dynamic_slice_config":'
_ALLOCATION = "AllocateBuffer"


@dataclasses.dataclass(frozen=True)
class HostSlice:
    """A dynamic-slice or a dynamic-update-slice of a buffer in host memory.

    Attributes:
        buffer: the whole buffer.
        indexed: the offset in bytes at each run, in the order in which it runs in a step, by its indices; None if they
            cannot be evaluated, see `unread`.
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
    """One run of a slice, in the iterations of the loops around it, the outermost first."""

    instruction: Instruction
    scope: Scope
    iterations: tuple[int, ...]


def host_slices(program: Program) -> list[HostSlice]:
    """The slices of host buffers of a program for GPUs, in the order of their first runs.

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
        elif not any(_is_relevant(c, known) for c in i.computations):
            continue
        elif i.op == "while":
            loop = Iterations(i, scope)
            for n in range(loop.trips):
                yield from _runs(loop.body, loop.scope(n), (*iterations, n), known)
        elif i.op == "conditional":
            raise unsupported(i, "a slice of a host buffer in a branch")
        else:
            inner = scope.call(i)
            for c in i.computations:
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
            or any(_is_relevant(c, known) for c in i.computations)
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
