"""Scans over layers, with weights gathered ahead of the computation and gradients reduced behind it, as `order` says.

A loop is cut so that what crosses from one layer into the next is never copied; what layers keep for the backward pass
is handed from where it was made to where it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.transform.dependencies import after, event, events, floating_after
from zerojax.transform.schedule import Order

Array = Any
Tree = Any
Carry = tuple[list[Array], Tree]


class Plan(NamedTuple):
    """How a scan over layers is cut: `front` layers, `loops` iterations of `group` layers, `back` layers.

    Attributes:
        ahead: layers that are gathered ahead.
    """

    front: int
    loops: int
    group: int
    back: int
    ahead: int

    @classmethod
    def of(cls, length: int, ahead: int, late: bool) -> Plan:
        """`late`: gradients are reduced beside the layer that follows."""
        if not ahead and not late:
            return cls(0, length, 1, 0, 0)
        outside = max(ahead, 1)
        group = outside + 1
        loops = (length - 2 * outside) // group
        if loops < 2:
            return cls(length, 0, group, 0, ahead)
        return cls(outside, loops, group, length - outside - loops * group, ahead)

    @property
    def length(self) -> int:
        return self.front + self.loops * self.group + self.back


class Memory(Protocol):
    """Moves what a layer keeps to its place and back. See `regather.Regather`."""

    @property
    def offloads(self) -> bool: ...

    def put_away(self, values: Any, leave: list[Array]) -> Tree: ...

    def in_host_memory(self, kept: Any) -> list[Array]: ...

    def bring_back(self, kept: Any, beside: list[Array]) -> tuple[Tree, list[Array]]: ...


class Kept(NamedTuple):
    """What layers keep for the backward pass, by the places where the forward pass made it.

    Each is handed on from where it was made to where it is used. In one stack, the compiler would lay it out in one way
    for the loop and in another for the layers outside, and copy all of it in between.
    """

    front: list[Tree]
    loop: list[Tree]  # per layer of a group, stacked over iterations
    back: list[Tree]

    def with_last(self, fn: Callable[[Tree], Tree]) -> Kept:
        """`fn` of what the last layer keeps, unless that is in the loop."""
        if self.back:
            return self._replace(back=[*self.back[:-1], fn(self.back[-1])])
        return self._replace(front=[*self.front[:-1], *map(fn, self.front[-1:])])

    def mirrored(self) -> Kept:
        return Kept(self.back[::-1], self.loop[::-1], self.front[::-1])


def scan(
    layer: Callable[[Tree, Carry, Tree, Tree, Tree], tuple[Carry, Tree, Tree, Tree]],
    fetch: Callable[[Tree, int, Order], Tree],
    reduce: Callable[[Tree, list[Array]], tuple[list[Array], list[Array]]],
    init: Carry,
    shards: Tree,
    xs: Tree,
    kept: Kept | None,
    *,
    plan: Plan,
    reverse: bool,
    order: Order,
    memory: Memory | None = None,
    tight: bool = False,
    again: Callable[[Tree, list[Array]], Tree] | None = None,
) -> tuple[Carry, Tree, Kept, list[Array]]:
    """`lax.scan` over layers, with their weights gathered ahead and their gradients reduced one layer later.

    What is gathered or not yet reduced crosses from one iteration of the compiled loop into the next. A loop of one
    layer would have to copy it, since the next exists before this one is used up. In a loop of `ahead + 1` layers each
    buffer is handed on to a layer that starts after its last reader. The first and the last layers stand outside the
    loop, so that nothing is gathered in vain.

    Args:
        layer: `layer(weights, (flow, rest), x, kept, near) -> ((flow, rest), y, keep, gradients)`. `flow` are the
            floating arrays that the next layer computes from, `rest` all else that is carried, `near` what
            `memory` brought back of `kept`.
        fetch: `fetch(shards of a layer, ahead, order)` gathers its weights.
        reduce: `reduce(gradients, events of the last reduction) -> (their shards, events)`.
        init: (flow, rest) before the first layer.
        shards, xs: arrays whose dim 0 counts layers.
        kept: in a backward pass, what the forward pass returned. Layers are visited in the opposite order, and so are
            the iterations of the loop.
        plan: of the forward pass.
        reverse: from the last layer to the first.
        order: the events before the scan. Those of its layers are added.
        memory: moves what layers keep. What is in host memory comes back one layer ahead; in loops once more than there
            are layers. None: nothing is kept.
        tight: the gradients of one layer are held at a time, not of two. They are reduced while the next layer computes
            its activations again; were these kept, there would be nothing to hide the reduction.
        again: `again(kept, events)`: what a layer is computed again from, not before the events: those of the gradients
            of the layer before, whose reduction it is to hide. None: something else orders that.

    Returns:
        (flow, rest) after the last layer, the stacked y, what layers keep, the stacked reduced gradients.

    Cost: compiles up to 4 * max(ahead, 1) + 1 layers instead of one.
    """
    if plan.group == 1:
        return _scan_alone(layer, fetch, reduce, init, shards, xs, kept, plan.length, reverse, order, memory)
    length, ahead, front, loops, group, back = plan.length, plan.ahead, plan.front, plan.loops, plan.group, plan.back
    given = Kept([None] * front, [None] * group, [None] * back)
    if kept is not None:
        front, back, given = back, front, kept.mirrored()
    put = memory.put_away if memory and kept is None else None
    away = memory.in_host_memory if memory and memory.offloads and kept is None else None
    bring = memory.bring_back if memory and memory.offloads and kept is not None else None
    layers = _Layers(layer, fetch, reduce, put, away, bring, again, shards, xs, length, ahead, reverse, tight)
    of_iteration = lambda i: jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, keepdims=False), given.loop[0])
    then = of_iteration(loops - 1) if loops else given.back[0] if back else None
    state = layers.start(init, (given.front or given.back)[0], order)
    state, front_keep = layers.turns(state, range(front), length - ahead, given.front, then, order)
    loop_keep: list[Tree] = [None] * group
    if loops:
        state = layers.all_away(state, order)

        def body(state: _State, slices: Any) -> tuple[_State, list[Tree]]:
            i, given = slices
            then = of_iteration(jnp.maximum(loops - 2 - i, 0))
            turns = [front + i * group + k for k in range(group)]
            inside = Order(order.depth, event(state.carry[0]))
            return layers._replace(looped=True).turns(state, turns, group, given, then, inside)

        iterations = jnp.arange(loops) if kept is None else jnp.arange(loops)[::-1]
        state, loop_keep = lax.scan(body, state, (iterations, given.loop), reverse=kept is not None)
        order.restart(event(state.carry[0]))
        state = layers.bring_next(state, given.back[0])
    state, back_keep = layers.turns(state, range(length - back, length), back - ahead, given.back, None, order)
    reduced = layers.reduce_before(length, state, order)
    return state.carry, state.ys, Kept(front_keep, loop_keep, back_keep), reduced


class _State(NamedTuple):
    """What is there between two layers.

    Attributes:
        carry: (flow, rest).
        weights: of the layers that come, gathered.
        near: what the layer that comes has kept in host memory.
        grads: of the layer before, not reduced yet.
        ys, reduced: stacked results, None before the first layer.
    """

    carry: Carry
    weights: list[Tree]
    near: Tree = None
    grads: Tree = None
    ys: Tree = None
    reduced: list[Array] | None = None


class _Layers(NamedTuple):
    """The layers of a `scan`, in the order in which they are visited: `turn` 0 is the first. For fields see there."""

    layer: Callable[..., Any]
    fetch: Callable[..., Any]
    reduce: Callable[..., Any]
    put: Callable[..., Any] | None
    away: Callable[..., Any] | None
    bring: Callable[..., Any] | None
    again: Callable[..., Any] | None
    shards: Tree
    xs: Tree
    length: int
    ahead: int
    reverse: bool
    tight: bool
    looped: bool = False

    def start(self, init: Carry, kept: Tree, order: Order) -> _State:
        """Before the first layer, which has `kept` this."""
        weights = [self._gather(turn, turn, order) for turn in range(min(self.ahead, self.length))]
        return self.bring_next(_State(init, weights), kept)

    def turns(
        self, state: _State, turns: Sequence[Any], gathers: int, given: list[Tree], then: Tree, order: Order
    ) -> tuple[_State, list[Tree]]:
        """These layers, of which the first `gathers` gather, and what they keep.

        Args:
            given: what they have kept.
            then: what the layer after them has kept.
        """
        keep: list[Tree] = []
        waits: list[Array] = []
        for i, turn in enumerate(turns):
            kept = self.again(given[i], events(state.grads or state.carry[0])) if self.again else given[i]
            if state.grads is not None:
                flow, rest = state.carry
                reduced, there = self.reduce_before(turn, state, order), order.before_reduction()
                # No gradient is made before the last is reduced, or the last but one.
                flow = after(flow, there if self.tight else waits)
                state, waits = state._replace(carry=(flow, rest), reduced=reduced), there
            if i < gathers:
                weights = self._gather(turn + self.ahead, self.ahead, order)
                state = state._replace(weights=[*state.weights, weights])
            if self.leaves_at_once:
                flow, rest = state.carry
                state = state._replace(carry=(floating_after(flow, order.in_host_memory(1)), rest))
            near = None if state.near is None else self._in_turn(state)
            state = self.bring_next(state, given[i + 1] if i + 1 < len(given) else then)
            state, keeps = self._compute(turn, state, kept, near, order)
            keep.append(keeps)
        return state, keep

    def reduce_before(self, turn: Any, state: _State, order: Order) -> Any:
        """The stacked gradients, with those of the layer before `turn`."""
        shards, there = self.reduce(state.grads, order.before_reduction())
        order.reduced(there)
        return self._put(state.reduced, shards, turn - 1)

    def bring_next(self, state: _State, kept: Tree) -> _State:
        """What the layer that comes has `kept` in host memory is on its way from now on."""
        if self.bring is None or kept is None:
            return state._replace(near=None)
        near, flow = self.bring(kept, state.carry[0])
        return state._replace(near=near, carry=(flow, state.carry[1]))

    def all_away(self, state: _State, order: Order) -> _State:
        """What the layers so far keep in host memory is there before the next computes."""
        flow, rest = state.carry
        return state._replace(carry=(floating_after(flow, order.in_host_memory(0)), rest))

    @property
    def leaves_at_once(self) -> bool:
        """What a layer keeps leaves for host memory when it is made; the layer after the next waits until it is there.

        In a loop it leaves once the layer's weights are there: before, the compiler, which schedules from the end,
        would have nothing of the layer before to hide their gather in.
        """
        return self.away is not None and not self.looped

    def _in_turn(self, state: _State) -> list[Array]:
        """What came back early is not computed with before the layer above is done: two would take room at once.

        It does not wait for the same events as the gather, see `Order.follows`.
        """
        return floating_after(state.near, events(state.grads or state.carry[0]))

    def _compute(self, turn: Any, state: _State, kept: Tree, near: Tree, order: Order) -> tuple[_State, Tree]:
        weights, *others = state.weights
        carry, y, keep, grads = self.layer(weights, state.carry, self._of(self.xs, turn), kept, near)
        order.computed(carry[0])
        if self.put:
            keep = self.put(keep, event(weights) if self.ahead and not self.leaves_at_once else [])
        if self.away and self.leaves_at_once:
            order.offloaded(self.away(keep))
        ys, reduced = state.ys, state.reduced
        if reduced is None:
            ys = jax.tree.map(self._room_for, y)
            reduced = [self._room_for(a) for a in jax.eval_shape(lambda grads: self.reduce(grads, [])[0], grads)]
        return _State(carry, others, state.near, grads, self._put(ys, y, turn), reduced), keep

    def _index(self, turn: Any) -> Any:
        return self.length - 1 - turn if self.reverse else turn

    def _of(self, stacked: Tree, turn: Any) -> Tree:
        return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, self._index(turn), keepdims=False), stacked)

    def _put(self, stacked: Tree, values: Tree, turn: Any) -> Any:
        put = lambda a, value: lax.dynamic_update_index_in_dim(a, value, self._index(turn), 0)
        return jax.tree.map(put, stacked, values)

    def _gather(self, turn: Any, ahead: int, order: Order) -> Tree:
        return self.fetch(self._of(self.shards, turn), ahead, order)

    def _room_for(self, like: Any) -> Array:
        """A stack of as many values as there are layers."""
        if jnp.issubdtype(like.dtype, jax.dtypes.extended):  # PRNG keys
            return jnp.broadcast_to(like, (self.length, *like.shape))
        return jnp.zeros((self.length, *like.shape), like.dtype)


def _scan_alone(
    layer: Any,
    fetch: Any,
    reduce: Any,
    init: Carry,
    shards: Tree,
    xs: Tree,
    kept: Kept | None,
    length: int,
    reverse: bool,
    order: Order,
    memory: Memory | None,
) -> tuple[Carry, Tree, Kept, list[Array]]:
    """Layer by layer: gathered, computed and reduced in one iteration."""

    def body(carry: Carry, slices: Any) -> tuple[Carry, Any]:
        shards, x, given = slices
        near = memory.bring_back(given, [])[0] if memory and kept is not None else None
        carry, y, keep, grads = layer(fetch(shards, 0, Order(0, [])), carry, x, given, near)
        if memory and kept is None:
            keep = memory.put_away(keep, [])
        return carry, (y, keep, reduce(grads, [])[0])

    slices = shards, xs, None if kept is None else kept.loop[0]
    carry, (ys, keep, reduced) = lax.scan(body, init, slices, length=length, reverse=reverse)
    order.computed(carry[0])
    return carry, ys, Kept([], [keep], []), reduced
