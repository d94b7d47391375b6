"""Explains an out-of-memory error of a step: the terms of its memory, and settings that reduce it."""

from __future__ import annotations

from collections.abc import Iterator

import jax

from zerojax.analysis.report.memory import Memory
from zerojax.offload.pinned_memory import DEFAULT_PINNED_GIB, PINNED_LIMIT
from zerojax.step.config import ZeroConfig, can_offload_params
from zerojax.step.settings import StepSettings
from zerojax.utils.text import bytes_text


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
