"""Finds the values through which gradients flow, as JAX's own differentiation would.

A value takes part in the backward pass if it has a tangent, and if a cotangent reaches it. Where `stop_gradient`, an
integer or an operation without a derivative is in between, JAX has symbolic zeros: nothing is computed from them.
Cotangents that are arrays of zeros would be wrong there, since zero times an infinite derivative is NaN.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import jax
import jax.numpy as jnp
from jax.core import ShapedArray

from zerojax.program import jaxprs
from zerojax.program.jaxprs import Equation, Jaxpr, Var
from zerojax.utils.typing import Array, Aval

# The tangent of the result depends on that of each operand. What is not named here is differentiated to find out.
_PASS_TANGENTS = frozenset([
    "abs", "add", "add_any", "concatenate", "convert_element_type", "conv_general_dilated", "copy", "copy_p", "cos",
    "cumsum", "div", "dot_general", "dynamic_slice", "dynamic_update_slice", "erf", "exp", "exp2", "expand_dims",
    "expm1", "gather", "integer_pow", "log", "log1p", "logistic", "max", "min", "mul", "name", "neg", "pad", "pow",
    "broadcast_in_dim", "reduce_max", "reduce_min", "reduce_precision", "reduce_sum", "reshape", "rsqrt", "select_n",
    "sin", "slice", "split", "sqrt", "square", "squeeze", "sub", "tanh", "transpose",
])  # fmt: skip


def is_differentiable(aval: Aval | ShapedArray | Array) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def with_tangents(equations: Iterable[Equation], sources: Iterable[Var]) -> set[Var]:
    """The variables that have a tangent, other than a symbolic zero, if the sources have one. Includes the sources."""
    found = set(sources)
    for equation in equations:
        flags = tangents(equation, [jaxprs.is_var(atom) and atom in found for atom in equation.invars])
        found.update(v for v, flag in zip(equation.outvars, flags, strict=True) if flag)
    return found


def tangents(equation: Equation, operands: Sequence[bool]) -> list[bool]:
    """Whether each result of an equation has a tangent, if the flagged operands have one."""
    floating = [is_differentiable(v.aval) for v in equation.outvars]
    if not any(operands) or not any(floating):
        return [False] * len(floating)
    name = equation.primitive.name
    # The derivative of a `custom_vjp` is known only to its backward pass, where `zeros` finds it. Tangents also go
    # through mutable arrays, whose values have no variables.
    if name in _PASS_TANGENTS or name.startswith("custom_vjp") or jaxprs.makes_references_inside(equation):
        return floating
    if jaxprs.is_scan(equation):
        scan, carried = jaxprs.scan_params(equation), list(operands)
        first, last = scan.num_consts, scan.num_consts + scan.num_carry
        while True:  # until no more of the carried values have one
            flags = _of_outputs(scan.body.jaxpr, carried)
            merged = [a or b for a, b in zip(carried[first:last], flags, strict=False)]
            if merged == carried[first:last]:
                return merged + flags[scan.num_carry :]
            carried[first:last] = merged
    if jaxprs.is_call(equation) or jaxprs.is_remat(equation):
        return _of_outputs(jaxprs.called(equation)[0], operands)
    return _differentiated(equation, operands)


def _of_outputs(jaxpr: Jaxpr, inputs: Sequence[bool]) -> list[bool]:
    found = with_tangents(jaxpr.eqns, (v for v, flag in zip(jaxpr.invars, inputs, strict=True) if flag))
    return [jaxprs.is_var(atom) and atom in found for atom in jaxpr.outvars]


def _differentiated(equation: Equation, operands: Sequence[bool]) -> list[bool]:
    """As `tangents`, by JAX's rule for the primitive."""
    flagged = {atom for atom, flag in zip(equation.invars, operands, strict=True) if flag}
    read = dict.fromkeys(jaxprs.variables(equation))
    varied, constant = [v for v in read if v in flagged], [v for v in read if v not in flagged]
    results = [v for v in equation.outvars if not jaxprs.is_dropped(v)]

    def out_tangents(primals: list[Array], others: list[Array], given: list[Array]) -> list[Array]:
        def fn(*primals: Array) -> list[Array]:
            scope = dict(zip([*varied, *constant], [*primals, *others], strict=True))
            jaxprs.run_equations([equation], scope)
            return [scope[v] for v in results]

        return jax.jvp(fn, tuple(primals), tuple(given))[1]

    avals = [v.aval for v in varied]
    traced = jax.make_jaxpr(out_tangents)(avals, [v.aval for v in constant], avals).jaxpr
    sources = dependencies(traced, traced.invars[len(read) :])
    has_tangent = {v for v, positions in zip(results, sources, strict=True) if positions}
    return [v in has_tangent for v in equation.outvars]


def dependencies(jaxpr: Jaxpr, inputs: Sequence[Var]) -> list[frozenset[int]]:
    """For each output, the positions among `inputs` of those that it is computed from."""
    found: dict[Var, frozenset[int]] = {v: frozenset([i]) for i, v in enumerate(inputs)}
    of = lambda atom: found.get(atom, frozenset()) if jaxprs.is_var(atom) else frozenset()
    for equation in jaxpr.eqns:
        read = [of(atom) for atom in equation.invars]
        if not any(read):
            continue
        everything = frozenset().union(*read)
        inside = [everything] * len(equation.outvars)
        if jaxprs.is_call(equation) and not jaxprs.makes_references_inside(equation):
            inner = jaxprs.called(equation)[0]
            inside = [frozenset().union(*(read[i] for i in k)) for k in dependencies(inner, inner.invars)]
        found.update(zip(equation.outvars, inside, strict=True))
        written = filter(jaxprs.is_reference, jaxprs.variables(equation))
        found.update((v, everything | of(v)) for v in written)
    return [of(atom) for atom in jaxpr.outvars]


def zeros(jaxpr: Jaxpr) -> list[bool]:
    """Whether each output is an array of zeros, which stands for a symbolic zero in the result of a transposition."""
    found: set[Var] = set()
    is_none = lambda atom: atom.aval.dtype == jax.dtypes.float0  # the cotangent of an integer
    is_zero = lambda atom: atom in found if jaxprs.is_var(atom) else is_none(atom) or bool(atom.val == 0)
    for equation in jaxpr.eqns:
        if equation.primitive.name == "broadcast_in_dim" and is_zero(equation.invars[0]):
            found.update(equation.outvars)
    return [is_zero(atom) for atom in jaxpr.outvars]


def reached(start: Sequence[bool], links: Sequence[Collection[int]]) -> list[bool]:
    """Which values cotangents reach in any iteration of a loop.

    Args:
        start: which cotangents come from outside of the loop.
        links: for each value that is carried, the positions in `start` of the cotangents that its own is computed from.
    """
    flags = list(start)
    while True:
        added = [i for i, sources in enumerate(links) if not flags[i] and any(flags[k] for k in sources)]
        if not added:
            return flags
        for i in added:
            flags[i] = True
