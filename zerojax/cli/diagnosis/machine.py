"""Checks what a run needs of a machine: versions, devices, memory, a directory, a launcher and compilers."""

from __future__ import annotations

import fcntl
import glob
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path

import jax

from zerojax.checkpoints.run_directory import local_directory
from zerojax.cli.diagnosis.checks import Check, Status, failed
from zerojax.processes.detect import detect
from zerojax.utils import versions


def check_versions() -> Iterator[Check]:
    """The versions of Python and of the packages, which have to be tested ones."""
    installed = {
        name: metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    }
    text = f"Python {platform.python_version()}, " + ", ".join(map(" ".join, installed.items()))
    try:
        versions.check({name: installed[name] for name in versions.TESTED})
    except ImportError as error:
        yield Check("versions", Status.ERROR, text, str(error).splitlines()[-1].removeprefix("  fix:").strip())
    else:
        yield Check("versions", Status.OK, text)


# The device files that drivers create, and the JAX package for these devices.
_ACCELERATORS = {
    "gpu": (("/dev/nvidia[0-9]*",), "pip install 'jax[cuda13]'"),
    "tpu": (("/dev/accel[0-9]*", "/dev/vfio/[0-9]*"), "pip install 'jax[tpu]'"),
}


def check_devices(environ: Mapping[str, str], find: Callable[[str], list[str]] = glob.glob) -> Iterator[Check]:
    """Running on the CPU of a machine that has an accelerator is an error, unless JAX_PLATFORMS asks for it."""
    devices = jax.devices()
    text = f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})"
    files = {kind: [file for p in patterns for file in find(p)] for kind, (patterns, _) in _ACCELERATORS.items()}
    present = [(kind, names[0]) for kind, names in files.items() if names]
    if devices[0].platform != "cpu" or not present:
        yield Check("devices", Status.OK if devices[0].platform != "cpu" else Status.INFO, text)
    elif "cpu" in environ.get("JAX_PLATFORMS", ""):
        yield Check("devices", Status.INFO, f"{text}, because JAX_PLATFORMS={environ['JAX_PLATFORMS']}")
    else:
        kind, file = present[0]
        hidden = environ.get("CUDA_VISIBLE_DEVICES")
        if kind == "gpu" and hidden in ("", "-1"):
            text = f"{text}, because CUDA_VISIBLE_DEVICES={hidden} hides all GPUs"
            yield Check("devices", Status.ERROR, text, "unset CUDA_VISIBLE_DEVICES")
            return
        fix = f"{_ACCELERATORS[kind][1]}; python -c 'import jax; jax.devices({kind!r})' shows the reason"
        yield Check("devices", Status.ERROR, f"{text}, although this machine has {file}", fix)


_NO_LIMIT = 2**60  # control groups of version 1 have a number of this size where there is no limit


def check_memory() -> Iterator[Check]:
    """The memory of a device and of the host, and whether arrays can be offloaded."""
    device = jax.devices()[0]
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    can_offload = "pinned_host" in kinds
    yield Check("memory kinds", Status.OK if can_offload else Status.INFO, ", ".join(kinds))
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        yield Check("device memory", Status.OK, f"{stats['bytes_limit'] / 2**30:.1f} GiB available to a program")
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    total, limit = host_bytes(), cgroup_limit()
    text = f"{available / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    text += f", of which this container or job may use {limit / 2**30:.1f} GiB" if limit and limit < total else ""
    yield Check("host memory", Status.OK, text)


def host_bytes() -> int:
    """The memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def cgroup_limit(own: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> int | None:
    """The bytes that a container or a job on a cluster leaves to this process; None if nothing limits it.

    Args:
        own: the file with the control groups of this process. A group is limited by those that it is in, too.
        root: where the limits of groups are: of version 2 in memory.max, of version 1 in memory/.
    """
    try:
        lines = Path(own).read_text().splitlines()
    except OSError:
        return None
    found = []
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if number == "0":
            folder, file = Path(root), "memory.max"
        elif "memory" in controllers.split(","):
            folder, file = Path(root) / "memory", "memory.limit_in_bytes"
        else:
            continue
        inner = folder / group.lstrip("/")
        found += [limit for each in (inner, *inner.parents) if (limit := _limit(each / file)) is not None]
    return min(found, default=None)


def _limit(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and int(text) < _NO_LIMIT else None  # version 2 has 'max' where there is none


def check_directory(directory: Path | None) -> Iterator[Check]:
    """Whether checkpoints can be written into a directory."""
    if directory is None:
        return
    try:
        path = local_directory(directory, "checkpoints")
    except ValueError as error:
        yield failed("checkpoints", error)
        return
    parent = _existing_parent(path)
    try:
        with tempfile.NamedTemporaryFile(dir=parent) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        fix = "a directory that this user can write, on a file system that supports locks"
        yield Check("checkpoints", Status.ERROR, f"{directory}: {error.strerror}", fix)
        return
    free = shutil.disk_usage(parent).free / 2**30
    yield Check("checkpoints", Status.OK, f"{directory}: {file_system(parent)}, {free:,.1f} GiB free")


def _existing_parent(path: Path) -> Path:
    """The path itself if it exists, otherwise its nearest parent that does."""
    while not path.exists():
        path = path.parent
    return path


def file_system(path: Path, mounts: str = "/proc/mounts") -> str:
    """The type of the file system of a path, or 'unknown' if the system does not report it."""
    try:
        lines = [line.split() for line in Path(mounts).read_text().splitlines()]
    except OSError:
        return "unknown"
    mounted = [fields for fields in lines if len(fields) > 2 and path.is_relative_to(fields[1])]
    return max(mounted, key=lambda fields: len(fields[1]))[2] if mounted else "unknown"


def check_processes(environ: Mapping[str, str]) -> Iterator[Check]:
    """What the variables of a launcher say about this process and the others."""
    try:
        info = detect(environ)
    except ValueError as error:
        yield failed("processes", error)
        return
    if info is None:
        yield Check("processes", Status.OK, "a single process")
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
