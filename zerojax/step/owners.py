"""Divides matrices among devices: each has an owner, which updates it; see `owned_update`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from zerojax.program.couplings import Coupling
from zerojax.sharding.axes import Dims
from zerojax.utils.typing import Array, DTypeLike, Shape

_ROUND_BYTES = 2**26  # of the matrices that a device works on at once; a larger one is alone


class Operand(NamedTuple):
    """An input or an output of a coupling, for a single matrix."""

    shape: Shape
    dtype: DTypeLike
    dims: Dims  # how its shards are cut

    def shard_shape(self, n: int) -> Shape:
        """The shape of one of `n` shards, with zeros at the end; its own, if it is not sharded."""
        shape = self.dims.padding.stored_shape(self.shape)
        return tuple(size // n if dim == self.dims.shard else size for dim, size in enumerate(shape))

    def shard_bytes(self, n: int) -> int:
        return math.prod(self.shard_shape(n)) * jnp.dtype(self.dtype).itemsize

    def of_layer(self) -> Operand:
        """That of a layer of a stack."""
        dims = self.dims if self.dims.shard is None else self.dims.of_layer()
        return Operand(self.shape[1:], self.dtype, dims)


class Kind(NamedTuple):
    """Matrices for which an update computes the same."""

    couplings: list[Coupling]  # of the parameters that they are
    inputs: list[Operand]
    outputs: list[Operand]
    layers: int | None  # the number of matrices in each parameter, dim 0; None for parameters that are one
    work: float  # what computing a matrix takes, in proportion to other kinds
    compute: Callable[[Sequence[Array], Sequence[Array]], list[Array]]  # of ([k, ..] for each input, what is shared)

    @property
    def count(self) -> int:
        """The number of matrices."""
        return len(self.couplings) * (self.layers or 1)

    @property
    def matrix_bytes(self) -> int:
        """The bytes of what is sent to the owner of a matrix."""
        return sum(each.shard_bytes(1) for each in self.inputs)

    @property
    def is_exchanged(self) -> bool:
        """Whether all that an owner gets and returns comes from shards and goes to shards, in one dtype."""
        operands = [*self.inputs, *self.outputs]
        return len({each.dtype for each in operands}) == 1 and all(each.dims.shard is not None for each in operands)


class Round(NamedTuple):
    """Matrices that all devices work on at the same time."""

    kind: int
    first: int
    end: int
    per_device: int  # device d owns so many, from first + d x per_device on


class MixedRound(NamedTuple):
    """Matrices of several kinds."""

    owned: list[list[tuple[int, int]]]  # of each device: (kind, matrix)


def rounds(kinds: Sequence[Kind], num_devices: int, divisor: int = 1) -> list[Round | MixedRound]:
    """Divides matrices among devices. A device has a multiple of `divisor` in as many rounds as possible.

    As many matrices of a kind as the number of devices divides are computed together, up to some bytes. What is left
    of all kinds goes, the largest first, to the device that has least of it so far.
    """
    found: list[Round | MixedRound] = []
    left: dict[DTypeLike, list[tuple[float, int, int]]] = defaultdict(list)  # dtype -> (work, kind, matrix)
    for k, kind in enumerate(kinds):
        most = -(-max(1, _ROUND_BYTES // kind.matrix_bytes) // divisor) * divisor
        whole = kind.count // num_devices * num_devices if kind.is_exchanged else kind.count
        for first in range(0, whole, most * num_devices):
            end = min(first + most * num_devices, whole)
            found.append(Round(k, first, end, -(-(end - first) // num_devices)))
        left[kind.inputs[0].dtype] += [(kind.work, k, each) for each in range(whole, kind.count)]
    for matrices in left.values():
        loads, owned = [0.0] * num_devices, [list[tuple[int, int]]() for _ in range(num_devices)]
        for work, k, matrix in sorted(matrices, key=lambda each: (-each[0], *each[1:])):
            device = loads.index(min(loads))
            loads[device] += work
            owned[device].append((k, matrix))
        found += [MixedRound(owned)] * bool(matrices)
    return found


def owned_counts(kinds: Sequence[Kind], num_devices: int) -> list[list[int]]:
    """How many matrices of each kind each device has."""
    counts = [[0] * num_devices for _ in kinds]
    for each in rounds(kinds, num_devices):
        if isinstance(each, Round):
            for matrix in range(each.first, each.end):
                counts[each.kind][(matrix - each.first) // each.per_device] += 1
        else:
            for device, own in enumerate(each.owned):
                for k, _ in own:
                    counts[k][device] += 1
    return counts
