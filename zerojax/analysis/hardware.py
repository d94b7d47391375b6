"""The chips and clusters that a plan knows: every constant, with its source and its date.

A `Rate` holds the peak of the data sheet, of which utilisation is a share, and what of it large operations reach. What
nobody published a measurement of is called a guess; `zerojax.plan.calibrate` replaces the first two by measurements.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

INSIDE_HOST, BETWEEN_HOSTS = "link inside a host", "link between hosts"
BETWEEN_SLICES = "link between slices"


class Rate(NamedTuple):
    """A second: the peak of the data sheet, and the share of it that large operations reach."""

    peak: float
    efficiency: float

    @property
    def effective(self) -> float:
        return self.peak * self.efficiency


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device as JAX sees it.

    Attributes:
        name: as targets name it.
        platform: as `lowering_platforms` names it: 'cuda', 'tpu' or 'cpu'.
        device_kinds: what `jax.Device.device_kind` may be.
        memory_bytes: capacity of its memory.
        flops: of dense bf16 matrix products.
        f32_share: of that rate for products of f32 arrays at JAX's default precision.
        memory_rate: bytes that it reads and writes in its memory.
        host_rate: bytes between its memory and that of its host, one way.
        link_rate: bytes that it sends: on a GPU to the others of its host, on a TPU over one link, one way.
        network_rate: bytes that it sends over its own NIC to another host, on a TPU to another slice.
        kernel_s: from the end of one kernel to the start of the next.
        collective_s: to start a collective.
        hop_s: for a step of a ring to a neighbour inside the host, on a TPU over one link.
        network_hop_s: for a step of a ring to another host, on a TPU to another slice.
    """

    name: str
    platform: str
    device_kinds: tuple[str, ...]
    memory_bytes: int
    flops: Rate
    f32_share: float
    memory_rate: Rate
    host_rate: Rate
    link_rate: Rate
    network_rate: Rate
    kernel_s: float
    collective_s: float
    hop_s: float
    network_hop_s: float


# NVIDIA. Dense bf16 peak and NVLink (half of what is given for both directions) are those of the data sheets: "NVIDIA
#   A100 Tensor Core GPU" (SXM, 80 GB, 2021), "NVIDIA H100 Tensor Core GPU" (SXM, 2022), "NVIDIA H200 Tensor Core GPU"
#   (SXM, 2023), "NVIDIA HGX" (B200, 2025). The bytes of memory and their peak rate are what a driver gives, as XLA
#   notes them (xla/backends/gpu/target_config/specs, 2026-11).
# Products of f32 arrays are TF32's by default, with half the peak (the data sheets).
# Products of bf16 at the power limit: H200 755 TFLOP/s and B200 1429 (Bekman, "Machine Learning Engineering",
#   accelerators, MSMF, 2026). A100 268 at its best shape, that is 0.86 (ibid., MAMF, 2024); that it holds 0.8 is a
#   guess. H100 792 at its best shape (ibid.); that it holds 0.71 is a guess.
# Memory: on an H100 the sum of two vectors of 4 GiB takes 4.1 ms, that is 0.94 (Austin et al., "How to Scale Your
#   Model", GPUs, 2025). That the others reach 0.9 is a guess.
# NVLink: 370 GB/s of the H100's 450 (Austin et al., ibid.); 235 of the A100's 300 is what NCCL itself counts with
#   (src/graph/tuning.cc, 2020). For the H200 and the B200 the share is a guess, that of the H100.
# Host: PCIe with 16 lanes, of generation 4 (A100) and 5. That 0.8 of it is reached is a guess.
# NICs, one a GPU: DGX A100 8 x 200 Gb/s; DGX H100, H200 and B200 8 x 400 Gb/s (their user guides, 2020 to 2025). That
#   0.9 of them is reached is a guess.
# Seconds: NCCL's own model of a ring with its Simple protocol (src/tuning/cost_model.cc, 2026): 8.4 us to start, 3.4
#   for a step over NVLink, 14 for one over the network. From kernel to kernel 1.5 us, what a tiny one takes in JAX on
#   an H100 (Austin et al., ibid.); that it holds for the others is a guess.
_NCCL = {"kernel_s": 1.5e-6, "collective_s": 8.4e-6, "hop_s": 3.4e-6, "network_hop_s": 14e-6}
_A100 = Chip(
    name="a100",
    platform="cuda",
    device_kinds=("NVIDIA A100-SXM4-80GB",),
    memory_bytes=85_100_068_864,
    flops=Rate(312e12, 0.8),
    f32_share=0.5,
    memory_rate=Rate(2.03904e12, 0.9),
    host_rate=Rate(32e9, 0.8),
    link_rate=Rate(300e9, 0.78),
    network_rate=Rate(25e9, 0.9),
    **_NCCL,
)
_H100 = Chip(
    name="h100",
    platform="cuda",
    device_kinds=("NVIDIA H100 80GB HBM3",),
    memory_bytes=85_029_158_912,
    flops=Rate(989e12, 0.71),
    f32_share=0.5,
    memory_rate=Rate(3.35232e12, 0.94),
    host_rate=Rate(64e9, 0.8),
    link_rate=Rate(450e9, 0.82),
    network_rate=Rate(50e9, 0.9),
    **_NCCL,
)
_H200 = dataclasses.replace(
    _H100,
    name="h200",
    device_kinds=("NVIDIA H200", "NVIDIA H200 141GB HBM3e"),
    memory_bytes=151_397_597_184,
    flops=Rate(989e12, 0.76),
    memory_rate=Rate(4.8e12, 0.9),
)
_B200 = dataclasses.replace(
    _H100,
    name="b200",
    device_kinds=("NVIDIA B200",),
    memory_bytes=191_514_411_008,
    flops=Rate(2250e12, 0.635),
    memory_rate=Rate(7.67232e12, 0.9),
    link_rate=Rate(900e9, 0.82),
)

