"""Optax transformations that make the updates of DeepSpeed's optimizers and learning rate schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from zerojax.deepspeed.counterparts import Counterpart, close, lost, mapped

Params = Mapping[str, Any]
RateSchedule = Callable[[Any], Any]
_LEARNING_RATE = 1e-3  # DeepSpeed's default for each optimizer but SGD, which has none


class TypeRule(NamedTuple):
    """How a type of optimizer or schedule is made.

    Attributes:
        make: from its parameters, and the learning rate (a number or a schedule).
        reads: the parameters that it takes.
        counterpart: what the result is.
    """

    make: Callable[[Params, Any], Any]
    reads: tuple[str, ...]
    counterpart: Counterpart


def _injected(make: Callable[..., optax.GradientTransformation], learning_rate: Any, **options: Any) -> Any:
    """The optimizer, with the learning rate in its state, from where a step reports it."""
    return optax.inject_hyperparams(make, static_args=tuple(options))(learning_rate=learning_rate, **options)


def _betas(params: Params) -> dict[str, float]:
    b1, b2 = params.get("betas", (0.9, 0.999))
    return {"b1": float(b1), "b2": float(b2)}


def _number(params: Params, name: str, default: float = 0.0) -> float:
    return float(params.get(name, default))


def _after_decay(params: Params, tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Adds the weight decay to the gradient before anything else, as an L2 penalty would."""
    decay = _number(params, "weight_decay")
    return optax.chain(optax.add_decayed_weights(decay), tx) if decay else tx


def _adamw(params: Params, learning_rate: Any) -> optax.GradientTransformation:
    options = {**_betas(params), "eps": _number(params, "eps", 1e-8)}
    return _injected(optax.adamw, learning_rate, weight_decay=_number(params, "weight_decay"), **options)


def _adam(params: Params, learning_rate: Any) -> optax.GradientTransformation:
    if params.get("adam_w_mode", True):  # so that DeepSpeed's Adam is AdamW, unless the option says otherwise
        return _adamw(params, learning_rate)
    return _after_decay(
        params, _injected(optax.adam, learning_rate, eps=_number(params, "eps", 1e-8), **_betas(params))
    )


def _sgd(params: Params, learning_rate: Any) -> optax.GradientTransformation:
    momentum = _number(params, "momentum") or None
    sgd = _injected(optax.sgd, learning_rate, momentum=momentum, nesterov=bool(params.get("nesterov", False)))
    return _after_decay(params, sgd)


def _lion(params: Params, learning_rate: Any) -> optax.GradientTransformation:
    return _injected(optax.lion, learning_rate, weight_decay=_number(params, "weight_decay"), **_betas(params))


def _adagrad(params: Params, learning_rate: Any) -> optax.GradientTransformation:
    options = {"initial_accumulator_value": _number(params, "initial_accumulator_value")}
    return _after_decay(params, _injected(optax.adagrad, learning_rate, eps=_number(params, "eps", 1e-10), **options))


def _lamb(params: Params, learning_rate: Any) -> optax.GradientTransformation:
    options = {**_betas(params), "eps": _number(params, "eps", 1e-8)}
    return _injected(optax.lamb, learning_rate, weight_decay=_number(params, "weight_decay"), **options)


_ADAM_PARAMS = ("lr", "betas", "eps", "weight_decay", "adam_w_mode")
OPTIMIZERS = {
    "adam": TypeRule(_adam, _ADAM_PARAMS, mapped("optax.adamw, or optax.adam with adam_w_mode false")),
    "adamw": TypeRule(_adamw, _ADAM_PARAMS, mapped("optax.adamw")),
    "sgd": TypeRule(_sgd, ("lr", "momentum", "nesterov", "weight_decay"), mapped("optax.sgd")),
    "lion": TypeRule(_lion, ("lr", "betas", "weight_decay"), mapped("optax.lion")),
    "adagrad": TypeRule(
        _adagrad,
        ("lr", "eps", "weight_decay", "initial_accumulator_value"),
        close("optax.adagrad, which adds eps inside of the root"),
    ),
    "lamb": TypeRule(
        _lamb,
        ("lr", "betas", "eps", "weight_decay"),
        close("optax.lamb, which does not limit the trust ratio; DeepSpeed limits it to 0.01 to 10"),
    ),
}


class _Warmup(NamedTuple):
    """The warmup of a schedule, as a function of DeepSpeed's iteration."""

    num_steps: float
    is_linear: bool

    @classmethod
    def of(cls, params: Params) -> _Warmup:
        return cls(float(max(2, int(params.get("warmup_num_steps", 1000)))), params.get("warmup_type") == "linear")

    def then(self, count: Any, start: float, after: Callable[[Any], Any]) -> Any:
        """Rises from `start` to 1, and is `after(iteration)` from then on.

        DeepSpeed advances a schedule after each update, and starts before iteration 0: update i, counted from 0, has
        the learning rate of iteration i - 1, and the first update has that of iteration 0.
        """
        iteration = jnp.maximum(jnp.asarray(count, jnp.float32) - 1, 0)
        risen = iteration / self.num_steps if self.is_linear else jnp.log1p(iteration) / math.log(self.num_steps)
        return jnp.where(iteration < self.num_steps, start + (1 - start) * risen, after(iteration))


def _between_rates(params: Params, most: float, after: Callable[[Any, float], Any]) -> RateSchedule:
    least, warmup = _number(params, "warmup_min_lr"), _Warmup.of(params)
    return lambda count: least + (most - least) * warmup.then(count, 0.0, lambda i: after(i, warmup.num_steps))


