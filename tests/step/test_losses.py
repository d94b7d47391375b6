"""The chunked loss has the value and gradients of the plain loss, without all logits, and gathers the head once."""

import functools
import math

import flax.linen as nn
import gpt
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import plain, traffic, zoo
from support.parity import assert_close, batches, optimizer, train
from support.walk import equations

import zerojax
from zerojax import Zero, chunked_cross_entropy

WIDTH, VOCAB = 16, 40


def full_cross_entropy(logits_of, hidden, labels, weights):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits_of(hidden).astype(jnp.float32), labels)
    return jnp.sum(weights * losses), jnp.sum(weights)


def arguments(shape=(3, 7), dtype=jnp.float32):
    """(head, hidden, labels, weights). Some weights are 0."""
    keys = jax.random.split(jax.random.key(0), 5)
    kernel = jax.random.normal(keys[0], (WIDTH, VOCAB), dtype)
    head = {"kernel": kernel, "bias": jax.random.normal(keys[1], (VOCAB,), dtype)}
    weights = jax.random.uniform(keys[4], shape)
    weights = jnp.where(weights < 0.3, 0, weights)
    return (
        head,
        jax.random.normal(keys[2], (*shape, WIDTH), dtype),
        jax.random.randint(keys[3], shape, 0, VOCAB),
        weights,
    )


def affine(head):
    return lambda x: x @ head["kernel"] + head["bias"]


def relative_error(got, want):
    """The largest distance between leaves of two trees, relative to the norm of the second leaf."""
    norm = lambda a: np.linalg.norm(np.asarray(a, np.float64))
    distance = lambda a, b: norm(np.asarray(a, np.float64) - np.asarray(b, np.float64)) / norm(b)
    return max(jax.tree.leaves(jax.tree.map(distance, got, want)))


# The sum and its gradients


@pytest.mark.parametrize(("chunk_size", "is_jitted"), [(1, True), (7, False), (20, True), (1000, True)])
def test_sum_and_gradients_are_those_of_all_logits(chunk_size, is_jitted):
    """In fp32, only the order of the sums differs: by a few times 2^-24 = 6e-8."""
    head, hidden, labels, weights = arguments()
    chunked = lambda head, hidden, weights: (
        chunked_cross_entropy(affine(head), hidden, labels, weights=weights, chunk_size=chunk_size).sum
    )
    full = lambda head, hidden, weights: full_cross_entropy(affine(head), hidden, labels, weights)[0]
    grad = lambda fn: jax.value_and_grad(fn, argnums=(0, 1, 2))(head, hidden, weights)
    got = functools.partial(grad, chunked)
    assert relative_error(jax.jit(got)() if is_jitted else got(), grad(full)) <= 1e-6
    assert relative_error(chunked(head, hidden, weights), full(head, hidden, weights)) <= 1e-6  # without a gradient


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4)])
def test_tokens_of_any_shape_count_1(shape):
    head, hidden, labels, _ = arguments(shape)
    got = chunked_cross_entropy(affine(head), hidden, labels, chunk_size=4)
    assert relative_error(tuple(got), full_cross_entropy(affine(head), hidden, labels, jnp.ones(shape))) <= 1e-6


@pytest.mark.parametrize("dtype", [bool, np.int8, jnp.bfloat16])
def test_a_mask_of_any_dtype(dtype):
    head, hidden, labels, weights = arguments((40, 40))
    mask = (weights > 0).astype(dtype)
    got = chunked_cross_entropy(affine(head), hidden, labels, weights=mask, chunk_size=64)
    assert (got.sum.dtype, got.weight.dtype) == (jnp.float32, jnp.float32)
    assert got.weight == np.sum(np.asarray(weights) > 0)
    want, _ = full_cross_entropy(affine(head), hidden, labels, (weights > 0).astype(jnp.float32))
    assert relative_error(got.sum, want) <= 1e-6


