"""Finds outputs of a traced loss that are sums over the rows of the batch, where a mean is expected."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from zerojax.transform import jaxprs
from zerojax.transform.jaxprs import Equation, Var

# Equations through which a sum remains one. Whatever multiplies or divides may be what makes a mean of it.
_KEEP_SUMS = {"convert_element_type", "copy", "neg", "reduce_precision", "reshape", "squeeze"}
_ADD = {"add", "add_any", "sub"}


def sums_over_rows(closed: Any, row_vars: Collection[Var], num_rows: int) -> list[bool]:
    """For each output, whether it is a sum over rows, or adds one up, and nothing divides or multiplies it.

    A dim counts as one of rows if a multiple of `num_rows` values is summed over it, and they depend on the batch. So
    what is found is a sum in all likelihood, and a sum can be overlooked: in a scan, or after a product.

    Args:
        closed: the closed jaxpr of the loss on one device's rows, without nested jits (`jaxprs.inlined`).
        row_vars: its inputs that have rows.
        num_rows: the number of rows; with a single one, a sum is a mean.
    """
    producers: dict[Var, Equation] = {}
    of_batch = set(row_vars)
    for equation in closed.jaxpr.eqns:
        producers |= dict.fromkeys(equation.outvars, equation)
        if any(v in of_batch for v in jaxprs.variables(equation)):
            of_batch.update(equation.outvars)

    def is_sum(atom: Any) -> bool:
        equation = producers.get(atom) if jaxprs.is_var(atom) and atom in of_batch else None
        if equation is None:
            return False
        name, operands = equation.primitive.name, equation.invars
        if name == "reduce_sum":
            shape = operands[0].aval.shape
            num_values = math.prod(shape[dim] for dim in equation.params["axes"])
            return (num_values > 0 and num_values % num_rows == 0) or is_sum(operands[0])
        if name in _KEEP_SUMS:
            return is_sum(operands[0])
        return name in _ADD and any(map(is_sum, operands))

    return [num_rows > 1 and is_sum(atom) for atom in closed.jaxpr.outvars]
