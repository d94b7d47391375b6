"""The gradient of a loss on one device's data, at every stage: microbatches, weights, reductions.

Everything here runs inside `shard_map`, manual over the data axes, on one device's shard of the batch:

    stage 0   full weights; accumulate locally; one all-reduce a step
    stage 1   full weights; accumulate locally; one reduce-scatter a step
    stage 2   full weights; reduce-scatter per unit in every microbatch; accumulate shards
    stage 3   gather per unit, forward and backward; reduce-scatter per unit in every microbatch; accumulate shards
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

from zerojax.sharding.precision import cast, for_reduction
from zerojax.step import models
from zerojax.step.config import ZeroConfig, batch_specs, leaf_specs, manual
from zerojax.step.models import Output, Weighted
from zerojax.step.settings import StepSettings
from zerojax.step.state import Definition
from zerojax.transform import collectives
from zerojax.transform.dependencies import event
from zerojax.transform.segmentation import TracedLoss
from zerojax.transform.segmented_loss import SegmentedLoss
from zerojax.transform.stage_collectives import StageCollectives
from zerojax.typing import Array, PRNGKey, PyTree

Loss = Callable[[PyTree, PyTree, PyTree, PRNGKey], Output]  # (params, other state, batch, key)


class LossAndGrads(NamedTuple):
    """What a device has after the gradient program. All but `grads` is the same on every device."""

    grads: list[Array | None]  # per leaf, as the stage keeps it, times the loss scale; None where frozen
    loss: Array  # scalar fp32
    metrics: dict[str, Array]  # scalars fp32
    state: Any  # other state of the model
    squared_norm: Array  # scalar fp32, of all gradients


@dataclasses.dataclass(frozen=True)
class GradientProgram:
    """Builds the local gradient function of a loss.

    Attributes:
        config: mesh, axes, stage and precision.
        definition: the parameters and their placement.
        loss: the loss, in terms of a parameter tree.
        settings: of the step.
    """

    config: ZeroConfig
    definition: Definition
    loss: Loss
    settings: StepSettings

    @property
    def trainable(self) -> list[bool]:
        return [leaf.trainable for leaf in self.definition.leaves]

    def __call__(
        self, shards: Sequence[Array], other: PyTree, batch: PyTree, key: PRNGKey, scale: Array
    ) -> LossAndGrads:
        """One step's gradient.

        Args:
            shards: parameter leaves, full below stage 3, else this device's shards.
            other: the model's other state.
            batch: this device's rows.
            key: PRNG key of the step.
            scale: scalar, the loss scale.
        """
        shards = cast(list(shards), self.config.precision.compute_dtype)
        if self.config.precision.cast_inputs:
            batch = cast(batch, self.config.precision.compute_dtype)
        if self.settings.num_microbatches == 1:
            grads, output, _ = self._microbatch(shards, other, batch, self._device_key(key, 0), scale, [])
            grads = self._finish_reduction(grads)
            sums, state = output.sums(), output.state
        else:
            grads, sums, state = self._accumulate(shards, other, batch, key, scale)
        return self._result(grads, sums, other, state)

    def evaluate(
        self, shards: Sequence[Array], other: PyTree, batch: PyTree, key: PRNGKey
    ) -> tuple[Array, dict[str, Array]]:
        """Loss and metrics alone, with the same gathering."""
        shards = cast(list(shards), self.config.precision.compute_dtype)
        if self.config.precision.cast_inputs:
            batch = cast(batch, self.config.precision.compute_dtype)
        key = self._device_key(key, 0)
        if self.config.stage.shards_params:
            program, data, unflatten = self._program(shards, self._fold(other, 0), batch, key)
            output = unflatten(program.evaluate(shards, data, []))
        else:
            output = self.loss(jax.tree.unflatten(self.definition.tree, shards), self._fold(other, 0), batch, key)
        return _means(self._total(output.sums())[0])

    def uses(self, shards: Sequence[Array], other: PyTree, batch: PyTree, key: PRNGKey) -> list[int]:
        """Of each leaf: in how many places of the loss it is gathered and its gradient reduced.

        None if the loss does not use it, one usually, more if several units share it. Arguments: those of a call.
        """
        shards = cast(list(shards), self.config.precision.compute_dtype)
        batch = jax.tree.map(lambda a: a[: a.shape[0] // self.settings.num_microbatches] if a.ndim else a, batch)
        program, _, _ = self._program(shards, self._fold(other, 0), batch, key)
        places = [leaf for segment in program.traced.segments for leaf in segment.leaves]
        return [places.count(leaf) for leaf in range(len(self.definition.leaves))]

    def _device_key(self, key: PRNGKey, microbatch: PyTree) -> Array:
        return jax.random.fold_in(jax.random.fold_in(key, collectives.device_index(self.config.axes)), microbatch)

    def _fold(self, other: PyTree, microbatch: PyTree) -> Any:
        folded = models.fold_keys(other, collectives.device_index(self.config.axes))
        return models.fold_keys(folded, jnp.asarray(microbatch, jnp.int32))

    def _sum(self, values: Sequence[Array]) -> list[Array]:
        return collectives.all_reduce(values, self.config.axes.data, self.config.axes).leaves

    # One microbatch ---------------------------------------------------------------------------------------------------

    def _microbatch(
        self,
        shards: Sequence[Array],
        other: PyTree,
        batch: PyTree,
        key: PRNGKey,
        scale: Array,
        start: list[Array],
        index: Any = 0,
    ) -> tuple[list[Any], Output, Array]:
        """(gradients of the microbatch's weighted mean over all devices, output, its weight over all devices).

        Gradients are reduced here at stages 2 and 3, and local otherwise. The mean is taken before anything is summed
        in a narrow dtype: the cotangent of the local sum is scale / weight.
        """
        weights: list[Array] = []

        def seed(output: Output) -> Array:
            if output.is_weighted:
                weights.extend(self._sum([jnp.asarray(output.loss.weight, jnp.float32)]))
            else:
                weights.append(jnp.float32(self.config.axes.num_devices))
            return jnp.where(weights[0] > 0, scale / jnp.maximum(weights[0], jnp.finfo(jnp.float32).tiny), 0.0)

        if self.config.stage.shards_grads or not self.settings.remat.saves_everything:
            program, data, unflatten = self._program(shards, self._fold(other, index), batch, key)
            flat, grads = program.value_and_grad(shards, data, lambda flat: seed(unflatten(flat)), start)
            output = unflatten(flat)
        else:
            grads, output = self._full_gradient(shards, self._fold(other, index), batch, key, seed)
        output = dataclasses.replace(output, state=models.restore_keys(output.state, other))
        return grads, output, weights[0]

    def _full_gradient(
        self, full: Sequence[Array], other: PyTree, batch: PyTree, key: PRNGKey, seed: Any
    ) -> tuple[list[Any], Output]:
        """Stages 0 and 1, where everything is kept: plain reverse mode with full weights."""
        trained = [w for w, flag in zip(full, self.trainable, strict=True) if flag]

        def local(trained: list[Array]) -> tuple[Array, Output]:
            items = iter(trained)
            leaves = [next(items) if flag else w for w, flag in zip(full, self.trainable, strict=True)]
            output = self.loss(jax.tree.unflatten(self.definition.tree, leaves), other, batch, key)
            return output.loss.sum, output

        total, vjp, output = jax.vjp(local, trained, has_aux=True)
        (grads,) = vjp(seed(output).astype(total.dtype))
        items = iter(grads)
        return [next(items) if flag else None for flag in self.trainable], output

    def _program(
        self, shards: Sequence[Array], other: PyTree, batch: PyTree, key: PRNGKey
    ) -> tuple[SegmentedLoss, list[Array], Callable[[list[Array]], Output]]:
        """Traces the loss with full weights and cuts it into units."""
        data, data_tree = jax.tree.flatten((other, batch, key))
        leaves = self.definition.leaves
        full = [jax.ShapeDtypeStruct(leaf.shape, shard.dtype) for leaf, shard in zip(leaves, shards, strict=True)]
        out: dict[str, Any] = {}

        def flat_loss(*args: Array) -> list[Array]:
            params = jax.tree.unflatten(self.definition.tree, args[: len(full)])
            output = self.loss(params, *jax.tree.unflatten(data_tree, args[len(full) :]))
            flat, out["tree"] = jax.tree.flatten(jax.tree.map(jnp.asarray, output))
            return flat

        closed = jax.make_jaxpr(flat_loss)(*full, *data)
        stage_collectives = StageCollectives(
            self.config.axes,
            tuple(leaf.dims for leaf in leaves),
            self.config.stage,
            self.config.precision.reduce_dtype,
            self.settings.collectives,
        )
        traced = TracedLoss(closed, len(full), [leaf.unit for leaf in leaves])
        program = SegmentedLoss(traced, stage_collectives, self.trainable, self.settings.remat, self.settings.prefetch)
        return program, data, lambda flat: jax.tree.unflatten(out["tree"], flat)

    # All microbatches -------------------------------------------------------------------------------------------------

    def _accumulate(self, shards: Sequence[Array], other: PyTree, batch: PyTree, key: PRNGKey, scale: Array) -> Any:
        k = self.settings.num_microbatches
        parts = jax.tree.map(
            lambda a: a.reshape(k, a.shape[0] // k, *a.shape[1:]) if a.ndim else jnp.stack([a] * k), batch
        )
        grad_dtype = self.config.precision.param_dtype
        one = lambda index, part, other, start: self._microbatch(
            shards, other, part, self._device_key(key, index), scale, start, index
        )
        first = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), parts)
        shape = jax.eval_shape(lambda part: one(jnp.int32(0), part, other, [])[:2], first)
        grads_shape, output_shape = shape
        zeros = lambda aval, dtype=None: jnp.zeros(aval.shape, dtype or aval.dtype)
        sums_shape = jax.eval_shape(Output.sums, output_shape)
        init = (
            [None if g is None else zeros(g, grad_dtype) for g in grads_shape],
            jnp.float32(0),
            jax.tree.map(zeros, sums_shape),
            other,
        )

        def body(carry: Any, part: Any) -> tuple[Any, None]:
            totals, total_weight, sums, other = carry
            index, rows = part
            start = event(jax.tree.leaves(rows))
            grads, output, weight = one(index, rows, other, start)
            totals = [
                None if t is None else t + g.astype(grad_dtype) * weight for t, g in zip(totals, grads, strict=True)
            ]
            sums = jax.tree.map(jnp.add, sums, output.sums())
            return (totals, total_weight + weight, sums, output.state), None

        (totals, total_weight, sums, state), _ = lax.scan(body, init, (jnp.arange(k), parts))
        mean = lambda t: None if t is None else t / jnp.where(total_weight > 0, total_weight, 1)
        grads = self._finish_reduction([mean(t) for t in totals])
        return grads, sums, state

    # Reductions at the end of the step --------------------------------------------------------------------------------

    def _finish_reduction(self, grads: list[Any]) -> list[Any]:
        """Reduces what is still local, unit by unit, and sums over replicas."""
        stage, axes, reduce_dtype = self.config.stage, self.config.axes, self.config.precision.reduce_dtype
        options, leaves = self.settings.collectives, self.definition.leaves
        reduced = list(grads)
        by_unit: dict[str, list[int]] = {}
        waits: list[Array] = []
        for i, leaf in enumerate(leaves):
            if leaf.trainable:
                by_unit.setdefault(leaf.unit, []).append(i)
        for members in by_unit.values():
            values, dims = [grads[i] for i in members], [leaves[i].dims for i in members]
            if not stage.shards_grads:
                values = [for_reduction(v, reduce_dtype) for v in values]
                if stage.shards_optimizer:
                    values, events = collectives.reduce_scatter(values, dims, axes, options, waits, rows=True)
                else:
                    values, events = collectives.all_reduce(values, axes.shard, axes, options, dims, waits)
                waits = options.next_waits_for(events)
            values, events = collectives.all_reduce(values, axes.replica, axes, options, dims, waits)
            waits = options.next_waits_for(events)
            for i, value in zip(members, values, strict=True):
                reduced[i] = value
        return reduced

    def _result(self, grads: list[Any], sums: Any, before: Any, state: Any) -> LossAndGrads:
        """Everything that is left to reduce: scalars, in one collective, and running statistics."""
        totals, squared_norm = self._total(sums, self.local_squared_norm(grads))
        loss, metrics = _means(totals)
        return LossAndGrads(grads, loss, metrics, self._average_state(before, state), squared_norm)

    def _total(self, sums: Any, squared_norm: Any = 0.0) -> tuple[Any, Array]:
        """Scalars, summed over all data devices in one collective."""
        flat, tree = jax.tree.flatten((sums, jnp.float32(squared_norm)))
        (total,) = self._sum([jnp.stack(flat)])
        return jax.tree.unflatten(tree, list(total))

    def local_squared_norm(self, grads: Sequence[Any]) -> Array:
        """This device's part of the squared norm: summed over all data devices it counts every element once."""
        axes, sharded = self.config.axes, self.config.stage.shards_optimizer
        total = jnp.float32(0)
        for leaf, grad in zip(self.definition.leaves, grads, strict=True):
            if grad is not None:
                copies = axes.num_replicas * (1 if sharded and leaf.dim is not None else axes.num_shards)
                total += jnp.sum(jnp.square(grad.astype(jnp.float32))) / copies
        return total

    def _average_state(self, before: Any, after: Any) -> Any:
        """Running statistics (floating leaves), averaged over the data axes; counters and keys are the same anyway."""
        flat, tree = jax.tree.flatten(after)
        old = jax.tree.leaves(before)
        floating = [i for i, leaf in enumerate(flat) if jnp.issubdtype(leaf.dtype, jnp.floating)]
        means = self._sum([flat[i].astype(jnp.float32) / self.config.axes.num_devices for i in floating])
        for i, mean in zip(floating, means, strict=True):
            flat[i] = mean.astype(old[i].dtype)
        return jax.tree.unflatten(tree, flat)


def _means(sums: tuple[Weighted, dict[str, Weighted]]) -> tuple[Array, dict[str, Array]]:
    """Weighted sums -> means; 0 where nothing has weight."""
    mean = lambda pair: pair.sum / jnp.where(pair.weight > 0, pair.weight, 1)
    return mean(sums[0]), {name: mean(pair) for name, pair in sums[1].items()}


def gradient_program(
    config: ZeroConfig,
    definition: Definition,
    loss_fn: Callable[..., Any],
    settings: StepSettings,
) -> GradientProgram:
    """The gradient program of a loss function of a model, as users write it.

    Raises:
        ValueError: a setting of `remat` that the mesh or the model does not have.
    """
    settings.remat.check_axes([name for name in config.mesh.axis_names if name not in config.axes.data])
    settings.remat.check_units([leaf.unit for leaf in definition.leaves])
    loss = functools.partial(models.call_loss, loss_fn, definition.model)
    return GradientProgram(config, definition, loss, settings)


def gradients(program: GradientProgram, args: Any) -> LossAndGrads:
    """Runs the gradient program on global arrays: args are (parameter leaves, other state, batch, key, scale)."""
    config, definition = program.config, program.definition
    whole: Any = PartitionSpec()
    grads_specs: Any = leaf_specs(config, definition.leaves, config.stage.shards_optimizer)
    grads_specs = [s if leaf.trainable else None for s, leaf in zip(grads_specs, definition.leaves, strict=True)]
    in_specs = (
        leaf_specs(config, definition.leaves, config.stage.shards_params),
        whole,
        batch_specs(config, args[2]),
        whole,
        whole,
    )
    return manual(config, program, in_specs, LossAndGrads(grads_specs, whole, whole, whole, whole))(*args)


def uses(program: GradientProgram, args: Any) -> list[int]:
    """`GradientProgram.uses`, of avals of global arrays: (parameter leaves, other state, batch, key)."""
    config, definition = program.config, program.definition
    whole: Any = PartitionSpec()
    in_specs = leaf_specs(config, definition.leaves, config.stage.shards_params), whole, batch_specs(config, args[2])
    counted: list[int] = []

    def count(*local: Any) -> Array:
        counted.extend(program.uses(*local))
        return jnp.int32(0)

    jax.eval_shape(manual(config, count, (*in_specs, whole), whole), *args)
    return counted
