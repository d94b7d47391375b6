"""How often the kernels of fused attention run in a traced step. They are the stand-ins of plans, which cannot run."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import zerojax
from zerojax import Remat
from zerojax.plan.transformer import cudnn_attention_for_tracing

LAYERS = 4


class Block(nnx.Module):
    def __init__(self, rngs):
        self.qkv, self.out = nnx.LinearGeneral(16, (3, 4, 4), rngs=rngs), nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x):
        q, k, v = jnp.moveaxis(self.qkv(x), -3, 0)
        mixed = checkpoint_name(cudnn_attention_for_tracing(q, k, v, is_causal=True), "mixed")
        return x + self.out(mixed.reshape(x.shape))


class Model(nnx.Module):
    def __init__(self, *, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(
    ("remat", "forward"),
    [
        ("none", LAYERS),
        ("dots", LAYERS),
        ("full", 2 * LAYERS - 1),  # the last unit saves everything
        (Remat(save=("mixed",)), 2 * LAYERS),  # not the statistics that the derivative reads
        (jax.checkpoint_policies.dots_saveable, 2 * LAYERS),
    ],
    ids=["none", "dots", "full", "named", "policy"],
)
def test_kernels_run_again_unless_all_their_results_are_saved(remat, forward):
    zero = zerojax.Zero(zerojax.make_mesh())
    state = zero.eval_init(Model, optax.sgd(0.1))
    step = zero.train_step(lambda model, x: jnp.mean(model(x) ** 2), remat=remat)
    text = str(step.trace(state, jax.ShapeDtypeStruct((8, 8, 16), jnp.float32)).jaxpr)
    found = [text.count(f"dot_product_attention_{which}[") for which in ("fwd", "bwd")]
    assert found == [forward, LAYERS]
