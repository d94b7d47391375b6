"""Orders computation by data dependencies on events: scalars that become available when something is done."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from zerojax.utils.typing import Array, DTypeLike, Shape


def after(values: Sequence[Array], events: Sequence[Array]) -> list[Array]:
    """The values, unchanged, but not available to their consumers before all of `events` are computed.

    This limits how many units are gathered at a time. An optimization barrier cannot: compilers drop barriers before
    they schedule. The dependency here is a select with the predicate sign(event) > 1, which is never true but which
    compilers do not simplify.

    Args:
        values: any arrays.
        events: scalars of a real dtype.

    Cost: a copy of the values.
    """
    if not events:
        return list(values)
    never = functools.reduce(operator.or_, [lax.sign(event) > 1 for event in events])
    return [lax.select(never, lax.full_like(value, 0), value) for value in values]


def floating_after(values: Sequence[Array], events: Sequence[Array]) -> list[Array]:
    """Like `after`, but only the floating values wait."""
    floating = [jnp.issubdtype(value.dtype, jnp.inexact) for value in values]
    waiting = iter(after([value for value, flag in zip(values, floating, strict=True) if flag], events))
    return [next(waiting) if flag else value for value, flag in zip(values, floating, strict=True)]


def zeros_after(shape: Shape, dtype: DTypeLike, events: Sequence[Array]) -> Array:
    """An array of zeros that is not allocated before all of `events` are computed."""
    (one,) = after([jnp.ones((), dtype)], events)  # compilers simplify a selection between zeros
    return lax.broadcast(1 - one, shape)


def event(values: Sequence[Array]) -> list[Array]:
    """[an event of the first floating array among `values`, or of the first integer one], or [] without either."""
    for kind in jnp.floating, jnp.integer:
        for value in values:
            if value.size and jnp.issubdtype(value.dtype, kind):
                return [lax.slice(value, (0,) * value.ndim, (1,) * value.ndim).reshape(())]
    return []


def events(values: Sequence[Array]) -> list[Array]:
    """An event for each floating array among `values`; if there is none, the result of `event`."""
    floating = [e for value in values if jnp.issubdtype(value.dtype, jnp.floating) for e in event([value])]
    return floating or event(values)
