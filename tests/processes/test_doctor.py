"""The doctor finds what is planted, and tells what to do."""

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from zerojax import doctor
from zerojax.cli import main
from zerojax.doctor import Check, Status, diagnose


def named(checks):
    return {check.name: check for check in checks}


def test_a_sound_machine(tmp_path):
    """Simulated devices are for information, and not wrong."""
    checks = named(diagnose(tmp_path / "new" / "run", {"JAX_PLATFORMS": "cpu"}))
    assert all(check.status is not Status.WRONG for check in checks.values())
    assert checks["devices"].found == "8 of 'cpu' (cpu)" and checks["processes"].found == "one alone"
    assert "GiB free" in checks["checkpoints"].found and not (tmp_path / "new").exists()
    assert "jax " in checks["versions"].found and "GiB free of" in checks["host memory"].found


def test_a_cpu_where_there_is_an_accelerator_is_wrong():
    gpu = lambda pattern: ["/dev/nvidia0"] if "nvidia" in pattern else []
    (check,) = doctor._devices({}, gpu)
    assert check.status is Status.WRONG and "though there is /dev/nvidia0" in check.found
    assert "jax[cuda13]" in check.fix
    (check,) = doctor._devices({"JAX_PLATFORMS": "cpu"}, gpu)
    assert check.status is Status.INFO and "as JAX_PLATFORMS=cpu says" in check.found
    (check,) = doctor._devices({}, lambda pattern: ["/dev/vfio/0"] if "vfio" in pattern else [])
    assert "jax[tpu]" in check.fix


def test_unsupported_versions_are_wrong(monkeypatch):
    right = doctor.metadata.version
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "0.4.30" if name == "jax" else right(name))
    (check,) = doctor._versions()
    assert check.status is Status.WRONG and check.fix.startswith("pip install 'jax>=")


def test_a_directory_that_cannot_be_written_is_wrong(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor.tempfile, "NamedTemporaryFile", refuse)
    (check,) = doctor._directory(tmp_path)
    assert check.status is Status.WRONG and "Permission denied" in check.found and "rights" in check.fix


def test_the_file_system_is_that_of_the_deepest_mount(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text("a / ext4 rw\nb /data nfs4 rw\nc /data/fast xfs rw\nd /database tmpfs rw\n")
    at = lambda path: doctor.file_system(Path(path), str(mounts))
    assert [at("/x"), at("/data/x"), at("/data/fast/x"), at("/database")] == ["ext4", "nfs4", "xfs", "tmpfs"]
    assert doctor.file_system(tmp_path, str(tmp_path / "none")) == "unknown"


@pytest.mark.parametrize(
    ("variables", "status", "found"),
    [
        ({"RANK": "1"}, Status.WRONG, "MASTER_ADDR and MASTER_PORT and WORLD_SIZE are not set"),
        (
            {"MASTER_ADDR": "a", "MASTER_PORT": "5", "WORLD_SIZE": "4", "RANK": "1"},
            Status.OK,
            "torchrun: process 1 of 4, process 0 is a:5",
        ),
    ],
)
def test_variables_of_launchers(variables, status, found):
    check = named(diagnose(environ=variables))["processes"]
    assert check.status is status and check.found.startswith(found)
    assert bool(check.fix) == (status is Status.WRONG)


def test_the_exit_code_tells_what_is_wrong(monkeypatch, tmp_path):
    shown = CliRunner().invoke(main, ["doctor", "--checkpoints", str(tmp_path)])
    assert shown.exit_code == 0 and "versions" in shown.stdout and "checkpoints" in shown.stdout
    monkeypatch.setattr(doctor, "diagnose", lambda directory: [Check("x", Status.WRONG, "is [not] there", "do it")])
    shown = CliRunner().invoke(main, ["doctor"])
    assert shown.exit_code == 1 and "is [not] there" in shown.stdout and "fix: do it" in shown.stdout
    assert os.environ["JAX_PLATFORMS"] == "cpu"
