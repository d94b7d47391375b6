"""Matrices that an optimizer multiplies are whole on one device, and computed once."""

import collections
import functools
import itertools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib
from support import plain, zoo
from support.parity import STEPS, assert_close, batches, train

import zerojax
from zerojax import Zero
from zerojax.analysis import jaxpr_counts
from zerojax.offload import host_pieces
from zerojax.program import jaxprs
from zerojax.program.sliced import Mixed, Slice, Sliced
from zerojax.sharding.axes import Dims
from zerojax.step.owned_update import LEAVES_WHOLE, OwnedUpdate
from zerojax.step.owners import Kind, Operand, Round, rounds

COEFFICIENTS = jnp.array([3.4445, -4.775, 2.0315])


def newton_schulz(x, steps=3):
    """Nearly orthogonal matrices, as Muon has them, from the last two dims of an array."""
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.swapaxes(-1, -2) if is_tall else x
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-3)  # not small compared with rounding errors

    def iteration(x, c):
        square = x @ x.swapaxes(-1, -2)
        return c[0] * x + (c[1] * square + c[2] * square @ square) @ x, None

    x, _ = jax.lax.scan(iteration, x, jnp.tile(COEFFICIENTS, (steps, 1)))
    return x.swapaxes(-1, -2) if is_tall else x


def by_group(params):
    return jax.tree.map(lambda a: "matrix" if a.ndim > 1 else "vector", params)


def scale_by_newton_schulz():
    return optax.chain(
        optax.trace(0.95, nesterov=True), optax.stateless(lambda grads, _: jax.tree.map(newton_schulz, grads))
    )


def muon():
    """Muon for arrays whose last two dims are those of matrices, and AdamW for vectors.

    That of Optax has stacks of matrices only in newer versions.
    """
    of_matrices = optax.chain(scale_by_newton_schulz(), optax.add_decayed_weights(0.1), optax.scale(-1e-2))
    return optax.multi_transform({"matrix": of_matrices, "vector": optax.adamw(1e-2, eps=1e-3)}, by_group)


def update_of_layout(zero, state):
    return OwnedUpdate(zero.config, state.layout, LEAVES_WHOLE).owned


def update_of(zero, name, tx):
    return update_of_layout(zero, zero.eval_init(zoo.ZOO[name].create, tx))


def matrices(update):
    """The (shape, layers) of the parameters that owners update."""
    return [(kind.inputs[0].shape, kind.layers) for kinds in update.groups for kind in kinds for _ in kind.couplings]


