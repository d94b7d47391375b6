"""Units: how leaves are grouped, where a traced loss is cut, and what is saved between forward and backward pass."""

import functools
import itertools
import warnings
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support import zoo
from support.parity import loss_of
from support.plain import functional, numbers
from support.walk import count

import zerojax
from zerojax import Zero
from zerojax.program.regather import trace_regather
from zerojax.program.segmentation import cut_into_segments
from zerojax.sharding.units import unit_names

# Names


MATRIX, VECTOR = (8, 8), (8,)
ATTENTION = {f"{name}/kernel": MATRIX for name in ("query", "key", "value", "out")}
MLP = {"up/kernel": MATRIX, "down/kernel": MATRIX}
NORMS = {"layer_norm1/scale": VECTOR, "layer_norm2/scale": VECTOR}


def below(*parts):
    """Shapes by path, from pairs of prefixes and shapes below them."""
    return {
        f"{prefix}/{path}": shape for prefixes, shapes in parts for prefix in prefixes for path, shape in shapes.items()
    }


def numbered(name, num):
    return [f"{name}{i}" for i in range(num)]


def bottleneck(block):
    return {
        f"{block}layer/{i}/{path}": shape for i in range(3) for path, shape in [("conv", (3, 3, 8, 8)), ("norm", (8,))]
    }


STAGES = [f"resnet/stages/{stage}/layers/{i}" for stage, num in enumerate((3, 4, 6, 3)) for i in range(num)]
FLAT = dict.fromkeys(["embed/table", "head/kernel"], MATRIX)
LAYERS = {  # name -> (shapes by path, the units that are layers)
    "list": (below((numbered("model/layers/", 3), ATTENTION | MLP | NORMS)), numbered("model/layers/", 3)),
    "one_matrix": (below((numbered("Dense_", 3), {"kernel": MATRIX})), numbered("Dense_", 3)),
    "name_with_a_digit": (
        below(
            (numbered("wav2vec2/encoder/layers/", 3), ATTENTION | MLP),
            (numbered("wav2vec2/features/conv_layers/", 2), {"conv/kernel": (3, 8, 8)}),
        ),
        [*numbered("wav2vec2/encoder/layers/", 3), *numbered("wav2vec2/features/conv_layers/", 2)],
    ),
    "automatic_names": (
        below(
            (numbered("Encoder_0/Block_", 3), {"Dense_0/kernel": MATRIX, "Dense_1/kernel": MATRIX} | NORMS),
            (["Encoder_0/LayerNorm_0"], {"scale": VECTOR}),
        ),
        [*numbered("Encoder_0/Block_", 3), "Encoder_0/LayerNorm_0"],
    ),
    "two_attentions": (
        below(
            (
                numbered("Block_", 2),
                {f"Attention_{i}/{p}": s for i in (0, 1) for p, s in ATTENTION.items()} | {"wide/kernel": (8, 64)},
            )
        ),
        numbered("Block_", 2),
    ),
    "stages": (
        below((STAGES, bottleneck("")), ([s for s in STAGES if s.endswith("/0")], {"shortcut/kernel": MATRIX})),
        STAGES,
    ),
    "stages_by_name": (
        below((["layer1/blocks/0", "layer1/blocks/1", "layer2/blocks/0", "layer2/blocks/1"], MLP)),
        ["layer1/blocks/0", "layer1/blocks/1", "layer2/blocks/0", "layer2/blocks/1"],
    ),
    "unlike_parts": (
        below(
            (
                numbered("encoder/block/", 2),
                {f"layer/0/{p}": s for p, s in ATTENTION.items()} | {f"layer/1/{p}": s for p, s in MLP.items()},
            )
        ),
        numbered("encoder/block/", 2),
    ),
    "experts": (
        below((numbered("layers/", 2), ATTENTION | {f"experts/{e}/{p}": (8, 64) for e in range(4) for p in MLP})),
        numbered("layers/", 2),
    ),
    "heads": (
        below((numbered("blocks/", 2), {f"heads/{h}/{p}": (8, 2) for h in range(4) for p in ATTENTION} | MLP)),
        numbered("blocks/", 2),
    ),
}


