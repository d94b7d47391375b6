"""The configuration shared by all steps of one `Zero`, with what is plugged in, and the settings of a single step.

A step asks the `Memory` of its configuration for what depends on where arrays are. Here everything is on the devices;
`offload.host_memory` has subclasses that use the memory of the host.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from zerojax.comm.collectives import CollectiveOptions
from zerojax.program.part import GradientSink, Weights
from zerojax.program.remat import NO_RULES, RematRules
from zerojax.program.tiles import Tiling
from zerojax.sharding.axes import Axes
from zerojax.sharding.mesh import row_groups
from zerojax.sharding.placement import Leaf, Stage
from zerojax.sharding.precision import DTYPE_FIELDS, WIRE_DTYPES, Precision
from zerojax.utils.typing import AnyMesh, Array, ArrayLike, Aval, DTypeLike

if TYPE_CHECKING:
    from zerojax.step.state import StateLayout, TrainState
    from zerojax.step.update import Update

Layers: TypeAlias = Literal["loop", "list"] | int | None
Tiles: TypeAlias = Literal["none", "auto"] | int
T = TypeVar("T")


class GradientSums:
    """The sums of gradients over microbatches, one for each leaf; None for frozen leaves. Here, all are on the device.

    Attributes:
        room: by leaf, the sums that are not on the device, with undefined values.
        unrolls: whether the loop over microbatches is unrolled, so that each waits for the one before.
    """

    def __init__(self, dtype: DTypeLike):
        self._dtype = dtype
        self.room: dict[int, Array] = {}
        self.unrolls = False

    def start(self, grads: Sequence[Aval | None]) -> list[Array | None]:
        """The sums before the first microbatch, whose gradients have these shapes."""
        return [self._zeros(aval) for aval in grads]

    def _zeros(self, aval: Aval | None) -> Array | None:
        return None if aval is None else jnp.zeros(aval.shape, self._dtype)

    def sink(self, totals: dict[int, Array | None], index: ArrayLike) -> GradientSink:
        """Where the gradients of a microbatch go. `totals` are the sums so far of the leaves in `room`."""
        return GradientSink()

    def add(self, totals: Sequence[Array | None], grads: Sequence[Array | None], weight: Array) -> list[Array | None]:
        """Adds the gradients of a microbatch, times its weight. What is in `room` has been added already."""
        add = lambda total, grad: None if total is None else total + grad.astype(self._dtype) * weight
        return [add(total, grad) for total, grad in zip(totals, grads, strict=True)]

    def mean(self, totals: Sequence[Array | None], divisor: Array) -> list[Array | None]:
        """The sums divided by the sum of weights, except for those in `room`."""
        return [None if total is None else total / divisor for total in totals]


class Memory:
    """Where the states of a model are while a step runs. Here, all are on the devices, and updated as whole arrays."""

    def check(self, config: ZeroConfig, layout: StateLayout, platform: str | None = None) -> None:
        """Raises ValueError if such a state cannot be updated piece by piece, or the devices cannot read pieces of it.

        If the mesh has no devices, their platform may be known.
        """

    def check_state(self, config: ZeroConfig, state: TrainState) -> None:
        """Raises ValueError if this process may not use as much memory as a state of these avals takes."""

    def in_program(self, config: ZeroConfig, state: TrainState, trains: bool = False) -> TrainState:
        """The state as a compiled step takes it, from arrays or avals. What it takes may be donated."""
        return state

    def keeper(self, config: ZeroConfig, state: TrainState) -> Callable[[str, Array], Array]:
        """A function of (path, array) that puts the arrays of a new state where they stay, and returns them.

        Args:
            config: of the state.
            state: avals, or a state whose arrays are no longer needed.
        """
        return lambda path, array: array

    def weights(self, shards: Sequence[Array], leaves: Sequence[Leaf]) -> Weights:
        """The leaves of the parameters."""
        return Weights(shards)

    def gradients(self) -> GradientSink:
        """Where the gradients of a step with one microbatch go."""
        return GradientSink()

    def sums(self, dtype: DTypeLike, shards: Sequence[Array], trainable: Sequence[bool]) -> GradientSums:
        """The sums of gradients over several microbatches, in `dtype`."""
        return GradientSums(dtype)

    def update(
        self, config: ZeroConfig, layout: StateLayout, dtypes: Sequence[DTypeLike], scales: bool
    ) -> Update | None:
        """The update of the optimizer in pieces; None if whole arrays are updated.

        Args:
            config, layout: of the state.
            dtypes: of the gradients of trained parameters, in flattening order.
            scales: whether gradients are multiplied by a factor before the update.
        """
        return None


class Agreement(Protocol):
    """Compares what processes are about to do together. All of them call it."""

    def agree_on(self, fields: Mapping[str, str], what: str, fix: str, call: str) -> None:
        """Raises ValueError if a field is not the same text in all processes."""
        ...

    def agree_on_lines(self, lines: Sequence[str], what: str, fix: str, call: str) -> None:
        """Raises ValueError with the first line that is not the same in all processes."""
        ...


class ZeroConfig(NamedTuple):
    """The configuration shared by all steps of one `Zero`."""

    mesh: Any  # a Mesh, or an AbstractMesh for planning without devices
    axes: Axes  # the data axes of the mesh
    stage: Stage  # the stage of ZeRO
    precision: Precision  # dtypes and loss scaling
    offload: str = "none"  # what is in host memory: 'none', 'optimizer' or 'params', as in `Zero`
    memory: Memory = Memory()  # which memory the states of the model are in while a step runs
    disk: Path | None = None  # the directory in which the optimizer's state is, instead of in host memory
    agreement: Agreement | None = None  # compares processes before they run together

    @property
    def optimizer_axes(self) -> Axes:
        """The data axes of the optimizer's state, and of gradients when they are reduced."""
        return self.axes.of_optimizer

    @property
    def gathers_updates(self) -> bool:
        """Whether updated parameters are gathered, since they are stored in larger parts than the optimizer's state."""
        return self.stage.shards_optimizer and (self.axes.outer or not self.stage.shards_params)

    @property
    def offloads_optimizer(self) -> bool:
        """Whether the optimizer's state, with the master copy, is in host memory or on a disk."""
        return self.offload != "none"

    @property
    def reads_host(self) -> bool:
        """Whether compiled steps read a part of the state from host memory."""
        return self.offloads_optimizer and self.disk is None

    @property
    def offloads_params(self) -> bool:
        """Whether the parameters are in host memory too, and the gradients go there."""
        return self.offload == "params"

    @property
    def other_axes(self) -> list[str]:
        """The axes of the mesh that split neither batches nor model states, such as 'model'."""
        return [name for name in self.mesh.axis_names if name not in self.axes.of_states]

    @property
    def compiler_axes(self) -> list[str]:
        """The axes of the mesh that are left to the compiler where a loss is computed: `context`, and the others."""
        return [name for name in self.mesh.axis_names if name not in self.axes.data]

    @property
    def spans_processes(self) -> bool:
        """Whether the mesh has devices of all of several processes, so that all of them run each step together."""
        count = jax.process_count()
        if count == 1 or not isinstance(self.mesh, Mesh):
            return False
        return len({device.process_index for device in self.mesh.devices.flat}) == count

    @property
    def num_row_groups(self) -> int:
        """The number of groups of processes that pass different rows. Usually each process is one."""
        return len(set(row_groups(self.mesh, self.axes.data)))

    def texts(self) -> dict[str, str]:
        """The configuration as texts by name, for comparison between processes."""
        dtypes = {name: jnp.dtype(getattr(self.precision, name)).name for name in DTYPE_FIELDS}
        ids = hashlib.sha256(str([device.id for device in self.mesh.devices.flat]).encode()).hexdigest()[:8]
        mesh = ", ".join(f"{name} {size}" for name, size in self.mesh.shape.items())
        devices = f"{mesh} (order of the devices: {ids})"
        outer = "optimizer" if self.axes.outer else "none"
        places = {"outer_sharding": outer, "offload": self.offload}
        on_wire = {name: str(getattr(self.precision, name)) for name in WIRE_DTYPES}
        return {"stage": str(int(self.stage)), "mesh": devices, **places, **dtypes, **on_wire}


