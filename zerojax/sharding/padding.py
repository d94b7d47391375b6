"""Zeros at the end of the sharded dim of an array, so that the number of shards divides it.

JAX only shards arrays evenly. A leaf none of whose dims N divides is stored with zeros behind its last elements:

    logical   [4096, 1000] over 24 devices     what the model, the optimizer and a checkpoint have
    stored    [4104, 1000], 171 rows each      what the training state has where a stage shards the leaf

Everything else has logical shapes. The border runs through this module and `comm.collectives`, which cuts off the
zeros behind a gather and appends them before a reduction. Zeros are appended anew in each step, so that nothing an
optimizer does (weight decay, noise, averages) reaches them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zerojax.utils.typing import Array, PyTree, Shape


@dataclasses.dataclass(frozen=True)
class Padding:
    """The zeros of an array."""

    dim: int = 0  # the dim at whose end they are
    count: int = 0  # their number along this dim; 0 for an array that is stored as it is

    def stored_shape(self, shape: Sequence[int]) -> Shape:
        """The shape with zeros."""
        return tuple(size + self.count * (d == self.dim) for d, size in enumerate(shape))

    def pad(self, array: Array) -> Array:
        """Appends the zeros."""
        if not self.count:
            return array
        config = [(0, self.count * (d == self.dim), 0) for d in range(array.ndim)]
        return lax.pad(array, jnp.zeros((), array.dtype), config)

    def crop(self, array: Array) -> Array:
        """Cuts off the zeros."""
        if not self.count:
            return array
        return lax.slice_in_dim(array, 0, array.shape[self.dim] - self.count, axis=self.dim)


NO_PADDING = Padding()


def between(logical: Sequence[int], stored: Sequence[int]) -> Padding:
    """The zeros of an array, from its shapes."""
    dims = [d for d, (size, with_zeros) in enumerate(zip(logical, stored, strict=True)) if size != with_zeros]
    return Padding(dims[0], stored[dims[0]] - logical[dims[0]]) if dims else NO_PADDING


def read_shard(
    read: Callable[[tuple[slice, ...]], np.ndarray], index: tuple[slice, ...], logical: Shape, stored: Shape
) -> np.ndarray:
    """Reads a shard of a stored array on the host, by `read(slices)` of the logical array."""
    spans = [s.indices(size)[:2] for s, size in zip((*index, *[slice(None)] * len(stored)), stored, strict=False)]
    inside = [(min(start, size), min(stop, size)) for (start, stop), size in zip(spans, logical, strict=True)]
    part = read(tuple(slice(start, stop) for start, stop in inside))
    missing = [(0, stop - start - size) for (start, stop), size in zip(spans, part.shape, strict=True)]
    return np.pad(part, missing) if any(after for _, after in missing) else part


def padded(tree: PyTree, paddings: Sequence[Padding]) -> PyTree:
    """A tree of logical arrays with their zeros; the paddings are in flattening order."""
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten([p.pad(a) for p, a in zip(paddings, leaves, strict=True)])


def cropped(tree: PyTree, paddings: Sequence[Padding]) -> PyTree:
    """The inverse of `padded`."""
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten([p.crop(a) for p, a in zip(paddings, leaves, strict=True)])
