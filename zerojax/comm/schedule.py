"""The order of communication and computation: gathers run ahead of the computation, reductions run behind it.

While unit j computes, the weights of the next units are gathered and the gradients of the unit before are reduced. At
`prefetch` 1, in the backward pass:

    link      reduce 9, gather 7 │ reduce 8, gather 6 │ reduce 7, gather 5
    compute   unit 8             │ unit 7             │ unit 6

A compiler that is free to start a gather early may start all of them at once. Each gather therefore waits for events,
which are scalars that become available when something is done (see `after`): that the unit that leaves the window has
computed, that its gradients are reduced, and that the gather before has arrived. Without the last, compilers merge the
operations before two gathers, and the earlier gather waits for the later.

The first gather overlaps with no computation. Its leaves are gathered one after the other, in the order of their uses:
the first matrix product waits for its own weight only, and overlaps with the gathers of the others.

Units that are small next to the largest, such as a norm between the last layer and the head, take no place of their own
in this order: they are gathered together with the units after them, one after the other. A gather would otherwise
start later than it could, with only the small unit to overlap with.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from zerojax.utils.typing import Array, DTypeLike, Shape


def after(values: Sequence[Array], events: Sequence[Array]) -> list[Array]:
    """The values, unchanged, but not available to their consumers before all of `events`, scalars of a real dtype, are.

    This limits how many units are gathered at a time. An optimization barrier cannot: compilers drop barriers before
    they schedule. The dependency here is a select with the predicate sign(event) > 1, which is never true but which
    compilers do not simplify.

    Cost: a copy of the values.
    """
    if not events:
        return list(values)
    never = functools.reduce(operator.or_, [lax.sign(event) > 1 for event in events])
    return [lax.select(never, lax.full_like(value, 0), value) for value in values]


def floating_after(values: Sequence[Array], events: Sequence[Array]) -> list[Array]:
    """Like `after`, but only the floating values wait."""
    floating = [jnp.issubdtype(value.dtype, jnp.inexact) for value in values]
    waiting = iter(after([value for value, flag in zip(values, floating, strict=True) if flag], events))
    return [next(waiting) if flag else value for value, flag in zip(values, floating, strict=True)]


def zeros_after(shape: Shape, dtype: DTypeLike, events: Sequence[Array]) -> Array:
    """An array of zeros that is not allocated before all of `events` are computed."""
    (one,) = after([jnp.ones((), dtype)], events)  # compilers simplify a selection between zeros
    return lax.broadcast(1 - one, shape)


def event(values: Sequence[Array]) -> list[Array]:
    """[an event of the first floating array among `values`, or of the first integer one], or [] without either."""
    for kind in jnp.floating, jnp.integer:
        for value in values:
            if value.size and jnp.issubdtype(value.dtype, kind):
                return [lax.slice(value, (0,) * value.ndim, (1,) * value.ndim).reshape(())]
    return []


def events(values: Sequence[Array]) -> list[Array]:
    """An event for each floating array among `values`; if there is none, the result of `event`."""
    floating = [e for value in values if jnp.issubdtype(value.dtype, jnp.floating) for e in event([value])]
    return floating or event(values)


class Schedule:
    """The events of the units so far.

    Args:
        prefetch: number of units that may be gathered ahead of the unit that computes.
        start: events before which nothing is gathered.
        idle: whether nothing is computed before the first unit.
        layers: the least number of layers in an iteration of a loop over layers.
        least_bytes: units with fewer bytes, when they are gathered, join those after them until they have as many.

    Attributes:
        last: events of the end of the last unit's computation.
    """

    def __init__(
        self, prefetch: int, start: Sequence[Array], idle: bool = False, layers: float = 1, least_bytes: float = 0
    ):
        self.prefetch, self.layers, self.least_bytes = prefetch, layers, least_bytes
        self.restart(start)
        self._idle = idle

    def restart(self, start: Sequence[Array]) -> None:
        """Forgets the units so far: all have computed before these events."""
        # (computed, reduced) of each unit
        self._done: list[tuple[list[Array], list[Array]]] = [(list(start), [])] * (self.prefetch + 1)
        self.last = list(start)
        self._gathered: list[Array] = []
        self._offloaded: list[list[Array]] = []
        self._reduced: list[Array] = []
        self._joined_bytes = 0.0  # of units that join the next one
        self._idle = False

    def before_gather(self, prefetch: int = 0) -> list[Array]:
        """The events that the gather of a unit waits for, if it starts `prefetch` units before it is used."""
        computed, reduced = self._done[prefetch - self.prefetch - 1]
        return computed + reduced + self._gathered

    def is_first_gather(self, prefetch: int = 0) -> bool:
        """Whether this gather overlaps with no matrix product: none comes before the unit."""
        return self._idle and not prefetch

    def gathered(self, events: list[Array]) -> None:
        """Records the events of a gather."""
        self._gathered = events

    def computed(self, values: Sequence[Array], num_bytes: float = math.inf, multiplies: bool = True) -> None:
        """Records the results of the next unit, its bytes when it is gathered, and whether it computes matrix products.

        All results count: one may be available before the unit starts.
        """
        self.last = events(values) or self.last
        self._idle = self._idle and not multiplies
        self._joined_bytes += num_bytes
        if self._joined_bytes >= self.least_bytes:
            self._done.append((self.last, []))
            self._joined_bytes = 0.0

    def replace_last(self, values: Sequence[Array]) -> None:
        """Makes later gathers wait for these values, which have waited for the last unit, in place of it.

        If two gathers waited for the same events, compilers would read these in one kernel, after the last of all
        events that either waits for.
        """
        if replacement := event(values):
            self.last, self._done[-1] = replacement, (replacement, self._done[-1][1])

    def offloaded(self, events: list[Array]) -> None:
        """Records the events of the next unit's copies to host memory."""
        self._offloaded.append(events)

    def offload_events(self, units_ago: int) -> list[Array]:
        """The events of the copies to host memory of a unit: 0 for the last one, 1 for the one before."""
        return self._offloaded[-1 - units_ago] if len(self._offloaded) > units_ago else []

    def reduced(self, events: list[Array]) -> None:
        """Records the events of the reduction of the last unit's gradients."""
        self._reduced = events
        if not self._joined_bytes:
            computed, before = self._done[-1]
            self._done[-1] = computed, before + events

    @property
    def group(self) -> int:
        """A number that differs between the reductions of units that do not wait for each other.

        Compilers combine collectives of several units, which then start after the last of these units has computed, and
        delay the gathers that wait for any of them. The gather of a unit, and with it its reduction, waits for the
        reduction of the unit that leaves the window, and is not combined with it.
        """
        return len(self._done) % (self.prefetch + 1)

    def before_reduction(self) -> list[Array]:
        """The events of the last reduction."""
        return self._reduced
