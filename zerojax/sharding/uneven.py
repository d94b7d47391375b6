"""Tells what a number of shards costs that divides few dims: leaves that are replicated, and zeros in shards."""

from __future__ import annotations

import math
from collections.abc import Sequence

from zerojax.sharding.axes import Axes
from zerojax.sharding.dim_choice import choose_dim
from zerojax.sharding.placement import Leaf

_MOST_REPLICATED, _MOST_ZEROS = 0.01, 0.1  # of all parameters


def uneven_text(leaves: Sequence[Leaf], axes: Axes, pads: bool = True) -> str | None:
    """What to do about leaves that are replicated although the stage shards them, or about zeros that pad shards.

    Args:
        leaves: the placement of all parameters.
        axes: the data axes.
        pads: whether leaves may be stored with zeros.

    Returns:
        None if at most 1% of the parameters are replicated, and zeros are at most 10%.
    """
    total = sum(leaf.size for leaf in leaves)
    if axes.num_shards == 1 or not total:
        return None
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
    held = lambda n: total + sum(_zeros(leaf, n) for leaf in leaves)
    factors = [r for r in range(2, num_shards) if num_shards % r == 0]
    hybrid = min(factors, key=lambda r: held(num_shards // r) * r, default=None)
    if hybrid is not None and held(num_shards // hybrid) * hybrid < stored:
        return f"make_mesh(replica={hybrid}) shards over {num_shards // hybrid} devices, and holds less on each"
    fewer = range(num_shards - 1, math.floor(0.75 * num_shards), -1)
    found = next((n for n in fewer if held(n) <= (1 + _MOST_ZEROS / 4) * total), None)
    if found is None:
        return "use a number of devices that divides the width of the model"
    return f"{found} devices hold {held(found) / total - 1:.1%} more than an even division"
