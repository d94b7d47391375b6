"""The training step: gradient program inside `shard_map`, update outside it on global arrays."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from zerojax import collectives, models, placement, state as states
from zerojax.audit import audit
from zerojax.finding import Audit
from zerojax.gradient import GradientProgram, Result
from zerojax.keep import KEEP_EVERYTHING, Rules
from zerojax.precision import cast
from zerojax.promise import Promise, promise
from zerojax.setup import Setup, batch_specs, check_batch, compiler_options, global_shape, shard_batch
from zerojax.state import Definition, TrainState

if TYPE_CHECKING:
    from zerojax.plan.memory import Memory

Array = Any
Tree = Any


def gradient_program(
    setup: Setup,
    definition: Definition,
    loss_fn: Callable[..., Any],
    num_microbatches: int,
    rules: Rules = KEEP_EVERYTHING,
    prefetch: int = 1,
) -> GradientProgram:
    rules.check_axes([name for name in setup.mesh.axis_names if name not in setup.axes.data])
    rules.check_units([leaf.unit for leaf in definition.leaves])
    loss = functools.partial(models.call_loss, loss_fn, definition.model)
    leaves, tree = definition.leaves, definition.tree
    stage, axes, precision = setup.stage, setup.axes, setup.precision
    return GradientProgram(loss, leaves, tree, stage, axes, precision, num_microbatches, rules, prefetch)


def _manual(setup: Setup, fn: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`fn` in `shard_map`, manual over the data axes alone."""
    return jax.shard_map(
        fn, mesh=setup.mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(setup.axes.data), check_vma=False
    )


def _leaf_specs(setup: Setup, definition: Definition, sharded: bool) -> list[PartitionSpec]:
    """What `shard_map` is told: the data axes alone. Others stay with the arrays' shardings."""
    return [placement.data_spec(leaf.dim if sharded else None, setup.axes) for leaf in definition.leaves]


def gradients(setup: Setup, program: GradientProgram, definition: Definition, args: Any) -> Result:
    """Runs the gradient program on global arrays: args are (parameter leaves, other state, batch, key, scale)."""
    whole: Any = PartitionSpec()
    grads_specs = _leaf_specs(setup, definition, placement.shards_optimizer(setup.stage))
    grads_specs = [s if leaf.trainable else None for s, leaf in zip(grads_specs, definition.leaves, strict=True)]
    in_specs = (
        _leaf_specs(setup, definition, placement.shards_params(setup.stage)),
        whole,
        batch_specs(setup, args[2]),
        whole,
        whole,
    )
    return _manual(setup, program, in_specs, Result(grads_specs, whole, whole, whole, whole))(*args)


def uses(setup: Setup, program: GradientProgram, definition: Definition, args: Any) -> list[int]:
    """`GradientProgram.uses`, of avals of global arrays: (parameter leaves, other state, batch, key)."""
    whole: Any = PartitionSpec()
    in_specs = _leaf_specs(setup, definition, placement.shards_params(setup.stage)), whole, batch_specs(setup, args[2])
    counted: list[int] = []

    def count(*local: Any) -> Array:
        counted.extend(program.uses(*local))
        return jnp.int32(0)

    jax.eval_shape(_manual(setup, count, (*in_specs, whole), whole), *args)
    return counted


def gather_params(setup: Setup, definition: Definition, trained: Tree) -> Tree:
    """Stages 1 and 2: shards of the updated parameters -> full parameters, unit by unit, in the dtype given."""
    leaves = [leaf for leaf in definition.leaves if leaf.trainable]
    values, tree = jax.tree.flatten(trained)
    units: dict[str, list[int]] = {}
    for i, leaf in enumerate(leaves):
        units.setdefault(leaf.unit, []).append(i)

    def local(shards: list[Array]) -> list[Array]:
        full, waits = list(shards), []
        for members in units.values():
            held, dims = [shards[i] for i in members], [leaves[i].dims for i in members]
            gathered, events = collectives.all_gather(held, dims, setup.axes, waits, rows=True)
            waits = setup.axes.in_turn(events)
            for i, value in zip(members, gathered, strict=True):
                full[i] = value
        return full

    in_specs = ([placement.data_spec(leaf.dim, setup.axes) for leaf in leaves],)
    return jax.tree.unflatten(tree, _manual(setup, local, in_specs, PartitionSpec())(values))


