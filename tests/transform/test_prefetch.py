"""Prefetch: the same gradients at every depth, no gather in vain, and never more units gathered than asked for."""

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
    """A counter is carried, noise is sliced and norms are stacked beside what is differentiated."""

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
    *[(form, 9, 3, depth, "none") for form in LOSSES for depth in DEPTHS if (form, depth) != ("unrolled", 1)],
    *[("scanned", layers, 3, depth, "full") for layers, depth in [(1, 1), (2, 1), (3, 2), (8, 1), (9, 2)]],
    ("scanned", 9, 3, 1, OFFLOAD),
    *[("scanned", 9, stage, 1, "full") for stage in (1, 2)],
]


@pytest.mark.parametrize(("form", "num_layers", "stage", "depth", "remat"), CASES)
def test_the_gradient_is_the_plain_one(form, num_layers, stage, depth, remat):
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
@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 5, 8, 9, 12])
def test_nothing_is_gathered_or_reduced_in_vain(num_layers, depth):
    """Elements per step, loops weighted by their trips: the blocks twice; once the embedding, whose values the backward
    pass does not read, and the head, whose backward pass follows at once."""
    found = traffic.collectives_of(traced("scanned", num_layers, depth).jaxpr, {"data": N})
    of_blocks, of_embed, of_head = num_layers * 2 * WIDTH * 32, WIDTH * WIDTH, WIDTH * 8
    count = lambda kind: sum(c.size * c.count for c in found if c.kind == kind)
    assert count("all_gather") == 2 * of_blocks + of_head + of_embed
    assert count("reduce_scatter") == of_blocks + of_head + of_embed


def test_a_unit_with_another_behind_it_is_dropped():
    """Only the last unit is held until its backward pass. Behind this one a metric gathers another."""

    def loss(params, x):
        value = jnp.mean((jnp.tanh(x @ params["first"]) @ params["second"]) ** 2)
        return value, {"metric": jnp.mean(value * params["third"])}

    params = {"first": jnp.ones((WIDTH, 24)), "second": jnp.ones((24, 40)), "third": jnp.ones((8, 3))}
    fn = zero_for(3, "unrolled").value_and_grad(loss, has_aux=True)
    found = traffic.collectives_of(jax.make_jaxpr(fn)(params, jnp.ones((16, WIDTH))).jaxpr, {"data": N})
    count = lambda size: sum(c.count for c in found if c.kind == "all_gather" and c.size == size)
    assert (count(24 * 40), count(8 * 3)) == (2, 1)


def before_each(jaxpr, name, what):
    """For each primitive `name`, in order: which of the primitives `what` (by their places) have to be done before."""
    ancestors, found, places = {}, [], itertools.count()
    for equation, reads in flat(jaxpr):
        before = frozenset().union(*(ancestors.get(v, frozenset()) for v in reads))
        if equation.primitive.name == name:
            found.append(before)
        if equation.primitive.name == what:
            before |= {next(places)}
        ancestors.update(dict.fromkeys(equation.outvars, before))
    return found


def numbers_before_gathers(jaxpr):
    return [len(products) for products in before_each(jaxpr, "all_gather", "dot_general")]


def test_units_that_none_computes_before_are_gathered_leaf_by_leaf():
    """In the order of use, so that the first product waits for its own weight alone. Later ones arrive whole."""
    params = {str(i): {"a": jnp.ones((512, 512)), "z": jnp.ones((512, 512))} for i in range(3)}

    def loss(params, x):
        for layer in params.values():
            x = jnp.tanh(x @ layer["z"]) @ layer["a"]
        return jnp.mean(x**2)

    fn = zero_for(3, "unrolled").value_and_grad(loss, prefetch=1)
    jaxpr = jax.make_jaxpr(fn)(params, jnp.ones((16, 512))).jaxpr
    gathers = before_each(jaxpr, "all_gather", "all_gather")
    assert [len(before) for before in gathers[:6]] == [0, 1, 2, 3, 4, 4]
    assert [len(before) for before in before_each(jaxpr, "dot_general", "all_gather")[:4]] == [1, 2, 3, 4]


@functools.cache
def waits(form, depth, remat="none"):
    return numbers_before_gathers(traced(form, 4, depth, remat=remat).jaxpr)


def test_without_prefetch_a_gather_waits_for_the_unit_before():
    """Products: one of the embedding, two of a block, one of the head; twice as many backward. The embedding and the
    head are not gathered again."""
    forward, backward = [0, 1, 3, 5, 7, 9], [12, 16, 20, 24]
    assert waits("unrolled", 0) == forward + backward


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize(("form", "depth"), [("unrolled", 1), ("unrolled", 2), ("scanned", 2)])
def test_with_one_more_unit_ahead_each_gather_waits_for_one_less(form, depth, remat):
    """Forward and backward: for the products of all units up to the one that leaves the window, and no later one.

    Between the six gathers of the forward pass and those of the backward pass, the head computes a second time.
    """
    less, more = waits(form, depth, remat), waits(form, depth - 1, remat)
    assert less[:6] == [0, *more[:5]] and less[7:] == more[6:-1]
    assert more[5] < less[6] < more[6]


