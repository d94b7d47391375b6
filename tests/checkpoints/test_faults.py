"""Training runs in processes that are killed, preempted, hang, or run out of disk space lose nothing that was saved."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.disk import MountedDisk, RecordedDisk
from support.paths import SUPPORT, TESTS, importing
from support.ports import free_port
from support.small_run import setting, train

from zerojax.checkpoints import EXIT_CODE, INTERRUPT_EXIT_CODE, replicas, store
from zerojax.checkpoints.pieces import verify_arrays
from zerojax.processes.launch import environment

pytestmark = pytest.mark.once

STEPS = 8


def start(directory, *options, num_steps=STEPS, environ=os.environ):
    """Starts a run, which lives for at most five minutes."""
    command = [sys.executable, str(SUPPORT / "trainee.py"), str(directory), str(num_steps), *map(str, options)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, env=importing(TESTS, environ=environ), text=True, **pipes)
    limit = threading.Timer(300, process.kill)
    limit.daemon = True
    limit.start()
    return process


def start_two(directory, *options):
    """Starts two processes, each with half of the devices."""
    coordinator = f"127.0.0.1:{free_port()}"
    options = (*options, "--devices", 2)
    return [start(directory, *options, environ=environment(coordinator, 2, index, 2)) for index in range(2)]


def losses_of(output):
    """{step: the loss, as a hexadecimal float} from the output of a run."""
    lines = [line.split() for line in output.splitlines() if line.startswith("loss ") and len(line.split()) == 3]
    return {int(step): value for _, step, value in lines}


def run(directory, *options, code=0, num_steps=STEPS):
    """Runs until the end, with this exit code. Returns (losses, stderr)."""
    process = start(directory, *options, num_steps=num_steps)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == code, f"exit code {process.returncode}\n{errors[-3000:]}"
    return losses_of(output), errors


def until(process, word):
    """Reads lines until one starts with `word`, and returns all of them."""
    lines = []
    while not lines or not lines[-1].startswith(word):
        lines.append(process.stdout.readline())
        assert lines[-1], process.stderr.read()[-3000:]
    return "".join(lines)


def intact_steps(directory):
    """Returns the complete steps, after checking that every array of them is intact."""
    directory = Path(directory)
    steps = store.steps(directory)
    for step in steps:
        manifest = store.read_manifest(directory, step)
        assert not any(problem for _, problem in verify_arrays(directory, step, manifest))
    return steps


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The losses of a run without faults."""
    losses, _ = run(tmp_path_factory.mktemp("run"))
    assert sorted(losses) == list(range(1, STEPS + 1))
    return losses


def run_with_kills(directory, rng, *options):
    """Kills a run at random times after its first step until it completes. Returns (losses, number of kills)."""
    losses, kills = {}, 0
    while not losses or max(losses) < STEPS:
        process = start(directory, "--slow", 0.05, *options)  # so that the kill comes before the end
        seen = until(process, ("loss", "end"))
        time.sleep(rng.uniform(0, 0.6))
        process.send_signal(signal.SIGKILL)
        output, errors = process.communicate(timeout=60)
        assert process.returncode in (0, -signal.SIGKILL), errors[-3000:]
        kills += process.returncode != 0
        losses |= losses_of(seen + output)
        assert intact_steps(directory) or max(losses) <= 1
    assert kills
    return losses, kills


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[pytest.mark.full] * (seed > 0)) for seed in range(12)])
def test_a_run_that_is_killed_while_it_saves_continues_bit_for_bit(tmp_path, undisturbed, seed):
    """It saves after every step, so that a save is nearly always in progress."""
    losses, kills = run_with_kills(tmp_path, random.Random(seed))
    print(f"seed {seed}: {kills} kills")
    assert {step: losses[step] for step in losses} == {step: undisturbed[step] for step in losses}


