"""Runs that start from a state that was trained before: they count from its step, or from 0 with a new optimizer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support.small_run import STEPS, adam, batch, create, digest_of, loss, setting

import zerojax
from zerojax.checkpoints import store

MORE = 4


class Stopped(Exception):
    pass


def stopping_at(i):
    def data(k):
        if k == i:
            raise Stopped
        return batch(k)

    return data


@pytest.fixture(scope="module")
def zero():
    return setting()


@pytest.fixture(scope="module")
def step(zero):
    return zero.train_step(loss)


@pytest.fixture(scope="module")
def pretrained(zero, step, tmp_path_factory):
    """The directory of a run of STEPS steps."""
    directory = tmp_path_factory.mktemp("pretrained") / "run"
    zerojax.fit(zero, zero.init(create, adam()), step, batch, STEPS, directory)
    return directory


@pytest.fixture
def restored(zero, pretrained):
    """Restores the pretrained state, as often as it is called."""

    def restore():
        with zero.checkpoints(pretrained / "checkpoints") as checkpoints:
            return checkpoints.restore(zero.init(create, adam()), STEPS)

    return restore


@pytest.fixture(scope="module")
def uninterrupted(zero, step):
    """The digests of a state that was trained STEPS + MORE steps in a row."""
    state = zero.init(create, adam())
    for i in range(STEPS + MORE):
        state, _ = step(state, batch(i))
    return digest_of(state)


def fit(zero, step, state, directory=None, data=batch, num_steps=STEPS + MORE):
    options = {} if directory is None else {"checkpoints": {"every": 1}}
    return zerojax.fit(zero, state, step, data, num_steps, directory, **options)


def test_a_restored_state_continues_in_a_new_directory_bit_for_bit(zero, step, restored, uninterrupted, tmp_path):
    """It is stopped after two steps, and called again with the same arguments."""
    with pytest.raises(Stopped):
        fit(zero, step, restored(), tmp_path / "run", stopping_at(STEPS + 2))
    assert store.steps(tmp_path / "run" / "checkpoints") == [STEPS + 1, STEPS + 2]
    state = fit(zero, step, restored(), tmp_path / "run")
    assert int(state.step) == STEPS + MORE and digest_of(state) == uninterrupted


def test_a_restored_state_continues_without_a_directory_bit_for_bit(zero, step, restored, uninterrupted):
    assert digest_of(fit(zero, step, restored())) == uninterrupted


@pytest.mark.parametrize("directory", ["run"])
def test_a_list_of_batches_is_counted_from_step_0(zero, step, restored, uninterrupted, tmp_path, directory):
    directory = directory and tmp_path / directory
    assert digest_of(fit(zero, step, restored(), directory, list(map(batch, range(99))))) == uninterrupted


@pytest.mark.parametrize("directory", [None])
def test_a_state_behind_the_last_step_is_an_error(zero, step, restored, tmp_path, directory):
    message = rf"already at step {STEPS}, and num_steps={MORE}\n  got: .*\n  fix: .*num_steps={STEPS + MORE} .*with_opt"
    with pytest.raises(ValueError, match=message):
        fit(zero, step, restored(), directory and tmp_path / directory, num_steps=MORE)


@pytest.mark.parametrize("directory", [None])
def test_data_that_is_used_up_is_an_error(zero, step, restored, tmp_path, directory):
    message = rf"no batch for step {STEPS + 1}, the first of this run\n  fix: .*with_optimizer"
    with pytest.raises(ValueError, match=message):
        fit(zero, step, restored(), directory and tmp_path / directory, list(map(batch, range(STEPS))))


def test_saves_keep_their_rhythm(zero, step, restored, tmp_path):
    """At multiples of `every`, whatever the step at which a run starts."""
    options = {"checkpoints": {"every": 4, "keep": None}}
    zerojax.fit(zero, restored(), step, batch, STEPS + 6, tmp_path / "run", **options)
    assert store.steps(tmp_path / "run" / "checkpoints") == [8, 12, STEPS + 6]


def test_a_loop_of_ones_own_gets_the_step_of_the_state(zero, step, restored, uninterrupted, tmp_path):
    for stop in (STEPS + 2, STEPS + MORE):
        with zero.checkpoints(tmp_path, every=1) as checkpoints:
            state, start = checkpoints.resume(restored())
            assert start == (STEPS if stop == STEPS + 2 else STEPS + 2)
            for i in range(start, stop):
                state, metrics = step(state, batch(i))
                checkpoints.update(state, metrics)
    assert digest_of(state) == uninterrupted


@pytest.mark.parametrize("directory", ["run"])
def test_fine_tuning_with_a_new_optimizer_starts_at_step_0(zero, step, restored, tmp_path, directory):
    """With a directory it is stopped after two steps, and called again. The loss is that of the pretrained weights."""
    anew = lambda: zero.with_optimizer(restored(), optax.adamw(1e-3), seed=3)
    expected = anew()
    before = digest_of(restored())
    assert {path: d for path, d in digest_of(expected).items() if path.startswith("params/")} == {
        path: d for path, d in before.items() if path.startswith("params/")
    }
    for i in range(MORE):
        expected, _ = step(expected, batch(i))
    directory = directory and tmp_path / directory
    if directory:
        with pytest.raises(Stopped):
            fit(zero, step, anew(), directory, stopping_at(2), MORE)
        assert store.steps(directory / "checkpoints") == [1, 2]
    state = fit(zero, step, anew(), directory, num_steps=MORE)
    assert int(state.step) == MORE and digest_of(state) == digest_of(expected)


@pytest.mark.filterwarnings("ignore:loss. 2 running statistics")
@pytest.mark.parametrize(
    ("stage", "precision"),
    [(1, "fp16"), (3, "bf16"), *(pytest.param(*case, marks=pytest.mark.full) for case in [(0, "bf16"), (2, "fp32")])],
)
def test_with_optimizer_is_init_with_the_same_values(stage, precision):
    """Leaf for leaf, with zeros at the ends of shards, frozen leaves and model state."""

    class Model(nnx.Module):
        def __init__(self, *, rngs):
            self.first = nnx.Linear(5, 7, rngs=rngs)
            self.norm = nnx.BatchNorm(7, rngs=rngs)
            self.last = nnx.Linear(7, 5, rngs=rngs)

        def __call__(self, x):
            return self.last(self.norm(self.first(x)))

    zero = zerojax.Zero(zerojax.make_mesh(), stage, precision, frozen=["first/*"])
    step = zero.train_step(lambda model, x: jnp.mean((model(x) - x) ** 2))
    state, _ = step(zero.init(Model, optax.adam(1e-2)), np.ones((8, 5), np.float32))
    state = jax.block_until_ready(state)
    weights = digest_of(state)
    fresh = zero.init(Model, optax.sgd(0.1, momentum=0.9), seed=5)
    anew = zero.with_optimizer(state, optax.sgd(0.1, momentum=0.9), seed=5)
    assert jax.tree.map(lambda a: a.sharding, anew.opt_state) == jax.tree.map(lambda a: a.sharding, fresh.opt_state)
    expected = digest_of(fresh) | {p: d for p, d in weights.items() if p.startswith(("params/", "model_state/"))}
    assert digest_of(anew) == expected
    with pytest.raises(ValueError, match="donated"):
        step(state, np.ones((8, 5), np.float32))
    step(anew, np.ones((8, 5), np.float32))
