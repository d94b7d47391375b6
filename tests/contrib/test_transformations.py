"""Low-bit optimizers: with Optax alone, and in steps of zerojax on several devices, in host memory and checkpoints."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from zerojax.analysis import hlo, hlo_collectives
from zerojax.contrib.low_bit import low_bit_moments, stochastic_rounding
from zerojax.offload import host_memory, host_pieces
from zerojax.offload.streamed_update import StreamedUpdate
from zerojax.step.config import Memory

WIDTH, HIDDEN, ROWS = 32, 1024, 48
low_bit = functools.partial(low_bit_moments, min_size=512)


def create(key=None):
    keys = jax.random.split(jax.random.key(0), 3)
    normal = lambda key, *shape: jax.random.normal(key, shape) / np.sqrt(shape[0])
    return {
        "embed": normal(keys[0], 64, WIDTH),
        "up": normal(keys[1], WIDTH, HIDDEN),
        "down": normal(keys[2], HIDDEN, WIDTH),
        "bias": jnp.zeros(WIDTH),
    }


def loss(params, batch):
    h = jax.nn.relu(params["embed"][batch["x"]] @ params["up"]) @ params["down"] + params["bias"]
    return jnp.mean(jnp.square(h - batch["y"]).astype(jnp.float32))


def batch(seed=0):
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 64, ROWS)
    target = np.random.default_rng(9).normal(size=(64, WIDTH)).astype(np.float32)
    return {"x": x, "y": target[x]}


def train_alone(tx, params, steps):
    @jax.jit
    def step(params, state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state = tx.init(params)
    for k in range(steps):
        params, state, value = step(params, state, batch(k))
    return params, state, float(value)


def test_only_large_moments_that_are_not_exempt_are_stored_in_few_bits():
    for bits, dtypes in ((8, (jnp.int8, jnp.uint8)), (16, (jnp.bfloat16, jnp.bfloat16))):
        _, state, _ = train_alone(low_bit(optax.adamw(1e-3), bits), create(), 2)
        adam = state.inner[0]
        for moment, dtype in ((adam.mu, dtypes[0]), (adam.nu, dtypes[1])):
            assert moment["up"].dtype == moment["down"].dtype == dtype
            assert moment["embed"].dtype == moment["bias"].dtype == jnp.float32
        shapes = [a.shape for a in jax.tree.leaves(state.scales)]
        assert shapes == (2 * [(HIDDEN, 1), (WIDTH, HIDDEN // 256)] if bits == 8 else [])
    everything = low_bit_moments(optax.adamw(1e-3), exempt=(), min_size=0).init(create())
    assert {a.dtype for a in jax.tree.leaves(everything.inner[0].nu)} == {jnp.dtype(jnp.uint8)}


def test_an_update_is_that_of_the_optimizer_for_the_moments_that_are_stored():
    """The first one is equal, since the moments are computed in fp32; without low-bit moments, all are."""
    params, grads = create(), jax.grad(loss)(create(), batch())
    plain = optax.adamw(1e-3)
    expected, _ = plain.update(grads, plain.init(params), params)
    for bits in (8, 16):
        tx = low_bit(optax.adamw(1e-3), bits)
        updates, _ = tx.update(grads, tx.init(params), params)
        jax.tree.map(np.testing.assert_array_equal, updates, expected)
    exempt = low_bit(optax.adamw(1e-3), exempt=("*",))
    jax.tree.map(np.testing.assert_array_equal, train_alone(exempt, params, 5)[0], train_alone(plain, params, 5)[0])


@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1e-2, 1e-3, 150))),
        pytest.param(optax.inject_hyperparams(optax.adamw)(1e-2), marks=pytest.mark.full),
        optax.lion(1e-3),
        pytest.param(optax.sgd(0.1, momentum=0.9), marks=pytest.mark.full),
        pytest.param(
            optax.masked(optax.adam(1e-2), {"embed": True, "up": True, "down": True, "bias": False}),
            marks=pytest.mark.full,
        ),
        optax.multi_transform(
            {"a": optax.adamw(1e-2), "b": optax.sgd(1e-2)}, {"embed": "b", "up": "a", "down": "a", "bias": "b"}
        ),
    ],
    ids=["chain", "inject_hyperparams", "lion", "sgd", "masked", "multi_transform"],
)
def test_training_reaches_the_loss_of_the_optimizer(tx):
    expected = train_alone(tx, create(), 150)[2]
    start = float(loss(create(), batch(149)))
    for bits in (8, 16):
        found = train_alone(low_bit(tx, bits), create(), 150)[2]
        assert abs(found - expected) < 0.02 * start
    narrow = jax.tree.map(lambda a: a.astype(jnp.bfloat16), create())
    params, _, found = train_alone(stochastic_rounding(low_bit(tx)), narrow, 150)
    assert abs(found - expected) < 0.04 * start  # computed in bf16 too
    assert {a.dtype for a in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}


def test_small_updates_of_parameters_in_bf16_are_not_lost():
    """1,000 times 1e-4, while the next number after 1 is 7.8e-3 away."""
    params = {"w": jnp.ones(1000, jnp.bfloat16)}
    grads = {"w": jnp.full(1000, -1.0, jnp.bfloat16)}
    moved = {}
    for name, tx in (("nearest", optax.sgd(1e-4)), ("stochastic", stochastic_rounding(optax.sgd(1e-4)))):

        def body(carry, _, tx=tx):
            updates, state = tx.update(grads, carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), state), None

        (after, _), _ = jax.lax.scan(body, (params, tx.init(params)), length=1000)
        moved[name] = float(after["w"].astype(jnp.float32).mean()) - 1
    assert moved["nearest"] == 0
    assert moved["stochastic"] == pytest.approx(0.1, rel=0.05)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="bits is 4"):
        low_bit_moments(optax.adamw(1e-3), 4)
    with pytest.raises(ValueError, match="has no moments"):
        low_bit_moments(optax.sgd(1e-3)).init(create())
    tx = stochastic_rounding(optax.sgd(1e-3))
    with pytest.raises(ValueError, match="the update has no parameters"):
        tx.update(create(), tx.init(create()))


# In zerojax


def zero_of(num_devices=4, stage=3, precision="fp32", offload="none", **options):
    mesh = zerojax.make_mesh(devices=jax.devices()[:num_devices])
    return zerojax.Zero(mesh, stage, precision, offload=offload, **options)


def run(zero, tx, steps=4):
    state, step = zero.init(create, tx), zero.train_step(loss)
    losses = []
    for k in range(steps):
        state, metrics = step(state, batch(k))
        losses.append(float(metrics["loss"]))
    return state, losses


@pytest.mark.parametrize(("num_devices", "stage"), [(4, 1), (3, 3), pytest.param(1, 0, marks=pytest.mark.full)])
def test_steps_are_those_of_one_device(num_devices, stage):
    """Losses differ by rounding: where a sum of gradients differs in its last bit, other codes may be drawn."""
    params, state, _ = train_alone(low_bit(optax.adamw(1e-2)), create(), 4)
    found, _ = run(zero_of(num_devices, stage), low_bit(optax.adamw(1e-2)))
    logical = found.logical()
    codes, expected = logical.opt_state.inner[0].mu["up"], state.inner[0].mu["up"]
    assert codes.dtype == jnp.int8 and np.mean(np.asarray(codes) != np.asarray(expected)) < 0.02
    for name, leaf in params.items():
        np.testing.assert_allclose(logical.params[name], leaf, atol=2e-3)
    if num_devices == 4:
        assert found.opt_state.inner[0].mu["up"].sharding.spec == found.opt_state.scales[0].mu["up"].sharding.spec


@pytest.mark.parametrize("bits", [8, 16])
def test_the_update_sends_nothing(bits):
    """The first matrix is sharded in dim 0, and the second, which has many rows, in dim 1: a block for each device."""
    model = lambda: {"up": jnp.zeros((64, 1024)), "down": jnp.zeros((8192, 1024)), "layers": jnp.zeros((3, 64, 512))}
    whole = lambda params, batch: sum(jnp.mean((batch @ params[name].sum(0)) ** 2) for name in ("up", "down"))
    both = lambda params, batch: whole(params, batch) + jnp.mean(params["layers"] ** 2)
    zero, sent = zero_of(4), []
    for tx in (optax.adamw(1e-3), low_bit(optax.adamw(1e-3), bits)):
        state = zero.eval_init(model, tx)
        text = zero.train_step(both).lower(state, np.zeros((8, 1024), np.float32)).compile().as_text()
        found = hlo_collectives.compiled_collectives(hlo.parse_program(text))
        sent.append(sum(each.sent_bytes for each in found))
    assert sent[0] == sent[1] > 0
    dims = {leaf.path: leaf.dim for leaf in state.layout.leaves}
    assert dims["up"] == 0 and dims["down"] == 1


def test_explain_counts_the_bytes():
    tx = stochastic_rounding(low_bit(optax.adamw(1e-3), exempt=()))
    state = zero_of(1, precision="bf16_params").eval_init(create, tx)
    size = lambda tree: sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))
    psi = sum(leaf.size for leaf in state.layout.leaves)
    assert state.master is None and size(state.params) == 2 * psi
    assert 2 * psi < size(state.opt_state) < 2.2 * psi
    assert zero_of(1, precision="bf16_params").explain(state).totals["optimizer"] == size(state.opt_state)


@pytest.mark.full
@pytest.mark.parametrize("offload", ["none", "optimizer"])
def test_a_checkpoint_is_restored_on_another_number_of_devices(tmp_path, offload):
    tx = stochastic_rounding(low_bit(optax.adamw(1e-2)))
    saving = zero_of(4, 3, "bf16_params", offload, shard_dims={"down": 0})
    state, _ = run(saving, tx)
    zero = zero_of(3, precision="bf16_params")
    expected = jax.tree.map(np.asarray, jax.tree.leaves(state.logical().opt_state))
    with saving.checkpoints(tmp_path) as run_of:
        run_of.save(state)
    with zero.checkpoints(tmp_path) as run_of:
        restored, _ = run_of.resume(zero.init(create, tx))
    for a, b in zip(jax.tree.leaves(restored.logical().opt_state), expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("num_devices", "dim_of_up", "bits"), [(4, 0, 16), (4, 1, 8), (3, 0, 8)])
def test_moments_in_few_bits_may_be_in_host_memory(monkeypatch, bits, num_devices, dim_of_up):
    """The numbers of an update of whole arrays. The scales of blocks stay on the devices. Three devices store zeros
    behind the last row; four that divide rows of 1024 elements have a block of each."""
    monkeypatch.setattr(host_pieces, "PIECES_BYTES", 2**14)
    monkeypatch.setattr(host_memory.AllOnDevices, "update", Memory.update)
    tx = stochastic_rounding(low_bit(optax.adamw(1e-2), bits))
    dims = {"up": dim_of_up, "down": 0}
    zeros = [zero_of(num_devices, 3, "bf16_params", to, shard_dims=dims) for to in ("none", "optimizer")]
    (kept, losses), (offloaded, found) = (run(zero, tx) for zero in zeros)
    np.testing.assert_allclose(found, losses, rtol=1e-3)
    state = offloaded.opt_state.inner.inner[0].mu["up"]
    assert state.sharding.memory_kind == "pinned_host" and state.dtype.itemsize == bits // 8
    if bits == 8:
        assert offloaded.opt_state.inner.scales[0].mu["up"].sharding.memory_kind == "device"
    for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(offloaded), strict=True):
        if a.dtype in (jnp.int8, jnp.uint8, jnp.bfloat16):
            assert np.mean(np.asarray(a) != np.asarray(b)) < 0.02
    dtypes = [leaf.dtype for leaf in kept.layout.leaves]
    assert StreamedUpdate(zeros[1].config, kept.layout, dtypes, False).split.sliced == []  # random bits are cut too


@pytest.mark.parametrize(("bits", "stage"), [(16, 0), (8, 3)])
def test_an_update_in_pieces_is_that_of_whole_arrays(monkeypatch, bits, stage):
    """On the devices too, where blocks that are on several devices are updated whole."""
    tx, found = low_bit(optax.adamw(1e-2), bits), []

    def in_pieces(zero, tx):
        state = zero.eval_init(create, tx)
        dtypes = [leaf.dtype for leaf in state.layout.leaves]
        return zero.config.memory.update(zero.config, state.layout, dtypes, False) is not None

    assert in_pieces(zero_of(4), tx) and not in_pieces(zero_of(4), optax.adamw(1e-2))
    assert not in_pieces(zerojax.Zero(zerojax.make_mesh(model=2)), tx)  # it may divide a piece
    for pieces_bytes in (2**14, None):
        if pieces_bytes is None:
            monkeypatch.setattr(host_memory.AllOnDevices, "update", Memory.update)
        else:
            monkeypatch.setattr(host_pieces, "DEVICE_PIECES_BYTES", pieces_bytes)
        found.append(run(zero_of(4, stage), tx))
    (pieces, losses), (whole, wanted) = found
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(pieces), jax.tree.leaves(whole), strict=True):
        if a.dtype in (jnp.int8, jnp.uint8, jnp.bfloat16):
            assert np.mean(np.asarray(a) != np.asarray(b)) < 0.02
        elif not jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


def test_parameters_are_rounded_in_pieces_without_moments_too(monkeypatch):
    monkeypatch.setattr(host_pieces, "DEVICE_PIECES_BYTES", 2**14)
    cut, counts = host_pieces.cut, []
    monkeypatch.setattr(host_pieces, "cut", lambda *args: counts.append(cut(*args).count) or cut(*args))
    _, losses = run(zero_of(4, precision="bf16_params"), stochastic_rounding(optax.sgd(0.1)))
    assert max(counts) > 1 and losses[-1] < losses[0]


@pytest.mark.parametrize(("width", "text"), [(32, "[1024, 32]"), (512, "[1024, 512]")], ids=["one block", "two"])
def test_blocks_on_several_devices_cannot_be_in_host_memory(width, text):
    zero = zero_of(offload="optimizer", shard_dims={"down": 1})
    with pytest.raises(ValueError) as caught:
        zero.eval_init(lambda: {"down": jnp.zeros((1024, width))}, low_bit(optax.adamw(1e-2)))
    assert str(caught.value) == (
        "offload: low_bit_moments cannot be computed for one piece of a parameter at a time\n"
        f"  got:      'down' {text} is sharded in its last dim, and blocks of it are on several devices\n"
        "  fix:      Zero(..., shard_dims={'down': 0}), which leaves its rows whole"
    )


def test_parameters_in_bf16_without_stochastic_rounding_get_a_warning():
    with pytest.warns(UserWarning, match="parameters in bfloat16 lose small updates"):
        zero_of(precision="bf16_params").eval_init(create, optax.adamw(1e-3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zero_of(precision="bf16_params").eval_init(create, optax.chain(stochastic_rounding(optax.adamw(1e-3))))
