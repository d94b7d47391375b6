"""What of a machine keeps a run from starting, or from running where it should: a check for each, with what to do."""

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

from zerojax.processes.detect import detect
from zerojax.versions import TESTED, check


class Status(enum.Enum):
    """The status of a check: fine, for information, or wrong."""

    OK = "ok"
    INFO = "info"
    WRONG = "wrong"


class Check(NamedTuple):
    """What was looked at, what was found, and what to do if it is wrong."""

    name: str
    status: Status
    found: str
    fix: str = ""


def diagnose(directory: Path | None = None, environ: Mapping[str, str] | None = None) -> list[Check]:
    """All checks of this machine.

    Args:
        directory: for checkpoints: that it can be written, locked, and on which file system it is.
        environ: variables of the environment; by default this process's.

    Cost: starts JAX, if nobody has; writes an empty file into the directory and deletes it.
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
        check({name: installed[name] for name in TESTED})
    except ImportError as error:
        yield Check("versions", Status.WRONG, text, str(error).splitlines()[-1].removeprefix("  fix:").strip())
    else:
        yield Check("versions", Status.OK, text)


# What drivers make for their devices, and the package that JAX reaches them with.
_ACCELERATORS = {
    "gpu": (("/dev/nvidia[0-9]*",), "pip install 'jax[cuda13]'"),
    "tpu": (("/dev/accel[0-9]*", "/dev/vfio/[0-9]*"), "pip install 'jax[tpu]'"),
}


def _devices(environ: Mapping[str, str], find: Callable[[str], list[str]] = glob.glob) -> Iterator[Check]:
    """A CPU where there is an accelerator is wrong, unless somebody asked for it."""
    devices = jax.devices()
    text = f"{len(devices)} of {devices[0].device_kind!r} ({devices[0].platform})"
    files = {kind: [file for p in patterns for file in find(p)] for kind, (patterns, _) in _ACCELERATORS.items()}
    there = [(kind, found[0]) for kind, found in files.items() if found]
    if devices[0].platform != "cpu" or not there:
        yield Check("devices", Status.OK if devices[0].platform != "cpu" else Status.INFO, text)
    elif "cpu" in environ.get("JAX_PLATFORMS", ""):
        yield Check("devices", Status.INFO, f"{text}, as JAX_PLATFORMS={environ['JAX_PLATFORMS']} says")
    else:
        kind, file = there[0]
        fix = f"{_ACCELERATORS[kind][1]}; python -c 'import jax; jax.devices({kind!r})' tells why"
        yield Check("devices", Status.WRONG, f"{text}, though there is {file}", fix)


def _memory() -> Iterator[Check]:
    device = jax.devices()[0]
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    offload = "pinned_host" in kinds
    yield Check("memory kinds", Status.OK if offload else Status.INFO, ", ".join(kinds))
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        yield Check("device memory", Status.OK, f"{stats['bytes_limit'] / 2**30:.1f} GiB for a program")
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield Check("host memory", Status.OK, f"{available / 2**30:.1f} GiB free of {total / 2**30:.1f}")


def _directory(directory: Path | None) -> Iterator[Check]:
    if directory is None:
        return
    where = _existing(directory.absolute())
    try:
        with tempfile.NamedTemporaryFile(dir=where) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        fix = "rights to write there, on a file system with locks"
        yield Check("checkpoints", Status.WRONG, f"{directory}: {error.strerror}", fix)
        return
    free = shutil.disk_usage(where).free / 2**30
    yield Check("checkpoints", Status.OK, f"{directory}: {file_system(where)}, {free:,.1f} GiB free")


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def file_system(path: Path, mounts: str = "/proc/mounts") -> str:
    """The type of the file system that a path is on; 'unknown' where the system does not tell."""
    try:
        lines = [line.split() for line in Path(mounts).read_text().splitlines()]
    except OSError:
        return "unknown"
    above = [fields for fields in lines if len(fields) > 2 and path.is_relative_to(fields[1])]
    return max(above, key=lambda fields: len(fields[1]))[2] if above else "unknown"


def _processes(environ: Mapping[str, str]) -> Iterator[Check]:
    try:
        found = detect(environ)
    except ValueError as error:
        what, got, fix, *_ = [*str(error).split("\n"), "", ""]
        text = f"{what.removeprefix('processes: ')} ({got.removeprefix('  got:').strip()})"
        yield Check("processes", Status.WRONG, text, fix.removeprefix("  fix:").strip())
        return
    if found is None:
        yield Check("processes", Status.OK, "one alone")
    else:
        at = f", process 0 is {found.coordinator}" if found.coordinator else ""
        yield Check("processes", Status.OK, f"{found.found}: process {found.index} of {found.count}{at}")


def _compilers() -> Iterator[Check]:
    for extra, package in (("plan-gpu", "jax_plugins.xla_cuda13"), ("plan-tpu", "libtpu")):
        there = _has(package)
        text = "installed" if there else f"not installed; zerojax plan --compile needs zerojax[{extra}]"
        yield Check(f"compiler, {extra}", Status.OK if there else Status.INFO, text)


def _has(package: str) -> bool:
    try:
        return util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def table(checks: list[Check]) -> Any:
    """For a terminal."""
    from rich.table import Table
    from rich.text import Text

    shown = Table(show_header=False, box=None, pad_edge=False)
    for _ in range(3):
        shown.add_column(overflow="fold")
    colours = {Status.OK: "green", Status.INFO: "dim", Status.WRONG: "bold red"}
    for each in checks:
        text = each.found + (f"\nfix: {each.fix}" if each.fix else "")
        shown.add_row(Text(each.status.value, style=colours[each.status]), each.name, Text(text))
    return shown
