"""Tensor parallelism with ZeRO: annotated leaves are divided over a `model` axis too, and training is the same."""

import functools

import flax.linen as nn
import gpt
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from gpt import Config
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from support import plain, traffic, zoo
from support.parity import STEPS, TOLERANCES, assert_close, batches, optimizer, train

import zerojax
from zerojax import Zero
from zerojax.plan.transformer import cudnn_attention_for_tracing
from zerojax.sharding.axes import Dims

DATA, MODEL = 4, 2
CONFIG = Config(width=16, layers=2, heads=2, vocab=64, seq=8, annotated=True)
SPECS = {  # at stage 3, by the end of the path; a stacked leaf has one more dim in front
    "qkv/kernel": P("data", "model"),
    "up/kernel": P("data", "model"),
    "up/bias": P("model"),
    "out/kernel": P("model", "data"),
    "down/kernel": P("model", "data"),
    "embed/embedding": P("model", "data"),
    "head/kernel": P("data", "model"),
}


# A Linen model with logical axis names, like the NNX model of gpt.py, which names mesh axes

RULES = (("hidden", "model"), ("heads", "model"), ("vocab", "model"))
lecun = nn.initializers.lecun_normal()


def logical(*names, init=lecun):
    return nn.with_logical_partitioning(init, names, rules=RULES)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x_BSD, _=None):
        b, s, w = x_BSD.shape
        dense = functools.partial(nn.Dense, use_bias=False)
        qkv = dense(3 * w, kernel_init=logical("embed", "heads"), name="qkv")(nn.LayerNorm()(x_BSD))
        mixed = jax.nn.dot_product_attention(
            *jnp.moveaxis(qkv.reshape(b, s, CONFIG.heads, 3, -1), -2, 0), is_causal=True
        )
        mixed = jax.lax.with_sharding_constraint(mixed, P(None, None, "model")).reshape(b, s, w)
        x_BSD = x_BSD + dense(w, kernel_init=logical("heads", "embed"), name="out")(mixed)
        hidden = nn.Dense(
            4 * w, kernel_init=logical("embed", "hidden"), bias_init=logical("hidden", init=nn.zeros), name="up"
        )(nn.LayerNorm()(x_BSD))
        return x_BSD + dense(w, kernel_init=logical("hidden", "embed"), name="down")(nn.gelu(hidden)), None


class LinenGPT(nn.Module):
    """Layers have logical axis names; embedding and head name mesh axes."""

    scan: bool

    @nn.compact
    def __call__(self, tokens_BS):
        split = lambda *names: nn.with_partitioning(lecun, names)
        x_BSD = nn.Embed(CONFIG.vocab, CONFIG.width, embedding_init=split("model", None), name="embed")(tokens_BS)
        if self.scan:
            options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": CONFIG.layers}
            blocks = nn.scan(Block, metadata_params={nn.PARTITION_NAME: None}, **options)
            x_BSD, _ = blocks(name="blocks")(x_BSD, None)
        else:
            for i in range(CONFIG.layers):
                x_BSD, _ = Block(name=f"blocks_{i}")(x_BSD)
        return nn.Dense(CONFIG.vocab, use_bias=False, kernel_init=split(None, "model"), name="head")(x_BSD)


def batch(seed):
    return {"tokens": np.random.default_rng(seed).integers(0, CONFIG.vocab, (32, CONFIG.seq + 1), dtype=np.int32)}


def nnx_model(scan, attention=None):
    config = Config(**{**vars(CONFIG), "scan": scan, "attention": attention})
    return zoo.Model("nnx", lambda rngs: gpt.GPT(config, rngs), gpt.loss, batch)


def linen_model(scan):
    module = LinenGPT(scan)
    loss = lambda variables, batch: gpt.loss(lambda tokens: module.apply(variables, tokens), batch)
    return zoo.Model("linen", lambda key: module.init(key, jnp.zeros((1, CONFIG.seq), jnp.int32)), loss, batch)


# In the last one, each device computes attention over its own heads, as a kernel that JAX cannot divide needs it.
MODELS = {"nnx": nnx_model, "linen": linen_model, "nnx_shard_map": functools.partial(nnx_model, attention="xla")}


# Parity


@functools.cache
def reference(kind, scan, precision, k):
    """The same model on one device, where the model axis has size 1."""
    model = MODELS[kind](scan)
    with jax.set_mesh(zerojax.make_mesh(model=1, devices=jax.devices()[:1])):
        return plain.run(model, optimizer(), batches(model), precision=precision, num_microbatches=k, num_devices=DATA)


