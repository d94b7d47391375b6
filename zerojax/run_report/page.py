"""Writes the page about a run: HTML without scripts, which loads nothing and has no text that is not escaped."""

from __future__ import annotations

import datetime
import html
import itertools
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from zerojax.run_report.charts import chart, is_logarithmic
from zerojax.run_report.read import Curve, RunFiles, config_changes, is_step, read_run
from zerojax.training.writers import EVALUATION, write_atomically
from zerojax.utils.text import bytes_text

_TITLES = {  # in the order of the page
    "loss": "Loss",
    "grad_norm": "Gradient norm",
    "tokens_per_s": "Tokens per second",
    "rows_per_s": "Rows per second",
    "mfu": "Model FLOPs utilization",
    "seconds_per_step": "Seconds per step",
    "skipped": "Skipped steps",
    "learning_rate": "Learning rate",
    "loss_scale": "Loss scale",
    "param_norm": "Norm of the parameters",
}
_FROM_ZERO = {_TITLES[name] for name in ("tokens_per_s", "rows_per_s", "mfu", "seconds_per_step", "skipped")}
_MOST_CHARTS = 40
_PAGE_STYLE = """
:root { color-scheme: light dark; --line: color-mix(in srgb, currentColor 20%, transparent); }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 1rem; max-width: 84rem; }
h1 { font-size: 1.6rem; margin: 0.5rem 0 0; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2rem 0 0.5rem; border-bottom: 1px solid var(--line); }
p { margin: 0.3rem 0; overflow-wrap: anywhere; }
.facts, .charts { display: grid; gap: 1rem; padding: 0; margin: 1rem 0; }
.facts { grid-template-columns: repeat(auto-fill, minmax(10rem, 1fr)); }
.facts div { border: 1px solid var(--line); border-radius: 6px; padding: 0.5rem 0.75rem; }
dt { font-size: 0.8rem; opacity: 0.75; }
dd { margin: 0; font-size: 1.15rem; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.charts { grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)); }
figure { margin: 0; min-width: 0; }
figcaption { font-weight: 600; overflow-wrap: anywhere; }
figcaption small { font-weight: 400; opacity: 0.75; }
svg { width: 100%; height: auto; font-family: system-ui, sans-serif; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; }
th, td { text-align: left; vertical-align: top; padding: 0.25rem 1rem 0.25rem 0; border-bottom: 1px solid var(--line); }
td { overflow-wrap: anywhere; min-width: 3rem; max-width: 40rem; white-space: pre-wrap; }
.short td { overflow-wrap: normal; white-space: nowrap; }
pre { overflow-x: auto; font-size: 0.8rem; line-height: 1.4; }
summary { cursor: pointer; padding: 0.25rem 0; }
"""
_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""


def write_report(directory: str | Path, file: str | Path | None = None) -> Path:
    """Writes a page about a run: curves, restarts, configuration, and the plan of its memory.

    The page is one file without scripts, which loads nothing, and the same for the same files. A run that is running,
    and lines that are half written, are no problem. What looks like a secret is masked.

    Args:
        directory: that was passed to `zerojax.fit`.
        file: where the page is written; report.html in the directory by default.

    Returns:
        The path of the page.

    Raises:
        ValueError: if the directory is not that of a run.
        ImportError: if matplotlib is not installed.

    Cost: reads metrics.jsonl as a whole. The page has at most some hundred points of each curve.
    """
    run = read_run(directory)
    path = Path(directory) / "report.html" if file is None else Path(file)
    write_atomically(path, _page(run).encode("utf-8", "replace").decode())  # JSON may have half a surrogate pair
    return path


def _page(run: RunFiles) -> str:
    parts = [_status(run), _facts(run), _charts(run), _starts(run), _config(run), _memory(run)]
    return _PAGE.format(title=html.escape(run.name or "run"), style=_PAGE_STYLE, body="\n".join(filter(None, parts)))


def _number_text(value: float) -> str:
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "infinite"
    is_whole = value == int(value) and abs(value) < 1e15
    return f"{value:,.0f}" if is_whole or 1e4 <= abs(value) < 1e15 else f"{value:,.5g}"


def _time_text(seconds: float) -> str:
    try:
        return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError, OSError):
        return "unknown"


def _status(run: RunFiles) -> str:
    of = f" of {run.num_steps:,}" if run.num_steps else ""
    said = (
        f"Step {run.last_step:,}{of}" if run.curves else f"No metrics yet{f', {run.num_steps:,} steps' if of else ''}"
    )
    if run.last_s is not None:
        said += f"; the last row was written {_time_text(run.last_s)}"
    if run.num_unread:
        lines = "1 line" if run.num_unread == 1 else f"{run.num_unread:,} lines"
        said += f"; {lines} could not be read, as one that is being written"
    return f"<p>{html.escape(said)}.</p>"


