"""Follows the rows of the batch through a traced loss, to each of its outputs.

A loss is traced on the rows of one device. Each of its values is then one of a few kinds (`Kind`): the same on all
devices, a value for each row, a sum, mean, maximum or minimum over rows, or something computed from these. So it is
known how the values of the devices make the one of all rows, or that they do not.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from zerojax.program import jaxprs
from zerojax.program.jaxprs import Atom, ClosedJaxpr, Equation, Jaxpr, Var
from zerojax.program.rows.lookups import RowPlace
from zerojax.program.rows.rules import is_exact, values_of
from zerojax.program.rows.values import SAME, Kind, RowValue, joined, mixed, plain_factors, replaced, united

_READ_CALLS = jaxprs.CALLS | {
    "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "remat", "remat2", "checkpoint", "shard_map",
    "custom_partitioning",
}  # fmt: skip
_GATHERS = frozenset({"psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant"})
# What is raised where JAX has changed the parameters of a primitive.
_CHANGED = AttributeError, IndexError, KeyError, TypeError, ValueError
_MOST_TURNS = 8  # of a loop, until the kinds of its carry are what they were; each turn can only make them less exact


@dataclasses.dataclass(frozen=True)
class RowTrace:
    """The values of a traced loss.

    Attributes:
        closed: its closed jaxpr, without nested jits.
        values: of the variables.
        traces: the tracebacks of the equations at which rows of the device met.
    """

    closed: ClosedJaxpr
    values: dict[Var, RowValue]
    traces: dict[int, Any]

    def of(self, atom: Atom) -> RowValue:
        return self.values[atom] if jaxprs.is_var(atom) else _literal(atom.val)


def trace_rows(closed: ClosedJaxpr, inputs: Sequence[RowValue], num_rows: int, axes: Collection[str]) -> RowTrace:
    """Follows rows through a loss on one device's rows.

    Args:
        closed: the closed jaxpr of the loss.
        inputs: the values of its inputs.
        num_rows: the number of rows of the device.
        axes: the names of the mesh axes that split the batch.
    """
    flat = jaxprs.inlined(closed, jaxprs.is_call, _with_sums_apart)
    reader = _Reader(num_rows, frozenset(axes), {})
    return RowTrace(flat, reader.read(flat.jaxpr, inputs, flat.consts), reader.traces)


def _with_sums_apart(equation: Equation, operands: Sequence[Any]) -> list[Any] | None:
    """The result of a `scatter-add` into zeros, added to the operand: what is the same and the sum are then apart."""
    if equation.primitive.name != "scatter-add":
        return None
    operand, indices, updates = operands
    total = equation.primitive.bind(jnp.zeros_like(operand), indices, updates, **equation.params)
    return [jnp.add(operand, total)]


def _literal(value: Any) -> RowValue:
    is_number = np.ndim(value) == 0 and jnp.issubdtype(jnp.result_type(value), jnp.number)
    return RowValue(const=float(np.real(value))) if is_number else SAME


@dataclasses.dataclass
class _Reader:
    """Reads jaxprs. Inside an equation of the whole loss, `source` is that equation, and otherwise -1."""

    num_rows: int
    axes: frozenset[str]
    traces: dict[int, Any]
    source: int = -1

    def read(self, jaxpr: Jaxpr, inputs: Sequence[RowValue], consts: Sequence[Any] = ()) -> dict[Var, RowValue]:
        """The values of all variables of a jaxpr."""
        scope: dict[Var, RowValue] = dict.fromkeys(jaxpr.constvars, SAME) | dict(zip(jaxpr.invars, inputs, strict=True))
        scope |= {v: _literal(const) for v, const in zip(jaxpr.constvars, consts, strict=False)}
        is_outermost = self.source < 0
        for k, equation in enumerate(jaxpr.eqns):
            self.source = k if is_outermost else self.source
            operands = [scope[a] if jaxprs.is_var(a) else _literal(a.val) for a in equation.invars]
            try:
                found = self.equation(equation, operands)
            except _CHANGED:
                unknown = mixed(operands, self.source) if any(v.is_local for v in operands) else SAME
                found = [unknown] * len(equation.outvars)
            if any(self.source in v.sources for v in found) and not any(self.source in v.sources for v in operands):
                self.traces.setdefault(self.source, equation.source_info.traceback)
            scope.update(zip(equation.outvars, found, strict=True))
            refs = [v for v in equation.invars if jaxprs.is_var(v) and jaxprs.is_reference(v)]
            scope.update({ref: mixed(operands, self.source) for ref in refs if any(v.is_local for v in operands)})
        self.source = -1 if is_outermost else self.source
        return scope

    def results(self, jaxpr: Jaxpr, inputs: Sequence[RowValue]) -> list[RowValue]:
        """The values of the outputs of an inner jaxpr."""
        inner = getattr(jaxpr, "jaxpr", jaxpr)
        scope = self.read(inner, inputs, getattr(jaxpr, "consts", ()))
        return [scope[a] if jaxprs.is_var(a) else _literal(a.val) for a in inner.outvars]

    def equation(self, equation: Equation, values: Sequence[RowValue]) -> list[RowValue]:
        name, place = equation.primitive.name, RowPlace(self.source, self.num_rows)
        named = jaxprs.communicates_over(equation, self.axes)
        inner = list(jaxprs.sub_jaxprs(equation))
        if named and not inner:
            return self._collective(equation, values)
        if all(v.kind is Kind.SAME and not v.on_device for v in values) and not named and inner:
            return [united(values, Kind.SAME)] * len(equation.outvars)
        if name in _READ_CALLS and len(inner) == 1 and len(inner[0].invars) == len(values):
            return self._leave(self.results(_closed_inner(equation, inner[0]), _entered(inner[0], values)), values)
        loops: dict[str, Callable[..., list[RowValue]]] = {"scan": self._scan, "while": self._while, "cond": self._cond}
        if name in loops:
            return self._leave(loops[name](equation, values), values)
        return values_of(equation, values, place)

    def _leave(self, found: Sequence[RowValue], operands: Sequence[RowValue]) -> list[RowValue]:
        """Results of an equation as they are outside of it, where what they are computed from cannot be read."""
        has_rows = any(v.kind is Kind.ROWS for v in operands)
        is_hidden = lambda v: v.kind is Kind.DERIVED and has_rows
        return [mixed([v], self.source) if is_hidden(v) else v for v in found]

    def _collective(self, equation: Equation, values: Sequence[RowValue]) -> list[RowValue]:
        params, name = equation.params, equation.primitive.name
        names = params.get("axes", params.get("axis_name", ()))
        over = {names} if isinstance(names, str) else set(names)
        is_whole = self.axes <= over and params.get("axis_index_groups") is None
        if name in ("pvary", "pcast", "pbroadcast"):
            return list(values)
        if name in _GATHERS and is_whole:
            on_params = any(v.on_params for v in values)
            return [RowValue(on_params=on_params)] * len(equation.outvars)
        if all(v.kind is Kind.SAME for v in values):
            own = dataclasses.replace(united(values, Kind.SAME), on_device=True)
        else:
            own = mixed(values, self.source)
        return [own] * len(equation.outvars)

    # Control flow -----------------------------------------------------------------------------------------------------

    def _cond(self, equation: Equation, values: Sequence[RowValue]) -> list[RowValue]:
        branches = [self.results(branch, values[1:]) for branch in equation.params["branches"]]
        shapes = [v.aval.shape for v in equation.outvars]
        found = branches[0]
        for other in branches[1:]:
            found = [joined(a, b, shape, self.source) for a, b, shape in zip(found, other, shapes, strict=True)]
        return [self._chosen(v, values[0]) for v in found]

    def _chosen(self, value: RowValue, by: RowValue) -> RowValue:
        """A value that is computed only if `by` says so."""
        if by.kind is Kind.SAME:
            return dataclasses.replace(value, on_device=value.on_device or by.on_device)
        if value.kind is Kind.ROWS:
            return dataclasses.replace(value, sources=value.sources | by.sources | {self.source})
        return mixed([value, by], self.source)

    def _while(self, equation: Equation, values: Sequence[RowValue]) -> list[RowValue]:
        params = equation.params
        num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
        of_cond, of_body = values[:num_cond], values[num_cond : num_cond + num_body]
        shapes = [v.aval.shape for v in equation.outvars]
        run = lambda carry: self.results(params["body_jaxpr"], [*of_body, *carry])
        carry = self._fixed_point(run, list(values[num_cond + num_body :]), shapes)
        (goes_on,) = self.results(params["cond_jaxpr"], [*of_cond, *carry])
        return [self._chosen(v, goes_on) for v in carry]

    def _fixed_point(
        self, run: Callable[..., list[RowValue]], carry: list[RowValue], shapes: Sequence[Any]
    ) -> list[RowValue]:
        """The values of a carry before every turn of a loop, and after the last."""
        for _ in range(_MOST_TURNS):
            after = run(carry)
            new = [joined(a, b, shape, self.source) for a, b, shape in zip(carry, after, shapes, strict=True)]
            if new == carry:
                return carry
            carry = new
        return [v if v.kind is Kind.SAME else mixed([v], self.source) for v in carry]

    def _scan(self, equation: Equation, values: Sequence[RowValue]) -> list[RowValue]:
        scan = jaxprs.scan_params(equation)
        num, end = scan.num_consts, scan.num_consts + scan.num_carry
        consts, start, stacks = values[:num], list(values[num:end]), values[end:]
        by_rows = any(0 in v.row_dims for v in stacks)
        turns = [
            dataclasses.replace(v, dims=v.dims[1:], per_turn=v.per_turn or 0 in v.row_dims, counts=(), scaled=v.scaled)
            if v.kind is Kind.ROWS
            else dataclasses.replace(v, index_dim=None, columns=())
            for v in stacks
        ]
        body = getattr(scan.body, "jaxpr", scan.body)
        body_consts = getattr(scan.body, "consts", ())
        scope_of = lambda carry: self.read(body, [*consts, *carry, *turns], body_consts)
        read = lambda scope, a: scope[a] if jaxprs.is_var(a) else _literal(a.val)
        run = lambda carry: [read(scope_of(carry), a) for a in body.outvars[: scan.num_carry]]
        # Sums, maxima and minima over turns, if these are of rows.
        sums = self._over_turns(body, scan, start, scope_of(start)) if by_rows else {}
        kept = lambda carry: [start[k] if k in sums else v for k, v in enumerate(run(carry))]
        carry = self._fixed_point(kept, start, [a.aval.shape for a in body.outvars[: scan.num_carry]])
        scope = scope_of(carry)
        # Leave the loop.
        enclosing = any(v.per_turn for v in [*consts, *start])
        found = [sums.get(k, v) for k, v in enumerate(carry)]
        if by_rows:
            found = [mixed([v], self.source) if v.kind is Kind.ROWS and v.per_turn else v for v in found]
        for a in body.outvars[scan.num_carry :]:
            v = read(scope, a)
            if v.kind is Kind.ROWS:
                lead = ((scan.length, by_rows and v.per_turn),)
                v = dataclasses.replace(v, dims=(lead, *v.dims), per_turn=enclosing)
            found.append(dataclasses.replace(v, index_dim=None, columns=()))
        return found

    def _over_turns(
        self, body: Any, scan: Any, start: Sequence[RowValue], scope: dict[Var, RowValue]
    ) -> dict[int, RowValue]:
        """The values of those carries that add up rows, or of which a turn takes the larger or the smaller."""
        num, found = scan.num_consts, {}
        for k in range(scan.num_carry):
            before = body.invars[num + k]
            name, others = _accumulated(body, before, body.outvars[k])
            terms = [scope[a] if jaxprs.is_var(a) else _literal(a.val) for a in others]
            is_of_rows = [v.kind is Kind.ROWS and v.per_turn and not v.row_dims for v in terms]
            if start[k].kind is not Kind.SAME or not terms or not all(is_of_rows):
                continue
            if name == "add" and start[k].const == 0:
                counts = (*(scan.length * count for count in terms[0].counts), scan.length)
                found[k] = united(terms, Kind.MEAN if all(v.scaled for v in terms) else Kind.SUM, counts=counts)
            elif name in ("max", "min"):
                found[k] = united(terms, Kind.MAX if name == "max" else Kind.MIN)
        return found


def _accumulated(body: Any, before: Var, after: Atom) -> tuple[str | None, list[Atom]]:
    """The operation by which a turn of a loop makes a carry of the one before and other values, and these."""
    producers = {v: equation for equation in body.eqns for v in equation.outvars}
    read = [*(a for equation in body.eqns for a in equation.invars), *body.outvars]
    uses = collections.Counter(filter(jaxprs.is_var, read))
    names, others = {"add": "add", "add_any": "add", "max": "max", "or": "max", "min": "min", "and": "min"}, []
    name = None
    while after is not before:
        if not jaxprs.is_var(after) or uses[after] != 1 or after not in producers:
            return None, []
        equation = producers[after]
        if jaxprs.preserves_elements(equation) and is_exact(equation):
            after = equation.invars[0]
            continue
        own = names.get(equation.primitive.name)
        leads = [_leads_to(producers, a, before) for a in equation.invars]
        if own is None or name not in (None, own) or leads.count(True) != 1:
            return None, []
        name = own
        others += [a for a, flag in zip(equation.invars, leads, strict=True) if not flag]
        after = equation.invars[leads.index(True)]
    return (name, others) if uses[before] == 1 else (None, [])


def _leads_to(producers: dict[Var, Equation], atom: Atom, origin: Var) -> bool:
    """Whether a value is computed from `origin`."""
    pending, seen = [atom], set()
    while pending:
        a = pending.pop()
        if a is origin:
            return True
        if jaxprs.is_var(a) and a not in seen and a in producers:
            seen.add(a)
            pending.extend(jaxprs.variables(producers[a]))
    return False


def _entered(inner: Jaxpr, values: Sequence[RowValue]) -> list[RowValue]:
    """The operands of a call as its jaxpr sees them, in which dims may be divided over other axes of the mesh."""
    found = []
    for v, own in zip(values, inner.invars, strict=True):
        if v.kind is Kind.ROWS:
            plain = plain_factors(own.aval.shape)
            for dim in v.row_dims:
                plain = replaced(plain, dim, v.dims[dim])
            v = dataclasses.replace(v, dims=plain)
        found.append(v)
    return found


def _closed_inner(equation: Equation, inner: Jaxpr) -> Any:
    """The jaxpr of a call with its constants, if it has any."""
    for value in equation.params.values():
        if getattr(value, "jaxpr", None) is inner:
            return value
    return inner
