"""Buckets of a limited size: which arrays share one, and how a larger array is cut into pieces that fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

# Leaves, and layers of a stack that is cut, share a collective up to this many bytes (in full). A heuristic: it copies
# them once more in memory, which for 256 KiB costs less than the ten microseconds or so that another collective takes
# to start.
SMALL_BYTES = 2**18

Array = Any


def fused(indices: Sequence[int], sizes: Sequence[int], limit: float) -> list[list[int]]:
    """Groups of indices whose sizes add up to at most `limit`, in their order; what is larger stands alone, last."""
    groups: list[list[int]] = []
    room = 0.0
    for i in indices:
        if sizes[i] > limit:
            continue
        if not groups or sizes[i] > room:
            groups.append([])
            room = limit
        groups[-1].append(i)
        room -= sizes[i]
    return [*groups, *([i] for i in indices if sizes[i] > limit)]


class Cut(NamedTuple):
    """An array, cut into pieces of one shape: along each dim into `grid` equal parts."""

    shape: tuple[int, ...]
    grid: tuple[int, ...]

    @classmethod
    def of(cls, shape: tuple[int, ...], element_bytes: int, limit: float, dim: int = 0) -> Cut:
        """Into pieces of at most `limit` bytes, of a leaf that is sharded in `dim`.

        Of a stack whose layers are not small a piece is one layer, or a part of it. Those of several layers have to be
        transposed, and compilers do that for all of the leaf at once, before the first piece is moved.

        Args:
            shape: of what a device holds: a shard, or all of it.
            element_bytes: that one element of it has in the full form.
        """
        full_bytes, leading = math.prod(shape) * element_bytes, math.prod(shape[:dim])
        if full_bytes <= limit:
            return cls(shape, (1,) * len(shape))
        first = dim if full_bytes // leading > SMALL_BYTES else 0
        return cls(shape, (*shape[:first], *_grid(shape[first:], limit // element_bytes)))

    @property
    def piece(self) -> tuple[int, ...]:
        """The shape of one."""
        return tuple(length // parts for length, parts in zip(self.shape, self.grid, strict=True))

    def loop(self, move: Callable[[tuple[Array, ...], Array], Array], target: Array) -> Array:
        """`target = move(start, target)` for the start of each piece, one after the other."""

        def body(i: Array, target: Array) -> Array:
            indices = jnp.unravel_index(i, self.grid)
            return move(tuple(k * length for k, length in zip(indices, self.piece, strict=True)), target)

        return lax.fori_loop(0, math.prod(self.grid), body, target)


def _grid(shape: tuple[int, ...], most: float) -> tuple[int, ...]:
    """Equal parts along each dim, of at most `most` elements: along the dim that makes the fewest, or along several."""
    size = math.prod(shape)
    parts = lambda length: next(k for k in range(1, length + 1) if length % k == 0 and size <= most * k)
    counts = {dim: parts(length) for dim, length in enumerate(shape) if size <= most * length}
    if not counts:
        return (shape[0], *_grid(shape[1:], most))
    best = min(counts, key=lambda dim: counts[dim])
    return tuple(counts[dim] if dim == best else 1 for dim in range(len(shape)))
