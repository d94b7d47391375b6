"""What a trace of the loss on one device's rows shows: uses of leaves, local statistics, and invalid constraints."""

from __future__ import annotations

import contextlib
import dataclasses
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec

from zerojax.sharding.placement import path_text
from zerojax.step import models
from zerojax.step.batch import batch_specs, cast_batch, map_rows, num_global_rows
from zerojax.step.config import leaf_specs, shard_map_over_data
from zerojax.step.gradient import DeviceGradient
from zerojax.step.loss_errors import LossError, constraint_text, kernel_text
from zerojax.step.models import Output, is_key
from zerojax.step.state_keys import StateKeys, may_be_raw, may_change
from zerojax.transform import jaxprs
from zerojax.transform.closed_over import ClosedOver, array_with_all_rows
from zerojax.transform.raw_keys import raw_keys
from zerojax.transform.row_sums import sums_over_rows
from zerojax.transform.segmentation import RowsLookedUp
from zerojax.typing import Array
from zerojax.warn import line_of, warn


class Use(NamedTuple):
    """A segment of the loss that reads a leaf.

    Attributes:
        place: its position in the forward pass, counted from 0.
        lookup: the rows that a device looks up in the leaf in one microbatch, without gathering it; None if the leaf is
            gathered.
    """

    place: int
    lookup: RowsLookedUp | None = None