def test_each_layer_is_a_unit():
    for name in LAYERS:
        shapes, layers = LAYERS[name]
        found = unit_names(shapes | FLAT)
        assert set(found) == {*layers, "embed", "head"}
        assert all(path.startswith(unit + "/") for path, unit in zip(shapes, found, strict=False))


def indexed(*shapes):
    """Shapes by path, of a list of arrays."""
    return {str(i): shape for i, shape in enumerate(shapes)}


def by_kind(**modules):
    """Shapes by path, of modules that are numbered by kind as Haiku does: kind -> the shapes of each."""
    number = lambda kind, i: f"net/{kind}_{i}" if i else f"net/{kind}"
    return {
        f"{number(kind, i)}/{p}": s
        for kind, all in modules.items()
        for i, one in enumerate(all)
        for p, s in one.items()
    }


LINEAR, NORM = {"w": (8, 8), "b": (8,)}, {"scale": (8,), "offset": (8,)}
UP, DOWN = {"w": (8, 32), "b": (32,)}, {"w": (32, 8), "b": (8,)}
SELF = {f"{name}/{p}": s for name in ("query", "key", "value", "linear") for p, s in LINEAR.items()}
LAYER = [(8, 8), (8,)] * 4 + [(8,), (8,), (8, 32), (32,), (32, 8), (8,), (8,), (8,)]
TABLE = (64, 8)
UNNAMED = {  # name -> (shapes by path, the number of leaves of each unit in the order of the paths)
    "list": (indexed(TABLE, *LAYER * 3, (8,), (8,), (8, 64), (64,)), [1, 16, 16, 16, 2, 2]),
    "norms_first": (indexed(TABLE, *(LAYER[-2:] + LAYER[:-2]) * 3, (8, 64)), [1, 16, 16, 16, 1]),
    "two_towers": (indexed(*[TABLE, *LAYER * 3] * 2), [1, 16, 16, 16, 1, 16, 16, 16]),
    "convs": (indexed((3, 3, 3, 8), (8,), (8,), (3, 3, 8, 16), (16,), (16,), (16, 4), (4,)), [3, 3, 2]),
    "haiku": (
        by_kind(
            attention=[SELF] * 3, layer_norm=[NORM] * 7, linear=[{"w": (4, 8), "b": (8,)}, *[UP, DOWN] * 3, LINEAR]
        ),
        [16, 16, 16, 2, 2, 2],
    ),
    "four_equal": (by_kind(layer_norm=[NORM] * 6, linear=[LINEAR] * 12, attention=[SELF] * 3), [20, 20, 20]),
    "arrays": ({f"{k}{i}": s for i in range(3) for k, s in {"w": MATRIX, "b": VECTOR}.items()}, [2, 2, 2]),
    "state_dict": (
        {f"model.layers.{i}.{p}.weight": s for i in range(3) for p, s in {"up": (8, 32), "down": (32, 8)}.items()}
        | {"model.embed.weight": TABLE},
        [2, 2, 2, 1],
    ),
    # Left as they are:
    "unlike": (by_kind(linear=[UP, LINEAR, DOWN, UP], layer_norm=[NORM] * 2), [2] * 6),
    "towers": (by_kind(encoder=[SELF] * 3, decoder=[SELF] * 3), [8] * 6),
}


def test_layers_without_names_are_units_by_their_shapes():
    for name in UNNAMED:
        shapes, sizes = UNNAMED[name]
        assert sorted(Counter(unit_names(shapes)).values()) == sorted(sizes)


def test_a_list_is_cut_between_consecutive_arrays():
    found = unit_names(UNNAMED["list"][0])
    assert found == [
        unit
        for unit, count in zip(["0", "1", "17", "33", "49", "51"], [1, 16, 16, 16, 2, 2], strict=True)
        for _ in range(count)
    ]
    of_haiku = dict(zip(UNNAMED["haiku"][0], unit_names(UNNAMED["haiku"][0]), strict=True))
    second = {
        "net/attention_1/key/w",
        "net/layer_norm_2/scale",
        "net/layer_norm_3/scale",
        "net/linear_3/w",
        "net/linear_4/b",
    }
    assert {of_haiku[path] for path in second} == {"net/attention_1"}
    assert of_haiku["net/linear/w"] == "net/linear" and of_haiku["net/layer_norm_6/scale"] == "net/layer_norm_6"


