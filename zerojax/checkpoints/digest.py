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


class HostDigest:
    """The digest of an array that comes in pieces, in C order, as numpy arrays."""

    def __init__(self) -> None:
        self._sums, self._done = [0, 0], 0

    def add(self, piece: np.ndarray) -> None:
        """The next piece."""
        bits = _host_bits(piece)
        index = _host_mixed(np.arange(self._done, self._done + bits.size, dtype=np.uint64).astype(np.uint32))
        self._done += bits.size
        for k, (salt, odd) in enumerate(_SALTS):
            words = _host_mixed((bits + np.uint32(salt)) ^ (index * np.uint32(odd)))
            self._sums[k] = (self._sums[k] + int(words.sum(dtype=np.uint64))) % 2**32

    @property
    def text(self) -> str:
        """As in `Digest`."""
        return f"{self._sums[0]:08x}{self._sums[1]:08x}"


def _host_bits(a: np.ndarray) -> np.ndarray:
    if a.dtype == np.bool_ or a.dtype.name in _NARROW:
        return a.astype(np.int8).astype(np.uint32).reshape(-1)
    width = a.dtype.itemsize // (2 if a.dtype.kind == "c" else 1)
    words = np.ascontiguousarray(a).reshape(-1).view({1: np.uint8, 2: np.uint16}.get(width, np.uint32))
    return words.astype(np.uint32)


def _host_mixed(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def _words(a: Array) -> Array:
    """(two sums, whether there is a NaN, whether there is an infinity) as uint32."""
    bits = _bits(a)
    index = _mixed(_index(bits.shape))
    words = [_mixed((bits + jnp.uint32(salt)) ^ (index * jnp.uint32(odd))) for salt, odd in _SALTS]
    sums = [jnp.sum(each, dtype=jnp.uint32) for each in words]
    floating = jnp.issubdtype(a.dtype, jnp.inexact)
    flags = [jnp.any(test(a)) if floating else False for test in (jnp.isnan, jnp.isinf)]
    return jnp.stack([*sums, *(jnp.uint32(flag) for flag in flags)])


# Odd numbers are one to one under multiplication. These are the fractions of sqrt(2), sqrt(3) and sqrt(5).
_SALTS = ((0, 1), (0x6A09E667, 0xBB67AE85))
_NARROW = ("int4", "uint4", "int2", "uint2")


def _bits(a: Array) -> Array:
    """The elements as uint32; of 64 bits two each, in a new last dim."""
    if a.dtype == jnp.bool_ or jnp.dtype(a.dtype).name in _NARROW:
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
