"""A frozen base in int8 or float8, compiled for eight H100s: each of its weights moves as one byte."""

import collections

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import zerojax
from zerojax import Zero, targets
from zerojax.analysis import hlo
from zerojax.analysis.hlo_collectives import compiled_collectives
from zerojax.analysis.jaxpr_counts import dtype_name

pytestmark = pytest.mark.aot
N, WIDTH, RANK, LAYERS, ROWS = 8, 512, 8, 4, 1024


class Tuned(nnx.Module):
    """A quantized weight and its adapters, as in QLoRA."""

    def __init__(self, dtype, rngs):
        self.weight = nnx.Param(jnp.ones((WIDTH, WIDTH), dtype))
        self.scale = nnx.Param(jnp.ones((1, WIDTH), jnp.bfloat16))
        self.a = nnx.LoRAParam(jax.random.normal(rngs.params(), (WIDTH, RANK)))
        self.b = nnx.LoRAParam(jnp.zeros((RANK, WIDTH)))

    def __call__(self, x):
        return nnx.gelu(x @ self.weight[...].astype(x.dtype) * self.scale[...] + x @ self.a[...] @ self.b[...])


class Model(nnx.Module):
    def __init__(self, dtype, rngs):
        self.layers = nnx.List([Tuned(dtype, rngs) for _ in range(LAYERS)])

    def __call__(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def loss(model, x):
    return jnp.mean(model(x).astype(jnp.float32) ** 2)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_weights_of_a_narrow_base_are_gathered_as_one_byte(dtype):
    """All layers for the forward pass; for the backward pass, neither the last, which is still there, nor the first,
    through which no gradient is needed. Only adapters are reduced. The audit finds each gather in its place."""
    mesh = zerojax.make_mesh(devices=targets.devices("h100:8"))
    zero = Zero(mesh, precision="bf16", trainable=nnx.LoRAParam)
    state = zero.eval_init(lambda rngs: Model(dtype, rngs), optax.adam(1e-3))
    step, batch = zero.train_step(loss), jax.ShapeDtypeStruct((N * ROWS, WIDTH), jnp.bfloat16)
    compiled = step.trace(state, batch).lower(lowering_platforms=("cuda",)).compile()
    found = collections.Counter()
    for each in compiled_collectives(hlo.parse_program(compiled.as_text())):
        found[each.kind, each.dtype] += each.full_bytes * each.trips
    assert found["all-gather", dtype_name(jnp.dtype(dtype))] == (2 * LAYERS - 2) * WIDTH * WIDTH
    assert found["reduce-scatter", "bf16"] == 2 * LAYERS * 2 * WIDTH * RANK
    assert {key for key in found if key[0] == "all-gather"} == {
        ("all-gather", dtype_name(jnp.dtype(dtype))),
        ("all-gather", "bf16"),
    }
    assert found["all-gather", "bf16"] < 0.2 * LAYERS * WIDTH * WIDTH
    audit = step.audit(state, batch)
    assert audit["prefetch order"].verdict is zerojax.Verdict.OK, str(audit)