@pytest.mark.parametrize("form", ["unrolled", "scanned"])
def test_nothing_is_computed_again_before_the_head_has_gone_backward(form):
    """Ten products forward, of which the last is the head's, and then one of its two: of all that come after."""
    before = before_each(traced(form, 4, 1, remat="full").jaxpr, "dot_general", "dot_general")
    of_head = [k for k, products in enumerate(before) if len(products) == 10]
    assert len(of_head) == 2
    assert all(set(of_head) & products for products in before[of_head[1] + 1 :])


def test_a_stack_is_gathered_like_unrolled_layers():
    """The scanned loss has one more product, of the norms of its layers."""
    unrolled, scanned = waits("unrolled", 1), waits("scanned", 1)
    assert scanned[:6] == unrolled[:6]
    assert all(0 <= b - a <= 2 for a, b in zip(unrolled[6:], scanned[6:], strict=True))


def test_the_gathers_in_a_loop_overlap_with_one_layer_each():
    """The body has two layers: its first gather waits for no product in it, its second for those of one layer."""
    (forward, backward) = [e for e, _ in flat(traced("scanned", 9, 1).jaxpr) if e.primitive.name == "scan"]
    assert numbers_before_gathers(forward.params["jaxpr"].jaxpr) == [0, 2]
    first, second = numbers_before_gathers(backward.params["jaxpr"].jaxpr)
    assert first == 0 and 0 < second <= 4


@pytest.mark.parametrize(("remat", "again"), [("full", 2), ("dots", 0)])
def test_gradients_of_a_layer_wait_for_those_before_where_something_hides_their_reduction(remat, again):
    """Where a layer is computed `again`, no gradient is made before those of the layer before are reduced, so that one
    layer's are held. Elsewhere the reduction has only the gradients beside it, and two layers' are held.

    A body of two layers: which of its two reductions each product of the backward pass has to have behind it.
    """
    (_, backward) = [e for e, _ in flat(traced("scanned", 9, 1, remat=remat).jaxpr) if e.primitive.name == "scan"]
    reductions = before_each(backward.params["jaxpr"].jaxpr, "dot_general", "reduce_scatter")
    first, second = ({0}, {0, 1}) if again else (set(), {0})
    layers = [reductions[: 4 + again], reductions[4 + again :]]
    assert [before for layer in layers for before in layer[again:]] == [first] * 4 + [second] * 4
    assert all(
        before < behind for layer, behind in zip(layers, (first, second), strict=True) for before in layer[:again]
    )


def test_at_stage_2_a_layer_is_computed_again_beside_the_reduction_of_the_one_above():
    """After its gradients, since all weights are there and a body has two layers, whose activations would both be held;
    not after their reduction, which it hides. The seventh of its products is the first of the second layer."""
    jaxpr = traced("scanned", 9, 1, stage=2, remat="full").jaxpr
    (_, backward) = [e for e, _ in flat(jaxpr) if e.primitive.name == "scan"]
    before = lambda what: before_each(backward.params["jaxpr"].jaxpr, "dot_general", what)
    products, reductions = before("dot_general"), before("reduce_scatter")
    assert len(products) == 2 * 6 and products[6] >= {2, 3, 4}
    assert 1 not in reductions[6] and 1 in reductions[-1]


def copies_back(jaxpr):
    """(how many products have to be done before each copy from host memory, copies that each product waits for)."""
    ancestors, products, copies = {}, [], []
    back = lambda e: e.primitive.name == "device_put" and e.params["devices"] == (jax.memory.Space.Device,)
    for equation, reads in flat(jaxpr):
        before = frozenset().union(*(ancestors.get(v, frozenset()) for v in reads))
        count = lambda name, found=before: sum(kind == name for kind, _ in found)
        if back(equation) and equation.invars[0].aval.ndim:  # scalars come back too, to tell when a copy is there
            products.append(count("dot_general"))
            before |= {("copy", id(equation))}
        if equation.primitive.name == "dot_general":
            copies.append(count("copy"))
            before |= {("dot_general", id(equation))}
        ancestors.update(dict.fromkeys(equation.outvars, before))
    return products, copies


def test_what_unrolled_units_offloaded_comes_back_one_unit_after_the_other():
    """Each waits for more of the backward pass than the one before."""
    products, copies = copies_back(traced("unrolled", 4, 1, remat=OFFLOAD).jaxpr)
    assert products == sorted(products) and len(set(products)) == 1 + 4  # head and blocks; the embedding has the batch
    assert copies[:10] == [0] * 10  # the forward pass


def test_in_a_loop_what_was_offloaded_comes_back_one_layer_ahead():
    """Of two layers the first finds it there, from the iteration before; that of the second comes beside the first.

    What comes beside the second may wait for the reduction of the first one's gradients, of all six of its products.
    """
    (_, backward) = [e for e, _ in flat(traced("scanned", 9, 1, remat=OFFLOAD).jaxpr) if e.primitive.name == "scan"]
    products, copies = copies_back(backward.params["jaxpr"].jaxpr)
    assert copies == [0] * 6 + [1] * 6
    assert products[0] == 0 and 0 < products[1] <= 6


@pytest.mark.parametrize("depth", [-1, 1.0, None, True])
def test_a_depth_is_a_number_of_units(depth):
    with pytest.raises(ValueError, match="prefetch"):
        Zero(zerojax.make_mesh()).train_step(loss, prefetch=depth)
