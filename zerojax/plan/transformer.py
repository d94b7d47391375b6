"""A transformer as it is planned: its shapes, the NNX module that has them, and ways to compute its attention.

They are ordinary NNX modules with a scanned stack of layers, and can be trained. Suffixes of names are dims: B rows,
S tokens per row, T all tokens, D width, H heads, K heads of keys and values, d width of a head, E experts, C tokens per
expert.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.core import ShapedArray
from jax.extend.core import Primitive

from zerojax.analysis.hardware import Chip
from zerojax.contrib.attention import attention
from zerojax.contrib.losses import chunked_cross_entropy
from zerojax.step.losses import Weighted
from zerojax.utils.typing import Array, PyTree

M = TypeVar("M", bound=nnx.Module)
Attend: TypeAlias = Callable[..., Array]  # as `blockwise_attention`
_LOSS_CHUNK = 2048  # tokens whose logits are computed at a time
EXPERT_CAPACITY = 1.25  # capacity of an expert relative to an even share of the tokens, as in GShard and Switch


@dataclasses.dataclass(frozen=True)
class Transformer:
    """The shapes of a

    Attributes:
        layers, width, heads: the number of layers, the width of activations, and the heads of queries.
        kv_heads: heads of keys and values, each shared by heads / kv_heads heads of queries.
        hidden: width inside the MLP.
        vocab: size of the vocabulary, or the number of classes for images.
        seq: tokens in a row, or patches of an image.
        rows: the default number of sequences or images on a device in a microbatch.
        llama: whether to use RMSNorm, rotary positions, a gated MLP and no biases but `biases`, instead of LayerNorm,
            learned positions, an MLP that is not gated, and biases.
        tied: whether the head shares the weights of the embedding.
        experts: the number of expert MLPs of a layer; 0 for one MLP that all tokens use.
        experts_per_token: the number of experts that each token is sent to.
        patch: the side of an image's patches in pixels; 0 for text.
        head_dim: the width of a head; 0 for width / heads.
        biases: which of the products 'qkv', 'out' and 'mlp' have biases although `llama` is set.
        gelu: whether the gated MLP uses GELU instead of SiLU.
        norms_heads: whether queries and keys are normalized, each head by itself.
        norms_outputs: whether the outputs of attention and of the MLP are normalized too.
        positions: the number of learned positions; 0 for `seq`.
        caps_scores: whether the scores of attention are softly capped. The cap is not computed, but it rules out fused
            attention.
        name, notes: of the model, for plans.
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
    experts_per_token: int = 0
    patch: int = 0
    head_dim: int = 0
    biases: tuple[str, ...] = ()
    gelu: bool = False
    norms_heads: bool = False
    norms_outputs: bool = False
    positions: int = 0
    caps_scores: bool = False
    name: str = ""
    notes: tuple[str, ...] = ()

    @property
    def width_of_head(self) -> int:
        return self.head_dim or self.width // self.heads

    @property
    def kind(self) -> str:
        """What sort of model it is, in a few words."""
        if self.patch:
            return "images"
        if self.experts:
            return f"{self.experts} experts, {self.experts_per_token} used"
        return "Llama" if self.llama else "GPT"

    def has_bias(self, product: str) -> bool:
        """Whether a product ('qkv', 'out' or 'mlp') has a bias.

        Args:
            product: one of these.
        """
        return not self.llama or product in self.biases


def with_seq(config: Transformer, seq: int | None) -> Transformer:
    """Returns the transformer with another number of tokens in a row; the same if `seq` is None.

    Raises:
        ValueError: if it has fewer learned positions, or if it classifies images.
    """
    if seq is None:
        return config
    if config.patch or seq < 1:
        fix = "leave it out: the patches of an image" if config.patch else "at least 1"
        raise ValueError(f"plan: seq of {config.name or 'the model'} is {seq}\n  fix:      {fix}")
    if config.positions and seq > config.positions:
        raise ValueError(
            f"plan: {config.name or 'the model'} has {config.positions} learned positions\n"
            f"  got:      rows of {seq} tokens\n  fix:      at most {config.positions} tokens"
        )
    return dataclasses.replace(config, seq=seq)


