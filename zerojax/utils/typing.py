"""Type aliases for arrays, meshes, trees, keys and shapes in signatures. They are not checked at run time."""

from __future__ import annotations

from typing import Any, TypeAlias

import chex
import jax

Array: TypeAlias = jax.Array  # a concrete array or a tracer
ArrayLike: TypeAlias = jax.typing.ArrayLike  # what jax.numpy accepts as an array
Aval: TypeAlias = jax.ShapeDtypeStruct  # the shape, dtype and sharding of an array, without its values
AnyMesh: TypeAlias = jax.sharding.Mesh | jax.sharding.AbstractMesh
DTypeLike: TypeAlias = jax.typing.DTypeLike  # what jax.numpy accepts as a dtype
PRNGKey: TypeAlias = chex.PRNGKey  # as returned by jax.random.key
PyTree: TypeAlias = Any  # of arrays, unless stated otherwise
Shape: TypeAlias = tuple[int, ...]