def _facts(run: RunFiles) -> str:
    facts = dict(_found_facts(run))
    cells = (f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd></div>" for name, text in facts.items())
    return f'<dl class="facts">{"".join(cells)}</dl>' if facts else ""


def _found_facts(run: RunFiles) -> Iterator[tuple[str, str]]:
    if loss := run.curves.get("loss"):
        yield "last loss", _number_text(loss[-1][1])
        finite = [(value, step) for step, value in loss if math.isfinite(value)]
        if finite:
            value, step = min(finite)
            yield "lowest loss", f"{_number_text(value)} at step {step:,}"
    evaluations = [(name, curve) for name, curve in run.curves.items() if name.startswith(EVALUATION)]
    for name, curve in evaluations[:4]:
        yield f"last {name}", _number_text(curve[-1][1])
    for name in ("tokens_per_s", "rows_per_s", "seconds_per_step"):
        finite = [value for _, value in run.curves.get(name, []) if math.isfinite(value)]
        if finite:
            yield f"{_TITLES[name].lower()}, median", _number_text(statistics.median(finite))
    if skipped := run.curves.get("skipped"):
        yield "skipped steps", _number_text(skipped[-1][1])
    if run.first_s is not None and run.last_s is not None and run.last_s > run.first_s:
        yield "from the first row to the last", str(datetime.timedelta(seconds=round(run.last_s - run.first_s)))
    if run.starts:
        last = run.starts[-1]
        yield "starts", str(len(run.starts))
        for name in ("devices", "mesh", "stage"):
            if name in last:
                yield name, _plain(last[name])


def _plain(value: Any) -> str:
    """JSON as a person writes it: text without quotes, and a mapping as its names and values."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain(item)}" for name, item in value.items())
    return json.dumps(value)


def _charts(run: RunFiles) -> str:
    restarts = [start["from_step"] for start in run.starts[1:] if is_step(start.get("from_step"))]
    groups = list(_groups(run.curves))
    figures = [_figure(title, curves, restarts) for title, curves in groups[:_MOST_CHARTS]]
    if not figures:
        return ""
    more = [title for title, _ in groups[_MOST_CHARTS:]]
    rest = f"<p>{len(more):,} more metrics are in metrics.jsonl.</p>" if more else ""
    dotted = "<p>Dotted lines: steps from which the run was continued.</p>" if restarts else ""
    return f'<h2>Curves</h2>{dotted}<div class="charts">{"".join(figures)}</div>{rest}'


def _groups(curves: Mapping[str, Curve]) -> Iterator[tuple[str, dict[str, Curve]]]:
    """The charts: (title, curves by the name in the legend). A metric and its evaluation are in one."""
    of_training = [name for name in curves if not name.startswith(EVALUATION)]
    order = {name: k for k, name in enumerate(_TITLES)}
    for name in sorted(of_training, key=lambda name: (order.get(name, len(order)), name)):
        evaluated = curves.get(f"{EVALUATION}{name}")
        both = {"training": curves[name]} | ({"evaluation": evaluated} if evaluated else {})
        yield _TITLES.get(name, name), both
    for name in sorted(curves):
        if name.startswith(EVALUATION) and name.removeprefix(EVALUATION) not in curves:
            yield name, {"evaluation": curves[name]}


def _figure(title: str, curves: dict[str, Curve], restarts: list[int]) -> str:
    values = [value for curve in curves.values() for _, value in curve]
    scale = " <small>(logarithmic)</small>" if is_logarithmic(list(curves.values())) else ""
    bad = sum(not math.isfinite(value) for value in values)
    said = f" <small>({bad:,} values not finite)</small>" if bad else ""
    drawn = chart(curves, restarts, from_zero=title in _FROM_ZERO)
    return f"<figure><figcaption>{html.escape(title)}{scale}{said}</figcaption>{drawn}</figure>"


def _table(header: Iterable[str], rows: Iterable[Iterable[str]], kind: str = "long") -> str:
    cells = lambda row, tag: "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in row)
    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f'<div class="scroll"><table class="{kind}"><tr>{cells(header, "th")}</tr>{body}</table></div>'


def _starts(run: RunFiles) -> str:
    if not run.starts:
        return ""
    names = ("time", "from_step", "host", "processes", "devices", "mesh", "stage", "dtypes")
    rows = [[_plain(start[name]) if name in start else "" for name in names] for start in run.starts]
    table = _table([name.replace("_", " ") for name in names], rows, "short")
    commands = _table(["start", "command", "versions"], (
        [str(k), _plain(start.get("command", "")), _plain(start.get("versions", {}))]
        for k, start in enumerate(run.starts, 1)
    ))  # fmt: skip
    return f"<h2>Starts</h2>{table}<details><summary>Commands and versions</summary>{commands}</details>"


def _config(run: RunFiles) -> str:
    rows = [[name, _plain(value)] for name, value in sorted(run.config.items())]
    table = _table(["name", "value"], rows) if rows else ""
    configs = [start["config"] for start in run.starts if isinstance(start.get("config"), Mapping)]
    changes = [
        [str(k), name, was, now]
        for k, (before, after) in enumerate(itertools.pairwise(configs), 2)
        for name, (was, now) in config_changes(before, after).items()
    ]
    changed = f"<h3>Changes</h3>{_table(['start', 'name', 'was', 'is'], changes)}" if changes else ""
    return f"<h2>Configuration</h2>{table}{changed}" if table or changed else ""


def _memory(run: RunFiles) -> str:
    measured = {
        name: max(finite)
        for name, curve in run.curves.items()
        if name.endswith("_bytes") and (finite := [value for _, value in curve if math.isfinite(value)])
    }
    if not measured and not run.plan:
        return ""
    rows = [[name, bytes_text(value)] for name, value in sorted(measured.items())]
    table = _table(["measured", "at most"], rows) if rows else "<p>The run recorded no measured memory.</p>"
    plan = (
        f"<details open><summary>By formula</summary><pre>{html.escape(run.plan)}</pre></details>" if run.plan else ""
    )
    return f"<h2>Memory of a device</h2>{table}{plan}"
