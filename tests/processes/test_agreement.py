"""What differs between processes is found before they run a step together, and named in all of them."""

import json
import sys
import threading

import jax
import pytest
from support.paths import SUPPORT

from zerojax.processes import agreement
from zerojax.processes.launch import launch

pytestmark = pytest.mark.once
DIFFERING = str(SUPPORT / "differing.py")

# What the error says in each case, with the value of each process.
EXPECTED = {
    "stage": ["configurations differ", "stage: 3 in process 0; 2 in process 1"],
    "precision": ["compute_dtype: float32 in process 0; bfloat16 in process 1"],
    "mesh": ["mesh: data 4 (", "replica 2, data 2 ("],
    "seed": ["seed: 0 in process 0; 1 in process 1"],
    "key": ["the state of step 0 differs between devices", "key on device"],
    "model": ["states differ", "params/w1: float32[4, 4]", "params/w1: float32[4, 8]"],
    "call": ["call: zero.init in process 0; the step in process 1"],
    "rows": ["steps differ", "batch: x: float32[4, 4] in process 0; float32[8, 4] in process 1"],
    "rows that the devices do not divide": ["batch: x: float32[4, 4] in process 0; float32[3, 4] in process 1"],
    "dtype": ["batch: x: float32[4, 4] in process 0; float16[4, 4] in process 1"],
    "leaf": ["batch: mask: no value in process 0; float64[4] in process 1"],
    "learning rate": ["programs differ", "1.000000e-01", "2.000000e-01", "in process 0;"],
    "clip_norm": ["clip_norm: None in process 0; 1.0 in process 1"],
    "num_microbatches": ["num_microbatches: 1 in process 0; 2 in process 1"],
    "remat": ["programs differ"],
    "evaluation": ["batch: x: float32[4, 4] in process 0; float32[8, 4] in process 1"],
    "every": ["config['every']: 4 in process 0; 5 in process 1"],
    "watchdog": ["config['watchdog_s']: null in process 0; 5.0 in process 1"],
    "evaluate": ["config['evaluate']: false in process 0; true in process 1"],
    "num_steps": ["config['log_every']: 10 in process 0; 5 in process 1"],
    "fit checkpoints": ["config['keep']: 3 in process 0; 2 in process 1"],
    "directory": ["process 1 does not see the directory of process 0", "of_0 on ", "of_1 on "],
    "locked": ["another run is using"],
    "lost": ["was deleted or replaced while the run was using it"],
    "nothing": [],
}


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    """The errors of each process, by case."""
    lines = []
    write = sys.stdout.write
    sys.stdout.write = lines.append  # the launcher copies the output of its processes
    try:
        code = launch([sys.executable, DIFFERING, str(tmp_path_factory.mktemp("run"))], 2, devices=2, timeout_s=240)
    finally:
        sys.stdout.write = write
    assert code == 0
    found = [line for line in lines if line[3:].startswith(" {")]
    return {int(line[1]): json.loads(line[4:]) for line in found}


def test_a_difference_is_named_in_both_processes(errors):
    for case in EXPECTED:
        for index in range(2):
            error = errors[index][case]
            assert bool(error) == bool(EXPECTED[case]), error
            for text in EXPECTED[case]:
                assert text in error, error


@pytest.mark.parametrize(
    ("ours", "theirs", "number"),
    [
        (["a"], ["b"], 0),
        (["a"] * 5000, ["a"] * 4999 + ["b"], 4999),
        (["a"] * 5000, ["a"] * 1024, 1024),
        (["a", ""], ["a"], 1),
        (["a"] * 2**21 + ["c"], ["a"] * 2**21 + ["d", "e"], 2**21),
    ],
)
def test_the_first_line_that_differs_is_found(monkeypatch, ours, theirs, number):
    """Of texts of any lengths, with few messages of bounded size. Both sides run in turn, each with all messages."""
    messages, barrier, own = [], threading.Barrier(2), threading.local()

    def gather(text, call, senders):
        messages.append(text)
        own.sent.append(text)
        barrier.wait()
        both = {index: sent[index][len(own.sent) - 1] for index in range(2)}
        barrier.wait()
        return both

    def find(index, lines):
        own.sent = sent[index]
        found[index] = agreement._first_difference(lines, [0, 1], "")

    sent, found = [[], []], {}
    monkeypatch.setattr(agreement, "_all_gather_text", gather)
    threads = [threading.Thread(target=find, args=side) for side in enumerate([ours, theirs])]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    line = lambda lines: lines[number] if number < len(lines) else ""
    assert found[0] == found[1] == (number, [line(ours), line(theirs)])
    assert max(map(len, messages)) < 32 * agreement._BLOCKS and len(messages) <= 2 * 5


def test_one_process_has_nothing_to_compare(tmp_path):
    assert not jax.distributed.is_initialized()
    agreement.agree_on_lines(["a"], "programs", "", "")
    agreement.agree_on_directory(tmp_path / "absent")
    called = []
    agreement.run_in_process_0(lambda: called.append(1), "")
    assert called == [1]