# Google. Peak, capacity and memory: "TPU v4", "TPU v5e", "TPU v5p", "TPU v6e" in the documentation of Cloud TPU, 2025;
#   the links there (bidirectional, of a chip: v5e 400 GB/s, v5p 1200, v6e 800) over the number of links (4, 6, 4) and
#   both directions; v4: 50 GB/s (Jouppi et al., "TPU v4", arXiv 2304.01433, 2023). That 0.9 of a link is reached is
#   what "How to Scale Your Model" (TPUs, 2025) counts with: 45 and 90 GB/s; from there too: PCIe 16 GB/s (v6e 32) and
#   the network 6.25 GB/s (v5e 3.125, v6e 12.5) of each chip.
# Products of f32 arrays are rounded to bf16 by default (jax.lax.Precision.DEFAULT).
# Guesses: 0.9 of the products' and of the memory's peak; no time from kernel to kernel, since one program runs them
#   all; 1 us for a step over a link, and 1 us to start; 50 us for a step to another slice.
_ICI = {"kernel_s": 0.0, "collective_s": 1e-6, "hop_s": 1e-6, "network_hop_s": 50e-6}


def _tpu(
    name: str,
    kinds: tuple[str, ...],
    gib: int,
    *,
    flops: float,
    memory: float,
    link: float,
    host: float,
    network: float,
) -> Chip:
    return Chip(
        name=name,
        platform="tpu",
        device_kinds=kinds,
        memory_bytes=gib * 2**30,
        flops=Rate(flops, 0.9),
        f32_share=1.0,
        memory_rate=Rate(memory, 0.9),
        host_rate=Rate(host, 1.0),
        link_rate=Rate(link, 0.9),
        network_rate=Rate(network, 1.0),
        **_ICI,
    )


