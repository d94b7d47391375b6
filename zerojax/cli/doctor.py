"""`zerojax doctor`: checks that this machine can run a training job."""

from __future__ import annotations

from pathlib import Path

import click

from zerojax.cli.common import print_rich
from zerojax.sharding.precision import PRECISIONS


@click.command("doctor")
@click.option(
    "--checkpoints", type=click.Path(path_type=Path), metavar="DIRECTORY", help="Also check this checkpoint directory."
)
@click.option(
    "--precision",
    type=click.Choice(list(PRECISIONS)),
    help="On GPUs, also check that attention of this precision is fused.",
)
@click.option("--head-dim", type=click.IntRange(1), metavar="N", help="The same for heads of this width.")
def doctor_command(checkpoints: Path | None, precision: str | None, head_dim: int | None) -> None:
    """Check that this machine can run a training job.

    It also finds settings that are in the way. Each failure and each warning is shown with a fix. The exit code is 1 if
    there is a failure.
    """
    from zerojax.cli import diagnosis as doctor

    try:
        checks = doctor.diagnose(checkpoints, precision=precision, head_dim=head_dim)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    print_rich(doctor.table(checks))
    raise SystemExit(1 if any(check.status is doctor.Status.ERROR for check in checks) else 0)
