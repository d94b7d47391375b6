"""The checkpoints of a training run: when a state is saved, and from which one the run goes on."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.checkpoints import contents, iterators, manifest as manifests, store
from zerojax.checkpoints.digest import digests
from zerojax.checkpoints.loss_monitor import Health
from zerojax.checkpoints.manifest import Allowed, CheckpointCorrupted, Leaf, Manifest
from zerojax.checkpoints.preemption import EXIT_CODE, Preemption
from zerojax.checkpoints.raise_on_all_processes import of_process_0, together
from zerojax.step.config import ZeroConfig
from zerojax.step.state import TrainState

log = logging.getLogger("zerojax")
_PACKAGES = ("zerojax", "jax", "flax", "optax", "orbax-checkpoint")
_MOST_FAILURES = 2
_open: set[Checkpoints] = set()  # also those that the script has no name for any more


def _close_all() -> None:
    """When the script has ended: waits for saves that nobody waited for."""
    for checkpoints in list(_open):
        try:
            checkpoints.close()
        except BaseException:
            log.exception("checkpoint: a save failed when the script had ended")
            logging.shutdown()
            sys.stdout.flush()
            os._exit(1)  # an exception would not change the exit code here


# Functions of `atexit` come too late: the executors that saves run on take nothing more by then.
threading._register_atexit(_close_all)  # pyright: ignore[reportAttributeAccessIssue]


class Checkpoints:
    """Saves the state of a run every so many steps, in the background, and gives it back after a restart.

        with zero.checkpoints(directory, every=1000) as checkpoints:
            state, start = checkpoints.resume(state)
            for i in range(start, num_steps):
                state, metrics = step(state, batch(i))
                checkpoints.update(state, metrics)

    Leaving the block waits for the save that is under way, also after an exception, which is what is then raised. Where
    there is no block, the end of the process waits; from Python 3.12 on it cannot, and the exit code is 1.

    SIGTERM, in any process, saves the state and ends all of them with exit code `EXIT_CODE`, 75; a handler that was set
    before or is set later is called too.

    Args:
        config: of the Zero.
        directory: on a file system that all processes see. One run at a time may use it.
        every: steps between two saves.
        keep: the newest steps that stay on disk; None: all of them.
        keep_every: steps that this divides stay too.
        most_skipped: so many updates in a row may be skipped, since a gradient was not finite; then the run ends.
        spike: a loss of more than so many times the median of the last 50 is logged. None: none is.
        watchdog_s: if no `update` comes for so many seconds, the stacks of all threads are written to stderr and the
            process ends with exit code 1. It begins with the first `update`, and has to outlast a save, an evaluation,
            and a compilation in between. None: nothing is watched.

    Raises:
        ValueError: a number that is none, or a directory that another run uses.
    """

    def __init__(
        self,
        config: ZeroConfig,
        directory: str | Path,
        every: int = 1000,
        keep: int | None = 3,
        keep_every: int | None = None,
        most_skipped: int = 10,
        spike: float | None = None,
        watchdog_s: float | None = None,
    ):
        steps = {"every": every, "keep": keep, "keep_every": keep_every, "most_skipped": most_skipped}
        for name, number in steps.items():
            if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
                raise ValueError(f"checkpoints: {name} is {number!r}\n  fix:      a number of steps, at least 1")
        self.config, self.directory, self.every = config, Path(directory).absolute(), every
        self._exit = contextlib.ExitStack()
        self._exit.enter_context(store.locked(self.directory))
        self._store = store.Store(self.directory, keep, keep_every)
        self._exit.callback(self._store.close)
        self._calls, self._failures, self._under_way = 0, 0, None
        self._saved: int | None = None
        self._unreported: Exception | None = None  # of the last save, but in the log
        self._health, self._watchdog_s = Health(most_skipped, spike), watchdog_s
        self._preemption = Preemption()
        self._exit.callback(self._preemption.close)
        self._exit.callback(faulthandler.cancel_dump_traceback_later)
        _open.add(self)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            self.close()
        except Exception:
            if error is None:
                raise
            log.exception("checkpoint: the last save failed too")  # the first error is what is shown

    def close(self) -> None:
        """Waits for the save that is under way, and lets another run use the directory.

        Raises:
            Exception: what went wrong with that save.
        """
        _open.discard(self)
        with self._exit:
            self.wait()
            if self._unreported:
                raise RuntimeError(f"checkpoint: the last save failed: {self._unreported}") from self._unreported
            self._health.finish()

    def steps(self) -> list[int]:
        """Those on disk that were written as a whole, oldest first."""
        return store.steps(self.directory)

    def resume(self, state: TrainState, data: Any = None, *, fallback: bool = False) -> tuple[TrainState, int]:
        """The newest state, and its step; the state that was given and 0 where nothing was saved yet.

        Args:
            state: of `init`, which is donated, or of `eval_init` where something was saved. The checkpoint may be of
                another stage, mesh, number of processes and precision of compute.
            data: an iterator with `get_state` and `set_state`: it is set to where it was.
            fallback: goes back to the newest step that is whole, if the newest is not. Newer ones are renamed.

        Raises:
            CheckpointCorrupted: the newest step is damaged; with `fallback`, all of them are.
            CheckpointMismatch: it is not a checkpoint of this state.
        """
        steps = of_process_0(self.steps())
        if not steps:
            return self._begin(state)
        errors: list[str] = []
        avals = contents.avals(state)
        for step in reversed(steps):
            try:
                restored = self._restore(state, step, data, Allowed())
            except CheckpointCorrupted as error:
                if not fallback:
                    raise
                log.error("checkpoint: going back behind step %d: %s", step, error)
                errors.append(str(error))
                state = avals
            else:
                self._calls, self._saved = step, step
                self._health.skipped = int(restored.skipped)
                if errors:
                    self._store.set_aside(newer for newer in steps if newer > step)
                return restored, step
        told = "\n  ".join(error.splitlines()[0] for error in errors)
        raise CheckpointCorrupted(f"checkpoint: no step of {self.directory} is whole\n  {told}")

    def _begin(self, state: TrainState) -> tuple[TrainState, int]:
        if there := of_process_0(list(store.folders(self.directory))):
            raise CheckpointCorrupted(
                f"checkpoint: no step of {self.directory} is whole\n"
                f"  got:      {len(there)} folders of steps, none of them of a save that ended\n"
                f"  fix:      another directory, to begin at step 0"
            )
        if any(isinstance(a, jax.ShapeDtypeStruct) for a in jax.tree.leaves(state)):
            raise ValueError(
                f"checkpoints: nothing to begin with\n  got:      avals, and no checkpoint in {self.directory}\n"
                f"  fix:      the state of zero.init"
            )
        log.info("checkpoint: none in %s, so the run begins at step 0", self.directory)
        self._health.skipped = int(state.skipped)
        return state, 0

    def restore(
        self,
        state: TrainState,
        step: int,
        *,
        only: Sequence[str] = (),
        data: Any = None,
        missing: Sequence[str] = (),
        extra: Sequence[str] = (),
        cast: bool = False,
        new_optimizer: bool = False,
    ) -> TrainState:
        """A step, or a part of it.

        Args:
            state: takes what is read, and is donated; what is not read stays as it is there.
            step: one of `steps()`.
            only: globs of what to read ('params/*', 'params/layers/*'). By default everything.
            data: see `resume`.
            missing, extra, cast, new_optimizer: what may differ, see `Allowed`.

        Cost: each device reads its own shards, and then what it has read, to check the digests. The state that was
            given is freed first, so that there are no two of them.

        Raises:
            CheckpointCorrupted: what is on disk is not what was saved.
            CheckpointMismatch: what was saved is not a state like this one.
            ValueError: a step that is not there, or a glob that matches nothing.
        """
        if step not in (there := self.steps()):
            raise ValueError(
                f"checkpoint: no step {step} in {self.directory}\n"
                f"  got:      {', '.join(map(str, there)) or 'none'}\n  fix:      one of these"
            )
        allowed = Allowed(missing, ("*",) if only else extra, cast, new_optimizer)
        return self._restore(state, step, data, allowed, only)

    def _restore(
        self, state: TrainState, step: int, data: Any, allowed: Allowed, only: Sequence[str] = ()
    ) -> TrainState:
        """What goes wrong in one process is an error in all of them."""
        where = str(store.folder(self.directory, step))
        avals = contents.arrays(contents.avals(state))

        def prepared() -> tuple[Manifest, list[str], list[Any]]:
            saved = store.read_manifest(self.directory, step)
            begins = step == 0 and saved.data is None  # parameters of others, say
            places = [] if data is None or begins else [iterators.own_state(saved.data, where)]
            return saved, manifests.wanted(saved, _only(avals, only), allowed, where), places

        saved, paths, places = together(prepared, where)
        contents.free(state, paths)
        leaves, shardings = {p: saved.leaves[p] for p in paths}, {p: avals[p].sharding for p in paths}
        read = together(lambda: store.read_arrays(self.directory, step, leaves, shardings), where)
        _check(saved, read, where)
        for place in places:
            data.set_state(place)
        return contents.with_arrays(state, {path: a.astype(avals[path].dtype) for path, a in read.items()})

    def update(self, state: TrainState, metrics: Mapping[str, Any] | None = None, data: Any = None) -> None:
        """After each step: saves the state if it is due, or if the run is told to end; reports a save that failed.

        Args:
            state: that the step returned. It may be donated to the next step at once.
            metrics: that the step returned, to notice skipped updates and jumps of the loss two steps later.
            data: an iterator with `get_state` and `set_state` (as those of Grain), whose state is saved too.

        Raises:
            SystemExit: with `EXIT_CODE`, after SIGTERM, when the state is saved.
            FloatingPointError: too many updates in a row were skipped; or as for `save`.
            RuntimeError: two saves failed, one after the other.
            ValueError: as for `save`.
        """
        self._calls += 1
        if self._watchdog_s is not None:
            faulthandler.dump_traceback_later(self._watchdog_s, exit=True)
        if metrics is not None:
            self._health.update(self._calls, metrics)
        with self._reporting():
            self._store.check()
        if self._preemption.asked():
            self._end(state, data)
        if self._calls % self.every == 0:
            self.save(state, data)

    def _end(self, state: TrainState, data: Any) -> None:
        self.save(state, data)
        self.wait()
        if self._unreported:
            raise RuntimeError(f"checkpoint: SIGTERM, and the save failed: {self._unreported}") from self._unreported
        log.warning("checkpoint: SIGTERM; step %s is saved, the run ends with exit code %d", self._saved, EXIT_CODE)
        raise SystemExit(EXIT_CODE)

    def save(self, state: TrainState, data: Any = None) -> None:
        """Begins to save a state; it goes on in the background. A step that this run has saved is not saved again.

        Cost: a copy of each device's shards to host memory, and one reading of them for the digests.

        Raises:
            ValueError: a leaf that is no array, or a data iterator whose state is not JSON.
            FloatingPointError: a NaN in the state, or an infinity in a parameter. Nothing is written.
            RuntimeError: two saves failed, one after the other.
        """
        step = int(state.step)
        self.wait()
        if step == self._saved:
            return
        arrays = contents.arrays(state)
        found = digests(arrays)
        if bad := contents.bad_values(found):
            there = "begin again" if self._saved is None else f"go on from step {self._saved}"
            raise FloatingPointError(
                f"checkpoint: the state of step {step} is not finite, and is not saved\n"
                f"  got:      {', '.join(bad[:4])}{' and others' if len(bad) > 4 else ''}\n"
                f"  fix:      {there}, with smaller steps"
            )
        leaves = {path: Leaf(tuple(a.shape), str(a.dtype), found[path].text) for path, a in arrays.items()}
        manifest = Manifest(
            step,
            leaves,
            dict(self.config.mesh.shape),
            self.config.stage,
            self._dtypes(),
            {name: metadata.version(name) for name in _PACKAGES},
            iterators.get_states(data),
        )
        self._under_way = step
        with self._reporting():
            self._store.save(arrays, manifest)

    def _dtypes(self) -> dict[str, str]:
        names = ("param_dtype", "compute_dtype", "reduce_dtype")
        return {name: jnp.dtype(getattr(self.config.precision, name)).name for name in names}

    def wait(self) -> None:
        """Until the save that is under way has ended. If it failed, that is reported as by `update`."""
        with self._reporting():
            self._store.finish()
            if self._under_way is not None:
                self._failures, self._saved, self._under_way, self._unreported = 0, self._under_way, None, None

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        """A save that fails is logged at once; the second in a row ends the run."""
        try:
            yield
        except Exception as error:
            step, self._under_way = self._under_way, None
            self._failures += 1
            self._store.give_up()
            told = f"checkpoint: the save of step {step} in {self.directory} failed"
            if self._failures >= _MOST_FAILURES:
                self._unreported = None
                raise RuntimeError(
                    f"{told}, and so did the one before it\n  got:      {error}\n"
                    f"  fix:      space and rights in {self.directory}; the newest step there is {self._newest()}"
                ) from error
            self._unreported = error
            log.error("%s: %s", told, error)

    def _newest(self) -> int | None:
        return max(self.steps(), default=None)


def _only(avals: dict[str, Any], globs: Sequence[str]) -> dict[str, Any]:
    for glob in globs:
        if not any(manifests.matches(path, [glob]) for path in avals):
            raise ValueError(
                f"checkpoint: only={glob!r} matches no leaf\n"
                f"  fix:      leaves are called {', '.join(list(avals)[:4])}, ..."
            )
    return {path: a for path, a in avals.items() if not globs or manifests.matches(path, globs)}


def _check(saved: Manifest, read: dict[str, Any], where: str) -> None:
    found = digests(read)
    damaged = [path for path in read if found[path].text != saved.leaves[path].digest]
    if damaged:
        raise CheckpointCorrupted(
            f"checkpoint: {where} is damaged\n"
            f"  got:      {', '.join(damaged[:4])}{' and others' if len(damaged) > 4 else ''}: not what was saved\n"
            f"  {manifests.FALLBACK}"
        )
