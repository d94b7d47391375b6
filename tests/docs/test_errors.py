"""Errors of the configuration, the batch, the model and the loss: each says what failed, where, and how to fix it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

import zerojax
from zerojax import Weighted, Zero
from zerojax.step import batch as batches
from zerojax.utils import versions

X = np.ones((32, 16), np.float32)


def create():
    return {"layers": {"w": jnp.ones((16, 12)), "b": jnp.ones(3)}, "head": jnp.ones((12, 8))}


def loss(params, batch):
    return jnp.mean(batch["x"] @ params["layers"]["w"] @ params["head"])


def mesh():
    return zerojax.make_mesh()


def step(loss_fn=loss, batch=None, stage=3, create_model=create, **options):
    """Traces a step. Every error here is raised before anything is compiled."""
    zero = Zero(mesh(), stage)
    state = zero.eval_init(create_model, optax.sgd(0.1))
    return zero.train_step(loss_fn, **options).trace(state, {"x": X} if batch is None else batch)


def message(kind, call, *args, **kwargs):
    """The text of the error that a call raises."""
    with pytest.raises(kind) as error:
        call(*args, **kwargs)
    return str(error.value)


def test_the_unmodified_step_raises_no_error():
    step()


def test_a_batch_may_hold_numbers_64_bit_arrays_and_keys():
    """JAX accepts all of them."""
    step(batch={"x": X, "scale": 0.5, "rows": np.arange(len(X)), "key": jax.random.key(0)})


# The batch


def test_rows_that_the_devices_do_not_divide():
    text = message(ValueError, step, batch={"x": X[:12]})
    assert "batch: 'x'" in text and "(12, 16); 12 % (8 x 1) = 4" in text
    assert "fix:      pass 8 or 16 rows, or another multiple of 8; or" in text and "pad_batch(batch, 16)" in text


def test_rows_that_the_microbatches_do_not_divide():
    text = message(ValueError, step, batch={"x": X[:8], "y": X[:8]}, num_microbatches=4)
    assert "batch: 'x'" in text and "8 % (8 x 4) = 8" in text
    assert "fix:      pass 32 rows, or another multiple of 32; or change num_microbatches" in text


def test_rows_of_several_processes_that_the_devices_do_not_divide(monkeypatch):
    """Each process passes its own rows of a batch; the numbers of the error are those of all, and then of each."""
    zero = Zero(mesh())
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    text = message(ValueError, batches.check_batch, zero.config, {"x": X[:22]}, 2)
    assert "got:      shape (44, 16) over 2 processes; 44 % (8 x 2) = 12" in text
    assert "fix:      pass 32 or 48 rows over all processes, 16 or 24 in each, or another multiple of 16;" in text
    assert len(zero.pad_batch({"x": X[:22]}, 24)[1]) == 24 and "zero.pad_batch(batch, 24)" in text
    batches.check_batch(zero.config, {"x": X[:24]}, 2)
    text = message(ValueError, batches.check_batch, zero.config, {"x": X[:0]}, 2)
    assert "pass 16 rows over all processes, 8 in each, or another multiple of 16" in text


def test_rows_that_the_processes_do_not_divide(monkeypatch):
    """Three processes with devices that differ in number: rows that both divide fit."""
    zero = Zero(zerojax.make_mesh(devices=jax.devices()[:4]))
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    text = message(ValueError, batches.check_batch, zero.config, {"x": X[:5]}, 1)
    assert "fix:      pass 12 or 24 rows over all processes, 4 or 8 in each, or another multiple of 12;" in text


def test_rows_that_the_replicas_do_not_divide():
    zero = Zero(zerojax.make_mesh(replica=2))
    state = zero.eval_init(create, optax.sgd(0.1))
    text = message(ValueError, zero.train_step(loss).trace, state, {"x": X[:12]})
    assert "12 % (8 x 1) = 4" in text


def test_a_batch_without_rows():
    for batch in [{}, {"x": np.float32(1)}]:
        assert "no array with rows" in message(ValueError, step, batch=batch)


def test_a_running_step_checks_its_batch_too():
    zero = Zero(mesh())
    state = zero.init(create, optax.sgd(0.1))
    assert "(12, 16)" in message(ValueError, zero.train_step(loss), state, {"x": X[:12]})
    assert "(12, 16)" in message(ValueError, zero.eval_step(loss), state, {"x": X[:12]})


def test_an_invalid_number_of_microbatches():
    for count in [0, -1]:
        text = message(ValueError, Zero(mesh()).train_step, loss, num_microbatches=count)
        assert f"num_microbatches is {count}" in text and "at least 1" in text


def test_a_bucket_that_does_not_hold_an_element_of_every_shard():
    for size in [0, -1, 63, 1e6, True, "32M"]:
        zero = Zero(mesh())
        for make in zero.train_step, zero.eval_step, zero.value_and_grad:
            text = message(ValueError, make, loss, bucket_bytes=size)
            assert f"bucket_bytes is {size!r}" in text and "8 shards" in text and "at least 64" in text
        zero.train_step(loss, bucket_bytes=64)


# Stage and mesh


def test_unknown_stage():
    for stage in [4, -1, "3", True, None]:
        text = message(ValueError, Zero, mesh(), stage)
        assert f"stage: {stage!r}" in text and "one of 0, 1, 2, 3" in text


def test_unknown_axis():
    for options in {"shard_axes": ("fsdp",)}, {"replica_axes": ("fsdp",)}:
        text = message(ValueError, Zero, mesh(), **options)
        assert "no axis 'fsdp'" in text and "{'data': 8}" in text and "shard_axes" in text


def test_explicit_axis():
    explicit = jax.make_mesh((8,), ("data",), (AxisType.Explicit,))
    text = message(ValueError, Zero, explicit)
    assert "axis 'data'" in text and "Explicit" in text and "zerojax.make_mesh()" in text and "AxisType.Auto" in text


def test_axes_that_are_not_distinct():
    for options in [{"shard_axes": ()}, {"shard_axes": ("data", "data")}, {"replica_axes": ("data",)}]:
        assert "name an axis twice" in message(ValueError, Zero, mesh(), **options)


# Patterns and dims


def test_a_pattern_that_matches_nothing():
    for option in ["shard_dims", "stacked", "frozen", "units"]:
        value = {"layer/*": 0} if option == "shard_dims" else ("layer/*",)
        text = message(ValueError, Zero(mesh(), **{option: value}).eval_init, create, optax.sgd(0.1))
        assert f"{option}: pattern 'layer/*' matches no parameter" in text
        assert "head, layers/b, layers/w" in text and "fix:" in text


def test_a_dim_that_cannot_be_sharded():
    for path, dim in [("layers/b", 1), ("layers/w", 2), ("layers/w", -3)]:
        text = message(ValueError, Zero(mesh(), shard_dims={path: dim}).eval_init, create, optax.sgd(0.1))
        shape = create()["layers"][path[-1]].shape
        assert f"cannot shard '{path}' over data" in text and f"shape {shape}, axis size 8" in text and "fix:" in text
        assert "there is no dim" in text


def test_a_dim_that_does_not_divide_cannot_be_sharded_without_zeros():
    """`value_and_grad` has the shapes of the user's arrays."""
    zero = Zero(mesh(), shard_dims={"w": 0})
    text = message(ValueError, zero.shard, {"w": jnp.ones((7, 8))})
    assert "cannot shard 'w' over data in dim 0" in text and "7 % 8 = 7" in text


