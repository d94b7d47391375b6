"""The checks of `zerojax doctor` find simulated failures, and suggest a fix."""

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from zerojax.cli import doctor, machine, main, variables
from zerojax.cli.machine import Check, Gpu, Host, Status
from zerojax.offload.host_memory import PINNED_LIMIT


def by_name(checks):
    return {check.name: check for check in checks}


def test_a_machine_without_failures(tmp_path):
    """Simulated devices are reported, and are not a failure."""
    checks = by_name(doctor.diagnose(tmp_path / "new" / "run", {"JAX_PLATFORMS": "cpu"}))
    assert all(check.status is not Status.ERROR for check in checks.values())
    assert checks["devices"].details == "8 x cpu (cpu)" and checks["processes"].details == "a single process"
    assert "GiB free" in checks["checkpoints"].details and not (tmp_path / "new").exists()
    assert checks["environment"] == Check("environment", Status.OK, "no variable is in the way")
    assert "jax " in checks["versions"].details and "GiB free" in checks["host memory"].details


def test_using_the_cpu_of_a_machine_with_an_accelerator_is_an_error():
    gpu = lambda pattern: ["/dev/nvidia0"] if "nvidia" in pattern else []
    (check,) = machine.check_devices({}, gpu)
    assert check.status is Status.ERROR and "although this machine has /dev/nvidia0" in check.details
    assert "jax[cuda13]" in check.fix
    (check,) = machine.check_devices({"JAX_PLATFORMS": "cpu"}, gpu)
    assert check.status is Status.INFO and "because JAX_PLATFORMS=cpu" in check.details
    (check,) = machine.check_devices({}, lambda pattern: ["/dev/vfio/0"] if "vfio" in pattern else [])
    assert "jax[tpu]" in check.fix


def test_unsupported_versions_are_an_error(monkeypatch):
    original = machine.metadata.version
    monkeypatch.setattr(machine.metadata, "version", lambda name: "0.4.30" if name == "jax" else original(name))
    (check,) = machine.check_versions()
    assert check.status is Status.ERROR and check.fix.startswith("pip install 'jax>=")


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(machine.tempfile, "NamedTemporaryFile", refuse)
    (check,) = machine.check_directory(tmp_path)
    assert check.status is Status.ERROR and "Permission denied" in check.details and "can write" in check.fix


