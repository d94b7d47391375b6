"""Losses that look at the whole batch, by the recipes of docs/semantics.md, against the plain loss on one device."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx

import zerojax
from zerojax import Zero

ROWS = 32
RNG = np.random.default_rng(0)
BATCH = {name: RNG.standard_normal((ROWS, 16), np.float32) for name in ("x", "y")}
BATCH["advantages"] = RNG.standard_normal(ROWS).astype(np.float32)


def create(key):
    return {"w": jax.random.normal(key, (16, 16)) / 4}


def gathered(x, axis_name):
    return x if axis_name is None else jax.lax.all_gather(x, axis_name, tiled=True)


def contrastive(axis_name):
    def loss(params, batch):
        x, y = jnp.tanh(batch["x"] @ params["w"]), jnp.tanh(batch["y"] @ params["w"])
        first = 0 if axis_name is None else jax.lax.axis_index(axis_name) * len(x)
        return jnp.mean(
            optax.softmax_cross_entropy_with_integer_labels(x @ gathered(y, axis_name).T, first + jnp.arange(len(x)))
        )

    return loss


def normalized_advantages(axis_name):
    mean = lambda x: jnp.mean(x) if axis_name is None else jax.lax.pmean(jnp.mean(x), axis_name)

    def loss(params, batch):
        values = batch["advantages"] * jnp.sum(batch["x"] @ params["w"], axis=1)
        centered = values - mean(values)
        return jnp.mean(jnp.tanh(centered * jax.lax.rsqrt(mean(centered**2) + 1e-6)) * batch["advantages"])

    return loss


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("make", [contrastive, normalized_advantages])
def test_collectives_in_the_loss_give_the_loss_and_gradient_of_the_whole_batch(make, stage):
    zero = Zero(zerojax.make_mesh(), stage)
    state = zero.init(create, optax.sgd(1.0))
    params = jax.device_get(state.params)
    want, grads = jax.value_and_grad(make(None))(params, BATCH)
    local = zero.eval_step(make(None))(state, BATCH)["loss"]
    after, metrics = zero.train_step(make("data"))(state, BATCH)
    np.testing.assert_allclose(metrics["loss"], want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(after.params["w"], params["w"] - grads["w"], rtol=1e-4, atol=1e-5)
    assert abs(local - want) > 1e-3  # what the recipe is for


class Normed(nnx.Module):
    def __init__(self, axis_name, *, rngs):
        self.layer = nnx.Linear(16, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, axis_name=axis_name, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.layer(x))


def norm_loss(model, batch):
    return jnp.mean(jnp.abs(model(batch["x"])))


def linen_norm(axis_name):
    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x, axis_name=axis_name):
            return nn.BatchNorm(use_running_average=False, axis_name=axis_name)(nn.Dense(8)(x))

    def loss(variables, batch):
        y, updated = Normed().apply(variables, batch["x"], mutable=["batch_stats"])
        return jnp.mean(jnp.abs(y)), updated

    return (lambda key: Normed().init(key, BATCH["x"], axis_name=None)), loss


@pytest.mark.parametrize(("linen", "stage"), [(False, 0), (True, 3)], ids=str)
def test_statistics_of_each_device_are_warned_about_once(linen, stage):
    make = linen_norm if linen else lambda name: ((lambda rngs: Normed(name, rngs=rngs)), norm_loss)
    zero = Zero(zerojax.make_mesh(), stage)
    create_model, loss = make(None)
    state, step = zero.init(create_model, optax.sgd(0.1)), zero.train_step(loss)
    with pytest.warns(UserWarning, match="2 running statistics are computed from each device's rows") as caught:
        state, _ = step(state, BATCH)
    assert "axis_name='data'" in str(caught[0].message) and caught[0].filename == __file__
    create_model, synced = make("data")
    for build, fn, options in [
        (create_model, synced, {}),  # computed over all rows
        (create_model, lambda model, batch: synced(model, batch), {"frozen": ["*orm*"]}),  # do not change
    ]:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            zero = Zero(zerojax.make_mesh(), stage, **options)
            zero.train_step(fn)(zero.init(build, optax.sgd(0.1)), BATCH)
            step(state, BATCH | {"y": BATCH["x"]}) if fn is synced else None  # the first step says it once


def test_a_synchronized_batch_norm_is_that_of_one_device():
    zero = Zero(zerojax.make_mesh())
    state = zero.init(lambda rngs: Normed("data", rngs=rngs), optax.sgd(0.1))
    plain = Normed(None, rngs=nnx.Rngs(0))
    nnx.update(plain, nnx.split(state.model(), nnx.Param, ...)[1])
    want = norm_loss(plain, BATCH)
    after, metrics = zero.train_step(norm_loss)(state, BATCH)
    np.testing.assert_allclose(metrics["loss"], want, rtol=1e-5)
    np.testing.assert_allclose(after.model().norm.var[...], plain.norm.var[...], rtol=1e-5)


# Several models


class Distilled(nnx.Module):
    def __init__(self, *, rngs):
        self.student, self.teacher = nnx.Linear(16, 8, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)


@pytest.mark.parametrize(("stage", "precision"), [(0, "bf16"), (3, "fp32"), (3, "bf16")])
def test_a_teacher_is_sharded_and_an_average_is_evaluated(stage, precision):
    zero = Zero(zerojax.make_mesh(), stage, precision, frozen=["teacher/*"])
    state = zero.init(Distilled, zerojax.ema(optax.sgd(0.5), 0.5))
    kernel = state.params["teacher"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape)[0] == (2 if stage == 3 else 16)
    teacher, start = np.asarray(kernel), np.asarray(state.params["student"]["kernel"], np.float32)
    loss = lambda model, batch: jnp.mean((model.student(batch["x"]) - model.teacher(batch["x"])) ** 2)
    after, _ = zero.train_step(loss)(state, BATCH)
    np.testing.assert_array_equal(after.params["teacher"]["kernel"], teacher)
    averaged = zero.with_params(after, after.ema_params)
    assert jax.tree.map(lambda a: (a.dtype, a.sharding), averaged.params) == jax.tree.map(
        lambda a: (a.dtype, a.sharding), after.params
    )
    np.testing.assert_array_equal(averaged.params["teacher"]["kernel"], teacher)
    held = after.master or after.params
    want = (start + np.asarray(held["student"]["kernel"])) / 2
    rtol = 1e-6 if precision == "fp32" else 2**-8  # of the start, which is read in bf16
    np.testing.assert_allclose(np.asarray(averaged.params["student"]["kernel"], np.float32), want, rtol=rtol, atol=2e-3)
    held = averaged.master or averaged.params  # what `with_optimizer` and an export take
    np.testing.assert_array_equal(held["student"]["kernel"], after.ema_params["student"]["kernel"])
    losses = [zero.eval_step(loss)(each, BATCH)["loss"] for each in (after, averaged)]
    assert losses[0] < losses[1]  # it has moved half as far
    zero.train_step(loss)(after, BATCH)


def test_only_the_trained_parameters_replace_those_of_a_state():
    zero = Zero(zerojax.make_mesh(), frozen=["teacher/*"])
    state = zero.init(Distilled, optax.sgd(0.5))
    student = jax.device_get(state.params["student"])
    nothing = dict.fromkeys(student)
    for given, text in [
        ({"student": student}, None),
        ({"student": student, "teacher": nothing}, None),
        (state.params, r"got:      teacher/bias: \(8,\)\n  want:     teacher/bias: no such leaf, or a frozen one"),
        ({"student": student | {"bias": None}}, r"got:      student/bias: missing\n  want:     student/bias: \(8,\)"),
        ({"student": student | {"bias": np.ones(4)}}, r"got:      student/bias: \(4,\)"),
        ({"student": student | {"bias": np.ones(8, jnp.bfloat16)}}, r"got:      student/bias: bfloat16, in which an"),
    ]:
        if text is None:
            averaged = zero.with_params(state, given)
            np.testing.assert_array_equal(averaged.params["student"]["kernel"], student["kernel"])
            continue
        with pytest.raises(ValueError, match=f"with_params: the.*\n  {text}"):
            zero.with_params(state, given)


def score(w, x):
    return jnp.sum(jnp.tanh(x @ w), axis=1)


def generator_loss(generator, critic, batch):
    return jnp.mean(jax.nn.softplus(-score(critic["w"], jnp.tanh(batch["x"] @ generator["w"]))))


def critic_loss(critic, generator, batch):
    fake = jax.nn.softplus(score(critic["w"], jnp.tanh(batch["x"] @ generator["w"])))
    return jnp.mean(fake + jax.nn.softplus(-score(critic["w"], batch["y"])))


def adversarial(params, batch):
    """The loss of docs/semantics.md: each network's part reaches only its own parameters."""
    generator, critic = params["generator"], params["critic"]
    fixed = jax.lax.stop_gradient
    return generator_loss(generator, fixed(critic), batch) + critic_loss(critic, fixed(generator), batch)