def data_for(name, n, count=STEPS):
    """Batches whose rows `n` devices divide."""
    cut = lambda a: a[: len(a) // n * n]
    return [jax.tree.map(cut, batch) for batch in batches(zoo.ZOO[name], count)]


@functools.cache
def expected(name, n):
    return plain.run(zoo.ZOO[name], muon(), data_for(name, n), num_devices=n)


CASES = [(name, n, stage) for name in ("gpt_nnx", "gpt_linen_scan") for n in (8, 3) for stage in range(4)]
DEFAULT = [("gpt_nnx", 8, 3), ("gpt_linen_scan", 3, 3), ("gpt_linen_scan", 8, 0), ("gpt_nnx", 3, 1)]


@pytest.mark.parametrize(
    ("name", "n", "stage"), [pytest.param(*c, marks=[] if c in DEFAULT else [pytest.mark.full]) for c in CASES]
)
def test_muon_is_that_of_one_device(name, n, stage):
    """Over ten steps; three devices divide few dims, so that shards have zeros."""
    zero = Zero(zerojax.make_mesh(devices=jax.devices()[:n]), stage)
    assert {layers for _, layers in matrices(update_of(zero, name, muon()))} >= (
        {3, None} if "scan" in name else {None}
    )
    got, _ = train(zero, zoo.ZOO[name], data_for(name, n), muon())
    assert_close(got, expected(name, n))


# Other settings, with a small model

VOCAB, WIDTH = 67, 16


def create():
    keys = iter(jax.random.split(jax.random.key(0), 20))
    normal = lambda *shape: 0.2 * jax.random.normal(next(keys), shape)
    layers = [{"up": normal(WIDTH, 24), "down": normal(24, WIDTH), "scale": jnp.ones(WIDTH)} for _ in range(5)]
    return {"embed": normal(VOCAB, WIDTH), "layers": layers, "stack": normal(3, WIDTH, WIDTH)}


def loss(params, tokens):
    h = params["embed"][tokens[:, :-1]]
    for layer in params["layers"]:
        h = h + jax.nn.gelu(h * layer["scale"] @ layer["up"]) @ layer["down"]
    h, _ = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), h, params["stack"])
    logits = (h @ params["embed"].T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


TOKENS = np.random.default_rng(0).integers(0, VOCAB, (48, 7))


def on_one_device(tx, steps=3, batch=TOKENS):
    """The parameters after some steps of plain JAX."""

    @jax.jit
    def step(params, state):
        updates, state = tx.update(jax.grad(loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    params, state = create(), tx.init(create())
    for _ in range(steps):
        params, state = step(params, state)
    return params


def trained(zero, tx, steps=3, batch=TOKENS, **settings):
    state, step = zero.init(create, tx), zero.train_step(loss, **settings)
    for _ in range(steps):
        state, metrics = step(state, batch)
    return state, metrics


def weights(state):
    return [np.asarray(a) for a in jax.tree.leaves(state.logical().params)]


def soap_like(share=0.1):
    """Rotates by the eigenvectors of a statistic [m, m], as SOAP does, for matrices [m, n]."""
    is_one = lambda a: a.ndim == 2 and a.shape[0] < 64

    def init(params):
        return jax.tree.map(lambda a: jnp.eye(len(a)) if is_one(a) else jnp.zeros(()), params)

    def update(grads, state, params=None):
        state = jax.tree.map(lambda g, s: (1 - share) * s + share * g @ g.T if is_one(g) else s, grads, state)

        def rotated(g, s):
            if not is_one(g):
                return g
            values, vectors = jnp.linalg.eigh(s)
            return vectors @ ((vectors.T @ g) / (jnp.sqrt(values)[:, None] + 0.1))

        return jax.tree.map(rotated, grads, state), state

    return optax.GradientTransformation(init, update)


def without_mean(grads, _):
    """Orthogonalizes differences from the mean of all layers, in which parameters meet."""
    mean = jax.tree.map(lambda *each: sum(each) / len(each), *grads["layers"])
    one = lambda g, m: newton_schulz(g - m) if g.ndim > 1 else g
    return {**grads, "layers": [jax.tree.map(one, layer, mean) for layer in grads["layers"]]}


TXS = {
    "differences": lambda: optax.chain(optax.stateless(without_mean), optax.sgd(0.1)),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), muon()),
    "norm of products": lambda: optax.multi_transform(  # values of all matrices meet between two couplings
        {
            "matrix": optax.chain(
                scale_by_newton_schulz(), optax.clip_by_global_norm(1.0), scale_by_newton_schulz(), optax.sgd(0.1)
            ),
            "vector": optax.sgd(0.1),
        },
        by_group,
    ),
    "of Optax": lambda: contrib.muon(1e-2, eps=1e-3, adaptive=True),
    "soap_like": lambda: optax.chain(soap_like(), optax.sgd(0.1)),
    "trust ratio": lambda: optax.chain(muon(), optax.scale_by_trust_ratio(), optax.scale(0.01)),
}


@pytest.mark.parametrize("name", TXS)
def test_an_update_is_that_of_one_device(name):
    tx, zero = TXS[name](), Zero(zerojax.make_mesh(devices=jax.devices()[:3]), 3, stacked="stack")
    update = update_of_layout(zero, zero.eval_init(create, tx))
    assert len(matrices(update)) >= (0 if name == "differences" else 10)
    assert len(update.groups) == {"norm of products": 2, "differences": 0}.get(name, 1)
    state, _ = trained(zero, tx)
    for got, want in zip(weights(state), jax.tree.leaves(on_one_device(tx)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_one", [True, False])
def test_a_convolution_kernel_is_what_the_optimizer_takes_it_for(is_one):
    """One matrix [height x width x in, out], or one for each row of the window; three devices pad the kernel."""
    shape = (2, 3, 4, 7)
    as_one = lambda g: newton_schulz(g.reshape(-1, g.shape[-1])).reshape(g.shape)
    one = as_one if is_one else newton_schulz
    tx = optax.chain(optax.stateless(lambda grads, _: jax.tree.map(one, grads)), optax.sgd(0.1))
    create = lambda: {"kernel": jax.random.normal(jax.random.key(0), shape)}
    loss = lambda params, x: jnp.mean(jnp.tanh(x @ params["kernel"].reshape(-1, 7)) ** 2)
    zero, x = Zero(zerojax.make_mesh(devices=jax.devices()[:3]), 3), np.random.default_rng(0).normal(size=(6, 24))
    x, state = x.astype(np.float32), zero.init(create, tx)
    assert [layers for _, layers in matrices(update_of_layout(zero, state))] == [None if is_one else 2]
    after, _ = zero.train_step(loss)(state, x)
    updates, _ = tx.update(jax.grad(loss)(create(), x), tx.init(create()), create())
    (got,), want = weights(after), optax.apply_updates(create(), updates)["kernel"]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_replicas_and_microbatches_have_the_same_update():
    """Hybrid sharding: the owners are all devices. The update follows all microbatches. Buckets hold few elements."""
    zero = Zero(zerojax.make_mesh(replica=2), 3, stacked="stack")
    state, _ = trained(zero, muon(), num_microbatches=2, bucket_bytes=512)
    for got, want in zip(weights(state), jax.tree.leaves(on_one_device(muon())), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    traced = zero.train_step(loss, num_microbatches=2).trace(state, TOKENS)
    exchanged = [c for c in jaxpr_counts.traced_collectives(traced.jaxpr, zero.config.mesh) if c.kind == "all-to-all"]
    rounds_bytes = [size * 7 / 8 for size in update_of_layout(zero, state).sent_bytes()]
    assert [c.sent_bytes * 2 for c in exchanged if c.group_size == 8][::2] == rounds_bytes  # there and back, once


def test_a_step_with_infinite_gradients_changes_nothing():
    zero = Zero(zerojax.make_mesh(), 3, "fp16", stacked="stack")
    state = zero.init(create, muon())
    before = [np.asarray(a) for a in jax.tree.leaves((state.master, state.opt_state))]
    infinite = lambda params, tokens: loss(params, tokens) * jnp.where(tokens[0, 0] >= 0, jnp.inf, 1.0)
    after, metrics = zero.train_step(infinite)(state, TOKENS)
    assert metrics["skipped"] == 1
    for a, b in zip(before, jax.tree.leaves((after.master, after.opt_state)), strict=True):
        np.testing.assert_array_equal(a, np.asarray(b))


def test_frozen_matrices_have_no_owner():
    zero = Zero(zerojax.make_mesh(), 3, stacked="stack", frozen="layers/0/*")
    update = update_of_layout(zero, zero.eval_init(create, muon()))
    assert len(matrices(update)) == 10
    state, _ = trained(zero, muon())
    start = zero.init(create, muon()).params
    np.testing.assert_array_equal(state.params["layers"][0]["down"], start["layers"][0]["down"])


@pytest.mark.parametrize("model", [2, 4])
def test_matrices_are_whole_over_a_model_axis_too(model):
    specs = {"layers/*/up": jax.P(None, "model"), "layers/*/down": jax.P("model", None)}
    zero = Zero(zerojax.make_mesh(model=model), 3, partition_specs=specs, stacked="stack")
    state, _ = trained(zero, muon())
    for got, want in zip(weights(state), jax.tree.leaves(on_one_device(muon())), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    owners = {path: row for row in zero.explain(state).owners for path in row.paths}
    assert all(sum(row.counts) == (3 if path == "stack" else len(row.paths)) for path, row in owners.items())
    assert len(owners) == 12


def test_devices_along_a_model_axis_share_the_matrices_of_an_owner():
    """Eight matrices for four owners: each of two devices of an owner multiplies one of its two. See tests/aot too."""
    create = lambda: {f"w{k}": 0.3 * jax.random.normal(jax.random.key(k), (24, 24)) for k in range(8)}

    def loss(params, tokens):
        h = jax.nn.one_hot(tokens % 24, 24)
        for k in range(8):
            h = h + jnp.tanh(h @ params[f"w{k}"])
        return (h**2).mean()

    tx = muon()
    zero = Zero(zerojax.make_mesh(model=2), 3, partition_specs={"w*": jax.P(None, "model")})
    state, step = zero.init(create, tx), zero.train_step(loss)
    after, _ = step(state, TOKENS)
    updates, _ = tx.update(jax.grad(loss)(create(), TOKENS), tx.init(create()), create())
    wanted = optax.apply_updates(create(), updates)
    for got, want in zip(weights(after), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_stacks_of_which_each_device_has_whole_layers_have_no_owners():
    zero = Zero(zerojax.make_mesh(), 3, shard_dims={"experts": 0})
    (row,) = zero.explain(zero.eval_init(lambda: {"experts": jnp.ones((8, 6, 6))}, muon())).owners
    assert row.reason == "each device has whole matrices, since dim 0 is sharded"


@pytest.mark.parametrize(
    ("offload", "stage", "n"), [("optimizer", 3, 8), ("optimizer", 0, 8), ("params", 3, 3), ("optimizer", 1, 1)]
)
def test_a_state_in_host_memory_is_updated_alike(offload, stage, n, monkeypatch):
    """In pieces; its matrices have owners on one device, too."""
    monkeypatch.setattr(host_pieces, "PIECES_BYTES", 4096)
    batch, states = TOKENS[: len(TOKENS) // n * n], []
    for where in ("none", offload):
        zero = Zero(zerojax.make_mesh(devices=jax.devices()[:n]), stage, stacked="stack", offload=where)
        state, step = zero.init(create, muon()), zero.train_step(loss, clip_norm=0.1)
        for _ in range(3):
            state, _ = step(state, batch)
        states.append(state)
    assert {a.sharding.memory_kind for a in jax.tree.leaves(states[1].opt_state) if a.ndim} == {"pinned_host"}
    chex.assert_trees_all_close(*(state.logical().params for state in states), rtol=1e-6, atol=1e-6)
    audit = step.audit(states[1], batch)
    assert audit.ok, str(audit)


def test_moments_of_8_bits_are_updated_in_pieces_around_the_owners(monkeypatch):
    """Muon has one moment of matrices, which the first pass reads and writes."""
    monkeypatch.setattr(host_pieces, "DEVICE_PIECES_BYTES", 4096)
    tx, found = zerojax.low_bit_moments(muon(), 8, exempt=(), min_size=0), []
    for n in (8, 1):
        zero = Zero(zerojax.make_mesh(devices=jax.devices()[:n]), 3, stacked="stack")
        state, step = zero.init(create, tx), zero.train_step(loss)
        for _ in range(3):
            state, _ = step(state, TOKENS)
        found.append(state.logical().params)
    chex.assert_trees_all_close(*found, rtol=1e-4, atol=1e-5)
    update = zero.config.memory.update(zero.config, state.layout, [jnp.float32] * len(state.layout.leaves), False)
    first, second = update.split.passes[[leaf.path for leaf in state.layout.leaves].index("stack")]
    assert first.results and not {*first.reads} & {*second.reads}


def test_a_step_of_your_own_has_owners_too():
    zero = Zero(zerojax.make_mesh(), 3, stacked="stack")
    tx, params = zero.optimizer(muon()), zero.shard(create())

    @jax.jit
    def step(params, state, batch):
        _, grads = zero.value_and_grad(loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return zero.apply_updates(params, updates), state

    state, batch = tx.init(params), zero.shard_batch(TOKENS)
    traced = jaxpr_counts.traced_collectives(step.trace(params, state, batch).jaxpr, zero.config.mesh)
    assert sum(c.kind == "all-to-all" and c.dtype == "f32" for c in traced) >= 2
    for _ in range(3):
        params, state = step(params, state, batch)
    for got, want in zip(jax.tree.leaves(params), jax.tree.leaves(on_one_device(muon())), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_at_stage_1_layers_can_be_whole_on_their_owners():
    """Stacks that are sharded in the dim of their layers are updated where they are: nothing is exchanged."""
    zero = Zero(zerojax.make_mesh(devices=jax.devices()[:3]), 1, stacked="stack", shard_dims={"stack": 0})
    state, _ = trained(zero, muon())
    for got, want in zip(weights(state), jax.tree.leaves(on_one_device(muon())), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert "stack" in {row.paths[0] for row in zero.explain(state).owners if row.reason.startswith("each device has")}


# Bytes and products


def test_matrices_are_sent_once_and_multiplied_once():
    """Each device sends 2 (N-1)/N of its shards, and multiplies its share; AdamW's step has no all-to-all."""
    name, zero = "gpt_linen_scan", Zero(zerojax.make_mesh(), 3)
    model = zoo.ZOO[name]
    found = {}
    for which, tx in ("muon", muon()), ("adamw", optax.adamw(1e-3)):
        state = zero.eval_init(model.create, tx)
        traced = zero.train_step(model.loss).trace(state, model.batch(0))
        sent = [c for c in jaxpr_counts.traced_collectives(traced.jaxpr, zero.config.mesh) if c.full_bytes > 256]
        found[which] = collections.Counter((c.kind, c.dtype, c.sent_bytes) for c in sent)
    update = update_of(zero, name, muon())
    assert not found["adamw"] - found["muon"]
    own = list((found["muon"] - found["adamw"]).elements())
    assert {kind for kind, *_ in own} == {"all-to-all"}
    assert sum(sent for *_, sent in own) == sum(update.sent_bytes()) * 7 / 8
    sizes = sum(math.prod(shape) * (layers or 1) for shape, layers in matrices(update))
    assert 1 <= sum(update.sent_bytes()) / (2 * 4 * sizes / 8) <= 1.5  # rows of owners are as long as the longest


def kind(shape, count):
    """`count` matrices that are sharded in dim 0."""
    operand = Operand(shape, jnp.dtype("float32"), Dims(0))
    return Kind([None] * count, [operand], [operand], None, math.prod(shape) * min(shape), None)


@pytest.mark.parametrize("n", [2, 3, 8, 64])
def test_each_matrix_has_one_owner(n):
    kinds = [kind((64, 64), 16), kind((64, 192), 16), kind((64, 256), 17), kind((8, 8), 3)]
    seen, work = collections.Counter(), [0] * n
    for each in rounds(kinds, n):
        if isinstance(each, Round):
            seen.update((each.kind, k) for k in range(each.first, each.end))
            assert each.end - each.first == n * each.per_device
            owned = [[(each.kind, 0)] * each.per_device] * n
        else:
            seen.update(itertools.chain(*each.owned))
            owned = each.owned
        for device, own in enumerate(owned):
            work[device] += sum(kinds[k].work for k, _ in own)
    assert seen == {(k, m): 1 for k, each in enumerate(kinds) for m in range(each.count)}
    largest = 64 * 64 * 256
    assert max(work) <= sum(work) / n + largest  # the bound of the longest-first rule


def test_the_work_of_a_matrix_is_that_of_its_products():
    """Whatever the order of its sides, and with heads: the products are along the longer side."""
    shapes = {"wide": (16, 64), "tall": (64, 16), "heads": (16, 4, 16)}
    one = lambda g: newton_schulz(g.reshape(g.shape[0], -1)).reshape(g.shape)
    tx, zero = optax.stateless(lambda grads, _: jax.tree.map(one, grads)), Zero(zerojax.make_mesh(), 3)
    made = {name: jnp.ones(shape) for name, shape in shapes.items()}
    update = update_of_layout(zero, zero.eval_init(lambda: made, tx))
    (kinds,) = update.groups
    assert {k.work for k in kinds} == {3 * (2 * 16 * 16 * 64 + 16**3)}


def test_matrices_are_sent_in_the_dtype_of_their_products():
    """And what depends on the same matrix element by element is computed by the owner, instead of sent."""

    def one(g):
        low = g.astype(jnp.bfloat16)
        norm = jnp.sqrt(jnp.sum(jnp.square(low.astype(jnp.float32))))
        return (low / norm.astype(low.dtype) @ low.T @ low).astype(g.dtype)

    tx, zero = optax.stateless(lambda grads, _: jax.tree.map(one, grads)), Zero(zerojax.make_mesh(), 3)
    update = update_of_layout(zero, zero.eval_init(lambda: {"w": jnp.ones((16, 64))}, tx))
    ((kind,),) = update.groups
    assert [o.dtype for o in (*kind.inputs, *kind.outputs)] == [jnp.bfloat16, jnp.bfloat16]


def test_small_matrices_go_where_no_large_ones_are():
    (mixed,) = rounds([kind((64, 192), 4), kind((64, 64), 4), kind((64, 256), 4), kind((256, 64), 4)], 8)
    assert sorted(sorted(k for k, _ in own) for own in mixed.owned) == [[0, 2]] * 4 + [[1, 3]] * 4


def test_devices_along_other_axes_divide_the_matrices_of_a_round():
    sizes = [each.per_device for each in rounds([kind((4096, 8192), 18)], 2, divisor=4)]
    assert sizes == [4, 4, 1]


def test_a_matrix_that_is_larger_than_a_round_is_alone():
    large = kind((4096, 8192), 16)
    assert [(each.first, each.end, each.per_device) for each in rounds([large], 4)] == [
        (first, first + 4, 1) for first in range(0, 16, 4)
    ]
    assert len(rounds([kind((64, 64), 64)], 4)) == 1


# Layers of stacks


def of_layers(count, fn, *shapes):
    """`fn` of stacks of `count` layers, traced."""
    avals = [jax.ShapeDtypeStruct((count, *shape), jnp.float32) for shape in shapes]
    closed, _ = jaxprs.traced(lambda *args: [fn(*args)], *avals)
    return Sliced(jaxprs.inlined(closed), [0] * len(shapes), count, anywhere=True)


PER_LAYER = {
    "newton_schulz": newton_schulz,
    "tall": lambda x: newton_schulz(x.swapaxes(1, 2)),
    "branch": lambda x: jax.lax.cond(COEFFICIENTS[0] > 0, lambda x: x @ x.swapaxes(1, 2), lambda x: x[:, :, :3], x),
    "singular_values": lambda x: jnp.linalg.svd(x, full_matrices=False)[1],
    "cholesky": lambda x: jnp.linalg.cholesky(x @ x.swapaxes(1, 2) + jnp.eye(3)),
    "mean_of_each": lambda x: x - x.mean((1, 2), keepdims=True),
    "product_with_one": lambda x: jnp.einsum("lab,bc->lac", x, jnp.arange(20.0).reshape(5, 4)),
    "merged": lambda x: (x.reshape(-1, 5) * jnp.full((1, 5), 2.0) + jnp.ones((x.shape[0] * 3, 5))).reshape(x.shape),
    "joined": lambda x: jnp.concatenate([x, x.sum(1, keepdims=True)], 1).reshape(len(x), -1),
}
MIXED = {
    "sum": lambda x: x.sum(0),
    "mean_of_all": lambda x: x - x.mean(),
    "sum_over_layers": lambda x: x.sum(0, keepdims=True) * jnp.ones((4, 1, 1)),
    "product_over_layers": lambda x: jnp.einsum("lab,mab->lm", x, x),
    "order": lambda x: x[::-1],
    "sum_that_begins_with_zeros": lambda x: jax.lax.fori_loop(0, 3, lambda _, total: total + x, jnp.zeros_like(x)),
    "shift": lambda x: jnp.concatenate([x[1:], x[:1]]),
    "scan": lambda x: jax.lax.scan(lambda carry, x: (carry + x, carry), x[0], x)[1],
    "factor_of_each": lambda x: x * jnp.arange(4.0)[:, None, None],
    "matrix_of_layers": lambda x: x.reshape(4, 15).T,
}


@pytest.mark.parametrize("name", PER_LAYER)
def test_layers_are_computed_one_by_one(name):
    run, x = of_layers(4, PER_LAYER[name], (3, 5)), jax.random.normal(jax.random.key(0), (6, 3, 5))
    (got,) = run.on_slice([x], Slice(6, None))
    assert run.places == [0]
    np.testing.assert_allclose(got, PER_LAYER[name](x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MIXED)
def test_layers_that_meet_are_found(name):
    with pytest.raises(Mixed):
        found = of_layers(4, MIXED[name], (3, 5)).places
        raise Mixed if found != [0] else AssertionError


def test_a_model_without_coupled_matrices_has_no_owners():
    zero = Zero(zerojax.make_mesh(), 3)
    for tx in optax.adamw(1e-3), optax.lamb(1e-3), optax.adafactor(1e-2, min_dim_size_to_factor=8), optax.lars(0.1):
        assert not matrices(update_of(zero, "gpt_nnx", optax.chain(optax.clip_by_global_norm(0.1), tx)))
