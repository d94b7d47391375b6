"""Arrays in host memory: room for new ones, and copies to and from the device. Nothing can compute on host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.core
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Primitive
from jax.interpreters import mlir

from zerojax.comm.schedule import after, event
from zerojax.sharding.placement import is_in_host
from zerojax.sharding.tpu import stored_order
from zerojax.utils.typing import Array, ArrayLike, DTypeLike, Shape

Events: TypeAlias = Sequence[Array]
HOST_SPACE, DEVICE_SPACE = jax.memory.Space.Host, jax.memory.Space.Device
_MOST_PIECES = 16
_WHOLE_TILES = 32  # elements of whole tiles of a TPU in the second to last dim, for all dtypes

ROOM = "host_room"  # the name of the primitive in traces
_host_room = Primitive(ROOM)
_host_room.def_abstract_eval(lambda *, shape, dtype: jax.core.ShapedArray(shape, dtype, memory_space=HOST_SPACE))
_lower_zeros = mlir.lower_fun(lambda *, shape, dtype: jnp.zeros(shape, dtype), multiple_results=False)
mlir.register_lowering(_host_room, _lower_zeros)


def room(shape: Shape, dtype: DTypeLike) -> Array:
    """An array in host memory whose values are undefined, to be written layer by layer in a jitted function.

    XLA only allocates an array of zeros if all that updates it are copies from the device to slices in host memory.
    Zeros that `jax.device_put` moves there would be written to the device first.
    """
    return _host_room.bind(shape=tuple(shape), dtype=jnp.dtype(dtype))


def from_host(array: Array) -> Array:
    """Copies an array from host memory to the device."""
    return jax.device_put(array, DEVICE_SPACE)


def cut_dim(shape: Shape) -> tuple[int, int]:
    """(the dim that an array is cut along, the size of a part in it): few parts, contiguous ones if possible.

    Compilers take a slice for an index only if it is not the whole array. An array without divisors is one part.
    """
    counts = ((dim, n) for dim, size in enumerate(shape) for n in range(2, _MOST_PIECES + 1) if size % n == 0)
    dim, n = next(counts, (0, 1))
    return dim, shape[dim] // n


def layer_from_host(stack: Array, index: ArrayLike, dim: int) -> Array:
    """A layer, with the dim of layers, of a stack in host memory or on the device."""
    layer = lax.dynamic_slice_in_dim(stack, index, 1, dim)
    return from_host(layer) if is_in_host(stack) else layer


def part_from_host(array: Array, start: ArrayLike, size: int, dim: int) -> Array:
    """Copies a part of an array in host memory to the device."""
    return from_host(lax.dynamic_slice_in_dim(array, start, size, dim))


def to_host(array: Array) -> Array:
    """Copies an array from the device to host memory."""
    return jax.device_put(array, HOST_SPACE)


def part_to_host(array: Array, part: Array, start: ArrayLike, dim: int) -> Array:
    """Writes a part of an array in host memory or on the device, where `part` is."""
    return lax.dynamic_update_slice_in_dim(array, to_host(part) if is_in_host(array) else part, start, dim)


def arrival(array: Array, for_tpus: bool = False) -> Array:
    """An event on the device: that an array has arrived in host memory."""
    dim = ([0, *stored_order(array.shape)] if for_tpus else [0, *range(array.ndim)])[-2]
    first = part_from_host(array, 0, min(_WHOLE_TILES, array.shape[dim]), dim)  # TPUs read whole tiles
    return event([in_stored_order(first, array.shape) if for_tpus else first])[0]


def in_stored_order(part: Array, shape: Shape) -> Array:
    """Lays out a part of an array, which is on the device, in the order in which TPUs store arrays of a shape.

    It is for parts that come from host memory or go there. Their compiler otherwise chooses the order of the array in
    host memory by that of what is computed with its parts. It then copies the array, and fails if the parts are no
    longer whole tiles.
    """
    return with_layout_constraint(part, Layout(stored_order(shape)))


def scalars_after(scalars: Sequence[Array], events: Events) -> list[Array]:
    """Scalars that are not available before the events, see `schedule.after`; what is computed with them waits too.

    On CPU devices they do not wait. Their host memory is like any other, and XLA would contract other products and sums
    in a kernel that selects a scalar.
    """
    return [_waiting.bind(scalar, *events) if events else scalar for scalar in scalars]


def _wait(value: Array, *events: Array) -> Array:
    return after([value], events)[0]


_waiting = Primitive("waiting")
_waiting.def_abstract_eval(lambda value, *_: value)
mlir.register_lowering(_waiting, lambda _, value, *__: [value])
for _platform in "cuda", "rocm", "tpu":
    mlir.register_lowering(_waiting, mlir.lower_fun(_wait, multiple_results=False), platform=_platform)
