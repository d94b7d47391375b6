"""`zerojax init` writes a project that trains as it is, and touches nothing that is there."""

import ast
import importlib.util
import json
import os
import subprocess
import sys

import pytest
import yaml
from click.testing import CliRunner
from support.paths import REPO, importing

import zerojax
from zerojax.cli import main
from zerojax.cli.commands import project_files

FILES = {"train.py", "config.toml", "slurm.sh", "jobset.yaml", "README.md"}


def init(directory):
    return CliRunner().invoke(main, ["init", str(directory)])


def small(project):
    """Makes the model of a project small."""
    config = project / "config.toml"
    text = config.read_text()
    for name, value in {"width": 16, "layers": 2, "heads": 2, "context": 16, "every": 2, "log_every": 1}.items():
        (line,) = [line for line in text.splitlines() if line.startswith(f"{name} =")]
        text = text.replace(line, f"{name} = {value}")
    config.write_text(text)


def imported(project, monkeypatch):
    spec = importlib.util.spec_from_file_location("project_train", project / "train.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look for it
    spec.loader.exec_module(module)
    return module


def rows(project, kind="loss"):
    lines = map(json.loads, (project / "run" / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row[kind] for row in lines if kind in row}


def test_the_project_trains_and_continues(tmp_path, monkeypatch):
    """Interrupted after four of six steps, it has the same losses as without an interruption."""
    losses, fit = {}, zerojax.fit

    def until(end):
        return lambda zero, state, step, data, num_steps, *args, **options: fit(
            zero, state, step, data, min(num_steps, end), *args, **options
        )

    for name, ends in (("whole", [6]), ("two", [4, 6])):
        project = tmp_path / name
        assert init(project).exit_code == 0
        small(project)
        train = imported(project, monkeypatch)
        for end in ends:
            monkeypatch.setattr(zerojax, "fit", until(end))
            result = train.main(["--steps", "6"])
        losses[name] = rows(project)
        assert set(losses[name]) == set(range(1, 7)) and result["loss"] == rows(project, "eval/loss")[6]
    assert losses["two"] == losses["whole"]
    assert losses["whole"][6] < losses["whole"][1]


@pytest.mark.once
def test_the_project_runs_as_a_script_on_two_simulated_devices(tmp_path):
    project = tmp_path / "My Project"
    shown = init(project)
    assert shown.exit_code == 0 and f"python {project / 'train.py'} --devices 8" in shown.output
    small(project)
    environ = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "NPROC", "JAX_PLATFORMS")}
    command = [sys.executable, "-P", str(project / "train.py"), "--devices", "2", "--steps", "3"]
    ended = subprocess.run(command, env=environ | importing(REPO), cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1].startswith("loss ")
    (start,) = map(json.loads, (project / "run" / "starts.jsonl").read_text().splitlines())
    assert start["devices"].startswith("2 x ") and start["config"]["model"]["width"] == 16


def test_an_unknown_setting_is_an_error(tmp_path, monkeypatch):
    init(tmp_path / "a")
    train, config = imported(tmp_path / "a", monkeypatch), tmp_path / "a" / "config.toml"
    config.write_text(config.read_text().replace("width =", "widht ="))
    with pytest.raises(TypeError, match="widht"):
        train.read_config(config)


def test_every_file_is_written_and_is_valid(tmp_path):
    assert init(tmp_path / "My Project 2!").exit_code == 0
    files = {file.name: file.read_text() for file in (tmp_path / "My Project 2!").iterdir()}
    assert set(files) == FILES and not [name for name, text in files.items() if "__NAME__" in text]
    ast.parse(files["train.py"])
    manifest = yaml.safe_load(files["jobset.yaml"])
    assert manifest["kind"] == "JobSet" and manifest["metadata"]["name"] == "my-project-2"
    assert "#SBATCH --job-name=my-project-2" in files["slurm.sh"]
    checked = subprocess.run(["bash", "-n"], input=files["slurm.sh"], text=True, capture_output=True)
    assert checked.returncode == 0, checked.stderr


def test_names_are_valid_for_kubernetes():
    for name, short in [("A_b", "a-b"), ("7", "run-7"), ("ж", "run"), ("x" * 90, "x" * 40), ("", "run")]:
        assert yaml.safe_load(project_files(name)["jobset.yaml"])["metadata"]["name"] == short


def test_the_launch_files_are_those_of_the_examples():
    """But for what belongs to the project: whoever changes one has to change the other."""
    for name, own in {"slurm.sh": 6, "jobset.yaml": 14}.items():
        ours, theirs = project_files("zerojax")[name], (REPO / "examples" / "launch" / name).read_text()
        different = set(ours.splitlines()) ^ set(theirs.splitlines())
        assert len(different) <= own, different


def test_a_directory_that_is_not_empty_is_refused(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / ".git").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name, message in {"full": "is not empty", "file": "cannot be written"}.items():
        shown = init(tmp_path / name)
        assert shown.exit_code == 1 and message in shown.output and "fix:" in shown.output
        assert "Traceback" not in shown.output
    assert [file.name for file in (tmp_path / "full").iterdir()] == [".git"]
    (tmp_path / "empty").mkdir()
    assert init(tmp_path / "empty").exit_code == 0


def test_the_templates_are_in_the_package():
    import tomllib

    patterns = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["zerojax"]
    folder = REPO / "zerojax" / "cli" / "templates"
    assert "cli/templates/*" in patterns and all(file.is_file() for file in folder.iterdir())
