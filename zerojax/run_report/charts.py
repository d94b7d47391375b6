"""Draws curves as SVG, which has no text of a user and is the same for the same numbers. Needs matplotlib."""

from __future__ import annotations

import io
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from zerojax.run_report.read import Curve

_MOST_POINTS = 600  # of a curve in a chart
_INK = "#010203"  # stands for the color of the page's text
_COLORS = ("#0072B2", "#D55E00", "#009E73")  # Okabe and Ito
_BAD = "#CC3311"
_LOG_FROM = 50  # the largest value by the median, from which on the scale is logarithmic
_MOST_DOTS = 40  # a curve with more points has no dots
_SIZE = (4.8, 2.6)  # inches: readable when it is scaled to the width of a telephone
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text, in the font of the page
    "text.parse_math": False,
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "text.color": _INK,
    "legend.frameon": False,
}


def thinned(curve: Curve, most: int = _MOST_POINTS) -> Curve:
    """At most about `most` points of a curve: of each of equal parts, the smallest and the largest value.

    A spike of one step stays, which every n-th point would miss. Values that are not finite are left out.
    """
    finite = [(step, value) for step, value in curve if math.isfinite(value)]
    if len(finite) <= most:
        return finite
    size = math.ceil(2 * len(finite) / most)
    kept = {0, len(finite) - 1}
    for start in range(0, len(finite), size):
        part = range(start, min(start + size, len(finite)))
        kept |= {min(part, key=lambda k: finite[k][1]), max(part, key=lambda k: finite[k][1])}
    return [finite[k] for k in sorted(kept)]


def is_logarithmic(curves: Sequence[Curve]) -> bool:
    """Whether some values are so large that they are shown on a logarithmic scale, for the others to be seen."""
    values = [value for curve in curves for _, value in curve if math.isfinite(value)]
    return bool(values) and min(values) > 0 and max(values) > _LOG_FROM * statistics.median(values)


def chart(curves: Mapping[str, Curve], restarts: Sequence[int] = (), *, from_zero: bool = False) -> str:
    """Returns an SVG element with some curves over the steps.

    Args:
        curves: by the name that the legend has, which is not escaped.
        restarts: steps from which the run was continued; dotted lines.
        from_zero: whether the scale begins at 0, as for amounts, unless it is logarithmic.
    """
    style: Any = _STYLE | {"svg.hashsalt": "/".join(curves)}
    with matplotlib.rc_context(style):
        figure = Figure(_SIZE, layout="constrained")
        axes = figure.add_subplot()
        for k, (name, curve) in enumerate(curves.items()):
            points, color = thinned(curve), _COLORS[k % len(_COLORS)]
            marker = "o" if len(points) <= _MOST_DOTS else None
            axes.plot(*_columns(points), color=color, label=name, linewidth=1.3, marker=marker, markersize=3.5)
            bad = [(step, 0.03) for step, value in curve if not math.isfinite(value)][:_MOST_POINTS]
            if bad:
                across = axes.get_xaxis_transform()
                axes.plot(*_columns(bad), "x", color=_BAD, transform=across, label="not finite", markersize=5)
        if is_logarithmic(list(curves.values())):
            axes.set_yscale("log")
            axes.yaxis.set_minor_formatter(NullFormatter())
        elif from_zero:
            top = max((v for c in curves.values() for _, v in c if math.isfinite(v)), default=0)
            axes.set_ylim(0, None if top > 0 else 1)
        for step in restarts:
            axes.axvline(step, color=_INK, alpha=0.5, linestyle=":", linewidth=1)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        for axis in axes.xaxis, axes.yaxis:
            axis.set_major_formatter(FuncFormatter(lambda value, _: _tick_text(value)))
        axes.set_xlabel("step")
        axes.grid(axis="y", alpha=0.25)
        if len(axes.get_legend_handles_labels()[0]) > 1:
            axes.legend(loc="best", fontsize=10)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _inline(file.getvalue())


def _tick_text(value: float) -> str:
    return f"{value:,.0f}" if 1e5 <= abs(value) < 1e12 else f"{value:,.6g}"


def _columns(points: Curve) -> tuple[list[int], list[float]]:
    return [step for step, _ in points], [value for _, value in points]


def _inline(svg: str) -> str:
    """The SVG element alone, as a part of a page: in its colors, as wide as there is room, without names of parts."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="[A-Za-z0-9]+_\d+"', "", svg)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg)
    svg = re.sub(r"font: [^;\"]*?([\d.]+px)[^;\"]*", r"font-size: \1", svg)
    return svg.replace(_INK, "currentColor").strip()
