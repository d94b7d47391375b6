"""Training runs: the files of the directory, restarts, the display, and replacing the step, writers and display."""

import contextlib
import dataclasses
import errno
import io
import json
import logging
import os
import re
import signal
import struct
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
from rich.console import Console
from support.paths import TESTS, importing
from support.small_run import ROWS, STEPS, adam, batch, create, loss, run, setting

import zerojax
from zerojax.checkpoints import EXIT_CODE, store
from zerojax.training import display, recorder, writers


class Rows(list):
    """A writer that collects its rows."""

    closed = False

    def write(self, step, row):
        self.append((step, row))

    def close(self):
        self.closed = True


@pytest.fixture(scope="module")
def step():
    """The step of all runs in this module, compiled once."""
    return setting().train_step(loss)


def rows(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def losses(directory):
    return {row["step"]: row["loss"] for row in rows(directory) if "loss" in row}


@pytest.fixture(scope="module")
def uninterrupted(step, tmp_path_factory):
    """The directory of a run that is not interrupted."""
    directory = tmp_path_factory.mktemp("run") / "first"
    evaluate = lambda state: {"steps": state.step, "two": 2}
    run(step, directory, evaluate=evaluate, evaluate_every=4, config={"lr": 0.1, "name": "a"}, profile=(2, 3))
    return directory


def test_the_directory_describes_the_run(uninterrupted):
    assert store.steps(uninterrupted / "checkpoints") == [3, 6, STEPS]
    assert sorted(losses(uninterrupted)) == list(range(1, STEPS + 1))
    evaluated = [(row["step"], row["eval/steps"], row["eval/two"]) for row in rows(uninterrupted) if "eval/two" in row]
    assert evaluated == [(4, 4, 2), (STEPS, STEPS, 2)]
    assert [row["step"] for row in rows(uninterrupted)] == [1, 2, 3, 4, 4, 5, 6, 7, 7]
    assert json.loads((uninterrupted / "config.json").read_text()) == {"lr": 0.1, "name": "a"}
    (start,) = [json.loads(line) for line in (uninterrupted / "starts.jsonl").read_text().splitlines()]
    assert (start["from_step"], start["num_steps"], start["stage"]) == (0, STEPS, 3)
    assert (start["mesh"], start["devices"], start["processes"]) == ({"data": 8}, "8 x cpu", 1)
    assert start["versions"]["jax"] == jax.__version__ and start["dtypes"]["compute_dtype"] == "bfloat16"
    plan = (uninterrupted / "plan.txt").read_text()
    assert "optimizer state" in plan and "2 x 3.175k / 8" in plan and "layers/0/w" in plan
    assert not list(uninterrupted.glob("*.new"))
    assert list((uninterrupted / "profile").rglob("*.xplane.pb"))


def events(folder):
    """(step, name, value) of all scalars that TensorBoard shows: a restart hides earlier scalars of its steps."""
    from tensorboardX.proto.event_pb2 import Event

    shown = []
    for file in sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime_ns):
        data, at = file.read_bytes(), 0
        while at < len(data):
            (size,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + size])
            at += 12 + size + 4
            if event.session_log.status == event.session_log.START:
                shown = [each for each in shown if each[0] < event.step]
            shown += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    return shown


def test_scalars_are_written_for_tensorboard(uninterrupted):
    found = {(step, name): value for step, name, value in events(uninterrupted / "tensorboard")}
    for at, value in losses(uninterrupted).items():
        assert found[at, "loss"] == pytest.approx(value)
    assert found[STEPS, "eval/two"] == 2


