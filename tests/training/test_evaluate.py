"""`zerojax.evaluate`: the means over all rows of a data set, on any number of devices, as on one."""

import itertools
import json
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support.paths import SUPPORT

import zerojax
from zerojax.processes.launch import launch
from zerojax.training.evaluate import divide

SIZES = [1, 5, 7, 23, 24, 25, 97]


def create(key):
    return {"w": jax.random.normal(key, (6, 24)) / 2, "b": jnp.zeros((24,))}


def loss(params, batch):
    """A plain loss, a plain metric, and one whose weights differ from row to row and may all be 0 on a device."""
    errors = jnp.mean((jnp.tanh(batch["x"] @ params["w"] + params["b"])[:, :6] - batch["x"]) ** 2, axis=-1)
    largest = jnp.max(jnp.abs(batch["x"]), axis=-1).mean()
    mask = batch["mask"] * batch["scale"]
    return errors.mean(), {"largest": largest, "masked": zerojax.Weighted(jnp.sum(mask * errors), jnp.sum(mask))}


def weighted_loss(params, batch):
    plain, metrics = loss(params, batch)
    return metrics["masked"], {"plain": plain}


def rows(num, seed=0):
    rng = np.random.default_rng(seed)
    mask = (rng.random(num) < 0.6).astype(np.float32)
    return {"x": rng.standard_normal((num, 6)).astype(np.float32), "mask": mask, "scale": np.float32(0.5)}


