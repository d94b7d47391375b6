"""Finds what each weight of a state is in files: by a mapping, by its own name, or by the family of the model.

A family knows the names and dims of models in the files of Hugging Face, for their Flax models in transformers and
tunix.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from zerojax.checkpoints.contents import MODEL_STATE, PARAMS
from zerojax.exchange.names import NUMBER, NameMapping, Source, map_name, parse_dims, sources
from zerojax.exchange.tensors import bounded_repr, exchange_error

# The weights of a state


def is_weight(path: str, dtype: np.dtype) -> bool:
    """Whether a leaf of a state is a weight: a parameter, or a floating array of the model state."""
    return path.startswith(PARAMS) or (path.startswith(MODEL_STATE) and jnp.issubdtype(dtype, jnp.floating))


def weight_sources(
    paths: Collection[str], mapping: NameMapping | None, family: str | None, theirs: Collection[str] = ()
) -> dict[str, Source]:
    """Path -> source, for the paths that have one: of the mapping, or else of the family; without both, of its name."""
    found: dict[str, Source] = {}
    if mapping is None and family is None:
        return {path: Source((_our_name(path).replace("/", "."),)) for path in paths}
    if family is not None:
        by_name = family_sources(find_family(family), [_our_name(path) for path in paths], theirs)
        found = {path: by_name[_our_name(path)] for path in paths if _our_name(path) in by_name}
    if mapping is not None:
        entries = sources(mapping)
        mapped = {path: map_name(entries, _our_name(path)) for path in paths}
        found |= {path: source for path, source in mapped.items() if source is not None}
    return found


def known_source(found: Mapping[str, Source], path: str) -> Source:
    """The source of a path. Raises ValueError if it has none."""
    if path not in found:
        what = "the mapping has no name for a parameter or an array of the model state"
        raise exchange_error(what, bounded_repr(_our_name(path)), "add the name or a pattern that matches it")
    return found[path]


def _our_name(path: str) -> str:
    """The name of an array in a mapping: its path in the model. That of an NNX variable ends with the variable."""
    if path.startswith(PARAMS):
        return path.removeprefix(PARAMS)
    return path.removeprefix(MODEL_STATE).removesuffix("/value")


# Families


class Rule(NamedTuple):
    """The source of the arrays whose names match a pattern.

    Attributes:
        ours: a regular expression for our whole name.
        theirs: the names in the file, with the groups of the match; '/' becomes '.'. See `names.Source`.
        dims: see `names.mapping`; None if the array is stored like ours.
    """

    ours: str
    theirs: tuple[str, ...]
    dims: str | None = None


class Family(NamedTuple):
    """What the files of a kind of model have in common.

    Attributes:
        prefixes: of names, which files have or lack, depending on the class of the model that was saved.
        unused: globs of arrays that are no weights, and that models compute themselves.
        aliases: endings of names, and those that older files have instead.
        rules: for the models of tunix, before those that families share.
    """

    prefixes: tuple[str, ...]
    unused: tuple[str, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    rules: tuple[Rule, ...] = ()


_TRANSPOSED = "out in -> in out"
_TO_HEADS = "(heads size) width -> width heads size"
_TO_HEADS_FIRST = "(heads size) width -> heads width size"
_FROM_HEADS = "width (heads size) -> heads size width"

# A linear layer of PyTorch stores [out, in], one of Flax [in, out]. For its Flax models, transformers uses the names of
# its PyTorch models, but for the last part. So can any other Flax model. If a scan runs its layers, an array of theirs
# is a stack, and no number follows `layers`; the files have an array for each layer.
_SCANNED = r"(.*layers)/(?!\d+/)(.*)"
_IN_LAYER = rf"\1.{NUMBER}.\2"
_TRANSFORMERS = (
    Rule(rf"{_SCANNED}/kernel", (rf"{_IN_LAYER}.weight",), _TRANSPOSED),
    Rule(rf"{_SCANNED}/scale", (rf"{_IN_LAYER}.weight",), "size -> size"),
    Rule(rf"{_SCANNED}/bias", (rf"{_IN_LAYER}.bias",), "size -> size"),
    Rule(
        r"(.*patch_embeddings/projection)/kernel", (r"\1.weight",), "out in height width -> height width in out"
    ),  # a convolution
    Rule(r"(.*)/kernel", (r"\1.weight",), _TRANSPOSED),
    Rule(r"(.*)/(scale|embedding)", (r"\1.weight",)),
    Rule(r".*", (r"\g<0>",)),
)

_LAYER = r"(layers/\d+)"
_TUNIX = (
    Rule(r"embedder/input_embedding", ("model.embed_tokens.weight",)),
    Rule(r"final_norm/(?:w|scale)", ("model.norm.weight",)),
    Rule(r"lm_head/w", ("lm_head.weight",), _TRANSPOSED),
    Rule(rf"{_LAYER}/mlp/(gate|up|down)_proj/kernel", (r"model.\1.mlp.\2_proj.weight",), _TRANSPOSED),
    # Llama 3, Qwen 2 and Qwen 3
    Rule(rf"{_LAYER}/attn/([qkv])_proj/w", (r"model.\1.self_attn.\2_proj.weight",), _TO_HEADS),
    Rule(rf"{_LAYER}/attn/o_proj/w", (r"model.\1.self_attn.o_proj.weight",), _FROM_HEADS),
    Rule(rf"{_LAYER}/attn/([qkv])_bias", (r"model.\1.self_attn.\2_proj.bias",)),
    Rule(rf"{_LAYER}/attn/([qk])_norm/w", (r"model.\1.self_attn.\2_norm.weight",)),
    Rule(rf"{_LAYER}/(input_layernorm|post_attention_layernorm)/w", (r"model.\1.\2.weight",)),
    # Qwen 3 with experts
    Rule(rf"{_LAYER}/mlp/router/kernel", (r"model.\1.mlp.gate.weight",), _TRANSPOSED),
    Rule(rf"{_LAYER}/mlp/(gate|up|down)_proj", (rf"model.\1.mlp.experts.{NUMBER}.\2_proj.weight",), _TRANSPOSED),
    # Gemma
    Rule(
        rf"{_LAYER}/attn/qkv_einsum/w",
        tuple(rf"model.\1.self_attn.{each}_proj.weight" for each in "qkv"),
        _TO_HEADS_FIRST,
    ),
    Rule(
        rf"{_LAYER}/attn/kv_einsum/w",
        tuple(rf"model.\1.self_attn.{each}_proj.weight" for each in "kv"),
        _TO_HEADS_FIRST,
    ),
    Rule(rf"{_LAYER}/attn/q_einsum/w", (r"model.\1.self_attn.q_proj.weight",), _TO_HEADS_FIRST),
    Rule(rf"{_LAYER}/attn/attn_vec_einsum/w", (r"model.\1.self_attn.o_proj.weight",), _FROM_HEADS),
    Rule(rf"{_LAYER}/attn/_query_norm/scale", (r"model.\1.self_attn.q_norm.weight",)),
    Rule(rf"{_LAYER}/attn/_key_norm/scale", (r"model.\1.self_attn.k_norm.weight",)),
    Rule(rf"{_LAYER}/pre_attention_norm/scale", (r"model.\1.input_layernorm.weight",)),
    Rule(rf"{_LAYER}/(?:post_attn_norm|post_attention_norm)/scale", (r"model.\1.post_attention_layernorm.weight",)),
    Rule(rf"{_LAYER}/pre_ffw_norm/scale", (r"model.\1.pre_feedforward_layernorm.weight",)),
    Rule(rf"{_LAYER}/post_ffw_norm/scale", (r"model.\1.post_feedforward_layernorm.weight",)),
)
# Gemma 1 has one norm after the attention, in front of the feed-forward part. Its name is that of another norm later.
_GEMMA_1 = (Rule(rf"{_LAYER}/pre_ffw_norm/scale", (r"model.\1.post_attention_layernorm.weight",)),)

_ROTARY = ("*rotary_emb.inv_freq",)
_DECODER = Family(("model",), _ROTARY)
_POSITIONS = ("*embeddings.position_ids",)
_OLD_NORMS = (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))

FAMILIES: Mapping[str, Family] = {
    "llama": _DECODER,
    "mistral": _DECODER,
    "qwen2": _DECODER,
    "qwen3": _DECODER,
    "gemma": Family(("model",), _ROTARY, rules=_GEMMA_1),
    "gemma2": _DECODER,
    "gemma3": Family(("model", "language_model.model"), _ROTARY),
    "gpt2": Family(("transformer",), ("*h.*.attn.bias", "*h.*.attn.masked_bias")),  # masks
    "bert": Family(("bert",), _POSITIONS, _OLD_NORMS),
    "vit": Family(("vit",)),
}


def find_family(name: str) -> Family:
    """Returns a family by its name. Raises ValueError if there is none."""
    if name not in FAMILIES:
        raise exchange_error("there is no such family", bounded_repr(name), f"use one of {', '.join(FAMILIES)}")
    return FAMILIES[name]


def family_sources(family: Family, ours: Collection[str], theirs: Collection[str] = ()) -> dict[str, Source]:
    """Returns our name -> its source, for all names that the family knows.

    Args:
        family: of the model.
        ours: all our names, which show whether the model is one of tunix or of transformers.
        theirs: the names in the files. A name that is not among them is replaced by a variant that is, if there is one.
    """
    rules = (*family.rules, *_TUNIX) if "embedder/input_embedding" in ours else _TRANSFORMERS
    there = set(theirs)
    found: dict[str, Source] = {}
    for name in ours:
        for rule in rules:
            if match := re.fullmatch(rule.ours, name):
                names = tuple(match.expand(each).replace("/", ".") for each in rule.theirs)
                dims = None if rule.dims is None else parse_dims(rule.dims)
                found[name] = Source(tuple(_variant(family, each, there) for each in names), dims, is_like_ours=True)
                break
    return found


def _variant(family: Family, name: str, there: Collection[str]) -> str:
    """The first variant of a name that the files have; the name itself if they have none."""
    return next((each for each in _variants(family, name) if each.replace(NUMBER, "0") in there), name)


def _variants(family: Family, name: str) -> Iterator[str]:
    bare = [name.removeprefix(f"{prefix}.") for prefix in family.prefixes]
    names = [name, *bare, *(f"{prefix}.{each}" for prefix in family.prefixes for each in bare)]
    for each in names:
        yield each
        yield from (each.removesuffix(new) + old for new, old in family.aliases if each.endswith(new))
