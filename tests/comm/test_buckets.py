"""Buckets: no collective moves more than `bucket_bytes`, one runs after another, and the results are the same."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support import traffic
from support.plain import numbers
from support.walk import equations, flat

import zerojax
from zerojax import Zero
from zerojax.comm import buckets, collectives
from zerojax.sharding.axes import Dims

BUCKET = 1000  # bytes; the matrices of a layer have 2048
MESHES = {"": {}, "replica": {"replica": 2}, "model": {"model": 2}}
WIDTH, ROWS = 16, 16
PARTITION_SPECS = {"layers/up": P(None, None, "model"), "layers/down": P(None, "model", None)}


def create(key, layers):
    shapes = {"up": (layers, WIDTH, 32), "bias": (layers, 32), "down": (layers, 32, WIDTH), "scale": (layers, WIDTH)}
    stack = {name: jax.random.normal(key, shape) / 4 for name, shape in shapes.items()}
    return {"embed": jnp.eye(WIDTH), "layers": stack, "head": jnp.ones((WIDTH, 24)), "gain": jnp.ones(3)}


def unstack(params):
    stack = params["layers"]
    layers = {str(i): {name: leaf[i] for name, leaf in stack.items()} for i in range(len(stack["up"]))}
    return params | {"layers": layers}


def loss(params, batch):
    """The loss of a model whose layers may be stacked or not."""
    block = lambda x, w: x + w["scale"] * jnp.tanh(jnp.tanh(x @ w["up"] + w["bias"]) @ w["down"])
    x = batch["x"] @ params["embed"]
    if "up" in params["layers"]:
        x, _ = jax.lax.scan(lambda x, w: (block(x, w), None), x, params["layers"])
    else:
        x = functools.reduce(block, params["layers"].values(), x)
    return jnp.mean((x @ params["head"]) ** 2) * params["gain"].sum()


def setting(stage, scan, extra_axis="", layers=None):
    """(Zero, create_model, optimizer). A scan of six layers has a loop at every stage."""
    stack = lambda key: create(key, layers or (6 if scan else 2))
    options = {"stacked": ("layers/*",)} if scan else {}
    if extra_axis == "model":
        options["partition_specs"] = PARTITION_SPECS
    zero = Zero(zerojax.make_mesh(**MESHES[extra_axis]), stage, **options)
    return zero, stack if scan else lambda key: unstack(stack(key)), optax.sgd(0.1, momentum=0.9)


def traced(stage, scan, bucket_bytes, *, k=1, extra_axis="", layers=None):
    zero, create_model, tx = setting(stage, scan, extra_axis, layers)
    step = zero.train_step(loss, num_microbatches=k, bucket_bytes=bucket_bytes)
    return step.trace(zero.eval_init(create_model, tx), {"x": jnp.ones((ROWS, WIDTH))}).jaxpr


# What a step moves, in the traced program


def levels(jaxpr):
    """Yields the equations of a jaxpr, and of the body of each of its loops, with nested calls inlined."""
    found = flat(getattr(jaxpr, "jaxpr", jaxpr))
    yield found
    for equation, _ in found:
        if equation.primitive.name == "scan":
            yield from levels(equation.params["jaxpr"])


def largest_by_kind(equation):
    """The bytes of the largest collective of each kind in an equation, which may be a loop."""
    inside = equations(equation.params["jaxpr"]) if equation.primitive.name == "scan" else [equation]
    sizes = {}
    for e in inside:
        if e.primitive.name in traffic.COLLECTIVES:
            sizes[e.primitive.name] = max(traffic.buffer_bytes(e), sizes.get(e.primitive.name, 0))
    return sizes


def concurrent_bytes(jaxpr):
    """For each collective, its bytes and those of all earlier ones of its kind that it does not wait for.

    A compiler may merge these collectives, or run them at the same time.
    """
    found = []
    for level in levels(jaxpr):
        before, earlier = {}, {}
        for equation, reads in level:
            ancestors = frozenset().union(*(before.get(v, frozenset()) for v in reads))
            for kind, size in largest_by_kind(equation).items():
                sizes = earlier.setdefault(kind, {})
                found.append(size + sum(other for e, other in sizes.items() if e not in ancestors))
                sizes[id(equation)] = size
                ancestors |= {id(equation)}
            before.update(dict.fromkeys(equation.outvars, ancestors))
    return found


@pytest.mark.parametrize(
    ("stage", "scan", "options"),
    [
        (0, True, {}),
        (1, True, {"extra_axis": "model"}),
        (2, False, {}),
        (2, True, {"k": 2}),
        (3, False, {"extra_axis": "replica"}),
        (3, True, {}),
    ],
)
def test_at_most_one_bucket_is_moved_at_a_time(stage, scan, options):
    """At stage 2 the loop over layers does not wait for the reduction before it, so two may be moved there."""
    whole, bucketed = (traced(stage, scan, bucket, **options) for bucket in (None, BUCKET))
    assert max(concurrent_bytes(whole)) > 2 * BUCKET
    assert BUCKET / 2 < max(traffic.buffers(bucketed)) <= BUCKET
    assert max(concurrent_bytes(bucketed)) <= (2 * BUCKET if stage == 2 and scan else BUCKET)
    sizes = dict(setting(stage, scan, options.get("extra_axis", ""))[0].config.mesh.shape)
    sent = lambda jaxpr: traffic.sent(traffic.collectives_of(jaxpr.jaxpr, sizes))
    assert sent(bucketed) == pytest.approx(sent(whole))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_largest_buffer_does_not_grow_with_the_model(stage):
    largest = lambda bucket, layers: max(traffic.buffers(traced(stage, True, bucket, layers=layers)))
    assert largest(BUCKET, 12) == largest(BUCKET, 6)
    assert (largest(None, 12) > largest(None, 6)) == (stage < 3)  # at stage 3 a scan moves layer by layer


def test_small_leaves_share_a_bucket():
    """The bias and the scale of a layer have 192 bytes. They share a bucket with other small leaves, or are alone."""
    gathers = lambda bucket: sum(e.primitive.name == "all_gather" for e in equations(traced(3, False, bucket)))
    assert gathers(2**30) == gathers(None) < gathers(BUCKET) < gathers(150)


@pytest.mark.parametrize("stage", [0, 3])
def test_evaluation_uses_buckets_too(stage):
    zero, create_model, tx = setting(stage, True)
    step = zero.eval_step(loss, bucket_bytes=BUCKET)
    jaxpr = step.trace(zero.eval_init(create_model, tx), {"x": jnp.ones((ROWS, WIDTH))}).jaxpr
    largest = max(traffic.buffers(jaxpr))
    assert largest <= BUCKET and (largest > BUCKET / 2) == (stage == 3)


# Results


@pytest.mark.parametrize(
    ("stage", "scan", "options"),
    [
        (0, True, {"extra_axis": "replica"}),
        (2, True, {"k": 2}),
        (3, True, {"extra_axis": "model"}),
    ],
)
def test_a_step_returns_the_same(stage, scan, options):
    """Except for the order in which the compiler sums products. The moved values are equal bit for bit, see below."""
    zero, create_model, tx = setting(stage, scan, options.get("extra_axis", ""))
    batch = {"x": np.random.default_rng(0).standard_normal((ROWS, WIDTH), np.float32)}

    def run(bucket_bytes):
        step = zero.train_step(loss, num_microbatches=options.get("k", 1), bucket_bytes=bucket_bytes)
        return numbers(step(zero.init(create_model, tx), batch))

    for got, want in zip(run(BUCKET), run(None), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-7)


LEAVES = {  # shape, sharded dim
    "rows": ((48, 10), 0),
    "columns": ((7, 24), 1),
    "stack": ((5, 16, 6), 1),
    "last": ((3, 2, 40), 2),
    "vector": ((104,), 0),
    "small": ((8,), 0),
    "tiny": ((2, 8), 1),
    "whole": ((9, 5), None),
    "scalar": ((), None),
}


def moved(bucket_bytes):
    """Gathers leaves, and reduces functions of them that differ between devices.

    Returns:
        (the traced program, the full leaves, (gathered, reduce_scattered, all_reduced)).
    """
    mesh = zerojax.make_mesh()
    axes, options = Zero(mesh).config.axes, collectives.CollectiveOptions(bucket_bytes)
    rng = np.random.default_rng(0)
    full = [rng.standard_normal(shape, np.float32) for shape, _ in LEAVES.values()]
    dims = [Dims(dim) for _, dim in LEAVES.values()]
    specs = [P() if d.shard is None else P(*[None] * d.shard, "data") for d in dims]

    def on_shards(shards):
        gathered = collectives.all_gather(shards, dims, axes, options).leaves
        of_device = [jnp.sin(leaf * (1 + jax.lax.axis_index("data"))) for leaf in gathered]
        reduced = collectives.reduce_scatter(of_device, dims, axes, options).leaves
        return gathered, reduced, collectives.all_reduce(of_device, ("data",), axes, options).leaves

    fn = jax.shard_map(on_shards, mesh=mesh, in_specs=(specs,), out_specs=(P(), specs, P()), check_vma=False)
    return jax.make_jaxpr(fn)(full), full, jax.jit(fn)(full)


@functools.cache
def moved_whole():
    return moved(math.inf)


@pytest.mark.parametrize(("bucket_bytes", "small"), [(64, 2**18), (333, 2**18), (333, 100), (1000, 100)])
def test_leaves_of_any_shape_are_moved_bit_for_bit(bucket_bytes, small, monkeypatch):
    monkeypatch.setattr(buckets, "SMALL_BYTES", small)
    jaxpr, full, got = moved(bucket_bytes)
    assert max(traffic.buffers(jaxpr)) <= bucket_bytes < max(traffic.buffers(moved_whole()[0]))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(moved_whole()[2]), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(got[0], full, strict=True):
        np.testing.assert_array_equal(a, b)
