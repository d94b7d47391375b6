"""Trains models of other packages for three steps, and shows how far they are from one device and what is replicated.

    scripts/test --zoo                                              # makes the two environments
    .venv-zoo-tunix/bin/python scripts/benchmarks/zoo.py            # a table
    .venv-zoo-transformers/bin/python scripts/benchmarks/zoo.py --json --models hf-gpt2 hf-llama

For every model of `tests/zoo` whose package is installed, on eight simulated devices:

    difference   the largest relative difference of a loss in three steps, stage 3 against a plain step on one device
    units        how many, and the share of the bytes of all units that the largest one holds
    replicated   the share of the bytes of the parameters that every device holds at stage 3

A model fails if it raises an error, or exceeds the tolerance of the tests in any of these. The exit code is then 1.
"""

import argparse
import json
import os
import sys
import time
import warnings
from pathlib import Path

from timing import versions

STEPS = 3


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object per model instead of a table")
    parser.add_argument("--models", nargs="+", metavar="NAME", help="only these (default: all that are installed)")
    return parser.parse_args()


def main():
    args = arguments()
    warnings.simplefilter("ignore")  # those of the other packages
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
    # Nearly all of the time goes into compiling, and no time is reported of what is compiled.
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
    import zerojax

    zerojax.simulate_devices(8)
    from rich.console import Console
    from zoo import entries

    found = entries.installed()
    unknown = sorted(set(args.models or ()) - set(found))
    if unknown or not found:
        sys.exit(
            f"zoo: {', '.join(unknown) or 'no package of the zoo'} is not installed; there are: {', '.join(found)}"
        )
    rows = []
    with Console(stderr=True).status("") as status:
        for name in args.models or found:
            status.update(name)
            rows.append(row := measured(found[name]))
            if args.json:
                print(json.dumps({**row, "versions": versions()}), flush=True)
    if not args.json:
        table(rows)
    num_failed = sum(not row["passed"] for row in rows)
    print(f"{len(rows) - num_failed} passed, {num_failed} failed")
    sys.exit(num_failed > 0)


def measured(entry):
    """The row of one model. An error is part of it."""
    start = time.perf_counter()
    try:
        row = compared(entry)
    except Exception as error:
        row = {"passed": False, "failure": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
    return {"model": entry.name, **row, "seconds": round(time.perf_counter() - start, 1)}


def compared(entry):
    import numpy as np
    from support import parity, plain
    from zoo.measures import replicated_share, unit_shares

    import zerojax

    data, tx = parity.batches(entry, STEPS), parity.optimizer()
    zero = zerojax.Zero(zerojax.make_mesh(), 3, **entry.options)
    want = plain.run(entry, tx, data)
    got, state = parity.train(zero, entry, data, tx)
    shares = unit_shares(zero, state)
    values = {
        "parameters": sum(leaf.size for leaf in state.layout.leaves),
        "difference": float(np.max(np.abs(got.losses / want.losses - 1))),
        "num_units": len(shares),
        "largest_unit": max(shares, key=shares.get),
        "largest_share": max(shares.values()),
        "replicated_share": replicated_share(zero, state),
    }
    failures = [
        *(["loss"] if not values["difference"] <= parity.TOLERANCES["fp32"]["losses"] else []),
        *(["units"] if set(shares) != set(entry.units) or values["largest_share"] > entry.largest else []),
        *(["replicated"] if values["replicated_share"] > entry.replicated else []),
    ]
    return {**values, "passed": not failures, "failure": ", ".join(failures)}


def table(rows):
    from rich.console import Console
    from rich.table import Table

    title = "Models of other packages: stage 3 on 8 simulated devices, 3 steps"
    shown = Table("model", title=title, title_justify="left", caption=", ".join(map(" ".join, versions().items())))
    for column in ("parameters", "difference", "units", "largest unit", "replicated", "s"):
        shown.add_column(column, justify="right")
    shown.add_column("failure")
    for row in rows:
        values = [""] * 5
        if "difference" in row:
            largest = f"{row['largest_unit']} {row['largest_share']:.0%}"
            values = [f"{row['parameters']:,}", f"{row['difference']:.0e}", str(row["num_units"]), largest]
            values.append(f"{row['replicated_share']:.2%}")
        shown.add_row(row["model"], *values, f"{row['seconds']:.0f}", row["failure"])
    Console(width=None if Console().is_terminal else 120).print(shown)


if __name__ == "__main__":
    main()
