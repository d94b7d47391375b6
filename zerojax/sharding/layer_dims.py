"""Finds leaves that are stacks of layers by their shapes, where no creation shows them, and writes globs for them."""

from __future__ import annotations

import glob
import itertools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase

from zerojax.sharding.units import stem
from zerojax.utils.typing import Shape


def with_first_dim(shapes: Mapping[str, Shape]) -> dict[str, list[str]]:
    """For each path, those of the largest subtree below the root that contains it and whose leaves all have its first
    dim; the path alone, if there is none."""
    first_dims: dict[str, set[Shape]] = {}
    for path, shape in shapes.items():
        for prefix in _prefixes(path):
            first_dims.setdefault(prefix, set()).add(shape[:1])
    subtree = {path: next((p for p in _prefixes(path) if len(first_dims[p]) == 1), path) for path in shapes}
    members: dict[str, list[str]] = {}
    for path, prefix in subtree.items():
        members.setdefault(prefix, []).append(path)
    return {path: members[prefix] for path, prefix in subtree.items()}


def _prefixes(path: str) -> list[str]:
    """The prefixes of a path that end in '/', the shortest first."""
    return [path[: match.end()] for match in re.finditer("/", path)]


def likely_stacks(shapes: Mapping[str, Shape]) -> frozenset[str]:
    """The paths of leaves that are stacks of layers with high probability, of a model that exists already.

    Layers have norms or biases, attention and an MLP. Stacked, they are a subtree whose leaves all have the same first
    dim, with vectors of each layer and matrices of several sizes. Other dims come first in some models: a width, which
    comes last in other leaves of the subtree; and heads and experts, which are inside of layers that are numbered one
    by one, or have matrices of one size only. They are not taken for layers. What is wrongly taken for a stack is
    sharded all the same, in another dim, and counts with a part of its size in reports.
    """
    subtrees = {id(inside): inside for inside in with_first_dim(shapes).values()}
    is_stack = lambda inside: _looks_stacked([shapes[path] for path in inside]) and not _is_repeated(inside, shapes)
    return frozenset(path for inside in filter(is_stack, subtrees.values()) for path in inside)


def _looks_stacked(shapes: Sequence[Shape]) -> bool:
    """Whether leaves with the same first dim look like those of layers."""
    vectors = [shape for shape in shapes if len(shape) == 2]
    matrix_sizes = {math.prod(shape[1:]) for shape in shapes if len(shape) > 2}
    is_width = any(shape[-1:] == shapes[0][:1] for shape in shapes if len(shape) > 1)
    return len(vectors) > 0 and len(matrix_sizes) > 1 and shapes[0][0] > 1 and not is_width


def _is_repeated(inside: Sequence[str], shapes: Mapping[str, Shape]) -> bool:
    """Whether a subtree is within components that differ in a number only, or within experts."""
    columns = list(zip(*(path.split("/") for path in inside), strict=False))
    common = [column[0] for column in itertools.takewhile(lambda column: len(set(column)) == 1, columns)]
    others = [path.split("/") for path in shapes]
    for i, column in enumerate(columns[: len(common) + 1]):
        siblings = {p[i] for p in others if p[:i] == common[:i] and len(p) > i and stem(p[i]) == stem(column[0])}
        if len(siblings) > 1 and siblings.issuperset(column):
            return True
    return any("expert" in part.lower() for part in common)


def possible_stack(shapes: Mapping[str, Shape], unit: Collection[str]) -> list[str]:
    """The paths of a stack of layers that all leaves of a unit may be in; none if their shapes rule it out."""
    subtree = with_first_dim(shapes).get(next(iter(unit)), [])
    ranks = [len(shapes[path]) for path in subtree]
    return subtree if set(unit) <= set(subtree) and min(ranks) > 1 and max(ranks) > 2 else []


def globs(chosen: Collection[str], paths: Collection[str]) -> tuple[str, ...]:
    """Globs, as short as possible, that match all chosen paths and no other path."""
    others = [path for path in paths if path not in chosen]
    found: list[str] = []
    for path in (path for path in paths if path in chosen):
        if not any(fnmatchcase(path, pattern) for pattern in found):
            found.append(_shortest_glob(path, chosen, others))
    return tuple(found)


def _shortest_glob(path: str, chosen: Collection[str], others: Sequence[str]) -> str:
    """The glob for the shortest prefix of a path, or for the path; with '*' for numbers if more is chosen by it."""
    for end in [*(glob.escape(prefix) + "*" for prefix in _prefixes(path)), glob.escape(path)]:
        patterns = [p for p in (end, stem(end).replace("#", "*")) if not any(fnmatchcase(other, p) for other in others)]
        if patterns:
            return max(patterns, key=lambda p: sum(fnmatchcase(each, p) for each in chosen))
    raise AssertionError(path)  # the last pattern matches the path only
