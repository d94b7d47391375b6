"""Checkpoints are restored bit for bit onto any stage and mesh; damaged or mismatched ones raise an error.

The errors name the leaves.
"""

import dataclasses
import errno
import json
import logging
import os
import re
import shutil
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
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
from zerojax.checkpoints import (
    EXIT_CODE,
    CheckpointCorrupted,
    CheckpointMismatch,
    contents,
    manifest,
    restorer,
    run_directory,
    store,
)
from zerojax.checkpoints.digest import HostDigest, digests
from zerojax.checkpoints.pieces import verify_arrays


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of 4 steps at stage 3 in bf16 on 8 devices: (its directory, its losses, the digests of its last state)."""
    directory = tmp_path_factory.mktemp("run")
    losses, state = train(setting(), directory, 4)
    return directory, losses, digest_of(state)


@pytest.fixture
def copy(saved, tmp_path):
    """A copy of the directory of that run."""
    return shutil.copytree(saved[0], tmp_path / "copy")


def test_a_resumed_run_equals_one_that_did_not_stop(saved, tmp_path):
    """Bit for bit on the same mesh and stage: losses, parameters, optimizer state, keys."""
    _, before, _ = saved
    copied = shutil.copytree(saved[0], tmp_path / "copy")
    after, resumed = train(setting(), copied, 7)
    whole, state = train(setting(), tmp_path / "other", 7)
    assert before + after == whole and len(after) == 3
    assert digest_of(resumed) == digest_of(state)


@pytest.mark.parametrize(
    ("stage", "num_devices", "mesh"),
    [(0, 8, {}), (2, 8, {"replica": 2}), (3, 8, {"model": 2}), (3, 1, {})],
)
def test_a_state_is_restored_onto_any_stage_and_mesh(saved, stage, num_devices, mesh):
    """Bit for bit. The next losses differ only by the order of sums in bf16."""
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


def test_a_run_in_another_precision_restores_the_same_parameters(saved):
    directory, _, expected = saved
    zero = setting(1, "fp32")
    with zero.checkpoints(directory) as checkpoints:
        state, _ = checkpoints.resume(zero.eval_init(create, adam()))
    assert digest_of(state) == expected and state.master is None
    assert state.params["layers"]["0"]["w"].dtype == jnp.float32


def test_restored_compute_parameters_are_a_cast_of_the_master_parameters(saved):
    zero = setting(2)
    with zero.checkpoints(saved[0]) as checkpoints:
        state, _ = checkpoints.resume(zero.init(create, adam()))
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(state.master), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b.astype(jnp.bfloat16)))


class Normed(nnx.Module):
    """Has running statistics, and keys for dropout with a count of those that were drawn."""

    def __init__(self, rngs):
        self.layer = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, axis_name="data", rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.layer(x)))


def on_host(state):
    """Every leaf of a state, by path, as numpy arrays. Unlike `contents.arrays`, it knows of no part of a state."""
    data = lambda leaf: jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): np.asarray(data(leaf)) for path, leaf in leaves}


@pytest.mark.parametrize("abstract", [False, True])
def test_the_loss_scale_and_the_state_of_the_model_are_restored(tmp_path, abstract):
    """With every other leaf, bit for bit. A run from another seed, or before the first step, has others."""
    fp16 = zerojax.Precision(compute_dtype=jnp.float16, reduce_dtype=jnp.float16, initial_scale=4.0, growth_interval=2)
    zero = setting(precision=fp16)
    step = zero.train_step(lambda model, batch: jnp.mean((model(batch["x"]) - batch["y"]) ** 2))
    state = zero.init(Normed, adam())
    for i in range(3):
        state, _ = step(state, batch(i))
    assert (float(state.loss_scale.value), int(state.loss_scale.finite_steps)) == (8, 1)
    with zero.checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state)
        checkpoints.wait()
        other = zero.init(Normed, adam(), 1)
        fresh = on_host(other)
        restored, _ = checkpoints.resume(contents.avals(other) if abstract else other)
    want, found = on_host(state), on_host(restored)
    differing = {path for path, value in want.items() if not np.array_equal(value, fresh[path])}
    names = ("loss_scale.value", "loss_scale.finite_steps", "'mean'", "'var'", "'key'", "'count'")
    assert all(any(name in path for path in differing) for name in names)
    assert found.keys() == want.keys()
    for path, value in want.items():
        assert found[path].dtype == value.dtype
        np.testing.assert_array_equal(found[path], value, err_msg=path)


def test_a_run_that_resumes_between_two_saves_keeps_its_steps_and_counts(tmp_path, caplog):
    """It resumes from step 3. Steps 4 and 6 are due every 2 steps, and the update of step 4 is the second skipped."""
    zero, state, step = guarded_step()

    def train_until(state, until):
        with zero.checkpoints(tmp_path, every=2, keep=None) as checkpoints:
            state, start = checkpoints.resume(state)
            for i in range(start, until):
                state, metrics = step(state, scaled(i, np.nan if i in (1, 3) else 1))
                checkpoints.update(state, metrics)
            checkpoints.save(state)

    train_until(state, 3)
    assert "step 2: the update was skipped: a gradient is not finite (1 so far)" in caplog.text
    caplog.clear()
    train_until(zero.init(create, adam()), 7)
    assert store.steps(tmp_path) == [2, 3, 4, 6, 7]
    assert caplog.text.count("the update was skipped") == 1
    assert "step 4: the update was skipped: a gradient is not finite (2 so far)" in caplog.text


def test_the_passed_state_is_freed(saved):
    zero = setting()
    given = zero.init(create, adam())
    with zero.checkpoints(saved[0]) as checkpoints:
        checkpoints.resume(given)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))


def test_a_part_of_a_checkpoint_is_restored(saved):
    zero = setting()
    given = zero.init(create, adam())
    before = digest_of(given)
    with zero.checkpoints(saved[0]) as checkpoints:
        state = checkpoints.restore(given, 4, only=("params/layers/*",))
        with pytest.raises(ValueError, match=r"only='nothing/\*' matches no leaf"):
            checkpoints.restore(state, 4, only=("nothing/*",))
        with pytest.raises(ValueError, match=r"no step 3 in .*\n  got:      steps 2, 4\n"):
            checkpoints.restore(state, 3)
        with pytest.raises(ValueError, match="is not restored, and the state contains only its aval"):
            checkpoints.restore(zero.eval_init(create, adam()), 4, only=("params/*",))
    after = digest_of(state)
    for path in after:
        want = saved[2] if path.startswith("params/layers/") else before
        assert after[path] == want[path]
    zero.train_step(loss)(state, batch(0))


def test_another_optimizer_is_an_error_unless_allowed(saved):
    zero = setting()
    with zero.checkpoints(saved[0]) as checkpoints:
        fresh = zero.init(create, optax.sgd(0.1, momentum=0.9))
        opt_state = {p: d for p, d in digest_of(fresh).items() if p.startswith("opt_state")}
        with pytest.raises(CheckpointMismatch) as raised:
            checkpoints.resume(fresh)
        assert "saved:    an optimizer state with 0/count, 0/mu, 0/nu, 2/count" in str(raised.value)
        assert "state:    an optimizer state with 0/trace" in str(raised.value) and "optimizer='new'" in str(
            raised.value
        )
        state = checkpoints.restore(fresh, 4, optimizer="new")
        found = digest_of(state)
        assert {p: found[p] for p in opt_state} == opt_state
        assert found["params/odd"] == saved[2]["params/odd"] and int(state.step) == 4


def resumed(directory, tx, seed=0):
    """What is said when a run of one step continues with this optimizer."""
    zero = setting()
    with zero.checkpoints(directory) as checkpoints:
        return checkpoints.resume(zero.init(create, tx, seed=seed))[0]


def test_what_a_step_has_different_from_the_program_is_told_in_a_line_each(tmp_path, caplog):
    """Constants of the optimizer are those of the program; rates in its state and the random key those of the step."""
    injected = lambda rate, b1=0.9: optax.inject_hyperparams(optax.adam)(learning_rate=rate, b1=b1)
    train(setting(), tmp_path / "a", 2, optax.adamw(1e-2))
    train(setting(), tmp_path / "b", 2, injected(1e-2))
    caplog.clear()
    resumed(tmp_path / "a", optax.adamw(1e-2))
    resumed(tmp_path / "b", injected(1e-2))
    assert [record for record in caplog.records if "step 2 " in record.getMessage() and record.levelno > 20] == []

    resumed(tmp_path / "a", optax.adamw(1e-2, b1=0.8), seed=1)
    assert "step 2 was saved with another optimizer: scale_by_adam.b1: 0.9, now 0.8" in caplog.text
    assert "step 2 replaces values of the program: another seed" in caplog.text
    state = resumed(tmp_path / "b", injected(1e-3))
    rate = float(state.opt_state.hyperparams["learning_rate"])
    assert "opt_state/hyperparams/learning_rate 0.01, not 0.001" in caplog.text and rate == pytest.approx(1e-2)


def test_missing_and_extra_leaves_are_reported_with_the_nearest_name(saved):
    zero = setting()
    fresh = zero.init(renamed, optax.sgd(0.1))
    with zero.checkpoints(saved[0]) as checkpoints:
        with pytest.raises(CheckpointMismatch) as raised:
            checkpoints.restore(fresh, 4, optimizer="new")
        assert raised.value.args[0].splitlines()[1:] == [
            "  missing:  params/layers/2/bias: the checkpoint has no such leaf, the nearest is params/layers/2/b "
            "(missing=('params/layers/2/bias',) allows it)",
            "  extra:    params/layers/2/b: the state has no such leaf, the nearest is params/layers/2/w "
            "(extra=('params/layers/2/b',) allows it)",
        ]
        assert "step_4 does not fit the state" in str(raised.value)
        allowed = {"missing": ["params/layers/2/bias"], "extra": ["params/layers/2/b"]}
        state = checkpoints.restore(fresh, 4, optimizer="new", **allowed)
    assert digest_of(state)["params/layers/1/b"] == saved[2]["params/layers/1/b"]


def test_another_shape_is_an_error(saved):
    zero = setting()
    wide = zero.eval_init(lambda key: create(key, 2 * WIDTH), adam())
    with zero.checkpoints(saved[0]) as checkpoints, pytest.raises(CheckpointMismatch) as raised:
        checkpoints.resume(wide)
    line = "shape:    9 leaves: (32, 32) was saved, the state has (64, 32): params/layers/*/w × 3, "
    assert line in str(raised.value)


def test_another_dtype_is_an_error_unless_cast_is_allowed(saved):
    narrow = zerojax.Precision(param_dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16, reduce_dtype=jnp.bfloat16)
    zero = setting(precision=narrow)
    with zero.checkpoints(saved[0]) as checkpoints:
        with pytest.raises(CheckpointMismatch) as raised:
            checkpoints.resume(zero.eval_init(create, adam()))
        line = "dtype:    21 leaves: float32 was saved, the state has bfloat16 (cast=True allows it): params/layers/*/b"
        assert line in str(raised.value)
        state = checkpoints.restore(zero.init(create, adam()), 4, cast=True)
    assert state.params["odd"].dtype == jnp.bfloat16


def test_64_bits_are_not_read_as_32(copy):
    zero = setting()

    def change(text):
        content = json.loads(text)
        content["leaves"]["params/odd"]["dtype"] = "float64"
        return json.dumps(manifest.with_digest({name: content[name] for name in content if name != "digest"}))

    change_manifest(copy, change)
    with (
        zero.checkpoints(copy) as checkpoints,
        pytest.raises(CheckpointMismatch, match="JAX_ENABLE_X64=1"),
    ):
        checkpoints.restore(zero.eval_init(create, adam()), 4, cast=True)


@pytest.mark.parametrize("damage", [flip, zero_a_page, cut, lambda file: file.unlink()])
def test_damaged_arrays_are_detected_and_older_steps_stay_usable(copy, damage):
    damage(largest_file(copy))
    zero = setting()
    with zero.checkpoints(copy) as checkpoints:
        with pytest.raises(CheckpointCorrupted, match="step_4"):
            checkpoints.resume(zero.init(create, adam()))
        state, start = checkpoints.resume(zero.init(create, adam()), fallback=True)
    assert start == 2 and int(state.step) == 2
    assert store.steps(copy) == [2] and len(list(copy.glob("aside_step_4_*"))) == 1
    assert len(train(setting(), copy, 6)[0]) == 4 and store.steps(copy) == [2, 4, 6]


def test_a_flipped_bit_in_any_file_is_detected_or_changes_nothing(copy, saved):
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


def test_an_array_that_was_rewritten_is_detected_by_its_digest(copy):
    """Orbax alone would restore it without an error."""
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
    with zero.checkpoints(copy) as checkpoints, pytest.raises(CheckpointCorrupted) as raised:
        checkpoints.resume(zero.init(create, adam()))
    expected = "step_4 is damaged\n  got:      another digest than was saved, for params/odd\n  fix:      resume("
    assert expected in str(raised.value)


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
def test_a_damaged_manifest_is_detected_and_other_steps_stay_usable(copy, change):
    change_manifest(copy, change)
    zero = setting()
    with zero.checkpoints(copy) as checkpoints:
        with pytest.raises(CheckpointCorrupted, match="step_4"):
            checkpoints.resume(zero.eval_init(create, adam()))
        assert checkpoints.resume(zero.eval_init(create, adam()), fallback=True)[1] == 2


def test_a_run_does_not_start_over_if_every_step_is_damaged(copy):
    for step in (2, 4):
        change_manifest(copy, lambda text: "", step)
    zero = setting()
    with zero.checkpoints(copy) as checkpoints, pytest.raises(CheckpointCorrupted, match="there is no intact step in "):
        checkpoints.resume(zero.init(create, adam()), fallback=True)


def test_a_step_without_its_commit_file_is_ignored_and_logged(copy, caplog):
    (copy / "step_4" / "commit_success.txt").unlink()
    zero = setting()
    with zero.checkpoints(copy) as checkpoints:
        assert checkpoints.resume(zero.eval_init(create, adam()))[1] == 2
        assert "step_4 is ignored: its save did not complete (no commit_success.txt)" in caplog.text
        (copy / "step_2" / "commit_success.txt").unlink()
        with pytest.raises(CheckpointCorrupted, match="2 folders of steps, none with a completed save"):
            checkpoints.resume(zero.init(create, adam()))


def test_other_folders_among_the_steps_are_ignored(copy):
    for name in ("step_", "step_9x", "7", "notes", "step_12.orbax-checkpoint-tmp-3"):
        (copy / name).mkdir()
    (copy / "step_99").write_text("a file")
    losses, _ = train(setting(), copy, 6)
    assert len(losses) == 2 and (copy / "notes").is_dir() and (copy / "7").is_dir()
    assert store.steps(copy) == [2, 4, 6]


def test_a_checkpoint_of_a_newer_version_is_an_error(copy):
    newer = lambda text: text.replace('"format": 1', '"format": 2').replace('"zerojax": "0.1.0"', '"zerojax": "9.0"')
    change_manifest(copy, newer)
    zero = setting()
    with zero.checkpoints(copy) as checkpoints, pytest.raises(CheckpointMismatch) as raised:
        checkpoints.resume(zero.eval_init(create, adam()))
    assert "got:      format 2 of zerojax 9.0" in str(raised.value)
    assert f"want:     format 1 or older, of zerojax {zerojax.__version__}" in str(raised.value)


def test_a_second_run_in_the_directory_is_refused(tmp_path):
    zero = setting()
    used = pytest.raises(ValueError, match=r"another run is using .*\n  got:      process \d+ on")
    with zero.checkpoints(tmp_path), used:
        zero.checkpoints(tmp_path)
    zero.checkpoints(tmp_path).close()


def test_a_step_is_saved_once(tmp_path):
    """Also if `save` is called again while the first save is in progress."""
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


def test_old_steps_are_deleted_while_the_run_continues(tmp_path):
    """Other files are not deleted."""
    zero = setting()
    state, step = zero.init(create, adam()), zero.train_step(loss)
    for name in ("step_of_mine", "step_1_copied"):
        (tmp_path / name).mkdir()
    left = lambda: sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    with zero.checkpoints(tmp_path, every=10**6, keep=1) as checkpoints:
        for i in range(2):
            state, _ = step(state, batch(i))
            checkpoints.save(state)
        until = time.monotonic() + 60
        while (found := left()) != ["step_1_copied", "step_2", "step_of_mine"] and time.monotonic() < until:
            checkpoints.update(state)
            time.sleep(0.02)
        assert found == ["step_1_copied", "step_2", "step_of_mine"]


def test_an_exception_in_the_loop_is_raised_after_the_save_completes(tmp_path):
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
        for broken in (True, False, True):  # a failure, a success, a failure: never two in a row
            monkeypatch.setattr(store.Store, "save", fail if broken else saving)
            state, _ = step(state, batch(0))
            checkpoints.update(state)
        assert (
            caplog.text.count("No space left on device") == 2
            and f"the save of step 2 in {tmp_path} failed" in caplog.text
        )
        state, _ = step(state, batch(0))
        with pytest.raises(RuntimeError) as raised:
            checkpoints.update(state)
        assert (
            "failed, and so did the previous save" in str(raised.value)
            and "the save of step 5 in" in str(raised.value)
            and "is 3" in str(raised.value)
        )
        monkeypatch.setattr(store.Store, "save", saving)
    assert store.steps(tmp_path) == [1, 3]


def test_a_failure_of_the_last_save_is_raised(tmp_path, monkeypatch):
    zero = setting()
    state, step = zero.init(create, adam()), zero.train_step(loss)
    monkeypatch.setattr(store.Store, "save", lambda *args: [][0])
    with (
        pytest.raises(RuntimeError, match="the last save failed: list index"),
        zero.checkpoints(tmp_path) as checkpoints,
    ):
        checkpoints.save(step(state, batch(0))[0])


def test_a_step_that_already_exists_is_set_aside(copy, caplog):
    """For example if the run resumed from an older step, or the save of the step did not complete."""
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
        with pytest.raises(FloatingPointError) as raised:
            checkpoints.save(dataclasses.replace(state, master=master, step=jnp.int32(1)))
    assert "the state of step 1 is not finite, and is not saved\n  got:      params/odd\n" in str(raised.value)
    assert "resume from step 0" in str(raised.value)
    assert store.steps(tmp_path) == [0]


FROZEN = {
    "empty": np.zeros((0, 5), np.float32),
    "mask": np.where(np.tri(8, 8), 0, -np.inf).astype(np.float32),
    "nan": np.full((8,), np.nan, np.float32),
    **{name: np.arange(128).reshape(8, 16).astype(jnp.dtype(name)) for name in ("int2", "int4", "float4_e2m1fn")},
}


def test_frozen_leaves_of_any_kind_are_saved(tmp_path):
    zero = zerojax.Zero(zerojax.make_mesh(), 3, trainable="w")
    states = [zero.init(lambda key: {**FROZEN, "w": jax.random.normal(key, (8, 16))}, adam(), jax.random.key(0))]
    states.append(jax.tree.map(jnp.copy, states[0]))
    with zero.checkpoints(tmp_path) as checkpoints:
        checkpoints.save(checkpoints.resume(states[0])[0])
        checkpoints.wait()
        restored, _ = checkpoints.resume(states[1])
    assert not any(problem for _, problem in verify_arrays(tmp_path, 0, store.read_manifest(tmp_path, 0)))
    for name, values in FROZEN.items():
        np.testing.assert_array_equal(np.asarray(restored.params[name]), values)


@pytest.mark.parametrize(
    ("leaf", "trainable", "data", "text"),
    [
        (np.zeros((8, 16), jnp.uint4), "w", None, "'params/leaf' cannot be saved\n  got:      uint4"),
        (np.full((8, 16), -np.inf, np.float32), None, None, "got:      params/leaf\n  fix:      .* freeze what"),
        (np.zeros(8, np.float32), None, Iterator({"at": (1, 2)}), "state of the data iterator cannot be saved"),
    ],
)
def test_what_cannot_be_saved_is_not_trained(tmp_path, leaf, trainable, data, text):
    zero = zerojax.Zero(zerojax.make_mesh(), 3, trainable=trainable)
    state = zero.init(lambda key: {"leaf": leaf, "w": jax.random.normal(key, (8, 16))}, adam(), jax.random.key(0))
    with zero.checkpoints(tmp_path) as checkpoints, pytest.raises((ValueError, FloatingPointError), match=text):
        checkpoints.resume(state, data)
    assert not store.folders(tmp_path)


def test_a_disk_without_room_for_a_step_is_warned_about(tmp_path, monkeypatch, caplog):
    zero = setting()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 100))
    with zero.checkpoints(tmp_path) as checkpoints:
        checkpoints.resume(zero.init(create, adam()))
    assert re.search(r"a step takes [\d.]+ KiB, and .* has 100 B free", caplog.text)


@pytest.mark.parametrize("where", [{"epoch": 1, "at": [3, 4]}, b"\x00\xffraw", None])
def test_the_state_of_the_data_iterator_is_saved(tmp_path, where):
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
    manifest = json.loads((tmp_path / "step_0" / "manifest" / "metadata").read_text())
    assert len(manifest["data"]) == 1


class Shuffled:
    """Iterates over the rows of a data set, in a different order in each epoch."""

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

    def train_until(until):
        data = Shuffled()
        with zero.checkpoints(tmp_path, every=1) as checkpoints:
            state, start = checkpoints.resume(zero.init(create, adam()), data)
            for i in range(start, until):
                seen.extend(next(data))
                state, metrics = step(state, batch(i))
                checkpoints.update(state, metrics, data)

    train_until(stop)
    train_until(6)
    whole = Shuffled()
    assert seen == [row for _ in range(6) for row in next(whole)]
    assert sorted(seen[: whole.num_rows]) == sorted(seen[whole.num_rows :]) == list(range(whole.num_rows))


def test_iterator_states_of_another_number_of_processes_must_be_equal():
    assert restorer.state_of_this_process([{"at": 3}, {"at": 3}], "step_1") == {"at": 3}
    with pytest.raises(CheckpointMismatch, match="different states of 2 processes, now there are 1"):
        restorer.state_of_this_process([{"at": 3}, {"at": 4}], "step_1")
    with pytest.raises(CheckpointMismatch, match="step_1 contains no state of a data iterator"):
        restorer.state_of_this_process(None, "step_1")


def test_the_passed_state_is_not_freed_if_the_iterator_cannot_be_restored(saved):
    zero = setting()
    given = zero.init(create, adam())
    with zero.checkpoints(saved[0]) as checkpoints, pytest.raises(CheckpointMismatch, match="state of a data iterator"):
        checkpoints.resume(given, Iterator({"at": 0}))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(given))


def test_a_run_without_checkpoint_cannot_start_from_avals(tmp_path):
    zero = setting()
    with zero.checkpoints(tmp_path) as checkpoints, pytest.raises(ValueError, match="there is no state to start from"):
        checkpoints.resume(zero.eval_init(create, adam()))


def test_invalid_numbers_of_steps_are_refused(tmp_path):
    for options in [{"every": 0}, {"keep": 0}, {"keep_every": True}, {"every": 1.5}]:
        expected = r"checkpoints: \w+ is invalid\n  got:      .*\n  fix:      use an integer, at least 1"
        with pytest.raises(ValueError, match=expected):
            setting().checkpoints(tmp_path / "new", **options)
        assert not (tmp_path / "new").exists()


DTYPES = ["float32", "bfloat16", "float16", "int8", "uint8", "int32", "uint32", "bool", "float8_e4m3fn"]
DTYPES += ["float4_e2m1fn", "complex64"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_digest_depends_on_elements_and_positions_and_not_on_the_sharding(dtype):
    """Equal over 1, 2 or 8 devices; different after a change of one bit, a swap of two elements, or a reshape."""
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
    host_digest = HostDigest()
    for piece in np.split(raw, [1, 5, 6]):
        host_digest.add(piece)
    assert host_digest.text == one(raw)


def test_a_digest_records_nan_and_infinity():
    found = digests({"a": jnp.array([1.0, jnp.nan]), "b": jnp.array([jnp.inf]), "c": jnp.zeros(3), "d": jnp.arange(3)})
    assert [(d.has_nan, d.has_inf) for d in found.values()] == [(True, False), (False, True), *[(False, False)] * 2]
    state = setting().eval_init(create, adam())
    bad = {"params/odd": found["b"], "opt_state/a": found["b"], "opt_state/b": found["a"]}
    assert contents.nonfinite_paths(state, bad) == ["params/odd", "opt_state/b"]


@pytest.fixture(autouse=True)
def log_level(caplog):
    caplog.set_level(logging.INFO, "zerojax")


def guarded_step():
    """(zero, a state, a step whose loss is multiplied by the mean of batch['scale'])."""
    zero = setting(precision="fp32")
    return zero, zero.init(create, adam()), zero.train_step(lambda p, b, key: loss(p, b, key) * b["scale"].mean())


def scaled(i, value):
    return {**batch(i), "scale": np.full((ROWS,), value, np.float32)}


@pytest.mark.parametrize("abstract", [False, True])
def test_keys_keep_their_implementation(tmp_path, abstract):
    zero = setting()
    state = zero.init(create, adam())
    state = dataclasses.replace(state, key=jax.device_put(jax.random.key(5, impl="rbg"), state.key.sharding))
    key_data, avals = np.asarray(jax.random.key_data(state.key)), contents.avals(state)
    with zero.checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state)
        checkpoints.wait()
        restored, _ = checkpoints.resume(avals if abstract else state)
    assert restored.key.dtype == avals.key.dtype
    np.testing.assert_array_equal(np.asarray(jax.random.key_data(restored.key)), key_data)


def test_a_skipped_first_update_is_logged(tmp_path, caplog):
    zero, state, step = guarded_step()
    with zero.checkpoints(tmp_path) as guarded:
        state, _ = guarded.resume(state)
        state, metrics = step(state, scaled(0, np.nan))
        guarded.update(state, metrics)
    assert "step 1: the update was skipped: a gradient is not finite (1 so far)" in caplog.text


def test_skips_while_the_loss_scale_falls_do_not_end_the_run(tmp_path):
    """A scale of 2^40 needs more of them than may be skipped. At the lowest scale, each one counts."""
    precision = dataclasses.replace(zerojax.Precision.of("fp16"), initial_scale=2.0**40)
    zero = setting(precision=precision)
    state, step = zero.init(create, adam()), zero.train_step(lambda p, b, key: loss(p, b, key) * b["scale"].mean())
    with pytest.raises(FloatingPointError) as raised, zero.checkpoints(tmp_path, every=100, most_skipped=3) as guarded:
        for i in range(80):
            state, metrics = step(state, scaled(i, 1 if i < 40 else np.nan))
            guarded.update(state, metrics)
            if i == 39:
                assert int(state.skipped) > 10 and float(metrics["loss_scale"]) > 1
    assert float(metrics["loss_scale"]) == 1
    assert "steps 41 to " in str(raised.value) and "the last good step is 40" in str(raised.value)


def test_skipped_updates_are_logged_and_too_many_consecutive_ones_end_the_run(tmp_path, caplog):
    zero, state, step = guarded_step()
    bad = [False, True, True, False, True, True, True, True]
    with pytest.raises(FloatingPointError) as raised, zero.checkpoints(tmp_path, every=100, most_skipped=3) as guarded:
        for i, not_finite in enumerate(bad):
            state, metrics = step(state, scaled(i, np.nan if not_finite else 1))
            guarded.update(state, metrics)
    assert "3 consecutive updates were skipped" in str(raised.value)
    assert "got:      steps 5 to 7; the last good step is 4\n" in str(raised.value)
    assert caplog.text.count("the update was skipped") == 5


@pytest.fixture
def handler():
    """Restores the SIGTERM handler after the test."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("when", ["before", "after", "never"])