def _warmup_lr(params: Params, learning_rate: float) -> RateSchedule:
    return _between_rates(params, _number(params, "warmup_max_lr", learning_rate), lambda iteration, num_steps: 1.0)


def _warmup_decay_lr(params: Params, learning_rate: float) -> RateSchedule:
    total = float(params["total_num_steps"])

    def decay(iteration: Any, num_steps: float) -> Any:
        return jnp.maximum(0.0, (total - iteration) / max(1.0, total - num_steps))

    return _between_rates(params, _number(params, "warmup_max_lr", _LEARNING_RATE), decay)


def _warmup_cosine_lr(params: Params, learning_rate: float) -> RateSchedule:
    total, least = float(params["total_num_steps"]), _number(params, "cos_min_ratio", 1e-4)
    warmup, start = _Warmup.of(params), _number(params, "warmup_min_ratio")

    def cosine(iteration: Any) -> Any:
        progress = (iteration - warmup.num_steps + 1) / max(1.0, total - warmup.num_steps)
        return least + (1 - least) * (1 + jnp.cos(math.pi * jnp.minimum(1.0, progress))) / 2

    def schedule(count: Any) -> Any:  # alone among the schedules, this one has the rate 0 before iteration 0
        return learning_rate * jnp.where(jnp.asarray(count) == 0, 0.0, warmup.then(count, start, cosine))

    return schedule


_WARMUP_PARAMS = ("warmup_num_steps", "warmup_type")
_RATE_PARAMS = ("warmup_min_lr", "warmup_max_lr")
SCHEDULERS = {
    "WarmupLR": TypeRule(_warmup_lr, (*_RATE_PARAMS, *_WARMUP_PARAMS), mapped("a schedule of `optimizer`")),
    "WarmupDecayLR": TypeRule(
        _warmup_decay_lr, ("total_num_steps", *_RATE_PARAMS, *_WARMUP_PARAMS), mapped("a schedule of `optimizer`")
    ),
    "WarmupCosineLR": TypeRule(
        _warmup_cosine_lr,
        ("total_num_steps", "warmup_min_ratio", "cos_min_ratio", *_WARMUP_PARAMS),
        mapped("a schedule of `optimizer`; the first update has the rate 0"),
    ),
}


class MappedOptimizer(NamedTuple):
    """An optimizer made from the blocks `optimizer` and `scheduler`.

    Attributes:
        tx: the optimizer with its schedule, or None if either has no counterpart.
        schedule: the learning rate by the count of updates, or None if it is constant.
        notes: path of an option -> its counterpart, where that depends on the type.
    """

    tx: optax.GradientTransformation | None
    schedule: RateSchedule | None
    notes: dict[str, Counterpart]


def optimizer_of(optimizer: Params, scheduler: Params) -> MappedOptimizer:
    """Makes the optimizer of the two blocks, `{"type": ..., "params": {...}}` each, or {} if there is none.

    Raises:
        ValueError: if a schedule has no `total_num_steps`, but ends, or a parameter is not of the right type.
    """
    kind, params = str(optimizer.get("type", "")), optimizer.get("params") or {}
    rate_kind, rate_params = str(scheduler.get("type", "")), scheduler.get("params") or {}
    rule, rate_rule = OPTIMIZERS.get(kind.lower()), SCHEDULERS.get(rate_kind)
    notes = {
        **_notes("optimizer", optimizer, kind, rule, lost(f"pass your own optimizer: optax has no {kind!r} as it is")),
        **_notes("scheduler", scheduler, rate_kind, rate_rule, lost(f"pass your own schedule for {rate_kind!r}")),
    }
    learning_rate = params.get("lr", _LEARNING_RATE)
    schedule = None
    if rate_rule:
        if "total_num_steps" in rate_rule.reads and not rate_params.get("total_num_steps"):
            raise ValueError(
                f"from_deepspeed: {rate_kind} ends after a number of updates, which is missing\n"
                f"  got:      scheduler.params {dict(rate_params)}\n"
                f"  fix:      give total_num_steps"
            )
        schedule = _made(rate_kind, rate_rule, rate_params, learning_rate)
    is_complete = rule is not None and (rate_rule is not None or not rate_kind)
    tx = _made(kind, rule, params, schedule or learning_rate) if rule is not None and is_complete else None
    return MappedOptimizer(tx, schedule, notes)


def _made(kind: str, rule: TypeRule, params: Params, learning_rate: Any) -> Any:
    """The optimizer or the schedule. Raises ValueError if a parameter is not of the right type."""
    try:
        return rule.make(params, learning_rate if callable(learning_rate) else float(learning_rate))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"from_deepspeed: {kind} cannot be made of its parameters\n"
            f"  got:      {dict(params)}: {error}\n"
            f"  fix:      numbers, and two of them for betas"
        ) from error


def _notes(block: str, given: Params, kind: str, rule: TypeRule | None, missing: Counterpart) -> dict[str, Counterpart]:
    """The counterparts of a block's options that depend on the type."""
    if not kind:
        return {}
    notes = {f"{block}.type": rule.counterpart if rule else missing}
    every = {name for each in (*OPTIMIZERS.values(), *SCHEDULERS.values()) for name in each.reads}
    for name in given.get("params") or {}:
        if rule is None or (name in every and name not in rule.reads):
            notes[f"{block}.params.{name}"] = missing if rule is None else lost(f"{kind} takes no {name}")
    return notes
