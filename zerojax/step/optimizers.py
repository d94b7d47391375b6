"""Optimizers: the arguments that a step has for them, those that cannot work in a step, and `ema`."""

from __future__ import annotations

import inspect
import itertools
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import CellType, FunctionType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zerojax.program.jaxprs import Equation
from zerojax.utils.typing import Array, PyTree

_FUNCTION = "it evaluates the loss itself, and a step has its value and gradient at one point only"
_REASONS = {  # the function of optax that makes the transformation -> why it cannot work
    "scale_by_zoom_linesearch": _FUNCTION,
    "scale_by_backtracking_linesearch": _FUNCTION,
    "lbfgs": _FUNCTION,
    "hutchinson_estimator_diag_hessian": _FUNCTION,
    "sophia": _FUNCTION,
    "differentially_private_aggregate": "it needs the gradient of each row, and a step has that of the whole batch",
    "dpsgd": "it needs the gradient of each row, and a step has that of the whole batch",
    "scale_by_sm3": "its state has lists of arrays in place of a parameter's array, which cannot be placed",
    "sm3": "its state has lists of arrays in place of a parameter's array, which cannot be placed",
}

_OF_SCHEDULE = "scale_by_learning_rate.<locals>.<lambda>"  # its product with the sign
_COMBINING = "chain", "named_chain", "with_extra_args_support"  # they call the updates of others


def update(
    tx: optax.GradientTransformation, grads: PyTree, opt_state: PyTree, params: PyTree, loss: Array
) -> tuple[PyTree, PyTree]:
    """`tx.update` with those of the extra arguments `value` and `grad` that it takes.

    Gradients are those of the trained parameters, clipped, without the loss scale.
    """
    extra = {"value": loss, "grad": grads}
    parameters = inspect.signature(tx.update).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        names = {p.name for p in parameters}
        extra = {name: value for name, value in extra.items() if name in names}
    return tx.update(grads, opt_state, params, **extra)


def check_transformation(tx: optax.GradientTransformation) -> None:
    """Raises ValueError if an optimizer is not an Optax transformation."""
    if not callable(getattr(tx, "init", None)) or not callable(getattr(tx, "update", None)):
        raise ValueError(
            f"optimizer: not an Optax transformation\n"
            f"  got:      {type(tx).__name__}\n"
            f"  fix:      pass one, such as optax.adamw(1e-3)"
        )


def check_update(tx: optax.GradientTransformation, params: PyTree) -> None:
    """Raises ValueError if an optimizer needs what a step does not have, without running it. `params` are avals."""
    check_transformation(tx)
    names = _function_names(tx)
    for name, reason in _REASONS.items():
        if name in names:
            raise _cannot_work("lbfgs" if "scale_by_lbfgs" in names else name, reason)
    try:
        opt_state = jax.eval_shape(tx.init, params)
        loss = jax.ShapeDtypeStruct((), jnp.float32)
        jax.eval_shape(lambda *args: update(tx, *args), params, opt_state, params, loss)
    except Exception as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        modules = [(frame.f_globals.get("__name__", ""), frame.f_code.co_qualname) for frame in frames]
        names = [name.partition(".")[0] for module, name in modules if module.startswith("optax")]
        raise _cannot_work(names[-1] if names else "update", f"{type(error).__name__}: {error}") from error


def stores_few_bits(tx: optax.GradientTransformation) -> bool:
    """Whether `stochastic_rounding` or `low_bit_moments` is a part of an optimizer."""
    return bool(_function_names(tx) & {"stochastic_rounding", "low_bit_moments"})


def rounds_stochastically(tx: optax.GradientTransformation) -> bool:
    """Whether `stochastic_rounding` is a part of an optimizer."""
    return "stochastic_rounding" in _function_names(tx)


def scheduled_learning_rate(tx: optax.GradientTransformation, opt_state: PyTree) -> Array | None:
    """The learning rate of an update, if it is that of a schedule, as in optax.adamw(schedule).

    None if there are several schedules or counts, a factor besides, or a schedule that is not said to be that of the
    learning rate (optax.scale_by_schedule). `opt_state` is that before the update.
    """
    is_count = lambda node: isinstance(node, optax.ScaleByScheduleState)
    counts = [node.count for node in jax.tree.leaves(opt_state, is_leaf=is_count) if is_count(node)]
    functions = [(function.__qualname__, _closure(function)) for function in _functions(tx)]
    factors = [closure.get("step_size") for name, closure in functions if name == "scale.<locals>.update_fn"]
    scaled = [name for name, _ in functions if name == "scale_by_schedule.<locals>.update_fn"]
    rates = [closure["learning_rate"] for name, closure in functions if name.startswith(_OF_SCHEDULE)]
    has_factor = any(not isinstance(factor, int | float) or abs(factor) != 1 for factor in factors)
    if not len(counts) == len(scaled) == len(rates) == 1 or has_factor:
        return None
    rate = jnp.asarray(rates[0](counts[0]), jnp.float32)
    return None if rate.ndim else rate


