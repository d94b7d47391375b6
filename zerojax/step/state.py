"""The training state, which is sharded when it is created: its leaves, their shardings and its initialization."""

from __future__ import annotations

import collections
import copy
import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from zerojax.sharding import padding, placement
from zerojax.sharding.axes import Axes
from zerojax.sharding.optimizer_placement import Stored, optimizer_placement
from zerojax.sharding.padding import NO_PADDING, Padding
from zerojax.sharding.placement import PINNED_HOST, Leaf, by_path
from zerojax.sharding.precision import LossScale
from zerojax.step import models
from zerojax.step.config import ZeroConfig
from zerojax.utils.text import SPACE, abbreviate, bytes_text, count_text, fold, mesh_text
from zerojax.utils.typing import Array, Aval, PRNGKey, PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class StateLayout:
    """Where and how the leaves of a training state are stored, with the model and the optimizer that they belong to.

    It is the static part of a state. All states of one `init` share the same object, which equals only itself.
    """

    tx: optax.GradientTransformation  # the optimizer
    model: models.Model  # builds the loss function's first argument from parameters and model state
    leaves: tuple[Leaf, ...]  # the placement of the parameter leaves, in flattening order
    tree: PyTree  # the treedef of the parameters
    # whether each leaf of the model state stays as it is, because its module is frozen
    fixed_state: tuple[bool, ...] = ()
    config: ZeroConfig | None = None  # the mesh, stage and precision for which states are created

    def specs(self, axes: Axes, sharded: bool) -> PyTree:
        """The spec of every parameter, with or without the shard axes."""
        return jax.tree.unflatten(self.tree, [leaf.spec(axes, sharded) for leaf in self.leaves])

    def paddings(self, sharded: bool) -> list[Padding]:
        """The zeros with which each parameter is stored, in shards or in full."""
        return [leaf.padding(sharded) for leaf in self.leaves]

    def trained_paddings(self, sharded: bool) -> list[Padding]:
        """As `paddings`, of trained parameters."""
        return [leaf.padding(sharded) for leaf in self.leaves if leaf.trainable]

    def params_in_host(self, offloads: bool) -> list[bool]:
        """Which parameters are in host memory if they are offloaded: those that are matrices, in each layer.

        Vectors are a small part of a model. A TPU cannot read a single row of a stack of them from host memory.
        """
        return [offloads and len(leaf.shape) - leaf.stacked >= 2 for leaf in self.leaves]

    def logical(self, params: PyTree) -> PyTree:
        """The parameters without the zeros with which they are stored. Those that have some are gathered."""
        return jax.tree.map(_without_zeros, params, jax.tree.unflatten(self.tree, self.leaves))

    def trained_avals(self) -> PyTree:
        """The avals of the parameters that the optimizer gets, in logical shapes; None at frozen leaves."""
        avals = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in self.leaves]
        return self.trained(jax.tree.unflatten(self.tree, avals))

    def optimizer_placement(self, axes: Axes, sharded: bool) -> PyTree:
        """How every leaf of the optimizer's state is stored, see `Stored`."""
        params = self.trained(jax.tree.unflatten(self.tree, self.leaves))
        opt_state = jax.eval_shape(self.tx.init, self.trained_avals())
        return optimizer_placement(self.tx, opt_state, params, axes, sharded)

    def optimizer_paddings(self, axes: Axes, sharded: bool) -> list[Padding]:
        """The zeros with which each leaf of the optimizer's state is stored."""
        return [stored.padding for stored in jax.tree.leaves(self.optimizer_placement(axes, sharded))]

    @property
    def has_master(self) -> bool:
        """Whether the optimizer holds a copy of the trained parameters in another dtype than they are computed in."""
        return any(leaf.trainable and leaf.dtype != leaf.compute_dtype for leaf in self.leaves)

    def for_compute(self, leaves: Sequence[Array]) -> list[Array]:
        """Casts parameter leaves to the dtypes in which they are gathered and computed with.

        Those in host memory stay as they are: they are cast when they have come to the device.
        """
        cast = lambda a, leaf: a if placement.is_in_host(a) else a.astype(leaf.compute_dtype)
        return [cast(a, leaf) for a, leaf in zip(leaves, self.leaves, strict=True)]

    def cast_trained(self, trained: PyTree) -> PyTree:
        """Casts a tree from `trained` to the dtypes in which the leaves are gathered and computed with."""
        dtypes = [leaf.compute_dtype for leaf in self.leaves if leaf.trainable]
        values, tree = jax.tree.flatten(trained)
        return tree.unflatten([a.astype(dtype) for a, dtype in zip(values, dtypes, strict=True)])

    def trained(self, params: PyTree) -> PyTree:
        """The parameters with None in place of frozen leaves, as the optimizer gets them."""
        leaves = zip(jax.tree.leaves(params), self.leaves, strict=True)
        return jax.tree.unflatten(self.tree, [a if leaf.trainable else None for a, leaf in leaves])

    def with_frozen(self, trained: PyTree, params: PyTree) -> PyTree:
        """Inserts the frozen leaves of `params` into a tree from `trained`."""
        items, leaves = iter(jax.tree.leaves(trained)), zip(jax.tree.leaves(params), self.leaves, strict=True)
        return jax.tree.unflatten(self.tree, [next(items) if leaf.trainable else a for a, leaf in leaves])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a training step reads and writes: a pytree of global arrays.

    Attributes:
        step: int32 scalar, the number of steps so far, including skipped ones.
        skipped: int32 scalar, the number of steps that were skipped because a gradient was not finite.
        params: all parameters as they are stored, sharded or full by the stage: trained ones in compute_dtype, frozen
            ones in the dtype of the model. Shards of a leaf may have zeros at its end; `model()` cuts them off.
        master: trained parameters in param_dtype, stored like the optimizer state; None if they are computed in
            param_dtype.
        opt_state: the state of the optimizer.
        model_state: the model's variables that are not parameters: Linen collections, or NNX variables other than
            `nnx.Param`.
        key: the PRNG key from which the keys of steps are folded.
        loss_scale: the loss scale, for fp16; otherwise None.
        layout: where and how the leaves are stored.
    """

    step: Array
    skipped: Array
    params: PyTree
    master: PyTree
    opt_state: PyTree
    model_state: PyTree
    key: PRNGKey
    loss_scale: LossScale | None
    layout: StateLayout = dataclasses.field(metadata={"static": True})

    def __repr__(self) -> str:
        """The step, the stage, the number of parameters and the bytes on a device. Waits for no step."""
        return _state_text(self)

    def __deepcopy__(self, memo: dict[int, object]) -> TrainState:
        """A copy of the arrays: a state of the same layout. That of an nnx.State would lose its variables."""
        check_not_donated(self)
        return jax.tree.map(copy.deepcopy, self)

    def model(self) -> PyTree:
        """The loss function's first argument: an nnx.Module, Linen variables or a tree of parameters.

        Cost: parameters that are stored with zeros are gathered, to cut these off.
        """
        check_not_donated(self)
        return self.layout.model.merge(self.layout.logical(self.params), self.model_state)

    @property
    def ema_params(self) -> PyTree:
        """The average of the trained parameters that `zerojax.ema` keeps, stored like the optimizer state.

        Raises:
            ValueError: if the optimizer keeps none, or several.
        """
        found = [value for _, value in optax.tree.get_all_with_path(self.opt_state, "ema_params")]
        if len(found) != 1:
            raise ValueError(
                f"state: there is no single average of the parameters\n"
                f"  got:      an optimizer that keeps {len(found) or 'none'}\n"
                f"  fix:      zero.init(model, zerojax.ema(tx, 0.999)); of several, take one from state.opt_state"
            )
        return found[0]

    def logical(self) -> TrainState:
        """The state with all arrays in the shapes that the model and the optimizer see, without zeros at their ends.

        It is for reading, such as an average of the weights in `opt_state`. Steps take states as they are stored.

        Cost: arrays that are stored with zeros are gathered, to cut these off. The others are those of the state.
        """
        check_not_donated(self)
        cropped = jax.tree.map(_without_zeros, self, logical_avals(self))
        if all(map(operator.is_, jax.tree.leaves(cropped), jax.tree.leaves(self))):
            return self
        own = dataclasses.replace(self.layout)  # steps check the shapes once for each layout
        return dataclasses.replace(cropped, layout=own)


def _without_zeros(stored: Array | Aval, like: PyTree) -> Array | Aval:
    """Cuts off the zeros of an array, which has the shape of `like` without them. If there are some, it is gathered."""
    if tuple(stored.shape) == like.shape:
        return stored
    if isinstance(stored, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(like.shape, stored.dtype)
    zeros = padding.between(like.shape, stored.shape)
    if isinstance(stored, Tracer):
        return zeros.crop(stored)
    stored = placement.in_memory(stored)
    sharding: PyTree = stored.sharding
    spec = [None if dim == zeros.dim else axes for dim, axes in enumerate(sharding.spec)]
    on_device = lambda a: jax.device_put(a, jax.memory.Space.Device) if placement.is_in_host(a) else a
    crop = jax.jit(lambda a: zeros.crop(on_device(a)), out_shardings=NamedSharding(sharding.mesh, PartitionSpec(*spec)))
    return crop(stored)


def storage(config: ZeroConfig, state: TrainState) -> TrainState:
    """A `Stored` for every leaf of a state, by the stage table."""
    layout, stage, of_optimizer = state.layout, config.stage, config.optimizer_axes

    def of_params(axes: Axes, sharded: bool) -> PyTree:
        stored = [Stored(leaf.spec(axes, sharded), leaf.padding(sharded), leaf) for leaf in layout.leaves]
        return jax.tree.unflatten(layout.tree, stored)

    return dataclasses.replace(
        jax.tree.map(lambda _: Stored(PartitionSpec(), NO_PADDING), state),
        params=of_params(config.axes, stage.shards_params),
        master=None if state.master is None else layout.trained(of_params(of_optimizer, stage.shards_optimizer)),
        opt_state=layout.optimizer_placement(of_optimizer, stage.shards_optimizer),
    )


def in_host(config: ZeroConfig, state: TrainState) -> TrainState:
    """Whether each leaf of a state is in host memory: of what is offloaded, the arrays shaped like parameters."""
    if not config.offloads_optimizer:
        return jax.tree.map(lambda _: False, state)
    layout = state.layout
    in_pieces = jax.tree.map(lambda stored: stored.in_pieces, storage(config, state))
    params = jax.tree.unflatten(layout.tree, layout.params_in_host(config.offloads_params))
    return dataclasses.replace(in_pieces, params=params)


def shardings(config: ZeroConfig, state: TrainState) -> TrainState:
    """The shardings that the stage gives a state, whatever those of its arrays are."""

    def sharding(stored: Stored, is_in_host: bool) -> NamedSharding:
        on_device = NamedSharding(config.mesh, stored.spec)
        return on_device.with_memory_kind(PINNED_HOST) if is_in_host else on_device

    return jax.tree.map(sharding, storage(config, state), in_host(config, state))


def with_shardings(config: ZeroConfig, state: TrainState) -> TrainState:
    """The avals of a state, with the shardings that the stage gives it."""
    aval = lambda a, sharding: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
    return jax.tree.map(aval, state, shardings(config, state))


def stored_avals(config: ZeroConfig, state: TrainState) -> TrainState:
    """The avals of a state as its stage stores it, with shardings, whatever the shapes and shardings of its arrays."""

    def aval(a: Aval, stored: Stored, sharding: NamedSharding) -> Aval:
        return jax.ShapeDtypeStruct(stored.padding.stored_shape(a.shape), a.dtype, sharding=sharding)

    return jax.tree.map(aval, logical_avals(state), storage(config, state), shardings(config, state))


def optimizer_shardings(config: ZeroConfig, layout: StateLayout) -> PyTree:
    """The shardings of the optimizer state's copy of the trained parameters."""
    specs = layout.specs(config.optimizer_axes, config.stage.shards_optimizer)
    return placement.named_shardings(config.mesh, layout.trained(specs))