def test_stacked_leaves_and_chosen_units_are_not_merged():
    shapes = UNNAMED["haiku"][0]
    chosen = unit_names(shapes, ["net/linear_1"])
    assert len(set(chosen)) == 3 + 7 + 8
    stacks = indexed(*[(4, 8, 8), (4, 8)] * 3)
    assert unit_names(stacks, stacked=stacks) == list(stacks)


def test_numbered_norms_and_the_parts_of_a_stack_are_no_layers():
    """Otherwise the rest of the layer would be cut into its parts as well."""
    assert set(unit_names(below((["encoder"], ATTENTION | NORMS)) | FLAT)) == {"encoder", "embed", "head"}
    parts = {"mlp_1/kernel": (4, 8, 8), "mlp_2/kernel": (4, 8, 8), "norm1/scale": (4, 8), "norm2/scale": (4, 8)}
    stack = below((["blocks"], parts))
    assert set(unit_names(stack | FLAT, stacked=stack)) == {"blocks", "embed", "head"}
    stages = below((numbered("stages/", 2), parts))
    assert set(unit_names(stages | FLAT, stacked=stages)) == {"stages/0", "stages/1", "embed", "head"}


def test_without_layers_a_unit_ends_at_the_first_component_that_differs():
    names = lambda *paths: unit_names(dict.fromkeys(paths, VECTOR))
    assert names("model/embed/w", "model/head/w", "model/head/b") == ["model/embed", "model/head", "model/head"]
    assert names("w", "b") == ["w", "b"]
    assert names("layer/w") == ["layer"]
    assert names("model/Block_0/Dense_1/w", "model/head/w") == ["model/Block_0", "model/head"]


def test_patterns_take_precedence():
    paths = ["layers/0/mlp/w", "layers/0/mlp/b", "layers/0/norm/w", "layers/1/mlp/w", "head/w"]
    names = unit_names(dict.fromkeys(paths, MATRIX), ["layers/*/mlp", "head/w"])
    assert names == ["layers/0/mlp", "layers/0/mlp", "layers/0", "layers/1/mlp", "head/w"]


def test_a_pattern_matches_whole_components():
    assert unit_names({"ab/w": VECTOR, "a/w": VECTOR}, ["a"]) == ["ab", "a"]


class Deep(nnx.Module):
    """All but a head below one name, of which no sibling has the rest."""

    def __init__(self, rngs):
        for name in ("first", "second", "third"):
            setattr(self, name, nnx.Linear(640, 640, rngs=rngs))


class Backbone(nnx.Module):
    def __init__(self, rngs):
        self.body, self.head = Deep(rngs), nnx.Linear(640, 8, rngs=rngs)

    def __call__(self, x):
        return self.head(self.body.third(self.body.second(self.body.first(x))))


def test_a_unit_with_most_of_the_weights_is_told_with_the_units_that_cut_it():
    zero = Zero(zerojax.make_mesh())
    with pytest.warns(UserWarning, match=r"unit 'body' holds 100% of the weights") as caught:
        state = zero.eval_init(Backbone, optax.sgd(0.1))
    assert "units=('body/*',)" in str(caught[0].message) and "units=('body/*',)" in str(zero.explain(state))
    cut = Zero(zerojax.make_mesh(), units=("body/*",))
    explained = cut.explain(cut.eval_init(Backbone, optax.sgd(0.1)))
    assert [unit.name for unit in explained.units] == ["body/first", "body/second", "body/third", "head"]
    assert explained.large_unit is None


def avals(shapes):
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