def constants(tx: optax.GradientTransformation) -> dict[str, str]:
    """The numbers, flags and names that the functions of a transformation close over: {'scale_by_adam.b1': '0.9', ..}.

    Each function that makes a transformation is there without a constant, too. The n-th of a name has '#n' behind it.
    """
    found: dict[str, str] = {}
    for function in _functions(tx):
        maker = function.__qualname__.partition(".")[0]
        found.setdefault(maker, "")
        for name, value in _closure(function).items():
            if isinstance(value, bool | int | float | str):
                names = (f"{maker}.{name}{f'#{k}' if k > 1 else ''}" for k in itertools.count(1))
                found[next(each for each in names if each not in found)] = str(value)
    return found


def optimizer_function(equation: Equation) -> str | None:
    """The function that makes the transformation which an equation of a traced update belongs to, if it is known."""
    trace = equation.source_info.traceback
    for frame in trace.frames if trace else ():  # innermost first
        name, _, inside = frame.function_name.partition(".")
        if {"optax", "low_bit.py"} & set(Path(frame.file_name).parts) and "update" in inside and name not in _COMBINING:
            return name
    return None


def _cannot_work(name: str, reason: str) -> ValueError:
    return ValueError(
        f"optimizer: {name} does not work in a training step\n"
        f"  got:      {reason}\n"
        f"  fix:      choose another one; a step passes gradients, parameters, value= and grad="
    )


def _function_names(tx: optax.GradientTransformation) -> set[str]:
    """The names of the functions that made a transformation and those in it."""
    return {function.__qualname__.partition(".")[0] for function in _functions(tx)}


def _functions(tx: optax.GradientTransformation) -> Iterator[FunctionType]:
    """Yields the functions of a transformation and those in their closures."""
    seen, todo = set(), [tx.init, tx.update]
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, optax.GradientTransformation):
            todo += [item.init, item.update]
        elif isinstance(item, list | tuple):
            todo += item
        elif isinstance(item, dict):
            todo += item.values()
        elif inspect.ismethod(item):
            todo += vars(item.__self__).values() if hasattr(item.__self__, "__dict__") else []
        elif isinstance(item, FunctionType):
            yield item
            todo += _closure(item).values()


def _closure(function: FunctionType) -> dict[str, Any]:
    """The variables that a function closes over, by name."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells if _is_filled(cell)}


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a name that is assigned later
        return False


class EmaState(NamedTuple):
    """The state of `ema`.

    Attributes:
        count: int32 scalar, the number of updates.
        ema_params: the average of the parameters, in fp32.
        inner: the state of the optimizer.
    """

    count: Array
    ema_params: PyTree
    inner: PyTree


def ema(tx: optax.GradientTransformation, decay: float | optax.Schedule) -> optax.GradientTransformationExtraArgs:
    """An optimizer that also keeps an exponential moving average of the parameters, and updates them as `tx` does.

    After each update, the average becomes `decay * average + (1 - decay) * parameters`. It starts from the initial
    parameters. It is computed in fp32 at every precision, from the parameters that the optimizer holds: an average of
    `state.params` in bf16 would lose each of its changes. `state.ema_params` is the average, and
    `zero.with_params(state, state.ema_params)` a state that evaluates it. `optax.ema` is another thing: it averages the
    updates.

    Args:
        tx: the whole optimizer. What comes after it in a chain would change updates that are in the average already.
        decay: in [0, 1), or a function of the number of updates so far. To forget the initial values sooner:
            `lambda count: jnp.minimum(0.999, (1 + count) / (10 + count))`.

    Returns:
        An Optax transformation, with an `EmaState`.

    Raises:
        ValueError: if `decay` is not in [0, 1), or, in an update, if there are no parameters.

    Cost: 4 bytes for each trained parameter, stored like the moments: sharded from stage 1 on, and offloaded with them.
    """
    if not callable(decay) and not 0 <= decay < 1:
        raise ValueError(f"ema: the decay is {decay}\n  fix:      choose one in [0, 1), such as 0.999")
    inner = optax.with_extra_args_support(tx)
    wide = lambda a: jnp.promote_types(a.dtype, jnp.float32)

    def init(params: PyTree) -> EmaState:
        return EmaState(jnp.int32(0), jax.tree.map(lambda a: jnp.array(a, wide(a)), params), tx.init(params))

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: PyTree) -> tuple[PyTree, EmaState]:
        if params is None:
            raise ValueError("ema: the update has no parameters\n  fix:      tx.update(g, state, params)")
        updates, inner_state = inner.update(updates, state.inner, params, **extra)
        share = 1 - (decay(state.count) if callable(decay) else decay)
        moved = lambda average, new: average + jnp.asarray(share, average.dtype) * (new.astype(average.dtype) - average)
        ema_params = jax.tree.map(moved, state.ema_params, optax.apply_updates(params, updates))
        count = jnp.asarray(optax.safe_increment(state.count))
        return updates, EmaState(count, ema_params, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)
