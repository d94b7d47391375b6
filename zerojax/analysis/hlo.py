"""Reads the HLO text of a compiled program: its computations, its scheduled instructions, and their trip counts.

`parse_program(compiled.as_text())` is the program that each device runs. Text that is not understood is a ValueError.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

HOST = 5  # the memory space of pinned host memory
# XLA for GPUs annotates a slice with its place if that follows from the number of the iteration. Copy engines copy such
# a slice; another one is a kernel.
SLICE_ANNOTATION = '"dynamic_slice_config":'


def element_bits(dtype: str) -> int:
    """The bits of an element, from the dtype's name in HLO: 'bf16', 'f8e4m3fn', 's4', 'pred', 'token'."""
    return {"token": 0, "pred": 8}[dtype] if dtype in ("token", "pred") else int(re.findall(r"\d+", dtype)[0])


class Buffer(NamedTuple):
    """An array that an instruction returns. Its `space` is 0 for device memory and `HOST` for host memory.

    `order` has the dims from the one whose elements are adjacent in memory; it is () if the text has no layout.
    """

    dtype: str
    dims: tuple[int, ...]
    space: int
    order: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        return (math.prod(self.dims) * element_bits(self.dtype) + 7) // 8


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
    """Instructions in scheduled order (inside a fusion: in the order of definition), and the one that is the result."""

    name: str
    instructions: tuple[Instruction, ...]
    root: Instruction


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """An instruction. `called` maps roles ('body', 'calls', 'to_apply') to computations; tuples have flat `buffers`."""

    name: str
    op: str
    buffers: tuple[Buffer, ...]
    operands: tuple[Instruction, ...]
    called: Mapping[str, tuple[Computation, ...]]
    attributes: str

    @property
    def num_bytes(self) -> int:
        return sum(buffer.num_bytes for buffer in self.buffers)

    @property
    def computations(self) -> list[Computation]:
        """All computations that this instruction calls."""
        return [computation for role in self.called.values() for computation in role]

    @property
    def inner(self) -> list[Instruction]:
        """The instructions of all computations that this one calls."""
        return [i for computation in self.computations for i in computation.instructions]

    @property
    def number(self) -> int:
        """The number of a parameter."""
        return int(attribute(r"^\s*(\d+)", self))

    @property
    def index(self) -> int:
        """The index of a get-tuple-element."""
        return int(attribute(r"\bindex=(\d+)", self))

    @property
    def target(self) -> str:
        """The target of a custom call."""
        return attribute(r'custom_call_target="([^"]*)"', self)

    def integers(self, name: str) -> list[int]:
        """The integers of an attribute such as `lhs_contracting_dims={1,2}`, or [] if it is missing."""
        match = re.search(rf"\b{name}=\{{([\d,]*)\}}", self.attributes)
        return [int(n) for n in match.group(1).split(",") if n] if match else []


class Program(NamedTuple):
    """The scheduled program of one of `num_devices` devices. `aliased` are the parameters that a result overwrites."""

    entry: Computation
    num_devices: int
    aliased: frozenset[int]


class Block(NamedTuple):
    """A sequence of instructions that runs `trips` times in a step, or None if the text does not say how often."""

    instructions: tuple[Instruction, ...]
    trips: int | None
    looped: bool
    running: frozenset[str] = frozenset()  # the chains of fusions (`chains`) of the computations that it is called from


def unsupported(instruction: Instruction, why: str) -> ValueError:
    """The error for an instruction that is not understood, to be raised by the caller."""
    got = f"{instruction.op} %{instruction.name} {instruction.attributes.lstrip('), ')}"
    return ValueError(f"hlo: {why}\n  got:      {got[:200]}")


def attribute(pattern: str, instruction: Instruction) -> str:
    """What the first group of a regular expression matches in the attributes of an instruction."""
    match = re.search(pattern, instruction.attributes)
    if match is None:
        raise unsupported(instruction, f"no attribute matches {pattern}")
    return match.group(1)


