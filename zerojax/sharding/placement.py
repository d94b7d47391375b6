"""Placement of every leaf of the model states over the mesh, by the stage table of ZeRO.

    stage   parameters   gradients   optimizer state (with the fp32 master)
    0       P()          P()         P()
    1       P()          P()         P('data')       P_os
    2       P()          P('data')   P('data')       P_os+g
    3       P('data')    P('data')   P('data')       P_os+g+p

At stage 1 gradients are full while they accumulate; one reduce-scatter per step turns them into the shards that the
optimizer reads.

`dim_choice` chooses the sharded dim of a leaf; if N does not divide it, the stored shards have zeros at the end, see
`padding`.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from zerojax.sharding import annotations
from zerojax.sharding.axes import REPLICATED, Axes, Dims, axis_names
from zerojax.sharding.dim_choice import annotated_dim, choose_dim, given_dim, tables
from zerojax.sharding.padding import NO_PADDING, Padding
from zerojax.sharding.precision import Precision
from zerojax.sharding.units import check_patterns, unit_names
from zerojax.sharding.wire import AS_IT_IS, Wire, block_dim, has_8_bits, is_large
from zerojax.utils.text import abbreviate
from zerojax.utils.typing import AnyMesh, Array, Aval, DTypeLike, PyTree, Shape

LARGE = 2**20  # parameters; below, neither a large unit nor a replicated leaf is a problem
PINNED_HOST = "pinned_host"  # the kind of the memory of a host that its devices read and write


class Stage(enum.IntEnum):
    """A stage, equal to its number. Each stage shards one more kind of model states than the stage before.

    Source: ZeRO, section 5.
    """

    DATA_PARALLEL = 0
    P_OS = 1
    P_OS_G = 2
    P_OS_G_P = 3

    @classmethod
    def of(cls, stage: int) -> Stage:
        """The stage with a given number, an integer from 0 to 3."""
        if stage not in list(cls) or isinstance(stage, bool):
            numbers = ", ".join(str(each.value) for each in cls)
            raise ValueError(f"stage: {stage!r} is not a ZeRO stage\n  fix:      one of {numbers}")
        return cls(stage)

    @property
    def title(self) -> str:
        """The stage with its name in the paper, such as 'stage 2 (P_os+g)'."""
        names = ("data parallelism", "P_os", "P_os+g", "P_os+g+p")
        return f"stage {self.value} ({names[self]})"

    @property
    def limit_text(self) -> str:
        """What the stage shards, as the reason why it does not shard something else."""
        shards = ("nothing", "the optimizer state only", "the gradients and the optimizer state only", "everything")
        return f"stage {self.value} shards {shards[self]}"

    @property
    def shards_optimizer(self) -> bool:
        """Whether optimizer state and the master copy of parameters are sharded."""
        return self >= Stage.P_OS

    @property
    def shards_grads(self) -> bool:
        """Whether gradients are reduce-scattered unit by unit, in every microbatch."""
        return self >= Stage.P_OS_G

    @property
    def shards_params(self) -> bool:
        """Whether parameters are sharded, and gathered unit by unit."""
        return self >= Stage.P_OS_G_P


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
    """The placement of one parameter leaf."""

    path: str  # keys joined by '/'
    shape: Shape  # of the full leaf
    dtype: DTypeLike  # in which it is initialized, updated and saved: param_dtype, or that of the model if it is frozen
    compute_dtype: np.dtype  # in which it is gathered and computed with
    dim: int | None  # the sharded dim, or None
    unit: str  # name of the unit, whose leaves are gathered together
    reason: str  # why this dim is sharded, or why no dim is
    trainable: bool  # whether it has a gradient and optimizer state
    model_spec: PartitionSpec = REPLICATED  # its spec over the axes that are not data axes, such as 'model'
    stacked: bool = False  # whether dim 0 counts layers
    num_zeros: int = 0  # the number of zeros at the end of `dim` where the leaf is stored in shards
    wire: Wire = AS_IT_IS  # how it is sent

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def size_at_once(self) -> int:
        """Elements that are gathered at a time: those of one layer, if the leaf is stacked."""
        return math.prod(self.shape[1:]) if self.stacked else self.size

    @property
    def dims(self) -> Dims:
        return Dims(self.dim, self.model_spec, self.num_zeros, self.wire)

    def of_layer(self) -> Leaf:
        """The leaf of one layer, if it is stacked; otherwise itself."""
        if not self.stacked:
            return self
        shard, model_spec, _, wire = self.dims.of_layer()
        shape = self.shape[1:]
        return dataclasses.replace(self, shape=shape, dim=shard, model_spec=model_spec, stacked=False, wire=wire)

    def padding(self, sharded: bool) -> Padding:
        """The zeros with which the leaf is stored, in shards or in full."""
        return self.dims.padding if sharded else NO_PADDING

    def without_zeros(self, array: Array) -> Array:
        """The leaf in its logical shape, if it is stored with zeros."""
        return array if tuple(array.shape) == self.shape else self.dims.padding.crop(array)

    def spec(self, axes: Axes, sharded: bool) -> PartitionSpec:
        """The spec over all axes, with or without the shard axes."""
        over_data = data_spec(self.dim if sharded else None, axes)
        return PartitionSpec(*(a or b for a, b in itertools.zip_longest(over_data, self.model_spec)))


def path_text(path: Sequence[Any]) -> str:
    """A key path of jax.tree_util as text: keys joined by '/'."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def by_path(tree: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """The leaves of a tree by their paths, in flattening order."""
    return {path_text(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)}


def data_spec(dim: int | None, axes: Axes) -> PartitionSpec:
    """The spec of a leaf for `shard_map`: `dim` over the shard axes, and no other axes."""
    if dim is None or axes.num_shards == 1:
        return PartitionSpec()
    return PartitionSpec(*[None] * dim, axes.shard[0] if len(axes.shard) == 1 else axes.shard)


def check_leaves(tree: PyTree) -> None:
    """Raises ValueError if a leaf is not an array, or if two leaves have the same path."""
    seen: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        text = path_text(path)
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise ValueError(
                f"placement: {text!r} is not an array\n"
                f"  got:      {type(leaf).__name__}\n"
                f"  fix:      move it out of the parameter tree, or make it a jax.Array"
            )
        if text in seen:
            raise ValueError(
                f"placement: two leaves have the path {text!r}, the keys joined by '/'\n"
                f"  got:      {jax.tree_util.keystr(seen[text])} and {jax.tree_util.keystr(path)}\n"
                f"  fix:      rename one of them; patterns and checkpoints name leaves by these paths"
            )
        seen[text] = path


def _check_floating(pattern: str, dtype: DTypeLike) -> None:
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


def _first_match(path: str, patterns: Iterable[str]) -> str | None:
    return next((p for p in patterns if fnmatchcase(path, p)), None)


class FromModel(NamedTuple):
    """What the model says about its leaves."""

    stacked: frozenset[str] = frozenset()  # paths of leaves whose dim 0 counts layers
    annotations: Mapping[str, PartitionSpec] = MappingProxyType({})  # path -> spec
    trained: frozenset[str] | None = None  # paths of leaves that are trained unless the user freezes them; None for all


_UNKNOWN = FromModel()


def place(
    params: PyTree,
    mesh: AnyMesh,
    axes: Axes,
    precision: Precision,
    overrides: Overrides,
    from_model: FromModel = _UNKNOWN,
    pads: bool = True,
) -> tuple[Leaf, ...]:
    """Places every leaf of a parameter tree, in flattening order, and checks it and the patterns of the user.

    Without `pads`, no leaf is stored with zeros: it is replicated if no dim is divisible.
    """
    # Check the leaves, and that every pattern matches some of them.
    check_leaves(params)
    arrays = by_path(params)
    if not arrays:
        raise ValueError("placement: the parameter tree is empty\n  fix:      return a model or a tree with parameters")
    paths = list(arrays)
    for option in ("shard_dims", "stacked", "frozen", "dtypes", "partition_specs"):
        check_patterns(option, getattr(overrides, option), paths)
    for pattern, dtype in overrides.dtypes.items():
        _check_floating(pattern, dtype)
    annotations.check_axis_names(overrides.axis_names, from_model.annotations, mesh)

    # What depends on several leaves: stacks, units and tables.
    shapes = {path: tuple(leaf.shape) for path, leaf in arrays.items()}
    stacked_paths = from_model.stacked | {path for path in paths if _first_match(path, overrides.stacked)}
    units = unit_names(shapes, overrides.units, stacked_paths)
    found_tables = tables(shapes, units, stacked_paths)
    leaves = []
    for (path, leaf), unit in zip(arrays.items(), units, strict=True):
        shape, stacked = shapes[path], path in stacked_paths

        # Its dims over the other axes of the mesh.
        annotation = annotations.renamed(from_model.annotations.get(path, REPLICATED), overrides.axis_names)
        if pattern := _first_match(path, overrides.partition_specs):
            annotation = overrides.partition_specs[pattern]
        model_spec, dim = annotations.check_annotation(path, shape, annotation, stacked, mesh, axes)

        # The dim that is sharded over the data axes.
        if pattern := _first_match(path, overrides.shard_dims):
            choice = given_dim(path, shape, overrides.shard_dims[pattern], axes, model_spec, pads)
            choice = choice._replace(reason=f"override {pattern!r}")
        elif dim is not None:
            choice = annotated_dim(shape, dim, axes.num_shards, stacked, model_spec, pads)
        else:
            choice = choose_dim(shape, axes.num_shards, stacked, model_spec, path in found_tables, pads)

        # Its dtypes.
        trainable = _is_trainable(path, leaf.dtype, overrides.frozen, from_model.trained)
        compute_dtype = precision.leaf_dtype(leaf.dtype, trainable)
        pattern = _first_match(path, overrides.dtypes)
        if pattern and jnp.issubdtype(leaf.dtype, jnp.floating):
            compute_dtype = overrides.dtypes[pattern]
        dtypes = jnp.dtype(precision.param_dtype if trainable else leaf.dtype), jnp.dtype(compute_dtype)

        dim, reason, num_zeros = choice
        leaves.append(Leaf(path, shape, *dtypes, dim, unit, reason, trainable, model_spec, stacked, num_zeros))

    if from_model.trained is not None and overrides.frozen and not any(leaf.trainable for leaf in leaves):
        raise ValueError(
            f"placement: trainable= and frozen= leave no parameter to train\n"
            f"  got:      trainable= selects {abbreviate(sorted(from_model.trained), separator=', ')}; "
            f"frozen={list(overrides.frozen)}\n"
            f"  fix:      what frozen= matches is not trained; leave one of the two out"
        )
    if precision.gather or precision.scatter:
        kept = found_tables | {path for path in paths if _first_match(path, overrides.dtypes)}
        leaves = _with_wires(leaves, kept, mesh, axes, precision)
    return tuple(leaves)


def _with_wires(
    leaves: Sequence[Leaf], kept: Collection[str], mesh: AnyMesh, axes: Axes, precision: Precision
) -> list[Leaf]:
    """The leaves with how they are sent, as the precision says; in 8 bits, none of those whose paths are in `kept`."""
    largest: dict[str, int] = {}
    for leaf in leaves:
        largest[leaf.unit] = max(largest.get(leaf.unit, 0), leaf.size_at_once)
    placed = []
    for leaf in leaves:
        # The dim along which blocks run, if the leaf may be sent in 8 bits.
        blocks, first = None, int(leaf.stacked)
        sizes = [math.prod(mesh.shape[name] for name in axis_names(entry)) for entry in leaf.model_spec]
        divided = [*sizes, *[1] * (len(leaf.shape) - len(sizes))]
        is_wide = jnp.issubdtype(leaf.compute_dtype, jnp.floating) and not has_8_bits(leaf.compute_dtype)
        may_be = is_wide and leaf.path not in kept and is_large(leaf.size_at_once, largest[leaf.unit])
        if leaf.dim is not None and may_be:
            divided[leaf.dim] = axes.num_shards
            blocks = block_dim(leaf.dims.padding.stored_shape(leaf.shape)[first:], divided[first:])

        gather = jnp.dtype(precision.gather) if precision.gather and blocks is not None else None
        in_8_bits = precision.scatter and has_8_bits(precision.scatter)
        sums_here = precision.scatter and leaf.dim is not None and (blocks is not None or not in_8_bits)
        scatter = jnp.dtype(precision.scatter) if sums_here and leaf.trainable else None
        wire = Wire(gather, scatter, None if blocks is None else blocks + first)
        placed.append(dataclasses.replace(leaf, wire=wire))
    return placed


def _is_trainable(path: str, dtype: DTypeLike, frozen: Sequence[str], trained: frozenset[str] | None) -> bool:
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        raise ValueError(
            f"placement: {path!r} is a PRNG key, and no parameter\n"
            f"  got:      dtype {dtype}\n"
            f"  fix:      keep it beside the parameters, as in {{'params': params, 'rng': key}}; or draw with the key\n"
            f"            that the loss gets, as in loss(params, batch, key)"
        )
    if _first_match(path, frozen) or (trained is not None and path not in trained):
        return False
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise ValueError(
            f"placement: {path!r} is complex, and only real parameters are trained\n"
            f"  got:      dtype {dtype}\n"
            f"  fix:      store its real and imaginary part as two parameters, or name it in frozen="
        )
    return bool(jnp.issubdtype(dtype, jnp.floating))


def named_shardings(mesh: AnyMesh, specs: PyTree) -> PyTree:
    """Converts a tree of specs to a tree of NamedShardings."""
    return jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda x: isinstance(x, PartitionSpec))


def shard_bytes(aval: Aval, sharding: NamedSharding) -> int:
    """The number of bytes of an array that one device holds."""
    return math.prod(sharding.shard_shape(tuple(aval.shape))) * aval.dtype.itemsize


def in_memory(a: Any) -> Array:
    """An array, which is read into host memory if it is on a disk (`offload.disk`)."""
    return a.load() if hasattr(a, "load") else a


def is_in_host(array: Array) -> bool:
    """Whether the type of an array says that it is in host memory."""
    return jax.typeof(array).memory_space == jax.memory.Space.Host
