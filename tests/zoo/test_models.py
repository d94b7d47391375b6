"""Models of other people train as they do on one device, in the expected units, with next to nothing replicated."""

import functools

import jax
import numpy as np
import pytest
from support import plain
from support.parity import TOLERANCES, assert_close, batches, optimizer, train, with_constant_init

import zerojax
from zerojax import Zero
from zoo import entries
from zoo.measures import replicated_share, unit_shares

pytestmark = pytest.mark.zoo
ENTRIES = entries.installed()
STEPS = 3


def cases(stages, always):
    for name in ENTRIES:
        for stage in stages:
            marks = [pytest.mark.xdist_group(name)]  # one process shares the plain run
            if stage not in always:
                marks.append(pytest.mark.full)
            yield pytest.param(name, stage, marks=marks, id=f"{name}-stage{stage}")


def names():
    return [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in ENTRIES]


@functools.cache
def reference(name):
    return plain.run(ENTRIES[name], optimizer(), batches(ENTRIES[name], STEPS))


def zero_of(entry, stage, precision="fp32", offload="none"):
    return Zero(zerojax.make_mesh(), stage, precision, offload=offload, **entry.options)


@pytest.mark.parametrize(("name", "stage"), list(cases((0, 1, 2, 3), always=(0, 3))))
def test_training_follows_the_plain_step(name, stage):
    """At stage 3 the model is created by `init`; the initial values have to be the same.

    The tolerances are those of the other parity tests: in fp32 only rounding differs.
    """
    entry, want = ENTRIES[name], reference(name)
    model = entry if stage == 3 else with_constant_init(entry)
    got, _ = train(zero_of(entry, stage), model, batches(entry, STEPS))
    assert len(got.losses) == STEPS and got.metrics[-1]["skipped"] == 0
    assert_close(got, want, **{**TOLERANCES["fp32"], "update": entry.update})


@pytest.mark.parametrize("name", names())
def test_parameters_in_host_memory_train_as_on_the_devices(name):
    entry = ENTRIES[name]
    got, state = train(zero_of(entry, 3, offload="params"), entry, batches(entry, STEPS))
    assert "pinned_host" in {a.sharding.memory_kind for a in jax.tree.leaves(state.params)}
    assert_close(got, reference(name), **{**TOLERANCES["fp32"], "update": entry.update})


@pytest.mark.parametrize("name", names())
def test_tiles_of_a_token_train_as_all_tokens(name):
    entry = ENTRIES[name]
    got, _ = train(zero_of(entry, 3), with_constant_init(entry), batches(entry, STEPS), tiles=1)
    assert_close(got, reference(name), **{**TOLERANCES["fp32"], "update": entry.update})


@pytest.mark.parametrize("name", names())
def test_tokens_are_divided_or_the_error_says_that_there_are_none(name):
    entry = ENTRIES[name]
    zero = Zero(zerojax.make_mesh(context=4), 3, **entry.options)
    try:
        got, _ = train(zero, with_constant_init(entry), batches(entry, STEPS), tiles=1)
    except ValueError as error:
        assert "context: no activation divides over 4 devices" in str(error)
        return
    assert_close(got, reference(name), **{**TOLERANCES["fp32"], "update": entry.update})


@pytest.mark.parametrize("name", names())
def test_bf16_with_remat_and_microbatches_stays_near_fp32(name):
    """The loss of the first step has the initial weights, rounded to bf16, whose steps are 2^-8 = 4e-3."""
    entry = ENTRIES[name]
    zero = zero_of(entry, 3, "bf16")
    got, _ = train(zero, with_constant_init(entry), batches(entry, 2), num_microbatches=2, remat="full")
    assert np.isfinite(got.losses).all() and got.metrics[-1]["skipped"] == 0
    np.testing.assert_allclose(got.losses[0], reference(name).losses[0], rtol=2e-2)


@pytest.mark.parametrize("name", names())
def test_each_layer_is_a_unit_and_next_to_nothing_is_replicated(name):
    entry = ENTRIES[name]
    zero = zero_of(entry, 3)
    state = zero.eval_init(entry.create, optimizer())
    shares = unit_shares(zero, state)
    assert set(shares) == set(entry.units)
    assert max(shares.values()) <= entry.largest
    assert replicated_share(zero, state) <= entry.replicated
