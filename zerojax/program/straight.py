"""A part that runs once: its leaves are gathered, used and dropped.

Everything here runs inside `shard_map`. `layer_stack` is its counterpart for scans over layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set
from functools import cached_property
from typing import Any

from jax import lax

from zerojax.comm.schedule import Schedule, events, floating_after
from zerojax.comm.stage_collectives import StageCollectives
from zerojax.program import jaxprs
from zerojax.program.jaxprs import Var
from zerojax.program.part import GradientSink, Weights
from zerojax.program.regather import Regather
from zerojax.program.remat import NO_REMAT, Remat
from zerojax.program.segmentation import Segment, TracedLoss
from zerojax.sharding.axes import Dims
from zerojax.utils.flags import select
from zerojax.utils.typing import Array, PyTree


@dataclasses.dataclass(frozen=True)
class Straight:
    """A `Part` that runs once.

    Attributes:
        traced: the loss that it is a part of.
        segment: its equations.
        collectives: gathers and reduces as the stage does.
        remat: which activations are saved for the backward pass.
    """

    traced: TracedLoss
    segment: Segment
    collectives: StageCollectives
    remat: Remat

    @cached_property
    def leaves(self) -> list[int]:
        """The leaves in the order of reductions, which take more memory in the order of first use, that of gathers."""
        return sorted(self.segment.leaves)

    @cached_property
    def dims(self) -> list[Dims]:
        return [self.collectives.dims[i] for i in self.leaves]

    @property
    def num_bytes(self) -> int:
        avals = [self.traced.leaf_vars[i].aval for i in self.leaves]
        sharded = [aval for aval, dim in zip(avals, self.dims, strict=True) if dim.shard is not None]
        return sum(aval.size * aval.dtype.itemsize for aval in sharded)

    @cached_property
    def multiplies(self) -> bool:
        """Whether it computes matrix products."""
        return jaxprs.multiplies(self.segment.equations)

    @cached_property
    def weight_values(self) -> list[Var]:
        """The values that are computed from weights alone, and that its equations read."""
        own = {v for e in self.segment.equations for v in e.outvars}
        read = dict.fromkeys(v for e in self.segment.equations for v in jaxprs.variables(e) if v not in own)
        return [v for v in read if v in self.traced.weights]

    def compute(self, weights: Sequence[Array], fixed: Sequence[Array], data: Sequence[Array]) -> list[Array]:
        """The outputs of the segment, from full weights and its inputs. `fixed` is empty."""
        scope = dict(zip(self.segment.inputs, data, strict=True))
        scope.update(zip([self.traced.leaf_vars[i] for i in self.leaves], weights, strict=True))
        self.traced.bind_weights(self.weight_values, scope)
        jaxprs.run_equations(self.segment.equations, scope)
        return [scope[v] for v in self.segment.outputs]

    def evaluate(self, weights: Weights, data: Sequence[Array], schedule: Schedule) -> list[Array]:
        return self.computed(self.compute(self.gather(weights, schedule), [], data), schedule)

    def gather(self, weights: Weights, schedule: Schedule) -> list[Array]:
        """The full weights, gathered in the order of their uses."""
        by_use = self.segment.leaves
        shards = weights.shards(by_use, schedule.before_gather())
        full = self.collectives.gather(shards, [self.collectives.dims[i] for i in by_use], schedule)
        return [full[by_use.index(i)] for i in self.leaves]

    def computed(self, values: list[Array], schedule: Schedule) -> list[Array]:
        """Records that the part has computed these values."""
        if self.num_bytes:
            schedule.computed(values, self.num_bytes, self.multiplies)
        return values

    def plan_backward(self, outputs: Sequence[Var], active: Set[Var], backward_is_next: bool) -> StraightWithBackward:
        leaf_vars = [self.traced.leaf_vars[i] for i in self.leaves]
        inputs = self.segment.inputs
        regather = Regather(
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
        return StraightWithBackward(self, outputs, flows, regather, keeps_weights=backward_is_next)


@dataclasses.dataclass(frozen=True)
class StraightWithBackward:
    """A `PlannedPart` that runs once.

    Attributes:
        part, outputs, inputs: as of every `PlannedPart`.
        regather: its forward and backward pass, for full weights.
        keeps_weights: whether the weights are not dropped, because the backward pass is next.
    """

    part: Straight
    outputs: Sequence[Var]
    inputs: Sequence[Var]
    regather: Regather
    keeps_weights: bool
    is_loop = False

    @property
    def names(self) -> set[str]:
        return self.regather.names

    def forward(self, weights: Weights, data: Sequence[Array], schedule: Schedule) -> tuple[list[Array], Any]:
        part, regather = self.part, self.regather
        full = part.gather(weights, schedule)
        data = floating_after(data, schedule.offload_events(1))
        out, saved = regather.forward(full, [], data)
        saved = regather.store(saved, [])
        schedule.offloaded(regather.offload_events(saved))
        if part.collectives.stage.shards_params and not part.multiplies:
            # Compilers recompute what is as cheap as a lookup, and hold the gathered table until the backward pass.
            out = lax.optimization_barrier(out)
        return part.computed(out, schedule), (saved, full if self.keeps_weights else None)

    def restore(self, saved: PyTree, cotangents: list[Array]) -> tuple[Any, list[Array]]:
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
            shards = weights.shards(select(part.leaves, regather.needed), schedule.before_gather())
            gathered = iter(collectives.gather(shards, select(part.dims, regather.needed), schedule))
            full = [next(gathered) if flag else None for flag in regather.needed]
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
