"""Plants bugs in a copy of zerojax, one at a time, and says which of them no test finds.

    python scripts/mutants.py                    # all bugs of mutants.toml
    python scripts/mutants.py --list             # only prints them
    python scripts/mutants.py --only 3 10-12     # by number
    python scripts/mutants.py --only 'step/*'    # by the name of the function

A bug is an expression, or a few statements, of one function and what replaces them, with the promise that it breaks and
the tests that hold the promise. A function is found by its name in a room of the package, and code in it as a syntax
tree: modules may be moved, merged and formatted, and comments and all other lines changed.
The tests first run with a copy that is not changed, and have to pass. Then they run once for each bug, and at least one
of them has to fail. Prints one line per bug. The last line is `N killed, N survived`. The exit code is 1 if a bug
survived, and 2 if the tests of one did not run: its code is gone, a test has another name, or nothing can be imported.
"""

import argparse
import ast
import fnmatch
import functools
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
        place: 'room/name': a function, class or constant in a folder or module of zerojax, as in 'step/Update.run'. The
            names of what it is defined in can be left out if the rest is unique in the room.
        code: an expression, or statements, found exactly once in it.
        replacement: takes its place.
        tests: ids of the tests that hold the promise, as pytest takes them.
    """

    promise: str
    place: str
    code: str
    replacement: str
    tests: list[str]

    def planted(self, package):
        """Returns (path of the file, its source with the bug). Raises ValueError if its place is not found."""
        room, _, name = self.place.partition("/")
        paths = sorted((package / room).rglob("*.py")) or [package / f"{room}.py"]
        sources = {path: path.read_bytes() for path in paths}
        known = [(full, path, node) for path in paths for full, node in definitions_in(sources[path])]
        exact = [(path, node) for full, path, node in known if full == name]
        found = exact or [(path, node) for full, path, node in known if full.endswith(f".{name}")]
        if len(found) != 1:
            raise ValueError(f"{len(found)} definitions in {room}/ have the name {name!r}")
        ((path, node),) = found
        matches = list(occurrences(node, ast.parse(self.code).body))
        if len(matches) != 1:
            raise ValueError(f"the code occurs {len(matches)} times in {self.place}: {self.code!r}")
        ((first, last),) = matches
        lines = sources[path].splitlines(keepends=True)
        begin, end = (
            sum(map(len, lines[: line - 1])) + column
            for line, column in ((first.lineno, first.col_offset), (last.end_lineno, last.end_col_offset))
        )
        if isinstance(first, ast.expr):
            replacement = f"({self.replacement})"
        else:
            replacement = self.replacement.strip().replace("\n", "\n" + " " * first.col_offset)
        source = sources[path][:begin] + replacement.encode() + sources[path][end:]
        return path, source.decode()


@functools.cache
def definitions_in(source):
    return list(definitions(ast.parse(source)))


def definitions(tree, prefix=""):
    """Yields (name with the names of what it is defined in, node) for functions, classes and assigned constants."""
    for node in ast.iter_child_nodes(tree):
        name = ""
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = f"{prefix}{node.name}"
            yield name, node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and not isinstance(tree, ast.FunctionDef):
            for target in getattr(node, "targets", [getattr(node, "target", None)]):
                if isinstance(target, ast.Name):
                    yield f"{prefix}{target.id}", node
        yield from definitions(node, f"{name}." if name else prefix)


def occurrences(tree, wanted):
    """Yields (first node, last node) where an expression, or consecutive statements, have the syntax that is wanted."""
    if len(wanted) == 1 and isinstance(wanted[0], ast.Expr):
        text = ast.dump(wanted[0].value)
        yield from ((node, node) for node in ast.walk(tree) if isinstance(node, ast.expr) and ast.dump(node) == text)
        return
    texts = [ast.dump(node) for node in wanted]
    for node in ast.walk(tree):
        for body in (value for _, value in ast.iter_fields(node) if isinstance(value, list)):
            for k in range(len(body) - len(texts) + 1):
                part = body[k : k + len(texts)]
                if all(isinstance(each, ast.AST) for each in part) and [ast.dump(each) for each in part] == texts:
                    yield part[0], part[-1]


def bugs():
    """The bugs of the list, by number."""
    return dict(enumerate((Bug(**each) for each in tomllib.loads(BUGS.read_text())["bug"]), start=1))


def selected(only, found):
    """The bugs that numbers ('3'), ranges ('3-5') or globs on places select; all of them if there are none."""

    def matches(number, bug, pattern):
        if by_number := re.fullmatch(r"(\d+)(?:-(\d+))?", pattern):
            first, last = by_number.group(1), by_number.group(2) or by_number.group(1)
            return int(first) <= number <= int(last)
        return fnmatch.fnmatchcase(bug.place, pattern)

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
    try:
        path, source = bug.planted(folder / "zerojax")
    except (OSError, ValueError) as error:
        return "NOT RUN", str(error)
    original = path.read_text()
    try:
        path.write_text(source)
        code, output = run(bug.tests, folder)
    finally:
        path.write_text(original)
    return {PASSED: "SURVIVED", FAILED: "killed"}.get(code, "NOT RUN"), output


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="BUG", help="numbers, ranges, or globs on places")
    parser.add_argument("--list", action="store_true", help="print the bugs, and run nothing")
    args = parser.parse_args()
    chosen = selected(args.only, bugs())
    if args.list:
        for number, bug in chosen.items():
            print(f"{number:3d}  {bug.place}: {bug.promise}")
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
            print(f"{number:3d}  {result:8s}  {bug.place}: {bug.promise}  ({seconds:.0f} s)", flush=True)
            if result == "NOT RUN":
                print(output[-4000:], file=sys.stderr)
    if counts["NOT RUN"]:
        print(f"{counts['NOT RUN']} not run")
    print(f"{counts['killed']} killed, {counts['SURVIVED']} survived")
    return 2 if counts["NOT RUN"] else 1 if counts["SURVIVED"] else 0


if __name__ == "__main__":
    sys.exit(main())
