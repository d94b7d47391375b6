"""Gradients that go to host memory as they are computed, and their sums over microbatches there."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.offload import host_arrays
from zerojax.offload.pace import Paces
from zerojax.utils.typing import Array, Shape


class HostGradients:
    """The gradients of the leaves that are in host memory, on one device.

    Args:
        totals: the sums of the microbatches so far by leaf, arrays in host memory; {} if there is one microbatch.
        is_first: bool scalar, whether this microbatch is the first: the sums have undefined values before it.
        for_tpus: whether their compiler is used. It fails if a loop carries sums in host memory, and if it chooses the
            layout of sums.

    Attributes:
        totals: with this microbatch.
        weight: fp32 scalar, by which the gradients of this microbatch are multiplied; None is 1.
        squared_norms: by leaf, of `totals`.
    """

    def __init__(self, totals: dict[int, Array], is_first: Array | None = None, for_tpus: bool = False):
        self.totals, self._is_first, self._for_tpus = dict(totals), is_first, for_tpus
        self.weight: Array | None = None
        self.squared_norms: dict[int, Array] = {}

    @property
    def accumulates(self) -> bool:
        """Whether gradients are added to sums."""
        return self._is_first is not None

    def add(self, leaf: int, grad: Array) -> None:
        """Adds the reduced gradient of a leaf."""
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

    def arrival(self, leaf: int) -> Array:
        """An event on the device: that the gradient of a leaf has arrived in host memory."""
        return host_arrays.arrival(self.totals[leaf], self._for_tpus)

    def stack(self, leaf: int, shape: Shape, dtype: Any) -> Array:
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
        assert self.weight is not None and self._is_first is not None
        return jnp.where(self._is_first, 0, total) + grad.astype(total.dtype) * self.weight


def _squared_norm(grad: Array) -> Array:
    return jnp.sum(jnp.square(grad.astype(jnp.float32)))
