"""Times one training step of zerojax against the same GPT and optimizer with plain `jit` and `NamedSharding`.

    python scripts/benchmarks/step.py                 # a table
    python scripts/benchmarks/step.py --json          # one JSON object
    python scripts/benchmarks/step.py --unrolled --layers 48 --rounds 0 --compiles 3      # tracing and compiling alone
    python scripts/benchmarks/step.py --devices 6 --rows 60 --heads 2 --width 250 --plain-width 252      # padded shards

Eight simulated CPU devices share the cores of this machine, so the benchmark compares the work of the whole step and
not a network. Plain forms:

    constrained  parameters are sharded, gathered by a sharding constraint at the start of the loss, and gradients are
                 constrained to shards
    inferred     parameters are sharded, and everything else is left to the compiler
    replicated   data parallelism

Stage 3 of zerojax is compared with the faster of the first two, and stage 0 with the last. Runs are paired: in each
round every form runs once, in rotating order, and each ratio is that of the two times of one round. With `--rounds 0`
only the sharded forms are compiled. Flops are given for unrolled layers only, because XLA counts the body of a loop
once, and the loops of the forms differ.
"""

import argparse
import dataclasses
import json
import os
import statistics
import time

from timing import ratio, rotated, versions


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--devices", type=int, default=8, help="simulated devices (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="paired runs (default %(default)s; 0: only compile)")
    parser.add_argument("--compiles", type=int, default=1, help="paired compilations (default %(default)s)")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--plain-width", type=int, help="of the plain forms, if their devices divide another one")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--rows", type=int, default=64, help="sequences per step, over all devices")
    parser.add_argument(
        "--prefetch", type=int, default=1, help="units that zerojax gathers ahead (default %(default)s)"
    )
    parser.add_argument("--unrolled", action="store_true", help="a list of layers instead of a scanned stack")
    return parser.parse_args()


def main():
    args = arguments()
    # Otherwise, the transposed products of weight gradients may take code paths whose speeds differ by up to 2.7 times,
    # even in equal programs.
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_experimental_ynn_fusion_type="
    import zerojax

    zerojax.simulate_devices(args.devices)
    import gpt
    import numpy as np
    import plain
    from rich.console import Console

    config = gpt.Config(
        width=args.width, layers=args.layers, heads=args.heads, vocab=256, seq=args.seq, scan=not args.unrolled
    )  # fmt: skip
    same = args.plain_width in (None, args.width)
    plain_config = config if same else dataclasses.replace(config, width=args.plain_width)
    batch = {"tokens": np.random.default_rng(0).integers(0, 256, (args.rows, args.seq + 1), np.int32)}
    forms = {
        "zero3": ours(3, config, args.prefetch),
        "constrained": plain.whole_model("constrained", plain_config),
        "inferred": plain.whole_model("inferred", plain_config),
    }
    if args.rounds:
        forms |= {"zero0": ours(0, config, args.prefetch), "replicated": plain.whole_model("replicated", plain_config)}
    runs = {name: Run(*form, batch, args.unrolled) for name, form in forms.items()}
    progress = Console(stderr=True, highlight=False)  # lines, because a spinner would disturb the measured times
    for i in range(args.compiles):
        progress.print(f"compiling {i + 1} of {args.compiles}")
        for name in rotated(list(runs), i):
            runs[name].compile()
    for i in range(args.rounds + 1 if args.rounds else 0):  # the first round is discarded
        progress.print(f"round {i} of {args.rounds}")
        for name in rotated(list(runs), i):
            runs[name].once(keep=i > 0)
    fastest = lambda times: min(("constrained", "inferred"), key=lambda name: statistics.median(times(runs[name])))
    sharded = fastest(lambda run: run.wall or run.compile_s)
    pairs = [("", runs["zero3"], runs[sharded])]
    if args.rounds:
        pairs.append(("replicated_", runs["zero0"], runs["replicated"]))
    result = {
        **{key: value for prefix, mine, theirs in pairs for key, value in compare(prefix, mine, theirs).items()},
        "compile_ratio": ratio(runs["zero3"].compile_s, runs[fastest(lambda run: run.compile_s)].compile_s),
        "plain": sharded,
        "forms": {name: run.summary() for name, run in runs.items()},
        "shapes": {**{k: v for k, v in vars(args).items() if k != "json"}, "vocab": 256},
        "versions": versions(),
        "device": f"{args.devices} simulated devices, {os.cpu_count()} cores",
    }
    if args.rounds and same:
        assert abs(runs["zero3"].first_loss / runs[sharded].first_loss - 1) < 1e-5, "the forms compute different losses"
    print(json.dumps(result)) if args.json else table(result)


