"""Adapters for models: Flax NNX modules, Linen variables and plain trees, as parameters and model state.

Models need no changes. The adapters use what Flax provides: `nnx.split` and `nnx.merge`, the collections of a Linen
module, and the sharding metadata of both.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn, nnx
from flax.linen import spmd
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jax import lax
from jax.sharding import PartitionSpec

from zerojax.sharding.placement import FromModel, Leaf, by_path, check_leaves
from zerojax.sharding.units import check_patterns
from zerojax.utils.text import abbreviate
from zerojax.utils.typing import Array, ArrayLike, PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """Converts between the loss function's first argument and (parameters, model state)."""

    merge: Callable[[PyTree, PyTree], PyTree]  # `merge(params, model_state)` returns the loss function's first argument
    # `state_after(merged, aux, model_state)` returns (the new model state, the metrics) after the loss has run. `aux`
    # is the dict that the loss returned, `model_state` the state before it.
    state_after: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]


class SplitModel(NamedTuple):
    """A model in parts, and what it says about its parameters."""

    model: Model
    params: PyTree
    model_state: PyTree
    from_model: FromModel


def split(created: PyTree, trainable: Any = None) -> SplitModel:
    """Splits a model that was created: an nnx.Module, Linen variables or a tree of parameters."""
    if isinstance(created, nn.Module):
        raise ValueError(
            f"init: the function returns a Linen module, which has no parameters\n"
            f"  got:      {type(created).__name__}\n"
            f"  fix:      zero.init(module, tx, inputs=(x,)), or return module.init(key, x)"
        )
    if isinstance(created, nnx.Module):
        model, params, model_state, specs, variables = _split_nnx(created)
    else:
        (model, params, model_state, specs), variables = _split_tree(created), None
    model_state = jax.tree.map(lambda a: jnp.asarray(a) if isinstance(a, int | float | complex) else a, model_state)
    for part in params, model_state:
        check_leaves(part)
        check_not_overwritten(part)
    trained = trained_paths(trainable, params, variables)
    return SplitModel(model, params, model_state, FromModel(annotations=by_path(specs), trained=trained))


def _split_nnx(module: nnx.Module) -> tuple[Model, PyTree, PyTree, PyTree, list[nnx.Variable]]:
    """(The model, the parameters, the model state, the specs and the variables of the parameters)."""
    # Split.
    graph, params, model_state = nnx.split(module, nnx.Param, ...)
    tree, created = jax.tree.structure(params), jax.tree.structure(model_state)
    state_paths = by_path(model_state).keys()
    pure = nnx.to_pure_dict(params)
    if len(jax.tree.leaves(pure)) != tree.num_leaves:
        raise ValueError("init: an nnx.Param is not an array\n  fix:      store exactly one array in each nnx.Param")

    def differing(other: PyTree) -> str:
        return abbreviate(sorted(state_paths ^ by_path(other).keys()), separator=", ")

    # Merge.
    def merge(params: PyTree, model_state: PyTree) -> nnx.Module:
        if jax.tree.structure(model_state) != created:
            raise ValueError(
                f"state: its model_state has other variables than the module\n"
                f"  got:      {differing(model_state)}\n"
                f"  fix:      keep the tree of state.model_state; copy.deepcopy(state) copies a whole state; of an\n"
                f"            nnx.State alone, it makes a tree without variables: use jax.tree.map(jnp.copy, ...)"
            )
        return nnx.merge(graph, jax.tree.unflatten(tree, jax.tree.leaves(params)), model_state, copy=True)

    def state_after(merged: nnx.Module, aux: PyTree, before: PyTree) -> tuple[PyTree, PyTree]:
        nnx.pop(merged, nnx.Intermediate)
        after = nnx.split(merged, nnx.Param, ...)[2]
        if jax.tree.structure(after) != created:
            raise ValueError(
                "loss: adds or removes variables of the module\n"
                f"  got:      {differing(after)}\n"
                "  fix:      create all variables when the module is created"
            )
        return after, aux

    # Read the metadata.
    specs = nnx.to_pure_dict(nnx.get_partition_spec(params))
    variables = jax.tree.leaves(params, is_leaf=_is_variable)
    return Model(merge, state_after), pure, model_state, specs, variables


def _split_tree(tree: PyTree) -> tuple[Model, PyTree, PyTree, PyTree]:
    """(The model, the parameters, the model state, the specs of the parameters)."""
    if isinstance(tree, Mapping) and "params" in tree:
        model_state = {name: value for name, value in tree.items() if name != "params"}
        merge = lambda params, model_state: {"params": params, **model_state}
        params = tree["params"]
    else:
        model_state, merge, params = {}, lambda params, model_state: params, tree

    def state_after(merged: PyTree, aux: PyTree, before: PyTree) -> tuple[PyTree, PyTree]:
        return {name: aux.get(name, before[name]) for name in before}, {k: v for k, v in aux.items() if k not in before}

    has_metadata = lambda leaf: isinstance(leaf, nn.meta.AxisMetadata)
    specs = jax.tree.map(_metadata_spec, params, is_leaf=has_metadata)
    return Model(merge, state_after), nn.meta.unbox(params), model_state, specs


