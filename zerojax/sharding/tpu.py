"""What is different on TPUs: the torus that the chips along an axis of a mesh form, and the tiles of their memory.

The compiler stores arrays in tiles of the two innermost dims; the last tile along each is stored in full.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from zerojax.utils.typing import Shape

SPARSE_CORES = frozenset(["TPU v5", "TPU v5p", "TPU v6 lite", "TPU v6e"])  # kinds of devices; they run collectives
TILE = 8, 128  # elements of a tile, in the last two dims
_LONGEST_RING = 16  # of chips that form no box; a ring of n chips is n-1 permutations to compile


def coordinates(device: Any) -> tuple[int, ...] | None:
    """The place of a device: its slice, the coordinates of its chip, and the core of the chip. None without a torus."""
    coords = getattr(device, "coords", None)
    if device.platform != "tpu" or coords is None:
        return None
    return (getattr(device, "slice_index", 0), *coords, getattr(device, "core_on_chip", 0))


def in_order_of_coordinates(devices: Sequence[Any]) -> list[Any]:
    """The chips of TPU slices in the order of their slices and coordinates; other devices as they are."""
    places = {device: coordinates(device) for device in devices}
    return list(devices) if None in places.values() else sorted(devices, key=lambda device: places[device] or ())


def box_sizes(devices: np.ndarray) -> tuple[int, ...] | None:
    """The sizes of the dims of a box of chips in which the rows of `devices` are, the last dim running fastest.

    Args:
        devices: shape (N, groups): the devices along some axes of a mesh, for each index of the other axes.

    Returns:
        Sizes greater than 1, with the product N. None if the devices have no coordinates, are not in the order of
        them, form no box, or are in several slices.
    """
    places = [[coordinates(device) for device in row] for row in devices.tolist()]
    if any(place is None for row in places for place in row):
        return None
    offsets = np.asarray(places)  # (N, groups, dims)
    offsets = offsets - offsets[:1]
    if (offsets != offsets[:, :1]).any() or offsets[..., 0].any():
        return None
    # The rank of a coordinate counts the chips of these devices alone: another axis may have every second one.
    ranks = [np.unique(column, return_inverse=True)[1] for column in offsets[:, 0].T]
    spanned = [rank for rank in ranks if rank.any()]
    slowest_first = sorted(spanned, key=lambda rank: int(np.argmax(rank != 0)), reverse=True)
    sizes = tuple(int(rank.max()) + 1 for rank in slowest_first)
    if math.prod(sizes) != len(devices):
        return None
    in_order = np.unravel_index(np.arange(len(devices)), sizes) if sizes else ()
    return sizes if all(map(np.array_equal, slowest_first, in_order)) else None


def slices_of(devices: np.ndarray) -> np.ndarray:
    """The TPU slice of each device, in an array of the same shape; -1 for other devices."""
    return np.array([(coordinates(device) or (-1,))[0] for device in devices.flat]).reshape(devices.shape)


def slice_after_slice(mesh: Mesh | AbstractMesh) -> bool:
    """Whether the devices of a mesh are in the order of their slices."""
    return not isinstance(mesh, Mesh) or bool((np.diff(slices_of(mesh.devices).ravel()) >= 0).all())


def in_one_slice(devices: np.ndarray) -> bool:
    """Whether all rows of `devices`, shape (N, groups), are chips of the same slice in each group."""
    slices = slices_of(devices)
    return bool((slices >= 0).all() and (slices == slices[:1]).all())


def have_sparse_cores(devices: np.ndarray) -> bool:
    """Whether SparseCores run collectives over the rows of `devices`, over all dims of the torus at once."""
    return len(devices) > 1 and in_one_slice(devices) and {d.device_kind for d in devices.flat} <= SPARSE_CORES


def ring_lengths(devices: np.ndarray) -> tuple[int, ...]:
    """The lengths of the rings of chips around which the rows of `devices` are summed, one after the other.

    Args:
        devices: shape (N, groups), as of `box_sizes`.

    Returns:
        The sizes of a box of chips, or (N,) if a few chips of a slice are in another order, such as that of the ring
        which `jax.make_mesh` lays through small slices. () if there is no ring, or if SparseCores reduce.
    """
    if len(devices) == 1 or not in_one_slice(devices) or have_sparse_cores(devices):
        return ()
    return box_sizes(devices) or ((len(devices),) if len(devices) <= _LONGEST_RING else ())


def along(mesh: Mesh, names: Sequence[str]) -> np.ndarray:
    """The devices of a mesh as (along the axes `names`, along all others)."""
    dims = [mesh.axis_names.index(name) for name in names]
    moved = np.moveaxis(mesh.devices, dims, range(len(dims)))
    return moved.reshape(int(np.prod(moved.shape[: len(dims)])), -1)


def groups_along(sizes: Sequence[int], dim: int) -> list[list[int]]:
    """The positions, in the order of a torus of these sizes, of each line of devices along one of its dims."""
    positions = np.arange(int(np.prod(sizes))).reshape(sizes)
    return np.moveaxis(positions, dim, -1).reshape(-1, sizes[dim]).tolist()


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
