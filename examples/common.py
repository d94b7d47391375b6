"""What the examples share: their flags, the devices that they run on, and the pieces of a job."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import optax

import zerojax
from zerojax import processes


class Job(NamedTuple):
    """The pieces of a training job, none of which knows of zerojax's steps: a plain script can train it as well.

    Attributes:
        model: what `zero.init` creates the state from.
        loss_fn: `loss_fn(model, batch)` or `loss_fn(model, batch, key)`, as `zero.train_step` takes it.
        optimizer: any Optax transformation.
        batch: `batch(i)` returns the batch of step i + 1, with the rows of all processes.
        zero_options: options of `zerojax.Zero`, such as `frozen`.
        step_options: options of `zero.train_step`, such as `clip_norm`.
        test_loss_fn: `test_loss_fn(model, batch)` returns the loss and the metrics of a test, without collectives.
        test: the test set, with any number of rows.
    """

    model: Any
    loss_fn: Callable[..., Any]
    optimizer: optax.GradientTransformation
    batch: Callable[[int], Any]
    zero_options: Mapping[str, Any] = {}
    step_options: Mapping[str, Any] = {}
    test_loss_fn: Callable[..., Any] | None = None
    test: Any = None


def parser(description: str | None, steps: int, precision: str = "fp32") -> argparse.ArgumentParser:
    """A parser with the flags that all examples have. `steps` and `precision` are the defaults of those flags."""
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = result.add_argument
    add("--out", type=pathlib.Path, required=True, metavar="DIR", help="the directory of the run")
    add("--resume", action="store_true", help="continue the run in DIR from its newest checkpoint")
    add("--steps", type=int, default=steps, metavar="N", help=f"steps of the whole run (default: {steps})")
    add("--stage", type=int, default=3, choices=range(4), help="ZeRO stage (default: 3)")
    add("--devices", type=int, metavar="N", help="simulate N CPU devices (default: the devices that there are)")
    add("--precision", default=precision, metavar="PRESET", help=f"fp32, bf16, ... (default: {precision})")
    add("--remat", default="auto", metavar="POLICY", help="none, dots, full, ... (default: auto)")
    return result


def start(args: argparse.Namespace) -> None:
    """Makes the devices available, joins the processes, and refuses a directory that has a run without --resume."""
    if args.devices:
        zerojax.simulate_devices(args.devices)
    processes.initialize()
    if not args.resume and (args.out / "checkpoints").exists():
        raise SystemExit(f"{args.out} has a run: pass --resume to continue it, or another directory with --out")


def tester(zero: zerojax.Zero, job: Job) -> Callable[[zerojax.TrainState], dict[str, float]]:
    """Returns a function of a state that evaluates it on the whole test set. Processes share the rows."""
    step, own = zero.eval_step(job.test_loss_fn), slice(jax.process_index(), None, jax.process_count())
    rows = jax.tree.map(lambda a: a[own], job.test)
    return lambda state: zerojax.evaluate(step, state, rows, batch_size=256)
