"""Detection of processes: what the variables of each launcher say, and which are rejected. Nothing is started."""

import jax
import pytest
import yaml
from support.paths import EXAMPLES

from zerojax.processes.detect import DETECTION_METHODS, ZEROJAX_VARIABLES, LaunchInfo, detect

LAUNCH = EXAMPLES / "launch"

EXPLICIT = dict(zip(ZEROJAX_VARIABLES, ["node0:1234", "4", "3"], strict=True))
TORCHRUN = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500", "WORLD_SIZE": "2", "RANK": "1"}
SLURM = {
    "SLURM_JOB_ID": "12345",
    "SLURM_STEP_NODELIST": "node[007-015],other",
    "SLURM_NTASKS": "16",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}
KUBERNETES = {"ZEROJAX_COORDINATOR": "job-0.service:55527", "ZEROJAX_NUM_PROCESSES": "2", "JOB_COMPLETION_INDEX": "1"}
explicit = lambda index: LaunchInfo("ZEROJAX", 4, index, "node0:1234", "deactivate")


def test_each_launcher_is_detected():
    for environ, found in [
        ({}, None),
        ({"HOME": "/root", "JOB_COMPLETION_INDEX": "3"}, None),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, None),  # a batch script, not started by srun
        ({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, None),
        (EXPLICIT, explicit(3)),
        ({**EXPLICIT, "ZEROJAX_COORDINATOR": "[::1]:1234"}, LaunchInfo("ZEROJAX", 4, 3, "[::1]:1234", "deactivate")),
        ({**EXPLICIT, "JOB_COMPLETION_INDEX": "2"}, explicit(3)),
        (KUBERNETES, LaunchInfo("ZEROJAX", 2, 1, "job-0.service:55527", "deactivate")),
        (TORCHRUN, LaunchInfo("torchrun", 2, 1, "node0:29500", "deactivate")),
        (
            {**TORCHRUN, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"},
            LaunchInfo("torchrun", 2, 1, "node0:29500", "deactivate"),
        ),
        (
            {**TORCHRUN, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            LaunchInfo("torchrun", 2, 1, "node0:29500", "deactivate", (1,)),
        ),
        (
            {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"},
            LaunchInfo("torchrun", 2, 1, "node0:29501", "deactivate"),
        ),
        (SLURM, LaunchInfo("slurm", 16, 9, "node007:61497", "slurm")),
        ({**SLURM, "JAX_COORDINATOR_PORT": "99"}, LaunchInfo("slurm", 16, 9, "node007:99", "slurm")),
        (OPEN_MPI, LaunchInfo("ompi", 2, 1, "10.96.0.1:62624", "ompi")),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "0"}, LaunchInfo("jax")),
        ({"MEGASCALE_NUM_SLICES": "2"}, LaunchInfo("jax")),
        ({"ZEROJAX_CLUSTER": "mpi4py"}, LaunchInfo("jax", detection_method="mpi4py")),
        ({**SLURM, "ZEROJAX_CLUSTER": "auto"}, LaunchInfo("jax")),
        ({**TORCHRUN, **EXPLICIT}, explicit(3)),  # the first row of the table that matches is used
        ({**SLURM, **TORCHRUN}, LaunchInfo("torchrun", 2, 1, "node0:29500", "deactivate")),
        ({**EXPLICIT, "ZEROJAX_CLUSTER": "slurm"}, LaunchInfo("jax", detection_method="slurm")),
    ]:
        assert detect(environ) == found


without = lambda environ, name: {key: value for key, value in environ.items() if key != name}


def test_invalid_variables_are_named():
    for environ, message in [
        *[(without(EXPLICIT, name), f"{name} is not set") for name in EXPLICIT],
        *[(without(TORCHRUN, name), f"{name} is not set") for name in TORCHRUN],
        ({"RANK": "0"}, "MASTER_ADDR and MASTER_PORT and WORLD_SIZE are not set"),
        ({**EXPLICIT, "ZEROJAX_PROCESS_ID": "4"}, "ZEROJAX_PROCESS_ID is not below ZEROJAX_NUM_PROCESSES"),
        ({**EXPLICIT, "ZEROJAX_NUM_PROCESSES": "0"}, "ZEROJAX_PROCESS_ID is not below ZEROJAX_NUM_PROCESSES"),
        ({**EXPLICIT, "ZEROJAX_PROCESS_ID": "-1"}, "ZEROJAX_PROCESS_ID is not a number"),
        ({**EXPLICIT, "ZEROJAX_NUM_PROCESSES": "four"}, "ZEROJAX_NUM_PROCESSES is not a number\n  got:      'four'"),
        ({**EXPLICIT, "ZEROJAX_COORDINATOR": "node0"}, "ZEROJAX_COORDINATOR must give a host and a port"),
        ({**EXPLICIT, "ZEROJAX_COORDINATOR": ":1234"}, "ZEROJAX_COORDINATOR must give a host and a port"),
        ({**EXPLICIT, "ZEROJAX_COORDINATOR": "node0:70000"}, "ZEROJAX_COORDINATOR must give a host and a port"),
        ({**TORCHRUN, "MASTER_PORT": "http"}, "MASTER_PORT is not a number"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_ADDR and MASTER_PORT must give a host and a port"),
        ({**TORCHRUN, "LOCAL_RANK": "x", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK is not a number"),
        ({**KUBERNETES, "JOB_COMPLETION_INDEX": "2"}, "JOB_COMPLETION_INDEX is not below ZEROJAX_NUM_PROCESSES"),
        ({**SLURM, "SLURM_PROCID": "16"}, "SLURM_PROCID is not below SLURM_NTASKS"),
        (without(OPEN_MPI, "OMPI_MCA_orte_hnp_uri"), "Open MPI 5 does not set the address of process 0"),
        (without(OPEN_MPI, "OMPI_COMM_WORLD_RANK"), "OMPI_COMM_WORLD_RANK is not set"),
        ({"ZEROJAX_CLUSTER": "pbs"}, "ZEROJAX_CLUSTER is not a detection method of JAX"),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, "TPU_WORKER_ID is not set"),
    ]:
        with pytest.raises(ValueError, match="processes: ") as error:
            detect(environ)
        assert message in str(error.value)
        assert "\n  got:" in str(error.value) and "\n  fix:" in str(error.value)


def test_slurm_coordinator_is_the_one_that_jax_chooses(monkeypatch):
    for job in ["7", "8191", "123456789"]:
        for nodes in ["node7", "node7,other", "node[007-015],other", "node[1,3]", "a-b[07-09]"]:
            from jax._src.clusters import SlurmCluster

            environ = {**SLURM, "SLURM_STEP_NODELIST": nodes, "SLURM_JOB_ID": job}
            for name, value in environ.items():
                monkeypatch.setenv(name, value)
            assert SlurmCluster.is_env_present()
            assert detect(environ).coordinator == SlurmCluster.get_coordinator_address(1, None)


@pytest.mark.parametrize("hosts", ["tcp://10.96.0.1,10.148.0.1:34911", "tcp6://[fe80::b9b,2620:10d::2]:43370"])
def test_open_mpi_coordinator_is_the_one_that_jax_chooses(monkeypatch, hosts):
    from jax._src.clusters import OmpiCluster

    environ = {**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": f"1314521088.0;{hosts}"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert OmpiCluster.is_env_present()
    assert detect(environ).coordinator == OmpiCluster.get_coordinator_address(1, None)


def test_jobset_describes_each_pod():
    jobset = yaml.safe_load((LAUNCH / "jobset.yaml").read_text())
    name, workers = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"][0]
    job = workers["template"]["spec"]
    pod = job["template"]["spec"]
    environ = {variable["name"]: variable["value"] for variable in pod["containers"][0]["env"]}
    for index in range(job["completions"]):
        found = detect({**environ, "JOB_COMPLETION_INDEX": str(index)})
        assert found[:3] == ("ZEROJAX", job["completions"], index)
        assert found.coordinator.split(":")[0] == f"{name}-{workers['name']}-0-0.{name}"
    assert job["completionMode"] == "Indexed" and job["parallelism"] == job["completions"]
    assert jobset["spec"]["network"]["enableDNSHostnames"]


def test_jobset_does_not_count_exit_code_75_as_a_failure():
    jobset = yaml.safe_load((LAUNCH / "jobset.yaml").read_text())
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["action"] == "Ignore" and rule["onExitCodes"]["values"] == [75]
    assert rule["onExitCodes"]["containerName"] == job["template"]["spec"]["containers"][0]["name"]
    assert job["template"]["spec"]["restartPolicy"] == "Never"  # otherwise Kubernetes rejects the policy


def test_jax_has_the_detection_methods():
    assert {*DETECTION_METHODS} - {"auto"} <= {cluster.name for cluster in jax._src.clusters.ClusterEnv._cluster_types}
