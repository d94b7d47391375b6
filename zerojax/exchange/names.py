"""Maps names of arrays to those of other programs, by exact names and patterns."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from pathlib import Path

from zerojax.exchange.headers import bounded_repr, exchange_error, is_text, json_file, json_object


def mapping(text_or_file: str | Path) -> dict[str, str]:
    """Reads a mapping of our names to their names from a JSON object, or from a file that contains one.

    A name is exact, or a pattern in which `*` stands for one or more characters other than '.' and '/'. The n-th `*` of
    one side is the n-th of the other: {"layers/*/kernel": "model.layers.*.weight"}.

    Raises:
        ValueError: if there is no such file, the text is not a JSON object of strings, the two sides of a line have
            different numbers of `*`, or two `*` are in one part of a name, which would make the match ambiguous.
    """
    if isinstance(text_or_file, str) and text_or_file.lstrip().startswith("{"):
        found = json_object(text_or_file.encode(errors="replace"), "the mapping")
    else:
        found = json_file(Path(text_or_file))
    for ours, theirs in found.items():
        pair = f"{bounded_repr(ours)}: {bounded_repr(theirs)}"
        if not is_text(ours) or not is_text(theirs):
            raise exchange_error("the mapping contains an entry that is not a pair of names", pair, "use strings only")
        if ours.count("*") != theirs.count("*"):
            raise exchange_error("the sides of a mapping differ in *", pair, "use the same number of * on both sides")
        if any(part.count("*") > 1 for part in re.split("[./]", ours)):
            raise exchange_error(
                "the mapping has two * in one part of a name", pair, "use at most one * between two separators"
            )
    return found


def map_name(mapping: Mapping[str, str], name: str) -> str | None:
    """Returns their name for one of ours; None if nothing matches or several patterns give different names.

    An exact name takes precedence over patterns.
    """
    if name in mapping:
        return mapping[name]
    found = {_substitute(ours, theirs, name) for ours, theirs in mapping.items() if "*" in ours} - {None}
    return found.pop() if len(found) == 1 else None


def _substitute(ours: str, theirs: str, name: str) -> str | None:
    """Their pattern, with each `*` replaced by its match in the name; None if our pattern does not match the name."""
    match = re.fullmatch("([^./]+)".join(map(re.escape, ours.split("*"))), name)
    if match is None:
        return None
    parts = itertools.zip_longest(theirs.split("*"), match.groups(), fillvalue="")
    return "".join(itertools.chain.from_iterable(parts))