def _rotary(x_BSHd: Array) -> Array:
    """Applies rotary position embeddings (arXiv 2104.09864) that pair the two halves of a head."""
    seq, half = x_BSHd.shape[1], x_BSHd.shape[-1] // 2
    angles = jnp.arange(seq)[:, None] / 500000 ** (jnp.arange(half) / half)
    cos, sin = (fn(angles)[:, None].astype(x_BSHd.dtype) for fn in (jnp.cos, jnp.sin))
    a, b = x_BSHd[..., :half], x_BSHd[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _stack(create: Callable[[nnx.Rngs], M], count: int, rngs: nnx.Rngs) -> M:
    """Creates `count` modules as one module whose parameters have a leading dim."""
    return nnx.split_rngs(splits=count)(nnx.vmap(create, in_axes=0, out_axes=0))(rngs)


class Embedding(nnx.Module):
    """An embedding that returns the dtype of its weights. `nnx.Embed` returns the dtype it was created with."""

    def __init__(self, size: int, width: int, rngs: nnx.Rngs):
        self.embedding = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (size, width)))

    def __call__(self, tokens: Array) -> Array:
        return self.embedding[...][tokens]

    def attend(self, x: Array) -> Array:
        return x @ self.embedding[...].T


class Attention(nnx.Module):
    def __init__(self, config: Transformer, attention: Attend, rngs: nnx.Rngs):
        self.config, self.attention = config, attention
        self.head_dim = config.width_of_head
        bias, inner = config.has_bias("qkv"), config.heads * self.head_dim
        self.q = nnx.Linear(config.width, inner, use_bias=bias, rngs=rngs)
        self.kv = nnx.Linear(config.width, 2 * config.kv_heads * self.head_dim, use_bias=bias, rngs=rngs)
        self.out = nnx.Linear(inner, config.width, use_bias=config.has_bias("out"), rngs=rngs)
        if config.norms_heads:
            self.norm_q, self.norm_k = (nnx.RMSNorm(self.head_dim, rngs=rngs) for _ in range(2))

    def __call__(self, x_BSD: Array) -> Array:
        b, s, _ = x_BSD.shape
        q_BSHd = self.q(x_BSD).reshape(b, s, self.config.heads, self.head_dim)
        k_BSKd, v_BSKd = jnp.split(self.kv(x_BSD).reshape(b, s, 2 * self.config.kv_heads, self.head_dim), 2, axis=2)
        if self.config.norms_heads:
            q_BSHd, k_BSKd = self.norm_q(q_BSHd), self.norm_k(k_BSKd)
        if self.config.llama:
            q_BSHd, k_BSKd = _rotary(q_BSHd), _rotary(k_BSKd)
        out_BSHd = self.attention(q_BSHd, k_BSKd, v_BSKd, is_causal=not self.config.patch)
        return self.out(out_BSHd.reshape(b, s, -1))


