"""Checks of machines with GPUs: whether attention can be fused, and how much host memory may be pinned and shared."""

from __future__ import annotations

import glob
import resource
import shutil
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from zerojax.cli.diagnosis.checks import Check, Status
from zerojax.cli.diagnosis.machine import cgroup_limit, host_bytes
from zerojax.offload.checks import PINNED_LIMIT, pinned_limit_gib
from zerojax.plan.transformer import FUSED_HEAD_MULTIPLE, widest_fused_head
from zerojax.sharding.precision import Precision
from zerojax.utils.text import bytes_text

_AMPERE, _BLACKWELL_ULTRA = (8, 0), (10, 3)
_CUDNN_FOR_BLACKWELL_ULTRA = 91100  # 9.11, jax/_src/cudnn/fused_attention_stablehlo.py, jax 0.10.2
_FUSED_DTYPES = ("bfloat16", "float16")
_LEAST_LOCKED_BYTES, _LEAST_SHARED_BYTES = 2**30, 2**30  # guesses; containers often start with less
_GIB = 2**30


class Gpu(NamedTuple):
    """A GPU of this machine: its kind, and its compute capability, such as (9, 0)."""

    kind: str
    capability: tuple[int, int]


class Host(NamedTuple):
    """What a machine with GPUs gives a process.

    Attributes:
        memory_bytes: host memory, as the container or the job limits it.
        shared_bytes: the size of /dev/shm.
        locked_bytes: the memory that a process may lock; None for any.
        has_infiniband: whether it has network cards that access memory by themselves.
    """

    memory_bytes: int
    shared_bytes: int
    locked_bytes: int | None
    has_infiniband: bool

    @classmethod
    def of_machine(cls) -> Host:
        locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        try:
            shared = shutil.disk_usage("/dev/shm").total
        except OSError:
            shared = 0
        return cls(
            min(host_bytes(), cgroup_limit() or host_bytes()),
            shared,
            None if locked == resource.RLIM_INFINITY else locked,
            bool(glob.glob("/sys/class/infiniband/*")),
        )


def local_gpus() -> list[Gpu]:
    """The NVIDIA GPUs that this process uses."""
    found = [(d.device_kind, getattr(d, "compute_capability", "")) for d in jax.local_devices() if d.platform == "gpu"]
    return [Gpu(kind, _capability(text)) for kind, text in found if _capability(text) != (0, 0)]


def _capability(text: str) -> tuple[int, int]:
    major, _, minor = str(text).partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)


def cudnn_version() -> int | None:
    """The version of the cuDNN that JAX uses, such as 91002 for 9.10.2; None if it finds none."""
    try:
        from jax._src.lib import cuda_versions

        return int(cuda_versions.cudnn_get_version()) if cuda_versions is not None else None
    except Exception:  # JAX does not say which error the library raises
        return None


def check_gpus(
    gpus: list[Gpu], environ: Mapping[str, str], precision: str | None, head_dim: int | None
) -> Iterator[Check]:
    """All checks of this module; none if the machine has no GPU."""
    dtype = jnp.dtype(Precision.of(precision).compute_dtype).name if precision else None
    if not gpus:
        return
    yield from check_attention(gpus[0], cudnn_version(), dtype, head_dim)
    host = Host.of_machine()
    yield from check_pinned_memory(environ, host)
    yield from check_communication(len(gpus), host)


