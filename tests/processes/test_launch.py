"""Several processes on the loopback interface: they join, agree, and exit if one is missing, differs or fails."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import jax
import pytest
from support.paths import EXAMPLES, SUPPORT
from support.ports import free_port

import zerojax
from zerojax import processes
from zerojax.processes import detect, guard, join, launch as launch_module
from zerojax.processes.launch import environment, launch

SLURM = EXAMPLES / "launch" / "slurm.sh"
JOINED = str(SUPPORT / "joined.py")


def joined(count, *args, **settings):
    """Runs joined.py in `count` processes of two devices each."""
    return launch([sys.executable, JOINED, *map(str, args)], count, **{"devices": 2, "timeout_s": 60, **settings})


def python(text):
    return [sys.executable, "-P", "-c", text]  # -P: does not import from the current directory


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.full)])
def test_processes_join(count, capfd):
    assert joined(count) == 0
    lines = capfd.readouterr().out.splitlines()
    printed = {line[1]: json.loads(line[4:]) for line in lines if line[3:].startswith(" {")}
    rows = 8 // count
    assert printed == {
        str(index): {
            "count": count,
            "index": index,
            "found": "ZEROJAX",
            "devices": 2 * count,
            "rows": [index * rows, (index + 1) * rows],
            "sum": 28.0,  # over the rows of all processes
        }
        for index in range(count)
    }


@pytest.mark.parametrize("missing", [0, 1])
def test_a_missing_process_is_named_by_all_others(missing, tmp_path, capfd):
    assert joined(3, "--absent", missing, "--timeout", 4, "--meet", tmp_path) == 1
    errors = capfd.readouterr().err
    for index in {0, 1, 2} - {missing}:
        assert f"[{index}] TimeoutError: processes: process {missing} of 3 did not join within 4 s" in errors
    assert "Check failure" not in errors  # no abort


def test_a_difference_is_named_by_all(capfd):
    assert joined(3, "--differ", 1) == 1
    errors = capfd.readouterr().err
    for index in range(3):
        assert f"[{index}] ValueError: processes: their configurations or versions differ" in errors
        assert f"[{index}]   got:      config['lr']: 0.1 in processes 0, 2; 0.2 in process 1" in errors
        assert f'[{index}]             jax: "{jax.__version__}" in processes 0, 2; "0.0" in process 1' in errors
    assert "layers" not in errors and "flax:" not in errors  # these are the same
    assert "Check failure" not in errors


def test_a_killed_process_ends_the_others(capfd):
    assert joined(2, "--kill", 1, "--heartbeat", 5, grace_s=30) == 128 + signal.SIGKILL
    errors = capfd.readouterr().err
    assert "[0] 1" in errors.splitlines()  # JAX lists the processes without a heartbeat
    assert "unhealthy (stopped sending heartbeats)" in errors


def test_a_process_that_raises_exits_at_once(capfd):
    assert joined(2, "--fail", 1, grace_s=1) == 1  # with JAX alone it would wait for 300 s
    assert "[1] KeyError: 'here'" in capfd.readouterr().err


def test_a_process_that_calls_sys_exit_exits_in_seconds(capfd):
    assert joined(2, "--exit", 1, grace_s=1, timeout_s=40) == 3  # with JAX alone it would not have exited after 40 s


def test_a_process_whose_output_nobody_reads_exits_at_once(capfd):
    assert joined(2, "--unread", 1, grace_s=1, timeout_s=40) == 1
    assert "[1] BrokenPipeError" in capfd.readouterr().err


@pytest.mark.full
def test_a_process_that_calls_sys_exit_waits_for_others_that_end_too(capfd):
    """Process 0 would end first, with 3. If it did not wait, JAX would abort process 1."""
    assert joined(2, "--exit", 0, "--late", grace_s=20) == 3
    assert "terminat" not in capfd.readouterr().err.lower()


ENDS = {
    "sys.exit()": 0,
    "sys.exit(3)": 3,
    "sys.exit(-1)": 255,
    "sys.exit(256)": 0,
    "sys.exit(True)": 1,
    "try: sys.exit(3)\nexcept SystemExit as error: assert error.code == 3": 0,  # caught: the process ends without it
    "try: sys.exit(3)\nexcept SystemExit as error: error.code = 4; raise": 4,
}


def test_the_exit_code_is_known_when_python_ends():
    """Each end in a process of its own, which are forked from one that has imported zerojax."""
    text = f"""