@pytest.mark.full
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[pytest.mark.full] * (seed > 0)) for seed in range(12)])
def test_a_run_that_is_killed_while_it_deletes_keeps_an_intact_step(tmp_path, undisturbed, seed):
    """It keeps only one step, so that another is deleted after every save."""
    losses, kills = run_with_kills(tmp_path, random.Random(1000 + seed), "--keep", 1)
    print(f"seed {1000 + seed}: {kills} kills")
    assert {step: losses[step] for step in losses} == {step: undisturbed[step] for step in losses}


@pytest.fixture(params=[MountedDisk, RecordedDisk])
def disk(tmp_path, request):
    try:
        disk = request.param(tmp_path)
    except (OSError, subprocess.CalledProcessError) as error:  # only of a MountedDisk: the other one works everywhere
        pytest.skip(f"this machine mounts no image of a disk, which needs the rights of root: {error}")
    yield disk
    disk.close()


@pytest.mark.parametrize("keep", [1, 3])
@pytest.mark.parametrize("cuts", [1, pytest.param(10, marks=pytest.mark.full)])
def test_a_step_that_was_called_complete_survives_a_loss_of_power(disk, cuts, keep):
    """After each cut, the newest step that was called complete, or a later one, is intact, and the run continues."""
    rng, directory, complete = random.Random(keep), disk.path / "run", [0]
    for _ in range(cuts):
        process = start(directory, "--keep", keep, "--slow", 0.02, "--announce", *disk.options, num_steps=10**6)
        seen = "".join(until(process, "complete") for _ in range(rng.randint(1, 5)))
        time.sleep(rng.uniform(0, 0.5))
        disk.cut_power(process)
        seen += process.communicate(timeout=60)[0]
        disk.restart()
        complete += [int(line.split()[1]) for line in seen.splitlines() if line.startswith("complete ")]
        steps = intact_steps(directory)  # all that are there are intact
        assert steps and steps[-1] >= complete[-1]
    print(f"seed {keep}: {cuts} cuts, {len(complete) - 1} saves")
    losses, _ = run(directory, "--keep", keep, num_steps=steps[-1] + 2)
    assert store.steps(directory)[-1] == max(losses) == steps[-1] + 2


def test_a_partly_deleted_step_is_ignored(tmp_path, undisturbed):
    process = start(tmp_path, "--keep", 2, "--die-deleting")
    output, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, errors[-3000:]
    steps = intact_steps(tmp_path)
    assert len(steps) >= 2 and 1 not in steps
    losses = losses_of(output) | run(tmp_path, "--keep", 2)[0]
    assert {step: losses[step] for step in losses} == {step: undisturbed[step] for step in losses}
    assert intact_steps(tmp_path) == [STEPS - 1, STEPS]
    assert not list(tmp_path.glob(".unfinished-*"))


@pytest.mark.full
def test_a_script_that_does_not_close_its_checkpoints_completes_its_save_or_fails(tmp_path):
    """Orbax starts threads, which Python 3.12 and later forbids after the end of the script: the exit code is 1."""
    too_late = sys.version_info >= (3, 12)
    _, errors = run(tmp_path, "--every", STEPS, "--no-close", code=1 if too_late else 0)
    assert ("checkpoint: a save failed after the end of the script" in errors) == too_late
    assert intact_steps(tmp_path) == ([] if too_late else [STEPS])


def test_sigterm_saves_and_the_exit_code_is_75(tmp_path, undisturbed):
    process = start(tmp_path, "--every", 1000, "--slow", 0.2)
    seen = until(process, "loss 3")
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == EXIT_CODE == 75
    (step,) = intact_steps(tmp_path)
    assert f"SIGTERM: step {step} is saved, exiting with code 75" in errors
    losses = losses_of(seen + output) | run(tmp_path)[0]
    losses.setdefault(step, undisturbed[step])  # the run ended before it printed this loss
    assert losses == undisturbed


@pytest.mark.full
def test_ctrl_c_saves_and_the_exit_code_is_130(tmp_path, undisturbed):
    process = start(tmp_path, "--every", 1000, "--slow", 0.2)
    seen = until(process, "loss 3")
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == INTERRUPT_EXIT_CODE == 130
    (step,) = intact_steps(tmp_path)
    assert "Ctrl-C: the run ends after this step" in errors and "press it again to end at once" in errors
    assert f"Ctrl-C: step {step} is saved, exiting with code 130" in errors and "Traceback" not in errors
    losses = losses_of(seen + output) | run(tmp_path)[0]
    losses.setdefault(step, undisturbed[step])  # the run ended before it printed this loss
    assert losses == undisturbed


