"""The training state, which is sharded when it is created: its leaves, their shardings and its initialization."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from zerojax.sharding import padding, placement
from zerojax.sharding.axes import Axes
from zerojax.sharding.optimizer_placement import optimizer_placement
from zerojax.sharding.padding import NO_PADDING, Padding
from zerojax.sharding.placement import PINNED_HOST, Leaf
from zerojax.sharding.precision import LossScale
from zerojax.step import models
from zerojax.step.config import ZeroConfig
from zerojax.step.descriptions import state_text
from zerojax.utils.text import SPACE, abbreviate, fold
from zerojax.utils.typing import Array, Aval, PRNGKey, PyTree


@dataclasses.dataclass(frozen=True)
class StateLayout:
    """Where and how the leaves of a training state are stored, with the model and the optimizer that they belong to.

    It is the static part of a state. All states of one `init` share the same object.

    Attributes:
        tx: the optimizer.
        model: builds the loss function's first argument from parameters and model state.
        leaves: the placement of the parameter leaves, in flattening order.
        tree: the treedef of the parameters.
        fixed_state: whether each leaf of the model state stays as it is, because its module is frozen.
        config: the mesh, stage and precision for which states are created.
    """

    tx: optax.GradientTransformation
    model: models.Model
    leaves: tuple[Leaf, ...]
    tree: PyTree
    fixed_state: tuple[bool, ...] = ()
    config: ZeroConfig | None = None

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def specs(self, axes: Axes, sharded: bool) -> PyTree:
        """The spec of every parameter, with or without the shard axes."""
        return jax.tree.unflatten(self.tree, [leaf.spec(axes, sharded) for leaf in self.leaves])

    def paddings(self, sharded: bool) -> list[Padding]:
        """The zeros with which each parameter is stored, in shards or in full."""
        return [leaf.padding(sharded) for leaf in self.leaves]

    def params_in_host(self, offloads: bool) -> list[bool]:
        """Which parameters are in host memory if they are offloaded: those that are matrices, in each layer.

        Vectors are a small part of a model. A TPU cannot read a single row of a stack of them from host memory.
        """
        return [offloads and len(leaf.shape) - leaf.stacked >= 2 for leaf in self.leaves]

    def trained_paddings(self, sharded: bool) -> list[Padding]:
        """As `paddings`, of trained parameters."""
        return [leaf.padding(sharded) for leaf in self.leaves if leaf.trainable]

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
        leaves = jax.tree.leaves(params)
        return jax.tree.unflatten(
            self.tree, [a if leaf.trainable else None for a, leaf in zip(leaves, self.leaves, strict=True)]
        )

    def with_frozen(self, trained: PyTree, params: PyTree) -> PyTree:
        """Inserts the frozen leaves of `params` into a tree from `trained`."""
        items = iter(jax.tree.leaves(trained))
        leaves = jax.tree.leaves(params)
        return jax.tree.unflatten(
            self.tree, [next(items) if f.trainable else a for a, f in zip(leaves, self.leaves, strict=True)]
        )


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
        return state_text(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainState:
        """A copy of the arrays: a state of the same layout. That of an nnx.State would lose its variables."""
        check_not_donated(self)
        return jax.tree.map(copy.deepcopy, self)

    def model(self) -> Any:
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
    sharding: Any = stored.sharding
    spec = [None if dim == zeros.dim else axes for dim, axes in enumerate(sharding.spec)]
    on_device = lambda a: jax.device_put(a, jax.memory.Space.Device) if placement.is_in_host(a) else a
    crop = jax.jit(lambda a: zeros.crop(on_device(a)), out_shardings=NamedSharding(sharding.mesh, PartitionSpec(*spec)))
    return crop(stored)


def specs(config: ZeroConfig, state: TrainState) -> TrainState:
    """The spec of every leaf of a state, by the stage table."""
    scalar: Any = PartitionSpec()
    replicated = lambda tree: jax.tree.map(lambda _: PartitionSpec(), tree)
    layout, stage, axes = state.layout, config.stage, config.axes
    sharded = stage.shards_optimizer
    trained = layout.trained(layout.specs(axes, sharded))
    stored = layout.optimizer_placement(axes, sharded)
    return TrainState(
        step=scalar,
        skipped=scalar,
        params=layout.specs(axes, stage.shards_params),
        master=None if state.master is None else trained,
        opt_state=jax.tree.map(lambda each: each.spec, stored),
        model_state=replicated(state.model_state),
        key=scalar,
        loss_scale=replicated(state.loss_scale),
        layout=layout,
    )


def stored_avals(config: ZeroConfig, state: TrainState) -> TrainState:
    """The avals of a state as its stage stores it, with shardings, whatever the shapes and shardings of its arrays."""
    layout, stage = state.layout, config.stage
    in_shards = layout.trained(jax.tree.unflatten(layout.tree, layout.paddings(stage.shards_optimizer)))
    optimizer = layout.optimizer_placement(config.axes, stage.shards_optimizer)
    zeros = dataclasses.replace(
        jax.tree.map(lambda _: NO_PADDING, state),
        params=jax.tree.unflatten(layout.tree, layout.paddings(stage.shards_params)),
        master=None if state.master is None else in_shards,
        opt_state=jax.tree.map(lambda stored: stored.padding, optimizer),
    )
    aval = lambda a, zeros, sharding: jax.ShapeDtypeStruct(zeros.stored_shape(a.shape), a.dtype, sharding=sharding)
    return jax.tree.map(aval, logical_avals(state), zeros, shardings(config, state))


def in_host(config: ZeroConfig, state: TrainState) -> TrainState:
    """Whether each leaf of a state is in host memory: of what is offloaded, the arrays shaped like parameters."""
    nowhere = jax.tree.map(lambda _: False, state)
    if not config.offloads_optimizer:
        return nowhere
    layout = state.layout
    stored = layout.optimizer_placement(config.axes, config.stage.shards_optimizer)
    master = None if state.master is None else jax.tree.map(lambda a: bool(a.ndim), state.master)
    params = jax.tree.unflatten(layout.tree, layout.params_in_host(config.offloads_params))
    in_pieces = jax.tree.map(lambda each: each.in_pieces, stored)
    return dataclasses.replace(nowhere, params=params, master=master, opt_state=in_pieces)


def shardings(config: ZeroConfig, state: TrainState) -> TrainState:
    """The shardings that the stage gives a state, whatever those of its arrays are."""
    found = placement.named_shardings(config.mesh, specs(config, state))
    if not config.offloads_optimizer:
        return found
    to_host = lambda sharding, flag: sharding.with_memory_kind(PINNED_HOST) if flag else sharding
    return jax.tree.map(to_host, found, in_host(config, state))


def optimizer_shardings(config: ZeroConfig, layout: StateLayout) -> PyTree:
    """The shardings of the optimizer state's copy of the trained parameters."""
    specs = layout.specs(config.axes, config.stage.shards_optimizer)
    return placement.named_shardings(config.mesh, layout.trained(specs))


