"""The configuration shared by all steps of one `Zero`, and the compiler options derived from it."""

from __future__ import annotations

import collections
import hashlib
import statistics
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from zerojax.program.run import SMALL_UNIT
from zerojax.sharding import placement
from zerojax.sharding.axes import Axes
from zerojax.sharding.placement import Leaf
from zerojax.sharding.precision import DTYPE_FIELDS, Precision
from zerojax.sharding.stages import Stage
from zerojax.sharding.torus import SPARSE_CORES
from zerojax.step.memory import DeviceMemory, Memory
from zerojax.utils.typing import AnyMesh

# The kinds of collectives that SparseCores run, if they can: over one, two or three, or any number of dims of a torus.
_OFFLOADED = "all_gather", "2d_all_gather", "3d_all_gather", "reduce_scatter", "nd_reduce_scatter", "all_reduce"


class ZeroConfig(NamedTuple):
    """The configuration shared by all steps of one `Zero`.

    Attributes:
        mesh: a Mesh, or an AbstractMesh for planning without devices.
        axes: the data axes of the mesh.
        stage: the stage of ZeRO.
        precision: dtypes and loss scaling.
        offload: what is in host memory: 'none', 'optimizer' or 'params', as in `Zero`.
        memory: which memory the states of the model are in while a step runs.
    """

    mesh: Any
    axes: Axes
    stage: Stage
    precision: Precision
    offload: str = "none"
    memory: Memory = DeviceMemory()

    @property
    def offloads_optimizer(self) -> bool:
        """Whether the optimizer's state, with the master copy, is in host memory."""
        return self.offload != "none"

    @property
    def offloads_params(self) -> bool:
        """Whether the parameters are in host memory too, and the gradients go there."""
        return self.offload == "params"

    @property
    def other_axes(self) -> list[str]:
        """The axes of the mesh that do not split the batch, such as 'model'."""
        return [name for name in self.mesh.axis_names if name not in self.axes.data]

    @property
    def spans_processes(self) -> bool:
        """Whether the mesh has devices of all of several processes, so that all of them run each step together."""
        count = jax.process_count()
        if count == 1 or not isinstance(self.mesh, Mesh):
            return False
        return len({device.process_index for device in self.mesh.devices.flat}) == count

    def texts(self) -> dict[str, str]:
        """The configuration as texts by name, for comparison between processes."""
        dtypes = {name: jnp.dtype(getattr(self.precision, name)).name for name in DTYPE_FIELDS}
        ids = hashlib.sha256(str([device.id for device in self.mesh.devices.flat]).encode()).hexdigest()[:8]
        mesh = ", ".join(f"{name} {size}" for name, size in self.mesh.shape.items())
        devices = f"{mesh} (order of the devices: {ids})"
        return {"stage": str(int(self.stage)), "mesh": devices, "offload": self.offload, **dtypes}


OFFLOADS = "none", "optimizer", "params"


def check_offload(offload: str, mesh: AnyMesh, axes: Axes, stage: Stage) -> None:
    """Checks `Zero(offload=...)`.

    Raises:
        ValueError: if the text is unknown, or the stage or the mesh cannot have it.
    """
    if offload not in OFFLOADS:
        known = ", ".join(map(repr, OFFLOADS[:-1]))
        raise ValueError(f"offload: unknown value {offload!r}\n  fix:      {known} or {OFFLOADS[-1]!r}")
    others = [name for name, size in mesh.shape.items() if name not in axes.data and size > 1]
    if offload != "none" and others:
        raise ValueError(
            f"offload: the optimizer's state cannot be in host memory on this mesh\n"
            f"  got:      axes {dict(mesh.shape)}, of which {', '.join(map(repr, others))} split no batch\n"
            f"  fix:      offload='none', or a mesh of data axes"
        )
    if offload != "params":
        return
    if not can_offload_params(axes, stage):
        copies = f", with {axes.num_replicas} replicas" if axes.num_replicas > 1 else ""
        raise ValueError(
            f"offload: parameters in host memory are shards of stage 3 over all devices\n"
            f"  got:      {stage.title} over {axes.num_shards} devices{copies}\n"
            f"  fix:      stage=3 on a mesh without replicas, or offload='optimizer'"
        )


