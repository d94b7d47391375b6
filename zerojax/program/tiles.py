"""Computes what a loss computes token by token in tiles, so that its widest arrays never exist.

    forward:   for each tile of tokens:   inputs ► region ► outputs
    backward:  for each tile of tokens:   inputs ► region ► gradients of the inputs; of the weights, summed in fp32

The regions are found in the traced loss (`regions`), for models and losses that know nothing of it. Of a region, only
its inputs are saved for the backward pass; of one that ends in a single sum, such as the mean of losses, its gradients.

Source: sequence tiling, Arctic Long Sequence Training, arXiv 2506.13996, 3.1, which has a kernel for each model.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zerojax.program import context, gradient_paths, jaxprs, slices
from zerojax.program.gradient_paths import is_differentiable
from zerojax.program.jaxprs import Atom, ClosedJaxpr, Equation, Var
from zerojax.program.regions import Region, find_regions, num_bytes, with_results
from zerojax.program.sliced import SUM, Mixed, Sliced
from zerojax.program.slices import Link
from zerojax.sharding.axes import CONTEXT
from zerojax.utils.flags import merge, negate, select
from zerojax.utils.typing import Array, Shape


class Tiling(NamedTuple):
    """The size of a tile. Regions that are not larger stay as they are."""

    tokens: int | None = None  # the most in a tile, along the dim of a region
    num_bytes: int | None = None  # or those of the widest value in a tile

    def tile_of(self, size: int, num_bytes: int) -> int:
        """The most tokens in a tile, of so many whose widest value takes so many bytes together."""
        if self.tokens is not None:
            return self.tokens
        assert self.num_bytes is not None
        return max(1, self.num_bytes * size // max(1, num_bytes))


class Tiled(NamedTuple):
    """A region that is computed in tiles."""

    shape: Shape  # of its widest value
    num_bytes: int  # of this value
    size: int  # the number of tokens
    tile: int  # those that are computed at a time
    line: str | None  # the line of the user, or of a model, at which it ends


def tile(
    closed: ClosedJaxpr, weights: Iterable[Var], trained: Iterable[Var], tiling: Tiling
) -> tuple[ClosedJaxpr, list[Tiled]]:
    """Computes the regions of a function in tiles: (the function, the regions).

    Args:
        closed: a function of weights and data.
        weights, trained: those of its inputs that are weights, and that get a gradient.
        tiling: which regions.
    """
    number, found = {v: k for k, v in enumerate(closed.jaxpr.invars)}, list[Tiled]()
    numbers = lambda variables: {number[v] for v in variables}
    return _tiled(closed, numbers(weights), numbers(trained), tiling, found, runs_once=True), found


def _tiled(
    closed: ClosedJaxpr,
    weights: set[int],
    trained: set[int],
    tiling: Tiling,
    found: list[Tiled],
    runs_once: bool = False,
) -> ClosedJaxpr:
    """As `tile`, with numbers of inputs. Regions are added to `found`."""
    closed = _slices_first(jaxprs.inlined(closed))
    jaxpr = closed.jaxpr
    chosen = lambda numbers: [v for k, v in enumerate(jaxpr.invars) if k in numbers]
    of_weights = with_results(jaxpr.eqns, chosen(weights))
    active = gradient_paths.with_tangents(jaxpr.eqns, chosen(trained))

    # Look inside of scans and of what is rematerialized.
    def inside(equation: Equation) -> ClosedJaxpr | None:
        """What an equation calls, in tiles."""
        flags = lambda variables: {k for k, a in enumerate(equation.invars) if jaxprs.is_var(a) and a in variables}
        own, given = flags(of_weights), flags(active)
        if jaxprs.is_remat(equation):
            return _tiled(jaxprs.closed_call(equation), own, given, tiling, found)
        if not jaxprs.is_scan(equation):
            return None
        scan = jaxprs.scan_params(equation)
        first, last = scan.num_consts, scan.num_consts + scan.num_carry
        carried = gradient_paths.tangents(equation, [k in given for k in range(len(equation.invars))])
        given |= {first + k for k, flag in enumerate(carried[: scan.num_carry]) if flag}
        return _tiled(scan.body, own - set(range(first, last)), given, tiling, found)

    inner = {id(equation): inside(equation) for equation in jaxpr.eqns}

    # Replace the equations of each region by one function.
    regions = find_regions(closed, of_weights, lambda *size: _tile_of(tiling, *size))
    place = {id(equation): k for k, equation in enumerate(jaxpr.eqns)}
    last = max(regions, key=lambda region: place[id(region.equations[-1])], default=None) if runs_once else None
    functions = [_function(closed, region, active, tiling, found, region is last) for region in regions]
    taken = {id(equation) for region in regions for equation in region.equations}
    region_of = {v: k for k, region in enumerate(regions) for v in region.outputs}
    producer = {v: equation for equation in jaxpr.eqns for v in equation.outvars}

    def interpret(*args: Array) -> list[Array]:
        scope = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *args], strict=True))

        def read(atom: Atom) -> Array:
            """A value, after all that it depends on."""
            if not jaxprs.is_var(atom):
                return jnp.asarray(atom.val, atom.aval.dtype)
            if atom not in scope and atom in region_of:
                region = regions[region_of[atom]]
                values = functions[region_of[atom]](*map(read, region.inputs))
                scope.update(zip(region.outputs, values, strict=True))
            elif atom not in scope:
                run(producer[atom])
            return scope[atom]

        def run(equation: Equation) -> None:
            operands, called = list(map(read, equation.invars)), inner[id(equation)]
            if called is not None and jaxprs.is_remat(equation):
                options = {name: equation.params[name] for name in ("prevent_cse", "policy")}
                values = jax.checkpoint(functools.partial(jaxprs.run, called), **options)(*operands)
                scope.update(zip(equation.outvars, values, strict=True))
            else:
                params = equation.params | ({} if called is None else {"jaxpr": called})
                jaxprs.run_equations([cast("Equation", equation.replace(params=params))], scope)

        for equation in jaxpr.eqns:
            if id(equation) not in taken and not any(v in scope for v in equation.outvars):
                run(equation)
        return list(map(read, jaxpr.outvars))

    return jaxprs.traced(interpret, *closed.in_avals)[0]


def _function(
    closed: ClosedJaxpr, region: Region, active: set[Var], tiling: Tiling, found: list[Tiled], is_last: bool
) -> Callable[..., list[Array]]:
    """The outputs of a region from its inputs, in tiles.

    Args:
        closed: the function that it is a part of.
        active: the variables that have a tangent.
        tiling, found: as in `_tiled`.
        is_last: whether the backward pass begins with the region.
    """
    own = jaxprs.with_equations(closed, region.equations, region.inputs, region.outputs)
    whole = functools.partial(jaxprs.run, own)
    varied = [v in active and is_differentiable(v.aval) for v in region.inputs]
    floating = [v in active and is_differentiable(v.aval) for v in region.outputs]

    def with_gradients(*args: Array) -> list[Array]:
        """The outputs, and the gradients of the varied inputs, from the inputs and the cotangents of the outputs."""
        inputs, cotangents = args[: len(varied)], list(args[len(varied) :])
        fixed = select(inputs, negate(varied))

        def of_varied(*given: Array) -> tuple[list[Array], list[Array]]:
            outputs = whole(*merge(varied, given, fixed))
            return select(outputs, floating), outputs

        _, pull_back, outputs = jax.vjp(of_varied, *select(inputs, varied), has_aux=True)
        return [*outputs, *pull_back(cotangents)]

    # Follow the tokens through both passes.
    dims = [region.dims.get(v) for v in region.inputs]
    try:
        forward = Sliced(_without_calls(own), dims, region.size)
        places = [place if isinstance(place, int) else None for place in select(forward.places, floating)]
        cotangents = [v.aval for v in select(region.outputs, floating)]
        traced, _ = jaxprs.traced(with_gradients, *own.in_avals, *cotangents)
        grads = jaxprs.with_outputs(traced, traced.jaxpr.outvars[len(region.outputs) :])
        is_one_sum = is_last and [aval.shape for aval in cotangents] == [()]
        backward = Sliced(_without_calls(traced if is_one_sum else grads), [*dims, *places], region.size)
    except Mixed:
        return whole
    size = region.size // context.size()  # of a device
    tile = _even(size, _tile_of(tiling, region.size, num_bytes(region.widest)) // context.size())
    line = next(filter(None, map(jaxprs.user_line, reversed(region.equations))), None)
    found.append(Tiled(region.widest.aval.shape, num_bytes(region.widest), size, tile, line))

    # Compute in tiles.
    run_forward = _InTiles(forward, size, tile)
    run_both = _InTiles(backward, size, tile)
    compute = jax.custom_vjp(lambda *inputs: run_forward.totals(run_forward(*inputs)))
    dtypes = [v.aval.dtype for v in select(region.inputs, varied)]

    def of_inputs(values: Sequence[Array]) -> tuple[Array | None, ...]:
        rest = iter(values)
        return tuple(next(rest) if flag else None for flag in varied)

    if is_one_sum:
        # The gradients of one sum are those of its cotangent 1, times the cotangent: they need no second pass.
        def run_with_gradients(*inputs: Array) -> tuple[list[Array], list[Array]]:
            values = run_both(*inputs, jnp.ones((), cotangents[0].dtype), wide=True)
            outputs = [a.astype(v.aval.dtype) for a, v in zip(values, region.outputs, strict=False)]
            return run_both.totals(outputs), values[len(outputs) :]

        def scale_gradients(grads: list[Array], given: list[Array]) -> tuple[Array | None, ...]:
            (factor,) = select(given, floating)
            scaled = [(g * factor).astype(dtype) for g, dtype in zip(grads, dtypes, strict=True)]
            return of_inputs(run_both.totals(scaled, len(region.outputs)))

        compute.defvjp(run_with_gradients, scale_gradients)
    else:

        def run_backward(inputs: list[Array], given: list[Array]) -> tuple[Array | None, ...]:
            return of_inputs(run_both.totals(run_both(*inputs, *select(given, floating))))

        compute.defvjp(lambda *inputs: (compute(*inputs), list(inputs)), run_backward)
    return compute


class _InTiles(NamedTuple):
    """Runs a function in tiles, on the tokens that each device along `context` has, if there is such an axis.

    Sums over tokens are then terms of these devices, [C, ..], until `totals` adds them. Compilers would otherwise add
    the terms of each tile.
    """

    sliced: Sliced
    size: int  # the tokens of a device
    tile: int  # those in a tile

    def __call__(self, *inputs: Array, wide: bool = False) -> list[Array]:
        """The outputs, with sums as terms. With `wide`, these are in fp32."""
        if context.size() == 1:
            return self.sliced.in_tiles(self.tile, *inputs, wide=wide)

        whole, sliced, places = self.sliced.whole(inputs), self.sliced, self.sliced.places
        spec = lambda place: context.spec(0 if place is SUM else cast("int | None", place))

        def on_device(*values: Array) -> list[Array]:
            own, offset = dict(zip(whole, values, strict=True)), self.size * lax.axis_index(CONTEXT)
            found = sliced.part_in_tiles(self.tile, own, self.size, offset, wide)
            return [a[None] if place is SUM else a for a, place in zip(found, places, strict=True)]

        in_specs = tuple(spec(sliced.dims.get(v)) for v in whole)
        out_specs = list(map(spec, places))
        run = jax.shard_map(on_device, in_specs=in_specs, out_specs=out_specs, axis_names={CONTEXT}, check_vma=False)
        return run(*whole.values())

    def totals(self, values: Sequence[Array], first: int = 0) -> list[Array]:
        """The outputs from `first` on, with totals in place of terms."""
        if context.size() == 1:
            return list(values)
        add = lambda terms: lax.reduce(terms, np.zeros((), terms.dtype), lax.add, (0,))
        places = self.sliced.places[first:]
        return [add(a) if place is SUM else a for a, place in zip(values, places, strict=False)]


def _tile_of(tiling: Tiling, size: int, num_bytes: int) -> int:
    """The most tokens in a tile; all, if there are tokens that cannot be divided over `context`."""
    blocks = context.size()
    return size if size % blocks else blocks * tiling.tile_of(size, num_bytes)


def _even(size: int, most: int) -> int:
    """The size of a tile: one that divides `size`, unless it would be less than half of what is allowed."""
    divisors = (k for k in range(most, most // 2, -1) if size % k == 0)
    return next(divisors, -(-size // -(-size // most)))


def _without_calls(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A function that is not differentiated, without nested calls, and without constraints that divide tokens."""
    has_function = lambda e: jaxprs.has_own_derivative(e) or jaxprs.is_remat(e)

    def replace(equation: Equation, operands: list[Array]) -> list[Array] | None:
        if context.is_division(equation):
            return operands
        return jaxprs.run(jaxprs.closed_call(equation), *operands) if has_function(equation) else None

    while any(has_function(e) or jaxprs.is_call(e) or context.is_division(e) for e in closed.jaxpr.eqns):
        closed = jaxprs.inlined(closed, replace)
    return closed


