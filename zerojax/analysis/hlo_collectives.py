"""Finds the collectives of a compiled program, and which of them overlap with matrix products.

It reads programs for GPUs and for TPUs. On TPUs a collective may be a chain of fusions, each of which contains a clone
of the collective and some computation; between slices it is a transfer over the hosts (see the end of this module).
Instructions that are not understood raise ValueError; they are never ignored.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from jax.stages import Compiled

from zerojax.analysis.hlo import (
    CHAIN,
    Block,
    Instruction,
    Program,
    attribute,
    blocks,
    has_product,
    trips_of,
    unsupported,
)

# The primitives of JAX that move data between devices, each with its name in compiled programs.
COLLECTIVES = {
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "all_gather_reduced": "all-gather",
    "all_to_all": "all-to-all",
    "pbroadcast": "collective-broadcast",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "ppermute": "collective-permute",
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "unreduced_psum": "all-reduce",
    "unreduced_reduce_scatter": "reduce-scatter",
}
_COLLECTIVES = frozenset(
    ["all-gather", "all-reduce", "all-to-all", "collective-broadcast", "collective-permute", "reduce-scatter"]
)
_UNSUPPORTED_OPS = frozenset(["ragged-all-to-all", "recv", "send"])  # the number of bytes is unknown


class Collective(NamedTuple):
    """The arrays of one dtype that a collective communicates. A combined collective with two dtypes becomes two.

    Attributes:
        full_bytes: bytes of the full arrays in one run: the result of an all-gather, the operand of all others.
        group: the devices of one of its groups.
        trips: the number of times it runs in a step.
        exposed: whether no matrix product is scheduled between its start and its end.
        inserted: whether the compiler inserted it, along an axis that is left to it: it has no name of an operation,
            or that of one that is no collective.
    """

    kind: str
    dtype: str
    full_bytes: int
    group: tuple[int, ...]
    trips: int
    looped: bool
    exposed: bool
    inserted: bool = False

    @property
    def group_size(self) -> int:
        return len(self.group)

    @property
    def sent_bytes(self) -> float:
        """Bytes that one device sends in a step with ring algorithms: (n-1)/n of full, twice that for an all-reduce."""
        if self.kind == "collective-permute":
            return self.trips * self.full_bytes
        rounds = 2 if self.kind == "all-reduce" else 1
        return self.trips * rounds * self.full_bytes * (self.group_size - 1) / self.group_size


class CollectiveSpan(NamedTuple):
    """A collective `core` that runs from the instruction with index `start` of a block to the one with index `end`."""

    core: Instruction
    start: int
    end: int


class MemoryStats(Protocol):
    """What `compiled.memory_analysis()` returns, in bytes of one device."""

    argument_size_in_bytes: int
    output_size_in_bytes: int
    alias_size_in_bytes: int
    temp_size_in_bytes: int
    host_argument_size_in_bytes: int
    host_temp_size_in_bytes: int


def memory_stats(compiled: Compiled) -> MemoryStats:
    stats = compiled.memory_analysis()
    assert stats is not None, "compilers for GPUs, TPUs and CPUs have an analysis of memory"
    return stats


def peak_bytes(memory: MemoryStats, temporaries: int | None = None) -> int:
    """The bytes that a program needs on one device: arguments, temporaries, and results that are not aliased.

    The default of `temporaries` are those of `memory`. For TPUs these are more than the compiler allocates: a program
    with 98.2 GiB in all compiles for 95.7 GiB of memory, where its buffer assignment needs 80.4.
    """
    if temporaries is None:
        temporaries = memory.temp_size_in_bytes
    return memory.argument_size_in_bytes + temporaries + memory.output_size_in_bytes - memory.alias_size_in_bytes


def collective_spans(block: Block) -> list[CollectiveSpan]:
    """The collectives of a block, in the order in which they start.

    A synchronous collective starts and ends at the same instruction. Programs for GPUs start an asynchronous one by
    `KIND-start`, or by `async-start` of a computation with one collective. Programs for TPUs may contain a chain of
    fusions with the same `chain_id`, each with a clone of the collective. It runs from the first to the last of them in
    the computation in which it begins. They also write a reduce-scatter as a fusion of an all-reduce and a slice of its
    result. A collective that SparseCores run is a `call-start` without operands, which gets them by a `call-update`: it
    runs from there. One between slices runs from the `send` of its operand to the `recv-done` of its result.
    """
    found: list[CollectiveSpan] = []
    chains: dict[str, CollectiveSpan] = {}
    for k, i in enumerate(block.instructions):
        if is_transfer(i):
            if i.op == "send":
                found.append(CollectiveSpan(_as_collective(i), k, _received_index(block, k)))
            continue
        core = _collective_of(i)
        if core is None:
            continue
        if i.op == "fusion" and _is_reduce_scatter(i, core):
            found.append(CollectiveSpan(dataclasses.replace(core, op="reduce-scatter"), k, k))
        elif i.op == "fusion":
            chain = attribute(CHAIN.pattern, core)
            if chain not in block.running:
                chains[chain] = chains.get(chain, CollectiveSpan(core, k, k))._replace(end=k)
        elif i.op.endswith("-start"):
            found.append(CollectiveSpan(core, _begin_index(block, k), end_index(block, k)))
        else:
            found.append(CollectiveSpan(core, k, k))
    return sorted([*found, *chains.values()], key=lambda span: span.start)


def _collective_of(i: Instruction) -> Instruction | None:
    """The collective that an instruction is, starts, or contains, or None."""
    # Loops, calls and branches are separate blocks. An update or an end belongs to a start.
    if i.op in ("while", "call", "conditional") or i.op.endswith(("-update", "-done")):
        return None
    if i.op in _UNSUPPORTED_OPS or i.op.removesuffix("-start") in _UNSUPPORTED_OPS:
        raise unsupported(i, "this kind of communication is not supported")
    if i.op.removesuffix("-start") in _COLLECTIVES:
        return i
    inside = [j for j in i.inner if communicates(j)]
    if not inside:
        return None
    if len(inside) > 1 or i.op not in ("async-start", "call-start", "fusion") or inside[0].op not in _COLLECTIVES:
        raise unsupported(i, "unexpected collective inside this instruction")
    return inside[0]


def _is_reduce_scatter(fusion: Instruction, core: Instruction) -> bool:
    """Whether a fusion is a reduce-scatter: an all-reduce of which it returns slices, and not part of a chain."""
    root = fusion.called["calls"][0].root
    of_core = lambda i: i is core or (i.op == "get-tuple-element" and i.operands[0] is core)
    slices = root.operands if root.op == "tuple" else (root,)
    are_sliced = all(i.op == "dynamic-slice" and of_core(i.operands[0]) for i in slices)
    return core.op == "all-reduce" and are_sliced and "chain_id=" not in core.attributes


def communicates(instruction: Instruction) -> bool:
    """Whether an instruction is a collective, or its start, or contains one."""
    kind = instruction.op.removesuffix("-start")
    return kind in _COLLECTIVES or kind in _UNSUPPORTED_OPS or any(communicates(i) for i in instruction.inner)


def _later_index(block: Block, start: int, matches: Callable[[Instruction], bool], why: str) -> int:
    """The index of the first instruction after `start` that matches. Raises a ValueError with `why` without one."""
    for k in range(start + 1, len(block.instructions)):
        if matches(block.instructions[k]):
            return k
    raise unsupported(block.instructions[start], why)


def _begin_index(block: Block, start: int) -> int:
    """The index of the instruction that gives the operands to the collective that starts at index `start`."""
    i = block.instructions[start]
    if i.op != "call-start" or i.operands:
        return start
    gives = lambda j: j.op == "call-update" and i in j.operands
    return _later_index(block, start, gives, "a call without operands gets none in the same computation")


def start_of(done: Instruction) -> Instruction:
    """The instruction that starts what another one ends."""
    start = done.operands[0]
    while start.op.endswith("-update"):
        start = start.operands[0]
    return start


def end_index(block: Block, start: int) -> int:
    """The index of the instruction that ends the collective, or the copy, that starts at index `start`."""
    ends = lambda j: j.op.endswith("-done") and start_of(j) is block.instructions[start]
    return _later_index(block, start, ends, "a start has no end in the same computation")


def compiled_collectives(program: Program) -> list[Collective]:
    """Every collective that a step runs.

    It is exposed if no matrix product (a `dot`, a convolution, a cuBLAS or cuDNN call, or an instruction that contains
    one) is scheduled between its start and its end. Synchronous collectives are always exposed.

    Raises:
        ValueError: if one is in a branch or in a loop whose trip count is unknown, or if its groups are not understood.
    """
    found = []
    for block in blocks(program):
        for core, start, end in collective_spans(block):
            exposed = not any(has_product(i) for i in block.instructions[start + 1 : end])
            found += split_by_dtype(core, program.num_devices, trips_of(block, core), block.looped, exposed)
    return found


def split_by_dtype(
    core: Instruction, num_devices: int, trips: int = 1, looped: bool = False, exposed: bool = False
) -> list[Collective]:
    """One `Collective` for each dtype of a synchronous, asynchronous or combined collective."""
    kind, group = core.op.removesuffix("-start"), _group_of(core, num_devices)
    sizes: dict[str, int] = {}
    for buffer in (b for operand in core.operands for b in operand.buffers):
        full_bytes = buffer.num_bytes * (len(group) if kind == "all-gather" else 1)
        sizes[buffer.dtype] = sizes.get(buffer.dtype, 0) + full_bytes
    operation = re.search(r'op_name="(?:[^"]*/)?(\w+)', core.attributes)
    inserted = operation[1] not in COLLECTIVES if operation else "metadata={" in core.attributes
    return [Collective(kind, dtype, size, group, trips, looped, exposed, inserted) for dtype, size in sizes.items()]


def _group_of(collective: Instruction, num_devices: int) -> tuple[int, ...]:
    """One of the groups of a collective: of a permutation, all that exchange data, directly or not, with its first
    source.
    """
    found = groups(collective, num_devices)
    if not collective.op.startswith("collective-permute"):
        return found[0]
    group, size = {found[0][0]}, 0
    while len(group) > size:
        size = len(group)
        group |= {device for pair in found if set(pair) & group for device in pair}
    return tuple(sorted(group))


def groups(collective: Instruction, num_devices: int) -> list[tuple[int, ...]]:
    """The devices of each group of a collective, as indices into the mesh; for a permutation, its pairs.

    The text has groups as `{}` (one group of all devices), as `{{0,1},{2,3}}`, as `[2,4]<=[8]` (two groups of four: an
    iota of shape [8], possibly transposed by `T(1,0)`, reshaped to [2, 4]), or as the mesh axes that a group spans:
    `mesh['a'=2,'b'=4] {'b'}`. The devices of a mesh may be a transposed iota: `mesh[...], device_ids=([4,2]T(1,0))`.
    """
    if "_xla_megascale_target=" in collective.attributes:
        return _slice_groups(collective, num_devices)
    if collective.op.startswith("collective-permute"):
        pairs = re.findall(r"\{(\d+),(\d+)\}", attribute(r"source_target_pairs=\{(.*?\})\}", collective))
        return [(int(source), int(target)) for source, target in pairs]
    text = attribute(
        r"replica_groups=(\{\}|\{\{[\d,{}]*\}\}|\[[^ ]*?(?=, |$)|mesh\[.*?\](?:, device_ids=\(.*?\)\))? ?\{.*?\})",
        collective,
    )
    if text == "{}":
        return [tuple(range(num_devices))]
    if text.startswith("{"):
        return [tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", text)]
    # An iota.
    iota = re.fullmatch(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if iota:
        shape, sizes, order = ([int(n) for n in part.split(",")] if part else None for part in iota.groups())
        return _rows(np.arange(math.prod(sizes or [])).reshape(sizes).transpose(order).reshape(shape))
    # Axes of a mesh.
    device_ids = r"(?:, device_ids=\(\[([\d,]+)\]T\(([\d,]+)\)\))?"
    mesh = re.fullmatch(rf"mesh\[((?:'\w+'=\d+,?)+)\]{device_ids} ?\{{((?:'\w+',?)*)\}}", text)
    if not mesh:
        raise unsupported(collective, "cannot read the groups of this collective")
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh.group(1))}
    spanned = re.findall(r"'(\w+)'", mesh.group(4))
    order = [*(name for name in sizes if name not in spanned), *spanned]
    devices = np.arange(math.prod(sizes.values()))
    if mesh.group(2):
        shape, permutation = ([int(n) for n in mesh.group(k).split(",")] for k in (2, 3))
        devices = devices.reshape(shape).transpose(permutation)
    ordered = devices.reshape(list(sizes.values())).transpose([list(sizes).index(name) for name in order])
    return _rows(ordered.reshape(-1, math.prod(sizes[name] for name in spanned)))


def _rows(devices: np.ndarray) -> list[tuple[int, ...]]:
    return [tuple(row) for row in devices.tolist()]


def in_flight_bytes(program: Program) -> int:
    """The largest sum of the full bytes of collectives of one computation that run at the same time."""
    largest = 0
    for block in blocks(program):
        spans = collective_spans(block)
        sizes = [sum(part.full_bytes for part in split_by_dtype(span.core, program.num_devices)) for span in spans]
        for span in spans:
            others = zip(spans, sizes, strict=True)
            largest = max(largest, sum(size for other, size in others if other.start <= span.start <= other.end))
    return largest


# Collectives between TPU slices.

_OPS = frozenset(["send", "recv", "send-done", "recv-done"])
_KINDS = {
    "ALL_GATHER": "all-gather",
    "ALL_REDUCE": "all-reduce",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
    "REDUCE_SCATTER": "reduce-scatter",
}
_SLICE = 100_000  # a device is _SLICE times its slice, counted from 1, plus its number in the slice


def is_transfer(i: Instruction) -> bool:
    """Whether an instruction is a part of a collective between slices."""
    return i.op in _OPS and 'handler_name="xla_megascale_runtime"' in i.attributes


def _as_collective(send: Instruction) -> Instruction:
    """The collective that starts with a transfer to the host, with the operand of that transfer."""
    kind = attribute(r'_xla_megascale_transfer_type="(\w+)"', send)
    if kind not in _KINDS:
        raise unsupported(send, f"cannot read a transfer between slices of type {kind}")
    return dataclasses.replace(send, op=_KINDS[kind], operands=send.operands[:1])


def _received_index(block: Block, start: int) -> int:
    """The index of the instruction that waits for the result of the transfer that starts at index `start`."""
    name = lambda i: attribute(r'_xla_host_transfer_rendezvous="([^"]*)"', i)
    sent = name(block.instructions[start])
    ends = lambda j: j.op == "recv-done" and is_transfer(j.operands[0]) and name(j.operands[0]) == sent
    return _later_index(block, start, ends, "a transfer between slices has no end in the same computation")


def _slice_groups(collective: Instruction, num_devices: int) -> list[tuple[int, ...]]:
    """As `groups`. Device k of slice s, counted from 0, has the index s * num_devices + k."""
    target = attribute(r'_xla_megascale_target=("[^"]*"|\{\{.*?\}\})', collective)
    compact = re.fullmatch(r'"\{([\d,]+)\}x\{(\d+):(\d+)\}"', target)
    if compact:
        slices, first, last = [int(n) for n in compact[1].split(",")], int(compact[2]), int(compact[3])
        return [tuple((s - 1) * num_devices + k for s in slices) for k in range(first, last + 1)]
    listed = [[int(n) for n in re.findall(r"\d+", group)] for group in re.findall(r"\{([\d,>-]+)\}", target)]
    if not listed:
        raise unsupported(collective, "cannot read the target of a transfer between slices")
    return [_slice_group(collective, devices, num_devices) for devices in listed]


def _slice_group(collective: Instruction, devices: list[int], num_devices: int) -> tuple[int, ...]:
    of_slice: dict[int, list[int]] = {}
    for device in devices:
        of_slice.setdefault(device // _SLICE - 1, []).append(device % _SLICE)
    counts = {len(chips) for chips in of_slice.values()}
    if counts == {num_devices}:
        return tuple(s * num_devices + k for s in of_slice for k in range(num_devices))
    if counts == {1}:
        return tuple(s * num_devices + chip for s, (chip,) in of_slice.items())
    raise unsupported(collective, "a group has several devices of a slice, but not all")  # their order is not known
