"""The update of an optimizer that multiplies or decomposes matrices, such as Muon: each is whole on one device.

The update is traced. What it computes element by element is left to the compiler, on shards. What couples the elements
of a parameter (`program.couplings`) needs the whole matrix. So that N devices compute it once, and not each of them,
matrices of equal shapes are divided among the devices, their owners:

    shards of N matrices ──► all-to-all ──► one whole matrix on each device
                                                    │ Newton-Schulz
    shards of N results  ◄── all-to-all ◄── one whole result

Layers of a scanned stack are matrices like others if the update computes them one by one (`program.per_layer`).

Cost: in a step, each device sends 2 (N-1)/N of its shards of what is multiplied, and computes 1/N of the products. If N
does not divide the number of equal matrices, those that are left go to the devices with the least work; what these send
and get is then as long as the longest.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from zerojax.comm import collectives
from zerojax.comm.collectives import LEAVES_WHOLE, CollectiveOptions
from zerojax.program import jaxprs
from zerojax.program.couplings import Coupling, couplings, multiplications
from zerojax.program.equation_keys import EquationKeys
from zerojax.program.jaxprs import ClosedJaxpr, Var
from zerojax.program.per_layer import Mixed, PerLayer
from zerojax.sharding.axes import REPLICATED, Axes, Dims
from zerojax.sharding.placement import Leaf, data_spec
from zerojax.step import optimizers
from zerojax.step.config import ZeroConfig, shard_map_over_data
from zerojax.step.owners import Kind, MixedRound, Operand, Round, rounds
from zerojax.step.state import StateLayout
from zerojax.utils.typing import Array, DTypeLike, PyTree, Shape


class OwnedUpdate:
    """The update of an optimizer on whole logical arrays, of which some are computed by owners.

    Attributes:
        num_owners: the number of owners. Along other axes, such as 'model', devices share what their owner computes.
        kinds: what is computed by owners, at each level of `Coupling`.
        others: (parameter, reason) of what the compiler divides, although the update couples its elements.
    """

    def __init__(self, config: ZeroConfig, layout: StateLayout, options: CollectiveOptions, gets_loss: bool = True):
        self._config, self._axes, self._options = config, config.optimizer_axes, options
        self._leaves = [leaf for leaf in layout.leaves if leaf.trainable]
        self._sharded = config.stage.shards_optimizer
        self.num_owners, self._num_copies = (
            self._axes.num_shards,
            math.prod(config.mesh.shape[a] for a in config.other_axes),
        )
        self._closed, self._results, of_state, found = _traced(layout, gets_loss)

        # How what belongs to each parameter is stored.
        self._dims: dict[tuple[int | None, Shape], Dims] = {}
        stored = jax.tree.leaves(layout.optimizer_placement(self._axes, self._sharded))
        state = self._closed.jaxpr.invars[len(self._leaves) :]
        for v, k, each in zip(state, of_state, stored, strict=False):  # none, if there are no couplings
            self._dims.setdefault((k, v.aval.shape), Dims(each.dim, num_zeros=each.padding.count))
        for k, leaf in enumerate(self._leaves):
            self._dims[k, leaf.shape] = leaf.dims if self._sharded else Dims(None)

        self.kinds: dict[int, list[Kind]] = {}
        self.others: list[tuple[Leaf, str]] = []
        if self.num_owners > 1:
            self._find_kinds(found)

    def _find_kinds(self, found: Sequence[Coupling]) -> None:
        """Groups couplings by what they compute and how their matrices are sharded."""
        keys, groups = EquationKeys(), defaultdict[Hashable, list[Coupling]](list)
        for coupling in found:
            closed = self._function(coupling)
            dims = tuple(map(self._dims_of(coupling), (*coupling.inputs, *coupling.outputs)))
            key = coupling.level, keys.of_function(closed), dims, tuple(map(id, coupling.shared))
            groups[key].append(coupling)
        for members in groups.values():
            kind = self._kind(members)
            if isinstance(kind, Kind):
                self.kinds.setdefault(members[0].level, []).append(kind)
            else:
                self.others += [(self._leaves[coupling.leaf], kind) for coupling in members]

    def _function(self, coupling: Coupling) -> ClosedJaxpr:
        inputs = [*coupling.inputs, *coupling.shared]
        return jaxprs.with_equations(self._closed, coupling.equations, inputs, coupling.outputs)

    def _dims_of(self, coupling: Coupling) -> Callable[[Var], Dims]:
        return lambda v: self._dims.get((coupling.leaf, v.aval.shape), Dims(None))

    def _kind(self, members: list[Coupling]) -> Kind | str:
        """The kind of couplings that compute the same, or why they have no owners."""
        first, dims_of = members[0], self._dims_of(members[0])
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
            layerwise = PerLayer(closed, [*stacked, *[False] * num_shared], leaf.shape[0])
        except Mixed:
            one_matrix = Kind(members, inputs, outputs, None, work, each)
            return "the update may combine its layers" if leaf.stacked else one_matrix
        if any(operand.dims.shard == 0 for operand in (*inputs, *outputs)):
            return "each device has whole matrices, since dim 0 is sharded"
        if not all(stacked) or not all(layerwise.outputs):
            return "the update has values that all layers share"
        layers = lambda operands: [operand.of_layer() for operand in operands]
        run = lambda own, shared: layerwise(*own, *shared)
        return Kind(members, layers(inputs), layers(outputs), leaf.shape[0], work / leaf.shape[0], run)

    def sent_bytes(self) -> list[int]:
        """The bytes in which each round sends matrices to their owners, and gets their results, in full form.

        They include those that stay on a device.
        """
        n, found = self._axes.num_shards, []
        for kinds in self.kinds.values():
            for each in rounds(kinds, n, self._num_copies):
                if isinstance(each, Round):
                    operands = [*kinds[each.kind].inputs, *kinds[each.kind].outputs]
                    found.append(
                        n * each.per_device * sum(o.shard_bytes(n) for o in operands if o.dims.shard is not None)
                    )
                else:
                    longest = lambda sides: max(sum(o.shard_bytes(n) for o in side) for side in sides)
                    of_device = [[kinds[k] for k, _ in own] for own in each.owned]
                    inputs = longest([o for kind in own for o in kind.inputs] for own in of_device)
                    found.append(n * (inputs + longest([o for kind in own for o in kind.outputs] for own in of_device)))
        return found

    def __call__(
        self, grads: PyTree, opt_state: PyTree, params: PyTree, loss: Array | None = None
    ) -> tuple[PyTree, PyTree]:
        """As `optimizers.update`, or as `tx.update` without a loss."""
        jaxpr = self._closed.jaxpr
        scope = dict(zip(jaxpr.constvars, self._closed.consts, strict=True))
        scope.update(zip(jaxpr.invars, jax.tree.leaves((grads, opt_state, params, loss)), strict=True))
        members = {level: [c for kind in kinds for c in kind.couplings] for level, kinds in self.kinds.items()}
        by_owners = {id(e) for each in members.values() for c in each for e in c.own}
        equations = [e for e in jaxpr.eqns if id(e) not in by_owners]
        for level, kinds in sorted(self.kinds.items()):
            waiting = {v for k, each in members.items() if k >= level for c in each for v in c.outputs}
            now, later = [], []
            for equation in equations:
                waits = any(v in waiting for v in jaxprs.variables(equation))
                (later if waits else now).append(equation)
                waiting.update(equation.outvars if waits else ())
            jaxprs.run_equations(now, scope)
            self._run_owners(kinds, scope)
            equations = later
        jaxprs.run_equations(equations, scope)
        flat = [scope[v] if jaxprs.is_var(v) else jnp.asarray(v.val, v.aval.dtype) for v in jaxpr.outvars]
        return jax.tree.unflatten(jax.tree.structure(self._results), flat)

    def _run_owners(self, kinds: Sequence[Kind], scope: dict[Var, Array]) -> None:
        """Computes the outputs of couplings into `scope`."""
        each = [coupling for kind in kinds for coupling in kind.couplings]
        specs = lambda dims_of, values: [data_spec(dims_of(v).shard, self._axes) for v in values]
        dims_of = [self._dims_of(coupling) for coupling in each]
        in_shards = lambda of, v: self._over_data(of(v).padding.pad(scope[v]), of(v))
        own = [[in_shards(of, v) for v in c.inputs] for of, c in zip(dims_of, each, strict=True)]
        shared = [[scope[v] for v in kind.couplings[0].shared] for kind in kinds]
        in_specs = list(map(specs, dims_of, (c.inputs for c in each))), [[REPLICATED] * len(s) for s in shared]
        out_specs = list(map(specs, dims_of, (c.outputs for c in each)))
        results = shard_map_over_data(self._config, lambda *a: self._on_device(kinds, *a), in_specs, out_specs)(
            own, shared
        )
        for of, coupling, values in zip(dims_of, each, results, strict=True):
            scope.update({v: of(v).padding.crop(a) for v, a in zip(coupling.outputs, values, strict=True)})

    def _over_data(self, a: Array, dims: Dims) -> Array:
        """An array that is divided over the data axes alone: it is gathered over others, such as 'model'."""
        sharding = NamedSharding(self._config.mesh, data_spec(dims.shard, self._axes))
        return lax.with_sharding_constraint(a, sharding) if self._config.other_axes else a

    # On one device

    def _on_device(self, kinds: Sequence[Kind], own: list[list[Array]], shared: list[list[Array]]) -> list[list[Array]]:
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


class _Traced(NamedTuple):
    """The update of an optimizer."""

    closed: ClosedJaxpr  # of the leaves of (gradients, state, parameters, loss), without nested jits
    results: PyTree  # (updates, state), as avals
    of_state: list[int | None]  # the parameter that each leaf of the state belongs to
    couplings: list[Coupling]


@functools.lru_cache(maxsize=4)
def _traced(layout: StateLayout, gets_loss: bool = True) -> _Traced:
    params, opt_state = layout.trained_avals(), jax.eval_shape(layout.tx.init, layout.trained_avals())
    loss = [jax.ShapeDtypeStruct((), jnp.float32)] * gets_loss
    update = functools.partial(optimizers.update, layout.tx) if gets_loss else layout.tx.update
    closed, results = jaxprs.traced(update, params, opt_state, params, *loss)
    if not any(e.primitive.name in jaxprs.PRODUCTS | jaxprs.OF_MATRICES for e in jaxprs.walk(closed.jaxpr.eqns)):
        return _Traced(closed, results, [], [])
    closed = jaxprs.inlined(closed)
    numbers = {leaf.path: k for k, leaf in enumerate(leaf for leaf in layout.leaves if leaf.trainable)}
    stored = jax.tree.leaves(layout.optimizer_placement(Axes((), (), 1, 1), sharded=False))
    of_state = [numbers[each.param.path] if each.param else None for each in stored]
    owned = [*numbers.values(), *of_state, *numbers.values(), *[None] * gets_loss]
    leaf_of = {v: k for v, k in zip(closed.jaxpr.invars, owned, strict=True) if k is not None}
    return _Traced(closed, results, of_state, couplings(closed.jaxpr, leaf_of))


def couples_elements(layout: StateLayout, gets_loss: bool = True) -> bool:
    """Whether an optimizer multiplies or decomposes matrices. This does not depend on the devices."""
    return bool(_traced(layout, gets_loss).couplings)


def owned_update(
    config: ZeroConfig, layout: StateLayout, options: CollectiveOptions = LEAVES_WHOLE, gets_loss: bool = True
) -> OwnedUpdate | None:
    """The update of an optimizer that multiplies matrices; None if it does not, or if it is computed in pieces.

    `gets_loss` says whether the optimizer gets the loss and the gradient, in case it wants them.
    """
    dtypes = [leaf.dtype for leaf in layout.leaves if leaf.trainable]
    if config.memory.update(config, layout, dtypes, scales=False) is not None:
        return None
    if not couples_elements(layout, gets_loss):
        return None
    update = OwnedUpdate(config, layout, options, gets_loss)
    return update if update.kinds or update.others else None
