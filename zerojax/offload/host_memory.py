"""The memory of each setting of `Zero(offload=...)`, and what host memory cannot hold."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from zerojax.offload.disk import DiskArray
from zerojax.offload.disk_update import DiskUpdate
from zerojax.offload.host_params import HostGradients, HostSums, HostWeights
from zerojax.offload.streamed_update import StreamedUpdate
from zerojax.program.part import GradientSink, Weights
from zerojax.sharding import placement
from zerojax.sharding.mesh import on_tpus
from zerojax.sharding.placement import Leaf
from zerojax.sharding.tpu import stored_order
from zerojax.step import optimizers
from zerojax.step.config import GradientSums, Memory, ZeroConfig
from zerojax.step.state import StateLayout, TrainState, in_host
from zerojax.step.update import Update
from zerojax.utils.text import error_text
from zerojax.utils.typing import AnyMesh, Array, DTypeLike

PINNED_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
DEFAULT_PINNED_GIB = 64  # XLA, xla/pjrt/gpu/gpu_helpers.cc, 2026


class AllOnDevices(Memory):
    """Nothing is in host memory.

    Optimizers whose state is stored in few bits update it in pieces. Compilers would otherwise compute it for whole
    arrays in fp32, before they round or encode it.
    """

    def update(
        self, config: ZeroConfig, layout: StateLayout, dtypes: Sequence[DTypeLike], scales: bool
    ) -> Update | None:
        # A piece may be a part of any dim, and other axes of the mesh may divide these.
        if not optimizers.stores_few_bits(layout.tx) or config.other_axes:
            return None
        return StreamedUpdate(config, layout, dtypes, scales)


class OptimizerInHost(Memory):
    """The optimizer's state is in host memory, with the master copy of the parameters."""

    def check(self, config: ZeroConfig, layout: StateLayout, platform: str | None = None) -> None:
        dtypes = [leaf.dtype for leaf in layout.leaves if leaf.trainable]
        self.update(config, layout, dtypes, scales=False)  # raises if it cannot be computed piece by piece
        check_layouts(config, layout, platform)

    def check_state(self, config: ZeroConfig, state: TrainState) -> None:
        check_may_pin(config, state)

    def update(
        self, config: ZeroConfig, layout: StateLayout, dtypes: Sequence[DTypeLike], scales: bool
    ) -> Update | None:
        return StreamedUpdate(config, layout, dtypes, scales)


@dataclasses.dataclass(frozen=True)
class ParamsInHost(OptimizerInHost):
    """The parameters are in host memory too, and the gradients go there."""

    for_tpus: bool  # whether the devices are TPUs

    def weights(self, shards: Sequence[Array], leaves: Sequence[Leaf]) -> Weights:
        return HostWeights(shards, leaves, self.for_tpus)

    def gradients(self) -> GradientSink:
        return HostGradients({}, for_tpus=self.for_tpus)

    def sums(self, dtype: DTypeLike, shards: Sequence[Array], trainable: Sequence[bool]) -> GradientSums:
        return HostSums(dtype, shards, trainable, self.for_tpus)


class OptimizerOnDisk(OptimizerInHost):
    """The optimizer's state is in a file, with the master copy of the parameters."""

    def check_state(self, config: ZeroConfig, state: TrainState) -> None:
        pass  # nothing is pinned for long

    def in_program(self, config: ZeroConfig, state: TrainState, trains: bool = False) -> TrainState:
        on_device = NamedSharding(config.mesh, PartitionSpec())

        def stand_in(path: tuple[Any, ...], a: Any, on_disk: bool) -> Any:
            if not on_disk:
                return a
            if isinstance(a, DiskArray):
                return a.stand_in
            if isinstance(a, jax.ShapeDtypeStruct):
                return jax.ShapeDtypeStruct((0,), a.dtype, sharding=on_device)
            if trains:
                what, got = "state: its optimizer is not on the disk", f"{placement.path_text(path)!r} in host memory"
                raise ValueError(error_text(what, got, "train with a state of zero.init, a step or a checkpoint"))
            return _stand_in(a.dtype, on_device)

        return jax.tree_util.tree_map_with_path(stand_in, state, in_host(config, state))

    def keeper(self, config: ZeroConfig, state: TrainState) -> Callable[[str, Array], Array]:
        assert config.disk is not None
        layout = state.layout
        update = DiskUpdate(config, layout, [leaf.dtype for leaf in layout.leaves if leaf.trainable], scales=False)
        paths = list(placement.by_path(state))
        numbers = jax.tree.unflatten(jax.tree.structure(state), range(len(paths)))
        places = update.places(numbers)  # number of a leaf -> (parameter, position)
        leaves = jax.tree.leaves(state)
        files = [a.file_to_fill for a in leaves if isinstance(a, DiskArray)]
        file = files[0] if files else update.create_file(config.disk, state)
        place_of = {paths[number]: place for number, place in places.items()}
        on_device = NamedSharding(config.mesh, PartitionSpec())

        missing = set(place_of)

        def keep(path: str, array: Array) -> Any:
            if path not in place_of:
                return array
            file.store(*place_of[path], array)
            missing.discard(path)
            if not missing:
                file.is_torn = False
            return DiskArray(file, *place_of[path], _stand_in(array.dtype, on_device))

        return keep

    def update(
        self, config: ZeroConfig, layout: StateLayout, dtypes: Sequence[DTypeLike], scales: bool
    ) -> Update | None:
        return DiskUpdate(config, layout, dtypes, scales)


