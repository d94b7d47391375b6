"""Shows who holds which shard of a state, and the order of a step: on the terminal, or as a picture in a file."""

from __future__ import annotations

import colorsys
import math
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

from zerojax.analysis.holdings import Holding, Holdings, holdings
from zerojax.analysis.order import Activity, StepOrder, step_order
from zerojax.step.state import TrainState, check_not_donated
from zerojax.utils.tables import FILE_WIDTH, paragraph, screen
from zerojax.utils.text import SPACE, bytes_text, wrapped


def visualize(state: TrainState, step: Any = None, batch: Any = None, *, path: str | Path | None = None) -> None:
    """Shows who holds which shard of a state; or with a step, the order in which its units are gathered and compute.

    The first picture has a row for each unit, where equal layers are one, and a column for each device. The second has
    a row for each unit in the order of the forward pass, and a column for each turn, in which one unit computes.

    Args:
        state: of `init` or `eval_init`, also on an abstract mesh.
        step, batch: a step of `train_step` and a batch for it, arrays or avals, for the second picture. This traces the
            loss.
        path: the file to write, for example 'placement.png' or '.svg', instead of the terminal. It needs matplotlib,
            the extra `plot`.

    Raises:
        ValueError: if the state was donated, or only one of `step` and `batch` is given.
        ImportError: if matplotlib is missing.
    """
    check_not_donated(state)
    if (step is None) != (batch is None):
        raise ValueError(
            f"visualize: the order of a step is found in a trace of its loss\n"
            f"  got:      {'a batch without a step' if step is None else 'a step without a batch'}\n"
            f"  fix:      visualize(state, step, batch), or visualize(state) for the placement"
        )
    width = FILE_WIDTH if path is not None else screen().width
    picture = _holdings_of(state) if step is None else _turns_of(state, step, batch, width)
    if path is not None:
        _write(picture, Path(path))
        return
    text = holdings_picture(picture, width) if isinstance(picture, Holdings) else turns_picture(picture, width)
    Console(width=width).print(text, no_wrap=True, overflow="ignore", crop=False)


def _holdings_of(state: TrainState) -> Holdings:
    config = state.definition.config
    assert config is not None, "every state of a Zero has its configuration"
    return holdings(config, state)


def _turns_of(state: TrainState, step: Any, batch: Any, width: int) -> StepOrder:
    settings, uses = step.settings, step.uses(state, batch)
    sizes = settings.prefetch, settings.num_microbatches, most_segments(width)
    return step_order(state.definition.leaves, uses, step.config.stage, *sizes)


def _write(picture: Holdings | StepOrder, path: Path) -> None:
    try:
        import matplotlib.pyplot  # noqa: F401
    except ImportError as error:
        raise ImportError(f"{error}\n  fix:      pip install 'zerojax[plot]'") from error
    if isinstance(picture, Holdings):
        draw_holdings(picture, path)
    else:
        draw_turns(picture, path)


_DIGITS = string.digits + string.ascii_lowercase + string.ascii_uppercase + "+/"  # of the numbers of shards
_WHOLE = "■"
_MOST_SPACED = 16  # devices, up to which columns have numbers and spaces
_LEAST_NAME, _MOST_NAME = 14, 44

# Colors that also differ in lightness (Okabe and Ito).
COLORS = {
    Activity.GATHER: "#E69F00",
    Activity.HELD: "#F0E442",
    Activity.FORWARD: "#56B4E9",
    Activity.BACKWARD: "#0072B2",
    Activity.REDUCE: "#CC79A7",
    Activity.UPDATE: "#009E73",
}
MEANING = {
    Activity.GATHER: "is gathered",
    Activity.HELD: "waits in full",
    Activity.FORWARD: "forward pass",
    Activity.BACKWARD: "backward pass",
    Activity.REDUCE: "gradients are reduced",
    Activity.UPDATE: "update",
}


def shard_color(number: int, num_shards: int) -> tuple[float, float, float]:
    """The color of a shard, in red, green and blue from 0 to 1; that of a whole array is grey."""
    if num_shards == 1:
        return 0.82, 0.82, 0.82
    return colorsys.hsv_to_rgb(0.85 * number / num_shards, 0.42, 0.95 if number % 2 else 0.85)


