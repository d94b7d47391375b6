"""Initialization: the same bits on every mesh and at every stage, and states that are created sharded."""

import functools

import jax
import numpy as np
import optax
import pytest
from support import plain, zoo
from support.parity import optimizer
from support.plain import numbers

import zerojax
from zerojax import Zero

MODELS = ("function", "weighted", "unused", "gpt_nnx_scan")
MESHES = {
    "one device": lambda: zerojax.make_mesh(devices=jax.devices()[:1]),
    "data 8": zerojax.make_mesh,
    "replica 2 x data 4": lambda: zerojax.make_mesh(replica=2),
}
PLACES = [("one device", 3), ("replica 2 x data 4", 3), *(("data 8", stage) for stage in range(4))]


@functools.cache
def expected(name):
    return plain.numbers(plain.functional(zoo.ZOO[name], seed=5)[:2])


@pytest.mark.parametrize(("mesh", "stage"), PLACES)
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.xdist_group(f"init-{name}")) for name in MODELS])
def test_values_do_not_depend_on_mesh_or_stage(name, mesh, stage, monkeypatch):
    """The values are those of the model created on one device.

    The test compiles with optimizations, as users do. Without them, the last bit of a normally distributed number
    differs between a loop over one element and a loop over several.
    """
    monkeypatch.setattr(jax, "jit", functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 1}))
    state = Zero(MESHES[mesh](), stage).init(zoo.ZOO[name].create, optimizer(), seed=5)
    got, want = numbers((state.params, state.model_state)), expected(name)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_values_depend_on_the_seed():
    model = zoo.ZOO["function"]
    zero = Zero(zerojax.make_mesh())
    one, same, two = (zero.init(model.create, optimizer(), seed=seed).params["decoder"]["w"] for seed in (1, 1, 2))
    assert np.array_equal(one, same) and not np.array_equal(one, two)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_state_is_created_sharded(precision):
    state = Zero(zerojax.make_mesh(), 3, precision).init(zoo.ZOO["unused"].create, optimizer())
    for tree in (state.params, state.opt_state[0].mu, *([state.master] if precision == "bf16" else [])):
        kernel = tree["unused"]["kernel"]
        assert {shard.data.shape for shard in kernel.addressable_shards} == {(2, 32)}
        assert len({shard.device for shard in kernel.addressable_shards}) == 8


def test_eval_init_has_the_shapes_dtypes_and_shardings_of_init():
    for stage in 0, 3:
        zero, model = Zero(zerojax.make_mesh(), stage, "fp16"), zoo.ZOO["unused"]
        avals, state = zero.eval_init(model.create, optimizer()), zero.init(model.create, optimizer())
        seen = lambda tree: [(a.shape, a.dtype, a.sharding) for a in jax.tree.leaves(tree)]
        assert seen(avals) == seen(state)


def test_create_model_without_arguments():
    """For parameters that exist already."""
    state = Zero(zerojax.make_mesh()).init(lambda: {"w": np.arange(16.0, dtype=np.float32)}, optax.sgd(0.1))
    np.testing.assert_array_equal(state.params["w"], np.arange(16.0))
    assert state.params["w"].sharding.shard_shape((16,)) == (2,)


def test_create_model_can_be_a_module_class():
    state = Zero(zerojax.make_mesh()).eval_init(zoo.UnusedMLP, optax.sgd(0.1))
    assert set(state.params) == {"body", "head", "unused"}


def test_state_model_is_the_first_argument_of_the_loss():
    zero = Zero(zerojax.make_mesh(), 3)
    module = zero.init(zoo.ZOO["unused"].create, optimizer()).model()
    assert isinstance(module, zoo.UnusedMLP)
    variables = zero.init(zoo.ZOO["resnet_linen"].create, optimizer()).model()
    assert set(variables) == {"params", "batch_stats"}
    assert set(zero.init(zoo.ZOO["function"].create, optimizer()).model()) == {"encoder", "decoder", "scale"}
