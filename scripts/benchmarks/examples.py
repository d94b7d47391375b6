"""Trains the jobs of examples/train_*.py with zerojax, and on one device without it, and compares what they reach.

    scripts/test --examples                                              # makes the environment
    .venv-examples/bin/python scripts/benchmarks/examples.py             # a table, in about eight minutes
    .venv-examples/bin/python scripts/benchmarks/examples.py --only moe gnn --json results.json

Model, loss, optimizer and data are those of the example, in fp32. The plain step is `jax.jit` of `jax.value_and_grad`
and the optimizer (examples/one_device.py); zerojax runs on eight simulated devices.

    result       on the whole test set, after the last step
    difference   the largest difference of a loss from one device in the first 20 steps; training is chaotic later
    last         the difference of the mean of the last 20 losses
    s            all steps and the test, with compiling
    kB           of parameters and optimizer state on a device, from the shards of the arrays
    formula      4 bytes of a parameter and 8 of a trained one, each divided by the devices if the stage shards it
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from timing import versions

COMPARED, DEVICES, STAGES = 20, 8, (1, 3)
# name -> (module, options, the metric to show)
EXAMPLES = {
    "resnet": ("train_vision", [], "accuracy"),
    "vit": ("train_vision", ["--model", "vit"], "accuracy"),
    "moe": ("train_moe", [], "loss"),
    "gnn": ("train_gnn", [], "absolute_error"),
    "distill": ("train_distill", [], "accuracy"),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--only", nargs="+", choices=EXAMPLES, metavar="NAME", help=f"of {', '.join(EXAMPLES)}")
    parser.add_argument("--steps", type=int, metavar="N", help="steps of each run (default: those of the example)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    return parser.parse_args()


def job_of(name: str, num_steps: int | None, folder: Path) -> tuple[Any, int]:
    """(the job of an example, its number of steps)."""
    module, options, _ = EXAMPLES[name]
    options = ["--out", str(folder / name), *options, *(["--steps", str(num_steps)] if num_steps else [])]
    example = importlib.import_module(module)
    args = example.parse(options)
    with contextlib.redirect_stdout(sys.stderr):  # the teacher of a job may be trained first
        return example.job(args), args.steps


def formula_bytes(state: Any, stage: int) -> float:
    """Parameters in fp32 and two moments of those that are trained, on one device."""
    num_elements = lambda leaves: sum(math.prod(leaf.shape) for leaf in leaves)
    total = num_elements(state.layout.leaves)
    trained = num_elements(leaf for leaf in state.layout.leaves if leaf.trainable)
    return 4 * total / (DEVICES if stage == 3 else 1) + 8 * trained / (DEVICES if stage else 1)


def with_zerojax(job: Any, num_steps: int, stage: int) -> dict[str, Any]:
    import common
    from demo import bytes_per_device

    import zerojax

    begin = time.perf_counter()
    zero = zerojax.Zero(zerojax.make_mesh(), stage, **job.zero_options)
    state, losses = zero.init(job.model, job.optimizer), []
    step = zero.train_step(job.loss_fn, **job.step_options)
    for i in range(num_steps):
        state, metrics = step(state, job.batch(i))
        losses.append(float(metrics["loss"]))
    test = common.tester(zero, job)(state)
    return {
        "losses": losses,
        "test": test,
        "seconds": time.perf_counter() - begin,
        "bytes": bytes_per_device((state.params, state.opt_state)),
        "formula_bytes": formula_bytes(state, stage),
    }


def on_one_device(job: Any, num_steps: int) -> dict[str, Any]:
    import one_device

    begin = time.perf_counter()
    run = one_device.run(job, num_steps, DEVICES)
    return {"losses": run.losses, "test": run.test, "seconds": time.perf_counter() - begin}


def compared(name: str, num_steps: int | None, folder: Path) -> list[dict[str, Any]]:
    """A row for one device, and one for each stage."""
    job, num_steps = job_of(name, num_steps, folder)
    rows = [{"example": name, "stage": None, "steps": num_steps, **on_one_device(job, num_steps)}]
    want = np.array(rows[0]["losses"])
    for stage in STAGES:
        row = with_zerojax(job, num_steps, stage)
        got = np.array(row["losses"])
        row["difference"] = float(np.max(np.abs(got - want)[:COMPARED]))
        row["last_difference"] = float(np.mean(got[-COMPARED:]) - np.mean(want[-COMPARED:]))
        rows.append({"example": name, "stage": stage, "steps": num_steps, **row})
    return rows


def table(rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    title = f"Examples on {DEVICES} simulated devices, and on one without zerojax"
    shown = Table(
        "example", "run", title=title, title_justify="left", caption=", ".join(map(" ".join, versions().items()))
    )
    for column in ("steps", "result", "difference", "last", "s", "kB", "formula"):
        shown.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        metric = EXAMPLES[row["example"]][2]
        values = [str(row["steps"]), f"{metric.replace('_', ' ')} {row['test'][metric]:.4f}"]
        of_zerojax, memory = ["", ""], ["", ""]
        if row["stage"] is not None:
            of_zerojax = [f"{row['difference']:.0e}", f"{row['last_difference']:+.0e}"]
            memory = [f"{row['bytes'] / 1e3:.1f}", f"{row['formula_bytes'] / 1e3:.1f}"]
        run = "one device" if row["stage"] is None else f"stage {row['stage']}"
        name = row["example"] if row["stage"] is None else ""
        shown.add_row(name, run, *values, *of_zerojax, f"{row['seconds']:.0f}", *memory, end_section=row["stage"] == 3)
    return shown


def main() -> None:
    args = arguments()
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
    import zerojax

    zerojax.simulate_devices(DEVICES)
    from rich.console import Console

    rows, console = [], Console(width=None if Console().is_terminal else 120)
    with tempfile.TemporaryDirectory() as folder, Console(stderr=True).status("") as status:
        for name in args.only or EXAMPLES:
            status.update(name)
            rows += compared(name, args.steps, Path(folder))
    console.print(table(rows))
    if args.json:
        args.json.write_text(json.dumps({"versions": versions(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
