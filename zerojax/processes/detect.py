"""Detects which processes train together, from the environment variables that their launcher sets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from zerojax.utils.text import error_text

ZEROJAX_VARIABLES = ("ZEROJAX_COORDINATOR", "ZEROJAX_NUM_PROCESSES", "ZEROJAX_PROCESS_ID")
TORCHRUN_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
SLURM_VARIABLES = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
OPEN_MPI_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
# Values of ZEROJAX_CLUSTER.
DETECTION_METHODS = ("slurm", "ompi", "mpi4py", "gcetpu", "gketpu", "auto")
TPU_HOST_VARIABLES = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")


class LaunchInfo(NamedTuple):
    """What a launcher says about this process and the others. JAX determines the fields that are None."""

    found: str  # how they were detected: 'ZEROJAX', 'torchrun', 'slurm', 'ompi', or 'jax' (JAX's own detection)
    count: int | None = None
    index: int | None = None  # of this process
    coordinator: str | None = None  # HOST:PORT on which process 0 listens
    detection_method: str | None = None  # `cluster_detection_method` of `jax.distributed.initialize`
    local_device_ids: tuple[int, ...] | None = None  # the devices of this machine that this process uses


def detect(environ: Mapping[str, str]) -> LaunchInfo | None:
    """Detects which processes train together. The result depends on the environment alone; nothing is started.

    The first row that matches is used:

    | launcher            | variables                                                                                |
    |---------------------|------------------------------------------------------------------------------------------|
    | JAX, by name        | ZEROJAX_CLUSTER: slurm, ompi, mpi4py, gcetpu or gketpu; or auto, for everything that JAX |
    |                     | itself detects, such as Kubernetes with the package `kubernetes`                         |
    | explicit            | ZEROJAX_COORDINATOR (HOST:PORT), ZEROJAX_NUM_PROCESSES, ZEROJAX_PROCESS_ID               |
    | indexed Job or      | the first two of these; the index is JOB_COMPLETION_INDEX, which Kubernetes sets, and    |
    | JobSet              | the host is the name of the first pod under the headless service                         |
    | torchrun            | MASTER_ADDR, MASTER_PORT, WORLD_SIZE, RANK; with LOCAL_WORLD_SIZE > 1 the process uses   |
    |                     | the device LOCAL_RANK; with TORCHELASTIC_USE_AGENT_STORE the port is MASTER_PORT + 1     |
    | SLURM               | SLURM_JOB_ID, SLURM_STEP_NODELIST, SLURM_NTASKS, SLURM_PROCID, SLURM_LOCALID, which      |
    |                     | `srun` sets; the process uses the device SLURM_LOCALID, as JAX decides                   |
    | Open MPI 4          | OMPI_MCA_orte_hnp_uri, OMPI_COMM_WORLD_SIZE, _RANK and _LOCAL_RANK                       |
    | Cloud TPU           | TPU_PROCESS_ADDRESSES or TPU_WORKER_HOSTNAMES (two or more hosts) with TPU_WORKER_ID,    |
    |                     | or MEGASCALE_NUM_SLICES > 1; JAX determines the rest                                     |

    For SLURM and Open MPI the coordinator is the one that JAX would choose, and JAX_COORDINATOR_PORT sets its port. Two
    launchers must be named with ZEROJAX_CLUSTER: a TPU machine without these variables, which only its metadata server
    describes, and Open MPI 5, which needs mpi4py. JOB_COMPLETION_INDEX alone does not make a group of processes, since
    a Job of independent runs sets it too.

    Returns None for a single process. Raises ValueError if variables are missing, malformed, or contradict each other.
    """
    sources = (_cluster_by_name, _explicit, _torchrun, _slurm, _open_mpi, _cloud_tpu)
    return next((info for source in sources if (info := source(environ))), None)


def _cluster_by_name(environ: Mapping[str, str]) -> LaunchInfo | None:
    name = environ.get("ZEROJAX_CLUSTER")
    if name and name not in DETECTION_METHODS:
        methods = ", ".join(DETECTION_METHODS)
        raise _error("ZEROJAX_CLUSTER is not a detection method of JAX", repr(name), f"one of {methods}")
    return LaunchInfo("jax", detection_method=None if name == "auto" else name) if name else None


def _explicit(environ: Mapping[str, str]) -> LaunchInfo | None:
    if not any(environ.get(name) for name in ZEROJAX_VARIABLES):
        return None
    coordinator_name, count_name, index_name = ZEROJAX_VARIABLES
    if not environ.get(index_name) and environ.get("JOB_COMPLETION_INDEX"):
        index_name = "JOB_COMPLETION_INDEX"
    _require(environ, (coordinator_name, count_name, index_name))
    count, index = _count_and_index(environ, count_name, index_name)
    return LaunchInfo("ZEROJAX", count, index, _address(environ[coordinator_name], coordinator_name), "deactivate")


def _torchrun(environ: Mapping[str, str]) -> LaunchInfo | None:
    if not any(environ.get(name) for name in TORCHRUN_VARIABLES):
        return None
    _require(environ, TORCHRUN_VARIABLES)
    host_name, port_name, count_name, index_name = TORCHRUN_VARIABLES
    count, index = _count_and_index(environ, count_name, index_name)
    shares_machine = environ.get("LOCAL_RANK") and _int(environ, "LOCAL_WORLD_SIZE", "1") > 1
    local_device_ids = (_int(environ, "LOCAL_RANK"),) if shares_machine else None
    # In this case torchrun itself listens on MASTER_PORT, for torch's own processes.
    port_is_taken = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    port = _int(environ, port_name) + port_is_taken
    address = _address(f"{environ[host_name]}:{port}", f"{host_name} and {port_name}")
    return LaunchInfo("torchrun", count, index, address, "deactivate", local_device_ids)


def _slurm(environ: Mapping[str, str]) -> LaunchInfo | None:
    if not all(name in environ for name in SLURM_VARIABLES):
        return None
    job_name, nodes_name, count_name, index_name, _ = SLURM_VARIABLES
    count, index = _count_and_index(environ, count_name, index_name)
    host = re.match(r"([^,\[]+)(?:\[(\w+))?", environ[nodes_name])  # 'node[007-015],other' -> node007
    if host is None:
        raise _error(f"{nodes_name} does not name a node", f"{environ[nodes_name]!r}", "start the processes with srun")
    address = f"{host[1]}{host[2] or ''}:{_port(environ, _int(environ, job_name))}"
    return LaunchInfo("slurm", count, index, address, "slurm")


def _open_mpi(environ: Mapping[str, str]) -> LaunchInfo | None:
    count_name, index_name, _ = OPEN_MPI_VARIABLES
    uri = environ.get("OMPI_MCA_orte_hnp_uri")
    if uri is None and _int(environ, count_name, "1") > 1:
        got = f"{count_name}={environ[count_name]}, no OMPI_MCA_orte_hnp_uri"
        fix = f"pip install mpi4py, and set ZEROJAX_CLUSTER=mpi4py; or set {', '.join(ZEROJAX_VARIABLES)}"
        raise _error("Open MPI 5 does not set the address of process 0, as Open MPI 4 does", got, fix)
    if uri is None:
        return None
    _require(environ, OPEN_MPI_VARIABLES)
    # Such as 1531576320.0;tcp://10.96.0.1,10.1.0.1:34911
    parts = re.match(r"(\d+)\..*?(?:tcp://([^,:]+)|tcp6://\[([^,\]]+))", uri)
    if parts is None:
        fix = f"set {', '.join(ZEROJAX_VARIABLES)}"
        raise _error("OMPI_MCA_orte_hnp_uri does not name a host", f"{uri!r}", fix)
    count, index = _count_and_index(environ, count_name, index_name)
    address = f"{parts[2] or parts[3]}:{_port(environ, int(parts[1]) // 2**12)}"
    return LaunchInfo("ompi", count, index, address, "ompi")


def _cloud_tpu(environ: Mapping[str, str]) -> LaunchInfo | None:
    hosts = next((environ[name] for name in TPU_HOST_VARIABLES if environ.get(name)), "").split(",")
    num_slices = _int(environ, "MEGASCALE_NUM_SLICES", "1")
    if len(hosts) > 1 and "TPU_WORKER_ID" not in environ:
        raise _error("TPU_WORKER_ID is not set", f"{len(hosts)} TPU hosts", "set it on each host, counting from 0")
    return LaunchInfo("jax") if len(hosts) > 1 or num_slices > 1 else None


def _port(environ: Mapping[str, str], job_number: int) -> str:
    """The port that JAX chooses: by the number of the job, so that two jobs on a node rarely have the same."""
    return environ.get("JAX_COORDINATOR_PORT") or str(job_number % 2**12 + 65536 - 2**12)


def _require(environ: Mapping[str, str], names: tuple[str, ...]) -> None:
    """Raises ValueError unless all of these variables are set."""
    missing = [name for name in names if not environ.get(name)]
    if missing:
        what = f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} not set"
        present = ", ".join(f"{name}={environ[name]}" for name in names if environ.get(name))
        fix = f"set all of {', '.join(names)}, or none of them"
        raise _error(what, present or "none of these variables", fix)


def _int(environ: Mapping[str, str], name: str, default: str = "") -> int:
    text = environ.get(name, default)
    if not re.fullmatch(r"[0-9]+", text):
        raise _error(f"{name} is not a number", f"{text!r}", "a whole number, at least 0")
    return int(text)


def _count_and_index(environ: Mapping[str, str], count_name: str, index_name: str) -> tuple[int, int]:
    count, index = _int(environ, count_name), _int(environ, index_name)
    if index >= count:
        got = f"{count_name}={count}, {index_name}={index}"
        raise _error(f"{index_name} is not below {count_name}", got, f"indices 0 to {max(count, 1) - 1}")
    return count, index


def _address(address: str, names: str) -> str:
    """The address, checked. `names` are the variables that it was read from."""
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 2**16):
        raise _error(f"{names} must give a host and a port", f"{address!r}", "HOST:PORT, such as node0:12355")
    return address


def _error(what: str, got: str, fix: str) -> ValueError:
    return ValueError(error_text(f"processes: {what}", got, fix))
