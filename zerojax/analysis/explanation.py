"""Explains the placement of a training state: spec and bytes of every leaf, as data and as tables."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import jax
from jax.sharding import NamedSharding, PartitionSpec

from zerojax.comm.blocks import sent_bytes
from zerojax.program.tiles import Tiled
from zerojax.sharding import placement
from zerojax.sharding.advice import large_unit_text, uneven_text
from zerojax.sharding.annotations import spec_text
from zerojax.sharding.axes import Axes, axis_names
from zerojax.sharding.dim_choice import choose_dim
from zerojax.sharding.placement import Leaf
from zerojax.step.config import ZeroConfig
from zerojax.step.loss_traces import Use
from zerojax.step.owned_update import owned_matrices
from zerojax.step.owners import owned_counts
from zerojax.step.state import TrainState, in_host, logical_avals
from zerojax.utils.tables import Column, Screen, TextTable, printed, screen
from zerojax.utils.text import SPACE, bytes_text, fold, mesh_text
from zerojax.utils.typing import AnyMesh, Aval, PyTree, Shape

HOST_MEMORY, DISK = "host memory", "disk"  # the categories of what is offloaded


@dataclasses.dataclass(frozen=True)
class Row:
    """The placement of one leaf.

    Attributes:
        category: 'params', 'grads', 'optimizer' or 'model_state', or 'host memory' for what the optimizer has there.
        unit: that of the parameter that the leaf is, or belongs to; else a part of its path.
        shape, dtype: of the full leaf.
        undivided_bytes: bytes on one device if the leaf were not sharded over the data axes.
        zeros_bytes: of `bytes_per_device`, the bytes of zeros that pad the leaf, as a mean over devices.
        reason: why the leaf is sharded in this dim, or why it is whole.
    """

    category: str
    path: str
    unit: str
    shape: Shape
    dtype: str
    spec: PartitionSpec
    bytes_per_device: int
    undivided_bytes: int
    zeros_bytes: float
    reason: str


@dataclasses.dataclass(frozen=True)
class UnitRow:
    """A unit: leaves that are gathered together.

    Attributes:
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
class OwnerRow:
    """Matrices that an optimizer multiplies or decomposes, each of which is whole on one device for its update.

    Attributes:
        paths: of the parameters that they are; of a stack, each layer is a matrix.
        shape: of a matrix.
        counts: how many of them each device owns; none if the compiler divides the update.
        reason: why the compiler does; otherwise empty.
        work: what computing one of them takes, in proportion to the others.
    """

    paths: tuple[str, ...]
    shape: Shape
    counts: tuple[int, ...]
    reason: str = ""
    work: float = 0


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
        owners: which devices own the matrices that the optimizer multiplies, if it does; see `step.owned_update`.
        tiled: what the loss computes in tiles of tokens, if it is explained with a step; see `program.tiles`.
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
    owners: tuple[OwnerRow, ...] = ()
    tiled: tuple[Tiled, ...] = ()

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
        hints = [hint for hint in (self.large_unit, self.uneven) if hint]
        leaves = [_leaves_table(name, self, to) for name in self.totals if self.totals[name]]
        owners = [_owners_table(self.owners, to)] if self.owners else []
        owners += [_tiles_table(self.tiled)] if self.tiled else []
        rest = _not_sharded(self.replicated, to) if self.replicated else "Every leaf that the stage shards is sharded."
        return printed(
            [self.title, _totals(self), rest, *hints, _units_table(self.units, to), *owners, *leaves], to.width
        )


def _totals(explanation: Explanation) -> TextTable:
    """What a device holds of each category and in all, next to the formula."""
    totals, formula, zeros = explanation.totals, explanation.formula, explanation.zeros

    def row(name: str, total: float, by_formula: float | None, padding: float) -> list[str]:
        n = explanation.num_shards.get(name, 1)
        undivided = f"{bytes_text(by_formula * n)} / {n} = " if by_formula is not None and n > 1 else ""
        formula_text = "" if by_formula is None else f"{undivided}{bytes_text(by_formula)}"
        return [name, bytes_text(total), formula_text, bytes_text(padding) if padding else ""]

    rows = [row(name, totals[name], formula.get(name), zeros[name]) for name in totals]
    of_device = lambda sizes: sum(size for name, size in sizes.items() if name in CATEGORIES)
    rows.insert(len(CATEGORIES), row("sum", of_device(totals), of_device(formula), of_device(zeros)))
    names = ["bytes/device", "ZeRO formula", *(["zeros that pad shards"] if any(zeros.values()) else [])]
    columns = [Column("category"), *(Column(name, right=True) for name in names)]
    return TextTable("Totals", columns, [cells[: len(columns)] for cells in rows])


