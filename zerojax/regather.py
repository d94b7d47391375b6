"""Regather: the backward pass of a unit, without the unit's weights among what the forward pass keeps.

For a unit `y = f(W, x)` the residuals of `jax.vjp` are split by dependency. What depends on the data is kept. What
depends on the weights alone (the gathered weights, their casts, transposes and reshapes) is dropped, and rebuilt in
the backward pass from weights that are gathered again. No activation is recomputed and no full weight is kept.

A `jax.checkpoint` policy cannot say this: "save anything but all_gather" saves the full weights as soon as a cast
stands between the gather and its use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zerojax import jaxprs

Arrays = Sequence[Any]
Function = Callable[[Arrays, Arrays, Arrays], Arrays]


def is_differentiable(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def select(values: Arrays, flags: Sequence[bool]) -> list[Any]:
    return [value for value, flag in zip(values, flags, strict=True) if flag]


def _merge(flags: Sequence[bool], true: Arrays, false: Arrays) -> list[Any]:
    """The inverse of selecting by `flags` and by its negation."""
    true_items, false_items = iter(true), iter(false)
    return [next(true_items) if flag else next(false_items) for flag in flags]


def _negate(flags: Sequence[bool]) -> list[bool]:
    return [not flag for flag in flags]


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

    `needed` says which weights the backward pass reads: a bias or an embedding table is not gathered again.

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
                merged = [_merge(w, v, h) for w, v, h in zip(wanted, varied, held, strict=True)]
                out = fn(*merged)
                return select(out, differentiable), select(out, _negate(differentiable))

            out, vjp, rest = jax.vjp(split_fn, *varied, has_aux=True)
            residuals, trees["vjp"] = jax.tree.flatten(vjp)
            return [*_merge(differentiable, out, rest), *residuals]

        self.num_outputs = len(differentiable)
        self.closed = jax.make_jaxpr(forward)(*groups[0], *groups[1], *groups[2])
        self.vjp_tree = trees["vjp"]
        self._classify()

    def _group(self, flat: Arrays) -> list[list[Any]]:
        num_weights, num_fixed, _ = self.sizes
        return [
            list(flat[:num_weights]),
            list(flat[num_weights : num_weights + num_fixed]),
            list(flat[num_weights + num_fixed :]),
        ]

    def _classify(self) -> None:
        """Which residuals are kept, and which equations and weights rebuild the others."""
        jaxpr = self.closed.jaxpr
        _, _, data = self._group(jaxpr.invars)
        from_data = set(data)
        for equation in jaxpr.eqns:
            drawn = equation.primitive.name in jaxprs.RANDOM_PRIMITIVES
            if drawn or any(v in from_data for v in jaxprs.variables(equation)):
                from_data.update(equation.outvars)
        residuals = jaxpr.outvars[self.num_outputs :]
        self.keep = [jaxprs.is_var(atom) and atom in from_data for atom in residuals]
        self.rebuilt = select(residuals, _negate(self.keep))
        self.rebuild_equations = jaxprs.reachable(jaxpr, self.rebuilt)
        read = {v for e in self.rebuild_equations for v in jaxprs.variables(e)}
        read.update(atom for atom in self.rebuilt if jaxprs.is_var(atom))
        weights, _, _ = self._group(jaxpr.invars)
        self.needed = [v in read for v in weights]

    def forward(self, weights: Arrays, fixed: Arrays, data: Arrays) -> tuple[list[Any], list[Any]]:
        """Returns (outputs, kept residuals)."""
        out = jaxprs.run(self.closed, *weights, *fixed, *data)
        return out[: self.num_outputs], select(out[self.num_outputs :], self.keep)

    def backward(self, weights: Arrays, fixed: Arrays, kept: Arrays, cotangents: Arrays) -> Gradients:
        """Gradients of the wanted weights, fixed and data. `weights` not in `needed` may be None."""
        jaxpr = self.closed.jaxpr
        weight_vars, fixed_vars, _ = self._group(jaxpr.invars)
        scope = dict(
            zip([*jaxpr.constvars, *weight_vars, *fixed_vars], [*self.closed.consts, *weights, *fixed], strict=True)
        )
        if self.rebuild_equations:
            jaxprs.evaluate(self.rebuild_equations, scope)
        rebuilt = [scope[atom] if jaxprs.is_var(atom) else np.asarray(atom.val) for atom in self.rebuilt]
        trees: dict[str, Any] = {}

        def vjp(residuals: Arrays, cotangents: Arrays) -> list[Any]:
            flat, trees["out"] = jax.tree.flatten(jax.tree.unflatten(self.vjp_tree, residuals)(cotangents))
            return flat

        args = (_merge(self.keep, kept, rebuilt), list(cotangents))
        closed, orders = jaxprs.before_transposes(jax.make_jaxpr(vjp)(*args), sum(self.wanted[0]))
        weight_grads, fixed_grads, data_grads = jax.tree.unflatten(trees["out"], jaxprs.run(closed, *args[0], *args[1]))
        return Gradients(weight_grads, fixed_grads, data_grads, orders)
