"""How a value of a traced loss depends on the rows of the batch: abstract values, and how operations combine them."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from zerojax.utils.typing import Shape

Factors = tuple[tuple[int, bool], ...]  # of a dim, outermost first: (size, whether it counts rows)


class Kind(enum.Enum):
    """What a value is, on a device that has some of the rows.

    SAME: depends on no row. ROWS: each element is computed from one row, or from a group of rows. MEAN, SUM, MAX, MIN:
    that of such values over all rows of the device. DERIVED: computed from those and from what is the same, and from
    nothing else. MIXED: depends on the rows of the device in another way.
    """

    SAME = enum.auto()
    ROWS = enum.auto()
    MEAN = enum.auto()
    SUM = enum.auto()
    MAX = enum.auto()
    MIN = enum.auto()
    DERIVED = enum.auto()
    MIXED = enum.auto()


REDUCED = frozenset({Kind.MEAN, Kind.SUM, Kind.MAX, Kind.MIN})
LINEAR = frozenset({Kind.MEAN, Kind.SUM})
FLIPPED = {Kind.MAX: Kind.MIN, Kind.MIN: Kind.MAX}
HERE = -1  # among sources: the equation that is read at the time


@dataclasses.dataclass(frozen=True)
class RowValue:
    """How an array depends on the rows of one device."""

    kind: Kind = Kind.SAME
    dims: tuple[Factors, ...] = ()  # for ROWS, the factors of each dim
    # For ROWS, whether the turn of an enclosing loop selects rows: an element is that of one turn.
    per_turn: bool = False
    # For ROWS, whether it is divided by the number of rows already, so that its sum over rows is a mean.
    scaled: bool = False
    # The equations at which rows of the device met: each element depends on which rows these are. `HERE` is the one
    # that is read.
    sources: frozenset[int] = frozenset()
    of: frozenset[Kind] = frozenset()  # for DERIVED, the kinds that it is computed from
    is_affine: bool = False  # for DERIVED, whether it is a sum over rows plus what is the same
    # For DERIVED, whether it is a ratio of sums over rows whose divisor depends on no parameter.
    is_ratio: bool = False
    on_params: bool = False  # whether it depends on parameters
    on_device: bool = False  # whether it depends on random keys or on the index of the device
    # For SAME, ROWS and SUM, the number that all elements are, if it is known. Such a SUM is a count of rows, or a
    # multiple of it.
    const: float | None = None
    is_inverse: bool = False  # for DERIVED, whether it is what is the same, divided by a count of rows
    index_dim: int | None = None  # for SAME, the dim whose index each element is, as of an iota
    columns: tuple[RowValue, ...] = ()  # the values that are concatenated along the last dim, one element of it each

    def replace(self, **changes: object) -> RowValue:
        return dataclasses.replace(self, **changes)

    @property
    def has_rows(self) -> bool:
        return self.kind is Kind.ROWS

    @property
    def row_dims(self) -> frozenset[int]:
        """The dims that count rows."""
        return frozenset(dim for dim, factors in enumerate(self.dims) if any(flag for _, flag in factors))

    @property
    def many(self) -> frozenset[int]:
        """The dims that count several rows."""
        return frozenset(d for d, factors in enumerate(self.dims) if any(flag and size > 1 for size, flag in factors))

    @property
    def is_local(self) -> bool:
        """Whether devices have different values."""
        return self.kind is not Kind.SAME or self.on_device

    @property
    def is_sum(self) -> bool:
        """Whether it is a sum over rows, maybe with something added that is the same on all devices."""
        return self.kind is Kind.SUM or self.is_affine

    @property
    def is_count(self) -> bool:
        """Whether it is a multiple of the number of rows."""
        return self.kind is Kind.SUM and self.const is not None

    @property
    def is_linear(self) -> bool:
        """Whether it is a sum or a mean over rows, maybe with something added."""
        return self.kind in LINEAR or self.is_affine

    @property
    def kinds(self) -> frozenset[Kind]:
        """The kinds of what it is computed from, without SAME."""
        return self.of if self.kind is Kind.DERIVED else frozenset({self.kind} - {Kind.SAME})


SAME = RowValue()


def are_same(values: Iterable[RowValue]) -> bool:
    return all(v.kind is Kind.SAME for v in values)


# The factors of dims -------------------------------------------------------------------------------------------------


def row_factors(shape: Shape, num_rows: int) -> tuple[Factors, ...]:
    """The factors of an array whose dim 0 counts the rows of the batch."""
    rest = () if shape[0] == num_rows else ((shape[0] // num_rows, False),)
    return ((num_rows, True), *rest), *plain_factors(shape[1:])


def plain_factors(shape: Shape) -> tuple[Factors, ...]:
    return tuple(((size, False),) for size in shape)


def replaced(dims: Sequence[Factors], dim: int, factors: Factors) -> tuple[Factors, ...]:
    return (*dims[:dim], factors, *dims[dim + 1 :])


def reshaped(dims: Sequence[Factors], shape: Shape) -> tuple[Factors, ...] | None:
    """The factors of a reshaped array; None if a scalar is left of a single row."""
    if 0 in shape:
        return plain_factors(shape)
    left = [f for factors in dims for f in factors if f[0] != 1 or f[1]]
    found: list[list[tuple[int, bool]]] = []
    for size in shape:
        # Factors from the left, until they make the size.
        own, rest = [], size
        while left and (rest > 1 or (not own and left[0][0] == 1)):
            factor, flag = left.pop(0)
            if rest % factor == 0:
                own.append((factor, flag))
                rest //= factor
            elif factor % rest == 0:
                own.append((rest, flag))
                left.insert(0, (factor // rest, flag))
                rest = 1
            elif left:  # a dim across two factors: they are one
                following, other = left.pop(0)
                left.insert(0, (factor * following, flag or other))
            else:
                return None
        found.append(own or [(size, False)])
    # A dim of a single row, which no dim of the result stands for.
    if any(flag for _, flag in left):
        if not found:
            return None
        found[-1] += [f for f in left if f[1]]
    return tuple(map(tuple, found))


# Combinations of values ----------------------------------------------------------------------------------------------


def united(values: Iterable[RowValue], kind: Kind, **changes: object) -> RowValue:
    """A value of `kind` that depends on all that `values` depend on."""
    values = list(values)
    return RowValue(kind).replace(
        per_turn=kind is Kind.ROWS and any(v.per_turn for v in values),
        sources=frozenset().union(*(v.sources for v in values)) if kind is not Kind.SAME else frozenset(),
        on_params=any(v.on_params for v in values),
        on_device=any(v.on_device for v in values),
        **changes,
    )


def mixed(values: Iterable[RowValue]) -> RowValue:
    """A value that depends on rows of `values` in an unknown way."""
    return united(values, Kind.MIXED)


def met(value: RowValue) -> RowValue:
    """The value, where rows of the device have met at the equation that is read."""
    return value.replace(sources=value.sources | {HERE})


def derived(values: Sequence[RowValue], **changes: object) -> RowValue:
    return united(values, Kind.DERIVED, of=frozenset().union(*(v.kinds for v in values)), **changes)


def row_by_row(values: Sequence[RowValue], shape: Shape, **changes: object) -> RowValue:
    """The ROWS that are computed element by element from `values`, one of which has rows.

    Dims are compared from the left; those of size one, and scalars, stand for all elements. Rows of the device meet if
    another operand is a statistic of them, or if two operands have rows in dims of which none includes the other's.
    """
    rows = [v for v in values if v.has_rows]
    widest = max(rows, key=lambda v: len(v.row_dims))
    dims = list(plain_factors(shape))
    for v in (*rows, widest):
        for dim in v.row_dims:
            size = math.prod(size for size, _ in v.dims[dim])
            dims[dim] = v.dims[dim] if size == shape[dim] else (*v.dims[dim], (shape[dim] // max(size, 1), False))
    found = united(values, Kind.ROWS, dims=tuple(dims), **changes)
    meet = not all(v.has_rows or v.kind is Kind.SAME for v in values) or any(not v.many <= widest.many for v in rows)
    return met(found) if meet else found


def joined(first: RowValue, second: RowValue, shape: Shape) -> RowValue:
    """A value that is one of two: from branches, or before and after a turn of a loop."""
    pair = first, second
    if are_same(pair):
        return united(pair, Kind.SAME, const=first.const if first.const == second.const else None)
    if any(v.kind is Kind.MIXED for v in pair):
        return mixed(pair)
    if any(v.has_rows for v in pair):
        return row_by_row(pair, shape, scaled=all(v.scaled for v in pair if v.has_rows))
    return linear(pair)


def linear(values: Sequence[RowValue]) -> RowValue:
    """The sum, the choice or the concatenation of values without rows, not all of which are the same."""
    others = [v for v in values if v.kind is not Kind.SAME]
    kinds = {v.kind for v in others}
    has_offset = any(v.kind is Kind.SAME and v.const != 0 for v in values)
    if kinds == {Kind.MEAN} or (kinds == {Kind.SUM} and not has_offset):
        return united(values, others[0].kind)
    return derived(
        values,
        is_affine=all(v.is_sum for v in others),
        is_ratio=any(v.is_ratio for v in others) and all(v.is_ratio or v.kind is Kind.MEAN for v in others),
    )


def divided(values: Sequence[RowValue], value: RowValue) -> RowValue:
    """`value`, divided by a count of rows; `values` are both."""
    if value.has_rows:
        return met(value.replace(scaled=False)) if value.scaled else value.replace(scaled=True, const=None)
    if value.is_count:
        return united(values, Kind.SAME)
    if value.kind is Kind.SUM:
        return united(values, Kind.MEAN)
    return derived(values, is_inverse=value.kind is Kind.SAME, is_ratio=value.kinds <= LINEAR)


# Reductions ----------------------------------------------------------------------------------------------------------

_REDUCTIONS = {
    "reduce_sum": Kind.SUM, "reduce_max": Kind.MAX, "reduce_or": Kind.MAX, "reduce_min": Kind.MIN,
    "reduce_and": Kind.MIN,
}  # fmt: skip


def reduced(name: str, value: RowValue, axes: Sequence[int], shape: Shape) -> RowValue:
    """The value of a reduction (`reduce_sum`, `reduce_max`, `argmax`, ...) over `axes` of an array of `shape`."""
    kind, is_sum = _REDUCTIONS.get(name), name == "reduce_sum"
    const = value.const
    if const is not None:
        const = const * math.prod(shape[axis] for axis in axes) if is_sum else const if kind else None
    if not value.has_rows:
        if not (value.is_linear if is_sum else value.kind is kind):
            return derived([value])
        return value.replace(const=const)
    if not value.row_dims <= set(axes) or value.per_turn:
        rest = tuple(factors for dim, factors in enumerate(value.dims) if dim not in axes)
        return value.replace(dims=rest, const=const, scaled=value.scaled and is_sum, index_dim=None, columns=())
    if kind is None:
        return met(mixed([value]))
    if const is not None and not is_sum:
        return united([value], Kind.SAME, const=const)
    scaled = is_sum and value.scaled
    return united([value], Kind.MEAN if scaled else kind, const=None if scaled else const)


# Elementwise operations ----------------------------------------------------------------------------------------------

_COPIES = frozenset({"convert_element_type", "copy", "copy_p"})
_UNARY_LINEAR = _COPIES | {"neg", "reduce_precision", "real", "imag", "conj"}
_EXTREMES = {"max": Kind.MAX, "or": Kind.MAX, "min": Kind.MIN, "and": Kind.MIN}
_FOLDED: dict[str, Callable[..., float]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "max": np.maximum, "min": np.minimum,
    "neg": np.negative, "sqrt": np.sqrt, "integer_pow": np.power,
}  # fmt: skip


def elementwise(name: str, values: Sequence[RowValue], shape: Shape, exact: bool) -> RowValue:
    """The value of an operation on each element.

    Args:
        name: of the primitive.
        values: of the operands.
        shape: of the result.
        exact: whether the operation rounds at most as floating dtypes do, unlike a division of integers.
    """
    others = [v for v in values if v.kind is not Kind.SAME]
    if not others:
        return _same(name, values)
    if (found := _with_count(name, values, exact)) is not None:
        return found
    is_linear = (
        (name in _UNARY_LINEAR and exact)
        or (name in ("add", "add_any", "sub"))
        or (name == "mul" and len(others) == 1)
        or (name == "div" and others == [values[0]] and exact)
        or (name == "select_n" and values[0].kind is Kind.SAME)
    )

    # With rows.
    if any(v.has_rows for v in others):
        flags = [v.scaled for v in values]
        is_product = (name == "mul" and sum(flags) == 1) or (name == "div" and flags == [True, False] and exact)
        scaled = is_product or (is_linear and all(v.scaled for v in others if v.const != 0))
        return row_by_row(values, shape, scaled=scaled, const=_folded(name, values))

    # Maxima and minima over rows.
    if name in _EXTREMES and {v.kind for v in others} == {_EXTREMES[name]}:
        return united(values, _EXTREMES[name])
    if name in ("neg", "not") and values[0].kind in FLIPPED:
        return united(values, FLIPPED[values[0].kind])
    if name in _COPIES and exact and values[0].kind in FLIPPED:
        return values[0]

    # Sums and means over rows.
    if name in ("mul", "div") and is_linear and (others[0].kind in LINEAR or others[0].kind is Kind.DERIVED):
        return others[0].replace(on_params=any(v.on_params for v in values), const=_folded(name, values))
    if is_linear:
        return linear(values[1:] if name == "select_n" else values)
    is_ratio = name == "div" and all(v.kinds and v.kinds <= LINEAR for v in values) and not values[1].on_params
    return derived(values, is_ratio=is_ratio)


def _with_count(name: str, values: Sequence[RowValue], exact: bool) -> RowValue | None:
    """The value of an operation with a count of rows, or with the inverse of one; None if that is as of other sums."""
    if name == "div" and values[1].is_count and exact:
        return divided(values, values[0])
    if name == "mul":
        for v, other in (values, values[::-1]):
            if v.is_inverse:
                return divided(values, other)
            if v.is_count and other.kind is Kind.MEAN:
                return united(values, Kind.SUM)
    if name in _COPIES and values[0].is_count:
        return values[0]
    counts = {v.const for v in values if v.is_count}
    if name == "max" and len(counts) == 1 and _folded(name, values) in counts:  # of a count and what is no larger
        return united(values, Kind.SUM, const=_folded(name, values))
    return None


def _folded(name: str, values: Sequence[RowValue]) -> float | None:
    """The number that all elements of the result are, if it is known."""
    consts = [v.const for v in values]
    if name in _COPIES or name == "reduce_precision":
        return consts[0]
    if name not in _FOLDED or None in consts or len(consts) != (1 if name in ("neg", "sqrt") else 2):
        return None
    with np.errstate(all="ignore"):
        return float(_FOLDED[name](*consts))


def _same(name: str, values: Sequence[RowValue]) -> RowValue:
    """The value of an operation on what is the same."""
    index_dim = None
    if name in _COPIES or name in ("reduce_precision", "stop_gradient"):
        index_dim = values[0].index_dim
    elif name == "select_n":  # such as the one by which JAX replaces negative indices
        index_dim = values[1].index_dim
    return united(values, Kind.SAME, const=_folded(name, values), index_dim=index_dim)
