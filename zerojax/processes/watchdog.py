"""Ends a run that makes no progress, and shows where it hangs.

When a run hangs, the stacks of all processes are gathered, and equal ones are grouped: one that is elsewhere stands
out. That does not need the devices, which may hang too. The stacks travel through the key-value store of process 0,
whose server runs in a thread that Python does not stop.
"""

from __future__ import annotations

import collections
import datetime
import faulthandler
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path

import jax

from zerojax.processes.agreement import distributed_state, names

log = logging.getLogger("zerojax")
_ASKED, _STACKS, _DONE = "zerojax/hang/asked", "zerojax/hang/stacks", "zerojax/hang/done"
_ANSWER_POLL_S = 0.1
_TICKS = 20  # per time limit
_EXIT_CODE = 1


def are_stacks_asked() -> bool:
    """Whether another process has asked for the stacks of all."""
    return _is_set(_ASKED)


def gather_stacks(wait_s: float) -> dict[int, str]:
    """Asks all processes for the stacks of their main threads, and waits for their answers.

    The others answer by calling this function too, once `are_stacks_asked` tells them to.

    Args:
        wait_s: seconds after which process 0 waits no longer. The others wait until process 0 has called
            `finish_stacks`, at most twice as long.

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


def finish_stacks() -> None:
    """Tells the other processes that process 0 has written the stacks, so that they may end."""
    if jax.distributed.is_initialized():
        distributed_state().client.key_value_set(_DONE, "", allow_overwrite=True)


def grouped_stacks(stacks: Mapping[int, str], count: int) -> str:
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


class Watchdog:
    """Ends the process if `reset` is not called for some time. The first call starts the clock.

    It counts the time in which this process runs. One that is suspended, for example by SIGSTOP or a batch system, is
    not ended when it continues.

    A thread of Python does the counting: code that hangs without releasing Python's global lock is not noticed.

    With several processes, the first whose time is up asks all others for their stacks. Process 0 writes them, and then
    all processes end.

    Args:
        limit_s: the time in seconds.
        directory: process 0 writes the stacks into a file `hang_TIME.txt` there, and to stderr.
    """

    def __init__(self, limit_s: float, directory: Path):
        self.limit_s, self.directory = limit_s, directory
        self._tick_s = limit_s / _TICKS
        self._running_s = 0.0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def reset(self) -> None:
        """Starts the time anew."""
        self._running_s = 0.0
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stops the clock."""
        self._stop.set()
        if self._thread:
            self._thread.join()

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._stop.wait(self._tick_s):
            now = time.monotonic()
            self._running_s += min(now - last, 2 * self._tick_s)  # more: the process was suspended
            last = now
            if self._running_s > self.limit_s:
                self._end(f"no step for {self.limit_s:g} s")
            if are_stacks_asked():
                self._end("another process hangs")

    def _end(self, reason: str) -> None:
        print(f"watchdog: {reason}; the process ends. Its threads:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        try:
            found = gather_stacks(max(5.0, 4 * self._tick_s))
            if jax.process_count() > 1 and jax.process_index() == 0:
                self._write(grouped_stacks(found, jax.process_count()))
                finish_stacks()
                time.sleep(1)  # for the others to read that: the key-value store ends with this process
        except Exception as error:
            print(f"watchdog: the stacks of all processes cannot be gathered: {error}", file=sys.stderr, flush=True)
        os._exit(_EXIT_CODE)

    def _write(self, text: str) -> None:
        print(f"watchdog: the main threads of all processes:\n{text}", file=sys.stderr, flush=True)
        moment = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
        try:
            (self.directory / f"hang_{moment}.txt").write_text(text)
        except OSError as error:
            print(f"watchdog: they cannot be written into {self.directory}: {error}", file=sys.stderr, flush=True)
