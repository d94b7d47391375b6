"""Counts what instructions of a compiled program cost: flops, memory traffic, copies to the host, and moves."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from zerojax.analysis import hlo
from zerojax.analysis.hlo import Block, Buffer, Instruction, Program
from zerojax.analysis.hlo_collectives import collective_spans, end_index

_FREE = frozenset(["add-dependency", "after-all", "bitcast", "constant", "copy-done", "get-tuple-element"]) | frozenset(
    ["opt-barrier", "parameter", "partition-id", "replica-id", "tuple"]
)
_SLICES = frozenset(["dynamic-slice", "gather", "slice"])  # of operand 0 they read only as much as they return
_SAME_ELEMENTS = frozenset(["bitcast", "copy", "reshape", "transpose"])  # they return the elements of operand 0
_UPDATES = {"dynamic-update-slice": 1, "scatter": -1}  # may write into operand 0: the position of their update operand


def dot_flops(instruction: Instruction) -> int:
    """The flops of the matrix products of one execution: 2 x elements of the result x elements contracted.

    Attention by cuDNN has two products in the forward pass and five in the backward pass; under a causal mask, half of
    each is computed. Convolutions by cuDNN have the dimensions of the forward pass, whatever they compute.

    Raises:
        ValueError: if the dimensions of a custom call or of a convolution are not in the text.
    """
    i = instruction
    if i.op == "dot":
        return _product_flops(i, i.integers("lhs_contracting_dims"))
    if i.op == "convolution":
        lhs, rhs = i.operands
        return _convolution_flops(i, lhs, rhs, i)
    if not hlo.has_product(i):
        return 0
    if i.op == "custom-call" and i.target.startswith("__cudnn$conv"):
        first, second, *_ = i.operands
        if i.target.endswith("BackwardInput"):
            return _convolution_flops(i, i, second, first)
        if i.target.endswith("BackwardFilter"):
            return _convolution_flops(i, first, i, second)
        return _convolution_flops(i, first, second, i)
    if i.op == "custom-call":
        config = _backend_config(i)
        if "gemm_backend_config" in config:
            dims = config["gemm_backend_config"]["dot_dimension_numbers"]["lhs_contracting_dimensions"]
            return _product_flops(i, [int(d) for d in dims])
        if "cudnn_fmha_backend_config" in config:  # scores [batch, heads, queries, keys]; operand 0 ends in head_dim
            attention = config["cudnn_fmha_backend_config"]
            scores = math.prod(int(d) for d in attention["intermediate_tensor_shape"]["dimensions"])
            products = 5 if "Backward" in i.target else 2
            flops = products * 2 * scores * i.operands[0].buffers[0].dims[-1]
            return flops // 2 if "CAUSAL" in attention.get("mask_type", "") else flops
    if i.op != "fusion":
        raise hlo.unsupported(i, "cannot count the flops of this matrix product")
    return sum(dot_flops(j) for j in i.inner)


def _convolution_flops(convolution: Instruction, image: Instruction, filter: Instruction, result: Instruction) -> int:
    """Counts only pairs that touch elements of the image: TPU programs write batch dims as dilated windows."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", convolution.attributes)
    if labels is None or re.search(r"batch_group_count=(?!1\b)", convolution.attributes):
        raise hlo.unsupported(convolution, "cannot read the dimensions of this convolution")
    inputs, kernel, size = (
        dict(zip(names, instruction.buffers[0].dims, strict=True))
        for names, instruction in zip(labels.groups(), (image, filter, result), strict=True)
    )
    flops = 2 * size["b"] * size["f"] * kernel["i"]
    for d, window in enumerate(_windows(convolution, len(size) - 2)):
        flops *= _num_pairs(inputs[str(d)], size[str(d)], **window)
    return flops


