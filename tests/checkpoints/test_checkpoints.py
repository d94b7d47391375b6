"""What is saved comes back, bit for bit, on any stage and mesh; what is damaged or does not fit is refused by name."""

import dataclasses
import errno
import json
import logging
import os
import shutil
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.small_run import (
    ROWS,
    WIDTH,
    Iterator,
    adam,
    batch,
    change_manifest,
    create,
    cut,
    digest_of,
    flip,
    largest_file,
    loss,
    renamed,
    setting,
    train,
    zero_a_page,
)

import zerojax
from zerojax.checkpoints import EXIT_CODE, CheckpointCorrupted, CheckpointMismatch, contents, iterators, store
from zerojax.checkpoints.digest import HostDigest, digests


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(the directory of a run of 4 steps at stage 3 in bf16 on 8 devices, its losses, digests of its last state)."""
    directory = tmp_path_factory.mktemp("run")
    losses, state = train(setting(), directory, 4)
    return directory, losses, digest_of(state)


@pytest.fixture
def copy(saved, tmp_path):
    """A copy of that directory."""
    return shutil.copytree(saved[0], tmp_path / "copy")


def test_a_run_that_resumes_is_the_run_that_did_not(saved, tmp_path):
    """Bit for bit on the same mesh and stage: losses, parameters, optimizer, keys."""
    _, before, _ = saved
    copied = shutil.copytree(saved[0], tmp_path / "copy")
    after, resumed = train(setting(), copied, 7)
    whole, state = train(setting(), tmp_path / "other", 7)
    assert before + after == whole and len(after) == 3
    assert digest_of(resumed) == digest_of(state)


@pytest.mark.parametrize(
    ("stage", "num_devices", "mesh"),
    [(0, 8, {}), (1, 4, {}), (2, 8, {"replica": 2}), (3, 4, {}), (3, 8, {"model": 2}), (3, 1, {})],
)
def test_a_state_is_restored_onto_any_stage_and_mesh(saved, stage, num_devices, mesh):
    """Bit for bit; the next losses differ by the order of sums in bf16."""
    directory, _, expected = saved
    zero = setting(stage, num_devices=num_devices, **mesh)
    with zero.checkpoints(directory) as checkpoints:
        state, start = checkpoints.resume(zero.eval_init(create, adam()))
    assert start == 4 and digest_of(state) == expected
    for leaf, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(zero.eval_init(create, adam())), strict=True):
        assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim) and leaf.dtype == wanted.dtype
    step = zero.train_step(loss)
    same = setting()
    with same.checkpoints(directory) as checkpoints:
        other, _ = checkpoints.resume(same.init(create, adam()))
    reference = same.train_step(loss)
    for i in range(4, 14):
        state, metrics = step(state, batch(i))
        other, wanted = reference(other, batch(i))
        assert float(metrics["loss"]) == pytest.approx(float(wanted["loss"]), rel=0.01)


SETTINGS = [(stage, *at) for stage in range(4) for at in ((8, {}), (4, {}), (8, {"replica": 2}), (8, {"model": 2}))]


@pytest.mark.full
@pytest.mark.parametrize(("stage", "num_devices", "mesh"), SETTINGS)
def test_a_state_is_restored_over_every_pair_of_stage_and_mesh(tmp_path, stage, num_devices, mesh):
    zero = setting(stage, num_devices=num_devices, **mesh)
    state = zero.init(create, adam())
    state, _ = zero.train_step(loss)(state, batch(0))
    expected = digest_of(state)
    with zero.checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state)
    for other_stage, other_devices, other_mesh in SETTINGS:
        other = setting(other_stage, num_devices=other_devices, **other_mesh)
        with other.checkpoints(tmp_path) as checkpoints:
            assert digest_of(checkpoints.resume(other.eval_init(create, adam()))[0]) == expected


def test_compute_in_another_precision_goes_on_from_the_same_parameters(saved):
    directory, _, expected = saved
    zero = setting(1, "fp32")
    with zero.checkpoints(directory) as checkpoints:
        state, _ = checkpoints.resume(zero.eval_init(create, adam()))
    assert digest_of(state) == expected and state.master is None
    assert state.params["layers"]["0"]["w"].dtype == jnp.float32


def test_the_parameters_of_compute_are_a_cast_of_the_master(saved):
    zero = setting(2)
    with zero.checkpoints(saved[0]) as checkpoints:
        state, _ = checkpoints.resume(zero.init(create, adam()))
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(state.master), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b.astype(jnp.bfloat16)))


def test_the_state_that_is_given_is_freed(saved):
    zero = setting()
    given = zero.init(create, adam())
    with zero.checkpoints(saved[0]) as checkpoints:
        checkpoints.resume(given)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))


def test_a_part_is_restored(saved):
    zero = setting()
    given = zero.init(create, adam())
    before = digest_of(given)
    with zero.checkpoints(saved[0]) as checkpoints:
        state = checkpoints.restore(given, 4, only=("params/layers/*",))
        with pytest.raises(ValueError, match=r"only='nothing/\*' matches no leaf"):
            checkpoints.restore(state, 4, only=("nothing/*",))
        with pytest.raises(ValueError, match=r"no step 3 in .*\n  got:      2, 4\n"):
            checkpoints.restore(state, 3)
        with pytest.raises(ValueError, match="is not read, and the state has only its aval"):
            checkpoints.restore(zero.eval_init(create, adam()), 4, only=("params/*",))
    after = digest_of(state)
    for path in after:
        want = saved[2] if path.startswith("params/layers/") else before
        assert after[path] == want[path]
    zero.train_step(loss)(state, batch(0))


def test_dropped_layers_and_another_optimizer_are_restored_only_when_asked(saved):
    zero = setting()
    with zero.checkpoints(saved[0]) as checkpoints:
        fresh = zero.init(create, optax.sgd(0.1, momentum=0.9))
        opt_state = {p: d for p, d in digest_of(fresh).items() if p.startswith("opt_state")}
        with pytest.raises(CheckpointMismatch) as told:
            checkpoints.resume(fresh)
        assert "saved:    the optimizer's 0/count, 0/mu, 0/nu, 2/count" in str(told.value)
        assert "state:    the optimizer's 0/trace" in str(told.value) and "new_optimizer=True" in str(told.value)
        state = checkpoints.restore(fresh, 4, new_optimizer=True)
        found = digest_of(state)
        assert {p: found[p] for p in opt_state} == opt_state
        assert found["params/odd"] == saved[2]["params/odd"] and int(state.step) == 4


def test_leaves_that_are_missing_or_left_over_are_told_with_the_nearest_name(saved):
    zero = setting()
    fresh = zero.init(renamed, optax.sgd(0.1))
    with zero.checkpoints(saved[0]) as checkpoints:
        with pytest.raises(CheckpointMismatch) as told:
            checkpoints.restore(fresh, 4, new_optimizer=True)
        assert told.value.args[0].splitlines()[1:] == [
            "  missing:  params/layers/2/bias: the checkpoint has no such leaf, the nearest is params/layers/2/b "
            "(missing=('params/layers/2/bias',) allows it)",
            "  extra:    params/layers/2/b: the state has no such leaf, the nearest is params/layers/2/w "
            "(extra=('params/layers/2/b',) allows it)",
        ]
        assert "step_4 does not fit the state" in str(told.value)
        allowed = {"missing": ["params/layers/2/bias"], "extra": ["params/layers/2/b"]}
        state = checkpoints.restore(fresh, 4, new_optimizer=True, **allowed)
    assert digest_of(state)["params/layers/1/b"] == saved[2]["params/layers/1/b"]


def test_another_shape_is_told(saved):
    zero = setting()
    wide = zero.eval_init(lambda key: create(key, 2 * WIDTH), adam())
    with zero.checkpoints(saved[0]) as checkpoints, pytest.raises(CheckpointMismatch) as told:
        checkpoints.resume(wide)
    assert "shape:    params/layers/0/w: (32, 32) was saved, the state has (64, 32)" in str(told.value)


def test_another_dtype_is_told_and_cast_when_asked(saved):
    narrow = zerojax.Precision(param_dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16, reduce_dtype=jnp.bfloat16)
    zero = setting(precision=narrow)
    with zero.checkpoints(saved[0]) as checkpoints:
        with pytest.raises(CheckpointMismatch) as told:
            checkpoints.resume(zero.eval_init(create, adam()))
        line = "dtype:    params/odd: float32 was saved, the state has bfloat16 (cast=True allows it)"
        assert line in str(told.value)
        state = checkpoints.restore(zero.init(create, adam()), 4, cast=True)
    assert state.params["odd"].dtype == jnp.bfloat16


@pytest.mark.parametrize("damage", [flip, zero_a_page, cut, lambda file: file.unlink()])
def test_damaged_arrays_are_found_and_older_steps_stay_usable(copy, damage):
    damage(largest_file(copy))
    zero = setting()
    with zero.checkpoints(copy) as checkpoints:
        with pytest.raises(CheckpointCorrupted, match="step_4"):
            checkpoints.resume(zero.init(create, adam()))
        state, start = checkpoints.resume(zero.init(create, adam()), fallback=True)
    assert start == 2 and int(state.step) == 2
    assert store.steps(copy) == [2] and len(list(copy.glob("aside_step_4_*"))) == 1
    assert len(train(setting(), copy, 6)[0]) == 4 and store.steps(copy) == [2, 4, 6]


def test_a_flipped_bit_in_any_file_is_found_or_changes_nothing(copy, saved):
    zero, found = setting(), []
    files = [file for file in (copy / "step_4").rglob("*") if file.is_file() and file.stat().st_size]
    for file in files:
        whole = file.read_bytes()
        flip(file)
        with zero.checkpoints(copy) as checkpoints:
            try:
                state = checkpoints.restore(zero.eval_init(create, adam()), 4)
                assert digest_of(state) == saved[2]
            except CheckpointCorrupted:
                found.append(file.name)
        file.write_bytes(whole)
    assert len(files) > 6 and "metadata" in found and len(found) >= 3


def test_an_array_that_was_changed_and_written_again_is_found_by_its_digest(copy):
    """As Orbax would restore it, without a word."""
    zero = setting()
    with zero.checkpoints(copy) as checkpoints:
        state, _ = checkpoints.resume(zero.init(create, adam()))
    arrays = contents.arrays(state)
    arrays["params/odd"] = arrays["params/odd"].at[3].add(1e-6)
    manifest = store.read_manifest(copy, 4)
    shutil.rmtree(copy / "step_4")
    writer = store.Store(copy)
    writer.save(arrays, manifest)
    writer.close()
    with zero.checkpoints(copy) as checkpoints, pytest.raises(CheckpointCorrupted) as told:
        checkpoints.resume(zero.init(create, adam()))
    assert (
        "step_4 is damaged\n  got:      params/odd: not what was saved\n  fix:      resume(..., fallback=True)"
        in str(told.value)
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace('"shape": [7]', '"shape": [8]'),
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[1, 2]",
        lambda text: "[" * 100_000,
        lambda text: text.replace('"step": 4', '"step": 5'),
    ],
)
def test_a_damaged_manifest_is_found_and_other_steps_stay_usable(copy, change):
    change_manifest(copy, change)
    zero = setting()
    with zero.checkpoints(copy) as checkpoints:
        with pytest.raises(CheckpointCorrupted, match="step_4"):
            checkpoints.resume(zero.eval_init(create, adam()))
        assert checkpoints.resume(zero.eval_init(create, adam()), fallback=True)[1] == 2


def test_where_every_step_is_damaged_nothing_begins_again(copy):
    for step in (2, 4):
        change_manifest(copy, lambda text: "", step)
    zero = setting()
    with zero.checkpoints(copy) as checkpoints, pytest.raises(CheckpointCorrupted, match=r"no step of .* is whole"):
        checkpoints.resume(zero.init(create, adam()), fallback=True)


def test_a_step_that_is_not_marked_is_ignored_and_logged(copy, caplog):
    (copy / "step_4" / "commit_success.txt").unlink()
    zero = setting()
    with zero.checkpoints(copy) as checkpoints:
        assert checkpoints.resume(zero.eval_init(create, adam()))[1] == 2
        assert "step_4 is ignored: without commit_success.txt its save did not end" in caplog.text
        (copy / "step_2" / "commit_success.txt").unlink()
        with pytest.raises(CheckpointCorrupted, match="2 folders of steps, none of them of a save that ended"):
            checkpoints.resume(zero.init(create, adam()))


def test_other_folders_among_the_steps_are_ignored(copy):
    for name in ("step_", "step_9x", "7", "notes", "step_12.orbax-checkpoint-tmp-3"):
        (copy / name).mkdir()
    (copy / "step_99").write_text("a file")
    losses, _ = train(setting(), copy, 6)
    assert len(losses) == 2 and (copy / "notes").is_dir() and (copy / "7").is_dir()
    assert store.steps(copy) == [2, 4, 6]


def test_a_checkpoint_of_a_newer_version_is_told(copy):
    newer = lambda text: text.replace('"format": 1', '"format": 2').replace('"zerojax": "0.1.0"', '"zerojax": "9.0"')
    change_manifest(copy, newer)
    zero = setting()
    with zero.checkpoints(copy) as checkpoints, pytest.raises(CheckpointMismatch) as told:
        checkpoints.resume(zero.eval_init(create, adam()))
    assert "got:      format 2 of zerojax 9.0" in str(told.value)
    assert f"want:     format 1 or older, of zerojax {zerojax.__version__}" in str(told.value)


def test_a_second_run_in_the_directory_is_refused(tmp_path):
    zero = setting()
    used = pytest.raises(ValueError, match=r"another run uses .*\n  got:      process \d+ on")
    with zero.checkpoints(tmp_path), used:
        zero.checkpoints(tmp_path)
    zero.checkpoints(tmp_path).close()


def test_a_step_is_saved_once(tmp_path):
    """Also if it is to be saved again while its save is under way."""
    zero = setting()
    state = zero.init(create, adam())
    with zero.checkpoints(tmp_path, every=1) as checkpoints:
        checkpoints.update(state)
        checkpoints.save(state)
        checkpoints.wait()
        checkpoints.save(state)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["step_0"]


def test_old_steps_are_deleted(tmp_path):
    train(setting(), tmp_path, 10, keep=2, keep_every=4)
    assert store.steps(tmp_path) == [4, 8, 10]


def test_old_steps_are_deleted_while_the_run_goes_on(tmp_path):
    """And nothing that is no step."""
    zero, deleted = setting(), tmp_path / "deleted"
    state, step = zero.init(create, adam()), zero.train_step(loss)
    deleted.mkdir()
    (deleted / "notes.txt").write_text("mine")
    left = lambda: store.steps(tmp_path) + [path.name for path in deleted.iterdir()]
    with zero.checkpoints(tmp_path, every=10**6, keep=1) as checkpoints:
        for i in range(2):
            state, _ = step(state, batch(i))
            checkpoints.save(state)
        until = time.monotonic() + 60
        while left() != [2, "notes.txt"] and time.monotonic() < until:
            checkpoints.update(state)
            time.sleep(0.02)
        assert left() == [2, "notes.txt"]


def test_an_exception_in_the_loop_is_what_is_shown_and_the_save_ends(tmp_path):
    zero = setting()
    state, step = zero.init(create, adam()), zero.train_step(loss)
    with pytest.raises(KeyError, match="mine"), zero.checkpoints(tmp_path, every=1) as checkpoints:
        state, _ = step(state, batch(0))
        checkpoints.update(state)
        raise KeyError("mine")
    assert store.steps(tmp_path) == [1]


def test_a_failed_save_is_reported_and_the_second_ends_the_run(tmp_path, monkeypatch, caplog):
    zero = setting()
    state, step = zero.init(create, adam()), zero.train_step(loss)

    def fail(self, arrays, manifest):
        raise OSError(28, "No space left on device")

    with zero.checkpoints(tmp_path, every=1) as checkpoints:
        state, _ = step(state, batch(0))
        checkpoints.update(state)
        saving = store.Store.save
        for broken in (True, False, True):  # it fails, it works, it fails: never twice in a row
            monkeypatch.setattr(store.Store, "save", fail if broken else saving)
            state, _ = step(state, batch(0))
            checkpoints.update(state)
        assert (
            caplog.text.count("No space left on device") == 2
            and f"the save of step 2 in {tmp_path} failed" in caplog.text
        )
        state, _ = step(state, batch(0))
        with pytest.raises(RuntimeError) as told:
            checkpoints.update(state)
        assert (
            "failed, and so did the one before it" in str(told.value)
            and "the save of step 5 in" in str(told.value)
            and "is 3" in str(told.value)
        )
        monkeypatch.setattr(store.Store, "save", saving)
    assert store.steps(tmp_path) == [1, 3]


def test_a_last_save_that_fails_is_no_success(tmp_path, monkeypatch):
    zero = setting()
    state, step = zero.init(create, adam()), zero.train_step(loss)
    monkeypatch.setattr(store.Store, "save", lambda *args: [][0])
    with (
        pytest.raises(RuntimeError, match="the last save failed: list index"),
        zero.checkpoints(tmp_path) as checkpoints,
    ):
        checkpoints.save(step(state, batch(0))[0])


def test_a_step_that_is_there_already_is_set_aside(copy, caplog):
    """Of a run that goes on from an older step of its own choice, or whose save did not end."""
    zero = setting()
    (copy / "step_4" / "commit_success.txt").unlink()
    with zero.checkpoints(copy) as checkpoints:
        state = checkpoints.restore(zero.init(create, adam()), 2)
        checkpoints.save(dataclasses.replace(state, step=jnp.int32(4)))
    assert store.steps(copy) == [2, 4] and "step_4 is set aside as aside_step_4_" in caplog.text


def test_a_state_that_is_not_finite_is_never_saved(tmp_path):
    zero = setting()
    state = zero.init(create, adam())
    master = {**state.master, "odd": state.master["odd"].at[2].set(jnp.nan)}
    with zero.checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state)
        with pytest.raises(FloatingPointError) as told:
            checkpoints.save(dataclasses.replace(state, master=master, step=jnp.int32(1)))
    assert "the state of step 1 is not finite, and is not saved\n  got:      params/odd\n" in str(told.value)
    assert "go on from step 0" in str(told.value)
    assert store.steps(tmp_path) == [0]


@pytest.mark.parametrize("where", [{"epoch": 1, "at": [3, 4]}, b"\x00\xffraw", None])
def test_where_the_data_was_is_saved(tmp_path, where):
    zero = setting()
    state = zero.init(create, adam())
    with zero.checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, Iterator(where))
        checkpoints.close()
    fresh = Iterator("elsewhere")
    with zero.checkpoints(tmp_path) as checkpoints:
        state, _ = checkpoints.resume(state, fresh)
        assert fresh.state == where
        with pytest.raises(ValueError, match="state of the data iterator cannot be saved"):
            checkpoints.save(dataclasses.replace(state, step=jnp.int32(1)), Iterator({"at": (1, 2)}))
    assert store.steps(tmp_path) == [0]
    told = json.loads((tmp_path / "step_0" / "manifest" / "metadata").read_text())
    assert len(told["data"]) == 1


class Shuffled:
    """Rows of a set in another order each epoch; its state is where it is."""

    def __init__(self, num_rows=3 * ROWS):
        self.num_rows, self.epoch, self.at = num_rows, 0, 0

    def __next__(self):
        order = np.random.default_rng(self.epoch).permutation(self.num_rows)
        rows = order[self.at : self.at + ROWS]
        self.at += ROWS
        if self.at == self.num_rows:
            self.epoch, self.at = self.epoch + 1, 0
        return rows

    def get_state(self):
        return {"epoch": self.epoch, "at": self.at}

    def set_state(self, state):
        self.epoch, self.at = state["epoch"], state["at"]


@pytest.mark.parametrize("stop", [2, 3, 4])
def test_a_run_that_resumes_in_the_middle_of_an_epoch_repeats_and_skips_no_row(tmp_path, stop):
    """Before, at, and after the end of the first epoch."""
    zero = setting(precision="fp32")
    step = zero.train_step(loss)
    seen = []

    def go_on(until):
        data = Shuffled()
        with zero.checkpoints(tmp_path, every=1) as checkpoints:
            state, start = checkpoints.resume(zero.init(create, adam()), data)
            for i in range(start, until):
                seen.extend(next(data))
                state, metrics = step(state, batch(i))
                checkpoints.update(state, metrics, data)

    go_on(stop)
    go_on(6)
    whole = Shuffled()
    assert seen == [row for _ in range(6) for row in next(whole)]
    assert sorted(seen[: whole.num_rows]) == sorted(seen[whole.num_rows :]) == list(range(whole.num_rows))


def test_data_of_another_number_of_processes_is_refused_where_it_differs():
    assert iterators.own_state([{"at": 3}, {"at": 3}], "step_1") == {"at": 3}
    with pytest.raises(CheckpointMismatch, match="different states of 2 processes, now there are 1"):
        iterators.own_state([{"at": 3}, {"at": 4}], "step_1")
    with pytest.raises(CheckpointMismatch, match="step_1 has no state of a data iterator"):
        iterators.own_state(None, "step_1")


def test_a_state_that_cannot_go_on_with_the_data_is_not_freed(saved):
    zero = setting()
    given = zero.init(create, adam())
    with zero.checkpoints(saved[0]) as checkpoints, pytest.raises(CheckpointMismatch, match="state of a data iterator"):
        checkpoints.resume(given, Iterator({"at": 0}))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(given))


def test_nothing_to_begin_with_is_told(tmp_path):
    zero = setting()
    with zero.checkpoints(tmp_path) as checkpoints, pytest.raises(ValueError, match="nothing to begin with"):
        checkpoints.resume(zero.eval_init(create, adam()))


@pytest.mark.parametrize("options", [{"every": 0}, {"keep": 0}, {"keep_every": True}, {"every": 1.5}])
def test_numbers_that_are_none_are_refused(tmp_path, options):
    with pytest.raises(ValueError, match="a number of steps, at least 1"):
        setting().checkpoints(tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


DTYPES = ["float32", "bfloat16", "float16", "int8", "uint8", "int32", "uint32", "bool", "float8_e4m3fn", "complex64"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_digest_is_that_of_the_elements_in_their_places(dtype):
    """The same over 1, 2 or 8 devices; another for one bit, for two elements that changed places, for another shape."""
    raw = np.random.default_rng(0).integers(0, 2, (16, 24)).astype(jnp.dtype(dtype))
    one = lambda a: digests({"a": jnp.asarray(a)})["a"].text
    spec = jax.sharding.PartitionSpec
    for mesh, at in ((zerojax.make_mesh(), spec("data")), (zerojax.make_mesh(model=2), spec("model", "data"))):
        placed = jax.device_put(raw, jax.sharding.NamedSharding(mesh, at))
        assert digests({"a": placed})["a"].text == one(raw)
    found = {one(raw)}
    for _ in range(8):
        other = raw.copy()
        other.view(np.uint8).reshape(-1)[np.random.default_rng(len(found)).integers(raw.nbytes)] ^= 1
        found.add(one(other))
    swapped = raw.copy().reshape(-1)
    a, b = int(np.argmin(np.abs(raw).reshape(-1))), int(np.argmax(np.abs(raw).reshape(-1)))
    swapped[[a, b]] = swapped[[b, a]]
    found |= {one(swapped.reshape(raw.shape)), one(raw.T.copy()), one(raw[:8])}
    assert len(found) >= 10
    assert len(one(raw)) == 16
    on_the_host = HostDigest()
    for piece in np.split(raw, [1, 5, 6]):
        on_the_host.add(piece)
    assert on_the_host.text == one(raw)


def test_a_digest_tells_what_is_not_finite():
    found = digests({"a": jnp.array([1.0, jnp.nan]), "b": jnp.array([jnp.inf]), "c": jnp.zeros(3), "d": jnp.arange(3)})
    assert [(d.has_nan, d.has_inf) for d in found.values()] == [(True, False), (False, True), *[(False, False)] * 2]
    assert contents.bad_values({"params/a": found["b"], "opt_state/a": found["b"], "opt_state/b": found["a"]}) == [
        "params/a",
        "opt_state/b",
    ]


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.INFO, "zerojax")


def guarded_step():
    """(zero, a state, a step whose loss is multiplied by what the batch says)."""
    zero = setting(precision="fp32")
    return zero, zero.init(create, adam()), zero.train_step(lambda p, b, key: loss(p, b, key) * b["scale"].mean())


def scaled(i, value):
    return {**batch(i), "scale": np.full((ROWS,), value, np.float32)}


@pytest.mark.parametrize("abstract", [False, True])
def test_keys_of_another_generator_come_back_as_such(tmp_path, abstract):
    zero = setting()
    state = zero.init(create, adam())
    state = dataclasses.replace(state, key=jax.device_put(jax.random.key(5, impl="rbg"), state.key.sharding))
    words, avals = np.asarray(jax.random.key_data(state.key)), contents.avals(state)
    with zero.checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state)
        checkpoints.wait()
        again, _ = checkpoints.resume(avals if abstract else state)
    assert again.key.dtype == avals.key.dtype
    np.testing.assert_array_equal(np.asarray(jax.random.key_data(again.key)), words)


def test_a_first_update_that_is_skipped_is_logged(tmp_path, caplog):
    zero, state, step = guarded_step()
    with zero.checkpoints(tmp_path) as guarded:
        state, _ = guarded.resume(state)
        state, metrics = step(state, scaled(0, np.nan))
        guarded.update(state, metrics)
    assert "step 1: a gradient was not finite; the update was skipped, 1 so far" in caplog.text


def test_skipped_updates_are_logged_and_too_many_in_a_row_end_the_run(tmp_path, caplog):
    zero, state, step = guarded_step()
    bad = [False, True, True, False, True, True, True, True]
    with pytest.raises(FloatingPointError) as told, zero.checkpoints(tmp_path, every=100, most_skipped=3) as guarded:
        for i, not_finite in enumerate(bad):
            state, metrics = step(state, scaled(i, np.nan if not_finite else 1))
            guarded.update(state, metrics)
    assert "3 updates in a row were skipped" in str(told.value)
    assert "got:      steps 5 to 7; the last good step is 4\n" in str(told.value)
    assert caplog.text.count("the update was skipped") == 5


def test_a_jump_of_the_loss_is_logged_when_asked(tmp_path, caplog):
    zero, state, step = guarded_step()
    with zero.checkpoints(tmp_path, every=100, spike=5) as guarded:
        for i in range(14):
            state, metrics = step(state, scaled(i, 20 if i == 12 else 1))
            guarded.update(state, metrics)
    assert caplog.text.count("times the median") == 1 and "step 13: the loss is" in caplog.text


@pytest.fixture
def handler():
    """What SIGTERM does, put back afterwards."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("when", ["before", "after", "never"])
