"""Simulates eight devices for every test, and adds the options `--full`, `--aot`, `--zoo`, `--examples` and
`--cases`."""

import itertools
import os
import shutil
import tempfile
from collections import defaultdict
from importlib import metadata
from pathlib import Path

import jax
import pytest

import zerojax

# The suite spends most of its time compiling. Without LLVM's optimizations it takes less than half the time.
flags = ["--xla_backend_optimization_level=0"]
if metadata.version("jaxlib").startswith("0.10."):
    flags.append("--xla_cpu_use_fusion_emitters=false")  # later versions do not have this flag
    # One part per program: saves a sixth of the time, but nothing with later versions.
    flags.append("--xla_cpu_parallel_codegen_split_count=1")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags])
zerojax.simulate_devices(8)  # before anything asks JAX for a device

pytest.register_assert_rewrite("support")  # so that a failing `assert` in a helper also shows its values

OPTIONS = {
    "full": "also run the combinations that add little to those that run always, and what takes long",
    "aot": "also run the tests that compile for GPU and TPU targets",
    "zoo": "also run the tests with models of other packages",
    "examples": "also run the scripts in examples/",
}
# Folders whose modules import packages that only the option's environment has.
FOLDERS = {os.path.join(os.path.dirname(__file__), name): name for name in ("zoo", "examples")}


KERNELS = pytest.StashKey[str]()
TESTS = itertools.count(1)  # that this worker has run


def pytest_addoption(parser):
    for name, text in OPTIONS.items():
        parser.addoption(f"--{name}", action="store_true", help=text)
    parser.addoption("--cases", type=int, help="run at most so many cases of each parametrized test, spread evenly")


def pytest_configure(config):
    """Lets programs for GPUs share compiled kernels. The text of a program and its memory, which the tests read, do not
    depend on them. Each worker has its own file, because XLA does not lock it."""
    if config.getoption("cases") is not None and config.getoption("cases") < 1:
        raise pytest.UsageError("--cases: at least 1")
    # Later versions end the process when they see the second of these flags, and do not use the file without it.
    if config.getoption("aot") and metadata.version("jaxlib").startswith("0.10."):
        if not hasattr(config, "workerinput"):  # workers inherit the variable
            config.stash[KERNELS] = os.environ["ZEROJAX_TEST_KERNELS"] = tempfile.mkdtemp(prefix="zerojax-kernels-")
        file = os.path.join(os.environ["ZEROJAX_TEST_KERNELS"], os.environ.get("PYTEST_XDIST_WORKER", "main"))
        gpu_flags = [
            f"--xla_gpu_kernel_cache_file={file}",
            "--xla_gpu_enable_llvm_module_compilation_parallelism=true",  # otherwise the file is not used
        ]
        names = {flag.partition("=")[0] for flag in gpu_flags}
        inherited = [flag for flag in os.environ["XLA_FLAGS"].split() if flag.partition("=")[0] not in names]
        os.environ["XLA_FLAGS"] = " ".join([*inherited, *gpu_flags])


def pytest_unconfigure(config):
    if KERNELS in config.stash:
        shutil.rmtree(config.stash[KERNELS], ignore_errors=True)


def pytest_ignore_collect(collection_path, config):
    """Without its option, a folder whose packages may be missing is not collected."""
    option = FOLDERS.get(str(collection_path))
    return True if option and not config.getoption(option) else None


def pytest_collection_modifyitems(config, items):
    """Deselects tests whose marker is that of an option that was not given, and cases beyond `--cases`."""
    absent = [name for name in OPTIONS if not config.getoption(name)]
    selected = [item for item in items if not any(item.get_closest_marker(name) for name in absent)]
    if config.getoption("cases"):
        selected = spread(selected, config.getoption("cases"))
    kept = set(selected)
    if deselected := [item for item in items if item not in kept]:
        config.hook.pytest_deselected(items=deselected)
        items[:] = selected


@pytest.fixture(autouse=True)
def few_memory_maps():
    """Drops compiled programs before they hold all memory maps that a process may have, which ends it: each has some,
    and the tests of a worker compile thousands."""
    yield
    limit, maps = Path("/proc/sys/vm/max_map_count"), Path("/proc/self/maps")
    if next(TESTS) % 16 == 0 and limit.exists() and maps.read_bytes().count(b"\n") > int(limit.read_text()) // 2:
        jax.clear_caches()


def spread(items, num_cases):
    """At most `num_cases` items of each test function: the first and the last, and those at equal distances between."""
    functions = defaultdict(list)
    for item in items:
        functions[item.nodeid.partition("[")[0]].append(item)
    kept = set()
    for cases in functions.values():
        num = min(num_cases, len(cases))
        kept |= {cases[k * (len(cases) - 1) // max(num - 1, 1)] for k in range(num)}
    return [item for item in items if item in kept]
