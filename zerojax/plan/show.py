"""A plan on a terminal: the verdict, what takes the memory, what travels, and what would change it."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from zerojax.plan.planner import Plan
from zerojax.plan.program import CompiledStep, Traffic
from zerojax.plan.search import Candidate, Ranking
from zerojax.plan.timeline import Prediction
from zerojax.plan.utilisation import Throughput
from zerojax.report.memory import model_states


def render(plan: Plan, formulas: bool = False) -> Group:
    """The tables of a plan.

    Args:
        plan: what to show.
        formulas: also how each term comes about.
    """
    parts = [_verdict(plan), _memory(plan, formulas)]
    if plan.program:
        reading = plan.program.reading
        parts.append(_program(plan.program, plan))
        parts += [_traffic(reading.traffic)] if reading.traffic else []
        if reading.prediction and plan.throughput:
            parts.append(Group(_speed(reading.prediction, plan.throughput), _time(reading.prediction)))
        parts += [Text(f"not read: {' '.join(reading.unread.split())[:300]}")] if reading.unread else []
    parts += [_suggestions(plan)] if plan.suggestions else []
    parts += [Text(plan.settings.python(), style="dim")]
    return Group(*(part for each in parts for part in (each, Text())))


def render_ranking(ranking: Ranking, shown: int = 12) -> Group:
    """What `search` found: the first of them, and the calls that build the winner."""
    everyone = [*ranking.candidates[:shown], ranking.naive]
    replicated = any(c.settings.replica > 1 for c in everyone)
    table = Table(
        title=f"{ranking.what} on {ranking.cluster.target}: the fastest of {len(ranking.candidates)} settings",
        caption="ms of a step; those with tokens/s (of a device) as compiled, the others by formula",
        title_justify="left", caption_justify="left", title_style="bold", box=box.SIMPLE, pad_edge=False,
    )  # fmt: skip
    columns = ["", "stage", "remat", "rows", *(["replica"] if replicated else []), "GiB", "ms", "tokens/s", ""]
    for k, column in enumerate(columns):
        table.add_column(column, justify="left" if k in (0, len(columns) - 1) else "right", no_wrap=True)

    def row(c: Candidate, name: str) -> list[str]:
        s, compiled = c.settings, c.plan
        speed = f"{compiled.throughput.tokens_per_device_s:,.0f}" if compiled and compiled.throughput else ""
        peak = _gib(compiled.peak_bytes if compiled else c.peak_bytes)
        replica = [str(s.replica)] if replicated else []
        rows = f"{s.rows} x {s.num_microbatches}"
        return [name, str(s.stage), s.remat, rows, *replica, peak, f"{c.step_s * 1e3:,.0f}", speed, c.bound]

    for k, candidate in enumerate(everyone[:-1]):
        table.add_row(*row(candidate, str(k + 1)))
    table.add_row(*row(ranking.naive, "naive"))
    parts: list = [table]
    winner = ranking.winner
    if winner is None:
        return Group(*parts, Text("none of the fastest fits as compiled", style="bold red"))
    gain = ranking.naive.step_s / winner.step_s
    told = (
        f"winner: {winner.step_s * 1e3:,.0f} ms a step, {gain:.2f} times as fast as full recomputation without prefetch"
    )
    return Group(*parts, Text(told, style="bold green"), Text(winner.settings.python(), style="dim"))


def text(plan: Plan, formulas: bool = False, width: int = 120) -> str:
    """The tables without colours."""
    console = Console(width=width, no_color=True)
    with console.capture() as capture:
        console.print(render(plan, formulas))
    return capture.get()


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.2f}"


def _verdict(plan: Plan) -> Text:
    chip, settings = plan.cluster.chip, plan.settings
    level = "as compiled" if plan.program else "by formula"
    share = plan.limit_bytes / chip.memory_bytes
    limit = (
        f"{_gib(plan.limit_bytes)} GiB that a program may use of a device ({share:.0%} of {_gib(chip.memory_bytes)})"
    )
    if plan.fits:
        told = f"fits: {_gib(plan.peak_bytes)} GiB {level}, {_gib(plan.room_bytes)} GiB less than the {limit}"
    else:
        told = f"does not fit: {_gib(plan.peak_bytes)} GiB {level}, {_gib(-plan.room_bytes)} GiB more than the {limit}"
    rows = f"{settings.rows} row{'s' * (settings.rows != 1)}" + (
        f" x {settings.num_microbatches}" if settings.num_microbatches > 1 else ""
    )
    what = f"{plan.what}, {plan.parameters / 1e9:.2f} B parameters, on {plan.cluster.target}: stage {settings.stage}, "
    what += f"{settings.precision}, {rows} on a device, remat {settings.remat!r}, prefetch {settings.prefetch}"
    return Text.assemble((told, "bold green" if plan.fits else "bold red"), "\n", what)


def _table(title: str, first: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column(first)
    for column in columns:
        is_text = column == "how"  # what gives way where the terminal is narrow
        table.add_column(column, justify="left" if is_text else "right", no_wrap=not is_text)
    for row in rows:
        table.add_row(*row)
    return table


def _memory(plan: Plan, formulas: bool) -> Table:
    """By category: as the compiler planned its buffers, where that was read, beside the formula."""
    formula = {term.name: term.num_bytes for term in plan.memory.terms}
    compiled = (plan.program and plan.program.reading.held) or {}
    how = {term.name: term.formula for term in plan.memory.terms}
    gib = lambda held, name: _gib(held[name]) if name in held else ""

    def row(name: str, *figures: str, of: float | None = None) -> list[str]:
        shown = [name, *(figures if compiled else figures[-1:]), f"{of / plan.limit_bytes:.1%}" if of else ""]
        return [*shown, how.get(name, "")] if formulas else shown

    small = lambda name: name not in formula and round(compiled[name] / 2**30, 2) == 0
    names = [name for name in dict.fromkeys([*formula, *compiled]) if not small(name)]
    level = compiled or formula
    rows = [row(name, gib(compiled, name), gib(formula, name), of=level.get(name)) for name in names]
    total = plan.program.peak_bytes if plan.program and compiled else plan.memory.peak_bytes
    rows.append(row("sum", _gib(total), _gib(plan.memory.peak_bytes), of=total))
    if plan.host_bytes or plan.memory.host_bytes:
        rows.append(row("in host memory", _gib(plan.host_bytes), _gib(plan.memory.host_bytes)))
    if formulas:
        states = model_states(
            plan.parameters, plan.settings.stage, plan.cluster.num_devices // (plan.settings.model or 1)
        )
        how["ZeRO's model states"] = "(2 + 2 + 12) bytes a parameter, sharded as the stage says"
        rows.append(row("ZeRO's model states", "", _gib(states.num_bytes), of=states.num_bytes))
    columns = [*(["compiled"] if compiled else []), "formula", "of the limit", *(["how"] if formulas else [])]
    return _table("Memory of a device when it is fullest, in GiB", "", columns, rows)


def _program(program: CompiledStep, plan: Plan) -> Table:
    reading = program.reading
    rows = [
        ["arguments", _gib(program.arguments_bytes)],
        ["of them updated in place", _gib(program.aliased_bytes)],
        ["temporaries", _gib(program.temporaries_bytes)],
    ]
    if reading.buffers_bytes is not None:
        rows.append(["largest sum of collectives under way", _gib(reading.buffers_bytes)])
    if reading.copied_bytes is not None:
        rows.append(["copied in loops, a step", _gib(reading.copied_bytes)])
    title = f"The program for {plan.cluster.target}, compiled in {program.compile_s:.0f} s"
    return _table(title, "", ["GiB"], rows)


def _traffic(traffic: tuple[Traffic, ...]) -> Table:
    rows = [
        [
            row.kind,
            row.axis,
            row.dtype,
            f"{row.count:,}",
            _gib(row.sent_bytes),
            f"{row.exposed_bytes / row.sent_bytes:.1%}" if row.sent_bytes else "",
        ]
        for row in traffic
    ]
    total, exposed = (sum(getattr(row, field) for row in traffic) for field in ("sent_bytes", "exposed_bytes"))
    rows.append(["all", "", "", "", _gib(total), f"{exposed / total:.1%}" if total else ""])
    columns = ["axis", "dtype", "a step", "GiB sent", "with no product beside"]
    return _table("What a device sends in a step", "", columns, rows)


def _speed(predicted: Prediction, speed: Throughput) -> Text:
    told = f"{speed.tokens_per_device_s:,.0f} tokens/s a device, {speed.model_flop_utilisation:.1%} of the peak flops"
    return Text(f"Predicted: {told}, bound by {predicted.bound_by}", style="bold")


def _time(predicted: Prediction) -> Table:
    busy = sorted(predicted.busy_s.items(), key=lambda lane: -lane[1])
    rows = [[part, f"{seconds * 1e3:,.1f}", f"{seconds / predicted.step_s:.1%}"] for part, seconds in busy]
    waiting = f"{predicted.waiting_s * 1e3:,.1f}", f"{predicted.waiting_s / predicted.step_s:.1%}"
    rows += [["waiting for a link or a copy", *waiting], ["step", f"{predicted.step_s * 1e3:,.1f}", ""]]
    return _table("Time of what is busy in a step", "", ["ms", "of the step"], rows)


def _suggestions(plan: Plan) -> Table:
    title = "What the room could be used for" if plan.fits else "What would make it smaller"
    gib = lambda each: (_gib(each.peak_bytes), f"{(each.peak_bytes - plan.peak_bytes) / 2**30:+,.2f}")
    rows = [[each.change, *gib(each), "fits" if each.fits else "does not fit"] for each in plan.suggestions]
    return _table(title, "", ["GiB by formula", "change", ""], rows)
