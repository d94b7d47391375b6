"""Models to plan with: language models, one mixture of experts, one vision transformer, by the shapes that they have.

They are ordinary NNX modules with a scanned stack of layers, and train like any other. Shapes are named by letters: B
rows, S tokens of a row, D width, H heads, K heads of keys and values, E experts, C tokens of an expert, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from zerojax.losses import chunked_cross_entropy

Array = Any
_QUERY_BLOCK = 512  # tokens of which `blockwise_attention` has the scores at a time
_LOSS_CHUNK = 2048  # tokens whose logits exist at a time
_CAPACITY = 1.25  # room of an expert over its even share of the tokens, as in GShard and Switch


@dataclasses.dataclass(frozen=True)
class Transformer:
    """Shapes of a transformer.

    Attributes:
        seq: tokens of a row; of images: patches.
        rows: sequences (images) on a device in a microbatch, where the plan is not told.
        kv_heads: heads of keys and values, each shared by heads / kv_heads heads of queries.
        hidden: width inside the MLP.
        llama: RMSNorm, rotary positions, gated SiLU and no biases, in place of LayerNorm, learned positions, GELU and
            biases.
        tied: the head is the embedding.
        experts, chosen: MLPs of a layer, and how many each token visits; 0 experts: one MLP that all visit.
        patch: side of an image's patches in pixels; 0 for text. `vocab` is then the number of classes.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    seq: int
    rows: int = 1
    llama: bool = False
    tied: bool = False
    experts: int = 0
    chosen: int = 0
    patch: int = 0


def _gpt(layers: int, width: int, heads: int, rows: int, seq: int = 1024) -> Transformer:
    """As GPT-2: heads of `width / heads`, an MLP four times as wide, a head tied to the embedding."""
    return Transformer(layers, width, heads, heads, 4 * width, 50304, seq, rows, tied=True)


def _llama3(layers: int, width: int, heads: int, hidden: int) -> Transformer:
    return Transformer(layers, width, heads, 8, hidden, 128256, 8192, llama=True)


# Shapes. GPT-2: the configurations published with its weights, the vocabulary of 50257 filled up to a multiple of 128,
# since products of other sizes are padded. gpt-7.5b, -128b, -1t: the ZeRO paper gives sizes, and
# 12 x layers x width^2 makes them, with heads of 128; 1T has the layers and width that ZeRO-Infinity (arXiv 2104.07857,
# table 1) trains. Llama 3: table 3 of arXiv 2407.21783. Mixtral 8x7B: table 1 of arXiv 2401.04088. ViT-H/14: table 1 of
# arXiv 2010.11929, at 224 x 224 pixels.
PRESETS = {
    "gpt2-124m": _gpt(12, 768, 12, rows=16),
    "gpt2-1.5b": _gpt(48, 1600, 25, rows=8),
    "gpt-7.5b": _gpt(36, 4096, 32, rows=4),
    "gpt-128b": _gpt(70, 12288, 96, rows=2),
    "gpt-1t": _gpt(128, 25600, 200, rows=1),
    "llama3-8b": _llama3(32, 4096, 32, 14336),
    "llama3-70b": _llama3(80, 8192, 64, 28672),
    "llama3-405b": _llama3(126, 16384, 128, 53248),
    "mixtral-8x7b": Transformer(32, 4096, 32, 8, 14336, 32000, 4096, llama=True, experts=8, chosen=2),
    "vit-h14": Transformer(32, 1280, 16, 16, 5120, 1000, 256, rows=64, patch=14),
}


class Job(NamedTuple):
    """What a plan is made for: a model, its optimizer, its loss, and a batch.

    Attributes:
        create_model: as `Zero.init` takes it.
        tx: an optax transformation.
        loss_fn: as `Zero.train_step` takes it.
        batch: `batch(rows) -> tree of avals` with that many rows on all devices together.
        rows: on a device in a microbatch, where the plan is not told.
        tokens: of a row; what tokens/s counts.
    """

    create_model: Callable[..., Any]
    tx: optax.GradientTransformation
    loss_fn: Callable[..., Any]
    batch: Callable[[int], Any]
    rows: int = 1
    tokens: int = 1


