"""The placement of a training state as data, and as tables: totals first, and equal layers in one row."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence

from zerojax.utils.tables import Column, Screen, TextTable, printed, screen
from zerojax.utils.text import SPACE, bytes_text, fold
from zerojax.utils.typing import Shape

HOST_MEMORY = "host memory"  # the category of what is offloaded


@dataclasses.dataclass(frozen=True)
class Row:
    """The placement of one leaf.

    Attributes:
        category: 'params', 'grads', 'optimizer' or 'model_state', or 'host memory' for what the optimizer has there.
        path: keys joined by '/'.
        shape, dtype: of the full leaf.
        spec: the PartitionSpec as text.
        bytes_per_device: bytes of the leaf on one device.
        undivided_bytes: bytes on one device if the leaf were not sharded over the data axes.
        zeros_bytes: of `bytes_per_device`, the bytes of zeros that pad the leaf, as a mean over devices.
        reason: why the leaf is sharded in this dim, or why it is whole.
    """

    category: str
    path: str
    shape: Shape
    dtype: str
    spec: str
    bytes_per_device: int
    undivided_bytes: int
    zeros_bytes: float
    reason: str


@dataclasses.dataclass(frozen=True)
class UnitRow:
    """A unit: leaves that are gathered together.

    Attributes:
        name: the leading part of the paths of its leaves.
        num_leaves: the number of its leaves.
        num_bytes: bytes of its full leaves as they are gathered; of stacked leaves, of one layer.
        places: the positions in the forward pass at which it is used, counted from 0; empty if unknown, or unused.
        looked_up: those of `places` at which only rows of it are looked up, and it is not gathered.
    """

    name: str
    num_leaves: int
    num_bytes: int
    places: tuple[int, ...]
    looked_up: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The placement of a training state, leaf by leaf, with the bytes per device.

    It prints as tables that follow the width of the terminal, where equal layers are one row.

    Attributes:
        title: the stage, and the mesh.
        rows: one for each leaf of parameters, gradients, optimizer state and model state.
        units: one row for each unit, in the order of their first use if that is known, or else of the leaves.
        large_unit: what to do about a unit that holds most of the weights, or None.
        uneven: what to do about replicated leaves or zeros that pad shards, or None if they are few.
        totals: category -> bytes per device; those of 'host memory' are in the memory of its host.
        formula: category -> bytes per device if every leaf were divided evenly over the shard axes (ZeRO, table 1).
        num_shards: category -> the number of shards by which the formula divides.
        zeros: category -> of `totals`, the bytes of the zeros that make shards equal, as a mean over devices.
        replicated: the rows of leaves that are replicated although the stage shards their category.
    """

    title: str
    rows: tuple[Row, ...]
    units: tuple[UnitRow, ...]
    large_unit: str | None
    uneven: str | None
    totals: dict[str, int]
    formula: dict[str, float]
    num_shards: dict[str, int]
    zeros: dict[str, float]
    replicated: tuple[Row, ...]

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def text(self, to: Screen | None = None) -> str:
        """The tables as text.

        Args:
            to: the width, and whether equal layers are folded. By default those of the terminal; where there is none,
                as in a file, lines have 120 columns and each leaf has a row.
        """
        to = to or screen()
        return printed(self._parts(to), to.width)

    def _parts(self, to: Screen) -> list[TextTable | str]:
        hints = [hint for hint in (self.large_unit, self.uneven) if hint]
        leaves = [_leaves_table(name, self, to) for name in self.totals if self.totals[name]]
        rest = _not_sharded(self.replicated, to) if self.replicated else "Every leaf that the stage shards is sharded."
        return [self.title, _totals(self), rest, *hints, _units_table(self.units, to), *leaves]


