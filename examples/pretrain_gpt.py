"""Pretrains a small language model on Python's own source, and writes it as a model of Hugging Face.

python examples/pretrain_gpt.py --out /tmp/run --devices 8
python examples/pretrain_gpt.py --out /tmp/run --devices 4 --stage 1 --resume         # continues it on other devices
zerojax launch -n 2 --devices 4 python examples/pretrain_gpt.py --out /tmp/run        # in two processes

The model is Qwen3: RMSNorm, rotary positions, grouped-query attention with norms of queries and keys, SwiGLU, tied
embeddings. A tokenizer is trained first, on the same files. DIR/hf has the result: config.json, tokenizer.json and the
weights, which transformers, tunix and other programs load as a Qwen3ForCausalLM.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import logging
import math
import pathlib
import sysconfig
import zlib
from collections.abc import Sequence
from typing import Any

import common
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

import zerojax
from zerojax import processes
from zerojax.exchange import parameters

END = "<|endoftext|>"  # between files; token 0
PROMPTS = ("def __init__(self", "import os\n", "class Test", "    for i in range(")


# The model, with the names of transformers: zerojax knows how files of Hugging Face spell them


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


def loss_fn(model: Qwen3, batch: dict[str, jax.Array]) -> zerojax.Weighted:
    """The mean over the tokens that follow others; -1 stands for none."""
    hidden = model.model(batch["x"])
    return zerojax.chunked_cross_entropy(model.head, hidden, batch["y"], weights=batch["y"] >= 0)


def optimizer(steps: int, rate: float) -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(0, rate, max(1, steps // 20), steps, rate / 10)
    return optax.inject_hyperparams(optax.adamw)(schedule, b2=0.95, weight_decay=0.1)


# The data: files of the standard library, as tokens


def sources(held_out: bool) -> list[str]:
    """The files of the standard library without its tests: every 25th, or all others."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    others = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    files = sorted(file for file in root.rglob("*.py") if not others & set(file.relative_to(root).parts))
    return [file.read_text("utf-8", errors="replace") for i, file in enumerate(files) if (i % 25 == 24) == held_out]


