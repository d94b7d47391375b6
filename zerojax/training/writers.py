"""Where the metrics of a run are written: a file of lines always, TensorBoard and wandb where they are wanted."""

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

log = logging.getLogger("zerojax")

Row = Mapping[str, float]


class Writer(Protocol):
    """Takes rows of metrics as they come, on process 0."""

    def write(self, step: int, row: Row) -> None:
        """Those of a step, by name. Steps do not go back; a step may have several rows, with other names."""
        ...

    def close(self) -> None:
        """After the last row, also if the run failed."""
        ...


class Jsonl:
    """One JSON object a line: step, time (seconds since 1970), and the metrics.

    What is no number in JSON is the text 'NaN', 'Infinity' or '-Infinity', which `float` reads. Rows after the step
    that a run goes on from are taken out, since those steps are run again.

    Args:
        path: of the file.
        start: the step that the run goes on from.
    """

    def __init__(self, path: Path, start: int):
        if path.exists():
            _cut(path, start)
        self._file = path.open("a")

    def write(self, step: int, row: Row) -> None:
        first = {"step": step, "time": round(time.time(), 3)}
        told = first | {name: _number(value) for name, value in row.items()} | first  # no metric takes their place
        self._file.write(json.dumps(told, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _number(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _cut(path: Path, start: int) -> None:
    """Takes out the rows after a step, and what is no row: a line that was not written to its end."""
    lines = path.read_text(errors="replace").splitlines(keepends=True)
    steps = [_step(line) for line in lines]
    kept = [line for line, step in zip(lines, steps, strict=True) if step is not None and step <= start]
    if behind := sum(step is not None and step > start for step in steps):
        log.warning("%s: %d rows after step %d are taken out: they are run again", path, behind, start)
    if none := steps.count(None):
        log.warning("%s: %d lines that are no rows are taken out", path, none)
    if len(kept) < len(lines):
        replace(path, "".join(kept))


def _step(line: str) -> int | None:
    """Of a row; None if it is none."""
    try:
        step = json.loads(line)["step"] if line.endswith("\n") else None
    except (ValueError, TypeError, KeyError):
        return None
    return step if isinstance(step, int) else None


def replace(path: Path, text: str) -> None:
    """Writes a file as a whole or not at all."""
    new = path.with_name(path.name + ".new")
    new.write_text(text)
    new.replace(path)


class TensorBoard:
    """Scalars for TensorBoard, which needs the package tensorboardX. Steps that are run again replace those before.

    It writes in the background: where a process is killed, those of its last second are missing.

    Args:
        folder: for its files.
        start: the step that the run goes on from.
    """

    def __init__(self, folder: Path, start: int):
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=start + 1, flush_secs=1)

    def write(self, step: int, row: Row) -> None:
        for name, value in row.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """The run that wandb is in, or one of its own, which restarts go on with; it ends with the writer.

    wandb keeps the first row of a step: of steps that are run again after a restart it shows the first time.

    Args:
        folder: of the run. The name of wandb's run is in it, in `wandb_id`.
        config: of the run, to be shown with it.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]):
        import wandb

        self._own = wandb.run is None
        if self._own:
            file = folder / "wandb_id"
            if not file.exists():
                file.write_text(uuid.uuid4().hex[:12])
            wandb.init(dir=folder, id=file.read_text(), name=folder.name, resume="allow", config=dict(config))
        self._run: Any = wandb.run

    def write(self, step: int, row: Row) -> None:
        self._run.log(dict(row), step=step)

    def close(self) -> None:
        if self._own:
            self._run.finish()


def default_writers(folder: Path, start: int, config: Mapping[str, Any]) -> list[Writer]:
    """`metrics.jsonl`; TensorBoard if tensorboardX is installed; wandb if the script began a run of it or WANDB_PROJECT
    is set: that it is installed is no wish to send metrics somewhere.
    """
    writers: list[Writer] = [Jsonl(folder / "metrics.jsonl", start)]
    if importlib.util.find_spec("tensorboardX"):
        writers.append(TensorBoard(folder / "tensorboard", start))
    begun = getattr(sys.modules.get("wandb"), "run", None) is not None
    if begun or ("WANDB_PROJECT" in os.environ and importlib.util.find_spec("wandb")):
        writers.append(Wandb(folder, config))
    return writers
