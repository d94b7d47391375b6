"""The faults that a training run has to survive, and the bad input that it has to refuse: a line for each.

    python scripts/faults.py              all of them, with kills at random times
    python scripts/faults.py --quick      without repetitions
    python scripts/faults.py --rows 1 12  some of them

Each row runs the tests that hold it, in a process of its own; those of faults in a run start, kill and hang processes
themselves. The last line is `N passed, N failed`; the exit code is 1 if one failed.
"""

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
FAULTS, CHECKPOINTS = "tests/checkpoints/test_faults.py", "tests/checkpoints/test_checkpoints.py"
ERRORS, PRECISION = "tests/docs/test_errors.py", "tests/step/test_precision.py"
LAUNCH = "tests/processes/test_launch.py"
SKIPPED = f"{PRECISION}::test_a_step_with_a_bad_gradient_is_skipped"
# What is injected, and the tests of what has to happen.
ROWS = [
    ("killed at random times while it saves", [f"{FAULTS}::test_a_run_that_is_killed_while_it_saves"]),
    ("killed at random times while old steps are deleted", [f"{FAULTS}::test_a_run_that_is_killed_while_it_deletes"]),
    ("the script ends without closing", [f"{FAULTS}::test_a_script_that_does_not_close"]),
    ("an exception in the loop", [f"{CHECKPOINTS}::test_an_exception_in_the_loop"]),
    ("SIGTERM, one process", [f"{FAULTS}::test_sigterm_saves_and_the_exit_code_is_75"]),
    ("SIGTERM to one of two processes", [f"{FAULTS}::test_sigterm_to_one_of_two"]),
    (
        "SIGTERM handlers of the user",
        [f"{CHECKPOINTS}::test_sigterm_saves_and_ends", f"{CHECKPOINTS}::test_handlers_that_call"],
    ),
    ("SIGKILL of a peer", [f"{FAULTS}::test_the_peer_of_a_killed_process"]),
    ("a process that hangs, a peer that hangs", [f"{FAULTS}::test_a_hang", f"{FAULTS}::test_a_process_that_hangs"]),
    ("disk full", [f"{FAULTS}::test_a_full_disk"]),
    ("two saves fail in a row", [f"{CHECKPOINTS}::test_a_failed_save_is_reported"]),
    (
        "a bit flipped, a page zeroed",
        [f"{CHECKPOINTS}::{test}" for test in ("test_damaged_arrays", "test_a_flipped_bit", "test_an_array_that_was")],
    ),
    (
        "a file cut off or deleted, or not read by one process",
        [
            f"{CHECKPOINTS}::test_damaged_arrays",
            f"{FAULTS}::test_what_one_of_two",
            f"{FAULTS}::test_two_processes_that",
        ],
    ),
    ("manifest damaged", [f"{CHECKPOINTS}::test_a_damaged_manifest"]),
    ("commit marker deleted", [f"{CHECKPOINTS}::test_a_step_that_is_not_marked"]),
    ("foreign folders among the steps", [f"{CHECKPOINTS}::test_other_folders"]),
    ("every step bad", [f"{CHECKPOINTS}::test_where_every_step_is_damaged"]),
    ("two runs in one directory", [f"{CHECKPOINTS}::test_a_second_run"]),
    ("a leaf missing or left over", [f"{CHECKPOINTS}::test_leaves_that_are_missing"]),
    ("another shape", [f"{CHECKPOINTS}::test_another_shape"]),
    ("another dtype", [f"{CHECKPOINTS}::test_another_dtype"]),
    ("another optimizer", [f"{CHECKPOINTS}::test_dropped_layers"]),
    ("restored over every pair of stage and mesh", [f"{CHECKPOINTS}::test_a_state_is_restored"]),
    (
        "a dim that the axis does not divide",
        ["tests/sharding/test_placement.py::test_explain_lists_what_is_not_sharded"],
    ),
    ("a leaf that should be sharded and is not", ["tests/audit/test_audit.py::test_a_replicated_leaf_is_an_error"]),
    ("NaN in the gradients of one shard", [SKIPPED]),
    (
        "NaN in every step",
        [f"{CHECKPOINTS}::test_skipped_updates", f"{CHECKPOINTS}::test_a_state_that_is_not_finite"],
    ),
    ("inf in bf16", [SKIPPED]),
    ("a skipped step: counters, schedule, bias correction", [SKIPPED]),
    ("a jump of the loss", [f"{CHECKPOINTS}::test_a_jump_of_the_loss"]),
    ("resumed in mid-epoch", [f"{CHECKPOINTS}::test_a_run_that_resumes_in_the_middle"]),
    (
        "another number of processes",
        [f"{CHECKPOINTS}::test_data_of_another_number", f"{FAULTS}::test_two_processes_write"],
    ),
    ("N + M steps against N, resume, M", [f"{CHECKPOINTS}::test_a_run_that_resumes_is_the_run"]),
    ("configuration differs between processes", [f"{LAUNCH}::test_a_difference_is_named"]),
    ("bad stage, axis, batch, pattern, empty model", [ERRORS]),
    (
        "a leaf that is no array, metadata that is not JSON",
        [f"{ERRORS}::test_a_leaf_that_is_no_array", f"{CHECKPOINTS}::test_where_the_data"],
    ),
    ("out of device memory", [f"{ERRORS}::test_memory_that_is_exhausted"]),
    ("an unsupported jax or flax", [f"{ERRORS}::test_unsupported_versions"]),
    ("a hostile safetensors header or path", ["tests/exchange/test_tensors.py"]),
    ("a checkpoint of a newer version", [f"{CHECKPOINTS}::test_a_checkpoint_of_a_newer_version"]),
]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", choices=range(1, len(ROWS) + 1), metavar="N")
    parser.add_argument("--quick", action="store_true", help="once each, and not every pair of stage and mesh")
    args = parser.parse_args()
    failed, kills, begin = [], 0, time.monotonic()
    for number in args.rows or range(1, len(ROWS) + 1):
        what, tests = ROWS[number - 1]
        with Console(stderr=True).status(what):
            passed, told, killed = run(tests, args.quick)
        kills += killed
        print(f"{number:3d}  {'passed' if passed else 'FAILED'}  {what}: {told}", flush=True)
        failed += [] if passed else [number]
    total = len(args.rows or ROWS)
    print(f"{kills} kills at random times, {time.monotonic() - begin:.0f} s")
    print(f"{total - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


def run(tests, quick):
    """(whether all passed, what pytest and the tests said, kills at random times)."""
    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
    names = " or ".join(name for test in tests if (name := test.partition("::")[2]))
    command = [sys.executable, "-P", "-m", "pytest", "-s", "-p", "no:warnings", "--no-header", *files]
    command += ["-k", names] * bool(names) + ["--full"] * (not quick)
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    counted = re.search(r"(\d+) passed", ended.stdout)
    seeds = re.findall(r"seed \d+: \d+ kills", ended.stdout)
    if ended.returncode or not counted:
        print(ended.stdout[-4000:], file=sys.stderr)
    told = [f"{counted.group(1)} tests" if counted else "no test passed", *seeds]
    return not ended.returncode and bool(counted), ", ".join(told), sum(int(seed.split()[2]) for seed in seeds)


if __name__ == "__main__":
    sys.exit(main())
