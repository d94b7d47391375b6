"""Creates training states, which are sharded from the start: no device holds all of the optimizer's state."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.sharding import NamedSharding, use_abstract_mesh

from zerojax.program import jaxprs
from zerojax.program.jaxprs import Atom, ClosedJaxpr
from zerojax.sharding import padding, placement
from zerojax.sharding.advice import large_unit_text, uneven_text
from zerojax.sharding.dim_choice import likely_stacks, with_first_dim
from zerojax.sharding.padding import Padding
from zerojax.sharding.placement import PINNED_HOST, Leaf, Overrides, by_path, shard_bytes
from zerojax.sharding.precision import LossScale
from zerojax.sharding.units import unmerged_text
from zerojax.step import models
from zerojax.step.config import ZeroConfig
from zerojax.step.models import SplitModel
from zerojax.step.optimizers import check_update, rounds_stochastically
from zerojax.step.source import ModelSource, plain_arrays
from zerojax.step.state import StateLayout, TrainState, check_not_donated, check_trained, shardings, stored_avals
from zerojax.utils.text import abbreviate
from zerojax.utils.typing import Array, ArrayLike, PRNGKey, PyTree
from zerojax.utils.warn import warn

_STEP_KEY = 2**32 - 1  # folds the key of the steps; models fold small counts (`split`, nnx.Rngs) into the same key


def build(
    config: ZeroConfig, overrides: Overrides, source: ModelSource, tx: optax.GradientTransformation, seed: int | PRNGKey
) -> tuple[Callable[[], TrainState], TrainState]:
    """Returns (a function that creates the state with its shardings, the state as avals with shardings).

    Nothing runs here: if the source is a function, shapes and stacked leaves are found by tracing it.
    """
    key = _key(seed)
    if source.create is None:
        create, abstract = _from_existing(config, overrides, source.existing, tx, key)
    else:
        create, abstract = _from_function(config, overrides, source.create, tx, key)

    def create_if_pinnable() -> TrainState:
        config.memory.check_state(config, abstract)
        return create()

    return create_if_pinnable, abstract


def _from_function(
    config: ZeroConfig,
    overrides: Overrides,
    create: Callable[[PRNGKey], PyTree],
    tx: optax.GradientTransformation,
    key: PRNGKey,
) -> tuple[Callable[[], TrainState], TrainState]:
    # Trace the function, and split what it creates.
    static: list[tuple[SplitModel, list[str]]] = []

    def split(key: PRNGKey) -> tuple[PyTree, PyTree]:
        with use_abstract_mesh(config.mesh.abstract_mesh):  # Linen runs the model, which may constrain activations
            created = create(key)
        plain = plain_arrays(created)
        model = models.split(created, overrides.trainable)
        static.append((model._replace(params=None, model_state=None), plain))
        return model.params, model.model_state

    closed, (params, model_state) = jaxprs.traced(split, key)
    ((model, plain),) = static

    # Define the state.
    stacked = stacked_paths(closed, list(by_path(params)))
    from_model = model.from_model._replace(stacked=stacked)
    model = SplitModel(model.model, params, model_state, from_model)
    layout = _define(config, overrides, model, plain, tx)
    tree = jax.tree.structure((params, model_state))

    # Create it by running the trace.
    def initial(key: PRNGKey) -> TrainState:
        params, model_state = jax.tree.unflatten(tree, jaxprs.run(closed, key))
        return _initial(config, layout, params, model_state, key)

    from_avals = functools.partial(_initial, config, layout)
    abstract = stored_avals(config, jax.eval_shape(from_avals, params, model_state, key))
    return lambda: _run(config, initial, (key,), abstract), abstract


def _from_existing(
    config: ZeroConfig, overrides: Overrides, existing: PyTree, tx: optax.GradientTransformation, key: PRNGKey
) -> tuple[Callable[[], TrainState], TrainState]:
    """As `build`, from arrays. They are arguments of the program that creates the state: as constants of it, they would
    be copied several times. If the optimizer's state goes to host memory, they come to the devices from there."""
    # Define the state.
    plain = plain_arrays(existing)
    model = models.split(existing, overrides.trainable)
    arrays = by_path(model.params)
    stacked = likely_stacks({path: tuple(np.shape(a)) for path, a in arrays.items()})
    model = model._replace(from_model=model.from_model._replace(stacked=stacked))
    layout = _define(config, overrides, model, plain, tx)
    from_logical = functools.partial(_initial, config, layout)
    abstract = stored_avals(config, jax.eval_shape(from_logical, model.params, model.model_state, key))
    is_sharded = config.stage.shards_optimizer

    # Create it from arrays that are stored like the master parameters.
    def initial(stored: PyTree, model_state: PyTree, key: PRNGKey) -> TrainState:
        if config.offloads_optimizer:
            stored = jax.device_put(stored, jax.memory.Space.Device)
        return from_logical(padding.cropped(stored, layout.paddings(is_sharded)), model_state, key)

    def create() -> TrainState:
        for path, a in arrays.items():
            if isinstance(a, jax.ShapeDtypeStruct):
                raise ValueError(
                    f"init: the model has shapes instead of values\n"
                    f"  got:      {path!r}: {a}\n"
                    f"  fix:      create the model with values, or pass a function that creates it"
                )
        zeros = jax.tree.unflatten(layout.tree, layout.paddings(is_sharded))
        placed = placement.named_shardings(config.mesh, layout.specs(config.optimizer_axes, is_sharded))
        put = _put
        if config.offloads_optimizer:
            put, placed = _lend, jax.tree.map(lambda sharding: sharding.with_memory_kind(PINNED_HOST), placed)
        stored = jax.tree.map(put, model.params, placed, zeros)
        return _run(config, initial, (stored, model.model_state, key), abstract, donated=0)

    return create, abstract


