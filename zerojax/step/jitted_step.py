"""A jitted function of a training state and a batch, whose inputs are checked before it is traced."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from zerojax.program import jaxprs
from zerojax.sharding.mesh import check_enclosing_mesh, warn_of_disabled_jit
from zerojax.sharding.placement import path_text
from zerojax.step import state as states
from zerojax.step.batch import batch_avals, check_batch, dtype_of, shard_batch
from zerojax.step.compiler_options import (
    TracedWithHostArguments,
    compiler_options,
    forgets_memories,
    in_host_memory,
    offload_options,
)
from zerojax.step.config import StepSettings, ZeroConfig
from zerojax.step.loss_errors import explaining_errors
from zerojax.step.state import TrainState
from zerojax.utils.text import mesh_text
from zerojax.utils.typing import PyTree


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
        if (key := (state.layout, tree, *arrays.values())) in self._agreed:
            return
        batch_texts = {f"batch: {name}": text for name, text in arrays.items()}
        fix = "start all processes with the same configuration, and pass equally many rows in each"
        agreement = self.config.agreement
        agreement.agree_on(self.config.texts() | self.settings.texts() | batch_texts, "steps", fix, "the step")
        program = self.lower(state, batch).as_text().splitlines()
        agreement.agree_on_lines(program, "programs", "the same model, loss and optimizer in all processes", "the step")
        self._agreed.add(key)

    def _checked(self, state: TrainState, batch: PyTree) -> Any:
        """Checks the inputs, and returns the jitted function for this kind of state."""
        check_enclosing_mesh(self.config.mesh)
        states.check_is_state(state, batch)
        states.check_not_donated(state)
        check_batch(self.config, batch, self.settings.num_microbatches)
        key = state.layout
        if key not in self._jitted:
            warn_of_disabled_jit()
            states.check_stored(self.config, state)
            self._jitted[key] = self._jit(state, batch)
        return self._jitted[key]

    def _jit(self, state: TrainState, batch: PyTree) -> Any:
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

    def __call__(self, state: TrainState, batch: PyTree, *others: Any) -> Any:
        check_arguments(state, batch, others)
        if self.config.spans_processes:
            self._agree(state, batch)
        return self._run(self._checked(state, batch), state, shard_batch(self.config, batch))

    def _run(self, jitted: Callable[..., Any], state: TrainState, batch: PyTree) -> Any:
        """Runs the jitted function."""
        with explaining_errors(self.config.precision):
            return jitted(state, batch)

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
        with explaining_errors(self.config.precision):
            return self.trace(state, batch).lower(**kwargs)


def check_arguments(state: Any, batch: PyTree, others: tuple[Any, ...]) -> None:
    """Raises ValueError if a step was called with something else than a state and a batch."""
    states.check_is_state(state, batch)
    if others:
        raise ValueError(
            f"step: it takes the state and one batch\n  got:      {len(others)} further arguments\n"
            f"  fix:      step(state, {{'x': x, 'y': y}}), and in the loss batch['x'] and batch['y']"
        )


def name_of_loss(loss_fn: Callable[..., Any]) -> str:
    """The name of a function, also of a `functools.partial` of it, or that of a callable's type."""
    while isinstance(loss_fn, functools.partial):
        loss_fn = loss_fn.func
    return getattr(loss_fn, "__qualname__", type(loss_fn).__name__).replace("<locals>.", "")
