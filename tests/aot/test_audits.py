"""Audits of programs compiled for eight H100s and for TPUs: a correct step passes, faults are found, and known rewrites
of the TPU compiler are named with their cost."""

import dataclasses
import functools

import gpt
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType
from support import by_hand

import zerojax
from zerojax import Remat, Verdict, targets

pytestmark = pytest.mark.aot
N, WIDTH = 8, 256


def broken(audit):
    return {finding.name for finding in audit.broken}


@functools.cache
def audited(target, stage, k=1, scan=False, model=None, replica=1, width=128, ring=False, wire=None, **options):
    config = gpt.Config(width=width, layers=6 if scan else 3, scan=scan, dtype=jnp.bfloat16, annotated=bool(model))
    mesh = zerojax.make_mesh(devices=targets.devices(target), model=model, replica=replica)
    if ring:  # the order in which JAX puts the chips of this slice
        mesh = jax.make_mesh((mesh.size,), ("data",), (AxisType.Auto,), devices=targets.devices(target))
    precision = dataclasses.replace(zerojax.Precision.of("bf16"), gather=wire, scatter=wire)
    zero = zerojax.Zero(mesh, stage, precision)
    state = zero.eval_init(gpt.create(config), optax.adamw(1e-3))
    rows = k * zero.config.axes.num_devices
    return zero.train_step(gpt.loss, num_microbatches=k, **options).audit(state, gpt.batch_aval(config, rows))


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (0, {}),
        (1, {"k": 2, "scan": True}),
        (2, {"k": 2, "model": 2}),
        (2, {"k": 2, "scan": True, "bucket_bytes": 2**17}),
        (3, {}),
        (3, {"k": 2, "remat": "full", "prefetch": 2}),
        (3, {"k": 2, "scan": True, "remat": Remat(offload_inputs=True)}),
        (3, {"scan": True, "model": 2, "prefetch": 0}),
    ],
)
def test_a_correct_step_passes_every_check(stage, options):
    audit = audited("h100:8", stage, **options)
    assert broken(audit) == set()
    verdicts = {finding.name: finding.verdict for finding in audit.findings}
    overlaps = stage == 3 and options.get("prefetch", 1)
    assert verdicts.pop("exposed") in ((Verdict.OK, Verdict.SLOW) if overlaps else (Verdict.INFO,))  # layers are tiny
    assert set(verdicts.values()) == {Verdict.OK}
    assert ("checkpoints" in verdicts) == isinstance(options.get("remat"), Remat)


def test_the_compiled_program_gathers_and_reduces_as_much_as_the_trace():
    """Up to 1%: the compiler does not change the communication of the step."""
    audit = audited("h100:8", 3, k=2, remat="full", prefetch=2)
    gathered, reduced = audit["gathered weights kept"].numbers, audit["reductions"].numbers
    assert gathered["found_bytes"] == pytest.approx(gathered["expected_bytes"], rel=0.01)
    assert reduced["all_reduced"] == 0 and reduced["reduce_scattered"] > 0


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("h100:16", {"replica": 2, "k": 2, "scan": True, "wire": "int8"}),
        ("h100:8", {"wire": "float8_e4m3fn"}),
        ("v5e:4x4", {"scan": True, "wire": "int8", "width": 512}),
    ],
)
def test_large_leaves_stay_in_8_bits_in_the_program(target, options):
    """The compiler moves no conversion across a collective, and adds none."""
    audit = audited(target, 3, **options)
    assert broken(audit) == set()
    bytes_sent, by_kind = audit["wire bytes"].numbers, audit["reductions"].numbers
    assert bytes_sent["found_bytes"] > 0.9 * bytes_sent["expected_bytes"]
    assert by_kind["exchanged"] > by_kind["reduce_scattered"]


