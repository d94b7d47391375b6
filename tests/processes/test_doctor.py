"""The checks of `zerojax doctor` find simulated failures, and suggest a fix."""

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from zerojax import doctor
from zerojax.cli import main
from zerojax.doctor import Check, Status, diagnose


def by_name(checks):
    return {check.name: check for check in checks}


def test_a_machine_without_failures(tmp_path):
    """Simulated devices are reported, and are not a failure."""
    checks = by_name(diagnose(tmp_path / "new" / "run", {"JAX_PLATFORMS": "cpu"}))
    assert all(check.status is not Status.ERROR for check in checks.values())
    assert checks["devices"].details == "8 x cpu (cpu)" and checks["processes"].details == "a single process"
    assert "GiB free" in checks["checkpoints"].details and not (tmp_path / "new").exists()
    assert "jax " in checks["versions"].details and "GiB free" in checks["host memory"].details


def test_using_the_cpu_of_a_machine_with_an_accelerator_is_an_error():
    gpu = lambda pattern: ["/dev/nvidia0"] if "nvidia" in pattern else []
    (check,) = doctor._devices({}, gpu)
    assert check.status is Status.ERROR and "although this machine has /dev/nvidia0" in check.details
    assert "jax[cuda13]" in check.fix
    (check,) = doctor._devices({"JAX_PLATFORMS": "cpu"}, gpu)
    assert check.status is Status.INFO and "because JAX_PLATFORMS=cpu" in check.details
    (check,) = doctor._devices({}, lambda pattern: ["/dev/vfio/0"] if "vfio" in pattern else [])
    assert "jax[tpu]" in check.fix


def test_unsupported_versions_are_an_error(monkeypatch):
    original = doctor.metadata.version
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "0.4.30" if name == "jax" else original(name))
    (check,) = doctor._versions()
    assert check.status is Status.ERROR and check.fix.startswith("pip install 'jax>=")


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor.tempfile, "NamedTemporaryFile", refuse)
    (check,) = doctor._directory(tmp_path)
    assert check.status is Status.ERROR and "Permission denied" in check.details and "can write" in check.fix


def test_the_file_system_is_that_of_the_deepest_mount(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text("a / ext4 rw\nb /data nfs4 rw\nc /data/fast xfs rw\nd /database tmpfs rw\n")
    at = lambda path: doctor.file_system(Path(path), str(mounts))
    assert [at("/x"), at("/data/x"), at("/data/fast/x"), at("/database")] == ["ext4", "nfs4", "xfs", "tmpfs"]
    assert doctor.file_system(tmp_path, str(tmp_path / "none")) == "unknown"


@pytest.mark.parametrize(
    ("variables", "status", "details"),
    [
        ({"RANK": "1"}, Status.ERROR, "MASTER_ADDR and MASTER_PORT and WORLD_SIZE are not set"),
        (
            {"MASTER_ADDR": "a", "MASTER_PORT": "5", "WORLD_SIZE": "4", "RANK": "1"},
            Status.OK,
            "torchrun: process 1 of 4, process 0 is a:5",
        ),
    ],
)
def test_launcher_variables(variables, status, details):
    check = by_name(diagnose(environ=variables))["processes"]
    assert check.status is status and check.details.startswith(details)
    assert bool(check.fix) == (status is Status.ERROR)


def test_the_exit_code_is_1_if_a_check_fails(monkeypatch, tmp_path):
    shown = CliRunner().invoke(main, ["doctor", "--checkpoints", str(tmp_path)])
    assert shown.exit_code == 0 and "versions" in shown.stdout and "checkpoints" in shown.stdout
    monkeypatch.setattr(doctor, "diagnose", lambda directory: [Check("x", Status.ERROR, "is [not] installed", "do it")])
    shown = CliRunner().invoke(main, ["doctor"])
    assert shown.exit_code == 1 and "is [not] installed" in shown.stdout and "fix: do it" in shown.stdout
    assert os.environ["JAX_PLATFORMS"] == "cpu"
