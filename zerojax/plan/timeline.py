"""The predicted time of a compiled step: its schedule walked with a lane for what computes and one for each link.

A device computes, sends over its links (on a TPU over those along each dim of the torus), and copies to and from its
host; each of these is a lane, which does one thing at a time, in the order of the schedule. No lane slows another down:
collectives take no part of a GPU's cores here, and copies none of the memory's rate, so that a prediction is rather too
fast than too slow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from zerojax.analysis.costs import computed_bytes, dot_flops, memory_bytes
from zerojax.analysis.hardware import Chip, Cluster
from zerojax.analysis.hlo import HOST, Block, Buffer, Instruction, Program, refuse, trip_count
from zerojax.analysis.hlo_collectives import groups, multiplies, parts, results, spans

COMPUTE, MEMORY, STARTS = "compute", "memory", "starts of kernels"
TO_HOST, FROM_HOST, COPIES = "copies to the host", "copies from the host", "copies beside compute"
_COMPUTING = (COMPUTE, MEMORY, STARTS)  # what the computing lane is busy with

# Custom calls that reserve, mark or regroup buffers, and compute nothing.
_MARKS = frozenset(["AllocateBuffer", "AssumeGatherIndicesInBound", "AsyncCollectiveDone", "AsyncCollectiveStart"])
_MARKS |= frozenset(["ConcatBitcast", "GatherScatterIndicesBitpacked"])
_BF16 = frozenset(["bf16", "f16"])


class Span(NamedTuple):
    """What a lane does from one second to another; `bound` is what limits it: 'compute', 'memory' or its lane."""

    lane: str
    name: str
    bound: str
    start_s: float
    end_s: float


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop of the step. `spans` are those of one iteration in its steady state, from the iteration's start on.

    Attributes:
        name: of the instruction.
        trips: how often it runs each time that it is reached.
        iteration_s: seconds of that iteration.
        spans: in the order of their starts; a loop inside it is one span.
    """

    name: str
    trips: int
    iteration_s: float
    spans: tuple[Span, ...]


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The time of a step.

    Attributes:
        step_s: seconds of the whole step.
        busy_s: seconds by what is busy: 'compute' (instructions that matrix products limit), 'memory' (those that
            memory limits) and 'starts of kernels', which share one lane; and each other lane.
        products_s: of the matrix products alone.
        spans: of the step outside loops, each loop being one span.
        loops: by name, in the order in which they end.
    """

    step_s: float
    busy_s: Mapping[str, float]
    products_s: float
    spans: tuple[Span, ...]
    loops: tuple[Loop, ...]

    @property
    def computing_s(self) -> float:
        """Seconds in which the computing lane is busy."""
        return sum(self.busy_s.get(part, 0) for part in _COMPUTING)

    @property
    def waiting_s(self) -> float:
        """Seconds in which nothing computes: a link or a copy is waited for."""
        return self.step_s - self.computing_s

    @property
    def bound_by(self) -> str:
        """The lane that is busy longest; if that is the computing one, what limits most of its time."""
        others = {lane: seconds for lane, seconds in self.busy_s.items() if lane not in _COMPUTING}
        longest = max(others, key=others.__getitem__, default=None)
        if longest is not None and others[longest] > self.computing_s:
            return longest
        return max(_COMPUTING, key=lambda part: self.busy_s.get(part, 0))


@dataclasses.dataclass
class _Clock:
    """Where a walk is. `free` is when each lane is free; `arrival` when what an instruction started has ended."""

    now: float = 0.0
    products: float = 0.0
    free: dict[str, float] = dataclasses.field(default_factory=dict)
    busy: dict[str, float] = dataclasses.field(default_factory=dict)
    spans: list[Span] = dataclasses.field(default_factory=list)
    arrival: dict[Instruction, float] = dataclasses.field(default_factory=dict)

    def spend(self, lane: str, seconds: float) -> None:
        self.busy[lane] = self.busy.get(lane, 0) + seconds

    def occupy(self, lanes: tuple[str, ...], name: str, seconds: float) -> float:
        """Puts something on lanes other than the computing one, all at once. Returns when it ends."""
        start = max(self.now, *(self.free.get(lane, 0) for lane in lanes))
        for lane in lanes:
            self.free[lane] = start + seconds
            self.spend(lane, seconds)
            self.spans.append(Span(lane, name, lane, start, start + seconds))
        return start + seconds

    def copy(self) -> _Clock:
        return _Clock(self.now, self.products, dict(self.free), dict(self.busy))


def predict(program: Program, cluster: Cluster) -> Prediction:
    """The time of one step of a compiled program on a cluster.

    An instruction takes the longer of its products' flops and its bytes of memory over the chip's rates, and the time
    from one kernel to the next. A collective takes the time of a ring: the bytes that a device sends over the rate of
    the links that its group crosses, and what each step of the ring waits. Of a loop two iterations are walked; the
    second counts for all that follow.

    Args:
        program: as `hlo.read` returns it, compiled for the devices of the cluster in their order.
        cluster: of `hardware.cluster`.

    Raises:
        ValueError: a program for another number of devices, or one that is not understood: a loop without a trip count,
            a branch, a custom call that is no matrix product.
    """
    if program.num_devices != cluster.num_devices:
        raise ValueError(
            f"timeline: the program is not one for {cluster.target}\n"
            f"  got:      {program.num_devices} devices, not {cluster.num_devices}\n"
            f"  fix:      compile it for this target; for several slices the compiler writes the program of one, and"
            f" what that sends to the others is not read"
        )
    walk = _Walk(cluster)
    clock = _Clock()
    walk.run(program.entry.instructions, clock)
    return Prediction(clock.now, clock.busy, clock.products, tuple(clock.spans), tuple(walk.loops.values()))


class _Walk:
    def __init__(self, cluster: Cluster):
        self.cluster, self.chip = cluster, cluster.chip
        self.loops: dict[str, Loop] = {}

    def run(self, instructions: tuple[Instruction, ...], clock: _Clock) -> None:
        under_way = spans(Block(instructions, 1, False))
        starts, ends = {span.start: span for span in under_way}, {span.end: span for span in under_way}
        for k, i in enumerate(instructions):
            if k in starts:
                core = starts[k].core
                lanes, seconds = self.collective(core)
                clock.arrival[core] = clock.occupy(lanes, core.op.removesuffix("-start"), seconds)
            if i.op == "while":
                self.loop(i, clock)
            elif i.op == "call":
                self.run(i.called["to_apply"][0].instructions, clock)
            elif i.op == "fusion" or (k not in starts and k not in ends):  # on TPUs fusions compute beside collectives
                self.step(i, clock)
            if k in ends:
                clock.now = max(clock.now, clock.arrival[ends[k].core])

    def collective(self, core: Instruction) -> tuple[tuple[str, ...], float]:
        """(its lanes, its seconds): those of the group that takes longest."""
        num_devices = self.cluster.num_devices
        sent = sum(part.sent_bytes for part in parts(core, num_devices))
        rounds = 2 if core.op.startswith("all-reduce") else 1
        routes = [self.cluster.route(group) for group in groups(core, num_devices)]
        seconds, lanes = max((rounds * route.latency_s + sent / route.rate, route.lanes) for route in routes)
        return lanes, seconds if sent else 0.0

    def loop(self, loop: Instruction, clock: _Clock) -> None:
        trips, (body,) = trip_count(loop), loop.called["body"]
        if trips is None:
            raise refuse(loop, "a loop whose trip count is not in the text")
        begin = clock.now
        before = iteration = clock.copy()
        for _ in range(min(trips, 2)):
            before, iteration = iteration, iteration.copy()
            self.run(body.instructions, iteration)
        if trips:
            at = before.now
            inside = tuple(s._replace(start_s=s.start_s - at, end_s=s.end_s - at) for s in iteration.spans)
            self.loops[loop.name] = Loop(loop.name, trips, iteration.now - at, inside)
        rest = max(trips - 2, 0)
        grown = lambda last, previous: {k: v + rest * (v - previous.get(k, 0)) for k, v in last.items()}
        clock.now = iteration.now + rest * (iteration.now - before.now)
        clock.products = iteration.products + rest * (iteration.products - before.products)
        clock.free, clock.busy = grown(iteration.free, before.free), grown(iteration.busy, before.busy)
        clock.spans.append(Span(COMPUTE, loop.name, "", begin, clock.now))

    def step(self, i: Instruction, clock: _Clock) -> None:
        """Any instruction but a loop, a call, and the start and the end of a collective."""
        if i.op.endswith("-done"):
            start = _start_of(i)
            if start not in clock.arrival:
                raise refuse(i, "an end without a start in the same computation")
            clock.now = max(clock.now, clock.arrival[start])
        elif i.op in ("copy-start", "slice-start", "fusion-start"):
            lane, num_bytes = _copied(i)
            rate = self.chip.memory_rate if lane == COPIES else self.chip.host_rate
            clock.arrival[i] = clock.occupy((lane,), i.name, num_bytes / rate.effective)
        elif i.op.endswith(("-start", "-update")) or i.op == "conditional":
            raise refuse(i, "an instruction whose time is not read")
        elif i.op == "custom-call" and not multiplies(i):
            if i.target not in _MARKS:
                raise refuse(i, "a custom call whose time is not read")
        elif _moves_between_memories(i):
            raise refuse(i, "a transfer to or from the host that is not a copy")
        else:
            self.compute(i, clock)

    def compute(self, i: Instruction, clock: _Clock) -> None:
        holds_collective = i.op == "fusion" and spans(Block((i,), 1, False))
        num_bytes = computed_bytes(i) if holds_collective else memory_bytes(i)
        products_s, memory_s = product_seconds(i, self.chip), num_bytes / self.chip.memory_rate.effective
        if not products_s and not memory_s:
            return
        clock.products += products_s
        start, bound = clock.now, COMPUTE if products_s >= memory_s else MEMORY
        clock.now += max(products_s, memory_s) + self.chip.kernel_s
        clock.spend(bound, max(products_s, memory_s))
        clock.spend(STARTS, self.chip.kernel_s)
        clock.spans.append(Span(COMPUTE, i.name, bound, start, clock.now))


def product_seconds(instruction: Instruction, chip: Chip) -> float:
    """Of its matrix products, at the rate for their dtypes.

    Raises:
        ValueError: a dtype whose rate is not known.
    """
    if instruction.op == "fusion":
        return sum(product_seconds(i, chip) for i in instruction.inner)
    flops = dot_flops(instruction)
    if not flops:
        return 0.0
    dtype = instruction.operands[0].buffers[0].dtype
    if dtype not in _BF16 and dtype != "f32":
        raise refuse(instruction, f"products of {dtype}, whose rate is not known")
    return flops / (chip.flops.effective * (chip.f32_share if dtype == "f32" else 1))


def _start_of(done: Instruction) -> Instruction:
    start = done.operands[0]
    while start.op.endswith("-update"):
        start = start.operands[0]
    return start


def _copied(start: Instruction) -> tuple[str, int]:
    """(lane, bytes) of an asynchronous copy, slice, or fusion that only slices or updates in host memory."""
    if start.op == "copy-start":
        source, target = start.operands[0].buffers[0], start.buffers[0]
        return _lane(source, target), target.num_bytes
    num_operands = sum(len(operand.buffers) for operand in start.operands)
    source, result = start.operands[0].buffers[0], start.buffers[num_operands]
    if start.op == "slice-start":
        return _lane(source, result), result.num_bytes
    (root,) = results(start.called["calls"][0].root)
    while root.op in ("bitcast", "copy"):
        root = root.operands[0]
    if root.op == "dynamic-update-slice" and result.space == HOST:
        return TO_HOST, root.operands[1].num_bytes
    if root.op == "dynamic-slice" and source.space == HOST:
        return FROM_HOST, result.num_bytes
    raise refuse(start, "an asynchronous fusion whose time is not read")


def _lane(source: Buffer, target: Buffer) -> str:
    if (source.space == HOST) == (target.space == HOST):
        return COPIES
    return TO_HOST if target.space == HOST else FROM_HOST


def _moves_between_memories(i: Instruction) -> bool:
    return i.op not in ("bitcast", "get-tuple-element", "opt-barrier", "parameter", "tuple") and any(
        buffer.space == HOST for buffer in i.buffers
    )
