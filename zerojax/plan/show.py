"""Renders a plan for a terminal: the verdict, memory, communication, predicted time and suggestions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from zerojax.analysis import hlo_costs
from zerojax.analysis.memory import model_states
from zerojax.plan import buffers, job, timeline
from zerojax.plan.formula import throughput
from zerojax.plan.planner import Plan, Suggestion, used_share
from zerojax.plan.program import CollectiveSummary, CompiledStep
from zerojax.plan.search import Ranking, bound
from zerojax.plan.timeline import Prediction
from zerojax.plan.transformer import Transformer
from zerojax.utils.tables import Column, TextTable, screen
from zerojax.utils.text import bytes_text, count_text

_SMALL_SHARE = 1e-3  # of the largest category of memory; smaller ones are not shown if no formula has them
_LABELS = {  # the names themselves are keys of the JSON output
    timeline.STARTS: "kernel launches",
    hlo_costs.COPIES: "copies on the device",
    buffers.UNUSED: "unused",
    "products": "matrix products",  # what bounds a step by formula
    "memory": "memory traffic",
    "copies": "copies to and from the host",
}


def label(name: str) -> str:
    """The text that is shown for a lane or a category of memory."""
    return _LABELS.get(name, name)


def render(plan: Plan, formulas: bool = False) -> Group:
    """The tables of a plan. With `formulas`, they explain how each term is computed."""
    parts = [
        verdict_text(plan),
        *(Text(f"note: {note}", style="yellow") for note in plan.notes),
        _memory(plan, formulas),
        _speed(plan),
    ]
    if program := plan.program:
        parts += [_busy(program.prediction)] if program.prediction else []
        parts.append(_program(program, plan.cluster.target))
        parts += [_communication(program.collectives)] if program.collectives else []
        parts += [Text(f"not analyzed: {' '.join(program.unread.split())[:300]}")] if program.unread else []
    return spaced([*parts, *_suggestions(plan), *_recommendation(plan)])


def text(plan: Plan, formulas: bool = False, width: int = 120) -> str:
    """The tables of a plan as text without colors."""
    console = Console(width=width, no_color=True)
    with console.capture() as capture:
        console.print(render(plan, formulas))
    return capture.get()


def spaced(parts: Iterable[Table | Text]) -> Group:
    """Parts with an empty line after each."""
    return Group(*(part for each in parts for part in (each, Text())))


def seconds_text(seconds: float) -> str:
    """A time in the unit that fits it, such as '12.5 ms' or '2.73 s'."""
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1e3:,.1f} ms"


def unit(plan: Plan) -> str:
    """What is counted per second: 'tokens', or 'rows' if rows have no tokens."""
    return "tokens" if plan.row_tokens > 1 else "rows"


def _share_text(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


# What a plan is about, and whether it fits.


def verdict_text(plan: Plan) -> Text:
    """Whether a plan fits, the limit, the model and the step, in four lines."""
    relation = lambda room: f"{bytes_text(abs(room))} {'below' if room >= 0 else 'above'} the limit"
    level, capacity = "as compiled" if plan.program else "by formula", plan.cluster.chip.memory_bytes
    verdict = f"{'fits' if plan.fits else 'does not fit'}: {bytes_text(plan.peak_bytes)} {level}, "
    verdict += relation(plan.room_bytes)
    if plan.host_bytes:
        host_room = plan.host_limit_bytes - plan.host_bytes
        verdict += f"\nhost memory: {bytes_text(plan.host_bytes)} pinned for each device, {relation(host_room)}"
    share = f"{plan.limit_bytes / capacity:.0%} of the {bytes_text(capacity)} of a device"
    limit = f"limit: {bytes_text(plan.limit_bytes)}, which is {share}"
    about = f"\n{limit}\n{_model_text(plan)}, on {plan.cluster.target}\n{_step_text(plan)}"
    return Text.assemble((verdict, "bold green" if plan.fits else "bold red"), about)


def _model_text(plan: Plan) -> str:
    return f"model: {plan.what}, {plan.parameters / 1e9:.2f} B parameters"


def _step_text(plan: Plan) -> str:
    settings = plan.settings
    rows = f"{settings.rows} row{'s' * (settings.rows != 1)}"
    rows += f" of {plan.row_tokens:,} tokens" if plan.row_tokens > 1 else ""
    rows += " per device" + (f" x {settings.num_microbatches} microbatches" if settings.num_microbatches > 1 else "")
    step = f"step: stage {settings.stage}, {settings.precision}, {rows}, "
    step += f"remat {settings.remat!r}, prefetch {settings.prefetch}"
    step += f", offload {settings.offload!r}" if settings.offload != "none" else ""
    step += f", replica {settings.replica}" if settings.replica > 1 else ""
    step += ", the optimizer over all devices" if settings.shards_outer else ""
    step += f", large leaves sent in {settings.wire}" if settings.wire else ""
    return step + (f", moments in {settings.moment_bits} bits" if settings.moment_bits else "")


def remedy(plan: Plan) -> Suggestion | None:
    """The fastest of a plan's suggestions that fit; None if none does."""
    return max((each for each in plan.suggestions if each.fits), key=lambda each: each.speed or 0, default=None)


