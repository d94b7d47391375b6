"""Described devices: compile for a cluster that is not there.

The GPU compiler comes with `zerojax[aot-gpu]` and needs neither a GPU nor a driver.
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
_DEVICES_PER_HOST = 8


def devices(target: str) -> list[Any]:
    """The devices of a described cluster, for `make_mesh(devices=...)`. Nothing can run on them.

    Call it before JAX looks for devices, or in a process that runs on CPU.

    Args:
        target: 'h100:N', in hosts of 8.

    Raises:
        ValueError: an unknown target, or a number that hosts of 8 do not make up.
        RuntimeError: the compiler is not installed.
    """
    found = re.fullmatch(r"h100:(\d+)", target)
    count = int(found.group(1)) if found else 0
    if not count or (count > _DEVICES_PER_HOST and count % _DEVICES_PER_HOST):
        raise ValueError(f"targets: unknown target {target!r}\n  fix:      'h100:N' with N up to 8, or a multiple of 8")
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # without a driver CUPTI cannot tell its version
    per_host = min(count, _DEVICES_PER_HOST)
    try:
        description = topologies.get_topology_desc(
            platform="cuda",
            topology_name="NVIDIA H100",
            topology=f"1x{count // per_host}x{per_host}",
            target_config=_H100,
        )
    except (RuntimeError, jax.errors.JaxRuntimeError) as error:
        raise RuntimeError(
            f"targets: the GPU compiler is not available ({error})\n  fix:      pip install 'zerojax[aot-gpu]'"
        ) from error
    return list(description.devices)
