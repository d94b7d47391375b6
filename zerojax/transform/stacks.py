"""Stacked leaves: which parameters were created layer by layer, read from the traced initialization."""

from __future__ import annotations

from typing import Any

from zerojax.transform import jaxprs


def stacked_paths(closed: Any, paths: list[str]) -> frozenset[str]:
    """Paths of the leaves that were created layer by layer: by a scan, or by a vmap over random keys.

    Evidence is found in the traced init: a leaf of shape (L, ...) is the stacked output of a scan of length L, or made
    of bits drawn from L keys. It extends to all leaves of the largest subtree that contains such a leaf and whose
    leaves all have the same first dim (norm scales and biases are made without keys).

    Args:
        closed: jaxpr of the init; its first outputs are the parameter leaves.
        paths: their paths.
    """
    outputs = closed.jaxpr.outvars[: len(paths)]
    sizes: dict[str, Any] = {p: v.aval.shape[0] if v.aval.ndim else None for p, v in zip(paths, outputs, strict=True)}

    def shows_layers(v: Any, origin: jaxprs.Origin, size: int, seen: set[Any]) -> bool:
        if not jaxprs.is_var(v) or (v, id(origin)) in seen:
            return False
        seen.add((v, id(origin)))
        equation, reads = origin.of(v)
        if equation is not None and jaxprs.is_scan(equation):
            scan = jaxprs.scan_params(equation)
            return equation.outvars.index(v) >= scan.num_carry and scan.length == size
        if equation is not None and equation.primitive.name == "random_bits":
            keys = equation.invars[0].aval
            return keys.ndim > 0 and keys.shape[0] == size
        return any(shows_layers(read, where, size, seen) for read, where in reads)

    top = jaxprs.Origin(closed.jaxpr)
    found = {p for p, v in zip(paths, outputs, strict=True) if sizes[p] and shows_layers(v, top, sizes[p], set())}
    extended = set(found)
    for path in found:
        parts = path.split("/")
        for end in range(1, len(parts)):
            inside = [p for p in paths if p.split("/")[:end] == parts[:end]]
            if all(sizes[p] == sizes[path] for p in inside):
                extended.update(inside)
                break
    return frozenset(extended)
