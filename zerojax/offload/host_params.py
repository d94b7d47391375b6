"""Parameters in host memory: weights come from there as they are needed, and gradients go there.

These are `program.part.Weights`, `program.part.GradientSink` and `step.config.GradientSums` for leaves in host memory.
Leaves on the device, such as vectors, are handled as in `program.part`.

In a scan, each layer comes while the one before it computes. In its backward pass, the gradients of a layer are
reduced, and go to host memory, while the next layer computes:

    from the host   weights 3    weights 2    weights 1
    compute         layer 4      layer 3      layer 2
    to the host     grads 5      grads 4      grads 3

The bodies are those of `layer_scan`, and the loop is another one: it needs no second buffer of weights, which a copy
from the host fills while it is not read. It counts its turns itself: on GPUs, copy engines move the slices of a stack
whose places follow from the number of the iteration.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.comm.schedule import Schedule, after, event, floating_after
from zerojax.offload import host_arrays
from zerojax.program.layer_scan import Carry, Cut, LayerBody, SavedValues, Scanned
from zerojax.program.part import GradientSink, Loop, Part, PlannedPart, Weights
from zerojax.sharding.placement import Leaf, is_in_host
from zerojax.step.config import GradientSums
from zerojax.utils.flags import select
from zerojax.utils.text import error_text
from zerojax.utils.typing import Array, ArrayLike, Aval, DTypeLike, PyTree, Shape

# Weights


@dataclasses.dataclass(frozen=True)
class HostWeights(Weights):
    """Leaves of which some are in host memory: shards at stage 3, full leaves on a single device."""

    definitions: Sequence[Leaf]  # of the leaves
    for_tpus: bool  # whether their compiler is used, which fails if a barrier holds back arrays in host memory

    def shards(self, leaves: Iterable[int]) -> list[Array]:
        shards = [self.leaves[i] for i in leaves]
        return [host_arrays.from_host(a) if is_in_host(a) else a for a in shards]

    def next_after(self, part: Part | None, values: list[Array]) -> tuple[Weights, list[Array]]:
        if part is None or self.for_tpus or part.segment.views:  # compilers do not copy stacks as a whole
            return self, values
        held = [i for i in part.segment.leaves if is_in_host(self.leaves[i])]
        if not held or not values:
            return self, values
        # Nothing can compute on host memory. Compilers keep a barrier as long as its operands are used behind it.
        arrays, values = lax.optimization_barrier(([self.leaves[i] for i in held], values))
        waiting = dict(zip(held, arrays, strict=True))
        return dataclasses.replace(self, leaves=[waiting.get(i, a) for i, a in enumerate(self.leaves)]), values

    def scan(
        self, body: LayerBody, init: Carry, loop: Loop, schedule: Schedule, sink: GradientSink
    ) -> tuple[Scanned, list[Array | None]]:
        stacks = [self.leaves[view.leaf] for view in loop.views]
        if not any(map(is_in_host, stacks)):
            return super().scan(body, init, loop, schedule, sink)

        # The stacks that gradients are added to.
        host = sink if isinstance(sink, HostGradients) else HostGradients({})
        moves = [is_in_host(self.leaves[view.leaf]) for view in loop.trained]
        self._check_complete(loop, moves)
        shapes = [self.leaves[view.leaf].shape for view in loop.trained]
        totals = [
            host.stack(view.leaf, shape, dtype) if flag else jnp.zeros(shape, dtype)
            for view, shape, dtype, flag in zip(loop.trained, shapes, loop.grad_dtypes, moves, strict=True)
        ]

        scanned, norms = _scan(body, init, loop, stacks, totals, host, schedule)
        for view, total, norm in select(zip(loop.trained, scanned.grads, norms, strict=True), moves):
            host.totals[view.leaf], host.squared_norms[view.leaf] = total, norm
        return scanned, [None if flag else grad for flag, grad in zip(moves, scanned.grads, strict=True)]

    def _check_complete(self, loop: Loop, moves: Sequence[bool]) -> None:
        for view, moved, complete in zip(loop.trained, moves, loop.complete, strict=True):
            if moved and not complete:
                leaf = self.definitions[view.leaf]
                what = "offload: the gradients of layers in host memory are computed by one loop"
                got = f"a leaf of {leaf.unit!r} of shape {leaf.shape}, which the loss also uses elsewhere"
                fix = "Zero(..., offload='optimizer'), which keeps the parameters on the devices"
                raise ValueError(error_text(what, got, fix))


# Gradients


class HostGradients(GradientSink):
    """The gradients of one device, of which those of leaves in host memory go there as soon as they are complete.

    Args:
        totals: the sums of the microbatches so far by leaf, arrays in host memory; {} if there is one microbatch. The
            attribute has them with this microbatch, and `squared_norms` their norms.
        is_first: bool scalar, whether this microbatch is the first: the sums have undefined values before it.
        for_tpus: whether their compiler is used. It fails if a loop carries sums in host memory, and if it chooses the
            layout of sums.
    """

    def __init__(self, totals: dict[int, Array], is_first: ArrayLike | None = None, for_tpus: bool = False):
        super().__init__()
        self.totals, self._is_first, self._for_tpus = dict(totals), is_first, for_tpus
        self._weight: Array | None = None  # of this microbatch
        self._moves: frozenset[int] = frozenset()  # the leaves in host memory
        self._to_come: collections.Counter[int] = collections.Counter()  # parts that add to the gradient of a leaf
        self._arrived: list[list[Array]] = [[], []]  # events of gradients that have arrived in host memory, by part

    # Part by part

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

    # The sums in host memory

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

    def put_layer(self, leaf: int, stack: Array, grad: Array, index: ArrayLike, dim: int) -> tuple[Array, Array]:
        """Adds the reduced gradient of a layer, which has the dim of layers: (the stack, the squared norm)."""
        if leaf in self.totals:
            grad = self._sum(host_arrays.layer_from_host(stack, index, dim), grad)
        return host_arrays.part_to_host(stack, grad, index, dim), _squared_norm(grad)

    def _sum(self, total: Array, grad: Array) -> Array:
        assert self._weight is not None and self._is_first is not None
        return jnp.where(self._is_first, 0, total) + grad.astype(total.dtype) * self._weight


class HostSums(GradientSums):
    """The sums of gradients over microbatches, of which those of leaves in host memory are there."""

    def __init__(self, dtype: DTypeLike, shards: Sequence[Array], trainable: Sequence[bool], for_tpus: bool):
        super().__init__(dtype)
        moves = [i for i, flag in enumerate(trainable) if flag and is_in_host(shards[i])]
        self.room = {i: host_arrays.room(shards[i].shape, dtype) for i in moves}
        self._for_tpus = for_tpus
        # The compiler for TPUs fails if a loop carries sums in host memory.
        self.unrolls = bool(self.room) and for_tpus

    def start(self, grads: Sequence[Aval | None]) -> list[Array | None]:
        return [self.room[i] if i in self.room else self._zeros(aval) for i, aval in enumerate(grads)]

    def sink(self, totals: dict[int, Array], index: ArrayLike) -> HostGradients:
        return HostGradients(totals, index == 0, self._for_tpus)

    def add(self, totals: Sequence[Array | None], grads: Sequence[Array | None], weight: Array) -> list[Array | None]:
        on_device = super().add([None if i in self.room else t for i, t in enumerate(totals)], grads, weight)
        return [grads[i] if i in self.room else t for i, t in enumerate(on_device)]

    def mean(self, totals: Sequence[Array | None], divisor: Array) -> list[Array | None]:
        on_device = super().mean([None if i in self.room else t for i, t in enumerate(totals)], divisor)
        return [totals[i] if i in self.room else t for i, t in enumerate(on_device)]


def _squared_norm(grad: Array) -> Array:
    return jnp.sum(jnp.square(grad.astype(jnp.float32)))


# Scans over layers


class _Streamed(NamedTuple):
    """The values that are live between two layers."""

    carry: Carry
    weights: PyTree  # the weights of the next layer; None after the last one
    grads: PyTree  # the gradients of the layer before, not yet reduced; None before the first layer
    totals: list[Array]  # of gradients, in host memory
    squared_norms: list[Array]  # of the totals so far
    ys: PyTree  # stacked results, None before the first layer


def _scan(
    body: LayerBody,
    init: Carry,
    loop: Loop,
    stacks: Sequence[Array],
    totals: list[Array],
    sink: HostGradients,
    schedule: Schedule,
) -> tuple[Scanned, list[Array]]:
    """As `layer_scan.scan`, for layers in host memory. The first and the last are outside of the loop.

    Args:
        body, init, loop, schedule: as for `layer_scan.scan`. The cut of the loop is replaced by one of single layers.
        stacks: the leaves of the views, as shards.
        totals: stacks in host memory to which the gradients of the trained views are added; [] in a forward pass.
        sink: adds them.

    Returns:
        (the results, of which `grads` are the totals; the squared norms of the totals).

    Cost: on the device, the weights and the gradients of two layers. Compiles three layers instead of one.
    """
    cut = Cut.of_single_layers(loop.layers.cut.length)
    layers = loop.layers._replace(cut=cut)
    length, given = cut.length, layers.given
    num_front, num_back = len(given.front), len(given.back)  # the other way round in a backward pass

    # What is done for each layer.
    def fetch(index: ArrayLike, waits: Sequence[Array]) -> PyTree:
        """The full weights of a layer, of those that are needed. They are gathered after the events."""
        views = zip(loop.views, stacks, body.needed, strict=True)
        layer = lambda view, stack: view.of_layer(host_arrays.layer_from_host(stack, index, view.order[0]))
        shards = [layer(view, stack) if flag else None for view, stack, flag in views]
        return body.gather(shards, 0, Schedule(0, waits))

    def compute(weights: PyTree, carry: Carry, x: PyTree, given: PyTree) -> tuple[Carry, PyTree, PyTree, PyTree]:
        fetched = body.restorer.restore(given, carry[0])[0] if body.restorer else None
        return body.compute(weights, carry, x, given, fetched)

    def put(state: _Streamed, turn: int | Array) -> _Streamed:
        """Moves the gradients of the layer before `turn`."""
        if not totals or state.grads is None:
            return state
        index, (reduced, _) = layers.index(turn - 1), body.reduce(state.grads, [], 0)
        moved = [
            sink.put_layer(view.leaf, total, view.to_leaf(grad), index, view.order[0])
            for view, total, grad in zip(loop.trained, state.totals, reduced, strict=True)
        ]
        norms = [n + norm for n, (_, norm) in zip(state.squared_norms, moved, strict=True)]
        return state._replace(totals=[total for total, _ in moved], squared_norms=norms)

    def visit(state: _Streamed, turn: int | Array, given: PyTree, is_last: bool = False) -> tuple[_Streamed, PyTree]:
        """Computes a layer overlapped with the copies: (the state after it, the values that it saves)."""
        x = layers.of(layers.xs, turn)
        weights = None if is_last else fetch(layers.index(turn + 1), event(state.carry[0]))
        carry, y, saved, grads = compute(state.weights, state.carry, x, given)
        state = put(state, turn)
        ys = layers.put(jax.tree.map(layers.room_for, y) if state.ys is None else state.ys, y, turn)
        saved = body.saver.store(saved, []) if body.saver else saved
        return state._replace(carry=carry, weights=weights, grads=grads, ys=ys), saved

    def iteration(counted: tuple[Array, _Streamed], given: PyTree) -> tuple[tuple[Array, _Streamed], PyTree]:
        turn, state = counted
        state, saved = visit(state, turn, given)
        return (turn + 1, state), saved

    # The first layer comes before anything computes.
    weights = fetch(layers.index(0), schedule.before_gather())
    state = _Streamed(init, weights, None, totals, [jnp.float32(0)] * len(totals), None)

    # Layer by layer; those of the middle in a loop.
    front, middle, back = [], [None], []
    for turn in range(num_front):
        state, saved = visit(state, turn, given.front[turn], is_last=turn == length - 1)
        front.append(saved)
    if cut.loops:
        is_backward = layers.saved is not None
        counted = jnp.int32(num_front), state
        (_, state), middle[0] = lax.scan(iteration, counted, given.loop[0], cut.loops, reverse=is_backward)
    for k in range(num_back):
        turn = length - num_back + k
        state, saved = visit(state, turn, given.back[k], is_last=turn == length - 1)
        back.append(saved)
    state = put(state, length)
    schedule.computed(state.carry[0])
    return Scanned(state.carry, state.ys, SavedValues(front, middle, back), state.totals), state.squared_norms