@functools.cache
def run(kind, scan, stage, precision="fp32", k=1, remat="none"):
    """(Zero, trajectory, last state)."""
    model, zero = MODELS[kind](scan), Zero(zerojax.make_mesh(model=MODEL), stage, precision)
    return zero, *train(zero, model, batches(model), num_microbatches=k, remat=remat)


def group(kind, scan, precision, k):
    """The xdist group of tests that share a plain run in one process."""
    return f"tensor-{kind}-{scan}-{precision}-{k}"


PARTITIONED = zerojax.Remat(partition_inputs=True)
PARTITIONED_ON_HOST = zerojax.Remat(partition_inputs=True, offload_inputs=True)
REMAT_NAMES = {PARTITIONED: "partitioned", PARTITIONED_ON_HOST: "partitioned_in_host_memory"}


def cases():
    chosen = [
        *(("nnx", False, stage, "fp32", 1, "none") for stage in (0, 3)),
        ("linen", True, 3, "bf16", 1, "none"),
        ("nnx", True, 3, "fp32", 4, PARTITIONED_ON_HOST),
        ("nnx_shard_map", True, 3, "fp32", 1, "dots"),
    ]
    more = [
        *(("nnx", False, stage, "fp32", 1, "none") for stage in (1, 2)),
        *(("linen", True, 3, "fp32", k, "none") for k in (1, 4)),
        ("nnx", True, 3, "fp32", 4, "full"),
        ("nnx", False, 3, "fp32", 1, PARTITIONED),
        ("linen", True, 0, "fp32", 1, PARTITIONED),
        *(("linen", False, stage, "fp32", 1, "none") for stage in range(4)),
        *(("linen", True, stage, "bf16", 4, "none") for stage in range(4)),
        *(("nnx", True, stage, precision, 1, "full") for stage in range(4) for precision in ("fp32", "bf16")),
        *(("nnx", False, stage, "fp16", 4, "none") for stage in range(4)),
    ]
    for case in (*chosen, *more):
        kind, scan, stage, precision, k, remat = case
        layers, saved = "scanned" if scan else "unrolled", REMAT_NAMES.get(remat, remat)
        name = f"{kind}-{layers}-stage{stage}-{precision}-k{k}-{saved}"
        marks = [pytest.mark.xdist_group(group(kind, scan, precision, k))]
        yield pytest.param(*case, marks=[*marks, pytest.mark.full] if case in more else marks, id=name)


@pytest.mark.parametrize(("kind", "scan", "stage", "precision", "k", "remat"), list(cases()))
def test_training_follows_the_plain_step(kind, scan, stage, precision, k, remat):
    """Includes gradient norms, in which a leaf that is divided over the model axis counts once."""
    zero, got, state = run(kind, scan, stage, precision, k, remat)
    assert len(got.losses) == STEPS and got.metrics[-1]["skipped"] == 0
    assert_close(got, reference(kind, scan, precision, k), **TOLERANCES[precision])
    norm = np.sqrt(sum(np.sum(np.square(a.astype(np.float64))) for a in got.end))
    assert got.metrics[-1]["param_norm"] == pytest.approx(norm, rel=1e-5)
    expected = zero.eval_init(MODELS[kind](scan).create, state.layout.tx)
    shardings = lambda state: [a.sharding for a in jax.tree.leaves(state)]
    assert shardings(state) == shardings(expected), "a step changed the shardings of the state"


# Placement


def abstract(stage, *, kind="nnx", scan=False, precision="bf16", **options):
    zero = Zero(zerojax.make_mesh(model=MODEL), stage, precision, **options)
    return zero, zero.eval_init(MODELS[kind](scan).create, optimizer())


