"""A segment that is a scan over stacked layers: forward and backward pass, layer by layer, on one device's shards.

Everything here runs inside `shard_map`.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.comm.dependencies import events
from zerojax.comm.schedule import Schedule
from zerojax.comm.stage_collectives import StageCollectives, accumulate
from zerojax.offload import host_arrays, host_scan
from zerojax.program import gradient_paths, jaxprs, layer_scan
from zerojax.program.gradient_paths import is_differentiable
from zerojax.program.layer_bodies import BackwardLayer, ComputeLayer, ForwardLayer, LayerWeights
from zerojax.program.layer_scan import Carry, Cut, Layers, SavedValues, Scanned
from zerojax.program.regather import Regather, merge, select
from zerojax.program.remat import Remat
from zerojax.program.segmentation import Segment, TracedLoss, View
from zerojax.sharding.axes import Dims
from zerojax.utils.typing import Array


class LayerStack:
    """A scan over stacked leaves: each iteration gathers its own layer, uses it and drops it.

    Weights that the loop uses in every iteration (its constants) are gathered once, before the loop. The `unroll`
    option of the model's scan has no effect.
    """

    # As in StraightSegment:
    differentiable_outputs: list[Any]
    wanted_inputs: list[Any]
    regather: Regather

    def __init__(
        self,
        traced: TracedLoss,
        segment: Segment,
        collectives: StageCollectives,
        remat: Remat,
    ):
        self.traced, self.segment, self.collectives, self.remat = traced, segment, collectives, remat
        (self.equation,) = segment.equations
        self.scan = jaxprs.scan_params(self.equation)
        first_xs = self.scan.num_consts + self.scan.num_carry
        self.views = segment.views
        self.const_positions = list(range(self.scan.num_consts))
        self.carry_positions = list(range(self.scan.num_consts, first_xs))
        self.xs_positions = [k for k in range(first_xs, len(self.equation.invars)) if k not in self.views]
        self.dims = [self._layer_dims(view) for view in self.views.values()]
        layers = [traced.leaf_vars[view.leaf].aval for view in self.views.values()]
        self.num_bytes = sum(aval.size // aval.shape[0] * aval.dtype.itemsize for aval in layers)  # of a layer
        plain = [self.equation.invars[k] for k in (*self.const_positions, *self.carry_positions, *self.xs_positions)]
        self.weight_values = [a for a in dict.fromkeys(filter(jaxprs.is_var, plain)) if a in traced.weights]
        self.const_leaves = sorted(frozenset().union(*(traced.weights[v] for v in self.weight_values)))
        self.weights = LayerWeights(collectives, list(self.views.values()), self.dims)
        self.complete = [self._is_complete(view.leaf) for view in self.views.values()]

    @property
    def summed(self) -> frozenset[int]:
        """The leaves whose gradients are summed over the replica axes layer by layer, if the collectives do so."""
        return frozenset(view.leaf for view, flag in zip(self.views.values(), self.complete, strict=True) if flag)

    def _is_complete(self, leaf: int) -> bool:
        """Whether the gradient of a layer of this leaf comes from one iteration of this scan alone."""
        uses = [view.leaf for view in self.views.values()] + self.const_leaves
        return uses.count(leaf) == 1 and sum(leaf in segment.leaves for segment in self.traced.segments) == 1

    def _layer_dims(self, view: View) -> Dims:
        dims = self.collectives.dims[view.leaf]
        assert view.order[0] != dims.shard, "sharded over its layer dim"
        return dims.transposed(view.order).of_layer()

    def _values(self, env: dict[Any, Array], consts: dict[int, Array]) -> dict[int, Array]:
        """The operands that are not views of a leaf, by position."""
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

    def plan_backward(self, active: Set[Any], backward_is_next: bool) -> list[Any]:
        """As in StraightSegment: traces the backward pass of a layer.

        `backward_is_next` changes nothing in a loop: the backward pass of its first layers waits for all others.
        """
        num_carry = self.scan.num_carry
        self.active = active
        operands = [jaxprs.is_var(atom) and atom in active for atom in self.equation.invars]
        has_cotangent = [v in self.differentiable_outputs for v in self.equation.outvars]
        self.ys_wanted = has_cotangent[num_carry:]

        # Carried values with a tangent in the loop. Their cotangents may come from the layers alone, or not at all.
        self.carry_wanted = gradient_paths.tangents(self.equation, operands)[:num_carry]
        self.regather = self._traced_backward(operands)
        start = select(has_cotangent[:num_carry], self.carry_wanted)
        first = sum(map(sum, self.regather.wanted[:2]))  # of the gradients of carried values
        links = self.regather.links[first : first + len(start)]
        reached = gradient_paths.reached(start + [True] * sum(self.ys_wanted), links)
        if not all(reached):
            self.carry_wanted = merge(self.carry_wanted, reached[: len(start)], [False] * num_carry)
            self.regather = self._traced_backward(operands)

        # What gets a gradient of each layer.
        trained, self.fixed_wanted, data = self.regather.gets_gradient
        self.carry_flows, self.xs_wanted = data[:num_carry], data[num_carry:]
        self.trained_positions = select(list(self.views), trained)
        views, dims = list(self.views.values()), self.dims
        self.trained = LayerWeights(self.collectives, select(views, trained), select(dims, trained))
        self.trained_complete = select(self.complete, trained)
        positions = [
            *select(self.const_positions, self.fixed_wanted),
            *select(self.carry_positions, self.carry_flows),
            *select(self.xs_positions, self.xs_wanted),
        ]
        flows = {self.equation.invars[k] for k in positions if operands[k]}
        return [v for v in self.segment.inputs if v in flows]

    def _traced_backward(self, operands: Sequence[bool]) -> Regather:
        """The backward pass of a layer. `operands` are those that have a tangent."""
        aval = lambda k: self.equation.invars[k].aval
        layer = lambda k: jax.ShapeDtypeStruct(aval(k).shape[1:], aval(k).dtype)
        of = lambda positions: [operands[k] for k in positions]
        return Regather(
            self.primal,
            [layer(k) for k in self.views],
            [aval(k) for k in self.const_positions],
            [*map(aval, self.carry_positions), *map(layer, self.xs_positions)],
            (of(self.views), of(self.const_positions), self.carry_wanted + of(self.xs_positions)),
            self.carry_wanted + self.ys_wanted,
            self.remat,
            [False] * len(self.carry_positions) + [True] * len(self.xs_positions),
        )

    def _stacked_shards(self, shards: dict[int, Array]) -> list[Array]:
        """The operands that are views of leaves, as shards: casting and transposing a shard need no communication."""
        stacked = []
        for view in self.views.values():
            value = shards[view.leaf]
            for equation in view.equations:
                value = jaxprs.apply(equation, value)
            stacked.append(value)
        return stacked

    def _in_host(self, shards: dict[int, Array]) -> bool:
        """Whether the stacks are in host memory."""
        return any(map(host_arrays.is_in_host, self._host_stacks(shards)))

    def _host_stacks(self, shards: dict[int, Array]) -> list[Array]:
        """The leaves that are sliced, as shards."""
        return [shards[view.leaf] for view in self.views.values()]

    def _consts(self, shards: dict[int, Array], schedule: Schedule) -> dict[int, Array]:
        """The full leaves that the constants of the loop are computed from."""
        if not self.const_leaves:
            return {}
        dims = [self.collectives.dims[i] for i in self.const_leaves]
        full = self.collectives.fetch([shards[i] for i in self.const_leaves], dims, schedule)
        return dict(zip(self.const_leaves, full, strict=True))

    def _run(
        self,
        compute: ComputeLayer,
        shards: dict[int, Array],
        data: Sequence[Array],
        schedule: Schedule,
        regather: Regather | None,
    ) -> tuple[list[Array], SavedValues]:
        """(outputs of the segment, values that the layers save: none without `regather`)."""
        values = self._values(dict(zip(self.segment.inputs, data, strict=True)), self._consts(shards, schedule))
        floating = [is_differentiable(self.equation.invars[k].aval) for k in self.carry_positions]
        fixed = [values[k] for k in self.const_positions]
        body = ForwardLayer(self.weights, compute, fixed, floating, regather)
        carry = body.split([values[k] for k in self.carry_positions])
        xs = [values[k] for k in self.xs_positions]
        if self._in_host(shards):
            layers = Layers(self._host_stacks(shards), xs, Cut.of_single_layers(self.scan.length), self.scan.reverse)
            scanned, _ = host_scan.scan_from_host(body, carry, layers, [], schedule)
        else:
            layers = Layers(self._stacked_shards(shards), xs, self._cut(schedule), self.scan.reverse)
            scanned = layer_scan.scan(body, carry, layers, schedule)
        out = dict(zip(self.equation.outvars, [*merge(floating, *scanned.carry), *scanned.ys], strict=True))
        return [out[v] for v in self.segment.outputs], scanned.saved

    def _cut(self, schedule: Schedule) -> Cut:
        """The cut of the loop, which is the same in both passes: one uses the values that the other saves."""
        stage = self.collectives.stage
        overlaps = schedule.prefetch > 0 and self.collectives.axes.num_shards > 1
        prefetch = schedule.prefetch if overlaps and stage.shards_params else 0
        return Cut.of(self.scan.length, prefetch, delay_reduction=overlaps and stage.shards_grads)

    @property
    def names(self) -> set[str]:
        """The names of the segment's activations."""
        return self.regather.names

    def evaluate(self, shards: dict[int, Array], data: Sequence[Array], schedule: Schedule) -> list[Array]:
        return self._run(lambda w, f, d: (self.primal(w, f, d), []), shards, data, schedule, None)[0]

    def forward(self, shards: dict[int, Array], data: Sequence[Array], schedule: Schedule) -> tuple[list[Array], Any]:
        out, saved = self._run(self.regather.forward, shards, data, schedule, self.regather)
        return out, (saved, list(data))

    def restore(self, saved: Any, cotangents: list[Array]) -> tuple[Any, list[Array]]:
        """As in StraightSegment; here the layers fetch their saved values themselves."""
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
        if self.regather.recomputes and not self.regather.offloads:  # values from host memory are late anyway
            saved = saved.with_last(lambda last: self.regather.delay_inputs(last, events(carry_grads)))
        carried = select(self.carry_flows, self.carry_wanted)
        body = BackwardLayer(
            self.weights,
            self.trained,
            self.trained_complete,
            self.regather,
            fixed,
            carried,
            self.remat.saves_inputs_only,
        )
        fixed_grads = [jnp.zeros(a.shape, a.dtype) for a in select(fixed, self.fixed_wanted)]
        init, reverse = (carry_grads, fixed_grads), not self.scan.reverse
        if self._in_host(shards):
            scanned, layer_grads = self._backward_from_host(body, init, shards, (ys_grads, saved), schedule)
        else:
            layers = Layers(self._stacked_shards(shards), ys_grads, self._cut(schedule), reverse, saved)
            scanned = layer_scan.scan(body, init, layers, schedule)
            orders = [np.argsort(view.order).tolist() for view in self.trained.views]
            layer_grads = [jnp.transpose(grad, order) for grad, order in zip(scanned.grads, orders, strict=True)]
        (carry_grads, fixed_grads), xs_grads = scanned.carry, scanned.ys
        operand_grads = dict(zip(select(self.const_positions, self.fixed_wanted), fixed_grads, strict=True))
        operand_grads.update(
            zip(select(self.carry_positions, self.carry_flows), select(carry_grads, carried), strict=True)
        )
        operand_grads.update(zip(select(self.xs_positions, self.xs_wanted), xs_grads, strict=True))
        leaf_grads = self._const_grads(consts, operand_grads, schedule)
        for view, grad in zip(self.trained.views, layer_grads, strict=True):
            if grad is not None:
                accumulate(leaf_grads, view.leaf, grad)
        data_grads = [self._data_grad(v, operand_grads) for v in self.wanted_inputs]
        return leaf_grads, data_grads

    def _backward_from_host(
        self, body: BackwardLayer, init: Carry, shards: dict[int, Array], given: tuple[Any, Any], schedule: Schedule
    ) -> tuple[Scanned, list[Array | None]]:
        """The backward pass of layers whose stacks are in host memory, except for those of vectors.

        Args:
            body, init, schedule: as of `layer_scan.scan`.
            shards: by leaf.
            given: the cotangents of stacked outputs, and the saved values.

        Returns:
            (the results; for each trained leaf, the gradient, or None if it has gone to host memory).
        """
        host, views = self.collectives.host_gradients, self.trained.views
        assert host is not None
        moves = [host_arrays.is_in_host(shards[view.leaf]) for view in views]
        self._check_complete(select(views, moves))
        dtypes = [self.collectives.grad_dtype(self.equation.invars[k].aval.dtype) for k in self.trained_positions]
        totals = [
            host.stack(view.leaf, shards[view.leaf].shape, dtype) if flag else jnp.zeros(shards[view.leaf].shape, dtype)
            for view, dtype, flag in zip(views, dtypes, moves, strict=True)
        ]
        cut = Cut.of_single_layers(self.scan.length)
        layers = Layers(self._host_stacks(shards), given[0], cut, not self.scan.reverse, given[1])
        scanned, norms = host_scan.scan_from_host(body, init, layers, totals, schedule)
        for view, total, norm in select(list(zip(views, scanned.grads, norms, strict=True)), moves):
            host.totals[view.leaf], host.squared_norms[view.leaf] = total, norm
        return scanned, [None if flag else grad for flag, grad in zip(moves, scanned.grads, strict=True)]

    def _check_complete(self, views: Sequence[View]) -> None:
        for view in views:
            if not self._is_complete(view.leaf):
                shape = self.traced.leaf_vars[view.leaf].aval.shape
                raise ValueError(
                    f"offload: the gradients of layers in host memory are computed by one loop\n"
                    f"  got:      a leaf of {self.traced.unit_of[view.leaf]!r} of shape {shape}, which the loss also "
                    f"uses elsewhere\n"
                    f"  fix:      Zero(..., offload='optimizer'), which keeps the parameters on the devices"
                )

    def _data_grad(self, v: Any, operand_grads: dict[int, Array]) -> Array:
        """The gradient of a data value, which may be several operands of the scan."""
        total = jnp.zeros(v.aval.shape, v.aval.dtype)
        for k, grad in operand_grads.items():
            if self.equation.invars[k] is v:
                total = total + grad
        return total

    def _const_grads(
        self, consts: dict[int, Array], operand_grads: dict[int, Array], schedule: Schedule
    ) -> dict[int, Array]:
        """The reduced gradients of leaves, from gradients of the loop's constants that are computed from them."""
        positions = [k for k in operand_grads if self.equation.invars[k] in self.weight_values]
        used = frozenset().union(*(self.traced.weights[self.equation.invars[k]] for k in positions))
        leaves = [i for i in self.const_leaves if i in used and self.traced.leaf_vars[i] in self.active]
        if not leaves or not positions:
            return {}

        def derive(full: Sequence[Array]) -> list[Array]:
            scope = {self.traced.leaf_vars[i]: w for i, w in (consts | dict(zip(leaves, full, strict=True))).items()}
            self.traced.bind_weights(self.weight_values, scope)
            return [scope[self.equation.invars[k]] for k in positions]

        _, vjp = jax.vjp(derive, [consts[i] for i in leaves])
        (grads,) = vjp([operand_grads[k] for k in positions])
        dims = [self.collectives.dims[i] for i in leaves]
        reduced, reduction_events = self.collectives.reduce(grads, dims, schedule.before_reduction(), schedule.group)
        schedule.reduced(reduction_events)
        return dict(zip(leaves, reduced, strict=True))
