"""Reads, cuts and runs the equations of a traced function.

JAX does not keep jaxprs stable between versions. All knowledge of primitives and their parameters that rewriting needs
is in this module, and is tested with the oldest and the newest supported version.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend import core
from jax.sharding import PartitionSpec

from zerojax.utils.typing import Array, ArrayLike, PyTree
from zerojax.utils.warn import line_of

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    # The types of JAX, of arrays: every `aval` has a shape and a dtype.
    class Var(core.Var):
        aval: ShapedArray

    class Literal:
        aval: ShapedArray
        val: ArrayLike

    Atom: TypeAlias = Var | Literal

    class Equation(core.JaxprEqn):
        invars: list[Atom]
        outvars: list[Var]

    class Jaxpr(core.Jaxpr):
        invars: list[Var]
        constvars: list[Var]
        outvars: list[Atom]
        eqns: list[Equation]

    class ClosedJaxpr(core.ClosedJaxpr):
        jaxpr: Jaxpr
else:
    Equation, Var, Literal, Jaxpr, ClosedJaxpr = core.JaxprEqn, core.Var, core.Literal, core.Jaxpr, core.ClosedJaxpr
    Atom = core.Var | core.Literal

CALLS = frozenset({"jit", "pjit", "closed_call", "core_call"})  # nested jits, by the names of all supported versions
_REMATS = frozenset({"remat2", "checkpoint"})
RANDOM = frozenset({"random_bits", "threefry2x32", "rng_bit_generator"})
_ELEMENT_PRESERVING = frozenset({"convert_element_type", "transpose", "copy", "copy_p", "reduce_precision"})
PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})
OF_MATRICES = frozenset({  # the last two dims of the operand
    "cholesky", "triangular_solve", "fft", "qr", "svd", "eigh", "eig", "lu", "householder_product",
})  # fmt: skip
# The forward pass of fused attention by cuDNN, as in `jax.nn.dot_product_attention(implementation="cudnn")`.
FUSED_ATTENTION = frozenset({"dot_product_attention_fwd", "dot_product_attention_fwd_wrapper"})
BY_ELEMENT = frozenset([
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "bitcast_convert_type",
    "cbrt", "ceil", "clamp", "clz", "convert_element_type", "copy", "copy_p", "cos", "cosh", "div", "eq", "eq_to",
    "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le", "le_to",
    "lgamma", "log", "log1p", "log2", "logistic", "lt", "lt_to", "max", "min", "mul", "mulhi", "ne", "neg",
    "nextafter", "not", "one_minus_square", "or", "population_count", "pow", "reduce_precision", "rem", "round",
    "rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt",
    "square", "sub", "tan", "tanh", "xor",
])  # fmt: skip
_DEBUG_INFO = core.DebugInfo("zerojax", "segment", None, None)


class ScanParams(NamedTuple):
    """The parameters of a scan equation, in the same form for every supported version of JAX."""

    num_consts: int
    num_carry: int
    body: ClosedJaxpr
    length: int
    reverse: bool


class RowLookup(NamedTuple):
    """The parameters of an equation that takes rows of a table: slices that are whole in all dims but one."""

    dim: int  # the dim of the table that the indices select from
    offset_dims: tuple[int, ...]  # the dims of the result that are dims of the table; the others are of the indices
    mode: lax.GatherScatterMode  # what indices outside of the table select, as in `lax.gather`
    fill_value: float | None


def user_line(equation: Equation) -> str | None:
    """The line of the user's code, or of a model, that an equation comes from; None if it is not known."""
    return line_of(traceback_of(equation))


def traceback_of(equation: Equation) -> TracebackType | None:
    trace = equation.source_info.traceback
    return trace and trace.as_python_traceback()


def is_var(atom: Atom) -> TypeIs[Var]:
    return not isinstance(atom, core.Literal)


