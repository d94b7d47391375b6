"""Makes the outputs of a loss on the devices' rows those of one device that has all rows, or says which are not.

A trace of the loss shows how each output depends on rows (`program.rows.trace`). Means over rows are averaged over
devices and microbatches without further ado. What is computed from sums, means and extremes over rows is cut into
these, which are reduced, and the rest is computed from the results: metrics at the end of a step, and variables of the
model in the loss itself.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.program import jaxprs
from zerojax.program.jaxprs import Atom
from zerojax.program.rows.parts import RowParts, array_with_all_rows, row_parts
from zerojax.program.rows.trace import RowTrace, trace_rows
from zerojax.program.rows.values import SAME, Kind, RowValue, row_factors
from zerojax.sharding.axes import Axes
from zerojax.sharding.placement import path_text
from zerojax.step.batch import map_rows, num_global_rows
from zerojax.step.gradient import DeviceGradient, Loss
from zerojax.step.loss_errors import LossError
from zerojax.step.loss_traces import INTO_BATCH, full_args, on_device
from zerojax.step.models import Output, is_key
from zerojax.utils.typing import Array, PRNGKey, PyTree
from zerojax.utils.warn import line_of, warn


class Purpose(enum.Enum):
    """What the outputs of a loss are for: a training step, an evaluation of one batch, or of a data set in parts."""

    TRAINING = "loss"
    BATCH = "eval_step"
    DATA_SET = "evaluate"

    @property
    def is_evaluation(self) -> bool:
        return self is not Purpose.TRAINING


class _LossRows(NamedTuple):
    """A loss, traced on one device's rows.

    Attributes:
        rows: how its values depend on rows.
        output: its outputs, as variables of the trace.
    """

    rows: RowTrace
    output: Any  # an `Output` of atoms

    def sources_of(self, atom: Atom, purpose: Purpose) -> frozenset[int]:
        """The equations at which rows meet for an output. For a batch, without those of the loss: a loss that looks at
        all rows of a device is the user's choice, and its metrics do so too."""
        own = self.rows.of(atom).sources
        return own if purpose is Purpose.DATA_SET else own - self.rows.of(self.output.loss.sum).sources

    def line_of(self, source: int | None) -> str:
        trace = self.rows.traces.get(source) if source is not None else None
        return line_of(trace and trace.as_python_traceback()) or "an unknown line"

    def line_that_computes(self, atom: Atom) -> str:
        for equation in self.rows.closed.jaxpr.eqns:
            if any(v is atom for v in equation.outvars):
                trace = equation.source_info.traceback
                return line_of(trace and trace.as_python_traceback()) or "an unknown line"
        return "an unknown line"


class _Plan(NamedTuple):
    """What has to be done for the outputs of a loss.

    Attributes:
        metrics: those that are cut, None if none is; 'loss' is the loss.
        state: the leaves of the model state that are cut, by their position; None if none is.
        unknown: the plain metrics that are not those of all rows, with the line of the reason.
    """

    metrics: RowParts | None
    state: RowParts | None
    unknown: dict[str, str]


def _read(loss: Loss, axes: Axes, args: Any) -> _LossRows:
    """Traces a loss on (parameters, model state, batch, key) of one device."""
    params, model_state, batch, key = args
    closed, output = jaxprs.traced(loss, *args)
    counts = jax.tree.leaves(map_rows(lambda a: a.shape[0], batch, lambda a: 0))
    num_rows = max(counts, default=1) or 1
    of_rows = lambda a, count: RowValue(Kind.ROWS, dims=row_factors(a.shape, num_rows)) if count else SAME
    inputs = [
        *(RowValue(on_params=True) for _ in jax.tree.leaves(params)),
        *(RowValue(on_device=is_key(a)) for a in jax.tree.leaves(model_state)),
        *map(of_rows, jax.tree.leaves(batch), counts),
        *(RowValue(on_device=True) for _ in jax.tree.leaves(key)),
    ]
    rows = trace_rows(closed, inputs, num_rows, axes.data)
    return _LossRows(rows, jax.tree.unflatten(jax.tree.structure(output), rows.closed.jaxpr.outvars))


def _plan(found: _LossRows, fixed: Sequence[bool], axes: Axes, purpose: Purpose) -> _Plan:
    """Decides what is done for the outputs of a loss."""
    rows, output = found
    atoms = {name: output.metrics[name].sum for name in sorted(output.plain)}
    if purpose.is_evaluation and not output.is_weighted:
        atoms["loss"] = output.loss.sum
    chosen, unknown = {}, {}
    for name, atom in atoms.items():
        kind, own = rows.of(atom).kind, found.sources_of(atom, purpose)
        if kind in (Kind.SAME, Kind.MEAN, Kind.MIXED) and not own:
            continue
        if own or row_parts(rows, {name: atom}) is None:
            unknown[name] = found.line_of(min(own)) if own else found.line_that_computes(atom)
        else:
            chosen[name] = atom
    state = {} if purpose.is_evaluation or axes.num_devices == 1 else _state_to_reduce(found, fixed)
    return _Plan(row_parts(rows, chosen) if chosen else None, row_parts(rows, state) if state else None, unknown)