def _totals(explanation: Explanation) -> TextTable:
    """What a device holds of each category and in all, next to the formula."""
    totals, formula, zeros = explanation.totals, explanation.formula, explanation.zeros
    has_zeros = any(zeros.values())

    def row(name: str, total: float, by_formula: str, padding: float) -> list[str]:
        return [name, bytes_text(total), by_formula, *([bytes_text(padding) if padding else ""] if has_zeros else [])]

    def formula_text(name: str) -> str:
        if name not in formula:
            return ""
        n = explanation.num_shards[name]
        undivided = f"{bytes_text(formula[name] * n)} / {n} = " if n > 1 else ""
        return f"{undivided}{bytes_text(formula[name])}"

    row_of = lambda name: row(name, totals[name], formula_text(name), zeros[name])
    on_device = [name for name in totals if name != HOST_MEMORY]
    total_of = lambda sizes: sum(sizes[name] for name in on_device if name in sizes)
    rows = [row_of(name) for name in on_device]
    rows.append(row("sum", total_of(totals), bytes_text(total_of(formula)), total_of(zeros)))
    rows += [row_of(name) for name in totals if name == HOST_MEMORY]
    columns = [Column("category"), Column("bytes/device", right=True), Column("ZeRO formula", right=True)]
    columns += [Column("zeros that pad shards", right=True)] if has_zeros else []
    return TextTable("Totals", columns, rows)


_LEAF_COLUMNS = [Column("leaf", wraps=True), Column("array"), Column("bytes/device", right=True)]


def _array_text(row: Row) -> str:
    return f"{row.dtype}[{','.join(map(str, row.shape))}]"


def _folded(rows: Sequence[Row], to: Screen) -> Iterator[tuple[str, Row, int]]:
    """(name, first row, bytes of all rows) of each row to show."""
    kinds = [(dataclasses.replace(row, path=""), None if to.folds else row.path) for row in rows]
    for each in fold([row.path for row in rows], kinds):
        members = [rows[k] for k in each.members]
        yield each.text, members[0], sum(row.bytes_per_device for row in members)


def _not_sharded(rows: Sequence[Row], to: Screen) -> TextTable:
    cells = [
        [row.category, name, _array_text(row), bytes_text(size), row.reason] for name, row, size in _folded(rows, to)
    ]
    columns = [Column("category"), *_LEAF_COLUMNS, Column("reason", wraps=True)]
    return TextTable("Not sharded", columns, cells)


def _units_table(units: Sequence[UnitRow], to: Screen) -> TextTable:
    """The units, in the order of their use if it is known."""
    kinds = [(unit.num_leaves, unit.num_bytes, bool(unit.looked_up), to.folds or unit.name) for unit in units]
    rows = []
    for each in fold([unit.name for unit in units], kinds):
        members = [units[k] for k in each.members]
        places = [f"{place}{' (rows)' if place in u.looked_up else ''}" for u in members for place in u.places]
        shown = ", ".join(places) if len(members) == 1 else _span(sorted(p for u in members for p in u.places))
        rows.append([each.text, f"{members[0].num_leaves:,}", bytes_text(members[0].num_bytes), shown])
    columns = [Column("unit", wraps=True), Column("leaves", right=True), Column("bytes of a unit", right=True)]
    columns += [Column("place", wraps=True)] * any(place for *_, place in rows)
    return TextTable("Units: gathered together", columns, [row[: len(columns)] for row in rows])


def _span(places: Sequence[int]) -> str:
    """Places of several units: the first and the last."""
    return f"{places[0]} to {places[-1]}" if places else ""


def _leaves_table(category: str, explanation: Explanation, to: Screen) -> TextTable:
    """The leaves of a category. The reason of most of them is in the title, and not repeated."""
    rows = [row for row in explanation.rows if row.category == category]
    (usual, _), *others = Counter(row.reason for row in rows).most_common()
    spec = lambda row: row.spec.replace(" ", SPACE) + ("" if row.reason == usual else f": {row.reason}")
    cells = [[name, _array_text(row), bytes_text(size), spec(row)] for name, row, size in _folded(rows, to)]
    exception = ", unless the spec has another reason" if others else ""
    where = "for a device" if category == HOST_MEMORY else "on a device"
    title = f"{category}: {bytes_text(explanation.totals[category])} {where} ({usual}{exception})"
    return TextTable(title, [*_LEAF_COLUMNS, Column("spec", wraps=True)], cells)
