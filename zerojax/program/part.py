"""The parts of a traced loss: each reads the weights of one unit, which are gathered, used and dropped.

    part                  evaluates, and plans its backward pass
      │ plan_backward
      ▼
    planned part          forward    gather ► compute ► drop
                          backward   gather ► compute ► reduce

`straight`, `layer_stack` and `table_lookup` are the three kinds of parts. `Weights` and `GradientSink` say where the
weights come from and where the gradients go: here to and from the memory of the device, in `offload.host_params` to and
from that of the host.

Everything here runs inside `shard_map`.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from zerojax.comm.schedule import Schedule
from zerojax.comm.stage_collectives import StageCollectives, accumulate
from zerojax.program import layer_scan
from zerojax.program.jaxprs import Var
from zerojax.program.layer_scan import Carry, LayerBody, Layers, Scanned
from zerojax.program.remat import Remat
from zerojax.program.segmentation import Segment, TracedLoss, View
from zerojax.utils.typing import Array, DTypeLike, PyTree


@dataclasses.dataclass(frozen=True)
class Part(abc.ABC):
    """A part of a traced loss."""

    traced: TracedLoss  # the loss that it is a part of
    segment: Segment  # its equations, and the values that it reads and returns
    collectives: StageCollectives  # gathers and reduces as the stage does
    remat: Remat  # which activations are saved for the backward pass

    @property
    @abc.abstractmethod
    def num_bytes(self) -> int:
        """The bytes of its weights when they are gathered; of a layer of a stack."""

    def gather(self, leaves: Sequence[int], weights: Weights, schedule: Schedule) -> list[Array]:
        """The full leaves."""
        shards = weights.shards(leaves)
        return self.collectives.gather(shards, [self.collectives.dims[i] for i in leaves], schedule)

    @abc.abstractmethod
    def evaluate(self, weights: Weights, data: Sequence[Array], schedule: Schedule) -> list[Array]:
        """Gathers, computes and drops: the outputs of the segment, from its inputs `data`."""

    @abc.abstractmethod
    def plan_backward(self, outputs: Sequence[Var], active: Set[Var], backward_is_next: bool) -> PlannedPart:
        """Traces the backward pass.

        Args:
            outputs: those outputs of the segment that a cotangent reaches.
            active: the variables of the loss that have a tangent.
            backward_is_next: whether the backward pass of the part follows directly on its forward pass.
        """


@dataclasses.dataclass(frozen=True)
class PlannedPart(abc.ABC):
    """A part with a backward pass."""

    part: Part
    outputs: Sequence[Var]  # those outputs of the segment that have a cotangent
    inputs: Sequence[Var]  # those inputs of the segment that cotangents reach
    names: frozenset[str]  # of its activations
    is_loop = False  # whether it runs as a loop over layers

    @abc.abstractmethod
    def forward(self, weights: Weights, data: Sequence[Array], schedule: Schedule) -> tuple[list[Array], PyTree]:
        """As `Part.evaluate`: (the outputs of the segment, the values saved for `backward`)."""

    def restore(self, saved: PyTree, cotangents: list[Array]) -> tuple[PyTree, list[Array]]:
        """Fetches saved values from host memory while the part with these cotangents runs: (saved, cotangents)."""
        return saved, cotangents

    @abc.abstractmethod
    def backward(
        self, weights: Weights, saved: PyTree, cotangents: Sequence[Array], schedule: Schedule, sink: GradientSink
    ) -> tuple[dict[int, Array], list[Array]]:
        """Gathers, computes and reduces.

        Returns:
            (the reduced gradient of each leaf that has one and has not gone to the sink already, the cotangents of
            `inputs`).
        """


class Loop(NamedTuple):
    """The layers of a scan over stacked leaves."""

    views: Sequence[View]  # the values that the loop slices, each a view of a stacked leaf
    layers: Layers  # all else about the layers; of a loop over layers on the device
    trained: Sequence[View] = ()  # those of the views that get a gradient
    complete: Sequence[bool] = ()  # whether nothing but this loop adds to the gradient of the leaf of a trained view
    grad_dtypes: Sequence[DTypeLike] = ()  # of the reduced gradients of trained views


@dataclasses.dataclass(frozen=True)
class Weights:
    """Where the leaves are: here in the memory of the device. They are shards at stage 3, and full below."""

    leaves: Sequence[Array]

    def shards(self, leaves: Iterable[int]) -> list[Array]:
        """The leaves, on the device."""
        return [self.leaves[i] for i in leaves]

    def with_stacks(self, stacks: Sequence[Sequence[int]]) -> Weights:
        """These leaves, and after them stacks of some of them. There are none of leaves in host memory."""
        return Weights([*self.leaves, *(jnp.stack(self.shards(stack)) for stack in stacks)]) if stacks else self

    def next_after(self, part: Part | None, values: list[Array]) -> tuple[Weights, list[Array]]:
        """Makes what is copied to the device for the next part wait for these values: (the weights, the values)."""
        return self, values

    def scan(
        self, body: LayerBody, init: Carry, loop: Loop, schedule: Schedule, sink: GradientSink
    ) -> tuple[Scanned, list[Array | None]]:
        """Runs a loop over layers, see `layer_scan.scan`.

        Returns:
            (its results, the gradients of the trained leaves, of which those that have gone to the sink are None).
        """
        # Casts and transpositions of a shard need no communication.
        stacks = [view.of(self.leaves[view.leaf]) for view in loop.views]
        scanned = layer_scan.scan(body, init, loop.layers._replace(shards=stacks), schedule)
        to_leaf = lambda grad, view: jnp.transpose(grad, np.argsort(view.order).tolist())
        return scanned, [to_leaf(grad, view) for grad, view in zip(scanned.grads, loop.trained, strict=True)]


class GradientSink:
    """Where gradients go, part by part: here they stay in the memory of the device.

    Attributes:
        squared_norms: by leaf, of the gradients that are not on the device.
    """

    def __init__(self) -> None:
        self._grads: dict[int, Array] = {}
        self.squared_norms: dict[int, Array] = {}

    def start(self, parts: Sequence[PlannedPart], weights: Weights, weight: Array) -> None:
        """Says which parts have a backward pass, in the order of the forward pass.

        `weight` is what gradients are multiplied by before they are added to those of other microbatches.
        """

    def before(self, part: PlannedPart, cotangents: list[Array]) -> list[Array]:
        """The cotangents of the part that runs next, which may wait for what is on its way."""
        return cotangents

    def add(self, part: PlannedPart, grads: dict[int, Array]) -> None:
        """Adds the reduced gradients of leaves, by leaf."""
        for leaf, grad in grads.items():
            accumulate(self._grads, leaf, grad)

    def has(self, leaf: int) -> bool:
        """Whether there is a gradient of a leaf."""
        return leaf in self._grads

    def finish(self, unused: dict[int, Array]) -> dict[int, Array]:
        """The gradients by leaf. `unused` are zeros for the trained leaves that have none."""
        return self._grads | unused
