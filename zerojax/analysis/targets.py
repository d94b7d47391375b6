"""Devices of described clusters, for which programs can be compiled without the hardware.

`zerojax[plan-gpu]` installs the GPU compiler and `zerojax[plan-tpu]` the TPU compiler. They need neither an accelerator
nor a driver.
"""

from __future__ import annotations

import os
from typing import Any

import jax
from jax.experimental import topologies

from zerojax.analysis.hardware import Cluster, cluster
from zerojax.sharding.tpu import in_order_of_coordinates

_GPU = """
gpu_device_info {{
  cuda_compute_capability {{ major: {major} }}
  core_count: {cores}  fpus_per_core: {fpus}  clock_rate_ghz: {clock_ghz}
  threads_per_warp: 32  threads_per_block_limit: 1024  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  shared_memory_per_block: 49152  shared_memory_per_block_optin: {shared}  shared_memory_per_core: {shared_core}
  l2_cache_size: {l2}  memory_bandwidth: {memory_rate:.0f}  device_memory_size: {memory_bytes}
}}
platform_name: "CUDA"
device_description_str: "{kind}"
dnn_version_info {{ major: 9 minor: 8 }}
"""
# Sources: the architecture whitepapers of NVIDIA A100 (2020: 108 SMs, 40 MB L2), H100 (2022: 132, 50 MB; so is the
# H200) and the target configurations of XLA (xla/backends/gpu/target_config/specs, 2026-11; B200: 148, 126.5 MB); the
# CUDA programming guide's table of compute capabilities 8.0, 9.0 and 10.0.
_HOPPER = {
    "major": 9, "cores": 132, "fpus": 128, "clock_ghz": 1.98, "l2": 52428800, "shared": 232448, "shared_core": 233472
}  # fmt: skip
_SPECS = {
    "a100": {**_HOPPER, "major": 8, "cores": 108, "fpus": 64, "clock_ghz": 1.41, "l2": 41943040, "shared": 166912,
             "shared_core": 167936},
    "h100": _HOPPER,
    "h200": _HOPPER,
    "b200": {**_HOPPER, "major": 10, "cores": 148, "clock_ghz": 1.965, "l2": 132644864},
}  # fmt: skip
# Without these variables, libtpu asks the cloud's metadata server where it runs. It also allows only one process at a
# time, which matters to programs that run on the chips of the host, but not here.
_NO_TPU_HOST = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-128",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# Without a driver, CUPTI cannot report its version.
_NO_GPU_DRIVER = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}


def describe_only() -> None:
    """Makes JAX use only the CPU, and keeps the accelerator packages from looking for hardware.

    For programs that only plan. Call it before JAX looks for devices.
    """
    for name, value in ({"JAX_PLATFORMS": "cpu"} | _NO_TPU_HOST | _NO_GPU_DRIVER).items():
        os.environ.setdefault(name, value)


def devices(target: str) -> list[Any]:
    """Returns the devices of a described cluster, for `make_mesh(devices=...)`. Programs can be compiled for them only.

    Call it before JAX looks for devices, or in a process that runs on CPU.

    Args:
        target: 'a100:N', 'h100:N', 'h200:N' or 'b200:N', in hosts of 8; a TPU topology such as 'v4:2x2x2', 'v5e:4x4',
            'v5p:4x4x4' or 'v6e:8x8'; several slices of one, such as 'v5e:4x4*2'; or 'cpu:N', the simulated devices of
            this process, on which programs can also run.

    Returns:
        A list of devices, one for each chip. Those of TPUs are in the order of their slices and coordinates.

    Raises:
        ValueError: if the target is unknown, or if more than 8 GPUs are not a multiple of 8.
        RuntimeError: if the compiler is not installed or rejects the topology, or if this process has too few simulated
            devices.
    """
    found = cluster(target)
    chip = found.chip
    if chip.platform == "cpu":
        return _simulated_devices(found)
    if chip.platform == "cuda":
        kind, topology = chip.device_kinds[0], (1, found.num_devices // found.devices_per_host, found.devices_per_host)
        sizes = {"memory_bytes": chip.memory_bytes, "memory_rate": chip.memory_rate.peak, **_SPECS[chip.name]}
        options: dict[str, object] = {"topology_name": kind, "topology": "x".join(map(str, topology))}
        options["target_config"] = _GPU.format(kind=kind, **sizes)
        return _described_devices("GPU", _NO_GPU_DRIVER, target, platform="cuda", **options)
    name, _, num_slices = target.partition("*")
    options = {"num_slices": int(num_slices)} if num_slices else {}
    if chip.name == "v4":
        options["chip_config_name"] = "megacore"  # both cores of a chip form one device, as in the cloud
    return _described_devices("TPU", _NO_TPU_HOST, target, platform="tpu", topology_name=name, **options)


def platform(target: str) -> str:
    """The platform of a target: 'cuda', 'tpu' or 'cpu', as in `lower(lowering_platforms=(platform(target),))`.

    Args:
        target: the name of a cluster, as in `devices`.

    Raises:
        ValueError: if the target is unknown.
    """
    return cluster(target).chip.platform


def _simulated_devices(wanted: Cluster) -> list[Any]:
    available = jax.devices("cpu")
    if len(available) < wanted.num_devices:
        raise RuntimeError(
            f"targets: not enough simulated devices for {wanted.target!r}\n"
            f"  got:      {len(available)}\n"
            f"  fix:      zerojax.simulate_devices({wanted.num_devices}) before anything else touches JAX"
        )
    return available[: wanted.num_devices]


def _described_devices(compiler: str, environment: dict[str, str], target: str, **description: Any) -> list[Any]:
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    try:
        return in_order_of_coordinates(topologies.get_topology_desc(**description).devices)
    except (RuntimeError, jax.errors.JaxRuntimeError) as error:
        raise RuntimeError(
            f"targets: no {compiler} compiler for {target!r} ({error})\n"
            f"  fix:      pip install 'zerojax[plan-{compiler.lower()}]', and name a topology that exists"
        ) from error
