"""What waits for what: weights are gathered ahead of the computation, gradients are reduced behind it.

While unit j computes, the weights of the next units are gathered and the gradients of the unit before are reduced. At
depth 1, in the backward pass:

    link      reduce 9, gather 7 │ reduce 8, gather 6 │ reduce 7, gather 5
    compute   unit 8             │ unit 7             │ unit 6

A compiler that may start a gather early may as well start all of them at once. So each gather waits for events: scalars
that exist when the unit that leaves the window has computed, when its gradients are reduced, and when the gather before
has arrived. (Without the last, compilers merge what comes before two gathers, and the earlier waits for the later.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.collectives import after, event, events

Array = Any
Tree = Any
Carry = tuple[list[Array], Tree]


class Order:
    """The events of the units so far. `last` are those of when the last one has computed.

    Args:
        depth: units that may be gathered ahead of the one that computes.
        start: events before which nothing is gathered.
    """

    def __init__(self, depth: int, start: Sequence[Array]):
        self.depth = depth
        self.restart(start)

    def restart(self, start: Sequence[Array]) -> None:
        """All units so far have computed before these events."""
        self._done: list[list[Array]] = [list(start)] * (self.depth + 1)
        self.last = list(start)
        self._arrived: list[Array] = []
        self._offloaded: list[list[Array]] = []
        self._reduced: list[Array] = []

    def before_gather(self, ahead: int = 0) -> list[Array]:
        """What the gather for a unit waits for, `ahead` units before its turn."""
        return self._done[ahead - self.depth - 1] + self._arrived

    def arrived(self, there: list[Array]) -> None:
        """A gather has these events."""
        self._arrived = there

    def computed(self, values: Sequence[Array]) -> None:
        """The next unit has computed these. All count: one of them may be there before the unit starts."""
        self.last = events(values) or self._done[-1]
        self._done.append(self.last)

    def offloaded(self, there: list[Array]) -> None:
        """What the next unit keeps in host memory has these events."""
        self._offloaded.append(there)

    @property
    def offloaded_one_unit_ago(self) -> list[Array]:
        """What the last unit but one keeps in host memory is there after these."""
        return self._offloaded[-2] if len(self._offloaded) > 1 else []

    def reduced(self, there: list[Array]) -> None:
        """The reduction of the gradients of the last unit has these events."""
        self._done[-1] = self._done[-1] + there
        self._reduced = there

    def before_reduction(self) -> list[Array]:
        """The events of the last reduction."""
        return self._reduced


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


class Kept(NamedTuple):
    """What layers keep for the backward pass, by the places where the forward pass made it.

    Each is handed on from where it was made to where it is used. In one stack, the compiler would lay it out in one way
    for the loop and in another for the layers outside, and copy all of it in between.
    """

    front: list[Tree]
    loop: list[Tree]  # per layer of a group, stacked over iterations
    back: list[Tree]

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
    bring: Callable[[Tree, list[Array]], tuple[Tree, list[Array]]] | None = None,
) -> tuple[Carry, Tree, Kept, list[Array]]:
    """`lax.scan` over layers, with their weights gathered ahead and their gradients reduced one layer later.

    What is gathered or not yet reduced crosses from one iteration of the compiled loop into the next. A loop of one
    layer would have to copy it, since the next exists before this one is used up. In a loop of `ahead + 1` layers each
    buffer is handed on to a layer that starts after its last reader. The first and the last layers stand outside the
    loop, so that nothing is gathered in vain.

    Args:
        layer: `layer(weights, (flow, rest), x, kept, near) -> ((flow, rest), y, keep, gradients)`. `flow` are the
            floating arrays that the next layer computes from, `rest` all else that is carried, `near` what `bring` made
            of `kept`.
        fetch: `fetch(shards of a layer, ahead, order)` gathers its weights.
        reduce: `reduce(gradients, events of the last reduction) -> (their shards, events)`.
        init: (flow, rest) before the first layer.
        shards, xs: arrays whose dim 0 counts layers.
        kept: in a backward pass, what the forward pass returned. Layers are visited in the opposite order, and so are
            the iterations of the loop.
        plan: of the forward pass.
        reverse: from the last layer to the first.
        order: the events before the scan. Those of its layers are added.
        bring: `bring(kept, flow) -> (near, flow)`: what a layer keeps in host memory, on its way back from when `flow`
            is there. It is called one layer ahead; in loops once more than there are layers. None: nothing is there.

    Returns:
        (flow, rest) after the last layer, the stacked y, what layers keep, the stacked reduced gradients.

    Cost: compiles up to 4 * max(ahead, 1) + 1 layers instead of one.
    """
    length, ahead, group = plan.length, plan.ahead, plan.group
    if group == 1:
        return _scan_alone(layer, fetch, reduce, init, shards, xs, kept, length, reverse, order, bring)
    front, loops, back = plan.front, plan.loops, plan.back
    given = Kept([None] * front, [None] * group, [None] * back)
    if kept is not None:
        front, back, given = back, front, kept.mirrored()
    index = lambda turn: length - 1 - turn if reverse else turn
    of = lambda tree, turn: jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, index(turn), keepdims=False), tree)
    put = lambda stacked, values, turn: jax.tree.map(
        lambda a, value: lax.dynamic_update_index_in_dim(a, value, index(turn), 0), stacked, values
    )
    gather = lambda turn, ahead, order: fetch(of(shards, turn), ahead, order)
    fetch_kept = lambda kept, flow: (None, flow) if bring is None or kept is None else bring(kept, flow)
    in_loop = lambda slot: jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, slot, keepdims=False), given.loop[0])

    def turns(first: Any, count: int, gathers: int, state: Any, given: list[Tree], then: Tree, order: Order) -> Any:
        """`count` layers from turn `first` on, of which the first `gathers` gather; also what they keep.

        `then` is what the layer after them has kept.
        """
        carry, queue, grads, ys, reduced, near = state
        waits: list[Array] = []
        keep = []
        for i in range(count):
            if grads is not None:
                carry = after(carry[0], waits), carry[1]  # no gradient is made before the last but one is reduced
                grad_shards, waits = reduce(grads, order.before_reduction())
                reduced = put(reduced, grad_shards, first + i - 1)
                order.reduced(waits)
            if i < gathers:
                queue = [*queue, gather(first + i + ahead, ahead, order)]
            next_near, flow = fetch_kept(given[i + 1] if i + 1 < count else then, carry[0])
            carry, y, keeps, grads = layer(queue[0], (flow, carry[1]), of(xs, first + i), given[i], near)
            order.computed(carry[0])
            if ys is None:
                ys = jax.tree.map(lambda value: _stack_of(value, length), y)
                shapes = jax.eval_shape(lambda grads: reduce(grads, [])[0], grads)
                reduced = [_stack_of(shape, length) for shape in shapes]
            queue, ys, near = queue[1:], put(ys, y, first + i), next_near
            keep.append(keeps)
        return (carry, queue, grads, ys, reduced, near), keep

    queue = [gather(turn, turn, order) for turn in range(min(ahead, length))]
    near, flow = fetch_kept(given.front[0] if front else given.back[0], init[0])
    then = in_loop(loops - 1) if loops else given.back[0] if back else None
    state: Any = ((flow, init[1]), queue, None, None, None, near)
    state, front_keep = turns(0, front, length - ahead, state, given.front, then, order)
    loop_keep: list[Tree] = [None] * group
    if loops:

        def body(state: Any, slices: Any) -> Any:
            i, given = slices
            then = in_loop(jnp.maximum(loops - 2 - i, 0))
            first, there = front + i * group, Order(order.depth, event(state[0][0]))
            return turns(first, group, group, state, given, then, there)

        iterations = jnp.arange(loops) if kept is None else jnp.arange(loops)[::-1]
        state, loop_keep = lax.scan(body, state, (iterations, given.loop), reverse=kept is not None)
        order.restart(event(state[0][0]))
        (flow, rest), *others, _ = state
        near, flow = fetch_kept(given.back[0], flow)
        state = ((flow, rest), *others, near)
    state, back_keep = turns(length - back, back, back - ahead, state, given.back, None, order)
    carry, _, grads, ys, reduced, _ = state
    grad_shards, waits = reduce(grads, order.before_reduction())
    order.reduced(waits)
    return carry, ys, Kept(front_keep, loop_keep, back_keep), put(reduced, grad_shards, length - 1)


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
    bring: Any,
) -> tuple[Carry, Tree, Kept, list[Array]]:
    """Layer by layer: gathered, computed and reduced in one iteration."""

    def body(carry: Carry, slices: Any) -> tuple[Carry, Any]:
        shards, x, given = slices
        near = bring(given, [])[0] if bring else None
        carry, y, keep, grads = layer(fetch(shards, 0, Order(0, [])), carry, x, given, near)
        return carry, (y, keep, reduce(grads, [])[0])

    slices = shards, xs, None if kept is None else kept.loop[0]
    carry, (ys, keep, reduced) = lax.scan(body, init, slices, length=length, reverse=reverse)
    order.computed(carry[0])
    return carry, ys, Kept([], [keep], []), reduced


def _stack_of(like: Any, length: int) -> Array:
    """Room for `length` values."""
    if jnp.issubdtype(like.dtype, jax.dtypes.extended):  # PRNG keys
        return jnp.broadcast_to(like, (length, *like.shape))
    return jnp.zeros((length, *like.shape), like.dtype)
