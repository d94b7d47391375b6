"""Defines the preset models of plans: language models, a mixture of experts, and a vision transformer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from zerojax.plan.attention import blockwise_attention
from zerojax.plan.job import Job
from zerojax.plan.transformer import LanguageModel, Transformer, ViT
from zerojax.utils.typing import Array


def _gpt(layers: int, width: int, heads: int, rows: int, seq: int = 1024) -> Transformer:
    """The shapes of a GPT-2: an MLP four times as wide as the activations, and a head tied to the embedding."""
    return Transformer(layers, width, heads, heads, 4 * width, 50304, seq, rows, tied=True)


def _llama3(layers: int, width: int, heads: int, hidden: int) -> Transformer:
    return Transformer(layers, width, heads, 8, hidden, 128256, 8192, llama=True)


# Sources. GPT-2: the configurations published with its weights; the vocabulary of 50257 is padded to a multiple of 128,
# since products of other sizes are padded anyway. gpt-7.5b, -128b, -1t: the ZeRO paper gives the number of parameters,
# which 12 x layers x width^2 matches, with heads of 128; the layers and width of 1T are those of ZeRO-Infinity (arXiv
# 2104.07857, table 1). Llama 3: table 3 of arXiv 2407.21783. Mixtral 8x7B: table 1 of arXiv 2401.04088. ViT-H/14: table
# 1 of arXiv 2010.11929, at 224 x 224 pixels.
_SHAPES = {
    "gpt2-124m": _gpt(12, 768, 12, rows=16),
    "gpt2-1.5b": _gpt(48, 1600, 25, rows=8),
    "gpt-7.5b": _gpt(36, 4096, 32, rows=4),
    "gpt-128b": _gpt(70, 12288, 96, rows=2),
    "gpt-1t": _gpt(128, 25600, 200, rows=1),
    "llama3-8b": _llama3(32, 4096, 32, 14336),
    "llama3-70b": _llama3(80, 8192, 64, 28672),
    "llama3-405b": _llama3(126, 16384, 128, 53248),
    "mixtral-8x7b": Transformer(32, 4096, 32, 8, 14336, 32000, 4096, llama=True, experts=8, experts_per_token=2),
    "vit-h14": Transformer(32, 1280, 16, 16, 5120, 1000, 256, rows=64, patch=14),
}
PRESETS = {name: dataclasses.replace(shapes, name=name) for name, shapes in _SHAPES.items()}


def job(config: Transformer, attention: Callable[..., Array] | None = None) -> Job:
    """Returns the job of a preset, with AdamW.

    Args:
        config: the shapes of the model.
        attention: one of `zerojax.plan.attention`; by default `blockwise_attention`, which runs everywhere.
    """
    attend = attention or blockwise_attention
    create = lambda rngs: (ViT if config.patch else LanguageModel)(config, attend, rngs)
    return Job(
        create, optax.adamw(1e-4), lambda model, batch: model.loss(batch), _batch(config), config.rows, config.seq
    )


def num_parameters(config: Transformer) -> int:
    """The number of parameters of a preset."""
    params = jax.eval_shape(lambda: nnx.state(job(config).create_model(nnx.Rngs(0)), nnx.Param))
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def _batch(config: Transformer) -> Callable[[int], dict[str, jax.ShapeDtypeStruct]]:
    if not config.patch:
        return lambda rows: {"tokens": jax.ShapeDtypeStruct((rows, config.seq + 1), jnp.int32)}
    patches = (config.seq, config.patch**2 * 3)
    return lambda rows: {
        "patches": jax.ShapeDtypeStruct((rows, *patches), jnp.float32),
        "labels": jax.ShapeDtypeStruct((rows,), jnp.int32),
    }
