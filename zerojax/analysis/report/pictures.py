"""Pictures of text, with colors on a terminal: who holds which shard, and the order of a step."""

from __future__ import annotations

import colorsys
import math
import string
from collections.abc import Iterator

from rich.color import Color
from rich.style import Style
from rich.text import Text

from zerojax.analysis.report.holdings import Holding, Holdings
from zerojax.analysis.report.order import Activity, StepOrder
from zerojax.utils.tables import paragraph
from zerojax.utils.text import SPACE, bytes_text, wrapped

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
