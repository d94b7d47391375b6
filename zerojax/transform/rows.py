"""Gathers and sums rows, one for each device along the shard axes. On TPUs, in the forms that their compiler keeps."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from zerojax.sharding.axes import Axes
from zerojax.sharding.torus import groups_along
from zerojax.typing import Array

_TILE = 8, 128  # elements of a tile of a TPU's memory, in the last two dims
_LEAST_TILES = 2  # of a row; smaller ones of 16-bit elements are all-reduced


def row_major(piece: Array) -> Array:
    """Lays out the piece in the order of its dims. Otherwise compilers transpose the whole leaf, not each piece."""
    return with_layout_constraint(piece, Layout(tuple(range(piece.ndim))))


def gather_rows(shard: Array, axes: Axes) -> Array:
    """The shards of all devices, [N, ..].

    On a torus of three dims, over one dim after the other: the TPU compiler makes an all-reduce of a gather over three.
    """
    if len(axes.torus) < 3:
        return lax.all_gather(shard, axes.shard)
    (name,), rows = axes.shard, shard
    for dim in reversed(range(len(axes.torus))):
        rows = lax.all_gather(rows, name, axis_index_groups=groups_along(axes.torus, dim))
    return rows.reshape(axes.num_shards, *shard.shape)


def sum_rows(rows: Array, axes: Axes) -> Array:
    """This device's row of [N, ..], summed over the shard axes.

    The TPU compiler makes an all-reduce, which sends twice the bytes, of a reduce-scatter over several dims of a torus,
    unless SparseCores run it, and the chip waits for it. Rows are therefore summed around a ring of chips, along one
    dim after the other, which sends the same bytes as a reduce-scatter over all of them: (a-1)/a of the rows and then
    (b-1)/b of their a-th part are (ab-1)/ab.

    SparseCores run a reduce-scatter if the scattered dim is the outermost, also in memory, and rows are whole tiles.
    """
    if axes.sparse_cores:
        shape = rows.shape[1:]
        row = lax.psum_scatter(row_major(_as_tiles(rows)), axes.shard)
        return row.reshape(-1)[: math.prod(shape)].reshape(shape)
    if not axes.torus:
        return lax.psum_scatter(rows, axes.shard)
    (name,) = axes.shard
    rows = rows.reshape(*axes.torus, *rows.shape[1:])
    for dim in range(len(axes.torus)):
        rows = _sum_around_rings(rows, name, groups_along(axes.torus, dim))
    return rows


def _sum_around_rings(rows: Array, name: str, rings: list[list[int]]) -> Array:
    """This device's row of [n, ..], summed over the n devices of its ring. The TPU compiler runs the n-1 permutations
    beside the computation.

    Device i starts with its part of row i-1, and passes on what it receives, plus its own part of that row. After n-1
    turns, row i has been around the ring and arrives at device i.

    Args:
        rows: this device's part of each row.
        name: the axis of the mesh.
        rings: the positions along the axis of the devices of each ring, in order.
    """
    n = len(rings[0])
    places = np.zeros(sum(map(len, rings)), np.int32)
    for ring in rings:
        places[ring] = range(n)
    place = jnp.asarray(places)[lax.axis_index(name)]
    own = lambda turn: lax.dynamic_index_in_dim(rows, (place - 1 - turn) % n, keepdims=False)
    next_in_ring = [(ring[k], ring[(k + 1) % n]) for ring in rings for k in range(n)]
    total = own(0)
    for turn in range(1, n):
        total = lax.ppermute(total, name, next_in_ring) + own(turn)
    return total


def _as_tiles(rows: Array) -> Array:
    """[N, ..] as [N, height, width] in whole tiles, with zeros at the end if the elements fill no tiles.

    Small rows stay as they are: zeros would send more than an all-reduce does.
    """
    n, *shape = rows.shape
    size, height = math.prod(shape), math.prod(shape[:-1])
    if size < _LEAST_TILES * math.prod(_TILE):
        return rows
    if height >= _TILE[0]:
        return rows.reshape(n, height, shape[-1])
    flat = jnp.pad(rows.reshape(n, size), ((0, 0), (0, -size % math.prod(_TILE))))
    return flat.reshape(n, -1, _TILE[1])
