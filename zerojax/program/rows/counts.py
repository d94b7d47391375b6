"""The values of what counts rows in a traced loss: numbers, and arrays that are made for each row.

A number of rows is a sum over rows of the same number, so that `sum / count` is a mean, and a count is summed over
devices like any sum. An array whose dims count rows has rows, whatever it is made of.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import jax.numpy as jnp
import numpy as np

from zerojax.program import jaxprs
from zerojax.program.jaxprs import Atom, ClosedJaxpr, Equation, Var
from zerojax.program.rows.sizes import Size, SizesOfTrace, is_uniform
from zerojax.program.rows.values import SAME, Kind, RowValue, met, mixed, plain_factors, united
from zerojax.utils.typing import ArrayLike, Shape


def constant(value: ArrayLike) -> RowValue:
    return RowValue(const=float(np.real(np.ravel(value)[0]))) if is_uniform(value) else SAME


def with_counts_apart(flat: ClosedJaxpr, sizes: SizesOfTrace, num_rows: int) -> tuple[ClosedJaxpr, dict[Var, RowValue]]:
    """A jaxpr in which numbers that depend on the number of rows are constants; the values of constants that do."""
    jaxpr, values = flat.jaxpr, dict(zip(flat.jaxpr.constvars, flat.consts, strict=True))
    counts = {}
    for v, size, dims in zip(jaxpr.constvars, sizes.consts.numbers, sizes.consts.dims, strict=True):
        if dims:
            value = constant(values[v]) if size is Size.FIXED else SAME
            rows = rows_of_dims(value, v.aval.shape, dims, num_rows, is_repeated=size is Size.INVERSE)
            counts[v] = rows.replace(scaled=size is Size.INVERSE)
        elif size is not Size.FIXED:
            counts[v] = sized_value(constant(values[v]), size)

    def apart(atoms: Sequence[Atom], numbers: Sequence[Size]) -> list[Atom]:
        found = []
        for atom, size in zip(atoms, numbers, strict=True):
            if size is not Size.FIXED and not jaxprs.is_var(atom):
                (v,) = jaxprs.fresh_variables([atom.aval])
                values[v], counts[v] = np.asarray(atom.val, atom.aval.dtype), sized_value(constant(atom.val), size)
                atom = v
            found.append(atom)
        return found

    top, outer = [], iter(sizes.equations)
    for equation in jaxpr.eqns:
        numbers = next(outer).numbers
        for _ in jaxprs.walk(e for inner in jaxprs.sub_jaxprs(equation) for e in inner.eqns):
            next(outer)
        is_fixed = all(size is Size.FIXED for size in numbers) or not counts_rows(equation)
        top.append(equation if is_fixed else jaxprs.with_operands(equation, apart(equation.invars, numbers)))
    outputs = apart(jaxpr.outvars, sizes.outputs)
    return jaxprs.with_parts(flat, values, top, outputs), counts


def counts_rows(equation: Equation) -> bool:
    """Whether a number of rows that an operation reads is a quantity, and not the end of a range of indices."""
    name, results = equation.primitive.name, [v.aval for v in equation.outvars]
    if name in ("mul", "div", "sub") or any(jnp.issubdtype(aval.dtype, jnp.inexact) for aval in results):
        return True
    return name == "add" and not results[0].ndim


def sized_value(value: RowValue, size: Size) -> RowValue:
    """The value of a number that depends on the number of rows."""
    if size is Size.COUNT:
        return RowValue(Kind.SUM, const=value.const)
    return (
        RowValue(Kind.DERIVED, of=frozenset({Kind.SUM}), is_inverse=True)
        if size is Size.INVERSE
        else met(mixed([value]))
    )


def rows_of_dims(
    value: RowValue, shape: Shape, dims: Collection[int], num_rows: int, is_repeated: bool = False
) -> RowValue:
    """A value that depends on no row, as rows, which some of its dims count.

    Its elements are the same for each row if `is_repeated`; otherwise they are those of the rows of a device, as if
    there were no others.
    """
    if value.kind is not Kind.SAME or value.index_dim is not None:
        return value
    factors = list(plain_factors(shape))
    for dim in dims:
        size = shape[dim]
        factors[dim] = ((num_rows, True), (size // num_rows, False)) if size % num_rows == 0 else ((size, True),)
    found = united([value], Kind.ROWS, dims=tuple(factors), const=value.const)
    return found if is_repeated or value.const is not None or value.on_device else met(found)