def test_a_unit_that_may_be_a_stack_of_layers_is_told_and_the_loss_shows_that_it_is_one():
    """Twelve layers on eight devices, which shard another dim by luck."""
    params = {"blocks": avals({"up": (12, 128, 512), "down": (12, 512, 128)}), "head": avals({"w": (128, 8)})}
    body = lambda x, w: (jnp.tanh(x @ w["up"]) @ w["down"], None)
    loss = lambda p, b: jnp.mean(jax.lax.scan(body, b["x"], p["blocks"])[0] @ p["head"]["w"])
    zero, batch = Zero(zerojax.make_mesh()), {"x": np.ones((8, 128), np.float32)}
    with pytest.warns(UserWarning, match=r"stacked=\('blocks/\*',\)\) if dim 0 counts layers"):
        state = zero.eval_init(params, optax.sgd(0.1))
    with pytest.warns(UserWarning, match=r"2 leaves layer by layer that are not known to be stacks") as caught:
        zero.train_step(loss).trace(state, batch)
    assert "Zero(..., stacked=('blocks/*',))" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zero = Zero(zerojax.make_mesh(), stacked=("blocks/*",))
        zero.train_step(loss).trace(zero.eval_init(params, optax.sgd(0.1)), batch)


def test_norms_that_nothing_shows_the_layers_of_are_told():
    shapes = {"w": (1024, 1024)} | {f"{name}_scale": (1024,) for name in "abcdefghi"}
    with pytest.warns(UserWarning, match="which of 9 norms and biases are in the same layer") as caught:
        Zero(zerojax.make_mesh()).eval_init(avals(shapes), optax.sgd(0.1))
    assert "for example {'layers/0/a_scale': ...}" in str(caught[0].message)


def test_units_are_listed_in_the_order_of_their_use():
    model, zero = zoo.ZOO["gpt_nnx"], Zero(zerojax.make_mesh())
    state = zero.eval_init(model.create, optax.sgd(0.1))
    units = zero.explain(state, zero.train_step(loss_of(model)), model.batch(0)).units
    blocks = [unit for unit in units if unit.name.startswith("blocks/")]
    assert [unit.name for unit in blocks] == [f"blocks/{i}" for i in range(3)]
    assert blocks[0].places[0] < blocks[1].places[0] < blocks[2].places[0] and units[0].places == (0,)
    assert sum(unit.num_bytes for unit in units) == 4 * sum(leaf.size for leaf in state.layout.leaves)
    assert sum(unit.num_leaves for unit in units) == len(state.layout.leaves)


# Segments


def segments(name):
    """(the traced loss of a zoo model, the units of each segment that reads weights in the order of execution)."""
    model = zoo.ZOO[name]
    layout = Zero(zerojax.make_mesh()).eval_init(model.create, optax.sgd(0.1)).layout
    params, other, loss = functional(model, abstract=True)
    leaves, tree = jax.tree.flatten(params)
    units = [leaf.unit for leaf in layout.leaves]

    def flat_loss(*args):
        return loss(jax.tree.unflatten(tree, args[:-1]), args[-1], model.batch(0))[0][0]

    closed = jax.make_jaxpr(flat_loss)(*leaves, other)
    traced = cut_into_segments(closed, units)
    return traced, [sorted({units[i] for i in s.leaves}) for s in traced.segments if s.leaves]


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("gpt_nnx", [f"blocks/{i}" for i in range(3)]),
        ("gpt_nnx_remat", [f"blocks/{i}" for i in range(3)]),
        ("gpt_linen", [f"LinenBlock_{i}" for i in range(3)]),
        ("gpt_linen_remat", [f"CheckpointLinenBlock_{i}" for i in range(3)]),
    ],
)
def test_each_layer_is_a_segment(name, blocks):
    """In program order. No segment gathers two layers at the same time."""
    _, found = segments(name)
    assert [group for group in found if set(group) & set(blocks)] == [[block] for block in blocks]


@pytest.mark.parametrize("name", ["gpt_nnx_scan", "gpt_linen_scan", "gpt_nnx_scan_remat", "gpt_linen_scan_remat"])
def test_a_scan_over_layers_is_a_segment(name):
    """The loop slices all twelve leaves of a block, and gathers them inside."""
    traced, _ = segments(name)
    (stack,) = [segment for segment in traced.segments if segment.views]
    assert len(stack.equations) == 1 and len(stack.views) == len(stack.leaves) == 12
    assert sorted(view.leaf for view in stack.views.values()) == stack.leaves


