"""Counts what a traced function computes and moves: its matrix products, its collectives, its copies to host memory.

Jaxprs are not a stable interface: together with `zerojax.program.jaxprs`, this module knows how JAX writes them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.typing import DTypeLike

from zerojax.analysis.hardware import Chip
from zerojax.analysis.hlo_collectives import COLLECTIVES, Collective
from zerojax.program import jaxprs
from zerojax.program.jaxprs import ClosedJaxpr, Equation, Jaxpr, Var
from zerojax.utils.typing import AnyMesh

Space: TypeAlias = jax.memory.Space  # pyright: ignore[reportInvalidTypeForm]
_UNSUPPORTED_PRIMITIVES = frozenset({"precv", "psend", "ragged_all_to_all"})  # and primitives with a start and an end
# Primitives with an unknown number of flops: kernels, ragged products, and computations on a part of the devices.
_UNKNOWN_PRODUCTS = frozenset(
    {"dot_product_attention_bwd", "dot_product_attention_bwd_wrapper", "pallas_call", "ragged_dot_general", "shard_map"}
)
_INLINED = jaxprs.CALLS | {
    "checkpoint", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "remat2", "shard_map"
}  # fmt: skip


def manual_parts(closed: ClosedJaxpr) -> list[Jaxpr]:
    """The bodies of the `shard_map`s of a traced function in order: the computations of one device."""
    return [next(jaxprs.sub_jaxprs(e)) for e in closed.jaxpr.eqns if e.primitive.name == "shard_map"]


class Visit(NamedTuple):
    """An equation of a function, or of one that it calls.

    Attributes:
        trips: the number of times it runs, if it is in no branch and no loop of unknown length.
        loops: the number of scans around it.
        unknown: 'cond' or 'while', if one of them is around it; else None.
    """

    equation: Equation
    trips: int = 1
    loops: int = 0
    unknown: str | None = None


def walk(equations: Iterable[Equation], within: Visit | None = None) -> Iterator[Visit]:
    """Yields equations in order, each before those of the functions that it calls; of a branch, those of all cases."""
    for equation in equations:
        visit = within._replace(equation=equation) if within else Visit(equation)
        yield visit
        inside = visit
        if jaxprs.is_scan(equation):
            inside = visit._replace(trips=visit.trips * jaxprs.scan_params(equation).length, loops=visit.loops + 1)
        elif equation.primitive.name in ("cond", "while"):
            inside = visit._replace(unknown=equation.primitive.name)
        for inner in jaxprs.sub_jaxprs(equation):
            yield from walk(inner.eqns, inside)


# Values and operations of a function without its nested calls.


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """A value of a flattened jaxpr. The same object is used wherever the value is read."""

    num_bytes: int


class Operation(NamedTuple):
    """An equation of a flattened jaxpr. Literals among its operands are values of 0 bytes."""

    name: str
    equation: Equation
    reads: list[Value]
    results: list[Value]


class FlatJaxpr(NamedTuple):
    """A jaxpr in which nested calls are replaced by their equations. Only loops and branches keep inner jaxprs."""

    inputs: list[Value]
    operations: list[Operation]
    outputs: list[Value]


def flattened(jaxpr: Jaxpr, space: Space = Space.Device) -> FlatJaxpr:
    """The `FlatJaxpr` of a jaxpr. Two calls of one function give two sets of values.

    Values in another memory space than `space` have 0 bytes.
    """
    operations: list[Operation] = []

    def run(jaxpr: Jaxpr, arguments: Sequence[Value]) -> list[Value]:
        scope = {v: Value(_bytes_in(v, space)) for v in jaxpr.constvars}
        scope |= dict(zip(jaxpr.invars, arguments, strict=True))
        read = lambda atom: scope[atom] if jaxprs.is_var(atom) else Value(0)
        for e in jaxpr.eqns:
            reads = [read(atom) for atom in e.invars]
            if e.primitive.name in _INLINED:
                results = run(next(jaxprs.sub_jaxprs(e)), reads)
            else:
                results = [Value(_bytes_in(v, space)) for v in e.outvars]
                operations.append(Operation(e.primitive.name, e, reads, results))
            scope |= dict(zip(e.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    inputs = [Value(_bytes_in(v, space)) for v in jaxpr.invars]
    return FlatJaxpr(inputs, operations, run(jaxpr, inputs))


def _bytes_in(v: Var, space: Space) -> int:
    """The bytes of a value in a memory space, or 0 if it is not an array. PRNG keys count as their words."""
    shape, dtype = getattr(v.aval, "shape", None), getattr(v.aval, "dtype", None)
    if shape is None or dtype is None or getattr(v.aval, "memory_space", Space.Device) != space:
        return 0
    return math.prod(shape) * getattr(dtype, "itemsize", 8)


# Matrix products.


class Product(NamedTuple):
    """A matrix product or convolution, with the dtypes and shapes of its operands as text, and the flops of all its
    runs.
    """

    text: str
    dtype: str
    flops: float

    def seconds(self, chip: Chip) -> float:
        """The seconds at the rate that large products reach."""
        return self.flops / (chip.flops.effective * (chip.f32_share if self.dtype in ("float32", "float64") else 1))


def products(equations: Iterable[Equation]) -> Iterator[Product]:
    """Yields the matrix products and convolutions of some equations and of the functions that they call.

    Of a branch, all cases are yielded. Kernels with an unknown number of flops are left out. Attention by cuDNN has two
    products in the forward pass, and five in the backward pass; under a causal mask, half of each is computed.
    """
    for equation, trips, *_ in walk(equations):
        name = equation.primitive.name
        if name.startswith(("dot_product_attention_fwd", "dot_product_attention_bwd")):
            flops = (2 if "_fwd" in name else 5) * _scores_flops(equation)
            flops = flops // 2 if "CAUSAL" in str(equation.params["mask_type"]) else flops
        else:
            flops = _product_flops(equation)
        if flops:
            avals = [atom.aval for atom in equation.invars[:2]]
            text = " x ".join(f"{a.dtype.name}[{','.join(map(str, a.shape))}]" for a in avals)
            yield Product(text, avals[0].dtype.name, trips * flops)


def _product_flops(equation: Equation) -> int:
    """The flops of a matrix product or a convolution: 2 x elements of the result x elements contracted; else 0."""
    if equation.primitive.name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        lhs = equation.invars[0].aval.shape
        return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(lhs[d] for d in contracted)
    if equation.primitive.name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        features = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
        zeros = math.prod(equation.params["lhs_dilation"])  # of so many elements of the dilated image, one is not 0
        return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) // features // zeros
    return 0


def _scores_flops(equation: Equation) -> int:
    """The flops of all scores of cuDNN's attention: q [B, T, N, H] and k [B, S, K, H], or heads before positions."""
    queries, keys = (atom.aval.shape for atom in equation.invars[:2])
    return 2 * math.prod(queries) * keys[1 if equation.params["layout"] == 0 else 2]


