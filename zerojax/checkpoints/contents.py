"""What of a training state is written: arrays by their paths; and the state that is made of them again.

A parameter is written once, in param_dtype: the parameters in compute_dtype are a cast of it. So what is on disk does
not depend on the stage, the mesh or the precision of compute.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from zerojax.sharding import placement
from zerojax.step import models
from zerojax.step.state import TrainState

Array = Any
Tree = Any
PARAMS, OPTIMIZER = "params/", "opt_state/"


def arrays(state: TrainState) -> dict[str, Array]:
    """What is written of a state, or of its avals: {path: array}. PRNG keys are their words.

    Raises:
        ValueError: two leaves whose paths are written alike.
    """
    found: dict[str, Array] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(_tree(state)):
        text = placement.path_text(path)
        if text in found:
            raise ValueError(f"checkpoint: two leaves are called {text!r}\n  fix:      no '/' in the names of a tree")
        found[text] = _words(leaf) if models.is_key(leaf) else leaf
    return found


def with_arrays(state: TrainState, read: Mapping[str, Array]) -> TrainState:
    """A state with the arrays that were read in the place of its own; those that were not read stay."""
    before = _tree(state)
    leaves = [
        _again(leaf, read[text]) if (text := placement.path_text(path)) in read else leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(before)
    ]
    tree = jax.tree.unflatten(jax.tree.structure(before), leaves)
    params, definition = tree.pop("params"), state.definition
    if state.master is None:
        return dataclasses.replace(state, params=params, **tree)
    narrow = lambda params: jax.tree.map(lambda a, like: a.astype(like.dtype), params, state.params)
    placed = jax.tree.map(lambda a: a.sharding, state.params)
    computed = jax.jit(narrow, out_shardings=placed)(params) if _changed(read) else state.params
    return dataclasses.replace(state, params=computed, master=definition.trained(params), **tree)


def _changed(read: Mapping[str, Array]) -> bool:
    return any(path.startswith(PARAMS) for path in read)


def _tree(state: TrainState) -> dict[str, Tree]:
    names = ("step", "skipped", "opt_state", "model_state", "key", "loss_scale")
    params = state.params
    if state.master is not None:
        params = state.definition.with_frozen(state.master, params)
    return {name: getattr(state, name) for name in names} | {"params": params}


def _words(key: Array) -> Array:
    if _is_aval(key):
        words = jax.eval_shape(jax.random.key_data, key)
        return jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=key.sharding)
    return jax.random.key_data(key)


def _again(leaf: Array, read: Array) -> Array:
    return jax.random.wrap_key_data(read, impl=_impl(leaf)) if models.is_key(leaf) else read


def _impl(key: Array) -> Any:
    """Of a key, or of its aval, which JAX tells only where it traces."""
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), key)
    return found[0]


def bad_values(found: Mapping[str, Any]) -> list[str]:
    """Paths of what no run should go on from, by their digests: a NaN anywhere, an infinity in a parameter.

    The optimizer and the model may hold an infinity from the start: the best loss so far, for one.
    """
    return [path for path, d in found.items() if d.has_nan or (d.has_inf and path.startswith(PARAMS))]


def avals(state: TrainState) -> TrainState:
    """Shapes, dtypes and shardings in the place of the arrays."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state)


def free(state: TrainState, paths: Iterable[str]) -> None:
    """Deletes the arrays of a state at these paths from the devices. Of avals there is nothing to delete.

    Raises:
        ValueError: a state of avals of which something is not among the paths.
    """
    told = set(paths)
    leaves = jax.tree_util.tree_leaves_with_path(_tree(state))
    if kept := [text for path, leaf in leaves if (text := placement.path_text(path)) not in told and _is_aval(leaf)]:
        raise ValueError(
            f"checkpoint: {kept[0]!r} is not read, and the state has only its aval\n"
            f"  fix:      restore into the state of zero.init"
        )
    gone = [leaf for path, leaf in leaves if placement.path_text(path) in told]
    if any(path.startswith(PARAMS) for path in told) and state.master is not None:
        gone += jax.tree.leaves(state.params)
    for leaf in gone:
        if not _is_aval(leaf) and not leaf.is_deleted():
            leaf.delete()


def _is_aval(leaf: Array) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)
