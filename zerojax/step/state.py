"""The training state: what a step reads and writes, sharded from birth."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec, use_abstract_mesh

from zerojax.sharding import placement
from zerojax.sharding.axes import Axes
from zerojax.sharding.placement import Leaf, Overrides
from zerojax.sharding.precision import LossScale, Precision, cast
from zerojax.step import models
from zerojax.transform import jaxprs, stacks

Array = Any
Tree = Any


@dataclasses.dataclass(frozen=True)
class Definition:
    """What of a state is no array: the same object for all states of one `init`.

    Attributes:
        tx: the optimizer.
        model: how the loss function's first argument is built.
        leaves: placement of the parameter leaves, in flattening order.
        tree: treedef of the parameters.
    """

    tx: optax.GradientTransformation
    model: models.Model
    leaves: tuple[Leaf, ...]
    tree: Any

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def specs(self, axes: Axes, sharded: bool) -> Tree:
        """A PartitionSpec for every parameter, where a stage shards what stands for it, or does not."""
        return jax.tree.unflatten(self.tree, [leaf.spec(axes, sharded) for leaf in self.leaves])

    def trained(self, params: Tree) -> Tree:
        """The tree with None in place of frozen leaves: what the optimizer sees."""
        leaves = jax.tree.leaves(params)
        return jax.tree.unflatten(
            self.tree, [a if leaf.trainable else None for a, leaf in zip(leaves, self.leaves, strict=True)]
        )

    def with_frozen(self, trained: Tree, params: Tree) -> Tree:
        """`trained`, completed with the frozen leaves of `params`."""
        items = iter(jax.tree.leaves(trained))
        leaves = jax.tree.leaves(params)
        return jax.tree.unflatten(
            self.tree, [next(items) if f.trainable else a for a, f in zip(leaves, self.leaves, strict=True)]
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a training step reads and writes. A pytree of global arrays.

    Attributes:
        step: int32 scalar, updates tried (skipped ones count).
        skipped: int32 scalar, updates skipped because a gradient was not finite.
        params: parameters in the compute dtype, placed by the stage; frozen leaves among them.
        master: trained parameters in param_dtype, placed with the optimizer state; None where compute_dtype is
            param_dtype.
        opt_state: of the optimizer.
        model_state: what the model has beside parameters: Linen collections, or NNX variables that are no Param.
        key: PRNG key that the steps' keys are folded from.
        loss_scale: for fp16; else None.
    """

    step: Array
    skipped: Array
    params: Tree
    master: Tree
    opt_state: Tree
    model_state: Tree
    key: Array
    loss_scale: LossScale | None
    definition: Definition = dataclasses.field(metadata={"static": True})

    def model(self) -> Any:
        """What the loss function's first argument is: an nnx.Module, Linen variables, or the tree."""
        return self.definition.model.merge(self.params, self.model_state)


def specs(definition: Definition, state: TrainState, stage: int, axes: Axes) -> TrainState:
    """A PartitionSpec for every leaf of a state, by the stage table."""
    whole = lambda tree: jax.tree.map(lambda _: PartitionSpec(), tree)
    sharded = placement.shards_optimizer(stage)
    trained = definition.trained(definition.specs(axes, sharded))
    shapes = definition.trained(state.params)
    return TrainState(
        step=PartitionSpec(),
        skipped=PartitionSpec(),
        params=definition.specs(axes, placement.shards_params(stage)),
        master=None if state.master is None else trained,
        opt_state=placement.optimizer_specs(definition.tx, state.opt_state, trained, shapes, axes, sharded),
        model_state=whole(state.model_state),
        key=PartitionSpec(),
        loss_scale=whole(state.loss_scale),
        definition=definition,
    )


def shardings(state: TrainState, mesh: Any, stage: int, axes: Axes) -> TrainState:
    """Where a stage places a state, wherever its arrays are."""
    return placement.shardings(mesh, specs(state.definition, state, stage, axes))


def build(
    create_model: Callable[..., Any],
    tx: optax.GradientTransformation,
    seed: int,
    *,
    mesh: Any,
    axes: Axes,
    stage: int,
    precision: Precision,
    overrides: Overrides,
) -> tuple[Callable[[], TrainState], TrainState]:
    """(a function that creates the state, jitted with its shardings; the state as avals with shardings).

    Nothing runs here: the parameters' shapes and the evidence for stacked leaves come from traces.
    """
    held: dict[str, Any] = {}

    def create(key: Array) -> tuple[Tree, Tree]:
        with use_abstract_mesh(mesh.abstract_mesh):  # Linen runs the model, which may constrain activations
            created = models.create(create_model, jax.random.fold_in(key, 0))
        held["model"], params, other, held["annotated"] = models.split(created)
        return cast(params, precision.param_dtype), other

    key = jax.random.key(seed)
    closed, avals = jax.make_jaxpr(create, return_shape=True)(key)
    params_aval, created_tree = avals[0], jax.tree.structure(avals)
    with_paths, tree = jax.tree_util.tree_flatten_with_path(params_aval)
    paths = [placement.path_text(path) for path, _ in with_paths]
    stacked = stacks.stacked_paths(closed, paths) if paths else frozenset()
    leaves = placement.place(params_aval, mesh, axes, overrides, stacked, held["annotated"])
    definition = Definition(tx, held["model"], leaves, tree)

    def initial(key: Array) -> TrainState:
        params, other = jax.tree.unflatten(created_tree, jaxprs.run(closed, key))
        trained = definition.trained(params)
        return TrainState(
            step=jnp.int32(0),
            skipped=jnp.int32(0),
            params=cast(params, precision.compute_dtype),
            master=trained if precision.has_master else None,
            opt_state=tx.init(trained),
            model_state=other,
            key=jax.random.fold_in(key, 1),
            loss_scale=LossScale.create(precision),
            definition=definition,
        )

    shapes = jax.eval_shape(initial, key)
    placed = shardings(shapes, mesh, stage, axes)
    abstract = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, placed)
    return lambda: jax.jit(initial, out_shardings=placed)(key), abstract


def check_optimizer(state: TrainState, precision: Precision) -> None:
    """Raises ValueError if the optimizer state is not one of this model and optimizer."""
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
                f"state: the optimizer state is not of this model and optimizer\n"
                f"  got:      {path}: {got.get(path, 'missing')}\n"
                f"  want:     {wanted.get(path, 'no such leaf')}\n"
                f"  fix:      create it with zero.init, for the same model and optimizer"
            )
