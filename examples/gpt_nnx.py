"""A byte-level GPT in Flax NNX, trained on the standard library's source with ZeRO.

The model and the loss are those of a script for one device. The lines marked "changed" are those that ZeRO requires.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import text
from flax import nnx

import zerojax


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention: by cuDNN on GPUs, which computes it in bf16."""
    fused = jax.default_backend() == "gpu" and q.dtype == jnp.bfloat16
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn" if fused else "xla")


class Block(nnx.Module):
    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.qkv = nnx.LinearGeneral(width, (3, heads, width // heads), use_bias=False, rngs=rngs)
        self.out = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = jnp.moveaxis(self.qkv(self.norm1(x)), -3, 0)
        x = x + self.out(attention(q, k, v).reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    """Layers are created by `nnx.vmap` and run by `nnx.scan`, so that compile time does not grow with their number."""

    def __init__(self, width: int = 256, heads: int = 8, layers: int = 4, context: int = 64, *, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def create_blocks(rngs: nnx.Rngs) -> Block:
            return Block(width, heads, rngs=rngs)

        self.embed = nnx.Embed(256, width, rngs=rngs)
        self.position = nnx.Embed(context, width, rngs=rngs)
        self.blocks = create_blocks(rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, 256, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        def run(block: Block, x: jax.Array) -> jax.Array:
            return block(x)

        x = self.embed(tokens) + self.position(jnp.arange(tokens.shape[1]))
        x = x.astype(self.norm.scale.dtype)  # of the weights in this step: nnx.Embed keeps that of its creation
        x = nnx.scan(run, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.blocks, x)
        return self.head(self.norm(x))


def loss_fn(model: GPT, batch: dict[str, jax.Array]) -> jax.Array:
    logits = model(batch["x"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def main() -> None:
    zerojax.simulate_devices(8)  # eight devices on a CPU; delete this line on a machine with accelerators
    zero = zerojax.Zero(zerojax.make_mesh(), stage=3, precision="bf16")  # changed
    state = zero.init(GPT, optax.adamw(1e-3, b2=0.95), seed=0)  # changed
    step = zero.train_step(loss_fn, num_microbatches=2, clip_norm=1.0)  # changed
    source = text.load()
    for i in range(20):
        state, metrics = step(state, text.batch(source, 32, 64, seed=i))  # changed
        print(f"step {i:2d}  loss {metrics['loss']:.4f}  grad norm {metrics['grad_norm']:.3f}")


if __name__ == "__main__":
    main()
