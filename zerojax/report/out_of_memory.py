"""A step that ran out of device memory: what it holds, term by term, and what would help."""

from __future__ import annotations

from collections.abc import Iterator

import jax

from zerojax.report.memory import Memory
from zerojax.step.config import Setup


def explained(setup: Setup, memory: Memory, num_microbatches: int, prefetch: int, error: Exception) -> MemoryError:
    """The error that says what a step holds by formula.

    Args:
        setup: of the Zero.
        memory: of the step.
        num_microbatches, prefetch: of the step.
        error: JAX's.
    """
    *rows, total = str(memory._replace(host_bytes=0)).splitlines()
    return MemoryError(
        "\n  ".join(
            [
                "step: a device has no memory left",
                f"got:      {str(error).splitlines()[0][:200]}",
                f"by formula, at stage {setup.stage} on {setup.axes.num_shards} shards:",
                *(f"  {row}" for row in [*rows, total + _limit(setup)]),
                f"fix:      {'; '.join(_help(setup, num_microbatches, prefetch))}",
                "          (zerojax plan gives each of these its own number)",
            ]
        )
    )


def _limit(setup: Setup) -> str:
    stats = getattr(setup.mesh.devices.flat[0], "memory_stats", lambda: None)()
    limit = (stats or {}).get("bytes_limit")
    return f"  of {limit / 2**30:.3f} GiB that the program may use" if limit else ""


def _help(setup: Setup, num_microbatches: int, prefetch: int) -> Iterator[str]:
    if setup.stage < 3:
        yield "stage=3"
    yield "keep='nothing', or Keep(offload_inputs=True)"
    yield f"num_microbatches={2 * num_microbatches}"
    if prefetch:
        yield "prefetch=0"
    if jax.default_backend() == "gpu":
        yield "XLA_CLIENT_MEM_FRACTION=0.95 in the environment"
    yield "more devices"
