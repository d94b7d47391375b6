"""Scans over layers whose weights are in host memory: each layer comes while the one before it computes.

In a backward pass, the gradients of a layer are reduced, and go to host memory, while the next layer computes:

    from the host   weights 3    weights 2    weights 1
    compute         layer 4      layer 3      layer 2
    to the host     grads 5      grads 4      grads 3
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.comm.schedule import Schedule
from zerojax.offload.host_arrays import is_in_host
from zerojax.offload.pace import Pace, Paces, run_with_products
from zerojax.program.layer_scan import Carry, Layers, SavedValues, Scanned
from zerojax.utils.typing import Array, PyTree


class HostLayerBody(Protocol):
    """The operations of a layer, of which those that `LayerBody` has too are as there.

    Attributes:
        accumulates: whether gradients are added to what the stacks in host memory hold.
    """

    accumulates: bool

    def fetch_layer(self, stacks: PyTree, index: Any, pace: Pace) -> PyTree:
        """The full weights of layer `index`, from stacks in host memory."""
        ...

    def compute(
        self, weights: PyTree, carry: Carry, x: PyTree, saved: PyTree, fetched: PyTree
    ) -> tuple[Carry, PyTree, PyTree, PyTree]: ...

    def store(self, saved: PyTree, waits: list[Array]) -> PyTree: ...

    def restore(self, saved: PyTree, overlapped: list[Array]) -> tuple[PyTree, list[Array]]: ...

    def grads_to_host(
        self, totals: list[Array], grads: PyTree, index: Any, paces: Paces
    ) -> tuple[list[Array], list[Array]]:
        """Reduces the gradients of layer `index` and adds them to stacks in host memory: (these, squared norms)."""
        ...


class _Streamed(NamedTuple):
    """The values that are live between two layers.

    Attributes:
        carry: the carry of the scan.
        weights: the weights of the next layer; None after the last one.
        grads: the gradients of the layer before, not yet reduced; None before the first layer.
        totals: the sums of gradients in host memory.
        squared_norms: of the totals so far.
        ys: stacked results, None before the first layer.
    """

    carry: Carry
    weights: PyTree
    grads: PyTree
    totals: list[Array]
    squared_norms: list[Array]
    ys: PyTree


def scan_from_host(
    body: HostLayerBody, init: Carry, layers: Layers, totals: list[Array], schedule: Schedule
) -> tuple[Scanned, list[Array]]:
    """As `layer_scan.scan`, for `layers.shards` in host memory.

    The first and the last layer are outside of the loop, so that no layer comes in vain.

    Args:
        body: the operations of a layer.
        init: carry before the first layer.
        layers: the layers to scan over, of which the cut is `Cut.of_single_layers`.
        totals: stacks in host memory to which the gradients are added; [] in a forward pass.
        schedule: the events before the scan, to which its end is added.

    Returns:
        (the results, of which `grads` are the totals; the squared norms of the totals).

    Cost: on the device, the weights and the gradients of two layers. Compiles three layers instead of one.
    """
    length, given = layers.cut.length, layers.given
    num_front, num_back = len(given.front), len(given.back)
    put_bytes = _host_bytes(totals) / length
    fetch_bytes = _host_bytes(layers.shards) / length + body.accumulates * put_bytes

    def compute(weights: PyTree, carry: Carry, x: PyTree, given: PyTree) -> Any:
        fetched = None if given is None else body.restore(given, carry[0])[0]
        return body.compute(weights, carry, x, given, fetched)

    def put(state: _Streamed, turn: int | Array, paces: Paces) -> _Streamed:
        """Moves the gradients of the layer before `turn`."""
        if not totals or state.grads is None:
            return state
        moved, norms = body.grads_to_host(state.totals, state.grads, layers.index(turn - 1), paces)
        norms = [n + m for n, m in zip(state.squared_norms, norms, strict=True)]
        return state._replace(totals=moved, squared_norms=norms)

    def visit(state: _Streamed, turn: int | Array, given: PyTree, is_last: bool = False) -> tuple[_Streamed, PyTree]:
        """Computes a layer beside the copies: (the state after it, the values that it saves)."""
        args = state.weights, state.carry, layers.of(layers.xs, turn), given
        closed, shapes = jax.make_jaxpr(compute, return_shape=True)(*args)
        results, products = run_with_products(closed, jax.tree.leaves(args))
        carry, y, saved, grads = jax.tree.unflatten(jax.tree.structure(shapes), results)
        # Sums go when what they are added to has come.
        puts = Pace([] if body.accumulates else products, put_bytes)
        paces = Paces(Pace(products, fetch_bytes, one_by_one=True), puts)
        state = put(state, turn, paces)
        weights = None if is_last else body.fetch_layer(layers.shards, layers.index(turn + 1), paces.fetches)
        ys = layers.put(jax.tree.map(layers.room_for, y) if state.ys is None else state.ys, y, turn)
        return state._replace(carry=carry, weights=weights, grads=grads, ys=ys), body.store(saved, [])

    def iteration(state: _Streamed, slices: tuple[Array, PyTree]) -> tuple[_Streamed, PyTree]:
        return visit(state, *slices)

    pace = Pace([], 1, one_by_one=True, waits=schedule.before_gather())
    weights = body.fetch_layer(layers.shards, layers.index(0), pace)
    state = _Streamed(init, weights, None, totals, [jnp.float32(0)] * len(totals), None)
    front, loop, back = [], [None], []
    for turn in range(num_front):
        state, saved = visit(state, turn, given.front[turn], is_last=turn == length - 1)
        front.append(saved)
    if layers.cut.loops:
        is_backward = layers.saved is not None
        turns = jnp.arange(num_front, length - num_back)
        slices = turns[::-1] if is_backward else turns, given.loop[0]
        state, loop[0] = lax.scan(iteration, state, slices, reverse=is_backward)
    for k in range(num_back):
        turn = length - num_back + k
        state, saved = visit(state, turn, given.back[k], is_last=turn == length - 1)
        back.append(saved)
    state = put(state, length, Paces(Pace([], 1), Pace([], 1)))
    schedule.computed(state.carry[0])
    return Scanned(state.carry, state.ys, SavedValues(front, loop, back), state.totals), state.squared_norms


def _host_bytes(stacks: Sequence[Array]) -> int:
    """The bytes of those stacks that are in host memory."""
    return sum(stack.size * stack.dtype.itemsize for stack in stacks if is_in_host(stack))
