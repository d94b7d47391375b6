"""Reading, cutting and running the equations of a traced function.

jaxprs are not a stable interface of JAX. Everything that depends on their representation stands here and is tested at
both ends of the supported range of versions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

Equation = Any  # jax.extend.core.JaxprEqn
Var = Any  # jax.extend.core.Var
Atom = Any  # Var or Literal

# Primitives whose result is worth keeping even where it depends on no data: random bits drawn from a constant key.
RANDOM_PRIMITIVES = frozenset({"random_bits", "threefry2x32", "rng_bit_generator"})
# One operand in, the same elements out: these commute with taking a shard or a layer of a stacked leaf.
ELEMENT_PRESERVING = frozenset({"convert_element_type", "transpose", "copy", "copy_p", "reduce_precision"})
PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})
_DEBUG_INFO = core.DebugInfo("zerojax", "segment", None, None)


class ScanParams(NamedTuple):
    """The parts of a scan equation, the same for every supported version of JAX."""

    num_consts: int
    num_carry: int
    body: Any
    length: int
    reverse: bool


def is_var(atom: Atom) -> bool:
    return not isinstance(atom, core.Literal)


def variables(equation: Equation) -> list[Var]:
    """The variables that an equation reads, without literals."""
    return [atom for atom in equation.invars if is_var(atom)]


def scan_params(equation: Equation) -> ScanParams:
    params = equation.params
    if "num_consts" in params:
        num_consts, num_carry = params["num_consts"], params["num_carry"]
    else:  # jax >= 0.11 keeps the operands as a flat tree of (consts, carry, xs)
        num_consts, num_carry = (len(part) for part in params["ft_in"].unpack()[:2])
    return ScanParams(num_consts, num_carry, params["jaxpr"], params["length"], params["reverse"])


def by_first_use(jaxpr: Any, positions: Sequence[int]) -> list[int]:
    """Positions of inputs, in the order in which the equations read them; what none reads comes last."""
    first: dict[Var, int] = {}
    for k, equation in enumerate(jaxpr.eqns):
        for v in variables(equation):
            first.setdefault(v, k)
    return sorted(positions, key=lambda k: first.get(jaxpr.invars[k], len(jaxpr.eqns)))


def is_scan(equation: Equation) -> bool:
    return equation.primitive.name == "scan"


def is_call(equation: Equation) -> bool:
    """Whether the equation is a nested jit, which means the same as its equations in place."""
    return equation.primitive.name in ("jit", "pjit", "closed_call", "core_call")


def called(equation: Equation) -> tuple[Any, Sequence[Any]]:
    """The (jaxpr, constants) of a nested jit."""
    inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    return getattr(inner, "jaxpr", inner), getattr(inner, "consts", ())


def sub_jaxprs(equation: Equation) -> Iterator[Any]:
    """Every jaxpr among the parameters of an equation."""
    for value in equation.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(item, "jaxpr", item)
            if hasattr(inner, "eqns"):
                yield inner


def multiplies(equations: Iterable[Equation]) -> bool:
    """Whether there is a matrix product or a convolution among them, or in what they call."""
    return any(
        e.primitive.name in PRODUCTS or any(multiplies(inner.eqns) for inner in sub_jaxprs(e)) for e in equations
    )


def run(jaxpr: Any, *args: Any) -> list[Any]:
    """Runs a closed jaxpr (a scan's body, say) on flat arguments."""
    return core.jaxpr_as_fun(jaxpr)(*args)


def evaluate(equations: Sequence[Equation], scope: dict[Var, Any]) -> None:
    """Runs equations in order, reading from and writing to `scope`."""
    defined = [v for e in equations for v in e.outvars if not isinstance(v, core.DropVar)]
    own = set(defined)
    free = list(dict.fromkeys(v for e in equations for v in variables(e) if v not in own))
    effects = frozenset().union(*(e.effects for e in equations))
    jaxpr = core.ClosedJaxpr(core.Jaxpr((), free, defined, list(equations), effects, _DEBUG_INFO), ())
    scope.update(zip(defined, core.jaxpr_as_fun(jaxpr)(*[scope[v] for v in free]), strict=True))


def without_closure(fn: Callable[..., Any], *avals: Any) -> tuple[Callable[..., Any], list[Any], Any]:
    """(`pure`, `closed_over`, result): `pure(closed_over, *args)` is `fn(*args)`, but closes over no value of a trace.

    `fn` takes arrays of the given avals and returns one array; `result` is its aval.
    """
    closed, result = jax.make_jaxpr(lambda *args: fn(*args), return_shape=True)(*avals)

    def pure(closed_over: Sequence[Any], *args: Any) -> Any:
        return run(core.ClosedJaxpr(closed.jaxpr, list(closed_over)), *args)[0]

    return pure, list(closed.consts), result


def inlined(closed: Any, should_inline: Any) -> Any:
    """`closed` traced again with the nested jits for which `should_inline(equation)` holds written out in place."""

    def interpret(jaxpr: Any, consts: Iterable[Any], args: Iterable[Any]) -> list[Any]:
        scope = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
        read = lambda atom: scope[atom] if is_var(atom) else atom.val
        for equation in jaxpr.eqns:
            if is_call(equation) and should_inline(equation):
                inner, inner_consts = called(equation)
                out = interpret(inner, inner_consts, map(read, equation.invars))
                scope.update(zip(equation.outvars, out, strict=True))
            else:
                evaluate([equation], scope)
        return [read(atom) for atom in jaxpr.outvars]

    return jax.make_jaxpr(lambda *args: interpret(closed.jaxpr, closed.consts, args))(*closed.in_avals)


def with_outputs(closed: Any, outputs: Sequence[Atom]) -> Any:
    """`closed`, returning other values of its own, without the equations that these do not need."""
    live = {atom for atom in outputs if is_var(atom)}
    kept = []
    for equation in reversed(closed.jaxpr.eqns):
        if equation.effects or any(v in live for v in equation.outvars):
            kept.append(equation)
            live.update(variables(equation))
    return core.ClosedJaxpr(closed.jaxpr.replace(eqns=kept[::-1], outvars=list(outputs)), closed.consts)


def is_name(equation: Equation) -> bool:
    """Whether it names a value (`jax.ad_checkpoint.checkpoint_name`) and changes nothing."""
    return equation.primitive.name == "name"


def before_transposes(closed: Any, count: int) -> tuple[Any, list[tuple[int, ...]]]:
    """`closed` with its first `count` outputs as they are before a final transposition, and the order that is left out.

    `lax.transpose(new, order)` is the old output.
    """
    producer = {v: e for e in closed.jaxpr.eqns for v in e.outvars}
    outputs, orders = list(closed.jaxpr.outvars), []
    for i, atom in enumerate(outputs[:count]):
        equation = producer.get(atom) if is_var(atom) else None
        if equation is not None and equation.primitive.name == "transpose":
            outputs[i] = equation.invars[0]
            orders.append(tuple(equation.params["permutation"]))
        else:
            orders.append(tuple(range(atom.aval.ndim)))
    return with_outputs(closed, outputs), orders


class Origin:
    """Where the values of a jaxpr come from, seen through nested jits without tracing them again."""

    def __init__(self, jaxpr: Any, outer: dict[Var, tuple[Atom, Origin]] | None = None):
        self.producer = {v: e for e in jaxpr.eqns for v in e.outvars}
        self.outer = outer or {}
        self.calls: dict[int, Origin] = {}

    def of(self, v: Var) -> tuple[Equation | None, list[tuple[Atom, Origin]]]:
        """(the equation that computes `v`, or None for an input or a nested jit; the values that it is made of)."""
        equation = self.producer.get(v)
        if equation is None:
            return None, [self.outer[v]] if v in self.outer else []
        if not is_call(equation):
            return equation, [(read, self) for read in variables(equation)]
        inner, _ = called(equation)
        if id(equation) not in self.calls:
            operands: dict[Var, tuple[Atom, Origin]] = {
                v: (atom, self) for v, atom in zip(inner.invars, equation.invars, strict=True)
            }
            self.calls[id(equation)] = Origin(inner, operands)
        return None, [(inner.outvars[equation.outvars.index(v)], self.calls[id(equation)])]
