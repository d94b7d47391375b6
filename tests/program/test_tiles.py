"""Losses in tiles of tokens: the same numbers, and arrays of all tokens by the vocabulary never exist."""

import collections
import functools

import chex
import gpt
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import zoo
from support.parity import assert_close, batches, train

import zerojax
from zerojax import Weighted, Zero
from zerojax.analysis import step as analysis_step
from zerojax.program import jaxprs
from zerojax.program.tiles import Tiling, tile
from zerojax.step import gradient

VOCAB, WIDTH, SEQ = 67, 8, 14
TILE = 2  # 13 tokens are predicted: a loop of six tiles, and one of the last token


def params(dtype=jnp.float32):
    normal = lambda k, *shape: (0.3 * jax.random.normal(jax.random.key(k), shape)).astype(dtype)
    return {
        "embed": normal(0, VOCAB, WIDTH),
        "up": normal(1, WIDTH, 5 * WIDTH),
        "down": normal(2, 5 * WIDTH, WIDTH),
        "qkv": normal(3, WIDTH, 3 * WIDTH),
        "head": normal(4, WIDTH, VOCAB),
    }


TOKENS = np.random.default_rng(0).integers(0, VOCAB, (8, SEQ))


def hidden(p, tokens):
    x = p["embed"][tokens]
    q, k, v = jnp.split(x @ p["qkv"], 3, -1)
    scores = jnp.einsum("bqd,bkd->bqk", q, k)
    x = x + jax.nn.softmax(jnp.where(jnp.tril(jnp.ones(scores.shape[1:], bool)), scores, -1e9)) @ v
    return x + jax.nn.relu(x @ p["up"]) @ p["down"]


def logits_of(p, tokens):
    return (hidden(p, tokens) @ p["head"]).astype(jnp.float32)


def of_labels(p, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(logits_of(p, tokens[:, :-1]), tokens[:, 1:]).mean()


def of_sliced_logits(p, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(logits_of(p, tokens)[:, :-1], tokens[:, 1:]).mean()


def of_one_hot(p, tokens):
    log_p = jax.nn.log_softmax(logits_of(p, tokens)[:, :-1])
    mask = (tokens[:, 1:] > 5)[..., None]
    return -(log_p * jax.nn.one_hot(tokens[:, 1:], VOCAB) * mask).sum() / 40


def with_metrics(p, tokens):
    logits = jnp.tanh(logits_of(p, tokens[:, :-1]) / 5) * 5
    labels = optax.smooth_labels(jax.nn.one_hot(tokens[:, 1:], VOCAB), 0.1)
    z_loss = 1e-2 * jnp.mean(jax.nn.logsumexp(logits, -1) ** 2)
    accuracy = jnp.mean(jnp.argmax(logits, -1) == tokens[:, 1:])
    return optax.softmax_cross_entropy(logits, labels).mean() + z_loss, {"accuracy": accuracy}


def of_tokens(p, tokens):
    """Weighted by tokens, and through a `custom_vjp` that knows nothing of tiles."""

    @jax.custom_vjp
    def doubled(x):
        return 2 * x

    doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))
    losses = optax.softmax_cross_entropy_with_integer_labels(doubled(logits_of(p, tokens[:, :-1])), tokens[:, 1:])
    mask = tokens[:, 1:] > 20
    return Weighted(jnp.sum(losses * mask), mask.sum())


LOSSES = {fn.__name__: fn for fn in (of_labels, of_sliced_logits, of_one_hot, with_metrics, of_tokens)}


@functools.cache
def run(name, tiles, stage=3, num_devices=2, precision="fp32", **settings):
    """(Metrics of some steps, the parameters after them)."""
    zero = Zero(zerojax.make_mesh(devices=jax.devices()[:num_devices]), stage, precision)
    state, step = zero.init(params, optax.adamw(1e-2, eps=1e-3)), zero.train_step(LOSSES[name], tiles=tiles, **settings)
    metrics = []
    for _ in range(3):
        state, row = step(state, TOKENS)
        metrics.append({key: float(value) for key, value in row.items()})
    return metrics, state.logical().params, zero.eval_step(LOSSES[name], tiles=tiles)(state, TOKENS)


