"""The gradient program of a traced loss: unit by unit, forward and then backward, on one device's shards.

    forward:   for each segment:            gather ► compute ► drop
    backward:  for each segment, reversed:  gather ► compute ► reduce-scatter

`Mover` says what gather and reduce-scatter are at a stage. Everything here runs inside `shard_map`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zerojax import collectives, jaxprs
from zerojax.collectives import Axes
from zerojax.precision import for_reduction
from zerojax.regather import Gradients, Regather, is_differentiable, select
from zerojax.units import Segment, TracedLoss

Array = Any
PREFETCH = 1  # units gathered ahead of the one that computes


@dataclasses.dataclass(frozen=True)
class Mover:
    """How the leaves of a unit become full before use, and their gradients what the stage keeps of them.

    Attributes:
        axes: the data axes.
        dims: the sharded dim of each leaf, or None.
        gathers: parameters arrive as shards and are gathered per unit (stage 3).
        scatters: gradients are reduce-scattered as they appear (stages 2 and 3).
        reduce_dtype: dtype in which gradients travel and are summed.
    """

    axes: Axes
    dims: tuple[int | None, ...]
    gathers: bool
    scatters: bool
    reduce_dtype: Any

    def fetch(self, shards: Sequence[Array], dims: Sequence[int | None], events: Sequence[Array]) -> list[Array]:
        if not self.gathers or self.axes.num_shards == 1:
            return list(shards)
        moved = [i for i, dim in enumerate(dims) if dim is not None]
        held = list(shards)
        for i, shard in zip(moved, collectives.after([shards[i] for i in moved], events), strict=True):
            held[i] = shard
        return collectives.all_gather(held, dims, self.axes)

    def reduce(self, grads: Sequence[Array], dims: Sequence[int | None]) -> list[Array]:
        if not self.scatters:
            return list(grads)
        return collectives.reduce_scatter([for_reduction(g, self.reduce_dtype) for g in grads], dims, self.axes)

    def shard_shape(self, shape: tuple[int, ...], dim: int | None) -> tuple[int, ...]:
        if dim is None or not self.scatters:
            return shape
        return (*shape[:dim], shape[dim] // self.axes.num_shards, *shape[dim + 1 :])


def _fetch_needed(
    mover: Mover, shards: Sequence[Array], dims: Sequence[Any], needed: Sequence[bool], events: Any
) -> list[Any]:
    """Like `Mover.fetch`, with None for the leaves that the backward pass does not read."""
    fetched = iter(mover.fetch(select(shards, needed), select(dims, needed), events))
    return [next(fetched) if flag else None for flag in needed]


def _reduce(mover: Mover, grads: Gradients, dims: Sequence[int | None]) -> list[Array]:
    """The reduced gradients of a unit's weights, in the shape of their leaves."""
    moved = [None if dim is None else order[dim] for dim, order in zip(dims, grads.orders, strict=True)]
    reduced = mover.reduce(grads.weights, moved)
    return [lax.transpose(grad, order) for grad, order in zip(reduced, grads.orders, strict=True)]


class Straight:
    """A segment that runs once: its leaves are gathered, used and dropped."""

    differentiable_outputs: list[Any]  # this and the next are set when the backward pass is planned
    wanted_inputs: list[Any]

    def __init__(self, traced: TracedLoss, segment: Segment, mover: Mover, trainable: Sequence[bool]):
        self.traced, self.segment, self.mover = traced, segment, mover
        self.dims = [mover.dims[i] for i in segment.leaves]
        self.trainable = [trainable[i] for i in segment.leaves]
        own = {v for e in segment.equations for v in e.outvars}
        read = dict.fromkeys(v for e in segment.equations for v in jaxprs.variables(e) if v not in own)
        self.weight_values = [v for v in read if v in traced.weights]

    def primal(self, weights: Sequence[Array], fixed: Sequence[Array], data: Sequence[Array]) -> list[Array]:
        scope = dict(zip(self.segment.inputs, data, strict=True))
        scope.update(zip([self.traced.leaf_vars[i] for i in self.segment.leaves], weights, strict=True))
        self.traced.bind_weights(self.weight_values, scope)
        jaxprs.evaluate(self.segment.equations, scope)
        return [scope[v] for v in self.segment.outputs]

    def plan_backward(self, wanted: Sequence[bool], differentiable: Sequence[bool]) -> None:
        weights = [self.traced.leaf_vars[i].aval for i in self.segment.leaves]
        data = [v.aval for v in self.segment.inputs]
        self.regather = Regather(self.primal, weights, [], data, (self.trainable, [], wanted), differentiable)

    def evaluate(self, shards: dict[int, Array], data: Sequence[Array], events: Sequence[Array]) -> list[Array]:
        return self.primal(self._fetch(shards, events), [], data)

    def forward(
        self, shards: dict[int, Array], data: Sequence[Array], events: Sequence[Array]
    ) -> tuple[list[Array], Any]:
        return self.regather.forward(self._fetch(shards, events), [], data)

    def backward(
        self, shards: dict[int, Array], kept: Any, cotangents: Sequence[Array], events: Sequence[Array]
    ) -> tuple[dict[int, Array], list[Array]]:
        held = [shards[i] for i in self.segment.leaves]
        weights = _fetch_needed(self.mover, held, self.dims, self.regather.needed, events)
        grads = self.regather.backward(weights, [], kept, cotangents)
        reduced = _reduce(self.mover, grads, select(self.dims, self.trainable))
        return dict(zip(select(self.segment.leaves, self.trainable), reduced, strict=True)), grads.data

    def _fetch(self, shards: dict[int, Array], events: Sequence[Array]) -> list[Array]:
        return self.mover.fetch([shards[i] for i in self.segment.leaves], self.dims, events)


