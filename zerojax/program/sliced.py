"""Runs a function slice by slice, along a dim of some of its inputs.

The dim is followed through the equations by their links (`slices`), and into loops, branches and calls. Results are
slices too, or the sum of what slices have, or whole:

    [L, m, n] ─ transpose ─► [L, n, m] ─ reshape ─► [L, n m] ─ sum over dim 1 ─► [L]
                                                             ─ sum over dim 0 ─► a sum
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias, cast

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


class Slice(NamedTuple):
    """A slice of all dims that are followed."""

    size: int
    first: ArrayLike | None  # its first index; None for any slice, such as layers in another order


class _Step(NamedTuple):
    """An equation that depends on the slice."""

    equation: Equation
    ins: Sequence[int | None]  # the dims of its operands
    outs: Sequence[Place]
    run: Callable[[Sequence[Array], Slice], list[Array]]  # from slices of operands, or whole ones


class Sliced:
    """A function of slices and of whole inputs.

    Args:
        closed: the function.
        dims: of each input, the dim along which it is sliced; None if it is whole.
        size: of the whole along these dims.
        scales: of each input, what the size of its dim is a multiple of `size` by.
        anywhere: whether it runs for slices whose place is not known. They may be larger than the whole.

    Attributes:
        dims: of the inputs that are sliced.
        places: of each output.
        scales: of each output.

    Raises `Mixed` if a slice depends on other slices.
    """

    def __init__(
        self,
        closed: ClosedJaxpr,
        dims: Sequence[int | None],
        size: int,
        scales: Sequence[int] | None = None,
        anywhere: bool = False,
    ):
        self._closed, self._size, self._anywhere = closed, size, anywhere
        jaxpr = closed.jaxpr
        inputs = zip(jaxpr.invars, dims, scales or [1] * len(dims), strict=True)
        sliced = [(v, dim, scale) for v, dim, scale in inputs if dim is not None]
        self.dims: dict[Var, int] = {v: dim for v, dim, _ in sliced}
        self._places: dict[Var, Place] = dict(self.dims)
        self._scales = {v: scale for v, _, scale in sliced}
        self._producer = {v: e for e in jaxpr.eqns for v in e.outvars}
        self._steps: list[_Step] = []
        for equation in jaxpr.eqns:
            if any(v in self._places for v in jaxprs.variables(equation)):
                step = self._follow(equation)
                places = dict(zip(equation.outvars, step.outs, strict=True))
                if any(place is None and v.aval.shape for v, place in places.items()):
                    raise Mixed  # an array that a loop or a branch returns whole; of a counter, nothing is sliced
                self._places.update({v: place for v, place in places.items() if place is not None})
                self._steps.append(step)
        self.places = [self._place(atom) for atom in jaxpr.outvars]
        self.scales = [self._scale(atom) for atom in jaxpr.outvars]
        self._once = self._computed_once()

    def _place(self, atom: Atom) -> Place:
        return self._places.get(atom) if jaxprs.is_var(atom) else None

    def _scale(self, atom: Atom) -> int:
        return self._scales.get(atom, 1) if jaxprs.is_var(atom) else 1

    # Following

    def _follow(self, equation: Equation) -> _Step:
        read = list(map(self._place, equation.invars))
        if SUM in read:
            if not _is_linear(equation, read):
                raise Mixed
            return self._applied(equation, Link((None,) * len(read), (None,) * len(equation.outvars), is_sum=True))
        dims = cast("list[int | None]", read)
        if jaxprs.is_scan(equation):
            return self._scanned(equation, dims)
        if equation.primitive.name == "cond":
            return self._branched(equation, dims)
        if jaxprs.is_call(equation) or jaxprs.has_own_derivative(equation):
            inner = self._inside(jaxprs.closed_call(equation), dims, equation.invars)
            self._scales.update(zip(equation.outvars, inner.scales, strict=True))
            return _Step(equation, dims, inner.places, inner.on_slice)
        fits = lambda link: all(dim in (None, own) for own, dim in zip(link.ins, dims, strict=True))
        link = next(filter(fits, slices.links(equation)), None)
        if link is None:
            raise Mixed
        return self._applied(equation, link)

    def _applied(self, equation: Equation, link: Link) -> _Step:
        """An equation that is applied to slices along a link."""
        outs = [SUM] * len(link.outs) if link.is_sum else link.outs
        scales = {self._scale(a) for a in equation.invars if jaxprs.is_var(a) and a in self._places}
        scale = max(scales, default=1) * link.up
        if len(scales) > 1 or scale % link.down:
            raise Mixed
        scale //= link.down
        self._scales.update(dict.fromkeys(equation.outvars, scale))

        def run(operands: Sequence[Array], at: Slice) -> list[Array]:
            if link.is_sum:
                return [jaxprs.apply(equation, *operands)]
            first = None if at.first is None else at.first * scale
            return slices.apply(equation, link, operands, at.size * scale, first)

        return _Step(equation, link.ins, outs, run)

    def _inside(self, closed: ClosedJaxpr, dims: Sequence[int | None], operands: Sequence[Atom]) -> Sliced:
        return Sliced(closed, dims, self._size, list(map(self._scale, operands)), self._anywhere)

    def _scanned(self, equation: Equation, dims: Sequence[int | None]) -> _Step:
        scan = jaxprs.scan_params(equation)
        first, last = scan.num_consts, scan.num_consts + scan.num_carry
        if 0 in dims[last:]:
            raise Mixed  # a scan over slices
        dims = list(dims)
        while True:  # until the carry is sliced as its results are
            own = [*dims[:last], *(None if dim is None else dim - 1 for dim in dims[last:])]
            inner = self._inside(scan.body, own, equation.invars)
            carry, ys = inner.places[: scan.num_carry], inner.places[scan.num_carry :]
            if SUM in inner.places or any(a not in (None, b) for a, b in zip(dims[first:last], carry, strict=True)):
                raise Mixed
            if carry == dims[first:last]:
                break
            dims[first:last] = cast("list[int | None]", carry)
        scales = [s for s, place in zip(inner.scales, inner.places, strict=True) if place is not None]
        if set(scales) - {1}:
            raise Mixed

        def run(operands: Sequence[Array], at: Slice) -> list[Array]:
            def body(carry: list[Array], xs: list[Array]) -> tuple[list[Array], list[Array]]:
                found = inner.on_slice([*operands[:first], *carry, *xs], at)
                return found[: scan.num_carry], found[scan.num_carry :]

            carried, xs = list(operands[first:last]), list(operands[last:])
            after, ys = lax.scan(body, carried, xs, length=scan.length, reverse=scan.reverse)
            return [*after, *ys]

        of_ys = [place + 1 if isinstance(place, int) else None for place in ys]
        return _Step(equation, dims, [*carry, *of_ys], run)

    def _branched(self, equation: Equation, dims: Sequence[int | None]) -> _Step:
        inner = [self._inside(branch, dims[1:], equation.invars[1:]) for branch in equation.params["branches"]]
        if dims[0] is not None or any((b.places, b.scales) != (inner[0].places, inner[0].scales) for b in inner):
            raise Mixed
        self._scales.update(zip(equation.outvars, inner[0].scales, strict=True))

        def run(operands: Sequence[Array], at: Slice) -> list[Array]:
            branches = [lambda *args, b=b: b.on_slice(args, at) for b in inner]
            return list(lax.switch(operands[0], branches, *operands[1:]))

        return _Step(equation, dims, inner[0].places, run)

    def _computed_once(self) -> list[Equation]:
        """The equations that do not depend on the slice and are needed as a whole."""
        jaxpr = self._closed.jaxpr
        needed = {v for v, place in zip(jaxpr.outvars, self.places, strict=True) if jaxprs.is_var(v) and place is None}
        for step in self._steps:
            for atom, dim in zip(step.equation.invars, step.ins, strict=True):
                needed.update(self._read_whole(atom, dim))
        in_slices, found = {id(step.equation) for step in self._steps}, []
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
            if dim is not None and self._anywhere:
                raise Mixed
            return (atom,)
        equation, link = made
        return [v for a, d in zip(equation.invars, link.ins, strict=True) for v in self._read_whole(a, d)]

    def _made_from(self, v: Var, dim: int | None) -> tuple[Equation, Link] | None:
        """The equation that makes a slice of a value which does not depend on the slice, if it is not read instead."""
        equation = self._producer.get(v)
        if dim is None or equation is None or equation.primitive.name not in _MADE:
            return None
        if self._anywhere and equation.params.get("dimension") == dim:  # an iota along it
            return None
        link = next((each for each in slices.links(equation) if each.outs == (dim,)), None)
        return link and (equation, link)

    # Running

    def on_slice(self, args: Sequence[Array], at: Slice) -> list[Array]:
        """The outputs for a slice, from slices of the inputs that are sliced and the others whole."""
        whole = self.whole(args)
        scope = {v: whole[v] for v in self.dims}
        return self._outputs(whole, scope, at)

    def in_tiles(self, tile: int, *args: Array, wide: bool = False) -> list[Array]:
        """The outputs for whole arrays, computed for slices of `tile` elements one after the other.

        Sums are added in fp32; with `wide`, they are returned so. If `tile` does not divide the size, the last slice is
        smaller, and its operations are compiled too.
        """
        return self.part_in_tiles(tile, self.whole(args), self._size, 0, wide)

    def part_in_tiles(
        self, tile: int, whole: dict[Var, Array], size: int, offset: ArrayLike, wide: bool = False
    ) -> list[Array]:
        """As `in_tiles`, for a part of the whole: `size` elements from `offset` on.

        What is sliced of the inputs and outputs is that of the part. `whole` has the inputs, and the other values of
        `self.whole`.
        """
        outputs = self._closed.jaxpr.outvars
        ready = events([whole[v] for v in self.dims])

        def start(atom: Atom, place: Place) -> Array | None:
            """Room for an output, which compilers would otherwise take early."""
            dtype, shape = _wide(atom.aval.dtype) if place is SUM else atom.aval.dtype, list(atom.aval.shape)
            if isinstance(place, int):
                shape[place] = shape[place] // self._size * size
            return None if place is None else zeros_after(tuple(shape), dtype, ready)

        def step(first: ArrayLike, count: int, found: list[Array | None]) -> list[Array | None]:
            scope = {v: lax.dynamic_slice_in_dim(whole[v], first, count, dim) for v, dim in self.dims.items()}
            values, results = self._outputs(whole, scope, Slice(count, offset + first)), list[Array | None]()
            for place, scale, before, value in zip(self.places, self.scales, found, values, strict=True):
                if before is None:
                    results.append(None)
                elif place is SUM:
                    results.append(before + value.astype(before.dtype))
                else:
                    results.append(lax.dynamic_update_slice_in_dim(before, value, first * scale, cast("int", place)))
            return results

        count, rest = divmod(size, tile)
        found = list(map(start, outputs, self.places))
        whole_tiles = lambda k, found: step(k * tile, tile, found)
        if count <= _UNROLLED and not wide:
            found = functools.reduce(lambda found, k: whole_tiles(k, found), range(count), found)
        else:
            found = lax.fori_loop(0, count, whole_tiles, found)
        found = step(count * tile, rest, found) if rest else found
        return [
            _value(atom, whole) if a is None else a if wide else a.astype(atom.aval.dtype)
            for atom, a in zip(outputs, found, strict=True)
        ]

    def whole(self, args: Sequence[Array]) -> dict[Var, Array]:
        """The inputs, and what is computed once."""
        jaxpr = self._closed.jaxpr
        scope = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*self._closed.consts, *args], strict=True))
        jaxprs.run_equations(self._once, scope)
        return scope

    def _outputs(self, whole: dict[Var, Array], scope: dict[Var, Array], at: Slice) -> list[Array]:
        """The outputs for a slice, from what is whole, and slices of inputs in `scope`."""
        made: dict[tuple[Var, int], Array] = {}

        def read(atom: Atom, dim: int | None, scale: int) -> Array:
            if not jaxprs.is_var(atom) or (dim is None and atom not in scope):
                return _value(atom, whole)
            if atom in scope:
                return scope[atom]
            assert dim is not None
            if (atom, dim) not in made:
                found = self._made_from(atom, dim)
                size, first = at.size * scale, None if at.first is None else at.first * scale
                if found is None:
                    assert first is not None
                    made[atom, dim] = lax.dynamic_slice_in_dim(whole[atom], first, size, dim)
                else:
                    equation, link = found
                    operands = [read(a, d, scale) for a, d in zip(equation.invars, link.ins, strict=True)]
                    (made[atom, dim],) = slices.apply(equation, link, operands, size, first)
            return made[atom, dim]

        for step in self._steps:
            scale = max(map(self._scale, step.equation.invars))
            operands = [read(a, d, scale) for a, d in zip(step.equation.invars, step.ins, strict=True)]
            scope.update(zip(step.equation.outvars, step.run(operands, at), strict=True))
        return [read(atom, None, 1) for atom in self._closed.jaxpr.outvars]


def _value(atom: Atom, scope: dict[Var, Array]) -> Array:
    return scope[atom] if jaxprs.is_var(atom) else jnp.asarray(atom.val, atom.aval.dtype)


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