def check_is_state(state: object, other: object = None, call: str = "step(state, batch)") -> None:
    """Raises ValueError if something else is passed than a state, such as the batch, or the pair that a step returned.

    `other` is another argument, which may be the state; `call` shows their order.
    """
    if isinstance(state, TrainState):
        return
    got, fix = type(state).__name__, "pass a state: state = zero.init(model, tx), or what a step returned"
    if isinstance(other, TrainState):
        got, fix = f"{got}, and the state in another place", f"pass the arguments in their order: {call}"
    elif isinstance(state, tuple) and any(isinstance(item, TrainState) for item in state):
        got = f"a tuple of {', '.join(type(item).__name__ for item in state)}"
        fix = "a step returns a pair: state, metrics = step(state, batch)"
    raise ValueError(f"state: this is not a TrainState\n  got:      {got}\n  fix:      {fix}")


def check_not_donated(state: TrainState) -> None:
    """Raises ValueError if an array of the state is deleted, as the arrays of a state are that a step was called with.

    The runtime would end the process. Avals are ignored.
    """
    check_is_state(state)

    def is_deleted(a: Any) -> bool:
        return not isinstance(a, jax.ShapeDtypeStruct | Tracer) and hasattr(a, "is_deleted") and a.is_deleted()

    if any(map(is_deleted, jax.tree.leaves(state))):
        deleted = next(path for path, a in by_path(state).items() if is_deleted(a))
        raise ValueError(
            f"state: it was donated to a step, which updated it in place\n"
            f"  got:      {deleted!r} is deleted\n"
            f"  fix:      continue with the state that the step returned: state, metrics = step(state, batch)"
        )