def can_offload_params(axes: Axes, stage: Stage) -> bool:
    """Whether parameters may be in host memory: on one device, or as shards of stage 3 without replicas."""
    return axes.num_replicas == 1 and (stage.shards_params or axes.num_shards == 1)


def compiler_options(config: ZeroConfig, leaves: Iterable[Leaf]) -> dict[str, int | bool] | None:
    """The XLA options of a step on several GPUs or TPUs, or None for one device and on CPUs.

    On TPUs, gathers stay gathers: by default, small ones over many chips are all-reduces. SparseCores, where there are
    any, run the collectives beside the computation and over all dims of the torus at once. By default the chip waits
    for each, and a reduce-scatter over several dims is an all-reduce.

    On GPUs, the latency-hiding scheduler overlaps collectives with computation. It is off by default before Hopper.

    At stage 3, two thresholds replace the default of 30 MiB up to which the compiler combines collectives:

    - All gathers of a unit are combined. The compiler starts each gather after the end of the one before. On a slow
      link the computation would wait for each of them, and on a fast link some would overlap with no matrix product.
      Gathers of different units wait for each other, and are never combined.
    - The gradients of a unit are reduced in about two parts. In one part, all of them would wait for the last. The
      threshold counts the bytes of shards: on many devices, 30 MiB would hold the gradients of several units, and
      their common reduction would overlap with nothing.
    """
    mesh = config.mesh
    if not isinstance(mesh, Mesh) or mesh.size == 1:
        return None
    device = mesh.devices.flat[0]
    if device.platform == "tpu":
        names = [f"xla_tpu_enable_sparse_core_collective_offload_{kind}" for kind in _OFFLOADED]
        offload = names if device.device_kind in SPARSE_CORES else []
        return dict.fromkeys(["xla_tpu_prefer_async_allgather_to_allreduce", *offload], True)
    if device.platform != "gpu":
        return None
    options: dict[str, int | bool] = {"xla_gpu_enable_latency_hiding_scheduler": True}
    if not config.stage.shards_params or config.axes.num_shards == 1:
        return options
    num_elements = _typical_unit(leaves)
    num_bytes = lambda dtype: num_elements * jnp.dtype(dtype).itemsize
    shard_bytes = num_bytes(config.precision.reduce_dtype) // config.axes.num_shards
    return options | {
        "xla_gpu_all_gather_combine_threshold_bytes": 2 * num_bytes(config.precision.compute_dtype),
        "xla_gpu_enable_reduce_scatter_combine_by_dim": True,  # see Schedule.group
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 3 * shard_bytes // 4,  # leaves rarely sum to exact halves
    }


def _typical_unit(leaves: Iterable[Leaf]) -> int:
    """The elements of the median unit, of one layer if it is stacked. Units that are small next to the largest do not
    count, and each layer of a stack does."""
    elements: collections.Counter[str] = collections.Counter()
    layers: dict[str, int] = {}
    for leaf in leaves:
        elements[leaf.unit] += leaf.size_at_once
        layers[leaf.unit] = leaf.shape[0] if leaf.stacked else 1
    least = SMALL_UNIT * max(elements.values())
    return statistics.median_low(n for unit, n in elements.items() if n >= least for _ in range(layers[unit]))


def shard_map_over_data(
    config: ZeroConfig, fn: Callable[..., Any], in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Wraps a function in `shard_map`, manual over the data axes only."""
    return jax.shard_map(
        fn, mesh=config.mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(config.axes.data), check_vma=False
    )


def leaf_specs(config: ZeroConfig, leaves: Iterable[Leaf], sharded: bool) -> list[PartitionSpec]:
    """The specs of parameter leaves for `shard_map`: data axes only. Other axes stay in the arrays' shardings."""
    return [placement.data_spec(leaf.dim if sharded else None, config.axes) for leaf in leaves]
