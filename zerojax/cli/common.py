"""What commands share: how they print tables, and report errors in their input."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import click
from rich.console import Console, RenderableType

from zerojax.utils.tables import TextTable, screen

JOB_HELP = "A function that returns a zerojax.plan.Job: your own model, optimizer and loss."


def print_table(table: TextTable) -> None:
    """Prints a table as wide as the terminal is."""
    click.echo(table.text(screen().width))


def print_rich(renderable: RenderableType) -> None:
    """Prints a renderable of Rich, without the spaces by which it fills its lines."""
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
