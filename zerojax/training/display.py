"""Displays the progress of a run: a progress bar on a terminal, plain lines in a log file."""

from __future__ import annotations

from collections.abc import Sequence

import rich
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from zerojax.training.writers import MetricsRow

_HIDDEN = ("param_norm", "seconds_per_step", "rows_per_s")


def summary(row: MetricsRow, hidden: Sequence[str] = _HIDDEN) -> str:
    """The metrics of a row and the rate in one line. `skipped` is shown if it is not 0."""
    shown = [(name, value) for name, value in row.items() if name not in hidden and (name != "skipped" or value)]
    parts = [f"{name.replace('_', ' ')} {value:.4g}" for name, value in shown]
    return "  ".join(parts + ([f"{row['rows_per_s']:,.0f} rows/s"] if "rows_per_s" in row else []))


class ProgressLines:
    """Prints a line for each row of metrics.

    Args:
        num_steps: number of steps of the run.
        console: where to print; the standard output by default.
    """

    def __init__(self, num_steps: int, console: Console | None = None):
        self._num_steps, self._console = num_steps, console or rich.get_console()

    def write(self, step: int, row: MetricsRow) -> None:
        line = f"step {step:{len(str(self._num_steps))}d}/{self._num_steps}  {summary(row)}"
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        pass


class ProgressBar:
    """A progress bar with the loss, the norm of the gradients and the rate. Evaluations are printed above it, as lines.

    Args:
        num_steps: number of steps of the run.
        start: the step from which the run continues.
        console: where to print; the standard output by default.
    """

    def __init__(self, num_steps: int, start: int = 0, console: Console | None = None):
        console = console or rich.get_console()
        columns = (
            BarColumn(max(8, min(40, console.width - 70))),
            "{task.completed}/{task.total}",
            TextColumn("{task.fields[numbers]}", markup=False),
            TimeRemainingColumn(elapsed_when_finished=True),
        )
        self._lines = ProgressLines(num_steps, console)
        self._progress = Progress(*columns, console=console)
        self._task = self._progress.add_task("", total=num_steps, completed=start, numbers="compiling")
        self._progress.start()

    def write(self, step: int, row: MetricsRow) -> None:
        if is_evaluation(row):
            self._lines.write(step, row)
        else:
            hidden = row.keys() - {"loss", "grad_norm", "skipped"}
            self._progress.update(self._task, completed=step, numbers=summary(row, tuple(hidden)))

    def close(self) -> None:
        self._progress.stop()


def is_evaluation(row: MetricsRow) -> bool:
    return any(name.startswith("eval/") for name in row)


def on_terminal() -> bool:
    """Whether the standard output is an interactive terminal."""
    return rich.get_console().is_interactive
