"""How each primitive without inner equations combines the values of its operands: see `RowValue`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp

from zerojax.program.jaxprs import BY_ELEMENT, OF_MATRICES, Equation
from zerojax.program.rows.values import (
    SAME,
    Factors,
    Kind,
    RowValue,
    are_same,
    derived,
    elementwise,
    linear,
    met,
    mixed,
    plain_factors,
    reduced,
    replaced,
    reshaped,
    row_by_row,
    united,
)
from zerojax.utils.typing import Shape

# The value of all results, or one for each.
RowRule = Callable[[Equation, Sequence[RowValue]], RowValue | list[RowValue]]

_IDENTITY = frozenset({
    "name", "optimization_barrier", "sharding_constraint", "stop_gradient", "pvary", "pcast", "device_put",
    "layout_constraint", "reshard", "mesh_cast",
})  # fmt: skip
_OF_KEYS = frozenset({"random_bits", "random_split", "random_wrap", "random_unwrap", "random_fold_in", "random_seed"})
_MORE_BY_ELEMENT = frozenset({
    "bessel_i0e", "bessel_i1e", "complex", "conj", "digamma", "igamma", "igammac", "imag", "log2", "one_minus_square",
    "polygamma", "real", "regularized_incomplete_beta", "zeta",
})  # fmt: skip


def values_of(equation: Equation, values: Sequence[RowValue]) -> list[RowValue]:
    """The values of the results of an equation that has no inner ones, or whose inner ones are not known."""
    name, results = equation.primitive.name, equation.outvars
    if name in _IDENTITY and len(results) == len(values):
        return list(values)
    if any(v.kind is Kind.MIXED for v in values):
        return [mixed(values)] * len(results)
    if name in BY_ELEMENT or name in _MORE_BY_ELEMENT:
        return [elementwise(name, values, results[0].aval.shape, is_exact(equation))]
    if are_same(values) and name not in _KEEPS_INDICES:
        return [united(values, Kind.SAME)] * len(results)
    found = _RULES.get(name, _unknown)(equation, values)
    return found if isinstance(found, list) else [found] * len(results)


def is_exact(equation: Equation) -> bool:
    """Whether an equation does not round to integers, and keeps signs."""
    before, after = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
    if equation.primitive.name == "div":
        return jnp.issubdtype(after, jnp.inexact)
    if equation.primitive.name != "convert_element_type" or before == jnp.bool_:
        return True
    return after != jnp.bool_ and (jnp.issubdtype(after, jnp.inexact) or not jnp.issubdtype(before, jnp.inexact))


def _unknown(equation: Equation, values: Sequence[RowValue]) -> RowValue | list[RowValue]:
    """Results in which rows may have met. What has as many elements in the dim of the rows has rows there as well."""
    rows = [v for v in values if v.has_rows]
    if not rows:
        return derived(values)
    widest = max(rows, key=lambda v: len(v.row_dims))
    shape = equation.invars[[v is widest for v in values].index(True)].aval.shape
    dims, name, found = widest.row_dims, equation.primitive.name, []
    for out in equation.outvars:
        after = out.aval.shape
        if not dims or any(after[dim : dim + 1] != shape[dim : dim + 1] for dim in dims):
            found.append(met(mixed(values)))
            continue
        plain = enumerate(plain_factors(after))
        own = united(values, Kind.ROWS, dims=tuple(widest.dims[d] if d in dims else size for d, size in plain))
        is_separate = are_same(v for v in values if not v.has_rows) and (
            (name in OF_MATRICES and max(dims) < len(after) - 2) or name in _OF_KEYS
        )
        found.append(own if is_separate else met(own))
    return found


def _shapes(equation: Equation) -> tuple[Shape, Shape]:
    """The shapes of the first operand and of the first result."""
    return equation.invars[0].aval.shape, equation.outvars[0].aval.shape


# Shapes --------------------------------------------------------------------------------------------------------------


def _moved(value: RowValue, dims: tuple[Factors, ...] | None, index_dim: int | None = None) -> RowValue:
    """The value of the same elements in another order, or of some of them."""
    if not value.has_rows:
        return value.replace(index_dim=index_dim, columns=())
    if dims is None:
        return united([value], Kind.MEAN)
    return value.replace(dims=dims, columns=())


def _reshape(equation: Equation, values: Sequence[RowValue]) -> RowValue:
    v, (before, after) = values[0], _shapes(equation)
    index_dim = None
    if v.index_dim is not None:
        leading, size = math.prod(before[: v.index_dim]), before[v.index_dim]
        kept = [k for k in range(len(after)) if after[k] == size and math.prod(after[:k]) == leading]
        index_dim = kept[0] if kept else None
    return _moved(v, reshaped(v.dims, after), index_dim)


def _broadcast(equation: Equation, values: Sequence[RowValue]) -> RowValue:
    v, (before, after), to = values[0], _shapes(equation), equation.params["broadcast_dimensions"]
    dims = plain_factors(after)
    for factors, size, target in zip(v.dims, before, to, strict=False):
        wider = () if size == after[target] else ((after[target], False),)
        dims = replaced(dims, target, (*factors, *wider))
    return _moved(v, dims, None if v.index_dim is None else to[v.index_dim])


def _transpose(equation: Equation, values: Sequence[RowValue]) -> RowValue:
    (v,), order = values, equation.params["permutation"]
    dims = tuple(v.dims[dim] for dim in order) if v.dims else ()
    return _moved(v, dims, None if v.index_dim is None else list(order).index(v.index_dim))


def _tile(equation: Equation, values: Sequence[RowValue]) -> RowValue:
    (v,), reps = values, equation.params["reps"]
    return _moved(v, tuple(((n, False), *own) for n, own in zip(reps, v.dims, strict=False)))


_LINEAR_CUTS = frozenset({"slice", "dynamic_slice", "rev", "cumsum", "reduce_window_sum"})


def _cut(equation: Equation, values: Sequence[RowValue]) -> RowValue | list[RowValue]:
    """Slices, splits, reversals, windows and scans along dims: rows meet where this is along theirs."""
    v, name, (before, _) = values[0], equation.primitive.name, _shapes(equation)
    if not are_same(values[1:]):
        return _unknown(equation, values)
    if not v.has_rows:
        return _moved(v, ()) if name == "split" or (name in _LINEAR_CUTS and v.is_linear) else derived([v])
    changes = {} if name == "split" else {"scaled": False, "const": None}
    found = []
    for out in equation.outvars:
        after = out.aval.shape
        dims = plain_factors(after)
        for dim in v.row_dims:
            dims = replaced(dims, dim, v.dims[dim] if after[dim] == before[dim] else ((after[dim], True),))
        own = v.replace(dims=dims, columns=(), **changes)
        found.append(met(own) if _touched(equation) & v.row_dims else own)
    return found


def _touched(equation: Equation) -> set[int]:
    """The dims along which an operation takes a part, changes the order, or combines elements."""
    params, name, (before, after) = equation.params, equation.primitive.name, _shapes(equation)
    if name == "rev":
        return set(params["dimensions"])
    if name in ("sort", "top_k"):
        return {params.get("dimension", params.get("axis", len(before) - 1))}
    if "window_dimensions" in params:
        return {dim for dim, size in enumerate(params["window_dimensions"]) if size != 1}
    if name.startswith("cum"):
        return {params["axis"]}
    return {dim for dim in range(len(before)) if before[dim] != after[dim]}


def _sort(equation: Equation, values: Sequence[RowValue]) -> RowValue:
    """Sorts several arrays by the first ones."""
    if not any(v.has_rows for v in values):
        return derived(values)
    own = row_by_row(values, _shapes(equation)[0])
    return met(own) if _touched(equation) & own.row_dims else own


def _concatenate(equation: Equation, values: Sequence[RowValue]) -> RowValue:
    shape, along = equation.outvars[0].aval.shape, equation.params["dimension"]
    is_columns = along == len(shape) - 1 and all(a.aval.shape[-1] == 1 for a in equation.invars)
    columns = tuple(values) if is_columns else ()
    values = [v for v, a in zip(values, equation.invars, strict=True) if a.aval.shape[along]] or values
    if are_same(values):
        return united(values, Kind.SAME, columns=columns)
    rows = [v for v in values if v.has_rows]
    if not rows:
        return linear(values)
    across = [v for v in rows if along in v.row_dims]
    narrow = [v.replace(dims=replaced(v.dims, along, ((1, False),))) if v.dims else v for v in values]
    found = row_by_row(narrow, (*shape[:along], 1, *shape[along + 1 :]), scaled=all(v.scaled for v in rows))
    found = found.replace(dims=replaced(found.dims, along, ((shape[along], bool(across)),)), columns=columns)
    return met(found) if 0 < len(across) < len(values) else found


def _stack(equation: Equation, values: Sequence[RowValue]) -> RowValue:
    (shape, _), axis = _shapes(equation), equation.params["axis"]
    if not any(v.has_rows for v in values):
        return linear(values)
    own = row_by_row(values, shape, scaled=all(v.scaled for v in values))
    return _moved(own, (*own.dims[:axis], ((len(values), False),), *own.dims[axis:]))


def _unstack(equation: Equation, values: Sequence[RowValue]) -> RowValue:
    (v,), axis = values, equation.params["axis"]
    if v.has_rows and not v.row_dims - {axis}:
        return met(mixed(values))
    part = _moved(v, (*v.dims[:axis], *v.dims[axis + 1 :]))
    return met(part) if axis in v.row_dims else part


def _pad(equation: Equation, values: Sequence[RowValue]) -> RowValue | list[RowValue]:
    v, fill = values
    if not v.has_rows:
        return linear(values)
    if fill.kind is not Kind.SAME:
        return _unknown(equation, values)
    before, after = _shapes(equation)
    own = [((size, dim in v.row_dims),) for dim, size in enumerate(after)]
    return _moved(v, tuple(v.dims[d] if before[d] == after[d] else own[d] for d in range(len(after))))


def _dynamic_update_slice(equation: Equation, values: Sequence[RowValue]) -> RowValue:
    indices, (shape, _) = values[2:], _shapes(equation)
    if not any(v.has_rows for v in values):
        return linear(values) if are_same(indices) else derived(values)
    own = row_by_row([v if v.dims or not v.has_rows else SAME for v in values], shape)
    is_whole = all(equation.invars[1].aval.shape[dim] == shape[dim] for dim in own.row_dims)
    return own if is_whole and are_same(indices) else met(own)


def _reduce(equation: Equation, values: Sequence[RowValue]) -> RowValue:
    return reduced(equation.primitive.name, values[0], equation.params["axes"], _shapes(equation)[0])


# Products ------------------------------------------------------------------------------------------------------------


def _dot_general(equation: Equation, values: Sequence[RowValue]) -> RowValue:
    (contracted, batched), shapes = equation.params["dimension_numbers"], [a.aval.shape for a in equation.invars]
    rows = [v for v in values if v.has_rows]
    others = [v for v in values if v.kind is not Kind.SAME]
    if not rows:
        kept = united(values, others[0].kind, of=others[0].of, is_affine=others[0].is_affine)
        return kept if len(others) == 1 and others[0].is_linear else derived(values)

    # The dims of the result: those of the batch, and the free ones of both operands.
    dims: list[Factors] = [((shapes[0][dim], False),) for dim in batched[0]]
    placed: list[set[int]] = []
    for v, shape, own, batch in zip(values, shapes, contracted, batched, strict=True):
        free = [dim for dim in range(len(shape)) if dim not in own and dim not in batch]
        to = {dim: k for k, dim in enumerate(batch)} | {dim: len(dims) + k for k, dim in enumerate(free)}
        dims += [((shape[dim], False),) for dim in free]
        placed.append({to[dim] for dim in v.many if dim in to})
        for dim in v.row_dims & to.keys():
            dims[to[dim]] = v.dims[dim]

    # Sums over rows: of products of values of one row.
    across = [[k for k, dim in enumerate(own) if dim in v.row_dims] for v, own in zip(values, contracted, strict=True)]
    is_apart = not (placed[0] <= placed[1] or placed[1] <= placed[0])
    meet = len(others) > len(rows) or is_apart or across[0] != across[1]
    scaled, turns = any(v.scaled for v in rows), any(v.per_turn for v in rows)
    if (across[0] or across[1]) and not turns and not any(flag for factors in dims for _, flag in factors):
        return met(mixed(values)) if meet else united(values, Kind.MEAN if scaled else Kind.SUM)
    own = united(values, Kind.ROWS, dims=tuple(dims), scaled=scaled)
    return met(own) if meet else own


def _convolution(equation: Equation, values: Sequence[RowValue]) -> RowValue | list[RowValue]:
    (image, kernel), numbers = values, equation.params["dimension_numbers"]
    dim = numbers.lhs_spec[0]
    if kernel.kind is not Kind.SAME or image.row_dims != {dim} or equation.params["batch_group_count"] != 1:
        return met(mixed(values)) if image.has_rows else _unknown(equation, values)
    dims = replaced(plain_factors(equation.outvars[0].aval.shape), numbers.out_spec[0], image.dims[dim])
    return united(values, Kind.ROWS, dims=dims)


# Lookups -------------------------------------------------------------------------------------------------------------


def _column(indices: RowValue, position: int, count: int) -> RowValue:
    """The indices of one dim, among those of `count` dims."""
    if indices.columns:
        return indices.columns[position]
    return indices if count == 1 else indices.replace(index_dim=None)


def _gather(equation: Equation, values: Sequence[RowValue]) -> RowValue:
    operand, indices = values
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    before, after = _shapes(equation)
    if not operand.has_rows and not indices.has_rows:
        return operand if indices.kind is Kind.SAME and operand.is_linear else derived(values)

    # The dims of the result: one for each dim of the indices, and those of the slices.
    batch = [dim for dim in range(len(after)) if dim not in numbers.offset_dims]
    taken = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    offset = dict(zip([d for d in range(len(before)) if d not in taken], numbers.offset_dims, strict=True))
    dims = list(plain_factors(after))
    by_index = {batch[dim] for dim in indices.row_dims if dim < len(batch)}
    for dim in indices.row_dims & set(range(len(batch))):
        dims[batch[dim]] = indices.dims[dim]

    # Where the rows of the operand are in the result. Rows meet if an index selects some, unless it is their own.
    meet, by_operand, several = False, set(), bool(operand.many or indices.many)
    for dim in operand.row_dims:
        if dim in numbers.operand_batching_dims:
            to = batch[numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(dim)]]
        elif dim in offset:
            to, meet = offset[dim], meet or sizes[dim] != before[dim]
        else:
            column = _column(indices, numbers.start_index_map.index(dim), len(numbers.start_index_map))
            to = None if column.index_dim is None or column.kind is not Kind.SAME else batch[column.index_dim]
            meet = meet or (to is None and several)
        if to is not None:
            by_operand.add(to)
            dims[to] = operand.dims[dim] if after[to] == before[dim] else ((after[to], True),)
    meet = meet or not are_same(v for v in values if not v.has_rows)
    meet = meet or (several and not (by_operand <= by_index or by_index <= by_operand))
    if not by_operand | by_index and not any(v.per_turn for v in values):
        return met(mixed(values))
    own = united(values, Kind.ROWS, dims=tuple(dims))
    return met(own) if meet else own


_SCATTERED = {"scatter-add": Kind.SUM, "scatter-max": Kind.MAX, "scatter-min": Kind.MIN}


def _scatter(equation: Equation, values: Sequence[RowValue]) -> RowValue:
    operand, indices, updates = values
    name, numbers = equation.primitive.name, equation.params["dimension_numbers"]
    shape, window = equation.outvars[0].aval.shape, list(numbers.update_window_dims)
    if not any(v.has_rows for v in values):
        is_linear = name == "scatter-add" and indices.kind is Kind.SAME
        return linear([operand, updates]) if is_linear else derived(values)

    # The dims of the updates: one for each dim of the indices, and those of the windows.
    batch = [dim for dim in range(equation.invars[2].aval.ndim) if dim not in window]
    taken = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    kept = dict(zip(window, [d for d in range(len(shape)) if d not in taken], strict=True))
    from_indices = {batch[dim] for dim in indices.row_dims if dim < len(batch)}

    # Where their rows are in the result; None if they are added up there.
    targets = numbers.scatter_dims_to_operand_dims
    columns = [_column(indices, k, len(targets)) for k in range(len(targets))]

    def place_of(dim: int) -> int | None:
        if dim in kept:
            return kept[dim]
        own = batch.index(dim)
        if own in numbers.scatter_indices_batching_dims:
            return numbers.operand_batching_dims[numbers.scatter_indices_batching_dims.index(own)]
        by_own = [to for to, v in zip(targets, columns, strict=True) if v.kind is Kind.SAME and v.index_dim == own]
        return by_own[0] if by_own else None

    places = {place_of(dim) for dim in updates.row_dims | from_indices}
    is_reduced, found = None in places, {to for to in places if to is not None}
    has_met = not are_same(v for v in values if not v.has_rows)
    if is_reduced and not found and not operand.has_rows and not has_met and not updates.per_turn:
        kind = Kind.MEAN if name == "scatter-add" and updates.scaled else _SCATTERED.get(name)
        is_whole = name != "scatter-add" or operand.const == 0
        if kind is not None and is_whole and not indices.per_turn:
            return united(values, kind)
    found |= operand.row_dims
    if not found and not any(v.per_turn for v in values):
        return met(mixed(values))
    own = united(values, Kind.ROWS, dims=tuple(((size, dim in found),) for dim, size in enumerate(shape)))
    return met(own) if is_reduced or has_met or (operand.row_dims and operand.row_dims != found) else own


_KEEPS_INDICES = frozenset({"iota", "reshape", "squeeze", "broadcast_in_dim", "transpose", "concatenate"})
_RULES: dict[str, RowRule] = {
    name: rule
    for names, rule in {
        "reshape squeeze expand_dims": _reshape,
        "broadcast_in_dim": _broadcast,
        "transpose": _transpose,
        "concatenate": _concatenate,
        "stack": _stack,
        "unstack": _unstack,
        "tile": _tile,
        "pad": _pad,
        "sort": _sort,
        "slice split dynamic_slice rev top_k cumsum cumprod cummax cummin cumlogsumexp": _cut,
        "reduce_window_sum reduce_window_max reduce_window_min": _cut,
        "dynamic_update_slice": _dynamic_update_slice,
        "reduce_sum reduce_max reduce_min reduce_or reduce_and reduce_prod reduce_xor argmax argmin": _reduce,
        "dot_general": _dot_general,
        "conv_general_dilated": _convolution,
        "gather": _gather,
        "scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub": _scatter,
        "iota": lambda equation, values: RowValue(index_dim=equation.params["dimension"]),
    }.items()
    for name in names.split()
}
