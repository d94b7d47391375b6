"""A step that ran out of device memory: what it holds, term by term, and what would help."""

from __future__ import annotations

from collections.abc import Iterator

import jax

from zerojax.report.memory import Memory
from zerojax.step.config import ZeroConfig
from zerojax.step.settings import StepSettings


def out_of_memory_error(config: ZeroConfig, settings: StepSettings, memory: Memory, error: Exception) -> MemoryError:
    """The error that says what a step holds by formula.

    Args:
        config: of the Zero.
        settings, memory: of the step.
        error: JAX's.
    """
    *rows, total = str(memory._replace(host_bytes=0)).splitlines()
    return MemoryError(
        "\n  ".join(
            [
                "step: a device has no memory left",
                f"got:      {str(error).splitlines()[0][:200]}",
                f"by formula, at stage {config.stage} on {config.axes.num_shards} shards:",
                *(f"  {row}" for row in [*rows, total + _limit(config)]),
                f"fix:      {'; '.join(_help(config, settings))}",
                "          (zerojax plan gives each of these its own number)",
            ]
        )
    )


def _limit(config: ZeroConfig) -> str:
    stats = getattr(config.mesh.devices.flat[0], "memory_stats", lambda: None)()
    limit = (stats or {}).get("bytes_limit")
    return f"  of {limit / 2**30:.3f} GiB that the program may use" if limit else ""


def _help(config: ZeroConfig, settings: StepSettings) -> Iterator[str]:
    if config.stage < 3:
        yield "stage=3"
    yield "remat='full', or Remat(offload_inputs=True)"
    yield f"num_microbatches={2 * settings.num_microbatches}"
    if settings.prefetch:
        yield "prefetch=0"
    if jax.default_backend() == "gpu":
        yield "XLA_CLIENT_MEM_FRACTION=0.95 in the environment"
    yield "more devices"
