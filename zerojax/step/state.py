"""The training state: what a step reads and writes, sharded from birth."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec, use_abstract_mesh

from zerojax.sharding import placement
from zerojax.sharding.axes import Axes
from zerojax.sharding.placement import Leaf, Overrides
from zerojax.sharding.precision import LossScale, Precision, cast
from zerojax.step import models
from zerojax.step.config import ZeroConfig
from zerojax.transform import jaxprs, stacks
from zerojax.typing import Array, PRNGKey, PyTree


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

    def specs(self, axes: Axes, sharded: bool) -> PyTree:
        """A PartitionSpec for every parameter, where a stage shards what stands for it, or does not."""
        return jax.tree.unflatten(self.tree, [leaf.spec(axes, sharded) for leaf in self.leaves])

    def trained(self, params: PyTree) -> PyTree:
        """The tree with None in place of frozen leaves: what the optimizer sees."""
        leaves = jax.tree.leaves(params)
        return jax.tree.unflatten(
            self.tree, [a if leaf.trainable else None for a, leaf in zip(leaves, self.leaves, strict=True)]
        )

    def with_frozen(self, trained: PyTree, params: PyTree) -> PyTree:
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
    params: PyTree
    master: PyTree
    opt_state: PyTree
    model_state: PyTree
    key: PRNGKey
    loss_scale: LossScale | None
    definition: Definition = dataclasses.field(metadata={"static": True})

    def model(self) -> Any:
        """What the loss function's first argument is: an nnx.Module, Linen variables, or the tree."""
        return self.definition.model.merge(self.params, self.model_state)


def specs(config: ZeroConfig, state: TrainState) -> TrainState:
    """A PartitionSpec for every leaf of a state, by the stage table."""
    each: Any = PartitionSpec()  # takes the place of an array in the tree
    whole = lambda tree: jax.tree.map(lambda _: PartitionSpec(), tree)
    definition, stage, axes = state.definition, config.stage, config.axes
    sharded = stage.shards_optimizer
    trained = definition.trained(definition.specs(axes, sharded))
    shapes = definition.trained(state.params)
    return TrainState(
        step=each,
        skipped=each,
        params=definition.specs(axes, stage.shards_params),
        master=None if state.master is None else trained,
        opt_state=placement.optimizer_specs(definition.tx, state.opt_state, trained, shapes, axes, sharded),
        model_state=whole(state.model_state),
        key=each,
        loss_scale=whole(state.loss_scale),
        definition=definition,
    )


def shardings(config: ZeroConfig, state: TrainState) -> TrainState:
    """Where a stage places a state, wherever its arrays are."""
    return placement.named_shardings(config.mesh, specs(config, state))


def build(
    config: ZeroConfig,
    overrides: Overrides,
    create_model: Callable[..., Any],
    tx: optax.GradientTransformation,
    seed: int | PRNGKey,
) -> tuple[Callable[[], TrainState], TrainState]:
    """(a function that creates the state, jitted with its shardings; the state as avals with shardings).

    Nothing runs here: the parameters' shapes and the evidence for stacked leaves come from traces.
    """
    mesh, precision = config.mesh, config.precision
    held: dict[str, Any] = {}

    def create(key: Array) -> tuple[PyTree, PyTree]:
        with use_abstract_mesh(mesh.abstract_mesh):  # Linen runs the model, which may constrain activations
            created = models.create(create_model, jax.random.fold_in(key, 0))
        held["model"], params, other, held["annotated"] = models.split(created)
        return cast(params, precision.param_dtype), other

    key = _key(seed)
    closed, avals = jax.make_jaxpr(create, return_shape=True)(key)
    params_aval, created_tree = avals[0], jax.tree.structure(avals)
    with_paths, tree = jax.tree_util.tree_flatten_with_path(params_aval)
    paths = [placement.path_text(path) for path, _ in with_paths]
    stacked = stacks.stacked_paths(closed, paths) if paths else frozenset()
    leaves = placement.place(params_aval, mesh, config.axes, overrides, stacked, held["annotated"])
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
    placed = shardings(config, shapes)
    abstract = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, placed)
    return lambda: jax.jit(initial, out_shardings=placed)(key), abstract


def _key(seed: int | PRNGKey) -> PRNGKey:
    """The key of an int, or a key as it is.

    Raises:
        ValueError: neither.
    """
    if isinstance(seed, int | np.integer) and not isinstance(seed, bool):
        return jax.random.key(seed)
    if isinstance(seed, jax.Array) and models.is_key(seed) and seed.ndim == 0:
        return seed
    shape, dtype = getattr(seed, "shape", None), getattr(seed, "dtype", None)
    got = repr(seed) if dtype is None else f"an array of shape {shape} and dtype {dtype}"
    raise ValueError(
        f"init: the seed is neither an int nor a key\n  got:      {got}\n  fix:      seed=0, or seed=jax.random.key(0)"
    )


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
