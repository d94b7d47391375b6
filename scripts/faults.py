"""Runs the tests of every fault that a training run has to survive, and of every bad input that it has to refuse.

    python scripts/faults.py              # all faults, with repeated kills at random times
    python scripts/faults.py --quick      # one case of each test
    python scripts/faults.py --rows 1 12  # only these faults

Each test runs once, in one of two processes; some tests start further processes, which they kill or suspend, or whose
disk loses power. When all have ended, prints one line per fault. The last line is `N passed, N failed`; the exit code
is 1 if a fault failed.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
FAULTS, CHECKPOINTS = "tests/checkpoints/test_faults.py", "tests/checkpoints/test_checkpoints.py"
ERRORS, PRECISION = "tests/docs/test_errors.py", "tests/step/test_precision.py"
AGREEMENT, DIRECTORIES = "tests/processes/test_agreement.py", "tests/checkpoints/test_directories.py"
FIT, BATCHES, GUARDS = "tests/training/test_fit.py", "tests/step/test_batches.py", "tests/step/test_guards.py"
LAUNCH, REMOTE = "tests/processes/test_launch.py", "tests/checkpoints/test_remote_copy.py"
SKIPPED = f"{PRECISION}::test_a_step_with_a_bad_gradient_is_skipped"
# (the fault, the tests of the expected behavior)
ROWS = [
    ("killed at random times during saves", [f"{FAULTS}::test_a_run_that_is_killed_while_it_saves"]),
    ("killed at random times while old steps are deleted", [f"{FAULTS}::test_a_run_that_is_killed_while_it_deletes"]),
    ("the script ends without closing its checkpoints", [f"{FAULTS}::test_a_script_that_does_not_close"]),
    ("an exception in the training loop", [f"{CHECKPOINTS}::test_an_exception_in_the_loop"]),
    ("SIGTERM to a single process", [f"{FAULTS}::test_sigterm_saves_and_the_exit_code_is_75"]),
    ("SIGTERM to one of two processes", [f"{FAULTS}::test_a_signal_to_one_of_two"]),
    (
        "SIGTERM handlers of the user",
        [f"{CHECKPOINTS}::test_sigterm_saves_and_exits_with", f"{CHECKPOINTS}::test_chained_handlers"],
    ),
    ("SIGKILL to one of two processes", [f"{FAULTS}::test_the_peer_of_a_killed_process"]),
    (
        "a process hangs, alone or as one of two",
        [f"{FAULTS}::test_a_run_that_hangs", f"{FAULTS}::test_a_process_that_hangs"],
    ),
    ("disk full", [f"{FAULTS}::test_a_full_disk"]),
    ("two consecutive saves fail", [f"{CHECKPOINTS}::test_a_failed_save_is_reported"]),
    (
        "a flipped bit, a zeroed page",
        [f"{CHECKPOINTS}::{test}" for test in ("test_damaged_arrays", "test_a_flipped_bit", "test_an_array_that_was")],
    ),
    (
        "a file is truncated, deleted, or unreadable by one process",
        [
            f"{CHECKPOINTS}::test_damaged_arrays",
            f"{FAULTS}::test_a_read_error_in_one",
            f"{FAULTS}::test_two_processes_that_list",
        ],
    ),
    ("a damaged manifest", [f"{CHECKPOINTS}::test_a_damaged_manifest"]),
    ("a missing commit file", [f"{CHECKPOINTS}::test_a_step_without_its_commit_file"]),
    ("other folders among the steps", [f"{CHECKPOINTS}::test_other_folders"]),
    ("every step is damaged", [f"{CHECKPOINTS}::test_a_run_does_not_start_over"]),
    ("two runs in one directory", [f"{CHECKPOINTS}::test_a_second_run"]),
    ("a missing leaf, an extra leaf", [f"{CHECKPOINTS}::test_missing_and_extra_leaves"]),
    ("another shape", [f"{CHECKPOINTS}::test_another_shape"]),
    ("another dtype", [f"{CHECKPOINTS}::test_another_dtype"]),
    ("another optimizer", [f"{CHECKPOINTS}::test_another_optimizer"]),
    ("every pair of stage and mesh: saved on one, restored on the other", [f"{CHECKPOINTS}::test_a_state_is_restored"]),
    (
        "a dim that the axis size does not divide",
        [
            "tests/sharding/test_padding.py::test_the_dim_with_the_fewest_zeros",
            "tests/sharding/test_padding.py::test_many_zeros_are_warned_about",
            "tests/sharding/test_placement.py::test_explain_lists_replicated_leaves",
            "tests/sharding/test_placement.py::test_explain_shows_zeros",
        ],
    ),
    (
        "a leaf that is replicated but should be sharded",
        ["tests/analysis/test_audit.py::test_a_replicated_leaf_is_an_error"],
    ),
    ("a NaN in the gradients of one shard", [SKIPPED]),
    (
        "a NaN in every step",
        [f"{CHECKPOINTS}::test_skipped_updates", f"{CHECKPOINTS}::test_a_state_that_is_not_finite"],
    ),
    ("an infinity in bf16", [SKIPPED]),
    ("a skipped update: counters, schedule, bias correction", [SKIPPED]),
    ("resumed in the middle of an epoch", [f"{CHECKPOINTS}::test_a_run_that_resumes_in_the_middle"]),
    (
        "resumed on another number of processes, or on fewer devices with the same batch",
        [
            f"{CHECKPOINTS}::test_iterator_states_of_another_number",
            f"{FAULTS}::test_two_processes_write",
            "tests/training/test_fewer_devices.py::test_a_killed_run_continues_on_fewer_devices",
        ],
    ),
    ("N + M steps compared with N steps, resume, M steps", [f"{CHECKPOINTS}::test_a_resumed_run_equals"]),
    ("the configuration differs between processes", [f"{LAUNCH}::test_a_difference_is_named"]),
    ("an invalid stage, axis, batch or pattern; an empty model", [ERRORS]),
    (
        "a leaf that is not an array, an iterator state that is not JSON",
        [f"{ERRORS}::test_a_leaf_that_is_no_array", f"{CHECKPOINTS}::test_the_state_of_the_data_iterator"],
    ),
    ("out of device memory", [f"{ERRORS}::test_memory_that_is_exhausted"]),
    ("an unsupported jax or flax", [f"{ERRORS}::test_unsupported_versions"]),
    ("an invalid or malicious safetensors header or path", ["tests/exchange/test_tensors.py"]),
    ("a checkpoint of a newer version", [f"{CHECKPOINTS}::test_a_checkpoint_of_a_newer_version"]),
    ("an installed package, not an editable one, used outside of the checkout", ["tests/cli/test_installed.py"]),
    (
        "a bit that flips in the memory of one device",
        ["tests/step/test_replicas.py", f"{FAULTS}::test_a_bit_that_flips_on_one_device"],
    ),
    ("processes that see different directories", [f"{AGREEMENT}::test_a_difference_is_named"]),
    (
        "a directory with a glob character in its name",
        [f"{DIRECTORIES}::test_a_directory_that_cannot_work", f"{DIRECTORIES}::test_a_directory_may_have"],
    ),
    (
        "a URL as a directory; remote storage that fails, runs that are killed while they copy to it",
        [f"{DIRECTORIES}::test_a_directory_that_cannot_work", "tests/checkpoints/test_remote_copy.py"],
    ),
    ("processes that differ in their rows, settings, programs or options", [AGREEMENT]),
    ("other programs at the port of the roll call: slow, silent or malformed", ["tests/processes/test_rollcall.py"]),
    (
        "the launcher is killed or hung up, or nobody reads its output; one process calls sys.exit",
        [
            f"{LAUNCH}::{test}"
            for test in (
                "test_launch_forwards_signals",
                "outlives_a_launcher",
                "test_processes_of_a_killed_launcher",
                "test_what_a_process_leaves_behind",
                "nobody_reads",
                "test_a_full_disk_ends",
                "sys_exit",
            )
        ],
    ),
    (
        "the directory is deleted or replaced under a run",
        [f"{DIRECTORIES}::test_a_directory_that_is_lost", f"{DIRECTORIES}::test_a_deleted_lock_file"],
    ),
    ("a killed run whose forked workers are alive", [f"{DIRECTORIES}::test_a_forked_worker"]),
    ("a checkpoint of a stranger", ["tests/checkpoints/test_strangers.py"]),
    ("secrets in the configuration or the command line", ["tests/training/test_secrets.py"]),
    (
        "fp16: more overflows in a row than updates may be skipped",
        [f"{CHECKPOINTS}::test_skips_while_the_loss_scale_falls"],
    ),
    (
        "SIGTERM during the last evaluation, SIGSTOP, a full disk for metrics",
        [
            f"{FIT}::test_sigterm_during_the_last_evaluation",
            f"{FIT}::test_a_full_disk_for_metrics",
            f"{FAULTS}::test_a_run_that_is_suspended",
        ],
    ),
    ("leaves of a batch without rows, or whose rows disagree", [BATCHES]),
    ("a donated state is used again", [f"{GUARDS}::test_a_donated_state"]),
    (
        "invalid clip_norm; models of all kinds; strings in a batch",
        [
            f"{GUARDS}::test_a_norm_to_clip_to",
            f"{BATCHES}::test_strings_are_refused",
            "tests/step/test_init.py::test_a_model_or_what",
            "tests/step/test_init.py::test_what_cannot_be_taken",
        ],
    ),
    ("a complex parameter", ["tests/step/test_frozen.py::test_a_complex_parameter"]),
    (
        "a frozen leaf under bf16 and fp16, in fp8 and int8",
        ["tests/step/test_frozen.py::test_a_frozen_leaf_keeps", "tests/step/test_frozen.py::test_the_audit_finds"],
    ),
    (
        "an exception in a running step, Ctrl-C twice during a save",
        [f"{FIT}::test_an_exception_in_a_running_step", f"{FAULTS}::test_a_second_ctrl_c"],
    ),
    ("a loss of power after a step is complete", [f"{FAULTS}::test_a_step_that_was_called_complete"]),
    ("a glob character in the URL of remote storage", [f"{REMOTE}::test_names_of_runs_are_no_patterns"]),
    (
        "a run that is suspended while it copies, and goes on when another has taken over",
        [f"{REMOTE}::test_a_suspended_run_changes_nothing", f"{REMOTE}::test_two_runs_that_are_suspended"],
    ),
    (
        "a damaged array that is exported or fetched",
        ["tests/exchange/test_exchange.py::test_nothing_is_exported", f"{REMOTE}::test_a_damaged_copy_is_not_used"],
    ),
    (
        "remote storage that is down, or never answers at SIGTERM",
        [f"{REMOTE}::test_a_server_that_is_down", f"{REMOTE}::test_frozen_storage"],
    ),
    ("a save that fails once", [f"{CHECKPOINTS}::test_a_failed_save_is_reported"]),
    (
        "a step that is damaged on disk and intact in remote storage, or the other way round",
        [f"{REMOTE}::test_a_damaged_step_is_restored", f"{REMOTE}::test_no_intact_copy_is_deleted"],
    ),
    ("another rate than the one in the state", [f"{CHECKPOINTS}::test_what_a_step_has_different"]),
    ("another optimizer or seed than in the step", [f"{CHECKPOINTS}::test_what_a_step_has_different"]),
    ("links in the folder of a run", ["tests/training/test_secrets.py::test_links"]),
    (
        "links, pipes and files of a terabyte in a checkpoint of a stranger",
        [
            "tests/checkpoints/test_strangers.py::test_links_and_pipes",
            "tests/checkpoints/test_strangers.py::test_an_index_of_gigabytes",
        ],
    ),
    ("ten thousand leaves with other names", ["tests/checkpoints/test_many_mismatches.py::test_ten_thousand_leaves"]),
    (
        "what a killed copy, fetch, export or deletion left",
        [
            f"{REMOTE}::test_what_a_killed_run_left",
            "tests/exchange/test_tensors.py::test_what_a_killed_export_left",
            f"{FAULTS}::test_a_partly_deleted_step",
        ],
    ),
    (
        "states that can be trained and not saved",
        [
            f"{CHECKPOINTS}::{test}"
            for test in ("test_frozen_leaves_of", "test_what_cannot_be_saved", "test_a_disk_without")
        ],
    ),
    (
        "64 bits where JAX has 32, escape sequences in a lease, a deleted working directory",
        [
            f"{CHECKPOINTS}::test_64_bits",
            f"{REMOTE}::test_a_second_run_is_refused",
            f"{DIRECTORIES}::test_a_deleted_working",
        ],
    ),
    ("a full disk for each writer of metrics", [f"{FIT}::test_a_full_disk_for", f"{FIT}::test_metrics_of_a_run"]),
    ("a loss that is NaN, infinite, negative or zero", [f"{FIT}::test_every_loss_is_written"]),
    ("one of several processes ends, by a signal, an exit code or an exception", [f"{LAUNCH}::test_the_last_line"]),
    (
        "Ctrl-C during imports and compilation, while garbage is collected",
        [f"{FIT}::test_ctrl_c_while_garbage_is_collected"],
    ),
    (
        "JAX_DISABLE_JIT; a terminal for ASCII",
        ["tests/step/test_guards.py::test_a_jit_that_compiles", "tests/analysis/test_tables.py::test_a_terminal_for"],
    ),
    ("two processes pass the same rows", [f"{LAUNCH}::test_a_process_with_slow_data"]),
]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rows",
        type=int,
        nargs="+",
        choices=range(1, len(ROWS) + 1),
        metavar="N",
        help="the numbers of the faults to test",
    )
    parser.add_argument("--quick", action="store_true", help="run one case of each test")
    args = parser.parse_args()
    if missing := missing_packages():
        sys.exit(f"packages for tests are missing: {', '.join(missing)}; pip install '.[test]' installs them")
    numbers, begin, num_failed = args.rows or range(1, len(ROWS) + 1), time.monotonic(), 0
    cases = run([test for number in numbers for test in ROWS[number - 1][1]], args.quick)
    for number in numbers:
        fault, tests = ROWS[number - 1]
        found = [case for case in cases if any(matches(test, case) for test in tests)]
        outcomes = [{child.tag for child in case} & {"failure", "error", "skipped"} for case in found]
        num_passed = outcomes.count(set())
        is_failed = not num_passed or any(outcome & {"failure", "error"} for outcome in outcomes)
        num_failed += is_failed
        summary = ", ".join([f"{num_passed} tests" if num_passed else "no test passed", *counts(found)])
        print(f"{number:3d}  {'FAILED' if is_failed else 'passed'}  {fault}: {summary}")
    print(f"{', '.join(counts(cases)) or 'no kills'} at random times, {time.monotonic() - begin:.0f} s")
    print(f"{len(numbers) - num_failed} passed, {num_failed} failed")
    return 1 if num_failed else 0


def missing_packages():
    """The packages of the extra `test` that are not installed."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        needed = tomllib.load(file)["project"]["optional-dependencies"]["test"]
    installed = {re.sub(r"[-_.]+", "-", found.name).lower() for found in metadata.distributions() if found.name}
    names = [re.match(r"[\w.-]+", requirement)[0] for requirement in needed]
    return [name for name in names if re.sub(r"[-_.]+", "-", name).lower() not in installed]


