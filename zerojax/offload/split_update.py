"""Splits the update of an optimizer into parts that can be computed for one piece of a parameter at a time.

The update is traced. Operations on the elements or the rows of one parameter, or on the positions in it, are computed
piece by piece, see `Rows`. All else is computed once, on whole arrays, and must not depend on arrays in host
memory:

    gradients ──► global norm ──► scale ─────┐                                   once, on whole arrays
    step count ──► schedule ──► learning rate┤
                                             ▼
    a piece of a gradient, its moments and its parameter ──► their new values    for each piece

Whole matrices that have owners (`step.owned_matrices`) divide the update of a parameter into two passes: what they are
multiplied from, and what follows from their products.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from zerojax.program import jaxprs
from zerojax.program.couplings import Coupling, around
from zerojax.program.jaxprs import Atom, ClosedJaxpr, Equation, Var
from zerojax.step.optimizers import optimizer_function
from zerojax.utils.text import error_text
from zerojax.utils.typing import Array, ArrayLike, Shape


class Operand(NamedTuple):
    """An argument or a result of an update."""

    leaf: int | None = None  # the parameter whose rows it has; None for all else, such as a step count
    in_host: bool = False  # whether it is in host memory


class Pass(NamedTuple):
    """What is computed for a piece of a parameter."""

    equations: list[Equation]
    reads: list[int]  # the positions of arguments of the parameter
    results: list[int]  # the positions of results
    values: list[Var]  # that are results too: what its owners need of the parameter


class SplitUpdate:
    """The update of an optimizer, in two parts.

    Args:
        closed: the update, from flat arrays to flat arrays, without nested jits. An argument and the result at its
            position are the same array, before and after the update.
        arguments, results: what they are.
        rows: of each parameter that operands belong to.
        owned: what the owners of matrices compute, at most one for a parameter. It has the parameter's shape.

    Attributes:
        leaves: the parameters that are updated in pieces.
        passes: over the pieces of each of them. The second one needs the outputs of its owners.
        whole_rows: those of which a piece must not divide a row further than a mesh does.
        scalars: variables that are computed once and read with every piece.
        sliced: (variable, parameter): variables with a parameter's rows that are computed once, and read in pieces.

    Raises ValueError if the update of one row depends on other rows of an array in host memory.
    """

    def __init__(
        self,
        closed: ClosedJaxpr,
        arguments: Sequence[Operand],
        results: Sequence[Operand],
        rows: Mapping[int, Rows],
        owned: Sequence[Coupling] = (),
    ):
        self.arguments, self.results, self._rows, self._closed = list(arguments), list(results), rows, closed
        self._outvars, self._owned = closed.jaxpr.outvars, {each.leaf: each for each in owned}
        self._plan()

    def _plan(self) -> None:
        """Sorts the equations: those of each parameter's pieces, and those on whole arrays."""
        # Find what is computed from arrays in host memory.
        jaxpr = self._closed.jaxpr
        self._in_host = {v for v, a in zip(jaxpr.invars, self.arguments, strict=True) if a.in_host}
        for equation in jaxpr.eqns:
            if any(v in self._in_host for v in jaxprs.variables(equation)):
                self._in_host.update(equation.outvars)

        # Begin with what is wanted: pieces of results that belong to a parameter, and the other results.
        pieces: dict[Var, set[int]] = collections.defaultdict(set)  # variable -> parameters whose pieces read it
        whole: set[Var] = set()
        for v, result in zip(jaxpr.outvars, self.results, strict=True):
            if jaxprs.is_var(v):
                pieces[v].add(result.leaf) if result.leaf is not None else whole.add(v)
        sliced: dict[tuple[Var, int], None] = {}
        arguments = dict(zip(jaxpr.invars, self.arguments, strict=True))
        computed = {v for equation in jaxpr.eqns for v in equation.outvars}

        def read_in_pieces(v: Var, leaf: int, equation: Equation) -> None:
            is_own = v in computed or (v in arguments and arguments[v].leaf == leaf)
            if is_own and self._rows[leaf].hold(v.aval.shape):
                pieces[v].add(leaf)
                return
            if v in arguments and arguments[v].in_host:  # of another parameter
                raise self._cannot_split(equation)
            whole.add(v)
            if v.aval.shape:
                sliced[v, leaf] = None

        # Go backwards to what each of them is computed from.
        by_leaf: dict[int, list[Equation]] = collections.defaultdict(list)
        self._whole: list[Equation] = []
        before, later = around(jaxpr.eqns, list(self._owned.values()))
        for equation in (*reversed(later), None, *reversed(before)):
            if equation is None:  # here, owners compute
                for leaf, coupling in self._owned.items():
                    if any(v in whole or pieces[v] - {leaf} for v in coupling.outputs):
                        raise self._cannot_split(coupling.own[0])
                    pieces.update({v: pieces[v] | {leaf} for v in coupling.inputs})
                    whole.update(coupling.shared)
                continue
            for leaf in set().union(*(pieces.get(v, ()) for v in equation.outvars)):
                if self._rows[leaf].compute(equation):
                    by_leaf[leaf].append(equation)
                    for v in jaxprs.variables(equation):
                        read_in_pieces(v, leaf, equation)
                else:
                    sliced.update({(v, leaf): None for v in equation.outvars if leaf in pieces.get(v, ())})
                    whole.update(equation.outvars)
            if any(v in whole for v in equation.outvars):
                if any(v in self._in_host for v in equation.outvars):
                    raise self._cannot_split(equation)
                self._whole.append(equation)
                whole.update(jaxprs.variables(equation))
        for equations in (self._whole, *by_leaf.values()):
            equations.reverse()

        # Find what pieces read of whole arrays.
        self.leaves = sorted({result.leaf for result in self.results if result.leaf is not None})
        self.sliced = list(sliced)
        read = dict.fromkeys(v for equations in by_leaf.values() for e in equations for v in jaxprs.variables(e))
        self.scalars = [v for v in read if v in whole and v.aval.shape == ()]
        shapes = lambda k: [v.aval.shape for e in by_leaf[k] for v in (*jaxprs.variables(e), *e.outvars)]
        self.whole_rows = {k for k in self.leaves if any(s not in ((), self._rows[k].shape) for s in shapes(k))}
        self.passes = {k: self._passes(k, by_leaf[k]) for k in self.leaves}

    def _passes(self, leaf: int, equations: Sequence[Equation]) -> list[Pass]:
        """Divides what is computed for a piece of a parameter into its passes."""
        number = {v: p for p, v in enumerate(self._closed.jaxpr.invars) if self.arguments[p].leaf == leaf}
        results = [p for p, result in enumerate(self.results) if result.leaf == leaf]

        def one(results: list[int], values: Sequence[Var] = (), given: Sequence[Var] = ()) -> Pass:
            needed = {*(self._outvars[p] for p in results if jaxprs.is_var(self._outvars[p])), *values} - {*given}
            found = []
            for equation in reversed(equations):
                if any(v in needed for v in equation.outvars):
                    found.append(equation)
                    needed.update(v for v in jaxprs.variables(equation) if v not in given)
            return Pass(found[::-1], [p for v, p in number.items() if v in needed], results, list(values))

        if leaf not in self._owned:
            return [one(results)]
        coupling = self._owned[leaf]
        _, later = around(equations, [coupling])
        waiting = {*coupling.outputs, *(v for equation in later for v in equation.outvars)}
        waits = lambda atom: jaxprs.is_var(atom) and atom in waiting
        second = one([p for p in results if waits(self._outvars[p])], given=coupling.outputs)
        # What the second pass reads, the first one must not change.
        second = one([p for p in results if p in {*second.results, *second.reads}], given=coupling.outputs)
        return [one([p for p in results if p not in second.results], coupling.inputs), second]

    def compute_whole(self, arguments: Mapping[int, Array]) -> dict[Var, Array]:
        """The values that are computed once, by variable, from the arguments on the device, by position."""
        scope = dict(zip(self._closed.jaxpr.constvars, self._closed.consts, strict=True))
        scope.update({self._closed.jaxpr.invars[k]: value for k, value in arguments.items()})
        jaxprs.run_equations(self._whole, scope)
        return scope

    def compute_piece(
        self,
        leaf: int,
        arguments: Mapping[int, Array],
        values: Mapping[Var, Array],
        piece: Shape,
        start: Sequence[ArrayLike],
        number: int = 0,
    ) -> tuple[dict[int, Array], list[Array]]:
        """Computes the results of a pass for one piece of a parameter: (results by position, other values).

        Args:
            leaf: the parameter.
            arguments: pieces of the arguments that the pass reads, by position.
            values: scalars, pieces of `sliced` and of the outputs of owners, by variable.
            piece, start: the shape of the piece, and the position of its first element in the parameter.
            number: of the pass.
        """
        one = self.passes[leaf][number]
        scope = dict(values) | {self._closed.jaxpr.invars[k]: a for k, a in arguments.items()}
        for equation in one.equations:
            operands = [_value(atom, scope) for atom in equation.invars]
            scope[equation.outvars[0]] = self._rows[leaf].compute_piece(equation, operands, piece, start)
        return {p: _value(self._outvars[p], scope) for p in one.results}, [scope[v] for v in one.values]

    def whole_results(self, scope: Mapping[Var, Array]) -> dict[int, Array]:
        """The results that belong to no parameter, by position, from the values of `compute_whole`."""
        return {k: _value(self._outvars[k], scope) for k, result in enumerate(self.results) if result.leaf is None}

    def _cannot_split(self, equation: Equation) -> ValueError:
        # Find the parameters whose arrays in host memory each value is computed from.
        jaxpr = self._closed.jaxpr
        moved = zip(jaxpr.invars, self.arguments, strict=True)
        owners = {v: {a.leaf} for v, a in moved if a.leaf is not None and a.in_host}
        for e in jaxpr.eqns:
            found = set().union(*(owners.get(v, ()) for v in jaxprs.variables(e)))
            owners.update(dict.fromkeys(e.outvars, found))

        # Find what the equation is computed from, the last equation first, and what couples elements in it.
        read, before = set(jaxprs.variables(equation)), []
        index = next(k for k, e in enumerate(jaxpr.eqns) if e is equation)
        for e in reversed(jaxpr.eqns[:index]):
            if any(v in read for v in e.outvars):
                before.append(e)
                read.update(jaxprs.variables(e))
        is_split = lambda e: jaxprs.is_elementwise(e) or any(self._rows[k].compute(e) for k in owners[e.outvars[0]])
        coupling = [e for e in [equation, *before] if owners[e.outvars[0]] and not is_split(e)] or [equation]

        # Name the function of the optimizer, the parameter, and a fix.
        rows = self._rows[min(owners[coupling[0].outvars[0]])]
        name = next(filter(None, map(optimizer_function, [*coupling, equation, *before])), "the optimizer")
        got = f"an element of {rows.path!r} depends on others in host memory ({coupling[0].primitive.name})"
        fix = "Zero(..., offload='none'), or an optimizer that works element by element, such as optax.adamw"
        if all(rows._replace(parts=1).compute(e) for e in coupling):
            shape = list(rows.shape)
            got = f"{rows.path!r} {shape} is sharded in its last dim, and blocks of it are on several devices"
            another = len(shape) - 2 if len(shape) > 1 else None
            fix = f"Zero(..., shard_dims={{{rows.path!r}: {another}}}), which leaves its rows whole"
        what = f"offload: {name} cannot be computed for one piece of a parameter at a time"
        return ValueError(error_text(what, got, fix))


