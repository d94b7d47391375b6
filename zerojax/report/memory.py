"""What a step holds on one device, by terms and without a compiler.

What lives between steps is exact: it is that of `Zero.eval_init`, beside the formula of ZeRO. What a step makes on its
way is read from its trace, see `liveness`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from zerojax.analysis import jaxpr_stats, liveness
from zerojax.report import placement as report
from zerojax.sharding.stages import Stage
from zerojax.step.config import ZeroConfig
from zerojax.step.settings import StepSettings
from zerojax.step.state import TrainState
from zerojax.typing import PyTree


class Term(NamedTuple):
    """One part of what a device holds.

    Attributes:
        name: what it is.
        num_bytes: on one device.
        formula: how that comes about, in words and numbers.
    """

    name: str
    num_bytes: int
    formula: str


class ModelStates(NamedTuple):
    """Bytes of one device by the formula of ZeRO."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def num_bytes(self) -> float:
        return self.parameters + self.gradients + self.optimizer


def model_states(parameters: float, stage: int, num_shards: int, optimizer_bytes: float = 12) -> ModelStates:
    """The model states of a device at a stage, in mixed precision.

    Args:
        parameters: of the model, Psi.
        stage: 0 to 3.
        num_shards: devices that states are sharded over, N.
        optimizer_bytes: of a parameter, K: 12 for Adam with an fp32 copy.

    Source: ZeRO, sections 3.1 and 5, table 1.
    """
    stage = Stage.of(stage)
    over = lambda sharded: num_shards if sharded else 1
    return ModelStates(
        2 * parameters / over(stage.shards_params),
        2 * parameters / over(stage.shards_grads),
        optimizer_bytes * parameters / over(stage.shards_optimizer),
    )


def largest_model(limit_bytes: float, stage: int, num_shards: int, model: int = 1) -> float:
    """Parameters of the largest model whose states fit into a device, divided over a `model` axis too.

    Source: ZeRO, table 2.
    """
    return model * limit_bytes / model_states(1, stage, num_shards).num_bytes


class Memory(NamedTuple):
    """Terms of one device when memory is fullest; `host_bytes` in pinned host memory beside."""

    terms: tuple[Term, ...]
    host_bytes: int

    @property
    def peak_bytes(self) -> int:
        return sum(term.num_bytes for term in self.terms)

    @property
    def arguments_bytes(self) -> int:
        """What lives between steps, and the batch."""
        return sum(term.num_bytes for term in self.terms if term.name in _LIVE_ON)

    def __str__(self) -> str:
        """A line for each term, and their sum."""
        unit, size = ("GiB", 2**30) if self.peak_bytes >= 2**30 else ("MiB", 2**20)
        line = lambda name, num_bytes, formula: f"{name:16s}{num_bytes / size:9.3f} {unit}  {formula}".rstrip()
        host = [line("host memory", self.host_bytes, "beside it, pinned")] if self.host_bytes else []
        return "\n".join([*(line(*term) for term in self.terms), line("sum", self.peak_bytes, ""), *host])


_LIVE_ON = ("parameters", "optimizer state", "model state", "batch")


def step_memory(
    config: ZeroConfig, settings: StepSettings, state: TrainState, traced: jax.stages.Traced, batch: PyTree
) -> Memory:
    """The memory of a training step.

    Args:
        config: of the Zero.
        settings: of the step.
        state: of `Zero.eval_init`.
        traced: `step.trace(state, batch)`.
        batch: avals of all devices' rows.
    """
    program, *_ = jaxpr_stats.manual_parts(traced.jaxpr)
    num_gradients = sum(leaf.trainable for leaf in state.definition.leaves)
    alive = liveness.peak(program, range(num_gradients)).by_kind
    moved = _moved_stack(config, settings, state)
    made = [
        Term(kind, alive[kind], text) for kind, text in _made(config, state, settings.prefetch).items() if alive[kind]
    ]
    if moved and moved.num_bytes > sum(term.num_bytes for term in made):
        made = [moved]
    host = liveness.peak(program, range(num_gradients), jax.memory.Space.Host).num_bytes
    return Memory((*_held(config, state, batch), *made), host)


def _held(config: ZeroConfig, state: TrainState, batch: PyTree) -> list[Term]:
    """What lives between steps, and the batch."""
    axes, stage, precision = config.axes, config.stage, config.precision
    psi = sum(leaf.size for leaf in state.definition.leaves)
    totals = report.explain(config, state).totals
    optimizer = totals["optimizer"] / max(1, psi)
    over = lambda sharded: f" / {axes.num_shards}" if sharded and axes.num_shards > 1 else ""
    width = jnp.dtype(precision.compute_dtype).itemsize
    shards = axes.num_shards if stage.shards_optimizer else 1
    rows = sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(batch)) // axes.num_devices
    params = f"{width} x {_count(psi)}{over(stage.shards_params)}"
    terms = [
        Term("parameters", totals["params"], params),
        Term("optimizer state", totals["optimizer"], f"{optimizer * shards:.3g} x {_count(psi)}{over(shards > 1)}"),
        Term("model state", totals["model_state"], "as the model holds it, whole"),
        Term("batch", rows, "the rows of one device"),
    ]
    return [term for term in terms if term.num_bytes]


def _made(config: ZeroConfig, state: TrainState, prefetch: int) -> dict[str, str]:
    """How what a step makes comes about, by its kind."""
    width = jnp.dtype(config.precision.compute_dtype).itemsize
    units: dict[str, int] = {}
    for leaf in state.definition.leaves:
        units[leaf.unit] = units.get(leaf.unit, 0) + leaf.size // (leaf.shape[0] if leaf.stacked else 1)
    largest = max(units, key=lambda unit: units[unit])
    return {
        liveness.GATHERED: f"up to {prefetch + 1} units; the largest, {largest!r}: {width} x {_count(units[largest])}",
        liveness.GRADIENTS: "those that are there when memory is fullest: reduced, and in full on their way",
        liveness.CHECKPOINTS: "what waits around the loop that runs when memory is fullest",
        liveness.ACTIVATIONS: "of the unit that computes when memory is fullest, by the trace",
    }


def _moved_stack(config: ZeroConfig, settings: StepSettings, state: TrainState) -> Term | None:
    """Stages 1 and 2: a stack is gathered with the devices in front, and then moved to where the parameter lives."""
    if not config.stage.shards_optimizer or config.stage.shards_params:
        return None
    width = jnp.dtype(config.precision.compute_dtype).itemsize
    moved = [leaf for leaf in state.definition.leaves if leaf.dim and leaf.trainable]
    if not moved:
        return None
    largest = max(moved, key=lambda leaf: leaf.size)
    num_bytes = int(min(width * largest.size, settings.collectives.bucket_bytes))
    return Term(
        "gathered", num_bytes, f"after the update: {largest.path!r} as it arrives: {width} x {_count(largest.size)}"
    )


def _count(elements: int) -> str:
    for size, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if elements >= size:
            return f"{elements / size:.4g}{letter}"
    return str(elements)
