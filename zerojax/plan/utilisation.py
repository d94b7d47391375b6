"""What a model computes in a step, and its share of the chips' peak: recomputation is no work of the model."""

from __future__ import annotations

from typing import Any, NamedTuple

from zerojax.analysis import jaxpr_stats
from zerojax.analysis.hardware import Cluster


class Throughput(NamedTuple):
    """Tokens a second, of all devices and of each; and the model's flops over the peak of all devices."""

    tokens_per_s: float
    tokens_per_device_s: float
    model_flop_utilisation: float


def model_flops(loss: Any) -> int:
    """Flops of the matrix products of a step that computes nothing twice: three times those of the loss.

    Each product of the forward pass has two in the backward pass, for its two operands. Attention counts in full,
    whatever its mask, as is the custom (12 x layers x width x length for each token); elementwise operations do not.

    Args:
        loss: jaxpr of the loss.

    Raises:
        ValueError: a product in a loop whose number of iterations is not known, or a kernel whose products are not.

    Source:
        Chowdhery et al., "PaLM", appendix B, arXiv 2204.02311.
    """
    return 3 * jaxpr_stats.product_flops(loss)


def throughput(step_s: float, cluster: Cluster, num_tokens: int, flops: int) -> Throughput:
    """Of a step over `num_tokens` tokens on all devices, for which the model takes `flops` (of `model_flops`)."""
    peak = cluster.num_devices * cluster.chip.flops.peak
    rate = num_tokens / step_s
    return Throughput(rate, rate / cluster.num_devices, flops / step_s / peak)
