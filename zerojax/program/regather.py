"""The forward and backward pass of a unit that saves no full weights in between, but gathers them again.

The residuals of `jax.vjp` of a unit `y = f(W, x)` are split by their dependencies. Those that depend only on the
weights (the gathered weights, their casts, transposes and reshapes) are dropped, and rebuilt in the backward pass from
weights that are gathered again. Those that depend on the data are saved, or recomputed from saved values, as `Remat`
decides. Full weights are never saved.

A `jax.checkpoint` policy cannot express this: "save anything but all_gather" saves the full weights as soon as there is
a cast between the gather and the use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from zerojax.comm.schedule import event, floating_after
from zerojax.program import gradient_paths, jaxprs
from zerojax.program.gradient_paths import is_differentiable
from zerojax.program.remat import NO_REMAT, Place, Remat
from zerojax.sharding.axes import REPLICATED
from zerojax.utils.flags import merge, negate, replaced, select
from zerojax.utils.typing import Array

Arrays = Sequence[Any]
Function = Callable[[Arrays, Arrays, Arrays], Arrays]


def _to_host(value: Any) -> Any:
    return jax.device_put(value, jax.memory.Space.Host)


def _to_device(value: Any) -> Any:
    return jax.device_put(value, jax.memory.Space.Device)


class SavedValue(NamedTuple):
    """A value that is saved for the backward pass.

    Attributes:
        variable: of the traced unit.
        place: the memory in which it is saved.
        dim: the dim of which each device along the `model` axis saves a slice, or None.
    """

    variable: Any
    place: Place
    dim: int | None = None

    def store(self, value: Any) -> Any:
        """Moves a value to its place."""
        part = value if self.dim is None else partition(value, self.dim)
        return _to_host(part) if self.place is Place.HOST else part

    def event(self, value: Any) -> list[Any]:
        """An event of the stored value."""
        return event([value]) if self.dim is None else on_parts(lambda part: event([part]), self.dim)(value)


class Gradients(NamedTuple):
    """The results of the backward pass of a unit.

    The gradient of a weight is `lax.transpose(weights[i], orders[i])`. It is reduced in the layout of the matrix
    product that computes it, and only the resulting shard is transposed.
    """

    weights: list[Any]
    fixed: list[Any]
    data: list[Any]
    orders: list[tuple[int, ...]]


class Regather:
    """The forward and the backward pass of a unit, which save no weights in between.

    Args:
        fn: `fn(weights, fixed, data) -> outputs`, all flat lists of arrays. `fixed` are values that the caller also has
            in the backward pass (the constants of a loop); values that depend on them and on weights are rebuilt.
        weights, fixed, data: avals of the arguments.
        wanted: for each of weights, fixed and data, which of them get a gradient. Only floating dtypes can.
        differentiable: which outputs have a cotangent in the backward pass.
        remat: which activations are saved for the backward pass, and where.
        resident: which data stay on the device anyway.

    Attributes:
        gets_gradient: which of weights, fixed and data get a gradient: those that are wanted and have one. To others
            there is no way for a cotangent, because of a `stop_gradient`, say.
        links: for each of the wanted weights, fixed and data, in one list, the positions of the cotangents that its
            gradient is computed from.
        needed: which weights the backward pass reads. A bias is not gathered again.
        recomputes: whether the backward pass recomputes or gathers an activation.
        names: the names of the unit's activations.

    Cost: traces `fn`, its linearization and the transposition of that once. Nothing runs.
    Source: ZeRO section 5.3 (P_os+g+p): parameters are gathered for the forward and again for the backward pass.
    """

    def __init__(
        self,
        fn: Function,
        weights: Arrays,
        fixed: Arrays,
        data: Arrays,
        wanted: tuple[Sequence[bool], Sequence[bool], Sequence[bool]],
        differentiable: Sequence[bool],
        remat: Remat = NO_REMAT,
        resident: Sequence[bool] = (),
    ):
        groups = (list(weights), list(fixed), list(data))
        self.sizes = [len(group) for group in groups]
        self.wanted = wanted
        trees: dict[str, Any] = {}

        def forward(*flat: Any) -> list[Any]:
            args = self._group(flat)
            varied = [select(a, w) for a, w in zip(args, wanted, strict=True)]
            constant = [select(a, negate(w)) for a, w in zip(args, wanted, strict=True)]

            def split_fn(*varied: Arrays) -> tuple[Arrays, Arrays]:
                merged = [merge(w, v, c) for w, v, c in zip(wanted, varied, constant, strict=True)]
                out = fn(*merged)
                return select(out, differentiable), select(out, negate(differentiable))

            out, vjp, rest = jax.vjp(split_fn, *varied, has_aux=True)
            residuals, trees["vjp"] = jax.tree.flatten(vjp)
            return [*merge(differentiable, out, rest), *residuals]

        self.num_outputs = len(differentiable)
        closed = jaxprs.traced(forward, *groups[0], *groups[1], *groups[2])[0]
        self.closed = closed if remat == NO_REMAT else jaxprs.inlined(closed, lambda equation: True)
        self.residuals = self.closed.jaxpr.outvars[self.num_outputs :]
        self._transpose(trees["vjp"], select(self.closed.out_avals[: self.num_outputs], differentiable))
        self._plan(remat, resident or [True] * len(groups[2]))

    def _group(self, flat: Arrays) -> list[list[Any]]:
        num_weights, num_fixed, _ = self.sizes
        return [
            list(flat[:num_weights]),
            list(flat[num_weights : num_weights + num_fixed]),
            list(flat[num_weights + num_fixed :]),
        ]

    def _transpose(self, vjp_tree: Any, cotangents: Arrays) -> None:
        """Traces the backward pass, from residuals and cotangents to gradients."""

        def vjp(residuals: Arrays, cotangents: Arrays) -> list[Any]:
            return jax.tree.leaves(jax.tree.unflatten(vjp_tree, residuals)(list(cotangents)))

        residuals = [atom.aval if jaxprs.is_var(atom) else np.asarray(atom.val) for atom in self.residuals]
        closed = jaxprs.traced(vjp, residuals, cotangents)[0]
        self.links = gradient_paths.dependencies(closed.jaxpr, closed.jaxpr.invars[len(residuals) :])
        nonzero = negate(gradient_paths.zeros(closed.jaxpr))
        flags = iter(nonzero)
        self.gets_gradient = [[wanted and next(flags) for wanted in group] for group in self.wanted]
        closed = jaxprs.with_outputs(closed, select(closed.jaxpr.outvars, nonzero))
        self.backward_jaxpr, self.orders = jaxprs.before_transposes(closed, sum(self.gets_gradient[0]))

    def _plan(self, remat: Remat, resident: Sequence[bool]) -> None:
        """Decides which values are saved, and which equations and weights rebuild the residuals from them."""
        jaxpr = self.closed.jaxpr
        weights, _, data = self._group(jaxpr.invars)
        self.data = frozenset(data)

        # What depends on the data. All else is rebuilt from weights alone.
        from_data = set(data)
        for equation in jaxpr.eqns:
            is_new = jaxprs.draws_random_bits(equation) or jaxprs.has_side_effects(equation)
            if is_new or any(v in from_data for v in jaxprs.variables(equation)):
                from_data.update(equation.outvars)

        # The names that the model gives to activations.
        naming = [e for e in jaxpr.eqns if jaxprs.given_name(e) is not None]
        self.names = {name for e in naming if (name := jaxprs.given_name(e)) and from_data & set(e.outvars)}
        # A derivative may read the value before it was named: the name applies to both.
        named = {e.invars[0]: remat.place(e) for e in naming if jaxprs.is_var(e.invars[0])}

        # Backwards from the residuals: a value is saved, or its equation is run again.
        needed = {atom for atom in self.residuals if jaxprs.is_var(atom)}
        self.saved: list[SavedValue] = []
        self.rebuild_equations: list[Any] = []
        for equation in reversed(jaxpr.eqns):
            results = [v for v in equation.outvars if v in needed]
            place = None if jaxprs.given_name(equation) is not None else remat.place(equation)
            if jaxprs.has_side_effects(equation):
                place = place or Place.DEVICE
            places = [(named.get(v) or place) if v in from_data else None for v in results]
            self.saved += [SavedValue(v, p) for v, p in zip(results, places, strict=True) if p]
            if not all(places):
                self.rebuild_equations.insert(0, equation)
                needed.update(jaxprs.variables(equation))

        # The inputs that the values which are not saved are computed from.
        for v, stays in zip(data, resident, strict=True):
            movable = not stays and is_differentiable(v.aval)
            if v in needed:
                place = Place.HOST if movable and remat.offload_inputs else Place.DEVICE
                dim = divisible_dim(v.aval.shape) if movable and remat.partition_inputs else None
                self.saved.append(SavedValue(v, named.get(v) or place, dim))

        self.needed = [v in needed for v in weights]
        rebuilt = [e for e in self.rebuild_equations if jaxprs.given_name(e) is None]
        self.recomputes = any(v in from_data for e in rebuilt for v in e.outvars) or any(
            value.dim is not None for value in self.saved
        )
        self.forward_jaxpr = jaxprs.with_outputs(
            self.closed, [*jaxpr.outvars[: self.num_outputs], *(value.variable for value in self.saved)]
        )

    def forward(self, weights: Arrays, fixed: Arrays, data: Arrays) -> tuple[list[Any], list[Any]]:
        """(outputs, values to save, which `store` moves to their places)."""
        out = jaxprs.run(self.forward_jaxpr, *weights, *fixed, *data)
        return out[: self.num_outputs], out[self.num_outputs :]

    def store(self, values: Arrays, events: Arrays) -> list[Any]:
        """Moves the saved values to their places. Inputs are copied to host memory after the events."""
        copied = [in_host and is_input for in_host, is_input in zip(self._in_host, self._is_input, strict=True)]
        values = replaced(values, copied, lambda inputs: floating_after(inputs, events))
        return [each.store(value) for each, value in zip(self.saved, values, strict=True)]

    def offload_events(self, saved: Arrays) -> list[Any]:
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

    def restore(self, saved: Arrays, overlapped: Arrays) -> tuple[list[Any], list[Any]]:
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

    def with_fetched(self, saved: Arrays, fetched: Arrays) -> list[Any]:
        """The saved values, with the copies of `restore` in place of those in host memory."""
        return replaced(saved, self._in_host, lambda _: fetched)

    @property
    def _is_input(self) -> list[bool]:
        return [value.variable in self.data for value in self.saved]

    def floating_inputs(self, saved: Arrays) -> list[Any]:
        """The saved values that `delay_inputs` delays."""
        return [value for value in select(saved, self._is_input) if is_differentiable(value)]

    def delay_inputs(self, saved: Arrays, events: Arrays) -> list[Any]:
        """The saved values, with the unit's floating inputs not available before the events: it is recomputed later."""
        return replaced(saved, self._is_input, lambda inputs: floating_after(inputs, events))

    def backward(self, weights: Arrays, fixed: Arrays, saved: Arrays, cotangents: Arrays) -> Gradients:
        """Gradients of the weights, fixed and data that get one.

        Args:
            weights: those not in `needed` may be None.
            fixed: as in the forward pass.
            saved: the saved values, all on the device.
            cotangents: of the differentiable outputs.
        """
        jaxpr = self.closed.jaxpr
        weight_vars, fixed_vars, _ = self._group(jaxpr.invars)
        scope = {
            each.variable: value if each.dim is None else unpartition(value, each.dim)
            for each, value in zip(self.saved, saved, strict=True)
        }
        scope.update(
            zip([*jaxpr.constvars, *weight_vars, *fixed_vars], [*self.closed.consts, *weights, *fixed], strict=True)
        )
        if self.rebuild_equations:
            jaxprs.run_equations(self.rebuild_equations, scope)
        residuals = [scope[atom] if jaxprs.is_var(atom) else np.asarray(atom.val) for atom in self.residuals]
        grads = iter(jaxprs.run(self.backward_jaxpr, *residuals, *cotangents))
        of_weights, of_fixed, of_data = ([next(grads) for flag in flags if flag] for flags in self.gets_gradient)
        return Gradients(of_weights, of_fixed, of_data, self.orders)


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
    return _manual(device_slice, REPLICATED, _divided(names, dim))(value)


def unpartition(value: Array, dim: int) -> Array:
    """The inverse of `partition`: an all-gather, in which a device receives (M-1)/M of the value's bytes."""
    names, _ = _axes()
    gather = lambda part: lax.all_gather(part, names, axis=dim, tiled=True)
    return _manual(gather, _divided(names, dim), REPLICATED)(value)


def on_parts(fn: Callable[[Array], Any], dim: int) -> Callable[[Array], Any]:
    """Applies `fn` to the slice on each device. Its result may be taken from any device. Sends nothing."""
    names, _ = _axes()
    return _manual(fn, _divided(names, dim), REPLICATED)


def _axes() -> tuple[tuple[str, ...], int]:
    """(names of the axes that are not manual, number of devices along them)."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(mesh.auto_axes), math.prod(mesh.shape[name] for name in mesh.auto_axes)


def _divided(names: tuple[str, ...], dim: int) -> PartitionSpec:
    return PartitionSpec(*[None] * dim, names)


def _manual(fn: Callable[..., Any], in_specs: PartitionSpec, out_specs: PartitionSpec) -> Callable[..., Any]:
    names, _ = _axes()
    return jax.shard_map(fn, in_specs=in_specs, out_specs=out_specs, axis_names={*names}, check_vma=False)
