"""Gradients flow where JAX lets them flow: what it cuts off is not differentiated, and costs nothing.

A derivative that is infinite, times a cotangent that is an array of zeros, is NaN. So is a gradient that took part.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from support.plain import numbers
from support.walk import count

import zerojax
from zerojax import Zero
from zerojax.program.gradient_paths import zeros

ROWS, WIDTH, DEPTH = 8, 4, 5


@functools.cache
def mesh(num_devices=2):
    return zerojax.make_mesh(devices=jax.devices()[:num_devices])


# Cuts: functions of an array of rows, through which no gradient flows


def norm(x):
    """Its derivative is infinite for rows of zeros."""
    return x + jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True))


@jax.custom_jvp
def constant_to_jvp(x):
    return jnp.sqrt(jnp.abs(x))


@constant_to_jvp.defjvp
def _(primals, tangents):
    return constant_to_jvp(*primals), jnp.zeros_like(tangents[0])


@jax.custom_vjp
def constant_to_vjp(x):
    return jnp.sqrt(jnp.abs(x))


constant_to_vjp.defvjp(lambda x: (constant_to_vjp(x), None), lambda _, cotangent: (None,))


def halved(x):
    """A loop that cannot be differentiated in reverse."""
    return lax.while_loop(lambda x: jnp.any(jnp.abs(x) > 1), lambda x: jnp.where(jnp.abs(x) > 1, x / 2, x), x)


CUTS = {
    "stop_gradient": lambda x: lax.stop_gradient(norm(x)),
    "loop": lambda x: lax.stop_gradient(halved(norm(x))),
    "sign": lambda x: jnp.sign(norm(x)),
    "round": lambda x: jnp.round(norm(x)),
    "argmax": lambda x: jax.nn.one_hot(jnp.argmax(norm(x), axis=-1), x.shape[-1]),
    "nested": jax.jit(lambda x: 2 * lax.stop_gradient(norm(x))),
    "recomputed": jax.checkpoint(lambda x: lax.stop_gradient(norm(x))),
    "custom_jvp": lambda x: constant_to_jvp(norm(x)),
    "custom_vjp": lambda x: constant_to_vjp(norm(x)),
    "branches": lambda x: lax.cond(jnp.isfinite(jnp.sum(x)), jnp.floor, jnp.ceil, norm(x)),
}


def random_loss(seed):
    """(parameters, loss) of a random network. Each weight is used in one place."""
    draw = np.random.default_rng(seed)
    params, metrics_of = {}, draw.random() < 0.5

    def weight(*shape):
        name = f"w{len(params):02d}"
        params[name] = {"kernel": jnp.asarray(draw.normal(size=shape) / 2, jnp.float32)}
        return lambda p: p[name]["kernel"]

    def dense():
        w = weight(WIDTH, WIDTH)
        stopped = draw.random() < 0.2
        return lambda p, x: x @ (lax.stop_gradient(w(p)) if stopped else w(p))

    def layers():
        """A scan that carries a second value, which may reach the loss, a metric or nothing."""
        w, use = weight(3, WIDTH, WIDTH), draw.choice(["loss", "alone", "cut", "metric", "reset"])

        def body(carry, w):
            x, total = carry
            y = jnp.tanh(x @ w)
            other = y if use == "reset" else total + (y if use in ("loss", "alone") else norm(y))
            return (y, other), jnp.sum(norm(y))

        def run(p, x):
            (y, total), sums = lax.scan(body, (x, jnp.zeros_like(x)), w(p))
            aux = jnp.sum(sums) + (jnp.sum(total) if use == "metric" else 0)
            if use == "alone":
                return total, aux
            return y + (lax.stop_gradient(total) if use == "cut" else total if use == "loss" else 0), aux

        return run

    steps = []
    for _ in range(DEPTH):
        kind = draw.choice(["dense", "layers", "cut", "add", "mul"], p=[0.35, 0.15, 0.2, 0.15, 0.15])
        fn = {"dense": dense, "layers": layers}.get(kind, lambda: CUTS[draw.choice(list(CUTS))])()
        steps.append((kind, fn, draw.random(2)))
    last = dense()

    def loss(p, batch):
        values, metrics = [batch["x"], batch["y"]], {}
        for i, (kind, fn, which) in enumerate(steps):
            a, b = (values[int(u * len(values))] for u in which)
            if kind == "dense":
                values.append(jnp.tanh(fn(p, a)))
            elif kind == "layers":
                value, metrics[f"m{i}"] = fn(p, a)
                values.append(value)
            else:
                values.append(fn(a) if kind == "cut" else a + b if kind == "add" else a * b)
        if metrics_of:
            metrics["norms"] = jnp.mean(norm(values[-1]))
        total = last(p, values[-1]) + values[-2] * values[len(values) // 2]
        return jnp.mean(total**2), metrics

    return params, loss


def data():
    draw = np.random.default_rng(0)
    x, y = (draw.normal(size=(ROWS, WIDTH)).astype(np.float32) for _ in range(2))
    x[::2] = 0
    return {"x": x, "y": y}


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(8, 300))])
def test_random_networks_differentiate_what_jax_does_and_no_more(seed):
    params, loss = random_loss(seed)
    batch, plain = data(), jax.value_and_grad(loss, has_aux=True)
    zero = Zero(mesh(), stage=2 + seed % 2)
    ours = jax.jit(zero.value_and_grad(loss, has_aux=True))
    traced = jax.make_jaxpr(ours)(params, batch)
    grads = jax.make_jaxpr(jax.grad(lambda p: loss(p, batch)[0]))(params)

    # Products, gathers and reductions. Of a weight in a scan, each layer counts.
    used = [a.shape[0] if a.ndim == 3 else 1 for a in jax.tree.leaves(params)]
    reduced = sum(n for n, zero in zip(used, zeros(grads.jaxpr), strict=True) if not zero)
    products = count(jax.make_jaxpr(plain)(params, batch), "dot_general")
    assert count(traced, "dot_general") <= products
    assert count(traced, "reduce_scatter") == reduced
    if zero.config.stage.shards_params:
        backward = products - sum(used) - reduced  # those that multiply by a weight
        assert count(traced, "all_gather") <= sum(used) + backward

    (want, _), want_grads = plain(params, batch)
    (got, _), got_grads = ours(zero.shard(params), batch)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    for a, b in zip(numbers(got_grads), numbers(want_grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def counts(loss, params, **options):
    """(products, gathers, reductions) of the traced gradient."""
    traced = jax.make_jaxpr(Zero(mesh(), **options).value_and_grad(loss))(params, data())
    return [count(traced, name) for name in ("dot_general", "all_gather", "reduce_scatter")]


@pytest.mark.parametrize("name", CUTS)
def test_what_comes_after_a_cut_passes_no_cotangent_on(name):
    params = {f"layers_{i}": {"kernel": jnp.eye(WIDTH)} for i in range(3)}

    def loss(p, batch):
        first, second, third = (layer["kernel"] for layer in p.values())
        return jnp.mean(CUTS[name](batch["x"] @ first) @ second + jnp.tanh(batch["y"] @ third))

    backward = name == "custom_vjp"  # JAX learns that it has no derivative when the cotangent is there
    assert counts(loss, params, stage=3) == [3 + 2 + backward, 3 + backward, 2]


def test_self_distillation_costs_the_teacher_a_forward_pass_alone():
    params = {f"layers_{i}": {"kernel": jnp.full((WIDTH, WIDTH), 0.1 * i)} for i in range(6)}
    run = lambda p, x: functools.reduce(lambda x, layer: jnp.tanh(x @ layer["kernel"]), p.values(), x)

    def loss(p, batch):
        teacher, student = run(p, batch["x"]), run(p, batch["y"])
        return jnp.mean((student - lax.stop_gradient(teacher)) ** 2)

    assert counts(loss, params, stage=3) == [6 + 6 + 11, 6 + 6 + 4, 6]


@pytest.mark.parametrize("options", [
    {"stage": 1, "remat": "full"}, {"stage": 2, "num_microbatches": 2}, {"stage": 3, "remat": "dots"},
    {"stage": 3, "offload": "params"},
], ids=str)  # fmt: skip
def test_what_layers_pass_on_to_a_metric_is_not_differentiated(options):
    """A norm averaged over layers, in a scan that carries it, and a target that only a loop can compute.

    The cotangent of what a layer computes comes from another carried value alone.
    """
    draw = np.random.default_rng(0)
    stack = jnp.asarray(draw.normal(size=(6, WIDTH, WIDTH)) / 2, jnp.float32)
    params = {"layers": {"kernel": stack, "unused": stack}, "head": {"kernel": jnp.eye(WIDTH)}}

    def loss(p, batch):
        def layer(carry, w):
            x, total, norms = carry
            x = jnp.tanh(x @ w["kernel"])
            return (x, total + x, norms + jnp.mean(norm(x))), jnp.mean(x @ lax.stop_gradient(w["unused"]))

        (_, x, norms), _ = lax.scan(layer, (batch["x"], jnp.zeros_like(batch["x"]), 0.0), p["layers"])
        target = lax.stop_gradient(halved(norm(batch["x"] @ p["head"]["kernel"])))
        return jnp.mean((x @ p["head"]["kernel"] - target) ** 2), {"norms": norms / 6}

    setup = {name: options[name] for name in ("stage", "offload") if name in options}
    zero = Zero(mesh(), stacked="layers/*", **setup)
    step = zero.train_step(loss, **{name: value for name, value in options.items() if name not in setup})
    state, batch = zero.init(lambda: params, optax.sgd(1.0)), data()
    after, metrics = step(state, batch)
    (want, want_metrics), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
    np.testing.assert_allclose([metrics["loss"], metrics["norms"]], [want, want_metrics["norms"]], rtol=1e-5)
    for new, old, grad in zip(numbers(after.params), numbers(params), numbers(grads), strict=True):
        np.testing.assert_allclose(old - new, grad, rtol=1e-4, atol=1e-6)
    assert np.isfinite(metrics["grad_norm"])


def accumulated(w, x):
    """A function that adds to a mutable array."""
    total = jax.new_ref(jnp.zeros_like(x))
    total[...] += jnp.tanh(x @ w)
    return 2 * total[...]


@pytest.mark.parametrize("remat", ["none", "full"])
def test_gradients_flow_through_mutable_arrays_inside_of_a_layer(remat):
    params = {f"layers_{i}": {"kernel": jnp.eye(WIDTH)} for i in range(2)}

    def loss(p, batch):
        x = batch["y"]
        for layer in p.values():
            x = jax.jit(accumulated)(layer["kernel"], x)
        return jnp.mean(x**2)

    zero = Zero(mesh(), stage=3)
    _, got = jax.jit(zero.value_and_grad(loss, remat=remat))(zero.shard(params), data())
    for a, b in zip(numbers(got), numbers(jax.grad(loss)(params, data())), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4)


def test_mutable_arrays_across_layers_are_refused():
    def loss(p, batch):
        total = jax.new_ref(jnp.zeros(()))
        for layer in p.values():
            total[...] += jnp.mean(batch["x"] @ layer["kernel"])
        return total[...]

    with pytest.raises(ValueError, match=r"(?s)mutable array .* across.*Ref.*gradient_paths.py:\d+\n  fix"):
        counts(loss, {f"layers_{i}": {"kernel": jnp.eye(WIDTH)} for i in range(2)}, stage=2)
