"""Describes training states in a few lines, from their shapes and shardings alone: no value is waited for."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax.core import Tracer

from zerojax.sharding import placement
from zerojax.sharding.placement import PINNED_HOST
from zerojax.step.models import is_key
from zerojax.utils.text import SPACE, abbreviate, bytes_text, count_text, fold, mesh_text
from zerojax.utils.typing import PyTree

if TYPE_CHECKING:
    from zerojax.step.state import TrainState


def state_text(state: TrainState) -> str:
    """The `repr` of a `TrainState`: its step, stage, size and bytes on a device, and what is not sharded."""
    layout = state.layout
    leaves, config = layout.leaves, layout.config
    trained = sum(leaf.size for leaf in leaves if leaf.trainable)
    total = sum(leaf.size for leaf in leaves)
    of_these = "" if trained == total else f", {count_text(trained)} of them trained"
    where = "" if config is None else f", {config.stage.title} on {mesh_text(dict(config.mesh.shape))}"
    lines = [
        f"TrainState({_step_text(state)}{where}",
        f"  {count_text(total)} parameters in {len(leaves):,} leaves{of_these}",
        f"  on a device: {_held_text(state)}",
    ]
    whole = [leaf.path for leaf in leaves if leaf.dim is None]
    if whole and config is not None and config.stage.shards_optimizer and config.axes.num_shards > 1:
        names = [each.text.replace(SPACE, " ") for each in fold(whole, [0] * len(whole))]
        lines.append(f"  not sharded: {abbreviate(names, separator=', ')}")
    return "\n".join(lines) + ")"


def _step_text(state: TrainState) -> str:
    """The step if it is known without waiting for a running one, or else why it is not."""
    step: PyTree = state.step
    if isinstance(step, Tracer):
        return "traced"
    if isinstance(step, jax.ShapeDtypeStruct):
        return "avals"
    if any(a.is_deleted() for a in jax.tree.leaves(state) if isinstance(a, jax.Array)):
        return "donated to a step"
    return f"step {int(np.asarray(step.addressable_data(0)))}" if step.is_ready() else "step not ready"


def _held_text(state: TrainState) -> str:
    optimizer = (state.master, state.opt_state)
    parts = {"parameters": state.params, "optimizer state": optimizer, "model state": state.model_state}
    offloads = state.layout.config is not None and state.layout.config.offloads_optimizer
    host = {name: _held_bytes(tree, of_host=True) if offloads else 0 for name, tree in parts.items()}
    held = {name: _held_bytes(tree) - host[name] for name, tree in parts.items()}
    listed = lambda sizes: ", ".join(f"{name} {bytes_text(size)}" for name, size in sizes.items() if size)
    total = lambda sizes: f"{bytes_text(sum(sizes.values()))} ({listed(sizes)})"
    return f"{total(held)}\n  in host memory: {total(host)}" if any(host.values()) else total(held)


def _held_bytes(tree: PyTree, of_host: bool = False) -> int:
    """Bytes of the shards of one device; of values that are traced, those of the whole arrays.

    `of_host`: only of arrays in host memory.
    """
    arrays = [a for a in jax.tree.leaves(tree) if not is_key(a)]
    if of_host:
        arrays = [a for a in arrays if getattr(getattr(a, "sharding", None), "memory_kind", None) == PINNED_HOST]
    return sum(
        math.prod(a.shape) * a.dtype.itemsize
        if isinstance(a, Tracer) or getattr(a, "sharding", None) is None
        else placement.shard_bytes(a, a.sharding)
        for a in arrays
    )
