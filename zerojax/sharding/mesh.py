"""The device mesh and its data axes.

Axes, outermost first:

    replica   model states are replicated over it (hybrid sharding: shard within a host, replicate across hosts)
    data      model states are sharded over it
    context   model states are sharded over it too, and the tokens of each sequence are divided over it
    model     used for tensor parallelism; ZeRO leaves it to the partition specs of the model and to the compiler
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax._src.xla_bridge
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from zerojax.sharding.axes import CONTEXT, Axes
from zerojax.sharding.tpu import (
    along,
    coordinates,
    have_sparse_cores,
    in_order_of_coordinates,
    ring_lengths,
    slices_of,
)
from zerojax.utils.warn import warn


def on_tpus(mesh: Mesh | AbstractMesh) -> bool:
    """Whether the devices of a mesh are TPUs. An AbstractMesh has none."""
    return not isinstance(mesh, AbstractMesh) and mesh.devices.flat[0].platform == "tpu"


def make_mesh(
    *, replica: int = 1, context: int = 1, model: int | None = None, devices: Sequence[Any] | int | None = None
) -> Mesh | AbstractMesh:
    """A mesh over all devices, with axes of type `AxisType.Auto`.

    The axes of `jax.make_mesh` are Explicit by default, and most model code raises `ShardingTypeError` under them.

    The chips of TPU slices are in the order of their coordinates, slice after slice, so that those along an axis are a
    box of chips. `jax.make_mesh` would arrange small slices as a ring, over which reductions send twice the bytes.

    Args:
        replica: size of the `replica` axis. With 1 the mesh has no such axis.
        context: size of the `context` axis, for sequences that are too long for one device. With 1 the mesh has no such
            axis.
        model: size of the `model` axis. With None the mesh has no such axis; with 1, a model that names the axis runs
            without tensor parallelism.
        devices: the devices in the order that the mesh has, by default those of all processes; the described devices of
            a compiler target (`zerojax.targets.devices`) also work. A number gives an abstract mesh, for planning
            without devices.

    Returns:
        A mesh with axes ('replica', 'data', 'context', 'model'), without those that the arguments leave out.

    Raises:
        ValueError: if the number of devices is not a multiple of replica x context x model.
    """
    count = devices if isinstance(devices, int) else len(jax.devices() if devices is None else devices)
    inner = 1 if model is None else model
    if min(replica, context, inner) < 1 or count % (replica * context * inner) or count == 0:
        raise ValueError(
            f"make_mesh: {count} devices do not divide into replica {replica} x context {context} x model {inner}\n"
            f"  fix:      choose sizes whose product divides {count}"
        )
    sizes = {"replica": replica, "data": count // (replica * context * inner), CONTEXT: context, "model": inner}
    left_out = {"replica": replica == 1, CONTEXT: context == 1, "model": model is None}
    sizes = {name: size for name, size in sizes.items() if not left_out.get(name)}
    types = (AxisType.Auto,) * len(sizes)
    if isinstance(devices, int):
        return AbstractMesh(tuple(sizes.values()), tuple(sizes), types)
    if devices is None and coordinates(jax.devices()[0]) is None:
        return jax.make_mesh(tuple(sizes.values()), tuple(sizes), types)
    found = in_order_of_coordinates(jax.devices()) if devices is None else devices
    return Mesh(np.asarray(found).reshape(tuple(sizes.values())), tuple(sizes), axis_types=types)


def data_axes(mesh: Mesh | AbstractMesh, shard: Sequence[str], replica: Sequence[str]) -> Axes:
    """The data axes of a mesh, checked, by their names. Warns if the state is sharded over several TPU slices.

    An axis `context` of the mesh that is not among the names becomes the first of the shard axes.
    """
    num_context = 1 if CONTEXT in (*shard, *replica) else mesh.shape.get(CONTEXT, 1)
    shard = (CONTEXT, *shard) if num_context > 1 else tuple(shard)

    # Check the names.
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    for name in (*shard, *replica):
        if name not in mesh.axis_names:
            raise ValueError(
                f"mesh: no axis {name!r}\n"
                f"  got:      axes {dict(mesh.shape)}\n"
                f"  fix:      name the axes that split the batch: Zero(mesh, shard_axes=..., replica_axes=...)"
            )
        if types[name] != AxisType.Auto:
            raise ValueError(
                f"mesh: axis {name!r} is of type {types[name]}\n"
                f"  fix:      use zerojax.make_mesh(), or jax.make_mesh(..., axis_types=(AxisType.Auto, ...))"
            )
    if not shard or len({*shard, *replica}) != len(shard) + len(replica):
        raise ValueError(
            f"mesh: shard_axes {tuple(shard)} and replica_axes {tuple(replica)} name an axis twice, or no axis\n"
            f"  fix:      name at least one shard axis, and each axis once"
        )

    others = [name for name, size in mesh.shape.items() if name not in (*shard, *replica) and size > 1]
    if num_context > 1 and others:  # it aborts when it divides a lookup of labels
        raise ValueError(
            f"mesh: XLA cannot divide a loss over {CONTEXT!r} and {', '.join(map(repr, others))} at once\n"
            f"  got:      axes {dict(mesh.shape)}\n"
            f"  fix:      a mesh with one of these axes"
        )

    # Read the sizes, and on TPUs the torus.
    size = lambda names: math.prod(mesh.shape[name] for name in names)
    axes = Axes(shard, tuple(replica), size(shard), size(replica), num_context=num_context)
    if not isinstance(mesh, Mesh):
        return axes
    devices = along(mesh, shard)
    _warn_of_slices(mesh, devices)
    rings = ring_lengths(devices) if len(shard) == 1 else ()  # permutations need a single axis
    return axes._replace(torus=rings, sparse_cores=have_sparse_cores(devices))


def row_groups(mesh: Mesh | AbstractMesh, data: tuple[str, ...], count: int | None = None) -> tuple[int, ...]:
    """The group of each process: those of a group pass the same rows, as along an axis `context` or `model`.

    Args:
        mesh: of the devices of all processes. Otherwise each process is a group.
        data: the names of the axes that split the rows of a batch.
        count: the number of processes; by default that of JAX.

    Raises:
        ValueError: if two processes share some of their rows, but not all.
    """
    count = jax.process_count() if count is None else count
    if count == 1 or not isinstance(mesh, Mesh):
        return tuple(range(count))
    return _row_groups(mesh, data, count)


@functools.lru_cache(maxsize=8)
def _row_groups(mesh: Mesh, data: tuple[str, ...], count: int) -> tuple[int, ...]:
    found: dict[int, set[int]] = {}
    for row, devices in enumerate(along(mesh, data)):
        for device in devices:
            found.setdefault(device.process_index, set()).add(row)
    if len(found) < count:
        return tuple(range(count))
    groups = sorted({tuple(sorted(rows)) for rows in found.values()})
    if sum(map(len, groups)) > len(set().union(*groups)):
        raise ValueError(
            f"mesh: two processes share some of the rows of a batch, but not all\n"
            f"  got:      axes {dict(mesh.shape)} over {len(found)} processes\n"
            f"  fix:      sizes of which the number of devices of a process is a multiple, or the other way round"
        )
    return tuple(groups.index(tuple(sorted(found[process]))) for process in sorted(found))


def _warn_of_slices(mesh: Mesh, sharded_over: np.ndarray) -> None:
    """Warns if rows of devices, as of `along`, are in several TPU slices."""
    most = max(len(set(slices)) for slices in slices_of(sharded_over).T)
    if most > 1:
        num_slices = len(np.unique(slices_of(mesh.devices)))
        warn(
            f"mesh: the state is sharded over {most} TPU slices, and each gather waits for the network between them\n"
            f"  got:      axes {dict(mesh.shape)}\n"
            f"  fix:      zerojax.make_mesh(replica={num_slices}): each slice then holds a copy, if it fits in one"
        )


def check_enclosing_mesh(mesh: Mesh | AbstractMesh) -> None:
    """Raises ValueError if `jax.set_mesh` has set another mesh, or one with axes of type Explicit."""
    enclosing = jax.sharding.get_abstract_mesh()
    if enclosing.empty or enclosing == mesh.abstract_mesh:
        return
    types = {name: str(kind) for name, kind in zip(enclosing.axis_names, enclosing.axis_types, strict=True)}
    raise ValueError(
        f"mesh: jax.set_mesh has set another mesh than that of this Zero\n"
        f"  got:      axes {dict(enclosing.shape)} of types {types}; Zero has axes {dict(mesh.shape)}, of type Auto\n"
        f"  fix:      leave jax.set_mesh out; or set the mesh of Zero, with axes of type Auto (zerojax.make_mesh)"
    )


def warn_of_disabled_jit() -> None:
    """Warns if JAX compiles nothing: arrays are then not placed as the stage says."""
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        warn(
            "jit: compilation is disabled, so a new state is not created in shards, and steps run slowly\n"
            "  got:      jax_disable_jit, from JAX_DISABLE_JIT, jax.config or jax.disable_jit()\n"
            "  fix:      leave it out; jax.debug.print and jax.debug.breakpoint work in compiled steps"
        )


def simulation_variables(environ: Mapping[str, str], count: int) -> dict[str, str]:
    """The environment variables, added to `environ`, with which a process sees `count` CPU devices."""
    flags = [flag for flag in environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in flag]
    return {
        "JAX_PLATFORMS": "cpu",
        "NPROC": str(max(24, 3 * count)),
        "XLA_FLAGS": " ".join([*flags, f"--xla_force_host_platform_device_count={count}"]),
    }


def simulate_devices(count: int) -> None:
    """Makes JAX see `count` CPU devices in this process. Call it before JAX initializes its devices.

    It does not initialize them itself, so `zerojax.initialize` can follow. In a process of `zerojax launch`, it takes
    precedence over `--devices`.

    Sets JAX_PLATFORMS, XLA_FLAGS and NPROC. NPROC makes the CPU client's thread pool larger than the number of
    devices: with only as many threads as devices, a collective can deadlock because no thread is left to start it on.

    Args:
        count: the number of devices.

    Raises:
        RuntimeError: if JAX has already started with another number of devices.
    """
    os.environ |= simulation_variables(os.environ, count)
    jax.config.update("jax_platforms", "cpu")
    if jax._src.xla_bridge.backends_are_initialized() and jax.local_device_count() != count:
        raise RuntimeError(
            f"simulate_devices: JAX has already started, with {jax.local_device_count()} devices\n"
            f"  fix:      call it before the first use of JAX, or set XLA_FLAGS before Python starts"
        )
