"""Cross entropy over a large vocabulary, computed in chunks of tokens, so that the full logits never exist.

The gradient is computed together with the loss, in the forward pass, because both need the logits of a chunk:

    for each chunk of tokens:   logits ► losses
                                logits ► gradient of the logits ► gradient of hidden; gradient of the head, summed
    backward:                   these gradients, times the gradient of the loss

The head is therefore multiplied as often as without chunks, and the backward pass reads neither the logits nor the
head: at stage 3 the head is gathered only once. With `jax.checkpoint` around each chunk there would be a fourth matrix
product, the head would be gathered again, and its gradient would be summed in the head's own dtype. Chunks of the
vocabulary would need no such sum. But every gradient needs the normalizer first, so each chunk of logits would be
computed twice, and the head would have to be sliceable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.program import jaxprs
from zerojax.step.losses import Weighted
from zerojax.utils.text import error_text
from zerojax.utils.typing import Array, DTypeLike, PyTree

# Arrays that `logits_of` closes over, by index.
HeadArrays: TypeAlias = dict[int, Array]


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
            floating dtype. It must treat each row independently. Examples: an `nnx.Linear`, the `attend` method of an
            embedding, `lambda x: x @ kernel`.
        hidden: [..., width], floating. The input of the head.
        labels: [...], integer. A label outside the vocabulary makes the loss NaN, unless its weight is 0.
        weights: [...], floating, integer or bool; 0 ignores a token. By default every token has weight 1.
        chunk_size: maximum number of tokens in a chunk. All chunks have the same size; the last one is padded with
            copies of the last token, with weight 0. There is less padding than there are chunks.

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
    # Trace the head on one chunk.
    _check_arguments(hidden, labels, weights, chunk_size)
    num_chunks = -(-labels.size // chunk_size)
    tokens_per_chunk = -(-labels.size // num_chunks)
    chunk_aval = jax.ShapeDtypeStruct((tokens_per_chunk, hidden.shape[-1]), hidden.dtype)
    pure_head, closed_over, logits = jaxprs.without_closure(logits_of, chunk_aval)
    _check_logits(logits, tokens_per_chunk)
    weights = jnp.ones(labels.shape, jnp.float32) if weights is None else jnp.asarray(weights, jnp.float32)

    # Cut the tokens into chunks of one size.
    def chunked(tokens: Array, mode: str = "constant") -> Array:
        """[..., *dims] -> [num_chunks, tokens_per_chunk, *dims]"""
        tokens = tokens.reshape(labels.size, *tokens.shape[labels.ndim :])
        missing = [(0, num_chunks * tokens_per_chunk - labels.size)] + [(0, 0)] * (tokens.ndim - 1)
        return jnp.pad(tokens, missing, mode).reshape(num_chunks, tokens_per_chunk, *tokens.shape[1:])

    indices = jnp.asarray(labels, jnp.int32)  # uint16 cannot represent the size of a vocabulary of 65536
    inputs = chunked(hidden, "edge"), chunked(indices, "edge"), chunked(weights)

    # Sum the losses, with a gradient for the floating arrays of the head.
    head = {i: value for i, value in enumerate(closed_over) if jnp.issubdtype(value.dtype, jnp.floating)}
    others = {i: value for i, value in enumerate(closed_over) if i not in head}
    apply = lambda head, others, hidden: pure_head([(head | others)[i] for i in range(len(closed_over))], hidden)
    weighted_sum = _chunked_sum(apply, {i: value.dtype for i, value in head.items()})
    return Weighted(weighted_sum(head, others, *inputs), weights.sum())


def _chunked_sum(
    apply: Callable[[HeadArrays, HeadArrays, Array], Array], dtypes: dict[int, DTypeLike]
) -> Callable[..., Array]:
    """Returns `weighted_sum(head, others, hidden, labels, weights)`, the weighted sum of the losses over all chunks.

    Its arguments are arrays of the head, which get a gradient, in these dtypes, and others, which do not; hidden
    [chunks, tokens, width], labels and weights [chunks, tokens]. `apply(head, others, hidden)` are logits of a chunk.
    """

    # Without a gradient.
    @jax.custom_vjp
    def weighted_sum(head: HeadArrays, others: HeadArrays, hidden: Array, labels: Array, weights: Array) -> Array:
        losses = lambda chunk: _cross_entropy(apply(head, others, chunk[0]), *chunk[1:])[0]
        return jnp.sum(weights * lax.map(losses, (hidden, labels, weights)))

    # With a gradient, chunk by chunk in the forward pass.
    def forward(
        head: HeadArrays, others: HeadArrays, hidden: Array, labels: Array, weights: Array
    ) -> tuple[Array, tuple[HeadArrays, Array, Array]]:
        def body(head_grads: HeadArrays, chunk: tuple[Array, Array, Array]) -> tuple[HeadArrays, tuple[Array, Array]]:
            hidden, labels, weights = chunk
            logits, vjp = jax.vjp(lambda head, hidden: apply(head, others, hidden), head, hidden)
            losses, logits_grad = _cross_entropy(logits, labels, weights)
            grads, hidden_grad = vjp((weights[:, None] * logits_grad).astype(logits.dtype))
            return jax.tree.map(lambda total, grad: total + grad, head_grads, grads), (losses, hidden_grad)

        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.promote_types(a.dtype, jnp.float32)), head)
        head_grads, (losses, hidden_grads) = lax.scan(body, zeros, (hidden, labels, weights))
        return jnp.sum(weights * losses), (head_grads, hidden_grads, losses)

    # Times the gradient of the sum.
    def backward(
        residuals: tuple[HeadArrays, Array, Array], grad: Array
    ) -> tuple[HeadArrays, None, Array, None, Array]:
        head_grads, hidden_grads, losses = residuals
        scaled = lambda grads, dtype: (grad * grads).astype(dtype)
        scaled_head_grads = {i: scaled(grads, dtypes[i]) for i, grads in head_grads.items()}
        return scaled_head_grads, None, scaled(hidden_grads, hidden_grads.dtype), None, grad * losses

    weighted_sum.defvjp(forward, backward)
    return weighted_sum


def _cross_entropy(logits: Array, labels: Array, weights: Array) -> tuple[Array, Array]:
    """(losses [tokens], their gradients with respect to the logits [tokens, vocabulary]), without the weights.

    The weights only say which tokens are ignored. The logit of the label is selected by a comparison, which the
    compiler fuses with the sums; indexing would compile to a gather and a scatter.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    is_label = labels[:, None] == jnp.arange(logits.shape[-1])
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    losses = normalizer - jnp.sum(jnp.where(is_label, logits, 0), axis=-1)
    is_valid = (labels >= 0) & (labels < logits.shape[-1]) | (weights == 0)
    return jnp.where(is_valid, losses, jnp.nan), jnp.exp(logits - normalizer[:, None]) - is_label


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
    got, fix = f"{got} for a chunk of {num_tokens} tokens", f"return floating logits ({num_tokens}, vocabulary)"
    raise _error("`logits_of` does not return logits", got, fix)


def _error(what: str, got: object, fix: str) -> ValueError:
    return ValueError(error_text(f"chunked_cross_entropy: {what}", got, fix))
