"""Formats checkpoints as tables for the terminal: the steps, the arrays of a step, and differences between two."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from zerojax.checkpoints import store
from zerojax.checkpoints.manifest import (
    CheckpointCorrupted,
    CheckpointMismatch,
    LeafRecord,
    Manifest,
    num_bytes,
    plain_text,
)
from zerojax.checkpoints.pieces import verify_arrays
from zerojax.utils.tables import Column, Screen, TextTable
from zerojax.utils.text import SPACE, bytes_text, fold, mesh_text


def steps_table(directory: Path, verify: bool, name: str) -> tuple[TextTable, bool]:
    """Returns a table of all steps with a status each, and whether all of them are intact.

    Args:
        directory: of the steps.
        verify: whether every array is read and compared with its digest. Otherwise only manifests are read.
        name: of the directory, for the title.
    """
    rows, all_intact = [], True
    for step, path in store.folders(directory).items():
        manifest, status = _status(directory, step, path, verify)
        all_intact &= status in ("manifest ok", "ok")
        cells = (
            [bytes_text(manifest.num_bytes), str(manifest.stage), mesh_text(manifest.mesh), _dtypes(manifest)]
            if manifest
            else [""] * 4
        )
        rows.append([str(step), *cells, status])
    columns = [Column("step", right=True), Column("size", right=True), Column("stage")]
    columns += [Column(name, wraps=True) for name in ("mesh", "dtypes", "status")]
    return _table([f"Steps in {name}"], columns, rows), all_intact


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


def leaves_table(manifest: Manifest, to: Screen) -> TextTable:
    """Returns a table of the arrays of a step.

    Args:
        manifest: of the step.
        to: whether equal layers are shown as one row, without their digests.
    """
    held = f"{len(manifest.leaves):,} arrays, {bytes_text(manifest.num_bytes)}"
    title = f"Step {manifest.step}: {held}, saved at stage {manifest.stage} on {mesh_text(manifest.mesh)},"
    versions = ", ".join(map(" ".join, manifest.versions.items()))
    columns = [Column("array", wraps=True), Column("type"), Column("size", right=True), Column("digest")]
    paths = list(manifest.leaves)
    kinds = [(_type(leaf), to.folds or path) for path, leaf in manifest.leaves.items()]
    rows = []
    for each in fold(paths, kinds):
        leaves = [manifest.leaves[paths[k]] for k in each.members]
        digest = leaves[0].digest if len(leaves) == 1 else "one each"
        size = bytes_text(sum(map(num_bytes, leaves)))
        rows.append([each.text, _type(leaves[0]), size, digest])
    return _table([f"{title} {_dtypes(manifest)}", versions], columns, rows)


def differences(a: Manifest, b: Manifest, to: Screen) -> TextTable:
    """Returns a table of the differences between the manifests of two steps. It has no rows if there are none."""
    found = [path for path in dict.fromkeys([*a.leaves, *b.leaves]) if a.leaves.get(path) != b.leaves.get(path)]
    type_in = lambda manifest, path: _type(manifest.leaves[path]) if path in manifest.leaves else ""
    types = [(type_in(a, path), type_in(b, path)) for path in found]
    rows = []
    for each in fold(found, [(pair, to.folds or path) for path, pair in zip(found, types, strict=True)]):
        first, second = types[each.members[0]]
        leaves = [manifest.leaves.get(found[each.members[0]]) for manifest in (a, b)]
        is_single = len(each.members) == 1
        digests = [(leaf.digest if is_single else "one digest each") if leaf else "" for leaf in leaves]
        rows.append([each.text, first if first == second else f"{first or 'none'} -> {second or 'none'}", *digests])
    for name in ("mesh", "stage", "precision", "versions", "data"):
        if getattr(a, name) != getattr(b, name):
            rows.append([f"({name})", "", str(getattr(a, name)), str(getattr(b, name))])
    title = f"Differences between step {a.step} and step {b.step}: {len(found):,} arrays"
    return _table([title], [Column(name, wraps=True) for name in ("array", "type", "first", "second")], rows)


def _type(leaf: LeafRecord) -> str:
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def _dtypes(manifest: Manifest) -> str:
    return f"{manifest.precision['param_dtype']}, computed in {manifest.precision['compute_dtype']}"


def _table(title: Iterable[str], columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> TextTable:
    """A table of texts as they are: what a manifest contains is no escape sequence."""
    return TextTable("\n".join(map(plain_text, title)), columns, [[_plain(cell) for cell in row] for row in rows])


def _plain(cell: str) -> str:
    return SPACE.join(map(plain_text, cell.split(SPACE)))
