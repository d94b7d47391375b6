"""What a stage moves of a unit: its leaves become full before use, its gradients what the stage keeps of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from zerojax.sharding.axes import Axes, Dims
from zerojax.sharding.precision import for_reduction
from zerojax.transform import collectives
from zerojax.transform.regather import Gradients, select
from zerojax.transform.schedule import Order

Array = Any


@dataclasses.dataclass(frozen=True)
class Mover:
    """How the leaves of a unit become full before use, and their gradients what the stage keeps of them.

    Attributes:
        axes: the data axes.
        dims: the divided dims of each leaf.
        gathers: parameters arrive as shards and are gathered per unit (stage 3).
        scatters: gradients are reduce-scattered as they appear (stages 2 and 3).
        reduce_dtype: dtype in which gradients travel and are summed.
    """

    axes: Axes
    dims: tuple[Dims, ...]
    gathers: bool
    scatters: bool
    reduce_dtype: Any

    def fetch(self, shards: Sequence[Array], dims: Sequence[Dims], order: Order, ahead: int = 0) -> list[Array]:
        """Gathers what is sharded, `ahead` units before it is used."""
        if not self.gathers or self.axes.num_shards == 1 or all(dim.shard is None for dim in dims):
            return list(shards)
        axes = self.axes._replace(one_by_one=order.begins(ahead))
        full, events = collectives.all_gather(shards, dims, axes, order.before_gather(ahead))
        order.arrived(events)
        return full

    def reduce(
        self, grads: Sequence[Array], dims: Sequence[Dims], reduced: Sequence[Array]
    ) -> tuple[list[Array], list[Array]]:
        """(what the stage keeps of gradients, the events of their reduction); `reduced`: those of the one before."""
        if not self.scatters:
            return list(grads), []
        grads = [for_reduction(g, self.reduce_dtype) for g in grads]
        return collectives.reduce_scatter(grads, dims, self.axes, self.axes.in_turn(list(reduced)))

    def shard_shape(self, shape: tuple[int, ...], dims: Dims) -> tuple[int, ...]:
        dim = dims.shard
        if dim is None or not self.scatters:
            return shape
        return (*shape[:dim], shape[dim] // self.axes.num_shards, *shape[dim + 1 :])


def fetch_needed(
    mover: Mover, shards: Sequence[Array], dims: Sequence[Any], needed: Sequence[bool], order: Order, ahead: int = 0
) -> list[Any]:
    """Like `Mover.fetch`, with None for the leaves that the backward pass does not read."""
    fetched = iter(mover.fetch(select(shards, needed), select(dims, needed), order, ahead))
    return [next(fetched) if flag else None for flag in needed]


def reduce_made(
    mover: Mover,
    grads: Sequence[Array],
    orders: Sequence[tuple[int, ...]],
    dims: Sequence[Dims],
    reduced: Sequence[Array],
) -> tuple[list[Array], list[Array]]:
    """`Mover.reduce`, with gradients in the shape of their leaves. See `Gradients` for `orders`."""
    moved = [each.transposed(np.argsort(order).tolist()) for each, order in zip(dims, orders, strict=True)]
    shards, events = mover.reduce(grads, moved, reduced)
    return [lax.transpose(grad, order) for grad, order in zip(shards, orders, strict=True)], events


def reduced_dim_first(mover: Mover, grads: Gradients, dims: Sequence[Dims]) -> Gradients:
    """Gradients of weights with the dim in front along which they are reduced, as the GPU compiler lays them out then.

    What else reads or carries them has them in JAX's order of dims, and it would copy them from one to the other.
    """
    weights, orders = [], []
    for grad, order, each in zip(grads.weights, grads.orders, dims, strict=True):
        moved = list(range(grad.ndim))
        if mover.scatters and each.shard is not None:
            moved.insert(0, moved.pop(order[each.shard]))
        weights.append(lax.transpose(grad, moved))
        orders.append(tuple(moved.index(k) for k in order))
    return grads._replace(weights=weights, orders=orders)
