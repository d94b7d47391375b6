"""How long `import zerojax` takes next to what it imports: jax alone, and jax with flax.nnx, flax.linen and optax.

    python scripts/benchmarks/import_time.py
    python scripts/benchmarks/import_time.py --rounds 31 --json

Every import runs in a fresh process, and the clock runs inside it, so starting Python is not included. A round imports
each of them once, in alternating order. Figures are medians over the rounds, after one round that only warms the caches
of the file system; a ratio is the median of the ratios within the rounds. Other load on the machine makes the
seconds longer and hardly changes the ratios; the load average before the run is printed.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from importlib import metadata

IMPORTS = {
    "jax": "import jax",
    "jax, flax, optax": "import jax, flax.nnx, flax.linen, optax",
    "zerojax": "import zerojax",
}
TIMED = "import time; start = time.perf_counter(); {}; print(time.perf_counter() - start)"


def seconds(statement: str) -> float:
    command = [sys.executable, "-P", "-c", TIMED.format(statement)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure(rounds: int) -> list[dict[str, float]]:
    """The seconds of every import, for each round."""
    names = list(IMPORTS)
    measured = []
    for number in range(rounds + 1):
        order = names if number % 2 else names[::-1]
        times = {name: seconds(IMPORTS[name]) for name in order}
        measured.append(times)
    return measured[1:]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    measured = measure(args.rounds)
    report = {
        "seconds": {name: statistics.median(times[name] for times in measured) for name in IMPORTS},
        "ratio_to_jax": statistics.median(times["zerojax"] / times["jax"] for times in measured),
        "ratio_to_its_imports": statistics.median(times["zerojax"] / times["jax, flax, optax"] for times in measured),
        "rounds": args.rounds,
        "load": load,
        "python": platform.python_version(),
        "versions": {package: metadata.version(package) for package in ("jax", "flax", "optax")},
    }
    if args.json:
        print(json.dumps(report))
        return
    for name, median in report["seconds"].items():
        print(f"import {name:18s} {median:.2f} s")
    print(f"zerojax / jax                     {report['ratio_to_jax']:.2f}")
    print(f"zerojax / (jax, flax, optax)      {report['ratio_to_its_imports']:.2f}")
    versions = ", ".join(f"{package} {version}" for package, version in report["versions"].items())
    print(f"medians of {args.rounds} rounds, load average {load:.1f} before the first")
    print(f"Python {report['python']}, {versions}")


if __name__ == "__main__":
    main()
