"""The command `zerojax`, which consists of the other commands, and those that start a project and processes."""

from __future__ import annotations

import os
import re
import sys
from importlib import resources
from pathlib import Path

import click

from zerojax.cli.checkpoint import checkpoint
from zerojax.cli.doctor import doctor_command
from zerojax.cli.plan import plan_command
from zerojax.utils.text import error_text

_NAME = "__NAME__"  # in the templates
_LONGEST_NAME = 40  # of a JobSet; Kubernetes makes the names of pods of it, which have at most 63 characters


@click.group()
@click.version_option(package_name="zerojax")
def main() -> None:
    """ZeRO for JAX: shards parameters, gradients and optimizer state over devices."""


@main.command("launch", context_settings={"ignore_unknown_options": True})
@click.option(
    "-n", "--processes", "count", type=click.IntRange(1), required=True, metavar="N", help="Number of processes."
)
@click.option(
    "--devices",
    type=click.IntRange(1),
    metavar="N",
    help="Simulated CPU devices of each process.  [default: the devices of the machine]",
)
@click.option("--timeout", "timeout_s", type=float, metavar="SECONDS", help="Kill all processes after this time.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def launch_command(count: int, devices: int | None, timeout_s: float | None, command: tuple[str, ...]) -> None:
    """Run COMMAND in several processes on this machine.

    `zerojax.initialize()` joins them. The exit code is the first one of a process that is not 0. If the output can no
    longer be written, all processes are ended, and the exit code is 141.
    """
    from zerojax.processes.launch import launch

    try:
        code = launch(command, count, devices=devices, timeout_s=timeout_s)
    except OSError as error:
        raise click.ClickException(str(error)) from error
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # Python writes the rest when it ends; if that fails, it would replace the exit code by 120
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    raise SystemExit(code)


@main.command("init")
@click.argument("directory", type=click.Path(path_type=Path))
def init_command(directory: Path) -> None:
    """Write a starting project into DIRECTORY.

    It has to be new or empty. Its train.py trains a small decoder on the source of Python's standard library at once;
    put your own model and data in their place. There are also a configuration, and files to launch it under SLURM and
    on Kubernetes.
    """
    try:
        if directory.is_dir() and any(directory.iterdir()):
            raise click.ClickException(error_text(f"init: {directory} is not empty", None, "a new directory"))
        directory.mkdir(parents=True, exist_ok=True)
        for file, text in project_files(directory.absolute().name).items():
            (directory / file).write_text(text, encoding="utf-8")
            click.echo(directory / file)
    except OSError as error:
        what, fix = f"init: {directory} cannot be written", "a directory that this user can write"
        raise click.ClickException(error_text(what, error, fix)) from error
    click.echo(f"\nTo train on eight simulated devices:  python {directory / 'train.py'} --devices 8")


def project_files(name: str) -> dict[str, str]:
    """The texts of a starting project, by file. Where Kubernetes limits names, that of the project is changed."""
    short = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:_LONGEST_NAME].strip("-")
    short = short if short[:1].isalpha() else f"run-{short}".strip("-")
    templates = (resources.files("zerojax.cli") / "templates").iterdir()
    texts = {file.name.removesuffix(".txt"): file.read_text(encoding="utf-8") for file in templates}
    return {name: texts[name].replace(_NAME, short) for name in sorted(texts)}


for other in (plan_command, doctor_command, checkpoint):
    main.add_command(other)
