"""Programs for GPUs and TPUs whose tokens are divided: the bytes of states and of attention are those of formulas."""

import gpt
import jax.numpy as jnp
import optax
import pytest

import zerojax
from zerojax import targets

pytestmark = pytest.mark.aot

CONTEXT, LAYERS, SEQ, WIDTH = 4, 4, 2048, 512


@pytest.mark.parametrize(
    ("target", "kernel", "tiles"),
    [
        ("h100:8", "cudnn", 128),
        pytest.param("h100:8", "cudnn", "none", marks=pytest.mark.full),
        ("v5e:2x4", None, "none"),
    ],
)
def test_states_and_attention_send_what_formulas_say(target, kernel, tiles):
    """Queries, keys, values and results of attention are exchanged in three passes: forward, recomputation, backward.

    Keys and values are not gathered, and no activation is.
    """
    config = gpt.Config(WIDTH, LAYERS, heads=8, vocab=4096, seq=SEQ, dtype=jnp.bfloat16, attention=kernel)
    zero = zerojax.Zero(zerojax.make_mesh(devices=targets.devices(target), context=CONTEXT), 3, "bf16")
    state, batch = zero.eval_init(gpt.create(config), optax.adamw(1e-3)), gpt.batch_aval(config, 2)
    audit = zero.train_step(gpt.loss, remat="full", tiles=tiles).audit(state, batch)
    assert audit.ok, str(audit)
    found = audit["along context"].numbers
    reduced = found["reduce_scattered"] + found["all_reduced"] / 2  # of small gradients, on TPUs
    assert reduced == pytest.approx(found["expected_reduce_scattered"], rel=0.02)
    of_pass = 4 * SEQ // CONTEXT * WIDTH * 2 * (CONTEXT - 1) / CONTEXT
    assert found["exchanged"] == pytest.approx(3 * LAYERS * of_pass, rel=0.01)
    assert found["gathered"] == 0 and found["all_reduced"] < 0.05 * found["reduce_scattered"]
    assert audit["wire bytes"].numbers["found_bytes"] <= audit["wire bytes"].numbers["expected_bytes"]
