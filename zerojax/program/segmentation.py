"""Cuts a traced loss into segments, each of which uses the weights of one unit.

The model needs no changes. The traced loss is cut between the last use of one unit's weights and the first use of the
next unit's, at the point where the least data crosses:

    loss ──► jaxpr ──► values computed from one unit's weights only  (recomputed where they are used)
                   └─► values computed from data ──► segments: [equations, leaves], in program order;
                                                     a scan over stacked leaves is a segment of its own,
                                                     and so is a lookup of rows in a table
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from jax import lax

from zerojax.program import jaxprs
from zerojax.program.jaxprs import Atom, ClosedJaxpr, Equation
from zerojax.utils.typing import Array


class View(NamedTuple):
    """A value with the elements of one leaf, computed from it by `equations` (casts and transpositions)."""

    leaf: int
    equations: tuple[Any, ...]
    order: tuple[int, ...]  # the dims of the leaf in the order of the value

    def of(self, leaf: Array) -> Array:
        """The value, from the leaf or from its shard."""
        for equation in self.equations:
            leaf = jaxprs.apply(equation, leaf)
        return leaf

    def of_layer(self, layer: Array) -> Array:
        """A layer of the value, whose dim 0 is that of layers, from a layer of the leaf, which has that dim too."""
        for equation in self.equations:
            if jaxprs.permutation(equation) is None:
                layer = jaxprs.apply(equation, layer)
        return lax.squeeze(lax.transpose(layer, self.order), [0])

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

    equations: list[Any]
    leaves: list[int]  # the parameter leaves that they read, in the order of their first uses
    inputs: list[Any]  # data values that they read
    outputs: list[Any]  # data values that later equations read
    # Position of an operand -> the leaf that it is: the stacked leaves that a scan slices, by first use, or the table
    # of a lookup; empty in all other segments.
    views: dict[int, View]

    @property
    def lookup(self) -> RowsLookedUp | None:
        """The rows that this segment looks up in its leaf without gathering it; None in all other segments."""
        if not self.views or jaxprs.is_scan(self.equations[0]):
            return None
        table, indices = (atom.aval for atom in self.equations[0].invars[:2])
        row_size = table.size // table.shape[cast("jaxprs.RowLookup", jaxprs.row_lookup(self.equations[0])).dim]
        return RowsLookedUp(indices.size, row_size, indices.dtype.itemsize)


class _Run(NamedTuple):
    """The equations from `first` to `last`, which use the weights of `units` and of no other unit."""

    first: int
    last: int
    leaves: dict[int, None]
    units: set[str]
    views: dict[int, View]


class TracedLoss:
    """A traced function of parameter leaves and data, cut into segments.

    Args:
        closed: jaxpr of `fn(*leaves, *data) -> outputs`.
        num_leaves: number of its inputs that are parameter leaves.
        unit_of: the unit of each leaf.
        is_lookup: whether an equation that takes rows of a leaf, of which its table is this view, is a segment of its
            own, for which the leaf is not gathered.

    Raises:
        ValueError: the loss returns a parameter, or makes a mutable array outside of a nested jit.
    """

    def __init__(
        self,
        closed: ClosedJaxpr,
        num_leaves: int,
        unit_of: Sequence[str],
        is_lookup: Callable[[Any, View], bool] = lambda equation, view: False,
    ):
        self.unit_of, self._is_lookup = unit_of, is_lookup
        self.num_leaves = num_leaves
        self.closed = closed
        self._find_weights()
        if any(jaxprs.is_call(e) and self._must_inline(e) for e in closed.jaxpr.eqns):
            self.closed = jaxprs.inlined(closed, lambda e: True)
            self._find_weights()
        self._check_outputs()
        self._check_references()
        self.segments = self._segments()

    def _find_weights(self) -> None:
        """Finds the values that are computed from the weights of one unit only: `weights` maps each to its leaves."""
        jaxpr = self.closed.jaxpr
        self.leaf_vars = jaxpr.invars[: self.num_leaves]
        self.data_vars = jaxpr.invars[self.num_leaves :]
        self.weights: dict[Any, frozenset[int]] = {v: frozenset([i]) for i, v in enumerate(self.leaf_vars)}
        self.producer: dict[Any, Any] = {}
        returned = {atom for atom in jaxpr.outvars if jaxprs.is_var(atom)}
        for equation in jaxpr.eqns:
            read = jaxprs.variables(equation)
            if not read or not all(v in self.weights for v in read) or returned & set(equation.outvars):
                continue
            leaves = frozenset().union(*(self.weights[v] for v in read))
            if len({self.unit_of[i] for i in leaves}) == 1 and not equation.effects:
                self.weights.update(dict.fromkeys(equation.outvars, leaves))
                self.producer.update(dict.fromkeys(equation.outvars, equation))

    def unit(self, segment: Segment) -> str:
        """The unit whose weights a segment uses (the first, if one equation uses several), or ''."""
        return self.unit_of[segment.leaves[0]] if segment.leaves else ""

    @property
    def layer_dims(self) -> dict[int, int]:
        """The dim of each leaf that a loop slices layer by layer."""
        views = [view for segment in self.segments if not segment.lookup for view in segment.views.values()]
        return {view.leaf: view.order[0] for view in views}

    def leaves_of(self, equation: Equation) -> frozenset[int]:
        return frozenset().union(*(self.weights[v] for v in jaxprs.variables(equation) if v in self.weights))

    def _must_inline(self, equation: Equation) -> bool:
        """Whether a nested jit hides a change of unit, a scan, a lookup of rows, or a transposition of one leaf."""
        leaves = self.leaves_of(equation)
        if not leaves:
            return False
        hides_scan = lambda jaxpr: any(
            jaxprs.is_scan(e) or any(hides_scan(sub) for sub in jaxprs.sub_jaxprs(e)) for e in jaxpr.eqns
        )
        return (
            len({self.unit_of[i] for i in leaves}) > 1
            or len(equation.invars) == 1
            or hides_scan(jaxprs.called(equation)[0])
            or jaxprs.takes_rows(jaxprs.called(equation)[0].eqns)
        )

    def _check_outputs(self) -> None:
        leaf_vars = set(self.leaf_vars)
        for atom in self.closed.jaxpr.outvars:
            if jaxprs.is_var(atom) and atom in leaf_vars:
                raise ValueError(
                    "loss: returns a parameter itself among its metrics or state\n"
                    "  fix:      return a value computed from it, or take it from the training state"
                )

    def _check_references(self) -> None:
        made = next(filter(jaxprs.makes_reference, self.closed.jaxpr.eqns), None)
        if made is not None:
            raise ValueError(
                f"loss: a mutable array cannot live across the units of a model, which run one at a time\n"
                f"  got:      {made.outvars[0].aval}, made at {jaxprs.user_line(made)}\n"
                f"  fix:      pass its value on from layer to layer, and return it; or make, use and read it in one\n"
                f"            function under jax.jit; or stage=1 with remat='none', which runs the loss as a whole"
            )

    def view(self, atom: Atom) -> View | None:
        """The view of a leaf that an operand is, or None if it is more than casts and transpositions of one leaf."""
        equations: list[Any] = []
        while jaxprs.is_var(atom) and atom in self.producer:
            equation = self.producer[atom]
            if not jaxprs.preserves_elements(equation):
                return None
            equations.append(equation)
            atom = equation.invars[0]
        if not jaxprs.is_var(atom) or atom not in self.weights:
            return None
        (leaf,) = self.weights[atom]
        equations.reverse()
        order = list(range(self.leaf_vars[leaf].aval.ndim))
        for equation in equations:
            if permutation := jaxprs.permutation(equation):
                order = [order[k] for k in permutation]
        return View(leaf, tuple(equations), tuple(order))

    def _views(self, equation: Equation) -> dict[int, View]:
        """The operands of a scan that it slices layer by layer and that are views of a leaf; the table of a lookup."""
        if jaxprs.row_lookup(equation) is not None:
            view = self.view(equation.invars[0])
            return {0: view} if view is not None and self._is_lookup(equation, view) else {}
        if not jaxprs.is_scan(equation):
            return {}
        scan = jaxprs.scan_params(equation)
        found = {}
        for k in jaxprs.by_first_use(scan.body.jaxpr, range(scan.num_consts + scan.num_carry, len(equation.invars))):
            view = self.view(equation.invars[k])
            if view is not None:
                found[k] = view
        return found

    def _segments(self) -> list[Segment]:
        cut = self._cut()
        live = {atom for atom in self.closed.jaxpr.outvars if jaxprs.is_var(atom)}
        segments = []
        for equations, leaves, views in reversed(cut):
            own = {v for e in equations for v in e.outvars}
            read = dict.fromkeys(v for e in equations for v in jaxprs.variables(e) if v not in own)
            inputs = [v for v in read if v not in self.weights]
            outputs = [v for e in equations for v in e.outvars if v in live]
            segments.append(Segment(equations, list(leaves), inputs, outputs, views))
            live.update(inputs)
        return segments[::-1]

    def _cut(self) -> list[tuple[list[Any], dict[int, None], dict[int, View]]]:
        """(equations, leaves, views) of each segment.

        Equations between two units may belong to either. They are cut where the least data crosses, and at the last
        such point: a residual stream then crosses as one value, without the statistics of a norm.
        """
        equations = [e for e in self.closed.jaxpr.eqns if not any(v in self.producer for v in e.outvars)]
        runs, crossing = self._runs(equations), self._crossing_bytes(equations)
        cut: list[tuple[list[Any], dict[int, None], dict[int, View]]] = []
        start = 0
        for run, following in itertools.zip_longest(runs, runs[1:]):
            if run.views:
                if start < run.first:
                    cut.append((equations[start : run.first], {}, {}))
                start, end = run.first, run.first + 1
            elif following is None:
                end = len(equations)
            elif following.views:
                end = following.first
            else:
                end = min(range(following.first, run.last, -1), key=crossing.__getitem__)
            cut.append((equations[start:end], run.leaves, run.views))
            start = end
        if start < len(equations):
            cut.append((equations[start:], {}, {}))
        return cut

    def _runs(self, equations: Sequence[Equation]) -> list[_Run]:
        """The runs of equations that use the weights of one unit, before those of another unit are used."""
        runs: list[_Run] = []
        for k, equation in enumerate(equations):
            leaves, views = dict.fromkeys(sorted(self.leaves_of(equation))), self._views(equation)
            if not leaves:
                continue
            units = {self.unit_of[i] for i in leaves}
            if runs and not views and not runs[-1].views and units <= runs[-1].units:
                runs[-1] = runs[-1]._replace(last=k, leaves=runs[-1].leaves | leaves)
            else:
                runs.append(_Run(k, k, leaves, units, views))
        return runs

    def _crossing_bytes(self, equations: Sequence[Equation]) -> list[int]:
        """For each position, the bytes of data that are computed before it and read from there on."""
        last_read = {v: k for k, e in enumerate(equations) for v in jaxprs.variables(e)}
        last_read.update({v: len(equations) for v in self.closed.jaxpr.outvars if jaxprs.is_var(v)})
        change = [0] * (len(equations) + 2)
        for k, equation in enumerate(equations):
            for v in equation.outvars:
                size = math.prod(v.aval.shape) * v.aval.dtype.itemsize
                change[k + 1] += size
                change[max(k, last_read.get(v, k)) + 1] -= size
        return list(itertools.accumulate(change))

    def bind_weights(self, segment_inputs: Sequence[Any], scope: dict[Any, Any]) -> None:
        """Adds the weight values among `segment_inputs` to `scope`, computed from the full leaves in it."""
        for v in segment_inputs:
            if v in scope:
                continue
            equation = self.producer[v]
            self.bind_weights(jaxprs.variables(equation), scope)
            jaxprs.run_equations([equation], scope)
