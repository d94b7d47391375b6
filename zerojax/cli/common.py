"""What commands share: how they print tables, and report errors in their input."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import click

JOB_HELP = "A function that returns a zerojax.plan.Job: your own model, optimizer and loss."


def print_table(table: Any) -> None:
    """Prints a `zerojax.utils.tables.TextTable` as wide as the terminal is."""
    from zerojax.utils.tables import screen

    click.echo(table.text(screen().width))


def print_rich(renderable: Any) -> None:
    """Prints a renderable of Rich, without the spaces by which it fills its lines."""
    from rich.console import Console

    console = Console()
    with console.capture() as capture:
        console.print(renderable)
    click.echo("\n".join(line.rstrip() for line in capture.get().split("\n")), nl=False)


@contextlib.contextmanager
def without_traceback() -> Iterator[None]:
    """Reports errors in the input as messages, without a traceback."""
    from zerojax.checkpoints import CheckpointCorrupted, CheckpointMismatch
    from zerojax.checkpoints.manifest import plain_text

    try:
        yield
    except (ValueError, CheckpointCorrupted, CheckpointMismatch) as error:
        raise click.ClickException("\n".join(map(plain_text, str(error).split("\n")))) from error
