"""Which dims and which numbers of a traced loss count rows: those that double where there are twice as many rows.

    4 rows   div(sum, 4.0)   broadcast_in_dim -> f32[4]   mul(mean, 100.0)
    8 rows   div(sum, 8.0)   broadcast_in_dim -> f32[8]   mul(mean, 100.0)
                       └ a count of rows               └ dim 0 counts rows          └ another number

A number in a jaxpr does not say what it stands for: 4 may be the number of rows, of heads or of samples that an average
is to be over. Two traces do.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from zerojax.program import jaxprs
from zerojax.program.jaxprs import Atom, ClosedJaxpr, Equation, Jaxpr
from zerojax.utils.typing import ArrayLike


class Size(enum.Enum):
    """How a number changes with the number of rows."""

    FIXED = enum.auto()
    COUNT = enum.auto()  # in proportion to it
    INVERSE = enum.auto()  # in inverse proportion to it
    OTHER = enum.auto()


class Sizes(NamedTuple):
    """What counts rows in an equation."""

    numbers: Sequence[Size]  # of its operands
    dims: Sequence[frozenset[int]]  # of each result, the dims whose size depends on the number of rows


class SizesOfTrace(NamedTuple):
    """What counts rows in a traced loss without nested jits."""

    equations: Sequence[Sizes]  # of its equations, each followed by those inside of it
    consts: Sizes  # of its constants, as its equations have operands and results
    outputs: Sequence[Size]  # of its outputs


# The operations by which JAX makes operands alike, which it leaves out where a dim of rows has the size one.
_RESHAPES = frozenset({"broadcast_in_dim", "squeeze", "reshape", "expand_dims"})
DRAWS = frozenset({"random_bits", "random_gamma", "rng_bit_generator"})  # random numbers from keys


def sizes_of(flat: ClosedJaxpr, doubled: ClosedJaxpr | None, num_rows: int) -> SizesOfTrace:
    """What counts rows in a loss on `num_rows` rows, from a trace with twice as many, if that is possible.

    Both traces are without nested jits.
    """
    return (doubled and _sizes_of_traces(flat, doubled)) or _guessed(flat, num_rows)


def _sizes_of_traces(closed: ClosedJaxpr, doubled: ClosedJaxpr) -> SizesOfTrace | None:
    """Compares two traces; None if their operations differ."""
    small, large = closed.jaxpr, doubled.jaxpr
    equations = _compared(small, large)
    if equations is None or len(small.constvars) != len(large.constvars):
        return None
    consts = Sizes(list(map(_size, closed.consts, doubled.consts)), list(map(_dims, small.constvars, large.constvars)))
    return SizesOfTrace(equations, consts, list(map(_number, small.outvars, large.outvars)))


def _compared(small: Jaxpr, large: Jaxpr) -> list[Sizes] | None:
    pairs, found = _aligned(small.eqns, large.eqns), list[Sizes]()
    if pairs is None:
        return None
    for own, other in pairs:
        numbers = list(map(_number, own.invars, other.invars))
        found.append(Sizes(numbers, list(map(_dims, own.outvars, other.outvars))))
        inner = list(jaxprs.sub_jaxprs(own)), list(jaxprs.sub_jaxprs(other))
        for jaxpr, doubled in zip(*inner, strict=len(inner[0]) == len(inner[1])):
            found += _compared(jaxpr, doubled) or map(_unknown, jaxprs.walk(jaxpr.eqns))
    return found


def _aligned(small: Sequence[Equation], large: Sequence[Equation]) -> list[tuple[Equation, Equation]] | None:
    """The equations of two traces in pairs."""
    pairs, rest = [], list(reversed(large))
    for equation in small:
        while rest and not _are_alike(equation, rest[-1]) and rest[-1].primitive.name in _RESHAPES:
            rest.pop()
        if not rest or not _are_alike(equation, rest[-1]):
            return None
        pairs.append((equation, rest.pop()))
    return pairs if all(equation.primitive.name in _RESHAPES for equation in rest) else None


def _are_alike(first: Equation, second: Equation) -> bool:
    lengths = lambda equation: (len(equation.invars), len(equation.outvars))
    return first.primitive.name == second.primitive.name and lengths(first) == lengths(second)


def _dims(small: Atom, large: Atom) -> frozenset[int]:
    shapes = getattr(small.aval, "shape", ()), getattr(large.aval, "shape", ())
    if len(shapes[0]) != len(shapes[1]):  # a dim of one row is left out
        return frozenset()
    return frozenset(dim for dim, (a, b) in enumerate(zip(*shapes, strict=True)) if a != b)


def _number(small: Atom, large: Atom) -> Size:
    if jaxprs.is_var(small) or jaxprs.is_var(large):
        return Size.FIXED
    return _size(small.val, large.val)


def _size(small: ArrayLike, large: ArrayLike) -> Size:
    """How one number has become another, or the one number that all elements of an array are."""
    if not (_is_number(small) and _is_number(large)) or np.ndim(small) != np.ndim(large):
        return Size.FIXED
    if np.shape(small) != np.shape(large):
        if not (is_uniform(small) and is_uniform(large)):
            return Size.OTHER
        small, large = np.ravel(small)[0], np.ravel(large)[0]
    elif np.ndim(small):
        return Size.FIXED
    a, b = (np.asarray(value).astype(complex) for value in (small, large))
    if a == b or (a != a and b != b):
        return Size.FIXED
    return Size.COUNT if b == 2 * a else Size.INVERSE if 2 * b == a else Size.OTHER  # rounding keeps a factor of two


def _is_number(value: ArrayLike) -> bool:
    """Whether it is a number whose value is known, or a NumPy array of such."""
    if isinstance(value, Tracer) or (np.ndim(value) and not isinstance(value, np.ndarray)):
        return False
    dtype = jnp.result_type(value)
    return jnp.issubdtype(dtype, jnp.number) or dtype == jnp.bool_


def is_uniform(value: ArrayLike) -> bool:
    """Whether all elements are the same, and known."""
    return _is_number(value) and np.size(value) > 0 and bool(np.all(np.ravel(value)[:1] == value))


def _unknown(equation: Equation) -> Sizes:
    return Sizes([Size.FIXED] * len(equation.invars), [frozenset()] * len(equation.outvars))


def _guessed(closed: ClosedJaxpr, num_rows: int) -> SizesOfTrace:
    """What counts rows in all likelihood, if a second trace does not show it.

    That is a whole multiple of their number by which a scalar is divided, as by means; and dim 0 of random numbers, if
    its size is one.
    """

    def numbers(equation: Equation) -> Iterator[Size]:
        is_divided = equation.primitive.name == "div" and not equation.outvars[0].aval.ndim
        for atom in equation.invars:
            value = 0 if jaxprs.is_var(atom) or not is_divided else atom.val
            multiple = np.real(value) / num_rows if _is_number(value) else 0
            yield Size.COUNT if multiple > 0 and multiple == np.round(multiple) else Size.FIXED

    def dims(equation: Equation) -> Iterator[frozenset[int]]:
        for atom in equation.outvars:
            shape = getattr(atom.aval, "shape", ())
            counts = shape and shape[0] and shape[0] % num_rows == 0 and (num_rows > 1 or shape[0] == 1)
            yield frozenset({0} if counts and equation.primitive.name in DRAWS else ())

    sizes = lambda equation: Sizes(list(numbers(equation)), list(dims(equation)))
    jaxpr = closed.jaxpr
    none = Sizes([Size.FIXED] * len(jaxpr.constvars), [frozenset()] * len(jaxpr.constvars))
    return SizesOfTrace(list(map(sizes, jaxprs.walk(jaxpr.eqns))), none, [Size.FIXED] * len(jaxpr.outvars))
