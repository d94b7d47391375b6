"""Scans over layers: weights are gathered ahead of the computation and gradients are reduced behind it.

The loop is cut so that values that cross from one layer into the next are never copied. Values that layers save for the
backward pass are passed on directly from the iteration that computes them to the one that uses them.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.comm.schedule import Schedule, after, event, events, floating_after, zeros_after
from zerojax.program.regather import Regather
from zerojax.utils.typing import Array, PyTree

Carry = tuple[list[Array], PyTree]  # (floating arrays that the next layer computes from, all else that is carried)


class LayerBody(abc.ABC):
    """The operations of one layer of a `scan`."""

    needed: list[bool]  # which weights of a layer it reads
    saver: Regather | None = None  # moves the values that a layer saves to their places; None if it saves nothing
    # In a backward pass, fetches saved values from host memory one layer before they are used; None in a forward pass.
    # A loop fetches once more than it has layers.
    restorer: Regather | None = None
    # Whether the values that a layer is recomputed from wait for the gradients of the layer before. Their reduction is
    # to overlap with the recomputation.
    delays_recompute = False
    # Whether the gradients of only one layer, instead of two, are held at a time. They are reduced while the next layer
    # recomputes its activations. If these were saved, nothing would hide the reduction.
    one_layer_grads = False

    @abc.abstractmethod
    def gather(self, shards: Sequence[Array | None], prefetch: int, schedule: Schedule) -> list[Array | None]:
        """Gathers the weights of a layer, `prefetch` layers before its turn. It reads only those that are needed."""

    @abc.abstractmethod
    def compute(
        self, weights: list[Array | None], carry: Carry, x: list[Array], saved: PyTree, fetched: PyTree
    ) -> tuple[Carry, list[Array], PyTree, list[Array]]:
        """Computes a layer: (carry, y, values to save, gradients). `fetched` are copies of offloaded values."""

    def reduce(self, grads: list[Array], waits: list[Array], group: int) -> tuple[list[Array], list[Array]]:
        """Reduces a layer's gradients after the events `waits`: (their shards, the events of the reduction).

        Reductions of different groups are never combined.
        """
        return grads, []


class Cut(NamedTuple):
    """The parts of a scan over layers: `front` layers, `loops` iterations of `group` layers each, `back` layers."""

    front: int
    loops: int
    group: int
    back: int
    prefetch: int  # number of layers that are gathered ahead

    @classmethod
    def of(cls, length: int, prefetch: int, delay_reduction: bool, least: float = 1) -> Cut:
        """Cuts a scan of `length` layers.

        Args:
            length: number of layers.
            prefetch: number of layers that are gathered ahead.
            delay_reduction: whether the gradients of a layer are reduced while the next layer computes.
            least: the least number of layers in an iteration. If it is more than a third of them, there is no loop.
        """
        outside = max(prefetch, 1)
        group = max(outside + 1 if prefetch or delay_reduction else 1, int(min(least, length)))
        if group == 1:
            return cls(0, length, 1, 0, 0)
        loops = (length - 2 * outside) // group
        if loops < 2:
            return cls(length, 0, group, 0, prefetch)
        return cls(outside, loops, group, length - outside - loops * group, prefetch)

    @classmethod
    def of_single_layers(cls, length: int) -> Cut:
        """Cuts a scan so that the first and the last layer are outside of a loop of single layers."""
        return cls(1, length - 2, 1, 1, 0) if length >= 4 else cls(length, 0, 1, 0, 0)

    @property
    def length(self) -> int:
        return self.front + self.loops * self.group + self.back


class SavedValues(NamedTuple):
    """Values that layers save for the backward pass, by the part of the `Cut` that computes them.

    In a single stack, the compiler would choose one layout for the loop and another for the layers outside of it, and
    copy the whole stack in between.
    """

    front: list[PyTree]
    loop: list[PyTree]  # per layer of a group, stacked over iterations
    back: list[PyTree]

    def with_last(self, fn: Callable[[PyTree], PyTree]) -> SavedValues:
        """Applies `fn` to the values of the last layer, unless it is in the loop."""
        if self.back:
            return self._replace(back=[*self.back[:-1], fn(self.back[-1])])
        return self._replace(front=[*self.front[:-1], *map(fn, self.front[-1:])])


class Layers(NamedTuple):
    """The layers of a `scan`."""

    shards: PyTree  # shards of the weights, arrays of shape [layers, ...]
    xs: PyTree  # other arrays of shape [layers, ...]
    cut: Cut  # the cut of the forward pass
    reverse: bool  # whether the scan runs from the last layer to the first
    # In a backward pass, the values that the forward pass saved. Layers and iterations of the loop are then visited in
    # the opposite order.
    saved: SavedValues | None = None

    @property
    def given(self) -> SavedValues:
        """The saved values in the order of turns; in a forward pass, None for each layer."""
        if self.saved is not None:
            front, loop, back = self.saved
            return SavedValues(back[::-1], loop[::-1], front[::-1])
        return SavedValues([None] * self.cut.front, [None] * self.cut.group, [None] * self.cut.back)

    def index(self, turn: int | Array) -> int | Array:
        """The layer that is visited at a turn."""
        return self.cut.length - 1 - turn if self.reverse else turn

    def of(self, stacked: PyTree, turn: int | Array) -> PyTree:
        """The slices of stacks that belong to a turn."""
        return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, self.index(turn), keepdims=False), stacked)

    def put(self, stacked: PyTree, values: PyTree, turn: int | Array) -> PyTree:
        """Writes the slices of stacks that belong to a turn."""
        put = lambda a, value: lax.dynamic_update_index_in_dim(a, value, self.index(turn), 0)
        return jax.tree.map(put, stacked, values)

    def room_for(self, like: PyTree) -> Array:
        """A stack of as many values as there are layers."""
        if jnp.issubdtype(like.dtype, jax.dtypes.extended):  # PRNG keys
            return jnp.broadcast_to(like, (self.cut.length, *like.shape))
        return jnp.zeros((self.cut.length, *like.shape), like.dtype)


class Scanned(NamedTuple):
    """The results of a `scan`: carry after the last layer, stacked y, saved values, stacked reduced gradients."""

    carry: Carry
    ys: PyTree
    saved: SavedValues
    grads: list[Array]


def scan(body: LayerBody, init: Carry, layers: Layers, schedule: Schedule) -> Scanned:
    """`lax.scan` over layers, with their weights gathered ahead and their gradients reduced one layer later.

    Gathered weights and unreduced gradients cross from one iteration of the compiled loop into the next. A loop of one
    layer would have to copy them, since the next layer's exist before this layer's are used up. In a loop of
    `prefetch + 1` layers, each buffer is reused by a layer that starts after its last reader. The first and the last
    layers are outside the loop, so that no layer is gathered in vain.

    Args:
        body: the operations of a layer.
        init: carry before the first layer.
        layers: the layers to scan over.
        schedule: the events before the scan, to which those of its layers are added.

    Cost: compiles up to 4 * max(prefetch, 1) + 1 layers instead of one.
    """
    cut = layers.cut
    if cut.group == 1:
        return _scan_without_overlap(body, init, layers, schedule)
    length, prefetch, loops, group, given = cut.length, cut.prefetch, cut.loops, cut.group, layers.given
    front, back = len(given.front), len(given.back)
    turns = _Turns(body, layers)

    # The first layers.
    of_iteration = lambda i: jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, keepdims=False), given.loop[0])
    next_given = of_iteration(loops - 1) if loops else given.back[0] if back else None
    state = turns.start(init, (given.front or given.back)[0], schedule)
    state, front_saved = turns.run(state, range(front), length - prefetch, given.front, next_given, schedule)

    # The compiled loop: `group` layers in each iteration.
    loop_saved: list[PyTree] = [None] * group
    if loops:
        # It starts when the values that the layers so far have saved are in host memory.
        state = state.with_flow(floating_after(state.carry[0], schedule.offload_events(0)))

        def iteration(state: _State, slices: tuple[Array, list[PyTree]]) -> tuple[_State, list[PyTree]]:
            i, given = slices
            next_given = of_iteration(jnp.maximum(loops - 2 - i, 0))
            numbers = [front + i * group + k for k in range(group)]
            inside = Schedule(schedule.prefetch, event(state.carry[0]))
            return turns._replace(in_loop=True).run(state, numbers, group, given, next_given, inside)

        iterations = jnp.arange(loops) if layers.saved is None else jnp.arange(loops)[::-1]
        state, loop_saved = lax.scan(iteration, state, (iterations, given.loop), reverse=layers.saved is not None)
        schedule.restart(event(state.carry[0]))
        state = turns.restore_next(state, given.back[0])

    # The last layers, and the gradients of the very last one.
    state, back_saved = turns.run(state, range(length - back, length), back - prefetch, given.back, None, schedule)
    reduced = turns.reduce_before(length, state, schedule)
    return Scanned(state.carry, state.ys, SavedValues(front_saved, loop_saved, back_saved), reduced)


class _State(NamedTuple):
    """The values that are live between two layers."""

    carry: Carry
    weights: list[PyTree]  # the gathered weights of the next layers
    fetched: PyTree = None  # the next layer's saved values, while they are fetched from host memory
    grads: PyTree = None  # the gradients of the layer before, not yet reduced
    ys: PyTree = None  # stacked results, None before the first layer
    reduced: list[Array] | None = None  # stacked gradients, None before the first layer

    def with_flow(self, flow: list[Array]) -> _State:
        return self._replace(carry=(flow, self.carry[1]))


class _Turns(NamedTuple):
    """The layers of a `scan` in the order in which they are visited: turn 0 is the first."""

    body: LayerBody
    layers: Layers
    in_loop: bool = False  # whether these are the layers of one iteration of the compiled loop

    def start(self, init: Carry, saved: PyTree, schedule: Schedule) -> _State:
        """The state before the first layer, which has these saved values."""
        cut = self.layers.cut
        weights = [self._gather(turn, turn, schedule) for turn in range(min(cut.prefetch, cut.length))]
        return self.restore_next(_State(init, weights), saved)

    def run(
        self,
        state: _State,
        turns: Sequence[int | Array],
        num_gathers: int,
        given: list[PyTree],
        next_given: PyTree,
        schedule: Schedule,
    ) -> tuple[_State, list[PyTree]]:
        """Runs some turns: (the state after them, the values that their layers save).

        Args:
            state: the state before them.
            turns: their numbers.
            num_gathers: how many of them, from the first on, gather the weights of a later layer.
            given: in a backward pass, the saved values of their layers.
            next_given: the saved values of the layer after them.
            schedule: the events so far.
        """
        all_saved: list[PyTree] = []
        waits: list[Array] = []
        for i, turn in enumerate(turns):
            saved = given[i]
            if self.body.restorer and self.body.delays_recompute:
                saved = self.body.restorer.delay_inputs(saved, events(state.grads or state.carry[0]))

            # Reduce the gradients of the layer before.
            if state.grads is not None:
                reduced, arrived = self.reduce_before(turn, state, schedule), schedule.before_reduction()
                # No gradient is computed before the last one, or the last but one, is reduced.
                flow = after(state.carry[0], arrived if self.body.one_layer_grads else waits)
                state, waits = state.with_flow(flow)._replace(reduced=reduced), arrived

            # Gather the weights of a later layer.
            if i < num_gathers:
                prefetch = self.layers.cut.prefetch
                weights = self._gather(turn + prefetch, prefetch, schedule)
                state = state._replace(weights=[*state.weights, weights])
            if self._offloads_directly:
                state = state.with_flow(floating_after(state.carry[0], schedule.offload_events(1)))

            # Fetch the saved values of the next layer. Those that were fetched early wait until the layer before is
            # done: two layers' would take memory at once. They do not wait for the same events as the gather, see
            # `Schedule.replace_last`.
            fetched = state.fetched
            if fetched is not None:
                fetched = floating_after(fetched, events(state.grads or state.carry[0]))
            state = self.restore_next(state, given[i + 1] if i + 1 < len(given) else next_given)

            # Compute.
            state, saved = self._compute(turn, state, saved, fetched, schedule)
            all_saved.append(saved)
        return state, all_saved

    def reduce_before(self, turn: int | Array, state: _State, schedule: Schedule) -> list[Array]:
        """Reduces the gradients of the layer before `turn`, and returns the stack with them."""
        shards, arrived = self.body.reduce(state.grads, schedule.before_reduction(), schedule.group)
        schedule.reduced(arrived)
        return self.layers.put(state.reduced, shards, turn - 1)

    def restore_next(self, state: _State, saved: PyTree) -> _State:
        """Starts fetching the next layer's saved values from host memory."""
        restorer = self.body.restorer
        if restorer is None or not restorer.offloads or saved is None:
            return state._replace(fetched=None)
        fetched, flow = restorer.restore(saved, state.carry[0])
        return state.with_flow(flow)._replace(fetched=fetched)

    @property
    def _offloads_directly(self) -> bool:
        """Whether values are offloaded as soon as they are computed. The layer after the next waits for the copies.

        In a loop they are offloaded when the layer's weights are gathered. If they were offloaded earlier, the
        compiler, which schedules from the end, would have nothing of the layer before to overlap with the gather.
        """
        return self.body.saver is not None and self.body.saver.offloads and not self.in_loop

    def _compute(
        self, turn: int | Array, state: _State, saved: PyTree, fetched: PyTree, schedule: Schedule
    ) -> tuple[_State, PyTree]:
        body, layers = self.body, self.layers
        weights, *others = state.weights
        carry, y, saved, grads = body.compute(weights, state.carry, layers.of(layers.xs, turn), saved, fetched)
        schedule.computed(carry[0])
        if body.saver:
            waits = event(weights) if layers.cut.prefetch and not self._offloads_directly else []
            saved = body.saver.store(saved, waits)
            if self._offloads_directly:
                schedule.offloaded(body.saver.offload_events(saved))
        ys, reduced = state.ys, state.reduced
        if reduced is None:
            ys = jax.tree.map(layers.room_for, y)
            shards = jax.eval_shape(lambda grads: body.reduce(grads, [], 0)[0], grads)
            # Compilers would otherwise make room for all layers while the activations of the first are in memory.
            first = event(carry[0])
            reduced = [zeros_after((layers.cut.length, *a.shape), a.dtype, first) for a in shards]
        return _State(carry, others, state.fetched, grads, layers.put(ys, y, turn), reduced), saved

    def _gather(self, turn: int | Array, prefetch: int, schedule: Schedule) -> PyTree:
        return self.body.gather(self.layers.of(self.layers.shards, turn), prefetch, schedule)


def _scan_without_overlap(body: LayerBody, init: Carry, layers: Layers, schedule: Schedule) -> Scanned:
    """Layer by layer: gathered, computed and reduced in one iteration."""

    def iteration(carry: Carry, slices: tuple[PyTree, PyTree, PyTree]) -> tuple[Carry, tuple[PyTree, PyTree, PyTree]]:
        shards, x, given = slices
        fetched = body.restorer.restore(given, [])[0] if body.restorer else None
        carry, y, saved, grads = body.compute(body.gather(shards, 0, Schedule(0, [])), carry, x, given, fetched)
        saved = body.saver.store(saved, []) if body.saver else saved
        return carry, (y, saved, body.reduce(grads, [], 0)[0])

    slices = layers.shards, layers.xs, None if layers.saved is None else layers.saved.loop[0]
    carry, (ys, saved, reduced) = lax.scan(iteration, init, slices, length=layers.cut.length, reverse=layers.reverse)
    schedule.computed(carry[0])
    return Scanned(carry, ys, SavedValues([], [saved], []), reduced)
