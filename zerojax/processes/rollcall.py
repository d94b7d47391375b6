"""A roll call of all processes before JAX joins them, so that an error can name the processes that are missing.

`jax.distributed.initialize` waits for all processes; if one does not connect, its C++ code aborts the others (SIGABRT)
without naming the missing one. Therefore each process first reports its index to process 0, on the port that JAX uses
afterwards:

    process 1..n-1   "zerojax INDEX COUNT SECONDS_LEFT\n"  ->  process 0
    process 0        {"missing": [...], "refused": ""}     ->  all that reported, when all have or the time is up

The connections carry nothing else, and the port is closed again.

Any program that reaches the port can connect, and any program may listen on it in place of process 0. No connection
can therefore hold up another one, whatever it sends and however slowly: all are served side by side, what is read of
each is bounded, and times are limits in total. Who sends a report is not verified.
"""

from __future__ import annotations

import contextlib
import errno
import json
import re
import selectors
import socket
import time
from collections.abc import Collection
from typing import Any, NamedTuple

RETRY_S = 0.2  # between two attempts to reach process 0
CONNECT_TIMEOUT_S = 5.0  # for one attempt: an address of process 0 that drops packets must not take all the time
REPORT_TIMEOUT_S = 2.0  # from the connection to the end of the report; a process sends it at once
SEND_TIMEOUT_S = 2.0  # for process 0 to send the result to all others
RESULT_TIMEOUT_S = 5.0  # for the result of process 0 to reach the others, after the deadline
MAX_REPORT_BYTES = 100
MAX_RESULT_BYTES = 2**20  # the indices of about 150,000 processes
MAX_REFUSAL_CHARS = 200
MAX_UNREPORTED = 1024  # connections at a time; those of a thousand processes that connect at once, and report at once

