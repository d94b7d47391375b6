"""What the compiler for a target makes of a step, or what it says where memory does not do."""

from __future__ import annotations

import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from zerojax.analysis import hlo, hlo_collectives
from zerojax.analysis.hardware import Cluster
from zerojax.plan import buffers, timeline
from zerojax.plan.buffers import Buffers


class Traffic(NamedTuple):
    """Collectives of a step that are alike.

    Attributes:
        kind: 'all-gather', 'reduce-scatter', ...
        axis: of the mesh, by the number of devices that take part; that number where it is no axis.
        dtype: on the wire.
        count: how many run in a step.
        sent_bytes: by one device.
        exposed_bytes: those of them with no matrix product beside.
    """

    kind: str
    axis: str
    dtype: str
    count: int
    sent_bytes: float
    exposed_bytes: float


class Reading(NamedTuple):
    """What was read in the text of a program and in its buffer plan; what could not be read is None.

    Attributes:
        held: bytes of a device when memory is fullest, by what they are; see `held_by_kind`.
        buffers_bytes: the most of collectives that are under way at the same time, in full form.
        copied_bytes: what loops copy of arrays of a MiB or more.
        traffic: what is sent.
        prediction: of the time.
        unread: why something is None.
    """

    held: dict[str, int] | None = None
    buffers_bytes: int | None = None
    copied_bytes: int | None = None
    traffic: tuple[Traffic, ...] | None = None
    prediction: timeline.Prediction | None = None
    unread: str | None = None


class CompiledStep(NamedTuple):
    """Bytes are those of one device.

    Attributes:
        peak_bytes: arguments, temporaries, and results that have no argument's place.
        arguments_bytes, temporaries_bytes, aliased_bytes: of the program's buffers.
        host_bytes: temporaries in pinned host memory.
        compile_s: what compiling took on this machine.
        reading: of the text.
        text: of the program; '' where the compiler gave up.
    """

    peak_bytes: int
    arguments_bytes: int
    temporaries_bytes: int
    aliased_bytes: int
    host_bytes: int
    compile_s: float
    reading: Reading
    text: str


_MOVED_BYTES = 2**20  # smaller copies are of counters and events