def with_optimizer(
    config: ZeroConfig, state: TrainState, tx: optax.GradientTransformation, seed: int | PRNGKey
) -> TrainState:
    """See `Zero.with_optimizer`."""
    check_not_donated(state)
    layout, stage = dataclasses.replace(state.layout, tx=tx), config.stage
    check_update(tx, layout.trained_avals())
    config.memory.check(config, layout)

    def initial(params: PyTree, master: PyTree, model_state: PyTree, key: PRNGKey) -> TrainState:
        if config.offloads_optimizer:
            params, master = jax.device_put((params, master), jax.memory.Space.Device)
        params = padding.cropped(params, layout.paddings(stage.shards_params))
        if master is not None:
            trained = padding.cropped(master, layout.trained_paddings(stage.shards_optimizer))
            params = layout.with_frozen(trained, params)
        return _initial(config, layout, params, model_state, key)

    args = state.params, jax.tree.map(placement.in_memory, state.master), state.model_state, _key(seed)
    abstract = stored_avals(config, jax.eval_shape(initial, *args))
    config.memory.check_state(config, abstract)
    return _run(config, initial, args, abstract, donated=(0, 1, 2))


def with_params(config: ZeroConfig, state: TrainState, params: PyTree) -> TrainState:
    """See `Zero.with_params`."""
    check_not_donated(state)
    check_trained(state, params)
    params = jax.tree.map(placement.in_memory, params)
    layout, placed = state.layout, shardings(config, state)
    trained = [leaf for leaf in layout.leaves if leaf.trainable]

    def insert(given: PyTree, current: PyTree) -> PyTree:
        given = jax.device_put(given, jax.memory.Space.Device) if config.offloads_optimizer else given
        values, tree = jax.tree.flatten(layout.cast_trained(given))
        logical = [leaf.without_zeros(a) for a, leaf in zip(values, trained, strict=True)]
        stored = padding.padded(logical, layout.trained_paddings(config.stage.shards_params))
        return layout.with_frozen(tree.unflatten(stored), current)

    def lend(a: Array, leaf: Leaf, stored: Array, sharding: NamedSharding) -> Array:
        if np.shape(a) != stored.shape:
            a = leaf.without_zeros(a)
        return _lend(a.astype(leaf.dtype), sharding, padding.between(np.shape(a), stored.shape))

    computed = jax.jit(insert, out_shardings=placed.params)(params, state.params)
    master, tree = jax.tree.flatten(state.master)
    lent = map(lend, jax.tree.leaves(params), trained, master, jax.tree.leaves(placed.master))
    return dataclasses.replace(state, params=computed, master=tree.unflatten(lent))


