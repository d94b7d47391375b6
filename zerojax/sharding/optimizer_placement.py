"""How every leaf of an optimizer's state is stored: like the parameter whose shape or rows it has."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import optax
from jax.sharding import PartitionSpec

from zerojax.sharding import placement
from zerojax.sharding.axes import Axes, Dims
from zerojax.sharding.dim_choice import choose_dim
from zerojax.sharding.padding import NO_PADDING, Padding
from zerojax.sharding.placement import Leaf, data_spec, path_text
from zerojax.utils.typing import Aval, PyTree


@dataclasses.dataclass(frozen=True)
class Stored:
    """How an array of an optimizer's state is stored."""

    spec: PartitionSpec  # over all axes of the mesh
    padding: Padding  # the zeros at its end
    leaf: Leaf | None = None  # the parameter that it is stored like, or None
    # the parameter whose rows it has, and with which it is sharded, or None. It may have another last dim than the
    # parameter, as the scales of blocks have.
    rows_of: Leaf | None = None
    param: Leaf | None = None  # the parameter that it belongs to, or None

    @property
    def dim(self) -> int | None:
        """The dim that is divided over the data axes, of an array that is not divided over others; or None."""
        return next((dim for dim, names in enumerate(self.spec) if names), None)

    @property
    def in_pieces(self) -> bool:
        """Whether pieces of it can be updated together with pieces of a parameter."""
        return self.leaf is not None and bool(self.leaf.shape)


def optimizer_placement(
    tx: optax.GradientTransformation,
    opt_state: PyTree,
    params: PyTree,
    axes: Axes,
    sharded: bool,
    pads: bool = True,
) -> PyTree:
    """A `Stored` for every leaf of an optimizer state.

    A leaf that belongs to a parameter and has its shape (a moment, a trace, an average) is stored like the parameter.
    One with as many dims that can be divided in the same dim (the scales of blocks) is sharded in it too. All others (a
    factored moment, a step count) are stored by their own shapes.

    Args:
        tx: any optax transformation.
        opt_state: its state for logical parameters, as avals.
        params: tree of the `Leaf` of each trained parameter.
        axes: the data axes.
        sharded: whether the stage shards optimizer state.
        pads: whether arrays may be stored with zeros, as in `place`.
    """

    def by_shape(leaf: Aval) -> Stored:
        choice = choose_dim(leaf.shape, axes.num_shards, stacked=False, pads=pads)
        dims = Dims(choice.dim if sharded else None, num_zeros=choice.num_zeros)
        return Stored(data_spec(dims.shard, axes), dims.padding)

    def like_param(leaf: Aval | optax.MaskedNode, param: Leaf) -> Stored | optax.MaskedNode:
        if isinstance(leaf, optax.MaskedNode):
            return leaf
        return dataclasses.replace(by_param(leaf, param), param=param)

    def by_param(leaf: Aval, param: Leaf) -> Stored:
        if tuple(leaf.shape) == param.shape:
            return Stored(param.spec(axes, sharded), param.padding(sharded), param, param)

        # It may have the rows of the parameter, and be sharded in its dim.
        dim = param.dim if sharded else None
        rows_of = param if leaf.shape[:-1] == param.shape[:-1] and leaf.ndim == len(param.shape) else None
        if dim is None or leaf.ndim != len(param.shape):
            stored = by_shape(leaf)
            return dataclasses.replace(stored, rows_of=None if any(stored.spec) else rows_of)
        if leaf.shape[dim] == param.shape[dim]:
            return Stored(data_spec(dim, axes), param.padding(sharded), rows_of=rows_of)
        divides_alike = leaf.shape[dim] % axes.num_shards == 0 and param.shape[dim] % leaf.shape[dim] == 0
        return Stored(data_spec(dim, axes), NO_PADDING, rows_of=rows_of) if divides_alike else by_shape(leaf)

    is_masked = lambda x: isinstance(x, optax.MaskedNode)
    try:
        return optax.tree.map_params(
            tx, like_param, opt_state, params, transform_non_params=by_shape, is_leaf=is_masked
        )
    except Exception:  # it calls functions of the user, such as labels by path, with a placeholder of the parameters
        return _by_path(opt_state, params, like_param, by_shape)


def _by_path(
    opt_state: PyTree,
    params: PyTree,
    like_param: Callable[[Aval, Leaf], Stored | optax.MaskedNode],
    by_shape: Callable[[Aval], Stored],
) -> PyTree:
    """As `optimizer_placement`, where a leaf belongs to the parameter whose path its own ends with."""
    by_path = placement.by_path(params)

    def stored(path: Sequence[object], leaf: Aval) -> Stored | optax.MaskedNode:
        parts = path_text(path).split("/")
        ends = ("/".join(parts[start:]) for start in range(len(parts)))
        param = next((by_path[end] for end in ends if end in by_path), None)
        return by_shape(leaf) if param is None else like_param(leaf, param)

    return jax.tree_util.tree_map_with_path(stored, opt_state)
