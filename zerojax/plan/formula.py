"""Estimates the time of a step by formula: computation, links and copies. Notes say why a formula is not sure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from zerojax.analysis.hardware import Chip, Cluster, Route
from zerojax.analysis.jaxpr_counts import COLLECTIVES, Operation, flattened, products, walk
from zerojax.analysis.liveness import ACTIVATIONS, Lifetimes
from zerojax.analysis.memory import Memory
from zerojax.offload.host_memory import DEFAULT_PINNED_GIB, PINNED_LIMIT, sufficient_limit_gib
from zerojax.plan.few_layers import segments_of
from zerojax.plan.job import Settings
from zerojax.plan.transformer import Transformer, can_fuse, widest_head
from zerojax.program import jaxprs
from zerojax.program.jaxprs import Jaxpr
from zerojax.program.segmentation import TracedLoss
from zerojax.sharding.advice import uneven_text
from zerojax.sharding.placement import Leaf
from zerojax.sharding.precision import Precision
from zerojax.sharding.wire import BLOCK
from zerojax.step.config import ZeroConfig
from zerojax.step.owned_matrices import OwnedMatrices
from zerojax.step.owners import owned_counts
from zerojax.utils.text import bytes_text


class FormulaTime(NamedTuple):
    """The time of a step by formula, at the rates that large operations reach. What can overlap does.

    Attributes:
        compute: of the forward and the backward pass.
        link_s: seconds to send ZeRO's bytes over the links.
        host_s: seconds to copy an offloaded state from host memory and back, in both directions at once. This is the
            update, which starts after the gradients and overlaps with none of the others.
        stream_s: seconds to copy offloaded weights and their gradients, beside the forward and the backward pass.
        exposed_s: seconds of `link_s` for which the computation waits, because it starts no gather in advance.
        update_s: seconds of an update by owners (`step.owned_update`), after the gradients: its products on the
            device that has most, or its bytes on the links, whichever takes longer.
        update_bytes: the bytes that a device sends in it.
    """

    compute: ComputeTime
    link_s: float
    host_s: float = 0.0
    stream_s: float = 0.0
    exposed_s: float = 0.0
    update_s: float = 0.0
    update_bytes: float = 0.0

    @property
    def step_s(self) -> float:
        """Seconds of the computation, of the links or of the copies of weights, whichever takes longest, and of an
        update that is offloaded or computed by owners.
        """
        return max(self.compute.total_s + self.exposed_s, self.link_s, self.stream_s) + self.host_s + self.update_s

    def data(self) -> dict[str, float]:
        return self.compute._asdict() | {name: getattr(self, name) for name in self._fields if name != "compute"}

    @property
    def bound(self) -> str:
        """What limits the step: 'products', 'memory', 'links' or 'copies', which are those of an offloaded state."""
        beside = max(self.compute.total_s, self.link_s)
        if self.host_s > max(beside, self.stream_s) or self.stream_s > beside:
            return "copies"
        if self.link_s > self.compute.total_s:
            return "links"
        return "products" if self.compute.products_s >= self.compute.memory_s else "memory"


class Throughput(NamedTuple):
    """Tokens per second of all devices and of each, and the share of all devices' peak that the model's flops reach.

    The share is None if the flops are not known.
    """

    tokens_per_s: float
    tokens_per_device_s: float
    model_flop_utilization: float | None


def throughput(step_s: float, cluster: Cluster, num_tokens: int, flops: int | None) -> Throughput:
    """The throughput of a step, from the tokens and the flops of all devices in it."""
    peak = cluster.num_devices * cluster.chip.flops.peak
    rate = num_tokens / step_s
    return Throughput(rate, rate / cluster.num_devices, None if flops is None else flops / step_s / peak)


def shard_route(cluster: Cluster, settings: Settings) -> Route | None:
    """The links over which the shards of one replica are gathered; None for a single device."""
    num_shards = cluster.num_devices // settings.replica
    return cluster.route(range(num_shards)) if num_shards > 1 else None


def sent_bytes(settings: Settings, parameters: int, num_devices: int) -> tuple[float, float]:
    """The bytes that a device sends in a step: (within a replica, between replicas), see the README's table of stages.

    Weights are gathered in the dtype of computation, and gradients are reduced in their own.
    """
    k, (_, reduced) = settings.num_microbatches, _widths(settings)
    num_shards, replica = num_devices // settings.replica, settings.replica
    reductions = {0: 2, 1: 1, 2: k, 3: k}[settings.stage]
    inside = reductions * reduced * parameters * (num_shards - 1) / num_shards
    inside += gathered_bytes(settings, parameters, num_shards)
    weight = jnp.dtype(settings.dtypes.compute_dtype).itemsize
    between = reduced + (weight if settings.shards_outer else reduced)  # for each element of a shard
    return inside, between * parameters / num_shards * (replica - 1) / replica


def gathered_bytes(settings: Settings, parameters: int, num_shards: int) -> float:
    """The bytes of weights that a device sends to the others of its replica in a step."""
    gathers = {0: 0, 1: 1, 2: 1, 3: 2 * settings.num_microbatches}[settings.stage]
    return gathers * _widths(settings)[0] * parameters * (num_shards - 1) / num_shards


def _widths(settings: Settings) -> tuple[float, float]:
    """The bytes of an element of a gathered weight, and of a gradient when it is reduced. All leaves count as large."""
    precision = settings.dtypes
    widths = [jnp.dtype(dtype).itemsize for dtype in (precision.compute_dtype, precision.reduce_dtype)]
    in_8_bits = precision.gather, precision.scatter
    gathered, reduced = (1 + w / BLOCK if dtype else w for w, dtype in zip(widths, in_8_bits, strict=True))
    return gathered, reduced


def link_seconds(cluster: Cluster, settings: Settings, parameters: int) -> float:
    """The seconds to send a stage's bytes, within a replica and between replicas."""
    within, between = sent_bytes(settings, parameters, cluster.num_devices)
    inside = shard_route(cluster, settings)
    seconds = within / inside.rate if inside else 0.0
    if settings.replica > 1:
        seconds += between / cluster.route(range(0, cluster.num_devices, cluster.num_devices // settings.replica)).rate
    return seconds


def update_cost(cluster: Cluster, owners: OwnedMatrices | None) -> tuple[float, float]:
    """(Seconds, bytes that a device sends) of an update by owners."""
    if owners is None:
        return 0.0, 0.0
    num_owners = owners.num_owners
    sent = sum(owners.sent_bytes()) * (num_owners - 1) / num_owners
    loads = [0.0] * num_owners
    for kinds in owners.groups:
        for kind, counts in zip(kinds, owned_counts(kinds, num_owners), strict=True):
            of_parameter = sum(each.seconds(cluster.chip) for each in products(kind.couplings[0].equations))
            seconds = of_parameter / (kind.layers or 1)
            loads = [load + count * seconds for load, count in zip(loads, counts, strict=True)]
    return max(max(loads), sent / cluster.route(range(num_owners)).rate), sent


def exposed_seconds(cluster: Cluster, settings: Settings, parameters: int) -> float:
    """The seconds for which a step waits for weights: without prefetch, for all that it gathers."""
    route = shard_route(cluster, settings)
    if route is None or settings.stage < 3 or settings.prefetch:
        return 0.0
    return gathered_bytes(settings, parameters, cluster.num_devices // settings.replica) / route.rate


def host_copies(settings: Settings, state_bytes: int, num_params: int) -> tuple[float, float]:
    """The bytes that a device copies from its host or to it, in the direction with more of them: (beside the forward
    and the backward pass, in the update), from the bytes of its state there and the number of its parameters there.

    Weights come for the forward and for the backward pass. Of several microbatches, the sums of gradients come too.
    """
    k, precision = settings.num_microbatches, Precision.of(settings.precision)
    weight, reduced = (jnp.dtype(dtype).itemsize for dtype in (precision.compute_dtype, precision.reduce_dtype))
    gradient = jnp.dtype(precision.sum_dtype).itemsize if k > 1 else reduced
    weights, gradients = weight * num_params, gradient * num_params
    beside = max(k * (2 * weights + gradients * (k > 1)), k * gradients)
    return beside, state_bytes + max(0, gradients - weights)


_READS_PARTS = frozenset(["dynamic_slice", "gather", "slice"])  # they read only as much as they return
_WRITES = {"dynamic_update_slice": 1, "scatter": 2, "scatter-add": 2}  # they write as much as this operand has


class ComputeTime(NamedTuple):
    """Seconds of a traced program: those that matrix products limit, and those that memory traffic limits."""

    products_s: float = 0.0
    memory_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.products_s + self.memory_s

    def plus(self, other: ComputeTime, times: float = 1) -> ComputeTime:
        """The sum with another time that is spent `times` times."""
        return ComputeTime(self.products_s + times * other.products_s, self.memory_s + times * other.memory_s)


def compute_time(jaxpr: Jaxpr, chip: Chip, times: Mapping[int, int]) -> ComputeTime:
    """Estimates the time of a traced program on one device.

    A segment runs `times[segment]` times for each time that the jaxpr has it; once if it is missing.
    """
    flat = flattened(jaxpr)
    lifetimes = Lifetimes(flat, jax.memory.Space.Device, [], {})
    stored: dict[int, int] = {}
    for value, k in lifetimes.born.items():
        stored[k] = stored.get(k, 0) + value.num_bytes
    total = ComputeTime()
    for k, (operation, segment) in enumerate(zip(flat.operations, segments_of(flat), strict=True)):
        if operation.name in ("scan", "while", "cond"):
            inner = [compute_time(j, chip, times) for j in jaxprs.sub_jaxprs(operation.equation)]
            trips = jaxprs.scan_params(operation.equation).length if operation.name == "scan" else 1
            spent = ComputeTime().plus(max(inner, key=lambda time: time.total_s), trips)
        elif k not in stored or operation.name in COLLECTIVES:
            continue
        else:
            spent = _time(operation, stored[k], lifetimes, chip)
        total = total.plus(spent, times.get(segment, 1))
    return total


def _time(operation: Operation, written: int, lifetimes: Lifetimes, chip: Chip) -> ComputeTime:
    if operation.name in _READS_PARTS:
        num_bytes = 2 * written
    elif operation.name in _WRITES:
        num_bytes = 2 * operation.reads[_WRITES[operation.name]].num_bytes
    else:
        bases = {base for v in operation.reads for base in lifetimes.bases[v]}
        num_bytes = written + sum(base.num_bytes for base in bases)
    memory_s = num_bytes / chip.memory_rate.effective
    products_s = sum(product.seconds(chip) for product in products([operation.equation]))
    return ComputeTime(products_s, 0.0) if products_s >= memory_s else ComputeTime(0.0, memory_s)


_WIDE_SHARE = 0.5  # of the time of all products, from which on those in fp32 are worth a note
# More activations than by formula that compiled programs were seen to hold, as a share (scripts/benchmarks/plan.py
# --models, jax 0.10.2): 0.70 of a Linen transformer's of 1 B parameters, 0.58 of Qwen3 8B's, 0.0 of a VGG's.
_MISSED_ACTIVATIONS = 0.75
_TOLERANCE = 0.1  # of the peak
_OPAQUE_KERNELS = frozenset({"ffi_call", "pallas_call", "pure_callback"})  # what they need is not in the trace
_NOT_SURE = "the memory by formula is not sure: "


def notes(traced: TracedLoss, memory: Memory, cluster: Cluster, settings: Settings) -> tuple[str, ...]:
    """The notes about a loss, traced on one device's rows, and about the memory of its step on a cluster."""
    chip = cluster.chip
    wide = _wide_products(traced, chip, settings)
    reasons = [*_reasons(traced.closed.jaxpr, chip, settings), *_order(memory)]
    return (*wide, *_pinned(memory, cluster), *(_NOT_SURE + reason for reason in reasons))


def notes_of_shapes(shapes: Transformer, chip: Chip) -> Iterator[str]:
    """What a plan does not follow of a described model, and whether its attention is fused on a chip."""
    yield from shapes.notes
    if chip.platform == "tpu":
        yield "attention is planned in blocks of queries; a kernel such as splash attention takes less time"
    if chip.platform == "cuda" and not shapes.caps_scores and not can_fuse(shapes, chip):
        yield (
            f"attention is planned in blocks of queries: its heads of width {shapes.width_of_head} are not fused, since"
            f" cuDNN takes multiples of 8 up to {widest_head(chip)} on this GPU"
        )


def notes_of_shards(leaves: Sequence[Leaf], config: ZeroConfig) -> Iterator[str]:
    """What the number of devices costs, if it divides few dims of the model."""
    text = uneven_text(leaves, config.axes)
    if text and config.stage.shards_optimizer:
        lines = text.removeprefix("placement: ").splitlines()
        yield ". ".join(line.strip().removeprefix("got:").removeprefix("fix:").strip() for line in lines)


def _wide_products(traced: TracedLoss, chip: Chip, settings: Settings) -> Iterator[str]:
    """Says which products in fp32 cost most of the time, if the precision is narrower."""
    if jnp.dtype(Precision.of(settings.precision).compute_dtype).itemsize >= 4:
        return
    total, seconds, units = 0.0, dict[str, float](), dict[str, dict[str, None]]()
    for segment in traced.segments:
        for product in products(segment.equations):
            total += product.seconds(chip)
            if product.dtype == "float32":
                seconds[product.text] = seconds.get(product.text, 0.0) + product.seconds(chip)
                units.setdefault(product.text, {})[traced.unit(segment)] = None
    wide = sum(seconds.values())
    if not seconds or wide < _WIDE_SHARE * total:
        return
    text = max(seconds, key=seconds.__getitem__)
    first, *others = units[text]
    where = f" in {first!r}" * bool(first) + f" and {len(others)} other units" * bool(others)
    yield (
        f"matrix products in fp32 take {wide / total:.0%} of the time of all products, although the"
        f" precision is {settings.precision!r}. {seconds[text] / total:.0%}: {text}{where}. If the model has a dtype of"
        f" computation, set it to bfloat16"
    )


def _pinned(memory: Memory, cluster: Cluster) -> Iterator[str]:
    """Which limit of XLA has to be raised, if one process runs all GPUs of a host."""
    num_gpus = cluster.devices_per_host if cluster.chip.platform == "cuda" else 0
    needed = memory.host_bytes * num_gpus
    if needed > DEFAULT_PINNED_GIB * 2**30:
        of_gpus = f"the {num_gpus} GPUs of a host" if num_gpus > 1 else "the GPU"
        yield (
            f"XLA pins at most {DEFAULT_PINNED_GIB} GiB for a process by default; for {of_gpus} in one process, set"
            f" {PINNED_LIMIT}={sufficient_limit_gib(needed)}"
        )


def _reasons(jaxpr: Jaxpr, chip: Chip, settings: Settings) -> Iterator[str]:
    names = {visit.equation.primitive.name for visit in walk(jaxpr.eqns)}
    if "conv_general_dilated" in names and chip.platform == "cuda":
        yield "cuDNN chooses how much memory a convolution uses when the step runs, which a compiled program lacks too"
    if kernels := sorted(names & _OPAQUE_KERNELS):
        yield f"what the kernels of {', '.join(kernels)} allocate is unknown"
    if chip.platform == "tpu":
        yield "compared with programs for TPUs, it was between 15% too low and 12% too high"
    if (settings.model or 1) > 1:
        yield f"activations count as if the model axis of {settings.model} did not divide them"


def _order(memory: Memory) -> Iterator[str]:
    """In which order one unit's operations run, and which of their results exist at a time, the compiler decides."""
    activations = sum(term.num_bytes for term in memory.terms if term.name == ACTIVATIONS)
    missed = _MISSED_ACTIVATIONS * activations
    if missed > _TOLERANCE * (memory.peak_bytes + missed):
        yield (
            f"{activations / memory.peak_bytes:.0%} of it are activations of one moment, whose operations compilers"
            f" reorder and fuse. With {_MISSED_ACTIVATIONS:.0%} more of them, the most that was measured, the peak is"
            f" {bytes_text(memory.peak_bytes + missed)}"
        )
