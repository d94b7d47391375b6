"""An axis `context` divides the tokens of each sequence, and model states with them: training stays the same."""

import dataclasses
import functools

import gpt
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec as P
from support import plain, traffic, zoo
from support.parity import STEPS, TOLERANCES, assert_close, batches, logical_weights, optimizer, train

import zerojax
from zerojax import Zero
from zerojax.plan.transformer import cudnn_attention_for_tracing
from zerojax.sharding.mesh import row_groups

CONFIG = gpt.Config(width=16, layers=2, heads=4, vocab=64, seq=16)


@functools.cache
def reference(name, precision, num_rows, k=1):
    """The plain step, which rounds the sums of as many parts of the batch as there are devices with rows."""
    model, many = zoo.ZOO[name], {"num_devices": num_rows} if precision != "fp32" else {}
    return plain.run(model, optimizer(), batches(model), precision=precision, num_microbatches=k, **many)


full = pytest.mark.full
RUNS = [  # (model, stage, devices along context, precision, options of the step)
    pytest.param("gpt_nnx", 3, 4, "fp32", {}, id="list"),
    pytest.param("gpt_nnx", 3, 2, "bf16", {"tiles": 2, "remat": "full"}, id="bf16", marks=full),
    pytest.param("gpt_linen_scan", 3, 2, "fp32", {"remat": "dots", "tiles": 1}, id="scan"),
    pytest.param("gpt_nnx_scan_remat", 2, 4, "fp32", {"num_microbatches": 2}, id="stage2"),
    pytest.param("tied", 3, 8, "fp32", {"tiles": 1}, id="tied"),
    pytest.param("weighted", 1, 2, "fp32", {"num_microbatches": 4}, id="weighted"),
    pytest.param("moe", 0, 4, "fp32", {}, id="stage0"),
    pytest.param("lstm", 3, 4, "fp32", {}, id="lstm", marks=full),
    pytest.param("unet", 3, 2, "fp32", {}, id="unet", marks=full),
]


@pytest.mark.parametrize(("name", "stage", "context", "precision", "options"), RUNS)
def test_training_follows_the_plain_step(name, stage, context, precision, options):
    zero, model = Zero(zerojax.make_mesh(context=context), stage, precision), zoo.ZOO[name]
    got, state = train(zero, model, batches(model), **options)
    expected = reference(name, precision, 8 // context, options.get("num_microbatches", 1))
    assert_close(got, expected, **TOLERANCES[precision])
    if stage == 3:
        largest = max(state.layout.leaves, key=lambda leaf: leaf.size)
        assert largest.spec(zero.config.axes, True)[largest.dim] == ("context", "data")
    assert len(got.losses) == STEPS


def test_tokens_that_are_cut_off_and_odd_numbers_of_devices():
    """Labels are shifted after the logits, whose 15 tokens no device count divides; 6 devices, of whose shards some
    have zeros."""

    def loss(model, batch):
        logits = model(batch["tokens"]).astype(jnp.float32)[:, :-1]
        return gpt.cross_entropy(logits, batch["tokens"][:, 1:])

    tokens = np.random.default_rng(0).integers(0, 64, (12, 12), dtype=np.int32)
    losses, weights = [], []
    for context, devices in (1, jax.devices()[:1]), (3, jax.devices()[:6]):
        zero = Zero(zerojax.make_mesh(context=context, devices=devices), 3)
        state, step = zero.init(gpt.create(CONFIG), optimizer()), zero.train_step(loss, tiles=1)
        losses.append([])
        for _ in range(3):
            state, row = step(state, {"tokens": tokens})
            losses[-1].append(float(row["loss"]))
        weights.append(logical_weights(state))
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    for own, other in zip(*weights, strict=True):
        np.testing.assert_allclose(own, other, atol=1e-5)


def test_dropout_draws_the_masks_of_whole_sequences():
    """On as many groups of devices with rows, so that their keys are the same."""

    def loss(params, batch, key):
        x = params["embed"][batch["tokens"]]
        return jnp.mean((x * jax.random.bernoulli(key, 0.5, x.shape)) ** 2 @ params["out"])

    rng = np.random.default_rng(0)
    params = {"embed": rng.normal(size=(64, 16)).astype(np.float32), "out": rng.normal(size=16).astype(np.float32)}
    batch, losses = {"tokens": rng.integers(0, 64, (4, 16), dtype=np.int32)}, []
    for mesh in zerojax.make_mesh(devices=jax.devices()[:2]), zerojax.make_mesh(context=4):
        zero = Zero(mesh, 3)
        state, step = zero.init(params, optax.sgd(0.1)), zero.train_step(loss)
        losses.append(float(step(state, batch)[1]["loss"]))
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)


