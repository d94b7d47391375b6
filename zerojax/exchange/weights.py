"""Finds the sources of the weights of a state: by a mapping, by a family, or by their own names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import jax.numpy as jnp

from zerojax.checkpoints.contents import MODEL_STATE, PARAMS
from zerojax.exchange.families import family_sources, find_family
from zerojax.exchange.headers import bounded_repr, exchange_error
from zerojax.exchange.names import Source, map_name, sources


def is_weight(path: str, dtype: Any) -> bool:
    """Whether a leaf of a state is a weight: a parameter, or a floating array of the model state."""
    return path.startswith(PARAMS) or (path.startswith(MODEL_STATE) and jnp.issubdtype(dtype, jnp.floating))


def our_name(path: str) -> str:
    """The name of an array in a mapping: its path in the model. That of an NNX variable ends with the variable."""
    if path.startswith(PARAMS):
        return path.removeprefix(PARAMS)
    return path.removeprefix(MODEL_STATE).removesuffix("/value")


def weight_sources(
    paths: Collection[str], mapping: Mapping[str, Any] | None, family: str | None, theirs: Collection[str] = ()
) -> dict[str, Source]:
    """Path -> source, for the paths that have one: of the mapping, or else of the family; without both, of its name."""
    found: dict[str, Source] = {}
    if mapping is None and family is None:
        return {path: Source((our_name(path).replace("/", "."),)) for path in paths}
    if family is not None:
        by_name = family_sources(find_family(family), [our_name(path) for path in paths], theirs)
        found = {path: by_name[our_name(path)] for path in paths if our_name(path) in by_name}
    if mapping is not None:
        entries = sources(mapping)
        given = {path: map_name(entries, our_name(path)) for path in paths}
        found |= {path: source for path, source in given.items() if source is not None}
    return found


def known_source(found: Mapping[str, Source], path: str) -> Source:
    """The source of a path. Raises ValueError if it has none."""
    if path not in found:
        what = "the mapping has no name for a parameter or an array of the model state"
        raise exchange_error(what, bounded_repr(our_name(path)), "add the name or a pattern that matches it")
    return found[path]
