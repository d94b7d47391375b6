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
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from zerojax.program import jaxprs
from zerojax.program.jaxprs import Atom
from zerojax.program.rows.parts import RowParts, array_with_all_rows, row_parts
from zerojax.program.rows.sizes import SizesOfTrace, sizes_of
from zerojax.program.rows.trace import RowTrace, flattened, trace_rows
from zerojax.program.rows.values import SAME, Kind, RowValue, row_factors
from zerojax.sharding.axes import Axes
from zerojax.sharding.placement import by_path
from zerojax.step.batch import map_rows, num_global_rows
from zerojax.step.gradient import DeviceGradient, Loss, LossArgs
from zerojax.step.loss_traces import (
    INTO_BATCH,
    LossTrace,
    check_constraints,
    check_evaluation,
    first_rows,
    on_device,
    trace_loss,
)
from zerojax.step.losses import LossError, Output
from zerojax.step.models import is_key
from zerojax.step.state_keys import find_state_keys, may_be_raw, may_change
from zerojax.utils.text import abbreviate
from zerojax.utils.typing import Array, PyTree
from zerojax.utils.warn import line_of, warn


class Purpose(enum.Enum):
    """What the outputs of a loss are for: a training step, an evaluation of one batch, or of a data set in parts."""

    TRAINING = "loss"
    BATCH = "eval_step"
    DATA_SET = "evaluate"

    @property
    def is_evaluation(self) -> bool:
        return self is not Purpose.TRAINING


class CheckedLoss(NamedTuple):
    """A loss that can be run on parts of a batch."""

    # of the loss, whose outputs are those of the whole batch as far as they can be, and which knows the keys in the
    # model state
    gradient: DeviceGradient
    closes_over: bool = False  # whether the loss closes over values of a trace that it is called in


def over_whole_batch(
    gradient: DeviceGradient, args: LossArgs, purpose: Purpose, *, constraints: bool, is_seen: bool = False
) -> CheckedLoss:
    """Checks a loss on one device's rows, and makes its outputs those of the whole batch.

    Raises LossError if a variable of the model would be another one on each device. Warns of a loss that is a sum, or a
    ratio of sums, over rows; of metrics that are not those of the whole batch; and of running statistics that are
    averages of those of each device's rows.

    Args:
        gradient: of the step.
        args: global arrays or avals.
        purpose: of the step.
        constraints: whether sharding constraints and kernels in the loss are checked.
        is_seen: whether the loss has been checked before, and has been warned of.

    Cost: traces the loss, unless there is nothing to find out.
    """
    axes, num_microbatches = gradient.config.axes, gradient.settings.num_microbatches
    num_parts, num_rows = axes.num_devices * num_microbatches, num_global_rows(gradient.config, args.batch)
    is_divided, has_keys = num_parts > 1 or purpose is Purpose.DATA_SET, may_change(args.model_state)
    if not (is_divided or has_keys or constraints):
        return CheckedLoss(gradient)

    def check(args: LossArgs) -> tuple[CheckedLoss, list[str]]:
        # Check.
        trace = trace_loss(gradient, first_rows(args, num_microbatches))
        closes_over = any(isinstance(a, Tracer) for a in trace.closed.consts)
        if constraints:
            check_constraints(gradient, trace)
        if purpose is Purpose.DATA_SET and not is_seen:
            check_evaluation(gradient, trace)

        # Find the keys, and what is to be done for each output.
        found = gradient
        if has_keys:
            keys = find_state_keys(trace.closed.jaxpr, len(gradient.layout.leaves), args.model_state)
            found = dataclasses.replace(found, state_keys=keys)
        if not is_divided:
            return CheckedLoss(found, closes_over), []
        trace = trace._replace(closed=flattened(trace.closed))
        sizes = _sizes(gradient, trace)
        rows = _read(trace, axes, sizes, found.state_keys.raw)
        plan = _plan(rows, _kept(found), axes, purpose)
        if plan.metrics is not None or plan.state is not None:
            found = dataclasses.replace(found, loss=_reduced_loss(found, purpose, sizes))
        return CheckedLoss(found, closes_over), _texts(rows, plan, gradient, purpose, num_parts, num_rows)

    checked, texts = on_device(gradient, check, args)
    for text in () if is_seen else texts:
        warn(text)
    return checked


