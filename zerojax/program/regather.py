"""The forward and backward pass of a unit that saves no full weights in between, but gathers them again.

The residuals of `jax.vjp` of a unit `y = f(W, x)` are split by their dependencies. Those that depend only on the
weights (the gathered weights, their casts, transposes and reshapes) are dropped, and rebuilt in the backward pass from
weights that are gathered again. Those that depend on the data are saved, or recomputed from saved values, as `Remat`
decides. Full weights are never saved.

A `jax.checkpoint` policy cannot express this: "save anything but all_gather" saves the full weights as soon as there is
a cast between the gather and the use.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence, Set
from typing import NamedTuple, TypeVar

import jax
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.sharding import PartitionSpec

from zerojax.comm.schedule import event, floating_after
from zerojax.program import context, gradient_paths, jaxprs
from zerojax.program.gradient_paths import is_differentiable
from zerojax.program.jaxprs import Atom, ClosedJaxpr, Equation, Jaxpr, Var
from zerojax.program.remat import NO_REMAT, Place, Remat
from zerojax.sharding.axes import CONTEXT, REPLICATED
from zerojax.utils.flags import merge, negate, replaced, select
from zerojax.utils.typing import Array, Aval, Shape

Arrays = Sequence[Array]
Avals = Sequence[Aval | ShapedArray]
Flags = Sequence[bool]
T = TypeVar("T")


class SavedValue(NamedTuple):
    """A value that is saved for the backward pass."""

    variable: Var  # of the traced unit
    place: Place  # the memory in which it is saved
    is_input: bool = False  # whether it is an input of the unit
    dim: int | None = None  # the dim of which each device along the `model` axis saves a slice, or None

    def store(self, value: Array) -> Array:
        """Moves a value to its place."""
        part = value if self.dim is None else partition(value, self.dim)
        if self.place is not Place.HOST:
            return part
        return jax.device_put(context.divided(part, context.token_dim(part.shape)), jax.memory.Space.Host)

    def event(self, value: Array) -> list[Array]:
        """An event of the stored value."""
        first = lambda part: event([part])
        if self.dim is not None:
            return on_parts(first, self.dim)(value)
        return context.on_parts(first, context.token_dim(value.shape))(value)


class Gradients(NamedTuple):
    """The results of the backward pass of a unit.

    The gradient of a weight is `lax.transpose(weights[i], orders[i])`. It is reduced in the layout of the matrix
    product that computes it, and only the resulting shard is transposed.
    """

    weights: list[Array]
    fixed: list[Array]
    data: list[Array]
    orders: list[Shape]


def trace_regather(
    fn: Callable[[Arrays, Arrays, Arrays], Arrays],
    weights: Avals,
    fixed: Avals,
    data: Avals,
    wanted: tuple[Flags, Flags, Flags],
    differentiable: Flags,
    remat: Remat = NO_REMAT,
    resident: Flags = (),
) -> Regather:
    """Traces the forward and the backward pass of a unit, and decides what is saved in between.

    Args:
        fn: `fn(weights, fixed, data) -> outputs`, all flat lists of arrays. `fixed` are values that the caller also has
            in the backward pass (the constants of a loop); values that depend on them and on weights are rebuilt.
        weights, fixed, data: avals of the arguments.
        wanted: for each of weights, fixed and data, which of them get a gradient. Only floating dtypes can.
        differentiable: which outputs have a cotangent in the backward pass.
        remat: which activations are saved for the backward pass, and where.
        resident: which data stay on the device anyway.

    Cost: traces `fn`, its linearization and the transposition of that once. Nothing runs.
    Source: ZeRO section 5.3 (P_os+g+p): parameters are gathered for the forward and again for the backward pass.
    """
    sizes = [len(weights), len(fixed), len(data)]
    varies = [flag for group in wanted for flag in group]
    num_outputs, vjp_trees = len(differentiable), []

    # The forward pass, which also returns the residuals.
    def forward(*flat: Array) -> list[Array]:
        def of_varied(*varied: Array) -> tuple[Arrays, Arrays]:
            out = fn(*_groups(merge(varies, varied, select(flat, negate(varies))), sizes))
            return select(out, differentiable), select(out, negate(differentiable))

        out, vjp, rest = jax.vjp(of_varied, *select(flat, varies), has_aux=True)
        residuals, tree = jax.tree.flatten(vjp)
        vjp_trees.append(tree)
        return [*merge(differentiable, out, rest), *residuals]

    closed, _ = jaxprs.traced(forward, *weights, *fixed, *data)
    if remat != NO_REMAT:
        closed = jaxprs.inlined(closed)
    jaxpr = closed.jaxpr
    outputs, residuals = jaxpr.outvars[:num_outputs], jaxpr.outvars[num_outputs:]
    weight_vars, fixed_vars, data_vars = _groups(jaxpr.invars, sizes)

    # The backward pass, from residuals and cotangents to gradients. Where no cotangent gets to, these are zeros.
    def backward(residuals: Arrays, cotangents: list[Array]) -> list[Array]:
        return jax.tree.leaves(jax.tree.unflatten(vjp_trees[-1], residuals)(cotangents))

    avals = [atom.aval if jaxprs.is_var(atom) else np.asarray(atom.val) for atom in residuals]
    transposed, _ = jaxprs.traced(backward, avals, [v.aval for v in select(outputs, differentiable)])
    links = gradient_paths.dependencies(transposed.jaxpr, transposed.jaxpr.invars[len(residuals) :])
    nonzero = negate(gradient_paths.zeros(transposed.jaxpr))
    gets_gradient = _groups(merge(varies, nonzero, itertools.repeat(False)), sizes)
    transposed = jaxprs.with_outputs(transposed, select(transposed.jaxpr.outvars, nonzero))
    transposed, orders = _before_transposes(transposed, sum(gets_gradient[0]))

    # What is saved, and what the residuals are rebuilt from.
    from_data = _from_data(jaxpr, data_vars)
    saved, equations = _plan(jaxpr, residuals, data_vars, from_data, remat, resident or [True] * len(data))
    saved_vars = [value.variable for value in saved]
    read = {*filter(jaxprs.is_var, residuals), *(v for e in equations for v in jaxprs.variables(e))}
    needed = [v in read for v in weight_vars]
    inputs = [*select(weight_vars, needed), *fixed_vars, *saved_vars]
    rebuilt = {v for e in equations if jaxprs.given_name(e) is None for v in e.outvars}
    return Regather(
        forward_jaxpr=jaxprs.with_outputs(closed, [*outputs, *saved_vars]),
        rebuild_jaxpr=jaxprs.with_equations(closed, equations, inputs, residuals),
        backward_jaxpr=transposed,
        num_outputs=num_outputs,
        saved=saved,
        needed=needed,
        gets_gradient=gets_gradient,
        orders=orders,
        links=_groups(links, [sum(group) for group in wanted]),
        recomputes=bool(rebuilt & from_data) or any(value.dim is not None for value in saved),
        names=frozenset(name for e in jaxpr.eqns if (name := jaxprs.given_name(e)) and from_data & set(e.outvars)),
    )


def _groups(flat: Iterable[T], sizes: Sequence[int]) -> tuple[list[T], list[T], list[T]]:
    """Splits a flat list of weights, fixed and data."""
    items = iter(flat)
    weights, fixed, data = (list(itertools.islice(items, size)) for size in sizes)
    return weights, fixed, data


def _before_transposes(closed: ClosedJaxpr, count: int) -> tuple[ClosedJaxpr, list[Shape]]:
    """Removes a final transposition from each of the first `count` outputs.

    Returns:
        (the new jaxpr, permutations): `lax.transpose(new_output, permutation)` is the old output.
    """
    producer = {v: e for e in closed.jaxpr.eqns for v in e.outvars}
    outputs, orders = list(closed.jaxpr.outvars), []
    for i, atom in enumerate(outputs[:count]):
        equation = producer.get(atom) if jaxprs.is_var(atom) else None
        order = jaxprs.permutation(equation) if equation else None
        if equation and order:
            outputs[i] = equation.invars[0]
        orders.append(order or tuple(range(atom.aval.ndim)))
    return jaxprs.with_outputs(closed, outputs), orders


def _from_data(jaxpr: Jaxpr, data: Sequence[Var]) -> set[Var]:
    """What depends on the data, or cannot be computed again. All else is rebuilt from weights alone."""
    found = set(data)
    for equation in jaxpr.eqns:
        is_new = jaxprs.draws_random_bits(equation) or jaxprs.has_side_effects(equation)
        if is_new or any(v in found for v in jaxprs.variables(equation)):
            found.update(equation.outvars)
    return found


def _plan(
    jaxpr: Jaxpr, residuals: Sequence[Atom], data: Sequence[Var], from_data: Set[Var], remat: Remat, resident: Flags
) -> tuple[list[SavedValue], list[Equation]]:
    """(The values that are saved, the equations that rebuild the residuals from them and from weights)."""
    # A derivative may read a value before it was named: the name applies to both.
    naming = [e for e in jaxpr.eqns if jaxprs.given_name(e) is not None]
    named = {e.invars[0]: remat.place(e) for e in naming if jaxprs.is_var(e.invars[0])}

    # Backwards from the residuals: a value is saved, or its equation is run again.
    needed = set(filter(jaxprs.is_var, residuals))
    saved: list[SavedValue] = []
    rebuild: list[Equation] = []
    for equation in reversed(jaxpr.eqns):
        results = [v for v in equation.outvars if v in needed]
        place = None if jaxprs.given_name(equation) is not None else remat.place(equation)
        if jaxprs.has_side_effects(equation):
            place = place or Place.DEVICE
        places = [(named.get(v) or place) if v in from_data else None for v in results]
        saved += [SavedValue(v, p) for v, p in zip(results, places, strict=True) if p]
        if not all(places):
            rebuild.append(equation)
            needed.update(jaxprs.variables(equation))

    # The inputs that the values which are not saved are computed from.
    for v, stays in zip(data, resident, strict=True):
        movable = not stays and is_differentiable(v.aval)
        if v in needed:
            place = Place.HOST if movable and remat.offload_inputs else Place.DEVICE
            dim = divisible_dim(v.aval.shape) if movable and remat.partition_inputs else None
            saved.append(SavedValue(v, named.get(v) or place, True, dim))
    return saved, rebuild[::-1]


@dataclasses.dataclass(frozen=True)
class Regather:
    """The forward and the backward pass of a unit, which save no weights in between. See `trace_regather`."""

    forward_jaxpr: ClosedJaxpr  # from weights, fixed and data to the outputs and the saved values
    rebuild_jaxpr: ClosedJaxpr  # from the needed weights, fixed and saved values to the residuals of `jax.vjp`
    backward_jaxpr: ClosedJaxpr  # from residuals and cotangents to gradients
    num_outputs: int  # of the unit
    saved: list[SavedValue]  # the values that are saved for the backward pass
    needed: list[bool]  # which weights the backward pass reads. A bias is not gathered again.
    # Which of weights, fixed and data get a gradient: those that are wanted and have one. To others there is no way for
    # a cotangent, because of a `stop_gradient`, say.
    gets_gradient: tuple[list[bool], list[bool], list[bool]]
    orders: list[Shape]  # see `Gradients`
    # For each of the wanted weights, fixed and data, the positions of the cotangents that its gradient is computed
    # from.
    links: tuple[list[frozenset[int]], list[frozenset[int]], list[frozenset[int]]]
    recomputes: bool  # whether the backward pass recomputes or gathers an activation
    names: frozenset[str]  # the names of the unit's activations

    def forward(self, weights: Arrays, fixed: Arrays, data: Arrays) -> tuple[list[Array], list[Array]]:
        """(outputs, values to save, which `store` moves to their places)."""
        out = jaxprs.run(self.forward_jaxpr, *weights, *fixed, *data)
        return out[: self.num_outputs], out[self.num_outputs :]

    def store(self, values: Arrays, events: Arrays) -> list[Array]:
        """Moves the saved values to their places. Inputs are copied to host memory after the events."""
        copied = [in_host and is_input for in_host, is_input in zip(self._in_host, self._is_input, strict=True)]
        values = replaced(values, copied, lambda inputs: floating_after(inputs, events))
        return [each.store(value) for each, value in zip(self.saved, values, strict=True)]

    def offload_events(self, saved: Arrays) -> list[Array]:
        """The events of saved values that have arrived in host memory."""
        offloaded = zip(select(self.saved, self._in_host), select(saved, self._in_host), strict=True)
        return [_to_device(event) for each, value in offloaded for event in each.event(value)]

    @property
    def offloads(self) -> bool:
        """Whether any value is saved in host memory."""
        return any(self._in_host)

    @property
    def _in_host(self) -> list[bool]:
        return [value.place is Place.HOST for value in self.saved]

    def restore(self, saved: Arrays, overlapped: Arrays) -> tuple[list[Array], list[Array]]:
        """Starts the copy of the saved values in host memory to the device, not before `overlapped` is available.

        Nothing can compute on host memory, so a barrier holds the copy back. Compilers keep the barrier as long as all
        of its operands are used behind it.

        Returns:
            (the copies, which `with_fetched` takes; `overlapped` behind the barrier).
        """
        in_host = select(saved, self._in_host)
        if in_host and overlapped:
            in_host, overlapped = lax.optimization_barrier((in_host, list(overlapped)))
        return [_to_device(value) for value in in_host], list(overlapped)

    def with_fetched(self, saved: Arrays, fetched: Arrays) -> list[Array]:
        """The saved values, with the copies of `restore` in place of those in host memory."""
        return replaced(saved, self._in_host, lambda _: fetched)

    @property
    def _is_input(self) -> list[bool]:
        return [value.is_input for value in self.saved]

    def floating_inputs(self, saved: Arrays) -> list[Array]:
        """The saved values that `delay_inputs` delays."""
        return [value for value in select(saved, self._is_input) if is_differentiable(value)]

    def delay_inputs(self, saved: Arrays, events: Arrays) -> list[Array]:
        """The saved values, with the unit's floating inputs not available before the events: it is recomputed later."""
        return replaced(saved, self._is_input, lambda inputs: floating_after(inputs, events))

    def backward(self, weights: Sequence[Array | None], fixed: Arrays, saved: Arrays, cotangents: Arrays) -> Gradients:
        """Gradients of the weights, fixed and data that get one.

        Args:
            weights: those not in `needed` may be None.
            fixed: as in the forward pass.
            saved: the saved values, all on the device.
            cotangents: of the differentiable outputs.
        """
        dims = [each.dim for each in self.saved]
        whole = [a if dim is None else unpartition(a, dim) for a, dim in zip(saved, dims, strict=True)]
        full = [w for w in select(weights, self.needed) if w is not None]
        residuals = jaxprs.run(self.rebuild_jaxpr, *full, *fixed, *whole)
        grads = jaxprs.run(self.backward_jaxpr, *residuals, *cotangents)
        return Gradients(*_groups(grads, [sum(flags) for flags in self.gets_gradient]), self.orders)