def squared_norm(setup: Setup, definition: Definition, program: GradientProgram, params: Tree) -> Array:
    """Squared norm of the trained parameters, placed like the optimizer state; one scalar all-reduce."""
    items = iter(jax.tree.leaves(params))
    values = [next(items) if leaf.trainable else None for leaf in definition.leaves]
    specs = _leaf_specs(setup, definition, placement.shards_optimizer(setup.stage))
    specs = [s if leaf.trainable else None for s, leaf in zip(specs, definition.leaves, strict=True)]

    def local(values: list[Array]) -> Array:
        (total,) = collectives.all_reduce([program.local_squared_norm(values)], setup.axes.data, setup.axes).leaves
        return total

    return _manual(setup, local, (specs,), PartitionSpec())(values)


def apply_gradients(setup: Setup, state: TrainState, shardings: TrainState, grads: Tree, finite: Array) -> TrainState:
    """One optimizer update, on global arrays with their shardings. Where `finite` is false nothing changes.

    Args:
        setup: of the Zero.
        state: before the update.
        shardings: of the state.
        grads: tree of gradients, None at frozen leaves, in true scale.
        finite: bool scalar.
    """
    definition, tx = state.definition, state.definition.tx
    dtype = setup.precision.param_dtype
    optimizer_shardings = _optimizer_shardings(setup, definition)
    old = state.master
    if old is None:  # a shard of full parameters is a slice: no communication
        old = lax.with_sharding_constraint(definition.trained(state.params), optimizer_shardings)
    updates, opt_state = tx.update(jax.tree.map(lambda g: g.astype(dtype), grads), state.opt_state, old)
    keep = lambda new, old: jax.tree.map(lambda n, o: lax.select(finite, n, o), new, old)
    new = lax.with_sharding_constraint(keep(optax.apply_updates(old, updates), old), optimizer_shardings)
    params = cast(new, setup.precision.compute_dtype)
    if placement.shards_optimizer(setup.stage) and not placement.shards_params(setup.stage):
        params = gather_params(setup, definition, params)
    after = TrainState(
        step=state.step + 1,
        skipped=state.skipped + jnp.where(finite, 0, 1),
        params=definition.with_frozen(params, state.params),
        master=None if state.master is None else new,
        opt_state=keep(opt_state, state.opt_state),
        model_state=state.model_state,
        key=state.key,
        loss_scale=state.loss_scale and state.loss_scale.update(finite, setup.precision.growth_interval),
        definition=definition,
    )
    return lax.with_sharding_constraint(after, shardings)


def _optimizer_shardings(setup: Setup, definition: Definition) -> Tree:
    specs = definition.specs(setup.axes, placement.shards_optimizer(setup.stage))
    return placement.shardings(setup.mesh, definition.trained(specs))


class Step:
    """A jitted step over (state, batch), checked before it compiles and compiled once per shape.

    `lower(state, batch)` and `trace(state, batch)` are those of the jitted function; they take avals with shardings
    (`zero.eval_init`) as well as arrays.
    """

    def __init__(
        self, setup: Setup, build: Callable[[TrainState], Callable[..., Any]], num_microbatches: int, donate: bool
    ):
        self._setup, self._build, self._num_microbatches, self._donate = setup, build, num_microbatches, donate
        self._jitted: dict[Any, Any] = {}

    def _prepare(self, state: TrainState, batch: Tree) -> tuple[Any, Tree]:
        check_batch(self._setup, batch, self._num_microbatches)
        key = state.definition
        if key not in self._jitted:
            states.check_optimizer(state, self._setup.precision)
            donated = (0,) if self._donate else ()
            self._jitted[key] = jax.jit(
                self._build(state),
                donate_argnums=donated,
                keep_unused=True,
                compiler_options=compiler_options(self._setup, key),
            )
        return self._jitted[key], batch

    def __call__(self, state: TrainState, batch: Tree) -> Any:
        jitted, batch = self._prepare(state, batch)
        return jitted(state, shard_batch(self._setup, batch))

    def _abstract(self, batch: Tree) -> Tree:
        aval = lambda a, s: jax.ShapeDtypeStruct(
            global_shape(a), _dtype(a), sharding=NamedSharding(self._setup.mesh, s)
        )
        return jax.tree.map(aval, batch, batch_specs(self._setup, batch))

    def trace(self, state: TrainState, batch: Tree) -> Any:
        jitted, batch = self._prepare(state, batch)
        return jitted.trace(state, self._abstract(batch))

    def lower(self, state: TrainState, batch: Tree, **kwargs: Any) -> Any:
        return self.trace(state, batch).lower(**kwargs)


