"""`zerojax launch`: runs a command in several processes on this machine."""

from __future__ import annotations

import click


@click.command("launch", context_settings={"ignore_unknown_options": True})
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

    `zerojax.initialize()` joins them. The exit code is the first one of a process that is not 0.
    """
    from zerojax.processes.launch import launch as run

    try:
        raise SystemExit(run(command, count, devices=devices, timeout_s=timeout_s))
    except OSError as error:
        raise click.ClickException(str(error)) from error
