"""Reduces what the devices have computed at the end of a step: gradients, scalars, and running statistics.

Everything here runs inside `shard_map`, manual over the data axes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.sharding.placement import Leaf
from zerojax.sharding.precision import for_reduction
from zerojax.step.config import ZeroConfig
from zerojax.step.settings import StepSettings
from zerojax.step.state import Definition
from zerojax.transform import collectives
from zerojax.transform.host_gradients import HostGradients
from zerojax.typing import Array, PyTree


@dataclasses.dataclass(frozen=True)
class Reductions:
    """The reductions of one device at the end of a step.

    Attributes:
        config: mesh, axes, stage and precision.
        definition: the parameters and their placement.
        settings: the settings of the step.
    """

    config: ZeroConfig
    definition: Definition
    settings: StepSettings

    @property
    def params_in_host(self) -> list[bool]:
        """Whether each leaf is in host memory."""
        return self.definition.params_in_host(self.config.offloads_params)

    @property
    def sums_replicas_by_units(self) -> bool:
        """Whether gradients are summed over the replica axes beside the backward pass; otherwise, after the last one of
        several microbatches."""
        config = self.config
        return config.stage.shards_grads and config.axes.num_replicas > 1 and self.settings.num_microbatches == 1

    def sum(self, values: Sequence[Array]) -> list[Array]:
        """Sums values over all data axes."""
        return collectives.all_reduce(values, self.config.axes.data, self.config.axes).leaves

    def sum_scalars(self, values: Any, squared_norm: Any = 0.0) -> tuple[Any, Array]:
        """Sums scalars over all data axes in one collective: (the sums of a tree, that of `squared_norm`)."""
        flat, tree = jax.tree.flatten((values, jnp.float32(squared_norm)))
        (total,) = self.sum([jnp.stack(flat)])
        return jax.tree.unflatten(tree, list(total))

    def reduce_grads(self, grads: list[Any], summed: frozenset[int] = frozenset()) -> list[Any]:
        """Reduces gradients unit by unit: over the replica axes, and over the shard axes if that has not been done.

        Args:
            grads: of the leaves.
            summed: the leaves that are summed over the replica axes already.
        """
        stage, axes, precision = self.config.stage, self.config.axes, self.config.precision
        options, leaves, in_host = self.settings.collectives, self.definition.leaves, self.params_in_host
        reduced = list(grads)
        by_unit: dict[str, list[int]] = {}
        waits: list[Array] = []
        for i, leaf in enumerate(leaves):
            if leaf.trainable and i not in summed and not in_host[i]:
                by_unit.setdefault(leaf.unit, []).append(i)
        for members in by_unit.values():
            values, dims = [grads[i] for i in members], [leaves[i].dims for i in members]
            if not stage.shards_grads or self.sums_replicas_by_units:  # the sum of several uses of a leaf is wider
                dtypes = [precision.wire_dtype(leaves[i].compute_dtype) for i in members]
                values = [for_reduction(v, dtype) for v, dtype in zip(values, dtypes, strict=True)]
            if not stage.shards_grads:
                if stage.shards_optimizer:
                    values, events = collectives.reduce_scatter(values, dims, axes, options, waits, rows=True)
                else:
                    values, events = collectives.all_reduce(values, axes.shard, axes, options, dims, waits)
                waits = options.next_waits_for(events)
            values, events = collectives.all_reduce(values, axes.replica, axes, options, dims, waits)
            waits = options.next_waits_for(events)
            for i, value in zip(members, values, strict=True):
                reduced[i] = value
        return reduced

    def average_state(self, before: PyTree, after: PyTree) -> PyTree:
        """Averages floating leaves (running statistics) over the data axes. Other leaves are equal on all devices."""
        flat, tree = jax.tree.flatten(after)
        old = jax.tree.leaves(before)
        fixed = self.definition.fixed_state
        floating = [i for i, a in enumerate(flat) if jnp.issubdtype(a.dtype, jnp.floating) and not fixed[i]]
        means = self.sum([flat[i].astype(jnp.float32) / self.config.axes.num_devices for i in floating])
        for i, mean in zip(floating, means, strict=True):
            flat[i] = mean.astype(old[i].dtype)
        return jax.tree.unflatten(tree, flat)

    # The norm: the sum of these terms over all data axes counts every element once ------------------------------------

    def squared_norm_term(self, arrays: Sequence[Any]) -> Array:
        """This device's term of the squared norm of arrays that are stored like gradients; None has no elements."""
        total = jnp.float32(0)
        for leaf, array in zip(self.definition.leaves, arrays, strict=True):
            if array is not None:
                total += jnp.sum(jnp.square(array.astype(jnp.float32))) / self._num_copies(leaf)
        return total

    def host_norm_term(self, host: HostGradients | None) -> Array:
        """As `squared_norm_term`, of the gradients that have gone to host memory."""
        norms = {} if host is None else host.squared_norms
        return sum((norms[i] / self._num_copies(self.definition.leaves[i]) for i in norms), jnp.float32(0))

    def _num_copies(self, leaf: Leaf) -> int:
        """The number of devices that hold the same part of a reduced gradient."""
        axes, is_sharded = self.config.axes, self.config.stage.shards_optimizer and leaf.dim is not None
        return axes.num_replicas * (1 if is_sharded else axes.num_shards)
