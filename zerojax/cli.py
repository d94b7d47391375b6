"""The command `zerojax`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click


@click.group()
@click.version_option(package_name="zerojax")
def main() -> None:
    """ZeRO for JAX."""


@main.command()
@click.option("--preset", "what", help="A model; --list-presets shows them.")
@click.option("--job", "what", metavar="MODULE:FUNCTION", help="Your own: a function that returns a zerojax.plan.Job.")
@click.option(
    "--target", default="h100:8", show_default=True, help="h100:N (a100, h200, b200), v5e:4x4 (v4, v5p, v6e), cpu:N."
)
@click.option("--stage", type=click.IntRange(0, 3), default=3, show_default=True)
@click.option("--precision", default="bf16", show_default=True)
@click.option("--rows", type=click.IntRange(1), help="Rows on a device in a microbatch.  [default: the model's]")
@click.option("--microbatches", "num_microbatches", type=click.IntRange(1), default=1, show_default=True)
@click.option("--remat", default="full", show_default=True, help="none, dots, full, or offload.")
@click.option("--prefetch", type=click.IntRange(0), default=1, show_default=True)
@click.option("--bucket-mib", type=click.IntRange(1), help="Limit of what one collective moves.")
@click.option("--replica", type=click.IntRange(1), default=1, show_default=True, help="Size of the replica axis.")
@click.option("--model", type=click.IntRange(1), help="Size of the model axis.")
@click.option("--compile", "compiled", is_flag=True, help="Compile the step for the target, too.")
@click.option("--memory-share", type=float, help="Of a device's memory that a program may use.")
@click.option("--auto", is_flag=True, help="Search the fastest settings that fit, with --rows of a device in a step.")
@click.option("--formulas", is_flag=True, help="Show how each term comes about.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--dump", type=click.Path(file_okay=False, path_type=Path), help="Write the compiled text there.")
@click.option("--png", type=click.Path(file_okay=False, path_type=Path), help="Write two pictures there.")
@click.option("--calibration", type=click.Path(exists=True, path_type=Path), help="Rates that --calibrate measured.")
@click.option("--calibrate", is_flag=True, help="Measure two rates of this machine's device, write them, and end.")
@click.option("--list-presets", is_flag=True, help="Show the presets and end.")
def plan(
    what: str | None,
    target: str,
    compiled: bool,
    memory_share: float | None,
    formulas: bool,
    as_json: bool,
    dump: Path | None,
    png: Path | None,
    calibration: Path | None,
    calibrate: bool,
    list_presets: bool,
    auto: bool,
    bucket_mib: int | None,
    **settings: Any,
) -> None:
    """Whether a training step fits on a cluster, and what would change that.

    By formula it takes seconds and no accelerator package. With --compile the compiler of the target is asked, on this
    machine, without an accelerator. The exit code is 0 if the step fits and 3 if it does not.
    """
    if calibrate:
        from zerojax.plan.calibrate import DEFAULT_PATH, calibrate as measure

        click.echo(json.dumps(measure() | {"file": str(DEFAULT_PATH)}))
        return
    from rich.console import Console

    import zerojax
    from zerojax.analysis import targets
    from zerojax.plan import cluster, presets
    from zerojax.plan.planner import Settings, plan as make_plan
    from zerojax.plan.search import Ranking, search
    from zerojax.plan.show import render, render_ranking

    targets.describe_only()
    console = Console()
    if list_presets:
        for name, shapes in presets.PRESETS.items():
            console.print(f"{name:14s} {shapes}", highlight=False)
        return
    if what is None:
        raise click.UsageError(f"--preset NAME or --job MODULE:FUNCTION\n  presets: {', '.join(presets.PRESETS)}")
    settings["bucket_bytes"] = bucket_mib and bucket_mib * 2**20
    given: dict[str, Any] = {"memory_share": memory_share, "calibration": calibration}
    try:
        if (compiled or auto) and targets.platform(target) == "cpu":
            zerojax.simulate_devices(cluster(target).num_devices)
        with Console(stderr=True).status("searching" if auto else "compiling" if compiled else "tracing") as status:
            if auto:
                made = search(what, target, settings["rows"], on_step=status.update, **given)
            else:
                made = make_plan(what, target, Settings(**settings), compile=compiled, dump=dump, **given)
    except (ValueError, RuntimeError) as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        print(json.dumps(made.data()))
    else:
        console.print(render_ranking(made) if isinstance(made, Ranking) else render(made, formulas))
    if isinstance(made, Ranking):
        raise SystemExit(0 if made.winner else 3)
    if png:
        _draw(made, memory_share, png)
    raise SystemExit(0 if made.fits else 3)


def _draw(made: Any, memory_share: float | None, folder: Path) -> None:
    """memory.png: this step at every stage. timeline.png: one layer, if the step was compiled and its time read."""
    import dataclasses

    try:
        from zerojax.plan import picture
        from zerojax.plan.planner import plan as make_plan
    except ImportError as error:
        raise click.ClickException(f"{error}\n  fix:      pip install 'zerojax[plot]'") from error
    at_stage = lambda stage: dataclasses.replace(made.settings, stage=stage)
    target = made.cluster.target
    stages = [make_plan(made.what, target, at_stage(k), memory_share=memory_share, suggest=False) for k in range(4)]
    picture.memory_by_stage(stages, folder / "memory.png")
    click.echo(f"{folder / 'memory.png'}: memory by stage", err=True)
    predicted = made.program and made.program.reading.prediction
    if predicted:
        picture.timeline({f"prefetch {made.settings.prefetch}": predicted}, folder / "timeline.png")
        click.echo(f"{folder / 'timeline.png'}: one layer on the lanes of a device", err=True)


@main.command(context_settings={"ignore_unknown_options": True})
@click.option("-n", "--processes", "count", type=click.IntRange(1), required=True, help="How many.")
@click.option("--devices", type=click.IntRange(1), help="Simulated CPU devices of each.  [default: the machine's]")
@click.option("--timeout", "timeout_s", type=float, help="Seconds after which all are killed.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def launch(count: int, devices: int | None, timeout_s: float | None, command: tuple[str, ...]) -> None:
    """Run COMMAND as several processes on this machine, which `zerojax.initialize()` joins.

    The exit code is the first that is not 0.
    """
    from zerojax.processes.launch import launch as run

    try:
        raise SystemExit(run(command, count, devices=devices, timeout_s=timeout_s))
    except OSError as error:
        raise click.ClickException(str(error)) from error


@main.command()
@click.option(
    "--checkpoints", type=click.Path(path_type=Path), help="A directory for checkpoints, to be looked at too."
)
def doctor(checkpoints: Path | None) -> None:
    """Look for what keeps a run from starting, or from running where it should.

    The exit code is 1 if something is wrong.
    """
    from zerojax import doctor

    checks = doctor.diagnose(checkpoints)
    _print(doctor.table(checks))
    raise SystemExit(1 if any(each.status is doctor.Status.WRONG for each in checks) else 0)


@main.group()
def checkpoint() -> None:
    """Look at checkpoints, move parameters in and out. No accelerator is needed."""


_DIRECTORY = click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
_STEP = click.option("--step", type=click.IntRange(0), help="[default: the newest]")


@checkpoint.command("ls")
@_DIRECTORY
@click.option("--verify", is_flag=True, help="Read every array, and check its digest.")
def list_steps(directory: Path, verify: bool) -> None:
    """List the steps in DIRECTORY, with a verdict each. The exit code is 1 if one is not good."""
    from zerojax.checkpoints import show

    table, good = show.steps_table(directory.absolute(), verify)
    _print(table)
    raise SystemExit(0 if good else 1)


@checkpoint.command()
@_DIRECTORY
@_STEP
def inspect(directory: Path, step: int | None) -> None:
    """Show the arrays of a step: shape, dtype, bytes, digest; and the stage and mesh that saved it."""
    from zerojax.checkpoints import show

    _print(show.leaves_table(_manifest(directory, step)))


@checkpoint.command()
@_DIRECTORY
@_STEP
def verify(directory: Path, step: int | None) -> None:
    """Read every array of a step, and check its digest. The exit code is 1 if one is damaged."""
    from zerojax.checkpoints import pieces, show

    manifest = _manifest(directory, step)
    wrong = dict(pieces.verify_arrays(directory.absolute(), manifest.step, manifest))
    _print(show.leaves_table(manifest, wrong))
    raise SystemExit(1 if any(wrong.values()) else 0)


@checkpoint.command()
@_DIRECTORY
@click.argument("first", type=click.IntRange(0))
@click.argument("second", type=click.IntRange(0))
@click.option("--other", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Where the second is.")
def diff(directory: Path, first: int, second: int, other: Path | None) -> None:
    """Show what differs between two steps, by their digests. The exit code is 1 if something does."""
    from zerojax.checkpoints import show

    table = show.differences(_manifest(directory, first), _manifest(other or directory, second))
    if table.row_count:
        _print(table)
    raise SystemExit(1 if table.row_count else 0)


@checkpoint.command()
@_DIRECTORY
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@_STEP
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="[default: as saved]")
@click.option("--mapping", type=click.Path(exists=True, path_type=Path), help="JSON: our names to others' names.")
@click.option("--max-file-gib", type=click.FloatRange(0, min_open=True), default=5.0, show_default=True)
@click.option("--overwrite", is_flag=True)
def export(
    directory: Path, folder: Path, step: int | None, mapping: Path | None, max_file_gib: float, **options: Any
) -> None:
    """Write the parameters of a step into FOLDER as safetensors files."""
    from zerojax.exchange import names, parameters

    with _without_traceback():
        found = names.mapping(mapping) if mapping else None
        newest = _manifest(directory, step).step
        given = {"mapping": found, "max_file_bytes": int(max_file_gib * 2**30), **options}
        for file in parameters.export(directory, newest, folder, **given):
            click.echo(f"{file}  {file.stat().st_size / 2**20:,.1f} MiB")


@checkpoint.command("import")
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.argument("files", type=click.Path(exists=True, path_type=Path))
@click.option("--job", "what", required=True, metavar="MODULE:FUNCTION", help="Returns a zerojax.plan.Job.")
@click.option("--precision", default="bf16", show_default=True, help="Of the run; it says how parameters are saved.")
@click.option("--mapping", type=click.Path(exists=True, path_type=Path), help="JSON: our names to others' names.")
@click.option("--cast", is_flag=True, help="Dtypes may differ.")
def import_files(directory: Path, files: Path, what: str, precision: str, mapping: Path | None, cast: bool) -> None:
    """Write a checkpoint of step 0 into DIRECTORY, with the parameters of safetensors FILES.

    All else is as the job's model and optimizer begin: a run goes on from there, on any stage and mesh. DIRECTORY is
    that of zero.checkpoints, which for zerojax.fit is RUN/checkpoints. The whole state has to fit into this machine.
    """
    import zerojax
    from zerojax.checkpoints import contents, store
    from zerojax.checkpoints.digest import digests
    from zerojax.exchange import names, parameters
    from zerojax.plan.planner import find_job

    with _without_traceback():
        if there := store.folders(directory.absolute()):
            raise click.ClickException(f"{directory} has steps already: {', '.join(map(str, there))}")
        found = names.mapping(mapping) if mapping else None
        job, zero = find_job(what, "", compiled=False), zerojax.Zero(zerojax.make_mesh(), 3, precision)
        state = parameters.load(zero.init(job.create_model, job.tx), files, mapping=found, cast=cast)
        if bad := contents.nonfinite_paths(digests(contents.arrays(state))):
            raise click.ClickException(f"{files} is not finite: {', '.join(bad)}")
        with zero.checkpoints(directory) as checkpoints:
            checkpoints.save(state)
    click.echo(f"{store.folder(directory, 0)}: {len(state.definition.leaves)} parameters of {files}")


def _manifest(directory: Path, step: int | None) -> Any:
    from zerojax.checkpoints import store

    with _without_traceback():
        found = store.steps(directory.absolute())
        if not found or (step is not None and step not in store.folders(directory.absolute())):
            wanted = "no step" if step is None else f"no step {step}"
            raise click.ClickException(f"{wanted} in {directory}\n  there are: {', '.join(map(str, found)) or 'none'}")
        return store.read_manifest(directory.absolute(), found[-1] if step is None else step)


@contextlib.contextmanager
def _without_traceback() -> Iterator[None]:
    """What is wrong with the input, without a traceback."""
    from zerojax.checkpoints import CheckpointCorrupted, CheckpointMismatch

    try:
        yield
    except (ValueError, CheckpointCorrupted, CheckpointMismatch) as error:
        raise click.ClickException(str(error)) from error


def _print(table: Any) -> None:
    from rich.console import Console

    Console().print(table)
