"""Regather: the backward pass of a unit, without the unit's weights among what the forward pass keeps.

For a unit `y = f(W, x)` the residuals of `jax.vjp` are split by dependency. What depends on the weights alone (the
gathered weights, their casts, transposes and reshapes) is dropped, and rebuilt in the backward pass from weights that
are gathered again. What depends on the data is kept, or computed again from what is kept, as `Remat` says;
`NO_REMAT` recomputes no activation. No full weight is kept in any case.

A `jax.checkpoint` policy cannot say this: "save anything but all_gather" saves the full weights as soon as a cast
stands between the gather and its use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zerojax.transform import jaxprs
from zerojax.transform.dependencies import event, floating_after
from zerojax.transform.partition_inputs import divisible_dim, on_parts, partition, unpartition
from zerojax.transform.remat import NO_REMAT, Place, Remat

Arrays = Sequence[Any]
Function = Callable[[Arrays, Arrays, Arrays], Arrays]


def is_differentiable(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def select(values: Arrays, flags: Sequence[bool]) -> list[Any]:
    return [value for value, flag in zip(values, flags, strict=True) if flag]


def merge(flags: Sequence[bool], true: Arrays, false: Arrays) -> list[Any]:
    """The inverse of selecting by `flags` and by its negation."""
    true_items, false_items = iter(true), iter(false)
    return [next(true_items) if flag else next(false_items) for flag in flags]


def _negate(flags: Sequence[bool]) -> list[bool]:
    return [not flag for flag in flags]


def _changed(values: Arrays, flags: Sequence[bool], fn: Callable[[list[Any]], Arrays]) -> list[Any]:
    """The values, with `fn` of those that are flagged in their places."""
    return merge(flags, fn(select(values, flags)), select(values, _negate(flags)))


def _to_host(value: Any) -> Any:
    return jax.device_put(value, jax.memory.Space.Host)


def _to_device(value: Any) -> Any:
    return jax.device_put(value, jax.memory.Space.Device)


class SavedValue(NamedTuple):
    """A value that waits for the backward pass.

    Attributes:
        variable: of the traced unit.
        place: where.
        dim: in which it is divided over the axes beside the data axes, or None.
    """

    variable: Any
    place: Place
    dim: int | None = None

    def put_away(self, value: Any) -> Any:
        part = value if self.dim is None else partition(value, self.dim)
        return _to_host(part) if self.place is Place.HOST else part

    def event(self, value: Any) -> list[Any]:
        """An event of the value in its place."""
        return event([value]) if self.dim is None else on_parts(lambda part: event([part]), self.dim)(value)


class Gradients(NamedTuple):
    """What the backward pass of a unit computes.

    A weight's gradient is the transposition of `weights[i]` by `orders[i]`: it is reduced as the matrix product makes
    it, and only the shard that is left is transposed.
    """

    weights: list[Any]
    fixed: list[Any]
    data: list[Any]
    orders: list[tuple[int, ...]]


class Regather:
    """A unit's forward and backward pass, split so that no weight is kept between them.

    Args:
        fn: `fn(weights, fixed, data) -> outputs`, all flat lists of arrays. `fixed` are values that the caller has
            again in the backward pass (the constants of a loop); what depends on them and on weights is rebuilt.
        weights, fixed, data: avals of the arguments.
        wanted: for weights, fixed and data each, which of them get a gradient. Only floating dtypes can.
        differentiable: which outputs have a cotangent in the backward pass.
        remat: which activations wait for the backward pass, and where.
        resident: which data stay on the device anyway.

    `needed` says which weights the backward pass reads: a bias or an embedding table is not gathered again.
    `recomputes` says whether the backward pass computes or gathers an activation again, `names` which names activations
    carry.

    Cost: traces `fn` and its linearisation once. Nothing runs.
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
            held = [select(a, _negate(w)) for a, w in zip(args, wanted, strict=True)]

            def split_fn(*varied: Arrays) -> tuple[Arrays, Arrays]:
                merged = [merge(w, v, h) for w, v, h in zip(wanted, varied, held, strict=True)]
                out = fn(*merged)
                return select(out, differentiable), select(out, _negate(differentiable))

            out, vjp, rest = jax.vjp(split_fn, *varied, has_aux=True)
            residuals, trees["vjp"] = jax.tree.flatten(vjp)
            return [*merge(differentiable, out, rest), *residuals]

        self.num_outputs = len(differentiable)
        closed = jax.make_jaxpr(forward)(*groups[0], *groups[1], *groups[2])
        self.closed = closed if remat == NO_REMAT else jaxprs.inlined(closed, lambda equation: True)
        self.vjp_tree = trees["vjp"]
        self._plan(remat, resident or [True] * len(groups[2]))

    def _group(self, flat: Arrays) -> list[list[Any]]:
        num_weights, num_fixed, _ = self.sizes
        return [
            list(flat[:num_weights]),
            list(flat[num_weights : num_weights + num_fixed]),
            list(flat[num_weights + num_fixed :]),
        ]

    def _plan(self, remat: Remat, resident: Sequence[bool]) -> None:
        """Which values are kept, and which equations and weights rebuild the residuals from them."""
        jaxpr = self.closed.jaxpr
        weights, _, data = self._group(jaxpr.invars)
        self.data = frozenset(data)
        from_data = set(data)
        for equation in jaxpr.eqns:
            drawn = equation.primitive.name in jaxprs.RANDOM_PRIMITIVES
            if drawn or any(v in from_data for v in jaxprs.variables(equation)):
                from_data.update(equation.outvars)
        self.names = {e.params["name"] for e in jaxpr.eqns if jaxprs.is_name(e) and from_data & set(e.outvars)}
        # A derivative may read a value from before it was named: the name stands for both.
        named = {e.invars[0]: remat.place(e) for e in jaxpr.eqns if jaxprs.is_name(e) and jaxprs.is_var(e.invars[0])}
        self.residuals = jaxpr.outvars[self.num_outputs :]
        needed = {atom for atom in self.residuals if jaxprs.is_var(atom)}
        self.kept: list[SavedValue] = []
        self.rebuild_equations: list[Any] = []
        for equation in reversed(jaxpr.eqns):
            results = [v for v in equation.outvars if v in needed]
            place = None if jaxprs.is_name(equation) else remat.place(equation)
            places = [(named.get(v) or place) if v in from_data else None for v in results]
            self.kept += [SavedValue(v, p) for v, p in zip(results, places, strict=True) if p]
            if not all(places):
                self.rebuild_equations.insert(0, equation)
                needed.update(jaxprs.variables(equation))
        for v, stays in zip(data, resident, strict=True):
            moves = not stays and is_differentiable(v.aval)
            if v in needed:
                place = Place.HOST if moves and remat.offload_inputs else Place.DEVICE
                dim = divisible_dim(v.aval.shape) if moves and remat.partition_inputs else None
                self.kept.append(SavedValue(v, named.get(v) or place, dim))
        self.needed = [v in needed for v in weights]
        self.recomputes = any(
            v in from_data and not jaxprs.is_name(e) for e in self.rebuild_equations for v in e.outvars
        ) or any(kept.dim is not None for kept in self.kept)
        self.forward_jaxpr = jaxprs.with_outputs(
            self.closed, [*jaxpr.outvars[: self.num_outputs], *(kept.variable for kept in self.kept)]
        )

    def forward(self, weights: Arrays, fixed: Arrays, data: Arrays) -> tuple[list[Any], list[Any]]:
        """Returns (outputs, values to keep, which `put_away` is to move to their places)."""
        out = jaxprs.run(self.forward_jaxpr, *weights, *fixed, *data)
        return out[: self.num_outputs], out[self.num_outputs :]

    def put_away(self, values: Arrays, leave: Arrays) -> list[Any]:
        """The kept values, each in its place. Inputs leave for host memory after the events `leave`."""
        leaving = [away and is_input for away, is_input in zip(self._in_host, self._is_input, strict=True)]
        values = _changed(values, leaving, lambda inputs: floating_after(inputs, leave))
        return [kept.put_away(v) for kept, v in zip(self.kept, values, strict=True)]

    def in_host_memory(self, kept: Arrays) -> list[Any]:
        """Scalars that are available when what waits in host memory is there."""
        waiting = zip(select(self.kept, self._in_host), select(kept, self._in_host), strict=True)
        return [_to_device(e) for place, value in waiting for e in place.event(value)]

    @property
    def offloads(self) -> bool:
        """Whether anything waits in host memory."""
        return any(self._in_host)

    @property
    def _in_host(self) -> list[bool]:
        return [kept.place is Place.HOST for kept in self.kept]

    def restore(self, kept: Arrays, overlapped: Arrays) -> tuple[list[Any], list[Any]]:
        """(saved values on their way back from host memory once `overlapped` is there; `overlapped`).

        Nothing computes on host memory, so the copy is held back by a barrier. Compilers keep it while all that goes
        into it is used behind it.
        """
        there = select(kept, self._in_host)
        if there and overlapped:
            there, overlapped = lax.optimization_barrier((there, list(overlapped)))
        return [_to_device(value) for value in there], list(overlapped)

    def on_device(self, kept: Arrays, fetched: Arrays) -> list[Any]:
        """The kept values, those in host memory as `restore` returned them."""
        return _changed(kept, self._in_host, lambda _: fetched)

    @property
    def _is_input(self) -> list[bool]:
        return [kept.variable in self.data for kept in self.kept]

    def floating_inputs(self, kept: Arrays) -> list[Any]:
        """Those of `inputs_after` that waited."""
        return [value for value in select(kept, self._is_input) if is_differentiable(value)]

    def inputs_after(self, kept: Arrays, there: Arrays) -> list[Any]:
        """The kept values, the unit's floating inputs not before the events `there`: it is computed again after."""
        return _changed(kept, self._is_input, lambda inputs: floating_after(inputs, there))

    def backward(self, weights: Arrays, fixed: Arrays, kept: Arrays, cotangents: Arrays) -> Gradients:
        """Gradients of the wanted weights, fixed and data.

        Args:
            weights: those not in `needed` may be None.
            fixed: as in the forward pass.
            kept: what `on_device` returned.
            cotangents: of the differentiable outputs.
        """
        jaxpr = self.closed.jaxpr
        weight_vars, fixed_vars, _ = self._group(jaxpr.invars)
        scope = {
            k.variable: value if k.dim is None else unpartition(value, k.dim)
            for k, value in zip(self.kept, kept, strict=True)
        }
        scope.update(
            zip([*jaxpr.constvars, *weight_vars, *fixed_vars], [*self.closed.consts, *weights, *fixed], strict=True)
        )
        if self.rebuild_equations:
            jaxprs.evaluate(self.rebuild_equations, scope)
        residuals = [scope[atom] if jaxprs.is_var(atom) else np.asarray(atom.val) for atom in self.residuals]
        trees: dict[str, Any] = {}

        def vjp(residuals: Arrays, cotangents: Arrays) -> list[Any]:
            flat, trees["out"] = jax.tree.flatten(jax.tree.unflatten(self.vjp_tree, residuals)(cotangents))
            return flat

        args = (residuals, list(cotangents))
        closed, orders = jaxprs.before_transposes(jax.make_jaxpr(vjp)(*args), sum(self.wanted[0]))
        weight_grads, fixed_grads, data_grads = jax.tree.unflatten(trees["out"], jaxprs.run(closed, *args[0], *args[1]))
        return Gradients(weight_grads, fixed_grads, data_grads, orders)
