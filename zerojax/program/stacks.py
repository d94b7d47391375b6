"""Finds stacked leaves, whose dim 0 counts layers, in the traced initialization of a model."""

from __future__ import annotations

from typing import Any

from zerojax.program import jaxprs
from zerojax.sharding.layer_dims import with_first_dim


def stacked_paths(closed: Any, paths: list[str]) -> frozenset[str]:
    """The paths of the leaves that a scan, or a vmap over random keys, creates for all layers at once.

    A leaf of shape [L, ...] is stacked if it is the stacked output of a scan of length L, or computed from bits that
    are drawn from L keys. Then so are all leaves of the largest subtree that contains it and whose leaves all have the
    same first dim: norm scales and biases are created without keys.

    Args:
        closed: jaxpr of the initialization; its first outputs are the parameter leaves.
        paths: the paths of the leaves.
    """
    outputs = closed.jaxpr.outvars[: len(paths)]
    shapes = {path: tuple(v.aval.shape) for path, v in zip(paths, outputs, strict=True)}

    def is_stacked(v: Any, origin: jaxprs.Origin, size: int, seen: set[Any]) -> bool:
        if not jaxprs.is_var(v) or (v, id(origin)) in seen:
            return False
        seen.add((v, id(origin)))
        equation, reads = origin.of(v)
        if equation is not None and jaxprs.is_scan(equation):
            scan = jaxprs.scan_params(equation)
            return equation.outvars.index(v) >= scan.num_carry and scan.length == size
        if equation is not None and jaxprs.is_random_bits(equation):
            return jaxprs.num_random_keys(equation) == size
        return any(is_stacked(operand, scope, size, seen) for operand, scope in reads)

    top = jaxprs.Origin(closed.jaxpr)
    size_of = lambda path: shapes[path][0] if shapes[path] else 0
    stacked = [p for p, v in zip(paths, outputs, strict=True) if size_of(p) and is_stacked(v, top, size_of(p), set())]
    subtrees = with_first_dim(shapes)
    return frozenset(inside for path in stacked for inside in subtrees[path])
