"""What a release consists of besides the package: its version in all places, templates, and commands of benchmarks."""

import io
import re
import shlex
import subprocess
import sys
import tarfile

import pytest
import repack
import yaml
from support.paths import BENCHMARKS, REPO, importing

import zerojax

TEMPLATES = REPO / ".github" / "ISSUE_TEMPLATE"
PAGE = (REPO / "docs" / "benchmarks.md").read_text()
COMMANDS = re.findall(r"^\| `python scripts/benchmarks/(.*?)` \|", PAGE, re.MULTILINE)
PARTS = {"forms.py", "gpt.py", "models.py", "plain.py", "timing.py"}  # are imported by the benchmarks


def test_the_version_is_the_same_in_all_places():
    assert yaml.safe_load((REPO / "CITATION.cff").read_text())["version"] == zerojax.__version__
    newest = re.findall(r"^## \[(\d.*?)\]", (REPO / "CHANGELOG.md").read_text(), re.MULTILINE)[:1]
    assert newest in ([], [zerojax.__version__])


def test_sections_of_the_changelog_have_the_names_of_its_format():
    sections = re.findall(r"^### (.*)$", (REPO / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections and set(sections) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_templates_are_forms_and_a_bug_report_has_the_output_of_doctor():
    for name in "feature_request", "bug_report":
        form = yaml.safe_load((TEMPLATES / f"{name}.yml").read_text())
        fields = [field for field in form["body"] if field["type"] != "markdown"]
        assert form["name"] and form["description"] and len({field["id"] for field in fields}) == len(fields)
        assert all(field["attributes"]["label"] for field in fields)
    (doctor,) = [field for field in form["body"] if "zerojax doctor" in field["attributes"].get("label", "")]
    assert doctor["validations"]["required"]


def test_every_benchmark_has_a_command():
    assert {command.split()[0] for command in COMMANDS} == {path.name for path in BENCHMARKS.glob("*.py")} - PARTS


@pytest.mark.full
@pytest.mark.parametrize("command", COMMANDS)
def test_the_options_of_a_benchmark_exist(command):
    script, *arguments = shlex.split(command)
    run = [sys.executable, BENCHMARKS / script, "--help"]
    shown = subprocess.run(run, env=importing(BENCHMARKS, REPO), check=True, capture_output=True, text=True).stdout
    assert "usage:" in shown
    for option in filter(lambda word: word.startswith("--"), arguments):
        assert re.search(rf"{option}\b(?!-)", shown), option


def archive(mtime, mode, owner, order):
    """An sdist as two machines could make it."""
    result = io.BytesIO()
    with tarfile.open(fileobj=result, mode="w:gz") as file:
        for name in order:
            info = tarfile.TarInfo(f"package/{name}")
            info.mtime, info.mode, info.uname, info.size = mtime, mode, owner, len(name)
            file.addfile(info, io.BytesIO(name.encode()))
    return result.getvalue()


def test_a_repacked_sdist_depends_on_its_contents_alone():
    one, other = archive(1.5, 0o644, "alice", ["a.py", "b.py"]), archive(2e9, 0o664, "bob", ["b.py", "a.py"])
    assert one != other and repack.repacked(one, 10**9) == repack.repacked(other, 10**9)
    assert repack.repacked(one, 10**9) != repack.repacked(archive(1.5, 0o644, "alice", ["a.py"]), 10**9)
    with tarfile.open(fileobj=io.BytesIO(repack.repacked(one, 10**9))) as file:
        assert {each.name: file.extractfile(each).read() for each in file} == {
            "package/a.py": b"a.py",
            "package/b.py": b"b.py",
        }