def train_tokenizer(texts: Sequence[str], size: int) -> Tokenizer:
    """A byte-level BPE with the pattern and the special tokens of Qwen. The same texts give the same tokenizer."""
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    split = pre_tokenizers.Split(Regex(words + r"|\s*[\r\n]+|\s+(?!\S)|\s+"), "isolated")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END, "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenize(tokenizer: Tokenizer, texts: Sequence[str]) -> np.ndarray:
    """The tokens of all texts, each between two END."""
    return np.concatenate([[0], *([*each.ids, 0] for each in tokenizer.encode_batch_fast(texts))]).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Tokens in rows: `x`, and in `y` the token that follows each of them, or -1 after the last."""

    tokens: np.ndarray
    context: int

    def __len__(self) -> int:
        return -(-(len(self.tokens) - 1) // self.context)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        part = self.tokens[i * self.context : (i + 1) * self.context + 1]
        missing = self.context - len(part) + 1
        return {"x": np.pad(part[:-1], (0, missing)), "y": np.pad(part[1:], (0, missing), constant_values=-1)}


def batches(rows: Rows, size: int, seed: int = 0) -> grain.DatasetIterator:
    """Endless batches, shuffled anew in every epoch. A process reads its own rows of each.

    The iterator's state is the number of batches so far, in all processes, so that another number of them can continue.
    """
    own = slice(jax.process_index(), None, jax.process_count())
    dataset = grain.MapDataset.source(rows).shuffle(seed).repeat()[own].batch(size // jax.process_count())
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)))


def evaluate(eval_step: Any, state: Any, rows: Rows, size: int, tokenizer: Tokenizer) -> dict[str, float]:
    """The perplexity of a token, and the bits of a byte, which do not depend on the tokenizer."""
    own, nats, num_tokens = processes.own_rows(size), 0.0, len(rows.tokens) - 1
    empty = {"x": np.zeros(rows.context, np.int32), "y": np.full(rows.context, -1, np.int32)}
    for first in range(0, len(rows), size):
        parts = [rows[i] if i < len(rows) else empty for i in range(first, first + size)]
        batch = jax.tree.map(lambda *a: np.stack(a), *parts)
        nats += float(eval_step(state, jax.tree.map(lambda a: a[own], batch))["loss"]) * float(np.sum(batch["y"] >= 0))
    specials = tokenizer.get_added_tokens_decoder()  # of others, each character stands for a byte
    sizes = [0 if i in specials else len(tokenizer.id_to_token(i)) for i in range(tokenizer.get_vocab_size())]
    num_bytes = np.array(sizes)[rows.tokens[1:]].sum()
    loss = nats / num_tokens
    return {"loss": loss, "perplexity": math.exp(loss), "bits_per_byte": nats / math.log(2) / float(num_bytes)}


# The result


@functools.partial(nnx.jit, static_argnames=("length", "temperature"))
def continued(model: Qwen3, tokens: jax.Array, given: jax.Array, length: int, temperature: float) -> jax.Array:
    """Tokens [rows, length]: the given ones of each row and those that follow; at temperature 0, the likeliest."""
    graph, variables = nnx.split(model)

    def body(i: int, tokens: jax.Array) -> jax.Array:
        logits = nnx.merge(graph, variables, copy=True)(tokens)[:, i - 1].astype(jnp.float32)
        key = jax.random.fold_in(jax.random.key(0), i)
        following = jax.random.categorical(key, logits / temperature) if temperature else jnp.argmax(logits, axis=-1)
        return tokens.at[:, i].set(jnp.where(i < given, tokens[:, i], following))

    return jax.lax.fori_loop(1, length, body, tokens)


def generate(model: Qwen3, tokenizer: Tokenizer, prompts: Sequence[str], length: int, temperature: float) -> list[str]:
    """Texts of `length` tokens, or up to END. The model may be sharded, also over processes."""
    given = [each.ids[: length - 1] for each in tokenizer.encode_batch(list(prompts))]
    tokens = np.array([ids + [0] * (length - len(ids)) for ids in given], np.int32)
    result = continued(model, tokens, np.array([len(ids) for ids in given]), length, temperature)
    rows = multihost_utils.process_allgather(result, tiled=True)
    return [tokenizer.decode(row[: [*row, 0].index(0)]) for row in rows.tolist()]


def write_hf(config: Config, tokenizer: Tokenizer, folder: pathlib.Path) -> None:
    """The files besides the weights, as transformers writes them. Version 4 reads `rope_theta` and `torch_dtype`."""
    fields = dataclasses.asdict(config) | {
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
    tokens = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.max_position_embeddings}
    tokens |= {"eos_token": END, "pad_token": END, "bos_token": None, "clean_up_tokenization_spaces": False}
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, contents in {"config": fields, "tokenizer_config": tokens}.items():
        (folder / f"{name}.json").write_text(json.dumps(contents, indent=2, sort_keys=True) + "\n")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = common.parser(__doc__, steps=400)
    add = parser.add_argument
    add("--batch", type=int, default=32, help="rows per step, over all devices (default: 32)")
    add("--most-rows", type=int, default=8, help="rows that a device processes at once, at most (default: 8)")
    add("--context", type=int, default=128, help="tokens per row (default: 128)")
    add("--vocab", type=int, default=4096, help="tokens of the tokenizer (default: 4096)")
    add("--width", type=int, default=256, help="width of the model, a multiple of 32 (default: 256)")
    add("--layers", type=int, default=4, help="number of layers (default: 4)")
    add("--rate", type=float, default=3e-3, help="the highest learning rate (default: 3e-3)")
    add("--every", type=int, default=100, help="steps between checkpoints, and between evaluations (default: 100)")
    add("--temperature", type=float, default=0.0, help="of the text at the end; 0 takes the likeliest tokens (default)")
    add("--profile", type=int, nargs=2, metavar=("FIRST", "LAST"), help="the first and the last step to profile")
    return parser.parse_args(arguments)


def train(args: argparse.Namespace) -> dict[str, float]:
    common.start(args)
    zero = zerojax.Zero(zerojax.make_mesh(), args.stage, args.precision)
    microbatches = zero.num_microbatches(args.batch, args.most_rows)  # more of them on fewer devices
    tokenizer = train_tokenizer(sources(held_out=False), args.vocab)
    training, held_out = (Rows(tokenize(tokenizer, sources(each)), args.context) for each in (False, True))
    shape = (args.width, args.layers, 3 * args.width, args.width // 32, max(1, args.width // 64), 32, args.context)
    config = Config(tokenizer.get_vocab_size(), *shape)
    same = {"batch": args.batch, "rate": args.rate, "microbatches": microbatches, "num_tokens": len(training.tokens)}
    same |= {"tokenizer": zlib.crc32(tokenizer.to_str().encode())}  # compared between the processes
    state = zero.init(lambda rngs: Qwen3(config, rngs=rngs), optimizer(args.steps, args.rate))
    step = zero.train_step(loss_fn, num_microbatches=microbatches, clip_norm=1.0, remat=args.remat)
    eval_step, rows, result = zero.eval_step(loss_fn), args.batch // microbatches, dict[str, float]()

    def measure(state: Any) -> dict[str, float]:
        result.update(evaluate(eval_step, state, held_out, rows, tokenizer))
        return result

    state = zerojax.fit(
        zero,
        state,
        step,
        batches(training, args.batch),
        args.steps,
        args.out,
        evaluate=measure,
        evaluate_every=args.every,
        config=dataclasses.asdict(config) | same,
        checkpoints={"every": args.every, "spike": 3.0},
        profile=args.profile and tuple(args.profile),
    )
    for text in generate(state.model(), tokenizer, PROMPTS, args.context, args.temperature):
        if jax.process_index() == 0:
            print("-" * 80, text, sep="\n")
    if jax.process_index() == 0:
        hf = args.out / "hf"
        write_hf(config, tokenizer, hf)
        parameters.export(args.out / "checkpoints", args.steps, hf, dtype="float32", family="qwen3", overwrite=True)
    return result or measure(state)


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    train(parse())


if __name__ == "__main__":
    main()
