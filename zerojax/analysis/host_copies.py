"""Reads the asynchronous copies of a compiled program: their bytes, and what runs beside those to and from the host.

On GPUs a copy of a slice is a fusion that starts and ends; on TPUs it is an instruction of its own.
"""

from __future__ import annotations

from typing import NamedTuple

from zerojax.analysis.costs import memory_bytes
from zerojax.analysis.hlo import HOST, Buffer, Instruction, Program, blocks, trips_of, unsupported
from zerojax.analysis.hlo_collectives import end_index, fusion_results, has_product

TO_HOST, FROM_HOST, COPIES = "copies to the host", "copies from the host", "copies beside compute"
COPY_STARTS = ("copy-start", "slice-start", "fusion-start", "dynamic-slice-start", "dynamic-update-slice-start")


class HostCopy(NamedTuple):
    """A copy between device and host.

    Attributes:
        name: of the instruction that starts it.
        lane: `TO_HOST` or `FROM_HOST`.
        num_bytes: of all its runs in a step.
        alone: whether nothing is computed beside it. A matrix product counts, and so does a kernel that reads and
            writes at least as many bytes, such as the update of an equally large piece, also in a loop.
        in_layers: whether it is in a loop with matrix products, such as that over layers.
    """

    name: str
    lane: str
    num_bytes: int
    alone: bool
    in_layers: bool


def read_host_copies(program: Program) -> list[HostCopy]:
    """Returns the copies between device and host.

    Raises:
        ValueError: if a copy has no end in the same computation, or if it is in a branch, or in a loop whose trip count
            is unknown.
    """
    found = []
    for block in blocks(program):
        in_layers = block.looped and any(map(has_product, block.instructions))
        for k, i in enumerate(block.instructions):
            if i.op in COPY_STARTS:
                lane, num_bytes = copied(i)
                if lane != COPIES:
                    beside = block.instructions[k + 1 : end_index(block, k)]
                    alone = not any(_computes(other, num_bytes) for other in beside)
                    found.append(HostCopy(i.name, lane, num_bytes * trips_of(block, i), alone, in_layers))
    return found


def copied(start: Instruction) -> tuple[str, int]:
    """Returns the (lane, bytes) of an asynchronous copy or slice, or of a fusion that slices or updates an array."""
    if start.op == "copy-start":
        source, target = start.operands[0].buffers[0], start.buffers[0]
        return _lane(source, target), target.num_bytes
    num_operands = sum(len(operand.buffers) for operand in start.operands)
    source, result = start.operands[0].buffers[0], start.buffers[num_operands]
    if start.op in ("slice-start", "dynamic-slice-start"):
        return _lane(source, result), result.num_bytes
    if start.op == "dynamic-update-slice-start":
        update = start.operands[1].buffers[0]
        return _lane(update, result), update.num_bytes
    (root,) = fusion_results(start.called["calls"][0].root)
    while root.op in ("bitcast", "copy"):
        root = root.operands[0]
    if root.op == "dynamic-update-slice":
        return TO_HOST if result.space == HOST else COPIES, root.operands[1].num_bytes
    if root.op == "dynamic-slice":
        return FROM_HOST if source.space == HOST else COPIES, result.num_bytes
    raise unsupported(start, "cannot read what this asynchronous fusion copies")


def copied_in_host(program: Program) -> int:
    """Returns the bytes of arrays in host memory that a program copies to other arrays there.

    In programs for TPUs the processor of the host does so, while the device waits.
    """
    num_bytes = 0
    for i in (i for block in blocks(program) for i in block.instructions):
        if i.op == "custom-call-start" and i.target == "HostExecute":
            num_bytes += sum(operand.num_bytes for operand in i.operands)
        elif i.op in ("copy", "copy-start"):
            source, target = i.operands[0].buffers[0], i.buffers[0]
            num_bytes += target.num_bytes if source.space == target.space == HOST else 0
    return num_bytes


def _lane(source: Buffer, target: Buffer) -> str:
    if (source.space == HOST) == (target.space == HOST):
        return COPIES
    return TO_HOST if target.space == HOST else FROM_HOST


def _computes(i: Instruction, num_bytes: int) -> bool:
    """Whether an instruction has a matrix product, or moves at least so many bytes of device memory."""
    if i.op in ("while", "call"):
        return any(_computes(j, num_bytes) for j in i.inner)
    if i.op.endswith(("-start", "-update", "-done")):
        return False
    return has_product(i) or memory_bytes(i) >= num_bytes
