"""Placement: the stage table, the sharded dim, stacked leaves, bytes per device, and the output of `explain`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from support import zoo
from support.parity import optimizer

import zerojax
from zerojax import Zero
from zerojax.sharding.dim_choice import globs, likely_stacks
from zerojax.sharding.placement import choose_dim

EVEN = {"a": (64, 32), "b": (32, 16), "c": (16,)}  # every leaf divides into eight
EVEN_SIZE = 64 * 32 + 32 * 16 + 16


def create_even(key):
    return {name: jax.random.normal(key, shape) for name, shape in EVEN.items()}


def test_the_first_divisible_dim_is_sharded():
    for shape, stacked, dim in [
        ((16, 32), False, 0),  # the first
        ((32, 16), False, 0),
        ((30, 16), False, 1),  # the first that divides
        ((8, 3, 3, 64), False, 0),
        ((3, 3, 16, 64), False, 2),
        ((64, 16), True, 1),  # never the layer dim
        ((64, 16, 16), True, 1),
        ((64,), True, None),
        ((0, 8), False, 1),
        ((0,), False, None),
        ((), False, None),
    ]:
        assert choose_dim(shape, 8, stacked)[0] == dim


def test_a_leaf_that_cannot_be_sharded_has_a_reason():
    assert choose_dim((), 8, False)[1] == "replicated: a scalar"
    assert choose_dim((64,), 8, True)[1] == "replicated: one scalar per layer"
    assert choose_dim((3, 2), 8, False)[1] == "replicated: 3 % 8 = 3, 2 % 8 = 2"  # fewer elements than devices
    assert choose_dim((64, 7), 8, True)[1] == "replicated: 7 % 8 = 7"  # in each layer
    assert choose_dim((13, 7), 8, False, pads=False)[1] == "replicated: 13 % 8 = 5, 7 % 8 = 7"


def test_overrides_choose_the_dim():
    zero = Zero(zerojax.make_mesh(), shard_dims={"a": 1, "b": None, "c": -1})
    params = zero.eval_init(create_even, optimizer()).params
    specs = {name: leaf.sharding.spec for name, leaf in params.items()}
    assert specs == {"a": P(None, "data"), "b": P(), "c": P("data")}


def test_the_first_matching_override_counts():
    zero = Zero(zerojax.make_mesh(), shard_dims={"a": 1, "*": None})
    params = zero.eval_init(create_even, optimizer()).params
    assert {name: leaf.sharding.spec for name, leaf in params.items()} == {"a": P(None, "data"), "b": P(), "c": P()}


# Stacked leaves


def nnx_stack(depth, rngs):
    @nnx.split_rngs(splits=depth)
    @nnx.vmap(in_axes=0, out_axes=0)
    def stack(rngs):
        return zoo.NNXBlock(rngs)

    return stack(rngs)


def stacked_specs(kind, depth, monkeypatch, precision="fp32"):
    """path -> (shape, spec) of the leaves below the scanned blocks."""
    monkeypatch.setattr(zoo, "LAYERS", depth)
    monkeypatch.setattr(zoo, "stack_blocks", lambda rngs: nnx_stack(depth, rngs))
    model = zoo.gpt_linen("linen", scan=True) if kind == "linen" else zoo.gpt_nnx("nnx", scan=True)
    state = Zero(zerojax.make_mesh(), 3, precision).eval_init(model.create, optimizer())
    leaves = {leaf.path: leaf for leaf in state.layout.leaves}
    return {path: leaf for path, leaf in leaves.items() if path.startswith(("blocks/", "ScanLinenBlock"))}


@pytest.mark.parametrize(("kind", "depth"), [("linen", 3), ("nnx", 16), ("linen", 128)])
def test_a_stacked_leaf_is_never_sharded_over_its_layers(kind, depth, monkeypatch):
    """Even if the number of layers is divisible and the largest dim; also scales and biases created without a key."""
    leaves = stacked_specs(kind, depth, monkeypatch)
    assert len(leaves) == 12 and all(leaf.shape[0] == depth for leaf in leaves.values())
    assert {path: leaf.dim for path, leaf in leaves.items() if leaf.dim in (None, 0) and max(leaf.shape[1:]) >= 8} == {}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_stacked_leaf_is_found_through_casts(precision, monkeypatch):
    leaves = stacked_specs("nnx", 16, monkeypatch, precision)
    assert all(leaf.dim != 0 for leaf in leaves.values())


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_a_deep_stack_can_be_trained(kind, monkeypatch):
    monkeypatch.setattr(zoo, "LAYERS", 16)
    monkeypatch.setattr(zoo, "stack_blocks", lambda rngs: nnx_stack(16, rngs))
    model = zoo.gpt_linen("linen", scan=True) if kind == "linen" else zoo.gpt_nnx("nnx", scan=True)
    zero = Zero(zerojax.make_mesh(), 3)
    zero.train_step(model.loss).trace(zero.eval_init(model.create, optimizer()), model.batch(0))


def test_leaves_that_are_not_stacked_keep_all_their_dims():
    """An expert dim that is created from one key is not a layer dim; neither is any dim of an unrolled model."""
    for name in "moe", "gpt_nnx":
        state = Zero(zerojax.make_mesh(), 3).eval_init(zoo.ZOO[name].create, optimizer())
        chosen = {leaf.path: choose_dim(leaf.shape, 8, stacked=False)[0] for leaf in state.layout.leaves}
        chosen |= {path: 1 for path in chosen if path.startswith("embed/")}  # the width of a table
        assert {leaf.path: leaf.dim for leaf in state.layout.leaves} == chosen


@pytest.mark.parametrize("name", ["gpt_nnx_scan", "gpt_linen_scan"])
def test_a_model_with_values_is_placed_as_one_that_is_created(name):
    zero, create = Zero(zerojax.make_mesh(), 3), zoo.ZOO[name].create
    values = nnx.eval_shape(lambda: create(nnx.Rngs(0))) if "nnx" in name else jax.eval_shape(create, jax.random.key(0))
    created, given = (zero.eval_init(model, optimizer()).layout.leaves for model in (create, values))
    assert given == created and sum(leaf.stacked for leaf in given) == 12


BLOCK = {"norm/scale": (32,), "attn/qkv": (32, 96), "attn/out": (32, 32), "mlp/up": (32, 128), "mlp/down": (128, 32)}
HEADS = {"q": (12, 32, 4), "k": (12, 32, 4), "out": (12, 4, 32), "norm": (12, 4)}
EXPERTS = {"up": (4, 32, 256), "up_bias": (4, 256), "down": (4, 128, 32), "down_bias": (4, 32)}
AS_STACKS = {  # name -> (shapes, the prefix of those that are stacks)
    "layers": ({f"blocks/{p}": (12, *s) for p, s in BLOCK.items()} | {"head": (32, 64)}, "blocks/"),
    "stage": ({f"stage_0/blocks/{p}": (12, *s) for p, s in BLOCK.items()} | {"head": (32, 64)}, "stage_0/"),
    "unrolled": ({f"blocks/{i}/{p}": s for i in range(3) for p, s in BLOCK.items()}, None),
    "heads": ({f"attn/{p}": s for p, s in HEADS.items()} | {"head": (32, 64)}, None),
    "heads_of_layers": (
        {f"layers/{i}/{p}": s for i in range(3) for p, s in (HEADS | {"up": (12, 9, 9)}).items()},
        None,
    ),
    "experts": ({f"moe/experts/{p}": s for p, s in EXPERTS.items()} | {"moe/router": (32, 4)}, None),
    "convs": ({"conv/a": (3, 3, 8, 16), "conv/b": (3, 3, 16, 32), "conv/scale": (16,), "head": (32, 8)}, None),
    "width": ({"mlp/up": (32, 4, 8), "mlp/gate": (32, 4, 16), "mlp/bias": (32, 4), "mlp/out": (32, 32)}, None),
}


def test_a_first_dim_is_taken_for_layers_only_where_all_leaves_look_like_layers():
    for name in AS_STACKS:
        shapes, prefix = AS_STACKS[name]
        assert likely_stacks(shapes) == {path for path in shapes if prefix and path.startswith(prefix)}


def test_globs_match_what_was_chosen_and_nothing_else():
    paths = [
        "llm/layers/attn/w",
        "llm/layers/norm",
        "llm/embed",
        "stages/0/blocks/w",
        "stages/1/blocks/w",
        "stages/0/w",
    ]
    chosen = [path for path in paths if "/layers/" in path or "/blocks/" in path]
    assert globs(chosen, paths) == ("llm/layers/*", "stages/*/blocks/*")
    assert globs(["a[0]/w"], ["a[0]/w", "a0/w"]) == ("a[[]0]/*",)


def test_stacked_leaves_can_be_named():
    zero = Zero(zerojax.make_mesh(), stacked=["a"])
    assert zero.eval_init(create_even, optimizer()).params["a"].sharding.spec == P(None, "data")


# The stage table


@pytest.mark.parametrize("precision", ["bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stage_table(stage, precision):
    state = Zero(zerojax.make_mesh(), stage, precision).init(create_even, optax.adamw(1e-3))
    replicated = {name: P() for name in EVEN}
    shards = {name: P("data") for name in EVEN}
    specs = lambda tree: {name: leaf.sharding.spec for name, leaf in tree.items()}
    assert specs(state.params) == (shards if stage == 3 else replicated)
    for tree in (state.opt_state[0].mu, state.opt_state[0].nu, *([state.master] if precision == "bf16" else [])):
        assert specs(tree) == (shards if stage >= 1 else replicated)
    assert state.opt_state[0].count.sharding.spec == P()
    assert (state.master is None) == (precision == "fp32")
    compute = jnp.float32 if precision == "fp32" else jnp.bfloat16
    assert {leaf.dtype for leaf in state.params.values()} == {jnp.dtype(compute)}


def device_bytes(tree):
    """The bytes of a tree on the first device."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(("precision", "widths"), [("bf16", (2, 2, 12))])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_per_device_are_the_formula(stage, precision, widths):
    """ZeRO, table 1, with Adam. `widths` are the bytes per parameter of params, grads and optimizer state."""
    zero = Zero(zerojax.make_mesh(), stage, precision)
    state = zero.init(create_even, optax.adamw(1e-3))
    divided = (stage >= 3, stage >= 2, stage >= 1)
    params, grads, optimizer_state = (
        width * EVEN_SIZE // (8 if sharded else 1) for width, sharded in zip(widths, divided, strict=True)
    )
    count = 4  # Adam's step count, an int32 scalar
    totals = zero.explain(state).totals
    assert totals == {"params": params, "grads": grads, "optimizer": optimizer_state + count, "model_state": 0}
    assert device_bytes(state.params) == totals["params"]
    assert device_bytes((state.master, state.opt_state)) == totals["optimizer"]
    assert zero.explain(state).formula["params"] == params


