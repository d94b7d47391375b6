"""Explains the placement of a training state: spec and bytes per device of every leaf, and ZeRO's formula."""

from __future__ import annotations

import dataclasses
import functools
import io
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Column, Table

from zerojax.sharding import placement
from zerojax.sharding.annotations import spec_text
from zerojax.sharding.axes import Axes, axis_names
from zerojax.sharding.dim_choice import choose_dim
from zerojax.sharding.placement import Leaf
from zerojax.sharding.uneven import uneven_text
from zerojax.step.config import ZeroConfig
from zerojax.step.loss_traces import Use
from zerojax.step.state import TrainState, logical_avals
from zerojax.typing import AnyMesh, PyTree, Shape


@dataclasses.dataclass(frozen=True)
class Row:
    """The placement of one leaf.

    Attributes:
        category: 'params', 'grads', 'optimizer' or 'model_state'.
        path: keys joined by '/'.
        shape, dtype: of the full leaf.
        spec: the PartitionSpec as text.
        bytes_per_device: bytes of the leaf on one device.
        undivided_bytes: bytes on one device if the leaf were not sharded over the data axes.
        zeros_bytes: of `bytes_per_device`, the bytes of zeros that pad the leaf, as a mean over devices.
        reason: why the leaf is sharded in this dim, or why it is replicated.
    """

    category: str
    path: str
    shape: Shape
    dtype: str
    spec: str
    bytes_per_device: int
    undivided_bytes: int
    zeros_bytes: float
    reason: str


