"""`zerojax checkpoint`: inspects, verifies, exports and imports checkpoints."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zerojax.cli.common import JOB_HELP, print_table, without_traceback
from zerojax.exchange.names import FAMILIES
from zerojax.sharding.precision import PRECISIONS
from zerojax.utils.tables import screen
from zerojax.utils.text import bytes_text, error_text

if TYPE_CHECKING:
    from zerojax.checkpoints import Manifest
    from zerojax.checkpoints.remote_copy import RemoteCopy


@click.group()
def checkpoint() -> None:
    """Inspect, verify, export and import checkpoints.

    These commands need no accelerator. In place of a DIRECTORY of steps, they take the URL to which a run copies its
    steps, such as s3://bucket/run, and fetch what they need of it.
    """


class _DirectoryOrUrl(click.Path):
    """A directory that exists, as a Path: of steps, or of a run that has them in checkpoints/. Or a URL, as a str."""

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Path | str:
        if "://" in str(value):
            return str(value)
        from zerojax.checkpoints import store

        directory = Path(str(super().convert(str(value), param, ctx)))
        of_run = directory / "checkpoints"
        return of_run if of_run.is_dir() and not store.folders(directory) else directory


_EXISTING = _DirectoryOrUrl(exists=True, file_okay=False)
_FOLDER = click.Path(file_okay=False, path_type=Path)
_FILE = click.Path(exists=True, path_type=Path)
_DIRECTORY = click.argument("directory", type=_EXISTING)
_MAPPING = click.option(
    "--mapping",
    type=_FILE,
    metavar="FILE",
    help="JSON file that maps names of zerojax to other names, or to names and dims; patterns are allowed.",
)
_FAMILY = click.option(
    "--family", type=click.Choice(list(FAMILIES)), help="Names and layout of a kind of model in files of Hugging Face."
)
_STEP = click.option("--step", type=click.IntRange(0), metavar="N", help="The step.  [default: the newest]")


@checkpoint.command("ls")
@_DIRECTORY
@click.option("--verify", is_flag=True, help="Read every array and check its digest.")
def list_steps(directory: Path | str, verify: bool) -> None:
    """List the steps in DIRECTORY and their status.

    The exit code is 1 if a step is damaged or incomplete, or if there is none.
    """
    from zerojax.cli import checkpoint_tables as show

    local = _on_disk(directory, every=True, arrays=verify)
    table, good = show.steps_table(local, verify, str(directory if isinstance(directory, str) else local))
    if not table.rows:
        fix = "pass the directory of a run of zerojax.fit, or that of zero.checkpoints"
        raise click.ClickException(error_text(f"checkpoint: there is no step in {directory}", None, fix))
    print_table(table)
    raise SystemExit(0 if good else 1)


@checkpoint.command()
@_DIRECTORY
@_STEP
def inspect(directory: Path | str, step: int | None) -> None:
    """Show the arrays of a step.

    The table has the shape, dtype, bytes and digest of each array, and the stage and mesh that the step was saved with.
    On a terminal, the arrays of equal layers are one row; written to a file, each array has its own.
    """
    from zerojax.cli import checkpoint_tables as show

    print_table(show.leaves_table(_manifest(_on_disk(directory, step, arrays=False), step), screen()))


@checkpoint.command()
@_DIRECTORY
@_STEP
def verify(directory: Path | str, step: int | None) -> None:
    """Read every array of a step and check its digest.

    Prints how many are intact, and what is damaged. The exit code is 1 if an array is.
    """
    from zerojax.checkpoints import pieces
    from zerojax.checkpoints.manifest import plain_text

    local = _on_disk(directory, step)
    manifest = _manifest(local, step)
    with without_traceback():
        found = list(pieces.verify_arrays(local, manifest.step, manifest))
    wrong = [f"{plain_text(path)}: {plain_text(problem)}" for path, problem in found if problem]
    intact = f"step {manifest.step}: {len(found) - len(wrong):,} of {len(found):,} arrays are intact"
    if len(wrong) > 1:
        click.echo("\n  ".join([f"{intact}, {len(wrong):,} are damaged:", *wrong]))
    else:
        click.echo(", 1 is damaged: ".join([intact, *wrong]))
    raise SystemExit(1 if wrong else 0)


@checkpoint.command()
@_DIRECTORY
@click.argument("first", type=click.IntRange(0))
@click.argument("second", type=click.IntRange(0))
@click.option("--other", type=_EXISTING, help="Directory of the second step.  [default: the same]")
def diff(directory: Path | str, first: int, second: int, other: Path | str | None) -> None:
    """Show the arrays that differ between two steps.

    The arrays are compared by their digests. The exit code is 1 if the steps differ.
    """
    from zerojax.cli import checkpoint_tables as show

    places = [(directory, first), (other or directory, second)]
    before, after = (_manifest(_on_disk(place, step, arrays=False), step) for place, step in places)
    table = show.differences(before, after, screen())
    if table.rows:
        print_table(table)
    raise SystemExit(1 if table.rows else 0)


@checkpoint.command()
@click.argument("url")
@click.argument("directory", type=_FOLDER)
@_STEP
def fetch(url: str, directory: Path, step: int | None) -> None:
    """Copy a step from remote storage into DIRECTORY.

    URL is what a run has as copy_to, such as s3://bucket/run. A run continues from DIRECTORY.
    """
    from zerojax.checkpoints import store
    from zerojax.checkpoints.remote_copy import RemoteCopy

    with without_traceback():
        remote = RemoteCopy(url)
        (chosen,) = _chosen(remote, step, every=False)
        if (folder := store.folder(directory, chosen)).exists():
            raise click.ClickException(f"{folder} exists already")
        remote.fetch(chosen, directory.absolute())
    click.echo(f"{folder}: of steps {', '.join(map(str, remote.steps()))} in {url}")


@checkpoint.command("export")
@_DIRECTORY
@click.argument("folder", type=_FOLDER)
@_STEP
@click.option("--ema", is_flag=True, help="Export the average that zerojax.ema keeps, instead of the parameters.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="Cast the parameters.  [default: as saved]")
@_MAPPING
@_FAMILY
@click.option(
    "--max-file-gib",
    type=click.FloatRange(0, min_open=True),
    default=2.0,
    show_default=True,
    metavar="GIB",
    help="Maximum size of a file, which is held in memory.",
)
@click.option("--overwrite", is_flag=True, help="Replace files in FOLDER.")
def export_command(
    directory: Path | str, folder: Path, step: int | None, mapping: Path | None, max_file_gib: float, **options: Any
) -> None:
    """Export the weights of a step as safetensors files in FOLDER.

    Weights are the parameters and the floating model state, such as running statistics. What else is in the model state
    is left out, with a warning that names it.
    """
    from zerojax.exchange import names, parameters

    with without_traceback():
        found = names.mapping(mapping) if mapping else None
        directory = _on_disk(directory, step)
        newest = _manifest(directory, step).step
        given = {"mapping": found, "max_file_bytes": int(max_file_gib * 2**30), **options}
        for file in parameters.export(directory, newest, folder, **given):
            click.echo(f"{file}  {bytes_text(file.stat().st_size)}")


@checkpoint.command("import")
@click.argument("directory", type=_FOLDER)
@click.argument("files", type=_FILE)
@click.option("--job", "what", required=True, metavar="MODULE:FUNCTION", help=JOB_HELP)
@click.option(
    "--precision",
    type=click.Choice(list(PRECISIONS)),
    default="bf16",
    show_default=True,
    help="Precision of the run, which determines the dtype of the parameters.",
)
@_MAPPING
@_FAMILY
@click.option(
    "--layout", type=click.Choice(["flax"]), help="Files that do not state it are stored as Flax stores them."
)
@click.option("--missing", multiple=True, metavar="GLOB", help="Leaves that FILES may lack; they are initialized.")
@click.option("--extra", multiple=True, metavar="GLOB", help="Arrays of FILES that are not used.")
@click.option("--cast", is_flag=True, help="Allow files with different dtypes, and cast them.")
def import_files(directory: Path, files: Path, what: str, precision: str, mapping: Path | None, **options: Any) -> None:
    """Create a checkpoint from safetensors FILES.

    The checkpoint is step 0 in DIRECTORY. Its weights come from FILES, and everything else is the initial state of the
    job. A run continues from it, at any stage and on any mesh. DIRECTORY is the one that is passed to
    zero.checkpoints; for zerojax.fit it is RUN/checkpoints. The whole state must fit into the memory of this machine.
    """
    import zerojax
    from zerojax.checkpoints import contents, store
    from zerojax.checkpoints.digest import digests
    from zerojax.exchange import names, parameters
    from zerojax.plan.job import find_job

    with without_traceback():
        if there := store.folders(directory.absolute()):
            raise click.ClickException(f"{directory} has steps already: {', '.join(map(str, there))}")
        found = names.mapping(mapping) if mapping else None
        job, zero = find_job(what), zerojax.Zero(zerojax.make_mesh(), 3, precision)
        state = parameters.load(zero.init(job.create_model, job.tx), files, mapping=found, **options)
        found_in = digests(contents.arrays(state), contents.logical_shapes(state))
        if bad := [p for p, d in found_in.items() if p.startswith(contents.PARAMS) and (d.has_nan or d.has_inf)]:
            raise click.ClickException(f"{files} is not finite: {contents.shortened(bad)}")
        with zero.checkpoints(directory) as checkpoints:
            checkpoints.save(state)
    click.echo(f"{store.folder(directory, 0)}: {len(state.layout.leaves)} parameters of {files}")


def _on_disk(directory: Path | str, step: int | None = None, *, every: bool = False, arrays: bool = True) -> Path:
    """The directory; or for a URL, a temporary one with a step of it, the newest or every one, until the command ends.

    Without `arrays`, only the manifest is fetched.
    """
    from zerojax.checkpoints.remote_copy import RemoteCopy

    if isinstance(directory, Path):
        return directory.absolute()
    folder = Path(click.get_current_context().with_resource(tempfile.TemporaryDirectory(prefix="zerojax_")))
    with without_traceback():
        remote = RemoteCopy(directory)
        for chosen in _chosen(remote, step, every):
            remote.fetch(chosen, folder, arrays=arrays)
    return folder


def _chosen(remote: RemoteCopy, step: int | None, every: bool) -> list[int]:
    """A step in remote storage, or every one."""
    steps = remote.steps()
    if not steps or (step is not None and step not in steps):
        raise click.ClickException(f"no such step in {remote.url}\n  there are: {', '.join(map(str, steps)) or 'none'}")
    return steps if every else [steps[-1] if step is None else step]


def _manifest(directory: Path, step: int | None) -> Manifest:
    from zerojax.checkpoints import store

    with without_traceback():
        found = store.steps(directory)
        if not found or (step is not None and step not in store.folders(directory)):
            wanted = "no step" if step is None else f"no step {step}"
            raise click.ClickException(f"{wanted} in {directory}\n  there are: {', '.join(map(str, found)) or 'none'}")
        return store.read_manifest(directory, found[-1] if step is None else step)
