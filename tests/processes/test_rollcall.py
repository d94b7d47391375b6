"""The roll call of the processes, over loopback. Other programs that reach its port cannot hold it up."""

import contextlib
import itertools
import json
import socket
import threading
import time

import pytest
from support.ports import free_port

from zerojax.processes import rollcall
from zerojax.processes.rollcall import call_roll


def roll_call(count, *callers, timeout_s=5.0, before=lambda port: None):
    """The result of the roll call for each caller, given as (index, count that it reports, seconds until it calls)."""
    address, results = f"127.0.0.1:{free_port()}", {}

    def call(number, index, reported_count, delay):
        time.sleep(delay)
        results[number] = call_roll(address, reported_count, index, timeout_s, address)

    threads = [threading.Thread(target=call, args=(number, *caller)) for number, caller in enumerate(callers)]
    for thread in threads:
        thread.start()
    before(int(address.split(":")[1]))
    for thread in threads:
        thread.join()
    return [results[number] for number in range(len(callers))]


def test_roll_call_waits_for_the_last_process():
    assert roll_call(3, (1, 3, 0), (0, 3, 0.5), (2, 3, 1)) == [((), "")] * 3


def test_roll_call_names_all_missing_processes_at_the_earliest_deadline():
    start = time.monotonic()
    assert roll_call(5, (1, 5, 0), (0, 5, 1.2), (3, 5, 1.4), timeout_s=2) == [((2, 4), "")] * 3
    assert time.monotonic() - start < 1.2 + 2  # the next deadline, that of process 0


def test_roll_call_refuses_a_duplicate_index_and_a_different_count():
    results = roll_call(3, (0, 3, 0), (1, 3, 0.3), (1, 3, 0.8), (2, 4, 0.8), (2, 3, 1.5))
    assert results[2].refused == "another process already has index 1"
    assert results[3].refused == "process 0 expects 3 processes, process 2 expects 4"
    assert results[0] == results[1] == results[4] == ((), "")


@pytest.mark.parametrize(("count", "missing"), [(3, (2,)), (4, (2, 3))])
def test_roll_call_ignores_other_programs_and_processes_that_left(count, missing):
    def disturb(port):
        time.sleep(0.5)
        for text in (b"", b"GET / HTTP/1.1\r\n\r\n", b"zerojax 7 %d 1.0\n" % count, b"zerojax 2 %d 9.0\n" % count):
            with socket.create_connection(("127.0.0.1", port)) as s:
                s.sendall(text)

    # Process 1 calls last: had all reported before one of them left, the roll call would rightly be complete.
    assert roll_call(count, (0, count, 0), (1, count, 1.5), timeout_s=2.5, before=disturb) == [(missing, "")] * 2


@contextlib.contextmanager
def dripping(connections):
    """Sends a character on each connection every 0.1 s: none of them is ever silent for long."""
    stop = threading.Event()

    def drip():
        for character in itertools.cycle(b"zerojax 2 3 9999"):
            for connection in connections:
                with contextlib.suppress(OSError):
                    connection.send(bytes([character]))
            if stop.wait(0.1):
                return

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


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


ATTACKS = {
    "idle": (200, b""),
    "half a report": (200, b"zerojax 2 3 "),
    "5000 digits": (20, b"zerojax " + b"2" * 5000 + b" 3 9.0\n"),
    "5000 digits of seconds": (20, b"zerojax 2 3 " + b"9" * 5000 + b"\n"),
    "seconds that are not a number": (20, b"zerojax 2 3 1.2.3\n"),
    "infinite": (20, b"zerojax 2 3 inf\n"),
    "not a number": (20, b"zerojax 2 3 nan\n"),
    "negative": (20, b"zerojax 2 3 -1\n"),
    "no seconds": (20, b"zerojax 2 3 0\n"),
    "no seconds, with decimals": (20, b"zerojax 2 3 0.000\n"),
    "a report and more": (20, b"zerojax 2 3 9.0\nzerojax 2 3 9.0\n"),
    "a huge line": (3, b"zerojax 2 3 " + b"9" * 5_000_000),
    "other digits": (20, "zerojax 2 3 ٣\n".encode()),
    "bytes": (20, bytes(range(256)) * 4),
}


