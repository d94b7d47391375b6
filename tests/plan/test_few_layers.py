"""Steps are traced without layers that equal others, and their memory and time are those of a trace with all layers."""

import dataclasses

import gpt
import jax
import jax.numpy as jnp
import models
import optax
import pytest
from flax import nnx

from zerojax.analysis.hardware import cluster
from zerojax.plan.job import Job, Settings
from zerojax.plan.planner import Planner
from zerojax.plan.search import search, with_suggestions
from zerojax.plan.tracing import Tracer

CHIP = cluster("h100:8").chip
CONFIG = gpt.Config(width=32, layers=6, heads=2, vocab=256, seq=32)


def gpt_job():
    return Job(gpt.create(CONFIG), optax.adamw(1e-3), gpt.loss, lambda rows: gpt.batch_aval(CONFIG, rows), rows=2)


class MLP(nnx.Module):
    def __init__(self, width, rngs):
        self.up, self.down = nnx.Linear(32, width, rngs=rngs), nnx.Linear(width, 32, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jax.nn.silu(self.up(x)))


class Alternating(nnx.Module):
    """Two kinds of layers in turn: every third one is wider."""

    def __init__(self, rngs):
        self.embed, self.head = nnx.Embed(256, 32, rngs=rngs), nnx.Linear(32, 256, rngs=rngs)
        self.layers = nnx.List([MLP(width, rngs) for width in [64, 64, 128] * 3])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def alternating_job():
    return gpt_job()._replace(create_model=lambda rngs: Alternating(rngs))


class Masked(Alternating):
    """Each layer reads its own row of an array, and a constant of its own."""

    def __call__(self, tokens):
        masks = jnp.ones((9, 32)) * (tokens[0, 0] >= 0)
        x = self.embed(tokens)
        for k, layer in enumerate(self.layers):
            x = layer(x * masks[k].astype(x.dtype)) + (k + 1)
        return self.head(x)


def masked_job():
    return gpt_job()._replace(create_model=lambda rngs: Masked(rngs))


def linen_job():
    model = models.linen_1b("linen", layers=6, width=32, heads=2, vocab=256, seq=32)
    return Job(model.create, optax.adamw(1e-3), model.loss, model.batch_aval, rows=2)


SETTINGS = {
    "full": {},
    "dots": {"remat": "dots"},
    "offload": {"remat": "offload"},
    "no prefetch": {"prefetch": 0},
    "prefetch 2": {"prefetch": 2},
    "stage 2": {"stage": 2},
    "stage 1, microbatches": {"stage": 1, "num_microbatches": 2},
    "microbatches": {"num_microbatches": 2},
    "stage 0, none": {"stage": 0, "remat": "none"},
}


CASES = [
    *((name, gpt_job) for name in SETTINGS),
    *((name, job) for job in (alternating_job, masked_job, linen_job) for name in ("full", "stage 1, microbatches")),
]


@pytest.mark.parametrize(("settings", "job"), CASES)
def test_memory_and_time_are_those_of_a_trace_with_all_layers(job, settings):
    settings = Settings(rows=2, **SETTINGS[settings])
    few, everything = Tracer(job()), Tracer(job(), on_few_layers=False)
    got, want = few.memory(settings, 8), everything.memory(settings, 8)
    assert few.device_trace(settings, 8).layers
    assert got.peak_bytes == pytest.approx(want.peak_bytes, rel=0.005)
    assert got.host_bytes == pytest.approx(want.host_bytes, rel=0.005)
    times = [tracer.device_trace(settings, 8).compute_time(CHIP).total_s for tracer in (few, everything)]
    assert times[0] == pytest.approx(times[1], rel=0.1)  # layers of these small models differ in what surrounds them


def test_the_trace_does_not_grow_with_the_number_of_layers():
    def num_equations(layers):
        config = dataclasses.replace(CONFIG, layers=layers)
        job = gpt_job()._replace(create_model=gpt.create(config))
        return len(Tracer(job).device_trace(Settings(rows=2), 8).jaxpr.eqns)

    assert num_equations(12) == num_equations(6)


def test_a_unit_stays_if_it_alone_reads_what_another_computes():
    """Otherwise nothing would read the results of `up/1`."""
    units = {"units": ["embed", "head", *(f"layers/{k}/{part}" for k in range(9) for part in ("up", "down"))]}
    job = alternating_job()._replace(options=units)
    assert not Tracer(job).device_trace(Settings(rows=2), 8).layers


def test_a_plan_and_its_suggestions_create_the_model_once_and_trace_its_loss_once_for_each_batch_size(monkeypatch):
    calls = {"create": 0, "loss": 0}

    def create(rngs):
        calls["create"] += 1
        return gpt.GPT(CONFIG, rngs)

    def loss(model, batch):
        calls["loss"] += 1
        return gpt.loss(model, batch)

    job = gpt_job()._replace(create_model=create, loss_fn=loss)
    monkeypatch.setattr("zerojax.plan.planner.find_job", lambda *args, **kwargs: job)
    planner = Planner("test:job", "h100:8")
    plan = with_suggestions(planner, planner.plan(Settings(remat="full")))
    assert any("4 rows" in each.change for each in plan.suggestions) and len(plan.suggestions) >= 4
    assert calls == {"create": 1, "loss": 2}


class Carried(nnx.Module):
    """Runs in bf16 alone: the carry of its scan is bf16, whatever the dtype of the weights."""

    def __init__(self, rngs):
        self.inner, self.head = nnx.Linear(256, 256, rngs=rngs), nnx.Linear(256, 256, rngs=rngs)

    def __call__(self, tokens):
        x = jax.nn.one_hot(tokens, 256, dtype=jnp.bfloat16)
        x, _ = jax.lax.scan(lambda x, _: (self.inner(x), None), x, None, length=3)
        return self.head(x)


def test_a_model_that_fits_one_precision_alone_is_traced_with_it(monkeypatch):
    """Three and one products of 256 x 256, for each of 32 tokens of 2 rows on 8 devices, three times in a step."""
    job = gpt_job()._replace(create_model=lambda rngs: Carried(rngs))
    monkeypatch.setattr("zerojax.plan.planner.find_job", lambda *args, **kwargs: job)
    assert Planner("test:job", "h100:8").model_flops(Settings(rows=2)) == 3 * 2 * 4 * 256**2 * 32 * 2 * 8
    ranking = search("test:job", "h100:8", num_compiled=0)
    assert ranking.candidates and all(c.settings.precision == "bf16" for c in ranking.candidates)
    with pytest.raises(TypeError, match="carry"):
        search("test:job", "h100:8", Settings(precision="fp32"), num_compiled=0)