def holdings_picture(held: Holdings, width: int) -> Text:
    """Who holds which shard. Devices that do not fit next to each other are shown in several parts."""
    spaced = held.num_devices <= _MOST_SPACED
    cell = 3 if spaced else 1
    sizes = [bytes_text(row.num_bytes) for row in held.rows]
    size_width = max(map(len, [*sizes, "on a device"]))
    room = width - size_width - 4
    longest = max(len(row.name) for row in held.rows)
    most_shown = max(1, (room - _LEAST_NAME) // cell)
    shown = math.ceil(held.num_devices / math.ceil(held.num_devices / most_shown))
    name_width = max(_LEAST_NAME, min(longest, _MOST_NAME, room - cell * shown))
    lines = [Text(held.title, "bold")]
    for first in range(0, held.num_devices, shown):
        part = range(first, min(first + shown, held.num_devices))
        lines += [Text(), *_axes_lines(held, part, cell, name_width + size_width + 4)]
        category = ""
        for row, size in zip(held.rows, sizes, strict=True):
            if row.category != category:
                category = row.category
                lines.append(Text(category, "bold"))
            lines += _holding_lines(row, part, cell, (name_width, size.rjust(size_width)))
    legend = f"A number is the shard that a device holds, {_WHOLE} the whole array. A size is what a device holds."
    if held.num_devices > 10 and not spaced:
        legend += " After 9 come a to z, A to Z, + and /."
    return Text("\n").join([*lines, Text(), *map(Text, paragraph(legend, width))])


def _axes_lines(held: Holdings, part: range, cell: int, indent: int) -> Iterator[Text]:
    """The position of each device along each axis of the mesh, and its number."""
    positions = {name: held.coordinates(name) for name in held.axes}
    if len(positions) > 1 or cell == 1:
        positions = {"device": tuple(range(held.num_devices)), **positions}
    for name, numbers in positions.items():
        yield Text(f"{name:>{indent - 2}}  " + "".join(_number(numbers[d], cell) for d in part), "dim")


def _number(number: int, cell: int) -> str:
    return f"{number:>2} " if cell == 3 else _DIGITS[number % len(_DIGITS)]


def _holding_lines(row: Holding, part: range, cell: int, label: tuple[int, str]) -> Iterator[Text]:
    """The lines of a row: the name may take several."""
    name_width, size = label
    first, *rest = wrapped(row.name, name_width)
    line = Text(f"  {first:{name_width}} {size} ".replace(SPACE, " "))
    for d in part:
        number = row.shards[d]
        red, green, blue = (round(255 * part) for part in shard_color(number, row.num_shards))
        style = Style(color="black", bgcolor=Color.from_rgb(red, green, blue))
        line.append(_number(number, cell) if row.num_shards > 1 else _WHOLE.center(cell), style)
    yield line
    yield from (Text(f"  {each}".replace(SPACE, " ")) for each in rest)


def most_segments(width: int) -> int:
    """The number of segments whose order fits into a width."""
    return max(4, (width - _MOST_NAME // 2 - 12) // 4)


def turns_picture(order: StepOrder, width: int) -> Text:
    """The order of a step: a row for each unit, and a column for each turn."""
    names = [f"{name} (rows)" if n in order.looked_up else name for n, name in enumerate(order.units)]
    name_width = min(max(map(len, names)), max(_LEAST_NAME, width - 2 * order.num_turns - 2))
    lines = [Text(order.title, "bold"), Text()]
    for n, name in enumerate(names):
        first, *rest = wrapped(name, name_width)
        line = Text(f"{first:{name_width}}  ")
        for turn in range(order.num_turns):
            activity = order.cells.get((n, turn))
            line.append(f"{activity.value if activity else ' '} ", _style(activity))
        lines += [line, *map(Text, rest)]
    lines += [Text(), *([Text(order.left_out)] if order.left_out else [])]
    found = set(order.cells.values())
    legend = ", ".join(f"{each.value} {meaning}" for each, meaning in MEANING.items() if each in found)
    if order.looked_up:
        legend += "; (rows): looks up rows, and is not gathered"
    return Text("\n").join([*lines, *map(Text, paragraph(legend, width))])


def _style(activity: Activity | None) -> Style:
    return Style() if activity is None else Style(color="black", bgcolor=Color.parse(COLORS[activity]))


_NUMBERED = 32  # devices, up to which cells have numbers
_ROW, _CELL, _SPACING = 0.26, 0.32, 0.9  # inches; the gap above a category is in rows


def draw_holdings(held: Holdings, path: Path) -> None:
    """Draws a row for each unit and a column for each device, in the color of the shard that the device holds."""
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch, Rectangle

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
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch, Rectangle

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
    import matplotlib.pyplot as plt

    if not ticks:
        axes.axis("off")
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)