# A CPU device of a process that simulates several. Guesses, all of them: nothing is promised of these, and calibration
# is quick.
_CPU = Chip(
    name="cpu",
    platform="cpu",
    device_kinds=("cpu",),
    memory_bytes=2 * 2**30,
    flops=Rate(20e9, 1.0),
    f32_share=1.0,
    memory_rate=Rate(5e9, 1.0),
    host_rate=Rate(5e9, 1.0),
    link_rate=Rate(1e9, 1.0),
    network_rate=Rate(1e9, 1.0),
    kernel_s=1e-6,
    collective_s=50e-6,
    hop_s=10e-6,
    network_hop_s=10e-6,
)
CHIPS = {
    chip.name: chip
    for chip in (
        _CPU,
        _A100,
        _H100,
        _H200,
        _B200,
        _tpu("v4", ("TPU v4",), 32, flops=275e12, memory=1.228e12, link=50e9, host=16e9, network=6.25e9),
        _tpu("v5e", ("TPU v5 lite", "TPU v5e"), 16, flops=197e12, memory=819e9, link=50e9, host=16e9, network=3.125e9),
        _tpu("v5p", ("TPU v5", "TPU v5p"), 95, flops=459e12, memory=2.765e12, link=100e9, host=16e9, network=6.25e9),
        _tpu("v6e", ("TPU v6 lite", "TPU v6e"), 32, flops=918e12, memory=1.6e12, link=100e9, host=32e9, network=12.5e9),
    )
}
_GPUS_PER_HOST = 8
_TPU_HOST = (2, 2, 1)  # the chips of a host in a described topology


def torus_links(dim: int) -> str:
    """The lane of the links along one dim of a TPU slice."""
    return f"torus links along dim {dim}"


