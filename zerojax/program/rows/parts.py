"""Cuts what a loss computes from sums, means and extremes over rows: into these, and what is computed from them.

The parts of all devices are reduced, and the rest is computed from the results. So a ratio of sums, or the root of a
mean, is that of the rows of all devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
from jax.core import ShapedArray

from zerojax.program import jaxprs
from zerojax.program.jaxprs import Atom, ClosedJaxpr, Equation, Var
from zerojax.program.rows.trace import RowTrace
from zerojax.program.rows.values import REDUCED, Kind
from zerojax.utils.typing import Array, DTypeLike, Shape

if TYPE_CHECKING:
    from jaxlib._jax import Traceback

_MOST_ELEMENTS = 1 << 20  # of all parts; more would be a matrix of weights


@dataclasses.dataclass(frozen=True)
class RowParts:
    """What is computed from parts. Two are equal also if they are of traces with other numbers of rows."""

    names: tuple[str, ...]  # of the results
    kinds: tuple[Kind, ...]  # of the parts: SUM, MEAN, MAX, MIN, or SAME
    types: tuple[tuple[Shape, DTypeLike], ...]  # of the parts
    parts: tuple[Var, ...] = dataclasses.field(compare=False)  # variables of a traced loss
    equations: tuple[Equation, ...] = dataclasses.field(compare=False)  # compute the results from the parts
    results: tuple[Atom, ...] = dataclasses.field(compare=False)  # one for each name

    def finish(self, parts: Sequence[Array]) -> dict[str, Array]:
        """The results by name, from the parts over all rows, of any dtype."""
        scope = {v: _as_dtype(part, v.aval.dtype) for v, part in zip(self.parts, parts, strict=True)}
        jaxprs.run_equations(self.equations, scope)
        read = lambda atom: scope[atom] if jaxprs.is_var(atom) else atom.val
        return {name: read(atom) for name, atom in zip(self.names, self.results, strict=True)}


def _as_dtype(part: Array, dtype: DTypeLike) -> Array:
    if dtype == jnp.bool_:
        return jnp.asarray(part > 0)
    return jnp.asarray(part if jnp.issubdtype(dtype, jnp.inexact) else jnp.round(part), dtype)


def row_parts(trace: RowTrace, results: Mapping[str, Atom]) -> RowParts | None:
    """Cuts results of a traced loss; None if one of them is not computed from parts alone, or the parts are large."""
    # The equations that can be computed anywhere.
    equations = trace.closed.jaxpr.eqns
    producers = {v: k for k, equation in enumerate(equations) for v in equation.outvars}
    constant: list[bool] = []
    for equation in equations:
        sources = [producers.get(v) for v in jaxprs.variables(equation)]
        constant.append(not equation.effects and all(k is not None and constant[k] for k in sources))

    # From the results back to the parts.
    parts: dict[Var, Kind] = {}
    needed: set[int] = set()
    pending, seen = list(results.values()), set()
    while pending:
        atom = pending.pop()
        if not jaxprs.is_var(atom) or atom in seen:
            continue
        seen.add(atom)
        kind, k = trace.of(atom).kind, producers.get(atom)
        if kind in REDUCED or (kind is Kind.SAME and (k is None or not constant[k])):
            parts[atom] = kind
        elif k is not None and kind in (Kind.DERIVED, Kind.SAME):
            needed.add(k)
            pending.extend(equations[k].invars)
        else:
            return None
    if not all(map(_can_be_reduced, parts, parts.values())) or sum(v.aval.size for v in parts) > _MOST_ELEMENTS:
        return None
    chosen = tuple(equations[k] for k in sorted(needed))
    types = tuple((v.aval.shape, v.aval.dtype) for v in parts)
    return RowParts(tuple(results), tuple(parts.values()), types, tuple(parts), chosen, tuple(results.values()))


def _can_be_reduced(part: Var, kind: Kind) -> bool:
    dtype = part.aval.dtype
    is_number = jnp.issubdtype(dtype, jnp.number) or dtype == jnp.bool_
    return jnp.issubdtype(dtype, jnp.inexact) or (kind is not Kind.MEAN and is_number)


_KEEPS_DIM_0 = {"reshape", "squeeze", "concatenate", "dot_general", "reduce_sum", "reduce_max"}  # where its size stays


class ClosedOver(NamedTuple):
    """A constant of a traced loss: its aval, and the traceback of the first equation that reads it."""

    aval: ShapedArray
    trace: Traceback | None


def array_with_all_rows(
    closed: ClosedJaxpr, row_vars: Collection[Var], key_vars: Collection[Var], num_rows: int
) -> ClosedOver | None:
    """The first constant that has the rows of all devices, or None.

    The dim 0 of a constant is one of rows if it is combined with values of the batch element by element, or if it picks
    some of them, as labels do; or if the constant takes the place of the batch, which the loss does not read. A table
    of positions or a mask is combined in other dims. So what is found is an array of rows in all likelihood.

    Args:
        closed: the closed jaxpr of the loss on one device's rows, without nested jits. Its first output is the loss.
        row_vars: its inputs that have rows.
        key_vars: its inputs that are PRNG keys.
        num_rows: the number of rows on all devices, more than one device has.
    """
    of_batch, of_key = set(row_vars), set(key_vars)
    aligned: dict[Var, ClosedOver | None] = dict.fromkeys(closed.jaxpr.constvars)  # its dim 0 is that of a constant
    constants_alone, first = set(closed.jaxpr.constvars), None  # what is computed from constants alone

    def has_all(atom: Atom) -> bool:
        is_constant = atom in aligned if jaxprs.is_var(atom) else True
        return is_constant and tuple(atom.aval.shape[:1]) == (num_rows,)

    for equation in closed.jaxpr.eqns:
        reads = jaxprs.variables(equation)
        if constants := [atom for atom in equation.invars if has_all(atom)]:
            known = [aligned[atom] for atom in constants if jaxprs.is_var(atom) and aligned[atom]]
            constant = known[0] if known else ClosedOver(constants[0].aval, equation.source_info.traceback)
            first = first or constant
            if any(v in of_batch and v not in aligned for v in reads) and _pairs_rows(equation, has_all):
                return constant
            if _keeps_dim_0(equation):
                aligned |= dict.fromkeys(equation.outvars, constant)
        if reads and constants_alone.issuperset(reads):  # such as some rows of a larger constant
            constants_alone.update(equation.outvars)
            aligned |= dict.fromkeys((v for v in equation.outvars if v not in aligned), None)
        for reached in of_batch, of_key:
            if any(v in reached for v in reads):
                reached.update(equation.outvars)
    loss = closed.jaxpr.outvars[0]
    return None if jaxprs.is_var(loss) and loss in of_batch | of_key else first


def _keeps_dim_0(equation: Equation) -> bool:
    """Whether dim 0 of the result is that of the operands, as long as it has their size."""
    if equation.primitive.name == "broadcast_in_dim":
        return equation.params["broadcast_dimensions"][:1] == (0,)
    return jaxprs.is_elementwise(equation) or equation.primitive.name in _KEEPS_DIM_0


def _pairs_rows(equation: Equation, has_all: Callable[[Atom], bool]) -> bool:
    """Whether an equation combines rows of the constant with rows of the other operand."""
    if equation.primitive.name == "gather":
        return has_all(equation.invars[1]) and 0 in equation.params["dimension_numbers"].start_index_map
    return jaxprs.is_elementwise(equation)
