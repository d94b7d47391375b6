"""Gathers and sums rows, one for each device along the shard axes: over all of them, or over one dim of a torus after
the other."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from zerojax.sharding.axes import Axes
from zerojax.sharding.torus import groups_along
from zerojax.typing import Array

_TILE = 8, 128  # elements of a tile of a TPU's memory, in the last two dims


def row_major(piece: Array) -> Array:
    """Lays out the piece in the order of its dims. Otherwise compilers transpose the whole leaf, not each piece."""
    return with_layout_constraint(piece, Layout(tuple(range(piece.ndim))))


def gather_rows(shard: Array, axes: Axes) -> Array:
    """The shards of all devices, [N, ..]. On a torus, over one dim after the other; see `sum_rows`."""
    if not axes.torus:
        return lax.all_gather(shard, axes.shard)
    (name,) = axes.shard
    rows = shard
    for dim in reversed(range(len(axes.torus))):
        rows = lax.all_gather(rows, name, axis_index_groups=groups_along(axes.torus, dim))
    return rows.reshape(axes.num_shards, *shard.shape)


def sum_rows(rows: Array, axes: Axes) -> Array:
    """This device's row of [N, ..], summed over the shard axes.

    The TPU compiler makes an all-reduce, which sends twice the bytes, of a reduce-scatter over several dims of a torus,
    of one whose scattered dim is not the outermost, and of one whose rows are no tiles. Summing over one dim of the
    torus after the other sends the same bytes as a reduce-scatter over all of them: (a-1)/a of the rows and then
    (b-1)/b of their a-th part are (ab-1)/ab. SparseCores run such collectives, and not those over several dims.
    """
    if not axes.torus:
        return lax.psum_scatter(rows, axes.shard)
    (name,), shape = axes.shard, rows.shape[1:]
    tiles = _as_tiles(rows)
    tiles = tiles.reshape(*axes.torus, *tiles.shape[1:])
    for dim in range(len(axes.torus)):
        tiles = lax.psum_scatter(row_major(tiles), name, axis_index_groups=groups_along(axes.torus, dim))
    size = math.prod(shape)
    return (tiles if tiles.size == size else tiles.reshape(-1)[:size]).reshape(shape)


def _as_tiles(rows: Array) -> Array:
    """[N, ..] as [N, height, width] in whole tiles, with zeros at the end if the elements fill no tiles.

    Rows of less than a tile stay as they are: zeros would send more than an all-reduce does.
    """
    n, *shape = rows.shape
    size, height = math.prod(shape), math.prod(shape[:-1])
    if size < math.prod(_TILE):
        return rows
    if height >= _TILE[0]:
        return rows.reshape(n, height, shape[-1])
    flat = jnp.pad(rows.reshape(n, size), ((0, 0), (0, -size % math.prod(_TILE))))
    return flat.reshape(n, -1, _TILE[1])
