"""Leaves equal layers out of a traced loss, and estimates the memory of the step with all layers from what is left.

A segment of the loss can be left out if each of its outputs has the type of an input that nothing else reads, and if
it has no other input that nothing else reads. The input then takes the output's place. Of the segments of one kind, the
first and the last stay; a first one stands for the others. The trace is that of a forward and a backward pass:

    forward    layer ─► ... ─► later layer ─► ... ─►┐
    backward   layer ◄─ ... ◄─ later layer ◄─ ... ◄─┘

What the layer leaves behind in the forward pass is counted once for each layer that it stands for, from the time at
which the later layer runs until the layer itself runs backward. From then on, its gradients are counted so.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zerojax.analysis.jaxpr_counts import FlatJaxpr, Operation, Space, Value, flattened
from zerojax.analysis.liveness import GRADIENTS, Lifetimes, gradient_kinds
from zerojax.program import jaxprs
from zerojax.program.jaxprs import Equation, Jaxpr, Var
from zerojax.program.segmentation import Segment, TracedLoss
from zerojax.step.gradient import DeviceGradient, LossArgs
from zerojax.step.loss_traces import on_device
from zerojax.step.losses import Output
from zerojax.utils.typing import PRNGKey, PyTree

# Parameters of slices: a layer may take its own row of an array that all layers read, such as a mask of heads.
_SLICE_BOUNDS = frozenset({"start_indices", "limit_indices"})


class LossTrace(NamedTuple):
    """A loss traced on one device's rows. `output(flat)` makes an `Output` of its flat outputs."""

    traced: TracedLoss
    output: Callable[[list[PyTree]], Output]


class FewLayers(NamedTuple):
    """A step with some of its layers, which stand for others; `leaves` are positions among those of the whole model."""

    gradient: DeviceGradient
    leaves: tuple[int, ...]
    layers: tuple[RepeatedLayer, ...]


def trace_loss(gradient: DeviceGradient, args: LossArgs) -> LossTrace:
    """Traces the loss of one device.

    Args:
        gradient: of the step.
        args: avals of global arrays.
    """

    def trace(args: LossArgs) -> LossTrace:
        parts, _, output = gradient.parts_of_loss(gradient.with_own_keys(gradient.cast(args)))
        return LossTrace(parts.traced, output)

    return on_device(gradient, trace, args)


def few_layers(gradient: DeviceGradient, trace: LossTrace, num_ends: tuple[int, int]) -> FewLayers | None:
    """The step without layers that equal others, or None if there are none.

    `num_ends` are the numbers of first and of last layers of a kind that stay. Each should have as many neighbors of
    its kind as are fetched at a time.
    """
    # Find what can be left out, and what stands for it.
    num_first, num_last = num_ends
    traced = trace.traced
    replaced: dict[int, dict[Var, Var]] = {}
    standing: list[tuple[int, int, int]] = []
    last_read = _last_readers(traced)
    for members in _kinds(gradient, traced, last_read):
        free = {k: [v for v in traced.segments[k].inputs if last_read[v] == k] for k in members}
        left_out = [k for k in list(members)[num_first:-num_last] if set(free[k]) == set(members[k].values())]
        if left_out:
            replaced.update({k: members[k] for k in left_out})
            standing.append((list(members)[num_first - 1], list(members)[-num_last], len(left_out)))
    if not replaced:
        return None
    # Keep the leaves of the others.
    gone = {i for k in replaced for i in traced.segments[k].leaves}
    leaves = tuple(i for i in range(len(traced.unit_of)) if i not in gone)
    trainable = [i for i in leaves if gradient.trainable[i]]
    position = {leaf: k for k, leaf in enumerate(trainable)}
    layers = tuple(
        RepeatedLayer(first, later, others, tuple(position[i] for i in traced.segments[first].leaves if i in position))
        for first, later, others in standing
    )
    layout = gradient.layout
    layout = dataclasses.replace(
        layout, leaves=tuple(layout.leaves[i] for i in leaves), tree=jax.tree.structure([0] * len(leaves))
    )
    loss = _loss_of_few(trace, leaves, replaced)
    return FewLayers(dataclasses.replace(gradient, layout=layout, loss=loss), leaves, layers)


def _loss_of_few(trace: LossTrace, leaves: Sequence[int], replaced: dict[int, dict[Var, Var]]) -> Callable[..., Output]:
    """The loss as a function of the leaves that are left. `replaced`: see `_replacements`."""
    traced = trace.traced
    jaxpr = traced.closed.jaxpr

    def loss(params: PyTree, model_state: PyTree, batch: PyTree, key: PRNGKey) -> Output:
        scope = dict(zip(jaxpr.constvars, traced.closed.consts, strict=True))
        scope.update(zip(traced.data_vars, jax.tree.leaves((model_state, batch, key)), strict=True))
        scope.update(zip([traced.leaf_vars[i] for i in leaves], params, strict=True))
        for k, segment in enumerate(traced.segments):
            if k in replaced:
                scope.update({output: scope[v] for output, v in replaced[k].items()})
                continue
            with jax.named_scope(f"zerojax_segment_{k}_"):
                reads = [v for e in segment.equations for v in jaxprs.variables(e)]
                traced.bind_weights([v for v in reads if v in traced.weights], scope)
                _evaluate(segment.equations, scope)
        return trace.output(_outputs(jaxpr, scope))

    return loss