@pytest.mark.parametrize(
    ("target", "stage", "options"),
    [
        ("v5e:4x4", 1, {}),
        ("v5e:4x4", 3, {"k": 2}),
        ("v5p:4x4x2", 3, {"scan": True}),
        ("v5p:2x2x4", 2, {"bucket_bytes": 2**20}),
        ("v6e:4x4", 3, {"scan": True, "remat": "full"}),
        ("v4:4x4x4", 3, {"scan": True}),
    ],
)
def test_a_step_on_a_torus_sends_the_bytes_of_the_formula(target, stage, options):
    """No reduce-scatter becomes an all-reduce, which would send twice the bytes."""
    audit = audited(target, stage, width=512, **options)
    assert broken(audit) == set()
    assert audit["wire bytes"].verdict is Verdict.OK and audit["reductions"].verdict is Verdict.OK
    assert audit["wire bytes"].numbers["found_bytes"] > 0.9 * audit["wire bytes"].numbers["expected_bytes"]


def test_rows_that_fill_no_whole_tiles_are_summed():
    """The compiler aborted: it sliced such a row, of a pack of small leaves, before it was summed."""
    audit = audited("v5p:2x2x1*2", 3, scan=True, replica=2, width=256)
    assert audit["sharded"].verdict is Verdict.OK and audit["reductions"].verdict is Verdict.OK


@pytest.mark.parametrize(
    ("target", "stage", "options"),
    [
        ("v5p:2x2x1*2", 3, {"scan": True, "replica": 2}),
        ("v5e:2x4*2", 2, {"k": 2, "replica": 2}),
        ("v6e:2x2*4", 1, {"replica": 4}),
    ],
)
def test_a_step_over_several_slices_sends_the_bytes_of_the_formula(target, stage, options):
    """Shards within a slice, and the sums of gradients over the slices once a step, in transfers over the hosts."""
    audit = audited(target, stage, width=512, **options)
    assert broken(audit) == set()
    assert audit["wire bytes"].verdict is Verdict.OK and audit["reductions"].verdict is Verdict.OK
    assert audit["wire bytes"].numbers["found_bytes"] > 0.9 * audit["wire bytes"].numbers["expected_bytes"]
    assert audit["between replicas"].numbers["found_bytes"] > 2**18


def test_a_mesh_that_mixes_slices_is_not_read():
    """Its program has the chips of a slice in an order that is not in the text."""
    devices = targets.devices("v5e:2x2*2")
    mesh = zerojax.make_mesh(devices=[device for pair in zip(devices[:4], devices[4:], strict=True) for device in pair])
    with pytest.warns(UserWarning, match="sharded over 2 TPU slices"):
        zero = zerojax.Zero(mesh, 3, "bf16")
    config = gpt.Config(width=128, layers=2)
    state = zero.eval_init(gpt.create(config), optax.adamw(1e-3))
    audit = zero.train_step(gpt.loss).audit(state, gpt.batch_aval(config, 8))
    assert audit["wire bytes"].verdict is Verdict.NOT_READ and "order of their slices" in audit["wire bytes"].found


def test_gradients_are_summed_around_a_ring_through_a_slice():
    """`jax.make_mesh` puts the chips of a small slice in the order of a ring, which is no box."""
    audit = audited("v5e:4x4", 3, ring=True)
    assert audit["wire bytes"].verdict is Verdict.OK and audit["reductions"].verdict is Verdict.OK
    assert audit["reductions"].numbers["reduce_scattered"] > 2**20


def test_permutations_along_a_line_of_eight_chips_are_asynchronous():
    """The chip would wait for each if one of them went from one end of the line to the other."""
    zero, state = by_hand.zero_and_state(targets.devices("v5e:8x8"), width=1024)
    assert zero.config.axes.torus == (8, 8)
    step = zero.train_step(by_hand.loss).trace(state, by_hand.batch_aval(1024, 64))
    text = step.lower(lowering_platforms=("tpu",)).compile().as_text()
    assert text.count(" collective-permute-start(") >= 8 and " collective-permute(" not in text


