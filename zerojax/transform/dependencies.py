"""Order by dependencies: an event is a scalar that exists when something is done; what comes `after` waits for it."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

Array = Any


def after(shards: Sequence[Array], events: Sequence[Array]) -> list[Array]:
    """`shards`, unchanged, but not available to any consumer before all of `events` are computed.

    This bounds how many units are gathered at a time. An optimisation barrier does not: compilers drop barriers before
    they schedule. The dependency here is a select whose predicate, sign(event) > 1, is never true and is not folded.

    Args:
        shards: any arrays.
        events: scalars of a real dtype.

    Cost: a copy of the shards.
    """
    if not events:
        return list(shards)
    never = functools.reduce(operator.or_, [lax.sign(event) > 1 for event in events])
    return [lax.select(never, lax.full_like(s, 0), s) for s in shards]


def floating_after(values: Sequence[Array], events: Sequence[Array]) -> list[Array]:
    """The values, of which the floating ones wait for the events."""
    floating = [jnp.issubdtype(value.dtype, jnp.inexact) for value in values]
    waiting = iter(after([value for value, flag in zip(values, floating, strict=True) if flag], events))
    return [next(waiting) if flag else value for value, flag in zip(values, floating, strict=True)]


def event(values: Sequence[Array]) -> list[Array]:
    """[a scalar that is available when the first floating array among `values` is], or of an integer one, or []."""
    for kind in jnp.floating, jnp.integer:
        for value in values:
            if value.size and jnp.issubdtype(value.dtype, kind):
                return [lax.slice(value, (0,) * value.ndim, (1,) * value.ndim).reshape(())]
    return []


def events(values: Sequence[Array]) -> list[Array]:
    """An event for each floating array among `values`; without one, as `event`."""
    floating = [e for value in values if jnp.issubdtype(value.dtype, jnp.floating) for e in event([value])]
    return floating or event(values)
