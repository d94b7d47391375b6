"""Explains the placement of a training state: spec and bytes per device of every leaf, and ZeRO's formula."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from zerojax.analysis.report.explanation import HOST_MEMORY, Explanation, Row, UnitRow
from zerojax.sharding import placement
from zerojax.sharding.annotations import spec_text
from zerojax.sharding.axes import Axes, axis_names
from zerojax.sharding.dim_choice import choose_dim
from zerojax.sharding.placement import Leaf
from zerojax.sharding.uneven import uneven_text
from zerojax.step.config import ZeroConfig
from zerojax.step.loss_traces import Use
from zerojax.step.state import TrainState, in_host, logical_avals
from zerojax.utils.text import bytes_text, mesh_text
from zerojax.utils.typing import AnyMesh, PyTree, Shape

CATEGORIES = ("params", "grads", "optimizer", "model_state")  # on a device


def explain(config: ZeroConfig, state: TrainState, uses: Sequence[tuple[Use, ...]] | None = None) -> Explanation:
    """See `Zero.explain`. `uses` tells where each leaf is used in the forward pass."""
    leaves = {leaf.path: leaf for leaf in state.definition.leaves}
    mesh = jax.tree.leaves(state.params)[0].sharding.mesh
    stage, axes = config.stage, config.axes
    row = functools.partial(_row, axes)
    gradient = functools.partial(gradient_aval, config, mesh)
    opt_shapes = [tuple(a.shape) for a in jax.tree.leaves(logical_avals(state).opt_state)]
    is_host = in_host(config, state)
    of_optimizer = lambda tree: [HOST_MEMORY if flag else "optimizer" for flag in jax.tree.leaves(tree)]
    optimizer = zip(of_optimizer(is_host.opt_state), _leaves(state.opt_state), opt_shapes, strict=True)
    master = zip(of_optimizer(is_host.master), _leaves(state.master), strict=True)
    host_params = {path for flag, path in zip(jax.tree.leaves(is_host.params), leaves, strict=True) if flag}
    of_params = lambda name, path: (HOST_MEMORY, f"{name}/{path}") if path in host_params else (name, path)
    shards = {
        "params": axes.num_shards if stage.shards_params else 1,
        "grads": axes.num_shards if stage.shards_grads else 1,
        "optimizer": axes.num_shards if stage.shards_optimizer else 1,
    }
    shards |= {HOST_MEMORY: shards["optimizer"]} if config.offloads_optimizer else {}
    categories = [*CATEGORIES, HOST_MEMORY] if config.offloads_optimizer else CATEGORIES
    whole = "there is one shard only" if axes.num_shards == 1 else stage.limit_text
    why = lambda path, category: leaves[path].reason if shards[category] > 1 else whole
    why_of_optimizer = lambda path, shape: (
        _optimizer_reason(path, shape, leaves, axes) if shards["optimizer"] > 1 else whole
    )
    rows = [
        *(
            row(*of_params("params", path), a, leaves[path].shape, why(path, "params"))
            for path, a in _leaves(state.params)
        ),
        *(
            row(*of_params("grads", f.path), gradient(f), f.shape, why(f.path, "grads"))
            for f in leaves.values()
            if f.trainable
        ),
        *(
            row(category, f"master/{path}", a, leaves[path].shape, why(path, "optimizer"))
            for category, (path, a) in master
        ),
        *(row(category, path, a, s, why_of_optimizer(path, s)) for category, (path, a), s in optimizer),
        *(row("model_state", path, a, a.shape, "replicated: model state") for path, a in _leaves(state.model_state)),
    ]
    of = lambda name: [row for row in rows if row.category == name]
    totals = {name: sum(row.bytes_per_device for row in of(name)) for name in categories}
    formula = {name: sum(row.undivided_bytes for row in of(name)) / n for name, n in shards.items()}
    zeros = {name: sum(row.zeros_bytes for row in of(name)) for name in categories}
    replicated = [r for r in rows if shards.get(r.category, 1) > 1 and r.bytes_per_device == r.undivided_bytes]
    units = _units(state.definition.leaves, uses)
    large_unit = placement.large_unit_text(state.definition.leaves)
    uneven = uneven_text(state.definition.leaves, axes) if stage.shards_optimizer else None
    held = bytes_text(sum(totals[name] for name in CATEGORIES))
    more = f", and {bytes_text(totals[HOST_MEMORY])} of host memory" if config.offloads_optimizer else ""
    where = f"{stage.title} on a mesh of {mesh_text(dict(mesh.shape))}"
    title = f"{where}: a device holds {held}, with the gradients of a step{more}"
    return Explanation(title, tuple(rows), units, large_unit, uneven, totals, formula, shards, zeros, tuple(replicated))


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


def gradient_aval(config: ZeroConfig, mesh: AnyMesh, leaf: Leaf) -> jax.ShapeDtypeStruct:
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
