"""Directories that cannot work are refused at the start, and one run at a time writes into a directory."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import importing
from support.small_run import adam, create, setting

import zerojax
from zerojax.checkpoints import run_directory, store
from zerojax.checkpoints.pieces import verify_arrays
from zerojax.checkpoints.run_directory import local_directory
from zerojax.cli import machine

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def zero():
    return setting(num_devices=2)


@pytest.fixture(scope="module")
def state(zero):
    return zero.init(create, adam())


def test_a_directory_may_have_an_unusual_name(tmp_path, zero, state):
    directory = tmp_path / "a b%20#;:'\"äé{x}$~+@|&=\n\t-"
    with zero.checkpoints(directory) as checkpoints:
        checkpoints.save(state)
    manifest = store.read_manifest(directory, 0)
    assert not any(problem for _, problem in verify_arrays(directory, 0, manifest))
    with zero.checkpoints(directory) as checkpoints:
        assert checkpoints.resume(zero.eval_init(create, adam()))[1] == 0


def test_a_directory_that_cannot_work_is_refused(tmp_path, monkeypatch, zero):
    """Before anything is written: no folder `gs:` is left either."""
    for who in ["checkpoints", "fit", "doctor"]:
        for name in ["a[1]", "a]", "a*", "a?", "a\\b", "gs://bucket/run", "s3://b/r", "hdfs://h/r", "az://c"]:
            monkeypatch.chdir(tmp_path)
            if who == "doctor":
                (check,) = machine.check_directory(Path(name))
                assert check.status == machine.Status.ERROR and check.fix
            elif who == "checkpoints":
                with pytest.raises(ValueError, match=r"checkpoints: .*\n  got:      '.*\n  fix: "):
                    zero.checkpoints(name)
            else:
                with pytest.raises(ValueError, match=r"fit: .*\n  got:      '.*\n  fix: "):
                    zerojax.fit(zero, None, None, lambda i: None, 1, name)
            assert not os.listdir(tmp_path)


def test_a_deleted_working_directory_is_named(tmp_path, monkeypatch, zero):
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    with pytest.raises(ValueError, match=r"the working directory was deleted\n  got:  .*'run'"):
        zero.checkpoints("run")
    tmp_path.mkdir()


def test_the_names_of_new_folders_are_synced(tmp_path, monkeypatch):
    synced, fsync = set(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.add(os.fstat(descriptor).st_ino), fsync(descriptor)))
    store.Store(tmp_path / "a" / "run").close()
    assert {(tmp_path / name).stat().st_ino for name in (".", "a")} <= synced


def test_a_colon_alone_is_no_url():
    assert local_directory("runs/12:30/a", "fit") == Path("runs/12:30/a").absolute()
    assert local_directory("a:b", "fit") == Path("a:b").absolute()


@pytest.mark.parametrize("how", ["deleted", "replaced", "moved"])
def test_a_directory_that_is_lost_under_a_run_is_not_written(tmp_path, zero, state, how):
    directory = tmp_path / "run"
    with zero.checkpoints(directory) as checkpoints:
        if how == "moved":
            directory.rename(tmp_path / "elsewhere")
        else:
            shutil.rmtree(directory)
        if how == "replaced":
            directory.mkdir()
        with pytest.raises(RuntimeError, match="was deleted or replaced while the run was using it"):
            checkpoints.save(state)
    assert directory.exists() == (how == "replaced") and not store.folders(directory)


def test_a_deleted_lock_file_lets_no_second_run_in(tmp_path, zero, state):
    with zero.checkpoints(tmp_path) as checkpoints:
        (tmp_path / ".lock").unlink()
        with pytest.raises(ValueError, match="another run is using"):
            zero.checkpoints(tmp_path)
        checkpoints.save(state)
    assert store.steps(tmp_path) == [0]


HOLDER = """
import multiprocessing, os, sys, time
from pathlib import Path
from zerojax.checkpoints.run_directory import DirectoryLock

def work():
    print(os.getpid(), flush=True)  # not before the worker has closed what it has in common with its parent
    time.sleep(float(sys.argv[2]))

lock = DirectoryLock(Path(sys.argv[1]))
worker = multiprocessing.get_context("fork").Process(target=work)
worker.start()
if float(sys.argv[2]) == 0:
    worker.join()
    print("joined", flush=True)
time.sleep(60)
"""


def hold(directory, worker_s):
    """Starts a process that holds the lock and has a forked worker. Returns (the process, the worker's id)."""
    command = [sys.executable, "-c", HOLDER, str(directory), str(worker_s)]
    process = subprocess.Popen(command, env=importing(), stdout=subprocess.PIPE, text=True)
    return process, int(process.stdout.readline())


def test_a_forked_worker_does_not_keep_the_lock_of_a_killed_run(tmp_path):
    process, worker = hold(tmp_path, 60)
    try:
        with pytest.raises(ValueError, match=f"got:      process {process.pid} on"):
            run_directory.DirectoryLock(tmp_path)
        process.kill()
        process.wait()
        os.kill(worker, 0)  # it lives
        run_directory.DirectoryLock(tmp_path).release()
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_forked_worker_that_ends_does_not_release_the_lock(tmp_path):
    process, _ = hold(tmp_path, 0)
    try:
        assert process.stdout.readline() == "joined\n"
        with pytest.raises(ValueError, match="another run is using"):
            run_directory.DirectoryLock(tmp_path)
    finally:
        process.kill()
        process.wait()