def _stand_in(dtype: DTypeLike, sharding: NamedSharding) -> Array:
    return jax.device_put(np.zeros(0, dtype), sharding)


def memory_of(offload: str, disk: Path | None, mesh: AnyMesh) -> Memory:
    """The memory of a setting: 'none', 'optimizer' or 'params', and the directory of a disk."""
    if disk is not None:
        return OptimizerOnDisk()
    if offload == "params":
        return ParamsInHost(on_tpus(mesh))
    return OptimizerInHost() if offload == "optimizer" else AllOnDevices()


# Checks before a state is created


def host_gradients_bytes(config: ZeroConfig, state: TrainState, dtype: DTypeLike | None = None) -> int:
    """The bytes of the gradients that a device keeps in host memory, in a dtype or in those of their reduction."""
    layout, precision = state.layout, config.precision
    flags, params = layout.params_in_host(config.offloads_params), jax.tree.leaves(state.params)
    return sum(
        math.prod(a.sharding.shard_shape(tuple(a.shape)))
        * jnp.dtype(dtype or precision.wire_dtype(leaf.compute_dtype)).itemsize
        for a, leaf, flag in zip(params, layout.leaves, flags, strict=True)
        if flag and leaf.trainable
    )


def check_layouts(config: ZeroConfig, layout: StateLayout, platform: str | None) -> None:
    """Raises ValueError if the devices do not read pieces or layers of a state from host memory."""
    if not isinstance(config.mesh, AbstractMesh):
        platform = config.mesh.devices.flat[0].platform
    if platform != "tpu":
        return
    if config.offloads_params:
        _check_stacks_on_tpus(config, layout)
    created = jax.tree_util.tree_leaves_with_path(jax.eval_shape(layout.tx.init, layout.trained_avals()))
    placed = jax.tree.leaves(layout.optimizer_placement(config.optimizer_axes, config.stage.shards_optimizer))
    for (path, a), stored in zip(created, placed, strict=True):
        if stored.in_pieces and a.dtype.itemsize == 1:  # in another layout than their pieces, and copied as a whole
            what = "offload: arrays of 8 bits cannot be in the host memory of TPUs, whose compiler does not cut them"
            fix = "zerojax.low_bit_moments(tx, bits=16), or Zero(..., offload='none')"
            raise ValueError(error_text(what, f"{placement.path_text(path)!r}: {a.dtype}{list(a.shape)}", fix))


def _check_stacks_on_tpus(config: ZeroConfig, layout: StateLayout) -> None:
    """Raises ValueError if layers share tiles of the memory of a TPU, whose compiler then reads no single one."""
    is_sharded = config.stage.shards_params
    placed = jax.tree.leaves(placement.named_shardings(config.mesh, layout.specs(config.optimizer_axes, is_sharded)))
    in_host = layout.params_in_host(config.offloads_params)
    for leaf, sharding, zeros, flag in zip(layout.leaves, placed, layout.paddings(is_sharded), in_host, strict=True):
        shard = sharding.shard_shape(zeros.stored_shape(leaf.shape))
        if flag and leaf.stacked and 0 in stored_order(shard)[-2:]:
            what = "offload: TPUs do not read single layers of a stack from host memory if layers share tiles"
            got = f"{leaf.path!r}: {list(shard)} on each device; rows are not a multiple of 8"
            fix = "another number of devices or another width; or Zero(..., offload='optimizer')"
            raise ValueError(error_text(what, got, fix))


def check_may_pin(config: ZeroConfig, state: TrainState) -> None:
    """Raises ValueError if this process may not pin the host memory of a state, with gradients that go there."""
    local = [d for d in config.mesh.devices.flat if d.platform == "gpu" and d.process_index == jax.process_index()]
    flags = jax.tree.leaves(in_host(config, state))
    sizes = [placement.shard_bytes(a, a.sharding) for a in jax.tree.leaves(state)]
    if local:
        gradients = host_gradients_bytes(config, state)
        check_pinned(sum(itertools.compress(sizes, flags)) + gradients, len(local), os.environ)


def pinned_limit_gib(environ: Mapping[str, str]) -> int:
    """The GiB that a process may pin for all of its GPUs together."""
    value = environ.get(PINNED_LIMIT)
    if value is not None and not (value.isdigit() and int(value)):
        raise ValueError(f"{PINNED_LIMIT}={value} is not a number of GiB")
    return int(value or DEFAULT_PINNED_GIB)


def check_pinned(num_bytes: int, num_gpus: int, environ: Mapping[str, str]) -> None:
    """Raises ValueError if the bytes in host memory of each of a process's GPUs are together more than it may pin.

    XLA would run out of host memory while it creates or restores the state.
    """
    needed, limit = num_bytes * num_gpus, pinned_limit_gib(environ)
    if needed > limit * 2**30:
        of_gpus = f" for {num_gpus} GPUs" if num_gpus > 1 else ""
        got = f"{needed / 2**30:.1f} GiB{of_gpus}, and a limit of {limit} GiB for each process"
        fix = f"{PINNED_LIMIT}={sufficient_limit_gib(needed)} in the environment, or more devices"
        raise ValueError(error_text("offload: the state needs more host memory than XLA may pin", got, fix))


def sufficient_limit_gib(num_bytes: int) -> int:
    """A limit that leaves a sixteenth for buffers that are pinned for a moment."""
    return -(-num_bytes * 17 // (16 * 2**30))