class Stack:
    """A scan over stacked leaves: each iteration gathers its own layer, uses it and drops it.

    Weights that the loop uses in every iteration (its constants) are gathered once, before it.
    """

    differentiable_outputs: list[Any]  # as in Straight
    wanted_inputs: list[Any]

    def __init__(self, traced: TracedLoss, segment: Segment, mover: Mover, trainable: Sequence[bool]):
        self.traced, self.segment, self.mover, self.trainable = traced, segment, mover, trainable
        (self.equation,) = segment.equations
        self.scan = jaxprs.scan_params(self.equation)
        first_xs = self.scan.num_consts + self.scan.num_carry
        self.views = dict(sorted(segment.views.items()))
        self.const_positions = list(range(self.scan.num_consts))
        self.carry_positions = list(range(self.scan.num_consts, first_xs))
        self.xs_positions = [k for k in range(first_xs, len(self.equation.invars)) if k not in self.views]
        self.dims = [self._layer_dim(view) for view in self.views.values()]
        self.view_trainable = [trainable[view.leaf] for view in self.views.values()]
        plain = [self.equation.invars[k] for k in (*self.const_positions, *self.carry_positions, *self.xs_positions)]
        self.weight_values = [a for a in dict.fromkeys(filter(jaxprs.is_var, plain)) if a in traced.weights]
        self.const_leaves = sorted(frozenset().union(*(traced.weights[v] for v in self.weight_values)))

    def _layer_dim(self, view: Any) -> int | None:
        dim = self.mover.dims[view.leaf]
        if dim is None:
            return None
        if view.order[0] == dim:
            name, shape = self.traced.unit_of[view.leaf], self.traced.leaf_vars[view.leaf].aval.shape
            raise ValueError(
                f"placement: a leaf of {name!r} is sharded over its layer dim\n"
                f"  got:      shape {shape}, dim {dim} is both sharded and scanned over by the loss\n"
                f"  fix:      name it in `stacked` (glob on the path), so that dim {dim} is left alone"
            )
        return view.order.index(dim) - 1

    def _values(self, env: dict[Any, Array], consts: dict[int, Array]) -> dict[int, Array]:
        """The operands that are no view, by position."""
        scope = dict(env) | {self.traced.leaf_vars[i]: full for i, full in consts.items()}
        self.traced.bind_weights(self.weight_values, scope)
        positions = (*self.const_positions, *self.carry_positions, *self.xs_positions)
        atoms = {k: self.equation.invars[k] for k in positions}
        return {k: scope[a] if jaxprs.is_var(a) else jnp.asarray(a.val, a.aval.dtype) for k, a in atoms.items()}

    def primal(self, weights: Sequence[Array], fixed: Sequence[Array], data: Sequence[Array]) -> list[Array]:
        """One iteration: (layers of the stacked leaves, constants, carry and other slices) -> carry and slices out."""
        by_position = dict(zip(self.views, weights, strict=True))
        by_position.update(zip(self.const_positions, fixed, strict=True))
        by_position.update(zip((*self.carry_positions, *self.xs_positions), data, strict=True))
        return jaxprs.run(self.scan.body, *(by_position[k] for k in range(len(self.equation.invars))))

    def plan_backward(self, wanted: Sequence[bool], differentiable: Sequence[bool]) -> None:
        """The gradient of every floating carry is followed; of constants, slices and outputs, those that ask for it."""
        asked = {v for v, flag in zip(self.segment.inputs, wanted, strict=True) if flag}
        has_cotangent = {v for v, flag in zip(self.segment.outputs, differentiable, strict=True) if flag}
        train_values = {v for v in self.weight_values if any(self.trainable[i] for i in self.traced.weights[v])}

        def asks(k: int) -> bool:
            atom = self.equation.invars[k]
            return jaxprs.is_var(atom) and (atom in asked or atom in train_values) and is_differentiable(atom.aval)

        num_carry = self.scan.num_carry
        self.carry_wanted = [is_differentiable(self.equation.invars[k].aval) for k in self.carry_positions]
        self.fixed_wanted = [asks(k) for k in self.const_positions]
        self.xs_wanted = [asks(k) for k in self.xs_positions]
        self.ys_wanted = [v in has_cotangent for v in self.equation.outvars[num_carry:]]
        aval = lambda k: self.equation.invars[k].aval
        layer = lambda k: jax.ShapeDtypeStruct(aval(k).shape[1:], aval(k).dtype)
        self.regather = Regather(
            self.primal,
            [layer(k) for k in self.views],
            [aval(k) for k in self.const_positions],
            [*map(aval, self.carry_positions), *map(layer, self.xs_positions)],
            (self.view_trainable, self.fixed_wanted, self.carry_wanted + self.xs_wanted),
            self.carry_wanted + self.ys_wanted,
        )

    def _stacked_shards(self, shards: dict[int, Array]) -> list[Array]:
        """Casts and transpositions act on shards as they do on full leaves, so they need no communication."""
        stacked = []
        for view in self.views.values():
            value = shards[view.leaf]
            for equation in view.equations:
                value = equation.primitive.bind(value, **equation.params)
            stacked.append(value)
        return stacked

    def _consts(self, shards: dict[int, Array], events: Sequence[Array]) -> dict[int, Array]:
        dims = [self.mover.dims[i] for i in self.const_leaves]
        full = self.mover.fetch([shards[i] for i in self.const_leaves], dims, events)
        return dict(zip(self.const_leaves, full, strict=True))

    def _loop(self, body: Any, init: Any, xs: Any, reverse: bool) -> Any:
        return lax.scan(body, init, xs, length=self.scan.length, reverse=reverse, unroll=self.scan.unroll)

    def _run(self, step: Any, shards: dict[int, Array], data: Sequence[Array], events: Sequence[Array]) -> Any:
        """Runs `step(weights, fixed, data) -> (outputs, extra)` in every iteration: (outputs, stacked extra)."""
        values = self._values(dict(zip(self.segment.inputs, data, strict=True)), self._consts(shards, events))
        fixed = [values[k] for k in self.const_positions]
        num_carry = self.scan.num_carry

        def body(carry: Any, slices: Any) -> Any:
            layers, xs = slices
            out, extra = step(self.mover.fetch(layers, self.dims, ()), fixed, [*carry, *xs])
            return list(out[:num_carry]), (list(out[num_carry:]), extra)

        xs = (self._stacked_shards(shards), [values[k] for k in self.xs_positions])
        carry, (ys, extra) = self._loop(body, [values[k] for k in self.carry_positions], xs, self.scan.reverse)
        out = dict(zip(self.equation.outvars, [*carry, *ys], strict=True))
        return [out[v] for v in self.segment.outputs], extra

    def evaluate(self, shards: dict[int, Array], data: Sequence[Array], events: Sequence[Array]) -> list[Array]:
        return self._run(lambda w, f, d: (self.primal(w, f, d), ()), shards, data, events)[0]

    def forward(
        self, shards: dict[int, Array], data: Sequence[Array], events: Sequence[Array]
    ) -> tuple[list[Array], Any]:
        out, kept = self._run(self.regather.forward, shards, data, events)
        return out, (kept, list(data))

    def backward(
        self, shards: dict[int, Array], saved: Any, cotangents: Sequence[Array], events: Sequence[Array]
    ) -> tuple[dict[int, Array], list[Array]]:
        kept, data = saved
        env = dict(zip(self.segment.inputs, data, strict=True))
        consts = self._consts(shards, events)
        values = self._values(env, consts)
        fixed = [values[k] for k in self.const_positions]
        given = dict(zip(self.differentiable_outputs, cotangents, strict=True))
        num_carry = self.scan.num_carry
        out_grad = lambda v: given[v] if v in given else jnp.zeros(v.aval.shape, v.aval.dtype)
        carry_grads = [out_grad(v) for v in select(self.equation.outvars[:num_carry], self.carry_wanted)]
        ys_grads = [out_grad(v) for v in select(self.equation.outvars[num_carry:], self.ys_wanted)]
        num_carry_grads = len(carry_grads)

        def body(carry: Any, slices: Any) -> Any:
            carry_grads, fixed_grads = carry
            layers, kept, ys_grads = slices
            weights = _fetch_needed(self.mover, layers, self.dims, self.regather.needed, ())
            grads = self.regather.backward(weights, fixed, kept, [*carry_grads, *ys_grads])
            reduced = _reduce(self.mover, grads, select(self.dims, self.view_trainable))
            fixed_grads = [a + b for a, b in zip(fixed_grads, grads.fixed, strict=True)]
            return (grads.data[:num_carry_grads], fixed_grads), (reduced, grads.data[num_carry_grads:])

        zeros = [jnp.zeros(a.shape, a.dtype) for a in select(fixed, self.fixed_wanted)]
        init = (carry_grads, zeros)
        xs = (self._stacked_shards(shards), kept, ys_grads)
        (carry_grads, fixed_grads), (layer_grads, xs_grads) = self._loop(body, init, xs, not self.scan.reverse)
        operand_grads = dict(zip(select(self.const_positions, self.fixed_wanted), fixed_grads, strict=True))
        operand_grads.update(zip(select(self.carry_positions, self.carry_wanted), carry_grads, strict=True))
        operand_grads.update(zip(select(self.xs_positions, self.xs_wanted), xs_grads, strict=True))
        leaf_grads = self._const_grads(consts, operand_grads)
        for view, grad in zip(select(list(self.views.values()), self.view_trainable), layer_grads, strict=True):
            _accumulate(leaf_grads, view.leaf, jnp.transpose(grad, np.argsort(view.order).tolist()))
        data_grads = [self._data_grad(v, operand_grads) for v in self.wanted_inputs]
        return leaf_grads, data_grads

    def _data_grad(self, v: Any, operand_grads: dict[int, Array]) -> Array:
        """A data value may be several operands of the scan."""
        total = jnp.zeros(v.aval.shape, v.aval.dtype)
        for k, grad in operand_grads.items():
            if self.equation.invars[k] is v:
                total = total + grad
        return total

    def _const_grads(self, consts: dict[int, Array], operand_grads: dict[int, Array]) -> dict[int, Array]:
        """From gradients of the loop's weight constants to reduced gradients of the leaves that they are made of."""
        leaves = [i for i in self.const_leaves if self.trainable[i]]
        positions = [k for k in operand_grads if self.equation.invars[k] in self.weight_values]
        if not leaves or not positions:
            return {}

        def derive(full: Sequence[Array]) -> list[Array]:
            scope = {self.traced.leaf_vars[i]: w for i, w in (consts | dict(zip(leaves, full, strict=True))).items()}
            self.traced.bind_weights(self.weight_values, scope)
            return [scope[self.equation.invars[k]] for k in positions]

        _, vjp = jax.vjp(derive, [consts[i] for i in leaves])
        (grads,) = vjp([operand_grads[k] for k in positions])
        return dict(zip(leaves, self.mover.reduce(grads, [self.mover.dims[i] for i in leaves]), strict=True))


