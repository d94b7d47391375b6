"""Batches: which arrays are split over the devices, how they are placed, checked, cast and cut into microbatches."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from zerojax.sharding.axes import Axes
from zerojax.sharding.placement import path_text
from zerojax.sharding.precision import Precision
from zerojax.step.config import ZeroConfig, check_integer
from zerojax.step.models import is_key
from zerojax.utils.typing import Array, ArrayLike, Aval, DTypeLike, PyTree, Shape
from zerojax.utils.warn import warn

_KEEPS_DTYPE = re.compile("mask|weight", re.IGNORECASE)  # in a name: arrays that are summed, not computed with


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Whole:
    """Marks what every device gets whole in a batch, such as class weights, a table or a PRNG key that is no scalar.

    The loss function gets `value` itself. Its floating arrays keep their dtype.

    Attributes:
        value: an array or a tree of arrays, the same in every process. All other arrays of a batch have rows, and are
            split over the devices in dim 0.
    """

    value: PyTree


class RowsOfSet(NamedTuple):
    """A batch of an evaluation, in which each device has only rows of the data set, or none."""

    batch: PyTree  # the batch
    # bool array of shape (rows,), whether a row is in the data set; the same for all rows of a device
    included: Array | np.ndarray


def is_whole(node: object) -> bool:
    return isinstance(node, Whole)


def unwrapped(batch: PyTree) -> PyTree:
    """The batch as a loss function gets it: what is marked `Whole` without its mark."""
    return jax.tree.map(lambda node: node.value if is_whole(node) else node, batch, is_leaf=is_whole)


def map_rows(fn: Callable[[Any], object], batch: PyTree, otherwise: Callable[[Any], object] = lambda a: a) -> PyTree:
    """Applies `fn` to the arrays with rows, and `otherwise` to scalars and to what is marked `Whole`."""

    def apply(node: PyTree) -> PyTree:
        if is_whole(node):
            return Whole(jax.tree.map(otherwise, node.value))
        return fn(node) if np.ndim(node) else otherwise(node)

    return jax.tree.map(apply, batch, is_leaf=is_whole)


def batch_specs(axes: Axes, batch: PyTree) -> PyTree:
    """The specs of a batch: rows are split over the data axes in dim 0; all else is replicated."""
    return map_rows(lambda _: PartitionSpec(axes.data), batch, lambda _: PartitionSpec())


def _is_process_local(a: ArrayLike) -> bool:
    """Whether an array has the rows of this process only. Avals, tracers and global arrays have those of all."""
    if isinstance(a, jax.Array) and not isinstance(a, Tracer):
        return a.is_fully_addressable
    return isinstance(a, np.ndarray)


def _global_shape(config: ZeroConfig, a: ArrayLike) -> Shape:
    """The shape of an array with rows over all processes."""
    shape = np.shape(a)
    return (shape[0] * config.num_row_groups, *shape[1:]) if _is_process_local(a) else shape


def num_global_rows(config: ZeroConfig, batch: PyTree) -> int:
    """The number of rows of a batch over all processes."""
    return max(jax.tree.leaves(map_rows(lambda a: _global_shape(config, a)[0], batch, lambda a: 0)), default=0)


def batch_avals(config: ZeroConfig, batch: PyTree) -> PyTree:
    """The avals of a global batch, with shardings."""

    def aval(a: ArrayLike, shape: Shape, spec: PartitionSpec) -> Aval:
        dtype = jax.dtypes.canonicalize_dtype(dtype_of(a), allow_extended_dtype=True)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(config.mesh, spec))

    whole, rows = PartitionSpec(), PartitionSpec(config.axes.data)
    return map_rows(lambda a: aval(a, _global_shape(config, a), rows), batch, lambda a: aval(a, np.shape(a), whole))


def dtype_of(a: ArrayLike) -> DTypeLike:
    """The dtype of an array; of a number, that of its NumPy array."""
    dtype = getattr(a, "dtype", None)
    return np.asarray(a).dtype if dtype is None else dtype


def shard_batch(config: ZeroConfig, batch: PyTree) -> PyTree:
    """Converts a batch to global arrays, split over the data axes. Each process passes its own rows.

    Arrays that are global already are returned unchanged.
    """

    def put(a: ArrayLike, spec: PartitionSpec) -> Array:
        sharding = NamedSharding(config.mesh, spec)
        if isinstance(a, jax.Array) and (not _is_process_local(a) or a.sharding.is_equivalent_to(sharding, a.ndim)):
            return a
        if isinstance(a, jax.Array) and jax.process_count() == 1:
            return jax.device_put(a, sharding)
        return jax.make_array_from_process_local_data(sharding, np.asarray(a))

    return jax.tree.map(put, batch, batch_specs(config.axes, batch))


def _label(path: Sequence[object]) -> str:
    """An array of a batch: its path in quotes, or what it is if the path has no names."""
    text = path_text(path)
    return repr(text) if text and not text.isdigit() else f"element {text}" if text else "the array"


def check_batch(config: ZeroConfig, batch: PyTree, num_microbatches: int) -> None:
    """Raises ValueError unless a batch is of numbers, with equally many rows, which devices x microbatches divide.

    The batch is that of this process, global arrays or avals, with `Whole` for what has no rows.
    """
    # Every leaf is an array of numbers.
    for path, a in jax.tree_util.tree_leaves_with_path(unwrapped(batch)):
        _check_dtype(path_text(path) or "the batch", a)

    # All that have rows have as many.
    with_paths = jax.tree_util.tree_leaves_with_path(batch, is_leaf=is_whole)
    rows = [(_label(path), _global_shape(config, a)) for path, a in with_paths if not is_whole(a) and np.ndim(a)]
    if not rows:
        raise ValueError("batch: no array with rows\n  fix:      pass arrays whose dim 0 is the batch")
    path, shape = rows[0]
    for other, other_shape in rows:
        if other_shape[0] != shape[0]:
            raise ValueError(
                f"batch: {path} and {other} have different numbers of rows\n"
                f"  got:      shapes {shape} and {other_shape}\n"
                f"  fix:      pass the same rows in all arrays, zerojax.Whole(array) for what every device gets whole"
            )

    # They divide.
    parts, count = config.axes.num_devices * num_microbatches, config.num_row_groups
    over = f" over {count} processes" if count > 1 else ""
    if not shape[0]:
        raise ValueError(
            f"batch: {path} has no rows\n  got:      shape {shape}{over}\n"
            f"  fix:      pass {_rows_that_fit(shape[0], parts, count)}"
        )
    if shape[0] % parts:
        split = f"{shape[0]} % ({config.axes.num_devices} x {num_microbatches}) = {shape[0] % parts}"
        padded = _nearest_multiples(shape[0], math.lcm(parts, count))[-1] // count
        raise ValueError(
            f"batch: {path} does not divide into devices x microbatches\n"
            f"  got:      shape {shape}{over}; {split}\n"
            f"  fix:      pass {_rows_that_fit(shape[0], parts, count)}; or change num_microbatches; "
            f"zero.pad_batch(batch, {padded}) adds rows of weight 0; zerojax.evaluate takes any number of rows"
        )


def warn_of_keys(batch: PyTree) -> None:
    """Warns of random keys in a batch that are not marked `Whole`: scalars, which all devices get."""
    with_paths = jax.tree_util.tree_leaves_with_path(batch, is_leaf=is_whole)
    found = [_label(path) for path, a in with_paths if not is_whole(a) and not np.ndim(a) and is_key(a)]
    if found:
        warn(
            f"batch: {', '.join(found)} is a random key, with which all devices draw the same numbers\n"
            f"  got:      a key for the rows of every device\n"
            f"  fix:      a third parameter `key` of the loss, which differs for each device and step; or "
            f"jax.random.fold_in(key, jax.lax.axis_index('data')); zerojax.Whole(key) if it is meant"
        )


def _nearest_multiples(num: int, of: int) -> list[int]:
    """The next smaller multiple, if it is not 0, and the next larger one."""
    below = num // of * of
    return [each for each in (below, below + of) if each]


def _rows_that_fit(num_rows: int, parts: int, count: int) -> str:
    """The numbers of rows nearest to `num_rows` that `parts` divides and `count` processes can share, in words."""
    parts = math.lcm(parts, count)
    nearest = _nearest_multiples(num_rows, parts)
    listed = lambda numbers: " or ".join(map(str, numbers))
    if count == 1:
        return f"{listed(nearest)} rows, or another multiple of {parts}"
    own = listed(rows // count for rows in nearest)
    return f"{listed(nearest)} rows over all processes, {own} in each, or another multiple of {parts}"


def num_microbatches(config: ZeroConfig, num_rows: int, most_rows: int) -> int:
    """See `Zero.num_microbatches`."""
    check_integer("num_microbatches: num_rows", num_rows, 1)
    check_integer("num_microbatches: most_rows", most_rows, 1)
    devices = config.axes.num_devices
    rows, rest = divmod(num_rows, devices)
    if rest:
        fewer = max(n for n in range(1, devices) if num_rows % n == 0)
        more = min((n for n in range(devices + 1, num_rows + 1) if num_rows % n == 0), default=None)
        counts = f"{fewer}" if more is None else f"{fewer} or {more}"
        raise ValueError(
            f"num_microbatches: the rows of the batch do not divide over the devices\n"
            f"  got:      {num_rows} rows, {devices} devices; {num_rows} % {devices} = {rest}\n"
            f"  fix:      train on {counts} devices; or with {_rows_that_fit(num_rows, devices, config.num_row_groups)}"
        )
    return next(k for k in range(1, rows + 1) if rows % k == 0 and rows // k <= most_rows)


def _check_dtype(path: str, a: ArrayLike) -> None:
    dtype = dtype_of(a)
    if not any(jnp.issubdtype(dtype, kind) for kind in (jnp.number, jnp.bool_, jax.dtypes.prng_key)):
        got = f"dtype {dtype}" if hasattr(a, "dtype") else repr(a)
        raise ValueError(
            f"batch: {path!r} is not an array of numbers\n"
            f"  got:      {got}\n"
            f"  fix:      leave it out, or convert it, for example strings to the integers of a tokenizer"
        )


def cast_batch(precision: Precision, batch: PyTree) -> PyTree:
    """Casts floating arrays of a batch to compute_dtype, as `Precision.cast_inputs` says."""

    def is_cast(name: str, a: Array) -> bool:
        option = precision.cast_inputs
        if isinstance(option, bool):
            return option and a.ndim > 1 and not _KEEPS_DTYPE.search(name)
        return any(fnmatchcase(name, pattern) for pattern in option)

    def cast(path: Sequence[object], a: Array) -> Array:
        if is_whole(a) or not jnp.issubdtype(a.dtype, jnp.floating) or not is_cast(path_text(path), a):
            return a
        return a.astype(precision.compute_dtype)

    return jax.tree_util.tree_map_with_path(cast, batch, is_leaf=is_whole)


def microbatches(batch: PyTree, num: int) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
    """Cuts a batch into equal parts along dim 0.

    Returns:
        (the arrays with rows, reshaped to (num, rows of a microbatch, ...), in a flat list; a function that returns the
        microbatch of one entry of each, with what is the same in all microbatches).
    """
    leaves, tree = jax.tree.flatten(batch)
    has_rows = jax.tree.leaves(map_rows(lambda _: True, batch, lambda _: False))
    rows = [a.reshape(num, a.shape[0] // num, *a.shape[1:]) for a, flag in zip(leaves, has_rows, strict=True) if flag]

    def microbatch(rows: PyTree) -> PyTree:
        items = iter(rows)
        return tree.unflatten([next(items) if flag else a for a, flag in zip(leaves, has_rows, strict=True)])

    return rows, microbatch


def pad_batch(config: ZeroConfig, batch: PyTree, num_rows: int | None) -> tuple[PyTree, np.ndarray]:
    """See `Zero.pad_batch`."""
    counts = set(jax.tree.leaves(map_rows(lambda a: np.shape(a)[0], batch, lambda a: 0))) - {0}
    if len(counts) != 1:
        raise ValueError(
            f"pad_batch: {'no array with rows' if not counts else 'different numbers of rows'}\n"
            f"  got:      {sorted(counts)}\n"
            f"  fix:      pass the same rows in all arrays, and zerojax.Whole(array) for what every device gets whole"
        )
    (count,) = counts
    parts = max(config.axes.num_devices // config.num_row_groups, 1)
    target = -(-count // parts) * parts if num_rows is None else num_rows
    if target < count:
        raise ValueError(
            f"pad_batch: the batch has more rows than it is padded to\n"
            f"  got:      {count} rows, num_rows={num_rows}\n"
            f"  fix:      pass num_rows of at least {count}"
        )
    repeated = np.minimum(np.arange(target), count - 1)  # rows that are valid input, unlike zeros
    return map_rows(lambda a: a[repeated], batch), (np.arange(target) < count).astype(np.float32)
