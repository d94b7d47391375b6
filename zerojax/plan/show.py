"""Renders a plan for a terminal: the verdict, memory, communication, predicted time and suggestions."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from zerojax.analysis import host_copies
from zerojax.analysis.utilisation import Throughput
from zerojax.plan import buffers, timeline
from zerojax.plan.planner import Plan
from zerojax.plan.program import CollectiveSummary, CompiledStep
from zerojax.plan.search import DOES_NOT_FIT, Candidate, Ranking
from zerojax.plan.timeline import Prediction
from zerojax.report.memory import model_states
from zerojax.text import bytes_text

_SMALL_SHARE = 1e-3  # of the largest category of memory; smaller ones are not shown if no formula has them
_LABELS = {  # the names themselves are keys of the JSON output
    timeline.STARTS: "kernel launches",
    host_copies.COPIES: "copies on the device",
    buffers.UNUSED: "unused",
}


def label(name: str) -> str:
    """Returns the text that is shown for a lane or a category of memory."""
    return _LABELS.get(name, name)


def render(plan: Plan, formulas: bool = False) -> Group:
    """Returns the tables of a plan.

    Args:
        plan: the plan.
        formulas: whether to explain how each term is computed.
    """
    parts = [
        verdict_text(plan),
        *(Text(f"note: {note}", style="yellow") for note in plan.notes),
        _memory(plan, formulas),
    ]
    if plan.program:
        analysis = plan.program.analysis
        parts.append(_program(plan.program, plan))
        parts += [_communication(analysis.collectives)] if analysis.collectives else []
        if analysis.prediction and plan.throughput:
            parts.append(Group(_speed(analysis.prediction, plan.throughput), _time(analysis.prediction)))
        parts += [Text(f"not analyzed: {' '.join(analysis.unread.split())[:300]}")] if analysis.unread else []
    parts += [_suggestions(plan)] if plan.suggestions else []
    parts += [Text(plan.settings.python(), style="dim")]
    return Group(*(part for each in parts for part in (each, Text())))


def render_ranking(ranking: Ranking, shown: int = 12) -> Group:
    """Returns the table of a search's first `shown` candidates, and the calls that build the winner."""
    everyone = [*ranking.candidates[:shown], ranking.naive]
    replicated = any(c.settings.replica > 1 for c in everyone)
    table = Table(
        title=f"{ranking.what} on {ranking.cluster.target}: the fastest of {len(ranking.candidates)} settings",
        caption="ms per step; tokens/s per device; rows without tokens/s are estimated by formula, not compiled",
        title_justify="left", caption_justify="left", title_style="bold", box=box.SIMPLE, pad_edge=False,
    )  # fmt: skip
    offloaded = any(c.settings.offload != "none" for c in everyone)
    columns = ["", "stage", "remat", "rows", *(["replica"] if replicated else [])]
    columns += [*(["offload"] if offloaded else []), "peak", "ms", "tokens/s", "bound by"]
    for k, column in enumerate(columns):
        table.add_column(column, justify="left" if k in (0, len(columns) - 1) else "right", no_wrap=True)

    def row(c: Candidate, name: str) -> list[str]:
        s, compiled = c.settings, c.plan
        speed = f"{compiled.throughput.tokens_per_device_s:,.0f}" if compiled and compiled.throughput else ""
        peak = bytes_text(compiled.peak_bytes if compiled else c.peak_bytes)
        replica = [str(s.replica)] if replicated else []
        rows = f"{s.rows} x {s.num_microbatches}"
        optional = [*replica, *([s.offload] if offloaded else [])]
        return [name, str(s.stage), s.remat, rows, *optional, peak, f"{c.step_s * 1e3:,.0f}", speed, c.bound]

    for k, candidate in enumerate(everyone[:-1]):
        table.add_row(*row(candidate, str(k + 1)))
    table.add_row(*row(ranking.naive, "naive"))
    parts: list = [table]
    winner = ranking.winner
    if winner is None:
        return Group(*parts, Text("none of the compiled candidates fits", style="bold red"))
    gain = f"{ranking.naive.step_s / winner.step_s:.2f} times as fast as the naive choice"
    if ranking.naive.bound == DOES_NOT_FIT:
        gain = "while the naive choice does not fit"
    summary = f"winner: {winner.step_s * 1e3:,.0f} ms per step, {gain} (stage 3, full recomputation, no prefetch)"
    return Group(*parts, Text(summary, style="bold green"), Text(winner.settings.python(), style="dim"))


def text(plan: Plan, formulas: bool = False, width: int = 120) -> str:
    """Returns the tables of a plan as text without colors."""
    console = Console(width=width, no_color=True)
    with console.capture() as capture:
        console.print(render(plan, formulas))
    return capture.get()


