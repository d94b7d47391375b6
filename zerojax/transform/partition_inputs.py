"""P_a: values that are the same along the axes beside the data axes ('model'), kept as one slice on each device.

They run inside `shard_map`, where those axes are left to the compiler; here they are manual, so that it cannot choose
other collectives. Source: ZeRO section 6.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

Array = Any
WHOLE = PartitionSpec()


def divisible_dim(shape: Sequence[int]) -> int | None:
    """The first dim that the devices along the axes divide; None for a scalar, or if there is one device.

    Args:
        shape: on each device along the data axes.

    Raises:
        ValueError: they divide none.
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
    """Of a value that is the same on all M devices, a 1/M slice on each. Sends nothing."""
    names, size = _axes()
    rows = value.shape[dim] // size
    own = lambda value: lax.dynamic_slice_in_dim(value, lax.axis_index(names) * rows, rows, dim)
    return _manual(own, WHOLE, _divided(names, dim))(value)


def unpartition(value: Array, dim: int) -> Array:
    """The inverse of `partition`: an all-gather, of which a device receives (M-1)/M of the value's bytes."""
    names, _ = _axes()
    gather = lambda part: lax.all_gather(part, names, axis=dim, tiled=True)
    return _manual(gather, _divided(names, dim), WHOLE)(value)


def on_parts(fn: Callable[[Array], Array], dim: int) -> Callable[[Array], Array]:
    """`fn` of the slice that a device has of a value, for what is there of it on any device. Sends nothing."""
    names, _ = _axes()
    return _manual(fn, _divided(names, dim), WHOLE)


def _axes() -> tuple[tuple[str, ...], int]:
    """(their names, devices along them)."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(mesh.auto_axes), math.prod(mesh.shape[name] for name in mesh.auto_axes)


def _divided(names: tuple[str, ...], dim: int) -> PartitionSpec:
    return PartitionSpec(*[None] * dim, names)


def _manual(fn: Callable[..., Array], in_specs: PartitionSpec, out_specs: PartitionSpec) -> Callable[..., Array]:
    names, _ = _axes()
    return jax.shard_map(fn, in_specs=in_specs, out_specs=out_specs, axis_names={*names}, check_vma=False)
