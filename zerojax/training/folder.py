"""Writes the files that describe a run into its directory: config.json, starts.jsonl and plan.txt."""

from __future__ import annotations

import dataclasses
import datetime
import json
import logging
import os
import platform
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp

from zerojax.processes.agreement import versions
from zerojax.sharding.precision import DTYPE_FIELDS
from zerojax.step.config import ZeroConfig
from zerojax.utils.files import write_atomically
from zerojax.utils.text import masked

log = logging.getLogger("zerojax")

FILES = ("config.json", "starts.jsonl", "metrics.jsonl", "plan.txt")


def as_config(config: object) -> dict[str, object]:
    """Converts a mapping or a dataclass to a dict by field name.

    Raises:
        ValueError: if it is neither, or if a name is not a string.
    """
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        config = dataclasses.asdict(config)
    if not isinstance(config, Mapping):
        raise ValueError(f"fit: config is of type {type(config).__name__}\n  fix:      a mapping or a dataclass")
    if invalid := [name for name in config if not isinstance(name, str)]:
        raise ValueError(
            f"fit: config has a name that is not a string\n  got:      {invalid[0]!r}\n  fix:      str(...) of it"
        )
    return dict(config)


def check_not_checkpoints(folder: Path) -> None:
    """Raises ValueError if the directory of a run is itself a directory of checkpoints."""
    from zerojax.checkpoints import store  # Orbax takes a second to import

    if store.folders(folder):
        raise ValueError(
            f"fit: {folder} is a directory of checkpoints\n  got:      a run has its checkpoints in checkpoints/\n"
            f"  fix:      the directory of a run; or move the checkpoints to {folder / 'checkpoints'}"
        )


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines(keepends=True) if path.exists() else []


def make_private(folder: Path) -> None:
    """Lets nobody but the owner enter the directory of a run."""
    try:
        folder.chmod(0o700)
    except OSError as error:  # a file system without permissions
        log.warning("fit: others may be able to read %s: %s", folder, error)


def write_description(
    folder: Path, zero_config: ZeroConfig, config: Mapping[str, object], start: int, num_steps: int, plan: str | None
) -> None:
    """Writes the description of a run when it starts.

    Args:
        folder: directory of the run, which is created if needed.
        zero_config: mesh, stage and precision.
        config: configuration of the run, as returned by `as_config`, which is masked.
        start: the step from which the run continues.
        num_steps: the step at which it ends.
        plan: text of plan.txt; None if it is not known.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = masked(config)
    _log_changes(folder / "config.json", config)
    write_atomically(folder / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
    devices = zero_config.mesh.devices.flat
    description = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "from_step": start,
        "num_steps": num_steps,
        "folder": os.getcwd(),
        "host": platform.node(),
        "processes": jax.process_count(),
        "devices": f"{zero_config.mesh.size} x {devices[0].device_kind}",
        "mesh": dict(zero_config.mesh.shape),
        "stage": zero_config.stage,
        "dtypes": {f: jnp.dtype(getattr(zero_config.precision, f)).name for f in DTYPE_FIELDS},
        "versions": versions(),
        "config": dict(config),
    }
    previous = [line for line in _lines(folder / "starts.jsonl") if line.endswith("\n")]
    write_atomically(folder / "starts.jsonl", "".join([*previous, json.dumps(description) + "\n"]))
    if plan is not None:
        write_atomically(folder / "plan.txt", plan)


def _log_changes(path: Path, config: Mapping[str, object]) -> None:
    """Logs how the configuration differs from that of the last start."""
    if not path.exists():
        return
    try:
        before = dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        log.warning("%s cannot be read and is written again: %s", path, error)
        return
    for name in sorted(before.keys() | config.keys()):
        was, now = (json.dumps(values.get(name, "(nothing)"), sort_keys=True) for values in (before, config))
        if was != now:
            log.warning("%s: %s was %s, is now %s", path, name, was, now)
