"""Trains the GPT of examples/gpt_nnx.py with checkpoints and evaluation: train_gpt.py DIRECTORY OPTIONS ...

It needs no packages but those of zerojax. Started again, the run continues, also on another number of devices.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import optax
import text
from gpt_nnx import GPT, loss_fn

import zerojax
from zerojax import processes


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("directory")
    add("--stage", type=int, default=3)
    add("--steps", type=int, required=True, help="steps of the whole run")
    add("--batch", type=int, required=True, help="rows per step, over all devices")
    add("--most-rows", type=int, required=True, help="rows that a device processes at once, at most")
    add("--every", type=int, required=True, help="steps between checkpoints, and between evaluations")
    add("--width", type=int, default=32)
    add("--layers", type=int, default=1)
    add("--context", type=int, default=8)
    add("--simulate", type=int, metavar="N", help="simulate N CPU devices in this process")
    return parser.parse_args(arguments)


def parts_of(batch: Any, count: int) -> list[Any]:
    """A batch in equal parts, so that an evaluation processes no more rows at once than a step does."""
    return [jax.tree.map(lambda a, k=k: a[k::count], batch) for k in range(count)]


def train(args: argparse.Namespace) -> Any:
    zero = zerojax.Zero(zerojax.make_mesh(), args.stage)
    microbatches = zero.num_microbatches(args.batch, args.most_rows)  # more of them on fewer devices
    source = text.load()
    held_out = len(source) // 10
    rows = processes.own_rows(args.batch)

    def batch(source: Any, seed: int) -> Any:
        """The rows of this process in the batch of a seed."""
        return jax.tree.map(lambda a: a[rows], text.batch(source, args.batch, args.context, seed))

    schedule = optax.warmup_cosine_decay_schedule(0, 1e-3, args.steps // 10, args.steps, 1e-4)
    create = lambda rngs: GPT(args.width, layers=args.layers, context=args.context, rngs=rngs)
    state = zero.init(create, optax.inject_hyperparams(optax.adamw)(schedule, b2=0.95))
    eval_step = zero.eval_step(loss_fn)

    def evaluate(state: Any) -> dict[str, float]:
        parts = [part for i in range(4) for part in parts_of(batch(source[-held_out:], i), microbatches)]
        losses = [float(eval_step(state, part)["loss"]) for part in parts]
        return {"loss": sum(losses) / len(losses)}

    return zerojax.fit(
        zero,
        state,
        zero.train_step(loss_fn, num_microbatches=microbatches, clip_norm=1.0),
        lambda i: batch(source[:-held_out], i),
        args.steps,
        args.directory,
        evaluate=evaluate,
        evaluate_every=args.every,
        config={"batch": args.batch, "microbatches": microbatches},
        checkpoints={"every": args.every},
    )


def main() -> None:
    args = parse()
    if args.simulate:
        zerojax.simulate_devices(args.simulate)
    processes.initialize()
    train(args)


if __name__ == "__main__":
    main()
