"""What the compiler's own buffer plan holds at the fullest moment of a step, and what each of it is.

A compiler lays the temporaries of a program into one allocation, each at an offset and from one instruction to another.
It writes this plan beside the program where it is asked to (`xla_dump_to`), for GPUs, TPUs and CPUs alike.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from zerojax.analysis.hlo import Computation, Instruction, Program, attribute
from zerojax.analysis.hlo_collectives import multiplies, results
from zerojax.analysis.liveness import ACTIVATIONS, CHECKPOINTS, GATHERED, GRADIENTS

UNUSED = "not in use then"


class Placed(NamedTuple):
    """A value in the allocation: result `path` of an instruction, and the bytes of it that no larger one lies over."""

    instruction: str
    path: tuple[int, ...]
    num_bytes: int


class Buffers(NamedTuple):
    """The temporaries of a program on one device.

    Attributes:
        allocated_bytes: of the allocation that holds them.
        moment: the instruction at which most of it is in use.
        placed: what is in use then.
        schedule: names of all instructions, those of loops in place.
    """

    allocated_bytes: int
    moment: str
    placed: tuple[Placed, ...]
    schedule: tuple[str, ...] = ()

    @property
    def unused_bytes(self) -> int:
        """Of the allocation, at its fullest moment: between what is in use."""
        return self.allocated_bytes - sum(value.num_bytes for value in self.placed)


_VALUE = re.compile(r"^ value: <\d+ ([\w.\-]+)(\{[\d,]*\})?(?: \(phi\))? @0> \(size=(\d+),offset=(\d+)\)", re.MULTILINE)
_RANGE = re.compile(r"^    ([\w.\-]+)(\{[\d,]*\}):(\d+)-(\d+)$", re.MULTILINE)
_SEQUENCE = re.compile(r"^    \d+:([\w.\-]+)$", re.MULTILINE)
_LEAST_BYTES = 1024  # what is smaller may have no range: tables of addresses


def files(folder: Path) -> dict[str, Path]:
    """The plan that a compiler left in a folder: 'buffers.txt' and 'ranges.txt'. Empty if there is not one."""
    plans = list(folder.glob("*buffer-assignment.txt"))
    ranges = [each.with_name(each.name.replace("buffer-assignment", "live-range")) for each in plans]
    if len(plans) != 1 or not ranges[0].exists():
        return {}
    return {"buffers.txt": plans[0], "ranges.txt": ranges[0]}


def dumped(folder: Path) -> Buffers:
    """The plan of the one program whose compiler was told to leave it in a folder.

    Raises:
        ValueError: it is not there, or not understood.
    """
    texts = [file.read_text() for file in files(folder).values()]
    if not texts:
        there = sorted(file.name for file in folder.iterdir())
        raise ValueError(f"buffers: the compiler left no plan of its buffers\n  got:      {there[:8]}")
    return read(*texts)


def read(assignment: str, live_ranges: str) -> Buffers:
    """The plan in the texts of a compiler.

    Args:
        assignment: allocations, and the values in each with offset and size.
        live_ranges: the instructions in the order of the schedule, and from which to which each value lives.

    Raises:
        ValueError: no allocation of temporaries in the memory of the device, or a value in it whose range is missing.
    """
    allocations = re.split(r"^allocation \d+: ", assignment, flags=re.MULTILINE)[1:]
    temporaries = [each for each in allocations if re.match(r"size \d+, (page \d+, )?preallocated-temp", each)]
    if not allocations or len(temporaries) > 1:
        raise ValueError(f"buffers: {len(temporaries)} allocations of temporaries\n  got:      {assignment[:160]!r}")
    if not temporaries:
        return Buffers(0, "", ())
    ranges = {(name, path): (int(first), int(last)) for name, path, first, last in _RANGE.findall(live_ranges)}
    begins: dict[int, list[tuple[str, str, int, int]]] = defaultdict(list)
    ends: dict[int, list[tuple[str, str, int, int]]] = defaultdict(list)
    for name, path, size, offset in _VALUE.findall(temporaries[0]):
        value = name, path or "{}", int(size), int(offset)
        if value[:2] in ranges:
            first, last = ranges[value[:2]]
            begins[first].append(value)
            ends[last].append(value)
        elif int(size) >= _LEAST_BYTES:
            raise ValueError(f"buffers: from when to when is {name}{path} alive?\n  got:      {size} bytes, no range")
    fullest: tuple[int, int, list[Placed]] = (0, 0, [])
    alive: set[tuple[str, str, int, int]] = set()
    for time in sorted({*begins, *ends}):
        alive |= set(begins[time])
        placed = list(_placed(alive))
        num_bytes = sum(value.num_bytes for value in placed)
        if num_bytes > fullest[0]:
            fullest = num_bytes, time, placed
        alive -= set(ends[time])
    schedule = tuple(_SEQUENCE.findall(live_ranges))
    if fullest[1] >= len(schedule):
        raise ValueError(f"buffers: a range ends after the schedule\n  got:      {fullest[1]} of {len(schedule)}")
    allocated = int(re.match(r"size (\d+)", temporaries[0]).group(1))  # pyright: ignore[reportOptionalMemberAccess]
    return Buffers(allocated, schedule[fullest[1]], tuple(fullest[2]), schedule)


def _placed(alive: set[tuple[str, str, int, int]]) -> Iterator[Placed]:
    """Values in the order of their offsets. What is updated in place lies where its operand does: it counts once."""
    end = 0
    for name, path, size, offset in sorted(alive, key=lambda value: (value[3], -value[2], value[:2])):
        if offset + size > end:
            yield Placed(name, _path(path), offset + size - max(offset, end))
            end = offset + size


def _path(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.strip("{}").split(",") if n)


def by_kind(buffers: Buffers, program: Program) -> Counter[str]:
    """Bytes of the fullest moment by what they are, as `liveness` names them, and those that are not in use then.

        gathered        results of gathers, and what is made of one element by element
        gradients       what is reduced over devices, or results of that, or their sums and stacks
        checkpoints     what waits around the loop that runs at that moment
        activations     the rest

    Raises:
        ValueError: a value of an instruction that the program does not have.
    """
    graph = _Graph(program, buffers.schedule)
    kinds: Counter[str] = Counter()
    for value in buffers.placed:
        kinds[graph.kind(value, buffers.moment)] += value.num_bytes
    kinds[UNUSED] = buffers.unused_bytes
    return +kinds


Node = tuple[Instruction, tuple[int, ...]]  # a result of an instruction; of a loop: what it carries at that place
_CALLS = ("call", "async-start")
_VIEWS = frozenset(["bitcast", "opt-barrier", "optimization-barrier"])
_MOVES = frozenset(["convert", "copy", "copy-start", "pad", "reshape", "slice", "transpose"])
_SUMS = frozenset(["add", "broadcast", "constant", "multiply", "parameter", "select", "subtract"])


class _Graph:
    """What the values of a program are made of."""

    def __init__(self, program: Program, schedule: tuple[str, ...]):
        self.schedule = schedule
        self.where: dict[str, tuple[Instruction, Computation]] = {}
        self.caller: dict[Computation, Instruction] = {}
        self._add(program.entry)
        self.reduced: set[Node] = set()
        for i, _ in list(self.where.values()):
            core = _collective(i)
            if core and not _gathers(core) and i.op != "while":
                for operand in i.operands:
                    self._comes_from((operand, ()))
        self.known: dict[Node, str | None] = {}

    def _add(self, computation: Computation) -> None:
        for i in computation.instructions:
            self.where[i.name] = i, computation
            if i.op in ("while", *_CALLS, "conditional"):
                for inner in (c for role in i.called.values() for c in role):
                    self.caller[inner] = i
                    self._add(inner)

    def kind(self, value: Placed, moment: str) -> str:
        node = self._resolved((self._instruction(value.instruction), value.path))
        kind = self._made_of(node)
        if kind is None and node in self.reduced:
            kind = GRADIENTS
        return kind or (CHECKPOINTS if self._waits(node, moment) else ACTIVATIONS)

    def _instruction(self, name: str) -> Instruction:
        """With that name; of one inside an asynchronous one, which texts of programs hide, that which starts it."""
        for there in self.schedule[self.schedule.index(name) :] if name in self.schedule else [name]:
            if there in self.where:
                return self.where[there][0]
        raise ValueError(f"buffers: {name!r} is planned, and not in the program")

    def _waits(self, node: Node, moment: str) -> bool:
        """Whether it was made before the loop that runs at that moment, or in an earlier loop."""
        now = self.where[self._instruction(moment).name][1]
        if node[0].op != "while":
            return self.where[node[0].name][1] is not now
        if node[0] is not self.caller.get(now):
            return True
        last = self._after_iteration(node)
        return last == node or (last is not None and _updated(last) is not None)

    def _after_iteration(self, node: Node) -> Node | None:
        """What a loop carries at a place when an iteration ends."""
        loop, path = node
        (body,) = loop.called["body"]
        return self._resolved((body.root, path)) if path else None

    def _resolved(self, node: Node) -> Node:
        """Where a value was made: behind tuples, views and the ends of what is asynchronous."""
        i, path = node
        while True:
            if i.op == "get-tuple-element":
                i, path = i.operands[0], (int(attribute(r"index=(\d+)", i)), *path)
            elif i.op == "tuple" and path:
                i, path = i.operands[path[0]], path[1:]
            elif i.op in _VIEWS and i.operands:
                i = i.operands[0]
            elif i.op.endswith("-done"):
                i, path = i.operands[0], ()
            elif i.op == "parameter" and self.where.get(i.name, (i, None))[1] in self.caller:
                caller = self.caller[self.where[i.name][1]]  # pyright: ignore[reportArgumentType]
                if caller.op == "while":
                    return caller, path
                number = re.match(r"\s*(\d+)", i.attributes)
                if caller.op not in _CALLS or number is None:
                    return i, path
                i = caller.operands[int(number.group(1))]
            else:
                return i, path

    def _made_of(self, node: Node) -> str | None:
        """Whether a value is gathered, or a sum over devices."""
        node = self._resolved(node)
        if node in self.known:
            return self.known[node]
        self.known[node] = None  # a loop carries it around
        self.known[node] = kind = self._look(node)
        return kind

    def _look(self, node: Node) -> str | None:
        i, path = node
        core = _collective(i)
        if core:
            return GATHERED if _gathers(core) else GRADIENTS
        if i.op == "while":
            last = self._after_iteration(node)
            return (self._made_of((i.operands[0], path)) or self._made_of(last)) if last else None
        if update := _updated(node):
            return self._made_of((update, ()))
        if _only(_MOVES, node):
            return self._made_of((_largest(i), ()))
        if _only(_MOVES | _SUMS, node):
            alike = [o for o in i.operands if _elements(o) == _elements(i, path)]
            return GRADIENTS if any(self._made_of((o, ())) == GRADIENTS for o in alike) else None
        return None

    def _comes_from(self, node: Node) -> None:
        """Marks what a reduction reads, and what that is made of element by element."""
        node = self._resolved(node)
        if node in self.reduced:
            return
        self.reduced.add(node)
        i, path = node
        if i.op == "while":
            self._comes_from((i.operands[0], path))
            if last := self._after_iteration(node):
                self._comes_from(last)
        elif i.op == "tuple":
            for operand in i.operands:
                self._comes_from((operand, ()))
        elif _only(_MOVES | _SUMS, node):
            for operand in i.operands:
                if _elements(operand) == _elements(i, path):
                    self._comes_from((operand, ()))


def _collective(i: Instruction) -> Instruction | None:
    """The collective that an instruction is, starts, or holds in a fusion that computes nothing else."""
    if re.match(r"(all-gather|all-reduce|reduce-scatter)(-start)?$", i.op):
        return i
    if i.op in ("async-start", "fusion") and not multiplies(i):
        return next((core for core in map(_collective, i.inner) if core), None)
    return None


def _gathers(core: Instruction) -> bool:
    """By what the step says: XLA for TPUs makes all-reduces of gathers."""
    return core.op.startswith("all-gather") or bool(re.search(r'op_name="[^"]*/all_gather"', core.attributes))


def _root(node: Node) -> Instruction:
    """Of a fusion, what makes that result of it."""
    i, path = node
    if i.op != "fusion":
        return i
    made = results(i.called["calls"][0].root)
    return made[path[0]] if path and path[0] < len(made) else made[0]


def _updated(node: Node) -> Instruction | None:
    """What is written into a larger array in place, as the operand that it comes from."""
    root = _root(node)
    while root.op in (*_VIEWS, "copy") and root.operands:
        root = root.operands[0]
    if root.op != "dynamic-update-slice":
        return None
    update = root.operands[1]
    while update.op in (*_VIEWS, *_MOVES) and update.operands:
        update = update.operands[0]
    if update.op == "parameter" and node[0].op == "fusion":
        number = re.match(r"\s*(\d+)", update.attributes)
        return node[0].operands[int(number.group(1))] if number else None
    return update


def _only(ops: frozenset[str], node: Node) -> bool:
    """Whether it is nothing but these, from its operands on."""
    i, _ = node
    if i.op != "fusion":
        return i.op in ops and i.op != "parameter" and bool(i.operands)
    inner = (*ops, *_VIEWS, "constant", "get-tuple-element", "parameter", "tuple")
    return all(j.op in inner for j in i.inner)


def _largest(i: Instruction) -> Instruction:
    return max(i.operands, key=lambda operand: operand.num_bytes)


def _elements(i: Instruction, path: tuple[int, ...] = ()) -> int:
    return math.prod(i.buffers[path[0] if path and path[0] < len(i.buffers) else 0].dims) if i.buffers else 0
