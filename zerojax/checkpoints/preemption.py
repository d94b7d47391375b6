"""Handles SIGTERM, by which a machine announces preemption: all processes learn of it at the same step.

`Checkpoints` then saves the state and ends the process with `EXIT_CODE`.
"""

from __future__ import annotations

import logging
import signal
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.typing import Array

log = logging.getLogger("zerojax")
EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: try again


class Preemption:
    """Installs a handler for SIGTERM, and agrees with the other processes on the step at which the run ends.

    A handler that was installed before is called as well. If another handler is installed later, this one is installed
    in front of it at the next step.

    Python handles signals in the main thread only. In any other thread nothing is installed, and a warning is logged.
    """

    def __init__(self) -> None:
        self._requested, self._installed = False, False
        self._pending: Array | None = None  # the answer of all processes to the previous call of `requested`
        self._previous: list[Any] = []  # the handlers that this one replaced, oldest first
        self._depth = 0  # how many of them are running, each called by the one that replaced it
        if threading.current_thread() is threading.main_thread():
            self._install()
        else:
            log.warning("checkpoint: SIGTERM will not save the state, because this is not the main thread")

    def _install(self) -> None:
        self._previous.append(signal.signal(signal.SIGTERM, self._handle))
        self._installed = True

    def _handle(self, number: int, frame: Any) -> None:
        """Records the request, and calls the handler that was replaced.

        A handler that was installed later calls this method again, as it should. Each nested call continues with the
        next older handler.
        """
        self._requested = True
        handler = self._previous[-1 - self._depth] if self._depth < len(self._previous) else None
        if callable(handler):
            self._depth += 1
            try:
                handler(number, frame)
            finally:
                self._depth -= 1

    def close(self) -> None:
        """Restores the handler that was installed before."""
        if self._installed and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._previous[-1] if self._previous[-1] is not None else signal.SIG_DFL)
            self._depth = 1  # only the restored handler can still call this one
        self._installed = False

    def requested(self, wait: bool = False) -> bool:
        """Returns whether any process received SIGTERM; the result is the same in all of them.

        Every process calls this once per step. With several processes, the result is that of the previous call, so
        that no process waits for a step later than the previous one; with `wait`, it is that of this call.

        Cost: with several processes, a maximum over one int32 of each device.
        """
        if self._installed and signal.getsignal(signal.SIGTERM) != self._handle:
            log.warning("checkpoint: another SIGTERM handler was installed; it is called after the state is saved")
            self._install()
        if jax.process_count() == 1:
            return self._requested
        previous, self._pending = self._pending, _in_any_process(self._requested)
        return (previous is not None and bool(previous)) or (wait and bool(self._pending))


def _in_any_process(flag: bool) -> Array:
    """Whether the flag is set in any process: a scalar, which the devices may still be computing."""
    mesh = Mesh(np.array(jax.devices()), ("devices",))
    local_flags = np.full(jax.local_device_count(), flag, np.int32)
    flags = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("devices")), local_flags)
    return jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))(flags)
