"""Predicts the time of a compiled step by simulating its schedule, with a lane for computation and one for each link.

A device computes, sends over its links (a TPU: over those along each dim of the torus, and over the network to other
slices), and copies to and from its host. Each of these is a lane, which does one thing at a time, in the order of the
schedule. Lanes do not slow each other down, except for the two directions of the link to the host: collectives take no
cores of a GPU, and copies no memory bandwidth. The predicted time is therefore a lower bound rather than an average.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from zerojax.analysis import hlo_collectives
from zerojax.analysis.hardware import Chip, Cluster
from zerojax.analysis.hlo import HOST, Block, Instruction, Program, chains, has_product, trip_count, unsupported
from zerojax.analysis.hlo_costs import (
    COPIES,
    COPY_STARTS,
    FROM_HOST,
    TO_HOST,
    copied,
    dot_flops,
    is_kernel,
    memory_bytes,
)

COMPUTE, MEMORY, STARTS = "compute", "memory", "starts of kernels"
_COMPUTING = (COMPUTE, MEMORY, STARTS)  # all of these occupy the computing lane

# Custom calls that allocate, mark or regroup buffers, and compute nothing.
_MARKS = frozenset(["AllocateBuffer", "AssumeGatherIndicesInBound", "AsyncCollectiveDone", "AsyncCollectiveStart"])
_MARKS |= frozenset(["ConcatBitcast", "GatherScatterIndicesBitpacked", "PrepareAsyncCallDone", "PrepareAsyncCallStart"])
_MARKS |= frozenset(["SliceId", "ZeroCrop"])  # the second writes the padding of a buffer for the hosts
_BF16 = frozenset(["bf16", "f16"])


class Span(NamedTuple):
    """An operation on a lane, with its start and end. `bound` is what limits it: 'compute', 'memory' or its lane."""

    lane: str
    name: str
    bound: str
    start_s: float
    end_s: float


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop of the step, described by one iteration in its steady state, in which a loop inside it is one span."""

    name: str
    trips: int
    iteration_s: float
    spans: tuple[Span, ...]


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The predicted time of a step.

    Attributes:
        busy_s: seconds in which each lane is busy. The computing lane is split into 'compute' (instructions limited by
            matrix products), 'memory' (instructions limited by memory) and 'starts of kernels'.
        products_s: seconds of the matrix products alone.
        spans: the spans of the step outside of loops; each loop is one span.
        loops: the loops in the order in which they end.
    """

    step_s: float
    busy_s: Mapping[str, float]
    products_s: float
    spans: tuple[Span, ...]
    loops: tuple[Loop, ...]

    @property
    def computing_s(self) -> float:
        return sum(self.busy_s.get(part, 0) for part in _COMPUTING)

    @property
    def waiting_s(self) -> float:
        """Seconds in which the computing lane waits for a link or a copy."""
        return max(0.0, self.step_s - self.computing_s)  # not less by rounding

    @property
    def bound_by(self) -> str:
        """The lane that is busy longest; for the computing lane, the part of it that takes longest."""
        others = {lane: seconds for lane, seconds in self.busy_s.items() if lane not in _COMPUTING}
        longest = max(others, key=others.__getitem__, default=None)
        if longest is not None and others[longest] > self.computing_s:
            return longest
        return max(_COMPUTING, key=lambda part: self.busy_s.get(part, 0))


@dataclasses.dataclass
class _Clock:
    """The state of a simulation.

    Attributes:
        now: the time of the computing lane.
        products: seconds of matrix products so far.
        free: the time at which each other lane becomes free.
        busy: seconds in which each lane has been busy.
        done: the time at which the asynchronous operation that an instruction started ends.
    """

    now: float = 0.0
    products: float = 0.0
    free: dict[str, float] = dataclasses.field(default_factory=dict)
    busy: dict[str, float] = dataclasses.field(default_factory=dict)
    spans: list[Span] = dataclasses.field(default_factory=list)
    done: dict[Instruction, float] = dataclasses.field(default_factory=dict)

    def spend(self, lane: str, seconds: float) -> None:
        self.busy[lane] = self.busy.get(lane, 0) + seconds

    def occupy(self, lanes: tuple[str, ...], name: str, seconds: float) -> float:
        """Adds an operation that occupies several lanes, other than the computing one. Returns the time it ends."""
        start = max(self.now, *(self.free.get(lane, 0) for lane in lanes))
        for lane in lanes:
            self.free[lane] = start + seconds
            self.spend(lane, seconds)
            self.spans.append(Span(lane, name, lane, start, start + seconds))
        return start + seconds

    def copy(self) -> _Clock:
        return _Clock(self.now, self.products, dict(self.free), dict(self.busy))


def predict(program: Program, cluster: Cluster) -> Prediction:
    """Predicts the time of one step of a program that was compiled for the devices of a cluster in their order.

    An instruction takes the time of its matrix products or of its memory traffic, whichever is longer, and the time
    between two kernels. A collective takes the time of a ring: the bytes that a device sends, divided by the rate of
    the links that its group crosses, and the latency of each step of the ring. Two iterations of each loop are
    simulated; the second stands for all that follow.

    Raises:
        ValueError: if the program is for another number of devices, or if it has an instruction that is not understood:
            a loop without a trip count, or a custom call that is not a matrix product.
    """
    expected = cluster.devices_per_slice or cluster.num_devices  # the text is that of one slice
    if program.num_devices != expected:
        raise ValueError(
            f"timeline: the program is not for {cluster.target}\n"
            f"  got:      {program.num_devices} devices, not {expected}\n"
            f"  fix:      compile it for this target"
        )
    simulator = _Simulator(cluster)
    clock = _Clock()
    simulator.run(program.entry.instructions, clock)
    return Prediction(clock.now, clock.busy, clock.products, tuple(clock.spans), tuple(simulator.loops.values()))


class _Simulator:
    def __init__(self, cluster: Cluster):
        self.cluster, self.chip = cluster, cluster.chip
        self.loops: dict[str, Loop] = {}

    def run(self, instructions: tuple[Instruction, ...], clock: _Clock, running: frozenset[str] = frozenset()) -> None:
        """Simulates instructions, while these chains of fusions run."""
        collectives = hlo_collectives.collective_spans(Block(instructions, 1, False, running))
        running |= chains(instructions)
        starts, ends = {span.start: span for span in collectives}, {span.end: span for span in collectives}
        for k, i in enumerate(instructions):
            if k in starts:
                core = starts[k].core
                lanes, seconds = self.collective(core)
                clock.done[core] = clock.occupy(lanes, core.op.removesuffix("-start"), seconds)
            if i.op == "while":
                self.loop(i, clock, running)
            elif i.op == "call":
                self.run(i.called["to_apply"][0].instructions, clock, running)
            elif i.op == "conditional":
                self.branches(i, clock, running)
            elif i.op == "fusion" or (k not in starts and k not in ends):  # on TPUs a fusion may do both
                self.step(i, clock)
            if k in ends:
                clock.now = max(clock.now, clock.done[ends[k].core])

    def collective(self, core: Instruction) -> tuple[tuple[str, ...], float]:
        """The (lanes, seconds) of the slowest group of a collective."""
        num_devices = self.cluster.devices_per_slice or self.cluster.num_devices
        sent = sum(part.sent_bytes for part in hlo_collectives.split_by_dtype(core, num_devices))
        rounds = 2 if core.op.startswith("all-reduce") else 1
        permutes = core.op.startswith("collective-permute")
        routes = [self.cluster.route(group, one_way=permutes) for group in hlo_collectives.groups(core, num_devices)]
        seconds, lanes = max((rounds * route.latency_s + sent / route.rate, route.lanes) for route in routes)
        return lanes, seconds if sent else 0.0

    def branches(self, conditional: Instruction, clock: _Clock, running: frozenset[str]) -> None:
        """Simulates each branch. The one that takes longest counts: some device runs it, and the others wait."""
        slowest = clock
        for branch in conditional.computations:
            alone = clock.copy()
            self.run(branch.instructions, alone, running)
            slowest = max(slowest, alone, key=lambda each: each.now)
        if slowest is clock:
            return
        clock.spans += slowest.spans
        clock.now, clock.products, clock.free, clock.busy = slowest.now, slowest.products, slowest.free, slowest.busy

    def loop(self, loop: Instruction, clock: _Clock, running: frozenset[str]) -> None:
        trips, (body,) = trip_count(loop), loop.called["body"]
        if trips is None:
            raise unsupported(loop, "the trip count of this loop is not in the text")
        begin = clock.now
        before = iteration = clock.copy()
        for _ in range(min(trips, 2)):
            before, iteration = iteration, iteration.copy()
            self.run(body.instructions, iteration, running)
        if trips:
            start = before.now
            inside = tuple(s._replace(start_s=s.start_s - start, end_s=s.end_s - start) for s in iteration.spans)
            self.loops[loop.name] = Loop(loop.name, trips, iteration.now - start, inside)
        rest = max(trips - 2, 0)
        extrapolated = lambda last, previous: {k: v + rest * (v - previous.get(k, 0)) for k, v in last.items()}
        clock.now = iteration.now + rest * (iteration.now - before.now)
        clock.products = iteration.products + rest * (iteration.products - before.products)
        clock.free = extrapolated(iteration.free, before.free)
        clock.busy = extrapolated(iteration.busy, before.busy)
        clock.spans.append(Span(COMPUTE, loop.name, "", begin, clock.now))

    def step(self, i: Instruction, clock: _Clock) -> None:
        """Simulates an instruction that is not a loop, a call, or the start or end of a collective."""
        if hlo_collectives.is_transfer(i):
            return  # the send and the recv-done are the start and the end of a collective between slices
        if i.op.endswith("-done"):
            start = hlo_collectives.start_of(i)
            if start not in clock.done:
                raise unsupported(i, "an end has no start in the same computation")
            clock.now = max(clock.now, clock.done[start])
        elif i.op in COPY_STARTS:
            self.copy(i, clock)
        elif i.op in ("call-start", "call-update"):
            self.on_sparse_core(i, clock)
        elif i.op.endswith(("-start", "-update")):
            raise unsupported(i, "cannot predict the time of this instruction")
        elif i.op == "custom-call" and not has_product(i):
            if i.target not in _MARKS:
                raise unsupported(i, "cannot predict the time of this custom call")
        elif _moves_between_memories(i):
            raise unsupported(i, "this transfer to or from the host is not a copy")
        else:
            self.compute(i, clock)

    def copy(self, i: Instruction, clock: _Clock) -> None:
        """Simulates an asynchronous copy, from its start."""
        lane, num_bytes = copied(i)
        if lane == COPIES:
            clock.done[i] = clock.occupy((lane,), i.name, num_bytes / self.chip.memory_rate.effective)
            return
        rate = self.chip.host_rate.effective
        if is_kernel(i):  # it runs in the stream that computes
            clock.now = clock.done[i] = clock.occupy((lane,), i.name, num_bytes / rate)
            return
        # Both directions share the link, as long as the other one is busy.
        start = max(clock.now, clock.free.get(lane, 0))
        other_s = max(0.0, clock.free.get(TO_HOST if lane == FROM_HOST else FROM_HOST, 0) - start)
        shared_bytes = min(num_bytes, other_s * rate * self.chip.duplex_share)
        seconds = shared_bytes / (rate * self.chip.duplex_share) + (num_bytes - shared_bytes) / rate
        clock.done[i] = clock.occupy((lane,), i.name, seconds)

    def on_sparse_core(self, i: Instruction, clock: _Clock) -> None:
        """Simulates a call on a SparseCore that is no collective, from the instruction that has its operands."""
        start = i if i.op == "call-start" else i.operands[0]
        if not hlo_collectives.communicates(start) and bool(start.operands) == (i is start):
            seconds = memory_bytes(start) / self.chip.memory_rate.effective
            clock.done[start] = clock.occupy((COPIES,), start.name, seconds)

    def compute(self, i: Instruction, clock: _Clock) -> None:
        products_s, memory_s = product_seconds(i, self.chip), memory_bytes(i) / self.chip.memory_rate.effective
        if not products_s and not memory_s:
            return
        clock.products += products_s
        start, bound = clock.now, COMPUTE if products_s >= memory_s else MEMORY
        clock.now += max(products_s, memory_s) + self.chip.kernel_s
        clock.spend(bound, max(products_s, memory_s))
        clock.spend(STARTS, self.chip.kernel_s)
        clock.spans.append(Span(COMPUTE, i.name, bound, start, clock.now))


def product_seconds(instruction: Instruction, chip: Chip) -> float:
    """The seconds of an instruction's matrix products, at the rate for their dtypes."""
    if instruction.op == "fusion":
        return sum(product_seconds(i, chip) for i in instruction.inner)
    flops = dot_flops(instruction)
    if not flops:
        return 0.0
    dtype = instruction.operands[0].buffers[0].dtype
    if dtype not in _BF16 and dtype != "f32":
        raise unsupported(instruction, f"the rate of products of {dtype} is unknown")
    return flops / (chip.flops.effective * (chip.f32_share if dtype == "f32" else 1))


def _moves_between_memories(i: Instruction) -> bool:
    return i.op not in ("bitcast", "get-tuple-element", "opt-barrier", "parameter", "tuple") and any(
        buffer.space == HOST for buffer in i.buffers
    )
