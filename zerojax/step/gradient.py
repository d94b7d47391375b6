"""Computes the loss and its gradient on one device's data, and reduces the gradient as the stage requires.

Everything here runs inside `shard_map`, manual over the data axes, on one device's rows of the batch:

    stage 0   full weights; accumulate full gradients; one all_reduce per step
    stage 1   full weights; accumulate full gradients; one reduce_scatter per step
    stage 2   full weights; reduce_scatter of each unit in every microbatch; accumulate shards
    stage 3   all_gather of each unit, forward and backward; reduce_scatter and accumulation as at stage 2
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from zerojax.comm import collectives
from zerojax.comm.dependencies import event
from zerojax.comm.stage_collectives import StageCollectives
from zerojax.offload import host_arrays
from zerojax.offload.host_gradients import HostGradients
from zerojax.program.segmentation import TracedLoss
from zerojax.program.segmented_loss import SegmentedLoss
from zerojax.program.table_lookup import looks_up_shards
from zerojax.sharding.mesh import on_tpus
from zerojax.sharding.precision import for_reduction
from zerojax.step import models
from zerojax.step.batch import RowsOfSet, batch_specs, cast_batch, microbatches
from zerojax.step.config import ZeroConfig, leaf_specs, shard_map_over_data
from zerojax.step.loss_errors import in_words_of_the_user
from zerojax.step.models import Output, Sums
from zerojax.step.reductions import Reductions
from zerojax.step.scanned_leaves import check_layer_dims
from zerojax.step.settings import StepSettings
from zerojax.step.state import Definition
from zerojax.step.state_keys import UNKNOWN, StateKeys, fold_keys, restore_keys
from zerojax.utils.typing import Array, ArrayLike, PRNGKey, PyTree

Loss = Callable[[PyTree, PyTree, PyTree, PRNGKey], Output]  # (params, model state, batch, key) -> output


class LossAndGrads(NamedTuple):
    """The results of one step's forward and backward pass. All but `grads` are the same on every device.

    Attributes:
        grads: the reduced gradient of each leaf, times the loss scale: a shard from stage 1 on, full at stage 0; None
            for frozen leaves. Those of leaves in host memory are there too, times `divisor`.
        loss: fp32 scalar.
        metrics: fp32 scalars.
        model_state: the model state after the step.
        squared_norm: fp32 scalar, the squared norm of all gradients.
        divisor: fp32 scalar; None if it is one, or if no leaf is in host memory.
    """

    grads: list[Array | None]
    loss: Array
    metrics: dict[str, Array]
    model_state: PyTree
    squared_norm: Array
    divisor: Array | None = None


class _Sums(NamedTuple):
    """The sums over microbatches.

    Attributes:
        grads: of the gradients, each times the weight of its microbatch; None for frozen leaves.
        weight: of the weights of microbatches.
        outputs: of the loss and the metrics, and the largest of maxima.
        model_state: after the last microbatch.
        squared_norm: this device's term of the squared norm of sums in host memory.
    """

    grads: list[Array | None]
    weight: Array
    outputs: Sums
    model_state: PyTree
    squared_norm: Array


@dataclasses.dataclass(frozen=True)
class DeviceGradient:
    """Computes the loss and its reduced gradient on one device's data.

    Attributes:
        config: mesh, axes, stage and precision.
        definition: the parameters and their placement.
        loss: the loss as a function of a parameter tree.
        settings: the settings of the step.
        state_keys: what the loss does with keys in the model state, if that is known.
    """

    config: ZeroConfig
    definition: Definition
    loss: Loss
    settings: StepSettings
    state_keys: StateKeys = UNKNOWN

    @property
    def trainable(self) -> list[bool]:
        """Whether each leaf is trained."""
        return [leaf.trainable for leaf in self.definition.leaves]

    @property
    def reductions(self) -> Reductions:
        """The reductions at the end of the step."""
        return Reductions(self.config, self.definition, self.settings)

    def __call__(
        self, shards: Sequence[Array], model_state: PyTree, batch: PyTree, key: PRNGKey, scale: Array
    ) -> LossAndGrads:
        """Computes the loss and gradient of one step.

        Args:
            shards: parameter leaves: this device's shards at stage 3, full leaves below.
            model_state: the model state before the step.
            batch: this device's rows.
            key: the PRNG key of the step.
            scale: fp32 scalar, the loss scale.
        """
        shards = self.definition.for_compute(shards)
        batch = cast_batch(self.config.precision, batch)
        if self.settings.num_microbatches > 1:
            return self._accumulate(shards, model_state, batch, key, scale)
        host = HostGradients({}, for_tpus=on_tpus(self.config.mesh)) if self.config.offloads_params else None
        grads, output, _ = self._microbatch(shards, model_state, batch, self._device_key(key, 0), scale, [], 0, host)
        average = functools.partial(
            self.reductions.average_state, model_state, output.model_state, output.reduced_state
        )
        return self._result(grads, output.sums(), average, self.reductions.host_norm_term(host))

    def evaluate(
        self, shards: Sequence[Array], model_state: PyTree, batch: PyTree, key: PRNGKey
    ) -> tuple[Array, dict[str, Array]]:
        """Computes the loss and the metrics without a gradient. Units are gathered as in a training step."""
        return self.reductions.reduce_outputs(self._evaluated(shards, model_state, batch, key).sums())[0].means()

    def evaluate_rows(self, shards: Sequence[Array], model_state: PyTree, rows: RowsOfSet, key: PRNGKey) -> Sums:
        """Computes the sums of the loss and of the metrics over all devices whose rows are in a data set, and their
        weights. Those of plain scalars are numbers of rows."""
        sums = self._evaluated(shards, model_state, rows.batch, key).sums(rows.included.shape[0])
        return self.reductions.reduce_outputs(sums.where(rows.included[0]))[0]

    def _evaluated(self, shards: Sequence[Array], model_state: PyTree, batch: PyTree, key: PRNGKey) -> Output:
        """The output of the loss on this device's rows."""
        shards = self.definition.for_compute(shards)
        batch = cast_batch(self.config.precision, batch)
        key = self._device_key(key, 0)
        if self.config.offloads_params or (self.config.stage.shards_params and self.config.axes.num_shards > 1):
            segmented, data, unflatten = self.segmented_loss(shards, self.fold(model_state, 0), batch, key)
            return unflatten(segmented.evaluate(shards, data, []))
        return self.loss(jax.tree.unflatten(self.definition.tree, shards), self.fold(model_state, 0), batch, key)

    def _device_key(self, key: PRNGKey, microbatch: ArrayLike) -> PRNGKey:
        """The PRNG key of this device and a microbatch."""
        return jax.random.fold_in(jax.random.fold_in(key, collectives.device_index(self.config.axes)), microbatch)

    def fold(self, model_state: PyTree, microbatch: ArrayLike) -> PyTree:
        """The model state with PRNG keys of this device and a microbatch."""
        raw = self.state_keys.raw
        folded = fold_keys(model_state, collectives.device_index(self.config.axes), raw)
        return fold_keys(folded, jnp.asarray(microbatch, jnp.int32), raw)

    # One microbatch ---------------------------------------------------------------------------------------------------

    def _microbatch(
        self,
        shards: Sequence[Array],
        model_state: PyTree,
        batch: PyTree,
        key: PRNGKey,
        scale: Array,
        start: list[Array],
        index: ArrayLike = 0,
        host: HostGradients | None = None,
    ) -> tuple[list[Any], Output, Array]:
        """Returns (gradients of the microbatch's weighted mean over all devices, output, its weight over all devices).

        The gradients of a single microbatch are reduced here; of several, they are at stages 2 and 3, over the shard
        axes, and below they are this device's terms of the sum. The division by the weight comes before any sum in a
        narrow dtype: the cotangent of this device's sum is scale / weight.
        """
        weights: list[Array] = []
        summed: frozenset[int] = frozenset()

        def seed(output: Output) -> Array:
            if output.is_weighted:
                weights.extend(self.reductions.sum([jnp.asarray(output.loss.weight, jnp.float32)]))
            else:
                weights.append(jnp.float32(self.config.axes.num_devices))
            if host is not None:
                host.weight = weights[0]
            return jnp.where(weights[0] > 0, scale / jnp.maximum(weights[0], jnp.finfo(jnp.float32).tiny), 0.0)

        if self._runs_by_units:
            segmented, data, unflatten = self.segmented_loss(shards, self.fold(model_state, index), batch, key, host)
            flat, grads = segmented.value_and_grad(shards, data, lambda flat: seed(unflatten(flat)), start)
            output, summed = unflatten(flat), segmented.summed
        else:
            grads, output = self._full_gradient(shards, self.fold(model_state, index), batch, key, seed)
        output = dataclasses.replace(
            output,
            model_state=restore_keys(output.model_state, model_state, self.definition.fixed_state, self.state_keys),
        )
        if self.settings.num_microbatches == 1:
            grads = self.reductions.reduce_grads(grads, summed)
        return grads, output, weights[0]

    @property
    def _runs_by_units(self) -> bool:
        """Whether the loss is cut into units: to gather or reduce one at a time, or to rematerialize its activations.

        A single device gathers and reduces nothing, unless its parameters are in host memory.
        """
        communicates = self.config.stage.shards_grads and self.config.axes.num_shards > 1
        return communicates or self.config.offloads_params or not self.settings.remat.saves_everything

    def _full_gradient(
        self, full: Sequence[Array], model_state: PyTree, batch: PyTree, key: PRNGKey, seed: Any
    ) -> tuple[list[Any], Output]:
        """Plain reverse-mode differentiation with full weights, where the loss is not cut into units."""
        trained = [w for w, flag in zip(full, self.trainable, strict=True) if flag]

        def loss_of_trained(trained: list[Array]) -> tuple[Array, Output]:
            items = iter(trained)
            leaves = [next(items) if flag else w for w, flag in zip(full, self.trainable, strict=True)]
            output = self.loss(jax.tree.unflatten(self.definition.tree, leaves), model_state, batch, key)
            return jnp.asarray(output.loss.sum), output

        total, vjp, output = jax.vjp(loss_of_trained, trained, has_aux=True)
        (grads,) = vjp(seed(output).astype(total.dtype))
        if self.config.stage.shards_grads:
            grads = [for_reduction(grad, self.config.precision.wire_dtype(grad.dtype)) for grad in grads]
        items = iter(grads)
        return [next(items) if flag else None for flag in self.trainable], output

    def segmented_loss(
        self,
        shards: Sequence[Array],
        model_state: PyTree,
        batch: PyTree,
        key: PRNGKey,
        host: HostGradients | None = None,
    ) -> tuple[SegmentedLoss, list[Array], Callable[[list[Any]], Output]]:
        """Traces the loss with full weights, and cuts it into units. Gradients of leaves in host memory go to `host`.

        Returns:
            (the segmented loss, its data arguments, a function from its flat outputs to an `Output`).
        """
        data, data_tree = jax.tree.flatten((model_state, batch, key))
        leaves = self.definition.leaves
        full = [jax.ShapeDtypeStruct(leaf.shape, shard.dtype) for leaf, shard in zip(leaves, shards, strict=True)]
        out: dict[str, Any] = {}

        def flat_loss(*args: Array) -> list[Array]:
            params = jax.tree.unflatten(self.definition.tree, self.definition.for_compute(args[: len(full)]))
            output = self.loss(params, *jax.tree.unflatten(data_tree, args[len(full) :]))
            flat, out["tree"] = jax.tree.flatten(jax.tree.map(jnp.asarray, output))
            return flat

        closed = jax.make_jaxpr(flat_loss)(*full, *data)
        stage_collectives = StageCollectives(
            self.config.axes,
            tuple(leaf.dims for leaf in leaves),
            self.config.stage,
            self.config.precision,
            self.settings.collectives,
            self.reductions.sums_replicas_by_units,
            host,
        )
        is_lookup = functools.partial(looks_up_shards, stage_collectives, full)
        traced = TracedLoss(closed, len(full), [leaf.unit for leaf in leaves], is_lookup)
        check_layer_dims(leaves, traced, self.config.axes.num_shards)
        segmented = SegmentedLoss(
            traced, stage_collectives, self.trainable, self.settings.remat, self.settings.prefetch
        )
        return segmented, data, lambda flat: jax.tree.unflatten(out["tree"], flat)

    # All microbatches -------------------------------------------------------------------------------------------------

    def _accumulate(
        self, shards: Sequence[Array], model_state: PyTree, batch: PyTree, key: PRNGKey, scale: Array
    ) -> LossAndGrads:
        """The result of all microbatches."""
        k = self.settings.num_microbatches
        rows, microbatch_of = microbatches(batch, k)
        grad_dtype = self.config.precision.sum_dtype
        moves = [flag and t for flag, t in zip(self.reductions.params_in_host, self.trainable, strict=True)]

        def run_microbatch(
            index: Array, rows: Any, model_state: PyTree, start: list[Array], host: HostGradients | None
        ) -> tuple[list[Any], Output, Array]:
            args = shards, model_state, microbatch_of(rows), self._device_key(key, index), scale
            return self._microbatch(*args, start, index, host)

        room = {i: host_arrays.room(shards[i].shape, grad_dtype) for i, flag in enumerate(moves) if flag}
        offloads, for_tpus = self.config.offloads_params, on_tpus(self.config.mesh)
        unrolls = bool(room) and for_tpus  # see `HostGradients`; each microbatch then waits for the one before
        host_of = lambda totals, index: HostGradients(totals, index == 0, for_tpus) if offloads else None
        first = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), rows)
        run_first = lambda rows, room: run_microbatch(jnp.int32(0), rows, model_state, [], host_of(room, 0))[:2]
        grads_aval, output_aval = jax.eval_shape(run_first, first, room)
        zeros = lambda aval, dtype=None: jnp.zeros(aval.shape, dtype or aval.dtype)
        start_of = lambda i, aval: None if aval is None else room[i] if i in room else zeros(aval, grad_dtype)
        init = _Sums(
            [start_of(i, aval) for i, aval in enumerate(grads_aval)],
            jnp.float32(0),
            jax.eval_shape(Output.sums, output_aval).start(),
            model_state,
            jnp.float32(0),
        )

        def body(sums: _Sums, microbatch: Any) -> tuple[_Sums, None]:
            index, rows = microbatch
            host = host_of({i: sums.grads[i] for i in room}, index)
            start = [*event(jax.tree.leaves(rows)), *(event([sums.squared_norm]) if unrolls else [])]
            grads, output, weight = run_microbatch(index, rows, sums.model_state, start, host)
            add = lambda i, t, g: None if t is None else g if i in room else t + g.astype(grad_dtype) * weight
            totals = [add(i, t, g) for i, (t, g) in enumerate(zip(sums.grads, grads, strict=True))]
            outputs = sums.outputs.plus(output.sums())
            norm = self.reductions.host_norm_term(host)
            return _Sums(totals, sums.weight + weight, outputs, output.model_state, norm), None

        sums, _ = lax.scan(body, init, (jnp.arange(k), rows), unroll=unrolls)
        divisor = jnp.where(sums.weight > 0, sums.weight, 1)
        mean = lambda i, t: t if t is None or i in room else t / divisor
        grads = self.reductions.reduce_grads([mean(i, t) for i, t in enumerate(sums.grads)])
        host_norm_term = sums.squared_norm / jnp.square(divisor)
        shown = divisor if self.config.offloads_params else None
        states = model_state, sums.model_state, output_aval.reduced_state
        average = functools.partial(self.reductions.average_state, *states)
        return self._result(grads, sums.outputs, average, host_norm_term, shown)

    def _result(
        self,
        grads: list[Any],
        sums: Sums,
        average_state: Callable[[], PyTree],
        host_norm_term: Array,
        divisor: Array | None = None,
    ) -> LossAndGrads:
        """Reduces all scalars in one collective, and averages the running statistics."""
        reductions = self.reductions
        on_device = [None if flag else g for g, flag in zip(grads, reductions.params_in_host, strict=True)]
        norm_term = reductions.squared_norm_term(on_device) + host_norm_term
        totals, squared_norm = reductions.reduce_outputs(sums, norm_term)
        loss, metrics = totals.means()
        return LossAndGrads(grads, loss, metrics, average_state(), squared_norm, divisor)