def _value(atom: Atom, scope: Mapping[Var, Array]) -> Array:
    return scope[atom] if jaxprs.is_var(atom) else jnp.asarray(atom.val, atom.aval.dtype)


_REDUCTIONS = frozenset({"reduce_max", "reduce_min", "reduce_sum", "reduce_prod", "reduce_and", "reduce_or"})


class Rows(NamedTuple):
    """The rows of a parameter."""

    path: str
    shape: Shape
    parts: int = 1  # into how many a mesh divides the last dim

    def hold(self, shape: Shape) -> bool:
        """Whether a value of this shape can be one for each row, of which each piece has a part."""
        last = len(self.shape) - 1
        if shape == self.shape:
            return True
        if not shape or shape[:last] != self.shape[:last]:
            return False
        divisible = len(shape) > last and not any(s[last] % self.parts for s in (shape, self.shape))
        return self.parts == 1 or divisible

    def compute(self, equation: Equation) -> bool:
        """Whether the one result of an equation is a value for each row, computed from those of the same row."""
        out = equation.outvars[0].aval.shape
        shapes = [a.aval.shape for a in equation.invars if a.aval.shape]
        if not all(map(self.hold, [out, *shapes])):
            return False
        return _keeps(equation, out, shapes, len(self.shape) - (self.parts == 1))

    def part_of(self, shape: Shape, piece: Shape) -> Shape:
        """The shape of the part of a value for each row that belongs to a piece of the parameter."""
        if shape == self.shape:
            return piece
        last = len(self.shape) - 1
        return (*piece[:last], *(n // self.parts if d == last else n for d, n in enumerate(shape) if d >= last))

    def compute_piece(
        self, equation: Equation, operands: Sequence[Array], piece: Shape, start: Sequence[ArrayLike]
    ) -> Array:
        """The result of an equation that `compute` accepts, for a piece of the parameter.

        `operands` are the parts that belong to the piece, and scalars; `start` is the position of its first element.
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


def _keeps(equation: Equation, out: Shape, shapes: Sequence[Shape], kept: int) -> bool:
    """Whether an operation works for each index of the first `kept` dims by itself.

    `out` is the shape of its result, and `shapes` are those of its operands that are not scalars.
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
