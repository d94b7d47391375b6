"""Measures a step whose optimizer is on a local disk, next to what the disk reaches and to other places of a state.

    python scripts/benchmarks/disk.py --dir /mnt/nvme         # a table
    python scripts/benchmarks/disk.py --dir /mnt/nvme --json  # one JSON object
    python scripts/benchmarks/disk.py --layers 1 --width 64   # to try the script

A GPT in bf16 with AdamW trains on a few tokens, so that a step is little more than an update: 12 bytes of a parameter
are read, and as many written. Forms: the optimizer on the device, in host memory, and on the disk. `gradient` is the
first of them without its update: the update on the disk takes the rest of a step.

The disk is measured with `dd`, past the page cache: a file of as many bytes as the state is written, and read. The
limit is the time of both, one after the other. `both` is the time in which as many bytes are read and written at once,
record by record, by the threads and the buffers of an update that computes nothing. Runs are paired: in each round all
are measured, in an order that rotates. The results are medians over the rounds.
"""

import argparse
import functools
import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

FORMS = ("none", "optimizer", "disk")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="on the disk (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--seq", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--simulate", type=int, metavar="N", help="on N simulated CPU devices")
    return parser.parse_args()


def main():
    args = arguments()
    import zerojax

    if args.simulate:
        zerojax.simulate_devices(args.simulate)
    import jax
    from timing import ratio, rotated, versions

    with tempfile.TemporaryDirectory(dir=args.dir) as directory:
        forms = {name: Form(name, args, directory) for name in FORMS}
        state_bytes = forms["disk"].state_bytes
        measured = {
            "gradient": forms["none"].gradient,
            **{name: form.step for name, form in forms.items()},
            "dd write": lambda: dd(directory, state_bytes, "write"),
            "dd read": lambda: dd(directory, state_bytes, "read"),
            "both": forms["disk"].move,
        }
        dd(directory, state_bytes, "write")  # what is read in the first round
        seconds = {name: [] for name in measured}
        for i in range(args.rounds + 1):
            for name in rotated(list(measured), i):
                start = time.perf_counter()
                measured[name]()
                if i:  # the first round compiles
                    seconds[name].append(time.perf_counter() - start)
        losses = {name: [float(loss) for loss in form.losses] for name, form in forms.items()}
    limit = [write + read for write, read in zip(seconds["dd write"], seconds["dd read"], strict=True)]
    update = [step - gradient for step, gradient in zip(seconds["disk"], seconds["gradient"], strict=True)]
    result = {
        "state_bytes": state_bytes,
        "num_params": forms["disk"].num_params,
        "seconds": {name: statistics.median(each) for name, each in seconds.items()},
        "limit_s": statistics.median(limit),
        "update_s": statistics.median(update),
        "update_of_limit": ratio(limit, update),
        "both_of_limit": ratio(limit, seconds["both"]),
        "losses": losses,
        "shapes": {key: getattr(args, key) for key in ("layers", "width", "vocab", "seq", "rounds")},
        "device": {"kind": jax.devices()[0].device_kind, "count": jax.device_count()},
        "versions": versions(),
    }
    print(json.dumps(result)) if args.json else table(result)


class Form:
    """A state with its step."""

    def __init__(self, name, args, directory):
        import gpt
        import jax
        import jax.numpy as jnp
        import numpy as np
        import optax
        from flax import nnx

        import zerojax

        config = gpt.Config(
            width=args.width, layers=args.layers, heads=args.width // 64, vocab=args.vocab, seq=args.seq,
            scan=True, dtype=jnp.bfloat16, attention="xla", final_norm=True,
        )  # fmt: skip
        where = {"offload": "optimizer"} | ({"offload_dir": directory} if name == "disk" else {})
        zero = zerojax.Zero(zerojax.make_mesh(), 3, "bf16", **({} if name == "none" else where))
        self.state = zero.init(gpt.create(config), optax.adamw(1e-3))
        self.train, self.losses = zero.train_step(gpt.loss), []
        merge = functools.partial(nnx.merge, nnx.graphdef(self.state.model()))
        self.value_and_grad = jax.jit(zero.value_and_grad(lambda params, batch: gpt.loss(merge(params), batch)))
        rows = gpt.batch_aval(config, jax.device_count())["tokens"]
        self.batch = {"tokens": np.random.default_rng(0).integers(0, config.vocab, rows.shape, np.int32)}
        self.num_params = sum(leaf.size for leaf in self.state.layout.leaves)
        arrays = jax.tree.leaves((self.state.master, self.state.opt_state))
        self.state_bytes = sum(a.nbytes for a in arrays if a.ndim)

    def step(self):
        import jax

        self.state, metrics = self.train(self.state, self.batch)
        jax.block_until_ready((self.state.params, metrics))
        self.losses.append(metrics["loss"])

    def gradient(self):
        import jax

        jax.block_until_ready(self.value_and_grad(self.state.params, self.batch))

    def move(self):
        """Reads and writes the whole state, record by record, as an update does."""
        import jax

        from zerojax.offload import disk_update

        file = next(a for a in jax.tree.leaves(self.state.master) if a.ndim).file
        order = [(k, c) for k in file.parameters for c in range(file.count(k))]
        with disk_update.Records(file, order) as records:
            for k, c in order:
                records.rewrite(k, c)


def dd(directory, num_bytes, what):
    """Writes or reads a file of as many bytes, past the page cache."""
    block = 2**24
    path, count = Path(directory) / "dd", -(-num_bytes // block)
    files = ["if=/dev/zero", f"of={path}", "oflag=direct", "conv=notrunc"]
    if what == "read":
        files = [f"if={path}", "of=/dev/null", "iflag=direct"]
    subprocess.run(["dd", f"bs={block}", f"count={count}", *files], check=True, stderr=subprocess.DEVNULL)


def table(result):
    from rich.console import Console
    from rich.table import Table

    size, seconds = result["state_bytes"], result["seconds"]
    rows = Table("", "seconds", "GB/s", title=f"{result['num_params'] / 1e6:.0f} M parameters, {size / 1e9:.2f} GB")
    moved = {"dd write": size, "dd read": size, "both": 2 * size, "disk": 2 * size}
    for column in rows.columns[1:]:
        column.justify = "right"
    for name, each in seconds.items():
        rows.add_row(name, f"{each:.2f}", f"{moved[name] / each / 1e9:.2f}" if name in moved else "")
    console = Console()
    console.print(rows)
    console.print(
        f"The update on the disk takes {result['update_s']:.2f} s: {result['update_of_limit']:.0%} of dd's rate."
    )
    console.print(f"Its reads and writes without computation run at {result['both_of_limit']:.0%} of dd's rate.")
    for name in ("none", "optimizer"):
        same = result["losses"]["disk"] == result["losses"][name]
        console.print(f"Losses on the disk and with '{name}' are {'bit for bit the same' if same else 'not the same'}.")


if __name__ == "__main__":
    main()