def compile_step(
    traced: Any, cluster: Cluster, axes: dict[str, int], arguments_bytes: int, dump: Path | None = None
) -> CompiledStep:
    """Compiles a traced step for the devices of its mesh.

    Args:
        traced: `step.trace(state, batch)`.
        cluster: which these devices are.
        axes: names and sizes of the mesh axes.
        arguments_bytes: of the step, for the case that the compiler gives up for want of memory.
        dump: a folder for the program's text (step.txt), and for the compiler's plan of its buffers (buffers.txt) and
            of their lives (ranges.txt).

    Raises:
        jax.errors.JaxRuntimeError: what the compiler refuses for another reason than memory.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        start = time.perf_counter()
        try:
            program = traced.lower(lowering_platforms=(cluster.chip.platform,)).compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            needed = memory_refused(str(error))
            if needed is None:
                raise
            temporaries = needed - arguments_bytes if "temporaries" not in str(error) else needed
            peak, seconds = arguments_bytes + temporaries, time.perf_counter() - start
            given_up = Reading(unread="the compiler gave up: " + str(error).splitlines()[0])
            return CompiledStep(peak, arguments_bytes, temporaries, 0, 0, seconds, given_up, "")
        seconds = time.perf_counter() - start
        text, memory = program.as_text(), program.memory_analysis()
        if dump:
            dump.mkdir(parents=True, exist_ok=True)
            (dump / "step.txt").write_text(text)
            for name, file in buffers.files(Path(folder)).items():
                (dump / name).write_text(file.read_text())
        reading = read(text, cluster, axes, memory, lambda: buffers.dumped(Path(folder)))
    return CompiledStep(
        hlo_collectives.peak_bytes(memory),
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.host_temp_size_in_bytes,
        seconds,
        reading,
        text,
    )


def read(text: str, cluster: Cluster, axes: dict[str, int], memory: Any, planned: Callable[[], Buffers]) -> Reading:
    """What the text of a program for the cluster tells.

    Args:
        text: of the program.
        cluster, axes: see `compile_step`.
        memory: of its `memory_analysis()`.
        planned: returns the plan of its buffers.
    """
    try:
        program = hlo.read(text)
    except ValueError as error:
        return Reading(unread=str(error))
    large = lambda: (m for m in hlo_collectives.moves_in_loops(program, _MOVED_BYTES) if m.op == "copy")
    parts: dict[str, Callable[[], Any]] = {
        "held": lambda: held_by_kind(program, planned(), memory),
        "buffers_bytes": lambda: hlo_collectives.in_flight_bytes(program),
        "copied_bytes": lambda: sum(move.num_bytes for move in large()),
        "traffic": lambda: traffic_of(hlo_collectives.collectives(program), axes),
        "prediction": lambda: timeline.predict(program, cluster),
    }
    found, unread = {}, []
    for name, part in parts.items():
        try:
            found[name] = part()
        except ValueError as error:
            unread.append(str(error))
    return Reading(**found, unread="; ".join(dict.fromkeys(unread)) or None)


# The fields of a TrainState and the arguments of a step, as the parameters of a program name them.
_ARGUMENTS = {"params": "parameters", "master": "optimizer state", "opt_state": "optimizer state"}
_ARGUMENTS |= {"model_state": "model state", "batch": "batch"}
OTHERS = "others"


def held_by_kind(program: hlo.Program, planned: Buffers, memory: Any) -> dict[str, int]:
    """Bytes of a device when memory is fullest: those of the arguments, and of `buffers.by_kind`.

    They add up to `hlo_collectives.peak_bytes(memory)`. 'others' are counters and keys, results without an argument's
    place, padding, and on TPUs what their compiler reserves in addition to its plan.
    """
    if memory.temp_size_in_bytes and not planned.allocated_bytes:
        raise ValueError(f"buffers: {memory.temp_size_in_bytes} bytes of temporaries, and none in the compiler's plan")
    held: Counter[str] = Counter()
    for i in program.entry.instructions:
        named = re.search(r'op_name="(?:state\.)?(\w+)', i.attributes) if i.op == "parameter" else None
        if named and not any(buffer.space for buffer in i.buffers):
            held[_ARGUMENTS.get(named.group(1), OTHERS)] += i.num_bytes
    held.update(buffers.by_kind(planned, program))
    held[OTHERS] += hlo_collectives.peak_bytes(memory) - held.total()
    return dict(+held)


def traffic_of(found: list[hlo_collectives.Collective], axes: dict[str, int]) -> tuple[Traffic, ...]:
    """Collectives, added up by kind, axis and dtype. What one device does alone is left out: it sends nothing."""
    alike: dict[tuple[str, str, str], list[hlo_collectives.Collective]] = {}
    for c in found:
        if c.group_size > 1:
            alike.setdefault((c.kind, _axis(c.group_size, axes), c.dtype), []).append(c)
    return tuple(
        Traffic(
            *key,
            sum(c.trips for c in those),
            sum(c.sent_bytes for c in those),
            sum(c.sent_bytes for c in those if c.exposed),
        )
        for key, those in sorted(alike.items(), key=lambda item: -sum(c.sent_bytes for c in item[1]))
    )


def _axis(group_size: int, axes: dict[str, int]) -> str:
    names = [name for name, size in axes.items() if size == group_size]
    return names[0] if len(names) == 1 else f"{group_size} devices"


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def memory_refused(message: str) -> int | None:
    """Bytes that a step would need, by the message of a compiler that gives up because of them; None: it says else.

    The TPU compiler counts the temporaries alone ("total memory required for HLO temporaries (81.64G)"), or all of it
    ("Used 30.5G of 15.75G hbm").
    """
    found = re.search(r"(?:temporaries \(|[Uu]sed |requires? )([\d.]+)([KMGT]?)i?B?\b", message)
    if "RESOURCE_EXHAUSTED" not in message or found is None:
        return None
    return int(float(found.group(1)) * _UNITS[found.group(2)])
