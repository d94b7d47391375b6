"""One segment of a traced loss, forward and backward, on one device's shards: gather, compute, drop or reduce.

`Straight` is a stretch of equations that runs once, `Stack` a scan over stacked layers. What gather and
reduce are at a stage is in `stage_collectives`. Everything here runs inside `shard_map`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zerojax.sharding.axes import Dims
from zerojax.transform import jaxprs, layer_scan
from zerojax.transform.dependencies import events, floating_after
from zerojax.transform.layer_scan import Carry, Cut, LayerBody, Layers, SavedValues
from zerojax.transform.regather import Regather, is_differentiable, merge, select
from zerojax.transform.remat import NO_REMAT, Remat
from zerojax.transform.schedule import Schedule
from zerojax.transform.segmentation import Segment, TracedLoss
from zerojax.transform.stage_collectives import StageCollectives
from zerojax.typing import Array, Shape

# (outputs, values to save) of a layer, from its weights, what every iteration uses, and what is carried or sliced
Step = Callable[[Sequence[Array], Sequence[Array], Sequence[Array]], tuple[Sequence[Array], Sequence[Array]]]


class Straight:
    """A segment that runs once: its leaves are gathered, used and dropped.

    They are not dropped where the backward pass follows `at_once`.
    """

    differentiable_outputs: list[Any]  # these four are set when the backward pass is planned
    wanted_inputs: list[Any]
    regather: Regather
    at_once: bool

    def __init__(
        self,
        traced: TracedLoss,
        segment: Segment,
        collectives: StageCollectives,
        trainable: Sequence[bool],
        remat: Remat,
    ):
        self.traced, self.segment, self.collectives, self.remat = traced, segment, collectives, remat
        self.leaves = sorted(segment.leaves)  # gathered by use, reduced as the tree has them: by use took more memory
        self.dims = [collectives.dims[i] for i in self.leaves]
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
        remat = NO_REMAT if at_once and self.remat.saves_inputs_only else self.remat
        self.regather = Regather(self.primal, weights, [], data, wanted_by_group, differentiable, remat, resident)

    def evaluate(self, shards: dict[int, Array], data: Sequence[Array], schedule: Schedule) -> list[Array]:
        return self._computed(self.primal(self._fetch(shards, schedule), [], data), schedule)

    def forward(self, shards: dict[int, Array], data: Sequence[Array], schedule: Schedule) -> tuple[list[Array], Any]:
        weights = self._fetch(shards, schedule)
        data = floating_after(data, schedule.in_host_memory(1))
        out, kept = self.regather.forward(weights, [], data)
        kept = self.regather.put_away(kept, [])
        schedule.offloaded(self.regather.in_host_memory(kept))
        if self.collectives.stage.shards_params and not jaxprs.multiplies(self.segment.equations):
            # What is as cheap as a lookup compilers do again in the backward pass, and hold the gathered table for it.
            out = lax.optimization_barrier(out)
        return self._computed(out, schedule), (kept, weights if self.at_once else None)

    def restore(self, saved: Any, cotangents: list[Array]) -> tuple[Any, list[Array]]:
        """(what the forward pass kept, on its way from host memory while the unit above computes; its cotangents)."""
        kept, weights = saved
        fetched, cotangents = self.regather.restore(kept, cotangents)
        return (self.regather.on_device(kept, fetched), weights), cotangents

    def backward(
        self, shards: dict[int, Array], saved: Any, cotangents: Sequence[Array], schedule: Schedule
    ) -> tuple[dict[int, Array], list[Array]]:
        kept, weights = saved
        if weights is None:
            held = [shards[i] for i in self.leaves]
            weights = self.collectives.fetch_needed(held, self.dims, self.regather.needed, schedule)
        if self.regather.recomputes:
            kept = self.regather.inputs_after(kept, events(cotangents) + schedule.last)
            # Without a barrier the compiler finds that the forward pass computed the same.
            kept, cotangents = lax.optimization_barrier((kept, list(cotangents)))
            schedule.follows(self.regather.floating_inputs(kept))
        grads = self.regather.backward(weights, [], kept, cotangents)
        dims = select(self.dims, self.trainable)
        reduced, there = self.collectives.reduce_transposed(
            grads.weights, grads.orders, dims, schedule.before_reduction()
        )
        # What is computed again is held until the last product for a weight is done. What is kept is there anyway.
        products = self.collectives.reduced_dim_first(grads, dims).weights if self.regather.recomputes else []
        self._computed(grads.data + products, schedule)
        schedule.reduced(there)
        return dict(zip(select(self.leaves, self.trainable), reduced, strict=True)), grads.data

    def _fetch(self, shards: dict[int, Array], schedule: Schedule) -> list[Array]:
        by_use = self.segment.leaves
        full = self.collectives.fetch([shards[i] for i in by_use], [self.collectives.dims[i] for i in by_use], schedule)
        return [full[by_use.index(i)] for i in self.leaves]

    def _computed(self, values: list[Array], schedule: Schedule) -> list[Array]:
        if any(dim.shard is not None for dim in self.dims):
            schedule.computed(values)
        return values


class Stack:
    """A scan over stacked leaves: each iteration gathers its own layer, uses it and drops it.

    Weights that the loop uses in every iteration (its constants) are gathered once, before it. The `unroll` of the
    model's own scan has no effect.
    """

    differentiable_outputs: list[Any]  # as in Straight
    wanted_inputs: list[Any]
    regather: Regather

    def __init__(
        self,
        traced: TracedLoss,
        segment: Segment,
        collectives: StageCollectives,
        trainable: Sequence[bool],
        remat: Remat,
    ):
        self.traced, self.segment, self.collectives, self.trainable = traced, segment, collectives, trainable
        self.remat = remat
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
        dim = self.collectives.dims[view.leaf].shard
        if view.order[0] == dim:
            name, shape = self.traced.unit_of[view.leaf], self.traced.leaf_vars[view.leaf].aval.shape
            raise ValueError(
                f"placement: a leaf of {name!r} is sharded over its layer dim\n"
                f"  got:      shape {shape}, dim {dim} is both sharded and scanned over by the loss\n"
                f"  fix:      name it in `stacked` (glob on the path), so that dim {dim} is left alone"
            )
        return self.collectives.dims[view.leaf].transposed(view.order).of_layer()

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
            self.remat,
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

    def _consts(self, shards: dict[int, Array], schedule: Schedule) -> dict[int, Array]:
        if not self.const_leaves:
            return {}
        dims = [self.collectives.dims[i] for i in self.const_leaves]
        full = self.collectives.fetch([shards[i] for i in self.const_leaves], dims, schedule)
        return dict(zip(self.const_leaves, full, strict=True))

    def _run(
        self, step: Step, shards: dict[int, Array], data: Sequence[Array], schedule: Schedule, memory: Regather | None
    ) -> tuple[list[Array], SavedValues]:
        """Runs `step` for every layer: (outputs of the segment, what layers save, moved to its place by `memory`)."""
        values = self._values(dict(zip(self.segment.inputs, data, strict=True)), self._consts(shards, schedule))
        floating = [is_differentiable(self.equation.invars[k].aval) for k in self.carry_positions]
        fixed = [values[k] for k in self.const_positions]
        body = _ForwardLayer(self.collectives, self.dims, step, fixed, floating, memory)
        carry = body.split([values[k] for k in self.carry_positions])
        xs = [values[k] for k in self.xs_positions]
        layers = Layers(self._stacked_shards(shards), xs, self._cut(schedule), self.scan.reverse)
        scanned = layer_scan.scan(body, carry, layers, schedule)
        out = dict(zip(self.equation.outvars, [*merge(floating, *scanned.carry), *scanned.ys], strict=True))
        return [out[v] for v in self.segment.outputs], scanned.saved

    def _cut(self, schedule: Schedule) -> Cut:
        """The same for the forward and for the backward pass: one uses what the other saves."""
        stage = self.collectives.stage
        moves = schedule.prefetch > 0 and self.collectives.axes.num_shards > 1
        prefetch = schedule.prefetch if moves and stage.shards_params else 0
        return Cut.of(self.scan.length, prefetch, delay_reduction=moves and stage.shards_grads)

    def evaluate(self, shards: dict[int, Array], data: Sequence[Array], schedule: Schedule) -> list[Array]:
        return self._run(lambda w, f, d: (self.primal(w, f, d), []), shards, data, schedule, None)[0]

    def forward(self, shards: dict[int, Array], data: Sequence[Array], schedule: Schedule) -> tuple[list[Array], Any]:
        out, saved = self._run(self.regather.forward, shards, data, schedule, self.regather)
        return out, (saved, list(data))

    def restore(self, saved: Any, cotangents: list[Array]) -> tuple[Any, list[Array]]:
        """As in Straight. Its layers bring back what they kept."""
        return saved, cotangents

    def backward(
        self, shards: dict[int, Array], saved: Any, cotangents: Sequence[Array], schedule: Schedule
    ) -> tuple[dict[int, Array], list[Array]]:
        saved, data = saved
        env = dict(zip(self.segment.inputs, data, strict=True))
        consts = self._consts(shards, schedule)
        values = self._values(env, consts)
        fixed = [values[k] for k in self.const_positions]
        given = dict(zip(self.differentiable_outputs, cotangents, strict=True))
        num_carry = self.scan.num_carry
        out_grad = lambda v: given[v] if v in given else jnp.zeros(v.aval.shape, v.aval.dtype)
        carry_grads = [out_grad(v) for v in select(self.equation.outvars[:num_carry], self.carry_wanted)]
        ys_grads = [out_grad(v) for v in select(self.equation.outvars[num_carry:], self.ys_wanted)]
        if self.regather.recomputes and not self.regather.offloads:  # what comes back from the host is late anyway
            saved = saved.with_last(lambda last: self.regather.inputs_after(last, events(carry_grads)))
        dims = select(self.dims, self.view_trainable)
        body = _BackwardLayer(self.collectives, self.dims, dims, self.regather, fixed, self.remat.saves_inputs_only)
        fixed_grads = [jnp.zeros(a.shape, a.dtype) for a in select(fixed, self.fixed_wanted)]
        layers = Layers(self._stacked_shards(shards), ys_grads, self._cut(schedule), not self.scan.reverse, saved)
        scanned = layer_scan.scan(body, (carry_grads, fixed_grads), layers, schedule)
        (carry_grads, fixed_grads), xs_grads, layer_grads = scanned.carry, scanned.ys, scanned.grads
        operand_grads = dict(zip(select(self.const_positions, self.fixed_wanted), fixed_grads, strict=True))
        operand_grads.update(zip(select(self.carry_positions, self.carry_wanted), carry_grads, strict=True))
        operand_grads.update(zip(select(self.xs_positions, self.xs_wanted), xs_grads, strict=True))
        leaf_grads = self._const_grads(consts, operand_grads, schedule)
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

    def _const_grads(
        self, consts: dict[int, Array], operand_grads: dict[int, Array], schedule: Schedule
    ) -> dict[int, Array]:
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
        dims = [self.collectives.dims[i] for i in leaves]
        reduced, there = self.collectives.reduce(grads, dims, schedule.before_reduction())
        schedule.reduced(there)
        return dict(zip(leaves, reduced, strict=True))


class _ForwardLayer(LayerBody):
    """A layer of a forward pass.

    Args:
        collectives: of the stage.
        dims: of the layer's weights.
        step: the layer.
        fixed: what the loop uses in every iteration.
        floating: which of the carried values are floating arrays.
        regather: says what is saved for a backward pass. None: nothing is.
    """

    def __init__(
        self,
        collectives: StageCollectives,
        dims: Sequence[Dims],
        step: Step,
        fixed: list[Array],
        floating: Sequence[bool],
        regather: Regather | None,
    ):
        self._collectives, self._dims, self._step, self._fixed = collectives, dims, step, fixed
        self._floating, self._regather = floating, regather
        self.saves, self.offloads = regather is not None, regather is not None and regather.offloads

    def split(self, carry: Sequence[Array]) -> Carry:
        return select(carry, self._floating), select(carry, [not flag for flag in self._floating])

    def fetch(self, shards: Any, prefetch: int, schedule: Schedule) -> list[Array]:
        return self._collectives.fetch(shards, self._dims, schedule, prefetch)

    def compute(self, weights: Any, carry: Carry, x: Any, saved: Any, fetched: Any) -> tuple[Carry, Any, Any, Any]:
        out, saved = self._step(weights, self._fixed, [*merge(self._floating, *carry), *x])
        num_carry = len(self._floating)
        return self.split(list(out[:num_carry])), list(out[num_carry:]), saved, []

    def put_away(self, saved: Any, waits: list[Array]) -> list[Array]:
        return self._regather.put_away(saved, waits) if self._regather else saved

    def in_host_memory(self, saved: Any) -> list[Array]:
        return self._regather.in_host_memory(saved) if self._regather else []


class _BackwardLayer(LayerBody):
    """A layer of a backward pass.

    Args:
        collectives: of the stage.
        dims: of the layer's weights.
        grad_dims: of those that get a gradient.
        regather: the layer's backward pass.
        fixed: what the loop uses in every iteration.
        saves_inputs_only: a layer is recomputed from its inputs.
    """

    def __init__(
        self,
        collectives: StageCollectives,
        dims: Sequence[Dims],
        grad_dims: Sequence[Dims],
        regather: Regather,
        fixed: list[Array],
        saves_inputs_only: bool,
    ):
        self._collectives, self._dims, self._grad_dims = collectives, dims, grad_dims
        self._regather, self._fixed = regather, fixed
        self._orders: list[Shape] = []  # of the gradients; the same in every layer
        self.restores = regather.offloads
        # At stage 2 nothing else prevents that two layers of one iteration are recomputed at once.
        self.delays_recompute = regather.recomputes and not regather.offloads and not collectives.stage.shards_params
        self.one_layer_grads = regather.recomputes and saves_inputs_only

    def fetch(self, shards: Any, prefetch: int, schedule: Schedule) -> list[Array | None]:
        return self._collectives.fetch_needed(shards, self._dims, self._regather.needed, schedule, prefetch)

    def compute(self, weights: Any, carry: Carry, x: Any, saved: Any, fetched: Any) -> tuple[Carry, Any, Any, Any]:
        carry_grads, fixed_grads = carry
        saved = self._regather.on_device(saved, fetched or [])
        grads = self._regather.backward(weights, self._fixed, saved, [*carry_grads, *x])
        grads = self._collectives.reduced_dim_first(grads, self._grad_dims)
        self._orders = grads.orders
        fixed_grads = [a + b for a, b in zip(fixed_grads, grads.fixed, strict=True)]
        num_carry = len(carry_grads)
        return (grads.data[:num_carry], fixed_grads), grads.data[num_carry:], [], grads.weights

    def reduce(self, grads: Any, waits: list[Array]) -> tuple[list[Array], list[Array]]:
        return self._collectives.reduce_transposed(grads, self._orders, self._grad_dims, waits)

    def restore(self, saved: Any, overlapped: list[Array]) -> tuple[list[Array], list[Array]]:
        return self._regather.restore(saved, overlapped)

    def delay_recompute(self, saved: Any, waits: list[Array]) -> list[Array]:
        return self._regather.inputs_after(saved, waits)


def accumulate(totals: dict[Any, Array], key: Any, value: Array) -> None:
    """Sums in at least fp32, whatever the dtype on the wire."""
    if key not in totals:
        totals[key] = value
        return
    wide = jnp.promote_types(value.dtype, jnp.float32)
    totals[key] = totals[key].astype(wide) + value.astype(wide)
