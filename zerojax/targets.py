"""Described devices: compile for a cluster that is not there.

The GPU compiler comes with `zerojax[aot-gpu]`, the TPU compiler with `zerojax[aot-tpu]`. They need neither accelerator
nor driver.
"""

from __future__ import annotations

import os
import re
from typing import Any

import jax
from jax.experimental import topologies

# What the compiler asks of a device. Sources: NVIDIA H100 Tensor Core GPU architecture whitepaper (SXM5: 132 SMs, 50 MB
# L2, 3.35 TB/s HBM3, 80 GB) and the CUDA programming guide's table of compute capability 9.0.
_H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132  fpus_per_core: 128  clock_rate_ghz: 1.98
  threads_per_warp: 32  threads_per_block_limit: 1024  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  shared_memory_per_block: 49152  shared_memory_per_block_optin: 232448  shared_memory_per_core: 233472
  l2_cache_size: 52428800  memory_bandwidth: 3352320000000  device_memory_size: 85029158912
}
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
dnn_version_info { major: 9 minor: 8 }
"""
_GPUS_PER_HOST = 8
# libtpu asks the cloud's metadata server where it runs, unless it is told.
_NO_TPU_HOST = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5p-128", "TPU_WORKER_HOSTNAMES": "localhost"}
# Without a driver CUPTI cannot tell its version.
_NO_GPU_DRIVER = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}


def devices(target: str) -> list[Any]:
    """The devices of a described cluster, for `make_mesh(devices=...)`. Nothing can run on them.

    Call it before JAX looks for devices, or in a process that runs on CPU.

    Args:
        target: 'h100:N', in hosts of 8, or a TPU topology: 'v4:2x2x2', 'v5e:4x4', 'v5p:4x4x4', 'v6e:8x8'.

    Raises:
        ValueError: an unknown target, or a number that hosts of 8 do not make up.
        RuntimeError: the compiler is not installed, or refuses the topology.
    """
    gpus = re.fullmatch(r"h100:(\d+)", target)
    if gpus:
        return _h100s(target, int(gpus.group(1)))
    if re.fullmatch(r"v\d\w*:\d+(x\d+){1,2}", target):
        return _describe("TPU", _NO_TPU_HOST, target, platform="tpu", topology_name=target)
    raise ValueError(f"targets: unknown target {target!r}\n  fix:      'h100:8', or a TPU topology such as 'v5e:4x4'")


def _h100s(target: str, count: int) -> list[Any]:
    if not count or (count > _GPUS_PER_HOST and count % _GPUS_PER_HOST):
        raise ValueError(f"targets: unknown target {target!r}\n  fix:      'h100:N' with N up to 8, or a multiple of 8")
    per_host = min(count, _GPUS_PER_HOST)
    return _describe(
        "GPU",
        _NO_GPU_DRIVER,
        target,
        platform="cuda",
        topology_name="NVIDIA H100",
        topology=f"1x{count // per_host}x{per_host}",
        target_config=_H100,
    )


def _describe(compiler: str, environment: dict[str, str], target: str, **description: Any) -> list[Any]:
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    try:
        return list(topologies.get_topology_desc(**description).devices)
    except (RuntimeError, jax.errors.JaxRuntimeError) as error:
        raise RuntimeError(
            f"targets: no {compiler} compiler for {target!r} ({error})\n"
            f"  fix:      pip install 'zerojax[aot-{compiler.lower()}]', and a topology that exists"
        ) from error
