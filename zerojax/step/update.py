"""The update: one optimizer step on global arrays, outside `shard_map`, and the gather of updated parameters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from zerojax.sharding import placement
from zerojax.sharding.precision import cast
from zerojax.step.config import ZeroConfig, leaf_specs, manual
from zerojax.step.gradient import GradientProgram
from zerojax.step.state import Definition, TrainState
from zerojax.transform import collectives
from zerojax.typing import Array, PyTree


def gather_params(program: GradientProgram, trained: PyTree) -> PyTree:
    """Stages 1 and 2: shards of the updated parameters -> full parameters, unit by unit, in the dtype given."""
    config, options = program.config, program.settings.collectives
    leaves = [leaf for leaf in program.definition.leaves if leaf.trainable]
    values, tree = jax.tree.flatten(trained)
    units: dict[str, list[int]] = {}
    for i, leaf in enumerate(leaves):
        units.setdefault(leaf.unit, []).append(i)

    def local(shards: list[Array]) -> list[Array]:
        full, waits = list(shards), []
        for members in units.values():
            held, dims = [shards[i] for i in members], [leaves[i].dims for i in members]
            gathered, events = collectives.all_gather(held, dims, config.axes, options, waits, rows=True)
            waits = options.next_waits_for(events)
            for i, value in zip(members, gathered, strict=True):
                full[i] = value
        return full

    in_specs = ([placement.data_spec(leaf.dim, config.axes) for leaf in leaves],)
    return jax.tree.unflatten(tree, manual(config, local, in_specs, PartitionSpec())(values))


def squared_norm(program: GradientProgram, params: PyTree) -> Array:
    """Squared norm of the trained parameters, placed like the optimizer state; one scalar all-reduce."""
    config, definition = program.config, program.definition
    items = iter(jax.tree.leaves(params))
    values = [next(items) if leaf.trainable else None for leaf in definition.leaves]
    specs = leaf_specs(config, definition.leaves, config.stage.shards_optimizer)
    specs = [s if leaf.trainable else None for s, leaf in zip(specs, definition.leaves, strict=True)]

    def local(values: list[Array]) -> Array:
        (total,) = collectives.all_reduce([program.local_squared_norm(values)], config.axes.data, config.axes).leaves
        return total

    return manual(config, local, (specs,), PartitionSpec())(values)


def apply_gradients(
    program: GradientProgram, state: TrainState, shardings: TrainState, grads: PyTree, finite: Array
) -> TrainState:
    """One optimizer update, on global arrays with their shardings. Where `finite` is false nothing changes.

    Args:
        program: that made the gradients.
        state: before the update.
        shardings: of the state.
        grads: tree of gradients, None at frozen leaves, in true scale.
        finite: bool scalar.
    """
    config, definition, tx = program.config, program.definition, program.definition.tx
    dtype = config.precision.param_dtype
    placed = optimizer_shardings(config, definition)
    old = state.master
    if old is None:  # a shard of full parameters is a slice: no communication
        old = lax.with_sharding_constraint(definition.trained(state.params), placed)
    updates, opt_state = tx.update(jax.tree.map(lambda g: g.astype(dtype), grads), state.opt_state, old)
    keep = lambda new, old: jax.tree.map(lambda n, o: lax.select(finite, n, o), new, old)
    new = lax.with_sharding_constraint(keep(optax.apply_updates(old, updates), old), placed)
    params = cast(new, config.precision.compute_dtype)
    if config.stage.shards_optimizer and not config.stage.shards_params:
        params = gather_params(program, params)
    after = TrainState(
        step=state.step + 1,
        skipped=state.skipped + jnp.where(finite, 0, 1),
        params=definition.with_frozen(params, state.params),
        master=None if state.master is None else new,
        opt_state=keep(opt_state, state.opt_state),
        model_state=state.model_state,
        key=state.key,
        loss_scale=state.loss_scale and state.loss_scale.update(finite, config.precision.growth_interval),
        definition=definition,
    )
    return lax.with_sharding_constraint(after, shardings)


def optimizer_shardings(config: ZeroConfig, definition: Definition) -> PyTree:
    specs = definition.specs(config.axes, config.stage.shards_optimizer)
    return placement.named_shardings(config.mesh, definition.trained(specs))
