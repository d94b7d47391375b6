"""Reads shards of our arrays from the arrays of files that they consist of, one slice at a time."""

from __future__ import annotations

import jax
import numpy as np

from zerojax.exchange.names import Source
from zerojax.exchange.rearrange import fits, window
from zerojax.exchange.tensors import Reader
from zerojax.sharding import padding
from zerojax.utils.typing import Aval, Shape


def shape_problem(reader: Reader, source: Source, shape: Shape) -> str | None:
    """Says which array of the files does not have the shape that ours needs; None if all have it."""
    parts = source.parts(shape)
    if source.is_stack and (not shape or len(parts) != shape[0]):
        return f"{len(parts)} arrays are stacked, the state has {shape}"
    element = shape[1:] if source.is_stack else shape
    for name in parts:
        theirs = reader.shape(name)
        if source.dims is None and theirs != shape:
            return f"{name} has {theirs}, the state has {shape}"
        if source.dims is not None and not fits(source.dims, theirs, element):
            turned = source.dims.our_shape(theirs)
            known = f"which becomes {turned}" if turned else "which does not fit the dims"
            return f"{name} has {theirs}, {known}; the state has {shape}"
    return None


def transposes(reader: Reader, source: Source, shape: Shape) -> bool:
    """Whether the array has the transpose of the shape that it should have in the files: they have another layout."""
    if source.is_stack:
        return False
    want = shape if source.dims is None else source.dims.their_shape(shape)
    theirs = reader.shape(source.names[0])
    return want is not None and len(theirs) > 1 and theirs != want and theirs == want[::-1]


def read_sharded(reader: Reader, source: Source, shape: Shape, stored: Aval) -> jax.Array:
    """Reads an array of a logical shape onto the devices, as it is stored there.

    Cost: each process reads the shards of its own devices, one at a time, and holds one or two copies of it. Of an
    array that is transposed or reshaped it reads no other elements, except where one of our dims is a product: there it
    reads whole rows of the outermost part of the product.
    """
    parts = source.parts(shape)

    def read_slices(slices: tuple[slice, ...]) -> np.ndarray:
        if not source.is_stack:
            read = _read(reader, source, parts[0], shape, slices)
        else:
            read = _stacked(
                [_read(reader, source, name, shape[1:], slices[1:]) for name in parts[slices[0]]], shape, slices
            )
        return read.astype(stored.dtype, copy=False)

    read_shard = lambda index: padding.read_shard(read_slices, index, shape, stored.shape)
    return jax.make_array_from_callback(stored.shape, stored.sharding, read_shard)


def _read(reader: Reader, source: Source, name: str, shape: Shape, index: tuple[slice, ...]) -> np.ndarray:
    """Reads a slice of our array, or of an element of our stack."""
    if source.dims is None:
        return reader.read(name, index)
    part = window(source.dims, reader.shape(name), shape, index)
    return part.finish(reader.read(name, part.index, view=part.view))


def _stacked(elements: list[np.ndarray], shape: Shape, slices: tuple[slice, ...]) -> np.ndarray:
    """The elements along a new dim 0; there may be none."""
    part = [len(range(n)[s]) for n, s in zip(shape, slices, strict=True)]
    return np.stack(elements) if elements else np.empty(part, np.float32)
