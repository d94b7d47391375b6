"""Trains the job of an example on one device with `jax.jit`, Flax and Optax alone, to compare the results.

The batch is computed in as many parts as there are devices to compare with. In `jax.vmap` with an axis named 'data',
collectives over that axis work as they do on a mesh, and each part draws the random numbers of its device.
"""

from __future__ import annotations

import fnmatch
import functools
import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from common import Job
from flax import nnx

import zerojax


class Run(NamedTuple):
    losses: list[float]
    test: dict[str, float]


class Split(NamedTuple):
    """A model as (trained, frozen parameters, other variables), and what puts them together again."""

    trained: dict[str, jax.Array]
    frozen: dict[str, jax.Array]
    other: Any
    merge: Any  # (trained, frozen, other) -> the first argument of a loss
    other_of: Any  # (that argument, the collections that the loss returned) -> the other variables


def named(tree: Any) -> tuple[dict[str, jax.Array], Any]:
    leaves, structure = jax.tree.flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}, structure


def created(model: Any, key: jax.Array) -> Any:
    """A model of one of the kinds that examples have: a tree, a function of a key, or a function or class of rngs."""
    if not callable(model):
        return model
    is_class = isinstance(getattr(model, "func", model), type)
    takes_rngs = is_class or "rngs" in inspect.signature(model).parameters
    return model(rngs=nnx.Rngs(key)) if takes_rngs else model(key)


def split(job: Job, key: jax.Array) -> Split:
    """Creates a model as `zero.init` does with the key. Nothing of it is on more than one device."""
    graph: list[Any] = []

    def values(key: jax.Array) -> tuple[Any, Any]:
        made = created(job.model, key)
        if isinstance(made, nnx.Module):
            layout, params, other = nnx.split(made, nnx.Param, ...)
            graph.append((layout, jax.tree.structure(params)))
            return nnx.to_pure_dict(params), other
        return made["params"], {name: value for name, value in made.items() if name != "params"}

    params, other = jax.jit(values)(key)
    leaves, structure = named(params)
    frozen_globs = job.zero_options.get("frozen", ())
    is_frozen = {name: any(fnmatch.fnmatchcase(name, glob) for glob in frozen_globs) for name in leaves}
    trained = {name: leaf for name, leaf in leaves.items() if not is_frozen[name]}
    frozen = {name: leaf for name, leaf in leaves.items() if is_frozen[name]}

    def merge(trained: Any, frozen: Any, other: Any) -> Any:
        values = [(frozen | trained)[name] for name in leaves]
        if not graph:
            return {"params": structure.unflatten(values), **other}
        return nnx.merge(graph[0][0], graph[0][1].unflatten(values), other, copy=True)

    def other_of(model: Any, returned: dict[str, Any]) -> Any:
        if not graph:
            return {name: returned.get(name, value) for name, value in other.items()}
        return nnx.split(model, nnx.Param, ...)[2]

    return Split(trained, frozen, other, merge, other_of)


def weighted(value: Any) -> zerojax.Weighted:
    return value if isinstance(value, zerojax.Weighted) else zerojax.Weighted(value, 1.0)


def mean(value: zerojax.Weighted) -> jax.Array:
    """The mean over the parts; the sum of values whose weights are 0."""
    weight = jnp.sum(jnp.asarray(value.weight, jnp.float32))
    return jnp.sum(value.sum) / jnp.where(weight > 0, weight, 1.0)


def in_parts(batch: Any, parts: int) -> tuple[Any, Any]:
    """(the batch with rows [parts, rows, ...], the axes of `vmap`)."""
    is_whole = lambda a: isinstance(a, zerojax.Whole)
    cut = lambda a: a.value if is_whole(a) else a.reshape(parts, len(a) // parts, *a.shape[1:])
    axes = jax.tree.map(lambda a: None if is_whole(a) else 0, batch, is_leaf=is_whole)
    return jax.tree.map(cut, batch, is_leaf=is_whole), axes


def run(job: Job, num_steps: int, parts: int = 8) -> Run:
    """The losses of the first steps, and the metrics of the test set after them."""
    root = jax.random.key(0)
    model = split(job, root)
    clip_norm = job.step_options.get("clip_norm")
    tx = job.optimizer if clip_norm is None else optax.chain(optax.clip_by_global_norm(clip_norm), job.optimizer)
    takes_key = len(inspect.signature(job.loss_fn).parameters) > 2

    def loss(trained: Any, other: Any, batch: Any, axes: Any, key: jax.Array) -> tuple[jax.Array, Any]:
        def part(batch: Any, index: jax.Array) -> Any:
            merged = model.merge(trained, model.frozen, other)
            keys = (jax.random.fold_in(jax.random.fold_in(key, index), 0),) if takes_key else ()
            result = job.loss_fn(merged, batch, *keys)
            value, returned = result if type(result) is tuple else (result, {})
            return weighted(value), model.other_of(merged, returned)

        values, after = jax.vmap(part, in_axes=(axes, 0), axis_name="data")(batch, jnp.arange(parts))
        return mean(values), jax.tree.map(lambda a: a[0], after)

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(trained: Any, other: Any, opt_state: Any, batch: Any, key: jax.Array) -> Any:
        (value, other), grads = jax.value_and_grad(loss, has_aux=True)(trained, other, batch, axes, key)
        updates, opt_state = tx.update(grads, opt_state, trained)
        return optax.apply_updates(trained, updates), other, opt_state, value

    trained, other, opt_state, losses = model.trained, model.other, tx.init(model.trained), []
    for i in range(num_steps):
        batch, axes = in_parts(job.batch(i), parts)
        key = jax.random.fold_in(jax.random.fold_in(root, 2**32 - 1), i)
        trained, other, opt_state, value = step(trained, other, opt_state, batch, key)
        losses.append(float(value))
    if job.test_loss_fn is None:
        return Run(losses, {})

    @jax.jit
    def test(batch: Any) -> dict[str, jax.Array]:
        result = job.test_loss_fn(model.merge(trained, model.frozen, other), batch)
        value, metrics = result if type(result) is tuple else (result, {})
        return {name: mean(weighted(metric)) for name, metric in {"loss": value, **metrics}.items()}

    return Run(losses, {name: float(value) for name, value in test(job.test).items()})
