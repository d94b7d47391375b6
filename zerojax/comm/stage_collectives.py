"""The communication of a stage for one unit: gathers its leaves before use, and reduces its gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

from zerojax.comm import collectives
from zerojax.comm.collectives import LEAVES_WHOLE, CollectiveOptions, Communicated
from zerojax.comm.schedule import Schedule
from zerojax.sharding.axes import Axes, Dims
from zerojax.sharding.placement import Stage
from zerojax.sharding.precision import Precision, for_reduction
from zerojax.utils.flags import select
from zerojax.utils.typing import Array, DTypeLike, Shape


@dataclasses.dataclass(frozen=True)
class StageCollectives:
    """Gathers and reduces the leaves of units as a stage does."""

    axes: Axes  # the data axes
    dims: tuple[Dims, ...]  # the divided dims of each leaf
    stage: Stage  # stage 3 gathers leaves; stages 2 and 3 reduce-scatter gradients as they are computed
    precision: Precision  # chooses the dtypes in which gradients are communicated and summed
    options: CollectiveOptions  # how the leaves of a unit are moved
    # whether reduced gradients are summed over the replica axes as soon as they are complete
    sums_replicas: bool = False

    def gather(
        self, shards: Sequence[Array], dims: Sequence[Dims], schedule: Schedule, prefetch: int = 0
    ) -> list[Array]:
        """The full leaves, gathered `prefetch` units before they are used. Below stage 3 they are full already."""
        if not self.stage.shards_params or self.axes.num_shards == 1 or all(dim.shard is None for dim in dims):
            return list(shards)
        options = self.options._replace(sequential=schedule.is_first_gather(prefetch))
        full, events = collectives.all_gather(shards, dims, self.axes, options, schedule.before_gather(prefetch))
        schedule.gathered(events)
        return full

    def reduce(
        self, grads: Sequence[Array], dims: Sequence[Dims], reduced: Sequence[Array], group: int = 0
    ) -> tuple[list[Array], list[Array]]:
        """Reduce-scatters gradients at stages 2 and 3; at stages 0 and 1 they stay local.

        `reduced` are events of the reduction before this one. Reductions of different groups are never combined.

        Returns:
            (the shards of the gradients, or the gradients; the events of the reduction).
        """
        if not self.stage.shards_grads:
            return list(grads), []
        grads = [for_reduction(g, self.precision.wire_dtype(g.dtype)) for g in grads]
        options = self.options._replace(group=group)
        return collectives.reduce_scatter(grads, dims, self.axes, options, options.next_waits_for(list(reduced)))

    def sum_replicas(self, grads: Sequence[Array], dims: Sequence[Dims], complete: Sequence[bool]) -> list[Array]:
        """Sums the gradients to which nothing is added any more over the replica axes, if `sums_replicas`."""
        if not self.sums_replicas:
            return list(grads)
        chosen = select(grads, complete), select(dims, complete)
        sums = iter(over_replicas(*chosen, self.axes, self.options).leaves)
        return [next(sums) if flag else grad for grad, flag in zip(grads, complete, strict=True)]

    def grad_dtype(self, dtype: DTypeLike) -> DTypeLike:
        """The dtype of the reduced gradient of a leaf in `dtype`."""
        return self.precision.wire_dtype(dtype) if self.stage.shards_grads else dtype

    def shard_shape(self, shape: Shape, dims: Dims) -> Shape:
        """The shape in which the stage keeps the gradient of a leaf. The compiler divides it along `context`."""
        return self._cut(shape, dims, self.axes.of_rows.num_shards)

    def device_shape(self, shape: Shape, dims: Dims) -> Shape:
        """As `shard_shape`, of what a device holds where `context` is manual too."""
        return self._cut(shape, dims, self.axes.num_shards)

    def _cut(self, shape: Shape, dims: Dims, count: int) -> Shape:
        dim = dims.shard
        if dim is None or not self.stage.shards_grads:
            return shape
        stored = dims.padding.stored_shape(shape)
        return (*stored[:dim], stored[dim] // count, *stored[dim + 1 :])

    def reduce_transposed(
        self,
        grads: Sequence[Array],
        orders: Sequence[Shape],
        dims: Sequence[Dims],
        reduced: Sequence[Array],
        group: int = 0,
    ) -> tuple[list[Array], list[Array]]:
        """Like `reduce`, for gradients whose dims are in another order; their shards are transposed by `orders`."""
        moved = [each.transposed(np.argsort(order).tolist()) for each, order in zip(dims, orders, strict=True)]
        shards, events = self.reduce(grads, moved, reduced, group)
        return [lax.transpose(grad, order) for grad, order in zip(shards, orders, strict=True)], events

    def reduced_dim_first(
        self, grads: Sequence[Array], orders: Sequence[Shape], dims: Sequence[Dims]
    ) -> tuple[list[Array], list[Shape]]:
        """The gradients with their reduced dim in front, and the orders that transpose them to leaves.

        The GPU compiler lays them out in this way for the reduction. Anything else that reads or carries them would
        use JAX's order of dims, and the compiler would copy them between the two layouts.
        """
        weights, new_orders = [], []
        for grad, order, each in zip(grads, orders, dims, strict=True):
            moved = list(range(grad.ndim))
            if self.stage.shards_grads and each.shard is not None:
                moved.insert(0, moved.pop(order[each.shard]))
            weights.append(lax.transpose(grad, moved))
            new_orders.append(tuple(moved.index(k) for k in order))
        return weights, new_orders


def over_replicas(
    grads: Sequence[Array],
    dims: Sequence[Dims],
    axes: Axes,
    options: CollectiveOptions = LEAVES_WHOLE,
    waits: Sequence[Array] = (),
    are_shards: bool = True,
) -> Communicated:
    """Sums gradients, which are reduced over the shard axes, over the replica axes: to pieces, if it divides shards."""
    if axes.num_replicas == 1:
        return Communicated(list(grads), options.next_waits_for(list(waits)))
    if axes.outer:
        pieces = [each.of_shard for each in dims]
        return collectives.reduce_scatter(grads, pieces, axes.between, options, waits, rows=True)
    return collectives.all_reduce(grads, axes.replica, axes, options, dims, waits, are_shards)


def accumulate(totals: dict[int, Array], key: int, value: Array) -> None:
    """Adds a reduced gradient to a sum in at least fp32, whatever the dtype of the reduction."""
    if key not in totals:
        totals[key] = value
        return
    wide = jnp.promote_types(value.dtype, jnp.float32)
    totals[key] = totals[key].astype(wide) + value.astype(wide)
