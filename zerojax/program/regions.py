"""Finds the parts of a traced function that compute each token by itself, and take much memory in between.

    hidden [tokens, width] ──► logits [tokens, vocabulary] ──► losses [tokens]
                             └────────── a region ──────────┘

Around each product that is much larger than its operands, equations are added along one of its dims, as long as they
carry it (`slices`). What mixes tokens, such as attention, or is not known ends a region: at worst, one is not found.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from zerojax.program import jaxprs, slices
from zerojax.program.jaxprs import Atom, ClosedJaxpr, Equation, Jaxpr, Var
from zerojax.program.slices import Link

# A value of a region is wide if it has at least half of the elements of the product.
_WIDE = 1 / 2
# The product has at least as many times the elements of each operand that is no weight, and of all outputs of its
# region together. A projection to queries, keys and values is no region.
_GAIN = 2


class Region(NamedTuple):
    """Equations along a dim, that of tokens."""

    equations: list[Equation]
    dims: dict[Var, int]  # the dim of tokens, of the values that have one
    size: int  # the number of tokens
    widest: Var  # of the values with as many elements as the product, the one that takes the most bytes
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
        for k in sorted(filter(self._widens, range(len(self._equations))), key=self._product_size, reverse=True):
            if k in taken:
                continue
            (product,) = self._equations[k].outvars
            each = (self._grown(product, d, taken) for d, size in enumerate(product.aval.shape) if size > 1)
            large = [r for r in each if r is not None and tile_of(r.size, num_bytes(r.widest)) < r.size]
            if large:
                found.append(max(large, key=lambda region: (region.size, len(region.equations))))
                taken |= {self._producer[v] for e in found[-1].equations for v in e.outvars}
        return found

    def _product_size(self, k: int) -> int:
        return num_elements(self._equations[k].outvars[0])

    def _widens(self, k: int) -> bool:
        """Whether an equation is a product that is much larger than what it is computed from, without weights."""
        equation = self._equations[k]
        if equation.primitive.name != "dot_general" or equation.outvars[0] in self._of_weights:
            return False
        data = [v for v in jaxprs.variables(equation) if v not in self._of_weights]
        return self._product_size(k) >= _GAIN * max(map(num_elements, data), default=0)

    def _links(self, k: int) -> list[Link]:
        if k not in self._known:
            self._known[k] = links(self._equations[k])
        return self._known[k]

    def _grown(self, product: Var, dim: int, taken: set[int]) -> Region | None:
        """The region around a value, along one of its dims, or None."""
        size, is_wide = product.aval.shape[dim], lambda v: num_elements(v) >= _WIDE * num_elements(product)
        dims, inside, todo = {product: dim}, set[int](), [product]

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
            if is_wide(v):
                for k in (*([self._producer[v]] if v in self._producer else ()), *self._readers[v]):
                    include(k)
            if not todo and not all(map(include, self._between(inside))):
                return None
        inside, dims = self._with_sums(*self._with_cheap_inputs(inside, dims, size, taken), size, taken)
        inputs, outputs = self._inputs(inside), self._outputs(inside)
        results = [v for v in outputs if v in dims]
        few = _GAIN * sum(map(num_elements, results)) <= num_elements(product)
        if self._producer[product] not in inside or not few or any(is_wide(v) for v in inputs if v in dims):
            return None
        widest = max((v for v in dims if num_elements(v) == num_elements(product)), key=num_bytes)
        return Region([self._equations[k] for k in sorted(inside)], dims, size, widest, inputs, outputs)

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

    def _with_sums(
        self, inside: set[int], dims: dict[Var, int], size: int, taken: set[int]
    ) -> tuple[set[int], dict[Var, int]]:
        """Adds what follows, if all of it ends in sums over tokens without another product: the mean of losses."""
        grown, known = set(inside), dict(dims)
        todo = [v for v in self._outputs(inside) if v in dims]
        while todo:
            v = todo.pop()
            for k in self._readers[v]:
                link = None if k in taken or not self._is_cheap(k) else self._agreeing(k, known, size)
                if k not in grown and link is None:
                    return inside, dims
                if k not in grown and link is not None:
                    grown.add(k)
                    known.update(_pairs(self._equations[k], link))
                    todo += () if link.is_sum else self._equations[k].outvars
            if v in self._results:
                return inside, dims
        return (inside, dims) if self._between(grown) else (grown, known)

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


def with_results(equations: Iterable[Equation], variables: Iterable[Var]) -> set[Var]:
    """The variables, and all that is computed from them alone."""
    found = set(variables)
    for equation in equations:
        read = jaxprs.variables(equation)
        if read and all(v in found for v in read):
            found.update(equation.outvars)
    return found


def num_elements(v: Var) -> int:
    return math.prod(v.aval.shape)


def num_bytes(v: Var) -> int:
    return num_elements(v) * getattr(v.aval.dtype, "itemsize", 0)


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
