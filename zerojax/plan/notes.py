"""Notes about a plan: products in fp32 that cost most of the time, limits to raise, and why a formula is not sure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from zerojax.analysis.hardware import Chip, Cluster
from zerojax.analysis.jaxpr_costs import Product, products
from zerojax.analysis.liveness import ACTIVATIONS
from zerojax.analysis.report.memory import Memory
from zerojax.offload.pinned_memory import DEFAULT_PINNED_GIB, PINNED_LIMIT, sufficient_limit_gib
from zerojax.plan.find_job import can_fuse, widest_head
from zerojax.plan.job import Settings
from zerojax.plan.transformer import Transformer
from zerojax.program import jaxprs
from zerojax.program.segmentation import TracedLoss
from zerojax.sharding.placement import Leaf
from zerojax.sharding.precision import Precision
from zerojax.sharding.uneven import uneven_text
from zerojax.step.config import ZeroConfig
from zerojax.utils.text import bytes_text

_WIDE_SHARE = 0.5  # of the time of all products, from which on those in fp32 are worth a note
# More activations than by formula that compiled programs were seen to hold, as a share (scripts/benchmarks/plan.py
# --models, jax 0.10.2): 0.70 of a Linen transformer's of 1 B parameters, 0.58 of Qwen3 8B's, 0.0 of a VGG's.
_MISSED_ACTIVATIONS = 0.75
_TOLERANCE = 0.1  # of the peak
_OPAQUE_KERNELS = frozenset({"ffi_call", "pallas_call", "pure_callback"})  # what they need is not in the trace
_NOT_SURE = "the memory by formula is not sure: "


def notes(traced: TracedLoss, memory: Memory, cluster: Cluster, settings: Settings) -> tuple[str, ...]:
    """Returns the notes about a loss, traced on one device's rows, and about the memory of its step on a cluster."""
    chip = cluster.chip
    found = [(unit, product) for unit, equations in _by_unit(traced) for product in products(equations)]
    wide = _wide_products(found, chip, settings)
    reasons = [*_reasons(traced.closed.jaxpr, chip, settings), *_order(memory)]
    return (*wide, *_pinned(memory, cluster), *(_NOT_SURE + reason for reason in reasons))


def notes_of_shapes(shapes: Transformer, chip: Chip) -> Iterator[str]:
    """Yields what a plan does not follow of a described model, and whether its attention is fused on a chip."""
    yield from shapes.notes
    if chip.platform == "tpu":
        yield "attention is planned in blocks of queries; a kernel such as splash attention takes less time"
    if chip.platform == "cuda" and not shapes.caps_scores and not can_fuse(shapes, chip):
        yield (
            f"attention is planned in blocks of queries: its heads of width {shapes.width_of_head} are not fused, since"
            f" cuDNN takes multiples of 8 up to {widest_head(chip)} on this GPU"
        )


def notes_of_shards(leaves: Sequence[Leaf], config: ZeroConfig) -> Iterator[str]:
    """Yields what the number of devices costs, if it divides few dims of the model."""
    text = uneven_text(leaves, config.axes)
    if text and config.stage.shards_optimizer:
        lines = text.removeprefix("placement: ").splitlines()
        yield ". ".join(line.strip().removeprefix("got:").removeprefix("fix:").strip() for line in lines)


def _by_unit(traced: TracedLoss) -> Iterator[tuple[str, Any]]:
    for segment in traced.segments:
        yield traced.unit_of[segment.leaves[0]] if segment.leaves else "", segment.equations


def _wide_products(found: list[tuple[str, Product]], chip: Chip, settings: Settings) -> Iterator[str]:
    if jnp.dtype(Precision.of(settings.precision).compute_dtype).itemsize >= 4:
        return
    total, seconds, units = 0.0, dict[str, float](), dict[str, list[str]]()
    for unit, product in found:
        total += product.seconds(chip)
        if product.dtype == "float32":
            seconds[product.text] = seconds.get(product.text, 0.0) + product.seconds(chip)
            units.setdefault(product.text, []).append(unit)
    wide = sum(seconds.values())
    if not seconds or wide < _WIDE_SHARE * total:
        return
    text = max(seconds, key=seconds.__getitem__)
    places = list(dict.fromkeys(units[text]))
    where = f" in {places[0]!r}" if places[0] else ""
    where += f" and {len(places) - 1} other units" if len(places) > 1 else ""
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


def _reasons(jaxpr: Any, chip: Chip, settings: Settings) -> Iterator[str]:
    names = set(_names(jaxpr))
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


def _names(jaxpr: Any) -> Iterator[str]:
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for inner in jaxprs.sub_jaxprs(equation):
            yield from _names(inner)
