"""A part that is a scan over stacked layers: each layer is gathered, used and dropped.

Everything here runs inside `shard_map`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.comm.schedule import Schedule, events
from zerojax.comm.stage_collectives import StageCollectives, accumulate
from zerojax.program import gradient_paths, jaxprs
from zerojax.program.gradient_paths import is_differentiable
from zerojax.program.jaxprs import Var
from zerojax.program.layer_bodies import BackwardLayer, ComputeLayer, ForwardLayer, TrainedDims
from zerojax.program.layer_scan import Cut, SavedValues
from zerojax.program.part import DeviceGradients, GradientSink, Loop, Weights
from zerojax.program.regather import Regather
from zerojax.program.remat import Remat
from zerojax.program.segmentation import Segment, TracedLoss, View
from zerojax.sharding.axes import Dims
from zerojax.utils.flags import merge, select
from zerojax.utils.typing import Array, PyTree


@dataclasses.dataclass(frozen=True)
class LayerStack:
    """A `Part` that is a scan over stacked leaves.

    Weights that the loop uses in every iteration (its constants) are gathered once, before the loop. The `unroll`
    option of the model's scan has no effect.

    Attributes:
        traced, segment, collectives, remat: as of `Straight`.
    """

    traced: TracedLoss
    segment: Segment
    collectives: StageCollectives
    remat: Remat

    # The operands of the scan --------------------------------------------------------------------------------------

    @property
    def equation(self) -> jaxprs.Equation:
        return self.segment.equations[0]

    @cached_property
    def scan(self) -> jaxprs.ScanParams:
        return jaxprs.scan_params(self.equation)

    @property
    def views(self) -> list[View]:
        """The views of stacked leaves, in the order of their first uses."""
        return list(self.segment.views.values())

    @cached_property
    def dims(self) -> list[Dims]:
        """The divided dims of a layer of each view."""
        found = []
        for view in self.views:
            dims = self.collectives.dims[view.leaf]
            assert view.order[0] != dims.shard, "sharded over its layer dim"
            found.append(dims.transposed(view.order).of_layer())
        return found

    @property
    def view_positions(self) -> list[int]:
        return list(self.segment.views)

    @property
    def const_positions(self) -> list[int]:
        return list(range(self.scan.num_consts))

    @property
    def carry_positions(self) -> list[int]:
        return list(range(self.scan.num_consts, self.scan.num_consts + self.scan.num_carry))

    @cached_property
    def xs_positions(self) -> list[int]:
        first = self.scan.num_consts + self.scan.num_carry
        return [k for k in range(first, len(self.equation.invars)) if k not in self.segment.views]

    @property
    def plain_positions(self) -> list[int]:
        """The operands that are not views of a leaf."""
        return [*self.const_positions, *self.carry_positions, *self.xs_positions]

    @property
    def num_bytes(self) -> int:
        """The bytes of the weights of a layer."""
        leaves = [self.traced.leaf_vars[view.leaf].aval for view in self.views]
        return sum(aval.size // aval.shape[0] * aval.dtype.itemsize for aval in leaves)

    @cached_property
    def weight_values(self) -> list[Var]:
        """The operands that are computed from weights and are not sliced."""
        plain = [self.equation.invars[k] for k in self.plain_positions]
        return [a for a in dict.fromkeys(filter(jaxprs.is_var, plain)) if a in self.traced.weights]

    @cached_property
    def const_leaves(self) -> list[int]:
        return sorted(frozenset().union(*(self.traced.weights[v] for v in self.weight_values)))

    @cached_property
    def complete(self) -> list[bool]:
        """Whether the gradient of a layer of each view comes from one iteration of this scan alone."""
        uses = [view.leaf for view in self.views] + self.const_leaves
        parts_of = lambda leaf: sum(leaf in segment.leaves for segment in self.traced.segments)
        return [uses.count(view.leaf) == 1 and parts_of(view.leaf) == 1 for view in self.views]

    @property
    def summed(self) -> frozenset[int]:
        """The leaves whose gradients are summed over the replica axes layer by layer, if the collectives do so."""
        return frozenset(view.leaf for view in select(self.views, self.complete))

    # The forward pass ----------------------------------------------------------------------------------------------

    def compute(self, weights: Sequence[Array], fixed: Sequence[Array], data: Sequence[Array]) -> list[Array]:
        """One iteration: (layers of the stacked leaves, constants, carry and other slices) -> carry and slices out."""
        by_position = dict(zip(self.view_positions, weights, strict=True))
        by_position.update(zip(self.const_positions, fixed, strict=True))
        by_position.update(zip((*self.carry_positions, *self.xs_positions), data, strict=True))
        return jaxprs.run(self.scan.body, *(by_position[k] for k in range(len(self.equation.invars))))

    def evaluate(self, weights: Weights, data: Sequence[Array], schedule: Schedule) -> list[Array]:
        return self.run(lambda w, f, d: (self.compute(w, f, d), []), weights, data, schedule, None)[0]

    def gather_consts(self, weights: Weights, schedule: Schedule) -> dict[int, Array]:
        """The full leaves that the constants of the loop are computed from."""
        if not self.const_leaves:
            return {}
        dims = [self.collectives.dims[i] for i in self.const_leaves]
        shards = weights.shards(self.const_leaves, schedule.before_gather())
        return dict(zip(self.const_leaves, self.collectives.gather(shards, dims, schedule), strict=True))

    def plain_values(self, data: Sequence[Array], consts: dict[int, Array]) -> dict[int, Array]:
        """The operands that are not views of a leaf, by position."""
        scope = dict(zip(self.segment.inputs, data, strict=True))
        scope |= {self.traced.leaf_vars[i]: full for i, full in consts.items()}
        self.traced.bind_weights(self.weight_values, scope)
        atoms = {k: self.equation.invars[k] for k in self.plain_positions}
        return {k: scope[a] if jaxprs.is_var(a) else jnp.asarray(a.val, a.aval.dtype) for k, a in atoms.items()}

    def cut(self, schedule: Schedule) -> Cut:
        """The cut of the loop, which is the same in both passes: one uses the values that the other saves."""
        stage = self.collectives.stage
        overlaps = schedule.prefetch > 0 and self.collectives.axes.num_shards > 1
        prefetch = schedule.prefetch if overlaps and stage.shards_params else 0
        return Cut.of(self.scan.length, prefetch, delay_reduction=overlaps and stage.shards_grads)

    def run(
        self,
        compute: ComputeLayer,
        weights: Weights,
        data: Sequence[Array],
        schedule: Schedule,
        regather: Regather | None,
    ) -> tuple[list[Array], SavedValues]:
        """(outputs of the segment, values that the layers save: none without `regather`)."""
        values = self.plain_values(data, self.gather_consts(weights, schedule))
        floating = [is_differentiable(self.equation.invars[k].aval) for k in self.carry_positions]
        fixed = [values[k] for k in self.const_positions]
        body = ForwardLayer(self.collectives, self.dims, compute, fixed, floating, regather)
        carry = body.split([values[k] for k in self.carry_positions])
        loop = Loop(self.views, [values[k] for k in self.xs_positions], self.cut(schedule), self.scan.reverse)
        scanned, _ = weights.scan(body, carry, loop, schedule, DeviceGradients())
        out = dict(zip(self.equation.outvars, [*merge(floating, *scanned.carry), *scanned.ys], strict=True))
        return [out[v] for v in self.segment.outputs], scanned.saved

    # The plan of the backward pass ---------------------------------------------------------------------------------

    def plan_backward(self, outputs: Sequence[Var], active: Set[Var], backward_is_next: bool) -> LayerStackWithBackward:
        """Traces the backward pass of a layer.

        `backward_is_next` changes nothing in a loop: the backward pass of its first layers waits for all others.
        """
        num_carry = self.scan.num_carry
        operands = [jaxprs.is_var(atom) and atom in active for atom in self.equation.invars]
        has_cotangent = [v in outputs for v in self.equation.outvars]
        ys_wanted = has_cotangent[num_carry:]

        # Carried values with a tangent in the loop. Their cotangents may come from the layers alone, or not at all.
        carry_wanted = gradient_paths.tangents(self.equation, operands)[:num_carry]
        regather = self._traced_backward(operands, carry_wanted, ys_wanted)
        start = select(has_cotangent[:num_carry], carry_wanted)
        first = sum(map(sum, regather.wanted[:2]))  # of the gradients of carried values
        links = regather.links[first : first + len(start)]
        reached = gradient_paths.reached(start + [True] * sum(ys_wanted), links)
        if not all(reached):
            carry_wanted = merge(carry_wanted, reached[: len(start)], [False] * num_carry)
            regather = self._traced_backward(operands, carry_wanted, ys_wanted)

        # What gets a gradient of each layer.
        _, fixed, data = regather.gets_gradient
        positions = [
            *select(self.const_positions, fixed),
            *select(self.carry_positions, data[:num_carry]),
            *select(self.xs_positions, data[num_carry:]),
        ]
        flows = {self.equation.invars[k] for k in positions if operands[k]}
        inputs = [v for v in self.segment.inputs if v in flows]
        trained = frozenset(i for i in self.const_leaves if self.traced.leaf_vars[i] in active)
        return LayerStackWithBackward(self, outputs, inputs, regather, carry_wanted, ys_wanted, trained)

    def _traced_backward(self, operands: Sequence[bool], carry_wanted: list[bool], ys_wanted: list[bool]) -> Regather:
        """The backward pass of a layer. `operands` are those that have a tangent."""
        aval = lambda k: self.equation.invars[k].aval
        layer = lambda k: jax.ShapeDtypeStruct(aval(k).shape[1:], aval(k).dtype)
        of = lambda positions: [operands[k] for k in positions]
        return Regather(
            self.compute,
            [layer(k) for k in self.view_positions],
            [aval(k) for k in self.const_positions],
            [*map(aval, self.carry_positions), *map(layer, self.xs_positions)],
            wanted=(of(self.view_positions), of(self.const_positions), carry_wanted + of(self.xs_positions)),
            differentiable=carry_wanted + ys_wanted,
            remat=self.remat,
            resident=[False] * len(self.carry_positions) + [True] * len(self.xs_positions),
        )


@dataclasses.dataclass(frozen=True)
class LayerStackWithBackward:
    """A `PlannedPart` that is a scan over stacked leaves.

    Attributes:
        part, outputs, inputs: as of every `PlannedPart`.
        regather: the forward and backward pass of a layer, for full weights.
        carry_wanted: which carried values have a cotangent in the loop.
        ys_wanted: which stacked outputs have one.
        trained_consts: the leaves that get a gradient and that constants of the loop are computed from.
    """

    part: LayerStack
    outputs: Sequence[Var]
    inputs: Sequence[Var]
    regather: Regather
    carry_wanted: Sequence[bool]
    ys_wanted: Sequence[bool]
    trained_consts: frozenset[int]
    is_loop = True

    @property
    def names(self) -> set[str]:
        return self.regather.names

    def forward(self, weights: Weights, data: Sequence[Array], schedule: Schedule) -> tuple[list[Array], Any]:
        out, saved = self.part.run(self.regather.forward, weights, data, schedule, self.regather)
        return out, (saved, list(data))

    def restore(self, saved: PyTree, cotangents: list[Array]) -> tuple[Any, list[Array]]:
        """The layers fetch their saved values themselves."""
        return saved, cotangents

    def backward(
        self, weights: Weights, saved: PyTree, cotangents: Sequence[Array], schedule: Schedule, sink: GradientSink
    ) -> tuple[dict[int, Array], list[Array]]:
        part, regather, collectives = self.part, self.regather, self.part.collectives
        saved, data = saved
        num_carry = part.scan.num_carry
        trained, fixed_wanted, data_wanted = regather.gets_gradient
        carry_flows, xs_wanted = data_wanted[:num_carry], data_wanted[num_carry:]

        # The cotangents of the loop's results.
        consts = part.gather_consts(weights, schedule)
        values = part.plain_values(data, consts)
        given = dict(zip(self.outputs, cotangents, strict=True))
        out_grad = lambda v: given[v] if v in given else jnp.zeros(v.aval.shape, v.aval.dtype)
        carry_grads = [out_grad(v) for v in select(part.equation.outvars[:num_carry], self.carry_wanted)]
        ys_grads = [out_grad(v) for v in select(part.equation.outvars[num_carry:], self.ys_wanted)]
        if regather.recomputes and not regather.offloads:  # values from host memory are late anyway
            saved = saved.with_last(lambda last: regather.delay_inputs(last, events(carry_grads)))

        # The loop: each layer is gathered, computed and reduced.
        fixed = [values[k] for k in part.const_positions]
        carried = select(carry_flows, self.carry_wanted)
        complete = select(part.complete, trained)
        body = BackwardLayer(
            collectives,
            part.dims,
            TrainedDims(select(part.dims, trained), complete),
            regather,
            fixed,
            carried,
            part.remat.saves_inputs_only,
        )
        fixed_grads = [jnp.zeros(a.shape, a.dtype) for a in select(fixed, fixed_wanted)]
        dtypes = [part.equation.invars[k].aval.dtype for k in select(part.view_positions, trained)]
        loop = Loop(
            part.views,
            ys_grads,
            part.cut(schedule),
            not part.scan.reverse,
            saved,
            select(part.views, trained),
            complete,
            [collectives.grad_dtype(dtype) for dtype in dtypes],
        )
        scanned, layer_grads = weights.scan(body, (carry_grads, fixed_grads), loop, schedule, sink)
        (carry_grads, fixed_grads), xs_grads = scanned.carry, scanned.ys

        # The gradients of the operands, by position; then those of leaves and of the inputs.
        operand_grads = dict(zip(select(part.const_positions, fixed_wanted), fixed_grads, strict=True))
        carry_grads = select(carry_grads, carried)
        operand_grads.update(zip(select(part.carry_positions, carry_flows), carry_grads, strict=True))
        operand_grads.update(zip(select(part.xs_positions, xs_wanted), xs_grads, strict=True))
        leaf_grads = self._const_grads(consts, operand_grads, schedule)
        for view, grad in zip(loop.trained, layer_grads, strict=True):
            if grad is not None:
                accumulate(leaf_grads, view.leaf, grad)
        return leaf_grads, [self._input_grad(v, operand_grads) for v in self.inputs]

    def _input_grad(self, v: Var, operand_grads: dict[int, Array]) -> Array:
        """The gradient of an input, which may be several operands of the scan."""
        total = jnp.zeros(v.aval.shape, v.aval.dtype)
        for k, grad in operand_grads.items():
            if self.part.equation.invars[k] is v:
                total = total + grad
        return total

    def _const_grads(
        self, consts: dict[int, Array], operand_grads: dict[int, Array], schedule: Schedule
    ) -> dict[int, Array]:
        """The reduced gradients of leaves, from gradients of the loop's constants that are computed from them."""
        part, traced, collectives = self.part, self.part.traced, self.part.collectives
        operands = part.equation.invars
        positions = [k for k in operand_grads if operands[k] in part.weight_values]
        used = frozenset().union(*(traced.weights[operands[k]] for k in positions))
        leaves = [i for i in part.const_leaves if i in used & self.trained_consts]
        if not leaves:
            return {}

        def derive(full: Sequence[Array]) -> list[Array]:
            scope = {traced.leaf_vars[i]: w for i, w in (consts | dict(zip(leaves, full, strict=True))).items()}
            traced.bind_weights(part.weight_values, scope)
            return [scope[v] for k in positions if jaxprs.is_var(v := operands[k])]

        _, vjp = jax.vjp(derive, [consts[i] for i in leaves])
        (grads,) = vjp([operand_grads[k] for k in positions])
        dims = [collectives.dims[i] for i in leaves]
        reduced, reduction_events = collectives.reduce(grads, dims, schedule.before_reduction(), schedule.group)
        schedule.reduced(reduction_events)
        return dict(zip(leaves, reduced, strict=True))