@pytest.mark.parametrize(
    ("layer_dim", "shapes", "fix"),
    [
        (0, {"up": (32, 16, 24), "down": (32, 24, 16)}, "stacked=('blocks/*',)"),
        (1, {"up": (15, 32, 20), "down": (20, 32, 15)}, "shard_dims={'blocks/up': 0, 'blocks/down': 2}"),
    ],
)
def test_leaves_that_are_scanned_over_their_sharded_dim_are_all_named(layer_dim, shapes, fix):
    """The options in the text are the fix."""

    def scanned(params, batch):
        body = lambda x, w: (jnp.tanh(x @ w["up"]) @ w["down"], None)
        layers = jax.tree.map(lambda a: jnp.moveaxis(a, layer_dim, 0), params["blocks"])
        return jnp.mean(jax.lax.scan(body, batch["x"] @ params["first"], layers)[0])

    width = shapes["up"][1 - layer_dim]
    model = lambda: {"blocks": {k: jnp.ones(s) for k, s in shapes.items()}, "first": jnp.ones((16, width))}
    text = message(ValueError, step, scanned, create_model=model)
    assert "2 of the 2 leaves" in text and all(f"'blocks/{name}' {shape}" in text for name, shape in shapes.items())
    assert f"over dim {layer_dim}" in text and f"Zero(..., {fix})" in text
    zero = Zero(mesh(), **eval(f"dict({fix})"))
    zero.train_step(scanned).trace(zero.eval_init(model, optax.sgd(0.1)), {"x": X})


