"""Runs equal layers as a loop: rewrites a traced loss so that their leaves are stacked, and a scan slices the stacks.

    leaves of layer 0, 1, ..., n - 1       ──► stacks
    equations of layer 0, 1, ..., n - 1    ──► scan of the equations of layer 0

Layers are equal if they have the same equations, one layer after the other, and leaves that are placed alike. What a
layer reads from outside of it is

    carried   by the scan, where it is a result of the layer before
    shared    where all layers read the same
    sliced    where each reads its own, such as a key, a cache or a number: these are stacked too

Results that are read elsewhere are stacked by the scan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.program import jaxprs
from zerojax.program.equation_keys import EquationKeys, literal_key
from zerojax.program.jaxprs import Atom, ClosedJaxpr, Equation, Var
from zerojax.program.segmentation import TracedLoss
from zerojax.utils.typing import Array

FEWEST_LAYERS = 3  # of a loop
_MOST_SEGMENTS = 8  # of a layer

Stack: TypeAlias = tuple[int, ...]  # the leaves of a stack, by layer


class Rewritten(NamedTuple):
    """A traced loss with loops in place of equal layers."""

    closed: ClosedJaxpr  # jaxpr of `fn(*leaves, *stacks, *data) -> outputs`
    stacks: list[Stack]  # their leaves are read nowhere else


def with_loops(traced: TracedLoss, placed: Callable[[int], Hashable]) -> Rewritten:
    """Makes a loop of each run of equal layers.

    Args:
        traced: the loss, cut into segments.
        placed: what leaves of equal layers have in common besides their shapes and dtypes, by leaf.
    """
    loops = _Finder(traced, placed).loops()
    if not loops:
        return Rewritten(traced.closed, [])
    stacks = [stack for loop in loops for stack in loop.stacks]
    jaxpr, num_leaves = traced.closed.jaxpr, len(traced.leaf_vars)
    equations = _data_equations(traced)

    def rewritten(*args: Array) -> list[Array]:
        scope = dict(zip(jaxpr.constvars, traced.closed.consts, strict=True))
        scope.update(zip(traced.leaf_vars, args[:num_leaves], strict=True))
        scope.update(zip(traced.data_vars, args[num_leaves + len(stacks) :], strict=True))
        stacked, start = dict(zip(stacks, args[num_leaves:], strict=False)), 0
        for loop in loops:
            _run(traced, equations[start : loop.first], scope)
            loop.run(traced, [stacked[stack] for stack in loop.stacks], scope)
            start = loop.end
        _run(traced, equations[start:], scope)
        return [_value(scope, atom) for atom in jaxpr.outvars]

    avals = [v.aval for v in jaxpr.invars]
    of_stack = lambda stack: jax.ShapeDtypeStruct((len(stack), *avals[stack[0]].shape), avals[stack[0]].dtype)
    given = [*avals[:num_leaves], *map(of_stack, stacks), *avals[num_leaves:]]
    return Rewritten(jaxprs.traced(rewritten, *given)[0], stacks)


def _data_equations(traced: TracedLoss) -> list[Equation]:
    """The equations that do not compute values from weights alone."""
    return [e for e in traced.closed.jaxpr.eqns if not any(v in traced.producer for v in e.outvars)]


def _run(traced: TracedLoss, equations: Sequence[Equation], scope: dict[Var, Array]) -> None:
    reads = dict.fromkeys(v for e in equations for v in jaxprs.variables(e) if v in traced.weights)
    traced.bind_weights(reads, scope)
    jaxprs.run_equations(equations, scope)


def _value(scope: dict[Var, Array], atom: Atom) -> Array:
    return scope[atom] if jaxprs.is_var(atom) else jnp.asarray(atom.val, atom.aval.dtype)


class _Carried(NamedTuple):
    """A value that each layer reads from the layer before."""

    read: Var  # by the body of the scan
    init: Atom  # what the first layer reads
    returned: Var  # by the first layer
    last: Var  # by the last layer


@dataclasses.dataclass(frozen=True)
class _Loop:
    """Equal layers as a loop."""

    first: int  # the position of the first equation of the first layer
    end: int  # the position after the last equation of the last layer
    body: Sequence[Equation]  # of the first layer; what is carried and sliced has variables of its own
    stacks: Sequence[Stack]
    carried: Sequence[_Carried]
    sliced: Sequence[tuple[Var, Sequence[Atom]]]  # what the body reads, and what each layer reads
    results: dict[Var, dict[int, Var]]  # of the first layer, that are read elsewhere: those of each layer

    def run(self, traced: TracedLoss, stacks: Sequence[Array], scope: dict[Var, Array]) -> None:
        """Runs the loop, reading from and writing to `scope`."""
        leaf_vars = [traced.leaf_vars[stack[0]] for stack in self.stacks]

        def layer(carry: list[Array], slices: tuple[list[Array], list[Array]]) -> tuple[list[Array], list[Array]]:
            leaves, sliced = slices
            own = scope | dict(zip(leaf_vars, leaves, strict=True))
            own.update(zip([each.read for each in self.carried], carry, strict=True))
            own.update(zip([v for v, _ in self.sliced], sliced, strict=True))
            _run(traced, self.body, own)
            return [own[each.returned] for each in self.carried], [own[v] for v in self.results]

        sliced = [jnp.stack([_value(scope, atom) for atom in atoms]) for _, atoms in self.sliced]
        init = [_value(scope, each.init) for each in self.carried]
        carry, results = lax.scan(layer, init, (list(stacks), sliced))
        scope.update(zip([each.last for each in self.carried], carry, strict=True))
        for stacked, by_layer in zip(results, self.results.values(), strict=True):
            scope.update({v: stacked[i] for i, v in by_layer.items()})


class _NotEqual(Exception):
    """Layers with the same equations do not read or return the same."""


class _Finder:
    """Finds equal layers in a traced loss."""

    def __init__(self, traced: TracedLoss, placed: Callable[[int], Hashable]):
        self.traced, self.placed, self.keys = traced, placed, EquationKeys()
        self.equations = _data_equations(traced)
        self.numbers = [self.keys.number(self._key(e)) for e in self.equations]
        self.defined = {v: k for k, e in enumerate(self.equations) for v in e.outvars if not jaxprs.is_dropped(v)}
        # The positions of the equations that read each value, and each leaf; the loss returns what the last one reads.
        self.readers: dict[Var, list[int]] = {}
        self.users: dict[int, list[int]] = {}
        for k, equation in enumerate(self.equations):
            for v in jaxprs.variables(equation):
                self.readers.setdefault(v, []).append(k)
            for leaf in traced.leaves_of(equation):
                self.users.setdefault(leaf, []).append(k)
        for v in filter(jaxprs.is_var, traced.closed.jaxpr.outvars):
            self.readers.setdefault(v, []).append(len(self.equations))

    def _key(self, equation: Equation) -> Hashable:
        weights = tuple(self._weight_key(a) if jaxprs.is_var(a) else None for a in equation.invars)
        return self.keys.of(equation), weights

    def _weight_key(self, v: Var) -> Hashable:
        """How a value is computed from weights; None for data."""
        if v in self.traced.producer:
            equation = self.traced.producer[v]
            read = lambda a: self._weight_key(a) if jaxprs.is_var(a) else literal_key(a)
            return self.keys.of(equation), equation.outvars.index(v), tuple(map(read, equation.invars))
        return (v.aval, *map(self.placed, self.traced.weights[v])) if v in self.traced.weights else None

    def loops(self) -> list[_Loop]:
        """The loops, in program order. A run of equal layers that saves more equations comes before others."""
        found: list[_Loop] = []
        runs = sorted(self._runs(), key=lambda run: (run[1] - 1) * run[2], reverse=True)
        for first, length, size in runs:
            for skipped in ((0, 0), (1, 0), (0, 1), (1, 1)):  # the first or the last layer may not be like the others
                start, count = first + skipped[0] * size, length - sum(skipped)
                if count < FEWEST_LAYERS or any(start < e.end and e.first < start + count * size for e in found):
                    continue
                try:
                    found.append(self._loop(start, count, size))
                    break
                except _NotEqual:
                    continue
        return sorted(found, key=lambda loop: loop.first)

    def _runs(self) -> Iterator[tuple[int, int, int]]:
        """Runs of layers with the same equations: (the first equation, the number of layers, the equations of each).

        A layer is several segments if it also reads weights of other units, such as those that all layers share.
        """
        position, end = {id(e): k for k, e in enumerate(self.equations)}, 0
        segments = self.traced.segments
        starts = [*(position[id(segment.equations[0])] for segment in segments), len(self.equations)]
        for k, segment in enumerate(segments):
            if not segment.leaves or segment.views or starts[k] < end:  # a run has this segment already
                continue
            for following in starts[k + 1 : k + 1 + _MOST_SEGMENTS]:
                start, length, size = self._repeated(starts[k], following - starts[k])
                if length >= FEWEST_LAYERS:
                    end = start + length * size
                    yield start, length, size
                    break

    def _repeated(self, first: int, size: int) -> tuple[int, int, int]:
        """The run with a layer of `size` equations from `first` on, as in `_runs`."""
        repeats = lambda k: 0 <= k < len(self.numbers) - size and self.numbers[k] == self.numbers[k + size]
        start = end = first
        while repeats(start - 1):
            start -= 1
        while repeats(end):
            end += 1
        end += size
        length, aligned = (end - start) // size, start + (first - start) % size
        return (
            (aligned if (end - aligned) // size == length else start),
            length,
            size,
        )  # segments end where little crosses

    def _loop(self, first: int, length: int, size: int) -> _Loop:
        """The loop of a run of layers with the same equations.

        Raises:
            _NotEqual: if they do not read or return the same.
        """
        layers = [self.equations[first + i * size : first + (i + 1) * size] for i in range(length)]
        operands = _Operands(self, first, layers)
        body = [
            jaxprs.with_operands(equation, [operands.read(j, o) for o in range(len(equation.invars))])
            for j, equation in enumerate(layers[0])
        ]
        end = first + length * size
        for stack in operands.stacks:
            if any(not first <= k < end for leaf in stack for k in self.users[leaf]):
                raise _NotEqual  # a leaf that is also used elsewhere
        if len({self.traced.unit_of[stack[0]] for stack in operands.stacks}) > 1:
            raise _NotEqual  # several units would be gathered together
        carried, results = list(operands.carried.values()), dict[Var, dict[int, Var]]()
        kept = {each.last for each in carried}
        for i, layer in enumerate(layers):
            for j, equation in enumerate(layer):
                for o, v in enumerate(equation.outvars):
                    if v not in kept and any(not first <= k < end for k in self.readers.get(v, [])):
                        if jaxprs.is_dropped(layers[0][j].outvars[o]):
                            raise _NotEqual  # the first layer's has no name
                        results.setdefault(layers[0][j].outvars[o], {})[i] = v
        return _Loop(first, end, body, list(operands.stacks), carried, list(operands.sliced.values()), results)


class _Operands:
    """What the equations of equal layers read."""

    def __init__(self, finder: _Finder, first: int, layers: Sequence[Sequence[Equation]]):
        self.finder, self.first, self.layers = finder, first, layers
        # (equation, result) of each value of a layer
        self.own = [
            {v: (j, o) for j, e in enumerate(layer) for o, v in enumerate(e.outvars) if not jaxprs.is_dropped(v)}
            for layer in layers
        ]
        self.stacks: dict[Stack, None] = {}
        self.stack_of: dict[int, Stack] = {}
        self.carried: dict[Hashable, _Carried] = {}
        self.sliced: dict[Hashable, tuple[Var, Sequence[Atom]]] = {}

    def read(self, j: int, o: int) -> Atom:
        """What equation `j` of the body reads as operand `o`."""
        atoms = [layer[j].invars[o] for layer in self.layers]
        variables = list(filter(jaxprs.is_var, atoms))
        if any(v in self.finder.traced.weights for v in variables):
            self._match_weights(variables)  # the keys of the equations have compared literals
            return atoms[0]
        places = [own.get(a) if jaxprs.is_var(a) else None for own, a in zip(self.own, atoms, strict=True)]
        if places[0] is not None:
            if any(place != places[0] for place in places):
                raise _NotEqual
            return atoms[0]
        before = [own.get(a) if jaxprs.is_var(a) else None for own, a in zip(self.own, atoms[1:], strict=False)]
        if before[0] is not None and all(place == before[0] for place in before):
            return self._carry(atoms[0], before[0])
        if any(self.finder.defined.get(v, -1) >= self.first for v in variables):
            raise _NotEqual  # a result of a layer that is not the one before
        keys = tuple(a if jaxprs.is_var(a) else literal_key(a) for a in atoms)
        if all(key == keys[0] for key in keys):
            return atoms[0]
        if keys not in self.sliced:
            (v,) = jaxprs.fresh_variables([atoms[0].aval])
            self.sliced[keys] = v, atoms
        return self.sliced[keys][0]

    def _carry(self, init: Atom, place: tuple[int, int]) -> Var:
        j, o = place
        key = init if jaxprs.is_var(init) else literal_key(init), place
        returned = self.layers[0][j].outvars[o]
        if (init.aval.shape, init.aval.dtype) != (returned.aval.shape, returned.aval.dtype):
            raise _NotEqual
        if key not in self.carried:
            (read,) = jaxprs.fresh_variables([returned.aval])
            self.carried[key] = _Carried(read, init, returned, self.layers[-1][j].outvars[o])
        return self.carried[key].read

    def _match_weights(self, values: Sequence[Var]) -> None:
        """Finds the leaves of a value that each layer computes from weights in the same way."""
        traced = self.finder.traced
        if values[0] in traced.producer:
            for operands in zip(*(jaxprs.variables(traced.producer[v]) for v in values), strict=True):
                self._match_weights(operands)
            return
        leaves = tuple(leaf for v in values for leaf in traced.weights[v])
        if len(set(leaves)) == 1:
            return  # a leaf that all layers share
        if len(set(leaves)) < len(leaves) or any(self.stack_of.setdefault(i, leaves) != leaves for i in leaves):
            raise _NotEqual
        self.stacks[leaves] = None
