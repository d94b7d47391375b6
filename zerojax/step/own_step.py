"""Training steps that scripts write themselves: what is placed as the stage requires stays placed.

In a step that a user jits, the compiler places what nothing pins: zeros on one device, updated parameters like the
updates, and what a loss reads whole as a whole, even where it is stored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from zerojax.program import jaxprs
from zerojax.sharding import placement
from zerojax.sharding.optimizer_placement import optimizer_placement
from zerojax.step.batch import Whole, is_whole
from zerojax.step.config import ZeroConfig
from zerojax.step.optimizers import check_transformation
from zerojax.step.owned_update import owned_update
from zerojax.step.state import StateLayout
from zerojax.utils.typing import Array, PyTree
from zerojax.utils.warn import warn


def placed_optimizer(
    config: ZeroConfig, define: Callable[[PyTree], StateLayout], tx: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """See `Zero.optimizer`. `define` returns the placement of a tree of parameters."""
    # Check.
    check_transformation(tx)
    if config.offloads_optimizer:
        raise ValueError(
            f"optimizer: a step of your own keeps the optimizer's state on the devices\n"
            f"  got:      offload={config.offload!r}\n"
            f"  fix:      Zero(..., offload='none'); or zero.init and zero.train_step, which offload it"
        )
    if not isinstance(tx, optax.GradientTransformation):  # such as optax.MultiSteps
        tx = optax.GradientTransformationExtraArgs(tx.init, tx.update)
    inner, stage = optax.with_extra_args_support(tx), config.stage

    # Place.
    def state_shardings(layout: StateLayout, opt_state: PyTree) -> PyTree:
        leaves = layout.trained(jax.tree.unflatten(layout.tree, layout.leaves))
        stored = optimizer_placement(
            inner, opt_state, leaves, config.optimizer_axes, stage.shards_optimizer, pads=False
        )
        return placement.named_shardings(config.mesh, jax.tree.map(lambda each: each.spec, stored))

    def init(params: PyTree) -> PyTree:
        layout = define(params)
        _check_placed(config, layout, params)
        trained = layout.trained(params)
        shardings = state_shardings(layout, jax.eval_shape(inner.init, trained))
        return jax.jit(inner.init, out_shardings=shardings)(trained)

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: PyTree) -> tuple[PyTree, PyTree]:
        if params is None:
            raise ValueError(
                "optimizer: needs the parameters, to place what it returns as they are stored\n"
                "  got:      tx.update(grads, opt_state)\n"
                "  fix:      tx.update(grads, opt_state, params)"
            )

        # Update the shards.
        layout = define(params)
        stored = param_shardings(config, layout)
        in_shards = placement.named_shardings(config.mesh, layout.specs(config.optimizer_axes, stage.shards_optimizer))
        before = layout.trained(pinned(params, stored))  # or compilers would store them like the moments
        of_owners = None if extra else owned_update(config, dataclasses.replace(layout, tx=inner), gets_loss=False)
        updates, state = (of_owners or inner.update)(pinned(updates, in_shards), state, before, **extra)

        # Place the results, of which the updates are gathered at stages 1 and 2.
        updates = jax.tree.map(_without_none, params, pinned(pinned(updates, in_shards), stored))
        return updates, pinned(state, state_shardings(layout, state))

    return optax.GradientTransformationExtraArgs(init, update)


def apply_updates(config: ZeroConfig, layout: StateLayout, params: PyTree, updates: PyTree) -> PyTree:
    """See `Zero.apply_updates`."""
    updates = jax.tree.map(_without_none, params, updates)
    return pinned(optax.apply_updates(params, updates), param_shardings(config, layout))


def param_shardings(config: ZeroConfig, layout: StateLayout) -> PyTree:
    """The shardings of the parameters."""
    return placement.named_shardings(config.mesh, layout.specs(config.axes, config.stage.shards_params))


def pinned(tree: PyTree, shardings: PyTree) -> PyTree:
    """The arrays of a tree with sharding constraints. Where it has None in place of an array, it is None."""
    pin = lambda sharding, a: None if a is None else lax.with_sharding_constraint(a, sharding)
    return jax.tree.map(pin, shardings, tree)


def _without_none(param: Array, update: Array | None) -> Array:
    """The update of a parameter; that of a frozen one changes no bit of it."""
    return jnp.full_like(param, -0.0) if update is None else update


def _check_placed(config: ZeroConfig, layout: StateLayout, params: PyTree) -> None:
    """Raises ValueError if an array is not placed as the stage stores parameters. What is traced is not known."""
    shardings = jax.tree.leaves(param_shardings(config, layout))
    for leaf, a, wanted in zip(layout.leaves, jax.tree.leaves(params), shardings, strict=True):
        if isinstance(a, Tracer) or (isinstance(a, jax.Array) and a.sharding.is_equivalent_to(wanted, a.ndim)):
            continue
        got = getattr(a, "sharding", type(a).__name__)
        raise ValueError(
            f"optimizer: parameter {leaf.path!r} is not placed as stage {int(config.stage)} stores it\n"
            f"  got:      {getattr(got, 'spec', got)}\n"
            f"  want:     {wanted.spec}\n"
            f"  fix:      params = zero.shard(params), before the optimizer's init"
        )


def warn_of_placement(config: ZeroConfig, layout: StateLayout) -> None:
    """Warns that nothing keeps the optimizer's state of a step, and its parameters, as the stage stores them."""
    sharded = [leaf for leaf in layout.leaves if leaf.trainable and leaf.dim is not None]
    if not config.stage.shards_optimizer or config.axes.num_shards == 1 or not sharded:
        return
    largest = max(sharded, key=lambda leaf: leaf.size)
    stored, updated = largest.spec(config.axes, config.stage.shards_params), largest.spec(config.optimizer_axes, True)
    moves = "" if stored == updated else f"; after a step, the parameter is {updated} instead of {stored}"
    warn(
        f"value_and_grad: nothing places the optimizer's state as stage {int(config.stage)} requires\n"
        f"  got:      {largest.path!r}: jax.jit(tx.init) puts its moments on one device as a whole{moves}\n"
        f"  fix:      tx = zero.optimizer(tx), and zero.apply_updates(params, updates)"
    )


def free_whole(config: ZeroConfig, batch: PyTree) -> PyTree:
    """What is marked `Whole` in a batch, as arrays whose readers do not place them.

    Compilers store the result of an operation as the one that reads it asks for. A parameter that a step has updated
    would be replicated, because a loss of another model reads it.
    """
    free = lambda node: Whole(jax.tree.map(partial(_free, config), node.value)) if is_whole(node) else node
    return jax.tree.map(free, batch, is_leaf=is_whole)


def run_free(config: ZeroConfig, fn: Callable[..., PyTree], *args: PyTree) -> PyTree:
    """`fn(*args)`, where what `fn` closes over is read as in `free_whole`."""
    closed, result = jaxprs.traced(fn, *args)
    free = jaxprs.with_constants(closed, [_free(config, a) for a in closed.consts])
    return jax.tree.unflatten(jax.tree.structure(result), jaxprs.run(free, *jax.tree.leaves(args)))


def _free(config: ZeroConfig, a: Array) -> Array:
    if not isinstance(a, Tracer) or not a.ndim or not jnp.issubdtype(a.dtype, jnp.number):
        return a
    spec = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * a.ndim)
    return lax.with_sharding_constraint(a, NamedSharding(config.mesh, spec))
