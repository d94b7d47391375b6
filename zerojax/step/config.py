"""What all steps of one `Zero` share, and what follows from it for their batches and for the compiler."""

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
from zerojax.typing import Array, PyTree


class ZeroConfig(NamedTuple):
    """What all steps of one `Zero` share."""

    mesh: Any  # jax.sharding.Mesh, or an AbstractMesh where nothing is placed
    axes: Axes
    stage: Stage
    precision: Precision


def batch_specs(config: ZeroConfig, batch: PyTree) -> PyTree:
    """Dim 0 of every batch leaf over the data axes; scalars whole."""
    return jax.tree.map(lambda a: PartitionSpec(config.axes.data) if np.ndim(a) else PartitionSpec(), batch)


def _is_local(a: Any) -> bool:
    """Whether it holds one process's own rows. Avals, tracers and arrays over all processes hold those of all."""
    if isinstance(a, jax.Array) and not isinstance(a, Tracer):
        return a.is_fully_addressable
    return isinstance(a, np.ndarray)


def global_shape(a: Any) -> tuple[int, ...]:
    """Of a batch leaf over all processes."""
    shape = np.shape(a)
    return (shape[0] * jax.process_count(), *shape[1:]) if shape and _is_local(a) else shape


def shard_batch(config: ZeroConfig, batch: PyTree) -> PyTree:
    """Arrays -> global arrays, split over the data axes. Each process passes its own rows. What is global stays."""

    def put(a: Any, spec: PartitionSpec) -> Array:
        sharding = NamedSharding(config.mesh, spec)
        if isinstance(a, jax.Array) and (not _is_local(a) or a.sharding.is_equivalent_to(sharding, a.ndim)):
            return a
        if isinstance(a, jax.Array) and jax.process_count() == 1:
            return jax.device_put(a, sharding)
        return jax.make_array_from_process_local_data(sharding, np.asarray(a))

    return jax.tree.map(put, batch, batch_specs(config, batch))


def check_batch(config: ZeroConfig, batch: PyTree, num_microbatches: int) -> None:
    """Raises ValueError unless every leaf's dim 0 divides into devices x microbatches.

    Args:
        config: of the Zero.
        batch: arrays of this process's rows, or global arrays or avals.
        num_microbatches: of the step.
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
                f"  fix:      a multiple of {parts} rows, or another num_microbatches"
            )


def compiler_options(config: ZeroConfig, leaves: Iterable[Leaf]) -> dict[str, int | bool] | None:
    """On GPUs: that collectives run beside compute, which before Hopper they do not by default; and at stage 3 which of
    them the compiler combines, by default those of up to 30 MiB.

    All gathers of a unit, since the compiler starts each after the end of the one before: compute would wait for each
    on a slow link, and some have no matrix product beside them on a fast one. Gathers of different units wait for each
    other, and are never combined.

    Gradients of a unit are reduced in about two parts: in one they would all wait for the last of them. The compiler
    counts shards. On many devices 30 MiB are those of several units, which would be reduced together, beside nothing.
    """
    if not isinstance(config.mesh, Mesh) or config.mesh.devices.flat[0].platform != "gpu":
        return None
    beside: dict[str, int | bool] = {"xla_gpu_enable_latency_hiding_scheduler": True}
    if not config.stage.shards_params:
        return beside
    elements: collections.Counter[str] = collections.Counter()
    for leaf in leaves:
        elements[leaf.unit] += leaf.size // leaf.shape[0] if leaf.stacked else leaf.size
    num_bytes = lambda dtype: max(elements.values()) * jnp.dtype(dtype).itemsize
    shards = num_bytes(config.precision.reduce_dtype) // config.axes.num_shards
    return beside | {
        "xla_gpu_all_gather_combine_threshold_bytes": 2 * num_bytes(config.precision.compute_dtype),
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 3 * shards // 4,  # leaves do not divide in halves
    }


def manual(config: ZeroConfig, fn: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`fn` in `shard_map`, manual over the data axes alone."""
    return jax.shard_map(
        fn, mesh=config.mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(config.axes.data), check_vma=False
    )


def leaf_specs(config: ZeroConfig, leaves: Iterable[Leaf], sharded: bool) -> list[PartitionSpec]:
    """What `shard_map` is told: the data axes alone. Others stay with the arrays' shardings."""
    return [placement.data_spec(leaf.dim if sharded else None, config.axes) for leaf in leaves]
