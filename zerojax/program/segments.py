"""A segment that runs once: forward and backward pass on one device's shards.

Everything here runs inside `shard_map`. `layer_stack` is its counterpart for scans over layers.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

from jax import lax

from zerojax.comm.dependencies import events, floating_after
from zerojax.comm.schedule import Schedule
from zerojax.comm.stage_collectives import StageCollectives
from zerojax.program import jaxprs
from zerojax.program.regather import Regather, select
from zerojax.program.remat import NO_REMAT, Remat
from zerojax.program.segmentation import Segment, TracedLoss
from zerojax.utils.typing import Array


class StraightSegment:
    """A segment that runs once: its leaves are gathered, used and dropped.

    They are not dropped if the backward pass of the segment is next.
    """

    # Set when the backward pass is planned:
    differentiable_outputs: list[Any]  # those that a cotangent reaches
    regather: Regather
    trained: list[bool]  # which leaves get a gradient from this segment
    backward_is_next: bool

    def __init__(
        self,
        traced: TracedLoss,
        segment: Segment,
        collectives: StageCollectives,
        remat: Remat,
    ):
        self.traced, self.segment, self.collectives, self.remat = traced, segment, collectives, remat
        # The order of reductions, which take more memory in the order of first use. Gathers are in that order.
        self.leaves = sorted(segment.leaves)
        self.dims = [collectives.dims[i] for i in self.leaves]
        avals = [traced.leaf_vars[i].aval for i in self.leaves]
        sharded = [aval for aval, dim in zip(avals, self.dims, strict=True) if dim.shard is not None]
        self.num_bytes = sum(aval.size * aval.dtype.itemsize for aval in sharded)  # when they are gathered
        self.multiplies = jaxprs.multiplies(segment.equations)
        own = {v for e in segment.equations for v in e.outvars}
        read = dict.fromkeys(v for e in segment.equations for v in jaxprs.variables(e) if v not in own)
        self.weight_values = [v for v in read if v in traced.weights]

    def primal(self, weights: Sequence[Array], fixed: Sequence[Array], data: Sequence[Array]) -> list[Array]:
        scope = dict(zip(self.segment.inputs, data, strict=True))
        scope.update(zip([self.traced.leaf_vars[i] for i in self.leaves], weights, strict=True))
        self.traced.bind_weights(self.weight_values, scope)
        jaxprs.run_equations(self.segment.equations, scope)
        return [scope[v] for v in self.segment.outputs]

    def plan_backward(self, active: Set[Any], backward_is_next: bool) -> list[Any]:
        """Traces the backward pass.

        Args:
            active: the variables of the loss that have a tangent.
            backward_is_next: whether the backward pass of the segment follows directly on its forward pass.

        Returns:
            The inputs of the segment that cotangents reach, in the order of the gradients that `backward` returns.
        """
        self.backward_is_next = backward_is_next
        weights = [self.traced.leaf_vars[i].aval for i in self.leaves]
        inputs, outputs = self.segment.inputs, self.segment.outputs
        wanted = [self.traced.leaf_vars[i] in active for i in self.leaves], [], [v in active for v in inputs]
        differentiable = [v in self.differentiable_outputs for v in outputs]
        remat = NO_REMAT if backward_is_next and self.remat.saves_inputs_only else self.remat
        resident = [v in self.traced.data_vars for v in inputs]
        data = [v.aval for v in inputs]
        self.regather = Regather(self.primal, weights, [], data, wanted, differentiable, remat, resident)
        self.trained, _, flows = self.regather.gets_gradient
        return select(inputs, flows)

    @property
    def names(self) -> set[str]:
        """The names of the segment's activations."""
        return self.regather.names

    def evaluate(self, shards: dict[int, Array], data: Sequence[Array], schedule: Schedule) -> list[Array]:
        return self._computed(self.primal(self._fetch(shards, schedule), [], data), schedule)

    def forward(self, shards: dict[int, Array], data: Sequence[Array], schedule: Schedule) -> tuple[list[Array], Any]:
        weights = self._fetch(shards, schedule)
        data = floating_after(data, schedule.offload_events(1))
        out, values = self.regather.forward(weights, [], data)
        values = self.regather.store(values, [])
        schedule.offloaded(self.regather.offload_events(values))
        if self.collectives.stage.shards_params and not self.multiplies:
            # Compilers recompute what is as cheap as a lookup, and hold the gathered table until the backward pass.
            out = lax.optimization_barrier(out)
        return self._computed(out, schedule), (values, weights if self.backward_is_next else None)

    def restore(self, saved: Any, cotangents: list[Array]) -> tuple[Any, list[Array]]:
        """Fetches the saved values from host memory while the unit with these cotangents runs: (saved, cotangents)."""
        values, weights = saved
        fetched, cotangents = self.regather.restore(values, cotangents)
        return (self.regather.with_fetched(values, fetched), weights), cotangents

    def backward(
        self, shards: dict[int, Array], saved: Any, cotangents: Sequence[Array], schedule: Schedule
    ) -> tuple[dict[int, Array], list[Array]]:
        values, weights = saved
        if weights is None:
            own_shards = [shards[i] for i in self.leaves]
            weights = self.collectives.fetch_needed(own_shards, self.dims, self.regather.needed, schedule)
        if self.regather.recomputes:
            values = self.regather.delay_inputs(values, events(cotangents) + schedule.last)
            # Without a barrier the compiler would reuse the results of the forward pass, and save them.
            values, cotangents = lax.optimization_barrier((values, list(cotangents)))
            schedule.replace_last(self.regather.floating_inputs(values))
        grads = self.regather.backward(weights, [], values, cotangents)
        dims = select(self.dims, self.trained)
        reduced, reduction_events = self.collectives.reduce_transposed(
            grads.weights, grads.orders, dims, schedule.before_reduction(), schedule.group
        )
        # Recomputed values are in memory until the last product for a weight is done. So is what the last unit computes
        # from saved values, such as the gradient of the logits, if that product is delayed until its reduction can
        # overlap. Other saved values are there anyway.
        delays = self.backward_is_next and self.collectives.stage.shards_grads
        drops = self.regather.recomputes or delays
        data, products = grads.data, self.collectives.reduced_dim_first(grads, dims).weights if drops else []
        if delays and self.collectives.axes.num_shards == 1:  # no event depends on the products
            reduced, data = lax.optimization_barrier((reduced, data))
        # A kernel that reads an element of a result would otherwise compute it from what the result is computed from.
        # It would share operands with kernels that read other events, and be one with them, as late as the last.
        data, products = lax.optimization_barrier((data, products))
        self._computed(data + products, schedule)
        schedule.reduced(reduction_events)
        if self.collectives.stage.shards_grads:
            # Otherwise the compiler moves a transposition of the shard on, to the whole optimizer state of the leaf.
            reduced = [lax.optimization_barrier(shard) for shard in reduced]
        return dict(zip(select(self.leaves, self.trained), reduced, strict=True)), data

    def _fetch(self, shards: dict[int, Array], schedule: Schedule) -> list[Array]:
        by_use = self.segment.leaves
        full = self.collectives.fetch([shards[i] for i in by_use], [self.collectives.dims[i] for i in by_use], schedule)
        return [full[by_use.index(i)] for i in self.leaves]

    def _computed(self, values: list[Array], schedule: Schedule) -> list[Array]:
        if self.num_bytes:
            schedule.computed(values, self.num_bytes, self.multiplies)
        return values
