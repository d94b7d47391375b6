"""The jitted training and evaluation steps: gradients inside `shard_map`, then the update on global arrays."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec

from zerojax.analysis import jaxpr_collectives, utilisation
from zerojax.analysis.host_arguments import TracedWithHostArguments, forgets_memories, in_host_memory
from zerojax.audit.audit import audit_step
from zerojax.audit.expectation import Expectation, expect
from zerojax.audit.findings import Audit
from zerojax.processes.agreement import agree_on, agree_on_lines
from zerojax.report.memory import Memory, step_memory
from zerojax.report.out_of_memory import out_of_memory_error
from zerojax.sharding.mesh import check_enclosing_mesh
from zerojax.sharding.placement import path_text
from zerojax.step import models, state as states
from zerojax.step.batch import RowsOfSet, batch_avals, batch_specs, check_batch, dtype_of, shard_batch
from zerojax.step.config import ZeroConfig, compiler_options, leaf_specs, shard_map_over_data
from zerojax.step.gradient import DeviceGradient, compute_gradients, device_gradient
from zerojax.step.loss_errors import in_words_of_the_user
from zerojax.step.loss_traces import (
    Use,
    check_loss,
    check_means_over_rows,
    traced_loss,
    uses,
    warn_of_local_statistics,
    warn_of_sums,
)
from zerojax.step.offload_options import offload_options
from zerojax.step.settings import StepSettings
from zerojax.step.state import Definition, TrainState
from zerojax.step.update import apply_gradients
from zerojax.text import mesh_text
from zerojax.typing import Array, Aval, PyTree


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
        build: Callable[[TrainState], Callable[..., Any]],
        loss_name: str,
    ):
        self.config, self.settings, self._build, self.loss_name = config, settings, build, loss_name
        self._jitted: dict[Any, Any] = {}
        self._agreed: set[Any] = set()

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
        if (key := (state.definition, tree, *arrays.values())) in self._agreed:
            return
        batch_texts = {f"batch: {name}": text for name, text in arrays.items()}
        fix = "start all processes with the same configuration, and pass equally many rows in each"
        agree_on(self.config.texts() | self.settings.texts() | batch_texts, "steps", fix, "the step")
        program = self.lower(state, batch).as_text().splitlines()
        agree_on_lines(program, "programs", "the same model, loss and optimizer in all processes", "the step")
        self._agreed.add(key)

    def _checked(self, state: TrainState, batch: PyTree) -> Any:
        """Checks the inputs, and returns the jitted function for this kind of state."""
        check_enclosing_mesh(self.config.mesh)
        states.check_not_donated(state)
        check_batch(self.config, batch, self.settings.num_microbatches)
        key = state.definition
        if key not in self._jitted:
            states.check_stored(self.config, state)
            self._jitted[key] = self._jit(state, batch)
        return self._jitted[key]

    def _jit(self, state: TrainState, batch: PyTree) -> Any:
        """The jitted function, with the compiler options of this step.

        Whether a step offloads activations is seen in its trace: policies and the model itself may do so too. JAX keeps
        the trace for the first call.
        """
        donated = (0,) if self.donates else ()
        jit = functools.partial(jax.jit, self._build(state), donate_argnums=donated, keep_unused=True)
        if self._is_described_host(state):
            jit = functools.partial(jit, in_shardings=(states.shardings(self.config, state), None))
        options = compiler_options(self.config, state.definition.leaves)
        jitted, to_offload = jit(compiler_options=options), offload_options(self.config)
        if to_offload:
            with in_words_of_the_user(self.config.precision):
                traced = self._trace(jitted, state, batch)
            if jaxpr_collectives.offloaded_bytes(traced.jaxpr):
                return jit(compiler_options={**(options or {}), **to_offload})
        return jitted

    def __call__(self, state: TrainState, batch: PyTree, *others: Any) -> Any:
        _check_one_batch(others)
        if self.config.spans_processes:
            self._agree(state, batch)
        jitted = self._checked(state, batch)
        with in_words_of_the_user(self.config.precision):
            return jitted(state, shard_batch(self.config, batch))

    def trace(self, state: TrainState, batch: PyTree) -> Any:
        """Traces the step, as `jax.jit(...).trace` does. Nothing is compiled.

        Args:
            state, batch: arrays or avals.
        """
        return self._trace(self._checked(state, batch), state, batch)

    def _trace(self, jitted: Any, state: TrainState, batch: PyTree) -> Any:
        if not self._is_described_host(state):
            return jitted.trace(state, batch_avals(self.config, batch))
        in_host = states.in_host(self.config, state)
        traced = jitted.trace(in_host_memory(state, in_host), batch_avals(self.config, batch))
        return TracedWithHostArguments(traced, jax.tree.leaves(in_host))

    def _is_described_host(self, state: TrainState) -> bool:
        """Whether a part of the state is in the host memory of devices that are only described, and have none."""
        return self.config.offloads_optimizer and forgets_memories(state.step.sharding)

    def lower(self, state: TrainState, batch: PyTree, **kwargs: Any) -> Any:
        """Lowers the step, as `jax.jit(...).lower` does.

        Args:
            state, batch: arrays or avals.
            kwargs: options of JAX, such as `lowering_platforms`.
        """
        with in_words_of_the_user(self.config.precision):
            return self.trace(state, batch).lower(**kwargs)


def _check_one_batch(others: tuple[Any, ...]) -> None:
    """Raises ValueError if a step was called with more than a state and a batch."""
    if others:
        raise ValueError(
            f"step: it takes the state and one batch\n  got:      {len(others)} further arguments\n"
            f"  fix:      step(state, {{'x': x, 'y': y}}), and in the loss batch['x'] and batch['y']"
        )


def _aval(a: Array) -> Aval:
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding)


class TrainStep(Step):
    """A `Step` that returns (state, metrics), and can report its memory and audit its compiled program.

    Args:
        config: mesh, axes, stage and precision.
        settings: the settings of the step.
        build: `build(state)` returns the function to jit.
        gradient_of: `gradient_of(definition)` returns the `DeviceGradient` of the step.
        audit_setting: 'error' or 'warn' audits each newly compiled program, and raises or warns if an expectation is
            broken; 'off' does not audit.
        loss_name: name of the loss function.
    """

    donates = True

    def __init__(
        self,
        config: ZeroConfig,
        settings: StepSettings,
        build: Callable[[TrainState], Callable[..., Any]],
        gradient_of: Callable[[Definition], DeviceGradient],
        audit_setting: str,
        loss_name: str,
    ):
        self._gradient_of, self._audit_setting = gradient_of, audit_setting
        self._audited: set[Any] = set()
        super().__init__(config, settings, build, loss_name)

    def _changed_texts(self) -> dict[str, str]:
        audit = {} if self._audit_setting == "off" else {"audit": repr(self._audit_setting)}
        return super()._changed_texts() | audit

    def __call__(self, state: TrainState, batch: PyTree, *others: Any) -> Any:
        _check_one_batch(others)
        if self.config.spans_processes:
            self._agree(state, batch)
        jitted = self._checked(state, batch)
        batch = shard_batch(self.config, batch)
        if self._audit_setting != "off":
            self._audit_once(state, batch)
        try:
            with in_words_of_the_user(self.config.precision):
                return jitted(state, batch)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            memory = self.memory(state, batch)
            raise out_of_memory_error(self.config, self.settings, memory, error) from error

    def memory(self, state: TrainState, batch: PyTree) -> Memory:
        """Estimates the peak memory of this step on one device, without compiling it.

        Args:
            state: arrays, which may have been donated, or avals.
            batch: arrays or avals.

        Returns:
            A `Memory`: the terms of the peak in bytes, and a table when printed.

        Cost: traces the step and reads the trace, which takes seconds.
        """
        avals = jax.tree.map(_aval, state)
        return step_memory(self.config, self.settings, avals, self.trace(avals, batch), batch_avals(self.config, batch))

    def _audit_once(self, state: TrainState, batch: PyTree) -> None:
        """Audits a program before it runs for the first time. It compiles once: the step finds it in JAX's cache."""
        key = (
            state.definition,
            *((a.shape, a.dtype) for a in jax.tree.leaves(batch)),
            *(a.sharding for a in jax.tree.leaves(state)),
        )
        if key not in self._audited:
            self.audit(state, batch).enforce(self._audit_setting)
            self._audited.add(key)

    def expectation(self, state: TrainState, batch: PyTree) -> Expectation:
        """What the compiled step is expected to do, by the formulas of its stage.

        Args:
            state: arrays or avals (`zero.eval_init`).
            batch: arrays or avals.
        """
        return self._expectation(state, batch, self.trace(state, batch))

    def audit(self, state: TrainState, batch: PyTree) -> Audit:
        """Compares what the step is expected to do with its compiled program. Nothing runs. See `audit_step`.

        Args:
            state: arrays or avals, also for described devices (`targets.devices`).
            batch: arrays or avals.

        Returns:
            An `Audit`: one finding for each expectation, and a table when printed.

        Cost: compiles the step, if it is not in JAX's cache, and reads the text of the program.
        """
        traced = self.trace(state, batch)
        return audit_step(traced, self._expectation(state, batch, traced))

    def _expectation(self, state: TrainState, batch: PyTree, traced: Any) -> Expectation:
        return expect(self.config, self.settings, state, traced.jaxpr, self.uses(state, batch))

    def uses(self, state: TrainState, batch: PyTree) -> list[tuple[Use, ...]]:
        """Where each leaf of the parameters is used in the forward pass. Nothing is compiled.

        Args:
            state: arrays or avals.
            batch: arrays or avals.

        Returns:
            For each leaf, in flattening order, the segments of the loss that read it. A segment is a part of the loss
            that reads the weights of one unit. A loop over stacked layers is one segment, and so is a lookup of rows in
            a table that is not gathered.
        """
        return uses(self._gradient_of(state.definition), self._loss_args(state, batch))

    def model_flops(self, state: TrainState, batch: PyTree) -> int:
        """The flops of the model in a step on all devices: three times those of the loss, without recomputation.

        Args:
            state: arrays or avals.
            batch: arrays or avals.

        Raises:
            ValueError: if the flops of a kernel are unknown, or if a product runs an unknown number of times.

        Source: Chowdhery et al., "PaLM", appendix B, arXiv 2204.02311.
        """
        jaxpr, _ = traced_loss(self._gradient_of(state.definition), self._loss_args(state, batch))
        return utilisation.model_flops(jaxpr) * self.config.axes.num_devices

    def _loss_args(self, state: TrainState, batch: PyTree) -> Any:
        return jax.tree.leaves(state.params), state.model_state, batch_avals(self.config, batch), state.key


