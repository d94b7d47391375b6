"""Initialization: the same bits on every mesh and at every stage, and states that are created sharded."""

import functools
import inspect
import subprocess
import sys
import textwrap

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from flax.linen import fp8_ops
from support import plain, zoo
from support.parity import optimizer
from support.plain import numbers

import zerojax
from zerojax import Zero

MODELS = ("weighted", "gpt_nnx_scan")
MESHES = {
    "one device": lambda: zerojax.make_mesh(devices=jax.devices()[:1]),
    "data 8": zerojax.make_mesh,
    "replica 2 x data 4": lambda: zerojax.make_mesh(replica=2),
}
PLACES = [("one device", 3), ("replica 2 x data 4", 3), ("data 8", 1), ("data 8", 3)]


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
    logical = state.layout.logical(state.params)  # without the zeros that pad shards
    got, want = numbers((logical, state.model_state)), expected(name)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_values_depend_on_the_seed():
    model = zoo.ZOO["function"]
    zero = Zero(zerojax.make_mesh())
    one, same, two = (zero.init(model.create, optimizer(), seed=seed).params["decoder"]["w"] for seed in (1, 1, 2))
    assert np.array_equal(one, same) and not np.array_equal(one, two)


@pytest.mark.parametrize("precision", ["bf16"])
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


# What `init` takes


class Tiny(nnx.Module):
    def __init__(self, width=8, *, rngs):
        self.layer, self.norm = nnx.Linear(width, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.layer(x))


class HuggingFace:
    """What `init` needs of a Flax model of transformers: created with or without weights."""

    module, input_shape = nn.Dense(8), (1, 8)

    def __init__(self, _do_init):
        self._is_initialized = _do_init
        if _do_init:
            self.params = self.init_weights(jax.random.key(0), self.input_shape)

    def init_weights(self, key, input_shape):
        return self.module.init(key, jnp.zeros(input_shape))["params"]


