"""A part that looks up rows in a sharded table, such as an embedding: the rows travel, not the table.

A table of shape [rows, width] is sharded over its width. Each device takes its part of the rows that all devices look
up, and an all-to-all brings each device the whole rows of its own indices:

    forward    indices ► all_gather ► [N, count] ► take ► [N, count, width / N] ► all_to_all ► rows [count, width]
    backward   cotangents [count, width] ► all_to_all ► [N, count, width / N] ► add to the rows of the shard

The gradient of the shard is then the sum over all devices: nothing is reduced. Neither the first gather of a step nor
its last reduction, which no computation hides, remains.

Everything here runs inside `shard_map`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence, Set
from functools import cached_property

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.sharding import PartitionSpec

from zerojax.comm import collectives as communication
from zerojax.comm.schedule import Schedule, event, zeros_after
from zerojax.comm.stage_collectives import StageCollectives
from zerojax.program import context, jaxprs
from zerojax.program.gradient_paths import is_differentiable
from zerojax.program.jaxprs import Equation, RowLookup, Var
from zerojax.program.part import GradientSink, Part, PlannedPart, Weights
from zerojax.program.segmentation import View
from zerojax.sharding.axes import REPLICATED, Dims
from zerojax.sharding.padding import Padding
from zerojax.utils.typing import Array, Aval, PyTree, Shape


def looks_up_shards(collectives: StageCollectives, leaves: Sequence[Aval], equation: Equation, view: View) -> bool:
    """Whether a lookup of rows sends less than the gather of its table would. `view` is the table, one of `leaves`.

    The table has to be a floating leaf that is sharded over another dim than that of its rows.

    Source: a device sends (N-1)/N of its rows for the lookup, of their cotangents for the gradient, and of the indices
    of all devices; for a gather and a reduce_scatter, (N-1)/N of the table each.
    """
    lookup, dims, leaf = jaxprs.row_lookup(equation), collectives.dims[view.leaf], leaves[view.leaf]
    if lookup is None or not collectives.stage.shards_grads or collectives.axes.num_shards == 1:
        return False
    row_dim = view.order[lookup.dim]
    is_divided_elsewhere = any(entry and d != row_dim for d, entry in enumerate(dims.model_spec))
    if dims.shard in (None, row_dim) or is_divided_elsewhere or not is_differentiable(leaf):
        return False
    if context.token_dim(equation.invars[1].aval.shape[:-1]) is None:
        return False
    indices, table_bytes = equation.invars[1].aval, leaf.size * leaf.dtype.itemsize
    index_bytes = collectives.axes.num_shards * indices.dtype.itemsize
    return indices.size * (table_bytes // leaf.shape[row_dim] + index_bytes) < table_bytes


def take_rows(lookup: RowLookup, table: Array, indices: Array) -> Array:
    """The rows of a table for indices of shape [count, 1], of shape [count, other dims of the table]."""
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(1, table.ndim)), collapsed_slice_dims=(lookup.dim,), start_index_map=(lookup.dim,)
    )
    sizes = (*table.shape[: lookup.dim], 1, *table.shape[lookup.dim + 1 :])
    return lax.gather(table, indices, numbers, sizes, mode=lookup.mode, fill_value=lookup.fill_value)


def add_rows(lookup: RowLookup, table: Array, indices: Array, rows: Array) -> Array:
    """Adds what `take_rows` returned for the same indices, or its cotangents, to these rows of a table."""
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(1, table.ndim)),
        inserted_window_dims=(lookup.dim,),
        scatter_dims_to_operand_dims=(lookup.dim,),
    )
    return lax.scatter_add(table, indices, rows, numbers, mode=lookup.mode)


@dataclasses.dataclass(frozen=True)
class TableLookup(Part):
    """A `Part` that consists of one lookup of rows in a table. Of it, only indices are saved for the backward pass."""

    @property
    def num_bytes(self) -> int:
        return 0  # nothing of the table is gathered

    @property
    def view(self) -> View:
        return self.segment.views[0]

    @property
    def table(self) -> ShapedArray:
        """The aval of the leaf."""
        return self.traced.leaf_vars[self.view.leaf].aval

    @cached_property
    def lookup(self) -> RowLookup:
        """The lookup, with the row dim of the leaf."""
        lookup = jaxprs.row_lookup(self.segment.equations[0])
        assert lookup is not None
        return lookup._replace(dim=self.view.order[lookup.dim])

    @cached_property
    def padding(self) -> Padding:
        """The padding of rows [count, ...]. Its dim is the sharded one: those of the table without its row dim."""
        dims = self.collectives.dims[self.view.leaf]
        assert dims.shard is not None
        return Padding(dims.shard + (dims.shard < self.lookup.dim), dims.num_zeros)

    def plan_backward(
        self, outputs: Sequence[Var], active: Set[Var], backward_is_next: bool
    ) -> TableLookupWithBackward:
        return TableLookupWithBackward(self, self.segment.outputs, (), frozenset())  # indices have no gradient

    @property
    def specs(self) -> tuple[PartitionSpec, PartitionSpec, PartitionSpec]:
        """The specs over `context` of the leaf's shard, of the indices and of the result."""
        indices = self.segment.inputs[0].aval
        place = context.token_dim(indices.shape[:-1])
        assert place is not None
        result = [d for d in range(self.segment.outputs[0].aval.ndim) if d not in self.lookup.offset_dims][place]
        dims = Dims(self.collectives.dims[self.view.leaf].shard)
        return dims.stored_spec, context.spec(place), context.spec(result)

    def evaluate(self, weights: Weights, data: Sequence[Array], schedule: Schedule) -> list[Array]:
        stage, axes = self.collectives.stage, self.collectives.axes

        def of_tokens(table: Array, indices: Array) -> tuple[Array, list[Array]]:
            rows = self._in_pieces(table, indices.reshape(-1, 1))
            return self.arrange(rows, indices.shape[:-1]), event([rows])

        shard, of_indices, of_result = self.specs
        in_specs = shard if stage.shards_params else REPLICATED, of_indices
        run = communication.along_context(of_tokens, axes, in_specs, (of_result, REPLICATED))
        rows, events = run(*weights.shards([self.view.leaf]), data[0])
        if stage.shards_params and schedule.is_first_gather():
            schedule.gathered(events)  # the first unit computes from the rows: its weights come after them
        return [rows]

    def _in_pieces(self, table: Array, indices: Array) -> Array:
        """The rows [count, ...] of the leaf, in collectives no larger than a bucket."""
        piece = self.piece(len(indices))
        if piece == len(indices):
            return self._rows(table, indices)
        rows = lax.map(lambda part: self._rows(table, part), indices.reshape(-1, piece, 1))
        return rows.reshape(-1, *rows.shape[2:])

    def rows_shape(self, count: int) -> tuple[int, ...]:
        return (count, *self.table.shape[: self.lookup.dim], *self.table.shape[self.lookup.dim + 1 :])

    def _rows(self, table: Array, indices: Array) -> Array:
        """The rows [count, ...] of the leaf, from its shard at stage 3, and from the full leaf below."""
        if not self.collectives.stage.shards_params:
            return take_rows(self.lookup, table, indices)
        rows = take_rows(self.lookup, table, self.all_indices(indices))
        return self._to_rows(rows.reshape(-1, len(indices), *rows.shape[1:]))

    def all_indices(self, indices: Array) -> Array:
        """The indices of all devices, [N x count, 1]."""
        return communication.gather_data(indices, self.collectives.axes)

    def _to_rows(self, parts: Array) -> Array:
        """Exchanges parts of all devices' rows, [N, count, .., width / N, ..], for own rows, [count, .., width, ..]."""
        return self.padding.crop(communication.exchange(parts, self.collectives.axes, 0, self.padding.dim + 1)[0])

    def to_parts(self, rows: Array) -> Array:
        """The inverse of `_to_rows`."""
        return communication.exchange(self.padding.pad(rows)[None], self.collectives.axes, self.padding.dim + 1, 0)

    def arrange(self, rows: Array, indices_shape: Shape) -> Array:
        """The result of the equation, from rows of the leaf: cast, transposed and reshaped like the view."""
        rows = self.view.cast(rows)
        kept = [d for d in range(self.table.ndim) if d != self.lookup.dim]
        order = [kept.index(d) + 1 for d in self.view.order if d != self.lookup.dim]
        rows = lax.transpose(rows, (0, *order)).reshape(*indices_shape, *(rows.shape[d] for d in order))
        last = range(len(indices_shape), rows.ndim)
        return jnp.moveaxis(rows, list(last), self.lookup.offset_dims)

    def piece(self, count: int) -> int:
        """The most indices that are looked up at once, so that no collective exceeds the size of a bucket."""
        row_bytes = math.prod(self.rows_shape(1)) * self.table.dtype.itemsize
        each = max(row_bytes, self.collectives.axes.num_shards * self.segment.inputs[0].aval.dtype.itemsize)
        fits = lambda piece: piece * each <= self.collectives.options.bucket_bytes
        return next((n for n in range(count, 1, -1) if count % n == 0 and fits(n)), 1)


