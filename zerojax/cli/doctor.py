"""`zerojax doctor`: checks that this machine can run a training job."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("doctor")
@click.option(
    "--checkpoints", type=click.Path(path_type=Path), metavar="DIRECTORY", help="Also check this checkpoint directory."
)
def doctor_command(checkpoints: Path | None) -> None:
    """Check that this machine can run a training job.

    Each failure is shown with a fix. The exit code is 1 if there is a failure.
    """
    from rich.console import Console

    from zerojax import doctor

    checks = doctor.diagnose(checkpoints)
    Console().print(doctor.table(checks))
    raise SystemExit(1 if any(check.status is doctor.Status.ERROR for check in checks) else 0)
