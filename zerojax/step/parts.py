"""Creates a state in several programs: what goes to host memory is on a device only in parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax

from zerojax.sharding.placement import path_text, shard_bytes
from zerojax.step.state import TrainState

PART_BYTES = 2**32  # on one device
_MOST_PARTS = 16  # each part is a program that is traced and compiled


def create_in_parts(create: Callable[..., TrainState], args: tuple[Any, ...], abstract: TrainState) -> TrainState:
    """Runs `create(*args)` as several programs, each of which computes a part of the leaves of the state.

    Each program is the whole function, of which the compiler removes what its leaves do not need. A parameter and its
    master copy are in the same part: they are computed from the same values.

    Args:
        create: a function that can be jitted.
        args: its arguments.
        abstract: what it returns, as avals with the shardings of the results.

    Cost: traces the function and compiles it once for each part of about `PART_BYTES`, at most 16 times.
    """
    shardings = [a.sharding for a in jax.tree.leaves(abstract)]
    leaves: list[Any] = [None] * len(shardings)
    for part in parts(abstract):
        some = lambda *args, part=part: [jax.tree.leaves(create(*args))[k] for k in part]
        created = jax.jit(some, out_shardings=[shardings[k] for k in part])(*args)
        for k, array in zip(part, jax.block_until_ready(created), strict=True):
            leaves[k] = array
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)


def parts(abstract: TrainState) -> list[list[int]]:
    """Divides the leaves of a state, by position, into parts of about equal bytes."""
    with_paths = jax.tree_util.tree_leaves_with_path(abstract)
    sizes = [shard_bytes(a, a.sharding) for _, a in with_paths]
    limit = max(PART_BYTES, math.ceil(sum(sizes) / _MOST_PARTS))
    found: list[list[int]] = [[]]
    for together in _in_order([path_text(path) for path, _ in with_paths]):
        if sum(sizes[k] for k in (*found[-1], *together)) > limit and found[-1]:
            found.append([])
        found[-1] += together
    return found


def _in_order(paths: list[str]) -> Iterator[list[int]]:
    """The positions of leaves that are computed together: a parameter with its master copy, and all others alone."""
    positions = {path: k for k, path in enumerate(paths)}
    for k, path in enumerate(paths):
        field, _, rest = path.partition("/")
        if field == "params" and f"master/{rest}" in positions:
            yield [k, positions[f"master/{rest}"]]
        elif not (field == "master" and f"params/{rest}" in positions):
            yield [k]
