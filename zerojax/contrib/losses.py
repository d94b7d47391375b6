"""Cross entropy over a large vocabulary, computed in tiles of tokens, so that the full logits never exist.

`train_step(tiles=...)` does the same for a loss that knows nothing of it. See `program.tiles`.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from zerojax.program import jaxprs
from zerojax.program.gradient_paths import is_differentiable
from zerojax.program.tiles import Tiling, tile
from zerojax.step.losses import Weighted
from zerojax.utils.flags import select
from zerojax.utils.text import error_text
from zerojax.utils.typing import Array, PyTree


def chunked_cross_entropy(
    logits_of: Callable[[Array], Array],
    hidden: Array,
    labels: Array,
    *,
    weights: Array | None = None,
    chunk_size: int = 1024,
) -> Weighted:
    """The cross entropy of integer labels, summed over tokens. The logits exist for one chunk of tokens at a time.

    The value is that of `optax.softmax_cross_entropy_with_integer_labels` in fp32, times `weights` and summed. So are
    its gradients with respect to `hidden`, to `weights` and to every floating array that `logits_of` closes over.

    Args:
        logits_of: the head, a function from [n, width], in the dtype of `hidden`, to logits [n, vocabulary] of any
            floating dtype. It has to treat each row independently, or all logits exist at once. Examples: an
            `nnx.Linear`, the `attend` method of an embedding, `lambda x: x @ kernel`.
        hidden: [..., width], floating. The input of the head.
        labels: [...], integer. A label outside the vocabulary makes the loss NaN, unless its weight is 0.
        weights: [...], floating, integer or bool; 0 ignores a token. By default every token has weight 1.
        chunk_size: maximum number of tokens in a chunk; on a mesh with an axis `context`, of those on a device.

    Returns:
        `Weighted(sum, weight)`, two fp32 scalars: the sum of the weighted losses, and the sum of the weights. A loss
        function can return it directly; the loss is then the mean over the tokens of all devices and microbatches.

    Raises:
        ValueError: if shapes or dtypes do not match, there are no tokens, or `chunk_size` is below 1.

    Cost: the three matrix products of the head (the logits and two gradients), as without chunks. The logits of a chunk
    and their gradient exist at the same time, chunk_size x vocabulary elements each, in the dtype of the head's output
    if the compiler fuses the fp32 operations between them (the GPU compiler does). The gradient of the head is summed
    in fp32, 4 bytes per element, in addition to the gradient of one chunk in the head's dtype. The backward pass reads
    only this sum and the gradient of `hidden`. In bf16 this takes less memory than the full logits and their gradient,
    4 bytes x tokens x vocabulary, if there are more tokens (per device and microbatch) than `width`. For each element
    of the head, a chunk does 6 x chunk_size operations and moves about 16 bytes. On an H100 in bf16 the two take the
    same time at about 800 tokens (an estimate); smaller chunks are limited by memory bandwidth.

    If a policy of `jax.checkpoint_policies` does not save the results of this function, the chunks are computed again;
    the other settings of `remat` avoid it. If no gradient is taken, only the logits are computed. Forward-mode and
    second derivatives are not supported. Under fp16, the loss scale multiplies the gradients after they are summed over
    the chunks.
    """
    _check_arguments(hidden, labels, weights, chunk_size)
    count, width = labels.size, hidden.shape[-1]
    hidden, flat_labels = hidden.reshape(count, width), jnp.asarray(labels, jnp.int32).reshape(count)
    pure_head, closed_over, logits = jaxprs.without_closure(logits_of, jax.ShapeDtypeStruct(hidden.shape, hidden.dtype))
    _check_logits(logits, count)
    weights = jnp.ones(count) if weights is None else jnp.asarray(weights, jnp.float32).reshape(count)

    def total(hidden: Array, labels: Array, weights: Array, *closed_over: Array) -> Array:
        return jnp.sum(weights * _cross_entropy(pure_head(closed_over, hidden), labels, weights))

    inputs = hidden, flat_labels, weights, *closed_over
    closed, _ = jaxprs.traced(total, *inputs)
    own = closed.jaxpr.invars
    trained = select(own, [is_differentiable(v.aval) for v in own])
    in_tiles, _ = tile(closed, own[3:], trained, Tiling(chunk_size))
    return Weighted(jaxprs.run(in_tiles, *inputs)[0], weights.sum())


def _cross_entropy(logits: Array, labels: Array, weights: Array) -> Array:
    """The losses of tokens, without the weights, which only say what is ignored.

    The logit of the label is selected by a comparison, which the compiler fuses with the sums; indexing would compile
    to a gather and a scatter.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    is_label = labels[:, None] == jnp.arange(logits.shape[-1])
    losses = jax.nn.logsumexp(logits, axis=-1) - jnp.sum(jnp.where(is_label, logits, 0), axis=-1)
    is_valid = (labels >= 0) & (labels < logits.shape[-1]) | (weights == 0)
    return jnp.where(is_valid, losses, jnp.nan)


def _check_arguments(hidden: Array, labels: Array, weights: Array | None, chunk_size: int) -> None:
    if hidden.ndim == 0 or labels.shape != hidden.shape[:-1]:
        got = f"hidden {hidden.shape}, labels {labels.shape}"
        raise _error("hidden and labels have different shapes", got, "pass hidden (..., width) and labels (...)")
    if not jnp.issubdtype(hidden.dtype, jnp.floating) or not jnp.issubdtype(labels.dtype, jnp.integer):
        fix = "pass the input of the head, and the index of each token in the vocabulary"
        got = f"hidden {hidden.dtype}, labels {labels.dtype}"
        raise _error("hidden must be floating and labels must be integer", got, fix)
    if weights is not None and weights.shape != labels.shape:
        got = f"weights {weights.shape}, labels {labels.shape}"
        raise _error("weights and labels have different shapes", got, "jnp.broadcast_to(weights, labels.shape)")
    if labels.size == 0:
        raise _error("there are no tokens", f"labels {labels.shape}", "pass at least one")
    if chunk_size < 1:
        raise _error(f"chunk_size is {chunk_size}", None, "at least 1")


def _check_logits(logits: PyTree, num_tokens: int) -> None:
    if isinstance(logits, jax.ShapeDtypeStruct):
        if logits.ndim == 2 and logits.shape[0] == num_tokens and jnp.issubdtype(logits.dtype, jnp.floating):
            return
        got = f"shape {logits.shape}, dtype {logits.dtype}"
    else:
        got = type(logits).__name__
    got, fix = f"{got} for {num_tokens} tokens", f"return floating logits ({num_tokens}, vocabulary)"
    raise _error("`logits_of` does not return logits", got, fix)


def _error(what: str, got: object, fix: str) -> ValueError:
    return ValueError(error_text(f"chunked_cross_entropy: {what}", got, fix))
