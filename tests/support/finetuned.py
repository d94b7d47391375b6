"""A model with quantized weights and adapters. As a script, one process of several: finetuned.py BASE FOLDER."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zerojax
from zerojax import Zero, processes
from zerojax.exchange import adapters, parameters, quantized

RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.standard_normal(shape, np.float32)


WEIGHTS = {"layers": {"0": {"up": normal(16, 24), "odd": normal(5, 7)}}, "norm": normal(8)}


def quantize(tree):
    """Matrices in int8 with a scale for each column, as qwix names them; vectors as they are."""

    def replaced(a):
        if not hasattr(a, "ndim") or a.ndim < 2:
            return a
        scale = jnp.max(jnp.abs(a), axis=0, keepdims=True) / 127
        return {"array": {"qvalue": jnp.round(a / scale).astype(jnp.int8), "scale": scale}}

    return jax.tree.map(replaced, tree)


def quantized_state(stage=3):
    params = jax.eval_shape(quantize, WEIGHTS)
    params["layers"]["0"] |= {"up_lora_a": jnp.zeros((16, 2)), "up_lora_b": jnp.zeros((2, 24))}
    zeros = lambda: jax.tree.map(lambda a: jnp.full(a.shape, 3, a.dtype), params)
    return Zero(zerojax.make_mesh(), stage, trainable=["*_lora_*"]).init(zeros, optax.adam(0.1))


def merge_and_export(base, folder):
    """Loads quantized weights, merges the adapters into them, and writes the result. Returns the files."""
    state = quantized.load_quantized(quantized_state(), base, WEIGHTS, quantize, missing=["params/*_lora_?"])
    return parameters.export_params(adapters.merged(state, 0.5), folder)


if __name__ == "__main__":
    own = processes.initialize()
    files = merge_and_export(*sys.argv[1:])
    assert bool(files) == (own.index == 0)
