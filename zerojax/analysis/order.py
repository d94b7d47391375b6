"""The order of a step, unit by unit: what computes, what is gathered meanwhile, and what is reduced."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import TypeAlias

from zerojax.sharding.placement import Leaf
from zerojax.sharding.stages import Stage
from zerojax.step.loss_traces import Use


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
        title: the stage, and the settings that determine the order.
        units: the name of the unit of each segment of the loss, in the order of the forward pass.
        looked_up: the segments that look up rows instead of gathering their unit.
        cells: (segment, turn) -> what happens.
        num_turns: the number of turns of one microbatch, and of the end of the step.
        first_of_end: the first turn after the microbatches.
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
    """The order of a step, by the rules of `transform.schedule`, from the segments of its traced loss.

    Each gather starts when the unit that leaves the window of `prefetch` units has computed; each reduction runs while
    the next unit computes. The last unit is gathered once for its forward and backward pass. How long each takes is up
    to the device: `zerojax plan --compile --png` predicts it.

    Args:
        leaves: the placement of all parameters.
        uses: for each of them, the segments that read it, see `TrainStep.uses`.
        stage, prefetch, num_microbatches: of the step.
        most_segments: if the loss has more, those in the middle are left out.
    """
    units: dict[int, str] = {}
    trained: set[int] = set()
    sharded: set[int] = set()
    for leaf, places in zip(leaves, uses, strict=True):
        for use in places:
            units.setdefault(use.place, leaf.unit)
            trained |= {use.place} if leaf.trainable else set()
            sharded |= {use.place} if leaf.dim is not None else set()
    looked_up = frozenset(use.place for places in uses for use in places if use.lookup)
    everything = sorted(units)
    places = everything
    if len(places) > most_segments:
        half = most_segments // 2
        places = [*places[: most_segments - half], *places[len(places) - half :]]
    dropped = [units[k] for k in everything if k not in places]
    left_out = f"{len(dropped)} segments left out: {dropped[0]} to {dropped[-1]}" if dropped else ""
    gathers = sharded - looked_up if stage.shards_params else set()
    order = [(k, Activity.FORWARD) for k in places] + [(k, Activity.BACKWARD) for k in reversed(places)]
    cells, end = _microbatch(order, gathers, prefetch, reduces=trained if stage.shards_grads else set())
    last = _end_of_step(cells, trained & set(places), sharded, stage, end)
    batches = f", {num_microbatches} microbatches, of which one is shown" if num_microbatches > 1 else ""
    title = f"{stage.title}, prefetch={prefetch}{batches}"
    row = {k: n for n, k in enumerate(places)}
    cells = {(row[k], turn): activity for (k, turn), activity in cells.items()}
    looked_up = frozenset(row[k] for k in looked_up if k in row)
    return StepOrder(title, tuple(units[k] for k in places), looked_up, cells, last, end, left_out)


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
    if not stage.shards_grads:
        cells.update({(k, turn): Activity.REDUCE for k in trained})
        turn += 1
    cells.update({(k, turn): Activity.UPDATE for k in trained})
    turn += 1
    if stage.shards_optimizer and not stage.shards_params:
        cells.update({(k, turn): Activity.GATHER for k in trained & sharded})
        turn += 1
    return turn
