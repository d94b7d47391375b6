"""Leaves equal layers out of a traced loss, so that a step that has the same memory is traced in less time.

A segment of the loss can be left out if each of its outputs has the type of an input that nothing else reads, and if
it has no other input that nothing else reads. The input then takes the output's place. Of the segments of one kind, the
first and the last stay; a first one stands for the others.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zerojax.analysis.repeated_layers import RepeatedLayer, segment_name
from zerojax.program import jaxprs
from zerojax.program.segmentation import Segment, TracedLoss
from zerojax.step.batch import batch_specs, cast_batch
from zerojax.step.config import leaf_specs, shard_map_over_data
from zerojax.step.gradient import DeviceGradient
from zerojax.step.models import Output
from zerojax.utils.typing import PyTree

# Parameters of slices: a layer may take its own row of an array that all layers read, such as a mask of heads.
_SLICE_BOUNDS = frozenset({"start_indices", "limit_indices"})


class LossTrace(NamedTuple):
    """A loss traced on one device's rows.

    Attributes:
        traced: the traced loss, cut into segments.
        output: `output(flat)` makes an `Output` of the flat outputs.
    """

    traced: TracedLoss
    output: Callable[[list[Any]], Output]


class FewLayers(NamedTuple):
    """A step with some of its layers.

    Attributes:
        gradient: computes the gradients of the leaves that are left.
        leaves: their positions among the leaves of the whole model.
        layers: the layers that stand for others.
    """

    gradient: DeviceGradient
    leaves: tuple[int, ...]
    layers: tuple[RepeatedLayer, ...]


def trace_loss(gradient: DeviceGradient, args: Any) -> LossTrace:
    """Traces the loss of one device.

    Args:
        gradient: of the step.
        args: avals of global arrays: (parameter leaves, model state, batch, key).
    """
    config, definition = gradient.config, gradient.definition
    replicated: Any = jax.sharding.PartitionSpec()
    specs = leaf_specs(config, definition.leaves, config.stage.shards_params)
    found: list[LossTrace] = []

    def find(shards: Any, model_state: PyTree, batch: PyTree, key: Any) -> Any:
        batch = cast_batch(config.precision, batch)
        shards = definition.for_compute(shards)
        parts, _, output = gradient.parts_of_loss(shards, gradient.fold(model_state, 0), batch, key)
        found.append(LossTrace(parts.traced, output))
        return jnp.int32(0)

    in_specs = specs, replicated, batch_specs(config.axes, args[2]), replicated
    jax.eval_shape(shard_map_over_data(config, find, in_specs, replicated), *args)
    return found[0]


def few_layers(gradient: DeviceGradient, trace: LossTrace, num_ends: tuple[int, int]) -> FewLayers | None:
    """Returns the step without layers that equal others, or None if there are none.

    Args:
        gradient: of the step.
        trace: of its loss.
        num_ends: the number of first layers of a kind that stay, and the number of last layers. Each should have as
            many neighbors of its kind as are fetched at a time.
    """
    num_first, num_last = num_ends
    traced = trace.traced
    replaced: dict[int, dict[Any, Any]] = {}
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
    gone = {i for k in replaced for i in traced.segments[k].leaves}
    leaves = tuple(i for i in range(traced.num_leaves) if i not in gone)
    trainable = [i for i in leaves if gradient.trainable[i]]
    position = {leaf: k for k, leaf in enumerate(trainable)}
    layers = tuple(
        RepeatedLayer(first, later, others, tuple(position[i] for i in traced.segments[first].leaves if i in position))
        for first, later, others in standing
    )
    definition = gradient.definition
    definition = dataclasses.replace(
        definition, leaves=tuple(definition.leaves[i] for i in leaves), tree=jax.tree.structure([0] * len(leaves))
    )
    loss = _loss_of_few(trace, leaves, replaced)
    return FewLayers(dataclasses.replace(gradient, definition=definition, loss=loss), leaves, layers)


def _loss_of_few(trace: LossTrace, leaves: Sequence[int], replaced: dict[int, dict[Any, Any]]) -> Any:
    """The loss as a function of the leaves that are left. `replaced`: see `_replacements`."""
    traced = trace.traced
    jaxpr = traced.closed.jaxpr

    def loss(params: PyTree, model_state: PyTree, batch: PyTree, key: Any) -> Output:
        scope = dict(zip(jaxpr.constvars, traced.closed.consts, strict=True))
        scope.update(zip(traced.data_vars, jax.tree.leaves((model_state, batch, key)), strict=True))
        scope.update(zip([traced.leaf_vars[i] for i in leaves], params, strict=True))
        for k, segment in enumerate(traced.segments):
            if k in replaced:
                scope.update({output: scope[v] for output, v in replaced[k].items()})
                continue
            with jax.named_scope(segment_name(k)):
                reads = [v for e in segment.equations for v in jaxprs.variables(e)]
                traced.bind_weights([v for v in reads if v in traced.weights], scope)
                _evaluate(segment.equations, scope)
        outputs = [scope[a] if jaxprs.is_var(a) else jnp.asarray(a.val, a.aval.dtype) for a in jaxpr.outvars]
        return trace.output(outputs)

    return loss


def _evaluate(equations: Sequence[Any], scope: dict[Any, Any]) -> None:
    """Runs equations in order, and those of nested jits in their place, so that each has the name of its segment."""
    for equation in equations:
        if not jaxprs.is_call(equation):
            jaxprs.run_equations([equation], scope)
            continue
        inner, consts = jaxprs.called(equation)
        values = [scope[a] if jaxprs.is_var(a) else a.val for a in equation.invars]
        inside = dict(zip([*inner.constvars, *inner.invars], [*consts, *values], strict=True))
        _evaluate(inner.eqns, inside)
        results = [inside[a] if jaxprs.is_var(a) else jnp.asarray(a.val, a.aval.dtype) for a in inner.outvars]
        scope.update(zip(equation.outvars, results, strict=True))


def _last_readers(traced: TracedLoss) -> dict[Any, int]:
    """The position of the last segment that reads each value; results and arguments are read after all of them."""
    last_read: dict[Any, int] = {}
    for k, segment in enumerate(traced.segments):
        last_read.update(dict.fromkeys(segment.inputs, k))
    results = [a for a in traced.closed.jaxpr.outvars if jaxprs.is_var(a)]
    return last_read | dict.fromkeys([*results, *traced.data_vars], len(traced.segments))


def _kinds(gradient: DeviceGradient, traced: TracedLoss, last_read: dict[Any, int]) -> list[dict[int, dict[Any, Any]]]:
    """The segments that may be left out, by kind: the position of each, and what takes the place of its outputs."""
    users = Counter(i for segment in traced.segments for i in segment.leaves)
    kinds: dict[Any, dict[int, dict[Any, Any]]] = {}
    texts = _Texts()
    for k, segment in enumerate(traced.segments[:-1]):
        free = [v for v in segment.inputs if last_read[v] == k]
        replacements = _replacements(segment, free)
        if replacements is not None and segment.leaves and all(users[i] == 1 for i in segment.leaves):
            kinds.setdefault(_signature(gradient, traced, segment, texts), {})[k] = replacements
    return list(kinds.values())


def _replacements(segment: Segment, free: Sequence[Any]) -> dict[Any, Any] | None:
    """The input that can take the place of each output, or None if there is not exactly one for each."""
    if segment.views or not segment.outputs or any(e.effects for e in segment.equations):
        return None
    found: dict[Any, Any] = {}
    for output in segment.outputs:
        alike = [v for v in free if (v.aval.shape, v.aval.dtype) == (output.aval.shape, output.aval.dtype)]
        if len(alike) != 1 or alike[0] in found.values():
            return None
        found[output] = alike[0]
    return found


def _signature(gradient: DeviceGradient, traced: TracedLoss, segment: Segment, texts: _Texts) -> Any:
    """What two segments have in common if they compute the same but for constants, and place leaves alike."""
    leaves = gradient.definition.leaves
    number: dict[Any, Any] = {v: ("input", k, str(v.aval)) for k, v in enumerate(segment.inputs)}
    number.update({traced.leaf_vars[i]: ("leaf", k) for k, i in enumerate(segment.leaves)})

    def of_weight(v: Any) -> Any:
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
        self.known: dict[int, tuple[Any, Any]] = {}

    def lines(self, equations: Sequence[Any], number: dict[Any, Any]) -> Any:
        lines = []
        for k, equation in enumerate(equations):
            reads = tuple(number.get(a, "const") if jaxprs.is_var(a) else str(a.aval) for a in equation.invars)
            lines.append((self.of(equation), reads))
            number.update({v: (k, j) for j, v in enumerate(equation.outvars)})
        return tuple(lines)

    def of(self, equation: Any) -> Any:
        avals = tuple(str(v.aval) for v in equation.outvars)
        params = tuple(
            (name, self._param(v)) for name, v in sorted(equation.params.items()) if name not in _SLICE_BOUNDS
        )
        return equation.primitive.name, avals, params

    def _param(self, value: Any) -> Any:
        jaxpr = getattr(value, "jaxpr", value)
        if hasattr(jaxpr, "eqns"):
            if id(jaxpr) not in self.known:
                number = {v: ("input", k, str(v.aval)) for k, v in enumerate([*jaxpr.constvars, *jaxpr.invars])}
                self.known[id(jaxpr)] = jaxpr, hash(self.lines(jaxpr.eqns, number))
            return self.known[id(jaxpr)][1]
        if isinstance(value, tuple | list):
            return tuple(map(self._param, value))
        return "function" if callable(value) and not isinstance(value, type) else str(value)
