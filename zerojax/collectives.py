"""The two collectives of ZeRO, for the leaves of one unit: all_gather of shards, reduce_scatter of gradients.

They run inside `shard_map`, manual over the axes of `Axes`. Leaves whose full form is small travel together: they are
packed into one buffer and moved by one collective. Of a leaf that is divided over a `model` axis too, each device moves
the part that it holds.
"""

from __future__ import annotations

import functools
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

# Leaves up to this many bytes (in full) share a collective. A heuristic: packing copies a leaf once more in memory,
# which for 256 KiB costs less than the ten microseconds or so that another collective takes to start.
SMALL_LEAF_BYTES = 2**18

Array = Any
WHOLE = PartitionSpec()


class Axes(NamedTuple):
    """The data axes of a mesh: leaves are sharded over `shard`, and replicated over `replica`."""

    shard: tuple[str, ...]
    replica: tuple[str, ...]
    num_shards: int
    num_replicas: int

    @property
    def data(self) -> tuple[str, ...]:
        """All axes that split the batch, outermost first."""
        return self.replica + self.shard

    @property
    def num_devices(self) -> int:
        """Devices that see different data."""
        return self.num_shards * self.num_replicas


class Dims(NamedTuple):
    """Which dims of a leaf are divided.

    Attributes:
        shard: the dim over the shard axes; None: every device holds all that `beside` leaves.
        beside: what is divided over axes beside the data axes, which `shard_map` leaves to the compiler.
    """

    shard: int | None
    beside: PartitionSpec = WHOLE

    def transposed(self, order: Sequence[int]) -> Dims:
        """Those of `lax.transpose(leaf, order)`."""
        entries = (*self.beside, *[None] * (len(order) - len(self.beside)))
        shard = None if self.shard is None else list(order).index(self.shard)
        return Dims(shard, PartitionSpec(*(entries[k] for k in order)))

    def of_layer(self) -> Dims:
        """Those of `leaf[i]`, whose dim 0 is not sharded."""
        return Dims(None if self.shard is None else self.shard - 1, PartitionSpec(*self.beside[1:]))


Collective = Callable[[Sequence[Array], Sequence[Dims], Axes], list[Array]]


def _on_held_parts(fn: Callable[..., Any], dims: Sequence[Dims], out_specs: Any = None) -> Callable[..., Any]:
    """`fn(leaves)`, manual over all axes of the mesh: each device brings what it holds of the leaves.

    What is left to the compiler is moved badly. XLA's partitioner hands no sharding on through an all-gather or a
    reduce-scatter over manual axes, but gathers over the other axes first. And for CPUs it aborts on a reduction over
    manual axes in a 16-bit dtype (the combiner that JAX writes has a sharding constraint in it, which becomes a copy).
    Both were seen with jax 0.10.2 and 0.12.

    Args:
        fn: takes and returns a list of leaves, or returns what `out_specs` says.
        dims: of the leaves.
    """
    names = jax.sharding.get_abstract_mesh().auto_axes
    if not names:
        return fn
    specs = [each.beside for each in dims]
    return jax.shard_map(
        fn, in_specs=(specs,), out_specs=specs if out_specs is None else out_specs, axis_names={*names}, check_vma=False
    )


def _collective(fn: Callable[..., list[Array]]) -> Collective:
    """From a function of the parts that devices hold and their dims over the shard axes to one of leaves."""

    @functools.wraps(fn)
    def run(leaves: Sequence[Array], dims: Sequence[Dims], axes: Axes) -> list[Array]:
        local = lambda parts: fn(parts, [each.shard for each in dims], axes)
        return _on_held_parts(local, dims)(list(leaves))

    return run