class _LossRows(NamedTuple):
    """A loss, traced on one device's rows.

    Attributes:
        rows: how its values depend on rows.
        output: its outputs, as atoms of the trace.
    """

    rows: RowTrace
    output: PyTree  # an `Output` of atoms

    def sources_of(self, atom: Atom, purpose: Purpose) -> frozenset[int]:
        """The equations at which rows meet for an output. For a batch, without those of the loss: a loss that looks at
        all rows of a device is the user's choice, and its metrics do so too."""
        own = self.rows.of(atom).sources
        return own if purpose is Purpose.DATA_SET else own - self.rows.of(self.output.loss.sum).sources

    def line_of(self, source: int) -> str:
        trace = self.rows.traces.get(source)
        return line_of(trace and trace.as_python_traceback()) or "an unknown line"

    def line_that_computes(self, atom: Atom) -> str:
        equations = self.rows.closed.jaxpr.eqns
        found = next((equation for equation in equations if any(v is atom for v in equation.outvars)), None)
        return (found and jaxprs.user_line(found)) or "an unknown line"


class _Plan(NamedTuple):
    """What has to be done for the outputs of a loss."""

    metrics: RowParts | None  # those that are cut, None if none is; 'loss' is the loss
    state: RowParts | None  # the leaves of the model state that are cut, by their position; None if none is
    unknown: dict[str, str]  # the plain metrics that are not those of all rows, with the line of the reason


def _sizes(gradient: DeviceGradient, trace: LossTrace) -> SizesOfTrace:
    """What counts rows in a loss that was traced on one device, flattened: what doubles with the rows."""
    twice = lambda a: jax.ShapeDtypeStruct((2 * a.shape[0], *a.shape[1:]), a.dtype)
    args = trace.args._replace(batch=map_rows(twice, trace.args.batch))
    try:
        doubled = flattened(jaxprs.traced(gradient.loss, *args)[0])
    except Exception:  # a loss for one number of rows
        doubled = None
    return sizes_of(trace.closed, doubled, _num_rows(trace.args.batch))


def _num_rows(batch: PyTree) -> int:
    """The number of rows of a device."""
    return max(jax.tree.leaves(map_rows(lambda a: a.shape[0], batch, lambda a: 0)), default=1) or 1


def _read(trace: LossTrace, axes: Axes, sizes: SizesOfTrace, raw: Sequence[bool]) -> _LossRows:
    """Follows the rows through a flattened loss, traced on one device. `raw`: which state leaves are raw keys."""
    params, model_state, batch, key = trace.args
    counts, num_rows = jax.tree.leaves(map_rows(lambda a: a.shape[0], batch, lambda a: 0)), _num_rows(batch)
    state = jax.tree.leaves(model_state)
    # A key in the batch is the same on all devices by choice.
    whole = lambda a: RowValue(on_device=True) if is_key(a) or may_be_raw(a) else SAME
    of_rows = lambda a, count: RowValue(Kind.ROWS, dims=row_factors(a.shape, num_rows)) if count else whole(a)
    inputs = [
        *(RowValue(on_params=True) for _ in jax.tree.leaves(params)),
        *(
            RowValue(on_device=is_raw or is_key(a))
            for a, is_raw in zip(state, raw or [False] * len(state), strict=True)
        ),
        *map(of_rows, jax.tree.leaves(batch), counts),
        *(RowValue(on_device=True) for _ in jax.tree.leaves(key)),
    ]
    rows = trace_rows(trace.closed, inputs, num_rows, axes.data, sizes)
    return _LossRows(rows, jax.tree.unflatten(jax.tree.structure(trace.output), rows.closed.jaxpr.outvars))


