"""Numbers, sizes, names and configurations as text: units that fit, whole names, rows for equal layers, no secrets."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

_COUNTER = re.compile(r"(^|_)(\d+)$")  # of one component of a path: 'layers/3', 'Block_3', but not 'conv1'
SPACE = "\u00a0"  # a space at which `wrapped` does not break a line
_MOST_LISTED = 3  # numbers of layers in a name
MASK = "***"
_SECRET = re.compile("key|token(?!iz)|secret|password", re.IGNORECASE)  # in a name; a tokenizer is none


def error_text(what: str, got: object, fix: str) -> str:
    """The text of an error: where and what failed, what was given (None if that is said already), and the fix."""
    given = "" if got is None else f"  got:      {got}\n"
    return f"{what}\n{given}  fix:      {fix}"


def bytes_text(num_bytes: float) -> str:
    """A number of bytes in the unit that fits it, such as '512 B', '64 KiB' or '1.32 GiB'."""
    for unit, size in ("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:,.2f}".removesuffix(".00") + f" {unit}"
    return f"{num_bytes:.0f} B"


def count_text(count: int) -> str:
    """A number of things as text, such as 8.03B."""
    for size, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.4g}{letter}"
    return str(count)


def abbreviate(items: Sequence[str], count: int = 4, separator: str = "; ") -> str:
    """Lists the first items, and says how many more there are."""
    rest = [f"and {len(items) - count:,} more"] if len(items) > count else []
    return separator.join([*items[:count], *rest])


def mesh_text(sizes: Mapping[str, int]) -> str:
    """The axes of a mesh with their sizes, such as 'data 4 x model 2'."""
    return " x ".join(f"{name} {size}" for name, size in sizes.items())


def masked(value: object, name: str = "") -> object:
    """JSON data with `MASK` in place of each text whose name, or a name around it, is that of a key or a password."""
    if isinstance(value, Mapping):  # the names around an item are joined, of which each may be that of a secret
        return {key: masked(item, f"{name}/{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [masked(item, name) for item in value]
    return MASK if value and isinstance(value, str) and _SECRET.search(name) else value


def pieces(word: str) -> list[str]:
    """The parts of a word between which a line may end: behind each '/'."""
    return re.findall(r"[^/]*/+|[^/]+$", word)


def wrapped(text: str, width: int) -> list[str]:
    """The lines of a text: broken at spaces, and behind a '/' where a path is longer than a line. Names stay whole."""
    lines, line = [], ""
    for word in text.split(" "):
        if line and len(line) + 1 + len(word) <= width:
            line = f"{line} {word}"
            continue
        lines += [line] if line else []
        line = ""
        for piece in pieces(word):
            if line and len(line) + len(piece) > width:
                lines.append(line)
                line = ""
            line += piece
    return [*lines, line]


class Fold(NamedTuple):
    """Rows of equal layers that are shown as one."""

    # The path, with '*' in place of the number of the layer: 'layers/*/kernel'; or with '{0,2,…,30}', if other layers
    # have such a row too, which is not equal.
    name: str
    members: tuple[int, ...]  # the positions of the rows

    @property
    def text(self) -> str:
        """The name, and how many rows it stands for if there are several."""
        return self.name if len(self.members) == 1 else f"{self.name}{SPACE}×{SPACE}{len(self.members)}"


def fold(paths: Sequence[str], kinds: Sequence[Hashable]) -> list[Fold]:
    """Folds rows whose paths, joined by '/', differ in the numbers of layers only, and that are of the same kind.

    Returns all rows, each once, in the order of the first row of each fold.
    """
    stems: dict[str, dict[Hashable, list[int]]] = {}
    for k, (path, kind) in enumerate(zip(paths, kinds, strict=True)):
        stem = "/".join(_COUNTER.sub(r"\1#", part) for part in path.split("/"))
        stems.setdefault(stem, {}).setdefault(kind, []).append(k)
    folds = []
    for by_kind in stems.values():
        every = [paths[k] for members in by_kind.values() for k in members]
        for members in by_kind.values():
            folds.append(Fold(_name([paths[k] for k in members], every), tuple(members)))
    return sorted(folds, key=lambda each: each.members[0])


def _name(paths: Sequence[str], every: Sequence[str]) -> str:
    """The common name of some paths, which lists numbers that only some of the paths of this stem have."""
    parts = []
    for part, some, others in zip(paths[0].split("/"), _numbers(paths), _numbers(every), strict=True):
        if len(some) > 1:
            listed = some if len(some) <= _MOST_LISTED else [*some[: _MOST_LISTED - 1], "…", some[-1]]
            some_only = "{" + ",".join(listed) + "}"
            part = _COUNTER.sub(rf"\g<1>{'*' if set(some) == set(others) else some_only}", part)
        parts.append(part)
    return "/".join(parts)


def _numbers(paths: Sequence[str]) -> list[list[str]]:
    """For each part of paths of one stem, the different numbers of layers in it, in their order."""
    columns = zip(*(path.split("/") for path in paths), strict=True)
    return [list(dict.fromkeys(match[2] for match in map(_COUNTER.search, parts) if match)) for parts in columns]