def widest(loss, tiles):
    """The largest dims of the arrays in a step of one device that have a dim of the vocabulary, and are no weights."""
    zero = Zero(zerojax.make_mesh(devices=jax.devices()[:2]), 3)
    traced = zero.train_step(loss, tiles=tiles, remat="full").trace(zero.eval_init(params, optax.sgd(0.1)), TOKENS)
    shapes = {getattr(v.aval, "shape", ()) for e in jaxprs.walk(traced.jaxpr.eqns) for v in e.outvars}
    return max((n for shape in shapes if len(shape) > 2 and VOCAB in shape for n in shape[1:-1]), default=0)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_the_same_in_tiles_and_its_logits_do_not_exist(name):
    got, want = run(name, TILE), run(name, "none")
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-6)
    assert widest(LOSSES[name], "none") >= SEQ - 1 and widest(LOSSES[name], TILE) <= TILE


@pytest.mark.parametrize("name", LOSSES)
def test_the_head_is_multiplied_as_often_as_without_tiles(name):
    """If the loss is one sum: its gradients are computed with it. That of several is computed again."""
    zero = Zero(zerojax.make_mesh(devices=jax.devices()[:2]), 3)
    state = zero.eval_init(params, optax.sgd(0.1))
    counts = []
    for tiles in ("none", TILE):
        traced = zero.train_step(LOSSES[name], tiles=tiles).trace(state, TOKENS[:, :13])
        products = [e for e in jaxprs.walk(traced.jaxpr.eqns) if e.primitive.name == "dot_general"]
        counts.append(sum(any(VOCAB in a.aval.shape for a in (*e.invars, *e.outvars)) for e in products))
    assert counts == [3, 4 if name == "with_metrics" else 3]


@pytest.mark.parametrize(
    ("stage", "num_devices", "precision", "settings"),
    [
        (0, 2, "fp32", {}),
        (2, 4, "fp32", {"num_microbatches": 2, "remat": "dots"}),
        (3, 1, "fp32", {"remat": "full", "clip_norm": 0.1}),
        pytest.param(1, 2, "fp32", {"remat": "full"}, marks=pytest.mark.full),
        pytest.param(3, 8, "fp32", {"prefetch": 0}, marks=pytest.mark.full),
    ],
)
def test_tiles_work_with_other_settings(stage, num_devices, precision, settings):
    args = "of_sliced_logits", stage, num_devices, precision
    got, want = (run(args[0], tiles, *args[1:], **settings) for tiles in (4, "none"))  # without a loop
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-6)


GPT = gpt.Config(width=16, layers=4, heads=2, vocab=68, seq=12, annotated=True)


def gpt_losses(tiles, offload="none", model=1, **settings):
    """The losses of a GPT in a list of layers, on four devices."""
    zero = Zero(zerojax.make_mesh(devices=jax.devices()[:4], model=model), 3, offload=offload)
    state, step = (
        zero.init(gpt.create(GPT), optax.adamw(1e-2, eps=1e-3)),
        zero.train_step(gpt.loss, tiles=tiles, **settings),
    )
    assert bool(step.tiled(state, {"tokens": TOKENS[:, :13]})) == (tiles != "none")
    losses = []
    for _ in range(3):
        state, metrics = step(state, {"tokens": TOKENS[:, :13]})
        losses.append(float(metrics["loss"]))
    return losses


@pytest.mark.parametrize(
    "settings",
    [
        {"model": 2},
        *(
            pytest.param(each, marks=pytest.mark.full)
            for each in (
                {"layers": "loop"},
                {"offload": "optimizer"},
                {"offload": "params"},
                {"remat": zerojax.Remat(offload_inputs=True)},
                {"model": 2, "remat": zerojax.Remat(partition_inputs=True)},
                {"num_microbatches": 2, "bucket_bytes": 4096},
            )
        ),
    ],
    ids=str,
)
def test_tiles_work_with_what_moves_layers(settings):
    assert gpt_losses(2, **settings) == pytest.approx(gpt_losses("none", **settings), rel=1e-6)


def test_narrow_dtypes_round_no_more_in_tiles():
    """Gradients of weights are summed in fp32 over tiles: they are as near to those in fp32 as without tiles."""
    exact = jax.tree.leaves(run("of_labels", "none")[1])
    for precision in ("bf16", "fp16"):
        found = [jax.tree.leaves(run("of_labels", tiles, 3, 2, precision)[1]) for tiles in (TILE, "none")]
        errors = [sum(float(np.abs(a - b).sum()) for a, b in zip(each, exact, strict=True)) for each in found]
        assert errors[0] < 1.2 * errors[1]


# What is a region


