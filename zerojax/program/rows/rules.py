"""How each primitive without inner equations combines the values of its operands: see `row_values`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from zerojax.program.jaxprs import BY_ELEMENT, Equation
from zerojax.program.rows.lookups import RowPlace, met, row_gather, row_scatter
from zerojax.program.rows.values import (
    LINEAR,
    SAME,
    Factors,
    Kind,
    RowValue,
    derived,
    divided,
    elementwise,
    linear,
    mixed,
    plain_factors,
    reduced,
    replaced,
    reshaped,
    row_by_row,
    row_factors,
    united,
)
from zerojax.utils.typing import Shape

RowRule = Callable[[Equation, Sequence[RowValue], RowPlace], list[RowValue]]

_IDENTITY = frozenset({
    "name", "optimization_barrier", "sharding_constraint", "stop_gradient", "pvary", "pcast", "device_put",
    "layout_constraint", "reshard", "mesh_cast",
})  # fmt: skip
_ROW_REDUCTIONS = frozenset({
    "reduce_sum", "reduce_max", "reduce_min", "reduce_or", "reduce_and", "reduce_prod", "reduce_xor", "argmax",
    "argmin",
})  # fmt: skip
_OF_KEYS = frozenset({"random_bits", "random_split", "random_wrap", "random_unwrap", "random_fold_in", "random_seed"})
_MORE_BY_ELEMENT = frozenset({
    "bessel_i0e", "bessel_i1e", "complex", "conj", "digamma", "igamma", "igammac", "imag", "log2", "one_minus_square",
    "polygamma", "real", "regularized_incomplete_beta", "zeta",
})  # fmt: skip
_DRAWS = frozenset({"random_bits", "random_gamma", "rng_bit_generator"})
_BY_MATRIX = frozenset({"cholesky", "triangular_solve", "fft", "qr", "svd", "eigh", "eig", "lu", "householder_product"})


def values_of(equation: Equation, values: Sequence[RowValue], place: RowPlace) -> list[RowValue]:
    """The values of the results of an equation that has no inner ones, or whose inner ones are not known."""
    name = equation.primitive.name
    if name in _IDENTITY and len(equation.outvars) == len(values):
        return list(values)
    if name in BY_ELEMENT or name in _MORE_BY_ELEMENT:
        shape = equation.outvars[0].aval.shape
        return [elementwise(name, values, shape, place.source, place.num_rows, is_exact(equation))]
    rule = _RULES.get(name)
    if all(v.kind is Kind.SAME for v in values) and (rule is None or name not in _KEEPS_INDICES):
        found = united(values, Kind.SAME)
        return [_drawn(found, v.aval.shape, place) if name in _DRAWS else found for v in equation.outvars]
    if any(v.kind is Kind.MIXED for v in values):
        return [mixed(values, None)] * len(equation.outvars)
    return (rule or _unknown)(equation, values, place)


def is_exact(equation: Equation) -> bool:
    """Whether an equation does not round to integers, and keeps signs."""
    before, after = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
    if equation.primitive.name == "div":
        return jnp.issubdtype(after, jnp.inexact)
    if equation.primitive.name != "convert_element_type":
        return True
    if before == jnp.bool_:
        return True
    return after != jnp.bool_ and (jnp.issubdtype(after, jnp.inexact) or not jnp.issubdtype(before, jnp.inexact))


def _drawn(value: RowValue, shape: Shape, place: RowPlace) -> RowValue:
    """Random numbers of a device: one for each row if dim 0 can count the rows."""
    is_of_rows = value.on_device and shape and shape[0] and shape[0] % place.num_rows == 0
    if not is_of_rows or (place.num_rows == 1 and shape[0] != 1):
        return value
    return united([value], Kind.ROWS, dims=row_factors(shape, place.num_rows))


def _unknown(equation: Equation, values: Sequence[RowValue], place: RowPlace) -> list[RowValue]:
    """Results in which rows may have met. What has as many elements in the dim of the rows has rows there as well."""
    rows = [v for v in values if v.kind is Kind.ROWS]
    if not rows:
        return [derived(values)] * len(equation.outvars)
    widest = max(rows, key=lambda v: len(v.row_dims))
    shape = equation.invars[[v is widest for v in values].index(True)].aval.shape
    dims, name, found = widest.row_dims, equation.primitive.name, []
    for out in equation.outvars:
        size_of = lambda dim, out=out: out.aval.shape[dim] if dim < out.aval.ndim else None
        if not dims or any(size_of(dim) != shape[dim] for dim in dims):
            found.append(mixed(values, place.source))
            continue
        factors = list(plain_factors(out.aval.shape))
        for dim in dims:
            factors[dim] = widest.dims[dim]
        own = united(values, Kind.ROWS, dims=tuple(factors))
        is_separate = len(rows) == len([v for v in values if v.kind is not Kind.SAME]) and (
            (name in _BY_MATRIX and max(dims) < out.aval.ndim - 2) or name in _OF_KEYS
        )
        found.append(own if is_separate else met(own, place))
    return found


def _moved(value: RowValue, dims: tuple[Factors, ...] | None, index_dim: int | None = None) -> RowValue:
    """The value of the same elements in another order, or of some of them."""
    if value.kind is not Kind.ROWS:
        return dataclasses.replace(value, index_dim=index_dim, columns=())
    if dims is None:
        return united([value], Kind.MEAN, counts=(1,))
    return dataclasses.replace(value, dims=dims, columns=())


# Shapes --------------------------------------------------------------------------------------------------------------


def _reshape(equation: Equation, values: Sequence[RowValue], place: RowPlace) -> list[RowValue]:
    before, after, (v,) = equation.invars[0].aval.shape, equation.outvars[0].aval.shape, values[:1]
    dim = v.index_dim
    kept = dim if dim is not None and before[: dim + 1] == after[: dim + 1] else None
    return [_moved(v, reshaped(v.dims, after) if v.kind is Kind.ROWS else None, kept)]


def _squeeze(equation: Equation, values: Sequence[RowValue], place: RowPlace) -> list[RowValue]:
    (v,), removed, dim = values, set(equation.params["dimensions"]), values[0].index_dim
    kept = None if dim is None or dim in removed else dim - sum(each < dim for each in removed)
    return [_moved(v, reshaped(v.dims, equation.outvars[0].aval.shape) if v.kind is Kind.ROWS else None, kept)]


def _broadcast(equation: Equation, values: Sequence[RowValue], place: RowPlace) -> list[RowValue]:
    v, shape, to = values[0], equation.outvars[0].aval.shape, equation.params["broadcast_dimensions"]
    index_dim = None if v.index_dim is None else to[v.index_dim]
    if v.kind is not Kind.ROWS:
        return [_moved(v, None, index_dim)]
    dims, before = plain_factors(shape), equation.invars[0].aval.shape
    for dim, target in enumerate(to):
        wider = () if before[dim] == shape[target] else ((shape[target], False),)
        dims = replaced(dims, target, (*v.dims[dim], *wider))
    return [_moved(v, dims)]


def _transpose(equation: Equation, values: Sequence[RowValue], place: RowPlace) -> list[RowValue]:
    (v,), order = values, equation.params["permutation"]
    index_dim = None if v.index_dim is None else list(order).index(v.index_dim)
    return [_moved(v, tuple(v.dims[dim] for dim in order) if v.dims else (), index_dim)]


def _cut(equation: Equation, values: Sequence[RowValue], place: RowPlace) -> list[RowValue]:
    """Slices, reversals, windows and scans along dims: rows meet where this is along theirs."""
    v, others = values[0], values[1:]
    before = equation.invars[0].aval.shape
    if any(other.kind is not Kind.SAME for other in others):
        return _unknown(equation, values, place)
    found = []
    for out in equation.outvars:
        after = out.aval.shape
        if v.kind is not Kind.ROWS:
            found.append(_moved(v, None) if v.kind in LINEAR or v.is_affine else derived([v]))
            continue
        touched = _touched(equation, before) & v.row_dims
        dims = plain_factors(after)
        for dim in v.row_dims:
            kept = v.dims[dim] if after[dim] == before[dim] else ((after[dim], True),)
            dims = replaced(dims, dim, kept)
        own = dataclasses.replace(v, dims=dims, columns=(), scaled=False, counts=())
        found.append(met(own, place) if touched else own)
    return found


def _touched(equation: Equation, before: Shape) -> set[int]:
    """The dims along which an operation takes a part, changes the order, or combines elements."""
    params, name = equation.params, equation.primitive.name
    after = equation.outvars[0].aval.shape
    if name == "rev":
        return set(params["dimensions"])
    if name in ("sort", "top_k"):
        return {params.get("dimension", params.get("axis", len(before) - 1))}
    if "window_dimensions" in params:
        return {dim for dim, size in enumerate(params["window_dimensions"]) if size != 1}
    if name.startswith("cum"):
        return {params["axis"]}
    return {dim for dim in range(len(before)) if before[dim] != after[dim]}


def _sort(equation: Equation, values: Sequence[RowValue], place: RowPlace) -> list[RowValue]:
    """Sorts several arrays by the first ones."""
    if all(v.kind is not Kind.ROWS for v in values):
        return [derived(values)] * len(values)
    own = row_by_row(values, equation.invars[0].aval.shape, place.source)
    return [met(own, place) if _touched(equation, ()) & own.row_dims else own] * len(values)


def _concatenate(equation: Equation, values: Sequence[RowValue], place: RowPlace) -> list[RowValue]:
    shape, along = equation.outvars[0].aval.shape, equation.params["dimension"]
    columns = ()
    if along == len(shape) - 1 and all(a.aval.shape[-1] == 1 for a in equation.invars):
        columns = tuple(values)
    values = [v for v, a in zip(values, equation.invars, strict=True) if a.aval.shape[along]] or values
    if all(v.kind is Kind.SAME for v in values):
        return [united(values, Kind.SAME, columns=columns)]
    rows = [v for v in values if v.kind is Kind.ROWS]
    if not rows:
        return [linear(values)]
    across = [v for v in rows if along in v.row_dims]
    narrow = [dataclasses.replace(v, dims=replaced(v.dims, along, ((1, False),))) if v.dims else v for v in values]
    widened = (*shape[:along], 1, *shape[along + 1 :])
    found = row_by_row(narrow, widened, place.source, scaled=all(v.scaled for v in rows))
    own = ((shape[along], bool(across)),)
    found = dataclasses.replace(found, dims=replaced(found.dims, along, own), columns=columns)
    return [met(found, place) if 0 < len(across) < len(values) else found]


def _stack(equation: Equation, values: Sequence[RowValue], place: RowPlace) -> list[RowValue]:
    shape, axis = equation.invars[0].aval.shape, equation.params["axis"]
    if all(v.kind is not Kind.ROWS for v in values):
        return [linear(values)]
    own = row_by_row(values, shape, place.source, scaled=all(v.scaled for v in values))
    return [_moved(own, (*own.dims[:axis], ((len(values), False),), *own.dims[axis:]))]


def _unstack(equation: Equation, values: Sequence[RowValue], place: RowPlace) -> list[RowValue]:
    (v,), axis = values, equation.params["axis"]
    if v.kind is Kind.ROWS and not v.row_dims - {axis}:
        return [mixed(values, place.source)] * len(equation.outvars)
    part = _moved(v, (*v.dims[:axis], *v.dims[axis + 1 :]))
    return [met(part, place) if axis in v.row_dims else part] * len(equation.outvars)


def _tile(equation: Equation, values: Sequence[RowValue], place: RowPlace) -> list[RowValue]:
    (v,), reps = values, equation.params["reps"]
    return [_moved(v, tuple(((n, False), *own) for n, own in zip(reps, v.dims, strict=True)) if v.dims else ())]


def _split(equation: Equation, values: Sequence[RowValue], place: RowPlace) -> list[RowValue]:
    v, axis = values[0], equation.params["axis"]
    if v.kind is not Kind.ROWS:
        return [_moved(v, None)] * len(equation.outvars)
    parts = [_moved(v, replaced(v.dims, axis, ((o.aval.shape[axis], axis in v.row_dims),))) for o in equation.outvars]
    return [met(part, place) if axis in v.row_dims else part for part in parts]


def _pad(equation: Equation, values: Sequence[RowValue], place: RowPlace) -> list[RowValue]:
    v, fill = values
    if v.kind is not Kind.ROWS:
        return [linear([v, fill])]
    if fill.kind is not Kind.SAME:
        return _unknown(equation, values, place)
    before, after, dims = equation.invars[0].aval.shape, equation.outvars[0].aval.shape, v.dims
    for dim in range(len(after)):
        if before[dim] != after[dim]:
            dims = replaced(dims, dim, ((after[dim], dim in v.row_dims),))
    return [_moved(v, dims)]


def _dynamic_update_slice(equation: Equation, values: Sequence[RowValue], place: RowPlace) -> list[RowValue]:
    indices, shape = values[2:], equation.outvars[0].aval.shape
    if all(v.kind is not Kind.ROWS for v in values):
        return [linear(values) if all(v.kind is Kind.SAME for v in indices) else derived(values)]
    own = row_by_row([v if v.dims or v.kind is not Kind.ROWS else SAME for v in values], shape, place.source)
    is_whole = all(equation.invars[1].aval.shape[dim] == shape[dim] for dim in own.row_dims)
    is_whole = is_whole and all(v.kind is Kind.SAME for v in indices)
    return [own if is_whole else met(own, place)]


def _reduce(equation: Equation, values: Sequence[RowValue], place: RowPlace) -> list[RowValue]:
    name, shape = equation.primitive.name, equation.invars[0].aval.shape
    return [reduced(name, values[0], equation.params["axes"], shape, place.source)]


# Products ------------------------------------------------------------------------------------------------------------


def _dot_general(equation: Equation, values: Sequence[RowValue], place: RowPlace) -> list[RowValue]:
    (contracted, batched), shapes = equation.params["dimension_numbers"], [a.aval.shape for a in equation.invars]
    rows = [v for v in values if v.kind is Kind.ROWS]
    others = [v for v in values if v.kind is not Kind.SAME]
    if not rows:
        is_linear = len(others) == 1 and (others[0].kind in LINEAR or others[0].is_affine)
        kept = united(values, others[0].kind, of=others[0].of, is_affine=others[0].is_affine)
        return [kept if is_linear else derived(values)]
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
    meet = len(others) > len(rows) or not (placed[0] <= placed[1] or placed[1] <= placed[0])
    # Sums over rows: of products of values of one row, or of one times a constant.
    across = [[k for k, dim in enumerate(own) if dim in v.row_dims] for v, own in zip(values, contracted, strict=True)]
    factor = next((v.const for v in values if v.kind is Kind.SAME), None)
    meet = meet or (across[0] != across[1] and (len(rows) == 2 or factor is None))
    counts = (int(np.prod([shapes[0][dim] for dim in contracted[0]])),)
    has_rows = any(flag for factors in dims for _, flag in factors) or any(v.per_turn for v in rows)
    if (across[0] or across[1]) and not has_rows:
        kind = Kind.MEAN if any(v.scaled for v in rows) else Kind.SUM
        total = united(values, kind, counts=counts)
        total = divided(total, 1 / factor, place.num_rows) if factor else total
        return [mixed(values, place.source) if meet else total]
    own = united(values, Kind.ROWS, dims=tuple(dims), scaled=any(v.scaled for v in rows), counts=counts)
    return [met(own, place) if meet else own]


def _convolution(equation: Equation, values: Sequence[RowValue], place: RowPlace) -> list[RowValue]:
    image, kernel = values
    numbers, params = equation.params["dimension_numbers"], equation.params
    dim = numbers.lhs_spec[0]
    if kernel.kind is not Kind.SAME or image.row_dims != {dim} or params["batch_group_count"] != 1:
        return [mixed(values, place.source)] if image.kind is Kind.ROWS else _unknown(equation, values, place)
    dims = replaced(plain_factors(equation.outvars[0].aval.shape), numbers.out_spec[0], image.dims[dim])
    return [united(values, Kind.ROWS, dims=dims)]


def _iota(equation: Equation, values: Sequence[RowValue], place: RowPlace) -> list[RowValue]:
    return [RowValue(index_dim=equation.params["dimension"])]


_KEEPS_INDICES = frozenset({"iota", "reshape", "squeeze", "broadcast_in_dim", "transpose", "concatenate"})
_RULES: dict[str, RowRule] = {
    "reshape": _reshape,
    "squeeze": _squeeze,
    "expand_dims": _reshape,
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "concatenate": _concatenate,
    "split": _split,
    "stack": _stack,
    "unstack": _unstack,
    "tile": _tile,
    "pad": _pad,
    "sort": _sort,
    "dynamic_update_slice": _dynamic_update_slice,
    "dot_general": _dot_general,
    "conv_general_dilated": _convolution,
    "gather": row_gather,
    "iota": _iota,
    **dict.fromkeys(
        ["scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub"], row_scatter
    ),
    **dict.fromkeys(["slice", "rev", "dynamic_slice", "top_k", "cumsum", "cumprod", "cummax", "cummin"], _cut),
    **dict.fromkeys(["cumlogsumexp", "reduce_window_sum", "reduce_window_max", "reduce_window_min"], _cut),
    **dict.fromkeys(_ROW_REDUCTIONS, _reduce),
}
