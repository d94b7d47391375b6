"""Finds inputs of a traced loss that are random keys in raw form: arrays of uint32 that it draws numbers from."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from zerojax.program import jaxprs
from zerojax.program.jaxprs import Var

_TAKES_KEY = {"random_wrap": 1, "threefry2x32": 2, "rng_bit_generator": 1}  # the first operands are parts of a key
_MOVES_KEY = {
    "broadcast_in_dim", "concatenate", "copy", "copy_p", "dynamic_slice", "gather", "optimization_barrier", "reshape",
    "rev", "select_n", "slice", "split", "squeeze", "transpose",
}  # fmt: skip


def raw_keys(jaxpr: Any, candidates: Collection[Var]) -> list[Var]:
    """Those of the inputs that random numbers are drawn from, directly or after operations that move elements."""
    return [v for v in candidates if _is_key(jaxpr, {v})]


def _is_key(jaxpr: Any, parts: set[Var]) -> bool:
    """Whether one of these values, or a part of it, is used as a key."""
    parts = set(parts)
    for equation in jaxpr.eqns:
        if not any(v in parts for v in jaxprs.variables(equation)):
            continue
        name, reads = equation.primitive.name, [jaxprs.is_var(a) and a in parts for a in equation.invars]
        if any(reads[: _TAKES_KEY.get(name, 0)]):
            return True
        if name in _MOVES_KEY:
            parts.update(equation.outvars)
        for inner in jaxprs.sub_jaxprs(equation):
            operands = zip(inner.invars[::-1], reads[::-1], strict=False)  # those of `cond` come after the index
            own = {v for v, is_read in operands if is_read}
            if _is_key(inner, own):
                return True
            returned = [jaxprs.is_var(v) and v in own for v in inner.outvars]
            parts.update(out for out, flag in zip(equation.outvars, returned, strict=False) if flag)
    return False