def test_the_file_system_is_that_of_the_deepest_mount(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text("a / ext4 rw\nb /data nfs4 rw\nc /data/fast xfs rw\nd /database tmpfs rw\n")
    at = lambda path: machine.file_system(Path(path), str(mounts))
    assert [at("/x"), at("/data/x"), at("/data/fast/x"), at("/database")] == ["ext4", "nfs4", "xfs", "tmpfs"]
    assert machine.file_system(tmp_path, str(tmp_path / "none")) == "unknown"


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
    check = by_name(doctor.diagnose(environ=variables))["processes"]
    assert check.status is status and check.details.startswith(details)
    assert bool(check.fix) == (status is Status.ERROR)


def test_the_exit_code_is_1_if_a_check_fails(monkeypatch, tmp_path):
    shown = CliRunner().invoke(main, ["doctor", "--checkpoints", str(tmp_path)])
    assert shown.exit_code == 0 and "versions" in shown.stdout and "checkpoints" in shown.stdout
    monkeypatch.setattr(
        doctor, "diagnose", lambda directory, **options: [Check("x", Status.ERROR, "is [not] installed", "do it")]
    )
    shown = CliRunner().invoke(main, ["doctor"])
    assert shown.exit_code == 1 and "is [not] installed" in shown.stdout and "fix: do it" in shown.stdout
    assert os.environ["JAX_PLATFORMS"] == "cpu"


def test_gpus_that_a_variable_hides_are_an_error():
    find = lambda pattern: ["/dev/nvidia0"] if "nvidia" in pattern else []
    for value in "", "-1":
        (check,) = machine.check_devices({"CUDA_VISIBLE_DEVICES": value}, find)
        assert check.status is Status.ERROR and check.fix == "unset CUDA_VISIBLE_DEVICES"


def written(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def test_the_memory_of_a_container_is_that_of_the_smallest_group(tmp_path):
    root = tmp_path / "cgroup"
    written(root / "memory.max", "max\n")
    written(root / "job" / "memory.max", "1000\n")
    written(root / "job" / "step" / "memory.max", "2000\n")
    own = written(tmp_path / "own", "0::/job/step\n")
    assert machine.cgroup_limit(own, str(root)) == 1000
    written(root / "memory" / "docker" / "memory.limit_in_bytes", "3000\n")
    first = written(tmp_path / "first", "12:cpu,cpuacct:/x\n9:memory:/docker\n")
    assert machine.cgroup_limit(first, str(root)) == 3000
    written(root / "memory" / "docker" / "memory.limit_in_bytes", "9223372036854771712\n")
    assert machine.cgroup_limit(first, str(root)) is None
    assert machine.cgroup_limit(str(tmp_path / "none"), str(root)) is None


H100, A100, V100 = Gpu("NVIDIA H100", (9, 0)), Gpu("NVIDIA A100", (8, 0)), Gpu("Tesla V100", (7, 0))


def test_what_keeps_attention_from_being_fused():
    for device, cudnn, dtype, head_dim, status, details in [
        (H100, 91002, None, None, Status.OK, "cuDNN 9.10.2 fuses heads of up to 256"),
        (A100, 91002, None, None, Status.OK, "heads of up to 128"),
        (H100, 91002, "bfloat16", 256, Status.OK, "implementation='cudnn'"),
        (H100, None, "bfloat16", 128, Status.WARNING, "JAX finds no cuDNN"),
        (H100, 91002, "float32", 128, Status.WARNING, "attention in float32 runs unfused"),
        (H100, 91002, "bfloat16", 512, Status.WARNING, "heads of width 512 runs unfused on NVIDIA H100"),
        (A100, 91002, "float16", 256, Status.WARNING, "heads of width 256 runs unfused on NVIDIA A100"),
        (H100, 91002, "bfloat16", 100, Status.WARNING, "heads of width 100"),
        (V100, 91002, None, None, Status.INFO, "compute capability is 7.0"),
    ]:
        (check,) = machine.check_attention(device, cudnn, dtype, head_dim)
        assert check.status is status and details in check.details
        assert bool(check.fix) == (status is Status.WARNING)


def test_gpus_are_checked_with_the_precision_of_the_model(monkeypatch):
    monkeypatch.setattr(machine, "local_gpus", lambda: [H100] * 8)
    monkeypatch.setattr(machine, "cudnn_version", lambda: 91002)
    attention = lambda **options: by_name(doctor.diagnose(environ={}, **options))["fused attention"].status
    assert attention() is Status.OK and attention(precision="bf16", head_dim=64) is Status.OK
    assert attention(precision="fp32") is Status.WARNING and attention(head_dim=320) is Status.WARNING
    monkeypatch.setattr(machine, "local_gpus", list)
    assert "fused attention" not in by_name(doctor.diagnose(environ={}))
    with pytest.raises(ValueError, match="fp19"):
        doctor.diagnose(environ={}, precision="fp19")


def test_compute_capabilities_are_read_from_devices(monkeypatch):
    class Device:
        def __init__(self, platform, kind, capability):
            self.platform, self.device_kind, self.compute_capability = platform, kind, capability

    devices = [Device("gpu", "NVIDIA H100", "9.0"), Device("gpu", "AMD MI300", "gfx942"), Device("cpu", "cpu", "")]
    monkeypatch.setattr(machine.jax, "local_devices", lambda: devices)
    assert machine.local_gpus() == [H100]


GIB = 2**30
HOST = Host(memory_bytes=100 * GIB, shared_bytes=8 * GIB, locked_bytes=None, has_infiniband=True)


def test_pinned_memory():
    for value, memory_gib, status, details in [
        (None, 100, Status.OK, "may pin 64 GiB"),
        (None, 1000, Status.INFO, "is not set"),
        (None, 32, Status.WARNING, "has 32 GiB of host memory"),
        ("500", 100, Status.WARNING, "may pin 500 GiB"),
        ("500", 1000, Status.OK, "may pin 500 GiB"),
        ("0", 100, Status.ERROR, "is not a number of GiB"),
        ("64GB", 100, Status.ERROR, "is not a number of GiB"),
    ]:
        environ = {} if value is None else {PINNED_LIMIT: value}
        (check,) = machine.check_pinned_memory(environ, HOST._replace(memory_bytes=memory_gib * GIB))
        assert check.status is status and details in check.details
        assert status is Status.OK or f"{PINNED_LIMIT}={int(0.8 * memory_gib)}" in check.fix


def test_containers_with_too_little_for_nccl():
    assert list(machine.check_communication(8, HOST)) == []
    small = HOST._replace(shared_bytes=64 * 2**20, locked_bytes=64 * 2**10)
    shared, locked = machine.check_communication(8, small)
    assert "/dev/shm has 64 MiB" in shared.details and "--shm-size" in shared.fix
    assert "may lock 64 KiB" in locked.details and "memlock=-1" in locked.fix
    assert list(machine.check_communication(1, small._replace(has_infiniband=False))) == []


INTERFACES = ("lo", "eth0", "ib0")
CASES = {  # variables -> status, what is said, the fix
    "NCCL_P2P_DISABLE=1": (Status.WARNING, "not over NVLink", "unset NCCL_P2P_DISABLE"),
    "NCCL_IB_DISABLE=1": (Status.WARNING, "sockets", "unset NCCL_IB_DISABLE"),
    "NCCL_SHM_DISABLE=1": (Status.WARNING, "network", "unset NCCL_SHM_DISABLE"),
    "NCCL_DEBUG=info": (Status.INFO, "lines", "unset NCCL_DEBUG"),
    "NCCL_SOCKET_IFNAME=lo": (Status.WARNING, "cannot be reached over lo", "one of eth0, ib0"),
    "NCCL_SOCKET_IFNAME==lo": (Status.WARNING, "cannot be reached over lo", "one of eth0, ib0"),
    "NCCL_SOCKET_IFNAME=^eth,ib": (Status.WARNING, "cannot be reached over lo", "one of eth0, ib0"),
    "NCCL_SOCKET_IFNAME=ens3": (Status.ERROR, "no such network interface", "one of eth0, ib0"),
    "NCCL_SOCKET_IFNAME==eth": (Status.ERROR, "no such network interface", "one of eth0, ib0"),
    "CUDA_LAUNCH_BLOCKING=1": (Status.WARNING, "nothing overlaps", "unset CUDA_LAUNCH_BLOCKING"),
    "JAX_DISABLE_JIT=true": (Status.WARNING, "nothing is compiled", "unset JAX_DISABLE_JIT"),
    "JAX_DEBUG_NANS=1": (Status.WARNING, "a step that skips raises", "unset JAX_DEBUG_NANS"),
    "JAX_ENABLE_X64=1": (Status.WARNING, "float64", "unset JAX_ENABLE_X64"),
    "XLA_PYTHON_CLIENT_MEM_FRACTION=.1": (Status.WARNING, "less than half", "unset"),
    "XLA_CLIENT_MEM_FRACTION=0.99": (Status.WARNING, "NCCL need some", "unset"),
    "XLA_CLIENT_MEM_FRACTION=most": (Status.ERROR, "not a share", "unset"),
    "XLA_CLIENT_MEM_FRACTION=nan": (Status.ERROR, "not a share", "unset"),
    "XLA_PYTHON_CLIENT_PREALLOCATE=false": (Status.INFO, "fragments", "unset"),
    "XLA_PYTHON_CLIENT_ALLOCATOR=platform": (Status.WARNING, "every allocation", "unset"),
    "LIBTPU_INIT_ARGS=--xla_x": (Status.INFO, "TPU compiler", "unset LIBTPU_INIT_ARGS"),
    "XLA_FLAGS=--xla_dump_to=/tmp/x": (Status.WARNING, "writes files", "remove --xla_dump_to from XLA_FLAGS"),
    "XLA_FLAGS=--xla_gpu_deterministic_ops": (Status.INFO, "slower", "remove --xla_gpu_deterministic_ops"),
    "XLA_FLAGS=--xla_gpu_enable_latency_hiding_scheduler=false": (Status.WARNING, "does not overlap", "remove"),
}


def test_a_variable_of_another_run_is_found_with_its_fix():
    for variable in CASES:
        name, _, value = variable.partition("=")
        status, details, fix = CASES[variable]
        (check,) = variables.check_variables({name: value, "HOME": "/"}, INTERFACES, is_alone=True)
        assert check.status is status and details in check.details and fix in check.fix
        assert value in check.details


def test_a_variable_that_is_not_in_the_way_is_not_mentioned():
    for variable in [
        "NCCL_P2P_DISABLE=0",
        "NCCL_DEBUG=WARN",
        "NCCL_SOCKET_IFNAME=eth",
        "NCCL_SOCKET_IFNAME=^docker",
        "JAX_ENABLE_X64=0",
        "NCCL_SOCKET_IFNAME==eth0,ib0",
        "NCCL_SOCKET_IFNAME=",
        "LIBTPU_INIT_ARGS=",
        "XLA_CLIENT_MEM_FRACTION=0.9",
        "XLA_FLAGS=--xla_gpu_deterministic_ops=false",
        "XLA_FLAGS=",
        "XLA_FLAGS='",
    ]:
        name, _, value = variable.partition("=")
        (check,) = variables.check_variables({name: value}, INTERFACES, is_alone=True)
        assert check.status is Status.OK


def test_loopback_is_a_failure_if_there_are_other_processes():
    (check,) = variables.check_variables({"NCCL_SOCKET_IFNAME": "lo"}, INTERFACES, is_alone=False)
    assert check.status is Status.ERROR


def test_all_findings_are_listed_and_the_last_flag_counts():
    flags = "--xla_dump_to=/a --xla_gpu_autotune_level=0 --xla_gpu_autotune_level=4"
    found = list(variables.check_variables({"XLA_FLAGS": flags, "JAX_DEBUG_NANS": "1"}, INTERFACES, is_alone=True))
    assert [check.details.partition("=")[0] for check in found] == ["JAX_DEBUG_NANS", "--xla_dump_to"]


def test_warnings_do_not_fail(monkeypatch):
    shown = CliRunner().invoke(main, ["doctor", "--precision", "bf16"], env={"NCCL_IB_DISABLE": "1"})
    assert shown.exit_code == 0 and "warn" in shown.stdout and "unset NCCL_IB_DISABLE" in shown.stdout
    shown = CliRunner().invoke(main, ["doctor", "--precision", "fp19"])
    assert shown.exit_code == 2 and "fp19" in shown.output and "Traceback" not in shown.output
