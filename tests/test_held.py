"""Host memory of checkpoints: no process holds the whole of a state that is divided over several."""

import re
import sys
from pathlib import Path

import pytest
from holder import NUM_BYTES

from zerojax.processes.launch import launch


def held(capfd, count, what, directory):
    """Bytes by which each process grew."""
    command = [sys.executable, str(Path(__file__).parent / "holder.py"), what, str(directory)]
    assert launch(command, count, devices=1, timeout_s=240) == 0
    found = re.findall(r"^\[\d\] (\d+)$", capfd.readouterr().out, re.MULTILINE)
    assert len(found) == count
    return list(map(int, found))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The directory of four processes' checkpoint."""
    directory = tmp_path_factory.mktemp("run")
    command = [sys.executable, str(Path(__file__).parent / "holder.py"), "save", str(directory)]
    assert launch(command, 4, devices=1, timeout_s=240) == 0
    return directory


def test_a_process_restores_its_part_alone(saved, capfd):
    """Simulated devices are in host memory: they hold a quarter, and some of it is there twice on its way."""
    assert max(held(capfd, 4, "restore", saved)) < 0.85 * NUM_BYTES


def test_an_export_holds_pieces(saved, capfd):
    """Of 16 MiB here, of one array of 256; the rest is what the libraries that read take once."""
    (grown,) = held(capfd, 1, "export", saved)
    assert grown < 0.85 * NUM_BYTES
    assert sum(file.stat().st_size for file in (saved / "model").iterdir()) > NUM_BYTES
