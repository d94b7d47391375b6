"""What the compiler for a target makes of a step, or what it says where memory does not do."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax

from zerojax import compiled, hlo
from zerojax.plan import timeline
from zerojax.plan.hardware import Cluster


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
    """What was read in the text of a program, in which what could not be read is None.

    Attributes:
        buffers_bytes: the most of collectives that are under way at the same time, in full form.
        copied_bytes: what loops copy of arrays of a MiB or more.
        traffic: what is sent.
        prediction: of the time.
        unread: why something is None.
    """

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
        dump: a folder that the program's text is written into, as step.txt.

    Raises:
        jax.errors.JaxRuntimeError: what the compiler refuses for another reason than memory.
    """
    start = time.perf_counter()
    try:
        program = traced.lower(lowering_platforms=(cluster.chip.platform,)).compile()
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
    return CompiledStep(
        compiled.peak_bytes(memory),
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.host_temp_size_in_bytes,
        seconds,
        read(text, cluster, axes),
        text,
    )


def read(text: str, cluster: Cluster, axes: dict[str, int]) -> Reading:
    """What the text of a program for the cluster tells."""
    try:
        program = hlo.read(text)
        found = compiled.collectives(program)
        copied = sum(m.num_bytes for m in compiled.moves_in_loops(program, _MOVED_BYTES) if m.op == "copy")
        reading = Reading(compiled.in_flight_bytes(program), copied, traffic_of(found, axes))
    except ValueError as error:
        return Reading(unread=str(error))
    try:
        return reading._replace(prediction=timeline.predict(program, cluster))
    except ValueError as error:
        return reading._replace(unread=str(error))


def traffic_of(found: list[compiled.Collective], axes: dict[str, int]) -> tuple[Traffic, ...]:
    """Collectives, added up by kind, axis and dtype. What one device does alone is left out: it sends nothing."""
    alike: dict[tuple[str, str, str], list[compiled.Collective]] = {}
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