@pytest.mark.parametrize("name", ["function", "unused", "resnet_linen"])
def test_explained_totals_are_those_of_the_arrays(name):
    zero = Zero(zerojax.make_mesh(), 3, "bf16")
    state = zero.init(zoo.ZOO[name].create, optimizer())
    totals = zero.explain(state).totals
    assert totals["params"] == device_bytes(state.params)
    assert totals["optimizer"] == device_bytes((state.master, state.opt_state))
    assert totals["model_state"] == device_bytes(state.model_state)


def test_explain_is_the_same_before_anything_is_allocated():
    zero, model = Zero(zerojax.make_mesh(), 2), zoo.ZOO["unused"]
    assert zero.explain(zero.eval_init(model.create, optimizer())) == zero.explain(zero.init(model.create, optimizer()))


def test_explain_lists_replicated_leaves_with_reasons():
    zero = Zero(zerojax.make_mesh(), 3, shard_dims={"decoder/w": None})
    explanation = zero.explain(zero.eval_init(zoo.ZOO["function"].create, optimizer()))
    reasons = {(row.category, row.path): row.reason for row in explanation.replicated}
    assert reasons["params", "decoder/w"] == "override 'decoder/w'"
    assert reasons["params", "scale"] == "replicated: a scalar"
    assert reasons["grads", "scale"] == "replicated: a scalar"
    assert ("optimizer", "0/mu/decoder/w") in reasons
    text = str(explanation)
    not_sharded = text[text.index("Not sharded") :]
    for (_, path), reason in reasons.items():
        assert path in not_sharded and reason in not_sharded


