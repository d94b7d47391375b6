"""Checks what a run needs of a machine: versions, devices, memory, a directory, a launcher and compilers."""

from __future__ import annotations

import enum
import fcntl
import glob
import os
import platform
import re
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from zerojax.checkpoints.run_directory import local_directory
from zerojax.offload.host_memory import PINNED_LIMIT, pinned_limit_gib
from zerojax.plan.transformer import FUSED_HEAD_MULTIPLE, widest_fused_head
from zerojax.processes.detect import detect
from zerojax.sharding.precision import Precision
from zerojax.utils import versions
from zerojax.utils.text import bytes_text

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
# The device files that drivers create, and the JAX package for these devices.
_ACCELERATORS = {
    "gpu": (("/dev/nvidia[0-9]*",), "pip install 'jax[cuda13]'"),
    "tpu": (("/dev/accel[0-9]*", "/dev/vfio/[0-9]*"), "pip install 'jax[tpu]'"),
}
_NO_LIMIT = 2**60  # control groups of version 1 have a number of this size where there is no limit
_AMPERE = (8, 0)
_FUSED_DTYPES = ("bfloat16", "float16")
_LEAST_LOCKED_BYTES, _LEAST_SHARED_BYTES = 2**30, 2**30  # guesses; containers often start with less
_GIB = 2**30


class Status(enum.Enum):
    """The status of a check.

    OK is a success, and INFO neither a success nor a failure. With WARNING, a run starts, but is slower, larger or
    noisier than it has to be. With ERROR, it fails.
    """

    OK = "ok"
    INFO = "info"
    WARNING = "warn"
    ERROR = "error"


class Check(NamedTuple):
    """A check of this machine: what was checked, whether it succeeded, what was found, and how to fix a failure."""

    name: str
    status: Status
    details: str
    fix: str = ""


def _failed(name: str, error: ValueError) -> Check:
    """The check that an error of three lines reports: what is wrong, what was found, and the fix."""
    what, got, fix, *_ = [*str(error).split("\n"), "", ""]
    text = f"{what.partition(': ')[2]} ({got.removeprefix('  got:').strip()})"
    return Check(name, Status.ERROR, text, fix.removeprefix("  fix:").strip())


# Any machine


def check_versions() -> Iterator[Check]:
    """The versions of Python and of the packages, which have to be tested ones."""
    installed = {name: metadata.version(name) for name in _PACKAGES}
    text = f"Python {platform.python_version()}, " + ", ".join(map(" ".join, installed.items()))
    try:
        versions.check({name: installed[name] for name in versions.TESTED})
    except ImportError as error:
        yield Check("versions", Status.ERROR, text, str(error).splitlines()[-1].removeprefix("  fix:").strip())
    else:
        yield Check("versions", Status.OK, text)


def check_devices(environ: Mapping[str, str], find: Callable[[str], list[str]] = glob.glob) -> Iterator[Check]:
    """Running on the CPU of a machine that has an accelerator is an error, unless JAX_PLATFORMS asks for it."""
    devices = jax.devices()
    text = f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})"
    files = {kind: [file for p in patterns for file in find(p)] for kind, (patterns, _) in _ACCELERATORS.items()}
    kind = next((kind for kind, names in files.items() if names), None)
    hidden = environ.get("CUDA_VISIBLE_DEVICES")
    if devices[0].platform != "cpu":
        yield Check("devices", Status.OK, text)
    elif kind is None:
        yield Check("devices", Status.INFO, text)
    elif "cpu" in environ.get("JAX_PLATFORMS", ""):
        yield Check("devices", Status.INFO, f"{text}, because JAX_PLATFORMS={environ['JAX_PLATFORMS']}")
    elif kind == "gpu" and hidden in ("", "-1"):
        text = f"{text}, because CUDA_VISIBLE_DEVICES={hidden} hides all GPUs"
        yield Check("devices", Status.ERROR, text, "unset CUDA_VISIBLE_DEVICES")
    else:
        fix = f"{_ACCELERATORS[kind][1]}; python -c 'import jax; jax.devices({kind!r})' shows the reason"
        yield Check("devices", Status.ERROR, f"{text}, although this machine has {files[kind][0]}", fix)


