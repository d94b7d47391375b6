"""Names the units, the groups of leaves that are gathered together, by the paths of their leaves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

_NUMBERED = re.compile(r"\d")


def unit_names(paths: Sequence[str], patterns: Sequence[str] = ()) -> list[str]:
    """The unit of each leaf path ('layers/3/mlp/kernel').

    The unit of a leaf is the leading part of its path that the first matching pattern matches. If no pattern matches,
    the unit ends at the first numbered component ('layers/3', 'Block_0'). If no component is numbered, it ends at the
    first component after the prefix that all paths share ('model/embed').

    Args:
        paths: the paths of all leaves.
        patterns: globs on leading parts of paths.

    Raises:
        ValueError: if a pattern matches no path.
    """
    split = [path.split("/") for path in paths]
    common = 0
    while len(split) > 1 and all(len(p) > common + 1 and p[common] == split[0][common] for p in split):
        common += 1
    matched = set()

    def name(parts: list[str]) -> str:
        prefixes = ["/".join(parts[:i]) for i in range(1, len(parts) + 1)]
        for pattern in patterns:
            for prefix in prefixes:
                if fnmatchcase(prefix, pattern):
                    matched.add(pattern)
                    return prefix
        for prefix, part in zip(prefixes[common:], parts[common:], strict=True):
            if _NUMBERED.search(part):
                return prefix
        return prefixes[min(common, len(parts) - 1)]

    names = [name(parts) for parts in split]
    for pattern in patterns:
        if pattern not in matched:
            raise ValueError(no_match_text("units", pattern, paths))
    return names


def no_match_text(option: str, pattern: str, paths: Sequence[str]) -> str:
    """The error text for a pattern that matches no leaf path."""
    shown = ", ".join(list(paths)[:5]) + (", ..." if len(paths) > 5 else "")
    example = pattern.strip("*") and f"*{pattern.strip('*')}*"
    return (
        f"{option}: pattern {pattern!r} matches no parameter\n"
        f"  got:      paths {shown}\n"
        f"  fix:      use a glob on the whole path, for example {example!r}"
    )
