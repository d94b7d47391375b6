"""Placement: where each leaf of the model states lives. The stage table of ZeRO, as code.

    stage   parameters   gradients   optimizer state (with the fp32 master)
    0       P()          P()         P()
    1       P()          P()         P('data')       P_os
    2       P()          P('data')   P('data')       P_os+g
    3       P('data')    P('data')   P('data')       P_os+g+p

At stage 1 gradients are full while they accumulate; one reduce-scatter a step turns them into the shards that the
optimizer reads.

Which dim is sharded: the first that the number of shards divides. The layer dim of a stacked leaf is never considered,
nor a dim that an annotation divides over another axis ('model'): that axis stays in the spec at every stage. A leaf
without such a dim is replicated over the data axes, and `explain()` lists it. The first dim is the outermost in memory:
its shards lie there one after the other, as a collective moves them. What moves along another dim is transposed by the
compiler, and of scanned layers the whole stack at once.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from zerojax.sharding import annotations
from zerojax.sharding.axes import WHOLE, Axes, Dims, axis_names
from zerojax.sharding.units import no_match, unit_names


@dataclasses.dataclass(frozen=True)
class Overrides:
    """What a user says about leaves by glob patterns on their paths ('layers/*/kernel').

    Attributes:
        shard_dims: pattern -> dim to shard, or None to replicate.
        stacked: patterns of leaves whose dim 0 counts layers.
        frozen: patterns of leaves that are not trained.
        units: patterns on leading parts of paths; what each matches is a communication unit.
        partition_specs: pattern -> spec over mesh axes, instead of what the model says of the leaf.
    """

    shard_dims: Mapping[str, int | None] = dataclasses.field(default_factory=dict)
    stacked: Sequence[str] = ()
    frozen: Sequence[str] = ()
    units: Sequence[str] = ()
    partition_specs: Mapping[str, PartitionSpec] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Where one parameter leaf lives, and why.

    Attributes:
        path: keys joined by '/'.
        shape, dtype: in full.
        dim: the sharded dim, or None.
        unit: the leaves that are gathered together share it.
        reason: why this dim, or why none.
        trainable: whether it gets a gradient and optimizer state.
        beside: what is divided over axes that ZeRO leaves alone.
        stacked: whether dim 0 counts layers.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    dim: int | None
    unit: str
    reason: str
    trainable: bool
    beside: PartitionSpec = WHOLE
    stacked: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def dims(self) -> Dims:
        return Dims(self.dim, self.beside)

    def spec(self, axes: Axes, sharded: bool) -> PartitionSpec:
        """Over all axes, where a stage shards what stands for this leaf, or does not."""
        ours = data_spec(self.dim if sharded else None, axes)
        return PartitionSpec(*(a or b for a, b in itertools.zip_longest(ours, self.beside)))


def path_text(path: Sequence[Any]) -> str:
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def data_spec(dim: int | None, axes: Axes) -> PartitionSpec:
    """`dim` over the shard axes, everything else whole: what `shard_map` is told of a leaf."""
    if dim is None or axes.num_shards == 1:
        return PartitionSpec()
    return PartitionSpec(*[None] * dim, axes.shard[0] if len(axes.shard) == 1 else axes.shard)


def choose_dim(
    shape: Sequence[int], num_shards: int, stacked: bool, beside: PartitionSpec = WHOLE
) -> tuple[int | None, str]:
    """(the dim to shard, or None; the reason)."""
    taken = {d: "x".join(axis_names(entry)) for d, entry in enumerate(beside) if entry}
    dims = [d for d in range(1 if stacked else 0, len(shape)) if d not in taken]
    divisible = [d for d in dims if shape[d] and shape[d] % num_shards == 0]
    if divisible:
        return divisible[0], "first divisible dim"
    if not shape:
        return None, "replicated: a scalar"
    if not dims and not taken:
        return None, "replicated: one scalar a layer"
    remainders = [f"{shape[d]} % {num_shards} = {shape[d] % num_shards}" for d in dims]
    return None, "replicated: " + ", ".join([*remainders, *(f"dim {d} is over {names}" for d, names in taken.items())])


def check_arrays(params: Any) -> None:
    """Raises ValueError for a leaf that is no array."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise ValueError(
                f"placement: {path_text(path)!r} is no array\n"
                f"  got:      {type(leaf).__name__}\n"
                f"  fix:      keep it outside of the parameter tree, or make it a jax.Array"
            )


def _first_match(path: str, patterns: Sequence[str]) -> str | None:
    return next((p for p in patterns if fnmatchcase(path, p)), None)


