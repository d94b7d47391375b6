"""Ends a run that hangs, with the stacks of all its processes."""

from __future__ import annotations

import datetime
import faulthandler
import logging
import os
import sys
import threading
import time
from pathlib import Path

import jax

from zerojax.processes import stacks

log = logging.getLogger("zerojax")
_TICKS = 20  # per time limit
_EXIT_CODE = 1


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
            if stacks.is_asked():
                self._end("another process hangs")

    def _end(self, reason: str) -> None:
        print(f"watchdog: {reason}; the process ends. Its threads:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        try:
            found = stacks.gather(max(5.0, 4 * self._tick_s))
            if jax.process_count() > 1 and jax.process_index() == 0:
                self._write(stacks.grouped(found, jax.process_count()))
                stacks.finish()
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
