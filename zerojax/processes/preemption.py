"""Handles SIGTERM, by which a machine announces preemption, and Ctrl-C: all processes learn of it at the same step.

`Checkpoints` then saves the state and ends the process, with `EXIT_CODE` or `INTERRUPT_EXIT_CODE`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.utils.typing import Array

log = logging.getLogger("zerojax")
INTERRUPT_EXIT_CODE = 128 + signal.SIGINT  # 130, as of a program that SIGINT ends
SAME_PRESS_S = 0.3  # two signals within this time are of one Ctrl-C, which a launcher and the terminal may both send
_SHOW_CURSOR = "\x1b[?25h"  # a progress bar hides it
_CLOSE = b"\0"  # not the number of a signal
EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: try again
_SIGNALS = (None, signal.SIGTERM, signal.SIGINT)  # if processes received different ones, the last in this order counts
_installed: weakref.WeakSet[ChainedHandler] = weakref.WeakSet()


class ChainedHandler:
    """Installs a handler for a signal. It must be created in the main thread.

    A handler that was installed before is called as well, except for Python's own of SIGINT, which raises
    KeyboardInterrupt. If another handler is installed later, `keep_in_front` installs this one in front of it.

    A process that is forked, such as a data worker, ignores SIGINT, which a terminal sends to all processes: the run
    needs its data up to the end of the step. It handles any other signal as before.

    Args:
        number: of the signal.
        on_signal: called when it arrives, before the other handlers.
    """

    def __init__(self, number: signal.Signals, on_signal: Callable[[], None]):
        self._number, self._on_signal = number, on_signal
        self._previous: list[Any] = []  # the handlers that this one replaced, oldest first
        self._depth = 0  # how many of them are running, each called by the one that replaced it
        self._is_installed = True
        self._install()
        _installed.add(self)

    def _install(self) -> None:
        self._previous.append(signal.signal(self._number, self._handle))

    def _handle(self, number: int, frame: Any) -> None:
        """Records the signal, and calls the handler that was replaced.

        A handler that was installed later calls this method again, as it should. Each nested call continues with the
        next older handler.
        """
        self._on_signal()
        handler = self._previous[-1 - self._depth] if self._depth < len(self._previous) else None
        if callable(handler) and handler is not signal.default_int_handler:
            self._depth += 1
            try:
                handler(number, frame)
            finally:
                self._depth -= 1

    def keep_in_front(self) -> bool:
        """Installs the handler again if another one was installed. Returns whether it did."""
        if not self._is_installed or signal.getsignal(self._number) == self._handle:
            return False
        self._install()
        return True

    def close(self) -> None:
        """Restores the handler that was installed before."""
        if self._is_installed and signal.getsignal(self._number) == self._handle:
            signal.signal(self._number, self._replaced())
            self._depth = 1  # only the restored handler can still call this one
        self._is_installed = False

    def _replaced(self) -> Any:
        return self._previous[-1] if self._previous[-1] is not None else signal.SIG_DFL

    def _leave_child(self) -> None:
        if self._is_installed:
            signal.signal(self._number, signal.SIG_IGN if self._number == signal.SIGINT else self._replaced())
        self._is_installed = False


def _leave_forked_process() -> None:
    for handler in list(_installed):
        handler._leave_child()


os.register_at_fork(after_in_child=_leave_forked_process)


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


class Preemption:
    """Installs handlers for SIGTERM and SIGINT, and agrees with the other processes on the step at which the run ends.

    Handlers of the user are called as well, see `ChainedHandler`. A second Ctrl-C ends the process at once; in an
    interactive session it raises KeyboardInterrupt instead. SIGINT stays ignored if it is, as in processes that a shell
    starts in the background.

    Python handles signals in the main thread only. In any other thread nothing is installed, and a warning is logged.
    """

    def __init__(self) -> None:
        self._requested, self._is_done = 0, False  # the first is a position in `_SIGNALS`
        self._interrupted_at: float | None = None
        self._pending: Array | None = None  # the answer of all processes to the previous call of `requested`
        self._handlers: list[ChainedHandler] = []
        self._second: SecondInterrupt | None = None
        if threading.current_thread() is not threading.main_thread():
            log.warning("checkpoint: SIGTERM and Ctrl-C will not save the state, because this is not the main thread")
            return
        self._handlers.append(ChainedHandler(signal.SIGTERM, lambda: self._request(signal.SIGTERM)))
        if signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, signal.SIG_DFL):
            self._handlers.append(ChainedHandler(signal.SIGINT, self._interrupt))
            self._second = None if _is_interactive() else SecondInterrupt()

    def _request(self, number: signal.Signals) -> None:
        self._requested = max(self._requested, _SIGNALS.index(number))

    def _interrupt(self) -> None:
        now = time.monotonic()
        if self._interrupted_at is None:
            self._interrupted_at = now
        elif _is_interactive() and now - self._interrupted_at > SAME_PRESS_S:
            raise KeyboardInterrupt
        self._request(signal.SIGINT)

    def close(self) -> None:
        """Restores the handlers that were installed before.

        Raises:
            KeyboardInterrupt: if Ctrl-C was pressed, and the run has ended without asking for it.
        """
        for handler in self._handlers:
            handler.close()
        if self._second:
            self._second.close()
        self._second = None
        if _SIGNALS[self._requested] == signal.SIGINT and not self._is_done:
            self._is_done = True
            raise KeyboardInterrupt

    def requested(self, wait: bool = False) -> signal.Signals | None:
        """Returns the signal that a process received, SIGTERM or SIGINT, or None; the same in all of them.

        Every process calls this once per step. With several processes, the result is that of the previous call, so
        that no process waits for a step later than the previous one; with `wait`, it is that of this call.

        Cost: with several processes, a maximum over one int32 of each device.
        """
        for handler in self._handlers:
            if handler.keep_in_front():
                log.warning("checkpoint: another signal handler was installed; it is called after the state is saved")
        if jax.process_count() == 1:
            return _SIGNALS[self._requested]
        previous, self._pending = self._pending, _largest(self._requested)
        found = 0 if previous is None else int(previous)
        return _SIGNALS[max(found, int(self._pending)) if wait else found]

    def end(self, number: signal.Signals, step: int | None) -> None:
        """Ends the run after a signal, when the state of a step is saved.

        Raises:
            SystemExit: with `EXIT_CODE` after SIGTERM, and with `INTERRUPT_EXIT_CODE` after Ctrl-C.
            KeyboardInterrupt: after Ctrl-C in an interactive session.
        """
        self._is_done = True
        name = "Ctrl-C" if number == signal.SIGINT else number.name
        if number == signal.SIGINT and _is_interactive():
            log.warning("checkpoint: %s: step %s is saved", name, step)
            raise KeyboardInterrupt
        code = INTERRUPT_EXIT_CODE if number == signal.SIGINT else EXIT_CODE
        saved = f"step {step} is saved, exiting with code {code}; start the run again to continue"
        log.warning("checkpoint: %s: %s", name, saved)
        raise SystemExit(code)


def _is_interactive() -> bool:
    """Whether this is a notebook or an interactive interpreter, which a Ctrl-C should not end."""
    return hasattr(sys, "ps1")


def _largest(number: int) -> Array:
    """The largest of the numbers of all processes: a scalar, which the devices may still be computing."""
    mesh = Mesh(np.array(jax.devices()), ("devices",))
    local = np.full(jax.local_device_count(), number, np.int32)
    numbers = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("devices")), local)
    return jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))(numbers)
