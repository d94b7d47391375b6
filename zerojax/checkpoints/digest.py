"""Computes a 64-bit digest of an array that does not depend on how the array is sharded.

Each element is mixed with its index in the full array, and the results are added modulo 2**32, twice. A sum does not
depend on the order in which devices add, and the mixing is one to one, so a change of any single element changes the
digest. It detects damage; it does not protect against someone who constructs two arrays with the same digest.

Every device adds the elements that it holds. Devices that hold the same elements are replicas, and their sums are
compared.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.offload import host_pieces
from zerojax.offload.disk import DiskArray
from zerojax.sharding.axes import axis_names
from zerojax.sharding.placement import PINNED_HOST, in_memory
from zerojax.utils.typing import Array, Shape


class Digest(NamedTuple):
    """The digest of an array.

    Attributes:
        text: 16 hexadecimal digits.
        has_nan, has_inf: whether any element is a NaN or an infinity.
        outliers: devices that hold other values than most devices with the same part of the array. Of two devices that
            differ, both.
    """

    text: str
    has_nan: bool
    has_inf: bool
    outliers: tuple[Any, ...] = ()


def digests(arrays: Mapping[str, Array], shapes: Mapping[str, Shape] | None = None) -> dict[str, Digest]:
    """Returns the digest of each array, in every process. Arrays may be sharded over several processes.

    Args:
        arrays: by path.
        shapes: those without the zeros with which the arrays are stored; by default the arrays have none.

    Cost: reads every array once on the devices, and copies 16 bytes per array and device to every process.

    Raises:
        ValueError: if a dtype is not numeric or has more than 64 bits.
    """
    computed = {}
    for path, a in arrays.items():
        words = _on_devices(path, in_memory(a), shapes[path] if shapes else a.shape)
        computed[path] = jax.device_get(words) if isinstance(a, DiskArray) else words  # one from the disk at a time
    return {path: _to_digest(words, arrays[path]) for path, words in jax.device_get(computed).items()}


def _on_devices(path: str, a: Array, shape: Shape) -> Array:
    """The four words of each device in the order of the mesh, shape (devices, 4), replicated."""
    if jnp.dtype(a.dtype).itemsize > 8 or a.dtype.kind not in "biufcV":
        raise ValueError(
            f"digest: the dtype of {path!r} is not supported\n"
            f"  got:      {a.dtype}\n  fix:      use a numeric dtype of at most 64 bits"
        )
    if isinstance(a.sharding, NamedSharding):
        in_host = a.sharding.memory_kind == PINNED_HOST
        return _sharded_words(a.sharding.mesh, a.sharding.spec, tuple(shape), in_host)(a)
    return jax.jit(_words, static_argnums=(1, 2))(a, (0,) * a.ndim, tuple(shape))[None]


@functools.cache
def _sharded_words(mesh: Mesh, spec: PartitionSpec, shape: Shape, in_host: bool) -> Any:
    """A jitted function of an array with this sharding. Arrays in host memory come to the devices piece by piece."""

    def of_device(shard: Array) -> Array:
        axes = [axis_names(entry) for entry in (*spec, *[None] * (shard.ndim - len(spec)))]
        index = [jax.lax.axis_index(names) if names else 0 for names in axes]
        first = [k * size for k, size in zip(index, shard.shape, strict=True)]
        if not in_host:
            return _words(shard, first, shape)[None]
        pieces = host_pieces.of_one_array(shard.shape, shard.dtype.itemsize, mesh)

        def add(start: tuple[Array, ...], total: Array) -> Array:
            piece = jax.device_put(jax.lax.dynamic_slice(shard, start, pieces.piece), jax.memory.Space.Device)
            return total + _words(piece, [a + b for a, b in zip(first, start, strict=True)], shape)

        return pieces.loop(add, jnp.zeros(4, jnp.uint32))[None]

    every = PartitionSpec(mesh.axis_names)
    words = jax.shard_map(of_device, mesh=mesh, in_specs=spec, out_specs=every, check_vma=False)
    return jax.jit(words, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _to_digest(words: np.ndarray, a: Array) -> Digest:
    """Adds the words of the parts of an array. Replicas differ in the mesh axes over which it is not sharded."""
    parts, devices = words[:, None], np.array([None])
    if isinstance(a.sharding, NamedSharding):
        mesh: Any = a.sharding.mesh
        sharded = {name for entry in a.sharding.spec for name in axis_names(entry)}
        order = sorted(range(mesh.devices.ndim), key=lambda axis: mesh.axis_names[axis] not in sharded)
        num_parts = math.prod(mesh.shape[name] for name in sharded)
        parts = words.reshape(*mesh.devices.shape, 4).transpose(*order, -1).reshape(num_parts, -1, 4)
        devices = mesh.devices.transpose(order).reshape(num_parts, -1)
    first, second, nan, inf = (int(word) for word in parts[:, 0].sum(axis=0, dtype=np.uint64))
    outliers = [device for part, holders in zip(parts, devices, strict=True) for device in _outliers(part, holders)]
    return Digest(f"{first % 2**32:08x}{second % 2**32:08x}", bool(nan), bool(inf), tuple(outliers))


def _outliers(words: np.ndarray, devices: np.ndarray) -> list[Any]:
    """The devices whose words are not those of most devices."""
    if (words == words[0]).all():
        return []
    _, kinds, counts = np.unique(words, axis=0, return_inverse=True, return_counts=True)
    most = counts == counts.max()
    return list(devices if most.sum() > 1 else devices[~most[kinds.reshape(-1)]])


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
    if a.dtype.name == _FLOAT4:
        return np.ascontiguousarray(a).reshape(-1).view(np.uint8).astype(np.uint32)
    width = a.dtype.itemsize // (2 if a.dtype.kind == "c" else 1)
    words = np.ascontiguousarray(a).reshape(-1).view({1: np.uint8, 2: np.uint16}.get(width, np.uint32))
    return words.astype(np.uint32)


def _host_mix(x: np.ndarray) -> np.ndarray:
    """As `_mix`."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def _words(a: Array, start: Sequence[Any], shape: Shape) -> Array:
    """(two sums, whether there is a NaN, whether there is an infinity), shape (4,), uint32.

    Args:
        a: a part of an array.
        start: the index of its first element.
        shape: of the array without the zeros at its end, which are not added.
    """
    bits = _bits(a)
    wide = (*shape, *bits.shape[a.ndim :])  # elements of 64 bits are two
    index, inside = _flat_index(bits.shape, (*start, 0), wide)
    words = [_mix((bits + jnp.uint32(salt)) ^ (_mix(index) * jnp.uint32(odd))) for salt, odd in _SALTS]
    sums = [jnp.sum(jnp.where(inside, each, 0), dtype=jnp.uint32) for each in words]
    floating = jnp.issubdtype(a.dtype, jnp.inexact)
    flags = [jnp.any(test(a)) if floating else False for test in (jnp.isnan, jnp.isinf)]
    return jnp.stack([*sums, *(jnp.uint32(flag) for flag in flags)])


