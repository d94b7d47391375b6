"""Where a data iterator is, as JSON: what has `get_state` and `set_state`, as the iterators of Grain do."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from zerojax.checkpoints.manifest import CheckpointMismatch

_BYTES = "base64"


def get_states(data: Any) -> list[Any] | None:
    """Of each process its iterator's state; None without an iterator.

    Raises:
        ValueError: a state that is neither JSON nor bytes.
    """
    if data is None:
        return None
    state = data.get_state()
    told = {_BYTES: base64.b64encode(state).decode()} if isinstance(state, bytes) else state
    try:
        text = json.dumps(told)
        if json.loads(text) != told:
            raise ValueError("it is not what JSON makes of it")
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"checkpoint: the state of the data iterator cannot be saved\n  got:      {error}\n"
            f"  fix:      get_state() returns bytes, or what JSON can hold, with text for keys and lists for tuples"
        ) from error
    return [json.loads(each) for each in _of_all(text)]


def own_state(saved: Sequence[Any] | None, where: str) -> Any:
    """Of those that were saved, what this process's iterator is set to.

    Raises:
        CheckpointMismatch: no state was saved, or those of another number of processes, which differ.
    """
    if saved is None:
        raise CheckpointMismatch(
            f"checkpoint: {where} has no state of a data iterator\n"
            f"  fix:      resume(state) without one, and pass over the batches that were used"
        )
    alike = all(each == saved[0] for each in saved)
    if len(saved) != jax.process_count() and not alike:
        raise CheckpointMismatch(
            f"checkpoint: the data iterator of {where} cannot be divided anew\n"
            f"  got:      the different states of {len(saved)} processes, now there are {jax.process_count()}\n"
            f"  fix:      {len(saved)} processes, or an iterator whose state is the same on all of them"
        )
    told = saved[0] if alike else saved[jax.process_index()]
    return base64.b64decode(told[_BYTES]) if isinstance(told, dict) and told.keys() == {_BYTES} else told


def _of_all(text: str) -> list[str]:
    """The text of each process, on every process."""
    if jax.process_count() == 1:
        return [text]
    words = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array(len(words)))
    rows = multihost_utils.process_allgather(np.pad(words, (0, int(sizes.max()) - len(words))))
    return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]
