"""Low-bit states in steps compiled for GPUs: the bytes of their arguments, and nothing more on the wire."""

import functools

import gpt
import jax.numpy as jnp
import optax
import pytest

import zerojax
from zerojax import Verdict, targets

pytestmark = pytest.mark.aot
low_bit = functools.partial(zerojax.low_bit_moments, exempt=(), min_size=512)


@functools.cache
def compiled(form, offload="none"):
    """(The bytes of the arguments in device memory, the number of parameters, the audit)."""
    forms = {
        "plain": ("bf16", lambda tx: tx),
        "8 bits": ("bf16_params", lambda tx: zerojax.stochastic_rounding(low_bit(tx))),
        "16 bits": ("bf16_params", lambda tx: zerojax.stochastic_rounding(low_bit(tx, 16))),
    }
    config = gpt.Config(width=256, layers=8, heads=4, vocab=512, seq=128, scan=True, dtype=jnp.bfloat16)
    zero = zerojax.Zero(zerojax.make_mesh(devices=targets.devices("h100:8")), 3, forms[form][0], offload=offload)
    state, batch = zero.eval_init(gpt.create(config), forms[form][1](optax.adamw(1e-3))), gpt.batch_aval(config, 8)
    step = zero.train_step(gpt.loss, remat="full")
    program = step.trace(state, batch).lower(lowering_platforms=("cuda",)).compile()
    psi = sum(leaf.size for leaf in state.definition.leaves)
    return program.memory_analysis().argument_size_in_bytes, psi, step.audit(state, batch)


@pytest.mark.parametrize(("form", "bytes_per_parameter"), [("plain", 14), ("8 bits", 4.03), ("16 bits", 6)])
def test_a_device_holds_its_shard_of_the_bytes(form, bytes_per_parameter):
    """Arguments are the state and the batch. Some shards of this model are narrower than a block of 8-bit codes."""
    num_bytes, psi, audit = compiled(form)
    assert num_bytes == pytest.approx(bytes_per_parameter * psi / 8, rel=0.06)
    assert audit["aliased state"].verdict is audit["sharded"].verdict is audit["wire bytes"].verdict is Verdict.OK
    if form != "8 bits":
        assert audit["wire bytes"].numbers == compiled("plain")[2]["wire bytes"].numbers


def test_16_bits_move_through_the_device_in_pieces():
    num_bytes, psi, audit = compiled("16 bits", "optimizer")
    assert num_bytes == pytest.approx(2 * psi / 8, rel=0.06)
    assert audit["host memory"].verdict is audit["pieces of the state"].verdict is Verdict.OK
    assert audit["host memory"].numbers["found_bytes"] == pytest.approx(4 * psi / 8, rel=0.01)
