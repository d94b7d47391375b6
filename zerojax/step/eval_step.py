"""The jitted evaluation step: the loss and the metrics of a batch, or their sums over rows of a data set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from zerojax.step import models
from zerojax.step.batch import RowsOfSet, batch_specs
from zerojax.step.config import StepSettings, ZeroConfig, leaf_specs, shard_map_over_data
from zerojax.step.gradient import DeviceGradient, device_gradient
from zerojax.step.jitted_step import Step, name_of_loss
from zerojax.step.loss_traces import check_evaluation, check_loss, explained_by_rows, with_state_keys
from zerojax.step.state import StateLayout, TrainState
from zerojax.step.whole_batch import Purpose, over_whole_batch
from zerojax.utils.typing import Array, PyTree


class EvalStep(Step):
    """A `Step` that returns the loss and the metrics of a batch; `zerojax.evaluate` calls `rows` instead.

    Attributes:
        rows: a step over (state, `RowsOfSet`) that returns the `Sums` of the loss and the metrics.
    """

    def __init__(
        self,
        config: ZeroConfig,
        settings: StepSettings,
        gradient_of: Callable[[StateLayout], DeviceGradient],
        loss_name: str,
    ):
        super().__init__(config, settings, self._build_means, loss_name)
        self._gradient_of = gradient_of
        self.rows = Step(config, settings, self._build_sums, loss_name)

    def _build_means(self, like: TrainState) -> Callable[..., Any]:
        gradient, checked = self._gradient_of(like.layout), set[bool]()

        def step(state: TrainState, batch: PyTree) -> dict[str, Array]:
            args = (jax.tree.leaves(state.params), state.model_state, batch, state.key)
            with explained_by_rows(gradient, args):
                if self.config.other_axes:
                    check_loss(gradient, args)
                with_keys = with_state_keys(gradient, args)
                of_batch = over_whole_batch(with_keys, args, Purpose.BATCH, quiet=bool(checked))
                checked.add(True)
                loss, metrics = self._on_devices(gradient, of_batch.evaluate, args)
            return {"loss": loss, **metrics}

        return step

    def _build_sums(self, like: TrainState) -> Callable[..., Any]:
        gradient, checked = self._gradient_of(like.layout), set[bool]()

        def step(state: TrainState, rows: RowsOfSet) -> models.Sums:
            args = (jax.tree.leaves(state.params), state.model_state, rows, state.key)
            of_batch = (*args[:2], rows.batch, args[3])
            with explained_by_rows(gradient, of_batch):
                if not checked:
                    check_evaluation(gradient, of_batch)
                    if self.config.other_axes:
                        check_loss(gradient, of_batch)
                with_keys = with_state_keys(gradient, of_batch)
                of_set = over_whole_batch(with_keys, of_batch, Purpose.DATA_SET, quiet=bool(checked))
                checked.add(True)
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


def eval_step(config: ZeroConfig, loss_fn: Callable[..., Any], settings: StepSettings) -> EvalStep:
    """See `Zero.eval_step`."""
    evaluated = models.in_evaluation_mode(loss_fn)

    def gradient_of(layout: StateLayout) -> DeviceGradient:
        return device_gradient(config, layout, evaluated, settings)

    return EvalStep(config, settings, gradient_of, name_of_loss(loss_fn))
