"""Estimates the peak memory of a step on one device, term by term.

Memory that is held between steps is exact, from the shardings of `Zero.eval_init`. Memory that is allocated within a
step is estimated from its trace, see `liveness`. The formulas of the ZeRO paper are here too.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

import jax

from zerojax.analysis import liveness
from zerojax.analysis.explanation import explain
from zerojax.analysis.jaxpr_counts import Space, manual_parts
from zerojax.sharding import placement
from zerojax.sharding.placement import Stage
from zerojax.step import state as states
from zerojax.step.config import StepSettings, ZeroConfig
from zerojax.step.state import TrainState
from zerojax.utils.text import bytes_text, count_text
from zerojax.utils.typing import PyTree


class Term(NamedTuple):
    """One term of a device's peak memory.

    Attributes:
        name: what is held, such as 'parameters'.
        num_bytes: its size on one device.
        formula: where the number comes from, in words and numbers.
    """

    name: str
    num_bytes: int
    formula: str


class ModelStates(NamedTuple):
    """Bytes of the model states on one device, by the formula of ZeRO.

    Attributes:
        parameters, gradients, optimizer: the bytes of each.
    """

    parameters: float
    gradients: float
    optimizer: float

    @property
    def num_bytes(self) -> float:
        return self.parameters + self.gradients + self.optimizer


def model_states(parameters: float, stage: int, num_shards: int, optimizer_bytes: float = 12) -> ModelStates:
    """The bytes of model states on one device at a stage, in mixed precision.

    Args:
        parameters: number of parameters of the model (Psi).
        stage: 0 to 3.
        num_shards: number of devices over which states are sharded (N).
        optimizer_bytes: bytes of optimizer state per parameter (K): 12 for Adam with an fp32 master copy.

    Source: ZeRO, sections 3.1 and 5, table 1.
    """
    stage = Stage.of(stage)
    shards = lambda sharded: num_shards if sharded else 1
    return ModelStates(
        2 * parameters / shards(stage.shards_params),
        2 * parameters / shards(stage.shards_grads),
        optimizer_bytes * parameters / shards(stage.shards_optimizer),
    )


class Memory(NamedTuple):
    """The peak memory of a step on one device. Prints as a table.

    Attributes:
        terms: the terms of the peak in device memory.
        host_bytes: the peak in pinned host memory, for one device.
        host_state_bytes: the part of it that is the offloaded state, which a step copies to the device and back.
    """

    terms: tuple[Term, ...]
    host_bytes: int
    host_state_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """The sum of the terms."""
        return sum(term.num_bytes for term in self.terms)

    @property
    def arguments_bytes(self) -> int:
        """Bytes of the arguments of a step: the training state and the batch."""
        return sum(term.num_bytes for term in self.terms if term.name in _ARGUMENTS)

    def __str__(self) -> str:
        """One line for each term, and their sum."""
        line = lambda name, num_bytes, formula: f"{name:16s}{bytes_text(num_bytes):>12s}  {formula}".rstrip()
        host = [line("host memory", self.host_bytes, "pinned, in addition to the sum")] if self.host_bytes else []
        return "\n".join([*(line(*term) for term in self.terms), line("sum", self.peak_bytes, ""), *host])

    __repr__ = __str__


_ARGUMENTS = ("parameters", "optimizer state", "model state", "batch")


def step_memory(
    config: ZeroConfig, settings: StepSettings, state: TrainState, traced: jax.stages.Traced, batch: PyTree
) -> Memory:
    """Estimates the peak memory of a traced training step on one device. `state` and `batch` are avals."""
    jaxpr, *_ = manual_parts(traced.jaxpr)
    num_gradients = sum(leaf.trainable for leaf in state.layout.leaves)
    peaks = [liveness.peak(jaxpr, range(num_gradients), space) for space in (Space.Device, Space.Host)]
    for alive in peaks:  # the trace has whole sequences
        for kind in liveness.CHECKPOINTS, liveness.ACTIVATIONS:
            alive[kind] //= config.axes.num_context
    return memory_terms(config, settings, state, batch, *peaks)


def memory_terms(
    config: ZeroConfig,
    settings: StepSettings,
    state: TrainState,
    batch: PyTree,
    alive: Counter[str],
    alive_in_host: Counter[str],
) -> Memory:
    """Adds what a step holds between steps to the peaks of what it holds while it computes gradients."""
    explanation = explain(config, state)
    largest = max(explanation.units, key=lambda unit: unit.num_bytes)
    of_largest = f"the largest, {largest.name!r}, has {bytes_text(largest.num_bytes)}"
    formulas = {
        liveness.GATHERED: f"up to {settings.prefetch + 1} units at a time; {of_largest}",
        liveness.GRADIENTS: "reduced and full gradients that exist at the peak",
        liveness.CHECKPOINTS: "activations saved outside the loop that runs at the peak",
        liveness.ACTIVATIONS: "of the unit that runs at the peak, from the trace",
    }
    temporaries = [Term(kind, alive[kind], text) for kind, text in formulas.items() if alive[kind]]
    transposed = _transposed_leaf(config, settings, state)
    if transposed and transposed.num_bytes > sum(term.num_bytes for term in temporaries):
        temporaries = [transposed]
    flags, arrays = jax.tree.leaves(states.in_host(config, state)), jax.tree.leaves(state)
    in_host = [a for a, flag in zip(arrays, flags, strict=True) if flag and config.reads_host]
    state_in_host = sum(placement.shard_bytes(a, a.sharding) for a in in_host)
    terms = *_argument_terms(config, state, batch, explanation.totals), *temporaries
    return Memory(terms, alive_in_host.total() + state_in_host, state_in_host)


def _argument_terms(config: ZeroConfig, state: TrainState, batch: PyTree, totals: dict[str, int]) -> list[Term]:
    """The terms of the training state and the batch."""
    axes, stage = config.axes, config.stage
    psi = sum(leaf.size for leaf in state.layout.leaves)

    optimizer = totals["optimizer"] / max(1, psi)
    divisor = lambda num: f" / {num}" if num > 1 else ""
    held = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(state.params))
    shards = config.optimizer_axes.num_shards if stage.shards_optimizer else 1
    rows = sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(batch)) // axes.num_devices
    params = f"{held / max(1, psi):.3g} x {count_text(psi)}{divisor(axes.num_shards if stage.shards_params else 1)}"
    of_optimizer = f"{optimizer * shards:.3g} x {count_text(psi)}{divisor(shards)}"
    if config.offloads_optimizer:
        of_optimizer = "what is not shaped like a parameter, such as counts"
    if config.offloads_params:
        params = "vectors; all others are in host memory"
    terms = [
        Term("parameters", totals["params"], params),
        Term("optimizer state", totals["optimizer"], of_optimizer),
        Term("model state", totals["model_state"], "replicated, in the dtypes of the model"),
        Term("batch", rows, "the rows of one device"),
    ]
    return [term for term in terms if term.num_bytes]


def _transposed_leaf(config: ZeroConfig, settings: StepSettings, state: TrainState) -> Term | None:
    """The largest leaf that is transposed after the gather of the updated parameters, at stages 1 and 2.

    A leaf whose sharded dim is not the first is gathered with the devices in front, and then copied to its own layout.
    """
    if not config.stage.shards_optimizer or config.stage.shards_params:
        return None
    transposed = [leaf for leaf in state.layout.leaves if leaf.dim and leaf.trainable]
    if not transposed:
        return None
    largest = max(transposed, key=lambda leaf: leaf.size)
    width = largest.compute_dtype.itemsize
    num_bytes = int(min(width * largest.size, settings.collectives.bucket_bytes))
    formula = f"after the update: {largest.path!r} before it is transposed, {width} x {count_text(largest.size)}"
    return Term("gathered", num_bytes, formula)