@dataclasses.dataclass(frozen=True)
class UnitRow:
    """A unit: leaves that are gathered together.

    Attributes:
        name: the leading part of the paths of its leaves.
        num_leaves: the number of its leaves.
        num_bytes: bytes of its full leaves as they are gathered; of stacked leaves, of one layer.
        places: the positions in the forward pass at which it is used, counted from 0; empty if unknown, or unused.
        looked_up: those of `places` at which only rows of it are looked up, and it is not gathered.
    """

    name: str
    num_leaves: int
    num_bytes: int
    places: tuple[int, ...]
    looked_up: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The placement of a training state, leaf by leaf, with the bytes per device. Prints as tables.

    Attributes:
        rows: one for each leaf of parameters, gradients, optimizer state and model state.
        units: one row for each unit, in the order of their first use if that is known, or else of the leaves.
        large_unit: what to do about a unit that holds most of the weights, or None.
        uneven: what to do about replicated leaves or zeros that pad shards, or None if they are few.
        totals: category -> bytes per device.
        formula: category -> bytes per device if every leaf were divided evenly over the shard axes (ZeRO, table 1).
        zeros: category -> of `totals`, the bytes of the zeros that make shards equal, as a mean over devices.
        replicated: the rows of leaves that are replicated although the stage shards their category.
    """

    rows: tuple[Row, ...]
    units: tuple[UnitRow, ...]
    large_unit: str | None
    uneven: str | None
    totals: dict[str, int]
    formula: dict[str, float]
    zeros: dict[str, float]
    replicated: tuple[Row, ...]

    def __str__(self) -> str:
        shape = lambda row: "x".join(map(str, row.shape)) or "scalar"
        right = lambda header: Column(header, justify="right")
        headers = ("category", "leaf", "shape", "dtype", "spec", right("bytes/device"), "reason")
        leaves = Table(*headers, title="Placement of the state")
        for row in self.rows:
            size = f"{row.bytes_per_device:,}"
            leaves.add_row(row.category, row.path, shape(row), row.dtype, row.spec, size, row.reason)
        units = Table("unit", right("leaves"), right("bytes"), right("place"), title="Units: gathered together")
        for unit in self.units:
            places = ", ".join(f"{place}{' (rows)' if place in unit.looked_up else ''}" for place in unit.places)
            units.add_row(unit.name, f"{unit.num_leaves:,}", f"{unit.num_bytes:,}", places)
        totals = Table(
            "category", right("bytes/device"), right("ZeRO formula"), right("zeros that pad shards"), title="Totals"
        )
        for name, total in self.totals.items():
            formula = f"{self.formula[name]:,.0f}" if name in self.formula else ""
            totals.add_row(name, f"{total:,}", formula, f"{self.zeros[name]:,.0f}" if self.zeros[name] else "")
        rest: Table | str = "Every leaf that the stage shards is sharded."
        if self.replicated:
            rest = Table("category", "leaf", "shape", right("bytes/device"), "reason", title="Not sharded")
            for row in self.replicated:
                rest.add_row(row.category, row.path, shape(row), f"{row.bytes_per_device:,}", row.reason)
        text = io.StringIO()
        Console(file=text, width=150).print(leaves, units, totals, rest, *filter(None, [self.large_unit, self.uneven]))
        return text.getvalue()


_CATEGORIES = ("params", "grads", "optimizer", "model_state")


def explain(config: ZeroConfig, state: TrainState, uses: Sequence[tuple[Use, ...]] | None = None) -> Explanation:
    """See `Zero.explain`. `uses` tells where each leaf is used in the forward pass."""
    leaves = {leaf.path: leaf for leaf in state.definition.leaves}
    mesh = jax.tree.leaves(state.params)[0].sharding.mesh
    stage, axes = config.stage, config.axes
    row = functools.partial(_row, axes)
    gradient = functools.partial(_gradient, config, mesh)
    opt_shapes = [tuple(a.shape) for a in jax.tree.leaves(logical_avals(state).opt_state)]
    optimizer = zip(_leaves(state.opt_state), opt_shapes, strict=True)
    rows = [
        *(row("params", path, a, leaves[path].shape, leaves[path].reason) for path, a in _leaves(state.params)),
        *(row("grads", f.path, gradient(f), f.shape, f.reason) for f in leaves.values() if f.trainable),
        *(
            row("optimizer", f"master/{path}", a, leaves[path].shape, leaves[path].reason)
            for path, a in _leaves(state.master)
        ),
        *(row("optimizer", path, a, s, _optimizer_reason(path, s, leaves, axes)) for (path, a), s in optimizer),
        *(row("model_state", path, a, a.shape, "replicated: model state") for path, a in _leaves(state.model_state)),
    ]
    shards = {
        "params": axes.num_shards if stage.shards_params else 1,
        "grads": axes.num_shards if stage.shards_grads else 1,
        "optimizer": axes.num_shards if stage.shards_optimizer else 1,
    }
    of = lambda name: [row for row in rows if row.category == name]
    totals = {name: sum(row.bytes_per_device for row in of(name)) for name in _CATEGORIES}
    formula = {name: sum(row.undivided_bytes for row in of(name)) / n for name, n in shards.items()}
    zeros = {name: sum(row.zeros_bytes for row in of(name)) for name in _CATEGORIES}
    replicated = [r for r in rows if shards.get(r.category, 1) > 1 and r.bytes_per_device == r.undivided_bytes]
    units = _units(state.definition.leaves, uses)
    large_unit = placement.large_unit_text(state.definition.leaves)
    uneven = uneven_text(state.definition.leaves, axes) if stage.shards_optimizer else None
    return Explanation(tuple(rows), units, large_unit, uneven, totals, formula, zeros, tuple(replicated))


def _units(leaves: Sequence[Leaf], uses: Sequence[tuple[Use, ...]] | None) -> tuple[UnitRow, ...]:
    members: dict[str, list[int]] = {}
    for k, leaf in enumerate(leaves):
        members.setdefault(leaf.unit, []).append(k)
    rows = []
    for name, unit in members.items():
        num_bytes = sum(leaves[k].size_at_once * leaves[k].compute_dtype.itemsize for k in unit)
        of_unit = {use for k in unit for use in uses[k]} if uses else set()
        places = tuple(sorted(use.place for use in of_unit))
        rows.append(UnitRow(name, len(unit), num_bytes, places, tuple(use.place for use in of_unit if use.lookup)))
    return tuple(sorted(rows, key=lambda row: row.places[:1] or (len(leaves),)) if uses else rows)


def _leaves(tree: PyTree) -> list[tuple[str, Any]]:
    """The leaves of a tree with their paths."""
    return [(placement.path_text(path), a) for path, a in jax.tree_util.tree_leaves_with_path(tree)]


def _row(axes: Axes, category: str, path: str, stored: Any, shape: Sequence[int], reason: str) -> Row:
    spec, mesh = stored.sharding.spec, stored.sharding.mesh
    others = [[name for name in axis_names(entry) if name not in axes.data] for entry in spec]
    undivided = NamedSharding(mesh, PartitionSpec(*(tuple(names) or None for names in others)))
    logical = jax.ShapeDtypeStruct(tuple(shape), stored.dtype)
    on_device, full = placement.shard_bytes(stored, stored.sharding), placement.shard_bytes(logical, undivided)
    zeros = on_device * (1 - math.prod(shape) / max(1, math.prod(stored.shape)))
    return Row(category, path, logical.shape, str(stored.dtype), spec_text(spec), on_device, full, zeros, reason)


def _gradient(config: ZeroConfig, mesh: AnyMesh, leaf: Leaf) -> jax.ShapeDtypeStruct:
    """The gradient of a leaf within a step. At stage 1 it is full, until the reduce_scatter at the end of the step."""
    is_sharded = config.stage.shards_grads
    sharding = NamedSharding(mesh, leaf.spec(config.axes, is_sharded))
    shape, dtype = leaf.padding(is_sharded).stored_shape(leaf.shape), config.precision.wire_dtype(leaf.compute_dtype)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _optimizer_reason(path: str, shape: Shape, leaves: dict[str, Leaf], axes: Axes) -> str:
    """The reason of the parameter that a leaf of the optimizer state belongs to, or else one by the leaf's shape."""
    for end in range(len(path.split("/"))):
        leaf = leaves.get("/".join(path.split("/")[end:]))
        if leaf is not None and leaf.shape == shape:
            return leaf.reason
    return choose_dim(shape, axes.num_shards, stacked=False).reason
