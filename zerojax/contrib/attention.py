"""Attention on a mesh whose axes divide the tokens of sequences, or heads."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from zerojax.program.context import divided
from zerojax.sharding.axes import CONTEXT, REPLICATED
from zerojax.utils.typing import Array


def attention(
    query: Array, key: Array, value: Array, bias: Array | None = None, mask: Array | None = None, **options: Any
) -> Array:
    """`jax.nn.dot_product_attention`, for models that train on a mesh with an axis `context` or `model`.

    JAX cannot divide cuDNN's kernel over such axes. Here, devices exchange the tokens that they have for heads: each
    computes some heads over whole sequences, with the kernel as it is, so that causal masks, windows and lengths stay
    right and all devices do the same work. It returns what the function of JAX returns, also outside of a step.

    Attention that is not fused needs no such function: XLA gathers keys and values, and divides the scores by queries.
    Heads are exchanged here if that sends less, as for C devices along `context`, N heads and K heads of keys and
    values it does if (N + K) / C < K.

    Args:
        query: of shape [B, T, N, H].
        key, value: of shape [B, S, K, H], where K divides N.
        bias, mask: as of the function of JAX, of shape [B or 1, N or 1, T or 1, S].
        **options: its other arguments, such as `scale`, `is_causal`, `local_window_size` and `implementation`. The
            latter can also be a function of (query, key, value), such as that of a Pallas kernel. It gets nothing else.

    Raises:
        ValueError: if `implementation` is 'cudnn' or a function, and the number of devices along the axes does not
            divide N, or neither divides K nor is a multiple of it; or if a function is to get more arguments.

    Cost: a device sends (C - 1) / C of its tokens' queries, keys, values and results, and as much again in the backward
        pass. If C > K, keys and values are repeated for C heads.

    Source: Jacobs et al., DeepSpeed Ulysses (arXiv:2309.14509), section 3.
    """
    kernel: Any = options.get("implementation")
    is_function = callable(kernel)
    if is_function and (len(options) > 1 or bias is not None or mask is not None):
        raise ValueError(
            f"attention: a function as implementation= gets queries, keys and values only\n"
            f"  got:      {', '.join(sorted({*options} - {'implementation'})) or 'bias or mask'} as well\n"
            f"  fix:      functools.partial(kernel, ...)"
        )

    def attend(query: Array, key: Array, value: Array, bias: Array | None, mask: Array | None) -> Array:
        if is_function:
            return kernel(query, key, value)
        return jax.nn.dot_product_attention(query, key, value, bias, mask, **options)

    mesh = jax.sharding.get_abstract_mesh()
    names = tuple(name for name in mesh.auto_axes if mesh.shape[name] > 1 and name not in ("data", "replica"))
    count, num_heads, num_keys = math.prod(mesh.shape[name] for name in names), query.shape[-2], key.shape[-2]
    divides = num_heads % count == 0 and (num_keys % count == 0 or count % num_keys == 0)
    is_kernel = kernel not in (None, "xla")
    if is_kernel and not divides:
        raise ValueError(
            f"attention: the heads do not divide over {'x'.join(names)}\n"
            f"  got:      {num_heads} heads, {num_keys} of keys and values, {count} devices\n"
            f"  fix:      a mesh on which {count} divides {num_heads}, and {num_keys} or the other way round; or "
            f"implementation='xla'"
        )
    sends_less = num_heads + max(num_keys, count) < mesh.shape.get(CONTEXT, 1) * num_keys
    if count == 1 or not divides or not (is_kernel or sends_less):
        return attend(query, key, value, bias, mask)

    if count > num_keys:
        key, value = (jnp.repeat(a, count // num_keys, axis=-2) for a in (key, value))
    heads = PartitionSpec(*[None] * (query.ndim - 2), names)
    by_head = [_spec_of_scores(a, names) for a in (bias, mask)]
    by_token = lambda a: divided(a, a.ndim - 3)  # as what comes before and after
    run = jax.shard_map(
        attend, in_specs=(heads, heads, heads, *by_head), out_specs=heads, axis_names={*names}, check_vma=False
    )
    return by_token(run(by_token(query), by_token(key), by_token(value), bias, mask))


def _spec_of_scores(a: Array | None, names: tuple[str, ...]) -> PartitionSpec:
    """The spec of a bias or a mask, whose heads, if it has any, are the third dim from the end."""
    has_heads = a is not None and a.ndim > 2 and a.shape[-3] > 1
    return PartitionSpec(*[None] * (a.ndim - 3), names) if a is not None and has_heads else REPLICATED