def train_step(
    config: ZeroConfig,
    loss_fn: Callable[..., Any],
    settings: StepSettings,
    audit_setting: str,
) -> TrainStep:
    """See `Zero.train_step`."""
    clip_norm, checked = settings.clip_norm, set[Definition]()

    def gradient_of(definition: Definition) -> DeviceGradient:
        return device_gradient(config, definition, loss_fn, settings)

    def build(like: TrainState) -> Callable[..., Any]:
        definition, shardings = like.definition, states.shardings(config, like)
        gradient = gradient_of(definition)

        def step(state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Array]]:
            scale = state.loss_scale.value if state.loss_scale else jnp.float32(1)
            key = jax.random.fold_in(state.key, state.step)
            args = (jax.tree.leaves(state.params), state.model_state, batch, key, scale)
            if definition not in checked:  # a step may be traced more than once
                if config.other_axes:
                    check_loss(gradient, args[:-1])
                warn_of_local_statistics(gradient, args[:-1])
                warn_of_sums(gradient, args[:-1])
                checked.add(definition)
            result = compute_gradients(gradient, args)
            norm = jnp.sqrt(result.squared_norm) / scale
            finite = jnp.isfinite(norm)
            factor = 1 / scale
            if clip_norm is not None:
                factor = factor * jnp.minimum(1, clip_norm / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))
            grads = [g for g in result.grads if g is not None]
            is_one = clip_norm is None and state.loss_scale is None
            after, params_norm = apply_gradients(
                gradient, state, shardings, grads, None if is_one else factor, finite, result.loss
            )
            keep = lambda new, old: new if models.is_key(new) else lax.select(finite, new, old)
            model_state = jax.tree.map(keep, result.model_state, state.model_state)
            after = dataclasses.replace(after, model_state=model_state)
            metrics = {
                "loss": result.loss,
                **result.metrics,
                "grad_norm": norm,
                "param_norm": jnp.sqrt(params_norm),
                "skipped": after.skipped,
                **_learning_rate(after.opt_state),
                **({"loss_scale": after.loss_scale.value} if after.loss_scale else {}),
            }
            return after, metrics

        return step

    return TrainStep(config, settings, build, gradient_of, audit_setting, _name(loss_fn))