def _dtype(a: Any) -> Any:
    """That JAX makes of an array of numpy or of a number."""
    dtype = a.dtype if hasattr(a, "dtype") else np.result_type(a)
    return jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)


def _aval(a: Array) -> Any:
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding)


class TrainStep(Step):
    """A `Step` that returns (state, metrics), and can be held against what it promises.

    Args:
        setup: of the Zero.
        build: state -> the function to jit.
        program: definition -> the gradient program.
        num_microbatches: of the step.
        setting: 'error', 'warn' or 'off': what an audit of each newly compiled program leads to.
    """

    def __init__(
        self,
        setup: Setup,
        build: Callable[[TrainState], Callable[..., Any]],
        program: Callable[[Definition], GradientProgram],
        num_microbatches: int,
        setting: str,
    ):
        self._program, self._setting = program, setting
        self._audited: set[Any] = set()
        super().__init__(setup, build, num_microbatches, donate=True)

    def __call__(self, state: TrainState, batch: Tree) -> Any:
        jitted, batch = self._prepare(state, batch)
        batch = shard_batch(self._setup, batch)
        if self._setting != "off":
            self._audit_once(state, batch)
        try:
            return jitted(state, batch)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise self._exhausted(state, batch, error) from error

    def _exhausted(self, state: TrainState, batch: Tree, error: Exception) -> MemoryError:
        """With a table of what the step holds."""
        from zerojax.plan import exhausted  # which stands on the modules of the plan: only where it is needed

        program = self._program(state.definition)
        memory = self.memory(state, batch)
        return exhausted.explained(self._setup, memory, program.num_microbatches, program.prefetch, error)

    def memory(self, state: TrainState, batch: Tree) -> Memory:
        """What a device holds when memory is fullest in this step, by formula: terms, and a table when printed.

        Args:
            state: arrays, also donated ones, or avals.
            batch: arrays or avals.

        Cost: the step is traced, and its trace is read: seconds. Nothing is compiled.
        """
        from zerojax.plan.memory import step_memory

        avals, prefetch = jax.tree.map(_aval, state), self._program(state.definition).prefetch
        return step_memory(self._setup, avals, self.trace(avals, batch), self._abstract(batch), prefetch)

    def _audit_once(self, state: TrainState, batch: Tree) -> None:
        """Before a program runs for the first time. It is compiled once: `jitted` finds it in JAX's cache."""
        key = (
            state.definition,
            *((a.shape, a.dtype) for a in jax.tree.leaves(batch)),
            *(a.sharding for a in jax.tree.leaves(state)),
        )
        if key not in self._audited:
            self.audit(state, batch).enforce(self._setting)
            self._audited.add(key)

    def promise(self, state: TrainState, batch: Tree) -> Promise:
        """What the step promises of itself for this state and batch: arrays, or avals (`zero.eval_init`)."""
        return self._promise(state, batch, self.trace(state, batch))

    def audit(self, state: TrainState, batch: Tree) -> Audit:
        """What the step promises beside what its compiled program does. Nothing is run. See `zerojax.audit`.

        Args:
            state: arrays or avals; also on described devices (`targets.devices`).
            batch: arrays or avals.
        """
        traced = self.trace(state, batch)
        return audit(traced, self._promise(state, batch, traced))

    def _promise(self, state: TrainState, batch: Tree, traced: Any) -> Promise:
        program = self._program(state.definition)
        args = jax.tree.leaves(state.params), state.model_state, self._abstract(batch), state.key
        counted = uses(self._setup, program, state.definition, args)
        return promise(self._setup, state, traced.jaxpr, counted, program.num_microbatches, program.prefetch)