def _evaluate(equations: Sequence[Equation], scope: dict[Var, PyTree]) -> None:
    """Runs equations in order, and those of nested jits in their place, so that each has the name of its segment."""
    for equation in equations:
        if not jaxprs.is_call(equation):
            jaxprs.run_equations([equation], scope)
            continue
        inner, consts = jaxprs.called(equation)
        values = [scope[a] if jaxprs.is_var(a) else a.val for a in equation.invars]
        inside = dict(zip([*inner.constvars, *inner.invars], [*consts, *values], strict=True))
        _evaluate(inner.eqns, inside)
        scope.update(zip(equation.outvars, _outputs(inner, inside), strict=True))


def _outputs(jaxpr: Jaxpr, scope: dict[Var, PyTree]) -> list[PyTree]:
    """The outputs of a jaxpr whose equations have run."""
    return [scope[a] if jaxprs.is_var(a) else jnp.asarray(a.val, a.aval.dtype) for a in jaxpr.outvars]


def _last_readers(traced: TracedLoss) -> dict[Var, int]:
    """The position of the last segment that reads each value; results and arguments are read after all of them."""
    last_read: dict[Var, int] = {}
    for k, segment in enumerate(traced.segments):
        last_read.update(dict.fromkeys(segment.inputs, k))
    results = [a for a in traced.closed.jaxpr.outvars if jaxprs.is_var(a)]
    return last_read | dict.fromkeys([*results, *traced.data_vars], len(traced.segments))


def _kinds(gradient: DeviceGradient, traced: TracedLoss, last_read: dict[Var, int]) -> list[dict[int, dict[Var, Var]]]:
    """The segments that may be left out, by kind: the position of each, and what takes the place of its outputs."""
    users = Counter(i for segment in traced.segments for i in segment.leaves)
    kinds: dict[Hashable, dict[int, dict[Var, Var]]] = {}
    texts = _Texts()
    for k, segment in enumerate(traced.segments[:-1]):
        free = [v for v in segment.inputs if last_read[v] == k]
        replacements = _replacements(segment, free)
        if replacements is not None and segment.leaves and all(users[i] == 1 for i in segment.leaves):
            kinds.setdefault(_signature(gradient, traced, segment, texts), {})[k] = replacements
    return list(kinds.values())


def _replacements(segment: Segment, free: Sequence[Var]) -> dict[Var, Var] | None:
    """The input that can take the place of each output, or None if there is not exactly one for each."""
    if segment.views or not segment.outputs or any(e.effects for e in segment.equations):
        return None
    found: dict[Var, Var] = {}
    for output in segment.outputs:
        kind = lambda v: (v.aval.shape, v.aval.dtype)
        alike = [v for v in free if kind(v) == kind(output)]
        if len(alike) != 1 or alike[0] in found.values():
            return None
        found[output] = alike[0]
    return found


def _signature(gradient: DeviceGradient, traced: TracedLoss, segment: Segment, texts: _Texts) -> Hashable:
    """What two segments have in common if they compute the same but for constants, and place leaves alike."""
    leaves = gradient.layout.leaves
    number: dict[Var, Hashable] = {v: ("input", k, str(v.aval)) for k, v in enumerate(segment.inputs)}
    number.update({traced.leaf_vars[i]: ("leaf", k) for k, i in enumerate(segment.leaves)})

    def of_weight(v: Var) -> Hashable:
        if v in number or v not in traced.producer:
            return number.get(v)
        equation = traced.producer[v]
        return texts.of(equation), tuple(of_weight(w) for w in jaxprs.variables(equation))

    for v in {v for e in segment.equations for v in jaxprs.variables(e) if v in traced.weights}:
        number[v] = of_weight(v)
    lines = texts.lines(segment.equations, number)
    placed = tuple(
        (leaf.shape, str(leaf.compute_dtype), str(leaf.dims), leaf.trainable, str(leaf.dtype))
        for leaf in (leaves[i] for i in segment.leaves)
    )
    return placed, lines, tuple(number[v] for v in segment.outputs)


