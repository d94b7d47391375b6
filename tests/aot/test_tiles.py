"""Programs for GPUs and TPUs in tiles: no array of all tokens by the vocabulary, and the bytes of the stage."""

import re

import gpt
import jax.numpy as jnp
import optax
import pytest

import zerojax
from zerojax import targets

pytestmark = pytest.mark.aot

VOCAB, SEQ = 4000, 1024  # in which no other dim of the program is


def program(target, tiles, scan):
    """(The audit of a step, the text of its program, its temporary bytes)."""
    config = gpt.Config(width=256, layers=6, heads=4, vocab=VOCAB, seq=SEQ, scan=scan, dtype=jnp.bfloat16)
    zero = zerojax.Zero(zerojax.make_mesh(devices=targets.devices(target)), 3, "bf16")
    state = zero.eval_init(gpt.create(config), optax.adamw(1e-3))
    batch = gpt.batch_aval(config, zero.config.axes.num_devices)
    step = zero.train_step(gpt.loss, remat="full", tiles=tiles)
    compiled = step.lower(state, batch, lowering_platforms=(targets.platform(target),)).compile()
    return step.audit(state, batch), compiled.as_text(), compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    ("target", "scan"),
    [("h100:8", True), pytest.param("h100:8", False, marks=pytest.mark.full), ("v5e:2x4", True)],
)
def test_logits_of_all_tokens_do_not_exist(target, scan):
    audit, text, temporaries = program(target, 128, scan)
    _, without, more = program(target, "none", scan)
    assert audit.ok, str(audit)
    logits = rf"\[(1,)?{SEQ},{VOCAB}\]"
    assert re.search(logits, without) and not re.search(logits, text)
    assert temporaries < 0.75 * more
