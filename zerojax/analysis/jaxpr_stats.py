"""What a traced function does, as it is written: its values, its matrix products, what it moves between devices.

With `jaxprs`, on which it stands, the one place that knows how JAX represents traced functions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from zerojax.transform.jaxprs import Atom, Equation, Var, is_scan, is_var, multiplies, scan_params, sub_jaxprs

# What moves data between devices, by the name that compiled programs have for it.
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
_UNREAD = frozenset({"precv", "psend", "ragged_all_to_all"})  # and those with a start and an end
_ATTENTION = frozenset({"dot_product_attention_fwd", "dot_product_attention_fwd_wrapper"})
# They multiply, and how much is not known here: kernels, ragged products, and what runs on a part of the devices.
_UNKNOWN_PRODUCTS = frozenset(
    {"dot_product_attention_bwd", "dot_product_attention_bwd_wrapper", "pallas_call", "ragged_dot_general", "shard_map"}
)


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """One result of a flattened program, the same wherever it is read."""

    num_bytes: int


class Operation(NamedTuple):
    """An equation of a flattened program: None among `reads` is a literal."""

    name: str
    equation: Equation
    reads: list[Value | None]
    results: list[Value]


class Flat(NamedTuple):
    """A jaxpr with everything that is run once, where it stands, written out in place: only loops and branches stay."""

    inputs: list[Value]
    operations: list[Operation]
    outputs: list[Value | None]


def manual_parts(closed: Any) -> list[Any]:
    """The bodies of the `shard_map`s of a traced function, in order: what one device computes."""
    return [e.params["jaxpr"] for e in closed.jaxpr.eqns if e.primitive.name == "shard_map"]


_IN_PLACE = frozenset(
    ["checkpoint", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "jit"]
) | {"pjit", "remat2", "shard_map"}


def flattened(jaxpr: Any, space: Any = jax.memory.Space.Device) -> Flat:
    """See `Flat`. Two calls of one function are two sets of values. What is in another memory space counts 0 bytes."""
    operations: list[Operation] = []

    def walk(jaxpr: Any, arguments: Sequence[Value | None]) -> list[Value | None]:
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        scope: dict[Var, Value | None] = {v: Value(bytes_of(v, space)) for v in jaxpr.constvars}
        scope |= dict(zip(jaxpr.invars, arguments, strict=True))
        read = lambda atom: scope[atom] if is_var(atom) else None
        for e in jaxpr.eqns:
            reads = [read(atom) for atom in e.invars]
            if e.primitive.name in _IN_PLACE:
                results = walk(next(sub_jaxprs(e)), reads)
            else:
                results = [Value(bytes_of(v, space)) for v in e.outvars]
                operations.append(Operation(e.primitive.name, e, reads, results))
            scope |= dict(zip(e.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    inputs = [Value(bytes_of(v, space)) for v in getattr(jaxpr, "jaxpr", jaxpr).invars]
    return Flat(inputs, operations, walk(jaxpr, inputs))


def bytes_of(atom: Atom, space: Any) -> int:
    """Of a value in a memory space; 0 for what is no array. PRNG keys count as the words that they are made of."""
    shape, dtype = getattr(atom.aval, "shape", None), getattr(atom.aval, "dtype", None)
    if shape is None or dtype is None or getattr(atom.aval, "memory_space", jax.memory.Space.Device) != space:
        return 0
    return math.prod(shape) * getattr(dtype, "itemsize", 8)


def product_flops(jaxpr: Any) -> int:
    """Of the matrix products and convolutions of a jaxpr: 2 x elements of the result x elements contracted.

    Raises:
        ValueError: a product that runs an unknown number of times, or in a form that is not known here.
    """
    return sum(_equation_flops(equation) for equation in jaxpr.eqns)


def _equation_flops(equation: Equation) -> int:
    name, shapes = equation.primitive.name, [atom.aval.shape for atom in equation.invars if hasattr(atom.aval, "shape")]
    if name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(shapes[0][d] for d in contracted)
    if name == "conv_general_dilated":
        features = equation.params["dimension_numbers"].rhs_spec[0]
        return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(shapes[1]) // shapes[1][features]
    if name in _ATTENTION:  # by cuDNN: q [B, T, N, H] and k [B, S, K, H], or with heads before positions
        keys = shapes[1][1 if equation.params["layout"] == 0 else 2]
        return 2 * 2 * math.prod(shapes[0]) * keys
    inner = [product_flops(sub) for sub in sub_jaxprs(equation)]
    if is_scan(equation):
        return scan_params(equation).length * sum(inner)
    unknown = name in _UNKNOWN_PRODUCTS or (name == "cond" and len(set(inner)) > 1) or (name == "while" and any(inner))
    if unknown:
        raise ValueError(f"jaxprs: products of {name!r} cannot be counted\n  got:      {str(equation)[:160]}")
    return inner[0] if name == "cond" else sum(inner)


class Moved(NamedTuple):
    """A collective of a traced function, or a copy to host memory.

    Attributes:
        kind: of `COLLECTIVES`; 'offload' for a copy to host memory.
        axes: names of the mesh axes that it spans; none for a copy.
        values: of each operand its aval, or that of its result if that is larger.
        trips: how often it runs.
        loops: how many loops it is in.
    """

    kind: str
    axes: tuple[str, ...]
    values: tuple[Any, ...]
    trips: int
    loops: int


def moved(equations: Iterable[Equation], trips: int = 1, loops: int = 0) -> Iterator[Moved]:
    """Every collective and every copy to host memory of some equations, and of what they call.

    Raises:
        ValueError: one is in a loop whose trips are not known, or in a branch; or of a kind that is not read.
    """
    for equation in equations:
        name = equation.primitive.name
        if name in _UNREAD or name.removesuffix("_start") in COLLECTIVES.keys() - {name}:
            raise ValueError(f"jaxprs: a kind of communication that is not read\n  got:      {name}")
        kind = COLLECTIVES.get(name, "offload" if _is_offload(equation) else None)
        if kind:
            names = equation.params.get("axes", equation.params.get("axis_name", ()))
            axes = tuple(names) if isinstance(names, tuple | list | frozenset | set) else (names,)
            yield Moved(kind, axes, tuple(map(_larger, equation.invars, equation.outvars)), trips, loops)
        times = trips * (scan_params(equation).length if is_scan(equation) else 1)
        deeper = loops + is_scan(equation)
        inside = [each for inner in sub_jaxprs(equation) for each in moved(inner.eqns, times, deeper)]
        if inside and name in ("cond", "while"):
            raise ValueError(f"jaxprs: how often this runs is not known\n  got:      {inside[0].kind} in a {name}")
        yield from inside


def _is_offload(equation: Equation) -> bool:
    """Of an array. Scalars are sent to host memory too, to tell when it is there."""
    moves = equation.primitive.name == "device_put" and jax.memory.Space.Host in equation.params["devices"]
    return moves and any(atom.aval.ndim for atom in equation.invars)


def _larger(operand: Atom, result: Var) -> Any:
    return operand.aval if operand.aval.size > result.aval.size else result.aval


def free_gathers(jaxpr: Any, loops: int = 0) -> Iterator[tuple[int, list[Moved]]]:
    """(how many loops it is in, the gathers that wait for no matrix product in it) of each body of a function.

    A body is the function itself, or what a loop or a branch runs. What moves a leaf in pieces is one gather.
    """
    behind: set[Value | None] = set()  # values that wait for a product
    free: list[Moved] = []
    for _, equation, reads, results in flattened(jaxpr).operations:
        computes, waits = multiplies([equation]), any(v in behind for v in reads if v is not None)
        if computes or waits:
            behind.update(results)
        if not computes and not waits:
            free += [each for each in moved([equation]) if each.kind == "all-gather"]
        for inner in sub_jaxprs(equation) if computes else ():
            yield from free_gathers(inner, loops + is_scan(equation))
    yield loops, free