def regions(loss, weights, *data, size=2):
    """{Shape of the widest value of a region of `loss(weights, *data)`: how often}."""
    leaves, tree = jax.tree.flatten(weights)
    flat = lambda *args: loss(jax.tree.unflatten(tree, args[: len(leaves)]), *args[len(leaves) :])
    closed, _ = jaxprs.traced(flat, *leaves, *data)
    variables = closed.jaxpr.invars[: len(leaves)]
    return dict(collections.Counter(each.shape for each in tile(closed, variables, variables, Tiling(size))[1]))


ZOO = {  # {widest value of a region, of all rows: how often}
    "gpt_linen_scan": {(16, 8, 64): 2},
    "gpt_nnx_scan_remat": {(16, 8, 64): 2},
    "moe": {(16, 8, 8, 32): 1, (16, 8, 64): 1},
}


@pytest.mark.parametrize("name", [*ZOO, *(pytest.param(each, marks=pytest.mark.full) for each in {*zoo.ZOO} - {*ZOO})])
def test_models_of_the_zoo_train_alike_in_tiles(name, monkeypatch):
    found = []

    def spy(*args):
        closed, tiled = tile(*args)
        found[:] = tiled
        return closed, tiled

    monkeypatch.setattr(gradient, "tile", spy)
    data = batches(zoo.ZOO[name], 3)
    got, want = (train(Zero(zerojax.make_mesh(), 3), zoo.ZOO[name], data, tiles=t)[0] for t in (1, "none"))
    assert_close(got, want)
    shapes = collections.Counter(each.shape[1:] for each in found)
    assert name not in ZOO or shapes == {shape[1:]: n for shape, n in ZOO[name].items()}


def test_what_mixes_tokens_ends_a_region():
    wide = (8, SEQ, 5 * WIDTH)
    square = lambda p, x, mix: jnp.mean(mix(jnp.square(x @ p["up"])) @ p["down"])
    mixes = {
        "before": (lambda x: jnp.cumsum(x, 1), lambda h: h, {wide: 1}),
        "tokens of a row": (lambda x: x, lambda h: jnp.cumsum(h, 1), {wide: 1}),  # along rows
        "all tokens": (lambda x: x, lambda h: h / jnp.std(h, (0, 1)), {}),
    }
    for before, inside, found in mixes.values():
        assert regions(lambda p, t, f=before, g=inside: square(p, f(p["embed"][t]), g), params(), TOKENS) == found


def test_gradients_are_held_for_the_last_loss_only():
    """Those of others would be held until the backward pass comes to them: their heads are multiplied again."""

    def two_losses(p, tokens):
        x, labels = p["embed"][tokens[:, :-1]], tokens[:, 1:]
        of = lambda x: optax.softmax_cross_entropy_with_integer_labels(x @ p["head"], labels).mean()
        return of(x) + of(jnp.cumsum(x, 1))

    zero = Zero(zerojax.make_mesh(devices=jax.devices()[:2]), 3)
    traced = zero.train_step(two_losses, tiles=TILE).trace(zero.eval_init(params, optax.sgd(0.1)), TOKENS[:, :13])
    products = [e for e in jaxprs.walk(traced.jaxpr.eqns) if e.primitive.name == "dot_general"]
    assert len(products) == 4 + 3


def test_a_projection_to_several_narrow_values_is_no_region():
    split = lambda p, t: [jnp.cumsum(a, 1) for a in jnp.split(p["embed"][t] @ p["qkv"], 3, -1)]
    assert regions(lambda p, t: jnp.mean(jnp.stack(split(p, t))), params(), TOKENS) == {}


def test_attention_that_is_not_fused_runs_by_queries():
    long = np.zeros((1, 64), np.int32)
    assert regions(lambda p, t: jnp.mean(hidden(p, t)), params(), long) == {(1, 64, 64): 1, (1, 64, 5 * WIDTH): 1}


def test_a_step_of_your_own_has_tiles_too():
    zero = Zero(zerojax.make_mesh(devices=jax.devices()[:2]), 3)
    placed = zero.shard(params())
    of = lambda tiles: jax.jit(zero.value_and_grad(of_sliced_logits, tiles=tiles))(placed, TOKENS)
    chex.assert_trees_all_close(of(TILE), of("none"), rtol=1e-5, atol=1e-6)


def test_unknown_tiles_are_refused():
    zero = Zero(zerojax.make_mesh(), 3)
    for unknown in ("all", 0, 2.5, True):
        with pytest.raises(ValueError, match=f"unknown tiles {unknown!r}"):
            zero.train_step(of_labels, tiles=unknown)


