"""What a state holds per device, leaf by leaf, beside the formula of ZeRO."""

from __future__ import annotations

import dataclasses
import functools
import io
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

from zerojax.sharding import placement
from zerojax.sharding.annotations import spec_text
from zerojax.sharding.axes import Axes, axis_names
from zerojax.sharding.placement import Leaf
from zerojax.step.config import ZeroConfig
from zerojax.step.state import TrainState


@dataclasses.dataclass(frozen=True)
class Row:
    """One leaf: where it lives, what a device holds of it, and why."""

    category: str  # params, grads, optimizer, model_state
    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: str
    bytes_per_device: int
    undivided_bytes: int  # what a device would hold if no data axis divided the leaf
    reason: str


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Every leaf of the model states, bytes per device by category, and what a stage would shard and does not.

    Attributes:
        rows: one per leaf of parameters, gradients, optimizer state and model state.
        totals: category -> bytes per device.
        formula: category -> bytes per device if every leaf were evenly divided over the data axes (ZeRO, table 1).
        replicated: rows that the stage would shard and that are whole.
    """

    rows: tuple[Row, ...]
    totals: dict[str, int]
    formula: dict[str, float]
    replicated: tuple[Row, ...]

    def __str__(self) -> str:
        leaves = Table("", "leaf", "shape", "dtype", "spec", "bytes/device", "reason", title="Model states per device")
        for row in self.rows:
            shape = "x".join(map(str, row.shape)) or "scalar"
            leaves.add_row(row.category, row.path, shape, row.dtype, row.spec, f"{row.bytes_per_device:,}", row.reason)
        leaves.columns[5].justify = "right"
        totals = Table("", "bytes/device", "formula", title="Totals")
        for name, total in self.totals.items():
            formula = f"{self.formula[name]:,.0f}" if name in self.formula else ""
            totals.add_row(name, f"{total:,}", formula)
        for column in totals.columns[1:]:
            column.justify = "right"
        whole = Table("", "leaf", "shape", "bytes/device", "reason", title="Not sharded")
        for row in self.replicated:
            whole.add_row(row.category, row.path, str(row.shape), f"{row.bytes_per_device:,}", row.reason)
        text = io.StringIO()
        console = Console(file=text, width=150)
        console.print(
            leaves, totals, *([whole] if self.replicated else ["Every leaf that the stage shards is sharded."])
        )
        return text.getvalue()


_CATEGORIES = ("params", "grads", "optimizer", "model_state")


def explain(config: ZeroConfig, state: TrainState) -> Explanation:
    """See `Zero.explain`."""
    leaves = {leaf.path: leaf for leaf in state.definition.leaves}
    mesh = jax.tree.leaves(state.params)[0].sharding.mesh
    stage, axes = config.stage, config.axes
    row = functools.partial(_row, axes)
    gradient = functools.partial(_gradient, config, mesh)
    rows = [
        *(row("params", path, a, leaves[path].reason) for path, a in _leaves(state.params)),
        *(row("grads", leaf.path, gradient(leaf), leaf.reason) for leaf in leaves.values() if leaf.trainable),
        *(row("optimizer", f"master/{path}", a, leaves[path].reason) for path, a in _leaves(state.master)),
        *(row("optimizer", path, a, _optimizer_reason(path, a, leaves, axes)) for path, a in _leaves(state.opt_state)),
        *(row("model_state", path, a, "never sharded") for path, a in _leaves(state.model_state)),
    ]
    shards = {
        "params": axes.num_shards if stage.shards_params else 1,
        "grads": axes.num_shards if stage.shards_grads else 1,
        "optimizer": axes.num_shards if stage.shards_optimizer else 1,
    }
    of = lambda name: [row for row in rows if row.category == name]
    totals = {name: sum(row.bytes_per_device for row in of(name)) for name in _CATEGORIES}
    formula = {name: sum(row.undivided_bytes for row in of(name)) / n for name, n in shards.items()}
    whole = [r for r in rows if shards.get(r.category, 1) > 1 and r.bytes_per_device == r.undivided_bytes]
    return Explanation(tuple(rows), totals, formula, tuple(whole))


def _leaves(tree: Any) -> list[tuple[str, Any]]:
    return [(placement.path_text(path), a) for path, a in jax.tree_util.tree_leaves_with_path(tree)]


def _row(axes: Axes, category: str, path: str, aval: Any, reason: str) -> Row:
    spec, mesh = aval.sharding.spec, aval.sharding.mesh
    others = [[name for name in axis_names(entry) if name not in axes.data] for entry in spec]
    undivided = NamedSharding(mesh, PartitionSpec(*(tuple(names) or None for names in others)))
    held = placement.shard_bytes(aval, aval.sharding), placement.shard_bytes(aval, undivided)
    return Row(category, path, tuple(aval.shape), str(aval.dtype), spec_text(spec), *held, reason)


def _gradient(config: ZeroConfig, mesh: Any, leaf: Leaf) -> jax.ShapeDtypeStruct:
    """A gradient as it is held while a step runs; at stage 1 in full, until the one reduce-scatter."""
    sharding = NamedSharding(mesh, leaf.spec(config.axes, config.stage.shards_grads))
    return jax.ShapeDtypeStruct(leaf.shape, config.precision.reduce_dtype, sharding=sharding)


def _optimizer_reason(path: str, aval: Any, leaves: dict[str, Leaf], axes: Axes) -> str:
    for end in range(len(path.split("/"))):
        leaf = leaves.get("/".join(path.split("/")[end:]))
        if leaf is not None and leaf.shape == tuple(aval.shape):
            return leaf.reason
    return "own shape: " + placement.choose_dim(aval.shape, axes.num_shards, stacked=False)[1]