def test_bf16_rounds_as_often_as_without_chunks():
    """Compares chunks of one token in bf16 with all logits in fp32.

    Logits, their gradients, products and results are each rounded to 2^-9 of their size. All tokens are equal, so that
    their gradients add up: a sum in bf16 would stop growing after 256 of them.
    """
    head, hidden, labels, _ = arguments((1,), jnp.bfloat16)
    hidden, labels, weights = (jnp.repeat(a, 1024, axis=0) for a in (hidden, labels, jnp.ones(1)))
    wide = lambda tree: jax.tree.map(lambda a: a.astype(jnp.float32), tree)
    chunked = lambda head, hidden: chunked_cross_entropy(affine(head), hidden, labels, chunk_size=1).sum
    full = lambda head, hidden: full_cross_entropy(affine(head), hidden, labels, weights)[0]
    got = jax.grad(chunked, argnums=(0, 1))(head, hidden)
    assert {a.dtype for a in jax.tree.leaves(got)} == {jnp.dtype(jnp.bfloat16)}
    assert relative_error(got, jax.grad(full, argnums=(0, 1))(wide(head), wide(hidden))) <= 4 * 2**-9


def test_the_head_never_sees_a_row_of_zeros():
    """This head returns NaN for zeros, with which chunks could be padded."""
    head, hidden, labels, _ = arguments()
    normalized = lambda head, x: (x / jnp.linalg.norm(x, axis=-1, keepdims=True)) @ head["kernel"]
    loss = lambda head, x: chunked_cross_entropy(functools.partial(normalized, head), x, labels, chunk_size=20).sum
    for value in jax.tree.leaves(jax.value_and_grad(loss, argnums=(0, 1))(head, hidden)):
        assert np.isfinite(value).all()


def test_a_label_outside_the_vocabulary():
    """It is ignored if its weight is 0, and makes the loss NaN otherwise."""
    head, hidden, labels, weights = arguments()
    run = lambda labels: chunked_cross_entropy(affine(head), hidden, labels, weights=weights, chunk_size=4)
    for wrong in -100, -1, VOCAB:
        ignored, counted = jnp.where(weights == 0, wrong, labels), jnp.where(weights > 0, wrong, labels)
        assert run(ignored).sum == run(labels).sum
        assert np.isnan(run(counted).sum)


def test_a_vocabulary_that_fills_the_dtype_of_the_labels():
    labels = np.array([0, 255, 7], np.uint8)
    logits = jax.random.normal(jax.random.key(0), (3, 256))
    want = full_cross_entropy(lambda x: x, logits, labels.astype(np.int32), np.ones(3))
    assert relative_error(tuple(chunked_cross_entropy(lambda x: x, logits, labels)), want) <= 1e-6


def test_all_weights_are_zero():
    head, hidden, labels, weights = arguments()
    loss = lambda hidden: tuple(chunked_cross_entropy(affine(head), hidden, labels, weights=0 * weights))
    value, vjp = jax.vjp(loss, hidden)
    assert value == (0, 0) and not np.any(vjp((jnp.float32(1), jnp.float32(0)))[0])


# Training


MASKED, GPT = zoo.MaskedLM(), zoo.LinenGPT(scan=True, tied=True)


def without(is_head, call):
    """The input of the head in a Linen model whose `__call__` ends with it. The call of the head is skipped."""
    skip = lambda method, args, kwargs, context: args[0] if is_head(context) else method(*args, **kwargs)
    with nn.intercept_methods(skip):
        return call()


def chunked(head, hidden, batch):
    return chunked_cross_entropy(head, hidden, batch["y"], weights=batch["mask"], chunk_size=5)


def full(logits, batch):
    return full_cross_entropy(lambda x: x, logits, batch["y"], batch["mask"])


def masked_chunked(params, batch):
    is_head = lambda context: context.module.name == "Dense_2"
    hidden = without(is_head, lambda: MASKED.apply({"params": params}, batch["x"]))
    return chunked(affine(params["Dense_2"]), hidden, batch)


def tied_chunked(variables, batch):
    hidden = without(lambda context: context.method_name == "attend", lambda: GPT.apply(variables, batch["x"]))
    embed = nn.Embed(zoo.VOCAB, zoo.WIDTH)
    head = lambda x: embed.apply({"params": variables["params"]["Embed_0"]}, x, method="attend")
    return chunked(head, hidden, batch)


def nnx_chunked(model, batch):
    """Replaces the head by the identity during the forward pass."""
    head, model.head = model.head, lambda x: x
    hidden = model(batch["x"])
    model.head = head
    return chunked(head, hidden, batch)


