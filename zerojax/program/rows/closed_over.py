"""Finds arrays that a loss closes over although they have a row for each row of the batch, on every device."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from zerojax.program import jaxprs
from zerojax.program.jaxprs import Equation, Var

_KEEPS_DIM_0 = {"reshape", "squeeze", "concatenate", "dot_general", "reduce_sum", "reduce_max"}  # where its size stays


class ClosedOver(NamedTuple):
    """A constant of a traced loss: its aval, and the traceback of the first equation that reads it."""

    aval: Any
    trace: Any


def array_with_all_rows(
    closed: Any, row_vars: Collection[Var], key_vars: Collection[Var], num_rows: int
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
    first = None

    def has_all(atom: Any) -> bool:
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


def _pairs_rows(equation: Equation, has_all: Any) -> bool:
    """Whether an equation combines rows of the constant with rows of the other operand."""
    if equation.primitive.name == "gather":
        return has_all(equation.invars[1]) and 0 in equation.params["dimension_numbers"].start_index_map
    return jaxprs.is_elementwise(equation)
