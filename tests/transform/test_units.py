"""Units: how leaves are grouped, where a traced loss is cut, and what is saved between forward and backward pass."""

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
from zerojax.sharding.units import unit_names
from zerojax.transform.regather import Regather
from zerojax.transform.segmentation import TracedLoss

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


@pytest.mark.parametrize("name", LAYERS)
def test_each_layer_is_a_unit(name):
    shapes, layers = LAYERS[name]
    found = unit_names(shapes | FLAT)
    assert set(found) == {*layers, "embed", "head"}
    assert all(path.startswith(unit + "/") for path, unit in zip(shapes, found, strict=False))


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


def test_units_are_listed_in_the_order_of_their_use():
    model, zero = zoo.ZOO["gpt_nnx"], Zero(zerojax.make_mesh())
    state = zero.eval_init(model.create, optax.sgd(0.1))
    units = zero.explain(state, zero.train_step(loss_of(model)), model.batch(0)).units
    blocks = [unit for unit in units if unit.name.startswith("blocks/")]
    assert [unit.name for unit in blocks] == [f"blocks/{i}" for i in range(3)]
    assert blocks[0].places[0] < blocks[1].places[0] < blocks[2].places[0] and units[0].places == (0,)
    assert sum(unit.num_bytes for unit in units) == 4 * sum(leaf.size for leaf in state.definition.leaves)
    assert sum(unit.num_leaves for unit in units) == len(state.definition.leaves)


# Segments


def segments(name):
    """(the traced loss of a zoo model, the units of each segment that reads weights in the order of execution)."""
    model = zoo.ZOO[name]
    definition = Zero(zerojax.make_mesh()).eval_init(model.create, optax.sgd(0.1)).definition
    params, other, loss = functional(model, abstract=True)
    leaves, tree = jax.tree.flatten(params)
    units = [leaf.unit for leaf in definition.leaves]

    def flat_loss(*args):
        return loss(jax.tree.unflatten(tree, args[:-1]), args[-1], model.batch(0))[0][0]

    closed = jax.make_jaxpr(flat_loss)(*leaves, other)
    traced = TracedLoss(closed, len(leaves), units)
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


@pytest.mark.parametrize("name", [name for name in zoo.ZOO if name != "dropout_linen"])  # its loss takes a key
def test_every_equation_runs_once(name):
    """Segments contain every equation once, except those of weights alone, and read values that were written before."""
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
    return Regather(unit, list(map(aval, WEIGHTS)), [], [aval((4, 16))], ([True] * 3, [], [True]), [True])


def test_no_weight_is_saved():
    """Saved values have the shapes of activations. Rebuilt values have the shapes of weights, as they are used."""
    r = regather()
    saved = {tuple(value.variable.aval.shape) for value in r.saved}
    rebuilt = {tuple(v.aval.shape) for equation in r.rebuild_equations for v in equation.outvars}
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
    r = Regather(lambda weights, fixed, data: [data[0] @ weights[0]], [w], [], [x], ([True], [], [False]), [True])
    _, saved = r.forward([w], [], [x])
    grads = r.backward([w], [], saved, [cotangent])
    assert grads.weights[0].shape == (24, 16) and grads.orders == [(1, 0)]
    np.testing.assert_allclose(grads.weights[0].T, x.T @ cotangent, rtol=1e-5)


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", ["gpt_nnx", "gpt_linen", "gpt_nnx_scan", "gpt_linen_scan", "moe", "unused"])
def test_no_activation_is_recomputed(name, stage, k):
    """In each microbatch, the step computes as many matrix products as the plain gradient."""
    model, zero = zoo.ZOO[name], Zero(zerojax.make_mesh(), stage)
    state = zero.eval_init(model.create, optax.sgd(0.1))
    step = zero.train_step(loss_of(model), num_microbatches=k).trace(state, model.batch(0)).jaxpr
    params, other, loss = functional(model, abstract=True)
    plain = jax.make_jaxpr(jax.grad(lambda params, other: loss(params, other, model.batch(0))[0][0]))(params, other)
    assert count(step, "dot_general") == k * count(plain, "dot_general") > 0
