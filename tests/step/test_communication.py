"""Communication, counted in the traced step: the volumes of the ZeRO formulas, in the dtypes of the precision."""

import collections

import gpt
import optax
import pytest
from support import traffic, zoo

import zerojax

N = 8


def trace(stage, k, scan=False, precision="bf16", mesh=None, outer=None):
    config = gpt.Config(width=64, layers=4, scan=scan)
    zero = zerojax.Zero(mesh or zerojax.make_mesh(), stage=stage, precision=precision, outer_sharding=outer)
    state = zero.eval_init(gpt.create(config), optax.adamw(1e-3))
    step = zero.train_step(gpt.loss, num_microbatches=k)
    return state, traffic.collectives_of_step(step, state, gpt.batch_aval(config, 32))


@pytest.mark.parametrize(
    ("stage", "k", "scan"), [(stage, k, scan) for stage in range(4) for k, scan in ((1, False), (4, True))]
)
def test_elements_sent_are_the_formula(stage, k, scan):
    state, found = trace(stage, k, scan)
    leaves = state.layout.leaves
    psi = sum(leaf.size for leaf in leaves)
    once = sum(leaf.size for leaf in leaves if traffic.is_gathered_once(leaf))
    volume = {0: 2 * psi, 1: 2 * psi, 2: (1 + k) * psi, 3: k * (3 * psi - once)}[stage]
    sent = traffic.sent(found)
    assert sent["bfloat16"] == volume * (N - 1) / N
    assert sent["float32"] <= 2 * 8  # losses, weights and norms


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_only_scalars_are_all_reduced(stage):
    _, found = trace(stage, 1)
    reduced = [c for c in found if c.kind.startswith("psum")]
    assert reduced and all(c.size <= 8 for c in reduced)


def test_gradients_are_reduced_in_the_reduce_dtype():
    _, found = trace(3, 1, precision="bf16_reduce_fp32")
    gathers, scatters = ([c for c in found if c.kind == kind] for kind in ("all_gather", "reduce_scatter"))
    assert {c.dtype for c in gathers} == {"bfloat16"} and {c.dtype for c in scatters} == {"float32"}


def test_small_leaves_of_a_unit_are_reduced_together():
    _, found = trace(3, 1)
    assert len([c for c in found if c.kind == "reduce_scatter"]) == 4 + 2  # four blocks, embedding, head


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_device_sends_nothing(stage):
    import jax

    _, found = trace(stage, 2, mesh=zerojax.make_mesh(devices=jax.devices()[:1]))
    assert found == []


@pytest.mark.parametrize(("scan", "k"), [(False, 1), (True, 1), (False, 4), (True, 4)])
def test_hybrid_sharding_reduces_shards_over_replicas_once_per_step(scan, k):
    """By all-reduces, or by reduce-scatters to pieces, after whose update the new shards are gathered."""
    for outer, kinds in ("none", ["psum"]), (None, ["reduce_scatter", "all_gather"]):
        state, found = trace(3, k, scan, mesh=zerojax.make_mesh(replica=2), outer=outer)
        psi = sum(leaf.size for leaf in state.layout.leaves)
        over_replicas = [c for c in found if c.num_devices == 2 and c.size > 8]
        for kind in kinds:
            of_kind = [c for c in over_replicas if c.kind.startswith(kind)]
            assert sum(c.size * c.count for c in of_kind) == psi / 4  # shards over 4 devices
        assert sum(c.size * c.count for c in over_replicas) == len(kinds) * psi / 4


@pytest.mark.parametrize(("stage", "k", "by_layer"), [(3, 1, True), (2, 1, True), (3, 4, False), (1, 1, False)])
def test_a_scanned_layer_is_summed_over_replicas_beside_the_layers_below(stage, k, by_layer):
    """After several microbatches, or below stage 2, the gradients of all layers are complete at the same time."""
    state, found = trace(stage, k, scan=True, mesh=zerojax.make_mesh(replica=2), outer="none")
    stack = max(leaf.size for leaf in state.layout.leaves if leaf.stacked) / 4
    over_replicas = [c.size for c in found if c.kind.startswith("psum") and c.num_devices == 2]
    assert (stack in over_replicas) == (not by_layer)


def test_a_leaf_with_several_uses_is_summed_over_replicas_in_the_reduce_dtype():
    """Its gradients are added in fp32."""
    model, zero = zoo.ZOO["tied"], zerojax.Zero(zerojax.make_mesh(replica=2), 3, "bf16")
    audit = zero.train_step(model.loss).audit(zero.eval_init(model.create, optax.sgd(0.1)), model.batch(0))
    assert audit.ok and audit["wire dtype"].verdict is zerojax.Verdict.OK


def test_counting_finds_a_collective_in_a_loop():
    import jax
    from jax import lax
    from jax.sharding import PartitionSpec as P

    mesh = zerojax.make_mesh()
    body = lambda c, _: (lax.psum_scatter(lax.all_gather(c, "data", tiled=True), "data", tiled=True), None)
    fn = jax.shard_map(
        lambda x: lax.scan(body, x, None, length=5)[0], mesh=mesh, in_specs=P("data"), out_specs=P("data")
    )
    found = traffic.collectives_of(jax.make_jaxpr(fn)(jax.numpy.zeros(16)).jaxpr, dict(mesh.shape))
    assert sum(c.sent_elements for c in found) == 2 * 5 * 16 * (N - 1) / N


@pytest.mark.parametrize("precision", ["fp32", "bf16_reduce_fp32"])
def test_on_one_device_a_step_is_that_of_plain_jax(precision):
    """No barrier, no dependency on events, and as many equations at stage 3 as at stage 0."""
    import jax
    from support import walk

    mesh = zerojax.make_mesh(devices=jax.devices()[:1])
    config = gpt.Config(width=64, layers=2)

    def primitives(stage):
        zero = zerojax.Zero(mesh, stage, precision)
        state = zero.eval_init(gpt.create(config), optax.adamw(1e-3))
        jaxpr = zero.train_step(gpt.loss).trace(state, gpt.batch_aval(config, 4)).jaxpr.jaxpr
        return collections.Counter(equation.primitive.name for equation in walk.equations(jaxpr))

    plain, sharded = primitives(0), primitives(3)
    assert sharded["optimization_barrier"] == 0
    same = lambda counts: {name: n for name, n in counts.items() if name != "sharding_constraint"}
    assert same(sharded) == same(plain)
