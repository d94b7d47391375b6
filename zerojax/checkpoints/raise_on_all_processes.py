"""Keeps processes in step while they read a checkpoint: an error in one process is raised in all.

Without this, the others would wait for the process that failed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from zerojax.checkpoints.manifest import FALLBACK_FIX, CheckpointCorrupted

T = TypeVar("T")


def raise_on_all_processes(call: Callable[[], T], where: str) -> T:
    """Returns the result of `call` if it raises in no process. Every process has to call this function.

    Args:
        call: reads a part of a checkpoint.
        where: names the checkpoint in errors.

    Raises:
        Exception: the error of this process.
        CheckpointCorrupted: if only other processes raised an error. It names them.
    """
    result, failure = None, None
    try:
        result = call()
    except Exception as error:
        failure = error
    flags = multihost_utils.process_allgather(np.array(failure is not None))
    if failure is not None:
        raise failure
    if others := ", ".join(str(i) for i in np.flatnonzero(flags)):
        raise CheckpointCorrupted(
            f"checkpoint: {where} cannot be read\n  got:      an error in process {others}\n  {FALLBACK_FIX}"
        )
    return result  # pyright: ignore[reportReturnType]


def broadcast_from_process_0(numbers: Sequence[int]) -> list[int]:
    """Returns the numbers of process 0 in every process.

    While a directory changes, processes may list different steps in it; this makes them agree.
    """
    if jax.process_count() == 1:
        return list(numbers)
    count = int(multihost_utils.broadcast_one_to_all(np.array(len(numbers))))
    padded = np.array(numbers if jax.process_index() == 0 else [0] * count, np.int32)
    return [int(number) for number in multihost_utils.broadcast_one_to_all(padded)] if count else []
