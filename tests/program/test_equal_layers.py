"""Equal layers that run as a loop or as a list, whichever the model has: `train_step(layers=)`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from zerojax import Zero
from zerojax.program import jaxprs
from zerojax.program.equal_layers import with_loops
from zerojax.program.segmentation import cut_into_segments

LAYERS, WIDTH = 7, 12  # of four devices, three hold zeros at the end of a shard
BATCH = {"x": np.random.default_rng(0).normal(size=(8, WIDTH)).astype(np.float32)}


def create(key, num_layers=LAYERS):
    keys = jax.random.split(key, num_layers + 2)
    normal = lambda key, *shape: jax.random.normal(key, shape) / 4
    layers = [{"w": normal(k, WIDTH, WIDTH), "b": jnp.zeros(WIDTH), "v": normal(k, WIDTH, 3)} for k in keys[2:]]
    return {"first": normal(keys[0], WIDTH, WIDTH), "head": normal(keys[1], WIDTH, 3), "layers": layers}


def plain(h, p, i, first, key):
    return h + jnp.tanh(h @ p["w"] + p["b"])


def with_input(h, p, i, first, key):
    """Each layer also reads what the first one reads: carried by the first, and shared by all."""
    return jnp.tanh(h @ p["w"] + p["b"]) + first


def with_number(h, p, i, first, key):
    return h + jnp.tanh(h @ p["w"] + p["b"]) / (i + 1)


def with_dropout(h, p, i, first, key):
    kept = jax.random.bernoulli(jax.random.fold_in(key, i), 0.8, h.shape)
    return h + jnp.where(kept, jnp.tanh(h @ p["w"] + p["b"]), 0)


def with_transposition(h, p, i, first, key):
    return h + jnp.tanh(h @ p["w"].T + p["b"])


@jax.custom_vjp
def scaled(x):
    return jnp.sin(x)


scaled.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (2 * g * jnp.cos(x),))


def with_rule(h, p, i, first, key):
    return h + scaled(h @ p["w"] + p["b"])


def loss_of(layer, params, batch, key, aux=False):
    h = first = batch["x"] @ params["first"]
    mean, metrics = jnp.float32(0), {}
    for i, p in enumerate(params["layers"]):
        h = layer(h, p, i, first, key)
        if aux:  # results of every layer: one is summed, one is returned
            mean += jnp.mean(jnp.square(h @ p["v"]))
            metrics[f"mean {i}"] = jnp.mean(h)
    return jnp.mean(jnp.square(h @ params["head"])) + mean, metrics


def with_own_and_shared(params, batch, key):
    """Each layer reads a key and a value of its own, and a weight that all have in common."""
    h, keys = batch["x"] @ params["first"], list(jax.random.split(key, LAYERS))
    scales = [jnp.mean(jnp.square(h), axis=1, keepdims=True) * i for i in range(LAYERS)]
    for p, key, scale in zip(params["layers"], keys, scales, strict=True):
        kept = jax.random.bernoulli(key, 0.8, h.shape)
        h = h + jnp.where(kept, jnp.tanh(h @ p["w"] + p["b"] + scale), 0) @ params["first"]
    return jnp.mean(jnp.square(h @ params["head"])), {}


LOSSES = {
    each.__name__: functools.partial(loss_of, each)
    for each in (plain, with_input, with_number, with_dropout, with_transposition, with_rule)
} | {"aux": functools.partial(loss_of, plain, aux=True), "own and shared": with_own_and_shared}


def trained(loss, layers, stage=3, steps=3, num_devices=4, replica=1, create=create, **options):
    zero = Zero(zerojax.make_mesh(devices=jax.devices()[:num_devices], replica=replica), stage)
    state = zero.init(create, optax.adamw(1e-2, eps=1e-3))  # so that no rounding error is moved like a gradient
    step = zero.train_step(lambda params, batch, key: loss(params, batch, key), layers=layers, **options)
    found = []
    for _ in range(steps):
        state, metrics = step(state, BATCH)
        found.append({name: float(value) for name, value in metrics.items()})
    jaxpr = step.trace(state, BATCH).jaxpr
    return found, jax.tree.map(np.asarray, state.model()), jaxpr


def num_products(jaxpr):
    return sum(e.primitive.name == "dot_general" for e in jaxprs.walk(jaxpr.eqns))


def assert_same(got, want, tolerance=1e-6):
    for a, b in zip(got[0], want[0], strict=True):
        assert a.keys() == b.keys()
        np.testing.assert_allclose(list(a.values()), list(b.values()), rtol=1e-5, atol=tolerance)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got[1], want[1])


@pytest.mark.parametrize("name", LOSSES)
def test_training_is_that_of_the_list(name):
    """Of seven layers, four are outside of the compiled loop or in its body."""
    got, want = (trained(LOSSES[name], layers) for layers in ("loop", None))
    assert_same(got, want)
    assert num_products(got[2]) < num_products(want[2])


SETTINGS = [{"num_microbatches": 2}, {"remat": "full", "clip_norm": 0.1}, {"stage": 1}, {"replica": 2}]
OTHERS = [{"stage": 2}, {"num_devices": 1}, {"prefetch": 0}, {"prefetch": 2, "remat": "dots"}]


@pytest.mark.parametrize(
    "options", [*SETTINGS, *(pytest.param(each, marks=pytest.mark.full) for each in OTHERS)], ids=str
)
def test_every_kind_of_step_trains_as_the_list(options):
    """And communicates as its expectation says."""
    got, want = (trained(LOSSES["with_input"], layers, audit="error", **options) for layers in ("loop", None))
    assert_same(got, want)


SCANNED = 10


def create_scanned(key):
    layers = jax.vmap(lambda key: create(key, 1)["layers"][0])(jax.random.split(key, SCANNED))
    return create(key, 0) | {"layers": layers}


def scanned(params, batch, key):
    """Each layer carries a value, and returns one; it reads a key, and a weight that all share."""

    def layer(h, p_and_key):
        p, key = p_and_key
        kept = jax.random.bernoulli(key, 0.8, h.shape)
        h = h + jnp.where(kept, jnp.tanh(h @ p["w"] + p["b"]), 0) @ params["first"]
        return h, jnp.mean(jnp.square(h @ p["v"]))

    h, means = jax.lax.scan(layer, batch["x"] @ params["first"], (params["layers"], jax.random.split(key, SCANNED)))
    return jnp.mean(jnp.square(h @ params["head"])) + jnp.mean(means), {"mean": means[2]}


def in_loops(jaxpr):
    """The lengths of the loops that compute matrix products."""
    loops = [jaxprs.scan_params(e) for e in jaxprs.walk(jaxpr.eqns) if jaxprs.is_scan(e)]
    return [loop.length for loop in loops if num_products(loop.body.jaxpr)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_devices": 1, "remat": "full"},
        *(pytest.param(each, marks=pytest.mark.full) for each in [*SETTINGS, *OTHERS, {"num_devices": 1}]),
    ],
    ids=str,
)
def test_a_scan_runs_with_any_number_of_layers_in_an_iteration(options):
    """'list' has no loop. Of ten layers, six are in a loop of three in an iteration."""
    run = functools.partial(trained, scanned, create=create_scanned, audit="error", **options)
    want, over_microbatches = run(None), [2] if "num_microbatches" in options else []
    for layers, over_layers in ("list", []), (3, [2, 2]):
        got = run(layers)
        assert_same(got, want)
        assert in_loops(got[2]) == over_microbatches + over_layers


def loops_of(loss, placed=lambda leaf: None, unit_of=None):
    """The numbers of layers of the loops that a loss becomes, and the leaves of their stacks."""
    params = jax.eval_shape(create, jax.random.key(0))
    leaves, tree = jax.tree.flatten(params)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    units = unit_of or [path.rsplit("[", 1)[0] for path in paths]
    flat = lambda *args: loss(jax.tree.unflatten(tree, args[:-2]), *args[-2:])
    closed, _ = jaxprs.traced(flat, *leaves, BATCH, jax.random.key(0))
    rewritten = with_loops(cut_into_segments(closed, units), placed)
    lengths = [jaxprs.scan_params(e).length for e in rewritten.closed.jaxpr.eqns if jaxprs.is_scan(e)]
    return lengths, rewritten.stacks


@pytest.mark.parametrize("name", LOSSES)
def test_all_layers_are_in_the_loop(name):
    lengths, stacks = loops_of(LOSSES[name])
    assert lengths == [LAYERS] and len(stacks) == (3 if name == "aux" else 2)
    assert all(len(set(stack)) == LAYERS for stack in stacks)


def test_layers_that_are_placed_otherwise_split_the_loop():
    middle = {i for i, leaf in enumerate(jax.tree.leaves(number_of_layer())) if leaf == 3}
    lengths, _ = loops_of(LOSSES["plain"], placed=lambda leaf: leaf in middle)
    assert lengths == [3, 3]


def test_layers_of_several_units_are_not_gathered_together():
    params = jax.eval_shape(create, jax.random.key(0))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    assert loops_of(LOSSES["aux"], unit_of=paths) == ([], [])


def number_of_layer():
    """A tree like the parameters, with the number of its layer in place of each leaf."""
    params = jax.eval_shape(create, jax.random.key(0))
    numbered = [jax.tree.map(lambda _, i=i: i, layer) for i, layer in enumerate(params["layers"])]
    return {"first": -1, "head": -1, "layers": numbered}


def unlike(h, p, i, first, key):
    """A function of its own in each layer."""
    rule = jax.custom_vjp(jnp.sin)
    rule.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: ((i + 1) * g * jnp.cos(x),))
    return h + rule(h @ p["w"] + p["b"])


def printing(h, p, i, first, key):
    jax.debug.print("{}", h.sum())
    return h + jnp.tanh(h @ p["w"] + p["b"])


def inside(h, p, i, first, key):
    """A number that a nested jit has inside."""
    return h + jax.jit(lambda x: jnp.tanh(x) * (i + 1.5))(h @ p["w"] + p["b"])


def skipping(params, batch, key):
    """Each layer reads the results of the two before it."""
    before = h = batch["x"] @ params["first"]
    for p in params["layers"]:
        before, h = h, before + jnp.tanh(h @ p["w"] + p["b"])
    return jnp.mean(jnp.square(h @ params["head"])), {}


def shared(params, batch, key):
    """The head reads a weight of the second layer."""
    loss, _ = LOSSES["plain"](params, batch, key)
    return loss + jnp.mean(jnp.square(batch["x"] @ params["layers"][1]["w"])), {}


def filling(h, p, i, first, key):
    """Zeros that compare equal."""
    fill = -0.0 if i % 2 else 0.0
    return h + (h @ p["w"]).at[:, jnp.arange(WIDTH) + 1].get(mode="fill", fill_value=fill) + p["b"]


def symbolic(h, p, i, first, key):
    """Rules that see which zeros are symbolic, where they may differ."""
    rule = jax.custom_vjp(jnp.sin)
    rule.defvjp(lambda x: (jnp.sin(x.value), x.value), lambda x, g: (g * jnp.cos(x),), symbolic_zeros=True)
    return h + rule(h @ p["w"] + p["b"])


@pytest.mark.parametrize("layer", [unlike, printing, inside, filling, symbolic])
def test_what_differs_is_not_equal(layer):
    assert loops_of(functools.partial(loss_of, layer)) == ([], [])


def test_a_value_from_two_layers_before_is_not_carried():
    assert loops_of(skipping) == ([], [])


def test_a_leaf_that_is_also_used_elsewhere_is_in_no_stack():
    _, stacks = loops_of(shared)
    used = {i for i, leaf in enumerate(jax.tree.leaves(number_of_layer())) if leaf == 1}
    assert not used & {leaf for stack in stacks for leaf in stack}


def test_what_cannot_be_a_loop_is_an_error():
    zero = Zero(zerojax.make_mesh(), 3)
    state = zero.init(create, optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"no layers are equal\n  got:.*\n  fix:      layers=None"):
        loss = lambda params, batch, key: loss_of(unlike, params, batch, key)
        zero.train_step(loss, layers="loop")(state, BATCH)
    for unknown in "scan", 0, True, 2.0:
        with pytest.raises(ValueError, match=f"unknown layers {unknown!r}"):
            zero.train_step(LOSSES["plain"], layers=unknown)
    with pytest.raises(ValueError, match="fetches them leaf by leaf"):
        Zero(zerojax.make_mesh(), 3, offload="params").train_step(LOSSES["plain"], layers="loop")