class Route(NamedTuple):
    """What a ring of devices sends over: its links, bytes/s that each device sends, seconds before the last byte's."""

    lanes: tuple[str, ...]
    rate: float
    latency_s: float


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Devices in the order of `targets.devices(target)`.

    Attributes:
        target: its name.
        chip: each of the devices.
        num_devices: in all.
        devices_per_host: of consecutive devices.
        torus: the chips along each dim of a TPU slice; None for GPUs and CPUs.
    """

    target: str
    chip: Chip
    num_devices: int
    devices_per_host: int
    torus: tuple[int, ...] | None = None

    def route(self, group: Sequence[int]) -> Route:
        """How a ring of the devices with these indices communicates: inside a host or a slice, or between several.

        In a ring all links carry the same bytes. Of the m devices that a host has in the ring one sends to the next
        host, so the ring would be as slow as one NIC; with rails there are m such rings, each with 1/m of the bytes,
        and each leaves through another NIC. So a host sends with m NICs, and a device inside it with its own link.

        Raises:
            ValueError: an index that is not in the cluster.
        """
        if not group or not 0 <= min(group) <= max(group) < self.num_devices:
            raise ValueError(f"hardware: a group outside {self.target}\n  got:      devices {list(group)[:16]}")
        chip, island = self.chip, math.prod(self.torus) if self.torus else self.devices_per_host
        members: dict[int, list[int]] = {}
        for device in group:
            members.setdefault(device // island, []).append(device % island)
        inside = max((self._inside(local) for local in members.values()), key=lambda route: route.latency_s)
        if len(members) == 1:
            return inside
        num_local = min(map(len, members.values()))
        network = num_local * chip.network_rate.effective
        # A step of the ring crosses to the next host, or stays inside one.
        steps = (len(group) - len(members)) * chip.hop_s + (len(members) - 1) * chip.network_hop_s
        return Route(
            (BETWEEN_SLICES if self.torus else BETWEEN_HOSTS,),
            min(network, inside.rate),
            chip.collective_s + steps,
        )

    def _inside(self, group: Sequence[int]) -> Route:
        chip = self.chip
        if self.torus is None:
            latency = chip.collective_s + (len(group) - 1) * chip.hop_s
            return Route((INSIDE_HOST,), chip.link_rate.effective, latency)
        return self._inside_torus([self.coordinates(device) for device in group], self.torus)

    def _inside_torus(self, places: Sequence[tuple[int, ...]], torus: tuple[int, ...]) -> Route:
        """A share of the bytes goes along each dim that the group spans, both ways at once.

        Where a dim does not wrap around, the link at its end has to carry, one way, all that the other chips send.
        """
        spanned = [d for d in range(len(torus)) if len({place[d] for place in places}) > 1]
        ways = sum(2 if self._wraps(d) else 1 for d in spanned)
        hops = sum(torus[d] // 2 if self._wraps(d) else torus[d] - 1 for d in spanned)
        chip = self.chip
        lanes = tuple(map(torus_links, spanned or [0]))
        return Route(lanes, max(ways, 1) * chip.link_rate.effective, chip.collective_s + hops * chip.hop_s)

    def coordinates(self, device: int) -> tuple[int, ...]:
        """Of a chip in its slice. Hosts, and the chips of a host, are counted along the first dim first."""
        torus = self.torus or ()
        tile = [min(size, width) for size, width in zip(torus, _TPU_HOST, strict=False)]
        host, chip = divmod(device, math.prod(tile))
        place = []
        for size, width in zip(torus, tile, strict=True):
            host, across = divmod(host, size // width)
            chip, within = divmod(chip, width)
            place.append(across * width + within)
        return tuple(place)

    def _wraps(self, dim: int) -> bool:
        """In two dims (v5e, v6e) the 16 chips of a full pod do; in three, cubes of 4x4x4 do, joined by switches.

        Source: Austin et al., "How to Scale Your Model", TPUs, 2025.
        """
        torus = self.torus or ()
        return torus[dim] == 16 if len(torus) == 2 else all(size % 4 == 0 for size in torus)


def cluster(target: str, calibration: str | Path | None = None) -> Cluster:
    """A cluster by the name of its target.

    Args:
        target: 'cpu:8'; 'a100:N', 'h100:N', 'h200:N' or 'b200:N', in hosts of 8; or a TPU topology: 'v4:2x2x2',
            'v5e:4x4', 'v5p:4x4x4', 'v6e:8x8', or several slices of it: 'v5e:4x4*2'.
        calibration: a file that `zerojax.plan.calibrate` wrote. What it measured takes the place of the constants.

    Raises:
        ValueError: an unknown target, a number that hosts of 8 do not make up, or a calibration of another chip.
    """
    name, _, size = target.partition(":")
    chip = CHIPS.get(name)
    pattern = r"([1-9]\d*(?:x[1-9]\d*){1,2})(?:\*([1-9]\d*))?" if chip and chip.platform == "tpu" else r"([1-9]\d*)"
    match = re.fullmatch(pattern, size)
    if chip is None or match is None:
        raise ValueError(
            f"targets: unknown target {target!r}\n"
            f"  fix:      'cpu:8', 'h100:8' (a100, h200, b200), or a TPU topology such as 'v5e:4x4' (v4, v5p, v6e)"
        )
    if calibration is not None:
        chip = _calibrated(chip, Path(calibration))
    if chip.platform == "tpu":
        torus = tuple(int(length) for length in match.group(1).split("x"))
        devices_per_host = math.prod(map(min, torus, _TPU_HOST))
        return Cluster(target, chip, math.prod(torus) * int(match.group(2) or 1), devices_per_host, torus)
    count = int(size)
    if chip.platform == "cuda" and count > _GPUS_PER_HOST and count % _GPUS_PER_HOST:
        raise ValueError(
            f"targets: unknown target {target!r}\n  fix:      '{name}:N' with N up to 8, or a multiple of 8"
        )
    return Cluster(target, chip, count, min(count, _GPUS_PER_HOST) if chip.platform == "cuda" else count)


def _calibrated(chip: Chip, path: Path) -> Chip:
    measured = json.loads(path.read_text())
    if measured["device_kind"] not in chip.device_kinds:
        raise ValueError(
            f"hardware: {path} was not measured on {chip.name}\n"
            f"  got:      {measured['device_kind']!r}, not one of {list(chip.device_kinds)}\n"
            f"  fix:      calibrate on one of these, or plan without it"
        )
    return dataclasses.replace(
        chip,
        flops=chip.flops._replace(efficiency=measured["flops"] / chip.flops.peak),
        memory_rate=chip.memory_rate._replace(efficiency=measured["memory_rate"] / chip.memory_rate.peak),
    )