# Multiplication by an odd number is one to one. These are the fractional parts of sqrt(2), sqrt(3) and sqrt(5).
_SALTS = ((0, 1), (0x6A09E667, 0xBB67AE85))
_NARROW, _FLOAT4 = ("int4", "uint4", "int2", "uint2"), "float4_e2m1fn"


def _bits(a: Array) -> Array:
    """The elements as uint32. Elements of 64 bits become two, in a new last dim."""
    if a.dtype == jnp.bool_ or jnp.dtype(a.dtype).name in _NARROW:
        return a.astype(jnp.int8).astype(jnp.uint32)
    if jnp.dtype(a.dtype).name == _FLOAT4:
        return jax.lax.bitcast_convert_type(a, jnp.uint4).astype(jnp.uint32)
    if jnp.iscomplexobj(a):
        return jnp.stack([_bits(a.real), _bits(a.imag)], axis=-1)
    width = jnp.dtype(a.dtype).itemsize
    words = jax.lax.bitcast_convert_type(a, {1: jnp.uint8, 2: jnp.uint16}.get(width, jnp.uint32))
    return words.astype(jnp.uint32)


def _flat_index(block: Shape, start: Sequence[Any], shape: Shape) -> tuple[Array, Array]:
    """The index of each element in the flattened array (C order), modulo 2**32, and whether it is within the shape."""
    index, inside = jnp.zeros(block, jnp.uint32), jnp.ones(block, bool)
    for dim, first in zip(range(len(block)), start, strict=False):
        positions = jax.lax.broadcasted_iota(jnp.uint32, block, dim) + jnp.uint32(first)
        index += positions * jnp.uint32(math.prod(shape[dim + 1 :]) % 2**32)
        inside &= positions < shape[dim]
    return index, inside


def _mix(x: Array) -> Array:
    """The 32-bit finalizer of MurmurHash3 (Appleby, public domain): one to one, every bit affects every bit."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