def _accumulate(totals: dict[Any, Array], key: Any, value: Array) -> None:
    """Sums in at least fp32, whatever the dtype on the wire."""
    if key not in totals:
        totals[key] = value
        return
    wide = jnp.promote_types(value.dtype, jnp.float32)
    totals[key] = totals[key].astype(wide) + value.astype(wide)


class Program:
    """A loss, cut into units: forward alone, or forward and backward.

    Args:
        traced: the loss `fn(*leaves, *data) -> [scalar to differentiate, *others]`.
        mover: the stage's way of gathering and reducing.
        trainable: which leaves get a gradient.
    """

    def __init__(self, traced: TracedLoss, mover: Mover, trainable: Sequence[bool]):
        self.traced, self.mover, self.trainable = traced, mover, trainable
        self.stages = [(Stack if s.views else Straight)(traced, s, mover, trainable) for s in traced.segments]

    def _start(self, data: Sequence[Array]) -> dict[Any, Array]:
        jaxpr = self.traced.closed.jaxpr
        env = dict(zip(jaxpr.constvars, self.traced.closed.consts, strict=True))
        env.update(zip(self.traced.data_vars, data, strict=True))
        return env

    def _finish(self, env: dict[Any, Array]) -> list[Array]:
        atoms = self.traced.closed.jaxpr.outvars
        return [env[a] if jaxprs.is_var(a) else jnp.asarray(a.val, a.aval.dtype) for a in atoms]

    def _forward(self, method: str, shards: Sequence[Array], data: Sequence[Array], start: list[Array]) -> Any:
        env, saved, by_leaf = self._start(data), [], dict(enumerate(shards))
        done: list[list[Array]] = [start] * (PREFETCH + 1)  # events: when each unit before had computed
        for stage in self.stages:
            segment = stage.segment
            run = getattr(stage, method if getattr(stage, "regather", None) or method == "evaluate" else "evaluate")
            result = run(by_leaf, [env[v] for v in segment.inputs], done[-PREFETCH - 1])
            out, kept = result if run.__name__ == "forward" else (result, None)
            env.update(zip(segment.outputs, out, strict=True))
            saved.append(kept)
            if segment.leaves:
                done.append(collectives.event(out) or done[-1])
        return self._finish(env), saved, done[-1]

    def evaluate(self, shards: Sequence[Array], data: Sequence[Array], start: list[Array]) -> list[Array]:
        """The outputs of the loss. `start`: see `value_and_grad`."""
        return self._forward("evaluate", shards, data, start)[0]

    def value_and_grad(
        self, shards: Sequence[Array], data: Sequence[Array], seed: Any, start: list[Array]
    ) -> tuple[list[Array], list[Array | None]]:
        """The outputs of the loss and the reduced gradient of each trainable leaf (None for the others).

        Args:
            shards: parameter leaves as the stage keeps them, in the compute dtype.
            data: all other arguments of the loss.
            seed: `seed(outputs)` is the cotangent of the first output.
            start: events before which nothing is gathered (inside a loop: something of this iteration).
        """
        self._plan()
        out, saved, last = self._forward("forward", shards, data, start)
        by_leaf = dict(enumerate(shards))
        loss_var = self.traced.closed.jaxpr.outvars[0]
        cotangents: dict[Any, Array] = {loss_var: jnp.asarray(seed(out), loss_var.aval.dtype)}
        grads: dict[int, Array] = {}
        done: list[list[Array]] = [last] * (PREFETCH + 1)
        for stage, kept in zip(reversed(self.stages), reversed(saved), strict=True):
            if not stage.differentiable_outputs:
                continue
            given = [cotangents.pop(v) if v in cotangents else jnp.zeros(v.aval.shape, v.aval.dtype)
                     for v in stage.differentiable_outputs]  # fmt: skip
            leaf_grads, data_grads = stage.backward(by_leaf, kept, given, done[-PREFETCH - 1])
            for i, grad in leaf_grads.items():
                _accumulate(grads, i, grad)
            for v, grad in zip(stage.wanted_inputs, data_grads, strict=True):
                cotangents[v] = cotangents[v] + grad if v in cotangents else grad
            if stage.segment.leaves:
                dims = [self.mover.dims[i] for i in leaf_grads]
                reduced = collectives.arrivals(list(leaf_grads.values()), dims, self.mover.axes)
                done.append(collectives.event(data_grads) + reduced or done[-1])
        return out, [self._leaf_grad(i, grads) for i in range(len(shards))]

    def _leaf_grad(self, i: int, grads: dict[int, Array]) -> Array | None:
        if not self.trainable[i]:
            return None
        if i in grads:
            return grads[i]
        aval = self.traced.leaf_vars[i].aval  # a leaf that the loss does not use
        dtype = self.mover.reduce_dtype if self.mover.scatters else aval.dtype
        return jnp.zeros(self.mover.shard_shape(aval.shape, self.mover.dims[i]), dtype)

    def _plan(self) -> None:
        """Which values carry a gradient back, and from them the backward pass of each segment."""
        active: set[Any] = set()
        is_active = lambda v: v in active or any(self.trainable[i] for i in self.traced.weights.get(v, ()))
        for segment in self.traced.segments:
            for equation in segment.equations:
                if any(is_active(v) for v in jaxprs.variables(equation)):
                    active.update(v for v in equation.outvars if is_differentiable(v.aval))
        reached = {self.traced.closed.jaxpr.outvars[0]} & active
        for stage in reversed(self.stages):
            segment = stage.segment
            differentiable = [v in reached and v in active for v in segment.outputs]
            stage.differentiable_outputs = select(segment.outputs, differentiable)
            wanted = [v in active for v in segment.inputs]
            stage.wanted_inputs = select(segment.inputs, wanted)
            if stage.differentiable_outputs:
                stage.plan_backward(wanted, differentiable)
                reached.update(stage.wanted_inputs)