def test_sigterm_saves_and_ends_with_a_code_of_its_own(tmp_path, handler, when):
    """A handler of the user's is called too, whether it was set before or after."""
    called, mine = [], lambda number, frame: called.append(number)
    zero, state, step = guarded_step()
    if when == "before":
        signal.signal(signal.SIGTERM, mine)
    with pytest.raises(SystemExit) as ended, zero.checkpoints(tmp_path, every=100) as guarded:
        for i in range(4):
            state, metrics = step(state, scaled(i, 1))
            if i == 0 and when == "after":
                signal.signal(signal.SIGTERM, mine)
            if i == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            guarded.update(state, metrics)
    assert ended.value.code == EXIT_CODE == 75 and store.steps(tmp_path) == [3]
    assert called == ([] if when == "never" else [signal.SIGTERM])
    assert signal.getsignal(signal.SIGTERM) is (mine if when != "never" else signal.SIG_DFL)


def test_handlers_that_call_the_one_before_are_all_called_once(tmp_path, handler):
    """As handlers should: those set later call ours, which calls the one before. Also when ours is gone."""
    called = []

    def chain(name):
        before = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda number, frame: (called.append(name), before(number, frame)))

    signal.signal(signal.SIGTERM, lambda number, frame: called.append("first"))
    zero, state, step = guarded_step()
    with pytest.raises(SystemExit) as ended, zero.checkpoints(tmp_path, every=100) as guarded:
        for i in range(4):
            if i < 2:
                chain(i)
            state, metrics = step(state, scaled(i, 1))
            if i == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            guarded.update(state, metrics)
    assert ended.value.code == EXIT_CODE and called == [1, 0, "first"]
    called.clear()
    os.kill(os.getpid(), signal.SIGTERM)
    assert called == [1, 0, "first"]


def test_where_nothing_can_be_locked_a_run_goes_on(tmp_path, monkeypatch, caplog):
    def cannot(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(store.fcntl, "flock", cannot)
    setting().checkpoints(tmp_path).close()
    assert "nothing keeps a second run away" in caplog.text
