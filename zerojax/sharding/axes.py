"""The data axes of a mesh, and the dims of a leaf that are divided over mesh axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from zerojax.sharding.padding import NO_PADDING, Padding
from zerojax.sharding.wire import AS_IT_IS, Wire

REPLICATED: Any = PartitionSpec()
CONTEXT = "context"  # the name of the axis over which the tokens of each sequence are divided


class Axes(NamedTuple):
    """The data axes of a mesh: model states are sharded over the axes `shard` and replicated over `replica`.

    With `outer`, only what is computed with is replicated: the optimizer's state is sharded over all data axes.

    An axis `context` divides model states too, and is the first of the shard axes. It does not divide the rows of a
    batch but the tokens of each row, while a loss is computed: there, it is left to the compiler.

    Attributes:
        shard, replica: the names of the axes, outermost first.
        num_shards, num_replicas: the numbers of devices along them.
        torus: on TPUs without SparseCores, the lengths of the rings of devices, along one dim of their torus after the
            other, around which rows are summed; () if there are none. See `tpu`.
        sparse_cores: whether SparseCores run collectives over the shard axes.
        outer: whether the shards of the optimizer's state are divided over the replica axes too.
        num_context: the number of devices along the axis `context`, among the shard axes; 1 if there is none.
    """

    shard: tuple[str, ...]
    replica: tuple[str, ...]
    num_shards: int
    num_replicas: int
    torus: tuple[int, ...] = ()
    sparse_cores: bool = False
    outer: bool = False
    num_context: int = 1

    @property
    def of_rows(self) -> Axes:
        """The axes without `context`: those that are manual while a loss is computed."""
        if self.num_context == 1:
            return self
        names = tuple(name for name in self.shard if name != CONTEXT)
        return self._replace(shard=names, num_shards=self.num_shards // self.num_context, num_context=1)

    @property
    def of_optimizer(self) -> Axes:
        """The axes of the optimizer's state, and of gradients when they are reduced."""
        return Axes(self.shard + self.replica, (), self.num_devices, 1) if self.outer else self

    @property
    def between(self) -> Axes:
        """The axes of a shard's pieces, which are divided over the replica axes."""
        return Axes(self.replica, self.shard, self.num_replicas, self.num_shards)

    @property
    def data(self) -> tuple[str, ...]:
        """All axes that split the rows of a batch, outermost first."""
        return self.replica + self.of_rows.shard

    @property
    def num_devices(self) -> int:
        """The number of devices, or of groups along `context`, that process different rows."""
        return self.num_shards // self.num_context * self.num_replicas

    @property
    def of_states(self) -> tuple[str, ...]:
        """All axes that model states are sharded or replicated over, outermost first."""
        return self.replica + self.shard

    @property
    def prefer_rows(self) -> bool:
        """Whether collectives move rows, [N, shard], whichever dim of a leaf is sharded."""
        return bool(self.torus) or self.sparse_cores

    def size(self, names: tuple[str, ...]) -> int:
        """The number of devices along the shard axes, the replica axes or both, without `context`."""
        of_rows = self.of_rows
        sizes = {self.replica: self.num_replicas, of_rows.shard: of_rows.num_shards, self.data: self.num_devices}
        return sizes[names]


class Dims(NamedTuple):
    """The dims of a leaf that are divided over mesh axes, and those along which it is sent in blocks."""

    shard: int | None  # the dim that is divided over the shard axes; None if no dim is
    # the spec over all other axes, such as 'model', which `shard_map` leaves to the compiler
    model_spec: PartitionSpec = REPLICATED
    num_zeros: int = 0  # the number of zeros at the end of `shard` in a leaf that is stored in shards; see `padding`
    wire: Wire = AS_IT_IS  # how it is sent

    @property
    def padding(self) -> Padding:
        """The zeros of the stored leaf."""
        return NO_PADDING if self.shard is None else Padding(self.shard, self.num_zeros)

    @property
    def stored_spec(self) -> PartitionSpec:
        """The spec of a shard over the axes that `shard_map` leaves to the compiler, if `context` is one of them."""
        if self.shard is None:
            return self.model_spec
        entries = [*self.model_spec, *[None] * (self.shard + 1 - len(self.model_spec))]
        entries[self.shard] = CONTEXT
        return PartitionSpec(*entries)

    @property
    def of_shard(self) -> Dims:
        """The dims of a shard, which has its zeros already. Its pieces are gathered as they are."""
        return self._replace(num_zeros=0, wire=self.wire._replace(gather=None))

    def transposed(self, order: Sequence[int]) -> Dims:
        """The dims of `lax.transpose(leaf, order)`."""
        entries = (*self.model_spec, *[None] * (len(order) - len(self.model_spec)))
        shard = None if self.shard is None else list(order).index(self.shard)
        blocks = None if self.wire.blocks is None else list(order).index(self.wire.blocks)
        return Dims(
            shard, PartitionSpec(*(entries[k] for k in order)), self.num_zeros, self.wire._replace(blocks=blocks)
        )

    def of_stack(self) -> Dims:
        """The dims of a stack of such leaves: the inverse of `of_layer`."""
        return self._shifted(1, PartitionSpec(None, *self.model_spec))

    def of_layer(self) -> Dims:
        """The dims of `leaf[i]`, where dim 0 of the leaf is not sharded."""
        return self._shifted(-1, PartitionSpec(*self.model_spec[1:]))

    def _shifted(self, by: int, model_spec: PartitionSpec) -> Dims:
        shard, blocks = (None if dim is None else dim + by for dim in (self.shard, self.wire.blocks))
        wire = AS_IT_IS if blocks == -1 else self.wire._replace(blocks=blocks)
        return Dims(shard, model_spec, self.num_zeros, wire)


def axis_names(entry: Any) -> tuple[str, ...]:
    """The axes named by one entry of a PartitionSpec."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)
