"""Finds layers where names do not show them, by repeated shapes: in lists of arrays, and in modules numbered by kind.

Lists of arrays are in the order of creation, which nearly always is that of use. Any cut of this order into consecutive
arrays is a valid choice of units, and the shapes of a model's layers repeat:

    embedding │ kernel bias ... scale bias │ kernel bias ... scale bias │ ... │ kernel bias

Modules that are numbered by kind ('linear', 'linear_1', 'layer_norm', 'layer_norm_1', ...; Haiku and Keras name them
so) are a list for each kind. Layer i is the i-th part of each.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from zerojax.utils.text import abbreviate
from zerojax.utils.typing import Shape

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
    """What to do about vectors that are units of their own, or None if they are few.

    Args:
        units: the unit of each leaf, in the order of `shapes`.
        shapes: path -> shape, of a layer if the leaf is stacked.
    """
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
