"""Runs all checks of this machine, and shows them as a table."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerojax.cli.diagnosis import gpu, machine, variables
from zerojax.cli.diagnosis.checks import Check, Status


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


def table(checks: list[Check]) -> Any:
    """The checks as a table for the terminal."""
    from rich.table import Table
    from rich.text import Text

    rows = Table(show_header=False, box=None, pad_edge=False)
    for _ in range(3):
        rows.add_column(overflow="fold")
    colors = {Status.OK: "green", Status.INFO: "dim", Status.WARNING: "yellow", Status.ERROR: "bold red"}
    for check in checks:
        text = check.details + (f"\nfix: {check.fix}" if check.fix else "")
        rows.add_row(Text(check.status.value, style=colors[check.status]), check.name, Text(text))
    return rows
