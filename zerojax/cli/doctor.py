"""`zerojax doctor`: checks that this machine can run a training job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import click
from rich.table import Table
from rich.text import Text

from zerojax.cli.common import print_rich
from zerojax.cli.diagnosis import gpu, machine, variables
from zerojax.cli.diagnosis.checks import Check, Status
from zerojax.sharding.precision import PRECISIONS


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
    try:
        checks = diagnose(checkpoints, precision=precision, head_dim=head_dim)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    print_rich(table(checks))
    raise SystemExit(1 if any(check.status is Status.ERROR for check in checks) else 0)


def diagnose(
    directory: Path | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    precision: str | None = None,
    head_dim: int | None = None,
) -> list[Check]:
    """Runs all checks.

    Args:
        directory: directory for checkpoints. It must be writable, on a file system that supports locks.
        environ: environment variables; those of this process by default.
        precision, head_dim: of the model, as in `Zero`; on GPUs, whether its attention can be fused. None if not known.

    Returns:
        The checks, in the order in which they are shown.

    Raises:
        ValueError: if the precision is unknown.

    Cost: initializes the devices of JAX; writes an empty file into the directory and deletes it.
    """
    environ = os.environ if environ is None else environ
    return [
        *machine.check_versions(),
        *machine.check_devices(environ),
        *machine.check_memory(),
        *gpu.check_gpus(gpu.local_gpus(), environ, precision, head_dim),
        *machine.check_directory(directory),
        *machine.check_processes(environ),
        *variables.check_variables(environ, variables.Surroundings.of_machine(environ)),
        *machine.check_compilers(),
    ]


def table(checks: list[Check]) -> Table:
    """The checks as a table for the terminal."""
    rows = Table(show_header=False, box=None, pad_edge=False)
    for _ in range(3):
        rows.add_column(overflow="fold")
    colors = {Status.OK: "green", Status.INFO: "dim", Status.WARNING: "yellow", Status.ERROR: "bold red"}
    for check in checks:
        text = check.details + (f"\nfix: {check.fix}" if check.fix else "")
        rows.add_row(Text(check.status.value, style=colors[check.status]), check.name, Text(text))
    return rows
