"""Maps our arrays to those of other programs: their names, by exact names and patterns, and their dims."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from zerojax.exchange.headers import bounded_repr, exchange_error, is_text, json_file, json_object
from zerojax.exchange.rearrange import Rearrangement, parse_dims
from zerojax.utils.typing import Shape

NUMBER = "#"  # in a name with dims: the index along dim 0 of our array, which is a stack


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


def mapping(text_or_file: str | Path) -> dict[str, Any]:
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
    return found


def sources(mapping: Mapping[str, Any]) -> dict[str, Source]:
    """Checks a mapping, see `mapping`, and returns its entries. Raises ValueError if one is invalid."""
    found = {}
    for ours, entry in mapping.items():
        pair = f"{bounded_repr(ours)}: {bounded_repr(entry)}"
        found[ours] = source = _source(entry, pair)
        if not is_text(ours) or not all(map(is_text, source.names)):
            fix = 'map a name to a name, or to {"name": ..., "dims": ...}'
            raise exchange_error("the mapping contains an entry that is not a pair of names", pair, fix)
        if any(ours.count("*") != name.count("*") for name in source.names):
            raise exchange_error("the sides of a mapping differ in *", pair, "use the same number of * on both sides")
        if any(part.count("*") > 1 for part in re.split("[./]", ours)):
            raise exchange_error(
                "the mapping has two * in one part of a name", pair, "use at most one * between two separators"
            )
    return found


def _source(entry: Any, pair: str) -> Source:
    if not isinstance(entry, Mapping):
        return Source((entry,))
    name: Any = entry.get("name")
    names = tuple(name) if isinstance(name, list | tuple) else (name,)
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
    fill = lambda theirs: itertools.zip_longest(theirs.split("*"), match.groups(), fillvalue="")
    return source._replace(names=tuple("".join(itertools.chain.from_iterable(fill(each))) for each in source.names))
