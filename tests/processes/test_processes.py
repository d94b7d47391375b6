"""Parity of several processes, each with its own devices and rows, with one process that has all of them."""

import json
import sys

import numpy as np
import pytest
from support.paths import EXAMPLES, SUPPORT, importing

from zerojax.processes.launch import launch

pytestmark = pytest.mark.once

DEVICES, STEPS = 8, 6
SMALL = {"width": 32, "layers": 2, "context": 16, "batch": 32, "most-rows": 2, "every": 4}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(count, stages) -> a directory with a run of train_gpt.py at each stage, in `count` processes."""
    directories, options = {}, [f"--{name}={value}" for name, value in (SMALL | {"steps": STEPS}).items()]

    def run(count, stages):
        if (count, stages) not in directories:
            directories[count, stages] = tmp_path_factory.mktemp(f"{count}-processes")
            command = [sys.executable, str(SUPPORT / "process.py"), str(directories[count, stages]), stages, *options]
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("PYTHONPATH", importing(EXAMPLES, SUPPORT)["PYTHONPATH"])
                assert launch(command, count, devices=DEVICES // count, timeout_s=300) == 0
        return directories[count, stages]

    return run


def rows(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("count", "stages"), [(2, "0123"), pytest.param(4, "0123", marks=pytest.mark.full)])
@pytest.mark.xdist_group("processes")
def test_several_processes_train_as_one_does(trained, count, stages):
    """Losses, norms and evaluations of the demo's model agree. Sums over processes are in a different order."""
    for stage in stages:
        single, run = rows(trained(1, "0123") / stage), trained(count, stages) / stage
        assert [row["step"] for row in rows(run)] == [row["step"] for row in single] == [1, 4, STEPS, STEPS]
        for row, expected in zip(rows(run), single, strict=True):
            assert row.keys() == expected.keys()
            for name in {"loss", "grad_norm", "param_norm", "eval/loss"} & row.keys():
                np.testing.assert_allclose(row[name], expected[name], rtol=1e-5, err_msg=f"{name} at stage {stage}")
        (start,) = map(json.loads, (run / "starts.jsonl").read_text().splitlines())
        assert (start["processes"], start["mesh"], start["stage"]) == (count, {"data": DEVICES}, int(stage))


@pytest.mark.xdist_group("processes")
def test_all_stages_have_the_same_losses(trained):
    of = [[row["loss"] for row in rows(trained(1, "0123") / stage) if "loss" in row] for stage in "0123"]
    assert of[0][0] > of[0][-1] + 0.01  # it learns
    for losses in of[1:]:
        np.testing.assert_allclose(losses, of[0], rtol=1e-5)
