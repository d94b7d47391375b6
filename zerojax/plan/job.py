"""What is planned: a job, of a preset, of a model of Hugging Face or of the user, and the settings of its step."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from zerojax.analysis.hardware import Chip
from zerojax.contrib.low_bit import low_bit_moments, stochastic_rounding
from zerojax.plan import transformer
from zerojax.plan.transformer import Transformer
from zerojax.sharding.placement import Stage
from zerojax.sharding.precision import Precision
from zerojax.step.config import shards_outer
from zerojax.utils.typing import Array, PyTree


class Job(NamedTuple):
    """The training job that is planned: a model, its optimizer, its loss and the shapes of its batch.

    Attributes:
        create_model: creates the model, as in `Zero.init`.
        tx: the optax transformation.
        loss_fn: the loss, as in `Zero.train_step`.
        batch: `batch(rows) -> tree of avals`, where `rows` is the number of rows on all devices together.
        rows: the default number of rows on a device in a microbatch.
        tokens: tokens in a row, for tokens/s.
        options: further options of `Zero`, such as `axis_names`.
    """

    create_model: Callable[..., PyTree]
    tx: optax.GradientTransformation
    loss_fn: Callable[..., PyTree]
    batch: Callable[[int], PyTree]
    rows: int = 1
    tokens: int = 1
    options: Mapping[str, Any] = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Settings:
    """The options of a step.

    Attributes:
        stage, precision: as in `Zero`.
        rows: rows of a device in a microbatch; None for the default of the model.
        num_microbatches: as in `Zero.train_step`.
        remat: 'none', 'dots', 'full', or 'offload', which is 'full' with the inputs of layers in host memory.
        prefetch, bucket_bytes: as in `Zero.train_step`.
        replica, model: sizes of the mesh axes, as in `make_mesh`.
        outer_sharding, offload: as in `Zero`.
        wire: the dtype of 8 bits in which large weights and gradients are sent, `gather` and `scatter` of a
            `Precision`; None for those of the precision.
        moment_bits: 8 or 16 for `zerojax.low_bit_moments` around the optimizer of the job, and with 'bf16_params'
            `zerojax.stochastic_rounding` around both; None for the optimizer as it is.
    """

    stage: int = 3
    precision: str = "bf16"
    rows: int | None = None
    num_microbatches: int = 1
    remat: str = "dots"
    prefetch: int = 1
    bucket_bytes: int | None = None
    replica: int = 1
    model: int | None = None
    outer_sharding: str | None = None
    offload: str = "none"
    wire: str | None = None
    moment_bits: int | None = None

    @property
    def shards_outer(self) -> bool:
        """Whether the optimizer's state is sharded over replicas too."""
        return shards_outer(self.outer_sharding, Stage.of(self.stage), self.replica)

    @property
    def dtypes(self) -> Precision:
        """The precision, with what is sent in 8 bits."""
        gather, scatter = self.wire if self.stage == 3 else None, self.wire if self.stage else None
        return dataclasses.replace(Precision.of(self.precision), gather=gather, scatter=scatter)

    def optimizer(self, tx: optax.GradientTransformation) -> optax.GradientTransformation:
        """Returns an optimizer with moments in `moment_bits`.

        Args:
            tx: the optimizer of the job.
        """
        if self.moment_bits is None:
            return tx
        tx = low_bit_moments(tx, self.moment_bits)
        return stochastic_rounding(tx) if self.precision == "bf16_params" else tx

    def python(self) -> str:
        """Returns the Python calls that build the step."""
        given = (("replica", self.replica), ("model", self.model))
        mesh = ", ".join(f"{name}={size}" for name, size in given if size not in (None, 1))
        remat = "zerojax.Remat(offload_inputs=True)" if self.remat == "offload" else repr(self.remat)
        step = [f"remat={remat}", f"prefetch={self.prefetch}"]
        step += [f"num_microbatches={self.num_microbatches}"] if self.num_microbatches > 1 else []
        step += [f"bucket_bytes={self.bucket_bytes}"] if self.bucket_bytes else []
        tx = f"zerojax.low_bit_moments(tx, {self.moment_bits})"
        tx = f"zerojax.stochastic_rounding({tx})" if self.precision == "bf16_params" else tx
        first = f"tx = {tx}\n" if self.moment_bits else ""
        precision, on_wire = repr(self.precision), ", ".join(f"{k}={v!r}" for k, v in self.dtypes.on_wire.items())
        if on_wire:
            first += f"precision = dataclasses.replace(zerojax.Precision.of({precision}), {on_wire})\n"
            precision = "precision"
        zero = [f"zerojax.make_mesh({mesh})", f"stage={self.stage}", f"precision={precision}"]
        zero += [f"outer_sharding={self.outer_sharding!r}"] if self.outer_sharding else []
        zero += [f"offload={self.offload!r}"] if self.offload != "none" else []
        return f"{first}zero = zerojax.Zero({', '.join(zero)})\nstep = zero.train_step(loss_fn, {', '.join(step)})"


