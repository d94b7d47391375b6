"""How a value of a traced loss depends on the rows of the batch: abstract values, and how operations combine them."""

from __future__ import annotations

import dataclasses
import enum
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
_MOST_COUNTS = 16
FLIPPED = {Kind.MAX: Kind.MIN, Kind.MIN: Kind.MAX}


@dataclasses.dataclass(frozen=True)
class RowValue:
    """How an array depends on the rows of one device.

    Attributes:
        kind: see `Kind`.
        dims: for ROWS, the factors of each dim.
        per_turn: for ROWS, whether the turn of an enclosing loop selects rows: an element is that of one turn.
        scaled: for ROWS, whether it is divided by the number of rows already, so that its sum over rows is a mean.
        sources: the equations at which rows of the device met: each element depends on which rows these are.
        of: for DERIVED, the kinds that it is computed from.
        is_affine: for DERIVED, whether it is a sum over rows plus what is the same.
        is_ratio: for DERIVED, whether it is a ratio of sums over rows whose divisor depends on no parameter.
        on_params: whether it depends on parameters.
        on_device: whether it depends on random keys or on the index of the device.
        counts: the numbers of elements that it is the sum of, over all of its reductions or some of them.
        const: for SAME, the number that all elements are, if it is known.
        index_dim: for SAME, the dim whose index each element is, as of an iota.
        columns: the values that are concatenated along the last dim, one element of it each.
    """

    kind: Kind = Kind.SAME
    dims: tuple[Factors, ...] = ()
    per_turn: bool = False
    scaled: bool = False
    sources: frozenset[int] = frozenset()
    of: frozenset[Kind] = frozenset()
    is_affine: bool = False
    is_ratio: bool = False
    on_params: bool = False
    on_device: bool = False
    counts: tuple[int, ...] = ()
    const: float | None = None
    index_dim: int | None = None
    columns: tuple[RowValue, ...] = ()

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
    def kinds(self) -> frozenset[Kind]:
        """The kinds of what it is computed from, without SAME."""
        return self.of if self.kind is Kind.DERIVED else frozenset({self.kind} - {Kind.SAME})


SAME = RowValue()


