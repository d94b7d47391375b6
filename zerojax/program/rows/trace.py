"""Follows the rows of the batch through a traced loss, to each of its outputs.

A loss is traced on the rows of one device. Each of its values is then one of a few kinds (`Kind`): the same on all
devices, a value for each row, a sum, mean, maximum or minimum over rows, or something computed from these. So it is
known how the values of the devices make the one of all rows, or that they do not.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp

from zerojax.program import jaxprs
from zerojax.program.jaxprs import Atom, ClosedJaxpr, Equation, Jaxpr, Var
from zerojax.program.rows.counts import constant, counts_rows, rows_of_dims, sized_value, with_counts_apart
from zerojax.program.rows.rules import is_exact, values_of
from zerojax.program.rows.sizes import DRAWS, Size, Sizes, SizesOfTrace
from zerojax.program.rows.values import (
    HERE,
    SAME,
    Kind,
    RowValue,
    are_same,
    joined,
    met,
    mixed,
    plain_factors,
    replaced,
    united,
)
from zerojax.utils.typing import Array, ArrayLike

if TYPE_CHECKING:
    from jaxlib._jax import Traceback

_READ_CALLS = jaxprs.CALLS | {
    "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "remat", "remat2", "checkpoint", "shard_map",
    "custom_partitioning",
}  # fmt: skip
_OF_INDICES = frozenset({"lt", "add"})  # by which JAX replaces negative indices
_GATHERS = frozenset({"psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant"})
# What is raised where JAX has changed the parameters of a primitive.
_CHANGED = AttributeError, IndexError, KeyError, TypeError, ValueError
_MOST_TURNS = 8  # of a loop, until the kinds of its carry are what they were; each turn can only make them less exact


@dataclasses.dataclass(frozen=True)
class RowTrace:
    """The values of a traced loss."""

    closed: ClosedJaxpr  # its closed jaxpr, without nested jits
    values: dict[Var, RowValue]  # of the variables
    traces: dict[int, Traceback | None]  # the tracebacks of the equations at which rows of the device met
    drawn: Traceback | None  # that of the first that draws numbers for rows from a key that all devices have
    cut: Traceback | None  # that of the first that takes elements for rows from an array that all devices have

    def of(self, atom: Atom) -> RowValue:
        return _value_of(atom, self.values)


def flattened(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A jaxpr without nested jits, in which sums over rows are equations of their own."""
    return jaxprs.inlined(closed, _with_sums_apart)


def trace_rows(
    flat: ClosedJaxpr, inputs: Sequence[RowValue], num_rows: int, axes: Collection[str], sizes: SizesOfTrace
) -> RowTrace:
    """Follows rows through a loss on one device's rows.

    Args:
        flat: the closed jaxpr of the loss, as from `flattened`.
        inputs: the values of its inputs.
        num_rows: the number of rows of the device.
        axes: the names of the mesh axes that split the batch.
        sizes: what counts rows in it.
    """
    flat, counts = with_counts_apart(flat, sizes, num_rows)
    by_equation = {id(e): own for e, own in zip(jaxprs.walk(flat.jaxpr.eqns), sizes.equations, strict=True)}
    reader = _Reader(num_rows, frozenset(axes), by_equation)
    scope = _start(flat.jaxpr, inputs, flat.consts) | counts
    traces = {}
    for k, equation in enumerate(flat.jaxpr.eqns):
        reader.met_at = None
        reader.visit(equation, scope)
        for v in (*equation.outvars, *jaxprs.variables(equation)):
            if HERE in scope[v].sources:
                scope[v] = scope[v].replace(sources=scope[v].sources - {HERE} | {k})
                traces[k] = reader.met_at or equation.source_info.traceback
    return RowTrace(flat, scope, traces, reader.drawn_at, reader.cut_at)


def _with_sums_apart(equation: Equation, operands: list[Array]) -> list[Array] | None:
    """The result of a `scatter-add` into zeros, added to the operand: what is the same and the sum are then apart."""
    if equation.primitive.name != "scatter-add":
        return None
    operand, indices, updates = operands
    total = equation.primitive.bind(jnp.zeros_like(operand), indices, updates, **equation.params)
    return [jnp.add(operand, total)]


