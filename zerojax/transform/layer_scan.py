"""Scans over layers: weights are gathered ahead of the computation and gradients reduced behind it, by a `Schedule`.

A loop is cut so that what crosses from one layer into the next is never copied. What layers save for the backward pass
is handed from where it was made to where it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.transform.dependencies import after, event, events, floating_after
from zerojax.transform.schedule import Schedule
from zerojax.typing import Array, PyTree

Carry = tuple[list[Array], PyTree]  # (floating arrays that the next layer computes from, all else that is carried)


class LayerBody:
    """What one layer of a `scan` does. This one saves and offloads nothing, and has no gradients.

    Attributes:
        saves: values are saved for the backward pass.
        offloads: values that a layer saves leave for host memory.
        restores: values that a layer has saved come back from host memory, one layer ahead of their use; in loops once
            more than there are layers.
        delays_recompute: what a layer is recomputed from waits for the gradients of the layer before.
        one_layer_grads: the gradients of one layer are held at a time, not of two. They are reduced while the next
            layer recomputes its activations; were these saved, nothing would hide the reduction.
    """

    saves: bool = False
    offloads: bool = False
    restores: bool = False
    delays_recompute: bool = False
    one_layer_grads: bool = False

    def fetch(self, shards: PyTree, prefetch: int, schedule: Schedule) -> PyTree:
        """Gathers the weights of a layer, `prefetch` layers before its turn."""
        raise NotImplementedError

    def compute(
        self, weights: PyTree, carry: Carry, x: PyTree, saved: PyTree, fetched: PyTree
    ) -> tuple[Carry, PyTree, PyTree, PyTree]:
        """(carry, y, values to save, gradients) of a layer; `fetched` is what `restore` returned of `saved`."""
        raise NotImplementedError

    def reduce(self, grads: PyTree, waits: list[Array]) -> tuple[list[Array], list[Array]]:
        """(the shards of a layer's gradients, the events of their reduction), which starts after the events `waits`."""
        return grads, []

    def store(self, saved: PyTree, waits: list[Array]) -> PyTree:
        """The saved values, each in its place. Those that leave for host memory leave after the events `waits`."""
        return saved

    def offload_events(self, saved: PyTree) -> list[Array]:
        """The events of saved values that have arrived in host memory."""
        return []

    def restore(self, saved: PyTree, overlapped: list[Array]) -> tuple[PyTree, list[Array]]:
        """(saved values on their way back from host memory once `overlapped` is there; `overlapped`)."""
        return None, overlapped

    def delay_recompute(self, saved: PyTree, waits: list[Array]) -> PyTree:
        """The values that a layer is recomputed from, not available before the events `waits`.

        Those are the events of the gradients of the layer before, whose reduction the recomputation is to hide.
        """
        return saved


class Cut(NamedTuple):
    """How a scan over layers is cut: `front` layers, `loops` iterations of `group` layers, `back` layers.

    Attributes:
        prefetch: layers that are gathered ahead.
    """

    front: int
    loops: int
    group: int
    back: int
    prefetch: int

    @classmethod
    def of(cls, length: int, prefetch: int, delay_reduction: bool) -> Cut:
        """`delay_reduction`: the gradients of a layer are reduced while the next layer computes."""
        if not prefetch and not delay_reduction:
            return cls(0, length, 1, 0, 0)
        outside = max(prefetch, 1)
        group = outside + 1
        loops = (length - 2 * outside) // group
        if loops < 2:
            return cls(length, 0, group, 0, prefetch)
        return cls(outside, loops, group, length - outside - loops * group, prefetch)

    @property
    def length(self) -> int:
        return self.front + self.loops * self.group + self.back


class SavedValues(NamedTuple):
    """What layers save for the backward pass, by the places where the forward pass made it.

    Each is handed on from where it was made to where it is used. In one stack, the compiler would lay it out in one way
    for the loop and in another for the layers outside, and copy all of it in between.
    """

    front: list[PyTree]
    loop: list[PyTree]  # per layer of a group, stacked over iterations
    back: list[PyTree]

    def with_last(self, fn: Callable[[PyTree], PyTree]) -> SavedValues:
        """`fn` of what the last layer saved, unless that is in the loop."""
        if self.back:
            return self._replace(back=[*self.back[:-1], fn(self.back[-1])])
        return self._replace(front=[*self.front[:-1], *map(fn, self.front[-1:])])

    def mirrored(self) -> SavedValues:
        return SavedValues(self.back[::-1], self.loop[::-1], self.front[::-1])


class Layers(NamedTuple):
    """What a `scan` runs over.

    Attributes:
        shards: the weights: arrays whose dim 0 counts layers.
        xs: other arrays whose dim 0 counts layers.
        cut: of the forward pass.
        reverse: from the last layer to the first.
        saved: in a backward pass, what the forward pass saved. Layers are visited in the opposite order then, and so
            are the iterations of the loop.
    """

    shards: PyTree
    xs: PyTree
    cut: Cut
    reverse: bool
    saved: SavedValues | None = None


class Scanned(NamedTuple):
    """What a `scan` returns: carry after the last layer, stacked y, saved values, stacked reduced gradients."""

    carry: Carry
    ys: PyTree
    saved: SavedValues
    grads: list[Array]


def scan(body: LayerBody, init: Carry, layers: Layers, schedule: Schedule) -> Scanned:
    """`lax.scan` over layers, with their weights gathered ahead and their gradients reduced one layer later.

    What is gathered or not yet reduced crosses from one iteration of the compiled loop into the next. A loop of one
    layer would have to copy it, since the next exists before this one is used up. In a loop of `prefetch + 1` layers
    each buffer is handed on to a layer that starts after its last reader. The first and the last layers stand outside
    the loop, so that nothing is gathered in vain.

    Args:
        body: what a layer does.
        init: carry before the first layer.
        layers: what the scan runs over.
        schedule: the events before the scan. Those of its layers are added.

    Cost: compiles up to 4 * max(prefetch, 1) + 1 layers instead of one.
    """
    cut = layers.cut
    if cut.group == 1:
        return _scan_without_overlap(body, init, layers, schedule)
    length, prefetch, front, loops, group, back = cut.length, cut.prefetch, cut.front, cut.loops, cut.group, cut.back
    given = SavedValues([None] * front, [None] * group, [None] * back)
    if layers.saved is not None:
        front, back, given = back, front, layers.saved.mirrored()
    turns = _Turns(body, layers)
    of_iteration = lambda i: jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, keepdims=False), given.loop[0])
    next_given = of_iteration(loops - 1) if loops else given.back[0] if back else None
    state = turns.start(init, (given.front or given.back)[0], schedule)
    state, front_saved = turns.run(state, range(front), length - prefetch, given.front, next_given, schedule)
    loop_saved: list[PyTree] = [None] * group
    if loops:
        state = turns.wait_for_offloads(state, schedule)

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
    state, back_saved = turns.run(state, range(length - back, length), back - prefetch, given.back, None, schedule)
    reduced = turns.reduce_before(length, state, schedule)
    return Scanned(state.carry, state.ys, SavedValues(front_saved, loop_saved, back_saved), reduced)