def closest_text(plan: Plan) -> str:
    """Which of a plan's suggestions, none of which fits, comes closest."""
    best = min(plan.suggestions, key=lambda each: used_share(each, plan))
    over = {"": best.peak_bytes - plan.limit_bytes, " of host memory": best.host_bytes - plan.host_limit_bytes}
    too_much = " and ".join(f"{bytes_text(excess)} too much{of}" for of, excess in over.items() if excess > 0)
    return f"What comes closest is {best.change}: {bytes_text(best.peak_bytes)}, {too_much}. --auto tries combinations."


def code_that_fits(plan: Plan) -> Iterator[Text]:
    """The calls that build the planned step if it fits, or else the fastest one that does; nothing if none does."""
    best = remedy(plan)
    if plan.fits or best:
        settings = best.settings if best and not plan.fits else None
        yield Text((settings or plan.settings).python(), style="dim")


def _recommendation(plan: Plan) -> Iterator[Text]:
    """Which settings to use: the planned ones if they fit, else the fastest that do, else which ones come closest."""
    best = remedy(plan)
    if best and not plan.fits:
        yield Text(f"It fits with {best.change}, at {bytes_text(best.peak_bytes)} by formula:", style="bold green")
    elif plan.suggestions and not plan.fits:
        yield Text(f"None of the changes above makes it fit. {closest_text(plan)}", style="bold red")
    yield from code_that_fits(plan)


# The tables of a plan.


