"""Host memory of checkpoints: no process holds the whole state if it is sharded over several processes."""

import re
import sys

import pytest
from support.holder import FILE_BYTES, NUM_BYTES
from support.paths import SUPPORT

from zerojax.checkpoints.store import read_manifest
from zerojax.processes.launch import launch

pytestmark = pytest.mark.once


def memory_growth(capfd, count, what, directory, num_arrays):
    """The growth of host memory in each of `count` processes, in bytes."""
    command = [sys.executable, str(SUPPORT / "holder.py"), what, str(directory), str(num_arrays)]
    assert launch(command, count, devices=1, timeout_s=240) == 0
    found = re.findall(r"^\[\d\] (\d+)$", capfd.readouterr().out, re.MULTILINE)
    assert len(found) == count
    return list(map(int, found))


def test_a_process_restores_only_its_own_shards(tmp_path, capfd):
    """With many arrays. Simulated devices use host memory: a quarter of the state, plus the arrays being read."""
    memory_growth(capfd, 4, "save", tmp_path, 16)
    assert max(memory_growth(capfd, 4, "restore", tmp_path, 16)) < 0.9 * NUM_BYTES


@pytest.mark.full
def test_a_state_on_a_disk_is_never_in_host_memory(tmp_path, capfd):
    """Saving and restoring hold one of 48 arrays at a time. Two processes save what one does: the gradients do not
    depend on the rows."""
    (grown,) = memory_growth(capfd, 1, "disk", tmp_path / "one", 16)
    assert grown < NUM_BYTES  # a third of the state on the disk
    memory_growth(capfd, 2, "disk", tmp_path / "two", 16)
    of_one, of_two = (read_manifest(tmp_path / name, 2).leaves for name in ("one", "two"))
    assert of_one == of_two and len(of_one) > 3 * 16


@pytest.mark.full
def test_an_export_holds_one_file_at_a_time(tmp_path, capfd):
    """Of 16 arrays of 16 MiB, in files of 32 MiB. The library copies a file once more up to version 0.7."""
    memory_growth(capfd, 4, "save", tmp_path, 16)
    (grown,) = memory_growth(capfd, 1, "export", tmp_path, 16)
    assert grown < 4 * FILE_BYTES
    assert sum(file.stat().st_size for file in (tmp_path / "model").iterdir()) > NUM_BYTES
