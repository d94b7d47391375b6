"""SIGTERM: whoever takes the machine away says so before. The run saves its state and ends with a code of its own."""

from __future__ import annotations

import logging
import signal
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

log = logging.getLogger("zerojax")
EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: try again


class Preemption:
    """Notices SIGTERM, and tells all processes at the same step.

    A handler that was there before is called too. One that is set later takes the place of this one; at the next step
    this one is put in front of it again.

    Outside of the main thread, where Python lets nobody handle signals, nothing is noticed, and that is logged.
    """

    def __init__(self) -> None:
        self._asked, self._ours, self._told = False, False, None
        self._before: list[Any] = []  # handlers that this one took the place of, the last one last
        self._depth = 0  # how many of them are being called, each by the one after it
        if threading.current_thread() is threading.main_thread():
            self._install()
        else:
            log.warning("checkpoint: not in the main thread, so SIGTERM does not save the state")

    def _install(self) -> None:
        self._before.append(signal.signal(signal.SIGTERM, self._handle))
        self._ours = True

    def _handle(self, number: int, frame: Any) -> None:
        """One that was set later calls this one again, as it should: then the one before it is next."""
        self._asked = True
        handler = self._before[-1 - self._depth] if self._depth < len(self._before) else None
        if callable(handler):
            self._depth += 1
            try:
                handler(number, frame)
            finally:
                self._depth -= 1

    def close(self) -> None:
        """Puts the handler back that was there before."""
        if self._ours and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._before[-1] if self._before[-1] is not None else signal.SIG_DFL)
            self._depth = 1  # whoever calls this one now is that handler
        self._ours = False

    def asked(self) -> bool:
        """Whether any process was told to end, the same on all of them. Every process calls it once a step.

        With several processes it tells what was so one call ago, so that a process waits for no later step than the one
        before; each call sends 4 bytes a process.
        """
        if self._ours and signal.getsignal(signal.SIGTERM) != self._handle:
            log.warning("checkpoint: SIGTERM got another handler; it is called after the one that saves the state")
            self._install()
        if jax.process_count() == 1:
            return self._asked
        before, self._told = self._told, _anywhere(self._asked)
        return before is not None and bool(before)


def _anywhere(flag: bool) -> Any:
    """Whether the flag is set in any process: a scalar that is on its way."""
    mesh = Mesh(np.array(jax.devices()), ("devices",))
    own = np.full(jax.local_device_count(), flag, np.int32)
    flags = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("devices")), own)
    return jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))(flags)
