"""What a stage moves of a unit: its leaves become full before use, its gradients what the stage keeps of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from zerojax.sharding.axes import Axes, Dims
from zerojax.sharding.precision import for_reduction
from zerojax.sharding.stages import Stage
from zerojax.transform import collectives
from zerojax.transform.collectives import CollectiveOptions
from zerojax.transform.regather import Gradients, select
from zerojax.transform.schedule import Schedule
from zerojax.typing import Array, Shape


@dataclasses.dataclass(frozen=True)
class StageCollectives:
    """How the leaves of a unit become full before use, and their gradients what the stage keeps of them.

    Attributes:
        axes: the data axes.
        dims: the divided dims of each leaf.
        stage: says what is gathered and what is reduce-scattered as it appears.
        reduce_dtype: dtype in which gradients travel and are summed.
        options: how the leaves of a unit are moved.
    """

    axes: Axes
    dims: tuple[Dims, ...]
    stage: Stage
    reduce_dtype: Any
    options: CollectiveOptions

    def fetch(
        self, shards: Sequence[Array], dims: Sequence[Dims], schedule: Schedule, prefetch: int = 0
    ) -> list[Array]:
        """Gathers what is sharded, `prefetch` units before it is used."""
        if not self.stage.shards_params or self.axes.num_shards == 1 or all(dim.shard is None for dim in dims):
            return list(shards)
        options = self.options._replace(sequential=schedule.begins(prefetch))
        full, events = collectives.all_gather(shards, dims, self.axes, options, schedule.before_gather(prefetch))
        schedule.arrived(events)
        return full

    def reduce(
        self, grads: Sequence[Array], dims: Sequence[Dims], reduced: Sequence[Array]
    ) -> tuple[list[Array], list[Array]]:
        """(what the stage keeps of gradients, the events of their reduction); `reduced`: those of the one before."""
        if not self.stage.shards_grads:
            return list(grads), []
        grads = [for_reduction(g, self.reduce_dtype) for g in grads]
        return collectives.reduce_scatter(
            grads, dims, self.axes, self.options, self.options.next_waits_for(list(reduced))
        )

    def shard_shape(self, shape: tuple[int, ...], dims: Dims) -> tuple[int, ...]:
        dim = dims.shard
        if dim is None or not self.stage.shards_grads:
            return shape
        return (*shape[:dim], shape[dim] // self.axes.num_shards, *shape[dim + 1 :])

    def fetch_needed(
        self,
        shards: Sequence[Array],
        dims: Sequence[Dims],
        needed: Sequence[bool],
        schedule: Schedule,
        prefetch: int = 0,
    ) -> list[Array | None]:
        """Like `fetch`, with None for the leaves that the backward pass does not read."""
        fetched = iter(self.fetch(select(shards, needed), select(dims, needed), schedule, prefetch))
        return [next(fetched) if flag else None for flag in needed]

    def reduce_transposed(
        self, grads: Sequence[Array], orders: Sequence[Shape], dims: Sequence[Dims], reduced: Sequence[Array]
    ) -> tuple[list[Array], list[Array]]:
        """Like `reduce`, of `Gradients.weights`, with the shards transposed by `Gradients.orders`."""
        moved = [each.transposed(np.argsort(order).tolist()) for each, order in zip(dims, orders, strict=True)]
        shards, events = self.reduce(grads, moved, reduced)
        return [lax.transpose(grad, order) for grad, order in zip(shards, orders, strict=True)], events

    def reduced_dim_first(self, grads: Gradients, dims: Sequence[Dims]) -> Gradients:
        """Gradients of weights with the dim in front along which they are reduced.

        The GPU compiler lays them out like that for the reduction. What else reads or carries them has them in JAX's
        order of dims, and it would copy them from one to the other.
        """
        weights, orders = [], []
        for grad, order, each in zip(grads.weights, grads.orders, dims, strict=True):
            moved = list(range(grad.ndim))
            if self.stage.shards_grads and each.shard is not None:
                moved.insert(0, moved.pop(order[each.shard]))
            weights.append(lax.transpose(grad, moved))
            orders.append(tuple(moved.index(k) for k in order))
        return grads._replace(weights=weights, orders=orders)
