"""Updates by owners in programs for GPUs and TPUs: what is sent and multiplied, next to the formula and to AdamW."""

import functools

import gpt
import jax
import jax.numpy as jnp
import matrix
import pytest

import zerojax
from zerojax import Verdict, targets
from zerojax.analysis import hardware, hlo, hlo_collectives, jaxpr_counts
from zerojax.plan import timeline
from zerojax.step.owned_update import owned_matrices
from zerojax.step.owners import owned_counts

pytestmark = pytest.mark.aot


@functools.cache
def step_of(target, form, layers=8, scan=True, replica=1, k=1, width=256, model=None):
    """(the step, its state and batch as avals) of a small GPT, whose matrices of layers Muon updates."""
    config = gpt.Config(width=width, layers=layers, scan=scan, dtype=jnp.bfloat16, annotated=bool(model))
    mesh = zerojax.make_mesh(devices=targets.devices(target), replica=replica, model=model)
    zero = zerojax.Zero(mesh, 3, "bf16")
    state = zero.eval_init(gpt.create(config), matrix.optimizer(form))
    step = zero.train_step(gpt.loss, num_microbatches=k)
    return step, state, gpt.batch_aval(config, k * zero.config.axes.num_devices)


@functools.cache
def program(target, form, **options):
    step, state, batch = step_of(target, form, **options)
    return hlo.parse_program(step.lower(state, batch).compile().as_text())


def settings_of(target, **options):
    step, state, _ = step_of(target, "muon", **options)
    return step.config, state.layout


def sent_bytes(found):
    return sum(c.sent_bytes for c in hlo_collectives.compiled_collectives(found) if c.full_bytes > 256)


@pytest.mark.parametrize("options", [{}, {"scan": False}, {"model": 2}], ids=["scan", "list", "model"])
def test_matrices_are_sent_as_the_formula_says_and_multiplied_once(options):
    """N divides the number of equal matrices. Along a model axis, devices share those of their owner."""
    muon, adamw = (program("h100:8", form, **options) for form in ("muon", "adamw"))
    _, state, _ = step_of("h100:8", "muon", **options)
    trained, tx = state.layout.trained_avals(), state.layout.tx
    update = jax.make_jaxpr(tx.update)(trained, jax.eval_shape(tx.init, trained), trained)
    flops = sum(product.flops for product in jaxpr_counts.products(update.jaxpr.eqns))
    in_program = matrix.flops_of(muon.entry.instructions) - matrix.flops_of(adamw.entry.instructions)
    assert in_program * 8 == pytest.approx(flops, rel=0.01)
    if "model" in options:  # what is gathered over this axis is not in the formula
        return
    formula = 2 * 7 / 8 * 4 * 8 * 12 * 256**2 / 8  # fp32; twelve widths squared in each of eight layers
    assert sent_bytes(muon) - sent_bytes(adamw) == pytest.approx(formula, rel=0.02)


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("h100:8", {"layers": 6}),  # matrices of several kinds in one round
        ("h100:16", {"replica": 2, "k": 2, "scan": False, "layers": 3}),
        ("v5e:4x4", {"layers": 6}),
        ("v5p:2x2x1*2", {"layers": 6, "replica": 2, "width": 512}),
    ],
)
def test_an_audit_knows_the_update(target, options):
    step, state, batch = step_of(target, "muon", **options)
    audit = step.audit(state, batch)
    assert not audit.broken
    assert {audit[name].verdict for name in ("wire bytes", "wire dtype", "reductions", "aliased state")} == {Verdict.OK}
    numbers = audit["wire bytes"].numbers
    assert numbers["found_bytes"] > 0.9 * numbers["expected_bytes"]


def test_a_timeline_takes_the_longest_branch():
    """Six layers on eight devices: what a device multiplies depends on the device."""
    cluster, devices = hardware.cluster("h100:8"), 8
    muon, adamw = (timeline.predict(program("h100:8", form, layers=6), cluster) for form in ("muon", "adamw"))
    (kinds,) = owned_matrices(*settings_of("h100:8", layers=6)).groups
    counts = owned_counts(kinds, devices)
    seconds = [sum(p.seconds(cluster.chip) for p in jaxpr_counts.products(k.couplings[0].equations)) for k in kinds]
    of_device = [sum(c[d] * s / 6 for c, s in zip(counts, seconds, strict=True)) for d in range(devices)]
    assert muon.products_s - adamw.products_s == pytest.approx(max(of_device), rel=0.1)
    assert max(of_device) > 1.02 * sum(of_device) / devices
