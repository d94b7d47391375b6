"""A part that is a scan over stacked layers: each layer is gathered, used and dropped.

Everything here runs inside `shard_map`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence, Set
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp

from zerojax.comm.schedule import Schedule, events
from zerojax.comm.stage_collectives import accumulate
from zerojax.program import gradient_paths, jaxprs
from zerojax.program.gradient_paths import is_differentiable
from zerojax.program.jaxprs import Var
from zerojax.program.layer_scan import Carry, Cut, LayerBody, Layers, SavedValues
from zerojax.program.part import GradientSink, Loop, Part, PlannedPart, Weights
from zerojax.program.regather import Regather, trace_regather
from zerojax.program.segmentation import View
from zerojax.sharding.axes import Dims
from zerojax.utils.flags import merge, negate, select
from zerojax.utils.typing import Array, PyTree, Shape


class Positions(NamedTuple):
    """The positions of the operands of a scan."""

    views: list[int]  # of stacked leaves, in the order of their first uses
    consts: range
    carry: range
    xs: list[int]  # all other slices

    @property
    def plain(self) -> list[int]:
        """The operands that are not views of a leaf."""
        return [*self.consts, *self.carry, *self.xs]


@dataclasses.dataclass(frozen=True)
class LayerStack(Part):
    """A `Part` that is a scan over stacked leaves.

    Weights that the loop uses in every iteration (its constants) are gathered once, before the loop. The `unroll`
    option of the model's scan has no effect.
    """

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

    @cached_property
    def positions(self) -> Positions:
        first, end = self.scan.num_consts, self.scan.num_consts + self.scan.num_carry
        views = list(self.segment.views)
        xs = [k for k in range(end, len(self.equation.invars)) if k not in views]
        return Positions(views, range(first), range(first, end), xs)

    @property
    def num_bytes(self) -> int:
        """The bytes of the weights of a layer."""
        leaves = [self.traced.leaf_vars[view.leaf].aval for view in self.views]
        return sum(aval.size // aval.shape[0] * aval.dtype.itemsize for aval in leaves)

    @cached_property
    def weight_operands(self) -> dict[int, Var]:
        """The operands that are computed from weights and are not sliced, by position."""
        plain = {k: self.equation.invars[k] for k in self.positions.plain}
        return {k: a for k, a in plain.items() if jaxprs.is_var(a) and a in self.traced.weights}

    @cached_property
    def const_leaves(self) -> list[int]:
        return sorted(frozenset().union(*(self.traced.weights[v] for v in self.weight_operands.values())))

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
        positions = [*self.positions.views, *self.positions.plain]
        operands = dict(zip(positions, [*weights, *fixed, *data], strict=True))
        return jaxprs.run(self.scan.body, *(operands[k] for k in range(len(positions))))

    def evaluate(self, weights: Weights, data: Sequence[Array], schedule: Schedule) -> list[Array]:
        return self.run(weights, data, schedule)[0]

    def gather_consts(self, weights: Weights, schedule: Schedule) -> dict[int, Array]:
        """The full leaves that the constants of the loop are computed from."""
        return dict(zip(self.const_leaves, self.gather(self.const_leaves, weights, schedule), strict=True))

    def plain_values(
        self, data: Sequence[Array], consts: dict[int, Array]
    ) -> tuple[list[Array], list[Array], list[Array]]:
        """The operands that are not views of a leaf: constants, carry and other slices."""
        scope = dict(zip(self.segment.inputs, data, strict=True))
        scope |= {self.traced.leaf_vars[i]: full for i, full in consts.items()}
        self.traced.bind_weights(self.weight_operands.values(), scope)
        atoms = [self.equation.invars[k] for k in self.positions.plain]
        values = [scope[a] if jaxprs.is_var(a) else jnp.asarray(a.val, a.aval.dtype) for a in atoms]
        first, end = self.scan.num_consts, self.scan.num_consts + self.scan.num_carry
        return values[:first], values[first:end], values[end:]

    def cut(self, schedule: Schedule) -> Cut:
        """The cut of the loop, which is the same in both passes: one uses the values that the other saves."""
        stage = self.collectives.stage
        overlaps = schedule.prefetch > 0 and self.collectives.axes.num_shards > 1
        prefetch = schedule.prefetch if overlaps and stage.shards_params else 0
        delays = overlaps and stage.shards_grads
        return Cut.of(self.scan.length, prefetch, delay_reduction=delays, least=schedule.layers)

    def run(
        self, weights: Weights, data: Sequence[Array], schedule: Schedule, saver: Regather | None = None
    ) -> tuple[list[Array], SavedValues]:
        """(outputs of the segment, values that the layers save for the backward pass: none without `saver`)."""
        fixed, carried, xs = self.plain_values(data, self.gather_consts(weights, schedule))
        floating = [is_differentiable(a) for a in carried]
        body = ForwardLayer(self, fixed, floating, saver)
        loop = Loop(self.views, Layers([], xs, self.cut(schedule), self.scan.reverse))
        scanned, _ = weights.scan(body, body.split(carried), loop, schedule, GradientSink())
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
        links = regather.links[2][: len(start)]  # of the gradients of carried values
        reached = gradient_paths.reached(start + [True] * sum(ys_wanted), links)
        if not all(reached):
            carry_wanted = merge(carry_wanted, reached[: len(start)], [False] * num_carry)
            regather = self._traced_backward(operands, carry_wanted, ys_wanted)

        # What gets a gradient of each layer.
        _, fixed, data = regather.gets_gradient
        flows = {self.equation.invars[k] for k in select(self.positions.plain, fixed + data) if operands[k]}
        inputs = [v for v in self.segment.inputs if v in flows]
        trained = frozenset(i for i in self.const_leaves if self.traced.leaf_vars[i] in active)
        return LayerStackWithBackward(self, outputs, inputs, regather.names, regather, carry_wanted, ys_wanted, trained)

    def _traced_backward(self, operands: Sequence[bool], carry_wanted: list[bool], ys_wanted: list[bool]) -> Regather:
        """The backward pass of a layer. `operands` are those that have a tangent."""
        aval = lambda k: self.equation.invars[k].aval
        layer = lambda k: jax.ShapeDtypeStruct(aval(k).shape[1:], aval(k).dtype)
        of = lambda positions: [operands[k] for k in positions]
        return trace_regather(
            self.compute,
            [layer(k) for k in self.positions.views],
            [aval(k) for k in self.positions.consts],
            [*map(aval, self.positions.carry), *map(layer, self.positions.xs)],
            wanted=(of(self.positions.views), of(self.positions.consts), carry_wanted + of(self.positions.xs)),
            differentiable=carry_wanted + ys_wanted,
            remat=self.remat,
            resident=[False] * len(self.positions.carry) + [True] * len(self.positions.xs),
        )


@dataclasses.dataclass(frozen=True)
class LayerStackWithBackward(PlannedPart):
    """A `PlannedPart` that is a scan over stacked leaves. The layers fetch their saved values themselves."""

    part: LayerStack
    regather: Regather  # the forward and backward pass of a layer, for full weights
    carry_wanted: Sequence[bool]  # which carried values have a cotangent in the loop
    ys_wanted: Sequence[bool]  # which stacked outputs have one
    trained_consts: frozenset[int]  # the leaves that get a gradient and that constants of the loop are computed from
    is_loop = True

    def forward(self, weights: Weights, data: Sequence[Array], schedule: Schedule) -> tuple[list[Array], PyTree]:
        out, saved = self.part.run(weights, data, schedule, self.regather)
        return out, (saved, list(data))

    def backward(
        self, weights: Weights, saved: PyTree, cotangents: Sequence[Array], schedule: Schedule, sink: GradientSink
    ) -> tuple[dict[int, Array], list[Array]]:
        part, regather, collectives = self.part, self.regather, self.part.collectives
        saved, data = saved
        num_carry = part.scan.num_carry
        trained, fixed_wanted, data_wanted = regather.gets_gradient

        # The cotangents of the loop's results.
        consts = part.gather_consts(weights, schedule)
        fixed, _, _ = part.plain_values(data, consts)
        given = dict(zip(self.outputs, cotangents, strict=True))
        out_grad = lambda v: given[v] if v in given else jnp.zeros(v.aval.shape, v.aval.dtype)
        carry_grads = [out_grad(v) for v in select(part.equation.outvars[:num_carry], self.carry_wanted)]
        ys_grads = [out_grad(v) for v in select(part.equation.outvars[num_carry:], self.ys_wanted)]
        if regather.recomputes and not regather.offloads:  # values from host memory are late anyway
            saved = saved.with_last(lambda last: regather.delay_inputs(last, events(carry_grads)))

        # The loop: each layer is gathered, computed and reduced.
        carried = select(data_wanted[:num_carry], self.carry_wanted)
        body = BackwardLayer(part, regather, fixed, carried)
        fixed_grads = [jnp.zeros(a.shape, a.dtype) for a in select(fixed, fixed_wanted)]
        dtypes = [part.equation.invars[k].aval.dtype for k in select(part.positions.views, trained)]
        loop = Loop(
            part.views,
            Layers([], ys_grads, part.cut(schedule), not part.scan.reverse, saved),
            select(part.views, trained),
            body.complete,
            [collectives.grad_dtype(dtype) for dtype in dtypes],
        )
        scanned, layer_grads = weights.scan(body, (carry_grads, fixed_grads), loop, schedule, sink)
        (carry_grads, fixed_grads), xs_grads = scanned.carry, scanned.ys

        # The gradients of the operands, by position; then those of leaves and of the inputs.
        positions = select(part.positions.plain, fixed_wanted + data_wanted)
        operand_grads = dict(zip(positions, [*fixed_grads, *select(carry_grads, carried), *xs_grads], strict=True))
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
        operands = {k: v for k, v in part.weight_operands.items() if k in operand_grads}
        used = frozenset().union(*(traced.weights[v] for v in operands.values()))
        leaves = [i for i in part.const_leaves if i in used & self.trained_consts]
        if not leaves:
            return {}

        def derive(full: Sequence[Array]) -> list[Array]:
            scope = {traced.leaf_vars[i]: w for i, w in (consts | dict(zip(leaves, full, strict=True))).items()}
            traced.bind_weights(part.weight_operands.values(), scope)
            return [scope[v] for v in operands.values()]

        _, vjp = jax.vjp(derive, [consts[i] for i in leaves])
        (grads,) = vjp([operand_grads[k] for k in operands])
        dims = [collectives.dims[i] for i in leaves]
        reduced, reduction_events = collectives.reduce(grads, dims, schedule.before_reduction(), schedule.group)
        schedule.reduced(reduction_events)
        return dict(zip(leaves, reduced, strict=True))


class ForwardLayer(LayerBody):
    """A layer of a forward pass.

    Args:
        part: the stack.
        fixed: the constants of the loop.
        floating: which of the carried values are floating arrays.
        saver: saves values for the backward pass; None if nothing is saved.
    """

    def __init__(self, part: LayerStack, fixed: list[Array], floating: list[bool], saver: Regather | None):
        self._part, self._fixed, self._floating = part, fixed, floating
        self.needed, self.saver = [True] * len(part.dims), saver

    def gather(self, shards: list[Array], prefetch: int, schedule: Schedule) -> list[Array]:
        return self._part.collectives.gather(shards, self._part.dims, schedule, prefetch)

    def compute(
        self, weights: list[Array], carry: Carry, x: list[Array], saved: PyTree, fetched: PyTree
    ) -> tuple[Carry, list[Array], PyTree, list[Array]]:
        args = weights, self._fixed, [*merge(self._floating, *carry), *x]
        out, saved = self.saver.forward(*args) if self.saver else (self._part.compute(*args), [])
        num_carry = len(self._floating)
        return self.split(out[:num_carry]), list(out[num_carry:]), saved, []

    def split(self, carry: Sequence[Array]) -> Carry:
        return select(carry, self._floating), select(carry, negate(self._floating))


class BackwardLayer(LayerBody):
    """A layer of a backward pass.

    Args:
        part: the stack.
        regather: the backward pass of a layer.
        fixed: the constants of the loop.
        carried: of the carried values that have a cotangent, which pass it on to the layer before.
    """

    def __init__(self, part: LayerStack, regather: Regather, fixed: list[Array], carried: list[bool]):
        self._part, self._regather, self._fixed, self._carried = part, regather, fixed, carried
        self._trained_dims = select(part.dims, regather.gets_gradient[0])
        self.complete = select(part.complete, regather.gets_gradient[0])
        self._orders: list[Shape] = []  # of the gradients, the same in every layer
        self.needed, self.restorer = regather.needed, regather
        # At stage 2 nothing else keeps the compiler from recomputing two layers of one iteration at once.
        delays = regather.recomputes and not regather.offloads
        self.delays_recompute = delays and not part.collectives.stage.shards_params
        self.one_layer_grads = regather.recomputes and part.remat.saves_inputs_only

    def gather(self, shards: list[Array], prefetch: int, schedule: Schedule) -> list[Array | None]:
        needed, dims = select(shards, self.needed), select(self._part.dims, self.needed)
        full = self._part.collectives.gather(needed, dims, schedule, prefetch)
        return merge(self.needed, full, itertools.repeat(None))

    def compute(
        self, weights: list[Array | None], carry: Carry, x: list[Array], saved: PyTree, fetched: PyTree
    ) -> tuple[Carry, list[Array], PyTree, list[Array]]:
        (carry_grads, fixed_grads), regather = carry, self._regather
        saved = regather.with_fetched(saved, fetched or [])
        grads = regather.backward(weights, self._fixed, saved, [*carry_grads, *x])
        dims, collectives = self._trained_dims, self._part.collectives
        weight_grads, self._orders = collectives.reduced_dim_first(grads.weights, grads.orders, dims)
        fixed_grads = [a + b for a, b in zip(fixed_grads, grads.fixed, strict=True)]

        # A layer may compute a carried value anew, so that no cotangent reaches that of the layer before.
        others = [jnp.zeros_like(a) for a in select(carry_grads, negate(self._carried))]
        count = sum(self._carried)
        carry_grads = merge(self._carried, grads.data[:count], others)
        return (carry_grads, fixed_grads), grads.data[count:], [], weight_grads

    def reduce(self, grads: list[Array], waits: list[Array], group: int) -> tuple[list[Array], list[Array]]:
        dims, collectives = self._trained_dims, self._part.collectives
        shards, reduced = collectives.reduce_transposed(grads, self._orders, dims, waits, group)
        return collectives.sum_replicas(shards, dims, self.complete), reduced
