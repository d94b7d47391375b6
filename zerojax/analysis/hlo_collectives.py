"""What a compiled program sends, with what beside it, and what it copies.

Programs for GPUs and for TPUs. On TPUs a collective may be a chain of fusions, which hold clones of it beside compute.
What is not understood raises ValueError and is never taken for nothing.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any, NamedTuple

import numpy as np

from zerojax.analysis.hlo import Block, Buffer, Instruction, Program, attribute, blocks, refuse, trips_of

_COLLECTIVES = frozenset(
    ["all-gather", "all-reduce", "all-to-all", "collective-broadcast", "collective-permute", "reduce-scatter"]
)
_UNREAD = frozenset(["ragged-all-to-all", "recv", "send"])  # they communicate, and how much is not known here


class Collective(NamedTuple):
    """What one collective moves of one dtype. A combined collective with two dtypes is two of these.

    Attributes:
        kind: 'all-gather', 'reduce-scatter', 'all-reduce', ...
        dtype: on the wire.
        full_bytes: of the full form, each time it runs: the result of a gather, the operand of the others.
        group: the devices that take part, as numbers of the program: one group, of as many as there are.
        trips: how often it runs in a step.
        looped: it is inside a loop.
        exposed: no matrix product is between its start and its end.
    """

    kind: str
    dtype: str
    full_bytes: int
    group: tuple[int, ...]
    trips: int
    looped: bool
    exposed: bool

    @property
    def group_size(self) -> int:
        return len(self.group)

    @property
    def sent_bytes(self) -> float:
        """By one device in a step, by the ring algorithms: (n-1)/n of the full form, twice that for an all-reduce."""
        if self.kind == "collective-permute":
            return self.trips * self.full_bytes
        rounds = 2 if self.kind == "all-reduce" else 1
        return self.trips * rounds * self.full_bytes * (self.group_size - 1) / self.group_size


class Span(NamedTuple):
    """A collective `core` that is under way from instruction `start` to instruction `end` of a block (indices)."""

    core: Instruction
    start: int
    end: int


def peak_bytes(memory: Any) -> int:
    """What a program needs on one device: its arguments, temporaries, and results that have no argument's place.

    Args:
        memory: of `compiled.memory_analysis()`.
    """
    unaliased = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes + unaliased


def spans(block: Block) -> list[Span]:
    """The collectives of a block in the order of their starts. A synchronous one starts and ends at one instruction.

    For GPUs a start is `KIND-start`, or `async-start` of a computation with one collective. For TPUs it may be a chain
    of fusions that hold clones of one collective, with one `chain_id`, from the first of which it runs to the last. A
    fusion of an all-reduce and the slice that a device keeps of it is how they write a reduce-scatter.

    Raises:
        ValueError: a start without an end in the same block, or a collective in a fusion that is not understood.
    """
    found: list[Span] = []
    chains: dict[str, Span] = {}
    for k, i in enumerate(block.instructions):
        core = _collective_of(i)
        if core is None:
            continue
        if i.op == "fusion" and _slices(i, core):
            found.append(Span(dataclasses.replace(core, op="reduce-scatter"), k, k))
        elif i.op == "fusion":
            chain = attribute(r'chain_id="(\w+)"', core)
            chains[chain] = chains.get(chain, Span(core, k, k))._replace(end=k)
        else:
            found.append(Span(core, k, _done(block, k) if i.op.endswith("-start") else k))
    return sorted([*found, *chains.values()], key=lambda span: span.start)


def _collective_of(i: Instruction) -> Instruction | None:
    """The collective that an instruction is, starts, or holds."""
    if i.op in ("while", "call", "conditional") or i.op.endswith(("-update", "-done")):  # blocks of their own; ends
        return None
    if i.op in _UNREAD or i.op.removesuffix("-start") in _UNREAD:
        raise refuse(i, "a kind of communication that is not read")
    if i.op.removesuffix("-start") in _COLLECTIVES:
        return i
    inside = [j for j in i.inner if _communicates(j)]
    if not inside:
        return None
    if len(inside) > 1 or i.op not in ("async-start", "fusion") or inside[0].op not in _COLLECTIVES:
        raise refuse(i, "a collective where none is expected")
    return inside[0]


def _slices(fusion: Instruction, core: Instruction) -> bool:
    """Whether a fusion of an all-reduce returns a slice of it, and is no link of a chain."""
    root = fusion.called["calls"][0].root
    sliced = core.op == "all-reduce" and root.op == "dynamic-slice" and root.operands[0] is core
    return sliced and "chain_id=" not in core.attributes


def _communicates(instruction: Instruction) -> bool:
    kind = instruction.op.removesuffix("-start")
    return kind in _COLLECTIVES or kind in _UNREAD or any(_communicates(i) for i in instruction.inner)


def _done(block: Block, start: int) -> int:
    """The index of the instruction that ends what starts at index `start`."""
    under_way = {block.instructions[start]}
    for k in range(start + 1, len(block.instructions)):
        i = block.instructions[k]
        if under_way & set(i.operands) and i.op.endswith("-update"):
            under_way.add(i)
        elif under_way & set(i.operands) and i.op.endswith("-done"):
            return k
    raise refuse(block.instructions[start], "a start without an end in the same computation")


def collectives(program: Program) -> list[Collective]:
    """Every collective that a step runs.

    Exposed are those with no matrix product between start and end in the order of the schedule: a `dot`, a
    convolution, a cuBLAS or cuDNN call, or something that calls one. Synchronous ones are exposed.

    Raises:
        ValueError: one runs in a loop without a known trip count or in a branch, or its groups are not understood.
    """
    found = []
    for block in blocks(program):
        for core, start, end in spans(block):
            exposed = not any(multiplies(i) for i in block.instructions[start + 1 : end])
            found += parts(core, program.num_devices, trips_of(block, core), block.looped, exposed)
    return found


def parts(
    core: Instruction, num_devices: int, trips: int = 1, looped: bool = False, exposed: bool = False
) -> list[Collective]:
    """A collective by dtype. Its operands are the same whether it is plain, combined, or has a start and an end."""
    kind, group = core.op.removesuffix("-start"), _group_of(core, num_devices)
    sizes: dict[str, int] = {}
    for buffer in (b for operand in core.operands for b in operand.buffers):
        full_bytes = buffer.num_bytes * (len(group) if kind == "all-gather" else 1)
        sizes[buffer.dtype] = sizes.get(buffer.dtype, 0) + full_bytes
    return [Collective(kind, dtype, size, group, trips, looped, exposed) for dtype, size in sizes.items()]


def _group_of(collective: Instruction, num_devices: int) -> tuple[int, ...]:
    """The devices of one of its groups."""
    permutes = collective.op.startswith("collective-permute")
    return _exchanging(collective) if permutes else groups(collective, num_devices)[0]


def groups(collective: Instruction, num_devices: int) -> list[tuple[int, ...]]:
    """The devices that take part in each group of a collective, by their index in the mesh; pairs of a permutation.

    They are written as `{}` (one group of all), `{{0,1},{2,3}}`, `[2,4]<=[8]` (two of four, of the numbers from 0 in an
    array of this shape, which `T(1,0)` may transpose), or by the axes of a mesh that a group spans:
    `mesh['a'=2,'b'=4] {'b'}`.

    Raises:
        ValueError: groups that are not understood.
    """
    if collective.op.startswith("collective-permute"):
        pairs = re.findall(r"\{(\d+),(\d+)\}", attribute(r"source_target_pairs=\{(.*?\})\}", collective))
        return [(int(source), int(target)) for source, target in pairs]
    text = attribute(r"replica_groups=(\{\}|\{\{[\d,{}]*\}\}|\[[^ ]*?(?=, |$)|mesh\[.*?\] ?\{.*?\})", collective)
    if text == "{}":
        return [tuple(range(num_devices))]
    if text.startswith("{"):
        return [tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", text)]
    iota = re.fullmatch(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if iota:
        shape, sizes, order = ([int(n) for n in part.split(",")] if part else None for part in iota.groups())
        return _rows(np.arange(math.prod(sizes or [])).reshape(sizes).transpose(order).reshape(shape))
    mesh = re.fullmatch(r"mesh\[((?:'\w+'=\d+,?)+)\] ?\{((?:'\w+',?)*)\}", text)
    if not mesh:
        raise refuse(collective, "groups that are not understood")
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh.group(1))}
    spanned = re.findall(r"'(\w+)'", mesh.group(2))
    order = [*(name for name in sizes if name not in spanned), *spanned]
    devices = np.arange(math.prod(sizes.values())).reshape(list(sizes.values()))
    ordered = devices.transpose([list(sizes).index(name) for name in order])
    return _rows(ordered.reshape(-1, math.prod(sizes[name] for name in spanned)))


def _rows(devices: np.ndarray) -> list[tuple[int, ...]]:
    return [tuple(row) for row in devices.tolist()]


def _exchanging(permute: Instruction) -> tuple[int, ...]:
    """The devices among which a permutation moves what the first of its sources sends."""
    pairs = re.findall(r"\{(\d+),(\d+)\}", attribute(r"source_target_pairs=\{(.*?\})\}", permute))
    group, size = {int(pairs[0][0])}, 0
    while len(group) > size:
        size = len(group)
        group |= {int(n) for pair in pairs if {int(pair[0]), int(pair[1])} & group for n in pair}
    return tuple(sorted(group))


def in_flight_bytes(program: Program) -> int:
    """The most bytes, in full form, of collectives of one computation that are under way at the same time."""
    most = 0
    for block in blocks(program):
        under_way = spans(block)
        sizes = [sum(part.full_bytes for part in parts(span.core, program.num_devices)) for span in under_way]
        for span in under_way:
            beside = zip(under_way, sizes, strict=True)
            most = max(most, sum(size for other, size in beside if other.start <= span.start <= other.end))
    return most


def multiplies(instruction: Instruction) -> bool:
    """Whether it is, or calls, a matrix product."""
    if instruction.op in ("convolution", "dot", "ragged-dot"):
        return True
    if instruction.op == "custom-call" and re.match(r"__cublas\$|__cudnn\$", instruction.target):
        return True
    return any(multiplies(i) for i in instruction.inner)


def results(root: Instruction) -> list[Instruction]:
    """Of a fusion with this root."""
    return list(root.operands) if root.op == "tuple" else [root]


class Move(NamedTuple):
    """A result that holds elements of an operand, and nothing computed.

    Attributes:
        name: of the instruction.
        op: what of 'copy', 'transpose', 'slice', 'update' it does to them: the last of these that is on the way.
        buffer: what is written: of an update in place, the update.
        trips: how often in a step.
    """

    name: str
    op: str
    buffer: Buffer
    trips: int

    @property
    def num_bytes(self) -> int:
        return self.trips * self.buffer.num_bytes


_MOVE_OPS = {"copy": 1, "transpose": 2, "slice": 3, "dynamic-slice": 3, "dynamic-update-slice": 4}
_MOVE_NAMES = {1: "copy", 2: "transpose", 3: "slice", 4: "update"}


def moves(program: Program, min_bytes: int = 1) -> list[Move]:
    """What a program moves within the memory of the device, in the order in which it runs.

    Counted are instructions, results of fusions, and asynchronous copies. A copy to or from another memory space (that
    of the host, the vector memory of a TPU) is no move in this sense.

    Args:
        program: a scheduled program.
        min_bytes: smaller results are left out. A loop copies counters and small tuples; a threshold between those and
            the smallest buffer that matters separates them.
    """
    return _moves(blocks(program), min_bytes)


def moves_in_loops(program: Program, min_bytes: int = 1) -> list[Move]:
    """Those of `moves` that are in loop bodies."""
    return _moves([block for block in blocks(program) if block.looped], min_bytes)


def _moves(within: list[Block], min_bytes: int) -> list[Move]:
    found = []
    for block in within:
        for i in block.instructions:
            root = i.called["calls"][0].root if i.op == "fusion" else i
            for result in results(root) if root is not i else [i]:
                move = _move(result, inside=root is not i)
                if move and move[1].num_bytes >= min_bytes:
                    found.append(Move(i.name, *move, trips_of(block, i)))
    return found


def _move(result: Instruction, inside: bool) -> tuple[str, Buffer] | None:
    """(op, what is written) of a result that only moves elements; `inside` a fusion, back to its parameters."""
    if result.op == "copy-start":
        return ("copy", result.buffers[0]) if result.buffers[0].space == result.operands[0].buffers[0].space else None
    level, written, i = 0, result, result
    while i.op in _MOVE_OPS or i.op in ("bitcast", "reshape"):
        level = max(level, _MOVE_OPS.get(i.op, 0))
        if i.op == "dynamic-update-slice":
            written = i.operands[1]
        i = i.operands[1 if i.op == "dynamic-update-slice" else 0]
        if not inside:
            break
    if not level or (inside and i.op != "parameter"):
        return None
    if len(written.buffers) != 1 or len(i.buffers) != 1:
        raise refuse(result, "a move of a tuple")
    return (_MOVE_NAMES[level], written.buffers[0]) if written.buffers[0].space == i.buffers[0].space else None
