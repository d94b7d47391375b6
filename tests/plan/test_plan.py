"""Plans match the tables of the paper and memory computed by hand. Presets train. Verdicts, output and errors."""

import dataclasses
import functools
import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from click.testing import CliRunner
from optax import contrib
from rich.console import Console

import zerojax
from zerojax.analysis.hardware import cluster
from zerojax.analysis.hlo_collectives import Collective
from zerojax.analysis.liveness import peak
from zerojax.analysis.memory import model_states
from zerojax.cli import main
from zerojax.plan import PRESETS, Job, Settings, plan, transformer
from zerojax.plan.explain import render_explanation
from zerojax.plan.job import REMATS, job_of
from zerojax.plan.planner import Planner
from zerojax.plan.program import required_bytes, summarize_collectives
from zerojax.plan.search import search
from zerojax.plan.show import render_ranking, text
from zerojax.step.config import OFFLOADS

# ZeRO, table 1: GB per device for P_os, P_os+g, P_os+g+p
TABLE_1 = {
    7.5e9: {
        1: (120, 120, 120), 4: (52.5, 41.3, 30), 16: (35.6, 21.6, 7.5), 64: (31.4, 16.6, 1.88),
        256: (30.4, 15.4, 0.47), 1024: (30.1, 15.1, 0.12),
    },
    128e9: {
        1: (2048, 2048, 2048), 4: (896, 704, 512), 16: (608, 368, 128), 64: (536, 284, 32), 256: (518, 263, 8),
        1024: (513, 257, 2),
    },
    1e12: {
        1: (16000, 16000, 16000), 4: (7000, 5500, 4000), 16: (4750, 2875, 1000), 64: (4187, 2218, 250),
        256: (4046, 2054, 62.5), 1024: (4011, 2013, 15.6),
    },
}  # fmt: skip


def test_table_1_of_the_paper():
    """The paper rounds the figures of 7.5 B and truncates most of the others (4046.9 is printed as 4046)."""
    for parameters in TABLE_1:
        for num_shards, row in TABLE_1[parameters].items():
            for stage, printed in zip((1, 2, 3), row, strict=True):
                figure = model_states(parameters, stage, num_shards).num_bytes / 1e9
                digits = len(str(printed).partition(".")[2])
                step = 10**-digits
                assert printed - step / 2 <= figure + 1e-9 and figure < printed + step
                assert model_states(parameters, 0, num_shards).num_bytes == 16 * parameters


def test_table_2_of_the_paper():
    """The theoretical maximum in billions of parameters for devices of 32 GB: baseline, P_os, P_os+g, P_os+g+p."""
    printed = {1: (2, 7.6, 14.4, 128), 2: (4, 15.2, 28.8, 256), 4: (8, 30.4, 57.6, 512), 8: (16, 60.8, 115.2, 1024),
               16: (32, 121.6, 230.4, 2048)}  # fmt: skip
    for model, row in printed.items():
        for stage, billions in enumerate(row):
            assert model * 32 / model_states(1, stage, 64).num_bytes == pytest.approx(billions, rel=0.01)


KIB = 1024
SQUARE = jax.ShapeDtypeStruct((256, 256), jnp.float32)  # 256 KiB


def kib(fn, *avals):
    return {kind: size / KIB for kind, size in peak(jax.make_jaxpr(fn)(*avals).jaxpr).items()}


def test_the_value_between_two_products_is_stored_once():
    """The operand of the second product overwrites the result of the first. The peak is this operand and the result."""
    assert kib(lambda x, w: jnp.tanh(2 * (x @ w)) @ w, SQUARE, SQUARE) == {"activations": 2 * 256}


def test_a_value_that_is_smaller_than_its_sources_is_stored_if_it_is_read_several_times():
    """The sum of two products is stored in place of one, for the reduction and for the end; the products are not."""

    def fn(x, w):
        total = x @ w + w @ x
        columns = jnp.sum(total, axis=0)
        return total + (x @ x) * columns

    assert kib(fn, SQUARE, SQUARE) == {"activations": 2 * 256 + 1}


def test_a_loop_stores_its_carry_once_and_stacks_its_outputs():
    def fn(x, w):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), jnp.sum(x, axis=0)), x @ w, None, length=1024)

    # 1 KiB of each iteration, 1 MiB in all; the carry, and the product, which the next carry overwrites
    assert kib(fn, SQUARE, SQUARE) == {"checkpoints": 1024, "activations": 2 * 256 + 1}