def _slices_first(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Takes slices of what products are computed from, instead of their results: logits[:, :-1] of hidden[:, :-1]."""
    jaxpr = closed.jaxpr
    producer = {v: e for e in jaxpr.eqns for v in e.outvars}
    num_readers = Counter(v for e in jaxpr.eqns for v in jaxprs.variables(e))
    num_readers.update(filter(jaxprs.is_var, jaxpr.outvars))

    def made_from(atom: Atom, dim: int) -> tuple[Equation, Link] | None:
        """The equation of a value that nothing else reads, and its link along a dim."""
        equation = producer.get(atom) if jaxprs.is_var(atom) and num_readers[atom] == 1 else None
        known = slices.links(equation) if equation else ()
        link = next((each for each in known if each.outs == (dim,) and each.keeps_size), None)
        return (equation, link) if equation and link else None

    def of_product(atom: Atom, dim: int) -> bool:
        found = made_from(atom, dim)
        if found is None:
            return False
        equation, link = found
        operands = zip(equation.invars, link.ins, strict=True)
        return jaxprs.multiplies([equation]) or any(d is not None and of_product(a, d) for a, d in operands)

    def interpret(*args: Array) -> list[Array]:
        scope = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *args], strict=True))
        read = lambda atom: scope[atom] if jaxprs.is_var(atom) else jnp.asarray(atom.val, atom.aval.dtype)

        def sliced(atom: Atom, dim: int | None, start: int, stop: int) -> Array:
            found = None if dim is None or not of_product(atom, dim) else made_from(atom, dim)
            if found is None:
                return read(atom) if dim is None else lax.slice_in_dim(read(atom), start, stop, axis=dim)
            equation, link = found
            operands = [sliced(a, d, start, stop) for a, d in zip(equation.invars, link.ins, strict=True)]
            return slices.apply(equation, link, operands, stop - start, start)[0]

        for equation in jaxpr.eqns:
            cut = _single_slice(equation)
            if cut is not None and of_product(equation.invars[0], cut[0]):
                scope[equation.outvars[0]] = sliced(equation.invars[0], *cut)
            else:
                jaxprs.run_equations([equation], scope)
        return list(map(read, jaxpr.outvars))

    if not any((cut := _single_slice(e)) and of_product(e.invars[0], cut[0]) for e in jaxpr.eqns):
        return closed
    new = jaxprs.traced(interpret, *closed.in_avals)[0]
    return jaxprs.with_outputs(new, new.jaxpr.outvars)


def _single_slice(equation: Equation) -> tuple[int, int, int] | None:
    """(dim, start, stop) of a slice of one dim, or None."""
    params = equation.params
    if equation.primitive.name != "slice" or set(params["strides"] or (1,)) != {1}:
        return None
    ends = zip(params["start_indices"], params["limit_indices"], equation.invars[0].aval.shape, strict=True)
    cut = [(dim, start, stop) for dim, (start, stop, size) in enumerate(ends) if stop - start < size]
    return cut[0] if len(cut) == 1 else None
