"""An optimizer's state in host memory: the same numbers as on the devices, bit for bit, and the same checkpoints."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import zerojax
from zerojax import Verdict, Zero
from zerojax.offload import host_pieces
from zerojax.offload.split_update import Operand, Rows, SplitUpdate
from zerojax.program import jaxprs
from zerojax.sharding import placement
from zerojax.step import creation
from zerojax.utils import versions

LAYERS, WIDTH, HIDDEN, VOCAB = 6, 16, 32, 67  # 67 rows: shards of the head have zeros at their end
STEPS = 3
IS_EXACT = versions.parse(jax.__version__) < (0, 11)  # whether XLA contracts the update alike in both programs


def create():
    keys = jax.random.split(jax.random.key(0), 4)
    normal = lambda key, *shape: 0.1 * jax.random.normal(key, shape)
    return {
        "embed": normal(keys[0], VOCAB, WIDTH),
        "layers": {
            "up": normal(keys[1], LAYERS, WIDTH, HIDDEN),
            "down": normal(keys[2], LAYERS, HIDDEN, WIDTH),
            "scale": jnp.ones((LAYERS, WIDTH)),
        },
        "head": normal(keys[3], WIDTH, VOCAB),
        "temperature": jnp.ones(()),
    }


def loss(params, tokens):
    def layer(h, weights):
        return h + jax.nn.gelu(h * weights["scale"] @ weights["up"]) @ weights["down"], None

    h, _ = jax.lax.scan(layer, params["embed"][tokens[:, :-1]] * params["temperature"], params["layers"])
    logits = (h @ params["head"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def optimizer():
    return optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(optax.linear_schedule(1e-2, 1e-3, 5)))


TOKENS = np.random.default_rng(0).integers(0, VOCAB, (16, 7))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(host_pieces, "PIECES_BYTES", 4096)  # the arrays of one device are 24 KiB


def zero_of(offload, stage=3, precision="fp32", num_devices=4):
    mesh = zerojax.make_mesh(devices=jax.devices()[:num_devices])
    return Zero(mesh, stage, precision, stacked="layers/*", offload=offload)


def trained(offload, stage, precision, num_devices=4, batch=TOKENS, **settings):
    """(State after some steps, metrics of each)."""
    zero = zero_of(offload, stage, precision, num_devices)
    state, step = zero.init(create, optimizer()), zero.train_step(loss, **settings)
    metrics = []
    for _ in range(STEPS):
        state, found = step(state, batch)
        metrics.append({name: float(value) for name, value in found.items()})
    return state, metrics


def arrays(state):
    return [np.asarray(a) for a in jax.tree.leaves((state.params, state.master, state.opt_state))]


def assert_same(got, want, precision):
    """Bit for bit in fp32. A scale of the gradients, or zeros at the end of shards, are part of the kernel of the
    update, which then may contract other products and sums, as it may with later versions of XLA: the last bit of a
    number may differ, and after it a value that is rounded to 16 bits (by 2**-8), and its square."""
    for a, b in zip(arrays(got), arrays(want), strict=True):
        if precision == "fp32" and IS_EXACT:
            np.testing.assert_array_equal(a, b)
        else:
            a, b = a.astype(np.float32), b.astype(np.float32)
            assert np.abs(a - b).max() <= (2**-7 if precision in ("bf16", "fp16") else 1e-6) * np.abs(b).max()


def kinds(tree):
    return {(a.ndim > 0, a.sharding.memory_kind) for a in jax.tree.leaves(tree)}


CASES = [
    ("fp32", 2, {"num_microbatches": 2}),
    ("fp32", 3, {}),
    ("bf16", 1, {"clip_norm": 0.5}),
    ("fp16", 3, {}),
    *(pytest.param("fp32", stage, {}, marks=pytest.mark.full) for stage in (0, 1)),
    pytest.param("bf16", 3, {"clip_norm": 0.5, "remat": "full"}, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("precision", "stage", "settings"), CASES)
def test_training_is_that_of_an_optimizer_on_the_devices(precision, stage, settings):
    got, metrics = trained("optimizer", stage, precision, **settings)
    want, wanted = trained("none", stage, precision, **settings)
    assert_same(got, want, precision)
    for ours, theirs in zip(metrics, wanted, strict=True):
        norms = ours.pop("param_norm"), theirs.pop("param_norm")  # summed in another order
        assert norms[0] == pytest.approx(norms[1], rel=1e-6)
        assert ours == pytest.approx(theirs, rel=1e-6 if precision == "fp32" else 1e-3)
    optimizer_state = got.master, got.opt_state
    assert kinds(optimizer_state) == {(True, "pinned_host"), (False, "device")} and len(kinds(got.params)) == 2
    assert {kind for _, kind in kinds((want.params, want.master, want.opt_state, got.params))} == {"device"}


@pytest.mark.parametrize(
    "tx",
    [
        optax.sgd(0.1),
        optax.masked(optax.adam(1e-2), lambda params: {name: name == "head" for name in params}),
        optax.lion(1e-3),
    ],
    ids=["no state", "state of one parameter", "one moment"],
)
def test_parameters_without_a_state_are_updated_too(tx):
    found = []
    for offload in ("optimizer", "none"):
        zero = zero_of(offload)
        state, step = zero.init(create, tx), zero.train_step(loss)
        for _ in range(STEPS):
            state, _ = step(state, TOKENS)
        found.append(state)
    assert_same(*found, "a sum that may be contracted")
    assert not np.array_equal(np.asarray(found[0].params["layers"]["up"]), np.asarray(create()["layers"]["up"]))


def test_any_number_of_devices_trains_alike():
    on_four, _ = trained("optimizer", 3, "fp32")
    batch = np.tile(TOKENS[:2], (6, 1))
    for num_devices in (1, 3):
        got, metrics = trained("optimizer", 3, "fp32", num_devices, batch)
        want, wanted = trained("none", 3, "fp32", num_devices, batch)
        assert metrics[-1]["loss"] == pytest.approx(wanted[-1]["loss"], rel=1e-6)
        assert_same(got.logical(), want.logical(), "fp32" if num_devices == 1 else "with zeros")
    assert on_four.opt_state[1][0].mu["head"].shape == (WIDTH, VOCAB)


@pytest.mark.parametrize(("model", "num_devices"), [(create, 3), (create(), 4)], ids=["function", "arrays"])
def test_a_state_is_created_in_parts(monkeypatch, model, num_devices):
    """Each part is a program. Together they create what one program does, with a parameter beside its master copy."""
    want = zero_of("none", 3, "bf16", num_devices).init(model, optimizer())
    zero, made = zero_of("optimizer", 3, "bf16", num_devices), []
    monkeypatch.setattr(creation, "PART_BYTES", 2048)
    divide = creation.parts
    monkeypatch.setattr(creation, "parts", lambda abstract: made.extend(divide(abstract)) or made)
    got = zero.init(model, optimizer())
    for a, b in zip(arrays(got), arrays(want), strict=True):
        np.testing.assert_array_equal(a, b)
    assert kinds((got.master, got.opt_state)) == {(True, "pinned_host"), (False, "device")}
    paths = [placement.path_text(path) for path, _ in jax.tree_util.tree_leaves_with_path(got)]
    assert len(made) > 5 and sorted(k for part in made for k in part) == list(range(len(paths)))
    for part in made:
        names = [paths[k] for k in part]
        assert {n.partition("/")[2] for n in names if n.startswith("params/")} == {
            n.partition("/")[2] for n in names if n.startswith("master/")
        }


def test_zeros_at_the_end_of_shards_stay_zeros():
    zero = zero_of("optimizer", num_devices=3)
    plus_one = optax.stateless(lambda updates, params: jax.tree.map(lambda u: u + 1, updates))  # of zeros too
    tx = optax.chain(plus_one, optax.sgd(0.1, momentum=0.9))
    state, _ = zero.train_step(loss)(zero.init(create, tx), np.tile(TOKENS[:2], (6, 1)))
    leaves = {leaf.path: leaf for leaf in state.layout.leaves}
    moments = dict(zip(leaves, jax.tree.leaves(optax.tree.get(state.opt_state, "trace")), strict=True))
    padded = {path: leaf for path, leaf in leaves.items() if leaf.num_zeros}
    assert padded
    for path, leaf in padded.items():
        stored = np.moveaxis(np.asarray(moments[path]), leaf.dim, 0)
        assert not stored[leaf.shape[leaf.dim] :].any() and stored[: leaf.shape[leaf.dim]].any()


def test_a_step_that_is_skipped_changes_nothing_in_host_memory():
    zero = zero_of("optimizer", precision="bf16")
    state = zero.init(create, optimizer())
    before = arrays(state)
    step = zero.train_step(lambda params, batch: loss(params, batch["tokens"]) * batch["factor"].mean())
    factor = np.full(len(TOKENS), np.nan, np.float32)
    state, metrics = step(state, {"tokens": TOKENS, "factor": factor})
    assert metrics["skipped"] == 1
    for a, b in zip(arrays(state), before, strict=True):
        np.testing.assert_array_equal(a, b)
    state, metrics = step(state, {"tokens": TOKENS, "factor": np.ones_like(factor)})
    assert metrics["skipped"] == 1 and np.isfinite(metrics["loss"])
    assert any((a != b).any() for a, b in zip(arrays(state), before, strict=True))


@pytest.mark.parametrize(("saved", "restored", "stage"), [("optimizer", "none", 0), ("optimizer", "optimizer", 2),
                                                          ("none", "optimizer", 3)])  # fmt: skip
def test_checkpoints_do_not_depend_on_the_memory(tmp_path, saved, restored, stage):
    state, _ = trained(saved, 3, "bf16")
    with zero_of(saved, 3, "bf16").checkpoints(tmp_path, every=1) as checkpoints:
        checkpoints.save(state)
    zero = zero_of(restored, stage, "bf16")
    with zero.checkpoints(tmp_path, every=1) as checkpoints:
        got, step = checkpoints.resume(zero.init(create, optimizer(), seed=1))
    assert step == STEPS
    for a, b in zip(arrays(got.logical()), arrays(state.logical()), strict=True):
        np.testing.assert_array_equal(a, b)
    assert ((True, "pinned_host") in kinds(got.opt_state)) == (restored == "optimizer")
    _, metrics = zero.train_step(loss)(got, TOKENS)
    assert np.isfinite(metrics["loss"])


def test_reports_count_host_memory_apart():
    zero = zero_of("optimizer", precision="bf16")
    state, step = zero.eval_init(create, optimizer()), zero.train_step(loss)
    on_devices = zero_of("none", precision="bf16")
    whole = on_devices.explain(on_devices.eval_init(create, optimizer())).totals
    found = zero.explain(state)
    assert found.totals["host memory"] + found.totals["optimizer"] == whole["optimizer"] > found.totals["host memory"]
    text = " ".join(str(found).split())
    assert "of host memory" in text and "host memory: " in text and "in host memory" in repr(state)
    memory = step.memory(state, TOKENS)
    assert memory.host_bytes == found.totals["host memory"]
    assert (
        memory.arguments_bytes
        < on_devices.train_step(loss).memory(on_devices.eval_init(create, optimizer()), TOKENS).arguments_bytes
    )
    audit = step.audit(state, TOKENS)
    assert {finding.verdict for finding in audit.findings} <= {Verdict.OK, Verdict.NOT_READ}
    assert "offload='optimizer'" in repr(zero)


def test_memory_is_estimated_without_devices():
    totals = []
    for mesh in zerojax.make_mesh(devices=4), zerojax.make_mesh(devices=jax.devices()[:4]):
        zero = Zero(mesh, precision="bf16", stacked="layers/*", offload="optimizer")
        memory = zero.train_step(loss).memory(
            zero.eval_init(create, optimizer()), jax.ShapeDtypeStruct(TOKENS.shape, TOKENS.dtype)
        )
        totals.append((memory.peak_bytes, memory.host_bytes))
    assert totals[0] == totals[1]


def test_evaluation_is_that_of_an_optimizer_on_the_devices():
    losses = []
    for offload in "optimizer", "none":
        zero = zero_of(offload)
        losses.append(float(zero.eval_step(loss)(zero.init(create, optimizer()), TOKENS)["loss"]))
    assert losses[0] == losses[1]


def test_another_optimizer_starts_in_host_memory_too():
    state, _ = trained("optimizer", 3, "bf16")
    zero = zero_of("optimizer", precision="bf16")
    state = zero.with_optimizer(state, optax.sgd(0.1, momentum=0.9))
    assert (True, "pinned_host") in kinds(state.opt_state)
    _, metrics = zero.train_step(loss)(state, TOKENS)
    assert np.isfinite(metrics["loss"])


# What cannot be offloaded


@pytest.mark.parametrize(
    ("name", "tx"),
    [
        ("scale_by_trust_ratio", optax.lamb(1e-3)),
        ("clip_by_global_norm", optax.chain(optax.adam(1e-3), optax.clip_by_global_norm(1.0))),
        ("MultiSteps", optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation()),
    ],
)
def test_an_optimizer_that_couples_elements_is_refused_by_name(name, tx):
    with pytest.raises(ValueError, match=rf"^offload: {name} cannot be computed for one piece"):
        zero_of("optimizer").eval_init(create, tx)
    state = zero_of("optimizer").init(create, optax.sgd(0.1))
    with pytest.raises(ValueError, match=name):
        zero_of("optimizer").with_optimizer(state, tx)
    zero_of("none").eval_init(create, tx)


def test_an_optimizer_that_mixes_the_moments_of_two_parameters_is_refused():
    params = {"a": jnp.ones((8, 4)), "b": jnp.ones((8, 4))}

    def update(grads, state, params=None):
        return jax.tree.map(jnp.add, grads, {"a": state.trace["b"], "b": state.trace["a"]}), state

    tx = optax.GradientTransformation(optax.trace(0.9).init, update)
    with pytest.raises(ValueError, match=r"^offload: the optimizer cannot be computed for one piece"):
        Zero(zerojax.make_mesh(), offload="optimizer").eval_init(lambda: params, tx)


def test_an_unknown_offload_is_refused():
    with pytest.raises(ValueError, match="offload: unknown value 'disk'"):
        zero_of("disk")


def test_a_mesh_with_a_model_axis_is_refused():
    with pytest.raises(ValueError, match="'model' split no batch"):
        Zero(zerojax.make_mesh(model=2), offload="optimizer")
    Zero(zerojax.make_mesh(model=1), offload="optimizer")


# The split of an update

PARAMS = {"a": jnp.full((6, 4), 0.3), "b": jnp.full((4,), 2.0)}
GRADS = {"a": jnp.linspace(-0.4, 0.6, 24).reshape(6, 4), "b": jnp.arange(4.0) - 1.5}
SPLIT = {
    "clipped adamw": optimizer(),
    "lion": optax.lion(1e-3),
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(1e-2),
    "amsgrad": optax.amsgrad(1e-3),
    "noise": optax.chain(optax.add_noise(0.1, 0.1, 0), optax.adam(1e-3)),
    "masked": optax.masked(optax.adam(1e-2), {"a": True, "b": False}),
    "schedule_free": contrib.schedule_free_adamw(1e-3),
    "ema": optax.chain(optax.adam(1e-3), optax.ema(0.9)),
    "adagrad": optax.adagrad(0.1),
    "low bits": zerojax.low_bit_moments(optax.adamw(1e-3), 16, exempt=(), min_size=0),
}


@pytest.mark.parametrize("name", SPLIT)
def test_pieces_of_an_update_are_those_of_the_whole(name):
    tx = SPLIT[name]
    flat, tree = jax.tree.flatten((GRADS, tx.init(PARAMS), PARAMS))

    def update(*flat):
        grads, state, params = jax.tree.unflatten(tree, flat)
        updates, state = tx.update(grads, state, params)
        return jax.tree.leaves((optax.apply_updates(params, updates), state))

    want = update(*flat)
    shapes = [PARAMS["a"].shape, PARAMS["b"].shape]
    leaf_of = lambda a: shapes.index(a.shape) if a.shape in shapes else None
    arguments = [Operand(leaf_of(a), k > 1 and leaf_of(a) is not None) for k, a in enumerate(flat)]
    results = [Operand(leaf_of(a), leaf_of(a) is not None) for a in want]
    closed = jaxprs.inlined(jaxprs.traced(update, *flat)[0])
    split = SplitUpdate(closed, arguments, results, dict(enumerate(map(Rows, "ab", shapes))))
    once = split.compute_whole({k: a for k, a in enumerate(flat) if not arguments[k].in_host})
    got = split.whole_results(once)
    for leaf, shape in enumerate(shapes):
        half = lambda a, k, size=shape[0] // 2: a[k * size : (k + 1) * size]
        pieces = [
            split.compute_piece(
                leaf,
                {p: half(flat[p], k) for p, argument in enumerate(arguments) if argument.leaf == leaf},
                {v: once[v] for v in split.scalars} | {v: half(once[v], k) for v, of in split.sliced if of == leaf},
                (shape[0] // 2, *shape[1:]),
                [k * (shape[0] // 2), *[0] * (len(shape) - 1)],
            )[0]
            for k in range(2)
        ]
        got |= {p: jnp.concatenate([piece[p] for piece in pieces]) for p in pieces[0]}
    assert len(got) == len(want)
    for k, a in enumerate(want):
        if jnp.issubdtype(a.dtype, jnp.number):
            np.testing.assert_allclose(got[k], a, rtol=1e-5, atol=1e-7)


# Pieces


def test_pieces_are_contiguous_and_whole_tiles():
    for shape, wanted, grid in [
        ((16, 4096, 12288), 64, (16, 4, 1)),
        ((16, 4096, 12288), 4, (4, 1, 1)),
        ((32768, 4096), 256, (256, 1)),
        ((50257, 768), 100, (1733, 1)),
        ((7, 13), 100, (7, 1)),
        ((4096,), 100, (4,)),
        ((5,), 2, (5,)),
        ((1, 8), 1, (1, 1)),
    ]:
        pieces = host_pieces.cut(shape, wanted, zerojax.make_mesh())
        assert pieces.grid == grid and tuple(n * size for n, size in zip(grid, pieces.piece, strict=True)) == shape


def test_a_tpu_cuts_one_dim():
    class Device:
        platform = "tpu"

    mesh = functools.partial(np.array, [Device()])
    mesh.devices = np.array([Device()])
    assert host_pieces.cut((16, 4096, 12288), 64, mesh).grid == (1, 64, 1)
    assert host_pieces.cut((16, 4096, 12288), 16, mesh).grid == (16, 1, 1)
    assert host_pieces.cut((4096,), 4, mesh).grid == (1,)
    assert host_pieces.cut((357, 1024), 357, mesh).grid == (1, 1)  # which has no whole tiles
    assert host_pieces.cut((12, 357, 1024), 357, mesh).grid == (12, 1, 1)
    assert host_pieces.cut((50304, 192), 3, mesh).grid == (1, 3)  # which is stored column by column
    assert host_pieces.cut((12, 768, 192), 24, mesh).grid == (1, 1, 24)
    assert host_pieces.cut((515, 60), 4, mesh).grid == (1, 1)
    assert host_pieces.cut((48, 100, 4800), 20, mesh).grid == (1, 20, 1)
    assert host_pieces.cut((357, 1024), 357, zerojax.make_mesh()).grid == (357, 1)
