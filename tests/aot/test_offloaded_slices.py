"""Programs for eight H100s read back what they have offloaded. A planted fault is found, and that of XLA itself."""

import functools
import re
from importlib import metadata

import gpt
import jax.numpy as jnp
import optax
import pytest

import zerojax
from zerojax import Remat, Verdict, targets
from zerojax.step import compiler_options, steps
from zerojax.utils import versions

pytestmark = pytest.mark.aot
CONFIG = gpt.Config(width=128, layers=9, scan=True, dtype=jnp.bfloat16)
MISREADS = versions.parse(metadata.version("jaxlib")) < compiler_options.FIRST_CORRECT


@functools.cache
def compiled(prefetch, k=1, with_option=True):
    """(The compiled step, its expectation)."""
    zero = zerojax.Zero(zerojax.make_mesh(devices=targets.devices("h100:8")), stage=3, precision="bf16")
    state, batch = zero.eval_init(gpt.create(CONFIG), optax.adamw(1e-3)), gpt.batch_aval(CONFIG, 8 * k)
    with pytest.MonkeyPatch.context() as patch:
        if not with_option:
            patch.setattr(steps, "offload_options", lambda config: {})
        step = zero.train_step(gpt.loss, num_microbatches=k, remat=Remat(offload_inputs=True), prefetch=prefetch)
        return step.lower(state, batch).compile(), step.expectation(state, batch)


def audited(program, expectation):
    return zerojax.audit_step(program, expectation)["offloaded slices"]


@pytest.mark.parametrize(("prefetch", "k"), [(0, 1), (1, 1), (1, 2)])
def test_a_step_reads_what_it_has_offloaded(prefetch, k):
    finding = audited(*compiled(prefetch, k))
    assert finding.verdict is Verdict.OK and finding.numbers["slices"] > 1
    assert (finding.numbers["annotated"] > 0) == (not MISREADS)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_versions_that_misread_offloaded_slices_do_so_without_the_option(prefetch):
    finding = audited(*compiled(prefetch, with_option=not MISREADS))
    assert (finding.verdict is Verdict.BROKEN) == MISREADS
    assert not MISREADS or re.search(
        r"slice \d with step \+1, and its index starts at slice \d with step -1", finding.found
    )


class Planted:
    """A compiled program whose text says that it walks forwards through every host buffer that it reads."""

    def __init__(self, program):
        self._program = program

    def __getattr__(self, name):
        return getattr(self._program, name)

    def as_text(self):
        start = r'"byte_offset":"[1-9]\d*","byte_stride":"-(\d+)"'
        return re.sub(start, r'"byte_offset":"0","byte_stride":"\1"', self._program.as_text())


def test_a_walk_planted_in_the_program_of_this_version_is_found():
    """Where the pass is off, there is nothing to plant it in; there, XLA's own fault is found, see above."""
    program, expectation = compiled(1, with_option=not MISREADS)
    finding = audited(Planted(program), expectation)
    assert finding.verdict is Verdict.BROKEN and "with step +1" in finding.found