def _state_to_reduce(found: _LossRows, fixed: Sequence[bool]) -> dict[str, Atom]:
    """The leaves of the model state that are reduced in the loss, by position.

    These are all that depend on the device and are not floating, and floating ones that add up rows.

    Raises:
        LossError: if one that is not floating can be neither averaged nor reduced.
    """
    chosen = {}
    with_paths = jax.tree_util.tree_leaves_with_path(found.output.model_state)
    for k, ((path, atom), is_fixed) in enumerate(zip(with_paths, fixed, strict=True)):
        value = found.rows.of(atom)
        if is_fixed or is_key(atom.aval) or not value.is_local:
            continue
        is_floating = jnp.issubdtype(atom.aval.dtype, jnp.floating)
        if is_floating and not value.is_sum:
            continue
        can_be_reduced = not value.on_device and not found.sources_of(atom, Purpose.TRAINING)
        if can_be_reduced and row_parts(found.rows, {str(k): atom}) is not None:
            chosen[str(k)] = atom
        elif not is_floating:
            raise LossError(
                f"loss: a variable depends on which rows a device has, or on its random key\n"
                f"  got:      {path_text(path)}: {atom.aval.str_short()}, at {found.line_that_computes(atom)}\n"
                f"  fix:      change it by a sum, mean, maximum or minimum over rows; or by what is the same on all\n"
                f"            devices, such as jax.lax.psum(x, 'data'); or return it as a metric instead"
            )
    return chosen


