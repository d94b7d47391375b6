"""Compares lists of layers with the loops that they can run as: what they cost to compile, and what the program costs.

    python scripts/benchmarks/layers.py                            # a table
    python scripts/benchmarks/layers.py --json                     # one JSON object
    python scripts/benchmarks/layers.py --models qwen3-8b gpt-36   # some of the models

Each form is compiled by `schedule.py` for a described cluster, in a process of its own:

    list        zerojax at stage 3, as the model has its layers
    loop        the same with `train_step(layers='loop')`
    plain list  `jit` and `NamedSharding`
    scan        zerojax, a GPT whose layers are stacked and scanned
    plain scan  `jit` and `NamedSharding` of that GPT

`gpt-N` is the GPT of `gpt.py` with N layers of width 4096, all others are models of `models.py`. Processor seconds are
those of the process, without the assemblers that it starts. All else is explained in `schedule.py`.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

FIELDS = ("trace_processor_s", "processor_s", "peak_bytes", "sent_bytes", "exposed_bytes")
LINK_GBPS = "360"  # one program for each form, instead of a second one for slow links


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["gpt-16", "gpt-36", "gpt-80", "qwen3-8b"], help="%(default)s")
    parser.add_argument("--target", default="h100:8", help="a target of zerojax.targets (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    return parser.parse_args()


def main():
    from rich.console import Console

    args, console = arguments(), Console(stderr=True)
    result = {"target": args.target, "forms": {}}
    for model in args.models:
        for form in forms_of(model):
            with console.status(f"compiling {model}, {form}"):
                result["forms"][f"{model} {form}"] = compiled(model, form, args.target)
    print(json.dumps(result)) if args.json else table(result)


def forms_of(model):
    return ("list", "loop", "plain list") + (("scan", "plain scan") if model.startswith("gpt-") else ())


def compiled(model, form, target):
    """What `schedule.py` finds in the program of a form."""
    options = ["--target", target, "--link", LINK_GBPS, "--forms", "plain" if form.startswith("plain") else "ours"]
    if model.startswith("gpt-"):
        options += ["--layers", model.removeprefix("gpt-"), *([] if form.endswith("scan") else ["--unrolled"])]
    else:
        options += ["--model", model]
    script = Path(__file__).with_name("schedule.py")
    command = [sys.executable, script, "--json", *options, *(["--loops"] if form == "loop" else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}
    (found,) = json.loads(done.stdout)["forms"].values()
    if "error" in found:
        return {"error": found["error"]}
    return {name: found[name] for name in FIELDS} | {"step_s": found["fast_s"]["step"]}


def table(result):
    from rich.console import Console
    from rich.table import Table

    rows = Table("", "trace s", "all s", "peak GiB", "exposed", "step ms", title=f"{result['target']}")
    for column in rows.columns[1:]:
        column.justify = "right"
    for name, found in result["forms"].items():
        if "error" in found:
            rows.add_row(name, found["error"][:60])
            continue
        exposed = found["exposed_bytes"] / found["sent_bytes"]
        rows.add_row(
            name,
            f"{found['trace_processor_s']:.1f}",
            f"{found['processor_s']:.1f}",
            f"{found['peak_bytes'] / 2**30:.2f}",
            f"{exposed:.1%}",
            f"{found['step_s'] * 1e3:.0f}",
        )
    Console().print(rows)


if __name__ == "__main__":
    main()
