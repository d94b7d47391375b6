"""Ends a process that has failed before JAX waits for the others.

When Python ends, JAX waits up to 300 s for all other processes to end too. After a failure of this process alone, they
do not: they wait for it in a collective, and nobody makes progress.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from typing import Any, NoReturn

import jax
import jax._src.distributed

# After an exception process 0 waits for this time. JAX aborts the others when it exits, and they might not have written
# their errors yet.
EXIT_DELAY_S = 2
# After sys.exit with a code that is not 0, the others have this time to end too, as all do at once after SIGTERM. Then
# they end together as after a success, and none aborts another one that is still saving.
JOINT_EXIT_S = 5

_exit_code = 0  # with which Python ends; set when it does


def exit_at_once_on_failure() -> None:
    """Makes a failure end this process at once: an exception, or `sys.exit` with a code that is not 0.

    Must be called after `jax.distributed.initialize`: exit handlers run in the reverse order. `raise SystemExit(code)`
    is not recorded if it does not call `sys.exit`; JAX then waits for the others.
    """
    sys.exit = _exit
    atexit.register(_exit_if_failed, os.getpid())


class _Exit(SystemExit):
    """The exception that `sys.exit` raises. It records its code if Python ends because nothing caught it.

    Exit handlers cannot see the code otherwise: when they are called, Python has already dropped the exception.
    """

    def __getattribute__(self, name: str) -> object:
        value = super().__getattribute__(name)
        if name == "code" and sys._getframe().f_back is None:  # no Python code asks, but Python itself, to end
            global _exit_code
            _exit_code = value & 0xFF if isinstance(value, int) else int(value is not None)  # as Python does
        return value


def _exit(status: object = None, /) -> NoReturn:
    raise _Exit(status)


def _exit_if_failed(pid: int) -> None:
    """Exit handler: after a failure, ends the process before JAX waits for the others to exit."""
    if not jax.distributed.is_initialized() or os.getpid() != pid:  # the latter in a forked process
        return
    state = jax._src.distributed.global_state
    if hasattr(sys, "last_value"):
        _flush()
        if state.process_id == 0:
            time.sleep(EXIT_DELAY_S)
        os._exit(1)
    if not _all_exit(state, JOINT_EXIT_S if _exit_code else 0) and _exit_code:
        _flush()
        os._exit(_exit_code)


def _all_exit(state: Any, timeout_s: float) -> bool:
    """Tells the other processes that this one exits, and whether all of them do within a time."""
    deadline = time.monotonic() + timeout_s
    try:
        state.client.key_value_set(f"zerojax/exit/{state.process_id}", "")
        for index in range(state.num_processes) if timeout_s else ():
            milliseconds = max(round((deadline - time.monotonic()) * 1000), 1)
            state.client.blocking_key_value_get(f"zerojax/exit/{index}", milliseconds)
    except jax.errors.JaxRuntimeError:  # the time is up, or process 0 has ended
        return False
    return True


def _flush() -> None:
    """Writes what is left of the output, unless nobody reads it any more."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # no output, no reader, closed
            stream.flush()