def is_dropped(v: Var) -> bool:
    """Whether a result of an equation is not used, and has no name."""
    return isinstance(v, core.DropVar)


def variables(equation: Equation) -> list[Var]:
    """The variables that an equation reads, without its literals."""
    return [atom for atom in equation.invars if is_var(atom)]


def scan_params(equation: Equation) -> ScanParams:
    params = equation.params
    if "num_consts" in params:
        num_consts, num_carry = params["num_consts"], params["num_carry"]
    else:  # jax >= 0.11 keeps the operands as a flat tree of (consts, carry, xs)
        num_consts, num_carry = (len(part) for part in params["ft_in"].unpack()[:2])
    return ScanParams(num_consts, num_carry, params["jaxpr"], params["length"], params["reverse"])


def is_scan(equation: Equation) -> bool:
    return equation.primitive.name == "scan"


def row_lookup(equation: Equation) -> RowLookup | None:
    """The parameters of a lookup of rows in the first operand by the indices in the second, or None for others."""
    if equation.primitive.name != "gather" or not is_var(equation.invars[1]):
        return None
    numbers, params, shape = equation.params["dimension_numbers"], equation.params, equation.invars[0].aval.shape
    if len(numbers.start_index_map) != 1 or numbers.operand_batching_dims:
        return None
    (dim,) = numbers.start_index_map
    whole = (*shape[:dim], 1, *shape[dim + 1 :])
    if tuple(numbers.collapsed_slice_dims) != (dim,) or tuple(params["slice_sizes"]) != whole:
        return None
    return RowLookup(dim, tuple(numbers.offset_dims), params["mode"], params["fill_value"])


def is_call(equation: Equation) -> bool:
    """Whether the equation is a nested jit, which can be replaced by its equations."""
    return equation.primitive.name in CALLS


def is_remat(equation: Equation) -> bool:
    """Whether the equation is a call of a function of `jax.checkpoint`."""
    return equation.primitive.name in _REMATS


def called(equation: Equation) -> tuple[Jaxpr, Sequence[Array]]:
    """The (jaxpr, constants) of a nested jit, or of another call of a single function."""
    inner = next(
        equation.params[name] for name in ("jaxpr", "call_jaxpr", "call", "fun_jaxpr") if name in equation.params
    )
    return getattr(inner, "jaxpr", inner), getattr(inner, "consts", ())


def closed_call(equation: Equation) -> ClosedJaxpr:
    """The function that an equation calls, with its constants."""
    return _closed(cast("core.Jaxpr", called(equation)[0]), list(called(equation)[1]))


def has_own_derivative(equation: Equation) -> bool:
    """Whether the equation is a call of a function of `jax.custom_jvp` or `jax.custom_vjp`."""
    return equation.primitive.name.startswith(("custom_jvp", "custom_vjp"))


def sub_jaxprs(equation: Equation) -> Iterator[Jaxpr]:
    """Yields every jaxpr among the parameters of an equation."""
    for value in equation.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(item, "jaxpr", item)
            if hasattr(inner, "eqns"):
                yield inner


def walk(equations: Iterable[Equation]) -> Iterator[Equation]:
    """Yields the equations, each followed by those inside of it."""
    for equation in equations:
        yield equation
        for inner in sub_jaxprs(equation):
            yield from walk(inner.eqns)


def constraints(jaxpr: Jaxpr, axes: Collection[str]) -> Iterator[tuple[PartitionSpec, TracebackType | None]]:
    """Yields (spec, traceback) of each sharding constraint that names one of the mesh axes."""
    for equation in walk(jaxpr.eqns):
        if equation.primitive.name == "sharding_constraint":
            spec = getattr(equation.params["sharding"], "spec", PartitionSpec())
            if any(name in axes for part in spec for name in (part if isinstance(part, tuple) else (part,))):
                yield spec, traceback_of(equation)


