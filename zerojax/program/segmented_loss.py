"""Runs a traced loss unit by unit, forward and then backward, on one device's shards.

    forward:   for each segment:            gather ► compute ► drop
    backward:  for each segment, reversed:  gather ► compute ► reduce-scatter

Everything here runs inside `shard_map`.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from zerojax.comm.dependencies import after, floating_after
from zerojax.comm.schedule import Schedule
from zerojax.comm.stage_collectives import StageCollectives, accumulate
from zerojax.offload import host_arrays
from zerojax.program import gradient_paths, jaxprs
from zerojax.program.layer_stack import LayerStack
from zerojax.program.regather import select
from zerojax.program.remat import NO_REMAT, RematRules
from zerojax.program.segmentation import Segment, TracedLoss
from zerojax.program.segments import StraightSegment
from zerojax.program.table_lookup import TableLookup
from zerojax.utils.typing import Array

# Of the bytes of the largest unit. Units with less are gathered together with those after them. This is a heuristic: in
# the models of Tunix, Transformers and Flax that it was chosen for, layers hold at least 8% of the largest unit, which
# is the embedding, and norms outside of layers less than 0.1%.
SMALL_UNIT = 1 / 32


class SegmentedLoss:
    """A loss that is cut into units: the forward pass alone, or the forward and backward pass.

    Args:
        traced: the loss `fn(*leaves, *data) -> [scalar to differentiate, *others]`.
        collectives: gathers and reduces as the stage does.
        trainable: which leaves get a gradient.
        rules: which activations of a unit are saved for its backward pass.
        prefetch: number of units that are gathered ahead of the unit that computes.
    """

    def __init__(
        self,
        traced: TracedLoss,
        collectives: StageCollectives,
        trainable: Sequence[bool],
        rules: RematRules,
        prefetch: int,
    ):
        self.traced, self.collectives, self.trainable = traced, collectives, trainable
        self.rules, self.prefetch = rules, prefetch
        remat_of = lambda s: rules[self._unit(s)] if s.leaves else NO_REMAT
        self.parts = [_kind(s)(traced, s, collectives, remat_of(s)) for s in traced.segments]
        self.least_bytes = SMALL_UNIT * max((part.num_bytes for part in self.parts), default=0)

    @property
    def summed(self) -> frozenset[int]:
        """The leaves whose gradients are summed over the replica axes already, if the collectives do so."""
        stacks = [part.summed for part in self.parts if isinstance(part, LayerStack)]
        return frozenset().union(*stacks) if self.collectives.sums_replicas else frozenset()

    def _schedule(self, start: list[Array]) -> Schedule:
        return Schedule(self.prefetch, start, idle=True, least_bytes=self.least_bytes)

    def _unit(self, segment: Segment) -> str:
        """The unit whose weights a segment uses (the first, if one equation uses several), or ''."""
        return self.traced.unit_of[segment.leaves[0]] if segment.leaves else ""

    def _start(self, data: Sequence[Array]) -> dict[Any, Array]:
        jaxpr = self.traced.closed.jaxpr
        env = dict(zip(jaxpr.constvars, self.traced.closed.consts, strict=True))
        env.update(zip(self.traced.data_vars, data, strict=True))
        return env

    def _finish(self, env: dict[Any, Array]) -> list[Array]:
        atoms = self.traced.closed.jaxpr.outvars
        return [env[a] if jaxprs.is_var(a) else jnp.asarray(a.val, a.aval.dtype) for a in atoms]

    def _forward(self, shards: Sequence[Array], data: Sequence[Array], schedule: Schedule, save: bool) -> Any:
        """(outputs of the loss, the values that each segment saves for its backward pass)."""
        env, saved, by_leaf = self._start(data), [], dict(enumerate(shards))
        for part in self.parts:
            inputs, values = [env[v] for v in part.segment.inputs], None
            if save and part.differentiable_outputs:
                out, values = part.forward(by_leaf, inputs, schedule)
            else:
                out = part.evaluate(by_leaf, inputs, schedule)
            env.update(zip(part.segment.outputs, out, strict=True))
            saved.append(values)
        return self._finish(env), saved

    def evaluate(self, shards: Sequence[Array], data: Sequence[Array], start: list[Array]) -> list[Array]:
        """The outputs of the loss. `start`: see `value_and_grad`."""
        return self._forward(shards, data, self._schedule(start), save=False)[0]

    def value_and_grad(
        self, shards: Sequence[Array], data: Sequence[Array], seed: Any, start: list[Array]
    ) -> tuple[list[Array], list[Array | None]]:
        """The outputs of the loss and the reduced gradient of each trainable leaf (None for the others).

        The gradients of leaves in host memory are the sums there, see `HostGradients`.

        Args:
            shards: parameter leaves as the stage keeps them, in the compute dtype.
            data: all other arguments of the loss.
            seed: `seed(outputs)` is the cotangent of the first output.
            start: events before which nothing is gathered (in a loop over microbatches, an event of the iteration).
        """
        self._plan()
        schedule = self._schedule(start)
        out, saved = self._forward(shards, data, schedule, save=True)
        by_leaf = dict(enumerate(shards))
        loss_var = self.traced.closed.jaxpr.outvars[0]
        cotangent = jnp.asarray(seed(out), loss_var.aval.dtype)
        cotangents: dict[Any, Array] = {loss_var: cotangent} if jaxprs.is_var(loss_var) else {}
        grads: dict[int, Array] = {}
        pending = [pair for pair in zip(self.parts, saved, strict=True) if pair[0].differentiable_outputs]
        to_come = collections.Counter(i for part, _ in pending for i in part.segment.leaves)
        arrived: list[list[Array]] = [[], []]  # events of gradients that have arrived in host memory, by unit
        _restore_next(pending, [])
        while pending:
            part, values = pending.pop()
            given = [cotangents.pop(v) if v in cotangents else jnp.zeros(v.aval.shape, v.aval.dtype)
                     for v in part.differentiable_outputs]  # fmt: skip
            # What is still to be moved before a loop would wait for its end.
            given = floating_after(given, arrived[-1 if isinstance(part, LayerStack) else -2])
            given = _restore_next(pending, given)
            leaf_grads, data_grads = part.backward(by_leaf, values, given, schedule)
            for i, grad in leaf_grads.items():
                accumulate(grads, i, grad)
            to_come.subtract(part.segment.leaves)
            moved = self._move(grads, [i for i in part.segment.leaves if not to_come[i]], shards)
            arrived += [moved] if moved else []
            for v, grad in zip(part.wanted_inputs, data_grads, strict=True):
                cotangents[v] = cotangents[v] + grad if v in cotangents else grad
        own = {i: self._leaf_grad(i, grads) for i in range(len(shards)) if not self._has_moved(i)}
        arrived.append(self._move(own, list(own), shards))
        host = self.collectives.host_gradients
        if host is not None and host.squared_norms:  # what waits for a norm, as the update does, waits for the copies
            i, norm = next(iter(host.squared_norms.items()))
            (host.squared_norms[i],) = after([norm], [event for events in arrived[-3:] for event in events])
        return out, [own[i] if i in own or host is None else host.totals[i] for i in range(len(shards))]

    def _has_moved(self, i: int) -> bool:
        """Whether the gradient of a leaf is in host memory."""
        host = self.collectives.host_gradients
        return host is not None and i in host.squared_norms

    def _move(self, grads: dict[int, Any], leaves: Sequence[int], shards: Sequence[Array]) -> list[Array]:
        """Moves the complete gradients of leaves that are in host memory there: events of when the device is done."""
        host = self.collectives.host_gradients
        if host is None:
            return []
        complete = [i for i in leaves if grads.get(i) is not None and host_arrays.is_in_host(shards[i])]
        for i in complete:
            host.add(i, grads.pop(i))
        return [event for i in complete for event in (host.arrival(i), host.squared_norms[i])]

    def _leaf_grad(self, i: int, grads: dict[int, Array]) -> Array | None:
        if not self.trainable[i]:
            return None
        if i in grads:
            return grads[i]
        aval = self.traced.leaf_vars[i].aval  # a leaf that the loss does not use
        shape = self.collectives.shard_shape(aval.shape, self.collectives.dims[i])
        return jnp.zeros(shape, self.collectives.grad_dtype(aval.dtype))

    def _plan(self) -> None:
        """Finds the values through which gradients flow, and plans the backward pass of each segment."""
        jaxpr = self.traced.closed.jaxpr
        active = gradient_paths.with_tangents(jaxpr.eqns, select(self.traced.leaf_vars, self.trainable))
        names: dict[str, set[str]] = {}
        reached = {v for v in jaxpr.outvars[:1] if jaxprs.is_var(v)} & active
        backward_is_next = True  # of the last unit, and of the segments after it
        for part in reversed(self.parts):
            segment = part.segment
            part.differentiable_outputs = [v for v in segment.outputs if v in reached]
            if part.differentiable_outputs:
                part.wanted_inputs = part.plan_backward(active, backward_is_next)
                reached.update(part.wanted_inputs)
                names.setdefault(self._unit(segment), set()).update(part.names)
            backward_is_next = backward_is_next and not segment.leaves
        self.rules.check_names(names)


def _kind(segment: Segment) -> Any:
    """The class that runs a segment."""
    if segment.lookup:
        return TableLookup
    return LayerStack if segment.views else StraightSegment


def _restore_next(pending: list[tuple[Any, Any]], cotangents: list[Array]) -> list[Array]:
    """Fetches the next segment's saved values from host memory while the segment with these cotangents runs."""
    if pending:
        part, values = pending.pop()
        values, cotangents = part.restore(values, cotangents)
        pending.append((part, values))
    return cotangents