def test_muon_evaluation_and_checkpoints(tmp_path):
    """Matrices have owners among all devices. A run continues on a mesh without the axis."""
    tx, found = optax.contrib.muon(1e-2), []
    data = [{"tokens": np.random.default_rng(i).integers(0, 64, (16, 17), dtype=np.int32)} for i in range(2)]
    for mesh in zerojax.make_mesh(devices=jax.devices()[:1]), zerojax.make_mesh(context=4):
        zero = Zero(mesh, 3)
        state, step = zero.init(gpt.create(CONFIG), tx), zero.train_step(gpt.loss)
        state, _ = step(state, data[0])
        found.append(logical_weights(state))
    for own, other in zip(*found, strict=True):
        np.testing.assert_allclose(own, other, atol=1e-5)

    rows = {"tokens": data[1]["tokens"][:5]}  # on 2 groups of devices
    evaluated = zerojax.evaluate(zero.eval_step(gpt.loss), state, rows, batch_size=4)["loss"]
    with zero.checkpoints(tmp_path, every=1) as checkpoints:
        checkpoints.save(checkpoints.resume(state)[0])
    without = Zero(zerojax.make_mesh(), 3)
    with without.checkpoints(tmp_path, every=1) as checkpoints:
        resumed, start = checkpoints.resume(without.init(gpt.create(CONFIG), tx))
    assert start == 1
    expected = zerojax.evaluate(without.eval_step(gpt.loss), resumed, rows, batch_size=8)["loss"]
    np.testing.assert_allclose(evaluated, expected, rtol=1e-6)
    np.testing.assert_allclose(
        step(state, data[1])[1]["loss"], without.train_step(gpt.loss)(resumed, data[1])[1]["loss"], rtol=1e-6
    )


def test_weights_are_gathered_over_all_devices_at_once():
    zero = Zero(zerojax.make_mesh(context=4), 3)
    state = zero.eval_init(gpt.create(CONFIG), optax.sgd(0.1))
    step = zero.train_step(gpt.loss, remat="full")
    found = traffic.collectives_of(step.trace(state, gpt.batch_aval(CONFIG, 8)).jaxpr, {"data": 2, "context": 4})
    gathers = [c for c in found if c.kind == "all_gather"]
    assert gathers and {c.num_devices for c in gathers} == {8}
    kinds = {c.kind for c in found if c.num_devices == 2}
    assert "reduce_scatter" in kinds  # what the compiler leaves to be summed
    rows = [row for row in zero.explain(state).rows if row.shape]
    assert {row.undivided_bytes / row.bytes_per_device for row in rows} == {8}


# Attention


def heads(num_heads, num_keys, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    shape = lambda count: (4, 16, count, 8)
    return [
        jax.random.normal(key, shape(n), dtype) for key, n in zip(keys, (num_heads, num_keys, num_keys), strict=True)
    ]


@pytest.mark.parametrize(
    ("num_heads", "num_keys", "kernel", "exchanges"),
    [
        (8, 8, "xla", True),
        (8, 1, "xla", False),
        (6, 6, "xla", False),
        (8, 4, "cudnn", True),
        (8, 2, "cudnn", True),
        (8, 8, "function", True),
    ],
)
def test_attention_exchanges_heads(num_heads, num_keys, kernel, exchanges, monkeypatch):
    """As `jax.nn.dot_product_attention`, with its gradients, a bias for each head, and a causal mask."""
    plain_attention = jax.nn.dot_product_attention
    of_cpu = lambda *args, **options: plain_attention(*args, **options | {"implementation": "xla"})
    monkeypatch.setattr(jax.nn, "dot_product_attention", of_cpu)  # there is no kernel for CPUs
    bias = jax.random.normal(jax.random.key(1), (1, num_heads, 16, 16))
    mesh = zerojax.make_mesh(context=4)

    def loss(attend, q, k, v):
        if kernel == "function" and attend is zerojax.attention:
            return jnp.sum(attend(q, k, v, implementation=functools.partial(of_cpu, is_causal=True)) ** 2)
        own_bias = None if kernel == "function" else bias
        return jnp.sum(attend(q, k, v, own_bias, is_causal=True, implementation=kernel) ** 2)

    def divided(*arrays):
        on_rows = lambda *own: jax.lax.psum(loss(zerojax.attention, *own), "data")
        over_rows = {"in_specs": P("data"), "out_specs": P(), "axis_names": {"data"}, "check_vma": False}
        by_token = jax.NamedSharding(mesh, P("data", "context"))
        constrained = [jax.lax.with_sharding_constraint(a, by_token) for a in arrays]
        return jax.shard_map(on_rows, mesh=mesh, **over_rows)(*constrained)

    arrays = heads(num_heads, num_keys)
    expected = jax.value_and_grad(functools.partial(loss, of_cpu), argnums=(0, 1, 2))(*arrays)
    got = jax.jit(jax.value_and_grad(divided, argnums=(0, 1, 2)))(*arrays)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), got, expected)
    assert (str(jax.make_jaxpr(divided)(*arrays)).count("shard_map[") == 2) == exchanges
    outside = zerojax.attention(*arrays, bias, is_causal=True)  # no axis is left to the compiler
    np.testing.assert_allclose(outside, of_cpu(*arrays, bias, is_causal=True), rtol=1e-6)