TOKENS_OF_INIT = jnp.zeros((1, zoo.SEQ), jnp.int32)
MODELS = {
    "masked_lm": (
        lambda key: MASKED.init(key, TOKENS_OF_INIT)["params"],
        masked_chunked,
        lambda params, batch: full(MASKED.apply({"params": params}, batch["x"]), batch),
    ),
    "tied_scan": (
        lambda key: GPT.init(key, TOKENS_OF_INIT),
        tied_chunked,
        lambda variables, batch: full(GPT.apply(variables, batch["x"]), batch),
    ),
    "nnx": (lambda rngs: zoo.NNXGPT(rngs, scan=True), nnx_chunked, lambda model, batch: full(model(batch["x"]), batch)),
}
TOLERANCES = {"fp32": {}, "bf16": {"losses": 1e-2, "update": 5e-2, "norms": 2e-2}}  # as in parity.py


def model_of(name, loss):
    return zoo.Model(name, MODELS[name][0], loss, zoo.masked_batch, weighted=True)


@functools.cache
def reference(name, precision, num_microbatches):
    model = model_of(name, MODELS[name][2])
    return plain.run(model, optimizer(), batches(model, 4), precision=precision, num_microbatches=num_microbatches)


@pytest.mark.parametrize(
    ("name", "stage", "k", "precision", "remat"),
    [
        ("masked_lm", 0, 4, "fp32", "none"),
        pytest.param("masked_lm", 0, 1, "fp32", "none", marks=pytest.mark.full),
        pytest.param("masked_lm", 3, 1, "fp32", "none", marks=pytest.mark.full),
        pytest.param("masked_lm", 3, 4, "fp32", "none", marks=pytest.mark.full),
        pytest.param("masked_lm", 3, 4, "bf16", "none", marks=pytest.mark.full),
        ("tied_scan", 3, 4, "fp32", "full"),
        pytest.param("tied_scan", 2, 1, "fp32", "dots", marks=pytest.mark.full),
        ("nnx", 3, 1, "bf16", "none"),
    ],
)
def test_training_follows_the_plain_step_with_all_logits(name, stage, k, precision, remat):
    model = model_of(name, MODELS[name][1])
    zero = Zero(zerojax.make_mesh(), stage, precision)
    got, _ = train(zero, model, batches(model, 4), num_microbatches=k, remat=remat)
    assert_close(got, reference(name, precision, k), **TOLERANCES[precision])


def test_a_head_that_closes_over_data():
    """Integers have no gradient. They must not be closed over when the unit is differentiated in a later trace."""

    def loss(params, batch):
        logits_of = lambda x: (x @ params["head"])[:, batch["order"][0]]
        return chunked_cross_entropy(logits_of, batch["x"] @ params["in"], batch["y"], chunk_size=3)

    rng = np.random.default_rng(0)
    batch = {
        "x": rng.standard_normal((32, WIDTH), np.float32),
        "y": rng.integers(0, 64, 32),
        "order": np.tile(rng.permutation(64), (32, 1)),
    }
    weights = rng.standard_normal((2, WIDTH, 64), np.float32)
    params = {"in": weights[0, :, :WIDTH], "head": weights[1]}

    def plain_loss(params):
        logits = (batch["x"] @ params["in"] @ params["head"])[:, batch["order"][0]]
        return full_cross_entropy(lambda x: x, logits, batch["y"], jnp.ones(32))[0] / 32

    zero = Zero(zerojax.make_mesh(), 3)
    got = jax.jit(zero.value_and_grad(loss))(zero.shard(params), zero.shard_batch(batch))
    assert relative_error(got, jax.value_and_grad(plain_loss)(params)) <= 1e-6


# Memory, computation and communication of the step

CONFIG = gpt.Config(width=32, layers=2, vocab=512, seq=16)
ROWS, CHUNK = 64, 16  # 8 rows of 16 tokens on a device
TOKENS = ROWS // 8 * CONFIG.seq
HEAD = CONFIG.width * CONFIG.vocab


def traced(loss, stage=3, k=1, scan=False, **options):
    config = gpt.Config(**vars(CONFIG) | {"scan": scan})
    zero = Zero(zerojax.make_mesh(), stage)
    state = zero.eval_init(gpt.create(config), optax.sgd(0.1))
    step = zero.train_step(loss, num_microbatches=k, **options)
    return step.trace(state, gpt.batch_aval(config, ROWS * k)).jaxpr.jaxpr