def on_one_device(loss_fn, state, data):
    """One pass of the loss over the whole set."""
    found, metrics = loss_fn(state.model(), data)
    mean = lambda value: value[0] / max(value[1], 1e-30) if isinstance(value, zerojax.Weighted) else value
    return {name: float(mean(value)) for name, value in {"loss": found, **metrics}.items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name in found:
        assert found[name] == pytest.approx(expected[name], rel=2e-6), name


@pytest.fixture(scope="module", params=[(24, 3), (24, 1), (7, 3)], ids=str)
def zero(request):
    num_devices, stage = request.param
    return zerojax.Zero(zerojax.make_mesh(devices=jax.devices()[:num_devices]), stage)


@pytest.mark.parametrize("loss_fn", [loss, weighted_loss])
def test_any_number_of_rows_is_evaluated_as_on_one_device(zero, loss_fn):
    """One row, fewer rows than devices, primes, and as many as devices; in one batch, and in batches of 48 rows."""
    state, step = zero.init(create, optax.sgd(0.1)), zero.eval_step(loss_fn)
    for num in SIZES:
        expected = on_one_device(loss_fn, state, rows(num))
        assert_same(zerojax.evaluate(step, state, [rows(num)]), expected)
        assert_same(zerojax.evaluate(step, state, rows(num), batch_size=48), expected)


def test_rows_that_are_padded_may_be_invalid():
    """A device without rows of the set may compute a NaN, which does not count."""
    zero = zerojax.Zero(zerojax.make_mesh())
    state = zero.init(create, optax.sgd(0.1))
    step = zero.eval_step(lambda params, x: jnp.mean(jnp.log(x - 1)) + 0 * jnp.sum(params["b"]))
    x = np.full((3, 2), 2.0, np.float32)
    assert zerojax.evaluate(step, state, x, batch_size=8)["loss"] == 0
    empty = itertools.chain([x], [x[:0]])
    assert zerojax.evaluate(step, state, empty)["loss"] == 0


def test_few_programs_are_compiled():
    zero = zerojax.Zero(zerojax.make_mesh())
    state, shapes = zero.init(create, optax.sgd(0.1)), []
    step = zero.eval_step(lambda params, x: (shapes.append(x.shape), jnp.mean(x) + 0 * jnp.sum(params["b"]))[1])
    x = np.arange(8 * 16 * 3 + 8 * 5 + 3, dtype=np.float32)[:, None]
    for _ in range(2):
        assert zerojax.evaluate(step, state, x, batch_size=8 * 16 + 7)["loss"] == pytest.approx(x.mean())
    assert set(shapes) == {(k * rows, 1) for rows in (16, 5, 1) for k in (1, 2)} and step.rows._jitted.keys() == {
        state.layout
    }


def test_every_row_of_every_process_is_in_one_part():
    """All processes have parts of the same sizes, and with equal numbers of rows there are at most two of them."""
    for counts in [[0, 0, 1], [5, 5, 5], [100, 3, 0], [97, 96, 89], [24, 16, 8]]:
        for own in [1, 3, 8]:
            parts = [list(divide(counts, own, index)) for index in range(len(counts))]
            assert len({tuple(part.size for part in each) for each in parts}) == 1
            for each, count in zip(parts, counts, strict=True):
                taken = [row for part in each for row in range(part.start, part.start + part.size * part.chunks)]
                assert taken == list(range(count)) and all(part.chunks <= own for part in each)
            if len(set(counts)) == 1:
                assert len(parts[0]) <= 2


class Model(nnx.Module):
    def __init__(self, *, rngs):
        self.first = nnx.Linear(6, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(16, 6, rngs=rngs)

    def __call__(self, x):
        return self.last(self.drop(self.norm(self.first(x))))


def nnx_loss(model, x):
    return jnp.mean((model(x) - x) ** 2)


@pytest.mark.filterwarnings("ignore:loss. 2 running statistics")
def test_an_nnx_module_is_in_evaluation_mode():
    """No dropout, and running averages; in `eval_step` too. The state, and the next training step, are unchanged."""
    zero = zerojax.Zero(zerojax.make_mesh())
    x = rows(11)["x"]
    state, step = zero.init(Model, optax.sgd(0.1)), zero.train_step(nnx_loss)
    state, _ = step(state, rows(16)["x"])
    model = state.model()
    model.eval()
    expected, evaluation = float(nnx_loss(model, x)), zero.eval_step(nnx_loss)
    assert zerojax.evaluate(evaluation, state, x, batch_size=8)["loss"] == pytest.approx(expected, rel=1e-5)
    assert float(evaluation(state, x[:8])["loss"]) == pytest.approx(float(nnx_loss(model, x[:8])), rel=1e-5)
    assert state.model().drop.deterministic is False
    training = lambda model, x: (model.train(), nnx_loss(model, x))[1]
    with pytest.raises(ValueError, match=r"changes running statistics.*\n  got: .*norm/mean.*\n  fix: "):
        zerojax.evaluate(zero.eval_step(training), state, x, batch_size=8)


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return nn.BatchNorm(use_running_average=not train)(nn.Dense(6)(x))


def test_linen_statistics_that_change_are_refused():
    zero, x = zerojax.Zero(zerojax.make_mesh(), 2), rows(11)["x"]
    state = zero.init(lambda key: LinenModel().init(key, x, train=False), optax.sgd(0.1))

    @jax.jit
    def evaluating(variables, x):
        y, updates = LinenModel().apply(variables, x, train=False, mutable=["batch_stats"])
        return jnp.mean((y - x) ** 2), updates

    def training(variables, x):
        y, updates = LinenModel().apply(variables, x, train=True, mutable=["batch_stats"])
        return jnp.mean((y - x) ** 2), updates

    expected = float(evaluating(state.model(), x)[0])
    found = zerojax.evaluate(zero.eval_step(evaluating), state, x, batch_size=8)
    assert found == {"loss": pytest.approx(expected, rel=1e-5)}
    with pytest.raises(ValueError, match=r"changes running statistics.*\n  got: .*batch_stats.*\n  fix: .*train=False"):
        zerojax.evaluate(zero.eval_step(training), state, x, batch_size=8)


def mean_with(**metrics):
    return lambda params, x: (jnp.mean(x @ params["w"]), {name: fn(x) for name, fn in metrics.items()})


X = np.ones((9, 6), np.float32)


def test_what_cannot_be_exact_or_is_invalid_is_refused():
    for loss_fn, data, options, message in [
        (mean_with(a=lambda x: jax.lax.pmean(x, "data").mean()), X, {"batch_size": 8}, "communicates over 'data'\n"),
        (mean_with(), X, {}, "type ndarray, and there is no batch_size\n  fix: .*batch_size="),
        (mean_with(), {"x": X}, {}, "type dict, and there is no batch_size\n  fix: "),
        (mean_with(), 3, {}, "type int, and there is no batch_size\n  fix: "),
        (mean_with(), X, {"batch_size": 0}, "batch_size is 0\n  fix: "),
        (mean_with(), X[:0], {"batch_size": 8}, "the data has no rows\n  fix: .*used up"),
        (mean_with(), [], {}, "a process has no batch|the data has no rows\n"),
        (
            mean_with(),
            {"x": X, "y": X[:3]},
            {"batch_size": 8},
            r"different numbers of rows\n  got: .*\[3, 9\]\n  fix: ",
        ),
        (mean_with(), [np.float32(1)], {}, "no array with rows\n"),
    ]:
        zero = zerojax.Zero(zerojax.make_mesh())
        with pytest.raises(ValueError, match=f"evaluate: .*{message}"):
            zerojax.evaluate(zero.eval_step(loss_fn), zero.init(create, optax.sgd(0.1)), data, **options)


def test_a_training_step_is_refused_and_an_uneven_batch_names_evaluate():
    zero = zerojax.Zero(zerojax.make_mesh())
    state = zero.init(create, optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"of type TrainStep\n  fix: .*eval_step"):
        zerojax.evaluate(zero.train_step(loss), state, rows(3), batch_size=8)
    with pytest.raises(ValueError, match=r"fix: .*zerojax\.evaluate takes any number of rows"):
        zero.eval_step(loss)(state, rows(3))


@pytest.mark.once
@pytest.mark.parametrize("counts", [(13, 3), pytest.param((29, 0), marks=pytest.mark.full)], ids=str)
def test_processes_with_other_numbers_of_rows_get_the_same_means(counts, tmp_path):
    command = [sys.executable, str(SUPPORT / "evaluating.py"), ",".join(map(str, counts)), str(tmp_path / "found")]
    assert launch(command, 2, devices=3, timeout_s=120) == 0
    assert launch([*command[:2], str(sum(counts)), str(tmp_path / "one")], 1, devices=1, timeout_s=120) == 0
    first, second, one = (json.loads((tmp_path / name).read_text()) for name in ("found.0", "found.1", "one.0"))
    assert first == second
    assert_same(first, one)


@pytest.mark.once
def test_an_error_in_one_process_is_raised_in_all(tmp_path):
    command = [sys.executable, str(SUPPORT / "evaluating.py"), "5,7", str(tmp_path / "found"), "1"]
    assert launch(command, 2, devices=2, timeout_s=120) == 0
    other, own = (json.loads((tmp_path / f"found.{i}").read_text()) for i in range(2))
    assert "arrays have different numbers of rows" in own
    assert "an error in process 1" in other
