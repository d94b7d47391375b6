"""Formats checkpoints as tables for the terminal: the steps, the arrays of a step, and differences between two."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from rich.table import Table
from rich.text import Text

from zerojax.audit.findings import bytes_text
from zerojax.checkpoints import store
from zerojax.checkpoints.manifest import CheckpointCorrupted, CheckpointMismatch, Manifest, num_bytes, plain_text
from zerojax.checkpoints.pieces import verify_arrays


def steps_table(directory: Path, verify: bool, name: str) -> tuple[Table, bool]:
    """Returns a table of all steps with a status each, and whether all of them are intact.

    Args:
        directory: of the steps.
        verify: whether every array is read and compared with its digest. Otherwise only manifests are read.
        name: of the directory, for the title.
    """
    table = _table([f"Steps in {name}"], ["step", "size", "stage", "mesh", "dtypes", "status"])
    all_intact = True
    for step, path in store.folders(directory).items():
        manifest, status = _status(directory, step, path, verify)
        all_intact &= status in ("manifest ok", "ok")
        columns = (
            [bytes_text(manifest.num_bytes), str(manifest.stage), _mesh(manifest.mesh), _dtypes(manifest)]
            if manifest
            else [""] * 4
        )
        _add_row(table, str(step), *columns, status)
    return table, all_intact


def _status(directory: Path, step: int, path: Path, verify: bool) -> tuple[Manifest | None, str]:
    """The manifest of a step if it can be read, and the status of the step."""
    if not store.is_complete(path):
        return None, "its save did not complete"
    try:
        manifest = store.read_manifest(directory, step)
    except (CheckpointCorrupted, CheckpointMismatch) as error:
        return None, str(error).splitlines()[0].removeprefix("checkpoint: ")
    if not verify:
        return manifest, "manifest ok"
    damaged = [path for path, problem in verify_arrays(directory, step, manifest) if problem]
    return manifest, f"{len(damaged)} of {len(manifest.leaves)} arrays damaged: {damaged[0]}" if damaged else "ok"


def leaves_table(manifest: Manifest, problems: Mapping[str, str | None] | None = None) -> Table:
    """Returns a table of the arrays of a step.

    Args:
        manifest: of the step.
        problems: what is wrong with each array, as `pieces.verify_arrays` yields it; adds a column with the status.
    """
    title = f"Step {manifest.step}: {bytes_text(manifest.num_bytes)}, saved at stage {manifest.stage} on"
    title += f" {_mesh(manifest.mesh)}, {_dtypes(manifest)}"
    versions = ", ".join(map(" ".join, manifest.versions.items()))
    table = _table(
        [title, versions], ["array", "shape", "dtype", "size", "digest", *(["status"] if problems is not None else [])]
    )
    for path, leaf in manifest.leaves.items():
        row = [path, str(leaf.shape), leaf.dtype, bytes_text(num_bytes(leaf)), leaf.digest]
        _add_row(table, *row, *([problems.get(path) or "ok"] if problems is not None else []))
    return table


def differences(a: Manifest, b: Manifest) -> Table:
    """Returns a table of the differences between the manifests of two steps."""
    table = _table([f"Differences between step {a.step} and step {b.step}"], ["array", "first", "second"])
    for path in dict.fromkeys([*a.leaves, *b.leaves]):
        first, second = a.leaves.get(path), b.leaves.get(path)
        if first != second:
            _add_row(
                table, path, *(f"{leaf.shape} {leaf.dtype} {leaf.digest}" if leaf else "" for leaf in (first, second))
            )
    for name in ("mesh", "stage", "precision", "versions", "data"):
        if getattr(a, name) != getattr(b, name):
            _add_row(table, f"({name})", str(getattr(a, name)), str(getattr(b, name)))
    return table


def _dtypes(manifest: Manifest) -> str:
    return f"{manifest.precision['param_dtype']}, computed in {manifest.precision['compute_dtype']}"


def _mesh(axes: Mapping[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in axes.items())


def _table(title: Iterable[str], columns: Iterable[str]) -> Table:
    """A table with the lines of a title."""
    table = Table(title=Text("\n".join(map(plain_text, title)), "bold"), title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _add_row(table: Table, *cells: str) -> None:
    """Adds a row as it is: what a manifest contains is neither markup nor an escape sequence."""
    table.add_row(*(Text(plain_text(cell)) for cell in cells))
