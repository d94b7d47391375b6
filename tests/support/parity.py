"""Runs zoo models with zerojax and with the plain step, once per session, and compares them."""

import dataclasses
import functools
import math

import numpy as np
import optax
from flax import nnx

import zerojax
from support import plain, zoo
from support.plain import Trajectory, numbers
from zerojax import Weighted, Zero
from zerojax.sharding.precision import Precision

STEPS = 10
WITH_BATCH_NORM = {"resnet_linen": zoo.resnet_linen, "resnet_nnx": zoo.resnet_nnx}


@functools.cache
def with_global_batch_norm(name):
    """A zoo model whose batch normalization, if it has any, takes its statistics over all devices."""
    return WITH_BATCH_NORM[name](axis_name="data") if name in WITH_BATCH_NORM else zoo.ZOO[name]


def with_constant_init(model):
    """The model, created from the initial values of the plain run. Compiling its init takes as long as a step."""
    graph, made = plain.created(model.create, 0)
    create = (lambda rngs: nnx.merge(*graph, *made, copy=True)) if graph else (lambda key: made)
    return dataclasses.replace(model, create=create)


# In fp32, only rounding errors differ. The narrow dtypes are compared with the plain step in the same dtype, which
# rounds in other places: it sums 32 rows where zerojax sums 4 on each of 8 devices. One rounding of a loss is
# 2^-9 = 2e-3 in bf16 and 2^-12 = 2.4e-4 in fp16; the largest differences measured over the zoo were 4e-3 and 5e-4.
# Gradient elements that nearly cancel may have no digits in common, and Adam moves them as far as all others: the
# largest differences measured were 2% (bf16) and 0.6% (fp16) of the update.
TOLERANCES = {
    "fp32": {"losses": 1e-5, "update": 1e-4, "norms": 1e-4},
    "bf16": {"losses": 1e-2, "update": 5e-2, "norms": 2e-2},
    "bf16_reduce_fp32": {"losses": 1e-2, "update": 5e-2, "norms": 2e-2},
    "fp16": {"losses": 2e-3, "update": 2e-2, "norms": 5e-3},
}


def optimizer():
    """AdamW with an eps that is not small compared with rounding errors.

    With the default of 1e-8, an element whose exact gradient is zero would move by the sign of its rounding error, as
    far as any other element.
    """
    return optax.adamw(1e-3, eps=1e-5)


def batches(model, count=STEPS):
    return [model.batch(seed) for seed in range(count)]


def distance(a, b):
    """The Euclidean distance between two lists of arrays."""
    squares = [np.sum(np.square(x.astype(np.float64) - y.astype(np.float64))) for x, y in zip(a, b, strict=True)]
    return math.sqrt(sum(squares))


def loss_of(model):
    """The loss of a zoo model as a user of zerojax writes it: a pair of sums becomes a `Weighted`."""
    return (lambda tree, batch: Weighted(*model.loss(tree, batch))) if model.weighted else model.loss


@functools.cache
def reference(name, precision="fp32", num_microbatches=1):
    """The plain trajectory of a zoo model on one device."""
    model = zoo.ZOO[name]
    return plain.run(model, optimizer(), batches(model), precision=precision, num_microbatches=num_microbatches)


def logical_weights(state):
    """The weights of a state in param_dtype, on the host, without the zeros with which they are stored."""
    weights = state.params if state.master is None else state.master
    leaves = [leaf for leaf in state.layout.leaves if state.master is None or leaf.trainable]
    return [np.asarray(leaf.without_zeros(a)) for leaf, a in zip(leaves, numbers(weights), strict=True)]


def train(zero, model, data, tx=None, num_microbatches=1, **options):
    """Trains a zoo model with zerojax. Returns (trajectory, last state)."""
    tx = optimizer() if tx is None else tx
    state = zero.init(model.create, tx)
    start, metrics = logical_weights(state), []
    step = zero.train_step(loss_of(model), num_microbatches=num_microbatches, **options)
    for batch in data:
        state, row = step(state, batch)
        metrics.append({name: float(value) for name, value in row.items()})
    losses = np.array([row["loss"] for row in metrics])
    return Trajectory(losses, metrics, start, logical_weights(state), numbers(state.model_state)), state


@functools.cache
def zero_run(name, stage, precision="fp32", num_microbatches=1):
    """The trajectory of a zoo model on eight devices. Only in fp32 without microbatches, its own init is used too."""
    policy = Precision.of(precision)
    if policy.initial_scale:
        policy = dataclasses.replace(policy, initial_scale=plain.FP16_SCALE)
    model, zero = with_global_batch_norm(name), Zero(zerojax.make_mesh(), stage, policy)
    if (precision, num_microbatches) != ("fp32", 1):
        model = with_constant_init(model)
    return train(zero, model, batches(model), num_microbatches=num_microbatches)[0]


def assert_close(got, want, *, losses=1e-5, update=1e-4, norms=1e-4):
    """Compares two trajectories.

    Losses and gradient norms have to agree within relative tolerances, and parameters within a fraction of the norm of
    the total update. Gradient norms are compared because Adam's update hardly depends on the scale of the gradient.
    """
    np.testing.assert_allclose(got.losses, want.losses, rtol=losses)
    norm = lambda run: [row["grad_norm"] for row in run.metrics]
    np.testing.assert_allclose(norm(got), norm(want), rtol=norms)
    total_update = distance(want.end, want.start)
    assert total_update > 0
    error = distance(got.end, want.end)
    assert error <= update * total_update, f"parameters are off by {error / total_update:.2e} of the update"
