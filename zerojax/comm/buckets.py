"""Groups small arrays into buckets of a limited size, and cuts larger arrays into pieces that fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from zerojax.utils.typing import Array, ArrayLike

# Leaves of up to this many bytes (in full form) share a collective, and so do layers of a stack that is cut. This costs
# another copy in memory, which for 256 KiB takes less time than the ten microseconds or so to start a collective.
SMALL_BYTES = 2**18


def fused(indices: Sequence[int], sizes: Sequence[int] | Mapping[int, int], limit: float) -> list[list[int]]:
    """Groups indices in their order into groups of a total size up to `limit`; larger items come last, each alone."""
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


class Pieces(NamedTuple):
    """The pieces of equal shape that an array is cut into: `grid` is their number along each dim."""

    shape: tuple[int, ...]
    grid: tuple[int, ...]

    @classmethod
    def of(cls, shape: tuple[int, ...], element_bytes: int, limit: float, dim: int = 0) -> Pieces:
        """Cuts a leaf that is sharded in `dim` into pieces of `limit` bytes. Elements take `element_bytes` when full.

        Unless its layers are small, a stack is cut into layers or parts of them. Pieces of several layers would have to
        be transposed, and compilers transpose the whole leaf at once, before the first piece is moved.
        """
        full_bytes, leading = math.prod(shape) * element_bytes, math.prod(shape[:dim])
        if full_bytes <= limit:
            return cls(shape, (1,) * len(shape))
        first = dim if full_bytes // leading > SMALL_BYTES else 0
        return cls(shape, (*shape[:first], *_grid(shape[first:], limit // element_bytes)))

    @property
    def piece(self) -> tuple[int, ...]:
        """The shape of a piece."""
        return tuple(length // parts for length, parts in zip(self.shape, self.grid, strict=True))

    @property
    def count(self) -> int:
        """The number of pieces."""
        return math.prod(self.grid)

    def of_rows(self, shape: tuple[int, ...]) -> Pieces:
        """The pieces of an array that has the leading dims of this one, and others in place of the last one."""
        return Pieces(shape, (*self.grid, *[1] * len(shape))[: len(shape)])

    def start(self, index: ArrayLike) -> tuple[Array, ...]:
        """The position of the first element of a piece."""
        indices = jnp.unravel_index(index, self.grid)
        return tuple(k * length for k, length in zip(indices, self.piece, strict=True))

    def read(self, array: Array, index: ArrayLike) -> Array:
        return lax.dynamic_slice(array, self.start(index), self.piece)

    def write(self, array: Array, piece: Array, index: ArrayLike) -> Array:
        return lax.dynamic_update_slice(array, piece, self.start(index))

    def loop(self, move: Callable[[tuple[Array, ...], Array], Array], target: Array) -> Array:
        """Runs `target = move(start, target)` for the start indices of each piece, one piece after the other."""

        return lax.fori_loop(0, self.count, lambda i, target: move(self.start(i), target), target)


def _grid(shape: tuple[int, ...], most: float) -> tuple[int, ...]:
    """The number of parts along each dim, for parts of at most `most` elements and as few of them as possible."""
    size = math.prod(shape)
    parts = lambda length: next(k for k in range(1, length + 1) if length % k == 0 and size <= most * k)
    counts = {dim: parts(length) for dim, length in enumerate(shape) if size <= most * length}
    if not counts:
        return (shape[0], *_grid(shape[1:], most))
    best = min(counts, key=lambda dim: counts[dim])
    return tuple(counts[dim] if dim == best else 1 for dim in range(len(shape)))