def _run(
    config: ZeroConfig,
    initial: Callable[..., TrainState],
    args: tuple[PyTree, ...],
    abstract: TrainState,
    donated: int | tuple[int, ...] = (),
) -> TrainState:
    """Runs a function that creates a state. What goes to host memory is created in parts, and donates nothing."""
    if config.offloads_optimizer:
        return create_in_parts(initial, args, abstract, config.memory.keeper(config, abstract))
    return jax.jit(initial, out_shardings=shardings(config, abstract), donate_argnums=donated)(*args)


def _put(a: ArrayLike, sharding: NamedSharding, zeros: Padding) -> Array:
    """A copy of an array with a sharding and zeros at its end. Each process passes the whole array."""
    if isinstance(a, jax.Array) and (jax.process_count() == 1 or not a.is_fully_addressable):
        if zeros.count:
            return jax.jit(zeros.pad, out_shardings=sharding)(a)
        return placed_copy(a, sharding)
    a, stored = np.asarray(a), zeros.stored_shape(np.shape(a))
    read = lambda index: padding.read_shard(a.__getitem__, index, a.shape, stored)
    return jax.make_array_from_callback(stored, sharding, read)


def _lend(a: ArrayLike, sharding: NamedSharding, zeros: Padding) -> Array:
    """As `_put`, but the result may share memory with the array, and must not be donated."""
    is_whole = isinstance(a, jax.Array) and (jax.process_count() == 1 or not a.is_fully_addressable)
    return jax.device_put(a, sharding) if is_whole and not zeros.count else _put(a, sharding, zeros)


def placed_copy(a: ArrayLike, sharding: NamedSharding) -> Array:
    """A copy of a NumPy or JAX array with a sharding, which shares no memory with it, so that it can be donated.

    `jax.device_put(..., may_alias=False)` shares some all the same: on a CPU that of a NumPy array, and of an array on
    one device that is replicated to others, its own shard (jax 0.10.2). Under `jit`, it places nothing.
    """
    if isinstance(a, Tracer):
        return jax.lax.with_sharding_constraint(a, sharding)
    if not isinstance(a, jax.Array):
        return jax.device_put(np.array(a), sharding)
    placed = jax.device_put(models.strongly_typed(a), sharding, may_alias=False)
    is_whole = sharding.shard_shape(tuple(a.shape)) == tuple(a.shape)
    return jax.jit(jnp.copy, out_shardings=sharding)(placed) if is_whole else placed


