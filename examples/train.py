"""Trains the GPT of gpt_nnx.py with checkpoints, evaluation and metrics, in one process or in several.

python examples/train.py /tmp/run --simulate 8                                  # started again, the run continues
python examples/train.py /tmp/run --simulate 4                                  # also with another number of devices
zerojax launch -n 2 --devices 4 python examples/train.py /tmp/run --stage 3     # two processes on this machine
"""

from __future__ import annotations

import argparse
import logging
from typing import Any

import jax
import optax
import text
from gpt_nnx import GPT, loss_fn

import zerojax
from zerojax import processes


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a byte-level GPT on Python's own source.")
    add = parser.add_argument
    add("directory", help="the directory of the run")
    add("--stage", type=int, default=3, choices=range(4), help="ZeRO stage (default: 3)")
    add("--precision", default="bf16", help="a precision preset (default: bf16)")
    add("--steps", type=int, default=200, help="steps of the whole run (default: 200)")
    add("--batch", type=int, default=64, help="rows per step, over all devices (default: 64)")
    add("--most-rows", type=int, default=8, help="rows that a device processes at once, at most (default: 8)")
    add("--width", type=int, default=256, help="width of the model (default: 256)")
    add("--layers", type=int, default=4, help="number of layers (default: 4)")
    add("--context", type=int, default=64, help="bytes per row (default: 64)")
    add("--every", type=int, default=50, help="steps between checkpoints, and between evaluations (default: 50)")
    add("--profile", type=int, nargs=2, metavar=("FIRST", "LAST"), help="the first and the last step to profile")
    add("--simulate", type=int, metavar="N", help="simulate N CPU devices in this process")
    return parser.parse_args(arguments)


def parts_of(batch: Any, count: int) -> list[Any]:
    """A batch in equal parts, so that an evaluation processes no more rows at once than a step does."""
    return [jax.tree.map(lambda a, k=k: a[k::count], batch) for k in range(count)]


def train(args: argparse.Namespace) -> Any:
    zero = zerojax.Zero(zerojax.make_mesh(), args.stage, args.precision)
    microbatches = zero.num_microbatches(args.batch, args.most_rows)  # more of them on fewer devices
    config = {name: value for name, value in vars(args).items() if name not in ("directory", "profile", "simulate")}
    config["microbatches"] = microbatches
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
        config=config,
        checkpoints={"every": args.every, "spike": 3.0},
        profile=args.profile and tuple(args.profile),
    )


def main() -> None:
    args = parse()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    if args.simulate:
        zerojax.simulate_devices(args.simulate)
    processes.initialize()
    train(args)


if __name__ == "__main__":
    main()
