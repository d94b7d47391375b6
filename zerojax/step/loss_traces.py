"""What a trace of the loss on one device's rows shows: uses of leaves, and what it may not do."""

from __future__ import annotations

import contextlib
import dataclasses
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import PartitionSpec

from zerojax.program import jaxprs
from zerojax.program.segmentation import RowsLookedUp
from zerojax.sharding.placement import path_text
from zerojax.step.batch import batch_specs, cast_batch, map_rows, num_global_rows
from zerojax.step.config import leaf_specs, shard_map_over_data
from zerojax.step.gradient import DeviceGradient
from zerojax.step.loss_errors import LossError, constraint_text, kernel_text
from zerojax.step.models import Output, is_key
from zerojax.step.state_keys import StateKeys, may_be_raw, may_change, raw_keys
from zerojax.utils.typing import Array, PRNGKey, PyTree
from zerojax.utils.warn import line_of


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

    def find(shards: PyTree, model_state: PyTree, batch: PyTree, key: PRNGKey) -> list[tuple[Use, ...]]:
        batch = map_rows(lambda a: a[: a.shape[0] // gradient.settings.num_microbatches], batch)
        args = gradient.layout.for_compute(shards), gradient.fold(model_state, 0), batch, key
        found = [segment for segment in gradient.parts_of_loss(*args)[0].traced.segments if segment.leaves]
        places = list(enumerate(found))
        return [
            tuple(Use(k, segment.lookup) for k, segment in places if leaf in segment.leaves)
            for leaf in range(len(gradient.layout.leaves))
        ]

    return on_device(gradient, find, args)


def with_state_keys(gradient: DeviceGradient, args: Any) -> DeviceGradient:
    """`gradient`, which knows the keys in the model state from their use. `args` are as in `uses`.

    Only a model state that may have such keys is traced.
    """
    if not may_change(args[1]):
        return gradient

    def find(shards: PyTree, model_state: PyTree, batch: PyTree, key: PRNGKey) -> list[StateKeys]:
        jaxpr = closed_loss(gradient, shards, model_state, batch, key)[0].jaxpr
        leaves, start = jax.tree.leaves(model_state), len(gradient.layout.leaves)
        inputs = list(zip(leaves, jaxpr.invars[start:], strict=False))
        used = set(raw_keys(jaxpr, [v for a, v in inputs if may_be_raw(a)]))
        kept = jaxprs.forwards(jaxpr)[-len(leaves) :]
        raw = tuple(v in used for _, v in inputs)
        are_keys = [is_raw or is_key(a) for is_raw, a in zip(raw, leaves, strict=True)]
        return [StateKeys(raw, tuple(flag and not k for flag, k in zip(are_keys, kept, strict=True)))]

    return dataclasses.replace(gradient, state_keys=on_device(gradient, find, args)[0])


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
        closed, _ = closed_loss(gradient, *args)
        closed_over.extend(a for a in closed.consts if isinstance(a, Tracer))
        constraints = jaxprs.constraints(closed.jaxpr, config.axes.data)
        kernels = jaxprs.partitioned_kernels(closed.jaxpr) if divided else ()
        return [
            *(constraint_text(str(spec), line_of(trace)) for spec, trace in constraints),
            *(kernel_text(name, line_of(trace), divided) for name, trace in kernels),
        ]

    for text in on_device(gradient, find, args):
        raise LossError(text)
    return bool(closed_over)


INTO_BATCH = "put arrays with a row for each row of the batch into the batch, instead of closing over them"


@contextlib.contextmanager
def explained_by_rows(gradient: DeviceGradient, args: Any) -> Iterator[None]:
    """Explains an error of a loss that works with all rows of the batch only. Others stay as they are.

    `args` are as in `uses`.

    Raises:
        LossError: in place of an error of the loss that is not raised if each device has all rows.
    """
    parts = gradient.config.axes.num_devices * gradient.settings.num_microbatches

    def fails(rows: PyTree, num_parts: int) -> bool:
        def trace(shards: PyTree, model_state: PyTree, batch: PyTree, key: PRNGKey) -> list[Any]:
            batch = map_rows(lambda a: a[: a.shape[0] // num_parts], batch)
            return [closed_loss(gradient, shards, model_state, batch, key)]

        try:
            on_device(gradient, trace, args, rows)
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
            f"  fix:      {INTO_BATCH}, and count rows by x.shape[0]"
        ) from error


def traced_loss(gradient: DeviceGradient, args: Any) -> tuple[Any, Output]:
    """(The jaxpr of the loss on one device's rows, the shapes of its outputs). `args` are as in `uses`."""
    closed, output = on_device(gradient, lambda *args: [closed_loss(gradient, *args)], args)[0]
    return closed.jaxpr, output


def closed_loss(gradient: DeviceGradient, *args: Any) -> tuple[Any, Output]:
    """(The closed jaxpr of the loss with full weights, the shapes of its outputs), on one device's rows."""
    return jaxprs.traced(gradient.loss, *full_args(gradient, *args))


def full_args(gradient: DeviceGradient, shards: PyTree, model_state: PyTree, batch: PyTree, key: PRNGKey) -> Any:
    """The arguments of the loss with full weights, on one device's rows; of the parameters the avals."""
    layout, precision = gradient.layout, gradient.config.precision
    leaves = zip(layout.leaves, layout.for_compute(shards), strict=True)
    full = [jax.ShapeDtypeStruct(leaf.shape, shard.dtype) for leaf, shard in leaves]
    return jax.tree.unflatten(layout.tree, full), model_state, cast_batch(precision, batch), key


def check_evaluation(gradient: DeviceGradient, args: Any) -> None:
    """Checks that the loss does not depend on which rows are in a batch, as far as a user has meant it to.

    Args:
        gradient: of the evaluation.
        args: as in `uses`.

    Raises:
        LossError: if the loss communicates over the data axes, or changes running statistics.
    """
    axes, layout = gradient.config.axes, gradient.layout
    jaxpr, _ = traced_loss(gradient, args)
    if any(jaxprs.communicates_over(equation, axes.data) for equation in jaxpr.eqns):
        raise LossError(
            f"evaluate: the loss communicates over {', '.join(map(repr, axes.data))}\n"
            f"  got:      a value that depends on which rows are in a batch, and is no mean over rows\n"
            f"  fix:      a loss without it; or zero.eval_step on batches of one size, and average these"
        )
    paths = jax.tree_util.tree_leaves_with_path(args[1])
    kept = jaxprs.forwards(jaxpr)[-len(paths) :] if paths else []
    flags = zip(paths, kept, layout.fixed_state, strict=True)
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


def on_device(gradient: DeviceGradient, fn: Callable[..., list[Any]], args: Any, rows: PyTree = None) -> list[Any]:
    """What `fn` finds in a trace on one device's part of (parameter leaves, model state, batch, key).

    `rows` is the spec of all arrays of the batch, if it is not that of a step.
    """
    config, layout = gradient.config, gradient.layout
    replicated: Any = PartitionSpec()
    in_specs = (
        leaf_specs(config, layout.leaves, config.stage.shards_params),
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