def _define(
    config: ZeroConfig,
    overrides: Overrides,
    model: SplitModel,
    plain: Sequence[str],
    tx: optax.GradientTransformation,
) -> StateLayout:
    """The static part of a state, with warnings about what the user may not expect.

    `plain` are the paths of arrays in the model state that are attributes of a module.
    """
    params, model_state = model.params, model.model_state
    leaves = placement.place(params, config.mesh, config.optimizer_axes, config.precision, overrides, model.from_model)
    fixed = models.fixed_state(model_state, leaves, overrides.frozen)
    layout = StateLayout(tx, model.model, leaves, jax.tree.structure(params), fixed, config)

    # Warn of the placement.
    texts: list[str | None] = []
    if sum(leaf.size for leaf in leaves) >= placement.LARGE:
        if config.stage.shards_params:
            layer_shapes = {leaf.path: leaf.shape[leaf.stacked :] for leaf in leaves}
            texts += [large_unit_text(leaves), unmerged_text([leaf.unit for leaf in leaves], layer_shapes)]
        texts += [uneven_text(leaves, config.optimizer_axes)] if config.stage.shards_optimizer else []
    for text in filter(None, texts):
        warn(text)

    # Warn of the model.
    is_narrow = lambda a, leaf: leaf.trainable and jnp.dtype(a.dtype).itemsize < leaf.compute_dtype.itemsize
    narrow = [leaf.path for a, leaf in zip(jax.tree.leaves(params), leaves, strict=True) if is_narrow(a, leaf)]
    if narrow:
        wide = jnp.dtype(config.precision.compute_dtype).name
        warn(
            f"init: {len(narrow)} parameters that the model creates in a narrower dtype are trained in {wide}\n"
            f"  got:      {abbreviate(narrow, separator=', ')}\n"
            f"  fix:      Zero(..., precision='bf16') computes in bf16; dtypes={{glob: dtype}} sets single leaves"
        )
    variables = by_path(model_state)
    constants = [path for path in plain if jnp.issubdtype(variables[path].dtype, jnp.floating)]
    if constants:
        warn(
            f"init: attributes of the module that are plain arrays are constants, and not trained\n"
            f"  got:      {abbreviate(constants, separator=', ')}\n"
            f"  fix:      nnx.Param(array) trains it; nnx.Variable(array) says that it is a constant"
        )

    # Check the optimizer.
    check_update(tx, layout.trained_avals())
    config.memory.check(config, layout)
    if config.precision.param_dtype == jnp.bfloat16 and not rounds_stochastically(tx):
        warn(
            "init: parameters in bfloat16 lose small updates\n"
            "  got:      an optimizer whose updates are added in bfloat16, rounded to nearest\n"
            "  fix:      zerojax.stochastic_rounding(tx), or precision='bf16', which has a copy of them in fp32"
        )
    return layout


def _initial(config: ZeroConfig, layout: StateLayout, params: PyTree, model_state: PyTree, key: PRNGKey) -> TrainState:
    """The state at step 0, from the parameters in the dtypes of the model."""
    leaves = zip(jax.tree.leaves(params), layout.leaves, strict=True)
    params = jax.tree.unflatten(layout.tree, [a.astype(leaf.dtype) for a, leaf in leaves])
    trained, stage = layout.trained(params), config.stage
    computed = layout.with_frozen(layout.cast_trained(trained), params)
    opt_state, zeros = layout.tx.init(trained), layout.trained_paddings(stage.shards_optimizer)
    state = TrainState(
        step=jnp.int32(0),
        skipped=jnp.int32(0),
        params=padding.padded(computed, layout.paddings(stage.shards_params)),
        master=padding.padded(trained, zeros) if layout.has_master else None,
        opt_state=padding.padded(opt_state, layout.optimizer_paddings(config.optimizer_axes, stage.shards_optimizer)),
        model_state=model_state,
        key=jax.random.fold_in(key, _STEP_KEY),
        loss_scale=LossScale.create(config.precision),
        layout=layout,
    )
    return jax.tree.map(models.strongly_typed, state)


def _key(seed: int | PRNGKey) -> PRNGKey:
    """The PRNG key of an integer seed; a PRNG key is returned unchanged."""
    if isinstance(seed, int | np.integer) and not isinstance(seed, bool):
        return jax.random.key(seed)
    if isinstance(seed, jax.Array) and models.is_key(seed) and seed.ndim == 0:
        return seed
    raise ValueError(
        f"init: the seed is neither an int nor a key\n"
        f"  got:      {seed!r}\n"
        f"  fix:      pass seed=0 or seed=jax.random.key(0)"
    )


