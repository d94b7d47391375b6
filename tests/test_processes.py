"""Several processes, each with its own devices and its own rows, train as one does with all of them."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zoo
from parity import batches, train

import zerojax

MODEL = zoo.ZOO["unused"]


def free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def together(count, devices, stage):
    """What each of `count` processes printed last."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here.parent), str(here), os.environ.get("PYTHONPATH", "")])
    port, *rest = map(str, (free_port(), count, devices, stage))
    running = [
        subprocess.Popen(
            [sys.executable, str(here / "process.py"), port, str(index), *rest],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(count)
    ]
    try:
        ended = [p.communicate(timeout=240) for p in running]
    finally:
        for p in running:
            p.kill()
    for p, (_, errors) in zip(running, ended, strict=True):
        assert p.returncode == 0, errors[-3000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in ended]


@pytest.mark.parametrize("stage", [1, 3])
def test_two_processes_train_as_one(stage):
    seen = together(2, 4, stage)
    assert all(process["devices"] == 8 for process in seen)
    assert seen[0]["losses"] == seen[1]["losses"]
    alone, _ = train(zerojax.Zero(zerojax.make_mesh(), stage), MODEL, batches(MODEL, 3), num_microbatches=4)
    np.testing.assert_allclose(seen[0]["losses"], alone.losses, rtol=1e-6)
