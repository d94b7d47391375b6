"""The collectives of ZeRO, for the leaves of one unit: all_gather of shards, reduce_scatter or all_reduce of gradients.

They run inside `shard_map`, manual over the axes that split the rows of a batch. Leaves whose full form is small are
packed into one buffer and share a collective, and so are those that are sent in blocks of 8 bits (`comm.blocks`). If a
leaf is also divided over a `model` axis, each device communicates the part that it holds.

Along an axis `context`, which is left to the compiler, the shards of a leaf are gathered in the same collective. Of its
gradient, devices have terms from the tokens that they hold. The compiler sums these where the gradient has to be
divided, which makes a reduce-scatter over `context`, and the explicit one over the other axes follows:

    gather    shards [.., n/N, ..] ────────────── all_gather over data x context ─────────► [.., n, ..]
    reduce    [.., n, ..] ── the compiler, over context ──► [.., n/C, ..] ── psum_scatter ──► [.., n/N, ..]

`CollectiveOptions.bucket_bytes` limits the size of each collective: packs are no larger, and a larger leaf is
communicated in pieces, in a loop. Each collective then waits for the previous one. Otherwise compilers would merge them
into a larger one, or run all of them at once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from zerojax.comm import blocks
from zerojax.comm.buckets import SMALL_BYTES, Pieces, fused
from zerojax.comm.rows import gather_rows, row_major, sum_rows
from zerojax.comm.schedule import after, event
from zerojax.sharding.axes import CONTEXT, REPLICATED, Axes, Dims
from zerojax.utils.typing import Array, PyTree

T = TypeVar("T")


class CollectiveOptions(NamedTuple):
    """How the leaves of a unit are communicated."""

    bucket_bytes: float = math.inf  # the maximum size of one collective, in full form
    sequential: bool = False  # each collective waits for the previous one. With buckets it always does.
    group: int = 0  # compilers combine no reductions of different groups; see `_psum_scatter`

    def next_waits_for(self, events: list[Array]) -> list[Array]:
        """The events that a collective waits for, given those of the previous one."""
        return events if self.sequential or self.bucket_bytes < math.inf else []


LEAVES_WHOLE = CollectiveOptions()


class Communicated(NamedTuple):
    """The result of a group of collectives."""

    leaves: list[Array]  # the leaves in their new form
    # scalars that are available when all collectives are done: one for each, or the last one's if they are sequential
    events: list[Array]


class Turns:
    """Orders the collectives of one call: each waits for `waits`, or, if they are sequential, for the previous one."""

    def __init__(self, options: CollectiveOptions, waits: Sequence[Array]):
        self.options, self._waits = options, list(waits)
        self.events = options.next_waits_for(self._waits)

    def ready(self, parts: T) -> T:
        """Delays the operands of the next collective, a tree of arrays, until it may start."""
        arrays, tree = jax.tree.flatten(parts)
        return jax.tree.unflatten(tree, after(arrays, self._waits))

    def done(self, moved: T) -> T:
        """Records the results of that collective, a tree of arrays, and returns them."""
        own = [e for array in jax.tree.leaves(moved) for e in event([array])]
        if next_waits := self.options.next_waits_for(own):
            self.events = self._waits = next_waits
        else:
            self.events = self.events + own
        return moved


def _on_held_parts(
    fn: Callable[[list[Array], Turns], list[Array]],
    specs: tuple[Sequence[PartitionSpec], Sequence[PartitionSpec]] | None,
    options: CollectiveOptions,
) -> Callable[[Sequence[Array], Sequence[Array]], Communicated]:
    """Makes `fn(leaves, turns)` a function of (leaves, the events that no collective starts before).

    With `specs`, of the leaves and of the results over the axes that are left to the compiler, `fn` is manual over all
    axes of the mesh: it sees the part of each leaf that a device holds. Axes that are left to the compiler cost
    communication. XLA's partitioner does not propagate a sharding through an all-gather
    or a reduce-scatter over manual axes, but gathers over the other axes first. On CPUs it also aborts on a reduction
    over manual axes in a 16-bit dtype: the combiner that JAX emits has a sharding constraint, which becomes a copy.
    Both were observed with jax 0.10.2 and 0.12.
    """

    def on_parts(parts: list[Array], waits: list[Array]) -> Communicated:
        turns = Turns(options, waits)
        return Communicated(fn(parts, turns), turns.events)

    run = on_parts
    names = jax.sharding.get_abstract_mesh().auto_axes
    if names and specs is not None:
        of_leaves: PyTree = list(specs[0])
        of_results: PyTree = list(specs[1])
        run = jax.shard_map(
            on_parts,
            in_specs=(of_leaves, REPLICATED),
            out_specs=Communicated(of_results, REPLICATED),
            axis_names={*names},
            check_vma=False,
        )
    return lambda leaves, waits: run(list(leaves), list(waits))


def _size_bytes(leaf: Array) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize


def _packs(
    leaves: Sequence[Array], dims: Sequence[Dims], num_shards_held: int, bucket_bytes: float, others: Sequence[int]
) -> tuple[list[list[int]], list[int]]:
    """(groups of leaves of one dtype that share a collective, leaves with their own collective), by index.

    `others` and leaves without a sharded dim are in neither.
    """
    sizes = [_size_bytes(leaf) * num_shards_held for leaf in leaves]
    small, alone = defaultdict(list), []
    for i, (leaf, each) in enumerate(zip(leaves, dims, strict=True)):
        if each.shard is None or i in others:
            continue
        if sizes[i] <= SMALL_BYTES:
            small[leaf.dtype].append(i)
        else:
            alone.append(i)
    packs = [pack for of_dtype in small.values() for pack in fused(of_dtype, sizes, bucket_bytes)]
    alone += [pack[0] for pack in packs if len(pack) == 1]
    return [pack for pack in packs if len(pack) > 1], sorted(alone)


def _sharded_dim(dims: Dims) -> int:
    assert dims.shard is not None  # leaves that are not sharded are in no pack
    return dims.shard


def _insert(index: Sequence[T], dim: int, value: T | int) -> tuple[T | int, ...]:
    return (*index[:dim], value, *index[dim:])


def all_gather(
    shards: Sequence[Array],
    dims: Sequence[Dims],
    axes: Axes,
    options: CollectiveOptions = LEAVES_WHOLE,
    waits: Sequence[Array] = (),
    rows: bool = False,
) -> Communicated:
    """The full leaves of a unit. Leaves that every device holds in full are returned as they are.

    If collectives are sequential, packs of small leaves come first, and then large leaves in the order given.

    Args:
        shards: this device's shard of each leaf.
        dims: of each leaf.
        axes: the data axes.
        options: how the leaves are communicated.
        waits: events that no collective starts before.
        rows: whether leaves that are not cut into pieces are communicated as [N, shard]. The GPU compiler lays out the
            operand of a collective with the communicated dim outermost, and everything that is computed from the shard
            follows: without rows, every optimizer update copied and transposed its state. With rows only the full form
            is transposed.

    Cost: receives (N-1)/N of the sharded leaves' full bytes, and holds the full leaves; 1/M of both for a leaf that is
    also divided over M devices of other axes. A leaf that is gathered in pieces is copied from them.
    """
    specs = _stored_specs(dims, axes), [each.model_spec for each in dims]
    return _on_held_parts(lambda parts, turns: _gather(parts, dims, axes, turns, rows), specs, options)(shards, waits)


def _stored_specs(dims: Sequence[Dims], axes: Axes) -> list[PartitionSpec]:
    """The specs of shards over the axes that are left to the compiler."""
    return [each.model_spec if axes.num_context == 1 else each.stored_spec for each in dims]


def _gather(shards: Sequence[Array], dims: Sequence[Dims], axes: Axes, turns: Turns, rows: bool) -> list[Array]:
    if axes.num_shards == 1:
        return list(shards)
    full = list(shards)
    coded = [i for i, each in enumerate(dims) if each.wire.gather and each.shard is not None]
    packs, alone = _packs(shards, dims, axes.num_shards, turns.options.bucket_bytes, coded)
    for pack in packs:
        buffer = jnp.concatenate([shards[i].reshape(-1) for i in pack])
        flat = turns.done(gather_rows(turns.ready(buffer), axes))  # [N, elements of the packed shards]
        for i, part in zip(pack, _columns(flat, [math.prod(shards[i].shape) for i in pack]), strict=True):
            full[i] = _from_rows(part, shards[i].shape, _sharded_dim(dims[i]))
    for i, leaf in _gather_encoded({i: shards[i] for i in coded}, dims, axes, turns):
        full[i] = leaf
    for i in alone:
        full[i] = _gather_leaf(shards[i], _sharded_dim(dims[i]), axes, turns, rows)
    return [each.padding.crop(leaf) for leaf, each in zip(full, dims, strict=True)]


def _gather_leaf(shard: Array, dim: int, axes: Axes, turns: Turns, rows: bool) -> Array:
    n, shape = axes.num_shards, shard.shape
    pieces = Pieces.of(shape, n * shard.dtype.itemsize, turns.options.bucket_bytes, dim)
    if pieces.piece == shape and (rows or axes.prefer_rows):
        return _from_rows(turns.done(gather_rows(turns.ready(shard), axes)), shape, dim)
    if pieces.piece == shape:
        return turns.done(lax.all_gather(turns.ready(shard), axes.shard, axis=dim, tiled=True))

    def move(start: tuple[Array, ...], full: Array) -> Array:
        part = turns.ready(lax.dynamic_slice(shard, start, pieces.piece))
        moved = row_major(jnp.moveaxis(gather_rows(part, axes), 0, dim))
        return lax.dynamic_update_slice(full, moved, _insert(start, dim, 0))

    full = turns.done(pieces.loop(move, jnp.zeros(_insert(shape, dim, n), shard.dtype)))  # [.., N, s, ..]
    return full.reshape(*shape[:dim], n * shape[dim], *shape[dim + 1 :])


def _gather_encoded(
    shards: dict[int, Array], dims: Sequence[Dims], axes: Axes, turns: Turns
) -> Iterator[tuple[int, Array]]:
    """The full leaves, by index, whose shards are sent as their `wire` says."""
    wires = {i: dims[i].wire for i in shards}
    sent = {i: blocks.encode(shard[None], wires[i].gather, wires[i].blocks) for i, shard in shards.items()}
    for group in _sent_together(sent, axes, turns.options):
        buffer = jnp.concatenate([sent[i][0] for i in group])
        rows = _gather_leaf(buffer, 0, axes, turns, rows=True).reshape(axes.num_shards, -1)
        for i, part in zip(group, _columns(rows, [sent[i].shape[1] for i in group]), strict=True):
            values = blocks.decode(part, wires[i].gather, wires[i].blocks, shards[i], shards[i].dtype)
            yield i, _from_rows(values, shards[i].shape, _sharded_dim(dims[i]))


def _sent_together(sent: dict[int, Array], axes: Axes, options: CollectiveOptions) -> list[list[int]]:
    """The leaves, by index, that share a collective: all of them, in the order of their uses, if buckets are large."""
    sizes = {i: axes.num_shards * a.shape[1] * a.dtype.itemsize for i, a in sent.items()}
    return [[i] for i in sent] if options.sequential else fused(list(sent), sizes, options.bucket_bytes)


def _columns(rows: Array, lengths: Sequence[int]) -> list[Array]:
    """Cuts [N, sum of lengths] into [N, length] each."""
    return jnp.split(rows, np.cumsum(lengths)[:-1].tolist(), axis=1)


def _from_rows(rows: Array, shard_shape: tuple[int, ...], dim: int) -> Array:
    """Converts [N, shard] to the full leaf. The shard may be flat."""
    n = rows.shape[0]
    stacked = jnp.moveaxis(rows.reshape(n, *shard_shape), 0, dim)
    return stacked.reshape(*shard_shape[:dim], n * shard_shape[dim], *shard_shape[dim + 1 :])


def _split(leaf: Array, n: int, dim: int) -> Array:
    """Reshapes the full leaf to [.., N, s, ..]: `dim` is split into N shards."""
    return leaf.reshape(*leaf.shape[:dim], n, leaf.shape[dim] // n, *leaf.shape[dim + 1 :])


def _to_rows(leaf: Array, n: int, dim: int) -> Array:
    """Converts the full leaf to [N, shard]."""
    return jnp.moveaxis(_split(leaf, n, dim), dim, 0)


def reduce_scatter(
    grads: Sequence[Array],
    dims: Sequence[Dims],
    axes: Axes,
    options: CollectiveOptions = LEAVES_WHOLE,
    waits: Sequence[Array] = (),
    rows: bool = False,
) -> Communicated:
    """This device's shard of each gradient, summed over the shard axes. Leaves without a sharded dim are all-reduced.

    The arguments are as of `all_gather`, with gradients of the full leaves.

    Cost: sends (N-1)/N of the sharded leaves' full bytes, and 2(N-1)/N of the others'.
    """
    of_rows = axes.of_rows
    pad = lambda grads: [each.padding.pad(grad) for grad, each in zip(grads, dims, strict=True)]
    if axes.num_context == 1:
        specs = [each.model_spec for each in dims]
        scatter = lambda parts, turns: _scatter(pad(parts), dims, axes, turns, rows)
        return _on_held_parts(scatter, (specs, specs), options)(grads, waits)

    scatter = lambda parts, turns: _scatter(parts, dims, of_rows, turns, rows)
    specs = _stored_specs(dims, axes)
    return _on_held_parts(scatter, (specs, specs), options)(pad(grads), waits)


def _scatter(grads: Sequence[Array], dims: Sequence[Dims], axes: Axes, turns: Turns, rows: bool) -> list[Array]:
    """The shards of gradients, which have their zeros already, and of which a device along `context` has its part."""
    if axes.num_shards == 1:
        return list(grads)
    shards = list(grads)
    coded = [i for i, each in enumerate(dims) if each.wire.scatter and each.shard is not None]
    packs, alone = _packs(grads, dims, 1, turns.options.bucket_bytes, coded)
    whole = [i for i, each in enumerate(dims) if each.shard is None]
    for i, shard in _scatter_encoded({i: grads[i] for i in coded}, dims, axes, turns):
        shards[i] = shard
    for i in alone:
        shards[i] = _scatter_leaf(grads[i], _sharded_dim(dims[i]), axes, turns, rows)
    for pack in packs:
        flat = [_to_rows(grads[i], axes.num_shards, _sharded_dim(dims[i])).reshape(axes.num_shards, -1) for i in pack]
        buffer = turns.ready(jnp.concatenate(flat, axis=1))
        summed = turns.done(_psum_scatter(buffer, 0, axes, turns.options.group))
        for i, part in zip(pack, _columns(summed, [row.shape[1] for row in flat]), strict=True):
            shape = list(grads[i].shape)
            shape[_sharded_dim(dims[i])] //= axes.num_shards
            shards[i] = part.reshape(shape)
    for i, total in zip(whole, _sum([grads[i] for i in whole], axes.shard, axes, turns), strict=True):
        shards[i] = total
    return shards


def _scatter_encoded(
    grads: dict[int, Array], dims: Sequence[Dims], axes: Axes, turns: Turns
) -> Iterator[tuple[int, Array]]:
    """The shards of gradients, by index, whose parts are sent as their `wire` says, and summed here, in fp32."""
    wires = {i: dims[i].wire for i in grads}
    rows = {i: _to_rows(grad, axes.num_shards, _sharded_dim(dims[i])) for i, grad in grads.items()}
    sent = {i: blocks.encode(rows[i], wires[i].scatter, wires[i].blocks) for i in grads}
    for group in _sent_together(sent, axes, turns.options):
        received = _exchange_rows(jnp.concatenate([sent[i] for i in group], axis=1), axes, turns)
        for i, part in zip(group, _columns(received, [sent[i].shape[1] for i in group]), strict=True):
            dtype = grads[i].dtype
            row, wide = jax.ShapeDtypeStruct(rows[i].shape[1:], dtype), jnp.promote_types(dtype, jnp.float32)
            yield i, blocks.decode(part, wires[i].scatter, wires[i].blocks, row, wide).sum(0).astype(dtype)


def exchange_rows(
    rows: Array, axes: Axes, options: CollectiveOptions = LEAVES_WHOLE, waits: Sequence[Array] = ()
) -> Communicated:
    """Sends row k of [N, length] to device k along the shard axes. Row k of the one result is from device k.

    Cost: sends (N-1)/N of the bytes.
    """
    move = lambda parts, turns: [_exchange_rows(parts[0], axes, turns)]
    return _on_held_parts(move, ([REPLICATED], [REPLICATED]), options)([rows], waits)


def _exchange_rows(rows: Array, axes: Axes, turns: Turns) -> Array:
    n, length = rows.shape
    pieces = Pieces.of((length,), n * rows.dtype.itemsize, turns.options.bucket_bytes)
    send = lambda part: lax.all_to_all(part, axes.shard, 0, 0, tiled=True)
    if pieces.count == 1:
        return turns.done(send(turns.ready(rows)))

    def move(start: tuple[Array, ...], received: Array) -> Array:
        part = turns.ready(lax.dynamic_slice(rows, _insert(start, 0, 0), _insert(pieces.piece, 0, n)))
        return lax.dynamic_update_slice(received, send(part), _insert(start, 0, 0))

    return turns.done(pieces.loop(move, jnp.zeros_like(rows)))


def _psum_scatter(value: Array, dim: int, axes: Axes, group: int) -> Array:
    """`lax.psum_scatter` of the parts that `dim` is cut into.

    The option `xla_gpu_enable_reduce_scatter_combine_by_dim` lets the GPU compiler combine reduce-scatters of the same
    dim alone. The dim is moved to a place that is the same for all reductions of a group. This moves nothing in memory,
    since the compiler lays out the operand with this dim in front, wherever it stands.

    The compiler for TPUs combines no reductions; see `sum_rows`.
    """
    if axes.prefer_rows:
        return sum_rows(_to_rows(value, axes.num_shards, dim), axes)
    padded = lax.expand_dims(value, range(value.ndim, group + 1))
    moved = lax.psum_scatter(jnp.moveaxis(padded, dim, group), axes.shard, scatter_dimension=group, tiled=True)
    return lax.squeeze(jnp.moveaxis(moved, group, dim), range(value.ndim, padded.ndim))


def _scatter_leaf(grad: Array, dim: int, axes: Axes, turns: Turns, rows: bool) -> Array:
    n = axes.num_shards
    shape = (*grad.shape[:dim], grad.shape[dim] // n, *grad.shape[dim + 1 :])
    pieces = Pieces.of(shape, n * grad.dtype.itemsize, turns.options.bucket_bytes, dim)
    if pieces.piece == shape and rows:
        return turns.done(sum_rows(turns.ready(_to_rows(grad, n, dim)), axes))
    if pieces.piece == shape:
        return turns.done(_psum_scatter(turns.ready(grad), dim, axes, turns.options.group))
    split = _split(grad, n, dim)

    def move(start: tuple[Array, ...], shard: Array) -> Array:
        part = turns.ready(lax.dynamic_slice(split, _insert(start, dim, 0), _insert(pieces.piece, dim, n)))
        moved = sum_rows(jnp.moveaxis(row_major(part), dim, 0), axes)
        return lax.dynamic_update_slice(shard, moved, start)

    return turns.done(pieces.loop(move, jnp.zeros(shape, grad.dtype)))


def all_reduce(
    values: Sequence[Array],
    names: tuple[str, ...],
    axes: Axes,
    options: CollectiveOptions = LEAVES_WHOLE,
    dims: Sequence[Dims] | None = None,
    waits: Sequence[Array] = (),
    are_shards: bool = False,
) -> Communicated:
    """Sums each value over the axes `names`, in as few collectives as `bucket_bytes` allows.

    Leaves, or their shards, have `dims`. Along `context`, the compiler sums.

    Cost: sends 2(N-1)/N of the bytes; nothing if there is a single device along the axes.
    """
    specs = None
    if dims is not None:
        of_leaves = _stored_specs(dims, axes) if are_shards else [each.model_spec for each in dims]
        specs = of_leaves, of_leaves
    return _on_held_parts(lambda parts, turns: _sum(parts, names, axes, turns), specs, options)(values, waits)


def _sum(values: Sequence[Array], names: tuple[str, ...], axes: Axes, turns: Turns) -> list[Array]:
    if axes.size(names) == 1:
        return list(values)
    totals = list(values)
    for group in fused(range(len(values)), [_size_bytes(value) for value in values], turns.options.bucket_bytes):
        parts = [values[i] for i in group]
        if len(group) == 1:
            summed = [_sum_value(parts[0], names, axes, turns)]
        else:
            summed = turns.done(lax.psum(turns.ready(parts), names))
        for i, total in zip(group, summed, strict=True):
            totals[i] = total
    return totals


def _sum_value(value: Array, names: tuple[str, ...], axes: Axes, turns: Turns) -> Array:
    pieces = Pieces.of(value.shape, value.dtype.itemsize, turns.options.bucket_bytes)
    if pieces.piece == value.shape:
        return turns.done(lax.psum(turns.ready(value), names))

    def move(start: tuple[Array, ...], total: Array) -> Array:
        part = turns.ready(lax.dynamic_slice(total, start, pieces.piece))
        return lax.dynamic_update_slice(total, lax.psum(part, names), start)

    return turns.done(pieces.loop(move, value))


def _on_replicated(fn: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Like `_on_held_parts`, for a function of an array that is the same along all other axes."""
    names = jax.sharding.get_abstract_mesh().auto_axes
    if not names:
        return fn
    return jax.shard_map(fn, in_specs=REPLICATED, out_specs=REPLICATED, axis_names={*names}, check_vma=False)


