"""Checks environment variables that were set for another run and are in the way of this one."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from zerojax.cli.machine import Check, Status

_TRUE, _FALSE = "y|yes|t|true|on|1", "n|no|f|false|off|0"  # as JAX reads them (jax/_src/config.py)
_SET, _NOT_FALSE = ".+", rf"(?!({_FALSE})$).*"
_SHARES = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
_INTERFACES = "NCCL_SOCKET_IFNAME"


class _Rule(NamedTuple):
    """What values of a variable or a flag are in the way, as a regular expression, and what they do."""

    name: str
    values: str
    why: str
    status: Status = Status.WARNING


_VARIABLES = (
    # NCCL: user guide, environment variables, 2026.
    _Rule("NCCL_P2P_DISABLE", _TRUE, "GPUs of a host send through host memory, not over NVLink"),
    _Rule("NCCL_P2P_LEVEL", "LOC|0", "GPUs of a host send through host memory, not over NVLink"),
    _Rule("NCCL_SHM_DISABLE", _TRUE, "GPUs of a host that are not connected send over the network"),
    _Rule("NCCL_IB_DISABLE", _TRUE, "hosts send over sockets, not over InfiniBand or RoCE"),
    _Rule("NCCL_NET_GDR_LEVEL", "LOC|0", "network cards read GPU memory through the CPU"),
    _Rule("NCCL_DEBUG", "INFO|TRACE", "each process writes hundreds of lines", Status.INFO),
    _Rule("CUDA_LAUNCH_BLOCKING", _TRUE, "the host waits for every kernel, and nothing overlaps"),
    # JAX: documentation of its configuration options and of GPU memory allocation, 2026.
    _Rule("JAX_DISABLE_JIT", _TRUE, "nothing is compiled: steps run operation by operation"),
    _Rule("JAX_DEBUG_NANS", _TRUE, "every result is copied to the host and checked, and a step that skips raises"),
    _Rule("JAX_DEBUG_INFS", _TRUE, "every result is copied to the host and checked, and a step that skips raises"),
    _Rule("JAX_ENABLE_X64", _TRUE, "arrays are float64 by default, twice as large, and slower"),
    _Rule("JAX_CHECK_TRACER_LEAKS", _TRUE, "tracing is slower, and functions are traced again"),
    _Rule("XLA_PYTHON_CLIENT_ALLOCATOR", "platform", "every allocation waits for the device, slowly"),
    _Rule("XLA_PYTHON_CLIENT_PREALLOCATE", _FALSE, "memory fragments: a step may run out of it", Status.INFO),
    _Rule("LIBTPU_INIT_ARGS", _SET, "flags for the TPU compiler from elsewhere", Status.INFO),
)
_FLAGS = (
    _Rule("--xla_dump_to", _SET, "every compilation writes files, up to gigabytes for a large model"),
    _Rule("--xla_gpu_autotune_level", "0", "kernels are not tuned, and slower"),
    _Rule("--xla_backend_optimization_level", "0|1", "code is not optimized"),
    _Rule("--xla_disable_all_hlo_passes", _NOT_FALSE, "the compiler optimizes nothing"),
    _Rule("--xla_gpu_enable_latency_hiding_scheduler", _FALSE, "communication does not overlap with computation"),
    _Rule("--xla_gpu_deterministic_ops", _NOT_FALSE, "reductions are slower, some operations fail", Status.INFO),
)


def check_variables(environ: Mapping[str, str], interfaces: Sequence[str], is_alone: bool) -> Iterator[Check]:
    """Yields a check for each variable that is in the way, or one that says that none is.

    Whether one is depends on the network interfaces of this machine, and on whether there are other processes.
    """
    found = [
        *_by_rules(environ, _VARIABLES, lambda name: f"unset {name}"),
        *_interfaces(environ.get(_INTERFACES, ""), interfaces, is_alone),
        *_shares(environ),
        *_by_rules(_parsed_flags(environ.get("XLA_FLAGS", "")), _FLAGS, lambda name: f"remove {name} from XLA_FLAGS"),
    ]
    yield from found or [Check("environment", Status.OK, "no variable is in the way")]


def _by_rules(values: Mapping[str, str], rules: tuple[_Rule, ...], fix: Callable[[str], str]) -> Iterator[Check]:
    for rule in rules:
        if rule.name in values and re.fullmatch(rule.values, values[rule.name].strip(), re.IGNORECASE):
            yield Check("environment", rule.status, f"{rule.name}={values[rule.name]}: {rule.why}", fix(rule.name))


def _parsed_flags(text: str) -> dict[str, str]:
    """The flags in XLA_FLAGS. One without a value is 'true', and of several the last one counts."""
    try:
        words = shlex.split(text)
    except ValueError:  # a quote that is not closed
        words = text.split()
    return {name: value if equals else "true" for name, equals, value in (word.partition("=") for word in words)}


def _shares(environ: Mapping[str, str]) -> Iterator[Check]:
    """The shares of a GPU's memory that programs may use, 75% by default."""
    for name in filter(environ.__contains__, _SHARES):
        try:
            share = float(environ[name])
        except ValueError:
            share = 0.0
        if not share > 0:
            why = "not a share of the memory"
        elif share < 0.5:
            why = "programs may use less than half of the memory of a GPU"
        elif share > 0.95:
            why = "the driver and NCCL need some of the rest, which plans take to be 5%"
        else:
            continue
        status = Status.WARNING if share > 0 else Status.ERROR
        yield Check("environment", status, f"{name}={environ[name]}: {why}", f"unset {name}")


def _interfaces(value: str, interfaces: Sequence[str], is_alone: bool) -> Iterator[Check]:
    if not value:
        return
    chosen = _chosen(value, interfaces)
    others = [name for name in interfaces if name != "lo"]
    given, fix = f"{_INTERFACES}={value}", f"unset {_INTERFACES}" + f", or one of {', '.join(others)}" * bool(others)
    if not chosen:
        yield Check("environment", Status.ERROR, f"{given}: this machine has no such network interface", fix)
    elif all(name == "lo" for name in chosen):
        status = Status.WARNING if is_alone else Status.ERROR
        yield Check("environment", status, f"{given}: other machines cannot be reached over lo", fix)


def _chosen(value: str, interfaces: Sequence[str]) -> list[str]:
    """The interfaces of a list of beginnings of names, of names behind '=', or of neither behind '^'."""
    excludes, value = value.startswith("^"), value.removeprefix("^")
    exact, value = value.startswith("="), value.removeprefix("=")
    names = [name for name in value.split(",") if name]
    matches = lambda each: any(each == name if exact else each.startswith(name) for name in names)
    return [each for each in interfaces if matches(each) != excludes]
