"""Draws the pictures of docs/how_zero_works.md. Needs matplotlib (the extra `plot`).

python scripts/draw_zero.py    # writes docs/images/zero_*.svg
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
PARAMETERS, GRADIENTS, OPTIMIZER, LINK = "#0b6e6e", "#e07a1f", "#7a8fb5", "#c9a227"
PARTS = (("optimizer state", OPTIMIZER, 12), ("gradients", GRADIENTS, 2), ("parameters", PARAMETERS, 2))  # bytes
NUM_DEVICES, NUM_UNITS = 4, 4


def stages() -> Figure:
    """What each of four devices holds at each stage, in bytes for each parameter; outlines are what others hold."""
    figure, panels = plt.subplots(1, 4, figsize=(9.6, 3.6), sharey=True)
    names = ("nothing", "the optimizer state", "gradients too", "parameters too")
    for stage, (axes, name) in enumerate(zip(panels, names, strict=True)):
        held = 0.0
        for device in range(NUM_DEVICES):
            bottom, held = 0.0, 0.0
            for part, (_, color, num_bytes) in enumerate(PARTS):
                share = num_bytes / NUM_DEVICES if part < stage else num_bytes
                start = bottom + (device * share if part < stage else 0)
                axes.bar(device, num_bytes, 0.78, bottom, fill=False, edgecolor=color, linewidth=0.6, alpha=0.6)
                axes.bar(device, share, 0.78, start, color=color)
                bottom, held = bottom + num_bytes, held + share
        axes.set_title(f"stage {stage}: shards\n{name}", fontsize=10)
        axes.set_xlabel(f"{held:g} bytes per parameter", fontsize=9)
        axes.set_xticks(range(NUM_DEVICES), [f"{device}" for device in range(NUM_DEVICES)], fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("bytes per parameter, by device")
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for _, color, _ in reversed(PARTS)]
    figure.legend(handles, [name for name, *_ in reversed(PARTS)], loc="lower center", ncols=3, frameon=False)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    return figure


def ring_states() -> Iterator[tuple[str, list[list[int]], list[tuple[int, int]]]]:
    """Yields (title, contributions in each chunk of each device, chunks that are sent next) for a ring all-reduce."""
    n = NUM_DEVICES
    counts = [[1] * n for _ in range(n)]
    for step in range(2 * n - 1):
        reducing = step < n - 1
        done = step if reducing else step - (n - 1)
        title = "start" if step == 0 else f"after {step}"
        sent = [] if step == 2 * n - 2 else [(d, (d - done + (0 if reducing else 1)) % n) for d in range(n)]
        yield title, [list(row) for row in counts], sent
        for device, chunk in sent:
            receiver = (device + 1) % n
            own = counts[receiver][chunk] if reducing else 0
            counts[receiver][chunk] = counts[device][chunk] + own if reducing else n


def ring() -> Figure:
    """A ring all-reduce on four devices: three steps of reduce-scatter, then three of all-gather."""
    states = list(ring_states())
    figure, panels = plt.subplots(1, len(states), figsize=(9.6, 2.5))
    for number, (axes, (title, counts, sent)) in enumerate(zip(panels, states, strict=True)):
        for device, row in enumerate(counts):
            for chunk, count in enumerate(row):
                full = count == NUM_DEVICES
                color = PARAMETERS if full else GRADIENTS
                alpha = 1.0 if full else 0.2 + 0.2 * count
                cell = (chunk, NUM_DEVICES - 1 - device)
                axes.add_patch(plt.Rectangle(cell, 0.92, 0.92, color=color, alpha=alpha, linewidth=0))
                if (device, chunk) in sent:
                    axes.add_patch(plt.Rectangle(cell, 0.92, 0.92, fill=False, linewidth=1.6))
                ink = "white" if full else "black"
                axes.text(cell[0] + 0.46, cell[1] + 0.44, str(count), ha="center", va="center", fontsize=9, color=ink)
        axes.set(xlim=(-0.1, NUM_DEVICES), ylim=(-0.1, NUM_DEVICES), aspect="equal", xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        axes.set_title(title, fontsize=9)
        if number == 0:
            axes.set_yticks([NUM_DEVICES - 0.55 - d for d in range(NUM_DEVICES)], range(NUM_DEVICES), fontsize=8)
            axes.set_ylabel("device", fontsize=9)
    figure.text(0.28, 0.03, "reduce-scatter: 3 steps", ha="center", fontsize=10)
    figure.text(0.73, 0.03, "all-gather: 3 steps", ha="center", fontsize=10)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    return figure


class Work(NamedTuple):
    """A piece of work on a lane: 'computation' or 'link'."""

    lane: str
    text: str
    start: float
    end: float


def schedule(prefetch: int, gather: float = 0.8, forward: float = 1.0, reduce: float = 0.8) -> list[Work]:
    """The work of one step over `NUM_UNITS` units, each started as early as its inputs and the window allow.

    Args:
        prefetch: number of units that are gathered ahead of the one that computes.
        gather, forward, reduce: durations; a backward pass takes twice as long as a forward pass.
    """
    order = [("F", u) for u in range(NUM_UNITS)] + [("B", u) for u in reversed(range(NUM_UNITS))]
    work: list[Work] = []
    computed: list[float] = []  # the end of each computation, in order
    link = reduced = 0.0
    gathered: list[float] = []

    def start_gathers(upto: int) -> None:
        nonlocal link
        while len(gathered) < min(upto, len(order)):
            index = len(gathered)
            kind, unit = order[index]
            if kind == "B" and unit == NUM_UNITS - 1:  # still gathered: its backward pass follows immediately
                gathered.append(gathered[-1])
                continue
            freed = computed[index - prefetch - 1] if index > prefetch else 0.0
            start = max(link, freed)
            link = start + gather
            gathered.append(link)
            work.append(Work("link", f"G{unit}", start, link))

    for index, (kind, unit) in enumerate(order):
        start_gathers(index + 1)
        start = max(gathered[index], computed[-1] if computed else 0.0, reduced if not prefetch else 0.0)
        end = start + (forward if kind == "F" else 2 * forward)
        computed.append(end)
        work.append(Work("computation", f"{kind}{unit}", start, end))
        start_gathers(index + 1 + prefetch)
        if kind == "B":
            begin = max(link, end)
            link = reduced = begin + reduce
            work.append(Work("link", f"R{unit}", begin, link))
    return work


def timeline() -> Figure:
    """The lanes of a step at stage 3, without and with prefetch."""
    figure, panels = plt.subplots(2, 1, figsize=(9.6, 3.2), sharex=True)
    colors = {"F": PARAMETERS, "B": OPTIMIZER, "G": LINK, "R": GRADIENTS}
    for axes, prefetch in zip(panels, (0, 1), strict=True):
        work = schedule(prefetch)
        for piece in work:
            height = 1 if piece.lane == "computation" else 0
            axes.barh(height, piece.end - piece.start, 0.8, piece.start, color=colors[piece.text[0]], edgecolor="white")
            middle, ink = (piece.start + piece.end) / 2, "white" if piece.text[0] == "F" else "black"
            axes.text(middle, height, piece.text, ha="center", va="center", fontsize=8, color=ink)
        axes.set_yticks([0, 1], ["link", "computation"], fontsize=9)
        axes.set_title(f"prefetch={prefetch}", fontsize=10, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xticks([])
    panels[-1].set_xlabel("time: F forward, B backward, G all-gather, R reduce-scatter, of units 0 to 3", fontsize=9)
    figure.tight_layout()
    return figure


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    plt.rcParams.update({"svg.hashsalt": "zerojax", "font.size": 9})
    for draw in (stages, ring, timeline):
        draw().savefig(IMAGES / f"zero_{draw.__name__}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
