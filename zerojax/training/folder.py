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
from zerojax.setup import Setup
from zerojax.training.writers import replace

log = logging.getLogger("zerojax")

_README = """\
# {name}

A training run of zerojax. Started {starts} so far; the last time, in {folder}, with

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
    return dict(config)


def describe(
    folder: Path, setup: Setup, config: Mapping[str, Any], start: int, num_steps: int, plan: str | None
) -> None:
    """Writes what is known when a run starts.

    Args:
        folder: of the run; made if it is not there.
        setup: of the Zero.
        config: as `as_config` returns it.
        start: the step that the run goes on from.
        num_steps: where it ends.
        plan: what a device holds; None: it is not known.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _tell_changes(folder / "config.json", config)
    replace(folder / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
    devices = setup.mesh.devices.flat
    told = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "from_step": start,
        "num_steps": num_steps,
        "command": shlex.join([sys.executable, *sys.argv]),
        "folder": os.getcwd(),
        "host": platform.node(),
        "processes": jax.process_count(),
        "devices": f"{setup.mesh.size} x {devices[0].device_kind}",
        "mesh": dict(setup.mesh.shape),
        "stage": setup.stage,
        "dtypes": {f: jnp.dtype(getattr(setup.precision, f)).name for f in _DTYPES},
        "versions": join.versions(),
        "config": dict(config),
    }
    with (folder / "starts.jsonl").open("a") as file:
        file.write(json.dumps(told) + "\n")
    if plan is not None:
        replace(folder / "plan.txt", plan)
    starts = (folder / "starts.jsonl").read_text().count("\n")
    times = "once" if starts == 1 else f"{starts} times"
    replace(folder / "README.md", _README.format(name=folder.name, starts=times, path=folder, **told))


_DTYPES = ("param_dtype", "compute_dtype", "reduce_dtype")


def _tell_changes(path: Path, config: Mapping[str, Any]) -> None:
    if not path.exists():
        return
    before = json.loads(path.read_text())
    for name in sorted(before.keys() | config.keys()):
        was, now = (json.dumps(each.get(name, "(nothing)"), sort_keys=True) for each in (before, config))
        if was != now:
            log.warning("%s: %s was %s, is %s", path, name, was, now)
