"""Parity with one device where the number of devices divides no dim, and leaves are stored with zeros."""

import functools
import subprocess
import sys
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from optax import contrib
from support import plain, zoo
from support.parity import TOLERANCES, assert_close, batches, logical_weights, optimizer, train, with_constant_init
from support.paths import TESTS, importing

import zerojax
from zerojax import Remat, Zero
from zerojax.analysis.jaxpr_counts import traced_collectives

ROWS = {3: 30, 5: 30, 6: 30, 7: 28, 12: 24}
FEW = 4  # steps


def mesh(num_devices, **axes):
    return zerojax.make_mesh(devices=jax.devices()[:num_devices], **axes)


def cut(name, num_devices, steps=FEW):
    """Batches whose rows the devices divide."""
    rows = ROWS[num_devices]
    return [{key: value[:rows] for key, value in batch.items()} for batch in batches(zoo.ZOO[name], steps)]


@functools.cache
def expected(name, n, precision="fp32", k=1):
    options = {"precision": precision, "num_microbatches": k, "num_devices": n}
    return plain.run(zoo.ZOO[name], optimizer(), cut(name, n), **options)


# (model, devices, stage, precision, microbatches, options of the step)
CASES = [
    ("gpt_nnx", 3, 3, "fp32", 1, {}),
    ("gpt_linen_scan", 7, 2, "fp32", 2, {"remat": "dots"}),
    ("gpt_nnx_scan", 6, 3, "bf16", 1, {"remat": "full"}),
    ("tied", 5, 1, "fp32", 1, {"bucket_bytes": 2**10, "clip_norm": 0.5}),
    ("unused", 3, 3, "fp16", 1, {}),
]
MORE = [
    ("gpt_linen_scan", 5, 3, "fp32", 1, {}),
    ("unet", 3, 3, "fp32", 1, {"prefetch": 0}),
    ("moe", 7, 3, "fp32", 1, {}),
    ("lstm", 5, 3, "fp32", 1, {}),
    ("weighted", 3, 2, "bf16_reduce_fp32", 1, {}),
]


def follows_the_plain_step(name, n, stage, precision="fp32", k=1, options=MappingProxyType({})):
    zero, model = Zero(mesh(n), stage, precision), zoo.ZOO[name]
    zero_model = model if precision == "fp32" and k == 1 else with_constant_init(model)
    got, state = train(zero, zero_model, cut(name, n), num_microbatches=k, **options)
    assert any(leaf.num_zeros for leaf in state.layout.leaves)
    want = expected(name, n, precision, k)
    if options.get("clip_norm"):
        tx = optax.chain(optax.clip_by_global_norm(options["clip_norm"]), optimizer())
        want = plain.run(model, tx, cut(name, n), num_devices=n)
    assert_close(got, want, **TOLERANCES[precision])


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.full) for case in MORE)],
    ids=lambda case: "-".join(map(str, case[:5])),
)
def test_training_follows_the_plain_step(case):
    follows_the_plain_step(*case)


ON_TWELVE = """
import zerojax
zerojax.simulate_devices(12)
from test_any_number_of_devices import follows_the_plain_step
for name, stage in ("gpt_nnx", 3), ("gpt_nnx_scan", 2), ("moe", 1):
    follows_the_plain_step(name, 12, stage)
follows_the_plain_step("unused", 12, 3, "bf16")
"""