def test_a_run_that_stopped_continues_bit_for_bit(step, uninterrupted, tmp_path, caplog):
    """Rows after the last checkpoint are removed, and so is a row that was not completely written."""

    def failing(i):
        if i == 5:
            raise OSError("the data is gone")
        return batch(i)

    with pytest.raises(OSError, match="the data is gone"):
        run(step, tmp_path, data=failing, config={"lr": 0.1})
    assert sorted(losses(tmp_path)) == [1, 2, 3, 4, 5] and store.steps(tmp_path / "checkpoints") == [3]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('\0\0\n{"step": 2, "lo')
    starts = tmp_path / "starts.jsonl"
    starts.write_text(starts.read_text().replace('"rows": 16, "microbatches": 1', '"rows": 32, "microbatches": 2'))
    run(step, tmp_path, config={"lr": 0.2})
    assert losses(tmp_path) == losses(uninterrupted)
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, STEPS + 1))
    assert "metrics.jsonl: removed 2 rows after step 3" in caplog.text
    assert "metrics.jsonl: removed 2 lines that are not rows" in caplog.text
    assert "config.json: lr was 0.1, is now 0.2" in caplog.text
    assert "rows was 32, is now 16" in caplog.text and "microbatches was 2, is now 1" in caplog.text
    starts = [json.loads(line) for line in starts.read_text().splitlines()]
    assert [(start["from_step"], start["config"]["lr"]) for start in starts] == [(0, 0.1), (3, 0.2)]
    shown = [(at, name) for at, name, _ in events(tmp_path / "tensorboard")]
    assert len(shown) == len(set(shown))
    assert [at for at, name in shown if name == "loss"] == list(range(1, STEPS + 1))


def test_a_run_that_stopped_between_saves_keeps_its_rhythm(step, tmp_path):
    """Stopped after step 4 and continued: saves, evaluations and rows are at multiples of 3, and at both ends."""
    options = {"evaluate": lambda state: {"two": 2}, "evaluate_every": 3, "log_every": 3}
    for num_steps in (4, STEPS):
        run(step, tmp_path, num_steps, checkpoints={"every": 3, "keep": None}, **options)
    assert store.steps(tmp_path / "checkpoints") == [3, 4, 6, STEPS]
    assert [row["step"] for row in rows(tmp_path) if "eval/two" in row] == [3, 4, 6, STEPS]
    assert [row["step"] for row in rows(tmp_path) if "loss" in row] == [1, 3, 4, 5, 6, STEPS]


def test_the_last_step_has_a_row_even_if_it_is_saved_anyway(step, tmp_path):
    run(step, tmp_path, 4, checkpoints={"every": 2}, log_every=3)
    assert [row["step"] for row in rows(tmp_path)] == [1, 3, 4]


def test_the_last_step_is_evaluated_once(step, tmp_path):
    """Also if an evaluation is due after it anyway."""
    evaluated = []
    run(step, tmp_path, 4, evaluate=lambda state: evaluated.append(int(state.step)) or {"two": 2}, evaluate_every=2)
    assert evaluated == [row["step"] for row in rows(tmp_path) if "eval/two" in row] == [2, 4]


def test_a_complete_run_does_nothing(step, uninterrupted, caplog):
    before = {file: file.stat().st_mtime_ns for file in uninterrupted.iterdir() if file.is_file()}
    state = run(step, uninterrupted, data=lambda i: 1 / 0)
    assert int(state.step) == STEPS and f"is already at step {STEPS} of {STEPS}" in caplog.text
    assert before == {file: file.stat().st_mtime_ns for file in uninterrupted.iterdir() if file.is_file()}


