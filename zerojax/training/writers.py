"""Writes the metrics of a run: always to metrics.jsonl, and to TensorBoard and wandb if they are enabled."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from zerojax.utils.files import write_atomically
from zerojax.utils.text import masked

log = logging.getLogger("zerojax")

EVALUATION = "eval/"  # begins the names of the metrics of evaluations
MetricsRow = Mapping[str, float]


class Writer(Protocol):
    """Receives rows of metrics on process 0, in the order of the steps."""

    def write(self, step: int, row: MetricsRow) -> None:
        """Writes metrics of a step, by name. Steps never decrease; a step may have several rows with other names."""
        ...

    def close(self) -> None:
        """Called after the last row, also if the run failed."""
        ...


class JsonlWriter:
    """Writes one JSON object per line: step, time (seconds since 1970), and the metrics.

    Values that are not finite are written as the strings 'NaN', 'Infinity' and '-Infinity', which `float` accepts. Rows
    after the step from which a run continues are removed, since these steps run again.

    Args:
        path: path of the file.
        start: the step from which the run continues.
    """

    def __init__(self, path: Path, start: int):
        if path.exists():
            _remove_rows_after(path, start)
        self._path, self._file = path, path.open("a")

    def write(self, step: int, row: MetricsRow) -> None:
        first = {"step": step, "time": round(time.time(), 3)}
        # `first` comes again at the end, so that a metric called 'step' or 'time' does not replace it.
        fields = first | {name: _json_number(value) for name, value in row.items()} | first
        try:
            self._file.write(json.dumps(fields, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise OSError(
                f"fit: metrics cannot be written\n  got:      {error}: {self._path}\n"
                f"  fix:      check the disk space and permissions; the run then continues from its newest checkpoint"
            ) from error

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:  # of a row whose `write` has raised
            log.error("%s: %s", self._path, error)


def _json_number(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _remove_rows_after(path: Path, start: int) -> None:
    """Removes the rows after a step, and lines that are not rows, such as one that was not completely written."""
    lines = path.read_text(errors="replace").splitlines(keepends=True)
    steps = [_step_of(line) for line in lines]
    kept = [line for line, step in zip(lines, steps, strict=True) if step is not None and step <= start]
    if num_later := sum(step is not None and step > start for step in steps):
        log.warning("%s: removed %d rows after step %d, since these steps run again", path, num_later, start)
    if num_invalid := steps.count(None):
        log.warning("%s: removed %d lines that are not rows", path, num_invalid)
    if len(kept) < len(lines):
        write_atomically(path, "".join(kept))


def is_evaluated(path: Path, step: int) -> bool:
    """Whether a file of rows has one of an evaluation after a step. Without a file, nothing is known, and it counts."""
    if not path.exists():
        return True
    rows = [line for line in path.read_text(errors="replace").splitlines(keepends=True) if _step_of(line) == step]
    return any(name.startswith(EVALUATION) for row in rows for name in json.loads(row))


def _step_of(line: str) -> int | None:
    """The step of a row; None if the line is not a row."""
    try:
        step = json.loads(line)["step"] if line.endswith("\n") else None
    except (ValueError, TypeError, KeyError):
        return None
    return step if isinstance(step, int) else None


class TensorBoardWriter:
    """Writes scalars for TensorBoard, with the package tensorboardX. Steps that run again replace the earlier ones.

    It writes in the background: if the process is killed, the scalars of the last second are lost.

    Args:
        folder: folder for the event files.
        start: the step from which the run continues.
    """

    def __init__(self, folder: Path, start: int):
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=start + 1, flush_secs=1)

    def write(self, step: int, row: MetricsRow) -> None:
        for name, value in row.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbWriter:
    """Writes to the current wandb run, or to a new one, which restarts continue and which ends with the writer.

    The command line is left out, and with it what else wandb records of the machine.
    wandb keeps the first row of a step. For steps that run again after a restart, it shows the first time.

    Args:
        folder: directory of the run. The id of the wandb run is stored there in the file `wandb_id`.
        config: configuration of the run, which wandb shows, masked.
    """

    def __init__(self, folder: Path, config: Mapping[str, object]):
        import wandb

        self._owns_run = wandb.run is None
        if self._owns_run:
            file = folder / "wandb_id"
            if not file.exists():
                file.write_text(uuid.uuid4().hex[:12])
            wandb.init(
                dir=str(folder),
                id=file.read_text(),
                name=folder.name,
                resume="allow",
                config=masked(config),
                settings=wandb.Settings(x_disable_meta=True),  # it has the command line
            )
        self._run: Any = wandb.run

    def write(self, step: int, row: MetricsRow) -> None:
        self._run.log(dict(row), step=step)

    def close(self) -> None:
        if self._owns_run:
            self._run.finish()


def default_writers(folder: Path, start: int, config: Mapping[str, object]) -> list[Writer]:
    """The writers that `fit` uses by default.

    `metrics.jsonl` is always written, and TensorBoard's files are if tensorboardX is installed. wandb is used if the
    script has started a wandb run, or if WANDB_PROJECT is set; installing wandb alone does not enable it.

    Args:
        folder: directory of the run.
        start: the step from which the run continues.
        config: configuration of the run.
    """
    writers: list[Writer] = [JsonlWriter(folder / "metrics.jsonl", start)]
    if importlib.util.find_spec("tensorboardX"):
        writers.append(TensorBoardWriter(folder / "tensorboard", start))
    has_wandb_run = getattr(sys.modules.get("wandb"), "run", None) is not None
    if has_wandb_run or ("WANDB_PROJECT" in os.environ and importlib.util.find_spec("wandb")):
        writers.append(WandbWriter(folder, config))
    return writers
