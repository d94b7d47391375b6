"""Scans over layers whose weights are in host memory: each layer comes while the one before it computes.

In a backward pass, the gradients of a layer are reduced, and go to host memory, while the next layer computes:

    from the host   weights 3    weights 2    weights 1
    compute         layer 4      layer 3      layer 2
    to the host     grads 5      grads 4      grads 3
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.transform.host_arrays import layer_bytes
from zerojax.transform.layer_scan import Carry, Layers, SavedValues, Scanned
from zerojax.transform.pace import Pace, Paces, run_with_products
from zerojax.transform.schedule import Schedule
from zerojax.typing import Array, PyTree


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
        weights: the weights of the next layer.
        grads: the gradients of the layer before, not yet reduced; zeros before the first layer.
        totals: the sums of gradients in host memory.
        squared_norms: of the totals so far.
    """

    carry: Carry
    weights: PyTree
    grads: PyTree
    totals: list[Array]
    squared_norms: list[Array]


def scan_from_host(
    body: HostLayerBody, init: Carry, layers: Layers, totals: list[Array], schedule: Schedule
) -> tuple[Scanned, list[Array]]:
    """As `layer_scan.scan`, for `layers.shards` in host memory.

    Args:
        body: the operations of a layer.
        init: carry before the first layer.
        layers: the layers to scan over, of which `cut` is a loop of single layers.
        totals: stacks in host memory to which the gradients are added; [] in a forward pass.
        schedule: the events before the scan, to which its end is added.

    Returns:
        (the results, of which `grads` are the totals; the squared norms of the totals).

    Cost: on the device, the weights and the gradients of two layers. One layer more comes than there are.
    """
    length, reverse = layers.cut.length, layers.reverse
    first, step = (length - 1, -1) if reverse else (0, 1)
    given = None if layers.saved is None else layers.saved.loop[0]
    weights = body.fetch_layer(layers.shards, first, Pace([], 1, one_by_one=True, waits=schedule.before_gather()))
    put_bytes = sum(map(layer_bytes, totals))
    fetch_bytes = sum(map(layer_bytes, layers.shards)) + body.accumulates * put_bytes

    def compute(weights: PyTree, carry: Carry, x: PyTree, given: PyTree) -> Any:
        fetched = None if given is None else body.restore(given, carry[0])[0]
        return body.compute(weights, carry, x, given, fetched)

    def put(state: _Streamed, index: Any, paces: Paces) -> tuple[list[Array], list[Array]]:
        """Moves the gradients of layer `index`."""
        return body.grads_to_host(state.totals, state.grads, index, paces) if totals else ([], [])

    def iteration(state: _Streamed, slices: Any) -> tuple[_Streamed, Any]:
        index, *others = slices
        is_first = index == first
        args = state.weights, state.carry, *others
        results, products = run_with_products(jax.make_jaxpr(compute)(*args), jax.tree.leaves(args))
        carry, y, saved, grads = jax.tree.unflatten(tree, results)
        # Sums go when what they are added to has come.
        paces = Paces(
            Pace(products, fetch_bytes, one_by_one=True), Pace([] if body.accumulates else products, put_bytes)
        )
        moved, norms = put(state, jnp.where(is_first, first, index - step), paces)
        following = body.fetch_layer(layers.shards, jnp.clip(index + step, 0, length - 1), paces.fetches)
        norms = [n + jnp.where(is_first, 0, m) for n, m in zip(state.squared_norms, norms, strict=True)]
        return _Streamed(carry, following, grads, moved, norms), (y, body.store(saved, []))

    slice_of = lambda tree: jax.tree.map(lambda a: jax.eval_shape(lambda a: a[0], a), tree)
    shapes = jax.eval_shape(compute, weights, init, slice_of(layers.xs), slice_of(given))
    tree, grads = jax.tree.structure(shapes), shapes[3]
    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), grads)
    state = _Streamed(init, weights, zeros, totals, [jnp.float32(0)] * len(totals))
    slices = jnp.arange(length), layers.xs, given
    state, (ys, saved) = lax.scan(iteration, state, slices, length=length, reverse=reverse)
    moved, norms = put(state, first + (length - 1) * step, Paces(Pace([], 1), Pace([], 1)))
    norms = [n + m for n, m in zip(state.squared_norms, norms, strict=True)]
    schedule.computed(state.carry[0])
    return Scanned(state.carry, ys, SavedValues([], [saved], []), moved), norms
