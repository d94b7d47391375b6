"""Names the units, the groups of leaves that are gathered together, by the paths and shapes of their leaves."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple, TypeAlias

import numpy as np

from zerojax.utils.text import abbreviate
from zerojax.utils.typing import Shape

_NUMBER = re.compile(r"\d+")
Prefix: TypeAlias = tuple[str, ...]  # leading components of paths, each with the separator behind it


class _Leaf(NamedTuple):
    path: Prefix
    size: int
    is_matrix: bool  # of each layer, if it is stacked
    is_stacked: bool


_Group: TypeAlias = dict[Prefix, list[_Leaf]]  # components with the same name but for a number: prefix -> leaves below


def unit_names(shapes: Mapping[str, Shape], patterns: Sequence[str] = (), stacked: Collection[str] = ()) -> list[str]:
    """The unit of each leaf path ('layers/3/mlp/kernel').

    The unit of a leaf is the leading part of its path that the first matching pattern matches. If no pattern matches,
    units are the layers and what is beside them: a unit ends at a component with a number whose siblings share the rest
    of the name ('layers/0' and 'layers/1', 'Block_0' and 'Block_1', but not 'wav2vec2'), and otherwise as early as
    possible, at a component that has no layers below it and is not a prefix of all paths ('model/embed'). Components
    without a matrix, such as numbered norms, and the numbered parts of a stack of layers are no layers.

    Layers may be in stages that are numbered themselves ('stages/3/layers/2'). A numbered component is cut again if at
    least 7/10 of it repeats: numbered components with at least two matrices in the same places, as the blocks of a
    stage have, and the attention and the MLP of a layer, or its norms, do not. Experts stay in their layer.

    The dots in the keys of a flat state dict ('model.layers.0.mlp.weight') separate components, too. Where names do not
    show layers, as in a list of arrays, see `merged_units`.
    """
    leaves = [
        _Leaf(_components(path), math.prod(shape), len(shape) > 1 + (path in stacked), path in stacked)
        for path, shape in shapes.items()
    ]

    # Find the prefixes above the ends of units.
    groups = [group for group in _repeated(leaves, 0) if _are_units(group)]
    above = {end[:i] for end in _ends(groups) for i in range(len(end))}
    above |= {leaves[0].path[:i] for i in range(_common_depth([leaf.path for leaf in leaves]) + 1)}

    # Name the unit of each leaf.
    matched, fixed = set(), set()

    def name(path: Prefix) -> str:
        prefixes = ["".join(path[:i])[:-1] for i in range(1, len(path))] + ["".join(path)]
        for pattern in patterns:
            for prefix in prefixes:
                if fnmatchcase(prefix, pattern):
                    matched.add(pattern)
                    fixed.add(prefix)
                    return prefix
        return next((p for i, p in enumerate(prefixes, 1) if path[:i] not in above), prefixes[-1])

    names = [name(leaf.path) for leaf in leaves]
    for pattern in patterns:
        if pattern not in matched:
            raise no_match_error("units", pattern, list(shapes))

    # Merge the parts of layers that have no common prefix.
    fixed.update(unit for unit, path in zip(names, shapes, strict=True) if path in stacked)
    return merged_units(names, shapes, fixed)


def _components(path: str) -> Prefix:
    """The components of a path, each with the separator behind it: '/', or a dot in the last key."""
    above, separator, key = path.rpartition("/")
    keys = [f"{each}/" for each in above.split("/")] if separator else []
    return (*keys, *(re.findall(r"[^.]+\.?|\.", key) or [""]))


def stem(name: str) -> str:
    """A name that is the same for components that differ in numbers only."""
    return _NUMBER.sub("#", name)


def _common_depth(paths: Sequence[Prefix]) -> int:
    """The number of leading components that all paths share, of which none is a leaf. 0 for a single path."""
    depth = 0
    while len(paths) > 1 and all(len(p) > depth + 1 and p[depth] == paths[0][depth] for p in paths):
        depth += 1
    return depth


def _ends(groups: Sequence[_Group]) -> list[Prefix]:
    """The prefixes at which units end: those of repeated components, or of the layers in them."""
    ends = []
    for prefix, leaves in itertools.chain.from_iterable(group.items() for group in groups):
        layers = [group for group in _repeated(leaves, len(prefix)) if _are_layers(group, len(prefix))]
        size = sum(leaf.size for group in layers for below in group.values() for leaf in below)
        is_cut = layers and size >= 0.7 * sum(leaf.size for leaf in leaves)
        ends += _ends(layers) if is_cut else [prefix]
    return ends


def _repeated(leaves: Sequence[_Leaf], depth: int) -> list[_Group]:
    """The topmost groups of components that differ in a number only, below a prefix of `depth` components."""
    children: _Group = {}
    for leaf in leaves:
        if len(leaf.path) > depth:
            children.setdefault(leaf.path[: depth + 1], []).append(leaf)
    by_stem: dict[str, _Group] = {}
    for prefix, below in children.items():
        by_stem.setdefault(stem(prefix[-1]), {})[prefix] = below
    groups = []
    for name, group in by_stem.items():
        if "#" in name and len(group) > 1:
            groups.append(group)
        else:
            groups += [g for below in group.values() for g in _repeated(below, depth + 1)]
    return groups


def _are_units(group: _Group) -> bool:
    """Whether the outermost numbered components are units: not those without a matrix, nor the parts of a stack."""
    leaves = [leaf for below in group.values() for leaf in below]
    if any(leaf.is_stacked for leaf in leaves):
        return _are_layers(group, 0)
    return any(leaf.is_matrix for leaf in leaves)


def _are_layers(group: _Group, depth: int) -> bool:
    """Whether numbered components within another one, whose prefix has `depth` components, are layers."""
    relative = [{leaf.path[len(prefix) :]: leaf for leaf in leaves} for prefix, leaves in group.items()]
    common = set.intersection(*map(set, relative))
    size = sum(leaf.size for part in relative for leaf in part.values())
    shared = sum(part[path].size for part in relative for path in common)
    num_matrices = sum(relative[0][path].is_matrix for path in common)
    experts = any("expert" in name.lower() for prefix in group for name in prefix[depth:])
    return num_matrices > 1 and 2 * shared >= size and not experts


def cut_patterns(unit: str, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The patterns that cut a unit where no part holds most of it, or () if a single leaf does. `sizes` are by path."""
    depth, total, parts = len(unit.split("/")), sum(sizes.values()), {unit: 0}
    while True:
        largest = max(parts, key=parts.__getitem__)
        below = {path: size for path, size in sizes.items() if path.startswith(largest + "/")}
        parts = {}
        for path, size in below.items():
            part = "/".join(path.split("/")[: depth + 1])
            parts[part] = parts.get(part, 0) + size
        if not parts:
            return ()
        depth += 1
        if 2 * max(parts.values()) <= total:
            return (f"{largest}/*",)