def _plan(found: _LossRows, kept: Sequence[bool], axes: Axes, purpose: Purpose) -> _Plan:
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
    state = {} if purpose.is_evaluation or axes.num_devices == 1 else _state_to_reduce(found, kept)
    return _Plan(row_parts(rows, chosen) if chosen else None, row_parts(rows, state) if state else None, unknown)


def _kept(gradient: DeviceGradient) -> list[bool]:
    """Which leaves of the model state a step keeps, whatever the loss returns: fixed ones, and keys in raw form."""
    fixed = gradient.layout.fixed_state
    raw = gradient.state_keys.raw or [False] * len(fixed)
    return [is_fixed or is_raw for is_fixed, is_raw in zip(fixed, raw, strict=True)]


def _state_to_reduce(found: _LossRows, kept: Sequence[bool]) -> dict[str, Atom]:
    """The leaves of the model state that are reduced in the loss, by position.

    These are all that depend on the device and are not floating, and floating ones that are computed from more than
    means over rows. If one that is not floating can be neither averaged nor reduced, it is an error.
    """
    chosen = {}
    state = by_path(found.output.model_state).items()
    for k, ((path, atom), is_kept) in enumerate(zip(state, kept, strict=True)):
        value = found.rows.of(atom)
        if is_kept or is_key(atom.aval) or not value.is_local:
            continue
        is_floating = jnp.issubdtype(atom.aval.dtype, jnp.floating)
        if is_floating and value.kinds <= {Kind.MEAN}:
            continue
        can_be_reduced = not value.on_device and not found.sources_of(atom, Purpose.TRAINING)
        if can_be_reduced and row_parts(found.rows, {str(k): atom}) is not None:
            chosen[str(k)] = atom
        elif not is_floating:
            raise LossError(
                f"loss: a variable depends on which rows a device has, or on its random key\n"
                f"  got:      {path}: {atom.aval.str_short()}, at {found.line_that_computes(atom)}\n"
                f"  fix:      change it by a sum, mean, maximum or minimum over rows; or by what is the same on all\n"
                f"            devices, such as jax.lax.psum(x, 'data'); or return it as a metric instead"
            )
    return chosen


