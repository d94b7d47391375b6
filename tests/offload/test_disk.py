"""An optimizer on a local disk: the numbers of one in host memory, the same checkpoints, and no remains."""

import dataclasses
import errno
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import zerojax
from zerojax import Zero
from zerojax.offload import disk, disk_update
from zerojax.offload.disk import DiskArray, DiskFile

LAYERS, WIDTH, VOCAB = 4, 16, 67  # 67 rows: shards of the table have zeros at their end
STEPS = 3


def create():
    keys = jax.random.split(jax.random.key(0), 3)
    normal = lambda key, *shape: 0.1 * jax.random.normal(key, shape)
    return {
        "embed": normal(keys[0], VOCAB, WIDTH),
        "layers": {"w": normal(keys[1], LAYERS, WIDTH, WIDTH), "scale": jnp.ones((LAYERS, WIDTH))},
        "head": normal(keys[2], WIDTH, VOCAB),
        "temperature": jnp.ones(()),
    }


def loss(params, tokens):
    layer = lambda h, weights: (h + jnp.tanh(h * weights["scale"] @ weights["w"]), None)
    h, _ = jax.lax.scan(layer, params["embed"][tokens[:, :-1]] * params["temperature"], params["layers"])
    logits = (h @ params["head"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


TOKENS = np.random.default_rng(0).integers(0, VOCAB, (16, 7))
ADAMW = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(optax.linear_schedule(1e-2, 1e-3, 5)))


@pytest.fixture(autouse=True)
def small_records(monkeypatch):
    monkeypatch.setattr(disk_update, "RECORD_BYTES", 4096)  # the arrays of a parameter have several


def zero_of(directory, stage=3, precision="bf16", num_devices=4):
    mesh = zerojax.make_mesh(devices=jax.devices()[:num_devices])
    where = {} if directory is None else {"offload_dir": directory}
    return Zero(mesh, stage, precision, stacked="layers/*", offload="optimizer", **where)


def trained(zero, tx=ADAMW, batches=(TOKENS,) * STEPS, **settings):
    state, step = zero.init(create, tx), zero.train_step(loss, **settings)
    metrics = []
    for batch in batches:
        state, found = step(state, batch)
        metrics.append({name: float(value) for name, value in found.items()})
    return state, metrics


def arrays(state):
    return [np.asarray(a).astype(np.float32) for a in jax.tree.leaves((state.params, state.master, state.opt_state))]


def assert_same(got, want, tolerance=0.0):
    """The tolerance is a share of the largest element. Where a norm divides the gradients, or shards have zeros at
    their end, XLA may contract other products and sums; what is stored in few bits then differs in the last of them."""
    for a, b in zip(arrays(got), arrays(want), strict=True):
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max()


@pytest.mark.parametrize(
    ("stage", "precision", "tx", "settings", "tolerance"),
    [
        pytest.param(3, "fp32", optax.adamw(1e-2), {"num_microbatches": 2}, 0, id="stage 3"),
        pytest.param(1, "bf16", ADAMW, {"clip_norm": 0.5}, 2**-7, id="stage 1"),
        pytest.param(0, "fp32", optax.lion(1e-3), {}, 0, marks=pytest.mark.full, id="stage 0"),
        pytest.param(
            3, "bf16", zerojax.low_bit_moments(optax.adamw(1e-2), 8), {}, 2**-7, marks=pytest.mark.full, id="8 bits"
        ),
        pytest.param(2, "fp16", ADAMW, {}, 2**-7, marks=pytest.mark.full, id="stage 2"),
        pytest.param(3, "fp32", optax.sgd(0.1), {}, 1e-6, marks=pytest.mark.full, id="no state"),
    ],
)
def test_training_is_that_of_an_optimizer_in_host_memory(stage, precision, tx, settings, tolerance, tmp_path):
    got, metrics = trained(zero_of(tmp_path, stage, precision), tx, **settings)
    want, wanted = trained(zero_of(None, stage, precision), tx, **settings)
    assert_same(got, want, tolerance)
    for ours, theirs in zip(metrics, wanted, strict=True):
        norms = ours.pop("param_norm"), theirs.pop("param_norm")  # summed in another order
        assert norms[0] == pytest.approx(norms[1], rel=1e-6)
        assert ours == pytest.approx(theirs, rel=tolerance)
    on_disk, in_host = (jax.tree.leaves((state.master, state.opt_state)) for state in (got, want))
    for a, b in zip(on_disk, in_host, strict=True):
        assert isinstance(a, DiskArray) == (b.sharding.memory_kind == "pinned_host")


def test_a_step_that_is_skipped_changes_nothing_on_the_disk(tmp_path):
    zero = zero_of(tmp_path, precision="fp32")
    state, step = zero.init(create, ADAMW), zero.train_step(lambda p, b: loss(p, b["x"]) * b["factor"].mean())
    factor = lambda value: {"x": TOKENS, "factor": np.full((16, 1), value, np.float32)}
    state, _ = step(state, factor(1))
    before = [np.asarray(a) for a in jax.tree.leaves((state.params, state.opt_state))]
    state, metrics = step(state, factor(np.inf))
    assert metrics["skipped"] == 1
    after = jax.tree.leaves((state.params, state.opt_state))
    assert all(np.array_equal(a, np.asarray(b)) for a, b in zip(before, after, strict=True))


def test_checkpoints_are_those_of_other_states(tmp_path):
    """Saved from the disk and restored into host memory on other devices, and back; nothing differs."""
    saved, _ = trained(zero_of(tmp_path / "nvme"))
    with zero_of(tmp_path / "nvme").checkpoints(tmp_path / "first") as checkpoints:
        checkpoints.resume(saved)
        checkpoints.save(saved)
    zero = zero_of(None, stage=1, num_devices=2)
    with zero.checkpoints(tmp_path / "first") as checkpoints:
        in_host, start = checkpoints.resume(zero.eval_init(create, ADAMW))
    assert start == STEPS
    with zero.checkpoints(tmp_path / "second") as checkpoints:
        checkpoints.resume(in_host)
        checkpoints.save(in_host)
    zero = zero_of(tmp_path / "nvme")
    with zero.checkpoints(tmp_path / "second") as checkpoints:
        restored, _ = checkpoints.resume(zero.eval_init(create, ADAMW))
        assert_same(restored, saved)
        into = checkpoints.restore(zero.init(create, ADAMW), STEPS, only=["opt_state/*"])
    fresh = zero.init(create, ADAMW)
    assert_same(into, dataclasses.replace(fresh, opt_state=restored.opt_state))
    step = zero.train_step(loss)
    assert_same(step(restored, TOKENS)[0], step(saved, TOKENS)[0])


def test_an_update_that_is_cut_off_is_never_trained_on_or_saved(tmp_path, monkeypatch):
    zero = zero_of(tmp_path / "nvme")
    state, step = zero.init(create, ADAMW), zero.train_step(loss)
    with zero.checkpoints(tmp_path / "run", every=1) as checkpoints:
        state, _ = checkpoints.resume(state)
        state, _ = step(state, TOKENS)
        checkpoints.update(state)
        saved, written = arrays(state), []

        def fail_later(self, k, c, buffer):
            written.append((k, c))
            if len(written) > 3:
                raise OSError(errno.EIO, "the disk is broken")
            return write(self, k, c, buffer)

        write = DiskFile.write
        with monkeypatch.context() as broken:
            broken.setattr(DiskFile, "write", fail_later)
            with pytest.raises(OSError, match="the disk is broken"):
                step(state, TOKENS)
        with pytest.raises(ValueError, match="donated to a step"):
            step(state, TOKENS)
        (torn,) = {a.file_to_fill for a in jax.tree.leaves(state.opt_state) if isinstance(a, DiskArray)}
        with pytest.raises(ValueError, match="a mixture of two steps"):
            DiskArray(torn, 0, next(iter(torn.parameters[0])), None).load()
        assert checkpoints.steps() == [1]
        restored = checkpoints.restore(zero.eval_init(create, ADAMW), 1)
    for a, b in zip(arrays(restored), saved, strict=True):
        np.testing.assert_array_equal(a, b)


def test_host_memory_holds_a_few_records(tmp_path, monkeypatch):
    sizes = []
    monkeypatch.setattr(disk_update, "aligned", lambda size: sizes.append(size) or disk.aligned(size))
    state, _ = trained(zero_of(tmp_path), batches=[TOKENS])
    (file,) = {a.file for a in jax.tree.leaves(state.opt_state) if isinstance(a, DiskArray)}
    num_records = sum(map(file.count, file.parameters))
    assert num_records > 2 * disk_update.BUFFERS == 2 * len(sizes)
    assert max(sizes) == max(file.record_bytes.values()) < file.num_bytes / num_records * 4


def test_a_file_has_no_name_and_takes_all_its_room_at_once(tmp_path, monkeypatch):
    state, _ = trained(zero_of(tmp_path / "nvme"), batches=[])
    assert not list((tmp_path / "nvme").iterdir())
    (file,) = {a.file for a in jax.tree.leaves(state.opt_state) if isinstance(a, DiskArray)}
    assert os.fstat(file.descriptor).st_blocks * 512 >= file.num_bytes > 0

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"does not fit in .*nvme\n  got:      .*iB for this process, and No space left"):
        trained(zero_of(tmp_path / "nvme"), batches=[])


