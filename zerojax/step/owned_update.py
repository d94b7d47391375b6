"""The update of an optimizer that multiplies or decomposes matrices, such as Muon: each is whole on one device.

The update is traced. What it computes element by element is left to the compiler, on shards. What couples the elements
of a parameter (`program.couplings`) needs the whole matrix. So that N devices compute it once, and not each of them,
matrices of equal shapes are divided among the devices, their owners, see `owned_matrices`.

Cost: in a step, each device sends 2 (N-1)/N of its shards of what is multiplied, and computes 1/N of the products. If N
does not divide the number of equal matrices, those that are left go to the devices with the least work; what these send
and get is then as long as the longest.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from zerojax.comm.collectives import LEAVES_WHOLE, CollectiveOptions
from zerojax.program import jaxprs
from zerojax.program.couplings import Coupling, around, couplings
from zerojax.program.jaxprs import ClosedJaxpr, Var
from zerojax.sharding.axes import REPLICATED, Axes, Dims
from zerojax.sharding.placement import data_spec
from zerojax.step import optimizers
from zerojax.step.config import ZeroConfig
from zerojax.step.owned_matrices import OwnedMatrices
from zerojax.step.owners import Kind
from zerojax.step.state import StateLayout
from zerojax.utils.typing import Array, PyTree, Shape


class OwnedUpdate:
    """The update of an optimizer on whole logical arrays, of which some are computed by owners.

    Attributes:
        owned: the matrices that have owners.
    """

    def __init__(self, config: ZeroConfig, layout: StateLayout, options: CollectiveOptions, gets_loss: bool = True):
        self._config, self._axes = config, config.optimizer_axes
        leaves = [leaf for leaf in layout.leaves if leaf.trainable]
        self._closed, self._results, of_state, found = _traced(layout, gets_loss)

        # How what belongs to each parameter is stored.
        sharded, dims = config.stage.shards_optimizer, dict[tuple[int | None, Shape], Dims]()
        stored = jax.tree.leaves(layout.optimizer_placement(self._axes, sharded))
        state = self._closed.jaxpr.invars[len(leaves) :]
        for v, k, each in zip(state, of_state, stored, strict=False):  # none, if there are no couplings
            dims.setdefault((k, v.aval.shape), Dims(each.dim, num_zeros=each.padding.count))
        for k, leaf in enumerate(leaves):
            dims[k, leaf.shape] = leaf.dims if sharded else Dims(None)
        found = found if self._axes.num_shards > 1 else []
        self.owned = OwnedMatrices(config, options, leaves, self._closed, found, dims)

    def __call__(
        self, grads: PyTree, opt_state: PyTree, params: PyTree, loss: Array | None = None
    ) -> tuple[PyTree, PyTree]:
        """As `optimizers.update`, or as `tx.update` without a loss."""
        jaxpr = self._closed.jaxpr
        scope = dict(zip(jaxpr.constvars, self._closed.consts, strict=True))
        scope.update(zip(jaxpr.invars, jax.tree.leaves((grads, opt_state, params, loss)), strict=True))
        equations, members = jaxpr.eqns, [[c for kind in kinds for c in kind.couplings] for kinds in self.owned.groups]
        for k, kinds in enumerate(self.owned.groups):
            now, equations = around(equations, list(itertools.chain(*members[k:])))
            jaxprs.run_equations(now, scope)
            self._run_owners(kinds, scope)
        jaxprs.run_equations(equations, scope)
        flat = [scope[v] if jaxprs.is_var(v) else jnp.asarray(v.val, v.aval.dtype) for v in jaxpr.outvars]
        return jax.tree.unflatten(jax.tree.structure(self._results), flat)

    def _run_owners(self, kinds: Sequence[Kind], scope: dict[Var, Array]) -> None:
        """Computes the outputs of couplings into `scope`."""
        each = [coupling for kind in kinds for coupling in kind.couplings]
        specs = lambda dims_of, values: [data_spec(dims_of(v).shard, self._axes) for v in values]
        dims_of = [self.owned.dims_of(coupling) for coupling in each]
        in_shards = lambda of, v: self._over_data(of(v).padding.pad(scope[v]), of(v))
        own = [[in_shards(of, v) for v in c.inputs] for of, c in zip(dims_of, each, strict=True)]
        shared = [[scope[v] for v in kind.couplings[0].shared] for kind in kinds]
        in_specs = list(map(specs, dims_of, (c.inputs for c in each))), [[REPLICATED] * len(s) for s in shared]
        out_specs = list(map(specs, dims_of, (c.outputs for c in each)))
        results = jax.shard_map(
            lambda *a: self.owned.on_device(kinds, *a),
            mesh=self._config.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(self._config.axes.of_states),
            check_vma=False,
        )(own, shared)
        for of, coupling, values in zip(dims_of, each, results, strict=True):
            scope.update({v: of(v).padding.crop(a) for v, a in zip(coupling.outputs, values, strict=True)})

    def _over_data(self, a: Array, dims: Dims) -> Array:
        """An array that is divided over the data axes alone: it is gathered over others, such as 'model'."""
        sharding = NamedSharding(self._config.mesh, data_spec(dims.shard, self._axes))
        return lax.with_sharding_constraint(a, sharding) if self._config.other_axes else a


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
    return update if update.owned.groups or update.owned.others else None


def owned_matrices(config: ZeroConfig, layout: StateLayout) -> OwnedMatrices | None:
    """The matrices that have owners in the update of a state; None if it does not multiply any."""
    dtypes = [leaf.dtype for leaf in layout.leaves if leaf.trainable]
    update = config.memory.update(config, layout, dtypes, scales=False) or owned_update(config, layout)
    return update.owned if update and (update.owned.groups or update.owned.others) else None
