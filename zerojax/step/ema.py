"""An exponential moving average of the parameters, which the optimizer keeps in fp32."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zerojax.utils.typing import Array, PyTree


class EmaState(NamedTuple):
    """The state of `ema`.

    Attributes:
        count: int32 scalar, the number of updates.
        ema_params: the average of the parameters, in fp32.
        inner: the state of the optimizer.
    """

    count: Array
    ema_params: PyTree
    inner: PyTree


def ema(tx: optax.GradientTransformation, decay: float | optax.Schedule) -> optax.GradientTransformationExtraArgs:
    """An optimizer that also keeps an exponential moving average of the parameters, and updates them as `tx` does.

    After each update, the average becomes `decay * average + (1 - decay) * parameters`. It starts from the initial
    parameters. It is computed in fp32 at every precision, from the parameters that the optimizer holds: an average of
    `state.params` in bf16 would lose each of its changes. `state.ema_params` is the average, and
    `zero.with_params(state, state.ema_params)` a state that evaluates it. `optax.ema` is another thing: it averages the
    updates.

    Args:
        tx: the whole optimizer. What comes after it in a chain would change updates that are in the average already.
        decay: in [0, 1), or a function of the number of updates so far. To forget the initial values sooner:
            `lambda count: jnp.minimum(0.999, (1 + count) / (10 + count))`.

    Returns:
        An Optax transformation, with an `EmaState`.

    Raises:
        ValueError: if `decay` is not in [0, 1), or, in an update, if there are no parameters.

    Cost: 4 bytes for each trained parameter, stored like the moments: sharded from stage 1 on, and offloaded with them.
    """
    if not callable(decay) and not 0 <= decay < 1:
        raise ValueError(f"ema: the decay is {decay}\n  fix:      choose one in [0, 1), such as 0.999")
    inner = optax.with_extra_args_support(tx)
    wide = lambda a: jnp.promote_types(a.dtype, jnp.float32)

    def init(params: PyTree) -> EmaState:
        return EmaState(jnp.int32(0), jax.tree.map(lambda a: jnp.array(a, wide(a)), params), tx.init(params))

    def update(updates: PyTree, state: Any, params: PyTree = None, **extra: PyTree) -> tuple[Any, EmaState]:
        if params is None:
            raise ValueError("ema: the update has no parameters\n  fix:      tx.update(g, state, params)")
        updates, inner_state = inner.update(updates, state.inner, params, **extra)
        share = 1 - (decay(state.count) if callable(decay) else decay)
        moved = lambda average, new: average + jnp.asarray(share, average.dtype) * (new.astype(average.dtype) - average)
        ema_params = jax.tree.map(moved, state.ema_params, optax.apply_updates(params, updates))
        count = jnp.asarray(optax.safe_increment(state.count))
        return updates, EmaState(count, ema_params, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)
