"""Adds the help of every command of `zerojax` to the page api/command_line.md, also of those that are new."""

from collections.abc import Iterator
from typing import Any

import click

from zerojax.cli import main

PAGE, WIDTH = "api/command_line", 100


def commands(command: click.Command, name: str, parent: click.Context | None = None) -> Iterator[tuple[str, str]]:
    """Yields (name, help) for each command that does something; a group of commands is not one itself."""
    context = click.Context(command, info_name=name, parent=parent, terminal_width=WIDTH)
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            yield from commands(command.commands[child], child, context)
    else:
        yield context.command_path, command.get_help(context)


def add_help(app: Any, page: str, source: list[str]) -> None:
    if page == PAGE:
        source[0] += "".join(f"\n## {name}\n\n```text\n{text}\n```\n" for name, text in commands(main, "zerojax"))


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", add_help)
    return {"parallel_read_safe": True}
