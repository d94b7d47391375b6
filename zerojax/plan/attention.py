"""Ways to compute attention in the models of the presets, and one that can be traced without a GPU's packages.

Arguments have dims [rows, tokens, heads, head width], as those of `jax.nn.dot_product_attention`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Primitive

_QUERY_BLOCK = 512  # queries whose scores `blockwise_attention` computes at a time
# What JAX's fused attention takes (jax/_src/cudnn/fused_attention_stablehlo.py, jax 0.10.2).
FUSED_HEAD_MULTIPLE = 8
_WIDE_HEADS_FROM = (9, 0)  # the compute capability of an H100
_ROWS_BEFORE_HEADS = 0  # the `layout` of the dims above in JAX's own primitives


def blockwise_attention(q_BSHd: Array, k_BSKd: Array, v_BSKd: Array, is_causal: bool) -> Array:
    """Like `jax.nn.dot_product_attention`, but computes the scores of one block of queries at a time.

    The backward pass recomputes the scores of each block. It runs everywhere.
    """
    seq = q_BSHd.shape[1]
    size = min(seq, _QUERY_BLOCK)
    if seq % size:  # a number of tokens that cannot be divided into blocks
        return jax.nn.dot_product_attention(q_BSHd, k_BSKd, v_BSKd, is_causal=is_causal)

    @jax.checkpoint
    def block(_: None, sliced: Any) -> tuple[None, Array]:
        q_BsHd, start = sliced
        mask = (start + jnp.arange(size)[:, None] >= jnp.arange(seq)) if is_causal else None
        return None, jax.nn.dot_product_attention(q_BsHd, k_BSKd, v_BSKd, mask=mask)

    blocks = jnp.moveaxis(q_BSHd.reshape(q_BSHd.shape[0], seq // size, size, *q_BSHd.shape[2:]), 1, 0)
    _, out = jax.lax.scan(block, None, (blocks, jnp.arange(0, seq, size)))
    return jnp.moveaxis(out, 0, 1).reshape(q_BSHd.shape)


def cudnn_attention(q_BSHd: Array, k_BSKd: Array, v_BSKd: Array, is_causal: bool) -> Array:
    """Fused attention by cuDNN, for programs for GPUs in bfloat16 or float16."""
    return jax.nn.dot_product_attention(q_BSHd, k_BSKd, v_BSKd, is_causal=is_causal, implementation="cudnn")


def widest_fused_head(compute_capability: tuple[int, int]) -> int:
    """The widest heads that JAX's fused attention takes on a GPU."""
    return 256 if compute_capability >= _WIDE_HEADS_FROM else 128


def cudnn_attention_for_tracing(q_BSHd: Array, k_BSKd: Array, v_BSKd: Array, is_causal: bool) -> Array:
    """Is traced as `cudnn_attention` is, but without the packages of CUDA. It cannot be compiled."""
    return _attend(q_BSHd, k_BSKd, v_BSKd, is_causal)


# Traces of the kernels have the names and the residuals of those of `jax.nn.dot_product_attention`.
_forward = Primitive("dot_product_attention_fwd")
_backward = Primitive("dot_product_attention_bwd")
_forward.multiple_results = _backward.multiple_results = True


@_forward.def_abstract_eval
def _(q: Any, k: Any, v: Any, *, is_training: bool, **params: Any) -> list[Any]:
    rows, tokens, heads, _ = q.shape
    statistics = q.update(shape=(rows, heads, tokens), dtype=jnp.dtype("float32"))
    return [q, statistics] if is_training else [q]


@_backward.def_abstract_eval
def _(q: Any, k: Any, v: Any, *residuals_and_grad: Any, **params: Any) -> list[Any]:
    return [q, k, v]


def _params(is_causal: bool) -> dict[str, Any]:
    return {"layout": _ROWS_BEFORE_HEADS, "mask_type": "CAUSAL" if is_causal else "NO_MASK"}


def _attend_unbound(q: Array, k: Array, v: Array, is_causal: bool) -> Array:
    return _forward.bind(q, k, v, is_training=False, **_params(is_causal))[0]


def _attend_forward(q: Array, k: Array, v: Array, is_causal: bool) -> tuple[Array, Any]:
    out, statistics = _forward.bind(q, k, v, is_training=True, **_params(is_causal))
    return out, (q, k, v, statistics, out)


def _attend_backward(is_causal: bool, residuals: Any, grad: Array) -> Any:
    return tuple(_backward.bind(*residuals, grad, **_params(is_causal)))


_attend = jax.custom_vjp(_attend_unbound, nondiff_argnums=(3,))
_attend.defvjp(_attend_forward, _attend_backward)
