"""A plan on a terminal: the verdict, what takes the memory, what travels, and what would change it."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from zerojax.plan.memory import model_states
from zerojax.plan.planner import Plan


def render(plan: Plan, formulas: bool = False) -> Group:
    """The tables of a plan.

    Args:
        plan: what to show.
        formulas: also how each term comes about.
    """
    parts = [_verdict(plan), _memory(plan, formulas)]
    if plan.program:
        parts += [_program(plan)]
        parts += [_traffic(plan)] if plan.program.traffic else []
    parts += [_suggestions(plan)] if plan.suggestions else []
    parts += [Text(plan.settings.python(), style="dim")]
    return Group(*(part for each in parts for part in (each, Text())))


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
    what += f"{settings.precision}, {rows} on a device, keep {settings.keep!r}, prefetch {settings.prefetch}"
    return Text.assemble((told, "bold green" if plan.fits else "bold red"), "\n", what)


def _table(title: str, first: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="left" if column == "how" else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _memory(plan: Plan, formulas: bool) -> Table:
    memory = plan.memory
    share = lambda num_bytes: f"{num_bytes / plan.limit_bytes:.1%}"
    rows = [
        [term.name, _gib(term.num_bytes), share(term.num_bytes), *([term.formula] if formulas else [])]
        for term in memory.terms
    ]
    rows.append(["sum by formula", _gib(memory.peak_bytes), share(memory.peak_bytes), *([""] if formulas else [])])
    if memory.host_bytes:
        rows.append(["in host memory", _gib(memory.host_bytes), "", *([""] if formulas else [])])
    if formulas:
        states = model_states(
            plan.parameters, plan.settings.stage, plan.cluster.num_devices // (plan.settings.model or 1)
        )
        how = "(2 + 2 + 12) bytes a parameter, sharded as the stage says: parameters, gradients, optimizer"
        rows.append(["ZeRO's model states", _gib(states.num_bytes), share(states.num_bytes), how])
    columns = ["GiB", "of the limit", *(["how"] if formulas else [])]
    return _table("Memory of a device by formula", "", columns, rows)


def _program(plan: Plan) -> Table:
    program = plan.program
    assert program is not None
    formula = plan.memory
    rows = [
        ["arguments", _gib(program.arguments_bytes), _gib(formula.arguments_bytes)],
        ["temporaries", _gib(program.temporaries_bytes), _gib(formula.peak_bytes - formula.arguments_bytes)],
        ["peak", _gib(program.peak_bytes), _gib(formula.peak_bytes)],
        ["updated in place", _gib(program.aliased_bytes), ""],
        ["in host memory", _gib(program.host_bytes), _gib(formula.host_bytes)],
    ]
    if program.buffers_bytes is not None and program.copied_bytes is not None:
        rows.append(["largest sum of collectives under way", _gib(program.buffers_bytes), ""])
        rows.append(["copied in loops, a step", _gib(program.copied_bytes), ""])
    title = f"The program for {plan.cluster.target}, compiled in {program.compile_s:.0f} s: GiB of a device"
    return _table(title, "", ["compiled", "formula"], rows)


def _traffic(plan: Plan) -> Table:
    traffic = plan.program.traffic if plan.program and plan.program.traffic else ()
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


def _suggestions(plan: Plan) -> Table:
    title = "What the room could be used for" if plan.fits else "What would make it smaller"
    rows = [
        [
            each.change,
            _gib(each.peak_bytes),
            f"{each.peak_bytes - plan.peak_bytes:+.2e}",
            "fits" if each.fits else "does not fit",
        ]
        for each in plan.suggestions
    ]
    for row, each in zip(rows, plan.suggestions, strict=True):
        row[2] = f"{(each.peak_bytes - plan.peak_bytes) / 2**30:+,.2f}"
    return _table(title, "", ["GiB by formula", "change", ""], rows)
