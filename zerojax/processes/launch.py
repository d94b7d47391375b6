"""Launches several processes of a command on this machine, for development and tests."""

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
TIMEOUT_EXIT_CODE = 124  # as of timeout(1)


def launch(
    command: Sequence[str],
    num_processes: int,
    *,
    devices: int | None = None,
    timeout_s: float | None = None,
    grace_s: float = 10,
) -> int:
    """Runs a command in several processes, which `zerojax.processes.initialize` joins over the loopback interface.

    Each line of output is prefixed with the index of its process. SIGINT and SIGTERM are forwarded to all processes; a
    second signal kills them, since JAX handles SIGTERM itself once processes are joined. When a process fails, the
    others have `grace_s` seconds to exit before they are killed.

    Args:
        command: program and arguments.
        num_processes: number of processes.
        devices: number of simulated CPU devices of each process; by default each process uses the machine's devices.
        timeout_s: seconds after which all processes are killed; never by default.
        grace_s: seconds from the first failure until the other processes are killed.

    Returns:
        The first exit code that is not 0, otherwise 0; 128 + N if signal N ended that process; 124 after `timeout_s`.

    Raises:
        ValueError: if the number of processes or devices is below 1.
        OSError: if the command cannot be started.
    """
    if num_processes < 1 or (devices is not None and devices < 1):
        raise ValueError(
            f"launch: cannot start {num_processes} processes with {devices} devices each\n"
            f"  fix:      at least one process and one device"
        )
    coordinator = f"127.0.0.1:{_free_port()}"
    running: list[subprocess.Popen[str]] = []
    try:
        with _forward_signals(running):
            for index in range(num_processes):
                running.append(_start(command, environment(coordinator, num_processes, index, devices)))
            threads = [thread for index, process in enumerate(running) for thread in _copy_output(index, process)]
            code = _wait(running, timeout_s, grace_s)
            for thread in threads:
                thread.join(timeout=1)
            return code
    finally:
        _send_signal(running, signal.SIGKILL)


def environment(coordinator: str, count: int, index: int, devices: int | None) -> dict[str, str]:
    """The environment variables of one process: a copy of this process's, with its index and simulated devices."""
    variables = {
        **os.environ,
        "ZEROJAX_COORDINATOR": coordinator,
        "ZEROJAX_NUM_PROCESSES": str(count),
        "ZEROJAX_PROCESS_ID": str(index),
        "JAX_COORDINATOR_BIND_ADDRESS": coordinator,  # by default JAX listens on all addresses of the machine
        "PYTHONUNBUFFERED": "1",
    }
    variables.pop("ZEROJAX_CLUSTER", None)
    return variables if devices is None else variables | simulation_variables(variables, devices)


def _free_port() -> int:
    """A port that is free now. If another program takes it first, process 0 raises an error."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _start(command: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[str]:
    """Starts a process in a new session, so that it does not also receive the signals that the terminal sends."""
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
    """Starts threads that copy the output of a process to the output of this one."""
    assert process.stdout is not None and process.stderr is not None
    pairs = [(process.stdout, sys.stdout), (process.stderr, sys.stderr)]
    threads = [threading.Thread(target=_copy_lines, args=(f"[{index}] ", *pair), daemon=True) for pair in pairs]
    for thread in threads:
        thread.start()
    return threads


def _copy_lines(prefix: str, source: IO[str], target: IO[str]) -> None:
    for line in source:
        target.write(f"{prefix}{line.rstrip()}\n")  # in one call, so that lines of two processes are not mixed
        target.flush()


def _wait(running: Sequence[subprocess.Popen[str]], timeout_s: float | None, grace_s: float) -> int:
    """Waits until all processes have exited, or until the time is up. Returns the exit code of `launch`."""
    code, deadline = 0, float("inf") if timeout_s is None else time.monotonic() + timeout_s
    while None in (codes := [process.poll() for process in running]):
        time.sleep(POLL_S)
        failures = [returncode for returncode in codes if returncode]
        if failures and not code:
            code = failures[0]
            deadline = min(deadline, time.monotonic() + grace_s)
        if time.monotonic() > deadline:
            _send_signal(running, signal.SIGKILL)
            return _exit_code(code) or TIMEOUT_EXIT_CODE
    return _exit_code(code or next(filter(None, codes), 0))


def _exit_code(returncode: int) -> int:
    """The exit code that a shell reports: 128 + N for a process that signal N ended."""
    return returncode if returncode >= 0 else 128 - returncode


def _send_signal(running: Sequence[subprocess.Popen[str]], number: int) -> None:
    """Sends a signal to the processes that have not exited, and to their children."""
    for process in running:
        if process.poll() is None:
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                continue


@contextmanager
def _forward_signals(running: Sequence[subprocess.Popen[str]]) -> Iterator[None]:
    """Forwards SIGINT and SIGTERM to all processes. Only the main thread can; in another one this does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    forwarded = (signal.SIGINT, signal.SIGTERM)
    received: list[int] = []

    def forward(number: int, _: object) -> None:
        _send_signal(running, signal.SIGKILL if received else number)
        received.append(number)

    previous_handlers = [signal.signal(number, forward) for number in forwarded]
    try:
        yield
    finally:
        for number, handler in zip(forwarded, previous_handlers, strict=True):
            signal.signal(number, handler)
