"""One contract test for every Optax chain: parity with the plain step, and unchanged shardings of the state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib
from support import plain, zoo
from support.parity import assert_close, batches, train
from support.plain import numbers

import zerojax
from zerojax import Zero
from zerojax.step.optimizers import scheduled_learning_rate

MODEL = zoo.ZOO["unused"]  # 2D and 1D leaves, and leaves whose gradient is zero


def is_matrix(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def group(params):
    return jax.tree.map(lambda leaf: "matrix" if leaf.ndim > 1 else "vector", params)


def body_or_other(params):
    """By the paths, of which the placeholder that Optax maps over has none."""
    return jax.tree_util.tree_map_with_path(lambda path, _: "body" if path[0].key == "body" else "other", params)


CHAINS = {
    "clip_by_global_norm+adamw": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-3, eps=1e-6)),
    "adaptive_grad_clip+sgd": lambda: optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)),
    "sgd_momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam_schedule": lambda: optax.adam(optax.cosine_decay_schedule(1e-2, 5), eps=1e-6),
    "lion": lambda: optax.lion(1e-3),
    "lamb": lambda: optax.lamb(1e-2, eps=1e-6),
    "lars": lambda: optax.lars(0.1),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "muon": lambda: contrib.muon(1e-2),
    "masked_weight_decay": lambda: optax.adamw(1e-3, eps=1e-6, weight_decay=0.1, mask=is_matrix),
    "multi_transform": lambda: optax.multi_transform(
        {"matrix": optax.adam(1e-2, eps=1e-6), "vector": optax.sgd(0.1)}, group
    ),
    "multi_transform_by_path": lambda: optax.multi_transform(
        {"body": optax.adam(1e-2, eps=1e-6), "other": optax.sgd(0.1, momentum=0.9)}, body_or_other
    ),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(1e-2, eps=1e-6), 2).gradient_transformation(),
    "ema": lambda: optax.chain(optax.sgd(0.1), optax.ema(0.9)),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.sgd(0.1, momentum=0.9), 3),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(1e-2, 0, 10), eps=1e-6),
    "reduce_on_plateau": lambda: optax.chain(
        optax.sgd(0.1), contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=0.9, accumulation_size=1)
    ),
    "polyak_sgd": lambda: optax.polyak_sgd(max_learning_rate=0.1),
    "momo": lambda: contrib.momo(0.1),
    "sam": lambda: contrib.sam(optax.sgd(0.1), optax.chain(contrib.normalize(), optax.sgd(0.05))),
    "radam+noise_free_chain": lambda: optax.chain(optax.centralize(), optax.radam(1e-2, eps=1e-6)),
}
# The others of `optax.contrib`, as far as the installed version has them.
OF_CONTRIB = {
    "acprop": lambda: contrib.acprop(1e-3, eps=1e-6),
    "ademamix": lambda: contrib.ademamix(1e-3, eps=1e-6),
    "adopt": lambda: contrib.adopt(1e-3, eps=1e-6),
    "cocob": contrib.cocob,
    "dadapt_adamw": lambda: contrib.dadapt_adamw(1.0, eps=1e-6),
    "dog": lambda: contrib.dog(init_step=("distance", 1e-2)),
    "dowg": contrib.dowg,
    "galore": lambda: contrib.galore(1e-2, rank=4, base_optimizer=optax.sgd(1.0, momentum=0.9)),
    "madgrad": lambda: contrib.madgrad(1e-2, eps=1e-3),
    "mechanize": lambda: contrib.mechanize(optax.sgd(0.1)),
    "momo_adam": lambda: contrib.momo_adam(1e-2, eps=1e-6),
    "prodigy": lambda: contrib.prodigy(1.0, eps=1e-6),
    "schedule_free_adamw": lambda: contrib.schedule_free_adamw(1e-2, eps=1e-6),
    "schedule_free_sgd": lambda: contrib.schedule_free_sgd(0.1),
    "simplified_ademamix": lambda: contrib.simplified_ademamix(1e-3, eps=1e-6),
}
ALL = CHAINS | {name: make for name, make in OF_CONTRIB.items() if hasattr(contrib, name)}


@functools.cache
def expected(name):
    return plain.run(MODEL, ALL[name](), batches(MODEL, 3))


# each chain at one of the stages; `--full` runs the other too, and those of `OF_CONTRIB`
PLACES = [
    pytest.param(
        name,
        stage,
        marks=[pytest.mark.full] if name in OF_CONTRIB or (number + stage // 2) % 2 else [],
        id=f"{name}-{stage}",
    )
    for number, name in enumerate(ALL)
    for stage in (1, 3)
]


@pytest.mark.parametrize(("name", "stage"), PLACES)
def test_contract(name, stage):
    """Parity over three steps; every leaf of the new state has the sharding of the old leaf."""
    zero = Zero(zerojax.make_mesh(), stage)
    placed = jax.tree.map(lambda a: a.sharding, zero.eval_init(MODEL.create, ALL[name]()))
    got, state = train(zero, MODEL, batches(MODEL, 3), ALL[name]())
    assert_close(got, expected(name))
    assert jax.tree.leaves(jax.tree.map(lambda a: a.sharding, state)) == jax.tree.leaves(placed)
    matrices = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.shape == (16, 32)]
    assert all(leaf.sharding.shard_shape(leaf.shape) == (2, 32) for leaf in matrices)


CANNOT_WORK = {
    "lbfgs": (lambda: optax.lbfgs(0.1), "evaluates the loss itself"),
    "scale_by_zoom_linesearch": (
        lambda: optax.chain(optax.sgd(0.1), optax.scale_by_zoom_linesearch(4)),
        "evaluates the loss itself",
    ),
    "scale_by_sm3": (lambda: optax.masked(optax.sm3(0.1), True), "lists of arrays"),
    "sm3": (lambda: optax.inject_hyperparams(optax.sm3)(0.1), "lists of arrays"),
    "differentially_private_aggregate": (lambda: optax.dpsgd(0.1, 1.0, 0.1, 0), "the gradient of each row"),
    "sam": (lambda: contrib.sam(optax.sgd(0.1), optax.sgd(0.1), opaque_mode=True), "grad_fn must be provided"),
    "lookahead": (lambda: optax.lookahead(optax.sgd(0.1), 5, 0.5), "LookaheadParams|'fast'"),
}


@pytest.mark.parametrize("name", CANNOT_WORK)
def test_an_optimizer_that_cannot_work_is_refused_by_name(name):
    make, reason = CANNOT_WORK[name]
    zero = Zero(zerojax.make_mesh())
    with pytest.raises(ValueError, match=f"optimizer: {name} does not work in a training step\n  got: .*({reason})"):
        zero.eval_init(MODEL.create, make())
    with pytest.raises(ValueError, match="optimizer: not an Optax transformation\n  got:      float"):
        zero.eval_init(MODEL.create, 0.1)


@pytest.mark.parametrize("stage", [0, 3])
def test_an_optimizer_gets_the_loss_and_the_gradient_of_the_step(stage):
    """Those that scale their steps by the loss depend on its value."""

    def update(updates, state, params=None, *, value, grad):
        return updates, {"loss": value, "norm": optax.tree.norm(grad)}

    recording = optax.GradientTransformationExtraArgs(lambda _: {"loss": jnp.zeros(()), "norm": jnp.zeros(())}, update)
    tx = optax.chain(recording, optax.sgd(0.1))
    got, state = train(Zero(zerojax.make_mesh(), stage), MODEL, batches(MODEL, 2), tx)
    for name, metric in ("loss", "loss"), ("norm", "grad_norm"):
        np.testing.assert_allclose(state.opt_state[0][name], got.metrics[-1][metric], rtol=1e-5)


def test_an_injected_learning_rate_is_reported():
    seen = train(Zero(zerojax.make_mesh()), MODEL, batches(MODEL, 3), CHAINS["inject_hyperparams"]())[0].metrics
    np.testing.assert_allclose([m["learning_rate"] for m in seen], [1e-2, 9e-3, 8e-3], rtol=1e-5)


def test_the_learning_rate_of_a_schedule_is_reported():
    """As an injected one is: that of the update of this step."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1e-2, 0, 10), eps=1e-6))
    seen = train(Zero(zerojax.make_mesh()), MODEL, batches(MODEL, 3), tx)[0].metrics
    np.testing.assert_allclose([m["learning_rate"] for m in seen], [1e-2, 9e-3, 8e-3], rtol=1e-5)