class Batches:
    """An iterator with a state that can be saved."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.at += 1
        return batch(self.at - 1)

    def get_state(self):
        return {"at": self.at}

    def set_state(self, state):
        self.at = state["at"]


@pytest.mark.parametrize("kind", ["with a state", "without", "list"])
def test_batches_from_an_iterable(step, uninterrupted, tmp_path, kind):
    """No batch is used twice or skipped, whatever the kind of iterable."""
    make = {
        "with a state": Batches,
        "without": lambda: map(batch, range(99)),
        "list": lambda: list(map(batch, range(9))),
    }
    run(step, tmp_path, 4, data=make[kind]())
    run(step, tmp_path, data=make[kind]())
    assert losses(tmp_path) == losses(uninterrupted)


def test_the_run_ends_when_the_data_ends(step, tmp_path, caplog):
    state = run(step, tmp_path, data=map(batch, range(5)), evaluate=lambda state: {"two": 2}, log_every=100)
    assert int(state.step) == 5 and store.steps(tmp_path / "checkpoints")[-1] == 5
    assert [row["step"] for row in rows(tmp_path)] == [1, 5, 5]
    assert f"the data ended after step 5 of {STEPS}" in caplog.text


def test_step_writers_and_display_can_be_replaced(tmp_path, uninterrupted):
    """A step that is not from zerojax and has other metrics, with other writers and another display."""
    zero, kept, shown = setting(), Rows(), Rows()
    inner = zero.train_step(loss)

    def step(state, batch):
        state, metrics = inner(state, batch)
        return state, {"twice": 2 * metrics["loss"]}

    run(step, tmp_path, writers=[kept], display=shown, log_every=3)
    expected = losses(uninterrupted)
    assert [at for at, _ in kept] == [1, 3, 6, 7] and [at for at, _ in shown] == list(range(1, 8))
    assert all(row["twice"] == pytest.approx(2 * expected[at]) for at, row in shown)
    assert kept.closed and shown.closed
    assert not (tmp_path / "metrics.jsonl").exists() and not (tmp_path / "plan.txt").exists()


class DelayedMetric:
    """A metric that records when it is read."""

    def __init__(self, read, step):
        self.read, self.step = read, step

    def __float__(self):
        self.read.append(self.step)
        return float(self.step)


def test_no_step_waits_for_its_metrics():
    read, kept = [], Rows()
    with recorder.MetricsRecorder([kept], None, log_every=2) as recording:
        for step in range(1, 7):
            recording.add(step, {"loss": DelayedMetric(read, step)}, ROWS)
            assert read == list(range(1, step - 1))
    assert read == [1, 2, 3, 4, 5, 6] and [at for at, _ in kept] == [1, 2, 4, 6]


def test_metrics_of_a_run_that_fails_are_written():
    """An error in these metrics does not hide the error of the run, and neither does one of a writer at its end."""

    class Full(Rows):
        def close(self):
            raise OSError("No space left on device")

    kept = Rows()
    made = [Full(), kept, Full()]
    with pytest.raises(KeyError, match="first"), recorder.MetricsRecorder(made, None, log_every=1) as recording:
        recording.add(1, {"loss": np.float32(1)}, ROWS)
        recording.add(2, {"loss": "not a number"}, ROWS)
        raise KeyError("first")
    assert [at for at, _ in kept] == [1] and kept.closed


def test_a_metric_that_is_not_a_number_is_named():
    for value, got in [(np.ones((4, 2)), r"shape \(4, 2\)"), ("warm", "'warm'"), ({"a": 1}, "{'a': 1}")]:
        message = f"fit: metric 'logits' is not a number\n  got:      {got}\n  fix: "
        with (
            pytest.raises(ValueError, match=message),
            recorder.MetricsRecorder([Rows()], None, log_every=1) as recording,
        ):
            recording.add(1, {"logits": value}, ROWS)


def test_invalid_return_values_are_errors(step, tmp_path):
    for options, message in [
        ({"data": lambda i: None}, r"fit: data\(0\) returned None\n  fix: "),
        ({"evaluate": lambda state: 1.0, "evaluate_every": 1}, "fit: evaluate returned a value of type float\n  fix: "),
    ]:
        with pytest.raises(ValueError, match=message):
            run(step, tmp_path, **options)


def test_a_metric_called_step_does_not_replace_the_step(tmp_path):
    with contextlib.closing(writers.JsonlWriter(tmp_path / "metrics.jsonl", 0)) as file:
        file.write(1, {"step": 7.0, "loss": 1.0})
    assert [row["step"] for row in rows(tmp_path)] == [1]


def test_a_batch_may_contain_numbers(tmp_path):
    zero = setting()
    scaled = lambda params, batch, key: batch["scale"] * loss(params, batch, key)
    of = lambda i: batch(i) | {"scale": 0.5}
    zerojax.fit(zero, zero.init(create, adam()), zero.train_step(scaled), of, 1, tmp_path, log_every=1)
    assert losses(tmp_path).keys() == {1}


def test_no_step_is_lost_if_an_evaluation_fails(step, tmp_path):
    """The next start makes the evaluation that is missing, without a step, and the one after that nothing."""
    with pytest.raises(ZeroDivisionError):
        run(step, tmp_path, 5, evaluate=lambda state: 1 / 0)
    assert store.steps(tmp_path / "checkpoints") == [3, 5]
    for _ in range(2):
        run(step, tmp_path, 5, data=lambda i: 1 / 0, evaluate=lambda state: {"at": state.step})
    assert [row["eval/at"] for row in rows(tmp_path) if "eval/at" in row] == [5]
    assert sorted(losses(tmp_path)) == [1, 2, 3, 4, 5]


def test_sigterm_during_the_last_evaluation_ends_the_run_as_at_any_time(step, tmp_path):
    def evaluate(state):
        os.kill(os.getpid(), signal.SIGTERM)
        return {"at": state.step}

    with pytest.raises(SystemExit) as ended:
        run(step, tmp_path, 4, evaluate=evaluate)
    assert ended.value.code == EXIT_CODE and store.steps(tmp_path / "checkpoints") == [3, 4]
    assert [row["eval/at"] for row in rows(tmp_path) if "eval/at" in row] == [4]
    assert int(run(step, tmp_path, 4, evaluate=lambda state: 1 / 0).step) == 4


@pytest.mark.parametrize(("kind", "mode"), [(writers.JsonlWriter, "a"), (writers.TensorBoardWriter, "ab")])
def test_a_full_disk_for_metrics_is_an_error_with_the_file(tmp_path, kind, mode):
    """At the first row, and at each of more rows than tensorboardX has in its queue."""
    writer = kind(tmp_path / "metrics", 0)
    with open("/dev/full", mode) as writer._file:
        for step in range(30):
            with pytest.raises(OSError, match=r"metrics cannot be written\n.*No space left.*/metrics.*\n  fix: "):
                writer.write(step, {"loss": 1.0})
        writer.close()


def test_a_full_disk_for_wandb_is_an_error(step, tmp_path):
    """The state that was saved before is there."""

    class Run:
        def log(self, row, step):
            if step == 5:
                raise OSError(errno.ENOSPC, "No space left on device")

        def finish(self):
            raise OSError(errno.ENOSPC, "No space left on device")

    writer = object.__new__(writers.WandbWriter)
    writer._run, writer._owns_run = Run(), True
    with pytest.raises(OSError, match="No space left"):
        run(step, tmp_path, writers=[writer])
    assert store.steps(tmp_path / "checkpoints") == [3]


def test_an_exception_in_a_running_step_leaves_the_last_checkpoint(tmp_path):
    """The arrays of that step are lost, since the state was donated to it; the run continues from the disk.

    On one device: on several, those that wait for the one that failed abort the process.
    """
    fails = {}

    def check(at):
        if fails.pop(int(at), False):
            raise ValueError("the device is gone")
        return at

    def checked(params, batch, key):
        at = jax.pure_callback(check, jax.ShapeDtypeStruct((), np.float32), batch["at"][0])
        return loss(params, {name: batch[name] for name in "xy"}, key) + 0 * at

    zero = setting(num_devices=1)
    step = zero.train_step(checked)
    data = lambda i: batch(i) | {"at": np.full((len(batch(i)["x"]),), i, np.float32)}
    options = {"log_every": 1, "checkpoints": {"every": 3}}
    train = lambda directory: zerojax.fit(zero, zero.init(create, adam()), step, data, STEPS, directory, **options)
    train(tmp_path / "whole")
    fails[4] = True
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="the device is gone"):  # by version of JAX
        train(tmp_path / "run")
    assert not fails and store.steps(tmp_path / "run" / "checkpoints") == [3]
    train(tmp_path / "run")
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_a_directory_of_checkpoints_is_an_error(step, tmp_path):
    zero = setting()
    with zero.checkpoints(tmp_path) as checkpoints:
        checkpoints.save(zero.init(create, adam()))
    with pytest.raises(ValueError, match=r"is a directory of checkpoints\n  got: .*\n  fix: .*/checkpoints"):
        run(step, tmp_path)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "step_0").rename(tmp_path / "checkpoints" / "step_0")
    run(step, tmp_path, 1, data=Batches())  # step 0 was saved without the state of an iterator
    assert losses(tmp_path).keys() == {1}


KILLED = """
import os, signal
import zerojax; zerojax.simulate_devices(8)
from support.small_run import batch, run, setting, loss