# What create_model returns


@pytest.mark.parametrize("tree", [{}, {"params": {}}, {"a": {}, "b": []}])
def test_an_empty_tree(tree):
    text = message(ValueError, Zero(mesh()).eval_init, lambda: tree, optax.sgd(0.1))
    assert "parameter tree is empty" in text and "fix:" in text


class Empty(nnx.Module):
    def __init__(self, rngs):
        self.width = 16


def test_a_module_without_parameters():
    assert "parameter tree is empty" in message(
        ValueError, Zero(mesh()).eval_init, lambda rngs: Empty(rngs), optax.sgd(0.1)
    )


@pytest.mark.parametrize("leaf", ["relu", object()])
def test_a_leaf_that_is_no_array(leaf):
    """Passed to `shard`, or returned by `create_model`."""
    tree = {"layer": {"w": jnp.ones((16, 8)), "activation": leaf}}
    for call in lambda: Zero(mesh()).shard(tree), lambda: Zero(mesh()).eval_init(lambda: tree, optax.sgd(0.1)):
        text = message(ValueError, call)
        assert "'layer/activation' is not an array" in text and type(leaf).__name__ in text


def test_leaves_whose_paths_are_the_same_once_their_keys_are_joined():
    tree = {"a/b": {"c": jnp.ones((16, 8))}, "a": {"b/c": jnp.ones((8, 8))}}
    for model in lambda: tree, {"params": create(), "statistics": tree}:
        text = message(ValueError, Zero(mesh()).eval_init, model, optax.sgd(0.1))
        assert "two leaves have the path" in text and "a/b/c'" in text
        assert "['a']['b/c'] and" in text and "['a/b']['c']\n  fix:      rename one" in text


def test_an_optimizer_state_of_another_model():
    zero = Zero(mesh())
    state = zero.eval_init(create, optax.adam(0.1))
    other = zero.eval_init(lambda: create() | {"head": jnp.ones((12, 16))}, optax.adam(0.1))
    mixed = dataclasses.replace(state, opt_state=other.opt_state)
    text = message(ValueError, zero.train_step(loss).trace, mixed, {"x": X})
    assert "does not match the model and the optimizer" in text
    assert "0/mu/head" in text and "(12, 16)" in text and "(12, 8)" in text


def test_an_optimizer_state_of_another_optimizer():
    zero = Zero(mesh())
    state = zero.eval_init(create, optax.adam(0.1))
    mixed = dataclasses.replace(state, opt_state=zero.eval_init(create, optax.sgd(0.1)).opt_state)
    text = message(ValueError, zero.train_step(loss).trace, mixed, {"x": X})
    assert "missing" in text and "zero.init" in text


# What the loss returns


