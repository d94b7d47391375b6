"""Merges low-rank adapters into the weights that they belong to, as qwix names both."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.typing import DTypeLike

from zerojax.checkpoints import contents
from zerojax.exchange.tensors import bounded_repr, exchange_error
from zerojax.step.state import TrainState
from zerojax.utils.typing import Array, PyTree, Shape

Path: TypeAlias = tuple[Any, ...]  # keys of nested dicts, of any type
LORA_A, LORA_B = "_lora_a", "_lora_b"  # the endings that qwix.LoraProvider appends to the name of a weight
_QVALUE, _SCALE, _ZERO_POINT = (("array", name) for name in ("qvalue", "scale", "zero_point"))  # below that name


def merged(state: TrainState, scale: float, dtype: DTypeLike | None = None) -> PyTree:
    """Returns the parameters with adapters merged into the weights: w + scale * a @ b. The state stays.

    Quantized weights are dequantized first. The merged model therefore computes what the trained one does, up to
    rounding, and differs from the files that were quantized by the error of the quantization as well.

    Args:
        state: of a model to which `qwix.apply_lora_to_model` was applied.
        scale: alpha / rank of the adapters.
        dtype: of the merged weights. They are computed in fp32; by default they get the dtype of the weights before,
            and that of the scale where these are quantized. All other parameters keep theirs.

    Returns:
        Nested dicts of sharded arrays, as of the model without adapters: for `nnx.update` or
        `parameters.export_params`.

    Raises:
        ValueError: if there is no adapter, one has no weight or does not fit its weight, or a quantized weight has a
            zero point.

    Cost: the result is sharded like the weights. While one of them is computed, a device holds its shard in fp32.
    """
    # Find the adapters.
    leaves = cast(dict[Path, Array], traverse_util.flatten_dict(contents.saved_params(state)))
    adapters = {(*path[:-1], path[-1].removesuffix(LORA_A)): path for path in leaves if _ends(path, LORA_A)}
    if not adapters:
        got = f"the parameters {bounded_repr([_text(path) for path in leaves][:5])}"
        raise exchange_error("there is no adapter", got, "pass the state of a model with qwix.apply_lora_to_model")
    # Merge each into its weight.
    result: dict[Path, Array] = {}
    for path, leaf, own_dtype in _weights(leaves):
        result[path] = leaf
        if path in adapters:
            a, b = leaves[adapters[path]], leaves[(*path[:-1], path[-1] + LORA_B)]
            dims = _contracted_dims(path, leaf.shape, a.shape, b.shape)
            result[path] = _merge(leaf, a, b, scale, dims)
        if path in adapters or leaf.dtype != own_dtype:
            result[path] = jax.device_put(result[path].astype(dtype or own_dtype), leaf.sharding)
    if lone := [path for path in adapters if path not in result]:
        fix = f"keep the weight {lone[0][-1]!r} next to it, as qwix does"
        raise exchange_error("an adapter has no weight", _text(adapters[lone[0]]), fix)
    return traverse_util.unflatten_dict(result)


def _text(path: Path) -> str:
    return "/".join(map(str, path))


def _ends(path: Path, *suffixes: str) -> bool:
    return isinstance(path[-1], str) and path[-1].endswith(suffixes)


def _weights(leaves: Mapping[Path, Array]) -> Iterator[tuple[Path, Array, np.dtype]]:
    """(path, array, dtype) of all leaves but adapters. A quantized one is dequantized in fp32, its dtype is another."""
    for path, leaf in leaves.items():
        if path[-2:] == _QVALUE:
            if path[:-2] + _ZERO_POINT in leaves:
                fix = "quantize symmetrically, with a calibration such as 'absmax'"
                raise exchange_error("a quantized weight has a zero point", _text(path[:-2]), fix)
            scale = leaves[path[:-2] + _SCALE]
            yield path[:-2], jax.device_put(_dequantized(leaf, scale), leaf.sharding), scale.dtype
        elif path[-2:] != _SCALE and not _ends(path, LORA_A, LORA_B):
            yield path, leaf, leaf.dtype


@jax.jit
def _dequantized(values: Array, scale: Array) -> Array:
    """Multiplies by the scale, which has one element for each tile of values."""
    wide = scale.astype(jnp.float32)
    for dim, (size, tiles) in enumerate(zip(values.shape, scale.shape, strict=True)):
        wide = jnp.repeat(wide, size // tiles, axis=dim)
    return values.astype(jnp.float32) * wide


def _contracted_dims(path: Path, weight: Shape, a: Shape, b: Shape) -> tuple[int, ...]:
    """The dims of a weight that its product contracts: `a` has them in order, before the rank, and `b` the others.

    If several choices fit, the first dims are taken, as in the kernel of a linear layer: [in, out].
    """
    for count in range(1, len(weight)):
        for dims in itertools.combinations(range(len(weight)), count):
            rest = [size for dim, size in enumerate(weight) if dim not in dims]
            inner = [weight[dim] for dim in dims]
            if a[:-1] in (tuple(inner), (math.prod(inner),)) and b[1:] in (tuple(rest), (math.prod(rest),)):
                return dims
    got = f"{_text(path)} of shape {weight}, adapters of shapes {a} and {b}"
    fix = "the first adapter has the contracted dims and the rank, the second the rank and the other dims"
    raise exchange_error("an adapter does not fit its weight", got, fix)


@functools.partial(jax.jit, static_argnums=4)
def _merge(weight: Array, a: Array, b: Array, scale: float, dims: tuple[int, ...]) -> Array:
    """The sum in fp32."""
    a, b = a.astype(jnp.float32).reshape(-1, a.shape[-1]), b.astype(jnp.float32).reshape(b.shape[0], -1)
    order = (*dims, *(dim for dim in range(weight.ndim) if dim not in dims))
    product = jnp.dot(a, b, precision=jax.lax.Precision.HIGHEST).reshape([weight.shape[dim] for dim in order])
    return weight.astype(jnp.float32) + scale * product.transpose([order.index(dim) for dim in range(weight.ndim)])
