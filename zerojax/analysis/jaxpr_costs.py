"""Estimates the time of a traced program on a chip: that of its matrix products, and that of its memory traffic.

An operation whose result is stored (see `liveness`) reads the stored values that its operands are computed from, and
writes its results. It takes the time of its products or of this traffic, whichever is longer. Collectives take none.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from zerojax.analysis import jaxpr_stats
from zerojax.analysis.hardware import Chip
from zerojax.analysis.jaxpr_stats import Operation
from zerojax.analysis.liveness import Lifetimes
from zerojax.program import jaxprs
from zerojax.program.jaxprs import Equation

_READS_PARTS = frozenset(["dynamic_slice", "gather", "slice"])  # they read only as much as they return
_WRITES = frozenset(
    ["dynamic_update_slice", "scatter", "scatter-add"]
)  # they write only as much as the operand with the updates has


class ComputeTime(NamedTuple):
    """Seconds of a traced program: those that matrix products limit, and those that memory traffic limits."""

    products_s: float = 0.0
    memory_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.products_s + self.memory_s

    def plus(self, other: ComputeTime, times: float = 1) -> ComputeTime:
        """The sum with another time that is spent `times` times."""
        return ComputeTime(self.products_s + times * other.products_s, self.memory_s + times * other.memory_s)


class Product(NamedTuple):
    """A matrix product or convolution of a traced program.

    Attributes:
        text: the dtypes and shapes of its operands.
        dtype: the dtype of its first operand.
        flops: of all its runs.
    """

    text: str
    dtype: str
    flops: float

    def seconds(self, chip: Chip) -> float:
        return self.flops / _rate(self.dtype, chip)


def _rate(dtype: str, chip: Chip) -> float:
    return chip.flops.effective * (chip.f32_share if dtype in ("float32", "float64") else 1)


def compute_time(jaxpr: Any, chip: Chip, times: Mapping[int, int], segment_of: Any) -> ComputeTime:
    """Estimates the time of a traced program on one device.

    Args:
        jaxpr: the jaxpr.
        chip: the chip.
        times: how often each segment runs for each time that the jaxpr has it, by its number; 1 if it is missing.
        segment_of: `segment_of(equation, default)` returns the number of the segment that an equation belongs to.
    """
    flat = jaxpr_stats.flattened(jaxpr)
    lifetimes = Lifetimes(flat, jax.memory.Space.Device, [], {})
    stored: dict[int, int] = {}
    for value, k in lifetimes.born.items():
        stored[k] = stored.get(k, 0) + value.num_bytes
    segments = itertools.accumulate(
        (segment_of(operation.equation, -1) for operation in flat.operations),
        lambda last, own: own if own >= 0 else last,
    )
    total = ComputeTime()
    for k, (operation, segment) in enumerate(zip(flat.operations, segments, strict=True)):
        if operation.name in ("scan", "while", "cond"):
            inner = [compute_time(j, chip, times, segment_of) for j in jaxprs.sub_jaxprs(operation.equation)]
            trips = jaxprs.scan_params(operation.equation).length if operation.name == "scan" else 1
            spent = ComputeTime().plus(max(inner, key=lambda time: time.total_s), trips)
        elif k not in stored or operation.name in jaxpr_stats.COLLECTIVES:
            continue
        else:
            spent = _time(operation, stored[k], lifetimes, chip)
        total = total.plus(spent, times.get(segment, 1))
    return total


def _time(operation: Operation, written: int, lifetimes: Lifetimes, chip: Chip) -> ComputeTime:
    if operation.name in _READS_PARTS:
        num_bytes = 2 * written
    elif operation.name in _WRITES:
        updates = operation.reads[1 if operation.name == "dynamic_update_slice" else 2]
        num_bytes = 2 * (updates.num_bytes if updates is not None else 0)
    else:
        bases = {base for v in operation.reads if v is not None for base in lifetimes.bases[v]}
        num_bytes = written + sum(base.num_bytes for base in bases)
    memory_s = num_bytes / chip.memory_rate.effective
    products_s = sum(product.seconds(chip) for product in products([operation.equation]))
    return ComputeTime(products_s, 0.0) if products_s >= memory_s else ComputeTime(0.0, memory_s)


def products(equations: Sequence[Equation], times: int = 1) -> Iterator[Product]:
    """Yields the matrix products and convolutions of some equations and of the functions that they call.

    Of a branch, all cases are yielded. Kernels with an unknown number of flops are left out.
    """
    for equation in equations:
        flops = _attention_flops(equation)
        if equation.primitive.name in ("dot_general", "conv_general_dilated"):
            flops = jaxpr_stats.equation_flops(equation)
        if flops:
            avals = [atom.aval for atom in equation.invars[:2]]
            text = " x ".join(f"{a.dtype.name}[{','.join(map(str, a.shape))}]" for a in avals)
            yield Product(text, avals[0].dtype.name, times * flops)
        trips = jaxprs.scan_params(equation).length if jaxprs.is_scan(equation) else 1
        for inner in jaxprs.sub_jaxprs(equation):
            yield from products(inner.eqns, times * trips)


def _attention_flops(equation: Equation) -> int:
    """The flops of attention by cuDNN: two products in the forward pass, and five in the backward pass.

    With a causal mask, the kernels compute half of the scores.
    """
    name = equation.primitive.name
    if not name.startswith(("dot_product_attention_fwd", "dot_product_attention_bwd")):
        return 0
    queries, keys = (atom.aval.shape for atom in equation.invars[:2])
    num_keys = keys[1 if equation.params["layout"] == 0 else 2]
    flops = (2 if "_fwd" in name else 5) * 2 * math.prod(queries) * num_keys
    return flops // 2 if "CAUSAL" in str(equation.params["mask_type"]) else flops