def logical_avals(state: TrainState) -> TrainState:
    """The avals of a state without the zeros with which its arrays are stored, and without shardings."""
    layout = state.layout
    trained = layout.trained_avals()

    def like(tree: PyTree, shapes: PyTree) -> PyTree:
        return jax.tree.map(lambda a, full: jax.ShapeDtypeStruct(full.shape, a.dtype), tree, shapes)

    return dataclasses.replace(
        jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), state),
        params=like(state.params, jax.tree.unflatten(layout.tree, layout.leaves)),
        master=None if state.master is None else like(state.master, trained),
        opt_state=like(state.opt_state, jax.eval_shape(layout.tx.init, trained)),
    )


def check_trained(state: TrainState, params: PyTree) -> None:
    """Raises ValueError if `params` are not like the trained parameters of the state, with None at frozen leaves.

    A leaf may have the zeros with which it is stored in shards. It may not have a narrower dtype than that in which the
    optimizer holds the parameter: an average loses its changes in it.
    """
    given, leaves = by_path(params), {leaf.path: leaf for leaf in state.layout.leaves if leaf.trainable}
    for path in sorted(given.keys() | leaves.keys()):
        # Check the shape.
        leaf, got = leaves.get(path), jnp.shape(given[path]) if path in given else "missing"
        if leaf is None or got not in (leaf.shape, leaf.dims.padding.stored_shape(leaf.shape)):
            raise ValueError(
                f"with_params: these are not the trained parameters of the state\n"
                f"  got:      {path}: {got}\n"
                f"  want:     {path}: {leaf.shape if leaf else 'no such leaf, or a frozen one'}\n"
                f"  fix:      pass a tree like state.params, with None at frozen leaves"
            )

        # Check the dtype.
        dtype = jnp.result_type(given[path])
        if dtype.itemsize < jnp.dtype(leaf.dtype).itemsize:
            raise ValueError(
                f"with_params: the values are in a narrower dtype than the parameters that the optimizer holds\n"
                f"  got:      {path}: {dtype}, in which an average loses its changes\n"
                f"  want:     {path}: {leaf.dtype}\n"
                f"  fix:      zerojax.ema(tx, decay) keeps an average in fp32, state.ema_params; cast any other tree"
            )