def check_wire(precision: Precision, stage: Stage) -> None:
    """Raises ValueError if nothing is sent that `Precision(gather=..., scatter=...)` asks to send in another dtype."""
    sends = {"gather": stage.shards_params, "scatter": stage.shards_optimizer}
    for name, dtype in precision.on_wire.items():
        if not sends[name]:
            least, what = (3, "gathers no weights") if name == "gather" else (1, "reduce-scatters no gradients")
            raise ValueError(
                f"precision: {stage.title} {what} in a step\n"
                f"  got:      {name}={dtype!r}\n"
                f"  fix:      stage={least}, or {name}=None"
            )


OFFLOADS = "none", "optimizer", "params"
OUTER_SHARDINGS = "none", "optimizer"


def with_outer_sharding(axes: Axes, outer_sharding: str | None, stage: Stage) -> Axes:
    """The axes, with the optimizer's state over those of replicas too, if `Zero(outer_sharding=...)` asks for it.

    Raises:
        ValueError: if its value is unknown, or the stage shards nothing.
    """
    if outer_sharding == "optimizer" and not stage.shards_optimizer:
        raise ValueError(
            f"outer_sharding: {stage.title} shards nothing, so that there are no shards to divide over replicas\n"
            f"  got:      outer_sharding='optimizer'\n"
            f"  fix:      stage=1, 2 or 3, or outer_sharding='none'"
        )
    if outer_sharding not in (None, *OUTER_SHARDINGS):
        raise ValueError(
            f"outer_sharding: unknown value {outer_sharding!r}\n"
            f"  fix:      'optimizer' to shard the optimizer's state over the replica axes too, or 'none'"
        )
    if outer_sharding == "optimizer" and axes.num_context > 1:
        raise ValueError(
            "outer_sharding: on a mesh with an axis 'context', the optimizer's state is not divided over replicas too\n"
            "  got:      outer_sharding='optimizer'\n"
            "  fix:      outer_sharding='none', or a mesh without replicas"
        )
    replicas = axes.num_replicas if axes.num_context == 1 else 1
    return axes._replace(outer=shards_outer(outer_sharding, stage, replicas))


