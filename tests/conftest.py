"""Eight simulated devices for every test, and the options `--full` and `--aot`."""

import os
from importlib import metadata

import pytest

import zerojax

# Compiling is what the suite spends its time on: without LLVM's optimisations it takes less than half of it.
flags = ["--xla_backend_optimization_level=0"]
if metadata.version("jaxlib").startswith("0.10."):
    flags.append("--xla_cpu_use_fusion_emitters=false")  # later ones compile fusions faster, and do not know the flag
    flags.append("--xla_cpu_parallel_codegen_split_count=1")  # a program in one part: a sixth less; later no less
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags])
zerojax.simulate_devices(8)  # before anything asks JAX for a device

pytest.register_assert_rewrite("support")  # a failing `assert` there tells its values, as in a test

OPTIONS = {
    "full": "also run the whole product of models, stages, precisions and microbatches",
    "aot": "also run the tests that compile for GPU and TPU targets",
}


def pytest_addoption(parser):
    for name, text in OPTIONS.items():
        parser.addoption(f"--{name}", action="store_true", help=text)


def pytest_collection_modifyitems(config, items):
    """Tests with the marker of an option that is not given are deselected."""
    absent = [name for name in OPTIONS if not config.getoption(name)]
    left_out = [item for item in items if any(item.get_closest_marker(name) for name in absent)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
