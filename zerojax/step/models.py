"""Models as they are: Flax NNX modules, Linen variables and plain trees, seen as (parameters, other state, loss).

Nothing is asked of a model. What the adapters take from Flax is its own: `nnx.split` and `nnx.merge`, the collections
of a Linen module, and the sharding metadata of both.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn, nnx
from flax.linen import spmd
from jax.sharding import PartitionSpec

from zerojax.sharding.placement import check_arrays, path_text

Array = Any


class Weighted(NamedTuple):
    """A sum and its weight, for a loss or a metric whose mean is not the mean of the shards' means.

    The reported value is (sum of sums) / (sum of weights), over all shards and microbatches. The weight is taken as a
    constant: no gradient flows through it.

    Attributes:
        sum: scalar, floating.
        weight: scalar, at least 0.
    """

    sum: Array
    weight: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Output:
    """What a loss returned, in one form. `is_weighted` says whether the loss came with a weight of its own."""

    loss: Weighted
    metrics: dict[str, Weighted]
    state: Any
    is_weighted: bool = dataclasses.field(metadata={"static": True})

    def sums(self) -> tuple[Weighted, dict[str, Weighted]]:
        """(loss, metrics) in fp32, ready to be added up over shards and microbatches."""
        return jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), (self.loss, self.metrics))


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """How to build what the loss function gets, from parameters and other state.

    Attributes:
        merge: `merge(params, other) -> ` the loss function's first argument.
        other_after: `other_after(merged, aux) -> (other state, metrics)` once the loss has run.
    """

    merge: Callable[[Any, Any], Any]
    other_after: Callable[[Any, dict[str, Any], Any], tuple[Any, dict[str, Any]]]


def _nnx_model(module: nnx.Module) -> tuple[Model, Any, Any, Any]:
    graph, params, other = nnx.split(module, nnx.Param, ...)
    tree = jax.tree.structure(params)
    pure = nnx.to_pure_dict(params)
    if jax.tree.structure(jax.tree.leaves(pure)).num_leaves != tree.num_leaves:
        raise ValueError("init: an nnx.Param of the module holds something that is no array")

    def merge(params: Any, other: Any) -> nnx.Module:
        return nnx.merge(graph, jax.tree.unflatten(tree, jax.tree.leaves(params)), other, copy=True)

    def other_after(merged: nnx.Module, aux: dict[str, Any], before: Any) -> tuple[Any, dict[str, Any]]:
        nnx.pop(merged, nnx.Intermediate)
        after = nnx.split(merged, nnx.Param, ...)[2]
        if jax.tree.structure(after) != jax.tree.structure(before):
            raise ValueError(
                "loss: adds or removes variables of the module\n"
                f"  got:      {set(map(path_text, _paths(after))) ^ set(map(path_text, _paths(before)))}\n"
                "  fix:      create all variables when the module is created"
            )
        return after, aux

    return Model(merge, other_after), pure, other, nnx.to_pure_dict(nnx.get_partition_spec(params))


def _tree_model(tree: Any) -> tuple[Model, Any, Any, Any]:
    if isinstance(tree, Mapping) and "params" in tree:
        other = {name: value for name, value in tree.items() if name != "params"}
        merge = lambda params, other: {"params": params, **other}
        params = tree["params"]
    else:
        other, merge, params = {}, lambda params, other: params, tree

    def other_after(merged: Any, aux: dict[str, Any], before: Any) -> tuple[Any, dict[str, Any]]:
        return {name: aux.get(name, before[name]) for name in before}, {k: v for k, v in aux.items() if k not in before}

    is_box = lambda leaf: isinstance(leaf, nn.meta.AxisMetadata)
    specs = jax.tree.map(_box_spec, params, is_leaf=is_box)
    return Model(merge, other_after), nn.meta.unbox(params), other, specs


def _box_spec(leaf: Any) -> PartitionSpec:
    """What the box around a Linen parameter says; names that no rule turns into an axis stand for None, as in Flax."""
    if isinstance(leaf, nn.LogicallyPartitioned):
        return spmd.logical_to_mesh_axes(leaf.names, leaf.rules) or PartitionSpec()
    return leaf.get_partition_spec() if isinstance(leaf, nn.Partitioned) else PartitionSpec()


def _paths(tree: Any) -> list[Any]:
    return [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def split(created: Any) -> tuple[Model, Any, Any, dict[str, PartitionSpec]]:
    """(model, parameter tree, other state, annotations by path) of what a user's `create_model` returned.

    Raises:
        ValueError: a parameter that is no array.
    """
    model, params, other, specs = _nnx_model(created) if isinstance(created, nnx.Module) else _tree_model(created)
    check_arrays(params)
    return model, params, other, {path_text(path): spec for path, spec in jax.tree_util.tree_leaves_with_path(specs)}


def create(create_model: Callable[..., Any], key: Array) -> Any:
    """Calls `create_model` with what it takes: `rngs=nnx.Rngs(key)` if it names `rngs`, else the key, else nothing.

    Annotations are read and not acted upon: without a mesh around it, Flax would refuse to.
    """
    called = create_model.__init__ if isinstance(create_model, type) else create_model  # nnx hides a class's signature
    parameters = {name: p for name, p in inspect.signature(called).parameters.items() if name != "self"}
    required = [
        p for p in parameters.values() if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    with nnx.use_eager_sharding(False):
        if "rngs" in parameters:
            return create_model(rngs=nnx.Rngs(key))
        return create_model(key) if required else create_model()


def normalize(result: Any) -> tuple[Weighted, dict[str, Any], bool]:
    """(loss, aux, whether the loss is weighted) of what a loss function returned.

    Raises:
        ValueError: no scalar, no floating dtype, or aux that is no dict.
    """
    loss, aux = result, {}
    if isinstance(result, tuple) and not isinstance(result, Weighted):
        if len(result) != 2:
            raise ValueError(f"loss: returns {len(result)} values\n  fix:      return loss, or (loss, dict of metrics)")
        loss, aux = result
    if not isinstance(aux, Mapping):
        raise ValueError(f"loss: returns {type(aux).__name__} beside the loss\n  fix:      a dict of scalar metrics")
    weighted = isinstance(loss, Weighted)
    return _as_weighted("the loss", loss), dict(aux), weighted


def _as_weighted(what: str, value: Any) -> Weighted:
    pair = value if isinstance(value, Weighted) else Weighted(value, 1.0)
    for part in pair:
        shape, dtype = jnp.shape(part), jnp.result_type(part)
        if shape != () or not (jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)):
            raise ValueError(
                f"loss: {what} is no scalar\n"
                f"  got:      shape {shape}, dtype {dtype}\n"
                f"  fix:      reduce it, for example with jnp.mean, or return zerojax.Weighted(sum, weight)"
            )
    if what == "the loss" and not jnp.issubdtype(jnp.result_type(pair.sum), jnp.floating):
        raise ValueError(
            f"loss: dtype {jnp.result_type(pair.sum)} cannot be differentiated\n  fix:      a floating dtype"
        )
    return pair


def call_loss(loss_fn: Callable[..., Any], model: Model, params: Any, other: Any, batch: Any, key: Array) -> Output:
    """Runs a user's `loss_fn(model, batch)` or `loss_fn(model, batch, key)`."""
    merged = model.merge(params, other)
    args = (merged, batch, key) if takes_key(loss_fn) else (merged, batch)
    loss, aux, weighted = normalize(loss_fn(*args))
    after, metrics = model.other_after(merged, aux, other)
    return Output(loss, {name: _as_weighted(f"metric {name!r}", v) for name, v in metrics.items()}, after, weighted)


def takes_key(loss_fn: Callable[..., Any]) -> bool:
    """Whether a loss function takes a third argument without a default, or one named key or rng."""
    parameters = [
        p
        for p in inspect.signature(loss_fn).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return len(parameters) > 2 and (
        parameters[2].default is inspect.Parameter.empty or parameters[2].name in ("key", "rng")
    )


def is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def fold_keys(tree: Any, data: Array) -> Any:
    """Every PRNG key in a tree, folded with an integer, so that shards and microbatches draw different numbers."""

    def fold(leaf: Any) -> Any:
        if not is_key(leaf):
            return leaf
        return jax.vmap(jax.random.fold_in, in_axes=(0, None))(leaf.reshape(-1), data).reshape(leaf.shape)

    return jax.tree.map(fold, tree)


def restore_keys(after: Any, before: Any) -> Any:
    """`after`, with the PRNG keys that `before` has."""
    return jax.tree.map(lambda a, b: b if is_key(b) else a, after, before)