class MLP(nnx.Module):
    def __init__(self, config: Transformer, rngs: nnx.Rngs):
        self.llama, self.activation = config.llama, nnx.gelu if config.gelu or not config.llama else nnx.silu
        bias = config.has_bias("mlp")
        self.up = nnx.Linear(config.width, config.hidden, use_bias=bias, rngs=rngs)
        if config.llama:
            self.gate = nnx.Linear(config.width, config.hidden, use_bias=bias, rngs=rngs)
        self.down = nnx.Linear(config.hidden, config.width, use_bias=bias, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return self.down(self.activation(self.gate(x)) * self.up(x) if self.llama else self.activation(self.up(x)))


class Experts(nnx.Module):
    """A mixture of experts. A router sends each token to some MLPs; tokens beyond their capacity are dropped."""

    def __init__(self, config: Transformer, rngs: nnx.Rngs):
        self.config = config
        self.router = nnx.Linear(config.width, config.experts, use_bias=False, rngs=rngs)
        self.mlps = _stack(lambda rngs: MLP(config, rngs), config.experts, rngs)

    def __call__(self, x_BSD: Array) -> Array:
        x_TD = x_BSD.reshape(-1, x_BSD.shape[-1])
        experts, per_token = self.config.experts, self.config.experts_per_token
        capacity = int(EXPERT_CAPACITY * per_token * len(x_TD) / experts)
        weights, expert = jax.lax.top_k(jax.nn.softmax(self.router(x_TD)), per_token)  # [T, per_token]
        choices = jax.nn.one_hot(expert.reshape(-1), experts, dtype=jnp.int32)
        place = jnp.sum((jnp.cumsum(choices, axis=0) - 1) * choices, axis=-1)  # among the tokens of its expert
        dropped = experts * capacity  # the last slot
        slot = jnp.where(place < capacity, expert.reshape(-1) * capacity + place, dropped)
        token = jnp.arange(len(x_TD)).repeat(per_token)
        token_of_slot = jnp.zeros(experts * capacity + 1, jnp.int32).at[slot].set(token)[:-1]
        x_ECD = x_TD[token_of_slot].reshape(experts, capacity, -1)
        y_ECD = nnx.vmap(lambda mlp, x: mlp(x))(self.mlps, x_ECD)
        y = jnp.concatenate([y_ECD.reshape(experts * capacity, -1), jnp.zeros_like(x_TD[:1])])[slot]
        y_TD = jnp.sum(y.reshape(len(x_TD), per_token, -1) * weights[..., None].astype(y.dtype), axis=1)
        return y_TD.reshape(x_BSD.shape)


class Layer(nnx.Module):
    def __init__(self, config: Transformer, attention: Attend, rngs: nnx.Rngs):
        norm = nnx.RMSNorm if config.llama else nnx.LayerNorm
        self.norm1, self.norm2 = norm(config.width, rngs=rngs), norm(config.width, rngs=rngs)
        after = lambda: norm(config.width, rngs=rngs) if config.norms_outputs else None
        self.norm1_after, self.norm2_after = after(), after()
        self.attention = Attention(config, attention, rngs)
        self.mlp = Experts(config, rngs) if config.experts else MLP(config, rngs)

    def __call__(self, x_BSD: Array) -> Array:
        attended_BSD = self.attention(self.norm1(x_BSD))
        x_BSD = x_BSD + (self.norm1_after(attended_BSD) if self.norm1_after else attended_BSD)
        y_BSD = self.mlp(self.norm2(x_BSD))
        return x_BSD + (self.norm2_after(y_BSD) if self.norm2_after else y_BSD)


def _create_layers(config: Transformer, attention: Attend, rngs: nnx.Rngs) -> tuple[Layer, nnx.Module]:
    """(the stack of layers, the final norm)."""
    norm = (nnx.RMSNorm if config.llama else nnx.LayerNorm)(config.width, rngs=rngs)
    return _stack(lambda rngs: Layer(config, attention, rngs), config.layers, rngs), norm


def _apply_layers(layers: Layer, x_BSD: Array) -> Array:
    return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x_BSD, layers)


class LanguageModel(nnx.Module):
    def __init__(self, config: Transformer, attention: Attend, rngs: nnx.Rngs):
        self.embed = Embedding(config.vocab, config.width, rngs)
        if not config.llama:
            self.positions = Embedding(config.positions or config.seq, config.width, rngs)
        self.layers, self.norm = _create_layers(config, attention, rngs)
        if not config.tied:
            self.head = nnx.Linear(config.width, config.vocab, use_bias=False, rngs=rngs)
        self.llama, self.tied = config.llama, config.tied

    def loss(self, batch: PyTree) -> Array | Weighted:
        tokens_BS, labels_BS = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        x_BSD = self.embed(tokens_BS)
        if not self.llama:
            x_BSD = x_BSD + self.positions(jnp.arange(tokens_BS.shape[1]))
        head = self.embed.attend if self.tied else self.head
        x_BSD = self.norm(_apply_layers(self.layers, x_BSD))
        return chunked_cross_entropy(head, x_BSD, labels_BS, chunk_size=_LOSS_CHUNK)


