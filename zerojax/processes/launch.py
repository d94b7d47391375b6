"""Launches several processes of a command on this machine, for development and tests."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO

from zerojax.processes import guard
from zerojax.sharding.mesh import simulation_variables
from zerojax.utils.text import error_text

log = logging.getLogger("zerojax")
POLL_S = 0.05
TIMEOUT_EXIT_CODE = 124  # as of timeout(1)
BROKEN_PIPE_EXIT_CODE = 128 + signal.SIGPIPE  # 141, as of a program whose output nobody reads any more


def launch(
    command: Sequence[str],
    num_processes: int,
    *,
    devices: int | None = None,
    timeout_s: float | None = None,
    grace_s: float = 10,
) -> int:
    """Runs a command in several processes, which `zerojax.processes.initialize` joins over the loopback interface.

    Each line of output is prefixed with the index of its process. SIGINT, SIGTERM and SIGHUP are forwarded to all
    processes, unless they were ignored before, as SIGHUP is by nohup. A second signal kills the processes, since JAX
    handles SIGTERM itself once processes are joined.

    The processes end together. When one fails, the others have `grace_s` seconds to exit before they are killed. When
    the output can no longer be written, or when this process is killed, even with SIGKILL, they receive SIGTERM and
    have the same time. What a process leaves behind when it exits, such as data workers, is killed, unless it is in
    another session.

    Args:
        command: program and arguments.
        num_processes: number of processes.
        devices: number of simulated CPU devices of each process; by default each process uses the machine's devices.
        timeout_s: seconds after which all processes are killed; never by default.
        grace_s: seconds from the first failure until the other processes are killed.

    Returns:
        The first exit code that is not 0, otherwise 0; 128 + N if signal N ended that process; 124 after `timeout_s`;
        141, 128 + SIGPIPE, if the output could not be written.
    """
    if num_processes < 1 or (devices is not None and devices < 1):
        what = f"launch: cannot start {num_processes} processes with {devices} devices each"
        raise ValueError(error_text(what, None, "at least one process and one device"))
    coordinator = f"127.0.0.1:{_free_port()}"
    running: list[subprocess.Popen[str]] = []
    lost = threading.Event()  # the output of the processes cannot be written
    with _guarded(grace_s) as groups, _forward_signals(running) as received:
        try:
            for index in range(num_processes):
                running.append(_start(command, environment(coordinator, num_processes, index, devices)))
                _tell(groups, running)
                if received:  # maybe before this process was in the list
                    _send_signal(running[-1:], received[-1])
            threads = [thread for index, process in enumerate(running) for thread in _copy_output(index, process, lost)]
            code = _wait(running, groups, lost, timeout_s, grace_s)
            for thread in threads:
                thread.join(timeout=1)
            return code or (BROKEN_PIPE_EXIT_CODE if lost.is_set() else 0)
        finally:
            _send_signal(running, signal.SIGKILL)
            _tell(groups, [])


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
    pipe = subprocess.PIPE
    return subprocess.Popen(
        list(command), env=dict(environ), stdout=pipe, stderr=pipe, text=True, errors="replace", start_new_session=True
    )


@contextmanager
def _guarded(grace_s: float) -> Iterator[IO[bytes]]:
    """Starts the program that ends the processes if this one is killed. Yields its input; see `guard`."""
    command = [sys.executable, "-I", "-S", guard.__file__, str(grace_s)]
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(command, 0, stdin=pipe, stdout=null, stderr=null, start_new_session=True) as process:
        assert process.stdin is not None
        yield process.stdin


def _tell(groups: IO[bytes], running: Sequence[subprocess.Popen[str]]) -> None:
    """Tells the guard which processes run now."""
    pids = [str(process.pid) for process in running if process.returncode is None]
    with suppress(BrokenPipeError):  # the guard was killed
        groups.write(f"{' '.join(pids)}\n".encode())


def _copy_output(index: int, process: subprocess.Popen[str], lost: threading.Event) -> list[threading.Thread]:
    """Starts threads that copy the output of a process to the output of this one."""
    pairs = [(process.stdout, sys.stdout), (process.stderr, sys.stderr)]
    threads = [threading.Thread(target=_copy_lines, args=(f"[{index}] ", *pair, lost), daemon=True) for pair in pairs]
    for thread in threads:
        thread.start()
    return threads


def _copy_lines(prefix: str, source: IO[str], target: IO[str] | None, lost: threading.Event) -> None:
    """Copies lines until the source ends, and sets `lost` if one cannot be written. The target may be missing.

    It then goes on reading: the process may still write.
    """
    for line in source:
        if target is None:
            continue
        encoding = getattr(target, "encoding", None) or "utf-8"  # may lack a character
        text = f"{prefix}{line.rstrip()}\n".encode(encoding, "backslashreplace").decode(encoding)
        try:
            target.write(text)  # in one call, so that lines of two processes are not mixed
            target.flush()
        except (OSError, ValueError) as error:  # ValueError: the file was closed
            target = None
            if not lost.is_set():
                lost.set()
                log.error("launch: the output cannot be written, and all processes are ended: %s", error)


def _wait(
    running: Sequence[subprocess.Popen[str]],
    groups: IO[bytes],
    lost: threading.Event,
    timeout_s: float | None,
    grace_s: float,
) -> int:
    """Waits until all processes have exited, or until the time is up. Returns the exit code of `launch`."""
    code, deadline = 0, float("inf") if timeout_s is None else time.monotonic() + timeout_s
    num_running = len(running)
    while None in (codes := [_poll(process) for process in running]):
        # Tell the guard which processes are left.
        if codes.count(None) < num_running:
            num_running = codes.count(None)
            _tell(groups, running)
        time.sleep(POLL_S)
        # After the first failure, the others have some time.
        failures = [*filter(None, codes), *[BROKEN_PIPE_EXIT_CODE] * lost.is_set()]
        if failures and not code:
            code = failures[0]
            deadline = min(deadline, time.monotonic() + grace_s)
            if lost.is_set():
                _send_signal(running, signal.SIGTERM)
        if time.monotonic() > deadline:
            _send_signal(running, signal.SIGKILL)
            return _exit_code(code) or TIMEOUT_EXIT_CODE
    return _exit_code(code or next(filter(None, codes), 0))


def _poll(process: subprocess.Popen[str]) -> int | None:
    """The return code of a process, or None if it runs. Kills what it has left behind in its process group."""
    if process.returncode is None and process.poll() is not None:
        _send_to_group(process, signal.SIGKILL)
    return process.returncode


def _exit_code(returncode: int) -> int:
    """The exit code that a shell reports: 128 + N for a process that signal N ended."""
    return returncode if returncode >= 0 else 128 - returncode


def _send_signal(running: Sequence[subprocess.Popen[str]], number: int) -> None:
    """Sends a signal to the processes that have not exited, and to their children."""
    for process in running:
        if _poll(process) is None:
            _send_to_group(process, number)


def _send_to_group(process: subprocess.Popen[str], number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # it is gone; macOS: there are only zombies in it
        os.killpg(process.pid, number)


@contextmanager
def _forward_signals(running: Sequence[subprocess.Popen[str]]) -> Iterator[Sequence[int]]:
    """Forwards SIGINT, SIGTERM and SIGHUP to all processes, if in the main thread. Yields those received so far."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def forward(number: int, _: object) -> None:
        _send_signal(running, signal.SIGKILL if received else number)
        received.append(number)

    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    forwarded = [number for number, handler in previous.items() if handler != signal.SIG_IGN]
    for number in forwarded:
        signal.signal(number, forward)
    try:
        yield received
    finally:
        for number in forwarded:
            signal.signal(number, previous[number])
