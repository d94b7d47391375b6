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
from zerojax.comm.schedule import event
from zerojax.comm.stage_collectives import StageCollectives
from zerojax.program import jaxprs
from zerojax.program.part import GradientSink, Weights
from zerojax.program.run import PartsOfLoss, cut
from zerojax.program.segmentation import cut_into_segments
from zerojax.program.table_lookup import looks_up_shards
from zerojax.sharding.advice import check_layer_dims
from zerojax.sharding.precision import for_reduction
from zerojax.step import models
from zerojax.step.batch import RowsOfSet, batch_specs, cast_batch, microbatches
from zerojax.step.config import StepSettings, ZeroConfig, leaf_specs, shard_map_over_data
from zerojax.step.loss_errors import explaining_errors
from zerojax.step.models import Output, Sums
from zerojax.step.reductions import Reductions
from zerojax.step.state import StateLayout
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
        norm_term: this device's term of the squared norm of those sums that are not on the device.
    """

    grads: list[Array | None]
    weight: Array
    outputs: Sums
    model_state: PyTree
    norm_term: Array


class _Microbatch(NamedTuple):
    """The results of one microbatch.

    Attributes:
        grads: of its weighted mean over all devices; None for frozen leaves.
        output: of the loss.
        weight: its weight over all devices.
    """

    grads: list[Array | None]
    output: Output
    weight: Array


@dataclasses.dataclass(frozen=True)
class DeviceGradient:
    """Computes the loss and its reduced gradient on one device's data.

    Attributes:
        config: mesh, axes, stage and precision.
        layout: the parameters and their placement.
        loss: the loss as a function of a parameter tree.
        settings: the settings of the step.
        state_keys: what the loss does with keys in the model state, if that is known.
    """

    config: ZeroConfig
    layout: StateLayout
    loss: Loss
    settings: StepSettings
    state_keys: StateKeys = UNKNOWN

    @property
    def trainable(self) -> list[bool]:
        """Whether each leaf is trained."""
        return [leaf.trainable for leaf in self.layout.leaves]

    @property
    def reductions(self) -> Reductions:
        """The reductions at the end of the step."""
        return Reductions(self.config, self.layout, self.settings)

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
        shards = self.layout.for_compute(shards)
        batch = cast_batch(self.config.precision, batch)
        if self.settings.num_microbatches > 1:
            return self._accumulate(shards, model_state, batch, key, scale)
        sink = self.config.memory.gradients()
        grads, output, _ = self._microbatch(shards, model_state, batch, self._device_key(key, 0), scale, sink)
        result = self._reduced(grads, output.sums(), self.reductions.norm_term_beside(sink.squared_norms))
        return self._averaged(result, model_state, output.model_state, output.reduced_state)

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
        shards = self.layout.for_compute(shards)
        batch = cast_batch(self.config.precision, batch)
        key = self._device_key(key, 0)
        if self.config.offloads_params or (self.config.stage.shards_params and self.config.axes.num_shards > 1):
            parts, data, unflatten = self.parts_of_loss(shards, self.fold(model_state, 0), batch, key)
            return unflatten(parts.evaluate(self._weights(shards), data, []))
        return self.loss(jax.tree.unflatten(self.layout.tree, shards), self.fold(model_state, 0), batch, key)

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
        sink: GradientSink,
        start: Sequence[Array] = (),
        index: ArrayLike = 0,
    ) -> _Microbatch:
        """Computes the gradients of a microbatch.

        Those of a single microbatch are reduced here; of several, they are at stages 2 and 3, over the shard axes, and
        below they are this device's terms of the sum.

        Args:
            shards, model_state, key, scale: as of `__call__`.
            batch: this device's rows of the microbatch.
            sink: where gradients go, if the loss is cut into parts.
            start: events before which nothing is gathered.
            index: of the microbatch.
        """
        folded = self.fold(model_state, index)
        summed: frozenset[int] = frozenset()
        if self._runs_by_units:
            parts, data, unflatten = self.parts_of_loss(shards, folded, batch, key)
            seed = lambda flat: self._seed(unflatten(flat), scale)
            flat, grads, weight = parts.value_and_grad(self._weights(shards), data, seed, start, sink)
            output, summed = unflatten(flat), parts.summed
        else:
            grads, output, weight = self._full_gradient(shards, folded, batch, key, scale)

        after = restore_keys(output.model_state, model_state, self.layout.fixed_state, self.state_keys)
        output = dataclasses.replace(output, model_state=after)
        if self.settings.num_microbatches == 1:
            grads = self.reductions.reduce_grads(grads, summed)
        return _Microbatch(grads, output, weight)

    def _weights(self, shards: Sequence[Array]) -> Weights:
        return self.config.memory.weights(shards, self.layout.leaves)

    def _seed(self, output: Output, scale: Array) -> tuple[Array, Array]:
        """(The cotangent of this device's sum, scale / weight; the weight of the microbatch over all devices).

        The division by the weight comes before any sum in a narrow dtype.
        """
        if output.is_weighted:
            (weight,) = self.reductions.sum([jnp.asarray(output.loss.weight, jnp.float32)])
        else:
            weight = jnp.float32(self.config.axes.num_devices)
        return jnp.where(weight > 0, scale / jnp.maximum(weight, jnp.finfo(jnp.float32).tiny), 0.0), weight

    @property
    def _runs_by_units(self) -> bool:
        """Whether the loss is cut into units: to gather or reduce one at a time, or to rematerialize its activations.

        A single device gathers and reduces nothing, unless its parameters are in host memory.
        """
        communicates = self.config.stage.shards_grads and self.config.axes.num_shards > 1
        return communicates or self.config.offloads_params or not self.settings.remat.saves_everything

    def _full_gradient(
        self, full: Sequence[Array], model_state: PyTree, batch: PyTree, key: PRNGKey, scale: Array
    ) -> _Microbatch:
        """Plain reverse-mode differentiation with full weights, where the loss is not cut into units."""
        trained = [w for w, flag in zip(full, self.trainable, strict=True) if flag]

        def loss_of_trained(trained: list[Array]) -> tuple[Array, Output]:
            items = iter(trained)
            leaves = [next(items) if flag else w for w, flag in zip(full, self.trainable, strict=True)]
            output = self.loss(jax.tree.unflatten(self.layout.tree, leaves), model_state, batch, key)
            return jnp.asarray(output.loss.sum), output

        total, vjp, output = jax.vjp(loss_of_trained, trained, has_aux=True)
        seed, weight = self._seed(output, scale)
        (grads,) = vjp(seed.astype(total.dtype))
        if self.config.stage.shards_grads:
            grads = [for_reduction(grad, self.config.precision.wire_dtype(grad.dtype)) for grad in grads]
        items = iter(grads)
        return _Microbatch([next(items) if flag else None for flag in self.trainable], output, weight)

    def parts_of_loss(
        self, shards: Sequence[Array], model_state: PyTree, batch: PyTree, key: PRNGKey
    ) -> tuple[PartsOfLoss, list[Array], Callable[[list[Any]], Output]]:
        """Traces the loss with full weights, and cuts it into parts.

        Returns:
            (the parts, their data arguments, a function from their flat outputs to an `Output`).
        """
        data, data_tree = jax.tree.flatten((model_state, batch, key))
        leaves = self.layout.leaves
        full = [jax.ShapeDtypeStruct(leaf.shape, shard.dtype) for leaf, shard in zip(leaves, shards, strict=True)]

        # Trace.
        def flat_loss(*args: Array) -> Output:
            params = jax.tree.unflatten(self.layout.tree, self.layout.for_compute(args[: len(full)]))
            output = self.loss(params, *jax.tree.unflatten(data_tree, args[len(full) :]))
            return jax.tree.map(jnp.asarray, output)

        closed, output = jaxprs.traced(flat_loss, *full, *data)
        output_tree = jax.tree.structure(output)

        # Cut.
        stage_collectives = StageCollectives(
            self.config.axes,
            tuple(leaf.dims for leaf in leaves),
            self.config.stage,
            self.config.precision,
            self.settings.collectives,
            self.reductions.sums_replicas_by_units,
        )
        is_lookup = functools.partial(looks_up_shards, stage_collectives, full)
        traced = cut_into_segments(closed, [leaf.unit for leaf in leaves], is_lookup)
        check_layer_dims(leaves, traced.layer_dims, self.config.axes.num_shards)
        parts = cut(traced, stage_collectives, self.trainable, self.settings.remat, self.settings.prefetch)
        return parts, data, functools.partial(jax.tree.unflatten, output_tree)

    # All microbatches -------------------------------------------------------------------------------------------------

    def _accumulate(
        self, shards: Sequence[Array], model_state: PyTree, batch: PyTree, key: PRNGKey, scale: Array
    ) -> LossAndGrads:
        """The result of all microbatches."""
        k = self.settings.num_microbatches
        rows, microbatch_of = microbatches(batch, k)
        sums_of = self.config.memory.sums(self.config.precision.sum_dtype, shards, self.trainable)

        def run(index: Array, rows: PyTree, model_state: PyTree, start: list[Array], sink: GradientSink) -> _Microbatch:
            args = shards, model_state, microbatch_of(rows), self._device_key(key, index), scale
            return self._microbatch(*args, sink, start, index)

        # The shapes of the results of a microbatch.
        first = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), rows)
        run_first = lambda rows, room: run(jnp.int32(0), rows, model_state, [], sums_of.sink(room, 0))[:2]
        grads_aval, output_aval = jax.eval_shape(run_first, first, sums_of.room)

        # Sum over the microbatches.
        def body(sums: _Sums, microbatch: tuple[Array, PyTree]) -> tuple[_Sums, None]:
            index, rows = microbatch
            sink = sums_of.sink({i: sums.grads[i] for i in sums_of.room}, index)
            start = [*event(jax.tree.leaves(rows)), *(event([sums.norm_term]) if sums_of.unrolls else [])]
            grads, output, weight = run(index, rows, sums.model_state, start, sink)
            grads = sums_of.add(sums.grads, grads, weight)
            outputs = sums.outputs.plus(output.sums())
            norm_term = self.reductions.norm_term_beside(sink.squared_norms)
            return _Sums(grads, sums.weight + weight, outputs, output.model_state, norm_term), None

        outputs = jax.eval_shape(Output.sums, output_aval).start()
        init = _Sums(sums_of.start(grads_aval), jnp.float32(0), outputs, model_state, jnp.float32(0))
        sums, _ = lax.scan(body, init, (jnp.arange(k), rows), unroll=sums_of.unrolls)

        # Reduce.
        divisor = jnp.where(sums.weight > 0, sums.weight, 1)
        grads = self.reductions.reduce_grads(sums_of.mean(sums.grads, divisor))
        result = self._reduced(grads, sums.outputs, sums.norm_term / jnp.square(divisor))
        if self.config.offloads_params:
            result = result._replace(divisor=divisor)
        return self._averaged(result, model_state, sums.model_state, output_aval.reduced_state)

    def _reduced(self, grads: list[Array | None], sums: Sums, norm_term: Array) -> LossAndGrads:
        """The gradients, with all scalars reduced in one collective, without a model state yet.

        `norm_term` is this device's term of the squared norm of gradients that are not on the device.
        """
        reductions = self.reductions
        on_device = [None if flag else g for g, flag in zip(grads, reductions.params_in_host, strict=True)]
        norm_term = reductions.squared_norm_term(on_device) + norm_term
        totals, squared_norm = reductions.reduce_outputs(sums, norm_term)
        loss, metrics = totals.means()
        return LossAndGrads(grads, loss, metrics, None, squared_norm)

    def _averaged(self, result: LossAndGrads, before: PyTree, after: PyTree, reduced: frozenset[int]) -> LossAndGrads:
        """The result with the model state, whose running statistics are averaged except for those `reduced` already."""
        return result._replace(model_state=self.reductions.average_state(before, after, reduced))


def device_gradient(
    config: ZeroConfig,
    layout: StateLayout,
    loss_fn: Callable[..., Any],
    settings: StepSettings,
) -> DeviceGradient:
    """Builds the `DeviceGradient` of a user's loss function.

    Raises:
        ValueError: if `remat` names a unit that the model does not have, or needs an axis that the mesh does not have.
    """
    settings.remat.check_axes(config.other_axes)
    settings.remat.check_units([leaf.unit for leaf in layout.leaves])
    loss = functools.partial(models.call_loss, loss_fn, layout.model)
    return DeviceGradient(config, layout, explaining_errors(config.precision)(loss), settings)


def compute_gradients(gradient: DeviceGradient, args: Any) -> LossAndGrads:
    """Computes gradients on global arrays. `args` are (parameter leaves, model state, batch, key, loss scale)."""
    config, layout = gradient.config, gradient.layout
    replicated: Any = PartitionSpec()
    grads_specs: Any = leaf_specs(config, layout.leaves, config.stage.shards_optimizer)
    grads_specs = [s if leaf.trainable else None for s, leaf in zip(grads_specs, layout.leaves, strict=True)]
    in_specs = (
        leaf_specs(config, layout.leaves, config.stage.shards_params),
        replicated,
        batch_specs(config.axes, args[2]),
        replicated,
        replicated,
    )
    divides = config.offloads_params and gradient.settings.num_microbatches > 1
    divisor = replicated if divides else None
    out_specs = LossAndGrads(grads_specs, replicated, replicated, replicated, replicated, divisor)
    return shard_map_over_data(config, gradient, in_specs, out_specs)(*args)
