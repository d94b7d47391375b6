"""The command line options of the demo.

This module needs only Python, so that `scripts/demo` can check the options before it installs anything.
"""

from __future__ import annotations

import argparse
import pathlib


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/demo",
        allow_abbrev=False,
        description="Trains a byte-level GPT on Python's own source with ZeRO on simulated devices. Shows the memory "
        "that each stage takes on a device, and how much its losses differ from those of a single device.",
    )
    add = parser.add_argument
    add("--stage", type=int, default=3, choices=range(4), help="ZeRO stage to train at (default: 3)")
    add("--devices", type=int, default=8, metavar="N", help="simulated devices (default: 8)")
    add("--steps", type=int, default=100, metavar="N", help="training steps (default: 100)")
    add("--batch", type=int, default=16, metavar="N", help="sequences per step, over all devices (default: 16)")
    add("--precision", default="fp32", choices=("fp32", "bf16", "bf16_reduce_fp32", "fp16"), help="(default: fp32)")
    add("--json", type=pathlib.Path, metavar="FILE", help="write the results to FILE")
    options = parser.parse_args()
    if not 1 <= options.devices <= 64:
        parser.error(f"--devices {options.devices}: choose 1 to 64")
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: at least 1")
    if options.batch < 1 or options.batch % options.devices:
        nearest = max(1, round(options.batch / options.devices)) * options.devices
        parser.error(
            f"--batch {options.batch}: does not divide over {options.devices} devices; "
            f"choose a multiple of {options.devices}, such as --batch {nearest}"
        )
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json {options.json}: no directory {options.json.parent}")
    return options


if __name__ == "__main__":
    parse()
