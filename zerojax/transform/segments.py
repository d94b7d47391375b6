"""One segment of a traced loss, forward and backward, on one device's shards: gather, compute, drop or reduce.

`Straight` is a stretch of equations that runs once, `Stack` a scan over stacked layers. What gather and
reduce are at a stage is in `mover`. Everything here runs inside `shard_map`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zerojax.sharding.axes import Dims
from zerojax.transform import jaxprs, layer_scan
from zerojax.transform.dependencies import events, floating_after
from zerojax.transform.layer_scan import Memory, Plan
from zerojax.transform.regather import Regather, is_differentiable, merge, select
from zerojax.transform.remat import EVERYTHING, Keep
from zerojax.transform.schedule import Order
from zerojax.transform.segmentation import Segment, TracedLoss
from zerojax.transform.stage_collectives import Mover, fetch_needed, reduce_made, reduced_dim_first

Array = Any


class Straight:
    """A segment that runs once: its leaves are gathered, used and dropped.

    They are not dropped where the backward pass follows `at_once`.
    """

    differentiable_outputs: list[Any]  # these four are set when the backward pass is planned
    wanted_inputs: list[Any]
    regather: Regather
    at_once: bool

    def __init__(self, traced: TracedLoss, segment: Segment, mover: Mover, trainable: Sequence[bool], keep: Keep):
        self.traced, self.segment, self.mover, self.keep = traced, segment, mover, keep
        self.leaves = sorted(segment.leaves)  # gathered by use, reduced as the tree has them: by use took more memory
        self.dims = [mover.dims[i] for i in self.leaves]
        self.trainable = [trainable[i] for i in self.leaves]
        own = {v for e in segment.equations for v in e.outvars}
        read = dict.fromkeys(v for e in segment.equations for v in jaxprs.variables(e) if v not in own)
        self.weight_values = [v for v in read if v in traced.weights]

    def primal(self, weights: Sequence[Array], fixed: Sequence[Array], data: Sequence[Array]) -> list[Array]:
        scope = dict(zip(self.segment.inputs, data, strict=True))
        scope.update(zip([self.traced.leaf_vars[i] for i in self.leaves], weights, strict=True))
        self.traced.bind_weights(self.weight_values, scope)
        jaxprs.evaluate(self.segment.equations, scope)
        return [scope[v] for v in self.segment.outputs]

    def plan_backward(self, wanted: Sequence[bool], differentiable: Sequence[bool], at_once: bool) -> None:
        self.at_once = at_once
        weights = [self.traced.leaf_vars[i].aval for i in self.leaves]
        data = [v.aval for v in self.segment.inputs]
        wanted_by_group = (self.trainable, [], wanted)
        resident = [v in self.traced.data_vars for v in self.segment.inputs]
        keep = EVERYTHING if at_once and self.keep.keeps_inputs_alone else self.keep
        self.regather = Regather(self.primal, weights, [], data, wanted_by_group, differentiable, keep, resident)

    def evaluate(self, shards: dict[int, Array], data: Sequence[Array], order: Order) -> list[Array]:
        return self._computed(self.primal(self._fetch(shards, order), [], data), order)

    def forward(self, shards: dict[int, Array], data: Sequence[Array], order: Order) -> tuple[list[Array], Any]:
        weights = self._fetch(shards, order)
        data = floating_after(data, order.in_host_memory(1))
        out, kept = self.regather.forward(weights, [], data)
        kept = self.regather.put_away(kept, [])
        order.offloaded(self.regather.in_host_memory(kept))
        if self.mover.gathers and not jaxprs.multiplies(self.segment.equations):
            # What is as cheap as a lookup compilers do again in the backward pass, and hold the gathered table for it.
            out = lax.optimization_barrier(out)
        return self._computed(out, order), (kept, weights if self.at_once else None)

    def bring_back(self, saved: Any, cotangents: list[Array]) -> tuple[Any, list[Array]]:
        """(what the forward pass kept, on its way from host memory while the unit above computes; its cotangents)."""
        kept, weights = saved
        near, cotangents = self.regather.bring_back(kept, cotangents)
        return (self.regather.on_device(kept, near), weights), cotangents

    def backward(
        self, shards: dict[int, Array], saved: Any, cotangents: Sequence[Array], order: Order
    ) -> tuple[dict[int, Array], list[Array]]:
        kept, weights = saved
        if weights is None:
            held = [shards[i] for i in self.leaves]
            weights = fetch_needed(self.mover, held, self.dims, self.regather.needed, order)
        if self.regather.recomputes:
            kept = self.regather.inputs_after(kept, events(cotangents) + order.last)
            # Without a barrier the compiler finds that the forward pass computed the same.
            kept, cotangents = lax.optimization_barrier((kept, list(cotangents)))
            order.follows(self.regather.floating_inputs(kept))
        grads = self.regather.backward(weights, [], kept, cotangents)
        dims = select(self.dims, self.trainable)
        reduced, there = reduce_made(self.mover, grads.weights, grads.orders, dims, order.before_reduction())
        # What is computed again is held until the last product for a weight is done. What is kept is there anyway.
        products = reduced_dim_first(self.mover, grads, dims).weights if self.regather.recomputes else []
        self._computed(grads.data + products, order)
        order.reduced(there)
        return dict(zip(select(self.leaves, self.trainable), reduced, strict=True)), grads.data

    def _fetch(self, shards: dict[int, Array], order: Order) -> list[Array]:
        by_use = self.segment.leaves
        full = self.mover.fetch([shards[i] for i in by_use], [self.mover.dims[i] for i in by_use], order)
        return [full[by_use.index(i)] for i in self.leaves]

    def _computed(self, values: list[Array], order: Order) -> list[Array]:
        if any(dim.shard is not None for dim in self.dims):
            order.computed(values)
        return values


class Stack:
    """A scan over stacked leaves: each iteration gathers its own layer, uses it and drops it.

    Weights that the loop uses in every iteration (its constants) are gathered once, before it. The `unroll` of the
    model's own scan has no effect.
    """

    differentiable_outputs: list[Any]  # as in Straight
    wanted_inputs: list[Any]
    regather: Regather

    def __init__(self, traced: TracedLoss, segment: Segment, mover: Mover, trainable: Sequence[bool], keep: Keep):
        self.traced, self.segment, self.mover, self.trainable, self.keep = traced, segment, mover, trainable, keep
        (self.equation,) = segment.equations
        self.scan = jaxprs.scan_params(self.equation)
        first_xs = self.scan.num_consts + self.scan.num_carry
        self.views = segment.views
        self.const_positions = list(range(self.scan.num_consts))
        self.carry_positions = list(range(self.scan.num_consts, first_xs))
        self.xs_positions = [k for k in range(first_xs, len(self.equation.invars)) if k not in self.views]
        self.dims = [self._layer_dims(view) for view in self.views.values()]
        self.view_trainable = [trainable[view.leaf] for view in self.views.values()]
        plain = [self.equation.invars[k] for k in (*self.const_positions, *self.carry_positions, *self.xs_positions)]
        self.weight_values = [a for a in dict.fromkeys(filter(jaxprs.is_var, plain)) if a in traced.weights]
        self.const_leaves = sorted(frozenset().union(*(traced.weights[v] for v in self.weight_values)))

    def _layer_dims(self, view: Any) -> Dims:
        dim = self.mover.dims[view.leaf].shard
        if view.order[0] == dim:
            name, shape = self.traced.unit_of[view.leaf], self.traced.leaf_vars[view.leaf].aval.shape
            raise ValueError(
                f"placement: a leaf of {name!r} is sharded over its layer dim\n"
                f"  got:      shape {shape}, dim {dim} is both sharded and scanned over by the loss\n"
                f"  fix:      name it in `stacked` (glob on the path), so that dim {dim} is left alone"
            )
        return self.mover.dims[view.leaf].transposed(view.order).of_layer()

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

    def plan_backward(self, wanted: Sequence[bool], differentiable: Sequence[bool], at_once: bool) -> None:
        """The gradient of every floating carry is followed; of constants, slices and outputs, those that ask for it.

        To follow `at_once` saves a loop nothing: its first layers wait for all others.
        """
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
            self.keep,
            [False] * len(self.carry_positions) + [True] * len(self.xs_positions),
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

    def _consts(self, shards: dict[int, Array], order: Order) -> dict[int, Array]:
        if not self.const_leaves:
            return {}
        dims = [self.mover.dims[i] for i in self.const_leaves]
        full = self.mover.fetch([shards[i] for i in self.const_leaves], dims, order)
        return dict(zip(self.const_leaves, full, strict=True))

    def _run(
        self, step: Any, shards: dict[int, Array], data: Sequence[Array], order: Order, memory: Memory | None = None
    ) -> Any:
        """Runs `step(weights, fixed, data) -> (outputs, extra)` for every layer: (outputs, stacked extra).

        For `memory` see `layer_scan.scan`.
        """
        values = self._values(dict(zip(self.segment.inputs, data, strict=True)), self._consts(shards, order))
        fixed = [values[k] for k in self.const_positions]
        num_carry = self.scan.num_carry
        floating = [is_differentiable(self.equation.invars[k].aval) for k in self.carry_positions]
        split = lambda carry: (select(carry, floating), select(carry, [not flag for flag in floating]))

        def layer(weights: Any, carry: Any, xs: Any, kept: Any, near: Any) -> Any:
            out, extra = step(weights, fixed, [*merge(floating, *carry), *xs])
            return split(list(out[:num_carry])), list(out[num_carry:]), extra, []

        carry, ys, extra, _ = layer_scan.scan(
            layer,
            lambda shards, ahead, order: self.mover.fetch(shards, self.dims, order, ahead),
            lambda grads, reduced: (grads, []),
            split([values[k] for k in self.carry_positions]),
            self._stacked_shards(shards),
            [values[k] for k in self.xs_positions],
            None,
            plan=self._plan(order),
            reverse=self.scan.reverse,
            order=order,
            memory=memory,
        )
        out = dict(zip(self.equation.outvars, [*merge(floating, *carry), *ys], strict=True))
        return [out[v] for v in self.segment.outputs], extra

    def _plan(self, order: Order) -> Plan:
        """The same for the forward and for the backward pass: one uses what the other keeps."""
        moves = order.depth > 0 and self.mover.axes.num_shards > 1
        ahead = order.depth if moves and self.mover.gathers else 0
        return Plan.of(self.scan.length, ahead, late=moves and self.mover.scatters)

    def evaluate(self, shards: dict[int, Array], data: Sequence[Array], order: Order) -> list[Array]:
        return self._run(lambda w, f, d: (self.primal(w, f, d), ()), shards, data, order)[0]

    def forward(self, shards: dict[int, Array], data: Sequence[Array], order: Order) -> tuple[list[Array], Any]:
        out, kept = self._run(self.regather.forward, shards, data, order, self.regather)
        return out, (kept, list(data))

    def bring_back(self, saved: Any, cotangents: list[Array]) -> tuple[Any, list[Array]]:
        """As in Straight. Its layers bring back what they kept."""
        return saved, cotangents

    def backward(
        self, shards: dict[int, Array], saved: Any, cotangents: Sequence[Array], order: Order
    ) -> tuple[dict[int, Array], list[Array]]:
        kept, data = saved
        env = dict(zip(self.segment.inputs, data, strict=True))
        consts = self._consts(shards, order)
        values = self._values(env, consts)
        fixed = [values[k] for k in self.const_positions]
        given = dict(zip(self.differentiable_outputs, cotangents, strict=True))
        num_carry = self.scan.num_carry
        out_grad = lambda v: given[v] if v in given else jnp.zeros(v.aval.shape, v.aval.dtype)
        carry_grads = [out_grad(v) for v in select(self.equation.outvars[:num_carry], self.carry_wanted)]
        ys_grads = [out_grad(v) for v in select(self.equation.outvars[num_carry:], self.ys_wanted)]
        num_carry_grads = len(carry_grads)
        orders: list[tuple[int, ...]] = []  # of the gradients; the same in every layer
        if self.regather.recomputes and not self.regather.offloads:  # what comes back from the host is late anyway
            kept = kept.with_last(lambda last: self.regather.inputs_after(last, events(carry_grads)))

        # At stage 2 nothing else keeps two layers of one iteration from being computed again at once.
        again = self.regather.recomputes and not self.regather.offloads and not self.mover.gathers

        def layer(weights: Any, carry: Any, ys_grads: Any, kept: Any, near: Any) -> Any:
            carry_grads, fixed_grads = carry
            kept = self.regather.on_device(kept, near or [])
            grads = self.regather.backward(weights, fixed, kept, [*carry_grads, *ys_grads])
            grads = reduced_dim_first(self.mover, grads, select(self.dims, self.view_trainable))
            orders[:] = grads.orders
            fixed_grads = [a + b for a, b in zip(fixed_grads, grads.fixed, strict=True)]
            return (grads.data[:num_carry_grads], fixed_grads), grads.data[num_carry_grads:], [], grads.weights

        (carry_grads, fixed_grads), xs_grads, _, layer_grads = layer_scan.scan(
            layer,
            lambda shards, ahead, order: fetch_needed(
                self.mover, shards, self.dims, self.regather.needed, order, ahead
            ),
            lambda grads, reduced: reduce_made(
                self.mover, grads, orders, select(self.dims, self.view_trainable), reduced
            ),
            (carry_grads, [jnp.zeros(a.shape, a.dtype) for a in select(fixed, self.fixed_wanted)]),
            self._stacked_shards(shards),
            ys_grads,
            kept,
            plan=self._plan(order),
            reverse=not self.scan.reverse,
            order=order,
            memory=self.regather,
            tight=self.regather.recomputes and self.keep.keeps_inputs_alone,
            again=self.regather.inputs_after if again else None,
        )
        operand_grads = dict(zip(select(self.const_positions, self.fixed_wanted), fixed_grads, strict=True))
        operand_grads.update(zip(select(self.carry_positions, self.carry_wanted), carry_grads, strict=True))
        operand_grads.update(zip(select(self.xs_positions, self.xs_wanted), xs_grads, strict=True))
        leaf_grads = self._const_grads(consts, operand_grads, order)
        for view, grad in zip(select(list(self.views.values()), self.view_trainable), layer_grads, strict=True):
            accumulate(leaf_grads, view.leaf, jnp.transpose(grad, np.argsort(view.order).tolist()))
        data_grads = [self._data_grad(v, operand_grads) for v in self.wanted_inputs]
        return leaf_grads, data_grads

    def _data_grad(self, v: Any, operand_grads: dict[int, Array]) -> Array:
        """A data value may be several operands of the scan."""
        total = jnp.zeros(v.aval.shape, v.aval.dtype)
        for k, grad in operand_grads.items():
            if self.equation.invars[k] is v:
                total = total + grad
        return total

    def _const_grads(self, consts: dict[int, Array], operand_grads: dict[int, Array], order: Order) -> dict[int, Array]:
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
        dims = [self.mover.dims[i] for i in leaves]
        reduced, there = self.mover.reduce(grads, dims, order.before_reduction())
        order.reduced(there)
        return dict(zip(leaves, reduced, strict=True))


def accumulate(totals: dict[Any, Array], key: Any, value: Array) -> None:
    """Sums in at least fp32, whatever the dtype on the wire."""
    if key not in totals:
        totals[key] = value
        return
    wide = jnp.promote_types(value.dtype, jnp.float32)
    totals[key] = totals[key].astype(wide) + value.astype(wide)