_REPORT = re.compile(rb"zerojax (\d{1,9}) (\d{1,9}) (\d{1,9}(?:\.\d{1,6})?)\n")


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
        timeout_s: how long this process waits. It returns a few seconds later at most, whatever connects or answers.
        bind: HOST:PORT on which process 0 listens; all addresses of its machine by default.

    Returns:
        The missing processes, which are the same in all processes, unless process 0 refused this one.

    Raises:
        OSError: in process 0, if the port is taken, or if the processes are more than it may open files.

    Cost: one connection and two short messages for each process.
    """
    deadline = time.monotonic() + timeout_s
    if index:
        return _report(_host_and_port(coordinator), index, count, deadline)
    address = _host_and_port(bind or f"[::]:{coordinator.rpartition(':')[2]}")
    with _listen(address) as listener, contextlib.closing(_Roll(listener, count)) as roll:
        return roll.call(deadline)


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _listen(address: tuple[str, int]) -> socket.socket:
    if address[0] in ("", "::") and socket.has_dualstack_ipv6():
        return socket.create_server(("::", address[1]), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096)
    family = socket.AF_INET6 if ":" in address[0] and socket.has_ipv6 else socket.AF_INET
    host = "" if family == socket.AF_INET and address[0] == "::" else address[0]
    return socket.create_server((host, address[1]), family=family, backlog=4096)


class _Report(NamedTuple):
    """What a process reports.

    Attributes:
        index: its index.
        count: the number of processes that it expects.
        deadline: until when it waits, by the clock of this process.
    """

    index: int
    count: int
    deadline: float


class _Unreported(NamedTuple):
    """A connection that has not reported yet: when it is closed, and what it has sent so far."""

    deadline: float
    text: bytearray


class _Roll:
    """Process 0: collects the reports of the other processes, and sends each of them the result.

    One loop serves all connections, and no call in it blocks. A connection that does not send a report, and nothing
    but a report, is not from a process of this run, and is closed.
    """

    def __init__(self, listener: socket.socket, count: int) -> None:
        self._listener, self._count = listener, count
        self._unreported: dict[socket.socket, _Unreported] = {}  # the oldest first
        self._reports: dict[socket.socket, _Report] = {}
        self._connections: dict[int, socket.socket] = {}  # by the index that was reported
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def call(self, deadline: float) -> RollCallResult:
        """Waits for the reports until the deadline, or until the earliest one of a process that has reported."""
        while not self._is_complete():
            now = time.monotonic()
            end = min([deadline, *(report.deadline for report in self._reports.values())])
            if now >= end:
                break
            self._close_overdue(now)
            overdue = next((one.deadline for one in self._unreported.values()), end)
            for key, _ in self._selector.select(max(min(end, overdue) - now, 0)):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._read(key.fileobj)  # pyright: ignore[reportArgumentType]
        result = RollCallResult(tuple(index for index in range(1, self._count) if index not in self._connections))
        _send_to_all(self._reports, _encoded(result))
        return result

    def close(self) -> None:
        """Closes all connections."""
        for connection in [*self._unreported, *self._reports]:
            self._close(connection)
        self._selector.close()

    def _is_complete(self) -> bool:
        """Whether all have reported and none has left, which the selector might not have shown yet."""
        if len(self._reports) == self._count - 1:
            for connection in [*self._reports]:
                if _has_sent_or_left(connection):
                    self._close(connection)
        return len(self._reports) == self._count - 1

    def _accept(self) -> None:
        if len(self._unreported) >= MAX_UNREPORTED:
            self._close(next(iter(self._unreported)))
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # no more files can be opened: make room, or give up
                if not self._unreported:
                    raise
                self._close(next(iter(self._unreported)))
            return  # otherwise it has left again
        connection.setblocking(False)
        self._unreported[connection] = _Unreported(time.monotonic() + REPORT_TIMEOUT_S, bytearray())
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> None:
        """Reads what a connection has sent, without waiting for more."""
        unreported = self._unreported.get(connection)
        if unreported is None:  # it has reported: it has left, or sends what no process of this run would send
            self._close(connection)
            return
        try:
            text = connection.recv(MAX_REPORT_BYTES)
        except BlockingIOError:
            return
        except OSError:
            text = b""
        unreported.text.extend(text)
        if b"\n" in unreported.text:
            self._register(connection, _parsed_report(unreported.text))
        elif not text or len(unreported.text) >= MAX_REPORT_BYTES:
            self._close(connection)

    def _register(self, connection: socket.socket, report: _Report | None) -> None:
        """Adds the report of a process, or refuses it and closes its connection."""
        if report is None:
            self._close(connection)
        elif refusal := self._refusal(report):
            with contextlib.suppress(OSError):
                connection.send(_encoded(RollCallResult(refused=refusal)))  # short: it fits into the socket's buffer
            self._close(connection)
        else:
            del self._unreported[connection]
            self._reports[connection] = report
            self._connections[report.index] = connection

    def _refusal(self, report: _Report) -> str:
        """Why a process is refused; empty if it is not. A process that has left may come again."""
        if report.count != self._count or not 0 < report.index < self._count:
            return f"process 0 expects {self._count} processes, process {report.index} expects {report.count}"
        earlier = self._connections.get(report.index)
        if earlier is None:
            return ""
        if not _has_sent_or_left(earlier):
            return f"another process already has index {report.index}"
        self._close(earlier)
        return ""

    def _close_overdue(self, now: float) -> None:
        """Closes the connections that have not reported in time."""
        for connection in [connection for connection, one in self._unreported.items() if one.deadline <= now]:
            self._close(connection)

    def _close(self, connection: socket.socket) -> None:
        """Closes a connection and forgets it. May be repeated: it can be closed before its event is handled."""
        if connection.fileno() < 0:
            return
        self._unreported.pop(connection, None)
        if report := self._reports.pop(connection, None):
            del self._connections[report.index]
        self._selector.unregister(connection)
        connection.close()


def _send_to_all(connections: Collection[socket.socket], message: bytes) -> None:
    """Sends a message on all connections side by side. One that does not take it in time does not get all of it."""
    deadline = time.monotonic() + SEND_TIMEOUT_S
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection, selectors.EVENT_WRITE, memoryview(message))
        while selector.get_map() and (seconds_left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(seconds_left):
                connection: socket.socket = key.fileobj  # pyright: ignore[reportAssignmentType]
                try:
                    rest = key.data[connection.send(key.data) :]
                except BlockingIOError:
                    continue
                except OSError:
                    rest = b""
                if rest:
                    selector.modify(connection, selectors.EVENT_WRITE, rest)
                else:
                    selector.unregister(connection)


def _has_sent_or_left(connection: socket.socket) -> bool:
    """Whether a connection that has reported was closed by the other side, or has sent anything else."""
    try:
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _report(address: tuple[str, int], index: int, count: int, deadline: float) -> RollCallResult:
    """All other processes: report to process 0 and wait for the result. If there is none, process 0 is missing."""
    while (seconds_left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(address, timeout=min(seconds_left, CONNECT_TIMEOUT_S)) as connection:
                seconds_left = max(deadline - time.monotonic(), 0.001)
                connection.sendall(f"zerojax {index} {count} {seconds_left:.3f}\n".encode())
                result = _parsed_result(_read_result(connection, deadline + RESULT_TIMEOUT_S), count)
        except (OSError, UnicodeError):  # process 0 does not listen yet, or has ended; or its name is not one
            result = None
        if result is not None:
            return result
        time.sleep(RETRY_S)  # none, for example because another program listens there
    return RollCallResult((0,))


def _read_result(connection: socket.socket, deadline: float) -> bytes:
    """Reads up to the end of a line, or less if the other side closes the connection, sends too much or is too slow."""
    text = bytearray()
    while b"\n" not in text and len(text) < MAX_RESULT_BYTES and (seconds_left := deadline - time.monotonic()) > 0:
        connection.settimeout(seconds_left)
        part = connection.recv(65536)
        if not part:
            break
        text.extend(part)
    return bytes(text)


def _encoded(result: RollCallResult) -> bytes:
    return json.dumps(result._asdict()).encode() + b"\n"


def _parsed_report(text: bytes | bytearray) -> _Report | None:
    """What a process reports, or None if this is not a report."""
    match = _REPORT.fullmatch(text)
    if match is None or not (seconds_left := float(match[3])) > 0:
        return None
    return _Report(int(match[1]), int(match[2]), time.monotonic() + seconds_left)


def _parsed_result(text: bytes, count: int) -> RollCallResult | None:
    """The result that process 0 sent, or None if this is not one."""
    try:
        result: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(result, dict) or result.keys() != {"missing", "refused"}:
        return None
    missing, refused = result["missing"], result["refused"]
    if not isinstance(missing, list) or not all(type(index) is int and 0 < index < count for index in missing):
        return None
    if not isinstance(refused, str) or len(refused) > MAX_REFUSAL_CHARS or not refused.isprintable():
        return None  # an error shows it
    return RollCallResult(tuple(missing), refused)
