"""Models that qwix, which Tunix brings, quantizes to fp8 train as they do on one device."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import qwix
from flax import nnx

import zerojax
from zerojax import Zero

pytestmark = pytest.mark.zoo
X = np.random.default_rng(0).standard_normal((64, 32), np.float32)
FP8 = qwix.QtRule(
    module_path=".*", weight_qtype=jnp.float8_e4m3fn, act_qtype=jnp.float8_e4m3fn, bwd_qtype=jnp.float8_e5m2
)


class Layers(nnx.Module):
    def __init__(self, *, rngs):
        self.layers = nnx.List([nnx.Linear(32, 32, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            x = x + nnx.gelu(layer(x))
        return x


def create(rngs):
    return qwix.quantize_model(Layers(rngs=rngs), qwix.QtProvider([FP8]), X[:8])


def loss(model, x):
    return jnp.mean((model(x) - jnp.roll(x, 1, axis=1)) ** 2)


@pytest.mark.parametrize("stage", [0, *(pytest.param(stage, marks=pytest.mark.full) for stage in (1, 2)), 3])
def test_training_in_fp8_is_that_of_one_device(stage):
    """The scales of gradients are those of each device's rows, so losses agree to the precision of fp8."""
    model = create(nnx.Rngs(0))
    optimizer, want, got = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param), [], []
    zero = Zero(zerojax.make_mesh(), stage)
    state, step = zero.init(create, optax.adam(1e-2)), zero.train_step(loss)
    for _ in range(5):
        value, grads = nnx.value_and_grad(loss)(model, X)
        optimizer.update(model, grads)
        want.append(float(value))
        state, metrics = step(state, X)
        got.append(float(metrics["loss"]))
    np.testing.assert_allclose(got, want, rtol=1e-2)
    exact = loss(Layers(rngs=nnx.Rngs(0)), X)
    assert want[-1] < 0.8 * want[0] and abs(want[0] / exact - 1) > 1e-4  # it learns, and not in fp32