def test_explain_shows_zeros_that_pad_shards():
    zero = Zero(zerojax.make_mesh(), 3)
    explanation = zero.explain(zero.eval_init(zoo.ZOO["function"].create, optimizer()))
    rows = {row.path: row for row in explanation.rows if row.category == "params"}
    weight, bias = rows["encoder/first/w"], rows["encoder/second/b"]
    assert (weight.shape, weight.reason, weight.bytes_per_device) == ((13, 7), "padded to 8", 13 * 4)
    assert weight.zeros_bytes == pytest.approx(13 * 4 / 8)  # one of eight columns
    assert (bias.shape, bias.reason, bias.bytes_per_device) == ((17,), "padded to 24", 3 * 4)
    sharded = [row for row in explanation.rows if row.category != "model_state" and row not in explanation.replicated]
    for row in sharded:
        assert row.bytes_per_device - row.zeros_bytes == pytest.approx(row.undivided_bytes / 8)
    assert explanation.zeros["params"] == sum(row.zeros_bytes for row in rows.values()) > 0
    assert explanation.zeros["model_state"] == 0 and "zeros that pad shards" in str(explanation)


def test_explain_states_that_everything_is_sharded():
    zero = Zero(zerojax.make_mesh(), 3)
    explanation = zero.explain(zero.eval_init(create_even, optax.sgd(0.1)))
    assert explanation.replicated == ()
    assert "Every leaf that the stage shards is sharded." in str(explanation)


