"""`zerojax init`: writes a starting project that trains at once."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import click

_NAME = "__NAME__"  # in the templates
_FILES = {  # of the project -> template
    "train.py": "train.py.txt",
    "config.toml": "config.toml",
    "slurm.sh": "slurm.sh",
    "jobset.yaml": "jobset.yaml",
    "README.md": "README.md",
}
_LONGEST_NAME = 40  # of a JobSet; Kubernetes makes the names of pods of it, which have at most 63 characters


@click.command("init")
@click.argument("directory", type=click.Path(path_type=Path))
def init_command(directory: Path) -> None:
    """Write a starting project into DIRECTORY.

    It has to be new or empty. Its train.py trains a small decoder on the source of Python's standard library at once;
    put your own model and data in their place. There are also a configuration, and files to launch it under SLURM and
    on Kubernetes.
    """
    try:
        if directory.is_dir() and any(directory.iterdir()):
            raise click.ClickException(f"init: {directory} is not empty\n  fix:      a new directory")
        directory.mkdir(parents=True, exist_ok=True)
        for file, text in project_files(directory.absolute().name).items():
            (directory / file).write_text(text, encoding="utf-8")
            click.echo(directory / file)
    except OSError as error:
        fix = "a directory that this user can write"
        message = f"init: {directory} cannot be written\n  got:      {error}\n  fix:      {fix}"
        raise click.ClickException(message) from error
    click.echo(f"\nTo train on eight simulated devices:  python {directory / 'train.py'} --devices 8")


def project_files(name: str) -> dict[str, str]:
    """The texts of a starting project, by file.

    Args:
        name: of the project. Where Kubernetes limits names, it is changed to lower case, digits and '-'.
    """
    short = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:_LONGEST_NAME].strip("-")
    short = short if short[:1].isalpha() else f"run-{short}".strip("-")
    folder = resources.files("zerojax.cli") / "templates"
    texts = {file: (folder / template).read_text(encoding="utf-8") for file, template in _FILES.items()}
    return {file: text.replace(_NAME, short) for file, text in texts.items()}
