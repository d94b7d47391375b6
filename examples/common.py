"""What the examples share: their flags, and the devices that they run on."""

from __future__ import annotations

import argparse
import pathlib

import zerojax
from zerojax import processes


def parser(description: str | None, steps: int, precision: str = "fp32") -> argparse.ArgumentParser:
    """A parser with the flags that all examples have. `steps` and `precision` are the defaults of those flags."""
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = result.add_argument
    add("--out", type=pathlib.Path, required=True, metavar="DIR", help="the directory of the run")
    add("--resume", action="store_true", help="continue the run in DIR from its newest checkpoint")
    add("--steps", type=int, default=steps, metavar="N", help=f"steps of the whole run (default: {steps})")
    add("--stage", type=int, default=3, choices=range(4), help="ZeRO stage (default: 3)")
    add("--devices", type=int, metavar="N", help="simulate N CPU devices (default: the devices that there are)")
    add("--precision", default=precision, metavar="PRESET", help=f"fp32, bf16, ... (default: {precision})")
    add("--remat", default="none", metavar="POLICY", help="none, full, dots, ... (default: none)")
    return result


def start(args: argparse.Namespace) -> None:
    """Makes the devices available, joins the processes, and refuses a directory that has a run without --resume."""
    if args.devices:
        zerojax.simulate_devices(args.devices)
    processes.initialize()
    if not args.resume and (args.out / "checkpoints").exists():
        raise SystemExit(f"{args.out} has a run: pass --resume to continue it, or another directory with --out")