def test_an_update_is_made_in_place():
    def fn(x, w):
        rooms = jnp.zeros((4, 256, 256))
        for i in range(4):
            rooms = jax.lax.dynamic_update_index_in_dim(rooms, x @ w, i, 0)
        return rooms

    assert kib(fn, SQUARE, SQUARE) == {"activations": 5 * 256}


def test_the_gradient_of_a_max_pooling_needs_scratch():
    """The operand is an input. 16 bytes for each of 128 x 128 windows, the array of zeros, and its copy, the result."""

    def fn(x):
        pooled = lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2, 2), (2, 2), "VALID")
        return jax.vjp(pooled, x)[1](jnp.ones((128, 128)))[0]

    assert kib(fn, SQUARE) == {"activations": 16 * 16 + 2 * 256}


def test_arrays_in_host_memory_do_not_count_on_the_device():
    to = lambda x, space: jax.device_put(x, space)

    def fn(x, w):
        offloaded = to(x @ w, jax.memory.Space.Host)
        return to(offloaded, jax.memory.Space.Device) @ w

    jaxpr = jax.make_jaxpr(fn)(SQUARE, SQUARE).jaxpr
    assert peak(jaxpr, space=jax.memory.Space.Host).total() == 256 * KIB
    assert peak(jaxpr).total() == 2 * 256 * KIB


SMALL = {"layers": 3, "width": 16, "heads": 4, "kv_heads": 2, "hidden": 32, "vocab": 64, "seq": 8}
TINY = {
    "gpt": dataclasses.replace(PRESETS["gpt2-124m"], **SMALL),
    "llama": dataclasses.replace(PRESETS["llama3-8b"], **SMALL),
    "experts": dataclasses.replace(PRESETS["mixtral-8x7b"], **SMALL, experts=2),
    "images": dataclasses.replace(PRESETS["vit-h14"], **SMALL, patch=2),
}


def real_batch(job, vocab):
    rng = np.random.default_rng(0)
    make = lambda a: (
        rng.integers(0, vocab, a.shape) if a.dtype == jnp.int32 else rng.standard_normal(a.shape, np.float32)
    )
    return jax.tree.map(make, job.batch(8))


@pytest.mark.parametrize("kind", TINY)
def test_presets_train_as_on_one_device(kind, monkeypatch):
    """In fp32, up to another order of summation. Every token is sent to both experts, so none is dropped."""
    monkeypatch.setattr(transformer, "_QUERY_BLOCK", 4)
    job = job_of(TINY[kind])
    losses = []
    for devices, stage in ((jax.devices()[:1], 0), (None, 3)):
        zero = zerojax.Zero(zerojax.make_mesh(devices=devices), stage)
        state = zero.init(job.create_model, optax.adamw(1e-2, eps=1e-5))
        step = zero.train_step(job.loss_fn, remat="full")
        batch = real_batch(job, TINY[kind].vocab)
        for _ in range(3):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
    assert losses[:3] == pytest.approx(losses[3:], rel=1e-5)
    assert losses[2] < losses[0]


def test_attention_in_blocks_is_attention(monkeypatch):
    monkeypatch.setattr(transformer, "_QUERY_BLOCK", 4)
    q, k, v = (
        np.random.default_rng(i).standard_normal((2, 12, heads, 8), np.float32) for i, heads in enumerate((4, 2, 2))
    )
    for causal in True, False:
        plain = lambda q, k, v, causal=causal: jnp.sum(jax.nn.dot_product_attention(q, k, v, is_causal=causal) ** 2)
        blocks = lambda q, k, v, causal=causal: jnp.sum(transformer.blockwise_attention(q, k, v, causal) ** 2)
        for a, b in zip(*(jax.value_and_grad(fn, (0, 1, 2))(q, k, v) for fn in (blocks, plain)), strict=True):
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), a, b)


NAMED = {"gpt2-124m": 0.124, "gpt2-1.5b": 1.56, "gpt-7.5b": 7.5, "gpt-128b": 128, "gpt-1t": 1000, "llama3-8b": 8.03,
         "llama3-70b": 70.6, "llama3-405b": 405.9, "mixtral-8x7b": 46.7, "vit-h14": 0.632}  # fmt: skip


