"""Finds what each weight of a state is in files: by a mapping, by its own name, or by the family of the model.

Dims are written as "theirs -> ours", for example "(heads size) width -> width heads size". Each dim of an array is the
product of the named dims in parentheses, the first of which is outermost; 1 is a dim of size 1.

A family knows the names and dims of models in the files of Hugging Face, for their Flax models in transformers and
tunix.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np

from zerojax.checkpoints.contents import MODEL_STATE, PARAMS
from zerojax.exchange.tensors import bounded_repr, exchange_error, json_file, json_object
from zerojax.utils.typing import Shape

NameMapping: TypeAlias = Mapping[str, str | Mapping[str, str | Sequence[str]]]  # see `mapping`
NamedDims: TypeAlias = tuple[tuple[str, ...], ...]

NUMBER = "#"  # in a name with dims: the index along dim 0 of our array, which is a stack
_TOKEN = re.compile(r"\(([^()]*)\)|([^\s()]+)|(\S)")


# The weights of a state


def is_weight(path: str, dtype: np.dtype) -> bool:
    """Whether a leaf of a state is a weight: a parameter, or a floating array of the model state."""
    return path.startswith(PARAMS) or (path.startswith(MODEL_STATE) and jnp.issubdtype(dtype, jnp.floating))


def weight_sources(
    paths: Collection[str], mapping: NameMapping | None, family: str | None, theirs: Collection[str] = ()
) -> dict[str, Source]:
    """Path -> source, for the paths that have one: of the mapping, or else of the family; without both, of its name."""
    names = {path: _our_name(path) for path in paths}
    if mapping is None and family is None:
        return {path: Source((name.replace("/", "."),)) for path, name in names.items()}
    of_family = {} if family is None else family_sources(find_family(family), list(names.values()), theirs)
    entries = sources(mapping or {})
    found = {path: map_name(entries, name) or of_family.get(name) for path, name in names.items()}
    return {path: source for path, source in found.items() if source is not None}


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


# Dims


class Rearrangement(NamedTuple):
    """The dims of an array in a file, and of ours, as products of the same named dims."""

    theirs: NamedDims
    ours: NamedDims

    def fits(self, theirs: Shape, ours: Shape) -> bool:
        """Whether an array of the shape `theirs` can be turned into one of the shape `ours` in exactly one way."""
        return _sizes((self.theirs, theirs), (self.ours, ours)) is not None

    def their_shape(self, ours: Shape) -> Shape | None:
        """The shape in the file for our shape; None if ours has another rank, or does not determine it."""
        sizes = _sizes((self.ours, ours))
        return None if sizes is None else tuple(math.prod(sizes[name] for name in dim) for dim in self.theirs)

    def to_ours(self, array: np.ndarray, shape: Shape) -> np.ndarray:
        """Turns the array of a file into ours, of the given shape. A view, unless one of our dims is a product."""
        return _rearranged(array, self.theirs, self.ours, _sizes((self.theirs, array.shape), (self.ours, shape)))

    def to_theirs(self, array: np.ndarray) -> np.ndarray:
        """Turns our array into that of the file. Its shape has to determine the sizes."""
        return _rearranged(array, self.ours, self.theirs, _sizes((self.ours, array.shape)))


def parse_dims(text: object) -> Rearrangement:
    """Reads "theirs -> ours". Raises ValueError for anything else, or if a name is not exactly once on each side."""
    sides = [_parse_side(side) for side in text.split("->")] if isinstance(text, str) else []
    names = [sorted(_flat(side)) for side in sides]
    if len(sides) != 2 or not names[0] == names[1] == sorted(set(names[0])) or not all(map(str.isidentifier, names[0])):
        fix = "each name once on each side, as in 'out in -> in out' or '(heads size) width -> width heads size'"
        raise exchange_error("the dims of a mapping are not of the form 'theirs -> ours'", bounded_repr(text), fix)
    return Rearrangement(*sides)


def _parse_side(side: str) -> NamedDims:
    """The named dims of a side. What is no name stays, and is no identifier."""
    groups = [group or name or other for group, name, other in _TOKEN.findall(side)]
    return tuple(tuple(part for part in group.split() if part != "1") for group in groups)


def _rearranged(array: np.ndarray, before: NamedDims, after: NamedDims, sizes: dict[str, int] | None) -> np.ndarray:
    assert sizes is not None
    names = _flat(before)
    split = array.reshape([sizes[name] for name in names]).transpose([names.index(name) for name in _flat(after)])
    return split.reshape([math.prod(sizes[name] for name in dim) for dim in after])


def _flat(side: NamedDims) -> list[str]:
    return [name for dim in side for name in dim]


def _sizes(*known: tuple[NamedDims, Shape]) -> dict[str, int] | None:
    """The size of every named dim; None if the shapes contradict each other or do not determine them."""
    if any(len(side) != len(shape) for side, shape in known):
        return None
    equations = [(dim, n) for side, shape in known for dim, n in zip(side, shape, strict=True)]
    sizes: dict[str, int] = {}
    for _ in equations:  # each round determines at least one more, or nothing more is determined
        for dim, n in equations:
            unknown = [name for name in dim if name not in sizes]
            others = math.prod(sizes[name] for name in dim if name in sizes)
            if len(unknown) == 1 and others and n % others == 0:
                sizes[unknown[0]] = n // others
    complete = all(name in sizes for dim, _ in equations for name in dim)
    consistent = complete and all(math.prod(sizes[name] for name in dim) == n for dim, n in equations)
    return sizes if consistent else None


# Names


class Source(NamedTuple):
    """The arrays of a file that one of ours consists of."""

    # One name; or several, of the arrays that are stacked along dim 0 of ours. If the only name contains `#`, it stands
    # for as many names as dim 0 has elements, with 0, 1, and so on in its place.
    names: tuple[str, ...]
    # How each of them is turned into ours, or into an element of our stack; None if it is stored like ours.
    dims: Rearrangement | None = None
    is_like_ours: bool = False  # whether it is known that it is stored like ours, where there are no dims

    @property
    def has_layout(self) -> bool:
        """Whether the source says how the array is stored."""
        return self.is_like_ours or self.dims is not None

    @property
    def is_stack(self) -> bool:
        """Whether our array is a stack of several in the file."""
        return len(self.names) > 1 or (self.dims is not None and NUMBER in "".join(self.names))

    def parts(self, shape: Shape) -> tuple[str, ...]:
        """The names in the file for our array of this shape: one for each element of a stack."""
        if not self.is_stack or len(self.names) > 1:
            return self.names
        return tuple(name.replace(NUMBER, str(i)) for i in range(shape[0] if shape else 0) for name in self.names)


def mapping(text_or_file: str | Path) -> NameMapping:
    """Reads a mapping of our names to arrays of a file, from a JSON object or from a file that contains one.

    Our name is exact, or a pattern in which `*` stands for one or more characters other than '.' and '/'. What it is
    mapped to is

    - a name, in which the n-th `*` is the n-th of our pattern: {"layers/*/scale": "model.layers.*.norm.weight"}.
    - or {"name": ..., "dims": ...}: the array is turned into ours. The dims name those in the file and ours, as in
      "out in -> in out" (a transposed matrix) or "(heads size) width -> width heads size".
    - Here, "name" may be a list of names, or contain `#`, which stands for 0, 1, and so on: our array is the stack of
      these arrays along dim 0. The dims are those of one of them.

    Raises:
        ValueError: if there is no such file, the text is not a JSON object of such entries, the two sides of a line
            have different numbers of `*`, or two `*` are in one part of a name, which would make the match ambiguous.
    """
    if isinstance(text_or_file, str) and text_or_file.lstrip().startswith("{"):
        found = json_object(text_or_file.encode(errors="replace"), "the mapping")
    else:
        found = json_file(Path(text_or_file))
    sources(found)
    return found  # pyright: ignore[reportReturnType]  # `sources` has checked its entries


def sources(mapping: Mapping[str, object]) -> dict[str, Source]:
    """Checks a mapping, see `mapping`, and returns its entries. Raises ValueError if one is invalid."""
    found = {}
    for ours, entry in mapping.items():
        pair = f"{bounded_repr(ours)}: {bounded_repr(entry)}"
        found[ours] = source = _source(entry, pair)
        if not all(isinstance(name, str) for name in source.names):
            fix = 'map a name to a name, or to {"name": ..., "dims": ...}'
            raise exchange_error("the mapping contains an entry that is not a pair of names", pair, fix)
        if any(ours.count("*") != name.count("*") for name in source.names):
            raise exchange_error("the sides of a mapping differ in *", pair, "use the same number of * on both sides")
        if any(part.count("*") > 1 for part in re.split("[./]", ours)):
            fix = "use at most one * between two separators"
            raise exchange_error("the mapping has two * in one part of a name", pair, fix)
    return found


def _source(entry: object, pair: str) -> Source:
    """The source of an entry, whose names may still be anything."""
    if not isinstance(entry, Mapping):
        return Source((entry,))  # pyright: ignore[reportArgumentType]
    name = entry.get("name")
    names: tuple = tuple(name) if isinstance(name, list | tuple) else (name,)
    if entry.keys() != {"name", "dims"} or not names:
        fix = 'write {"name": ..., "dims": "out in -> in out"}'
        raise exchange_error("an entry of the mapping does not consist of name and dims", pair, fix)
    return Source(names, parse_dims(entry["dims"]))


def map_name(mapping: Mapping[str, Source], name: str) -> Source | None:
    """Returns the source of one of our arrays; None if nothing matches or several patterns give different sources.

    An exact name takes precedence over patterns.
    """
    if name in mapping:
        return mapping[name]
    found = {_substitute(ours, source, name) for ours, source in mapping.items() if "*" in ours} - {None}
    return found.pop() if len(found) == 1 else None


def _substitute(ours: str, source: Source, name: str) -> Source | None:
    """The source, with each `*` replaced by its match in the name; None if our pattern does not match the name."""
    match = re.fullmatch("([^./]+)".join(map(re.escape, ours.split("*"))), name)
    if match is None:
        return None

    texts = iter(match.groups() * len(source.names))  # each name has as many * as ours
    return source._replace(names=tuple(re.sub(r"\*", lambda _: next(texts), name) for name in source.names))


# Families


class Rule(NamedTuple):
    """The source of the arrays whose names match a pattern."""

    ours: str  # a regular expression for our whole name
    theirs: tuple[str, ...]  # the names in the file, with the groups of the match; '/' becomes '.'. See `Source`
    dims: str | None = None  # see `mapping`; None if the array is stored like ours


class Family(NamedTuple):
    """What the files of a kind of model have in common."""

    prefixes: tuple[str, ...]  # of names, which files have or lack, depending on the class of the model that was saved
    unused: tuple[str, ...] = ()  # globs of arrays that are no weights, and that models compute themselves
    aliases: tuple[tuple[str, str], ...] = ()  # endings of names, and those that older files have instead
    rules: tuple[Rule, ...] = ()  # for the models of tunix, before those that families share


_TRANSPOSED = "out in -> in out"
_CONVOLUTION = "out in height width -> height width in out"
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
    Rule(r"(.*patch_embeddings/projection)/kernel", (r"\1.weight",), _CONVOLUTION),
    Rule(r"(.*)/kernel", (r"\1.weight",), _TRANSPOSED),
    Rule(r"(.*)/(scale|embedding)", (r"\1.weight",)),
    Rule(r".*", (r"\g<0>",)),
)

_LAYER = r"(layers/\d+)"
_ATTENTION = r"model.\1.self_attn"
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
    Rule(rf"{_LAYER}/attn/qkv_einsum/w", tuple(rf"{_ATTENTION}.{p}_proj.weight" for p in "qkv"), _TO_HEADS_FIRST),
    Rule(rf"{_LAYER}/attn/kv_einsum/w", tuple(rf"{_ATTENTION}.{p}_proj.weight" for p in "kv"), _TO_HEADS_FIRST),
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

    All our names show whether the model is one of tunix or of transformers. A source that is not among the names in the
    files is replaced by a variant that is, if there is one.
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
    """The first variant of a name that the files have, with other prefixes or endings; the name itself if none."""
    bare = [name.removeprefix(f"{prefix}.") for prefix in family.prefixes]
    names = [name, *bare, *(f"{prefix}.{each}" for prefix in family.prefixes for each in bare)]
    for each in names:
        older = [each.removesuffix(new) + old for new, old in family.aliases if each.endswith(new)]
        if found := [variant for variant in (each, *older) if variant.replace(NUMBER, "0") in there]:
            return found[0]
    return name
