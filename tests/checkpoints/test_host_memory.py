"""Host memory of checkpoints: no process holds the whole of a state that is divided over several."""

import re
import sys

from support.holder import NUM_BYTES
from support.paths import SUPPORT

from zerojax.processes.launch import launch


def held(capfd, count, what, directory, num_arrays):
    """Bytes by which each process grew."""
    command = [sys.executable, str(SUPPORT / "holder.py"), what, str(directory), str(num_arrays)]
    assert launch(command, count, devices=1, timeout_s=240) == 0
    found = re.findall(r"^\[\d\] (\d+)$", capfd.readouterr().out, re.MULTILINE)
    assert len(found) == count
    return list(map(int, found))


def test_a_process_restores_its_part_alone(tmp_path, capfd):
    """Of many arrays. Simulated devices are in host memory: they hold a quarter; what is on its way comes beside."""
    held(capfd, 4, "save", tmp_path, 16)
    assert max(held(capfd, 4, "restore", tmp_path, 16)) < 0.9 * NUM_BYTES


def test_an_export_holds_pieces(tmp_path, capfd):
    """Of 16 MiB here, of one array of 256; the rest is what the libraries that read take once."""
    held(capfd, 4, "save", tmp_path, 1)
    (grown,) = held(capfd, 1, "export", tmp_path, 1)
    assert grown < 0.85 * NUM_BYTES
    assert sum(file.stat().st_size for file in (tmp_path / "model").iterdir()) > NUM_BYTES
