"""Training runs as processes that are killed, told to end, hung, or out of disk: nothing that was saved is lost."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.paths import SUPPORT, TESTS, importing
from support.ports import free_port
from support.small_run import setting, train

from zerojax.checkpoints import EXIT_CODE, store
from zerojax.checkpoints.pieces import damaged
from zerojax.processes.launch import environment

STEPS = 8


def start(directory, *options, num_steps=STEPS, environ=os.environ):
    command = [sys.executable, str(SUPPORT / "trainee.py"), str(directory), str(num_steps), *map(str, options)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=importing(TESTS, environ=environ), text=True, **pipes)


def start_two(directory, *options):
    """Two processes, each with half of the devices."""
    coordinator = f"127.0.0.1:{free_port()}"
    options = (*options, "--devices", 2)
    return [start(directory, *options, environ=environment(coordinator, 2, index, 2)) for index in range(2)]


def losses_of(output):
    """{step: the loss with all its digits}."""
    lines = [line.split() for line in output.splitlines() if line.startswith("loss ") and len(line.split()) == 3]
    return {int(step): value for _, step, value in lines}


def run(directory, *options, code=0, num_steps=STEPS):
    """(losses, stderr) of a run that ends by itself, with this exit code."""
    process = start(directory, *options, num_steps=num_steps)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == code, f"exit code {process.returncode}\n{errors[-3000:]}"
    return losses_of(output), errors


def until(process, word):
    """Reads lines until one begins so; what was read."""
    lines = []
    while not lines or not lines[-1].startswith(word):
        lines.append(process.stdout.readline())
        assert lines[-1], process.stderr.read()[-3000:]
    return "".join(lines)


def verified(directory):
    """The steps that are whole, every array of which is what was saved."""
    directory = Path(directory)
    sound = lambda step: not any(wrong for _, wrong in damaged(directory, step, store.read_manifest(directory, step)))
    steps = store.steps(directory)
    assert all(sound(step) for step in steps)
    return steps


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The losses of a run that nobody disturbs."""
    losses, _ = run(tmp_path_factory.mktemp("run"))
    assert sorted(losses) == list(range(1, STEPS + 1))
    return losses


def killed_at_random(directory, rng, *options):
    """Kills a run at a random time after its first step, and again until it is through. (losses, number of kills)."""
    losses, kills = {}, 0
    while not losses or max(losses) < STEPS:
        process = start(directory, "--slow", 0.05, *options)  # so that it is there to be killed
        seen = until(process, ("loss", "end"))
        time.sleep(rng.uniform(0, 0.6))
        process.send_signal(signal.SIGKILL)
        output, errors = process.communicate(timeout=60)
        assert process.returncode in (0, -signal.SIGKILL), errors[-3000:]
        kills += process.returncode != 0
        losses |= losses_of(seen + output)
        assert verified(directory) or max(losses) <= 1
    assert kills
    return losses, kills


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[pytest.mark.full] * (seed > 0)) for seed in range(12)])
def test_a_run_that_is_killed_while_it_saves_goes_on_where_it_was(tmp_path, undisturbed, seed):
    """It saves after every step, so that a save is nearly always under way. No loss differs by a bit."""
    losses, kills = killed_at_random(tmp_path, random.Random(seed))
    print(f"seed {seed}: {kills} kills")
    assert {step: losses[step] for step in losses} == {step: undisturbed[step] for step in losses}


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[pytest.mark.full] * (seed > 0)) for seed in range(12)])
def test_a_run_that_is_killed_while_it_deletes_keeps_a_whole_step(tmp_path, undisturbed, seed):
    """It keeps one step, so that another is deleted after every save."""
    losses, kills = killed_at_random(tmp_path, random.Random(1000 + seed), "--keep", 1)
    print(f"seed {1000 + seed}: {kills} kills")
    assert {step: losses[step] for step in losses} == {step: undisturbed[step] for step in losses}


