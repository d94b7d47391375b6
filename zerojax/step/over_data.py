"""Runs functions on each device's rows and shards: `shard_map` over the axes that split the rows of a batch.

Other axes are left to the compiler: `model`, and `context`, which divides model states before the other axes do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from zerojax.sharding.axes import CONTEXT, Axes, axis_names
from zerojax.sharding.placement import Leaf, data_spec
from zerojax.step.config import ZeroConfig
from zerojax.utils.typing import Array, PyTree

T = TypeVar("T")


def leaf_specs(axes: Axes, leaves: Iterable[Leaf], sharded: bool) -> list[PartitionSpec]:
    """The specs of parameter leaves for `shard_map_over_data`. Other axes stay in the arrays' shardings."""
    return [data_spec(leaf.dim if sharded else None, axes) for leaf in leaves]


def shard_map_over_data(
    config: ZeroConfig, fn: Callable[..., T], in_specs: PyTree, out_specs: PyTree
) -> Callable[..., T]:
    """Wraps a function in `shard_map`, manual over the axes that split the rows of a batch only.

    The specs of leaves may name `context`, as the outer axis of a dim. For `shard_map`, an axis that it leaves to the
    compiler is always the inner one. Such a dim is therefore split in two outside, and joined inside:

        [.., n, ..] ─► [.., C, n / C, ..] ─ shard_map ─► [.., C, n / N, ..] ─► [.., C n / N, ..]
    """
    boundary = _Boundary(config)
    outside = lambda specs: jax.tree.map(boundary.spec_outside, specs, is_leaf=_is_spec)

    def on_device(*args: PyTree) -> T:
        return _by_spec(boundary.split, out_specs, fn(*_by_spec(boundary.join, in_specs, args)))

    mapped = jax.shard_map(
        on_device if config.axes.num_context > 1 else fn,
        mesh=config.mesh,
        in_specs=outside(in_specs),
        out_specs=outside(out_specs),
        axis_names=set(config.axes.data),
        check_vma=False,
    )
    if config.axes.num_context == 1:
        return mapped
    split_outside = lambda a, spec: boundary.placed(boundary.split(a, spec), boundary.spec_outside(spec, True))
    join_outside = lambda a, spec: boundary.placed(boundary.join(a, spec), spec)
    return lambda *args: _by_spec(join_outside, out_specs, mapped(*_by_spec(split_outside, in_specs, args)))


def _is_spec(node: object) -> bool:
    return isinstance(node, PartitionSpec)


def _by_spec(apply: Callable[[Array, PartitionSpec], Array], specs: PyTree, tree: PyTree) -> PyTree:
    """Applies a function of (array, spec) to a tree of which `specs` is a prefix."""
    of_part = lambda spec, part: jax.tree.map(lambda a: apply(a, spec), part)
    return jax.tree.map(of_part, specs, tree, is_leaf=_is_spec)


class _Boundary:
    """Splits the dim that `context` is the outer axis of, and joins it."""

    def __init__(self, config: ZeroConfig):
        self._config, self._count = config, config.axes.num_context

    def split(self, a: Array, spec: PartitionSpec) -> Array:
        k = _context_dim(spec)
        return a if k is None else a.reshape(*a.shape[:k], self._count, a.shape[k] // self._count, *a.shape[k + 1 :])

    def join(self, a: Array, spec: PartitionSpec) -> Array:
        k = _context_dim(spec)
        return a if k is None else a.reshape(*a.shape[:k], -1, *a.shape[k + 2 :])

    def spec_outside(self, spec: PartitionSpec, with_context: bool = False) -> PartitionSpec:
        """The spec of what `split` returns."""
        k = _context_dim(spec)
        if k is None:
            return spec
        rest = tuple(name for name in axis_names(spec[k]) if name != CONTEXT)
        return PartitionSpec(*spec[:k], CONTEXT if with_context else None, rest, *spec[k + 1 :])

    def placed(self, a: Array, spec: PartitionSpec) -> Array:
        """Tells the compiler where an array is, in the dims that the spec names. This moves nothing."""
        if not any(CONTEXT in axis_names(entry) for entry in spec):
            return a
        free: list[Any] = [PartitionSpec.UNCONSTRAINED] * a.ndim
        entries = [entry or other for entry, other in zip([*spec, *[None] * a.ndim], free, strict=False)]
        return lax.with_sharding_constraint(a, NamedSharding(self._config.mesh, PartitionSpec(*entries)))


def _context_dim(spec: PartitionSpec) -> int | None:
    """The dim that `context` divides."""
    return next((k for k, entry in enumerate(spec) if CONTEXT in axis_names(entry)), None)