def place(
    params: Any,
    mesh: Any,
    axes: Axes,
    overrides: Overrides,
    stacked_paths: frozenset[str] = frozenset(),
    annotated: Mapping[str, PartitionSpec] = MappingProxyType({}),
) -> tuple[Leaf, ...]:
    """Places every leaf of a parameter tree, in flattening order.

    Args:
        params: tree of arrays or avals.
        mesh: all axes.
        axes: the data axes.
        overrides: what the user says.
        stacked_paths: paths of leaves known to be stacked.
        annotated: path -> what the model says of the leaf.

    Raises:
        ValueError: an empty tree, a leaf that is no array, a pattern that matches nothing, a dim that does not exist,
            that the number of shards does not divide or that is over another axis; an annotation that does not fit.
    """
    with_paths, _ = jax.tree_util.tree_flatten_with_path(params)
    if not with_paths:
        raise ValueError("placement: the parameter tree is empty\n  fix:      return a model or a tree with parameters")
    paths = [path_text(path) for path, _ in with_paths]
    check_arrays(params)
    for what in ("shard_dims", "stacked", "frozen", "partition_specs"):
        for pattern in getattr(overrides, what):
            if not any(fnmatchcase(path, pattern) for path in paths):
                raise ValueError(no_match(what, pattern, paths))
    units = unit_names(paths, overrides.units)
    leaves = []
    for path, unit, (_, leaf) in zip(paths, units, with_paths, strict=True):
        shape = tuple(leaf.shape)
        stacked = path in stacked_paths or _first_match(path, overrides.stacked) is not None
        said = _first_match(path, list(overrides.partition_specs))
        annotation = annotated.get(path, WHOLE) if said is None else overrides.partition_specs[said]
        beside, dim = annotations.read(path, shape, annotation, stacked, mesh, axes)
        pattern = _first_match(path, list(overrides.shard_dims))
        if pattern is not None:
            dim, reason = overrides.shard_dims[pattern], f"override {pattern!r}"
            dim = dim + len(shape) if dim is not None and dim < 0 else dim
        elif dim is not None:
            reason = "annotation"
        else:
            dim, reason = choose_dim(shape, axes.num_shards, stacked, beside)
        _check_dim(path, shape, dim, axes, beside)
        trainable = bool(jnp.issubdtype(leaf.dtype, jnp.floating)) and _first_match(path, overrides.frozen) is None
        leaves.append(Leaf(path, shape, leaf.dtype, dim, unit, reason, trainable, beside, stacked))
    return tuple(leaves)


def _check_dim(path: str, shape: tuple[int, ...], dim: int | None, axes: Axes, beside: PartitionSpec) -> None:
    taken = dim is not None and 0 <= dim < len(beside) and beside[dim] is not None
    if dim is None or (0 <= dim < len(shape) and shape[dim] % axes.num_shards == 0 and not taken):
        return
    remainders = ", ".join(f"{s} % {axes.num_shards} = {s % axes.num_shards}" for s in shape) or "a scalar"
    if taken:
        remainders = f"dim {dim} is over {'x'.join(axis_names(beside[dim]))}"
    raise ValueError(
        f"placement: cannot shard {path!r} over {'x'.join(axes.shard)} in dim {dim}\n"
        f"  got:      shape {shape}, axis size {axes.num_shards}; {remainders}\n"
        f"  fix:      another dim, a shape that {axes.num_shards} divides, or None to replicate"
    )


def optimizer_specs(
    tx: optax.GradientTransformation, opt_state: Any, specs: Any, shapes: Any, axes: Axes, sharded: bool
) -> Any:
    """A spec for every leaf of an optimizer state.

    A leaf that stands for a parameter and has its shape (a moment, a trace, an average) follows the parameter. Any
    other (a factored moment, a step count) is placed by its own shape.

    Args:
        tx: any optax transformation.
        opt_state: its state, as avals.
        specs: tree of the trainable parameters' specs.
        shapes: tree of their avals.
        axes: the data axes.
        sharded: whether the stage shards optimizer state.
    """
    own = lambda leaf: data_spec(choose_dim(leaf.shape, axes.num_shards, stacked=False)[0] if sharded else None, axes)

    def follow(leaf: Any, like: Any, like_spec: PartitionSpec) -> Any:
        if isinstance(leaf, optax.MaskedNode):
            return leaf
        return like_spec if leaf.shape == like.shape else own(leaf)

    is_masked = lambda x: isinstance(x, optax.MaskedNode)
    return optax.tree.map_params(tx, follow, opt_state, shapes, specs, transform_non_params=own, is_leaf=is_masked)


def shardings(mesh: Any, specs: Any) -> Any:
    """Tree of specs -> tree of NamedShardings."""
    return jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda x: isinstance(x, PartitionSpec))


def shard_bytes(aval: Any, sharding: NamedSharding) -> int:
    """Bytes that one device holds of an array."""
    return math.prod(sharding.shard_shape(tuple(aval.shape))) * aval.dtype.itemsize
