"""Checkpoints on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from rich.table import Table

from zerojax.audit.findings import bytes_text
from zerojax.checkpoints import store
from zerojax.checkpoints.manifest import CheckpointCorrupted, CheckpointMismatch, Manifest, num_bytes
from zerojax.checkpoints.pieces import damaged


def steps_table(directory: Path, verify: bool) -> tuple[Table, bool]:
    """All steps with a verdict each; and whether all are good. With `verify` every array is read."""
    table = _table(f"Steps in {directory}", ["step", "size", "stage", "mesh", "dtypes", ""])
    good = True
    for step, path in store.folders(directory).items():
        manifest, verdict = _verdict(directory, step, path, verify)
        good &= verdict in ("manifest ok", "ok")
        told = (
            [bytes_text(manifest.num_bytes), str(manifest.stage), _mesh(manifest.mesh), _dtypes(manifest)]
            if manifest
            else [""] * 4
        )
        table.add_row(str(step), *told, verdict)
    return table, good


def _verdict(directory: Path, step: int, path: Path, verify: bool) -> tuple[Manifest | None, str]:
    if not store.is_whole(path):
        return None, "its save did not end"
    try:
        manifest = store.read_manifest(directory, step)
    except (CheckpointCorrupted, CheckpointMismatch) as error:
        return None, str(error).splitlines()[0].removeprefix("checkpoint: ")
    if not verify:
        return manifest, "manifest ok"
    bad = [path for path, wrong in damaged(directory, step, manifest) if wrong]
    return manifest, f"{len(bad)} of {len(manifest.leaves)} arrays damaged: {bad[0]}" if bad else "ok"


def leaves_table(manifest: Manifest, wrong: Mapping[str, str | None] | None = None) -> Table:
    """Every array of a step; with what is wrong with it, if that was looked at."""
    title = f"Step {manifest.step}: {bytes_text(manifest.num_bytes)}, saved at stage {manifest.stage} on"
    title += f" {_mesh(manifest.mesh)}, {_dtypes(manifest)}\n" + ", ".join(map(" ".join, manifest.versions.items()))
    table = _table(title, ["array", "shape", "dtype", "size", "digest", *(["verdict"] if wrong is not None else [])])
    for path, leaf in manifest.leaves.items():
        row = [path, str(leaf.shape), leaf.dtype, bytes_text(num_bytes(leaf)), leaf.digest]
        table.add_row(*row, *([wrong.get(path) or "ok"] if wrong is not None else []))
    return table


def differences(a: Manifest, b: Manifest) -> Table:
    """What differs between two steps, by what their manifests say."""
    table = _table(f"Step {a.step} and step {b.step}", ["array", "first", "second"])
    for path in dict.fromkeys([*a.leaves, *b.leaves]):
        first, second = a.leaves.get(path), b.leaves.get(path)
        if first != second:
            table.add_row(
                path, *(f"{leaf.shape} {leaf.dtype} {leaf.digest}" if leaf else "" for leaf in (first, second))
            )
    for name in ("mesh", "stage", "precision", "versions", "data"):
        if getattr(a, name) != getattr(b, name):
            table.add_row(f"({name})", str(getattr(a, name)), str(getattr(b, name)))
    return table


def _dtypes(manifest: Manifest) -> str:
    return f"{manifest.precision['param_dtype']}, computed in {manifest.precision['compute_dtype']}"


def _mesh(axes: Mapping[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in axes.items())


def _table(title: str, columns: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