def killing(i):
    if i == 6:
        while not os.path.exists({mark!r}): pass
        os.kill(os.getpid(), signal.SIGKILL)
    return batch(i)

run(setting().train_step(loss), __import__("pathlib").Path({directory!r}), data=killing)
"""


def test_a_killed_run_has_all_rows_up_to_its_checkpoint(step, uninterrupted, tmp_path):
    mark = tmp_path / "checkpoints" / "step_6" / "commit_success.txt"
    text = KILLED.format(mark=str(mark), directory=str(tmp_path))
    ended = subprocess.run([sys.executable, "-c", text], env=importing(TESTS), timeout=120)
    assert ended.returncode == -signal.SIGKILL
    run(step, tmp_path)
    assert losses(tmp_path) == losses(uninterrupted)
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, STEPS + 1))


INTERRUPTED = """
import os, signal
import zerojax; zerojax.simulate_devices(8)
from support.small_run import batch, run, setting, loss

class Collected:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)

def data(i):
    if i == 1:
        Collected()
    return batch(i)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell makes its background processes ignore it
run(setting().train_step(loss), None, 10**9, data, checkpoints=None)
"""


def test_ctrl_c_while_garbage_is_collected_ends_the_run():
    """Python ignores exceptions there, among them KeyboardInterrupt; other ones are still shown."""
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED], env=importing(TESTS), timeout=90, capture_output=True)
    assert ended.returncode == -signal.SIGINT and b"ignored" not in ended.stderr
    text = "import zerojax\nclass Collected:\n    def __del__(self): 1 / 0\nCollected()"
    ended = subprocess.run([sys.executable, "-c", text], timeout=90, capture_output=True)
    assert ended.returncode == 0 and b"ZeroDivisionError" in ended.stderr


@pytest.mark.parametrize("content", ["", "[1]", "{"])
def test_a_config_that_cannot_be_read_is_reported(step, tmp_path, caplog, content):
    (tmp_path / "config.json").write_text(content)
    (tmp_path / "starts.jsonl").write_text('{"from_step": 0}\n{"torn')
    run(step, tmp_path, 1, config={"lr": 0.1})
    assert "config.json cannot be read and is written again" in caplog.text
    assert json.loads((tmp_path / "config.json").read_text()) == {"lr": 0.1}
    assert len([json.loads(line) for line in (tmp_path / "starts.jsonl").read_text().splitlines()]) == 2


def test_rates_count_steps_only(monkeypatch):
    """Not the time of an evaluation or a save, nor that when metrics are read all at once. Each step takes a second."""
    kept, now = Rows(), [0.0]
    monkeypatch.setattr(recorder.time, "perf_counter", lambda: now[0])
    with recorder.MetricsRecorder([kept], None, log_every=1) as recording:
        for step in range(1, 13):
            now[0] += 1
            recording.add(step, {"loss": 1.0}, ROWS)
            if step == 5:
                with recording.paused():
                    now[0] += 100
                    recording.add_evaluation(5, {"loss": 1.0})
            if step % 4 == 0:
                with recording.paused():
                    now[0] += 50
        now[0] += 100
    rates = {at: row["seconds_per_step"] for at, row in kept if "seconds_per_step" in row}
    assert set(rates.values()) == {1.0} and min(rates) < 5 and max(rates) == 12


@pytest.mark.parametrize("loss", [float("nan"), float("-inf"), float("inf"), -2.5, 0.0, -0.0])
def test_every_loss_is_written_and_shown_as_it_is(tmp_path, loss):
    """In JSON, what is not finite is text that `float` accepts."""
    sent = []
    wandb = object.__new__(writers.WandbWriter)
    wandb._run, wandb._owns_run = types.SimpleNamespace(log=lambda row, step: sent.append(row["loss"])), False
    made = [writers.JsonlWriter(tmp_path / "metrics.jsonl", 0), writers.TensorBoardWriter(tmp_path / "tb", 0), wandb]
    shown = io.StringIO()
    console = lambda terminal: Console(file=shown, width=80, force_terminal=terminal, color_system=None, height=25)
    displays = [display.ProgressLines(9, console(False)), display.ProgressBar(9, 0, console(True))]
    with recorder.MetricsRecorder([*made, displays[0]], displays[1], log_every=1) as recording:
        recording.add(1, {"loss": np.float32(loss)}, ROWS)
    written = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    (in_events,) = [value for _, name, value in events(tmp_path / "tb") if name == "loss"]
    np.testing.assert_array_equal([float(written["loss"]), in_events, *sent], 3 * [loss])
    assert shown.getvalue().count(f"loss {loss:.4g}") >= 2


def test_wandb_continues_its_run(tmp_path, monkeypatch):
    """Offline: nothing is sent. wandb is used only if it is enabled."""
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    assert not any(isinstance(each, writers.WandbWriter) for each in closing(writers.default_writers(tmp_path, 0, {})))
    monkeypatch.setenv("WANDB_PROJECT", "test")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for start in (0, 1):
        made = writers.default_writers(tmp_path, start, {"lr": 0.1})
        made[-1].write(start + 1, {"loss": 1.0})
        closing(made)
    runs, name = list((tmp_path / "wandb").glob("offline-run-*")), (tmp_path / "wandb_id").read_text()
    assert runs and all(f"-{name}" in run.name for run in runs)


def closing(made):
    for each in made:
        each.close()
    return made


def shown_by(make, terminal, width=100):
    """The output for some rows."""
    file = io.StringIO()
    made = make(Console(file=file, width=width, force_terminal=terminal, color_system=None, height=25))
    made.write(1, {"loss": 3.14159, "grad_norm": 2.0, "skipped": 0.0, "param_norm": 9.0})
    made.write(2, {"loss": 3.0, "skipped": 1.0, "rows_per_s": 12345.6, "seconds_per_step": 100.0})
    made.write(2, {"eval/loss": 2.5, "eval/[all]": 1})
    row = {"loss": 2.0, "grad_norm": 0.25, "top1": 0.5, "learning_rate": 1e-3, "perplexity": 7.389, "[tag]": 1.0}
    made.write(3, row | {"rows_per_s": 1e3, "tokens_per_s": 1e6, "mfu": 0.4321, "seconds_per_step": 100.0})
    made.close()
    return file.getvalue()


def test_lines_in_a_log():
    assert shown_by(lambda console: display.ProgressLines(20, console), terminal=False).splitlines() == [
        "step  1/20  loss 3.142  grad norm 2",
        "step  2/20  loss 3  skipped 1  12,346 rows/s  0:30:00 left",
        "step  2/20  eval/loss 2.5  eval/[all] 1",
        "step  3/20  loss 2  grad norm 0.25  top1 0.5  learning rate 0.001  perplexity 7.389  [tag] 1  1,000 rows/s  "
        "1,000,000 tokens/s  MFU 43.2%  0:28:20 left",
    ]


@pytest.mark.parametrize("width", [30, 80, 100, 120])
def test_a_bar_on_a_terminal(width):
    """Metrics of the loss are shown too, and nothing is cut or broken, however narrow the terminal."""
    shown = shown_by(lambda console: display.ProgressBar(20, 0, console), terminal=True, width=width)
    assert "step  2/20  eval/loss 2.5  eval/[all] 1\n" in shown
    last = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown).rpartition(" 3/20")[2]
    lines = [line.strip() for line in last.replace("\r", "\n").split("\n")]
    rates, metrics = "1,000 rows/s|1,000,000 tokens/s|MFU 43.2%|0:28:20 left", "loss 2|grad norm 0.25|top1 0.5"
    for text in f"{rates}|{metrics}|learning rate 0.001|perplexity 7.389|[tag] 1".split("|"):
        assert any(text in line for line in lines), text
    assert max(map(len, lines)) < width and "…" not in shown


def test_log_messages_are_printed_above_the_bar(monkeypatch):
    """Otherwise the bar erases them: the last is that the state was saved after Ctrl-C."""
    stderr, file = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    handler = logging.StreamHandler()
    logging.getLogger().addHandler(handler)
    try:
        bar = display.ProgressBar(
            20, 0, Console(file=file, width=80, force_terminal=True, color_system=None, height=25)
        )
        logging.getLogger("zerojax").warning("step 3 is saved")
        bar.close()
        logging.getLogger("zerojax").warning("afterwards")
    finally:
        logging.getLogger().removeHandler(handler)
    assert "step 3 is saved\n" in file.getvalue() and stderr.getvalue() == "afterwards\n"


@dataclasses.dataclass
class Config:
    lr: float = 0.1


def test_a_config_is_a_mapping_or_a_dataclass(step, tmp_path):
    run(step, tmp_path, 1, config=Config(0.3))
    assert json.loads((tmp_path / "config.json").read_text()) == {"lr": 0.3}


def test_invalid_arguments_are_errors_before_anything_is_written(step, tmp_path):
    for options, message in [
        ({"num_steps": 0}, "fit: num_steps is 0\n  fix: "),
        ({"num_steps": None}, "fit: num_steps is None\n  fix: "),
        ({"log_every": 1.5}, "fit: log_every is 1.5\n  fix: "),
        ({"log_every": None}, "fit: log_every is None\n  fix: "),
        ({"evaluate_every": True}, "fit: evaluate_every is True\n  fix: "),
        ({"profile": (3, 2)}, r"fit: profile is \(3, 2\)\n  fix: .*counted from 1"),
        ({"profile": (2,)}, r"fit: profile is \(2,\)\n  fix: "),
        ({"profile": (1.5, 2)}, r"fit: profile is \(1.5, 2\)\n  fix: "),
        ({"config": 3}, "fit: config is of type int\n  fix: "),
        ({"config": {1: "a", "b": 2}}, "fit: config has a name that is not a string\n  got:      1\n  fix: "),
        ({"config": {"lr": object()}}, r"config\['lr'\] is not JSON\n  got: "),
        ({"data": 3}, "fit: data is of type int\n  fix: "),
        ({"evaluate": setting().eval_step(loss)}, "evaluate is of type EvalStep\n  fix: .*evaluate="),
        ({"evaluate": {"loss": 1.0}}, "fit: evaluate is of type dict\n  fix: "),
        ({"checkpoints": "runs/1"}, "no such options\n  got:      'runs/1'\n  fix:      a dict of every"),
        ({"checkpoints": {"every_steps": 3}}, "got:      {'every_steps': 3}\n  fix:      a dict of every, keep, "),
        ({"checkpoints": {"every": 0}}, "checkpoints: every is invalid"),
    ]:
        with pytest.raises(ValueError, match=message):
            run(step, tmp_path / "run", **options)
        assert not (tmp_path / "run").exists()


def test_a_profile_of_earlier_steps_is_reported(step, tmp_path, caplog):
    run(step, tmp_path, 3)
    run(step, tmp_path, 4, profile=(2, 3))
    assert "steps 2 to 3 are not profiled, since the run continues from step 3" in caplog.text
    assert not (tmp_path / "profile").exists()


def test_a_profile_ends_with_the_run(step, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    run(step, tmp_path, 2, profile=(2, 9))
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
