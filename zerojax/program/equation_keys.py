"""Says which equations are the same: keys of equations that compute the same from equal operands."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.program import jaxprs
from zerojax.program.jaxprs import ClosedJaxpr, Equation, Jaxpr, Literal, Var
from zerojax.utils.flags import select
from zerojax.utils.typing import Array

_MOST_BYTES = 2**12  # of NumPy arrays that are compared by value; other arrays are the same only if they are one object


class EquationKeys:
    """Keys of equations: what they compute, with shapes and dtypes, and without the names of their variables.

    Two equations with the same key have the same results and the same gradients if their operands are equal. Rules of
    custom derivatives are Python functions; what is compared is the derivative that they return, unless they see which
    zeros are symbolic. Equations with side effects, and what cannot be compared, equal only themselves.
    """

    def __init__(self) -> None:
        self._jaxprs: dict[int, tuple[Jaxpr, int]] = {}
        self._numbers: dict[Hashable, int] = {}

    def number(self, key: Hashable) -> int:
        """A small integer for a key, the same for equal keys."""
        return self._numbers.setdefault(key, len(self._numbers))

    def of(self, equation: Equation) -> Hashable:
        """The key of an equation."""
        if jaxprs.has_side_effects(equation) or any(map(jaxprs.is_reference, equation.outvars)):
            return _Identity(equation)
        params, derivative = equation.params, None
        if equation.primitive.name.startswith(("custom_jvp", "custom_vjp")):
            params = {name: value for name, value in params.items() if _is_jaxpr(value)}
            derivative = self._derivative(equation)
        values = tuple((name, self._value(value)) for name, value in sorted(params.items()))
        avals = tuple(a.aval for a in [*equation.invars, *equation.outvars])
        return equation.primitive.name, avals, values, derivative

    def of_function(self, closed: ClosedJaxpr) -> Hashable:
        """The key of a function: its equations, and the values of its constants."""
        return self._value(closed)

    def _derivative(self, equation: Equation) -> Hashable:
        """The key of the derivative of an equation that has a rule of its own."""
        if equation.params.get("symbolic_zeros"):
            return _Identity(equation)
        is_floating = lambda a: jnp.issubdtype(a.dtype, jnp.floating)
        avals = [a.aval for a in equation.invars]
        inputs, outputs = jaxprs.fresh_variables(avals), [v for v in equation.outvars if not jaxprs.is_dropped(v)]
        renamed, flags = jaxprs.with_operands(equation, inputs), [is_floating(a) for a in avals]

        def pull_back(operands: list[Array], cotangents: list[Array]) -> Any:
            def call(floating: list[Array]) -> list[Array]:
                scope = dict(zip(inputs, operands, strict=True))
                scope.update(zip(select(inputs, flags), floating, strict=True))
                jaxprs.run_equations([renamed], scope)
                return [scope[v] for v in outputs if is_floating(v.aval)]

            values, vjp = jax.vjp(call, select(operands, flags))
            return values, vjp(cotangents)

        try:
            cotangents = [v.aval for v in outputs if is_floating(v.aval)]
            return self._value(jaxprs.traced(pull_back, avals, cotangents)[0])
        except Exception:  # a rule that has no derivative in reverse
            return _Identity(equation)

    def _value(self, value: Any) -> Any:
        """The key of a parameter of an equation."""
        if _is_jaxpr(value):
            jaxpr = getattr(value, "jaxpr", value)
            if id(jaxpr) not in self._jaxprs:
                self._jaxprs[id(jaxpr)] = jaxpr, self.number(self._lines(jaxpr))
            return "jaxpr", self._jaxprs[id(jaxpr)][1], tuple(map(self._value, getattr(value, "consts", ())))
        if isinstance(value, tuple | list):
            return type(value).__name__, tuple(map(self._value, value))
        if isinstance(value, dict):
            return "dict", tuple((name, self._value(each)) for name, each in value.items())
        if isinstance(value, np.ndarray) and value.nbytes <= _MOST_BYTES:
            return value.shape, value.dtype, value.tobytes()
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = dataclasses.fields(value)
            return type(value), tuple(self._value(getattr(value, field.name)) for field in fields)
        if isinstance(value, float):
            return "float", value.hex()  # -0.0 equals 0.0
        try:
            hash(value)
        except TypeError:
            return _Identity(value)
        return type(value), value  # True equals 1

    def _lines(self, jaxpr: Jaxpr) -> Hashable:
        """The key of a jaxpr: its equations, with the positions of what they read."""
        place: dict[Var, Hashable] = {v: (-1, k) for k, v in enumerate([*jaxpr.constvars, *jaxpr.invars])}
        read = lambda atom: place[atom] if jaxprs.is_var(atom) else literal_key(atom)
        lines = []
        for k, equation in enumerate(jaxpr.eqns):
            lines.append((self.of(equation), tuple(map(read, equation.invars))))
            place.update({v: (k, j) for j, v in enumerate(equation.outvars)})
        avals = tuple(v.aval for v in [*jaxpr.constvars, *jaxpr.invars])
        return avals, tuple(lines), tuple(map(read, jaxpr.outvars))


def literal_key(literal: Literal) -> Hashable:
    """The key of a literal: its type and its value, also of NaN."""
    return literal.aval, np.asarray(literal.val).tobytes()


def _is_jaxpr(value: Any) -> bool:
    return hasattr(getattr(value, "jaxpr", value), "eqns")


class _Identity:
    """A key that is equal for one and the same object."""

    def __init__(self, value: Any):
        self._value = value  # kept, so that no other gets its place in memory

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)