@pytest.mark.parametrize(("kind", "scan"), [("nnx", False), ("linen", True)])
def test_the_model_axis_stays_at_every_stage(kind, scan):
    """For parameters, master copy and moments. The data axis is in another dim, and depends on the stage."""
    for stage in range(4):
        _, state = abstract(stage, kind=kind, scan=scan)
        trees = {"params": (state.params, 3), "master": (state.master, 1), "mu": (state.opt_state[0].mu, 1)}
        for name, (tree, sharded_from) in trees.items():
            found = 0
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
                path = jax.tree_util.keystr(path, simple=True, separator="/")
                want = next((spec for end, spec in SPECS.items() if path.endswith(end)), None)
                if want is None:
                    assert "model" not in str(leaf.sharding.spec)
                    continue
                entries = [entry if entry == "model" or stage >= sharded_from else None for entry in want]
                entries = [None] * (scan and "blocks" in path) + entries
                while entries[-1] is None:
                    entries.pop()
                assert leaf.sharding.spec == P(*entries), (stage, name, path)
                found += 1
            assert found == 2 + (5 if scan else 5 * CONFIG.layers)


@pytest.mark.xdist_group(group("nnx", False, "fp32", 1))
@pytest.mark.parametrize("stage", [0, 3])
def test_bytes_per_device_are_those_of_the_arrays(stage):
    zero, _, state = run("nnx", False, stage)
    device_bytes = lambda tree: sum(a.addressable_shards[0].data.nbytes for a in jax.tree.leaves(tree))
    explanation = zero.explain(state)
    assert explanation.totals["params"] == device_bytes(state.params)
    assert explanation.totals["optimizer"] == device_bytes(state.opt_state)
    size = lambda leaf: 4 * leaf.size // (MODEL if leaf.model_spec else 1)
    formula = sum(map(size, state.layout.leaves)) / (DATA if stage == 3 else 1)
    assert explanation.formula["params"] == formula
    replicated = {(row.path, row.reason) for row in explanation.replicated if row.category == "params"}
    biases = {(f"blocks/{i}/up/bias", "replicated: dim 0 is over model") for i in range(CONFIG.layers)}
    assert replicated == (biases if stage == 3 else set())
    text = str(explanation)
    assert "P('data', 'model')" in text or stage == 0


@pytest.mark.parametrize("kind", ["linen"])
def test_initial_values_do_not_depend_on_the_mesh(kind):
    model = MODELS[kind](scan=False)
    states = [Zero(zerojax.make_mesh(model=size), 3).init(model.create, optax.sgd(0.1)) for size in (1, 2, 8)]
    for other in states[1:]:
        for a, b in zip(jax.tree.leaves(states[0].params), jax.tree.leaves(other.params), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


# Communication


@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_devices_send_their_part_of_a_leaf(stage, scan):
    """Over the data axes, a device sends the ZeRO formula for its part of the leaves along the model axis."""
    zero, state = abstract(stage, scan=scan)
    step = zero.train_step(gpt.loss)
    sent = traffic.sent(traffic.collectives_of_step(step, state, batch(0)))["bfloat16"] * DATA / (DATA - 1)
    size = lambda leaf: leaf.size // (MODEL if leaf.model_spec else 1)
    replicated = sum(size(leaf) for leaf in state.layout.leaves if leaf.dim is None)
    psi = sum(map(size, state.layout.leaves)) - replicated
    once = sum(size(f) for f in state.layout.leaves if traffic.is_gathered_once(f)) - replicated
    assert replicated > 0
    assert sent == {0: 2 * psi, 1: 2 * psi, 2: 2 * psi, 3: 3 * psi - once}[stage] + 2 * replicated


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0), (0, 2, 1)])
def test_dims_follow_a_transposition(order):
    """An error here would not change results: the compiler would insert communication instead."""
    moved = Dims(2, P("model")).transposed(order)
    assert [order[moved.shard], moved.model_spec[order.index(0)]] == [2, "model"]
    assert [entry for entry in moved.model_spec if entry] == ["model"]
    assert Dims(1, P(None, None, "model")).of_layer() == Dims(0, P(None, "model"))


# Annotations


class Weight(nnx.Module):
    def __init__(self, shape, **metadata):
        self.w = nnx.Param(jnp.ones(shape), **metadata)


def spec_of(create, mesh=None, **options):
    """The spec of the only leaf at stage 3, and its reason."""
    zero = Zero(mesh or zerojax.make_mesh(model=MODEL), **options)
    state = zero.eval_init(create, optax.sgd(0.1))
    (leaf,) = jax.tree.leaves(state.params)
    return leaf.sharding.spec, state.layout.leaves[0].reason


