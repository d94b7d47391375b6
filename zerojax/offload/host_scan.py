"""Scans over layers whose weights are in host memory: each layer comes while the one before it computes.

In a backward pass, the gradients of a layer are reduced, and go to host memory, while the next layer computes:

    from the host   weights 3    weights 2    weights 1
    compute         layer 4      layer 3      layer 2
    to the host     grads 5      grads 4      grads 3

The bodies are those of `layer_scan`, and the loop is another one: it needs no second buffer of weights, which a copy
from the host fills while it is not read, and its copies are paced by the products of the layer that they overlap with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.comm.schedule import Schedule
from zerojax.offload.host_arrays import Pace, Paces, layer_from_host, run_with_products
from zerojax.program.layer_scan import Carry, Cut, LayerBody, Layers, SavedValues, Scanned
from zerojax.program.part import Loop
from zerojax.sharding.placement import is_in_host
from zerojax.utils.typing import Array, ArrayLike, PyTree


class LayerSink(Protocol):
    """Where the gradients of layers go.

    Attributes:
        accumulates: whether gradients are added to what the stacks in host memory hold.
    """

    @property
    def accumulates(self) -> bool: ...

    def put_layer(
        self, leaf: int, stack: Array, grad: Array, index: ArrayLike, dim: int, paces: Paces
    ) -> tuple[Array, Array]:
        """Adds the reduced gradient of a layer, which has the dim of layers: (the stack, the squared norm)."""
        ...


class _Streamed(NamedTuple):
    """The values that are live between two layers."""

    carry: Carry
    weights: PyTree  # the weights of the next layer; None after the last one
    grads: PyTree  # the gradients of the layer before, not yet reduced; None before the first layer
    totals: list[Array]  # of gradients, in host memory
    squared_norms: list[Array]  # of the totals so far
    ys: PyTree  # stacked results, None before the first layer


def scan_from_host(
    body: LayerBody,
    init: Carry,
    loop: Loop,
    stacks: Sequence[Array],
    totals: list[Array],
    sink: LayerSink,
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
    # The layers, and the bytes that are copied for each.
    cut = Cut.of_single_layers(loop.cut.length)
    layers = Layers([], loop.xs, cut, loop.reverse, loop.saved)
    length, given, accumulates = cut.length, layers.given, bool(totals) and sink.accumulates
    num_front, num_back = len(given.front), len(given.back)  # the other way round in a backward pass
    put_bytes = _host_bytes(totals) / length
    fetch_bytes = _host_bytes(stacks) / length + accumulates * put_bytes

    # What is done for each layer.
    def fetch(index: ArrayLike, pace: Pace) -> PyTree:
        """The full weights of a layer, of those that are needed."""
        views = zip(loop.views, stacks, body.needed, strict=True)
        layer = lambda view, stack: view.of_layer(layer_from_host(stack, index, view.order[0], pace))
        shards = [layer(view, stack) if flag else None for view, stack, flag in views]
        return body.gather(shards, 0, Schedule(0, []))

    def compute(weights: PyTree, carry: Carry, x: PyTree, given: PyTree) -> tuple[Carry, PyTree, PyTree, PyTree]:
        fetched = None if given is None else body.restore(given, carry[0])[0]
        return body.compute(weights, carry, x, given, fetched)

    def put(state: _Streamed, turn: int | Array, paces: Paces) -> _Streamed:
        """Moves the gradients of the layer before `turn`."""
        if not totals or state.grads is None:
            return state
        index, (reduced, _) = layers.index(turn - 1), body.reduce(state.grads, [], 0)
        moved = [
            sink.put_layer(view.leaf, total, view.to_leaf(grad), index, view.order[0], paces)
            for view, total, grad in zip(loop.trained, state.totals, reduced, strict=True)
        ]
        norms = [n + norm for n, (_, norm) in zip(state.squared_norms, moved, strict=True)]
        return state._replace(totals=[total for total, _ in moved], squared_norms=norms)

    def visit(state: _Streamed, turn: int | Array, given: PyTree, is_last: bool = False) -> tuple[_Streamed, PyTree]:
        """Computes a layer overlapped with the copies: (the state after it, the values that it saves)."""
        x = layers.of(layers.xs, turn)
        results, products = run_with_products(compute, state.weights, state.carry, x, given)
        carry, y, saved, grads = results
        # Sums go when what they are added to has come.
        puts = Pace([] if accumulates else products, put_bytes)
        paces = Paces(Pace(products, fetch_bytes, one_by_one=True), puts)
        state = put(state, turn, paces)
        weights = None if is_last else fetch(layers.index(turn + 1), paces.fetches)
        ys = layers.put(jax.tree.map(layers.room_for, y) if state.ys is None else state.ys, y, turn)
        return state._replace(carry=carry, weights=weights, grads=grads, ys=ys), body.store(saved, [])

    def iteration(state: _Streamed, slices: tuple[Array, PyTree]) -> tuple[_Streamed, PyTree]:
        return visit(state, *slices)

    # The first layer comes before anything computes.
    weights = fetch(layers.index(0), Pace([], 1, one_by_one=True, waits=schedule.before_gather()))
    state = _Streamed(init, weights, None, totals, [jnp.float32(0)] * len(totals), None)

    # Layer by layer; those of the middle in a loop.
    front, middle, back = [], [None], []
    for turn in range(num_front):
        state, saved = visit(state, turn, given.front[turn], is_last=turn == length - 1)
        front.append(saved)
    if cut.loops:
        is_backward = loop.saved is not None
        turns = jnp.arange(num_front, length - num_back)
        slices = turns[::-1] if is_backward else turns, given.loop[0]
        state, middle[0] = lax.scan(iteration, state, slices, reverse=is_backward)
    for k in range(num_back):
        turn = length - num_back + k
        state, saved = visit(state, turn, given.back[k], is_last=turn == length - 1)
        back.append(saved)
    state = put(state, length, Paces(Pace([], 1), Pace([], 1)))
    schedule.computed(state.carry[0])
    return Scanned(state.carry, state.ys, SavedValues(front, middle, back), state.totals), state.squared_norms


def _host_bytes(stacks: Sequence[Array]) -> int:
    """The bytes of those stacks that are in host memory."""
    return sum(stack.size * stack.dtype.itemsize for stack in stacks if is_in_host(stack))
