"""The roll call of the processes, over loopback. Other programs that reach its port cannot hold it up."""

import contextlib
import itertools
import socket
import threading
import time

import pytest
from support.ports import free_port

from zerojax.processes import join
from zerojax.processes.join import find_missing


def roll_call(count, *callers, timeout_s=5.0, before=lambda port: None):
    """What each caller finds missing, given as (index, seconds until it calls)."""
    address, results = f"127.0.0.1:{free_port()}", {}

    def call(number, index, delay):
        time.sleep(delay)
        results[number] = find_missing(address, count, index, timeout_s, address)

    threads = [threading.Thread(target=call, args=(number, *caller)) for number, caller in enumerate(callers)]
    for thread in threads:
        thread.start()
    before(int(address.split(":")[1]))
    for thread in threads:
        thread.join()
    return [results[number] for number in range(len(callers))]


def connect(port, count, text=b""):
    """Connections to process 0, which must listen within a second, each of which has sent a text."""
    for _ in range(100):
        with contextlib.suppress(OSError):
            connections = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(count)]
            break
        time.sleep(0.01)
    for connection in connections:
        connection.settimeout(0.2)
        with contextlib.suppress(OSError):  # closed by process 0 meanwhile
            connection.sendall(text)
    return connections


def test_roll_call_waits_for_the_last_process():
    assert roll_call(3, (1, 0), (0, 0.5), (2, 1)) == [[]] * 3


def test_roll_call_names_all_missing_processes_when_the_time_of_process_0_is_up():
    start = time.monotonic()
    assert roll_call(5, (1, 0), (0, 0.5), (3, 0.7), timeout_s=1) == [[2, 4]] * 3
    assert time.monotonic() - start < 20


def test_two_processes_with_one_index_are_one():
    assert roll_call(3, (0, 0), (1, 0.2), (1, 0.2), timeout_s=1)[0] == [2]


def test_processes_that_left_or_expect_another_count_are_missing():
    def disturb(port):
        connections.extend(connect(port, 1, b"zerojax 1 4\n"))
        connect(port, 1, b"zerojax 1 3\n")[0].close()

    connections = []
    assert roll_call(3, (0, 0), (2, 0.5), timeout_s=1, before=disturb) == [[1]] * 2


def test_hundreds_of_processes_report_at_once():
    connections = []
    call_all = lambda port: connections.extend(connect(port, 1, b"zerojax %d 300\n" % k)[0] for k in range(1, 300))
    assert roll_call(300, (0, 0), timeout_s=30, before=call_all) == [[]]
    assert {connection.recv(100) for connection in connections} == {b"missing\n"}


ATTACKS = {
    "idle": (200, b""),
    "half a report": (200, b"zerojax 2 3"),
    "5000 digits": (20, b"zerojax " + b"2" * 5000 + b" 3\n"),
    "a report and more": (20, b"zerojax 2 3\nzerojax 2 3\n"),
    "a huge line": (3, b"zerojax 2 3 " + b"9" * 5_000_000),
    "bytes": (20, bytes(range(256)) * 4),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_others_on_the_port_keep_no_process_out(attack, monkeypatch):
    """All processes join at once, or the missing are named at the deadline, while other connections stay open."""
    monkeypatch.setattr(join, "REPORT_TIMEOUT_S", 60)
    connections, start = [], time.monotonic()
    disturb = lambda port: connections.extend(connect(port, *ATTACKS[attack]))
    assert roll_call(3, (0, 0), (1, 0.5), (2, 0.5), timeout_s=30, before=disturb) == [[]] * 3
    assert roll_call(3, (0, 0), (1, 0.5), timeout_s=1, before=disturb) == [[2]] * 2
    assert time.monotonic() - start < 25
    for connection in connections:
        connection.close()


def test_a_report_has_to_end_in_time(monkeypatch):
    """The time counts from the connection to the end of the report, not from one character to the next."""
    monkeypatch.setattr(join, "REPORT_TIMEOUT_S", 0.4)

    def drip(port):
        (connection,) = connect(port, 1)
        with pytest.raises(OSError):
            for _ in range(20):
                connection.send(b"z")
                time.sleep(0.1)

    assert roll_call(2, (0, 0), timeout_s=3, before=drip) == [[1]]


def test_a_full_table_of_files_is_no_end(monkeypatch):
    accept, calls = socket.socket.accept, itertools.count()

    def accept_if_there_is_room(listener):
        if next(calls) == 10:
            raise OSError(24, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accept_if_there_is_room)
    assert roll_call(2, (0, 0), (1, 1), before=lambda port: connect(port, 20)) == [[]] * 2


@contextlib.contextmanager
def other_program(answer, pause_s=0.0):
    """Listens on a port, and answers every connection with a text, character by character if there is a pause."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, contextlib.suppress(OSError):
                        for part in [bytes([byte]) for byte in answer] if pause_s else [answer]:
                            connection.sendall(part)
                            time.sleep(pause_s)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400\r\n\r\n", b"missing \x1b[2J\n", b"missing 1", b"9" * 3_000_000])
def test_another_program_in_place_of_process_0(answer):
    """Whatever it answers, the process ends soon after its own deadline, and names process 0."""
    with other_program(answer) as address:
        start = time.monotonic()
        assert find_missing(address, 3, 1, 0.5) == [0]
        assert time.monotonic() - start < 20


def test_a_result_that_arrives_in_pieces():
    """Only the line as a whole counts."""
    with other_program(b"missing 2 14\n", pause_s=0.01) as address:
        assert find_missing(address, 15, 1, 5.0) == [2, 14]
