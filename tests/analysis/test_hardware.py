"""Clusters by name, the links that groups of devices cross, and calibrations."""

import json

import jax
import pytest

from zerojax import targets
from zerojax.analysis import hardware
from zerojax.analysis.hardware import BETWEEN_HOSTS, BETWEEN_SLICES, CHIPS, INSIDE_HOST, cluster, torus_links


def test_a_cluster_by_its_name():
    for target, num_devices, devices_per_host, torus in [
        ("cpu:8", 8, 8, None),
        ("a100:4", 4, 4, None),
        ("h100:64", 64, 8, None),
        ("b200:8", 8, 8, None),
        ("v5e:4x4", 16, 4, (4, 4)),
        ("v4:2x2x4", 16, 4, (2, 2, 4)),
        ("v5p:4x4x4*2", 128, 4, (4, 4, 4)),
    ]:
        found = cluster(target)
        assert (found.num_devices, found.devices_per_host, found.torus) == (num_devices, devices_per_host, torus)
        assert found.chip.name == target.split(":")[0]
        assert targets.platform(target) == found.chip.platform


def test_an_unknown_target_is_rejected():
    for target in ["h100", "h100:0", "h100:12", "h100:4x4", "v5e:16", "v5e:4x4*0", "v9:2x2", "tpu:8", ""]:
        with pytest.raises(ValueError, match=r"targets: unknown target .*\n  fix: "):
            cluster(target)


def test_too_few_simulated_devices_are_an_error():
    assert targets.devices("cpu:4") == jax.devices("cpu")[:4]
    with pytest.raises(RuntimeError, match=r"not enough simulated devices for 'cpu:16'\n  got: .*8\n  fix: .*simulate"):
        targets.devices("cpu:16")


def test_the_memory_of_a_chip_is_what_a_driver_reports():
    """An H200, which is sold as 141 GB, has neither 141 GiB nor 141 GB."""
    for name, gib in [
        ("a100", 79.26),
        ("h100", 79.19),
        ("h200", 139.80),
        ("b200", 178.36),
        ("v4", 32),
        ("v5e", 16),
        ("v5p", 96),
        ("v6e", 32),
    ]:
        assert CHIPS[name].memory_bytes / 2**30 == pytest.approx(gib, abs=0.005)


def test_no_chip_is_faster_than_its_data_sheet():
    for chip in CHIPS.values():
        rates = [chip.flops, chip.memory_rate, chip.host_rate, chip.link_rate, chip.network_rate]
        assert all(0 < rate.efficiency <= 1 and rate.effective <= rate.peak for rate in rates)
        assert chip.network_rate.effective <= chip.link_rate.effective < chip.memory_rate.effective


def test_a_ring_over_hosts_uses_as_many_nics_as_it_has_devices_in_each_host():
    h100 = cluster("h100:64")
    chip = h100.chip
    link, nic = chip.link_rate.effective, chip.network_rate.effective
    inside = h100.route(range(8, 16))
    assert (inside.lanes, inside.rate) == ((INSIDE_HOST,), link)
    assert inside.latency_s == pytest.approx(chip.collective_s + 7 * chip.hop_s)
    across = h100.route(range(64))
    assert (across.lanes, across.rate) == ((BETWEEN_HOSTS,), min(link, 8 * nic))
    assert across.latency_s == pytest.approx(chip.collective_s + 56 * chip.hop_s + 7 * chip.network_hop_s)
    assert h100.route([0, 8, 16]).rate == nic  # one device of each host
    assert h100.route([0, 1, 8, 9]).rate == 2 * nic
    assert h100.route([0, 1, 2, 8]).rate == nic  # the host with the fewest devices limits the ring
    assert h100.route([6, 7]).lanes == (INSIDE_HOST,)
    assert h100.route([7, 8]).lanes == (BETWEEN_HOSTS,)


