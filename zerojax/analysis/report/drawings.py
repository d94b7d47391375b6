"""Draws who holds which shard, and the order of a step, as files. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.patches import Patch, Rectangle

from zerojax.analysis.report.holdings import Holdings
from zerojax.analysis.report.order import StepOrder
from zerojax.analysis.report.pictures import COLORS, MEANING, shard_color
from zerojax.utils.text import SPACE, bytes_text

_NUMBERED = 32  # devices, up to which cells have numbers
_ROW, _CELL, _SPACING = 0.26, 0.32, 0.9  # inches; the gap above a category is in rows


def draw_holdings(held: Holdings, path: Path) -> None:
    """Draws a row for each unit and a column for each device, in the color of the shard that the device holds."""
    columns, rows = held.num_devices, len(held.rows)
    cell = _CELL if columns <= _NUMBERED else _CELL / 2
    categories = list(dict.fromkeys(row.category for row in held.rows))
    height = rows + (_SPACING + 0.4) * len(categories)
    figure, axes = plt.subplots(figsize=(cell * columns, _ROW * (height + 1)))
    y = 0.0
    for category in categories:
        y += _SPACING
        axes.text(-0.2, y - 0.1, category, ha="right", va="bottom", weight="bold", fontsize=9)
        for row in (row for row in held.rows if row.category == category):
            label = f"{row.name.replace(SPACE, ' ')}   {bytes_text(row.num_bytes):>10}"
            axes.text(-0.2, y + 0.5, label, ha="right", va="center", fontsize=8)
            for d, number in enumerate(row.shards):
                color = shard_color(number, row.num_shards)
                axes.add_patch(Rectangle((d, y), 1, 1, facecolor=color, edgecolor="white", linewidth=0.6))
                if columns <= _NUMBERED and row.num_shards > 1:
                    axes.text(d + 0.5, y + 0.5, str(number), ha="center", va="center", fontsize=7)
            y += 1
        y += 0.4
    _label_devices(axes, held)
    handles = [Patch(facecolor=shard_color(0, 1), label="the whole array")]
    handles += [Patch(facecolor=shard_color(1, 8), label="a shard; equal colors in a row are copies")]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(0, 0), ncols=2, frameon=False, fontsize=8)
    axes.set_xlim(0, columns)
    axes.set_ylim(y, 0)
    axes.set_title(held.title, fontsize=10, pad=14 * len(held.axes) + 12)
    _save_figure(figure, axes, path)


def _label_devices(axes: Any, held: Holdings) -> None:
    """The position of the devices along each axis of the mesh, above the columns; equal neighbors share a label."""
    for level, name in enumerate(reversed(list(held.axes))):
        positions = held.coordinates(name)
        starts = [d for d in range(held.num_devices) if d == 0 or positions[d] != positions[d - 1]]
        height = -0.35 - 0.8 * level
        axes.text(-0.2, height, name, ha="right", va="bottom", fontsize=8, clip_on=False)
        for start, end in zip(starts, [*starts[1:], held.num_devices], strict=True):
            middle = (start + end) / 2
            size = 7 if held.num_devices <= _NUMBERED or end - start > 1 else 5
            axes.text(middle, height, str(positions[start]), ha="center", va="bottom", fontsize=size, clip_on=False)
            if level and start:
                axes.plot([start, start], [height - 0.5, 0.4], color="black", linewidth=0.6, clip_on=False)


def draw_turns(order: StepOrder, path: Path) -> None:
    """Draws a row for each unit and a column for each turn."""
    rows, columns = len(order.units), order.num_turns
    figure, axes = plt.subplots(figsize=(max(4.0, _CELL * columns), _ROW * (rows + 2)))
    for (n, turn), activity in order.cells.items():
        axes.add_patch(Rectangle((turn, n), 1, 1, facecolor=COLORS[activity], edgecolor="white", linewidth=0.6))
    names = [f"{name} (rows)" if n in order.looked_up else name for n, name in enumerate(order.units)]
    axes.set_yticks([n + 0.5 for n in range(rows)], names, fontsize=8)
    axes.set_xticks([])
    axes.set_xlabel(f"turns, in which one unit computes. {order.left_out}", fontsize=8)
    axes.axvline(order.first_of_end, color="black", linewidth=0.8, linestyle="--")
    axes.set_xlim(0, columns)
    axes.set_ylim(rows, 0)
    axes.set_title(order.title, fontsize=10)
    found = set(order.cells.values())
    handles = [Patch(facecolor=COLORS[each], label=meaning) for each, meaning in MEANING.items() if each in found]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)
    _save_figure(figure, axes, path, ticks=True)


def _save_figure(figure: Any, axes: Any, path: Path, ticks: bool = False) -> None:
    if not ticks:
        axes.axis("off")
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)
