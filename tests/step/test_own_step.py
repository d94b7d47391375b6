"""Training steps that a script writes itself, around `zero.value_and_grad`: what is placed stays placed."""

import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax import Whole, Zero
from zerojax.step.batch import unwrapped

WIDTH, HIDDEN = 12, 24
MOMENTS = {"mu", "nu", "trace", "acc_grads", "ema", "v", "v_row", "v_col", "zeros"}
ADAM = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-6))


def net(seed, inputs=WIDTH):
    draw = np.random.default_rng(seed).standard_normal
    shapes = {"in": (inputs, HIDDEN), "b": (HIDDEN,), "out": (HIDDEN, WIDTH)}
    return {name: draw(shape, np.float32) / 4 for name, shape in shapes.items()}


def apply(params, x):
    return jnp.tanh(x @ params["in"] + params["b"]) @ params["out"]


def data():
    return tuple(np.random.default_rng(9).standard_normal((2, 24, WIDTH), np.float32))


def loss(params, x, y):
    return jnp.mean((apply(params, x) - y) ** 2)


# Scripts: each creates its state, and returns its step, which maps (state, x, y) to (state, losses). -----------------


def by_hand(zero, tx=ADAM):
    value_and_grad, tx = zero.value_and_grad(loss), zero.optimizer(tx)
    params = zero.shard(net(0))

    @jax.jit
    def step(state, x, y):
        params, opt_state = state
        value, grads = value_and_grad(params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (zero.apply_updates(params, updates), opt_state), value

    return step, (params, tx.init(params))


def train_state(zero):
    value_and_grad, tx = zero.value_and_grad(loss), zero.optimizer(ADAM)
    create = jax.jit(lambda params: TrainState.create(apply_fn=apply, params=params, tx=tx))

    @jax.jit
    def step(state, x, y):
        value, grads = value_and_grad(state.params, x, y)
        for _ in range(2):
            state = state.apply_gradients(grads=grads)
        return state, value

    return step, create(zero.shard(net(0)))


class Network(nnx.Module):
    def __init__(self, *, rngs):
        self.first = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.last = nnx.Linear(HIDDEN, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.last(jnp.tanh(self.first(x)))


def nnx_optimizer(zero):
    tx = zero.optimizer(ADAM)

    @nnx.jit
    def create():
        model = Network(rngs=nnx.Rngs(0))
        nnx.update(model, zero.shard(nnx.state(model, nnx.Param)))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(state, x, y):
        model, optimizer = state
        graph, params = nnx.split(model, nnx.Param)
        loss = lambda params, x, y: jnp.mean((nnx.merge(graph, params)(x) - y) ** 2)
        value, grads = zero.value_and_grad(loss)(params, x, y)
        optimizer.update(model, grads)
        return state, value

    return step, create()


def actor_and_critics(zero):
    """Each critic learns from the smaller value of two targets, and the actor from a critic that was just updated."""
    tx = zero.optimizer(ADAM)
    value = lambda params, x, action: jnp.mean(apply(params, jnp.concatenate([x, action], 1)), axis=1)

    def critic_loss(critic, x, y, other):
        action = jnp.tanh(apply(other["actor"], x))
        target = jnp.minimum(*(value(each, x, action) for each in other["targets"]))
        return jnp.mean((value(critic, x, y) - target - y[:, 0]) ** 2)

    def actor_loss(actor, x, critic):
        return -jnp.mean(value(critic, x, jnp.tanh(apply(actor, x))))

    @jax.jit
    def step(state, x, y):
        nets, moments = state
        losses, new, new_moments = [], [], []
        other = {"actor": nets["actor"], "targets": nets["targets"]}
        for critic, opt_state in zip(nets["critics"], moments["critics"], strict=True):
            value, grads = zero.value_and_grad(critic_loss)(critic, x, y, Whole(other))
            updates, opt_state = tx.update(grads, opt_state, critic)
            losses, new = [*losses, value], [*new, optax.apply_updates(critic, updates)]
            new_moments.append(opt_state)
        value, grads = zero.value_and_grad(actor_loss)(nets["actor"], x, Whole(new[0]))
        updates, opt_state = tx.update(grads, moments["actor"], nets["actor"])
        actor = optax.apply_updates(nets["actor"], updates)
        targets = [optax.incremental_update(*pair, 0.1) for pair in zip(new, nets["targets"], strict=True)]
        nets = {"actor": actor, "critics": new, "targets": targets}
        return (nets, {"actor": opt_state, "critics": new_moments}), jnp.stack([*losses, value])

    critics = lambda: [zero.shard(net(seed, 2 * WIDTH)) for seed in (1, 2)]
    nets = {"actor": zero.shard(net(0)), "critics": critics(), "targets": critics()}
    return step, (nets, {"actor": tx.init(nets["actor"]), "critics": [tx.init(each) for each in nets["critics"]]})


def gan(zero):
    """The critic's loss gets the generator; the generator's closes over the critic, which was just updated."""
    tx = zero.optimizer(ADAM)
    score = lambda critic, x: jnp.mean(apply(critic, x), axis=1)

    def critic_loss(critic, x, y, generator):
        return jnp.mean(nnx.softplus(-score(critic, y)) + nnx.softplus(score(critic, apply(generator, x))))

    @jax.jit
    def step(state, x, y):
        (generator, critic), (generator_moments, critic_moments) = state
        first, grads = zero.value_and_grad(critic_loss)(critic, x, y, Whole(generator))
        updates, critic_moments = tx.update(grads, critic_moments, critic)
        critic = optax.apply_updates(critic, updates)
        generator_loss = lambda generator, x: jnp.mean(nnx.softplus(-score(critic, apply(generator, x))))
        second, grads = zero.value_and_grad(generator_loss)(generator, x)
        updates, generator_moments = tx.update(grads, generator_moments, generator)
        generator = optax.apply_updates(generator, updates)
        return ((generator, critic), (generator_moments, critic_moments)), jnp.stack([first, second])

    nets = zero.shard(net(0)), zero.shard(net(1))
    return step, (nets, tuple(map(tx.init, nets)))


SCRIPTS = [by_hand, train_state, nnx_optimizer, actor_and_critics, gan]

# The same scripts on one device, without zerojax.
PLAIN = types.SimpleNamespace(
    value_and_grad=lambda fn: lambda params, *args: jax.value_and_grad(fn)(params, *unwrapped(args)),
    optimizer=lambda tx: tx,
    apply_updates=optax.apply_updates,
    shard=lambda tree: tree,
)


def expected_spec(a, sharded, num_devices):
    """The first dim that the devices divide is sharded. Shapes of parameters and of their moments are the same."""
    dims = [dim for dim, size in enumerate(a.shape) if size % num_devices == 0]
    return P(*[None] * dims[0], "data") if sharded and dims else P()


def assert_placed(state, zero):
    """What the optimizer has for each parameter is stored like its state, all else like parameters."""
    stage = zero.config.stage
    for path, a in jax.tree_util.tree_leaves_with_path(state):
        is_moment = MOMENTS & set(re.findall(r"\w+", jax.tree_util.keystr(path)))
        sharded = stage.shards_optimizer if is_moment else stage.shards_params
        assert a.sharding.spec == expected_spec(a, sharded, zero.config.axes.num_shards), path


def three_steps(script, zero, batch, check=lambda state: None):
    """Returns (the losses of each step, the number of compiled programs, the state)."""
    step, state = script(zero)
    check(state)
    losses = []
    for _ in range(3):
        state, value = step(state, *batch)
        check(state)
        losses.append(np.asarray(value))
    return losses, getattr(step, "jitted_fn", step)._cache_size(), state


@functools.cache
def plain_losses(script):
    return three_steps(script, PLAIN, data())[0]


full = functools.partial(pytest.param, marks=pytest.mark.full)


@pytest.mark.parametrize("stage, num_devices", [(1, 3), (3, 8), full(0, 8), full(1, 8), full(2, 6), full(3, 3)])
@pytest.mark.parametrize("script", SCRIPTS)
def test_what_is_placed_stays_placed_in_a_step_that_is_compiled_once(script, stage, num_devices):
    zero = Zero(zerojax.make_mesh(devices=jax.devices()[:num_devices]), stage)
    check = functools.partial(assert_placed, zero=zero)
    losses, num_compiled, _ = three_steps(script, zero, zero.shard_batch(data()), check)
    np.testing.assert_allclose(losses, plain_losses(script), rtol=1e-5)
    assert num_compiled == 1


def is_large(params):
    return {name: name != "b" for name in params}


FORGETFUL = optax.GradientTransformation(
    lambda params: {"zeros": jax.tree.map(jnp.zeros_like, params)},
    lambda updates, state, params=None: (updates, jax.tree.map(jnp.zeros_like, state)),
)
CHAIN = optax.chain(
    optax.clip_by_global_norm(0.5),
    optax.scale_by_factored_rms(min_dim_size_to_factor=8),
    optax.multi_transform({True: optax.adam(1e-2), False: optax.sgd(0.1, momentum=0.9)}, is_large),
    optax.masked(optax.add_decayed_weights(1e-3), is_large),
    optax.ema(0.9),
)
TX = optax.chain(optax.MultiSteps(CHAIN, 2).gradient_transformation(), FORGETFUL)


@pytest.mark.parametrize("stage", [1, 3])
def test_transformations_see_global_arrays(stage):
    zero = Zero(zerojax.make_mesh(), stage)
    script = functools.partial(by_hand, tx=TX)
    check = functools.partial(assert_placed, zero=zero)
    losses, num_compiled, (params, _) = three_steps(script, zero, zero.shard_batch(data()), check)
    plain, _, (wanted, _) = three_steps(script, PLAIN, data())
    np.testing.assert_allclose(losses, plain, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6), params, wanted)
    assert num_compiled == 1


@pytest.mark.parametrize("stage", [1, 3])
def test_no_device_holds_the_whole_state_when_it_is_created(stage):
    zero = Zero(zerojax.make_mesh(), stage)
    create = jax.jit(lambda: zero.shard({"w": jnp.ones((64, 256))}))
    params, tx = create(), zero.optimizer(optax.adam(1e-2))
    assert_placed(params, zero)
    memory = jax.jit(tx.init).lower(params).compile().memory_analysis()
    moments = 2 * params["w"].nbytes
    assert memory.output_size_in_bytes + memory.temp_size_in_bytes <= moments / 8 + 256
    for init in tx.init, jax.jit(tx.init):
        assert_placed(init(params), zero)


@pytest.mark.parametrize("stage", [1, 3])
def test_frozen_leaves_have_no_moments_and_keep_their_bits(stage):
    """The names of leaves are those of `init`, also where a tree has nnx variables."""
    zero = Zero(zerojax.make_mesh(), stage, frozen=("first/kernel", "first/bias"))
    step, state = nnx_optimizer(zero)
    before = np.asarray(state[0].first.kernel[...])
    (model, optimizer), _ = step(state, *zero.shard_batch(data()))
    np.testing.assert_array_equal(model.first.kernel[...], before)
    assert_placed((model, optimizer), zero)
    sizes = [a.size for a in jax.tree.leaves(optimizer) if a.ndim]
    assert sizes == [HIDDEN * WIDTH] * 2


def test_updated_parameters_are_placed_whatever_else_reads_them():
    zero = Zero(zerojax.make_mesh())
    everywhere = jax.sharding.NamedSharding(zero.config.mesh, P())

    @jax.jit
    def update(params, updates):
        new = zero.apply_updates(params, updates)
        return new, jax.lax.with_sharding_constraint(new, everywhere)

    params = zero.shard(net(0))
    new, _ = update(params, {name: a if name == "in" else None for name, a in params.items()})
    assert_placed(new, zero)
    np.testing.assert_array_equal(new["in"], 2 * params["in"])
    np.testing.assert_array_equal(new["out"], params["out"])


PLACED = """optimizer: parameter 'b' is not placed as stage 3 stores it
  got:      ndarray
  want:     P('data',)
  fix:      params = zero.shard(params), before the optimizer's init"""
NO_PARAMS = """optimizer: needs the parameters, to place what it returns as they are stored
  got:      tx.update(grads, opt_state)
  fix:      tx.update(grads, opt_state, params)"""
NO_OPTIMIZER = """optimizer: not an Optax transformation
  got:      int
  fix:      pass one, such as optax.adamw(1e-3)"""
OFFLOADED = """optimizer: a step of your own keeps the optimizer's state on the devices
  got:      offload='optimizer'
  fix:      Zero(..., offload='none'); or zero.init and zero.train_step, which offload it"""


@pytest.mark.parametrize(
    "use, text",
    [
        (lambda zero: zero.optimizer(ADAM).init(net(0)), PLACED),
        (lambda zero: zero.optimizer(ADAM).update(net(0), ()), NO_PARAMS),
        (lambda zero: zero.optimizer(3), NO_OPTIMIZER),
        (lambda zero: Zero(zero.config.mesh, offload="optimizer").optimizer(ADAM), OFFLOADED),
    ],
)
def test_errors_of_optimizers(use, text):
    with pytest.raises(ValueError) as error:
        use(Zero(zerojax.make_mesh()))
    assert str(error.value) == text


UNPLACED = """value_and_grad: nothing places the optimizer's state as stage 1 requires
  got:      'in': jax.jit(tx.init) puts its moments on one device as a whole; after a step, the parameter is \
P(None, 'data') instead of P()
  fix:      tx = zero.optimizer(tx), and zero.apply_updates(params, updates)"""


def test_a_step_whose_optimizer_places_nothing_is_warned_about(recwarn):
    trace = lambda zero: jax.eval_shape(lambda *args: zero.value_and_grad(loss)(*args), net(0), *data())
    zero = Zero(zerojax.make_mesh(), 1)
    trace(zero)
    (warning,) = recwarn
    assert str(warning.message) == UNPLACED and warning.filename == __file__
    recwarn.clear()
    trace(Zero(zerojax.make_mesh(), 0))
    jax.eval_shape(zero.value_and_grad(loss), net(0), *data())  # no step, but the gradient alone
    zero.optimizer(ADAM)
    trace(zero)
    assert not recwarn.list