RATE = optax.linear_schedule(1e-2, 0, 10)
ARE_VECTORS = lambda params: jax.tree.map(lambda leaf: leaf.ndim == 1, params)


def test_a_learning_rate_is_reported_only_if_it_is_certain():
    for tx, is_certain in [
        (optax.sgd(RATE, momentum=0.9), True),
        (optax.adafactor(RATE), True),
        (optax.masked(optax.lion(RATE), is_matrix), True),
        (optax.multi_transform({"matrix": optax.adam(RATE), "vector": optax.set_to_zero()}, group), True),
        (optax.MultiSteps(optax.adam(RATE), 2).gradient_transformation(), True),
        (optax.adam(1e-2), False),
        (optax.chain(optax.adam(RATE), optax.scale(0.5)), False),
        (optax.chain(optax.scale_by_adam(), optax.scale_by_schedule(RATE), optax.scale(-1.0)), False),
        (optax.chain(optax.masked(optax.adam(RATE), is_matrix), optax.masked(optax.sgd(0.1), ARE_VECTORS)), False),
        (optax.multi_transform({"matrix": optax.adam(RATE), "vector": optax.sgd(RATE)}, group), False),
    ]:
        params = {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}
        opt_state = tx.init(params)
        for count in range(2 if is_certain else 1):
            rate = scheduled_learning_rate(tx, opt_state)
            assert (rate is not None) == is_certain
            if is_certain:
                np.testing.assert_allclose(rate, RATE(count), rtol=1e-6)
            for _ in range(2 if isinstance(opt_state, optax.MultiStepsState) else 1):
                opt_state = tx.update(params, opt_state, params)[1]


