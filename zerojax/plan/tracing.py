"""Traces the steps that a plan compares: the model is created once, and its loss is traced once for each batch size."""

from __future__ import annotations

import dataclasses
import functools
import glob
import warnings
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.stages import Traced

from zerojax.analysis.hardware import Chip
from zerojax.analysis.jaxpr_counts import Space, manual_parts
from zerojax.analysis.memory import Memory, memory_terms
from zerojax.plan.few_layers import FewLayers, LossTrace, RepeatedLayer, few_layers, peak_of_all_layers, trace_loss
from zerojax.plan.formula import ComputeTime, compute_time
from zerojax.plan.job import Job, Settings
from zerojax.program import jaxprs
from zerojax.program.jaxprs import Jaxpr
from zerojax.program.remat import Remat, RematRules
from zerojax.sharding.mesh import make_mesh
from zerojax.step import creation, models
from zerojax.step.compiler_options import in_host_memory
from zerojax.step.config import StepSettings
from zerojax.step.gradient import DeviceGradient, LossArgs, compute_gradients, device_gradient
from zerojax.step.owned_matrices import OwnedMatrices
from zerojax.step.owned_update import couples_elements, owned_matrices
from zerojax.step.source import ModelSource, plain_arrays, source_of
from zerojax.step.state import TrainState, in_host, stored_avals
from zerojax.utils.typing import PRNGKey, PyTree
from zerojax.zero import Zero


class DeviceTrace(NamedTuple):
    """The trace of what one device computes before the update, perhaps with only some of the layers.

    The first outputs of the jaxpr are the gradients; `layers` stand for others.
    """

    jaxpr: Jaxpr
    num_gradients: int
    layers: tuple[RepeatedLayer, ...]

    def compute_time(self, chip: Chip) -> ComputeTime:
        """The time of the forward and the backward pass on a chip, without communication."""
        return compute_time(self.jaxpr, chip, {layer.segment: 1 + layer.others for layer in self.layers})

    def peaks(self) -> tuple[Counter[str], Counter[str]]:
        """The peaks in device memory and in host memory; see `peak_of_all_layers`."""
        peak = functools.partial(peak_of_all_layers, self.jaxpr, range(self.num_gradients), self.layers)
        return peak(Space.Device), peak(Space.Host)


