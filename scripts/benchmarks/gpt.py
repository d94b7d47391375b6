"""A GPT of any size for the benchmarks and for tests of compiled programs: unrolled or scanned, with or without remat.

With `annotated=True`, its weights have sharding metadata for a `model` axis: attention heads, hidden units and the
vocabulary are divided, by columns in the first and by rows in the second of two consecutive weights.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

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
    dtype: object = None  # of the residual stream; nnx.Embed fixes its dtype when it is created
    annotated: bool = False
    attention: str | None = None  # the implementation of `jax.nn.dot_product_attention`, such as "cudnn"
    final_norm: bool = False  # a norm before the head, without which many wide layers do not train

    def sharding_metadata(self, *names):
        """The metadata of a variable whose dims are divided over these axes."""
        return {"out_sharding": names} if self.annotated else {}


class Block(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        w, columns, rows = (
            config.width,
            config.sharding_metadata(None, "model"),
            config.sharding_metadata("model", None),
        )
        self.config = config
        self.norm1, self.norm2 = nnx.LayerNorm(w, rngs=rngs), nnx.LayerNorm(w, rngs=rngs)
        self.qkv = nnx.Linear(w, 3 * w, use_bias=False, kernel_metadata=columns, rngs=rngs)
        self.out = nnx.Linear(w, w, kernel_metadata=rows, rngs=rngs)
        bias = config.sharding_metadata("model")
        self.up = nnx.Linear(w, 4 * w, kernel_metadata=columns, bias_metadata=bias, rngs=rngs)
        self.down = nnx.Linear(4 * w, w, kernel_metadata=rows, rngs=rngs)

    def __call__(self, x_BSD):
        b, s, d = x_BSD.shape
        heads = self.config.heads
        qkv = self.qkv(self.norm1(x_BSD)).reshape(b, s, heads, 3, d // heads)
        mixed = self.attend(*jnp.moveaxis(qkv, -2, 0))
        x_BSD = x_BSD + self.out(mixed.reshape(b, s, d))
        return x_BSD + self.down(nnx.gelu(self.up(self.norm2(x_BSD))))

    def attend(self, q, k, v):
        mixed = zerojax.attention(q, k, v, is_causal=True, implementation=self.config.attention)
        heads = P(None, None, "model")
        return jax.lax.with_sharding_constraint(mixed, heads) if self.config.annotated else mixed


class GPT(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.config = config
        rows, columns = config.sharding_metadata("model", None), config.sharding_metadata(None, "model")
        self.embed = nnx.Embed(config.vocab, config.width, dtype=config.dtype, embedding_metadata=rows, rngs=rngs)
        self.head = nnx.Linear(config.width, config.vocab, use_bias=False, kernel_metadata=columns, rngs=rngs)
        self.norm = nnx.LayerNorm(config.width, rngs=rngs) if config.final_norm else None
        if config.scan:
            metadata = {nnx.PARTITION_NAME: None}
            make = nnx.vmap(lambda rngs: Block(config, rngs), in_axes=0, out_axes=0, transform_metadata=metadata)
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
        return self.norm(x_BSD) if self.norm else x_BSD

    def __call__(self, tokens_BS):
        return self.head(self.hidden(tokens_BS))


def create(config: Config):
    return lambda rngs: GPT(config, rngs)


def cross_entropy(logits, targets):
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets).mean()


def loss(model, batch):
    logits = model(batch["tokens"][:, :-1]).astype(jnp.float32)
    return cross_entropy(logits, batch["tokens"][:, 1:])


def chunked_loss(chunk_size):
    def loss(model, batch):
        hidden = model.hidden(batch["tokens"][:, :-1])
        return zerojax.chunked_cross_entropy(model.head, hidden, batch["tokens"][:, 1:], chunk_size=chunk_size)

    return loss


def layer_sizes(config: Config):
    """The number of elements of each leaf of a layer."""
    return [a.size for a in jax.tree.leaves(nnx.eval_shape(lambda: nnx.state(Block(config, nnx.Rngs(0)))))]


def batch_aval(config: Config, rows: int):
    return {"tokens": jax.ShapeDtypeStruct((rows, config.seq + 1), jnp.int32)}
