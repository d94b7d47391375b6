"""The operations of one layer of a stack, in the forward and in the backward pass.

Everything here runs inside `shard_map`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from zerojax.comm.schedule import Schedule
from zerojax.comm.stage_collectives import StageCollectives
from zerojax.program.layer_scan import Carry, LayerBody
from zerojax.program.regather import Regather
from zerojax.sharding.axes import Dims
from zerojax.utils.flags import merge, select
from zerojax.utils.typing import Array, PyTree, Shape

# (outputs, values to save) of a layer, from its weights, the constants of the loop, and its carry and slices
ComputeLayer = Callable[[Sequence[Array], Sequence[Array], Sequence[Array]], tuple[Sequence[Array], Sequence[Array]]]


class ForwardLayer(LayerBody):
    """A layer of a forward pass.

    Args:
        collectives: of the stage.
        dims: the divided dims of the layer's weights.
        compute: computes a layer.
        fixed: the constants of the loop.
        floating: which of the carried values are floating arrays.
        regather: saves values for the backward pass; None if nothing is saved.
    """

    def __init__(
        self,
        collectives: StageCollectives,
        dims: Sequence[Dims],
        compute: ComputeLayer,
        fixed: list[Array],
        floating: Sequence[bool],
        regather: Regather | None,
    ):
        self._collectives, self._dims, self._compute, self._fixed = collectives, dims, compute, fixed
        self._floating, self._regather = floating, regather
        self.needed = [True] * len(dims)
        self.saves, self.offloads = regather is not None, regather is not None and regather.offloads

    def split(self, carry: Sequence[Array]) -> Carry:
        return select(carry, self._floating), select(carry, [not flag for flag in self._floating])

    def gather(self, shards: PyTree, prefetch: int, schedule: Schedule) -> list[Array]:
        return self._collectives.gather(shards, self._dims, schedule, prefetch)

    def compute(
        self, weights: PyTree, carry: Carry, x: PyTree, saved: PyTree, fetched: PyTree
    ) -> tuple[Carry, Any, Any, Any]:
        out, saved = self._compute(weights, self._fixed, [*merge(self._floating, *carry), *x])
        num_carry = len(self._floating)
        return self.split(list(out[:num_carry])), list(out[num_carry:]), saved, []

    def store(self, saved: PyTree, waits: list[Array]) -> list[Array]:
        return self._regather.store(saved, waits) if self._regather else saved

    def offload_events(self, saved: PyTree) -> list[Array]:
        return self._regather.offload_events(saved) if self._regather else []


class TrainedDims(NamedTuple):
    """The weights of a layer that get a gradient.

    Attributes:
        dims: their divided dims.
        complete: whether these gradients are complete; see `StageCollectives.sum_replicas`.
    """

    dims: Sequence[Dims]
    complete: Sequence[bool]


class BackwardLayer(LayerBody):
    """A layer of a backward pass.

    Args:
        collectives: of the stage.
        dims: the divided dims of the layer's weights.
        trained: those that get a gradient.
        regather: the backward pass of a layer.
        fixed: the constants of the loop.
        carried: of the carried values that have a cotangent, which pass it on to the layer before.
        saves_inputs_only: whether a layer is recomputed from its inputs.
    """

    def __init__(
        self,
        collectives: StageCollectives,
        dims: Sequence[Dims],
        trained: TrainedDims,
        regather: Regather,
        fixed: list[Array],
        carried: Sequence[bool],
        saves_inputs_only: bool,
    ):
        self._collectives, self._dims, self._trained = collectives, dims, trained
        self._regather, self._fixed, self._carried = regather, fixed, carried
        self._orders: list[Shape] = []  # of the gradients, the same in every layer
        self.needed = regather.needed
        self.restores = regather.offloads
        # At stage 2 nothing else keeps the compiler from recomputing two layers of one iteration at once.
        self.delays_recompute = regather.recomputes and not regather.offloads and not collectives.stage.shards_params
        self.one_layer_grads = regather.recomputes and saves_inputs_only

    def gather(self, shards: PyTree, prefetch: int, schedule: Schedule) -> list[Array | None]:
        dims = select(self._dims, self.needed)
        full = iter(self._collectives.gather(select(shards, self.needed), dims, schedule, prefetch))
        return [next(full) if flag else None for flag in self.needed]

    def compute(
        self, weights: PyTree, carry: Carry, x: PyTree, saved: PyTree, fetched: PyTree
    ) -> tuple[Carry, Any, Any, Any]:
        carry_grads, fixed_grads = carry
        saved = self._regather.with_fetched(saved, fetched or [])
        grads = self._regather.backward(weights, self._fixed, saved, [*carry_grads, *x])
        weight_grads, self._orders = self._collectives.reduced_dim_first(
            grads.weights, grads.orders, self._trained.dims
        )
        fixed_grads = [a + b for a, b in zip(fixed_grads, grads.fixed, strict=True)]

        # A layer may compute a carried value anew, so that no cotangent reaches that of the layer before.
        carried, count = self._carried, sum(self._carried)
        others = [jnp.zeros_like(a) for a, flag in zip(carry_grads, carried, strict=True) if not flag]
        carry_grads = merge(carried, grads.data[:count], others)
        return (carry_grads, fixed_grads), grads.data[count:], [], weight_grads

    def reduce(self, grads: Any, waits: list[Array], group: int) -> tuple[list[Array], list[Array]]:
        shards, reduced = self._collectives.reduce_transposed(grads, self._orders, self._trained.dims, waits, group)
        return self._collectives.sum_replicas(shards, *self._trained), reduced

    def restore(self, saved: PyTree, overlapped: list[Array]) -> tuple[list[Array], list[Array]]:
        return self._regather.restore(saved, overlapped)

    def delay_recompute(self, saved: PyTree, waits: list[Array]) -> list[Array]:
        return self._regather.delay_inputs(saved, waits)