def _num_pairs(
    length: int, num_results: int, size: int, stride: int = 1, pad: int = 0, lhs_dilate: int = 1, rhs_dilate: int = 1
) -> int:
    """Counts the pairs (result, element of the window) along a dim that read one of the `length` input elements."""
    starts = range(-pad, num_results * stride - pad, stride)
    positions = (start + k * rhs_dilate for start in starts for k in range(size))
    return sum(p % lhs_dilate == 0 and 0 <= p // lhs_dilate < length for p in positions)


def _windows(convolution: Instruction, num_dims: int) -> list[dict[str, int]]:
    """The options of `_num_pairs` for each dim of a window."""
    found = re.search(r"window=\{([^}]*)\}", convolution.attributes)
    fields = dict(field.split("=") for field in found.group(1).split()) if found else {}
    fields.pop("rhs_reversal", None)  # does not change the number of pairs
    split = {name: value.split("x") for name, value in fields.items()}
    known = fields.keys() <= {"size", "stride", "pad", "lhs_dilate", "rhs_dilate"}
    if not known or any(len(values) != num_dims for values in split.values()):
        raise hlo.unsupported(convolution, "cannot read the window of this convolution")
    # Padding is written as before_after.
    return [{name: int(values[d].split("_")[0]) for name, values in split.items()} for d in range(num_dims)]


def _product_flops(product: Instruction, contracted: list[int]) -> int:
    lhs, result = product.operands[0].buffers[0], product.buffers[0]
    return 2 * math.prod(result.dims) * math.prod(lhs.dims[d] for d in contracted)


def _backend_config(instruction: Instruction) -> dict[str, Any]:
    at = instruction.attributes.find("backend_config={")
    if at < 0:
        raise hlo.unsupported(instruction, "this custom call has no backend_config")
    return json.JSONDecoder().raw_decode(instruction.attributes, at + len("backend_config="))[0]


def memory_bytes(instruction: Instruction) -> int:
    """The bytes that one execution of an instruction reads and writes in device memory.

    An array that is only sliced counts as its slice, and an array that is updated in place counts as the update. A
    fusion writes only its results, and reads each operand once; so does a call on a SparseCore. Of a fusion with a
    collective, what it computes while that runs counts.
    """
    if instruction.op in _FREE:
        return 0
    if instruction.op == "copy-start":
        return _device_bytes(instruction.buffers[:2])
    if instruction.op not in ("fusion", "call-start"):
        return _moved_bytes([instruction], [instruction], frozenset(instruction.operands))
    (body,) = instruction.computations
    results = hlo.fusion_results(body.root)
    if instruction.op == "fusion" and _holds_collective(instruction):
        results = [result for result in results if _is_computed(result)]
    return _moved_bytes(body.instructions, results, frozenset(i for i in body.instructions if i.op == "parameter"))


def _holds_collective(instruction: Instruction) -> bool:
    return bool(collective_spans(Block((instruction,), 1, False)))


def _is_computed(result: Instruction) -> bool:
    result = hlo.source(result, ("bitcast", "get-tuple-element"))
    return result.op not in _FREE and not _holds_collective(result)


def _moved_bytes(
    instructions: Sequence[Instruction], outputs: Sequence[Instruction], sources: frozenset[Instruction]
) -> int:
    """The bytes read and written to compute `outputs` from `sources`: needs are traced back from the outputs."""
    needed: dict[Instruction, float] = {}
    in_place, written = set(), 0

    def need(i: Instruction, elements: float) -> None:
        needed[i] = min(_elements(i), needed.get(i, 0) + elements)

    for result in outputs:
        target = hlo.source(result, _SAME_ELEMENTS, sources)
        updates = target.op in _UPDATES and target not in sources
        if updates and hlo.source(target.operands[0], _SAME_ELEMENTS, sources) in sources:
            update = target.operands[_UPDATES[target.op]]
            in_place.add(target)
            written += update.num_bytes if _device_bytes(target.buffers) else 0
            need(target, _elements(update))
        else:
            written += _result_bytes(result)
            need(result, _elements(result))
    for i in reversed(instructions):
        if i in sources or i not in needed:
            continue
        for k, operand in enumerate(i.operands):
            overwritten = i in in_place and i.op == "dynamic-update-slice" and k == 0  # a scatter reads its operand
            need(operand, 0 if overwritten else _read_elements(i, k, needed[i]))
    return written + sum(
        math.ceil(_device_bytes(i.buffers) * needed[i] / _elements(i)) for i in sources if needed.get(i)
    )


def _read_elements(i: Instruction, position: int, needed: float) -> float:
    """How many elements of the operand at `position` are read to compute `needed` elements of the result."""
    operand, result = _elements(i.operands[position]), _elements(i)
    if i.op in _SLICES and position == 0:
        return needed
    if i.op in ("dot", "custom-call", "fusion"):
        return operand
    return min(operand, needed * max(1, operand / result)) if result else 0


def _elements(i: Instruction) -> int:
    return sum(math.prod(buffer.dims) for buffer in i.buffers)


def _device_bytes(buffers: tuple[Buffer, ...]) -> int:
    """The bytes of the buffers in device memory, not in host memory or in the vector memory of a TPU."""
    return sum(buffer.num_bytes for buffer in buffers if buffer.space == 0)


def _result_bytes(i: Instruction) -> int:
    """The bytes of the results, without the workspace that cuBLAS or cuDNN returns next to a result."""
    workspace = i.op == "custom-call" and i.target.startswith(("__cublas$", "__cudnn$conv"))
    return _device_bytes(i.buffers[:1] if workspace else i.buffers)


TO_HOST, FROM_HOST, COPIES = "copies to the host", "copies from the host", "copies beside compute"
COPY_STARTS = ("copy-start", "slice-start", "fusion-start", "dynamic-slice-start", "dynamic-update-slice-start")


class HostCopy(NamedTuple):
    """A copy between device and host, with the bytes of all its runs in a step; `lane` is `TO_HOST` or `FROM_HOST`.

    It is `alone` if nothing is computed beside it. A matrix product counts, and so does a kernel that reads and writes
    at least as many bytes, such as the update of an equally large piece, also in a loop. It is `in_layers` if it is in
    a loop with matrix products, and `by_kernel` if no copy engine runs it: nothing is then computed beside it.
    """

    name: str
    lane: str
    num_bytes: int
    alone: bool
    in_layers: bool
    by_kernel: bool = False


def read_host_copies(program: Program) -> list[HostCopy]:
    """The copies between device and host. Raises ValueError if one has no end in the same computation, or runs an
    unknown number of times.
    """
    found = []
    for block in hlo.blocks(program):
        in_layers = block.looped and any(map(hlo.has_product, block.instructions))
        for k, i in enumerate(block.instructions):
            if i.op in COPY_STARTS:
                lane, num_bytes = copied(i)
                if lane != COPIES:
                    beside = block.instructions[k + 1 : end_index(block, k)]
                    by_kernel = is_kernel(i)
                    alone = by_kernel or not any(_computes(other, num_bytes) for other in beside)
                    num_bytes *= hlo.trips_of(block, i)
                    found.append(HostCopy(i.name, lane, num_bytes, alone, in_layers, by_kernel))
    return found


def copied(start: Instruction) -> tuple[str, int]:
    """The (lane, bytes) of an asynchronous copy or slice, or of a fusion that slices or updates an array."""
    if start.op == "copy-start":
        return _lane(start.operands[0].buffers[0], start.buffers[0]), start.buffers[0].num_bytes
    num_operands = sum(len(operand.buffers) for operand in start.operands)
    operand, result = start.operands[0].buffers[0], start.buffers[num_operands]
    if start.op in ("slice-start", "dynamic-slice-start"):
        return _lane(operand, result), result.num_bytes
    if start.op == "dynamic-update-slice-start":
        update = start.operands[1].buffers[0]
        return _lane(update, result), update.num_bytes
    (root,) = hlo.fusion_results(start.called["calls"][0].root)
    root = hlo.source(root, ("bitcast", "copy"))
    if root.op == "dynamic-update-slice":
        return TO_HOST if result.space == hlo.HOST else COPIES, root.operands[1].num_bytes
    if root.op == "dynamic-slice":
        return FROM_HOST if operand.space == hlo.HOST else COPIES, result.num_bytes
    raise hlo.unsupported(start, "cannot read what this asynchronous fusion copies")


def is_kernel(start: Instruction) -> bool:
    """Whether what an instruction copies to or from the host is copied by a kernel, although it is asynchronous."""
    if start.op != "fusion-start" or copied(start)[0] == COPIES:
        return False
    (root,) = hlo.fusion_results(start.called["calls"][0].root)
    return hlo.SLICE_ANNOTATION not in hlo.source(root, ("bitcast", "copy")).attributes


def copied_in_host(program: Program) -> int:
    """The bytes of arrays in host memory that a program copies to other arrays there.

    In programs for TPUs the processor of the host does so, while the device waits.
    """
    num_bytes = 0
    for i in (i for block in hlo.blocks(program) for i in block.instructions):
        if i.op == "custom-call-start" and i.target == "HostExecute":
            num_bytes += sum(operand.num_bytes for operand in i.operands)
        elif i.op in ("copy", "copy-start"):
            target = i.buffers[0]
            num_bytes += target.num_bytes if i.operands[0].buffers[0].space == target.space == hlo.HOST else 0
    return num_bytes


def _lane(operand: Buffer, target: Buffer) -> str:
    if (operand.space == hlo.HOST) == (target.space == hlo.HOST):
        return COPIES
    return TO_HOST if target.space == hlo.HOST else FROM_HOST


def _computes(i: Instruction, num_bytes: int) -> bool:
    """Whether an instruction has a matrix product, or moves at least so many bytes of device memory."""
    if i.op in ("while", "call"):
        return any(_computes(j, num_bytes) for j in i.inner)
    if i.op.endswith(("-start", "-update", "-done")):
        return False
    return hlo.has_product(i) or memory_bytes(i) >= num_bytes


# Moves within device memory.


class Move(NamedTuple):
    """A result that consists of elements of an operand, with nothing computed.

    Attributes:
        op: 'copy', 'transpose', 'slice' or 'update': the last of these in this list that is part of the move.
        buffer: the buffer that is written; for an update in place, the update.
        trips: the number of times it runs in a step.
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


def moves(program: Program, min_bytes: int = 1, in_loops: bool = False) -> list[Move]:
    """The moves of a program within device memory, in the order in which they run: of at least `min_bytes`, since loops
    copy counters and small tuples, and with `in_loops` only those in loop bodies.

    Instructions, results of fusions, and asynchronous copies count. Copies to or from another memory space (host
    memory, or the vector memory of a TPU) do not.
    """
    found = []
    for block in hlo.blocks(program):
        for i in block.instructions if block.looped or not in_loops else ():
            root = i.called["calls"][0].root if i.op == "fusion" else i
            for result in hlo.fusion_results(root) if root is not i else [i]:
                move = _classify_move(result, inside=root is not i)
                if move and move[1].num_bytes >= min_bytes:
                    found.append(Move(i.name, *move, hlo.trips_of(block, i)))
    return found


def _classify_move(result: Instruction, inside: bool) -> tuple[str, Buffer] | None:
    """(op, the buffer that is written) if a result only moves elements, or None.

    `inside` a fusion, the result is traced back to the parameters of the fusion.
    """
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
        raise hlo.unsupported(result, "cannot read a move of a tuple")
    return (_MOVE_NAMES[level], written.buffers[0]) if written.buffers[0].space == i.buffers[0].space else None
