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
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.comm import collectives
from zerojax.comm.schedule import event
from zerojax.comm.stage_collectives import StageCollectives
from zerojax.program import jaxprs
from zerojax.program.context import divide_tokens
from zerojax.program.equal_layers import FEWEST_LAYERS, Stack, with_loops
from zerojax.program.part import GradientSink
from zerojax.program.run import PartsOfLoss, cut
from zerojax.program.segmentation import cut_into_segments
from zerojax.program.table_lookup import looks_up_shards
from zerojax.program.tiles import Tiled, tile
from zerojax.sharding.advice import check_layer_dims
from zerojax.sharding.axes import REPLICATED
from zerojax.sharding.precision import for_reduction
from zerojax.step.batch import batch_specs, cast_batch, map_rows, microbatches
from zerojax.step.config import StepSettings, ZeroConfig
from zerojax.step.losses import LossFn, Output, Sums, call_loss, explaining_errors
from zerojax.step.over_data import leaf_specs, shard_map_over_data
from zerojax.step.reductions import Reductions
from zerojax.step.state import StateLayout
from zerojax.step.state_keys import UNKNOWN, StateKeys, fold_keys, restore_keys
from zerojax.utils.flags import merge, negate, select
from zerojax.utils.typing import Array, ArrayLike, PRNGKey, PyTree

Loss = Callable[[PyTree, PyTree, PyTree, PRNGKey], Output]  # (parameters, model state, batch, key) -> output


class LossArgs(NamedTuple):
    """What a loss and its gradient are computed from, on all devices or on one."""

    params: Sequence[Array]  # the leaves of the parameters: shards at stage 3, full leaves below
    model_state: PyTree  # the model state before the step
    batch: PyTree  # the rows of all devices, or of one
    key: PRNGKey  # the PRNG key of the step


class LossAndGrads(NamedTuple):
    """The results of one step's forward and backward pass. All but `grads` are the same on every device."""

    # the reduced gradient of each leaf, times the loss scale: a shard from stage 1 on, full at stage 0; None for frozen
    # leaves. Those of leaves in host memory are there too, times `divisor`.
    grads: list[Array | None]
    loss: Array  # fp32 scalar
    metrics: dict[str, Array]  # fp32 scalars
    model_state: PyTree  # the model state after the step
    squared_norm: Array  # fp32 scalar, the squared norm of all gradients
    divisor: Array | None = None  # fp32 scalar; None if it is one, or if no leaf is in host memory


class _Sums(NamedTuple):
    """The sums over microbatches."""

    grads: list[Array | None]  # of the gradients, each times the weight of its microbatch; None for frozen leaves
    weight: Array  # of the weights of microbatches
    outputs: Sums  # of the loss and the metrics, and the largest of maxima
    model_state: PyTree  # after the last microbatch
    norm_term: Array  # this device's term of the squared norm of those sums that are not on the device


class _Microbatch(NamedTuple):
    """The results of one microbatch."""

    grads: list[Array | None]  # of its weighted mean over all devices; None for frozen leaves
    output: Output  # of the loss
    weight: Array  # its weight over all devices


