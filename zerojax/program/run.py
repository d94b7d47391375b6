"""Runs a traced loss part by part, forward and then backward, on one device's shards.

    forward:   for each part:            gather ► compute ► drop
    backward:  for each part, reversed:  gather ► compute ► reduce

A part is a unit's segment of the loss, see `part`. `Part.gather` gathers its weights; `straight` has the plainest kind.

Everything here runs inside `shard_map`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import lax

from zerojax.comm.schedule import Schedule
from zerojax.comm.stage_collectives import StageCollectives
from zerojax.program import gradient_paths, jaxprs
from zerojax.program.equal_layers import Stack
from zerojax.program.jaxprs import Var
from zerojax.program.layer_stack import LayerStack
from zerojax.program.part import GradientSink, Part, PlannedPart, Weights
from zerojax.program.remat import NO_REMAT, RematRules
from zerojax.program.segmentation import Segment, TracedLoss
from zerojax.program.straight import Straight
from zerojax.program.table_lookup import TableLookup
from zerojax.program.tiles import Tiled
from zerojax.utils.flags import select
from zerojax.utils.typing import Array

# Of the bytes of the largest unit. Units with less are gathered together with those after them. This is a heuristic: in
# the models of Tunix, Transformers and Flax that it was chosen for, layers hold at least 8% of the largest unit, which
# is the embedding, and norms outside of layers less than 0.1%.
SMALL_UNIT = 1 / 32


@dataclasses.dataclass(frozen=True)
class PartsOfLoss:
    """A loss that is cut into parts."""

    traced: TracedLoss  # the loss `fn(*leaves, *data) -> [scalar to differentiate, *others]`
    collectives: StageCollectives  # gathers and reduces as the stage does
    trainable: Sequence[bool]  # which leaves get a gradient
    rules: RematRules  # which activations of a unit are saved for its backward pass
    prefetch: int  # number of units that are gathered ahead of the unit that computes
    layers: float  # the least number of layers in an iteration of a loop; infinity for no loops
    parts: Sequence[Part]  # of the loss, in program order; see `cut`
    # Stacks of leaves, by layer, which are the last leaves of the loss. It does not read the leaves in them elsewhere.
    stacks: Sequence[Stack] = ()
    tiled: Sequence[Tiled] = ()  # what is computed in tiles

    def evaluate(self, weights: Weights, data: Sequence[Array], start: Sequence[Array]) -> list[Array]:
        """The outputs of the loss. `start`: see `value_and_grad`."""
        schedule, env, weights = self._schedule(start), self._start(data), weights.with_stacks(self.stacks)
        for part, following in zip(self.parts, [*self.parts[1:], None], strict=False):
            weights, inputs = weights.next_after(following, [env[v] for v in part.segment.inputs])
            outputs = part.evaluate(weights, inputs, schedule)
            env.update(zip(part.segment.outputs, outputs, strict=True))
        return self._results(env)

    def value_and_grad(
        self,
        weights: Weights,
        data: Sequence[Array],
        seed: Callable[[list[Array]], tuple[Array, Array]],
        start: Sequence[Array],
        sink: GradientSink,
    ) -> tuple[list[Array], list[Array | None], Array]:
        """Computes the loss and its gradients.

        Args:
            weights: the leaves, in the compute dtype.
            data: all other arguments of the loss.
            seed: `seed(outputs)` returns the cotangent of the first output, and the weight of all gradients.
            start: events before which nothing is gathered (in a loop over microbatches, an event of the iteration).
            sink: where gradients go.

        Returns:
            (the outputs, the reduced gradient of each trainable leaf and None for the others, the weight of `seed`).
        """
        schedule, env, weights = self._schedule(start), self._start(data), weights.with_stacks(self.stacks)

        # Forward: gather ► compute ► drop.
        done = []
        for part, planned, following in zip(self.parts, self._planned(), [*self.parts[1:], None], strict=False):
            weights, inputs = weights.next_after(following, [env[v] for v in part.segment.inputs])
            if planned is None:  # no cotangent reaches it
                outputs = part.evaluate(weights, inputs, schedule)
            else:
                outputs, saved = planned.forward(weights, inputs, schedule)
                done.append((planned, saved))
            env.update(zip(part.segment.outputs, outputs, strict=True))
        results = self._results(env)

        # Backward: gather ► compute ► reduce.
        seed_value, weight = seed(results)
        loss = self.traced.closed.jaxpr.outvars[0]
        cotangents = {loss: jnp.asarray(seed_value, loss.aval.dtype)} if jaxprs.is_var(loss) else {}
        sink.start([planned for planned, _ in done], weights, weight)
        _restore_next(done, [])
        while done:
            part, saved = done.pop()
            given = [_take(cotangents, v) for v in part.outputs]
            given = _restore_next(done, sink.before(part, given))
            weights, given = weights.next_after(done[-1][0].part if done else None, given)
            grads, data_grads = part.backward(weights, saved, given, schedule, sink)
            sink.add(part, grads)
            for v, grad in zip(part.inputs, data_grads, strict=True):
                cotangents[v] = cotangents[v] + grad if v in cotangents else grad

        # The gradients of all trained leaves, also of those that the loss does not use.
        trained = select(range(len(self.trainable)), self.trainable)
        by_leaf = sink.finish({i: self._zeros(i) for i in trained if not sink.has(i)})
        for stack, members in self._members.items():
            if stack in by_leaf:
                by_leaf |= {leaf: _layer(by_leaf[stack], i) for i, leaf in enumerate(members)}
        return results, [by_leaf.get(i) for i in range(self._num_leaves)], weight

    def place_of(self, leaf: int) -> int:
        """The position of a leaf, or of the stack that it is in."""
        return next((stack for stack, members in self._members.items() if leaf in members), leaf)

    @property
    def _num_leaves(self) -> int:
        """The number of leaves, without stacks."""
        return len(self.trainable) - len(self.stacks)

    @property
    def _members(self) -> dict[int, Stack]:
        """The leaves in each stack, by the position of the stack among the leaves."""
        return dict(enumerate(self.stacks, self._num_leaves))

    @property
    def summed(self) -> frozenset[int]:
        """The leaves whose gradients are summed over the replica axes already, if the collectives do so."""
        if not self.collectives.sums_replicas:
            return frozenset()
        sliced = [leaf for part in self.parts if isinstance(part, LayerStack) for leaf in part.summed]
        return frozenset(i for leaf in sliced for i in self._members.get(leaf, (leaf,)))

    def _schedule(self, start: Sequence[Array]) -> Schedule:
        least_bytes = SMALL_UNIT * max((part.num_bytes for part in self.parts), default=0)
        return Schedule(self.prefetch, start, idle=True, layers=self.layers, least_bytes=least_bytes)

    def _start(self, data: Sequence[Array]) -> dict[Var, Array]:
        """The values of the loss that are there before its first equation."""
        jaxpr = self.traced.closed.jaxpr
        env = dict(zip(jaxpr.constvars, self.traced.closed.consts, strict=True))
        return env | dict(zip(self.traced.data_vars, data, strict=True))

    def _results(self, env: dict[Var, Array]) -> list[Array]:
        atoms = self.traced.closed.jaxpr.outvars
        return [env[a] if jaxprs.is_var(a) else jnp.asarray(a.val, a.aval.dtype) for a in atoms]

    def _zeros(self, leaf: int) -> Array:
        """The gradient of a leaf that the loss does not use."""
        aval = self.traced.leaf_vars[leaf].aval
        shape = self.collectives.shard_shape(aval.shape, self.collectives.dims[leaf])
        return jnp.zeros(shape, self.collectives.grad_dtype(aval.dtype))

    def _planned(self) -> list[PlannedPart | None]:
        """The parts with their backward passes; None for those that no cotangent reaches."""
        jaxpr = self.traced.closed.jaxpr
        active = gradient_paths.with_tangents(jaxpr.eqns, select(self.traced.leaf_vars, self.trainable))
        reached = {v for v in jaxpr.outvars[:1] if jaxprs.is_var(v)} & active
        planned: list[PlannedPart | None] = []
        names: dict[str, set[str]] = {}
        backward_is_next = True  # of the last unit, and of the parts after it

        # From the last part to the first, as cotangents flow.
        for part in reversed(self.parts):
            outputs = [v for v in part.segment.outputs if v in reached]
            each = part.plan_backward(outputs, active, backward_is_next) if outputs else None
            if each is not None:
                reached.update(each.inputs)
                names.setdefault(self.traced.unit(part.segment), set()).update(each.names)
            planned.append(each)
            backward_is_next = backward_is_next and not part.segment.leaves
        self.rules.check_names(names)
        return planned[::-1]


def cut(
    traced: TracedLoss,
    collectives: StageCollectives,
    trainable: Sequence[bool],
    rules: RematRules,
    prefetch: int,
    layers: float = 1,
    stacks: Sequence[Stack] = (),
    tiled: Sequence[Tiled] = (),
) -> PartsOfLoss:
    """Makes a part of each segment of a traced loss. See `PartsOfLoss` for the arguments."""
    parts: list[Part] = [
        _kind(segment)(traced, segment, collectives, rules[traced.unit(segment)] if segment.leaves else NO_REMAT)
        for segment in traced.segments
    ]
    return PartsOfLoss(traced, collectives, trainable, rules, prefetch, layers, parts, stacks, tiled)


def _kind(segment: Segment) -> type[Straight | LayerStack | TableLookup]:
    """The class that runs a segment."""
    if segment.lookup:
        return TableLookup
    return LayerStack if segment.views else Straight


def _layer(stacked: Array, i: int) -> Array:
    """A layer of a stack. Compilers do not see which one, and so make one kernel for all layers."""
    return lax.dynamic_index_in_dim(stacked, lax.optimization_barrier(jnp.int32(i)), keepdims=False)


def _take(cotangents: dict[Var, Array], v: Var) -> Array:
    """The sum of the cotangents of a value, which nothing is added to any more."""
    return cotangents.pop(v) if v in cotangents else jnp.zeros(v.aval.shape, v.aval.dtype)


def _restore_next(done: list[tuple[PlannedPart, object]], cotangents: list[Array]) -> list[Array]:
    """Fetches the next part's saved values from host memory while the part with these cotangents runs."""
    if done:
        part, saved = done.pop()
        saved, cotangents = part.restore(saved, cotangents)
        done.append((part, saved))
    return cotangents