class ViT(nnx.Module):
    """A vision  Its input is already cut into patches, and it classifies by their mean."""

    def __init__(self, config: Transformer, attention: Attend, rngs: nnx.Rngs):
        self.patches = nnx.Linear(config.patch**2 * 3, config.width, rngs=rngs)
        self.positions = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (1, config.seq, config.width)))
        self.layers, self.norm = _create_layers(config, attention, rngs)
        self.head = nnx.Linear(config.width, config.vocab, rngs=rngs)

    def loss(self, batch: PyTree) -> Array:
        x_BSD = self.patches(batch["patches"])
        x_BSD = _apply_layers(self.layers, x_BSD + self.positions[...].astype(x_BSD.dtype))
        logits = self.head(self.norm(x_BSD).mean(axis=1)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


_QUERY_BLOCK = 512  # queries whose scores `blockwise_attention` computes at a time
# What JAX's fused attention takes (jax/_src/cudnn/fused_attention_stablehlo.py, jax 0.10.2).
FUSED_HEAD_MULTIPLE = 8

_ROWS_BEFORE_HEADS = 0  # the `layout` of the dims above in JAX's own primitives


def blockwise_attention(q_BSHd: Array, k_BSKd: Array, v_BSKd: Array, is_causal: bool) -> Array:
    """Like `jax.nn.dot_product_attention`, but computes the scores of one block of queries at a time.

    The backward pass recomputes the scores of each block. It runs everywhere.
    """
    seq = q_BSHd.shape[1]
    size = min(seq, _QUERY_BLOCK)
    if seq % size:  # a number of tokens that cannot be divided into blocks
        return jax.nn.dot_product_attention(q_BSHd, k_BSKd, v_BSKd, is_causal=is_causal)

    @jax.checkpoint
    def block(_: None, sliced: tuple[Array, Array]) -> tuple[None, Array]:
        q_BsHd, start = sliced
        mask = (start + jnp.arange(size)[:, None] >= jnp.arange(seq)) if is_causal else None
        return None, jax.nn.dot_product_attention(q_BsHd, k_BSKd, v_BSKd, mask=mask)

    blocks = jnp.moveaxis(q_BSHd.reshape(q_BSHd.shape[0], seq // size, size, *q_BSHd.shape[2:]), 1, 0)
    _, out = jax.lax.scan(block, None, (blocks, jnp.arange(0, seq, size)))
    return jnp.moveaxis(out, 0, 1).reshape(q_BSHd.shape)


def cudnn_attention(q_BSHd: Array, k_BSKd: Array, v_BSKd: Array, is_causal: bool) -> Array:
    """Fused attention by cuDNN, for programs for GPUs in bfloat16 or float16."""
    return attention(q_BSHd, k_BSKd, v_BSKd, is_causal=is_causal, implementation="cudnn")


def widest_fused_head(compute_capability: tuple[int, int]) -> int:
    """The widest heads that JAX's fused attention takes on a GPU."""
    return 256 if compute_capability >= (9, 0) else 128  # from the H100 on


def cudnn_attention_for_tracing(q_BSHd: Array, k_BSKd: Array, v_BSKd: Array, is_causal: bool) -> Array:
    """Is traced as `cudnn_attention` is, but without the packages of CUDA. It cannot be compiled."""
    return _attend(q_BSHd, k_BSKd, v_BSKd, is_causal)


# Traces of the kernels have the names and the residuals of those of `jax.nn.dot_product_attention`.
_forward = Primitive("dot_product_attention_fwd")
_backward = Primitive("dot_product_attention_bwd")
_forward.multiple_results = _backward.multiple_results = True


@_forward.def_abstract_eval
def _(q: ShapedArray, k: ShapedArray, v: ShapedArray, *, is_training: bool, **params: Any) -> list[ShapedArray]:
    rows, tokens, heads, _ = q.shape
    statistics = q.update(shape=(rows, heads, tokens), dtype=jnp.dtype("float32"))
    return [q, statistics] if is_training else [q]


@_backward.def_abstract_eval
def _(q: ShapedArray, k: ShapedArray, v: ShapedArray, *_: ShapedArray, **params: Any) -> list[ShapedArray]:
    return [q, k, v]


def _params(is_causal: bool) -> dict[str, Any]:
    return {"layout": _ROWS_BEFORE_HEADS, "mask_type": "CAUSAL" if is_causal else "NO_MASK"}


def _attend_unbound(q: Array, k: Array, v: Array, is_causal: bool) -> Array:
    return _forward.bind(q, k, v, is_training=False, **_params(is_causal))[0]


def _attend_forward(q: Array, k: Array, v: Array, is_causal: bool) -> tuple[Array, tuple[Array, ...]]:
    out, statistics = _forward.bind(q, k, v, is_training=True, **_params(is_causal))
    return out, (q, k, v, statistics, out)


def _attend_backward(is_causal: bool, residuals: tuple[Array, ...], grad: Array) -> tuple[Array, ...]:
    return tuple(_backward.bind(*residuals, grad, **_params(is_causal)))


_attend = jax.custom_vjp(_attend_unbound, nondiff_argnums=(3,))
_attend.defvjp(_attend_forward, _attend_backward)


def can_fuse(shapes: Transformer, chip: Chip) -> bool:
    """Whether the attention of a model can be a fused kernel on a chip."""
    head_dim = shapes.width_of_head
    takes = head_dim <= widest_head(chip) and head_dim % FUSED_HEAD_MULTIPLE == 0
    return chip.platform == "cuda" and not shapes.caps_scores and takes


def widest_head(chip: Chip) -> int:
    """The width of the widest heads that fused attention takes on a chip."""
    return widest_fused_head((8, 0) if chip.name == "a100" else (9, 0))
