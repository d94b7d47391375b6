"""Gathers and sums rows, one for each device along the shard axes. On TPUs, in the forms that their compiler keeps."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from zerojax.sharding.axes import Axes
from zerojax.sharding.tpu import TILE, groups_along
from zerojax.utils.typing import Array

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
    unless SparseCores run it, and the chip waits for it. Other rows are therefore summed by permutations around rings
    of chips, along one dim after the other, which sends the same bytes as a reduce-scatter over all of them: (a-1)/a of
    the rows and then (b-1)/b of their a-th part are (ab-1)/ab.

    SparseCores run a reduce-scatter if the scattered dim is the outermost, also in memory, and rows are whole tiles.
    """
    shape = rows.shape[1:]
    if axes.sparse_cores:
        row = lax.psum_scatter(row_major(_as_tiles(rows)), axes.shard)
        row = lax.optimization_barrier(row)  # or the compiler slices before it sums, and aborts
        return row.reshape(-1)[: math.prod(shape)].reshape(shape)
    if not axes.torus:
        return lax.psum_scatter(rows, axes.shard)
    (name,) = axes.shard
    rows = rows.reshape(*axes.torus, *shape)
    for dim in range(len(axes.torus)):
        rows = _sum_around_rings(rows, name, groups_along(axes.torus, dim))
    return rows


def _sum_around_rings(rows: Array, name: str, lines: list[list[int]]) -> Array:
    """This device's row of [n, ..], summed over the n devices of its line, one of `lines` along the axis `name`.

    The TPU compiler runs the n-1 permutations beside the computation. A device starts with its part of the row of the
    device before it in the ring, and passes on what it receives, plus its own part of that row. After n-1 turns, each
    row has been around the ring and arrives at its device.
    """
    order = _ring_order(len(lines[0]))
    n, places = len(order), np.zeros(sum(map(len, lines)), np.int32)
    for line in lines:
        places[np.array(line)[order]] = range(n)
    place = jnp.asarray(places)[lax.axis_index(name)]
    own = lambda turn: lax.dynamic_index_in_dim(rows, jnp.asarray(order)[(place - 1 - turn) % n], keepdims=False)
    next_in_ring = [(line[order[k]], line[order[(k + 1) % n]]) for line in lines for k in range(n)]
    total = own(0)
    for turn in range(1, n):
        total = lax.ppermute(total, name, next_in_ring) + own(turn)
    return total


def _ring_order(n: int) -> np.ndarray:
    """The order in which a ring visits a line of n chips: every second one, and the others on the way back.

    The chip waits for a permutation from one end of a line to the other, unless the line is of four chips.
    """
    return np.arange(n) if n <= 4 else np.array([*range(0, n, 2), *range(1, n, 2)[::-1]])


def _as_tiles(rows: Array) -> Array:
    """[N, ..] as [N, height, width] in whole tiles, with zeros at the end if the elements fill no tiles.

    Small rows stay as they are: zeros would send more than an all-reduce does.
    """
    n, *shape = rows.shape
    size, height = math.prod(shape), math.prod(shape[:-1])
    if size < _LEAST_TILES * math.prod(TILE):
        return rows
    if height >= TILE[0]:
        return rows.reshape(n, height, shape[-1])
    flat = jnp.pad(rows.reshape(n, size), ((0, 0), (0, -size % math.prod(TILE))))
    return flat.reshape(n, -1, TILE[1])
