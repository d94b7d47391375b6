"""What several processes have to do alike: what one of them sees is told to the others, instead of being waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from zerojax.checkpoints.manifest import FALLBACK, CheckpointCorrupted

T = TypeVar("T")


def together(call: Callable[[], T], where: str) -> T:
    """What `call` returns, if it raised in no process. All processes come here.

    Raises:
        Exception: that of this process.
        CheckpointCorrupted: it raised in others, which are named.
    """
    result, failed = None, None
    try:
        result = call()
    except Exception as error:
        failed = error
    flags = multihost_utils.process_allgather(np.array(failed is not None))
    if failed is not None:
        raise failed
    if others := ", ".join(str(i) for i in np.flatnonzero(flags)):
        raise CheckpointCorrupted(
            f"checkpoint: {where} cannot be read\n  got:      an error in process {others}\n  {FALLBACK}"
        )
    return result  # pyright: ignore[reportReturnType]


def of_process_0(numbers: Sequence[int]) -> list[int]:
    """What process 0 saw: the others may see a directory as it was before, or already as it is after."""
    if jax.process_count() == 1:
        return list(numbers)
    count = int(multihost_utils.broadcast_one_to_all(np.array(len(numbers))))
    own = np.array(numbers if jax.process_index() == 0 else [0] * count, np.int32)
    return [int(number) for number in multihost_utils.broadcast_one_to_all(own)] if count else []