def check_attention(gpu: Gpu, cudnn: int | None, dtype: str | None, head_dim: int | None) -> Iterator[Check]:
    """Whether `jax.nn.dot_product_attention(..., implementation="cudnn")` runs on a GPU.

    Args:
        gpu: the GPU.
        cudnn: the version of cuDNN, as of `cudnn_version`.
        dtype, head_dim: of queries, keys and values; None if not known.
    """
    widest = widest_fused_head(gpu.capability)
    capability = ".".join(map(str, gpu.capability))
    check = lambda status, text, fix="": Check("fused attention", status, text, fix)
    if gpu.capability < _AMPERE:
        yield check(Status.INFO, f"cuDNN fuses no attention on {gpu.kind}, whose compute capability is {capability}")
    elif cudnn is None:
        yield check(
            Status.WARNING,
            "attention runs unfused, because JAX finds no cuDNN",
            "pip install 'jax[cuda13]', or with a CUDA of your own the directory of libcudnn.so in LD_LIBRARY_PATH",
        )
    elif gpu.capability == _BLACKWELL_ULTRA and cudnn < _CUDNN_FOR_BLACKWELL_ULTRA:
        text = f"attention cannot be fused on {gpu.kind}: cuDNN {_version(cudnn)} is installed, and it needs 9.11"
        yield check(Status.WARNING, text, "pip install --upgrade nvidia-cudnn-cu13")
    elif dtype is not None and dtype not in _FUSED_DTYPES:
        yield check(
            Status.WARNING,
            f"attention in {dtype} runs unfused: cuDNN takes {' and '.join(_FUSED_DTYPES)}",
            "precision='bf16'; or cast queries, keys and values to bfloat16 for attention alone",
        )
    elif head_dim is not None and (head_dim > widest or head_dim % FUSED_HEAD_MULTIPLE):
        yield check(
            Status.WARNING,
            f"attention with heads of width {head_dim} runs unfused on {gpu.kind}",
            f"heads whose width is a multiple of {FUSED_HEAD_MULTIPLE} and at most {widest}",
        )
    else:
        yield check(
            Status.OK,
            f"cuDNN {_version(cudnn)} fuses heads of up to {widest}, in multiples of {FUSED_HEAD_MULTIPLE}, in bfloat16"
            " and float16, if the model passes implementation='cudnn' to jax.nn.dot_product_attention; JAX does not"
            " choose it by itself",
        )


def _version(cudnn: int) -> str:
    return f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}"


def check_pinned_memory(environ: Mapping[str, str], host: Host) -> Iterator[Check]:
    """The host memory that a process may pin for what is offloaded."""
    total = host.memory_bytes / _GIB
    fitting = max(1, int(0.8 * total))
    try:
        limit = pinned_limit_gib(environ)
    except ValueError as error:
        yield Check("pinned memory", Status.ERROR, str(error), f"{PINNED_LIMIT}={fitting}, or unset it")
        return
    said = f"a process may pin {limit} GiB ({PINNED_LIMIT}{'' if environ.get(PINNED_LIMIT) else ' is not set'})"
    if limit > total:
        has = f"has {bytes_text(host.memory_bytes)} of host memory"
        text = f"{said}, but {has}: the kernel would end it before JAX raises an error"
        yield Check("pinned memory", Status.WARNING, text, f"{PINNED_LIMIT}={fitting}")
    elif fitting > 2 * limit:
        fix = f"to offload more, {PINNED_LIMIT}={fitting}, divided by the number of processes on this host"
        yield Check("pinned memory", Status.INFO, f"{said} of {bytes_text(host.memory_bytes)}", fix)
    else:
        yield Check("pinned memory", Status.OK, f"{said} of {bytes_text(host.memory_bytes)}")


def check_communication(num_gpus: int, host: Host) -> Iterator[Check]:
    """What NCCL needs of a container: shared memory, and memory that it may lock for InfiniBand."""
    if num_gpus > 1 and host.shared_bytes < _LEAST_SHARED_BYTES:
        text = f"/dev/shm has {bytes_text(host.shared_bytes)}, in which NCCL connects the GPUs of a host"
        yield Check("shared memory", Status.WARNING, text, "start the container with --shm-size=1g, or with --ipc=host")
    if host.has_infiniband and host.locked_bytes is not None and host.locked_bytes < _LEAST_LOCKED_BYTES:
        text = f"a process may lock {bytes_text(host.locked_bytes)}, but InfiniBand needs its buffers locked"
        fix = "ulimit -l unlimited; a container: --ulimit memlock=-1; SLURM: PropagateResourceLimitsExcept=MEMLOCK"
        yield Check("locked memory", Status.WARNING, text, fix)
