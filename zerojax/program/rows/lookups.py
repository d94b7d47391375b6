"""How lookups of rows in arrays, and their transpositions, combine the values of their operands: see `row_values`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from zerojax.program.jaxprs import Equation
from zerojax.program.rows.values import LINEAR, Kind, RowValue, derived, linear, mixed, plain_factors, united


class RowPlace(NamedTuple):
    """Where an equation is.

    Attributes:
        source: the equation of the whole loss that it is, or that contains it.
        num_rows: the number of rows of the device.
    """

    source: int
    num_rows: int


def met(value: RowValue, place: RowPlace) -> RowValue:
    """The value, where rows of the device may have met."""
    return dataclasses.replace(value, sources=value.sources | {place.source})


def _column(indices: RowValue, position: int, count: int) -> RowValue:
    """The indices of one dim, among those of `count` dims."""
    if indices.columns:
        return indices.columns[position]
    return indices if count == 1 else dataclasses.replace(indices, index_dim=None)


def row_gather(equation: Equation, values: Sequence[RowValue], place: RowPlace) -> list[RowValue]:
    operand, indices = values
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    if Kind.ROWS not in (operand.kind, indices.kind):
        is_same = indices.kind is Kind.SAME and (operand.kind in LINEAR or operand.is_affine)
        return [operand if is_same else derived(values)]
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
            count = len(numbers.start_index_map)
            column = _column(indices, numbers.start_index_map.index(dim), count)
            to = None if column.index_dim is None or column.kind is not Kind.SAME else batch[column.index_dim]
            meet = meet or (to is None and several)
        if to is not None:
            by_operand.add(to)
            dims[to] = operand.dims[dim] if after[to] == before[dim] else ((after[to], True),)
    meet = meet or any(v.kind not in (Kind.SAME, Kind.ROWS) for v in values)
    meet = meet or (several and not (by_operand <= by_index or by_index <= by_operand))
    if not by_operand | by_index and not any(v.per_turn for v in values):
        return [mixed(values, place.source)]
    own = united(values, Kind.ROWS, dims=tuple(dims))
    return [met(own, place) if meet else own]


_SCATTERED = {"scatter-add": Kind.SUM, "scatter-max": Kind.MAX, "scatter-min": Kind.MIN}


def row_scatter(equation: Equation, values: Sequence[RowValue], place: RowPlace) -> list[RowValue]:
    operand, indices, updates = values
    name, numbers = equation.primitive.name, equation.params["dimension_numbers"]
    shape, window = equation.outvars[0].aval.shape, list(numbers.update_window_dims)
    if all(v.kind is not Kind.ROWS for v in values):
        is_linear = name == "scatter-add" and indices.kind is Kind.SAME
        return [linear([operand, updates]) if is_linear else derived(values)]
    # The dims of the updates: one for each dim of the indices, and those of the windows.
    batch = [dim for dim in range(equation.invars[2].aval.ndim) if dim not in window]
    taken = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    kept = dict(zip(window, [d for d in range(len(shape)) if d not in taken], strict=True))
    from_indices = {batch[dim] for dim in indices.row_dims if dim < len(batch)}
    # Where their rows are in the result, unless they are added up there.
    found, is_reduced = set(), False
    for dim in updates.row_dims | from_indices:
        own = batch.index(dim) if dim in batch else None
        to = kept.get(dim)
        if own is not None and own in numbers.scatter_indices_batching_dims:
            to = numbers.operand_batching_dims[numbers.scatter_indices_batching_dims.index(own)]
        elif own is not None:
            count = len(numbers.scatter_dims_to_operand_dims)
            columns = [_column(indices, k, count) for k in range(count)]
            own_dims = [
                numbers.scatter_dims_to_operand_dims[k]
                for k, column in enumerate(columns)
                if column.kind is Kind.SAME and column.index_dim == own
            ]
            to = own_dims[0] if own_dims else None
        found |= set() if to is None else {to}
        is_reduced = is_reduced or to is None
    has_met = any(v.kind not in (Kind.SAME, Kind.ROWS) for v in values)
    if is_reduced and not found and operand.kind is not Kind.ROWS and not has_met and not updates.per_turn:
        kind = Kind.MEAN if name == "scatter-add" and updates.scaled else _SCATTERED.get(name)
        is_whole = name != "scatter-add" or operand.const == 0
        if kind is not None and is_whole and not indices.per_turn:
            return [united(values, kind)]
    found |= operand.row_dims
    if not found and not any(v.per_turn for v in values):
        return [mixed(values, place.source)]
    dims = tuple(((size, dim in found),) for dim, size in enumerate(shape))
    own = united(values, Kind.ROWS, dims=dims)
    return [met(own, place) if is_reduced or has_met or (operand.row_dims and operand.row_dims != found) else own]
