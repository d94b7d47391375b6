"""What is not trained stays as it is, bit for bit; and the dtypes of single leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from support import traffic

import zerojax
from zerojax import Zero

WIDTH, ROWS = 16, 64
PRECISIONS = ["fp32", "bf16", "fp16"]
X = np.random.default_rng(0).standard_normal((ROWS, WIDTH), np.float32)


class Quantized(nnx.Module):
    """A base that is stored as the model stores it, and dequantized by the model."""

    def __init__(self, dtype, rngs):
        values = jax.random.normal(rngs.params(), (WIDTH, WIDTH)) * (20 if dtype == "int8" else 1)
        self.kernel, self.scale = nnx.Param(values.astype(dtype)), nnx.Param(jnp.full((WIDTH,), 0.1))

    def __call__(self, x):
        return x @ self.kernel[...].astype(x.dtype) * self.scale[...].astype(x.dtype)


class Tuned(nnx.Module):
    def __init__(self, dtype, rngs):
        self.base, self.norm = Quantized(dtype, rngs), nnx.BatchNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.head(self.norm(self.base(x)))


def loss(model, x):
    return jnp.mean(model(x).astype(jnp.float32) ** 2)


def bits(tree):
    return [np.asarray(a).tobytes() for a in jax.tree.leaves(jax.device_get(tree))]


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int8"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_frozen_leaf_keeps_its_dtype_and_its_bits(tmp_path, precision, dtype):
    """In memory, in a checkpoint and after it. The running statistics beside frozen parameters do not move."""
    create = lambda rngs: Tuned(dtype, rngs)
    want = create(nnx.Rngs(0))
    zero = Zero(zerojax.make_mesh(), precision=precision, frozen=["base/*", "norm/*"])
    state = zero.init(create, optax.adam(1e-2))
    assert state.params["base"]["kernel"].dtype == dtype
    assert bits(state.params["base"]["kernel"]) == bits(want.base.kernel[...])
    step = zero.train_step(loss, num_microbatches=2)
    before = bits((state.params["base"], state.params["norm"], state.model_state)), bits(state.params["head"])
    for _ in range(2):
        state, metrics = step(state, X)
    assert metrics["skipped"] == 0
    assert bits((state.params["base"], state.params["norm"], state.model_state)) == before[0]
    assert bits(state.params["head"]) != before[1]
    if precision != "fp16" and dtype in ("bfloat16", "int8"):
        with zero.checkpoints(tmp_path) as checkpoints:
            checkpoints.save(state)
            checkpoints.wait()
            restored = checkpoints.restore(zero.init(create, optax.adam(1e-2), seed=1), 2)
        assert restored.params["base"]["kernel"].dtype == dtype
        assert bits(restored.params) == bits(state.params)


@pytest.mark.parametrize(
    ("dtype", "computed"),
    [("float32", "bfloat16"), ("bfloat16", "bfloat16"), ("float8_e4m3fn", "float8_e4m3fn"), ("int8", "int8")],
)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_frozen_leaf_is_gathered_and_computed_in_its_dtype_or_a_narrower_one(stage, dtype, computed):
    seen = []

    def observing(model, x):
        seen.append(str(model.base.kernel[...].dtype))
        return loss(model, x)

    zero = Zero(zerojax.make_mesh(), stage, "bf16", frozen=["base/*", "norm/*"])
    state = zero.eval_init(lambda rngs: Tuned(dtype, rngs), optax.sgd(0.1))
    found = traffic.collectives_of_step(zero.train_step(observing), state, X)
    assert set(seen) == {computed}
    assert {c.dtype for c in found if c.kind == "all_gather"} == ({computed, "bfloat16"} if stage == 3 else set())


class Deep(nnx.Module):
    """Layers of bytes behind a trained scale, so that each is gathered for the backward pass as well."""

    def __init__(self, rngs):
        self.first = nnx.Param(jnp.ones(WIDTH))
        self.layers = nnx.List([Quantized("int8", rngs) for _ in range(6)])

    def __call__(self, x):
        x = x * self.first[...]
        for layer in self.layers:
            x = nnx.gelu(layer(x))
        return x


@pytest.mark.parametrize("create", [lambda rngs: Tuned("int8", rngs), Deep], ids=["one", "several"])
def test_the_audit_finds_nothing_in_a_step_with_a_narrow_base(create):
    """An element of a gather counts with its own bytes, as the unit that it belongs to does."""
    zero = Zero(zerojax.make_mesh(), precision="bf16", frozen=["base/*"] if create is not Deep else ["layers/*"])
    state = zero.init(create, optax.adam(1e-2))
    audit = zero.train_step(loss).audit(state, X)
    assert audit.ok, str(audit)


@pytest.mark.parametrize(("frozen", "moves"), [([], True), (["norm/scale", "norm/bias"], False), (["norm/*"], False)])
@pytest.mark.parametrize("linen", [False, True], ids=["nnx", "linen"])
def test_the_statistics_of_a_frozen_module_stay(linen, frozen, moves):
    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(WIDTH)(nn.BatchNorm(use_running_average=False, name="norm")(x))

    def linen_loss(variables, x):
        y, updated = Linen().apply(variables, x, mutable=["batch_stats"])
        return jnp.mean(y**2), updated

    zero = Zero(zerojax.make_mesh(), frozen=frozen)
    create = (lambda key: Linen().init(key, X)) if linen else (lambda rngs: Tuned("float32", rngs))
    state = zero.init(create, optax.sgd(0.1))
    before = bits(state.model_state)
    after, _ = zero.train_step(linen_loss if linen else loss)(state, X)
    assert (bits(after.model_state) != before) == moves


class Noisy(nnx.Module):
    def __init__(self, rngs):
        self.base, self.head = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.drop = nnx.Sequential(nnx.Dropout(0.5, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs))

    def __call__(self, x):
        return self.head(self.drop(self.base(x)))


def test_a_frozen_module_draws_another_dropout_in_each_step():
    """Its statistics stay, and not the counts from which its random numbers are drawn."""
    zero = Zero(zerojax.make_mesh(), frozen=["base/*", "drop/*"])
    state, step = zero.init(Noisy, optax.sgd(0.0)), zero.train_step(loss)
    losses = []
    for _ in range(3):
        state, metrics = step(state, X)
        losses.append(float(metrics["loss"]))
    assert len(set(losses)) == 3


class LoRA(nnx.Module):
    def __init__(self, rngs):
        base = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.layer = nnx.LoRA(WIDTH, 4, WIDTH, base_module=base, rngs=rngs)

    def __call__(self, x):
        return self.layer(x)


TRAINABLE = {
    "filter": nnx.LoRAParam,
    "filters": nnx.Any(nnx.LoRAParam, nnx.PathContains("lora_a")),
    "globs": ["*/lora_*"],
    "predicate": lambda path, a: "lora" in path,
}


@pytest.mark.parametrize("name", TRAINABLE)
def test_only_what_is_trainable_is_trained(name):
    zero = Zero(zerojax.make_mesh(), precision="bf16", trainable=TRAINABLE[name])
    state = zero.init(LoRA, optax.adam(1e-2))
    leaves = state.layout.leaves
    assert {leaf.path for leaf in leaves if leaf.trainable} == {"layer/lora_a", "layer/lora_b"}
    assert {a.size for a in jax.tree.leaves(state.opt_state) if a.ndim} == {WIDTH * 4}
    base = bits(state.params["layer"]["base_module"])
    assert state.params["layer"]["base_module"]["kernel"].dtype == jnp.float32
    after, _ = zero.train_step(loss)(state, X)
    assert bits(after.params["layer"]["base_module"]) == base


def test_a_selection_of_nothing_is_an_error():
    for trainable, message in [
        (["head/*"], "trainable: pattern 'head/\\*' matches no parameter"),
        (lambda path, a: False, "trainable: selects no parameter"),
        (nnx.BatchStat, "trainable: selects no parameter"),
    ]:
        with pytest.raises(ValueError, match=message):
            Zero(zerojax.make_mesh(), trainable=trainable).eval_init(LoRA, optax.sgd(0.1))
    with pytest.raises(ValueError, match="an nnx filter selects variables"):
        Zero(zerojax.make_mesh(), trainable=nnx.LoRAParam).eval_init(lambda key: {"w": jnp.ones(8)}, optax.sgd(0.1))


def test_what_is_both_trainable_and_frozen_is_frozen():
    """As a string, a glob is one glob, and not one for each of its letters."""
    for frozen in (["*/lora_b"], "*/lora_b"):
        zero = Zero(zerojax.make_mesh(), trainable=nnx.LoRAParam, frozen=frozen)
        trained = [leaf.path for leaf in zero.eval_init(LoRA, optax.sgd(0.1)).layout.leaves if leaf.trainable]
        assert trained == ["layer/lora_a"]


def test_options_that_leave_nothing_to_train_or_match_nothing():
    with pytest.raises(ValueError, match="trainable= and frozen= leave no parameter to train") as error:
        Zero(zerojax.make_mesh(), trainable=["*/lora_*"], frozen=["layer/*"]).eval_init(LoRA, optax.sgd(0.1))
    assert "got:      trainable= selects layer/lora_a, layer/lora_b; frozen=['layer/*']" in str(error.value)
    with pytest.raises(ValueError, match="frozen: pattern 'head/\\*' matches no parameter"):
        Zero(zerojax.make_mesh(), trainable=["*/lora_*"], frozen=["head/*"]).eval_init(LoRA, optax.sgd(0.1))


def test_a_complex_parameter_is_refused_unless_it_is_frozen():
    create = lambda key: {"w": jnp.ones((8, 8), jnp.complex64), "b": jnp.ones(8)}
    with pytest.raises(ValueError, match="'w' is complex, and only real parameters are trained"):
        Zero(zerojax.make_mesh()).eval_init(create, optax.sgd(0.1))
    assert Zero(zerojax.make_mesh(), frozen=["w"]).eval_init(create, optax.sgd(0.1)).params["w"].dtype == jnp.complex64


# Dtypes of single leaves


def test_a_glob_for_all_leaves_leaves_integers_alone():
    zero = Zero(zerojax.make_mesh(), precision="bf16", frozen=["base/*"], dtypes={"*": "float32"})
    leaves = zero.eval_init(lambda rngs: Tuned("int8", rngs), optax.sgd(0.1)).layout.leaves
    dtypes = {leaf.path: leaf.compute_dtype for leaf in leaves}
    assert dtypes.pop("base/kernel") == "int8" and set(dtypes.values()) == {jnp.dtype("float32")}


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.up, self.norm = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, x):
        SEEN.append((self.up.kernel[...].dtype, self.norm.scale[...].dtype))
        return self.norm(self.up(x))


SEEN = []


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_leaf_is_computed_gathered_and_reduced_in_its_own_dtype(stage):
    """Compared with fp32 by hand: the gradient of the norm's scale is not rounded to bf16 on the wire."""
    zero = Zero(zerojax.make_mesh(), stage, "bf16", dtypes={"norm/*": jnp.float32})
    state = zero.init(Normed, optax.sgd(0.1))
    assert state.params["norm"]["scale"].dtype == jnp.float32 and state.params["up"]["kernel"].dtype == jnp.bfloat16
    SEEN.clear()
    step = zero.train_step(loss)
    audit = step.audit(state, X)
    assert audit.ok, str(audit)
    assert set(SEEN) == {(jnp.dtype("bfloat16"), jnp.dtype("float32"))}
    params = jax.device_get(state.params)
    module = state.model()
    graph, _, rest = nnx.split(module, nnx.Param, ...)
    want = jax.grad(
        lambda scale: loss(
            nnx.merge(
                graph,
                jax.tree.unflatten(  # rows of one device at a time
                    jax.tree.structure(nnx.split(module, nnx.Param, ...)[1]),
                    jax.tree.leaves(params | {"norm": params["norm"] | {"scale": scale}}),
                ),
                rest,
            ),
            X.astype(jnp.bfloat16),
        )
    )(params["norm"]["scale"])
    after, _ = step(state, X)
    got = (params["norm"]["scale"] - jax.device_get(after.params["norm"]["scale"])) / 0.1
    np.testing.assert_allclose(got, want, rtol=1e-2, atol=1e-4)
    rounded = np.asarray(jnp.asarray(got).astype(jnp.bfloat16), np.float32)
    assert np.max(np.abs(rounded - got)) > 1e-4 * np.max(np.abs(got))  # it has bits that bf16 has not