FEW = ("gpt-7.5b", "llama3-8b", "mixtral-8x7b")


@pytest.mark.parametrize("name", [*FEW, *(pytest.param(n, marks=pytest.mark.full) for n in PRESETS if n not in FEW)])
def test_a_plan_of_each_preset(name):
    """It has as many parameters as its name says, an even share of the states on each device, and JSON data."""
    made = plan(name, "h200:64", suggest=False)
    assert made.parameters / 1e9 == pytest.approx(NAMED[name], rel=0.01)
    terms = {term.name: term.num_bytes for term in made.memory.terms}
    states = model_states(made.parameters, 3, 64)
    assert terms["parameters"] == pytest.approx(states.parameters, rel=0.001)
    assert terms["optimizer state"] == pytest.approx(states.optimizer, rel=0.001)
    assert {"batch", "activations"} < terms.keys()
    assert terms.keys() & {"gathered", "gradients", "checkpoints"}  # whichever the device holds at the peak
    assert all(0 < num_bytes < math.inf for num_bytes in terms.values())
    assert json.loads(json.dumps(made.data())) == made.data()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_state_between_steps_matches_the_formula(stage):
    made = plan("gpt-7.5b", "h100:64", Settings(stage=stage), suggest=False)
    terms = {term.name: term.num_bytes for term in made.memory.terms}
    states = model_states(made.parameters, stage, 64)
    assert terms["parameters"] == pytest.approx(states.parameters, rel=0.01)
    assert terms["optimizer state"] == pytest.approx(states.optimizer, rel=0.01)
    assert made.memory.peak_bytes == sum(terms.values()) and made.program is None


def test_a_step_that_does_not_fit_gets_suggestions():
    settings = Settings(remat="none", rows=2)
    made = plan("llama3-8b", "h100:8", settings)
    assert not made.fits and made.room_bytes < 0
    changes = {each.change: each for each in made.suggestions}
    assert changes["remat='full'"].fits and changes["remat='full'"].peak_bytes < 0.5 * made.peak_bytes
    assert all(each.peak_bytes < made.peak_bytes for each in made.suggestions)
    for change, options in {
        "remat='full'": {"remat": "full"},
        "2 microbatches of 1 rows": {"rows": 1, "num_microbatches": 2},
    }.items():
        again = plan("llama3-8b", "h100:8", dataclasses.replace(settings, **options), suggest=False)
        assert (again.peak_bytes, again.fits) == (changes[change].peak_bytes, changes[change].fits)
    shown = text(made, formulas=True)
    assert shown.startswith("does not fit: ") and "2 x 8.03B / 8" in shown


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (0.75, "It fits with remat='dots', at "),  # the fastest of the changes that fit
        (0.05, "None of the changes above makes it fit. What comes closest is "),
    ],
)
def test_the_last_lines_recommend_what_was_estimated_to_fit(share, expected):
    """The calls at the end are those of a plan that fits, and there are none if no change that was tried does."""
    made = plan("llama3-8b", "h100:8", Settings(remat="none"), memory_share=share)
    shown = " ".join(text(made).split())
    assert not made.fits and expected in shown and "remat='none'" not in shown.split(expected)[1]
    assert ("train_step(" in shown) == any(each.fits for each in made.suggestions)
    explained = " ".join(render_text(render_explanation(made)).split())
    assert ("train_step(" in explained) == ("train_step(" in shown) and "remat='none'," not in explained


def test_a_change_that_overfills_the_host_does_not_fit():
    settings = Settings(remat="full")
    made = plan("llama3-8b", "h100:1", settings, host_memory_bytes=2**36, memory_share=0.3)
    by_change = {each.change.split(" ")[0]: each for each in made.suggestions}
    params = by_change["offload='params'"]
    assert params.peak_bytes < made.limit_bytes and not params.fits and params.host_bytes > 2**36
    assert "host is full" in text(made)


def test_offloaded_checkpoints_are_counted_in_host_memory():
    full, offload = (plan("llama3-8b", "h100:8", Settings(remat=remat), suggest=False) for remat in ("full", "offload"))
    checkpoint = 8192 * 4096 * 2
    assert full.host_bytes == 0
    assert 32 * checkpoint <= offload.host_bytes <= 33 * checkpoint + KIB  # and events
    assert offload.peak_bytes < full.peak_bytes - 28 * checkpoint


