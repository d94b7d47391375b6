"""Traces the loss on one device's rows: which leaves it uses, what it may not do, and why it fails."""

from __future__ import annotations

import contextlib
import functools
import textwrap
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from zerojax.program import jaxprs
from zerojax.program.jaxprs import ClosedJaxpr
from zerojax.program.run import PartsOfLoss
from zerojax.program.segmentation import RowsLookedUp
from zerojax.program.tiles import Tiled
from zerojax.sharding.axes import REPLICATED
from zerojax.sharding.placement import by_path
from zerojax.step.batch import map_rows, num_global_rows
from zerojax.step.gradient import DeviceGradient, LossArgs, args_specs
from zerojax.step.losses import LossError, Output, constraint_text, kernel_text
from zerojax.step.over_data import shard_map_over_data
from zerojax.utils.text import abbreviate
from zerojax.utils.typing import Array
from zerojax.utils.warn import line_of

T = TypeVar("T")


def on_device(gradient: DeviceGradient, fn: Callable[[LossArgs], T], args: LossArgs, splits: bool = True) -> T:
    """The result of `fn`, which traces something on one device's part of the arguments, global arrays or avals.

    Without `splits`, the device gets all rows of the batch.
    """
    in_specs = args_specs(gradient, args.batch)
    found: list[T] = []

    def find(device_args: LossArgs) -> Array:
        found.append(fn(device_args))
        return jnp.int32(0)

    in_specs = in_specs if splits else in_specs._replace(batch=REPLICATED)
    jax.eval_shape(shard_map_over_data(gradient.config, find, (in_specs,), REPLICATED), args)
    return found[0]


