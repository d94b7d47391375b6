"""What waits for what: weights are gathered ahead of the computation, gradients are reduced behind it.

While unit j computes, the weights of the next units are gathered and the gradients of the unit before are reduced. At
`prefetch` 1, in the backward pass:

    link      reduce 9, gather 7 │ reduce 8, gather 6 │ reduce 7, gather 5
    compute   unit 8             │ unit 7             │ unit 6

A compiler that may start a gather early may as well start all of them at once. So each gather waits for events: scalars
that exist when the unit that leaves the window has computed, when its gradients are reduced, and when the gather before
has arrived. (Without the last, compilers merge what comes before two gathers, and the earlier waits for the later.)

Nothing computes beside the first gathers. There leaf follows leaf, in the order of their uses: the first matrix product
waits for its own weight alone, and hides the others.
"""

from __future__ import annotations

from collections.abc import Sequence

from zerojax.transform.dependencies import event, events
from zerojax.typing import Array


class Schedule:
    """The events of the units so far. `last` are those of when the last one has computed.

    Args:
        prefetch: units that may be gathered ahead of the one that computes.
        start: events before which nothing is gathered.
        idle: whether nothing computes before the first unit.
    """

    def __init__(self, prefetch: int, start: Sequence[Array], idle: bool = False):
        self.prefetch = prefetch
        self.restart(start)
        self._beginning = self._done[0] if idle else None

    def restart(self, start: Sequence[Array]) -> None:
        """All units so far have computed before these events."""
        self._done: list[tuple[list[Array], list[Array]]] = [(list(start), [])] * (
            self.prefetch + 1
        )  # computed, reduced
        self.last = list(start)
        self._arrived: list[Array] = []
        self._offloaded: list[list[Array]] = []
        self._reduced: list[Array] = []
        self._beginning = None

    def before_gather(self, prefetch: int = 0) -> list[Array]:
        """What the gather for a unit waits for, `prefetch` units before its turn."""
        computed, reduced = self._done[prefetch - self.prefetch - 1]
        return computed + reduced + self._arrived

    def begins(self, prefetch: int = 0) -> bool:
        """Whether such a gather waits for no unit, and so has none to compute beside it."""
        return self._done[prefetch - self.prefetch - 1] is self._beginning

    def arrived(self, there: list[Array]) -> None:
        """A gather has these events."""
        self._arrived = there

    def computed(self, values: Sequence[Array]) -> None:
        """The next unit has computed these. All count: one of them may be there before the unit starts."""
        self.last = events(values) or self.last
        self._done.append((self.last, []))

    def follows(self, values: Sequence[Array]) -> None:
        """These have waited for the last unit: later gathers wait for them in its place.

        Were two to wait for the same events, compilers would look at them in one kernel, and so after the later of all
        that either waits for.
        """
        if there := event(values):
            self.last, self._done[-1] = there, (there, self._done[-1][1])

    def offloaded(self, there: list[Array]) -> None:
        """What the next unit keeps in host memory has these events."""
        self._offloaded.append(there)

    def in_host_memory(self, ago: int) -> list[Array]:
        """What the last unit but `ago` keeps in host memory is there after these."""
        return self._offloaded[-1 - ago] if len(self._offloaded) > ago else []

    def reduced(self, there: list[Array]) -> None:
        """The reduction of the gradients of the last unit has these events."""
        computed, before = self._done[-1]
        self._done[-1] = computed, before + there
        self._reduced = there

    def before_reduction(self) -> list[Array]:
        """The events of the last reduction."""
        return self._reduced
