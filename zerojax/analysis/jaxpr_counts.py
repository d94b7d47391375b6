"""Counts what a traced function computes and moves: its matrix products, its collectives, its copies to host memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.analysis.hardware import Chip, Cluster
from zerojax.analysis.hlo_collectives import Collective
from zerojax.program import jaxprs
from zerojax.program.jaxprs import (
    CALLS,
    FUSED_ATTENTION,
    Atom,
    Equation,
    Var,
    is_scan,
    is_var,
    multiplies,
    scan_params,
    sub_jaxprs,
)
from zerojax.utils.typing import AnyMesh

# The primitives that move data between devices, each with its name in compiled programs.
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
_UNSUPPORTED_PRIMITIVES = frozenset({"precv", "psend", "ragged_all_to_all"})  # and primitives with a start and an end
# Primitives with an unknown number of flops: kernels, ragged products, and computations on a part of the devices.
_UNKNOWN_PRODUCTS = frozenset(
    {"dot_product_attention_bwd", "dot_product_attention_bwd_wrapper", "pallas_call", "ragged_dot_general", "shard_map"}
)


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """A value of a flattened jaxpr. The same object is used wherever the value is read."""

    num_bytes: int


class Operation(NamedTuple):
    """An equation of a flattened jaxpr. A None in `reads` stands for a literal."""

    name: str
    equation: Equation
    reads: list[Value | None]
    results: list[Value]


class FlatJaxpr(NamedTuple):
    """A jaxpr in which nested calls are replaced by their equations. Only loops and branches keep inner jaxprs."""

    inputs: list[Value]
    operations: list[Operation]
    outputs: list[Value | None]


def manual_parts(closed: Any) -> list[Any]:
    """Returns the bodies of the `shard_map`s of a traced function in order: the computations of one device."""
    return [e.params["jaxpr"] for e in closed.jaxpr.eqns if e.primitive.name == "shard_map"]


_INLINED = CALLS | {
    "checkpoint", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "remat2", "shard_map"
}  # fmt: skip


def flattened(jaxpr: Any, space: Any = jax.memory.Space.Device) -> FlatJaxpr:
    """Returns the `FlatJaxpr` of a jaxpr. Two calls of one function give two sets of values.

    Args:
        jaxpr: an open or closed jaxpr.
        space: the memory space to look at. Values in another memory space have 0 bytes.
    """
    operations: list[Operation] = []

    def walk(jaxpr: Any, arguments: Sequence[Value | None]) -> list[Value | None]:
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        scope: dict[Var, Value | None] = {v: Value(bytes_of(v, space)) for v in jaxpr.constvars}
        scope |= dict(zip(jaxpr.invars, arguments, strict=True))
        read = lambda atom: scope[atom] if is_var(atom) else None
        for e in jaxpr.eqns:
            reads = [read(atom) for atom in e.invars]
            if e.primitive.name in _INLINED:
                results = walk(next(sub_jaxprs(e)), reads)
            else:
                results = [Value(bytes_of(v, space)) for v in e.outvars]
                operations.append(Operation(e.primitive.name, e, reads, results))
            scope |= dict(zip(e.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    inputs = [Value(bytes_of(v, space)) for v in getattr(jaxpr, "jaxpr", jaxpr).invars]
    return FlatJaxpr(inputs, operations, walk(jaxpr, inputs))


def bytes_of(atom: Atom, space: Any) -> int:
    """Returns the bytes of a value in a memory space, or 0 if it is not an array. PRNG keys count as their words."""
    shape, dtype = getattr(atom.aval, "shape", None), getattr(atom.aval, "dtype", None)
    if shape is None or dtype is None or getattr(atom.aval, "memory_space", jax.memory.Space.Device) != space:
        return 0
    return math.prod(shape) * getattr(dtype, "itemsize", 8)


def product_flops(jaxpr: Any) -> int:
    """Returns the flops of the matrix products and convolutions: 2 x elements of the result x elements contracted.

    Raises:
        ValueError: if a product runs an unknown number of times, or if its flops are unknown.
    """
    return sum(equation_flops(equation) for equation in jaxpr.eqns)


def equation_flops(equation: Equation) -> int:
    """Returns the flops of one equation, see `product_flops`."""
    name, shapes = equation.primitive.name, [atom.aval.shape for atom in equation.invars if hasattr(atom.aval, "shape")]
    if name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(shapes[0][d] for d in contracted)
    if name == "conv_general_dilated":
        features = equation.params["dimension_numbers"].rhs_spec[0]
        zeros = math.prod(equation.params["lhs_dilation"])  # of so many elements of the dilated image, one is not 0
        return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(shapes[1]) // shapes[1][features] // zeros
    if name in FUSED_ATTENTION:  # cuDNN: q [B, T, N, H] and k [B, S, K, H], or with the heads before the positions
        keys = shapes[1][1 if equation.params["layout"] == 0 else 2]
        return 2 * 2 * math.prod(shapes[0]) * keys
    inner = [product_flops(sub) for sub in sub_jaxprs(equation)]
    if is_scan(equation):
        return scan_params(equation).length * sum(inner)
    unknown = name in _UNKNOWN_PRODUCTS or (name == "cond" and len(set(inner)) > 1) or (name == "while" and any(inner))
    if unknown:
        raise ValueError(f"jaxprs: cannot count the flops of {name!r}\n  got:      {str(equation)[:160]}")
    return inner[0] if name == "cond" else sum(inner)


class Transfer(NamedTuple):
    """A collective of a traced function, or a copy to host memory.

    Attributes:
        kind: a value of `COLLECTIVES`, or 'offload' for a copy to host memory.
        axes: the names of the mesh axes that it spans; empty for a copy.
        group: the positions along these axes of the devices of one group, if it is over groups of them; else None.
        values: for each operand, its aval or that of its result, whichever is larger.
        trips: the number of times it runs.
        loops: the number of loops around it.
    """

    kind: str
    axes: tuple[str, ...]
    group: tuple[int, ...] | None
    values: tuple[Any, ...]
    trips: int
    loops: int


def transfers(equations: Iterable[Equation], trips: int = 1, loops: int = 0) -> Iterator[Transfer]:
    """Yields every collective and every copy to host memory of some equations and of the functions they call.

    Raises:
        ValueError: if one is in a branch or in a loop whose trip count is unknown, or if its kind is not supported.
    """
    for equation in equations:
        name = equation.primitive.name
        if name in _UNSUPPORTED_PRIMITIVES or name.removesuffix("_start") in COLLECTIVES.keys() - {name}:
            raise ValueError(f"jaxprs: this kind of communication is not supported\n  got:      {name}")
        kind = COLLECTIVES.get(name, "offload" if _is_offload(equation) else None)
        if kind:
            names = equation.params.get("axes", equation.params.get("axis_name", ()))
            axes = tuple(names) if isinstance(names, tuple | list | frozenset | set) else (names,)
            groups = equation.params.get("axis_index_groups")
            group = tuple(groups[0]) if groups else None
            yield Transfer(kind, axes, group, tuple(map(_larger, equation.invars, equation.outvars)), trips, loops)
        times = trips * (scan_params(equation).length if is_scan(equation) else 1)
        deeper = loops + is_scan(equation)
        inside = [each for inner in sub_jaxprs(equation) for each in transfers(inner.eqns, times, deeper)]
        if inside and name in ("cond", "while"):
            raise ValueError(
                f"jaxprs: the number of times a collective runs is unknown\n  got:      {inside[0].kind} in a {name}"
            )
        yield from inside


def _is_offload(equation: Equation) -> bool:
    """Whether the equation copies an array to host memory. Copied scalars are events, and do not count."""
    moves = equation.primitive.name == "device_put" and jax.memory.Space.Host in equation.params["devices"]
    return moves and any(atom.aval.ndim for atom in equation.invars)


def _larger(operand: Atom, result: Var) -> Any:
    return operand.aval if operand.aval.size > result.aval.size else result.aval


def independent_gathers(jaxpr: Any, loops: int = 0) -> Iterator[tuple[int, list[Transfer]]]:
    """Yields (loop depth, the all_gathers that depend on no matrix product of the same body) of each body.

    A body is that of the function itself, of a loop or of a branch. A loop that gathers one leaf in pieces and has no
    products belongs to the body around it.
    """
    dependent: set[Value | None] = set()  # values that depend on a product
    free: list[Transfer] = []
    for _, equation, reads, results in flattened(jaxpr).operations:
        computes, waits = multiplies([equation]), any(v in dependent for v in reads if v is not None)
        if computes or waits:
            dependent.update(results)
        if not computes and not waits:
            free += [each for each in transfers([equation]) if each.kind == "all-gather"]
        for inner in sub_jaxprs(equation) if computes else ():
            yield from independent_gathers(inner, loops + is_scan(equation))
    yield loops, free


def avals_bytes(avals: Iterable[Any]) -> int:
    return sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in avals)


def traced_collectives(jaxpr: Any, mesh: AnyMesh) -> list[Collective]:
    """Returns every collective of a traced step, in the form of `hlo_collectives.compiled_collectives`.

    Which computation overlaps with a collective is up to the compiler, so none counts as exposed.

    Args:
        jaxpr: the closed jaxpr of the step.
        mesh: the mesh whose axes the jaxpr names.

    Raises:
        ValueError: if the number of times that a collective runs is unknown.
    """
    devices = np.arange(math.prod(mesh.shape.values())).reshape(tuple(mesh.shape.values()))
    found = []
    for each in transfers(jaxpr.eqns):
        if each.kind == "offload":
            continue
        along = devices[tuple(slice(None) if name in each.axes else 0 for name in mesh.shape)].ravel()
        group = (along if each.group is None else along[list(each.group)]).tolist()
        for dtype in dict.fromkeys(aval.dtype for aval in each.values):
            full_bytes = avals_bytes(aval for aval in each.values if aval.dtype == dtype)
            found.append(
                Collective(each.kind, dtype_name(dtype), full_bytes, tuple(group), each.trips, each.loops > 0, False)
            )
    return found


def dtype_name(dtype: Any) -> str:
    """Returns the name of a dtype in compiled programs: 'bf16', 'f32', 's32'."""
    if dtype == jnp.bool_:
        return "pred"
    letters = {"bfloat": "bf", "float": "f", "int": "s", "uint": "u"}
    name = jnp.dtype(dtype).name
    word = name.rstrip("0123456789")
    return letters[word] + name.removeprefix(word) if word in letters else name.replace("float", "f").replace("_", "")


def offloaded_bytes(jaxpr: Any) -> int:
    """Returns the bytes of all arrays that a step copies to host memory."""
    return sum(each.trips * avals_bytes(each.values) for each in transfers(jaxpr.eqns) if each.kind == "offload")


def independent_gather_bytes(jaxpr: Any, most_itemsize: int) -> list[tuple[int, int]]:
    """Returns (loop depth, bytes of all_gathers that depend on no matrix product) of each body that gathers.

    An element counts with at most `most_itemsize` bytes: a gather in a wider dtype gathers no more weights. Of a gather
    over groups, which follows another one or is followed by it, only what it adds counts.
    """
    size = lambda aval: math.prod(aval.shape) * min(aval.dtype.itemsize, most_itemsize)
    added = lambda each: 1 - 1 / len(each.group) if each.group else 1
    total = lambda gathers: round(
        sum(each.trips * added(each) * size(aval) for each in gathers for aval in each.values)
    )
    return [(loops, total(gathers)) for loops, gathers in independent_gathers(jaxpr) if gathers]


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


def products(equations: Sequence[Equation], times: int = 1) -> Iterator[Product]:
    """Yields the matrix products and convolutions of some equations and of the functions that they call.

    Of a branch, all cases are yielded. Kernels with an unknown number of flops are left out.
    """
    for equation in equations:
        flops = _attention_flops(equation)
        if equation.primitive.name in ("dot_general", "conv_general_dilated"):
            flops = equation_flops(equation)
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


class Throughput(NamedTuple):
    """Tokens per second of all devices and of each, and the share of all devices' peak that the model's flops reach.

    The share is None if the flops are not known.
    """

    tokens_per_s: float
    tokens_per_device_s: float
    model_flop_utilization: float | None


def model_flops(loss: Any) -> int:
    """Returns the flops of the matrix products of a step without recomputation: three times those of the loss.

    Each product of the forward pass has two in the backward pass, one for each operand. As usual, attention counts in
    full whatever its mask (12 x layers x width x length for each token), and elementwise operations do not count.

    Args:
        loss: the jaxpr of the loss.

    Raises:
        ValueError: if a product runs an unknown number of times, or if the flops of a kernel are unknown.

    Source:
        Chowdhery et al., "PaLM", appendix B, arXiv 2204.02311.
    """
    return 3 * product_flops(loss)


def throughput(step_s: float, cluster: Cluster, num_tokens: int, flops: int | None) -> Throughput:
    """Returns the throughput of a step over `num_tokens` tokens of all devices.

    Args:
        step_s: seconds of the step.
        cluster: the devices that it runs on.
        num_tokens: tokens of all devices in a step.
        flops: flops of all devices in a step, see `model_flops`; None if they are not known.
    """
    peak = cluster.num_devices * cluster.chip.flops.peak
    rate = num_tokens / step_s
    return Throughput(rate, rate / cluster.num_devices, None if flops is None else flops / step_s / peak)
