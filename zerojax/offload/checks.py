"""What host memory cannot hold: checked before a state is created there."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from zerojax.sharding import placement
from zerojax.sharding.tpu import stored_order
from zerojax.step.config import ZeroConfig
from zerojax.step.state import StateLayout, TrainState, in_host
from zerojax.utils.typing import DTypeLike


def host_gradients_bytes(config: ZeroConfig, state: TrainState, dtype: DTypeLike | None = None) -> int:
    """The bytes of the gradients that a device keeps in host memory: 0 if the parameters are on the devices.

    Args:
        config: mesh, axes, stage and precision.
        state: arrays or avals, with the shardings of the stage.
        dtype: of the gradients; None for that in which each is reduced.
    """
    layout, precision = state.layout, config.precision
    flags, params = layout.params_in_host(config.offloads_params), jax.tree.leaves(state.params)
    return sum(
        math.prod(a.sharding.shard_shape(tuple(a.shape)))
        * jnp.dtype(dtype or precision.wire_dtype(leaf.compute_dtype)).itemsize
        for a, leaf, flag in zip(params, layout.leaves, flags, strict=True)
        if flag and leaf.trainable
    )


def check_layouts(config: ZeroConfig, layout: StateLayout, platform: str | None) -> None:
    """Raises ValueError if the devices do not read pieces or layers of a state from host memory.

    Args:
        config, layout: of the state.
        platform: of the devices, if the mesh has none; None if it is not known.
    """
    if not isinstance(config.mesh, AbstractMesh):
        platform = config.mesh.devices.flat[0].platform
    if platform != "tpu":
        return
    if config.offloads_params:
        _check_stacks_on_tpus(config, layout)
    created = jax.tree_util.tree_leaves_with_path(jax.eval_shape(layout.tx.init, layout.trained_avals()))
    placed = jax.tree.leaves(layout.optimizer_placement(config.axes, config.stage.shards_optimizer))
    for (path, a), stored in zip(created, placed, strict=True):
        if stored.in_pieces and a.dtype.itemsize == 1:  # in another layout than their pieces, and copied as a whole
            raise ValueError(
                f"offload: arrays of 8 bits cannot be in the host memory of TPUs, whose compiler does not cut them\n"
                f"  got:      {placement.path_text(path)!r}: {a.dtype}{list(a.shape)}\n"
                f"  fix:      zerojax.low_bit_moments(tx, bits=16), or Zero(..., offload='none')"
            )


def _check_stacks_on_tpus(config: ZeroConfig, layout: StateLayout) -> None:
    """Raises ValueError if layers share tiles of the memory of a TPU, whose compiler then reads no single one."""
    is_sharded = config.stage.shards_params
    placed = jax.tree.leaves(placement.named_shardings(config.mesh, layout.specs(config.axes, is_sharded)))
    in_host = layout.params_in_host(config.offloads_params)
    for leaf, sharding, zeros, flag in zip(layout.leaves, placed, layout.paddings(is_sharded), in_host, strict=True):
        shard = sharding.shard_shape(zeros.stored_shape(leaf.shape))
        if flag and leaf.stacked and 0 in stored_order(shard)[-2:]:
            raise ValueError(
                "offload: TPUs do not read single layers of a stack from host memory if layers share tiles\n"
                f"  got:      {leaf.path!r}: {list(shard)} on each device; rows are not a multiple of 8\n"
                "  fix:      another number of devices or another width; or Zero(..., offload='optimizer')"
            )


def check_may_pin(config: ZeroConfig, state: TrainState) -> None:
    """Raises ValueError if this process may not pin the host memory of a state, with gradients that go there."""
    local = [d for d in config.mesh.devices.flat if d.platform == "gpu" and d.process_index == jax.process_index()]
    flags = jax.tree.leaves(in_host(config, state))
    sizes = [placement.shard_bytes(a, a.sharding) for a in jax.tree.leaves(state)]
    if local:
        gradients = host_gradients_bytes(config, state)
        check_pinned(sum(itertools.compress(sizes, flags)) + gradients, len(local), os.environ)


PINNED_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
DEFAULT_PINNED_GIB = 64  # XLA, xla/pjrt/gpu/gpu_helpers.cc, 2026


def pinned_limit_gib(environ: Mapping[str, str]) -> int:
    """The GiB that a process may pin for all of its GPUs together.

    Args:
        environ: the environment variables of the process.

    Raises:
        ValueError: if the variable is not a positive whole number.
    """
    value = environ.get(PINNED_LIMIT)
    if value is not None and not (value.isdigit() and int(value)):
        raise ValueError(f"{PINNED_LIMIT}={value} is not a number of GiB")
    return int(value or DEFAULT_PINNED_GIB)


def check_pinned(num_bytes: int, num_gpus: int, environ: Mapping[str, str]) -> None:
    """Raises ValueError if what is offloaded from a process's GPUs is more than it may pin.

    XLA would run out of host memory while it creates or restores the state.

    Args:
        num_bytes: in host memory, for each GPU.
        num_gpus: of the process.
        environ: its environment variables.
    """
    needed, limit = num_bytes * num_gpus, pinned_limit_gib(environ)
    if needed > limit * 2**30:
        of_gpus = f" for {num_gpus} GPUs" if num_gpus > 1 else ""
        raise ValueError(
            f"offload: the state needs more host memory than XLA may pin\n"
            f"  got:      {needed / 2**30:.1f} GiB{of_gpus}, and a limit of {limit} GiB for each process\n"
            f"  fix:      {PINNED_LIMIT}={sufficient_limit_gib(needed)} in the environment, or more devices"
        )


def sufficient_limit_gib(num_bytes: int) -> int:
    """A limit that leaves a sixteenth for buffers that are pinned for a moment."""
    return -(-num_bytes * 17 // (16 * 2**30))
