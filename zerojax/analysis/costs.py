"""What an instruction of a compiled program costs: flops of matrix products, bytes of memory."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NamedTuple

from zerojax.analysis.hlo import Block, Buffer, Instruction, refuse
from zerojax.analysis.hlo_collectives import multiplies, results, spans

_FREE = frozenset(["add-dependency", "after-all", "bitcast", "constant", "copy-done", "get-tuple-element"]) | frozenset(
    ["opt-barrier", "parameter", "partition-id", "replica-id", "tuple"]
)
_SLICES = frozenset(["dynamic-slice", "gather", "slice"])  # they read of operand 0 what they return
_MOVES = frozenset(["bitcast", "copy", "reshape", "transpose"])  # they return the elements of operand 0
_UPDATES = {"dynamic-update-slice": 1, "scatter": -1}  # they may write into operand 0; where their update is


def dot_flops(instruction: Instruction) -> int:
    """Of the matrix products of an instruction that runs once: 2 x elements of the result x elements contracted.

    Attention by cuDNN has two products forward and five backward; under a causal mask half of each is computed.

    Raises:
        ValueError: a loop, or a custom call or convolution whose dimensions are not in the text.
    """
    i = instruction
    if i.op == "dot":
        return _product_flops(i, i.integers("lhs_contracting_dims"))
    if i.op == "convolution":
        return _convolution_flops(i)
    if not multiplies(i):
        return 0
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
        raise refuse(i, "a matrix product whose flops are not read")
    return sum(dot_flops(j) for j in i.inner)


def _convolution_flops(convolution: Instruction) -> int:
    """Of what touches elements, not padding nor holes: on TPUs a dim of a batch is written as a dilated window."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", convolution.attributes)
    if labels is None or re.search(r"batch_group_count=(?!1\b)", convolution.attributes):
        raise refuse(convolution, "a convolution whose dimensions are not read")
    lhs, rhs = (operand.buffers[0].dims for operand in convolution.operands)
    size = dict(zip(labels.group(3), convolution.buffers[0].dims, strict=True))
    kernel = dict(zip(labels.group(2), rhs, strict=True))
    flops = 2 * size["b"] * size["f"] * kernel["i"]
    inputs = dict(zip(labels.group(1), lhs, strict=True))
    window = _window(convolution, len(size) - 2)
    for d, dim in enumerate(window):
        flops *= dim.touching(inputs[str(d)], size[str(d)])
    return flops