def first_rows(args: LossArgs, num_parts: int) -> LossArgs:
    """The arguments with the first of equal parts of the batch."""
    return args._replace(batch=map_rows(lambda a: a[: a.shape[0] // num_parts], args.batch))


class LossTrace(NamedTuple):
    """A traced loss."""

    closed: ClosedJaxpr  # its jaxpr
    output: Output  # the shapes of its outputs
    args: LossArgs  # its arguments; in place of the parameters, a tree of avals


def trace_loss(gradient: DeviceGradient, args: LossArgs) -> LossTrace:
    """Traces the loss with full weights on the arguments of one device."""
    layout, args = gradient.layout, gradient.cast(args)
    leaves = zip(layout.leaves, args.params, strict=True)
    full = [jax.ShapeDtypeStruct(leaf.shape, shard.dtype) for leaf, shard in leaves]
    args = args._replace(params=jax.tree.unflatten(layout.tree, full))
    return LossTrace(*jaxprs.traced(gradient.loss, *args), args)


def traced_loss(gradient: DeviceGradient, args: LossArgs) -> LossTrace:
    """Traces the loss with full weights on the rows that a device has of a global batch."""
    return on_device(gradient, functools.partial(trace_loss, gradient), args)


class Use(NamedTuple):
    """A segment of the loss that reads a leaf."""

    place: int  # its position in the forward pass, counted from 0
    # the rows that a device looks up in the leaf in one microbatch, without gathering it; None if the leaf is gathered
    lookup: RowsLookedUp | None = None


def uses(gradient: DeviceGradient, args: LossArgs) -> list[tuple[Use, ...]]:
    """For each leaf, the segments of the loss that read it.

    There is none if the loss does not use the leaf, and more than one if several units share it.
    """

    def find(parts: PartsOfLoss) -> list[tuple[Use, ...]]:
        segments = [segment for segment in parts.traced.segments if segment.leaves]
        places = [parts.place_of(leaf) for leaf in range(len(gradient.layout.leaves))]
        return [
            tuple(Use(k, segment.lookup) for k, segment in enumerate(segments) if place in segment.leaves)
            for place in places
        ]

    return _of_parts(gradient, find, args)


def tiled(gradient: DeviceGradient, args: LossArgs) -> list[Tiled]:
    """What the loss computes in tiles."""
    return _of_parts(gradient, lambda parts: list(parts.tiled), args) if gradient.settings.tiling else []


def _of_parts(gradient: DeviceGradient, find: Callable[[PartsOfLoss], T], args: LossArgs) -> T:
    """What is found in the parts of the loss, for one microbatch of a device."""

    def on_rows(args: LossArgs) -> T:
        own = gradient.with_own_keys(gradient.cast(first_rows(args, gradient.settings.num_microbatches)))
        return find(gradient.parts_of_loss(own)[0])

    return on_device(gradient, on_rows, args)


def check_constraints(gradient: DeviceGradient, trace: LossTrace) -> None:
    """Raises LossError if the loss constrains a sharding over the data axes, or JAX would have to divide a kernel.

    JAX finds either only when it compiles, which for `value_and_grad` is in the user's own jit.
    """
    config, jaxpr = gradient.config, trace.closed.jaxpr
    for spec, traceback in jaxprs.constraints(jaxpr, config.axes.data):
        raise LossError(constraint_text(str(spec), line_of(traceback)))
    divided = [name for name in config.compiler_axes if config.mesh.shape[name] > 1]
    for name, traceback in jaxprs.partitioned_kernels(jaxpr) if divided else ():
        raise LossError(kernel_text(name, line_of(traceback), divided))


def check_evaluation(gradient: DeviceGradient, trace: LossTrace) -> None:
    """Raises LossError if the loss depends on which rows are in a batch: if it communicates, or changes statistics."""
    axes, jaxpr = gradient.config.axes, trace.closed.jaxpr
    if any(jaxprs.communicates_over(equation, axes.data) for equation in jaxpr.eqns):
        raise LossError(
            f"evaluate: the loss communicates over {', '.join(map(repr, axes.data))}\n"
            f"  got:      a value that depends on which rows are in a batch, and is no mean over rows\n"
            f"  fix:      a loss without it; or zero.eval_step on batches of one size, and average these"
        )
    state = by_path(trace.args.model_state)
    kept = jaxprs.forwards(jaxpr)[-len(state) :] if state else []
    flags = zip(state.items(), kept, gradient.layout.fixed_state, strict=True)
    changed = [
        path
        for (path, a), is_kept, is_fixed in flags
        if jnp.issubdtype(a.dtype, jnp.floating) and not is_kept and not is_fixed
    ]
    if changed:
        raise LossError(
            f"evaluate: the loss changes running statistics, as in training\n"
            f"  got:      {abbreviate(changed, separator=', ')}\n"
            f"  fix:      a loss that evaluates the model: use_running_average=True, or train=False"
        )


INTO_BATCH = "put arrays with a row for each row of the batch into the batch, instead of closing over them"


@contextlib.contextmanager
def explained_by_rows(gradient: DeviceGradient, args: LossArgs) -> Iterator[None]:
    """Explains an error of a loss that works with all rows of the batch only. Others stay as they are."""
    parts = gradient.config.axes.num_devices * gradient.settings.num_microbatches

    def fails(num_parts: int) -> bool:
        try:
            on_device(gradient, lambda args: trace_loss(gradient, first_rows(args, num_parts)), args, splits=False)
        except Exception:
            return True
        return False

    try:
        yield
    except LossError:
        raise
    except Exception as error:
        if parts == 1 or fails(1) or not fails(parts):
            raise
        rows = num_global_rows(gradient.config, args.batch)
        seen = textwrap.shorten(str(error), 200, placeholder=" ...").rstrip(".")
        raise LossError(
            f"loss: works with all {rows} rows of the batch, but not with the {rows // parts} that a device has at a "
            f"time\n"
            f"  got:      {type(error).__name__}: {seen}, at {line_of(error) or 'an unknown line'}\n"
            f"  fix:      {INTO_BATCH}, and count rows by x.shape[0]"
        ) from error
