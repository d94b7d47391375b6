"""Matrices that an optimizer multiplies or decomposes: which have owners, and what the owners compute.

The owners of equal matrices compute them in rounds:

    shards of N matrices ──► all-to-all ──► one whole matrix on each device
                                                    │ Newton-Schulz
    shards of N results  ◄── all-to-all ◄── one whole result

Layers of a scanned stack are matrices like others if the update computes them one by one (`program.sliced`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from zerojax.comm import collectives
from zerojax.comm.collectives import CollectiveOptions
from zerojax.program import jaxprs
from zerojax.program.couplings import Coupling, multiplications
from zerojax.program.equation_keys import EquationKeys
from zerojax.program.jaxprs import ClosedJaxpr, Var
from zerojax.program.sliced import Mixed, Slice, Sliced
from zerojax.sharding.axes import REPLICATED, Dims
from zerojax.sharding.placement import Leaf
from zerojax.step.config import ZeroConfig
from zerojax.step.owners import Kind, MixedRound, Operand, Round, rounds
from zerojax.utils.typing import Array, DTypeLike, Shape


class OwnedMatrices:
    """The matrices of an update that have owners.

    Args:
        config: of the state.
        options: of the all-to-alls.
        leaves: the trained parameters.
        closed: the update, without nested jits.
        found: its couplings.
        dims: how values are sharded, by the number of their parameter and their shape. Other values are whole.
        apart: whether equal matrices are computed without others, which balances the last of them less, so that less
            is on the devices at a time.

    Attributes:
        num_owners: the number of owners. Along other axes, such as 'model', devices share what their owner computes.
        groups: what is computed together, in the order in which it is.
        others: (parameter, reason) of what the compiler divides, although the update couples its elements.
    """

    def __init__(
        self,
        config: ZeroConfig,
        options: CollectiveOptions,
        leaves: Sequence[Leaf],
        closed: ClosedJaxpr,
        found: Sequence[Coupling],
        dims: Mapping[tuple[int | None, Shape], Dims],
        apart: bool = False,
    ):
        self._config, self._axes, self._options = config, config.optimizer_axes, options
        self._leaves, self._closed, self._dims = leaves, closed, dims
        self.num_owners = self._axes.num_shards
        self._num_copies = math.prod(config.mesh.shape[a] for a in config.other_axes)
        self.groups: list[list[Kind]] = []
        self.others: list[tuple[Leaf, str]] = []
        self._find_kinds(found, apart)

    def _find_kinds(self, found: Sequence[Coupling], apart: bool) -> None:
        """Groups couplings by what they compute and how their matrices are sharded."""
        keys, groups = EquationKeys(), defaultdict[Hashable, list[Coupling]](list)
        for coupling in found:
            closed = self._function(coupling)
            dims = tuple(map(self.dims_of(coupling), (*coupling.inputs, *coupling.outputs)))
            key = coupling.level, keys.of_function(closed), dims, tuple(map(id, coupling.shared))
            groups[key].append(coupling)
        levels = defaultdict[int, list[Kind]](list)
        for members in groups.values():
            kind = self._kind(members)
            if isinstance(kind, Kind):
                levels[members[0].level].append(kind)
            else:
                self.others += [(self._leaves[coupling.leaf], kind) for coupling in members]
        in_order = [kinds for _, kinds in sorted(levels.items())]
        self.groups = [[kind] for kinds in in_order for kind in kinds] if apart else in_order

    def _function(self, coupling: Coupling) -> ClosedJaxpr:
        inputs = [*coupling.inputs, *coupling.shared]
        return jaxprs.with_equations(self._closed, coupling.equations, inputs, coupling.outputs)

    def dims_of(self, coupling: Coupling) -> Callable[[Var], Dims]:
        """How a value of a coupling is stored."""
        return lambda v: self._dims.get((coupling.leaf, v.aval.shape), Dims(None))

    def _kind(self, members: list[Coupling]) -> Kind | str:
        """The kind of couplings that compute the same, or why they have no owners."""
        first, dims_of = members[0], self.dims_of(members[0])
        closed, num_shared, work = self._function(first), len(first.shared), multiplications(first.equations)
        operand = lambda v: Operand(v.aval.shape, v.aval.dtype, dims_of(v))
        inputs, outputs = list(map(operand, first.inputs)), list(map(operand, first.outputs))
        one = lambda *args: jaxprs.run(closed, *args)
        each = lambda own, shared: jax.vmap(one, [0] * len(own) + [None] * num_shared)(*own, *shared)

        # Divide stacks into their layers, if they are computed one by one.
        leaf = self._leaves[first.leaf]
        if len(leaf.shape) < 3 or leaf.shape[0] < 2:
            return Kind(members, inputs, outputs, None, work, each)
        stacked = [v.aval.ndim > 1 and v.aval.shape[0] == leaf.shape[0] for v in first.inputs]
        try:
            dims = [0 if flag else None for flag in (*stacked, *[False] * num_shared)]
            layerwise = Sliced(closed, dims, leaf.shape[0], anywhere=True)
        except Mixed:
            one_matrix = Kind(members, inputs, outputs, None, work, each)
            return "the update may combine its layers" if leaf.stacked else one_matrix
        if any(operand.dims.shard == 0 for operand in (*inputs, *outputs)):
            return "each device has whole matrices, since dim 0 is sharded"
        if not all(stacked) or any(place != 0 for place in layerwise.places):
            return "the update has values that all layers share"
        layers = lambda operands: [operand.of_layer() for operand in operands]
        run = lambda own, shared: layerwise.on_slice([*own, *shared], Slice(own[0].shape[0], None))
        return Kind(members, layers(inputs), layers(outputs), leaf.shape[0], work / leaf.shape[0], run)

    def sent_bytes(self) -> list[int]:
        """The bytes in which each round sends matrices to their owners, and gets their results, in full form.

        They include those that stay on a device. What all devices have whole is not sent, and its results are gathered.
        """
        n, found = self._axes.num_shards, list[int]()
        longest = lambda sides: max(sum(operand.shard_bytes(n) for operand in side) for side in sides)
        for kinds in self.groups:
            for each in rounds(kinds, n, self._num_copies):
                if isinstance(each, Round):
                    of_devices, copies = [[kinds[each.kind]]], each.per_device
                else:
                    of_devices, copies = [[kinds[k] for k, _ in own] for own in each.owned], 1
                inputs = longest([o for k in own for o in k.inputs if o.dims.shard is not None] for own in of_devices)
                outputs = longest([o for k in own for o in k.outputs] for own in of_devices)
                found.append(n * copies * (inputs + outputs))
        return found

    # On one device

    def on_device(self, kinds: Sequence[Kind], own: list[list[Array]], shared: list[list[Array]]) -> list[list[Array]]:
        """The shards of the outputs of each coupling, from those of its inputs."""
        # Stack the matrices of each kind.
        rest, inputs = list(own), list[list[Array]]()
        for kind in kinds:
            members, rest = rest[: len(kind.couplings)], rest[len(kind.couplings) :]
            join = jnp.concatenate if kind.layers else jnp.stack
            inputs.append([join(shards) for shards in zip(*members, strict=True)])

        # Compute in rounds.
        parts: list[dict[int, list[Array]]] = [{} for _ in kinds]  # of each kind: first matrix -> outputs
        for each in rounds(kinds, self.num_owners, self._num_copies):
            if isinstance(each, Round):
                k = each.kind
                parts[k][each.first] = self._round(kinds[k], inputs[k], shared[k], each)
            else:
                for (k, matrix), outputs in self._mixed_round(kinds, inputs, shared, each):
                    parts[k][matrix] = outputs

        # Put the outputs of each parameter together.
        results = []
        for kind, by_first in zip(kinds, parts, strict=True):
            in_order = [by_first[first] for first in sorted(by_first)]
            outputs = [jnp.concatenate(values) for values in zip(*in_order, strict=True)]
            split = [jnp.split(a, len(kind.couplings)) if kind.layers else list(a) for a in outputs]
            results += [list(values) for values in zip(*split, strict=True)]
        return results

    def _round(self, kind: Kind, inputs: list[Array], shared: list[Array], each: Round) -> list[Array]:
        """The shards of the outputs of some matrices, [end - first, ..]."""
        n, count, own = self._axes.num_shards, each.end - each.first, []
        for shards, operand in zip(inputs, kind.inputs, strict=True):
            rows = shards[each.first : each.end]
            zeros = [(0, n * each.per_device - count, 0), *[(0, 0, 0)] * (rows.ndim - 1)]
            rows = lax.pad(rows, jnp.zeros((), rows.dtype), zeros).reshape(n, each.per_device, *rows.shape[1:])
            if operand.dims.shard is None:  # every device has all of them
                own.append(lax.dynamic_index_in_dim(rows, lax.axis_index(self._axes.shard), keepdims=False))
            else:
                own.append(_joined(self._exchange(rows), operand.dims))
        results, outputs = [], self._on_copies(lambda own: kind.compute(own, shared), own)
        for value, operand in zip(outputs, kind.outputs, strict=True):
            if operand.dims.shard is None:
                results.append(collectives.gather_data(value, self._axes)[:count])
            else:
                shards = self._exchange(_cut(value, operand.dims, n))
                results.append(shards.reshape(-1, *shards.shape[2:])[:count])
        return results

    def _on_copies(self, compute: Callable[[list[Array]], list[Array]], own: list[Array]) -> list[Array]:
        """Computes whole matrices [k, ..]. Devices along other axes, such as 'model', share them if they divide k."""
        if self._num_copies == 1 or own[0].shape[0] % self._num_copies:
            return compute(own)
        place = lambda arrays, spec: [lax.with_sharding_constraint(a, spec) for a in arrays]
        return place(compute(place(own, PartitionSpec(tuple(self._config.other_axes)))), REPLICATED)

    def _mixed_round(
        self, kinds: Sequence[Kind], inputs: list[list[Array]], shared: list[list[Array]], each: MixedRound
    ) -> Iterator[tuple[tuple[int, int], list[Array]]]:
        """Yields (kind, matrix) and the shards of its outputs, [1, ..] each."""
        # What each device computes. Devices with matrices of the same kinds do the same.
        n, of_devices = self._axes.num_shards, [tuple(k for k, _ in own) for own in each.owned]
        distinct = list(dict.fromkeys(of_devices))
        get = {own: [operand for k in own for operand in kinds[k].inputs] for own in distinct}
        give = {own: [operand for k in own for operand in kinds[k].outputs] for own in distinct}
        dtype = next(o.dtype for operands in get.values() for o in operands)
        length, length_after = (max(_length(operands, n) for operands in side.values()) for side in (get, give))

        # Send matrices to their owners.
        rows = ([a[m][None] for k, m in own for a in inputs[k]] for own in each.owned)
        received = self._exchange(jnp.concatenate([_flat(shards, 1, length, dtype) for shards in rows]))

        # Compute on each device what is for its kinds.
        def branch(own: tuple[int, ...]) -> Callable[[Array], Array]:
            def compute(received: Array) -> Array:
                shards, results = iter(_shards(received, get[own], n)), list[Array]()
                for k in own:
                    whole = [_joined(next(shards)[:, None], operand.dims) for operand in kinds[k].inputs]
                    outputs = zip(kinds[k].compute(whole, shared[k]), kinds[k].outputs, strict=True)
                    results += [_cut(a, operand.dims, n) for a, operand in outputs]
                return _flat(results, n, length_after, dtype)

            return compute

        numbers = jnp.array([distinct.index(own) for own in of_devices])
        results = lax.switch(numbers[lax.axis_index(self._axes.shard)], list(map(branch, distinct)), received)

        # Send the results back.
        for row, own, kinds_of in zip(self._exchange(results), each.owned, of_devices, strict=True):
            shards = iter(_shards(row[None], give[kinds_of], n))
            for k, matrix in own:
                yield (k, matrix), [next(shards) for _ in kinds[k].outputs]

    def _exchange(self, rows: Array) -> Array:
        """Sends rows[k] to device k."""
        flat = rows.reshape(self._axes.num_shards, -1)
        (received,) = collectives.exchange_rows(flat, self._axes, self._options).leaves
        return received.reshape(rows.shape)


def _joined(parts: Array, dims: Dims) -> Array:
    """Whole matrices [k, ..] from their shards [N, k, ..]."""
    assert dims.shard is not None
    whole = jnp.moveaxis(parts, 0, dims.shard + 1)
    whole = whole.reshape(*whole.shape[: dims.shard + 1], -1, *whole.shape[dims.shard + 3 :])
    return jax.vmap(dims.padding.crop)(whole)


def _cut(whole: Array, dims: Dims, n: int) -> Array:
    """The inverse of `_joined`."""
    assert dims.shard is not None
    whole = jax.vmap(dims.padding.pad)(whole)
    size = whole.shape[dims.shard + 1] // n
    split = whole.reshape(*whole.shape[: dims.shard + 1], n, size, *whole.shape[dims.shard + 2 :])
    return jnp.moveaxis(split, dims.shard + 1, 0)


def _length(operands: Sequence[Operand], n: int) -> int:
    """The number of elements of one shard of each operand."""
    return sum(math.prod(operand.shard_shape(n)) for operand in operands)


def _flat(shards: Sequence[Array], count: int, length: int, dtype: DTypeLike) -> Array:
    """Shards [count, ..] of several operands as [count, length], with zeros at the end."""
    rows = jnp.concatenate([jnp.zeros((count, 0), dtype), *(a.reshape(count, -1) for a in shards)], axis=1)
    return lax.pad(rows, jnp.zeros((), dtype), [(0, 0, 0), (0, length - rows.shape[1], 0)])


def _shards(rows: Array, operands: Sequence[Operand], n: int) -> list[Array]:
    """The inverse of `_flat`."""
    shapes = [operand.shard_shape(n) for operand in operands]
    ends = np.cumsum([math.prod(shape) for shape in shapes]).tolist()
    parts = jnp.split(rows, ends, axis=1)
    return [part.reshape(len(rows), *shape) for part, shape in zip(parts, shapes, strict=False)]