class EvalStep(Step):
    """A `Step` that returns the loss and the metrics of a batch; `zerojax.evaluate` calls `rows` instead.

    Attributes:
        rows: a step over (state, `RowsOfSet`) that returns the sums and the weights of the loss and the metrics.
    """

    def __init__(
        self,
        config: ZeroConfig,
        settings: StepSettings,
        gradient_of: Callable[[Definition], DeviceGradient],
        loss_name: str,
    ):
        super().__init__(config, settings, self._build_means, loss_name)
        self._gradient_of = gradient_of
        self.rows = Step(config, settings, self._build_sums, loss_name)

    def _build_means(self, like: TrainState) -> Callable[..., Any]:
        gradient = self._gradient_of(like.definition)

        def step(state: TrainState, batch: PyTree) -> dict[str, Array]:
            args = (jax.tree.leaves(state.params), state.model_state, batch, state.key)
            if self.config.other_axes:
                check_loss(gradient, args)
            loss, metrics = self._on_devices(gradient, gradient.evaluate, args)
            return {"loss": loss, **metrics}

        return step

    def _build_sums(self, like: TrainState) -> Callable[..., Any]:
        gradient, checked = self._gradient_of(like.definition), set[bool]()

        def step(state: TrainState, rows: RowsOfSet) -> dict[str, models.Weighted]:
            args = (jax.tree.leaves(state.params), state.model_state, rows, state.key)
            if not checked:
                of_batch = (*args[:2], rows.batch, args[3])
                check_means_over_rows(gradient, of_batch)
                if self.config.other_axes:
                    check_loss(gradient, of_batch)
                checked.add(True)
            loss, metrics = self._on_devices(gradient, gradient.evaluate_rows, args)
            return {"loss": loss, **metrics}

        return step

    def _on_devices(self, gradient: DeviceGradient, fn: Callable[..., Any], args: Any) -> Any:
        """Runs a function of (parameter leaves, model state, batch, key) on each device's part of them."""
        replicated: Any = PartitionSpec()
        in_specs = (
            leaf_specs(self.config, gradient.definition.leaves, self.config.stage.shards_params),
            replicated,
            batch_specs(self.config.axes, args[2]),
            replicated,
        )
        return shard_map_over_data(self.config, fn, in_specs, replicated)(*args)


def eval_step(config: ZeroConfig, loss_fn: Callable[..., Any], settings: StepSettings) -> EvalStep:
    """See `Zero.eval_step`."""
    evaluated = models.in_evaluation_mode(loss_fn)

    def gradient_of(definition: Definition) -> DeviceGradient:
        return device_gradient(config, definition, evaluated, settings)

    return EvalStep(config, settings, gradient_of, _name(loss_fn))


def _name(loss_fn: Callable[..., Any]) -> str:
    """The name of a function, also of a `functools.partial` of it, or that of a callable's type."""
    while isinstance(loss_fn, functools.partial):
        loss_fn = loss_fn.func
    return getattr(loss_fn, "__qualname__", type(loss_fn).__name__).replace("<locals>.", "")


def _learning_rate(opt_state: PyTree) -> dict[str, Array]:
    """The learning rate, if the optimizer has it in its state (optax.inject_hyperparams)."""
    found = [value for _, value in optax.tree.get_all_with_path(opt_state, "learning_rate")]
    scalars = [value for value in found if isinstance(value, jax.Array) and value.ndim == 0]
    return {"learning_rate": scalars[0].astype(jnp.float32)} if scalars else {}
