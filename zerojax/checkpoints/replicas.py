"""Compares the copies of what several devices hold: after a fault, they train on different values without an error.

All parameters are replicated at stages 0 to 2, and small leaves, counters and keys at every stage. A copy that differs,
because of a flipped bit or another seed in one process, would be trained and saved together with the others.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from zerojax.checkpoints.digest import Digest, digests
from zerojax.sharding import placement
from zerojax.step import models
from zerojax.step.state import TrainState
from zerojax.utils.typing import Array

log = logging.getLogger("zerojax")
DIFFER_EXIT_CODE = 76  # EX_PROTOCOL of sysexits.h
_MOST = 4  # leaves and devices that an error lists


class ReplicasDiffer(SystemExit):
    """Devices hold different copies of the same values. Unless it is caught, it ends the process with exit code 76.

    Every process raises it, so none is left waiting for the others.

    Attributes:
        message: names the leaves, the devices and their processes.
    """

    def __init__(self, message: str):
        super().__init__(DIFFER_EXIT_CODE)
        self.message = message

    def __str__(self) -> str:
        return self.message


def verify_replicas(state: TrainState, fix: str) -> None:
    """Raises `ReplicasDiffer` if any array of a state has copies that differ.

    Args:
        state: with arrays.
        fix: what the error advises.

    Cost: as `digests` of the arrays that have copies.
    """
    check_replicas(digests(dict(_arrays(state))), f"the state of step {int(state.step)}", fix)


def check_replicas(digest_of: Mapping[str, Digest], what: str, fix: str) -> None:
    """As `verify_replicas`, for arrays whose digests are known already."""
    differing = {path: digest.outliers for path, digest in digest_of.items() if digest.outliers}
    if not differing:
        return
    lines = [f"{path} on {_devices(outliers)}" for path, outliers in list(differing.items())[:_MOST]]
    more = f"\n            and {len(differing) - _MOST} leaves more" if len(differing) > _MOST else ""
    listed = "\n            ".join(lines)
    error = ReplicasDiffer(f"replicas: {what} differs between devices\n  got:      {listed}{more}\n  fix:      {fix}")
    log.error("%s", error)  # nothing prints the text of a SystemExit
    raise error


def has_copies(a: Array) -> bool:
    """Whether several devices hold the same part of an array."""
    return a.sharding.num_devices * math.prod(a.sharding.shard_shape(a.shape)) > a.size


def _arrays(state: TrainState) -> Iterator[tuple[str, Array]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        array = jax.random.key_data(leaf) if models.is_key(leaf) else leaf
        if has_copies(array):
            yield placement.path_text(path), array


def _devices(devices: tuple[Any, ...]) -> str:
    names = [f"device {device.id} (process {device.process_index})" for device in devices]
    return ", ".join(names[:_MOST]) + (f" and {len(names) - _MOST} more" if len(names) > _MOST else "")
