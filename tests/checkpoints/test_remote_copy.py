"""Copies of steps in remote storage, on a server for S3 that runs on this machine and fails in several ways."""

import json
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import s3fs
from click.testing import CliRunner
from support import s3
from support.paths import SUPPORT, TESTS, importing
from support.ports import free_port
from support.small_run import adam, batch, create, digest_of, loss, setting

import zerojax
from zerojax.checkpoints import lease, remote_copy, store
from zerojax.checkpoints.pieces import verify_arrays
from zerojax.cli.commands import main as command
from zerojax.utils import files

pytestmark = pytest.mark.once
STEPS = 8


@pytest.fixture(scope="module")
def port():
    with s3.server() as port:
        yield port


@pytest.fixture
def url(port, request):
    """A folder of its own in the bucket."""
    with s3.clients(port):
        yield f"s3://{s3.BUCKET}/{abs(hash(request.node.name))}"


@pytest.fixture(scope="module")
def zero():
    return setting(num_devices=2)


@pytest.fixture(scope="module")
def step(zero):
    return zero.train_step(loss)


@pytest.fixture(autouse=True)
def short_leases(monkeypatch):
    monkeypatch.setattr(lease, "EXPIRY_S", 1.0)


def train(zero, step, directory, url, num_steps=STEPS, **options):
    state = zero.init(create, adam())
    with zero.checkpoints(directory, every=1, copy_to=url, **options) as checkpoints:
        state, start = checkpoints.resume(state)
        for i in range(start, num_steps):
            state, metrics = step(state, batch(i))
            checkpoints.update(state, metrics)
    return state, start


def fit(zero, step, directory, url, num_steps=STEPS, every=2):
    options = {"every": every, "keep": 2, "copy_to": url}
    return zerojax.fit(
        zero, zero.init(create, adam()), step, batch, num_steps, directory, log_every=1, checkpoints=options
    )


