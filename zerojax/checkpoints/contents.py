"""Converts a training state to the named arrays that a checkpoint contains, and back.

A parameter is written once, in param_dtype: the parameters in compute_dtype are a cast of it. Arrays are written in
their logical shapes, without the zeros that `sharding.padding` adds. A checkpoint therefore depends neither on the
stage, nor on the mesh, nor on the precision of the computation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from zerojax.checkpoints.digest import Digest
from zerojax.sharding import placement
from zerojax.sharding.padding import between
from zerojax.sharding.placement import PINNED_HOST, Leaf, by_path
from zerojax.step import models
from zerojax.step.state import TrainState, logical_avals
from zerojax.utils.typing import Array, Aval, PRNGKey, PyTree, Shape

MAX_PATHS = 4  # that an error lists
PARAMS, OPTIMIZER, MODEL_STATE = "params/", "opt_state/", "model_state/"
EMA = "ema_params"  # the field of the optimizer's state that has the average


def arrays(state: TrainState) -> dict[str, Any]:
    """Returns the arrays of a state by path; of a state of avals, the avals. PRNG keys are replaced by their key data.

    Raises:
        ValueError: if two leaves have the same path.
    """
    found: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(_saved_tree(state)):
        text = placement.path_text(path)
        if text in found:
            raise ValueError(
                f"checkpoint: two leaves have the path {text!r}\n  fix:      use names without '/' in the tree"
            )
        found[text] = _key_data(leaf) if models.is_key(leaf) else leaf
    return found


def compute_params(state: TrainState) -> dict[str, Array]:
    """Returns the trained parameters in the dtypes in which they are computed with, which are not saved, by path."""
    trained = jax.tree_util.tree_leaves_with_path(state.layout.trained(state.params))
    return {f"compute_params/{placement.path_text(path)}": a for path, a in trained}


def logical_shapes(state: TrainState) -> dict[str, Shape]:
    """Returns the shapes of `arrays(state)` without the zeros with which they are stored."""
    return {path: tuple(a.shape) for path, a in arrays(logical_avals(state)).items()}


def saved_params(state: TrainState) -> PyTree:
    """Returns the parameters as a checkpoint has them: trained ones in param_dtype, and no zeros at the ends of arrays.

    Cost: arrays that are stored with zeros are gathered, to cut these off.
    """
    logical = state.logical()
    return _saved_tree(logical)["params"]


def ema_paths(paths: Iterable[str]) -> dict[str, str]:
    """The path of each parameter that `zerojax.ema` averages -> that of its average.

    Raises:
        ValueError: if no average is saved, or several are.
    """
    averages = [path for path in paths if path.startswith(OPTIMIZER) and f"/{EMA}/" in path]
    found = {PARAMS + path.partition(f"/{EMA}/")[2]: path for path in averages}
    if not found or len(found) < len(averages):
        raise ValueError(
            f"checkpoint: there is no single average of the parameters\n"
            f"  got:      {len(averages)} arrays of averages, of {len(found)} parameters\n"
            f"  fix:      train with zerojax.ema(tx, decay), once"
        )
    return found


def with_arrays(state: TrainState, restored: Mapping[str, Array]) -> TrainState:
    """Returns the state with its arrays replaced by the restored ones. Arrays that were not restored stay."""
    before = _saved_tree(state)
    leaves = [
        _as_leaf(leaf, restored[text]) if (text := placement.path_text(path)) in restored else leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(before)
    ]
    tree = jax.tree.unflatten(jax.tree.structure(before), leaves)
    params, layout = tree.pop("params"), state.layout
    if state.master is None:
        return dataclasses.replace(state, params=params, **tree)

    trained, compute_params = layout.trained(params), state.params
    if _has_params(restored):  # frozen ones are not copied
        leaves = [leaf for leaf in layout.leaves if leaf.trainable]
        likes = jax.tree.leaves(layout.trained(state.params))
        values, structure = jax.tree.flatten(trained)
        computed = _computed(values, leaves, likes)
        compute_params = layout.with_frozen(structure.unflatten(computed), params)
    return dataclasses.replace(state, params=compute_params, master=trained, **tree)


def _computed(values: Sequence[Array], leaves: Sequence[Leaf], likes: Sequence[Array]) -> list[Array]:
    """Trained parameters as they are computed with: with or without zeros, like those before.

    Those in host memory come to the devices one after the other.
    """

    def cast(values: list[Array]) -> list[Array]:
        logical = [
            leaf.without_zeros(a).astype(like.dtype) for a, leaf, like in zip(values, leaves, likes, strict=True)
        ]
        return [between(leaf.shape, like.shape).pad(a) for a, leaf, like in zip(logical, leaves, likes, strict=True)]

    if not any(a.sharding.memory_kind == PINNED_HOST for a in values):
        return jax.jit(cast, out_shardings=[like.sharding for like in likes])(list(values))
    shardings: list[Any] = [a.sharding for a in values]
    put = lambda a, s: jax.device_put(placement.in_memory(a), NamedSharding(s.mesh, s.spec))
    on_device = (put(a, s) for a, s in zip(values, shardings, strict=True))
    return [
        _computed([a], [leaf], [like])[0].block_until_ready()
        for a, leaf, like in zip(on_device, leaves, likes, strict=True)
    ]


def continued_counts(avals: Mapping[str, Aval], arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The counts of the optimizer that were not restored, set to the number of updates so far."""
    is_count = lambda path: path.startswith(OPTIMIZER) and path.endswith("/count")
    saved = [int(a) for path, a in arrays.items() if is_count(path)]
    count = max(saved) if saved else int(arrays["step"]) - int(arrays["skipped"])
    fresh = {path: a for path, a in avals.items() if is_count(path) and path not in arrays}
    return {path: jax.device_put(jnp.asarray(count, a.dtype), a.sharding) for path, a in fresh.items()}


