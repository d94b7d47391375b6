"""Compiles a step for a target, and analyzes the memory, communication and time of the compiled program."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from zerojax.analysis import hlo, hlo_collectives, hlo_costs
from zerojax.analysis.hardware import Chip, Cluster
from zerojax.analysis.hlo_collectives import Collective, MemoryStats, memory_stats
from zerojax.analysis.memory import Memory
from zerojax.plan import buffers, timeline
from zerojax.plan.buffers import BufferAssignment


class CollectiveSummary(NamedTuple):
    """The collectives of a step with the same kind, axis and dtype: how many run, and the bytes that one device sends.

    `exposed_bytes` are the part of `sent_bytes` that overlaps with no matrix product.
    """

    kind: str
    axis: str
    dtype: str
    count: int
    sent_bytes: float
    exposed_bytes: float


class CompiledStep(NamedTuple):
    """A compiled step. Bytes are per device. What the program or the buffer assignment did not show is None.

    Attributes:
        peak_bytes: arguments, temporaries, and results that are not aliased with an argument.
        temporaries_bytes: the size of the temporaries, as allocated by the compiler's buffer assignment.
        aliased_bytes: the size of the arguments that a result overwrites.
        host_bytes: arguments and temporaries in pinned host memory.
        compile_s: seconds to compile on this machine.
        held: the bytes at the moment of peak memory, by kind; see `held_by_kind`.
        buffers_bytes: the largest sum of the full arrays of collectives that run at the same time.
        copied_bytes: the bytes that loops copy in a step, of arrays of at least 1 MiB.
        unread: why something is None.
    """

    peak_bytes: int
    arguments_bytes: int
    temporaries_bytes: int
    aliased_bytes: int
    host_bytes: int
    compile_s: float
    held: dict[str, int] | None = None
    buffers_bytes: int | None = None
    copied_bytes: int | None = None
    collectives: tuple[CollectiveSummary, ...] | None = None
    prediction: timeline.Prediction | None = None
    unread: str | None = None


_MIN_COPY_BYTES = 2**20  # smaller copies are of counters and events


def compile_step(
    traced: jax.stages.Traced,
    cluster: Cluster,
    axes: dict[str, int],
    estimate: Memory,
    limit_bytes: int,
    dump: Path | None = None,
) -> CompiledStep:
    """Compiles a traced step for the devices of its mesh, whose axes have these names and sizes.

    Args:
        estimate: the memory by formula. If the compiler runs out of device memory, it has the sizes of the arguments
            and of what is in host memory.
        limit_bytes: the device memory that a program may use, see `scheduling_options`.
        dump: a folder for the text of the program (step.txt), the compiler's buffer assignment (buffers.txt) and the
            live ranges (ranges.txt).

    Raises:
        RuntimeError: if the compiler fails with an internal error; the message has a flag that helps, if one is known.
        jax.errors.JaxRuntimeError: if it fails for another reason than device memory.
    """
    with tempfile.TemporaryDirectory() as folder:
        start, options = time.perf_counter(), scheduling_options(cluster.chip, estimate.arguments_bytes, limit_bytes)
        # Compile, or learn from the error how much memory the step needs.
        try:
            program = compile_with_dump(traced, cluster.chip.platform, Path(folder), options)
        except jax.errors.JaxRuntimeError as error:
            needed = required_bytes(str(error))
            if needed is None and "INTERNAL" in str(error):
                raise RuntimeError(internal_error_text(str(error))) from error
            if needed is None:
                raise
            arguments_bytes = estimate.arguments_bytes
            temporaries = needed - arguments_bytes if "temporaries" not in str(error) else needed
            peak, seconds = arguments_bytes + temporaries, time.perf_counter() - start
            unread = "the compiler gave up: " + str(error).splitlines()[0]
            sizes = peak, arguments_bytes, temporaries, 0, estimate.host_bytes
            return CompiledStep(*sizes, seconds, unread=unread)
        # Read what was compiled.
        seconds = time.perf_counter() - start
        text, memory = program.as_text() or "", memory_stats(program)
        if dump:
            dump.mkdir(parents=True, exist_ok=True)
            (dump / "step.txt").write_text(text)
            for name, file in buffers.dump_files(Path(folder)).items():
                (dump / name).write_text(file.read_text())
        read_assignment = functools.cache(lambda: buffers.read_dump(Path(folder)))
        temporaries, host_temporaries = temporaries_bytes(memory, read_assignment)
        analysis = analyze(text, cluster, axes, memory, read_assignment)
    peak, in_host = hlo_collectives.peak_bytes(memory, temporaries), memory.host_argument_size_in_bytes
    sizes = peak, memory.argument_size_in_bytes, temporaries, memory.alias_size_in_bytes, in_host + host_temporaries
    return CompiledStep(*sizes, seconds, **analysis)


# XLA schedules a program for 95% of what its process may use beside the arguments. Of a GPU that is only described, it
# takes 0.8 of the memory for what a process may use (`GetSchedulerMemoryLimit` in XLA's gpu_hlo_schedule.cc, 2026-11).
_DESCRIBED_SHARE = 0.8
_SLOP = "xla_gpu_memory_limit_slop_factor"
_DEFAULT_SLOP = 95  # percent


def scheduling_options(chip: Chip, arguments_bytes: int, limit_bytes: int) -> dict[str, int]:
    """The options with which XLA schedules for `limit_bytes` of a GPU, as in a process that may use them.

    In a program that takes more, XLA overlaps less, and recomputes what it can. There are no options for TPUs, if
    `XLA_FLAGS` has a limit, or if the arguments leave nothing for temporaries.
    """
    described, wanted = int(_DESCRIBED_SHARE * chip.memory_bytes) - arguments_bytes, limit_bytes - arguments_bytes
    if chip.platform != "cuda" or min(described, wanted) <= 0 or _SLOP in os.environ.get("XLA_FLAGS", ""):
        return {}
    return {_SLOP: _DEFAULT_SLOP * wanted // described}


def compile_with_dump(
    traced: jax.stages.Traced, platform: str, folder: Path, options: Mapping[str, int] | None = None
) -> jax.stages.Compiled:
    """Compiles a traced function with options, and lets the compiler write its buffer assignment to a folder."""
    dump: dict[str, Any] = {**(options or {}), "xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}
    return traced.lower(lowering_platforms=(platform,)).compile(compiler_options=dump)


def temporaries_bytes(memory: MemoryStats, read_assignment: Callable[[], BufferAssignment]) -> tuple[int, int]:
    """The bytes of a program's temporaries on the device and in host memory, as allocated.

    They are those of its memory analysis, which for TPUs is more, if no buffer assignment can be read.
    """
    allocated = allocated_in_host = 0
    with contextlib.suppress(ValueError):  # `analyze` has the reason
        assignment = read_assignment()
        allocated, allocated_in_host = assignment.allocated_bytes, assignment.host_bytes
    return allocated or memory.temp_size_in_bytes, allocated_in_host or memory.host_temp_size_in_bytes


def analyze(
    text: str,
    cluster: Cluster,
    axes: dict[str, int],
    memory: MemoryStats,
    read_assignment: Callable[[], BufferAssignment],
) -> dict[str, Any]:
    """What a program that was compiled for a cluster shows, as fields of `CompiledStep`."""
    try:
        program = hlo.parse_program(text)
    except ValueError as error:
        return {"unread": str(error)}
    copies = lambda: (m for m in hlo_costs.moves(program, _MIN_COPY_BYTES, in_loops=True) if m.op == "copy")
    parts: dict[str, Callable[[], object]] = {
        "held": lambda: held_by_kind(program, read_assignment(), memory),
        "buffers_bytes": lambda: hlo_collectives.in_flight_bytes(program),
        "copied_bytes": lambda: sum(move.num_bytes for move in copies()),
        "collectives": lambda: summarize_collectives(hlo_collectives.compiled_collectives(program), axes),
        "prediction": lambda: timeline.predict(program, cluster),
    }
    found: dict[str, Any] = {}
    unread: dict[str, None] = {}
    for name, part in parts.items():
        try:
            found[name] = part()
        except ValueError as error:
            unread[str(error)] = None
    return found | {"unread": "; ".join(unread) or None}


# The fields of a TrainState and the other arguments of a step, by their names in a program.
_TERM_OF_ARGUMENT = {"params": "parameters", "master": "optimizer state", "opt_state": "optimizer state"}
_TERM_OF_ARGUMENT |= {"model_state": "model state", "batch": "batch"}
OTHERS = "others"


def held_by_kind(program: hlo.Program, assignment: BufferAssignment, memory: MemoryStats) -> dict[str, int]:
    """The bytes of a device at the moment of peak memory: those of the arguments and of `buffers.by_kind`.

    They add up to `hlo_collectives.peak_bytes(memory, assignment.allocated_bytes)`. 'others' are counters, keys,
    results that are not aliased, and padding.

    Raises:
        ValueError: if the buffer assignment has no temporaries, but the program does.
    """
    if memory.temp_size_in_bytes and not assignment.allocated_bytes:
        size = memory.temp_size_in_bytes
        raise ValueError(f"buffers: the buffer assignment has no temporaries\n  got:      {size} bytes in the program")
    held: Counter[str] = Counter()
    for i in program.entry.instructions:
        named = re.search(r'op_name="(?:state\.)?(\w+)', i.attributes) if i.op == "parameter" else None
        if named and not any(buffer.space for buffer in i.buffers):
            held[_TERM_OF_ARGUMENT.get(named.group(1), OTHERS)] += i.num_bytes
    held.update(buffers.by_kind(assignment, program))
    held[OTHERS] += hlo_collectives.peak_bytes(memory, assignment.allocated_bytes) - held.total()
    return dict(+held)


def summarize_collectives(found: Iterable[Collective], axes: dict[str, int]) -> tuple[CollectiveSummary, ...]:
    """Adds up collectives by kind, axis and dtype, without those of a single device, which send nothing."""
    sums: dict[tuple[str, str, str], CollectiveSummary] = {}
    for c in found:
        if c.group_size > 1:
            key = c.kind, _axes_text(c.group, axes), c.dtype
            _, _, _, count, sent, exposed = sums.get(key, (*key, 0, 0.0, 0.0))
            exposed += c.sent_bytes * c.exposed
            sums[key] = CollectiveSummary(*key, count + c.trips, sent + c.sent_bytes, exposed)
    return tuple(sorted(sums.values(), key=lambda summary: -summary.sent_bytes))


def _axes_text(group: tuple[int, ...], axes: dict[str, int]) -> str:
    """The names of the mesh axes that a group spans. Its devices are numbered in the order of the mesh."""
    places = np.unravel_index(np.array(group), tuple(axes.values()))
    return ", ".join(name for name, place in zip(axes, places, strict=True) if len(set(place.tolist())) > 1)


# What helps against internal errors of the compilers that come with the supported versions of JAX.
_HELP = {
    # jax 0.10.2: a product with a bias and an activation, of many rows, such as 64 images of ViT-L/16
    r"[Cc]ouldn't find output tile sizes|[Tt]riton": "XLA_FLAGS=--xla_gpu_enable_triton_gemm=false in the environment: "
    "cuBLAS then computes the matrix products"
}


def internal_error_text(message: str) -> str:
    """What to tell of an internal error of a compiler: its first line, and what helps."""
    fix = "no flag is known to help; other rows or another remat give another program, and the formula needs none"
    fix = next((text for pattern, text in _HELP.items() if re.search(pattern, message)), fix)
    first = message.strip().splitlines()[0][:300]
    return f"plan: the compiler failed with an internal error\n  got:      {first}\n  fix:      {fix}"


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def required_bytes(message: str) -> int | None:
    """The bytes that a step needs, from the compiler's message that it is out of memory, or None for others.

    The TPU compiler reports either the temporaries ("total memory required for HLO temporaries (81.64G)") or all memory
    ("Used 30.5G of 15.75G hbm").
    """
    found = re.search(r"(?:temporaries \(|[Uu]sed |requires? )([\d.]+)([KMGT]?)i?B?\b", message)
    if "RESOURCE_EXHAUSTED" not in message or found is None:
        return None
    return int(float(found.group(1)) * _UNITS[found.group(2)])
