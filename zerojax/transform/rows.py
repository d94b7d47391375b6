"""Gathers and sums rows, one for each device along the shard axes. On TPUs, in the forms that their compiler keeps."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from zerojax.sharding.axes import Axes
from zerojax.sharding.torus import groups_along
from zerojax.typing import Array

_TILE = 8, 128  # elements of a tile of a TPU's memory, in the last two dims
_LEAST_TILES = 2  # smaller rows of 16-bit elements are all-reduced


def row_major(piece: Array) -> Array:
    """Lays out the piece in the order of its dims. Otherwise compilers transpose the whole leaf, not each piece."""
    return with_layout_constraint(piece, Layout(tuple(range(piece.ndim))))


def gather_rows(shard: Array, axes: Axes) -> Array:
    """The shards of all devices, [N, ..]. On a torus, over one dim after the other; see `sum_rows`."""
    rows = shard
    for names, groups in reversed(_runs(axes)):
        rows = lax.all_gather(rows, names, axis_index_groups=groups)
    return rows.reshape(axes.num_shards, *shard.shape)


def sum_rows(rows: Array, axes: Axes) -> Array:
    """This device's row of [N, ..], summed over the shard axes.

    The TPU compiler makes an all-reduce, which sends twice the bytes, of a reduce-scatter whose scattered dim is not
    the outermost, of one whose rows are no tiles, and, unless SparseCores run it, of one over several dims of a torus.
    Summing over one dim of the torus after the other sends the same bytes as a reduce-scatter over all of them:
    (a-1)/a of the rows and then (b-1)/b of their a-th part are (ab-1)/ab.
    """
    if not axes.torus:
        return lax.psum_scatter(rows, axes.shard)
    shape = rows.shape[1:]
    tiles = _as_tiles(rows)
    tiles = tiles.reshape(*axes.torus, *tiles.shape[1:])
    for names, groups in _runs(axes):
        tiles = lax.psum_scatter(row_major(tiles), names, axis_index_groups=groups)
    size = math.prod(shape)
    return (tiles if tiles.size == size else tiles.reshape(-1)[:size]).reshape(shape)


def _runs(axes: Axes) -> list[tuple[tuple[str, ...] | str, list[list[int]] | None]]:
    """The names of axes and the groups of positions of the collectives that run one after the other; None is all."""
    if len(axes.torus) < 2:
        return [(axes.shard, None)]
    (name,) = axes.shard
    return [(name, groups_along(axes.torus, dim)) for dim in range(len(axes.torus))]


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
