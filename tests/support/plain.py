"""The reference for parity tests: an ordinary training step on one device, with JAX, Flax and Optax alone.

It shares no code with `zerojax`, only the conventions: the rows of each microbatch, the key from which the parameters
are created, and the dtype of each computation.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "bf16_reduce_fp32": jnp.bfloat16, "fp16": jnp.float16}
FP16_SCALE = 2.0**13  # the preset's 2^15 overflows with a gradient of 2, which occurs in the zoo


@dataclasses.dataclass
class Trajectory:
    """The results of a training run: lists over steps, and lists of numpy leaves in flattening order."""

    losses: np.ndarray
    metrics: list[dict[str, float]]
    start: list[np.ndarray]
    end: list[np.ndarray]
    state: list[np.ndarray]  # other state of the model (running statistics), without PRNG keys


def numbers(tree: Any) -> list[np.ndarray]:
    """The leaves of a tree on the host, without PRNG keys."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)]
    return [np.asarray(leaf) for leaf in jax.device_get(leaves)]


def cast(tree: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda a: a.astype(dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a, tree)


@functools.cache
def created(create: Callable[..., Any], seed: int, abstract: bool = False) -> tuple[list[Any], Any]:
    """Creates a zoo model, once per process, because compiling the creation takes as long as compiling a step.

    Returns:
        ([graph layout], (parameters, other state)) of an nnx module; ([], tree) of any other model.
    """
    graph: list[Any] = []

    def values(key):
        made = create(nnx.Rngs(key) if create.__code__.co_varnames[0] == "rngs" else key)
        if not isinstance(made, nnx.Module):
            return made
        parts = nnx.split(made, nnx.Param, ...)
        graph[:] = parts[:1]
        return parts[1:]

    key = jax.random.key(seed)
    made = jax.eval_shape(values, key) if abstract else jax.jit(values)(key)
    return graph, made


def functional(model: Any, seed: int = 0, abstract: bool = False) -> tuple[Any, Any, Callable[..., Any]]:
    """(parameters, other state, loss) of a zoo model.

    The loss is `loss(params, other, batch) -> (sum, weight), (metrics, other)`. With `abstract`, the parameters and the
    other state are avals.
    """
    graph, made = created(model.create, seed, abstract)
    if graph:
        params, other = made
    elif "params" in made:
        params, other = made["params"], {name: value for name, value in made.items() if name != "params"}
    else:
        params, other = made, {}

    def call(params, other, batch):
        if graph:
            module = nnx.merge(graph[0], params, other, copy=True)
            out = model.loss(module, batch)
            return out, nnx.split(module, nnx.Param, ...)[2]
        collections = {"params": params, **other} if other or "variables" in model.loss.__code__.co_varnames else params
        out = model.loss(collections, batch)
        updated = out[1] if isinstance(out, tuple) and isinstance(out[1], dict) else {}
        return out, {name: updated.get(name, value) for name, value in other.items()}

    def loss(params, other, batch):
        out, after = call(params, other, batch)
        if model.weighted:
            return out, ({}, after)
        value, aux = out if isinstance(out, tuple) else (out, {})
        return (value, 1.0), ({name: v for name, v in aux.items() if name not in other}, after)

    return params, other, loss


def microbatches(batch: Any, num_microbatches: int, num_devices: int) -> list[Any]:
    """The microbatches of a batch. Microbatch j is the j-th part of each device's contiguous rows, over all devices."""

    def part(a, j):
        rows = np.asarray(a).reshape(num_devices, num_microbatches, -1, *a.shape[1:])
        return rows[:, j].reshape(-1, *a.shape[1:])

    return [jax.tree.map(lambda a: part(a, j), batch) for j in range(num_microbatches)]  # noqa: B023


def step_of(loss: Callable[..., Any], tx: Any, dtype: Any, scale: float) -> Callable[..., Any]:
    """A step over a list of microbatches: a jitted gradient for each, and one jitted update."""

    @jax.jit
    def gradient(params, other, part):
        """((loss, weight, gradient in fp32, metrics), other state). Loss and gradient are multiplied by the weight."""

        def scaled(low):
            (value, n), (aux, after) = loss(low, other, cast(part, dtype))
            n = jax.lax.stop_gradient(jnp.float32(n))
            seen = jax.tree.map(jnp.float32, (value, aux))
            return value * (scale / jnp.maximum(n, 1e-30)).astype(value.dtype), (*seen, n, after)

        low_grads, (value, aux, n, after) = jax.grad(scaled, has_aux=True)(cast(params, dtype))
        return (value, n, jax.tree.map(lambda low: low.astype(jnp.float32) * n / scale, low_grads), aux), after

    @jax.jit
    def update(params, opt_state, parts):
        total, weight, grads, metrics = jax.tree.map(lambda *values: sum(values), *parts)
        grads = jax.tree.map(lambda g: g / weight, grads)
        extra = {"value": total / weight, "grad": grads}
        if not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(tx.update).parameters.values()):
            extra = {name: a for name, a in extra.items() if name in inspect.signature(tx.update).parameters}
        updates, opt_state = tx.update(grads, opt_state, params, **extra)
        means = {name: value / len(parts) for name, value in metrics.items()}
        after = optax.apply_updates(params, updates)
        return after, opt_state, {"loss": total / weight, "grad_norm": optax.tree.norm(grads), **means}

    def step(params, other, opt_state, parts):
        done = []
        for part in parts:
            sums, other = gradient(params, other, part)
            done.append(sums)
        params, opt_state, metrics = update(params, opt_state, done)
        return params, other, opt_state, metrics

    return step


def run(
    model: Any,
    tx: Any,
    batches: list[Any],
    *,
    precision: str = "fp32",
    num_microbatches: int = 1,
    num_devices: int = 8,
    seed: int = 0,
) -> Trajectory:
    """The plain trajectory of a zoo model."""
    params, other, loss = functional(model, seed)
    step = step_of(loss, tx, DTYPES[precision], FP16_SCALE if precision == "fp16" else 1.0)
    start, opt_state, metrics = numbers(params), tx.init(params), []
    for batch in batches:
        parts = microbatches(batch, num_microbatches, num_devices)
        params, other, opt_state, seen = step(params, other, opt_state, parts)
        metrics.append({name: float(value) for name, value in seen.items()})
    losses = np.array([seen["loss"] for seen in metrics])
    return Trajectory(losses, metrics, start, numbers(params), numbers(other))