def _value_of(atom: Atom, scope: dict[Var, RowValue]) -> RowValue:
    return scope[atom] if jaxprs.is_var(atom) else constant(atom.val)


def _start(jaxpr: Jaxpr, inputs: Sequence[RowValue], consts: Sequence[ArrayLike]) -> dict[Var, RowValue]:
    """The values of the variables of a jaxpr before its first equation."""
    scope = dict(zip(jaxpr.constvars, map(constant, consts), strict=False))
    return dict.fromkeys(jaxpr.constvars, SAME) | scope | dict(zip(jaxpr.invars, inputs, strict=True))


@dataclasses.dataclass
class _Reader:
    """Reads equations of a loss, and those inside of them."""

    num_rows: int  # of the device
    axes: frozenset[str]  # the mesh axes that split the batch
    sizes: Mapping[int, Sizes]  # what counts rows in each equation, by its id
    met_at: Traceback | None = None  # the traceback of the first equation at which rows of the device met
    drawn_at: Traceback | None = None  # that of the first draw for rows that all devices repeat
    cut_at: Traceback | None = None  # that of the first elements for rows that all devices take from the same array

    def visit(self, equation: Equation, scope: dict[Var, RowValue]) -> None:
        """Adds the values of the results of an equation to the scope."""
        sizes = self.sizes.get(id(equation))
        operands = [_value_of(a, scope) for a in equation.invars]
        if sizes is not None and counts_rows(equation):  # inside of another equation, numbers are where they were
            sized = zip(equation.invars, operands, sizes.numbers, strict=True)
            operands = [v if jaxprs.is_var(a) or size is Size.FIXED else sized_value(v, size) for a, v, size in sized]
        is_local = any(v.is_local for v in operands)
        try:
            found = self.values(equation, operands)
        except _CHANGED:
            found = [met(mixed(operands)) if is_local else SAME] * len(equation.outvars)
        if sizes is not None:
            is_index = equation.primitive.name in _OF_INDICES and any(v.index_dim is not None for v in operands)
            sized = zip(found, equation.outvars, sizes.dims, strict=True)
            found = found if is_index else [self._sized(equation, *own) for own in sized]
        if any(HERE in v.sources for v in found) and not any(HERE in v.sources for v in operands):
            self.met_at = self.met_at or equation.source_info.traceback
        scope.update(zip(equation.outvars, found, strict=True))
        if is_local:
            written = filter(jaxprs.is_reference, jaxprs.variables(equation))
            scope.update(dict.fromkeys(written, met(mixed(operands))))

    def _sized(self, equation: Equation, value: RowValue, result: Var, dims: Collection[int]) -> RowValue:
        """The value of a result, of which some dims depend on the number of rows."""
        if dims and value.kind is Kind.SAME:
            name, traceback = equation.primitive.name, equation.source_info.traceback
            if name in DRAWS and not value.on_device:
                self.drawn_at = self.drawn_at or traceback
            if name in ("slice", "dynamic_slice"):
                self.cut_at = self.cut_at or traceback
            is_repeated = name == "broadcast_in_dim"
            return rows_of_dims(value, result.aval.shape, dims, self.num_rows, is_repeated)
        # If rows are divided between dims, the outermost has to count them: its elements are then groups of rows.
        is_split = equation.primitive.name == "reshape" and value.row_dims and dims
        return met(value) if is_split and min(value.many, default=min(dims)) not in dims else value

    def read(self, jaxpr: Jaxpr, inputs: Sequence[RowValue], consts: Sequence[ArrayLike]) -> dict[Var, RowValue]:
        """The values of all variables of an inner jaxpr."""
        scope = _start(jaxpr, inputs, consts)
        for equation in jaxpr.eqns:
            self.visit(equation, scope)
        return scope

    def results(self, inner: ClosedJaxpr, inputs: Sequence[RowValue]) -> list[RowValue]:
        """The values of the outputs of an inner jaxpr."""
        scope = self.read(inner.jaxpr, inputs, inner.consts)
        return [_value_of(a, scope) for a in inner.jaxpr.outvars]

    def values(self, equation: Equation, values: Sequence[RowValue]) -> list[RowValue]:
        name, inner = equation.primitive.name, list(jaxprs.sub_jaxprs(equation))
        communicates = jaxprs.communicates_over(equation, self.axes)
        if communicates and not inner:
            return self._collective(equation, values)
        if inner and not communicates and not any(v.is_local for v in values):
            return [united(values, Kind.SAME)] * len(equation.outvars)
        if name in _READ_CALLS and len(inner) == 1 and len(inner[0].invars) == len(values):
            jaxpr, consts = jaxprs.called(equation)
            scope = self.read(jaxpr, _entered(jaxpr, values), consts)
            found = [_value_of(a, scope) for a in jaxpr.outvars]
        elif name in ("scan", "while", "cond"):
            found = {"scan": self._scan, "while": self._while, "cond": self._cond}[name](equation, values)
        else:
            return values_of(equation, values)
        # What it is computed from cannot be read outside of the inner equations.
        has_rows = any(v.has_rows for v in values)
        return [met(mixed([v])) if v.kind is Kind.DERIVED and has_rows else v for v in found]

    def _collective(self, equation: Equation, values: Sequence[RowValue]) -> list[RowValue]:
        name, num = equation.primitive.name, len(equation.outvars)
        if name in ("pvary", "pcast", "pbroadcast"):
            return list(values)
        is_whole = self.axes <= jaxprs.named_axes(equation) and equation.params.get("axis_index_groups") is None
        if name in _GATHERS and is_whole:
            return [RowValue(on_params=any(v.on_params for v in values))] * num
        return [united(values, Kind.SAME).replace(on_device=True) if are_same(values) else met(mixed(values))] * num

    # Control flow -----------------------------------------------------------------------------------------------------

    def _cond(self, equation: Equation, values: Sequence[RowValue]) -> list[RowValue]:
        branches = [self.results(branch, values[1:]) for branch in equation.params["branches"]]
        found = branches[0]
        for other in branches[1:]:
            found = _joined(found, other, equation.outvars)
        return [_chosen(v, values[0]) for v in found]

    def _while(self, equation: Equation, values: Sequence[RowValue]) -> list[RowValue]:
        params = equation.params
        num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
        of_cond, of_body = values[:num_cond], values[num_cond : num_cond + num_body]
        run = lambda carry: self.results(params["body_jaxpr"], [*of_body, *carry])
        carry = self._fixed_point(run, list(values[num_cond + num_body :]), equation.outvars)
        (goes_on,) = self.results(params["cond_jaxpr"], [*of_cond, *carry])
        return [_chosen(v, goes_on) for v in carry]

    def _fixed_point(
        self, run: Callable[[list[RowValue]], list[RowValue]], carry: list[RowValue], variables: Sequence[Atom]
    ) -> list[RowValue]:
        """The values of a carry before every turn of a loop, and after the last."""
        for _ in range(_MOST_TURNS):
            before, carry = carry, _joined(carry, run(carry), variables)
            if carry == before:
                return carry
        return [v if v.kind is Kind.SAME else met(mixed([v])) for v in carry]

    def _scan(self, equation: Equation, values: Sequence[RowValue]) -> list[RowValue]:
        scan = jaxprs.scan_params(equation)
        num, end = scan.num_consts, scan.num_consts + scan.num_carry
        consts, start, stacks = values[:num], list(values[num:end]), values[end:]
        by_rows = any(0 in v.row_dims for v in stacks)
        body, body_consts = scan.body.jaxpr, scan.body.consts

        # The values of a turn.
        turns = [
            v.replace(dims=v.dims[1:], per_turn=v.per_turn or 0 in v.row_dims) if v.has_rows else _slice(v)
            for v in stacks
        ]
        scope_of = lambda carry: self.read(body, [*consts, *carry, *turns], body_consts)
        carried, stacked = body.outvars[: scan.num_carry], body.outvars[scan.num_carry :]

        # Sums, maxima and minima over turns, if these are of rows; and all else that is carried.
        sums = _over_turns(body, scan, start, scope_of(start)) if by_rows else {}

        def run(carry: list[RowValue]) -> list[RowValue]:
            scope = scope_of(carry)
            return [start[k] if k in sums else _value_of(a, scope) for k, a in enumerate(carried)]

        carry = self._fixed_point(run, start, carried)
        scope = scope_of(carry)

        # Leave the loop.
        enclosing = any(v.per_turn for v in [*consts, *start])
        found = [sums.get(k, v) for k, v in enumerate(carry)]
        if by_rows:
            found = [met(mixed([v])) if v.has_rows and v.per_turn else v for v in found]
        for v in (_value_of(a, scope) for a in stacked):
            lead = ((scan.length, by_rows and v.per_turn),)
            found.append(_slice(v.replace(dims=(lead, *v.dims), per_turn=enclosing) if v.has_rows else v))
        return found