def compare(prefix, mine, theirs):
    return {
        f"{prefix}ratio": ratio(mine.wall, theirs.wall),
        f"{prefix}cpu_ratio": ratio(mine.cpu, theirs.cpu),
        f"{prefix}peak_ratio": mine.peak_bytes / theirs.peak_bytes,
        f"{prefix}flops_ratio": mine.flops / theirs.flops if mine.flops else None,
    }


class Run:
    """A compiled step, with its state and its measured times."""

    def __init__(self, state, lower, batch, counts_flops):
        self.state, self.lower, self.host_batch, self.counts_flops = state, lower, batch, counts_flops
        self.compile_s, self.wall, self.cpu, self.first_loss = [], [], [], None

    def compile(self):
        import jax

        from zerojax.analysis.hlo_collectives import peak_bytes

        jax.clear_caches()
        start = time.perf_counter()
        self.compiled = self.lower(self.state, self.host_batch).compile()
        self.compile_s.append(time.perf_counter() - start)
        self.peak_bytes = peak_bytes(self.compiled.memory_analysis())
        self.flops = self.compiled.cost_analysis()["flops"] if self.counts_flops else None
        self.batch = jax.tree.map(jax.device_put, self.host_batch, self.compiled.input_shardings[0][1])

    def once(self, keep):
        import jax

        wall, cpu = time.perf_counter(), time.process_time()
        self.state, loss = self.compiled(self.state, self.batch)
        jax.block_until_ready((self.state, loss))
        if keep:
            self.wall.append(time.perf_counter() - wall)
            self.cpu.append(time.process_time() - cpu)
        if self.first_loss is None:
            self.first_loss = float(loss["loss"] if isinstance(loss, dict) else loss)

    def summary(self):
        return {
            "step_s": statistics.median(self.wall) if self.wall else None,
            "cpu_s": statistics.median(self.cpu) if self.cpu else None,
            "peak_bytes": self.peak_bytes,
            "flops": self.flops,
            "compile_s": statistics.median(self.compile_s),
        }


def ours(stage, config, prefetch):
    import gpt
    import optax

    import zerojax

    zero = zerojax.Zero(zerojax.make_mesh(), stage=stage)
    state = zero.init(gpt.create(config), optax.adamw(1e-3))
    return state, zero.train_step(gpt.loss, prefetch=prefetch).lower


def table(result):
    from rich.console import Console
    from rich.table import Table

    rows = Table("form", "step ms", "processor ms", "peak MiB", "Gflop", "compile s", title="One training step")
    for column in rows.columns[1:]:
        column.justify = "right"
    shown = lambda value, digits: "" if value is None else f"{value:.{digits}f}"
    for name, form in result["forms"].items():
        times = [shown(form[key] and form[key] * 1e3, 1) for key in ("step_s", "cpu_s")]
        sizes = [shown(form["peak_bytes"] / 2**20, 1), shown(form["flops"] and form["flops"] / 1e9, 3)]
        rows.add_row(name, *times, *sizes, shown(form["compile_s"], 1))
    console = Console()
    console.print(rows)
    for title, prefix in ((f"stage 3 / {result['plain']}", ""), ("stage 0 / replicated", "replicated_")):
        if prefix + "ratio" not in result:
            continue
        named = {"time": "ratio", "processor": "cpu_ratio", "peak": "peak_ratio", "flops": "flops_ratio"}
        parts = [f"{text} {shown(result[prefix + key], 3)}" for text, key in named.items() if result[prefix + key]]
        console.print(f"{title}: {', '.join(parts)}", soft_wrap=True)
    console.print(f"stage 3 / the faster plain form: tracing and compiling {result['compile_ratio']:.2f}")


if __name__ == "__main__":
    main()
