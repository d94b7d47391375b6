"""Parameters in host memory: the same numbers as on the devices, layer by layer, for scanned and unrolled models."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.walk import equations

import zerojax
from zerojax import Verdict, Zero
from zerojax.offload import host_arrays, host_memory, host_pieces
from zerojax.program import jaxprs
from zerojax.utils import versions

LAYERS, WIDTH, HIDDEN, VOCAB, STEPS = 4, 16, 32, 67, 3  # shards of 67 rows have zeros at their end
IS_EXACT = versions.parse(jax.__version__) < (0, 11)  # whether XLA contracts the update alike in both programs
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (12, 7))


def create(scan=True):
    keys = jax.random.split(jax.random.key(0), 5)
    normal = lambda key, *shape: 0.1 * jax.random.normal(key, shape)
    layers = {
        "up": normal(keys[1], LAYERS, WIDTH, HIDDEN),
        "down": normal(keys[2], LAYERS, HIDDEN, WIDTH),
        "scale": jnp.ones((LAYERS, WIDTH)),
    }
    return {
        "embed": normal(keys[0], VOCAB, WIDTH),
        "layers": layers if scan else {str(k): jax.tree.map(lambda a, k=k: a[k], layers) for k in range(LAYERS)},
        "head": normal(keys[3], WIDTH, VOCAB),
        "unused": normal(keys[4], WIDTH, 8),
        "temperature": jnp.ones(()),
    }


def layer(h, weights):
    return h + jax.nn.gelu(h * weights["scale"] @ weights["up"]) @ weights["down"], None


def loss(params, tokens):
    h = params["embed"][tokens[:, :-1]] * params["temperature"]
    if "up" in params["layers"]:
        h, _ = jax.lax.scan(layer, h, params["layers"])
    else:
        for k in range(LAYERS):
            h, _ = layer(h, params["layers"][str(k)])
    logits = (h @ params["head"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def tied_loss(params, tokens):
    return loss(params | {"head": params["embed"].T + params["head"]}, tokens)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(host_pieces, "PIECES_BYTES", 4096)


def adamw():
    """With an eps that is not small next to rounding errors of 16 bits: by the sign of such an error, an element whose
    gradient is about zero would move as far as any other."""
    return optax.adamw(1e-2, eps=1e-3)


def zero_of(offload, precision="fp32", num_devices=4, scan=True, **options):
    mesh = zerojax.make_mesh(devices=jax.devices()[:num_devices])
    stacked = [f"layers/{name}" for name in ("up", "down", "scale")] if scan else []
    return Zero(mesh, 3, precision, stacked=stacked, offload=offload, **options)


def trained(zero, scan=True, loss=loss, tx=None, tokens=TOKENS, **settings):
    """(State after some steps, metrics of each)."""
    state, step = zero.init(lambda: create(scan), tx or adamw()), zero.train_step(loss, **settings)
    metrics = []
    for _ in range(STEPS):
        state, found = step(state, tokens)
        metrics.append({name: float(value) for name, value in found.items()})
    return state, metrics


def assert_same(got, want, exact=False, rel=1e-6):
    for a, b in zip(*(jax.tree.leaves((s.params, s.master, s.opt_state)) for s in (got, want)), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        if exact and IS_EXACT:
            np.testing.assert_array_equal(a, b)
        else:
            a, b = a.astype(np.float32), b.astype(np.float32)
            assert np.abs(a - b).max() <= rel * max(np.abs(b).max(), 1e-3)


def kinds(params):
    """Of matrices (a stack of them has three dims), and of all other parameters."""
    paths = {jax.tree_util.keystr(path): a for path, a in jax.tree_util.tree_leaves_with_path(params)}
    is_matrix = lambda path: not path.endswith(("'scale']", "'temperature']"))
    return [{a.sharding.memory_kind for p, a in paths.items() if is_matrix(p) == flag} for flag in (True, False)]


@pytest.mark.parametrize(
    ("num_devices", "settings", "scan"),
    [
        (1, {"remat": "full"}, True),
        (4, {"remat": "full", "num_microbatches": 3}, True),
        (4, {"remat": "full"}, False),
        pytest.param(1, {"remat": "full", "num_microbatches": 3}, False, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_training_is_that_of_parameters_on_the_devices(num_devices, settings, scan):
    """Bit for bit, if both scan layer by layer without prefetch: norms alone are summed in another order. Products and
    sums of unrolled layers are contracted in other places."""
    zeros = [zero_of(offload, num_devices=num_devices, scan=scan) for offload in ("params", "none")]
    got, metrics = trained(zeros[0], scan, **settings)
    want, wanted = trained(zeros[1], scan, prefetch=0, **settings)
    assert_same(got, want, exact=scan)
    for ours, theirs in zip(metrics, wanted, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
    assert kinds(got.params) == [{"pinned_host"}, {"device"}] and kinds(want.params) == [{"device"}, {"device"}]


@pytest.mark.parametrize(
    ("precision", "settings"),
    [
        ("bf16", {"clip_norm": 0.05, "remat": zerojax.Remat(offload_inputs=True)}),
        ("bf16", {"num_microbatches": 3, "remat": "dots"}),
        ("fp16", {"num_microbatches": 3, "clip_norm": 0.05}),
        ("fp32", {"bucket_bytes": 512}),
    ],
    ids=str,
)
def test_every_precision_trains_as_on_the_devices(precision, settings):
    got, metrics = trained(zero_of("params", precision=precision), **settings)
    want, wanted = trained(zero_of("none", precision=precision), **settings)
    assert_same(got, want, rel=2**-6 if precision != "fp32" else 1e-5)  # some roundings to 16 bits, and their squares
    for ours, theirs in zip(metrics, wanted, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6 if precision == "fp32" else 2e-3)


def test_microbatches_without_a_loop_are_those_of_a_loop(monkeypatch):
    """As on TPUs."""
    (want, wanted), seen = trained(zero_of("params"), num_microbatches=3, remat="full"), []
    monkeypatch.setattr(host_memory, "on_tpus", lambda mesh: seen.append(mesh) or True)
    got, metrics = trained(zero_of("params"), num_microbatches=3, remat="full")
    assert seen
    assert_same(got, want)  # without a loop, XLA contracts other sums
    for ours, theirs in zip(metrics, wanted, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)


def test_a_number_of_devices_that_divides_nothing_trains_alike():
    found = [trained(zero_of(offload, num_devices=3), tokens=TOKENS[:9])[0].logical() for offload in ("params", "none")]
    assert_same(*found, rel=1e-5)


@pytest.mark.parametrize("num_devices", [4])
def test_a_leaf_of_several_units_gets_all_of_its_gradient(num_devices):
    found = [trained(zero_of(offload, num_devices=num_devices), loss=tied_loss)[0] for offload in ("params", "none")]
    assert_same(*found, rel=1e-5)


def test_frozen_parameters_are_read_from_host_memory_in_their_own_dtype():
    frozen = "embed", "layers/up"
    zeros = [zero_of(each, precision="bf16", frozen=frozen) for each in ("params", "none")]
    got, want = (trained(zero)[0] for zero in zeros)
    before = zeros[0].init(create, adamw()).params["layers"]["up"]
    assert got.params["layers"]["up"].dtype == jnp.float32
    assert kinds(got.params)[0] == {"pinned_host"}
    assert_same(got, want, rel=2**-6)
    np.testing.assert_array_equal(np.asarray(got.params["layers"]["up"]), np.asarray(before))


@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_a_skipped_step_changes_nothing_in_host_memory(num_microbatches):
    def poisoned(params, tokens):
        return loss(params, tokens) * jnp.where(tokens[0, 0] == VOCAB - 1, jnp.nan, 1)

    bad, good = TOKENS.copy(), np.minimum(TOKENS, VOCAB - 2)
    bad[:, 0] = VOCAB - 1
    zero = zero_of("params")
    state, step = zero.init(create, adamw()), zero.train_step(poisoned, num_microbatches=num_microbatches)
    state, _ = step(state, good)
    before = jax.tree.map(np.asarray, (state.params, state.opt_state))
    state, metrics = step(state, bad)
    assert int(metrics["skipped"]) == 1
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, (state.params, state.opt_state)), before)


def test_evaluation_streams_the_parameters_too():
    zero = zero_of("params")
    state = zero.init(create, adamw())
    expected = float(loss(create(), TOKENS))
    assert float(zero.eval_step(loss)(state, TOKENS)["loss"]) == pytest.approx(expected, rel=1e-5)
    rows = zerojax.evaluate(zero.eval_step(loss), state, TOKENS, batch_size=4)
    assert rows["loss"] == pytest.approx(expected, rel=1e-5)


def test_memory_of_a_device_does_not_grow_with_depth():
    """By the trace: what is saved of each layer grows, and nothing that is shaped like weights."""

    def peaks(num_layers):
        zero = zero_of("params", num_devices=1)
        repeated = lambda: (
            create()
            | {
                "layers": jax.tree.map(
                    lambda a: jnp.tile(a, (num_layers // LAYERS, *[1] * (a.ndim - 1))), create()["layers"]
                )
            }
        )
        state = zero.eval_init(repeated, adamw())
        memory = zero.train_step(loss, remat="full").memory(state, TOKENS)
        return {term.name: term.num_bytes for term in memory.terms}, memory.host_bytes

    (few, few_host), (many, many_host) = peaks(8), peaks(16)
    saved = 8 * 12 * 6 * WIDTH * 4  # the inputs of layers
    vectors = 8 * 2 * 4 * WIDTH
    assert saved <= sum(many.values()) - sum(few.values()) <= saved + 3 * vectors
    assert many_host - few_host == 8 * 16 * 2 * WIDTH * HIDDEN + 2 * 4 * 8 * WIDTH  # and moments of vectors


def test_what_is_in_host_memory_is_explained():
    zero = zero_of("params", precision="bf16")
    state = zero.init(create, adamw())
    explanation = zero.explain(state)
    assert {"params/layers/up", "grads/layers/up", "master/layers/up"} <= {
        row.path for row in explanation.rows if row.category == "host memory"
    }
    assert {row.path for row in explanation.rows if row.category == "params"} == {"layers/scale", "temperature"}
    assert "in host memory: 21.95 KiB (parameters 3.11 KiB, optimizer state 18.84 KiB)" in repr(state)
    assert "offload='params'" in repr(zero)


def test_the_audit_of_simulated_devices_reads_what_it_can():
    zero = zero_of("params")
    state = zero.init(create, adamw())
    audit = zero.train_step(loss).audit(state, TOKENS)
    assert audit["sharded"].verdict is audit["aliased state"].verdict is Verdict.OK
    assert not any(finding.verdict is Verdict.BROKEN for finding in audit.findings)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"stage": 2}, r"stage 2 \(P_os\+g\) over 4 devices\n  fix:      stage=3 on a mesh without replicas"),
        ({"mesh": {"replica": 2}}, r"over 2 devices, with 2 replicas"),
        ({"offload": "weights"}, r"unknown value 'weights'\n  fix:      'none', 'optimizer' or 'params'"),
    ],
)
def test_what_cannot_be_in_host_memory_is_refused(options, text):
    mesh = zerojax.make_mesh(devices=jax.devices()[:4], **options.pop("mesh", {}))
    with pytest.raises(ValueError, match=text):
        Zero(mesh, **{"stage": 3, "offload": "params"} | options)


def test_an_optimizer_that_needs_all_gradients_is_refused_by_name():
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    with pytest.raises(ValueError, match=r"offload: .*clip_by_global_norm.* cannot be computed for one piece"):
        zero_of("params").init(create, tx)
    zero_of("optimizer").init(create, tx)  # whose gradients are on the devices


def test_layers_of_two_loops_are_refused_before_anything_compiles():
    def twice(params, tokens):
        h, _ = jax.lax.scan(layer, params["embed"][tokens[:, :-1]], params["layers"])
        h, _ = jax.lax.scan(layer, h, params["layers"])
        return jnp.mean(h**2)

    zero = zero_of("params")
    state = zero.init(create, adamw())
    with pytest.raises(ValueError, match=r"offload: the gradients of layers in host memory are computed by one loop"):
        zero.train_step(twice)(state, TOKENS)


@pytest.mark.parametrize("offload", ["params", "optimizer"])
def test_other_values_and_another_optimizer_go_where_the_state_is(offload):
    zero, plain = zero_of(offload, "bf16"), zero_of("none", "bf16")
    (state, _), (want, _) = trained(zero), trained(plain)
    halved = jax.tree.map(lambda a: np.asarray(a) / 2, state.master)
    assert_same(zero.with_params(state, halved), state, rel=1.0)
    with_half = zero.with_params(state, halved)
    np.testing.assert_array_equal(np.asarray(with_half.params["head"]), np.asarray(halved["head"].astype(jnp.bfloat16)))
    again, expected = zero.with_optimizer(state, optax.sgd(0.1)), plain.with_optimizer(want, optax.sgd(0.1))
    assert_same(again, expected, rel=2**-6)
    found = [kinds(s.params) for s in (state, with_half, again)]
    assert found == [[{"pinned_host" if offload == "params" else "device"}, {"device"}]] * 3
    again, metrics = zero.train_step(loss)(again, TOKENS)
    assert np.isfinite(metrics["loss"])


def test_gradients_of_parameters_on_the_devices_are_those_of_any_zero():
    zero, plain = zero_of("params"), zero_of("none")
    value, grads = jax.jit(zero.value_and_grad(loss))(zero.shard(create()), TOKENS)
    expected, wanted = jax.jit(plain.value_and_grad(loss))(plain.shard(create()), TOKENS)
    assert float(value) == float(expected)
    jax.tree.map(np.testing.assert_array_equal, grads, wanted)


def test_sums_are_cut_into_contiguous_parts_if_possible():
    for shape, dim, size in [((512, 64), 0, 256), ((509, 64), 1, 32), ((509, 67), 0, 509), ((3, 515, 64), 0, 1)]:
        assert host_arrays.cut_dim(shape) == (dim, size)


@pytest.mark.parametrize("num_layers", [1, 3, *(pytest.param(num, marks=pytest.mark.full) for num in (2, 5))])
def test_scans_of_any_length(num_layers):
    """The first and the last layer are outside of the loop, and a short scan has no loop."""

    def short(params, tokens):
        h, _ = jax.lax.scan(layer, params["embed"][tokens[:, :-1]], params["layers"])
        return optax.softmax_cross_entropy_with_integer_labels(h @ params["head"], tokens[:, 1:]).mean()

    def init():
        params = create()
        return params | {"layers": jax.tree.map(lambda a: jnp.concatenate([a, a])[:num_layers], params["layers"])}

    losses = {}
    for offload in "params", "none":
        zero = zero_of(offload)
        state, step = zero.init(init, adamw()), zero.train_step(short)
        losses[offload] = []
        for _ in range(STEPS):
            state, metrics = step(state, TOKENS)
            losses[offload].append(float(metrics["loss"]))
    np.testing.assert_allclose(losses["params"], losses["none"], rtol=1e-6)


def follow(jaxpr, given, found):
    """Which outputs follow from those arguments that are flagged alone; adds whether the place of each slice of host
    memory does."""
    flags = dict(zip(jaxpr.invars, given, strict=True))
    follows = lambda atom: flags.get(atom, False) if jaxprs.is_var(atom) else True
    for equation in jaxpr.eqns:
        read, name = list(map(follows, equation.invars)), equation.primitive.name
        if name.startswith("dynamic_") and equation.invars[0].aval.memory_space == jax.memory.Space.Host:
            found.append(all(read[1 if name == "dynamic_slice" else 2 :]))
        results = [all(read)] * len(equation.outvars)
        if jaxprs.is_call(equation):
            results = follow(*jaxprs.sub_jaxprs(equation), read, found)
        flags.update(zip(equation.outvars, results, strict=True))
    return list(map(follows, jaxpr.outvars))


@pytest.mark.parametrize("offload", ["optimizer", "params"])
def test_the_places_of_slices_follow_from_the_number_of_the_iteration(offload):
    """Otherwise the compiler for GPUs makes kernels of the copies: no place depends on a value, an event or a table."""
    zero, found = zero_of(offload, num_devices=1), []
    jaxpr = zero.train_step(loss).trace(zero.init(create, adamw()), TOKENS).jaxpr
    for scan in (e for e in equations(jaxpr) if e.primitive.name == "scan"):
        num_consts, num_carry, closed, *_ = jaxprs.scan_params(scan)
        body = closed.jaxpr
        carried = body.invars[num_consts : num_consts + num_carry]
        counters = {v for v in carried if v.aval.shape == () and v.aval.dtype == jnp.int32}
        follow(body, [v in counters for v in body.invars], found)
    assert len(found) > 8 and all(found)


def test_scalars_wait_for_events_except_on_cpus():
    """Where XLA would contract other products and sums in a kernel that selects a scalar."""
    scalars = jax.jit(lambda scalars, event: host_arrays.scalars_after(scalars, [event]))
    given = [jnp.bool_(True), jnp.float32(3)], jnp.float32(np.nan)
    for platform, waits in [("cpu", False), ("cuda", True), ("tpu", True)]:
        text = scalars.trace(*given).lower(lowering_platforms=(platform,)).as_text()
        assert ("sign" in text) == waits
        assert scalars(*given) == [True, 3]
