"""Runs of zoo models under zerojax and by the plain step, made once per session and compared."""

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
SYNCHRONISED = {"resnet_linen": zoo.resnet_linen, "resnet_nnx": zoo.resnet_nnx}


@functools.cache
def distributed(name):
    """A zoo model whose batch normalisation takes its statistics over all devices."""
    return SYNCHRONISED[name](axis_name="data") if name in SYNCHRONISED else zoo.ZOO[name]


def ready_made(model):
    """The model, with the initial values of the plain run as constants: to compile them takes as long as a step."""
    graph, made = plain.created(model.create, 0)
    create = (lambda rngs: nnx.merge(*graph, *made, copy=True)) if graph else (lambda key: made)
    return dataclasses.replace(model, create=create)


# fp32: rounding alone. The narrow dtypes are compared with the plain step in the same dtype, which rounds in other
# places: it sums 32 rows where zerojax sums 4 on each of 8 devices. One rounding of a loss is 2^-9 = 2e-3 in bf16 and
# 2^-12 = 2.4e-4 in fp16; measured over the zoo were 4e-3 and 5e-4. An element of the gradient that nearly cancels has
# no digits in common, and Adam moves it as far as any other: measured were 2% (bf16) and 0.6% (fp16) of the update.
TOLERANCES = {
    "fp32": {"losses": 1e-5, "update": 1e-4, "norms": 1e-4},
    "bf16": {"losses": 1e-2, "update": 5e-2, "norms": 2e-2},
    "bf16_reduce_fp32": {"losses": 1e-2, "update": 5e-2, "norms": 2e-2},
    "fp16": {"losses": 2e-3, "update": 2e-2, "norms": 5e-3},
}


def optimizer():
    """AdamW whose eps is not small beside the rounding errors: with 1e-8, an element whose exact gradient is zero moves
    by the sign of its error, as far as any other."""
    return optax.adamw(1e-3, eps=1e-5)


def batches(model, count=STEPS):
    return [model.batch(seed) for seed in range(count)]


def distance(a, b):
    """Euclidean distance of two lists of arrays."""
    squares = [np.sum(np.square(x.astype(np.float64) - y.astype(np.float64))) for x, y in zip(a, b, strict=True)]
    return math.sqrt(sum(squares))


def loss_of(model):
    """The loss as a user of zerojax writes it: a pair of sums becomes a Weighted."""
    return (lambda tree, batch: Weighted(*model.loss(tree, batch))) if model.weighted else model.loss


@functools.cache
def reference(name, precision="fp32", num_microbatches=1):
    """The plain trajectory of a zoo model on one device."""
    model = zoo.ZOO[name]
    return plain.run(model, optimizer(), batches(model), precision=precision, num_microbatches=num_microbatches)


def train(zero, model, data, tx=None, num_microbatches=1, **options):
    """Trains a zoo model and returns (trajectory, last state)."""
    tx = optimizer() if tx is None else tx
    state = zero.init(model.create, tx)
    trained = lambda state: numbers(state.params if state.master is None else state.master)
    start, metrics = trained(state), []
    step = zero.train_step(loss_of(model), num_microbatches=num_microbatches, **options)
    for batch in data:
        state, seen = step(state, batch)
        metrics.append({name: float(value) for name, value in seen.items()})
    losses = np.array([seen["loss"] for seen in metrics])
    return Trajectory(losses, metrics, start, trained(state), numbers(state.model_state)), state


@functools.cache
def zero_run(name, stage, precision="fp32", num_microbatches=1):
    """The trajectory of a zoo model on eight devices. In fp32 without microbatches these make its initial values."""
    policy = Precision.of(precision)
    if policy.initial_scale:
        policy = dataclasses.replace(policy, initial_scale=plain.FP16_SCALE)
    model, zero = distributed(name), Zero(zerojax.make_mesh(), stage, policy)
    if (precision, num_microbatches) != ("fp32", 1):
        model = ready_made(model)
    return train(zero, model, batches(model), num_microbatches=num_microbatches)[0]


def assert_close(got, want, *, losses=1e-5, update=1e-4, norms=1e-4):
    """Losses and gradient norms within relative tolerances, parameters within a part of the norm of the whole update.

    The gradient norm is compared because Adam's update hardly shows a gradient of the wrong scale.
    """
    np.testing.assert_allclose(got.losses, want.losses, rtol=losses)
    norm = lambda run: [seen["grad_norm"] for seen in run.metrics]
    np.testing.assert_allclose(norm(got), norm(want), rtol=norms)
    moved = distance(want.end, want.start)
    assert moved > 0
    off = distance(got.end, want.end)
    assert off <= update * moved, f"parameters are off by {off / moved:.2e} of the update"