def test_sigterm_saves_and_exits_with_code_75(tmp_path, handler, when):
    """A handler of the user is called too, whether it was installed before or after."""
    called, user_handler = [], lambda number, frame: called.append(number)
    zero, state, step = guarded_step()
    if when == "before":
        signal.signal(signal.SIGTERM, user_handler)
    with pytest.raises(SystemExit) as ended, zero.checkpoints(tmp_path, every=100) as guarded:
        for i in range(4):
            state, metrics = step(state, scaled(i, 1))
            if i == 0 and when == "after":
                signal.signal(signal.SIGTERM, user_handler)
            if i == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            guarded.update(state, metrics)
    assert ended.value.code == EXIT_CODE == 75 and store.steps(tmp_path) == [3]
    assert called == ([] if when == "never" else [signal.SIGTERM])
    assert signal.getsignal(signal.SIGTERM) is (user_handler if when != "never" else signal.SIG_DFL)


def test_chained_handlers_are_all_called_once(tmp_path, handler):
    """Later handlers call ours, which calls the earlier one; also after ours was removed."""
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


def test_a_run_continues_on_a_file_system_without_locks(tmp_path, monkeypatch, caplog):
    def cannot(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_directory.fcntl, "flock", cannot)
    setting().checkpoints(tmp_path).close()
    assert "make sure that only one run uses it" in caplog.text
