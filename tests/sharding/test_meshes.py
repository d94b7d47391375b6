"""Meshes: one device, hybrid sharding, a model axis, several shard axes, and abstract meshes for planning."""

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType
from support import zoo
from support.parity import assert_close, batches, loss_of, optimizer, reference, train
from support.walk import equations

import zerojax
from zerojax import Zero

COLLECTIVES = ("psum", "pmax", "pmin", "all_gather", "reduce_scatter", "all_to_all", "ppermute", "axis_index")
MODEL = zoo.ZOO["unused"]


def collectives(mesh, stage, k):
    """The names of the collective primitives in a traced step."""
    zero = Zero(mesh, stage)
    state = zero.eval_init(MODEL.create, optimizer())
    jaxpr = zero.train_step(loss_of(MODEL), num_microbatches=k).trace(state, MODEL.batch(0)).jaxpr
    names = {equation.primitive.name for equation in equations(jaxpr)}
    return {name for name in names if name.startswith(COLLECTIVES)}


@pytest.mark.parametrize("k", [4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_device_runs_no_collective(stage, k):
    assert collectives(zerojax.make_mesh(devices=jax.devices()[:1]), stage, k) == set()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_eight_devices_run_collectives(stage):
    """Shows that the test above would find collectives."""
    found = collectives(zerojax.make_mesh(), stage, 1)
    assert any(name.startswith("psum") for name in found)
    assert any(name.startswith("reduce_scatter") for name in found) == (stage >= 1)
    assert any(name.startswith("all_gather") for name in found) == (stage >= 1)


def test_one_device_parity():
    got, _ = train(Zero(zerojax.make_mesh(devices=jax.devices()[:1])), MODEL, batches(MODEL))
    assert_close(got, reference("unused"))


FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("stage", "k"), [(1, 1), (3, 4), *(pytest.param(*c, marks=FULL) for c in [(0, 1), (0, 4), (2, 1), (2, 4), (3, 1)])]
)
def test_hybrid_sharding_parity(stage, k):
    zero = Zero(zerojax.make_mesh(replica=2), stage)
    got, state = train(zero, MODEL, batches(MODEL), num_microbatches=k)
    assert_close(got, reference("unused", num_microbatches=k))
    kernel = state.params["unused"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == ((4, 32) if stage == 3 else (16, 32))  # over 4 of the 8 devices


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=FULL) for stage in (0, 1, 2)), 3])
def test_model_axis_parity(stage):
    got, _ = train(Zero(zerojax.make_mesh(model=2), stage), MODEL, batches(MODEL))
    assert_close(got, reference("unused"))


def test_two_shard_axes_parity():
    mesh = jax.make_mesh((2, 4), ("a", "b"), (AxisType.Auto, AxisType.Auto))
    got, state = train(Zero(mesh, shard_axes=("a", "b")), MODEL, batches(MODEL))
    assert_close(got, reference("unused"))
    kernel = state.params["unused"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (2, 32)


def test_make_mesh_leaves_out_axes_of_size_one():
    assert dict(zerojax.make_mesh().shape) == {"data": 8}
    assert dict(zerojax.make_mesh(replica=2).shape) == {"replica": 2, "data": 4}
    assert dict(zerojax.make_mesh(replica=2, model=2).shape) == {"replica": 2, "data": 2, "model": 2}
    assert set(zerojax.make_mesh(replica=2, model=2).axis_types) == {AxisType.Auto}


def test_make_mesh_refuses_sizes_that_do_not_divide():
    for sizes in [{"replica": 3}, {"model": 5}, {"replica": 0}, {"model": 16}, {"devices": 0}]:
        with pytest.raises(ValueError, match=r"make_mesh: \d devices do not divide") as error:
            zerojax.make_mesh(**sizes)
        assert "fix:" in str(error.value)


@pytest.mark.parametrize("stage", [0, 3])
def test_an_abstract_mesh_can_be_planned_with(stage):
    mesh = zerojax.make_mesh(devices=16)
    assert isinstance(mesh, AbstractMesh)
    zero = Zero(mesh, stage)
    state = zero.eval_init(MODEL.create, optimizer())
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state))
    kernel = state.opt_state[0].mu["unused"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == ((1, 32) if stage else (16, 32))
    explanation = zero.explain(state)
    sharded = next(row for row in explanation.rows if row.category == "params" and row.path == "unused/kernel")
    assert sharded.bytes_per_device == 16 * 32 * 4 // (16 if stage == 3 else 1)
    assert "unused/kernel" in str(explanation)


def test_simulate_devices_refuses_another_number_once_jax_runs():
    with pytest.raises(RuntimeError, match="already started, with 8 devices"):
        zerojax.simulate_devices(4)
