"""The loss over a large vocabulary, computed in chunks: at no time do the logits of all tokens exist.

The gradient is computed where the loss is, in the forward pass, because a chunk's logits are needed for both:

    for each chunk of tokens:   logits ► losses
                                logits ► gradient of the logits ► gradient of hidden; gradient of the head, summed up
    backward:                   these gradients, times the gradient of the loss

So the head multiplies as often as it does without chunks, and the backward pass reads neither logits nor the head:
at stage 3 the head is gathered once. `jax.checkpoint` around a chunk would take a fourth product and the head again,
and would sum the head's gradient in the head's own dtype. Chunks of the vocabulary would need no such sum, but the
normaliser before any gradient, hence each chunk's logits twice, and a head that can be sliced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.step.models import Weighted
from zerojax.transform import jaxprs

Array = Any


def chunked_cross_entropy(
    logits_of: Callable[[Array], Array],
    hidden: Array,
    labels: Array,
    *,
    weights: Array | None = None,
    chunk_size: int = 1024,
) -> Weighted:
    """The cross entropy of integer labels, summed over tokens, with the logits of one chunk of tokens at a time.

    Equal to `optax.softmax_cross_entropy_with_integer_labels` in fp32, times `weights` and summed, as is its gradient:
    with respect to `hidden`, to `weights` and to everything floating that `logits_of` closes over.

    Args:
        logits_of: the head: from (n, width), in the dtype of `hidden`, to logits (n, vocabulary) of any floating dtype.
            It treats each row alone. An `nnx.Linear`, the `attend` of an embedding, `lambda x: x @ kernel`.
        hidden: (..., width), floating: what the head is applied to.
        labels: (...), integers. One outside the vocabulary makes the loss NaN, unless its weight is 0.
        weights: (...), floating, integer or bool; 0 ignores a token. Default: every token counts 1.
        chunk_size: the largest number of tokens in a chunk. Chunks are of equal size; what is missing in the last one
            is filled with copies of the last token that weigh nothing, fewer than there are chunks.

    Returns:
        `Weighted(sum, weight)`, both scalars in fp32: the sum of weights times losses, and the sum of weights. A loss
        function returns it as it is, for the mean over the tokens of all devices and microbatches.

    Raises:
        ValueError: shapes or dtypes that do not fit, no tokens, or a `chunk_size` below 1.

    Cost: the three products of the head (logits, two gradients), as without chunks. Held at a time are a chunk's logits
    and their gradient, chunk_size x vocabulary each, in the dtype of the head's result where the compiler fuses the
    fp32 steps between them (the GPU compiler does). The gradient of the head is summed in fp32, 4 bytes an element,
    beside that of one chunk in the head's dtype; with that of `hidden` it is all that the backward pass reads. In bf16
    this is less than all logits and their gradient, 4 bytes x tokens x vocabulary, where there are more tokens (of a
    device, in a microbatch) than `width`. A chunk does 6 x chunk_size operations and moves some 16 bytes for each
    element of the head, which balance on an H100 in bf16 at 800 tokens (estimated): smaller chunks wait for memory.

    Where a policy of `keep` ('dots') drops the results of the head's unit, the chunks are computed again; 'everything'
    for that unit avoids it, and so does 'nothing' (see `Keep`). A loss without a gradient computes the logits alone.
    There is no forward-mode and no second derivative. Under fp16 the loss scale reaches the gradients after the chunks.
    """
    _check_arguments(hidden, labels, weights, chunk_size)
    num_chunks = -(-labels.size // chunk_size)
    size = -(-labels.size // num_chunks)
    pure, closed_over, logits = jaxprs.without_closure(
        logits_of, jax.ShapeDtypeStruct((size, hidden.shape[-1]), hidden.dtype)
    )
    _check_logits(logits, size)
    weights = jnp.ones(labels.shape, jnp.float32) if weights is None else jnp.asarray(weights, jnp.float32)

    def chunks(tokens: Array, **padding: Any) -> Array:
        tokens = tokens.reshape(labels.size, *tokens.shape[labels.ndim :])
        missing = [(0, num_chunks * size - labels.size)] + [(0, 0)] * (tokens.ndim - 1)
        return jnp.pad(tokens, missing, **padding).reshape(num_chunks, size, *tokens.shape[1:])

    head = {i: value for i, value in enumerate(closed_over) if jnp.issubdtype(value.dtype, jnp.floating)}
    rest = {i: value for i, value in enumerate(closed_over) if i not in head}
    apply = lambda head, rest, hidden: pure([(head | rest)[i] for i in range(len(closed_over))], hidden)
    total = _chunked_sum(apply, {i: value.dtype for i, value in head.items()})
    indices = jnp.asarray(labels, jnp.int32)  # in uint16 a vocabulary of 65536 would have no size
    padded = chunks(hidden, mode="edge"), chunks(indices, mode="edge"), chunks(weights)
    return Weighted(total(head, rest, *padded), weights.sum())


def _chunked_sum(apply: Callable[[Any, Any, Array], Array], dtypes: dict[int, Any]) -> Callable[..., Array]:
    """`total(head, rest, hidden, labels, weights)`: the weighted sum over chunks, the leading dim of the last three.

    Args:
        apply: `apply(head, rest, hidden) -> logits` of a chunk; `head` is a dict of what gets a gradient.
        dtypes: of `head`.
    """

    @jax.custom_vjp
    def total(head: Any, rest: Any, hidden: Array, labels: Array, weights: Array) -> Array:
        losses = lambda chunk: _cross_entropy(apply(head, rest, chunk[0]), *chunk[1:])[0]
        return jnp.sum(weights * lax.map(losses, (hidden, labels, weights)))

    def forward(head: Any, rest: Any, hidden: Array, labels: Array, weights: Array) -> tuple[Array, Any]:
        def body(head_grads: Any, chunk: Any) -> tuple[Any, Any]:
            hidden, labels, weights = chunk
            logits, vjp = jax.vjp(lambda head, hidden: apply(head, rest, hidden), head, hidden)
            losses, logits_grad = _cross_entropy(logits, labels, weights)
            grads, hidden_grad = vjp((weights[:, None] * logits_grad).astype(logits.dtype))
            return jax.tree.map(lambda total, grad: total + grad, head_grads, grads), (losses, hidden_grad)

        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.promote_types(a.dtype, jnp.float32)), head)
        head_grads, (losses, hidden_grads) = lax.scan(body, zeros, (hidden, labels, weights))
        return jnp.sum(weights * losses), (head_grads, hidden_grads, losses)

    def backward(kept: Any, grad: Array) -> tuple[Any, None, Array, None, Array]:
        head_grads, hidden_grads, losses = kept
        scaled = lambda grads, dtype: (grad * grads).astype(dtype)
        of_head = {i: scaled(grads, dtypes[i]) for i, grads in head_grads.items()}
        return of_head, None, scaled(hidden_grads, hidden_grads.dtype), None, grad * losses

    total.defvjp(forward, backward)
    return total


def _cross_entropy(logits: Array, labels: Array, weights: Array) -> tuple[Array, Array]:
    """(losses, their gradient with respect to the logits), without the weights, which only say what is ignored.

    A comparison picks the label's logit, which the compiler fuses with the sums; an index would read and scatter.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    is_label = labels[:, None] == jnp.arange(logits.shape[-1])
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    losses = normaliser - jnp.sum(jnp.where(is_label, logits, 0), axis=-1)
    valid = (labels >= 0) & (labels < logits.shape[-1]) | (weights == 0)
    return jnp.where(valid, losses, jnp.nan), jnp.exp(logits - normaliser[:, None]) - is_label


