"""Arrays in host memory: room for new ones, and copies to and from the device that wait for events.

Nothing can compute on host memory. What waits is therefore the index of a part of an array, not its values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

import jax
import jax.core
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Primitive
from jax.interpreters import mlir

from zerojax.comm.schedule import after, event
from zerojax.program import jaxprs
from zerojax.sharding.placement import is_in_host
from zerojax.sharding.tpu import TILE, stored_order
from zerojax.utils.typing import Array, ArrayLike, DTypeLike, PyTree, Shape

T = TypeVar("T")
Events: TypeAlias = Sequence[Array]
# A matrix product, after the part of all products that has been computed with it, from 0 to 1.
Product: TypeAlias = tuple[float, Array]
HOST_SPACE, DEVICE_SPACE = jax.memory.Space.Host, jax.memory.Space.Device
_MOST_PIECES = 16
_ALIGNED = 128, 32  # elements of a whole tile of a TPU, in the last dim and the one before

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


def from_host(array: Array, events: Events) -> Array:
    """Copies an array from host memory to the device, not before the events.

    Cost: a copy on the device, since the array comes in parts. One without `cut_dim` waits for no event.
    """
    dim, size = cut_dim(array.shape)
    if not events or size == array.shape[dim]:
        return jax.device_put(array, DEVICE_SPACE)
    starts = [index_after(start, events) for start in range(0, array.shape[dim], size)]
    return jnp.concatenate([part_from_host(array, start, size, dim) for start in starts], dim)


def cut_dim(shape: Shape) -> tuple[int, int]:
    """(the dim that an array is cut along, the size of a part in it): few parts, of whole tiles of a TPU if possible.

    Compilers take a slice for an index only if it is not the whole array. That of TPUs takes whole tiles, or columns.
    An array that has neither is one part.
    """
    tiles = dict(zip(range(len(shape) - 1, -1, -1), _ALIGNED, strict=False))

    def rank(dim: int, size: int) -> int:
        if size % tiles.get(dim, 1) == 0:
            return 0
        if dim == len(shape) - 1:
            return 2
        return 1 if size % TILE[0] == 0 else 3

    counts = ((dim, n) for dim, size in enumerate(shape) for n in range(2, _MOST_PIECES + 1) if size % n == 0)
    found = min(((rank(dim, shape[dim] // n), n, dim) for dim, n in counts), default=None)
    if found is None or found[0] == 3:
        return 0, shape[0]
    return found[2], shape[found[2]] // found[1]


def layer_from_host(stack: Array, index: ArrayLike, dim: int, pace: Pace) -> Array:
    """A layer, with the dim of layers, of a stack in host memory or on the device."""
    if not is_in_host(stack):
        return lax.dynamic_slice_in_dim(stack, index, 1, dim)
    layer = part_from_host(stack, index_after(index, pace.next(_layer_bytes(stack, dim))), 1, dim)
    pace.arrived(layer)
    return layer


def layer_to_host(stack: Array, layer: Array, index: ArrayLike, dim: int, pace: Pace) -> Array:
    """Writes a layer, with the dim of layers, to a stack in host memory or on the device."""
    if is_in_host(stack):
        index = index_after(index, pace.next(_layer_bytes(stack, dim)))
    return part_to_host(stack, layer, index, dim)


def part_from_host(array: Array, start: ArrayLike, size: int, dim: int) -> Array:
    """Copies a part of an array in host memory to the device."""
    return jax.device_put(lax.dynamic_slice_in_dim(array, start, size, dim), DEVICE_SPACE)


def to_host(array: Array) -> Array:
    """Copies an array from the device to host memory."""
    return jax.device_put(array, HOST_SPACE)


def part_to_host(array: Array, part: Array, start: ArrayLike, dim: int) -> Array:
    """Writes a part of an array in host memory or on the device, where `part` is."""
    return lax.dynamic_update_slice_in_dim(array, to_host(part) if is_in_host(array) else part, start, dim)


def arrival(array: Array, for_tpus: bool = False) -> Array:
    """An event on the device: that an array has arrived in host memory."""
    dim = ([0, *stored_order(array.shape)] if for_tpus else [0, *range(array.ndim)])[-2]
    first = part_from_host(array, 0, min(_ALIGNED[1], array.shape[dim]), dim)  # TPUs read whole tiles
    return event([in_stored_order(first, array.shape) if for_tpus else first])[0]


def in_stored_order(part: Array, shape: Shape) -> Array:
    """Lays out a part of an array, which is on the device, in the order in which TPUs store arrays of a shape.

    It is for parts that come from host memory or go there. Their compiler otherwise chooses the order of the array in
    host memory by that of what is computed with its parts. It then copies the array, and fails if the parts are no
    longer whole tiles.
    """
    return with_layout_constraint(part, Layout(stored_order(shape)))


def index_after(index: ArrayLike, events: Events) -> Array:
    """An index that is not available before the events; see `dependencies.after`.

    On CPU devices it does not wait. Their host memory is like any other, and XLA would compute all that an index waits
    for once more in each fusion that reads it: the step of three unrolled layers would compile for minutes.
    """
    return _waiting_index.bind(jnp.asarray(index, jnp.int32), *events)


def _wait(index: Array, *events: Array) -> Array:
    """The index; also in this form without events, since compilers for GPUs overlap fewer copies otherwise."""
    (following,) = after([index + 1], events)  # compilers simplify a selection between zeros
    return following - 1


_waiting_index = Primitive("waiting_index")
_waiting_index.def_abstract_eval(lambda index, *_: index)
mlir.register_lowering(_waiting_index, mlir.lower_fun(_wait, multiple_results=False))
mlir.register_lowering(_waiting_index, lambda _, index, *__: [index], platform="cpu")


def _layer_bytes(stack: Array, dim: int) -> int:
    return stack.size // stack.shape[dim] * stack.dtype.itemsize


# Copies that are spread over a computation


class Pace:
    """The pace of the copies between host and device in one direction, over the computation of a layer.

    Compilers start copies one or two at a time, and take a copy for short or a product for free: they then run all
    copies of a layer before it computes. Each copy therefore waits for a matrix product, the one before which the layer
    has done the same part of its products as its copies have moved of their bytes.

    Args:
        products: what `run_with_products` returns; [] if nothing is computed beside the copies.
        num_bytes: of all copies.
        one_by_one: whether each copy waits for the arrival of the one before.
        waits: events that the first copy waits for.
    """

    def __init__(self, products: Sequence[Product], num_bytes: float, one_by_one: bool = False, waits: Events = ()):
        self._products, self._num_bytes, self._one_by_one = list(products), num_bytes, one_by_one
        self._moved, self._waits = 0.0, list(waits)

    def next(self, num_bytes: float) -> list[Array]:
        """The events that the next copy, of so many bytes, waits for."""
        done = [product for part, product in self._products if part * self._num_bytes <= self._moved]
        self._moved += num_bytes
        return self._waits + event(done[-1:])

    def arrived(self, value: Array) -> None:
        """Records what the last copy has brought to the device."""
        if self._one_by_one:
            self._waits = event([value])


class Paces(NamedTuple):
    """The paces of the copies from host memory, and of those to it."""

    fetches: Pace
    puts: Pace


def run_with_products(fn: Callable[..., T], *args: PyTree) -> tuple[T, list[Product]]:
    """Runs a function: (its results, its matrix products in order, but those inside of loops and kernels)."""
    # Run its equations one by one.
    traced, shapes = jaxprs.traced(fn, *args)
    closed = jaxprs.inlined(traced)
    jaxpr = closed.jaxpr
    scope = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *jax.tree.leaves(args)], strict=True))
    jaxprs.run_equations(jaxpr.eqns, scope)
    results = [scope[v] if jaxprs.is_var(v) else jnp.asarray(v.val, v.aval.dtype) for v in jaxpr.outvars]
    # Find its products, and how long each takes.
    found = [e for e in jaxpr.eqns if e.primitive.name in jaxprs.PRODUCTS]
    sizes = [math.sqrt(math.prod(v.aval.size for v in (*e.invars[:2], *e.outvars))) for e in found]  # MK, KN and MN
    parts = [sum(sizes[: k + 1]) / sum(sizes) for k in range(len(sizes))]
    products = [(part, scope[e.outvars[0]]) for part, e in zip(parts, found, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(shapes), results), products
