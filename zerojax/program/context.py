"""Divides the tokens of a loss over the mesh axis `context`, which is left to the compiler.

The tokens of a sequence are dim 1 of the arrays of a batch, [rows, tokens, ..]. The dim is followed from there: through
shifts of labels, lookups and everything that works token by token, up to the first activations, arrays of floating
numbers with three dims or more. A sharding constraint divides these, and XLA's partitioner does the rest: what works
token by token runs on the tokens that a device has, and where attention mixes tokens, keys and values are gathered. A
constraint moves values and changes none, so that positions, masks and means over tokens stay those of whole sequences.

Everything here runs inside `shard_map`, manual over the other data axes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from zerojax.program import jaxprs, slices
from zerojax.program.jaxprs import ClosedJaxpr, Equation, Var
from zerojax.sharding.axes import CONTEXT, REPLICATED, axis_names
from zerojax.utils.typing import Array

T = TypeVar("T")

# What mixes tokens, but has as many or nearly as many along the same dim: labels are shifted by these.
_SHIFTS = frozenset({"slice", "pad", "concatenate", "dynamic_slice", "rev", "cumsum"})


def size() -> int:
    """The number of devices along `context`, where it is left to the compiler; otherwise 1."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[CONTEXT] if CONTEXT in mesh.auto_axes else 1


def spec(dim: int | None) -> PartitionSpec:
    """The spec of an array that is divided over `context` in a dim, or not at all."""
    return REPLICATED if dim is None else PartitionSpec(*[None] * dim, CONTEXT)


def is_division(equation: Equation) -> bool:
    """Whether an equation is a constraint that divides an array over `context`."""
    if equation.primitive.name != "sharding_constraint":
        return False
    return any(CONTEXT in axis_names(entry) for entry in getattr(equation.params["sharding"], "spec", ()))


def token_dim(shape: Sequence[int]) -> int | None:
    """The dim of an activation that is divided over `context`: dim 1, or another one; None if none can be."""
    divides = [d for d, length in enumerate(shape) if length % size() == 0]
    return 1 if 1 in divides else next(iter(divides), None)


def on_parts(fn: Callable[[Array], T], dim: int | None) -> Callable[[Array], T]:
    """Applies `fn` to the part of an array that each device has. Its result may be taken from any device."""
    if size() == 1 or dim is None:
        return fn
    return jax.shard_map(fn, in_specs=spec(dim), out_specs=REPLICATED, axis_names={CONTEXT}, check_vma=False)


def divided(a: Array, dim: int | None) -> Array:
    """An array that is divided over `context` in a dim, if there are several devices, and their number divides it."""
    if size() == 1 or dim is None or a.shape[dim] % size():
        return a
    entries = (CONTEXT if d == dim else PartitionSpec.UNCONSTRAINED for d in range(a.ndim))
    return lax.with_sharding_constraint(a, PartitionSpec(*entries))


def divide_tokens(closed: ClosedJaxpr, are_rows: Sequence[bool], num_context: int) -> ClosedJaxpr:
    """A loss whose first activations are divided over `context` along their tokens.

    Args:
        closed: the loss on the rows of one device.
        are_rows: which of its inputs are arrays of the batch, with rows.
        num_context: the number of devices along the axis.

    Raises:
        ValueError: if it divides the tokens of no activation.
    """
    closed = jaxprs.inlined(closed)
    jaxpr = closed.jaxpr
    seen: list[tuple[int, ...]] = []  # the shapes of activations whose tokens do not divide
    count = 0

    def interpret(*args: Array) -> list[Array]:
        nonlocal count
        scope = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *args], strict=True))
        places: dict[Var, int] = {}  # the dim of tokens

        def follow(v: Var, place: int) -> None:
            """Divides an activation, and goes on from anything else."""
            nonlocal count
            if not jnp.issubdtype(v.aval.dtype, jnp.floating) or v.aval.ndim < 3:
                places[v] = place
            elif v.aval.shape[place] % num_context:
                seen.append(v.aval.shape)
            else:
                scope[v] = divided(scope[v], place)
                count += 1

        for v, flag in zip(jaxpr.invars, are_rows, strict=True):
            if flag and v.aval.ndim > 1:
                follow(v, 1)
        for equation in jaxpr.eqns:
            jaxprs.run_equations([equation], scope)
            for v, place in zip(equation.outvars, _places(equation, places), strict=True):
                if place is not None and not jaxprs.is_dropped(v):
                    follow(v, place)
        return [scope[a] if jaxprs.is_var(a) else jnp.asarray(a.val, a.aval.dtype) for a in jaxpr.outvars]

    new = jaxprs.traced(interpret, *closed.in_avals)[0]
    if not count:
        shapes = ", ".join(map(str, dict.fromkeys(seen))) or "none whose dim 1 has the tokens of a batch's dim 1"
        raise ValueError(
            f"context: no activation divides over {num_context} devices along its tokens\n"
            f"  got:      {shapes}\n"
            f"  fix:      pass sequences of a multiple of {num_context} tokens, in dim 1 of the arrays of the batch; "
            f"or a mesh without the axis {CONTEXT!r}"
        )
    return new


def _places(equation: Equation, places: dict[Var, int]) -> list[int | None]:
    """The dim of tokens of each result of an equation."""
    read = [places.get(a) if jaxprs.is_var(a) else None for a in equation.invars]
    known = [place for place in read if place is not None]
    if not known:
        return [None] * len(equation.outvars)
    fits = lambda link: all(dim in (None, own) for own, dim in zip(link.ins, read, strict=True))
    link = next(filter(fits, slices.links(equation)), None)
    if link is not None and not link.is_sum:
        return list(link.outs)
    keeps_dims = equation.primitive.name in _SHIFTS
    return [known[0] if keeps_dims else None] * len(equation.outvars)