def check_patterns(option: str, patterns: Iterable[str], paths: Sequence[str]) -> None:
    """Raises ValueError if a pattern matches no path."""
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in paths):
            raise no_match_error(option, pattern, paths)


def no_match_error(option: str, pattern: str, paths: Sequence[str]) -> ValueError:
    example = pattern.strip("*") and f"*{pattern.strip('*')}*"
    return ValueError(
        f"{option}: pattern {pattern!r} matches no parameter\n"
        f"  got:      paths {abbreviate(paths, separator=', ')}\n"
        f"  fix:      use a glob on the whole path, for example {example!r}"
    )


# Where names do not show layers ---------------------------------------------------------------------------------------
#
# Lists of arrays are in the order of creation, which nearly always is that of use. Any cut of this order into
# consecutive arrays is a valid choice of units, and the shapes of a model's layers repeat:
#
#     embedding │ kernel bias ... scale bias │ kernel bias ... scale bias │ ... │ kernel bias
#
# Modules that are numbered by kind ('linear', 'linear_1', 'layer_norm', 'layer_norm_1', ...; Haiku and Keras name them
# so) are a list for each kind. Layer i is the i-th part of each.

_END = re.compile(r"(?:.*[/.])?(?P<kind>.*?)_?(?P<number>\d*)", re.DOTALL)
# Three heuristics. A part that repeats within a layer, such as its projections, is cut off if it is most of the layer.
_MAIN_SHARE = 0.7
# The members of a kind that may be outside of the layers: a projection before them and one behind, or two norms.
_MOST_OUTSIDE = 2
_MOST_ALONE = 8  # norms and biases outside of layers; a heuristic as well: models that were tried have up to four


class _Member(NamedTuple):
    """A unit that may be a part of a layer: a module or an array."""

    name: str
    number: int  # -1 for the first of a kind, which has none
    shapes: tuple[tuple[str, Shape], ...]  # relative path -> shape

    @property
    def size(self) -> int:
        return sum(math.prod(shape) for _, shape in self.shapes)

    @property
    def has_matrix(self) -> bool:
        return any(len(shape) > 1 for _, shape in self.shapes)


_Parts = list[list[_Member]]


def merged_units(units: Sequence[str], shapes: Mapping[str, Shape], fixed: Collection[str]) -> list[str]:
    """Merges units that are parts of one layer. A merged unit has the name of its first array or module.

    Args:
        units: the unit of each leaf, in the order of `shapes`: a leading part of its path.
        shapes: path -> shape.
        fixed: units that stay as they are, with those beside them: chosen by the user, or of stacked leaves.
    """
    members: dict[str, list[tuple[str, Shape]]] = {}
    for (path, shape), unit in zip(shapes.items(), units, strict=True):
        members.setdefault(unit, []).append((path[len(unit) :], shape))
    parents: dict[str, dict[str, list[_Member]]] = {}
    for unit, leaves in members.items():
        match = _END.fullmatch(unit)
        assert match
        kind, parent = match["kind"], unit[: match.start("kind")]
        member = _Member(unit, int(match["number"] or -1), tuple(sorted(leaves)))
        parents.setdefault(parent, {}).setdefault(kind, []).append(member)
    names: dict[str, str] = {}
    for kinds in parents.values():
        if any(member.name in fixed for kind in kinds.values() for member in kind):
            continue
        ordered = [sorted(kind, key=lambda member: member.number) for kind in kinds.values()]
        is_list = list(kinds) == [""] and all(path == "" for member in ordered[0] for path, _ in member.shapes)
        for group in _of_list(ordered[0]) if is_list else _of_kinds(ordered):
            names.update((member.name, group[0].name) for member in group)
    return [names.get(unit, unit) for unit in units]


