"""The chips of a mesh as a box of a torus, and the order of described chips."""

import functools
import types

import jax
import numpy as np
import pytest

import zerojax
from zerojax.sharding import tpu
from zerojax.sharding.tpu import (
    box_sizes,
    groups_along,
    have_sparse_cores,
    in_order_of_coordinates,
    ring_lengths,
)


def chips(*sizes, slices=1, cores=1, kind="TPU v5 lite"):
    """The chips of some slices, in the order of their coordinates."""
    return [
        types.SimpleNamespace(platform="tpu", coords=place, core_on_chip=core, slice_index=k, device_kind=kind)
        for k in range(slices)
        for place in map(tuple, np.argwhere(np.ones(sizes)).tolist())
        for core in range(cores)
    ]


def sizes_of(devices, shape=None, dim=0, sizes=box_sizes):
    """`sizes` of a mesh of this shape, along one of its dims."""
    array = np.empty(len(devices), object)
    array[:] = devices
    array = array.reshape(shape or (len(devices),))
    return sizes(np.moveaxis(array, dim, 0).reshape(array.shape[dim], -1))


def test_the_dims_of_a_box_are_found():
    assert sizes_of(chips(4, 4, 1)) == (4, 4)
    assert sizes_of(chips(4, 4, 2)) == (4, 4, 2)
    assert sizes_of(chips(1, 1, 1)) == ()
    assert sizes_of(chips(8, 1, 1)) == (8,)
    assert sizes_of(chips(2, 2, 1, cores=2)) == (2, 2, 2)  # the cores of a chip are a dim too


def test_the_dims_are_those_along_one_axis():
    assert sizes_of(chips(4, 4, 1), (2, 8), dim=1) == (2, 4)
    assert sizes_of(chips(4, 4, 1), (8, 2), dim=0) == (4, 2)  # every second chip of a line
    assert sizes_of(chips(4, 4, 1), (4, 4), dim=0) == (4,)
    assert sizes_of(chips(4, 4, 1, slices=2), (2, 16), dim=1) == (4, 4)


def test_the_last_dim_of_the_mesh_need_not_be_the_last_of_the_chips():
    by_column = sorted(chips(4, 2, 1), key=lambda chip: chip.coords[::-1])
    assert sizes_of(by_column) == (2, 4)


@pytest.mark.parametrize(
    "devices",
    [
        chips(4, 4, 1, slices=2),
        [chip for k in range(4) for chip in chips(4, 4, 1)[4 * k : 4 * k + 4][:: (-1) ** k]],  # a snake
        chips(4, 4, 1)[:-1],
        [*chips(4, 2, 1)[::2], *chips(4, 2, 1)[1::2]][::-1],
        [types.SimpleNamespace(platform="gpu")] * 4,
    ],
    ids=["slices", "snake", "a chip short", "reversed", "gpus"],
)
def test_other_orders_are_no_box(devices):
    assert sizes_of(devices) is None


def test_sparse_cores_run_collectives_over_all_dims_at_once():
    """In any order of the chips of one slice."""
    of = functools.partial(sizes_of, sizes=have_sparse_cores)
    for kind in "TPU v5", "TPU v6 lite":
        assert of(chips(4, 4, 2, kind=kind)) and of(chips(4, 4, 2, kind=kind)[::-1])
        assert of(chips(4, 4, 1, kind=kind), (2, 8), dim=1)
        assert not of(chips(4, 4, 1, slices=2, kind=kind)) and not of(chips(1, 1, 1, kind=kind))
        assert of(chips(4, 4, 1, slices=2, kind=kind), (2, 16), dim=1)
        assert sizes_of(chips(4, 4, 2, kind=kind), sizes=ring_lengths) == ()
    assert not of(chips(4, 4, 1)) and not of([types.SimpleNamespace(platform="gpu", device_kind="H100")] * 4)


def test_other_chips_reduce_around_rings():
    """Along the dims of a box, or around one ring if there are few in another order."""
    of = functools.partial(sizes_of, sizes=ring_lengths)
    assert of(chips(4, 4, 1)) == of(chips(4, 4, 1, slices=2), (2, 16), dim=1) == (4, 4)
    assert of(chips(4, 1, 1)) == (4,) and of(chips(4, 4, 1)[::-1]) == (16,)
    assert of(chips(8, 8, 1)[::-1]) == of(chips(1, 1, 1)) == of(chips(4, 4, 1, slices=2)) == ()
    assert of([types.SimpleNamespace(platform="gpu", device_kind="H100")] * 4) == ()


def test_the_groups_along_the_dims_meet_each_device_once():
    sizes = (2, 3, 4)
    for dim, size in enumerate(sizes):
        groups = groups_along(sizes, dim)
        assert sorted(k for group in groups for k in group) == list(range(24))
        places = [np.transpose(np.unravel_index(group, sizes)) for group in groups]
        assert all((place[:, dim] == range(size)).all() for place in places)
        assert all((np.delete(place, dim, 1) == np.delete(place[0], dim)).all() for place in places)


def test_a_mesh_of_all_devices_is_in_the_order_of_their_coordinates(monkeypatch):
    """JAX reports the chips of a slice host by host."""
    place = lambda device: (0, device.id % 2, device.id // 4, device.id // 2 % 2, 0)
    monkeypatch.setattr(tpu, "coordinates", place)
    monkeypatch.setattr("zerojax.sharding.mesh.coordinates", place)
    mesh = zerojax.make_mesh()
    assert [place(device) for device in mesh.devices] == sorted(map(place, jax.devices()))
    assert [device.id for device in mesh.devices] != list(range(8))
    assert zerojax.Zero(mesh).config.axes.torus == (2, 2, 2)
    assert zerojax.Zero(zerojax.make_mesh(model=2)).config.axes.torus == (2, 2)


def test_devices_without_coordinates_keep_their_order():
    devices = jax.devices()[::-1]
    assert in_order_of_coordinates(devices) == devices
    assert zerojax.Zero(zerojax.make_mesh()).config.axes.torus == ()