def rows(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def losses(directory):
    """The losses by step, after checking that no step has two rows."""
    found = [(row["step"], row["loss"]) for row in rows(directory)]
    assert len(dict(found)) == len(found)
    return dict(found)


@pytest.fixture(scope="module")
def undisturbed(zero, step, tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    fit(zero, step, directory, None)
    return losses(directory)


def test_a_run_continues_on_another_machine(tmp_path, url, zero, step):
    """From the newest step, bit for bit. Old ones are deleted there too, and nothing else is left."""
    state, _ = train(zero, step, tmp_path / "first", url, keep=2)
    remote = remote_copy.RemoteCopy(url)
    assert remote.steps()[-1] == STEPS and len(remote.steps()) <= 2
    names = {path.split("/")[3] for path in remote._fs.find(f"{remote._root}/checkpoints")}
    assert names == {f"step_{step}-1" for step in remote.steps()}
    restored, start = train(zero, step, tmp_path / "second", url, keep=2)
    assert start == STEPS and digest_of(restored) == digest_of(state)
    assert not [left for name in ("first", "second") for left in (tmp_path / name).glob(".unfinished-*")]


def test_a_step_that_is_there_is_not_copied_again(tmp_path, url, zero, step, monkeypatch):
    train(zero, step, tmp_path, url)
    monkeypatch.setattr(remote_copy.RemoteCopy, "_put", lambda *_: 1 / 0)
    train(zero, step, tmp_path, url)


def test_steps_are_copied_while_saves_take_longer_than_what_is_between_them(tmp_path, zero, step, monkeypatch):
    sync_tree = files.sync_tree
    monkeypatch.setattr(files, "sync_tree", lambda folder: (time.sleep(0.5), sync_tree(folder)))
    remote, state = remote_copy.RemoteCopy(f"file://{tmp_path}/there"), zero.init(create, adam())
    with zero.checkpoints(tmp_path / "run", every=1, copy_to=remote) as checkpoints:
        for i in range(6):
            state, metrics = step(state, batch(i))
            checkpoints.update(state, metrics)
        assert remote.steps()


def test_the_metrics_come_back_with_the_step(tmp_path, url, zero, step, undisturbed):
    fit(zero, step, tmp_path / "first", url, 4)
    fit(zero, step, tmp_path / "second", url)
    assert losses(tmp_path / "second") == undisturbed
    starts = (tmp_path / "second" / "starts.jsonl").read_text().splitlines()
    assert [json.loads(line)["from_step"] for line in starts] == [0, 4]


def test_a_step_without_its_mark_is_none(tmp_path, url, zero, step):
    train(zero, step, tmp_path / "first", url, 3)
    remote = remote_copy.RemoteCopy(url)
    before = remote.steps()
    remote._fs.rm_file(remote._mark(remote_copy.RemoteStep(1, 3)))
    assert remote.steps() == [step for step in before if step != 3]


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """The folders of steps 1, 2 and 3, whose contents are not verified."""
    monkeypatch.setattr(remote_copy, "check_intact", lambda *_: None)
    monkeypatch.setattr(store, "read_manifest", lambda *_: None)
    for number in range(1, 4):
        for name in ("a", "commit_success.txt", "z/b"):
            path = tmp_path / f"step_{number}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)
    return {number: tmp_path / f"step_{number}" for number in range(1, 4)}


def test_the_mark_is_written_last_and_deleted_first(tmp_path, folders, monkeypatch):
    """Whenever the process is killed in between, what has a mark is whole."""
    remote = remote_copy.RemoteCopy(f"file://{tmp_path}/there")
    done = []
    for method in ("put_file", "rm_file"):
        call = getattr(remote._fs, method)
        record = lambda *args, call=call, method=method, **kwargs: (
            done.append((method, args[-1])),
            call(*args, **kwargs),
        )
        monkeypatch.setattr(remote._fs, method, record)
    remote.start()
    keep_newest = lambda steps: steps[-1:]
    for number, path in folders.items():
        remote.copy(number, path, keep_newest)
        assert remote.finish()
    folder = f"{remote._root}/checkpoints/step_2-1"
    mark = f"{folder}/commit_success.txt"
    written = [path for method, path in done if method == "put_file" and path.startswith(folder)]
    deleted = [path for method, path in done if method == "rm_file" and path.startswith(folder)]
    assert sorted(written) == sorted(deleted) == [f"{folder}/a", mark, f"{folder}/z/b"]
    assert written[-1] == deleted[0] == mark
    assert remote.steps() == [3]
    remote.close()


def test_a_run_that_goes_back_replaces_later_steps(tmp_path, url, zero, step):
    train(zero, step, tmp_path / "first", url, 6)
    shutil.rmtree(tmp_path / "first" / "step_6")
    other = remote_copy.RemoteCopy(url)
    other._delete(remote_copy.RemoteStep(1, 6))
    train(zero, step, tmp_path / "first", url, 5)
    assert max(other.steps()) == 5
    train(zero, step, tmp_path / "first", url, 6)
    assert max(other.steps()) == 6


def test_the_lineage_leaves_out_what_a_later_run_replaced():
    """Lease 1 copied steps 2, 4, 6 and 8, and lease 2 began from step 4."""
    found = [remote_copy.RemoteStep(*each) for each in ((1, 2), (1, 4), (1, 6), (1, 8), (2, 5), (2, 6))]
    assert remote_copy.lineage(found) == [(2, 6), (2, 5), (1, 4), (1, 2)]


def test_a_second_run_is_refused_and_a_killed_one_is_waited_for(tmp_path, url, zero):
    first = remote_copy.RemoteCopy(url)
    first.lease._owner += "\x1b[2J"
    first.start()
    with pytest.raises(ValueError, match=rf"another run is copying to {url}\n  got:      process .* on .*\\x1b\[2J\n"):
        zero.checkpoints(tmp_path, copy_to=url)
    first.lease._content = lambda lasts_s=None: b"{}"  # as if it had been killed: what it wrote last expires
    first._fs.pipe_file(first.lease._path(1), json.dumps({"owner": "dead", "expires": time.time() + 1}).encode())
    first.lease._released.set()
    first.lease._fs = None
    first.lease._renewal.join()
    zero.checkpoints(tmp_path, copy_to=url).close()


def test_a_run_whose_lease_was_taken_saves_no_more(tmp_path, url, zero):
    remote = remote_copy.RemoteCopy(url)
    with zero.checkpoints(tmp_path, copy_to=remote) as checkpoints:
        next_lease = f"{remote._root}/lease-2.json"
        remote._fs.pipe_file(next_lease, json.dumps({"owner": "b", "expires": 1e12}).encode())
        while not remote.lease.lost_to:
            time.sleep(0.05)
        with pytest.raises(RuntimeError, match=r"another run copies to .*\n  got: .*lease expired, and b took it"):
            checkpoints.save(zero.init(create, adam()))
    assert json.loads(remote._fs.cat_file(next_lease)) == {"owner": "b", "expires": 1e12} and not store.folders(
        tmp_path
    )


def test_one_of_two_runs_that_start_together_gets_the_lease(url, monkeypatch):
    """Both have seen the same expired lease, and create the next one."""
    first, second = (remote_copy.RemoteCopy(url).lease for _ in range(2))
    first._fs.pipe_file(first._path(1), json.dumps({"owner": "dead", "expires": 0}).encode())
    monkeypatch.setattr(second, "_newest", lambda: 1)
    assert first._try() and not second._try()
    assert second._read(2)["owner"] == first._owner


def test_a_server_that_fails_now_and_then_loses_nothing(tmp_path, port, zero, step):
    """503, lost connections and slow answers: requests are repeated, and what is complete is whole."""
    faults = s3.Faults(seed=1, busy=0.1, lost=0.05, slow=0.05)
    with s3.proxy(port, faults) as between, s3.clients(between):
        url = f"s3://{s3.BUCKET}/faulty"
        state, _ = train(zero, step, tmp_path / "first", url)
        assert min(faults.seen.values()) > 0, faults.seen
        restored, start = train(zero, step, tmp_path / "second", url)
    assert start == STEPS and digest_of(restored) == digest_of(state)
    for number in store.steps(tmp_path / "second"):
        manifest = store.read_manifest(tmp_path / "second", number)
        assert not any(problem for _, problem in verify_arrays(tmp_path / "second", number, manifest))


def test_a_server_that_is_down_stops_no_training_and_is_told(tmp_path, port, zero, step, caplog, monkeypatch):
    """The steps are on disk. The next start copies the newest."""
    faults = s3.Faults()
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)  # of its own, between those of its client
    with s3.proxy(port, faults) as between, s3.clients(between):
        url = f"s3://{s3.BUCKET}/down"
        train(zero, step, tmp_path, url, 2)
        with pytest.raises(RuntimeError, match=f"the last copy to {url} failed\n  got: .*\n  fix: "):
            state = zero.init(create, adam())
            with zero.checkpoints(tmp_path, every=1, copy_to=url) as checkpoints:
                state, start = checkpoints.resume(state)
                faults.weights = {"busy": 1.0}
                for i in range(start, 4):
                    state, metrics = step(state, batch(i))
                    checkpoints.update(state, metrics)
        assert store.steps(tmp_path)[-1] == 4 and "cannot be copied to" in caplog.text
        faults.weights = {}
        assert remote_copy.RemoteCopy(url).steps()[-1] == 2
        train(zero, step, tmp_path, url, 4)
        assert remote_copy.RemoteCopy(url).steps()[-1] == 4


# Lines of the output of a run.
TRAINED, COPIED = r"step \d+\n", r"checkpoint: step \d+ is copied to s3://"


def start(directory, url, num_steps, **environ):
    """Starts a run that copies its steps, and lives for at most five minutes. Its output contains its log."""
    args = [sys.executable, str(SUPPORT / "copying.py"), str(directory), url, str(num_steps)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(args, env=importing(TESTS) | environ, **pipes)
    limit = threading.Timer(300, process.kill)
    limit.daemon = True
    limit.start()
    return process


def until(process, pattern):
    """Reads lines until one matches, and returns all of them."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if re.match(pattern, line):
            return "".join(lines)
    raise AssertionError("".join(lines)[-3000:])


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.full)])
def test_a_run_that_is_killed_and_loses_its_disk_continues_bit_for_bit(tmp_path, url, zero, step, kills):
    """It is killed at random times, and its directory deleted, as if it continued on another machine."""
    rng = random.Random(kills)
    for number in range(kills):
        process = start(tmp_path / "killed", url, 10**6)
        until(process, rng.choice([TRAINED, COPIED]) if number else COPIED)
        time.sleep(rng.uniform(0, 1.5))
        process.kill()
        process.communicate(timeout=60)
        shutil.rmtree(tmp_path / "killed")
    print(f"seed {kills}: {kills} kills")
    num_steps = remote_copy.RemoteCopy(url).steps()[-1] + STEPS
    fit(zero, step, tmp_path / "continued", url, num_steps)
    fit(zero, step, tmp_path / "undisturbed", None, num_steps)
    assert losses(tmp_path / "continued") == losses(tmp_path / "undisturbed")


def test_names_of_runs_are_no_patterns(tmp_path, port, zero, step):
    """A run in `lr[01]` deletes its own old steps, and none of its neighbours `lr0` and `lr1`."""
    with s3.clients(port):
        names = ("lr0", "lr1", "lr[01]")
        for k, name in enumerate(names):
            train(zero, step, tmp_path / str(k), f"s3://{s3.BUCKET}/{name}", 3, keep=1)
        for k, name in enumerate(names):
            remote = remote_copy.RemoteCopy(f"s3://{s3.BUCKET}/{name}")
            assert remote.steps() == [3]
            remote.fetch(3, tmp_path / f"fetched {k}")


def damage(folder):
    """Flips a bit in the largest file of a step."""
    path = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.chmod(0o600)
    path.unlink()  # its links to other names stay intact
    path.write_bytes(content)


def test_a_damaged_step_is_restored_from_its_copy(tmp_path, url, zero, step, caplog):
    state, _ = train(zero, step, tmp_path, url, 4, keep=1)
    damage(tmp_path / "step_4")
    restored, start = train(zero, step, tmp_path, url, 4, keep=1)
    assert start == 4 and digest_of(restored) == digest_of(state)
    assert "step 4 is restored from its copy" in caplog.text and len(list(tmp_path.glob("aside_step_4_*"))) == 1


def test_a_damaged_copy_is_not_used_and_is_replaced(tmp_path, url, zero, step, caplog):
    train(zero, step, tmp_path / "first", url, 4, keep=None)
    remote = remote_copy.RemoteCopy(url)
    each = remote._complete()[0]
    name = max(remote._objects(each), key=lambda name: remote._fs.info(f"{remote._path(each)}/{name}")["size"])
    content = bytearray(remote._fs.cat_file(f"{remote._path(each)}/{name}"))
    content[len(content) // 2] ^= 1
    remote._fs.pipe_file(f"{remote._path(each)}/{name}", bytes(content))
    _, start = train(zero, step, tmp_path / "second", url, 4, keep=None)
    assert start < 4 and "the copy of step 4" in caplog.text and not list((tmp_path / "second").glob(".unfinished-*"))
    remote.fetch(4, tmp_path / "third")  # the second run has copied its own


def test_no_intact_copy_is_deleted_for_a_damaged_one(tmp_path, url, zero, step, caplog):
    train(zero, step, tmp_path / "first", url, 4, keep=None)
    damage(tmp_path / "first" / "step_4")
    other = remote_copy.RemoteCopy(f"{url}-other")
    other.start()
    for number in (3, 4):
        other.copy(number, tmp_path / "first" / f"step_{number}", lambda steps: steps[-1:])
        other.finish()
    assert other.steps() == [3] and "arrays of step 4 are damaged" in caplog.text
    with pytest.raises(RuntimeError, match="the last copy to"):
        other.close()


def test_what_a_killed_run_left_is_removed(tmp_path, url, zero):
    (tmp_path / ".unfinished-abc/step_3/arrays").mkdir(parents=True)
    zero.checkpoints(tmp_path, copy_to=url).close()
    assert {path.name for path in tmp_path.iterdir()} == {".lock"}


def test_a_suspended_run_changes_nothing_of_its_successor(tmp_path, url, zero, step, monkeypatch):
    """It goes on in the middle of a copy, when another run has taken the lease, copied newer steps and deleted old."""
    train(zero, step, tmp_path / "first", url, 2, keep=1)
    suspended = remote_copy.RemoteCopy(url)
    monkeypatch.setattr(suspended.lease, "_renew", lambda: None)  # it is suspended
    suspended.start()
    awake, put = threading.Event(), suspended._fs.put_file
    fs = type("Suspended", (), {"__getattr__": lambda _, name: getattr(remote_copy.RemoteCopy(url)._fs, name)})()
    fs.put_file = lambda *args, **kwargs: (awake.wait(), put(*args, **kwargs))
    suspended._fs = fs
    suspended.copy(2, tmp_path / "first" / "step_2", lambda steps: steps[-1:])
    suspended._tried = None
    time.sleep(1.5)  # its lease has expired
    state, start = train(zero, step, tmp_path / "second", url, 5, keep=1)
    assert start == 2
    awake.set()
    suspended._thread.join()
    restored, start = train(zero, step, tmp_path / "third", url, 5, keep=1)
    assert start == 5 and digest_of(restored) == digest_of(state)


def test_a_run_that_has_lost_its_lease_deletes_nothing_and_calls_nothing_copied(tmp_path, folders, monkeypatch):
    """Which steps are kept is up to the run that has taken over, and may have begun from any of them."""
    first, second = (remote_copy.RemoteCopy(f"file://{tmp_path}/there") for _ in range(2))
    monkeypatch.setattr(first.lease, "_renew", lambda: None)  # it is suspended
    first.start()
    for number in (1, 2):
        first.copy(number, folders[number], list)
        assert first.finish()
    second.start()
    first.copy(3, folders[3], list)
    assert not first.finish()  # a reader may not find it
    first._delete_old(lambda steps: steps[-1:])
    assert second.steps()[:2] == [1, 2]
    second.close()


def test_frozen_storage_does_not_keep_a_run_from_ending(tmp_path, port):
    """After SIGTERM the step is saved on disk, and the exit code is 75."""
    faults = s3.Faults()
    with s3.proxy(port, faults) as between:
        process = start(tmp_path, f"s3://{s3.BUCKET}/frozen", 1000, **s3.variables(between))
        until(process, r"step 4\n")
        faults.weights = {"frozen": 1.0}
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output[-3000:]
    assert "the storage has not answered for 2 s" in output and "bucket/frozen" in output


@pytest.mark.parametrize("events", [2, pytest.param(20, marks=pytest.mark.full)])
def test_two_runs_that_are_suspended_and_killed_keep_what_was_complete(tmp_path, url, zero, step, events):
    """Each run begins while the one before is suspended for longer than its lease, or was killed."""
    rng, complete, suspended, signals = random.Random(events), set(), None, []

    def end(process):
        process.send_signal(signal.SIGCONT)
        try:
            output = process.communicate(timeout=3)[0]  # it may find out that it has lost its lease
        except subprocess.TimeoutExpired:
            process.kill()
            output = process.communicate()[0]
        note(output)

    def note(output):
        complete.update(map(int, re.findall(r"step (\d+) is copied to s3://", output)))

    for number in range(events):
        process = start(tmp_path / str(number), url, 10**6)
        note(until(process, rng.choice([TRAINED, COPIED]) if number else COPIED))
        time.sleep(rng.uniform(0, 3))
        if suspended:
            end(suspended)
            time.sleep(rng.uniform(0, 1))
        suspended = process
        signals.append(rng.choice([signal.SIGSTOP, signal.SIGKILL]))
        process.send_signal(signals[-1])
    end(suspended)
    remote = remote_copy.RemoteCopy(url)
    assert remote.steps()[-1] >= max(complete)
    num_kills = signals.count(signal.SIGKILL)
    print(f"seed {events}: {events - num_kills} suspensions, {num_kills} kills")
    found = tmp_path / "found"
    fit(zero, step, tmp_path / "undisturbed", None, remote.steps()[-1], every=10**6)
    for number in remote.steps():
        remote.fetch(number, found)  # verifies the arrays
    newest = remote.steps()[-1]
    here, there = (
        store.read_manifest(directory, newest).leaves for directory in (found, tmp_path / "undisturbed" / "checkpoints")
    )
    assert here == there


def test_the_commands_take_a_url(tmp_path, url, zero, step):
    train(zero, step, tmp_path / "run", url, 3, keep=None)
    run = lambda *args: CliRunner().invoke(command, ["checkpoint", *map(str, args)])
    steps = remote_copy.RemoteCopy(url).steps()
    fetched = run("fetch", url, tmp_path / "here", "--step", steps[0])
    assert fetched.exit_code == 0 and f"of steps {', '.join(map(str, steps))} in {url}" in fetched.output
    assert "exists already" in run("fetch", url, tmp_path / "here", "--step", steps[0]).output
    assert "no such step" in run("fetch", url, tmp_path / "here", "--step", 99).output

    def same(name, *args):
        there, here = (run(name, place, *args).output.splitlines() for place in (url, tmp_path / "run"))
        return there[-4:] == here[-4:] and here

    assert same("inspect") and same("verify") and same("inspect", "--step", steps[0])
    listed = run("ls", url, "--verify")
    assert listed.exit_code == 0 and f"Steps in {url}" in listed.output and listed.output.count(" ok\n") == len(steps)
    assert run("diff", url, steps[0], steps[-1]).exit_code == int(len(steps) > 1)
    assert run("diff", url, 3, 3, "--other", tmp_path / "run").exit_code == 0
    assert run("export", url, tmp_path / "weights").exit_code == 0
    assert list((tmp_path / "weights").glob("*.safetensors"))


def test_an_object_outside_of_its_step_is_not_fetched(tmp_path, monkeypatch):
    remote = remote_copy.RemoteCopy(f"file://{tmp_path}/there")
    monkeypatch.setattr(remote, "_complete", lambda: [remote_copy.RemoteStep(1, 3)])
    monkeypatch.setattr(remote._fs, "find", lambda path: [f"{path}/a", f"{path}/../../../b"])
    with pytest.raises(ValueError, match=r"step 3 of .* is no step\n  got: .*'\.\./\.\./\.\./b'"):
        remote.fetch(3, tmp_path / "here")
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("runs/a", "copy_to is not a URL"),
        ("nowhere://a/b", "nowhere://a/b cannot be opened"),
        ("gs://bucket/run", r"gs://bucket/run cannot be opened\n  got:      .*gcsfs.*\n  fix:      .*zerojax\[gcs\]"),
    ],
)
def test_a_url_that_cannot_work_is_refused_at_the_start(tmp_path, zero, url, message):
    with pytest.raises(ValueError, match=message):
        zero.checkpoints(tmp_path / "run", copy_to=url)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("what", ["bucket", "server"])
def test_storage_that_cannot_be_reached_is_told_at_the_start(tmp_path, port, zero, monkeypatch, what):
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    url = f"s3://{'nowhere' if what == 'bucket' else s3.BUCKET}/run"
    with (
        s3.clients(port if what == "bucket" else free_port()),
        pytest.raises(ValueError, match=f"checkpoints: {url} cannot be reached\n  got:      .*\n  fix: "),
    ):
        zero.checkpoints(tmp_path / "run", copy_to=url)
    assert not store.folders(tmp_path / "run")
    zero.checkpoints(tmp_path / "run").close()  # the lock of the directory was released


def test_a_lease_is_newer_than_every_copy(tmp_path, folders):
    """Also if the objects of the leases are gone: steps that are copied under it would count as old, and be deleted."""
    for number in (1, 2, 3):
        remote = remote_copy.RemoteCopy(f"file://{tmp_path}/there")
        remote.start()
        remote.copy(number, folders[number], lambda steps: steps[-1:])
        assert remote.finish() and remote.steps() == [number]
        remote.close()
        if number == 2:
            for path in (tmp_path / "there").glob("lease-*.json"):
                path.unlink()