@pytest.mark.parametrize("drips", [False, True])
@pytest.mark.parametrize("attack", ATTACKS)
def test_others_on_the_port_keep_no_process_out(attack, drips, monkeypatch):
    """All processes join, and at once: other connections stay open meanwhile, and would be for a minute."""
    monkeypatch.setattr(rollcall, "REPORT_TIMEOUT_S", 60)
    connections = []

    def disturb(port):
        connections.extend(connect(port, *ATTACKS[attack]))

    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        stack.enter_context(dripping(connections)) if drips else None
        assert roll_call(3, (0, 3, 0), (1, 3, 1), (2, 3, 1), timeout_s=30, before=disturb) == [((), "")] * 3
    assert time.monotonic() - start < 10
    for connection in connections:
        connection.close()


@pytest.mark.parametrize("attack", ["idle", "half a report", "a huge line"])
def test_the_deadline_holds_and_names_the_missing_under_attack(attack, monkeypatch):
    monkeypatch.setattr(rollcall, "REPORT_TIMEOUT_S", 60)
    connections, start = [], time.monotonic()
    with dripping(connections):
        results = roll_call(
            3,
            (0, 3, 0),
            (1, 3, 0.5),
            timeout_s=2,
            before=lambda port: connections.extend(connect(port, *ATTACKS[attack])),
        )
    assert results == [((2,), "")] * 2
    assert time.monotonic() - start < 8
    for connection in connections:
        connection.close()


def is_closed(connection):
    """Whether process 0 has closed the connection, or does so within 0.2 s."""
    try:
        return not connection.recv(1)
    except ConnectionError:
        return True
    except TimeoutError:
        return False


def test_a_connection_that_does_not_report_in_time_is_closed(monkeypatch):
    """The time counts from the connection to the end of the report, not from one character to the next."""
    monkeypatch.setattr(rollcall, "REPORT_TIMEOUT_S", 0.5)
    closed = []

    def disturb(port):
        connections = connect(port, 20)
        with dripping(connections):
            time.sleep(1.5)
            closed.extend(map(is_closed, connections))

    assert roll_call(2, (0, 2, 0), (1, 2, 3), timeout_s=10, before=disturb) == [((), "")] * 2
    assert closed == [True] * 20


def test_a_connection_that_sends_anything_else_is_closed_at_once(monkeypatch):
    """A line that is too long as well, although it might go on: it would take up memory."""
    monkeypatch.setattr(rollcall, "REPORT_TIMEOUT_S", 60)
    closed = {}

    def disturb(port):
        connections = {attack: connect(port, 1, text)[0] for attack, (_, text) in ATTACKS.items()}
        closed.update({attack: is_closed(connection) for attack, connection in connections.items()})

    assert roll_call(3, (0, 3, 0), (1, 3, 5), (2, 3, 5), timeout_s=20, before=disturb) == [((), "")] * 3
    assert closed == {attack: attack not in ("idle", "half a report") for attack in ATTACKS}


def test_the_oldest_connection_is_closed_if_too_many_do_not_report(monkeypatch):
    monkeypatch.setattr(rollcall, "REPORT_TIMEOUT_S", 60)
    monkeypatch.setattr(rollcall, "MAX_UNREPORTED", 8)
    closed = []

    def disturb(port):
        connections = connect(port, 20)
        closed.extend(map(is_closed, connections))

    assert roll_call(2, (0, 2, 0), (1, 2, 4), timeout_s=20, before=disturb) == [((), "")] * 2
    assert closed == [True] * 12 + [False] * 8


def test_a_full_table_of_files_closes_connections_that_do_not_report(monkeypatch):
    """Process 0 can open no more files while connections of others are open. It closes those, and does not fail."""
    accept, calls = socket.socket.accept, itertools.count()

    def accept_if_there_is_room(listener):
        if next(calls) == 10:
            raise OSError(24, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accept_if_there_is_room)
    results = roll_call(2, (0, 2, 0), (1, 2, 1.5), timeout_s=20, before=lambda port: connect(port, 20))
    assert results == [((), "")] * 2
    assert next(calls) > 20


def report(port, index, count, seconds=20):
    (connection,) = connect(port, 1, b"zerojax %d %d %.3f\n" % (index, count, seconds))
    return connection


def test_hundreds_of_processes_report_at_once():
    connections = []

    def call_all(port):
        connections.extend(report(port, index, 400) for index in reversed(range(1, 400)))

    start = time.monotonic()
    assert roll_call(400, (0, 400, 0), timeout_s=30, before=call_all) == [((), "")]
    assert time.monotonic() - start < 15
    for connection in connections:
        with connection, connection.makefile() as lines:
            assert json.loads(lines.readline()) == {"missing": [], "refused": ""}