class _Texts:
    """Texts of equations without the names of their variables and without constants. Those of jaxprs are made once."""

    def __init__(self):
        self.known: dict[int, tuple[Jaxpr, int]] = {}

    def lines(self, equations: Sequence[Equation], number: dict[Var, Hashable]) -> Hashable:
        lines = []
        for k, equation in enumerate(equations):
            reads = tuple(number.get(a, "const") if jaxprs.is_var(a) else str(a.aval) for a in equation.invars)
            lines.append((self.of(equation), reads))
            number.update({v: (k, j) for j, v in enumerate(equation.outvars)})
        return tuple(lines)

    def of(self, equation: Equation) -> Hashable:
        avals = tuple(str(v.aval) for v in equation.outvars)
        params = tuple(
            (name, self._param(v)) for name, v in sorted(equation.params.items()) if name not in _SLICE_BOUNDS
        )
        return equation.primitive.name, avals, params

    def _param(self, value: Any) -> Hashable:
        jaxpr = getattr(value, "jaxpr", value)
        if hasattr(jaxpr, "eqns"):
            if id(jaxpr) not in self.known:
                number: dict[Var, Hashable] = {
                    v: ("input", k, str(v.aval)) for k, v in enumerate([*jaxpr.constvars, *jaxpr.invars])
                }
                self.known[id(jaxpr)] = jaxpr, hash(self.lines(jaxpr.eqns, number))
            return self.known[id(jaxpr)][1]
        if isinstance(value, tuple | list):
            return tuple(map(self._param, value))
        return "function" if callable(value) and not isinstance(value, type) else str(value)


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


def peak_of_all_layers(
    jaxpr: Jaxpr, gradients: Iterable[int], layers: Sequence[RepeatedLayer], space: Space
) -> Counter[str]:
    """As `liveness.peak`, of a step with all layers, of which the jaxpr has some.

    Raises:
        ValueError: if the layers are not found in the jaxpr, or do not run one after the other.
    """
    flat = flattened(jaxpr, space)
    return _RepeatedLifetimes(flat, space, [], gradient_kinds(flat, gradients), layers).peak()


class _RepeatedLifetimes(Lifetimes):
    """Lifetimes in a body in which some layers stand for others, or in one with a loop over such a body."""

    def __init__(
        self,
        flat: FlatJaxpr,
        space: Space,
        owned: Iterable[Value],
        kinds: dict[Value, str],
        layers: Sequence[RepeatedLayer],
    ):
        super().__init__(flat, space, owned, kinds)
        self.layers, self.accumulators = layers, list[Value]()
        tagged = [_segment_of(operation.equation) for operation in flat.operations]
        self.end = max((k for k, segment in enumerate(tagged) if segment >= 0), default=0)
        self.segments = segments_of(flat)

    def moments(self) -> Iterator[tuple[int, Counter[str]]]:
        looped = [k for k, operation in enumerate(self.flat.operations) if _loops_over_segments(operation)]
        if looped:
            others = [self._after_loop(looped[-1], layer) for layer in self.layers]
        else:
            others = [self._in_passes(layer) for layer in self.layers]
        repeated = [(layer.others, i) for layer in self.layers for i in layer.gradients if self.accumulators]
        accumulated = sum(num_others * self.accumulators[i].num_bytes for num_others, i in repeated)
        for k, during in super().moments():
            during[GRADIENTS] += accumulated
            for held in others:
                during.update(held(k))
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

    def _after_loop(self, loop: int, layer: RepeatedLayer) -> Callable[[int], Counter[str]]:
        """What the other layers hold at a position, in a body with a loop over microbatches."""
        results = self.flat.operations[loop].results
        gradients = Counter({GRADIENTS: layer.others * sum(results[i].num_bytes for i in layer.gradients)})
        return lambda k: gradients if k > loop else Counter()

    def _in_passes(self, layer: RepeatedLayer) -> Callable[[int], Counter[str]]:
        """What the other layers hold at a position, in a body with a forward and a backward pass."""
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
        return lambda k: Counter() if k < forward else saved if k < backward else gradients

    def _first(self, segment: int, start: int) -> int:
        """The first operation of a segment from a position on."""
        if segment not in self.segments[start:]:
            raise ValueError(f"liveness: segment {segment} of the loss does not run where it is expected")
        return self.segments.index(segment, start)


def _segment_of(equation: Equation) -> int:
    """The number of the segment in whose name scope an equation was traced, or -1 for all others."""
    found = re.search(r"zerojax_segment_(\d+)_", str(equation.source_info.name_stack))
    return int(found.group(1)) if found else -1


def segments_of(flat: FlatJaxpr) -> list[int]:
    """The segment of each operation; one without a name belongs to that of the operation before it."""
    tagged = (_segment_of(operation.equation) for operation in flat.operations)
    return list(itertools.accumulate(tagged, lambda last, own: own if own >= 0 else last))


def _loops_over_segments(operation: Operation) -> bool:
    """Whether an operation is a loop whose body has several segments."""
    if operation.name != "scan" or _segment_of(operation.equation) >= 0:
        return False
    body = jaxprs.scan_params(operation.equation).body
    return len({_segment_of(e) for e in body.jaxpr.eqns} - {-1}) > 1
