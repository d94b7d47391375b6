"""A digest of an array: 64 bits of what it holds, the same however it is divided over devices.

Each element is mixed with its index in the whole array, and the results are added modulo 2**32, twice. A sum does not
depend on the order in which devices add, and the mixing is one to one, so that a change of any one element changes it.
It tells damage from what was saved; it is no protection against somebody who makes two arrays with the same digest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

Array = Any


class Digest(NamedTuple):
    """Of one array: 16 hexadecimal digits, and whether a NaN or an infinity is among the elements."""

    text: str
    has_nan: bool
    has_inf: bool


def digests(arrays: Mapping[str, Array]) -> dict[str, Digest]:
    """Of arrays that may be sharded, over several processes too; each process gets all of them.

    Cost: every array is read once, on the devices, and 16 bytes of each come to the host.

    Raises:
        ValueError: a dtype that has no bits to mix.
    """
    computed = {path: _on_devices(path, a) for path, a in arrays.items()}
    return {path: _digest(words) for path, words in jax.device_get(computed).items()}


def _on_devices(path: str, a: Array) -> Array:
    if jnp.dtype(a.dtype).itemsize > 8 or a.dtype.kind not in "biufcV":
        raise ValueError(f"digest: {path!r} has dtype {a.dtype}\n  fix:      numbers of up to 64 bits")
    whole = NamedSharding(a.sharding.mesh, PartitionSpec()) if isinstance(a.sharding, NamedSharding) else None
    return jax.jit(_words, out_shardings=whole)(a)


def _digest(words: np.ndarray) -> Digest:
    first, second, nan, inf = (int(word) for word in words)
    return Digest(f"{first:08x}{second:08x}", bool(nan), bool(inf))


def _words(a: Array) -> Array:
    """(two sums, whether there is a NaN, whether there is an infinity) as uint32."""
    bits = _bits(a)
    index = _mixed(_index(bits.shape))
    sums = [jnp.sum(_mixed((bits + salt) ^ (index * odd)), dtype=jnp.uint32) for salt, odd in _SALTS]
    floating = jnp.issubdtype(a.dtype, jnp.inexact)
    flags = [jnp.any(test(a)) if floating else False for test in (jnp.isnan, jnp.isinf)]
    return jnp.stack([*sums, *(jnp.uint32(flag) for flag in flags)])


# Odd numbers are one to one under multiplication. These are the fractions of sqrt(2), sqrt(3) and sqrt(5).
_SALTS = ((jnp.uint32(0), jnp.uint32(1)), (jnp.uint32(0x6A09E667), jnp.uint32(0xBB67AE85)))


def _bits(a: Array) -> Array:
    """The elements as uint32; of 64 bits two each, in a new last dim."""
    if a.dtype == jnp.bool_ or jnp.dtype(a.dtype).name in ("int4", "uint4", "int2", "uint2"):
        return a.astype(jnp.int8).astype(jnp.uint32)
    if jnp.iscomplexobj(a):
        return jnp.stack([_bits(a.real), _bits(a.imag)], axis=-1)
    width = jnp.dtype(a.dtype).itemsize
    words = jax.lax.bitcast_convert_type(a, {1: jnp.uint8, 2: jnp.uint16}.get(width, jnp.uint32))
    return words.astype(jnp.uint32)


def _index(shape: tuple[int, ...]) -> Array:
    """Of each element in the order of rows, modulo 2**32."""
    index = jnp.zeros(shape, jnp.uint32)
    for dim in range(len(shape)):
        stride = math.prod(shape[dim + 1 :]) % 2**32
        index += jax.lax.broadcasted_iota(jnp.uint32, shape, dim) * jnp.uint32(stride)
    return index


def _mixed(x: Array) -> Array:
    """The finalizer of MurmurHash3 for 32 bits (Appleby, public domain): one to one, every bit reaches every bit."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
