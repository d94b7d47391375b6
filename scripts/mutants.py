"""Plants bugs in a copy of zerojax, one at a time, and says which of them no test finds.

    python scripts/mutants.py                    # all bugs of mutants.toml
    python scripts/mutants.py --list             # only prints them
    python scripts/mutants.py --only 3 10-12     # by number
    python scripts/mutants.py --only 'step/*'    # by file

A bug is a text of one file and what replaces it, with the promise that it breaks and the tests that hold the promise.
The tests first run with a copy that is not changed, and have to pass. Then they run once for each bug, and at least one
of them has to fail. Prints one line per bug. The last line is `N killed, N survived`. The exit code is 1 if a bug
survived, and 2 if the tests of one did not run: its text is gone, a test has another name, or nothing can be imported.
"""

import argparse
import fnmatch
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
BUGS = Path(__file__).with_suffix(".toml")
PASSED, FAILED = 0, 1  # exit codes of pytest. All others mean that the tests did not run.
TIMEOUT_S = 600

# The tests must not import an installed zerojax instead of the copy.
PLUGIN = """
import sys
from pathlib import Path

import pytest


def pytest_collection_finish(session):
    found = Path(sys.modules["zerojax"].__file__).resolve().parents[1]
    if found != Path(__file__).resolve().parent:
        raise pytest.UsageError(f"zerojax is imported from {found}")
"""


class Bug(NamedTuple):
    """A bug to plant.

    Attributes:
        promise: what the code promises without the bug.
        file: path below zerojax/.
        text: occurs exactly once in the file.
        replacement: takes its place.
        tests: ids of the tests that hold the promise, as pytest takes them.
    """

    promise: str
    file: str
    text: str
    replacement: str
    tests: list[str]

    def planted(self, source):
        """The source of the file with the bug. Raises ValueError if its place is not found."""
        if (count := source.count(self.text)) != 1:
            raise ValueError(f"the text occurs {count} times in {self.file}: {self.text!r}")
        return source.replace(self.text, self.replacement)


def bugs():
    """The bugs of the list, by number."""
    return dict(enumerate((Bug(**each) for each in tomllib.loads(BUGS.read_text())["bug"]), start=1))


def selected(only, found):
    """The bugs that numbers ('3'), ranges ('3-5') or globs on files select; all of them if there are none."""

    def matches(number, bug, pattern):
        if by_number := re.fullmatch(r"(\d+)(?:-(\d+))?", pattern):
            first, last = by_number.group(1), by_number.group(2) or by_number.group(1)
            return int(first) <= number <= int(last)
        return fnmatch.fnmatchcase(bug.file, pattern)

    for pattern in only:
        if not any(matches(number, bug, pattern) for number, bug in found.items()):
            raise SystemExit(f"mutants: --only {pattern!r} selects no bug")
    return {n: bug for n, bug in found.items() if not only or any(matches(n, bug, pattern) for pattern in only)}


def copied(folder):
    """Copies zerojax to a folder, with a plugin for pytest that sees to it that the copy is tested."""
    shutil.copytree(ROOT / "zerojax", folder / "zerojax", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "copied.py").write_text(PLUGIN)
    return folder


def run(tests, folder):
    """Runs tests with the copy of zerojax in a folder. Returns (exit code of pytest, its output)."""
    options = ["-x", "--disable-warnings", "-p", "no:cacheprovider", "-p", "copied"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    # Like -P, but also for processes that tests start: nothing is imported from the current folder, the checkout.
    environ = {**os.environ, "PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    try:
        ended = subprocess.run(command, cwd=ROOT, env=environ, timeout=TIMEOUT_S, **output)
    except subprocess.TimeoutExpired:
        return None, f"no result after {TIMEOUT_S} s"
    return ended.returncode, ended.stdout


def outcome(bug, folder):
    """Plants a bug, runs its tests, and removes it: ('killed', 'SURVIVED' or 'NOT RUN', output of the tests)."""
    path = folder / "zerojax" / bug.file
    source = path.read_text()
    try:
        path.write_text(bug.planted(source))
        code, output = run(bug.tests, folder)
    except (OSError, ValueError) as error:
        return "NOT RUN", str(error)
    finally:
        path.write_text(source)
    return {PASSED: "SURVIVED", FAILED: "killed"}.get(code, "NOT RUN"), output


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="BUG", help="numbers, ranges, or globs on files")
    parser.add_argument("--list", action="store_true", help="print the bugs, and run nothing")
    args = parser.parse_args()
    chosen = selected(args.only, bugs())
    if args.list:
        for number, bug in chosen.items():
            print(f"{number:3d}  {bug.file}: {bug.promise}")
        return 0
    counts = {"killed": 0, "SURVIVED": 0, "NOT RUN": 0}
    with tempfile.TemporaryDirectory(prefix="zerojax-mutants-") as name:
        folder = copied(Path(name))
        code, output = run(dict.fromkeys(test for bug in chosen.values() for test in bug.tests), folder)
        if code != PASSED:
            print(output[-4000:], file=sys.stderr)
            raise SystemExit("mutants: the tests do not pass without a bug")
        for number, bug in chosen.items():
            begin = time.monotonic()
            result, output = outcome(bug, folder)
            counts[result] += 1
            seconds = time.monotonic() - begin
            print(f"{number:3d}  {result:8s}  {bug.file}: {bug.promise}  ({seconds:.0f} s)", flush=True)
            if result == "NOT RUN":
                print(output[-4000:], file=sys.stderr)
    if counts["NOT RUN"]:
        print(f"{counts['NOT RUN']} not run")
    print(f"{counts['killed']} killed, {counts['SURVIVED']} survived")
    return 2 if counts["NOT RUN"] else 1 if counts["SURVIVED"] else 0


if __name__ == "__main__":
    sys.exit(main())
