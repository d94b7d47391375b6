"""Joins the processes of a training run, checks that they agree, and divides the rows of a batch among them.

`jax.distributed` connects the processes. This module adds what it does not do: it names processes that are missing or
have a different configuration. Afterwards, a process that fails ends at once: when Python ends, JAX waits up to 300 s
for all others to end too, which wait for it.

`jax.distributed.initialize` waits for all processes; if one does not connect, its C++ code aborts the others (SIGABRT)
without naming the missing one. Therefore each process first reports to process 0, on the port that JAX uses afterwards:

    process 1..n-1   "zerojax INDEX COUNT\n"       ->  process 0
    process 0        "missing INDEX INDEX ...\n"   ->  all that reported, when all have or the time of process 0 is up

Any program can connect, or listen in place of process 0. Each connection has a thread, what is read of it is bounded,
and times are limits in total, so none holds up another. Who sends a report is not verified.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Mapping
from typing import NamedTuple, NoReturn

import jax
import jax._src.distributed
import jax._src.xla_bridge
from jax.sharding import Mesh

from zerojax.processes import agreement
from zerojax.processes.agreement import distributed_state, names
from zerojax.processes.detect import LaunchInfo, detect
from zerojax.sharding.axes import CONTEXT
from zerojax.sharding.mesh import row_groups
from zerojax.utils.text import error_text
from zerojax.utils.warn import warn

MIN_CONNECT_S = 30  # for JAX to connect the processes after the roll call, however long the roll call took
# After an exception process 0 waits for this time. JAX aborts the others when it exits, and they might not have written
# their errors yet.
EXIT_DELAY_S = 2
# After sys.exit with a code that is not 0, the others have this time to end too, as all do at once after SIGTERM. Then
# they end together as after a success, and none aborts another one that is still saving.
JOINT_EXIT_S = 5

RETRY_S = 0.2  # between two attempts to reach process 0
CONNECT_TIMEOUT_S = 5.0  # for one attempt: an address of process 0 that drops packets must not take all the time
RESULT_DELAY_S = 5.0  # after the deadline of process 0, for its result: a busy machine is late; who gives up is missing
REPORT_TIMEOUT_S = 2.0  # from the connection to the end of the report; a process sends it at once
MAX_REPORT_BYTES, MAX_RESULT_BYTES = 100, 2**20
_REPORT = re.compile(rb"zerojax (\d{1,9}) (\d{1,9})\n")
_RESULT = re.compile(rb"missing((?: \d{1,9})*)\n")

_exit_code = 0  # with which Python ends; set when it does


class Processes(NamedTuple):
    """The processes that train together.

    Attributes:
        count: number of processes.
        index: index of this process.
        coordinator: HOST:PORT of process 0; None for a single process.
        found: how they were detected: 'ZEROJAX', 'torchrun', 'slurm', 'ompi', 'jax' (JAX's own detection), or 'alone'.
    """

    count: int
    index: int
    coordinator: str | None
    found: str


def initialize(
    *, timeout_s: int = 300, heartbeat_s: int = 100, config: Mapping[str, object] | None = None
) -> Processes:
    """Joins this process with the others that the launcher started. Must be called before JAX initializes its devices.

    `processes.detect.detect` lists the environment variables of each launcher. If none of them is set, or if they
    describe a single process, nothing is started.

    Afterwards, a process that raises an exception exits at once, and one that calls `sys.exit` with a code that is not
    0 after a few seconds, unless all exit. With JAX alone it would wait up to 300 s for the other processes to exit,
    which wait for it in a collective. It still does after `raise SystemExit(code)` without `sys.exit`.

    Args:
        timeout_s: how long to wait for the other processes, in seconds.
        heartbeat_s: a process that sends no heartbeat for this time, in seconds, counts as dead. JAX then ends the
            others with exit code 134 (SIGABRT), and writes the index of the dead process to stderr.
        config: a configuration that must be the same in all processes; see `agreement.agree`.

    Returns:
        The number of processes, the index of this one, and how they were detected.

    Raises:
        ValueError: if variables are missing or contradict each other, or if the processes differ.
        TimeoutError: if processes are missing; it names them. If JAX itself detects the processes (`found` is 'jax'),
            JAX waits for them, and aborts the process instead.
        RuntimeError: if JAX has already initialized its devices, if this function was called before, or if the port of
            the coordinator is taken.

    Cost: waits for the last process; then about a second. Each process opens one connection to process 0.
    """
    # Detect the processes.
    agreement.check_config(config or {})
    info = detect(os.environ)
    if info is None or info.count == 1:
        return Processes(1, 0, None, info.found if info else "alone")
    # Call the roll, and join them.
    _check_not_initialized()
    deadline = time.monotonic() + timeout_s
    if info.coordinator is not None:
        _wait_for_all(info, timeout_s)
    jax.distributed.initialize(
        info.coordinator,
        info.count,
        info.index,
        local_device_ids=info.local_device_ids,
        cluster_detection_method=info.detection_method,
        initialization_timeout=max(MIN_CONNECT_S, round(deadline - time.monotonic())),
        heartbeat_timeout_seconds=heartbeat_s,
    )
    # Check that they agree.
    exit_at_once_on_failure()
    agreement.agree(config or {}, timeout_s=timeout_s)
    state = distributed_state()
    return Processes(state.num_processes, state.process_id, state.coordinator_address, info.found)


def check_joined() -> None:
    """Raises RuntimeError if this process has not joined the others that `zerojax launch` or variables of zerojax
    describe; alone, each would train on its own. What other launchers start may be independent: that is a warning.
    """
    try:
        info = detect(os.environ)
    except ValueError:  # not all variables of a launcher: `initialize` says which
        return
    if info is None or info.count is None or info.count == 1 or jax.distributed.is_initialized():
        return
    text = error_text(
        f"processes: {info.count} processes were started, and this one has not joined them",
        f"process {info.index}, detected from {info.found}, which would train alone",
        "call zerojax.initialize() before anything else in JAX",
    )
    if info.found == "ZEROJAX":
        raise RuntimeError(text)
    warn(text)


def own_rows(num_rows: int, mesh: Mesh | None = None) -> slice:
    """The rows of a global batch that this process loads, and passes to a step or to `zero.shard_batch`.

    Args:
        num_rows: number of rows of the global batch, over all processes.
        mesh: where an axis `context` or `model` spans several processes, these need the same rows. Other axes of the
            mesh split the batch. The default is that each process has rows of its own.

    Raises:
        ValueError: if the number of processes, or of groups of them that need the same rows, does not divide
            `num_rows`.
    """
    count, index = jax.process_count(), jax.process_index()
    if mesh is not None:
        groups = row_groups(mesh, tuple(name for name in mesh.axis_names if name not in (CONTEXT, "model")))
        count, index = len(set(groups)), groups[index]
    if num_rows % count:
        what = "processes: the rows of the batch cannot be divided among the processes"
        got = f"{num_rows} rows, {count} processes; {num_rows} % {count} = {num_rows % count}"
        raise ValueError(error_text(what, got, f"use a multiple of {count} rows"))
    rows = num_rows // count
    return slice(index * rows, (index + 1) * rows)


def _check_not_initialized() -> None:
    # No public function reports this without initializing the devices. jax.distributed.initialize would raise an error
    # too, but after the roll call, when the other processes already count on this one.
    if jax.distributed.is_initialized() or jax._src.xla_bridge.backends_are_initialized():
        what = "joined the processes" if jax.distributed.is_initialized() else "initialized its devices"
        fix = "call it once, before the first array and before jax.devices() and zerojax.make_mesh()"
        raise RuntimeError(error_text("processes: initialize() was called too late", f"JAX has already {what}", fix))


def _wait_for_all(info: LaunchInfo, timeout_s: int) -> None:
    """Calls the roll, and raises an error in all processes if one is missing."""
    assert info.coordinator is not None and info.count is not None and info.index is not None
    bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
    try:
        missing = find_missing(info.coordinator, info.count, info.index, timeout_s, bind)
    except OSError as error:
        fix = "set another port in all processes, or end the program that uses this one"
        what = f"processes: process 0 cannot listen on {bind or info.coordinator}"
        raise RuntimeError(error_text(what, error, fix)) from error
    if missing:
        raise TimeoutError(
            error_text(
                f"processes: {names(missing)} of {info.count} did not join within {timeout_s} s",
                f"this is process {info.index}, detected from {info.found}; process 0 is {info.coordinator}",
                "check the output of the missing ones, that they can reach process 0, and that each process has its own"
                "\n            index and all have the same count; or raise timeout_s",
            )
        )


# The roll call


def find_missing(coordinator: str, count: int, index: int, timeout_s: float, bind: str | None = None) -> list[int]:
    """Waits until all processes have reported to process 0, or until its time is up; returns those that have not.

    Process 0 waits so long for the others, and they for it to listen, and then for its result. It listens on `bind`,
    HOST:PORT, or on all addresses of its machine, and raises OSError if the port is taken.
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
                result_deadline = time.monotonic() + timeout_s + RESULT_DELAY_S
                match = _RESULT.fullmatch(_line(connection, result_deadline, MAX_RESULT_BYTES))
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


# The end of a process


def exit_at_once_on_failure() -> None:
    """Makes a failure end this process at once: an exception, or `sys.exit` with a code that is not 0.

    To be called after `jax.distributed.initialize`: exit handlers run in the reverse order.
    """
    sys.exit = _exit
    atexit.register(_exit_if_failed, os.getpid())


class _Exit(SystemExit):
    """The exception that `sys.exit` raises. It records its code if Python ends because nothing caught it.

    Exit handlers cannot see the code otherwise: when they are called, Python has already dropped the exception.
    """

    def __getattribute__(self, name: str) -> object:
        value = super().__getattribute__(name)
        if name == "code" and sys._getframe().f_back is None:  # no Python code asks, but Python itself, to end
            global _exit_code
            _exit_code = value & 0xFF if isinstance(value, int) else int(value is not None)  # as Python does
        return value


def _exit(status: object = None, /) -> NoReturn:
    raise _Exit(status)


def _exit_if_failed(pid: int) -> None:
    """Exit handler: after a failure, ends the process before JAX waits for the others to exit."""
    if not jax.distributed.is_initialized() or os.getpid() != pid:  # the latter in a forked process
        return
    state = distributed_state()
    if hasattr(sys, "last_value"):
        _flush()
        if state.process_id == 0:
            time.sleep(EXIT_DELAY_S)
        os._exit(1)
    if not _all_exit(JOINT_EXIT_S if _exit_code else 0) and _exit_code:
        _flush()
        os._exit(_exit_code)


def _all_exit(timeout_s: float) -> bool:
    """Tells the other processes that this one exits, and whether all of them do within a time."""
    state = distributed_state()
    deadline = time.monotonic() + timeout_s
    try:
        state.client.key_value_set(f"zerojax/exit/{state.process_id}", "")
        for index in range(state.num_processes) if timeout_s else ():
            milliseconds = max(round((deadline - time.monotonic()) * 1000), 1)
            state.client.blocking_key_value_get(f"zerojax/exit/{index}", milliseconds)
    except jax.errors.JaxRuntimeError:  # the time is up, or process 0 has ended
        return False
    return True


def _flush() -> None:
    """Writes what is left of the output, unless nobody reads it any more."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # no output, no reader, closed
            stream.flush()