def model_flops(loss: Jaxpr | ClosedJaxpr) -> int:
    """The flops of the matrix products of a step without recomputation: three times those of the loss.

    Each product of the forward pass has two in the backward pass, one for each operand. As usual, attention counts in
    full whatever its mask (12 x layers x width x length for each token), and elementwise operations do not count.

    Raises:
        ValueError: if a product runs an unknown number of times, or if the flops of a kernel are unknown.

    Source:
        Chowdhery et al., "PaLM", appendix B, arXiv 2204.02311.
    """
    return 3 * sum(map(_equation_flops, loss.eqns))


def _equation_flops(equation: Equation) -> int:
    name = equation.primitive.name
    if name in jaxprs.FUSED_ATTENTION:
        return 2 * _scores_flops(equation)
    if own := _product_flops(equation):
        return own
    inner = [sum(map(_equation_flops, sub.eqns)) for sub in jaxprs.sub_jaxprs(equation)]
    if jaxprs.is_scan(equation):
        return jaxprs.scan_params(equation).length * sum(inner)
    unknown = name in _UNKNOWN_PRODUCTS or (name == "cond" and len(set(inner)) > 1) or (name == "while" and any(inner))
    if unknown:
        raise ValueError(f"jaxprs: cannot count the flops of {name!r}\n  got:      {str(equation)[:160]}")
    return inner[0] if name == "cond" else sum(inner)


# Collectives, and copies to host memory.


class Transfer(NamedTuple):
    """A collective of a traced function, or a copy to host memory.

    Attributes:
        kind: a value of `COLLECTIVES`, or 'offload' for a copy to host memory.
        axes: the names of the mesh axes that it spans; empty for a copy.
        group: the positions along these axes of the devices of one group, if it is over groups of them; else None.
        values: for each operand, its aval or that of its result, whichever is larger.
        trips, loops: the number of times it runs, and the number of loops around it.
    """

    kind: str
    axes: tuple[str, ...]
    group: tuple[int, ...] | None
    values: tuple[ShapedArray, ...]
    trips: int
    loops: int


