"""Describes chips and clusters: rates, memory sizes and latencies, each with its source and date.

A `Rate` has the peak of the data sheet, which utilization refers to, and the share of it that large operations reach.
Values for which no measurement is published are marked as guesses. `calibrate` measures the rates of matrix
products, of memory and of the link to the host, which can take their place.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import re
import statistics
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.sharding.placement import PINNED_HOST
from zerojax.utils.typing import Array

INSIDE_HOST, BETWEEN_HOSTS = "link inside a host", "link between hosts"
BETWEEN_SLICES = "link between slices"


class Rate(NamedTuple):
    """A rate per second.

    Attributes:
        peak: that of the data sheet.
        efficiency: the share of it that large operations reach.
    """

    peak: float
    efficiency: float

    @property
    def effective(self) -> float:
        return self.peak * self.efficiency


@dataclasses.dataclass(frozen=True)
class Chip:
    """A device as JAX sees it. Rates are per second.

    Attributes:
        name: the name in targets.
        platform: the name in `lowering_platforms`: 'cuda', 'tpu' or 'cpu'.
        device_kinds: the possible values of `jax.Device.device_kind`.
        memory_bytes: capacity of the device memory.
        host_memory_bytes: memory of a host, divided by its devices.
        flops: flops of dense bf16 matrix products.
        f32_share: the share of `flops` that products of f32 arrays reach at JAX's default precision.
        memory_rate: bytes read and written in device memory.
        host_rate: bytes copied between device memory and host memory, in one direction, by a copy engine.
        duplex_share: the share of `host_rate` that each direction reaches while both are busy.
        link_rate: bytes sent, on a GPU to the others of its host, on a TPU over one link in one direction.
        network_rate: bytes sent over the device's own NIC to another host, on a TPU to another slice.
        kernel_s: seconds from the end of one kernel to the start of the next.
        collective_s: seconds to start a collective.
        hop_s: seconds for a step of a ring to a neighbor within the host, on a TPU over one link.
        network_hop_s: seconds for a step of a ring to another host, on a TPU to another slice.
    """

    name: str
    platform: str
    device_kinds: tuple[str, ...]
    memory_bytes: int
    host_memory_bytes: int
    flops: Rate
    f32_share: float
    memory_rate: Rate
    host_rate: Rate
    duplex_share: float
    link_rate: Rate
    network_rate: Rate
    kernel_s: float
    collective_s: float
    hop_s: float
    network_hop_s: float


# NVIDIA. The peaks of dense bf16 products and of NVLink (half of the figure for both directions) are from the data
#   sheets: "NVIDIA A100 Tensor Core GPU" (SXM, 80 GB, 2021), "NVIDIA H100 Tensor Core GPU" (SXM, 2022), "NVIDIA H200
#   Tensor Core GPU" (SXM, 2023), "NVIDIA HGX" (B200, 2025). The memory sizes and their peak rates are those that a
#   driver reports, as listed by XLA (xla/backends/gpu/target_config/specs, 2026-11). XLA lists 141 GiB for the H200,
#   the number of the data sheet in another unit: a driver reports 143156 MiB, which are 139.8 GiB (PyTorch's properties
#   of the device, and its errors about too little memory, in public reports of 2025 and 2026).
# Products of f32 arrays use TF32 by default, with half the peak (data sheets).
# Products of bf16 arrays at the power limit: H200 755 TFLOP/s and B200 1429 (Bekman, "Machine Learning Engineering",
#   accelerators, MSMF, 2026). A100 268 at its best shape, which is 0.86 (ibid., MAMF, 2024); the sustained 0.8 is a
#   guess. H100 792 at its best shape (ibid.); the sustained 0.71 is a guess.
# Memory: on an H100 the sum of two vectors of 4 GiB takes 4.1 ms, which is 0.94 (Austin et al., "How to Scale Your
#   Model", GPUs, 2025). The 0.9 of the others is a guess.
# NVLink: 370 GB/s of the H100's 450 (Austin et al., ibid.); NCCL assumes 235 of the A100's 300 (src/graph/tuning.cc,
#   2020). The share of the H200 and the B200 is a guess: that of the H100.
# Host: 16 lanes of PCIe 4 (A100) or PCIe 5 (all others). On an H100, copy engines reach 55.2 GB/s in either direction
#   alone, and 43.3 each way in both (docs/results.md). For the others the shares are a guess: those of the H100.
# Host memory: 2 TB for 8 GPUs (user guides of DGX A100 640 GB, H100, H200 and B200, 2020 to 2025).
# NICs, one for each GPU: DGX A100 8 x 200 Gb/s; DGX H100, H200 and B200 8 x 400 Gb/s (user guides, 2020 to 2025). The
#   share of 0.9 is a guess.
# Latencies: NCCL's model of a ring with its Simple protocol (src/tuning/cost_model.cc, 2026): 8.4 us to start, 3.4 us
#   for a step over NVLink, 14 us for a step over the network. From kernel to kernel 1.5 us, the time of a tiny kernel
#   in JAX on an H100 (Austin et al., ibid.); for the others this is a guess.
_NCCL = {"kernel_s": 1.5e-6, "collective_s": 8.4e-6, "hop_s": 3.4e-6, "network_hop_s": 14e-6}


def _gpu(
    name: str,
    kinds: tuple[str, ...],
    memory: int,
    *,
    flops: Rate,
    memory_rate: Rate,
    host: float,
    link: Rate,
    nic: float,
) -> Chip:
    host_memory, host_rate, network_rate = 2 * 10**12 // 8, Rate(host, 0.8625), Rate(nic, 0.9)
    rates = flops, 0.5, memory_rate, host_rate, 0.784, link, network_rate
    return Chip(name, "cuda", kinds, memory, host_memory, *rates, **_NCCL)


# Google. Peak, capacity and memory rate: "TPU v4", "TPU v5e", "TPU v5p", "TPU v6e" in the documentation of Cloud TPU,
#   2025. What it calls GB are GiB, and the 95 of a v5p are 96: its compiler gives programs more than 95 (see
#   `zerojax.plan.planner.MEMORY_SHARE`).
# Links: the bidirectional rate of a chip given there (v5e 400 GB/s, v5p 1200, v6e 800), divided by the number of links
#   (4, 6, 4) and by the two directions; v4: 50 GB/s (Jouppi et al., "TPU v4", arXiv 2304.01433, 2023). From "How to
#   Scale Your Model" (TPUs, 2025) are the share of 0.9 for links, which gives 45 and 90 GB/s, PCIe with 16 GB/s (v6e
#   32), and the network with 6.25 GB/s (v5e 3.125, v6e 12.5) for each chip.
# Host memory: of machines with 4 chips, v4 407 GB, v5e 192, v5p 448, v6e 720 (machine types of Cloud TPU, 2025).
# Products of f32 arrays are rounded to bf16 by default (jax.lax.Precision.DEFAULT).
# Guesses: 0.9 of the peaks of products and of memory; no time between kernels, since one program runs them all; 1 us
#   for a step over a link, and 1 us to start; 50 us for a step to another slice.
_ICI = {"kernel_s": 0.0, "collective_s": 1e-6, "hop_s": 1e-6, "network_hop_s": 50e-6}


def _tpu(
    name: str, kinds: tuple[str, ...], gib: int, host_gb: int, *, flops: float, memory: float, link: float, host: float,
    network: float,
) -> Chip:  # fmt: skip
    rates = Rate(flops, 0.9), 1.0, Rate(memory, 0.9), Rate(host, 1.0), 1.0, Rate(link, 0.9), Rate(network, 1.0)
    return Chip(name, "tpu", kinds, gib * 2**30, host_gb * 10**9 // 4, *rates, **_ICI)


# A simulated CPU device. All values are guesses; calibration replaces the two most important ones within seconds.
_CPU_RATES = Rate(20e9, 1.0), 1.0, Rate(5e9, 1.0), Rate(5e9, 1.0), 1.0, Rate(1e9, 1.0), Rate(1e9, 1.0)
_CPU = Chip("cpu", "cpu", ("cpu",), 2 * 2**30, 2**34, *_CPU_RATES, 1e-6, 50e-6, 10e-6, 10e-6)
CHIPS = {
    chip.name: chip
    for chip in (
        _CPU,
        _gpu("a100", ("NVIDIA A100-SXM4-80GB",), 85_100_068_864, flops=Rate(312e12, 0.8),
             memory_rate=Rate(2.03904e12, 0.9), host=32e9, link=Rate(300e9, 0.78), nic=25e9),
        _gpu("h100", ("NVIDIA H100 80GB HBM3",), 85_029_158_912, flops=Rate(989e12, 0.71),
             memory_rate=Rate(3.35232e12, 0.94), host=64e9, link=Rate(450e9, 0.82), nic=50e9),
        _gpu("h200", ("NVIDIA H200", "NVIDIA H200 141GB HBM3e"), 143_156 * 2**20, flops=Rate(989e12, 0.76),
             memory_rate=Rate(4.8e12, 0.9), host=64e9, link=Rate(450e9, 0.82), nic=50e9),
        _gpu("b200", ("NVIDIA B200",), 191_514_411_008, flops=Rate(2250e12, 0.635),
             memory_rate=Rate(7.67232e12, 0.9), host=64e9, link=Rate(900e9, 0.82), nic=50e9),
        _tpu("v4", ("TPU v4",), 32, 407, flops=275e12, memory=1.228e12, link=50e9, host=16e9, network=6.25e9),
        _tpu("v5e", ("TPU v5 lite", "TPU v5e"), 16, 192, flops=197e12, memory=819e9, link=50e9, host=16e9,
             network=3.125e9),
        _tpu("v5p", ("TPU v5", "TPU v5p"), 96, 448, flops=459e12, memory=2.765e12, link=100e9, host=16e9,
             network=6.25e9),
        _tpu("v6e", ("TPU v6 lite", "TPU v6e"), 32, 720, flops=918e12, memory=1.6e12, link=100e9, host=32e9,
             network=12.5e9),
    )
}  # fmt: skip
_GPUS_PER_HOST = 8
_TPU_HOST = (2, 2, 1)  # the chips of one host in a described topology


def chip_of_kind(device_kind: str) -> Chip | None:
    """The chip with a `jax.Device.device_kind`, or None if it is not known."""
    return next((chip for chip in CHIPS.values() if device_kind in chip.device_kinds), None)


def torus_links(dim: int) -> str:
    """The name of the links along one dim of a TPU slice."""
    return f"torus links along dim {dim}"


class Route(NamedTuple):
    """How a ring of devices communicates.

    Attributes:
        lanes: the links that it uses.
        rate: the bytes per second that each device sends.
        latency_s: the seconds until the first bytes have gone around.
    """

    lanes: tuple[str, ...]
    rate: float
    latency_s: float


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A cluster. Its devices are in the order of `targets.devices(target)`.

    Attributes:
        target: the name of the cluster.
        chip: the kind of all devices.
        num_devices: the number of devices.
        devices_per_host: the number of devices of a host. Those of a host of GPUs are consecutive.
        torus: the number of chips along each dim of a TPU slice; None for GPUs and CPUs.
    """

    target: str
    chip: Chip
    num_devices: int
    devices_per_host: int
    torus: tuple[int, ...] | None = None

    @property
    def devices_per_slice(self) -> int | None:
        """The number of chips of a TPU slice; None for GPUs and CPUs."""
        return math.prod(self.torus) if self.torus else None

    def route(self, group: Sequence[int], one_way: bool = False) -> Route:
        """Returns how a ring of devices communicates: within a host or slice, or between several.

        All links of a ring carry the same bytes. If a host has m devices in the ring, only one of them sends to the
        next host, so one ring would be as slow as one NIC. With rails there are m rings, each with 1/m of the bytes and
        with a different NIC, so that a host sends over m NICs, and each device within it over its own link.

        Args:
            group: the indices of the devices.
            one_way: whether they send in one direction around a torus only, as in a permutation.

        Raises:
            ValueError: if the group is empty or has an index that is not in the cluster.
        """
        if not group or not 0 <= min(group) <= max(group) < self.num_devices:
            raise ValueError(f"hardware: a group is outside {self.target}\n  got:      devices {list(group)[:16]}")
        chip, island = self.chip, self.devices_per_slice or self.devices_per_host
        members: dict[int, list[int]] = {}
        for device in group:
            members.setdefault(device // island, []).append(device % island)
        routes = [self._inside(devices, one_way) for devices in members.values()]
        inside = max(routes, key=lambda route: route.latency_s)
        if len(members) == 1:
            return inside
        num_nics = min(map(len, members.values()))
        network = num_nics * chip.network_rate.effective  # to the host, chips of a TPU copy faster than this
        # Each step of the ring either crosses to the next host or stays within one.
        steps = (len(group) - len(members)) * chip.hop_s + (len(members) - 1) * chip.network_hop_s
        return Route(
            (BETWEEN_SLICES if self.torus else BETWEEN_HOSTS,), min(network, inside.rate), chip.collective_s + steps
        )

    def _inside(self, group: Sequence[int], one_way: bool) -> Route:
        """The route within a host or a slice.

        In a torus, a share of the bytes goes along each dim that the group spans, in both directions. In a dim that
        does not wrap around, the link at the end carries everything that the other chips send, in one direction.
        """
        chip, torus = self.chip, self.torus
        if torus is None:
            latency = chip.collective_s + (len(group) - 1) * chip.hop_s
            return Route((INSIDE_HOST,), chip.link_rate.effective, latency)
        places = [self.coordinates(device) for device in group]
        spanned = [d for d in range(len(torus)) if len({place[d] for place in places}) > 1]
        ways = sum(2 if self._wraps(d) and not one_way else 1 for d in spanned)
        hops = sum(torus[d] // 2 if self._wraps(d) else torus[d] - 1 for d in spanned)
        lanes = tuple(map(torus_links, spanned or [0]))
        return Route(lanes, max(ways, 1) * chip.link_rate.effective, chip.collective_s + hops * chip.hop_s)

    def coordinates(self, device: int) -> tuple[int, ...]:
        """Returns the coordinates of a chip in its slice. Chips are numbered in the order of their coordinates.

        Args:
            device: the index of the chip.
        """
        return tuple(int(place) for place in np.unravel_index(device, self.torus or ()))

    def _wraps(self, dim: int) -> bool:
        """Whether the links along a dim of the torus wrap around.

        With two dims (v5e, v6e), a dim with the 16 chips of a full pod wraps around. With three, cubes of 4x4x4 chips,
        which are connected by switches, do.

        Source: Austin et al., "How to Scale Your Model", TPUs, 2025.
        """
        torus = self.torus or ()
        return torus[dim] == 16 if len(torus) == 2 else all(size % 4 == 0 for size in torus)


def cluster(target: str, calibration: str | Path | None = None) -> Cluster:
    """Returns the cluster that a target names.

    Args:
        target: 'cpu:8'; 'a100:N', 'h100:N', 'h200:N' or 'b200:N', in hosts of 8; a TPU topology such as 'v4:2x2x2',
            'v5e:4x4', 'v5p:4x4x4' or 'v6e:8x8'; or several slices of one, such as 'v5e:4x4*2'.
        calibration: a file that `calibrate` wrote; its measured rates replace those of the data sheets.

    Raises:
        ValueError: if the target is unknown, if more than 8 GPUs are not a multiple of 8, or if the calibration is that
            of another chip.
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
            f"  fix:      calibrate on one of these, or plan without a calibration"
        )
    rates = ("flops", "memory_rate", "host_rate")  # files of earlier versions have no rate of the link to the host
    efficiency = lambda name: getattr(chip, name)._replace(efficiency=measured[name] / getattr(chip, name).peak)
    replaced = {name: efficiency(name) for name in rates if name in measured}
    share = {"duplex_share": measured["duplex_share"]} if "duplex_share" in measured else {}
    return dataclasses.replace(chip, **replaced, **share)


CALIBRATION = Path("~/.cache/zerojax/calibration.json")
# (width of the square matrices, elements of the vector). An accelerator reaches its rates only with large ones.
_ACCELERATOR_SIZES, _CPU_SIZES = (8192, 2**28), (512, 2**22)
_HOST_BYTES = 2**28  # of an array that is copied between host and device, as large as those of a model
# The clock of a GPU drops within a second or two of full load, so the first runs do not count.
_WARM_S, _NUM_RUNS, _RUN_S = 2.0, 9, 0.2


def calibrate(path: str | Path = CALIBRATION, *, warm_s: float = _WARM_S) -> dict[str, object]:
    """Measures the default device, and writes the file that `cluster(..., calibration=path)` reads.

    The products are of random bf16 matrices, since a GPU multiplies constant ones faster. Each rate is the median of
    several runs of many operations, after a load that lasts until the clocks have settled. Of several simulated
    devices, only one is measured, which has the processor to itself.

    Args:
        path: the file. Missing folders are created.
        warm_s: seconds of load before the first run that counts.

    Returns:
        The content of the file: the kind of the device, versions, the date, `flops` per second, and `memory_rate`, the
        bytes read and written per second. For an accelerator also `host_rate`, the bytes per second from pinned host
        memory or to it, in the slower direction, and `duplex_share`, the share of it that each direction reaches while
        both are busy.
    """
    device = jax.devices()[0]
    width, elements = _CPU_SIZES if device.platform == "cpu" else _ACCELERATOR_SIZES
    # The scale keeps the powers of the matrix bounded.
    matrix = jax.random.normal(jax.random.key(0), (width, width), jnp.bfloat16) * width**-0.5
    vector = jnp.zeros(elements, jnp.float32)
    measured = {
        "device_kind": device.device_kind,
        "versions": {name: metadata.version(name) for name in ("jax", "jaxlib")},
        "date": datetime.date.today().isoformat(),
        "flops": 2 * width**3 / _seconds(lambda last, x: last @ x, matrix, warm_s),
        "memory_rate": 2 * vector.nbytes / _seconds(lambda last, _: last + 1, vector, warm_s),
        **({} if device.platform == "cpu" else host_rates(device)),
    }
    path = Path(path).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(measured, indent=2) + "\n")
    return measured


def host_rates(device: Any, num_bytes: int = _HOST_BYTES) -> dict[str, float]:
    """`host_rate` and `duplex_share` of a device, see `calibrate`: medians of copies of an array in whole."""
    on_device, on_host = (jax.sharding.SingleDeviceSharding(device, memory_kind=k) for k in ("device", PINNED_HOST))
    of_device = jax.device_put(jnp.zeros(num_bytes, jnp.uint8), on_device)
    of_host = jax.device_put(of_device, on_host)

    def seconds(*copies: tuple[Array, Any]) -> float:
        start = time.perf_counter()
        jax.block_until_ready([jax.device_put(array, where, may_alias=False) for array, where in copies])
        return time.perf_counter() - start

    there, back = (of_device, on_host), (of_host, on_device)
    median = lambda *copies: statistics.median([seconds(*copies) for _ in range(_NUM_RUNS + 1)][1:])
    one_way = max(median(there), median(back))
    return {"host_rate": num_bytes / one_way, "duplex_share": min(1.0, one_way / median(there, back))}


def _seconds(operation: Callable[[Array, Array], Array], x: Array, warm_s: float) -> float:
    """Returns the seconds of `operation(previous_result, x)`, run in a loop of about `_RUN_S` seconds."""

    @jax.jit
    def repeat(x: Array, count: int) -> Array:
        return jax.lax.fori_loop(0, count, lambda _, last: operation(last, x).astype(x.dtype), x)

    def run(count: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(repeat(x, count))
        return time.perf_counter() - start

    run(1)  # compiles
    count = max(1, round(_RUN_S / (run(4) / 4)))
    for _ in range(round(warm_s / _RUN_S)):
        run(count)
    return statistics.median(run(count) for _ in range(_NUM_RUNS)) / count
