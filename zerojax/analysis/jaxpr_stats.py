"""Reads the values, matrix products, collectives and copies to host memory of a traced function.

Together with `zerojax.program.jaxprs`, this is the only module that knows how JAX represents traced functions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from zerojax.program.jaxprs import (
    CALLS,
    FUSED_ATTENTION,
    Atom,
    Equation,
    Var,
    is_offload,
    is_scan,
    is_var,
    multiplies,
    scan_params,
    sub_jaxprs,
)

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
        kind = COLLECTIVES.get(name, "offload" if is_offload(equation) else None)
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