def test_an_offloaded_optimizer_is_in_host_memory_and_is_suggested():
    """Llama 3 8B on one H100: 12 of 16 bytes a parameter move to the host, and the copies take their time."""
    none, offloaded = (plan("llama3-8b", "h100:1", Settings(offload=offload)) for offload in OFFLOADS[:2])
    psi, chip = none.parameters, none.cluster.chip
    assert offloaded.host_bytes == pytest.approx(12 * psi, rel=1e-3) and none.host_bytes == 0
    assert none.peak_bytes - offloaded.peak_bytes == pytest.approx(12 * psi, rel=1e-3)
    assert offloaded.time.host_s == pytest.approx(12 * psi / chip.host_rate.effective, rel=1e-3)
    assert offloaded.time.step_s == none.time.step_s + offloaded.time.host_s and offloaded.time.bound == "copies"
    assert offloaded.fits and not none.fits
    (suggestion,) = [each for each in none.suggestions if "offload='optimizer'" in each.change]
    assert (suggestion.fits, suggestion.peak_bytes) == (True, offloaded.peak_bytes)
    assert "offload='optimizer'" in offloaded.settings.python() and "offload=" not in none.settings.python()
    (note,) = [note for note in offloaded.notes if "pins" in note]
    assert note.endswith("for the GPU in one process, set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=96")
    assert "host memory: 89.75 GiB pinned for each device" in text(offloaded)


def test_moments_in_few_bits_are_planned_and_suggested():
    """Of Llama 3 8B, the table has moments in fp32, and 256 elements of all other parameters share a scale in fp32."""
    plain, low = plan("llama3-8b", "h100:1"), Settings(moment_bits=8)
    both = dataclasses.replace(low, precision="bf16_params")
    psi, table = plain.parameters, 128256 * 4096
    moments = 8 * table + (2 + 8 / 256) * (psi - table)
    for settings, master in (low, 4), (both, 0):
        made = plan("llama3-8b", "h100:1", settings, suggest=False)
        terms = {term.name: term.num_bytes for term in made.memory.terms}
        assert terms["optimizer state"] == pytest.approx(master * psi + moments, rel=1e-3)
        assert made.peak_bytes in {each.peak_bytes for each in plain.suggestions if "bit" in each.change}
    first = both.python().splitlines()[0]
    assert first == "tx = zerojax.stochastic_rounding(zerojax.low_bit_moments(tx, 8))"
    assert low.python().startswith("tx = zerojax.low_bit_moments(tx, 8)\n") and "tx" not in Settings().python()
    assert "moments in 8 bits" in text(made) and "bits" not in text(plain).split("Peak")[0]


def test_moments_of_8_bits_are_not_offloaded_to_the_hosts_of_tpus():
    settings, name = Settings(moment_bits=8), f"{__name__}:large_job"
    for target, offered in ("a100:1", True), ("v5e:1x1", False):
        made = plan(name, target, settings, memory_share=1e-7)
        assert any("offload='optimizer'" in each.change for each in made.suggestions) == offered
    with pytest.raises(ValueError, match="arrays of 8 bits cannot be in the host memory of TPUs"):
        plan(name, "v5e:1x1", dataclasses.replace(settings, offload="optimizer"))


def test_layers_that_share_tiles_are_not_offloaded_to_the_hosts_of_tpus():
    """48 layers of 100 rows on each of 16 chips. Their optimizer state is not read layer by layer."""
    plan("gpt2-1.5b", "v5e:4x4", Settings(offload="optimizer", remat="full"), suggest=False)
    with pytest.raises(ValueError, match=r"TPUs do not read single layers .*\n.*\[48, 100, \d+\] on each device"):
        plan("gpt2-1.5b", "v5e:4x4", Settings(offload="params", remat="full"), suggest=False)


def test_an_optimizer_without_moments_has_none_in_few_bits():
    name = f"{__name__}:sgd_job"
    made = plan(name, "a100:1", memory_share=1e-7)
    assert made.suggestions and not any("bit" in each.change for each in made.suggestions)
    with pytest.raises(ValueError, match="has no moments"):
        plan(name, "a100:1", Settings(moment_bits=8))


