"""A run that is killed continues on fewer devices with the same batch, and its losses are those of a run that ends."""

import json
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from support.paths import EXAMPLES, SUPPORT, importing

import zerojax

SAVED, STEPS, ROWS, MOST_ROWS = 5, 12, 840, 105  # the batch divides over 8, 7, 6 and 5 devices
SMALL = {"width": 32, "layers": 1, "context": 8, "every": SAVED, "steps": STEPS}
OPTIONS = [f"--{name}={value}" for name, value in (SMALL | {"batch": ROWS, "most-rows": MOST_ROWS}).items()]


def python(script, *arguments):
    command = [sys.executable, str(script), *map(str, arguments), *OPTIONS]
    return subprocess.run(command, env=importing(EXAMPLES, SUPPORT), capture_output=True, text=True, timeout=300)


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def losses(directory):
    """{(step, name): loss}"""
    rows = lines(directory / "metrics.jsonl")
    return {(row["step"], name): row[name] for row in rows for name in ("loss", "eval/loss") if name in row}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The directories of two runs on eight devices: one to its end, and one that was killed after a checkpoint."""
    whole, killed = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("killed")
    ended = python(SUPPORT / "killed.py", SAVED, whole, killed)
    assert ended.returncode == -signal.SIGKILL, ended.stderr[-3000:]
    return whole, killed


@pytest.mark.once
@pytest.mark.parametrize("num_devices", [7, *(pytest.param(n, marks=pytest.mark.full) for n in (6, 5))])
@pytest.mark.xdist_group("fewer devices")
def test_a_killed_run_continues_on_fewer_devices(runs, tmp_path, num_devices):
    """Up to the order of sums in fp32, also between microbatches: 1e-6 in 7 steps, a tenth of the tolerance."""
    whole, killed = runs
    directory = shutil.copytree(killed, tmp_path / "run")
    assert max(step for step, _ in losses(directory)) == SAVED
    ended = python(SUPPORT / "train_gpt.py", directory, "--simulate", num_devices)
    assert ended.returncode == 0, ended.stderr[-3000:]
    first, second = lines(directory / "starts.jsonl")
    assert (first["mesh"], first["from_step"], first["config"]["microbatches"]) == ({"data": 8}, 0, 1)
    mesh, microbatches = {"data": num_devices}, second["config"]["microbatches"]
    assert (second["mesh"], second["from_step"], microbatches) == (mesh, SAVED, 2)
    assert ROWS / (num_devices * microbatches) <= MOST_ROWS < ROWS / num_devices
    got, want = losses(directory), losses(whole)
    assert want[STEPS, "loss"] < want[1, "loss"] - 1  # it learns
    assert got.keys() - want.keys() == {(SAVED + 1, "loss")}  # the first step of every start is logged
    for key in want:
        np.testing.assert_allclose(got[key], want[key], rtol=1e-5, err_msg=str(key))


def zero_on(num_devices, **mesh):
    return zerojax.Zero(zerojax.make_mesh(devices=jax.devices()[:num_devices], **mesh))


def test_the_least_number_of_microbatches():
    for num_devices, num_rows, most_rows, expected in [
        (8, 120, 15, 1),
        (6, 120, 15, 2),
        (5, 120, 15, 2),
        (4, 120, 15, 2),
        (1, 120, 15, 8),
        (5, 120, 7, 4),
        (8, 8, 9, 1),
    ]:
        assert zero_on(num_devices).num_microbatches(num_rows, most_rows) == expected


def test_replicas_share_the_rows_too():
    assert zero_on(8, replica=2).num_microbatches(120, 5) == 3
    assert zero_on(8, model=2).num_microbatches(120, 15) == 2


def test_rows_that_do_not_divide_over_the_devices_are_an_error():
    for num_devices, num_rows, got, fix in [
        (
            7,
            120,
            "120 rows, 7 devices; 120 % 7 = 1",
            "train on 6 or 8 devices; or with 119 or 126 rows, or another multiple of 7",
        ),
        (
            8,
            5,
            "5 rows, 8 devices; 5 % 8 = 5",
            "train on 5 devices; or with 8 rows, or another multiple of 8",
        ),
    ]:
        with pytest.raises(ValueError, match="num_microbatches: the rows of the batch do not divide") as error:
            zero_on(num_devices).num_microbatches(num_rows, 15)
        assert str(error.value).splitlines()[1:] == [f"  got:      {got}", f"  fix:      {fix}"]


def test_numbers_of_rows_are_integers():
    for options in [(120, 0), (120, 7.5), (0, 15), (120, True)]:
        with pytest.raises(ValueError, match=r"num_microbatches: (num|most)_rows is .*\n  fix:      pass an integer"):
            zero_on(8).num_microbatches(*options)
