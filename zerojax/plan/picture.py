"""Draws two pictures of plans: the memory at each stage, and the timeline of one layer. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from zerojax.plan.planner import Plan
from zerojax.plan.show import label
from zerojax.plan.timeline import Loop, Prediction

# Colors that also differ in lightness (Okabe and Ito).
_TERMS = {
    "parameters": "#0072B2",
    "optimizer state": "#56B4E9",
    "gradients": "#CC79A7",
    "gathered": "#E69F00",
    "checkpoints": "#009E73",
    "activations": "#F0E442",
}
_OTHER = "#999999"
_LANES = {"compute": "#0072B2", "memory": "#56B4E9"}
_LINK, _COPY = "#E69F00", "#009E73"
_SHORTEST = 1e-3  # shorter spans, as a share of an iteration, are not drawn


def memory_by_stage(plans: Sequence[Plan], path: Path) -> None:
    """Draws a stacked bar for each plan of one model, and lines for the memory of a device and the limit, as PNG."""
    figure, axes = plt.subplots(figsize=(7, 4.2))
    axes.spines[["top", "right"]].set_visible(False)
    names = list(dict.fromkeys(name for plan in plans for name, size in plan.held.items() if size > 2**20))
    bottoms = [0.0] * len(plans)
    for name in sorted(names, key=lambda name: list(_TERMS).index(name) if name in _TERMS else len(_TERMS)):
        sizes = [plan.held.get(name, 0) / 2**30 for plan in plans]
        axes.bar(range(len(plans)), sizes, 0.6, bottoms, label=label(name), color=_TERMS.get(name, _OTHER))
        bottoms = [bottom + size for bottom, size in zip(bottoms, sizes, strict=True)]
    for k, total in enumerate(bottoms):
        axes.text(k, total, f"{total:.1f}", ha="center", va="bottom")
    capacity = plans[0].cluster.chip.memory_bytes
    for num_bytes, name, style in ((capacity, "device memory", "-"), (plans[0].limit_bytes, "limit", "--")):
        gib = num_bytes / 2**30
        axes.axhline(gib, color="black", linewidth=1, linestyle=style)
        axes.text(len(plans) - 0.5, gib, f"{name}: {gib:.0f} GiB", ha="right", va="bottom", fontsize=8)
    axes.set_xticks(range(len(plans)), [f"stage {plan.settings.stage}" for plan in plans])
    axes.set_ylabel("GiB per device")
    axes.set_ylim(0, 1.12 * max([*bottoms, capacity / 2**30]))
    level = "as compiled" if all(plan.program and plan.program.held for plan in plans) else "by formula"
    axes.set_title(f"{plans[0].what} on {plans[0].cluster.target}, remat {plans[0].settings.remat!r}, {level}")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    _save(figure, path)


def timeline(predictions: Mapping[str, Prediction], path: Path) -> None:
    """Draws one iteration of the two longest loops (layers forward and backward), with a row for each lane.

    Each prediction, by its title, becomes a row of the PNG file. Raises ValueError if a program has fewer loops.
    """
    loops = {title: _longest(title, prediction) for title, prediction in predictions.items()}
    heights = [len(_rows(pair)) for pair in loops.values()]
    size, ratios = (11, 1.4 + 0.55 * sum(heights)), {"height_ratios": heights}
    options = {"squeeze": False, "gridspec_kw": ratios, "sharex": "col", "layout": "constrained"}
    figure, grid = plt.subplots(len(loops), 2, figsize=size, **options)
    for parts, (title, pair) in zip(grid, loops.items(), strict=True):
        rows = _rows(pair)
        for axes, loop, name in zip(parts, pair, ("forward", "backward"), strict=True):
            _draw(axes, loop, rows)
            axes.set_title(f"{title}: {name}, {loop.iteration_s * 1e3:.1f} ms x {loop.trips}", fontsize=10)
        parts[1].set_yticklabels([])
    for axes in grid[-1]:
        axes.set_xlabel("ms of one iteration")
    legend = {"matrix products": _LANES["compute"], "memory-bound": _LANES["memory"], "links": _LINK, "copies": _COPY}
    handles = [Patch(color=color) for color in legend.values()]
    figure.legend(handles, legend, loc="outside lower center", ncols=len(legend), frameon=False)
    _save(figure, path)


def _longest(title: str, prediction: Prediction) -> list[Loop]:
    """The two loops that take longest, in the order in which they run."""
    longest = sorted(prediction.loops, key=lambda loop: -loop.trips * loop.iteration_s)[:2]
    if len(longest) < 2:
        raise ValueError(f"picture: no loops over layers in {title!r}\n  fix:      scan over the layers of the model")
    return sorted(longest, key=prediction.loops.index)


def _rows(pair: Sequence[Loop]) -> list[str]:
    lanes = dict.fromkeys(span.lane for loop in pair for span in loop.spans)
    return sorted(lanes, key=lambda lane: (lane != "compute", lane))


def _draw(axes: Axes, loop: Loop, rows: list[str]) -> None:
    for span in loop.spans:
        if span.end_s - span.start_s < _SHORTEST * loop.iteration_s:
            continue
        color = _LANES.get(span.bound, _COPY if "cop" in span.lane else _LINK)
        x, width = span.start_s * 1e3, (span.end_s - span.start_s) * 1e3
        y, style = (rows.index(span.lane) - 0.35, 0.7), {"edgecolor": "white", "linewidth": 0.4}
        axes.broken_barh([(x, width)], y, color=color, **style)
    axes.set_yticks(range(len(rows)), [label(lane) for lane in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, None)
    axes.spines[["top", "right"]].set_visible(False)


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)
