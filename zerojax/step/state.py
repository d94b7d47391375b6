"""The training state, which is sharded when it is created: its leaves, their shardings and its initialization."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec, use_abstract_mesh

from zerojax.sharding import placement
from zerojax.sharding.axes import Axes
from zerojax.sharding.placement import Leaf, Overrides
from zerojax.sharding.precision import LossScale, Precision
from zerojax.step import models
from zerojax.step.config import ZeroConfig
from zerojax.transform import jaxprs, stacks
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


_LARGE = 2**20  # parameters; below, a large unit is no problem


def build(
    config: ZeroConfig,
    overrides: Overrides,
    create_model: Callable[..., Any],
    tx: optax.GradientTransformation,
    seed: int | PRNGKey,
) -> tuple[Callable[[], TrainState], TrainState]:
    """Returns (a function that creates the state with its shardings, the state as avals with shardings).

    Nothing runs here: shapes and stacked leaves are found by tracing `create_model`.
    """
    mesh, precision = config.mesh, config.precision
    static: dict[str, Any] = {}

    def create(key: PRNGKey) -> tuple[PyTree, PyTree]:
        with use_abstract_mesh(mesh.abstract_mesh):  # Linen runs the model, which may constrain activations
            created = models.create(create_model, jax.random.fold_in(key, 0))
        static["model"], params, model_state, from_model = models.split(created, overrides.trainable)
        static["from_model"] = from_model
        return params, model_state

    key = _key(seed)
    closed, created = jax.make_jaxpr(create, return_shape=True)(key)
    params_aval, created_tree = created[0], jax.tree.structure(created)
    with_paths, tree = jax.tree_util.tree_flatten_with_path(params_aval)
    paths = [placement.path_text(path) for path, _ in with_paths]
    stacked = stacks.stacked_paths(closed, paths) if paths else frozenset()
    from_model = static["from_model"]._replace(stacked=stacked)
    leaves = placement.place(params_aval, mesh, config.axes, precision, overrides, from_model)
    definition = Definition(tx, static["model"], leaves, tree, _fixed_state(created[1], leaves, overrides.frozen))
    large_unit = placement.large_unit_text(leaves)
    if large_unit and config.stage.shards_params and sum(leaf.size for leaf in leaves) >= _LARGE:
        warnings.warn(large_unit, stacklevel=4)

    def initial(key: PRNGKey) -> TrainState:
        params, model_state = jax.tree.unflatten(created_tree, jaxprs.run(closed, key))
        initial = jax.tree.unflatten(
            tree, [a.astype(x.dtype) for a, x in zip(jax.tree.leaves(params), leaves, strict=True)]
        )
        trained = definition.trained(initial)
        computed = jax.tree.unflatten(tree, definition.for_compute(jax.tree.leaves(initial)))
        return TrainState(
            step=jnp.int32(0),
            skipped=jnp.int32(0),
            params=definition.with_frozen(definition.trained(computed), initial),
            master=trained if definition.has_master else None,
            opt_state=tx.init(trained),
            model_state=model_state,
            key=jax.random.fold_in(key, 1),
            loss_scale=LossScale.create(precision),
            definition=definition,
        )

    avals = jax.eval_shape(initial, key)
    placed = shardings(config, avals)
    abstract = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), avals, placed)
    return lambda: jax.jit(initial, out_shardings=placed)(key), abstract


def _fixed_state(model_state: PyTree, leaves: Sequence[Leaf], frozen: Sequence[str]) -> tuple[bool, ...]:
    """Whether each leaf of the model state belongs to a frozen module: running statistics that must not move.

    A pattern of `frozen` matches its path, with or without the name of a Linen collection in front; or the parameters
    beside it are all frozen, and it has some.
    """
    beside: dict[str, list[bool]] = {}
    for leaf in leaves:
        beside.setdefault(leaf.path.rpartition("/")[0], []).append(leaf.trainable)

    def is_fixed(path: str) -> bool:
        paths = (path,) if isinstance(model_state, nnx.State) else (path, path.partition("/")[2])
        matches = any(fnmatchcase(each, pattern) for each in paths for pattern in frozen)
        parameters = [flag for each in paths for flag in beside.get(each.rpartition("/")[0], [])]
        return matches or (bool(parameters) and not any(parameters))

    is_variable = lambda node: isinstance(node, nnx.Variable)
    with_paths = jax.tree_util.tree_leaves_with_path(model_state, is_leaf=is_variable)
    flags = [[is_fixed(placement.path_text(path))] * len(jax.tree.leaves(node)) for path, node in with_paths]
    return tuple(itertools.chain.from_iterable(flags))


def _key(seed: int | PRNGKey) -> PRNGKey:
    """The PRNG key of an integer seed; a PRNG key is returned unchanged.

    Raises:
        ValueError: if `seed` is neither.
    """
    if isinstance(seed, int | np.integer) and not isinstance(seed, bool):
        return jax.random.key(seed)
    if isinstance(seed, jax.Array) and models.is_key(seed) and seed.ndim == 0:
        return seed
    shape, dtype = getattr(seed, "shape", None), getattr(seed, "dtype", None)
    got = repr(seed) if dtype is None else f"an array of shape {shape} and dtype {dtype}"
    raise ValueError(
        f"init: the seed is neither an int nor a key\n"
        f"  got:      {got}\n"
        f"  fix:      pass seed=0 or seed=jax.random.key(0)"
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
