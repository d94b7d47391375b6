"""Estimates the peak memory of a deep model's step from the trace of a step with only some of its equal layers.

In such a trace, one layer stands for several, and at least one more of its kind follows it. The trace is that of a
forward and a backward pass, in one body, and its equations carry the names that `segment_name` gives:

    forward    layer ─► ... ─► later layer ─► ... ─►┐
    backward   layer ◄─ ... ◄─ later layer ◄─ ... ◄─┘

What the layer leaves behind in the forward pass is counted once for each layer that it stands for, from the time at
which the later layer runs until the layer itself runs backward. From then on, its gradients are counted so.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from zerojax.analysis import jaxpr_stats
from zerojax.analysis.jaxpr_stats import FlatJaxpr, Operation, Value
from zerojax.analysis.liveness import GRADIENTS, Lifetimes, Peak
from zerojax.program import jaxprs

_SEGMENT = re.compile(r"zerojax_segment_(\d+)_")


class RepeatedLayer(NamedTuple):
    """A layer of a trace that stands for others, which the trace does not have.

    Attributes:
        segment: its number in the trace.
        later: the number of the first layer of its kind after it.
        others: the number of layers that it stands for, without itself.
        gradients: the positions of the gradients of its weights among the outputs of the trace.
    """

    segment: int
    later: int
    others: int
    gradients: tuple[int, ...]


def segment_name(number: int) -> str:
    """The name scope in which the equations of a segment of the loss are traced."""
    return f"zerojax_segment_{number}_"


def peak_of_all_layers(
    jaxpr: Any, gradients: Sequence[int], layers: Sequence[RepeatedLayer], space: Any = jax.memory.Space.Device
) -> Peak:
    """Returns the peak memory of a step with all layers, without its inputs.

    Args:
        jaxpr: the jaxpr of the step with some of the layers.
        gradients: the positions of the outputs that are gradients.
        layers: the layers that stand for others.
        space: the memory space that is counted.

    Raises:
        ValueError: if the layers are not found in the jaxpr, or do not run one after the other.
    """
    flat = jaxpr_stats.flattened(jaxpr, space)
    kinds = {flat.outputs[i]: GRADIENTS for i in gradients}
    return _RepeatedLifetimes(flat, space, [], kinds, layers).peak()


class _Others(NamedTuple):
    """What the layers that are not in the trace hold: from position `forward` on, and from position `backward` on."""

    forward: int
    backward: int
    saved: Counter[str]
    gradients: Counter[str]

    def held(self, k: int) -> Counter[str]:
        if k < self.forward:
            return Counter()
        return self.saved if k < self.backward else self.gradients


class _RepeatedLifetimes(Lifetimes):
    """Lifetimes in a body in which some layers stand for others, or in one with a loop over such a body."""

    def __init__(
        self,
        flat: FlatJaxpr,
        space: Any,
        owned: Iterable[Value],
        kinds: dict[Any, str],
        layers: Sequence[RepeatedLayer],
    ):
        super().__init__(flat, space, owned, kinds)
        self.layers, self.accumulators = layers, list[Value]()
        tagged = [segment_of(operation.equation, -1) for operation in flat.operations]
        self.end = max((k for k, segment in enumerate(tagged) if segment >= 0), default=0)
        # An operation without a name belongs to the segment of the operation before it.
        self.segments = list(itertools.accumulate(tagged, lambda last, own: own if own >= 0 else last))

    def moments(self) -> Iterator[tuple[int, Counter[str]]]:
        looped = [k for k, operation in enumerate(self.flat.operations) if _loops_over_segments(operation)]
        if looped:
            others = [self._after_loop(looped[-1], layer) for layer in self.layers]
        else:
            others = [self._in_passes(layer) for layer in self.layers]
        accumulated = sum(
            layer.others * self.accumulators[i].num_bytes
            for layer in self.layers
            for i in layer.gradients
            if self.accumulators
        )
        for k, during in super().moments():
            during[GRADIENTS] += accumulated
            for each in others:
                during.update(each.held(k))
            yield k, during

    def _body(self, loop: Operation, flat: FlatJaxpr) -> Lifetimes:
        body = super()._body(loop, flat)
        if not _loops_over_segments(loop):
            return body
        num_consts, num_carry, *_ = jaxprs.scan_params(loop.equation)
        owned = flat.inputs[num_consts : num_consts + num_carry]
        repeated = _RepeatedLifetimes(flat, self.space, owned, body.kinds, self.layers)
        repeated.accumulators = owned  # the gradients come first in the carry of a loop over microbatches
        return repeated

    def _after_loop(self, k: int, layer: RepeatedLayer) -> _Others:
        results = self.flat.operations[k].results
        num_bytes = layer.others * sum(results[i].num_bytes for i in layer.gradients)
        return _Others(k + 1, k + 1, Counter(), Counter({GRADIENTS: num_bytes}))

    def _in_passes(self, layer: RepeatedLayer) -> _Others:
        """What the other layers hold in a body with a forward and a backward pass."""
        turn = self._first(max(self.segments), 0)
        forward = self._first(layer.later, 0)
        backward = self._first(layer.segment, self._first(layer.later, turn))
        saved, gradients = Counter[str](), Counter[str]()
        for value, k in self.born.items():
            segment = self.segments[k] if k >= 0 else None
            if segment == layer.segment and k < forward and self.last[value] >= turn:
                saved[self._kind(value)] += layer.others * value.num_bytes
            # The first layer of a model keeps its gradients as they are computed: nothing waits for them. The later
            # layer converts them as most layers do.
            if segment == layer.later and k >= turn and self.last[value] > self.end:
                gradients[self._kind(value)] += layer.others * value.num_bytes
        return _Others(forward, backward, saved, gradients)

    def _first(self, segment: int, start: int) -> int:
        for k in range(start, len(self.segments)):
            if self.segments[k] == segment:
                return k
        raise ValueError(f"liveness: segment {segment} of the loss does not run where it is expected")


def segment_of(equation: Any, default: int) -> int:
    """The number of the segment in whose name scope an equation was traced, or `default` for all others."""
    found = _SEGMENT.search(str(equation.source_info.name_stack))
    return int(found.group(1)) if found else default


def _loops_over_segments(operation: Operation) -> bool:
    """Whether an operation is a loop whose body has several segments."""
    if operation.name != "scan" or segment_of(operation.equation, -1) >= 0:
        return False
    body = jaxprs.scan_params(operation.equation).body
    return len({segment_of(e, -1) for e in body.jaxpr.eqns} - {-1}) > 1