def verdict_text(plan: Plan) -> Text:
    """Whether a plan fits, the limit, the model and the step, in four lines."""
    chip, settings = plan.cluster.chip, plan.settings
    level = "as compiled" if plan.program else "by formula"
    share = plan.limit_bytes / chip.memory_bytes
    relation = lambda room: f"{bytes_text(abs(room))} {'below' if room >= 0 else 'above'} the limit"
    verdict = f"{'fits' if plan.fits else 'does not fit'}: {bytes_text(plan.peak_bytes)} {level}, "
    verdict += relation(plan.room_bytes)
    if plan.host_bytes:
        host_room = plan.host_limit_bytes - plan.host_bytes
        verdict += f"\nhost memory: {bytes_text(plan.host_bytes)} pinned for each device, {relation(host_room)}"
    of_chip = bytes_text(chip.memory_bytes)
    limit = f"limit: {bytes_text(plan.limit_bytes)}, which is {share:.0%} of the {of_chip} of a device"
    model = f"model: {plan.what}, {plan.parameters / 1e9:.2f} B parameters, on {plan.cluster.target}"
    rows = f"{settings.rows} row{'s' * (settings.rows != 1)}"
    if plan.row_tokens > 1:
        rows += f" of {plan.row_tokens:,} tokens"
    rows += " per device"
    if settings.num_microbatches > 1:
        rows += f" x {settings.num_microbatches} microbatches"
    step = f"step: stage {settings.stage}, {settings.precision}, {rows}, "
    step += f"remat {settings.remat!r}, prefetch {settings.prefetch}"
    step += f", offload {settings.offload!r}" if settings.offload != "none" else ""
    step += f", moments in {settings.moment_bits} bits" if settings.moment_bits else ""
    style = "bold green" if plan.fits else "bold red"
    return Text.assemble((verdict, style), "\n", limit, "\n", model, "\n", step)


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
    compiled = (plan.program and plan.program.analysis.held) or {}
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
        states = model_states(
            plan.parameters, plan.settings.stage, plan.cluster.num_devices // (plan.settings.model or 1)
        )
        explanations["ZeRO model states"] = "2 + 2 + 12 bytes per parameter, sharded according to the stage"
        rows.append(row("ZeRO model states", "", bytes_text(states.num_bytes), of=states.num_bytes))
    columns = [*(["compiled"] if compiled else []), "formula", "of the limit", *(["explanation"] if formulas else [])]
    return _table("Peak memory of a device", "", columns, rows)


def _program(program: CompiledStep, plan: Plan) -> Table:
    analysis = program.analysis
    rows = [
        ["arguments", bytes_text(program.arguments_bytes)],
        ["arguments updated in place", bytes_text(program.aliased_bytes)],
        ["temporaries", bytes_text(program.temporaries_bytes)],
    ]
    if analysis.buffers_bytes is not None:
        rows.append(["collectives in flight, at most", bytes_text(analysis.buffers_bytes)])
    if analysis.copied_bytes is not None:
        rows.append(["copied in loops per step", bytes_text(analysis.copied_bytes)])
    title = f"Program for {plan.cluster.target}, compiled in {program.compile_s:.0f} s"
    return _table(title, "", ["bytes"], rows)


def _communication(collectives: tuple[CollectiveSummary, ...]) -> Table:
    rows = [
        [
            row.kind,
            row.axis,
            row.dtype,
            f"{row.count:,}",
            bytes_text(row.sent_bytes),
            f"{row.exposed_bytes / row.sent_bytes:.1%}" if row.sent_bytes else "",
        ]
        for row in collectives
    ]
    total, exposed = (sum(getattr(row, field) for row in collectives) for field in ("sent_bytes", "exposed_bytes"))
    rows.append(["total", "", "", "", bytes_text(total), f"{exposed / total:.1%}" if total else ""])
    columns = ["axis", "dtype", "count", "sent", "not overlapped"]
    return _table("Communication of a device per step", "", columns, rows)


def _speed(predicted: Prediction, speed: Throughput) -> Text:
    rate = f"{speed.tokens_per_device_s:,.0f} tokens/s per device"
    utilization = f"{speed.model_flop_utilization:.1%} model FLOPs utilization"
    return Text(f"Predicted: {rate}, {utilization}, bound by {label(predicted.bound_by)}", style="bold")


def _time(predicted: Prediction) -> Table:
    busy = sorted(predicted.busy_s.items(), key=lambda lane: -lane[1])
    rows = [[label(lane), f"{seconds * 1e3:,.1f}", f"{seconds / predicted.step_s:.1%}"] for lane, seconds in busy]
    waiting = f"{predicted.waiting_s * 1e3:,.1f}", f"{predicted.waiting_s / predicted.step_s:.1%}"
    rows += [["waiting for links or copies", *waiting], ["whole step", f"{predicted.step_s * 1e3:,.1f}", ""]]
    return _table("Busy time per step", "", ["ms", "of the step"], rows)


def _change(num_bytes: float) -> str:
    return f"{'+' if num_bytes > 0 else ''}{bytes_text(num_bytes)}"


def _suggestions(plan: Plan) -> Table:
    title = "Ways to use the free memory" if plan.fits else "Ways to save memory"
    gib = lambda each: (bytes_text(each.peak_bytes), _change(each.peak_bytes - plan.peak_bytes))
    rows = [[each.change, *gib(each), "fits" if each.fits else "does not fit"] for each in plan.suggestions]
    return _table(title, "", ["by formula", "change", "verdict"], rows)
