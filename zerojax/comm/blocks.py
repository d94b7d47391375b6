"""Arrays as they are sent: blocks of 8 bits with their scales, or a narrower dtype. See `sharding.wire`.

In 8 bits, `BLOCK` elements along one dim share a scale, which is their largest absolute value s in the dtype of the
array. A code k of int8 stands for s k / 127, a code of float8_e4m3fn for s k / 448. Both are rounded to nearest. A
block with an infinity or a NaN becomes NaN, so that a step which is not finite is found as without codes.

Codes and scales are sent in one array of bytes.

Source: blocks of weights and of gradients in 8 bits are from Wang et al., "ZeRO++: Extremely Efficient Collective
Communication for Giant Model Training", arXiv 2306.10209, 2023.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

from zerojax.sharding.wire import BLOCK, has_8_bits
from zerojax.utils.typing import Array, Aval, DTypeLike, Shape


def encode(rows: Array, dtype: DTypeLike | None, dim: int | None) -> Array:
    """[N, ..] -> [N, length]: each row as it is sent in `dtype`, in bytes if that has 8 bits.

    Args:
        rows: floating arrays.
        dtype: of what is sent; None for that of the rows.
        dim: of a row, along which blocks run; of 8 bits only.
    """
    n = rows.shape[0]
    if dim is None or dtype is None or not has_8_bits(dtype):
        return rows.astype(dtype or rows.dtype).reshape(n, -1)
    blocks = _blocks(rows, dim + 1)
    axis = dim + 2
    scales = jnp.max(jnp.abs(blocks), axis, keepdims=True)
    scales = jnp.where(jnp.all(jnp.isfinite(blocks), axis, keepdims=True), scales, jnp.nan)
    wide = blocks.astype(jnp.float32)
    ratios = jnp.where(scales > 0, wide / scales.astype(jnp.float32), 0) * _largest(dtype)
    codes = (jnp.round(ratios) if jnp.issubdtype(dtype, jnp.integer) else ratios).astype(dtype)
    codes = _elements(codes, rows.shape, dim + 1)
    return jnp.concatenate([_bytes(codes), _bytes(scales)], axis=1)


def decode(sent: Array, dtype: DTypeLike | None, dim: int | None, like: Array | Aval, result: DTypeLike) -> Array:
    """[N, length] -> [N, ..]: the inverse of `encode`, for rows like `like`, in the dtype `result`."""
    n, shape = sent.shape[0], like.shape
    if dim is None or dtype is None or not has_8_bits(dtype):
        return sent.reshape(n, *shape).astype(result)
    count = math.prod(shape)
    codes = lax.bitcast_convert_type(sent[:, :count], dtype).reshape(n, *shape)
    of_scales = _scales_shape(shape, dim)
    parts = sent[:, count:].reshape(n, *of_scales, like.dtype.itemsize)
    scales = lax.bitcast_convert_type(parts, like.dtype).astype(jnp.float32) / _largest(dtype)
    values = _blocks(codes, dim + 1).astype(jnp.float32) * scales
    return _elements(values, codes.shape, dim + 1).astype(result)


def sent_bytes(shape: Sequence[int], dtype: DTypeLike, dtype_sent: DTypeLike | None, dim: int | None) -> int:
    """The bytes of an array of `dtype` as it is sent."""
    count = math.prod(shape)
    if dim is None or dtype_sent is None or not has_8_bits(dtype_sent):
        return count * jnp.dtype(dtype_sent or dtype).itemsize
    return count + math.prod(_scales_shape(shape, dim)) * jnp.dtype(dtype).itemsize


def _largest(dtype: DTypeLike) -> float:
    return float(jnp.iinfo(dtype).max if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype).max)


def _scales_shape(shape: Sequence[int], dim: int) -> Shape:
    """[.., length, ..] -> [.., blocks, 1, ..]."""
    return (*shape[:dim], -(-shape[dim] // BLOCK), 1, *shape[dim + 1 :])


def _blocks(a: Array, dim: int) -> Array:
    """[.., length, ..] -> [.., blocks, elements, ..], with zeros at the end of the last block. A short dim is one."""
    length = a.shape[dim]
    size = min(BLOCK, length)
    zeros = -length % size
    padded = jnp.pad(a, [(0, zeros if d == dim else 0) for d in range(a.ndim)]) if zeros else a
    return padded.reshape(*a.shape[:dim], -1, size, *a.shape[dim + 1 :])


def _elements(blocks: Array, shape: Shape, dim: int) -> Array:
    """The inverse of `_blocks`, for an array of this shape."""
    joined = blocks.reshape(*shape[:dim], -1, *shape[dim + 1 :])
    return lax.slice_in_dim(joined, 0, shape[dim], axis=dim)


def _bytes(a: Array) -> Array:
    """[N, ..] -> [N, bytes]."""
    return lax.bitcast_convert_type(a, np.uint8).reshape(a.shape[0], -1)