@pytest.mark.full
def test_twelve_devices():
    """In a process of their own, as the tests share eight."""
    environ = importing(TESTS, TESTS / "step")
    ended = subprocess.run([sys.executable, "-c", ON_TWELVE], env=environ, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(("stage", "n"), [(0, 5), (1, 3), (2, 7), (3, 6)])
def test_every_stage_on_every_number_of_devices(stage, n):
    got, state = train(Zero(mesh(n), stage), zoo.ZOO["unused"], cut("unused", n))
    assert_close(got, expected("unused", n))
    zeros = [
        np.asarray(a)[leaf.shape[leaf.dim] :] if leaf.dim == 0 else np.asarray(a)[:, leaf.shape[leaf.dim] :]
        for leaf, a in zip(state.layout.leaves, jax.tree.leaves(state.opt_state[0].mu), strict=True)
        if leaf.num_zeros and stage
    ]
    assert not any(np.any(part) for part in zeros)


def test_a_hybrid_mesh_pads_to_its_shard_axis():
    got, state = train(Zero(mesh(6, replica=2), 3), zoo.ZOO["gpt_nnx"], cut("gpt_nnx", 6))
    assert {leaf.shape[leaf.dim] % 3 for leaf in state.layout.leaves if leaf.num_zeros} <= {1, 2}
    assert_close(got, expected("gpt_nnx", 6))


class Table(nnx.Module):
    """A table of 300 rows, whose width of 47 is padded to 48, and a layer."""

    def __init__(self, rngs):
        self.embed, self.head = nnx.Embed(300, 47, rngs=rngs), nnx.Linear(47, 31, rngs=rngs)

    def __call__(self, x):
        return self.head(jnp.tanh(self.embed(x)))


def table_loss(model, batch):
    return zoo.cross_entropy(model(batch["x"]), batch["y"]).mean()


@functools.cache
def table_run(n, stage):
    """(losses, weights, audit, kinds of collectives) of a model with a table."""
    rng = np.random.default_rng(0)
    batch = {"x": rng.integers(0, 300, (30, 4)), "y": rng.integers(0, 31, (30, 4))}
    zero = Zero(mesh(n), stage)
    state, step = zero.init(Table, optimizer()), zero.train_step(table_loss)
    audit = step.audit(state, batch)
    kinds = {c.kind for c in traced_collectives(step.trace(state, batch).jaxpr, zero.config.mesh)}
    losses = []
    for _ in range(3):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, logical_weights(state), audit, kinds


@pytest.mark.parametrize("stage", [1, 3])
def test_rows_of_a_padded_table_are_looked_up_and_zeros_are_counted(stage):
    losses, weights, audit, kinds = table_run(3, stage)
    want_losses, want_weights, *_ = table_run(1, 0)
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
    for got, want in zip(weights, want_weights, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
    assert audit.ok, str(audit)
    assert ("all-to-all" in kinds) == (stage > 1)


# Leaves that are divided over a `model` axis too

SPECS = {"blocks/up": P(None, None, "model"), "blocks/b": P(None, "model"), "blocks/down": P(None, "model", None)}


def create_stack(key):
    keys = jax.random.split(key, 3)
    up, down = jax.random.normal(keys[0], (4, 20, 32)) / 5, jax.random.normal(keys[1], (4, 32, 20)) / 6
    return {"blocks": {"up": up, "b": jnp.zeros((4, 32)), "down": down}, "head": jax.random.normal(keys[2], (20, 11))}


def stack_loss(params, x):
    body = lambda x, layer: (x + nnx.gelu(x @ layer["up"] + layer["b"]) @ layer["down"], None)
    return jnp.mean((jax.lax.scan(body, x, params["blocks"])[0] @ params["head"] - 1) ** 2)


@functools.cache
def stack_run(n, stage, remat="none", **axes):
    """(losses, audit, number of zeros of each leaf)."""
    zero = Zero(mesh(n, **axes), stage, stacked=("blocks/*",), partition_specs=SPECS if axes else {})
    x = np.random.default_rng(0).normal(size=(18, 20)).astype(np.float32)
    state, step, losses = zero.init(create_stack, optimizer()), zero.train_step(stack_loss, remat=remat), []
    audit = step.audit(state, x)
    for _ in range(3):
        state, metrics = step(state, x)
        losses.append(float(metrics["loss"]))
    return losses, audit, [leaf.num_zeros for leaf in state.layout.leaves]


@pytest.mark.parametrize(("stage", "remat"), [(1, "none"), (3, Remat(partition_inputs=True))])
def test_a_leaf_is_padded_beside_a_model_axis(stage, remat):
    losses, audit, zeros = stack_run(6, stage, remat, model=2)
    np.testing.assert_allclose(losses, stack_run(1, 0)[0], rtol=1e-5)
    assert audit.ok, str(audit)
    assert zeros == [0, 1, 1, 1]  # the bias has no dim but that of the model axis


# The state


def odd(rngs):
    return nnx.Linear(10, 11, rngs=rngs)


def test_a_user_sees_logical_shapes():
    """`model()`, evaluation, and the averages of weights that `with_params` takes; each device holds a third."""
    zero = Zero(mesh(3), 3, "bf16")
    state = zero.init(odd, optax.chain(optax.adamw(1e-2), optax.ema(0.9)))
    (bias, kernel), zeros = jax.tree.leaves(state.params), [leaf.num_zeros for leaf in state.layout.leaves]
    assert zeros == [1, 1] and bias.shape == (12,) and kernel.shape == (10, 12)
    loss = lambda model, x: jnp.mean(model(x) ** 2)
    x = np.ones((6, 10), np.float32)
    state, _ = zero.train_step(loss)(state, x)
    model = state.model()
    assert model.kernel.shape == (10, 11) and model.bias.shape == (11,)
    assert zero.eval_init(odd, optax.sgd(0.1)).model().kernel.shape == (10, 11)
    before = zero.eval_step(loss)(state, x)["loss"]
    same = zero.with_params(state, state.master)  # as it is stored
    assert zero.eval_step(loss)(same, x)["loss"] == before
    logical = dict(zip(["bias", "kernel"], logical_weights(state), strict=True))
    assert zero.eval_step(loss)(zero.with_params(state, logical), x)["loss"] == before
    averages = state.logical().opt_state[1].ema
    assert {name: a.shape for name, a in averages.items()} == {"bias": (11,), "kernel": (10, 11)}
    np.testing.assert_array_equal(averages["kernel"], np.asarray(state.opt_state[1].ema["kernel"])[:, :11])
    with pytest.raises(ValueError, match=r"with_params: these are not the trained parameters.*\n.*kernel: \(9, 9\)"):
        zero.with_params(state, logical | {"kernel": np.ones((9, 9), np.float32)})


def test_a_step_does_not_take_logical_shapes():
    zero, loss = Zero(mesh(3), 3), lambda model, x: jnp.mean(model(x) ** 2)
    state, step, x = zero.eval_init(odd, optax.sgd(1e-2)), zero.train_step(loss), np.ones((6, 10), np.float32)
    step.trace(state, x)
    logical = state.logical()
    assert logical.logical() is logical
    with pytest.raises(ValueError, match=r"(?s)parameters do not match.*bias: \(\(11,\).*\(\(12,\).*not state.logical"):
        step.trace(logical, x)


@pytest.mark.parametrize("given", ["numpy", "jax"])
def test_existing_arrays_are_padded(given):
    arrays = {"w": np.arange(70.0, dtype=np.float32).reshape(7, 10), "b": np.ones(11, np.float32)}
    values = arrays if given == "numpy" else jax.tree.map(jnp.asarray, arrays)
    state = Zero(mesh(3), 3).init(values, optax.adam(1e-3))
    assert {name: a.shape for name, a in state.params.items()} == {"w": (7, 12), "b": (12,)}
    for name, value in state.model().items():
        np.testing.assert_array_equal(value, arrays[name])


def test_value_and_grad_has_logical_shapes():
    zero = Zero(mesh(3), 3)
    params = zero.shard({"w": jnp.ones((7, 10)), "v": jnp.ones((9, 2))})
    loss, grads = jax.jit(zero.value_and_grad(lambda p, x: jnp.mean((x @ p["w"]) ** 2) + jnp.sum(p["v"])))(
        params, zero.shard_batch(np.ones((6, 7), np.float32))
    )
    assert loss == 67 and grads["w"].shape == (7, 10) and grads["v"].sharding.shard_shape((9, 2)) == (3, 2)


# Optimizers


class Seen:
    """Wraps an optimizer, and records the shapes that it gets."""

    def __init__(self, tx):
        self.tx, self.shapes = tx, set()

    def wrapped(self):
        def update(grads, opt_state, params=None):
            self.shapes |= {a.shape for a in jax.tree.leaves((grads, params))}
            return self.tx.update(grads, opt_state, params)

        return optax.GradientTransformation(self.tx.init, update)


def preconditioned():
    """Two statistics for each matrix [m, n], of shapes [m, m] and [n, n], as Shampoo has them."""

    def init(params):
        return jax.tree.map(lambda a: [jnp.eye(size, dtype=a.dtype) for size in a.shape] if a.ndim == 2 else [], params)

    def update(grads, state, params=None):
        both = lambda g, old: [old[0] + g @ g.T, old[1] + g.T @ g] if g.ndim == 2 else []
        state = jax.tree.map(both, grads, state)
        step = lambda g, s: -0.1 * jnp.linalg.solve(s[0], g) @ jnp.linalg.inv(s[1]) if s else -0.1 * g
        return jax.tree.map(step, grads, state), state

    return optax.GradientTransformation(init, update)


CHAINS = {
    "preconditioned": preconditioned,
    "adamw": lambda: optax.adamw(1e-2, eps=1e-5, weight_decay=0.1),
    "lamb": lambda: optax.lamb(1e-2, eps=1e-6),
    "lars": lambda: optax.lars(0.1),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "muon": lambda: contrib.muon(1e-2),
    "ema": lambda: optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1), optax.ema(0.9)),
    "centralize": lambda: optax.chain(optax.centralize(), optax.radam(1e-2, eps=1e-6)),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)),
}


