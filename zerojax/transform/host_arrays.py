"""Arrays in host memory: room for new ones, and copies to the device that wait for events.

Nothing can compute on host memory. What waits is therefore the index of a part of an array, not its values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from zerojax.transform.dependencies import after
from zerojax.typing import Array, Shape

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device

_host_room = Primitive("host_room")
_host_room.def_abstract_eval(lambda *, shape, dtype: jax.core.ShapedArray(shape, dtype, memory_space=HOST))
_lower_zeros = mlir.lower_fun(lambda *, shape, dtype: jnp.zeros(shape, dtype), multiple_results=False)
mlir.register_lowering(_host_room, _lower_zeros)


def room(shape: Shape, dtype: Any) -> Array:
    """An array in host memory whose values are undefined, to be written layer by layer in a jitted function.

    XLA only allocates an array of zeros if all that updates it are copies from the device to slices in host memory.
    Zeros that `jax.device_put` moves there would be written to the device first.
    """
    return _host_room.bind(shape=tuple(shape), dtype=jnp.dtype(dtype))


def is_in_host(array: Array) -> bool:
    """Whether the type of an array says that it is in host memory."""
    return jax.typeof(array).memory_space == HOST


def fetch(array: Array, events: Sequence[Array]) -> Array:
    """Copies an array from host memory to the device, not before the events.

    Cost: a copy on the device, since the array comes in halves. One without an even dim waits for no event.
    """
    dim = next((d for d, size in enumerate(array.shape) if size and size % 2 == 0), None)
    if dim is None or not events:
        return jax.device_put(array, DEVICE)
    half = array.shape[dim] // 2
    starts = [_index_after(start, events) for start in (0, half)]
    return jnp.concatenate([_fetch_slice(array, start, half, dim) for start in starts], dim)


def fetch_layer(stack: Array, index: Any, dim: int, events: Sequence[Array] = ()) -> Array:
    """Copies a layer of a stack in host memory to the device, not before the events. It keeps the dim of layers."""
    return _fetch_slice(stack, _index_after(index, events), 1, dim)


def put(array: Array) -> Array:
    """Copies an array from the device to host memory."""
    return jax.device_put(array, HOST)


def put_layer(stack: Array, layer: Array, index: Any, dim: int) -> Array:
    """Writes a layer, with the dim of layers, to a stack in host memory."""
    return lax.dynamic_update_slice_in_dim(stack, put(layer), index, dim)


def _fetch_slice(array: Array, start: Any, size: int, dim: int) -> Array:
    return jax.device_put(lax.dynamic_slice_in_dim(array, start, size, dim), DEVICE)


def _index_after(index: Any, events: Sequence[Array]) -> Array:
    """An index that is not available before the events."""
    (following,) = after([jnp.asarray(index, jnp.int32) + 1], events)  # compilers simplify a selection between zeros
    return following - 1