@dataclasses.dataclass(frozen=True)
class DeviceGradient:
    """Computes the loss and its reduced gradient on one device's data."""

    config: ZeroConfig  # mesh, axes, stage and precision
    layout: StateLayout  # the parameters and their placement
    loss: Loss  # the loss as a function of a parameter tree
    settings: StepSettings  # the settings of the step
    state_keys: StateKeys = UNKNOWN  # what the loss does with keys in the model state, if that is known

    @property
    def trainable(self) -> list[bool]:
        """Whether each leaf is trained."""
        return [leaf.trainable for leaf in self.layout.leaves]

    @property
    def reductions(self) -> Reductions:
        """The reductions at the end of the step."""
        return Reductions(self.config, self.layout, self.settings)

    def __call__(self, args: LossArgs, scale: Array) -> LossAndGrads:
        """Computes the loss of one step and its gradient, times the loss scale."""
        args = self.cast(args)
        if self.settings.num_microbatches > 1:
            return self._accumulate(args, scale)
        sink = self.config.memory.gradients()
        grads, output, _ = self._microbatch(args, scale, sink)
        sums, norm_term = output.sums(), self.reductions.norm_term_beside(sink.squared_norms)
        return self._finished(grads, sums, norm_term, args.model_state, output.model_state, output.reduced_state)

    def evaluate(self, args: LossArgs) -> tuple[Array, dict[str, Array]]:
        """Computes the loss and the metrics without a gradient. Units are gathered as in a training step."""
        return self.reductions.reduce_outputs(self._evaluated(args).sums())[0].means()

    def evaluate_rows(self, args: LossArgs) -> Sums:
        """Computes the sums of the loss and of the metrics over all devices whose rows are in a data set, and their
        weights. Those of plain scalars are numbers of rows. The batch is a `RowsOfSet`."""
        rows = args.batch
        sums = self._evaluated(args._replace(batch=rows.batch)).sums(rows.included.shape[0])
        return self.reductions.reduce_outputs(sums.where(rows.included[0]))[0]

    def _evaluated(self, args: LossArgs) -> Output:
        """The output of the loss on this device's rows."""
        args = self.with_own_keys(self.cast(args))
        gathers = self.config.stage.shards_params and self.config.axes.num_shards > 1
        if self.config.offloads_params or gathers or self.settings.tiling or self.config.axes.num_context > 1:
            parts, data, unflatten = self.parts_of_loss(args)
            weights = self.config.memory.weights(args.params, self.layout.leaves)
            return unflatten(parts.evaluate(weights, data, []))
        return self.loss(jax.tree.unflatten(self.layout.tree, args.params), *args[1:])

    def cast(self, args: LossArgs) -> LossArgs:
        """The arguments in the dtypes that are computed with."""
        params = self.layout.for_compute(args.params)
        return args._replace(params=params, batch=cast_batch(self.config.precision, args.batch))

    def with_own_keys(self, args: LossArgs, microbatch: ArrayLike = 0) -> LossArgs:
        """The arguments with PRNG keys, also in the model state, of this device and a microbatch."""
        axes, raw = self.config.axes, self.state_keys.raw
        key = jax.random.fold_in(jax.random.fold_in(args.key, collectives.device_index(axes)), microbatch)
        of_device = fold_keys(args.model_state, collectives.device_index(axes), raw)
        return args._replace(model_state=fold_keys(of_device, jnp.asarray(microbatch, jnp.int32), raw), key=key)

    # One microbatch ---------------------------------------------------------------------------------------------------

    def _microbatch(
        self, args: LossArgs, scale: Array, sink: GradientSink, start: Sequence[Array] = (), index: ArrayLike = 0
    ) -> _Microbatch:
        """Computes the gradients of the microbatch `index`, whose rows are in `args`.

        Those of a single microbatch are reduced here; of several, they are at stages 2 and 3, over the shard axes, and
        below they are terms of the sum. If the loss is cut into parts, gradients go to `sink`, and nothing
        is gathered before the events `start`.
        """
        own = self.with_own_keys(args, index)
        summed: frozenset[int] = frozenset()
        if self._runs_by_units:
            parts, data, unflatten = self.parts_of_loss(own)
            seed = lambda flat: self._seed(unflatten(flat), scale)
            weights = self.config.memory.weights(args.params, self.layout.leaves)
            flat, grads, weight = parts.value_and_grad(weights, data, seed, start, sink)
            output, summed = unflatten(flat), parts.summed
        else:
            grads, output, weight = self._full_gradient(own, scale)

        after = restore_keys(output.model_state, args.model_state, self.layout.fixed_state, self.state_keys)
        output = dataclasses.replace(output, model_state=after)
        if self.settings.num_microbatches == 1:
            grads = self.reductions.reduce_grads(grads, summed)
        return _Microbatch(grads, output, weight)

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
        """Whether the loss is cut into units: to gather or reduce one at a time, to rematerialize, or to make loops.

        A single device gathers and reduces nothing, unless its parameters are in host memory.
        """
        communicates = self.config.stage.shards_grads and self.config.axes.num_shards > 1
        settings = self.settings
        cuts = not settings.remat.saves_everything or settings.layers is not None or settings.tiling is not None
        return communicates or self.config.offloads_params or cuts or self.config.axes.num_context > 1

    def _full_gradient(self, args: LossArgs, scale: Array) -> _Microbatch:
        """Plain reverse-mode differentiation with full weights, where the loss is not cut into units."""
        flags = self.trainable
        frozen = select(args.params, negate(flags))

        def loss_of_trained(trained: list[Array]) -> tuple[Array, Output]:
            params = jax.tree.unflatten(self.layout.tree, merge(flags, trained, frozen))
            output = self.loss(params, *args[1:])
            return jnp.asarray(output.loss.sum), output

        total, vjp, output = jax.vjp(loss_of_trained, select(args.params, flags), has_aux=True)
        seed, weight = self._seed(output, scale)
        (grads,) = vjp(seed.astype(total.dtype))
        if self.config.stage.shards_grads:
            grads = [for_reduction(grad, self.config.precision.wire_dtype(grad.dtype)) for grad in grads]
        return _Microbatch(merge(flags, grads, itertools.repeat(None)), output, weight)

    def parts_of_loss(self, args: LossArgs) -> tuple[PartsOfLoss, list[Array], Callable[[list[Array]], Output]]:
        """Traces the loss with full weights, and cuts it into parts. The arguments are cast already.

        Returns:
            (the parts, their data arguments, a function from their flat outputs to an `Output`).
        """
        data, data_tree = jax.tree.flatten(args[1:])
        leaves = self.layout.leaves
        full = [jax.ShapeDtypeStruct(leaf.shape, a.dtype) for leaf, a in zip(leaves, args.params, strict=True)]

        # Trace.
        def flat_loss(*flat: Array) -> Output:
            params = jax.tree.unflatten(self.layout.tree, self.layout.for_compute(flat[: len(full)]))
            output = self.loss(params, *jax.tree.unflatten(data_tree, flat[len(full) :]))
            return jax.tree.map(jnp.asarray, output)

        closed, output = jaxprs.traced(flat_loss, *full, *data)
        if self.config.axes.num_context > 1:
            none = lambda tree: jax.tree.map(lambda _: False, tree)
            has_rows = map_rows(lambda _: True, args.batch, lambda _: False)
            are_rows = jax.tree.leaves((none(full), none(args.model_state), has_rows, none(args.key)))
            closed = divide_tokens(closed, are_rows, self.config.axes.num_context)

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
        units, trainable, rules = [leaf.unit for leaf in leaves], self.trainable, self.settings.remat
        traced, stacks = cut_into_segments(closed, units, is_lookup), list[Stack]()
        check_layer_dims(leaves, traced.layer_dims, self.config.axes.num_shards)

        # Make loops of equal layers.
        if self.settings.makes_loops:
            closed, stacks = with_loops(traced, lambda i: (leaves[i].dims, trainable[i], rules.matching(units[i])))
        if stacks:
            of_stacks = [stack[0] for stack in stacks]
            dims = (*stage_collectives.dims, *(leaves[i].dims.of_stack() for i in of_stacks))
            stage_collectives = dataclasses.replace(stage_collectives, dims=dims)
            traced = cut_into_segments(closed, [*units, *(units[i] for i in of_stacks)], is_lookup)
            members = frozenset(i for stack in stacks for i in stack)
            own = [flag and i not in members for i, flag in enumerate(trainable)]
            trainable = [*own, *(trainable[i] for i in of_stacks)]
        if self.settings.makes_loops and not traced.layer_dims:
            raise ValueError(
                f"settings: layers={self.settings.layers!r}, but no layers are equal\n"
                f"  got:      no {FEWEST_LAYERS} in a row that have the same operations, shapes, placement and remat\n"
                f"  fix:      layers=None"
            )
        tiled = list[Tiled]()
        if self.settings.tiling:
            weights = traced.leaf_vars
            closed, tiled = tile(traced.closed, weights, select(weights, trainable), self.settings.tiling)
            traced = cut_into_segments(closed, traced.unit_of, is_lookup)
        layers = self.settings.layers_at_once
        parts = cut(traced, stage_collectives, trainable, rules, self.settings.prefetch, layers, stacks, tiled)
        return parts, data, functools.partial(jax.tree.unflatten, jax.tree.structure(output))

    # All microbatches -------------------------------------------------------------------------------------------------

    def _accumulate(self, args: LossArgs, scale: Array) -> LossAndGrads:
        """The result of all microbatches."""
        k = self.settings.num_microbatches
        rows, microbatch_of = microbatches(args.batch, k)
        sums_of = self.config.memory.sums(self.config.precision.sum_dtype, args.params, self.trainable)

        def run(index: Array, rows: PyTree, model_state: PyTree, start: list[Array], sink: GradientSink) -> _Microbatch:
            of_microbatch = args._replace(model_state=model_state, batch=microbatch_of(rows))
            return self._microbatch(of_microbatch, scale, sink, start, index)

        # Find the shapes of the results of a microbatch.
        first = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), rows)
        run_first = lambda rows, room: run(jnp.int32(0), rows, args.model_state, [], sums_of.sink(room, 0))[:2]
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
        init = _Sums(sums_of.start(grads_aval), jnp.float32(0), outputs, args.model_state, jnp.float32(0))
        sums, _ = lax.scan(body, init, (jnp.arange(k), rows), unroll=sums_of.unrolls)

        # Reduce.
        divisor = jnp.where(sums.weight > 0, sums.weight, 1)
        grads = self.reductions.reduce_grads(sums_of.mean(sums.grads, divisor))
        norm_term, reduced = sums.norm_term / jnp.square(divisor), output_aval.reduced_state
        result = self._finished(grads, sums.outputs, norm_term, args.model_state, sums.model_state, reduced)
        return result._replace(divisor=divisor) if self.config.offloads_params else result

    def _finished(
        self,
        grads: list[Array | None],
        sums: Sums,
        norm_term: Array,
        before: PyTree,
        after: PyTree,
        reduced: frozenset[int],
    ) -> LossAndGrads:
        """The results, with all scalars reduced in one collective.

        Args:
            grads: the reduced gradients.
            sums: this device's sums of the loss and the metrics.
            norm_term: this device's term of the squared norm of gradients that are not on the device.
            before, after: the model states, whose running statistics are averaged.
            reduced: leaves of the model state, by position, that are averaged already.
        """
        reductions = self.reductions
        on_device = [None if flag else g for g, flag in zip(grads, reductions.params_in_host, strict=True)]
        norm_term = reductions.squared_norm_term(on_device) + norm_term
        totals, squared_norm = reductions.reduce_outputs(sums, norm_term)
        loss, metrics = totals.means()
        return LossAndGrads(grads, loss, metrics, reductions.average_state(before, after, reduced), squared_norm)