def test_a_process_may_leave_and_come_again():
    """Its second report counts, and the short deadline of its first one does not."""

    def leave(port):
        report(port, 2, 3, seconds=1).close()

    assert roll_call(3, (0, 3, 0), (1, 3, 0.5), (2, 3, 2.0), timeout_s=20, before=leave) == [((), "")] * 3


def test_processes_that_do_not_read_their_result_hold_nobody_up(monkeypatch):
    """The result is longer than what the buffers of a connection take, and the first one to report does not read."""
    monkeypatch.setattr(rollcall, "SEND_TIMEOUT_S", 1.0)
    monkeypatch.setattr(rollcall, "MAX_RESULT_BYTES", 2**24)
    count, silent = 1_200_000, []  # the result lists all missing indices, in 9 MB

    def disturb(port):
        silent.append(report(port, 1, count))

    start = time.monotonic()
    results = roll_call(count, (0, count, 0), (2, count, 1), timeout_s=3, before=disturb)
    assert results == [(tuple(range(3, count)), "")] * 2
    assert time.monotonic() - start < 20
    silent[0].close()


ANSWERS = {
    "nothing": b"",
    "a request": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "a list": b"[1]\n",
    "no list": b'{"missing": 3, "refused": ""}\n',
    "a part": b'{"missing": 3}\n',
    "texts": b'{"missing": ["1"], "refused": ""}\n',
    "truth values": b'{"missing": [true], "refused": ""}\n',
    "an unknown process": b'{"missing": [3], "refused": ""}\n',
    "no text": b'{"missing": [], "refused": 3}\n',
    "escape sequences": b'{"missing": [], "refused": "\\u001b[2J"}\n',
    "a long refusal": json.dumps({"missing": [], "refused": "no" * 1000}).encode() + b"\n",
    "5000 digits": b'{"missing": [' + b"1" * 5000 + b'], "refused": ""}\n',
    "deep": b"[" * 200_000 + b"\n",
    "huge": b"[" * 3_000_000,
    "not UTF-8": b"\xff\xfe\xfa\n",
}


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("answer", ANSWERS)
def test_another_program_in_place_of_process_0(answer, closes, monkeypatch):
    """Whatever it answers, the process ends soon after its own deadline, and names process 0."""
    monkeypatch.setattr(rollcall, "RESULT_TIMEOUT_S", 0.5)
    with other_program(ANSWERS[answer], closes) as port:
        start = time.monotonic()
        assert call_roll(f"127.0.0.1:{port}", 3, 1, 1.0) == ((0,), "")
        assert time.monotonic() - start < 6


def test_an_answer_that_is_too_long_is_not_read_to_its_end(monkeypatch):
    """It would take up memory until the deadline. The process tries again instead."""
    monkeypatch.setattr(rollcall, "MAX_RESULT_BYTES", 1000)
    connections = []
    with other_program(b"[" * 5000, False, connections) as port:
        assert call_roll(f"127.0.0.1:{port}", 3, 1, 2.0) == ((0,), "")
    assert len(connections) > 1


def test_another_program_that_answers_a_character_at_a_time(monkeypatch):
    monkeypatch.setattr(rollcall, "RESULT_TIMEOUT_S", 0.5)
    connections = []
    with other_program(b"", False, connections) as port, dripping(connections):
        start = time.monotonic()
        assert call_roll(f"127.0.0.1:{port}", 3, 1, 1.0) == ((0,), "")
        assert time.monotonic() - start < 6


@contextlib.contextmanager
def other_program(answer, closes, connections=None):
    """Listens on a port, and answers every connection with a text."""
    connections = [] if connections is None else connections
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    connections.append(connection)
                    with contextlib.suppress(OSError):
                        connection.settimeout(1)
                        connection.sendall(answer)
                    if closes:
                        connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in connections:
                connection.close()


def test_a_result_that_arrives_in_pieces():
    """Only the line as a whole counts."""
    text = b'{"missing": [2], "refused": ""}\n'
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            connection, _ = listener.accept()
            with connection:
                for character in text:
                    connection.sendall(bytes([character]))
                    time.sleep(0.01)

        thread = threading.Thread(target=serve)
        thread.start()
        assert call_roll(f"127.0.0.1:{listener.getsockname()[1]}", 3, 1, 5.0) == ((2,), "")
        thread.join()
