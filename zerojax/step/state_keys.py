"""Random keys in the model's state: each device and microbatch draws from its own, and the loss may replace them.

A typed key (`jax.random.key`) says what it is. A key in raw form (`jax.random.PRNGKey`) is an array of uint32 like any
other, and known by its use. What the loss returns in place of a key comes from that of one device and microbatch. The
next step therefore gets a key that is folded from the one before, the same on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from zerojax.program import jaxprs
from zerojax.program.jaxprs import Jaxpr, Var
from zerojax.step.models import is_key
from zerojax.utils.typing import Array, ArrayLike, PRNGKey, PyTree

_RAW_SHAPES = {(2,), (4,)}  # of threefry; of rbg and unsafe_rbg
_NEXT = 2**32 - 1  # far from the indices of devices and microbatches


class StateKeys(NamedTuple):
    """What the loss does with each leaf of the model state, in flattening order."""

    raw: tuple[bool, ...] = ()  # whether it is a key in raw form
    replaced: tuple[bool, ...] = ()  # whether it is a key, and the loss returns another one


UNKNOWN = StateKeys()


def may_be_raw(leaf: Array) -> bool:
    """Whether an array has the dtype and the shape of keys in raw form."""
    return leaf.dtype == jnp.uint32 and leaf.shape[-1:] in _RAW_SHAPES


def may_change(model_state: PyTree) -> bool:
    """Whether a leaf may be a key in raw form, or one that the loss replaces. `nnx.Rngs` count, and keep their keys."""
    nodes = jax.tree.leaves(model_state, is_leaf=lambda node: isinstance(node, nnx.RngKey))
    arrays = [node for node in nodes if not isinstance(node, nnx.RngKey)]
    return any(is_key(a) or may_be_raw(a) for a in arrays)


def find_state_keys(jaxpr: Jaxpr, num_params: int, model_state: PyTree) -> StateKeys:
    """Finds the keys in the model state by their use in a traced loss, whose first inputs are the parameters."""
    leaves = jax.tree.leaves(model_state)
    kept = jaxprs.forwards(jaxpr)[-len(leaves) :]
    inputs = jaxpr.invars[num_params : num_params + len(leaves)]
    raw = [may_be_raw(a) and _is_used_as_key(jaxpr, {v}) for a, v in zip(leaves, inputs, strict=True)]
    flags = zip(leaves, raw, kept, strict=True)
    return StateKeys(tuple(raw), tuple((is_raw or is_key(a)) and not is_kept for a, is_raw, is_kept in flags))


def fold_keys(tree: PyTree, data: ArrayLike, raw: Sequence[bool] = ()) -> PyTree:
    """Folds an integer into every PRNG key of a tree, so that shards and microbatches draw different numbers."""
    leaves, structure = jax.tree.flatten(tree)
    flags = raw or [False] * len(leaves)
    return structure.unflatten(
        _fold_raw(a, data) if is_raw else _fold(a, data) if is_key(a) else a
        for a, is_raw in zip(leaves, flags, strict=True)
    )


def _fold(keys: PRNGKey, data: ArrayLike) -> PRNGKey:
    return jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys.reshape(-1), data).reshape(keys.shape)


def _fold_raw(keys: Array, data: ArrayLike) -> Array:
    own = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))).shape
    kind = None if keys.shape[-1:] == own else {2: "threefry2x32", 4: "rbg"}[keys.shape[-1]]
    return jax.random.key_data(_fold(jax.random.wrap_key_data(keys, impl=kind), data))


def restore_keys(after: PyTree, before: PyTree, fixed: Sequence[bool], keys: StateKeys) -> PyTree:
    """Replaces the PRNG keys in `after`, and leaves that are fixed, by those in `before`. A key that the loss has
    replaced is folded first."""
    leaves, structure = jax.tree.flatten(before)
    unknown = [False] * len(leaves)

    def restored(after: Array, before: Array, is_fixed: bool, is_raw: bool, is_replaced: bool) -> Array:
        if is_fixed:
            return before
        if not (is_raw or is_key(before)):
            return after
        return (_fold_raw if is_raw else _fold)(before, jnp.uint32(_NEXT)) if is_replaced else before

    flags = fixed, keys.raw or unknown, keys.replaced or unknown
    return structure.unflatten(map(restored, jax.tree.leaves(after), leaves, *flags))


_TAKES_KEY = {"random_wrap": 1, "threefry2x32": 2, "rng_bit_generator": 1}  # the first operands are parts of a key
_MOVES_KEY = {
    "broadcast_in_dim", "concatenate", "copy", "copy_p", "dynamic_slice", "gather", "optimization_barrier", "reshape",
    "rev", "select_n", "slice", "split", "squeeze", "transpose",
}  # fmt: skip


def _is_used_as_key(jaxpr: Jaxpr, parts: set[Var]) -> bool:
    """Whether random numbers are drawn from one of these values, directly or after operations that move elements."""
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
            if _is_used_as_key(inner, own):
                return True
            returned = [jaxprs.is_var(v) and v in own for v in inner.outvars]
            parts.update(out for out, flag in zip(equation.outvars, returned, strict=False) if flag)
    return False
