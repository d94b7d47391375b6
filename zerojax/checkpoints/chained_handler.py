"""A signal handler that calls those of the user, whether they were installed before it or after."""

from __future__ import annotations

import os
import signal
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

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

    def _handle(self, number: int, frame: FrameType | None) -> None:
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
