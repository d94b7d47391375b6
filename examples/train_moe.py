"""Trains a byte-level transformer with a mixture of experts on Python's own source, in Flax NNX.

python examples/train_moe.py --out /tmp/run --devices 8            # 3.17 bits per byte of other files

Each token goes to two of eight experts. An expert takes a limited number of tokens of each row; those that come too
late are dropped, which the metric `dropped` counts. The loss that balances the experts looks at all tokens of a batch:
the shares of the experts are averaged over the devices before they are multiplied. So the run does not depend on the
number of devices.
"""

from __future__ import annotations

import argparse
import functools
import math
from typing import Any, NamedTuple

import common
import jax
import jax.numpy as jnp
import numpy as np
import optax
import text
from flax import nnx

import zerojax
from zerojax import processes

BALANCE = 0.01  # weight of the balancing loss


class Routing(NamedTuple):
    """What a layer did with the tokens of some rows. The shares are means over these tokens, for each expert."""

    first_share: jax.Array  # [experts], of tokens of which it is the first choice
    probability: jax.Array  # [experts], that the router gives to it
    num_dropped: jax.Array  # choices that did not fit


class Expert(nnx.Module):
    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.up = nnx.Linear(width, 2 * width, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.gelu(self.up(x)))


class MixtureOfExperts(nnx.Module):
    """Experts are created and called by `nnx.vmap`: dim 0 of their weights counts them."""

    def __init__(self, width: int, experts: int, choices: int, capacity_factor: float, *, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=experts)
        @nnx.vmap(in_axes=0, out_axes=0)
        def create_experts(rngs: nnx.Rngs) -> Expert:
            return Expert(width, rngs=rngs)

        self.router = nnx.Linear(width, experts, use_bias=False, rngs=rngs)
        self.experts = create_experts(rngs)
        self.num_experts, self.choices, self.capacity_factor = experts, choices, capacity_factor

    def __call__(self, x: jax.Array) -> tuple[jax.Array, Routing]:
        rows, length, _ = x.shape
        probabilities = jax.nn.softmax(self.router(x).astype(jnp.float32))  # [rows, tokens, experts]
        gates, chosen = jax.lax.top_k(probabilities, self.choices)
        gates = gates / gates.sum(-1, keepdims=True)
        one_hot = jax.nn.one_hot(chosen, self.num_experts)  # [rows, tokens, choices, experts]
        # The place of a choice in the queue of its expert: all first choices of a row are before the second ones.
        queue = one_hot.swapaxes(1, 2).reshape(rows, self.choices * length, self.num_experts)
        place = (
            jnp.sum((jnp.cumsum(queue, 1) - 1) * queue, -1)
            .astype(jnp.int32)
            .reshape(rows, self.choices, length)
            .swapaxes(1, 2)
        )
        capacity = math.ceil(self.capacity_factor * self.choices * length / self.num_experts)
        slot = jax.nn.one_hot(place, capacity)  # [rows, tokens, choices, capacity]; zeros beyond the last slot
        sent = jnp.einsum("rtke,rtkc->rtec", one_hot, slot).astype(x.dtype)
        returned = jnp.einsum("rtke,rtkc,rtk->rtec", one_hot, slot, gates).astype(x.dtype)
        inputs = jnp.einsum("rtec,rtw->ercw", sent, x)
        outputs = nnx.vmap(lambda expert, inputs: expert(inputs))(self.experts, inputs)
        routing = Routing(one_hot[:, :, 0].mean((0, 1)), probabilities.mean((0, 1)), place.size - jnp.sum(slot))
        return jnp.einsum("rtec,ercw->rtw", returned, outputs), routing


