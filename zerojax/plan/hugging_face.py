"""Describes the model of a Hugging Face config.json as a transformer that can be planned."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from zerojax.plan.transformer import EXPERT_CAPACITY, Transformer, with_seq

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
    shapes = with_seq(dataclasses.replace(shapes, name=f"{name} ({kind})"), seq)
    return dataclasses.replace(shapes, notes=tuple(_notes(shapes, config)))


class _Config:
    """The values of a config.json, checked when they are read."""

    def __init__(self, path: Path):
        self.path = path
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            self.refuse(
                f"{type(error).__name__}: {error}", "a config.json of Hugging Face, or the directory that has it"
            )
        if not isinstance(values, dict):
            self.refuse(f"a JSON {type(values).__name__}", "a config.json of Hugging Face, which is an object")
        self.values: Mapping[str, Any] = values

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
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(f"{name} = {_short(value)}", "true or false")
        return value

    def uses_gelu(self, default: str) -> bool:
        """Whether the activation is GELU, and not SiLU."""
        value = self.values.get("hidden_activation") or self.values.get("hidden_act") or default
        if not isinstance(value, str) or value not in _GELU | _SILU:
            self.refuse(f"the activation {_short(value)}", f"one of {', '.join(sorted(_GELU | _SILU))}")
        return value in _GELU


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _biases(config: _Config) -> tuple[str, ...]:
    """As `attention_bias` and `mlp_bias` say."""
    return ("qkv", "out") * config.flag("attention_bias") + ("mlp",) * config.flag("mlp_bias")


def _decoder(
    config: _Config, *, kv_heads: int | None = None, head_dim: int | None = None, tied: bool = False, **fields: Any
) -> Transformer:
    """What Llama and its descendants have in common.

    Args:
        config: the config.
        kv_heads, head_dim, tied: what transformers takes where the config does not say; None if it has to.
        fields: further fields of the transformer.
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
    return Transformer(
        layers=config.count("n_layer"),
        width=width,
        heads=heads,
        kv_heads=heads,
        hidden=config.count("n_inner", 4 * width),
        vocab=config.count("vocab_size"),
        seq=positions,
        tied=config.flag("tie_word_embeddings", True),
        positions=positions,
    )


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
    uses_window = config.flag("use_sliding_window", not config.values["model_type"].startswith("qwen"))
    window = config.values.get("sliding_window")
    if isinstance(window, int) and window < shapes.seq and uses_window:
        yield f"attention in a window of {window:,} tokens is planned over all tokens before, which takes longer"
    if shapes.caps_scores:
        yield "soft caps are left out, but rule out fused attention: attention is planned in blocks of queries"
    if shapes.experts:
        yield f"each expert is planned for {EXPERT_CAPACITY} times an even share of the tokens"
    most = config.values.get("max_position_embeddings")
    if isinstance(most, int) and shapes.seq > most:
        yield f"rows of {shapes.seq:,} tokens are longer than the {most:,} positions of the config"
