"""What a step is expected to do: shardings, bytes sent and offloaded."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from zerojax.analysis import jaxpr_counts
from zerojax.analysis.hlo_collectives import Collective
from zerojax.comm.blocks import sent_bytes
from zerojax.offload.host_memory import host_gradients_bytes
from zerojax.program.jaxprs import ClosedJaxpr
from zerojax.sharding import placement
from zerojax.sharding.axes import CONTEXT, axis_names
from zerojax.sharding.placement import Leaf, shard_bytes
from zerojax.step import state as states
from zerojax.step.config import StepSettings, ZeroConfig
from zerojax.step.loss_traces import Use
from zerojax.step.owned_update import owned_matrices
from zerojax.step.state import TrainState

# Collectives of at most this many bytes are not counted: they reduce losses, weights, norms and metrics.
SCALARS_BYTES = 256


class SentBytes(NamedTuple):
    """Bytes that one device sends over the data axes in a step, by kind of collective.

    Permutations count as reduce-scatters: they sum rows around a ring of chips. What all-to-alls exchange are rows of
    tables, gradients that are summed where they arrive, and matrices that their owners update.
    """

    gathered: float = 0
    reduce_scattered: float = 0
    all_reduced: float = 0
    exchanged: float = 0

    @property
    def total(self) -> float:
        return sum(self)

    @property
    def reduced(self) -> float:
        """The bytes that the reductions would send if all of them were reduce-scatters."""
        return self.reduce_scattered + self.all_reduced / 2

    @classmethod
    def of(cls, found: Iterable[Collective]) -> SentBytes:
        """The bytes that some collectives send."""
        fields = {"all-gather": "gathered", "all-reduce": "all_reduced"}
        fields |= dict.fromkeys(["reduce-scatter", "collective-permute"], "reduce_scattered")
        sent: dict[str, float] = collections.defaultdict(float)
        for each in found:
            sent[fields.get(each.kind, "exchanged")] += each.sent_bytes
        return cls(**sent)


@dataclasses.dataclass(frozen=True)
class Expectation:
    """What a step is expected to do, in numbers with which its compiled program can be compared.

    `step.expectation(state, batch)` derives one. Use `dataclasses.replace` to change it for another step.

    Attributes:
        config: mesh, axes, stage and precision.
        num_microbatches: number of microbatches of the step.
        prefetch: number of units that are gathered ahead.
        overlaps: whether collectives are to overlap with computation: with prefetch, and without buckets.
        state: path -> aval with the sharding that the stage gives it, in flattening order. The state is the first
            argument of the step.
        most: the most bytes that a device may send, by the formula of the stage.
        least: the bytes that a device sends at least, if no gather or reduction of the traced step is left out.
        between_bytes: the most bytes that a device may send between replicas.
        unit_bytes: size of the largest unit in full form on one device. A stacked leaf counts with one layer.
        wide_bytes: bytes that a device sends in a wider dtype than those of the precision, or than 8 bits if it has
            these for leaves that are large; and that of the matrices which owners update.
        ends_bytes: bytes that a device sends in each microbatch before the first matrix products and after the last
            ones: for the first unit, and for the rows that are looked up. They may overlap with nothing. In a step, a
            round of the update by owners (`step.owned_update`) may not either.
        offloaded_bytes: bytes in host memory that are saved for the backward pass of one microbatch.
        in_host: the paths of the leaves of the state that are in host memory.
        host_gradients_bytes: bytes of gradients in host memory, of parameters that are there.
        context_bytes: the bytes of gradients that a device sends along `context`, (reduce-scattered, all-reduced).
        jaxpr: the traced step, from which `least` and `offloaded_bytes` were read.
    """

    config: ZeroConfig
    num_microbatches: int
    prefetch: int
    overlaps: bool
    state: Mapping[str, jax.ShapeDtypeStruct]
    most: SentBytes
    least: SentBytes
    between_bytes: float
    unit_bytes: float
    wide_bytes: float
    ends_bytes: float
    offloaded_bytes: int
    in_host: frozenset[str]
    host_gradients_bytes: int
    context_bytes: tuple[float, float]
    jaxpr: ClosedJaxpr = dataclasses.field(repr=False, compare=False)


def expect(
    config: ZeroConfig, settings: StepSettings, state: TrainState, jaxpr: ClosedJaxpr, uses: Sequence[Sequence[Use]]
) -> Expectation:
    """Derives the expectation of a step that `Zero.train_step` has built.

    Args:
        state: arrays or avals. Their shardings are ignored: the expected shardings are those of the stage.
        jaxpr: the traced step, which shows the leaves that the backward pass gathers again.
        uses: for each leaf, the segments of the loss that read it.
    """
    # The state as the stage places it.
    num_microbatches = settings.num_microbatches
    stored = config.memory.in_program(config, states.with_shardings(config, state))
    with_paths = jax.tree_util.tree_leaves_with_path(stored)
    leaves = state.layout.leaves
    # The bytes to send, by formula and as traced.
    floating = [a for a in jax.tree.leaves(state.model_state) if jnp.issubdtype(a.dtype, jnp.floating)]
    averaged = 2 * _ring_bytes(config.axes.num_devices, 4 * sum(a.size for a in floating))
    replicas = _replica_bytes(config, leaves, num_microbatches)
    most = _stage_bytes(config, leaves, uses, num_microbatches)
    owners = owned_matrices(config, state.layout)
    rounds = [_ring_bytes(config.optimizer_axes.num_shards, size) for size in (owners.sent_bytes() if owners else [])]
    others = SentBytes(all_reduced=averaged, exchanged=sum(rounds))
    most = SentBytes(*map(sum, zip(most, replicas, others, strict=True)))
    traced = SentBytes.of(over_data_axes(jaxpr_counts.traced_collectives(jaxpr, config.mesh), config))
    wide = _sum_dtype(config, num_microbatches) != config.precision.reduce_dtype
    width = jnp.dtype(config.precision.compute_dtype).itemsize
    wide_leaves = [(leaf, use) for leaf, use in zip(leaves, uses, strict=True) if leaf.compute_dtype.itemsize > width]
    of_wide = [leaf for leaf, _ in wide_leaves], [use for _, use in wide_leaves]
    by_choice = _stage_bytes(config, *of_wide, num_microbatches).total
    if config.precision.gather:
        own = [(leaf, use) for leaf, use in zip(leaves, uses, strict=True) if leaf.wire.gather is None]
        of_own = [leaf for leaf, _ in own], [use for _, use in own]
        by_choice += replicas.gathered + _stage_bytes(config, *of_own, num_microbatches).gathered
    rows = [[use for use in of_leaf if use.lookup] for of_leaf in uses]
    by_choice += _stage_bytes(config, leaves, rows, num_microbatches).exchanged
    # What is in host memory.
    flags = jax.tree.leaves(states.in_host(config, state)) if config.reads_host else ()
    host_leaves = list(itertools.compress(with_paths, flags))
    sum_dtype = config.precision.sum_dtype if num_microbatches > 1 else None
    gradients_bytes = host_gradients_bytes(config, stored, sum_dtype)
    frozen = {f"params/{leaf.path}" for leaf in leaves if not leaf.trainable}
    updated = [a for path, a in host_leaves if placement.path_text(path) not in frozen]
    others_bytes = sum(shard_bytes(a, a.sharding) for a in updated) + num_microbatches * gradients_bytes
    return Expectation(
        config,
        num_microbatches,
        settings.prefetch,
        overlaps=settings.prefetch > 0 and settings.bucket_bytes is None,
        state={placement.path_text(path): a for path, a in with_paths},
        most=most,
        least=SentBytes(*map(min, traced, most)),
        between_bytes=replicas.total,
        unit_bytes=_unit_bytes(config, leaves),
        wide_bytes=averaged + sum(rounds) + wide * (replicas.all_reduced + replicas.reduce_scattered) + by_choice,
        ends_bytes=_ends_bytes(config, leaves, uses) + max(rounds, default=0) / num_microbatches,
        offloaded_bytes=max(0, jaxpr_counts.offloaded_bytes(jaxpr) - others_bytes) // num_microbatches,
        in_host=frozenset(placement.path_text(path) for path, _ in host_leaves),
        host_gradients_bytes=gradients_bytes,
        context_bytes=_context_bytes(config, leaves, uses, num_microbatches),
        jaxpr=jaxpr,
    )


def over_data_axes(found: Iterable[Collective], config: ZeroConfig) -> list[Collective]:
    """The collectives of the step over its axes, without those of scalars, and those that the compiler inserts."""
    crosses = lambda each: _num_positions(each, config, config.axes.of_states) > 1 and not _is_inserted(each, config)
    return [each for each in found if each.full_bytes > SCALARS_BYTES and crosses(each)]


def along_context(found: Iterable[Collective], config: ZeroConfig) -> list[Collective]:
    """The collectives over `context` that the compiler inserts, without those of scalars."""
    return [each for each in found if each.full_bytes > SCALARS_BYTES and _is_inserted(each, config)]


def _is_inserted(each: Collective, config: ZeroConfig) -> bool:
    """Whether the compiler has inserted a collective over `context`. The step itself reduces nothing over it."""
    if config.axes.num_context == 1 or _num_positions(each, config, (CONTEXT,)) == 1:
        return False
    return each.inserted or each.kind in ("all-reduce", "collective-permute", "reduce-scatter")


def between_replicas(found: Iterable[Collective], config: ZeroConfig) -> list[Collective]:
    """The collectives between devices that hold the same shard."""
    axes = config.axes
    crosses = lambda each: _num_positions(each, config, axes.replica) > 1 == _num_positions(each, config, axes.shard)
    return list(filter(crosses, found))


def _num_positions(each: Collective, config: ZeroConfig, names: Sequence[str]) -> int:
    """The number of positions along some axes of the mesh that the devices of a collective have."""
    sizes = config.mesh.shape
    strides = {name: math.prod(list(sizes.values())[k + 1 :]) for k, name in enumerate(sizes)}
    return len({tuple(device // strides[name] % sizes[name] for name in names) for device in each.group})


def _ring_bytes(num_devices: int, num_bytes: float) -> float:
    """The bytes that a device sends to gather or to reduce-scatter an array of `num_bytes` over a ring of devices."""
    return num_bytes * (num_devices - 1) / num_devices


def _full_shape(config: ZeroConfig, leaf: Leaf) -> list[int]:
    """The shape of a leaf in full form on one device, divided over the model axes, with the zeros of its shards."""
    shape = list(leaf.padding(config.stage.shards_optimizer).stored_shape(leaf.shape))
    for dim, entry in enumerate(leaf.model_spec):
        shape[dim] //= math.prod(config.mesh.shape[a] for a in axis_names(entry))
    return shape


def _gathered_bytes(config: ZeroConfig, leaf: Leaf) -> int:
    """The bytes of a gathered leaf, as it is sent; 0 if the leaf is not sharded."""
    shape, wire = _full_shape(config, leaf), leaf.wire
    return 0 if leaf.dim is None else sent_bytes(shape, leaf.compute_dtype, wire.gather, wire.blocks)


def _gradient_bytes(
    config: ZeroConfig, leaf: Leaf, dtype: DTypeLike, parts: int, before: int = 1
) -> tuple[int, int, int]:
    """The bytes of a gradient in `dtype` that is divided into parts: (reduce-scattered, all-reduced, exchanged).

    It is one of the `before` parts of another one.
    """
    shape, wire = _full_shape(config, leaf), leaf.wire
    if leaf.dim is None or not config.stage.shards_optimizer:
        return 0, 2 * math.prod(shape) * jnp.dtype(dtype).itemsize, 0
    shape[leaf.dim] //= before * parts
    size = parts * sent_bytes(shape, dtype, wire.scatter, wire.blocks)
    return (size, 0, 0) if wire.scatter is None else (0, 0, size)


def _unit_bytes(config: ZeroConfig, leaves: Iterable[Leaf]) -> int:
    """The bytes of the largest unit, gathered. All stacked leaves of a scan of the same length count as one unit."""
    units: collections.Counter[Hashable] = collections.Counter()
    for leaf in leaves:
        unit, layers = (("layers", leaf.shape[0]), leaf.shape[0]) if leaf.stacked else (leaf.unit, 1)
        units[unit] += _gathered_bytes(config, leaf) // layers
    return max(units.values(), default=0)


def _stage_bytes(config: ZeroConfig, leaves: Sequence[Leaf], uses: Sequence[Sequence[Use]], k: int) -> SentBytes:
    """The bytes that a device sends over the shard axes in a step of `k` microbatches, by the formula of its stage.

    A leaf that several units share is gathered and reduced for each of them. Where rows of a table are looked up, the
    rows and their gradients are sent, and the indices of all devices. Of gradients, a device has the part that the
    compiler leaves it along `context`; see `_context_bytes`.

    Source: ZeRO section 7: 2 Psi at stages 0 and 1, (1 + k) Psi at 2, up to 3 k Psi at 3, times (N-1)/N.
    """
    stage, n, num_context = config.stage, config.axes.num_shards, config.axes.num_context
    of_rows = n // num_context
    gathered = reduce_scattered = all_reduced = exchanged = looked_up = 0
    for leaf, of_leaf in zip(leaves, uses, strict=True):
        num_uses = sum(use.lookup is None for use in of_leaf)
        num_reductions = leaf.trainable * (k * num_uses if stage.shards_grads else 1)
        wire_dtype = config.precision.wire_dtype(leaf.compute_dtype)
        of_gradient = _gradient_bytes(config, leaf, wire_dtype, of_rows, num_context)
        reduce_scattered += num_reductions * of_gradient[0]
        all_reduced += num_reductions * of_gradient[1]
        exchanged += num_reductions * of_gradient[2]
        if stage.shards_params:
            gathered += 2 * k * num_uses * _gathered_bytes(config, leaf)
        elif stage.shards_optimizer:
            gathered += leaf.trainable * _gathered_bytes(config, leaf)
        for lookup in (use.lookup for use in of_leaf if use.lookup):
            times = k * (stage.shards_params + leaf.trainable)  # forward and backward
            row_size = lookup.row_size * math.prod(leaf.dims.padding.stored_shape(leaf.shape)) // leaf.size
            count = times * lookup.count // num_context
            looked_up += count * row_size * leaf.compute_dtype.itemsize
            gathered += count * lookup.index_bytes * n
    reduced = (_ring_bytes(of_rows, each) for each in (reduce_scattered, all_reduced, exchanged))
    scattered, summed, sent_in_blocks = reduced
    return SentBytes(_ring_bytes(n, gathered), scattered, summed, sent_in_blocks + _ring_bytes(n, looked_up))


def _context_bytes(
    config: ZeroConfig, leaves: Sequence[Leaf], uses: Sequence[Sequence[Use]], k: int
) -> tuple[float, float]:
    """The bytes of gradients that a device sends along `context`: (reduce-scattered, all-reduced), by the compiler."""
    n, stage = config.axes.num_context, config.stage
    are_scattered = stage.shards_grads or (stage.shards_optimizer and k == 1)  # otherwise, whole sums of microbatches
    scattered = summed = 0.0
    for leaf, of_leaf in zip(leaves, uses, strict=True):
        times = leaf.trainable * k * sum(use.lookup is None for use in of_leaf)
        size = times * math.prod(_full_shape(config, leaf)) * leaf.compute_dtype.itemsize
        if leaf.dim is None or not are_scattered:
            summed += 2 * size
        else:
            scattered += size
    return _ring_bytes(n, scattered), _ring_bytes(n, summed)


def _ends_bytes(config: ZeroConfig, leaves: Sequence[Leaf], uses: Sequence[Sequence[Use]]) -> float:
    """The bytes that a device sends for rows, and to gather and to reduce the first unit once; see `Expectation`.

    The first unit may be small, such as a table of positions: of the first two, the larger counts.
    """
    of_layer = [leaf.of_layer() for leaf in leaves]

    def sent(wanted: Callable[[Use], bool]) -> float:
        of_place = [[use for use in of_leaf if wanted(use)] for of_leaf in uses]
        found = _stage_bytes(config, of_layer, of_place, 1)
        return found.total - found.gathered / 2

    places = sorted({use.place for of_leaf in uses for use in of_leaf if use.lookup is None})[:2]
    first = max((sent(lambda use, k=k: use.lookup is None and use.place == k) for k in places), default=0.0)
    return first + sent(lambda use: use.lookup is not None)


def _sum_dtype(config: ZeroConfig, k: int) -> DTypeLike:
    """The dtype in which gradients are summed over the replica axes: that of the sum of microbatches, if of shards."""
    accumulates = k > 1 and config.stage.shards_grads
    return config.precision.sum_dtype if accumulates else config.precision.reduce_dtype


def _replica_bytes(config: ZeroConfig, leaves: Iterable[Leaf], k: int) -> SentBytes:
    """The bytes that a device sends over the replica axes, once per step: to sum gradients, all-reduced.

    If shards are divided over these axes, gradients are reduce-scattered, and the updated parameters gathered.
    """
    axes, dtype = config.axes, _sum_dtype(config, k)
    m, shards = axes.num_replicas, axes.num_shards if config.stage.shards_optimizer else 1
    sizes = [0.0] * 4
    for leaf in (leaf for leaf in leaves if leaf.trainable):
        elements = math.prod(_full_shape(config, leaf)) / (1 if leaf.dim is None else shards)
        if axes.outer and leaf.dim is not None:
            of_leaf = elements * leaf.compute_dtype.itemsize, *_gradient_bytes(config, leaf, dtype, m, shards)
        else:
            of_leaf = 0, 0, 2 * elements * jnp.dtype(dtype).itemsize, 0
        sizes = [a + b for a, b in zip(sizes, of_leaf, strict=True)]
    return SentBytes(*(_ring_bytes(m, each) for each in sizes))
