"""What a traced step sends, moves to host memory, and gathers before it computes: as written, before any compiler."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

from zerojax.analysis import jaxpr_stats
from zerojax.analysis.hlo_collectives import Collective


def num_bytes(avals: Iterable[Any]) -> int:
    return sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in avals)


def collectives(jaxpr: Any, mesh: Any) -> list[Collective]:
    """Every collective of a traced step, as `compiled.collectives` returns those of a program.

    What beside a collective computes is up to the compiler: none counts as exposed.

    Args:
        jaxpr: of the step, closed.
        mesh: whose axes it names.

    Raises:
        ValueError: how often one runs is not known.
    """
    devices = np.arange(math.prod(mesh.shape.values())).reshape(tuple(mesh.shape.values()))
    found = []
    for each in jaxpr_stats.moved(jaxpr.eqns):
        if each.kind == "offload":
            continue
        group = devices[tuple(slice(None) if name in each.axes else 0 for name in mesh.shape)].ravel().tolist()
        for dtype in dict.fromkeys(aval.dtype for aval in each.values):
            full_bytes = num_bytes(aval for aval in each.values if aval.dtype == dtype)
            found.append(
                Collective(each.kind, dtype_name(dtype), full_bytes, tuple(group), each.trips, each.loops > 0, False)
            )
    return found


def dtype_name(dtype: Any) -> str:
    """As compiled programs have it: 'bf16', 'f32', 's32'."""
    if dtype == jnp.bool_:
        return "pred"
    letters = {"bfloat": "bf", "float": "f", "int": "s", "uint": "u"}
    name = jnp.dtype(dtype).name
    word = name.rstrip("0123456789")
    return letters[word] + name.removeprefix(word) if word in letters else name.replace("float", "f").replace("_", "")


def offloaded_bytes(jaxpr: Any) -> int:
    """Of all arrays that a step copies to host memory."""
    moved = jaxpr_stats.moved(jaxpr.eqns)
    return sum(each.trips * num_bytes(each.values) for each in moved if each.kind == "offload")


def free_gather_elements(jaxpr: Any) -> list[tuple[int, int]]:
    """(loops that it is in, elements of gathers that wait for no matrix product in it) of each body that gathers."""
    total = lambda gathers: sum(each.trips * math.prod(aval.shape) for each in gathers for aval in each.values)
    return [(loops, total(gathers)) for loops, gathers in jaxpr_stats.free_gathers(jaxpr) if gathers]
