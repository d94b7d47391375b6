"""Describes training states in a few lines, from their shapes and shardings alone: no value is waited for."""

from __future__ import annotations

import collections
import math
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax.core import Tracer

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
    """The bytes of the shards on one device; of values that are traced, those of the whole arrays."""
    optimizer = (state.master, state.opt_state)
    parts = {"parameters": state.params, "optimizer state": optimizer, "model state": state.model_state}
    held, in_host = collections.Counter(), collections.Counter()
    for name, tree in parts.items():
        for a in jax.tree.leaves(tree):
            sharding = None if isinstance(a, Tracer) else getattr(a, "sharding", None)
            memory = in_host if getattr(sharding, "memory_kind", None) == PINNED_HOST else held
            shape = a.shape if sharding is None else sharding.shard_shape(tuple(a.shape))
            memory[name] += 0 if is_key(a) else math.prod(shape) * a.dtype.itemsize
    texts = []
    for sizes in (held, in_host) if any(in_host.values()) else (held,):
        listed = ", ".join(f"{name} {bytes_text(size)}" for name, size in sizes.items() if size)
        texts.append(f"{bytes_text(sum(sizes.values()))} ({listed})")
    return "\n  in host memory: ".join(texts)
