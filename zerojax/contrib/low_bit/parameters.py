"""Parameters in bf16 without a copy in fp32: what an update adds is rounded stochastically."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zerojax.contrib.low_bit.rounding import to_bfloat16
from zerojax.utils.typing import Array, PyTree

_FIRST_SALT = 2**16  # the random bits are others than those of moments


class RoundingState(NamedTuple):
    """The state of `stochastic_rounding`.

    Attributes:
        count: int32 scalar, the number of updates.
        inner: the state of the optimizer.
    """

    count: Array
    inner: PyTree


def stochastic_rounding(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """An optimizer for parameters in bf16. It computes in fp32, and rounds the new parameters stochastically.

    The numbers of bf16 are 0.4 to 0.8% apart: rounded to nearest, smaller updates would be lost, and AdamW's are mostly
    smaller. Rounded stochastically, parameters move as much as they should on average. They need no copy in fp32.

    In zerojax, `Zero(precision='bf16_params')` has such parameters. Put everything into `tx`: a transformation after
    this one would change updates that are rounded already.

    Args:
        tx: the optimizer, of all parameters. Its state is created for parameters in fp32.

    Returns:
        An Optax transformation, with a `RoundingState`. Parameters of other dtypes than bf16 are updated as by `tx`.

    Raises:
        ValueError: in an update, if there are no parameters.

    Cost: some 15 operations per element, which are fused with the update.

    Source: Zamirai et al., "Revisiting BFloat16 Training", arXiv 2010.06192, 2020.
    """
    inner = optax.with_extra_args_support(tx)
    widened = lambda a: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a

    def init(params: PyTree) -> RoundingState:
        return RoundingState(jnp.int32(0), tx.init(jax.tree.map(widened, params)))

    def update(updates: PyTree, state: Any, params: Any = None, **extra: Any) -> tuple[Any, RoundingState]:
        if params is None:
            raise ValueError(
                "stochastic_rounding: the update has no parameters\n  fix:      tx.update(g, state, params)"
            )
        count = jnp.asarray(optax.safe_increment(state.count))
        wide = jax.tree.map(widened, params)
        updates, inner_state = inner.update(jax.tree.map(widened, updates), state.inner, wide, **extra)
        leaves, tree = jax.tree.flatten(params)
        each = zip(leaves, jax.tree.leaves(wide), jax.tree.leaves(updates), strict=True)
        changes = [
            to_bfloat16(w + u, count, salt).astype(jnp.float32) - w if p.dtype == jnp.bfloat16 else u
            for salt, (p, w, u) in enumerate(each, _FIRST_SALT)
        ]
        return tree.unflatten(changes), RoundingState(count, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)