def test_every_equation_runs_once():
    """Segments contain every equation once, except those of weights alone, and read values that were written before."""
    for name in [name for name in zoo.ZOO if name != "dropout_linen"]:
        traced, _ = segments(name)
        jaxpr = traced.closed.jaxpr
        got = [id(equation) for segment in traced.segments for equation in segment.equations]
        want = [id(equation) for equation in jaxpr.eqns if not any(v in traced.producer for v in equation.outvars)]
        assert got == want
        known = {*jaxpr.constvars, *traced.data_vars}
        for segment in traced.segments:
            assert set(segment.inputs) <= known
            known.update(segment.outputs)


# Regather


def unit(weights, fixed, data):
    """A unit with two matrices and a bias, whose weights are cast and transposed before they are used."""
    (one, bias, two), (x,) = weights, data
    h = jnp.tanh(x.astype(jnp.bfloat16) @ one.astype(jnp.bfloat16).T + bias.astype(jnp.bfloat16))
    return [(h @ two.astype(jnp.bfloat16)).astype(jnp.float32)]


WEIGHTS = [(24, 16), (24,), (24, 40)]


def regather():
    aval = lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    return trace_regather(unit, list(map(aval, WEIGHTS)), [], [aval((4, 16))], ([True] * 3, [], [True]), [True])


def test_no_weight_is_saved():
    """Saved values have the shapes of activations. Rebuilt values have the shapes of weights, as they are used."""
    r = regather()
    saved = {tuple(value.variable.aval.shape) for value in r.saved}
    rebuilt = {tuple(v.aval.shape) for equation in r.rebuild_jaxpr.jaxpr.eqns for v in equation.outvars}
    of_weights = {tuple(sorted(shape)) for shape in WEIGHTS}
    assert saved and not {shape for shape in saved if tuple(sorted(shape)) in of_weights}
    assert {tuple(sorted(shape)) for shape in rebuilt if len(shape) == 2} == {(16, 24), (24, 40)}


def test_only_the_weights_that_the_backward_pass_reads_are_needed():
    assert regather().needed == [True, False, True]  # not the bias


def test_the_gradient_is_that_of_jax():
    rng = np.random.default_rng(0)
    weights = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in WEIGHTS]
    x = jnp.asarray(rng.standard_normal((4, 16)), jnp.float32)
    cotangent = [jnp.asarray(rng.standard_normal((4, 40)), jnp.float32)]
    r = regather()
    out, saved = r.forward(weights, [], [x])
    grads = r.backward([weights[0], None, weights[2]], [], saved, cotangent)
    weight_grads = [jax.lax.transpose(g, order) for g, order in zip(grads.weights, grads.orders, strict=True)]
    want_out, vjp = jax.vjp(lambda weights, data: unit(weights, [], data), weights, [x])
    for got, want in zip(numbers((out, weight_grads, grads.data)), numbers((want_out, *vjp(cotangent))), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_a_gradient_keeps_the_layout_of_its_product():
    """The product computes the transposed gradient of a matrix, which is reduced in this layout."""
    rng = np.random.default_rng(0)
    w, x, cotangent = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((16, 24), (4, 16), (4, 24)))
    r = trace_regather(lambda weights, fixed, data: [data[0] @ weights[0]], [w], [], [x], ([True], [], [False]), [True])
    _, saved = r.forward([w], [], [x])
    grads = r.backward([w], [], saved, [cotangent])
    assert grads.weights[0].shape == (24, 16) and grads.orders == [(1, 0)]
    np.testing.assert_allclose(grads.weights[0].T, x.T @ cotangent, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "stage", "k"),
    [
        ("gpt_nnx", 3, 1),
        ("gpt_linen", 2, 4),
        ("gpt_nnx_scan", 3, 4),
        ("gpt_linen_scan", 2, 1),
        ("moe", 3, 1),
        ("unused", 2, 1),
    ],
)
def test_no_activation_is_recomputed(name, stage, k):
    """In each microbatch, the step computes as many matrix products as the plain gradient."""
    model, zero = zoo.ZOO[name], Zero(zerojax.make_mesh(), stage)
    state = zero.eval_init(model.create, optax.sgd(0.1))
    step = zero.train_step(loss_of(model), num_microbatches=k).trace(state, model.batch(0)).jaxpr
    params, other, loss = functional(model, abstract=True)
    plain = jax.make_jaxpr(jax.grad(lambda params, other: loss(params, other, model.batch(0))[0][0]))(params, other)
    assert count(step, "dot_general") == k * count(plain, "dot_general") > 0


