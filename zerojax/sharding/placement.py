"""Placement of every leaf of the model states over the mesh, by the stage table of ZeRO.

    stage   parameters   gradients   optimizer state (with the fp32 master)
    0       P()          P()         P()
    1       P()          P()         P('data')       P_os
    2       P()          P('data')   P('data')       P_os+g
    3       P('data')    P('data')   P('data')       P_os+g+p

At stage 1 gradients are full while they accumulate; one reduce-scatter per step turns them into the shards that the
optimizer reads.

The sharded dim of a leaf is the first one that the number of shards divides. Two kinds of dims are never sharded: the
layer dim of a stacked leaf, and a dim that an annotation divides over another axis such as 'model', which stays in
the spec at every stage. A leaf without a divisible dim is replicated over the data axes, and `explain()` lists it.

The first dim is preferred because it is the outermost in memory: its shards are contiguous, as collectives move them.
For any other dim the compiler transposes the leaf, and for scanned layers the whole stack at once. Tables outside of
the layers, such as embeddings, are sharded over their width: a loss that looks up rows then need not gather them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from zerojax.sharding import annotations
from zerojax.sharding.axes import REPLICATED, Axes, Dims, axis_names
from zerojax.sharding.precision import Precision
from zerojax.sharding.units import cut_patterns, no_match_text, unit_names
from zerojax.typing import AnyMesh, PyTree, Shape


@dataclasses.dataclass(frozen=True)
class Overrides:
    """The user's choices for leaves, by glob patterns on their paths ('layers/*/kernel').

    Attributes:
        shard_dims: pattern -> dim to shard, or None to replicate.
        stacked: patterns of leaves whose dim 0 counts layers.
        frozen: patterns of leaves that are not trained.
        trainable: what is trained, all else is not: patterns, an nnx filter, a predicate of (path, aval), or None.
        dtypes: pattern -> the dtype in which leaves are gathered and computed with, instead of the precision's.
        units: patterns on leading parts of paths; the leaves below each match are a unit.
        partition_specs: pattern -> spec over mesh axes, instead of the annotation of the model.
        axis_names: name in annotations of the model -> axis of the mesh, or None for no axis.
    """

    shard_dims: Mapping[str, int | None] = dataclasses.field(default_factory=dict)
    stacked: Sequence[str] = ()
    frozen: Sequence[str] = ()
    trainable: Any = None
    dtypes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    units: Sequence[str] = ()
    partition_specs: Mapping[str, PartitionSpec] = dataclasses.field(default_factory=dict)
    axis_names: Mapping[str, str | None] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """The placement of one parameter leaf.

    Attributes:
        path: keys joined by '/'.
        shape: of the full leaf.
        dtype: in which it is initialized, updated and saved: param_dtype, or that of the model if it is frozen.
        compute_dtype: in which it is gathered and computed with.
        dim: the sharded dim, or None.
        unit: name of the unit, whose leaves are gathered together.
        reason: why this dim is sharded, or why no dim is.
        trainable: whether it has a gradient and optimizer state.
        model_spec: its spec over the axes that are not data axes, such as 'model'.
        stacked: whether dim 0 counts layers.
    """

    path: str
    shape: Shape
    dtype: Any
    compute_dtype: Any
    dim: int | None
    unit: str
    reason: str
    trainable: bool
    model_spec: PartitionSpec = REPLICATED
    stacked: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def size_at_once(self) -> int:
        """Elements that are gathered at a time: those of one layer, if the leaf is stacked."""
        return math.prod(self.shape[1:]) if self.stacked else self.size

    @property
    def dims(self) -> Dims:
        return Dims(self.dim, self.model_spec)

    def spec(self, axes: Axes, sharded: bool) -> PartitionSpec:
        """The spec over all axes, with or without the shard axes."""
        over_data = data_spec(self.dim if sharded else None, axes)
        return PartitionSpec(*(a or b for a, b in itertools.zip_longest(over_data, self.model_spec)))


def path_text(path: Sequence[Any]) -> str:
    """A key path of jax.tree_util as text: keys joined by '/'."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def data_spec(dim: int | None, axes: Axes) -> PartitionSpec:
    """The spec of a leaf for `shard_map`: `dim` over the shard axes, and no other axes."""
    if dim is None or axes.num_shards == 1:
        return PartitionSpec()
    return PartitionSpec(*[None] * dim, axes.shard[0] if len(axes.shard) == 1 else axes.shard)


def choose_dim(
    shape: Sequence[int],
    num_shards: int,
    stacked: bool,
    model_spec: PartitionSpec = REPLICATED,
    is_table: bool = False,
) -> tuple[int | None, str]:
    """Returns (the dim to shard, or None; the reason). Of a table, dim 1 is preferred."""
    taken = {d: "x".join(axis_names(entry)) for d, entry in enumerate(model_spec) if entry}
    dims = [d for d in range(1 if stacked else 0, len(shape)) if d not in taken]
    divisible = [d for d in dims if shape[d] and shape[d] % num_shards == 0]
    if is_table and 1 in divisible:
        return 1, "width of a table"
    if divisible:
        return divisible[0], "first divisible dim"
    if not shape:
        return None, "replicated: a scalar"
    if not dims and not taken:
        return None, "replicated: one scalar per layer"
    remainders = [f"{shape[d]} % {num_shards} = {shape[d] % num_shards}" for d in dims]
    return None, "replicated: " + ", ".join([*remainders, *(f"dim {d} is over {names}" for d, names in taken.items())])


def annotated_dim(
    shape: Shape, dim: int, num_shards: int, stacked: bool, model_spec: PartitionSpec
) -> tuple[int | None, str]:
    """Returns (the dim to shard if the annotation names the data axes at `dim`; the reason).

    The annotation of a dim of 4 experts was written for at most 4 devices. On 8, another dim is sharded.
    """
    if shape[dim] % num_shards == 0 and not (stacked and dim == 0):
        return dim, "annotation"
    why = (
        "counts layers"
        if stacked and dim == 0
        else f"cannot be: {shape[dim]} % {num_shards} = {shape[dim] % num_shards}"
    )
    chosen, reason = choose_dim(shape, num_shards, stacked, model_spec)
    if chosen is None:
        return None, reason
    return chosen, f"first divisible dim; annotated dim {dim} {why}"


def _tables(shapes: Mapping[str, Shape], units: Sequence[str], stacked: Collection[str]) -> set[str]:
    """The paths of leaves that may be tables of rows: matrices with many more rows than columns outside of layers.

    Vocabularies of published models have at least 3.9 times as many entries as the model is wide (Llama 2 70B). A unit
    is a layer if others differ from it in a number only ('layers/0', 'Block_3') and it has several matrices. What is
    wrongly taken for a table is sharded all the same, in its other dim.
    """
    matrices: dict[str, list[str]] = {}
    for path, unit in zip(shapes, units, strict=True):
        if len(shapes[path]) > 1:
            matrices.setdefault(unit, []).append(path)
    stem = lambda unit: re.sub(r"\d+", "#", unit)
    siblings = Counter(stem(unit) for unit in matrices)
    found = set()
    for unit, paths in matrices.items():
        is_layer = siblings[stem(unit)] > 1 and len(paths) > 1
        tall = {p for p in paths if len(shapes[p]) == 2 and shapes[p][0] > 2 * shapes[p][1] and p not in stacked}
        found |= set() if is_layer else tall
    return found


def check_arrays(params: PyTree) -> None:
    """Raises ValueError if a leaf is not an array."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise ValueError(
                f"placement: {path_text(path)!r} is not an array\n"
                f"  got:      {type(leaf).__name__}\n"
                f"  fix:      move it out of the parameter tree, or make it a jax.Array"
            )


def _check_floating(pattern: str, dtype: Any) -> None:
    try:
        is_floating = dtype is not None and jnp.issubdtype(jnp.dtype(dtype), jnp.floating)  # None would be float64
    except TypeError:  # NumPy knows no such dtype
        is_floating = False
    if not is_floating:
        raise ValueError(
            f"dtypes: {pattern!r} has no floating dtype\n"
            f"  got:      {dtype!r}\n"
            f"  fix:      name one, for example 'float32' or 'bfloat16'"
        )


def _first_match(path: str, patterns: Sequence[str]) -> str | None:
    return next((p for p in patterns if fnmatchcase(path, p)), None)


class FromModel(NamedTuple):
    """What the model says about its leaves.

    Attributes:
        stacked: paths of leaves whose dim 0 counts layers.
        annotations: path -> spec.
        trained: paths of leaves that are trained unless the user freezes them; None for all.
    """

    stacked: frozenset[str] = frozenset()
    annotations: Mapping[str, PartitionSpec] = MappingProxyType({})
    trained: frozenset[str] | None = None


_UNKNOWN = FromModel()


def place(
    params: PyTree,
    mesh: AnyMesh,
    axes: Axes,
    precision: Precision,
    overrides: Overrides,
    from_model: FromModel = _UNKNOWN,
) -> tuple[Leaf, ...]:
    """Places every leaf of a parameter tree, in flattening order.

    Args:
        params: tree of arrays or avals.
        mesh: the mesh, concrete or abstract.
        axes: the data axes.
        precision: the dtypes of trained leaves.
        overrides: the user's choices.
        from_model: what is known from the model.

    Raises:
        ValueError: if the tree is empty, a leaf is not an array or is complex and not frozen, a pattern matches
            nothing, a dtype is not floating, or an annotation does not fit its leaf; if a chosen dim does not exist, is
            not divisible by the number of shards, or is divided over another axis.
    """
    with_paths, _ = jax.tree_util.tree_flatten_with_path(params)
    if not with_paths:
        raise ValueError("placement: the parameter tree is empty\n  fix:      return a model or a tree with parameters")
    paths = [path_text(path) for path, _ in with_paths]
    check_arrays(params)
    for option in ("shard_dims", "stacked", "frozen", "dtypes", "partition_specs"):
        for pattern in getattr(overrides, option):
            if not any(fnmatchcase(path, pattern) for path in paths):
                raise ValueError(no_match_text(option, pattern, paths))
    for pattern, dtype in overrides.dtypes.items():
        _check_floating(pattern, dtype)
    annotations.check_axis_names(overrides.axis_names, from_model.annotations, mesh)
    shapes = {path: tuple(leaf.shape) for path, (_, leaf) in zip(paths, with_paths, strict=True)}
    stacked_paths = from_model.stacked | {path for path in paths if _first_match(path, overrides.stacked) is not None}
    units = unit_names(shapes, overrides.units, stacked_paths)
    tables = _tables(shapes, units, stacked_paths)
    leaves = []
    for path, unit, (_, leaf) in zip(paths, units, with_paths, strict=True):
        shape = tuple(leaf.shape)
        stacked = path in stacked_paths
        pattern = _first_match(path, list(overrides.partition_specs))
        if pattern is None:
            annotation = annotations.renamed(from_model.annotations.get(path, REPLICATED), overrides.axis_names)
        else:
            annotation = overrides.partition_specs[pattern]
        model_spec, dim = annotations.check_annotation(path, shape, annotation, stacked, mesh, axes)
        pattern = _first_match(path, list(overrides.shard_dims))
        if pattern is not None:
            dim, reason = overrides.shard_dims[pattern], f"override {pattern!r}"
            dim = dim + len(shape) if dim is not None and dim < 0 else dim
        elif dim is not None:
            dim, reason = annotated_dim(shape, dim, axes.num_shards, stacked, model_spec)
        else:
            dim, reason = choose_dim(shape, axes.num_shards, stacked, model_spec, path in tables)
        _check_dim(path, shape, dim, axes, model_spec)
        trainable = _is_trainable(path, leaf.dtype, overrides.frozen, from_model.trained)
        dtype = precision.param_dtype if trainable else leaf.dtype
        pattern = _first_match(path, list(overrides.dtypes))
        compute_dtype = precision.leaf_dtype(leaf.dtype, trainable)
        if pattern is not None and jnp.issubdtype(leaf.dtype, jnp.floating):
            compute_dtype = overrides.dtypes[pattern]
        dtypes = jnp.dtype(dtype), jnp.dtype(compute_dtype)
        leaves.append(Leaf(path, shape, *dtypes, dim, unit, reason, trainable, model_spec, stacked))
    return tuple(leaves)


def _is_trainable(path: str, dtype: Any, frozen: Sequence[str], trained: frozenset[str] | None) -> bool:
    if _first_match(path, frozen) is not None or (trained is not None and path not in trained):
        return False
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise ValueError(
            f"placement: {path!r} is complex, and only real parameters are trained\n"
            f"  got:      dtype {dtype}\n"
            f"  fix:      store its real and imaginary part as two parameters, or name it in frozen="
        )
    return bool(jnp.issubdtype(dtype, jnp.floating))


def large_unit_text(leaves: Sequence[Leaf]) -> str | None:
    """What to do about a unit that holds most of the weights and can be cut, or None if there is no such unit."""
    sizes: Counter[str] = Counter()
    for leaf in leaves:
        sizes[leaf.unit] += leaf.size_at_once
    (unit, size), total = sizes.most_common(1)[0], sum(leaf.size for leaf in leaves)
    inside = {leaf.path: leaf.size_at_once for leaf in leaves if leaf.unit == unit}
    patterns = cut_patterns(unit, inside)
    if 2 * size <= total or not patterns:
        return None
    return (
        f"placement: unit {unit!r} holds {size / total:.0%} of the weights, which are gathered together\n"
        f"  got:      {len(inside)} leaves, {size:,} of {total:,} elements\n"
        f"  fix:      Zero(..., units={patterns!r}) cuts it"
    )


def _check_dim(path: str, shape: Shape, dim: int | None, axes: Axes, model_spec: PartitionSpec) -> None:
    taken = dim is not None and 0 <= dim < len(model_spec) and model_spec[dim] is not None
    if dim is None or (0 <= dim < len(shape) and shape[dim] % axes.num_shards == 0 and not taken):
        return
    remainders = ", ".join(f"{s} % {axes.num_shards} = {s % axes.num_shards}" for s in shape) or "a scalar"
    if taken:
        remainders = f"dim {dim} is over {'x'.join(axis_names(model_spec[dim]))}"
    raise ValueError(
        f"placement: cannot shard {path!r} over {'x'.join(axes.shard)} in dim {dim}\n"
        f"  got:      shape {shape}, axis size {axes.num_shards}; {remainders}\n"
        f"  fix:      choose another dim, a shape that {axes.num_shards} divides, or None to replicate"
    )


def optimizer_specs(
    tx: optax.GradientTransformation, opt_state: PyTree, specs: PyTree, shapes: PyTree, axes: Axes, sharded: bool
) -> PyTree:
    """A spec for every leaf of an optimizer state.

    A leaf that belongs to a parameter and has its shape (a moment, a trace, an average) is placed like the parameter.
    All others (a factored moment, a step count) are placed by their own shapes.

    Args:
        tx: any optax transformation.
        opt_state: its state, as avals.
        specs: tree of the trainable parameters' specs.
        shapes: tree of their avals.
        axes: the data axes.
        sharded: whether the stage shards optimizer state.
    """
    by_shape = lambda leaf: data_spec(
        choose_dim(leaf.shape, axes.num_shards, stacked=False)[0] if sharded else None, axes
    )

    def like_param(leaf: Any, param: Any, param_spec: PartitionSpec) -> Any:
        if isinstance(leaf, optax.MaskedNode):
            return leaf
        return param_spec if leaf.shape == param.shape else by_shape(leaf)

    is_masked = lambda x: isinstance(x, optax.MaskedNode)
    try:
        return optax.tree.map_params(
            tx, like_param, opt_state, shapes, specs, transform_non_params=by_shape, is_leaf=is_masked
        )
    except Exception:  # it calls functions of the user, such as labels by path, with a placeholder of the parameters
        return _specs_by_path(opt_state, specs, shapes, by_shape)


def _specs_by_path(
    opt_state: PyTree, specs: PyTree, shapes: PyTree, by_shape: Callable[[Any], PartitionSpec]
) -> PyTree:
    """As `optimizer_specs`, where a leaf belongs to the parameter whose path its own ends with, if the shapes agree."""
    is_spec = lambda x: isinstance(x, PartitionSpec)
    paths = [path_text(path) for path, _ in jax.tree_util.tree_leaves_with_path(shapes)]
    pairs = zip(jax.tree.leaves(shapes), jax.tree.leaves(specs, is_leaf=is_spec), strict=True)
    params = dict(zip(paths, pairs, strict=True))

    def spec(path: Any, leaf: Any) -> PartitionSpec:
        parts = path_text(path).split("/")
        for start in range(len(parts)):
            param, param_spec = params.get("/".join(parts[start:]), (None, None))
            if param is not None and param.shape == leaf.shape:
                return param_spec
        return by_shape(leaf)

    return jax.tree_util.tree_map_with_path(spec, opt_state)


def named_shardings(mesh: AnyMesh, specs: PyTree) -> PyTree:
    """Converts a tree of specs to a tree of NamedShardings."""
    return jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda x: isinstance(x, PartitionSpec))


def shard_bytes(aval: Any, sharding: NamedSharding) -> int:
    """The number of bytes of an array that one device holds."""
    return math.prod(sharding.shard_shape(tuple(aval.shape))) * aval.dtype.itemsize