@pytest.mark.full
@pytest.mark.parametrize("pause", [0, 0.05])
def test_a_ctrl_c_that_arrives_twice_counts_once(tmp_path, pause):
    """As from a terminal and from a launcher that forwards it."""
    process = start(tmp_path, "--every", 1000, "--slow", 1)
    until(process, "loss 3")
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(pause)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == INTERRUPT_EXIT_CODE and "Ctrl-C: step 4 is saved" in errors
    assert intact_steps(tmp_path) == [4]


@pytest.mark.full
def test_a_second_ctrl_c_ends_at_once_and_leaves_whole_steps(tmp_path, undisturbed):
    """During a step that takes a minute, and maybe a save. Nothing of it is saved."""
    process = start(tmp_path, "--slow", 60, "--slow-from", 3)
    seen = until(process, "loss 3")
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    output, errors = process.communicate(timeout=10)
    assert process.returncode == INTERRUPT_EXIT_CODE and "exiting with code" not in errors
    assert intact_steps(tmp_path)[-1:] >= [2]
    losses = losses_of(seen + output) | run(tmp_path)[0]
    assert {step: losses[step] for step in losses} == {step: undisturbed[step] for step in losses}


@pytest.mark.full
def test_a_second_ctrl_c_ends_a_run_whose_main_thread_runs_no_python(tmp_path):
    """As during a compilation, or in a collective that waits for a process that is gone."""
    process = start(tmp_path, "--block-at", 2)
    until(process, "loss 2")
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode == INTERRUPT_EXIT_CODE


def test_a_run_that_hangs_prints_its_stacks_and_ends(tmp_path):
    _, errors = run(tmp_path, "--hang-at", 3, "--watchdog", 2, code=1)
    assert "watchdog: no step for 2 s; the process ends" in errors and "trainee.py" in errors
    assert 3 in intact_steps(tmp_path)