@pytest.mark.parametrize(
    ("spec", "shape", "texts"),
    [
        ((None, "modle"), (16, 32), ["'w' names axis 'modle': no such axis", "shape (16, 32)", "make_mesh(model=...)"]),
        ((None, "model"), (16, 33), ["cannot divide 'w' over model in dim 1", "(16, 33)", "axis size 2; 33 % 2 = 1"]),
        (("model", "model"), (16, 32), ["'w' names axis 'model': named twice"]),
        ((None, None, "model"), (16, 32), ["'w' has 3 entries for 2 dims", "fix:      give one entry for each dim"]),
        (("data", "data"), (16, 32), ["'w' names axis 'data': named twice"]),
        ((("data", "model"), None), (16, 32), ["names data axes", "ZeRO chooses a dim"]),
    ],
)
def test_an_annotation_that_does_not_fit_is_an_error(spec, shape, texts):
    with pytest.raises(ValueError, match="placement: ") as error:
        spec_of(lambda rngs: Weight(shape, out_sharding=spec))
    for text in (*texts, "got:", "fix:"):
        assert text in str(error.value)


def test_an_annotated_axis_must_exist_and_be_auto():
    create = lambda rngs: Weight((16, 32), out_sharding=(None, "model"))
    with pytest.raises(ValueError, match="no such axis"):
        spec_of(create, zerojax.make_mesh())
    assert spec_of(create, zerojax.make_mesh(model=1)) == (P("data"), "first divisible dim")
    explicit = jax.make_mesh((DATA, MODEL), ("data", "model"), (AxisType.Auto, AxisType.Explicit))
    with pytest.raises(ValueError, match=r"'model': of type AxisType\.Explicit"):
        spec_of(create, explicit)


def test_zero_shards_the_first_dim_that_is_not_annotated():
    of = lambda shape, *names, **options: spec_of(lambda rngs: Weight(shape, out_sharding=names), **options)
    assert of((16, 32), None, "model") == (P("data", "model"), "first divisible dim")
    assert of((6, 8, 32), None, None, "model") == (P(None, "data", "model"), "first divisible dim")
    assert of((6, 32), None, "model") == (P("data", "model"), "padded to 8")
    assert of((1, 3, 32), None, None, "model", stacked=("w",)) == (
        P(None, "data", "model"),
        "padded to 4",
    )
    assert of((32,), "model") == (P("model"), "replicated: dim 0 is over model")
    assert of((4, 32), "data", None) == (P("data"), "annotation")
    assert of((8, 8, 32), "data", "model") == (P("data", "model"), "annotation")
    assert of((8, 8, 32), "data", "model", shard_dims={"w": 2}) == (P(None, "model", "data"), "override 'w'")
    with pytest.raises(ValueError, match="dim 1 is over model"):
        of((16, 32), None, "model", shard_dims={"w": 1})


def stack(**transform):
    @nnx.vmap(in_axes=0, out_axes=0, **transform)
    def create(rngs):
        module = Weight((8, 16), out_sharding=(None, "model"))
        module.w[...] = jax.random.normal(rngs.params(), (8, 16))
        return module

    return lambda rngs: nnx.split_rngs(splits=4)(create)(rngs)


def test_a_stacked_leaf_needs_an_entry_for_its_layers():
    """Otherwise the annotation of one layer would apply to the dims of the stack, shifted by one."""
    assert spec_of(stack(transform_metadata={nnx.PARTITION_NAME: None}))[0] == P(None, "data", "model")
    with pytest.raises(ValueError, match="'w' has 2 entries for 3 dims") as error:
        spec_of(stack())
    assert "transform_metadata={nnx.PARTITION_NAME: None}" in str(error.value)
    with pytest.raises(ValueError, match="dim 0 counts layers"):
        spec_of(stack(transform_metadata={nnx.PARTITION_NAME: "model"}), partition_specs={"w": P("model", None, None)})


def test_logical_names_are_read_under_the_rules_in_force():
    """As in Flax: NNX treats a name without a rule as an axis, Linen does not divide its dim."""
    create_nnx = lambda rngs: Weight((16, 32), out_sharding=("embed", "hidden"))
    create_linen = lambda key: {"w": nn.LogicallyPartitioned(jnp.ones((16, 32)), ("embed", "hidden"))}
    with nn.logical_axis_rules((("hidden", "model"), ("embed", None))):
        assert spec_of(create_nnx)[0] == spec_of(create_linen)[0] == P("data", "model")
    with pytest.raises(ValueError, match="names axis 'embed': no such axis"):
        spec_of(create_nnx)
    assert spec_of(create_linen)[0] == P("data")


