"""Which processes train together, read from the environment that their launcher set."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

OURS = ("ZEROJAX_COORDINATOR", "ZEROJAX_NUM_PROCESSES", "ZEROJAX_PROCESS_ID")
TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
OPEN_MPI = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
NAMED = ("slurm", "ompi", "mpi4py", "gcetpu", "gketpu", "auto")
TPU_HOSTS = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")


class Found(NamedTuple):
    """What a launcher said. Fields that are None are left to JAX.

    Attributes:
        found: how: 'ZEROJAX', 'torchrun', 'slurm', 'ompi', or 'jax', which is JAX's own detection.
        count: processes.
        index: of this one.
        coordinator: HOST:PORT where process 0 listens.
        method: `cluster_detection_method` of `jax.distributed.initialize`.
        local_device_ids: the devices of this machine that this process uses.
    """

    found: str
    count: int | None = None
    index: int | None = None
    coordinator: str | None = None
    method: str | None = None
    local_device_ids: tuple[int, ...] | None = None


def detect(environ: Mapping[str, str]) -> Found | None:
    """Which processes train together. A function of the environment alone: nothing is asked or started.

    The first that is there counts:

    | launcher            | variables                                                                                |
    |---------------------|------------------------------------------------------------------------------------------|
    | JAX, by name        | ZEROJAX_CLUSTER: slurm, ompi, mpi4py, gcetpu, gketpu; or auto: what JAX itself detects,  |
    |                     | such as Kubernetes with the package `kubernetes`                                         |
    | explicit            | ZEROJAX_COORDINATOR (HOST:PORT), ZEROJAX_NUM_PROCESSES, ZEROJAX_PROCESS_ID               |
    | indexed Job or      | the first two of these; the index is JOB_COMPLETION_INDEX, which Kubernetes sets, and    |
    | JobSet              | the host is the first pod's name under the headless service                              |
    | torchrun            | MASTER_ADDR, MASTER_PORT, WORLD_SIZE, RANK; with LOCAL_WORLD_SIZE > 1 the process uses   |
    |                     | the device LOCAL_RANK; with TORCHELASTIC_USE_AGENT_STORE the port is MASTER_PORT + 1     |
    | SLURM               | SLURM_JOB_ID, SLURM_STEP_NODELIST, SLURM_NTASKS, SLURM_PROCID, SLURM_LOCALID: set by     |
    |                     | `srun`; the process uses the device SLURM_LOCALID, as JAX decides                        |
    | Open MPI 4          | OMPI_MCA_orte_hnp_uri, OMPI_COMM_WORLD_SIZE, _RANK and _LOCAL_RANK                       |
    | Cloud TPU           | TPU_PROCESS_ADDRESSES or TPU_WORKER_HOSTNAMES (two hosts or more) with TPU_WORKER_ID,    |
    |                     | or MEGASCALE_NUM_SLICES > 1: left to JAX                                                 |

    Of SLURM and Open MPI the coordinator is the one that JAX would choose, and JAX_COORDINATOR_PORT sets its port. A
    TPU machine without such variables (its metadata server knows) and Open MPI 5 (mpi4py knows) are named by
    ZEROJAX_CLUSTER. JOB_COMPLETION_INDEX alone is no group: a Job of independent runs has it too.

    Args:
        environ: variables, such as `os.environ`.

    Returns:
        what was found, or None: one process alone.

    Raises:
        ValueError: variables that contradict each other, or of which some are missing. It names them.
    """
    for source in (_named, _ours, _torchrun, _slurm, _open_mpi, _tpu):
        if found := source(environ):
            return found
    return None


def _named(environ: Mapping[str, str]) -> Found | None:
    name = environ.get("ZEROJAX_CLUSTER")
    if name and name not in NAMED:
        raise _error("ZEROJAX_CLUSTER is none that JAX detects", f"{name!r}", f"one of {', '.join(NAMED)}")
    return Found("jax", method=None if name == "auto" else name) if name else None


def _ours(environ: Mapping[str, str]) -> Found | None:
    if not any(environ.get(name) for name in OURS):
        return None
    index = "ZEROJAX_PROCESS_ID"
    if not environ.get(index) and environ.get("JOB_COMPLETION_INDEX"):
        index = "JOB_COMPLETION_INDEX"
    coordinator, num_processes, _ = OURS
    _require(environ, (coordinator, num_processes, index))
    count, number = _count_and_index(environ, num_processes, index)
    return Found("ZEROJAX", count, number, _address(environ[coordinator], coordinator), "deactivate")


def _torchrun(environ: Mapping[str, str]) -> Found | None:
    if not any(environ.get(name) for name in TORCHRUN):
        return None
    _require(environ, TORCHRUN)
    host, port, size, rank = TORCHRUN
    count, index = _count_and_index(environ, size, rank)
    many = environ.get("LOCAL_RANK") and _number(environ, "LOCAL_WORLD_SIZE", "1") > 1
    own = (_number(environ, "LOCAL_RANK"),) if many else None
    # The program torchrun listens on MASTER_PORT itself then, for torch's own processes.
    beside = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address = _address(f"{environ[host]}:{_number(environ, port) + beside}", f"{host} and {port}")
    return Found("torchrun", count, index, address, "deactivate", own)


def _slurm(environ: Mapping[str, str]) -> Found | None:
    if not all(name in environ for name in SLURM):
        return None
    job, nodes, size, rank, _ = SLURM
    count, index = _count_and_index(environ, size, rank)
    host = re.match(r"([^,\[]+)(?:\[(\w+))?", environ[nodes])  # of 'node[007-015],other' node007
    if host is None:
        raise _error(f"{nodes} names no node", f"{environ[nodes]!r}", "start the processes with srun")
    address = f"{host[1]}{host[2] or ''}:{_port(environ, _number(environ, job))}"
    return Found("slurm", count, index, address, "slurm")


def _open_mpi(environ: Mapping[str, str]) -> Found | None:
    size, rank, _ = OPEN_MPI
    uri = environ.get("OMPI_MCA_orte_hnp_uri")
    if uri is None and _number(environ, size, "1") > 1:
        raise _error(
            "Open MPI does not say where process 0 is, as it did before version 5",
            f"{size}={environ[size]}, no OMPI_MCA_orte_hnp_uri",
            f"pip install mpi4py, and ZEROJAX_CLUSTER=mpi4py; or set {', '.join(OURS)}",
        )
    if uri is None:
        return None
    _require(environ, OPEN_MPI)
    parts = re.match(
        r"(\d+)\..*?(?:tcp://([^,:]+)|tcp6://\[([^,\]]+))", uri
    )  # 1531576320.0;tcp://10.96.0.1,10.1.0.1:34911
    if parts is None:
        raise _error("OMPI_MCA_orte_hnp_uri names no host", f"{uri!r}", f"set {', '.join(OURS)}")
    count, index = _count_and_index(environ, size, rank)
    address = f"{parts[2] or parts[3]}:{_port(environ, int(parts[1]) // 2**12)}"
    return Found("ompi", count, index, address, "ompi")


def _tpu(environ: Mapping[str, str]) -> Found | None:
    hosts = next((environ[name] for name in TPU_HOSTS if environ.get(name)), "").split(",")
    slices = _number(environ, "MEGASCALE_NUM_SLICES", "1")
    if len(hosts) > 1 and "TPU_WORKER_ID" not in environ:
        raise _error("TPU_WORKER_ID is not set", f"{len(hosts)} TPU hosts", "set it on each host, from 0")
    return Found("jax") if len(hosts) > 1 or slices > 1 else None


def _port(environ: Mapping[str, str], job: int) -> str:
    """JAX's: one of the 4,096 highest by the job's number, so that two jobs on a node seldom meet."""
    return environ.get("JAX_COORDINATOR_PORT") or str(job % 2**12 + 65536 - 2**12)


def _require(environ: Mapping[str, str], names: tuple[str, ...]) -> None:
    missing = [name for name in names if not environ.get(name)]
    there = ", ".join(f"{name}={environ[name]}" for name in names if environ.get(name))
    if missing:
        raise _error(
            f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} not set",
            there or "none of the variables that belong together",
            f"set all of {', '.join(names)}, or none",
        )


def _number(environ: Mapping[str, str], name: str, default: str = "") -> int:
    text = environ.get(name, default)
    if not re.fullmatch(r"[0-9]+", text):
        raise _error(f"{name} is not a number", f"{text!r}", "a whole number from 0")
    return int(text)


def _count_and_index(environ: Mapping[str, str], count_name: str, index_name: str) -> tuple[int, int]:
    count, index = _number(environ, count_name), _number(environ, index_name)
    if index >= count:
        got = f"{count_name}={count}, {index_name}={index}"
        raise _error(f"{index_name} is not below {count_name}", got, f"indices 0 to {max(count, 1) - 1}")
    return count, index


def _address(text: str, names: str) -> str:
    host, colon, port = text.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 2**16):
        raise _error(f"{names} must give a host and a port", f"{text!r}", "HOST:PORT, such as node0:12355")
    return text


def _error(what: str, got: str, fix: str) -> ValueError:
    return ValueError(f"processes: {what}\n  got:      {got}\n  fix:      {fix}")
