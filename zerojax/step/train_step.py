"""The jitted training step: gradients inside `shard_map`, then the update on global arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from zerojax.step import models, state as states
from zerojax.step.batch import warn_of_keys
from zerojax.step.config import StepSettings, ZeroConfig
from zerojax.step.gradient import DeviceGradient, compute_gradients, device_gradient
from zerojax.step.jitted_step import Step, name_of_loss
from zerojax.step.loss_traces import (
    check_loss,
    explained_by_rows,
    with_state_keys,
)
from zerojax.step.optimizers import scheduled_learning_rate
from zerojax.step.state import StateLayout, TrainState
from zerojax.step.update import apply_gradients
from zerojax.step.whole_batch import Purpose, over_whole_batch
from zerojax.utils.typing import Array, PyTree


class TrainStep(Step):
    """A `Step` that returns (state, metrics).

    Args:
        config: mesh, axes, stage and precision.
        settings: the settings of the step.
        loss_fn: the loss function of the user.
    """

    donates = True

    def __init__(self, config: ZeroConfig, settings: StepSettings, loss_fn: Callable[..., Any]):
        self._loss_fn = loss_fn
        self._checked_losses: set[StateLayout] = set()  # a step may be traced more than once
        super().__init__(config, settings, self._build_step, name_of_loss(loss_fn))

    def gradient(self, layout: StateLayout) -> DeviceGradient:
        """The gradient of the loss for such parameters."""
        return device_gradient(self.config, layout, self._loss_fn, self.settings)

    def _build_step(self, like: TrainState) -> Callable[..., Any]:
        layout, shardings = like.layout, states.shardings(self.config, like)
        gradient, clip_norm = self.gradient(layout), self.settings.clip_norm

        def step(state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Array]]:
            scale = state.loss_scale.value if state.loss_scale else jnp.float32(1)
            key = jax.random.fold_in(state.key, state.step)
            args = (jax.tree.leaves(state.params), state.model_state, batch, key, scale)

            # Check the loss, and compute its gradient.
            is_checked = layout in self._checked_losses
            with explained_by_rows(gradient, args[:-1]):
                if not is_checked:
                    if self.config.other_axes:
                        check_loss(gradient, args[:-1])
                    warn_of_keys(batch)
                with_keys = with_state_keys(gradient, args[:-1])
                of_batch = over_whole_batch(with_keys, args[:-1], Purpose.TRAINING, quiet=is_checked)
                self._checked_losses.add(layout)
                result = compute_gradients(of_batch, args)

            # Clip, and update the state unless a gradient is not finite.
            norm = jnp.sqrt(result.squared_norm) / scale
            finite = jnp.isfinite(norm)
            factor = 1 / scale
            if clip_norm is not None:
                factor = factor * jnp.minimum(1, clip_norm / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))
            grads = [g for g in result.grads if g is not None]
            is_one = clip_norm is None and state.loss_scale is None
            after, params_norm = apply_gradients(
                gradient, state, shardings, grads, None if is_one else factor, finite, result.loss, result.divisor
            )
            keep = lambda new, old: new if models.is_key(new) else lax.select(finite, new, old)
            model_state = jax.tree.map(keep, result.model_state, state.model_state)
            after = dataclasses.replace(after, model_state=model_state)

            metrics = {
                "loss": result.loss,
                **result.metrics,
                "grad_norm": norm,
                "param_norm": jnp.sqrt(params_norm),
                "skipped": after.skipped,
                **_learning_rate(layout, state.opt_state, after.opt_state),
                **({"loss_scale": after.loss_scale.value} if after.loss_scale else {}),
            }
            return after, metrics

        return step


def _learning_rate(layout: StateLayout, before: PyTree, after: PyTree) -> dict[str, Array]:
    """The learning rate, if the optimizer has it in its state (optax.inject_hyperparams) or in a schedule."""
    found = [value for _, value in optax.tree.get_all_with_path(after, "learning_rate")]
    scalars = [value for value in found if isinstance(value, jax.Array) and value.ndim == 0]
    rate = scalars[0] if scalars else scheduled_learning_rate(layout.tx, before)
    return {} if rate is None else {"learning_rate": rate.astype(jnp.float32)}
