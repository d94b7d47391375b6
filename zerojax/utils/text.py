"""Numbers, sizes, names and configurations as text: units that fit, whole names, rows for equal layers, no secrets."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

_COUNTER = re.compile(r"(^|_)(\d+)$")  # of one component of a path: 'layers/3', 'Block_3', but not 'conv1'
SPACE = "\u00a0"  # a space at which `wrapped` does not break a line
_MOST_LISTED = 3  # numbers of layers in a name
MASK = "***"
_SECRET = re.compile("key|token(?!iz)|secret|password", re.IGNORECASE)  # in a name; a tokenizer is none


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


def masked(value: Any, name: str = "") -> Any:
    """JSON data with `MASK` in place of each text whose name, or a name around it, is that of a key or a password."""
    return _masked(value, bool(_SECRET.search(name)))


def _masked(value: Any, is_secret: bool) -> Any:
    if isinstance(value, Mapping):
        return {name: _masked(item, is_secret or bool(_SECRET.search(str(name)))) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(item, is_secret) for item in value]
    return MASK if value and is_secret and isinstance(value, str) else value


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
    """Rows of equal layers that are shown as one.

    Attributes:
        name: the path, with '*' in place of the number of the layer: 'layers/*/kernel'. It is '{0,2,…,30}' instead if
            other layers have such a row too, which is not equal.
        members: the positions of the rows.
    """

    name: str
    members: tuple[int, ...]

    @property
    def text(self) -> str:
        """The name, and how many rows it stands for if there are several."""
        return self.name if len(self.members) == 1 else f"{self.name}{SPACE}×{SPACE}{len(self.members)}"


def fold(paths: Sequence[str], kinds: Sequence[Hashable]) -> list[Fold]:
    """Folds rows whose paths differ in the numbers of layers only, and that are of the same kind.

    Args:
        paths: keys joined by '/'.
        kinds: what else the rows show; only rows with an equal one are folded.

    Returns:
        All rows, each once, in the order of the first row of each fold.
    """
    numbers = [[match and match[2] for match in map(_COUNTER.search, path.split("/"))] for path in paths]
    stems: dict[str, dict[Hashable, list[int]]] = {}
    for k, (path, kind) in enumerate(zip(paths, kinds, strict=True)):
        stem = "/".join(_COUNTER.sub(r"\1#", part) for part in path.split("/"))
        stems.setdefault(stem, {}).setdefault(kind, []).append(k)
    folds = []
    for by_kind in stems.values():
        every = _numbers(numbers, [k for members in by_kind.values() for k in members])
        for members in by_kind.values():
            found = _numbers(numbers, members)
            folds.append(Fold(_name(paths[members[0]], found, every), tuple(members)))
    return sorted(folds, key=lambda each: each.members[0])


def _numbers(numbers: Sequence[Sequence[str | None]], members: Sequence[int]) -> list[list[str | None]]:
    """The numbers of layers at each position of some paths."""
    return [list(dict.fromkeys(column)) for column in zip(*(numbers[k] for k in members), strict=True)]


def _name(path: str, found: Sequence[Sequence[str | None]], every: Sequence[Sequence[str | None]]) -> str:
    """The common name of some rows, which lists numbers that only some of the rows of this stem have."""
    parts = []
    for part, some, all_numbers in zip(path.split("/"), found, every, strict=True):
        if len(some) > 1:
            texts = [str(number) for number in some]
            listed = texts if len(texts) <= _MOST_LISTED else [*texts[: _MOST_LISTED - 1], "…", texts[-1]]
            some_only = "{" + ",".join(listed) + "}"
            part = _COUNTER.sub(rf"\g<1>{'*' if set(some) == set(all_numbers) else some_only}", part)
        parts.append(part)
    return "/".join(parts)
