"""Shows who holds which shard of a state, and the order of a step: on the terminal, or as a picture in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from zerojax.analysis.report.holdings import Holdings, holdings
from zerojax.analysis.report.order import StepOrder, step_order
from zerojax.analysis.report.pictures import holdings_picture, most_segments, turns_picture
from zerojax.step.state import TrainState, check_not_donated
from zerojax.utils.tables import FILE_WIDTH, screen


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
        from zerojax.analysis.report import drawings
    except ImportError as error:
        raise ImportError(f"{error}\n  fix:      pip install 'zerojax[plot]'") from error
    if isinstance(picture, Holdings):
        drawings.draw_holdings(picture, path)
    else:
        drawings.draw_turns(picture, path)