def _joined(first: list[RowValue], second: list[RowValue], variables: Sequence[Atom]) -> list[RowValue]:
    return [joined(a, b, v.aval.shape) for a, b, v in zip(first, second, variables, strict=True)]


def _chosen(value: RowValue, by: RowValue) -> RowValue:
    """A value that is computed only if `by` says so."""
    if by.kind is Kind.SAME:
        return value.replace(on_device=value.on_device or by.on_device)
    return met(value.replace(sources=value.sources | by.sources)) if value.has_rows else met(mixed([value, by]))


def _slice(value: RowValue) -> RowValue:
    return value.replace(index_dim=None, columns=())


_ACCUMULATES = {"add": "add", "add_any": "add", "max": "max", "or": "max", "min": "min", "and": "min"}


def _over_turns(
    body: Jaxpr, scan: jaxprs.ScanParams, start: Sequence[RowValue], scope: dict[Var, RowValue]
) -> dict[int, RowValue]:
    """The values of those carries that add up rows, or of which a turn takes the larger or the smaller."""
    found = {}
    for k, before in enumerate(body.invars[scan.num_consts : scan.num_consts + scan.num_carry]):
        name, others = _accumulated(body, before, body.outvars[k])
        terms = [_value_of(a, scope) for a in others]
        are_of_rows = all(v.has_rows and v.per_turn and not v.row_dims for v in terms)
        if start[k].kind is not Kind.SAME or not terms or not are_of_rows:
            continue
        if name == "add" and start[k].const == 0:
            found[k] = united(terms, Kind.MEAN if all(v.scaled for v in terms) else Kind.SUM)
        elif name in ("max", "min"):
            found[k] = united(terms, Kind.MAX if name == "max" else Kind.MIN)
    return found