import atexit, os, sys
from zerojax.processes import join
for end in {[*ENDS, "sys.exit('why')"]!r}:
    if not (pid := os.fork()):
        join.exit_at_once_on_failure()
        atexit.register(lambda: print(join._exit_code))
        exec(end)
        break
    os.waitpid(pid, 0)
"""
    done = subprocess.run(python(text), capture_output=True, text=True, timeout=60)
    assert [*map(int, done.stdout.split())] == [*ENDS.values(), 1], done.stderr
    assert "why" in done.stderr


def test_a_process_that_does_not_call_agree_is_named(capfd):
    assert joined(3, "--silent", 1, "--timeout", 3, grace_s=5) == 1
    errors = capfd.readouterr().err
    for index in (0, 2):
        assert f"[{index}] TimeoutError: processes: process 1 did not call agree() within 3 s" in errors


@pytest.mark.full
def test_processes_exit_if_their_data_ends_at_different_steps(capfd, tmp_path):
    """Neither waits for the other forever, and both exit with an error."""
    assert joined(2, "--uneven", tmp_path, grace_s=60) == 1
    errors = capfd.readouterr().err
    assert "fit: the data of this process ended after step 3, but not in all processes" in errors
    assert "3 in process 1; 4 in process 0" in errors or "4 in process 0; 3 in process 1" in errors


def test_a_process_with_slow_data_is_named_once_and_so_are_those_with_the_same_rows(capfd, tmp_path):
    """In the second of two runs, they have different rows."""
    assert joined(2, "--slow", tmp_path) == 0
    printed = capfd.readouterr().err.splitlines()
    lines = [line for line in printed if "s to load a batch" in line]
    assert len(lines) == 1 and "process 1 takes 0.05" in lines[0] and lines[0].startswith("[0] ")
    lines = [line for line in printed if "the same rows" in line]
    assert len(lines) == 1 and "step 1: processes 0, 1 pass the same rows" in lines[0] and lines[0].startswith("[0] ")


@pytest.mark.full
def test_all_save_at_the_same_step_and_exit_after_sigterm():
    command = [sys.executable, JOINED, "--preempted"]
    text = f"import sys; from zerojax.processes.launch import launch; sys.exit(launch({command}, 2, devices=2))"
    launcher = subprocess.Popen(python(text), stdout=subprocess.PIPE, text=True)
    assert sorted(launcher.stdout.readline() for _ in range(2)) == ["[0] running\n", "[1] running\n"]
    launcher.send_signal(signal.SIGTERM)
    out, _ = launcher.communicate(timeout=30)
    saved = [line[4:] for line in out.splitlines() if "saved at" in line]
    assert len(saved) == 2 and saved[0] == saved[1]
    assert launcher.returncode == 75


def test_nothing_is_started_for_a_single_process(monkeypatch):
    for name in ("ZEROJAX_COORDINATOR", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert processes.initialize(config={"lr": 0.1}) == (1, 0, None, "alone")
    monkeypatch.setattr(os, "environ", environment("127.0.0.1:1", 1, 0, None))
    assert processes.initialize() == (1, 0, None, "ZEROJAX")
    assert processes.own_rows(8) == slice(0, 8)


def test_a_late_call_of_initialize_is_an_error(monkeypatch):
    monkeypatch.setattr(os, "environ", environment("127.0.0.1:1", 2, 0, None))
    message = r"initialize\(\) was called too late\n  got:      JAX has already initialized its devices"
    with pytest.raises(RuntimeError, match=message):
        processes.initialize()


def test_a_process_that_has_not_joined_the_others_does_not_train(monkeypatch):
    """Each would train alone, with the same losses, and write into the same directory."""
    monkeypatch.setattr(os, "environ", environment("127.0.0.1:1", 2, 1, None))
    with pytest.raises(
        RuntimeError, match=r"2 processes were started, and this one .*\n  got:      process 1, .* ZEROJAX"
    ):
        zerojax.Zero(zerojax.make_mesh())
    zerojax.Zero(zerojax.make_mesh(devices=64))  # a plan needs no others
    monkeypatch.setattr(os, "environ", environment("127.0.0.1:1", 1, 0, None))
    zerojax.Zero(zerojax.make_mesh())
    monkeypatch.setattr(os, "environ", {"MASTER_ADDR": "a", "MASTER_PORT": "1", "WORLD_SIZE": "2", "RANK": "0"})
    with pytest.warns(UserWarning, match="2 processes were started"):
        zerojax.Zero(zerojax.make_mesh())


def test_devices_can_be_simulated_before_the_processes_join():
    script = "import zerojax; zerojax.simulate_devices(3); zerojax.initialize(); import jax; print(jax.device_count())"
    text = f"import sys; from zerojax.processes.launch import launch; sys.exit(launch({python(script)}, 2, devices=2))"
    done = subprocess.run(python(text), capture_output=True, text=True, timeout=60)
    assert (done.returncode, sorted(done.stdout.split())) == (0, ["6", "6", "[0]", "[1]"]), done.stderr


@pytest.mark.parametrize("value", [object(), float("nan"), {1, 2}])
def test_a_value_that_is_not_json_is_an_error(value):
    with pytest.raises(ValueError, match=r"processes: config\['what'\] is not JSON\n  got: .*\n  fix: "):
        processes.agree({"what": value})


def test_rows_that_cannot_be_divided_are_an_error(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    with pytest.raises(ValueError, match=r"cannot be divided .*\n  got:      10 rows, 4 processes; 10 % 4 = 2"):
        processes.own_rows(10)


def test_a_taken_port_is_named(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        info = detect.LaunchInfo("ZEROJAX", 2, 0, address, "deactivate")
        monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", address)
        with pytest.raises(RuntimeError, match=f"process 0 cannot listen on {address}\n  got: .*in use"):
            join._wait_for_all(info, 5)


def test_launch_returns_the_first_exit_code_that_is_not_0(capfd):
    text = (
        "import os, time; i = int(os.environ['ZEROJAX_PROCESS_ID']); time.sleep([0, 1.5, 0.3][i]); exit([0, 3, 75][i])"
    )
    assert launch(python("print('fine')"), 2) == 0
    assert launch(python(text), 3) == 75
    assert launch(python("import os; os.kill(os.getpid(), 9)"), 1) == 128 + 9
    assert launch(python("import time; time.sleep(60)"), 2, timeout_s=1) == 124


# What process 1 of two does, and what the last line says of it.
FAILURES = {
    "os.kill(os.getpid(), 9)": "was ended by SIGKILL after TIME",
    "os.kill(os.getpid(), signal.SIGRTMIN + 1)": f"was ended by signal {signal.SIGRTMIN + 1} after TIME",
    "print('out'); os._exit(3)": "exited with code 3 after TIME",
    "sys.exit('why')": "exited with code 1 after TIME; it wrote last: why",
    "raise ValueError('bad\\n  fix: good')": "exited with code 1 after TIME; its last exception: ValueError: bad",
    "logging.exception('x'); sys.exit(f'why{os.linesep}')": "exited with code 1 after TIME; it wrote last: why",
    "raise KeyError('\u03b5' * 999)": "exited with code 1 after TIME; its last exception: KeyError: '" + 289 * "\u03b5",
    "try: 1 / 0\nexcept ZeroDivisionError: logging.exception('x')\nsys.exit(75)": "exited with code 75 after TIME; "
    "it wrote last: ZeroDivisionError: division by zero",
}


@pytest.mark.parametrize("failure", FAILURES)
def test_the_last_line_says_which_process_failed_and_why(failure, capfd):
    head = "import logging, os, signal, sys, time\nif os.environ['ZEROJAX_PROCESS_ID'] == '0': time.sleep(60)\n"
    launch(python(head + failure), 2, grace_s=0.2)
    last = capfd.readouterr().err.splitlines()[-1]
    assert re.sub(r"\d+\.\d s", "TIME", last) == f"launch: process 1 {FAILURES[failure]}"


def test_the_last_line_names_a_signal_and_a_time_limit(capfd):
    with start_launcher(CHILD) as launcher:
        assert sorted(launcher.stdout.readline() for _ in range(2)) == ["[0] 1\n", "[1] 1\n"]
        launcher.send_signal(signal.SIGTERM)
        _, err = launcher.communicate(timeout=20)
    pattern = r"launch: process [01] exited with code 15 after \d+\.\d s; zerojax launch had received SIGTERM"
    assert re.fullmatch(pattern, err.splitlines()[-1])
    launch(python("import time; time.sleep(60)"), 2, timeout_s=1)
    assert capfd.readouterr().err == "launch: the processes were killed after 1 s, the time limit\n"


def test_launch_kills_the_other_processes_after_the_grace_period(capfd):
    text = "import os, time; time.sleep(60 * int(os.environ['ZEROJAX_PROCESS_ID'])); exit(7)"
    start = time.monotonic()
    assert launch(python(text), 2, grace_s=1) == 7
    assert 1 < time.monotonic() - start < 40


def test_launch_prefixes_lines_with_the_process_index(capfd):
    text = "import sys; print('a\\nb', flush=True); print('oh', file=sys.stderr)"
    assert launch(python(text), 2) == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[0] a", "[0] b", "[1] a", "[1] b"]
    assert sorted(err.splitlines()) == ["[0] oh", "[1] oh"]


CHILD = "import signal, time; [signal.signal(n, lambda n, _: exit(n)) for n in (1, 2, 15)]; print(1); time.sleep(60)"


def start_launcher(child, count=2, before="pass", **settings):
    """Starts a launcher, in a process of its own, of processes that run a Python text. See also `pids_of`."""
    # Shells start commands in the background with SIGINT and SIGQUIT ignored.
    text = f"import signal, sys; [signal.signal(n, signal.SIG_DFL) for n in (1, 2, 3, 15)]; {before}; "
    text += "from zerojax.processes.launch import launch; "
    text += f"sys.exit(launch([sys.executable, '-P', '-c', {child!r}], {count}, **{settings}))"
    return subprocess.Popen(python(text), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(n, marks=pytest.mark.full) for n in (signal.SIGINT, signal.SIGHUP))]
)
def test_launch_forwards_signals(number):
    with start_launcher(CHILD) as launcher:
        assert sorted(launcher.stdout.readline() for _ in range(2)) == ["[0] 1\n", "[1] 1\n"]
        launcher.send_signal(number)
        assert launcher.wait(timeout=20) == number


def test_launch_under_nohup_ignores_hangups():
    with start_launcher(CHILD, before="signal.signal(1, signal.SIG_IGN)") as launcher:
        assert sorted(launcher.stdout.readline() for _ in range(2)) == ["[0] 1\n", "[1] 1\n"]
        launcher.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(timeout=20) == signal.SIGINT


def test_a_signal_that_arrives_before_the_processes_is_forwarded(monkeypatch, capfd):
    """Otherwise it would be lost, and they would run on."""
    start, sent = launch_module._start, []

    def signal_and_start(*args):
        if not sent:
            sent.append(os.kill(os.getpid(), signal.SIGTERM))
        return start(*args)

    monkeypatch.setattr(launch_module, "_start", signal_and_start)
    begin = time.monotonic()
    assert launch(python("import time; time.sleep(60)"), 2, timeout_s=40) == 128 + signal.SIGTERM
    assert time.monotonic() - begin < 20


# Each process prints its pid and that of a child. If its index is odd, it ignores SIGTERM, as joined processes may.
FAMILY = """
import os, signal, subprocess, sys, time
if int(os.environ['ZEROJAX_PROCESS_ID']) % 2:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])
print(os.getpid(), child.pid)
"""


def pids_of(launcher, count=2):
    return [int(pid) for _ in range(count) for pid in launcher.stdout.readline().split()[1:]]


def running(pids):
    """Those of the processes that run: not even zombies, which nobody might reap in a container."""
    stats = [Path(f"/proc/{pid}/stat") for pid in pids]
    return [pid for pid, stat in zip(pids, stats, strict=True) if stat.exists() and ") Z " not in stat.read_text()]


def wait_until_ended(pids, timeout_s=20):
    deadline = time.monotonic() + timeout_s
    while (left := running(pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGQUIT, marks=pytest.mark.full)])
def test_no_process_outlives_a_launcher_that_is_killed(number):
    with start_launcher(FAMILY + "time.sleep(60)", grace_s=1) as launcher:
        pids = pids_of(launcher)
        assert len(pids) == 4 and sorted(running(pids)) == sorted(pids)
        launcher.send_signal(number)
        assert launcher.wait(timeout=20) == -number
        assert wait_until_ended(pids) == []


def test_processes_of_a_killed_launcher_may_save_before_they_end(tmp_path):
    """They receive SIGTERM first, and are not killed as long as the grace period lasts."""
    child = f"import signal, time, sys; signal.signal(15, lambda n, _: (time.sleep(1), open({str(tmp_path / 'saved')!r}"
    child += ", 'w').close(), exit(75))); print(1); time.sleep(60)"
    with start_launcher(child, 1, grace_s=20) as launcher:
        assert launcher.stdout.readline() == "[0] 1\n"
        launcher.kill()
        for _ in range(100):
            if (tmp_path / "saved").exists():
                return
            time.sleep(0.1)
    raise AssertionError("not saved")


def test_what_a_process_leaves_behind_is_killed(capfd):
    assert launch(python(FAMILY + "sys.exit(5 * int(os.environ['ZEROJAX_PROCESS_ID']))"), 2) == 5
    pids = [int(pid) for line in capfd.readouterr().out.splitlines() for pid in line.split()[1:]]
    assert len(pids) == 4 and wait_until_ended(pids, 5) == []


def test_launch_does_not_need_its_guard(monkeypatch, capfd):
    monkeypatch.setattr(guard, "__file__", "/none")  # it exits at once
    assert launch(python("import time; time.sleep(0.5); exit(3)"), 2) == 3


def test_processes_end_if_nobody_reads_their_output():
    """Some ignore SIGTERM, and all go on writing, more than a pipe takes."""
    child = FAMILY + "while True: print('x' * 100_000); print('y' * 100_000, file=sys.stderr)"
    with start_launcher(child, grace_s=2) as launcher:
        errors = []
        reader = threading.Thread(target=lambda: errors.extend(launcher.stderr))
        reader.start()
        pids = pids_of(launcher, 1)
        launcher.stdout.close()
        assert launcher.wait(timeout=20) in (141, 120)  # 120: Python itself failed to write the rest
        assert wait_until_ended(pids) == []
        reader.join()
    assert any("launch: the output cannot be written, and all processes are ended: " in line for line in errors)


def test_the_command_exits_like_others_if_nobody_reads_its_output():
    """As in `zerojax launch ... | head -1`."""
    text = "import os, time; print(os.getpid(), flush=True); time.sleep(1)\nwhile True: print('more'); time.sleep(0.1)"
    command = [sys.executable, "-P", "-m", "zerojax.cli", "launch", "-n", "2", "--", *python(text)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
        pids = pids_of(launcher, 1)
        launcher.stdout.close()
        errors = launcher.stderr.read()
        assert launcher.wait(timeout=20) == 141, errors
    assert wait_until_ended(pids, 5) == []
    assert "Exception" not in errors


def test_a_full_disk_ends_the_processes(monkeypatch, capfd):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        begin = time.monotonic()
        assert launch(python("import time; print(1); time.sleep(60)"), 2, grace_s=50) == 141  # by SIGTERM, at once
        assert time.monotonic() - begin < 20
        monkeypatch.undo()
        with suppress(OSError):
            full.close()


def test_characters_that_the_terminal_lacks_are_escaped(monkeypatch, tmp_path):
    with open(tmp_path / "out", "w", encoding="ascii") as out:
        monkeypatch.setattr(sys, "stdout", out)
        command = [sys.executable, "-X", "utf8", "-P", "-c", "print('loss \u03b5'); print('end')"]
        assert launch(command, 1) == 0
    assert (tmp_path / "out").read_text() == "[0] loss \\u03b5\n[0] end\n"


def test_a_launcher_without_output_discards_it(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert launch(python("[print('x' * 10_000) for _ in range(100)]"), 1, timeout_s=30) == 0


def test_launch_sets_the_variables_that_initialize_reads(monkeypatch):
    monkeypatch.setenv("ZEROJAX_CLUSTER", "slurm")
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_force_host_platform_device_count=8")
    own = environment("127.0.0.1:5", 3, 1, 4)
    assert detect.detect(own)[:4] == ("ZEROJAX", 3, 1, "127.0.0.1:5")
    assert own["XLA_FLAGS"] == "--xla_a=1 --xla_force_host_platform_device_count=4"
    assert (own["JAX_PLATFORMS"], own["NPROC"]) == ("cpu", "24")
    with pytest.raises(ValueError, match="launch: cannot start 0 processes"):
        launch(["true"], 0)


SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for ((i = 0; i < FAKE_TASKS; i++)); do
    SLURM_STEP_NODELIST=127.0.0.1 SLURM_NTASKS=$FAKE_TASKS SLURM_PROCID=$i SLURM_LOCALID=$i "$@" & tasks+=($!)
done
highest=0
for task in "${tasks[@]}"; do wait "$task"; code=$?; ((code > highest)) && highest=$code; done
exit $highest
"""