class _WindowDim(NamedTuple):
    """How a window moves along one dim of a convolution."""

    size: int
    stride: int = 1
    pad: int = 0  # before the first element
    lhs_dilate: int = 1
    rhs_dilate: int = 1

    def touching(self, length: int, results: int) -> int:
        """Pairs of a result and an element of the window that meet one of the `length` elements of the input."""
        places = (
            result * self.stride - self.pad + k * self.rhs_dilate for result in range(results) for k in range(self.size)
        )
        return sum(place % self.lhs_dilate == 0 and 0 <= place // self.lhs_dilate < length for place in places)


def _window(convolution: Instruction, num_dims: int) -> list[_WindowDim]:
    found = re.search(r"window=\{([^}]*)\}", convolution.attributes)
    fields = dict(field.split("=") for field in found.group(1).split()) if found else {}
    split = {name: value.split("x") for name, value in fields.items() if name != "rhs_reversal"}  # the same pairs
    if any(len(values) != num_dims for values in split.values()) or not split.keys() <= set(_WindowDim._fields):
        raise refuse(convolution, "a window that is not read")
    first = {name: [int(value.split("_")[0]) for value in values] for name, values in split.items()}
    return [_WindowDim(**{name: values[d] for name, values in first.items()}) for d in range(num_dims)]


def _product_flops(product: Instruction, contracted: list[int]) -> int:
    lhs, result = product.operands[0].buffers[0], product.buffers[0]
    return 2 * math.prod(result.dims) * math.prod(lhs.dims[d] for d in contracted)


def _backend_config(instruction: Instruction) -> Any:
    at = instruction.attributes.find("backend_config={")
    if at < 0:
        raise refuse(instruction, "no backend_config in a custom call")
    return json.JSONDecoder().raw_decode(instruction.attributes, at + len("backend_config="))[0]


def memory_bytes(instruction: Instruction) -> int:
    """Bytes that an instruction that runs once reads and writes in the memory of the device.

    Of what is only sliced, the slice is read; of what is updated in place, the update is written. Inside a fusion
    nothing is written but its results, and each operand is read once.
    """
    if instruction.op in _FREE:
        return 0
    if instruction.op == "copy-start":
        return _device_bytes(instruction.buffers[:2])
    if instruction.op != "fusion":
        return _moved_bytes([instruction], [instruction], frozenset(instruction.operands))
    (body,) = instruction.called["calls"]
    parameters = frozenset(i for i in body.instructions if i.op == "parameter")
    return _moved_bytes(list(body.instructions), results(body.root), parameters)


def computed_bytes(fusion: Instruction) -> int:
    """As `memory_bytes`, of what a fusion computes beside a collective that it holds."""
    (body,) = fusion.called["calls"]
    parameters = frozenset(i for i in body.instructions if i.op == "parameter")
    outputs = [result for result in results(body.root) if _is_computed(result)]
    return _moved_bytes(list(body.instructions), outputs, parameters)


def _is_computed(result: Instruction) -> bool:
    while result.op in ("bitcast", "get-tuple-element"):
        result = result.operands[0]
    return result.op not in _FREE and not spans(Block((result,), 1, False))


def _moved_bytes(instructions: list[Instruction], outputs: list[Instruction], sources: frozenset[Instruction]) -> int:
    """Of a computation from `sources` to `outputs`. Followed back is how many elements of each value are needed."""
    needed: dict[Instruction, float] = {}
    in_place, written = set(), 0

    def need(i: Instruction, elements: float) -> None:
        needed[i] = min(_elements(i), needed.get(i, 0) + elements)

    for result in outputs:
        target = _behind_moves(result, sources)
        if target.op in _UPDATES and target not in sources and _behind_moves(target.operands[0], sources) in sources:
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
            kept = i in in_place and i.op == "dynamic-update-slice" and k == 0  # a scatter adds to what is there
            need(operand, 0 if kept else _read_elements(i, k, needed[i]))
    return written + sum(
        math.ceil(_device_bytes(i.buffers) * needed[i] / _elements(i)) for i in sources if needed.get(i)
    )


def _behind_moves(i: Instruction, sources: frozenset[Instruction]) -> Instruction:
    while i.op in _MOVES and i not in sources:
        i = i.operands[0]
    return i


def _read_elements(i: Instruction, position: int, needed: float) -> float:
    """Elements of the operand at `position` that `needed` elements of the result of `i` take."""
    operand, result = _elements(i.operands[position]), _elements(i)
    if i.op in _SLICES and position == 0:
        return needed
    if i.op in ("dot", "custom-call", "fusion"):
        return operand
    return min(operand, needed * max(1, operand / result)) if result else 0


def _elements(i: Instruction) -> int:
    return sum(math.prod(buffer.dims) for buffer in i.buffers)


def _device_bytes(buffers: tuple[Buffer, ...]) -> int:
    """Of those that are in the memory of the device: not on the host, nor in the vector memory of a TPU."""
    return sum(buffer.num_bytes for buffer in buffers if buffer.space == 0)


def _result_bytes(i: Instruction) -> int:
    """Beside its result a cuBLAS call returns its workspace, which is not counted."""
    workspace = i.op == "custom-call" and i.target.startswith("__cublas$")
    return _device_bytes(i.buffers[:1] if workspace else i.buffers)
