"""The roll call: which processes are there, before JAX joins them.

`jax.distributed.initialize` waits for all processes; if one does not come, its C++ code aborts the others (SIGABRT)
and does not say which one is missing. Hence each process first tells its index to process 0, over the port that JAX
uses after it:

    process 1..n-1   "zerojax INDEX COUNT SECONDS_LEFT\n"  ->  process 0
    process 0        {"missing": [...], "refused": ""}     ->  all that came, when the last has come or time is up

It carries nothing else, decides nothing else, and closes the port again.
"""

from __future__ import annotations

import json
import re
import socket
import time
from typing import NamedTuple

RETRY_S = 0.2  # between two attempts to reach process 0
HELLO_S = 2.0  # for the one line that a connection begins with: longer holds up the others
ANSWER_S = 5.0  # beyond the deadline, which process 0 keeps, for its answer to arrive


class Absence(NamedTuple):
    """Who is missing.

    Attributes:
        missing: indices.
        refused: why process 0 refused this process, or nothing.
    """

    missing: tuple[int, ...] = ()
    refused: str = ""


def call_roll(coordinator: str, count: int, index: int, timeout_s: float, bind: str | None = None) -> Absence:
    """Waits until all processes are there, or until the first one's time is up.

    Args:
        coordinator: HOST:PORT of process 0.
        count: processes.
        index: of this one.
        timeout_s: how long this process waits.
        bind: HOST:PORT that process 0 listens on; without it on all addresses.

    Returns:
        the same in all processes: who is missing.

    Raises:
        OSError: in process 0: the port is taken.

    Cost: one connection and two short messages a process.
    """
    deadline = time.monotonic() + timeout_s
    if index:
        return _answer(_split(coordinator), f"zerojax {index} {count}", deadline)
    with _listen(_split(bind or f"[::]:{coordinator.rpartition(':')[2]}")) as listener:
        return _collect(listener, count, deadline)


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _listen(address: tuple[str, int]) -> socket.socket:
    if address[0] in ("", "::") and socket.has_dualstack_ipv6():
        return socket.create_server(("::", address[1]), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096)
    family = socket.AF_INET6 if ":" in address[0] and socket.has_ipv6 else socket.AF_INET
    host = "" if family == socket.AF_INET and address[0] == "::" else address[0]
    return socket.create_server((host, address[1]), family=family, backlog=4096)


def _collect(listener: socket.socket, count: int, deadline: float) -> Absence:
    """Process 0's part."""
    here: dict[int, socket.socket] = {}
    while time.monotonic() < deadline:
        if len(here) == count - 1:
            here = {index: connection for index, connection in here.items() if not _closed(connection)}
            if len(here) == count - 1:
                break
        listener.settimeout(min(RETRY_S, max(deadline - time.monotonic(), 0.001)))
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        deadline = min(deadline, _greet(connection, here, count))
    gone = {index for index, connection in here.items() if _closed(connection)}
    absence = Absence(tuple(index for index in range(1, count) if index not in here or index in gone))
    for connection in here.values():
        _tell(connection, absence)
    return absence


def _greet(connection: socket.socket, here: dict[int, socket.socket], count: int) -> float:
    """Adds a process to those that are here. Returns its deadline. What says no such line is no process of ours."""
    connection.settimeout(HELLO_S)
    hello = re.fullmatch(rb"zerojax (\d+) (\d+) ([\d.]+)\n", _line(connection))
    if hello is None:
        connection.close()
        return float("inf")
    index, told = int(hello[1]), int(hello[2])
    if told != count or not 0 < index < count:
        _tell(connection, Absence(refused=f"process 0 counts {count} processes; process {index} counts {told}"))
        return float("inf")
    if index in here and not _closed(here[index]):
        _tell(connection, Absence(refused=f"another process is process {index} already"))
        return float("inf")
    here[index] = connection
    return time.monotonic() + float(hello[3])


def _answer(address: tuple[str, int], hello: str, deadline: float) -> Absence:
    """The part of every other process. Without an answer process 0 is the one that is missing."""
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(address, timeout=left) as connection:
                connection.sendall(f"{hello} {left:.3f}\n".encode())
                connection.settimeout(left + ANSWER_S)
                told = json.loads(_line(connection))
                return Absence(tuple(told["missing"]), told["refused"])
        except (OSError, ValueError):  # not there yet, not its own port yet, or it ended before the answer
            time.sleep(RETRY_S)
    return Absence((0,))


def _line(connection: socket.socket) -> bytes:
    """Up to a line's end; less if the other side ends it."""
    text = b""
    try:
        while not text.endswith(b"\n") and len(text) < 2**20 and (part := connection.recv(4096)):
            text += part
    except OSError:
        pass
    return text


def _tell(connection: socket.socket, absence: Absence) -> None:
    """Says it and closes. A process that has ended meanwhile does not hear it."""
    with connection:
        try:
            connection.sendall(json.dumps(absence._asdict()).encode() + b"\n")
        except OSError:
            return


def _closed(connection: socket.socket) -> bool:
    """Whether the other side has ended."""
    connection.setblocking(False)
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        connection.settimeout(HELLO_S)