_LEAF_COLUMNS = [Column("leaf", wraps=True), Column("array"), Column("bytes/device", right=True)]


def _array_text(row: Row) -> str:
    return f"{row.dtype}[{','.join(map(str, row.shape))}]"


def _folded(rows: Sequence[Row], to: Screen) -> Iterator[tuple[str, Row, int]]:
    """(name, first row, bytes of all rows) of each row to show."""
    kinds = [(dataclasses.replace(row, path="", unit=""), None if to.folds else row.path) for row in rows]
    for each in fold([row.path for row in rows], kinds):
        members = [rows[k] for k in each.members]
        yield each.text, members[0], sum(row.bytes_per_device for row in members)


def _not_sharded(rows: Sequence[Row], to: Screen) -> TextTable:
    cells = [
        [row.category, name, _array_text(row), bytes_text(size), row.reason] for name, row, size in _folded(rows, to)
    ]
    columns = [Column("category"), *_LEAF_COLUMNS, Column("reason", wraps=True)]
    return TextTable("Not sharded", columns, cells)


def _tiles_table(tiled: Sequence[Tiled]) -> TextTable:
    """The widest value of each region, and how much of it exists at a time."""
    rows = []
    for each, number in Counter(tiled).items():
        part, whole = bytes_text(each.num_bytes * each.tile // each.size), bytes_text(each.num_bytes)
        tokens = f"{each.tile:,} of {each.size:,}"
        rows.append([str(list(each.shape)), str(number), tokens, f"{part} of {whole}", each.line or ""])
    columns = [Column("widest value"), Column("number", right=True), Column("tokens", right=True)]
    columns += [Column("bytes", right=True), Column("ends at", wraps=True)]
    return TextTable("Tiles: computed for some tokens at a time", columns, rows)


def _units_table(units: Sequence[UnitRow], to: Screen) -> TextTable:
    """The units, in the order of their use if it is known."""
    kinds = [(unit.num_leaves, unit.num_bytes, bool(unit.looked_up), to.folds or unit.name) for unit in units]
    rows = []
    for each in fold([unit.name for unit in units], kinds):
        members = [units[k] for k in each.members]
        places = [f"{place}{' (rows)' if place in u.looked_up else ''}" for u in members for place in u.places]
        ends = sorted(place for u in members for place in u.places)
        shown = f"{ends[0]} to {ends[-1]}" if len(members) > 1 and ends else ", ".join(places)
        rows.append([each.text, f"{members[0].num_leaves:,}", bytes_text(members[0].num_bytes), shown])
    columns = [Column("unit", wraps=True), Column("leaves", right=True), Column("bytes of a unit", right=True)]
    columns += [Column("place", wraps=True)] * any(place for *_, place in rows)
    return TextTable("Units: gathered together", columns, [row[: len(columns)] for row in rows])


def _owners_table(rows: Sequence[OwnerRow], to: Screen) -> TextTable:
    """How many matrices of each shape a device owns."""
    cells = []
    for row in rows:
        names = [each.text for each in fold(row.paths, [to.folds or path for path in row.paths])]
        counts = sorted(set(row.counts))
        on_device = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else ", ".join(map(str, counts))
        total = f"{sum(row.counts):,}" if counts else ""
        cells.append([", ".join(names), str(list(row.shape)), total, on_device or f"the compiler: {row.reason}"])
    columns = [Column("matrices", wraps=True), Column("shape"), Column("number", right=True)]
    loads = [
        sum(loads) for loads in zip(*([n * row.work for n in row.counts] for row in rows if row.counts), strict=True)
    ]
    share = max(loads, default=0) * len(loads) / max(sum(loads), 1)
    uneven = f" (the busiest has {share:.2f} of an even share)" if share > 1.005 else ""
    title = f"Update: each matrix is whole on one device{uneven}"
    return TextTable(title, [*columns, Column("on a device", wraps=True)], cells)


def _leaves_table(category: str, explanation: Explanation, to: Screen) -> TextTable:
    """The leaves of a category. The reason of most of them is in the title, and not repeated."""
    rows = [row for row in explanation.rows if row.category == category]
    (usual, _), *others = Counter(row.reason for row in rows).most_common()
    spec = lambda row: spec_text(row.spec).replace(" ", SPACE) + ("" if row.reason == usual else f": {row.reason}")
    cells = [[name, _array_text(row), bytes_text(size), spec(row)] for name, row, size in _folded(rows, to)]
    exception = ", unless the spec has another reason" if others else ""
    where = "on a device" if category in CATEGORIES else "for a device"
    title = f"{category}: {bytes_text(explanation.totals[category])} {where} ({usual}{exception})"
    return TextTable(title, [*_LEAF_COLUMNS, Column("spec", wraps=True)], cells)


CATEGORIES = ("params", "grads", "optimizer", "model_state")  # on a device


def explain(
    config: ZeroConfig,
    state: TrainState,
    uses: Sequence[tuple[Use, ...]] | None = None,
    remat: str | None = None,
    tiled: Sequence[Tiled] = (),
) -> Explanation:
    """See `Zero.explain`. `uses` tells where each leaf is used in the forward pass, `remat` what a step recomputes, and
    `tiled` what it computes in tiles."""
    stage, axes = config.stage, config.axes
    shards = {
        "params": axes.num_shards if stage.shards_params else 1,
        "grads": axes.num_shards if stage.shards_grads else 1,
        "optimizer": config.optimizer_axes.num_shards if stage.shards_optimizer else 1,
    }
    offloaded = offloaded_to(config)
    shards |= {offloaded: shards["optimizer"]} if config.offloads_optimizer else {}
    rows = list(_rows(config, state, shards))

    # Add up the bytes of each category.
    categories = [*CATEGORIES, offloaded] if config.offloads_optimizer else CATEGORIES
    in_category = {name: [row for row in rows if row.category == name] for name in categories}
    totals = {name: sum(row.bytes_per_device for row in each) for name, each in in_category.items()}
    formula = {name: sum(row.undivided_bytes for row in in_category[name]) / n for name, n in shards.items()}
    zeros = {name: sum(row.zeros_bytes for row in each) for name, each in in_category.items()}

    # Say what deserves attention.
    leaves = state.layout.leaves
    replicated = [r for r in rows if shards.get(r.category, 1) > 1 and r.bytes_per_device == r.undivided_bytes]
    uneven = uneven_text(leaves, config.optimizer_axes) if stage.shards_optimizer else None
    where = f"{stage.title} on a mesh of {mesh_text(dict(_mesh_of(state).shape))}"
    held = bytes_text(sum(totals[name] for name in CATEGORIES))
    place = "the disk" if offloaded == DISK else offloaded
    more = f", and {bytes_text(totals[offloaded])} of {place}" if config.offloads_optimizer else ""
    return Explanation(
        f"{where}: a device holds {held}, with the gradients of a step{more}" + (f"; remat={remat}" if remat else ""),
        tuple(rows),
        _units(leaves, uses),
        large_unit_text(leaves),
        uneven,
        totals,
        formula,
        shards,
        zeros,
        tuple(replicated),
        tuple(_owners(config, state)),
        tuple(tiled),
    )


def _owners(config: ZeroConfig, state: TrainState) -> Iterator[OwnerRow]:
    owned = owned_matrices(config, state.layout)
    if owned is None:
        return
    trained = [leaf.path for leaf in state.layout.leaves if leaf.trainable]
    for kinds in owned.groups:
        for kind, counts in zip(kinds, owned_counts(kinds, config.optimizer_axes.num_shards), strict=True):
            yield OwnerRow(
                tuple(trained[c.leaf] for c in kind.couplings), kind.inputs[0].shape, tuple(counts), work=kind.work
            )
    for leaf, reason in owned.others:
        yield OwnerRow((leaf.path,), leaf.shape, (), reason)


def _rows(config: ZeroConfig, state: TrainState, shards: Mapping[str, int]) -> Iterator[Row]:
    """The rows of all leaves. `shards`: the number of shards of each category."""
    leaves, axes = {leaf.path: leaf for leaf in state.layout.leaves}, config.axes
    is_host, mesh, offloaded = in_host(config, state), _mesh_of(state), offloaded_to(config)
    whole = "there is one shard only" if axes.num_shards == 1 else config.stage.limit_text

    def of_param(category: str, path: str, a: Aval, is_host: bool, prefix: str) -> Row:
        leaf, name = leaves[path], f"{prefix}/{path}" if is_host or category == "optimizer" else path
        reason = leaf.reason if shards[category] > 1 else whole
        return _row(axes, offloaded if is_host else category, name, leaf.unit, a, leaf.shape, reason)

    # Parameters, gradients and master copies.
    host_params = dict(zip(leaves, jax.tree.leaves(is_host.params), strict=True))
    for path, a in _with_paths(state.params):
        yield of_param("params", path, a, host_params[path], "params")
    for leaf in leaves.values():
        if leaf.trainable:
            yield of_param("grads", leaf.path, gradient_aval(config, mesh, leaf), host_params[leaf.path], "grads")
    for (path, a), flag in zip(_with_paths(state.master), jax.tree.leaves(is_host.master), strict=True):
        yield of_param("optimizer", path, a, flag, "master")
    # The rest of the optimizer's state, and of the model's.
    shapes = [tuple(a.shape) for a in jax.tree.leaves(logical_avals(state).opt_state)]
    flags = jax.tree.leaves(is_host.opt_state)
    for (path, a), flag, shape in zip(_with_paths(state.opt_state), flags, shapes, strict=True):
        keys = path.split("/")  # that of an optimizer's leaf ends in that of a parameter
        ends = ("/".join(keys[start:]) for start in range(len(keys)))
        leaf = next((leaves[end] for end in ends if end in leaves), None)
        alike = leaf if leaf and leaf.shape == shape else None
        reason = alike.reason if alike else choose_dim(shape, config.optimizer_axes.num_shards, stacked=False).reason
        category, reason = offloaded if flag else "optimizer", reason if shards["optimizer"] > 1 else whole
        yield _row(axes, category, path, leaf.unit if leaf else path, a, shape, reason)
    for path, a in _with_paths(state.model_state):
        yield _row(axes, "model_state", path, path.rpartition("/")[0] or path, a, a.shape, "replicated: model state")


def offloaded_to(config: ZeroConfig) -> str:
    """The category of what is offloaded."""
    return HOST_MEMORY if config.disk is None else DISK


def _mesh_of(state: TrainState) -> AnyMesh:
    return jax.tree.leaves(state.params)[0].sharding.mesh


def _units(leaves: Sequence[Leaf], uses: Sequence[tuple[Use, ...]] | None) -> tuple[UnitRow, ...]:
    members: dict[str, list[int]] = {}
    for k, leaf in enumerate(leaves):
        members.setdefault(leaf.unit, []).append(k)
    rows = []
    for name, unit in members.items():
        gathered = [leaves[k].of_layer() for k in unit]
        num_bytes = sum(sent_bytes(a.shape, a.compute_dtype, a.wire.gather, a.wire.blocks) for a in gathered)
        of_unit = {use for k in unit for use in uses[k]} if uses else set()
        places = tuple(sorted(use.place for use in of_unit))
        rows.append(UnitRow(name, len(unit), num_bytes, places, tuple(use.place for use in of_unit if use.lookup)))
    return tuple(sorted(rows, key=lambda row: row.places[:1] or (len(leaves),)) if uses else rows)


def _with_paths(tree: PyTree) -> list[tuple[str, Aval]]:
    """The leaves of a tree with their paths."""
    return [(placement.path_text(path), a) for path, a in jax.tree_util.tree_leaves_with_path(tree)]


def _row(axes: Axes, category: str, path: str, unit: str, stored: Aval, shape: Shape, reason: str) -> Row:
    spec, mesh = stored.sharding.spec, stored.sharding.mesh
    others = [[name for name in axis_names(entry) if name not in axes.of_states] for entry in spec]
    undivided = NamedSharding(mesh, PartitionSpec(*(tuple(names) or None for names in others)))
    logical = jax.ShapeDtypeStruct(shape, stored.dtype)
    on_device, full = placement.shard_bytes(stored, stored.sharding), placement.shard_bytes(logical, undivided)
    zeros = on_device * (1 - math.prod(shape) / max(1, math.prod(stored.shape)))
    return Row(category, path, unit, logical.shape, str(stored.dtype), spec, on_device, full, zeros, reason)


def gradient_aval(config: ZeroConfig, mesh: AnyMesh, leaf: Leaf) -> jax.ShapeDtypeStruct:
    """The gradient of a leaf within a step. At stage 1 it is full, until the reduce_scatter at the end of the step."""
    is_sharded = config.stage.shards_grads
    sharding = NamedSharding(mesh, leaf.spec(config.axes, is_sharded))
    shape, dtype = leaf.padding(is_sharded).stored_shape(leaf.shape), config.precision.wire_dtype(leaf.compute_dtype)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
