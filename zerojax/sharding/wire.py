"""How the leaves of a unit are sent, if not in the dtype that they have: in blocks of 8 bits, or to be summed in fp32.

Matrices that are large next to the others of their unit are sent in 8 bits: no norms, biases and routers, no tables of
rows, and nothing that `Zero(dtypes=...)` names. `comm.blocks` has the codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from zerojax.utils.typing import DTypeLike, Shape

BLOCK = 128  # elements along one dim that share a scale
DTYPES_OF_8_BITS = ("int8", "float8_e4m3fn")
_LEAST_ELEMENTS = 2**12  # of a leaf that is sent in 8 bits, or of its layer
_LEAST_SHARE = 1 / 64  # of the largest leaf of its unit. A router has 1/512 of the experts that it chooses from.
_LEAST_LENGTH = 16  # of a block; the scales of shorter ones would be more than an eighth of what is sent


class Wire(NamedTuple):
    """How a leaf is sent.

    Attributes:
        gather: the dtype of 8 bits in which shards are gathered; None for the leaf's own.
        scatter: the dtype in which parts of its gradient are sent to the devices that sum them; None for a
            reduce-scatter, which sums on the way.
        blocks: the dim along which `BLOCK` elements share a scale. Blocks do not cross shards.
    """

    gather: np.dtype | None = None
    scatter: np.dtype | None = None
    blocks: int | None = None


AS_IT_IS = Wire()


def has_8_bits(dtype: DTypeLike) -> bool:
    return jnp.dtype(dtype).itemsize == 1


def block_dim(shape: Shape, divided: Sequence[int]) -> int | None:
    """The last dim along which blocks do not cross shards; None if the leaf is no matrix or small.

    It does not depend on the number of shards unless this dim is sharded. The results of a gather then do not either.

    Args:
        shape: of the leaf, or of its layer, with the zeros of its shards.
        divided: for each dim, the number of parts that it is divided into over the mesh.
    """
    if len(shape) < 2 or np.prod(shape) < _LEAST_ELEMENTS:
        return None
    whole = [n == 1 or (length % n == 0 and length // n % BLOCK == 0) for length, n in zip(shape, divided, strict=True)]
    dims = [d for d, length in enumerate(shape) if whole[d] and length >= _LEAST_LENGTH]
    return max(dims, default=None)


def is_large(size: int, largest: int) -> bool:
    """Whether a leaf of this size is sent in 8 bits beside the largest of its unit."""
    return size >= _LEAST_SHARE * largest
