"""The files of a run: its metrics, also for TensorBoard and wandb, and its description."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.util
import json
import logging
import math
import os
import platform
import struct
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import IO, AnyStr, Protocol

import jax
import jax.numpy as jnp

from zerojax.processes.agreement import versions
from zerojax.sharding.precision import DTYPE_FIELDS
from zerojax.step.config import ZeroConfig
from zerojax.utils.files import open_regular, write_atomically
from zerojax.utils.text import error_text, masked

log = logging.getLogger("zerojax")

FILES = ("config.json", "starts.jsonl", "metrics.jsonl", "plan.txt")
EVALUATION = "eval/"  # begins the names of the metrics of evaluations
MetricsRow = Mapping[str, float]

# Metrics


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
    after the step from which a run continues, `start`, are removed, since these steps run again.
    """

    def __init__(self, path: Path, start: int):
        if path.exists():
            _remove_rows_after(path, start)
        self._path, self._file = path, open_regular(path, "a")

    def write(self, step: int, row: MetricsRow) -> None:
        first = {"step": step, "time": round(time.time(), 3)}
        values = {name: value if math.isfinite(value) else json.dumps(value) for name, value in row.items()}
        # `first` comes again at the end, so that a metric called 'step' or 'time' does not replace it.
        _write(self._file, json.dumps(first | values | first) + "\n", self._path)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # of a row whose `write` has raised
            self._file.close()


def _write(file: IO[AnyStr], text: AnyStr, path: Path) -> None:
    """Writes what another program can read at once."""
    try:
        file.write(text)
        file.flush()
    except OSError as error:
        fix = "check the disk space and permissions; the run then continues from its newest checkpoint"
        raise OSError(error_text("fit: metrics cannot be written", f"{error}: {path}", fix)) from error


def _remove_rows_after(path: Path, start: int) -> None:
    """Removes the rows after a step, and lines that are not rows, such as one that was not completely written."""
    lines = _lines(path)
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
    rows = [json.loads(line) for line in _lines(path) if _step_of(line) == step]
    return not path.exists() or any(name.startswith(EVALUATION) for row in rows for name in row)


def _step_of(line: str) -> int | None:
    """The step of a row; None if the line is not a row."""
    try:
        step = json.loads(line)["step"] if line.endswith("\n") else None
    except (ValueError, TypeError, KeyError):
        return None
    return step if isinstance(step, int) else None


def _lines(path: Path) -> list[str]:
    if not os.path.lexists(path):
        return []
    with open_regular(path) as file:
        return file.read().decode(errors="replace").splitlines(keepends=True)


class TensorBoardWriter:
    """Writes scalars for TensorBoard, with the package tensorboardX. Steps that run again replace the earlier ones.

    It writes the records itself. tensorboardX has a thread for that, which ends on a full disk; then its queue is full,
    and training waits for it forever.
    """

    def __init__(self, folder: Path, start: int):
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"events.out.tfevents.{time.time():.3f}.{platform.node()}"
        self._file = open_regular(self._path, "ab")
        self._add(file_version="brain.Event:2")
        self._add(step=start + 1, session_log={"status": "START"})

    def write(self, step: int, row: MetricsRow) -> None:
        from tensorboardX.summary import scalar

        values = [value for name, number in row.items() for value in scalar(name, number).value]
        self._add(step=step, summary={"value": values})

    def _add(self, **fields: object) -> None:
        """Writes an event as a record: its length and its bytes, each with a checksum."""
        from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboardX.record_writer import masked_crc32c

        data = Event(wall_time=time.time(), **fields).SerializeToString()
        length = struct.pack("<Q", len(data))
        checksums = [struct.pack("<I", masked_crc32c(part)) for part in (length, data)]
        _write(self._file, length + checksums[0] + data + checksums[1], self._path)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # of a row whose `write` has raised
            self._file.close()


class WandbWriter:
    """Writes to the current wandb run, or to a new one, which restarts continue and which ends with the writer.

    Its id is in the file `wandb_id`. The command line is left out, and with it what else wandb records of the machine.
    wandb keeps the first row of a step. For steps that run again after a restart, it shows the first time.
    """

    def __init__(self, folder: Path, config: Mapping[str, object]):
        import wandb

        self._owns_run = wandb.run is None
        if self._owns_run:
            file = folder / "wandb_id"
            if not file.exists():
                write_atomically(file, uuid.uuid4().hex[:12])
            with open_regular(file, "r") as opened:
                run_id = opened.read(100)
            wandb.init(
                dir=str(folder),
                id=run_id,
                name=folder.name,
                resume="allow",
                config=_masked_config(config),
                settings=wandb.Settings(x_disable_meta=True),  # it has the command line
            )
        assert wandb.run is not None
        self._run = wandb.run

    def write(self, step: int, row: MetricsRow) -> None:
        self._run.log(dict(row), step=step)

    def close(self) -> None:
        if self._owns_run:
            self._run.finish()


