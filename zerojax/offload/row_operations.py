"""Operations on the rows of a parameter, which can be computed for some of the rows at a time.

A row is along the last dim. What is computed from it may have any shape behind the leading dims:

    [a, b, n]           a parameter, its gradient, its moments
    [a, b, n/k, k]      each row in blocks
    [a, b, n/k]         the largest value of each block

A piece has a part of the leading dims. Where a mesh shards the last dim, rows are divided too. Then the dim behind the
leading ones is divided, which all operations have to keep: the blocks of a row are whole on one device or another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from zerojax.program import jaxprs
from zerojax.utils.typing import Array, Shape

_REDUCTIONS = frozenset({"reduce_max", "reduce_min", "reduce_sum", "reduce_prod", "reduce_and", "reduce_or"})


class Rows(NamedTuple):
    """The rows of a parameter.

    Attributes:
        path: of the parameter.
        shape: of the parameter.
        parts: into how many a mesh divides the last dim.
    """

    path: str
    shape: Shape
    parts: int = 1

    def hold(self, shape: Shape) -> bool:
        """Whether a value of this shape can be one for each row, of which each piece has a part."""
        last = len(self.shape) - 1
        if shape == self.shape:
            return True
        if not shape or shape[:last] != self.shape[:last]:
            return False
        divisible = len(shape) > last and not any(s[last] % self.parts for s in (shape, self.shape))
        return self.parts == 1 or divisible

    def compute(self, equation: Any) -> bool:
        """Whether the one result of an equation is a value for each row, computed from those of the same row."""
        out = equation.outvars[0].aval.shape
        shapes = [a.aval.shape for a in equation.invars if a.aval.shape]
        if not all(map(self.hold, [out, *shapes])):
            return False
        return _keeps(equation, out, shapes, len(self.shape) - (self.parts == 1))

    def part_of(self, shape: Shape, piece: Shape) -> Shape:
        """The part of a value of this shape that belongs to a piece of the parameter.

        Args:
            shape: of a value for each row.
            piece: the shape of the piece.
        """
        if shape == self.shape:
            return piece
        last = len(self.shape) - 1
        return (*piece[:last], *(n // self.parts if d == last else n for d, n in enumerate(shape) if d >= last))

    def compute_piece(self, equation: Any, operands: Sequence[Array], piece: Shape, start: Sequence[Any]) -> Array:
        """The result of an equation, for a piece of the parameter.

        Args:
            equation: one that `compute` accepts.
            operands: their parts that belong to the piece, and scalars.
            piece: its shape.
            start: the position of its first element in the parameter.
        """
        aval, params, name = equation.outvars[0].aval, equation.params, equation.primitive.name
        shape = self.part_of(aval.shape, piece)
        if name == "iota":
            dim, last = params["dimension"], len(self.shape) - 1
            first = start[dim] if dim <= last else 0
            if dim == last and aval.shape != self.shape:
                first = start[dim] // piece[dim] * shape[dim]  # of the part of the last dim that the mesh divides
            return jnp.asarray(first).astype(aval.dtype) + lax.broadcasted_iota(aval.dtype, shape, dim)
        if name == "broadcast_in_dim":
            return lax.broadcast_in_dim(operands[0], shape, params["broadcast_dimensions"])
        if name == "reshape":
            return lax.reshape(operands[0], shape)
        if name == "slice":
            starts = params["start_indices"]
            return lax.slice(operands[0], starts, [k + n for k, n in zip(starts, shape, strict=True)])
        return jaxprs.apply(equation, *operands)


def _keeps(equation: Any, out: Shape, shapes: Sequence[Shape], kept: int) -> bool:
    """Whether an operation works for each index of the first `kept` dims by itself.

    Args:
        equation: of the operation.
        out: the shape of its result.
        shapes: those of its operands that are not scalars.
        kept: the number of dims.
    """
    name, params, ours = equation.primitive.name, equation.params, range(kept)
    if name == "iota":
        return True
    if jaxprs.is_elementwise(equation):
        return all(s[:kept] == out[:kept] for s in shapes)
    if name == "broadcast_in_dim":
        dims = params["broadcast_dimensions"]
        return not shapes or (tuple(dims[:kept]) == tuple(ours) and shapes[0][:kept] == out[:kept])
    if name == "reshape":
        return params["dimensions"] is None
    if name == "pad":
        return all(not any(params["padding_config"][d]) for d in ours)
    if name == "slice":
        return params["strides"] is None and shapes[0][:kept] == out[:kept]
    return name in _REDUCTIONS and all(axis >= kept for axis in params["axes"])