def job(config: Transformer, attention: Callable[..., Array] | None = None) -> Job:
    """A preset's model with AdamW.

    Args:
        config: its shapes.
        attention: `blockwise_attention`, the default, runs everywhere. `cudnn_attention` is in programs for GPUs alone,
            and `described_attention` in what is only traced, where it stands for the former.
    """
    attend = attention or blockwise_attention
    create = lambda rngs: (ViT if config.patch else LanguageModel)(config, attend, rngs)
    return Job(
        create, optax.adamw(1e-4), lambda model, batch: model.loss(batch), _batch(config), config.rows, config.seq
    )


def _batch(config: Transformer) -> Callable[[int], dict[str, jax.ShapeDtypeStruct]]:
    if not config.patch:
        return lambda rows: {"tokens": jax.ShapeDtypeStruct((rows, config.seq + 1), jnp.int32)}
    patches = (config.seq, config.patch**2 * 3)
    return lambda rows: {
        "patches": jax.ShapeDtypeStruct((rows, *patches), jnp.float32),
        "labels": jax.ShapeDtypeStruct((rows,), jnp.int32),
    }


def blockwise_attention(q_BSHd: Array, k_BSKd: Array, v_BSKd: Array, is_causal: bool) -> Array:
    """`jax.nn.dot_product_attention`, with the scores of one block of queries at a time, forward and backward."""
    seq = q_BSHd.shape[1]
    size = min(seq, _QUERY_BLOCK)
    if seq % size:  # few tokens (of images): at once
        return jax.nn.dot_product_attention(q_BSHd, k_BSKd, v_BSKd, is_causal=is_causal)

    @jax.checkpoint
    def block(_: None, sliced: Any) -> tuple[None, Array]:
        q_BsHd, start = sliced
        mask = (start + jnp.arange(size)[:, None] >= jnp.arange(seq)) if is_causal else None
        return None, jax.nn.dot_product_attention(q_BsHd, k_BSKd, v_BSKd, mask=mask)

    blocks = jnp.moveaxis(q_BSHd.reshape(q_BSHd.shape[0], seq // size, size, *q_BSHd.shape[2:]), 1, 0)
    _, mixed = jax.lax.scan(block, None, (blocks, jnp.arange(0, seq, size)))
    return jnp.moveaxis(mixed, 0, 1).reshape(q_BSHd.shape)


def cudnn_attention(q_BSHd: Array, k_BSKd: Array, v_BSKd: Array, is_causal: bool) -> Array:
    return jax.nn.dot_product_attention(q_BSHd, k_BSKd, v_BSKd, is_causal=is_causal, implementation="cudnn")


def described_attention(q_BSHd: Array, k_BSKd: Array, v_BSKd: Array, is_causal: bool) -> Array:
    """What `cudnn_attention` reads, returns and keeps, without the packages that tracing that one needs.

    It cannot run.
    """
    q, k, v = q_BSHd, k_BSKd, v_BSKd
    like = lambda *arrays: [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
    statistics = jax.ShapeDtypeStruct((q.shape[0], q.shape[2], q.shape[1]), jnp.float32)

    @jax.custom_vjp
    def attend(q: Array, k: Array, v: Array) -> Array:
        return forward(q, k, v)[0]

    def forward(q: Array, k: Array, v: Array) -> tuple[Array, Any]:
        mixed, normaliser = jax.pure_callback(_never_called, (*like(q), statistics), q, k, v)
        return mixed, (q, k, v, mixed, normaliser)

    def backward(kept: Any, grad: Array) -> Any:
        return tuple(jax.pure_callback(_never_called, like(q, k, v), *kept, grad))

    attend.defvjp(forward, backward)
    return attend(q, k, v)


def _never_called(*arrays: Any) -> Any:
    raise NotImplementedError("presets: `described_attention` is traced, and does not run")


def _rotated(x_BSHd: Array) -> Array:
    """Rotary positions (arXiv 2104.09864), the halves of a head paired."""
    seq, half = x_BSHd.shape[1], x_BSHd.shape[-1] // 2
    angles = jnp.arange(seq)[:, None] / 500000 ** (jnp.arange(half) / half)
    cos, sin = (fn(angles)[:, None].astype(x_BSHd.dtype) for fn in (jnp.cos, jnp.sin))
    a, b = x_BSHd[..., :half], x_BSHd[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _stack(create: Callable[[nnx.Rngs], Any], count: int, rngs: nnx.Rngs) -> Any:
    """As many modules as `count` says, in one, with a leading dim."""
    return nnx.split_rngs(splits=count)(nnx.vmap(create, in_axes=0, out_axes=0))(rngs)


class Table(nnx.Module):
    """An embedding in the dtype of its weights. `nnx.Embed` returns the one that it was created with."""

    def __init__(self, size: int, width: int, rngs: nnx.Rngs):
        self.embedding = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (size, width)))

    def __call__(self, tokens: Array) -> Array:
        return self.embedding[...][tokens]

    def attend(self, x: Array) -> Array:
        return x @ self.embedding[...].T


class Attention(nnx.Module):
    def __init__(self, config: Transformer, attention: Callable[..., Array], rngs: nnx.Rngs):
        self.config, self.attention = config, attention
        self.head_dim = config.width // config.heads
        bias = not config.llama
        self.q = nnx.Linear(config.width, config.width, use_bias=bias, rngs=rngs)
        self.kv = nnx.Linear(config.width, 2 * config.kv_heads * self.head_dim, use_bias=bias, rngs=rngs)
        self.out = nnx.Linear(config.width, config.width, use_bias=bias, rngs=rngs)

    def __call__(self, x_BSD: Array) -> Array:
        b, s, _ = x_BSD.shape
        q_BSHd = self.q(x_BSD).reshape(b, s, self.config.heads, self.head_dim)
        k_BSKd, v_BSKd = jnp.split(self.kv(x_BSD).reshape(b, s, 2 * self.config.kv_heads, self.head_dim), 2, axis=2)
        if self.config.llama:
            q_BSHd, k_BSKd = _rotated(q_BSHd), _rotated(k_BSKd)
        mixed = self.attention(q_BSHd, k_BSKd, v_BSKd, is_causal=not self.config.patch)
        return self.out(mixed.reshape(b, s, -1))


class MLP(nnx.Module):
    def __init__(self, config: Transformer, rngs: nnx.Rngs):
        self.llama = config.llama
        bias = not config.llama
        self.up = nnx.Linear(config.width, config.hidden, use_bias=bias, rngs=rngs)
        if config.llama:
            self.gate = nnx.Linear(config.width, config.hidden, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(config.hidden, config.width, use_bias=bias, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        hidden = nnx.silu(self.gate(x)) * self.up(x) if self.llama else nnx.gelu(self.up(x))
        return self.down(hidden)


class Experts(nnx.Module):
    """Each token visits the MLPs that a router chooses. An expert takes as many as it has room for."""

    def __init__(self, config: Transformer, rngs: nnx.Rngs):
        self.config = config
        self.router = nnx.Linear(config.width, config.experts, use_bias=False, rngs=rngs)
        self.mlps = _stack(lambda rngs: MLP(config, rngs), config.experts, rngs)

    def __call__(self, x_BSD: Array) -> Array:
        x_TD = x_BSD.reshape(-1, x_BSD.shape[-1])
        experts, chosen = self.config.experts, self.config.chosen
        room = int(_CAPACITY * chosen * len(x_TD) / experts)
        weights, expert = jax.lax.top_k(jax.nn.softmax(self.router(x_TD)), chosen)  # T x chosen
        visits = jax.nn.one_hot(expert.reshape(-1), experts, dtype=jnp.int32)
        place = jnp.sum((jnp.cumsum(visits, axis=0) - 1) * visits, axis=-1)  # among the tokens of its expert
        slot = jnp.where(place < room, expert.reshape(-1) * room + place, experts * room)  # the last slot is dropped
        token = jnp.arange(len(x_TD)).repeat(chosen)
        token_of_slot = jnp.zeros(experts * room + 1, jnp.int32).at[slot].set(token)[:-1]
        x_ECD = x_TD[token_of_slot].reshape(experts, room, -1)
        y_ECD = nnx.vmap(lambda mlp, x: mlp(x))(self.mlps, x_ECD)
        y = jnp.concatenate([y_ECD.reshape(experts * room, -1), jnp.zeros_like(x_TD[:1])])[slot]
        y_TD = jnp.sum(y.reshape(len(x_TD), chosen, -1) * weights[..., None].astype(y.dtype), axis=1)
        return y_TD.reshape(x_BSD.shape)


class Layer(nnx.Module):
    def __init__(self, config: Transformer, attention: Callable[..., Array], rngs: nnx.Rngs):
        norm = nnx.RMSNorm if config.llama else nnx.LayerNorm
        self.norm1, self.norm2 = norm(config.width, rngs=rngs), norm(config.width, rngs=rngs)
        self.attention = Attention(config, attention, rngs)
        self.mlp = Experts(config, rngs) if config.experts else MLP(config, rngs)

    def __call__(self, x_BSD: Array) -> Array:
        x_BSD = x_BSD + self.attention(self.norm1(x_BSD))
        return x_BSD + self.mlp(self.norm2(x_BSD))


def _layers(config: Transformer, attention: Callable[..., Array], rngs: nnx.Rngs) -> tuple[Layer, Any]:
    """(the stack of layers, the norm after them)."""
    norm = (nnx.RMSNorm if config.llama else nnx.LayerNorm)(config.width, rngs=rngs)
    return _stack(lambda rngs: Layer(config, attention, rngs), config.layers, rngs), norm


def _through(layers: Layer, x_BSD: Array) -> Array:
    return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x_BSD, layers)


class LanguageModel(nnx.Module):
    def __init__(self, config: Transformer, attention: Callable[..., Array], rngs: nnx.Rngs):
        self.embed = Table(config.vocab, config.width, rngs)
        if not config.llama:
            self.positions = Table(config.seq, config.width, rngs)
        self.layers, self.norm = _layers(config, attention, rngs)
        if not config.tied:
            self.head = nnx.Linear(config.width, config.vocab, use_bias=False, rngs=rngs)
        self.llama, self.tied = config.llama, config.tied

    def loss(self, batch: Any) -> Any:
        tokens_BS, labels_BS = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        x_BSD = self.embed(tokens_BS)
        if not self.llama:
            x_BSD = x_BSD + self.positions(jnp.arange(tokens_BS.shape[1]))
        head = self.embed.attend if self.tied else self.head
        return chunked_cross_entropy(head, self.norm(_through(self.layers, x_BSD)), labels_BS, chunk_size=_LOSS_CHUNK)


class ViT(nnx.Module):
    """Of images that are cut into patches already; classes by the mean over patches."""

    def __init__(self, config: Transformer, attention: Callable[..., Array], rngs: nnx.Rngs):
        self.patches = nnx.Linear(config.patch**2 * 3, config.width, rngs=rngs)
        self.positions = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (1, config.seq, config.width)))
        self.layers, self.norm = _layers(config, attention, rngs)
        self.head = nnx.Linear(config.width, config.vocab, rngs=rngs)

    def loss(self, batch: Any) -> Array:
        x_BSD = self.patches(batch["patches"])
        x_BSD = _through(self.layers, x_BSD + self.positions[...].astype(x_BSD.dtype))
        logits = self.head(self.norm(x_BSD).mean(axis=1)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()