@pytest.mark.parametrize("stage", [0, 3])
def test_two_networks_with_two_optimizers_follow_the_steps_of_each_on_one_device(stage):
    """The plain steps have a loss and an optimizer for each network, and know nothing of the other's."""
    plain = {"generator": optax.sgd(0.05, momentum=0.9), "critic": optax.sgd(0.2, momentum=0.9)}
    by_network = lambda params: jax.tree_util.tree_map_with_path(lambda path, _: path[0].key, params)
    zero = Zero(zerojax.make_mesh(), stage)
    create_both = lambda key: {name: create(jax.random.fold_in(key, len(name))) for name in plain}
    state = zero.init(create_both, optax.multi_transform(plain, by_network))
    want = jax.device_get(state.params)
    kept = {name: plain[name].init(want[name]) for name in plain}
    step = zero.train_step(adversarial)
    for _ in range(3):
        state, _ = step(state, BATCH)
        grads = {
            "generator": jax.grad(generator_loss)(want["generator"], want["critic"], BATCH),
            "critic": jax.grad(critic_loss)(want["critic"], want["generator"], BATCH),
        }
        for name in plain:
            updates, kept[name] = plain[name].update(grads[name], kept[name])
            want[name] = optax.apply_updates(want[name], updates)
    for name in plain:
        np.testing.assert_allclose(state.params[name]["w"], want[name]["w"], rtol=1e-4, atol=1e-5)


