"""The update: one optimizer step on global arrays, outside `shard_map`, and the gather of updated parameters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from zerojax.sharding import placement
from zerojax.sharding.precision import cast
from zerojax.step.config import Setup, leaf_specs, manual
from zerojax.step.gradient import GradientProgram
from zerojax.step.state import Definition, TrainState
from zerojax.transform import collectives

Array = Any
Tree = Any


def gather_params(setup: Setup, definition: Definition, trained: Tree) -> Tree:
    """Stages 1 and 2: shards of the updated parameters -> full parameters, unit by unit, in the dtype given."""
    leaves = [leaf for leaf in definition.leaves if leaf.trainable]
    values, tree = jax.tree.flatten(trained)
    units: dict[str, list[int]] = {}
    for i, leaf in enumerate(leaves):
        units.setdefault(leaf.unit, []).append(i)

    def local(shards: list[Array]) -> list[Array]:
        full, waits = list(shards), []
        for members in units.values():
            held, dims = [shards[i] for i in members], [leaves[i].dims for i in members]
            gathered, events = collectives.all_gather(held, dims, setup.axes, waits, rows=True)
            waits = setup.axes.in_turn(events)
            for i, value in zip(members, gathered, strict=True):
                full[i] = value
        return full

    in_specs = ([placement.data_spec(leaf.dim, setup.axes) for leaf in leaves],)
    return jax.tree.unflatten(tree, manual(setup, local, in_specs, PartitionSpec())(values))


def squared_norm(setup: Setup, definition: Definition, program: GradientProgram, params: Tree) -> Array:
    """Squared norm of the trained parameters, placed like the optimizer state; one scalar all-reduce."""
    items = iter(jax.tree.leaves(params))
    values = [next(items) if leaf.trainable else None for leaf in definition.leaves]
    specs = leaf_specs(setup, definition, placement.shards_optimizer(setup.stage))
    specs = [s if leaf.trainable else None for s, leaf in zip(specs, definition.leaves, strict=True)]

    def local(values: list[Array]) -> Array:
        (total,) = collectives.all_reduce([program.local_squared_norm(values)], setup.axes.data, setup.axes).leaves
        return total

    return manual(setup, local, (specs,), PartitionSpec())(values)


def apply_gradients(setup: Setup, state: TrainState, shardings: TrainState, grads: Tree, finite: Array) -> TrainState:
    """One optimizer update, on global arrays with their shardings. Where `finite` is false nothing changes.

    Args:
        setup: of the Zero.
        state: before the update.
        shardings: of the state.
        grads: tree of gradients, None at frozen leaves, in true scale.
        finite: bool scalar.
    """
    definition, tx = state.definition, state.definition.tx
    dtype = setup.precision.param_dtype
    placed = optimizer_shardings(setup, definition)
    old = state.master
    if old is None:  # a shard of full parameters is a slice: no communication
        old = lax.with_sharding_constraint(definition.trained(state.params), placed)
    updates, opt_state = tx.update(jax.tree.map(lambda g: g.astype(dtype), grads), state.opt_state, old)
    keep = lambda new, old: jax.tree.map(lambda n, o: lax.select(finite, n, o), new, old)
    new = lax.with_sharding_constraint(keep(optax.apply_updates(old, updates), old), placed)
    params = cast(new, setup.precision.compute_dtype)
    if placement.shards_optimizer(setup.stage) and not placement.shards_params(setup.stage):
        params = gather_params(setup, definition, params)
    after = TrainState(
        step=state.step + 1,
        skipped=state.skipped + jnp.where(finite, 0, 1),
        params=definition.with_frozen(params, state.params),
        master=None if state.master is None else new,
        opt_state=keep(opt_state, state.opt_state),
        model_state=state.model_state,
        key=state.key,
        loss_scale=state.loss_scale and state.loss_scale.update(finite, setup.precision.growth_interval),
        definition=definition,
    )
    return lax.with_sharding_constraint(after, shardings)


def optimizer_shardings(setup: Setup, definition: Definition) -> Tree:
    specs = definition.specs(setup.axes, placement.shards_optimizer(setup.stage))
    return placement.shardings(setup.mesh, definition.trained(specs))
