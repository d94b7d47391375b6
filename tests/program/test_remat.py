"""Rematerialization: training is the same for every setting, and only what the setting does not save is recomputed."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback
from support import traffic, zoo
from support.parity import batches, train
from support.plain import numbers
from support.walk import equations

import zerojax
from zerojax import Remat, Zero, zero as zero_module
from zerojax.program.remat import auto_setting

WIDTH, LAYERS = 16, 3
NAMED = Remat(save=("up",), offload=("down",))
OFFLOAD_DOWN = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=["up"],
    names_which_can_be_offloaded=["down"],
    offload_src="device",
    offload_dst="pinned_host",
)


def create(key):
    keys = jax.random.split(key, 2 * LAYERS)
    layer = lambda i: {
        "up": jax.random.normal(keys[2 * i], (WIDTH, 32)) / 4,
        "down": jax.random.normal(keys[2 * i + 1], (32, WIDTH)) / 4,
    }
    return {"layers": {str(i): layer(i) for i in range(LAYERS)}}


def create_stacked(key):
    layers = create(key)["layers"]
    return {"layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers.values())}


def block(x, layer):
    hidden = jnp.tanh(checkpoint_name(x @ layer["up"], "up"))
    return x + jnp.sin(checkpoint_name(hidden @ layer["down"], "down"))


def loss(params, batch):
    x = batch["x"]
    for layer in params["layers"].values():
        x = block(x, layer)
    return jnp.mean((x - batch["y"]) ** 2)


def stacked_loss(params, batch):
    x, _ = jax.lax.scan(lambda x, layer: (block(x, layer), None), batch["x"], params["layers"])
    return jnp.mean((x - batch["y"]) ** 2)


MODELS = {"unrolled": (create, loss), "scanned": (create_stacked, stacked_loss)}


def make_batch():
    x = np.random.default_rng(0).standard_normal((2, 32, WIDTH), dtype=np.float32)
    return {"x": x[0], "y": x[1]}


def count(jaxpr, name):
    return sum(equation.primitive.name == name for equation in equations(jaxpr))


def traced(remat, model="unrolled", stage=3, mesh=None):
    create, loss = MODELS[model]
    zero = Zero(mesh or zerojax.make_mesh(), stage, stacked=("layers/*",) if model == "scanned" else ())
    state = zero.eval_init(create, optax.sgd(0.1))
    prefetch = 0 if model == "scanned" else 1  # so that the body of a loop is one layer
    return zero.train_step(loss, remat=remat, prefetch=prefetch).trace(state, make_batch()).jaxpr


# A layer has two products in the forward pass and four in the backward pass. The batch needs no gradient. The last
# layer shares its unit with the loss, so its backward pass follows immediately: it is not recomputed with `Remat()`,
# but it is with names or a policy.
DOTS = 6 * LAYERS - 1
PER_LAYER = {"dot_general": 2, "tanh": 1, "sin": 1}
UNROLLED = {
    "none": (DOTS, LAYERS, LAYERS),
    "full": (DOTS + 2 * (LAYERS - 1), 2 * LAYERS - 1, LAYERS),
    "dots": (DOTS, 2 * LAYERS, LAYERS + 1),
    "named": (DOTS, 2 * LAYERS, LAYERS + 1),
    "first layer": (DOTS + 2, LAYERS + 1, LAYERS),
}
SCANNED = {"none": (6, 1, 1), "full": (8, 2, 1), "dots": (6, 2, 1), "named": (6, 2, 1)}  # in the loops' bodies
SETTINGS = {
    "none": "none",
    "full": Remat(),
    "dots": jax.checkpoint_policies.dots_saveable,
    "named": NAMED,
    "first layer": {"layers/0": "full"},
}


@pytest.mark.parametrize(("setting", "stage"), [*((setting, 3) for setting in UNROLLED), ("full", 0), ("dots", 2)])
def test_only_what_is_not_saved_is_recomputed(setting, stage):
    jaxpr = traced(SETTINGS[setting], "unrolled", stage)
    assert tuple(count(jaxpr, name) for name in PER_LAYER) == UNROLLED[setting]


@pytest.mark.parametrize("setting", SCANNED)
def test_only_what_is_not_saved_is_recomputed_in_a_loop(setting):
    jaxpr = traced(SETTINGS[setting], "scanned")
    assert tuple(count(jaxpr, name) for name in PER_LAYER) == SCANNED[setting]


@pytest.mark.parametrize(
    ("model", "remat", "times"),
    [
        ("unrolled", NAMED, LAYERS),
        ("unrolled", Remat(policy=OFFLOAD_DOWN), LAYERS),
        (
            "unrolled",
            Remat(offload_inputs=True),
            LAYERS - 2,
        ),  # that of the first layer is the batch, that of the last is not saved
        ("scanned", NAMED, 1),
        ("scanned", Remat(offload_inputs=True), 1),
    ],
)
def test_an_offloaded_value_is_copied_to_the_host_and_back(model, remat, times):
    """Once in each direction for each layer. Apart from scalars, which are events, nothing else is copied."""
    moved = [e for e in equations(traced(remat, model)) if e.primitive.name == "device_put" and e.invars[0].aval.ndim]
    spaces = [str(space) for e in moved for space in e.params["devices"]]
    assert {v.aval.shape for e in moved for v in e.invars} == {(32 // 8, WIDTH)}
    assert sorted(spaces) == sorted([str(jax.memory.Space.Device), str(jax.memory.Space.Host)] * times)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(("model", "times"), [("unrolled", LAYERS - 2), ("scanned", LAYERS)])
def test_partitioned_inputs_are_gathered_once(model, times, offload):
    """They are gathered in the backward pass, over the model axis, over which nothing else is communicated.

    The input of the first unrolled layer is the batch, and the backward pass of the last follows immediately. If inputs
    are offloaded too, only slices are copied to the host.
    """
    remat = Remat(partition_inputs=True, offload_inputs=offload)
    jaxpr = traced(remat, model, mesh=zerojax.make_mesh(model=2))
    found = [c for c in traffic.collectives_of(jaxpr.jaxpr, {"data": 4, "model": 2}) if c.num_devices == 2]
    assert {(c.kind, c.shape) for c in found} == {("all_gather", (32 // 4, WIDTH))}
    assert sum(c.count for c in found) == times
    slices = [e for e in equations(jaxpr) if e.primitive.name == "dynamic_slice" and WIDTH in e.outvars[0].aval.shape]
    assert (32 // 4 // 2, WIDTH) in {e.outvars[0].aval.shape for e in slices}


def test_nothing_is_partitioned_over_an_axis_of_size_1():
    mesh = zerojax.make_mesh(model=1)
    want, got = (traced(Remat(partition_inputs=flag), mesh=mesh) for flag in (False, True))
    names = lambda jaxpr: [e.primitive.name for e in equations(jaxpr)]
    assert names(got) == names(want)


# Parity


@pytest.mark.parametrize("model", MODELS)
def test_named_and_offloaded_values_do_not_change_the_training(model):
    create, loss = MODELS[model]
    zero = Zero(zerojax.make_mesh(), 3, stacked=("layers/*",) if model == "scanned" else ())
    results = []
    for remat in "none", NAMED:
        step = zero.train_step(loss, remat=remat)
        state, _ = step(zero.init(create, optax.sgd(0.1)), make_batch())
        results.append([np.asarray(leaf) for leaf in jax.tree.leaves(state.params)])
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def test_recomputation_drops_the_same_activations():
    model, zero = zoo.ZOO["dropout_nnx"], Zero(zerojax.make_mesh(), 3)
    runs = [train(zero, model, batches(model, 3), remat=remat)[0] for remat in ("none", "full")]
    np.testing.assert_allclose(runs[1].losses, runs[0].losses, rtol=1e-6)


def test_value_and_grad_is_the_same_with_recomputation():
    zero = Zero(zerojax.make_mesh(), 3)
    params, batch = zero.shard(jax.jit(create)(jax.random.key(0))), zero.shard_batch(make_batch())
    want, got = (jax.jit(zero.value_and_grad(loss, remat=remat))(params, batch) for remat in ("none", "full"))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


# Errors


def message(remat, model="unrolled"):
    with pytest.raises(ValueError, match="remat: ") as error:
        traced(remat, model)
    return str(error.value)


def test_an_unknown_setting():
    assert "unknown setting None" in message(None)
    text = message("some")
    assert "unknown setting 'some'" in text and "none, full, dots" in text


def test_a_pattern_that_applies_to_no_unit():
    text = message({"layer/*": "full"})
    assert "pattern 'layer/*' applies to no unit" in text and "units layers/0, layers/1, layers/2" in text
    text = message({"layers/*": "full", "layers/0": "dots"})  # the first pattern matches this unit too
    assert "pattern 'layers/0' applies to no unit" in text


@pytest.mark.parametrize("model", MODELS)
def test_a_name_that_no_value_carries(model):
    text = message(Remat(save=("up",), offload=("attention",)), model)
    assert "no value in the units of '*' is named 'attention'" in text
    assert "names down, up" in text and "checkpoint_name(x, 'attention')" in text


def test_a_name_that_only_other_units_carry():
    def only_last(params, batch):
        return loss(params, batch) + jnp.sum(checkpoint_name(params["layers"]["2"]["up"].sum() * batch["x"], "late"))

    zero = Zero(zerojax.make_mesh(), 3)
    state = zero.eval_init(create, optax.sgd(0.1))
    remat = {"layers/0": Remat(save=("late",)), "*": "none"}
    with pytest.raises(ValueError, match="no value in the units of 'layers/0' is named 'late'"):
        zero.train_step(only_last, remat=remat).trace(state, make_batch())


def test_a_name_that_only_a_weight_carries():
    """Full weights are never saved."""
    named = lambda params, batch: jnp.mean(batch["x"] @ checkpoint_name(jnp.sin(params["w"]), "weight"))
    zero = Zero(zerojax.make_mesh(), 3)
    state = zero.eval_init(lambda: {"w": jnp.ones((WIDTH, 8))}, optax.sgd(0.1))
    with pytest.raises(ValueError, match="is named 'weight'"):
        zero.train_step(named, remat=Remat(save=("weight",))).trace(state, make_batch())


def test_a_string_instead_of_names():
    with pytest.raises(ValueError, match="`offload` is 'up'\n  fix:      a tuple of names"):
        Remat(offload="up")


def test_a_name_in_both_places():
    with pytest.raises(ValueError, match="'up' is both in `save` and in `offload`"):
        Remat(save=("up",), offload=("up",))


def test_inputs_cannot_be_partitioned_without_a_model_axis():
    with pytest.raises(ValueError, match="inputs of 'layers/1' cannot be partitioned") as error:
        traced({"layers/1": Remat(partition_inputs=True), "*": "full"})
    assert "a mesh with data axes only" in str(error.value) and "make_mesh(model=...)" in str(error.value)


def test_an_input_that_the_axis_does_not_divide():
    zero = Zero(zerojax.make_mesh(model=2))
    params = {"layers": {str(i): jnp.ones((15, 15)) for i in range(3)}}
    layers = lambda params: params["layers"].values()
    loss = lambda params, x: jnp.sum(functools.reduce(lambda x, w: jnp.tanh(x @ w), layers(params), x))
    fn = zero.value_and_grad(loss, remat=Remat(partition_inputs=True))
    with pytest.raises(ValueError, match="cannot be partitioned over model") as error:
        jax.eval_shape(fn, params, jnp.ones((4, 15)))
    assert "shape (1, 15) on each device along the data axes, axis size 2" in str(error.value)


@pytest.mark.parametrize(("stage", "remat"), [(1, "full"), (2, "none"), (3, "dots")])
def test_callbacks_run_once(stage, remat):
    """What one returns is saved for the backward pass. A second call would give another value, and be seen."""
    calls = []

    def measured():
        calls.append(None)
        return np.float32(2 if len(calls) <= LAYERS * jax.device_count() else 100)

    def scaled_loss(params, batch):
        x = batch["x"]
        for layer in params["layers"].values():
            x = block(x, layer) * io_callback(measured, jax.ShapeDtypeStruct((), np.float32))
        return jnp.mean((x - batch["y"]) ** 2)

    zero = Zero(zerojax.make_mesh(), stage=stage)
    state, batch = zero.init(create, optax.sgd(1.0)), make_batch()
    params = jax.device_get(state.model())
    after, _ = zero.train_step(scaled_loss, remat=remat)(state, batch)
    jax.block_until_ready(after)
    assert len(calls) == LAYERS * jax.device_count()
    calls.clear()
    grads = jax.grad(scaled_loss)(params, batch)
    for new, old, grad in zip(numbers(after.params), numbers(params), numbers(grads), strict=True):
        np.testing.assert_allclose(old - new, grad, rtol=1e-4, atol=1e-5)


def test_dots_computes_nothing_again_that_takes_long():
    """Loops, sorts and gathers run as often as with 'none', and more often with JAX's policy for products."""

    def loss(params, batch):
        x, order = batch["x"], jnp.argsort(batch["y"][:, 0])
        for layer in params["layers"].values():
            x, _ = jax.lax.scan(lambda x, _: (jnp.cos(x * 0.9), None), jnp.tanh(x @ layer["up"]), length=4)
            x = jnp.sort(jnp.sin(x[order]), axis=-1) @ layer["down"]
        return jnp.mean(x**2)

    zero = Zero(zerojax.make_mesh(), 3)
    state = zero.eval_init(create, optax.sgd(0.1))

    def counts(remat):
        jaxpr = zero.train_step(loss, remat=remat).trace(state, make_batch()).jaxpr
        return [count(jaxpr, name) for name in ("dot_general", "scan", "sort", "gather")]

    assert counts("dots") == counts("none") != counts(jax.checkpoint_policies.dots_saveable)


def test_auto_recomputes_on_accelerators_only(monkeypatch):
    """A step says which setting it stands for."""
    step = lambda: Zero(zerojax.make_mesh(), 3).train_step(loss, remat={"layers/0": "full", "*": "auto"})
    assert Zero(zerojax.make_mesh(devices=8), 3).train_step(loss).settings.remat.title == "'none'"
    assert "remat={'layers/0': 'full', '*': 'none'}" in repr(step())
    on_gpus = SimpleNamespace(devices=np.array([SimpleNamespace(platform="gpu")]))
    monkeypatch.setattr(zero_module, "auto_setting", lambda mesh: auto_setting(on_gpus))
    assert "remat={'layers/0': 'full', '*': 'dots'}" in repr(step())
    zero = Zero(zerojax.make_mesh(), 3)
    state = zero.eval_init(create, optax.sgd(0.1))
    assert "; remat='dots'" in str(zero.explain(state, zero.train_step(loss), make_batch()))