def device_gradient(config: ZeroConfig, layout: StateLayout, loss_fn: LossFn, settings: StepSettings) -> DeviceGradient:
    """Builds the `DeviceGradient` of a user's loss function.

    Raises:
        ValueError: if `remat` names a unit that the model does not have, or needs an axis that the mesh does not have.
    """
    settings.remat.check_axes(config.other_axes)
    settings.remat.check_units([leaf.unit for leaf in layout.leaves])
    loss = functools.partial(call_loss, loss_fn, layout.model)
    return DeviceGradient(config, layout, explaining_errors(config.precision)(loss), settings)


def args_specs(gradient: DeviceGradient, batch: PyTree) -> LossArgs:
    """The specs of the arguments for `shard_map`, of which the batch is one."""
    config = gradient.config
    params: PyTree = leaf_specs(config.axes, gradient.layout.leaves, config.stage.shards_params)
    return LossArgs(params, REPLICATED, batch_specs(config.axes, batch), REPLICATED)


def compute_gradients(gradient: DeviceGradient, args: LossArgs, scale: Array) -> LossAndGrads:
    """Computes gradients on global arrays, as `DeviceGradient` does on those of one device."""
    config, leaves = gradient.config, gradient.layout.leaves
    grads_specs: PyTree = leaf_specs(config.optimizer_axes, leaves, config.stage.shards_optimizer)
    grads_specs = [spec if leaf.trainable else None for spec, leaf in zip(grads_specs, leaves, strict=True)]
    divides = config.offloads_params and gradient.settings.num_microbatches > 1
    divisor = REPLICATED if divides else None
    out_specs = LossAndGrads(grads_specs, REPLICATED, REPLICATED, REPLICATED, REPLICATED, divisor)
    in_specs = args_specs(gradient, args.batch), REPLICATED
    return shard_map_over_data(config, gradient, in_specs, out_specs)(args, scale)
