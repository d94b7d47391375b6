"""Saves states in the background after it has checked them, and restores them; with the position of a data iterator.

A data iterator has `get_state` and `set_state`, as Grain's have.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from zerojax.checkpoints import contents, manifest as manifests, store
from zerojax.checkpoints.digest import digests
from zerojax.checkpoints.manifest import Allowed, CheckpointCorrupted, CheckpointMismatch, LeafRecord, Manifest
from zerojax.checkpoints.raise_on_all_processes import raise_on_all_processes
from zerojax.checkpoints.replicas import check_replicas, has_copies
from zerojax.checkpoints.run_directory import RunDirectory
from zerojax.checkpoints.store import Store
from zerojax.step import optimizers
from zerojax.step.config import ZeroConfig
from zerojax.step.state import TrainState, check_not_donated
from zerojax.utils.text import abbreviate
from zerojax.utils.typing import Array

log = logging.getLogger("zerojax")
_BYTES = "base64"
_MAX_FAILURES = 2  # consecutive saves
_PACKAGES = ("zerojax", "jax", "flax", "optax", "orbax-checkpoint")


def _get_states(data: Any) -> list[Any] | None:
    """Returns the iterator states of all processes as JSON data, or None without an iterator.

    Raises:
        ValueError: if the state of an iterator is neither JSON data nor bytes.
    """
    if data is None:
        return None
    state = data.get_state()
    encoded = {_BYTES: base64.b64encode(state).decode()} if isinstance(state, bytes) else state
    try:
        text = json.dumps(encoded)
        if json.loads(text) != encoded:
            raise ValueError("a state that is not equal to itself after encoding it as JSON")
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"checkpoint: the state of the data iterator cannot be saved\n  got:      {error}\n"
            f"  fix:      return bytes from get_state(), or JSON data: string keys, and lists instead of tuples"
        ) from error
    return [json.loads(each) for each in _gather_texts(text)]


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
    return base64.b64decode(state[_BYTES]) if isinstance(state, dict) and state.keys() == {_BYTES} else state


def _gather_texts(text: str) -> list[str]:
    """Returns the texts of all processes in every process."""
    if jax.process_count() == 1:
        return [text]
    data = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array(len(data)))
    rows = multihost_utils.process_allgather(np.pad(data, (0, int(sizes.max()) - len(data))))
    return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]


class Saver:
    """Saves the states of a run.

    Attributes:
        saved_step: the last step that was saved or restored.
        error: of the last save, if it failed; logged, but not raised yet.
    """

    def __init__(self, config: ZeroConfig, directory: RunDirectory, steps: Store):
        self.saved_step: int | None = None
        self.error: Exception | None = None
        self._config, self._directory, self._store = config, directory, steps
        self._num_failures = 0  # of consecutive saves
        self._saving_step: int | None = None  # of the save in progress

    def save(self, state: TrainState, data: object = None) -> None:
        """Checks a state and starts to save it; see `Checkpoints.save`."""
        check_not_donated(state)
        self.wait()
        if int(state.step) == self.saved_step:
            return
        arrays, manifest = self.checked(state, data)
        self._directory.check_held(self.saved_step)
        self._saving_step = manifest.step
        with self._handling_failures():
            self._store.save(arrays, manifest)

    def checked(self, state: TrainState, data: object = None) -> tuple[dict[str, Array], Manifest]:
        """Everything that a save does before it writes. A run calls it before the first step: what cannot be saved
        should not be trained.

        Returns:
            (the arrays of the state by path, their manifest).

        Raises:
            ReplicasDiffer, FloatingPointError, ValueError: see `Checkpoints.save`.
        """
        step = int(state.step)
        arrays, shapes = contents.arrays(state), contents.logical_shapes(state)
        computed = {} if state.master is None else contents.compute_params(state)
        copies = {path: a for path, a in computed.items() if has_copies(a)}  # not saved, but trained with
        digest_of = digests(arrays | copies, shapes | {path: a.shape for path, a in copies.items()})
        check_replicas(digest_of, f"the state of step {step}, which is not saved,", self.advice())
        if nonfinite := contents.nonfinite_paths(state, {path: digest_of[path] for path in arrays}):
            raise FloatingPointError(
                f"checkpoint: the state of step {step} is not finite, and is not saved\n"
                f"  got:      {contents.shortened(nonfinite)}\n"
                f"  fix:      {self._restart()} with a lower learning rate; or freeze what is infinite from the start"
            )
        leaves = {p: LeafRecord(shapes[p], str(a.dtype), digest_of[p].text) for p, a in arrays.items()}
        manifest = Manifest(
            step,
            leaves,
            dict(self._config.mesh.shape),
            self._config.stage,
            self._dtypes(),
            {name: metadata.version(name) for name in _PACKAGES},
            _get_states(data),
            optimizers.constants(state.layout.tx),
        )
        self._store.check(arrays, manifest)
        return arrays, manifest

    def poll(self) -> None:
        """Handles a save that failed in the background, and starts to copy one that is complete."""
        with self._handling_failures():
            self._store.poll()
            self._directory.copy(self.saved_step if self._saving_step is None else self._saving_step, self._store)

    def wait(self) -> None:
        """Waits for the save in progress."""
        with self._handling_failures():
            self._store.finish()
            if self._saving_step is not None:
                self._num_failures, self.saved_step = 0, self._saving_step
                self._saving_step, self.error = None, None

    def finish(self) -> None:
        """Waits for the save and the copies in progress.

        Raises:
            RuntimeError: if the last save failed.
        """
        self.wait()
        self._directory.finish_copy()
        self._directory.copy(self.saved_step, self._store)  # if another was being copied then, or its copy failed
        self.raise_error("the last save failed")

    def raise_error(self, what: str) -> None:
        """Raises the error of the last save if it failed; `what` begins the error's text."""
        if self.error:
            raise RuntimeError(f"checkpoint: {what}: {self.error}") from self.error

    def advice(self) -> str:
        """What to do if replicas differ."""
        same = "" if self.saved_step is not None else " with the same values in all processes"
        return f"{self._restart()}{same}, without these devices if it happens again"

    def _restart(self) -> str:
        return "restart" if self.saved_step is None else f"resume from step {self.saved_step}"

    def _dtypes(self) -> dict[str, str]:
        names = ("param_dtype", "compute_dtype", "reduce_dtype")
        return {name: jnp.dtype(getattr(self._config.precision, name)).name for name in names}

    @contextlib.contextmanager
    def _handling_failures(self) -> Iterator[None]:
        """Logs the failure of a save. The second consecutive one is raised."""
        try:
            yield
        except Exception as error:
            step, self._saving_step = self._saving_step, None
            self._num_failures += 1
            self._store.abandon_save()
            message = f"checkpoint: the save of step {step} in {self._directory.path} failed"
            if self._num_failures >= _MAX_FAILURES:
                self.error = None
                raise RuntimeError(
                    f"{message}, and so did the previous save\n  got:      {error}\n  fix:      check the disk space"
                    f" and permissions of {self._directory.path}; the newest step in it is {self._newest()}"
                ) from error
            self.error = error
            log.error("%s: %s", message, error)

    def _newest(self) -> int | None:
        return max(self._directory.steps(), default=None)


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

    saved, paths, iterator_states = raise_on_all_processes(prepare, where)
    settings = contents.settings(state)
    contents.free(state, paths)
    leaves, stored = {p: saved.leaves[p] for p in paths}, {p: avals[p] for p in paths}
    arrays = raise_on_all_processes(lambda: store.read_arrays(directory, step, leaves, stored), where)
    _check_digests(saved, arrays, where)
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
    return contents.with_arrays(state, {path: a.astype(avals[path].dtype) for path, a in arrays.items()}), saved


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
