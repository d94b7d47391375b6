"""Simulates eight devices for every test, and adds the options `--full` and `--aot`."""

import os
from importlib import metadata

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
    "full": "also run the whole product of models, stages, precisions and microbatches",
    "aot": "also run the tests that compile for GPU and TPU targets",
}


def pytest_addoption(parser):
    for name, text in OPTIONS.items():
        parser.addoption(f"--{name}", action="store_true", help=text)


def pytest_collection_modifyitems(config, items):
    """Deselects tests whose marker is that of an option that was not given."""
    absent = [name for name in OPTIONS if not config.getoption(name)]
    deselected = [item for item in items if any(item.get_closest_marker(name) for name in absent)]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if item not in set(deselected)]