def test_explain_lists_what_each_stage_shards():
    """Categories that a stage does not shard are not reported as replicated."""
    categories = []
    for stage in range(4):
        zero = Zero(zerojax.make_mesh(), stage)
        state = zero.eval_init(zoo.ZOO["function"].create, optimizer())
        categories.append({row.category for row in zero.explain(state).replicated})
    assert categories == [set(), {"optimizer"}, {"optimizer", "grads"}, {"optimizer", "grads", "params"}]


def test_gradients_inside_the_optimizer_state_follow_the_parameters():
    """A leaf that belongs to a parameter is placed like the parameter; other leaves are placed by their shapes."""
    zero = Zero(zerojax.make_mesh(), 1, shard_dims={"a": 1})
    state = zero.eval_init(create_even, optax.chain(optax.trace(0.9), optax.adafactor(1e-3, min_dim_size_to_factor=8)))
    assert state.opt_state[0].trace["a"].sharding.spec == P(None, "data")
    factored = state.opt_state[1][0]
    assert factored.v_row["a"].shape == (32,) and factored.v_row["a"].sharding.spec == P("data")
    assert np.all([leaf.sharding.spec == P() for leaf in jax.tree.leaves(factored.v_row) if leaf.shape == (1,)])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_keeps_the_placement(stage):
    zero = Zero(zerojax.make_mesh(), stage, "bf16")
    state = zero.init(create_even, optimizer())
    before = jax.tree.map(lambda a: a.sharding, state)
    loss = lambda params, batch: jnp.mean((batch["x"] @ params["a"] @ params["b"] + params["c"]) ** 2)
    after, _ = zero.train_step(loss)(state, {"x": np.ones((8, 64), np.float32)})
    assert jax.tree.map(lambda a: a.sharding, after) == before
