"""Collectives in the text of a program compiled for GPUs, weighted by the trip counts of the loops around them."""

import math
import re
from typing import NamedTuple

_OPERATION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute", "collective-broadcast")
_GROUPS = re.compile(r"replica_groups=(?:\{\{([\d,]+)\}|\[\d+,(\d+)\]|mesh\[([^\]]+)\] \{([^}]+)\})")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|branch_computations)=(\{[^}]*\}|%?[\w.\-]+)")


class Collective(NamedTuple):
    kind: str
    dtype: str
    size: int  # elements of the full operand or result
    count: int  # trips
    group: int  # devices that take part together

    def sent(self, num_devices: int) -> float:
        factor = 2 if self.kind == "all-reduce" else 1
        return factor * self.size * (num_devices - 1) / num_devices * self.count


def collectives(text: str, num_devices: int) -> list[Collective]:
    """Raises on a loop that communicates and whose trip count is not in the text."""
    computations, entry = _computations(text)
    found: list[Collective] = []
    _walk(computations, entry, 1, num_devices, found)
    return found


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    computations: dict[str, list[str]] = {}
    entry = current = None
    for line in text.splitlines():
        header = re.match(r"^(ENTRY )?%?([\w.\-]+) .*\{$", line)
        if header and not line.startswith(" "):
            current = header.group(2)
            computations[current] = []
            entry = current if header.group(1) else entry
        elif current is not None:
            computations[current].append(line)
    assert entry is not None, "no ENTRY computation in the program"
    return computations, entry


def _walk(computations, name, times, num_devices, found):
    for line in computations[name]:
        match = _OPERATION.match(line)
        if not match:
            continue
        _, result, op, rest = match.groups()
        kind = op.removesuffix("-start")
        if kind in _KINDS:
            found += _read(kind, op, result, times, _group_size(rest) or num_devices)
            continue
        trips = times
        called = [c for group in _CALLED.findall(rest) for c in re.findall(r"[\w.\-]+", group)]
        if op == "while":
            known = re.search(r"known_trip_count\W+n\W+(\d+)", rest)
            if known:
                trips = times * int(known.group(1))
            else:
                inner: list[Collective] = []
                for c in called:
                    _walk(computations, c, 1, num_devices, inner)
                assert not inner, f"loop {name} communicates and its trip count is unknown"
        for c in called:
            if c in computations:
                _walk(computations, c, trips, num_devices, found)


def _group_size(rest: str) -> int | None:
    """Of `{{0,2},{1,3}}`, of `[2,2]<=[4]`, which counts groups and members, or of `mesh['a'=2,'b'=2] {'a'}`."""
    match = _GROUPS.search(rest)
    if match is None:
        return None
    listed, size, mesh, named = match.groups()
    if mesh:
        sizes = dict(axis.split("=") for axis in mesh.split(","))
        return math.prod(int(sizes[name]) for name in named.split(","))
    return len(listed.split(",")) if listed else int(size)


def _read(kind, op, result, times, group):
    """A start's type lists operands and results; together they are full x (1 + 1/N)."""
    by_dtype: dict[str, float] = {}
    for dtype, dims in _SHAPE.findall(result):
        by_dtype[dtype] = by_dtype.get(dtype, 0) + math.prod(int(d) for d in dims.split(",") if d)
    for dtype, size in by_dtype.items():
        if op.endswith("-start") and kind in ("all-gather", "reduce-scatter"):
            size = size * group / (group + 1)
        elif kind == "reduce-scatter":
            size = size * group
        yield Collective(kind, dtype, round(size), times, group)
