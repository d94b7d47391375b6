"""`zerojax launch`: runs a command in several processes on this machine."""

from __future__ import annotations

import os
import sys

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

    `zerojax.initialize()` joins them. The exit code is the first one of a process that is not 0. If the output can no
    longer be written, all processes are ended, and the exit code is 141.
    """
    from zerojax.processes.launch import launch as run

    try:
        code = run(command, count, devices=devices, timeout_s=timeout_s)
    except OSError as error:
        raise click.ClickException(str(error)) from error
    _discard_what_nobody_reads()
    raise SystemExit(code)


def _discard_what_nobody_reads() -> None:
    """Python writes the rest of its output when it ends. If that fails, it would replace the exit code by 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