def uses(gradient: DeviceGradient, args: Any) -> list[tuple[Use, ...]]:
    """For each leaf, the segments of the loss that read it.

    There is none if the loss does not use the leaf, and more than one if several units share it.

    Args:
        gradient: of the step.
        args: avals of global arrays: (parameter leaves, model state, batch, key).
    """

    def find(shards: Any, model_state: Any, batch: Any, key: Any) -> list[tuple[Use, ...]]:
        batch = map_rows(lambda a: a[: a.shape[0] // gradient.settings.num_microbatches], batch)
        args = gradient.definition.for_compute(shards), gradient.fold(model_state, 0), batch, key
        found = [segment for segment in gradient.segmented_loss(*args)[0].traced.segments if segment.leaves]
        places = list(enumerate(found))
        return [
            tuple(Use(k, segment.lookup) for k, segment in places if leaf in segment.leaves)
            for leaf in range(len(gradient.definition.leaves))
        ]

    return _on_device(gradient, find, args)


def warn_of_local_statistics(gradient: DeviceGradient, args: Any) -> None:
    """Warns if running statistics are those of each device's rows. `args` are as in `uses`."""
    definition, axes = gradient.definition, gradient.config.axes
    with_paths = jax.tree_util.tree_leaves_with_path(args[1])
    moves = [
        jnp.issubdtype(a.dtype, jnp.floating) and not fixed
        for (_, a), fixed in zip(with_paths, definition.fixed_state, strict=True)
    ]
    if axes.num_devices == 1 or not any(moves):
        return

    def find(shards: Any, model_state: Any, batch: Any, key: Any) -> list[bool]:
        args = definition.for_compute(shards), model_state, cast_batch(gradient.config.precision, batch), key
        segmented, _, unflatten = gradient.segmented_loss(*args)
        return jax.tree.leaves(unflatten(jaxprs.is_local(segmented.traced.closed.jaxpr, axes.data)).model_state)

    flags = zip(with_paths, moves, _on_device(gradient, find, args), strict=True)
    if local := [path_text(path) for (path, _), moves, is_local in flags if moves and is_local]:
        axis = axes.data[0] if len(axes.data) == 1 else axes.data
        warn(
            f"loss: {len(local)} running statistics are computed from each device's rows, and then averaged\n"
            f"  got:      {', '.join(local[:5])}{', ...' if len(local) > 5 else ''}\n"
            f"  fix:      BatchNorm(..., axis_name={axis!r}) normalizes over all rows, as one device would"
        )


def with_state_keys(gradient: DeviceGradient, args: Any) -> DeviceGradient:
    """`gradient`, which knows the keys in the model state from their use. `args` are as in `uses`.

    Only a model state that may have such keys is traced.
    """
    if not may_change(args[1]):
        return gradient

    def find(shards: Any, model_state: Any, batch: Any, key: Any) -> list[StateKeys]:
        jaxpr = _closed_loss(gradient, shards, model_state, batch, key)[0].jaxpr
        leaves, start = jax.tree.leaves(model_state), len(gradient.definition.leaves)
        inputs = list(zip(leaves, jaxpr.invars[start:], strict=False))
        used = set(raw_keys(jaxpr, [v for a, v in inputs if may_be_raw(a)]))
        kept = jaxprs.forwards(jaxpr)[-len(leaves) :]
        raw = tuple(v in used for _, v in inputs)
        are_keys = [is_raw or is_key(a) for is_raw, a in zip(raw, leaves, strict=True)]
        return [StateKeys(raw, tuple(flag and not k for flag, k in zip(are_keys, kept, strict=True)))]

    return dataclasses.replace(gradient, state_keys=_on_device(gradient, find, args)[0])


def check_loss(gradient: DeviceGradient, args: Any) -> bool:
    """Checks that the loss constrains no sharding over the data axes, and divides its kernels over the others.

    JAX finds either only when it compiles, which for `value_and_grad` is in the user's own jit. `args` are as in
    `uses`.

    Returns:
        Whether the loss closes over values of a trace that it is called in.

    Raises:
        LossError: if it constrains one, or if JAX would have to divide a kernel.
    """
    config = gradient.config
    divided = [name for name in config.other_axes if config.mesh.shape[name] > 1]

    closed_over: list[Any] = []

    def find(*args: Any) -> list[str]:
        closed, _ = _closed_loss(gradient, *args)
        closed_over.extend(a for a in closed.consts if isinstance(a, Tracer))
        constraints = jaxprs.constraints(closed.jaxpr, config.axes.data)
        kernels = jaxprs.partitioned_kernels(closed.jaxpr) if divided else ()
        return [
            *(constraint_text(str(spec), line_of(trace)) for spec, trace in constraints),
            *(kernel_text(name, line_of(trace), divided) for name, trace in kernels),
        ]

    for text in _on_device(gradient, find, args):
        raise LossError(text)
    return bool(closed_over)


_CLOSED_OVER = "put arrays with a row for each row of the batch into the batch, instead of closing over them"


@contextlib.contextmanager
def explained_by_rows(gradient: DeviceGradient, args: Any) -> Iterator[None]:
    """Explains an error of a loss that works with all rows of the batch only. Others stay as they are.

    `args` are as in `uses`.

    Raises:
        LossError: in place of an error of the loss that is not raised if each device has all rows.
    """
    parts = gradient.config.axes.num_devices * gradient.settings.num_microbatches

    def fails(rows: Any, num_parts: int) -> bool:
        def trace(shards: Any, model_state: Any, batch: Any, key: Any) -> list[Any]:
            batch = map_rows(lambda a: a[: a.shape[0] // num_parts], batch)
            return [_closed_loss(gradient, shards, model_state, batch, key)]

        try:
            _on_device(gradient, trace, args, rows)
        except Exception:
            return True
        return False

    try:
        yield
    except LossError:
        raise
    except Exception as error:
        if parts == 1 or fails(PartitionSpec(), 1) or not fails(PartitionSpec(), parts):
            raise
        rows, seen = num_global_rows(args[2]), textwrap.shorten(str(error), 200, placeholder=" ...").rstrip(".")
        raise LossError(
            f"loss: works with all {rows} rows of the batch, but not with the {rows // parts} that a device has at a "
            f"time\n"
            f"  got:      {type(error).__name__}: {seen}, at {line_of(error) or 'an unknown line'}\n"
            f"  fix:      {_CLOSED_OVER}, and count rows by x.shape[0]"
        ) from error


def warn_of_rows(gradient: DeviceGradient, args: Any) -> None:
    """Warns if the loss reads rows that are not those of its device, and if it or a metric is a sum over rows: the mean
    of those of all devices and microbatches is not.

    `args` are as in `uses`.
    """
    parts = gradient.config.axes.num_devices * gradient.settings.num_microbatches
    if parts == 1:
        return
    found, array = _seen_of_rows(gradient, args)
    if array is not None:
        rows = num_global_rows(args[2])
        line = line_of(array.trace and array.trace.as_python_traceback())
        warn(
            f"loss: it closes over an array with as many rows as the batch, and a device does not get its part of it\n"
            f"  got:      {array.aval.dtype}{list(array.aval.shape)} at {line or 'an unknown line'}, where a device "
            f"has {rows // parts} of {rows} rows at a time\n"
            f"  fix:      {_CLOSED_OVER};\n"
            f"            what every device needs whole can be in it too, as zerojax.Whole(array)"
        )
    if found:
        warn(
            f"loss: {', '.join(found)} {'is a sum' if len(found) == 1 else 'are sums'} over rows\n"
            f"  got:      the mean of the sums of {parts} parts of the batch: 1/{parts} of the sum over all rows\n"
            f"  fix:      return the mean over rows; for a metric also zerojax.Weighted(sum, 0), which is the whole sum"
        )


def _seen_of_rows(gradient: DeviceGradient, args: Any) -> tuple[list[str], ClosedOver | None]:
    """(What the loss returns as a plain scalar that is a sum over rows: 'the loss', and metrics by name; an array with
    the rows of all devices that it closes over)."""

    def find(shards: Any, model_state: Any, batch: Any, key: Any) -> list[Any]:
        closed, output = _closed_loss(gradient, shards, model_state, batch, key)
        closed = jaxprs.inlined(closed, jaxprs.is_call)
        counts = jax.tree.leaves(map_rows(lambda a: np.full((), a.shape[0]), batch, lambda a: np.zeros((), int)))
        start = len(gradient.definition.leaves) + len(jax.tree.leaves(model_state))
        row_vars = [v for v, count in zip(closed.jaxpr.invars[start:], counts, strict=False) if count]
        flags = sums_over_rows(closed, row_vars, int(max(counts, default=0)))
        is_sum = jax.tree.unflatten(jax.tree.structure(output), flags)
        loss = ["the loss"] if is_sum.loss.sum and not output.is_weighted else []
        sums = [*loss, *(f"metric {name!r}" for name in sorted(output.plain) if is_sum.metrics[name].sum)]
        key_vars = [v for v in closed.jaxpr.invars if models.is_key(v.aval)]
        return [sums, array_with_all_rows(closed, row_vars, key_vars, num_global_rows(args[2]))]

    sums, array = _on_device(gradient, find, args)
    return sums, array


def traced_loss(gradient: DeviceGradient, args: Any) -> tuple[Any, Output]:
    """(The jaxpr of the loss on one device's rows, the shapes of its outputs). `args` are as in `uses`."""
    closed, output = _on_device(gradient, lambda *args: [_closed_loss(gradient, *args)], args)[0]
    return closed.jaxpr, output


def _closed_loss(gradient: DeviceGradient, shards: Any, model_state: Any, batch: Any, key: Any) -> tuple[Any, Output]:
    """(The closed jaxpr of the loss with full weights, the shapes of its outputs), on one device's rows."""
    definition, precision = gradient.definition, gradient.config.precision
    leaves = zip(definition.leaves, definition.for_compute(shards), strict=True)
    full = [jax.ShapeDtypeStruct(leaf.shape, shard.dtype) for leaf, shard in leaves]
    args = jax.tree.unflatten(definition.tree, full), model_state, cast_batch(precision, batch), key
    return jax.make_jaxpr(gradient.loss, return_shape=True)(*args)


def check_means_over_rows(gradient: DeviceGradient, args: Any) -> None:
    """Checks that the loss and its metrics can be means over rows, however these are divided into batches.

    Args:
        gradient: of the evaluation.
        args: as in `uses`.

    Raises:
        LossError: if the loss communicates over the data axes, or changes running statistics, if a metric is a plain
            scalar that is not floating, such as a count, or if the loss or a metric is seen to be a sum over rows.
    """
    axes, definition = gradient.config.axes, gradient.definition
    jaxpr, output = traced_loss(gradient, args)
    if any(jaxprs.communicates_over(equation, axes.data) for equation in jaxpr.eqns):
        raise LossError(
            f"evaluate: the loss communicates over {', '.join(map(repr, axes.data))}\n"
            f"  got:      a value that depends on which rows are in a batch, and is no mean over rows\n"
            f"  fix:      a loss without it; or zero.eval_step on batches of one size, and average these"
        )
    paths = jax.tree_util.tree_leaves_with_path(args[1])
    kept = jaxprs.forwards(jaxpr)[-len(paths) :] if paths else []
    flags = zip(paths, kept, definition.fixed_state, strict=True)
    changed = [
        path_text(path)
        for (path, a), is_kept, is_fixed in flags
        if jnp.issubdtype(a.dtype, jnp.floating) and not is_kept and not is_fixed
    ]
    if changed:
        raise LossError(
            f"evaluate: the loss changes running statistics, as in training\n"
            f"  got:      {', '.join(changed[:5])}{', ...' if len(changed) > 5 else ''}\n"
            f"  fix:      a loss that evaluates the model: use_running_average=True, or train=False"
        )
    for name in sorted(output.plain):
        dtype = output.metrics[name].sum.dtype
        if not jnp.issubdtype(dtype, jnp.floating):
            raise LossError(
                f"evaluate: metric {name!r} is no mean over rows\n  got:      dtype {dtype}\n"
                f"  fix:      return its mean, or zerojax.Weighted(sum, weight); for a count zerojax.Weighted(sum, 0)"
            )
    if found := _seen_of_rows(gradient, args)[0]:
        raise LossError(
            f"evaluate: {', '.join(found)} {'is a sum' if len(found) == 1 else 'are sums'} over rows\n"
            f"  got:      a value that grows with the number of rows, and is no mean over them\n"
            f"  fix:      return the mean over rows; for a metric also zerojax.Weighted(sum, 0), which is the whole sum"
        )


def _on_device(gradient: DeviceGradient, fn: Callable[..., list[Any]], args: Any, rows: Any = None) -> list[Any]:
    """What `fn` finds in a trace on one device's part of (parameter leaves, model state, batch, key).

    `rows` is the spec of all arrays of the batch, if it is not that of a step.
    """
    config, definition = gradient.config, gradient.definition
    replicated: Any = PartitionSpec()
    in_specs = (
        leaf_specs(config, definition.leaves, config.stage.shards_params),
        replicated,
        batch_specs(config.axes, args[2]) if rows is None else rows,
        replicated,
    )
    found: list[Any] = []

    def find(*device_args: Any) -> Array:
        found.extend(fn(*device_args))
        return jnp.int32(0)

    jax.eval_shape(shard_map_over_data(config, find, in_specs, replicated), *args)
    return found