def run_slurm(tmp_path, *command):
    """Runs slurm.sh with an srun that starts two tasks on this machine and a scontrol that records its arguments."""
    for name, text in {"srun": SRUN, "scontrol": f'#!/bin/bash\necho "$@" >> {tmp_path}/asked\n'}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = free_port(2**16 - 2**12) - (2**16 - 2**12)  # JAX adds the job number to this base
    own = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": str(job), "FAKE_TASKS": "2"}
    simulated = {name: environment("", 1, 0, 2)[name] for name in ("JAX_PLATFORMS", "NPROC", "XLA_FLAGS")}
    environ = {**os.environ, **simulated, **own}
    done = subprocess.run(["bash", str(SLURM), *command], env=environ, capture_output=True, text=True, timeout=60)
    asked = (tmp_path / "asked").read_text() if (tmp_path / "asked").exists() else ""
    return done, asked.replace(str(job), "JOB")


def test_slurm_script_has_valid_syntax():
    assert subprocess.run(["bash", "-n", str(SLURM)]).returncode == 0


@pytest.mark.full
def test_slurm_tasks_join(tmp_path):
    done, asked = run_slurm(tmp_path, sys.executable, JOINED)
    assert done.returncode == 0, done.stderr
    printed = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted((one["index"], one["count"], one["found"], one["sum"]) for one in printed) == [
        (0, 2, "slurm", 28.0),
        (1, 2, "slurm", 28.0),
    ]
    assert asked == ""


@pytest.mark.parametrize(("code", "asked"), [(75, "requeue JOB\n"), (1, "")])
def test_slurm_job_is_requeued_after_exit_code_75(tmp_path, code, asked):
    done, has_asked = run_slurm(tmp_path, "bash", "-c", f"exit {code}")
    assert (done.returncode, has_asked) == (code, asked)
