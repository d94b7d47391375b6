"""Trains the model of examples/pretrain_gpt.py in several forms, and draws their losses in one picture.

    python scripts/benchmarks/curves.py --picture /tmp/wire.png                   # what is sent: bf16 and 8 bits
    python scripts/benchmarks/curves.py --size large --steps 2000 --devices 2 --replica 1 --out /tmp/large.json
    python scripts/benchmarks/curves.py --forms AdamW Muon --picture /tmp/muon.png

All forms start from the same weights and see the same batches of the source of Python's standard library, on simulated
devices: 2 x 8, with `Zero(stage=3, outer_sharding='optimizer')`. The small model is that of the example, the large one
has 23 million parameters and rows of 16 tokens. The loss at the end is that of files that no form has been trained on.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

SIZES = {"small": {}, "large": {"width": 512, "layers": 7, "context": 16, "batch": 8, "rate": 1e-3}}
FORMS = {
    "bf16": {},
    "weights in int8": {"gather": "int8"},
    "weights and gradients in int8": {"gather": "int8", "scatter": "int8"},
    "weights and gradients in fp8": {"gather": "float8_e4m3fn", "scatter": "float8_e4m3fn"},
}
OPTIMIZERS = {"AdamW": "adamw", "Muon": "muon"}  # forms in bf16


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="small", help="of the model (default %(default)s)")
    parser.add_argument("--steps", type=int, default=700, help="default %(default)s")
    parser.add_argument("--replica", type=int, default=2, help="groups of devices (default %(default)s)")
    parser.add_argument("--devices", type=int, default=16, help="simulated devices (default %(default)s)")
    parser.add_argument(
        "--forms", nargs="+", choices=[*FORMS, *OPTIMIZERS], default=list(FORMS), help="default: bf16, int8, fp8"
    )
    parser.add_argument("--out", type=Path, help="a JSON file with the losses, to which other forms are added")
    parser.add_argument("--picture", type=Path, help="a PNG file")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    return parser.parse_args()


def main():
    args = arguments()
    import zerojax

    zerojax.simulate_devices(args.devices)
    from rich.console import Console

    found = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    with Console(stderr=True).status("") as status:
        for form in args.forms:
            if form not in found:
                found[form] = train(args, form, lambda text, form=form: status.update(f"{form}: {text}"))
            if args.out:
                args.out.write_text(json.dumps(found))
    if args.picture:
        draw(found, args.picture)
    print(json.dumps({"size": args.size, "steps": args.steps, "forms": found})) if args.json else table(found)


def train(args, form, show):
    """The loss of each step of a form, and that of other files after the last one."""
    import jax
    import pretrain_gpt as example

    import zerojax

    job = example.parse(["--out", "/dev/null", "--steps", str(args.steps)])
    vars(job).update(SIZES[args.size])
    precision = dataclasses.replace(zerojax.Precision.of("bf16"), **FORMS.get(form, {}))
    outer = "optimizer" if args.replica > 1 else "none"
    zero = zerojax.Zero(zerojax.make_mesh(replica=args.replica), 3, precision, outer_sharding=outer)
    tokenizer, training, held_out, config = example.prepared(job)
    tx = example.optimizer(job.steps, job.rate, OPTIMIZERS.get(form, "adamw"))
    state = zero.init(lambda rngs: example.Qwen3(config, rngs=rngs), tx)
    step, eval_step = zero.train_step(example.loss_fn, clip_norm=1.0), zero.eval_step(example.loss_fn)
    losses, rows = [], example.batches(training, job.batch)
    for i in range(job.steps):
        state, metrics = step(state, next(rows))
        losses.append(float(metrics["loss"]))
        show(f"step {i + 1}, loss {losses[-1]:.3f}")
    held = example.evaluate(eval_step, state, held_out, job.batch, tokenizer)["loss"]
    size = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    return {"losses": losses, "held_out_loss": held, "parameters": size}


def table(found):
    from rich.console import Console
    from rich.table import Table

    rows = Table("", "loss of other files", "ratio")
    first = next(iter(found.values()))["held_out_loss"]
    for form, each in found.items():
        rows.add_row(form, f"{each['held_out_loss']:.4f}", f"{each['held_out_loss'] / first:.4f}")
    Console().print(rows)


def draw(found, path):
    """The losses of all forms, as means over some steps, and below their ratios to those of the first form."""
    import matplotlib.pyplot as plt
    import numpy as np

    figure, (above, below) = plt.subplots(2, 1, figsize=(7, 5), sharex=True, height_ratios=[2, 1])
    first = None
    for form, each in found.items():
        width = max(1, len(each["losses"]) // 50)
        means = np.convolve(each["losses"], np.ones(width) / width, "valid")
        first = means if first is None else first
        steps = np.arange(width, width + len(means))
        above.plot(steps, means, label=f"{form}: {each['held_out_loss']:.3f} on other files", linewidth=1)
        below.plot(steps, means / first, linewidth=1)
    above.set_ylabel("loss")
    above.legend(frameon=False)
    below.set_ylabel(f"ratio to {next(iter(found))}")
    below.set_xlabel("step")
    for axes in above, below:
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
