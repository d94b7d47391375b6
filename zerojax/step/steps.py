"""The jitted steps: they check their inputs, compute gradients inside `shard_map`, and update global arrays."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from zerojax.program import jaxprs
from zerojax.sharding.axes import REPLICATED
from zerojax.sharding.mesh import check_enclosing_mesh, warn_of_disabled_jit
from zerojax.sharding.placement import by_path, path_text
from zerojax.step import models, state as states
from zerojax.step.batch import RowsOfSet, batch_avals, check_batch, dtype_of, shard_batch, warn_of_keys
from zerojax.step.compiler_options import (
    TracedWithHostArguments,
    compiler_options,
    forgets_memories,
    in_host_memory,
    offload_options,
)
from zerojax.step.config import StepSettings, ZeroConfig
from zerojax.step.gradient import DeviceGradient, LossArgs, args_specs, compute_gradients, device_gradient
from zerojax.step.loss_traces import explained_by_rows
from zerojax.step.losses import LossFn, Sums, explaining_errors, in_evaluation_mode
from zerojax.step.optimizers import scheduled_learning_rate
from zerojax.step.over_data import shard_map_over_data
from zerojax.step.state import StateLayout, TrainState
from zerojax.step.update import StepGrads, apply_gradients
from zerojax.step.whole_batch import Purpose, over_whole_batch
from zerojax.utils.text import SPACE, abbreviate, fold, mesh_text
from zerojax.utils.typing import Array, PyTree

Metrics = dict[str, Array]


class Step:
    """A jitted step over (state, batch). Its inputs are checked before it is traced; it compiles once per shape.

    `trace(state, batch)` and `lower(state, batch)` are those of the jitted function. They take avals with shardings
    (`zero.eval_init`) as well as arrays.

    Args:
        config: mesh, axes, stage and precision.
        settings: the settings of the step.
        build: `build(state)` returns the function to jit.
        loss_name: name of the loss function.
    """

    donates = False  # whether the step donates the state

    def __init__(
        self,
        config: ZeroConfig,
        settings: StepSettings,
        build: Callable[[TrainState], Callable[..., PyTree]],
        loss_name: str,
    ):
        self.config, self.settings, self._build, self.loss_name = config, settings, build, loss_name
        self._jitted: dict[StateLayout, jax.stages.Wrapped] = {}
        self._agreed: set[tuple[Hashable, ...]] = set()

    def __repr__(self) -> str:
        """The name of the loss function, the stage, and the settings that are not the default."""
        settings = [f"{name}={value}" for name, value in self._changed_texts().items()]
        where = f"{self.config.stage.title} on a mesh of {mesh_text(dict(self.config.mesh.shape))}"
        return f"{type(self).__name__}({', '.join([self.loss_name, where, *settings])})"

    def _changed_texts(self) -> dict[str, str]:
        return self.settings.changed_texts()

    def _agree(self, state: TrainState, batch: PyTree) -> None:
        """Compares the inputs and the program with those of the other processes, before they first run together.

        Otherwise they would wait for each other in collectives, or average gradients that do not belong together.
        """
        leaves, tree = jax.tree_util.tree_flatten_with_path(batch)
        arrays = {path_text(path) or "the batch": f"{dtype_of(a)}{list(np.shape(a))}" for path, a in leaves}
        if (key := (state.layout, tree, *arrays.values())) in self._agreed:
            return
        batch_texts = {f"batch: {name}": text for name, text in arrays.items()}
        fix = "start all processes with the same configuration, and pass equally many rows in each"
        agreement = self.config.agreement
        assert agreement is not None
        agreement.agree_on(self.config.texts() | self.settings.texts() | batch_texts, "steps", fix, "the step")
        program = self.lower(state, batch).as_text().splitlines()
        agreement.agree_on_lines(program, "programs", "the same model, loss and optimizer in all processes", "the step")
        self._agreed.add(key)

    def _checked(self, state: TrainState, batch: PyTree) -> jax.stages.Wrapped:
        """Checks the inputs, and returns the jitted function for this kind of state."""
        check_enclosing_mesh(self.config.mesh)
        states.check_is_state(state, batch)
        states.check_not_donated(state)
        check_batch(self.config, batch, self.settings.num_microbatches)
        if state.layout not in self._jitted:
            warn_of_disabled_jit()
            _check_stored(self.config, state)
            self._jitted[state.layout] = self._jit(state, batch)
        return self._jitted[state.layout]

    def _jit(self, state: TrainState, batch: PyTree) -> jax.stages.Wrapped:
        """The jitted function, with the compiler options of this step.

        Whether a step offloads activations is seen in its trace: policies and the model itself may do so too. JAX keeps
        the trace for the first call. An evaluation reads slices of parameters in host memory, and moves nothing there.
        """
        donated = (0,) if self.donates else ()
        jit = functools.partial(jax.jit, self._build(state), donate_argnums=donated, keep_unused=True)
        if self._is_described_host(state):
            jit = functools.partial(jit, in_shardings=(states.shardings(self.config, state), None))
        options = compiler_options(self.config, state.layout.leaves)
        jitted, to_offload = jit(compiler_options=options), offload_options(self.config)
        if to_offload:
            with explaining_errors(self.config.precision):
                traced = self._trace(jitted, state, batch)
            if self.config.offloads_params or jaxprs.offloads(traced.jaxpr):
                return jit(compiler_options={**(options or {}), **to_offload})
        return jitted

    def __call__(self, state: TrainState, batch: PyTree, *others: object) -> PyTree:
        states.check_is_state(state, batch)
        if others:
            raise ValueError(
                f"step: it takes the state and one batch\n  got:      {len(others)} further arguments\n"
                f"  fix:      step(state, {{'x': x, 'y': y}}), and in the loss batch['x'] and batch['y']"
            )
        if self.config.spans_processes:
            self._agree(state, batch)
        return self._run(self._checked(state, batch), state, shard_batch(self.config, batch))

    def _run(self, jitted: Callable[..., PyTree], state: TrainState, batch: PyTree) -> PyTree:
        """Runs the jitted function."""
        with explaining_errors(self.config.precision):
            return jitted(self._in_program(state), batch)

    def _in_program(self, state: TrainState) -> TrainState:
        """The state as the compiled step takes it."""
        return self.config.memory.in_program(self.config, state, self.donates)

    def trace(self, state: TrainState, batch: PyTree) -> jax.stages.Traced:
        """Traces the step, as `jax.jit(...).trace` does. Nothing is compiled.

        Args:
            state, batch: arrays or avals.
        """
        return self._trace(self._checked(state, batch), state, batch)

    def _trace(self, jitted: jax.stages.Wrapped, state: TrainState, batch: PyTree) -> jax.stages.Traced:
        if not self._is_described_host(state):
            return jitted.trace(self._in_program(state), batch_avals(self.config, batch))
        in_host = states.in_host(self.config, state)
        traced = jitted.trace(in_host_memory(state, in_host), batch_avals(self.config, batch))
        return cast("jax.stages.Traced", TracedWithHostArguments(traced, jax.tree.leaves(in_host)))

    def _is_described_host(self, state: TrainState) -> bool:
        """Whether a part of the state is in the host memory of devices that are only described, and have none."""
        return self.config.reads_host and forgets_memories(state.step.sharding)

    def lower(self, state: TrainState, batch: PyTree, **kwargs: Any) -> jax.stages.Lowered:
        """Lowers the step, as `jax.jit(...).lower` does.

        Args:
            state, batch: arrays or avals.
            kwargs: options of JAX, such as `lowering_platforms`.
        """
        with explaining_errors(self.config.precision):
            return self.trace(state, batch).lower(**kwargs)


def _check_stored(config: ZeroConfig, state: TrainState) -> None:
    """Raises ValueError if the state has other arrays than the stage stores for the parameters and the optimizer."""
    layout, stage = state.layout, config.stage
    shapes = [leaf.padding(stage.shards_params).stored_shape(leaf.shape) for leaf in layout.leaves]
    params, tree = jax.tree.flatten(state.params)
    as_stored = lambda a, shape: jax.ShapeDtypeStruct(shape, a.dtype)
    _check_same("parameters do", state.params, tree.unflatten(map(as_stored, params, shapes)))
    created, structure = jax.tree.flatten(jax.eval_shape(layout.tx.init, layout.trained_avals()))
    zeros = layout.optimizer_paddings(config.optimizer_axes, stage.shards_optimizer)
    shapes = [p.stored_shape(a.shape) for p, a in zip(zeros, created, strict=True)]
    _check_same("optimizer state does", state.opt_state, structure.unflatten(map(as_stored, created, shapes)))


def _check_same(what: str, state: PyTree, want: PyTree) -> None:
    rows = lambda tree: {path: (tuple(a.shape), a.dtype) for path, a in by_path(tree).items()}
    got, wanted = rows(state), rows(want)
    differ = [path for path in sorted(got.keys() | wanted.keys()) if got.get(path) != wanted.get(path)]
    if differ:
        path = differ[0]
        rest = [each.text.replace(SPACE, " ") for each in fold(differ[1:], [0] * (len(differ) - 1))]
        more = f"\n  more:     {len(differ) - 1:,} other leaves: {abbreviate(rest, separator=', ')}" if rest else ""
        raise ValueError(
            f"state: the {what} not match the model and the optimizer\n"
            f"  got:      {path}: {got.get(path, 'missing')}\n"
            f"  want:     {wanted.get(path, 'no such leaf')}{more}\n"
            f"  fix:      pass a state of zero.init for the same model and optimizer, and not state.logical()"
        )


def _name_of_loss(loss_fn: LossFn) -> str:
    """The name of a function, also of a `functools.partial` of it, or that of a callable's type."""
    while isinstance(loss_fn, functools.partial):
        loss_fn = loss_fn.func
    return getattr(loss_fn, "__qualname__", type(loss_fn).__name__).replace("<locals>.", "")


