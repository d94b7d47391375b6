"""A byte-level GPT in Flax Linen, trained on the standard library's source with ZeRO.

The model and the loss are those of a script for one device. The lines marked "changed" are those that ZeRO requires.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import text

import zerojax


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention: by cuDNN on GPUs, which computes it in bf16."""
    fused = jax.default_backend() == "gpu" and q.dtype == jnp.bfloat16
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn" if fused else "xla")


class Block(nn.Module):
    """A transformer block with the signature of a scan body: (x, None) -> (x, None)."""

    width: int
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        qkv = nn.DenseGeneral((3, self.heads, self.width // self.heads), use_bias=False)(nn.LayerNorm()(x))
        attended = attention(*jnp.moveaxis(qkv, -3, 0)).reshape(x.shape)
        x = x + nn.Dense(self.width, use_bias=False)(attended)
        hidden = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x)))
        return x + nn.Dense(self.width)(hidden), None


class GPT(nn.Module):
    """Runs its layers with `nn.scan`, so that the compile time does not grow with their number."""

    width: int = 256
    heads: int = 8
    layers: int = 4
    context: int = 64

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(256, self.width)(tokens)
        x = x + nn.Embed(self.context, self.width)(jnp.arange(tokens.shape[1]))
        blocks = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers)
        x, _ = blocks(self.width, self.heads)(x, None)
        return nn.Dense(256, use_bias=False)(nn.LayerNorm()(x))


model = GPT()


def create(key: jax.Array) -> dict[str, jax.Array]:
    return model.init(key, jnp.zeros((1, 64), jnp.int32))


def loss_fn(variables: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
    logits = model.apply(variables, batch["x"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def main() -> None:
    zerojax.simulate_devices(8)  # eight devices on a CPU; delete this line on a machine with accelerators
    zero = zerojax.Zero(zerojax.make_mesh(), stage=3, precision="bf16")  # changed
    state = zero.init(create, optax.adamw(1e-3, b2=0.95), seed=0)  # changed
    step = zero.train_step(loss_fn, num_microbatches=2, clip_norm=1.0)  # changed
    source = text.load()
    for i in range(20):
        state, metrics = step(state, text.batch(source, 32, 64, seed=i))  # changed
        print(f"step {i:2d}  loss {metrics['loss']:.4f}  grad norm {metrics['grad_norm']:.3f}")


if __name__ == "__main__":
    main()
