"""The configuration shared by all steps of one `Zero`, and the batch shardings and compiler options derived from it."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.sharding import placement
from zerojax.sharding.axes import Axes
from zerojax.sharding.placement import Leaf
from zerojax.sharding.precision import Precision
from zerojax.sharding.stages import Stage
from zerojax.typing import Array, PyTree, Shape


class ZeroConfig(NamedTuple):
    """The configuration shared by all steps of one `Zero`.

    Attributes:
        mesh: a Mesh, or an AbstractMesh for planning without devices.
        axes: the data axes of the mesh.
        stage: the stage of ZeRO.
        precision: dtypes and loss scaling.
    """

    mesh: Any
    axes: Axes
    stage: Stage
    precision: Precision


def batch_specs(config: ZeroConfig, batch: PyTree) -> PyTree:
    """The specs of a batch: dim 0 of every leaf is split over the data axes; scalars are replicated."""
    return jax.tree.map(lambda a: PartitionSpec(config.axes.data) if np.ndim(a) else PartitionSpec(), batch)


def _is_process_local(a: Any) -> bool:
    """Whether a batch leaf has the rows of this process only. Avals, tracers and global arrays have those of all."""
    if isinstance(a, jax.Array) and not isinstance(a, Tracer):
        return a.is_fully_addressable
    return isinstance(a, np.ndarray)


def global_shape(a: Any) -> Shape:
    """The shape of a batch leaf over all processes."""
    shape = np.shape(a)
    return (shape[0] * jax.process_count(), *shape[1:]) if shape and _is_process_local(a) else shape


def shard_batch(config: ZeroConfig, batch: PyTree) -> PyTree:
    """Converts a batch to global arrays, split over the data axes. Each process passes its own rows.

    Arrays that are global already are returned unchanged.
    """

    def put(a: Any, spec: PartitionSpec) -> Array:
        sharding = NamedSharding(config.mesh, spec)
        if isinstance(a, jax.Array) and (not _is_process_local(a) or a.sharding.is_equivalent_to(sharding, a.ndim)):
            return a
        if isinstance(a, jax.Array) and jax.process_count() == 1:
            return jax.device_put(a, sharding)
        return jax.make_array_from_process_local_data(sharding, np.asarray(a))

    return jax.tree.map(put, batch, batch_specs(config, batch))


def check_batch(config: ZeroConfig, batch: PyTree, num_microbatches: int) -> None:
    """Checks that dim 0 of every batch leaf is divisible by devices x microbatches.

    Args:
        config: the mesh and its data axes.
        batch: arrays with the rows of this process, or global arrays or avals.
        num_microbatches: the number of microbatches of a step.

    Raises:
        ValueError: if a leaf is not divisible, or if no leaf has rows.
    """
    parts = config.axes.num_devices * num_microbatches
    with_paths = jax.tree_util.tree_leaves_with_path(batch)
    rows = [(placement.path_text(path) or "the batch", global_shape(a)) for path, a in with_paths]
    if not any(shape for _, shape in rows):
        raise ValueError("batch: no array with rows\n  fix:      pass arrays whose dim 0 is the batch")
    for path, shape in rows:
        if shape and shape[0] % parts:
            split = f"{shape[0]} % ({config.axes.num_devices} x {num_microbatches}) = {shape[0] % parts}"
            raise ValueError(
                f"batch: {path!r} does not divide into devices x microbatches\n"
                f"  got:      shape {shape}; {split}\n"
                f"  fix:      pass a multiple of {parts} rows, or change num_microbatches"
            )


def compiler_options(config: ZeroConfig, leaves: Iterable[Leaf]) -> dict[str, int | bool] | None:
    """The XLA options of a step on GPUs, or None on other platforms.

    The latency-hiding scheduler overlaps collectives with computation. It is off by default before Hopper.

    At stage 3, two thresholds replace the default of 30 MiB up to which the compiler combines collectives:

    - All gathers of a unit are combined. The compiler starts each gather after the end of the one before. On a slow
      link the computation would wait for each of them, and on a fast link some would overlap with no matrix product.
      Gathers of different units wait for each other, and are never combined.
    - The gradients of a unit are reduced in about two parts. In one part, all of them would wait for the last. The
      threshold counts the bytes of shards: on many devices, 30 MiB would hold the gradients of several units, and
      their common reduction would overlap with nothing.
    """
    if not isinstance(config.mesh, Mesh) or config.mesh.devices.flat[0].platform != "gpu":
        return None
    options: dict[str, int | bool] = {"xla_gpu_enable_latency_hiding_scheduler": True}
    if not config.stage.shards_params:
        return options
    elements: collections.Counter[str] = collections.Counter()
    for leaf in leaves:
        elements[leaf.unit] += leaf.size // leaf.shape[0] if leaf.stacked else leaf.size
    num_bytes = lambda dtype: max(elements.values()) * jnp.dtype(dtype).itemsize
    shard_bytes = num_bytes(config.precision.reduce_dtype) // config.axes.num_shards
    return options | {
        "xla_gpu_all_gather_combine_threshold_bytes": 2 * num_bytes(config.precision.compute_dtype),
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 3 * shard_bytes // 4,  # leaves rarely sum to exact halves
    }


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