def check_memory() -> Iterator[Check]:
    """The memory of a device and of the host, and whether arrays can be offloaded."""
    device = jax.devices()[0]
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    yield Check("memory kinds", Status.OK if "pinned_host" in kinds else Status.INFO, ", ".join(kinds))
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        yield Check("device memory", Status.OK, f"{stats['bytes_limit'] / _GIB:.1f} GiB available to a program")
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    total, limit = _host_bytes(), cgroup_limit()
    text = f"{available / _GIB:.1f} of {total / _GIB:.1f} GiB free"
    text += f", of which this container or job may use {limit / _GIB:.1f} GiB" if limit and limit < total else ""
    yield Check("host memory", Status.OK, text)


def _host_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def cgroup_limit(own: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> int | None:
    """The bytes that a container or a job on a cluster leaves to this process; None if nothing limits it.

    Args:
        own: the file with the control groups of this process. A group is limited by those that it is in, too.
        root: where the limits of groups are: of version 2 in memory.max, of version 1 in memory/.
    """
    found = []
    for line in _text(Path(own)).splitlines():
        number, controllers, group = line.split(":", 2)
        if number == "0":
            folder, file = Path(root), "memory.max"
        elif "memory" in controllers.split(","):
            folder, file = Path(root) / "memory", "memory.limit_in_bytes"
        else:
            continue
        inner = folder / group.lstrip("/")
        texts = [_text(each / file).strip() for each in (inner, *inner.parents)]  # 'max' where there is no limit
        found += [int(text) for text in texts if text.isdigit() and int(text) < _NO_LIMIT]
    return min(found, default=None)


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def check_directory(directory: Path | None) -> Iterator[Check]:
    """Whether checkpoints can be written into a directory."""
    if directory is None:
        return
    try:
        path = local_directory(directory, "checkpoints")
    except ValueError as error:
        yield _failed("checkpoints", error)
        return
    parent = next(each for each in (path, *path.parents) if each.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=parent) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        fix = "a directory that this user can write, on a file system that supports locks"
        yield Check("checkpoints", Status.ERROR, f"{directory}: {error.strerror}", fix)
        return
    free = shutil.disk_usage(parent).free / _GIB
    yield Check("checkpoints", Status.OK, f"{directory}: {file_system(parent)}, {free:,.1f} GiB free")


def file_system(path: Path, mounts: str = "/proc/mounts") -> str:
    """The type of the file system of a path, or 'unknown' if the system does not report it."""
    lines = [line.split() for line in _text(Path(mounts)).splitlines()]
    mounted = [fields for fields in lines if len(fields) > 2 and path.is_relative_to(fields[1])]
    return max(mounted, key=lambda fields: len(fields[1]))[2] if mounted else "unknown"


ALONE = Check("processes", Status.OK, "a single process")


def check_processes(environ: Mapping[str, str]) -> Iterator[Check]:
    """What the variables of a launcher say about this process and the others."""
    try:
        info = detect(environ)
    except ValueError as error:
        yield _failed("processes", error)
        return
    if info is None or info.count == 1:
        yield ALONE
    elif info.count is None:
        yield Check("processes", Status.OK, "detected by JAX")
    else:
        coordinator = f", process 0 is {info.coordinator}" if info.coordinator else ""
        yield Check("processes", Status.OK, f"{info.found}: process {info.index} of {info.count}{coordinator}")


def check_compilers() -> Iterator[Check]:
    """The compilers with which `zerojax plan --compile` compiles for accelerators that this machine does not have."""
    for kind, platform_name in (("GPU", "cuda"), ("TPU", "tpu")):
        missing = versions.missing_compiler(platform_name)
        text = f"{missing}; only zerojax plan --compile needs it" if missing else "installed"
        yield Check(f"{kind} compiler", Status.INFO if missing else Status.OK, text)


# Machines with GPUs


class Gpu(NamedTuple):
    """A GPU of this machine: its kind, and its compute capability, such as (9, 0)."""

    kind: str
    capability: tuple[int, int]


class Host(NamedTuple):
    """What a machine with GPUs gives a process."""

    memory_bytes: int  # host memory, as the container or the job limits it
    shared_bytes: int  # the size of /dev/shm
    locked_bytes: int | None  # the memory that a process may lock; None for any
    has_infiniband: bool  # whether it has network cards that access memory by themselves

    @classmethod
    def of_machine(cls) -> Host:
        locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        shared = Path("/dev/shm")
        return cls(
            min(_host_bytes(), cgroup_limit() or _host_bytes()),
            shutil.disk_usage(shared).total if shared.exists() else 0,
            None if locked == resource.RLIM_INFINITY else locked,
            bool(glob.glob("/sys/class/infiniband/*")),
        )


def local_gpus() -> list[Gpu]:
    """The NVIDIA GPUs that this process uses."""
    gpus = [device for device in jax.local_devices() if device.platform == "gpu"]
    found = [(gpu.device_kind, re.fullmatch(r"(\d+)\.(\d+)", str(gpu.compute_capability))) for gpu in gpus]
    return [Gpu(kind, (int(match[1]), int(match[2]))) for kind, match in found if match]  # AMD's are 'gfx942'


def cudnn_version() -> int | None:
    """The version of the cuDNN that JAX uses, such as 91002 for 9.10.2; None if it finds none."""
    try:
        from jax._src.lib import cuda_versions

        return int(cuda_versions.cudnn_get_version()) if cuda_versions is not None else None
    except Exception:  # JAX does not say which error the library raises
        return None


def check_gpus(environ: Mapping[str, str], precision: str | None, head_dim: int | None) -> Iterator[Check]:
    """All checks of GPUs; none if the machine has no GPU."""
    dtype = jnp.dtype(Precision.of(precision).compute_dtype).name if precision else None
    if gpus := local_gpus():
        host = Host.of_machine()
        yield from check_attention(gpus[0], cudnn_version(), dtype, head_dim)
        yield from check_pinned_memory(environ, host)
        yield from check_communication(len(gpus), host)


def check_attention(gpu: Gpu, cudnn: int | None, dtype: str | None, head_dim: int | None) -> Iterator[Check]:
    """Whether `jax.nn.dot_product_attention(..., implementation="cudnn")` runs, with queries as described if known."""
    widest = widest_fused_head(gpu.capability)
    check = lambda status, text, fix="": Check("fused attention", status, text, fix)
    if gpu.capability < _AMPERE:
        capability = ".".join(map(str, gpu.capability))
        yield check(Status.INFO, f"cuDNN fuses no attention on {gpu.kind}, whose compute capability is {capability}")
    elif cudnn is None:
        fix = "pip install 'jax[cuda13]', or with a CUDA of your own the directory of libcudnn.so in LD_LIBRARY_PATH"
        yield check(Status.WARNING, "attention runs unfused, because JAX finds no cuDNN", fix)
    elif dtype is not None and dtype not in _FUSED_DTYPES:
        text = f"attention in {dtype} runs unfused: cuDNN takes {' and '.join(_FUSED_DTYPES)}"
        fix = "precision='bf16'; or cast queries, keys and values to bfloat16 for attention alone"
        yield check(Status.WARNING, text, fix)
    elif head_dim is not None and (head_dim > widest or head_dim % FUSED_HEAD_MULTIPLE):
        text = f"attention with heads of width {head_dim} runs unfused on {gpu.kind}"
        fix = f"heads whose width is a multiple of {FUSED_HEAD_MULTIPLE} and at most {widest}"
        yield check(Status.WARNING, text, fix)
    else:
        version = f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}"
        text = f"cuDNN {version} fuses heads of up to {widest}, in multiples of {FUSED_HEAD_MULTIPLE}, in bfloat16"
        text += " and float16, if the model passes implementation='cudnn' to jax.nn.dot_product_attention"
        yield check(Status.OK, text)


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
