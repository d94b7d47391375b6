"""The sentences about a plan say what its numbers say."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import optax
import pytest
from click.testing import CliRunner
from support.paths import REPO

from zerojax.analysis.hardware import cluster
from zerojax.cli import main
from zerojax.plan import Job, Settings, plan
from zerojax.plan.explain import explain_plan
from zerojax.plan.formula import ComputeTime, FormulaTime
from zerojax.plan.search import memory_reductions, uses_of_free_memory
from zerojax.plan.show import remedy
from zerojax.utils.text import bytes_text


def job():
    params = lambda key: {"layers": {str(i): {"w": jax.random.normal(key, (64, 64))} for i in range(3)}}

    def loss(params, batch):
        x = batch["x"]
        for layer in params["layers"].values():
            x = jnp.tanh(x @ layer["w"])
        return jnp.mean(x**2)

    batch = lambda rows: {"x": jax.ShapeDtypeStruct((rows, 64), jnp.float32)}
    return Job(params, optax.adam(1e-3), loss, batch, rows=4, tokens=2)


HERE = f"{__name__}:job"


@pytest.fixture(scope="module")
def made():
    return plan(HERE, "h100:8")


def said(plan, topic=None):
    return " ".join(remark.text for remark in explain_plan(plan) if topic in (None, remark.topic))


def test_the_time_by_formula_is_that_of_the_search(made):
    """The same numbers rank the candidates of --auto. Rows have two tokens each."""
    assert made.tokens == 8 * 4 * 2
    assert f"That is {made.tokens / 8 / made.time.step_s:,.0f} tokens/s per device" in said(made, "time")
    assert made.data()["formula_s"]["link_s"] == made.time.link_s > 0


def timed(made, products_s, memory_s, link_s):
    return dataclasses.replace(made, time=FormulaTime(ComputeTime(products_s, memory_s), link_s))


def test_what_bounds_the_time_is_named_with_its_share(made):
    products = said(timed(made, 0.3, 0.1, 0.1), "time")
    assert "takes 400.0 ms and is bound by matrix products: 300.0 ms of 400.0 ms" in products
    assert "link inside a host would be busy for 100.0 ms at 369 GB/s, 25% of the computation" in products
    assert "bound by memory traffic: 3.00 s of 4.00 s" in said(timed(made, 1.0, 3.0, 0.1), "time")
    links = said(timed(made, 0.1, 0.1, 0.5), "time")
    assert "bound by the link inside a host: 500.0 ms at 369 GB/s, 2.5 times the 200.0 ms" in links
    assert "At least 300.0 ms of the communication cannot overlap" in links


@pytest.mark.parametrize(
    ("precision", "gathered", "reduced"), [("bf16", 2, 2), ("bf16_reduce_fp32", 2, 4), ("fp32", 4, 4)]
)
def test_the_links_send_weights_and_gradients_in_their_dtypes(precision, gathered, reduced):
    """At stage 3 two gathers and one reduction; between replicas one of each, or an all-reduce, of the shards."""
    parameters, rate = 3 * 64 * 64, cluster("h100:16").route(range(8)).rate
    one = plan(HERE, "h100:8", Settings(precision=precision), suggest=False)
    inside = (2 * gathered + reduced) * parameters * 7 / 8 / rate
    assert one.time.link_s == pytest.approx(inside)
    for outer, width in (None, gathered + reduced), ("none", 2 * reduced):
        settings = Settings(precision=precision, replica=2, outer_sharding=outer)
        across = width * parameters / 8 / 2 / cluster("h100:16").route([0, 8]).rate
        assert plan(HERE, "h100:16", settings, suggest=False).time.link_s == pytest.approx(inside + across)


def test_8_bits_take_an_element_and_a_scale():
    """Of bf16, for each of 128 elements."""
    parameters, rate = 3 * 64 * 64, cluster("h100:8").route(range(8)).rate
    for stage, width in (3, 3 * (1 + 2 / 128)), (2, 2 + 1 + 2 / 128):
        made = plan(HERE, "h100:8", Settings(stage=stage, wire="int8"), suggest=False)
        assert made.time.link_s == pytest.approx(width * parameters * 7 / 8 / rate)


def test_without_prefetch_the_computation_waits_for_gathers(made):
    waiting = plan(HERE, "h100:8", Settings(prefetch=0), suggest=False).time
    gathers = 2 * 2 * 3 * 64 * 64 * 7 / 8 / cluster("h100:8").route(range(8)).rate
    assert waiting.exposed_s == pytest.approx(gathers) and made.time.exposed_s == 0
    assert waiting.step_s == max(waiting.compute.total_s + waiting.exposed_s, waiting.link_s)


def test_one_device_has_no_links(made):
    alone = plan(HERE, "h100:1", suggest=False)
    assert alone.time.link_s == 0 and "link" not in said(alone, "time")


def test_the_largest_term_of_the_memory_is_named(made):
    name, largest = max(made.held.items(), key=lambda item: item[1])
    text = said(made, "memory")
    assert f"is {name} with {bytes_text(largest)}" in text and bytes_text(made.peak_bytes) in text
    assert "too much" not in text
    over = dataclasses.replace(made, limit_bytes=made.peak_bytes - 2**10)
    assert "1 KiB too much" in said(over, "memory")


def test_what_helps_most_is_the_fastest_change_that_fits(made):
    speeds = {each.change: each.speed for each in made.suggestions if each.fits}
    best = max(speeds, key=speeds.__getitem__)
    assert speeds[best] > 1.01
    assert f"What helps most is {best}: " in said(made, "help")
    assert f"at {speeds[best]:.2f} times the rows per second" in said(made, "help")
    none = dataclasses.replace(made, suggestions=tuple(each._replace(speed=1.0) for each in made.suggestions))
    assert "No change that fits makes a step faster" in said(none, "help")


def test_a_change_that_computes_less_again_is_faster_by_what_it_leaves_out():
    """The speed of a suggestion is the time by formula of a plan with that change."""
    found = plan("gpt-7.5b", "h100:64", Settings(remat="full"))
    dots = plan("gpt-7.5b", "h100:64", Settings(remat="dots"), suggest=False)
    (change,) = [each for each in found.suggestions if each.change.startswith("remat='dots'")]
    assert change.speed == pytest.approx(found.time.step_s / dots.time.step_s) and change.speed > 1.05
    (twice,) = [each for each in found.suggestions if "rows" in each.change]
    assert 0.95 < twice.speed < 1.1  # the same work for each row


@pytest.mark.parametrize(("target", "offered"), [("h100:1", False), ("h100:8", True)])
def test_other_stages_are_offered_where_they_differ(target, offered):
    for stage in 2, 3:
        for changes in memory_reductions, uses_of_free_memory:
            texts = [text for text, *_ in changes(Settings(stage=stage), cluster(target).num_devices)]
            other = {text.split(" (")[0] for text in texts if text.startswith("stage")}
            assert other <= {"stage 1", "stage 2", "stage 3"} - {f"stage {stage}"}
            assert bool(other) == (offered and (stage == 2 or changes is uses_of_free_memory))


def test_a_plan_that_does_not_fit_says_what_makes_it_fit(made):
    tight = plan("llama3-8b", "h100:8", Settings(remat="none"))
    text = said(tight, "help")
    assert text.startswith("It fits with remat='dots', at ") and "So it does with remat='full'" in text
    full = next(each for each in tight.suggestions if each.change == "remat='full'")
    figures = [bytes_text(each.peak_bytes) for each in (tight, full, remedy(tight))]
    assert all(figure in (REPO / "docs" / "plan.md").read_text() for figure in figures)  # its first example
    fits = lambda each: each._replace(fits=False)
    hopeless = dataclasses.replace(tight, suggestions=tuple(map(fits, tight.suggestions)))
    smallest = min(tight.suggestions, key=lambda each: each.peak_bytes)
    assert f"What comes closest is {smallest.change}: " in said(hopeless, "help")


def test_a_formula_near_the_limit_is_not_sure(made):
    near = dataclasses.replace(made, limit_bytes=int(1.05 * made.peak_bytes))
    assert "5.0% from the limit" in said(near, "not sure") and "--compile decides" in said(near, "not sure")
    assert said(made, "not sure") == ""  # it takes far less than the limit
    noted = dataclasses.replace(made, notes=("the memory by formula is not sure: a kernel",))
    assert said(noted, "not sure") == "The memory by formula is not sure: a kernel."


def test_a_compiled_plan_is_explained_by_its_program():
    made = plan(HERE, "cpu:8", compile=True, suggest=False)
    predicted = made.program.prediction
    text = said(made, "time")
    assert f"predicted to take {predicted.step_s * 1e3:,.1f} ms" in text
    assert f"{predicted.step_s / made.time.step_s:.2f} of that" in text
    sent = sum(row.sent_bytes for row in made.program.collectives)
    assert f"Of {bytes_text(sent)} sent, " in text and "as compiled" in said(made, "memory")
    ratio = made.memory.peak_bytes / made.program.peak_bytes
    assert f"by formula is {ratio:.2f} of the compiled one" in said(made, "not sure")


def test_the_command_explains_in_sentences_and_as_data():
    shown = CliRunner().invoke(main, ["plan", "--job", HERE, "--explain"])
    assert shown.exit_code == 0, shown.output
    text = " ".join(shown.stdout.split())
    assert text.startswith("fits: ") and "Memory. A device holds" in text and "Time. By formula" in text
    assert "┃" not in text  # no tables
    data = json.loads(CliRunner().invoke(main, ["plan", "--job", HERE, "--explain", "--json"]).stdout)
    assert {remark["topic"] for remark in data["explanation"]} >= {"memory", "time", "help"}