def _table(title: str, first: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column(first)
    for column in columns:
        is_text = column == "explanation"  # wraps on a narrow terminal
        table.add_column(column, justify="left" if is_text else "right", no_wrap=not is_text)
    for row in rows:
        table.add_row(*row)
    return table


def _memory(plan: Plan, formulas: bool) -> Table:
    """The table of peak memory by category: by formula, and of the compiled program if it was analyzed."""
    formula = {term.name: term.num_bytes for term in plan.memory.terms}
    compiled = (plan.program and plan.program.held) or {}
    explanations = {term.name: term.formula for term in plan.memory.terms}
    gib = lambda held, name: bytes_text(held[name]) if name in held else ""

    def row(name: str, *figures: str, of: float | None = None) -> list[str]:
        shown = [label(name), *(figures if compiled else figures[-1:]), f"{of / plan.limit_bytes:.1%}" if of else ""]
        return [*shown, explanations.get(name, "")] if formulas else shown

    small = lambda name: name not in formula and compiled[name] < _SMALL_SHARE * max(compiled.values())
    names = [name for name in dict.fromkeys([*formula, *compiled]) if not small(name)]
    level = compiled or formula
    rows = [row(name, gib(compiled, name), gib(formula, name), of=level.get(name)) for name in names]
    total = plan.program.peak_bytes if plan.program and compiled else plan.memory.peak_bytes
    rows.append(row("total", bytes_text(total), bytes_text(plan.memory.peak_bytes), of=total))
    if plan.host_bytes or plan.memory.host_bytes:
        rows.append(row("in host memory", bytes_text(plan.host_bytes), bytes_text(plan.memory.host_bytes)))
    if formulas:
        num_shards = plan.cluster.num_devices // (plan.settings.model or 1)
        states = model_states(plan.parameters, plan.settings.stage, num_shards).num_bytes
        explanations["ZeRO model states"] = "2 + 2 + 12 bytes per parameter, sharded according to the stage"
        rows.append(row("ZeRO model states", "", bytes_text(states), of=states))
    columns = [*(["compiled"] if compiled else []), "formula", "of the limit", *(["explanation"] if formulas else [])]
    return _table("Peak memory of a device", "", columns, rows)


def _program(program: CompiledStep, target: str) -> Table:
    sizes = {
        "arguments": program.arguments_bytes,
        "arguments updated in place": program.aliased_bytes,
        "temporaries": program.temporaries_bytes,
        "collectives in flight, at most": program.buffers_bytes,
        "copied in loops per step": program.copied_bytes,
    }
    rows = [[name, bytes_text(size)] for name, size in sizes.items() if size is not None]
    return _table(f"Program for {target}, compiled in {program.compile_s:.0f} s", "", ["bytes"], rows)


def _communication(collectives: tuple[CollectiveSummary, ...]) -> Table:
    def row(names: Sequence[str], summed: Sequence[CollectiveSummary]) -> list[str]:
        sent, exposed = sum(each.sent_bytes for each in summed), sum(each.exposed_bytes for each in summed)
        return [*names, bytes_text(sent), f"{exposed / sent:.1%}" if sent else ""]

    rows = [row((each.kind, each.axis, each.dtype, f"{each.count:,}"), [each]) for each in collectives]
    columns = ["axis", "dtype", "count", "sent", "not overlapped"]
    rows.append(row(("total", "", "", ""), collectives))
    return _table("Communication of a device per step", "", columns, rows)


def _speed(plan: Plan) -> Table:
    """The table of the time of a step: by formula, and as the schedule of the compiled program takes it."""
    levels = {"compiled": (plan.step_s, plan.bound_by, plan.sent_bytes)} if plan.prediction else {}
    levels["formula"] = plan.time.step_s, plan.time.bound, plan.formula_bytes
    columns = []
    for step_s, bound_by, sent in levels.values():
        speed = throughput(step_s, plan.cluster, plan.tokens, plan.flops)
        rates = f"{speed.tokens_per_s:,.0f}", f"{speed.tokens_per_device_s:,.0f}"
        utilization = _share_text(speed.model_flop_utilization) or "not known"
        columns.append([seconds_text(step_s), *rates, utilization, label(bound_by), bytes_text(sent)])
    rate = f"{unit(plan)}/s"
    names = ["step", rate, f"{rate} per device", "MFU (model FLOPs utilization)", "bound by", "sent by a device"]
    return _table("Predicted time of a step", "", levels, zip(names, *columns, strict=True))


def _busy(predicted: Prediction) -> Table:
    busy = sorted(predicted.busy_s.items(), key=lambda lane: -lane[1])
    times = {label(lane): seconds for lane, seconds in busy} | {"waiting for links or copies": predicted.waiting_s}
    rows = [[name, f"{seconds * 1e3:,.1f}", f"{seconds / predicted.step_s:.1%}"] for name, seconds in times.items()]
    rows.append(["whole step", f"{predicted.step_s * 1e3:,.1f}", ""])
    return _table("Busy time per step", "", ["ms", "of the step"], rows)


def _suggestions(plan: Plan) -> Iterator[Table | Text]:
    """The table of what would save memory, or use the free memory; of the latter, what does not fit is listed below."""
    title = "Ways to use the free memory" if plan.fits else "Ways to save memory"
    speed = lambda each: f"{each.speed:.2f} x" if each.speed else ""
    full = lambda each: "host is full" if each.peak_bytes <= plan.limit_bytes else "does not fit"
    size = lambda each: bytes_text(each.peak_bytes)
    shown = [each for each in plan.suggestions if each.fits or not plan.fits]
    if shown:
        rows = ([each.change, size(each), speed(each), "fits" if each.fits else full(each)] for each in shown)
        yield _table(title, "", ["by formula", f"{unit(plan)}/s", "verdict"], rows)
    if too_large := [f"{each.change}, {size(each)}" for each in plan.suggestions if each not in shown]:
        yield Text(f"Does not fit: {'; '.join(too_large)}")


# Tables of several plans, and of presets.


def comparison(made: Sequence[Plan | Ranking]) -> list[TextTable | str]:
    """The table of one model on several targets, planned or searched, and the settings of each if they differ."""
    rankings = [each for each in made if isinstance(each, Ranking)]
    plans = [each.best if isinstance(each, Ranking) else each for each in made]
    first = plans[0]
    per_step = f"{unit(first)}/s"

    def row(plan: Plan) -> list[str]:
        speed, memory = plan.throughput, (plan.peak_bytes, plan.limit_bytes, plan.sent_bytes)
        time = seconds_text(plan.step_s), f"{speed.tokens_per_s:,.0f}", _share_text(speed.model_flop_utilization)
        return [plan.cluster.target, "yes" if plan.fits else "no", *map(bytes_text, memory), *time]

    figures = ("peak", "limit", "sent", "step", per_step, "MFU")
    columns = [Column("target"), Column("fits"), *(Column(figure, right=True) for figure in figures)]
    by_formula = [plan.cluster.target for plan in plans if plan.program is None]
    level = f"compiled, but {', '.join(by_formula)} by formula" if by_formula else "compiled"
    level = "by formula" if len(by_formula) == len(plans) else level
    # The settings are in the title if all are the same, else below the table.
    same = len({plan.settings for plan in plans}) == 1
    title = f"{_model_text(first)}, {level}" + (f"\n{_step_text(first)}" if same else "")
    parts = [title, TextTable("", columns, [row(plan) for plan in plans])]
    parts += [f"{per_step} are those of all devices; peak, limit and sent are those of one. Times are lower bounds."]
    parts += [] if same else [f"{plan.cluster.target}: {_step_text(plan)}" for plan in plans]
    targets: dict[str, list[str]] = {}  # that share a note
    for plan in plans:
        for note in plan.notes:
            targets.setdefault(note, []).append(plan.cluster.target)
    parts += [f"note on {', '.join(names)}: {note}" for note, names in targets.items()]
    parts += dict.fromkeys(f"By formula alone: {each.missing}." for each in rankings if each.missing)
    if failing := [plan.cluster.target for plan in plans if not plan.fits]:
        closest = f"Nothing that was tried fits on {', '.join(failing)}; what comes closest is shown."
        parts += [closest if rankings else f"For what would help, plan {failing[0]} alone, or with --auto."]
    return parts


def render_ranking(ranking: Ranking, shown: int = 12) -> Group:
    """The table of a search's first `shown` candidates, and the calls that build the winner."""
    everyone = [*ranking.candidates[:shown], ranking.naive]
    level = "* is compiled, all others are by formula" if ranking.is_compiled else "all by formula"
    rate = f"{unit(ranking.best)}/s"

    def row(plan: Plan, name: str) -> dict[str, str]:
        s = plan.settings
        tokens = ranking.best.tokens / ranking.cluster.num_devices / plan.step_s  # the same with all settings
        settings = {"stage": str(s.stage), "remat": s.remat, "rows": f"{s.rows} x {s.num_microbatches}"}
        places = {"replica": str(s.replica), "offload": s.offload}
        speed = {"ms": f"{plan.step_s * 1e3:,.0f}", rate: f"{tokens:,.0f}", "bound by": bound(plan)}
        return {"": name + "*" * bool(plan.program)} | settings | places | {"peak": bytes_text(plan.peak_bytes)} | speed

    rows = [row(plan, str(k + 1)) for k, plan in enumerate(everyone[:-1])] + [row(ranking.naive, "naive")]
    for name, default in {"replica": "1", "offload": "none"}.items():  # shown if it differs somewhere
        if all(each[name] == default for each in rows):
            rows = [{key: value for key, value in each.items() if key != name} for each in rows]
    columns = [Column(name, right=name not in ("", "bound by")) for name in rows[0]]
    title = f"{ranking.what} on {ranking.cluster.target}: the fastest of {len(ranking.candidates)} settings"
    table = TextTable(title, columns, [list(each.values()) for each in rows]).text(screen().width)
    parts = [Text(f"By formula alone: {ranking.missing}.")] if ranking.missing else []
    legend = Text(f"ms per step, {rate} per device; {level}", style="italic")
    return spaced([*parts, Text(table, no_wrap=True, overflow="ignore"), legend, *_winner(ranking)])


def _winner(ranking: Ranking) -> Iterator[Text]:
    """What won, or what comes closest, with the calls that build it if it fits."""
    winner, best = ranking.winner, ranking.best
    if winner is None:
        of = "compiled settings" if ranking.is_compiled else "settings that were tried"
        yield Text(f"none of the {of} fits; what comes closest:", style="bold red")
        yield verdict_text(best)
        return
    gain = "while the naive choice does not fit"
    if ranking.naive.fits:
        gain = f"{ranking.naive.step_s / winner.step_s:.2f} times as fast as the naive choice"
    speed = best.throughput
    rates = [seconds_text(winner.step_s), f"{speed.tokens_per_device_s:,.0f} {unit(best)}/s per device"]
    rates += [f"MFU {speed.model_flop_utilization:.1%}"] if speed.model_flop_utilization else []
    naive = "(naive: stage 3, full recomputation, no prefetch)"
    yield Text(f"winner: {', '.join(rates)}, {gain} {naive}", style="bold green")
    yield Text(winner.settings.python(), style="dim")


def presets_table() -> TextTable:
    """The table of the presets: their sizes, and the rows that a device has by default."""
    sizes = ("parameters", "layers", "width", "heads", "tokens", "rows")
    columns = [Column("preset"), *(Column(name, right=True) for name in sizes), Column("kind", wraps=True)]

    def row(name: str, shapes: Transformer) -> list[str]:
        heads = str(shapes.heads) if shapes.heads == shapes.kv_heads else f"{shapes.heads}/{shapes.kv_heads}"
        sizes = shapes.layers, shapes.width, heads, shapes.seq, shapes.rows
        return [name, count_text(job.num_parameters(shapes)), *map(str, sizes), shapes.kind]

    return TextTable("", columns, [row(name, shapes) for name, shapes in job.PRESETS.items()])