def run(tests, quick):
    """Runs tests, each once, in two processes. Returns their cases in pytest's report, as XML elements."""
    files = {file: Path(file).name for file in (test.partition("::")[0] for test in tests)}
    chosen = (f"{files[file]} and {name or files[file]}" for file, _, name in (test.partition("::") for test in tests))
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        command = [sys.executable, "-P", "-m", "pytest", "-n", "2", "--dist", "worksteal", "--disable-warnings"]
        command += ["--junit-xml", report.name, "-o", "junit_logging=system-out"]
        command += ["--full", *files, "-k", " or ".join(chosen)]
        subprocess.run(command + ["--cases", "1"] * quick, cwd=ROOT, stdout=sys.stderr)
        return list(ElementTree.parse(report.name).iter("testcase"))


def matches(test, case):
    """Whether a case is of a test: `file`, or `file::name` with a part of the names of functions."""
    file, _, name = test.partition("::")
    return case.get("classname") == file.removesuffix(".py").replace("/", ".") and name in case.get("name")


def counts(cases):
    """What cases did at random times: 'seed 3: 5 kills' is one of the lines that they print."""
    lines = re.findall(r"^seed \d+: (.*)", "\n".join(case.findtext("system-out", "") for case in cases), re.MULTILINE)
    found = Counter()
    for number, kind in re.findall(r"(\d+) (kills|cuts|suspensions)", "\n".join(lines)):
        found[kind] += int(number)
    return [f"{number} {kind}" for kind, number in found.items()]


if __name__ == "__main__":
    sys.exit(main())
