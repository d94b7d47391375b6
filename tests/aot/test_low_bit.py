"""Low-bit states in compiled steps: their bytes, nothing more on the wire, and no array that is widened as a whole."""

import functools

import gpt
import jax.numpy as jnp
import optax
import pytest

import zerojax
from zerojax import Verdict, targets
from zerojax.offload import host_memory, host_pieces
from zerojax.step.config import Memory

pytestmark = pytest.mark.aot
low_bit = functools.partial(zerojax.low_bit_moments, exempt=(), min_size=512)
FORMS = {
    "plain": ("bf16", lambda tx: tx),
    "8 bits": ("bf16_params", lambda tx: zerojax.stochastic_rounding(low_bit(tx))),
    "16 bits": ("bf16_params", lambda tx: zerojax.stochastic_rounding(low_bit(tx, 16))),
}


def build(form, offload="none", target="h100:8", layers=8, width=256):
    """(Step, state, batch) of a scanned GPT."""
    config = gpt.Config(width=width, layers=layers, heads=4, vocab=512, seq=128, scan=True, dtype=jnp.bfloat16)
    devices = targets.devices(target)
    zero = zerojax.Zero(zerojax.make_mesh(devices=devices), 3, FORMS[form][0], offload=offload)
    state = zero.eval_init(gpt.create(config), FORMS[form][1](optax.adamw(1e-3)))
    return zero.train_step(gpt.loss, remat="full"), state, gpt.batch_aval(config, len(devices))


def program(step, state, batch, target="h100:8"):
    return step.trace(state, batch).lower(lowering_platforms=(targets.platform(target),)).compile()


@functools.cache
def compiled(form):
    """(The bytes of the arguments in device memory, the number of parameters, the audit)."""
    step, state, batch = build(form)
    psi = sum(leaf.size for leaf in state.layout.leaves)
    return program(step, state, batch).memory_analysis().argument_size_in_bytes, psi, step.audit(state, batch)


@pytest.mark.parametrize(("form", "bytes_per_parameter"), [("plain", 14), ("8 bits", 4.03), ("16 bits", 6)])
def test_a_device_holds_its_shard_of_the_bytes(form, bytes_per_parameter):
    """Arguments are the state and the batch. Some shards of this model are narrower than a block of 8-bit codes."""
    num_bytes, psi, audit = compiled(form)
    assert num_bytes == pytest.approx(bytes_per_parameter * psi / 8, rel=0.06)
    assert audit["aliased state"].verdict is audit["sharded"].verdict is audit["wire bytes"].verdict is Verdict.OK
    if form != "8 bits":
        assert audit["wire bytes"].numbers == compiled("plain")[2]["wire bytes"].numbers


@pytest.mark.parametrize("target", ["h100:1", "v5e:2x2"])
def test_the_update_widens_no_array_as_a_whole(monkeypatch, target):
    """The new moments of all layers in fp32 would be 8 bytes for each of their parameters."""
    monkeypatch.setattr(host_pieces, "DEVICE_PIECES_BYTES", 2**22)
    found = []
    for in_pieces in (True, False):
        if not in_pieces:
            monkeypatch.setattr(host_memory.AllOnDevices, "update", Memory.update)
        step, state, batch = build("8 bits", target=target, width=512, layers=16)
        found.append(program(step, state, batch, target).memory_analysis().temp_size_in_bytes)
    assert found[0] < 0.9 * found[1]


@pytest.mark.parametrize(("form", "target", "moved"), [("16 bits", "h100:8", 4), ("8 bits", "h100:1", 2)])
def test_moments_move_through_the_device_in_pieces(form, target, moved):
    step, state, batch = build(form, "optimizer", target, width=512)
    psi = sum(leaf.size for leaf in state.layout.leaves) / len(targets.devices(target))
    num_bytes, audit = program(step, state, batch).memory_analysis().argument_size_in_bytes, step.audit(state, batch)
    assert num_bytes == pytest.approx(2 * psi, rel=0.06)
    assert audit["host memory"].verdict is audit["pieces of the state"].verdict is Verdict.OK
    assert audit["host memory"].numbers["found_bytes"] == pytest.approx(moved * psi, rel=0.01)


def test_a_tpu_cuts_arrays_of_16_bits_between_tiles(monkeypatch):
    """Its compiler slices no single row of bf16 in host memory, as pieces of stacked vectors of six layers would be."""
    monkeypatch.setattr(host_pieces, "PIECES_BYTES", 2**18)
    step, state, batch = build("16 bits", "optimizer", "v5e:2x2", layers=6)
    moved = program(step, state, batch, "v5e:2x2").memory_analysis().host_argument_size_in_bytes
    psi = sum(leaf.size for leaf in state.layout.leaves) / 4
    assert moved == pytest.approx(4 * psi, rel=0.01)


def test_8_bits_cannot_be_in_the_host_memory_of_a_tpu():
    with pytest.raises(ValueError, match="arrays of 8 bits cannot be in the host memory of TPUs") as caught:
        build("8 bits", "optimizer", "v5p:2x2x1", width=1024)
    assert "mu['" not in str(caught.value) and "mu/" in str(caught.value)
    build("16 bits", "optimizer", "v5p:2x2x1")