DEFAULT_SETTINGS = Settings()
REMATS = ("none", "dots", "full", "offload")  # from the most memory to the least


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


def job_of(config: Transformer, attention: Callable[..., Array] | None = None) -> Job:
    """The job of a preset, with AdamW; by default with `blockwise_attention`, which runs everywhere."""
    attend = attention or transformer.blockwise_attention
    create = lambda rngs: (transformer.ViT if config.patch else transformer.LanguageModel)(config, attend, rngs)
    loss = lambda model, batch: model.loss(batch)
    return Job(create, optax.adamw(1e-4), loss, _batch(config), config.rows, config.seq)


def num_parameters(config: Transformer) -> int:
    """The number of parameters of a preset."""
    params = jax.eval_shape(lambda: nnx.state(job_of(config).create_model(nnx.Rngs(0)), nnx.Param))
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def _batch(config: Transformer) -> Callable[[int], dict[str, jax.ShapeDtypeStruct]]:
    if not config.patch:
        return lambda rows: {"tokens": jax.ShapeDtypeStruct((rows, config.seq + 1), jnp.int32)}
    patches = (config.seq, config.patch**2 * 3)
    return lambda rows: {
        "patches": jax.ShapeDtypeStruct((rows, *patches), jnp.float32),
        "labels": jax.ShapeDtypeStruct((rows,), jnp.int32),
    }


def shapes_of(what: str | Transformer) -> Transformer | None:
    """The shapes of a preset or of a described model; None for the user's function."""
    return PRESETS.get(what) if isinstance(what, str) else what


def find_job(what: str | Transformer, chip: Chip | None = None, compiled: bool = False) -> Job:
    """The job of a preset, of a described model, or of the user's function.

    On GPUs, if these are the `chip`, attention is fused if it takes the heads of the model. A job that will not be
    `compiled` can only be traced, which needs no package of the platform.

    Raises:
        ValueError: if there is no such preset or function, or if the function does not return a `Job`.
    """
    if (shapes := shapes_of(what)) is not None:
        fused = transformer.cudnn_attention if compiled else transformer.cudnn_attention_for_tracing
        return job_of(shapes, fused if chip and transformer.can_fuse(shapes, chip) else None)
    assert isinstance(what, str)
    module, colon, name = what.partition(":")
    if not colon:
        raise ValueError(f"plan: no preset {what!r}\n  fix:      use one of {', '.join(PRESETS)}, or 'module:function'")
    try:
        found = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"plan: {what!r} cannot be called\n  got:      {error}\n"
            f"  fix:      pass 'module:function', with a module that Python can import (PYTHONPATH=.)"
        ) from error
    if not isinstance(found, Job):
        raise ValueError(
            f"plan: {what!r} does not return a Job\n  got:      {type(found).__name__}\n"
            f"  fix:      return zerojax.plan.Job(create_model, tx, loss_fn, batch, rows=..., tokens=...)"
        )
    return found


# Models of Hugging Face.

_DEFAULT_SEQ = 8192  # tokens in a row, if the model has as many positions
_LARGEST = 2**31 - 1  # of any number in a config; it keeps products of two within 64 bits
_GELU = frozenset(["gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"])
_SILU = frozenset(["silu", "swish"])