CHAIN = re.compile(r'chain_id="(\w+)"')
_HEADER = re.compile(r"(ENTRY )?%([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_BUFFER = re.compile(r"\b([a-z]\w*)\[([^\]]*)\](?:\{([^}]*)\})?")
_CALLED = re.compile(
    r"\b(body|branch_computations|called_computations|calls|condition|false_computation|scatter|select|to_apply|"
    r"true_computation)=(\{%[^}]*\}|%[\w.\-]+)"
)


def parse_program(text: str) -> Program:
    """Parses the text that `compiled.as_text()` returns, which has to be that of a scheduled program."""
    header, _, rest = text.partition("\n")
    if not header.startswith("HloModule") or "is_scheduled=true" not in header:
        raise ValueError(f"hlo: not the text of a scheduled program\n  got:      {header[:80]!r}")
    computations: dict[str, Computation] = {}
    scope: dict[str, Instruction] = {}
    entry = current = root = None
    for line in rest.splitlines():
        opened = _HEADER.match(line)
        if opened:
            entry = opened.group(2) if opened.group(1) else entry
            current, scope, root = opened.group(2), {}, None
        elif line.startswith("}") and current is not None:
            if root is None:
                raise ValueError(f"hlo: computation %{current} has no root")
            computations[current] = Computation(current, tuple(scope.values()), root)
            current = None
        elif current is not None and line.strip():
            is_root, instruction = _instruction(line, scope, computations)
            scope[instruction.name] = instruction
            root = instruction if is_root else root
    if entry is None:
        raise ValueError("hlo: the program has no ENTRY computation")
    counts = [re.search(rf"\b{name}=(\d+)", header) for name in ("replica_count", "num_partitions")]
    aliased = frozenset(int(number) for number in re.findall(r"\((\d+), \{[\d, ]*\}, \w+-alias\)", header))
    return Program(computations[entry], math.prod(int(count.group(1)) for count in counts if count), aliased)


def _instruction(
    line: str, scope: Mapping[str, Instruction], computations: Mapping[str, Computation]
) -> tuple[bool, Instruction]:
    match = _INSTRUCTION.match(line)
    if not match:
        raise ValueError(f"hlo: a line is not an instruction\n  got:      {line.strip()[:160]}")
    is_root, name, result, op, rest = match.groups()
    end = 0 if op in ("constant", "parameter") else _closing_parenthesis(rest)  # their attributes: a value, a number
    try:
        operands = tuple(scope[operand] for operand in re.findall(r"%([\w.\-]+)", rest[:end]))
        called = {
            role: tuple(computations[each] for each in re.findall(r"%([\w.\-]+)", names))
            for role, names in _CALLED.findall(rest[end:])
        }
    except KeyError as error:
        raise ValueError(f"hlo: {error} is used before it is defined\n  got:      %{name} = {op}") from error
    return bool(is_root), Instruction(name, op, _buffers(result, line), operands, called, rest[end:])


def _closing_parenthesis(text: str) -> int:
    """The index at which the parenthesis closes that is open at the start of the text."""
    depth = 1
    for match in re.finditer(r"[()]", text):
        depth += 1 if match.group() == "(" else -1
        if not depth:
            return match.start()
    raise ValueError(f"hlo: a parenthesis is not closed\n  got:      {text[:160]}")


def _buffers(result: str, line: str) -> tuple[Buffer, ...]:
    buffers = []
    for dtype, dims, layout in _BUFFER.findall(result):
        known = re.fullmatch(r"token|pred|[a-z]+\d+\w*", dtype) and re.fullmatch(r"(\d+(,\d+)*)?", dims)
        if not known:
            raise ValueError(f"hlo: an unknown type {dtype}[{dims}]\n  got:      {line.strip()[:160]}")
        space = re.search(r"S\((\d+)\)", layout)
        shape, order = (tuple(int(n) for n in part.split(",") if n) for part in (dims, layout.partition(":")[0]))
        buffers.append(Buffer(dtype, shape, int(space.group(1)) if space else 0, order))
    if not buffers and result != "()":
        raise ValueError(f"hlo: an instruction without a type\n  got:      {line.strip()[:160]}")
    return tuple(buffers)