def partitioned_kernels(
    jaxpr: Jaxpr, called_at: TracebackType | None = None
) -> Iterator[tuple[str, TracebackType | None]]:
    """Yields (name, traceback) of each kernel outside of `shard_map` that JAX does not divide there: those of Pallas,
    and those whose partitioning it asks a Python function for. The traceback is that of the enclosing `custom_vjp`, if
    any: inside of it, JAX starts a new one."""
    for equation in jaxpr.eqns:
        name, trace = equation.primitive.name, called_at or traceback_of(equation)
        is_pallas = name == "pallas_call" and not equation.params.get("interpret")
        if name in FUSED_ATTENTION or name == "custom_partitioning" or is_pallas:
            yield name, trace
        elif name != "shard_map":
            for inner in sub_jaxprs(equation):
                yield from partitioned_kernels(inner, trace if name.startswith("custom_vjp") else called_at)


def multiplies(equations: Iterable[Equation]) -> bool:
    """Whether the equations, or those they call, contain a matrix product or a convolution."""
    return any(equation.primitive.name in PRODUCTS for equation in walk(equations))


def is_offload(equation: Equation) -> bool:
    """Whether the equation copies an array to host memory. Copied scalars are events, and do not count."""
    moves = equation.primitive.name == "device_put" and jax.memory.Space.Host in equation.params["devices"]
    return moves and any(atom.aval.ndim for atom in equation.invars)


def offloads(jaxpr: Jaxpr) -> bool:
    """Whether a function copies arrays to host memory."""
    return any(map(is_offload, walk(jaxpr.eqns)))


def named_axes(equation: Equation) -> frozenset[str]:
    """The mesh axes that a collective is over; none for other equations."""
    named = equation.params.get("axes", equation.params.get("axis_name", ()))
    named = named if isinstance(named, tuple | list | frozenset) else (named,)
    return frozenset(name for name in named if isinstance(name, str))


def communicates_over(equation: Equation, axes: Collection[str]) -> bool:
    """Whether an equation, or one that it calls, is a collective over one of the mesh axes."""
    return any(named_axes(e) & set(axes) for e in walk([equation]))


def forwards(jaxpr: Jaxpr) -> list[bool]:
    """For each output, whether it is an input, maybe through nested jits."""
    inputs = set(jaxpr.invars)
    for equation in jaxpr.eqns:
        if is_call(equation):
            inner = called(equation)[0]
            operands = dict(zip(inner.invars, equation.invars, strict=False))
            for own, out in zip(equation.outvars, inner.outvars, strict=True):
                if is_var(out) and out in operands and is_var(operands[out]) and operands[out] in inputs:
                    inputs.add(own)
    return [is_var(v) and v in inputs for v in jaxpr.outvars]


def traced(fn: Callable[..., PyTree], *args: PyTree) -> tuple[ClosedJaxpr, PyTree]:
    """(The jaxpr of a function, the shapes of its results). The arguments are arrays or avals."""
    closed, result = jax.make_jaxpr(fn, return_shape=True)(*args)
    return cast("ClosedJaxpr", closed), result


def run(closed: ClosedJaxpr, *args: ArrayLike) -> list[Array]:
    """Runs a closed jaxpr, such as the body of a scan, on flat arguments. Outputs that are literals become arrays."""
    outputs = zip(closed.jaxpr.outvars, core.jaxpr_as_fun(closed)(*args), strict=True)
    return [value if is_var(atom) else jnp.asarray(value, atom.aval.dtype) for atom, value in outputs]


def run_equations(equations: Sequence[Equation], scope: dict[Var, Array]) -> None:
    """Runs equations in order, reading from and writing to `scope`."""
    defined = [v for e in equations for v in e.outvars if not is_dropped(v)]
    own = set(defined)
    free = list(dict.fromkeys(v for e in equations for v in variables(e) if v not in own))
    effects = frozenset().union(*(e.effects for e in equations))
    jaxpr = core.ClosedJaxpr(core.Jaxpr((), free, defined, list(equations), effects, _DEBUG_INFO), ())
    scope.update(zip(defined, core.jaxpr_as_fun(jaxpr)(*[scope[v] for v in free]), strict=True))