def test_other_uses_of_a_state(tmp_path):
    """It is evaluated, its average is, and its weights are trained on with another optimizer."""
    zero = zero_of(tmp_path)
    state, _ = trained(zero, zerojax.ema(ADAMW, 0.5))
    evaluate, step = zero.eval_step(loss), zero.train_step(loss)
    in_host, _ = trained(zero_of(None), zerojax.ema(ADAMW, 0.5))
    averaged = zero.with_params(state, state.ema_params)
    expected = zero_of(None).eval_step(loss)(zero_of(None).with_params(in_host, in_host.ema_params), TOKENS)
    assert evaluate(averaged, TOKENS)["loss"] == expected["loss"] != evaluate(state, TOKENS)["loss"]
    with pytest.raises(ValueError, match=r"not on the disk\n  got:      'master/embed' in host memory"):
        step(averaged, TOKENS)
    assert "on the disk: " in repr(state) and "of the disk" in str(zero.explain(state))
    tuned = zero.with_optimizer(state, optax.sgd(0.1, momentum=0.9))
    assert float(step(tuned, TOKENS)[1]["loss"]) == evaluate(in_host, TOKENS)["loss"]


@pytest.mark.parametrize("offload", ["none", "params"])
def test_only_an_optimizer_can_be_on_a_disk(offload, tmp_path):
    with pytest.raises(ValueError, match=f"got:      offload='{offload}' and a directory"):
        Zero(zerojax.make_mesh(), offload=offload, offload_dir=tmp_path)


def test_owners_of_matrices_do_not_read_them_from_a_disk(tmp_path):
    with pytest.raises(ValueError, match=r"offload: scale_by_muon cannot be computed for one piece"):
        zero_of(tmp_path).eval_init(create, contrib.muon(1e-3))
