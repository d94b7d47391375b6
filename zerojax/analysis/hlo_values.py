"""Evaluates integers of a compiled program, such as the indices of slices, in each iteration of its loops.

Only what is asked for is computed, from the program's constants and counters. Anything else raises ValueError: the
arguments of the program, other dtypes than integers and booleans, and operations that indices are not made of.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from zerojax.analysis.hlo import Instruction, attribute, trip_count, unsupported

# A tuple is a function from the index of an element to its value: most of what a loop carries is never asked for.
Evaluated = np.ndarray | Callable[[int], Any]


class Scope:
    """The values of the instructions of a computation in one of its runs.

    Args:
        argument: returns the value of the parameter with a number.
    """

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
        """Returns the value of an instruction of the computation.

        Raises:
            ValueError: if it does not follow from the constants of the program, or is not an integer.
        """
        if i not in self._known:
            self._known[i] = self._compute(i)
        return self._known[i]

    def array(self, i: Instruction) -> np.ndarray:
        """Returns the value of an instruction whose result is an array."""
        value = self.value(i)
        if not isinstance(value, np.ndarray):
            raise unsupported(i, "a tuple where an array is expected")
        return value

    def _compute(self, i: Instruction) -> Evaluated:
        if i.op == "parameter":
            return self._argument(int(attribute(r"^(\d+)\)", i)))
        if i.op == "tuple":
            return lambda index: self.value(i.operands[index])
        if i.op == "get-tuple-element":
            elements = self.value(i.operands[0])
            if isinstance(elements, np.ndarray):
                raise unsupported(i, "an element of an array")
            return elements(int(attribute(r"\bindex=(\d+)", i)))
        if i.op == "opt-barrier":
            return self.value(i.operands[0])
        if i.op in ("call", "fusion"):
            (called,) = i.called["calls" if i.op == "fusion" else "to_apply"]
            return self.call(i).value(called.root)
        if i.op == "while":
            return Iterations(i, self).result
        if _is_never(i):
            return np.zeros(i.buffers[0].dims, bool)
        _dtype(i)  # before operands that are not integers either
        return _apply(i, [self.array(operand) for operand in i.operands])


class Iterations:
    """The iterations of a `while`.

    Args:
        loop: the instruction.
        outer: the scope that it runs in.

    Raises:
        ValueError: if its body is not understood.
    """

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
    sign, one = map(_without_converts, i.operands)
    literal = re.sub(r"/\*.*?\*/", "", one.attributes)  # positions in arrays of four dims and more
    return sign.op == "sign" and one.op == "constant" and bool(re.match(r"[{\s]*1[}\s]*\)", literal))


def _without_converts(i: Instruction) -> Instruction:
    while i.op in ("broadcast", "convert"):
        (i,) = i.operands
    return i


def slice_dims(i: Instruction) -> tuple[int, ...]:
    """Returns the dims of what a dynamic-slice reads or a dynamic-update-slice writes."""
    return (i if i.op == "dynamic-slice" else i.operands[1]).buffers[0].dims


def slice_starts(i: Instruction, indices: Iterable[np.ndarray]) -> list[int]:
    """Returns the indices of a dynamic-slice or a dynamic-update-slice, moved so that the slice is inside the array."""
    limits = [dim - size for dim, size in zip(i.operands[0].buffers[0].dims, slice_dims(i), strict=True)]
    return [min(max(int(index), 0), limit) for index, limit in zip(indices, limits, strict=True)]


def _dtype(i: Instruction) -> np.dtype[Any]:
    name = i.buffers[0].dtype
    known = re.fullmatch(r"([su])(8|16|32|64)", name)
    if name != "pred" and not known:
        raise unsupported(i, f"not an integer, but {name}")
    return np.dtype(f"{'int' if known.group(1) == 's' else 'uint'}{known.group(2)}" if known else "bool")


def _constant(i: Instruction) -> Any:
    text = attribute(r"^([-\w{}, ]*)\)", i)
    return [text == "true"] if text in ("true", "false") else [int(n) for n in re.findall(r"-?\d+", text)]


def _iota(i: Instruction) -> Any:
    dims, along = i.buffers[0].dims, int(attribute(r"iota_dimension=(\d+)", i))
    return np.broadcast_to(np.arange(dims[along]).reshape([-1 if k == along else 1 for k in range(len(dims))]), dims)


def _reshaped(i: Instruction, a: np.ndarray) -> Any:
    if i.op == "bitcast" and sum(size > 1 for size in (*a.shape, *i.buffers[0].dims)) > 2:
        raise unsupported(i, "the result of this bitcast depends on layouts")
    return a


def _broadcast(i: Instruction, a: np.ndarray) -> Any:
    dims, kept = i.buffers[0].dims, i.integers("dimensions")
    return np.broadcast_to(a.reshape([size if k in kept else 1 for k, size in enumerate(dims)]), dims)


def _compare(i: Instruction, a: np.ndarray, b: np.ndarray) -> Any:
    return _DIRECTIONS[attribute(r"direction=(\w+)", i)](a, b)


def _slice(i: Instruction, a: np.ndarray) -> Any:
    bounds = re.findall(r"\[(\d+):(\d+)(?::(\d+))?\]", attribute(r"slice=\{(.*?)\}", i))
    return a[tuple(slice(int(first), int(end), int(step or 1)) for first, end, step in bounds)]


def _dynamic_slice(i: Instruction, a: np.ndarray, *indices: np.ndarray) -> Any:
    starts = zip(slice_starts(i, indices), slice_dims(i), strict=True)
    return a[tuple(slice(start, start + size) for start, size in starts)]


_DIRECTIONS: dict[str, Callable[..., Any]] = {
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
}
_ELEMENTWISE: dict[str, Callable[..., Any]] = {
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
_OTHERS: dict[str, Callable[..., Any]] = {
    "bitcast": _reshaped,
    "broadcast": _broadcast,
    "compare": _compare,
    "constant": _constant,
    "dynamic-slice": _dynamic_slice,
    "iota": _iota,
    "reshape": _reshaped,
    "reverse": lambda i, a: np.flip(a, i.integers("dimensions")),
    "slice": _slice,
}


def _apply(i: Instruction, operands: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the result of an operation on arrays."""
    dtype = _dtype(i)
    if i.op in _ELEMENTWISE:
        with np.errstate(over="ignore"):  # integers wrap around, as in the program
            result = _ELEMENTWISE[i.op](*operands)
    elif i.op in _OTHERS:
        result = _OTHERS[i.op](i, *operands)
    else:
        raise unsupported(i, "cannot evaluate this instruction")
    return np.asarray(result).astype(dtype).reshape(i.buffers[0].dims)
