"""Cuts arrays into pieces: those in host memory that come to a device at a time, and those that are updated there."""

from __future__ import annotations

import math

from zerojax.comm.buckets import Pieces
from zerojax.sharding.mesh import on_tpus
from zerojax.sharding.tpu import stored_order
from zerojax.utils.typing import AnyMesh, Shape

PIECES_BYTES = 2**27  # of all pieces that come to a device at a time
DEVICE_PIECES_BYTES = 2**29  # of all pieces of a state on the device that are updated at a time, in fp32
_WHOLE_TILE = 8, 1024  # elements of a whole tile of a TPU in the second to last dim, and in an array of one dim


def cut(shape: Shape, wanted: int, mesh: AnyMesh) -> Pieces:
    """Cuts an array into about `wanted` pieces.

    The last dim of several is not cut, and pieces are whole tiles where possible. There are fewer pieces if the sizes
    have no suitable divisors. Pieces are contiguous, except on TPUs, whose compiler slices arrays in host memory along
    one dim only, and between whole tiles; there, the last dim is the innermost one in memory (`stored_order`).
    """
    in_one_dim = on_tpus(mesh)
    order = stored_order(shape) if in_one_dim else tuple(range(len(shape)))
    if order != tuple(range(len(shape))):
        grid = cut(tuple(shape[d] for d in order), wanted, mesh).grid
        return Pieces(shape, tuple(grid[order.index(d)] for d in range(len(shape))))
    found: list[int] = []
    if in_one_dim and len(shape) == 1:  # parts of whole tiles only, which small arrays do not have
        return Pieces(shape, (1,))
    missing = wanted
    for d, size in enumerate(shape[: max(1, len(shape) - 1)]):
        tile = _WHOLE_TILE[1] if len(shape) == 1 else _WHOLE_TILE[0] if d == len(shape) - 2 else 1
        most = size // tile if size % tile == 0 else 1 if in_one_dim else size
        divisors = [n for n in range(1, most + 1) if most % n == 0] or [1]
        found.append(next((n for n in divisors if n >= missing), divisors[-1]))
        missing = missing if in_one_dim else -(-missing // found[-1])
    if in_one_dim:
        best = min(range(len(found)), key=lambda d: (found[d] < wanted, abs(found[d] - wanted)))
        found = [n if d == best else 1 for d, n in enumerate(found)]
    return Pieces(shape, (*found, *[1] * (len(shape) - len(found))))


def of_one_array(shape: Shape, itemsize: int, mesh: AnyMesh) -> Pieces:
    """Cuts an array that is read alone, so that no piece is much larger than `PIECES_BYTES`."""
    return cut(shape, -(-math.prod(shape) * itemsize // PIECES_BYTES), mesh)
