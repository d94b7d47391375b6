"""Weights and gradients that are sent in 8 bits: `Precision(gather=..., scatter=...)`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax import Precision, Zero
from zerojax.analysis import jaxpr_counts
from zerojax.analysis.expectation import SentBytes, over_data_axes
from zerojax.analysis.findings import Verdict
from zerojax.comm import blocks

WIDTH, HIDDEN, LAYERS = 64, 256, 4
rng = np.random.default_rng(0)
BATCH = {"t": rng.integers(0, 301, (32, 6)), "y": rng.normal(size=(32, 9)).astype(np.float32)}
LARGE = ["layers/w", "layers/v", "head"]  # what is sent in 8 bits


def create(key):
    keys = jax.random.split(key, 3)
    normal = lambda key, *shape: jax.random.normal(key, shape) / 8
    layer = lambda key: {"w": normal(key, WIDTH, HIDDEN), "b": jnp.zeros(HIDDEN), "v": normal(key, HIDDEN, WIDTH)}
    ends = {"table": normal(keys[1], 301, WIDTH), "head": normal(keys[2], WIDTH, 1024)}
    return {"layers": jax.vmap(layer)(jax.random.split(keys[0], LAYERS)), "gate": normal(keys[2], 9, 3), **ends}


def loss(params, batch, sent=lambda name, w: w):
    layer = lambda h, p: (h + jnp.tanh(h @ sent("w", p["w"]) + p["b"]) @ sent("v", p["v"]), None)
    h, _ = jax.lax.scan(layer, params["table"][batch["t"]].mean(1), params["layers"])
    logits = (h @ sent("head", params["head"]))[:, :9]
    return jnp.mean((logits - batch["y"]) ** 2) + jnp.mean((logits @ params["gate"]) ** 2)


def zero_of(stage=3, n=8, replica=1, outer="none", model=1, options=None, **wire):
    mesh = zerojax.make_mesh(devices=jax.devices()[:n], replica=replica, **({"model": model} if model > 1 else {}))
    return Zero(mesh, stage, Precision(**wire), outer_sharding=outer, **(options or {}))


def optimizer():
    return optax.adamw(1e-3, eps=1e-4)


def trained(zero, steps=3, **settings):
    state, found = zero.init(create, optimizer()), []
    step = zero.train_step(loss, audit="error", **settings)
    for _ in range(steps):
        state, metrics = step(state, BATCH)
        found.append(float(metrics["loss"]))
    return np.array(found), state


def rounded(dtype, dims=None):
    """Weights as they are gathered; their gradients are those of exact weights. Blocks run along dim 1 or `dims`."""

    def send(name, w):
        dim = (dims or {}).get(name, 1)
        value = blocks.decode(blocks.encode(w[None], dtype, dim), dtype, dim, w, w.dtype)[0]
        return w + jax.lax.stop_gradient(value - w)

    return send


@functools.cache
def plain(dtype, steps=3):
    """The losses of one device that rounds weights before it uses them, without zerojax."""
    params, tx = create(jax.random.key(0)), optimizer()
    gradient = jax.jit(jax.value_and_grad(functools.partial(loss, sent=rounded(dtype) if dtype else lambda name, w: w)))
    opt_state, found = tx.init(params), []
    for _ in range(steps):
        value, grads = gradient(params, BATCH)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        found.append(float(value))
    return np.array(found)


CASES = [("int8", {}, {}), ("float8_e4m3fn", {"n": 2}, {"num_microbatches": 2, "remat": "full"})]
MORE = [
    ("int8", {"replica": 2, "outer": "optimizer"}, {"num_microbatches": 2}),
    ("int8", {"options": {"offload": "params"}}, {}),
    ("int8", {"model": 2, "options": {"partition_specs": {"layers/w": P(None, None, "model")}}}, {}),
    ("int8", {}, {"bucket_bytes": 2**12, "prefetch": 0}),
    ("float8_e4m3fn", {}, {"layers": "list", "prefetch": 2}),
]


@pytest.mark.parametrize(
    ("dtype", "options", "settings"), [*CASES, *(pytest.param(*each, marks=pytest.mark.full) for each in MORE)]
)
def test_weights_are_rounded_as_on_one_device(dtype, options, settings):
    """In fp32 only the order of sums differs, on any number of devices. Exact weights have other losses."""
    got, state = trained(zero_of(gather=dtype, **options), **settings)
    np.testing.assert_allclose(got, plain(dtype), rtol=1e-5)
    assert np.all(np.abs(plain(dtype) / plain(None) - 1) > 1e-4)
    kept = [leaf.path for leaf in state.layout.leaves if leaf.wire.gather is None]
    assert not set(kept) & set(LARGE)


def test_leaves_with_zeros_at_the_end_are_rounded_as_without():
    """On three devices; and so in a step that evaluates."""
    zero, batch = zero_of(n=3, gather="int8"), jax.tree.map(lambda a: a[:30], BATCH)
    state = zero.init(create, optimizer())
    assert state.params["layers"]["w"].shape[2] > HIDDEN
    dims = {leaf.path.rpartition("/")[2]: leaf.of_layer().wire.blocks for leaf in state.layout.leaves}
    assert dims["w"] == 0  # a part of dim 1 has no whole blocks
    want = jax.jit(functools.partial(loss, sent=rounded("int8", dims)))(create(jax.random.key(0)), batch)
    assert float(zero.eval_step(loss)(state, batch)["loss"]) == pytest.approx(float(want), rel=1e-5)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "bfloat16"])
@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_are_the_sums_of_rounded_parts(dtype, stage):
    """Each device sends a part of its own gradient to each device, in which blocks do not cross parts."""
    zero = zero_of(stage, n=4, scatter=dtype, options={"stacked": "layers/*"})
    params = zero.shard(create(jax.random.key(0)))
    _, grads = jax.jit(zero.value_and_grad(loss))(params, BATCH)
    of_device = [jax.tree.map(lambda a, d=d: a[8 * d : 8 * d + 8], BATCH) for d in range(4)]
    own = [jax.grad(lambda p, b: loss(p, b) / 4)(create(jax.random.key(0)), batch) for batch in of_device]
    leaves = {leaf.path: leaf for leaf in zero.eval_init(create, optimizer()).layout.leaves}
    for path in ("layers/w", "layers/v", "head", "layers/b"):
        get = lambda tree, path=path: functools.reduce(lambda t, key: t[key], path.split("/"), tree)
        leaf, total = leaves[path], 0
        for each in own:
            parts = jnp.stack(jnp.split(get(each), 4, axis=leaf.dim))
            if leaf.wire.scatter is not None:
                sent = blocks.encode(parts, dtype, leaf.wire.blocks)
                parts = blocks.decode(sent, dtype, leaf.wire.blocks, parts[0], jnp.float32)
            total = total + jnp.concatenate(list(parts), axis=leaf.dim)
        exact = sum(get(each) for each in own)
        bound = 1e-6 + 1e-3 * np.abs(exact).max()  # one code of a few elements, which are between two
        difference = np.abs(np.asarray(get(grads)) - np.asarray(total))
        assert difference.max() <= bound and np.mean(difference > 1e-6) < 0.01
        assert (leaf.wire.scatter is None) == (path == "layers/b" and dtype != "bfloat16")
        if leaf.wire.scatter is not None:
            assert np.abs(np.asarray(get(grads)) - exact).max() > 1e-5 * np.abs(exact).max()


def test_what_stays_as_it_is():
    """Norms, biases, tables of rows, small leaves and those that dtypes= names."""
    wires = lambda zero: {leaf.path: leaf.wire for leaf in zero.eval_init(create, optimizer()).layout.leaves}
    found = wires(zero_of(gather="int8", scatter="int8"))
    assert sorted(path for path, wire in found.items() if wire.gather) == sorted(LARGE)
    assert {path for path, wire in found.items() if wire.scatter} == set(LARGE)
    assert found["layers/w"].blocks == 2
    named = wires(zero_of(gather="int8", options={"dtypes": {"head": "float32"}, "frozen": "layers/v"}, scatter="int8"))
    assert sorted(path for path, wire in named.items() if wire.gather) == ["layers/v", "layers/w"]
    assert [path for path, wire in named.items() if wire.scatter] == ["layers/w"]


def test_a_step_that_is_not_finite_is_skipped():
    zero = zero_of(n=2, gather="int8", scatter="int8", initial_scale=1.0)
    state = zero.init(create, optimizer())
    y = np.where(np.arange(len(BATCH["y"]))[:, None] == 3, np.inf, BATCH["y"])
    state, metrics = zero.train_step(loss)(state, BATCH | {"y": y.astype(np.float32)})
    assert metrics["skipped"] == 1 and all(np.isfinite(a).all() for a in jax.tree.leaves(state.params))


def sent(zero, **settings):
    """(bytes by kind of collective, those by formula) of the traced step."""
    state, step = zero.eval_init(create, optimizer()), zero.train_step(loss, **settings)
    found = jaxpr_counts.traced_collectives(step.trace(state, BATCH).jaxpr, zero.config.mesh)
    return SentBytes.of(over_data_axes(found, zero.config)), step.expectation(state, BATCH)


def test_a_step_sends_the_bytes_of_the_formula():
    """A weight of fp32 takes (1 + 4/128) of 4 bytes if a block is whole."""
    for options in {}, {"replica": 2, "outer": "optimizer"}:
        exact, narrow = (sent(zero_of(**options, **wire))[0] for wire in ({}, {"gather": "int8", "scatter": "int8"}))
        found, expectation = sent(zero_of(**options, gather="int8", scatter="int8"), num_microbatches=1)
        assert found.total == pytest.approx(expectation.most.total, rel=0.1)  # the backward pass gathers no biases
        assert found.exchanged == pytest.approx(expectation.most.exchanged)
        assert narrow.total < 0.45 * exact.total


def test_an_audit_finds_wider_dtypes_and_missing_sums():
    zeros = {name: zero_of(gather=wire, scatter=wire) for name, wire in (("8 bits", "int8"), ("exact", None))}
    zeros["gather alone"] = zero_of(gather="int8")
    state = {name: zero.eval_init(create, optimizer()) for name, zero in zeros.items()}
    steps = {name: zero.train_step(loss) for name, zero in zeros.items()}
    expected = steps["8 bits"].expectation(state["8 bits"], BATCH)
    audit = lambda name: zerojax.audit_step(steps[name].trace(state[name], BATCH), expected)
    assert audit("8 bits").ok
    for name, broken in ("exact", ["wire bytes", "wire dtype", "reductions"]), ("gather alone", ["reductions"]):
        found = audit(name)
        assert all(found[each].verdict is Verdict.BROKEN for each in broken), found


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"precision: unknown gather 'int4'\n  fix: .*'int8', 'float8_e4m3fn' or None"):
        Precision(gather="int4")
    with pytest.raises(ValueError, match=r"stage 2 .* gathers no weights in a step\n  got: .*\n  fix:      stage=3"):
        zero_of(2, gather="int8")
    with pytest.raises(ValueError, match=r"reduce-scatters no gradients"):
        zero_of(0, scatter="bfloat16")
    assert "int8" in str(Precision(gather="int8")) and "gather='int8'" in repr(zero_of(gather="int8"))
    assert dataclasses.replace(Precision.of("bf16"), gather="int8").title == "precision 'bf16', gather='int8'"