@pytest.mark.parametrize("name", CHAINS)
def test_optimizers_see_logical_shapes(name):
    number = sorted(CHAINS).index(name)
    n, stage = (3, 5, 7)[number % 3], (1, 3)[number % 2]
    seen, data = Seen(CHAINS[name]()), cut("unused", n, 3)
    got, state = train(Zero(mesh(n), stage), zoo.ZOO["unused"], data, seen.wrapped())
    assert seen.shapes == {leaf.shape for leaf in state.layout.leaves}
    shapes = lambda state: [a.shape for a in jax.tree.leaves(state)]
    assert shapes(state) == shapes(Zero(mesh(n), stage).eval_init(zoo.ZOO["unused"].create, CHAINS[name]()))
    if name != "noise":  # drawn from the same key, in another program
        assert_close(got, plain.run(zoo.ZOO["unused"], CHAINS[name](), data, num_devices=n))


@pytest.mark.parametrize("n", [7, 12, 1000])
def test_states_of_optimizers_are_stored_in_equal_shards(n):
    zero = Zero(zerojax.make_mesh(devices=n), 1)
    for name in CHAINS:
        state = zero.eval_init(zoo.ZOO["gpt_nnx"].create, CHAINS[name]())
        for a in jax.tree.leaves((state.master, state.opt_state)):
            a.sharding.shard_shape(a.shape)  # raises if it is not even
            assert a.size < max(n, 64) or not a.sharding.is_fully_replicated, name
