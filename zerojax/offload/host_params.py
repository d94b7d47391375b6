"""Parameters in host memory: weights come from there as they are needed, and gradients go there.

These are the implementations of `program.part.Weights`, `program.part.GradientSink` and `step.config.GradientSums` for
leaves in host memory. Leaves on the device, such as vectors, are handled as in `program.part`.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.comm.schedule import Schedule, after, floating_after
from zerojax.offload import host_arrays
from zerojax.offload.host_scan import scan_from_host
from zerojax.offload.pace import Paces
from zerojax.program.layer_scan import Carry, LayerBody, Scanned
from zerojax.program.part import DeviceGradients, DeviceWeights, GradientSink, Loop, PlannedPart, Weights
from zerojax.sharding.placement import Leaf, is_in_host
from zerojax.step.config import GradientSums
from zerojax.utils.flags import select
from zerojax.utils.typing import Array, ArrayLike, DTypeLike, Shape


class HostWeights(NamedTuple):
    """Leaves of which some are in host memory.

    Attributes:
        leaves: shards at stage 3, full leaves on a single device.
        definitions: of the leaves.
    """

    leaves: Sequence[Array]
    definitions: Sequence[Leaf]

    def shards(self, leaves: Iterable[int], waits: Sequence[Array]) -> list[Array]:
        shards = [self.leaves[i] for i in leaves]
        return [host_arrays.from_host(a, waits) if is_in_host(a) else a for a in shards]

    def scan(
        self, body: LayerBody, init: Carry, loop: Loop, schedule: Schedule, sink: GradientSink
    ) -> tuple[Scanned, list[Array | None]]:
        stacks = [self.leaves[view.leaf] for view in loop.views]
        if not any(map(is_in_host, stacks)):
            return DeviceWeights(self.leaves).scan(body, init, loop, schedule, sink)

        # The stacks that gradients are added to.
        host = sink if isinstance(sink, HostGradients) else HostGradients({})
        moves = [is_in_host(self.leaves[view.leaf]) for view in loop.trained]
        self._check_complete(loop, moves)
        shapes = [self.leaves[view.leaf].shape for view in loop.trained]
        totals = [
            host.stack(view.leaf, shape, dtype) if flag else jnp.zeros(shape, dtype)
            for view, shape, dtype, flag in zip(loop.trained, shapes, loop.grad_dtypes, moves, strict=True)
        ]

        scanned, norms = scan_from_host(body, init, loop, stacks, totals, host, schedule)
        for view, total, norm in select(zip(loop.trained, scanned.grads, norms, strict=True), moves):
            host.totals[view.leaf], host.squared_norms[view.leaf] = total, norm
        return scanned, [None if flag else grad for flag, grad in zip(moves, scanned.grads, strict=True)]

    def _check_complete(self, loop: Loop, moves: Sequence[bool]) -> None:
        for view, moved, complete in zip(loop.trained, moves, loop.complete, strict=True):
            if moved and not complete:
                leaf = self.definitions[view.leaf]
                raise ValueError(
                    f"offload: the gradients of layers in host memory are computed by one loop\n"
                    f"  got:      a leaf of {leaf.unit!r} of shape {leaf.shape}, which the loss also uses elsewhere\n"
                    f"  fix:      Zero(..., offload='optimizer'), which keeps the parameters on the devices"
                )


class HostGradients(DeviceGradients):
    """The gradients of one device, of which those of leaves in host memory go there as soon as they are complete.

    Args:
        totals: the sums of the microbatches so far by leaf, arrays in host memory; {} if there is one microbatch.
        is_first: bool scalar, whether this microbatch is the first: the sums have undefined values before it.
        for_tpus: whether their compiler is used. It fails if a loop carries sums in host memory, and if it chooses the
            layout of sums.

    Attributes:
        totals: with this microbatch.
        squared_norms: by leaf, of `totals`.
    """

    def __init__(self, totals: dict[int, Array], is_first: ArrayLike | None = None, for_tpus: bool = False):
        super().__init__()
        self.totals, self._is_first, self._for_tpus = dict(totals), is_first, for_tpus
        self._weight: Array | None = None  # of this microbatch
        self._moves: frozenset[int] = frozenset()  # the leaves in host memory
        self._to_come: collections.Counter[int] = collections.Counter()  # parts that add to the gradient of a leaf
        self._arrived: list[list[Array]] = [[], []]  # events of gradients that have arrived in host memory, by part

    @property
    def accumulates(self) -> bool:
        """Whether gradients are added to sums."""
        return self._is_first is not None

    # Part by part -----------------------------------------------------------------------------------------------------

    def start(self, parts: Sequence[PlannedPart], weights: Weights, weight: Array) -> None:
        assert isinstance(weights, HostWeights)
        self._moves = frozenset(i for i, a in enumerate(weights.leaves) if is_in_host(a))
        self._to_come.update(i for each in parts for i in each.part.segment.leaves)
        self._weight = weight

    def before(self, part: PlannedPart, cotangents: list[Array]) -> list[Array]:
        # What is still to be moved before a loop would wait for its end.
        return floating_after(cotangents, self._arrived[-1 if part.is_loop else -2])

    def add(self, part: PlannedPart, grads: dict[int, Array]) -> None:
        super().add(part, grads)
        leaves = part.part.segment.leaves
        self._to_come.subtract(leaves)
        moved = self._move([i for i in leaves if not self._to_come[i]])
        self._arrived += [moved] if moved else []

    def has(self, leaf: int) -> bool:
        return leaf in self.squared_norms or super().has(leaf)

    def finish(self, unused: dict[int, Array]) -> dict[int, Array]:
        self._grads |= unused
        self._arrived.append(self._move(sorted(self._grads)))
        if self.squared_norms:  # what waits for a norm, as the update does, waits for the copies
            i, norm = next(iter(self.squared_norms.items()))
            (self.squared_norms[i],) = after([norm], [event for events in self._arrived[-3:] for event in events])
        return self._grads | self.totals

    def _move(self, leaves: Iterable[int]) -> list[Array]:
        """Moves the complete gradients of leaves that are in host memory there: events of when the device is done."""
        complete = [i for i in leaves if i in self._grads and i in self._moves]
        for i in complete:
            self._add_to_total(i, self._grads.pop(i))
        arrivals = {i: host_arrays.arrival(self.totals[i], self._for_tpus) for i in complete}
        return [event for i, arrival in arrivals.items() for event in (arrival, self.squared_norms[i])]

    # The sums in host memory ------------------------------------------------------------------------------------------

    def _add_to_total(self, leaf: int, grad: Array) -> None:
        """Adds the reduced gradient of a leaf to its sum."""
        if leaf not in self.totals:
            self._put(leaf, grad)
            return
        total, norm = self.totals[leaf], jnp.float32(0)
        if self._for_tpus:
            total = host_arrays.in_stored_order(jax.device_put(total, host_arrays.DEVICE_SPACE), total.shape)
            self._put(leaf, self._sum(total, grad))
            return
        dim, size = host_arrays.cut_dim(grad.shape)
        for start in range(0, grad.shape[dim], size):  # compilers copy a sum that a loop does not update in place
            part = lax.slice_in_dim(grad, start, start + size, axis=dim)
            part = self._sum(host_arrays.part_from_host(total, start, size, dim), part)
            total, norm = host_arrays.part_to_host(total, part, start, dim), norm + _squared_norm(part)
        self.totals[leaf], self.squared_norms[leaf] = total, norm

    def _put(self, leaf: int, total: Array) -> None:
        if self._for_tpus:
            total = host_arrays.in_stored_order(total, total.shape)
        self.totals[leaf], self.squared_norms[leaf] = host_arrays.to_host(total), _squared_norm(total)

    def stack(self, leaf: int, shape: Shape, dtype: DTypeLike) -> Array:
        """The stack that `put_layer` writes to."""
        return self.totals[leaf] if leaf in self.totals else host_arrays.room(shape, dtype)

    def put_layer(
        self, leaf: int, stack: Array, grad: Array, index: Any, dim: int, paces: Paces
    ) -> tuple[Array, Array]:
        """Adds the reduced gradient of a layer, which has the dim of layers: (the stack, the squared norm)."""
        if leaf in self.totals:
            grad = self._sum(host_arrays.layer_from_host(stack, index, dim, paces.fetches), grad)
        return host_arrays.layer_to_host(stack, grad, index, dim, paces.puts), _squared_norm(grad)

    def _sum(self, total: Array, grad: Array) -> Array:
        assert self._weight is not None and self._is_first is not None
        return jnp.where(self._is_first, 0, total) + grad.astype(total.dtype) * self._weight


class HostSums(GradientSums):
    """The sums of gradients over microbatches, of which those of leaves in host memory are there.

    Args:
        dtype: of the sums.
        shards: the leaves.
        trainable: which leaves get a gradient.
        for_tpus: see `HostGradients`.
    """

    def __init__(self, dtype: DTypeLike, shards: Sequence[Array], trainable: Sequence[bool], for_tpus: bool):
        super().__init__(dtype)
        moves = [i for i, flag in enumerate(trainable) if flag and is_in_host(shards[i])]
        self.room = {i: host_arrays.room(shards[i].shape, dtype) for i in moves}
        self._for_tpus = for_tpus
        # The compiler for TPUs fails if a loop carries sums in host memory.
        self.unrolls = bool(self.room) and for_tpus

    def start(self, grads: Sequence[Any]) -> list[Array | None]:
        return [self.room[i] if i in self.room else self._zeros(aval) for i, aval in enumerate(grads)]

    def sink(self, totals: dict[int, Any], index: ArrayLike) -> HostGradients:
        return HostGradients(totals, index == 0, self._for_tpus)

    def add(self, totals: Sequence[Any], grads: Sequence[Any], weight: Array) -> list[Array | None]:
        on_device = super().add([None if i in self.room else t for i, t in enumerate(totals)], grads, weight)
        return [grads[i] if i in self.room else t for i, t in enumerate(on_device)]

    def mean(self, totals: Sequence[Any], divisor: Array) -> list[Array | None]:
        on_device = super().mean([None if i in self.room else t for i, t in enumerate(totals)], divisor)
        return [totals[i] if i in self.room else t for i, t in enumerate(on_device)]


def _squared_norm(grad: Array) -> Array:
    return jnp.sum(jnp.square(grad.astype(jnp.float32)))