def default_writers(folder: Path, start: int, config: Mapping[str, object]) -> list[Writer]:
    """The writers that `fit` uses by default.

    `metrics.jsonl` is always written, and TensorBoard's files are if tensorboardX is installed. wandb is used if the
    script has started a wandb run, or if WANDB_PROJECT is set; installing wandb alone does not enable it.
    """
    writers: list[Writer] = [JsonlWriter(folder / "metrics.jsonl", start)]
    if importlib.util.find_spec("tensorboardX"):
        writers.append(TensorBoardWriter(folder / "tensorboard", start))
    has_wandb_run = getattr(sys.modules.get("wandb"), "run", None) is not None
    if has_wandb_run or ("WANDB_PROJECT" in os.environ and importlib.util.find_spec("wandb")):
        writers.append(WandbWriter(folder, config))
    return writers


# The description of a run


def as_config(config: object) -> dict[str, object]:
    """Converts a mapping or a dataclass to a dict by field name. Raises ValueError if it is neither."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        config = dataclasses.asdict(config)
    if not isinstance(config, Mapping):
        raise ValueError(
            error_text(f"fit: config is of type {type(config).__name__}", None, "a mapping or a dataclass")
        )
    if invalid := [name for name in config if not isinstance(name, str)]:
        what = "fit: config has a name that is not a string"
        raise ValueError(error_text(what, repr(invalid[0]), "str(...) of it"))
    return dict(config)


def _masked_config(config: Mapping[str, object]) -> dict[str, object]:
    return {name: masked(value, name) for name, value in config.items()}


def write_description(
    folder: Path,
    zero_config: ZeroConfig,
    config: Mapping[str, object],
    start: int,
    num_steps: int,
    sizes: Mapping[str, int],
    plan: str | None,
) -> None:
    """Writes config.json, with secrets masked, starts.jsonl, and plan.txt if the plan is known.

    What differs from the last start is logged: in the configuration, and in `sizes`, those of a step.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, starts = folder / "config.json", folder / "starts.jsonl"
    # The configuration.
    config = _masked_config(config)
    if path.exists():
        _log_changes(path, path.read_text(), config)
    write_atomically(path, json.dumps(config, indent=2, sort_keys=True) + "\n")
    # A line for this start.
    previous = [line for line in _lines(starts) if line.endswith("\n")]
    if previous and sizes:
        _log_changes(starts, previous[-1], sizes, is_part=True)
    devices, precision = zero_config.mesh.devices.flat, zero_config.precision
    description = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "from_step": start,
        "num_steps": num_steps,
        **sizes,
        "folder": _working_directory(),
        "host": platform.node(),
        "processes": jax.process_count(),
        "devices": f"{zero_config.mesh.size} x {devices[0].device_kind}",
        "mesh": dict(zero_config.mesh.shape),
        "stage": zero_config.stage,
        "dtypes": {f: jnp.dtype(getattr(precision, f)).name for f in DTYPE_FIELDS} | precision.on_wire,
        "versions": versions(),
        "config": config,
    }
    write_atomically(starts, "".join([*previous, json.dumps(description) + "\n"]))
    # The memory.
    if plan is not None:
        write_atomically(folder / "plan.txt", plan)


def _working_directory() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was deleted
        return None


def _log_changes(path: Path, text: str, now: Mapping[str, object], is_part: bool = False) -> None:
    """Logs how values differ from those of the last start, which a file has as JSON, perhaps among others."""
    try:
        before = json.loads(text)
        names = before.keys() & now.keys() if is_part else before.keys() | now.keys()
    except (ValueError, AttributeError) as error:
        log.warning("%s cannot be read and is written again: %s", path, error)
        return
    for name in sorted(names):
        old, new = (json.dumps(values.get(name, "(nothing)"), sort_keys=True) for values in (before, now))
        if old != new:
            log.warning("%s: %s was %s, is now %s", path, name, old, new)
