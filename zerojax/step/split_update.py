"""Splits the update of an optimizer into parts that can be computed for one piece of a parameter at a time.

The update is traced. Operations that work element by element, from the values of one parameter or the positions in it
to values of its shape, are computed piece by piece. All else is computed once, on whole arrays, and must not depend
on arrays in host memory:

    gradients ──► global norm ──► scale ─────┐                                   once, on whole arrays
    step count ──► schedule ──► learning rate┤
                                             ▼
    a piece of a gradient, its moments and its parameter ──► their new values    for each piece
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.step.optimizers import optimizer_function
from zerojax.transform import jaxprs
from zerojax.typing import Array

_PIECEWISE = jaxprs.is_elementwise, jaxprs.broadcasts_scalar, jaxprs.numbers_positions


class Operand(NamedTuple):
    """An argument or a result of an update.

    Attributes:
        leaf: the parameter to which it belongs, whose shape it has; None for all else, such as a step count.
        in_host: whether it is in host memory.
    """

    leaf: int | None = None
    in_host: bool = False


class SplitUpdate:
    """The update of an optimizer, in two parts.

    Args:
        fn: the update, from flat arrays to flat arrays.
        avals: of its arguments.
        arguments, results: what they are.

    Attributes:
        leaves: the parameters that are updated in pieces.
        scalars: variables that are computed once and read with every piece.
        sliced: (variable, parameter): variables of the shape of a parameter that are computed once, and read in pieces.

    Raises:
        ValueError: if the update of one element depends on other elements of an array in host memory. The text names
            the function of the optimizer.
    """

    def __init__(
        self,
        fn: Callable[..., Sequence[Array]],
        avals: Sequence[Any],
        arguments: Sequence[Operand],
        results: Sequence[Operand],
    ):
        self.arguments, self.results = list(arguments), list(results)
        self._closed = jaxprs.inlined(jax.make_jaxpr(fn)(*avals), lambda equation: True)
        self._plan()

    def _plan(self) -> None:
        """Sorts the equations: those of each parameter's pieces, and those on whole arrays."""
        jaxpr = self._closed.jaxpr
        self._in_host = {v for v, a in zip(jaxpr.invars, self.arguments, strict=True) if a.in_host}
        for equation in jaxpr.eqns:
            if any(v in self._in_host for v in jaxprs.variables(equation)):
                self._in_host.update(equation.outvars)
        shapes = {a.leaf: v.aval.shape for v, a in zip(jaxpr.invars, self.arguments, strict=True) if a.leaf is not None}
        pieces: dict[Any, set[int]] = collections.defaultdict(set)  # variable -> parameters whose pieces read it
        whole: set[Any] = set()
        for v, result in zip(jaxpr.outvars, self.results, strict=True):
            if jaxprs.is_var(v):
                pieces[v].add(result.leaf) if result.leaf is not None else whole.add(v)
        self._by_leaf: dict[int, list[Any]] = collections.defaultdict(list)
        self._whole: list[Any] = []
        sliced: dict[tuple[Any, int], None] = {}
        arguments = dict(zip(jaxpr.invars, self.arguments, strict=True))

        def read_in_pieces(v: Any, leaf: int, equation: Any) -> None:
            if v.aval.shape == shapes[leaf] and (v not in arguments or arguments[v].leaf == leaf):
                pieces[v].add(leaf)
                return
            if v in arguments and arguments[v].in_host:  # of another parameter
                raise _cannot_split(equation, jaxpr.eqns)
            whole.add(v)
            if v.aval.shape == shapes[leaf]:
                sliced[v, leaf] = None

        for equation in reversed(jaxpr.eqns):
            for leaf in set().union(*(pieces.get(v, ()) for v in equation.outvars)):
                if any(fits(equation) for fits in _PIECEWISE):
                    self._by_leaf[leaf].append(equation)
                    for v in jaxprs.variables(equation):
                        read_in_pieces(v, leaf, equation)
                else:
                    sliced.update({(v, leaf): None for v in equation.outvars if leaf in pieces.get(v, ())})
                    whole.update(equation.outvars)
            if any(v in whole for v in equation.outvars):
                if any(v in self._in_host for v in equation.outvars):
                    raise _cannot_split(equation, jaxpr.eqns)
                self._whole.append(equation)
                whole.update(jaxprs.variables(equation))
        self._whole.reverse()
        for equations in self._by_leaf.values():
            equations.reverse()
        self.leaves = sorted({result.leaf for result in self.results if result.leaf is not None})
        self.sliced = list(sliced)
        read = dict.fromkeys(v for equations in self._by_leaf.values() for e in equations for v in jaxprs.variables(e))
        self.scalars = [v for v in read if v in whole and v.aval.shape == ()]

    def compute_whole(self, arguments: Mapping[int, Array]) -> dict[Any, Array]:
        """Computes what is computed once.

        Args:
            arguments: by position, those that are not in host memory.

        Returns:
            The values by variable.
        """
        scope = dict(zip(self._closed.jaxpr.constvars, self._closed.consts, strict=True))
        scope.update({self._closed.jaxpr.invars[k]: value for k, value in arguments.items()})
        jaxprs.run_equations(self._whole, scope)
        return scope

    def compute_piece(
        self, leaf: int, arguments: Mapping[int, Array], values: Mapping[Any, Array], start: Sequence[Any]
    ) -> dict[int, Array]:
        """Computes the results that belong to a parameter, for one piece of it.

        Args:
            leaf: the parameter.
            arguments: pieces of the arguments that belong to it, by position.
            values: scalars, and pieces of `sliced`, by variable.
            start: the position of the first element of the piece in the parameter.

        Returns:
            Pieces of the results, by position.
        """
        scope = dict(values) | {self._closed.jaxpr.invars[k]: piece for k, piece in arguments.items()}
        shape = next(iter(arguments.values())).shape
        for equation in self._by_leaf[leaf]:
            if jaxprs.broadcasts_scalar(equation):
                (out,), (scalar,) = equation.outvars, equation.invars
                value = scope[scalar] if jaxprs.is_var(scalar) else jnp.asarray(scalar.val, scalar.aval.dtype)
                scope[out] = lax.broadcast(value, shape)
            elif jaxprs.numbers_positions(equation):
                (out,), dim = equation.outvars, equation.params["dimension"]
                first = jnp.asarray(start[dim]).astype(out.aval.dtype)
                scope[out] = first + lax.broadcasted_iota(out.aval.dtype, shape, dim)
            else:
                jaxprs.run_equations([equation], scope)
        outvars = self._closed.jaxpr.outvars
        return {k: scope[outvars[k]] for k, result in enumerate(self.results) if result.leaf == leaf}

    def whole_results(self, scope: Mapping[Any, Array]) -> dict[int, Array]:
        """The results that belong to no parameter, by position, from the values of `compute_whole`."""
        return {
            k: scope[v] if jaxprs.is_var(v) else jnp.asarray(v.val, v.aval.dtype)
            for k, (v, result) in enumerate(zip(self._closed.jaxpr.outvars, self.results, strict=True))
            if result.leaf is None
        }


def _cannot_split(equation: Any, equations: Sequence[Any]) -> ValueError:
    is_piecewise = lambda e: any(fits(e) for fits in _PIECEWISE)
    index = next(k for k, e in enumerate(equations) if e is equation)
    read = set(jaxprs.variables(equation))
    before = []  # the equations that it is computed from, the last one first
    for e in reversed(equations[:index]):
        if any(v in read for v in e.outvars):
            before.append(e)
            read.update(jaxprs.variables(e))
    coupling = [e for e in [equation, *before] if not is_piecewise(e)] or [equation]  # the last one first
    name = next(filter(None, map(optimizer_function, [*coupling, equation, *before])), "the optimizer")
    return ValueError(
        f"offload: {name} cannot be computed for one piece of a parameter at a time\n"
        f"  got:      an element depends on others of an array in host memory ({coupling[0].primitive.name})\n"
        f"  fix:      Zero(..., offload='none'), or an optimizer that works element by element, such as optax.adamw"
    )
