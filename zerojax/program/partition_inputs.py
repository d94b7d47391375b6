"""Partitioned activation checkpoints (P_a): each device along the `model` axis saves a slice of a replicated value.

These functions run inside `shard_map`, manual over the data axes. They make the other axes manual too, so that the
compiler cannot choose other collectives.

Source: ZeRO section 6.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from zerojax.sharding.axes import REPLICATED
from zerojax.utils.typing import Array


def divisible_dim(shape: Sequence[int]) -> int | None:
    """The first dim that the number of devices M along the axes divides; None for a scalar, or if M is 1.

    Args:
        shape: on each device along the data axes.

    Raises:
        ValueError: M divides no dim.
    """
    names, size = _axes()
    if size == 1 or not shape:
        return None
    for dim, length in enumerate(shape):
        if length % size == 0:
            return dim
    raise ValueError(
        f"remat: a unit's input cannot be partitioned over {'x'.join(names)}\n"
        f"  got:      shape {tuple(shape)} on each device along the data axes, axis size {size}, which divides no dim\n"
        f"  fix:      another batch or sequence length, or partition_inputs=False for the unit"
    )


def partition(value: Array, dim: int) -> Array:
    """Slices a value that is the same on all M devices: each keeps 1/M of it. Sends nothing."""
    names, size = _axes()
    rows = value.shape[dim] // size
    device_slice = lambda value: lax.dynamic_slice_in_dim(value, lax.axis_index(names) * rows, rows, dim)
    return _manual(device_slice, REPLICATED, _divided(names, dim))(value)


def unpartition(value: Array, dim: int) -> Array:
    """The inverse of `partition`: an all-gather, in which a device receives (M-1)/M of the value's bytes."""
    names, _ = _axes()
    gather = lambda part: lax.all_gather(part, names, axis=dim, tiled=True)
    return _manual(gather, _divided(names, dim), REPLICATED)(value)


def on_parts(fn: Callable[[Array], Any], dim: int) -> Callable[[Array], Any]:
    """Applies `fn` to the slice on each device. Its result may be taken from any device. Sends nothing."""
    names, _ = _axes()
    return _manual(fn, _divided(names, dim), REPLICATED)


def _axes() -> tuple[tuple[str, ...], int]:
    """(names of the axes that are not manual, number of devices along them)."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(mesh.auto_axes), math.prod(mesh.shape[name] for name in mesh.auto_axes)


def _divided(names: tuple[str, ...], dim: int) -> PartitionSpec:
    return PartitionSpec(*[None] * dim, names)


def _manual(fn: Callable[..., Any], in_specs: PartitionSpec, out_specs: PartitionSpec) -> Callable[..., Any]:
    names, _ = _axes()
    return jax.shard_map(fn, in_specs=in_specs, out_specs=out_specs, axis_names={*names}, check_vma=False)
