"""`Zero`: creates sharded training states and the steps that update them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AbstractMesh, PartitionSpec

from zerojax.analysis import explanation as report
from zerojax.analysis.explanation import Explanation
from zerojax.analysis.findings import check_setting
from zerojax.analysis.step import TrainStep, auto_tiling, device_memory
from zerojax.offload.host_memory import memory_of
from zerojax.processes import agreement
from zerojax.processes.join import check_joined
from zerojax.program.remat import AUTO, RematRules, Setting, auto_setting
from zerojax.program.tiles import Tiling
from zerojax.sharding import placement
from zerojax.sharding.advice import uneven_text
from zerojax.sharding.mesh import check_enclosing_mesh, data_axes, warn_of_disabled_jit
from zerojax.sharding.placement import FromModel, Overrides, Stage, by_path
from zerojax.sharding.precision import Precision
from zerojax.step import batch as batches, creation, models, own_step
from zerojax.step.config import Layers, StepSettings, Tiles, ZeroConfig, check_offload, check_wire, with_outer_sharding
from zerojax.step.gradient import LossArgs, compute_gradients, device_gradient
from zerojax.step.loss_traces import explained_by_rows
from zerojax.step.losses import LossFn
from zerojax.step.source import Inputs, source_of
from zerojax.step.state import StateLayout, TrainState, check_not_donated
from zerojax.step.steps import EvalStep
from zerojax.step.whole_batch import Purpose, over_whole_batch
from zerojax.utils.text import mesh_text
from zerojax.utils.typing import AnyMesh, DTypeLike, PRNGKey, PyTree
from zerojax.utils.warn import is_called_by_user, warn

if TYPE_CHECKING:
    from zerojax.checkpoints import CheckpointOptions, Checkpoints


def _globs(patterns: str | Sequence[str]) -> tuple[str, ...]:
    """Patterns as a tuple. A string is one pattern, not one for each of its letters."""
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


class Zero:
    """ZeRO over a mesh: creates sharded training states and steps.

    Args:
        mesh: a mesh with axes of type Auto, for example from `zerojax.make_mesh`.
        stage: 0 (data parallel), 1 (P_os), 2 (P_os+g) or 3 (P_os+g+p).
        precision: a preset ('fp32', 'bf16', 'bf16_reduce_fp32', 'bf16_params', 'fp16') or a `Precision`.
        shard_axes: mesh axes that model states are sharded over. An axis `context` of the mesh is added to them; it
            divides the tokens of each row of a batch instead of the rows, in losses that know nothing of it.
        replica_axes: mesh axes that also split the batch, but over which model states are replicated. The default is
            'replica' if the mesh has such an axis.
        shard_dims: maps globs on leaf paths to the dim to shard, or to None to replicate the leaf. By default, the
            first dim that the number of shards divides is sharded.
        stacked: globs of leaves whose dim 0 counts layers. Stacks that are created by a scan or by a vmap over keys are
            detected without it, and so are most stacks of a model that has values. If one is not, the first step
            raises an error with the globs.
        frozen: globs of leaves that are not trained: no gradient, no optimizer state, no reduce-scatter. They keep the
            dtype and the bits that the model gives them, and the running statistics of their modules do not move.
        trainable: what is trained; all else is frozen. Globs, an nnx filter such as `nnx.LoRAParam`, or a function of
            (path, array) that returns a bool. What `frozen` matches as well is not trained.
        dtypes: maps globs on leaf paths to the dtype in which leaves are gathered and computed with, for example
            {'*norm*/scale': 'float32'}. Gradients of leaves with a wider dtype than the precision's are reduced in it.
        units: globs on leading parts of paths; the leaves below each match are gathered together. By default each
            layer is a unit: the leaves below a numbered component that has siblings ('layers/0', 'Block_3'; see
            `explain`). Leaves beside the layers are units by their parents ('embed'). In a list of arrays, and where
            modules are numbered by kind ('linear', 'linear_1', 'norm', 'norm_1'), layers are found by their shapes.
        partition_specs: maps globs on leaf paths to PartitionSpecs over other axes ('model'), which ZeRO leaves to the
            compiler. By default a leaf's spec comes from its Flax metadata, under the logical axis rules that are in
            force at `init`.
        axis_names: maps names of mesh axes in the model's metadata to axes of this mesh, or to None to ignore them:
            {'fsdp': 'data', 'tp': None}.
        outer_sharding: what is divided over the replica axes too. 'optimizer' (hybrid sharding, HFSDP): the optimizer's
            state and the master copy are sharded over all data axes, and once a step, gradients are reduce-scattered
            and updated parameters gathered over the replica axes. 'none' replicates all model states. The default is
            'optimizer' at stage 3, and 'none' below. Cost: for M replicas, (g + c)(M - 1) / M bytes of each element of
            a shard are sent between them once a step (gradients of g bytes, weights of c); the update has to wait for
            the first part, and the next step for both.
        offload: 'optimizer' keeps the optimizer's state and the master copy of the parameters in pinned host memory:
            each array that is shaped like a parameter. A step moves them through the device piece by piece, so the
            optimizer has to work element by element or row by row. 'params' keeps the parameters there too, except for
            vectors, at stage 3 or on one device: weights come layer by layer, one ahead, and gradients go there. 'none'
            is the default. `value_and_grad` has no optimizer, and takes parameters that are on the devices.
        offload_dir: a directory on a local disk, such as an NVMe drive, for what 'optimizer' would keep in host memory.
            A step then runs the update from Python: files are read and written while pieces are updated, and at most
            eight records of about 32 MiB are in host memory, and copies of those that are moved. Every process has a
            file without a name in it, which ends with the process: a run resumes from its checkpoints only. A save
            ends before training goes on.

    Raises:
        ValueError: if the stage, the precision, an axis, `outer_sharding` or `offload` is unknown, or if the mesh has
            other axes and the optimizer's state is offloaded.
        RuntimeError: if `zerojax launch` started several processes, and this one has not called `zerojax.initialize`.
    """

    def __init__(
        self,
        mesh: AnyMesh,
        stage: int = 3,
        precision: str | Precision = "fp32",
        *,
        shard_axes: Sequence[str] = ("data",),
        replica_axes: Sequence[str] | None = None,
        shard_dims: Mapping[str, int | None] | None = None,
        stacked: str | Sequence[str] = (),
        frozen: str | Sequence[str] = (),
        trainable: Any = None,
        dtypes: Mapping[str, DTypeLike] | None = None,
        units: str | Sequence[str] = (),
        partition_specs: Mapping[str, PartitionSpec] | None = None,
        axis_names: Mapping[str, str | None] | None = None,
        outer_sharding: str | None = None,
        offload: str = "none",
        offload_dir: str | Path | None = None,
    ):
        if not isinstance(mesh, AbstractMesh):
            check_joined()
        if replica_axes is None:
            replica_axes = tuple(name for name in ("replica",) if name in mesh.axis_names)
        axes = data_axes(mesh, tuple(shard_axes), tuple(replica_axes))
        axes = with_outer_sharding(axes, outer_sharding, Stage.of(stage))
        precision = Precision.of(precision)
        check_wire(precision, Stage.of(stage))
        disk = None if offload_dir is None else Path(offload_dir)
        check_offload(offload, disk is not None, mesh, axes, Stage.of(stage))
        memory = memory_of(offload, disk, mesh)
        self.config = ZeroConfig(mesh, axes, Stage.of(stage), precision, offload, memory, disk, agreement)
        self._places_optimizer = False
        self.overrides = Overrides(
            dict(shard_dims or {}),
            _globs(stacked),
            _globs(frozen),
            trainable,
            dict(dtypes or {}),
            _globs(units),
            dict(partition_specs or {}),
            dict(axis_names or {}),
        )

    def __repr__(self) -> str:
        """The mesh, the stage and the precision, and the options that are not the default."""
        config, default = self.config, Overrides()
        given = {field.name: getattr(self.overrides, field.name) for field in dataclasses.fields(Overrides)}
        options = [f"{name}={value!r}" for name, value in given.items() if value != getattr(default, name)]
        if config.axes != with_outer_sharding(config.axes, None, config.stage):
            options += [f"outer_sharding={'optimizer' if config.axes.outer else 'none'!r}"]
        options += [f"offload={config.offload!r}"] if config.offload != "none" else []
        options += [f"offload_dir={str(config.disk)!r}"] if config.disk is not None else []
        over = " x ".join(config.axes.shard)
        where = f"{config.stage.title} over {over} on a mesh of {mesh_text(dict(config.mesh.shape))}"
        return f"Zero({', '.join([where, config.precision.title, *options])})"

    def init(
        self,
        model: Any,
        tx: optax.GradientTransformation,
        seed: int | PRNGKey = 0,
        *,
        inputs: Inputs = None,
    ) -> TrainState:
        """Creates a training state that is sharded from the start: no device and no host ever holds all of it.

        Args:
            model: one of
                an nnx.Module class, a `functools.partial` of one, or any function of `rngs` that returns a module;
                a function of a key, or of nothing, that returns Linen variables or a tree of parameters;
                a Linen module, with `inputs`; a Hugging Face Flax model, best created with `_do_init=False`;
                an nnx.Module, Linen variables or a tree of parameters with values, which are copied to their shards.
                Stacked layers of such a model are found by their shapes, see `Zero(stacked=...)`.
            tx: any Optax transformation.
            seed: an int or a key of `jax.random`, from which the parameters are drawn: their values are those of
                `Model(rngs=nnx.Rngs(seed))` or `module.init(jax.random.key(seed), x)`, up to rounding, and depend
                neither on the mesh nor on the stage. The key of each step's randomness comes from it as well.
            inputs: example inputs of a Linen module, positional or by name.

        Raises:
            ValueError: if `model` is none of these or has no parameters, a leaf is not an array, a pattern, a dim or a
                partition spec does not fit, or `jax.set_mesh` has set another mesh.

            ReplicasDiffer: if the values of a replicated leaf differ between processes.

        Cost: if the model has values, they remain; in addition to them and to the state, a process holds one leaf. With
            several processes, every array is read once more, to compare its copies.
        """
        create, avals = self._build(model, tx, seed, inputs)
        if self.config.spans_processes:
            given = {"seed": str(seed)} if isinstance(seed, int) else {}  # a key is compared with the state
            fix = "pass the same model, optimizer and seed in all processes"
            agreement.agree_on(self.config.texts() | given, "configurations", fix, "zero.init")
            leaves = by_path(avals).items()
            lines = [f"{path}: {a.dtype}{list(a.shape)} {a.sharding.spec}" for path, a in leaves]
            agreement.agree_on_lines(lines, "states", fix, "zero.init")
        state = create()
        if jax.process_count() > 1:
            from zerojax.checkpoints.replicas import verify_replicas  # Orbax takes a second to import

            verify_replicas(state, "pass the same model, optimizer and seed in all processes")
        return state

    def eval_init(
        self,
        model: Any,
        tx: optax.GradientTransformation,
        seed: int | PRNGKey = 0,
        *,
        inputs: Inputs = None,
    ) -> TrainState:
        """The state that `init` would create, as avals with shardings. Allocates nothing; works on abstract meshes.

        Args:
            model, tx, seed, inputs: as in `init`.
        """
        return self._build(model, tx, seed, inputs)[1]

    def _build(
        self, model: PyTree, tx: optax.GradientTransformation, seed: int | PRNGKey, inputs: Inputs
    ) -> tuple[Callable[[], TrainState], TrainState]:
        check_enclosing_mesh(self.config.mesh)
        warn_of_disabled_jit()
        return creation.build(self.config, self.overrides, source_of(model, inputs), tx, seed)

    def train_step(
        self,
        loss_fn: LossFn,
        *,
        num_microbatches: int = 1,
        clip_norm: float | None = None,
        remat: Setting | Mapping[str, Setting] = AUTO,
        prefetch: int = 1,
        bucket_bytes: int | None = None,
        layers: Layers = None,
        tiles: Tiles = "none",
        audit: str = "off",
    ) -> TrainStep:
        """Returns a jitted `step(state, batch) -> (state, metrics)`. The state is donated and updated in place.

        Args:
            loss_fn: `loss_fn(model, batch)` or `loss_fn(model, batch, key)`, where `model` is an nnx.Module, Linen
                variables or a tree, as in `init`. It returns a scalar (the mean over its rows) or a `Weighted`, alone
                or with a dict of metrics, each a scalar or a `Weighted`. Linen collections that the loss changes are
                returned in the dict by name.
            num_microbatches: number of equal parts into which each device's rows are split. They are processed one
                after the other.
            clip_norm: gradients are scaled down to this global norm.
            remat: which activations of a unit are saved for its backward pass. The others are recomputed from these and
                from the unit's inputs. 'none' saves all of them and recomputes nothing. 'dots' saves what takes long to
                compute: the results of matrix products, fused attention, loops, kernels, sorts and gathers.
                'dots_with_no_batch_dims' saves those products only that have no batch dims, and 'full' the inputs of
                units only. 'auto', the default, is 'dots' on GPUs and TPUs and 'none' on CPU devices. It can also be a
                `Remat` (values by name, on the device or in host memory), a policy of `jax.checkpoint_policies`, or a
                dict that maps globs on units to any of these; the first glob that matches a unit applies.
            prefetch: number of units whose weights are gathered ahead of the unit that computes, so that communication
                and computation overlap. At most prefetch + 1 units are gathered at any time, in addition to weights
                that every iteration of a scan uses. With 0, each unit waits for its own weights.
            bucket_bytes: maximum size of one collective, in bytes of the full form as communicated. Small leaves are
                fused up to this size, larger leaves are communicated in equal pieces, in a loop. Each collective waits
                for the previous one, except for the first in a scan at stage 2, where two may be in flight. With None,
                the default, leaves are communicated whole. No computation overlaps with a leaf that is communicated in
                pieces, so a bucket should hold the largest leaf of a layer. Buckets bound the temporary memory of
                collectives over stacks of layers at stages 0 to 2, which otherwise grows with the model.
            layers: 'loop' runs each list of at least three equal layers as a scan: the equations of one layer are
                compiled instead of those of all. The state stays as the model has it. Each step copies the shards of
                the layers into stacks (at stages 0 to 2, their full weights). Layers are equal if they have the same
                operations, shapes, placement and remat. A number does the same, with at least so many layers in an
                iteration ('loop' has `prefetch + 1` where layers are gathered). 'list' runs scans over layers layer by
                layer: what a layer saves is not copied into a stack, and the equations of all layers are compiled.
                None, the default, leaves layers as the model has them.
            tiles: for how many tokens at a time the loss computes what each token has for itself, where that is much
                wider than what goes in and comes out: logits, hidden layers of MLPs, rows of attention scores that are
                not fused. Only the inputs of such a part are saved; the backward pass computes it again, tile by tile,
                and adds the gradients of weights in fp32. Gradients of a loss that is one sum over tokens are computed
                with it, and held until then. 'auto' chooses by memory: nothing, if the step is estimated
                (`step.memory`) to take at most 60% of the device's; else tiles in which no value takes more than 1/128
                of it. 'none', the default, computes all tokens at once, and so does 'auto' on CPU devices.
            audit: 'error' and 'warn' compare each newly compiled program with the step's expectation (see
                `zerojax.audit_step`) before it runs for the first time, and raise ValueError or warn if it deviates.
                'off', the default, reads nothing; `step.audit(state, batch)` does so on demand. The program is compiled
                once in any case. Reading it takes a few percent of the compile time, and each later call checks whether
                the program is new, which takes 0.1 ms for 200 leaves.

        Returns:
            A `TrainStep`. Metrics are fp32 scalars, the same on every device: loss, grad_norm (before clipping),
            param_norm, skipped, loss_scale for fp16, and those of the loss; also learning_rate, if the optimizer state
            contains it (`optax.inject_hyperparams`), or if it is that of one schedule (`optax.adamw(rate)`), without
            another rate or factor. The batch is a tree of arrays with the same number of rows (dim 0), which
            devices x microbatches divide; each process passes its own rows. Scalars and what is marked `Whole` are the
            same for all devices.

        Cost: elements sent per device and step, for Psi parameters on N devices and k microbatches, times (N-1)/N:
            2 Psi at stages 0 and 1, (1 + k) Psi at stage 2, up to 3 k Psi at stage 3 (leaves whose values the backward
            pass does not read, such as biases, are not gathered again). Of tables in which rows are looked up, the rows
            are sent instead at stages 2 and 3, if these are fewer bytes.

        Raises:
            ValueError: if one of the settings from `num_microbatches` on is invalid, or `layers` is set and parameters
                are in host memory. The first call raises it if no layers are equal.

        Source: ZeRO, sections 5 and 7; 6.2 for `bucket_bytes` (C_B).
        """
        rules = RematRules.of(remat, auto_setting(self.config.mesh))
        settings = StepSettings(num_microbatches, clip_norm, rules, prefetch, bucket_bytes, layers, tiles)
        if layers and self.config.offloads_params:
            raise ValueError(
                f"settings: layers={layers!r} stacks parameters on the devices\n"
                f"  got:      offload='params', which fetches them leaf by leaf\n"
                f"  fix:      layers=None, or another `offload`"
            )
        return TrainStep(self.config, settings.check(self.config.axes), loss_fn, check_setting(audit))

    def eval_step(self, loss_fn: LossFn, *, bucket_bytes: int | None = None, tiles: Tiles = "none") -> EvalStep:
        """Returns a jitted `step(state, batch) -> metrics`, which gathers as `train_step` does and changes nothing.

        An nnx.Module is in evaluation mode (`model.eval()`): no dropout, and BatchNorm uses its running averages.
        `zerojax.evaluate` evaluates whole data sets of any size with the step.

        Args:
            loss_fn, bucket_bytes: as in `train_step`.
            tiles: as in `train_step`, but 'auto' does not ask whether tiles are needed: they recompute nothing here.

        Raises:
            ValueError: if `bucket_bytes` or `tiles` is invalid.
        """
        settings = StepSettings(bucket_bytes=bucket_bytes, tiles=self._tiling(tiles)).check(self.config.axes)
        return EvalStep(self.config, settings, loss_fn)

    def _tiling(self, tiles: Tiles) -> Tiles | Tiling:
        """The tiles of a step, of which 'auto' are those of its memory."""
        limit = device_memory(self.config) if tiles == "auto" else None
        return auto_tiling(limit) if limit else tiles

    def value_and_grad(
        self,
        loss_fn: LossFn,
        has_aux: bool = False,
        *,
        remat: Setting | Mapping[str, Setting] = AUTO,
        prefetch: int = 1,
        bucket_bytes: int | None = None,
        tiles: Tiles = "none",
    ) -> Callable[..., PyTree]:
        """`jax.value_and_grad` for scripts that have their own step.

        Args:
            loss_fn: `loss_fn(params, *args)` returns the mean loss over the rows of `args`, or a `Weighted`. With
                `has_aux` it returns a pair of that and a dict of metrics.
            has_aux: as in JAX.
            remat, prefetch, bucket_bytes: as in `train_step`.
            tiles: as in `train_step`, but 'auto' does not ask whether tiles are needed.

        Returns:
            `fn(params, *args) -> (loss, grads)` or `((loss, metrics), grads)`, to be called under `jit`. Parameters are
            placed as the stage requires (see `shard`): full below stage 3, sharded at stage 3. `args` are a batch: all
            arrays with the same rows, which are split over the data axes in dim 0, and `Whole` for what every device
            gets whole. Gradients are in reduce_dtype, sharded from stage 1 on, and None at frozen leaves; `optimizer`
            keeps the state of the step sharded too. A step without it is warned about.

        Raises:
            ValueError: if `remat`, `prefetch`, `bucket_bytes` or `tiles` is invalid.
        """
        rules = RematRules.of(remat, auto_setting(self.config.mesh))
        tiling = self._tiling(tiles)
        settings = StepSettings(remat=rules, prefetch=prefetch, bucket_bytes=bucket_bytes, tiles=tiling)
        settings.check(self.config.axes)
        seen: list[bool] = []

        def fn(params: PyTree, *args: PyTree) -> PyTree:
            # Check.
            batches.check_batch(self.config, args, 1)
            layout = self._definition(params)
            if not self._places_optimizer and is_called_by_user():
                own_step.warn_of_placement(self.config, layout)
            config = self.config._replace(offload="none")
            gradient = device_gradient(config, layout, lambda p, args: loss_fn(p, *args), settings)
            batch = own_step.free_whole(config, args)
            inputs = LossArgs(jax.tree.leaves(params), {}, batch, jax.random.key(0))

            # Compute.
            with explained_by_rows(gradient, inputs):
                checked = over_whole_batch(gradient, inputs, Purpose.TRAINING, constraints=True, is_seen=bool(seen))
                seen.append(True)
                compute = functools.partial(compute_gradients, checked.gradient)
                if checked.closes_over:
                    compute = functools.partial(own_step.run_free, config, compute)
                if config.other_axes:  # JAX runs no `shard_map` over some axes of a mesh outside of jit
                    compute = jax.jit(compute)
                result = compute(inputs, jnp.float32(1))
            grads = jax.tree.unflatten(layout.tree, result.grads)
            return ((result.loss, result.metrics), grads) if has_aux else (result.loss, grads)

        return fn

    def shard(self, params: PyTree) -> PyTree:
        """Places copies of existing parameters as the stage requires, for use with `value_and_grad`.

        They share no memory with `params`, NumPy or JAX arrays, and may be donated.
        The arrays keep their shapes: those none of whose dims the number of shards divides are replicated, with a
        warning if they are more than 1% of the parameters.

        Args:
            params: a tree of arrays. Under `jit`, they are placed as they are computed: no device holds all of
                `jax.jit(lambda key: zero.shard(create(key)))(key)`.
        """
        layout = self._definition(params)
        text = uneven_text(layout.leaves, self.config.optimizer_axes, pads=False)
        if text and self.config.stage.shards_optimizer:
            warn(text)
        shardings = own_step.param_shardings(self.config, layout)
        return jax.tree.map(creation.placed_copy, params, shardings)

    def optimizer(self, tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
        """An optimizer for a training step of your own, whose state is sharded as the stage requires, from the start.

        It is used like any other: by hand, in `nnx.Optimizer` or in Flax's `TrainState`. Wrap the whole chain,
        `zero.optimizer(optax.chain(...))`. Transformations in it see global arrays: `optax.clip_by_global_norm` clips
        by the norm of all shards.

        Args:
            tx: any Optax transformation.

        Returns:
            A transformation. `init(params)` creates the state in shards, for parameters that `shard` has placed, under
            `jit` or not. `update(grads, opt_state, params)` returns updates that are placed as the parameters are, so
            that `optax.apply_updates` leaves these where they are. Frozen leaves have no state, and zeros as updates.

        Raises:
            ValueError: if `tx` is not an Optax transformation, or the optimizer is offloaded; by `init` if a parameter
                is not placed; by `update` without parameters.

        Cost: no device ever holds more of the state than its shards. At stages 1 and 2, updates are gathered, Psi
            elements as in `train_step`; at the others nothing is communicated.
        """
        self._places_optimizer = True
        return own_step.placed_optimizer(self.config, self._definition, tx)

    def apply_updates(self, params: PyTree, updates: PyTree) -> PyTree:
        """`optax.apply_updates`, with a result that is stored as the stage requires, whatever reads it in a program.

        Args:
            params: a tree of parameters, as for `value_and_grad`.
            updates: a tree of updates. None leaves a parameter as it is.
        """
        return own_step.apply_updates(self.config, self._definition(params), params, updates)

    def shard_batch(self, batch: PyTree) -> PyTree:
        """Converts host arrays to global arrays that are split over the data axes in dim 0.

        Args:
            batch: a tree of arrays. Each process passes its own rows, and all of what is marked `Whole`.
        """
        return batches.shard_batch(self.config, batch)

    def pad_batch(self, batch: PyTree, num_rows: int | None = None) -> tuple[PyTree, np.ndarray]:
        """Pads a batch whose rows do not divide over the devices, such as the last one of an evaluation.

        Args:
            batch: a tree of NumPy or JAX arrays with the same rows, and `Whole` for what has none.
            num_rows: the rows to pad to, in this process. The default is the next number that divides over the devices.
                With several processes, pass the same number in all of them.

        Returns:
            (the batch, whose last row is repeated; fp32 weights of shape (rows,), 0 for rows that were added). A loss
            that returns `Weighted(jnp.sum(weights * losses), jnp.sum(weights))` is the mean over the given rows.

        Raises:
            ValueError: if the numbers of rows differ, or exceed `num_rows`.
        """
        return batches.pad_batch(self.config, batch, num_rows)

    def num_microbatches(self, num_rows: int, most_rows: int) -> int:
        """The least number of microbatches with which no device processes more than `most_rows` rows at once.

        A run that passes it to `train_step` continues on fewer devices with the same batch: each device then has more
        rows, but not more of them at a time.

        Args:
            num_rows: number of rows of the global batch, over all processes.
            most_rows: number of rows whose activations the memory of a device holds.

        Raises:
            ValueError: if the devices do not divide the rows; it names the nearest numbers of devices and of rows that
                fit.
        """
        return batches.num_microbatches(self.config, num_rows, most_rows)

    def with_params(self, state: TrainState, params: PyTree) -> TrainState:
        """A state with other values of the parameters, to evaluate an average of the weights.

        Args:
            state: its other arrays are shared with the state that is returned, so only one of the two may be donated:
                pass the result to `eval_step` or call `model()`, and continue to train with `state`.
            params: the trained parameters as the optimizer's state holds them, for example an average, see
                `zerojax.ema`: a tree like `state.params`, with None at frozen leaves. The state's copy of them in
                param_dtype, if it has one, is replaced too, and may share memory with them.

        Raises:
            ValueError: if `params` has other leaves or shapes than the trained parameters or a narrower dtype than
                param_dtype, or the state was donated.

        Cost: at stages 1 and 2 the parameters are gathered.
        """
        return creation.with_params(self.config, state, params)

    def with_optimizer(
        self, state: TrainState, tx: optax.GradientTransformation, seed: int | PRNGKey = 0
    ) -> TrainState:
        """A state at step 0 with the weights of another one and a new optimizer, to fine-tune what was trained.

        A restored state keeps its step, and `fit` continues to count from it. What this returns is like a state of
        `init` with other values: the counters are 0, and the schedule of the learning rate begins anew.

        Args:
            state: from `init`, a step or a checkpoint of this Zero. Its parameters and model state are donated.
            tx: any Optax transformation.
            seed: as in `init`, for the randomness of the steps.

        Raises:
            ValueError: if the optimizer cannot work on a step's gradients, or the state was donated.
        """
        return creation.with_optimizer(self.config, state, tx, seed)

    def _definition(self, params: PyTree) -> StateLayout:
        if isinstance(params, nnx.Module):
            raise ValueError(
                f"value_and_grad: takes parameters, not a module with all of its variables\n"
                f"  got:      {type(params).__name__}\n"
                f"  fix:      graph, params, rest = nnx.split(module, nnx.Param, ...); pass params and "
                f"zerojax.Whole(rest), and call nnx.merge(graph, params, rest) in the loss"
            )
        models.check_not_overwritten(params)
        config, overrides = self.config, self.overrides
        named = models.without_variables(params)  # paths are those of `init`
        from_model = FromModel(trained=models.trained_paths(overrides.trainable, named))
        where = config.mesh, config.optimizer_axes, config.precision, overrides, from_model
        leaves = placement.place(named, *where, pads=False)  # the user's arrays have logical shapes
        model = models.Model(lambda params, other: params, lambda merged, aux, before: (before, aux))
        return StateLayout(optax.identity(), model, leaves, jax.tree.structure(params))

    def checkpoints(self, directory: str | Path, **options: Unpack[CheckpointOptions]) -> Checkpoints:
        """Opens the checkpoints of a run; see `zerojax.checkpoints.Checkpoints` for their use.

        Args:
            directory: on a file system that all processes share. Only one run at a time may use it.
            options: see `zerojax.checkpoints.CheckpointOptions`.

        Raises:
            ValueError: if an option is invalid, the processes differ in one, or another run uses the directory.
        """
        from zerojax.checkpoints import Checkpoints  # Orbax takes a second to import

        return Checkpoints(self.config, directory, **options)

    def explain(self, state: TrainState, step: TrainStep | None = None, batch: PyTree = None) -> Explanation:
        """Explains where every leaf of a state lives and why, what it costs each device, and what is not sharded.

        Args:
            state: a state from `init` or `eval_init`.
            step, batch: a step and a batch for it, arrays or avals. With both, units are listed in the order in which
                the forward pass uses them, with what is computed in tiles. This traces the loss.

        Returns:
            An `Explanation`, which prints as tables.

        Raises:
            ValueError: if the state was donated to a step.
        """
        check_not_donated(state)
        uses = None if step is None else step.uses(state, batch)
        remat = None if step is None else step.settings.remat.title
        tiled = () if step is None else step.tiled(state, batch)
        return report.explain(self.config, state, uses, remat, tiled)