def test_the_rewrite_over_several_dimensions_of_a_torus_is_named_and_costed():
    """Below stage 3, the gather of updates over a ring through a slice becomes an all-reduce."""
    audit = audited("v5e:4x4", 1, ring=True)
    assert audit.ok
    finding = audit["reductions"]
    assert finding.verdict is Verdict.KNOWN and "over 2 of the torus's dimensions" in finding.found
    assert audit["wire bytes"].verdict is Verdict.KNOWN
    scattered = audited("h100:8", 1)["reductions"].numbers["reduce_scattered"] * (15 / 16) / (7 / 8)
    assert finding.numbers["extra_bytes"] == pytest.approx(scattered, rel=0.05)


def test_an_all_reduce_in_the_step_itself_is_not_a_rewrite():
    """The compiled program alone does not show the difference."""
    zero, state = by_hand.zero_and_state(targets.devices("v5e:4x4"), width=WIDTH)
    batch = by_hand.batch_aval(WIDTH)
    expectation = zero.train_step(by_hand.loss).expectation(state, batch)
    step = by_hand.step(zero, state, batch, gather=by_hand.gather_then_all_reduce)
    assert broken(zerojax.audit_step(step, expectation)) == {"wire bytes", "reductions"}
    finding = zerojax.audit_step(step.lower().compile(), expectation)["reductions"]
    assert finding.verdict is Verdict.NOT_READ and "audit the traced step" in finding.found
    assert broken(zerojax.audit_step(by_hand.step(zero, state, batch), expectation)) == set()


# Planted faults


@functools.cache
def expected(k=1):
    zero, state = by_hand.zero_and_state(targets.devices("h100:8"), width=WIDTH)
    return zero.train_step(by_hand.loss, num_microbatches=k).expectation(state, by_hand.batch_aval(WIDTH))


def program(k=1, **faults):
    """The compiled step alone, so that faults are found in the program and not in the trace."""
    zero, state = by_hand.zero_and_state(targets.devices("h100:8"), width=WIDTH)
    return by_hand.step(zero, state, by_hand.batch_aval(WIDTH), k=k, **faults).lower().compile()


@pytest.mark.parametrize(
    ("faults", "lines"),
    [
        ({}, set()),
        ({"k": 2}, set()),
        ({"policy": by_hand.DENY_LIST}, {"gathered weights kept"}),
        ({"gather": by_hand.gather_then_all_reduce}, {"wire bytes", "reductions"}),
        ({"gather": by_hand.gather_in_fp32}, {"wire bytes", "wire dtype"}),
        ({"donated": False}, {"aliased state"}),
        ({"k": 2, "hoisted": True}, {"hoisted gathers", "gathered weights kept", "reductions"}),
        ({"ordered": False}, {"hoisted gathers"}),  # the compiler combines all layers into one gather
        ({"reduces": False}, {"reductions"}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_planted_fault_is_found_in_the_program(faults, lines):
    audit = zerojax.audit_step(program(**faults), expected(faults.get("k", 1)))
    assert broken(audit) == lines
    assert audit["prefetch order"].verdict is Verdict.NOT_READ
    assert "traced step" in audit["prefetch order"].found


def test_activations_that_stay_on_the_device_are_found():
    """A program without offloading, audited against the expectation of one with offloading."""
    zero, state = by_hand.zero_and_state(targets.devices("h100:8"), width=WIDTH)
    step = zero.train_step(by_hand.loss, remat=Remat(offload_inputs=True))
    expectation = step.expectation(state, by_hand.batch_aval(WIDTH))
    audit = zerojax.audit_step(step.trace(state, by_hand.batch_aval(WIDTH)), expectation)
    assert audit["checkpoints"].verdict is Verdict.OK
    finding = zerojax.audit_step(program(), expectation)["checkpoints"]
    assert finding.verdict is Verdict.BROKEN and finding.numbers["found_bytes"] == 0
    # Of all layers but the first, whose input is the batch, and the last.
    offloaded = (by_hand.LAYERS - 2) * by_hand.ROWS // N * WIDTH * 2
    assert finding.numbers["expected_bytes"] == offloaded