def from_hugging_face(path: str | Path, seq: int | None = None) -> Transformer:
    """Reads the config.json of a language model in the format of Hugging Face, for `zerojax.plan.plan`.

    The model has the shapes and the number of parameters of the config. What the config says beyond that, and the plan
    does not follow, is in its `notes`: sliding windows, for example, are planned as full attention.

    Args:
        path: a config.json, or the directory that has it.
        seq: tokens in a row. The default is 8192, or the number of positions of the model if that is less.

    Returns:
        The shapes of the model.

    Raises:
        ValueError: if the file cannot be read, if its `model_type` is unknown, or if a value is missing or invalid.
    """
    path = Path(path)
    config = _Config(path / "config.json" if path.is_dir() else path)
    kind = config.values.get("model_type")
    if not isinstance(kind, str) or kind not in HUGGING_FACE_FAMILIES:
        fix = f"one of {', '.join(HUGGING_FACE_FAMILIES)}; zerojax plan --job takes any other model as code"
        fix += "; or the text_config of this file, as a file of its own" * ("text_config" in config.values)
        config.refuse(f"model_type {kind!r}", fix)
    shapes = HUGGING_FACE_FAMILIES[kind](config)
    name = config.path.absolute().parent.name if config.path.name == "config.json" else config.path.stem
    shapes = transformer.with_seq(dataclasses.replace(shapes, name=f"{name} ({kind})"), seq)
    return dataclasses.replace(shapes, notes=tuple(_notes(shapes, config)))


