"""Advice about a placement that costs memory or time, with the option of `Zero` that helps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from jax.sharding import PartitionSpec

from zerojax.sharding.axes import Axes
from zerojax.sharding.dim_choice import choose_dim, globs, possible_stack
from zerojax.sharding.placement import LARGE, Leaf
from zerojax.sharding.units import cut_patterns
from zerojax.utils.text import abbreviate
from zerojax.utils.warn import warn


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
    fix = f"Zero(..., units={patterns!r}) cuts it"
    shapes = {leaf.path: leaf.shape for leaf in leaves if not leaf.stacked}
    if stack := globs(possible_stack(shapes, inside), [leaf.path for leaf in leaves]):
        fix = f"Zero(..., stacked={stack!r}) if dim 0 counts layers that a loop slices; if not, {fix}"
    return (
        f"placement: unit {unit!r} holds {size / total:.0%} of the weights, which are gathered together\n"
        f"  got:      {len(inside)} leaves, {size:,} of {total:,} elements\n"
        f"  fix:      {fix}"
    )


_MOST_REPLICATED, _MOST_ZEROS = 0.01, 0.1  # of all parameters


def uneven_text(leaves: Sequence[Leaf], axes: Axes, pads: bool = True) -> str | None:
    """What to do about leaves that are replicated although the stage shards them, or about zeros that pad shards.

    None if at most 1% of the parameters are replicated, and zeros are at most 10%.
    """
    total = sum(leaf.size for leaf in leaves)
    if axes.num_shards == 1 or not total:
        return None

    # Leaves that are replicated.
    whole = [leaf for leaf in leaves if leaf.dim is None]
    replicated = sum(leaf.size for leaf in whole) / total
    if replicated > _MOST_REPLICATED:
        largest = max(whole, key=lambda leaf: leaf.size)
        fix = f"shard_dims={{{largest.path!r}: dim}} shards it in a dim of your choice"
        if not pads:
            fix = "train with init and train_step, which pad shards, or use a number of devices that divides a dim"
        return (
            f"placement: {replicated:.1%} of the parameters are replicated on each of {axes.num_shards} devices\n"
            f"  got:      {len(whole)} leaves, the largest is {largest.path!r} of shape {largest.shape}, "
            f"{largest.reason}\n"
            f"  fix:      {fix}"
        )

    # Leaves that are stored with zeros.
    zeros = {leaf.path: _zeros(leaf, axes.num_shards) for leaf in leaves}
    share = sum(zeros.values()) / total
    if share <= _MOST_ZEROS:
        return None
    largest = max(leaves, key=lambda leaf: zeros[leaf.path])
    return (
        f"placement: the shards of {axes.num_shards} devices hold {share:.0%} more than an even division, in zeros\n"
        f"  got:      {largest.path!r} of shape {largest.shape} is {largest.reason} in dim {largest.dim}\n"
        f"  fix:      {_advice(leaves, axes.num_shards, total + sum(zeros.values()), total)}"
    )


def _zeros(leaf: Leaf, num_shards: int) -> int:
    """The number of zeros of a leaf over some number of shards: as it is placed, or would be placed."""
    choice = choose_dim(leaf.shape, num_shards, leaf.stacked, leaf.model_spec)
    if choice.dim is None:
        return 0
    return choice.num_zeros * (leaf.size // leaf.shape[choice.dim])


def _advice(leaves: Sequence[Leaf], num_shards: int, stored: int, total: int) -> str:
    """The nearest number of devices with few zeros, and a hybrid mesh if it holds less."""

    def held(n: int) -> int:
        return total + sum(_zeros(leaf, n) for leaf in leaves)

    factors = [r for r in range(2, num_shards) if num_shards % r == 0]
    hybrid = min(factors, key=lambda r: held(num_shards // r) * r, default=None)
    if hybrid is not None and held(num_shards // hybrid) * hybrid < stored:
        return f"make_mesh(replica={hybrid}) shards over {num_shards // hybrid} devices, and holds less on each"
    fewer = range(num_shards - 1, math.floor(0.75 * num_shards), -1)
    found = next((n for n in fewer if held(n) <= (1 + _MOST_ZEROS / 4) * total), None)
    if found is None:
        return "use a number of devices that divides the width of the model"
    return f"{found} devices hold {held(found) / total - 1:.1%} more than an even division"


def check_layer_dims(leaves: Sequence[Leaf], layer_dims: Mapping[int, int], num_shards: int) -> None:
    """Checks the leaves that loops of a loss slice, of a model that was not seen to be created.

    Raises ValueError if a leaf is sharded over the dim that a loop slices, with a text that names all of them. Warns if
    leaves with most of the weights are not known to be stacks: steps gather one layer at a time all the same, but
    reports and schedules of compilers count all layers as one. `layer_dims` maps positions to the dims of loops.
    """
    unknown = {i for i, dim in layer_dims.items() if dim == 0 and not leaves[i].stacked}
    wrong = [i for i, dim in layer_dims.items() if leaves[i].dim == dim]
    stacked = {leaf.path for i, leaf in enumerate(leaves) if leaf.stacked or i in unknown}
    options = [f"stacked={globs(stacked, [leaf.path for leaf in leaves])!r}"] if unknown else []
    if wrong:
        moved = {leaves[i].path: _other_dim(leaves[i], layer_dims[i], num_shards) for i in wrong if i not in unknown}
        options += [f"shard_dims={moved!r}"] if moved else []
        shown = [f"{leaves[i].path!r} {leaves[i].shape} over dim {layer_dims[i]}" for i in wrong]
        raise ValueError(
            f"placement: {len(wrong)} of the {len(layer_dims)} leaves that the loss slices layer by layer are sharded "
            f"over their layer dim\n"
            f"  got:      {abbreviate(shown)}\n"
            f"  fix:      Zero(..., {', '.join(options)})"
        )
    size, total = sum(leaves[i].size for i in unknown), sum(leaf.size for leaf in leaves)
    if size >= LARGE and 2 * size > total:
        warn(
            f"placement: the loss slices {len(unknown)} leaves layer by layer that are not known to be stacks\n"
            f"  got:      {size / total:.0%} of the weights, which reports count as whole stacks\n"
            f"  fix:      Zero(..., {options[0]})"
        )


def _other_dim(leaf: Leaf, layer_dim: int, num_shards: int) -> int | None:
    """The dim to shard of a leaf whose layers are in a dim that is not the first, or that was chosen."""
    taken = [*leaf.model_spec, *[None] * (len(leaf.shape) - len(leaf.model_spec))]
    taken[layer_dim] = "layers"
    return choose_dim(leaf.shape, num_shards, stacked=False, model_spec=PartitionSpec(*taken)).dim
