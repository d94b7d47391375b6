"""The benchmarks: the search of the ablation, and a run on GPUs. The lists of faults and of planted bugs."""

import ast
import json
import re
import subprocess
import sys

import ablation
import faults
import gpu
import mutants
import parity
import pytest
from support.paths import BENCHMARKS, REPO, importing


@pytest.mark.parametrize(("budget", "want"), [(9, 0), (30, 10), (100, 36), (2000, 290)])
def test_the_ablation_finds_the_largest_model_that_fits(budget, want):
    """With a peak that grows faster than linearly, and after measuring only a few models."""
    measured = {}
    peak = lambda layers: measured.setdefault(layers, 5 + 2 * layers + layers**2 / 60)
    assert ablation.largest(peak, budget) == want
    assert len(measured) < 12
    if want:
        assert peak(want) <= budget < peak(want + 2)


@pytest.mark.full
def test_the_gpu_benchmark_reports_on_simulated_devices(tmp_path):
    shapes = ["--layers", "1", "--width", "16", "--heads", "2", "--seq", "8", "--rows", "1", "--vocab", "16"]
    runs = ["--simulate", "2", "--steps", "1", "--rounds", "1", "--forms", "plain", "full"]
    report = tmp_path / "report.json"
    command = [sys.executable, BENCHMARKS / "gpu.py", *shapes, *runs, "--json", report]
    shown = subprocess.run(command, env=importing(BENCHMARKS), check=True, stdout=subprocess.PIPE, text=True).stdout
    assert "Peaks are not measured" in shown
    result = json.loads(report.read_text())
    assert result["ratio"] > 0 and result["measured_flops"] > 0 and result["mfu"] is None
    assert result["device"]["count"] == 2 and result["shapes"]["layers"] == 1
    assert result["max_loss_difference"] < 0.05
    assert result["forms"].keys() == {"plain", "full"}
    for form in result["forms"].values():
        assert form["error"] is None and form["peak_bytes"] is None and form["compiled_peak_bytes"] > 0
        assert form["step_s"] > 0 and form["compile_s"] > 0


@pytest.mark.full
def test_losses_are_compared_on_simulated_devices():
    command = [sys.executable, BENCHMARKS / "parity.py", "--simulate", "1", "--models", "odd", "--steps", "2"]
    run = subprocess.run([*command, "--forms", "none", "inputs"], env=importing(BENCHMARKS), stdout=subprocess.PIPE)
    assert run.returncode == 0 and b"2 of 2 agree" in run.stdout


def test_a_process_of_a_form_that_ends_early_is_an_error_of_this_form():
    assert gpu.measured("plain", "--layers", "many") == {"error": "the process ended with exit code 2"}
    losses, broken = parity.train(("odd", "none"), ["--steps", "many"])
    assert re.fullmatch(r"exit code 2: .*invalid int value: 'many'", losses) and broken == []


@pytest.mark.parametrize("losses", [[3.0, 2.1], [3.0, float("nan")], "Traceback"])
def test_losses_that_differ_are_found(losses):
    assert parity.compared([3.0, 2.0], [3.0, 2.0], 1e-5) == ("loss 3.0000 to 2.0000, bit for bit", True)
    assert not parity.compared(losses, [3.0, 2.0], 1e-5)[1]
    assert not parity.compared([3.0, 2.0], losses, 1e-5)[1]


def missing_tests(ids):
    """The ids of tests that do not exist; the name of a function may be its beginning."""
    for file, _, name in (test.partition("[")[0].partition("::") for test in ids):
        if not (REPO / file).exists() or not re.search(rf"^def \w*{name}", (REPO / file).read_text(), re.MULTILINE):
            yield f"{file}::{name}"


def test_the_tests_of_each_fault_exist():
    assert list(missing_tests(test for _, tests in faults.ROWS for test in tests)) == []


BUGS = mutants.bugs()


def test_each_bug_can_be_planted():
    """Its code is where the list says, once, and the file with the bug is still Python."""
    lost = []
    for bug in BUGS.values():
        try:
            path, source = bug.planted(REPO / "zerojax")
            assert ast.dump(ast.parse(source)) != ast.dump(ast.parse(path.read_text())) and bug.tests
        except ValueError as error:
            lost.append(f"{bug.promise} {error}")
    assert not lost
    assert list(missing_tests(test for bug in BUGS.values() for test in bug.tests)) == []


def test_a_bug_is_found_by_the_name_of_its_function(tmp_path):
    source = """
class A:
    def f(self, x):
        # é
        return (
            x +  # a comment
            1
        )

class B:
    def f(self, x):
        y = x + 1
        return y * 2

LIMIT = 3 * 7
"""
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "module.py").write_text(source)
    bug = mutants.Bug("", "room/A.f", "x+1", "x - 1", [])
    planted = lambda **changes: bug._replace(**changes).planted(tmp_path)[1]
    assert "(x - 1)" in planted() and "y = x + 1" in planted()
    both = {"place": "room/B.f", "code": "y = x + 1\nreturn y * 2", "replacement": "del x\nreturn 0"}
    assert planted(**both) == source.replace("y = x + 1\n        return y * 2", "del x\n        return 0")
    assert "LIMIT = (2)" in planted(place="room/LIMIT", code="3*7", replacement="2")
    with pytest.raises(ValueError, match="2 definitions in room/ have the name 'f'"):
        planted(place="room/f")
    with pytest.raises(ValueError, match="the code occurs 0 times in room/B"):
        planted(place="room/B", code="x + 2")


def test_bugs_are_selected_by_number_and_by_place():
    assert mutants.selected([], BUGS) == BUGS
    assert list(mutants.selected(["2", "4-6"], BUGS)) == [2, 4, 5, 6]
    assert {bug.place.partition("/")[0] for bug in mutants.selected(["training/*"], BUGS).values()} == {"training"}
    with pytest.raises(SystemExit, match=r"'nowhere' selects no bug"):
        mutants.selected(["nowhere"], BUGS)


@pytest.mark.full
def test_only_a_test_that_fails_kills_a_bug(tmp_path):
    folder = mutants.copied(tmp_path)
    test = "tests/sharding/test_padding.py::test_zeros_are_appended_and_cut_off"
    code = "array.shape[self.dim] - self.count"
    found = mutants.Bug("Zeros are cut off.", "sharding/Padding.crop", code, "None", [test])
    harmless = found._replace(replacement="array.shape[self.dim] - 1 * self.count")
    moved = found._replace(code="a_line_that_is_gone")
    invalid = found._replace(replacement="= None")
    bugs = {"killed": [found], "SURVIVED": [harmless], "NOT RUN": [moved, invalid]}
    for result, each in bugs.items():
        assert [mutants.outcome(bug, folder)[0] for bug in each] == [result] * len(each)
    assert (folder / "zerojax/sharding/padding.py").read_text() == (REPO / "zerojax/sharding/padding.py").read_text()


@pytest.mark.full
def test_bugs_are_planted_where_zerojax_is_imported_from(tmp_path):
    """Another zerojax than the copy would let every bug survive."""
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "copy"
    mutants.copied(elsewhere)
    mutants.copied(folder)
    (folder / "zerojax").rename(folder / "renamed")
    (folder / "zerojax").symlink_to(elsewhere / "zerojax")
    code, output = mutants.run(["tests/sharding/test_padding.py::test_zeros_are_appended_and_cut_off"], folder)
    assert code not in (mutants.PASSED, mutants.FAILED) and f"zerojax is imported from {elsewhere}" in output