def test_the_search_keeps_the_bits_of_moments():
    settings = Settings(rows=2, precision="bf16_params", moment_bits=16)
    found = search(f"{__name__}:large_job", "a100:1", settings, num_compiled=0)
    for each in (*found.candidates, found.naive):
        assert (each.settings.precision, each.settings.moment_bits) == ("bf16_params", 16)


def test_a_plan_does_not_fit_if_the_host_has_too_little_memory():
    settings = Settings(offload="optimizer")
    made = plan("llama3-8b", "h100:1", settings, host_memory_bytes=2**36)
    assert not made.fits and made.room_bytes > 0 and made.host_bytes > made.host_limit_bytes == 2**36
    shown = text(made)
    assert shown.startswith("does not fit: ") and "25.75 GiB above the limit" in shown.splitlines()[1]
    found = search("llama3-8b", made.cluster, num_compiled=0, host_memory_bytes=2**36)
    assert {c.settings.stage for c in found.candidates} == {3}  # on one device, all stages are the same
    assert not any(c.fits for c in found.candidates)
    assert found.winner is None and not found.best.fits
    shown = render_text(render_ranking(found))
    assert "none of the settings that were tried fits" in shown and "train_step(" not in shown
    found = search("llama3-8b", "h100:1", num_compiled=0)
    assert {c.settings.offload for c in found.candidates if c.fits} == {"optimizer", "params"}
    assert next(c for c in found.candidates).settings.offload == "optimizer"  # it copies less


def large_job():
    params = lambda key: {"w": jax.random.normal(key, (256, 512))}
    loss = lambda params, batch: jnp.mean((batch["x"] @ params["w"]) ** 2)
    return Job(params, optax.adam(1e-3), loss, lambda rows: {"x": jax.ShapeDtypeStruct((rows, 256), jnp.float32)})


def sgd_job():
    return large_job()._replace(tx=optax.sgd(1e-3))


def lamb_job():
    return own_job()._replace(tx=optax.lamb(1e-3))


def muon_job():
    return large_job()._replace(tx=contrib.muon(1e-3))


@pytest.mark.parametrize("replica", [1, 2])
def test_a_plan_knows_the_update_of_matrices_by_owners(replica):
    """One matrix [256, 512], five iterations of three products. With replicas, all devices are owners too."""
    num_owners = 16
    muon, adam = (
        plan(f"{__name__}:{name}", "h100:16", Settings(precision="fp32", replica=replica), suggest=False)
        for name in ("muon_job", "large_job")
    )
    assert muon.time.update_bytes == pytest.approx(2 * (num_owners - 1) / num_owners * 4 * 256 * 512)
    flops = 5 * 2 * (2 * 256 * 256 * 512 + 256**3)
    chip, cards = muon.cluster.chip, muon.cluster.route(range(num_owners)).rate
    seconds = max(flops / (chip.flops.effective * chip.f32_share), muon.time.update_bytes / cards)
    assert muon.time.update_s == pytest.approx(seconds)
    assert (adam.time.update_s, adam.time.update_bytes) == (0, 0)
    assert muon.step_s - muon.time.update_s == pytest.approx(adam.step_s)
    assert muon.sent_bytes - adam.sent_bytes == pytest.approx(muon.time.update_bytes)
    assert "The update multiplies matrices" in render_text(render_explanation(muon))


def test_an_optimizer_that_cannot_be_offloaded_is_not_suggested():
    """LAMB couples the elements of a parameter."""
    name = f"{__name__}:lamb_job"
    made = plan(name, "a100:1", memory_share=1e-7)
    assert not made.fits and made.suggestions
    assert not any("offload='optimizer'" in each.change for each in made.suggestions)
    assert {c.settings.offload for c in search(name, "a100:1", num_compiled=0).candidates} == {"none"}
    for order in (("none", "optimizer"), ("optimizer",)):
        planner = Planner(name, "a100:1")
        with pytest.raises(ValueError, match="cannot be computed for one piece"):
            for offload in order:
                planner.plan(Settings(offload=offload))


def render_text(renderable):
    console = Console(width=120, no_color=True)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def own_job():
    params = lambda key: {"w": jax.random.normal(key, (64, 64))}
    batch = lambda rows: {"x": jax.ShapeDtypeStruct((rows, 64), jnp.float32)}
    return Job(params, optax.adam(1e-3), lambda params, batch: jnp.mean((batch["x"] @ params["w"]) ** 2), batch, rows=4)


