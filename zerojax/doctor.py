"""Checks that this machine can run a training job, with a fix for each failure."""

from __future__ import annotations

import enum
import fcntl
import glob
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata, util
from pathlib import Path
from typing import Any, NamedTuple

import jax

from zerojax import versions
from zerojax.directories import local_directory
from zerojax.processes.detect import detect


class Status(enum.Enum):
    """The status of a check. INFO is neither a success nor a failure."""

    OK = "ok"
    INFO = "info"
    ERROR = "error"


class Check(NamedTuple):
    """A check of this machine.

    Attributes:
        name: what was checked.
        status: whether it succeeded.
        details: what was found.
        fix: how to fix a failure; empty if there is none.
    """

    name: str
    status: Status
    details: str
    fix: str = ""


def diagnose(directory: Path | None = None, environ: Mapping[str, str] | None = None) -> list[Check]:
    """Runs all checks.

    Args:
        directory: directory for checkpoints. It must be writable, on a file system that supports locks.
        environ: environment variables; those of this process by default.

    Returns:
        The checks, in the order in which they are shown.

    Cost: initializes the devices of JAX; writes an empty file into the directory and deletes it.
    """
    environ = os.environ if environ is None else environ
    parts: list[Callable[[], Iterator[Check]]] = [
        _versions,
        lambda: _devices(environ),
        _memory,
        lambda: _directory(directory),
        lambda: _processes(environ),
        _compilers,
    ]
    return [check for part in parts for check in part()]


def _versions() -> Iterator[Check]:
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


def _devices(environ: Mapping[str, str], find: Callable[[str], list[str]] = glob.glob) -> Iterator[Check]:
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
        fix = f"{_ACCELERATORS[kind][1]}; python -c 'import jax; jax.devices({kind!r})' shows the reason"
        yield Check("devices", Status.ERROR, f"{text}, although this machine has {file}", fix)


def _memory() -> Iterator[Check]:
    device = jax.devices()[0]
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    can_offload = "pinned_host" in kinds
    yield Check("memory kinds", Status.OK if can_offload else Status.INFO, ", ".join(kinds))
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        yield Check("device memory", Status.OK, f"{stats['bytes_limit'] / 2**30:.1f} GiB available to a program")
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield Check("host memory", Status.OK, f"{available / 2**30:.1f} of {total / 2**30:.1f} GiB free")


def _directory(directory: Path | None) -> Iterator[Check]:
    if directory is None:
        return
    try:
        path = local_directory(directory, "checkpoints")
    except ValueError as error:
        yield _failure("checkpoints", error)
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


def _failure(name: str, error: ValueError) -> Check:
    """The check that an error of three lines reports: what is wrong, what was found, and the fix."""
    what, got, fix, *_ = [*str(error).split("\n"), "", ""]
    text = f"{what.partition(': ')[2]} ({got.removeprefix('  got:').strip()})"
    return Check(name, Status.ERROR, text, fix.removeprefix("  fix:").strip())


def _processes(environ: Mapping[str, str]) -> Iterator[Check]:
    try:
        info = detect(environ)
    except ValueError as error:
        yield _failure("processes", error)
        return
    if info is None:
        yield Check("processes", Status.OK, "a single process")
    elif info.count is None:
        yield Check("processes", Status.OK, "detected by JAX")
    else:
        coordinator = f", process 0 is {info.coordinator}" if info.coordinator else ""
        yield Check("processes", Status.OK, f"{info.found}: process {info.index} of {info.count}{coordinator}")


def _compilers() -> Iterator[Check]:
    """The compilers with which `zerojax plan --compile` compiles for accelerators that this machine does not have."""
    for kind, package in (("GPU", "jax_plugins.xla_cuda13"), ("TPU", "libtpu")):
        installed = _is_installed(package)
        missing = f"not installed; only zerojax plan --compile needs it: pip install 'zerojax[plan-{kind.lower()}]'"
        yield Check(f"{kind} compiler", Status.OK if installed else Status.INFO, "installed" if installed else missing)


def _is_installed(package: str) -> bool:
    try:
        return util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def table(checks: list[Check]) -> Any:
    """The checks as a table for the terminal."""
    from rich.table import Table
    from rich.text import Text

    rows = Table(show_header=False, box=None, pad_edge=False)
    for _ in range(3):
        rows.add_column(overflow="fold")
    colors = {Status.OK: "green", Status.INFO: "dim", Status.ERROR: "bold red"}
    for check in checks:
        text = check.details + (f"\nfix: {check.fix}" if check.fix else "")
        rows.add_row(Text(check.status.value, style=colors[check.status]), check.name, Text(text))
    return rows
