"""Restores a step, or a part of it, and checks that it is what was saved. An error in one process is raised in all."""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from zerojax.checkpoints import contents, manifest as manifests, store
from zerojax.checkpoints.digest import digests
from zerojax.checkpoints.manifest import FALLBACK_FIX, Allowed, CheckpointCorrupted, CheckpointMismatch, Manifest
from zerojax.checkpoints.replicas import check_replicas
from zerojax.checkpoints.saver import BYTES
from zerojax.sharding.placement import PINNED_HOST
from zerojax.step import optimizers
from zerojax.step.state import TrainState
from zerojax.utils.text import abbreviate
from zerojax.utils.typing import Array

log = logging.getLogger("zerojax")
T = TypeVar("T")


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
        states = [] if data is None or is_start else [state_of_this_process(saved.data, where)]
        return saved, manifests.paths_to_read(saved, _selected(logical, only), allowed, where), states

    saved, paths, iterator_states = _raise_on_all_processes(prepare, where)
    settings = contents.settings(state)
    contents.free(state, paths)
    arrays = _read(directory, state, step, paths, avals, saved)
    for iterator_state in iterator_states:
        data.set_state(iterator_state)
    for text in _differences(saved, optimizers.constants(state.layout.tx), settings, arrays, allowed):
        log.warning("checkpoint: step %d %s", step, text)
    if allowed.optimizer == "changed":
        arrays |= contents.continued_counts(avals, arrays)
        ours, theirs = ({p for p in tree if p.startswith(contents.OPTIMIZER)} for tree in (avals, saved.leaves))
        log.warning(
            "checkpoint: of the optimizer, %d leaves continue; %d are new, and %d that were saved are not used",
            *map(len, (ours & theirs, ours - theirs, theirs - ours)),
        )
    return contents.with_arrays(state, arrays), saved


def _read(
    directory: Path, state: TrainState, step: int, paths: Sequence[str], avals: Mapping[str, Any], saved: Manifest
) -> dict[str, Array]:
    """Reads arrays of a step, checks that they are what was saved, and puts them where they stay.

    Those that stay on a disk come one after the other, so that host memory holds one of them.
    """
    where, config = str(store.folder(directory, step)), state.layout.config
    assert config is not None
    on_disk = config.disk is not None
    keep = config.memory.keeper(config, state)
    alone = {path for path in paths if on_disk and avals[path].sharding.memory_kind == PINNED_HOST}
    arrays: dict[str, Array] = {}
    for group in [[path for path in paths if path not in alone], *([path] for path in paths if path in alone)]:
        leaves, stored = {p: saved.leaves[p] for p in group}, {p: avals[p] for p in group}
        read = lambda leaves=leaves, stored=stored: store.read_arrays(directory, step, leaves, stored)
        found = _raise_on_all_processes(read, where)
        _check_digests(saved, found, where)
        for path, a in found.items():
            arrays[path] = keep(contents.state_path(state, path), a.astype(avals[path].dtype))
    return arrays


def _differences(
    saved: Manifest,
    constants: Mapping[str, str],
    settings: Mapping[str, np.ndarray],
    arrays: Mapping[str, Array],
    allowed: Allowed,
) -> list[str]:
    """What a step has different from the program: constants, which are those of the program from now on, and values in
    the state, such as a rate of `optax.inject_hyperparams` or the random key, which are those of the step."""
    texts = []
    changed = [name for name in {**saved.optimizer, **constants} if saved.optimizer.get(name) != constants.get(name)]
    if saved.optimizer and changed and allowed.optimizer == "same":
        named = (f"{name}: {saved.optimizer.get(name, 'none')}, now {constants.get(name, 'none')}" for name in changed)
        texts.append(f"was saved with another optimizer: {abbreviate(list(named), separator='; ')}")
    found = {path: contents.on_host(arrays[path]) for path in settings if path in arrays}
    kept = [path for path, value in found.items() if not np.array_equal(value, settings[path])]
    if kept:
        named = (
            "another seed" if path == "key" else f"{path} {found[path]:.6g}, not {settings[path]:.6g}" for path in kept
        )
        texts.append(f"replaces values of the program: {abbreviate(list(named), separator='; ')}")
    return texts


def _selected(avals: dict[str, Any], globs: Sequence[str]) -> dict[str, Any]:
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


def state_of_this_process(saved: Sequence[Any] | None, where: str) -> Any:
    """Returns the saved iterator state that this process continues from.

    Args:
        saved: as `_get_states` returned it.
        where: names the checkpoint in errors.

    Raises:
        CheckpointMismatch: if no state was saved, or if the number of processes changed and the states differ.
    """
    if saved is None:
        raise CheckpointMismatch(
            f"checkpoint: {where} contains no state of a data iterator\n"
            f"  fix:      resume(state) without an iterator, and skip the batches that were already used"
        )
    equal = all(each == saved[0] for each in saved)
    if len(saved) != jax.process_count() and not equal:
        raise CheckpointMismatch(
            f"checkpoint: the data iterator states of {where} do not fit this number of processes\n"
            f"  got:      different states of {len(saved)} processes, now there are {jax.process_count()}\n"
            f"  fix:      use {len(saved)} processes, or an iterator with the same state in all of them"
        )
    state = saved[0] if equal else saved[jax.process_index()]
    return base64.b64decode(state[BYTES]) if isinstance(state, dict) and state.keys() == {BYTES} else state


def _raise_on_all_processes(call: Callable[[], T], where: str) -> T:
    """Returns the result of `call` if it raises in no process. Every process has to call this function: without it, the
    others would wait for the one that failed.

    Args:
        call: reads a part of a checkpoint.
        where: names the checkpoint in errors.

    Raises:
        Exception: the error of this process.
        CheckpointCorrupted: if only other processes raised an error. It names them.
    """
    result, failure = None, None
    try:
        result = call()
    except Exception as error:
        failure = error
    flags = multihost_utils.process_allgather(np.array(failure is not None))
    if failure is not None:
        raise failure
    if others := ", ".join(str(i) for i in np.flatnonzero(flags)):
        raise CheckpointCorrupted(
            f"checkpoint: {where} cannot be read\n  got:      an error in process {others}\n  {FALLBACK_FIX}"
        )
    return result  # pyright: ignore[reportReturnType]
