"""Runs a function slice by slice, along a dim of some of its inputs.

The dim is followed through the equations by their links (`slices`). Results are slices too, or the sum of what slices
have, or whole. What does not depend on the slice is computed once.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterable, Sequence
from typing import TypeAlias, cast

import jax.numpy as jnp
from jax import lax

from zerojax.comm.schedule import events, zeros_after
from zerojax.program import jaxprs, slices
from zerojax.program.jaxprs import Atom, ClosedJaxpr, Equation, Var
from zerojax.program.slices import Link
from zerojax.utils.typing import Array, ArrayLike, DTypeLike


class Mixed(Exception):
    """A slice of a result depends on other slices of the inputs, or no rule knows whether it does."""


class Sum(enum.Enum):
    """In place of a dim: what slices have is to be added."""

    SUM = "sum"


SUM = Sum.SUM
Place: TypeAlias = int | Sum | None  # the dim of slices; None for what is whole

# What is linear in its first operand: of a sum, it is the sum of what it is of each term.
_LINEAR_IN_FIRST = frozenset({
    "broadcast_in_dim", "convert_element_type", "copy", "div", "mul", "neg", "reduce_sum", "reshape", "squeeze",
    "transpose",
})  # fmt: skip
# What is computed for a slice instead of taken from the whole: it costs less than to read it.
_MADE = jaxprs.BY_ELEMENT | {"broadcast_in_dim", "iota"}

# So many slices or fewer run without a loop. Compilers overlap their products with communication; they do not know how
# long a loop takes.
_UNROLLED = 4


class Sliced:
    """A function of slices and of whole inputs.

    Args:
        closed: the function, without nested calls.
        dims: of each input, the dim along which it is sliced; None if it is whole.
        size: of all of these dims.

    Attributes:
        places: of each output.

    Raises `Mixed` if a slice depends on other slices.
    """

    def __init__(self, closed: ClosedJaxpr, dims: Sequence[int | None], size: int):
        self._closed, self._dims, self._size = closed, list(dims), size
        jaxpr = closed.jaxpr
        self._places: dict[Var, Place] = {v: d for v, d in zip(jaxpr.invars, dims, strict=True) if d is not None}
        self._producer = {v: e for e in jaxpr.eqns for v in e.outvars}
        self._in_slices: list[tuple[Equation, Link | None]] = []  # None for what is linear in a sum
        for equation in jaxpr.eqns:
            if any(v in self._places for v in jaxprs.variables(equation)):
                self._in_slices.append((equation, self._follow(equation)))
        self.places = [self._places.get(atom) if jaxprs.is_var(atom) else None for atom in jaxpr.outvars]
        self._once = self._computed_once()

    def _follow(self, equation: Equation) -> Link | None:
        """Finds how an equation works on slices, and notes the places of its results."""
        read = [self._places.get(a) if jaxprs.is_var(a) else None for a in equation.invars]
        if SUM in read:
            if not _is_linear(equation, read):
                raise Mixed
            self._places.update(dict.fromkeys(equation.outvars, SUM))
            return None
        fits = lambda link: all(place in (None, own) for own, place in zip(link.ins, read, strict=True))
        link = next(filter(fits, slices.links(equation)), None)
        if link is None:
            raise Mixed
        for v, dim in zip(equation.outvars, link.outs, strict=True):
            self._places[v] = SUM if link.is_sum else dim
        return link

    def _computed_once(self) -> list[Equation]:
        """The equations that do not depend on the slice and are needed as a whole."""
        jaxpr = self._closed.jaxpr
        needed = {v for v, place in zip(jaxpr.outvars, self.places, strict=True) if jaxprs.is_var(v) and place is None}
        for equation, link in self._in_slices:
            ins = [None] * len(equation.invars) if link is None else link.ins
            for atom, dim in zip(equation.invars, ins, strict=True):
                needed.update(self._read_whole(atom, dim))
        in_slices, found = {id(equation) for equation, _ in self._in_slices}, []
        for equation in reversed(jaxpr.eqns):
            if id(equation) not in in_slices and any(v in needed for v in equation.outvars):
                found.append(equation)
                needed.update(jaxprs.variables(equation))
        return found[::-1]

    def _read_whole(self, atom: Atom, dim: int | None) -> Iterable[Var]:
        """What is needed as a whole to read a value, or a slice of it."""
        if not jaxprs.is_var(atom) or atom in self._places:
            return ()
        made = self._made_from(atom, dim)
        if made is None:
            return (atom,)
        equation, link = made
        return [v for a, d in zip(equation.invars, link.ins, strict=True) for v in self._read_whole(a, d)]

    def _made_from(self, v: Var, dim: int | None) -> tuple[Equation, Link] | None:
        """The equation that makes a slice of a value which does not depend on the slice, if it is not read instead."""
        equation = self._producer.get(v)
        if dim is None or equation is None or equation.primitive.name not in _MADE:
            return None
        link = next((each for each in slices.links(equation) if each.outs == (dim,)), None)
        return link and (equation, link)

    def loop(self, tile: int, *args: Array) -> list[Array]:
        """The outputs for whole arrays, computed for slices of `tile` elements one after the other.

        Sums are added in fp32. If `tile` does not divide the size, the last slice is smaller, and its operations are
        compiled too.
        """
        jaxpr = self._closed.jaxpr
        scope = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*self._closed.consts, *args], strict=True))
        jaxprs.run_equations(self._once, scope)
        ready = events([a for a, dim in zip(args, self._dims, strict=True) if dim is not None])

        def start(atom: Atom, place: Place) -> Array | None:
            """Room for an output, which compilers would otherwise take early."""
            dtype = _wide(atom.aval.dtype) if place is SUM else atom.aval.dtype
            return None if place is None else zeros_after(atom.aval.shape, dtype, ready)

        def step(first: ArrayLike, size: int, found: list[Array | None]) -> list[Array | None]:
            values, results = self._outputs_of(scope, first, size), list[Array | None]()
            for place, before, value in zip(self.places, found, values, strict=True):
                if before is None:
                    results.append(None)
                elif place is SUM:
                    results.append(before + value.astype(before.dtype))
                else:
                    results.append(lax.dynamic_update_slice_in_dim(before, value, first, cast("int", place)))
            return results

        count, rest = divmod(self._size, tile)
        found = list(map(start, jaxpr.outvars, self.places))
        whole_tiles = lambda k, found: step(k * tile, tile, found)
        if count <= _UNROLLED:
            found = functools.reduce(lambda found, k: whole_tiles(k, found), range(count), found)
        else:
            found = lax.fori_loop(0, count, whole_tiles, found)
        found = step(count * tile, rest, found) if rest else found
        whole = lambda atom: scope[atom] if jaxprs.is_var(atom) else jnp.asarray(atom.val, atom.aval.dtype)
        return [
            whole(atom) if a is None else a.astype(atom.aval.dtype)
            for atom, a in zip(jaxpr.outvars, found, strict=True)
        ]

    def _outputs_of(self, whole: dict[Var, Array], first: ArrayLike, size: int) -> list[Array]:
        """The outputs for a slice, from whole inputs and what is computed once."""
        scope: dict[Var, Array] = {}
        made: dict[tuple[Var, int], Array] = {}
        for v, dim in zip(self._closed.jaxpr.invars, self._dims, strict=True):
            if dim is not None:
                scope[v] = lax.dynamic_slice_in_dim(whole[v], first, size, dim)

        def read(atom: Atom, dim: int | None) -> Array:
            if not jaxprs.is_var(atom):
                return jnp.asarray(atom.val, atom.aval.dtype)
            if atom in scope or dim is None:
                return scope[atom] if atom in scope else whole[atom]
            if (atom, dim) not in made:
                found = self._made_from(atom, dim)
                if found is None:
                    made[atom, dim] = lax.dynamic_slice_in_dim(whole[atom], first, size, dim)
                else:
                    equation, link = found
                    operands = list(map(read, equation.invars, link.ins))
                    (made[atom, dim],) = slices.apply(equation, link, operands, size, first)
            return made[atom, dim]

        for equation, link in self._in_slices:
            operands = list(map(read, equation.invars, link.ins if link else [None] * len(equation.invars)))
            if link is None or link.is_sum:
                found = [jaxprs.apply(equation, *operands)]
            else:
                found = slices.apply(equation, link, operands, size, first)
            scope.update(zip(equation.outvars, found, strict=True))
        return [
            jnp.zeros((), atom.aval.dtype) if place is None else read(atom, None)
            for atom, place in zip(self._closed.jaxpr.outvars, self.places, strict=True)
        ]


def _is_linear(equation: Equation, places: Sequence[Place]) -> bool:
    """Whether the result for a sum is the sum of the results for its terms."""
    name = equation.primitive.name
    if name in ("add", "add_any", "sub"):
        return all(place is SUM for place in places)
    first, *others = places
    of_first = name in _LINEAR_IN_FIRST and first is SUM and all(place is None for place in others)
    return of_first or (name in ("mul", "dot_general") and set(places) == {None, SUM})


def _wide(dtype: DTypeLike) -> DTypeLike:
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype
