"""Shows who holds which shard of a state, and the order of a step: on the terminal, or in a file."""

from __future__ import annotations

import colorsys
import dataclasses
import enum
import io
import math
import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from jax.sharding import PartitionSpec
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import DEFAULT_TERMINAL_THEME
from rich.text import Text

from zerojax.analysis.explanation import CATEGORIES, DISK, HOST_MEMORY, explain
from zerojax.analysis.step import TrainStep
from zerojax.sharding.axes import axis_names
from zerojax.sharding.placement import Leaf, Stage
from zerojax.step.loss_traces import Use
from zerojax.step.state import TrainState, check_not_donated
from zerojax.utils.tables import FILE_WIDTH, paragraph, screen
from zerojax.utils.text import SPACE, bytes_text, fold, wrapped
from zerojax.utils.typing import PyTree


def visualize(
    state: TrainState, step: TrainStep | None = None, batch: PyTree = None, *, path: str | Path | None = None
) -> None:
    """Shows who holds which shard of a state; or with a step, the order in which its units are gathered and compute.

    The first picture has a row for each unit, where equal layers are one, and a column for each device. The second has
    a row for each unit in the order of the forward pass, and a column for each turn, in which one unit computes.

    Args:
        state: of `init` or `eval_init`, also on an abstract mesh.
        step, batch: a step of `train_step` and a batch for it, arrays or avals, for the second picture. This traces the
            loss.
        path: the file to write instead of the terminal: 'placement.svg' or '.html'.

    Raises:
        ValueError: if the state was donated, if only one of `step` and `batch` is given, or if the file is of another
            kind.
    """
    check_not_donated(state)
    if (step is None) != (batch is None):
        raise ValueError(
            f"visualize: the order of a step is found in a trace of its loss\n"
            f"  got:      {'a batch without a step' if step is None else 'a step without a batch'}\n"
            f"  fix:      visualize(state, step, batch), or visualize(state) for the placement"
        )
    if path is not None and Path(path).suffix not in (".svg", ".html"):
        raise ValueError(f"visualize: cannot write {str(path)!r}\n  fix:      pass a path that ends in .svg or .html")
    width = FILE_WIDTH if path is not None else screen().width
    if step is None:
        picture = holdings_picture(holdings(state), width)
    else:
        settings, uses = step.settings, step.uses(state, batch)
        sizes = settings.prefetch, settings.num_microbatches, most_segments(width)
        picture = order_picture(step_order(state.layout.leaves, uses, step.config.stage, *sizes), width)
    console = Console(width=width) if path is None else Console(width=width, record=True, file=io.StringIO())
    console.print(picture, no_wrap=True, overflow="ignore", crop=False)
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        save = console.save_svg if Path(path).suffix == ".svg" else console.save_html
        save(str(path), theme=DEFAULT_TERMINAL_THEME)


# Who holds which shard.


@dataclasses.dataclass(frozen=True)
class Holding:
    """The arrays of one unit that are divided in the same way.

    Attributes:
        name: of the unit, with '*' for the number of equal layers, and how many there are.
        num_bytes: of all of these layers on one device.
        shards: for each device in the order of the mesh, the number of the shard that it holds.
        num_shards: how many different shards there are; 1 if every device holds all.
    """

    category: str
    name: str
    num_bytes: int
    shards: tuple[int, ...]
    num_shards: int


@dataclasses.dataclass(frozen=True)
class Holdings:
    """The devices that hold each part of a state, by category; `axes` are those of the mesh, outermost first."""

    title: str
    axes: Mapping[str, int]
    rows: tuple[Holding, ...]


def shard_numbers(spec: PartitionSpec, axes: Mapping[str, int]) -> tuple[int, ...]:
    """The number of the shard that each device holds, counted along the dims of the array, the last dim fastest.

    Devices are counted in the order of `axes`, outermost first.
    """
    places = np.indices(tuple(axes.values())).reshape(len(axes), -1)  # [axis, device]
    numbers = np.zeros(places.shape[1], int)
    for name in (name for entry in spec for name in axis_names(entry)):
        numbers = numbers * axes[name] + places[list(axes).index(name)]
    return tuple(numbers.tolist())


def holdings(state: TrainState) -> Holdings:
    """Lists which devices hold which part of a state, and of the gradients of its steps."""
    config = state.layout.config
    assert config is not None, "every state of a Zero has its configuration"
    axes = dict(config.mesh.shape)
    # Add up the arrays of each unit that are divided alike.
    sizes = Counter[tuple[str, str, PartitionSpec]]()
    counts = Counter[tuple[str, str, PartitionSpec]]()
    for row in explain(config, state).rows:
        key = row.category, row.unit, row.spec
        sizes[key] += row.bytes_per_device
        counts[key] += 1
    # Make one row of equal layers.
    rows = []
    for category in (*CATEGORIES, HOST_MEMORY, DISK):
        keys = [key for key in sizes if key[0] == category]
        kinds = [(shard_numbers(key[2], axes), counts[key], sizes[key]) for key in keys]
        for each in fold([unit for _, unit, _ in keys], kinds):
            shards, _, size = kinds[each.members[0]]
            rows.append(Holding(category, each.text, len(each.members) * size, shards, len(set(shards))))
    return Holdings(f"{config.stage.title} on {math.prod(axes.values())} devices", axes, tuple(rows))


_DIGITS = string.digits + string.ascii_lowercase + string.ascii_uppercase + "+/"  # of the numbers of shards
_WHOLE = "■"
_MOST_SPACED = 16  # devices, up to which columns have numbers and spaces
_LEAST_NAME, _MOST_NAME = 14, 44


def shard_style(number: int, num_shards: int) -> Style:
    """The background of a shard; that of a whole array is grey."""
    color = colorsys.hsv_to_rgb(0.85 * number / num_shards, 0.42, 0.95 if number % 2 else 0.85)
    red, green, blue = (round(255 * part) for part in (color if num_shards > 1 else (0.82, 0.82, 0.82)))
    return Style(color="black", bgcolor=Color.from_rgb(red, green, blue))


def holdings_picture(held: Holdings, width: int) -> Text:
    """Who holds which shard. Devices that do not fit next to each other are shown in several parts."""
    num_devices = math.prod(held.axes.values())
    spaced = num_devices <= _MOST_SPACED
    cell = 3 if spaced else 1
    # Columns for names, sizes and devices.
    sizes = [bytes_text(row.num_bytes) for row in held.rows]
    size_width = max(map(len, [*sizes, "on a device"]))
    room = width - size_width - 4
    most_shown = max(1, (room - _LEAST_NAME) // cell)
    shown = math.ceil(num_devices / math.ceil(num_devices / most_shown))
    name_width = max(_LEAST_NAME, min(max(len(row.name) for row in held.rows), _MOST_NAME, room - cell * shown))
    # Lines for the axes and for each row, in parts.
    positions = {name: shard_numbers(PartitionSpec(name), held.axes) for name in held.axes}
    if len(positions) > 1 or not spaced:
        positions = {"device": tuple(range(num_devices)), **positions}
    lines = [Text(held.title, "bold")]
    for first in range(0, num_devices, shown):
        part = range(first, min(first + shown, num_devices))
        lines.append(Text())
        for name, numbers in positions.items():
            cells = "".join(_number(numbers[d], cell) for d in part)
            lines.append(Text(f"{name:>{name_width + size_width + 2}}  {cells}", "dim"))
        category = ""
        for row, size in zip(held.rows, sizes, strict=True):
            lines += [Text(row.category, "bold")] if row.category != category else []
            category = row.category
            whole = row.num_shards == 1
            cells = [(_WHOLE.center(cell) if whole else _number(row.shards[d], cell), row.shards[d]) for d in part]
            styled = [(text, shard_style(number, row.num_shards)) for text, number in cells]
            lines += _row(row.name, name_width, f" {size:>{size_width}} ", styled, indent="  ")
    legend = f"A number is the shard that a device holds, {_WHOLE} the whole array. A size is what a device holds."
    if num_devices > 10 and not spaced:
        legend += " After 9 come a to z, A to Z, + and /."
    return Text("\n").join([*lines, Text(), *map(Text, paragraph(legend, width))])


def _number(number: int, cell: int) -> str:
    return f"{number:>2} " if cell == 3 else _DIGITS[number % len(_DIGITS)]


def _row(
    name: str, name_width: int, middle: str, cells: Sequence[tuple[str, Style | None]], indent: str = ""
) -> Iterator[Text]:
    """The lines of a row: the name, which may take several, and the cells behind its first."""
    first, *rest = (f"{indent}{each}".replace(SPACE, " ") for each in wrapped(name, name_width))
    line = Text(f"{first:{len(indent) + name_width}}{middle}".replace(SPACE, " "))
    for text, style in cells:
        line.append(text, style)
    yield from (line, *map(Text, rest))


# The order of a step.


class Activity(enum.Enum):
    """What happens to a unit in a turn; the value is how a picture of text shows it."""

    GATHER = "g"
    FORWARD = "F"
    BACKWARD = "B"
    HELD = "·"
    REDUCE = "r"
    UPDATE = "U"


Cells: TypeAlias = dict[tuple[int, int], Activity]  # (segment, turn) -> what happens


@dataclasses.dataclass(frozen=True)
class StepOrder:
    """What happens to each unit, turn by turn. In a turn one unit computes, or all wait for a collective.

    Attributes:
        units: the name of the unit of each segment of the loss, in the order of the forward pass.
        looked_up: the segments that look up rows instead of gathering their unit.
        num_turns: the number of turns of one microbatch, and of the end of the step, which starts at `first_of_end`.
        left_out: which segments are left out, or ''.
    """

    title: str
    units: tuple[str, ...]
    looked_up: frozenset[int]
    cells: Cells
    num_turns: int
    first_of_end: int
    left_out: str = ""


def step_order(
    leaves: Sequence[Leaf],
    uses: Sequence[tuple[Use, ...]],
    stage: Stage,
    prefetch: int,
    num_microbatches: int,
    most_segments: int,
) -> StepOrder:
    """The order of a step, by the rules of `comm.schedule`, from the segments of its traced loss that read each leaf.

    Each gather starts when the unit that leaves the window of `prefetch` units has computed; each reduction runs while
    the next unit computes. The last unit is gathered once for its forward and backward pass. How long each takes is up
    to the device: `zerojax plan --compile --png` predicts it. Of more than `most_segments`, those in the middle are
    left out.
    """
    # The segments: their units, and those that are trained, sharded and looked up.
    read = [(leaf, use) for leaf, places in zip(leaves, uses, strict=True) for use in places]
    units = {use.place: leaf.unit for leaf, use in reversed(read)}
    trained = {use.place for leaf, use in read if leaf.trainable}
    sharded = {use.place for leaf, use in read if leaf.dim is not None}
    looked_up = {use.place for _, use in read if use.lookup}
    # Leave out those in the middle.
    everything = places = sorted(units)
    if len(places) > most_segments:
        half = most_segments // 2
        places = [*places[: most_segments - half], *places[len(places) - half :]]
    dropped = [units[k] for k in everything if k not in places]
    left_out = f"{len(dropped)} segments left out: {dropped[0]} to {dropped[-1]}" if dropped else ""
    # What happens to each, turn by turn.
    gathers = sharded - looked_up if stage.shards_params else set()
    order = [(k, Activity.FORWARD) for k in places] + [(k, Activity.BACKWARD) for k in reversed(places)]
    cells, end = _microbatch(order, gathers, prefetch, reduces=trained if stage.shards_grads else set())
    last = _end_of_step(cells, trained & set(places), sharded, stage, end)
    batches = f", {num_microbatches} microbatches, of which one is shown" if num_microbatches > 1 else ""
    title = f"{stage.title}, prefetch={prefetch}{batches}"
    row = {k: n for n, k in enumerate(places)}
    cells = {(row[k], turn): activity for (k, turn), activity in cells.items()}
    shown = frozenset(row[k] for k in looked_up if k in row)
    return StepOrder(title, tuple(units[k] for k in places), shown, cells, last, end, left_out)


def _microbatch(
    order: Sequence[tuple[int, Activity]], gathers: set[int], prefetch: int, reduces: set[int]
) -> tuple[Cells, int]:
    """(the cells of one microbatch, the number of its turns)."""
    cells: Cells = {}
    computed_at: list[int] = []  # the turn in which each entry of the order computes
    turn = 0
    for n, (k, activity) in enumerate(order):
        follows_itself = n > 0 and order[n - 1][0] == k  # the last unit stays gathered
        is_gathered = k in gathers and not follows_itself
        if is_gathered and (n == 0 or prefetch == 0):
            cells[k, turn] = Activity.GATHER  # nothing computes meanwhile
            turn += 1
        elif is_gathered:
            before = max((t for (row, t) in cells if row == k), default=-1)  # it is dropped after its forward pass
            first = max(computed_at[max(0, n - prefetch)], before + 1)
            for t in range(first, turn):
                cells.setdefault((k, t), Activity.GATHER if t == first else Activity.HELD)
        cells[k, turn] = activity
        computed_at.append(turn)
        turn += 1
        if activity is Activity.BACKWARD and k in reduces:
            cells[k, turn] = Activity.REDUCE  # while the next unit computes
    return cells, turn + (1 if reduces else 0)


def _end_of_step(cells: Cells, trained: set[int], sharded: set[int], stage: Stage, turn: int) -> int:
    """Adds what follows the microbatches, and returns the number of turns."""
    ends = [] if stage.shards_grads else [(Activity.REDUCE, trained)]
    ends.append((Activity.UPDATE, trained))
    ends += [(Activity.GATHER, trained & sharded)] if stage.shards_optimizer and not stage.shards_params else []
    for k, (activity, segments) in enumerate(ends):
        cells.update({(segment, turn + k): activity for segment in segments})
    return turn + len(ends)


# Colors that also differ in lightness (Okabe and Ito), and meanings.
_ACTIVITIES = {
    Activity.GATHER: ("#E69F00", "is gathered"),
    Activity.HELD: ("#F0E442", "waits in full"),
    Activity.FORWARD: ("#56B4E9", "forward pass"),
    Activity.BACKWARD: ("#0072B2", "backward pass"),
    Activity.REDUCE: ("#CC79A7", "gradients are reduced"),
    Activity.UPDATE: ("#009E73", "update"),
}


def most_segments(width: int) -> int:
    """The number of segments whose order fits into a width."""
    return max(4, (width - _MOST_NAME // 2 - 12) // 4)


def order_picture(order: StepOrder, width: int) -> Text:
    """The order of a step: a row for each unit, and a column for each turn."""
    names = [f"{name} (rows)" if n in order.looked_up else name for n, name in enumerate(order.units)]
    name_width = min(max(map(len, names)), max(_LEAST_NAME, width - 2 * order.num_turns - 2))
    lines = [Text(order.title, "bold"), Text()]
    for n, name in enumerate(names):
        cells: list[tuple[str, Style | None]] = []
        for turn in range(order.num_turns):
            activity = order.cells.get((n, turn))
            style = activity and Style(color="black", bgcolor=Color.parse(_ACTIVITIES[activity][0]))
            cells.append((f"{activity.value} " if activity else "  ", style))
        lines += _row(name, name_width, "  ", cells)
    lines += [Text(), *([Text(order.left_out)] if order.left_out else [])]
    found = set(order.cells.values())
    legend = ", ".join(f"{each.value} {meaning}" for each, (_, meaning) in _ACTIVITIES.items() if each in found)
    if order.looked_up:
        legend += "; (rows): looks up rows, and is not gathered"
    return Text("\n").join([*lines, *map(Text, paragraph(legend, width))])