# The repr -----------------------------------------------------------------------------------------------------------


def _state_text(state: TrainState) -> str:
    """The step, stage, size and bytes on a device of a state, and what is not sharded. No value is waited for."""
    layout = state.layout
    leaves, config = layout.leaves, layout.config
    trained = sum(leaf.size for leaf in leaves if leaf.trainable)
    total = sum(leaf.size for leaf in leaves)
    of_these = "" if trained == total else f", {count_text(trained)} of them trained"
    where = "" if config is None else f", {config.stage.title} on {mesh_text(dict(config.mesh.shape))}"
    lines = [
        f"TrainState({_step_text(state)}{where}",
        f"  {count_text(total)} parameters in {len(leaves):,} leaves{of_these}",
        f"  on a device: {_held_text(state)}",
    ]
    whole = [leaf.path for leaf in leaves if leaf.dim is None]
    if whole and config is not None and config.stage.shards_optimizer and config.axes.num_shards > 1:
        names = [each.text.replace(SPACE, " ") for each in fold(whole, [0] * len(whole))]
        lines.append(f"  not sharded: {abbreviate(names, separator=', ')}")
    return "\n".join(lines) + ")"


def _step_text(state: TrainState) -> str:
    """The step if it is known without waiting for a running one, or else why it is not."""
    step: PyTree = state.step
    if isinstance(step, Tracer):
        return "traced"
    if isinstance(step, jax.ShapeDtypeStruct):
        return "avals"
    if any(a.is_deleted() for a in jax.tree.leaves(state) if isinstance(a, jax.Array)):
        return "donated to a step"
    return f"step {int(np.asarray(step.addressable_data(0)))}" if step.is_ready() else "step not ready"


def _held_text(state: TrainState) -> str:
    """The bytes of the shards on one device; of values that are traced, those of the whole arrays."""
    optimizer = (state.master, state.opt_state)
    parts = {"parameters": state.params, "optimizer state": optimizer, "model state": state.model_state}
    held, in_host = collections.Counter(), collections.Counter()
    for name, tree in parts.items():
        for a in jax.tree.leaves(tree):
            sharding = None if isinstance(a, Tracer) else getattr(a, "sharding", None)
            memory = in_host if getattr(sharding, "memory_kind", None) == PINNED_HOST else held
            shape = a.shape if sharding is None else sharding.shard_shape(tuple(a.shape))
            memory[name] += 0 if models.is_key(a) else math.prod(shape) * a.dtype.itemsize
    texts = []
    for sizes in (held, in_host) if any(in_host.values()) else (held,):
        listed = ", ".join(f"{name} {bytes_text(size)}" for name, size in sizes.items() if size)
        texts.append(f"{bytes_text(sum(sizes.values()))} ({listed})")
    where = "on the disk" if any(hasattr(a, "load") for a in jax.tree.leaves(optimizer)) else "in host memory"
    return f"\n  {where}: ".join(texts)
