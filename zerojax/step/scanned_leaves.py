"""Checks that leaves which a loop of the loss slices layer by layer are placed as stacks of layers."""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import PartitionSpec

from zerojax.program.segmentation import TracedLoss
from zerojax.sharding.dim_choice import choose_dim
from zerojax.sharding.layer_dims import globs
from zerojax.sharding.placement import LARGE, Leaf
from zerojax.utils.text import abbreviate
from zerojax.utils.warn import warn


def check_layer_dims(leaves: Sequence[Leaf], traced: TracedLoss, num_shards: int) -> None:
    """Checks the leaves that loops of a loss slice, of a model that was not seen to be created.

    Warns if leaves with most of the weights are not known to be stacks: steps gather one layer at a time all the same,
    but reports and schedules of compilers count all layers as one.

    Raises:
        ValueError: if a leaf is sharded over the dim that a loop slices. The text names all leaves that have to be
            placed in another way.
    """
    views = [view for segment in traced.segments if not segment.lookup for view in segment.views.values()]
    layer_dims = {view.leaf: view.order[0] for view in views}  # the layer dim of each leaf
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