class Block(nnx.Module):
    def __init__(self, width: int, heads: int, experts: int, choices: int, capacity: float, *, rngs: nnx.Rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.qkv = nnx.LinearGeneral(width, (3, heads, width // heads), use_bias=False, rngs=rngs)
        self.out = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.mixture = MixtureOfExperts(width, experts, choices, capacity, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, Routing]:
        q, k, v = jnp.moveaxis(self.qkv(self.norm1(x)), -3, 0)
        x = x + self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))
        y, routing = self.mixture(self.norm2(x))
        return x + y, routing


class Model(nnx.Module):
    def __init__(self, args: argparse.Namespace, *, rngs: nnx.Rngs):
        sizes = args.width, 4, args.experts, args.choices, args.capacity
        self.embed = nnx.Embed(256, args.width, rngs=rngs)
        self.position = nnx.Embed(args.context, args.width, rngs=rngs)
        self.blocks = nnx.List([Block(*sizes, rngs=rngs) for _ in range(args.layers)])
        self.norm = nnx.LayerNorm(args.width, rngs=rngs)
        self.head = nnx.Linear(args.width, 256, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, list[Routing]]:
        x = self.embed(tokens) + self.position(jnp.arange(tokens.shape[1]))
        x, routings = x.astype(self.norm.scale.dtype), []  # nnx.Embed keeps the dtype of its creation
        for block in self.blocks:
            x, routing = block(x)
            routings.append(routing)
        return self.head(self.norm(x)).astype(jnp.float32), routings


def balance(routing: Routing) -> jax.Array:
    """1 if all experts get equally many tokens, and more otherwise (Switch Transformer, arXiv 2101.03961, eq. 4).

    It is no mean over rows, but a product of two: each is taken over the rows of all devices first.
    """
    first_share, probability = jax.lax.pmean((routing.first_share, routing.probability), "data")
    return len(probability) * jnp.sum(first_share * probability)


def loss_fn(model: Model, batch: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, Any]]:
    logits, routings = model(batch["x"])
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
    balances = jnp.mean(jnp.array([balance(each) for each in routings]))
    num_choices = len(routings) * model.blocks[0].mixture.choices * batch["x"].size
    dropped = zerojax.Weighted(sum(each.num_dropped for each in routings), num_choices)
    metrics = {"cross_entropy": cross_entropy, "balance": balances, "dropped": dropped}
    return cross_entropy + BALANCE * balances, metrics


def test_loss_fn(model: Model, batch: dict[str, jax.Array]) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"])[0], batch["y"]).mean()


def job(args: argparse.Namespace) -> common.Job:
    source = text.load()
    num_test = len(source) // 10
    starts = np.linspace(0, num_test - args.context - 1, 203).astype(int)
    test = source[starts[:, None] + np.arange(args.context + 1)].astype(np.int32)
    schedule = optax.warmup_cosine_decay_schedule(0, 3e-3, args.steps // 10, args.steps)
    return common.Job(
        model=functools.partial(Model, args),
        loss_fn=loss_fn,
        optimizer=optax.adamw(schedule, b2=0.95),
        batch=lambda i: text.batch(source[num_test:], args.batch, args.context, i),
        step_options={"clip_norm": 1.0},
        test_loss_fn=test_loss_fn,
        test={"x": test[:, :-1], "y": test[:, 1:]},
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = common.parser(__doc__, steps=300)
    add = parser.add_argument
    add("--batch", type=int, default=32, metavar="N", help="rows per step (default: 32)")
    add("--context", type=int, default=64, metavar="N", help="bytes of a row (default: 64)")
    add("--width", type=int, default=96, metavar="N", help="width of the model (default: 96)")
    add("--layers", type=int, default=2, metavar="N", help="number of layers (default: 2)")
    add("--experts", type=int, default=8, metavar="N", help="experts of a layer (default: 8)")
    add("--choices", type=int, default=2, metavar="N", help="experts of a token (default: 2)")
    add(
        "--capacity",
        type=float,
        default=1.25,
        metavar="X",
        help="slots of an expert over its share (default: 1.25)",
    )
    return parser.parse_args(arguments)


def train(args: argparse.Namespace) -> dict[str, float]:
    """Trains, or continues to, and returns the loss on files that were not trained on, in nats per byte."""
    common.start(args)
    pieces, rows = job(args), processes.own_rows(args.batch)
    zero = zerojax.Zero(zerojax.make_mesh(), args.stage, args.precision)
    state, evaluate = zero.init(pieces.model, pieces.optimizer), common.tester(zero, pieces)
    state = zerojax.fit(
        zero,
        state,
        zero.train_step(pieces.loss_fn, remat=args.remat, **pieces.step_options),
        lambda i: jax.tree.map(lambda a: a[rows], pieces.batch(i)),
        args.steps,
        args.out,
        evaluate=evaluate,
        evaluate_every=100,
        config={name: getattr(args, name) for name in ("batch", "context", "width", "layers", "experts", "choices")},
        tokens_per_row=args.context,
        checkpoints={"every": 50},
    )
    return evaluate(state)


def main() -> None:
    result = train(parse())
    print(f"203 excerpts of other files: {result['loss'] / math.log(2):.2f} bits per byte")


if __name__ == "__main__":
    main()
