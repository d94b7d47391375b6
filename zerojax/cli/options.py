"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path

import click

from zerojax.cli.completion import complete, family_names

JOB_HELP = "A function that returns a zerojax.plan.Job: your own model, optimizer and loss."


def _list_families(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        from zerojax.exchange.families import FAMILIES

        click.echo("\n".join(FAMILIES))
        context.exit()


MAPPING = click.option(
    "--mapping",
    type=click.Path(exists=True, path_type=Path),
    metavar="FILE",
    help="JSON file that maps names of zerojax to other names, or to names and dims; patterns are allowed.",
)
FAMILY = click.option(
    "--family",
    metavar="NAME",
    shell_complete=complete(family_names),
    help="Names and layout of a kind of model in files of Hugging Face, for example llama; --list-families lists them.",
)
LIST_FAMILIES = click.option(
    "--list-families",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list_families,
    help="List the families and exit.",
)
