"""Hybrid sharding: `Zero(outer_sharding='optimizer')` shards the optimizer's state over the replica axes too."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax import Zero
from zerojax.analysis import jaxpr_counts
from zerojax.analysis.expectation import between_replicas
from zerojax.analysis.findings import Verdict

LAYERS = 5
rng = np.random.default_rng(0)
BATCH = {"t": rng.integers(0, 37, (32, 6)), "y": rng.normal(size=(32, 9)).astype(np.float32)}


def create(key):
    """Leaves that 8 divides, leaves that are padded, a scalar, and a leaf that the loss does not use."""
    keys = jax.random.split(key, 3)
    normal = lambda key, *shape: jax.random.normal(key, shape) / 4
    layer = lambda key: {"w": normal(key, 16, 24), "b": jnp.zeros(24), "v": normal(key, 24, 16)}
    layers = jax.vmap(layer)(jax.random.split(keys[0], LAYERS))
    ends = {"emb": normal(keys[1], 37, 16), "head": normal(keys[2], 16, 9), "scale": jnp.float32(1)}
    return {"layers": layers, "odd": jnp.ones(13), "unused": jnp.ones((16, 3)), **ends}


def loss(params, batch):
    layer = lambda h, p: (h + jnp.tanh(h @ p["w"] + p["b"]) @ p["v"], None)
    h, _ = jax.lax.scan(layer, params["emb"][batch["t"]].mean(1) * params["scale"], params["layers"])
    return jnp.mean((h @ params["head"] - batch["y"]) ** 2) + jnp.mean(params["odd"] ** 2)


def zero_of(outer, stage=3, precision="fp32", replica=2, model=1, **options):
    return Zero(zerojax.make_mesh(replica=replica, model=model), stage, precision, outer_sharding=outer, **options)


def trained(zero, steps=3, **settings):
    """(metrics of each step, the parameters, the state)."""
    state = zero.init(create, optax.adamw(1e-2, eps=1e-5))
    step, found = zero.train_step(loss, clip_norm=1.0, audit="error", **settings), []
    for _ in range(steps):
        state, metrics = step(state, BATCH)
        found.append([float(metrics[name]) for name in ("loss", "grad_norm", "param_norm")])
    return np.array(found), jax.tree.map(np.asarray, state.model()), state


@functools.cache
def plain(steps=3):
    """What `trained` returns, without zerojax: on one device, with all rows at once."""
    params, tx = create(jax.random.key(0)), optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-5))
    opt_state, found = tx.init(params), []
    for _ in range(steps):
        value, grads = jax.jit(jax.value_and_grad(loss))(params, BATCH)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        found.append([float(a) for a in (value, optax.tree.norm(grads), optax.tree.norm(params))])
    return np.array(found), jax.tree.map(np.asarray, params)


def assert_same(got, want):
    """In fp32, only the order of sums differs."""
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got[1], want[1])


CASES = [(3, 1, 2, {}), (3, 2, 4, {}), (2, 2, 2, {}), (1, 1, 4, {})]
MORE = [(2, 1, 4, {}), (1, 2, 2, {}), (3, 2, 2, {"bucket_bytes": 512}), (3, 1, 2, {"remat": "full", "prefetch": 2})]
MORE += [(3, 1, 8, {}), (3, 2, 2, {"prefetch": 0, "layers": "list"}), (2, 1, 2, {"bucket_bytes": 512})]


@pytest.mark.parametrize(
    ("stage", "k", "replica", "settings"), [*CASES, *(pytest.param(*each, marks=pytest.mark.full) for each in MORE)]
)
def test_training_is_that_of_the_plain_step(stage, k, replica, settings):
    """At every stage, with one and several microbatches; and each device holds its share of the optimizer's state."""
    got = trained(zero_of("optimizer", stage, replica=replica), num_microbatches=k, **settings)
    assert_same(got, plain())
    mu, w = got[2].opt_state[0].mu, got[2].params["layers"]["w"]
    over = P(None, ("data", "replica"))
    wanted = jax.NamedSharding(w.sharding.mesh, over)
    assert all(mu["layers"][name].sharding.is_equivalent_to(wanted, mu["layers"][name].ndim) for name in ("w", "b"))
    assert w.sharding.shard_shape(w.shape)[1] == (16 * replica // 8 if stage == 3 else 16)
    assert mu["odd"].shape == (16,) and mu["odd"].sharding.shard_shape((16,)) == (2,)


@pytest.mark.parametrize("precision", ["bf16", "bf16_reduce_fp32", "fp16"])
def test_training_in_narrow_dtypes_is_that_of_stage_3(precision):
    """The losses differ by a few roundings of bf16, as between any two meshes."""
    got, want = trained(zero_of("optimizer", 3, precision)), trained(zero_of("none", 3, precision, replica=1))
    np.testing.assert_allclose(got[0], want[0], rtol=2e-2)
    assert got[2].master["layers"]["w"].sharding.spec == P(None, ("data", "replica"))


def test_the_model_axis_stays():
    spec = {"layers/w": P(None, None, "model")}
    got = trained(zero_of("optimizer", 3, model=2, partition_specs=spec))
    assert_same(got, plain())
    assert got[2].opt_state[0].mu["layers"]["w"].sharding.spec == P(None, ("data", "replica"), "model")


@pytest.mark.parametrize(
    ("stage", "precision", "on_disk"),
    [
        (3, "bf16", False),
        (3, "fp32", True),
        *(
            pytest.param(*each, marks=pytest.mark.full)
            for each in [(3, "fp32", False), (3, "bf16", True), (1, "fp32", True), (1, "bf16", False)]
        ),
    ],
)
def test_an_offloaded_optimizer_computes_the_same(stage, precision, on_disk, tmp_path):
    """The norms, which are summed piece by piece, may differ in the last bit, and so may what they clip."""
    where = {"offload": "optimizer", "offload_dir": tmp_path if on_disk else None}
    zeros = [zero_of("optimizer", stage, precision, **options) for options in (where, {})]
    got, want = (trained(zero, num_microbatches=2)[0] for zero in zeros)
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_a_checkpoint_is_that_of_any_other_sharding(tmp_path):
    zero = zero_of("optimizer", 3, "bf16")
    _, params, state = trained(zero)
    with zero.checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(state)
    for other in zero_of("none", 1, "bf16", replica=4), zero_of("optimizer", 2, "bf16", replica=4), zero:
        start = other.eval_init(create, optax.adamw(1e-2, eps=1e-5))
        with other.checkpoints(tmp_path / "run") as checkpoints:
            restored = checkpoints.restore(start, 3)
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, restored.model()), params)
        mu = [jax.tree.map(np.asarray, each.logical().opt_state[0].mu) for each in (restored, state)]
        jax.tree.map(np.testing.assert_array_equal, *mu)


