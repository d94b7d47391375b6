"""Measures the cost of checkpoints: steps during a save, restores, and host memory.

    python scripts/benchmarks/checkpoints.py [--width 1024] [--layers 16] [--json FILE]

Runs on eight simulated devices of one process, in the directory for temporary files (`TMPDIR`), which should be on a
disk. The time until a save is complete is compared with that of a save that does not wait for the disk (`fsync`), of
Orbax alone, and of writing a file of the same size; the time of a step during a save with that of a step without one;
and the time of a restore with that of reading the same files. All are medians of rounds that alternate in one process.
Memory is the growth of the largest resident size of a fresh process and those that it starts. It is given as a multiple
of the bytes of all shards of the process (here the whole state) and of the largest shard. The memory of the step that
runs during a save is subtracted, because real devices compute in their own memory.
"""

import argparse
import contextlib
import ctypes
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
from timing import ratio

DEVICES = 8
# What is compared: kinds of saves, and steps without any.
SYNCED, UNSYNCED, ORBAX, FILE, ALONE = "zerojax", "zerojax without fsync", "Orbax alone", "one file, synced", "none"


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
    for _ in range(2):
        state, _ = jax.block_until_ready(step(state, batch))
    with zero.checkpoints(args.directory, keep=1) as checkpoints:
        checkpoints.save(state)  # compiles the digests
        checkpoints.wait()
        blocked, memory = [], []
        for _ in range(args.rounds):
            with ResidentGrowth() as alone:  # simulated devices compute in host memory
                state, _ = jax.block_until_ready(step(state, batch))
            with ResidentGrowth() as growth:
                begin = time.perf_counter()
                checkpoints.save(state)
                blocked.append(time.perf_counter() - begin)
                state, _ = jax.block_until_ready(step(state, batch))
                checkpoints.wait()
            memory.append(growth.num_bytes - alone.num_bytes)
    return {"blocked_s": statistics.median(blocked), "save_bytes": max(memory), **sizes(state)}


def durability(args):
    """The seconds until saves of each kind are complete, and those of steps, alone and during saves of each kind."""
    import jax
    import orbax.checkpoint as ocp

    from zerojax.utils import files

    zero, create, tx, loss, batch = make_training(args)
    state, step = zero.init(create, tx), zero.train_step(loss)
    other, syncs = args.directory / "other", (files.sync, files.sync_tree)
    saves, steps, num_bytes = defaultdict(list), defaultdict(list), 0

    def train(kind):
        nonlocal state
        begin = time.perf_counter()
        state, _ = jax.block_until_ready(step(state, batch))
        steps[kind].append(time.perf_counter() - begin)

    def write():
        part = np.random.default_rng(0).bytes(2**24)
        with other.open("wb") as file:
            for _ in range(num_bytes // len(part)):
                file.write(part)
            os.fsync(file.fileno())

    def delete():
        nonlocal num_bytes
        for folder in args.directory.glob("ours/step_*"):
            num_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            shutil.rmtree(folder)
        shutil.rmtree(other) if other.is_dir() else other.unlink(missing_ok=True)
        os.sync()

    def measure(kind, save, wait, trains):
        files.sync, files.sync_tree = (lambda _: None,) * 2 if kind == UNSYNCED else syncs
        train(ALONE)  # also because a step is saved only once
        begin = time.perf_counter()
        save()
        waiting = threading.Thread(target=wait)
        waiting.start()
        while trains and waiting.is_alive():
            train(kind)
        waiting.join()
        if not trains:
            saves[kind].append(time.perf_counter() - begin)
        delete()

    with zero.checkpoints(args.directory / "ours", keep=None) as checkpoints, ocp.StandardCheckpointer() as orbax:
        ours = lambda: checkpoints.save(state), checkpoints.wait
        theirs = lambda: orbax.save(other, (state.master, state.opt_state)), orbax.wait_until_finished
        kinds = {SYNCED: ours, UNSYNCED: ours, ORBAX: theirs, FILE: (lambda: None, write)}
        for k in range(args.rounds + 1):
            if k == 1:  # the first round has compiled the digests
                saves.clear(), steps.clear()
            for kind, (save, wait) in kinds.items():
                for trains in (False, True):
                    measure(kind, save, wait, trains)
                print(f"round {k} of {args.rounds}: {kind}: {saves[kind][-1]:.2f} s", file=sys.stderr)
    return {"saves_s": saves, "steps_s": steps, "written_bytes": num_bytes}


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


PARTS = {"durability": durability, "save": save, "restore": restore, "export": export}


def main():
    args = arguments()
    if args.part:
        print(json.dumps(PARTS[args.part](args)))
        return
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        found["file_system"] = subprocess.check_output(["findmnt", "-no", "FSTYPE", "-T", directory], text=True).strip()
        for part in PARTS:
            shapes = ["--width", args.width, "--layers", args.layers, "--rounds", args.rounds]
            folder = f"{directory}/{part}" if part == "durability" else directory
            command = [sys.executable, __file__, "--part", part, "--directory", folder, *shapes]
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
    table.add_row("time for which a save blocks the loop", f"{found['blocked_s'] * 1e3:,.0f} ms")
    table.add_row("host memory of a save, without that of a step", times("save_bytes"))
    table.add_row("restore, relative to reading its files", f"{found['restore_ratio']:.2f}, {found['restore_s']:.2f} s")
    table.add_row("host memory of a restore, without the state", times("restore_bytes"))
    table.add_row("export of the parameters", f"{found['export_s']:.2f} s")
    table.add_row("host memory of an export", times("export_bytes"))
    Console().print(table)
    saves, steps, alone = found["saves_s"], found["steps_s"], statistics.median(found["steps_s"][ALONE])
    table = Table("", "complete after", "times the file", "a step meanwhile", "times one alone", title="Saves")
    table.columns[0].no_wrap = True
    for kind, seconds in saves.items():
        median, step = statistics.median(seconds), statistics.median(steps[kind])
        relative = ratio(seconds, saves[FILE])
        table.add_row(kind, f"{median:.2f} s", f"{relative:.2f}", f"{step:.2f} s", f"{step / alone:.2f}")
    table.caption = f"{mib('written_bytes')} in files; a step alone takes {alone:.2f} s; on {found['file_system']}"
    Console().print(table)


if __name__ == "__main__":
    main()
