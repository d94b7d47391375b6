"""Estimates the peak memory of a step on one device, term by term, and explains an error about too little memory.

Memory that is held between steps is exact, from the shardings of `Zero.eval_init`. Memory that is allocated within a
step is estimated from its trace, see `liveness`. The formulas of the ZeRO paper are here too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import jax

from zerojax.analysis import liveness
from zerojax.analysis.explanation import explain
from zerojax.analysis.jaxpr_counts import manual_parts
from zerojax.analysis.liveness import Peak
from zerojax.offload.host_memory import DEFAULT_PINNED_GIB, PINNED_LIMIT
from zerojax.sharding import placement
from zerojax.sharding.placement import Leaf, Stage
from zerojax.step import state as states
from zerojax.step.config import StepSettings, ZeroConfig, can_offload_params
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
    """Estimates the peak memory of a training step on one device.

    Args:
        config: mesh, axes, stage and precision.
        settings: the settings of the step.
        state: avals with shardings, as of `Zero.eval_init`.
        traced: the result of `step.trace(state, batch)`.
        batch: avals of the global batch.
    """
    jaxpr, *_ = manual_parts(traced.jaxpr)
    num_gradients = sum(leaf.trainable for leaf in state.layout.leaves)
    spaces = jax.memory.Space.Device, jax.memory.Space.Host
    peaks = [liveness.peak(jaxpr, range(num_gradients), space) for space in spaces]
    return memory_terms(config, settings, state, batch, *peaks)


def memory_terms(
    config: ZeroConfig, settings: StepSettings, state: TrainState, batch: PyTree, device: Peak, host: Peak
) -> Memory:
    """Adds what a step holds between steps to what it holds while it computes gradients.

    Args:
        config, settings, state, batch: as in `step_memory`.
        device: the peak of the computation of the gradients in device memory.
        host: the same in host memory.
    """
    alive = device.by_kind
    formulas = _temporary_formulas(config, state, settings.prefetch)
    temporaries = [Term(kind, alive[kind], text) for kind, text in formulas.items() if alive[kind]]
    transposed = _transposed_leaf(config, settings, state)
    if transposed and transposed.num_bytes > sum(term.num_bytes for term in temporaries):
        temporaries = [transposed]
    flags, arrays = jax.tree.leaves(states.in_host(config, state)), jax.tree.leaves(state)
    in_host = [a for a, flag in zip(arrays, flags, strict=True) if flag]
    state_in_host = sum(placement.shard_bytes(a, a.sharding) for a in in_host)
    terms = *_argument_terms(config, state, batch), *temporaries
    return Memory(terms, host.num_bytes + state_in_host, state_in_host)


def _argument_terms(config: ZeroConfig, state: TrainState, batch: PyTree) -> list[Term]:
    """The terms of the training state and the batch."""
    axes, stage = config.axes, config.stage
    psi = sum(leaf.size for leaf in state.layout.leaves)
    totals = explain(config, state).totals
    optimizer = totals["optimizer"] / max(1, psi)
    divisor = lambda sharded: f" / {axes.num_shards}" if sharded and axes.num_shards > 1 else ""
    held = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(state.params))
    shards = axes.num_shards if stage.shards_optimizer else 1
    rows = sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(batch)) // axes.num_devices
    params = f"{held / max(1, psi):.3g} x {count_text(psi)}{divisor(stage.shards_params)}"
    of_optimizer = f"{optimizer * shards:.3g} x {count_text(psi)}{divisor(shards > 1)}"
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


def _temporary_formulas(config: ZeroConfig, state: TrainState, prefetch: int) -> dict[str, str]:
    """Explains each kind of memory that a step allocates."""
    units: dict[str, list[Leaf]] = {}
    for leaf in state.layout.leaves:
        units.setdefault(leaf.unit, []).append(leaf)
    elements = lambda unit: sum(leaf.size_at_once for leaf in units[unit])
    largest = max(units, key=elements)
    num_bytes = sum(leaf.size_at_once * leaf.compute_dtype.itemsize for leaf in units[largest])
    size = f"{num_bytes / max(1, elements(largest)):.3g} x {count_text(elements(largest))}"
    return {
        liveness.GATHERED: f"up to {prefetch + 1} units at a time; the largest, {largest!r}, is {size}",
        liveness.GRADIENTS: "reduced and full gradients that exist at the peak",
        liveness.CHECKPOINTS: "activations saved outside the loop that runs at the peak",
        liveness.ACTIVATIONS: "of the unit that runs at the peak, from the trace",
    }


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


def out_of_memory_error(config: ZeroConfig, settings: StepSettings, memory: Memory, error: Exception) -> MemoryError:
    """The error to raise when a step has run out of device memory, or of host memory that XLA may pin.

    Args:
        config: mesh, axes, stage and precision.
        settings: the settings of the step.
        memory: the estimated peak memory of the step.
        error: the error that JAX raised.
    """
    if "host memory" in str(error):
        return _out_of_host_memory(memory, error)
    *rows, total = str(memory._replace(host_bytes=0)).splitlines()
    return MemoryError(
        "\n  ".join(
            [
                "step: out of device memory",
                f"got:      {str(error).splitlines()[0][:200]}",
                f"estimate: at stage {config.stage} on {config.axes.num_shards} shards:",
                *(f"  {row}" for row in [*rows, total + _limit(config)]),
                f"fix:      try {'; '.join(_fixes(config, settings))}",
                "          (zerojax plan predicts the memory with each of these)",
            ]
        )
    )


def _out_of_host_memory(memory: Memory, error: Exception) -> MemoryError:
    total, state = bytes_text(memory.host_bytes), bytes_text(memory.host_state_bytes)
    return MemoryError(
        f"step: out of pinned host memory\n"
        f"  got:      {str(error).splitlines()[0][:200]}\n"
        f"  estimate: {total} for each device, of which {state} are the state\n"
        f"  fix:      raise {PINNED_LIMIT} in the environment; it is {DEFAULT_PINNED_GIB} GiB\n"
        f"            by default, for all GPUs of a process together. Or offload less"
    )


def _limit(config: ZeroConfig) -> str:
    """The device memory that JAX may use, if the device reports it."""
    stats = getattr(config.mesh.devices.flat[0], "memory_stats", lambda: None)()
    limit = (stats or {}).get("bytes_limit")
    return f"  of {bytes_text(limit)} that JAX may use" if limit else ""


def _fixes(config: ZeroConfig, settings: StepSettings) -> Iterator[str]:
    """Changes that reduce the memory of a step, the cheapest first."""
    if config.stage < 3:
        yield "stage=3"
    yield "remat='full', or Remat(offload_inputs=True)"
    yield f"num_microbatches={2 * settings.num_microbatches}"
    if settings.prefetch:
        yield "prefetch=0"
    if config.offload == "none" and not config.other_axes:
        yield "Zero(..., offload='optimizer')"
    elif config.offload == "optimizer" and can_offload_params(config.axes, config.stage):
        yield "Zero(..., offload='params')"
    if jax.default_backend() == "gpu":
        yield "XLA_CLIENT_MEM_FRACTION=0.95 in the environment"
    yield "more devices"
