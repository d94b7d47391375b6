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
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.collectives import after, event

Array = Any
Tree = Any
Carry = tuple[list[Array], Tree]


class Order:
    """The events of the units so far.

    Args:
        depth: units that may be gathered ahead of the one that computes.
        start: events before which nothing is gathered.
    """

    def __init__(self, depth: int, start: Sequence[Array]):
        self.depth = depth
        self.restart(start)

    def restart(self, events: Sequence[Array]) -> None:
        """All units so far have computed before these."""
        self._done: list[list[Array]] = [list(events)] * (self.depth + 1)
        self._arrived: list[Array] = []

    def before_gather(self, ahead: int = 0) -> list[Array]:
        """What the gather for a unit waits for, `ahead` units before its turn."""
        return self._done[ahead - self.depth - 1] + self._arrived

    def arrived(self, events: list[Array]) -> None:
        """A gather has these."""
        self._arrived = events

    def computed(self, values: Sequence[Array]) -> None:
        """The next unit has computed these."""
        self._done.append(event(values) or self._done[-1])

    def reduced(self, events: list[Array]) -> None:
        """The reduction of the gradients of the last unit has these."""
        self._done[-1] = self._done[-1] + events


def scan(
    layer: Callable[[Tree, Carry, Tree], tuple[Carry, Tree, Tree]],
    fetch: Callable[[Tree, int, Order], Tree],
    reduce: Callable[[Tree], tuple[list[Array], list[Array]]],
    init: Carry,
    shards: Tree,
    xs: Tree,
    *,
    length: int,
    reverse: bool,
    ahead: int,
    late: bool,
    order: Order,
) -> tuple[Carry, Tree, list[Array]]:
    """`lax.scan` over layers, with their weights gathered ahead and their gradients reduced one layer later.

    What is gathered or not yet reduced crosses from one iteration of the compiled loop into the next. A loop of one
    layer would have to copy it, since the next exists before this one is used up. In a loop of `ahead + 1` layers each
    buffer is handed on to a layer that starts after its last reader. The first layer and the last ones stand outside
    the loop, so that nothing is gathered in vain.

    Args:
        layer: `layer(weights, (flow, rest), x) -> ((flow, rest), y, gradients)`. `flow` are the floating arrays that
            the next layer computes from, `rest` all else that is carried.
        fetch: `fetch(shards of a layer, ahead, order)` gathers its weights.
        reduce: `reduce(gradients) -> (their shards, events)`.
        init: (flow, rest) before the first layer.
        shards, xs: arrays whose dim 0 counts layers.
        length: number of layers.
        reverse: from the last layer to the first.
        ahead: layers that are gathered ahead.
        late: whether gradients are reduced beside the layer that follows.
        order: the events before the scan. Those of its layers are added.

    Returns:
        (flow, rest) after the last layer, the stacked y, the stacked reduced gradients.

    Cost: compiles up to 3 * ahead + 3 layers instead of one.
    """
    if not ahead and not late:

        def alone(carry: Carry, slices: Any) -> tuple[Carry, Any]:
            carry, y, grads = layer(fetch(slices[0], 0, Order(0, [])), carry, slices[1])
            return carry, (y, reduce(grads)[0])

        carry, (ys, reduced) = lax.scan(alone, init, (shards, xs), length=length, reverse=reverse)
        order.computed(carry[0])
        return carry, ys, reduced

    index = lambda turn: length - 1 - turn if reverse else turn
    of = lambda tree, turn: jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, index(turn), keepdims=False), tree)
    put = lambda stacked, values, turn: jax.tree.map(
        lambda a, value: lax.dynamic_update_index_in_dim(a, value, index(turn), 0), stacked, values
    )
    gather = lambda turn, ahead, order: fetch(of(shards, turn), ahead, order)

    def turns(first: Any, count: int, gathers: int, state: Any, order: Order) -> Any:
        """`count` layers from turn `first` on; the first `gathers` of them gather for later ones."""
        carry, queue, grads, ys, reduced = state
        waits: list[Array] = []
        for i in range(count):
            carry = after(carry[0], waits), carry[1]  # no gradient is made before the last but one is reduced
            grad_shards, waits = reduce(grads)
            reduced = put(reduced, grad_shards, first + i - 1)
            order.reduced(waits)
            if i < gathers:
                queue = [*queue, gather(first + i + ahead, ahead, order)]
            carry, y, grads = layer(queue[0], carry, of(xs, first + i))
            order.computed(carry[0])
            queue, ys = queue[1:], put(ys, y, first + i)
        return carry, queue, grads, ys, reduced

    queue = [gather(turn, turn, order) for turn in range(min(ahead + 1, length))]
    carry, y, grads = layer(queue[0], init, of(xs, 0))
    order.computed(carry[0])
    ys = put(jax.tree.map(lambda value: _stack_of(value, length), y), y, 0)
    reduced = [_stack_of(value, length) for value in jax.eval_shape(lambda grads: reduce(grads)[0], grads)]
    state, first = (carry, queue[1:], grads, ys, reduced), 1

    group = max(ahead, 1) + 1
    loops = (length - 1 - ahead) // group
    if loops > 1:

        def body(state: Any, i: Array) -> Any:
            return turns(1 + i * group, group, group, state, Order(order.depth, event(state[0][0]))), None

        state, _ = lax.scan(body, state, jnp.arange(loops))
        order.restart(event(state[0][0]))
        first += loops * group
    count = length - first
    carry, _, grads, ys, reduced = turns(first, count, count - ahead, state, order)
    grad_shards, waits = reduce(grads)
    order.reduced(waits)
    return carry, ys, put(reduced, grad_shards, length - 1)


def _stack_of(like: Any, length: int) -> Array:
    """Room for `length` values, in the memory where `like` is."""
    if jnp.issubdtype(like.dtype, jax.dtypes.extended):  # PRNG keys
        return jnp.broadcast_to(like, (length, *like.shape))
    stack = jnp.zeros((length, *like.shape), like.dtype)
    on_host = jax.typeof(like).memory_space is jax.memory.Space.Host
    return jax.device_put(stack, jax.memory.Space.Host) if on_host else stack