def shards_outer(outer_sharding: str | None, stage: Stage, num_replicas: int) -> bool:
    """Whether the optimizer's state is sharded over replicas too.

    By default it is at stage 3: this sends no more bytes than replicas of the state do, and takes less memory.
    """
    wanted = stage.shards_params if outer_sharding is None else outer_sharding == "optimizer"
    return wanted and num_replicas > 1


def check_offload(offload: str, on_disk: bool, mesh: AnyMesh, axes: Axes, stage: Stage) -> None:
    """Raises ValueError if `Zero(offload=...)` is unknown, or the stage, the mesh or a disk cannot have it."""
    if offload not in OFFLOADS:
        known = ", ".join(map(repr, OFFLOADS[:-1]))
        raise ValueError(f"offload: unknown value {offload!r}\n  fix:      {known} or {OFFLOADS[-1]!r}")
    if on_disk and offload != "optimizer":
        raise ValueError(
            f"offload: what can be on a disk is the optimizer's state\n"
            f"  got:      offload={offload!r} and a directory\n"
            f"  fix:      offload='optimizer' with offload_dir, or no offload_dir"
        )
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


_WIDEST_ELEMENT_BYTES = 8  # float64 and int64


@dataclasses.dataclass(frozen=True)
class StepSettings:
    """The settings of one step. Those that all steps share are in `ZeroConfig`."""

    num_microbatches: int = 1  # number of equal parts in which a device's rows are processed
    clip_norm: float | None = None  # the largest global norm of the gradients; None for no clipping
    remat: RematRules = NO_RULES  # which activations of a unit are saved for its backward pass
    prefetch: int = 1  # number of units that are gathered ahead of the unit that computes
    bucket_bytes: int | None = None  # the most bytes that one collective moves; None to move every leaf in one piece
    layers: Layers = None  # how equal layers run: a number is that of an iteration, None as the model has them
    tiles: Tiles | Tiling = "none"  # what is computed token by token: for how many at a time

    def texts(self) -> dict[str, str]:
        """The settings, except `remat`, as texts by name, for comparison between processes."""
        names = ("num_microbatches", "clip_norm", "prefetch", "bucket_bytes", "layers", "tiles")
        return {name: str(getattr(self, name)) for name in names}

    def changed_texts(self) -> dict[str, str]:
        """The settings that are not the default, as they are written in a call."""
        default = StepSettings()
        named = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "remat"}
        changed = {name: repr(value) for name, value in named.items() if value != getattr(default, name)}
        return changed | ({} if self.remat.saves_everything else {"remat": self.remat.title})

    @property
    def collectives(self) -> CollectiveOptions:
        """The options of the step's collectives."""
        return CollectiveOptions(math.inf if self.bucket_bytes is None else self.bucket_bytes)

    @property
    def tiling(self) -> Tiling | None:
        """The size of tiles; None for no tiles, also if they are 'auto' and nothing has been chosen."""
        if isinstance(self.tiles, str):
            return None
        return self.tiles if isinstance(self.tiles, Tiling) else Tiling(self.tiles)

    @property
    def makes_loops(self) -> bool:
        """Whether lists of equal layers run as loops."""
        return self.layers not in (None, "list")

    @property
    def layers_at_once(self) -> float:
        """The least number of layers in an iteration of a loop; infinity for no loops."""
        return self.layers if isinstance(self.layers, int) else math.inf if self.layers == "list" else 1

    def check(self, axes: Axes) -> StepSettings:
        """Checks the settings against the data axes, and returns them."""
        check_integer("settings: num_microbatches", self.num_microbatches, 1)
        check_integer("settings: prefetch", self.prefetch, 0)
        is_number = isinstance(self.clip_norm, numbers.Real) and not isinstance(self.clip_norm, bool)
        if self.clip_norm is not None and not (is_number and self.clip_norm > 0):  # NaN is not
            raise ValueError(
                f"settings: clip_norm {self.clip_norm!r} is not a norm\n"
                f"  fix:      pass a number above 0, or None to leave gradients as they are"
            )
        is_count = isinstance(self.layers, int) and not isinstance(self.layers, bool) and self.layers > 0
        if self.layers not in (None, "loop", "list") and not is_count:
            raise ValueError(
                f"settings: unknown layers {self.layers!r}\n"
                f"  fix:      'loop', a number of layers in an iteration, 'list', or None to leave layers as they are"
            )
        is_size = isinstance(self.tiles, int) and not isinstance(self.tiles, bool) and self.tiles > 0
        if not (is_size or isinstance(self.tiles, Tiling) or self.tiles in ("none", "auto")):
            raise ValueError(
                f"settings: unknown tiles {self.tiles!r}\n  fix:      'auto', 'none', or the most tokens in a tile"
            )
        if self.bucket_bytes is not None:
            least = axes.num_shards * _WIDEST_ELEMENT_BYTES  # an element of each shard
            check_integer(f"settings: for {axes.num_shards} shards, bucket_bytes", self.bucket_bytes, least)
        return self


def check_integer(name: str, value: object, least: int) -> None:
    """Raises ValueError if a value is not an integer, or less than `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value!r}\n  fix:      pass an integer of at least {least}")
