"""Trains for many steps with saves and evaluations, and shows what grows: memory, file descriptors, threads, step time.

    python scripts/benchmarks/soak.py [--steps 2000] [--every 10] [--copy] [--json FILE]

Each quarter of the run has a row. Times are medians over its steps; memory, descriptors and threads are the largest
values at the end of a step, after garbage is collected. The last line compares the last quarter with the first. With
--copy, steps are also copied to a folder through fsspec, as to remote storage.
"""

import argparse
import gc
import json
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

WIDTH, ROWS, DEVICES, QUARTERS = 128, 16, 4, 4


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=10, help="steps between two saves")
    parser.add_argument("--copy", action="store_true", help="copy each step to a second folder")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


def sample():
    """(resident bytes, file descriptors, threads) of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd")), threading.active_count()


def run(args, directory):
    """The samples after each step: (seconds since the step before, resident bytes, descriptors, threads)."""
    import jax
    import jax.numpy as jnp
    import optax

    import zerojax

    zerojax.simulate_devices(DEVICES)

    def create(key):
        keys = jax.random.split(key, 4)
        return {f"layers/{i}": {"w": jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH} for i, k in enumerate(keys)}

    def loss(params, batch):
        x = batch
        for layer in params.values():
            x = jnp.tanh(x @ layer["w"])
        return jnp.mean((x - 1) ** 2)

    samples, last = [], time.perf_counter()

    def data(i):
        nonlocal last
        now = time.perf_counter()
        if i % args.every == 0:
            gc.collect()
        samples.append((now - last, *sample()))
        last = time.perf_counter()
        return np.random.default_rng(i).normal(size=(ROWS, WIDTH)).astype(np.float32)

    zero = zerojax.Zero(zerojax.make_mesh(), 3, "bf16")
    evaluation = zero.eval_step(loss)
    options = {"every": args.every, "watchdog_s": 300.0, "verify_replicas_every": args.every}
    options |= {"copy_to": f"file://{directory}/copy"} if args.copy else {}
    zerojax.fit(
        zero,
        zero.init(create, optax.adamw(1e-3)),
        zero.train_step(loss),
        data,
        args.steps,
        directory / "run",
        evaluate=lambda state: {"loss": evaluation(state, np.ones((ROWS, WIDTH), np.float32))["loss"]},
        evaluate_every=10 * args.every,
        checkpoints=options,
        writers=[],
        display=_NoDisplay(),
    )
    return samples


class _NoDisplay:
    def write(self, step, row):
        pass

    def close(self):
        pass


def quarters(samples):
    """For each quarter: median seconds of a step, and the largest bytes, descriptors and threads."""
    size = len(samples) // QUARTERS
    parts = [list(zip(*samples[i * size : (i + 1) * size], strict=True)) for i in range(QUARTERS)]
    return [(statistics.median(part[0]), *map(max, part[1:])) for part in parts]


def main():
    args = arguments()
    with tempfile.TemporaryDirectory() as directory:
        begin = time.perf_counter()
        found = quarters(run(args, Path(directory)))
        seconds = time.perf_counter() - begin
    names = ["step_s", "resident_bytes", "descriptors", "threads"]
    table = Table(title=f"{args.steps} steps, {args.steps // args.every} saves, {seconds:.0f} s", title_justify="left")
    for column in ("quarter", "step", "memory", "descriptors", "threads"):
        table.add_column(column, justify="right")
    for number, (step_s, num_bytes, *counts) in enumerate(found, 1):
        table.add_row(str(number), f"{step_s * 1e3:.1f} ms", f"{num_bytes / 2**20:,.0f} MiB", *map(str, counts))
    Console().print(table)
    ratios = dict(zip(names, (last / first for first, last in zip(found[0], found[-1], strict=True)), strict=True))
    print("last quarter / first: " + ", ".join(f"{name} {value:.2f}" for name, value in ratios.items()))
    if args.json:
        rows = [dict(zip(names, values, strict=True)) for values in found]
        Path(args.json).write_text(json.dumps({"quarters": rows, "ratios": ratios}, indent=2))


if __name__ == "__main__":
    main()
