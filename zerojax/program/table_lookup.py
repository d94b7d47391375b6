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
from collections.abc import Callable, Sequence, Set
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray

from zerojax.comm import collectives as communication
from zerojax.comm.schedule import Schedule, event, zeros_after
from zerojax.comm.stage_collectives import StageCollectives
from zerojax.program import jaxprs
from zerojax.program.gradient_paths import is_differentiable
from zerojax.program.jaxprs import Equation, Var
from zerojax.program.part import GradientSink, Weights
from zerojax.program.remat import Remat
from zerojax.program.segmentation import Segment, TracedLoss, View
from zerojax.sharding.padding import Padding
from zerojax.utils.typing import Array, Aval, PyTree


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
    indices, table_bytes = equation.invars[1].aval, leaf.size * leaf.dtype.itemsize
    index_bytes = collectives.axes.num_shards * indices.dtype.itemsize
    return indices.size * (table_bytes // leaf.shape[row_dim] + index_bytes) < table_bytes


@dataclasses.dataclass(frozen=True)
class TableLookup:
    """A `Part` that consists of one lookup of rows in a table. Its backward pass needs no plan: see `PlannedPart`.

    Attributes:
        traced, segment, collectives, remat: as of `Straight`. `remat` has no effect: only indices are saved for the
            backward pass.
        outputs, inputs, names: as of every `PlannedPart`. Indices have no gradient.
    """

    traced: TracedLoss
    segment: Segment
    collectives: StageCollectives
    remat: Remat
    inputs: tuple[Var, ...] = ()
    is_loop = False
    num_bytes = 0  # nothing of the table is gathered

    @property
    def part(self) -> TableLookup:
        return self

    @property
    def outputs(self) -> list[Var]:
        return self.segment.outputs

    @property
    def names(self) -> set[str]:
        return set()

    @property
    def view(self) -> View:
        return self.segment.views[0]

    @property
    def table(self) -> ShapedArray:
        """The aval of the leaf."""
        return self.traced.leaf_vars[self.view.leaf].aval

    @cached_property
    def lookup(self) -> jaxprs.RowLookup:
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

    def plan_backward(self, outputs: Sequence[Var], active: Set[Var], backward_is_next: bool) -> TableLookup:
        return self

    def evaluate(self, weights: Weights, data: Sequence[Array], schedule: Schedule) -> list[Array]:
        indices = data[0].reshape(-1, 1)
        (table,) = weights.shards([self.view.leaf], schedule.before_gather())
        rows = self._in_pieces(lambda part: self._rows(table, part), indices)
        if self.collectives.stage.shards_params and schedule.is_first_gather():
            schedule.gathered(event([rows]))  # the first unit computes from the rows: its weights come after them
        return [self._arrange(rows)]

    def forward(self, weights: Weights, data: Sequence[Array], schedule: Schedule) -> tuple[list[Array], Any]:
        return self.evaluate(weights, data, schedule), data[0].reshape(-1, 1)

    def restore(self, saved: PyTree, cotangents: list[Array]) -> tuple[Any, list[Array]]:
        return saved, cotangents

    def backward(
        self, weights: Weights, saved: PyTree, cotangents: Sequence[Array], schedule: Schedule, sink: GradientSink
    ) -> tuple[dict[int, Array], list[Array]]:
        rows_aval = jax.ShapeDtypeStruct(self._rows_shape(len(saved)), self.table.dtype)
        (grads,) = jax.linear_transpose(self._arrange, rows_aval)(cotangents[0])
        wide = jnp.promote_types(self.table.dtype, jnp.float32)  # many tokens may share a row
        shape = self.collectives.shard_shape(self.table.shape, self.collectives.dims[self.view.leaf])

        def add(total: Array, part: tuple[Array, Array]) -> tuple[Array, None]:
            indices, grads = self._all_indices(part[0]), self._to_parts(part[1]).astype(wide)
            return jaxprs.add_rows(self.lookup, total, indices, grads.reshape(len(indices), *grads.shape[2:])), None

        # Compilers otherwise fill the table with zeros long before, as that depends on nothing.
        total = zeros_after(shape, wide, event([grads]))
        count = self._piece(len(saved))
        if count == len(saved):
            total, _ = add(total, (saved, grads))
        else:
            total, _ = lax.scan(add, total, jax.tree.map(lambda a: a.reshape(-1, count, *a.shape[1:]), (saved, grads)))
        return {self.view.leaf: total.astype(self.collectives.precision.wire_dtype(self.table.dtype))}, []

    def _rows_shape(self, count: int) -> tuple[int, ...]:
        return (count, *self.table.shape[: self.lookup.dim], *self.table.shape[self.lookup.dim + 1 :])

    def _rows(self, table: Array, indices: Array) -> Array:
        """The rows [count, ...] of the leaf, from its shard at stage 3, and from the full leaf below."""
        if not self.collectives.stage.shards_params:
            return jaxprs.take_rows(self.lookup, table, indices)
        rows = jaxprs.take_rows(self.lookup, table, self._all_indices(indices))
        return self._to_rows(rows.reshape(-1, len(indices), *rows.shape[1:]))

    def _all_indices(self, indices: Array) -> Array:
        """The indices of all devices, [N x count, 1]."""
        return communication.gather_data(indices, self.collectives.axes)

    def _to_rows(self, parts: Array) -> Array:
        """Exchanges parts of all devices' rows, [N, count, .., width / N, ..], for own rows, [count, .., width, ..]."""
        return self.padding.crop(communication.exchange(parts, self.collectives.axes, 0, self.padding.dim + 1)[0])

    def _to_parts(self, rows: Array) -> Array:
        """The inverse of `_to_rows`."""
        return communication.exchange(self.padding.pad(rows)[None], self.collectives.axes, self.padding.dim + 1, 0)

    def _arrange(self, rows: Array) -> Array:
        """The result of the equation, from rows of the leaf: cast, transposed and reshaped like the view."""
        for equation in self.view.equations:
            if jaxprs.permutation(equation) is None:
                rows = jaxprs.apply(equation, rows)
        kept = [d for d in range(self.table.ndim) if d != self.lookup.dim]
        order = [kept.index(d) + 1 for d in self.view.order if d != self.lookup.dim]
        indices_shape = self.segment.inputs[0].aval.shape[:-1]
        rows = lax.transpose(rows, (0, *order)).reshape(*indices_shape, *(rows.shape[d] for d in order))
        last = range(len(indices_shape), rows.ndim)
        return jnp.moveaxis(rows, list(last), self.lookup.offset_dims)

    def _piece(self, count: int) -> int:
        """The most indices that are looked up at once, so that no collective exceeds the size of a bucket."""
        row_bytes = math.prod(self._rows_shape(1)) * self.table.dtype.itemsize
        each = max(row_bytes, self.collectives.axes.num_shards * self.segment.inputs[0].aval.dtype.itemsize)
        fits = lambda piece: piece * each <= self.collectives.options.bucket_bytes
        return next((n for n in range(count, 1, -1) if count % n == 0 and fits(n)), 1)

    def _in_pieces(self, fn: Callable[[Array], Array], indices: Array) -> Array:
        piece = self._piece(len(indices))
        if piece == len(indices):
            return fn(indices)
        rows = lax.map(fn, indices.reshape(-1, piece, 1))
        return rows.reshape(-1, *rows.shape[2:])
