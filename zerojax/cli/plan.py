"""`zerojax plan`: predicts whether a training step fits on a cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from zerojax.cli.common import JOB_HELP, print_rich, print_table
from zerojax.plan.job import PRESETS, REMATS
from zerojax.sharding.precision import PRECISIONS
from zerojax.sharding.wire import DTYPES_OF_8_BITS
from zerojax.step.config import OFFLOADS, OUTER_SHARDINGS
from zerojax.utils.tables import printed, screen

if TYPE_CHECKING:
    from zerojax.plan import Cluster, Plan
    from zerojax.plan.search import Ranking
    from zerojax.plan.transformer import Transformer


@click.command("plan", context_settings={"show_default": True})
@click.option("--preset", type=click.Choice(list(PRESETS)), metavar="NAME", help="A model; --list-presets lists them.")
@click.option("--job", metavar="MODULE:FUNCTION", help=JOB_HELP)
@click.option(
    "--hf",
    type=click.Path(exists=True, path_type=Path),
    metavar="PATH",
    help="A language model of Hugging Face: a config.json, or the directory that has it.",
)
@click.option(
    "--target",
    default="h100:8",
    metavar="TARGET",
    help="The devices: h100:N (or a100, h200, b200), v5e:4x4 (or v4, v5p, v6e), or cpu:N; several: h100:8,v5p:2x2x2.",
)
@click.option("--stage", type=click.IntRange(0, 3), default=3, metavar="STAGE", help="ZeRO stage.")
@click.option(
    "--precision", type=click.Choice(list(PRECISIONS)), default="bf16", help="Dtypes of parameters, products and sums."
)
@click.option(
    "--rows", type=click.IntRange(1), metavar="N", help="Rows per device and microbatch.  [default: set by the model]"
)
@click.option(
    "--seq",
    type=click.IntRange(1, 2**31 - 1),
    metavar="N",
    help="Tokens in a row, for --preset and --hf.  [default: set by the model]",
)
@click.option(
    "--microbatches", "num_microbatches", type=click.IntRange(1), default=1, metavar="N", help="Microbatches per step."
)
@click.option("--remat", type=click.Choice(REMATS), default="dots", help="Rematerialization.")
@click.option(
    "--prefetch", type=click.IntRange(0), default=1, metavar="N", help="Units whose weights are gathered in advance."
)
@click.option("--offload", type=click.Choice(OFFLOADS), default="none", help="What is in host memory.")
@click.option(
    "--moment-bits",
    type=click.Choice(["8", "16"]),
    metavar="BITS",
    help="Bits of the optimizer's moments, 8 or 16; with bf16_params, parameters are rounded stochastically.",
)
@click.option("--bucket-mib", type=click.IntRange(1), metavar="MIB", help="Maximum size of a collective.")
@click.option("--replica", type=click.IntRange(1), default=1, metavar="N", help="Size of the replica axis.")
@click.option(
    "--outer-sharding",
    type=click.Choice(OUTER_SHARDINGS),
    help="What is sharded over the replica axis too.  [default: optimizer at stage 3]",
)
@click.option(
    "--wire", type=click.Choice(DTYPES_OF_8_BITS), metavar="DTYPE", help="8 bits in which large leaves are sent."
)
@click.option("--model", type=click.IntRange(1), metavar="N", help="Size of the model axis.")
@click.option("--compile", "compiled", is_flag=True, help="Also compile the step for the target.")
@click.option(
    "--memory-share", type=float, metavar="SHARE", help="Fraction of a device's memory that a program may use."
)
@click.option(
    "--host-memory",
    "host_gib",
    type=click.IntRange(1),
    metavar="GIB",
    help="Host memory that may be pinned for each device.  [default: 0.8 of a host's, divided by its devices]",
)
@click.option(
    "--auto",
    is_flag=True,
    help="Search for the fastest settings that fit, and compile the best of them if the target's compiler is installed;"
    " --rows then counts per step.",
)
@click.option("--formulas", is_flag=True, help="Show how each term of the memory is computed.")
@click.option("--explain", is_flag=True, help="Say in sentences what bounds the step, and what would help.")
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
    preset: str | None,
    job: str | None,
    hf: Path | None,
    seq: int | None,
    target: str,
    compiled: bool,
    memory_share: float | None,
    host_gib: int | None,
    formulas: bool,
    explain: bool,
    as_json: bool,
    dump: Path | None,
    png: Path | None,
    calibration: Path | None,
    calibrate: bool,
    list_presets: bool,
    auto: bool,
    bucket_mib: int | None,
    moment_bits: str | None,
    **settings: Any,
) -> None:
    """Predict whether a training step fits on a cluster.

    The plan is computed by formula in a few seconds and suggests changes that save memory. With --compile, the step is
    compiled for the target, on this machine and without an accelerator. Several targets are compared in one table. The
    exit code is 0 if the step fits, on one of the targets at least, and 3 if it does not.
    """
    if calibrate:
        from zerojax.analysis.hardware import CALIBRATION, calibrate as measure

        click.echo(json.dumps(measure() | {"file": str(CALIBRATION)}))
        return
    from zerojax.analysis import targets

    targets.describe_only()
    if list_presets:
        _list_presets(as_json)
        return
    # Read the options.
    settings["bucket_bytes"] = bucket_mib and bucket_mib * 2**20
    settings["moment_bits"] = moment_bits and int(moment_bits)
    limits = {"memory_share": memory_share, "host_memory_bytes": host_gib and host_gib * 2**30}
    if preset and job:
        raise click.UsageError("--preset and --job cannot be used together")
    names = [name for part in target.split(",") if (name := part.strip())] or [target]
    if len(names) > 1 and (formulas or explain or dump or png or calibration):
        raise click.UsageError("--formulas, --explain, --dump, --png and --calibration are for a single target")
    # Plan.
    try:
        model = _model(preset or job, hf, seq)
        made = _plans(model, names, settings, limits, calibration, compiled, auto, dump)
    except (ValueError, RuntimeError) as error:
        raise click.ClickException(str(error)) from error
    # Show.
    if len(made) > 1:
        _print_comparison(made, as_json)
    else:
        _print_plan(made[0], formulas, explain, as_json)
        if png and not auto:
            _draw(model, _best(made[0]), memory_share, png)
    raise SystemExit(0 if any(_best(each).fits for each in made) else 3)


def _list_presets(as_json: bool) -> None:
    import dataclasses

    from zerojax.plan.show import presets_table

    if as_json:
        print(json.dumps({name: dataclasses.asdict(shapes) for name, shapes in PRESETS.items()}))
    else:
        print_table(presets_table())


def _model(what: str | None, hf: Path | None, seq: int | None) -> str | Transformer:
    """What is planned: the shapes of a preset or of a config, or the name of a function."""
    from zerojax.plan import from_hugging_face
    from zerojax.plan.transformer import with_seq

    if (what is None) == (hf is None):
        names = "--preset NAME, --hf PATH or --job MODULE:FUNCTION is required"
        given = "--hf cannot be used with --preset or --job"
        raise click.UsageError(f"{names if hf is None else given}\n  presets: {', '.join(PRESETS)}")
    if what is None:
        return from_hugging_face(str(hf), seq)
    if seq and what not in PRESETS:
        raise click.UsageError("--seq is for --preset and --hf; the function of --job has its own shapes of batches")
    return with_seq(PRESETS[what], seq) if seq else what


def _plans(
    model: str | Transformer,
    names: list[str],
    settings: dict[str, Any],
    limits: dict[str, Any],
    calibration: Path | None,
    compiled: bool,
    auto: bool,
    dump: Path | None,
) -> list[Plan | Ranking]:
    """The plan of each target, or with `auto` the ranking."""
    import zerojax
    from zerojax.plan import cluster
    from zerojax.plan.job import Settings
    from zerojax.plan.search import plan as make_plan, search

    clusters: list[Cluster] = [cluster(name, calibration) for name in names]
    made: list[Plan | Ranking] = []
    simulated = [each.num_devices for each in clusters if each.chip.platform == "cpu"]
    if simulated and (compiled or auto):
        zerojax.simulate_devices(max(simulated))
    with Console(stderr=True).status("searching" if auto else "compiling" if compiled else "tracing") as status:
        for each in clusters:
            if auto:
                report = lambda message, target=each.target: status.update(f"{target}: {message}")
                made.append(search(model, each, Settings(**settings), on_step=report, **limits))
            else:
                options = {"compile": compiled, "dump": dump, "suggest": len(clusters) == 1}
                made.append(make_plan(model, each, Settings(**settings), **options, **limits))
    return made


def _best(made: Plan | Ranking) -> Plan:
    """A plan itself, or the best one of a ranking."""
    from zerojax.plan.search import Ranking

    return made.best if isinstance(made, Ranking) else made


def _print_plan(made: Plan | Ranking, formulas: bool, explain: bool, as_json: bool) -> None:
    from zerojax.plan.explain import explain_plan, render_explanation
    from zerojax.plan.search import Ranking
    from zerojax.plan.show import render, render_ranking

    best = _best(made)
    if as_json:
        explained = {"explanation": [remark._asdict() for remark in explain_plan(best)]} if explain else {}
        print(json.dumps(made.data() | explained))
        return
    if isinstance(made, Ranking):
        print_rich(render_ranking(made))
    if explain:
        print_rich(render_explanation(best))
    elif best is made or (best.program and best.fits):
        print_rich(render(best, formulas))


def _print_comparison(made: list[Plan | Ranking], as_json: bool) -> None:
    from zerojax.plan.show import comparison

    if as_json:
        print(json.dumps({"targets": [each.data() for each in made]}))
    else:
        click.echo(printed(comparison(made), screen().width), nl=False)


def _draw(model: str | Transformer, made: Plan, memory_share: float | None, folder: Path) -> None:
    """Draws memory.png, the step at every stage, and timeline.png, one layer, if the time of the step was predicted."""
    import dataclasses

    try:
        from zerojax.plan import picture
        from zerojax.plan.search import plan as make_plan
    except ImportError as error:
        raise click.ClickException(f"{error}\n  fix:      pip install 'zerojax[plot]'") from error
    at_stage = lambda stage: dataclasses.replace(made.settings, stage=stage)
    target = made.cluster.target
    stages = [make_plan(model, target, at_stage(k), memory_share=memory_share, suggest=False) for k in range(4)]
    picture.memory_by_stage(stages, folder / "memory.png")
    click.echo(f"{folder / 'memory.png'}: memory by stage", err=True)
    predicted = made.program and made.program.prediction
    if predicted:
        picture.timeline({f"prefetch {made.settings.prefetch}": predicted}, folder / "timeline.png")
        click.echo(f"{folder / 'timeline.png'}: one layer on the lanes of a device", err=True)