# Errors


def message(call, *args, **options):
    with pytest.raises(ValueError) as error:
        call(*args, **options)
    assert "fix:" in str(error.value)
    return str(error.value)


def test_what_cannot_be_divided():
    zero = Zero(zerojax.make_mesh(context=4), 3)
    trace = lambda config, loss: zero.train_step(loss).trace(
        zero.eval_init(gpt.create(config), optax.sgd(0.1)), gpt.batch_aval(config, 8)
    )
    odd = message(trace, gpt.Config(width=16, layers=1, heads=4, vocab=64, seq=14), gpt.loss)
    assert "no activation divides over 4 devices" in odd and "(4, 14, 16)" in odd and "multiple of 4 tokens" in odd

    fused = gpt.Config(width=16, layers=1, heads=2, vocab=64, seq=16, attention="cudnn", dtype=jnp.bfloat16)
    text = message(trace, fused, gpt.loss)
    assert "attention: the heads do not divide over context" in text and "2 heads, 2 of keys and values, 4 dev" in text

    def kernel(model, batch):
        x = model.embed(batch["tokens"][:, :-1])[:, :, None].repeat(4, axis=2)
        return jnp.mean(cudnn_attention_for_tracing(x, x, x, True))

    text = message(trace, CONFIG, kernel)
    assert "cannot divide this kernel over the axes 'context'" in text and "zerojax.attention in place of" in text

    with_scale = lambda model, batch: jnp.mean(zerojax.attention(*heads(4, 4), scale=1.0, implementation=jnp.add))
    assert "gets queries, keys and values only" in message(trace, CONFIG, with_scale)

    images = lambda params, batch: jnp.mean((batch["x"] @ params["w"]) ** 2)
    state = zero.eval_init({"w": np.ones((8, 8), np.float32)}, optax.sgd(0.1))
    text = message(zero.train_step(images).trace, state, {"x": np.ones((8, 8), np.float32)})
    assert "none whose dim 1 has the tokens" in text


def test_what_does_not_go_with_context():
    mesh = zerojax.make_mesh(context=2, replica=2)
    assert not Zero(mesh, 3).config.axes.outer
    assert "axis 'context'" in message(Zero, mesh, 3, outer_sharding="optimizer")
    assert "'context' split no batch" in message(Zero, zerojax.make_mesh(context=2), 3, offload="optimizer")
    assert "context 3" in message(zerojax.make_mesh, context=3)
    assert "'context' and 'model' at once" in message(Zero, zerojax.make_mesh(context=2, model=2))
    assert Zero(mesh, 3, shard_axes=("data", "context")).config.axes.num_context == 1  # as any other data axis


@dataclasses.dataclass(frozen=True)
class Device:
    id: int
    process_index: int
    platform: str = "gpu"


def mesh_of(per_process, shape):
    devices = [Device(k, k // per_process) for k in range(np.prod(shape))]
    return Mesh(np.array(devices).reshape(shape), ("data", "context"))


@pytest.mark.parametrize(
    ("per_process", "shape", "groups"),
    [(1, (2, 4), (0, 0, 0, 0, 1, 1, 1, 1)), (2, (2, 4), (0, 0, 1, 1)), (4, (4, 2), (0, 1)), (8, (2, 4), (0,))],
)
def test_processes_along_context_pass_the_same_rows(per_process, shape, groups):
    assert row_groups(mesh_of(per_process, shape), ("data",), 8 // per_process) == groups


def test_processes_that_share_some_of_their_rows():
    text = message(row_groups, mesh_of(3, (3, 2)), ("data",), 2)
    assert "share some of the rows" in text
