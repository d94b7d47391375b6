"""Which memory the parameters and the sums of gradients are in, and in which the optimizer updates its state.

A step asks the `Memory` of its configuration for what depends on it. Here everything is on the devices;
`offload.host_memory` has subclasses that use the memory of the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp

from zerojax.program.part import GradientSink, Weights
from zerojax.sharding.placement import Leaf
from zerojax.utils.typing import Array, ArrayLike, Aval, DTypeLike

if TYPE_CHECKING:
    from zerojax.step.config import ZeroConfig
    from zerojax.step.state import StateLayout, TrainState
    from zerojax.step.update import Update


class GradientSums:
    """The sums of gradients over microbatches, one for each leaf; None for frozen leaves. Here, all are on the device.

    Attributes:
        room: by leaf, the sums that are not on the device, with undefined values.
        unrolls: whether the loop over microbatches is unrolled, so that each waits for the one before.
    """

    def __init__(self, dtype: DTypeLike):
        self._dtype = dtype
        self.room: dict[int, Array] = {}
        self.unrolls = False

    def start(self, grads: Sequence[Aval | None]) -> list[Array | None]:
        """The sums before the first microbatch, whose gradients have these shapes."""
        return [self._zeros(aval) for aval in grads]

    def _zeros(self, aval: Aval | None) -> Array | None:
        return None if aval is None else jnp.zeros(aval.shape, self._dtype)

    def sink(self, totals: dict[int, Array | None], index: ArrayLike) -> GradientSink:
        """Where the gradients of a microbatch go. `totals` are the sums so far of the leaves in `room`."""
        return GradientSink()

    def add(self, totals: Sequence[Array | None], grads: Sequence[Array | None], weight: Array) -> list[Array | None]:
        """Adds the gradients of a microbatch, times its weight. What is in `room` has been added already."""
        add = lambda total, grad: None if total is None else total + grad.astype(self._dtype) * weight
        return [add(total, grad) for total, grad in zip(totals, grads, strict=True)]

    def mean(self, totals: Sequence[Array | None], divisor: Array) -> list[Array | None]:
        """The sums divided by the sum of weights, except for those in `room`."""
        return [None if total is None else total / divisor for total in totals]


class Memory:
    """Where the states of a model are while a step runs. Here, all are on the devices, and updated as whole arrays."""

    def check(self, config: ZeroConfig, layout: StateLayout, platform: str | None = None) -> None:
        """Raises ValueError if such a state cannot be updated piece by piece, or the devices cannot read pieces of it.

        If the mesh has no devices, their platform may be known.
        """

    def check_state(self, config: ZeroConfig, state: TrainState) -> None:
        """Raises ValueError if this process may not use as much memory as a state of these avals takes."""

    def weights(self, shards: Sequence[Array], leaves: Sequence[Leaf]) -> Weights:
        """The leaves of the parameters."""
        return Weights(shards)

    def gradients(self) -> GradientSink:
        """Where the gradients of a step with one microbatch go."""
        return GradientSink()

    def sums(self, dtype: DTypeLike, shards: Sequence[Array], trainable: Sequence[bool]) -> GradientSums:
        """The sums of gradients over several microbatches, in `dtype`."""
        return GradientSums(dtype)

    def update(
        self, config: ZeroConfig, layout: StateLayout, dtypes: Sequence[DTypeLike], scales: bool
    ) -> Update | None:
        """The update of the optimizer in pieces; None if whole arrays are updated.

        Args:
            config, layout: of the state.
            dtypes: of the gradients of trained parameters, in flattening order.
            scales: whether gradients are multiplied by a factor before the update.
        """
        return None
