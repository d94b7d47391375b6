"""Trains the GPT of the demo with AdamW and with its low-bit forms, and compares losses and bytes.

    python scripts/benchmarks/low_bit.py                          # a table
    python scripts/benchmarks/low_bit.py --steps 500 --json

The model, the optimizer and the text are those of `scripts/demo`: the text is the source of Python's standard library.
All runs start from the same weights and see the same batches, at stage 3 on simulated devices. The loss is that of rows
that no run is trained on, after the last step. Bytes are those of the arrays of the state on all devices together, for
each parameter; moments of arrays with fewer elements than `--min-size` stay in fp32.
"""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rows", type=int, default=32, help="rows of a batch (default %(default)s)")
    parser.add_argument("--devices", type=int, default=2, help="simulated devices (default %(default)s)")
    parser.add_argument("--min-size", type=int, default=512, help="see zerojax.low_bit_moments (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="runs, whose mean is shown (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    return parser.parse_args()


def main():
    args = arguments()
    import zerojax

    zerojax.simulate_devices(args.devices)
    from rich.console import Console
    from timing import versions

    forms = {
        "AdamW": ("bf16", lambda tx: tx),
        "moments in bf16": ("bf16", lambda tx: zerojax.low_bit_moments(tx, 16, min_size=args.min_size)),
        "moments in 8 bits": ("bf16", lambda tx: zerojax.low_bit_moments(tx, 8, min_size=args.min_size)),
        "parameters in bf16": ("bf16_params", zerojax.stochastic_rounding),
        "both, 16 bits": (
            "bf16_params",
            lambda tx: zerojax.stochastic_rounding(zerojax.low_bit_moments(tx, 16, min_size=args.min_size)),
        ),
        "both, 8 bits": (
            "bf16_params",
            lambda tx: zerojax.stochastic_rounding(zerojax.low_bit_moments(tx, 8, min_size=args.min_size)),
        ),
    }
    rows = []
    with Console(stderr=True).status("") as status:
        for name, (precision, form) in forms.items():
            start, losses = time.perf_counter(), []
            for seed in range(args.seeds):
                status.update(f"{name}, seed {seed}")
                loss, held = train(args, precision, form, seed)
                losses.append(loss)
            rows.append({"form": name, "losses": losses, **held, "seconds": time.perf_counter() - start})
    result = {"rows": rows, "settings": vars(args), "versions": versions()}
    print(json.dumps(result)) if args.json else table(result)


def train(args, precision, form, seed):
    """(The loss of rows that were not trained on, bytes for each parameter)."""
    import demo
    import jax
    import numpy as np
    import text

    import zerojax

    source = text.load()
    batches = (text.batch(source, args.rows, demo.CONTEXT, 1000 * seed + k) for k in range(args.steps))
    zero = zerojax.Zero(zerojax.make_mesh(), stage=3, precision=precision)
    state = zero.init(demo.create_model, form(demo.create_optimizer(args.steps)), seed=seed)
    step, evaluate = zero.train_step(demo.loss_fn, clip_norm=demo.CLIP_NORM), zero.eval_step(demo.loss_fn)
    psi = sum(leaf.size for leaf in state.layout.leaves)
    held = {
        "parameters_bytes": sum(a.nbytes for a in jax.tree.leaves(state.params)) / psi,
        "optimizer_bytes": sum(a.nbytes for a in jax.tree.leaves((state.opt_state, state.master))) / psi,
    }
    for batch in batches:
        state, _ = step(state, batch)
    unseen = (text.batch(source, 128, demo.CONTEXT, 10**6 + k) for k in range(8))
    return float(np.mean([evaluate(state, batch)["loss"] for batch in unseen])), held


def table(result):
    from rich.console import Console
    from rich.table import Table

    mean = lambda row: sum(row["losses"]) / len(row["losses"])
    first = mean(result["rows"][0])
    shown = Table("", "loss", "of AdamW's", "bytes of parameters", "of the optimizer", "with gradients")
    for column in shown.columns[1:]:
        column.justify = "right"
    for row in result["rows"]:
        parameters, optimizer = row["parameters_bytes"], row["optimizer_bytes"]
        held = f"{parameters:.2f}", f"{optimizer:.2f}", f"{parameters + optimizer + 2:.2f}"
        shown.add_row(row["form"], f"{mean(row):.4f}", f"{mean(row) / first - 1:+.2%}", *held)
    Console(width=None if Console().is_terminal else 110).print(shown)


if __name__ == "__main__":
    main()
