"""Describes how an array in a file is turned into ours, by naming dims: "(heads size) width -> width heads size"."""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from zerojax.exchange.headers import bounded_repr, exchange_error
from zerojax.utils.typing import Shape

NamedDims = tuple[
    tuple[str, ...], ...
]  # each dim of an array is the product of named dims, the first of which is outermost

_TOKEN = re.compile(r"\(([^()]*)\)|([^\s()]+)|(\S)")


class Rearrangement(NamedTuple):
    """The dims of an array in a file, and of ours, as products of the same named dims."""

    theirs: NamedDims
    ours: NamedDims

    def their_shape(self, ours: Shape) -> Shape | None:
        """The shape in the file for our shape; None if ours has another rank, or does not determine it."""
        return _shape(self.theirs, _solve([(self.ours, ours)]))

    def our_shape(self, theirs: Shape) -> Shape | None:
        """Our shape for that in the file; None if that has another rank, or does not determine it."""
        return _shape(self.ours, _solve([(self.theirs, theirs)]))

    def to_theirs(self, array: np.ndarray) -> np.ndarray:
        """Turns our full array into that of the file. Its shape has to determine the sizes."""
        sizes = _solve([(self.ours, array.shape)])
        assert sizes is not None
        order = [name for dim in self.theirs for name in dim]
        return _permuted(array.reshape([sizes[name] for name in _flat(self.ours)]), self.ours, order).reshape(
            [math.prod(sizes[name] for name in dim) for dim in self.theirs]
        )


class Window(NamedTuple):
    """What has to be read for a slice of our array, and how it becomes the slice.

    Attributes:
        view: the shape in which the array of the file is seen, with one dim for each named dim. The bytes stay.
        index: the slices of the view, which contain ours and little else.
        order: the dims of the view in our order.
        shape: ours, of what was read.
        rest: the slices of that which are ours.
    """

    view: Shape
    index: tuple[slice, ...]
    order: tuple[int, ...]
    shape: Shape
    rest: tuple[slice, ...]

    def finish(self, read: np.ndarray) -> np.ndarray:
        """Turns what was read into the slice of our array."""
        return np.ascontiguousarray(read.transpose(self.order).reshape(self.shape)[self.rest])


def parse_dims(text: Any) -> Rearrangement:
    """Reads "theirs -> ours": names of dims, in parentheses if one dim is their product; 1 is a dim of size 1.

    Raises:
        ValueError: if the text is anything else, or a name is not exactly once on each side.
    """
    sides = text.split("->") if isinstance(text, str) else []
    fix = "write the dims in the file and ours, as in 'out in -> in out' or '(heads size) width -> width heads size'"
    if len(sides) != 2:
        raise exchange_error("the dims of a mapping are not of the form 'theirs -> ours'", bounded_repr(text), fix)
    theirs, ours = (tuple(_parse_side(side, text, fix)) for side in sides)
    counts = [collections.Counter(_flat(side)) for side in (theirs, ours)]
    if counts[0] != counts[1] or any(n > 1 for n in counts[0].values()):
        fix = "use each name exactly once on each side"
        raise exchange_error("the two sides of the dims of a mapping do not match", bounded_repr(text), fix)
    return Rearrangement(theirs, ours)


def _parse_side(side: str, text: str, fix: str) -> Iterable[tuple[str, ...]]:
    for group, name, other in _TOKEN.findall(side):
        names = tuple(part for part in (group or name).split() if part != "1")
        if other or not all(part.isidentifier() for part in names):
            raise exchange_error("the dims of a mapping contain something else than names", bounded_repr(text), fix)
        yield names


def fits(dims: Rearrangement, theirs: Shape, ours: Shape) -> bool:
    """Whether an array of the shape `theirs` can be turned into one of the shape `ours` in exactly one way."""
    return _solve([(dims.theirs, theirs), (dims.ours, ours)]) is not None


def window(dims: Rearrangement, theirs: Shape, ours: Shape, index: tuple[slice, ...]) -> Window:
    """Returns what to read for a slice of our array.

    Args:
        dims: how the array of the file becomes ours.
        theirs, ours: the full shapes, which `fits` accepts.
        index: one slice with a step of 1 for each of our dims.

    Only where one of our dims is a product of several is more read than the slice: whole rows of its outermost part.
    """
    sizes = _solve([(dims.theirs, theirs), (dims.ours, ours)])
    assert sizes is not None
    bounds = {name: (0, size) for name, size in sizes.items()}
    shape, rest = [], []
    for dim, n, part in zip(dims.ours, ours, index, strict=True):
        start, stop, _ = part.indices(n)
        inner = math.prod(sizes[name] for name in dim[1:])
        first = start // inner if dim and inner else 0
        if dim and inner:
            bounds[dim[0]] = first, max(first, -(-stop // inner))
        shape.append(math.prod(end - begin for begin, end in (bounds[name] for name in dim)))
        rest.append(slice(start - first * inner, stop - first * inner))
    names = _flat(dims.theirs)
    view = tuple(sizes[name] for name in names)
    order = tuple(names.index(name) for name in _flat(dims.ours))
    return Window(view, tuple(slice(*bounds[name]) for name in names), order, tuple(shape), tuple(rest))


def _flat(side: NamedDims) -> list[str]:
    return [name for dim in side for name in dim]


def _permuted(array: np.ndarray, side: NamedDims, order: list[str]) -> np.ndarray:
    names = _flat(side)
    return array.transpose([names.index(name) for name in order])


def _shape(side: NamedDims, sizes: dict[str, int] | None) -> Shape | None:
    return None if sizes is None else tuple(math.prod(sizes[name] for name in dim) for dim in side)


def _solve(known: list[tuple[NamedDims, Shape]]) -> dict[str, int] | None:
    """The size of every named dim; None if the shapes contradict each other or do not determine them."""
    if any(len(side) != len(shape) for side, shape in known):
        return None
    equations = [(dim, n) for side, shape in known for dim, n in zip(side, shape, strict=True)]
    sizes: dict[str, int] = {}
    for _ in equations:  # each round determines at least one more, or nothing more is determined
        for dim, n in equations:
            open_names = [name for name in dim if name not in sizes]
            others = math.prod(sizes[name] for name in dim if name in sizes)
            if len(open_names) == 1 and others and n % others == 0:
                sizes[open_names[0]] = n // others
    complete = all(name in sizes for dim, _ in equations for name in dim)
    consistent = complete and all(math.prod(sizes[name] for name in dim) == n for dim, n in equations)
    return sizes if consistent else None