def test_tiles_are_chosen_by_memory(monkeypatch):
    """The first batch decides. On CPU devices, whose memory is not known, there are none."""
    zero = Zero(zerojax.make_mesh(devices=jax.devices()[:2]), 3)
    state = zero.eval_init(params, optax.sgd(0.1))
    needed = zero.train_step(of_labels).memory(state, TOKENS).peak_bytes
    for memory, are_tiled in ((None, False), (2 * needed, False), (needed, True)):
        monkeypatch.setattr(analysis_step, "device_memory", lambda _, memory=memory: memory)
        step = zero.train_step(of_labels, tiles="auto")
        assert bool(step.tiled(state, TOKENS)) == are_tiled == (step.settings.tiling is not None)


def test_frozen_weights_have_no_sums():
    zero = Zero(zerojax.make_mesh(devices=jax.devices()[:2]), 3, trainable=lambda path, _: path != "head")
    state = zero.eval_init(params, optax.sgd(0.1))
    traced = zero.train_step(of_labels, tiles=TILE).trace(state, TOKENS)
    loops = [jaxprs.scan_params(e) for e in jaxprs.walk(traced.jaxpr.eqns) if jaxprs.is_scan(e)]
    carried = {v.aval.shape for scan in loops for v in scan.body.jaxpr.outvars[: scan.num_carry]}
    assert (WIDTH, 5 * WIDTH) in carried and (WIDTH, VOCAB) not in carried


# Random networks


def random_loss(seed):
    """A loss of a random sequence of operations, some of which mix tokens, rows or features."""
    rng = np.random.default_rng(seed)
    p = {f"w{k}": jnp.asarray(rng.normal(size=(6, 24)) / 4, jnp.float32) for k in range(4)}
    p |= {f"v{k}": jnp.asarray(rng.normal(size=(24, 6)) / 6, jnp.float32) for k in range(4)}
    wide = [
        jax.nn.gelu, jnp.sin, lambda h: h * jax.nn.softmax(h), lambda h: h - h.mean(1, keepdims=True),
        lambda h: jnp.cumsum(h, 1) / 9, lambda h: h.reshape(h.shape[0], -1, 24), lambda h: h[:, ::-1],
        lambda h: jnp.concatenate([h[:, 1:], h[:, :1]], 1), lambda h: jnp.sort(h, -1),
        lambda h: h / (1 + jnp.sum(h * h)),
        lambda h: jax.nn.relu(h.swapaxes(0, 1)).swapaxes(0, 1), lambda h: h * (jnp.arange(h.shape[1]) % 3)[:, None],
        lambda h: jnp.where(h > h.max(-1, keepdims=True) - 1, h, 0.0), lambda h: h.reshape(-1, 24).reshape(h.shape),
    ]  # fmt: skip
    chosen = [[wide[k] for k in rng.integers(0, len(wide), rng.integers(1, 4))] for _ in range(4)]

    def loss(p, x):
        total = 0.0
        for k, functions in enumerate(chosen):
            h = x @ p[f"w{k}"]
            for fn in functions:
                h = fn(h)
            x = x + h @ p[f"v{k}"]
            total = total + jnp.sum(jnp.square(h)) / h.size
        return total + jnp.mean(x[:, 1:] * x[:, :-1])

    return loss, p, jnp.asarray(rng.normal(size=(2, 7, 6)), jnp.float32)


REGIONS_OF_SEEDS = {}


@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(k, marks=pytest.mark.full) for k in range(12, 100))])
def test_random_networks_are_the_same_in_tiles(seed):
    loss, p, x = random_loss(seed)
    leaves, tree = jax.tree.flatten(p)
    flat = lambda *args: loss(jax.tree.unflatten(tree, args[:-1]), args[-1])
    closed, _ = jaxprs.traced(flat, *leaves, x)
    tiled, found = tile(closed, closed.jaxpr.invars[:-1], closed.jaxpr.invars, Tiling(3))
    of = lambda closed: jax.jit(jax.value_and_grad(lambda *args: jaxprs.run(closed, *args)[0], range(len(leaves) + 1)))
    got, want = of(tiled)(*leaves, x), of(closed)(*leaves, x)
    chex.assert_trees_all_close(got, want, rtol=2e-5, atol=2e-5)
    assert len(found) == REGIONS_OF_SEEDS.get(seed, len(found))
