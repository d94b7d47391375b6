"""Models whose annotations name axes of another mesh train on meshes that have these axes, and on those that do not."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import zerojax
from zerojax import Zero
from zoo import entries

pytestmark = pytest.mark.zoo
NAME = "tunix-qwen3-experts"  # 4 experts, whose dim is annotated with the data axis


def mesh_of_tunix(fsdp, tp):
    return jax.make_mesh((fsdp, tp), ("fsdp", "tp"), axis_types=(AxisType.Auto, AxisType.Auto))


def first_loss(zero):
    entry = entries.installed()[NAME]
    state = zero.init(entry.create, optax.sgd(0.1))
    _, metrics = zero.train_step(entry.loss)(state, entry.batch(0))
    return float(metrics["loss"]), {leaf.path: leaf for leaf in state.layout.leaves}


def test_all_ways_to_read_the_annotations_compute_the_same():
    dropped, leaves = first_loss(Zero(zerojax.make_mesh(), axis_names={"fsdp": None, "tp": None}))
    assert {leaf.reason for leaf in leaves.values()} == {"first divisible dim", "width of a table"}
    mapped, mapped_leaves = first_loss(Zero(zerojax.make_mesh(model=2), axis_names={"fsdp": "data", "tp": "model"}))
    theirs, their_leaves = first_loss(Zero(mesh_of_tunix(4, 2), shard_axes=("fsdp",)))
    np.testing.assert_allclose([mapped, theirs], dropped, rtol=1e-6)
    dims = lambda leaves: {path: leaf.dim for path, leaf in leaves.items()}
    assert dims(mapped_leaves) == dims(their_leaves)
    assert mapped_leaves["layers/0/attn/q_proj/w"].model_spec == jax.sharding.PartitionSpec(None, "model")


def test_experts_that_do_not_divide_are_sharded_in_another_dim():
    _, leaves = first_loss(Zero(mesh_of_tunix(8, 1), shard_axes=("fsdp",)))
    experts = [leaf for leaf in leaves.values() if leaf.shape[0] == 4 and len(leaf.shape) == 3]
    assert len(experts) == 6
    for leaf in experts:
        assert leaf.dim == 1
        assert leaf.reason == "first divisible dim; annotated dim 0 cannot be: 4 % 8 = 4"


def test_the_error_names_the_calls_that_work():
    with pytest.raises(ValueError, match="names axis 'tp': no such axis") as error:
        first_loss(Zero(zerojax.make_mesh()))
    assert "Zero(mesh, axis_names={'tp': None, 'fsdp': 'data'})" in str(error.value)
    assert "Zero(mesh, shard_axes=('fsdp',))" in str(error.value)