def row_factors(shape: Shape, num_rows: int) -> tuple[Factors, ...]:
    """The factors of an array whose dim 0 counts the rows of the batch."""
    rest = () if shape[0] == num_rows else ((shape[0] // num_rows, False),)
    return ((num_rows, True), *rest), *plain_factors(shape[1:])


def plain_factors(shape: Shape) -> tuple[Factors, ...]:
    return tuple(((size, False),) for size in shape)


def replaced(dims: Sequence[Factors], dim: int, factors: Factors) -> tuple[Factors, ...]:
    return (*dims[:dim], factors, *dims[dim + 1 :])


def united(values: Iterable[RowValue], kind: Kind, **changes: object) -> RowValue:
    """A value of `kind` that depends on all that `values` depend on."""
    values = list(values)
    return dataclasses.replace(
        RowValue(kind),
        per_turn=kind is Kind.ROWS and any(v.per_turn for v in values),
        sources=frozenset().union(*(v.sources for v in values)) if kind is not Kind.SAME else frozenset(),
        on_params=any(v.on_params for v in values),
        on_device=any(v.on_device for v in values),
        **changes,
    )


def mixed(values: Iterable[RowValue], source: int | None) -> RowValue:
    """A value that depends on rows of `values` in an unknown way, or on how they met at the equation `source`."""
    found = united(values, Kind.MIXED)
    return found if source is None else dataclasses.replace(found, sources=found.sources | {source})


def derived(values: Sequence[RowValue], **changes: object) -> RowValue:
    counts = tuple(dict.fromkeys(count for v in values for count in v.counts))[-_MOST_COUNTS:]
    return united(values, Kind.DERIVED, of=frozenset().union(*(v.kinds for v in values)), counts=counts, **changes)


def row_by_row(values: Sequence[RowValue], shape: Shape, source: int, **changes: object) -> RowValue:
    """The ROWS that are computed element by element from `values`, one of which has rows.

    Dims are compared from the left; those of size one, and scalars, stand for all elements. Rows of the device meet if
    another operand is a statistic of them, or if two operands have rows in dims of which none includes the other's.
    """
    rows = [v for v in values if v.kind is Kind.ROWS]
    widest = max(rows, key=lambda v: len(v.row_dims))
    meet = any(v.kind not in (Kind.SAME, Kind.ROWS) for v in values) or any(not v.many <= widest.many for v in rows)
    dims = list(plain_factors(shape))
    for v in (*rows, widest):
        for dim in v.row_dims:
            size = int(np.prod([size for size, _ in v.dims[dim]]))
            dims[dim] = v.dims[dim] if size == shape[dim] else (*v.dims[dim], (shape[dim] // max(size, 1), False))
    found = united(values, Kind.ROWS, dims=tuple(dims), **changes)
    return dataclasses.replace(found, sources=found.sources | {source}) if meet else found


def joined(first: RowValue, second: RowValue, shape: Shape, source: int) -> RowValue:
    """A value that is one of two: from branches, or before and after a turn of a loop."""
    pair = first, second
    kinds = {v.kind for v in pair} - {Kind.SAME}
    if not kinds:
        const = first.const if first.const == second.const else None
        return united(pair, Kind.SAME, const=const)
    if Kind.MIXED in kinds:
        return mixed(pair, None)
    if Kind.ROWS in kinds:
        return row_by_row(pair, shape, source, scaled=all(v.scaled for v in pair if v.kind is Kind.ROWS))
    return linear(pair)


def linear(values: Sequence[RowValue]) -> RowValue:
    """The sum, the choice or the concatenation of values without rows, not all of which are the same."""
    others = [v for v in values if v.kind is not Kind.SAME]
    kinds = {v.kind for v in others}
    shared = [count for count in others[0].counts if all(count in v.counts for v in others)]
    has_offset = any(v.kind is Kind.SAME and v.const != 0 for v in values)
    if kinds == {Kind.MEAN} or (kinds == {Kind.SUM} and not has_offset):
        return united(values, others[0].kind, counts=tuple(shared))
    return derived(
        values,
        is_affine=all(v.is_sum for v in others),
        is_ratio=any(v.is_ratio for v in others) and all(v.is_ratio or v.kind is Kind.MEAN for v in others),
    )


def divided(value: RowValue, divisor: float, num_rows: int) -> RowValue:
    """A sum over rows, or the terms of one, divided by a constant: a mean if that is the number of its terms.

    Another multiple of the number of rows makes a mean of it in all likelihood.
    """
    number = round(divisor) if np.isfinite(divisor) else 0
    is_whole = number > 0 and abs(number - divisor) < 1e-5 * number
    numbers = *value.counts, num_rows
    is_multiple = number in numbers or any(count > 1 and number % count == 0 for count in numbers)
    if value.is_sum and is_whole and is_multiple:
        return united([value], Kind.MEAN, counts=value.counts)
    if value.kind is Kind.ROWS and is_whole and number == num_rows > 1 and number not in value.counts:
        return dataclasses.replace(value, scaled=True)
    return value


# Elementwise operations ----------------------------------------------------------------------------------------------

_UNARY_LINEAR = frozenset({"neg", "convert_element_type", "reduce_precision", "copy", "copy_p", "real", "imag", "conj"})
_FOLDED: dict[str, Callable[..., float]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "max": np.maximum,
    "min": np.minimum,
    "neg": np.negative,
    "sqrt": np.sqrt,
    "integer_pow": np.power,
}


def elementwise(
    name: str, values: Sequence[RowValue], shape: Shape, source: int, num_rows: int, exact: bool
) -> RowValue:
    """The value of an operation on each element.

    Args:
        name: of the primitive.
        values: of the operands.
        shape: of the result.
        source: the equation.
        num_rows: the number of rows of the device.
        exact: whether the operation rounds at most as floating dtypes do, unlike a division of integers.
    """
    if any(v.kind is Kind.MIXED for v in values):
        return mixed(values, None)
    others = [v for v in values if v.kind is not Kind.SAME]
    if not others:
        return _same(name, values)
    is_linear = (
        (name in _UNARY_LINEAR and exact)
        or (name in ("add", "add_any", "sub"))
        or (name == "mul" and len(others) == 1)
        or (name == "div" and others == [values[0]] and exact)
        or (name == "select_n" and values[0].kind is Kind.SAME)
    )
    if any(v.kind is Kind.ROWS for v in others):
        scaled = is_linear and all(v.scaled for v in others)
        counts = tuple(dict.fromkeys(n for v in others for n in v.counts))[-_MOST_COUNTS:] if is_linear else ()
        found = row_by_row(values, shape, source, scaled=scaled, counts=counts)
        return _scaled(name, values, found, num_rows)
    if name in ("max", "or") and {v.kind for v in others} == {Kind.MAX}:
        return united(values, Kind.MAX)
    if name in ("min", "and") and {v.kind for v in others} == {Kind.MIN}:
        return united(values, Kind.MIN)
    if name in ("neg", "not") and values[0].kind in FLIPPED:
        return united(values, FLIPPED[values[0].kind])
    if name in ("convert_element_type", "copy", "copy_p") and exact and values[0].kind in FLIPPED:
        return values[0]
    if name in ("mul", "div") and is_linear and (others[0].kind in LINEAR or others[0].kind is Kind.DERIVED):
        kept = dataclasses.replace(others[0], on_params=any(v.on_params for v in values))
        found = _scaled(name, values, kept, num_rows)
    elif is_linear:
        found = linear(values[1:] if name == "select_n" else values)
    else:
        is_ratio = name == "div" and all(v.kinds and v.kinds <= LINEAR for v in values) and not values[1].on_params
        found = derived(values, is_ratio=is_ratio)
    is_whole = found.kind is Kind.MEAN or found.is_ratio
    return mixed(values, source) if _counts_rows(name, values) and not is_whole else found


def _counts_rows(name: str, values: Sequence[RowValue]) -> bool:
    """Whether sums over rows are combined with the number of their terms on this device, which is not that of all.

    Factors are more likely something else, and so are small constants, unless a sum is subtracted from one.
    """
    counts = {count for v in values if Kind.SUM in v.kinds for count in v.counts}
    if name == "sub" and values[0].const in counts:
        return True
    consts = {v.const for v in values if v.const is not None and v.const > 2}
    return name != "mul" and any(const in counts or (name == "div" and const + 1 in counts) for const in consts)


def _scaled(name: str, values: Sequence[RowValue], found: RowValue, num_rows: int) -> RowValue:
    """`found`, the product or quotient of `values`, as a mean if the one other operand makes one of it."""
    if name == "div" and values[1].const:
        return divided(found, values[1].const, num_rows)
    if name == "mul":
        for v in values:
            if v.const:
                return divided(found, 1 / v.const, num_rows)
    return found


def _same(name: str, values: Sequence[RowValue]) -> RowValue:
    """The value of an operation on what is the same."""
    consts = [v.const for v in values]
    const = index_dim = None
    if name in _FOLDED and None not in consts and len(consts) == (1 if name in ("neg", "sqrt") else 2):
        with np.errstate(all="ignore"):
            const = float(_FOLDED[name](*consts))
    elif name in ("convert_element_type", "copy", "copy_p", "reduce_precision", "stop_gradient"):
        const, index_dim = consts[0], values[0].index_dim
    elif name == "select_n":  # such as the one by which JAX replaces negative indices
        index_dim = values[1].index_dim
    return united(values, Kind.SAME, const=const, index_dim=index_dim)


# Reshapes and reductions ---------------------------------------------------------------------------------------------


def reshaped(dims: Sequence[Factors], shape: Shape) -> tuple[Factors, ...] | None:
    """The factors of a reshaped array; None if a scalar is left of a single row."""
    if 0 in shape:
        return plain_factors(shape)
    left = [f for factors in dims for f in factors if f[0] != 1 or f[1]]
    found: list[list[tuple[int, bool]]] = []
    for size in shape:
        own: list[tuple[int, bool]] = []
        rest = size
        while left and (rest > 1 or (not own and left[0][0] == 1)):
            factor, flag = left.pop(0)
            if rest % factor == 0:
                own.append((factor, flag))
                rest //= factor
            elif factor % rest == 0:
                own.append((rest, flag))
                left.insert(0, (factor // rest, flag))
                rest = 1
            elif len(left) > 0:  # a dim across two factors: they are one
                following, other = left.pop(0)
                left.insert(0, (factor * following, flag or other))
            else:
                return None
        found.append(own or [(size, False)])
    if any(flag for _, flag in left):  # a dim of a single row, which no dim of the result stands for
        if not found:
            return None
        found[-1] += [f for f in left if f[1]]
    return tuple(map(tuple, found))


def without_dims(value: RowValue, axes: Iterable[int]) -> tuple[Factors, ...]:
    return tuple(factors for dim, factors in enumerate(value.dims) if dim not in set(axes))


def reduced(name: str, value: RowValue, axes: Sequence[int], shape: Shape, source: int) -> RowValue:
    """The value of a reduction (`reduce_sum`, `reduce_max`, `argmax`, ...) over `axes` of an array of `shape`."""
    num, before = int(np.prod([shape[axis] for axis in axes])), value.counts
    if value.kind is Kind.ROWS:
        rest = without_dims(value, axes)
        if not value.row_dims <= set(axes) or value.per_turn:
            counts, scaled = _counts(name, num, before, before), value.scaled and name == "reduce_sum"
            return dataclasses.replace(value, dims=rest, counts=counts, scaled=scaled, index_dim=None, columns=())
        kind = {
            "reduce_sum": Kind.MEAN if value.scaled else Kind.SUM,
            "reduce_max": Kind.MAX,
            "reduce_or": Kind.MAX,
            "reduce_min": Kind.MIN,
            "reduce_and": Kind.MIN,
        }.get(name)
        return mixed([value], source) if kind is None else united([value], kind, counts=_counts(name, num, before))
    keeps = {
        "reduce_sum": value.kind in LINEAR or value.is_affine,
        "reduce_max": value.kind is Kind.MAX,
        "reduce_or": value.kind is Kind.MAX,
        "reduce_min": value.kind is Kind.MIN,
        "reduce_and": value.kind is Kind.MIN,
    }
    if not keeps.get(name):
        return derived([value])
    counts = tuple(dict.fromkeys([*before, *(count * num for count in before)]))[-_MOST_COUNTS:]
    return dataclasses.replace(value, counts=counts if name == "reduce_sum" else ())


def _counts(name: str, num: int, before: Sequence[int], kept: Sequence[int] = ()) -> tuple[int, ...]:
    """The numbers of elements that a sum over `num` of them has, if its terms are sums of `before` elements."""
    if name != "reduce_sum":
        return ()
    return tuple(dict.fromkeys([*kept, num, *(count * num for count in before)]))[-_MOST_COUNTS:]