def unmerged_text(units: Sequence[str], shapes: Mapping[str, Shape]) -> str | None:
    """What to do about vectors that are units of their own, or None if they are few. Shapes are those of a layer."""
    with_matrix = {unit for unit, shape in zip(units, shapes.values(), strict=True) if len(shape) > 1}
    others = [unit for unit in dict.fromkeys(units) if unit not in with_matrix]
    if len(others) <= _MOST_ALONE or len(others) < len(with_matrix) / 2:
        return None
    return (
        f"placement: neither names nor shapes show which of {len(others)} norms and biases are in the same layer\n"
        f"  got:      units of their own: {abbreviate(others, separator=', ')}\n"
        f"  fix:      name parameters by layer, for example {{'layers/0/{others[0]}': ...}}"
    )


def _of_list(members: Sequence[_Member]) -> _Parts:
    """Cuts consecutive arrays into layers. Elsewhere, each matrix is a unit with the vectors behind it."""
    run = _repeats(members)
    if run is None:
        groups: _Parts = []
        for member in members:
            if member.has_matrix or not groups:
                groups.append([])
            groups[-1].append(member)
        return groups
    layers = run.cut(members)
    inner = _repeats(layers[0])
    size = lambda members: sum(member.size for member in members)
    if inner and size(layers[0][inner.start : inner.end]) >= _MAIN_SHARE * size(layers[0]):
        layers = [group for layer in layers for group in _of_list(layer)]
    before, behind = members[: run.start], members[run.end :]
    return [*(_of_list(before) if before else []), *layers, *(_of_list(behind) if behind else [])]


def _of_kinds(kinds: Sequence[Sequence[_Member]]) -> _Parts:
    """The layers of modules that are numbered by kind; none if the kinds do not have the same number of layers."""
    kinds = [kind for kind in kinds if len(kind) > 1]
    with_matrix = [kind for kind in kinds if any(member.has_matrix for member in kind)]
    vectors = [kind for kind in kinds if kind not in with_matrix]
    are_arrays = all(member.shapes[0][0] == "" for kind in kinds for member in kind)
    # Without norms beside them, modules may be layers, of two towers.
    if not with_matrix or not (vectors or (are_arrays and len(with_matrix) > 1)):
        return []
    runs = [_repeats(kind) or _Repetition(0, 1, len(kind)) for kind in with_matrix]
    num_layers = min(run.repeats for run in runs)
    parts = []
    for kind, run in zip(with_matrix, runs, strict=True):
        if run.repeats % num_layers or len(kind) - (run.end - run.start) > _MOST_OUTSIDE:
            return []
        parts.append(_Repetition(run.start, run.period * run.repeats // num_layers, num_layers).cut(kind))
    for kind in vectors:
        period = len(kind) // num_layers
        if not period or len(kind) - period * num_layers > _MOST_OUTSIDE:
            return []
        parts.append(_Repetition(0, period, num_layers).cut(kind))
    parts.sort(key=lambda layers: (not layers[0][0].has_matrix, len(layers[0])))
    return [[member for part in layer for member in part] for layer in zip(*parts, strict=True)]


class _Repetition(NamedTuple):
    """Members from `start` on that repeat: `repeats` times `period` of them."""

    start: int
    period: int
    repeats: int

    @property
    def end(self) -> int:
        return self.start + self.period * self.repeats

    def cut(self, members: Sequence[_Member]) -> _Parts:
        return [list(members[k : k + self.period]) for k in range(self.start, self.end, self.period)]


def _repeats(members: Sequence[_Member]) -> _Repetition | None:
    """The repeated shapes with most of the elements, of the smallest period that has them; None if none repeat."""
    codes: dict[Hashable, int] = {}
    kinds = np.array([codes.setdefault(member.shapes, len(codes)) for member in members])
    ends = np.cumsum([0, *(member.size for member in members)])
    matrices = np.cumsum([0, *(member.has_matrix for member in members)])
    best, most = None, 0
    for period in range(1, len(members) // 2 + 1):
        is_equal = np.concatenate([[False], kinds[:-period] == kinds[period:], [False]])
        bounds = np.flatnonzero(np.diff(is_equal)).reshape(-1, 2)
        for start, stop in bounds[bounds[:, 1] - bounds[:, 0] >= period]:
            run = _Repetition(int(start), period, int(stop - start) // period + 1)
            has_matrix = matrices[run.start + period] > matrices[run.start]
            if has_matrix and ends[run.end] - ends[run.start] > most:
                best, most = run, ends[run.end] - ends[run.start]
    return best
