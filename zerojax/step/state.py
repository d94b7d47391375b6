"""The training state, which is sharded when it is created: its leaves, their shardings and its initialization."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import PartitionSpec

from zerojax.sharding import placement
from zerojax.sharding.axes import Axes
from zerojax.sharding.placement import Leaf
from zerojax.sharding.precision import LossScale, Precision
from zerojax.step import models
from zerojax.step.config import ZeroConfig
from zerojax.typing import Array, PRNGKey, PyTree


@dataclasses.dataclass(frozen=True)
class Definition:
    """The static part of a training state. All states of one `init` share the same object.

    Attributes:
        tx: the optimizer.
        model: builds the loss function's first argument from parameters and model state.
        leaves: the placement of the parameter leaves, in flattening order.
        tree: the treedef of the parameters.
        fixed_state: whether each leaf of the model state stays as it is, because its module is frozen.
    """

    tx: optax.GradientTransformation
    model: models.Model
    leaves: tuple[Leaf, ...]
    tree: Any
    fixed_state: tuple[bool, ...] = ()

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def specs(self, axes: Axes, sharded: bool) -> PyTree:
        """The spec of every parameter, with or without the shard axes."""
        return jax.tree.unflatten(self.tree, [leaf.spec(axes, sharded) for leaf in self.leaves])

    @property
    def has_master(self) -> bool:
        """Whether the optimizer holds a copy of the trained parameters in another dtype than they are computed in."""
        return any(leaf.trainable and leaf.dtype != leaf.compute_dtype for leaf in self.leaves)

    def for_compute(self, leaves: Sequence[Array]) -> list[Array]:
        """Casts parameter leaves to the dtypes in which they are gathered and computed with."""
        return [a.astype(leaf.compute_dtype) for a, leaf in zip(leaves, self.leaves, strict=True)]

    def cast_trained(self, trained: PyTree) -> PyTree:
        """Casts a tree from `trained` to the dtypes in which the leaves are gathered and computed with."""
        dtypes = [leaf.compute_dtype for leaf in self.leaves if leaf.trainable]
        values, tree = jax.tree.flatten(trained)
        return tree.unflatten([a.astype(dtype) for a, dtype in zip(values, dtypes, strict=True)])

    def trained(self, params: PyTree) -> PyTree:
        """The parameters with None in place of frozen leaves, as the optimizer gets them."""
        leaves = jax.tree.leaves(params)
        return jax.tree.unflatten(
            self.tree, [a if leaf.trainable else None for a, leaf in zip(leaves, self.leaves, strict=True)]
        )

    def with_frozen(self, trained: PyTree, params: PyTree) -> PyTree:
        """Inserts the frozen leaves of `params` into a tree from `trained`."""
        items = iter(jax.tree.leaves(trained))
        leaves = jax.tree.leaves(params)
        return jax.tree.unflatten(
            self.tree, [next(items) if f.trainable else a for a, f in zip(leaves, self.leaves, strict=True)]
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a training step reads and writes: a pytree of global arrays.

    Attributes:
        step: int32 scalar, the number of steps so far, including skipped ones.
        skipped: int32 scalar, the number of steps that were skipped because a gradient was not finite.
        params: all parameters, sharded or full by the stage: trained ones in compute_dtype, frozen ones in the dtype
            of the model.
        master: trained parameters in param_dtype, placed like the optimizer state; None if they are computed in
            param_dtype.
        opt_state: the state of the optimizer.
        model_state: the model's variables that are not parameters: Linen collections, or NNX variables other than
            `nnx.Param`.
        key: the PRNG key from which the keys of steps are folded.
        loss_scale: the loss scale, for fp16; otherwise None.
        definition: the static part of the state.
    """

    step: Array
    skipped: Array
    params: PyTree
    master: PyTree
    opt_state: PyTree
    model_state: PyTree
    key: PRNGKey
    loss_scale: LossScale | None
    definition: Definition = dataclasses.field(metadata={"static": True})

    def model(self) -> Any:
        """The loss function's first argument: an nnx.Module, Linen variables or a tree of parameters."""
        check_not_donated(self)
        return self.definition.model.merge(self.params, self.model_state)


