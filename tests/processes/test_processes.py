"""Several processes, each with its own devices and its own rows, train as one does with all of them."""

import json
import sys

import numpy as np
import pytest
from support.paths import EXAMPLES, SUPPORT, importing

from zerojax.processes.launch import launch

DEVICES, STEPS = 8, 6
SMALL = {"width": 32, "layers": 2, "context": 16, "batch": 32, "microbatches": 2, "every": 4, "precision": "fp32"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(count, stages) -> a directory with a run of examples/train.py at each stage, by so many processes."""
    found, options = {}, [f"--{name}={value}" for name, value in (SMALL | {"steps": STEPS}).items()]

    def run(count, stages):
        if (count, stages) not in found:
            found[count, stages] = tmp_path_factory.mktemp(f"{count}-processes")
            command = [sys.executable, str(SUPPORT / "process.py"), str(found[count, stages]), stages, *options]
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("PYTHONPATH", importing(EXAMPLES)["PYTHONPATH"])
                assert launch(command, count, devices=DEVICES // count, timeout_s=300) == 0
        return found[count, stages]

    return run


def rows(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("count", "stages"), [(2, "0123"), (4, "3"), pytest.param(4, "012", marks=pytest.mark.full)])
@pytest.mark.xdist_group("processes")
def test_processes_train_as_one(trained, count, stages):
    """The losses, norms and evaluations of the demo's model; sums over processes have another order."""
    for stage in stages:
        alone, run = rows(trained(1, "0123") / stage), trained(count, stages) / stage
        assert [row["step"] for row in rows(run)] == [row["step"] for row in alone] == [1, 4, STEPS, STEPS]
        for row, wanted in zip(rows(run), alone, strict=True):
            assert row.keys() == wanted.keys()
            for name in {"loss", "grad_norm", "param_norm", "eval/loss"} & row.keys():
                np.testing.assert_allclose(row[name], wanted[name], rtol=1e-5, err_msg=f"{name} at stage {stage}")
        (start,) = map(json.loads, (run / "starts.jsonl").read_text().splitlines())
        assert (start["processes"], start["mesh"], start["stage"]) == (count, {"data": DEVICES}, int(stage))


@pytest.mark.xdist_group("processes")
def test_stages_train_alike(trained):
    of = [[row["loss"] for row in rows(trained(1, "0123") / stage) if "loss" in row] for stage in "0123"]
    assert of[0][0] > of[0][-1] + 0.01  # it learns
    for losses in of[1:]:
        np.testing.assert_allclose(losses, of[0], rtol=1e-5)
