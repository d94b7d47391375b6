"""Names the units, the groups of leaves that are gathered together, by the paths and shapes of their leaves."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple, TypeAlias

from zerojax.sharding import unnamed_layers
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
    show layers, as in a list of arrays, see `unnamed_layers`.

    Args:
        shapes: the paths of all leaves, and their shapes.
        patterns: globs on leading parts of paths.
        stacked: the paths of leaves whose dim 0 counts layers.

    Raises:
        ValueError: if a pattern matches no path.
    """
    leaves = [
        _Leaf(_components(path), math.prod(shape), len(shape) > 1 + (path in stacked), path in stacked)
        for path, shape in shapes.items()
    ]
    groups = [group for group in _repeated(leaves, 0) if _are_units(group)]
    above = {end[:i] for end in _ends(groups) for i in range(len(end))}
    above |= {leaves[0].path[:i] for i in range(_common_depth([leaf.path for leaf in leaves]) + 1)}
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
            raise ValueError(no_match_text("units", pattern, list(shapes)))
    fixed.update(unit for unit, path in zip(names, shapes, strict=True) if path in stacked)
    return unnamed_layers.merged_units(names, shapes, fixed)


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
    """The patterns that cut a unit where no part holds most of it, or () if a single leaf does.

    Args:
        unit: its name.
        sizes: the paths of its leaves, and their numbers of elements.
    """
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


def no_match_text(option: str, pattern: str, paths: Sequence[str]) -> str:
    """The error text for a pattern that matches no leaf path."""
    shown = ", ".join(list(paths)[:5]) + (", ..." if len(paths) > 5 else "")
    example = pattern.strip("*") and f"*{pattern.strip('*')}*"
    return (
        f"{option}: pattern {pattern!r} matches no parameter\n"
        f"  got:      paths {shown}\n"
        f"  fix:      use a glob on the whole path, for example {example!r}"
    )