def fresh_variables(avals: Sequence[ShapedArray]) -> list[Var]:
    """Variables that no equation reads or defines yet."""
    return traced(lambda *args: args, *avals)[0].jaxpr.invars


def with_operands(equation: Equation, atoms: Sequence[Atom]) -> Equation:
    """An equation that reads other operands of the same types."""
    return cast("Equation", equation.replace(invars=cast("list[core.Var | core.Literal]", list(atoms))))


def without_closure(
    fn: Callable[..., Array], *avals: PyTree
) -> tuple[Callable[..., Array], list[Array], jax.ShapeDtypeStruct]:
    """Makes the values of an outer trace that `fn` closes over explicit arguments.

    Args:
        fn: takes arrays and returns one array.
        *avals: of its arguments.

    Returns:
        (`pure`, `closed_over`, result): `pure(closed_over, *args)` equals `fn(*args)`; `result` is the aval of both.
    """
    closed, result = traced(lambda *args: fn(*args), *avals)

    def pure(closed_over: Sequence[Array], *args: Array) -> Array:
        return run(with_constants(closed, closed_over), *args)[0]

    return pure, list(closed.consts), result


def inlined(
    closed: ClosedJaxpr,
    replace: Callable[[Equation, list[Array]], list[Array] | None] | None = None,
) -> ClosedJaxpr:
    """Traces `closed` again with each nested jit replaced by its equations.

    Those that make mutable arrays stay, as single equations.

    With `replace`, results that `replace(equation, operands)` returns take the place of those of an equation, unless it
    returns None; and the equations of nested jits have the line of the user at which the outermost one is called.
    """

    def interpret(
        jaxpr: Jaxpr, consts: Iterable[Array], args: Iterable[Array], caller: Equation | None = None
    ) -> list[Array]:
        scope = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
        read = lambda atom: scope[atom] if is_var(atom) else atom.val
        for equation in jaxpr.eqns:
            if caller is not None:
                equation = cast("Equation", equation.replace(source_info=caller.source_info))
            if is_call(equation) and not makes_references_inside(equation):
                inner, inner_consts = called(equation)
                outermost = caller or (equation if replace and user_line(equation) else None)
                out = interpret(inner, inner_consts, map(read, equation.invars), outermost)
            elif replace is None or (out := replace(equation, list(map(read, equation.invars)))) is None:
                run_equations([equation], scope)
                continue
            scope.update(zip(equation.outvars, out, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    return traced(lambda *args: interpret(closed.jaxpr, closed.consts, args), *closed.in_avals)[0]


def with_constants(closed: ClosedJaxpr, constants: Sequence[ArrayLike]) -> ClosedJaxpr:
    """`closed` with other values of what it closes over."""
    return _closed(closed.jaxpr, list(constants))


def with_equations(
    closed: ClosedJaxpr, equations: Sequence[Equation], inputs: Sequence[Var], outputs: Sequence[Atom]
) -> ClosedJaxpr:
    """Some of the equations of `closed` as a function of their own."""
    changes = {"eqns": list(equations), "invars": list(inputs), "outvars": list(outputs), "debug_info": _DEBUG_INFO}
    return _closed(closed.jaxpr.replace(**changes), closed.consts)


def with_outputs(closed: ClosedJaxpr, outputs: Sequence[Atom]) -> ClosedJaxpr:
    """`closed` with other outputs, which are values of it, and without the equations that these do not need."""
    live = {atom for atom in outputs if is_var(atom)}
    kept = []
    for equation in reversed(closed.jaxpr.eqns):
        if equation.effects or any(v in live for v in equation.outvars):
            kept.append(equation)
            live.update(variables(equation))
    return _closed(closed.jaxpr.replace(eqns=kept[::-1], outvars=list(outputs)), closed.consts)


def with_parts(
    closed: ClosedJaxpr, consts: Mapping[Var, ArrayLike], equations: Sequence[Equation], outputs: Sequence[Atom]
) -> ClosedJaxpr:
    """`closed` with these constants, equations and outputs."""
    changes = {"constvars": list(consts), "eqns": list(equations), "outvars": list(outputs)}
    return _closed(closed.jaxpr.replace(**changes), list(consts.values()))


def _closed(jaxpr: core.Jaxpr, consts: Sequence[ArrayLike]) -> ClosedJaxpr:
    return cast("ClosedJaxpr", core.ClosedJaxpr(jaxpr, consts))


def given_name(equation: Equation) -> str | None:
    """The name that the equation gives a value (`jax.ad_checkpoint.checkpoint_name`), or None."""
    return equation.params["name"] if equation.primitive.name == "name" else None


def permutation(equation: Equation) -> tuple[int, ...] | None:
    """The permutation of a transposition, or None for any other equation."""
    return tuple(equation.params["permutation"]) if equation.primitive.name == "transpose" else None


def preserves_elements(equation: Equation) -> bool:
    """Whether the result has the elements of the one operand: this commutes with taking a shard or a layer of it."""
    return equation.primitive.name in _ELEMENT_PRESERVING


def is_elementwise(equation: Equation) -> bool:
    """Whether each element of the one result is computed from the elements of the operands at the same index.

    Operands may also be scalars, or have dims of size one, whose one index stands for all.
    """
    ndim = equation.outvars[0].aval.ndim
    return equation.primitive.name in BY_ELEMENT and all(a.aval.ndim in (ndim, 0) for a in equation.invars)


def draws_random_bits(equation: Equation) -> bool:
    """Whether the result is worth saving even if it depends on no data: random bits from a constant key."""
    return equation.primitive.name in RANDOM


def has_side_effects(equation: Equation) -> bool:
    """Whether running the equation a second time could be seen, or give another result: callbacks, prints, references.

    JAX also counts the names of the mesh axes that a collective uses as effects.
    """
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in equation.effects)


def makes_reference(equation: Equation) -> bool:
    """Whether the equation makes a mutable array (`jax.new_ref`)."""
    return any(map(is_reference, equation.outvars))


def is_reference(v: Var) -> bool:
    """Whether a variable is a mutable array, which equations change."""
    return type(v.aval).__name__ == "AbstractRef"


def makes_references_inside(equation: Equation) -> bool:
    """Whether an equation with a jaxpr, such as a nested jit, makes mutable arrays that only it sees."""
    return any(makes_reference(e) for inner in sub_jaxprs(equation) for e in inner.eqns)


def is_random_bits(equation: Equation) -> bool:
    return equation.primitive.name == "random_bits"


def num_random_keys(equation: Equation) -> int | None:
    """The number of keys that `random_bits` draws from, dim 0 of an array of keys; None for a single key."""
    keys = equation.invars[0].aval
    return keys.shape[0] if keys.ndim else None


def apply(equation: Equation, *operands: Array) -> Array:
    """The result of an equation with one output, on other operands."""
    return equation.primitive.bind(*operands, **equation.params)


class Origin:
    """Traces the values of a jaxpr back to their equations, through nested jits and without tracing anything again."""

    def __init__(self, jaxpr: Jaxpr, outer: dict[Var, tuple[Atom, Origin]] | None = None):
        self.producer = {v: e for e in jaxpr.eqns for v in e.outvars}
        self.outer = outer or {}
        self.calls: dict[int, Origin] = {}

    def of(self, v: Var) -> tuple[Equation | None, list[tuple[Atom, Origin]]]:
        """(the equation that computes `v`, or None for an input or a nested jit; the values it is computed from)."""
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
