"""Plans tell of products in fp32 that cost most of the time, of unsure formulas, and of compilers that fail."""

import gpt
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from zerojax.analysis import hardware
from zerojax.analysis.memory import Memory
from zerojax.plan.job import Job, Settings
from zerojax.plan.planner import Planner
from zerojax.plan.program import compile_step, scheduling_options
from zerojax.plan.show import text

CONFIG = gpt.Config(width=32, layers=3, heads=2, vocab=256, seq=32, dtype=jnp.bfloat16)


class WideHead(nnx.Module):
    """A GPT whose head computes in fp32."""

    def __init__(self, rngs):
        self.gpt = gpt.GPT(CONFIG, rngs)
        self.wide = nnx.Linear(256, 2048, dtype=jnp.float32, rngs=rngs)

    def __call__(self, tokens):
        return self.wide(self.gpt(tokens))


class Convolution(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(256, 32, dtype=jnp.bfloat16, rngs=rngs)
        self.conv, self.head = nnx.Conv(32, 32, (3,), rngs=rngs), nnx.Linear(32, 256, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.conv(self.embed(tokens)))


def planner(monkeypatch, create, target="h100:8"):
    job = Job(create, optax.adamw(1e-3), gpt.loss, lambda rows: gpt.batch_aval(CONFIG, rows), rows=2)
    monkeypatch.setattr("zerojax.plan.planner.find_job", lambda *args, **kwargs: job)
    return Planner("test:job", target)


def test_products_in_fp32_that_cost_most_of_the_time_are_named(monkeypatch):
    plan = planner(monkeypatch, WideHead).plan(Settings())
    note = plan.notes[0]
    assert note.startswith("matrix products in fp32 take") and "float32[2,32,256] x float32[256,2048] in 'wide'" in note
    assert "matrix products in fp32 take" in text(plan) and plan.data()["notes"] == list(plan.notes)
    for create, precision in ((gpt.create(CONFIG), "bf16"), (WideHead, "fp32")):
        plan = planner(monkeypatch, create).plan(Settings(precision=precision))
        assert not any("fp32" in note for note in plan.notes)


def test_a_formula_that_is_not_sure_says_so(monkeypatch):
    def reasons(create, target):
        notes = planner(monkeypatch, create, target).plan(Settings()).notes
        return "; ".join(note for note in notes if "not sure" in note)

    assert "cuDNN" in reasons(Convolution, "h100:8") and "activations" in reasons(Convolution, "h100:8")
    wide = gpt.create(gpt.Config(width=1024, layers=2, heads=2, vocab=256, seq=32, dtype=jnp.bfloat16))
    assert not reasons(wide, "h100:8") and "TPU" in reasons(wide, "v5e:2x4")


class Failing:
    """A traced step whose compiler fails."""

    def __init__(self, message):
        self.message = message
        self.options = {}

    def lower(self, **kwargs):
        return self

    def compile(self, compiler_options):
        self.options = compiler_options
        raise jax.errors.JaxRuntimeError(self.message)


@pytest.mark.parametrize(
    ("message", "fix"),
    [
        ("INTERNAL: Couldn't find output tile sizes that satisfy hlo: %dot.1", "xla_gpu_enable_triton_gemm=false"),
        ("INTERNAL: something else", "no flag is known"),
    ],
)
def test_an_internal_error_of_the_compiler_is_told_with_what_helps(message, fix):
    cluster, estimate = hardware.cluster("h100:8"), Memory((), 0)
    with pytest.raises(RuntimeError, match=f"internal error\n  got:      INTERNAL: .*\n  fix:      .*{fix}"):
        compile_step(Failing(message), cluster, {}, estimate, cluster.chip.memory_bytes)
    with pytest.raises(jax.errors.JaxRuntimeError, match="UNAVAILABLE"):
        compile_step(Failing("UNAVAILABLE: no"), cluster, {}, estimate, cluster.chip.memory_bytes)


def test_a_step_is_compiled_for_the_memory_that_a_program_may_use(monkeypatch):
    """Of a described GPU, XLA uses 95% of what 0.8 of the memory leaves beside the arguments."""
    chip, slop = hardware.cluster("h100:1").chip, "xla_gpu_memory_limit_slop_factor"
    of_memory = lambda share: int(share * chip.memory_bytes)
    for arguments, limit, percent in [(0, 0.8, 95), (0, 0.4, 47), (0.6, 0.9, 142), (0.2, 0.75, 87)]:
        options = scheduling_options(chip, of_memory(arguments), of_memory(limit))
        assert options[slop] == pytest.approx(percent, abs=1)
    assert not scheduling_options(chip, of_memory(0.85), of_memory(0.9))  # nothing is left of 0.8
    assert not scheduling_options(chip, of_memory(0.6), of_memory(0.5))
    assert not scheduling_options(hardware.cluster("v5p:2x2x1").chip, 0, of_memory(0.9))
    step = Failing("UNAVAILABLE: no")
    with pytest.raises(jax.errors.JaxRuntimeError):
        compile_step(step, hardware.cluster("h100:1"), {}, Memory((), 0), of_memory(0.4))
    assert step.options[slop] == pytest.approx(47, abs=1)
    monkeypatch.setenv("XLA_FLAGS", f"--{slop}=38")
    assert not scheduling_options(chip, 0, of_memory(0.4))


def test_recomputation_takes_time_where_memory_traffic_limits_the_step(monkeypatch):
    """Attention is written out: its scores are computed again with `remat='full'`."""
    made = planner(monkeypatch, gpt.create(CONFIG))
    seconds = {remat: made.formula_time(Settings(rows=2, remat=remat)).compute for remat in ("none", "full")}
    assert all(time.memory_s > time.products_s for time in seconds.values())
    assert seconds["none"].memory_s < seconds["full"].memory_s
