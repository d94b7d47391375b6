"""`zerojax doctor`: checks that this machine can run a training job."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

import click
from rich.table import Table
from rich.text import Text

from zerojax.cli import machine, variables
from zerojax.cli.common import print_rich
from zerojax.cli.machine import Check, Status
from zerojax.sharding.precision import PRECISIONS

_COLORS = {Status.OK: "green", Status.INFO: "dim", Status.WARNING: "yellow", Status.ERROR: "bold red"}


@click.command("doctor")
@click.option(
    "--checkpoints", type=click.Path(path_type=Path), metavar="DIRECTORY", help="Also check this checkpoint directory."
)
@click.option(
    "--precision",
    type=click.Choice(list(PRECISIONS)),
    help="On GPUs, also check that attention of this precision is fused.",
)
@click.option("--head-dim", type=click.IntRange(1), metavar="N", help="The same for heads of this width.")
def doctor_command(checkpoints: Path | None, precision: str | None, head_dim: int | None) -> None:
    """Check that this machine can run a training job.

    It also finds settings that are in the way. Each failure and each warning is shown with a fix. The exit code is 1 if
    there is a failure.
    """
    checks = diagnose(checkpoints, precision=precision, head_dim=head_dim)
    rows = Table(show_header=False, box=None, pad_edge=False)
    for _ in range(3):
        rows.add_column(overflow="fold")
    for check in checks:
        text = check.details + (f"\nfix: {check.fix}" if check.fix else "")
        rows.add_row(Text(check.status.value, style=_COLORS[check.status]), check.name, Text(text))
    print_rich(rows)
    raise SystemExit(1 if any(check.status is Status.ERROR for check in checks) else 0)


def diagnose(
    directory: Path | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    precision: str | None = None,
    head_dim: int | None = None,
) -> list[Check]:
    """Runs all checks, and returns them in the order in which they are shown.

    Cost: initializes the devices of JAX; writes an empty file into the directory and deletes it.
    """
    environ = os.environ if environ is None else environ
    interfaces = [name for _, name in socket.if_nameindex()]
    processes = list(machine.check_processes(environ))
    return [
        *machine.check_versions(),
        *machine.check_devices(environ),
        *machine.check_memory(),
        *machine.check_gpus(environ, precision, head_dim),
        *machine.check_directory(directory),
        *processes,
        *variables.check_variables(environ, interfaces, is_alone=processes == [machine.ALONE]),
        *machine.check_compilers(),
    ]
