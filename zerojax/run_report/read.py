"""Reads the directory of a run as far as it can be read: rows of metrics, starts, configuration and plan."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zerojax.checkpoints.directories import local_directory
from zerojax.utils.masking import masked, masked_command

_NOT_METRICS = ("step", "time")
_MOST_DRAWN = 1e100
_LAST_STEP = 2**53  # up to which a float is exact
Curve = list[tuple[int, float]]  # (step, value), in the order of the steps


@dataclasses.dataclass(frozen=True)
class RunFiles:
    """The files of a run. What cannot be read is counted, and otherwise as if it were not there.

    Attributes:
        name: of the directory.
        curves: for each metric, its values by step. A step that ran again has its last value.
        first_s, last_s: when the first and the last row were written, in seconds since 1970; None without rows.
        starts: the description of each start, masked.
        config: the configuration at the last start, masked.
        plan: the text of plan.txt; '' without one.
        num_unread: lines that are not rows or starts, such as one that is being written.
    """

    name: str
    curves: Mapping[str, Curve]
    first_s: float | None
    last_s: float | None
    starts: tuple[Mapping[str, Any], ...]
    config: Mapping[str, Any]
    plan: str
    num_unread: int

    @property
    def last_step(self) -> int:
        """The step of the last row; 0 without rows."""
        return max((curve[-1][0] for curve in self.curves.values()), default=0)

    @property
    def num_steps(self) -> int | None:
        """The step at which the run ends, as its last start says; None if it does not."""
        value = self.starts[-1].get("num_steps") if self.starts else None
        return value if is_step(value) else None


def read_run(directory: str | Path) -> RunFiles:
    """Reads the directory of a run, which may be running.

    Raises:
        ValueError: if the directory has neither metrics nor starts of a run.
    """
    folder = local_directory(directory, "report")
    if not any((folder / name).is_file() for name in ("metrics.jsonl", "starts.jsonl")):
        raise ValueError(
            f"report: {directory} is not the directory of a run\n  got:      neither metrics.jsonl nor starts.jsonl\n"
            f"  fix:      the directory that was passed to zerojax.fit"
        )
    rows, unread = _objects(folder / "metrics.jsonl")
    rows = [row for row in rows if is_step(row.get("step"))]
    starts, unread_starts = _objects(folder / "starts.jsonl")
    config = next(iter(_objects_in(_text(folder / "config.json"))), {})
    times = [seconds for row in rows if (seconds := _number(row.get("time"))) is not None and math.isfinite(seconds)]
    return RunFiles(
        folder.name,
        _curves(rows),
        min(times, default=None),
        max(times, default=None),
        tuple(_masked_start(start) for start in starts),
        masked(config),
        _text(folder / "plan.txt"),
        unread + unread_starts,
    )


def is_step(value: Any) -> bool:
    """Whether a value can be the number of a step."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LAST_STEP


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _objects(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The JSON objects of a file with one in each line, and the number of other lines."""
    lines = [line for line in _text(path).splitlines() if line.strip()]
    found = [each for line in lines for each in _objects_in(line)]
    return found, len(lines) - len(found)


def _objects_in(text: str) -> Iterator[dict[str, Any]]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return
    if isinstance(value, dict):
        yield value


def _number(value: Any) -> float | None:
    """A number, or one that is not finite, which rows have as a string; None for anything else.

    A larger number than a chart can hold counts as infinite.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if abs(number) <= _MOST_DRAWN or math.isnan(number) else math.copysign(math.inf, number)


def _curves(rows: list[dict[str, Any]]) -> dict[str, Curve]:
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        for name, value in row.items():
            if name not in _NOT_METRICS and (number := _number(value)) is not None:
                found.setdefault(name, {})[row["step"]] = number
    return {name: sorted(values.items()) for name, values in found.items()}


def _masked_start(start: dict[str, Any]) -> dict[str, Any]:
    """Runs of this version are masked when they are written; a directory from elsewhere may not be."""
    command = start.get("command")
    if isinstance(command, str):
        try:
            words = shlex.split(command)
        except ValueError:  # a quote that is not closed
            words = command.split()
        start = start | {"command": shlex.join(masked_command(words))}
    return masked(start)


def config_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """The values that differ between the configurations of two starts, as JSON; '' where there is none."""
    as_text = lambda values, name: json.dumps(values[name], sort_keys=True) if name in values else ""
    pairs = {name: (as_text(before, name), as_text(after, name)) for name in sorted(before.keys() | after.keys())}
    return {name: (was, now) for name, (was, now) in pairs.items() if was != now}
