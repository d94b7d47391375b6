"""The jitted steps: gradients inside `shard_map`, then the update on global arrays; and evaluations of a loss."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from zerojax.step import models, state as states
from zerojax.step.batch import RowsOfSet, batch_specs, warn_of_keys
from zerojax.step.config import StepSettings, ZeroConfig, leaf_specs, shard_map_over_data
from zerojax.step.gradient import DeviceGradient, compute_gradients, device_gradient
from zerojax.step.jitted_step import Step, name_of_loss
from zerojax.step.loss_traces import check_evaluation, check_loss, explained_by_rows, with_state_keys
from zerojax.step.optimizers import scheduled_learning_rate
from zerojax.step.state import StateLayout, TrainState
from zerojax.step.update import apply_gradients
from zerojax.step.whole_batch import Purpose, over_whole_batch
from zerojax.utils.typing import Array, PyTree


class _CheckedLoss:
    """The user's loss in a step: it is checked when the step is traced for the first time."""

    def __init__(self, config: ZeroConfig, settings: StepSettings, loss_fn: Callable[..., Any]):
        self._config, self._settings, self._loss_fn = config, settings, loss_fn
        self._seen: set[tuple[StateLayout, Purpose]] = set()

    def gradient(self, layout: StateLayout) -> DeviceGradient:
        """The gradient of the loss for such parameters."""
        return device_gradient(self._config, layout, self._loss_fn, self._settings)

    @contextlib.contextmanager
    def over_batch(self, gradient: DeviceGradient, args: Any, purpose: Purpose) -> Iterator[DeviceGradient]:
        """The gradient of a loss whose outputs are those of the whole batch; errors of the loss are explained.

        Args:
            gradient: of the loss.
            args: global arrays: (parameter leaves, model state, batch, key).
            purpose: of the step.
        """
        key = gradient.layout, purpose
        is_seen = key in self._seen
        with explained_by_rows(gradient, args):
            if not is_seen:
                if purpose is Purpose.DATA_SET:
                    check_evaluation(gradient, args)
                if self._config.other_axes:
                    check_loss(gradient, args)
                if purpose is Purpose.TRAINING:
                    warn_of_keys(args[2])
            with_keys = with_state_keys(gradient, args)
            of_batch = over_whole_batch(with_keys, args, purpose, quiet=is_seen)
            self._seen.add(key)
            yield of_batch


class TrainStep(Step):
    """A `Step` that returns (state, metrics).

    Args:
        config: mesh, axes, stage and precision.
        settings: the settings of the step.
        loss_fn: the loss function of the user.
    """

    donates = True

    def __init__(self, config: ZeroConfig, settings: StepSettings, loss_fn: Callable[..., Any]):
        self._loss = _CheckedLoss(config, settings, loss_fn)
        super().__init__(config, settings, self._build_step, name_of_loss(loss_fn))

    def gradient(self, layout: StateLayout) -> DeviceGradient:
        """The gradient of the loss for such parameters."""
        return self._loss.gradient(layout)

    def _build_step(self, like: TrainState) -> Callable[..., Any]:
        layout, shardings = like.layout, states.shardings(self.config, like)
        gradient, clip_norm = self.gradient(layout), self.settings.clip_norm

        def step(state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Array]]:
            # Compute the gradient.
            scale = state.loss_scale.value if state.loss_scale else jnp.float32(1)
            key = jax.random.fold_in(state.key, state.step)
            args = (jax.tree.leaves(state.params), state.model_state, batch, key)
            with self._loss.over_batch(gradient, args, Purpose.TRAINING) as of_batch:
                result = compute_gradients(of_batch, (*args, scale))

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


class EvalStep(Step):
    """A `Step` that returns the loss and the metrics of a batch; `zerojax.evaluate` calls `rows` instead.

    Args:
        config, settings, loss_fn: as of `TrainStep`. An nnx.Module is put into evaluation mode.

    Attributes:
        rows: a step over (state, `RowsOfSet`) that returns the `Sums` of the loss and the metrics.
    """

    def __init__(self, config: ZeroConfig, settings: StepSettings, loss_fn: Callable[..., Any]):
        self._loss = _CheckedLoss(config, settings, models.in_evaluation_mode(loss_fn))
        name = name_of_loss(loss_fn)
        super().__init__(config, settings, self._build_means, name)
        self.rows = Step(config, settings, self._build_sums, name)

    def _build_means(self, like: TrainState) -> Callable[..., Any]:
        gradient = self._loss.gradient(like.layout)

        def step(state: TrainState, batch: PyTree) -> dict[str, Array]:
            args = (jax.tree.leaves(state.params), state.model_state, batch, state.key)
            with self._loss.over_batch(gradient, args, Purpose.BATCH) as of_batch:
                loss, metrics = self._on_devices(gradient, of_batch.evaluate, args)
            return {"loss": loss, **metrics}

        return step

    def _build_sums(self, like: TrainState) -> Callable[..., Any]:
        gradient = self._loss.gradient(like.layout)

        def step(state: TrainState, rows: RowsOfSet) -> models.Sums:
            args = (jax.tree.leaves(state.params), state.model_state, rows, state.key)
            with self._loss.over_batch(gradient, (*args[:2], rows.batch, args[3]), Purpose.DATA_SET) as of_set:
                return self._on_devices(gradient, of_set.evaluate_rows, args)

        return step

    def _on_devices(self, gradient: DeviceGradient, fn: Callable[..., Any], args: Any) -> Any:
        """Runs a function of (parameter leaves, model state, batch, key) on each device's part of them."""
        replicated: Any = PartitionSpec()
        in_specs = (
            leaf_specs(self.config, gradient.layout.leaves, self.config.stage.shards_params),
            replicated,
            batch_specs(self.config.axes, args[2]),
            replicated,
        )
        return shard_map_over_data(self.config, fn, in_specs, replicated)(*args)
