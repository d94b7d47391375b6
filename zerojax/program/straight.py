"""A part that runs once: its leaves are gathered, used and dropped.

Everything here runs inside `shard_map`. `layer_stack` is its counterpart for scans over layers.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence, Set
from functools import cached_property

from jax import lax

from zerojax.comm.schedule import Schedule, events, floating_after
from zerojax.program import jaxprs
from zerojax.program.jaxprs import Var
from zerojax.program.part import GradientSink, Part, PlannedPart, Weights
from zerojax.program.regather import Regather, trace_regather
from zerojax.program.remat import NO_REMAT
from zerojax.sharding.axes import Dims
from zerojax.utils.flags import merge, select
from zerojax.utils.typing import Array, PyTree


@dataclasses.dataclass(frozen=True)
class Straight(Part):
    """A `Part` that runs once."""

    @cached_property
    def leaves(self) -> list[int]:
        """The leaves in the order of reductions, which take more memory in the order of first use, that of gathers."""
        return sorted(self.segment.leaves)

    @cached_property
    def dims(self) -> list[Dims]:
        return [self.collectives.dims[i] for i in self.leaves]

    @property
    def num_bytes(self) -> int:
        sharded = [i for i in self.leaves if self.collectives.dims[i].shard is not None]
        avals = [self.traced.leaf_vars[i].aval for i in sharded]
        return sum(aval.size * aval.dtype.itemsize for aval in avals)

    @cached_property
    def multiplies(self) -> bool:
        """Whether it computes matrix products."""
        return jaxprs.multiplies(self.segment.equations)

    def evaluate(self, weights: Weights, data: Sequence[Array], schedule: Schedule) -> list[Array]:
        return self.computed(self.compute(self.gather_all(weights, schedule), [], data), schedule)

    def gather_all(self, weights: Weights, schedule: Schedule) -> list[Array]:
        """The full weights, gathered in the order of their uses."""
        by_use = self.segment.leaves
        full = dict(zip(by_use, self.gather(by_use, weights, schedule), strict=True))
        return [full[i] for i in self.leaves]

    def compute(self, weights: Sequence[Array], fixed: Sequence[Array], data: Sequence[Array]) -> list[Array]:
        """The outputs of the segment, from full weights and its inputs. `fixed` is empty."""
        scope = dict(zip(self.segment.inputs, data, strict=True))
        scope.update(zip([self.traced.leaf_vars[i] for i in self.leaves], weights, strict=True))
        self.traced.bind_weights(self.segment.weight_values, scope)
        jaxprs.run_equations(self.segment.equations, scope)
        return [scope[v] for v in self.segment.outputs]

    def computed(self, values: list[Array], schedule: Schedule) -> list[Array]:
        """Records that the part has computed these values."""
        if self.num_bytes:
            schedule.computed(values, self.num_bytes, self.multiplies)
        return values

    def plan_backward(self, outputs: Sequence[Var], active: Set[Var], backward_is_next: bool) -> StraightWithBackward:
        leaf_vars = [self.traced.leaf_vars[i] for i in self.leaves]
        inputs = self.segment.inputs
        regather = trace_regather(
            self.compute,
            [v.aval for v in leaf_vars],
            [],
            [v.aval for v in inputs],
            wanted=([v in active for v in leaf_vars], [], [v in active for v in inputs]),
            differentiable=[v in outputs for v in self.segment.outputs],
            remat=NO_REMAT if backward_is_next and self.remat.saves_inputs_only else self.remat,
            resident=[v in self.traced.data_vars for v in inputs],
        )
        flows = select(inputs, regather.gets_gradient[2])
        return StraightWithBackward(self, outputs, flows, regather.names, regather, keeps_weights=backward_is_next)


@dataclasses.dataclass(frozen=True)
class StraightWithBackward(PlannedPart):
    """A `PlannedPart` that runs once."""

    part: Straight
    regather: Regather  # its forward and backward pass, for full weights
    keeps_weights: bool  # whether the weights are not dropped, because the backward pass is next

    def forward(self, weights: Weights, data: Sequence[Array], schedule: Schedule) -> tuple[list[Array], PyTree]:
        part, regather = self.part, self.regather

        # Gather.
        full = part.gather_all(weights, schedule)

        # Compute, and save what the backward pass needs.
        data = floating_after(data, schedule.offload_events(1))
        out, saved = regather.forward(full, [], data)
        saved = regather.store(saved, [])
        schedule.offloaded(regather.offload_events(saved))
        if part.collectives.stage.shards_params and not part.multiplies:
            # Compilers recompute what is as cheap as a lookup, and hold the gathered table until the backward pass.
            out = lax.optimization_barrier(out)

        # Drop the weights, unless they are needed at once.
        return part.computed(out, schedule), (saved, full if self.keeps_weights else None)

    def restore(self, saved: PyTree, cotangents: list[Array]) -> tuple[PyTree, list[Array]]:
        values, full = saved
        fetched, cotangents = self.regather.restore(values, cotangents)
        return (self.regather.with_fetched(values, fetched), full), cotangents

    def backward(
        self, weights: Weights, saved: PyTree, cotangents: Sequence[Array], schedule: Schedule, sink: GradientSink
    ) -> tuple[dict[int, Array], list[Array]]:
        part, regather, collectives = self.part, self.regather, self.part.collectives
        values, full = saved

        # Gather.
        if full is None:
            gathered = part.gather(select(part.leaves, regather.needed), weights, schedule)
            full = merge(regather.needed, gathered, itertools.repeat(None))
        if regather.recomputes:
            values = regather.delay_inputs(values, events(cotangents) + schedule.last)
            # Without a barrier the compiler would reuse the results of the forward pass, and save them.
            values, cotangents = lax.optimization_barrier((values, list(cotangents)))
            schedule.replace_last(regather.floating_inputs(values))

        # Compute.
        grads = regather.backward(full, [], values, cotangents)

        # Reduce.
        trained = regather.gets_gradient[0]
        dims = select(part.dims, trained)
        reduced, reduction_events = collectives.reduce_transposed(
            grads.weights, grads.orders, dims, schedule.before_reduction(), schedule.group
        )
        # Recomputed values are in memory until the last product for a weight is done. So is what the last unit computes
        # from saved values, such as the gradient of the logits, if that product is delayed until its reduction can
        # overlap. Other saved values are there anyway.
        delays = self.keeps_weights and collectives.stage.shards_grads
        drops = regather.recomputes or delays
        data = grads.data
        products = collectives.reduced_dim_first(grads.weights, grads.orders, dims)[0] if drops else []
        if delays and collectives.axes.num_shards == 1:  # no event depends on the products
            reduced, data = lax.optimization_barrier((reduced, data))
        # A kernel that reads an element of a result would otherwise compute it from what the result is computed from.
        # It would share operands with kernels that read other events, and be one with them, as late as the last.
        data, products = lax.optimization_barrier((data, products))
        part.computed(data + products, schedule)
        schedule.reduced(reduction_events)
        if collectives.stage.shards_grads:
            # Otherwise the compiler moves a transposition of the shard on, to the whole optimizer state of the leaf.
            reduced = [lax.optimization_barrier(shard) for shard in reduced]
        return dict(zip(select(part.leaves, trained), reduced, strict=True)), data
