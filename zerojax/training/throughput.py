"""What the throughput of a run is computed from: the tokens of a row, and the model's share of the chips' peak."""

from __future__ import annotations

import logging
from typing import Any

from zerojax.analysis.hardware import chip_of_kind
from zerojax.step.batch import num_global_rows
from zerojax.step.config import ZeroConfig
from zerojax.step.state import TrainState
from zerojax.training.recorder import RowCosts
from zerojax.utils.typing import PyTree

log = logging.getLogger("zerojax")


def row_costs(config: ZeroConfig, step: Any, state: TrainState, batch: PyTree, tokens_per_row: int | None) -> RowCosts:
    """Returns the costs of a row of a run.

    The model FLOPs utilization is known if the data sheet of the chip is, if the step is one of `zero.train_step`, and
    if every parameter is trained: frozen ones have fewer products in the backward pass.

    Args:
        config: the mesh.
        step: of the run.
        state, batch: of the first step.
        tokens_per_row: see `fit`.

    Cost: traces the loss if the chip is known, which takes seconds.
    """
    chip = chip_of_kind(config.mesh.devices.flat[0].device_kind)
    is_known = chip is not None and chip.platform != "cpu" and hasattr(step, "model_flops")
    if chip is None or not is_known or not all(leaf.trainable for leaf in state.definition.leaves):
        return RowCosts(tokens_per_row)
    try:
        flops = step.model_flops(state, batch)
    except ValueError as error:  # of a kernel
        log.info("fit: the model FLOPs utilization is not shown: %s", error)
        return RowCosts(tokens_per_row)
    return RowCosts(tokens_per_row, flops / num_global_rows(batch) / (chip.flops.peak * config.mesh.size))
