"""Prefetch: the same gradients at every depth, no unnecessary gather, and at most `prefetch + 1` units gathered."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import traffic
from support.plain import numbers
from support.walk import flat

import zerojax
from zerojax import Remat, Zero

N, WIDTH = 8, 16
DEPTHS = (0, 1, 2)


def create(num_layers, scanned):
    def weights(seed, *shape):
        return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32) / 4

    layers = [{"up": weights(2 * i, WIDTH, 32), "down": weights(2 * i + 1, 32, WIDTH)} for i in range(num_layers)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *layers)
    blocks = stacked if scanned else {str(i): layer for i, layer in enumerate(layers)}
    return {"embed": weights(90, WIDTH, WIDTH), "blocks": blocks, "head": weights(91, WIDTH, 8), "gain": np.float32(1)}


def block(x, layer, gain):
    hidden = jnp.tanh(x @ layer["up"])
    return x + gain * jnp.sin(hidden @ layer["down"])


def loss(params, batch):
    x = batch["x"] @ params["embed"]
    for layer in params["blocks"].values():
        x = block(x, layer, params["gain"])
    return jnp.mean((x @ params["head"] - batch["y"]) ** 2)


def scanned_loss(params, batch, reverse=False):
    """In addition to the differentiated values, the scan carries a counter, slices noise and stacks norms."""

    def body(carry, slices):
        (count, x), (layer, noise) = carry, slices
        x = block(x + noise * count, layer, params["gain"])
        return (count + 1, x), jnp.mean(x**2)

    xs = params["blocks"], batch["noise"][0]
    (_, x), norms = jax.lax.scan(body, (jnp.int32(0), batch["x"] @ params["embed"]), xs, reverse=reverse)
    return jnp.mean((x @ params["head"] - batch["y"]) ** 2) + 0.1 * norms @ jnp.arange(1.0, len(norms) + 1)


def make_batch(num_layers):
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((16, WIDTH), np.float32), rng.standard_normal((16, 8), np.float32)
    noise = np.broadcast_to(rng.standard_normal(num_layers, np.float32) / 8, (16, num_layers))
    return {"x": x, "y": y, "noise": noise}


LOSSES = {
    "unrolled": loss,
    "scanned": scanned_loss,
    "scanned backwards": functools.partial(scanned_loss, reverse=True),
}


def problem(form, num_layers):
    return create(num_layers, form != "unrolled"), make_batch(num_layers), LOSSES[form]


@functools.cache
def plain_gradient(form, num_layers):
    params, batch, loss = problem(form, num_layers)
    return jax.jit(jax.value_and_grad(loss))(params, batch)


def zero_for(stage, form, mesh=None):
    return Zero(mesh or zerojax.make_mesh(), stage, stacked=() if form == "unrolled" else ("blocks/*",))


OFFLOAD = Remat(offload_inputs=True)
CASES = [
    *[(form, 9, 3, depth, "none") for form, depth in zip(LOSSES, (0, 2, 1), strict=False)],
    *[("scanned", layers, 3, depth, "full") for layers, depth in [(1, 1), (2, 1), (9, 2)]],
    ("scanned", 9, 3, 1, OFFLOAD),
    ("scanned", 9, 2, 1, "full"),
]


@pytest.mark.parametrize(("form", "num_layers", "stage", "depth", "remat"), CASES)
def test_the_gradient_is_that_of_jax(form, num_layers, stage, depth, remat):
    params, batch, loss = problem(form, num_layers)
    zero = zero_for(stage, form)
    got = jax.jit(zero.value_and_grad(loss, prefetch=depth, remat=remat))(zero.shard(params), zero.shard_batch(batch))
    want = plain_gradient(form, num_layers)
    for a, b in zip(numbers(got), numbers(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6 * max(1, np.abs(b).max()))


def traced(form, num_layers, depth, stage=3, remat="none"):
    params, batch, loss = problem(form, num_layers)
    fn = zero_for(stage, form).value_and_grad(loss, prefetch=depth, remat=remat)
    return jax.make_jaxpr(fn)(params, batch)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("num_layers", [1, 2, 5, 8])
def test_no_gather_or_reduction_is_unnecessary(num_layers, depth):
    """Counts elements per step, weighted by the trips of loops.

    The blocks are gathered twice. The embedding is gathered once, because the backward pass does not read its values,
    and so is the head, because its backward pass follows immediately.
    """
    found = traffic.collectives_of(traced("scanned", num_layers, depth).jaxpr, {"data": N})
    of_blocks, of_embed, of_head = num_layers * 2 * WIDTH * 32, WIDTH * WIDTH, WIDTH * 8
    count = lambda kind: sum(c.size * c.count for c in found if c.kind == kind)
    assert count("all_gather") == 2 * of_blocks + of_head + of_embed
    assert count("reduce_scatter") == of_blocks + of_head + of_embed


def test_only_the_last_unit_is_held_until_its_backward_pass():
    """The second unit is not the last one here, because a metric uses the third."""

    def loss(params, x):
        value = jnp.mean((jnp.tanh(x @ params["first"]) @ params["second"]) ** 2)
        return value, {"metric": jnp.mean(value * params["third"])}

    params = {"first": jnp.ones((WIDTH, 24)), "second": jnp.ones((24, 40)), "third": jnp.ones((8, 3))}
    fn = zero_for(3, "unrolled").value_and_grad(loss, has_aux=True)
    found = traffic.collectives_of(jax.make_jaxpr(fn)(params, jnp.ones((16, WIDTH))).jaxpr, {"data": N})
    count = lambda size: sum(c.count for c in found if c.kind == "all_gather" and c.size == size)
    assert (count(24 * 40), count(8 * 3)) == (2, 1)


def before_each(jaxpr, name, awaited):
    """For each primitive `name`, in order: the indices of the primitives `awaited` that it depends on."""
    ancestors, found, places = {}, [], itertools.count()
    for equation, reads in flat(jaxpr):
        before = frozenset().union(*(ancestors.get(v, frozenset()) for v in reads))
        if equation.primitive.name == name:
            found.append(before)
        if equation.primitive.name == awaited:
            before |= {next(places)}
        ancestors.update(dict.fromkeys(equation.outvars, before))
    return found


def products_before_gathers(jaxpr):
    """For each all_gather, the number of matrix products that it depends on."""
    return [len(products) for products in before_each(jaxpr, "all_gather", "dot_general")]


def test_the_first_unit_is_gathered_leaf_by_leaf():
    """In the order of use, so that the first product waits only for its own weight. Later units are gathered whole."""
    params = {str(i): {"a": jnp.ones((512, 512)), "z": jnp.ones((512, 512))} for i in range(3)}

    def loss(params, x):
        for layer in params.values():
            x = jnp.tanh(x @ layer["z"]) @ layer["a"]
        return jnp.mean(x**2)

    fn = zero_for(3, "unrolled").value_and_grad(loss, prefetch=1)
    jaxpr = jax.make_jaxpr(fn)(params, jnp.ones((16, 512))).jaxpr
    gathers = before_each(jaxpr, "all_gather", "all_gather")
    assert [len(before) for before in gathers[:6]] == [0, 1, 2, 2, 4, 4]
    assert [len(before) for before in before_each(jaxpr, "dot_general", "all_gather")[:4]] == [1, 2, 3, 4]


@functools.cache
def waits(form, depth, remat="none"):
    return products_before_gathers(traced(form, 4, depth, remat=remat).jaxpr)


def test_without_prefetch_a_gather_waits_for_the_previous_unit():
    """The forward pass has one product for the embedding, two for each block, and one for the head.

    The backward pass has twice as many. The embedding and the head are not gathered again.
    """
    forward, backward = [0, 1, 3, 5, 7, 9], [12, 16, 20, 24]
    assert waits("unrolled", 0) == forward + backward


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize(("form", "depth"), [("unrolled", 1), ("unrolled", 2), ("scanned", 2)])
def test_each_unit_of_prefetch_makes_a_gather_wait_for_one_unit_less(form, depth, remat):
    """A gather waits for the products of all units up to the one that leaves the window, and for no later ones.

    Between the six gathers of the forward pass and those of the backward pass, the backward pass of the head computes.
    """
    deeper, shallower = waits(form, depth, remat), waits(form, depth - 1, remat)
    assert deeper[:6] == [0, *shallower[:5]] and deeper[7:] == shallower[6:-1]
    assert shallower[5] < deeper[6] < shallower[6]


@pytest.mark.parametrize("form", ["unrolled", "scanned"])
def test_nothing_is_recomputed_before_the_backward_pass_of_the_head(form):
    """The forward pass has ten products, the last of them in the head. The backward pass of the head has two.

    All products after these depend on one of them.
    """
    before = before_each(traced(form, 4, 1, remat="full").jaxpr, "dot_general", "dot_general")
    of_head = [k for k, products in enumerate(before) if len(products) == 10]
    assert len(of_head) == 2
    assert all(set(of_head) & products for products in before[of_head[1] + 1 :])


def test_a_stack_is_gathered_like_unrolled_layers():
    """The scanned loss has one more product, with the norms of its layers."""
    unrolled, scanned = waits("unrolled", 1), waits("scanned", 1)
    assert scanned[:6] == unrolled[:6]
    assert all(0 <= b - a <= 2 for a, b in zip(unrolled[6:], scanned[6:], strict=True))


def test_each_gather_in_a_loop_overlaps_with_one_layer():
    """A body has two layers. Its first gather waits for no product of the body, and its second for those of a layer."""
    (forward, backward) = [e for e, _ in flat(traced("scanned", 9, 1).jaxpr) if e.primitive.name == "scan"]
    assert products_before_gathers(forward.params["jaxpr"].jaxpr) == [0, 2]
    first, second = products_before_gathers(backward.params["jaxpr"].jaxpr)
    assert first == 0 and 0 < second <= 4


@pytest.mark.parametrize(("remat", "recomputed"), [("full", 2), ("dots", 0)])
def test_gradients_wait_for_the_previous_reduction_only_if_recomputation_hides_it(remat, recomputed):
    """If a layer is recomputed, none of its gradients is computed before those of the previous layer are reduced.

    The recomputation overlaps with this reduction, and the gradients of only one layer are held. Otherwise, only the
    computation of the gradients can overlap with the reduction, and the gradients of two layers are held.

    A body has two layers. The test looks at which of its two reductions each product of the backward pass waits for;
    `recomputed` is the number of products that are recomputed in each layer.
    """
    (_, backward) = [e for e, _ in flat(traced("scanned", 9, 1, remat=remat).jaxpr) if e.primitive.name == "scan"]
    reductions = before_each(backward.params["jaxpr"].jaxpr, "dot_general", "reduce_scatter")
    first, second = ({0}, {0, 1}) if recomputed else (set(), {0})
    layers = [reductions[: 4 + recomputed], reductions[4 + recomputed :]]
    assert [before for layer in layers for before in layer[recomputed:]] == [first] * 4 + [second] * 4
    for layer, awaited in zip(layers, (first, second), strict=True):
        assert all(before < awaited for before in layer[:recomputed])


def test_at_stage_2_a_layer_is_recomputed_while_the_gradients_of_the_previous_one_are_reduced():
    """At stage 2 all weights are in full form, and the activations of both layers of a body could be held at once.

    So the recomputation of a layer waits for the gradients of the previous one, but not for their reduction, which it
    overlaps with. The seventh product of the body is the first one of its second layer.
    """
    jaxpr = traced("scanned", 9, 1, stage=2, remat="full").jaxpr
    (_, backward) = [e for e, _ in flat(jaxpr) if e.primitive.name == "scan"]
    before = lambda awaited: before_each(backward.params["jaxpr"].jaxpr, "dot_general", awaited)
    products, reductions = before("dot_general"), before("reduce_scatter")
    assert len(products) == 2 * 6 and products[6] >= {2, 3, 4}
    assert 1 not in reductions[6] and 1 in reductions[-1]


def copies_to_device(jaxpr):
    """(products that each copy from host memory waits for, copies that each product waits for), as numbers."""
    ancestors, products, copies = {}, [], []
    to_device = lambda e: e.primitive.name == "device_put" and e.params["devices"] == (jax.memory.Space.Device,)
    for equation, reads in flat(jaxpr):
        before = frozenset().union(*(ancestors.get(v, frozenset()) for v in reads))
        count = lambda name, found=before: sum(kind == name for kind, _ in found)
        if to_device(equation) and equation.invars[0].aval.ndim:  # scalars are events, which signal a finished copy
            products.append(count("dot_general"))
            before |= {("copy", id(equation))}
        if equation.primitive.name == "dot_general":
            copies.append(count("copy"))
            before |= {("dot_general", id(equation))}
        ancestors.update(dict.fromkeys(equation.outvars, before))
    return products, copies


def test_inputs_of_unrolled_units_are_copied_back_one_unit_after_another():
    """Each copy waits for more of the backward pass than the previous one."""
    products, copies = copies_to_device(traced("unrolled", 4, 1, remat=OFFLOAD).jaxpr)
    assert (
        products == sorted(products) and len(set(products)) == 1 + 4
    )  # head and blocks; the input of the embedding is the batch
    assert copies[:10] == [0] * 10  # the forward pass


def test_inputs_of_layers_in_a_loop_are_copied_back_one_layer_ahead():
    """A body has two layers. The input of the first was copied in the previous iteration.

    The input of the second is copied while the first computes. The copy that overlaps with the second may wait for the
    reduction of the gradients of the first, and so for all six of its products.
    """
    (_, backward) = [e for e, _ in flat(traced("scanned", 9, 1, remat=OFFLOAD).jaxpr) if e.primitive.name == "scan"]
    products, copies = copies_to_device(backward.params["jaxpr"].jaxpr)
    assert copies == [0] * 6 + [1] * 6
    assert products[0] == 0 and 0 < products[1] <= 6


@pytest.mark.parametrize("depth", [-1, 1.0, None, True])
def test_an_invalid_depth(depth):
    with pytest.raises(ValueError, match="prefetch"):
        Zero(zerojax.make_mesh()).train_step(loss, prefetch=depth)
