"""The data axes of a mesh, and which dims of a leaf are divided over mesh axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

WHOLE: Any = PartitionSpec()


class Axes(NamedTuple):
    """The data axes of a mesh: leaves are sharded over `shard`, and replicated over `replica`."""

    shard: tuple[str, ...]
    replica: tuple[str, ...]
    num_shards: int
    num_replicas: int

    @property
    def data(self) -> tuple[str, ...]:
        """All axes that split the batch, outermost first."""
        return self.replica + self.shard

    @property
    def num_devices(self) -> int:
        """Devices that see different data."""
        return self.num_shards * self.num_replicas

    def size(self, names: tuple[str, ...]) -> int:
        """Devices along the shard axes, the replica axes or both."""
        return {self.replica: self.num_replicas, self.shard: self.num_shards, self.data: self.num_devices}[names]


class Dims(NamedTuple):
    """Which dims of a leaf are divided.

    Attributes:
        shard: the dim over the shard axes; None: every device holds all that `beside` leaves.
        beside: what is divided over axes beside the data axes, which `shard_map` leaves to the compiler.
    """

    shard: int | None
    beside: PartitionSpec = WHOLE

    def transposed(self, order: Sequence[int]) -> Dims:
        """Those of `lax.transpose(leaf, order)`."""
        entries = (*self.beside, *[None] * (len(order) - len(self.beside)))
        shard = None if self.shard is None else list(order).index(self.shard)
        return Dims(shard, PartitionSpec(*(entries[k] for k in order)))

    def of_layer(self) -> Dims:
        """Those of `leaf[i]`, whose dim 0 is not sharded."""
        return Dims(None if self.shard is None else self.shard - 1, PartitionSpec(*self.beside[1:]))


def axis_names(entry: Any) -> tuple[str, ...]:
    """The axes that one entry of a PartitionSpec names."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)
