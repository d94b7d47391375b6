"""What a step promises: where the state lives, what is sent for it, gathered at a time and moved to host memory."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zerojax.analysis import jaxpr_collectives
from zerojax.analysis.hlo_collectives import Collective
from zerojax.sharding import placement
from zerojax.sharding.axes import axis_names
from zerojax.sharding.placement import Leaf
from zerojax.step import state as states
from zerojax.step.config import ZeroConfig
from zerojax.step.settings import StepSettings
from zerojax.step.state import TrainState

SCALARS = 256  # bytes: smaller collectives move losses, weights, norms and metrics, and are not counted


class Traffic(NamedTuple):
    """Bytes that one device sends over the data axes in a step, by kind of collective."""

    gathered: float = 0
    scattered: float = 0
    all_reduced: float = 0
    otherwise: float = 0

    @property
    def total(self) -> float:
        return sum(self)

    @property
    def reduced(self) -> float:
        """What the gradients that are summed here would take, were all of them reduce-scattered."""
        return self.scattered + self.all_reduced / 2

    @classmethod
    def of(cls, found: Iterable[Collective]) -> Traffic:
        kinds = ("all-gather", "reduce-scatter", "all-reduce")
        sent: dict[str, float] = collections.defaultdict(float)
        for each in found:
            sent[each.kind if each.kind in kinds else "otherwise"] += each.sent_bytes
        return cls(*(sent[kind] for kind in (*kinds, "otherwise")))


@dataclasses.dataclass(frozen=True)
class Expectation:
    """What a step promises of itself, in numbers that a compiled program can be held against.

    `step.expectation(state, batch)` derives one; `dataclasses.replace` changes what another step promises else.

    Attributes:
        config: mesh, axes, stage and precision.
        num_microbatches, prefetch: of the step.
        state: path -> aval with the sharding that the stage gives it, in flattening order. It is the first argument.
        most: the formula of the stage: what may be sent.
        least: what is sent where every gather and every reduction of the traced step is done.
        unit_bytes: of the largest unit, gathered, on one device; of stacked leaves one layer.
        wide_bytes: of reductions that travel in more than the `reduce_dtype`, sent by one device.
        offloaded_bytes: what waits in host memory for the backward pass of one microbatch.
        jaxpr: of the traced step that `least` and `offloaded_bytes` were read from.
    """

    config: ZeroConfig
    num_microbatches: int
    prefetch: int
    state: Mapping[str, jax.ShapeDtypeStruct]
    most: Traffic
    least: Traffic
    unit_bytes: float
    wide_bytes: float
    offloaded_bytes: int
    jaxpr: Any = dataclasses.field(repr=False, compare=False)


def expect(
    config: ZeroConfig, settings: StepSettings, state: TrainState, jaxpr: Any, uses: Sequence[int]
) -> Expectation:
    """What a library step promises.

    Args:
        config: of the Zero.
        settings: of the step.
        state: arrays or avals. Of their shardings nothing is taken: the stage says where they should be.
        jaxpr: of the traced step: which leaves the backward pass gathers again is read there.
        uses: in how many places of the loss each leaf is gathered and reduced.
    """
    num_microbatches = settings.num_microbatches
    shardings = states.shardings(config, state)
    aval = lambda a, sharding: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
    with_paths = jax.tree_util.tree_leaves_with_path(jax.tree.map(aval, state, shardings))
    leaves = state.definition.leaves
    averaged = 2 * _over(config.axes.num_devices, 4 * sum(a.size for a in _floating(state.model_state)))
    replicas = _over_replicas(config, leaves, num_microbatches)
    most = _formula(config, leaves, uses, num_microbatches)
    most = most._replace(all_reduced=most.all_reduced + averaged + replicas)
    written = Traffic.of(over_data(jaxpr_collectives.collectives(jaxpr, config.mesh), config))
    wide = _sum_dtype(config, num_microbatches) != config.precision.reduce_dtype
    return Expectation(
        config,
        num_microbatches,
        settings.prefetch,
        state={placement.path_text(path): a for path, a in with_paths},
        most=most,
        least=Traffic(*map(min, written, most)),
        unit_bytes=_unit_bytes(config, leaves),
        wide_bytes=averaged + wide * replicas,
        offloaded_bytes=jaxpr_collectives.offloaded_bytes(jaxpr) // num_microbatches,
        jaxpr=jaxpr,
    )


def over_data(found: Iterable[Collective], config: ZeroConfig) -> list[Collective]:
    """Collectives that cross a data axis, without those of scalars."""
    sizes = config.mesh.shape
    strides = {name: math.prod(list(sizes.values())[k + 1 :]) for k, name in enumerate(sizes)}
    place = lambda device: tuple(device // strides[name] % sizes[name] for name in config.axes.data)
    return [each for each in found if each.full_bytes > SCALARS and len({place(device) for device in each.group}) > 1]


def _floating(tree: Any) -> list[Any]:
    return [a for a in jax.tree.leaves(tree) if jnp.issubdtype(a.dtype, jnp.floating)]


def _over(num_devices: int, num_bytes: float) -> float:
    return num_bytes * (num_devices - 1) / num_devices


def _held(config: ZeroConfig, leaf: Leaf) -> int:
    """Elements of a leaf in full form on one device: what axes beside the data axes leave of it."""
    return leaf.size // math.prod(config.mesh.shape[a] for entry in leaf.model_spec for a in axis_names(entry))


def _gathered(config: ZeroConfig, leaf: Leaf) -> int:
    """Bytes of a leaf in full form, as it travels; none if it is not sharded."""
    dtype = config.precision.compute_dtype if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype
    return 0 if leaf.dim is None else _held(config, leaf) * jnp.dtype(dtype).itemsize


def _unit_bytes(config: ZeroConfig, leaves: Iterable[Leaf]) -> int:
    """Of the largest unit, gathered. The leaves of a scan are gathered together, whatever their units are called."""
    units: collections.Counter[Any] = collections.Counter()
    for leaf in leaves:
        unit, parts = (("layers", leaf.shape[0]), leaf.shape[0]) if leaf.stacked else (leaf.unit, 1)
        units[unit] += _gathered(config, leaf) // parts
    return max(units.values(), default=0)


def _formula(config: ZeroConfig, leaves: Sequence[Leaf], uses: Sequence[int], k: int) -> Traffic:
    """Over the shard axes. A leaf that several units share is moved for each.

    Source: ZeRO section 7: 2 Psi at stages 0 and 1, (1 + k) Psi at 2, up to 3 k Psi at 3, times (N-1)/N.
    """
    stage, reduce_bytes = config.stage, jnp.dtype(config.precision.reduce_dtype).itemsize
    gathered = scattered = all_reduced = 0
    for leaf, places in zip(leaves, uses, strict=True):
        gradient = leaf.trainable * _held(config, leaf) * reduce_bytes * (k * places if stage.shards_grads else 1)
        if stage.shards_optimizer and leaf.dim is not None:
            scattered += gradient
        else:
            all_reduced += 2 * gradient
        if stage.shards_params:
            gathered += 2 * k * places * _gathered(config, leaf)
        elif stage.shards_optimizer:
            gathered += leaf.trainable * _gathered(config, leaf)
    return Traffic(*(_over(config.axes.num_shards, each) for each in (gathered, scattered, all_reduced)))


def _sum_dtype(config: ZeroConfig, k: int) -> Any:
    """In which gradients are summed over the replica axes: that of the sum of microbatches, where it is of shards."""
    accumulates = k > 1 and config.stage.shards_grads
    return config.precision.param_dtype if accumulates else config.precision.reduce_dtype


def _over_replicas(config: ZeroConfig, leaves: Iterable[Leaf], k: int) -> float:
    """Bytes that a device sends to sum gradients over the replica axes, once a step."""
    shards = config.axes.num_shards if config.stage.shards_optimizer else 1
    held = lambda leaf: _held(config, leaf) / (1 if leaf.dim is None else shards)
    elements = sum(held(leaf) for leaf in leaves if leaf.trainable)
    return 2 * _over(config.axes.num_replicas, elements * jnp.dtype(_sum_dtype(config, k)).itemsize)
