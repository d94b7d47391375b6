"""Updates the training state: one optimizer step on global arrays, and the gather of the updated parameters."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding

from zerojax.comm import collectives
from zerojax.sharding import padding
from zerojax.sharding.axes import REPLICATED
from zerojax.sharding.placement import PINNED_HOST
from zerojax.step import optimizers
from zerojax.step.config import ZeroConfig
from zerojax.step.gradient import DeviceGradient
from zerojax.step.over_data import leaf_specs, shard_map_over_data
from zerojax.step.owned_matrices import OwnedMatrices
from zerojax.step.owned_update import owned_update
from zerojax.step.reductions import by_unit
from zerojax.step.state import TrainState, optimizer_shardings
from zerojax.utils.flags import merge, select
from zerojax.utils.typing import Array, PyTree


class Updated(NamedTuple):
    """The results of an update."""

    # the trained parameters in the dtypes that they are computed with, stored like the optimizer state
    computed: PyTree
    master: PyTree  # the master copy, or None
    opt_state: PyTree  # the state of the optimizer
    squared_norm: Array | None  # of the trained parameters; None if it has not been computed
    pending: PyTree = None  # what is left to be done after the program of the step, see `Memory.finish`


class StepGrads(NamedTuple):
    """What an update is computed from."""

    grads: Sequence[Array]  # of the trained parameters, in flattening order, stored like the optimizer state
    factor: Array | None  # what they are multiplied by; None is 1
    finite: Array  # bool scalar; if it is false, nothing changes but the step counts and the loss scale
    loss: Array  # fp32 scalar, the loss of the step
    divisor: Array | None = None  # of gradients in host memory; None is 1


class Update(Protocol):
    """An update by other means than on whole arrays. It may have matrices that are computed by owners."""

    @property
    def owned(self) -> OwnedMatrices: ...

    def __call__(self, state: TrainState, step: StepGrads) -> Updated: ...


def gather_params(gradient: DeviceGradient, trained: PyTree) -> PyTree:
    """Gathers the updated parameters from the shards of the optimizer, unit by unit. The dtype stays.

    These are gathered over the replica axes, if they are divided over them; and at stages 1 and 2 over the shard axes.
    """
    config, options = gradient.config, gradient.settings.collectives
    axes, to_full = config.axes, not config.stage.shards_params
    leaves = [leaf for leaf in gradient.layout.leaves if leaf.trainable]
    values, tree = jax.tree.flatten(trained)

    def gather(shards: list[Array]) -> list[Array]:
        full, waits = list(shards), []
        for members in by_unit(leaves, range(len(leaves))):
            parts, dims = [shards[i] for i in members], [leaves[i].dims for i in members]
            if axes.outer:
                pieces = [each.of_shard for each in dims]
                parts, events = collectives.all_gather(parts, pieces, axes.between, options, waits, rows=True)
                waits = options.next_waits_for(events)
            if to_full:
                parts, events = collectives.all_gather(parts, dims, axes, options, waits, rows=True)
                waits = options.next_waits_for(events)
            for i, value in zip(members, parts, strict=True):
                full[i] = value
        return full

    in_specs, out_specs = (leaf_specs(axes.of_optimizer, leaves, sharded=True),), leaf_specs(axes, leaves, not to_full)
    return jax.tree.unflatten(tree, shard_map_over_data(config, gather, in_specs, out_specs)(values))


def squared_norm(gradient: DeviceGradient, params: PyTree) -> Array:
    """The squared norm of the trained parameters, which are placed like the optimizer state.

    Cost: an all_reduce of one scalar.
    """
    config, flags = gradient.config, gradient.trainable
    specs = leaf_specs(config.optimizer_axes, gradient.layout.leaves, config.stage.shards_optimizer)
    specs = merge(flags, select(specs, flags), itertools.repeat(None))
    values = merge(flags, jax.tree.leaves(params), itertools.repeat(None))

    def total_norm(values: list[Array | None]) -> Array:
        (total,) = gradient.reductions.sum([gradient.reductions.squared_norm_term(values)])
        return total

    return shard_map_over_data(config, total_norm, (specs,), REPLICATED)(values)


def apply_gradients(
    gradient: DeviceGradient, state: TrainState, shardings: TrainState, grads: StepGrads
) -> tuple[TrainState, Array, PyTree]:
    """Applies one optimizer update to a state with these shardings.

    Returns:
        (the state after the update, the squared norm of the trained parameters, what is left to be done after the
        program, with parameters that are stored like the optimizer's state; or None).
    """
    config, layout, finite = gradient.config, gradient.layout, grads.finite

    # Update the shards.
    update = config.memory.update(config, layout, [g.dtype for g in grads.grads], grads.factor is not None)
    updated = _update_whole(gradient, state, grads) if update is None else update(state, grads)

    # Gather the parameters, unless they are stored like the optimizer's state.
    params = updated.computed
    if updated.pending is not None:
        shardings = dataclasses.replace(
            shardings, params=layout.with_frozen(optimizer_shardings(config, layout), shardings.params)
        )
    elif config.gathers_updates:
        params = gather_params(gradient, params)

    # Store the results.
    after = TrainState(
        step=state.step + 1,
        skipped=state.skipped + jnp.where(finite, 0, 1),
        params=layout.with_frozen(params, state.params),
        master=updated.master,
        opt_state=updated.opt_state,
        model_state=state.model_state,
        key=state.key,
        loss_scale=state.loss_scale and state.loss_scale.update(finite, config.precision.growth_interval),
        layout=layout,
    )

    def constrain(a: Array, sharding: NamedSharding) -> Array:
        return a if sharding.memory_kind == PINNED_HOST else lax.with_sharding_constraint(a, sharding)

    after = jax.tree.map(constrain, after, shardings)
    norm = updated.squared_norm
    norm = squared_norm(gradient, optimizer_params(config, after)) if norm is None else norm
    return after, norm, updated.pending


def _update_whole(gradient: DeviceGradient, state: TrainState, step: StepGrads) -> Updated:
    """The update of a state that is on the devices."""
    config, layout, stage = gradient.config, gradient.layout, gradient.config.stage
    dtype = config.precision.param_dtype
    zeros = layout.trained_paddings(stage.shards_optimizer)
    opt_zeros = layout.optimizer_paddings(config.optimizer_axes, stage.shards_optimizer)
    old = optimizer_params(config, state)

    # Update in logical shapes, which is what transformations see.
    factor, finite = step.factor, step.finite
    scaled = [g.astype(dtype) if factor is None else g.astype(dtype) * factor.astype(dtype) for g in step.grads]
    before = padding.cropped(old, zeros)
    tree = jax.tree.structure(old)
    update = owned_update(config, layout, gradient.settings.collectives) or functools.partial(
        optimizers.update, layout.tx
    )
    updates, opt_state = update(
        padding.cropped(tree.unflatten(scaled), zeros),
        padding.cropped(state.opt_state, opt_zeros),
        before,
        step.loss,
    )
    opt_state = padding.padded(opt_state, opt_zeros)
    updated = padding.padded(optax.apply_updates(before, updates), zeros)

    # Keep what was, if a gradient is not finite.
    def keep(new: PyTree, old: PyTree) -> PyTree:
        return jax.tree.map(lambda n, o: lax.select(finite, n, o), new, old)

    new = lax.with_sharding_constraint(keep(updated, old), optimizer_shardings(config, layout))
    master = None if state.master is None else new
    return Updated(layout.cast_trained(new), master, keep(opt_state, state.opt_state), None)


def optimizer_params(config: ZeroConfig, state: TrainState) -> PyTree:
    """The trained parameters in param_dtype, stored like the optimizer's state. This needs no communication."""
    layout, stage = state.layout, config.stage
    if state.master is not None:
        return state.master
    trained = layout.trained(state.params)
    if not stage.shards_params:
        trained = padding.padded(trained, layout.trained_paddings(stage.shards_optimizer))
    return lax.with_sharding_constraint(trained, optimizer_shardings(config, layout))