def over_whole_batch(gradient: DeviceGradient, args: Any, purpose: Purpose, *, quiet: bool = False) -> DeviceGradient:
    """The gradient, with a loss whose outputs are those of the whole batch as far as they can be. Nothing is changed
    where they are so already.

    Warns, unless `quiet`, of a loss that is a sum, or a ratio of sums, over rows; of metrics that are not those of the
    whole batch; and of running statistics that are averages of those of each device's rows.

    Args:
        gradient: of the step.
        args: avals of global arrays: (parameter leaves, model state, batch, key).
        purpose: of the step.
        quiet: whether it has warned before.

    Raises:
        LossError: if a variable of the model would be another one on each device.
    """
    axes, layout = gradient.config.axes, gradient.layout
    num_parts = axes.num_devices * gradient.settings.num_microbatches
    if num_parts == 1 and purpose is not Purpose.DATA_SET:
        return gradient

    num_rows = num_global_rows(args[2])

    def find(shards: PyTree, model_state: PyTree, batch: PyTree, key: PRNGKey) -> list[Any]:
        batch = map_rows(lambda a: a[: a.shape[0] // gradient.settings.num_microbatches], batch)
        args = full_args(gradient, shards, model_state, batch, key)
        found = _read(gradient.loss, axes, args)
        plan = _plan(found, layout.fixed_state, axes, purpose)
        return [plan, _texts(found, plan, gradient, purpose, num_parts, num_rows)]

    plan, texts = on_device(gradient, find, args)
    for text in () if quiet else texts:
        warn(text)
    if plan.metrics is None and plan.state is None:
        return gradient
    return dataclasses.replace(gradient, loss=_reduced_loss(gradient, purpose))


def _reduced_loss(gradient: DeviceGradient, purpose: Purpose) -> Loss:
    """The loss, whose metrics are cut where they have to be, and whose variables are reduced over the data axes."""
    axes, fixed = gradient.config.axes, gradient.layout.fixed_state

    def loss(*args: Any) -> Output:
        found = _read(gradient.loss, axes, args)
        plan, output = _plan(found, fixed, axes, purpose), found.output
        metrics, state = plan.metrics, plan.state
        kept = {name: pair for name, pair in output.metrics.items() if metrics is None or name not in metrics.names}
        after, tree = jax.tree.flatten(output.model_state)
        wanted = (output.loss, kept, after, metrics.parts if metrics else (), state.parts if state else ())
        atoms, wanted_tree = jax.tree.flatten(wanted)
        values = jaxprs.run(jaxprs.with_outputs(found.rows.closed, atoms), *jax.tree.leaves(args))
        total, kept, after, parts, of_state = jax.tree.unflatten(wanted_tree, values)
        if state is not None:
            whole = [_over_devices(kind, a, axes) for kind, a in zip(state.kinds, of_state, strict=True)]
            for position, a in state.finish(whole).items():
                after[int(position)] = a
        reduced = frozenset(map(int, state.names)) if state else frozenset()
        changes = {"loss": total, "metrics": kept, "parts": list(parts), "cut": metrics, "reduced_state": reduced}
        return dataclasses.replace(output, model_state=jax.tree.unflatten(tree, after), **changes)

    return loss


def _over_devices(kind: Kind, part: Array, axes: Axes) -> Array:
    """A part, reduced over all devices."""
    if kind is Kind.SAME:
        return part
    if part.dtype == jnp.bool_:  # a maximum or a minimum
        return _over_devices(kind, part.astype(jnp.int32), axes) > 0
    reduce = {Kind.MAX: lax.pmax, Kind.MIN: lax.pmin, Kind.SUM: lax.psum, Kind.MEAN: lax.pmean}[kind]
    return reduce(part, axes.data)


# What is said ---------------------------------------------------------------------------------------------------------


def _texts(
    found: _LossRows, plan: _Plan, gradient: DeviceGradient, purpose: Purpose, num_parts: int, num_rows: int
) -> list[str]:
    """The warnings about a loss on one of `num_parts` parts of the `num_rows` rows of a batch."""
    texts = []
    if purpose is Purpose.TRAINING:
        texts += [_text_of_loss(found, num_parts), _text_of_statistics(found, plan, gradient)]
        texts += [_text_of_closed_over(found, num_parts, num_rows)] if num_parts > 1 else []
    if plan.unknown:
        names = ["the loss" if name == "loss" else f"metric {name!r}" for name in plan.unknown]
        listed = ", ".join(f"{name} ({line})" for name, line in zip(names, plan.unknown.values(), strict=True))
        many = len(names) > 1
        got = f"the mean of the values of {num_parts} parts of the batch"
        if purpose is Purpose.DATA_SET:
            got = "the mean of the values of the parts in which the set is evaluated"
        texts.append(
            f"{purpose.value}: {listed} {'depend' if many else 'depends'} on how the rows are divided\n"
            f"  got:      {got}\n"
            f"  fix:      compute it from means, sums, maxima and minima over rows: a standard deviation by\n"
            f"            jnp.sqrt(jnp.mean(x**2) - jnp.mean(x)**2); or return zerojax.Weighted(sum, weight)"
        )
    return [text for text in texts if text]


def _text_of_loss(found: _LossRows, num_parts: int) -> str | None:
    value = found.rows.of(found.output.loss.sum)
    if found.output.is_weighted or not (value.is_sum or value.is_ratio):
        return None
    if value.is_sum:
        return (
            f"loss: the loss is a sum over rows\n"
            f"  got:      the mean of the sums of {num_parts} parts of the batch: 1/{num_parts} of that over all rows\n"
            f"  fix:      return the mean over rows"
        )
    return (
        f"loss: the loss is a ratio of sums over rows\n"
        f"  got:      the mean of the ratios of {num_parts} parts of the batch, whose divisors differ,\n"
        f"            at {found.line_that_computes(found.output.loss.sum)}\n"
        f"  fix:      return zerojax.Weighted(sum, weight): the sum of all sums is then divided by that of all weights"
    )


def _text_of_closed_over(found: _LossRows, num_parts: int, num_rows: int) -> str | None:
    """About an array with a row for each row of the batch that a loss closes over, and that each device has whole."""
    inputs = found.rows.closed.jaxpr.invars
    row_vars = [v for v in inputs if found.rows.of(v).kind is Kind.ROWS]
    array = array_with_all_rows(found.rows.closed, row_vars, [v for v in inputs if is_key(v.aval)], num_rows)
    if array is None:
        return None
    line = line_of(array.trace and array.trace.as_python_traceback())
    return (
        f"loss: it closes over an array with as many rows as the batch, and a device does not get its part of it\n"
        f"  got:      {array.aval.dtype}{list(array.aval.shape)} at {line or 'an unknown line'}, where a device "
        f"has {num_rows // num_parts} of {num_rows} rows at a time\n"
        f"  fix:      {INTO_BATCH};\n"
        f"            what every device needs whole can be in it too, as zerojax.Whole(array)"
    )


def _text_of_statistics(found: _LossRows, plan: _Plan, gradient: DeviceGradient) -> str | None:
    """About running statistics of each device's rows, unless they are means over rows, which stay so when averaged."""
    axes, reduced = gradient.config.axes, plan.state.names if plan.state else ()
    if axes.num_devices == 1:
        return None
    with_paths = jax.tree_util.tree_leaves_with_path(found.output.model_state)
    flags = zip(with_paths, gradient.layout.fixed_state, strict=True)
    local = [
        (path_text(path), found.rows.of(atom))
        for k, ((path, atom), is_fixed) in enumerate(flags)
        if not is_fixed
        and str(k) not in reduced
        and jnp.issubdtype(atom.aval.dtype, jnp.floating)
        and found.rows.of(atom).kind is not Kind.SAME
    ]
    if all(value.kind is Kind.MEAN and not value.sources for _, value in local):
        return None
    axis = axes.data[0] if len(axes.data) == 1 else axes.data
    return (
        f"loss: {len(local)} running statistics are computed from each device's rows, and then averaged\n"
        f"  got:      {', '.join(path for path, _ in local[:5])}{', ...' if len(local) > 5 else ''}\n"
        f"  fix:      BatchNorm(..., axis_name={axis!r}) normalizes over all rows, as one device would"
    )