def test_a_step_of_your_own_keeps_what_is_placed():
    zero = zero_of("optimizer")
    value_and_grad, tx = zero.value_and_grad(loss), zero.optimizer(optax.adamw(1e-2, eps=1e-5))
    params = zero.shard(create(jax.random.key(0)))
    opt_state = tx.init(params)
    specs = lambda: (params["layers"]["w"].sharding.spec, opt_state[0].mu["layers"]["w"].sharding.spec)
    before = specs()

    @jax.jit
    def step(params, opt_state):
        value, grads = value_and_grad(params, BATCH)
        updates, opt_state = tx.update(grads, opt_state, params)
        return zero.apply_updates(params, updates), opt_state, value

    plain_gradient = jax.jit(jax.value_and_grad(loss))
    want, inner = create(jax.random.key(0)), optax.adamw(1e-2, eps=1e-5)
    inner_state = inner.init(want)
    for _ in range(3):
        params, opt_state, value = step(params, opt_state)
        expected, grads = plain_gradient(want, BATCH)
        updates, inner_state = inner.update(grads, inner_state, want)
        want = optax.apply_updates(want, updates)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        assert specs() == before == (P(None, "data"), P(None, ("data", "replica")))
    assert step._cache_size() == 1


def sent_between(zero, k):
    state = zero.eval_init(create, optax.adamw(1e-2))
    step = zero.train_step(loss, num_microbatches=k)
    found = jaxpr_counts.traced_collectives(step.trace(state, BATCH).jaxpr, zero.config.mesh)
    between = between_replicas(found, zero.config)
    return sum(each.sent_bytes for each in between), step.expectation(state, BATCH)


@pytest.mark.parametrize("k", [1, 4])
def test_a_step_sends_between_replicas_once(k):
    """(g + 2)(M - 1)/(M N) of a parameter in bf16, where g bytes hold a gradient; replicas send 2 g (M - 1)/(M N)."""
    g = 2 if k == 1 else 4
    for outer, volume in ("optimizer", g + 2), ("none", 2 * g):
        zero = zero_of(outer, 3, "bf16")
        sent, expectation = sent_between(zero, k)
        leaves = zero.eval_init(create, optax.adamw(1e-2)).layout.leaves
        elements = sum(np.prod(leaf.padding(True).stored_shape(leaf.shape)) for leaf in leaves if leaf.dim is not None)
        assert sent == pytest.approx(expectation.between_bytes, rel=0.01)
        assert expectation.between_bytes == pytest.approx(volume * elements / 4 / 2, rel=0.01)  # but for a scalar


def test_an_audit_finds_what_is_sent_between_replicas_in_addition():
    """Of sums in fp32 that are all-reduced instead of reduce-scattered, and gathered in bf16."""
    steps = {outer: zero_of(outer, 3, "bf16").train_step(loss, num_microbatches=4) for outer in ("optimizer", "none")}
    states = {outer: zero_of(outer, 3, "bf16").eval_init(create, optax.adamw(1e-2)) for outer in steps}
    expected = steps["optimizer"].expectation(states["optimizer"], BATCH)
    for outer, verdict in ("optimizer", Verdict.OK), ("none", Verdict.BROKEN):
        found = zerojax.audit_step(steps[outer].trace(states[outer], BATCH), expected)
        assert found["between replicas"].verdict is verdict


def test_an_unknown_value_is_refused():
    with pytest.raises(ValueError, match=r"outer_sharding: unknown value 'params'\n  fix: .*'optimizer'.*'none'"):
        zero_of("params")
    with pytest.raises(ValueError, match=r"shards nothing.*\n  got:.*\n  fix:      stage=1"):
        zero_of("optimizer", stage=0)
