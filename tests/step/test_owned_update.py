"""Matrices that an optimizer multiplies are whole on one device, and computed once."""

import collections
import functools
import itertools
import math

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
from zerojax.program import jaxprs
from zerojax.program.per_layer import Mixed, PerLayer
from zerojax.sharding.axes import Dims
from zerojax.step.owned_update import LEAVES_WHOLE, Kind, Operand, OwnedUpdate, Round, rounds


def as_matrices(params):
    """The last two dims of each parameter are those of a matrix; all before them count matrices."""
    numbers = lambda a: contrib.MuonDimensionNumbers(a.ndim - 2, a.ndim - 1) if a.ndim > 1 else None
    return jax.tree.map(numbers, params)


def muon(**options):
    """Muon with an eps that is not small compared with rounding errors, for AdamW and for matrices."""
    options = {"eps": 1e-3, "adam_weight_decay": 0.1, "muon_weight_dimension_numbers": as_matrices, **options}
    return contrib.muon(1e-2, **options)


def update_of(zero, name, tx):
    return OwnedUpdate(zero.config, zero.eval_init(zoo.ZOO[name].create, tx).layout, LEAVES_WHOLE)


def matrices(update):
    """The (shape, layers) of the parameters that owners update."""
    return [
        (kind.inputs[0].shape, kind.layers) for kinds in update.kinds.values() for kind in kinds for _ in kind.couplings
    ]


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


def kind(shape, count, dtype=jnp.float32):
    """`count` matrices that are sharded in dim 0."""
    operand = Operand(shape, dtype, Dims(0))
    return Kind([None] * count, [operand], [operand], None, None)


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
            work[device] += sum(math.prod(kinds[k].inputs[0].shape) * kinds[k].inputs[0].shape[0] for k, _ in own)
    assert seen == {(k, m): 1 for k, each in enumerate(kinds) for m in range(each.count)}
    largest = 64 * 64 * 256
    assert max(work) <= sum(work) / n + largest  # the bound of the longest-first rule


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
    return PerLayer(jaxprs.inlined(closed), [True] * len(shapes), count)


PER_LAYER = {
    "newton_schulz": lambda x: contrib._muon.orthogonalize_via_newton_schulz(
        x, jnp.array([3.4, -4.7, 2.0]), 3, dimension_numbers=contrib.MuonDimensionNumbers(1, 2)
    ),
    "coefficients_of_each_iteration": lambda x: contrib._muon.orthogonalize_via_newton_schulz(
        x, jnp.ones((3, 3)), 3, preconditioning="aol", dimension_numbers=contrib.MuonDimensionNumbers(1, 2)
    ),
    "tall": lambda x: contrib._muon.orthogonalize_via_newton_schulz(
        x.swapaxes(1, 2), jnp.array([3.4, -4.7, 2.0]), 3, dimension_numbers=contrib.MuonDimensionNumbers(1, 2)
    ),
    "singular_values": lambda x: jnp.linalg.svd(x, full_matrices=False)[1],
    "cholesky": lambda x: jnp.linalg.cholesky(x @ x.swapaxes(1, 2) + jnp.eye(3)),
    "mean_of_each": lambda x: x - x.mean((1, 2), keepdims=True),
    "product_with_one": lambda x: jnp.einsum("lab,bc->lac", x, jnp.arange(20.0).reshape(5, 4)),
    "joined": lambda x: jnp.concatenate([x, x.sum(1, keepdims=True)], 1).reshape(len(x), -1),
}
MIXED = {
    "mean_of_all": lambda x: x - x.mean(),
    "sum_over_layers": lambda x: x.sum(0, keepdims=True) * jnp.ones((4, 1, 1)),
    "product_over_layers": lambda x: jnp.einsum("lab,mab->lm", x, x),
    "order": lambda x: x[::-1],
    "shift": lambda x: jnp.concatenate([x[1:], x[:1]]),
    "scan": lambda x: jax.lax.scan(lambda carry, x: (carry + x, carry), x[0], x)[1],
    "factor_of_each": lambda x: x * jnp.arange(4.0)[:, None, None],
    "matrix_of_layers": lambda x: x.reshape(4, 15).T,
}


@pytest.mark.parametrize("name", PER_LAYER)
def test_layers_are_computed_one_by_one(name):
    run, x = of_layers(4, PER_LAYER[name], (3, 5)), jax.random.normal(jax.random.key(0), (6, 3, 5))
    (got,) = run(x)
    assert run.outputs == [True]
    np.testing.assert_allclose(got, PER_LAYER[name](x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MIXED)
def test_layers_that_meet_are_found(name):
    with pytest.raises(Mixed):
        of_layers(4, MIXED[name], (3, 5))


def test_a_model_without_coupled_matrices_has_no_owners():
    zero = Zero(zerojax.make_mesh(), 3)
    for tx in optax.adamw(1e-3), optax.lamb(1e-3), optax.adafactor(1e-2, min_dim_size_to_factor=8), optax.lars(0.1):
        assert not matrices(update_of(zero, "gpt_nnx", optax.chain(optax.clip_by_global_norm(0.1), tx)))
