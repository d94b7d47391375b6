"""Spreads the copies between host and device over the computation of a layer.

Compilers start copies one or two at a time, and take a copy for short or a product for free: they then run all copies
of a layer before it computes. Each copy therefore waits for a matrix product, the one before which the layer has done
the same part of its products as its copies have moved of their bytes. Copies from the host also wait for each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from zerojax.comm.schedule import event
from zerojax.program import jaxprs
from zerojax.program.jaxprs import ClosedJaxpr
from zerojax.utils.typing import Array


class Pace:
    """The pace of the copies in one direction.

    Args:
        products: what `run_with_products` returns; [] if nothing is computed beside the copies.
        num_bytes: of all copies.
        one_by_one: whether each copy waits for the arrival of the one before.
        waits: events that the first copy waits for.
    """

    def __init__(
        self,
        products: Sequence[tuple[float, Array]],
        num_bytes: float,
        one_by_one: bool = False,
        waits: Sequence[Array] = (),
    ):
        self._products, self._num_bytes, self._one_by_one = list(products), num_bytes, one_by_one
        self._moved, self._waits = 0.0, list(waits)

    def next(self, num_bytes: float) -> list[Array]:
        """The events that the next copy, of so many bytes, waits for."""
        done = [product for part, product in self._products if part * self._num_bytes <= self._moved]
        self._moved += num_bytes
        return self._waits + event(done[-1:])

    def arrived(self, value: Array) -> None:
        """Records what the last copy has brought to the device."""
        if self._one_by_one:
            self._waits = event([value])


class Paces(NamedTuple):
    """The paces of the copies from host memory, and of those to it."""

    fetches: Pace
    puts: Pace


def run_with_products(closed: ClosedJaxpr, args: Sequence[Any]) -> tuple[list[Any], list[tuple[float, Array]]]:
    """Runs a closed jaxpr: (its results, its matrix products in order).

    Each product comes with the part of all products that has been computed with it, from 0 to 1. Products inside of
    loops and kernels do not count.
    """
    closed = jaxprs.inlined(closed)
    jaxpr = closed.jaxpr
    scope = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *args], strict=True))
    jaxprs.run_equations(jaxpr.eqns, scope)
    found = [e for e in jaxpr.eqns if e.primitive.name in jaxprs.PRODUCTS]
    sizes = [math.sqrt(math.prod(v.aval.size for v in (*e.invars[:2], *e.outvars))) for e in found]  # MK, KN and MN
    parts = [sum(sizes[: k + 1]) / sum(sizes) for k in range(len(sizes))]
    results = [scope[v] if jaxprs.is_var(v) else jnp.asarray(v.val, v.aval.dtype) for v in jaxpr.outvars]
    return results, [(part, scope[e.outvars[0]]) for part, e in zip(parts, found, strict=True)]