def _metadata_spec(leaf: object) -> PartitionSpec:
    """The spec in the metadata of a Linen parameter. As in Flax, logical names without a rule stand for None."""
    if isinstance(leaf, nn.LogicallyPartitioned):
        return spmd.logical_to_mesh_axes(leaf.names, leaf.rules) or PartitionSpec()
    return leaf.get_partition_spec() if isinstance(leaf, nn.Partitioned) else PartitionSpec()


def check_not_overwritten(tree: PyTree) -> None:
    """Raises ValueError if a step has to overwrite a variable with its gradient, as those of Flax's fp8 layers.

    The gradient of such a variable is its new value, a largest value over rows. It is no term of a sum over devices.
    """
    nodes = by_path(tree, is_leaf=_is_variable).items()
    if found := [p for p, node in nodes if OVERWRITE_WITH_GRADIENT in (type(node).__name__, *p.split("/"))]:
        raise ValueError(
            f"init: the collection {OVERWRITE_WITH_GRADIENT!r}, which Flax's fp8 layers have, is not supported\n"
            f"  got:      {abbreviate(found, 2, ', ')}, whose gradients are new values\n"
            f"  fix:      leave out the dot_general_cls of these layers, or train in fp8 with qwix.quantize_model"
        )


def trained_paths(
    trainable: Any, params: PyTree, variables: Sequence[nnx.Variable] | None = None
) -> frozenset[str] | None:
    """The paths of the parameters that the option `trainable` of `Zero` selects; None if it is None.

    Args:
        trainable: globs on paths, a predicate of (path, array), or an nnx filter.
        params: the tree of parameters.
        variables: the variables of an nnx.Module, in the order of the leaves of `params`; filters need them.
    """
    if trainable is None:
        return None

    # Select by globs, a predicate or a filter.
    arrays = by_path(params)
    patterns = [trainable] if isinstance(trainable, str) else trainable
    if isinstance(patterns, list | tuple) and all(isinstance(pattern, str) for pattern in patterns):
        check_patterns("trainable", patterns, list(arrays))
        found = [path for path in arrays if any(fnmatchcase(path, pattern) for pattern in patterns)]
    elif inspect.isfunction(trainable) or inspect.ismethod(trainable):
        found = [path for path, a in arrays.items() if trainable(path, a)]
    elif variables is None:
        raise ValueError(
            f"trainable: an nnx filter selects variables of an nnx.Module, and the model is a tree of arrays\n"
            f"  got:      {trainable!r}\n"
            f"  fix:      pass globs, or a function of (path, array)"
        )
    else:
        matches = nnx.filterlib.to_predicate(trainable)
        keys = [
            tuple(getattr(key, "key", key) for key in path) for path, _ in jax.tree_util.tree_leaves_with_path(params)
        ]
        found = [path for path, key, variable in zip(arrays, keys, variables, strict=True) if matches(key, variable)]

    # Check that there are some.
    if not found:
        raise ValueError(
            f"trainable: selects no parameter\n"
            f"  got:      {trainable!r}, paths {abbreviate(list(arrays), separator=', ')}\n"
            f"  fix:      select at least one, or leave it out to train all"
        )
    return frozenset(found)


def without_variables(params: PyTree) -> PyTree:
    """A tree of parameters with arrays in place of nnx variables, as in `nnx.pure`."""
    array = lambda node: jax.tree.leaves(node)[0] if _is_variable(node) else node
    has_one = lambda node: _is_variable(node) and len(jax.tree.leaves(node)) == 1
    return jax.tree.map(array, params, is_leaf=has_one)


def fixed_state(model_state: PyTree, leaves: Sequence[Leaf], frozen: Sequence[str]) -> tuple[bool, ...]:
    """Whether each leaf of the model state stays: floating leaves of frozen modules, which are running statistics, and
    plain arrays. Counts and keys of random numbers change.

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

    found: list[bool] = []
    for path, node in by_path(model_state, is_leaf=_is_variable).items():
        is_constant = isinstance(model_state, nnx.State) and not _is_variable(node)
        is_floating = [bool(jnp.issubdtype(a.dtype, jnp.floating)) for a in jax.tree.leaves(node)]
        found += [is_constant or (flag and is_fixed(path)) for flag in is_floating]
    return tuple(found)


def _is_variable(node: object) -> bool:
    return isinstance(node, nnx.Variable)


def is_key(leaf: Any) -> bool:
    """Whether an array is a typed PRNG key."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def strongly_typed(leaf: ArrayLike) -> Array:
    """An array whose dtype is no longer that of a Python number, which a step would change: it would compile twice."""
    a = jnp.asarray(leaf)
    return a if is_key(a) else lax.convert_element_type(a, a.dtype)