@pytest.mark.full
def test_a_run_that_is_suspended_for_longer_than_its_watchdog_continues(tmp_path, undisturbed):
    process = start(tmp_path, "--slow", 0.3, "--watchdog", 2)
    seen = until(process, "loss 3")
    process.send_signal(signal.SIGSTOP)
    time.sleep(4)
    process.send_signal(signal.SIGCONT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors[-3000:]
    assert losses_of(seen + output) == undisturbed


def test_a_full_disk_is_reported_and_the_next_save_succeeds(tmp_path, undisturbed):
    losses, errors = run(tmp_path, "--full-at", 3, "--keep", 100)
    assert f"the save of step 3 in {tmp_path} failed: " in errors
    assert intact_steps(tmp_path) == [1, 2, 4, 5, 6, 7, 8] and losses == undisturbed


@pytest.mark.full
def test_a_killed_run_continues_on_other_devices(tmp_path, undisturbed):
    """On half of the devices and at another stage, up to the order of sums in bf16."""
    process = start(tmp_path)
    seen = until(process, "loss 4")
    process.kill()
    output, _ = process.communicate(timeout=60)
    before = losses_of(seen + output)
    after, _ = run(tmp_path, "--stage", 1, "--devices", 2)
    for step, loss in (before | after).items():
        assert float.fromhex(loss) == pytest.approx(float.fromhex(undisturbed[step]), rel=0.02)


@pytest.mark.full
def test_a_run_in_another_process_computes_the_losses_of_this_process(tmp_path, undisturbed):
    """The program of these tests, trainee.py, computes the same steps as `train`."""
    losses, _ = train(setting(num_devices=4), tmp_path, STEPS)
    assert [loss.hex() for loss in losses] == [undisturbed[step] for step in range(1, STEPS + 1)]


def results(running):
    """Waits for the processes. Returns (exit code, losses, stderr) of each."""
    found = [process.communicate(timeout=120) for process in running]
    return [(p.returncode, losses_of(out), errors) for p, (out, errors) in zip(running, found, strict=True)]


def assert_close(losses, undisturbed):
    """To those of one process with as many devices, up to the order of sums in bf16."""
    assert losses
    for step, loss in losses.items():
        assert float.fromhex(loss) == pytest.approx(float.fromhex(undisturbed[step]), rel=0.02)


@pytest.mark.full
def test_two_processes_write_one_checkpoint_that_one_process_reads(tmp_path, undisturbed):
    (code, first, errors), (other, second, _) = results(start_two(tmp_path))
    assert code == other == 0, errors[-3000:]
    assert first == second and sorted(first) == list(range(1, STEPS + 1))
    assert_close(first, undisturbed)
    assert intact_steps(tmp_path) == [6, 7, 8]
    assert run(tmp_path, num_steps=STEPS + 1)[0].keys() == {STEPS + 1}


@pytest.mark.full
def test_two_processes_continue_from_the_copy_in_remote_storage(tmp_path, undisturbed):
    url = f"file://{tmp_path}/copy"
    (code, first, errors), (other, *_) = results(start_two(tmp_path / "first", "--copy-to", url))
    assert code == other == 0, errors[-3000:]
    losses, errors = run(tmp_path / "second", "--copy-to", url, num_steps=STEPS + 1)
    assert losses.keys() == {STEPS + 1} and f"step {STEPS} is fetched from {url}" in errors
    (code, losses, errors), (other, *_) = results(start_two(tmp_path / "third", "--copy-to", url))
    assert code == other == 0 and not losses, errors[-3000:]  # process 1 sees the step that process 0 has fetched
    assert_close(first, undisturbed)


@pytest.mark.full
def test_each_of_two_processes_restores_its_own_data_iterator(tmp_path):
    """A single process cannot restore both, and raises an error."""
    stopped = start_two(tmp_path, "--data", "--slow", 0.1)
    [until(process, "loss 3") for process in stopped]
    [process.kill() for process in stopped]
    [process.communicate() for process in stopped]
    found = results(start_two(tmp_path, "--data"))
    assert [code for code, *_ in found] == [0, 0], found[0][2][-3000:]
    _, errors = run(tmp_path, "--data", code=1, num_steps=STEPS + 1)
    assert "different states of 2 processes, now there are 1" in errors


@pytest.mark.full
def test_two_processes_set_aside_a_step_that_already_exists(tmp_path, undisturbed):
    run(tmp_path, "--keep", 100, num_steps=4)
    for step in 3, 4:
        (tmp_path / f"step_{step}" / "commit_success.txt").unlink()
    (code, losses, errors), (other, *_) = results(start_two(tmp_path, "--keep", 100))
    assert code == other == 0, errors[-3000:]
    assert min(losses) == 3 and intact_steps(tmp_path) == list(range(1, STEPS + 1))
    assert_close(losses, undisturbed)
    assert len(list(tmp_path.glob("aside_step_*"))) == 2


@pytest.mark.parametrize("what", ["arrays", pytest.param("manifest", marks=pytest.mark.full)])
def test_a_read_error_in_one_of_two_processes_is_raised_in_both(tmp_path, undisturbed, what):
    """Neither waits for the other. With `fallback`, both go back to the same step."""
    run(tmp_path, num_steps=4)
    found = results(start_two(tmp_path, "--unreadable", what))
    assert [code for code, *_ in found] == [1, 1]
    assert "step_4 cannot be read\n  got:      an error in process 1" in found[0][2]
    assert "the connection is lost" in found[1][2]
    (code, losses, errors), (other, *_) = results(start_two(tmp_path, "--unreadable", what, "--fallback"))
    assert code == other == 0, errors[-3000:]
    assert min(losses) == 4
    assert_close(losses, undisturbed)


@pytest.mark.full
def test_two_processes_that_list_different_steps_resume_from_the_same(tmp_path, undisturbed):
    """Process 1 does not see yet that the last step is complete."""
    run(tmp_path, num_steps=4)
    (code, losses, errors), (other, *_) = results(start_two(tmp_path, "--unreadable", "mark"))
    assert code == other == 0, errors[-3000:]
    assert min(losses) == 5
    assert_close(losses, undisturbed)


@pytest.mark.parametrize(
    ("signals", "name", "expected"),
    [
        ({1: signal.SIGTERM}, "SIGTERM", EXIT_CODE),
        ({0: signal.SIGTERM, 1: signal.SIGINT}, "Ctrl-C", INTERRUPT_EXIT_CODE),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in [
                ({0: signal.SIGTERM}, "SIGTERM", EXIT_CODE),
                ({0: signal.SIGINT, 1: signal.SIGINT}, "Ctrl-C", INTERRUPT_EXIT_CODE),
                ({1: signal.SIGINT}, "Ctrl-C", INTERRUPT_EXIT_CODE),
            ]
        ),
    ],
)
def test_a_signal_to_one_of_two_processes_saves_the_same_step_in_both(tmp_path, signals, name, expected, undisturbed):
    """Or to both. If they receive different ones, a person has pressed Ctrl-C."""
    running = start_two(tmp_path, "--every", 1000, "--slow", 0.2)
    seen = [until(process, "loss 3") for process in running]
    for index, number in signals.items():
        running[index].send_signal(number)
    found = results(running)
    assert [code for code, *_ in found] == [expected, expected], found[0][2][-3000:]
    (step,) = intact_steps(tmp_path)
    assert all(f"{name}: step {step} is saved" in errors for *_, errors in found)
    for before, (_, losses, _) in zip(seen, found, strict=True):
        assert_close(losses_of(before) | losses, undisturbed)
    assert [code for code, *_ in results(start_two(tmp_path))] == [0, 0]