def blocks(program: Program) -> list[Block]:
    """The entry computation and every loop body, called computation and branch, each with its trip count."""

    def visit(computation: Computation, trips: int | None, looped: bool, running: frozenset[str]) -> Iterator[Block]:
        yield Block(computation.instructions, trips, looped, running)
        inside = running | chains(computation.instructions)
        for i in computation.instructions:
            if i.op == "while":
                count = trip_count(i)
            elif i.op in ("call", "conditional"):
                count = 1 if i.op == "call" else None
            else:
                continue
            inner = None if count is None or trips is None else count * trips
            for called in i.computations:
                yield from visit(called, inner, looped or i.op == "while", inside)

    return list(visit(program.entry, 1, False, frozenset()))


def chains(instructions: Iterable[Instruction]) -> frozenset[str]:
    """The chains of fusions in which TPUs run collectives, by `chain_id`.

    A chain may begin before a loop and end after it, with a fusion in each of its iterations.
    """
    inside = (j for i in instructions if i.op == "fusion" for j in i.inner)
    return frozenset(match.group(1) for j in inside if (match := CHAIN.search(j.attributes)))


def trip_count(loop: Instruction) -> int | None:
    """The trip count of a `while`, from the compiler's note or from its counter, or None if it is unknown."""
    known = re.search(r"known_trip_count\W+n\W+(\d+)", loop.attributes)
    return int(known.group(1)) if known else _trips_from_counter(loop)


def _trips_from_counter(loop: Instruction) -> int | None:
    """The trips of `while counter < limit: counter += step` if all three are constants, as in programs for TPUs."""
    (condition,), (body,) = loop.called["condition"], loop.called["body"]
    test, (start,) = condition.root, loop.operands
    if test.op != "compare" or "direction=LT" not in test.attributes or body.root.op != "tuple" or start.op != "tuple":
        return None
    counter = source(test.operands[0], _COPIES)
    if counter.op != "get-tuple-element":
        return None
    update = source(body.root.operands[counter.index], _COPIES)
    if update.op != "add":
        return None
    old, step = (source(i, _COPIES) for i in update.operands)
    if old.op != "get-tuple-element" or old.index != counter.index:
        return None
    first, last, step = map(_constant, (start.operands[counter.index], test.operands[1], step))
    if first is None or last is None or step is None or step <= 0:
        return None
    return max(0, -(-(last - first) // step))


_COPIES = frozenset(["bitcast", "copy"])


def source(i: Instruction, ops: Collection[str], stop: Collection[Instruction] = ()) -> Instruction:
    """Follows the first operand through operations of some kinds, such as copies."""
    while i.op in ops and i.operands and i not in stop:
        i = i.operands[0]
    return i


def _constant(i: Instruction) -> int | None:
    """The value of an integer constant, or None for any other instruction."""
    i = source(i, _COPIES)
    value = re.match(r"(-?\d+)\)", i.attributes)
    return int(value.group(1)) if value and i.op == "constant" else None


def trips_of(block: Block, instruction: Instruction) -> int:
    """How often an instruction of the block runs. Raises ValueError if the text does not say."""
    if block.trips is None:
        raise unsupported(instruction, "this is in a branch, or in a loop whose trip count is not in the text")
    return block.trips


def has_product(instruction: Instruction) -> bool:
    """Whether an instruction is a matrix product or contains one."""
    if instruction.op in ("convolution", "dot", "ragged-dot"):
        return True
    if instruction.op == "custom-call" and re.match(r"__cublas\$|__cudnn\$", instruction.target):
        return True
    return any(has_product(i) for i in instruction.inner)


def fusion_results(root: Instruction) -> list[Instruction]:
    """The results of a fusion with this root."""
    return list(root.operands) if root.op == "tuple" else [root]
