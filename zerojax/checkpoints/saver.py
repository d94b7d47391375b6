"""Saves states in the background after it has checked them, with the position of a data iterator.

A data iterator has `get_state` and `set_state`, as Grain's have.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from zerojax.checkpoints import contents
from zerojax.checkpoints.digest import digests
from zerojax.checkpoints.manifest import LeafRecord, Manifest
from zerojax.checkpoints.replicas import check_replicas, has_copies
from zerojax.checkpoints.run_directory import RunDirectory
from zerojax.checkpoints.store import Store
from zerojax.step import optimizers
from zerojax.step.config import ZeroConfig
from zerojax.step.state import TrainState, check_not_donated
from zerojax.utils.typing import Array

log = logging.getLogger("zerojax")
BYTES = "base64"
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
    encoded = {BYTES: base64.b64encode(state).decode()} if isinstance(state, bytes) else state
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
        self._directory.copy(self.saved_step, self._store)  # if saves take longer than what is between them
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