def settings(state: TrainState) -> dict[str, np.ndarray]:
    """The values of a state that a program chooses, by path; not those of avals.

    They are the random key, and hyperparameters in the optimizer's state (`optax.inject_hyperparams`).
    """
    is_setting = lambda path, a: path == "key" or ("/hyperparams/" in path and a.ndim == 0)
    return {path: on_host(a) for path, a in arrays(state).items() if not _is_aval(a) and is_setting(path, a)}


def on_host(a: Array) -> np.ndarray:
    """The values of an array that every device holds."""
    return np.asarray(a.addressable_data(0))


def _has_params(paths: Iterable[str]) -> bool:
    return any(path.startswith(PARAMS) for path in paths)


def _saved_tree(state: TrainState) -> dict[str, PyTree]:
    """The part of a state that is saved. The parameters are those in param_dtype."""
    names = ("step", "skipped", "opt_state", "model_state", "key", "loss_scale")
    params = state.params
    if state.master is not None:
        params = state.layout.with_frozen(state.master, params)
    return {name: getattr(state, name) for name in names} | {"params": params}


def _key_data(key: PRNGKey | Aval) -> Array | Aval:
    if isinstance(key, jax.ShapeDtypeStruct):
        data = jax.eval_shape(jax.random.key_data, key)
        return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=key.sharding)
    return jax.random.key_data(key)


def _as_leaf(leaf: Array, restored: Array) -> Array:
    """The restored array as a key if the leaf is one."""
    return jax.random.wrap_key_data(restored, impl=_key_impl(leaf)) if models.is_key(leaf) else restored


def _key_impl(key: PRNGKey | Aval) -> Any:
    """The implementation of a key or of its aval, which JAX only returns for values that are traced."""
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), key)
    return found[0]


def nonfinite_paths(state: TrainState, digest_of: Mapping[str, Digest]) -> list[str]:
    """Returns the paths of arrays that must not be saved: with a NaN, or trained parameters with an infinity.

    The states of the optimizer and of the model may contain an infinity from the start, such as the best loss so far,
    and frozen leaves anything, such as a mask of -inf.
    """
    trained = jax.tree_util.tree_leaves_with_path(state.layout.trained(state.params))
    finite = {PARAMS + placement.path_text(path) for path, _ in trained}
    is_bad = lambda path, d: d.has_nan or d.has_inf if path in finite else d.has_nan and not path.startswith(PARAMS)
    return [path for path, d in digest_of.items() if is_bad(path, d)]


def avals(state: TrainState) -> TrainState:
    """Returns the state with arrays replaced by their shapes, dtypes and shardings."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state)


def state_path(state: TrainState, path: str) -> str:
    """The path in a state of what is saved under a path: that of the master copy, if the parameter has one."""
    name = path.removeprefix(PARAMS)
    is_master = path != name and state.master is not None and name in by_path(state.master)
    return f"master/{name}" if is_master else path


def free(state: TrainState, paths: Iterable[str]) -> None:
    """Deletes the arrays at these paths from the devices. Avals are ignored.

    Raises:
        ValueError: if a leaf at any other path is an aval.
    """
    selected = set(paths)
    saved = [(placement.path_text(p), leaf) for p, leaf in jax.tree_util.tree_leaves_with_path(_saved_tree(state))]
    if missing := [path for path, leaf in saved if path not in selected and _is_aval(leaf)]:
        raise ValueError(
            f"checkpoint: {missing[0]!r} is not restored, and the state contains only its aval\n"
            f"  fix:      restore into a state from zero.init"
        )
    leaves = [leaf for path, leaf in saved if path in selected]
    if _has_params(selected) and state.master is not None:
        kept = {id(leaf) for path, leaf in saved if path not in selected}  # frozen leaves are in both trees
        leaves += [leaf for leaf in jax.tree.leaves(state.params) if id(leaf) not in kept]
    for leaf in leaves:
        if not _is_aval(leaf) and not leaf.is_deleted():
            leaf.delete()


def _is_aval(leaf: Array | Aval) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def shortened(paths: Sequence[str]) -> str:
    """The first paths of a list, as errors show it."""
    return ", ".join(paths[:MAX_PATHS]) + (" and others" if len(paths) > MAX_PATHS else "")