# Random numbers that all devices repeat


KEY = jax.random.PRNGKey(0)
REPEATED = {
    "closed over": lambda params, x: KEY,
    "made in the loss": lambda params, x: jax.random.key(0),
    "among the parameters": lambda params, x: params["rng"],
    "of another kind": lambda params, x: jax.random.wrap_key_data(params["rbg"], impl="rbg"),
}


@pytest.mark.parametrize("name", REPEATED)
def test_keys_that_all_devices_share_are_warned_about(name):
    """Plain JAX would draw another number for each row."""
    key_of = REPEATED[name]

    def create(key):
        return {"w": jax.random.normal(key, (8, 8)), "rng": KEY, "rbg": jax.random.PRNGKey(0, impl="rbg")}

    def loss(params, x):
        kept = jax.random.bernoulli(key_of(params, x), 0.5, x.shape)
        return jnp.mean(jnp.where(kept, x @ params["w"], 0) ** 2)

    zero, x, line = Zero(zerojax.make_mesh()), np.ones((32, 8), np.float32), loss.__code__.co_firstlineno + 1
    with pytest.warns(UserWarning, match=rf"get the same random numbers\n  got: .*test_semantics.py:{line}\n"):
        zero.train_step(loss).trace(zero.eval_init(create, optax.sgd(0.1)), x)


def test_keys_that_devices_fold_are_not_warned_about():
    """That of the loss, typed and raw ones beside the parameters, and one whose numbers are not for rows."""

    def create(key):
        keys = {"typed": jax.random.key(0), "raw": KEY, "rbg": jax.random.PRNGKey(0, impl="rbg")}
        return {"params": {"w": jax.random.normal(key, (8, 8))}, "keys": keys}

    def loss(variables, x, key):
        kinds, noise = variables["keys"], jax.random.normal(KEY, variables["params"]["w"].shape)
        keys = [key, kinds["typed"], kinds["raw"], jax.random.wrap_key_data(kinds["rbg"], impl="rbg")]
        kept = [jax.random.bernoulli(own, 0.9, x.shape) for own in keys]
        return jnp.mean(jnp.where(jnp.stack(kept).all(0), x @ (variables["params"]["w"] + noise), 0) ** 2)

    zero = Zero(zerojax.make_mesh())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zero.train_step(loss).trace(zero.eval_init(create, optax.sgd(0.1)), np.ones((32, 8), np.float32))