class Tracer:
    """Traces a job with different settings, on different numbers of devices.

    Args:
        platform: of the devices: 'cuda', 'tpu' or 'cpu'; None if it is not known.
        on_few_layers: whether equal layers may be left out of the traces.
    """

    def __init__(self, job: Job, platform: str | None = None, on_few_layers: bool = True):
        self.job, self.platform, self.on_few_layers = job, platform, on_few_layers
        self._create = _CreatesOnce(source_of(job.create_model, None))
        self._states: dict[Hashable, TrainState] = {}  # by mesh, axes, precision and bits of moments
        self._stored: dict[Hashable, TrainState] = {}  # by configuration and bits of moments
        self._losses: dict[Hashable, LossTrace] = {}
        self._traces: dict[Hashable, DeviceTrace] = {}
        self._memories: dict[Hashable, Memory] = {}
        self._couples: dict[Hashable, bool] = {}  # by bits of moments

    def zero(self, settings: Settings, devices: int | Sequence[object]) -> Zero:
        """The `Zero` of the settings. `devices` are devices or their number."""
        mesh = make_mesh(devices=devices, replica=settings.replica, model=settings.model)
        places = {"outer_sharding": settings.outer_sharding, "offload": settings.offload}
        return Zero(mesh, settings.stage, settings.dtypes, **places, **self.job.options)

    def state(self, zero: Zero, settings: Settings) -> TrainState:
        """The training state as avals with shardings."""
        stored_key = zero.config, settings.moment_bits
        if stored_key in self._stored:
            return self._stored[stored_key]
        key = zero.config.mesh, zero.config.axes, zero.config.precision, settings.moment_bits
        if key not in self._states:
            overrides = dataclasses.replace(zero.overrides, stacked=(*zero.overrides.stacked, *self._create.stacked))
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "placement: (the shards|.* replicated)")  # a note of the plan says so
                tx = settings.optimizer(self.job.tx)
                self._states[key] = creation.build(zero.config, overrides, self._create.source, tx, 0)[1]
            leaves = self._states[key].layout.leaves
            self._create.stacked = tuple(glob.escape(leaf.path) for leaf in leaves if leaf.stacked)
        # A state is built once for all `offload`.
        zero.config.memory.check(zero.config, self._states[key].layout, self.platform)
        self._stored[stored_key] = stored_avals(zero.config, self._states[key])
        return self._stored[stored_key]

    def owners(self, settings: Settings, num_devices: int) -> OwnedMatrices | None:
        """The update of matrices by owners, or None. Whether there are any depends on the optimizer and the model."""
        zero, bits = self.zero(settings, num_devices), settings.moment_bits
        layout = self.state(zero, settings).layout
        if bits not in self._couples:
            self._couples[bits] = couples_elements(layout)
        return owned_matrices(zero.config, layout) if self._couples[bits] else None

    def can_store(self, settings: Settings, num_devices: int) -> bool:
        """Whether a state can be stored where and in as many bits as the settings say, with this mesh and optimizer."""
        try:
            self.state(self.zero(settings, num_devices), settings)
        except ValueError:
            return False
        return True

    def batch(self, settings: Settings, num_devices: int) -> PyTree:
        """The avals of the batch of a step. Devices that share a row, along a model axis, count once."""
        return self.job.batch(num_rows(self.job, settings, num_devices))

    def step(self, settings: Settings, devices: int | Sequence[object]) -> Traced:
        """Traces a whole step with all layers, to be compiled."""
        zero = self.zero(settings, devices)
        step = zero.train_step(
            self.job.loss_fn,
            num_microbatches=settings.num_microbatches,
            remat=_remat(settings),
            prefetch=settings.prefetch,
            bucket_bytes=settings.bucket_bytes,
        )
        batch = self.batch(settings, zero.config.axes.num_devices)
        return step.trace(self.state(zero, settings), batch)

    def loss(self, settings: Settings, num_devices: int) -> LossTrace:
        """The loss of a microbatch on one device, with the precision of the settings."""
        settings = dataclasses.replace(settings, offload="none")
        zero = self.zero(settings, num_devices)
        key = zero.config.mesh, zero.config.precision, settings.rows
        if key not in self._losses:
            one = dataclasses.replace(settings, num_microbatches=1)
            self._losses[key] = trace_loss(*self._gradient(zero, one))
        return self._losses[key]

    def device_trace(self, settings: Settings, num_devices: int) -> DeviceTrace:
        """Traces what one device computes before the update. It is the same for every state of the optimizer."""
        offload = "params" if settings.offload == "params" else "none"
        settings = dataclasses.replace(settings, offload=offload)
        key = dataclasses.replace(settings, moment_bits=None), num_devices, self.on_few_layers
        if key not in self._traces:
            gradient, args = self._gradient(self.zero(settings, num_devices), settings)
            few = None
            if self.on_few_layers:
                offloads = settings.remat == "offload"
                num_ends = 1 + offloads, max(1, settings.prefetch) + offloads
                few = few_layers(gradient, self.loss(settings, num_devices), num_ends)
            self._traces[key] = _device_trace(few or FewLayers(gradient, tuple(range(len(args.params))), ()), args)
        return self._traces[key]

    def memory(self, settings: Settings, num_devices: int) -> Memory:
        """The memory of a device by formula."""
        key = settings, num_devices
        if key in self._memories:
            return self._memories[key]
        zero = self.zero(settings, num_devices)
        try:
            peaks = self.device_trace(settings, num_devices).peaks()
        except ValueError:  # the layers do not run one after the other
            self.on_few_layers = False
            peaks = self.device_trace(settings, num_devices).peaks()
        state, batch = self.state(zero, settings), self.batch(settings, zero.config.axes.num_devices)
        self._memories[key] = memory_terms(zero.config, _step_settings(settings), state, batch, *peaks)
        return self._memories[key]

    def _gradient(self, zero: Zero, settings: Settings) -> tuple[DeviceGradient, LossArgs]:
        """Returns (the gradient on one device, avals of its arguments)."""
        state, step = self.state(zero, settings), _step_settings(settings).check(zero.config.axes)
        batch = self.batch(settings, zero.config.axes.num_devices)
        gradient = device_gradient(zero.config, state.layout, self.job.loss_fn, step)
        params = in_host_memory(state.params, in_host(zero.config, state).params)
        return gradient, LossArgs(jax.tree.leaves(params), state.model_state, batch, state.key)


def num_rows(job: Job, settings: Settings, num_devices: int) -> int:
    """The rows of a step. Devices that share a row, along a model axis, count once in `num_devices`."""
    return (settings.rows or job.rows) * settings.num_microbatches * num_devices


def _remat(settings: Settings) -> str | Remat:
    return Remat(offload_inputs=True) if settings.remat == "offload" else settings.remat


def _step_settings(settings: Settings) -> StepSettings:
    return StepSettings(
        settings.num_microbatches, None, RematRules.of(_remat(settings)), settings.prefetch, settings.bucket_bytes
    )


def _device_trace(few: FewLayers, args: LossArgs) -> DeviceTrace:
    args, scale = args._replace(params=[args.params[i] for i in few.leaves]), jax.ShapeDtypeStruct((), jnp.float32)
    closed, _ = jaxprs.traced(functools.partial(compute_gradients, few.gradient), args, scale)
    (jaxpr,) = manual_parts(closed)
    return DeviceTrace(jaxpr, sum(few.gradient.trainable), few.layers)


class _CreatesOnce:
    """Creates a model once. After that, zeros take the place of its values.

    `stacked` has patterns of the leaves that were found to be stacked when the model was created.
    """

    def __init__(self, source: ModelSource):
        self._function, self._made = source.create, None
        self.source = source if source.create is None else ModelSource(self._created, None)
        self.stacked: tuple[str, ...] = ()

    def _created(self, key: PRNGKey) -> PyTree:
        assert self._function is not None
        if self._made is None:
            created = self._function(key)
            rebuild, values = lambda values: values, created
            if isinstance(created, nnx.Module):
                plain_arrays(created)  # makes leaves of them
                graph, values = nnx.split(created)
                rebuild = lambda values: nnx.merge(graph, values)
            self._made = rebuild, jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), values)
            return created
        rebuild, avals = self._made
        zeros = lambda a: jnp.broadcast_to(key, a.shape) if models.is_key(a) else jnp.zeros(a.shape, a.dtype)
        return rebuild(jax.tree.map(zeros, avals))