class _Config:
    """The values of a config.json, checked when they are read."""

    def __init__(self, path: Path):
        self.path = path
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            fix = "a config.json of Hugging Face, or the directory that has it"
            self.refuse(f"{type(error).__name__}: {error}", fix)
        if not isinstance(values, dict):
            self.refuse(f"a JSON {type(values).__name__}", "a config.json of Hugging Face, which is an object")
        self.values: Mapping[str, object] = values

    def refuse(self, got: str, fix: str) -> NoReturn:
        raise ValueError(f"plan: cannot plan the model of {self.path}\n  got:      {got}\n  fix:      {fix}")

    def count(self, name: str, default: int | None = None) -> int:
        """A positive whole number. Without a default it has to be there; null counts as missing."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if value is None:
            self.refuse(f"no {name}", f"add {name!r} to the file")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _LARGEST:
            self.refuse(f"{name} = {_short(value)}", f"a whole number from 1 to {_LARGEST}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name)
        if not isinstance(value, bool | None):
            self.refuse(f"{name} = {_short(value)}", "true or false")
        return default if value is None else value

    def uses_gelu(self, default: str) -> bool:
        """Whether the activation is GELU, and not SiLU."""
        value = self.values.get("hidden_activation") or self.values.get("hidden_act") or default
        if not isinstance(value, str) or value not in _GELU | _SILU:
            self.refuse(f"the activation {_short(value)}", f"one of {', '.join(sorted(_GELU | _SILU))}")
        return value in _GELU


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _biases(config: _Config) -> tuple[str, ...]:
    return ("qkv", "out") * config.flag("attention_bias") + ("mlp",) * config.flag("mlp_bias")


def _decoder(
    config: _Config, *, kv_heads: int | None = None, head_dim: int | None = None, tied: bool = False, **fields: Any
) -> Transformer:
    """What Llama and its descendants have in common.

    `kv_heads`, `head_dim` and `tied` are what transformers takes where the config does not say; None if it has to.
    """
    width, heads = config.count("hidden_size"), config.count("num_attention_heads")
    kv_heads, head_dim = config.count("num_key_value_heads", kv_heads), config.count("head_dim", head_dim)
    if heads % kv_heads:
        config.refuse(f"{heads} heads, {kv_heads} of keys and values", "a num_key_value_heads that divides the heads")
    if head_dim % 2:
        config.refuse(f"heads of width {head_dim}", "an even head_dim, which rotary positions need")
    shapes = {
        "layers": config.count("num_hidden_layers"),
        "hidden": config.count("intermediate_size") if "hidden" not in fields else 0,
        "vocab": config.count("vocab_size"),
        "seq": min(_DEFAULT_SEQ, config.count("max_position_embeddings", _DEFAULT_SEQ)),
        "tied": config.flag("tie_word_embeddings", tied),
        "gelu": config.uses_gelu("silu"),
    }
    return Transformer(width=width, heads=heads, kv_heads=kv_heads, head_dim=head_dim, llama=True, **shapes | fields)


def _even_heads(config: _Config) -> int:
    """The width of a head where the config does not say it: an even division of the width."""
    width, heads = config.count("hidden_size"), config.count("num_attention_heads")
    if config.values.get("head_dim") is None and width % heads:
        config.refuse(f"hidden_size {width}, {heads} heads", "a head_dim, or a hidden_size that the heads divide")
    return max(1, width // heads)


def _qwen3(config: _Config, **fields: Any) -> Transformer:
    return _decoder(config, biases=_biases(config), norms_heads=True, **fields)


def _qwen3_moe(config: _Config) -> Transformer:
    dense = config.values.get("mlp_only_layers")
    if config.count("decoder_sparse_step", 1) != 1 or dense:
        config.refuse("layers with and without experts", "a model whose layers are all alike, or zerojax plan --job")
    name = "num_experts" if config.values.get("num_experts") is not None else "num_local_experts"
    return _qwen3(config, hidden=config.count("moe_intermediate_size"), **_experts(config, name))


def _experts(config: _Config, name: str) -> dict[str, Any]:
    experts, per_token = config.count(name), config.count("num_experts_per_tok")
    if per_token > experts:
        config.refuse(f"{per_token} of {experts} experts for each token", "at most as many as there are")
    return {"experts": experts, "experts_per_token": per_token}


def _gemma(config: _Config, **fields: Any) -> Transformer:
    gelu = config.uses_gelu("gelu_pytorch_tanh")
    return _decoder(config, tied=True, gelu=gelu, biases=_biases(config), **fields)


def _gpt2(config: _Config) -> Transformer:
    width, heads, positions = config.count("n_embd"), config.count("n_head"), config.count("n_positions")
    if width % heads:
        config.refuse(f"n_embd {width}, {heads} heads", "an n_embd that n_head divides")
    hidden, tied = config.count("n_inner", 4 * width), config.flag("tie_word_embeddings", True)
    sizes = config.count("n_layer"), width, heads, heads, hidden, config.count("vocab_size"), positions
    return Transformer(*sizes, tied=tied, positions=positions)


# By `model_type`.
HUGGING_FACE_FAMILIES: Mapping[str, Callable[[_Config], Transformer]] = {
    "llama": lambda config: _decoder(
        config, kv_heads=config.count("num_attention_heads"), head_dim=_even_heads(config), biases=_biases(config)
    ),
    "mistral": lambda config: _decoder(config, head_dim=_even_heads(config)),
    "mixtral": lambda config: _decoder(config, head_dim=_even_heads(config), **_experts(config, "num_local_experts")),
    "qwen2": lambda config: _decoder(config, head_dim=_even_heads(config), biases=("qkv",)),
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gemma": _gemma,
    "gemma2": lambda config: _gemma(
        config, norms_outputs=True, caps_scores=config.values.get("attn_logit_softcapping", 50.0) is not None
    ),
    "gemma3_text": lambda config: _gemma(config, norms_outputs=True, norms_heads=True),
    "gpt2": _gpt2,
}


def _notes(shapes: Transformer, config: _Config) -> Iterator[str]:
    """What a plan does not follow."""
    uses_window = config.flag("use_sliding_window", not str(config.values["model_type"]).startswith("qwen"))
    window = config.values.get("sliding_window")
    if isinstance(window, int) and window < shapes.seq and uses_window:
        yield f"attention in a window of {window:,} tokens is planned over all tokens before, which takes longer"
    if shapes.caps_scores:
        yield "soft caps are left out, but rule out fused attention: attention is planned in blocks of queries"
    if shapes.experts:
        yield f"each expert is planned for {transformer.EXPERT_CAPACITY} times an even share of the tokens"
    most = config.values.get("max_position_embeddings")
    if isinstance(most, int) and shapes.seq > most:
        yield f"rows of {shapes.seq:,} tokens are longer than the {most:,} positions of the config"
