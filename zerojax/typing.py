"""Types of arrays, trees and keys in signatures. They describe; nothing is checked at run time."""

from __future__ import annotations

from typing import Any, TypeAlias

import chex
import jax

Array: TypeAlias = jax.Array  # an array or a tracer of one
ArrayLike: TypeAlias = jax.typing.ArrayLike  # what jax.numpy takes in place of an array
Aval: TypeAlias = jax.ShapeDtypeStruct  # shape, dtype and sharding of an array that is not there
PRNGKey: TypeAlias = chex.PRNGKey  # of jax.random.key
PyTree: TypeAlias = Any  # of arrays, unless said otherwise
Scalar: TypeAlias = chex.Scalar
Shape: TypeAlias = tuple[int, ...]
