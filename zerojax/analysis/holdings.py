"""Who holds which shard of a training state: a row for each unit, and a column for each device."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from zerojax.analysis.explanation import CATEGORIES, gradient_aval
from zerojax.sharding import placement
from zerojax.sharding.axes import axis_names
from zerojax.step.config import ZeroConfig
from zerojax.step.state import TrainState
from zerojax.utils.text import fold
from zerojax.utils.typing import PyTree


@dataclasses.dataclass(frozen=True)
class Holding:
    """The arrays of one unit that are divided in the same way.

    Attributes:
        category: 'params', 'grads', 'optimizer' or 'model_state'.
        name: of the unit, with '*' for the number of equal layers, and how many there are.
        num_leaves: of all of these layers.
        num_bytes: of them on one device.
        shards: for each device in the order of the mesh, the number of the shard that it holds.
        num_shards: how many different shards there are; 1 if every device holds all.
    """

    category: str
    name: str
    num_leaves: int
    num_bytes: int
    shards: tuple[int, ...]
    num_shards: int


@dataclasses.dataclass(frozen=True)
class Holdings:
    """Who holds what of a state.

    Attributes:
        title: the stage and the mesh.
        axes: axis of the mesh -> its size, outermost first.
        rows: the holdings, by category.
    """

    title: str
    axes: Mapping[str, int]
    rows: tuple[Holding, ...]

    @property
    def num_devices(self) -> int:
        return math.prod(self.axes.values())

    def coordinates(self, name: str) -> tuple[int, ...]:
        """The position of each device along an axis."""
        return shard_numbers(PartitionSpec(name), self.axes)


def shard_numbers(spec: PartitionSpec, axes: Mapping[str, int]) -> tuple[int, ...]:
    """The number of the shard that each device holds, counted along the dims of the array, the last dim fastest.

    Args:
        spec: of the array.
        axes: axis of the mesh -> its size, outermost first. Devices are counted in this order.
    """
    dividing = [name for entry in spec for name in axis_names(entry)]
    numbers = []
    for position in itertools.product(*(range(size) for size in axes.values())):
        at = dict(zip(axes, position, strict=True))
        number = 0
        for name in dividing:
            number = number * axes[name] + at[name]
        numbers.append(number)
    return tuple(numbers)


def holdings(config: ZeroConfig, state: TrainState) -> Holdings:
    """Who holds what of a state, of arrays or avals, and of the gradients of its steps."""
    axes = dict(config.mesh.shape)
    groups: dict[tuple[str, str, PartitionSpec], list[Any]] = {}
    for category, unit, a in _arrays(config, state):
        groups.setdefault((category, unit, a.sharding.spec), []).append(a)
    rows = []
    for category in CATEGORIES:
        keys = [key for key in groups if key[0] == category]
        sizes = [sum(placement.shard_bytes(a, a.sharding) for a in groups[key]) for key in keys]
        kinds = [(shard_numbers(key[2], axes), len(groups[key]), size) for key, size in zip(keys, sizes, strict=True)]
        for each in fold([key[1] for key in keys], kinds):
            shards, num_leaves, size = kinds[each.members[0]]
            count = len(each.members)
            rows.append(Holding(category, each.text, count * num_leaves, count * size, shards, len(set(shards))))
    title = f"{config.stage.title} on {math.prod(axes.values())} devices"
    return Holdings(title, axes, tuple(rows))


def _arrays(config: ZeroConfig, state: TrainState) -> Iterator[tuple[str, str, Any]]:
    """(category, unit, array or aval) of everything that a device holds between or within steps."""
    leaves = state.definition.leaves
    mesh = jax.tree.leaves(state.params)[0].sharding.mesh
    units = {leaf.path: leaf.unit for leaf in leaves}
    for path, a in _with_paths(state.params):
        yield "params", units[path], a
    for leaf in leaves:
        if leaf.trainable:
            yield "grads", leaf.unit, gradient_aval(config, mesh, leaf)
    for path, a in (*_with_paths(state.master), *_with_paths(state.opt_state)):
        yield "optimizer", _unit_of(path, units), a
    for path, a in _with_paths(state.model_state):
        yield "model_state", path.rpartition("/")[0] or path, a


def _with_paths(tree: PyTree) -> list[tuple[str, Any]]:
    return [(placement.path_text(path), a) for path, a in jax.tree_util.tree_leaves_with_path(tree)]


def _unit_of(path: str, units: Mapping[str, str]) -> str:
    """The unit of the parameter with whose path that of an optimizer's leaf ends, or else the path itself."""
    parts: Sequence[str] = path.split("/")
    ends = ("/".join(parts[start:]) for start in range(len(parts)))
    return next((units[end] for end in ends if end in units), path)