def train_step(
    setup: Setup,
    loss_fn: Callable[..., Any],
    num_microbatches: int,
    clip_norm: float | None,
    rules: Rules,
    prefetch: int,
    setting: str,
) -> TrainStep:
    """See `Zero.train_step`."""

    def gradient(definition: Definition) -> GradientProgram:
        return gradient_program(setup, definition, loss_fn, num_microbatches, rules, prefetch)

    def build(like: TrainState) -> Callable[..., Any]:
        definition, shardings = like.definition, states.shardings(like, setup.mesh, setup.stage, setup.axes)
        program = gradient(definition)

        def step(state: TrainState, batch: Tree) -> tuple[TrainState, dict[str, Array]]:
            scale = state.loss_scale.value if state.loss_scale else jnp.float32(1)
            key = jax.random.fold_in(state.key, state.step)
            args = (jax.tree.leaves(state.params), state.model_state, batch, key, scale)
            result = gradients(setup, program, definition, args)
            norm = jnp.sqrt(result.squared_norm) / scale
            finite = jnp.isfinite(norm)
            factor = 1 / scale
            if clip_norm is not None:
                factor = factor * jnp.minimum(1, clip_norm / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))
            dtype = setup.precision.param_dtype
            scaled = [None if g is None else g.astype(dtype) * factor.astype(dtype) for g in result.grads]
            if clip_norm is None and state.loss_scale is None:
                scaled = result.grads
            grads = jax.tree.unflatten(definition.tree, scaled)
            after = apply_gradients(setup, state, shardings, grads, finite)
            kept = jax.tree.map(
                lambda n, o: n if models.is_key(n) else lax.select(finite, n, o), result.state, state.model_state
            )
            after = dataclasses.replace(after, model_state=kept)
            trained = after.master if after.master is not None else definition.trained(after.params)
            if after.master is None:
                trained = lax.with_sharding_constraint(trained, _optimizer_shardings(setup, definition))
            metrics = {
                "loss": result.loss,
                **result.metrics,
                "grad_norm": norm,
                "param_norm": jnp.sqrt(squared_norm(setup, definition, program, trained)),
                "skipped": after.skipped,
                **_learning_rate(after.opt_state),
                **({"loss_scale": after.loss_scale.value} if after.loss_scale else {}),
            }
            return after, metrics

        return step

    return TrainStep(setup, build, gradient, num_microbatches, setting)


def eval_step(setup: Setup, loss_fn: Callable[..., Any]) -> Step:
    """See `Zero.eval_step`."""

    def build(like: TrainState) -> Callable[..., Any]:
        definition = like.definition
        program = gradient_program(setup, definition, loss_fn, 1)

        def step(state: TrainState, batch: Tree) -> dict[str, Array]:
            whole = PartitionSpec()
            in_specs = (
                _leaf_specs(setup, definition, placement.shards_params(setup.stage)),
                whole,
                batch_specs(setup, batch),
                whole,
            )
            run = _manual(setup, program.evaluate, in_specs, whole)
            loss, metrics = run(jax.tree.leaves(state.params), state.model_state, batch, state.key)
            return {"loss": loss, **metrics}

        return step

    return Step(setup, build, 1, donate=False)


def _learning_rate(opt_state: Tree) -> dict[str, Array]:
    """The learning rate, where the optimizer keeps it in its state (optax.inject_hyperparams)."""
    found = [value for _, value in optax.tree.get_all_with_path(opt_state, "learning_rate")]
    scalars = [value for value in found if isinstance(value, jax.Array) and value.ndim == 0]
    return {"learning_rate": scalars[0].astype(jnp.float32)} if scalars else {}
