"""Reduces what the devices have computed at the end of a step: gradients, scalars, and running statistics.

Everything here runs inside `shard_map`, manual over the data axes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zerojax.comm import collectives
from zerojax.comm.stage_collectives import over_replicas
from zerojax.sharding.placement import Leaf
from zerojax.sharding.precision import for_reduction
from zerojax.step.config import StepSettings, ZeroConfig
from zerojax.step.losses import Sums
from zerojax.step.state import StateLayout
from zerojax.utils.typing import Array, ArrayLike, PyTree


def by_unit(leaves: Sequence[Leaf], positions: Iterable[int]) -> list[list[int]]:
    """The positions of leaves, those of a unit together."""
    units: dict[str, list[int]] = {}
    for i in positions:
        units.setdefault(leaves[i].unit, []).append(i)
    return list(units.values())


def _side_by_side(values: Sequence[Array]) -> Array:
    """All elements of some arrays in one."""
    if all(a.ndim == 0 for a in values):
        return jnp.stack(values)
    return jnp.concatenate([a.reshape(-1) for a in values])


def _apart(elements: Array, like: Sequence[Array]) -> list[Array]:
    """The arrays of whose elements `_side_by_side` made one, in the shapes of `like`."""
    if all(a.ndim == 0 for a in like):
        return list(elements)
    ends = np.cumsum([a.size for a in like])
    return [elements[end - a.size : end].reshape(a.shape) for a, end in zip(like, ends, strict=True)]


@dataclasses.dataclass(frozen=True)
class Reductions:
    """The reductions of one device at the end of a step."""

    config: ZeroConfig  # mesh, axes, stage and precision
    layout: StateLayout  # the parameters and their placement
    settings: StepSettings  # the settings of the step

    @property
    def params_in_host(self) -> list[bool]:
        """Whether each leaf is in host memory."""
        return self.layout.params_in_host(self.config.offloads_params)

    @property
    def sums_replicas_by_units(self) -> bool:
        """Whether gradients are summed over the replica axes beside the backward pass; otherwise, after the last one of
        several microbatches."""
        config = self.config
        return config.stage.shards_grads and config.axes.num_replicas > 1 and self.settings.num_microbatches == 1

    def sum(self, values: Sequence[Array]) -> list[Array]:
        """Sums values over all data axes."""
        return collectives.all_reduce(values, self.config.axes.data, self.config.axes).leaves

    def reduce_outputs(self, sums: Sums, squared_norm: ArrayLike = 0.0) -> tuple[Sums, Array]:
        """The outputs of a loss on all devices, and the sum of `squared_norm` over them, in one collective; maxima and
        minima are in one more."""
        # Compilers for CPUs leave NaNs out of a maximum over devices, but not of a sum.
        invalid = [jnp.where(jnp.isnan(a), a, 0) for a in sums.largest]
        flat, tree = jax.tree.flatten((dataclasses.replace(sums, largest=invalid), jnp.float32(squared_norm)))
        (total,) = self.sum([_side_by_side(flat)])
        summed, norm = jax.tree.unflatten(tree, _apart(total, flat))
        if sums.largest:
            largest = _apart(lax.pmax(_side_by_side(sums.largest), self.config.axes.data), sums.largest)
            summed = dataclasses.replace(summed, largest=[a + b for a, b in zip(largest, summed.largest, strict=True)])
        return summed, norm

    def reduce_grads(self, grads: Sequence[Array | None], summed: frozenset[int] = frozenset()) -> list[Array | None]:
        """Reduces gradients unit by unit: over the replica axes, and over the shard axes if that has not been done.

        Those of the leaves `summed` are summed over the replica axes already.
        """
        stage, axes, precision = self.config.stage, self.config.axes, self.config.precision
        options, leaves, in_host = self.settings.collectives, self.layout.leaves, self.params_in_host
        on_device = {i: g for i, g in enumerate(grads) if g is not None and i not in summed and not in_host[i]}
        reduced = list(grads)
        waits: list[Array] = []
        for members in by_unit(leaves, on_device):
            values, dims = [on_device[i] for i in members], [leaves[i].dims for i in members]

            # Cast.
            if not stage.shards_grads or self.sums_replicas_by_units:  # the sum of several uses of a leaf is wider
                dtypes = [precision.wire_dtype(leaves[i].compute_dtype) for i in members]
                values = [for_reduction(v, dtype) for v, dtype in zip(values, dtypes, strict=True)]

            # Reduce over the shards, and then over the replicas.
            if not stage.shards_grads:
                if stage.shards_optimizer:
                    values, events = collectives.reduce_scatter(values, dims, axes, options, waits, rows=True)
                else:
                    values, events = collectives.all_reduce(values, axes.of_rows.shard, axes, options, dims, waits)
                waits = options.next_waits_for(events)
            values, events = over_replicas(values, dims, axes, options, waits, stage.shards_optimizer)
            waits = options.next_waits_for(events)
            for i, value in zip(members, values, strict=True):
                reduced[i] = value
        return reduced

    def average_state(self, before: PyTree, after: PyTree, reduced: frozenset[int]) -> PyTree:
        """Averages floating leaves (running statistics) over the data axes, but those that are `reduced`, by position.
        Other leaves are equal on all devices."""
        flat, tree = jax.tree.flatten(after)
        old = jax.tree.leaves(before)
        fixed = self.layout.fixed_state
        kept = lambda i: fixed[i] or i in reduced
        floating = [i for i, a in enumerate(flat) if jnp.issubdtype(a.dtype, jnp.floating) and not kept(i)]
        means = self.sum([flat[i].astype(jnp.float32) / self.config.axes.num_devices for i in floating])
        for i, mean in zip(floating, means, strict=True):
            flat[i] = mean.astype(old[i].dtype)
        return jax.tree.unflatten(tree, flat)

    # The norm: the sum of these terms over all data axes counts every element once ------------------------------------

    def squared_norm_term(self, arrays: Sequence[Array | None]) -> Array:
        """This device's term of the squared norm of arrays that are stored like gradients; None has no elements."""
        total = jnp.float32(0)
        for leaf, array in zip(self.layout.leaves, arrays, strict=True):
            if array is not None:
                total += jnp.sum(jnp.square(array.astype(jnp.float32))) / self._num_copies(leaf)
        return total

    def norm_term_beside(self, norms: dict[int, Array]) -> Array:
        """As `squared_norm_term`, of the gradients that are not on the device, from their squared norms by leaf."""
        return sum((norms[i] / self._num_copies(self.layout.leaves[i]) for i in norms), jnp.float32(0))

    def _num_copies(self, leaf: Leaf) -> int:
        """The number of devices that hold the same part of a reduced gradient. Those along `context` count as one."""
        axes, is_sharded = self.config.optimizer_axes, self.config.stage.shards_optimizer and leaf.dim is not None
        return axes.num_replicas * (1 if is_sharded else axes.of_rows.num_shards)
