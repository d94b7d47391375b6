"""Finds the parts of a traced function that compute each token by itself, and take much memory in between.

    hidden [tokens, width] ──► logits [tokens, vocabulary] ──► losses [tokens]
                             └────────── a region ──────────┘

Around each wide value, equations are added along one of its dims, as long as they carry it (`slices`). What mixes
tokens, such as attention, or is not known ends a region: at worst, something is not found.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from zerojax.program import jaxprs, slices
from zerojax.program.jaxprs import Atom, ClosedJaxpr, Equation, Jaxpr, Var
from zerojax.program.slices import Link

# A value is wide if it takes at least half of the bytes of the widest one in a region: logits in bf16 beside fp32.
_WIDE = 1 / 2
# The widest value takes at least as many times the bytes of all outputs of a region. A projection to queries, keys and
# values is no region.
_GAIN = 2


class Region(NamedTuple):
    """Equations along a dim, that of tokens."""

    equations: list[Equation]
    dims: dict[Var, int]  # the dim of tokens, of the values that have one
    size: int  # the number of tokens
    widest: Var
    inputs: list[Var]
    outputs: list[Var]


def find_regions(closed: ClosedJaxpr, weights: set[Var], tile_of: Callable[[int, int], int]) -> list[Region]:
    """The regions of a function that are larger than a tile. No equation is in two.

    Args:
        closed: the function.
        weights: inputs that are weights. Their dims are not those of tokens.
        tile_of: the tokens in a tile, of (the number of tokens, the bytes of the widest value).
    """
    return _Finder(closed, weights).regions(tile_of)


class _Finder:
    def __init__(self, closed: ClosedJaxpr, weights: set[Var]):
        self._equations, jaxpr = closed.jaxpr.eqns, closed.jaxpr
        self._constants, self._results = set(jaxpr.constvars), set(filter(jaxprs.is_var, jaxpr.outvars))
        self._of_weights = with_results(self._equations, weights)
        self._producer = {v: k for k, e in enumerate(self._equations) for v in e.outvars}
        self._readers = defaultdict[Var, list[int]](list)
        for k, equation in enumerate(self._equations):
            for v in dict.fromkeys(jaxprs.variables(equation)):
                self._readers[v].append(k)
        self._known: dict[int, list[Link]] = {}

    def regions(self, tile_of: Callable[[int, int], int]) -> list[Region]:
        taken, found = set[int](), list[Region]()
        for v in sorted(self._producer, key=num_bytes, reverse=True):
            if v in self._of_weights or self._producer[v] in taken:
                continue
            is_large = lambda size, v=v: tile_of(size, num_bytes(v)) < size
            each = (self._grown(v, d, taken) for d, size in enumerate(v.aval.shape) if is_large(size))
            candidates = [region for region in each if region is not None]
            best = max(candidates, key=lambda region: (region.size, len(region.equations)), default=None)
            if best is not None:
                found.append(best)
                taken |= {self._producer[w] for e in best.equations for w in e.outvars}
        return found

    def _links(self, k: int) -> list[Link]:
        if k not in self._known:
            self._known[k] = links(self._equations[k])
        return self._known[k]

    def _grown(self, widest: Var, dim: int, taken: set[int]) -> Region | None:
        """The region around a value, along one of its dims, or None."""
        limit, size = _WIDE * num_bytes(widest), widest.aval.shape[dim]
        dims, inside, todo = {widest: dim}, set[int](), [widest]

        def include(k: int) -> bool:
            """Adds an equation, if it carries the dim of what it reads and writes of the region."""
            if k in inside or k in taken:
                return k in inside
            link = self._agreeing(k, dims, size)
            if link is not None:
                new = [(v, d) for v, d in _pairs(self._equations[k], link) if v not in dims]
                dims.update(new)
                todo.extend(v for v, _ in new)
                inside.add(k)
            return link is not None

        # Add what writes and reads wide values, and then what is between.
        while todo:
            v = todo.pop()
            if num_bytes(v) >= limit:
                for k in (*([self._producer[v]] if v in self._producer else ()), *self._readers[v]):
                    include(k)
            if not todo and not all(map(include, self._between(inside))):
                return None
        if not jaxprs.multiplies(self._equations[k] for k in inside):
            return None

        inside, dims = self._with_cheap_inputs(inside, dims, size, taken)
        region = self._region(inside, dims, widest, dim)
        is_wide = any(num_bytes(v) >= limit for v in (*region.inputs, *region.outputs) if v in dims)
        result_bytes = sum(num_bytes(v) for v in region.outputs if v in dims)
        return None if is_wide or _GAIN * result_bytes > num_bytes(widest) else region

    def _agreeing(self, k: int, dims: dict[Var, int], size: int) -> Link | None:
        """The link of an equation that agrees with the dims so far, and with `size` tokens; weights have none."""
        equation = self._equations[k]
        for link in self._links(k):
            new = [(v, d) for v, d in _pairs(equation, link) if v not in dims]
            is_known = all(v.aval.shape[d] == size and v not in self._of_weights for v, d in new)
            if is_known and _agrees(equation, link, dims):
                return link
        return None

    def _between(self, inside: set[int]) -> list[int]:
        """The equations outside that depend on some inside, and on which others inside depend."""
        made = {v for k in inside for v in self._equations[k].outvars}
        read = {v for k in inside for v in jaxprs.variables(self._equations[k])}
        after = list[int]()
        for k in range(min(inside, default=0), max(inside, default=0)):
            if k not in inside and any(v in made for v in jaxprs.variables(self._equations[k])):
                after.append(k)
                made.update(self._equations[k].outvars)
        found = list[int]()
        for k in reversed(after):
            if any(v in read for v in self._equations[k].outvars):
                found.append(k)
                read.update(jaxprs.variables(self._equations[k]))
        return found

    def _with_cheap_inputs(
        self, inside: set[int], dims: dict[Var, int], size: int, taken: set[int]
    ) -> tuple[set[int], dict[Var, int]]:
        """Adds what computes inputs without products, as far back as leaves the fewest bytes of inputs: norms."""
        best, least = (set(inside), dict(dims)), self._input_bytes(inside, dims)
        inside, dims = set(inside), dict(dims)
        while True:
            producers = [self._producer[v] for v in self._inputs(inside) if v in dims and v in self._producer]
            cheap = [k for k in producers if k not in taken and self._is_cheap(k) and self._agreeing(k, dims, size)]
            if not cheap:
                return best
            k = max(cheap)
            link = self._agreeing(k, dims, size)
            assert link is not None
            dims.update(_pairs(self._equations[k], link))
            inside.add(k)
            if self._between(inside):
                return best
            outputs = (v for v in self._outputs(inside) if self._producer[v] == k)
            if (total := self._input_bytes(inside, dims) + sum(map(num_bytes, outputs))) <= least:
                best, least = (set(inside), dict(dims)), total

    def _is_cheap(self, k: int) -> bool:
        equation = self._equations[k]
        takes_rows = equation.primitive.name == "gather" and equation.invars[0] in self._of_weights
        return not takes_rows and not jaxprs.multiplies([equation])

    def _inputs(self, inside: set[int]) -> list[Var]:
        made = {v for k in inside for v in self._equations[k].outvars}
        read = dict.fromkeys(v for k in sorted(inside) for v in jaxprs.variables(self._equations[k]))
        return [v for v in read if v not in made and v not in self._constants]

    def _outputs(self, inside: set[int]) -> list[Var]:
        is_read = lambda v: v in self._results or any(k not in inside for k in self._readers[v])
        return [v for k in sorted(inside) for v in self._equations[k].outvars if is_read(v)]

    def _input_bytes(self, inside: set[int], dims: dict[Var, int]) -> int:
        return sum(num_bytes(v) for v in self._inputs(inside) if v in dims)

    def _region(self, inside: set[int], dims: dict[Var, int], widest: Var, dim: int) -> Region:
        equations = [self._equations[k] for k in sorted(inside)]
        return Region(equations, dims, widest.aval.shape[dim], widest, self._inputs(inside), self._outputs(inside))


def with_results(equations: Iterable[Equation], variables: Iterable[Var]) -> set[Var]:
    """The variables, and all that is computed from them alone."""
    found = set(variables)
    for equation in equations:
        read = jaxprs.variables(equation)
        if read and all(v in found for v in read):
            found.update(equation.outvars)
    return found


def num_bytes(v: Var) -> int:
    return math.prod(v.aval.shape) * getattr(v.aval.dtype, "itemsize", 0)


def _pairs(equation: Equation, link: Link) -> list[tuple[Var, int]]:
    """The operands and results that a link names, and their dims."""
    return [(atom, dim) for atom, dim in _sides(equation, link) if jaxprs.is_var(atom) and dim is not None]


def _agrees(equation: Equation, link: Link, dims: dict[Var, int]) -> bool:
    """Whether a link has the dims that are known already, and no operand whole that has one."""
    return all(dims.get(atom, dim) == dim for atom, dim in _sides(equation, link) if jaxprs.is_var(atom))


def _sides(equation: Equation, link: Link) -> list[tuple[Atom, int | None]]:
    outs = [None] * len(link.outs) if link.is_sum else link.outs
    return [*zip(equation.invars, link.ins, strict=True), *zip(equation.outvars, outs, strict=True)]


def links(equation: Equation) -> list[Link]:
    """As `slices.links`, also of a call of a function, such as one with its own derivative."""
    if not (jaxprs.has_own_derivative(equation) or jaxprs.is_call(equation)):
        return slices.links(equation)
    inner, found = jaxprs.called(equation)[0], list[Link]()
    ndims = {v.aval.ndim for v in equation.outvars}
    for dim in range(min(ndims)) if len(ndims) == 1 else ():
        reached = _followed(inner, inner.outvars, dim)
        if reached is not None:
            found.append(Link(tuple(reached.get(v) for v in inner.invars), (dim,) * len(equation.outvars)))
    return found


def _followed(jaxpr: Jaxpr, outputs: Sequence[Atom], dim: int) -> dict[Var, int] | None:
    """Follows a dim of the outputs to the inputs: the dims of values; None if another one is mixed with it."""
    dims = {atom: dim for atom in outputs if jaxprs.is_var(atom)}
    for equation in reversed(jaxpr.eqns):
        if any(v in dims for v in (*equation.outvars, *jaxprs.variables(equation))):
            carried = [each for each in links(equation) if each.keeps_size and _agrees(equation, each, dims)]
            if not carried:
                return None
            dims.update(_pairs(equation, carried[0]))
    return dims