def test_the_peer_of_a_killed_process_ends_and_a_restart_continues(tmp_path, undisturbed):
    running = start_two(tmp_path)
    until(running[0], "loss 3"), until(running[1], "loss 3")
    running[1].kill()
    begin = time.monotonic()
    (code, _, errors), _ = results(running)
    assert code not in (0, EXIT_CODE) and time.monotonic() - begin < 45, errors[-3000:]
    assert intact_steps(tmp_path)[-1] >= 2
    (code, losses, errors), _ = results(start_two(tmp_path))
    assert code == 0, errors[-3000:]
    assert_close(losses, undisturbed)


@pytest.mark.full
def test_a_process_that_hangs_ends_all_processes(tmp_path):
    found = results(start_two(tmp_path, "--hang-at", 3, "--hang-in", 1, "--watchdog", 4))
    assert all(code not in (0, EXIT_CODE) for code, *_ in found)
    errors = found[0][2]
    _, groups = errors.split("watchdog: the main threads of all processes:\n")
    first, second = groups.split("process 0:")  # as many of each: in the order of their processes, or reversed
    assert "process 1:" in first + second
    (written,) = tmp_path.glob("hang_*.txt")
    text = written.read_text()
    assert "no answer" not in text and "signal.pause()" in text.split("process 1:")[1].split("process 0:")[0]


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [(), pytest.param(("--every", 1000, "--verify-every", 1), marks=pytest.mark.full)],
    ids=["save", "verify"],
)
def test_a_bit_that_flips_on_one_device_ends_both_processes(tmp_path, options):
    """Before the next save, or when replicas are compared. The steps on disk stay intact, and a restart continues."""
    found = results(start_two(tmp_path, "--stage", 1, "--flip-at", 4, *options))
    assert [code for code, *_ in found] == [replicas.DIFFER_EXIT_CODE] * 2, found[0][2][-3000:]
    for _, losses, errors in found:
        assert "params/odd on device" in errors and "(process 1)" in errors and max(losses) == 3
    assert (intact_steps(tmp_path)[-1:] or [0]) == ([3] if not options else [0])
    assert [code for code, *_ in results(start_two(tmp_path, "--stage", 1))] == [0, 0]
