"""The host memory that XLA lets a process pin for its GPUs."""

from __future__ import annotations

from collections.abc import Mapping

PINNED_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
DEFAULT_PINNED_GIB = 64  # XLA, xla/pjrt/gpu/gpu_helpers.cc, 2026


def pinned_limit_gib(environ: Mapping[str, str]) -> int:
    """The GiB that a process may pin for all of its GPUs together.

    Args:
        environ: the environment variables of the process.

    Raises:
        ValueError: if the variable is not a positive whole number.
    """
    value = environ.get(PINNED_LIMIT)
    if value is not None and not (value.isdigit() and int(value)):
        raise ValueError(f"{PINNED_LIMIT}={value} is not a number of GiB")
    return int(value or DEFAULT_PINNED_GIB)


def check_pinned(num_bytes: int, num_gpus: int, environ: Mapping[str, str]) -> None:
    """Raises ValueError if what is offloaded from a process's GPUs is more than it may pin.

    XLA would run out of host memory while it creates or restores the state.

    Args:
        num_bytes: in host memory, for each GPU.
        num_gpus: of the process.
        environ: its environment variables.
    """
    needed, limit = num_bytes * num_gpus, pinned_limit_gib(environ)
    if needed > limit * 2**30:
        of_gpus = f" for {num_gpus} GPUs" if num_gpus > 1 else ""
        raise ValueError(
            f"offload: the state needs more host memory than XLA may pin\n"
            f"  got:      {needed / 2**30:.1f} GiB{of_gpus}, and a limit of {limit} GiB for each process\n"
            f"  fix:      {PINNED_LIMIT}={sufficient_limit_gib(needed)} in the environment, or more devices"
        )


def sufficient_limit_gib(num_bytes: int) -> int:
    """A limit that leaves a sixteenth for buffers that are pinned for a moment."""
    return -(-num_bytes * 17 // (16 * 2**30))
