"""The command `zerojax`, which consists of the other commands."""

from __future__ import annotations

import click

from zerojax.cli.checkpoint import checkpoint
from zerojax.cli.doctor import doctor_command
from zerojax.cli.init import init_command
from zerojax.cli.launch import launch_command
from zerojax.cli.plan import plan_command


@click.group()
@click.version_option(package_name="zerojax")
def main() -> None:
    """ZeRO for JAX: shards parameters, gradients and optimizer state over devices."""


for command in (
    plan_command,
    launch_command,
    doctor_command,
    checkpoint,
    init_command,
):
    main.add_command(command)