def check_is_state(state: Any, other: Any = None, call: str = "step(state, batch)") -> None:
    """Raises ValueError if something else is passed than a state, such as the batch, or the pair that a step returned.

    Args:
        state: what is passed in place of the state.
        other: what is passed in place of another argument, which may be the state.
        call: the order of the arguments.
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

    Raises:
        ValueError: also if it is no state.
    """
    check_is_state(state)
    is_deleted = lambda a: isinstance(a, jax.Array) and not isinstance(a, Tracer) and a.is_deleted()
    if not any(map(is_deleted, jax.tree.leaves(state))):
        return
    deleted = next(path for path, a in jax.tree_util.tree_leaves_with_path(state) if is_deleted(a))
    raise ValueError(
        f"state: it was donated to a step, which updated it in place\n"
        f"  got:      {placement.path_text(deleted)!r} is deleted\n"
        f"  fix:      continue with the state that the step returned: state, metrics = step(state, batch)"
    )


def logical_avals(state: TrainState) -> TrainState:
    """The avals of a state without the zeros with which its arrays are stored, and without shardings."""
    layout = state.layout
    trained = layout.trained_avals()
    like = lambda tree, shapes: jax.tree.map(lambda a, f: jax.ShapeDtypeStruct(f.shape, a.dtype), tree, shapes)
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
    shapes = lambda tree: {placement.path_text(p): jnp.shape(a) for p, a in jax.tree_util.tree_leaves_with_path(tree)}
    got, wanted = shapes(params), shapes(state.layout.trained_avals())
    stored = {leaf.path: leaf.dims.padding.stored_shape(leaf.shape) for leaf in state.layout.leaves}
    for path in sorted(got.keys() | wanted.keys()):
        if path not in got or path not in wanted or got[path] not in (wanted[path], stored[path]):
            raise ValueError(
                f"with_params: these are not the trained parameters of the state\n"
                f"  got:      {path}: {got.get(path, 'missing')}\n"
                f"  want:     {path}: {wanted.get(path, 'no such leaf, or a frozen one')}\n"
                f"  fix:      pass a tree like state.params, with None at frozen leaves"
            )
    held = {leaf.path: leaf.dtype for leaf in state.layout.leaves}
    for path, a in jax.tree_util.tree_leaves_with_path(params):
        dtype, wanted = jnp.result_type(a), held[placement.path_text(path)]
        if jnp.dtype(dtype).itemsize < jnp.dtype(wanted).itemsize:
            raise ValueError(
                f"with_params: the values are in a narrower dtype than the parameters that the optimizer holds\n"
                f"  got:      {placement.path_text(path)}: {dtype}, in which an average loses its changes\n"
                f"  want:     {placement.path_text(path)}: {wanted}\n"
                f"  fix:      zerojax.ema(tx, decay) keeps an average in fp32, state.ema_params; cast any other tree"
            )


def check_stored(config: ZeroConfig, state: TrainState) -> None:
    """Raises ValueError if the state has other arrays than the stage stores for the parameters and the optimizer."""
    layout, stage = state.layout, config.stage
    shapes = [leaf.padding(stage.shards_params).stored_shape(leaf.shape) for leaf in layout.leaves]
    created, structure = jax.tree.flatten(jax.eval_shape(layout.tx.init, layout.trained_avals()))
    zeros = layout.optimizer_paddings(config.axes, stage.shards_optimizer)
    stored = [jax.ShapeDtypeStruct(p.stored_shape(a.shape), a.dtype) for p, a in zip(zeros, created, strict=True)]
    as_stored = lambda a, shape: jax.ShapeDtypeStruct(shape, a.dtype)
    params, tree = jax.tree.flatten(state.params)
    _check_same("parameters do", state.params, tree.unflatten(map(as_stored, params, shapes)))
    _check_same("optimizer state does", state.opt_state, structure.unflatten(stored))


def _check_same(what: str, state: PyTree, want: PyTree) -> None:
    shape = lambda a: (tuple(a.shape), jnp.dtype(a.dtype) if not models.is_key(a) else a.dtype)
    rows = lambda tree: {placement.path_text(p): shape(a) for p, a in jax.tree_util.tree_leaves_with_path(tree)}
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