@dataclasses.dataclass(frozen=True)
class TableLookupWithBackward(PlannedPart):
    """A `PlannedPart` that looks up rows."""

    part: TableLookup

    def forward(self, weights: Weights, data: Sequence[Array], schedule: Schedule) -> tuple[list[Array], PyTree]:
        return self.part.evaluate(weights, data, schedule), data[0]

    def backward(
        self, weights: Weights, saved: PyTree, cotangents: Sequence[Array], schedule: Schedule, sink: GradientSink
    ) -> tuple[dict[int, Array], list[Array]]:
        part, collectives, leaf = self.part, self.part.collectives, self.part.view.leaf
        shard, of_indices, of_result = part.specs
        run = communication.along_context(self._gradient, collectives.axes, (of_indices, of_result), shard)
        return {leaf: run(saved, cotangents[0])}, []

    def _gradient(self, indices: Array, cotangents: Array) -> Array:
        """The gradient of this device's shard, from the cotangents of the rows that it has looked up."""
        part, collectives, table = self.part, self.part.collectives, self.part.table
        wire_dtype = collectives.precision.wire_dtype(table.dtype)

        # The cotangents of rows of the leaf.
        count = math.prod(indices.shape)
        rows_aval = jax.ShapeDtypeStruct(part.rows_shape(count), table.dtype)
        arrange = lambda rows: part.arrange(rows, indices.shape[:-1])
        (grads,) = jax.linear_transpose(arrange, rows_aval)(cotangents)
        indices = indices.reshape(-1, 1)

        # Add them to the shard, in pieces.
        wide = jnp.promote_types(table.dtype, jnp.float32)  # many tokens may share a row

        def add(total: Array, piece: tuple[Array, Array]) -> tuple[Array, None]:
            all_indices, grads = part.all_indices(piece[0]), part.to_parts(piece[1]).astype(wide)
            return add_rows(part.lookup, total, all_indices, grads.reshape(-1, *grads.shape[2:])), None

        # Compilers otherwise fill the table with zeros long before, as that depends on nothing.
        shape = collectives.device_shape(table.shape, collectives.dims[part.view.leaf])
        total, piece = zeros_after(shape, wide, event([grads])), part.piece(count)
        if piece == count:
            total, _ = add(total, (indices, grads))
        else:
            pieces = jax.tree.map(lambda a: a.reshape(-1, piece, *a.shape[1:]), (indices, grads))
            total, _ = lax.scan(add, total, pieces)
        return total.astype(wire_dtype)
