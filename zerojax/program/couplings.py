"""Finds what couples the elements of one parameter in the update of an optimizer, such as products of its matrix.

    gradient, momentum ──► their mean ─┐                                  element by element
                                       ▼
                             ┌──────────────────────┐
                             │ norm, X, X Xᵀ, ...   │                     a `Coupling`: whole matrices
                             └─────────┬────────────┘
    parameter ─────────────────────────┴──► weight decay, learning rate   element by element

An update has a coupling for each parameter that it multiplies, inverts or decomposes. Sums over a parameter alone, such
as its norm, are none: each device adds up its shard, and a scalar is sent.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from zerojax.program import jaxprs
from zerojax.program.jaxprs import Equation, Jaxpr, Var

_SEVERAL = -1  # in place of a parameter, for values of several


class Coupling(NamedTuple):
    """The equations of an update that couple the elements of one parameter, with what is between them."""

    leaf: int  # the parameter
    level: int  # how often values of several parameters met before
    equations: list[Equation]  # in their order, with some that are computed element by element from the inputs
    own: list[Equation]  # those whose results are the outputs of no others
    inputs: list[Var]  # of this parameter, in the order of their first uses
    shared: list[Var]  # what is read and does not belong to this parameter alone, such as coefficients
    outputs: list[Var]  # what is read by others


def couplings(
    jaxpr: Jaxpr,
    leaf_of: Mapping[Var, int],
    is_local: Callable[[Equation, int], bool] = lambda equation, _: jaxprs.is_elementwise(equation),
) -> list[Coupling]:
    """The couplings of an update without nested jits.

    Args:
        jaxpr: the update.
        leaf_of: the parameters that its inputs belong to.
        is_local: whether an equation needs no whole matrix of a parameter. Products and what is between them do.

    A coupling has no equation that reads values of several parameters. If what couples a parameter precedes such an
    equation (a global norm of products) and follows it too, there are two couplings.
    """
    # Find the parameter of each value, and how often parameters have met.
    leaf: dict[Var, int | None] = dict(leaf_of)
    level: dict[Var, int] = {}
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)  # (parameter, level) -> equations
    for k, equation in enumerate(jaxpr.eqns):
        read = jaxprs.variables(equation)
        leaves = {leaf.get(v) for v in read} - {None}
        is_scaled = all(not v.aval.shape for v in read if leaf.get(v) == _SEVERAL)  # at most, as by a global norm
        stays = is_scaled and any(v.aval.shape for v in equation.outvars)
        meet = len(leaves - {_SEVERAL}) > 1 or (len(leaves) > 1 and not stays)
        own = _SEVERAL if meet else next(iter(leaves - {_SEVERAL} or leaves), None)
        own_level = max((level.get(v, 0) + (meet and leaf.get(v) != _SEVERAL) for v in read), default=0)
        leaf.update(dict.fromkeys(equation.outvars, own))
        level.update(dict.fromkeys(equation.outvars, own_level))
        if own not in (None, _SEVERAL):
            groups[own, own_level].append(k)
    leaf = {v: own for v, own in leaf.items() if own != _SEVERAL}

    users: dict[Var, set[int]] = defaultdict(set)
    for k, equation in enumerate(jaxpr.eqns):
        for v in jaxprs.variables(equation):
            users[v].add(k)
    found = []
    for (own, own_level), numbers in sorted(groups.items()):
        chosen = _coupled({k: jaxpr.eqns[k] for k in numbers}, lambda equation, own=own: is_local(equation, own))
        if chosen:
            found.append(_coupling(jaxpr, chosen, own, own_level, leaf, users))
    return found


def around(equations: Sequence[Equation], found: Sequence[Coupling]) -> tuple[list[Equation], list[Equation]]:
    """(Those of the equations that do not wait for the outputs of couplings, those that do), without their own."""
    own, waiting = {id(e) for each in found for e in each.own}, {v for each in found for v in each.outputs}
    before, later = list[Equation](), list[Equation]()
    for equation in equations:
        if id(equation) not in own:
            waits = any(v in waiting for v in jaxprs.variables(equation))
            (later if waits else before).append(equation)
            waiting.update(equation.outvars if waits else ())
    return before, later


def _coupled(equations: Mapping[int, Equation], is_local: Callable[[Equation], bool]) -> set[int]:
    """Those of the equations of one parameter that are products or decompositions, or not local and before or after
    one; and what is between them."""
    producer = {v: k for k, equation in equations.items() for v in equation.outvars}
    before = {k: {producer[v] for v in jaxprs.variables(e) if v in producer} for k, e in equations.items()}

    def reached(start: set[int]) -> tuple[set[int], set[int]]:
        """What depends on equations, and what they depend on, with themselves."""
        later, earlier = set(start), set(start)
        for k in equations:
            if before[k] & later:
                later.add(k)
        for k in sorted(equations, reverse=True):
            if k in earlier:
                earlier |= before[k]
        return later, earlier

    later, earlier = reached({k for k, e in equations.items() if _is_coupling(e)})
    later, earlier = reached({k for k in sorted(later | earlier) if not is_local(equations[k])})
    return later & earlier


def _is_coupling(equation: Equation) -> bool:
    """Whether an equation computes more than once with each element: a product or a decomposition of matrices."""
    if equation.primitive.name in jaxprs.PRODUCTS:
        sizes = [math.prod(a.aval.shape) for a in equation.invars]
        return _multiplications(equation) > sum(sizes)
    inner = [e for jaxpr in jaxprs.sub_jaxprs(equation) for e in jaxpr.eqns]
    return equation.primitive.name in jaxprs.OF_MATRICES or any(map(_is_coupling, inner))


def _multiplications(equation: Equation) -> int:
    size, shape = math.prod(equation.outvars[0].aval.shape), equation.invars[0].aval.shape
    if equation.primitive.name != "dot_general":
        return size * math.prod(equation.invars[1].aval.shape)
    (contracted, _), _ = equation.params["dimension_numbers"]
    return size * math.prod(shape[dim] for dim in contracted)


def multiplications(equations: Iterable[Equation]) -> int:
    """The multiplications of products, also in scans, and roughly those of decompositions."""
    total = 0
    for equation in equations:
        if equation.primitive.name in jaxprs.PRODUCTS:
            total += _multiplications(equation)
        elif equation.primitive.name in jaxprs.OF_MATRICES:
            shape = equation.invars[0].aval.shape
            total += 10 * math.prod(shape) * min(shape[-2:])
        else:
            trips = jaxprs.scan_params(equation).length if jaxprs.is_scan(equation) else 1
            total += trips * sum(multiplications(jaxpr.eqns) for jaxpr in jaxprs.sub_jaxprs(equation))
    return total


def _coupling(
    jaxpr: Jaxpr,
    chosen: set[int],
    own: int,
    own_level: int,
    leaf: Mapping[Var, int | None],
    users: Mapping[Var, set[int]],
) -> Coupling:
    """The coupling of the `chosen` equations of a parameter; `users` are those that read each variable."""
    producer = {v: k for k, equation in enumerate(jaxpr.eqns) for v in equation.outvars}
    results = {v for v in jaxpr.outvars if jaxprs.is_var(v)}
    defined = [v for k in sorted(chosen) for v in jaxpr.eqns[k].outvars]
    outputs = [v for v in defined if v in results or users[v] - chosen]

    # Compute anew what follows element by element from other inputs, so that less is sent.
    inside = set(chosen)

    def inputs() -> list[Var]:
        read = dict.fromkeys(v for k in sorted(inside) for v in jaxprs.variables(jaxpr.eqns[k]))
        return [v for v in read if producer.get(v) not in inside]

    def needed(v: Var, given: dict[Var, set[int] | None]) -> set[int] | None:
        """The equations that compute a value from given ones, element by element; None if there are others.

        `given` has them for other values, too.
        """
        if v not in given and leaf.get(v) is not None:
            k, parts = producer.get(v), list[set[int] | None]([None])
            if k is not None and jaxprs.is_elementwise(jaxpr.eqns[k]):
                parts = [{k}, *(needed(read, given) for read in jaxprs.variables(jaxpr.eqns[k]))]
            given[v] = None if None in parts else set().union(*(part for part in parts if part is not None))
        return given.get(v, set())

    for v in reversed(inputs()):
        given: dict[Var, set[int] | None] = {each: set() for each in inputs() if each is not v}
        if leaf.get(v) is not None and v.aval.shape and (equations := needed(v, given)):
            inside |= equations
    read = inputs()
    equations = [jaxpr.eqns[k] for k in sorted(inside)]
    return Coupling(
        own,
        own_level,
        equations,
        [jaxpr.eqns[k] for k in sorted(chosen)],
        [v for v in read if leaf.get(v) is not None],
        [v for v in read if leaf.get(v) is None],
        outputs,
    )