def test_a_ring_in_a_torus_uses_all_links_of_the_dims_that_it_spans():
    link = CHIPS["v5e"].link_rate.effective
    pod, part = cluster("v5e:16x16"), cluster("v5e:4x8")
    both = torus_links(0), torus_links(1)
    assert pod.route(range(256)) == (both, 4 * link, pytest.approx(17e-6))  # wraps around: both directions; 8 + 8 steps
    assert pod.route([15, 0], one_way=True).rate == link  # a permutation sends in one direction
    assert part.route(range(32)) == (both, 2 * link, pytest.approx(11e-6))  # a line in each dim; 3 + 7 steps
    row = [device for device in range(32) if part.coordinates(device)[0] == 0]
    assert len(row) == 8
    assert part.route(row)[:2] == ((torus_links(1),), link)
    cube, box = cluster("v5p:4x4x4"), cluster("v5p:2x2x4")
    link = CHIPS["v5p"].link_rate.effective
    assert cube.route(range(64)).rate == 6 * link
    assert box.route(range(16)).rate == 3 * link  # not a full cube: nothing wraps around


def test_chips_of_a_torus_are_numbered_in_the_order_of_their_coordinates():
    coordinates = [cluster("v5e:4x4").coordinates(device) for device in (0, 1, 2, 3, 4, 8)]
    assert coordinates == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (2, 0)]
    for target in ("v5e:4x8", "v5p:4x4x8", "v4:2x2x2"):
        found = cluster(target)
        assert len({found.coordinates(device) for device in range(found.num_devices)}) == found.num_devices


def test_between_slices_every_chip_sends_over_the_network():
    two = cluster("v5e:4x4*2")
    network = two.chip.network_rate.effective
    assert two.route(range(32))[:2] == ((BETWEEN_SLICES,), 16 * network)
    pods = cluster("v5e:16x16*2")
    assert (
        pods.route(range(512)).rate == pods.route(range(256)).rate < 256 * network
    )  # limited by the links within a slice
    assert two.route([0, 16])[:2] == ((BETWEEN_SLICES,), network)
    assert two.route(range(16, 32)).lanes == (torus_links(0), torus_links(1))


def test_a_group_outside_the_cluster_is_rejected():
    for group in [[], [8], [-1, 0]]:
        with pytest.raises(ValueError, match="outside h100:8"):
            cluster("h100:8").route(group)


def test_a_calibration_replaces_the_rates_that_it_measured(tmp_path):
    path = tmp_path / "h100.json"
    path.write_text(json.dumps({"device_kind": "NVIDIA H100 80GB HBM3", "flops": 600e12, "memory_rate": 2.9e12}))
    chip, known = cluster("h100:8", path).chip, CHIPS["h100"]
    assert chip.flops.effective == pytest.approx(600e12)
    assert chip.flops.peak == known.flops.peak
    assert chip.memory_rate.effective == pytest.approx(2.9e12)
    assert (chip.link_rate, chip.memory_bytes) == (known.link_rate, known.memory_bytes)
    assert (chip.host_rate, chip.duplex_share) == (known.host_rate, known.duplex_share)  # the file has neither
    measured = {"host_rate": 50e9, "duplex_share": 0.8}
    path.write_text(json.dumps(json.loads(path.read_text()) | measured))
    chip = cluster("h100:8", path).chip
    assert (chip.host_rate.effective, chip.duplex_share) == (pytest.approx(50e9), 0.8)
    with pytest.raises(ValueError, match=r"not measured on h200\n  got: .*H100.*\n  fix: "):
        cluster("h200:8", path)


def test_a_calibration_of_this_machine_is_only_for_this_machine(tmp_path):
    path = tmp_path / "folder" / "calibration.json"
    measured = hardware.calibrate(path, warm_s=0)
    assert json.loads(path.read_text()) == measured
    assert cluster("cpu:8", path).chip.flops.effective == pytest.approx(measured["flops"])
    assert "host_rate" not in measured  # the memory of the host is that of the device
    rates = hardware.host_rates(jax.devices()[0], 2**20)
    assert rates["host_rate"] > 0 and 0 < rates["duplex_share"] <= 1
    with pytest.raises(ValueError, match="not measured on a100"):
        hardware.cluster("a100:8", path)