def test_the_old_name_of_the_metadata_is_read():
    with pytest.warns(DeprecationWarning):
        assert spec_of(lambda rngs: Weight((16, 32), sharding=(None, "model")))[0] == P("data", "model")


def test_annotations_of_a_plain_tree_are_given_by_path():
    """They also apply to `value_and_grad`: gradients are those of one device, placed like the parameters."""
    rng = np.random.default_rng(0)
    params = {"in": rng.standard_normal((8, 16), np.float32), "out": rng.standard_normal((16, 8), np.float32)}
    x = rng.standard_normal((32, 8), np.float32)
    loss = lambda params, x: jnp.mean((jnp.tanh(x @ params["in"]) @ params["out"] - x) ** 2)
    annotations = {"in": P(None, "model"), "o*": P("model", None)}
    zero = Zero(zerojax.make_mesh(model=MODEL), partition_specs=annotations)
    sharded = zero.shard(params)
    specs = {"in": P("data", "model"), "out": P("model", "data")}
    assert {name: leaf.sharding.spec for name, leaf in sharded.items()} == specs
    value_and_grad, batch = zero.value_and_grad(loss), zero.shard_batch((x,))
    want_value, want = jax.value_and_grad(loss)(params, x)
    for fn in jax.jit(value_and_grad), value_and_grad:
        value, grads = fn(sharded, *batch)
        np.testing.assert_allclose(value, want_value, rtol=1e-5)
        for name, grad in grads.items():
            np.testing.assert_allclose(grad, want[name], rtol=1e-4, atol=1e-6)
            assert grad.sharding.spec == specs[name]
    with pytest.raises(ValueError, match="'no/such' matches no"):
        spec_of(lambda: {"w": jnp.ones((8, 8))}, partition_specs={"no/such": P("model")})


