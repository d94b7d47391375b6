"""Names: what others call our arrays, by patterns."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from pathlib import Path

from zerojax.exchange.headers import is_text, json_file, json_object, refuse, shown


def mapping(text_or_file: str | Path) -> dict[str, str]:
    """Our names of arrays -> their names, from a JSON object or from a file that has one.

    A name is exact, or a pattern in which `*` stands for one or more characters other than '.' and '/'. The n-th `*` of
    one side is the n-th of the other: {"layers/*/kernel": "model.layers.*.weight"}.

    Raises:
        ValueError: no such file; no JSON object of strings; sides that differ in the number of `*`; two `*` between
            separators, because there would be several ways to read a name.
    """
    if isinstance(text_or_file, str) and text_or_file.lstrip().startswith("{"):
        found = json_object(text_or_file.encode(errors="replace"), "the mapping")
    else:
        found = json_file(Path(text_or_file))
    for ours, theirs in found.items():
        pair = f"{shown(ours)}: {shown(theirs)}"
        if not is_text(ours) or not is_text(theirs):
            raise refuse("a mapping of something else than names", pair, "strings only")
        if ours.count("*") != theirs.count("*"):
            raise refuse("a mapping whose sides differ in *", pair, "as many * on both sides")
        if any(part.count("*") > 1 for part in re.split("[./]", ours)):
            raise refuse("a mapping with two * in one part of a name", pair, "at most one * between separators")
    return found


def map_name(mapping: Mapping[str, str], name: str) -> str | None:
    """Their name for one of ours; None if nothing matches, or patterns do that disagree. An exact name comes first."""
    if name in mapping:
        return mapping[name]
    found = {_filled(ours, theirs, name) for ours, theirs in mapping.items() if "*" in ours} - {None}
    return found.pop() if len(found) == 1 else None


def _filled(ours: str, theirs: str, name: str) -> str | None:
    """Their pattern with what each `*` stands for in the name; None if our pattern does not match it."""
    match = re.fullmatch("([^./]+)".join(map(re.escape, ours.split("*"))), name)
    if match is None:
        return None
    parts = itertools.zip_longest(theirs.split("*"), match.groups(), fillvalue="")
    return "".join(itertools.chain.from_iterable(parts))
