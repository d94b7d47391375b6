"""Which dims of the results of an equation are computed from which dims of its operands, and slices of them.

A `Link` ties a dim of some operands to one of the results: a slice of the results along it is computed from the slices
of these operands alone, with the others whole.

    [B, S, D] x [D, F] ─► [B, S, F]:   B to B, S to S, F to F;   D is summed: slices of D have results to be added
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from zerojax.program import jaxprs
from zerojax.program.jaxprs import Equation
from zerojax.utils.typing import Array, ArrayLike

Dim = int | None


class Link(NamedTuple):
    """A dim of operands and results; None for those that are whole."""

    ins: tuple[Dim, ...]
    outs: tuple[Dim, ...]
    is_sum: bool = False  # whether the results, which are whole, are the sum of those of slices
    up: int = 1  # slices of results have up / down times the elements of slices of operands, along the dim
    down: int = 1

    @property
    def keeps_size(self) -> bool:
        """Whether slices of results are as large as those of operands."""
        return not self.is_sum and self.up == self.down


def links(equation: Equation) -> list[Link]:
    """The links of an equation. There are none if no rule knows it, such as a kernel or a loop."""
    name = equation.primitive.name
    if jaxprs.is_elementwise(equation) or (name in _IDENTITIES and len(equation.outvars) == 1):
        return list(_by_element(equation))
    return list(_RULES[name](equation)) if name in _RULES else []


def apply(
    equation: Equation, link: Link, operands: Sequence[Array], size: int, start: ArrayLike | None = None
) -> list[Array]:
    """The results of an equation for a slice along a link.

    Args:
        equation, link: the link is one of the equation, and not a sum.
        operands: slices of those that the link names; the others whole.
        size: the number of elements of results along the dim.
        start: its first index; None if there are no equations that depend on it.
    """
    name, params = equation.primitive.name, dict(equation.params)
    shapes = [
        tuple(size if d == dim else n for d, n in enumerate(v.aval.shape))
        for v, dim in zip(equation.outvars, link.outs, strict=True)
    ]
    if name == "broadcast_in_dim":
        return [lax.broadcast_in_dim(operands[0], shapes[0], params["broadcast_dimensions"])]
    if name == "iota":
        found = lax.broadcasted_iota(params["dtype"], shapes[0], params["dimension"])
        if link.outs[0] == params["dimension"]:
            found = found + jnp.asarray(start).astype(found.dtype)
        return [found]
    if name == "reshape":
        return [lax.reshape(operands[0], shapes[0])]
    if name == "slice":
        ends = [size if d == link.ins[0] else end for d, end in enumerate(params["limit_indices"])]
        return [lax.slice(operands[0], params["start_indices"], ends, params["strides"])]
    if name == "dynamic_slice":
        return [lax.dynamic_slice(operands[0], operands[1:], shapes[0])]
    if name == "gather" and link.ins[0] is not None and params["slice_sizes"][link.ins[0]] > 1:
        sizes = params["slice_sizes"]
        params["slice_sizes"] = tuple(size if d == link.ins[0] else n for d, n in enumerate(sizes))
    found = equation.primitive.bind(*operands, **params)
    return list(found) if equation.primitive.multiple_results else [found]


def _alike(equation: Equation, ins: Sequence[Dim], out: Dim) -> Link:
    return Link(tuple(ins), (out,) * len(equation.outvars))


def _by_element(equation: Equation) -> Iterator[Link]:
    shape = equation.outvars[0].aval.shape
    for d, size in enumerate(shape):
        yield _alike(equation, [d if a.aval.ndim and a.aval.shape[d] == size else None for a in equation.invars], d)


def _broadcast(equation: Equation) -> Iterator[Link]:
    before, dims = equation.invars[0].aval.shape, equation.params["broadcast_dimensions"]
    for d, size in enumerate(equation.params["shape"]):
        own = dims.index(d) if d in dims else None
        yield _alike(equation, [own if own is not None and before[own] == size else None], d)


def _iota(equation: Equation) -> Iterator[Link]:
    return (_alike(equation, [], d) for d in range(len(equation.params["shape"])))


def _reshape(equation: Equation) -> Iterator[Link]:
    before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    if equation.params["dimensions"] is not None:
        return
    outer = {math.prod(after[:d]): d for d, size in enumerate(after) if size > 1}
    for d, size in enumerate(before):
        place = outer.get(math.prod(before[:d])) if size > 1 else None
        if place is not None and (after[place] % size == 0 or size % after[place] == 0):  # it may be merged, or split
            up, down = max(1, after[place] // size), max(1, size // after[place])
            yield Link((d,), (place,), up=up, down=down)


def _transpose(equation: Equation) -> Iterator[Link]:
    return (_alike(equation, [d], k) for k, d in enumerate(equation.params["permutation"]))


def _left(dropped: str) -> Callable[[Equation], Iterator[Link]]:
    """Of an equation that drops some dims of its first operand, by the parameter that has them."""

    def rule(equation: Equation) -> Iterator[Link]:
        axes, kept = equation.params[dropped], 0
        for d in range(equation.invars[0].aval.ndim):
            if d not in axes:
                yield _alike(equation, [d if a.aval.ndim else None for a in equation.invars], kept)
                kept += 1
            elif equation.primitive.name == "reduce_sum":
                yield Link((d,), (None,), is_sum=True)

    return rule


def _except(*params: str) -> Callable[[Equation], Iterator[Link]]:
    """Of an equation whose operands and results have the same dims, and which works along some of them."""

    def rule(equation: Equation) -> Iterator[Link]:
        first = next(equation.params[name] for name in params if name in equation.params)
        mixed = first if isinstance(first, tuple) else (first,)
        ndim = equation.invars[0].aval.ndim
        for d in range(ndim):
            if d not in (k % ndim for k in mixed):
                yield _alike(equation, [d if a.aval.ndim else None for a in equation.invars], d)

    return rule


def _whole_dims(equation: Equation) -> Iterator[Link]:
    """Of an equation that takes a slice, or puts one, in the dims that it takes whole."""
    params, shapes = equation.params, [a.aval.shape for a in equation.invars]
    part = shapes[1] if equation.primitive.name == "dynamic_update_slice" else equation.outvars[0].aval.shape
    steps = params.get("strides") or (1,) * len(part)
    for d, size in enumerate(shapes[0]):
        if part[d] == size and steps[d] == 1:
            yield _alike(equation, [d if len(shape) == len(part) else None for shape in shapes], d)


def _of_matrices(equation: Equation) -> Iterator[Link]:
    return (_alike(equation, [d] * len(equation.invars), d) for d in range(equation.invars[0].aval.ndim - 2))


def _top_k(equation: Equation) -> Iterator[Link]:
    ndim = equation.invars[0].aval.ndim
    return (_alike(equation, [d], d) for d in range(ndim) if d != equation.params.get("axis", ndim - 1) % ndim)


def _pad(equation: Equation) -> Iterator[Link]:
    config = equation.params["padding_config"]
    return (_alike(equation, [d, None], d) for d, each in enumerate(config) if not any(each))


def _dot_general(equation: Equation) -> Iterator[Link]:
    (contracted, batch), ndims = equation.params["dimension_numbers"], [a.aval.ndim for a in equation.invars]
    for k, (left, right) in enumerate(zip(*batch, strict=True)):
        yield Link((left, right), (k,))
    place = len(batch[0])
    for side in range(2):
        for d in range(ndims[side]):
            if d not in (*contracted[side], *batch[side]):
                yield Link((d, None) if side == 0 else (None, d), (place,))
                place += 1
    for left, right in zip(*contracted, strict=True):
        yield Link((left, right), (None,), is_sum=True)


def _gather(equation: Equation) -> Iterator[Link]:
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    operand, indices = (a.aval.shape for a in equation.invars)
    offsets = numbers.offset_dims
    batch = [d for d in range(equation.outvars[0].aval.ndim) if d not in offsets]
    paired = dict(zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    for k, d in enumerate(range(len(indices) - 1)):
        yield Link((paired.get(d), d), (batch[k],))
    kept = [d for d in range(len(operand)) if d not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)]
    for place, d in zip(offsets, kept, strict=True):
        if sizes[d] == operand[d] > 1 and d not in numbers.start_index_map:
            yield Link((d, None), (place,))


def _scatter_add(equation: Equation) -> Iterator[Link]:
    numbers = equation.params["dimension_numbers"]
    operand, indices, updates = (a.aval.shape for a in equation.invars)
    window = numbers.update_window_dims
    batch = [d for d in range(len(updates)) if d not in window]
    paired = dict(zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    for k, d in enumerate(range(len(indices) - 1)):
        if d in paired:
            yield Link((paired[d], d, batch[k]), (paired[d],))
    kept = [d for d in range(len(operand)) if d not in (*numbers.inserted_window_dims, *numbers.operand_batching_dims)]
    for place, d in zip(window, kept, strict=True):
        if updates[place] == operand[d] > 1 and d not in numbers.scatter_dims_to_operand_dims:
            yield Link((d, None, place), (d,))


_IDENTITIES = frozenset({"name", "stop_gradient", "optimization_barrier", "sharding_constraint", "copy"})
_RULES: dict[str, Callable[[Equation], Iterator[Link]]] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": _except("dimension"),
    "dot_general": _dot_general,
    "dynamic_slice": _whole_dims,
    "dynamic_update_slice": _whole_dims,
    "gather": _gather,
    "iota": _iota,
    "pad": _pad,
    "reshape": _reshape,
    "rev": _except("dimensions"),
    "scatter-add": _scatter_add,
    "slice": _whole_dims,
    "sort": _except("dimension"),
    "split": _except("axis"),
    "squeeze": _left("dimensions"),
    "top_k": _top_k,
    "transpose": _transpose,
    **dict.fromkeys(("argmax", "argmin"), _left("axes")),
    **dict.fromkeys(jaxprs.OF_MATRICES - {"fft"}, _of_matrices),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _except("axis")),
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"), _left("axes")
    ),
}