class _State(NamedTuple):
    """What is there between two layers.

    Attributes:
        carry: as of `scan`.
        weights: of the layers that come, gathered.
        fetched: what the next layer has saved in host memory, on its way back.
        grads: of the layer before, not reduced yet.
        ys, reduced: stacked results, None before the first layer.
    """

    carry: Carry
    weights: list[PyTree]
    fetched: PyTree = None
    grads: PyTree = None
    ys: PyTree = None
    reduced: list[Array] | None = None


class _Turns(NamedTuple):
    """The layers of a `scan` in the order in which they are visited: turn 0 is the first.

    Attributes:
        in_loop: they are those of one iteration of the compiled loop.
    """

    body: LayerBody
    layers: Layers
    in_loop: bool = False

    def start(self, init: Carry, saved: PyTree, schedule: Schedule) -> _State:
        """Before the first layer, which has `saved` this."""
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
        """(the state after these turns, what their layers save).

        Args:
            state: before them.
            turns: their numbers.
            num_gathers: the first of them gather the weights of a later layer.
            given: what their layers have saved.
            next_given: what the layer after them has saved.
            schedule: the events so far.
        """
        all_saved: list[PyTree] = []
        waits: list[Array] = []
        for i, turn in enumerate(turns):
            saved = given[i]
            if self.body.delays_recompute:
                saved = self.body.delay_recompute(saved, events(state.grads or state.carry[0]))
            if state.grads is not None:
                flow, rest = state.carry
                reduced, arrived = self.reduce_before(turn, state, schedule), schedule.before_reduction()
                # No gradient is made before the last is reduced, or the last but one.
                flow = after(flow, arrived if self.body.one_layer_grads else waits)
                state, waits = state._replace(carry=(flow, rest), reduced=reduced), arrived
            if i < num_gathers:
                prefetch = self.layers.cut.prefetch
                weights = self._gather(turn + prefetch, prefetch, schedule)
                state = state._replace(weights=[*state.weights, weights])
            if self._offloads_at_once:
                flow, rest = state.carry
                state = state._replace(carry=(floating_after(flow, schedule.offload_events(1)), rest))
            fetched = None if state.fetched is None else self._after_last_layer(state)
            state = self.restore_next(state, given[i + 1] if i + 1 < len(given) else next_given)
            state, saved = self._compute(turn, state, saved, fetched, schedule)
            all_saved.append(saved)
        return state, all_saved

    def reduce_before(self, turn: int | Array, state: _State, schedule: Schedule) -> list[Array]:
        """The stacked gradients, with those of the layer before `turn`."""
        shards, arrived = self.body.reduce(state.grads, schedule.before_reduction())
        schedule.reduced(arrived)
        return self._put(state.reduced, shards, turn - 1)

    def restore_next(self, state: _State, saved: PyTree) -> _State:
        """Starts fetching the next layer's saved values from host memory."""
        if not self.body.restores or saved is None:
            return state._replace(fetched=None)
        fetched, flow = self.body.restore(saved, state.carry[0])
        return state._replace(fetched=fetched, carry=(flow, state.carry[1]))

    def wait_for_offloads(self, state: _State, schedule: Schedule) -> _State:
        """The next layer computes after what the layers so far have saved has arrived in host memory."""
        flow, rest = state.carry
        return state._replace(carry=(floating_after(flow, schedule.offload_events(0)), rest))

    @property
    def _offloads_at_once(self) -> bool:
        """Saved values leave for host memory when they are made; the layer after the next waits until they are there.

        In a loop they leave once the layer's weights are there: before, the compiler, which schedules from the end,
        would have nothing of the layer before to hide their gather in.
        """
        return self.body.offloads and not self.in_loop

    def _after_last_layer(self, state: _State) -> list[Array]:
        """What came back early is not computed with before the layer above is done: two would take room at once.

        It does not wait for the same events as the gather, see `Schedule.follows`.
        """
        return floating_after(state.fetched, events(state.grads or state.carry[0]))

    def _compute(
        self, turn: int | Array, state: _State, saved: PyTree, fetched: PyTree, schedule: Schedule
    ) -> tuple[_State, PyTree]:
        body, layers = self.body, self.layers
        weights, *others = state.weights
        carry, y, saved, grads = body.compute(weights, state.carry, self._of(layers.xs, turn), saved, fetched)
        schedule.computed(carry[0])
        if body.saves:
            waits = event(weights) if layers.cut.prefetch and not self._offloads_at_once else []
            saved = body.store(saved, waits)
        if self._offloads_at_once:
            schedule.offloaded(body.offload_events(saved))
        ys, reduced = state.ys, state.reduced
        if reduced is None:
            ys = jax.tree.map(self._room_for, y)
            reduced = [self._room_for(a) for a in jax.eval_shape(lambda grads: body.reduce(grads, [])[0], grads)]
        return _State(carry, others, state.fetched, grads, self._put(ys, y, turn), reduced), saved

    def _index(self, turn: int | Array) -> int | Array:
        return self.layers.cut.length - 1 - turn if self.layers.reverse else turn

    def _of(self, stacked: PyTree, turn: int | Array) -> PyTree:
        return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, self._index(turn), keepdims=False), stacked)

    def _put(self, stacked: PyTree, values: PyTree, turn: int | Array) -> PyTree:
        put = lambda a, value: lax.dynamic_update_index_in_dim(a, value, self._index(turn), 0)
        return jax.tree.map(put, stacked, values)

    def _gather(self, turn: int | Array, prefetch: int, schedule: Schedule) -> PyTree:
        return self.body.fetch(self._of(self.layers.shards, turn), prefetch, schedule)

    def _room_for(self, like: Any) -> Array:
        """A stack of as many values as there are layers."""
        length = self.layers.cut.length
        if jnp.issubdtype(like.dtype, jax.dtypes.extended):  # PRNG keys
            return jnp.broadcast_to(like, (length, *like.shape))
        return jnp.zeros((length, *like.shape), like.dtype)


def _scan_without_overlap(body: LayerBody, init: Carry, layers: Layers, schedule: Schedule) -> Scanned:
    """Layer by layer: gathered, computed and reduced in one iteration."""

    def iteration(carry: Carry, slices: tuple[PyTree, PyTree, PyTree]) -> tuple[Carry, tuple[PyTree, PyTree, PyTree]]:
        shards, x, given = slices
        fetched = None if given is None else body.restore(given, [])[0]
        carry, y, saved, grads = body.compute(body.fetch(shards, 0, Schedule(0, [])), carry, x, given, fetched)
        return carry, (y, body.store(saved, []), body.reduce(grads, [])[0])

    slices = layers.shards, layers.xs, None if layers.saved is None else layers.saved.loop[0]
    carry, (ys, saved, reduced) = lax.scan(iteration, init, slices, length=layers.cut.length, reverse=layers.reverse)
    schedule.computed(carry[0])
    return Scanned(carry, ys, SavedValues([], [saved], []), reduced)
