"""The flops of a model are counted in its traced loss, and equal the usual formula."""

import gpt
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from zerojax.analysis.hardware import cluster
from zerojax.analysis.jaxpr_counts import model_flops
from zerojax.plan.formula import throughput

aval = jax.ShapeDtypeStruct


def flops(fn, *avals):
    return model_flops(jax.make_jaxpr(fn)(*avals).jaxpr)


def gpt_flops(config, rows):
    graph, state = nnx.split(nnx.eval_shape(lambda: gpt.GPT(config, nnx.Rngs(0))))
    batch = {"tokens": aval((rows, config.seq + 1), jnp.int32)}
    return flops(lambda state, batch: gpt.loss(nnx.merge(graph, state), batch), state, batch)


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("remat", [False, True])
def test_flops_of_a_gpt_are_the_formula(scan, remat):
    """6 for each token and each weight of a product, and 12 x layers x width x length for attention. Layers that are
    recomputed count once."""
    config, rows = gpt.Config(width=64, layers=4, heads=4, vocab=128, seq=32, scan=scan, remat=remat), 8
    weights = config.layers * 12 * config.width**2 + config.vocab * config.width
    attention = 12 * config.layers * config.width * config.seq
    assert gpt_flops(config, rows) == (6 * weights + attention) * rows * config.seq


def test_flops_of_products():
    for fn, shapes, forward in [
        (lambda x, y: x @ y, [(4, 8), (8, 16)], 2 * 4 * 8 * 16),
        (lambda x, y: jnp.einsum("bij,bkj->bik", x, y), [(3, 4, 8), (3, 16, 8)], 2 * 3 * 4 * 8 * 16),
        (lambda x, y: jax.lax.conv(x, y, (1, 1), "SAME"), [(2, 3, 8, 8), (5, 3, 1, 1)], 2 * 2 * 5 * 8 * 8 * 3),
        (lambda x: jax.lax.scan(lambda c, _: (c @ c, None), x, length=7)[0], [(4, 4)], 7 * 2 * 4**3),
        (lambda x: jax.lax.cond(x[0, 0] > 0, lambda: x @ x, lambda: x @ x.T), [(4, 4)], 2 * 4**3),
        (lambda x: x + 1, [(4, 4)], 0),
    ]:
        assert flops(fn, *[aval(shape, jnp.float32) for shape in shapes]) == 3 * forward


def test_products_that_cannot_be_counted_are_rejected():
    for fn, name in [
        (lambda x: jax.lax.while_loop(lambda x: x[0, 0] > 0, lambda x: x @ x, x), "while"),
        (lambda x: jax.lax.cond(x[0, 0] > 0, lambda: x @ x, lambda: x), "cond"),
        (lambda x: jax.lax.ragged_dot(x, x[None], jnp.array([4])), "ragged_dot"),
    ]:
        with pytest.raises(ValueError, match=f"cannot count the flops of '{name}"):
            flops(fn, aval((4, 4), jnp.float32))


def test_throughput():
    """Half a second for 1000 tokens, with a tenth of the flops that the peak of all devices allows."""
    h100 = cluster("h100:8")
    found = throughput(0.5, h100, 1000, round(0.1 * 0.5 * 8 * 989e12))
    assert found == pytest.approx((2000, 250, 0.1))
