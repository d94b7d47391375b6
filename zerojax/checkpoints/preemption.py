"""Handles SIGTERM, by which a machine announces preemption, and Ctrl-C: all processes learn of it at the same step.

`Checkpoints` then saves the state and ends the process, with `EXIT_CODE` or `INTERRUPT_EXIT_CODE`.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.checkpoints.chained_handler import ChainedHandler
from zerojax.checkpoints.second_interrupt import INTERRUPT_EXIT_CODE, SAME_PRESS_S, SecondInterrupt
from zerojax.utils.typing import Array

__all__ = ["EXIT_CODE", "INTERRUPT_EXIT_CODE", "Preemption"]

log = logging.getLogger("zerojax")
EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: try again
_SIGNALS = (None, signal.SIGTERM, signal.SIGINT)  # if processes received different ones, the last in this order counts


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