def largest(jaxpr):
    """The size of the largest value with a vocabulary dim, except for values as wide as the head and the embedding."""
    shapes = [v.aval.shape for e in equations(jaxpr) for v in e.outvars]
    return max(math.prod(s) for s in shapes if CONFIG.vocab in s and CONFIG.width not in s)


def products(jaxpr):
    """The number of matrix products with the head. A product in the body of a loop counts once."""
    dots = [e for e in equations(jaxpr) if e.primitive.name == "dot_general"]
    return sum(any(CONFIG.vocab in v.aval.shape for v in (*e.invars, *e.outvars)) for e in dots)


STEPS = pytest.mark.parametrize(
    ("stage", "options"),
    [
        (0, {}),
        (3, {}),
        (3, {"k": 4}),
        (3, {"scan": True}),
        (3, {"remat": "full"}),
        (3, {"remat": "dots", "scan": True}),
        (0, {"remat": "full"}),
    ],
)


@STEPS
def test_the_logits_of_all_tokens_never_exist(stage, options):
    assert largest(traced(gpt.chunked_loss(CHUNK), stage, **options)) == CHUNK * CONFIG.vocab
    assert largest(traced(gpt.loss, stage, **options)) == TOKENS * CONFIG.vocab  # the plain loss has them


@STEPS
def test_products_of_the_head(stage, options):
    """As many as in the plain loss: no setting computes the chunks again."""
    assert products(traced(gpt.chunked_loss(CHUNK), stage, **options)) == 3


def test_without_a_gradient_only_the_logits_are_computed():
    for stage in 0, 3:
        zero = Zero(zerojax.make_mesh(), stage)
        state = zero.eval_init(gpt.create(CONFIG), optax.sgd(0.1))
        step = zero.eval_step(gpt.chunked_loss(CHUNK))
        assert products(jax.make_jaxpr(step)(state, gpt.batch_aval(CONFIG, ROWS))) == 1


@pytest.mark.parametrize("setting", ["none", "full", "dots"])
@pytest.mark.parametrize("k", [1, 4])
def test_the_head_is_gathered_once_and_its_gradient_reduced_once(k, setting):
    """Once per microbatch, not per chunk, even if chunks are recomputed."""
    remat = {"head": setting, "*": "none"}
    found = traffic.collectives_of(traced(gpt.chunked_loss(CHUNK), k=k, remat=remat), {"data": 8})
    of_head = lambda kind: sum(c.count for c in found if c.kind == kind and c.size == HEAD)
    assert of_head("all_gather") == of_head("reduce_scatter") == k  # rows of the embedding, as large, are looked up


# Errors


def message(
    logits_of=lambda x: x @ jnp.ones((WIDTH, VOCAB)), hidden=(3, 7, WIDTH), labels=(3, 7), dtype=jnp.int32, **kw
):
    with pytest.raises(ValueError, match="chunked_cross_entropy: ") as error:
        chunked_cross_entropy(logits_of, jnp.ones(hidden, kw.pop("of", jnp.float32)), jnp.zeros(labels, dtype), **kw)
    assert "fix:" in str(error.value)
    return str(error.value)


def test_shapes_that_do_not_fit():
    assert "hidden (3, 7, 16), labels (3, 6)" in message(labels=(3, 6))
    assert "hidden (16,), labels (16,)" in message(hidden=(16,), labels=(16,))
    assert "weights (3,), labels (3, 7)" in message(weights=jnp.ones(3))
    assert "no tokens" in message(hidden=(0, WIDTH), labels=(0,))


def test_dtypes_that_do_not_fit():
    assert "labels float32" in message(dtype=jnp.float32)
    assert "hidden int32" in message(of=jnp.int32)


def test_chunk_size():
    for size in 0, -1:
        assert f"chunk_size is {size}" in message(chunk_size=size)


@pytest.mark.parametrize(
    ("logits_of", "got"),
    [
        (lambda x: x[:, 0], "shape (8,), dtype float32 for 8 tokens"),
        (lambda x: x[:2], "shape (2, 16)"),
        (lambda x: x.astype(jnp.int32), "dtype int32"),
        (lambda x: (x, x), "tuple for 8 tokens"),
    ],
)
def test_a_head_that_returns_no_logits(logits_of, got):
    assert got in message(logits_of, chunk_size=4, hidden=(8, WIDTH), labels=(8,))
