"""The operations of one layer of a stack, in the forward and in the backward pass.

Everything here runs inside `shard_map`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from zerojax.comm.schedule import Schedule
from zerojax.comm.stage_collectives import StageCollectives
from zerojax.offload.pace import Pace, Paces
from zerojax.program.layer_scan import Carry, LayerBody
from zerojax.program.regather import Regather, merge, select
from zerojax.program.segmentation import View
from zerojax.sharding.axes import Dims
from zerojax.utils.typing import Array, Shape

# (outputs, values to save) of a layer, from its weights, the constants of the loop, and its carry and slices
ComputeLayer = Callable[[Sequence[Array], Sequence[Array], Sequence[Array]], tuple[Sequence[Array], Sequence[Array]]]


class LayerWeights(NamedTuple):
    """The weights of a layer.

    Attributes:
        collectives: of the stage.
        views: the values that the loop slices, each a view of a stacked leaf.
        dims: the divided dims of their layers.
    """

    collectives: StageCollectives
    views: Sequence[View]
    dims: Sequence[Dims]

    def fetch_layer(self, stacks: Sequence[Array], index: Any, pace: Pace, needed: Sequence[bool]) -> list[Any]:
        """The full weights of layer `index`, from stacked leaves in host memory; None for those that are not needed."""
        wanted = zip(select(self.views, needed), select(stacks, needed), strict=True)
        shards = [view.fetch_layer(stack, index, pace) for view, stack in wanted]
        full = iter(self.collectives.gather(shards, select(self.dims, needed), Schedule(0, [])))
        return [next(full) if flag else None for flag in needed]


class ForwardLayer(LayerBody):
    """A layer of a forward pass.

    Args:
        weights: of the layer.
        compute: computes a layer.
        fixed: the constants of the loop.
        floating: which of the carried values are floating arrays.
        regather: saves values for the backward pass; None if nothing is saved.
    """

    def __init__(
        self,
        weights: LayerWeights,
        compute: ComputeLayer,
        fixed: list[Array],
        floating: Sequence[bool],
        regather: Regather | None,
    ):
        self._weights, self._compute, self._fixed = weights, compute, fixed
        self._floating, self._regather = floating, regather
        self.accumulates = False
        self.saves, self.offloads = regather is not None, regather is not None and regather.offloads

    def split(self, carry: Sequence[Array]) -> Carry:
        return select(carry, self._floating), select(carry, [not flag for flag in self._floating])

    def fetch(self, shards: Any, prefetch: int, schedule: Schedule) -> list[Array]:
        return self._weights.collectives.fetch(shards, self._weights.dims, schedule, prefetch)

    def fetch_layer(self, stacks: Any, index: Any, pace: Pace) -> list[Array | None]:
        return self._weights.fetch_layer(stacks, index, pace, [True] * len(stacks))

    def compute(self, weights: Any, carry: Carry, x: Any, saved: Any, fetched: Any) -> tuple[Carry, Any, Any, Any]:
        out, saved = self._compute(weights, self._fixed, [*merge(self._floating, *carry), *x])
        num_carry = len(self._floating)
        return self.split(list(out[:num_carry])), list(out[num_carry:]), saved, []

    def store(self, saved: Any, waits: list[Array]) -> list[Array]:
        return self._regather.store(saved, waits) if self._regather else saved

    def offload_events(self, saved: Any) -> list[Array]:
        return self._regather.offload_events(saved) if self._regather else []

    def grads_to_host(
        self, totals: list[Array], grads: Any, index: Any, paces: Paces
    ) -> tuple[list[Array], list[Array]]:
        return [], []


class BackwardLayer(LayerBody):
    """A layer of a backward pass.

    Args:
        weights: of the layer.
        trained: those that get a gradient.
        complete: whether these gradients are complete; see `StageCollectives.sum_replicas`.
        regather: the backward pass of a layer.
        fixed: the constants of the loop.
        carried: of the carried values that have a cotangent, which pass it on to the layer before.
        saves_inputs_only: whether a layer is recomputed from its inputs.
    """

    def __init__(
        self,
        weights: LayerWeights,
        trained: LayerWeights,
        complete: Sequence[bool],
        regather: Regather,
        fixed: list[Array],
        carried: Sequence[bool],
        saves_inputs_only: bool,
    ):
        self._carried = carried
        self._weights, self._trained, self._complete = weights, trained, complete
        self._regather, self._fixed, collectives = regather, fixed, weights.collectives
        self._collectives = collectives
        self._orders: list[Shape] = []  # of the gradients, the same in every layer
        self.restores = regather.offloads
        # At stage 2 nothing else keeps the compiler from recomputing two layers of one iteration at once.
        self.delays_recompute = regather.recomputes and not regather.offloads and not collectives.stage.shards_params
        self.one_layer_grads = regather.recomputes and saves_inputs_only
        self.accumulates = collectives.host_gradients is not None and collectives.host_gradients.accumulates

    def fetch(self, shards: Any, prefetch: int, schedule: Schedule) -> list[Array | None]:
        return self._collectives.fetch_needed(shards, self._weights.dims, self._regather.needed, schedule, prefetch)

    def compute(self, weights: Any, carry: Carry, x: Any, saved: Any, fetched: Any) -> tuple[Carry, Any, Any, Any]:
        carry_grads, fixed_grads = carry
        saved = self._regather.with_fetched(saved, fetched or [])
        grads = self._regather.backward(weights, self._fixed, saved, [*carry_grads, *x])
        grads = self._collectives.reduced_dim_first(grads, self._trained.dims)
        self._orders = grads.orders
        fixed_grads = [a + b for a, b in zip(fixed_grads, grads.fixed, strict=True)]
        # A layer may compute a carried value anew, so that no cotangent reaches that of the layer before.
        carried, count = self._carried, sum(self._carried)
        others = [jnp.zeros_like(a) for a, flag in zip(carry_grads, carried, strict=True) if not flag]
        carry_grads = merge(carried, grads.data[:count], others)
        return (carry_grads, fixed_grads), grads.data[count:], [], grads.weights

    def reduce(self, grads: Any, waits: list[Array], group: int) -> tuple[list[Array], list[Array]]:
        shards, reduced = self._collectives.reduce_transposed(grads, self._orders, self._trained.dims, waits, group)
        return self._collectives.sum_replicas(shards, self._trained.dims, self._complete), reduced

    def fetch_layer(self, stacks: Any, index: Any, pace: Pace) -> list[Array | None]:
        return self._weights.fetch_layer(stacks, index, pace, self._regather.needed)

    def grads_to_host(
        self, totals: list[Array], grads: Any, index: Any, paces: Paces
    ) -> tuple[list[Array], list[Array]]:
        host = self._collectives.host_gradients
        assert host is not None
        reduced, _ = self.reduce(grads, [], 0)
        layers = zip(self._trained.views, totals, reduced, strict=True)
        moved = [host.put_layer(v.leaf, total, v.of_leaf(grad), index, v.order[0], paces) for v, total, grad in layers]
        return [total for total, _ in moved], [norm for _, norm in moved]

    def restore(self, saved: Any, overlapped: list[Array]) -> tuple[list[Array], list[Array]]:
        return self._regather.restore(saved, overlapped)

    def delay_recompute(self, saved: Any, waits: list[Array]) -> list[Array]:
        return self._regather.delay_inputs(saved, waits)
