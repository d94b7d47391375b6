"""Keeps Ctrl-C from being lost. It is imported before JAX.

Python raises KeyboardInterrupt wherever the main thread is. In a `__del__` method or a callback of the garbage
collector, it prints "Exception ignored" and goes on. JAX has such a callback, and a signal that arrives while garbage
is collected is handled in it: of Ctrl-C during the imports, one in ten would have no effect.
"""

from __future__ import annotations

import _thread
import contextlib
import sys
import threading

_DELAY_S = 0.02  # by then, the main thread has most likely left the callback; otherwise it is interrupted once more


def _interrupt_again(unraisable: sys.UnraisableHookArgs) -> None:
    if not issubclass(unraisable.exc_type, KeyboardInterrupt):
        _previous(unraisable)
        return
    timer = threading.Timer(_DELAY_S, _thread.interrupt_main)
    timer.daemon = True
    with contextlib.suppress(RuntimeError):  # Python ends, and starts no more threads
        timer.start()


_previous, sys.unraisablehook = sys.unraisablehook, _interrupt_again