class _CheckedLoss:
    """The user's loss in a step: it is checked when the step is traced for the first time."""

    def __init__(self, config: ZeroConfig, settings: StepSettings, loss_fn: LossFn):
        self._config, self._settings, self._loss_fn = config, settings, loss_fn
        self._seen: set[tuple[StateLayout, Purpose]] = set()

    def gradient(self, layout: StateLayout) -> DeviceGradient:
        """The gradient of the loss for such parameters."""
        return device_gradient(self._config, layout, self._loss_fn, self._settings)

    @contextlib.contextmanager
    def over_batch(self, gradient: DeviceGradient, args: LossArgs, purpose: Purpose) -> Iterator[DeviceGradient]:
        """The gradient of a loss whose outputs are those of the whole batch; errors of the loss are explained."""
        key = gradient.layout, purpose
        is_seen = key in self._seen
        constraints = bool(self._config.compiler_axes) and not is_seen
        with explained_by_rows(gradient, args):
            checked = over_whole_batch(gradient, args, purpose, constraints=constraints, is_seen=is_seen)
            if purpose is Purpose.TRAINING and not is_seen:
                warn_of_keys(args.batch)
            self._seen.add(key)
            yield checked.gradient


class TrainStep(Step):
    """A `Step` that returns (state, metrics).

    Args:
        config: mesh, axes, stage and precision.
        settings: the settings of the step.
        loss_fn: the loss function of the user.
    """

    donates = True

    def __init__(self, config: ZeroConfig, settings: StepSettings, loss_fn: LossFn):
        self._loss = _CheckedLoss(config, settings, loss_fn)
        super().__init__(config, settings, self._build_step, _name_of_loss(loss_fn))

    def gradient(self, layout: StateLayout) -> DeviceGradient:
        """The gradient of the loss for such parameters."""
        return self._loss.gradient(layout)

    def _build_step(self, like: TrainState) -> Callable[[TrainState, PyTree], tuple[Any, ...]]:
        layout = like.layout
        avals = self.config.memory.in_program(self.config, states.with_shardings(self.config, like))
        shardings = jax.tree.map(lambda a: a.sharding, avals)
        gradient, clip_norm = self.gradient(layout), self.settings.clip_norm

        def step(state: TrainState, batch: PyTree) -> tuple[Any, ...]:
            # Compute the gradient.
            scale = state.loss_scale.value if state.loss_scale else jnp.float32(1)
            key = jax.random.fold_in(state.key, state.step)
            args = LossArgs(jax.tree.leaves(state.params), state.model_state, batch, key)
            with self._loss.over_batch(gradient, args, Purpose.TRAINING) as of_batch:
                result = compute_gradients(of_batch, args, scale)

            # Clip, and update the state unless a gradient is not finite.
            norm = jnp.sqrt(result.squared_norm) / scale
            finite = jnp.isfinite(norm)
            factor = 1 / scale
            if clip_norm is not None:
                factor = factor * jnp.minimum(1, clip_norm / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))
            is_one = clip_norm is None and state.loss_scale is None
            grads = StepGrads(
                [g for g in result.grads if g is not None],
                None if is_one else factor,
                finite,
                result.loss,
                result.divisor,
            )
            after, params_norm, pending = apply_gradients(gradient, state, shardings, grads)
            keep = lambda new, old: new if models.is_key(new) else lax.select(finite, new, old)
            model_state = jax.tree.map(keep, result.model_state, state.model_state)
            after = dataclasses.replace(after, model_state=model_state)

            # Report.
            metrics = {
                "loss": result.loss,
                **result.metrics,
                "grad_norm": norm,
                "param_norm": jnp.sqrt(params_norm),
                "skipped": after.skipped,
                **_learning_rate(layout, state.opt_state, after.opt_state),
                **({"loss_scale": after.loss_scale.value} if after.loss_scale else {}),
            }
            return (after, metrics) if pending is None else (after, metrics, pending)

        return step

    def _run(self, jitted: Callable[..., PyTree], state: TrainState, batch: PyTree) -> PyTree:
        after, metrics, *pending = super()._run(jitted, state, batch)
        if pending:
            after, norm = pending[0].update.finish(self.gradient(state.layout), state, after, pending[0])
            metrics = {**metrics, "param_norm": norm}
        return after, metrics