def axis_names(entry: Any) -> tuple[str, ...]:
    """The axes that one entry of a PartitionSpec names."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _size_bytes(leaf: Array) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize


def _packs(
    leaves: Sequence[Array], dims: Sequence[int | None], num_shards_held: int
) -> tuple[list[list[int]], list[int]]:
    """(indices that travel together, one list per dtype; indices that travel alone), among sharded leaves."""
    small, alone = defaultdict(list), []
    for i, (leaf, dim) in enumerate(zip(leaves, dims, strict=True)):
        if dim is None:
            continue
        if _size_bytes(leaf) * num_shards_held <= SMALL_LEAF_BYTES:
            small[leaf.dtype].append(i)
        else:
            alone.append(i)
    packs = [pack for pack in small.values() if len(pack) > 1]
    alone += [pack[0] for pack in small.values() if len(pack) == 1]
    return packs, sorted(alone)


@_collective
def all_gather(shards: Sequence[Array], dims: Sequence[int | None], axes: Axes) -> list[Array]:
    """The full leaves of a unit.

    Args:
        shards: this device's shard of each leaf.
        dims: the sharded dim of each leaf; None for a leaf that every device holds in full.

    Cost: receives (N-1)/N of the sharded leaves' full bytes; holds them in full. Of a leaf that is divided over M
    devices beside, a 1/M of both.
    """
    if axes.num_shards == 1:
        return list(shards)
    full = list(shards)
    packs, alone = _packs(shards, dims, axes.num_shards)
    dims = cast("Sequence[int]", dims)  # read below at sharded leaves alone
    for i in alone:
        full[i] = lax.all_gather(shards[i], axes.shard, axis=dims[i], tiled=True)
    for pack in packs:
        buffer = jnp.concatenate([shards[i].reshape(-1) for i in pack])
        rows = lax.all_gather(buffer, axes.shard, axis=0, tiled=False)  # [N, elements of the packed shards]
        offset = 0
        for i in pack:
            size = math.prod(shards[i].shape)
            full[i] = _from_rows(rows[:, offset : offset + size], shards[i].shape, dims[i])
            offset += size
    return full


def _from_rows(rows: Array, shard_shape: tuple[int, ...], dim: int) -> Array:
    """[N, shard] -> the full leaf. The shard may be flat."""
    n = rows.shape[0]
    stacked = jnp.moveaxis(rows.reshape(n, *shard_shape), 0, dim)
    return stacked.reshape(*shard_shape[:dim], n * shard_shape[dim], *shard_shape[dim + 1 :])


def _to_rows(leaf: Array, n: int, dim: int) -> Array:
    """The full leaf -> [N, shard]."""
    split = leaf.reshape(*leaf.shape[:dim], n, leaf.shape[dim] // n, *leaf.shape[dim + 1 :])
    return jnp.moveaxis(split, dim, 0)


@_collective
def reduce_scatter(grads: Sequence[Array], dims: Sequence[int | None], axes: Axes) -> list[Array]:
    """This device's shard of each gradient, summed over the shard axes. Leaves without a sharded dim are all-reduced.

    Cost: sends (N-1)/N of the sharded leaves' full bytes, and 2(N-1)/N of the others'.
    """
    if axes.num_shards == 1:
        return list(grads)
    shards = list(grads)
    packs, alone = _packs(grads, dims, 1)
    whole = [i for i, dim in enumerate(dims) if dim is None]
    dims = cast("Sequence[int]", dims)  # read below at sharded leaves alone
    for i in alone:
        shards[i] = lax.psum_scatter(grads[i], axes.shard, scatter_dimension=dims[i], tiled=True)
    for pack in packs:
        rows = [_to_rows(grads[i], axes.num_shards, dims[i]).reshape(axes.num_shards, -1) for i in pack]
        summed = lax.psum_scatter(jnp.concatenate(rows, axis=1), axes.shard, scatter_dimension=0, tiled=False)
        offset = 0
        for i, row in zip(pack, rows, strict=True):
            shape = list(grads[i].shape)
            shape[dims[i]] //= axes.num_shards
            shards[i] = summed[offset : offset + row.shape[1]].reshape(shape)
            offset += row.shape[1]
    for i, total in zip(whole, all_reduce([grads[i] for i in whole], axes.shard, axes.num_shards), strict=True):
        shards[i] = total
    return shards


def all_gather_rows(shards: Sequence[Array], dims: Sequence[Dims], axes: Axes) -> list[Array]:
    """`all_gather` of shards that are held in this form: see `_along_rows`."""
    inner = _along_rows(dims, axes)
    rows = [shard[None] if i in inner else shard for i, shard in enumerate(shards)]
    full = all_gather(rows, [inner.get(i, each) for i, each in enumerate(dims)], axes)
    for i in inner:
        full[i] = _from_rows(full[i], shards[i].shape, cast(int, dims[i].shard))
    return full


def reduce_scatter_rows(grads: Sequence[Array], dims: Sequence[Dims], axes: Axes) -> list[Array]:
    """`reduce_scatter` to shards that are held in this form: see `_along_rows`."""
    inner = _along_rows(dims, axes)
    split = lambda i: _to_rows(grads[i], axes.num_shards, cast(int, dims[i].shard))
    rows = [split(i) if i in inner else grad for i, grad in enumerate(grads)]
    shards = reduce_scatter(rows, [inner.get(i, each) for i, each in enumerate(dims)], axes)
    return [shard[0] if i in inner else shard for i, shard in enumerate(shards)]


def _along_rows(dims: Sequence[Dims], axes: Axes) -> dict[int, Dims]:
    """By the index of each leaf whose sharded dim is not its first: the dims of its rows, [N, shard].

    The GPU compiler lays out what a collective moves with the dim that it runs along outermost, and so all that the
    shard is computed with: where shards meet the optimizer, every update copied and transposed its state. Along a dim
    of rows, put in front, the full form alone is transposed, which it is either way.
    """
    apart = lambda each: Dims(0, PartitionSpec(None, *each.beside))
    return {i: apart(each) for i, each in enumerate(dims) if each.shard and axes.num_shards > 1}


def all_reduce(
    values: Sequence[Array], names: tuple[str, ...], axis_size: int, dims: Sequence[Dims] | None = None
) -> list[Array]:
    """The sum of each value over the axes, in one collective per dtype. No collective on a single device.

    Args:
        dims: of the values, if they are leaves.

    Cost: sends 2(N-1)/N of the bytes.
    """
    if axis_size == 1 or not values:
        return list(values)
    local = lambda parts: list(lax.psum(tuple(parts), names))
    return local(values) if dims is None else _on_held_parts(local, dims)(list(values))


def device_index(axes: Axes) -> Array:
    """The position of this device among those that see different data, as int32."""
    return lax.axis_index(axes.data) if axes.num_devices > 1 else jnp.int32(0)


def after(shards: Sequence[Array], events: Sequence[Array]) -> list[Array]:
    """`shards`, unchanged, but not available to any consumer before all of `events` are computed.

    This bounds how many units are gathered at a time. An optimisation barrier does not: compilers drop barriers before
    they schedule. The dependency here is a select whose predicate, sign(event) > 1, is never true and is not folded.

    Args:
        shards: any arrays.
        events: scalars of a real dtype.

    Cost: a copy of the shards.
    """
    if not events:
        return list(shards)
    never = functools.reduce(operator.or_, [lax.sign(event) > 1 for event in events])
    return [lax.select(never, lax.full_like(s, 0), s) for s in shards]


def event(values: Sequence[Array]) -> list[Array]:
    """[a scalar that is available when the first floating array among `values` is], or of an integer one, or []."""
    for kind in jnp.floating, jnp.integer:
        for value in values:
            if value.size and jnp.issubdtype(value.dtype, kind):
                return [lax.slice(value, (0,) * value.ndim, (1,) * value.ndim).reshape(())]
    return []


def arrivals(values: Sequence[Array], dims: Sequence[Dims], axes: Axes, *, gathered: bool) -> list[Array]:
    """An event for each collective that made these: the results of an `all_gather`, or else of a `reduce_scatter`."""
    if axes.num_shards == 1:
        return []

    def local(parts: list[Array]) -> list[Array]:
        split = [each.shard for each in dims]
        packs, alone = _packs(parts, split, 1 if gathered else axes.num_shards)
        whole = [] if gathered else [i for i, dim in enumerate(split) if dim is None]
        first = [*alone, *(pack[0] for pack in packs), *whole[:1]]
        return [e for i in first for e in event([parts[i]])]

    return _on_held_parts(local, dims, out_specs=WHOLE)(list(values))
