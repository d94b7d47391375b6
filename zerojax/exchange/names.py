"""Maps our arrays to those in files: their names, by exact names and patterns, and their dims.

Dims are written as "theirs -> ours", for example "(heads size) width -> width heads size". Each dim of an array is the
product of the named dims in parentheses, the first of which is outermost; 1 is a dim of size 1.
"""

from __future__ import annotations

import collections
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from zerojax.exchange.tensors import bounded_repr, exchange_error, json_file, json_object
from zerojax.utils.typing import Shape

NameMapping: TypeAlias = Mapping[str, str | Mapping[str, str | Sequence[str]]]  # see `mapping`
NamedDims: TypeAlias = tuple[tuple[str, ...], ...]

NUMBER = "#"  # in a name with dims: the index along dim 0 of our array, which is a stack
_TOKEN = re.compile(r"\(([^()]*)\)|([^\s()]+)|(\S)")


# Dims


class Rearrangement(NamedTuple):
    """The dims of an array in a file, and of ours, as products of the same named dims."""

    theirs: NamedDims
    ours: NamedDims

    def fits(self, theirs: Shape, ours: Shape) -> bool:
        """Whether an array of the shape `theirs` can be turned into one of the shape `ours` in exactly one way."""
        return _sizes((self.theirs, theirs), (self.ours, ours)) is not None

    def their_shape(self, ours: Shape) -> Shape | None:
        """The shape in the file for our shape; None if ours has another rank, or does not determine it."""
        return _shape(self.theirs, _sizes((self.ours, ours)))

    def our_shape(self, theirs: Shape) -> Shape | None:
        """Our shape for that in the file; None if that has another rank, or does not determine it."""
        return _shape(self.ours, _sizes((self.theirs, theirs)))

    def to_ours(self, array: np.ndarray, shape: Shape) -> np.ndarray:
        """Turns the array of a file into ours, of the given shape. A view, unless one of our dims is a product."""
        return _rearranged(array, self.theirs, self.ours, _sizes((self.theirs, array.shape), (self.ours, shape)))

    def to_theirs(self, array: np.ndarray) -> np.ndarray:
        """Turns our array into that of the file. Its shape has to determine the sizes."""
        return _rearranged(array, self.ours, self.theirs, _sizes((self.ours, array.shape)))


def parse_dims(text: object) -> Rearrangement:
    """Reads "theirs -> ours".

    Raises:
        ValueError: if the text is anything else, or a name is not exactly once on each side.
    """
    sides = text.split("->") if isinstance(text, str) else []
    fix = "write the dims in the file and ours, as in 'out in -> in out' or '(heads size) width -> width heads size'"
    if len(sides) != 2:
        raise exchange_error("the dims of a mapping are not of the form 'theirs -> ours'", bounded_repr(text), fix)
    theirs, ours = (tuple(_parse_side(side, bounded_repr(text), fix)) for side in sides)
    counts = [collections.Counter(_flat(side)) for side in (theirs, ours)]
    if counts[0] != counts[1] or any(n > 1 for n in counts[0].values()):
        fix = "use each name exactly once on each side"
        raise exchange_error("the two sides of the dims of a mapping do not match", bounded_repr(text), fix)
    return Rearrangement(theirs, ours)


def _parse_side(side: str, text: str, fix: str) -> Iterable[tuple[str, ...]]:
    for group, name, other in _TOKEN.findall(side):
        names = tuple(part for part in (group or name).split() if part != "1")
        if other or not all(part.isidentifier() for part in names):
            raise exchange_error("the dims of a mapping contain something else than names", text, fix)
        yield names


def _rearranged(array: np.ndarray, before: NamedDims, after: NamedDims, sizes: dict[str, int] | None) -> np.ndarray:
    assert sizes is not None
    names = _flat(before)
    split = array.reshape([sizes[name] for name in names]).transpose([names.index(name) for name in _flat(after)])
    return split.reshape([math.prod(sizes[name] for name in dim) for dim in after])


def _flat(side: NamedDims) -> list[str]:
    return [name for dim in side for name in dim]


def _shape(side: NamedDims, sizes: dict[str, int] | None) -> Shape | None:
    return None if sizes is None else tuple(math.prod(sizes[name] for name in dim) for dim in side)


def _sizes(*known: tuple[NamedDims, Shape]) -> dict[str, int] | None:
    """The size of every named dim; None if the shapes contradict each other or do not determine them."""
    if any(len(side) != len(shape) for side, shape in known):
        return None
    equations = [(dim, n) for side, shape in known for dim, n in zip(side, shape, strict=True)]
    sizes: dict[str, int] = {}
    for _ in equations:  # each round determines at least one more, or nothing more is determined
        for dim, n in equations:
            unknown = [name for name in dim if name not in sizes]
            others = math.prod(sizes[name] for name in dim if name in sizes)
            if len(unknown) == 1 and others and n % others == 0:
                sizes[unknown[0]] = n // others
    complete = all(name in sizes for dim, _ in equations for name in dim)
    consistent = complete and all(math.prod(sizes[name] for name in dim) == n for dim, n in equations)
    return sizes if consistent else None