def specs(config: ZeroConfig, state: TrainState) -> TrainState:
    """The spec of every leaf of a state, by the stage table."""
    scalar: Any = PartitionSpec()
    replicated = lambda tree: jax.tree.map(lambda _: PartitionSpec(), tree)
    definition, stage, axes = state.definition, config.stage, config.axes
    sharded = stage.shards_optimizer
    trained = definition.trained(definition.specs(axes, sharded))
    avals = definition.trained(state.params)
    return TrainState(
        step=scalar,
        skipped=scalar,
        params=definition.specs(axes, stage.shards_params),
        master=None if state.master is None else trained,
        opt_state=placement.optimizer_specs(definition.tx, state.opt_state, trained, avals, axes, sharded),
        model_state=replicated(state.model_state),
        key=scalar,
        loss_scale=replicated(state.loss_scale),
        definition=definition,
    )


def shardings(config: ZeroConfig, state: TrainState) -> TrainState:
    """The shardings that the stage gives a state, whatever those of its arrays are."""
    return placement.named_shardings(config.mesh, specs(config, state))


def check_not_donated(state: TrainState) -> None:
    """Raises ValueError if an array of the state is deleted, as the arrays of a state are that a step was called with.

    The runtime would end the process. Avals are ignored.
    """
    is_deleted = lambda a: isinstance(a, jax.Array) and not isinstance(a, Tracer) and a.is_deleted()
    if not any(map(is_deleted, jax.tree.leaves(state))):
        return
    deleted = next(path for path, a in jax.tree_util.tree_leaves_with_path(state) if is_deleted(a))
    raise ValueError(
        f"state: it was donated to a step, which updated it in place\n"
        f"  got:      {placement.path_text(deleted)!r} is deleted\n"
        f"  fix:      continue with the state that the step returned: state, metrics = step(state, batch)"
    )


def check_trained(state: TrainState, params: PyTree) -> None:
    """Raises ValueError if `params` are not like the trained parameters of the state, with None at frozen leaves."""
    shapes = lambda tree: {placement.path_text(p): jnp.shape(a) for p, a in jax.tree_util.tree_leaves_with_path(tree)}
    got, wanted = shapes(params), shapes(state.definition.trained(state.params))
    for path in sorted(got.keys() | wanted.keys()):
        if got.get(path) != wanted.get(path):
            raise ValueError(
                f"with_params: these are not the trained parameters of the state\n"
                f"  got:      {path}: {got.get(path, 'missing')}\n"
                f"  want:     {path}: {wanted.get(path, 'no such leaf, or a frozen one')}\n"
                f"  fix:      pass a tree like state.params, with None at frozen leaves"
            )


def check_optimizer(state: TrainState, precision: Precision) -> None:
    """Raises ValueError if the optimizer state has other leaves than the optimizer creates for the parameters."""
    definition = state.definition
    trained = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, precision.param_dtype), definition.trained(state.params)
    )
    want = jax.eval_shape(definition.tx.init, trained)
    shape = lambda a: (tuple(a.shape), jnp.dtype(a.dtype) if not models.is_key(a) else a.dtype)
    rows = lambda tree: {placement.path_text(p): shape(a) for p, a in jax.tree_util.tree_leaves_with_path(tree)}
    got, wanted = rows(state.opt_state), rows(want)
    for path in sorted(got.keys() | wanted.keys()):
        if got.get(path) != wanted.get(path):
            raise ValueError(
                f"state: the optimizer state does not match the model and the optimizer\n"
                f"  got:      {path}: {got.get(path, 'missing')}\n"
                f"  want:     {wanted.get(path, 'no such leaf')}\n"
                f"  fix:      create the state with zero.init, for the same model and optimizer"
            )
