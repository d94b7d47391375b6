"""Compares the ways in which equal layers can run: what they cost to compile, and what the program costs.

    python scripts/benchmarks/layers.py                            # a table
    python scripts/benchmarks/layers.py --json                     # one JSON object
    python scripts/benchmarks/layers.py --models qwen3-8b gpt-36   # some of the models

Each form is compiled by `schedule.py` for a described cluster, in a process of its own:

    list          zerojax at stage 3, a model that has its layers in a list
    list as loop  the same with `train_step(layers='loop')`
    plain list    `jit` and `NamedSharding`
    scan          zerojax, a GPT whose layers are stacked and scanned
    scan by four  the same with `layers=4`
    scan as list  the same with `layers='list'`
    plain scan    `jit` and `NamedSharding` of that GPT

`gpt-N` is the GPT of `gpt.py` with N layers of width 4096, all others are models of `models.py`. Seconds are those of
the processor, without the assemblers that a process starts. All else is explained in `schedule.py`.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

FIELDS = ("processor_s", "peak_bytes", "sent_bytes", "exposed_bytes", "copies_in_loops")
LAYERS = {"list as loop": "loop", "scan by four": "4", "scan as list": "list"}
LISTS, SCANS = ("list", "list as loop", "plain list"), ("scan", "scan by four", "scan as list", "plain scan")
LINK_GBPS = "360"  # one program for each form, instead of a second one for slow links


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["gpt-16", "gpt-36", "gpt-80", "qwen3-8b"], help="%(default)s")
    parser.add_argument("--target", default="h100:8", help="a target of zerojax.targets (default %(default)s)")
    parser.add_argument("--remat", default="full", help="as in schedule.py (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    return parser.parse_args()


def main():
    from rich.console import Console

    args, console = arguments(), Console(stderr=True)
    result = {"target": args.target, "forms": {}}
    for model in args.models:
        for form in LISTS + (SCANS if model.startswith("gpt-") else ()):
            with console.status(f"compiling {model}, {form}"):
                result["forms"][f"{model} {form}"] = compiled(model, form, args)
    print(json.dumps(result)) if args.json else table(result)


def compiled(model, form, args):
    """What `schedule.py` finds in the program of a form."""
    options = ["--forms", "plain" if form.startswith("plain") else "ours"]
    options += ["--run-layers", LAYERS[form]] if form in LAYERS else []
    if model.startswith("gpt-"):
        options += ["--layers", model.removeprefix("gpt-"), *(["--unrolled"] if form in LISTS else [])]
    else:
        options += ["--model", model]
    command = [sys.executable, Path(__file__).with_name("schedule.py"), "--json", "--target", args.target, *options]
    done = subprocess.run([*command, "--remat", args.remat, "--link", LINK_GBPS], capture_output=True, text=True)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}
    (found,) = json.loads(done.stdout)["forms"].values()
    if "error" in found:
        return {"error": found["error"]}
    trace_s = found["trace_processor_s"]
    of_compiler = {"trace_s": trace_s, "compile_s": found["processor_s"] - trace_s}
    return of_compiler | {name: found[name] for name in FIELDS} | {"step_s": found["fast_s"]["step"]}


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
            f"{found['trace_s']:.1f}",
            f"{found['processor_s']:.1f}",
            f"{found['peak_bytes'] / 2**30:.2f}",
            f"{exposed:.1%}",
            f"{found['step_s'] * 1e3:.0f}",
        )
    Console().print(rows)


if __name__ == "__main__":
    main()