DENSE = nn.Dense(8)
TINY, WIDE = Tiny(rngs=nnx.Rngs(0)), Tiny(16, rngs=nnx.Rngs(0))
VARIABLES, LOADED = DENSE.init(jax.random.key(0), np.ones((1, 16))), HuggingFace(_do_init=True)
TAKEN = {  # name -> (what is passed, example inputs, what plain Flax and JAX create with seed 0)
    "class": (Tiny, None, TINY),
    "partial": (functools.partial(Tiny, 16), None, WIDE),
    "partial_by_name": (functools.partial(Tiny, width=16), None, WIDE),
    "function_of_rngs": (lambda rngs: Tiny(rngs=rngs), None, TINY),
    "function_of_rngs_by_another_name": (lambda r: Tiny(rngs=r), None, TINY),
    "function_of_a_key": (lambda key: Tiny(rngs=nnx.Rngs(key)), None, TINY),
    "function_of_nothing": (lambda: Tiny(rngs=nnx.Rngs(0)), None, TINY),
    "linen": (DENSE, (np.ones((1, 16)),), VARIABLES),
    "linen_by_name": (DENSE, {"inputs": np.ones((1, 16))}, VARIABLES),
    "hugging_face": (HuggingFace(_do_init=False), None, LOADED.params),
    "hugging_face_with_weights": (LOADED, None, LOADED.params),
    "module": (TINY, None, TINY),
    "variables": (VARIABLES, None, VARIABLES),
    "tree": ({"kernel": np.ones((16, 8), np.float32)}, None, {"kernel": np.ones((16, 8), np.float32)}),
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_model_or_what_creates_one_is_taken_with_the_values_of_plain_flax(name):
    """No key that the model draws from is the one that the randomness of the steps comes from."""
    model, inputs, plain_model = TAKEN[name]
    state = Zero(zerojax.make_mesh()).init(model, optax.adam(1e-3), inputs=inputs)
    kernel_of = lambda tree: next(a for a in jax.tree.leaves(tree) if a.ndim == 2)
    kernel, want = kernel_of(state.params), kernel_of(plain_model)
    np.testing.assert_allclose(kernel, want, rtol=1e-6)
    assert kernel.sharding.shard_shape(kernel.shape) == (want.shape[0] // 8, 8)
    drawn_from = [jax.random.key(0), *jax.random.split(jax.random.key(0), 100)]
    assert all(state.key != key for key in drawn_from)


@pytest.mark.parametrize(("stage", "devices"), [(0, 8), (3, 1), (3, 8)])
def test_a_model_with_values_is_copied_and_remains(stage, devices):
    """Values, statistics and the model itself, which the state must not share buffers with."""
    zero = Zero(zerojax.make_mesh(devices=jax.devices()[:devices]), stage, "bf16")
    module = Tiny(rngs=nnx.Rngs(3))
    module.norm.mean[...] = jnp.arange(8.0)
    want = numbers(nnx.split(module, nnx.Param, ...)[1:])
    state = zero.init(module, optax.adam(1e-2))
    for a, b in zip(numbers((state.master, state.model_state)), want, strict=True):
        np.testing.assert_array_equal(a, b)
    state, _ = zero.train_step(lambda model, x: jnp.mean(model(x) ** 2))(state, np.ones((32, 8), np.float32))
    for a, b in zip(numbers(nnx.split(module, nnx.Param, ...)[1:]), want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_cannot_be_taken_is_refused_before_anything_compiles():
    zero, tx = Zero(zerojax.make_mesh()), optax.sgd(0.1)
    for model, inputs, text in [
        (
            DENSE,
            None,
            r"a Linen module needs example inputs\n  got:      Dense\n  fix:      zero.init\(module, tx, inp",
        ),
        (Tiny, (np.ones(8),), "inputs= is for a Linen module"),
        (None, None, "neither a model nor a function"),
        (jnp.ones((8, 8)), None, "neither a model nor a function"),
        ("gpt2", None, r"neither a model nor a function that creates one\n  got:      str\n"),
        (lambda key: DENSE, None, r"returns a Linen module, which has no parameters\n  got:      Dense\n  fix: "),
        (functools.partial(Tiny, rngs=nnx.Rngs(0)), None, "created outside of it, such as nnx.Rngs"),
        (nnx.eval_shape(lambda: Tiny(rngs=nnx.Rngs(0))), None, "the model has shapes instead of values"),
    ]:
        with pytest.raises(ValueError, match=text):
            zero.init(model, tx, inputs=inputs)


class InFp8(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp)(x)


def test_variables_that_are_updated_through_the_gradient_are_refused_by_name():
    """Their gradients are new values, of which the mean over devices is none."""
    zero, x = Zero(zerojax.make_mesh()), jnp.ones((8, 16))
    in_nnx = lambda rngs: nnx.bridge.lazy_init(nnx.bridge.ToNNX(InFp8(), rngs=rngs), x)
    for call in (
        lambda: zero.init(InFp8(), optax.sgd(0.1), inputs=(x,)),
        lambda: zero.init(in_nnx, optax.sgd(0.1)),
        lambda: zero.value_and_grad(lambda v, x: jnp.mean(InFp8().apply(v, x)))(InFp8().init(jax.random.key(0), x), x),
    ):
        with pytest.raises(
            ValueError, match=r"'_overwrite_with_gradient'.*\n  got: .*input_amax_history.*\n  fix: .*qwix"
        ):
            call()


# Scalars made from Python numbers, which JAX types weakly


def scaled(key=None):
    """A learned temperature, and two statistics."""
    return {"params": {"w": jnp.eye(8), "scale": jnp.asarray(1.5)}, "seen": {"mean": jnp.asarray(0.5), "last": 2.0}}


def loss_of_scaled(variables, x, over_devices=lambda value: jax.lax.pmean(value, "data")):
    params, seen = variables["params"], variables["seen"]
    value = jnp.mean((x @ params["w"] * params["scale"] - seen["last"]) ** 2)
    return value, {"seen": {"mean": 0.9 * seen["mean"] + 0.1 * over_devices(value), "last": 0.5}}


def counted_sgd():
    update = lambda updates, state, params=None: (updates, {"k": state["k"] + 1, "decay": state["decay"] * 0.5})
    counting = optax.GradientTransformation(lambda _: {"k": 0, "decay": jnp.asarray(1.0)}, update)
    return optax.chain(counting, optax.sgd(0.1, momentum=0.9))


@pytest.mark.parametrize(("stage", "model"), [(0, scaled), (3, scaled())])
def test_scalars_made_from_python_numbers_are_trained_and_traced_once(stage, model):
    x, tx, calls = np.linspace(0, 1, 256, dtype=np.float32).reshape(32, 8), counted_sgd(), []
    zero = Zero(zerojax.make_mesh(), stage)
    state, step = zero.init(model, tx), zero.train_step(lambda *args: calls.append(0) or loss_of_scaled(*args))
    variables, opt_state = scaled(), tx.init(scaled()["params"])
    for k in range(3):
        calls.clear()
        state, metrics = step(state, x)
        assert bool(calls) == (k == 0)
        of = lambda params: loss_of_scaled({**variables, "params": params}, x, lambda value: value)  # noqa: B023
        (want, seen), grads = jax.value_and_grad(of, has_aux=True)(variables["params"])
        updates, opt_state = tx.update(grads, opt_state, variables["params"])
        variables = {"params": optax.apply_updates(variables["params"], updates), **seen}
        np.testing.assert_allclose(metrics["loss"], want, rtol=1e-5)
    got, want = jax.tree.leaves((state.model(), state.opt_state)), jax.tree.leaves((variables, opt_state))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    assert not Zero(zerojax.make_mesh(), 0).shard(scaled()["params"])["scale"].weak_type


class Outdated(nnx.Module):
    def __init__(self, *, rngs):
        self.table = nnx.Param(jnp.clip(jnp.ones((8, 8)), maximum=1))


class Required(Tiny):
    def __init__(self, width, *, rngs):
        super().__init__(width, rngs=rngs)


class OutdatedLinen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(jnp.clip(x, maximum=1))


def outdated(key):
    return {"w": jnp.clip(jnp.ones((8, 8)), maximum=1)}


@pytest.mark.parametrize(
    ("model", "inputs", "fails_in"),
    [
        (Outdated, None, Outdated.__init__),
        (OutdatedLinen(), (np.ones((1, 8)),), OutdatedLinen.__call__),
        (outdated, None, outdated),
    ],
    ids=["nnx", "linen", "function"],
)
def test_an_error_of_the_model_itself_is_raised_with_a_note(model, inputs, fails_in):
    """As of a model that was written for another version of JAX."""
    with pytest.raises(TypeError) as raised:
        Zero(zerojax.make_mesh()).init(model, optax.sgd(0.1), inputs=inputs)
    assert str(raised.value) == "clip() got an unexpected keyword argument 'maximum'"
    (note,) = [note for note in raised.value.__notes__ if note.startswith("init: ")]  # JAX adds one too
    lines, first = inspect.getsourcelines(inspect.unwrap(fails_in))
    line = first + next(k for k, text in enumerate(lines) if "maximum" in text)
    assert note.startswith(f"init: the model cannot be created\n  got:      TypeError at {__file__}:{line}, with jax ")
    assert f"with jax {jax.__version__} and flax {flax.__version__}\n  fix: " in note


def test_an_error_of_the_call_itself_says_what_init_calls():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'width'") as raised:
        Zero(zerojax.make_mesh()).init(Required, optax.sgd(0.1))
    (note,) = [note for note in raised.value.__notes__ if note.startswith("init: ")]
    assert "TypeError at its call" in note and "fix:      pass a function" in note and "functools.partial(" in note


def test_plain_arrays_in_a_module_are_named():
    class WithTable(Tiny):
        def __init__(self, rngs):
            super().__init__(rngs=rngs)
            self.table, self.mask = jnp.ones((4, 4)), jnp.ones(4, bool)
            self.constant = nnx.Variable(jnp.ones(3))

    for model in WithTable, WithTable(nnx.Rngs(0)):
        zero = Zero(zerojax.make_mesh())
        with pytest.warns(UserWarning, match=r"constants, and not trained\n  got:      table\n") as caught:
            state = zero.init(model, optax.sgd(0.1))
        assert caught[0].filename == __file__
        loss = lambda model, x: jnp.mean(model(x @ jnp.tile(model.table, (2, 2))) ** 2) + model.mask.sum()
        state, metrics = zero.train_step(loss)(state, np.ones((32, 8), np.float32))
        assert metrics["loss"] == 4 and np.array_equal(state.model().table, np.ones((4, 4)))


def test_a_key_is_no_parameter():
    with pytest.raises(ValueError, match=r"'rng' is a PRNG key, and no parameter\n.*\n  fix: .*'params': params"):
        Zero(zerojax.make_mesh()).init({"w": jnp.ones((8, 8)), "rng": jax.random.key(0)}, optax.sgd(0.1))


def test_a_model_in_bf16_is_not_widened_in_silence():
    create = lambda rngs: nnx.Linear(8, 8, param_dtype=jnp.bfloat16, rngs=rngs)
    with pytest.warns(
        UserWarning, match=r"2 parameters .* narrower dtype are trained in float32\n  got:      bias, ker"
    ):
        state = Zero(zerojax.make_mesh()).eval_init(create, optax.sgd(0.1))
    assert state.params["kernel"].dtype == jnp.float32
    state = Zero(zerojax.make_mesh(), precision="bf16").eval_init(create, optax.sgd(0.1))  # says nothing
    assert (state.params["kernel"].dtype, state.master["kernel"].dtype) == (jnp.bfloat16, jnp.float32)


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_an_enclosing_mesh_is_respected_or_refused(axis_type):
    x = np.ones((32, 8), np.float32)
    loss = lambda model, x: jnp.mean(model(x) ** 2)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(getattr(jax.sharding.AxisType, axis_type),))
    zero = Zero(zerojax.make_mesh())
    want = zero.train_step(loss)(zero.init(Tiny, optax.sgd(0.1)), x)[1]["loss"]
    state, step = zero.init(Tiny, optax.sgd(0.1)), zero.train_step(loss)
    with jax.set_mesh(mesh):
        if axis_type == "Auto":
            assert step(zero.init(Tiny, optax.sgd(0.1)), x)[1]["loss"] == want
            return
        for call in (lambda: zero.init(Tiny, optax.sgd(0.1)), lambda: step(state, x)):
            with pytest.raises(ValueError, match=r"jax.set_mesh has set another mesh .*\n.*Explicit.*\n  fix: "):
                call()


@pytest.mark.once
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the peak of a process without its parent's")
@pytest.mark.parametrize("kind", ["np", pytest.param("jnp", marks=pytest.mark.full)])
def test_a_model_with_values_takes_no_host_memory_but_that_of_its_state(kind):
    """Simulated devices hold the state in host memory: it grows by at most 1.2 times the state."""
    code = f"""
        import re
        import zerojax
        zerojax.simulate_devices(8)
        import jax, jax.numpy as jnp, numpy as np, optax

        peak = lambda: 1024 * int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1])
        zero, tx = zerojax.Zero(zerojax.make_mesh()), optax.adam(1e-3)
        small, large = ({{str(i): {kind}.ones((rows, 4096), "float32") for i in range(8)}} for rows in (8, 1024))
        jax.block_until_ready(zero.init(small, tx))
        before = peak()
        state = jax.block_until_ready(zero.init(large, tx))
        print((peak() - before) / sum(a.nbytes for a in jax.tree.leaves(state)))
    """
    ended = subprocess.run([sys.executable, "-P", "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert 0.9 < float(ended.stdout) < 1.2
