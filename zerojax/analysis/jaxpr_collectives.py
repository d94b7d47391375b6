"""Counts the communication and the offloading of a traced step, before any compiler has changed it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

from zerojax.analysis import jaxpr_stats
from zerojax.analysis.hlo_collectives import Collective
from zerojax.utils.typing import AnyMesh


def avals_bytes(avals: Iterable[Any]) -> int:
    return sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in avals)


def traced_collectives(jaxpr: Any, mesh: AnyMesh) -> list[Collective]:
    """Returns every collective of a traced step, in the form of `hlo_collectives.compiled_collectives`.

    Which computation overlaps with a collective is up to the compiler, so none counts as exposed.

    Args:
        jaxpr: the closed jaxpr of the step.
        mesh: the mesh whose axes the jaxpr names.

    Raises:
        ValueError: if the number of times that a collective runs is unknown.
    """
    devices = np.arange(math.prod(mesh.shape.values())).reshape(tuple(mesh.shape.values()))
    found = []
    for each in jaxpr_stats.transfers(jaxpr.eqns):
        if each.kind == "offload":
            continue
        along = devices[tuple(slice(None) if name in each.axes else 0 for name in mesh.shape)].ravel()
        group = (along if each.group is None else along[list(each.group)]).tolist()
        for dtype in dict.fromkeys(aval.dtype for aval in each.values):
            full_bytes = avals_bytes(aval for aval in each.values if aval.dtype == dtype)
            found.append(
                Collective(each.kind, dtype_name(dtype), full_bytes, tuple(group), each.trips, each.loops > 0, False)
            )
    return found


def dtype_name(dtype: Any) -> str:
    """Returns the name of a dtype in compiled programs: 'bf16', 'f32', 's32'."""
    if dtype == jnp.bool_:
        return "pred"
    letters = {"bfloat": "bf", "float": "f", "int": "s", "uint": "u"}
    name = jnp.dtype(dtype).name
    word = name.rstrip("0123456789")
    return letters[word] + name.removeprefix(word) if word in letters else name.replace("float", "f").replace("_", "")


def offloaded_bytes(jaxpr: Any) -> int:
    """Returns the bytes of all arrays that a step copies to host memory."""
    transfers = jaxpr_stats.transfers(jaxpr.eqns)
    return sum(each.trips * avals_bytes(each.values) for each in transfers if each.kind == "offload")


def independent_gather_bytes(jaxpr: Any, most_itemsize: int) -> list[tuple[int, int]]:
    """Returns (loop depth, bytes of all_gathers that depend on no matrix product) of each body that gathers.

    An element counts with at most `most_itemsize` bytes: a gather in a wider dtype gathers no more weights. Of a gather
    over groups, which follows another one or is followed by it, only what it adds counts.
    """
    size = lambda aval: math.prod(aval.shape) * min(aval.dtype.itemsize, most_itemsize)
    added = lambda each: 1 - 1 / len(each.group) if each.group else 1
    total = lambda gathers: round(
        sum(each.trips * added(each) * size(aval) for each in gathers for aval in each.values)
    )
    return [(loops, total(gathers)) for loops, gathers in jaxpr_stats.independent_gathers(jaxpr) if gathers]
