"""Launches several processes of a command on this machine, for development and tests."""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, NamedTuple

from zerojax.processes import guard
from zerojax.sharding.mesh import simulation_variables
from zerojax.utils.text import error_text

log = logging.getLogger("zerojax")
POLL_S = 0.05
COPY_S = 1  # for the rest of the output after the end of the processes, which others may hold open
MAX_SHOWN = 300  # characters of a line of a process, in the last line of the launcher
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

    After a failure, the last line on stderr says which process failed first, how, after what time, and what its last
    exception was or what it wrote last.

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
    coordinator, begin = f"127.0.0.1:{_free_port()}", time.monotonic()
    running: list[subprocess.Popen[str]] = []
    ends: queue.SimpleQueue[_End] = queue.SimpleQueue()
    lost = threading.Event()  # the output of the processes cannot be written
    with _guarded(grace_s) as groups, _forward_signals(running) as received:
        try:
            # Start the processes.
            for index in range(num_processes):
                running.append(_start(command, environment(coordinator, num_processes, index, devices)))
                _tell(groups, running)
                if received:  # maybe before this process was in the list
                    _send_signal(running[-1:], received[-1])

            # Copy their output until they end.
            last_lines = [_LastLines() for _ in running]
            threads = [
                thread
                for index, process in enumerate(running)
                for thread in _copy_output(index, process, last_lines[index], lost)
            ]
            for index, process in enumerate(running):
                threading.Thread(target=_await_end, args=(index, process, ends), daemon=True).start()
            code, first = _wait(running, ends, groups, lost, timeout_s, grace_s)
            for thread in threads:
                thread.join(timeout=COPY_S)

            # Say why they ended, last.
            if first:
                end = f"process {first.index} {first.how} after {first.time - begin:.1f} s"
                after = f"zerojax launch had received {_signal_name(received[0])}" if received else ""
                error = last_lines[first.index].text(first.returncode)
                _say("; ".join(filter(None, [end, after, error])))
            elif code == TIMEOUT_EXIT_CODE:
                _say(f"the processes were killed after {timeout_s:g} s, the time limit")
            return code or (BROKEN_PIPE_EXIT_CODE if lost.is_set() else 0)
        finally:
            _send_signal(running, signal.SIGKILL)
            _tell(groups, [])


class _End(NamedTuple):
    """The end of a process."""

    index: int
    returncode: int
    time: float

    @property
    def how(self) -> str:
        by_signal = self.returncode < 0
        return f"was ended by {_signal_name(-self.returncode)}" if by_signal else f"exited with code {self.returncode}"


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


class _LastLines:
    """The first line of the last exception that a process has written to stderr, and its last line."""

    def __init__(self) -> None:
        self._exception, self._line, self._in_traceback = "", "", False

    def add(self, line: str) -> None:
        self._line = line or self._line
        if line.startswith("Traceback (most recent call last)"):
            self._in_traceback = True
        elif self._in_traceback and line[:1].strip():  # not indented, as its frames are
            self._exception, self._in_traceback = line, False

    def text(self, returncode: int) -> str:
        """Why the process has ended, as far as it said that. Python exits with code 1 after an exception."""
        if returncode == 1 and self._exception:
            return f"its last exception: {self._exception[:MAX_SHOWN]}"
        return f"it wrote last: {self._line[:MAX_SHOWN]}" if returncode > 0 and self._line else ""


def _say(text: str) -> None:
    with suppress(AttributeError, OSError, ValueError):  # no stderr, no reader, closed
        _write_line(sys.stderr, f"launch: {text}")


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


def _copy_output(
    index: int, process: subprocess.Popen[str], last_lines: _LastLines, lost: threading.Event
) -> list[threading.Thread]:
    """Starts threads that copy the output of a process to the output of this one."""
    each = [(process.stdout, sys.stdout, None), (process.stderr, sys.stderr, last_lines)]
    threads = [threading.Thread(target=_copy_lines, args=(f"[{index}] ", *args, lost), daemon=True) for args in each]
    for thread in threads:
        thread.start()
    return threads


def _copy_lines(
    prefix: str, source: IO[str], target: IO[str] | None, last_lines: _LastLines | None, lost: threading.Event
) -> None:
    """Copies lines until the source ends, and sets `lost` if one cannot be written. The target may be missing.

    It then goes on reading: the process may still write.
    """
    for line in source:
        if last_lines is not None:
            last_lines.add(line.rstrip())
        if target is None:
            continue
        try:
            _write_line(target, prefix + line.rstrip())
        except (OSError, ValueError) as error:  # ValueError: the file was closed
            target = None
            if not lost.is_set():
                lost.set()
                log.error("launch: the output cannot be written, and all processes are ended: %s", error)


def _write_line(target: IO[str], line: str) -> None:
    encoding = getattr(target, "encoding", None) or "utf-8"  # may lack a character
    target.write(f"{line}\n".encode(encoding, "backslashreplace").decode(encoding))  # in one call: lines are not mixed
    target.flush()


def _await_end(index: int, process: subprocess.Popen[str], ends: queue.SimpleQueue[_End]) -> None:
    """Waits for the end of a process, and kills what it has left behind in its process group.

    Each process has a thread that does this: when one fails, others may follow within milliseconds.
    """
    returncode = process.wait()
    ends.put(_End(index, returncode, time.monotonic()))
    _send_to_group(process, signal.SIGKILL)


def _wait(
    running: Sequence[subprocess.Popen[str]],
    ends: queue.SimpleQueue[_End],
    groups: IO[bytes],
    lost: threading.Event,
    timeout_s: float | None,
    grace_s: float,
) -> tuple[int, _End | None]:
    """Waits until all processes have ended, or until the time is up.

    Returns the exit code of `launch`, and the first failure.
    """
    code, first, num_running = 0, None, len(running)
    deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
    while num_running:
        # Tell the guard which processes are left.
        with suppress(queue.Empty):
            end = ends.get(timeout=POLL_S)
            first, num_running = first or (end if end.returncode else None), num_running - 1
            _tell(groups, running)
        # After the first failure, the others have some time.
        if not code and (first or lost.is_set()):
            code = _exit_code(first.returncode) if first else BROKEN_PIPE_EXIT_CODE
            deadline = min(deadline, time.monotonic() + grace_s)
            if lost.is_set():
                _send_signal(running, signal.SIGTERM)
        if time.monotonic() > deadline:
            _send_signal(running, signal.SIGKILL)
            return code or TIMEOUT_EXIT_CODE, first
    return code, first


def _exit_code(returncode: int) -> int:
    """The exit code that a shell reports: 128 + N for a process that signal N ended."""
    return returncode if returncode >= 0 else 128 - returncode


def _send_signal(running: Sequence[subprocess.Popen[str]], number: int) -> None:
    """Sends a signal to the processes that have not exited, and to their children."""
    for process in running:
        if process.returncode is None:
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
