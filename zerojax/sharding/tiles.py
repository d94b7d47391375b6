"""How TPUs store arrays: in tiles of the two innermost dims. The last tile along each is stored in full."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

from zerojax.utils.typing import Shape

TILE = 8, 128  # elements of a tile of a TPU's memory, in the last two dims


def stored_order(shape: Shape) -> tuple[int, ...]:
    """The dims of an array, from the outermost to the innermost, as the TPU compiler stores arguments and results.

    It is the order that takes the fewest tiles: 50304 x 192 is stored column by column. Dims of up to 4 have smaller
    tiles, which do not count here.
    """
    orders = (order[::-1] for order in itertools.permutations(range(len(shape) - 1, -1, -1)))
    return min(orders, key=lambda order: num_tiles(shape[d] for d in order))


def num_tiles(sizes: Iterable[int]) -> int:
    """The number of tiles of an array that is stored in the order of its dims."""
    *outer, rows, columns = 1, 1, *sizes
    return math.prod(outer) * -(-rows // TILE[0]) * -(-columns // TILE[1])
