"""Several processes of one command on this machine, for tests and laptops. Clusters have launchers of their own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO

from zerojax.sharding.mesh import simulation_variables

POLL_S = 0.05
TIMED_OUT = 124  # as timeout(1) has it


def launch(
    command: Sequence[str],
    num_processes: int,
    *,
    devices: int | None = None,
    timeout_s: float | None = None,
    grace_s: float = 10,
) -> int:
    """Runs a command as processes that `zerojax.processes.initialize` joins, over loopback.

    Each line that a process prints is printed here, after its index. SIGINT and SIGTERM go to all processes; the second
    one kills them, since JAX keeps SIGTERM to itself once processes are joined. When one process fails, the others have
    `grace_s` to end by themselves, and are killed then.

    Args:
        command: program and arguments.
        num_processes: how many.
        devices: simulated CPU devices of each process; without it each sees the machine's.
        timeout_s: when all are killed; None: never.
        grace_s: from the first failure until the rest is killed.

    Returns:
        the first exit code that is not 0, or 0; 128 + N of a process that signal N ended; 124 after `timeout_s`.

    Raises:
        ValueError: a number of processes or devices below 1.
        OSError: the command cannot be started.
    """
    if num_processes < 1 or (devices is not None and devices < 1):
        raise ValueError(
            f"launch: {num_processes} processes of {devices} devices\n  fix:      one or more processes and devices"
        )
    coordinator = f"127.0.0.1:{_free_port()}"
    running: list[subprocess.Popen[str]] = []
    try:
        with _forward_signals(running):
            for index in range(num_processes):
                running.append(_start(command, environment(coordinator, num_processes, index, devices)))
            copies = [copy for index, process in enumerate(running) for copy in _copy_output(index, process)]
            code = _wait(running, timeout_s, grace_s)
            for copy in copies:
                copy.join(timeout=1)
            return code
    finally:
        _signal(running, signal.SIGKILL)


def environment(coordinator: str, count: int, index: int, devices: int | None) -> dict[str, str]:
    """The variables of one process: this one's, who it is, and the devices that it simulates."""
    own = {
        **os.environ,
        "ZEROJAX_COORDINATOR": coordinator,
        "ZEROJAX_NUM_PROCESSES": str(count),
        "ZEROJAX_PROCESS_ID": str(index),
        "JAX_COORDINATOR_BIND_ADDRESS": coordinator,  # by default JAX listens on all of the machine's addresses
        "PYTHONUNBUFFERED": "1",
    }
    own.pop("ZEROJAX_CLUSTER", None)
    return own if devices is None else own | simulation_variables(own, devices)


def _free_port() -> int:
    """Free now. Another program may take it before process 0 does, which says so then."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _start(command: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[str]:
    """In a session of its own: it has signals from here alone, not a second time from the terminal."""
    return subprocess.Popen(
        list(command),
        env=dict(environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def _copy_output(index: int, process: subprocess.Popen[str]) -> list[threading.Thread]:
    assert process.stdout is not None and process.stderr is not None
    pairs = [(process.stdout, sys.stdout), (process.stderr, sys.stderr)]
    copies = [threading.Thread(target=_copy, args=(f"[{index}] ", *pair), daemon=True) for pair in pairs]
    for copy in copies:
        copy.start()
    return copies


def _copy(prefix: str, source: IO[str], target: IO[str]) -> None:
    for line in source:
        target.write(f"{prefix}{line.rstrip()}\n")  # in one piece: lines of two processes do not mix
        target.flush()


def _wait(running: Sequence[subprocess.Popen[str]], timeout_s: float | None, grace_s: float) -> int:
    """Until all have ended, or time is up. Returns the exit code of `launch`."""
    code, end = 0, float("inf") if timeout_s is None else time.monotonic() + timeout_s
    while None in (codes := [process.poll() for process in running]):
        time.sleep(POLL_S)
        failed = [found for found in codes if found]
        if failed and not code:
            code = failed[0]
            end = min(end, time.monotonic() + grace_s)
        if time.monotonic() > end:
            _signal(running, signal.SIGKILL)
            return _exit_code(code) or TIMED_OUT
    return _exit_code(code or next(filter(None, codes), 0))


def _exit_code(returncode: int) -> int:
    """As a shell has it."""
    return returncode if returncode >= 0 else 128 - returncode


def _signal(running: Sequence[subprocess.Popen[str]], number: int) -> None:
    """To the processes that have not ended, and to what they started."""
    for process in running:
        if process.poll() is None:
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                continue


@contextmanager
def _forward_signals(running: Sequence[subprocess.Popen[str]]) -> Iterator[None]:
    """SIGINT and SIGTERM to all processes, while it lasts. Only a main thread can take signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    taken = (signal.SIGINT, signal.SIGTERM)
    once: list[int] = []

    def forward(number: int, _: object) -> None:
        _signal(running, signal.SIGKILL if once else number)
        once.append(number)

    before = [signal.signal(number, forward) for number in taken]
    try:
        yield
    finally:
        for number, handler in zip(taken, before, strict=True):
            signal.signal(number, handler)
