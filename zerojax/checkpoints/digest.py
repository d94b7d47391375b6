"""Computes a 64-bit digest of an array that does not depend on how the array is sharded.

Each element is mixed with its index in the full array, and the results are added modulo 2**32, twice. A sum does not
depend on the order in which devices add, and the mixing is one to one, so a change of any single element changes the
digest. It detects damage; it does not protect against someone who constructs two arrays with the same digest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from zerojax.sharding.padding import NO_PADDING, Padding, between
from zerojax.typing import Array, Shape


class Digest(NamedTuple):
    """The digest of an array.

    Attributes:
        text: 16 hexadecimal digits.
        has_nan, has_inf: whether any element is a NaN or an infinity.
    """

    text: str
    has_nan: bool
    has_inf: bool


def digests(arrays: Mapping[str, Array], shapes: Mapping[str, Shape] | None = None) -> dict[str, Digest]:
    """Returns the digest of each array, in every process. Arrays may be sharded over several processes.

    Args:
        arrays: by path.
        shapes: those without the zeros with which the arrays are stored; by default the arrays have none.

    Cost: reads every array once on the devices, and copies 16 bytes per array to the host.

    Raises:
        ValueError: if a dtype is not numeric or has more than 64 bits.
    """
    zeros = {path: between(shapes[path], a.shape) if shapes else NO_PADDING for path, a in arrays.items()}
    computed = {path: _on_devices(path, a, zeros[path]) for path, a in arrays.items()}
    return {path: _to_digest(words) for path, words in jax.device_get(computed).items()}


def _on_devices(path: str, a: Array, zeros: Padding) -> Array:
    """The four words of `_words`, replicated."""
    if jnp.dtype(a.dtype).itemsize > 8 or a.dtype.kind not in "biufcV":
        raise ValueError(
            f"digest: the dtype of {path!r} is not supported\n"
            f"  got:      {a.dtype}\n  fix:      use a numeric dtype of at most 64 bits"
        )
    replicated = NamedSharding(a.sharding.mesh, PartitionSpec()) if isinstance(a.sharding, NamedSharding) else None
    return jax.jit(_words, static_argnums=1, out_shardings=replicated)(a, zeros)


def _to_digest(words: np.ndarray) -> Digest:
    first, second, nan, inf = (int(word) for word in words)
    return Digest(f"{first:08x}{second:08x}", bool(nan), bool(inf))


class HostDigest:
    """Computes the digest of an array from consecutive pieces in C order, as numpy arrays."""

    def __init__(self) -> None:
        self._sums, self._num_elements = [0, 0], 0

    def add(self, piece: np.ndarray) -> None:
        """Adds the next piece."""
        bits = _host_bits(piece)
        positions = np.arange(self._num_elements, self._num_elements + bits.size, dtype=np.uint64)
        index = _host_mix(positions.astype(np.uint32))
        self._num_elements += bits.size
        for k, (salt, odd) in enumerate(_SALTS):
            words = _host_mix((bits + np.uint32(salt)) ^ (index * np.uint32(odd)))
            self._sums[k] = (self._sums[k] + int(words.sum(dtype=np.uint64))) % 2**32

    @property
    def text(self) -> str:
        """The digest of all pieces so far, as `Digest.text`."""
        return f"{self._sums[0]:08x}{self._sums[1]:08x}"


def _host_bits(a: np.ndarray) -> np.ndarray:
    """As `_bits`, flattened."""
    if a.dtype == np.bool_ or a.dtype.name in _NARROW:
        return a.astype(np.int8).astype(np.uint32).reshape(-1)
    width = a.dtype.itemsize // (2 if a.dtype.kind == "c" else 1)
    words = np.ascontiguousarray(a).reshape(-1).view({1: np.uint8, 2: np.uint16}.get(width, np.uint32))
    return words.astype(np.uint32)


def _host_mix(x: np.ndarray) -> np.ndarray:
    """As `_mix`."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def _words(a: Array, zeros: Padding) -> Array:
    """(two sums, whether there is a NaN, whether there is an infinity), shape (4,), uint32."""
    a = zeros.crop(a)
    bits = _bits(a)
    index = _mix(_flat_index(bits.shape))
    words = [_mix((bits + jnp.uint32(salt)) ^ (index * jnp.uint32(odd))) for salt, odd in _SALTS]
    sums = [jnp.sum(each, dtype=jnp.uint32) for each in words]
    floating = jnp.issubdtype(a.dtype, jnp.inexact)
    flags = [jnp.any(test(a)) if floating else False for test in (jnp.isnan, jnp.isinf)]
    return jnp.stack([*sums, *(jnp.uint32(flag) for flag in flags)])


# Multiplication by an odd number is one to one. These are the fractional parts of sqrt(2), sqrt(3) and sqrt(5).
_SALTS = ((0, 1), (0x6A09E667, 0xBB67AE85))
_NARROW = ("int4", "uint4", "int2", "uint2")


def _bits(a: Array) -> Array:
    """The elements as uint32. Elements of 64 bits become two, in a new last dim."""
    if a.dtype == jnp.bool_ or jnp.dtype(a.dtype).name in _NARROW:
        return a.astype(jnp.int8).astype(jnp.uint32)
    if jnp.iscomplexobj(a):
        return jnp.stack([_bits(a.real), _bits(a.imag)], axis=-1)
    width = jnp.dtype(a.dtype).itemsize
    words = jax.lax.bitcast_convert_type(a, {1: jnp.uint8, 2: jnp.uint16}.get(width, jnp.uint32))
    return words.astype(jnp.uint32)


def _flat_index(shape: Shape) -> Array:
    """The index of each element in the flattened array (C order), modulo 2**32."""
    index = jnp.zeros(shape, jnp.uint32)
    for dim in range(len(shape)):
        stride = math.prod(shape[dim + 1 :]) % 2**32
        index += jax.lax.broadcasted_iota(jnp.uint32, shape, dim) * jnp.uint32(stride)
    return index


def _mix(x: Array) -> Array:
    """The 32-bit finalizer of MurmurHash3 (Appleby, public domain): one to one, every bit affects every bit."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