def device_gradient(
    config: ZeroConfig,
    definition: Definition,
    loss_fn: Callable[..., Any],
    settings: StepSettings,
) -> DeviceGradient:
    """Builds the `DeviceGradient` of a user's loss function.

    Raises:
        ValueError: if `remat` names a unit that the model does not have, or needs an axis that the mesh does not have.
    """
    settings.remat.check_axes(config.other_axes)
    settings.remat.check_units([leaf.unit for leaf in definition.leaves])
    loss = functools.partial(models.call_loss, loss_fn, definition.model)
    return DeviceGradient(config, definition, in_words_of_the_user(config.precision)(loss), settings)


def compute_gradients(gradient: DeviceGradient, args: Any) -> LossAndGrads:
    """Computes gradients on global arrays. `args` are (parameter leaves, model state, batch, key, loss scale)."""
    config, definition = gradient.config, gradient.definition
    replicated: Any = PartitionSpec()
    grads_specs: Any = leaf_specs(config, definition.leaves, config.stage.shards_optimizer)
    grads_specs = [s if leaf.trainable else None for s, leaf in zip(grads_specs, definition.leaves, strict=True)]
    in_specs = (
        leaf_specs(config, definition.leaves, config.stage.shards_params),
        replicated,
        batch_specs(config.axes, args[2]),
        replicated,
        replicated,
    )
    divides = config.offloads_params and gradient.settings.num_microbatches > 1
    divisor = replicated if divides else None
    out_specs = LossAndGrads(grads_specs, replicated, replicated, replicated, replicated, divisor)
    return shard_map_over_data(config, gradient, in_specs, out_specs)(*args)
