"""What a test of a model of other people needs to know about it, and the entries of the packages that are installed."""

import dataclasses
import functools
import importlib.util
from collections.abc import Mapping
from typing import Any

import numpy as np
from support import zoo
from support.parity import TOLERANCES
from support.zoo import cross_entropy

ROWS, SEQ, VOCAB = 32, 8, 128
# Tunix installs a version of Transformers without Flax models. Without Tunix, the environment is that of Transformers.
ENVIRONMENT = "tunix" if importlib.util.find_spec("tunix") else "transformers"
MODULES = {"tunix": ["tunix_models"], "transformers": ["transformers_models", "brax_models"]}  # each with `entries()`


@dataclasses.dataclass(frozen=True)
class Entry(zoo.Model):
    """A model of a package, as the helpers in `support` take it: `create`, `loss`, `batch`.

    Attributes:
        units: the names of all units that are expected.
        options: those of `Zero` that the model needs, such as `axis_names`.
        replicated: the largest share of the parameter bytes that may stay replicated at stage 3.
        largest: the largest share of the elements that one unit may hold.
        update: the tolerance of parity in fp32 for the parameters, as a fraction of the total update.
    """

    units: tuple[str, ...] = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    replicated: float = 0.02
    largest: float = 0.5
    update: float = TOLERANCES["fp32"]["update"]


@functools.cache
def installed():
    """The entries of the packages of this environment, by name."""
    modules = [importlib.import_module(f"zoo.{name}") for name in MODULES[ENVIRONMENT]]
    found = [entry for module in modules for entry in module.entries()]
    assert len({entry.name for entry in found}) == len(found)
    return {entry.name: entry for entry in found}


def numbered(prefix, count, *others):
    """The units of a model whose layers are `prefix` with a number, with all other units."""
    return (*(prefix.format(k) for k in range(count)), *others)


def tokens(seed, high=VOCAB, length=SEQ):
    return np.random.default_rng(seed).integers(1, high, (ROWS, length), dtype=np.int32)


def next_token_batch(seed):
    ids = tokens(seed, length=SEQ + 1)
    return {"x": ids[:, :-1], "y": ids[:, 1:]}


def token_loss(logits, batch):
    return cross_entropy(logits, batch["y"]).mean()