def stacked_paths(closed: ClosedJaxpr, paths: list[str]) -> frozenset[str]:
    """The paths of the leaves that a scan, or a vmap over random keys, creates for all layers at once.

    A leaf of shape [L, ...] is stacked if it is the stacked output of a scan of length L, or computed from bits that
    are drawn from L keys. Then so are all leaves of the largest subtree that contains it and whose leaves all have the
    same first dim: norm scales and biases are created without keys.

    `closed` is the jaxpr of the initialization, whose first outputs are the leaves at `paths`.
    """
    outputs = closed.jaxpr.outvars[: len(paths)]
    shapes = {path: tuple(v.aval.shape) for path, v in zip(paths, outputs, strict=True)}

    def is_stacked(v: Atom, origin: jaxprs.Origin, size: int, seen: set[tuple[Atom, int]]) -> bool:
        if not jaxprs.is_var(v) or (v, id(origin)) in seen:
            return False
        seen.add((v, id(origin)))
        equation, reads = origin.of(v)
        if equation is not None and jaxprs.is_scan(equation):
            scan = jaxprs.scan_params(equation)
            return equation.outvars.index(v) >= scan.num_carry and scan.length == size
        if equation is not None and jaxprs.is_random_bits(equation):
            return jaxprs.num_random_keys(equation) == size
        return any(is_stacked(operand, scope, size, seen) for operand, scope in reads)

    top = jaxprs.Origin(closed.jaxpr)
    size_of = lambda path: shapes[path][0] if shapes[path] else 0
    stacked = [p for p, v in zip(paths, outputs, strict=True) if size_of(p) and is_stacked(v, top, size_of(p), set())]
    subtrees = with_first_dim(shapes)
    return frozenset(inside for path in stacked for inside in subtrees[path])


PART_BYTES = 2**32  # on one device
_MOST_PARTS = 16  # each part is a program that is traced and compiled


def create_in_parts(
    create: Callable[..., TrainState],
    args: tuple[PyTree, ...],
    abstract: TrainState,
    keep: Callable[[str, Array], Array] = lambda path, array: array,
) -> TrainState:
    """Runs `create(*args)` as several programs, each of which computes a part of the leaves of the state.

    `keep(path, array)` puts each leaf where it stays.

    Each program is the whole function, of which the compiler removes what its leaves do not need. A parameter and its
    master copy are in the same part: they are computed from the same values. `abstract` are the avals of the results.

    Cost: traces the function and compiles it once for each part of about `PART_BYTES`, at most 16 times.
    """
    shardings = [a.sharding for a in jax.tree.leaves(abstract)]
    leaves: dict[int, Array] = {}
    paths = list(by_path(abstract))
    for part in parts(abstract):
        some = lambda *args, part=part: [jax.tree.leaves(create(*args))[k] for k in part]
        created = jax.jit(some, out_shardings=[shardings[k] for k in part])(*args)
        leaves.update((k, keep(paths[k], a)) for k, a in zip(part, jax.block_until_ready(created), strict=True))
    return jax.tree.unflatten(jax.tree.structure(abstract), [leaves[k] for k in range(len(shardings))])


def parts(abstract: TrainState) -> list[list[int]]:
    """Divides the leaves of a state, by position, into parts of about equal bytes."""
    sizes = [shard_bytes(a, a.sharding) for a in jax.tree.leaves(abstract)]
    limit = max(PART_BYTES, math.ceil(sum(sizes) / _MOST_PARTS))
    together: dict[str, list[int]] = {}  # a parameter and its master copy
    for k, path in enumerate(by_path(abstract)):
        together.setdefault(re.sub("^master", "params", path), []).append(k)
    found: list[list[int]] = [[]]
    for members in together.values():
        if sum(sizes[k] for k in (*found[-1], *members)) > limit and found[-1]:
            found.append([])
        found[-1] += members
    return found