# Names


class Source(NamedTuple):
    """The arrays of a file that one of ours consists of.

    Attributes:
        names: one name; or several, of the arrays that are stacked along dim 0 of ours. If the only name contains `#`,
            it stands for as many names as dim 0 has elements, with 0, 1, and so on in its place.
        dims: how each of them is turned into ours, or into an element of our stack; None if it is stored like ours.
        is_like_ours: whether it is known that it is stored like ours, where there are no dims.
    """

    names: tuple[str, ...]
    dims: Rearrangement | None = None
    is_like_ours: bool = False

    @property
    def has_layout(self) -> bool:
        """Whether the source says how the array is stored."""
        return self.is_like_ours or self.dims is not None

    @property
    def is_stack(self) -> bool:
        """Whether our array is a stack of several in the file."""
        return len(self.names) > 1 or (self.dims is not None and NUMBER in "".join(self.names))

    def parts(self, shape: Shape) -> tuple[str, ...]:
        """The names in the file for our array of this shape: one for each element of a stack."""
        if not self.is_stack or len(self.names) > 1:
            return self.names
        return tuple(name.replace(NUMBER, str(i)) for i in range(shape[0] if shape else 0) for name in self.names)


def mapping(text_or_file: str | Path) -> NameMapping:
    """Reads a mapping of our names to arrays of a file, from a JSON object or from a file that contains one.

    Our name is exact, or a pattern in which `*` stands for one or more characters other than '.' and '/'. What it is
    mapped to is

    - a name, in which the n-th `*` is the n-th of our pattern: {"layers/*/scale": "model.layers.*.norm.weight"}.
    - or {"name": ..., "dims": ...}: the array is turned into ours. The dims name those in the file and ours, as in
      "out in -> in out" (a transposed matrix) or "(heads size) width -> width heads size".
    - Here, "name" may be a list of names, or contain `#`, which stands for 0, 1, and so on: our array is the stack of
      these arrays along dim 0. The dims are those of one of them.

    Raises:
        ValueError: if there is no such file, the text is not a JSON object of such entries, the two sides of a line
            have different numbers of `*`, or two `*` are in one part of a name, which would make the match ambiguous.
    """
    if isinstance(text_or_file, str) and text_or_file.lstrip().startswith("{"):
        found = json_object(text_or_file.encode(errors="replace"), "the mapping")
    else:
        found = json_file(Path(text_or_file))
    sources(found)
    return found  # pyright: ignore[reportReturnType]  # `sources` has checked its entries


def sources(mapping: Mapping[str, object]) -> dict[str, Source]:
    """Checks a mapping, see `mapping`, and returns its entries. Raises ValueError if one is invalid."""
    found = {}
    for ours, entry in mapping.items():
        pair = f"{bounded_repr(ours)}: {bounded_repr(entry)}"
        found[ours] = source = _source(entry, pair)
        if not all(isinstance(name, str) for name in source.names):
            fix = 'map a name to a name, or to {"name": ..., "dims": ...}'
            raise exchange_error("the mapping contains an entry that is not a pair of names", pair, fix)
        if any(ours.count("*") != name.count("*") for name in source.names):
            raise exchange_error("the sides of a mapping differ in *", pair, "use the same number of * on both sides")
        if any(part.count("*") > 1 for part in re.split("[./]", ours)):
            fix = "use at most one * between two separators"
            raise exchange_error("the mapping has two * in one part of a name", pair, fix)
    return found


def _source(entry: object, pair: str) -> Source:
    if not isinstance(entry, Mapping):
        return Source((entry,))  # pyright: ignore[reportArgumentType]  # `sources` checks that it is text
    name = entry.get("name")
    names: tuple = tuple(name) if isinstance(name, list | tuple) else (name,)  # `sources` checks that they are text
    if entry.keys() != {"name", "dims"} or not names:
        fix = 'write {"name": ..., "dims": "out in -> in out"}'
        raise exchange_error("an entry of the mapping does not consist of name and dims", pair, fix)
    return Source(names, parse_dims(entry["dims"]))


def map_name(mapping: Mapping[str, Source], name: str) -> Source | None:
    """Returns the source of one of our arrays; None if nothing matches or several patterns give different sources.

    An exact name takes precedence over patterns.
    """
    if name in mapping:
        return mapping[name]
    found = {_substitute(ours, source, name) for ours, source in mapping.items() if "*" in ours} - {None}
    return found.pop() if len(found) == 1 else None


def _substitute(ours: str, source: Source, name: str) -> Source | None:
    """The source, with each `*` replaced by its match in the name; None if our pattern does not match the name."""
    match = re.fullmatch("([^./]+)".join(map(re.escape, ours.split("*"))), name)
    if match is None:
        return None

    def filled(theirs: str) -> str:
        return "".join(
            itertools.chain.from_iterable(itertools.zip_longest(theirs.split("*"), match.groups(), fillvalue=""))
        )

    return source._replace(names=tuple(map(filled, source.names)))