def _reduced_loss(gradient: DeviceGradient, purpose: Purpose, sizes: SizesOfTrace) -> Loss:
    """The loss, whose metrics are cut where they have to be, and whose variables are reduced over the data axes."""
    axes, kept_leaves, raw = gradient.config.axes, _kept(gradient), gradient.state_keys.raw

    def loss(*args: PyTree) -> Output:
        # Read.
        closed, output = jaxprs.traced(gradient.loss, *args)
        found = _read(LossTrace(flattened(closed), output, LossArgs(*args)), axes, sizes, raw)
        plan, output = _plan(found, kept_leaves, axes, purpose), found.output
        metrics, state = plan.metrics, plan.state

        # Run what computes the parts, in place of what is computed from them.
        kept = {name: pair for name, pair in output.metrics.items() if metrics is None or name not in metrics.names}
        after, tree = jax.tree.flatten(output.model_state)
        wanted = (output.loss, kept, after, metrics.parts if metrics else (), state.parts if state else ())
        atoms, wanted_tree = jax.tree.flatten(wanted)
        values = jaxprs.run(jaxprs.with_outputs(found.rows.closed, atoms), *jax.tree.leaves(args))
        total, kept, after, parts, of_state = jax.tree.unflatten(wanted_tree, values)

        # Reduce the model state.
        if state is not None:
            whole = [_over_devices(kind, a, axes) for kind, a in zip(state.kinds, of_state, strict=True)]
            for position, a in state.finish(whole).items():
                after[int(position)] = a
        reduced = frozenset(map(int, state.names)) if state else frozenset()
        after = jax.tree.unflatten(tree, after)
        return dataclasses.replace(
            output, loss=total, metrics=kept, model_state=after, parts=list(parts), cut=metrics, reduced_state=reduced
        )

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
    texts = [_text_of_closed_over(found, num_parts, num_rows, purpose), *_texts_of_repeated(found, purpose)]
    if purpose is Purpose.TRAINING:
        texts += [None if texts[0] else _text_of_loss(found, num_parts)]
        texts += [_text_of_statistics(found, plan, gradient)]
    if plan.unknown:
        names = {"the loss" if name == "loss" else f"metric {name!r}": line for name, line in plan.unknown.items()}
        listed = ", ".join(f"{name} ({line})" for name, line in names.items())
        parts = "the parts in which the set is evaluated"
        if purpose is not Purpose.DATA_SET:
            parts = f"{num_parts} parts of the batch"
        texts.append(
            f"{purpose.value}: {listed} {'depend' if len(names) > 1 else 'depends'} on how the rows are divided\n"
            f"  got:      the mean of the values of {parts}\n"
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


def _texts_of_repeated(found: _LossRows, purpose: Purpose) -> list[str]:
    """About what the rows of all devices get the same of: random numbers, and elements of an array."""
    line = lambda trace: line_of(trace.as_python_traceback()) or "an unknown line"
    texts = []
    if found.rows.drawn is not None and purpose is Purpose.TRAINING:
        texts.append(
            f"loss: the rows of all devices get the same random numbers\n"
            f"  got:      a key that is the same on all devices, at {line(found.rows.drawn)}\n"
            f"  fix:      draw with the key that the loss gets, as in loss(params, batch, key), or with the model's\n"
            f"            nnx.Rngs; or keep the key beside the parameters, as in {{'params': params, 'rng': key}}"
        )
    if found.rows.cut is not None:
        texts.append(
            f"{purpose.value}: the rows of all devices get the same elements of an array\n"
            f"  got:      as many as a device has rows, at {line(found.rows.cut)}\n"
            f"  fix:      {INTO_BATCH}"
        )
    return texts


def _text_of_closed_over(found: _LossRows, num_parts: int, num_rows: int, purpose: Purpose) -> str | None:
    """About an array with a row for each row of the batch that a loss closes over, and that each device has whole."""
    inputs = found.rows.closed.jaxpr.invars
    row_vars = [v for v in inputs if found.rows.of(v).kind is Kind.ROWS]
    array = array_with_all_rows(found.rows.closed, row_vars, [v for v in inputs if is_key(v.aval)], num_rows)
    if array is None:
        return None
    line = line_of(array.trace and array.trace.as_python_traceback())
    return (
        f"{purpose.value}: the loss closes over an array with as many rows as the batch, and a device does not get its "
        f"part of it\n"
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
    state = by_path(found.output.model_state).items()
    local, lines = dict[str, RowValue](), dict[str, str]()
    for k, ((path, atom), is_fixed) in enumerate(zip(state, gradient.layout.fixed_state, strict=True)):
        is_averaged = not is_fixed and str(k) not in reduced and jnp.issubdtype(atom.aval.dtype, jnp.floating)
        if is_averaged and found.rows.of(atom).is_local:
            local[path], lines[path] = found.rows.of(atom), found.line_that_computes(atom)
    unknown = [path for path, value in local.items() if value.kind is not Kind.MEAN or value.sources]
    if not unknown:
        return None
    axis = axes.data[0] if len(axes.data) == 1 else axes.data
    return (
        f"loss: {len(local)} running statistics are computed from each device's rows, and then averaged\n"
        f"  got:      {abbreviate(list(local), separator=', ')}; {unknown[0]!r} at {lines[unknown[0]]}\n"
        f"  fix:      BatchNorm(..., axis_name={axis!r}) normalizes over all rows, as one device would; others are\n"
        f"            exact if they change by sums, means, maxima and minima over rows"
    )
