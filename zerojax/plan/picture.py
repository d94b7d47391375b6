"""Two pictures of plans: memory by stage, and one layer on the lanes of a device. They need matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from zerojax.plan.planner import Plan
from zerojax.plan.timeline import Loop, Prediction

# Colours that differ in lightness too (Okabe and Ito), by what they stand for in both pictures.
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
_SHORTEST = 1e-3  # of a loop's iteration: what takes less is not drawn


def memory_by_stage(plans: Sequence[Plan], path: Path) -> None:
    """Stacked bars, one for each plan, against what a device has.

    Args:
        plans: of one model on one cluster, at several stages.
        path: of a PNG file.
    """
    figure, axes = _figure(7, 4.2)
    names = list(dict.fromkeys(name for plan in plans for name, size in plan.held.items() if size > 2**20))
    bottoms = [0.0] * len(plans)
    for name in sorted(names, key=lambda name: list(_TERMS).index(name) if name in _TERMS else len(_TERMS)):
        sizes = [plan.held.get(name, 0) / 2**30 for plan in plans]
        axes.bar(range(len(plans)), sizes, 0.6, bottoms, label=name, color=_TERMS.get(name, _OTHER))
        bottoms = [bottom + size for bottom, size in zip(bottoms, sizes, strict=True)]
    for k, total in enumerate(bottoms):
        axes.text(k, total, f"{total:.1f}", ha="center", va="bottom")
    chip = plans[0].cluster.chip
    for size, told in ((chip.memory_bytes, "of a device"), (plans[0].limit_bytes, "for a program")):
        axes.axhline(size / 2**30, color="black", linewidth=1, linestyle="--" if told == "for a program" else "-")
        axes.text(len(plans) - 0.5, size / 2**30, f"{size / 2**30:.0f} GiB {told}", ha="right", va="bottom", fontsize=8)
    axes.set_xticks(range(len(plans)), [f"stage {plan.settings.stage}" for plan in plans])
    axes.set_ylabel("GiB of a device")
    axes.set_ylim(0, 1.12 * max([*bottoms, chip.memory_bytes / 2**30]))
    level = "as compiled" if all(plan.program and plan.program.reading.held for plan in plans) else "by formula"
    axes.set_title(f"{plans[0].what} on {plans[0].cluster.target}, remat {plans[0].settings.remat!r}, {level}")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    _save(figure, path)


def timeline(predictions: Mapping[str, Prediction], path: Path) -> None:
    """One iteration of the two longest loops (layers forward and backward), with a row for each lane.

    Args:
        predictions: by title; each is a part of the picture.
        path: of a PNG file.

    Raises:
        ValueError: a program without loops.
    """
    loops = {title: _longest(title, prediction) for title, prediction in predictions.items()}
    heights = [len(_rows(pair)) for pair in loops.values()]
    figure, grid = plt.subplots(
        len(loops), 2, figsize=(11, 1.4 + 0.55 * sum(heights)), squeeze=False, gridspec_kw={"height_ratios": heights},
        sharex="col", layout="constrained",
    )  # fmt: skip
    for parts, (title, pair) in zip(grid, loops.items(), strict=True):
        rows = _rows(pair)
        for axes, loop, name in zip(parts, pair, ("forward", "backward"), strict=True):
            _draw(axes, loop, rows)
            axes.set_title(f"{title}: {name}, {loop.iteration_s * 1e3:.1f} ms x {loop.trips}", fontsize=10)
        parts[1].set_yticklabels([])
    for axes in grid[-1]:
        axes.set_xlabel("ms of one iteration")
    told = {"products": _LANES["compute"], "what memory limits": _LANES["memory"], "links": _LINK, "copies": _COPY}
    handles = [Patch(color=colour) for colour in told.values()]
    figure.legend(handles, told, loc="outside lower center", ncols=len(told), frameon=False)
    _save(figure, path)


def _longest(title: str, prediction: Prediction) -> tuple[Loop, Loop]:
    """The two loops that take longest, in the order in which they run."""
    loops = sorted(prediction.loops, key=lambda loop: -loop.trips * loop.iteration_s)[:2]
    if len(loops) < 2:
        raise ValueError(f"picture: no loops over layers in {title!r}\n  fix:      a model whose layers are scanned")
    first, second = sorted(loops, key=lambda loop: prediction.loops.index(loop))
    return first, second


def _rows(pair: Sequence[Loop]) -> list[str]:
    lanes = dict.fromkeys(span.lane for loop in pair for span in loop.spans)
    return sorted(lanes, key=lambda lane: (lane != "compute", lane))


def _draw(axes: Any, loop: Loop, rows: list[str]) -> None:
    for span in loop.spans:
        if span.end_s - span.start_s < _SHORTEST * loop.iteration_s:
            continue
        colour = _LANES.get(span.bound, _COPY if "cop" in span.lane else _LINK)
        x, width = span.start_s * 1e3, (span.end_s - span.start_s) * 1e3
        axes.broken_barh(
            [(x, width)], (rows.index(span.lane) - 0.35, 0.7), color=colour, edgecolor="white", linewidth=0.4
        )
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, None)
    for side in "top", "right":
        axes.spines[side].set_visible(False)


def _figure(width: float, height: float) -> Any:
    figure, axes = plt.subplots(figsize=(width, height))
    for side in "top", "right":
        axes.spines[side].set_visible(False)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)