def _accumulated(body: Jaxpr, before: Var, after: Atom) -> tuple[str | None, list[Atom]]:
    """The operation by which a turn of a loop makes a carry of the one before and other values, and these."""
    producers = {v: equation for equation in body.eqns for v in equation.outvars}
    uses = collections.Counter(filter(jaxprs.is_var, [*(a for e in body.eqns for a in e.invars), *body.outvars]))
    reached = {before}  # what is computed from it
    for equation in body.eqns:
        if reached & set(jaxprs.variables(equation)):
            reached.update(equation.outvars)
    name, others = None, []
    while after is not before:
        if not jaxprs.is_var(after) or uses[after] != 1 or after not in producers:
            return None, []
        equation = producers[after]
        own = _ACCUMULATES.get(equation.primitive.name)
        on_path = [a for a in equation.invars if jaxprs.is_var(a) and a in reached]
        is_copy = jaxprs.preserves_elements(equation) and is_exact(equation)
        if (not is_copy and (own is None or name not in (None, own))) or len(on_path) != 1:
            return None, []
        name = name if is_copy else own
        others += [a for a in equation.invars if a is not on_path[0]]
        after = on_path[0]
    return (name, others) if uses[before] == 1 else (None, [])


def _entered(inner: Jaxpr, values: Sequence[RowValue]) -> list[RowValue]:
    """The operands of a call as its jaxpr sees them, in which dims may be divided over other axes of the mesh."""
    found = []
    for v, own in zip(values, inner.invars, strict=True):
        if v.kind is Kind.ROWS:
            plain = plain_factors(own.aval.shape)
            for dim in v.row_dims:
                plain = replaced(plain, dim, v.dims[dim])
            v = v.replace(dims=plain)
        found.append(v)
    return found
