"""Zero: a mesh, a stage and a precision, and from them the state and the steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from zerojax import train_step as steps
from zerojax.audit.findings import check_setting
from zerojax.report import placement as report
from zerojax.sharding import placement
from zerojax.sharding.mesh import data_axes
from zerojax.sharding.placement import Overrides
from zerojax.sharding.precision import Precision, resolve
from zerojax.sharding.stages import Stage
from zerojax.step import config as configs, models, state as states
from zerojax.step.config import ZeroConfig
from zerojax.step.gradient import gradient_program, gradients
from zerojax.step.settings import StepSettings
from zerojax.step.state import Definition, TrainState
from zerojax.train_step import Step, TrainStep
from zerojax.transform.remat import RematRules, Setting

if TYPE_CHECKING:
    from zerojax.checkpoints import Checkpoints


class Zero:
    """ZeRO over a mesh.

    Args:
        mesh: axes of type Auto, for example of `zerojax.make_mesh`.
        stage: 0 (data parallel), 1 (P_os), 2 (P_os+g) or 3 (P_os+g+p).
        precision: a preset ('fp32', 'bf16', 'bf16_reduce_fp32', 'fp16') or a `Precision`.
        shard_axes: mesh axes that model states are sharded over.
        replica_axes: mesh axes that split the batch too, but over which model states are replicated. By default
            'replica' if the mesh has it.
        shard_dims: glob on leaf paths -> the dim to shard, or None to replicate. Without an override: the first dim
            that the number of shards divides.
        stacked: globs of leaves whose dim 0 counts layers. Stacks made by a scan or by a vmap over keys are found.
        frozen: globs of leaves that are not trained: no gradient, no optimizer state, no reduce-scatter.
        units: globs on leading parts of paths; the leaves below each match are gathered together. By default a unit
            ends at the first numbered component of the path.
        partition_specs: glob on leaf paths -> PartitionSpec over other axes ('model'), which ZeRO leaves to the
            compiler. By default a leaf's spec is what its Flax metadata says, under the logical axis rules in force at
            `init`.

    Raises:
        ValueError: an unknown stage, precision or axis.
    """

    def __init__(
        self,
        mesh: Any,
        stage: int = 3,
        precision: str | Precision = "fp32",
        *,
        shard_axes: Sequence[str] = ("data",),
        replica_axes: Sequence[str] | None = None,
        shard_dims: Mapping[str, int | None] | None = None,
        stacked: Sequence[str] = (),
        frozen: Sequence[str] = (),
        units: Sequence[str] = (),
        partition_specs: Mapping[str, PartitionSpec] | None = None,
    ):
        if replica_axes is None:
            replica_axes = tuple(name for name in ("replica",) if name in mesh.axis_names)
        axes = data_axes(mesh, tuple(shard_axes), tuple(replica_axes))
        self.config = ZeroConfig(mesh, axes, Stage.of(stage), resolve(precision))
        self.overrides = Overrides(
            dict(shard_dims or {}), tuple(stacked), tuple(frozen), tuple(units), dict(partition_specs or {})
        )

    def init(self, create_model: Callable[..., Any], tx: optax.GradientTransformation, seed: int = 0) -> TrainState:
        """The training state, sharded from birth: no device and no host holds it whole.

        Args:
            create_model: `create_model(rngs=nnx.Rngs)` returns an nnx.Module (a module class will do), or
                `create_model(key)` returns Linen variables or a tree of parameters.
            tx: any optax transformation.
            seed: of the parameters. Their values do not depend on mesh or stage.

        Raises:
            ValueError: no parameters, a leaf that is no array, a pattern, a dim or an annotation that does not fit.
        """
        return self._build(create_model, tx, seed)[0]()

    def eval_init(
        self, create_model: Callable[..., Any], tx: optax.GradientTransformation, seed: int = 0
    ) -> TrainState:
        """The state that `init` would make, as avals with shardings. Nothing is allocated; works on abstract meshes."""
        return self._build(create_model, tx, seed)[1]

    def _build(self, create_model: Any, tx: Any, seed: int) -> Any:
        return states.build(self.config, self.overrides, create_model, tx, seed)

    def train_step(
        self,
        loss_fn: Callable[..., Any],
        *,
        num_microbatches: int = 1,
        clip_norm: float | None = None,
        remat: Setting | Mapping[str, Setting] = "none",
        prefetch: int = 1,
        bucket_bytes: int | None = None,
        audit: str = "off",
    ) -> TrainStep:
        """A jitted `step(state, batch) -> (state, metrics)`. The state is donated and updated in place.

        Args:
            loss_fn: `loss_fn(model, batch)` or `loss_fn(model, batch, key)`, with what `create_model` returned first.
                Returns a scalar (the mean over its rows) or a `Weighted`, alone or with a dict of metrics, each a
                scalar or a `Weighted`. Linen collections that the loss changed are returned in the dict by name.
            num_microbatches: equal parts that each device's rows are processed in, one after the other.
            clip_norm: gradients are scaled to at most this global norm.
            remat: which activations of a unit are saved for its backward pass; the others are recomputed from these and
                from the unit's inputs. 'none' saves all of them and recomputes nothing, 'full' saves the inputs only,
                'dots' and 'dots_with_no_batch_dims' also save matrix products. Else a `Remat` (values by name, on the
                device or in host memory), a policy of `jax.checkpoint_policies`, or a dict from globs on units to
                these, of which the first that matches is used.
            prefetch: number of units whose weights are gathered ahead of the unit that computes, so that communication
                and computation overlap. At most prefetch + 1 units are gathered at any time, in addition to weights
                that every iteration of a scan uses. With 0 each unit waits for its weights.
            bucket_bytes: what one collective moves at most, in full form on the wire. Small leaves are fused up to it,
                larger ones are moved in equal pieces, in a loop. Each collective waits for the one before, but the
                first in a scan at stage 2 does not: there two may be under way. None, the default, moves leaves whole:
                nothing computes beside a leaf that is moved in pieces, so a bucket should hold the largest leaf of a
                layer. What it bounds is the memory to move stacks of layers at stages 0 to 2, which grows with the
                model otherwise: compiled for eight H100s, the gather of two weights of 16 layers of width 1024 (224 MiB
                in bf16) takes 9 MiB beside its result instead of 128, in buckets of 32 MiB, and their reduce-scatter 9
                instead of 224. An all-reduce, which else is in place, takes 32.
            audit: each newly compiled program is held against what the step promises (`zerojax.audit`), before it runs
                for the first time: with 'error' a broken promise raises ValueError, with 'warn' it warns. 'off', the
                default: nothing is read; `step.audit(state, batch)` does it on demand. The program is compiled once
                either way. To read it takes some percent of that time, and each later call looks whether it is a new
                one, in 0.1 ms for 200 leaves.

        Returns:
            A `TrainStep`. Metrics are fp32 scalars, the same on every device: loss, grad_norm (before clipping),
            param_norm, skipped, learning_rate where the optimizer state has it, loss_scale for fp16, and those of the
            loss. The batch is a tree of arrays whose dim 0 divides into devices x microbatches; each process passes
            its own rows.

        Cost: elements sent per device and step, for Psi parameters on N devices and k microbatches, times (N-1)/N:
            2 Psi at stages 0 and 1, (1 + k) Psi at stage 2, up to 3 k Psi at stage 3 (leaves whose values the backward
            pass does not read, such as biases and embedding tables, are not gathered again).

        Raises:
            ValueError: a number of microbatches, a prefetch, a size of buckets or a setting of the audit that is none.

        Source: ZeRO, sections 5 and 7; 6.2 for `bucket_bytes` (C_B).
        """
        settings = StepSettings(num_microbatches, clip_norm, RematRules.of(remat), prefetch, bucket_bytes)
        return steps.train_step(self.config, loss_fn, settings.check(self.config.axes), check_setting(audit))

    def eval_step(self, loss_fn: Callable[..., Any], *, bucket_bytes: int | None = None) -> Step:
        """A jitted `step(state, batch) -> metrics` with the same gathering; nothing is changed."""
        settings = StepSettings(bucket_bytes=bucket_bytes).check(self.config.axes)
        return steps.eval_step(self.config, loss_fn, settings)

    def value_and_grad(
        self,
        loss_fn: Callable[..., Any],
        has_aux: bool = False,
        *,
        remat: Setting | Mapping[str, Setting] = "none",
        prefetch: int = 1,
        bucket_bytes: int | None = None,
    ) -> Callable[..., Any]:
        """`jax.value_and_grad` for a script that has its own step.

        Args:
            loss_fn: `loss_fn(params, *args)` returns the mean loss over the rows of `args`, or a `Weighted`; with
                `has_aux`, beside a dict of metrics.
            has_aux: as in JAX.
            remat, prefetch, bucket_bytes: as in `train_step`.

        Returns:
            `fn(params, *args) -> (loss, grads)` or `((loss, metrics), grads)`, to be called under `jit`. Parameters are
            placed by the stage (full below 3, shards at 3: see `shard`), args are split over the data axes in dim 0.
            Gradients are shards from stage 1 on, None at frozen leaves, in reduce_dtype.
        """
        settings = StepSettings(remat=RematRules.of(remat), prefetch=prefetch, bucket_bytes=bucket_bytes)
        settings.check(self.config.axes)

        def fn(params: Any, *args: Any) -> Any:
            configs.check_batch(self.config, args, 1)
            definition = self._definition(params)
            program = gradient_program(self.config, definition, lambda p, args: loss_fn(p, *args), settings)
            inputs = (jax.tree.leaves(params), {}, args, jax.random.key(0), jnp.float32(1))
            result = gradients(program, inputs)
            grads = jax.tree.unflatten(definition.tree, result.grads)
            return ((result.loss, result.metrics), grads) if has_aux else (result.loss, grads)

        return fn

    def shard(self, params: Any) -> Any:
        """Parameters that exist already, placed by the stage. For use with `value_and_grad`."""
        definition = self._definition(params)
        specs = definition.specs(self.config.axes, self.config.stage.shards_params)
        return jax.device_put(params, placement.shardings(self.config.mesh, specs))

    def shard_batch(self, batch: Any) -> Any:
        """Host arrays (each process: its own rows) as global arrays, split over the data axes in dim 0."""
        return configs.shard_batch(self.config, batch)

    def _definition(self, params: Any) -> Definition:
        leaves = placement.place(params, self.config.mesh, self.config.axes, self.overrides)
        model = models.Model(lambda params, other: params, lambda merged, aux, before: (before, aux))
        return Definition(optax.identity(), model, leaves, jax.tree.structure(params))

    def checkpoints(self, directory: str | Path, **options: Any) -> Checkpoints:
        """The checkpoints of a run, and what guards it; see `zerojax.checkpoints.Checkpoints`.

        Args:
            directory: on a file system that all processes see. One run at a time may use it.
            **options: `every`, `keep`, `keep_every`, `most_skipped`, `spike` and `watchdog_s` of `Checkpoints`.

        Raises:
            ValueError: a number that is none, or a directory that another run uses.
        """
        from zerojax.checkpoints import Checkpoints  # Orbax takes a second to import

        return Checkpoints(self.config, directory, **options)

    def explain(self, state: TrainState) -> report.Explanation:
        """Where every leaf of a state lives and why, what it costs a device, and what is not sharded.

        Args:
            state: of `init` or `eval_init`.

        Returns:
            An `Explanation`: data, and a table when printed.
        """
        return report.explain(self.config, state)
