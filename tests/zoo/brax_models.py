"""The networks of Brax: Linen modules behind functions that create them."""

import jax
import numpy as np
from brax.training import networks

from zoo.entries import ROWS, Entry

OBSERVATIONS, ACTIONS, HIDDEN = 16, 8, (32, 32, 32)


def batch(seed):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal((ROWS, *shape), np.float32)
    return {"x": normal(OBSERVATIONS), "action": normal(ACTIONS), "y": normal()}


def entry(name, network, call, units):
    """`call(network, variables, batch)` returns one prediction, or several, for each row."""

    def create(key):
        return network.init(key)

    def loss(variables, batch):
        predicted = call(network, variables, batch)
        return ((predicted - batch["y"].reshape(-1, *[1] * (predicted.ndim - 1))) ** 2).mean()

    return Entry(name, create, loss, batch, units=units)


def entries():
    layers = ("hidden_0", "hidden_1", "hidden_2", "hidden_3")
    value = networks.make_value_network(OBSERVATIONS, hidden_layer_sizes=HIDDEN, activation=jax.nn.tanh)
    policy = networks.make_policy_network(ACTIONS, OBSERVATIONS, hidden_layer_sizes=HIDDEN, activation=jax.nn.tanh)
    critics = networks.make_q_network(OBSERVATIONS, ACTIONS, hidden_layer_sizes=HIDDEN, activation=jax.nn.tanh)
    of_state = lambda network, variables, batch: network.apply(None, variables, batch["x"])
    of_action = lambda network, variables, batch: network.apply(None, variables, batch["x"], batch["action"])
    return [
        entry("brax-value", value, of_state, layers),
        entry("brax-policy", policy, of_state, layers),
        entry("brax-critics", critics, of_action, ("MLP_0", "MLP_1")),
    ]