@pytest.mark.parametrize("stage", [3])
@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda value, params: jnp.full(8, value), ["the loss is not a scalar", "shape (8,)", "jnp.mean"]),
        (lambda value, params: jnp.int32(value), ["dtype int32 cannot be differentiated", "floating"]),
        (lambda value, params: (value, value, value), ["returns 3 values", "(loss, dict of metrics)"]),
        (lambda value, params: (value, value), ["the second output is not a dict", "dict of scalar metrics"]),
        (
            lambda value, params: (value, {"logits": jnp.ones((4, 8))}),
            ["'logits' is not a scalar", "shape (4, 8)"],
        ),
        (lambda value, params: Weighted(jnp.full(8, value), 1), ["the loss is not a scalar", "shape (8,)"]),
        (lambda value, params: Weighted(value, jnp.ones(8)), ["the loss is not a scalar", "shape (8,)"]),
    ],
    ids=["vector", "integer", "triple", "no_dict", "metric", "weighted_sum", "weight"],
)
def test_a_loss_that_returns_something_invalid(change, parts, stage):
    text = message(ValueError, step, lambda params, batch: change(loss(params, batch), params), stage=stage)
    assert text.startswith("loss: ") and "fix:" in text
    assert all(part in text for part in parts), text


def test_a_loss_that_returns_a_parameter():
    scale = lambda: create() | {"scale": jnp.ones(())}
    returning = lambda params, batch: (params["scale"] * loss(params, batch), {"scale": params["scale"]})
    text = message(ValueError, step, returning, create_model=scale)
    assert "returns a parameter itself" in text and "fix:" in text


class Growing(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(16, 8, rngs=rngs)


def test_a_loss_that_adds_variables():
    def growing(model, batch):
        model.calls = nnx.Variable(jnp.zeros(()))
        return jnp.mean(model.linear(batch["x"]))

    text = message(ValueError, step, growing, create_model=lambda rngs: Growing(rngs))
    assert "adds or removes variables" in text and "calls" in text


# Versions


def test_unsupported_versions():
    for installed in [{"jax": "0.10.1"}, {"jax": "0.13.0"}, {"flax": "0.11.2"}, {"flax": "1.0"}]:
        ((package, version),) = installed.items()
        text = message(ImportError, versions.check, installed)
        assert f"{package} {version} is not supported" in text and f"pip install '{package}>=" in text


def test_supported_versions():
    versions.check()
    versions.check({"jax": "0.12.0", "flax": "0.12.8"})


def test_memory_that_is_exhausted_raises_a_table_of_terms():
    """JAX's error is planted, because simulated devices share the memory of the host."""
    zero = zerojax.Zero(zerojax.make_mesh(), 2, "bf16")
    state = zero.init(lambda key: {"w": jax.random.normal(key, (64, 64))}, optax.adam(1e-3))
    step = zero.train_step(lambda params, batch: jnp.mean((batch["x"] @ params["w"]) ** 2), num_microbatches=2)
    batch = {"x": np.ones((32, 64), np.float32)}
    state, _ = step(state, batch)
    (jitted,) = step._jitted.values()
    planted = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 6442450944 bytes."

    class Failing:
        trace = jitted.trace

        def __call__(self, *args):
            raise jax.errors.JaxRuntimeError(planted)

    step._jitted = dict.fromkeys(step._jitted, Failing())
    with pytest.raises(MemoryError) as error:
        step(state, batch)
    text = str(error.value)
    assert text.startswith("step: out of device memory\n  got:      RESOURCE_EXHAUSTED: Out of memory while")
    assert "estimate: at stage 2 on 8 shards" in text
    for name in ("parameters", "optimizer state", "gradients", "sum"):
        assert f"    {name} " in text
    assert (
        "2 x 4.096k" in text
        and "fix:      try stage=3; remat='dots', then remat='full'" in text
        and "num_microbatches=4" in text
    )
    planted = "RESOURCE_EXHAUSTED: Out of host memory while trying to allocate 6442450944 bytes."
    with pytest.raises(MemoryError, match="step: out of pinned host memory") as error:
        step(state, batch)
    assert "raise XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB" in str(error.value)
    planted = "INTERNAL: something else"
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        step(state, batch)
