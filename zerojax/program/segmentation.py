"""Cuts a traced loss into segments, each of which uses the weights of one unit.

The model needs no changes. The traced loss is cut between the last use of one unit's weights and the first use of the
next unit's, at the point where the least data crosses:

    loss ──► jaxpr ──► values computed from one unit's weights only  (recomputed where they are used)
                   └─► values computed from data ──► segments: [equations, leaves], in program order;
                                                     a scan over stacked leaves is a segment of its own,
                                                     and so is a lookup of rows in a table
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jax import lax

from zerojax.program import jaxprs
from zerojax.program.jaxprs import Atom, ClosedJaxpr, Equation, Jaxpr, Var
from zerojax.utils.typing import Array


class View(NamedTuple):
    """A value with the elements of one leaf, computed from it by `equations` (casts and transpositions)."""

    leaf: int
    equations: tuple[Equation, ...]
    order: tuple[int, ...]  # the dims of the leaf in the order of the value

    def of(self, leaf: Array) -> Array:
        """The value, from the leaf or from its shard."""
        for equation in self.equations:
            leaf = jaxprs.apply(equation, leaf)
        return leaf

    def cast(self, part: Array) -> Array:
        """A part of the leaf with the dtype of the value."""
        for equation in self.equations:
            if jaxprs.permutation(equation) is None:
                part = jaxprs.apply(equation, part)
        return part

    def of_layer(self, layer: Array) -> Array:
        """A layer of the value, whose dim 0 is that of layers, from a layer of the leaf, which has that dim too."""
        return lax.squeeze(lax.transpose(self.cast(layer), self.order), [0])

    def to_leaf(self, layer: Array) -> Array:
        """A layer of the value with the dims of the leaf: the inverse of `of_layer`, without its casts."""
        return lax.transpose(lax.expand_dims(layer, [0]), np.argsort(self.order).tolist())


class RowsLookedUp(NamedTuple):
    """The number of rows that are looked up in a table, the elements of a row, and the bytes of an index."""

    count: int
    row_size: int
    index_bytes: int


class Segment(NamedTuple):
    """Consecutive equations of the traced loss that use the weights of one unit."""

    equations: list[Equation]
    leaves: list[int]  # the parameter leaves that they read, in the order of their first uses
    inputs: list[Var]  # data values that they read
    weight_values: list[Var]  # values computed from weights alone that they read
    outputs: list[Var]  # data values that later equations read
    # The leaf that an operand is, by position: of a scan, the stacked leaves that it slices, by first use; of a lookup,
    # the table. Empty in all other segments.
    views: dict[int, View]

    @property
    def lookup(self) -> RowsLookedUp | None:
        """The rows that this segment looks up in its leaf without gathering it; None in all other segments."""
        lookup = jaxprs.row_lookup(self.equations[0]) if self.views else None
        if lookup is None:
            return None
        table, indices = (atom.aval for atom in self.equations[0].invars[:2])
        return RowsLookedUp(indices.size, table.size // table.shape[lookup.dim], indices.dtype.itemsize)


@dataclasses.dataclass(frozen=True)
class TracedLoss:
    """A traced function of parameter leaves and data, cut into segments. See `cut_into_segments`."""

    closed: ClosedJaxpr  # jaxpr of `fn(*leaves, *data) -> outputs`
    unit_of: Sequence[str]
    weights: dict[Var, frozenset[int]]  # the leaves of each value that is computed from the weights of one unit only
    producer: dict[Var, Equation]  # the equations that compute these values
    segments: Sequence[Segment] = ()  # in program order

    @cached_property
    def leaf_vars(self) -> list[Var]:
        return self.closed.jaxpr.invars[: len(self.unit_of)]

    @cached_property
    def data_vars(self) -> list[Var]:
        return self.closed.jaxpr.invars[len(self.unit_of) :]

    @property
    def layer_dims(self) -> dict[int, int]:
        """The dim of each leaf that a loop slices layer by layer."""
        views = [view for segment in self.segments if not segment.lookup for view in segment.views.values()]
        return {view.leaf: view.order[0] for view in views}

    def unit(self, segment: Segment) -> str:
        """The unit whose weights a segment uses (the first, if one equation uses several), or ''."""
        return self.unit_of[segment.leaves[0]] if segment.leaves else ""

    def leaves_of(self, equation: Equation) -> frozenset[int]:
        return frozenset().union(*(self.weights[v] for v in jaxprs.variables(equation) if v in self.weights))

    def view(self, atom: Atom) -> View | None:
        """The view of a leaf that an operand is, or None if it is more than casts and transpositions of one leaf."""
        equations: list[Equation] = []
        while jaxprs.is_var(atom) and atom in self.producer:
            equation = self.producer[atom]
            if not jaxprs.preserves_elements(equation):
                return None
            equations.insert(0, equation)
            atom = equation.invars[0]
        if not jaxprs.is_var(atom) or atom not in self.weights:
            return None
        (leaf,) = self.weights[atom]
        order = tuple(range(atom.aval.ndim))
        for equation in equations:
            if permutation := jaxprs.permutation(equation):
                order = tuple(order[k] for k in permutation)
        return View(leaf, tuple(equations), order)

    def bind_weights(self, values: Iterable[Var], scope: dict[Var, Array]) -> None:
        """Adds values that are computed from weights alone to `scope`, which has the full leaves."""
        for v in values:
            if v not in scope:
                equation = self.producer[v]
                self.bind_weights(jaxprs.variables(equation), scope)
                jaxprs.run_equations([equation], scope)


IsLookup = Callable[[Equation, View], bool]


def cut_into_segments(
    closed: ClosedJaxpr, unit_of: Sequence[str], is_lookup: IsLookup = lambda equation, view: False
) -> TracedLoss:
    """Cuts a traced loss into segments.

    Args:
        closed: jaxpr of `fn(*leaves, *data) -> outputs`.
        unit_of: the unit of each of its inputs that are parameter leaves.
        is_lookup: whether an equation that takes rows of a leaf, of which its table is this view, is a segment of its
            own, for which the leaf is not gathered.

    Raises:
        ValueError: the loss returns a parameter, or makes a mutable array outside of a nested jit.
    """
    traced = _with_weight_values(closed, unit_of)
    if any(jaxprs.is_call(e) and _must_inline(traced, e) for e in closed.jaxpr.eqns):
        traced = _with_weight_values(jaxprs.inlined(closed), unit_of)
    _check(traced)
    return dataclasses.replace(traced, segments=_segments(traced, is_lookup))


def _with_weight_values(closed: ClosedJaxpr, unit_of: Sequence[str]) -> TracedLoss:
    """Finds the values that are computed from the weights of one unit only."""
    traced = TracedLoss(closed, unit_of, {}, {})
    traced.weights.update((v, frozenset([i])) for i, v in enumerate(traced.leaf_vars))
    returned = set(filter(jaxprs.is_var, closed.jaxpr.outvars))
    for equation in closed.jaxpr.eqns:
        read = jaxprs.variables(equation)
        if not read or not all(v in traced.weights for v in read) or returned & set(equation.outvars):
            continue
        leaves = traced.leaves_of(equation)
        if len({unit_of[i] for i in leaves}) == 1 and not equation.effects:
            traced.weights.update(dict.fromkeys(equation.outvars, leaves))
            traced.producer.update(dict.fromkeys(equation.outvars, equation))
    return traced


def _must_inline(traced: TracedLoss, equation: Equation) -> bool:
    """Whether a nested jit hides a change of unit, a scan, a lookup of rows, or a transposition of one leaf."""
    leaves, inner = traced.leaves_of(equation), jaxprs.called(equation)[0]
    if not leaves:
        return False
    hides_units = len({traced.unit_of[i] for i in leaves}) > 1
    hides_scan = any(map(jaxprs.is_scan, jaxprs.walk(inner.eqns)))
    return hides_units or hides_scan or _looks_up(inner) or len(equation.invars) == 1


def _looks_up(jaxpr: Jaxpr) -> bool:
    """Whether equations, or those of nested jits, look up rows."""
    inside = lambda e: jaxprs.is_call(e) and _looks_up(jaxprs.called(e)[0])
    return any(jaxprs.row_lookup(e) is not None or inside(e) for e in jaxpr.eqns)


def _check(traced: TracedLoss) -> None:
    if set(traced.leaf_vars) & set(filter(jaxprs.is_var, traced.closed.jaxpr.outvars)):
        raise ValueError(
            "loss: returns a parameter itself among its metrics or state\n"
            "  fix:      return a value computed from it, or take it from the training state"
        )
    for made in filter(jaxprs.makes_reference, traced.closed.jaxpr.eqns):
        raise ValueError(
            f"loss: a mutable array cannot live across the units of a model, which run one at a time\n"
            f"  got:      {made.outvars[0].aval}, made at {jaxprs.user_line(made)}\n"
            f"  fix:      pass its value on from layer to layer, and return it; or make, use and read it in one\n"
            f"            function under jax.jit; or stage=1 with remat='none', which runs the loss as a whole"
        )


def _segments(traced: TracedLoss, is_lookup: IsLookup) -> list[Segment]:
    """The segments of a loss.

    Equations between two units may belong to either. They are cut where the least data crosses, and at the last such
    point: a residual stream then crosses as one value, without the statistics of a norm.
    """
    equations = [e for e in traced.closed.jaxpr.eqns if not any(v in traced.producer for v in e.outvars)]
    runs, crossing = _runs(traced, equations, is_lookup), _crossing_bytes(traced, equations)

    # Where each segment ends.
    pieces: list[tuple[list[Equation], _Run]] = []
    start = 0
    for run, following in itertools.zip_longest(runs, runs[1:]):
        if run.views:
            if start < run.first:
                pieces.append((equations[start : run.first], _NO_RUN))
            start, end = run.first, run.first + 1
        elif following is None:
            end = len(equations)
        elif following.views:
            end = following.first
        else:
            end = min(range(following.first, run.last, -1), key=crossing.__getitem__)
        pieces.append((equations[start:end], run))
        start = end
    if start < len(equations):
        pieces.append((equations[start:], _NO_RUN))

    # What each of them reads and returns.
    live = set(filter(jaxprs.is_var, traced.closed.jaxpr.outvars))
    segments = []
    for own, run in reversed(pieces):
        computed = {v for e in own for v in e.outvars}
        read = dict.fromkeys(v for e in own for v in jaxprs.variables(e) if v not in computed)
        inputs = [v for v in read if v not in traced.weights]
        weight_values = [v for v in read if v in traced.weights]
        outputs = [v for e in own for v in e.outvars if v in live]
        segments.append(Segment(own, list(run.leaves), inputs, weight_values, outputs, run.views))
        live.update(inputs)
    return segments[::-1]


class _Run(NamedTuple):
    """The equations from `first` to `last`, which use the weights of `units` and of no other unit."""

    first: int
    last: int
    leaves: dict[int, None]
    units: set[str]
    views: dict[int, View]


_NO_RUN = _Run(0, 0, {}, set(), {})


def _runs(traced: TracedLoss, equations: Sequence[Equation], is_lookup: IsLookup) -> list[_Run]:
    """The runs of equations that use the weights of one unit, before those of another unit are used."""
    runs: list[_Run] = []
    for k, equation in enumerate(equations):
        leaves, views = dict.fromkeys(sorted(traced.leaves_of(equation))), _views(traced, equation, is_lookup)
        if not leaves:
            continue
        units = {traced.unit_of[i] for i in leaves}
        if runs and not views and not runs[-1].views and units <= runs[-1].units:
            runs[-1] = runs[-1]._replace(last=k, leaves=runs[-1].leaves | leaves)
        else:
            runs.append(_Run(k, k, leaves, units, views))
    return runs


def _views(traced: TracedLoss, equation: Equation, is_lookup: IsLookup) -> dict[int, View]:
    """The operands of a scan that it slices layer by layer and that are views of a leaf; the table of a lookup."""
    if jaxprs.row_lookup(equation) is not None:
        view = traced.view(equation.invars[0])
        return {0: view} if view is not None and is_lookup(equation, view) else {}
    if not jaxprs.is_scan(equation):
        return {}
    scan = jaxprs.scan_params(equation)
    sliced = range(scan.num_consts + scan.num_carry, len(equation.invars))
    body = scan.body.jaxpr
    first_read = {v: k for k, e in reversed([*enumerate(body.eqns)]) for v in jaxprs.variables(e)}
    by_use = sorted(sliced, key=lambda k: first_read.get(body.invars[k], len(body.eqns)))
    views = {k: traced.view(equation.invars[k]) for k in by_use}
    return {k: view for k, view in views.items() if view is not None}


def _crossing_bytes(traced: TracedLoss, equations: Sequence[Equation]) -> list[int]:
    """For each position, the bytes of data that are computed before it and read from there on."""
    last_read = {v: k for k, e in enumerate(equations) for v in jaxprs.variables(e)}
    last_read.update(dict.fromkeys(filter(jaxprs.is_var, traced.closed.jaxpr.outvars), len(equations)))
    change = [0] * (len(equations) + 2)
    for k, equation in enumerate(equations):
        for v in equation.outvars:
            size = math.prod(v.aval.shape) * v.aval.dtype.itemsize
            change[k + 1] += size
            change[max(k, last_read.get(v, k)) + 1] -= size
    return list(itertools.accumulate(change))
