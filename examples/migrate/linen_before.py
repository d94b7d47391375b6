"""A transformer that reads the source of the standard library as bytes, in Flax Linen."""

from __future__ import annotations

import pathlib
import sysconfig
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState


class Block(nn.Module):
    width: int
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nn.make_causal_mask(x[..., 0])
        x = x + nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x), mask=mask)
        return x + nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x))))


class Model(nn.Module):
    width: int = 128
    heads: int = 4
    layers: int = 3

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(256, self.width)(tokens)
        x = x + self.param("position", nn.initializers.normal(0.02), (tokens.shape[1], self.width))
        for _ in range(self.layers):
            x = Block(self.width, self.heads)(x)
        return nn.Dense(256)(nn.LayerNorm()(x))


model = Model()


def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
    logits = model.apply({"params": params}, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@jax.jit
def train_step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
    loss, grads = jax.value_and_grad(loss_fn)(state.params, tokens)
    return state.apply_gradients(grads=grads), {"loss": loss, "grad_norm": optax.tree.norm(grads)}


def train(num_steps: int = 200, rows: int = 32, length: int = 64) -> list[float]:
    files = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = np.frombuffer(b"\n".join(file.read_bytes() for file in files), np.uint8)
    held_out = len(text) // 10
    tx = optax.adamw(optax.warmup_cosine_decay_schedule(0, 3e-3, num_steps // 10, num_steps), b2=0.95)
    params = model.init(jax.random.key(0), jnp.zeros((1, length), jnp.int32))["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    losses = []
    for i in range(num_steps):
        starts = np.random.default_rng(i).integers(held_out, len(text) - length, rows)
        tokens = text[starts[:, None] + np.arange(length + 1)].astype(np.int32)
        state, metrics = train_step(state, tokens)
        losses.append(float(metrics["loss"]))
        if i % 20 == 0:
            print(f"step {i:3d}  loss {metrics['loss']:.4f}  norm of the gradient {metrics['grad_norm']:.3f}")
    starts = np.arange(0, held_out - length - 1, held_out // 100)[:, None]
    test_loss = jax.jit(loss_fn)(state.params, text[starts + np.arange(length + 1)].astype(np.int32))
    print(f"loss on {len(starts)} excerpts of other files: {test_loss:.4f}")
    return losses


if __name__ == "__main__":
    train()
