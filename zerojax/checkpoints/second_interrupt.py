"""Ends the process at the second Ctrl-C, also while the main thread is in a long call, such as a compilation."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time

log = logging.getLogger("zerojax")
INTERRUPT_EXIT_CODE = 128 + signal.SIGINT  # 130, as of a program that SIGINT ends
SAME_PRESS_S = 0.3  # two signals within this time are of one Ctrl-C, which a launcher and the terminal may both send
_SHOW_CURSOR = "\x1b[?25h"  # a progress bar hides it
_CLOSE = b"\0"  # not the number of a signal


class SecondInterrupt:
    """Says at the first Ctrl-C that a second one ends the process at once, and does that.

    Python runs signal handlers in the main thread, and only between two of its instructions, so not during a
    compilation or a collective. What it does at once is to write the number of the signal to the wakeup file
    descriptor, from which a thread of this class reads. Numbers are passed on to the descriptor that was set before.

    Must be created and closed in the main thread.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._pid = os.getpid()
        self._previous = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="second interrupt", daemon=True).start()

    def _watch(self) -> None:
        first: float | None = None
        while (number := os.read(self._read, 1)) not in (b"", _CLOSE):
            if self._previous != -1:
                with contextlib.suppress(OSError):  # it is full, or was closed
                    os.write(self._previous, number)
            if number[0] != signal.SIGINT:
                continue
            if first is None:
                first = time.monotonic()
                log.warning(
                    "Ctrl-C: the run ends after this step, when its state is saved; press it again to end at once"
                )
            elif time.monotonic() - first > SAME_PRESS_S:
                self._end()
        os.close(self._read)

    def _end(self) -> None:
        if sys.stdout is not None and sys.stdout.isatty():
            os.write(sys.stdout.fileno(), f"{_SHOW_CURSOR}\n".encode())
        os._exit(INTERRUPT_EXIT_CODE)

    def close(self) -> None:
        """Sets the descriptor that was set before."""
        if os.getpid() != self._pid:  # the pipe is that of the process from which this one was forked
            return
        current = signal.set_wakeup_fd(self._previous, warn_on_full_buffer=False)
        if current not in (self._write, -1):  # somebody else's, set later
            signal.set_wakeup_fd(current, warn_on_full_buffer=False)
        os.write(self._write, _CLOSE)
        os.close(self._write)
