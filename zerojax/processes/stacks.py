"""Gathers the stacks of all processes when a run hangs, and groups equal ones: one that is elsewhere stands out.

Nothing here needs the devices, which may hang too. The stacks travel through the key-value store of process 0, whose
server runs in a thread that Python does not stop.
"""

from __future__ import annotations

import collections
import sys
import threading
import time
import traceback
from collections.abc import Mapping

import jax

from zerojax.processes.agreement import distributed_state, names

_ASKED, _STACKS, _DONE = "zerojax/hang/asked", "zerojax/hang/stacks", "zerojax/hang/done"
_ANSWER_POLL_S = 0.1


def is_asked() -> bool:
    """Whether another process has asked for the stacks of all."""
    return _is_set(_ASKED)


def gather(wait_s: float) -> dict[int, str]:
    """Asks all processes for the stacks of their main threads, and waits for their answers.

    The others answer by calling this function too, once `is_asked` tells them to.

    Args:
        wait_s: seconds after which process 0 waits no longer. The others wait until process 0 has called `finish`, at
            most twice as long.

    Returns:
        The stacks by process index: in process 0 those that have come, elsewhere that of this process.
    """
    own = own_stack()
    if not jax.distributed.is_initialized():
        return {0: own}
    state, deadline = distributed_state(), time.monotonic() + wait_s
    state.client.key_value_set(_ASKED, "", allow_overwrite=True)
    state.client.key_value_set(f"{_STACKS}/{state.process_id}", own, allow_overwrite=True)
    if state.process_id:
        while not _is_set(_DONE) and time.monotonic() < deadline + wait_s:
            time.sleep(_ANSWER_POLL_S)
        return {state.process_id: own}
    while True:
        found = {int(key.rpartition("/")[2]): text for key, text in state.client.key_value_dir_get(_STACKS)}
        if len(found) == state.num_processes or time.monotonic() > deadline:
            return found
        time.sleep(_ANSWER_POLL_S)


def finish() -> None:
    """Tells the other processes that process 0 has written the stacks, so that they may end."""
    if jax.distributed.is_initialized():
        distributed_state().client.key_value_set(_DONE, "", allow_overwrite=True)


def grouped(stacks: Mapping[int, str], count: int) -> str:
    """The stacks as text: equal ones once, with their processes, and the rarest first.

    Args:
        stacks: by process index.
        count: number of processes, of which some may not have answered.
    """
    owners = collections.defaultdict(list)
    for index in sorted(stacks):
        owners[stacks[index]].append(index)
    parts = [f"{names(group)}:\n{text}" for text, group in sorted(owners.items(), key=lambda item: len(item[1]))]
    if silent := [index for index in range(count) if index not in stacks]:
        parts.insert(0, f"{names(silent)}: no answer\n")
    return "\n".join(parts)


def own_stack() -> str:
    """The stack of the main thread, outermost call first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame)) if frame else "the main thread has ended\n"


def _is_set(key: str) -> bool:
    if not jax.distributed.is_initialized():
        return False
    try:
        distributed_state().client.key_value_try_get(key)
    except jax.errors.JaxRuntimeError:  # not found, or process 0 has ended
        return False
    return True