# Models without names, or with values


WIDE = 16


def layer(x, w):
    """A residual layer with a mixing matrix and an MLP, of which `w` has the arrays in the order of use."""
    scale, mix, mix_bias, up, up_bias, down, down_bias = w
    x = x + jnp.tanh((x * scale) @ mix + mix_bias)
    return x + jnp.tanh(x @ up + up_bias) @ down + down_bias


def one_layer(rng):
    shapes = [(WIDE,), (WIDE, WIDE), (WIDE,), (WIDE, 3 * WIDE), (3 * WIDE,), (3 * WIDE, WIDE), (WIDE,)]
    return [rng.normal(size=shape).astype(np.float32) / 4 for shape in shapes]


def of_list(layers):
    return list(itertools.chain.from_iterable(layers)), lambda p, x: functools.reduce(
        layer, [p[k : k + 7] for k in range(0, len(p), 7)], x
    )


def of_kinds(layers):
    """Named as by Haiku: 'norm', 'linear', 'linear_1', 'linear_2', 'norm_1', ..."""
    name = lambda kind, i: f"{kind}_{i}" if i else kind
    params = {}
    for i, (scale, *rest) in enumerate(layers):
        params[name("norm", i)] = {"scale": scale}
        params |= {name("linear", 3 * i + k): {"w": rest[2 * k], "b": rest[2 * k + 1]} for k in range(3)}

    def run(p, x):
        linear = lambda k: [p[name("linear", k)]["w"], p[name("linear", k)]["b"]]
        of_layer = lambda i: [p[name("norm", i)]["scale"], *linear(3 * i), *linear(3 * i + 1), *linear(3 * i + 2)]
        return functools.reduce(layer, map(of_layer, range(len(layers))), x)

    return params, run


def of_stack(layers):
    names = "scale", "mix", "mix_bias", "up", "up_bias", "down", "down_bias"
    stack = {name: np.stack(arrays) for name, *arrays in zip(names, *layers, strict=True)}
    body = lambda x, w: (layer(x, [w[name] for name in names]), None)
    return {
        "blocks": stack,
        "head": np.eye(WIDE, dtype=np.float32),
    }, lambda p, x: jax.lax.scan(body, x, p["blocks"])[0] @ p["head"]


@pytest.mark.parametrize(
    ("form", "depth", "num_units", "num_gathers"),
    [(of_list, 3, 3, 5), (of_kinds, 3, 3, 5), (of_stack, 8, 2, 17), (of_stack, 12, 2, 25)],
)
def test_arrays_are_gathered_by_layers_and_train_as_on_one_device(form, depth, num_units, num_gathers):
    """The small arrays of a layer share a gather, in the forward and in the backward pass; of the last unit, in one."""
    rng = np.random.default_rng(0)
    params, run = form([one_layer(rng) for _ in range(depth)])
    batch = {"x": rng.normal(size=(16, WIDE)).astype(np.float32)}
    loss = lambda p, b: jnp.mean(run(p, b["x"]) ** 2)
    zero = Zero(zerojax.make_mesh(), 3)
    state, step = zero.init(params, optax.sgd(0.1)), zero.train_step(loss)
    assert len({leaf.unit for leaf in state.layout.leaves}) == num_units
    assert count(step.trace(state, batch).jaxpr, "all_gather") == num_gathers
    want_loss, grads = jax.value_and_grad(loss)(params, batch)
    state, metrics = step(state, batch)
    np.testing.assert_allclose(metrics["loss"], want_loss, rtol=1e-5)
    for got, start, grad in zip(numbers(state.params), jax.tree.leaves(params), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(got - start, -0.1 * grad, rtol=1e-3, atol=1e-6)
