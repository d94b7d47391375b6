"""Estimates the time of a step by formula: of its computation, of ZeRO's bytes on the links, and of offloading."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from zerojax.analysis.hardware import Cluster, Route
from zerojax.analysis.jaxpr_costs import ComputeTime
from zerojax.plan.job import Settings
from zerojax.sharding.precision import Precision


class FormulaTime(NamedTuple):
    """The time of a step by formula, at the rates that large operations reach. What can overlap does.

    Attributes:
        compute: of the forward and the backward pass.
        link_s: seconds to send ZeRO's bytes over the links.
        host_s: seconds to copy an offloaded state from host memory and back, in both directions at once. This is the
            update, which starts after the gradients and overlaps with none of the others.
        stream_s: seconds to copy offloaded weights and their gradients, beside the forward and the backward pass.
        exposed_s: seconds of `link_s` for which the computation waits, because it starts no gather in advance.
    """

    compute: ComputeTime
    link_s: float
    host_s: float = 0.0
    stream_s: float = 0.0
    exposed_s: float = 0.0

    @property
    def step_s(self) -> float:
        """Seconds of a step: of its computation, of the links or of the copies of weights, whichever takes longest, and
        of an offloaded update."""
        return max(self.compute.total_s + self.exposed_s, self.link_s, self.stream_s) + self.host_s

    def data(self) -> dict[str, float]:
        """Returns the seconds by name."""
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
    return inside, 2 * reduced * parameters / num_shards * (replica - 1) / replica


def gathered_bytes(settings: Settings, parameters: int, num_shards: int) -> float:
    """The bytes of weights that a device sends to the others of its replica in a step."""
    gathers = {0: 0, 1: 1, 2: 1, 3: 2 * settings.num_microbatches}[settings.stage]
    return gathers * _widths(settings)[0] * parameters * (num_shards - 1) / num_shards


def _widths(settings: Settings) -> tuple[int, int]:
    """The bytes of an element of a gathered weight, and of a gradient when it is reduced."""
    precision = Precision.of(settings.precision)
    return jnp.dtype(precision.compute_dtype).itemsize, jnp.dtype(precision.reduce_dtype).itemsize


def link_seconds(cluster: Cluster, settings: Settings, parameters: int) -> float:
    """Returns the seconds to send a stage's bytes, by formula: within a replica, and between replicas."""
    within, between = sent_bytes(settings, parameters, cluster.num_devices)
    inside = shard_route(cluster, settings)
    seconds = within / inside.rate if inside else 0.0
    if settings.replica > 1:
        seconds += between / cluster.route(range(0, cluster.num_devices, cluster.num_devices // settings.replica)).rate
    return seconds


def exposed_seconds(cluster: Cluster, settings: Settings, parameters: int) -> float:
    """Returns the seconds for which a step waits for weights, by formula: without prefetch, for all that it gathers."""
    route = shard_route(cluster, settings)
    if route is None or settings.stage < 3 or settings.prefetch:
        return 0.0
    return gathered_bytes(settings, parameters, cluster.num_devices // settings.replica) / route.rate


def host_copies(settings: Settings, state_bytes: int, num_params: int) -> tuple[float, float]:
    """The bytes that a device copies from its host or to it, in the direction with more of them: (beside the forward
    and the backward pass, in the update).

    Weights come for the forward and for the backward pass. Of several microbatches, the sums of gradients come too.

    Args:
        settings: the options of the step.
        state_bytes: of the state in host memory, for each device.
        num_params: the parameters that are in host memory, for each device.
    """
    k, (weight, reduced) = settings.num_microbatches, _widths(settings)
    gradient = jnp.dtype(Precision.of(settings.precision).sum_dtype).itemsize if k > 1 else reduced
    weights, gradients = weight * num_params, gradient * num_params
    beside = max(k * (2 * weights + gradients * (k > 1)), k * gradients)
    return beside, state_bytes + max(0, gradients - weights)