@pytest.mark.xdist_group(group("nnx", True, "fp32", 4))
def test_hybrid_sharding_with_a_model_axis():
    model, zero = nnx_model(scan=True), Zero(zerojax.make_mesh(replica=2, model=2), 3)
    got, state = train(zero, model, batches(model), num_microbatches=4)
    assert_close(got, reference("nnx", True, "fp32", 4))
    kernel = state.params["blocks"]["up"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (CONFIG.layers, 8, 32)


# Names of axes in annotations


FSDP = {"fsdp": "data", "tp": "model"}


def test_names_of_axes_in_annotations_are_mapped_to_the_mesh():
    of = lambda shape, *names, **axis_names: spec_of(
        lambda rngs: Weight(shape, out_sharding=names), axis_names={**FSDP, **axis_names}
    )
    assert of((16, 32), "tp", "fsdp") == (P("model", "data"), "annotation")
    assert of((16, 32), "tp", "fsdp", tp=None) == (P(None, "data"), "annotation")
    assert of((16, 32), "tp", "fsdp", fsdp=None, tp=None) == (P("data"), "first divisible dim")
    assert of((16, 32), None, ("fsdp", "tp"), tp=None) == (P(None, "data"), "annotation")
    given = spec_of(
        lambda rngs: Weight((16, 32), out_sharding=("tp", "fsdp")), axis_names=FSDP, partition_specs={"w": P()}
    )
    assert given == (P("data"), "first divisible dim")  # partition_specs name axes of the mesh


def test_names_that_no_annotation_or_mesh_has_are_errors():
    create = lambda rngs: Weight((16, 32), out_sharding=("fsdp", None))
    with pytest.raises(ValueError, match="axis_names: no annotation of the model names 'tp'") as error:
        spec_of(create, axis_names=FSDP)
    assert "annotations name 'fsdp'" in str(error.value) and "fix:" in str(error.value)
    with pytest.raises(ValueError, match="axis_names: 'fsdp' stands for axis 'dat': no such axis") as error:
        spec_of(create, axis_names={"fsdp": "dat"})
    assert "axes {'data': 4, 'model': 2}" in str(error.value) and "fix:" in str(error.value)


def test_the_error_about_other_names_gives_calls_that_work():
    create = lambda rngs: Weight((16, 32), out_sharding=("tp", "fsdp"))
    with pytest.raises(ValueError, match="names axis 'tp': no such axis") as error:
        spec_of(create)
    assert "Zero(mesh, axis_names={'tp': None, 'fsdp': 'data'})" in str(error.value)
    assert "a mesh with axes 'tp', 'fsdp', and Zero(mesh, shard_axes=('fsdp',))" in str(error.value)
    assert spec_of(create, axis_names={"tp": None, "fsdp": "data"})[0] == P(None, "data")
    mesh = jax.make_mesh((2, 4), ("tp", "fsdp"), (AxisType.Auto, AxisType.Auto))
    assert spec_of(create, mesh, shard_axes=("fsdp",))[0] == P("tp", "fsdp")


def test_an_annotated_data_dim_that_does_not_divide_moves():
    """Four experts were annotated for at most four devices; on more, another dim is sharded, and the reason says so."""
    experts = lambda shape: spec_of(lambda rngs: Weight(shape, out_sharding=("data", None, "model")))
    assert experts((4, 8, 32)) == (P("data", None, "model"), "annotation")
    assert experts((6, 8, 32)) == (
        P(None, "data", "model"),
        "first divisible dim; annotated dim 0 cannot be: 6 % 4 = 2",
    )
    assert spec_of(lambda rngs: Weight((8, 16), out_sharding=("data", None)), stacked=("w",)) == (
        P(None, "data"),
        "first divisible dim; annotated dim 0 counts layers",
    )
    assert experts((6, 7, 32)) == (P(None, "data", "model"), "padded to 8; annotated dim 0 cannot be: 6 % 4 = 2")


# Constraints on activations that name data axes


def constrained(spec, by_mesh):
    mesh = zerojax.make_mesh(model=MODEL)
    sharding = NamedSharding(mesh, spec) if by_mesh else spec
    zero = Zero(mesh)
    state = zero.init(lambda rngs: nnx.Linear(16, 16, rngs=rngs), optax.sgd(0.1))
    step = zero.train_step(lambda model, x: jnp.mean(jax.lax.with_sharding_constraint(model(x), sharding) ** 2))
    return mesh, lambda: step(state, np.ones((8, 16), np.float32))


@pytest.mark.parametrize("by_mesh", [False, True])
def test_a_constraint_that_names_data_axes_is_refused(by_mesh):
    mesh, run = constrained(P("data", "model"), by_mesh)
    with mesh, pytest.raises(ValueError, match="loss: a with_sharding_constraint names axes that split") as error:
        run()
    assert "'data'" in str(error.value) and "fix:      name other axes only" in str(error.value)


@pytest.mark.parametrize("by_mesh", [False, True])
def test_a_constraint_on_other_axes_works_within_a_mesh(by_mesh):
    mesh, run = constrained(P(None, "model"), by_mesh)
    with mesh:
        first = run()[1]["loss"]
    mesh, run = constrained(P(None, "model"), by_mesh)
    with jax.set_mesh(mesh):
        assert run()[1]["loss"] == first


# Kernels that JAX cannot divide


@pytest.mark.parametrize(
    ("way", "on_own_heads"),
    [("train_step", False), ("train_step", True), ("eval_step", False), ("value_and_grad", False)],
)
def test_a_kernel_that_cannot_be_divided_is_refused(way, on_own_heads):
    """JAX would raise an internal error when it compiles. A mesh without other axes has nothing to divide."""
    heads = P(None, None, "model")
    attend = lambda q: cudnn_attention_for_tracing(q, q, q, is_causal=True)
    divided = jax.shard_map(attend, in_specs=heads, out_specs=heads, axis_names={"model"}) if on_own_heads else attend
    loss = lambda model, x: jnp.mean(divided(model(x).reshape(len(x), 4, 2, 2)))

    def trace(**axes):
        zero, batch = Zero(zerojax.make_mesh(**axes)), jax.ShapeDtypeStruct((8, 16), jnp.float32)
        state = zero.eval_init(lambda rngs: nnx.Linear(16, 16, rngs=rngs), optax.sgd(0.1))
        if way == "value_and_grad":
            of_params = lambda params, x: loss(lambda x: x @ params["kernel"], x)
            jax.eval_shape(zero.value_and_grad(of_params), state.params, batch)
        else:
            getattr(zero, way)(loss).trace(state, batch)

    if on_own_heads:
        trace(model=MODEL)
        return
    trace()
    with pytest.raises(ValueError, match="loss: JAX cannot divide this kernel over the axes 'model'") as error:
        trace(model=MODEL)
    assert "test_tensor_parallel.py:" in str(error.value) and "in_specs=heads" in str(error.value)
