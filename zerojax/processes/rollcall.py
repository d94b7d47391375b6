"""A roll call of all processes before JAX joins them, so that an error can name the processes that are missing.

`jax.distributed.initialize` waits for all processes; if one does not connect, its C++ code aborts the others (SIGABRT)
without naming the missing one. Therefore each process first reports its index to process 0, on the port that JAX uses
afterwards:

    process 1..n-1   "zerojax INDEX COUNT SECONDS_LEFT\n"  ->  process 0
    process 0        {"missing": [...], "refused": ""}     ->  all that reported, when all have or the time is up

The connections carry nothing else, and the port is closed again.
"""

from __future__ import annotations

import json
import re
import socket
import time
from typing import NamedTuple

RETRY_S = 0.2  # between two attempts to reach process 0
REPORT_TIMEOUT_S = 2.0  # for the line that a process sends first: a slower one would delay the others
RESULT_TIMEOUT_S = 5.0  # for the result of process 0 to reach the others, after the deadline


class RollCallResult(NamedTuple):
    """The result of a roll call.

    Attributes:
        missing: the indices of the processes that did not report.
        refused: why process 0 refused this process; empty if it did not.
    """

    missing: tuple[int, ...] = ()
    refused: str = ""


def call_roll(coordinator: str, count: int, index: int, timeout_s: float, bind: str | None = None) -> RollCallResult:
    """Waits until all processes have reported to process 0, or until the earliest deadline of one of them.

    Args:
        coordinator: HOST:PORT of process 0.
        count: number of processes.
        index: index of this process.
        timeout_s: how long this process waits.
        bind: HOST:PORT on which process 0 listens; all addresses of its machine by default.

    Returns:
        The missing processes, which are the same in all processes, unless process 0 refused this one.

    Raises:
        OSError: in process 0, if the port is taken.

    Cost: one connection and two short messages for each process.
    """
    deadline = time.monotonic() + timeout_s
    if index:
        return _report(_host_and_port(coordinator), f"zerojax {index} {count}", deadline)
    with _listen(_host_and_port(bind or f"[::]:{coordinator.rpartition(':')[2]}")) as listener:
        return _collect(listener, count, deadline)


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _listen(address: tuple[str, int]) -> socket.socket:
    if address[0] in ("", "::") and socket.has_dualstack_ipv6():
        return socket.create_server(("::", address[1]), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096)
    family = socket.AF_INET6 if ":" in address[0] and socket.has_ipv6 else socket.AF_INET
    host = "" if family == socket.AF_INET and address[0] == "::" else address[0]
    return socket.create_server((host, address[1]), family=family, backlog=4096)


def _collect(listener: socket.socket, count: int, deadline: float) -> RollCallResult:
    """Process 0: collects the reports of the other processes, and sends each of them the result."""
    connections: dict[int, socket.socket] = {}
    while time.monotonic() < deadline:
        if len(connections) == count - 1:
            connections = {index: connection for index, connection in connections.items() if not _is_closed(connection)}
            if len(connections) == count - 1:
                break
        listener.settimeout(min(RETRY_S, max(deadline - time.monotonic(), 0.001)))
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        deadline = min(deadline, _register(connection, connections, count))
    gone = {index for index, connection in connections.items() if _is_closed(connection)}
    missing = tuple(index for index in range(1, count) if index not in connections or index in gone)
    result = RollCallResult(missing)
    for connection in connections.values():
        _send_result(connection, result)
    return result


def _register(connection: socket.socket, connections: dict[int, socket.socket], count: int) -> float:
    """Reads the report of a process and adds its connection. Returns the deadline of the process.

    A connection that does not begin with a report is not from a process of this run, and is closed.
    """
    connection.settimeout(REPORT_TIMEOUT_S)
    report = re.fullmatch(rb"zerojax (\d+) (\d+) ([\d.]+)\n", _read_line(connection))
    if report is None:
        connection.close()
        return float("inf")
    index, reported_count = int(report[1]), int(report[2])
    if reported_count != count or not 0 < index < count:
        refused = f"process 0 expects {count} processes, process {index} expects {reported_count}"
        _send_result(connection, RollCallResult(refused=refused))
        return float("inf")
    if index in connections and not _is_closed(connections[index]):
        _send_result(connection, RollCallResult(refused=f"another process already has index {index}"))
        return float("inf")
    connections[index] = connection
    return time.monotonic() + float(report[3])


def _report(address: tuple[str, int], report: str, deadline: float) -> RollCallResult:
    """All other processes: report to process 0 and wait for the result. If there is none, process 0 is missing."""
    while (seconds_left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(address, timeout=seconds_left) as connection:
                connection.sendall(f"{report} {seconds_left:.3f}\n".encode())
                connection.settimeout(seconds_left + RESULT_TIMEOUT_S)
                result = json.loads(_read_line(connection))
                return RollCallResult(tuple(result["missing"]), result["refused"])
        except (OSError, ValueError):  # process 0 does not listen yet, another program does, or process 0 has ended
            time.sleep(RETRY_S)
    return RollCallResult((0,))


def _read_line(connection: socket.socket) -> bytes:
    """Reads up to the end of a line, or less if the other side closes the connection."""
    text = b""
    try:
        while not text.endswith(b"\n") and len(text) < 2**20 and (part := connection.recv(4096)):
            text += part
    except OSError:
        pass
    return text


def _send_result(connection: socket.socket, result: RollCallResult) -> None:
    """Sends the result and closes the connection. If the process has ended meanwhile, this has no effect."""
    with connection:
        try:
            connection.sendall(json.dumps(result._asdict()).encode() + b"\n")
        except OSError:
            return


def _is_closed(connection: socket.socket) -> bool:
    """Whether the other side has closed the connection."""
    connection.setblocking(False)
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        connection.settimeout(REPORT_TIMEOUT_S)