def transfers(equations: Iterable[Equation]) -> Iterator[Transfer]:
    """Yields every collective and every copy to host memory of some equations and of the functions they call.

    Raises:
        ValueError: if one is in a branch or in a loop whose trip count is unknown, or if its kind is not supported.
    """
    for equation, trips, loops, unknown in walk(equations):
        name = equation.primitive.name
        if name in _UNSUPPORTED_PRIMITIVES or name.removesuffix("_start") in COLLECTIVES.keys() - {name}:
            raise ValueError(f"jaxprs: this kind of communication is not supported\n  got:      {name}")
        kind = COLLECTIVES.get(name, "offload" if jaxprs.is_offload(equation) else None)
        if kind is None:
            continue
        if unknown:
            raise ValueError(
                f"jaxprs: the number of times a collective runs is unknown\n  got:      {kind} in a {unknown}"
            )
        names = equation.params.get("axes", equation.params.get("axis_name", ()))
        axes = tuple(names) if isinstance(names, tuple | list | frozenset | set) else (names,)
        groups = equation.params.get("axis_index_groups")
        values = tuple(
            max(result.aval, operand.aval, key=lambda aval: aval.size)
            for operand, result in zip(equation.invars, equation.outvars, strict=False)
        )
        yield Transfer(kind, axes, tuple(groups[0]) if groups else None, values, trips, loops)


def traced_collectives(jaxpr: Jaxpr | ClosedJaxpr, mesh: AnyMesh) -> list[Collective]:
    """Every collective of a traced step, in the form of `hlo_collectives.compiled_collectives`.

    Which computation overlaps with a collective is up to the compiler, so none counts as exposed. Raises ValueError if
    the number of times that one runs is unknown.
    """
    devices = np.arange(math.prod(mesh.shape.values())).reshape(tuple(mesh.shape.values()))
    found = []
    for each in transfers(jaxpr.eqns):
        if each.kind == "offload":
            continue
        along = devices[tuple(slice(None) if name in each.axes else 0 for name in mesh.shape)].ravel()
        group = tuple((along if each.group is None else along[list(each.group)]).tolist())
        for dtype in dict.fromkeys(aval.dtype for aval in each.values):
            full_bytes = _num_bytes(aval for aval in each.values if aval.dtype == dtype)
            found.append(
                Collective(each.kind, dtype_name(dtype), full_bytes, group, each.trips, each.loops > 0, exposed=False)
            )
    return found


def dtype_name(dtype: DTypeLike) -> str:
    """The name of a dtype in compiled programs: 'bf16', 'f32', 's32'."""
    if dtype == jnp.bool_:
        return "pred"
    letters = {"bfloat": "bf", "float": "f", "int": "s", "uint": "u"}
    name = jnp.dtype(dtype).name
    word = name.rstrip("0123456789")
    return letters[word] + name.removeprefix(word) if word in letters else name.replace("float", "f").replace("_", "")


def offloaded_bytes(jaxpr: Jaxpr | ClosedJaxpr) -> int:
    """The bytes of all arrays that a step copies to host memory."""
    return sum(each.trips * _num_bytes(each.values) for each in transfers(jaxpr.eqns) if each.kind == "offload")


def _num_bytes(avals: Iterable[ShapedArray], most_itemsize: int = 64) -> int:
    return sum(math.prod(aval.shape) * min(aval.dtype.itemsize, most_itemsize) for aval in avals)


def independent_gather_bytes(jaxpr: Jaxpr | ClosedJaxpr, most_itemsize: int) -> list[tuple[int, int]]:
    """(loop depth, bytes of all_gathers that depend on no matrix product) of each body that gathers.

    A body is that of the function itself, of a loop or of a branch. A loop that gathers one leaf in pieces and has no
    products belongs to the body around it. An element counts with at most `most_itemsize` bytes: a gather in a wider
    dtype gathers no more weights. Of a gather over groups, which follows another one or is followed by it, only what
    it adds counts.
    """
    added = lambda each: 1 - 1 / len(each.group) if each.group else 1
    total = lambda gathers: round(
        sum(each.trips * added(each) * _num_bytes(each.values, most_itemsize) for each in gathers)
    )
    inner = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    return [(loops, total(gathers)) for loops, gathers in _independent_gathers(inner) if gathers]


def _independent_gathers(jaxpr: Jaxpr, loops: int = 0) -> Iterator[tuple[int, list[Transfer]]]:
    dependent: set[Value] = set()  # values that depend on a product
    free: list[Transfer] = []
    for _, equation, reads, results in flattened(jaxpr).operations:
        computes, waits = jaxprs.multiplies([equation]), not dependent.isdisjoint(reads)
        if computes or waits:
            dependent.update(results)
        else:
            free += [each for each in transfers([equation]) if each.kind == "all-gather"]
        for inner in jaxprs.sub_jaxprs(equation) if computes else ():
            yield from _independent_gathers(inner, loops + jaxprs.is_scan(equation))
    yield loops, free
