"""Reads the compiler's buffer assignment, and sorts the bytes at the moment of peak memory by what they hold.

XLA places the temporaries of a program in one allocation, each with an offset and a live range. With `xla_dump_to` it
writes this assignment to a file, for GPUs, TPUs and CPUs alike.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from zerojax.analysis.hlo import Computation, Instruction, Program, fusion_results, has_product, source
from zerojax.analysis.liveness import ACTIVATIONS, CHECKPOINTS, GATHERED, GRADIENTS

UNUSED = "not in use then"


class LiveBuffer(NamedTuple):
    """A live value of the allocation: result `path` of an instruction, and its bytes that no other value shares."""

    instruction: str
    path: tuple[int, ...]
    num_bytes: int


class BufferAssignment(NamedTuple):
    """The temporaries of a program on one device, and those that are alive at the moment of peak memory.

    `schedule` has the names of all instructions in order, including those of loop bodies.
    """

    allocated_bytes: int
    peak_instruction: str
    live: tuple[LiveBuffer, ...]
    schedule: tuple[str, ...] = ()
    host_bytes: int = 0

    @property
    def unused_bytes(self) -> int:
        """The bytes of the allocation that are not in use at the moment of peak memory."""
        return self.allocated_bytes - sum(value.num_bytes for value in self.live)


_VALUE = re.compile(r"^ value: <\d+ ([\w.\-]+)(\{[\d,]*\})?(?: \(phi\))? @0> \(size=(\d+),offset=(\d+)\)", re.MULTILINE)
_RANGE = re.compile(r"^    ([\w.\-]+)(\{[\d,]*\}):(\d+)-(\d+)$", re.MULTILINE)
_SEQUENCE = re.compile(r"^    \d+:([\w.\-]+)$", re.MULTILINE)
_IN_HOST = re.compile(r"size (\d+), (?:page \d+, )?color 5, (?:page \d+, )?preallocated-temp")
_MIN_BYTES = 1024  # smaller values, such as tables of addresses, may have no live range


def dump_files(folder: Path) -> dict[str, Path]:
    """The files that a compiler wrote, under the names 'buffers.txt' and 'ranges.txt', or {} if missing."""
    assignments = list(folder.glob("*buffer-assignment.txt"))
    ranges = [each.with_name(each.name.replace("buffer-assignment", "live-range")) for each in assignments]
    if len(assignments) != 1 or not ranges[0].exists():
        return {}
    return {"buffers.txt": assignments[0], "ranges.txt": ranges[0]}


def read_dump(folder: Path) -> BufferAssignment:
    """The buffer assignment of the only program in a dump. ValueError if missing or not understood."""
    texts = [file.read_text() for file in dump_files(folder).values()]
    if not texts:
        found = sorted(file.name for file in folder.iterdir())
        raise ValueError(f"buffers: the compiler wrote no buffer assignment\n  got:      {found[:8]}")
    return parse_assignment(*texts)


def parse_assignment(assignment: str, live_ranges: str) -> BufferAssignment:
    """Parses the compiler's text of allocations and of the values in each, and the text of their live ranges.

    Raises:
        ValueError: if there are several allocations of temporaries in device memory, or if a value has no live range.
    """
    allocations = re.split(r"^allocation \d+: ", assignment, flags=re.MULTILINE)[1:]
    temporaries = [each for each in allocations if re.match(r"size \d+, (page \d+, )?preallocated-temp", each)]
    if not allocations or len(temporaries) > 1:
        raise ValueError(f"buffers: {len(temporaries)} allocations of temporaries\n  got:      {assignment[:160]!r}")
    host_bytes = sum(int(found.group(1)) for found in map(_IN_HOST.match, allocations) if found)
    if not temporaries:
        return BufferAssignment(0, "", (), (), host_bytes)
    # When each value begins and ends to be alive.
    ranges = {(name, path): (int(first), int(last)) for name, path, first, last in _RANGE.findall(live_ranges)}
    begins: dict[int, list[tuple[str, str, int, int]]] = defaultdict(list)
    ends: dict[int, list[tuple[str, str, int, int]]] = defaultdict(list)
    for name, path, size, offset in _VALUE.findall(temporaries[0]):
        value = name, path or "{}", int(size), int(offset)
        if value[:2] in ranges:
            first, last = ranges[value[:2]]
            begins[first].append(value)
            ends[last].append(value)
        elif int(size) >= _MIN_BYTES:
            raise ValueError(f"buffers: {name}{path} has no live range\n  got:      {size} bytes")
    # The moment at which most is alive.
    peak: tuple[int, int, list[LiveBuffer]] = (0, 0, [])
    alive: set[tuple[str, str, int, int]] = set()
    for time in sorted({*begins, *ends}):
        alive |= set(begins[time])
        live = list(_live_buffers(alive))
        num_bytes = sum(value.num_bytes for value in live)
        if num_bytes > peak[0]:
            peak = num_bytes, time, live
        alive -= set(ends[time])
    schedule = tuple(_SEQUENCE.findall(live_ranges))
    if peak[1] >= len(schedule):
        raise ValueError(f"buffers: a live range is outside the schedule\n  got:      {peak[1]} of {len(schedule)}")
    allocated = int(re.match(r"size (\d+)", temporaries[0]).group(1))  # pyright: ignore[reportOptionalMemberAccess]
    return BufferAssignment(allocated, schedule[peak[1]], tuple(peak[2]), schedule, host_bytes)


def _live_buffers(alive: set[tuple[str, str, int, int]]) -> Iterator[LiveBuffer]:
    """Values by offset. An array that is updated in place shares its memory with the operand: it counts once."""
    end = 0
    for name, path, size, offset in sorted(alive, key=lambda value: (value[3], -value[2], value[:2])):
        if offset + size > end:
            yield LiveBuffer(name, _path(path), offset + size - max(offset, end))
            end = offset + size


def _path(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.strip("{}").split(",") if n)


def by_kind(assignment: BufferAssignment, program: Program) -> Counter[str]:
    """The bytes at the moment of peak memory by kind, with the names of `liveness`, and the unused bytes.

        gathered        results of all_gathers, and values computed from one element by element
        gradients       operands and results of reductions over devices, and their sums and stacks
        checkpoints     values that wait for the loop that runs at that moment
        activations     all others

    Raises:
        ValueError: if a value belongs to an instruction that the program does not have.
    """
    graph = _ValueGraph(program, assignment.schedule)
    kinds: Counter[str] = Counter()
    for value in assignment.live:
        kinds[graph.kind(value, assignment.peak_instruction)] += value.num_bytes
    kinds[UNUSED] = assignment.unused_bytes
    return +kinds


Node = tuple[Instruction, tuple[int, ...]]  # a result of an instruction; of a loop, the carried value at that path
_CALLS = ("call", "async-start")
_VIEWS = frozenset(["bitcast", "opt-barrier", "optimization-barrier"])
_MOVES = frozenset(["convert", "copy", "copy-start", "pad", "reshape", "slice", "transpose"])
_SUMS = frozenset(["add", "broadcast", "constant", "multiply", "parameter", "select", "subtract"])


class _ValueGraph:
    """The values of a program, each with the kind of values that it is computed from."""

    def __init__(self, program: Program, schedule: tuple[str, ...]):
        self.schedule = schedule
        self.locations: dict[str, tuple[Instruction, Computation]] = {}
        self.callers: dict[Computation, Instruction] = {}
        self._add(program.entry)
        self.reduced: set[Node] = set()
        for i, _ in list(self.locations.values()):
            core = _collective(i)
            if core and not _is_gather(core) and i.op != "while":
                in_rows = core.op.startswith("collective-permute")
                for operand in i.operands:
                    self._mark_reduced((operand, ()), in_rows)
        self.known: dict[Node, str | None] = {}

    def _add(self, computation: Computation) -> None:
        for i in computation.instructions:
            self.locations[i.name] = i, computation
            if i.op in ("while", *_CALLS, "conditional"):
                for inner in i.computations:
                    self.callers[inner] = i
                    self._add(inner)

    def kind(self, value: LiveBuffer, moment: str) -> str:
        node = self._resolved((self._instruction(value.instruction), value.path))
        if kind := self._kind_of(node) or (GRADIENTS if node in self.reduced else None):
            return kind
        return CHECKPOINTS if self._is_checkpoint(node, moment) else ACTIVATIONS

    def _instruction(self, name: str) -> Instruction:
        """The instruction with a name; of one inside an asynchronous one, which the text of a program does not have,
        the one that starts it, which is the next in the schedule.
        """
        for scheduled in self.schedule[self.schedule.index(name) :] if name in self.schedule else [name]:
            if scheduled in self.locations:
                return self.locations[scheduled][0]
        raise ValueError(f"buffers: the program has no instruction {name!r}, to which a buffer is assigned")

    def _is_checkpoint(self, node: Node, moment: str) -> bool:
        """Whether a value was computed before the loop that runs at that moment, or in an earlier loop."""
        now = self.locations[self._instruction(moment).name][1]
        if node[0].op != "while":
            return self.locations[node[0].name][1] is not now
        if node[0] is not self.callers.get(now):
            return True
        last = self._after_iteration(node)
        return last == node or (last is not None and _update_of(last) is not None)

    def _after_iteration(self, node: Node) -> Node | None:
        """The value that a loop carries at a path when an iteration ends."""
        loop, path = node
        (body,) = loop.called["body"]
        return self._resolved((body.root, path)) if path else None

    def _resolved(self, node: Node) -> Node:
        """Traces a value back through tuples, views and the ends of asynchronous operations to where it is computed."""
        i, path = node
        while True:
            if i.op == "get-tuple-element":
                i, path = i.operands[0], (i.index, *path)
            elif i.op == "tuple" and path:
                i, path = i.operands[path[0]], path[1:]
            elif i.op in _VIEWS and i.operands:
                i = i.operands[0]
            elif i.op.endswith("-done"):
                i, path = i.operands[0], ()
            elif i.op == "parameter" and self.locations.get(i.name, (i, None))[1] in self.callers:
                caller = self.callers[self.locations[i.name][1]]  # pyright: ignore[reportArgumentType]
                if caller.op == "while":
                    return caller, path
                if caller.op not in _CALLS:
                    return i, path
                i = caller.operands[i.number]
            else:
                return i, path

    def _kind_of(self, node: Node) -> str | None:
        """GATHERED or GRADIENTS for values computed from all_gathers or reductions, or None for all others."""
        node = self._resolved(node)
        if node in self.known:
            return self.known[node]
        self.known[node] = None  # ends the recursion for values that a loop carries
        self.known[node] = kind = self._find_kind(node)
        return kind

    def _find_kind(self, node: Node) -> str | None:
        i, path = node
        core = _collective(i)
        if core:
            return GATHERED if _is_gather(core) else GRADIENTS
        if i.op == "while":
            last = self._after_iteration(node)
            return (self._kind_of((i.operands[0], path)) or self._kind_of(last)) if last else None
        if update := _update_of(node):
            return self._kind_of((update, ()))
        if _consists_of(_MOVES, node):
            return self._kind_of((max(i.operands, key=lambda operand: operand.num_bytes), ()))
        if _consists_of(_MOVES | _SUMS, node):
            alike = [o for o in i.operands if _num_elements(o) == _num_elements(i, path)]
            return GRADIENTS if any(self._kind_of((o, ())) == GRADIENTS for o in alike) else None
        return None

    def _mark_reduced(self, node: Node, in_rows: bool = False) -> None:
        """Marks an operand of a reduction, and the values that it is computed from element by element.

        With `in_rows`, it is a row of them, and they are marked too: permutations around a ring sum row after row.
        """
        node = self._resolved(node)
        if node in self.reduced:
            return
        self.reduced.add(node)
        i, path = node
        if i.op == "while":
            self._mark_reduced((i.operands[0], path))
            if last := self._after_iteration(node):
                self._mark_reduced(last)
        elif i.op == "tuple":
            for operand in i.operands:
                self._mark_reduced((operand, ()))
        elif _consists_of(_MOVES | _SUMS | ({"dynamic-slice"} if in_rows else set()), node):
            for operand in i.operands:
                size, own = _num_elements(operand), _num_elements(i, path)
                if size == own or (in_rows and size > own):
                    self._mark_reduced((operand, ()), in_rows and size == own)


def _collective(i: Instruction) -> Instruction | None:
    """The collective that an instruction is, starts, or contains in a fusion without products, or None."""
    if re.match(r"(all-gather|all-reduce|collective-permute|reduce-scatter)(-start)?$", i.op):
        return i
    if i.op in ("async-start", "fusion") and not has_product(i):
        return next((core for core in map(_collective, i.inner) if core), None)
    return None


def _is_gather(core: Instruction) -> bool:
    """Whether the step has an all_gather here. XLA for TPUs may turn it into an all-reduce, but its name remains."""
    return core.op.startswith("all-gather") or bool(re.search(r'op_name="[^"]*/all_gather"', core.attributes))


def _root(node: Node) -> Instruction:
    """The instruction that computes a value; of a fusion, the one inside it."""
    i, path = node
    if i.op != "fusion":
        return i
    found = fusion_results(i.called["calls"][0].root)
    return found[path[0]] if path and path[0] < len(found) else found[0]


def _update_of(node: Node) -> Instruction | None:
    """The operand that an instruction writes into a larger array in place, or None."""
    root = source(_root(node), _VIEWS | {"copy"})
    if root.op != "dynamic-update-slice":
        return None
    update = source(root.operands[1], _VIEWS | _MOVES)
    return node[0].operands[update.number] if update.op == "parameter" and node[0].op == "fusion" else update


def _consists_of(ops: frozenset[str], node: Node) -> bool:
    """Whether a value is computed from operands by these operations only."""
    i, _ = node
    if i.op != "fusion":
        return i.op in ops and i.op != "parameter" and bool(i.operands)
    inner = (*ops, *_VIEWS, "constant", "get-tuple-element", "parameter", "tuple")
    return all(j.op in inner for j in i.inner)


def _num_elements(i: Instruction, path: tuple[int, ...] = ()) -> int:
    return math.prod(i.buffers[path[0] if path and path[0] < len(i.buffers) else 0].dims) if i.buffers else 0
