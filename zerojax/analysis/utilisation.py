"""Counts the flops of a model in a step, without recomputation, and computes the model FLOPs utilization."""

from __future__ import annotations

from typing import Any, NamedTuple

from zerojax.analysis import jaxpr_stats
from zerojax.analysis.hardware import Cluster


class Throughput(NamedTuple):
    """Tokens per second of all devices and of each, and the share of all devices' peak that the model's flops reach.

    The share is None if the flops are not known.
    """

    tokens_per_s: float
    tokens_per_device_s: float
    model_flop_utilization: float | None


def model_flops(loss: Any) -> int:
    """Returns the flops of the matrix products of a step without recomputation: three times those of the loss.

    Each product of the forward pass has two in the backward pass, one for each operand. As usual, attention counts in
    full whatever its mask (12 x layers x width x length for each token), and elementwise operations do not count.

    Args:
        loss: the jaxpr of the loss.

    Raises:
        ValueError: if a product runs an unknown number of times, or if the flops of a kernel are unknown.

    Source:
        Chowdhery et al., "PaLM", appendix B, arXiv 2204.02311.
    """
    return 3 * jaxpr_stats.product_flops(loss)


def throughput(step_s: float, cluster: Cluster, num_tokens: int, flops: int | None) -> Throughput:
    """Returns the throughput of a step over `num_tokens` tokens of all devices.

    Args:
        step_s: seconds of the step.
        cluster: the devices that it runs on.
        num_tokens: tokens of all devices in a step.
        flops: flops of all devices in a step, see `model_flops`; None if they are not known.
    """
    peak = cluster.num_devices * cluster.chip.flops.peak
    rate = num_tokens / step_s
    return Throughput(rate, rate / cluster.num_devices, None if flops is None else flops / step_s / peak)
