"""`zerojax report`: writes a page about a run."""

from __future__ import annotations

from pathlib import Path

import click

from zerojax.cli.output import without_traceback
from zerojax.utils.text import bytes_text


@click.command("report")
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The page.  [default: report.html in RUN]",
)
def report_command(run: Path, out: Path | None) -> None:
    """Write a page about a run.

    It shows curves, restarts, the configuration and memory. RUN is the directory that was passed to zerojax.fit; the
    run may still be running. The page is one HTML file without scripts, which loads nothing from elsewhere.
    """
    try:
        from zerojax.run_report.page import write_report
    except ImportError as error:
        raise click.ClickException(
            f"report: a package is not installed\n  got:      {error}\n  fix:      pip install 'zerojax[plot]'"
        ) from error
    with without_traceback():
        try:
            path = write_report(run, out)
        except OSError as error:
            raise click.ClickException(
                f"the page cannot be written\n  got:      {error}\n  fix:      --out FILE"
            ) from error
    click.echo(f"{path}: {bytes_text(path.stat().st_size)}")
