"""The choice of the dim in which a leaf is sharded; and which leaves are stacks of layers, by their shapes.

The sharded dim of a leaf is the first one that the number of shards divides. Two kinds of dims are never sharded: the
layer dim of a stacked leaf, and a dim that an annotation divides over another axis such as 'model', which stays in the
spec at every stage. If no dim is divisible, the one that needs the fewest zeros is padded, see `padding`. A leaf that
has fewer elements than there are shards is replicated over the data axes, and `explain()` lists it.

The first dim is preferred because it is the outermost in memory: its shards are contiguous, as collectives move them.
For any other dim the compiler transposes the leaf, and for scanned layers the whole stack at once. Tables outside of
the layers, such as embeddings, are sharded over their width, which few zeros may pad: a loss that looks up rows then
need not gather them.
"""

from __future__ import annotations

import glob
import itertools
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from jax.sharding import PartitionSpec

from zerojax.sharding.axes import REPLICATED, Axes, axis_names
from zerojax.sharding.units import stem
from zerojax.utils.typing import Shape

# The width of a table is padded by at most this share of it, even if its rows could be divided without padding. This is
# a heuristic: rows are looked up without a gather of the table only if it is sharded over its width.
_WIDTH_PADDING = 1 / 16


class Choice(NamedTuple):
    """The dim to shard, or None; why; and the number of zeros at its end."""

    dim: int | None
    reason: str
    num_zeros: int = 0


def choose_dim(
    shape: Sequence[int],
    num_shards: int,
    stacked: bool,
    model_spec: PartitionSpec = REPLICATED,
    is_table: bool = False,
    pads: bool = True,
) -> Choice:
    """Chooses the dim of a leaf. Of a table, dim 1 is preferred. Without `pads`, a leaf is sharded evenly or not."""
    taken = {d: "x".join(axis_names(entry)) for d, entry in enumerate(model_spec) if entry}
    dims = [d for d in range(1 if stacked else 0, len(shape)) if d not in taken]
    divisible = [d for d in dims if shape[d] and shape[d] % num_shards == 0]
    if is_table and 1 in dims and shape[1]:
        num_zeros = -shape[1] % num_shards
        if not num_zeros or (pads and num_zeros <= _WIDTH_PADDING * shape[1]):
            reason = f"width of a table{f', padded to {shape[1] + num_zeros}' if num_zeros else ''}"
            return Choice(1, reason, num_zeros)
    if divisible:
        return Choice(divisible[0], "first divisible dim")
    if not shape:
        return Choice(None, "replicated: a scalar")
    if not dims and not taken:
        return Choice(None, "replicated: one scalar per layer")
    missing = {d: -shape[d] % num_shards for d in dims if shape[d]}
    if pads and missing and math.prod(shape[1:] if stacked else shape) >= num_shards:
        least = min(missing, key=lambda d: missing[d] / shape[d])
        return Choice(least, f"padded to {shape[least] + missing[least]}", missing[least])
    remainders = [f"{shape[d]} % {num_shards} = {shape[d] % num_shards}" for d in dims]
    remainders += [f"dim {d} is over {names}" for d, names in taken.items()]
    return Choice(None, "replicated: " + ", ".join(remainders))


def annotated_dim(
    shape: Shape, dim: int, num_shards: int, stacked: bool, model_spec: PartitionSpec, pads: bool = True
) -> Choice:
    """Chooses the dim of a leaf whose annotation names the data axes at `dim`.

    The annotation of a dim of 4 experts was written for at most 4 devices. On 8, another dim is sharded.
    """
    if shape[dim] % num_shards == 0 and not (stacked and dim == 0):
        return Choice(dim, "annotation")
    why = (
        "counts layers"
        if stacked and dim == 0
        else f"cannot be: {shape[dim]} % {num_shards} = {shape[dim] % num_shards}"
    )
    choice = choose_dim(shape, num_shards, stacked, model_spec, pads=pads)
    if choice.dim is None:
        return choice
    return choice._replace(reason=f"{choice.reason}; annotated dim {dim} {why}")


def given_dim(path: str, shape: Shape, dim: int | None, axes: Axes, model_spec: PartitionSpec, pads: bool) -> Choice:
    """Takes the dim that the user chose for a leaf, or None to replicate it, if it can be sharded."""
    if dim is None:
        return Choice(None, "replicated")
    dim = dim + len(shape) if dim < 0 else dim
    taken = 0 <= dim < len(model_spec) and model_spec[dim] is not None
    exists = 0 <= dim < len(shape) and shape[dim] > 0
    num_zeros = -shape[dim] % axes.num_shards if exists else 0
    if exists and not taken and (pads or not num_zeros):
        return Choice(dim, "chosen", num_zeros)
    if taken:
        why = f"dim {dim} is over {'x'.join(axis_names(model_spec[dim]))}"
    elif exists:
        why = f"{shape[dim]} % {axes.num_shards} = {shape[dim] % axes.num_shards}"
    else:
        why = f"it has no elements in dim {dim}" if 0 <= dim < len(shape) else f"there is no dim {dim}"
    raise ValueError(
        f"placement: cannot shard {path!r} over {'x'.join(axes.shard)} in dim {dim}\n"
        f"  got:      shape {shape}, axis size {axes.num_shards}; {why}\n"
        f"  fix:      choose another dim, or None to replicate"
    )


def tables(shapes: Mapping[str, Shape], units: Sequence[str], stacked: Collection[str]) -> set[str]:
    """The paths of leaves that may be tables of rows: matrices with many more rows than columns outside of layers.

    Vocabularies of published models have at least 3.9 times as many entries as the model is wide (Llama 2 70B). A unit
    is a layer if others differ from it in a number only ('layers/0', 'Block_3'), which the first may lack, and it has
    several matrices. What is wrongly taken for a table is sharded all the same, in its other dim.
    """
    matrices: dict[str, list[str]] = {}
    for path, unit in zip(shapes, units, strict=True):
        if len(shapes[path]) > 1:
            matrices.setdefault(unit, []).append(path)
    siblings = Counter(stem(unit) for unit in matrices)
    found = set()
    for unit, paths in matrices.items():
        is_layer = len(paths) > 1 and max(siblings[stem(unit)], siblings[f"{stem(unit)}_#"]) > 1
        tall = {p for p in paths if len(shapes[p]) == 2 and shapes[p][0] > 2 * shapes[p][1] and p not in stacked}
        found |= set() if is_layer else tall
    return found


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