def along_context(fn: Callable[..., T], axes: Axes, in_specs: PyTree, out_specs: PyTree) -> Callable[..., T]:
    """Makes `fn` manual over the axis `context`, if there is one. The specs say what is divided over it."""
    if axes.num_context == 1:
        return fn
    return jax.shard_map(fn, in_specs=in_specs, out_specs=out_specs, axis_names={CONTEXT}, check_vma=False)


def gather_data(values: Array, axes: Axes) -> Array:
    """The values of all devices along the shard axes, concatenated in dim 0. It runs in `along_context`.

    Cost: receives (N-1)/N of the bytes of the result.
    """

    def gather(values: Array) -> Array:
        return gather_rows(values, axes).reshape(-1, *values.shape[1:])

    return _on_replicated(gather)(values)


def exchange(values: Array, axes: Axes, split_dim: int, concat_dim: int) -> Array:
    """Sends part k of `values`, cut in `split_dim`, to device k, and concatenates what arrives in `concat_dim`.

    Cost: sends (N-1)/N of the bytes of the values.
    """
    return _on_replicated(lambda v: lax.all_to_all(v, axes.shard, split_dim, concat_dim, tiled=True))(values)


def device_index(axes: Axes) -> Array:
    """The position of this device along the data axes, as int32."""
    return lax.axis_index(axes.data) if axes.num_devices > 1 else jnp.int32(0)
