"""A directory that tells about its run: what it was given, where and when it ran, what a device held."""

from __future__ import annotations

import dataclasses
import datetime
import json
import logging
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.processes import join
from zerojax.step.config import ZeroConfig
from zerojax.training.writers import replace

log = logging.getLogger("zerojax")

_README = """\
# {name}

A training run of zerojax. Started {starts} so far; the last time{each} in {folder}, with

    {command}

The same command goes on from the newest checkpoint.

| file | what is in it |
|---|---|
| `config.json` | what the run was given, at its last start |
| `starts.jsonl` | a line for each start: when, where, with which versions, mesh and stage, and from which step |
| `metrics.jsonl` | a line for each logged step, and for each evaluation |
| `plan.txt` | what a device holds in a step, by formula, and where every leaf lives |
| `checkpoints/` | `zerojax checkpoint ls {path}/checkpoints` lists them |
| `profile/` | traces of steps, if any were asked for; TensorBoard and xprof show them |
| `tensorboard/` | scalars, if tensorboardX was there |
"""


def as_config(config: Any) -> dict[str, Any]:
    """A mapping or a dataclass by names.

    Raises:
        ValueError: something else.
    """
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        config = dataclasses.asdict(config)
    if not isinstance(config, Mapping):
        raise ValueError(f"fit: config is a {type(config).__name__}\n  fix:      a mapping, or a dataclass")
    if odd := [name for name in config if not isinstance(name, str)]:
        raise ValueError(f"fit: config has a name that is no text\n  got:      {odd[0]!r}\n  fix:      str(...) of it")
    return dict(config)


def check(folder: Path) -> None:
    """Raises ValueError for a directory of checkpoints, which is not that of a run."""
    from zerojax.checkpoints import store  # Orbax takes a second to import

    if store.folders(folder):
        raise ValueError(
            f"fit: {folder} has steps of checkpoints\n  got:      a run has its own in checkpoints/\n"
            f"  fix:      the directory of a run, or move them to {folder / 'checkpoints'}"
        )


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines(keepends=True) if path.exists() else []


def describe(
    folder: Path, zero_config: ZeroConfig, config: Mapping[str, Any], start: int, num_steps: int, plan: str | None
) -> None:
    """Writes what is known when a run starts.

    Args:
        folder: of the run; made if it is not there.
        zero_config: of the Zero.
        config: as `as_config` returns it.
        start: the step that the run goes on from.
        num_steps: where it ends.
        plan: what a device holds; None: it is not known.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _tell_changes(folder / "config.json", config)
    replace(folder / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
    devices = zero_config.mesh.devices.flat
    told = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "from_step": start,
        "num_steps": num_steps,
        "command": shlex.join([sys.executable, *sys.orig_argv[1:]]),
        "folder": os.getcwd(),
        "host": platform.node(),
        "processes": jax.process_count(),
        "devices": f"{zero_config.mesh.size} x {devices[0].device_kind}",
        "mesh": dict(zero_config.mesh.shape),
        "stage": zero_config.stage,
        "dtypes": {f: jnp.dtype(getattr(zero_config.precision, f)).name for f in _DTYPES},
        "versions": join.versions(),
        "config": dict(config),
    }
    before = [line for line in _lines(folder / "starts.jsonl") if line.endswith("\n")]
    replace(folder / "starts.jsonl", "".join([*before, json.dumps(told) + "\n"]))
    if plan is not None:
        replace(folder / "plan.txt", plan)
    starts = f"{len(before) + 1} times" if before else "once"
    each = f", in each of {jax.process_count()} processes," if jax.process_count() > 1 else ""
    told |= {"name": folder.name, "starts": starts, "each": each, "path": folder}
    replace(folder / "README.md", _README.format(**told))


_DTYPES = ("param_dtype", "compute_dtype", "reduce_dtype")


def _tell_changes(path: Path, config: Mapping[str, Any]) -> None:
    if not path.exists():
        return
    try:
        before = dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        log.warning("%s cannot be read, and is written again: %s", path, error)
        return
    for name in sorted(before.keys() | config.keys()):
        was, now = (json.dumps(each.get(name, "(nothing)"), sort_keys=True) for each in (before, config))
        if was != now:
            log.warning("%s: %s was %s, is %s", path, name, was, now)