def _to_device(value: Array) -> Array:
    return jax.device_put(value, jax.memory.Space.Device)


def divisible_dim(shape: Sequence[int]) -> int | None:
    """The first dim that the number of devices M along the axes divides; None for a scalar, or if M is 1.

    Args:
        shape: on each device along the data axes.

    Raises:
        ValueError: M divides no dim.
    """
    names, size = _axes()
    if size == 1 or not shape:
        return None
    for dim, length in enumerate(shape):
        if length % size == 0:
            return dim
    raise ValueError(
        f"remat: a unit's input cannot be partitioned over {'x'.join(names)}\n"
        f"  got:      shape {tuple(shape)} on each device along the data axes, axis size {size}, which divides no dim\n"
        f"  fix:      another batch or sequence length, or partition_inputs=False for the unit"
    )


def partition(value: Array, dim: int) -> Array:
    """Slices a value that is the same on all M devices: each keeps 1/M of it. Sends nothing."""
    names, size = _axes()
    rows = value.shape[dim] // size
    device_slice = lambda value: lax.dynamic_slice_in_dim(value, lax.axis_index(names) * rows, rows, dim)
    return _manual(device_slice, REPLICATED, PartitionSpec(*[None] * dim, names))(value)


def unpartition(value: Array, dim: int) -> Array:
    """The inverse of `partition`: an all-gather, in which a device receives (M-1)/M of the value's bytes."""
    names, _ = _axes()
    gather = lambda part: lax.all_gather(part, names, axis=dim, tiled=True)
    return _manual(gather, PartitionSpec(*[None] * dim, names), REPLICATED)(value)


def on_parts(fn: Callable[[Array], T], dim: int) -> Callable[[Array], T]:
    """Applies `fn` to the slice on each device. Its result may be taken from any device. Sends nothing."""
    names, _ = _axes()
    return _manual(fn, PartitionSpec(*[None] * dim, names), REPLICATED)


def _axes() -> tuple[tuple[str, ...], int]:
    """(names of the axes along which devices have the same inputs, number of devices along them)."""
    mesh = jax.sharding.get_abstract_mesh()
    names = tuple(name for name in mesh.auto_axes if name != CONTEXT)
    return names, math.prod(mesh.shape[name] for name in names)


def _manual(fn: Callable[[Array], T], in_specs: PartitionSpec, out_specs: PartitionSpec) -> Callable[[Array], T]:
    names, _ = _axes()
    return jax.shard_map(fn, in_specs=in_specs, out_specs=out_specs, axis_names={*names}, check_vma=False)
