"""Runs a function of a stack of L layers on another number of them, if it computes each layer by itself.

The layers are followed from dim 0 of the inputs through the equations. Each rule below says in which dim of the result
they are, and an equation is run again with the sizes of another number of layers:

    [L, m, n] ─ transpose ─► [L, n, m] ─ reshape ─► [L, n m] ─ sum over dim 1 ─► [L]

What no rule knows, such as a sum over layers, is not followed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import lax

from zerojax.program import jaxprs
from zerojax.program.jaxprs import Atom, ClosedJaxpr, Equation, Jaxpr, Var
from zerojax.utils.typing import Array


class Mixed(Exception):
    """Layers meet, or no rule knows whether they do."""


class PerLayer:
    """A function of stacked layers, for any number of them.

    Args:
        closed: the function for `count` layers, without nested jits.
        stacked: of each input, whether dim 0 counts layers.
        count: the number of layers, at least two.

    Attributes:
        outputs: of each output, whether dim 0 counts layers.

    Raises `Mixed` if a layer of an output may depend on other layers.
    """

    def __init__(self, closed: ClosedJaxpr, stacked: Sequence[bool], count: int):
        self._closed, self._count = closed, count
        self._dims: dict[Var, int | None] = {}
        self._repeated: dict[Var, set[int]] = {}  # dims along which all elements are equal, of what has no layers
        dims = self._follow(closed.jaxpr, [0 if flag else None for flag in stacked])
        if any(dim not in (0, None) for dim in dims):
            raise Mixed
        self.outputs = [dim == 0 for dim in dims]

    def __call__(self, *args: Array) -> list[Array]:
        """The outputs for the number of layers that the stacked inputs have."""
        (size, *_) = [a.shape[0] for v, a in zip(self._closed.jaxpr.invars, args, strict=True) if self._dims[v] == 0]
        return self._run(self._closed.jaxpr, self._closed.consts, args, size)

    # Following

    def _follow(self, jaxpr: Jaxpr, dims: Sequence[int | None]) -> list[int | None]:
        """The dims of layers in the outputs of a jaxpr, from those in its inputs."""
        known: dict[Var, int | None] = dict(zip(jaxpr.invars, dims, strict=True))
        known.update(dict.fromkeys(jaxpr.constvars, None))
        of = lambda atom: known[atom] if jaxprs.is_var(atom) else None
        for equation in jaxpr.eqns:
            read = [of(atom) for atom in equation.invars]
            inner = _single_function(equation)
            if all(dim is None for dim in read):
                found = [None] * len(equation.outvars)
                self._repeated[equation.outvars[0]] = self._repeated_after(equation)
            elif jaxprs.is_scan(equation):
                found = self._follow_scan(equation, read)
            elif equation.primitive.name == "cond":
                found = self._follow_branches(equation, read)
            elif inner is not None:
                found = self._follow(inner, read)
            else:
                found = [self._dim_after(equation, read)] * len(equation.outvars)
            known.update(zip(equation.outvars, found, strict=True))
        self._dims |= known
        return [of(atom) for atom in jaxpr.outvars]

    def _follow_scan(self, equation: Equation, dims: Sequence[int | None]) -> list[int | None]:
        scan = jaxprs.scan_params(equation)
        own = scan.num_consts + scan.num_carry
        inner = [*dims[:own], *(_minus_one(dim) for dim in dims[own:])]
        for _ in range(len(dims) + 1):  # until the carry has layers where its results have
            found = self._follow(scan.body.jaxpr, inner)
            carry = list(map(_joined, inner[scan.num_consts : own], found[: scan.num_carry]))
            if carry == inner[scan.num_consts : own]:
                break
            inner[scan.num_consts : own] = carry
        if any(
            before is None and dim is not None for before, dim in zip(dims[scan.num_consts : own], carry, strict=True)
        ):
            raise Mixed  # it begins with a value for all layers, such as zeros
        return [*carry, *(None if dim is None else dim + 1 for dim in found[scan.num_carry :])]

    def _follow_branches(self, equation: Equation, dims: Sequence[int | None]) -> list[int | None]:
        if dims[0] is not None:
            raise Mixed
        branches = [self._follow(branch.jaxpr, dims[1:]) for branch in equation.params["branches"]]
        if any(branch != branches[0] for branch in branches):
            raise Mixed
        return branches[0]

    def _dim_after(self, equation: Equation, dims: Sequence[int | None]) -> int:
        """The dim of layers in the results of an equation; some operand has one."""
        first = next(dim for dim in dims if dim is not None)
        if jaxprs.is_elementwise(equation):
            alike = lambda atom, dim: dim == first or (dim is None and first in self._repeated_in(atom, equation))
            return _known(first if all(map(alike, equation.invars, dims)) else None)
        name = equation.primitive.name
        if name == "dot_general":
            return _known(_dim_of_product(equation, dims))
        if name in _OF_SEVERAL:
            alike = all(dim == first for dim in dims)
            return _known(first if alike and _OF_SEVERAL[name](equation, first) else None)
        if name == "reshape":
            return _known(self._dim_of_reshaped(equation, first))
        return _known(_OF_FIRST[name](equation, first) if name in _OF_FIRST and dims[0] == first else None)

    def _repeated_in(self, atom: Atom, reader: Equation) -> set[int]:
        """The dims along which all elements of an operand are equal; of a scalar, those of the result."""
        if not atom.aval.shape:
            return set(range(reader.outvars[0].aval.ndim))
        known = self._repeated.get(atom, set()) if jaxprs.is_var(atom) else set()
        return known | {dim for dim, size in enumerate(atom.aval.shape) if size == 1}

    def _repeated_after(self, equation: Equation) -> set[int]:
        operands = [self._repeated_in(atom, equation) for atom in equation.invars]
        if equation.primitive.name == "broadcast_in_dim":
            dims = equation.params["broadcast_dimensions"]
            return {d for d in range(len(equation.params["shape"])) if d not in dims or dims.index(d) in operands[0]}
        return set.intersection(*operands) if jaxprs.is_elementwise(equation) else set()

    def _dim_of_reshaped(self, equation: Equation, dim: int) -> int | None:
        before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
        outer = math.prod(before[:dim])
        places = (k for k in range(len(after)) if math.prod(after[:k]) == outer and after[k] % self._count == 0)
        return None if equation.params["dimensions"] else next(places, None)

    # Running

    def _run(self, jaxpr: Jaxpr, consts: Sequence[Array], args: Sequence[Array], size: int) -> list[Array]:
        scope = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
        read: Callable[[Atom], Array] = lambda atom: scope[atom] if jaxprs.is_var(atom) else jnp.asarray(atom.val)
        for equation in jaxpr.eqns:
            operands, inner = list(map(read, equation.invars)), _single_function(equation)
            if all(self._dims[v] is None for v in jaxprs.variables(equation)):
                jaxprs.run_equations([equation], scope)
                continue
            if jaxprs.is_scan(equation):
                found = self._run_scan(equation, operands, size)
            elif equation.primitive.name == "cond":
                branches = [lambda *a, b=b: self._run(b.jaxpr, b.consts, a, size) for b in equation.params["branches"]]
                found = lax.switch(operands[0], branches, *operands[1:])
            elif inner is not None:
                found = self._run(inner, jaxprs.called(equation)[1], operands, size)
            else:
                found = self._results(equation, operands, size)
            scope.update(zip(equation.outvars, found, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _run_scan(self, equation: Equation, operands: Sequence[Array], size: int) -> list[Array]:
        scan = jaxprs.scan_params(equation)
        own = scan.num_consts + scan.num_carry
        consts, carry, xs = operands[: scan.num_consts], operands[scan.num_consts : own], operands[own:]

        def body(carry: list[Array], xs: list[Array]) -> tuple[list[Array], list[Array]]:
            found = self._run(scan.body.jaxpr, scan.body.consts, [*consts, *carry, *xs], size)
            return found[: scan.num_carry], found[scan.num_carry :]

        last, ys = lax.scan(body, list(carry), list(xs), length=scan.length, reverse=scan.reverse)
        return [*last, *ys]

    def _results(self, equation: Equation, operands: Sequence[Array], size: int) -> list[Array]:
        """The results of an equation that reads stacked layers."""
        name, params = equation.primitive.name, equation.params
        aval, dim = equation.outvars[0].aval, self._dims[equation.outvars[0]]
        assert dim is not None
        shape = list(aval.shape)
        shape[dim] = shape[dim] // self._count * size
        if name == "broadcast_in_dim":
            return [lax.broadcast_in_dim(operands[0], shape, params["broadcast_dimensions"])]
        if name == "reshape":
            return [lax.reshape(operands[0], shape)]
        if name == "slice":
            starts = params["start_indices"]
            return [lax.slice(operands[0], starts, [k + n for k, n in zip(starts, shape, strict=True)])]
        if jaxprs.is_elementwise(equation):
            whole = lambda a: a.ndim and a.shape[dim] not in (1, shape[dim])
            one = lambda a: jnp.broadcast_to(
                lax.slice_in_dim(a, 0, 1, axis=dim), (*a.shape[:dim], shape[dim], *a.shape[dim + 1 :])
            )
            are_layers = (jaxprs.is_var(atom) and self._dims[atom] is not None for atom in equation.invars)
            operands = [a if flag or not whole(a) else one(a) for a, flag in zip(operands, are_layers, strict=True)]
        found = equation.primitive.bind(*operands, **params)
        return list(found) if equation.primitive.multiple_results else [found]


def _known(dim: int | None) -> int:
    if dim is None:
        raise Mixed
    return dim


def _dim_left(equation: Equation, dim: int) -> int | None:
    axes = equation.params["dimensions" if equation.primitive.name == "squeeze" else "axes"]
    return None if dim in axes else dim - sum(axis < dim for axis in axes)


def _sliced(equation: Equation, dim: int) -> int | None:
    is_whole = equation.outvars[0].aval.shape[dim] == equation.invars[0].aval.shape[dim]
    return dim if is_whole and equation.params["strides"] is None else None


def _is_batch(equation: Equation, dim: int) -> bool:
    """Whether a dim is before those of the matrices that an equation decomposes."""
    return dim < min(a.aval.ndim for a in equation.invars) - 2


# By primitive: the dim of layers in the result, from that in the first operand, the only one with layers.
_OF_FIRST: dict[str, Callable[[Equation, int], int | None]] = {
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"), _dim_left),
    **dict.fromkeys(("argmax", "argmin", "squeeze"), _dim_left),
    "transpose": lambda equation, dim: equation.params["permutation"].index(dim),
    "broadcast_in_dim": lambda equation, dim: equation.params["broadcast_dimensions"][dim],
    "slice": _sliced,
    "pad": lambda equation, dim: None if any(equation.params["padding_config"][dim]) else dim,
}
# Whether the dim of layers in all operands is that of the results.
_OF_SEVERAL: dict[str, Callable[[Equation, int], bool]] = {
    "concatenate": lambda equation, dim: equation.params["dimension"] != dim,
    **dict.fromkeys(jaxprs.OF_MATRICES - {"fft"}, _is_batch),
}


def _single_function(equation: Equation) -> Jaxpr | None:
    """The jaxpr of an equation that calls one function."""
    name = equation.primitive.name
    return (
        jaxprs.called(equation)[0]
        if name.startswith(("custom_jvp", "custom_vjp")) or jaxprs.is_call(equation)
        else None
    )


def _minus_one(dim: int | None) -> int | None:
    if dim == 0:  # a scan over layers
        raise Mixed
    return None if dim is None else dim - 1


def _joined(first: int | None, second: int | None) -> int | None:
    if None not in (first, second) and first != second:
        raise Mixed
    return second if first is None else first


def _dim_of_product(equation: Equation, dims: Sequence[int | None]) -> int | None:
    """The dim of layers in a product: one of its batch, or one that is free in the only operand that has layers."""
    contracted, batches = equation.params["dimension_numbers"]
    if any(dim in c for dim, c in zip(dims, contracted, strict=True)):
        return None
    in_batch = [batch.index(dim) if dim in batch else None for dim, batch in zip(dims, batches, strict=True)]
    if in_batch != [None, None]:
        return in_batch[0] if in_batch[0] == in_batch[1] else None
    if None not in dims:
        return None
    free = [
        [d for d in range(a.aval.ndim) if d not in (*c, *b)]
        for a, c, b in zip(equation.invars, contracted, batches, strict=True)
    ]
    if dims[0] is not None:
        return len(batches[0]) + free[0].index(dims[0])
    return len(batches[0]) + len(free[0]) + free[1].index(_known(dims[1]))