def test_a_step_of_which_a_part_is_deleted_is_not_counted(tmp_path, undisturbed):
    process = start(tmp_path, "--keep", 2, "--die-deleting")
    output, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, errors[-3000:]
    steps = verified(tmp_path)
    assert len(steps) >= 2 and 1 not in steps
    losses = losses_of(output) | run(tmp_path, "--keep", 2)[0]
    assert {step: losses[step] for step in losses} == {step: undisturbed[step] for step in losses}
    assert verified(tmp_path) == [STEPS - 1, STEPS]
    assert not list(tmp_path.glob("deleted/*"))


def test_a_script_that_does_not_close_its_checkpoints_ends_its_save_or_fails(tmp_path):
    """From Python 3.12 on no thread can be started when the script has ended, and Orbax wants some: it is told."""
    too_late = sys.version_info >= (3, 12)
    _, errors = run(tmp_path, "--every", STEPS, "--no-close", code=1 if too_late else 0)
    assert ("checkpoint: a save failed when the script had ended" in errors) == too_late
    assert verified(tmp_path) == ([] if too_late else [STEPS])


def test_sigterm_saves_and_the_exit_code_is_75(tmp_path, undisturbed):
    process = start(tmp_path, "--every", 1000, "--slow", 0.2)
    seen = until(process, "loss 3")
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == EXIT_CODE == 75
    (step,) = verified(tmp_path)
    assert f"SIGTERM; step {step} is saved, the run ends with exit code 75" in errors
    losses = losses_of(seen + output) | run(tmp_path)[0]
    losses.setdefault(step, undisturbed[step])  # it ended before it could print it
    assert losses == undisturbed


def test_a_hang_ends_with_the_stacks_of_all_threads(tmp_path):
    _, errors = run(tmp_path, "--hang-at", 3, "--watchdog", 2, code=1)
    assert "Timeout (0:00:02)!" in errors and "trainee.py" in errors
    assert 3 in verified(tmp_path)


def test_a_full_disk_is_told_and_the_next_save_works(tmp_path, undisturbed):
    losses, errors = run(tmp_path, "--full-at", 3, "--keep", 100)
    assert f"the save of step 3 in {tmp_path} failed: " in errors
    assert verified(tmp_path) == [1, 2, 4, 5, 6, 7, 8] and losses == undisturbed


def test_a_killed_run_goes_on_on_other_devices(tmp_path, undisturbed):
    """On half of the devices and at another stage, to what another order of sums in bf16 makes."""
    process = start(tmp_path)
    seen = until(process, "loss 4")
    process.kill()
    output, _ = process.communicate(timeout=60)
    before = losses_of(seen + output)
    after, _ = run(tmp_path, "--stage", 1, "--devices", 2)
    for step, loss in (before | after).items():
        assert float.fromhex(loss) == pytest.approx(float.fromhex(undisturbed[step]), rel=0.02)


def test_steps_of_a_run_in_one_process_are_those_of_this_one(tmp_path, undisturbed):
    """The trainee is no other program: it prints what the same steps give here."""
    losses, _ = train(setting(num_devices=4), tmp_path, STEPS)
    assert [loss.hex() for loss in losses] == [undisturbed[step] for step in range(1, STEPS + 1)]


def ended(running):
    """(exit code, losses, stderr) of each process."""
    found = [process.communicate(timeout=120) for process in running]
    return [(p.returncode, losses_of(out), errors) for p, (out, errors) in zip(running, found, strict=True)]


def alike(losses, undisturbed):
    """As those of one process with as many devices; sums over processes have another order, in bf16."""
    assert losses
    for step, loss in losses.items():
        assert float.fromhex(loss) == pytest.approx(float.fromhex(undisturbed[step]), rel=0.02)


def test_two_processes_write_one_checkpoint_that_one_process_reads(tmp_path, undisturbed):
    (code, first, errors), (other, second, _) = ended(start_two(tmp_path))
    assert code == other == 0, errors[-3000:]
    assert first == second and sorted(first) == list(range(1, STEPS + 1))
    alike(first, undisturbed)
    assert verified(tmp_path) == [6, 7, 8]
    assert run(tmp_path, num_steps=STEPS + 1)[0].keys() == {STEPS + 1}


