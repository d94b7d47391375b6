"""Saves and restores the position of a data iterator that has `get_state` and `set_state`, as Grain's have."""

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


def get_states(data: Any) -> list[object] | None:
    """Returns the iterator states of all processes as JSON data, or None without an iterator.

    Raises:
        ValueError: if the state of an iterator is neither JSON data nor bytes.
    """
    if data is None:
        return None
    state = data.get_state()
    encoded = {_BYTES: base64.b64encode(state).decode()} if isinstance(state, bytes) else state
    try:
        text = json.dumps(encoded)
        if json.loads(text) != encoded:
            raise ValueError("a state that is not equal to itself after encoding it as JSON")
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"checkpoint: the state of the data iterator cannot be saved\n  got:      {error}\n"
            f"  fix:      return bytes from get_state(), or JSON data: string keys, and lists instead of tuples"
        ) from error
    return [json.loads(each) for each in _gather_texts(text)]


def state_of_this_process(saved: Sequence[object] | None, where: str) -> object:
    """Returns the saved iterator state that this process continues from.

    Args:
        saved: as `get_states` returned it.
        where: names the checkpoint in errors.

    Raises:
        CheckpointMismatch: if no state was saved, or if the number of processes changed and the states differ.
    """
    if saved is None:
        raise CheckpointMismatch(
            f"checkpoint: {where} contains no state of a data iterator\n"
            f"  fix:      resume(state) without an iterator, and skip the batches that were already used"
        )
    equal = all(each == saved[0] for each in saved)
    if len(saved) != jax.process_count() and not equal:
        raise CheckpointMismatch(
            f"checkpoint: the data iterator states of {where} do not fit this number of processes\n"
            f"  got:      different states of {len(saved)} processes, now there are {jax.process_count()}\n"
            f"  fix:      use {len(saved)} processes, or an iterator with the same state in all of them"
        )
    state = saved[0] if equal else saved[jax.process_index()]
    return base64.b64decode(state[_BYTES]) if isinstance(state, dict) and state.keys() == {_BYTES} else state


def _gather_texts(text: str) -> list[str]:
    """Returns the texts of all processes in every process."""
    if jax.process_count() == 1:
        return [text]
    data = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array(len(data)))
    rows = multihost_utils.process_allgather(np.pad(data, (0, int(sizes.max()) - len(data))))
    return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]
