"""Measures the cost of checkpoints: steps during a save, restores, and host memory.

    python scripts/benchmarks/checkpoints.py [--width 1024] [--layers 16] [--json FILE]

Runs on eight simulated devices of one process. The time of a step during a save is divided by that of a step without
one, and the time of a restore by that of reading the same files; both are medians of pairs that alternate in one run.
Memory is the growth of the largest resident size of a fresh process and those that it starts. It is given as a multiple
of the bytes of all shards of the process (here the whole state) and of the largest shard. The memory of the step that
runs during a save is subtracted, because real devices compute in their own memory.
"""

import argparse
import contextlib
import ctypes
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

DEVICES = 8


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--part", choices=PARTS, help="run one part in this process and print JSON")
    parser.add_argument("--directory", type=Path, help="the directory of the checkpoints, for --part")
    return parser.parse_args(argv)


def make_training(args):
    """(zero, create_model, optimizer, loss, batch)."""
    import jax
    import jax.numpy as jnp
    import optax

    import zerojax

    zerojax.simulate_devices(DEVICES)
    create = lambda key: {"layers": jax.random.normal(key, (args.layers, args.width, args.width)) / args.width**0.5}

    def loss(params, batch):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"], params["layers"])
        return jnp.mean(x**2)

    zero = zerojax.Zero(zerojax.make_mesh(), 3, "bf16", stacked=("layers",))
    batch = {"x": np.random.default_rng(0).normal(size=(128, args.width)).astype(np.float32)}
    return zero, create, optax.adamw(1e-3), loss, batch


class ResidentGrowth:
    """Context manager: measures the growth of the process's largest resident size, in bytes (`num_bytes`)."""

    def __enter__(self):
        ctypes.CDLL(None).malloc_trim(0)  # returns freed memory to the system
        self.before = self.most = resident()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self):
        while not self.ended.wait(0.005):
            self.most = max(self.most, resident())

    def __exit__(self, *_):
        self.ended.set()
        self.thread.join()
        self.num_bytes = self.most - self.before


def resident():
    """The resident size of this process and of those that it started, in bytes."""
    found = 0
    for process in (Path("/proc/self"), *_children()):
        with contextlib.suppress(OSError):  # it has ended
            found += int((process / "statm").read_text().split()[1]) * resource.getpagesize()
    return found


def _children():
    return [
        Path("/proc", pid) for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()
    ]


def sizes(state):
    """The bytes of all saved shards, and of the largest one."""
    import jax

    shards = [
        shard.data.nbytes
        for leaf in jax.tree.leaves((state.master, state.opt_state))
        for shard in leaf.addressable_shards
    ]
    return {"saved_bytes": sum(shards), "largest_shard_bytes": max(shards)}


def save(args):
    import jax

    zero, create, tx, loss, batch = make_training(args)
    state, step = zero.init(create, tx), zero.train_step(loss)
    times = {"during a save": [], "alone": []}
    for _ in range(2):
        state, _ = jax.block_until_ready(step(state, batch))
    with zero.checkpoints(args.directory, keep=1) as checkpoints:
        checkpoints.save(state)  # compiles the digests
        checkpoints.wait()

        def timed(kind):
            nonlocal state
            begin = time.perf_counter()
            state, _ = jax.block_until_ready(step(state, batch))
            times[kind].append(time.perf_counter() - begin)

        blocked, memory = [], []
        for _ in range(args.rounds):
            with ResidentGrowth() as alone:  # simulated devices compute in host memory
                timed("alone")
            with ResidentGrowth() as growth:
                begin = time.perf_counter()
                checkpoints.save(state)
                blocked.append(time.perf_counter() - begin)
                timed("during a save")
                checkpoints.wait()
            memory.append(growth.num_bytes - alone.num_bytes)
    medians = {kind: statistics.median(each) for kind, each in times.items()}
    ratio = statistics.median(a / b for a, b in zip(times["during a save"], times["alone"], strict=True))
    found = {"step_s": medians, "step_ratio": ratio, "blocked_s": statistics.median(blocked)}
    return found | {"save_bytes": max(memory), **sizes(state)}


def restore(args):
    import jax

    zero, create, tx, _, _ = make_training(args)
    avals = zero.eval_init(create, tx)
    with zero.checkpoints(args.directory) as checkpoints:
        with ResidentGrowth() as growth:  # only for the first restore: later ones reuse memory that was freed
            state, _ = jax.block_until_ready(checkpoints.resume(avals))  # compiles the digests
        times = []
        for _ in range(args.rounds):
            jax.tree.map(lambda a: a.delete(), state)
            begin = time.perf_counter()
            state, _ = jax.block_until_ready(checkpoints.resume(avals))
            times.append([time.perf_counter() - begin])
            begin = time.perf_counter()
            for file in args.directory.rglob("*"):
                if file.is_file():
                    file.read_bytes()
            times[-1].append(time.perf_counter() - begin)
    ratio = statistics.median(ours / read for ours, read in times)
    on_devices = sizes(state)["saved_bytes"]  # simulated devices hold their arrays in host memory
    params = sum(leaf.nbytes for leaf in jax.tree.leaves(state.params))
    median = [statistics.median(each) for each in zip(*times, strict=True)]
    return {"restore_s": median[0], "read_s": median[1], "restore_ratio": ratio,
            "restore_bytes": growth.num_bytes - on_devices - params}  # fmt: skip


def export(args):
    from zerojax.checkpoints import store
    from zerojax.exchange.parameters import export

    step = store.steps(args.directory)[-1]
    with tempfile.TemporaryDirectory() as folder, ResidentGrowth() as growth:
        begin = time.perf_counter()
        export(args.directory, step, folder, dtype="bfloat16")
        seconds = time.perf_counter() - begin
    return {"export_s": seconds, "export_bytes": growth.num_bytes}


PARTS = {"save": save, "restore": restore, "export": export}


def main():
    args = arguments()
    if args.part:
        print(json.dumps(PARTS[args.part](args)))
        return
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        for part in PARTS:
            shapes = ["--width", args.width, "--layers", args.layers, "--rounds", args.rounds]
            command = [sys.executable, __file__, "--part", part, "--directory", directory, *shapes]
            ended = subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE, text=True)
            found |= json.loads(ended.stdout.splitlines()[-1])
    show(found)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=2))


def show(found):
    from rich.console import Console
    from rich.table import Table

    mib = lambda name: f"{found[name] / 2**20:,.0f} MiB"
    times = lambda name: (
        f"{mib(name)}: {found[name] / found['saved_bytes']:.2f} times the state, "
        f"{found[name] / found['largest_shard_bytes']:.1f} times the largest shard"
    )
    table = Table(title=f"A state of {mib('saved_bytes')} on {DEVICES} simulated devices", show_header=False)
    table.add_row("step during a save, relative to one without", f"{found['step_ratio']:.2f}")
    table.add_row("time for which a save blocks the loop", f"{found['blocked_s'] * 1e3:,.0f} ms")
    table.add_row("host memory of a save, without that of a step", times("save_bytes"))
    table.add_row("restore, relative to reading its files", f"{found['restore_ratio']:.2f}, {found['restore_s']:.2f} s")
    table.add_row("host memory of a restore, without the state", times("restore_bytes"))
    table.add_row("export of the parameters", f"{found['export_s']:.2f} s")
    table.add_row("host memory of an export", times("export_bytes"))
    Console().print(table)


if __name__ == "__main__":
    main()
