"""The optimizer's update in pieces. Those of a state in host memory come to the device, are updated, and go back.

All parameters are cut into pieces. A loop updates one piece of each at a time, so that what is on the device does not
grow with the model. In iteration c, after piece c of a parameter has been computed, it goes back, and piece c + 1 of
its arrays comes:

    compute         1 2 3 4
    to the host       1 2 3 4
    from the host       1 2 3 4

A piece is read from the array that the one before has been written to. Compilers therefore update the array in place;
without this dependency they copy it. On GPUs, the place of a piece must follow from the number of the iteration: copy
engines then move it, in both directions at once and beside what is computed, and no kernel does.

The update of a parameter waits until the next pieces of the one `_AHEAD` places before have come. Compilers would
otherwise start all copies to the host before those from it, and the queues in which GPUs copy serve what was started
first. What waits are the scalars that the update reads, which takes no copy of a piece.

Matrices that an optimizer multiplies have owners (`step.owned_matrices`). Their pieces come twice: first for what is
multiplied, of which the shards of all equal matrices are then on the device, and with their products for the rest.

If parameters are in host memory too, gradients come with the other arrays, and in their place updated parameters go.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from zerojax.comm import collectives
from zerojax.comm.buckets import Pieces
from zerojax.comm.collectives import LEAVES_WHOLE
from zerojax.comm.schedule import after, events
from zerojax.offload import host_arrays, host_pieces
from zerojax.offload.split_update import Operand, Rows, SplitUpdate
from zerojax.program import jaxprs
from zerojax.program.couplings import couplings
from zerojax.program.jaxprs import ClosedJaxpr, Var
from zerojax.sharding import padding
from zerojax.sharding.axes import Dims
from zerojax.sharding.mesh import on_tpus
from zerojax.sharding.optimizer_placement import Stored
from zerojax.sharding.padding import NO_PADDING
from zerojax.sharding.placement import Leaf
from zerojax.step import optimizers
from zerojax.step.config import ZeroConfig
from zerojax.step.over_data import leaf_specs, shard_map_over_data
from zerojax.step.owned_matrices import OwnedMatrices
from zerojax.step.state import StateLayout, TrainState, optimizer_shardings
from zerojax.step.update import StepGrads, Updated
from zerojax.utils.typing import Array, ArrayLike, Aval, DTypeLike, Shape

_AHEAD = 2
Arrays: TypeAlias = dict[int, Array]  # by position, or by parameter


class Fixed(NamedTuple):
    """What every piece is updated from."""

    read: Arrays  # gradients, and arrays of the state that do not change, on the device or in host memory
    sliced: Sequence[Array]  # values of `SplitUpdate.sliced`
    scalars: Sequence[Array]  # values of `SplitUpdate.scalars`
    divisor: Array | None  # of gradients in host memory; None is 1
    number: int = 0  # of the pass
    products: Mapping[int, Mapping[Var, Array]] = {}  # what owners computed of parameters, for the second pass


class _Whole(NamedTuple):
    """What is computed once."""

    arrays: Sequence[Array]  # the arguments of the update, by position
    computed: list[Array]  # the trained parameters as they are computed with, stored like the optimizer's state
    once: dict[Var, Array]  # the values, see `SplitUpdate.compute_whole`


class StreamedUpdate:
    """The update of a state in pieces, whether its arrays are in host memory or on the device.

    Args:
        config, layout: of the state.
        grad_dtypes: the dtypes of the gradients of trained parameters, in flattening order.
        scales: whether gradients are multiplied by a factor before the update.

    Attributes:
        owned: the matrices that the optimizer multiplies.

    Raises ValueError if there are arrays in host memory, and their update cannot be computed piece by piece.
    """

    two_passes = True  # whether there may be matrices that have owners

    def __init__(self, config: ZeroConfig, layout: StateLayout, grad_dtypes: Sequence[DTypeLike], scales: bool):
        self.layout, self.config, self.scales = layout, config, scales
        self.leaves = [leaf for leaf in layout.leaves if leaf.trainable]
        sharded = config.stage.shards_optimizer

        # The parameters and their gradients: where they are, and what their rows are.
        params, self._params_tree = jax.tree.flatten(layout.trained_avals())
        in_host = zip(layout.params_in_host(config.offloads_params), layout.leaves, strict=True)
        self._moved = [flag for flag, leaf in in_host if leaf.trainable]  # parameters in host memory
        offloads_master = layout.has_master and config.offloads_optimizer
        keys = [k if leaf.shape else None for k, leaf in enumerate(self.leaves)]
        of_grads = [Operand(k, flag) for k, flag in zip(keys, self._moved, strict=True)]
        of_params = [
            Operand(k, k is not None and (offloads_master or flag)) for k, flag in zip(keys, self._moved, strict=True)
        ]
        rows = {k: _rows(config, leaf) for k, leaf in enumerate(self.leaves) if leaf.shape}

        # The state of the optimizer, of which some arrays belong to a parameter.
        created = jax.eval_shape(layout.tx.init, layout.trained_avals())
        opt_state, self._state_tree = jax.tree.flatten(created)
        self._created = opt_state
        stored = jax.tree.leaves(layout.optimizer_placement(config.optimizer_axes, sharded))
        number = {leaf.path: k for k, leaf in enumerate(self.leaves)}

        def of_state(stored: Stored, aval: Aval) -> Operand:
            k = None if stored.rows_of is None else number[stored.rows_of.path]
            is_cut = k in rows and rows[k].hold(aval.shape)
            return Operand(k, config.offloads_optimizer and stored.in_pieces) if is_cut else Operand()

        of_states = [of_state(*each) for each in zip(stored, opt_state, strict=True)]

        # Split the update.
        scalars = [jax.ShapeDtypeStruct((), dtype) for dtype in (jnp.float32, jnp.bool_, jnp.float32)]
        grads = [jax.ShapeDtypeStruct(p.shape, dtype) for p, dtype in zip(params, grad_dtypes, strict=True)]
        self._num_params, self._num_results = len(params), len(params) + len(opt_state)
        closed = jaxprs.inlined(jaxprs.traced(self._update, *params, *opt_state, *grads, *scalars)[0])
        owners = [*range(len(params)), *(each.param and number[each.param.path] for each in stored), *range(len(grads))]
        self.owned = self._owned(closed, owners, rows)
        self.split = SplitUpdate(
            closed,
            [*of_params, *of_states, *of_grads, *[Operand()] * len(scalars)],
            [*of_params, *of_states],
            rows,
            [coupling for kinds in self.owned.groups for kind in kinds for coupling in kind.couplings],
        )
        is_state = lambda p: p >= self._num_params or layout.has_master or self._moved[p]
        self._in_place = {p for p, each in enumerate(self.split.results) if each.leaf is not None and is_state(p)}
        self._zeros = layout.trained_paddings(sharded)
        self._state_zeros = layout.optimizer_paddings(config.optimizer_axes, sharded)
        self._specs = leaf_specs(config.optimizer_axes, self.leaves, sharded)

    def _owned(self, closed: ClosedJaxpr, owners: Sequence[int | None], rows: Mapping[int, Rows]) -> OwnedMatrices:
        """The matrices of the update that have owners; `owners` are the parameters that its arguments belong to."""
        leaf_of = {v: k for v, k in zip(closed.jaxpr.invars, owners, strict=False) if k is not None}
        in_shape = lambda c: {v.aval.shape for v in (*c.inputs, *c.outputs)} == {self.leaves[c.leaf].shape}
        is_local = lambda equation, k: jaxprs.is_elementwise(equation) or (k in rows and rows[k].compute(equation))
        found = [coupling for coupling in couplings(closed.jaxpr, leaf_of, is_local) if in_shape(coupling)]
        first = {coupling.leaf: coupling for coupling in reversed(found)}
        found = [coupling for coupling in found if coupling is first[coupling.leaf]] if self.two_passes else []
        sharded, dims = self.config.stage.shards_optimizer, dict[tuple[int | None, Shape], Dims]()
        for k, leaf in enumerate(self.leaves):
            dims[k, leaf.shape] = leaf.dims if sharded else Dims(None)
        return OwnedMatrices(self.config, LEAVES_WHOLE, self.leaves, closed, found, dims, apart=True)

    def _update(self, *flat: Array) -> list[Array]:
        """The update of whole logical arrays: from (parameters, optimizer state, gradients, factor, finite, loss) to
        the new (parameters, optimizer state), all in flattening order."""
        old, grads, (factor, finite, loss) = flat[: self._num_results], flat[self._num_results : -3], flat[-3:]
        dtype = self.config.precision.param_dtype
        grads = [g.astype(dtype) * factor.astype(dtype) if self.scales else g.astype(dtype) for g in grads]
        params = self._params_tree.unflatten(old[: self._num_params])
        opt_state = self._state_tree.unflatten(old[self._num_params :])
        updates, after_update = optimizers.update(
            self.layout.tx, self._params_tree.unflatten(grads), opt_state, params, loss
        )
        new = [*jax.tree.leaves(optax.apply_updates(params, updates)), *jax.tree.leaves(after_update)]
        return [lax.select(finite, n, o) for n, o in zip(new, old, strict=True)]

    def __call__(self, state: TrainState, step: StepGrads) -> Updated:
        """Updates a state."""
        whole = self._compute_whole(state, step)
        arrays, once, operands = whole.arrays, whole.once, self.split.arguments

        # Update the rest in pieces, on each device.
        stored = {k: arrays[k] for k in self._in_place}
        apart = {k: a for k, a in enumerate(whole.computed) if state.master is not None or k not in stored}
        grads = self._cut_grads(arrays)
        specs = lambda arrays: {k: self._specs[operands[k].leaf] for k in arrays}
        sliced = [self._zeros[k].pad(once[v]) for v, k in self.split.sliced]
        scalars = [once[v] for v in self.split.scalars]
        shared = [[once[v] for v in kinds[0].couplings[0].shared] for kinds in self.owned.groups]
        specs_apart, replicated = {k: self._specs[k] for k in apart}, PartitionSpec()
        stream = shard_map_over_data(
            self.config,
            self._stream,
            (
                specs(stored), specs(grads), specs_apart, [self._specs[k] for _, k in self.split.sliced],
                [replicated] * len(scalars), [[replicated] * len(each) for each in shared],
                None if step.divisor is None else replicated,
            ),
            (specs(stored), specs_apart, replicated),
        )  # fmt: skip
        stored, apart, squared_norm = stream(stored, grads, apart, sliced, scalars, shared, step.divisor)

        # Put both together.
        computed = [(apart if k in apart else stored)[k] for k in range(self._num_params)]
        return self._updated(state, whole, stored, computed, squared_norm)

    def _compute_whole(self, state: TrainState, step: StepGrads) -> _Whole:
        """Computes what is computed once, without the zeros at the end of arrays."""
        factor = jnp.float32(1) if step.factor is None else step.factor
        computed = self._computed(state)
        params = computed if state.master is None else jax.tree.leaves(state.master)
        arrays = [*params, *jax.tree.leaves(state.opt_state), *step.grads, factor, step.finite, step.loss]
        zeros = [*self._zeros, *self._state_zeros, *self._zeros, *[NO_PADDING] * 3]
        given = zip(arrays, zeros, self.split.arguments, strict=True)
        once = self.split.compute_whole({k: z.crop(a) for k, (a, z, o) in enumerate(given) if not o.in_host})
        return _Whole(arrays, computed, once)

    def _cut_grads(self, arrays: Sequence[Array]) -> Arrays:
        """The gradients of parameters that are updated in pieces, by position."""
        positions = range(self._num_results, len(arrays) - 3)
        return {k: arrays[k] for k in positions if self.split.arguments[k].leaf is not None}

    def _updated(
        self, state: TrainState, whole: _Whole, stored: Arrays, computed: list[Array], squared_norm: Array
    ) -> Updated:
        """Puts together what was computed once, and what was updated in pieces."""
        zeros = [*self._zeros, *self._state_zeros]
        results = self.split.whole_results(whole.once)
        new = {k: zeros[k].pad(a) for k, a in results.items()} | stored
        for k, leaf in enumerate(self.leaves):
            if k in results:  # a scalar parameter
                computed[k] = results[k].astype(leaf.compute_dtype)
                squared_norm += jnp.square(results[k].astype(jnp.float32))
        master = None
        if state.master is not None:
            master = self._params_tree.unflatten([new[k] for k in range(self._num_params)])
        opt_state = self._state_tree.unflatten([new[k] for k in range(self._num_params, self._num_results)])
        return Updated(self._params_tree.unflatten(computed), master, opt_state, squared_norm)

    def _computed(self, state: TrainState) -> list[Array]:
        """The trained parameters in the dtypes in which they are computed with, stored like the optimizer state."""
        trained = self.layout.trained(state.params)
        if self.config.offloads_params:
            return jax.tree.leaves(trained)
        if not self.config.stage.shards_params:
            trained = padding.padded(trained, self._zeros)
        return jax.tree.leaves(lax.with_sharding_constraint(trained, optimizer_shardings(self.config, self.layout)))

    # On one device

    def _stream(
        self,
        stored: Arrays,
        grads: Arrays,
        computed: Arrays,
        sliced: list[Array],
        scalars: list[Array],
        shared: list[list[Array]],
        divisor: Array | None,
    ) -> tuple[Arrays, Arrays, Array]:
        """Updates the shards of this device: (arrays of the state, other parameters, squared norm)."""
        # Cut the shards into pieces that take little memory together.
        moved = [a for p, a in (stored | grads).items() if self.split.arguments[p].in_host]
        num_bytes, limit = sum(a.size * a.dtype.itemsize for a in moved), host_pieces.PIECES_BYTES
        if not moved:  # each piece costs the start of some kernels, and no room for what comes next
            num_bytes, limit = 4 * sum(a.size for a in (stored or computed).values()), host_pieces.DEVICE_PIECES_BYTES
        wanted, first = -(-num_bytes // limit), self._num_results
        if moved and on_tpus(self.config.mesh):  # a stack that is read at once would be copied within host memory
            wanted = max(2, wanted)
        cuts: dict[int, Pieces] = {}
        for k in self.split.leaves:
            shape = grads[first + k].shape
            is_row = len(shape) == 1 and k in self.split.whole_rows
            cuts[k] = host_pieces.cut(shape, 1 if is_row else wanted, self.config.mesh)

        def run(leaves: Iterable[int], total: Array, fixed: Fixed) -> tuple[Array, dict[int, list[Array]]]:
            """A pass over parameters: (the squared norm so far, what owners need of each parameter)."""
            nonlocal stored, computed
            by_count: dict[int, dict[int, Pieces]] = collections.defaultdict(dict)
            for k in leaves:
                by_count[cuts[k].count][k] = cuts[k]
            values: dict[int, list[Array]] = {}
            for count, alike in by_count.items():  # update parameters of as many pieces together
                passes = [self.split.passes[k][fixed.number] for k in alike]
                own = {p: stored[p] for each in passes for p in each.results if p in stored}
                read = {
                    p: a for p, a in (stored | grads).items() for each in passes if p in each.reads and p not in own
                }
                params = {k: computed[k] for k in alike if k in computed}
                updated, params, total, made = self._stream_alike(
                    alike, count, own, params, total, fixed._replace(read=read)
                )
                stored, computed, values = stored | updated, computed | params, values | made
            return total, values

        # Update parameters by themselves, and then equal matrices.
        fixed = Fixed({}, sliced, scalars, divisor)
        total, _ = run([k for k in self.split.leaves if len(self.split.passes[k]) == 1], jnp.float32(0), fixed)
        for kinds, of_kind in zip(self.owned.groups, shared, strict=True):
            own = [coupling for kind in kinds for coupling in kind.couplings]
            total, values = run([coupling.leaf for coupling in own], total, fixed)
            outputs = self.owned.on_device(kinds, [values[coupling.leaf] for coupling in own], [of_kind])
            products = {
                c.leaf: dict(zip(c.outputs, arrays, strict=True)) for c, arrays in zip(own, outputs, strict=True)
            }
            second = fixed._replace(number=1, products=products)
            total, _ = run([coupling.leaf for coupling in own], total, second)
        (total,) = collectives.all_reduce([total], self.config.axes.data, self.config.axes).leaves
        return stored, computed, total

    def _stream_alike(
        self, cuts: dict[int, Pieces], count: int, stored: Arrays, computed: Arrays, total: Array, fixed: Fixed
    ) -> tuple[Arrays, Arrays, Array, dict[int, list[Array]]]:
        """A pass over parameters that are cut into equally many pieces, see `_stream`.

        It adds to the squared norm `total`, so that one loop waits for another: the pieces of both would otherwise be
        on the device.
        """
        operands, passes = self.split.arguments, {k: self.split.passes[k][fixed.number] for k in cuts}
        reads = {p for each in passes.values() for p in each.reads}
        moved = {p: a for p, a in (stored | fixed.read).items() if operands[p].in_host and p in reads}
        of_leaf = {k: [p for p in moved if operands[p].leaf == k] for k in cuts}

        def fetch(k: int, arrays: Arrays, c: ArrayLike) -> Arrays:
            """Piece `c` of each array of a parameter that is in host memory."""
            pieces = {p: host_arrays.from_host(cuts[k].read(arrays[p], c)) for p in of_leaf[k]}
            if on_tpus(self.config.mesh):
                return {p: host_arrays.in_stored_order(piece, arrays[p].shape) for p, piece in pieces.items()}
            return pieces

        def step(
            c: ArrayLike, carry: tuple[Arrays, Arrays, Array, dict[int, list[Array]], Arrays], is_last: bool = False
        ) -> tuple[Arrays, Arrays, Array, dict[int, list[Array]], Arrays]:
            """Updates piece `c` of each parameter, sends it back, and fetches the next one."""
            stored, computed, total, made, fetched = dict(carry[0]), dict(carry[1]), carry[2], dict(carry[3]), carry[4]
            following: Arrays = {}
            came: list[list[Array]] = [[]] * _AHEAD  # events of the next pieces of each parameter
            for k, pieces in largest_first:
                # Compute.
                results, values = self._update_piece(
                    k, pieces, c, fetched, stored, computed.get(k), fixed, came[-_AHEAD]
                )
                made[k] = [pieces.write(a, value, c) for a, value in zip(made[k], values, strict=True)]
                # Write what is on the device, and send the rest.
                for p in [p for p in stored if operands[p].leaf == k]:
                    cut, result = pieces.of_rows(stored[p].shape), results[p]
                    stored[p] = cut.write(stored[p], host_arrays.to_host(result) if operands[p].in_host else result, c)
                if k in results:
                    total += self._squared_norm(k, results[k])
                if k in results and k in computed:
                    new = results[k].astype(computed[k].dtype)
                    computed[k] = pieces.write(computed[k], host_arrays.to_host(new) if self._moved[k] else new, c)
                # Fetch the next piece.
                if not is_last:
                    following |= fetch(k, stored | fixed.read, c + 1)
                    came.append(events([following[p] for p in of_leaf[k]]))
            return stored, computed, total, made, following

        piece_bytes = lambda k: sum(math.prod(cuts[k].piece) * moved[p].dtype.itemsize for p in of_leaf[k])
        largest_first = sorted(cuts.items(), key=lambda each: piece_bytes(each[0]), reverse=True)
        first: Arrays = {}
        for k in cuts:
            first |= fetch(k, moved, 0)
        zeros = lambda k: [jnp.zeros(cuts[k].shape, v.aval.dtype) for v in passes[k].values]
        made = {k: after(zeros(k), [total]) for k in cuts}  # those of the group before are no longer needed
        carry = lax.fori_loop(0, count - 1, step, (stored, computed, total, made, first))
        return step(count - 1, carry, is_last=True)[:4]

    def _update_piece(
        self,
        k: int,
        cut: Pieces,
        c: ArrayLike,
        fetched: Arrays,
        stored: Arrays,
        computed: Array | None,
        fixed: Fixed,
        waits: Sequence[Array],
    ) -> tuple[Arrays, list[Array]]:
        """What a pass computes for piece `c` of parameter `k`: (results by position, other values).

        They wait for events.
        """
        operands, reads = self.split.arguments, self.split.passes[k][fixed.number].reads
        scalars = host_arrays.scalars_after(fixed.scalars, waits)
        read = lambda a: cut.of_rows(a.shape).read(a, c)
        pieces = {p: a for p, a in fetched.items() if operands[p].leaf == k}
        if fixed.divisor is not None:
            pieces |= {p: a / fixed.divisor for p, a in pieces.items() if p >= self._num_results}
        pieces |= {p: read(a) for p, a in (stored | fixed.read).items() if p in reads and p not in pieces}
        if k not in pieces and computed is not None:  # there is no master copy
            pieces[k] = read(computed)
        values = dict(zip(self.split.scalars, scalars, strict=True))
        values |= {v: read(a) for (v, leaf), a in zip(self.split.sliced, fixed.sliced, strict=True) if leaf == k}
        values |= {v: read(a) for v, a in fixed.products.get(k, {}).items()}
        start = self._start(k, cut, c)
        results, others = self.split.compute_piece(k, pieces, values, cut.piece, start, fixed.number)
        return {p: self._with_zeros(k, a, start) for p, a in results.items()}, others

    def _start(self, k: int, cut: Pieces, c: ArrayLike) -> list[Array]:
        """The position of the first element of a piece in the parameter, of which this device has a shard."""
        start, dim = list(cut.start(c)), self.leaves[k].dim
        if dim is not None and self.config.stage.shards_optimizer:
            start[dim] += lax.axis_index(self.config.optimizer_axes.shard) * cut.shape[dim]
        return start

    def _with_zeros(self, k: int, piece: Array, start: Sequence[Array]) -> Array:
        """A piece of an array with zeros where parameter `k` is stored with zeros at its end."""
        zeros = self._zeros[k]
        if not zeros.count:
            return piece
        positions = start[zeros.dim] + lax.broadcasted_iota(jnp.int32, piece.shape, zeros.dim)
        return jnp.where(positions < self.leaves[k].shape[zeros.dim], piece, 0)

    def _squared_norm(self, k: int, piece: Array) -> Array:
        """This device's term of the squared norm, see `Reductions.squared_norm_term`."""
        axes, is_sharded = (
            self.config.optimizer_axes,
            self.config.stage.shards_optimizer and self.leaves[k].dim is not None,
        )
        copies = axes.num_replicas * (1 if is_sharded else axes.num_shards)
        return jnp.sum(jnp.square(piece.astype(jnp.float32))) / copies


def _rows(config: ZeroConfig, leaf: Leaf) -> Rows:
    """The rows of a parameter, as the optimizer's state is stored."""
    is_divided = config.stage.shards_optimizer and leaf.dim == len(leaf.shape) - 1
    return Rows(leaf.path, leaf.shape, config.optimizer_axes.num_shards if is_divided else 1)
