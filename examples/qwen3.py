"""Qwen3 in Flax NNX, with the names of transformers, so that zerojax finds its arrays in files of Hugging Face.

RMSNorm, rotary positions, grouped-query attention with norms of queries and keys, SwiGLU, tied embeddings.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


@dataclasses.dataclass(frozen=True)
class Config:
    """The fields of config.json that define a Qwen3 model with tied embeddings."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    initializer_range: float = 0.02

    def linear(self, width: int, out: int, rngs: nnx.Rngs) -> nnx.Linear:
        init = nnx.initializers.normal(self.initializer_range)
        return nnx.Linear(width, out, use_bias=False, kernel_init=init, rngs=rngs)

    def norm(self, width: int, rngs: nnx.Rngs) -> nnx.RMSNorm:
        return nnx.RMSNorm(width, epsilon=self.rms_norm_eps, rngs=rngs)


def rotate(x: jax.Array, theta: float) -> jax.Array:
    """Rotates pairs of features of [rows, length, heads, size] by angles that grow with the position."""
    frequencies = theta ** -(jnp.arange(0, x.shape[-1], 2) / x.shape[-1])
    angles = jnp.arange(x.shape[1])[:, None, None] * frequencies
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


class Attention(nnx.Module):
    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.config = c = config
        self.q_proj = c.linear(c.hidden_size, c.num_attention_heads * c.head_dim, rngs)
        self.k_proj = c.linear(c.hidden_size, c.num_key_value_heads * c.head_dim, rngs)
        self.v_proj = c.linear(c.hidden_size, c.num_key_value_heads * c.head_dim, rngs)
        self.o_proj = c.linear(c.num_attention_heads * c.head_dim, c.hidden_size, rngs)
        self.q_norm, self.k_norm = c.norm(c.head_dim, rngs), c.norm(c.head_dim, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        heads = lambda y: y.reshape(*y.shape[:2], -1, self.config.head_dim)
        q = rotate(self.q_norm(heads(self.q_proj(x))), self.config.rope_theta)
        k = rotate(self.k_norm(heads(self.k_proj(x))), self.config.rope_theta)
        fused = jax.default_backend() == "gpu" and x.dtype == jnp.bfloat16
        attend = functools.partial(jax.nn.dot_product_attention, implementation="cudnn" if fused else "xla")
        y = attend(q, k, heads(self.v_proj(x)), is_causal=True)
        return self.o_proj(y.reshape(*y.shape[:2], -1))


class MLP(nnx.Module):
    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.gate_proj = config.linear(config.hidden_size, config.intermediate_size, rngs)
        self.up_proj = config.linear(config.hidden_size, config.intermediate_size, rngs)
        self.down_proj = config.linear(config.intermediate_size, config.hidden_size, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.input_layernorm = config.norm(config.hidden_size, rngs)
        self.self_attn = Attention(config, rngs=rngs)
        self.post_attention_layernorm = config.norm(config.hidden_size, rngs)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nnx.Module):
    """Layers are created by `nnx.vmap` and run by `nnx.scan`, so that compile time does not grow with their number."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=config.num_hidden_layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def create_layers(rngs: nnx.Rngs) -> Layer:
            return Layer(config, rngs=rngs)

        init = nnx.initializers.normal(config.initializer_range)
        self.embed_tokens = nnx.Embed(config.vocab_size, config.hidden_size, embedding_init=init, rngs=rngs)
        self.layers = create_layers(rngs)
        self.norm = config.norm(config.hidden_size, rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        def run(layer: Layer, x: jax.Array) -> jax.Array:
            return layer(x)

        x = self.embed_tokens(tokens).astype(self.norm.scale.dtype)  # nnx.Embed keeps the dtype of its creation
        return self.norm(nnx.scan(run, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.layers, x))


class Qwen3(nnx.Module):
    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.model = Decoder(config, rngs=rngs)

    def head(self, hidden: jax.Array) -> jax.Array:
        return hidden @ self.model.embed_tokens.embedding[...].astype(hidden.dtype).T

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.head(self.model(tokens))


def config_json(config: Config) -> dict[str, Any]:
    """config.json as transformers writes it. Its version 4 reads `rope_theta` and `torch_dtype`."""
    return dataclasses.asdict(config) | {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": "float32",
        "eos_token_id": 0,
        "hidden_act": "silu",
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "max_window_layers": config.num_hidden_layers,
        "model_type": "qwen3",
        "pad_token_id": 0,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "use_cache": True,
        "use_sliding_window": False,
    }
