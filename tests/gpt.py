"""A GPT whose size can be chosen, for checks on programs: unrolled or scanned, with or without recomputation."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import zerojax


@dataclasses.dataclass(frozen=True)
class Config:
    width: int = 64
    layers: int = 4
    heads: int = 4
    vocab: int = 64
    seq: int = 16
    scan: bool = False
    remat: bool = False
    dtype: object = None  # of the residual stream; nnx.Embed fixes its own when it is created


class Block(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        w = config.width
        self.heads = config.heads
        self.norm1, self.norm2 = nnx.LayerNorm(w, rngs=rngs), nnx.LayerNorm(w, rngs=rngs)
        self.qkv, self.out = nnx.Linear(w, 3 * w, use_bias=False, rngs=rngs), nnx.Linear(w, w, rngs=rngs)
        self.up, self.down = nnx.Linear(w, 4 * w, rngs=rngs), nnx.Linear(4 * w, w, rngs=rngs)

    def __call__(self, x_BSD):
        b, s, d = x_BSD.shape
        qkv = self.qkv(self.norm1(x_BSD)).reshape(b, s, 3, self.heads, d // self.heads)
        mixed = jax.nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True)
        x_BSD = x_BSD + self.out(mixed.reshape(b, s, d))
        return x_BSD + self.down(nnx.gelu(self.up(self.norm2(x_BSD))))


class GPT(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.config = config
        self.embed = nnx.Embed(config.vocab, config.width, dtype=config.dtype, rngs=rngs)
        self.head = nnx.Linear(config.width, config.vocab, use_bias=False, rngs=rngs)
        if config.scan:
            make = nnx.vmap(lambda rngs: Block(config, rngs), in_axes=0, out_axes=0)
            self.blocks = nnx.split_rngs(splits=config.layers)(make)(rngs)
        else:
            self.blocks = nnx.List([Block(config, rngs) for _ in range(config.layers)])

    def hidden(self, tokens_BS):
        x_BSD = self.embed(tokens_BS)
        block = nnx.remat(lambda block, x: block(x)) if self.config.remat else lambda block, x: block(x)
        if self.config.scan:
            x_BSD = nnx.scan(lambda x, b: block(b, x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x_BSD, self.blocks)
        else:
            for b in self.blocks:
                x_BSD = block(b, x_BSD)
        return x_BSD

    def __call__(self, tokens_BS):
        return self.head(self.hidden(tokens_BS))


def create(config: Config):
    return lambda rngs: GPT(config, rngs)


def loss(model, batch):
    logits = model(batch["tokens"][:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()


def chunked_loss(chunk_size):
    def loss(model, batch):
        hidden = model.hidden(batch["tokens"][:, :-1])
        return zerojax.chunked_cross_entropy(model.head, hidden, batch["tokens"][:, 1:], chunk_size=chunk_size)

    return loss


def batch_aval(config: Config, rows: int):
    return {"tokens": jax.ShapeDtypeStruct((rows, config.seq + 1), jnp.int32)}
