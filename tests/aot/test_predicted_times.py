"""Predicted times of programs compiled for described clusters respect limits, links, host copies and flops."""

import dataclasses
import functools

import gpt
import jax.numpy as jnp
import optax
import pytest

import zerojax
from zerojax import Remat, targets
from zerojax.analysis import hlo, hlo_costs
from zerojax.analysis.hardware import BETWEEN_HOSTS, INSIDE_HOST, cluster, torus_links
from zerojax.analysis.hlo_costs import FROM_HOST, TO_HOST
from zerojax.plan import timeline
from zerojax.plan.timeline import COMPUTE, MEMORY, STARTS

pytestmark = pytest.mark.aot
LAYERS, WIDTH, SEQ, ROWS = 6, 512, 256, 2
OFFLOAD = Remat(offload_inputs=True)


@functools.cache
def compiled(target, remat="full", replica=1):
    config = gpt.Config(width=WIDTH, layers=LAYERS, heads=4, vocab=1024, seq=SEQ, scan=True, dtype=jnp.bfloat16)
    mesh = zerojax.make_mesh(devices=targets.devices(target), replica=replica)
    zero = zerojax.Zero(mesh, stage=3, precision="bf16")
    state = zero.eval_init(gpt.create(config), optax.adamw(1e-3))
    traced = zero.train_step(gpt.loss, remat=remat).trace(state, gpt.batch_aval(config, ROWS * mesh.size))
    return traced.lower(lowering_platforms=(targets.platform(target),)).compile()


@functools.cache
def program(target, remat="full", replica=1):
    return hlo.parse_program(compiled(target, remat, replica).as_text())


def predict(target, remat="full", replica=1, **constants):
    """Predicts the time for a target whose chip has other constants."""
    found = cluster(target)
    found = dataclasses.replace(found, chip=dataclasses.replace(found.chip, **constants))
    return timeline.predict(program(target, remat, replica), found)


def faster(rate, times):
    return rate._replace(peak=rate.peak * times)


@pytest.mark.parametrize("target", ["a100:8", "h100:8", "h200:8", "b200:8", "v5e:2x4"])
def test_a_step_takes_between_the_time_of_its_busiest_lane_and_the_sum_of_all_lanes(target):
    found = predict(target)
    others = [seconds for lane, seconds in found.busy_s.items() if lane not in (COMPUTE, MEMORY, STARTS)]
    assert max(found.computing_s, *others) <= found.step_s * (1 + 1e-9)
    assert found.step_s <= (found.computing_s + sum(others)) * (1 + 1e-9)
    assert [iteration.trips for iteration in found.loops] == [
        (LAYERS - 2) // 2
    ] * 2  # forward, backward; two layers each


@pytest.mark.parametrize("target", ["h100:8", "h100:16", "v5e:2x4"])
def test_nothing_is_slower_with_faster_links_or_chips(target):
    chip, before = cluster(target).chip, predict(target)
    for name in ("link_rate", "network_rate", "memory_rate", "flops"):
        assert predict(target, **{name: faster(getattr(chip, name), 2)}).step_s <= before.step_s


def test_with_instant_links_only_computation_takes_time():
    chip = cluster("h100:8").chip
    found = predict("h100:8", link_rate=faster(chip.link_rate, 1e9), collective_s=0.0, hop_s=0.0)
    assert found.step_s == pytest.approx(found.computing_s, rel=1e-6)
    assert found.computing_s == pytest.approx(predict("h100:8").computing_s)


def test_each_collective_is_on_the_link_that_its_group_crosses():
    assert BETWEEN_HOSTS not in predict("h100:8").busy_s
    assert INSIDE_HOST not in predict("h100:16").busy_s
    assert {torus_links(0), torus_links(1)} <= predict("v5e:2x4").busy_s.keys()
    hybrid = predict("h100:16", replica=2).busy_s  # parameters within a host, gradients also between the two hosts
    chip = cluster("h100:16").chip
    assert hybrid[INSIDE_HOST] > 0
    slow = predict("h100:16", replica=2, network_rate=faster(chip.network_rate, 0.5)).busy_s
    assert slow[INSIDE_HOST] == hybrid[INSIDE_HOST]
    assert slow[BETWEEN_HOSTS] > hybrid[BETWEEN_HOSTS]


def test_offloaded_inputs_take_their_bytes_divided_by_the_rate_to_the_host():
    found = predict("h100:8", OFFLOAD)
    inputs = LAYERS * ROWS * SEQ * WIDTH * 2
    assert compiled("h100:8", OFFLOAD).memory_analysis().host_temp_size_in_bytes == inputs
    rate = cluster("h100:8").chip.host_rate.effective
    assert found.busy_s[TO_HOST] == pytest.approx(inputs / rate)
    assert inputs / rate <= found.busy_s[FROM_HOST] * (1 + 1e-9) <= (inputs * (LAYERS + 1) / LAYERS) / rate * (1 + 1e-6)
    assert not {TO_HOST, FROM_HOST} & predict("h100:8").busy_s.keys()


def products(target):
    return sum(
        hlo_costs.dot_flops(i) * block.trips
        for block in hlo.blocks(program(target))
        for i in block.instructions
        if i.op not in ("while", "call", "conditional")
    )


def test_programs_for_tpus_have_the_same_flops_as_those_for_gpus():
    """TPU programs multiply with convolutions, some of which have dilated windows."""
    assert products("v5e:2x4") == products("h100:8")


@pytest.mark.parametrize("target", ["v5e:4x8", "v4:2x2x4", "v5p:4x4x4", "v6e:8x8", "v5e:4x4*2"])
def test_chips_have_the_coordinates_of_the_compiler(target):
    found, devices = cluster(target), targets.devices(target)
    assert len(devices) == found.num_devices
    assert {device.device_kind for device in devices} <= set(found.chip.device_kinds)
    per_slice = found.num_devices // len({getattr(device, "slice_index", None) for device in devices})
    for index, device in enumerate(devices):
        assert tuple(device.coords)[: len(found.torus)] == found.coordinates(index % per_slice)