@pytest.mark.parametrize("stage", [0, 3])
def test_norms_are_global(stage):
    """grad_norm is the norm of the whole gradient before clipping, param_norm that of all parameters after the step."""
    got, _ = train(Zero(zerojax.make_mesh(), stage), MODEL, batches(MODEL, 3), CHAINS["sgd_momentum"]())
    want = [seen["grad_norm"] for seen in expected("sgd_momentum").metrics]
    np.testing.assert_allclose([seen["grad_norm"] for seen in got.metrics], want, rtol=1e-5)
    np.testing.assert_allclose(got.metrics[-1]["param_norm"], optax.tree.norm(got.end), rtol=1e-5)


@pytest.mark.parametrize("stage", [0, 3])
def test_clip_norm_clips_like_optax(stage):
    zero, tx = Zero(zerojax.make_mesh(), stage), optax.adamw(1e-3, eps=1e-6)
    got, _ = train(zero, MODEL, batches(MODEL, 3), tx, clip_norm=0.1)
    assert_close(got, expected("clip_by_global_norm+adamw"))
    assert got.metrics[0]["grad_norm"] > 0.2  # it was clipped


# Frozen leaves


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (2, "bf16"), (3, "bf16")])
def test_frozen_leaves_do_not_change(stage, precision):
    """Frozen leaves have no optimizer state, no master copy and no gradient; the other leaves are trained."""
    zero = Zero(zerojax.make_mesh(), stage, precision, frozen=("body/*",))
    state = zero.init(MODEL.create, optax.adamw(1e-2))
    is_frozen = [leaf.path.startswith("body/") for leaf in state.layout.leaves]
    assert any(is_frozen) and not all(is_frozen)
    moments = state.opt_state[0].mu
    assert set(moments) == {"body", "head", "unused"} and not jax.tree.leaves(moments["body"])
    assert state.master is None or not jax.tree.leaves(state.master["body"])
    assert not [row for row in zero.explain(state).rows if row.category == "grads" and row.path.startswith("body/")]
    before = numbers(state.params)
    state, _ = zero.train_step(MODEL.loss)(state, MODEL.batch(0))
    changed = [not np.array_equal(a, b) for a, b in zip(before, numbers(state.params), strict=True)]
    assert not any(c for c, frozen in zip(changed, is_frozen, strict=True) if frozen)
    assert any(c for c, frozen in zip(changed, is_frozen, strict=True) if not frozen)


def test_frozen_leaves_do_not_change_the_others_gradients():
    """With SGD, the trained leaves change as in the plain step without frozen leaves."""
    zero = Zero(zerojax.make_mesh(), frozen=("head/*",))
    _, state = train(zero, MODEL, batches(MODEL, 1), optax.sgd(0.1))
    want = plain.run(MODEL, optax.sgd(0.1), batches(MODEL, 1))
    for leaf, got, start, end in zip(state.layout.leaves, numbers(state.params), want.start, want.end, strict=True):
        np.testing.assert_allclose(got, end if leaf.trainable else start, rtol=1e-5, atol=1e-6)


def test_integer_leaves_are_not_trained():
    create = lambda: {"w": jnp.ones((16,)), "table": jnp.arange(16)}
    zero = Zero(zerojax.make_mesh())
    state = zero.init(create, optax.sgd(0.1))
    loss = lambda params, batch: jnp.mean(batch["x"] * params["w"] * params["table"])
    after, _ = zero.train_step(loss)(state, {"x": np.ones((8, 16), np.float32)})
    np.testing.assert_array_equal(after.params["table"], np.arange(16))
    np.testing.assert_allclose(after.params["w"], 1 - 0.1 * np.arange(16) / 16, rtol=1e-6)


# Donation


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (3, "bf16")])
def test_the_old_state_is_deleted_and_the_new_one_is_not(stage, precision):
    """Including the low-precision copy of a leaf that the loss does not use, which the step never reads."""
    zero = Zero(zerojax.make_mesh(), stage, precision)
    state = zero.init(MODEL.create, optax.adamw(1e-2))
    after, _ = zero.train_step(MODEL.loss)(state, MODEL.batch(0))
    sharded = lambda state: [a for tree in (state.params, state.master, state.opt_state) for a in jax.tree.leaves(tree)]
    assert all(leaf.is_deleted() for leaf in sharded(state))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(after))


def test_eval_step_keeps_the_state():
    zero = Zero(zerojax.make_mesh())
    state = zero.init(MODEL.create, optax.adamw(1e-2))
    zero.eval_step(MODEL.loss)(state, MODEL.batch(0))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
