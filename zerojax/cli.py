"""The command-line interface `zerojax`: plan, launch, doctor and checkpoint."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

_JOB_HELP = "A function that returns a zerojax.plan.Job: your own model, optimizer and loss."
_MAPPING_HELP = "JSON file that maps names of zerojax to other names, or to names and dims; patterns are allowed."
_FAMILY_HELP = (
    "Names and layout of a kind of model in files of Hugging Face, for example llama; --list-families lists them."
)


def _list_families(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        from zerojax.exchange.families import FAMILIES

        click.echo("\n".join(FAMILIES))
        context.exit()


_LIST_FAMILIES = click.option(
    "--list-families",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list_families,
    help="List the families and exit.",
)


@click.group()
@click.version_option(package_name="zerojax")
def main() -> None:
    """ZeRO for JAX: shards parameters, gradients and optimizer state over devices."""


@main.command("plan")
@click.option("--preset", "what", metavar="NAME", help="A model; --list-presets lists them.")
@click.option("--job", "what", metavar="MODULE:FUNCTION", help=_JOB_HELP)
@click.option(
    "--target",
    default="h100:8",
    show_default=True,
    metavar="TARGET",
    help="The devices: h100:N (or a100, h200, b200), v5e:4x4 (or v4, v5p, v6e), or cpu:N.",
)
@click.option("--stage", type=click.IntRange(0, 3), default=3, show_default=True, metavar="STAGE", help="ZeRO stage.")
@click.option(
    "--precision",
    default="bf16",
    show_default=True,
    metavar="NAME",
    help="fp32, bf16, bf16_reduce_fp32 or fp16.",
)
@click.option(
    "--rows", type=click.IntRange(1), metavar="N", help="Rows per device and microbatch.  [default: set by the model]"
)
@click.option(
    "--microbatches",
    "num_microbatches",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    metavar="N",
    help="Microbatches per step.",
)
@click.option(
    "--remat",
    default="full",
    show_default=True,
    metavar="SETTING",
    help="Rematerialization: none, dots, full or offload.",
)
@click.option(
    "--prefetch",
    type=click.IntRange(0),
    default=1,
    show_default=True,
    metavar="N",
    help="Units whose weights are gathered in advance.",
)
@click.option("--bucket-mib", type=click.IntRange(1), metavar="MIB", help="Maximum size of a collective.")
@click.option(
    "--replica", type=click.IntRange(1), default=1, show_default=True, metavar="N", help="Size of the replica axis."
)
@click.option("--model", type=click.IntRange(1), metavar="N", help="Size of the model axis.")
@click.option("--compile", "compiled", is_flag=True, help="Also compile the step for the target.")
@click.option(
    "--memory-share", type=float, metavar="SHARE", help="Fraction of a device's memory that a program may use."
)
@click.option("--auto", is_flag=True, help="Search for the fastest settings that fit; --rows then counts per step.")
@click.option("--formulas", is_flag=True, help="Show how each term of the memory is computed.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as a JSON object.")
@click.option(
    "--dump", type=click.Path(file_okay=False, path_type=Path), help="Write the compiled text to this directory."
)
@click.option("--png", type=click.Path(file_okay=False, path_type=Path), help="Draw the plan in this directory.")
@click.option(
    "--calibration",
    type=click.Path(exists=True, path_type=Path),
    metavar="FILE",
    help="Use the rates that --calibrate wrote to this file.",
)
@click.option("--calibrate", is_flag=True, help="Measure the rates of this machine's device, write them, and exit.")
@click.option("--list-presets", is_flag=True, help="List the presets and exit.")
def plan_command(
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
    """Predict whether a training step fits on a cluster.

    The plan is computed by formula in a few seconds and suggests changes that save memory. With --compile, the step is
    compiled for the target, on this machine and without an accelerator. The exit code is 0 if the step fits and 3 if it
    does not.
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
        raise click.UsageError(
            f"--preset NAME or --job MODULE:FUNCTION is required\n  presets: {', '.join(presets.PRESETS)}"
        )
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
    """Draws memory.png, the step at every stage, and timeline.png, one layer, if the time of the step was predicted."""
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
    predicted = made.program and made.program.analysis.prediction
    if predicted:
        picture.timeline({f"prefetch {made.settings.prefetch}": predicted}, folder / "timeline.png")
        click.echo(f"{folder / 'timeline.png'}: one layer on the lanes of a device", err=True)


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

    `zerojax.initialize()` joins them. The exit code is the first one of a process that is not 0.
    """
    from zerojax.processes.launch import launch as run

    try:
        raise SystemExit(run(command, count, devices=devices, timeout_s=timeout_s))
    except OSError as error:
        raise click.ClickException(str(error)) from error


@main.command()
@click.option(
    "--checkpoints", type=click.Path(path_type=Path), metavar="DIRECTORY", help="Also check this checkpoint directory."
)
def doctor(checkpoints: Path | None) -> None:
    """Check that this machine can run a training job.

    Each failure is shown with a fix. The exit code is 1 if there is a failure.
    """
    from zerojax import doctor

    checks = doctor.diagnose(checkpoints)
    _print(doctor.table(checks))
    raise SystemExit(1 if any(check.status is doctor.Status.ERROR for check in checks) else 0)


@main.group()
def checkpoint() -> None:
    """Inspect, verify, export and import checkpoints.

    These commands need no accelerator.
    """


_DIRECTORY = click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
_STEP = click.option("--step", type=click.IntRange(0), metavar="N", help="The step.  [default: the newest]")


@checkpoint.command("ls")
@_DIRECTORY
@click.option("--verify", is_flag=True, help="Read every array and check its digest.")
def list_steps(directory: Path, verify: bool) -> None:
    """List the steps in DIRECTORY and their status.

    The exit code is 1 if a step is damaged or incomplete.
    """
    from zerojax.checkpoints import show

    table, good = show.steps_table(directory.absolute(), verify)
    _print(table)
    raise SystemExit(0 if good else 1)


@checkpoint.command()
@_DIRECTORY
@_STEP
def inspect(directory: Path, step: int | None) -> None:
    """Show the arrays of a step.

    The table has the shape, dtype, bytes and digest of each array, and the stage and mesh that the step was saved with.
    """
    from zerojax.checkpoints import show

    _print(show.leaves_table(_manifest(directory, step)))


@checkpoint.command()
@_DIRECTORY
@_STEP
def verify(directory: Path, step: int | None) -> None:
    """Read every array of a step and check its digest.

    The exit code is 1 if an array is damaged.
    """
    from zerojax.checkpoints import pieces, show

    manifest = _manifest(directory, step)
    wrong = dict(pieces.verify_arrays(directory.absolute(), manifest.step, manifest))
    _print(show.leaves_table(manifest, wrong))
    raise SystemExit(1 if any(wrong.values()) else 0)


@checkpoint.command()
@_DIRECTORY
@click.argument("first", type=click.IntRange(0))
@click.argument("second", type=click.IntRange(0))
@click.option(
    "--other",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Directory of the second step.  [default: the same]",
)
def diff(directory: Path, first: int, second: int, other: Path | None) -> None:
    """Show the arrays that differ between two steps.

    The arrays are compared by their digests. The exit code is 1 if the steps differ.
    """
    from zerojax.checkpoints import show

    table = show.differences(_manifest(directory, first), _manifest(other or directory, second))
    if table.row_count:
        _print(table)
    raise SystemExit(1 if table.row_count else 0)


@checkpoint.command("export")
@_DIRECTORY
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@_STEP
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="Cast the parameters.  [default: as saved]")
@click.option("--mapping", type=click.Path(exists=True, path_type=Path), metavar="FILE", help=_MAPPING_HELP)
@click.option("--family", metavar="NAME", help=_FAMILY_HELP)
@_LIST_FAMILIES
@click.option(
    "--max-file-gib",
    type=click.FloatRange(0, min_open=True),
    default=5.0,
    show_default=True,
    metavar="GIB",
    help="Maximum size of a file.",
)
@click.option("--overwrite", is_flag=True, help="Replace files in FOLDER.")
def export_command(
    directory: Path, folder: Path, step: int | None, mapping: Path | None, max_file_gib: float, **options: Any
) -> None:
    """Export the weights of a step as safetensors files in FOLDER.

    Weights are the parameters and the floating model state, such as running statistics. What else is in the model state
    is left out, with a warning that names it.
    """
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
@click.option("--job", "what", required=True, metavar="MODULE:FUNCTION", help=_JOB_HELP)
@click.option(
    "--precision",
    default="bf16",
    show_default=True,
    metavar="NAME",
    help="Precision of the run, which determines the dtype of the parameters.",
)
@click.option("--mapping", type=click.Path(exists=True, path_type=Path), metavar="FILE", help=_MAPPING_HELP)
@click.option("--family", metavar="NAME", help=_FAMILY_HELP)
@_LIST_FAMILIES
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
    from zerojax.plan.planner import find_job

    with _without_traceback():
        if there := store.folders(directory.absolute()):
            raise click.ClickException(f"{directory} has steps already: {', '.join(map(str, there))}")
        found = names.mapping(mapping) if mapping else None
        job, zero = find_job(what, "", compiled=False), zerojax.Zero(zerojax.make_mesh(), 3, precision)
        state = parameters.load(zero.init(job.create_model, job.tx), files, mapping=found, **options)
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
    """Reports errors in the input as messages, without a traceback."""
    from zerojax.checkpoints import CheckpointCorrupted, CheckpointMismatch

    try:
        yield
    except (ValueError, CheckpointCorrupted, CheckpointMismatch) as error:
        raise click.ClickException(str(error)) from error


def _print(table: Any) -> None:
    from rich.console import Console

    Console().print(table)