def test_each_of_two_processes_finds_where_its_data_was(tmp_path):
    """One process, to which they cannot both be given, is refused."""
    stopped = start_two(tmp_path, "--data", "--slow", 0.1)
    [until(process, "loss 3") for process in stopped]
    [process.kill() for process in stopped]
    [process.communicate() for process in stopped]
    found = ended(start_two(tmp_path, "--data"))
    assert [code for code, *_ in found] == [0, 0], found[0][2][-3000:]
    _, errors = run(tmp_path, "--data", code=1, num_steps=STEPS + 1)
    assert "the different states of 2 processes, now there are 1" in errors


def test_a_step_that_is_there_already_is_set_aside_by_two_processes(tmp_path, undisturbed):
    run(tmp_path, "--keep", 100, num_steps=4)
    for step in 3, 4:
        (tmp_path / f"step_{step}" / "commit_success.txt").unlink()
    (code, losses, errors), (other, *_) = ended(start_two(tmp_path, "--keep", 100))
    assert code == other == 0, errors[-3000:]
    assert min(losses) == 3 and verified(tmp_path) == list(range(1, STEPS + 1))
    alike(losses, undisturbed)
    assert len(list(tmp_path.glob("aside_step_*"))) == 2


@pytest.mark.parametrize("what", ["arrays", "manifest"])
def test_what_one_of_two_processes_cannot_read_is_an_error_in_both(tmp_path, undisturbed, what):
    """Neither waits for the other. Told to, both go back to the same step."""
    run(tmp_path, num_steps=4)
    found = ended(start_two(tmp_path, "--unreadable", what))
    assert [code for code, *_ in found] == [1, 1]
    assert "step_4 cannot be read\n  got:      an error in process 1" in found[0][2]
    assert "the connection is lost" in found[1][2]
    (code, losses, errors), (other, *_) = ended(start_two(tmp_path, "--unreadable", what, "--fallback"))
    assert code == other == 0, errors[-3000:]
    assert min(losses) == 4
    alike(losses, undisturbed)


def test_two_processes_that_see_different_steps_go_on_from_the_same(tmp_path, undisturbed):
    """Process 1 does not see yet that the last step is whole."""
    run(tmp_path, num_steps=4)
    (code, losses, errors), (other, *_) = ended(start_two(tmp_path, "--unreadable", "mark"))
    assert code == other == 0, errors[-3000:]
    assert min(losses) == 5
    alike(losses, undisturbed)


@pytest.mark.parametrize("index", [0, 1])
def test_sigterm_to_one_of_two_processes_saves_the_same_step_in_both(tmp_path, index, undisturbed):
    running = start_two(tmp_path, "--every", 1000, "--slow", 0.2)
    seen = [until(process, "loss 3") for process in running]
    running[index].send_signal(signal.SIGTERM)
    found = ended(running)
    assert [code for code, *_ in found] == [EXIT_CODE, EXIT_CODE], found[0][2][-3000:]
    (step,) = verified(tmp_path)
    assert all(f"SIGTERM; step {step} is saved" in errors for *_, errors in found)
    for before, (_, losses, _) in zip(seen, found, strict=True):
        alike(losses_of(before) | losses, undisturbed)
    assert [code for code, *_ in ended(start_two(tmp_path))] == [0, 0]


def test_the_peer_of_a_killed_process_ends_and_a_restart_goes_on(tmp_path, undisturbed):
    running = start_two(tmp_path)
    until(running[0], "loss 3"), until(running[1], "loss 3")
    running[1].kill()
    begin = time.monotonic()
    (code, _, errors), _ = ended(running)
    assert code not in (0, EXIT_CODE) and time.monotonic() - begin < 45, errors[-3000:]
    assert verified(tmp_path)[-1] >= 2
    (code, losses, errors), _ = ended(start_two(tmp_path))
    assert code == 0, errors[-3000:]
    alike(losses, undisturbed)


def test_a_process_that_hangs_ends_all(tmp_path):
    found = ended(start_two(tmp_path, "--hang-at", 3, "--hang-in", 1, "--watchdog", 4))
    assert all(code not in (0, EXIT_CODE) for code, *_ in found)
    assert any("Timeout (0:00:04)!" in errors and "trainee.py" in errors for *_, errors in found)
