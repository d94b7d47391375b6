"""Displays the progress of a run: a progress bar on a terminal, plain lines in a log file."""

from __future__ import annotations

import datetime
import logging
import sys
import textwrap
from collections.abc import Sequence
from typing import TextIO

import rich
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar as Bar
from rich.table import Table
from rich.text import Text

from zerojax.training.writers import EVALUATION, MetricsRow
from zerojax.utils.text import SPACE

_HIDDEN = ("param_norm", "seconds_per_step", "rows_per_s", "tokens_per_s", "mfu")
_BETWEEN = "  "
_LEAST_BAR, _MOST_BAR = 8, 40  # characters


def metric_texts(row: MetricsRow) -> list[str]:
    """The metrics of a row, without its rates. `skipped` is shown if it is not 0."""
    shown = {name: value for name, value in row.items() if name not in _HIDDEN and (name != "skipped" or value)}
    return [f"{name.replace('_', ' ')} {value:.4g}" for name, value in shown.items()]


def rate_texts(row: MetricsRow) -> list[str]:
    """The rates of a row: rows and tokens per second, and the model FLOPs utilization (MFU)."""
    texts = [f"{row[f'{unit}_per_s']:,.0f} {unit}/s" for unit in ("rows", "tokens") if f"{unit}_per_s" in row]
    return [*texts, f"MFU {row['mfu']:.1%}"] if "mfu" in row else texts


def eta_text(row: MetricsRow, num_steps: int) -> str:
    """The time that the remaining steps take, without their evaluations and saves."""
    if "seconds_per_step" not in row:
        return "-:--:-- left"
    return f"{datetime.timedelta(seconds=round(num_steps * row['seconds_per_step']))} left"


def broken_into_lines(texts: Sequence[str], width: int) -> list[str]:
    """Lines of at most `width` characters, broken between texts; a text that is longer has a line of its own."""
    whole = _BETWEEN.join(text.replace(" ", SPACE) for text in texts)
    lines = textwrap.wrap(whole, max(width, 1), break_long_words=False, break_on_hyphens=False)
    return [line.replace(SPACE, " ") for line in lines]


def show_line(line: str, console: Console | None = None) -> None:
    """Prints a line as it is. The terminal wraps it if it is longer than the terminal is wide."""
    (console or rich.get_console()).print(line, highlight=False, markup=False, soft_wrap=True)


class ProgressLines:
    """Prints a line for each row of metrics: to the standard output, or to a console of Rich."""

    def __init__(self, num_steps: int, console: Console | None = None):
        self._num_steps, self._console = num_steps, console

    def write(self, step: int, row: MetricsRow) -> None:
        texts = metric_texts(row) + rate_texts(row)
        if "seconds_per_step" in row and step < self._num_steps:
            texts.append(eta_text(row, self._num_steps - step))
        counter = f"step {step:{len(str(self._num_steps))}d}/{self._num_steps}"
        show_line(_BETWEEN.join([counter, *texts]), self._console)

    def close(self) -> None:
        pass


class ProgressBar:
    """A progress bar with the rates and the remaining time, and below it all metrics of the last step that was read.

    Evaluations are printed above it, as lines. Lines are broken between metrics, so that a narrow terminal cuts none.
    """

    def __init__(self, num_steps: int, start: int = 0, console: Console | None = None):
        self._num_steps, self._step, self._row = num_steps, start, {}
        self._console = console or rich.get_console()
        self._lines = ProgressLines(num_steps, self._console)
        self._begin = datetime.datetime.now()
        self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=4)
        self._handlers = _handlers_to_stderr()
        self._live.start()
        self._redirect()

    def write(self, step: int, row: MetricsRow) -> None:
        if any(name.startswith(EVALUATION) for name in row):
            self._lines.write(step, row)
        else:
            self._step, self._row = step, row

    def close(self) -> None:
        self._live.stop()
        self._redirect()

    def _redirect(self) -> None:
        """Sends log messages to the current standard error. While the bar is shown, rich prints that above the bar."""
        for handler in self._handlers:
            handler.setStream(sys.stderr)

    def _render(self) -> Group:
        width = self._console.width - 1
        remaining = self._num_steps - self._step
        if remaining:
            end = eta_text(self._row, remaining) if self._row else "compiling"
        else:
            passed = datetime.datetime.now() - self._begin
            end = str(datetime.timedelta(seconds=round(passed.total_seconds())))
        texts = [f"{self._step}/{self._num_steps}", *rate_texts(self._row), end]
        first, *more = broken_into_lines(texts, width - _LEAST_BAR - 1)
        grid = Table.grid(padding=(0, 1, 0, 0))
        bar_width = max(_LEAST_BAR, min(_MOST_BAR, width - len(first) - 1))
        grid.add_row(Bar(self._num_steps, self._step, bar_width), Text(first, no_wrap=True))
        rest = broken_into_lines([*more, *metric_texts(self._row)], width)
        return Group(grid, *map(Text, rest))


def _handlers_to_stderr() -> list[logging.StreamHandler[TextIO]]:
    """The handlers that write log messages to the standard error themselves, where the bar would erase them."""
    handlers = [*logging.getLogger().handlers, *logging.getLogger("zerojax").handlers]
    return [each for each in handlers if type(each) is logging.StreamHandler and each.stream is sys.stderr]


def on_terminal() -> bool:
    """Whether the standard output is an interactive terminal."""
    return rich.get_console().is_interactive
