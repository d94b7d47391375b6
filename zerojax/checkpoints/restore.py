"""Restores a training state, or a part of it, from a step on disk, and compares it with what was saved."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from zerojax.checkpoints import contents, iterators, manifest as manifests, store
from zerojax.checkpoints.digest import digests
from zerojax.checkpoints.manifest import Allowed, CheckpointCorrupted, Manifest
from zerojax.checkpoints.raise_on_all_processes import raise_on_all_processes
from zerojax.checkpoints.replicas import check_replicas
from zerojax.step.state import TrainState
from zerojax.utils.typing import Array, Aval

log = logging.getLogger("zerojax")


def restore(
    directory: Path, state: TrainState, step: int, data: Any, allowed: Allowed, only: Sequence[str] = ()
) -> tuple[TrainState, Manifest]:
    """Restores a step, or a part of it; see `Checkpoints.restore`. An error in one process is raised in all.

    Returns:
        (the restored state, the manifest of the step).
    """
    where = str(store.folder(directory, step))
    avals, shapes = contents.arrays(contents.avals(state)), contents.logical_shapes(state)
    logical = {path: jax.ShapeDtypeStruct(shapes[path], a.dtype) for path, a in avals.items()}

    def prepare() -> tuple[Manifest, list[str], list[Any]]:
        saved = store.read_manifest(directory, step)
        is_start = step == 0 and saved.data is None  # for example imported parameters
        states = [] if data is None or is_start else [iterators.state_of_this_process(saved.data, where)]
        return saved, manifests.paths_to_read(saved, _selected(logical, only), allowed, where), states

    saved, paths, iterator_states = raise_on_all_processes(prepare, where)
    contents.free(state, paths)
    leaves, stored = {p: saved.leaves[p] for p in paths}, {p: avals[p] for p in paths}
    arrays = raise_on_all_processes(lambda: store.read_arrays(directory, step, leaves, stored), where)
    _check_digests(saved, arrays, where)
    for iterator_state in iterator_states:
        data.set_state(iterator_state)
    if allowed.optimizer == "changed":
        arrays |= contents.continued_counts(avals, arrays)
        ours, theirs = ({p for p in tree if p.startswith(contents.OPTIMIZER)} for tree in (avals, saved.leaves))
        log.warning(
            "checkpoint: of the optimizer, %d leaves continue; %d are new, and %d that were saved are not used",
            *map(len, (ours & theirs, ours - theirs, theirs - ours)),
        )
    return contents.with_arrays(state, {path: a.astype(avals[path].dtype) for path, a in arrays.items()}), saved


def _selected(avals: dict[str, Aval], globs: Sequence[str]) -> dict[str, Aval]:
    """The avals whose paths match one of the globs; all of them without globs."""
    for glob in globs:
        if not any(manifests.matches(path, [glob]) for path in avals):
            raise ValueError(
                f"checkpoint: only={glob!r} matches no leaf\n"
                f"  fix:      use a glob on paths such as {', '.join(list(avals)[: contents.MAX_PATHS])}"
            )
    return {path: a for path, a in avals.items() if not globs or manifests.matches(path, globs)}


def _check_digests(saved: Manifest, arrays: Mapping[str, Array], where: str) -> None:
    """Raises CheckpointCorrupted if arrays that were read differ from those that were saved."""
    digest_of = digests(arrays, {path: saved.leaves[path].shape for path in arrays})
    check_replicas(digest_of, f"what was read from {where}", "read it again; if it happens again, test these devices")
    damaged = [path for path in arrays if digest_of[path].text != saved.leaves[path].digest]
    if damaged:
        raise CheckpointCorrupted(
            f"checkpoint: {where} is damaged\n"
            f"  got:      another digest than was saved, for {contents.shortened(damaged)}\n"
            f"  {manifests.FALLBACK_FIX}"
        )
