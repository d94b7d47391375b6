"""A roll call of all processes before JAX joins them, so that an error can name the processes that are missing.

`jax.distributed.initialize` waits for all processes; if one does not connect, its C++ code aborts the others (SIGABRT)
without naming the missing one. Therefore each process first reports to process 0, on the port that JAX uses afterwards:

    process 1..n-1   "zerojax INDEX COUNT\n"       ->  process 0
    process 0        "missing INDEX INDEX ...\n"   ->  all that reported, when all have or the time of process 0 is up

Any program can connect, or listen in place of process 0. Each connection has a thread, what is read of it is bounded,
and times are limits in total, so none holds up another. Who sends a report is not verified.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time

RETRY_S = 0.2  # between two attempts to reach process 0
CONNECT_TIMEOUT_S = 5.0  # for one attempt: an address of process 0 that drops packets must not take all the time
REPORT_TIMEOUT_S = 2.0  # from the connection to the end of the report; a process sends it at once
MAX_REPORT_BYTES, MAX_RESULT_BYTES = 100, 2**20

_REPORT = re.compile(rb"zerojax (\d{1,9}) (\d{1,9})\n")
_RESULT = re.compile(rb"missing((?: \d{1,9})*)\n")


def find_missing(coordinator: str, count: int, index: int, timeout_s: float, bind: str | None = None) -> list[int]:
    """Waits until all processes have reported to process 0, or until its time is up; returns those that have not.

    Args:
        coordinator: HOST:PORT of process 0.
        count: number of processes. A report with another one does not count.
        index: index of this process.
        timeout_s: how long process 0 waits for the others, and they for it to listen, and then for its result.
        bind: HOST:PORT on which process 0 listens; all addresses of its machine by default.

    Raises:
        OSError: in process 0, if the port is taken.
    """
    host, _, port = (coordinator if index else bind or f"[::]:{coordinator.rpartition(':')[2]}").rpartition(":")
    address = host.strip("[]"), int(port)
    if index:
        return _report(address, index, count, timeout_s)
    is_any = address[0] in ("", "::")
    family = socket.AF_INET6 if (is_any or ":" in address[0]) and socket.has_ipv6 else socket.AF_INET
    address = ("" if is_any else address[0]), address[1]
    both = is_any and socket.has_dualstack_ipv6()
    with socket.create_server(address, family=family, dualstack_ipv6=both, backlog=4096) as listener:
        return _call(listener, count, time.monotonic() + timeout_s)


def _call(listener: socket.socket, count: int, deadline: float) -> list[int]:
    """Process 0: collects the reports of the other processes, and sends each of them the result."""
    reported: dict[int, socket.socket] = {}
    listener.settimeout(RETRY_S / 10)
    while len(reported) < count - 1 and time.monotonic() < deadline:
        try:
            connection, _ = listener.accept()
        except OSError:  # nobody connects, or no more files can be opened until other connections end
            time.sleep(RETRY_S / 100)
            continue
        threading.Thread(target=_serve, args=(connection, count, reported), daemon=True).start()
    connections = reported.copy()
    missing = [index for index in range(1, count) if index not in connections]
    for connection in connections.values():
        with contextlib.suppress(OSError):
            connection.sendall(" ".join(["missing", *map(str, missing)]).encode() + b"\n")
            connection.shutdown(socket.SHUT_RDWR)
    return missing


def _serve(connection: socket.socket, count: int, reported: dict[int, socket.socket]) -> None:
    """Serves a connection until it is closed. A process that leaves before the result has not reported."""
    with connection, contextlib.suppress(OSError):
        match = _REPORT.fullmatch(_line(connection, time.monotonic() + REPORT_TIMEOUT_S, MAX_REPORT_BYTES))
        if match is None or int(match[2]) != count or not 0 < (index := int(match[1])) < count:
            return
        connection.settimeout(None)
        if reported.setdefault(index, connection) is not connection:
            return  # another process has this index; this one tries again
        with contextlib.suppress(OSError):
            connection.recv(1)
        del reported[index]


def _report(address: tuple[str, int], index: int, count: int, timeout_s: float) -> list[int]:
    """All other processes: report to process 0 and wait for the result. If there is none, process 0 is missing."""
    deadline = time.monotonic() + timeout_s
    while (seconds_left := deadline - time.monotonic()) > 0:
        # Process 0 may not listen yet, or have ended, or another program may listen there; its name may not be one.
        with contextlib.suppress(OSError, UnicodeError):
            with socket.create_connection(address, timeout=min(seconds_left, CONNECT_TIMEOUT_S)) as connection:
                connection.sendall(f"zerojax {index} {count}\n".encode())
                match = _RESULT.fullmatch(_line(connection, time.monotonic() + timeout_s, MAX_RESULT_BYTES))
            if match:
                return list(map(int, match[1].split()))
        time.sleep(RETRY_S)
    return [0]


def _line(connection: socket.socket, deadline: float, max_bytes: int) -> bytes:
    """Reads a line, or less if the other side closes the connection, sends too much or is too slow."""
    text = b""
    while not text.endswith(b"\n") and len(text) < max_bytes and (seconds_left := deadline - time.monotonic()) > 0:
        connection.settimeout(seconds_left)
        if not (part := connection.recv(max_bytes - len(text))):
            break
        text += part
    return text