def _learning_rate(layout: StateLayout, before: PyTree, after: PyTree) -> Metrics:
    """The learning rate, if the optimizer has it in its state (optax.inject_hyperparams) or in a schedule."""
    found = [value for _, value in optax.tree.get_all_with_path(after, "learning_rate")]
    scalars = [value for value in found if isinstance(value, jax.Array) and value.ndim == 0]
    rate = scalars[0] if scalars else scheduled_learning_rate(layout.tx, before)
    return {} if rate is None else {"learning_rate": rate.astype(jnp.float32)}


class EvalStep(Step):
    """A `Step` that returns the loss and the metrics of a batch; `zerojax.evaluate` calls `rows` instead.

    Args:
        config, settings, loss_fn: as of `TrainStep`. An nnx.Module is put into evaluation mode.

    Attributes:
        rows: a step over (state, `RowsOfSet`) that returns the `Sums` of the loss and the metrics.
    """

    def __init__(self, config: ZeroConfig, settings: StepSettings, loss_fn: LossFn):
        self._loss = _CheckedLoss(config, settings, in_evaluation_mode(loss_fn))
        name = _name_of_loss(loss_fn)
        super().__init__(config, settings, self._build_means, name)
        self.rows = Step(config, settings, self._build_sums, name)

    def _build_means(self, like: TrainState) -> Callable[[TrainState, PyTree], Metrics]:
        gradient = self._loss.gradient(like.layout)

        def step(state: TrainState, batch: PyTree) -> Metrics:
            args = LossArgs(jax.tree.leaves(state.params), state.model_state, batch, state.key)
            with self._loss.over_batch(gradient, args, Purpose.BATCH) as of_batch:
                loss, metrics = self._on_devices(of_batch, of_batch.evaluate, args)
            return {"loss": loss, **metrics}

        return step

    def _build_sums(self, like: TrainState) -> Callable[[TrainState, RowsOfSet], Sums]:
        gradient = self._loss.gradient(like.layout)

        def step(state: TrainState, rows: RowsOfSet) -> Sums:
            args = LossArgs(jax.tree.leaves(state.params), state.model_state, rows, state.key)
            with self._loss.over_batch(gradient, args._replace(batch=rows.batch), Purpose.DATA_SET) as of_set:
                return self._on_devices(of_set, of_set.evaluate_rows, args)

        return step

    def _on_devices(self, gradient: DeviceGradient, fn: Callable[[LossArgs], PyTree], args: LossArgs) -> PyTree:
        """Runs a function on each device's part of the arguments."""
        return shard_map_over_data(self.config, fn, (args_specs(gradient, args.batch),), REPLICATED)(args)