def test_a_user_defined_job():
    made = plan(f"{__name__}:own_job", "a100:16", Settings(precision="fp32"), suggest=False)
    assert made.parameters == 64 * 64 and made.settings.rows == 4 and made.fits
    assert {term.name: term.num_bytes for term in made.memory.terms}["parameters"] == 4 * 64 * 64 // 16


@pytest.mark.parametrize(
    ("stage", "replica", "k", "full", "shards"),
    [
        (0, 1, 1, 1, 0),  # the gradient
        (0, 1, 2, 2, 0),  # and the sum of the microbatches
        (1, 1, 2, 2, 0),
        (2, 1, 1, 1, 1),  # the gradient, until it is reduced to a shard
        (2, 1, 2, 1, 2),  # and the sum of the shards
        (3, 1, 1, 1, 1),
        (3, 1, 2, 1, 2),
        (3, 2, 2, 1, 2),
    ],
)
def test_gradients_and_replicas_are_counted_by_hand(stage, replica, k, full, shards):
    """Of one matrix in fp32: every replica of 8 devices divides what 16 would, but for the optimizer's state."""
    settings = Settings(stage=stage, precision="fp32", replica=replica, num_microbatches=k, remat="full")
    made = plan(f"{__name__}:own_job", "a100:16", settings, suggest=False)
    terms = {term.name: term.num_bytes for term in made.memory.terms}
    matrix, num_shards = 4 * 64 * 64, 16 // replica
    count = 4  # Adam's, an int32 scalar
    assert terms["gradients"] == full * matrix + shards * matrix // num_shards
    assert terms["parameters"] == (matrix // num_shards if stage == 3 else matrix)
    assert terms["optimizer state"] == 2 * matrix // (16 if stage else 1) + count
    assert terms["batch"] == k * 4 * 64 * 4


@pytest.mark.parametrize(("target", "share"), [("h100:8", 0.75), ("v5e:4x4", 15.75 / 16), ("cpu:8", 1.0)])
def test_a_program_may_use_the_share_of_memory_that_its_platform_gives(target, share):
    planner = Planner(f"{__name__}:own_job", target)
    assert planner.limit_bytes == int(share * planner.cluster.chip.memory_bytes)
    assert Planner(f"{__name__}:own_job", target, memory_share=0.5).limit_bytes == planner.cluster.chip.memory_bytes / 2


def command(*arguments):
    return CliRunner().invoke(main, ["plan", *arguments])


def test_the_command_exits_with_3_if_the_step_does_not_fit():
    fits = command("--preset", "gpt2-124m", "--json")
    assert fits.exit_code == 0 and json.loads(fits.stdout)["fits"] is True
    data = json.loads(fits.stdout)
    assert data["terms"][0]["name"] == "parameters"
    assert data["time_level"] == "formula" and data["bound_by"] in ("products", "memory", "links")
    assert data["tokens_per_s"] == pytest.approx(data["tokens"] / data["step_s"]) and 0 < data["mfu"] < 1
    large = command("--preset", "gpt-1t", "--target", "v5e:4x4", "--memory-share", "0.5", "--formulas")
    assert large.exit_code == 3 and "does not fit" in large.stdout and "50% of the 16 GiB" in large.stdout


def test_targets_are_compared_in_one_table(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    arguments = "--job", f"{__name__}:own_job", "--target", "h100:8, v5p:2x2x2,a100:16"
    shown = command(*arguments)
    lines = shown.stdout.splitlines()
    rows = {line.split()[0]: line.split() for line in lines if ":" in line.split(" ")[0] and "GiB" in line}
    assert shown.exit_code == 0 and list(rows) == ["h100:8", "v5p:2x2x2", "a100:16"] and max(map(len, lines)) <= 80
    plans = json.loads(command(*arguments, "--json").stdout)["targets"]
    for made, row in zip(plans, rows.values(), strict=True):
        single = plan(made["what"], made["target"], suggest=False)
        assert made == json.loads(json.dumps(single.data())) and made["sent_bytes"] == single.sent_bytes > 0
        assert row[-2:] == [f"{made['tokens_per_s']:,.0f}", f"{made['mfu']:.1%}"] and row[1] == "yes"
    assert command(*arguments, "--memory-share", "1e-9").exit_code == 3
    assert "for a single target" in command(*arguments, "--explain").output


def test_without_a_compiler_the_search_is_by_formula(monkeypatch):
    missing = "no GPU compiler is installed (pip install 'zerojax[plan-gpu]')"
    monkeypatch.setattr("zerojax.utils.versions.missing_compiler", lambda platform: missing)
    monkeypatch.setenv("COLUMNS", "80")
    arguments = "--job", f"{__name__}:own_job", "--target", "h100:2", "--rows", "1", "--auto"
    shown = command(*arguments)
    assert shown.exit_code == 0, shown.output
    assert missing in " ".join(shown.stdout.split()) and "winner: " in shown.stdout and "train_step(" in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 80
    data = json.loads(command(*arguments, "--json").stdout)
    assert (
        data["level"] == "formula" and data["winner"]["fits"] and data["best"]["settings"] == data["winner"]["settings"]
    )


def test_the_command_draws_the_memory_by_stage(tmp_path):
    shown = command("--preset", "gpt2-124m", "--png", str(tmp_path / "pictures"))
    assert shown.exit_code == 0 and "memory by stage" in shown.output
    assert (tmp_path / "pictures" / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "pictures" / "timeline.png").exists()  # nothing was compiled


def test_a_compiler_that_is_not_installed_is_named(monkeypatch):
    def missing(*args, **kwargs):
        raise RuntimeError("no such platform")

    monkeypatch.setattr("zerojax.analysis.targets.topologies.get_topology_desc", missing)
    for target, extra in (("h100:8", "plan-gpu"), ("v5e:4x4", "plan-tpu")):
        shown = command("--preset", "gpt2-124m", "--target", target, "--compile")
        assert shown.exit_code == 1 and f"zerojax[{extra}]" in shown.output and "Traceback" not in shown.output


def test_the_command_compiles_for_simulated_devices(tmp_path):
    shown = command("--job", f"{__name__}:own_job", "--target", "cpu:8", "--compile", "--json", "--dump", str(tmp_path))
    data = json.loads(shown.stdout)
    assert shown.exit_code == 0 and data["level"] == "compiled" and data["fits"]
    assert sum(data["held_bytes"].values()) == data["peak_bytes"]
    assert {row["kind"] for row in data["collectives"]} >= {"all-gather", "reduce-scatter"}
    assert {file.name for file in tmp_path.iterdir()} == {"step.txt", "buffers.txt", "ranges.txt"}


def layered_job():
    params = lambda key: {"layers": {str(i): {"w": jax.random.normal(key, (64, 64))} for i in range(3)}}

    def loss(params, batch):
        x = batch["x"]
        for layer in params["layers"].values():
            x = jnp.tanh(x @ layer["w"])
        return jnp.mean(x**2)

    return own_job()._replace(create_model=params, loss_fn=loss)


@functools.cache
def ranking():
    return search(f"{__name__}:layered_job", "a100:128", Settings(rows=2), num_compiled=0)


def test_the_search_ranks_by_formula_without_a_compiler():
    """All settings are candidates, each with the time that a plan of it has. Memory traffic limits these."""
    found = ranking()
    key = lambda s: (s.stage, s.remat, s.num_microbatches, s.replica, s.offload)
    settings = [key(c.settings) for c in found.candidates]
    replicas = {0: (1,), 1: (1, 2, 16), 2: (1, 2, 16), 3: (1, 2, 16)}
    ways = lambda stage: itertools.product(REMATS, (1, 2), replicas[stage], OFFLOADS)
    possible = lambda stage, replica, offload: offload != "params" or (stage, replica) == (3, 1)
    product = [(stage, *each) for stage in replicas for each in ways(stage) if possible(stage, *each[2:])]
    assert sorted(settings) == sorted(product)
    assert found.winner is found.candidates[0] and found.best.settings == found.winner.settings
    assert found.best.step_s == found.winner.step_s and found.data()["level"] == "formula"
    assert {c.settings.rows * c.settings.num_microbatches for c in found.candidates} == {2}
    times = [c.step_s for c in found.candidates if c.fits]
    assert times == sorted(times) and found.naive.settings.prefetch == 0
    by_settings = dict(zip(settings, found.candidates, strict=True))
    none, full = (by_settings[3, remat, 1, 1, "none"] for remat in ("none", "full"))
    assert none.time.compute.total_s < full.time.compute.total_s
    assert full.time.compute == Planner(f"{__name__}:layered_job", "a100:128").formula_time(full.settings).compute
    assert json.loads(json.dumps(found.data())) == found.data()


def test_the_time_on_the_links_is_the_volume_of_the_stage():
    """In bf16: within a replica that of ZeRO, and over the replicas an all_reduce of the shards once per step."""
    devices, psi = cluster("a100:128"), 3 * 64 * 64
    for candidate in ranking().candidates:
        settings = candidate.settings
        k, shards = settings.num_microbatches, 128 // settings.replica
        sent = {0: 2, 1: 2, 2: 1 + k, 3: 3 * k}[settings.stage] * 2 * psi * (shards - 1) / shards
        seconds = sent / devices.route(range(shards)).rate
        if settings.replica > 1:
            between = 2 * 2 * psi / shards * (settings.replica - 1) / settings.replica
            seconds += between / devices.route(range(0, 128, shards)).rate
        assert candidate.time.link_s == pytest.approx(seconds)


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_note_says_what_an_uneven_number_of_devices_costs():
    made = plan("gpt2-1.5b", "h100:1024", suggest=False)
    (note,) = [note for note in made.notes if "zeros" in note]
    assert note.startswith("the shards of 1024 devices hold 17% more than an even division, in zeros. 'layers/")
    assert note.endswith("is padded to 2048 in dim 1. 820 devices hold 2.4% more than an even division")


def test_the_command_lists_its_presets():
    shown = command("--list-presets")
    rows = {line.split()[0]: line for line in shown.stdout.splitlines() if line}
    assert shown.exit_code == 0 and rows.keys() >= PRESETS.keys() and "Transformer(" not in shown.stdout
    assert rows["llama3-8b"].split()[1:] == ["8.03B", "32", "4096", "32/8", "8192", "1", "Llama"]


def test_invalid_input_is_an_error_without_a_traceback():
    for arguments, message in [
        (("--job", "gpt3"), "no preset 'gpt3'"),
        ((), "--preset NAME, --hf PATH or --job MODULE:FUNCTION"),
        (("--job", "nowhere:job"), "cannot be called"),
        (("--job", "math:gcd"), "does not return a Job"),
        (("--preset", "gpt2-124m", "--target", "h100:12"), "unknown target 'h100:12'"),
        (("--preset", "gpt2-124m", "--target", "h100:8,v5p:8"), "unknown target 'v5p:8'"),
        (("--preset", "gpt2-124m", "--target", ","), "unknown target ','"),
        (("--preset", "gpt2-124m", "--memory-share", "2"), "memory_share is 2.0"),
        (("--preset", "gpt2-124m", "--remat", "some"), "'some' is not one of"),
        (("--preset", "gpt2-124m", "--replica", "3"), "do not divide"),
        (("--preset", "gpt2-124m", "--model", "2"), "cannot be divided over a model axis of 2"),
    ]:
        shown = command(*arguments)
        assert shown.exit_code in (1, 2) and message in shown.output and "Traceback" not in shown.output


def test_the_required_memory_is_read_from_the_message_of_the_compiler():
    message = (
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (81.64G) exceeds "
        "available HBM (15.75G)."
    )
    assert required_bytes(message) == int(81.64 * 2**30)
    assert required_bytes("RESOURCE_EXHAUSTED: Ran out of memory. Used 30.5G of 15.75G hbm.") == int(30.5 * 2**30)
    assert required_bytes("INTERNAL: Couldn't find output tile sizes") is None


def test_collectives_are_listed_by_the_axes_that_their_groups_span():
    """A ring along one dim of a torus has fewer devices than the axis."""
    for group, axis in [((0, 1), "data"), ((0, 4), "replica"), (range(8), "replica, data")]:
        found = Collective("collective-permute", "bf16", 2**20, tuple(group), 3, False, True)
        (row,) = summarize_collectives([found], {"replica": 2, "data": 4})
        assert (row.axis, row.count, row.sent_bytes, row.exposed_bytes) == (axis, 3, 3 * 2**20, 3 * 2**20)