def _check_arguments(hidden: Array, labels: Array, weights: Array | None, chunk_size: int) -> None:
    if hidden.ndim == 0 or labels.shape != hidden.shape[:-1]:
        raise ValueError(
            "chunked_cross_entropy: one label for each row of hidden\n"
            f"  got:      hidden {hidden.shape}, labels {labels.shape}\n"
            "  fix:      hidden (..., width) and labels (...)"
        )
    if not jnp.issubdtype(hidden.dtype, jnp.floating) or not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(
            "chunked_cross_entropy: hidden is floating, and labels are integers\n"
            f"  got:      hidden {hidden.dtype}, labels {labels.dtype}\n"
            "  fix:      pass what the head is applied to, and the index of each token"
        )
    if weights is not None and weights.shape != labels.shape:
        raise ValueError(
            "chunked_cross_entropy: one weight for each label\n"
            f"  got:      weights {weights.shape}, labels {labels.shape}\n"
            "  fix:      jnp.broadcast_to(weights, labels.shape)"
        )
    if labels.size == 0:
        raise ValueError(
            f"chunked_cross_entropy: no tokens\n  got:      labels {labels.shape}\n  fix:      at least one"
        )
    if chunk_size < 1:
        raise ValueError(f"chunked_cross_entropy: chunk_size is {chunk_size}\n  fix:      at least 1")


def _check_logits(logits: Any, size: int) -> None:
    if isinstance(logits, jax.ShapeDtypeStruct):
        if logits.ndim == 2 and logits.shape[0] == size and jnp.issubdtype(logits.dtype, jnp.floating):
            return
        got = f"shape {logits.shape}, dtype {logits.dtype}"
    else:
        got = type(logits).__name__
    raise ValueError(
        "chunked_cross_entropy: `logits_of` returns no logits\n"
        f"  got:      {got} for a chunk of {size} tokens\n"
        f"  fix:      floating logits ({size}, vocabulary)"
    )
