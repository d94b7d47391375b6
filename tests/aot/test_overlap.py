"""Overlap in programs compiled for GPUs, of a list of layers between a large embedding and a large head."""

import functools
import math

import gpt
import jax.numpy as jnp
import optax
import pytest

import zerojax
from zerojax import Verdict, targets
from zerojax.analysis import hlo
from zerojax.analysis.hlo_collectives import compiled_collectives

pytestmark = pytest.mark.aot
N, WIDTH, VOCAB, LAYERS = 8, 2048, 65536, 6
TABLE, LAYER = 2 * VOCAB * WIDTH, 2 * 12 * WIDTH * WIDTH  # bytes of the embedding or the head, and of a layer


@functools.cache
def step_and_avals():
    config = gpt.Config(width=WIDTH, layers=LAYERS, heads=16, vocab=VOCAB, seq=2048, dtype=jnp.bfloat16)
    zero = zerojax.Zero(zerojax.make_mesh(devices=targets.devices("h100:8")), 3, "bf16")
    state, batch = zero.eval_init(gpt.create(config), optax.adamw(1e-3)), gpt.batch_aval(config, 2 * N)
    step = zero.train_step(gpt.loss, remat="full")
    return step, state, batch, step.trace(state, batch)


@functools.cache
def program():
    *_, traced = step_and_avals()
    return traced.lower(lowering_platforms=("cuda",)).compile()


def test_only_the_ends_of_a_step_are_exposed():
    """The first weight and the last reduction, which are at most half a layer each."""
    found = compiled_collectives(hlo.parse_program(program().as_text()))
    exposed = [c for c in found if c.exposed and c.full_bytes > 2**20]
    assert sum(c.full_bytes for c in exposed if c.kind != "all-to-all") <= LAYER
    assert max(c.full_bytes for c in found if c.full_bytes < TABLE) <= 1.01 * LAYER  # no two layers together


def test_rows_of_the_embedding_travel_instead_of_the_table():
    found = compiled_collectives(hlo.parse_program(program().as_text()))
    assert sum(c.full_bytes for c in found if c.kind == "all-to-all") == 2 * (2 * 2048) * WIDTH * 2
    of_tables = [c.kind for c in found if c.full_bytes >= TABLE]
    assert sorted(of_tables) == ["all-gather", "reduce-scatter"]  # of the head


def test_the_gradient_of_the_logits_is_dropped_before_the_layers():
    """All that reads it, which the product for the head's gradient does last, comes before attention of a layer."""
    kernels = hlo.parse_program(program().as_text()).entry.instructions
    rows, heads, seq = 2, 16, 2048
    is_logits = lambda buffer: math.prod(buffer.dims) == rows * seq * VOCAB
    is_scores = lambda buffer: math.prod(buffer.dims) == rows * heads * seq * seq and VOCAB not in buffer.dims
    reads = [k for k, i in enumerate(kernels) if any(is_logits(b) for o in i.operands for b in o.buffers)]
    scores = [k for k, i in enumerate(kernels) if any(is_scores(b) for b in i.buffers)]
    assert reads and min(scores) < min(reads) < max(scores)  # there are layers before and after the logits
    assert not [k for k in scores if min(reads) < k < max(reads)]


def test_an_audit_says_whether_communication_overlaps_and_why_not(monkeypatch):
    """Combined as if every unit were as large as the head, which is XLA's way with a large threshold."""
    step, state, batch, traced = step_and_avals()
    expectation = step.expectation(state, batch)
    assert zerojax.audit_step(program(), expectation)["exposed"].verdict is Verdict.OK
    combining = {
        "xla_gpu_enable_reduce_scatter_combine_by_dim": False,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 4 * LAYER // N,
    }
    together = traced.lower(lowering_platforms=("cuda",)).compile(compiler_options=combining)
    audit = zerojax.audit_step(together, expectation)
    assert audit.ok and audit["exposed"].verdict is Verdict.SLOW
    assert "overlap with no matrix product" in audit["exposed"].found and "docs/schedule.md" in audit["exposed"].fix
